"""The tree builder on the PTX machine: recorded trees, generated ones full of ties, refused rows, its own safety."""

import inspect
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree import build
from ddtree.build import (
    FLOOR,
    build_trees,
    build_trees_kernel,
    build_trees_one_warp_kernel,
    choose_kernel,
    comes_first,
    empty_trees,
    worthwhile_size,
)
from ddtree.cuda import Kernel, PtxDevice, watch_launches
from ddtree.kdtr import load
from ddtree.ptx.text import PtxError
from ddtree.tree import DraftTree, build_tree

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

VECTORS = load("fixtures/tree_vectors.kdtr")
CASES = {f"{case['case']} {case['name']} {case['nodes']}": case for case in VECTORS.metadata["cases"]}
FIELDS = ("tokens", "parents", "depths", "scores", "ranks")
WATCHED, FAST = PtxDevice(), PtxDevice(check=False, count=False)


def assert_same(actual: DraftTree, expected: DraftTree) -> None:
    for name in FIELDS:
        a, e = getattr(actual, name), getattr(expected, name)
        np.testing.assert_array_equal(a, e, err_msg=name)
        assert a.dtype == e.dtype and a.tobytes() == e.tobytes(), name


def rows(case: str) -> tuple[np.ndarray, np.ndarray]:
    """The log-probabilities and ids of a recorded case, as a batch of one."""
    return VECTORS[f"{case}.top_log_probs"][None], VECTORS[f"{case}.top_token_ids"][None].astype(np.int64)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_tree_is_built_to_the_bit(name):
    case = CASES[name]
    log_probs, ids = rows(case["case"])
    built = build_trees(log_probs, ids, case["budget"], 42, device=WATCHED if case["nodes"] <= 256 else FAST).tree(0)
    assert_same(built, build_tree(log_probs[0], ids[0], case["budget"], 42))
    np.testing.assert_array_equal(built.parents, VECTORS[f"{case['case']}.parents"])
    np.testing.assert_array_equal(built.tokens[1:], VECTORS[f"{case['case']}.node_token_ids"])


@st.composite
def batches(draw) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Requests whose few different values, -inf among them, make ties the rule."""
    requests, positions, candidates = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    value = st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.5, -1e-40, -3e38, -math.inf]) | st.floats(-9, 0, width=32)
    row = st.lists(value, min_size=candidates, max_size=candidates).map(lambda v: sorted(v, reverse=True))
    log_probs = [[draw(row) for _ in range(positions)] for _ in range(requests)]
    shape = requests, positions, candidates
    ids = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2**40, shape)
    budgets = draw(st.lists(st.integers(0, 70), min_size=requests, max_size=requests))
    roots = draw(st.lists(st.integers(0, 2**40), min_size=requests, max_size=requests))
    return np.array(log_probs, np.float32), ids, budgets, roots


@settings(max_examples=60)
@given(batches())
def test_a_generated_batch_is_built_to_the_bit(batch):
    log_probs, ids, budgets, roots = batch
    trees = build_trees(log_probs, ids, budgets, roots, device=FAST)
    for request, (budget, root) in enumerate(zip(budgets, roots, strict=True)):
        assert_same(trees.tree(request), build_tree(log_probs[request], ids[request], budget, root))


@settings(max_examples=60)
@given(batches(), st.data())
def test_the_limits_are_the_references_in_both_kernels(batch, data):
    log_probs, ids, budgets, roots = batch
    requests = len(log_probs)
    some = lambda values: data.draw(st.none() | st.lists(values, min_size=requests, max_size=requests))  # noqa: E731
    max_depth, chain_length = some(st.integers(0, 6)), some(st.integers(0, 6))
    min_log_prob = some(st.floats(-12, 0) | st.just(-math.inf))
    costs = data.draw(st.none() | st.floats(0.001, 0.5))
    curve = None if costs is None else 1 + costs * np.arange(71.0) ** 1.5
    both = [
        build_all(kernel, log_probs, ids, budgets, roots, max_depth, min_log_prob, chain_length, curve)
        for kernel in (build_trees_kernel, build_trees_one_warp_kernel)
    ]
    for request in range(requests):
        limits = {"max_depth": max_depth, "chain_length": chain_length, "min_log_prob": min_log_prob}
        own = {name: values[request] for name, values in limits.items() if values is not None}
        expected = build_tree(log_probs[request], ids[request], budgets[request], roots[request], **own)
        if curve is not None:
            expected = expected.cut(worthwhile_size(expected, curve, own.get("chain_length", 0)))
        for trees in both:
            assert_same(trees.tree(request), expected)


def build_all(kernel, log_probs, ids, budgets, roots, max_depth, min_log_prob, chain_length, costs):
    """`build_trees` by one of its two kernels."""
    trees = empty_trees(len(log_probs), 71, FAST)
    limits = (max_depth, np.int32), (min_log_prob, float), (chain_length, np.int32)
    kernel(
        *(log_probs, ids, np.array(budgets, np.int32), np.array(roots, np.int64)),
        *(np.array([] if values is None else values, dtype) for values, dtype in limits),
        np.zeros(0) if costs is None else costs,
        *vars(trees).values(),
        device=FAST,
    )
    return trees


def test_the_wrapper_passes_the_limits_on():
    log_probs, ids = rows("001")
    found = build_trees(log_probs, ids, 40, max_depth=3, min_log_prob=-5.0, chain_length=[2], device=WATCHED).tree(0)
    assert_same(found, build_tree(log_probs[0], ids[0], 40, max_depth=3, min_log_prob=-5.0, chain_length=2))
    assert 2 < len(found) < 41 and found.depths.max() == 2
    costs = 1 + 0.02 * np.arange(41)
    stopped = build_trees(log_probs, ids, 40, costs=costs, device=WATCHED).tree(0)
    assert_same(
        stopped, build_tree(log_probs[0], ids[0], 40).cut(worthwhile_size(build_tree(log_probs[0], ids[0], 40), costs))
    )
    assert 1 < len(stopped) < 41


def test_stopping_looks_at_tokens_a_cost():
    """Expected tokens are 1, 1.5, 1.75 and 1.875: at 0.3 a node they yield 1, 1.15, 1.09 and 0.99 a cost."""
    half = np.log(np.float32(0.5))
    tree = build_tree(np.full((3, 1), half), np.zeros((3, 1), np.int64), 3)
    assert worthwhile_size(tree, [1, 1.3, 1.6, 1.9]) == 2
    assert worthwhile_size(tree, [1, 1.05, 1.1, 1.12]) == 4
    assert worthwhile_size(tree, [1, 1.1, 1.2, 1.3]) == 3 and worthwhile_size(tree, [1, 1.1, 1.2, 1.3], 3) == 4
    assert worthwhile_size(tree, [1, 2, 1, 1]) == 1 and worthwhile_size(tree, [1, 1, 1, 1, 9]) == 4
    for costs in ([1, 1, 1], [1, 1, 0, 1], [1, 1, np.inf, 1], [[1, 1, 1, 1]]):
        with pytest.raises(ValueError, match=r"worthwhile_size: costs has dtype .* here 4 or more"):
            worthwhile_size(tree, costs)


def test_limits_may_be_strided_and_places_must_be():
    log_probs, ids = (np.repeat(x, 2, axis=0) for x in rows("001"))
    found = build_trees(
        log_probs, ids, np.array([9, 1, 5, 1], np.int32)[::2], max_depth=np.broadcast_to(2, 2), device=FAST
    )
    for request, budget in enumerate((9, 5)):
        assert_same(found.tree(request), build_tree(log_probs[request], ids[request], budget, max_depth=2))
    with pytest.raises(ValueError, match="empty_trees: places is 0"):
        empty_trees(1, 0, FAST)
    for costs in (np.ones(9), np.ones((10, 1)), np.zeros(10)):
        with pytest.raises(ValueError, match="build_trees: costs has dtype float64 and shape"):
            build_trees(log_probs, ids, 9, costs=costs, device=FAST)
    with pytest.raises(ValueError, match="worthwhile_size: chain_length is -5"):
        worthwhile_size(found.tree(0), np.ones(10), -5)


def test_a_tree_that_no_guess_finds_is_built_by_the_search():
    """Rows of zeros: all prefixes tie, and the tree is the deepest chain and its last siblings. And rounded sums."""
    zeros, ids = np.zeros((2, 15, 40), np.float32), np.arange(1200).reshape(2, 15, 40)
    rounded = -np.sort(10.0 ** np.random.default_rng(3).uniform(-30, 2, (2, 15, 40)), axis=2).astype(np.float32)
    for log_probs in (zeros, rounded):
        trees = build_trees(log_probs, ids, [40, 25], device=WATCHED)
        for request, budget in enumerate((40, 25)):
            assert_same(trees.tree(request), build_tree(log_probs[request], ids[request], budget))


@pytest.mark.parametrize(("positions", "places", "kernel"), [
    (64, 41, build_trees_kernel),
    (65, 41, build_trees_one_warp_kernel),
    (15, 1600, build_trees_one_warp_kernel),
    (15, 1533, build_trees_kernel),
])  # fmt: skip
def test_the_search_builds_what_does_not_fit_the_fast_kernel(positions, places, kernel):
    assert choose_kernel(positions, places, FAST) is kernel
    rng = np.random.default_rng(positions)
    log_probs = -np.sort(rng.exponential(0.05, (1, positions, 9)), axis=2).astype(np.float32)
    ids = rng.integers(0, 99, log_probs.shape)
    with watch_launches() as launches:
        trees = build_trees(log_probs, ids, 40, out=empty_trees(1, places, FAST), device=FAST)
    assert launches[0].kernel == kernel.name
    assert_same(trees.tree(0), build_tree(log_probs[0], ids[0], 40))
    assert -np.finfo(np.float64).max == FLOOR


def test_the_order_of_additions_is_the_references():
    """(score - lp) + next and score + (next - lp) differ here: at 1e20 a float64 step is 16384."""
    log_probs = np.array([[[-1e20, -np.inf], [-6000, -9000]]], np.float32)
    ids = np.zeros(log_probs.shape, np.int64)
    built, expected = build_trees(log_probs, ids, 3, device=WATCHED).tree(0), build_tree(log_probs[0], ids[0], 3)
    assert expected.scores[3] < expected.scores[2] == expected.scores[1]
    assert_same(built, expected)


@settings(max_examples=40)
@given(batches(), st.data())
def test_the_order_of_open_prefixes_is_that_of_their_tuples(batch, data):
    tree = build_tree(batch[0][0], batch[1][0], 30)
    following = np.bincount(tree.parents[1:], minlength=len(tree)) if len(tree) > 1 else np.zeros(1, np.int64)
    node = st.integers(0, len(tree) - 1)
    a, b = data.draw(node), data.draw(node)

    def ranks(i: int) -> tuple[int, ...]:
        return (*(int(r) for r in tree.ranks[tree.path(i)[1:]]), int(following[i]))

    if a != b:
        first = comes_first(a, following[a], b, following[b], tree.parents, tree.ranks, tree.depths)
        assert first == (ranks(a) < ranks(b))


def test_a_request_does_not_depend_on_the_others():
    log_probs, ids = (np.concatenate(parts) for parts in zip(rows("001"), rows("018"), strict=True))
    together = build_trees(log_probs, ids, [64, 16], [1, 2], device=FAST)
    alone = [build_trees(log_probs[r : r + 1], ids[r : r + 1], b, r + 1, device=FAST) for r, b in enumerate((64, 16))]
    for request in range(2):
        assert_same(together.tree(request), alone[request].tree(0))


def test_a_recorded_build_reads_what_its_arrays_hold_at_replay():
    log_probs, ids = rows("001")
    budgets, roots, out = np.array([3], np.int32), np.array([7]), empty_trees(1, 41, FAST)
    with FAST.graph() as graph:
        build_trees(log_probs, ids, budgets, roots, out=out, stream=graph, device=FAST)
    for budget in (40, 9):
        budgets[0], roots[0] = budget, budget
        graph.replay()
        assert_same(out.tree(0), build_tree(log_probs[0], ids[0], budget, budget))


def test_places_beyond_a_tree_hold_the_documented_values():
    trees = build_trees(*rows("014"), 30, 5, device=WATCHED)
    count = int(trees.counts[0])
    assert (count, trees.tokens.shape) == (15, (1, 31))
    for name, value in zip(FIELDS, (-1, -1, 0, -math.inf, -1), strict=True):
        assert set(getattr(trees, name)[0, count:].tolist()) == {value}, name


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 3, 0), (0, 3, 4)])
def test_empty_axes_give_roots_or_nothing(shape):
    trees = build_trees(np.zeros(shape, np.float32), np.zeros(shape, np.int64), 5, 7, device=WATCHED)
    assert trees.counts.tolist() == [1] * shape[0] and (trees.tokens[:, :1] == 7).all()


def test_a_budget_above_the_places_fills_the_places():
    log_probs, ids = rows("001")
    trees = build_trees(log_probs, ids, 64, out=empty_trees(1, 10, WATCHED), device=WATCHED)
    assert_same(trees.tree(0), build_tree(log_probs[0], ids[0], 9))


@pytest.mark.parametrize(("column", "value"), [(5, np.nan), (0, np.nan), (63, -np.nan), (0, 0.5), (0, np.inf), (9, 0)])
def test_a_row_that_breaks_the_order_is_refused_by_name(column, value):
    log_probs, ids = (np.repeat(x, 3, axis=0) for x in rows("001"))
    log_probs[1, 14, column] = value
    log_probs[2, 0, column] = value
    with pytest.raises(ValueError, match="build_trees: row 14 of request 1 in top_log_probs has a NaN, a value"):
        build_trees(log_probs, ids, 20, device=WATCHED)
    out = empty_trees(3, 21, WATCHED)
    with watch_launches(), WATCHED.graph() as graph:
        build_trees(log_probs, ids, 20, out=out, stream=graph, device=WATCHED)
    graph.replay()
    assert out.counts.tolist() == [21, -15, -1]
    assert_same(out.tree(0), build_tree(log_probs[0], ids[0], 20))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"budgets": -1}, ValueError, "budgets is -1; it takes integers of at least 0, one or one a request"),
    ({"budgets": 1.5}, ValueError, "budgets is 1.5; it takes integers"),
    ({"budgets": 2**31}, ValueError, "budgets is 2147483648"),
    ({"budgets": [3, 3]}, ValueError, r"budgets has shape \[2\]; it takes one number or 1 of them"),
    ({"max_depth": -1}, ValueError, "max_depth is -1; it takes integers of at least 0"),
    ({"chain_length": [1.5]}, ValueError, r"chain_length is \[1.5\]; it takes integers"),
    ({"min_log_prob": np.nan}, ValueError, "min_log_prob is nan; it takes numbers"),
    ({"min_log_prob": "low"}, ValueError, "min_log_prob is 'low'; it takes numbers"),
    ({"root_tokens": -1}, ValueError, "root_tokens is -1"),
    ({"top_token_ids": np.zeros((1, 15, 64), np.int32)}, TypeError, "top_token_ids is int32.* it must be int64"),
    ({"top_token_ids": np.zeros((1, 15, 63), np.int64)}, ValueError, "its K in .* must be 64, as in top_log_probs"),
    ({"top_log_probs": np.zeros((1, 15, 64))}, TypeError, "it must be float32"),
    ({"top_log_probs": np.zeros((15, 64), np.float32)}, ValueError, "it must have 3 axes"),
])  # fmt: skip
def test_a_wrong_argument_is_refused(change, error, message):
    arguments = dict(zip(("top_log_probs", "top_token_ids"), rows("001"), strict=True))
    arguments |= {"budgets": 3, "root_tokens": 0}
    with pytest.raises(error, match=f"^build_trees: .*{message}"):
        build_trees(**(arguments | change), device=WATCHED)


@pytest.mark.parametrize("budget", [9000, 2**31 - 1])
def test_a_budget_beyond_the_shared_memory_is_refused_with_the_largest(budget):
    with pytest.raises(ValueError, match=rf"^build_trees: a budget is {budget}; .* at most \d+ nodes besides"):
        build_trees(*rows("001"), budget, device=WATCHED)


def test_the_largest_budget_named_is_one_that_runs():
    with pytest.raises(ValueError, match="at most") as caught:
        build_trees(*rows("001"), 10**6, device=FAST)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    empty = np.zeros((1, 0, 4), np.float32), np.zeros((1, 0, 4), np.int64)
    assert build_trees(*empty, most, device=FAST).tokens.shape == (1, most + 1)
    with pytest.raises(ValueError, match=f"a budget is {most + 1}; .* at most {most} nodes"):
        build_trees(*empty, most + 1, device=FAST)


def test_a_budget_that_is_none_is_refused_before_memory_is_asked_for():
    two = [np.repeat(x, 2, axis=0) for x in rows("001")]
    with pytest.raises(ValueError, match="budgets is 2147483648"):
        build_trees(*two, 2**31, device=WATCHED)


def test_budgets_on_a_gpu_need_a_place_for_the_trees():
    class OnGpu:
        __cuda_array_interface__ = {}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"budgets are on the GPU.*pass out=empty_trees\(R, N\)"):
        build_trees(*rows("001"), OnGpu(), device=WATCHED)


def changed_kernel(name: str, part: str, removed: int, folder) -> Kernel:
    """The kernel `name` with one `cuda.sync...()` of its function `part` taken out."""
    changed = {}
    for piece in dict.fromkeys((part, *(("list_best",) if part == "list_prefixes" else ()), name)):
        function = getattr(build, piece).function
        source = inspect.getsource(function)
        if piece == part:
            places = [
                m for word in ("cuda.syncwarp()", "cuda.syncthreads()") for m in re.finditer(re.escape(word), source)
            ]
            source = source[: places[removed].start()] + "pass" + source[places[removed].end() :]
        path = folder / f"{piece}.py"
        path.write_text(source)
        scope = {**function.__globals__, **changed}
        exec(compile(source, path, "exec"), scope)
        changed[piece] = scope[piece]
    return changed[name]


@pytest.mark.parametrize(("name", "part", "removed"), [
    ("build_trees_one_warp_kernel", "build_by_warp", 0),
    ("build_trees_one_warp_kernel", "build_by_warp", 1),
    ("build_trees_kernel", "list_prefixes", 0),
])  # fmt: skip
def test_without_one_of_its_barriers_a_kernel_is_a_race(name, part, removed, tmp_path):
    """The clean runs above mean something: the barriers guard an exchange, and the machine sees it."""
    kernel = changed_kernel(name, part, removed, tmp_path)
    none = np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.int32), np.zeros(0)
    inputs = np.array([64], np.int32), np.zeros(1, np.int64), *none
    with pytest.raises(PtxError) as caught:
        kernel(*rows("001"), *inputs, *vars(empty_trees(1, 65, WATCHED)).values(), device=WATCHED)
    assert caught.value.kind == "race"


def test_the_cost_is_counted():
    """Exact, so a change of the kernel or the compiler shows: a bounded number of instructions for each of 16 warps."""
    with watch_launches() as launches:
        build_trees(*rows("001"), 64, device=WATCHED)
    counters = launches[0].counters
    assert launches[0].grid == (1,) and launches[0].kernel == "build_trees"
    assert counters.warp_instructions < 16 * 1500
    assert counters.global_store_bytes < 2 * 65 * 28 + 4
