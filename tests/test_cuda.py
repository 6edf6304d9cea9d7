"""ddtree.cuda beyond the story: refusals, formulas, canonical PTX, memory nothing wrote, the choice of a device."""

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddtree.cuda as cuda_module
from ddtree import probe
from ddtree.cuda import (
    Assembly,
    GpuArray,
    GpuDevice,
    Instruction,
    Kernel,
    LaunchRule,
    PtxDevice,
    cuda,
    current_device,
    device_function,
    driver,
    flatten,
    flatten_names,
    global_address,
    gpu_device,
    gpu_run,
    kernel,
    libraries,
    link,
    load_four,
    max_or_nan,
    parse_contract,
    parse_parameter,
    ptx_device,
    source,
    store,
    watch_launches,
)
from ddtree.cuda import compile as compile_module
from ddtree.cuda import text as text_module
from ddtree.ptx import load_ptx
from ddtree.ptx.text import PtxError

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

In = Annotated[Any, "const float32[N]"]
Out = Annotated[Any, "float32[N]"]
Factor = Annotated[Any, "float32"]


@kernel("E1", block=64, grid="cdiv(N, 64)")
def scale_kernel(x: In, factor: Factor, out: Out) -> None:
    i = cuda.grid(1)
    if i < x.size:
        out[i] = factor * x[i]


@kernel("E1", block=64, grid="cdiv(N, 64)")
def store_first_kernel(out: Out, x: In) -> None:
    i = cuda.grid(1)
    if i < x.size:
        out[i] = np.float32(3) * x[i]


@kernel("E0", block=32, grid="1")
def typed_kernel(
    matrix: Annotated[Any, "const int32[R, 4]"], row: Annotated[Any, "int32"], out: Annotated[Any, "int64[R]"]
) -> None:
    i = cuda.threadIdx.x
    if i < out.size:
        out[i] = matrix[i, 3] + row


@kernel("E0", block=32, grid="1")
def copy_bits_kernel(x: Annotated[Any, "const uint16[N]"], out: Annotated[Any, "uint16[N]"]) -> None:
    i = cuda.threadIdx.x
    if i < x.size:
        out[i] = x[i]


@kernel("E1", block=64, grid="1", shared="4 * N")
def reverse_kernel(x: In, out: Out) -> None:
    tile = cuda.shared.array(0, np.float32)
    for i in range(cuda.threadIdx.x, x.size, 64):
        tile[i] = x[i]
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, x.size, 64):
        out[i] = tile[x.size - 1 - i]


@device_function
def twice(x: Any) -> Any:
    return x + x


def make_adder(amount: float) -> Kernel:
    """A kernel whose closure holds a number, the stand-in `cuda`, and a device function."""
    module, double = cuda, twice

    @kernel("E1", block=64, grid="cdiv(N, 64)")
    def add_kernel(x: In, out: Out) -> None:
        i = module.grid(1)
        if i < x.size:
            out[i] = double(x[i]) + np.float32(amount)

    return add_kernel


@pytest.fixture
def device() -> PtxDevice:
    return PtxDevice()


def numbers(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


class OnGpu:
    """An object that says it lies in GPU memory."""

    def __init__(self, **interface: Any) -> None:
        base = {"version": 3, "typestr": "<f4", "shape": (3,), "data": (4096, False), "strides": None}
        self.__cuda_array_interface__ = base | interface


class OnlyDlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


# What is needed when


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_name_of_the_one_module_is_in_the_face():
    names = [
        *("DeviceFunction", "Device", "GpuArray", "GpuDevice", "GpuGraph", "Instruction", "Kernel", "Launch"),
        *("LaunchRule", "Launched", "Library", "Parameter", "PtxDevice", "PtxGraph", "Run", "View", "WideLoad", "cdiv"),
        *("check_arch", "check_formula", "cuda", "current_device", "device_function", "flatten", "flatten_names"),
        *("kernel", "link", "load_four", "max_or_nan", "parse_contract", "parse_parameter", "watch_launches"),
        "wait_for_launch",
        *("AddressOf", "Assembly", "global_address", "shared_address"),
    ]
    assert sorted(names) == sorted(cuda_module.__all__)
    assert all(hasattr(cuda_module, name) for name in [*names, "_compilable", "_driver_version"])


def test_a_file_of_a_family_is_named_from_the_package_on():
    assert store._source(compile_module.__file__) == "ddtree/cuda/compile.py"
    assert store._source("/somewhere/ddtree/mine.py") == "mine.py"


def test_importing_kernels_imports_no_compiler():
    code = "import sys, ddtree.aot; print([m for m in ('numba', 'numba_cuda', 'cuda.core') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_a_missing_wheel_is_named_with_the_command_that_brings_it(monkeypatch):
    def refuse(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(compile_module, "import_module", refuse)
    with pytest.raises(ImportError, match=r"numba.*no GPU.*pip install 'ddtree\[dev\]'"):
        make_adder(0.5).ptx()
    with pytest.raises(ImportError, match=r"add must be compiled for sm_90, as the package has no text of it: numba"):
        make_adder(0.5).ptx_to_run("sm_90")


def test_a_numpy_that_numba_does_not_know_is_named(monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.5.1")
    with pytest.raises(ImportError, match=r"numpy < 2\.5, and numpy 2\.5\.1 is installed.*'ddtree\[dev\]'"):
        make_adder(0.5).ptx()


def test_the_stand_in_says_that_it_is_for_kernels():
    with pytest.raises(AttributeError, match=r"cuda\.grid exists only inside a kernel"):
        scale_kernel.function(numbers(3), 1.0, numbers(3))


# Contracts


@pytest.mark.parametrize("text", ["float32", "const float32[N]", "int64[R, 4]", "const bool[A, B, C]", "uint16[N]"])
def test_a_contract_is_read(text):
    parameter = parse_parameter("x", text)
    shape = "" if parameter.shape is None else f"[{', '.join(parameter.shape)}]"
    assert f"{'const ' if parameter.const else ''}{parameter.dtype}{shape}" == text


@pytest.mark.parametrize("text", ["", "float", "float32[]", "float32[N,M]", "bfloat16[N]", "bool", "int8",
                                  "float32[N] const", "const  int32[N]", "float32[-1]"])  # fmt: skip
def test_another_text_is_no_contract(text):
    with pytest.raises(ValueError, match="x: the contract is"):
        parse_parameter("x", text)


def test_a_parameter_without_a_contract_is_named():
    def bare(x: In, y: int) -> None: ...

    with pytest.raises(ValueError, match="bare: y has no contract; write for example y: Annotated"):
        parse_contract(bare)


@pytest.mark.parametrize(("exactness", "grid", "message"), [("E3", "N", "exactness is 'E3'"), ("E0", "M", "uses M;")])
def test_a_kernel_that_does_not_fit_its_contract_is_refused(exactness, grid, message):
    with pytest.raises(ValueError, match=message):
        Kernel(scale_kernel.function, exactness, LaunchRule((32,), (grid,), "0"))


@pytest.mark.parametrize("block", [(), (0,), (1025,), (32, 33), (1, 1, 65), (1, 1, 1, 1)])
def test_a_block_that_no_gpu_has_is_refused(block):
    with pytest.raises(ValueError, match="1 to 1024 threads"):
        LaunchRule(block, ("1",), "0")


@given(n=st.integers(0, 10**9), r=st.integers(0, 10**6))
def test_formulas_are_integer_arithmetic_on_the_names(n, r):
    rule = LaunchRule((32,), ("cdiv(N, 128)", "R // 16 + 1"), "4 * (N + R) + 8")
    assert rule.apply({"N": n, "R": r}) == ((-(-n // 128), r // 16 + 1), 4 * (n + r) + 8)
    assert rule.names == {"N", "R"}


@pytest.mark.parametrize("formula", [
    "N / 2", "N ** 2", "-N", "1.5", "True", "N.real", "N if M else 0", "cdiv(N)", "f(N)", "cdiv", "cdiv(N, b=2)",
    "N; M", "", "2147483648", "'4'", "N[0]",
])  # fmt: skip
def test_what_python_and_c_do_not_share_is_no_formula(formula):
    for grid, shared in (((formula,), "0"), (("1",), formula)):
        with pytest.raises(ValueError, match=r"the formula is .*; it has whole numbers, names"):
            LaunchRule((32,), grid, shared)


@pytest.mark.parametrize(("grid", "shared", "message"), [
    (("N - 5",), "0", r"the grid's x is N - 5 = -2; it must be 0 to 2147483647 blocks"),
    (("1", "65533 + N"), "0", r"the grid's y is 65533 \+ N = 65536; it must be 0 to 65535"),
    (("1", "1", "70000 * N"), "0", "the grid's z is .* = 210000; it must be 0 to 65535"),
    (("1000000000 * N",), "0", "the grid's x is .* = 3000000000; it must be 0 to 2147483647"),
    (("1",), "N - 4", "the shared memory is N - 4 = -1 bytes"),
    (("4 // (N - 3)",), "0", "divides by 0 for the sizes {'N': 3}"),
])  # fmt: skip
def test_a_launch_that_no_gpu_takes_is_refused_before_it(device, grid, shared, message):
    launch = Kernel(copy_bits_kernel.function, "E0", LaunchRule((32,), grid, shared))
    with pytest.raises(ValueError, match=f"copy_bits: .*{message}"):
        launch.prepare(np.zeros(3, np.uint16), np.zeros(3, np.uint16), device=device)


@pytest.mark.parametrize("grid", [(), ("1", "1", "1", "1")])
def test_a_grid_has_one_to_three_axes(grid):
    with pytest.raises(ValueError, match="one to three formulas"):
        LaunchRule((32,), grid, "0")


def test_a_scalar_named_like_a_size_is_refused():
    def twice_named(x: In, N: Annotated[Any, "int32"]) -> None: ...

    with pytest.raises(ValueError, match="twice_named: N is a scalar and a size; rename one"):
        Kernel(twice_named, "E0", LaunchRule((32,), ("1",), "0"))


def test_a_formula_takes_no_float():
    with pytest.raises(ValueError, match=r"the launch rule uses factor; .* has sizes and integer scalars N$"):
        Kernel(scale_kernel.function, "E1", LaunchRule((32,), ("factor",), "0"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_float_that_is_no_number_of_anything_arrives(device, value):
    out = np.zeros(3, np.float32)
    scale_kernel(np.ones(3, np.float32), value, out, device=device)
    np.testing.assert_array_equal(out, np.full(3, value, np.float32))


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), dtype=st.sampled_from(["u1", "i2", "f4", "f8"]))
def test_the_words_of_an_array_are_what_numpy_says(shape, dtype):
    array = np.zeros([max(1, n) for n in shape], dtype)  # numpy's strides of an empty array are arbitrary
    words = flatten(4096, array.shape, array.itemsize)
    assert words == [0, 0, array.size, array.itemsize, 4096, *array.shape, *array.strides]
    names = flatten_names(parse_parameter("x", f"uint8[{', '.join('ABCD'[: array.ndim])}]"))
    assert len(names) == len(words) == len(set(names))


# PTX


@device_function
def store_together(x: Any, i: Any) -> None:
    cuda.syncwarp()
    x[i] = 2 * x[i]


@kernel("E1", block=32, grid="1")
def inlined_kernel(x: Out) -> None:
    store_together(x, cuda.threadIdx.x)


def test_the_text_of_an_inlined_function_has_no_chance_in_it_either():
    """Compiled after other functions, numba's own name of it is another; the line of its code stays."""
    code = f"import sys; sys.path.insert(0, {__file__.rsplit('/', 1)[0]!r}); import test_cuda as t; "
    code += "t.make_adder(1.0)._compile('sm_120'); print(t.inlined_kernel._compile('sm_120'))"
    text = inlined_kernel._compile("sm_120")
    assert run_python(code) == text.strip()
    assert not any(chance in text for chance in ("inlined_at", "function_name", "debug_str", ".b8"))
    line = store_together.function.__code__.co_firstlineno + 3
    assert f".loc\t1 {line} 1\n" in text


def test_the_text_has_no_chance_in_it():
    """Another process, another order of compilation, the same bytes."""
    code = f"import sys; sys.path.insert(0, {__file__.rsplit('/', 1)[0]!r}); import test_cuda as t; "
    code += "t.reverse_kernel.ptx(); t.make_adder(1.0).ptx(); print(t.scale_kernel.ptx() + t.reverse_kernel.ptx())"
    assert run_python(code) == (scale_kernel.ptx() + reverse_kernel.ptx()).strip()
    assert not any(chance in scale_kernel.ptx() for chance in ("_ZN", ".common", "_cudapy", "cw51", "/tests/"))
    assert '.file\t1 "test_cuda.py"' in scale_kernel.ptx()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_lowered_version_links_for_every_architecture(arch):
    for each in (scale_kernel, reverse_kernel, typed_kernel):
        text = each.ptx(arch)
        assert f".target {arch}" in text and f".version {text_module._PTX_VERSIONS[arch]}\n" in text
        code, log = link(text, arch)
        assert len(code.code) > 1000 and "Used" in log


@pytest.mark.parametrize("arch", ["banana", "sm_200", "sm_90a", "120", "sm_50", ""])
def test_an_architecture_the_compiler_does_not_know_is_refused(arch):
    with pytest.raises(ValueError, match=f"the architecture is {arch!r}; the compiler knows sm_75, sm_80, .*sm_120"):
        scale_kernel.ptx(arch)


Halves = Annotated[Any, "float16[N]"]


def test_float16_is_loaded_stored_and_converted(device):
    @kernel("E1", block=32, grid="1")
    def halves_kernel(x: Annotated[Any, "const float16[N]"], out: Halves) -> None:
        i = cuda.grid(1)
        if i < x.size:
            out[i] = np.float16(np.float32(x[i]) * np.float32(3))

    x = np.arange(9, dtype=np.float16)
    out = device.empty(9, np.float16)
    halves_kernel(x, out, device=device)
    np.testing.assert_array_equal(out, 3 * x)


def test_arithmetic_on_float16_is_refused_with_the_way_round(device):
    @kernel("E1", block=32, grid="1")
    def add_halves_kernel(x: Annotated[Any, "const float16[N]"], out: Halves) -> None:
        out[cuda.threadIdx.x] = x[cuda.threadIdx.x] + x[cuda.threadIdx.x]

    message = r"add_halves: float16 .* not computed with .*; compute in float32: np\.float32\(x\[i\]\)"
    for ask in (add_halves_kernel.ptx, lambda: add_halves_kernel(*np.ones((2, 32), np.float16), device=device)):
        with pytest.raises(ValueError, match=message):
            ask()


def test_the_parameters_in_the_text_are_the_contracts_words():
    (entry,) = load_ptx(typed_kernel.ptx()).entries.values()
    assert entry.name == typed_kernel.entry == "ddtree_typed"
    assert len(entry.params) == sum(len(flatten_names(p)) for p in typed_kernel.parameters) == 9 + 1 + 7


def test_functions_and_closures_reach_the_kernel(device):
    for amount in (0.25, 1.5):  # two kernels of one function: each has its own number
        out = device.empty(100, np.float32)
        make_adder(amount)(numbers(100), out, device=device)
        np.testing.assert_array_equal(out, 2 * numbers(100) + np.float32(amount))
    assert twice(2) == 4


def test_a_device_function_costs_no_call_and_is_translated_once_for_all_kernels(device):
    @device_function
    def clipped(x: Any) -> Any:
        return min(max(x, np.float32(2)), np.float32(5))

    @kernel("E1", block=32, grid="1")
    def clip_kernel(x: In, out: Out) -> None:
        i = cuda.threadIdx.x
        out[i] = clipped(x[i])

    @kernel("E1", block=32, grid="1")
    def clip_twice_kernel(x: In, out: Out) -> None:
        i = cuda.threadIdx.x
        out[i] = clipped(x[i]) + clipped(x[i] + np.float32(1))

    x, before = numbers(32), len(compile_module._JITTED)
    for each, expected in ((clip_kernel, x.clip(2, 5)), (clip_twice_kernel, x.clip(2, 5) + (x + 1).clip(2, 5))):
        out, text = device.empty(32, np.float32), each._compile("sm_120")  # anew, whatever is kept
        each(x, out, device=device)
        np.testing.assert_array_equal(out, expected)
        assert "call" not in text and ".func" not in text
    assert len(compile_module._JITTED) == before + 1
    assert len(list(compile_module._JITTED.values())[-1].overloads) == 1


AMOUNT_OF_ADDED = 1.0


@device_function
def added(x: Any) -> Any:
    return x + np.float32(AMOUNT_OF_ADDED)


def test_a_device_function_whose_constant_changed_is_translated_again(device, monkeypatch):
    def sum_kernel(x: In, out: Out) -> None:
        i = cuda.threadIdx.x
        out[i] = added(x[i])

    for amount in (1.0, 2.5, 1.0):
        monkeypatch.setattr(sys.modules[__name__], "AMOUNT_OF_ADDED", amount)
        out = device.empty(32, np.float32)
        kernel("E1", block=32, grid="1")(sum_kernel)(numbers(32), out, device=device)
        np.testing.assert_array_equal(out, numbers(32) + np.float32(amount))


WITHOUT_A_SOURCE = """
def shifted(x):
    return x + 1.5

def shift_kernel(x, out):
    i = cuda.threadIdx.x
    out[i] = shifted(x[i])
"""


def test_functions_without_a_source_compile_without_lines_and_without_a_warning(device):
    scope: dict[str, Any] = {"cuda": cuda}
    exec(WITHOUT_A_SOURCE, scope)
    scope["shifted"] = device_function(scope["shifted"])
    scope["shift_kernel"].__annotations__ = {"x": In, "out": Out}
    bare = kernel("E1", block=32, grid="1")(scope["shift_kernel"])
    out = device.empty(32, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = bare._compile("sm_120")
        bare(numbers(32), out, device=device)
    np.testing.assert_array_equal(out, (numbers(32) + 1.5).astype(np.float32))
    assert ".loc" not in text and ".loc" in scale_kernel.ptx()


def test_a_lambda_and_a_source_that_is_another_now_have_no_line(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("def run(x):\n    x[0] = 1.0\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), scope)
    assert store._def_line(scope["run"]) == 1
    for text in ("def other(x):\n    x[0] = 1.0\n", "\n\n", "    x = (\n", 'x = """\n', ""):
        path.write_text(text)
        assert store._def_line(scope["run"]) is None, text
    assert store._def_line(lambda x: x) is None
    assert store._def_line(added.function) == added.function.__code__.co_firstlineno + 1


def test_line_numbers_are_part_of_what_is_kept(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("def run(x):\n    x[0] = 1.0\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), scope)
    with_lines = store._describe(scope["run"])
    path.unlink()
    assert store._describe(scope["run"]) != with_lines


def test_a_thread_that_uses_numba_by_itself_is_told_no_other_gpu():
    dispatcher = import_module("numba.cuda.dispatcher")
    original = dispatcher.get_current_device
    with ThreadPoolExecutor(1) as pool, compile_module._compiling_for((9, 0)):
        assert dispatcher.get_current_device().compute_capability == (9, 0)
        with compile_module._compiling_for((12, 0)):
            assert dispatcher.get_current_device().compute_capability == (12, 0)
        assert dispatcher.get_current_device().compute_capability == (9, 0)
        assert pool.submit(answer, dispatcher.get_current_device).result() == answer(original) != "SimpleNamespace"
    assert dispatcher.get_current_device is original


def answer(ask: Any) -> str:
    """What a question to the driver comes to: the kind of GPU, or of the error where there is none."""
    try:
        return type(ask()).__name__
    except import_module("numba.cuda.cudadrv.error").CudaSupportError as error:
        return type(error).__name__


def test_threads_compile_for_several_architectures_at_once():
    wanted = [(make_adder(float(amount)), arch) for amount in range(4) for arch in ("sm_80", "sm_120")]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda pair: pair[0]._compile(pair[1]), wanted))
    assert all(f".target {arch}\n" in text for text, (_, arch) in zip(texts, wanted, strict=True))
    assert texts == [each._compile(arch) for each, arch in wanted]


def test_a_text_is_made_once_whoever_asks(monkeypatch):
    made: list[str] = []
    monkeypatch.setattr(Kernel, "_compile", lambda each, arch: made.append(arch) or f"text {len(made)}")
    monkeypatch.setenv("DDTREE_CACHE", "")
    one = make_adder(9.0)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: one.ptx("sm_90"), range(40))) == {"text 1"}


# Launching on the PTX machine


def make_shift(amount: float) -> Kernel:
    @kernel("E1", block=32, grid="1")
    def shift_kernel(x: In, out: Out) -> None:
        i = cuda.threadIdx.x
        out[i] = x[i] + np.float32(amount)

    return shift_kernel


def test_a_compiled_kernel_is_kept_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "new"))
    text = make_shift(2.0).ptx()
    (kept,) = (tmp_path / "new").iterdir()
    monkeypatch.setattr(Kernel, "_compile", lambda kernel, arch: "compiled again")
    assert make_shift(2.0).ptx() == text
    assert make_shift(3.0).ptx() == "compiled again" and len(list((tmp_path / "new").iterdir())) == 2
    assert make_shift(2.0).ptx("sm_90") == "compiled again"
    kept.write_bytes(kept.read_bytes()[:-20])
    assert make_shift(2.0).ptx() == "compiled again"
    assert make_shift([2.0]).ptx("sm_90") == "compiled again" and len(list((tmp_path / "new").iterdir())) == 3
    monkeypatch.setenv("DDTREE_CACHE", "")
    assert make_shift(4.0).ptx() == "compiled again" and len(list((tmp_path / "new").iterdir())) == 3


PLACE = types.SimpleNamespace(C=2.0)
AMOUNT = 1.0


def test_what_a_kernel_depends_on_is_in_its_description(monkeypatch):
    def add(a: Any, amount: float = AMOUNT) -> Any:
        return a + amount

    def make(part: Any, other: Any) -> Any:
        def run(x: Any) -> None:
            def inner() -> float:
                return AMOUNT

            x[0] = part(x[1]) + other(x[2]) + inner()

        return store._describe(run)

    one, two = device_function(lambda a: a + 1), device_function(lambda a: a + 2)
    described = make(one, two)
    assert described == make(one, two) and described != make(two, one) and described != make(one, one)
    monkeypatch.setattr(sys.modules[__name__], "AMOUNT", 3.0)
    assert described != make(one, two)  # through the nested function
    default = make(device_function(add), one)
    add.__defaults__ = (5.0,)
    assert default != make(device_function(add), one)
    assert store._describe(lambda x: PLACE.C) is None  # what an object holds is not known
    monkeypatch.setenv("NUMBA_OPT", "0")
    source._compilers.cache_clear()
    assert "NUMBA_OPT" in source._compilers()
    monkeypatch.undo()
    source._compilers.cache_clear()


def test_a_source_that_changed_after_its_import_does_not_name_old_code(tmp_path, monkeypatch):
    path = tmp_path / "edited.py"
    path.write_text("def run(x):\n    x[0] = 1.0\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), scope)
    before = store._describe(scope["run"])
    path.write_text("def run(x):\n    x[0] = 2.0\n")
    assert store._describe(scope["run"]) == before
    exec(compile(path.read_text(), path, "exec"), scope)
    assert store._describe(scope["run"]) != before


def test_a_kernel_that_cannot_be_kept_is_compiled_and_that_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv("DDTREE_QUIET", raising=False)
    assert ".entry" in make_shift(7.0).ptx()
    assert f"ddtree: compiled kernels are not kept in {tmp_path / 'file'} (" in capsys.readouterr().err


def test_what_another_compiler_made_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    text = make_shift(8.0).ptx()
    monkeypatch.setattr(Kernel, "_compile", lambda kernel, arch: "compiled again")
    assert make_shift(8.0).ptx() == text
    monkeypatch.setattr(source, "_compilers", lambda: "another")
    assert make_shift(8.0).ptx() == "compiled again"


def test_slow_compilation_is_announced_with_its_kernel_and_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    monkeypatch.delenv("DDTREE_QUIET", raising=False)
    monkeypatch.setattr(Kernel, "_compile", lambda kernel, arch: time.sleep(1.3) or "compiled")
    make_shift(9.0).ptx("sm_90")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"ddtree: compiling shift for sm_90, \d+ s so far; kept in {re.escape(str(tmp_path))}", line)


@pytest.mark.parametrize(("result", "arguments"), [("int32", ()), ("int32", ("int32",) * 4), ("float16", ("int32",))])
def test_an_instruction_that_cannot_be_is_refused(result, arguments):
    with pytest.raises(ValueError, match="an instruction has one to three arguments, and all are of int32, uint32"):
        Instruction("mov.b32 $0, $1;", result, arguments)


@pytest.mark.parametrize(
    ("results", "arguments"),
    [("float16", ("int32",)), (("int32", "uint32"), ()), ("int32", ((),)), ((), (("int32", "float32"),))],
)
def test_an_assembly_of_registers_that_are_not_there_is_refused(results, arguments):
    with pytest.raises(ValueError, match="each is a dtype, or a tuple of one dtype, of int32, uint32"):
        Assembly("nop;", results, arguments)


def test_an_assembly_without_a_result_keeps_its_place(device):
    x = np.arange(32, dtype=np.float32)
    out = probe.run_function(stored_first, x, probe.each(range(32)), returns="float32", device=device)
    np.testing.assert_array_equal(out, np.arange(32) + 100)


@device_function
def stored_first(x, i):
    """What the assembly stored is loaded after it, though the compiler knows what x[i] was."""
    value = x[i]
    store_there(global_address(x, i), value + np.float32(100))
    return x[i]


store_there = Assembly("st.global.f32 [$0], $1;", (), ("uint64", "float32"), memory=True)


least_of_warp = Instruction("redux.sync.min.u32 $0, $1, 0xffffffff;", "uint32", ("uint32",))


@kernel("E1", block=32, grid="1")
def instructions_kernel(x: In, out: Out, least: Annotated[Any, "uint32[N]"]) -> None:
    i = cuda.threadIdx.x
    out[i], least[i] = max_or_nan(x[i], np.float32(3)), least_of_warp(np.uint32(40) - least[i])


def test_an_instruction_without_a_name_in_numba_is_run_as_it_stands(device):
    x = np.arange(32, dtype=np.float32)
    x[4] = np.nan
    out, least = np.zeros(32, np.float32), np.arange(32, dtype=np.uint32)
    instructions_kernel(x, out, least, device=device)
    np.testing.assert_array_equal(out, np.maximum(x, np.float32(3)))
    assert np.isnan(out[4]) and least.tolist() == [9] * 32


@kernel("E0", block=32, grid="1", early=True)
def load_four_kernel(
    x: Annotated[Any, "const int32[M]"], out: Annotated[Any, "int32[N]"], first: Annotated[Any, "int32"]
) -> None:
    i = cuda.threadIdx.x
    a, b, c, d = load_four(x, first + 4 * i)
    out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3] = d, c, b, a


def test_four_neighbours_are_loaded_at_once(device):
    x, out = np.arange(160, dtype=np.int32), np.zeros(128, np.int32)
    load_four_kernel(x, out, 16, device=device)
    assert out.reshape(32, 4).tolist() == x[16:144].reshape(32, 4)[:, ::-1].tolist()
    assert "ld.global.v4." in load_four_kernel.ptx()
    with pytest.raises(TypeError, match="a load of 4 elements is an instruction of a kernel; Python cannot run it"):
        load_four(x, 0)


def test_four_that_do_not_begin_at_16_bytes_are_refused():
    with pytest.raises(PtxError, match="misaligned"):
        load_four_kernel(np.arange(160, dtype=np.int32), np.zeros(128, np.int32), 2, device=PtxDevice())


def test_a_kernel_waits_for_the_launch_before_where_launches_may_overlap():
    wait, early = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    text = load_four_kernel.ptx("sm_90")
    assert text.index(wait) < text.index(early) < text.index("ld.param")
    assert (wait in scale_kernel.ptx(), early in scale_kernel.ptx()) == (True, False)
    assert "griddepcontrol" not in load_four_kernel.ptx("sm_80")
    link(text, "sm_90")


def test_a_launch_computes_and_counts(device):
    out = device.empty(1000, np.float32)
    counters = scale_kernel(numbers(1000), 0.5, out, device=device)
    np.testing.assert_array_equal(out, numbers(1000) / 2)
    assert (counters.global_load_bytes, counters.global_store_bytes) == (4000, 4000)


def test_nothing_is_copied(device):
    out = np.zeros(8, np.float32)
    scale_kernel(OnlyDlpack(numbers(8)), 2, OnlyDlpack(out), device=device)
    np.testing.assert_array_equal(out, 2 * numbers(8))


def test_bfloat16_passes_as_its_bits(device):
    x = np.array([1.5, -2.0, np.inf], ml_dtypes.bfloat16)
    out = np.zeros(3, ml_dtypes.bfloat16)
    copy_bits_kernel(x, out, device=device)
    assert out.tolist() == x.tolist()


@pytest.mark.parametrize("n", [25_000, 25_344])
def test_shared_memory_beyond_48_kb(device, n):
    out = device.empty(n, np.float32)
    reverse_kernel(numbers(n), out, device=device)
    np.testing.assert_array_equal(out, numbers(n)[::-1])


def test_more_shared_memory_than_a_block_has_is_refused(device):
    with pytest.raises(ValueError, match="reverse: needs 101380 bytes of shared memory; a block on sm_120 has 101376"):
        reverse_kernel(numbers(25_345), device.empty(25_345, np.float32), device=device)


def test_static_shared_memory_counts_too(device):
    @kernel("E1", block=32, grid="1", shared="4 * N")
    def both_kernel(out: Out) -> None:
        fixed = cuda.shared.array(32, np.float32)
        fixed[cuda.threadIdx.x] = cuda.threadIdx.x
        if cuda.threadIdx.x < out.size:
            out[cuda.threadIdx.x] = fixed[cuda.threadIdx.x]

    both_kernel(device.empty(25_312, np.float32), device=device)
    with pytest.raises(ValueError, match="both: needs 101380 bytes of shared memory; a block on sm_120 has 101376"):
        both_kernel.prepare(device.empty(25_313, np.float32), device=device)


def test_an_empty_grid_runs_nothing(device):
    assert scale_kernel(numbers(0), 1.0, numbers(0), device=device) is None


def test_one_array_for_two_parameters(device):
    x = numbers(100)
    scale_kernel(x, 3.0, x, device=device)
    np.testing.assert_array_equal(x, 3 * numbers(100))


@pytest.mark.parametrize("which", ["read only last", "writable last"])
def test_an_array_and_a_read_only_view_of_it(device, which):
    x = numbers(100)
    frozen = x.view()
    frozen.flags.writeable = False
    if which == "read only last":
        store_first_kernel(x, frozen, device=device)
    else:
        scale_kernel(frozen, 3.0, x, device=device)
    np.testing.assert_array_equal(x, 3 * numbers(100))


def test_a_piece_outlives_its_array_and_stays_watched(device):
    x = device.empty(64, np.float32)
    piece, watched = x[:32], weakref.ref(ptx_device._watched(x))
    del x
    with pytest.raises(PtxError, match="uninitialised read"):
        scale_kernel(piece, 1.0, numbers(32), device=device)
    scale_kernel(numbers(32), 1.0, piece, device=device)
    scale_kernel(piece, 1.0, numbers(32), device=device)
    del piece
    assert watched() is None


def test_what_numpy_writes_is_written(device):
    x, out = device.empty(64, np.float32), numbers(32)
    x[:32] = 1
    scale_kernel(x[:32], 2.0, out, device=device)
    np.testing.assert_array_equal(out, np.full(32, 2, np.float32))
    x[40:] = np.array(0xA5A500A5, np.uint32).view(np.float32)  # three of its bytes are the filling
    scale_kernel(x[40:], 2.0, numbers(24), device=device)
    with pytest.raises(PtxError, match=r"reads byte 128 of global memory, which nobody wrote"):
        scale_kernel(x, 2.0, numbers(64), device=device)


def test_memory_is_watched_across_launches(device):
    x, y = device.empty(64, np.float32), device.empty(64, np.float32)
    with pytest.raises(PtxError, match="uninitialised read") as caught:
        scale_kernel(x, 1.0, y, device=device)
    assert caught.value.kind == "uninitialised read" and caught.value.source.startswith("test_cuda.py:")
    scale_kernel(numbers(64), 1.0, x, device=device)
    scale_kernel(x[:32], 2.0, y[:32], device=device)
    with pytest.raises(PtxError, match="uninitialised read"):
        scale_kernel(y, 1.0, x, device=device)


def test_a_device_keeps_no_array_and_no_array_keeps_its_device():
    device = PtxDevice()
    x, alive = device.empty(64, np.float32), weakref.ref(device)
    scale_kernel(numbers(64), 1.0, x, device=device)
    watched = weakref.ref(ptx_device._watched(x))
    del device
    gc.collect()
    assert alive() is None
    del x
    assert watched() is None


def test_a_prepared_launch_runs_again_on_what_the_arrays_hold(device):
    x, out = numbers(10), np.zeros(10, np.float32)
    run = scale_kernel.prepare(x, 2.0, out, device=device)
    run()
    x += 1
    run()
    np.testing.assert_array_equal(out, 2 * (numbers(10) + 1))


def test_a_graph_records_and_replays(device):
    x = numbers(10)
    with device.graph() as graph:
        assert scale_kernel(x, 2.0, x, stream=graph, device=device) is None
        scale_kernel(x, 3.0, x, stream=graph, device=device)
    np.testing.assert_array_equal(x, numbers(10))
    graph.replay()
    graph.replay()
    np.testing.assert_array_equal(x, 36 * numbers(10))
    with pytest.raises(RuntimeError, match="the graph does not record"):
        scale_kernel(x, 2.0, x, stream=graph, device=device)


def test_the_machine_has_no_other_streams(device):
    with pytest.raises(TypeError, match="scale: stream is 7; the PTX machine takes None or one of its graphs"):
        scale_kernel(numbers(3), 1.0, numbers(3), stream=7, device=device)


def test_launches_inside_functions_are_seen(device):
    with watch_launches() as outer:
        scale_kernel(numbers(3), 1.0, numbers(3), device=device)
        with watch_launches() as inner:
            scale_kernel(numbers(300), 1.0, numbers(300), device=device)
    assert [(seen.kernel, seen.grid) for seen in outer] == [("scale", (1,)), ("scale", (5,))]
    assert inner == outer[1:] and inner[0].counters.warp_instructions > 0


# Refusals: (arguments, error, message)

X, M = numbers(6), np.zeros((6, 4), np.int32)
LONG = np.zeros(6, np.int64)
FROZEN = numbers(6)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((X, 1.0), TypeError, "scale: got 2 arguments; it takes x, factor, out"),
    ((X.astype(np.float64), 1.0, X), TypeError, r"scale: x is float64\[6\]; it must be float32. Convert it first"),
    ((X.reshape(2, 3), 1.0, X), ValueError, r"scale: x is float32\[2, 3\]; it must have 1 axes: \[N\]"),
    ((X, 1.0, numbers(5)), ValueError, r"scale: out is float32\[5\]; its N in \[N\] must be 6, as in x"),
    ((numbers(12)[::2], 1.0, X), ValueError, r"x is float32\[6\] but not in C order; pass np.ascontiguousarray\(x\)"),
    ((X, 1.0, FROZEN), ValueError, r"scale: out is float32\[6\] but read-only, and the kernel writes it; pass a copy"),
    (([1.0], 1.0, X), TypeError, "scale: x is a list; pass a numpy array or an object with DLPack"),
    ((X, X, X), TypeError, "scale: factor is array.*it takes one float32"),
    ((X, "1", X), TypeError, "scale: factor is '1', a str; it takes one float32"),
    ((X, True, X), TypeError, "scale: factor is True, a bool"),
    ((OnGpu(), 1.0, X), TypeError, "x is on a GPU and the kernel runs on the CPU; copy it, or set DDTREE_DEVICE=gpu"),
])  # fmt: skip
def test_a_wrong_argument_is_refused_before_launch(device, arguments, error, message):
    with watch_launches() as launches, pytest.raises(error, match=message):
        scale_kernel(*arguments, device=device)
    assert launches == []


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((M[:, :3].copy(), 0, LONG), ValueError, r"typed: matrix is int32\[6, 3\]; its 4 in \[R, 4\] must be 4"),
    ((M, 1.0, LONG), TypeError, "typed: row is 1.0, a float; it takes one int32"),
    ((M, 2**31, LONG), ValueError, "typed: row is 2147483648, which int32 does not hold"),
    ((M, 0, LONG[:5]), ValueError, r"typed: out is int64\[5\]; its R in \[R\] must be 6, as in matrix"),
])  # fmt: skip
def test_fixed_sizes_and_integers_are_checked(device, arguments, error, message):
    with pytest.raises(error, match=message):
        typed_kernel(*arguments, device=device)


@settings(max_examples=40)
@given(st.integers(-(2**31), 2**31 - 1) | st.integers(-(2**7), 2**7 - 1).map(np.int8))
def test_an_integer_arrives_as_it_is(value):
    out = np.zeros(1, np.int64)
    typed_kernel(np.zeros((1, 4), np.int32), value, out, device=PtxDevice())
    assert out[0] == value


def test_a_read_only_array_is_taken_where_the_kernel_only_reads(device):
    out = np.zeros(6, np.float32)
    scale_kernel(FROZEN, 1.0, out, device=device)
    np.testing.assert_array_equal(out, FROZEN)


# The GPU's side, as far as it can be tried without one


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    """A GpuDevice over a driver that only notes what it is handed: (device, launches)."""
    launches: list[Any] = []

    def launch(config: int, kernel: int, table: int, extra: None) -> int:
        places = (ctypes.c_void_p * 15).from_address(table)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        launches.append((gpu_run._Config.from_buffer_copy(ctypes.string_at(config, 64)), kernel, words))
        return 0

    device = GpuDevice.__new__(GpuDevice)
    device._only, device._libraries, device._launch = True, {}, launch
    device._kernels, device._loading = {scale_kernel: (types.SimpleNamespace(handle=0xF), 0)}, threading.Lock()
    device.arch, device.max_shared = "sm_90", 232_448
    return [device, launches]


def test_threads_load_a_kernel_once(launched, monkeypatch):
    device, loads, loaded = launched[0], [], types.SimpleNamespace(handle=0xF)
    device._kernels, device._here = {}, lambda: None
    monkeypatch.setattr(gpu_device, "_load_kernel", lambda kernel, device: (loads.append(kernel) or loaded, 0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: scale_kernel(OnGpu(), 2.0, OnGpu(), device=device), range(24)))
    assert len(loads) == 1


def test_the_gpu_gets_the_words_of_the_abi(launched):
    device, launches = launched
    x, out = OnGpu(shape=(130,)), OnGpu(shape=(130,), data=(8192, False), strides=(4,))
    scale_kernel(x, 0.5, out, device=device)
    ((config, kernel, words),) = launches
    sizes = [config.grid_x, config.grid_y, config.grid_z, config.block_x, config.block_y, config.block_z, config.shared]
    assert (kernel, sizes, config.stream, config.count) == (0xF, [3, 1, 1, 64, 1, 1, 0], None, 1)
    half = int(np.float32(0.5).view(np.uint32))
    assert words == [0, 0, 130, 4, 4096, 130, 4, half, 0, 0, 130, 4, 8192, 130, 4]


def test_an_argument_that_moves_changes_one_word(launched):
    device, launches = launched
    launch = scale_kernel.prepare(OnGpu(shape=(130,)), 0.5, OnGpu(shape=(130,), data=(8192, False)), device=device)
    launch()
    launch.run.move(0, "another", 0x70000)
    launch(stream=5)
    (_, _, before), (config, _, after) = launches
    assert [i for i in range(15) if before[i] != after[i]] == [4] and after[4] == 0x70000 and config.stream == 5


def test_a_launch_in_another_thread_makes_the_gpu_current_there_and_tries_again(launched):
    device, launches = launched
    current, made = {threading.get_ident()}, []
    device._device = types.SimpleNamespace(set_current=lambda: made.append(current.add(threading.get_ident())))
    device._driver = types.SimpleNamespace(cuCtxGetCurrent=lambda: (0, int(threading.get_ident() in current)))
    noting = device._launch
    device._launch = lambda *call: noting(*call) if threading.get_ident() in current else 201
    launch = scale_kernel.prepare(OnGpu(), 0.5, OnGpu(), device=device)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(launch).result()
    assert len(made) == 1 and len(launches) == 3


def test_a_device_of_the_process_before_a_fork_is_refused_by_name(launched, monkeypatch):
    device, launches = launched
    device._launch, device.ordinal, device._core, device._stream = (lambda *call: 3), 0, None, None
    launch = scale_kernel.prepare(OnGpu(), 0.5, OnGpu(), device=device)
    monkeypatch.setattr(driver, "_owner", [os.getpid() + 1])  # as it is in a child
    monkeypatch.setattr(driver, "_threads", [driver._Threads()])
    for use in (launch, device.synchronize, lambda: device.empty(3, np.float32), device.graph):
        with pytest.raises(RuntimeError, match=r"was forked from one that used the GPU.*get_context\(.spawn.\)"):
            use()
    assert launches == []


FORK = """
import os, types
from ddtree.cuda import driver
core = types.SimpleNamespace(Device=lambda ordinal: types.SimpleNamespace(set_current=lambda: None))
before = os.fork()
if before == 0:
    driver.make_current(core, 0)  # CUDA was not used yet: allowed
    os._exit(0)
assert os.waitpid(before, 0)[1] == 0
driver.make_current(core, 0)
after = os.fork()
if after == 0:
    try:
        driver.make_current(core, 0)
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(after, 0)[1]) == 7
driver.make_current(core, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_may_use_the_gpu_only_if_its_parent_did_not():
    assert run_python(FORK) == ""


def test_a_driver_that_says_it_cannot_start_in_a_fork_is_not_taken_for_no_gpu(monkeypatch):
    library = types.SimpleNamespace(cuInit=lambda flags: 3)
    monkeypatch.setattr(gpu_device.ctypes, "CDLL", lambda name: library)
    gpu_device._driver_version.cache_clear()
    monkeypatch.delenv("DDTREE_DEVICE", raising=False)
    with pytest.raises(RuntimeError, match="was forked from one that used the GPU"):
        current_device()
    gpu_device._driver_version.cache_clear()


def test_static_shared_memory_counts_on_a_gpu_too(launched):
    device, launches = launched
    device._kernels[scale_kernel] = None, device.max_shared + 1
    with pytest.raises(ValueError, match="scale: needs 232449 bytes of shared memory; a block on sm_90 has 232448"):
        scale_kernel(OnGpu(), 0.5, OnGpu(), device=device)
    assert launches == []


@pytest.mark.parametrize(("array", "error", "message"), [
    (numbers(3), TypeError, "x is a ndarray in host memory and the kernel runs on the GPU"),
    (OnlyDlpack(numbers(3)), TypeError, "x is a OnlyDlpack in host memory"),
    (OnGpu(typestr="<f8"), TypeError, r"x is float64\[3\]; it must be float32"),
    (OnGpu(strides=(8,)), ValueError, "not in C order"),
])  # fmt: skip
def test_what_is_not_a_gpu_array_in_order_is_refused(launched, array, error, message):
    with pytest.raises(error, match=message):
        scale_kernel(array, 0.5, OnGpu(), device=launched[0])
    assert launched[1] == []


def test_a_read_only_gpu_array_is_refused_as_output(launched):
    with pytest.raises(ValueError, match="read-only"):
        scale_kernel(OnGpu(), 0.5, OnGpu(data=(4096, True)), device=launched[0])


def test_strides_of_axes_of_one_do_not_matter():
    view = libraries._gpu_view("x", OnGpu(shape=(1, 3), strides=(999, 4)))
    assert view.ordered and not libraries._gpu_view("x", OnGpu(shape=(2, 3), strides=(4, 8))).ordered


def test_a_gpu_array_offers_the_interface():
    array = GpuArray(types.SimpleNamespace(handle=4096), (2, 3), np.dtype(np.float64))
    view = libraries._gpu_view("x", array)
    assert (view.address, view.shape, view.dtype, view.ordered, view.writable) == (4096, (2, 3), np.float64, True, True)


# The choice


def test_the_choice_is_forced_by_the_environment(monkeypatch):
    monkeypatch.setenv("DDTREE_DEVICE", "ptx")
    assert current_device().name == "ptx" and current_device() is current_device()
    monkeypatch.setenv("DDTREE_DEVICE", "cpu")
    with pytest.raises(ValueError, match="DDTREE_DEVICE is 'cpu'; it is 'gpu', 'ptx', or not set"):
        current_device()


def test_without_a_gpu_the_machine_is_chosen_and_a_forced_gpu_is_an_error(monkeypatch):
    for module in (cuda_module, gpu_device):
        monkeypatch.setattr(module, "_driver_version", lambda: None)
    monkeypatch.delenv("DDTREE_DEVICE", raising=False)
    assert current_device().name == "ptx"
    monkeypatch.setenv("DDTREE_DEVICE", "gpu")
    with pytest.raises(RuntimeError, match=r"found no NVIDIA GPU.*DDTREE_DEVICE=ptx"):
        GpuDevice()


def without(*names):
    """An import that finds all but these modules."""

    def find(name):
        if name in names:
            raise ImportError(f"No module named {name!r}")
        return types.ModuleType(name)

    return find


@pytest.mark.parametrize("has_driver", [True, False])
@pytest.mark.parametrize("missing", [(), ("cuda.core",), ("cuda.bindings.driver",)])
def test_of_driver_and_wheels_each_that_is_missing_is_named_with_what_to_do(monkeypatch, has_driver, missing):
    monkeypatch.setattr(gpu_device, "_driver_version", lambda: 13_000 if has_driver else None)
    monkeypatch.setattr(driver, "import_module", without(*missing))
    problems = gpu_device.gpu_problems()
    assert len(problems) == (not has_driver) + len(missing)
    assert has_driver or problems[0].startswith("found no NVIDIA GPU: ")
    assert not missing or f"{missing[0]} could not be imported" in problems[-1]
    assert not missing or "python -m pip install 'ddtree[gpu]'" in problems[-1]
    if problems:
        with pytest.raises(RuntimeError if not has_driver else ImportError) as caught:
            gpu_device._require_gpu()
        assert all(problem in str(caught.value) for problem in problems) and "DDTREE_DEVICE=ptx" in str(caught.value)


@pytest.mark.parametrize(("loads", "message"), [(True, "is installed and shows none"), (False, "is not installed")])
def test_a_driver_without_a_gpu_is_not_taken_for_no_driver(monkeypatch, loads, message):
    def load():
        if not loads:
            raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(gpu_device, "_driver_version", lambda: None)
    monkeypatch.setattr(gpu_device, "_load_driver", load)
    assert f"found no NVIDIA GPU: the NVIDIA driver {message}" in gpu_device.gpu_problems()[0]


def test_a_driver_that_is_too_old_is_named_not_passed_over(monkeypatch):
    for module in (cuda_module, gpu_device):
        monkeypatch.setattr(module, "_driver_version", lambda: 12_040)
    monkeypatch.delenv("DDTREE_DEVICE", raising=False)
    cuda_module._gpu_device.cache_clear()
    with pytest.raises(RuntimeError, match=r"knows CUDA 12\.4, the wheels need 13\.0: update the driver to 580"):
        current_device()
