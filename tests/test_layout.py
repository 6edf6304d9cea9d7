"""Layouts on the PTX machine: recorded trees, SGLang's and generated ones, padding, graphs, hostile input, races."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree import layout
from ddtree.build import Trees, build_trees, empty_trees
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice, watch_launches
from ddtree.kdtr import load
from ddtree.layout import (
    TreeLayout,
    attention_mask,
    attention_mask_ref,
    climb,
    eagle_tensors,
    eagle_tensors_ref,
    empty_eagle_tensors,
    empty_layout,
    layout_trees,
    layout_trees_ref,
)
from ddtree.ptx.text import PtxError

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

VECTORS = load("fixtures/tree_vectors.kdtr")
WATCHED, FAST = PtxDevice(), PtxDevice(check=False, count=False)


def batch(rows: list[list[int]], places: int = 0, counts: list[int] | None = None) -> Trees:
    """`Trees` from the parents of each request, padded as `build_trees` pads; tokens are 100 + node."""
    places = places or max(map(len, rows))
    parents = np.full((len(rows), places), -1, np.int32)
    depths, tokens = np.zeros_like(parents), np.full(parents.shape, -1, np.int64)
    for request, row in enumerate(rows):
        parents[request, : len(row)] = row
        tokens[request, : len(row)] = 100 + np.arange(len(row))
        for node in range(1, len(row)):
            depths[request, node] = depths[request, row[node]] + 1
    zeros = np.zeros(parents.shape)
    numbers = np.array(counts or [len(row) for row in rows], np.int32)
    return Trees(tokens, parents, depths, zeros, zeros.astype(np.int32), numbers)


def same(actual, expected, name: str = "") -> None:
    for field in vars(expected):
        assert_equal(getattr(actual, field), getattr(expected, field), f"{name} {field}")


def check(trees: Trees, lengths: np.ndarray, device: PtxDevice = FAST) -> TreeLayout:
    """The layout, equal to the reference and to `DraftTree`, from outputs on which every element was poison."""
    made, expected = layout_trees(trees, lengths, device=device), layout_trees_ref(trees, lengths)
    same(made, expected)
    for request in np.flatnonzero(trees.counts > 0):
        tree, n = trees.tree(request), int(trees.counts[request])
        visible = np.pad(tree.visibility, [(0, 0), (0, made.positions.shape[1] - n)])
        assert_equal(made.masks[request, :n], layout.pack_words(visible), "visibility")
        assert_equal(made.positions[request, :n], tree.positions(int(lengths[request])), "positions")
    return made


@pytest.mark.parametrize("case", [c["case"] for c in VECTORS.metadata["cases"]])
def test_a_recorded_tree_is_laid_out_to_the_bit(case):
    parents = VECTORS[f"{case}.parents"].tolist()
    device = WATCHED if len(parents) <= 257 else FAST
    made = check(batch([parents]), np.array([7]), device)
    bits = np.unpackbits(VECTORS[f"{case}.visibility_bits"], axis=-1, bitorder="little", count=len(parents))
    assert_equal(made.masks[0], layout.pack_words(bits.astype(np.bool_)), "recorded visibility")


SGLANG = (  # parents, tokens and what sglang's test_build_eagle_tree.py expects with 5 and 10 committed
    [[-1, 0, 0, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 1, 1, 3, 6]],
    {
        "positions": [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14],
        "retrieve_index": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        "retrieve_next_token": [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]],
        "retrieve_next_sibling": [[-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1]],
    },
)


@pytest.mark.parametrize("mode", ["full", "qlen", "bits"])
def test_the_tensors_of_sglangs_own_test_come_out(mode):
    trees = batch(SGLANG[0])
    tensors = eagle_tensors(trees, layout_trees(trees, [5, 10], device=WATCHED), [5, 10], mode, device=WATCHED)
    for name, values in SGLANG[1].items():
        assert_equal(getattr(tensors, name), np.array(values, np.int64), name)
    assert_equal(tensors.candidates, trees.tokens, "candidates")
    visible = np.concatenate([trees.tree(request).visibility[None] for request in range(2)])
    if mode == "bits":
        assert_equal(tensors.tree_mask, np.packbits(visible, axis=-1, bitorder="little").ravel(), "bits")
    elif mode == "qlen":
        assert_equal(tensors.tree_mask, visible.ravel(), "qlen")
    else:
        rows = [np.pad(visible[r], [(0, 0), (n, 0)], constant_values=True).ravel() for r, n in enumerate((5, 10))]
        assert_equal(tensors.tree_mask, np.concatenate(rows), "full")


def test_the_links_of_the_golden_acceptance_case_come_out():
    """SGLang's acceptance test: its second tree lists the root's children as 4, 1; here children ascend."""
    trees = batch([[-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 0, 4]])
    made = check(trees, np.array([3, 4]), WATCHED)
    assert made.first_children.tolist() == [[1, 2, -1, 4, 5, -1], [1, 2, 3, -1, 5, -1]]
    assert made.next_siblings.tolist() == [[-1, 3, -1, -1, -1, -1], [-1, 4, -1, -1, -1, -1]]


@st.composite
def batches(draw, most: int = 70) -> tuple[Trees, np.ndarray]:
    """Trees of any shape, some refused, and lengths."""
    requests, places = draw(st.integers(1, 4)), draw(st.integers(1, most))
    rng, rows, counts = np.random.default_rng(draw(st.integers(0, 2**32))), [], []
    for _ in range(requests):
        n, reach = draw(st.integers(1, places)), draw(st.sampled_from([1, 3, 40, 1000]))
        rows.append([-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, n))])
        counts.append(draw(st.sampled_from([n, n, n, -1, -7])))
    rows = [row if count > 0 else [-1] for row, count in zip(rows, counts, strict=True)]
    return batch(rows, places, counts), rng.integers(0, 90, requests)


@settings(max_examples=40)
@given(batches())
def test_a_generated_batch_is_laid_out_to_the_bit(given_batch):
    check(*given_batch)


@settings(max_examples=10)
@given(batches(most=400))
def test_trees_of_many_blocks_are_laid_out_to_the_bit(given_batch):
    check(*given_batch)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(["full", "qlen", "bits"]))
def test_generated_eagle_tensors_equal_the_reference(data, mode):
    trees, lengths = data.draw(batches(most=32 if mode == "bits" else 45))
    made = layout_trees(trees, lengths, device=FAST)
    same(eagle_tensors(trees, made, lengths, mode, device=FAST), eagle_tensors_ref(trees, made, lengths, mode), mode)


@settings(max_examples=20)
@given(batches(), st.integers(0, 60), st.sampled_from(["bool", "float32", "float16", "bfloat16"]), st.booleans())
def test_generated_attention_masks_equal_the_reference(given_batch, more, dtype, finite):
    trees, lengths = given_batch
    made, capacity = layout_trees(trees, lengths, device=FAST), int(lengths.max()) + more
    mask = attention_mask(made, lengths, capacity=capacity, dtype=dtype, finite=finite, device=FAST)
    seen = attention_mask_ref(made, lengths, capacity)
    hidden = {"float32": np.finfo(np.float32).min, "float16": -65504, "bfloat16": 0xFF7F} if finite else {
        "float32": -np.inf, "float16": -np.inf, "bfloat16": 0xFF80}  # fmt: skip
    element = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    expected = seen if dtype == "bool" else np.where(seen, 0, hidden[dtype]).astype(element)
    assert_equal(mask, expected, dtype)


def test_masks_longer_than_a_block_writes_are_whole():
    trees, lengths = batch([[-1, *range(33)], [-1]], 34), np.array([2500, 1025])
    made = layout_trees(trees, lengths, device=WATCHED)
    expected = attention_mask_ref(made, lengths, 2600)
    assert_equal(attention_mask(made, lengths, capacity=2600, device=WATCHED), expected, "bool")
    same(eagle_tensors(trees, made, lengths, device=WATCHED), eagle_tensors_ref(trees, made, lengths, "full"))


def test_many_requests_have_their_rows_where_those_before_end():
    trees = batch([[-1, 0, 1], [-1], [-1, 0]] * 100, 3)
    lengths = np.random.default_rng(0).integers(0, 9, 300)
    made = layout_trees(trees, lengths, device=WATCHED)
    same(made, layout_trees_ref(trees, lengths))
    same(eagle_tensors(trees, made, lengths, device=WATCHED), eagle_tensors_ref(trees, made, lengths, "full"))


def test_a_refused_request_is_a_root_alone():
    log_probs = -np.sort(np.random.default_rng(0).random((3, 4, 8), np.float32), axis=2)
    log_probs[1, 2, 3] = np.nan
    inputs = log_probs, np.zeros((3, 4, 8), np.int64), np.full(3, 9, np.int32), np.array([5, 6, 7])
    trees, laid, lengths = empty_trees(3, 10, WATCHED), empty_layout(3, 10, WATCHED), np.array([10, 20, 30])
    with WATCHED.graph() as graph:
        build_trees(*inputs, out=trees, stream=graph, device=WATCHED)
        layout_trees(trees, lengths, out=laid, stream=graph, device=WATCHED)
    graph.replay()
    assert trees.counts[1] < 0 < trees.counts[0]
    assert laid.positions[1].tolist() == [20] * 10
    assert laid.masks[1, :, 0].tolist() == [1 << i for i in range(10)]
    assert set(laid.first_children[1]) == set(laid.next_siblings[1]) == {-1}
    tensors = eagle_tensors(trees, laid, lengths, "qlen", device=WATCHED)
    assert tensors.candidates[1].tolist() == [6] * 10
    same(laid, layout_trees_ref(trees, lengths))


def test_a_graph_follows_the_lengths_and_the_trees_on_the_device():
    trees, lengths = batch([[-1, 0, 0, 1], [-1, 0]], 5), np.array([3, 40])
    laid, eagle = empty_layout(2, 5, WATCHED), empty_eagle_tensors(2, 5, "full", 60, WATCHED)
    mask = WATCHED.empty((2, 1, 5, 45), np.float32)
    with WATCHED.graph() as graph:
        layout_trees(trees, lengths, out=laid, stream=graph, device=WATCHED)
        eagle_tensors(trees, laid, lengths, out=eagle, stream=graph, device=WATCHED)
        attention_mask(laid, lengths, dtype="float32", out=mask, stream=graph, device=WATCHED)
    for change in ([3, 40], [4, 38], [0, 0]):
        lengths[:] = change
        trees.parents[0, 3], trees.depths[0, 3] = (1, 2) if change[0] else (0, 1)
        graph.replay()
        expected = eagle_tensors_ref(trees, laid, lengths, "full")
        same(laid, layout_trees_ref(trees, lengths))
        end = len(expected.tree_mask)
        same(replace(eagle, tree_mask=np.asarray(eagle.tree_mask[:end])), expected)
        seen = attention_mask_ref(laid, lengths, 40)
        assert_equal(np.asarray(mask), np.where(seen, 0, -np.inf).astype(np.float32), "mask")


def test_a_full_mask_that_outgrows_its_array_ends_with_it():
    trees, lengths = batch([[-1, 0, 1], [-1, 0]], 3), np.array([4, 5])
    laid, eagle = layout_trees(trees, lengths, device=WATCHED), empty_eagle_tensors(2, 3, "full", 4, WATCHED)
    whole = eagle_tensors_ref(trees, laid, lengths, "full").tree_mask
    with WATCHED.graph() as graph:
        eagle_tensors(trees, laid, lengths, out=eagle, stream=graph, device=WATCHED)
    graph.replay()
    assert_equal(np.asarray(eagle.tree_mask), whole[: len(eagle.tree_mask)], "the part that fits")


def test_a_broken_tree_on_the_device_ends_and_stays_in_bounds():
    trees = batch([[-1, 0, 1, 2]], 4)
    trees.parents[:] = [[3, 2, 9, -5]]
    laid = empty_layout(1, 4, WATCHED)
    with WATCHED.graph() as graph:
        layout_trees(replace(trees, counts=np.array([99], np.int32)), 1, out=laid, stream=graph, device=WATCHED)
    graph.replay()
    assert laid.masks[0, :, 0].tolist() == [1, 2, 4, 8]
    assert set(laid.first_children[0]) == set(laid.next_siblings[0]) == {-1}


def test_the_most_places_named_are_places_that_run():
    with pytest.raises(ValueError, match=r"^layout_trees: the trees have 5000 places; .* at most \d+$") as caught:
        layout_trees(batch([[-1]], 5000), 1, device=FAST)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    made = layout_trees(batch([[-1, *(i // 3 for i in range(most - 1))]]), 1, device=FAST)
    assert made.next_siblings[0, :4].tolist() == [-1, 2, 3, -1]
    with pytest.raises(ValueError, match=f"the trees have {most + 1} places"):
        layout_trees(batch([[-1]], most + 1), 1, device=FAST)


def test_a_climb_sets_the_bits_of_a_path():
    words = np.zeros(4, np.uint32)
    parents = [-1, *range(39)]
    climb(39, parents, words, 1)
    assert words.tolist() == [0, 2**32 - 1, 2**8 - 1, 0]


def test_no_requests_give_empty_arrays():
    trees = batch([[-1, 0]])
    trees = Trees(*(np.ascontiguousarray(x[:0]) for x in vars(trees).values()))
    laid = layout_trees(trees, 5, device=WATCHED)
    assert laid.masks.shape == (0, 2, 1)
    assert eagle_tensors(trees, laid, 5, device=WATCHED).tree_mask.shape == (0,)
    assert attention_mask(laid, capacity=3, device=WATCHED).shape == (0, 1, 2, 5)


@pytest.mark.parametrize(("change", "message"), [
    ({"parents": np.array([[-1, 1, 0]], np.int32)}, "request 0: node 1 has parent 1 and depth 1"),
    ({"depths": np.array([[0, 1, 3]], np.int32)}, "request 0: node 2 has parent 0 and depth 3"),
    ({"counts": np.array([4], np.int32)}, "request 0 has 4 nodes; 3 places hold 1 to 3"),
    ({"counts": np.array([0], np.int32)}, "request 0 has 0 nodes"),
    ({"parents": np.array([-1, 0, 0], np.int32)}, r"parents has shape \[3\]; it takes \(R, N\)"),
    ({"depths": np.array([[0, 1, 1, 1]], np.int32)}, r"depths is int32\[1, 4\]; its N in \[R, N\] must be 3"),
])  # fmt: skip
def test_what_is_no_tree_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"^layout_trees: {message}"):
        layout_trees(replace(batch([[-1, 0, 0]]), **change), 5, device=WATCHED)


@pytest.mark.parametrize("lengths", [-1, 1.5, [1, 2.0], True, 2**31, [[1]], [3, -3], "7"])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(ValueError, match=r"^layout_trees: lengths is .*; it takes integers from 0 to 2147483647"):
        layout_trees(batch([[-1], [-1]]), lengths, device=WATCHED)


def test_lengths_of_another_number_of_requests_are_refused():
    message = r"^layout_trees: lengths has 3 numbers and the trees are 2; pass one a request"
    with pytest.raises(ValueError, match=message):
        layout_trees(batch([[-1], [-1]]), [1, 2, 3], device=WATCHED)


def test_int32_lengths_on_the_device_are_refused():
    message = r"^layout_trees: lengths is int32\[1\]; it must be int64"
    with WATCHED.graph() as graph, pytest.raises(TypeError, match=message):
        layout_trees(batch([[-1]]), np.array([1], np.int32), stream=graph, device=WATCHED)


@pytest.mark.parametrize(("call", "message"), [
    (lambda t, x: eagle_tensors(t, x, 5, "packed", device=WATCHED), "mode is 'packed'; it is 'full', 'qlen' or 'bits'"),
    (lambda t, x: eagle_tensors(t, x, 5, "bits", device=WATCHED), "40 places; mode 'bits' takes 1 to 32"),
    (lambda t, x: empty_eagle_tensors(1, 1025), "the trees have 1025 places; mode 'full' takes 1 to 1024"),
    (lambda t, x: eagle_tensors(t, x, 5, out=empty_eagle_tensors(1, 40, "qlen", 0, WATCHED), device=WATCHED),
     r"positions has shape \[40\] and tree_mask holds 1600 elements; they take \[40\] and at least 1800"),
    (lambda t, x: attention_mask(x, 5, dtype="float8", device=WATCHED), "dtype is 'float8'; it is 'bool', 'float32'"),
    (lambda t, x: attention_mask(x, 5, capacity=4, device=WATCHED), "the capacity is 4, the largest length 5"),
    (lambda t, x: attention_mask(x, out=np.zeros((1, 1, 40, 39), np.bool_), device=WATCHED), "the capacity is -1, the"),
    (lambda t, x: attention_mask(x, 0, dtype="float32", out=np.zeros((1, 1, 40, 40)), device=WATCHED),
     r"out is float64\[1, 1, 40, 40\]; it must be float32"),
    (lambda t, x: attention_mask(replace(x, masks=np.zeros((1, 40, 1), np.uint32)), device=WATCHED),
     r"masks has shape \[1, 40, 1\]; 40 places take rows of 2 words"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    trees = batch([[-1]], 40)
    with pytest.raises((TypeError, ValueError), match=message):
        call(trees, layout_trees(trees, 5, device=WATCHED))


def test_lengths_on_a_gpu_need_a_place_for_a_full_mask():
    trees = batch([[-1, 0]])
    laid, lengths = layout_trees(trees, 5, device=WATCHED), np.array([5])
    with WATCHED.graph() as graph, pytest.raises(ValueError, match=r"the size of the mask is not known; pass"):
        eagle_tensors(trees, laid, lengths, stream=graph, device=WATCHED)
    with WATCHED.graph() as graph, pytest.raises(ValueError, match="the capacity is None, the largest length None"):
        attention_mask(laid, lengths, stream=graph, device=WATCHED)


@pytest.mark.parametrize("removed", [0, 1])
@pytest.mark.parametrize("name", ["layout_trees_kernel", "link_children"])
def test_without_one_of_its_barriers_the_kernel_is_a_race(name, removed, tmp_path):
    """The clean runs above mean something: each barrier of the block guards an exchange, and the machine sees it."""
    barrier = "cuda.syncthreads()"
    source = inspect.getsource(layout.link_children.function) + inspect.getsource(layout.layout_trees_kernel.function)
    start = source.index(f"def {name}")
    parts = source[start:].split(barrier)
    changed = source[:start] + barrier.join(parts[: removed + 1]) + "pass" + barrier.join(parts[removed + 1 :])
    assert changed.count(barrier) == source.count(barrier) - 1
    path = tmp_path / "changed.py"
    path.write_text(changed)
    scope = {**vars(layout.links), **vars(layout.trees)}
    exec(compile(changed, path, "exec"), scope)
    trees = batch([[-1, *(max(0, i - 40) for i in range(1, 200))]])
    inputs = trees.parents, trees.depths, trees.counts, np.array([3])
    with pytest.raises(PtxError) as caught:
        scope["layout_trees_kernel"](*inputs, *vars(empty_layout(1, 200, WATCHED)).values(), device=WATCHED)
    assert caught.value.kind in ("race", "uninitialised")


def test_the_cost_is_counted():
    """Exact, so a change of the kernel or the compiler shows: each byte of the result is written once."""
    trees = batch([[-1, *(max(0, i - 7) for i in range(1, 65))]])
    with watch_launches() as launches:
        laid = layout_trees(trees, 5, device=WATCHED)
    counters, written = launches[0].counters, sum(x.nbytes for x in vars(laid).values())
    assert launches[0].grid == (1, 2)
    assert counters.global_store_bytes == written
    assert counters.warp_instructions < 6000


def test_the_old_names_are_the_new_functions():
    assert layout.lay_out is layout.layout_trees and layout.lay_out_ref is layout.layout_trees_ref
    assert layout.lay_out_kernel is layout.layout_trees_kernel


def test_no_places_are_refused():
    with pytest.raises(ValueError, match="empty_layout: places is 0"):
        empty_layout(1, 0, PtxDevice())
