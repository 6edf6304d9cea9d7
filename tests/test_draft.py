"""One call from logits to trees: recorded runs, numpy against the PTX machine, graphs, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddtree
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice, watch_launches
from ddtree.draft import Draft, count_candidates, draft_tree, empty_draft
from ddtree.kdtr import load
from ddtree.tree import build_tree, top_log_probs

RUNS = {name: load(f"fixtures/e2e_{name}.kdtr") for name in ("qwen3", "deepseek_v3")}
ROUNDS = RUNS["qwen3"]["p0.b64.draft_logits"]
FAST, WATCHED = PtxDevice(check=False, count=False), PtxDevice()
needs_compiler = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import numba_cuda"], capture_output=True).returncode != 0,
    reason="compiling kernels needs the extra: pip install -e '.[dev]'",
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, shape).astype(np.float32)


def assert_same(actual: Draft, expected: Draft) -> None:
    for part in ("top", "trees", "layout"):
        for name, wanted in vars(getattr(expected, part)).items():
            if name != "work":
                given = np.asarray(getattr(getattr(actual, part), name))
                assert given.dtype == wanted.dtype, f"{part}.{name}"
                assert_equal(given, wanted, f"{part}.{name}")


RECORDED = [(run, name) for run, file in RUNS.items() for name in file if name.endswith(".b64.draft_logits")]


@pytest.mark.parametrize(("run", "name"), RECORDED)
def test_the_trees_of_a_recorded_run_come_out_of_its_drafters_logits(run, name):
    file, prefix = RUNS[run], name.removesuffix("draft_logits")
    trees = draft_tree(file[name], 64).trees
    assert (trees.counts == 65).all()
    assert_equal(trees.parents.ravel(), file[f"{prefix}parents"], "parents")
    assert_equal(trees.depths[:, 1:].ravel(), file[f"{prefix}node_depths"], "depths")
    assert_equal(trees.tokens[:, 1:].ravel().astype(np.int32), file[f"{prefix}node_token_ids"], "tokens")


@needs_compiler
def test_the_kernels_make_the_recorded_trees_too():
    rounds = ROUNDS[[0, 7]]
    assert_same(draft_tree(rounds, 64, [3, 4], lengths=[111, 150], device=FAST),
                draft_tree(rounds, 64, [3, 4], lengths=[111, 150]))  # fmt: skip


def test_the_numpy_draft_is_the_three_references_one_after_the_other():
    draft = draft_tree(ROUNDS[0], 20, 65, lengths=7)
    expected = build_tree(draft.top.log_probs[0], draft.top.ids[0], 20, 65)
    tree = draft.tree()
    for name in ("tokens", "parents", "depths", "scores", "ranks"):
        assert_equal(getattr(tree, name), getattr(expected, name), name)
    assert_equal(draft.top.ids[0], top_log_probs(ROUNDS[0], 20)[1], "ids")
    assert_equal(draft.layout.positions[0], expected.positions(7), "positions")
    bits = draft.layout.masks[0, :, :1] >> np.arange(21, dtype=np.uint32) & 1
    assert_equal(bits.astype(bool), expected.visibility, "masks")


OPTIONS = {
    "none": {},
    "temperature": {"temperature": [0.7, 1.5, 3.0]},
    "bias": {"bias": normal(3, 112, seed=5)},
    "allowed": {"allowed": np.random.default_rng(6).random((3, 112)) < 0.3},
    "all of them": {"temperature": 0.5, "bias": normal(3, 112), "allowed": np.arange(336).reshape(3, 112) % 5 > 0},
    "max_depth": {"max_depth": [0, 2, 4]},
    "min_log_prob": {"min_log_prob": [-3.5, -np.inf, 0]},
    "chain_length": {"chain_length": [4, 0, 2], "min_log_prob": -2.0},
    "costs": {"costs": 1 + np.arange(13) / 8, "chain_length": [0, 3, 0]},
}


@needs_compiler
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_has_the_same_bits_in_numpy_and_on_the_machine(name):
    logits, given = normal(3, 4, 112), {"lengths": [0, 9, 1000], **OPTIONS[name]}
    drafted = draft_tree(logits, [12, 0, 5], [1, 2, 3], device=WATCHED, **given)
    assert_same(drafted, draft_tree(logits, [12, 0, 5], [1, 2, 3], **given))
    if name not in ("none", "min_log_prob"):
        plain = draft_tree(logits, [12, 0, 5], [1, 2, 3], lengths=[0, 9, 1000]).trees
        assert (plain.tokens != drafted.trees.tokens).any(), "the option changes nothing"


@st.composite
def batches(draw) -> tuple[np.ndarray, dict]:
    """A batch of requests with few or many different values, masked tokens, and limits of each."""
    requests, positions, vocabulary = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    x = rng.normal(0, draw(st.sampled_from([0.3, 5, 100])), (requests, positions, vocabulary))
    x = np.round(x * 2) / 2 if draw(st.booleans()) else x
    x[rng.random(x.shape) < draw(st.sampled_from([0, 0.5, 1]))] = -np.inf
    integers = {
        name: draw(st.lists(st.integers(0, most), min_size=requests, max_size=requests))
        for name, most in {"budget": 30, "root_tokens": 2**40, "lengths": 2**31 - 1}.items()
    }
    chosen = {
        "temperature": rng.uniform(0.3, 2, requests),
        "allowed": rng.random((requests, vocabulary)) < 0.6,
        "bias": rng.normal(0, 1, (requests, vocabulary)).astype(np.float32),
        "max_depth": rng.integers(0, 5, requests),
        "min_log_prob": -rng.uniform(0, 9, requests),
        "chain_length": rng.integers(0, 5, requests),
        "costs": np.cumsum(rng.uniform(0.02, 0.5, 31)),
    }
    return x.astype(np.float32), integers | {name: v for name, v in chosen.items() if draw(st.integers(0, 3)) == 0}


@needs_compiler
@settings(max_examples=40)
@given(batches())
def test_a_generated_batch_has_the_same_bits_in_numpy_and_on_the_machine(case):
    logits, given = case
    assert_same(draft_tree(logits, device=FAST, **given), draft_tree(logits, **given))


@needs_compiler
def test_other_formats_are_read_as_their_float32_values():
    x = normal(3, 64)
    half, bits = x.astype(np.float16), (x.view(np.uint32) >> 16).astype(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    for logits, same in ((half, half.astype(np.float32)), (bits, values)):
        expected = draft_tree(same, 9)
        assert_same(draft_tree(logits, 9), expected)
        assert_same(draft_tree(logits, 9, device=FAST), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "budget"), [((2, 5), 20), ((3, 1), 4), ((0, 4, 8), 3), ((2, 0, 8), 3), ((2, 3, 8), 0)]
)
def test_small_and_empty_shapes_have_small_trees(shape, budget):
    draft = draft_tree(normal(*shape), budget)
    assert draft.top.ids.shape[-1] == count_candidates(budget, shape[-1]) <= shape[-1]
    assert draft.trees.tokens.shape[1] == draft.layout.positions.shape[1] == budget + 1
    assert_same(draft_tree(normal(*shape), budget, device=WATCHED), draft)


def test_candidates_end_at_1024_and_the_tree_goes_on():
    draft = draft_tree(normal(1, 2, 3000), 1500)
    assert draft.top.ids.shape == (1, 2, 1024) and draft.trees.counts == 1501
    assert count_candidates(0, 5) == 1


class Tensor:
    """An array that is not numpy's and says what it is by DLPack, as torch's do."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    def __getitem__(self, key: object) -> "Tensor":
        return Tensor(self.array[key])

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@needs_compiler
def test_arrays_of_other_libraries_go_to_the_kernels_as_they_are():
    logits = normal(3, 64)
    with watch_launches() as launches:
        draft = draft_tree(Tensor(logits), 6, device=FAST)
    assert [launch.kernel for launch in launches][-2:] == ["build_trees", "layout_trees"]
    assert_same(draft, draft_tree(logits, 6))


def test_numpy_alone_launches_nothing():
    with watch_launches() as launches:
        draft_tree(normal(3, 64), 6)
    assert not launches


@needs_compiler
def test_a_graph_follows_what_its_arrays_hold():
    logits, lengths = WATCHED.array(ROUNDS[:2, :4]), WATCHED.array(np.array([5, 6]))
    bias, allowed = WATCHED.array(np.zeros((2, 260), np.float32)), WATCHED.array(np.ones((2, 260), np.bool_))
    out = empty_draft(logits.shape, 8, WATCHED)
    given = {"lengths": lengths, "bias": bias, "allowed": allowed}
    with watch_launches() as recorded, WATCHED.graph() as graph:
        assert draft_tree(logits, [7, 3], out=out, stream=graph, device=WATCHED, **given) is out
    assert all(launch.counters is None for launch in recorded), "a launch ran while the graph recorded"
    for number in range(3):
        logits[:], lengths[:] = ROUNDS[number : number + 2, :4], [number, 2**20]
        bias[:, number], allowed[:, 5 * number] = -1, False
        for part in (out.trees, out.layout):
            for array in vars(part).values():
                array.view(np.uint8)[:] = 0x77
        graph.replay()
        assert_same(out, draft_tree(logits.copy(), [7, 3], **{name: x.copy() for name, x in given.items()}))


@needs_compiler
def test_a_recorded_call_asks_the_device_for_no_memory(monkeypatch):
    logits, out = normal(2, 3, 64), empty_draft((2, 3, 64), 5, FAST)
    draft_tree(logits, 4, out=out, device=FAST)  # the first call may make what all later ones use

    def refuse(*arguments):
        raise AssertionError(f"memory for {arguments}")

    monkeypatch.setattr(FAST, "empty", refuse)
    monkeypatch.setattr(FAST, "array", refuse)
    with FAST.graph() as graph:
        given = {"budget": np.array([4, 2]), "root_tokens": np.array([8, 9]), "lengths": np.array([5, 6])}
        draft_tree(logits, **given, out=out, stream=graph, device=FAST)
    graph.replay()
    assert out.trees.counts.tolist() == [5, 3] and out.trees.tokens[:, 0].tolist() == [8, 9]


@needs_compiler
def test_a_refused_row_is_named_or_in_a_graph_marked():
    logits = normal(2, 3, 64)
    logits[1, 2, 5] = np.inf
    for where in ({}, {"device": FAST}):
        with pytest.raises(ValueError, match=r"^draft_tree: row \[1, 2\] has a NaN, \+inf or a logit above 1048576"):
            draft_tree(logits, 4, **where)
    out = empty_draft(logits.shape, 5, FAST)
    with FAST.graph() as graph:
        draft_tree(logits, 4, lengths=9, out=out, stream=graph, device=FAST)
    graph.replay()
    assert out.trees.counts.tolist() == [5, -3] and out.layout.positions[1].tolist() == [9] * 5
    assert_equal(out.tree(0).tokens, draft_tree(logits[0], 4).tree().tokens, "tokens")
    with pytest.raises(ValueError, match="row 2 of request 1 has a NaN"):
        out.tree(1)


class OnGpu:
    """Something that says it is in the memory of a GPU."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<i4", "data": (0, False), "version": 3}  # noqa: RUF012


LOGITS = normal(2, 3, 64)
WRONG = {
    "no array": ({"logits": [[1.0, 2.0]], "budget": 3}, TypeError, "logits is a list; it takes an array"),
    "one axis": ({"logits": LOGITS[0, 0]}, ValueError, r"logits has shape \[64\]; it takes \(L, V\), or"),
    "no vocabulary": ({"logits": LOGITS[..., :0]}, ValueError, "V from 1 to 262144"),
    "a dtype": ({"logits": LOGITS.astype(np.float64)}, TypeError, "logits is float64; it takes float32"),
    "a budget": ({"budget": -1}, ValueError, "budget is -1; it takes integers from 0 to 2147483647"),
    "a kind of budget": ({"budget": 2.5}, ValueError, "budget is 2.5; it takes integers"),
    "budgets": ({"budget": [3, 4, 5]}, ValueError, r"budget is \[3, 4, 5\]; it takes .* each of 2 requests"),
    "a length": ({"lengths": -4}, ValueError, "lengths is -4"),
    "a length beyond": ({"lengths": 2**31}, ValueError, "lengths is 2147483648"),
    "a root": ({"root_tokens": [1.5, 2]}, ValueError, r"root_tokens is \[1.5, 2\]"),
    "temperature": ({"temperature": 0}, ValueError, "temperature is 0"),
    "bias": ({"bias": LOGITS[0]}, ValueError, r"bias has shape \[3, 64\]; it takes one row a request: \[2, 64\]"),
    "allowed": ({"allowed": LOGITS[0] > 0}, ValueError, r"allowed has shape \[3, 64\]; it takes one row a request"),
    "bias dtype": ({"bias": np.zeros((2, 64))}, TypeError, "bias is float64; it takes float32"),
    "allowed dtype": ({"allowed": np.ones((2, 64), np.int64)}, TypeError, "allowed is int64; it takes bool or uint8"),
    "max_depth": ({"max_depth": -1}, ValueError, "max_depth is -1"),
    "min_log_prob": ({"min_log_prob": np.nan}, ValueError, "min_log_prob is nan"),
    "chain_length": ({"chain_length": [1, 2, 3]}, ValueError, "chain_length"),
    "costs": ({"costs": [1.0, 2.0]}, ValueError, "costs has"),
    "a cost": ({"costs": [1.0, 2.0, 3.0, -1.0]}, ValueError, "costs"),
}


@needs_compiler
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_alike_by_numpy_and_the_kernels(name):
    given, error, message = WRONG[name]
    for where in ({}, {"device": FAST}):
        with pytest.raises(error, match=rf"^draft_tree: .*{message}"):
            draft_tree(**{"logits": LOGITS, "budget": 3, **given, **where})


def test_a_request_that_is_not_there_is_refused_with_how_many_there_are():
    draft = draft_tree(LOGITS, 3)
    assert len(draft.tree(np.int64(1))) == 4
    for request in (2, -1, 0.0, True, "1", None):
        for trees in (draft, draft.trees):
            with pytest.raises(IndexError, match=r"^request is .*; there are 2 requests, counted from 0$"):
                trees.tree(request)
    with pytest.raises(IndexError, match="request is 1; there is 1 request"):
        draft_tree(LOGITS[0], 3).tree(1)


def test_a_refused_request_has_no_tree_to_take():
    trees = draft_tree(LOGITS, 3).trees
    trees.counts[1] = -3
    with pytest.raises(ValueError, match="request 1 has no tree: its row 2 was refused"):
        trees.tree(1)


@pytest.mark.parametrize("where", [{}, {"device": FAST}], ids=["numpy", "machine"])
def test_a_draft_is_shown_by_its_sizes_and_not_by_its_numbers(where):
    draft = draft_tree(normal(2, 3, 5000), [700, 3], **where)
    assert repr(draft) == "Draft(requests=2, positions=3, candidates=700, places=701, numpy.ndarray)"
    assert repr(draft.layout).startswith("TreeLayout(positions int64[2, 701], masks uint32[2, 701, 22], ")
    assert repr(draft.top).startswith("TopK(ids int64[2, 3, 700], ") and repr(draft.trees).startswith("Trees(tokens ")
    assert all(len(repr(part)) < 200 for part in (draft, *vars(draft).values()))


@needs_compiler
def test_places_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="budget is on the GPU, its maximum unknown; pass out=empty_draft"):
        draft_tree(LOGITS, OnGpu(), device=FAST)
    with pytest.raises(ValueError, match="a budget is 9 and out has 8 places; it takes one more than the largest"):
        draft_tree(LOGITS, 9, out=empty_draft(LOGITS.shape, 8, FAST), device=FAST)
    with pytest.raises(ValueError, match=r"out was not made for logits \[2, 3, 64\]"):
        draft_tree(LOGITS, 7, out=empty_draft((3, 64), 8, FAST), device=FAST)
    with pytest.raises(ValueError, match=r"out was not made for logits \[2, 3, 64\]"):
        draft_tree(LOGITS, 7, out=empty_draft((2, 3, 80), 8, FAST), device=FAST)


def test_the_name_at_the_top_is_lazy_and_needs_no_compiler():
    program = """
import sys
for name in ("numba", "numba_cuda", "cuda", "llvmlite"):
    sys.modules[name] = None
import ddtree
assert not [name for name in sys.modules if name.startswith("ddtree.")], "import ddtree imports its modules"
import numpy as np
print(ddtree.draft_tree(np.zeros((2, 8), np.float32), 3).tree())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "DraftTree(4 nodes, depth 1, root token 0)\n", result.stderr


def test_the_names_at_the_top():
    assert ddtree.draft_tree is draft_tree and ddtree.empty_draft is empty_draft
    assert {"draft_tree", "empty_draft", "__version__"} <= set(dir(ddtree))
    with pytest.raises(AttributeError, match="module 'ddtree' has no attribute 'draft_trees'"):
        ddtree.draft_trees  # noqa: B018


@pytest.mark.parametrize("device", [None, PtxDevice()], ids=["numpy", "PTX machine"])
def test_a_masked_array_is_refused_since_its_mask_would_be_lost(device):
    logits = np.ma.masked_less(np.zeros((2, 8), np.float32), 1)
    with pytest.raises(TypeError, match=r"draft_tree: logits is a masked array"):
        draft_tree(logits, 4, 0, device=device)
