"""A plan beyond its page: every option on a plan that has run others, what it refuses, and what a GPU is handed."""

import copy
import ctypes
import threading
import types

import numpy as np
import pytest

from ddtree.cuda import GpuArray, GpuDevice, PtxDevice
from ddtree.cuda.gpu_run import GraphCalls
from ddtree.draft import DraftPlan, draft_tree, draft_tree_ref, empty_draft
from ddtree.draft.plan import Numbers, _check_costs_size
from ddtree.kdtr import load
from test_draft import OPTIONS, assert_same, normal

ROUNDS = load("fixtures/e2e_qwen3.kdtr")["p0.b64.draft_logits"]
FAST = PtxDevice(check=False, count=False)


def test_one_plan_takes_every_option_in_turn_and_again():
    logits, plan = normal(3, 4, 112), DraftPlan((3, 4, 112), budget=12, device=FAST)
    for _ in range(2):
        for options in OPTIONS.values():
            assert_same(plan.run(logits, [1, 2, 3], **options), draft_tree_ref(logits, 12, [1, 2, 3], **options))
    assert len(plan._ready) <= len(OPTIONS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_rows_of_every_format_and_distance(dtype):
    wide = normal(2, 3, 131)
    wide = (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else wide.astype(dtype)
    plan = DraftPlan((2, 3, 112), dtype, 9, device=FAST)
    for start in (0, 1, 8, 19):  # aligned and not
        rows = wide[..., start : start + 112]
        for logits in (rows, np.ascontiguousarray(rows)):
            assert_same(plan.run(logits), draft_tree_ref(np.ascontiguousarray(rows), 9))


def test_numbers_that_change_are_written_and_a_recorded_run_keeps_its_own():
    plan, logits = DraftPlan((15, 260), budget=8, device=FAST), ROUNDS[0].copy()
    graph = plan.graph(logits, 3, lengths=[5], budget=6)
    for number in (4, 4, 5):
        assert_same(
            plan.run(ROUNDS[number], number, lengths=number), draft_tree_ref(ROUNDS[number], 8, number, lengths=number)
        )
    logits[...] = ROUNDS[9]
    tree, expected = graph.replay().tree(), draft_tree_ref(ROUNDS[9], 6, 3).tree()
    np.testing.assert_array_equal(tree.tokens, expected.tokens)
    assert graph.draft.layout.positions[0, 0] == 5


def test_what_does_not_fit_is_refused_by_name():
    plan, logits = DraftPlan((15, 260), budget=8, device=FAST), ROUNDS[0]
    wrong_type = empty_draft((15, 260), 9, FAST)
    object.__setattr__(wrong_type.trees, "depths", np.zeros((1, 9), np.int64))
    for arguments, message in (
        ({"logits": logits[:, :200].copy()}, r"logits is float32\[15, 200\]; the plan was made for float32\[15, 260\]"),
        ({"logits": logits.astype(np.float16)}, "logits is float16"),
        ({"out": empty_draft((15, 260), 20, FAST)}, "was not made for logits .15, 260. and a budget of 8"),
        ({"out": wrong_type}, r"out.depths is int64\[1, 9\], it must be int32"),
        ({"root_tokens": [1, 2]}, "root_tokens"),
        ({"lengths": -1}, "lengths is -1"),
        ({"costs": [1.0, 2.0]}, "costs"),
        ({"bias": normal(1, 259)}, "bias has shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^DraftPlan: .*{message}"):
            plan.run(**{"logits": logits, **arguments})
    for shape, dtype, budget in (((15,), "float32", 4), ((15, 260), "float64", 4), ((15, 260), "float32", -1)):
        with pytest.raises((TypeError, ValueError), match=r"^DraftPlan: (logits|budget) (is|has shape) "):
            DraftPlan(shape, dtype, budget, device=FAST)
    with pytest.raises(ValueError, match=r"^DraftPlan: a budget is 40000; .* at most 32767"):
        DraftPlan((15, 260), budget=40000, device=FAST)
    assert_same(plan.run(logits), draft_tree_ref(logits, 8))  # nothing of it was kept


def test_an_array_of_the_device_must_be_what_the_kernels_read():
    numbers = Numbers("budget", 2, FAST)
    for error, array in (
        (TypeError, np.int64([3, 4])), (ValueError, np.int32([3, 4, 5])), (ValueError, np.int32([[3, 4]]))
    ):  # fmt: skip
        with pytest.raises(error, match=r"^DraftPlan: budget is int.*; on the device it takes int32\[2\]$"):
            numbers._checked(FAST.view("budget", array))
    assert numbers._checked(view := FAST.view("budget", np.int32([3, 4]))) is view
    for error, array in ((TypeError, np.ones(9, np.float32)), (ValueError, np.ones(8)), (ValueError, np.ones((1, 9)))):
        with pytest.raises(error, match=r"^draft_tree: costs is float.*; it takes a float64 for each of 9 sizes$"):
            _check_costs_size(FAST.view("costs", array), 9, "draft_tree")


def test_a_plan_says_what_it_was_made_for():
    assert repr(DraftPlan((2, 15, 260), "float16", 8, device=FAST)) == (
        "DraftPlan([2, 15, 260], 'float16', budget=8, device=PtxDevice())"
    )


def test_a_device_keeps_the_plans_of_its_last_calls_only():
    device = PtxDevice(check=False, count=False)
    for vocabulary in range(40, 60):
        draft_tree(normal(2, vocabulary), 3, device=device)
    assert len(device._plans) == 16
    kept = dict(device._plans)
    draft_tree(normal(2, 59, seed=1), 3, device=device)
    assert device._plans == kept


# What a GPU is handed for torch's tensors, without either


class Tensor:
    """As much of a torch tensor as is asked for."""

    def __init__(self, shape, dtype, address):
        self.shape, self.dtype, self.is_cuda, self.address = tuple(shape), dtype, True, address

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0

    def is_contiguous(self):
        return True

    def view(self, dtype):
        return Tensor(self.shape, dtype, self.address)

    def as_strided(self, shape, steps, offset):
        return Tensor(shape, self.dtype, self.address + offset * int(self.dtype[-2:]) // 8)


Tensor.__module__ = "torch"
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
KINDS = ["bool", *INTEGERS, "float16", "bfloat16", "float32", "float64"]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose driver notes what is set and launched, with a torch of which nothing is real."""
    heap = iter(range(1 << 40, 1 << 50, 1 << 24))
    torch = types.ModuleType("torch")
    vars(torch).update({kind: kind for kind in KINDS})
    torch.device = lambda *place: place
    torch.empty = lambda shape, dtype, device: Tensor((shape,) if isinstance(shape, int) else shape, dtype, next(heap))
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 0x51)
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)

    class NotingGpu(GpuDevice):
        def __init__(self):
            self._only, self.ordinal, self._libraries, self._kept, self.told = True, 0, {}, [], []
            self.arch, self.max_shared, self._loading, self._handles = "sm_90", 232_448, threading.Lock(), {}
            self._launch = lambda config, kernel, table, extra: 0
            self._capturing = lambda handle, status: 0
            names = iter(range(1, 99))

            def capture(count, record):
                record(9)
                return 0xA, [next(names) for _ in range(count)]

            def read(node, params):
                params._obj.kernel = [handle for handle, _ in self._handles.values()][(node - 1) % 4].handle
                return 0

            def change(graph, node, params):
                kernel = list(self._handles)[(node - 1) % 4]
                count = sum(1 if p.shape is None else 5 + 2 * len(p.shape) for p in kernel.parameters)
                places = (ctypes.c_void_p * count).from_address(params._obj.table)
                self.told.append(("set", node, [ctypes.c_uint64.from_address(place).value for place in places]))
                return 0

            def launch(graph, stream):
                self.told.append(("launch", stream))
                return 0

            self._calls = GraphCalls(capture, read, change, launch, abs, print)

        def empty(self, shape, dtype, stream=None):
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            return GpuArray(types.SimpleNamespace(handle=next(heap)), shape, np.dtype(dtype))

        def array(self, values):
            return self.empty(np.shape(values), np.asarray(values).dtype)

        def write(self, array, values, stream=None):
            self.told.append(("write", values.tolist(), stream))

        def _load(self, kernel):
            return self._handles.setdefault(kernel, (types.SimpleNamespace(handle=len(self._handles) + 100), 0))

    return NotingGpu()


def test_a_run_like_the_one_before_is_one_launch_and_sets_only_the_kernels_whose_arrays_moved(gpu):
    plan = DraftPlan((15, 4096), budget=16, device=gpu)
    logits = [Tensor((15, 4096), "float32", (1 << 45) + (i << 20)) for i in range(2)]
    roots, lengths = Tensor((1,), "int64", 1 << 46), Tensor((1,), "int64", (1 << 46) + 64)
    for i in (0, 0, 1):
        gpu.told.clear()
        draft = plan.run(logits[i], roots, lengths=lengths)
        assert gpu.told[-1] == ("launch", 0x51)  # torch's current stream
        assert len(gpu.told) == {0: len(gpu.told), 1: 3}[i]
    again = [told for told in gpu.told if told[0] == "set"]
    assert [node for _, node, _ in again] == [1, 2]  # both kernels of the top-k read the logits
    assert all(logits[1].address in words for _, _, words in again)
    gpu.told.clear()
    assert plan.run(logits[1], roots, lengths=lengths) is draft and gpu.told == [("launch", 0x51)]
    gpu.told.clear()
    plan.run(logits[1], 42, lengths=7)
    plan.run(logits[1], 43, lengths=7)
    assert [told for told in gpu.told if told[0] == "write"] == [("write", [43], 0x51)]  # the first ones were copied


def test_draft_tree_gives_new_pieces_of_one_tensor_each_time(gpu):
    logits, roots = Tensor((2, 15, 4096), "bfloat16", 1 << 45), Tensor((2,), "int64", 1 << 46)
    first, second = (draft_tree(logits, 16, roots, device=gpu) for _ in range(2))
    arrays = [[*vars(draft.trees).values(), *vars(draft.layout).values()] for draft in (first, second)]
    assert all(type(array) is Tensor for array in arrays[0])
    places = [array.address for draft in arrays for array in draft]
    assert len(set(places)) == len(places)
    assert first.layout.masks.dtype == "uint32" and first.trees.scores.dtype == "float64"
    last = {told[1]: told[2] for told in gpu.told if told[0] == "set"}
    assert {array.address for array in arrays[1]} <= {word for words in last.values() for word in words}


def test_arrays_of_ours_take_what_torch_gives(gpu):
    logits, out = [Tensor((15, 4096), "float32", (1 << 45) + (i << 20)) for i in range(2)], {}
    for name in ("call", "plan"):
        out[name] = empty_draft((15, 4096), 17, gpu)
    plan = DraftPlan((15, 4096), budget=16, device=gpu)
    for i in (0, 0, 1, 1):
        assert draft_tree(logits[i], 16, out=out["call"], device=gpu) is out["call"]
        assert plan.run(logits[i], out=out["plan"]) is out["plan"]
    gpu.told.clear()
    plan.run(logits[1], out=out["plan"])
    assert gpu.told == [("launch", 0x51)]  # nothing moved
    plan.run(logits[1], out=out["call"])
    words = {word for told in gpu.told if told[0] == "set" for word in told[2]}
    assert {array.memory.handle for array in vars(out["call"].trees).values()} <= words


def test_parts_of_a_draft_are_cut_out_when_they_are_read(gpu):
    logits = Tensor((15, 4096), "float32", 1 << 45)
    draft = [draft_tree(logits, 16, device=gpu) for _ in range(2)][1]  # the first one was read when it was prepared
    assert set(vars(draft)) == {"slab"}
    assert draft.trees.tokens.shape == (1, 17) and draft.trees is draft.trees
    assert set(vars(draft)) == {"slab", "trees"}
    with pytest.raises(AttributeError, match="a Draft has no 'logits'"):
        draft.logits  # noqa: B018
    copied = copy.copy(draft)
    assert copied.top.ids is draft.top.ids and copied.layout is draft.layout and type(copied).__name__ == "Draft"
