"""Everything about kernels that only a GPU can tell, in one run that writes one JSON.

`python -m tools.gpu_check --out fixtures/measurements/gpu_check.json` needs an NVIDIA GPU and the extra `gpu`. It
compares the PTX machine with the GPU bit for bit, builds all recorded trees, runs deliberately wrong kernels under
compute-sanitizer, compiles and runs the C++ example, passes torch and CuPy arrays, and measures launches.
`--prebuilt FOLDER` also runs the example on kernels that were built elsewhere. Exit status 1 if anything is not as it
must be.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddtree.aot import build_kernels, read_toolchain
from ddtree.bench import spread
from ddtree.build import build_trees, build_trees_kernel
from ddtree.check import assert_equal
from ddtree.cuda import Device, GpuDevice, Kernel, LaunchRule, PtxDevice, _compilable, flatten, kernel, link
from ddtree.cuda import cuda as device_side
from ddtree.kdtr import load
from ddtree.ptx import load_ptx
from ddtree.ptx.text import PtxError
from ddtree.tree import build_tree
from tools.gpu import ROOT, failures, is_clean, run_sections, start_sanitizer

VECTORS = ROOT / "fixtures" / "tree_vectors.kdtr"
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, 1, -1.5], np.float32)
TOOLS = {
    "reverse": "racecheck", "warp": "racecheck", "bounds": "memcheck", "uninit": "initcheck", "barrier": "synccheck",
    "mask": "synccheck", "unwritten": "initcheck", "apart": "synccheck", "outsider": "synccheck",
}  # fmt: skip
BLIND = {  # wrong kernels to which compute-sanitizer 2025.3 says nothing; each has a sibling that it does see
    "uninit_wrong": "initcheck: 'global memory initialization checking'; this is shared memory. See unwritten_wrong",
    "mask_wrong": "the mask is that of a shuffle, not of a barrier. See outsider_wrong",
}


@dataclass(frozen=True)
class Case:
    """How a kernel of tests/kernels_ptx.py is launched, and its arguments."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Callable[[np.random.Generator], list[Any]]
    shared: int = 0


def floats(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.standard_normal(shape).astype(np.float32)


def integers(low: int, high: int, n: int, dtype: str) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.integers(low, high, n).astype(dtype)


def zeros(shape: int | tuple[int, ...], dtype: str = "float32") -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.zeros(shape, dtype)


def given(value: Any) -> Callable[[np.random.Generator], Any]:
    return lambda rng: value


def case(grid: Any, block: Any, *makers: Callable[..., Any], shared: int = 0) -> Case:
    sizes = ((size,) if isinstance(size, int) else size for size in (grid, block))
    return Case(*sizes, lambda rng: [make(rng) for make in makers], shared)


EMPTY = ((64,), np.float32)  # an array that nothing has written
SPECIALS = np.tile(SPECIAL, len(SPECIAL))
PAIRED = np.repeat(SPECIAL, len(SPECIAL))
CASES = {
    "block_sum": case(4, 128, floats(500), zeros(4)),
    "warp_scan": case(2, 64, floats(128), zeros(128)),
    "histogram": case(2, 64, integers(0, 16, 1000, "int32"), zeros(16, "int32")),
    "matmul": case((2, 3), (8, 8), floats(24, 32), floats(32, 16), zeros((24, 16))),
    "best_first": case(3, 32, lambda rng: -rng.random(24), given(8), zeros(48, "int32"), zeros(48, "float64")),
    "collatz": case(1, 128, integers(1, 10_000, 100, "int64"), zeros(100, "int32")),
    "votes": case(1, 64, integers(0, 8, 64, "uint32"), zeros(64, "uint32")),
    "half_warps": case(1, 64, floats(64), zeros(64)),
    "locals_sort": case(1, 32, integers(-99, 99, 256, "int32"), zeros(256, "int32")),
    "spin_lock": case(8, 32, zeros(1, "int32"), zeros(1, "int32")),
    "axpy": case(2, 128, given(0.1), floats(250), floats(250), zeros(250)),
    "axpy specials": case(2, 128, given(-3.4e38), given(SPECIALS), given(PAIRED), zeros(len(PAIRED))),
    "integers": case(4, 64, integers(-(2**31), 2**31, 256, "int32"), integers(1, 99, 256, "int32"), zeros(256, "i4")),
    "float_atomics": case(2, 32, lambda rng: rng.integers(1, 99, 64).astype(np.float64), zeros(3, "float64")),
    "dynamic_shared": case(2, 96, floats(192), zeros(192), shared=384),
    "constants": case(1, 64, integers(0, 99, 64, "int32"), zeros(64, "int32")),
    "count_true": case(2, 64, integers(0, 10, 128, "int32"), zeros(128, "int32")),
    "maths": case(1, 64, lambda rng: rng.random(64, np.float32), lambda rng: rng.random(64, np.float32), zeros(64)),
    "maths64": case(1, 64, lambda rng: rng.random(64), lambda rng: rng.random(64), zeros(64, "float64")),
    **{f"{name}_{twin}": case(1, threads, floats(n), zeros(n)) for twin in ("racy", "wrong", "fixed")
       for name, threads, n in (("reverse", 64, 64), ("bounds", 64, 50), ("uninit", 64, 64), ("barrier", 64, 64),
                                ("warp", 32, 32), ("mask", 32, 32), ("apart", 64, 64), ("outsider", 32, 32))},
    "unwritten_wrong": case(1, 64, floats(64), given(EMPTY), zeros(64)),
    "unwritten_fixed": case(1, 64, floats(64), given(EMPTY), zeros(64)),
}  # fmt: skip


def arguments_of(name: str) -> list[Any]:
    """The same arguments in every process."""
    return CASES[name].arguments(np.random.default_rng(sum(name.encode())))


In = Annotated[Any, "const float32[N]"]
Out = Annotated[Any, "float32[N]"]


def unwritten_wrong(x: In, scratch: Out, out: Out) -> None:
    """Wrong: the last element of scratch is never written."""
    i = device_side.grid(1)
    if i < x.size - 1:
        scratch[i] = x[i]
    out[i] = scratch[i]


def unwritten_fixed(x: In, scratch: Out, out: Out) -> None:
    """The same with every element written."""
    i = device_side.grid(1)
    scratch[i] = x[i]
    out[i] = scratch[i]


def apart_wrong(x: In, out: Out) -> None:
    """Wrong: 40 threads wait at one barrier, the other 24 at the next."""
    i = device_side.grid(1)
    if i < 40:
        device_side.syncthreads()
        out[i] = x[i]
    else:
        out[i] = -x[i]
    device_side.syncthreads()


def apart_fixed(x: In, out: Out) -> None:
    """The same with the first barrier outside the branch."""
    i = device_side.grid(1)
    device_side.syncthreads()
    if i < 40:
        out[i] = x[i]
    else:
        out[i] = -x[i]
    device_side.syncthreads()


def outsider_wrong(x: In, out: Out) -> None:
    """Wrong: the lanes that come are not in the mask."""
    i = device_side.grid(1)
    out[i] = x[i]
    if i < 16:
        device_side.syncwarp(0xFFFF0000)
        out[i] = x[i + 16]


def outsider_fixed(x: In, out: Out) -> None:
    """The same with the mask of those that come."""
    i = device_side.grid(1)
    out[i] = x[i]
    if i < 16:
        device_side.syncwarp(0x0000FFFF)
        out[i] = x[i + 16]


def make_rule(name: str) -> LaunchRule:
    """The launch of a case as a rule."""
    return LaunchRule(CASES[name].block, tuple(map(str, CASES[name].grid)), str(CASES[name].shared))


HERE = (unwritten_wrong, unwritten_fixed, apart_wrong, apart_fixed, outsider_wrong, outsider_fixed)
KERNELS = {function.__name__: Kernel(function, "E1", make_rule(function.__name__)) for function in HERE}


def names_of(*endings: str) -> list[str]:
    """The cases whose names end so and whose kernel exists."""
    module = import_module("tests.kernels_ptx")
    return [n for n in CASES if n.endswith(endings) and (n in KERNELS or hasattr(module, n.split()[0]))]


def as_kernel(name: str) -> Kernel:
    """A kernel of this file, or of tests/kernels_ptx.py with its contract made from its numba signature."""
    if name in KERNELS:
        return KERNELS[name]
    module = import_module("tests.kernels_ptx")
    function = getattr(module, name.split()[0])
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    for parameter, given_type in zip(parameters, module.KERNELS[function], strict=True):
        axes = [f"{parameter}{axis}" for axis in range(getattr(given_type, "ndim", 0))]
        contract = f"{given_type.dtype}[{', '.join(axes)}]" if axes else str(given_type)
        function.__annotations__[parameter] = Annotated[Any, contract]
    return Kernel(function, "E1", make_rule(name))


def run_case(name: str, device: Device) -> list[np.ndarray]:
    """All arrays of a case after its kernel ran on a device."""
    arguments = [
        device.array(value) if isinstance(value, np.ndarray) else device.empty(*value) if value is EMPTY else value
        for value in arguments_of(name)
    ]
    as_kernel(name)(*arguments, device=device)
    return [device.numpy(value) for value in arguments if hasattr(value, "shape")]


def check_case(gpu: Device, name: str) -> str:
    """A kernel on the GPU, compiled for it, and on the PTX machine, compiled for sm_120: "equal", or how not."""
    try:
        pairs = list(zip(run_case(name, gpu), run_case(name, PtxDevice(count=False)), strict=True))
    except PtxError as error:
        return f"FAILED: {error}"
    if approximate := load_ptx(as_kernel(name).ptx()).approximations:
        error = max(float(np.max(np.abs(a - b) / np.abs(b))) for a, b in pairs)
        return f"{'' if error < 1e-5 else 'FAILED: '}within {error:.1e}, uses {', '.join(approximate)}"
    same = [np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs]
    nan = [a.dtype.kind == "f" and np.array_equal(a, b, equal_nan=True) for a, b in pairs]
    return "equal" if all(same) else "equal but for the bits of NaN" if all(nan) else "FAILED: differs"


def conforming() -> list[str]:
    """The cases that both must agree on: all but those that are wrong on purpose."""
    return [name for name in names_of("") if not name.endswith(("_wrong", "_racy"))]


def check_conformance(gpu: Device) -> dict[str, str]:
    """Each kernel on the GPU and on the PTX machine."""
    return {name: check_case(gpu, name) for name in conforming()}


def check_trees(gpu: Device) -> dict[str, Any]:
    """All recorded trees by the builder, held against the reference to the bit."""
    vectors = load(VECTORS)
    nodes = 0
    for case in vectors.metadata["cases"]:
        log_probs, ids = (vectors[f"{case['case']}.top_{field}"] for field in ("log_probs", "token_ids"))
        built = build_trees(log_probs[None], ids[None].astype(np.int64), case["budget"], 42, device=gpu).tree(0)
        expected = build_tree(log_probs, ids, case["budget"], 42)
        for field in ("tokens", "parents", "depths", "scores", "ranks"):
            assert_equal(getattr(built, field), getattr(expected, field), f"{case['case']} {field}")
        nodes += len(built)
    return {"trees": len(vectors.metadata["cases"]), "nodes": nodes, "equal": True, **check_large_tree(gpu)}


def check_large_tree(gpu: Device) -> dict[str, int]:
    """A tree that needs more than 48 KB of shared memory."""
    log_probs = -np.sort(np.random.default_rng(0).random((1, 15, 6000), np.float32), axis=2)
    ids = np.broadcast_to(np.arange(6000), log_probs.shape).astype(np.int64)
    built = build_trees(log_probs, ids, 6000, device=gpu).tree(0)
    assert_equal(built.scores, build_tree(log_probs[0], ids[0], 6000).scores, "large tree scores")
    return {"large_tree_nodes": len(built), "large_tree_shared_bytes": 12 * len(built)}


def run_alone(cubin: Path, name: str) -> None:
    """Launch one case from a cubin file with plain allocations: what runs under compute-sanitizer."""
    core, driver = import_module("cuda.core"), import_module("cuda.bindings.driver")
    device = core.Device()
    device.set_current()
    loaded = core.ObjectCode.from_cubin(cubin.read_bytes()).get_kernel(f"ddtree_{name}")
    words: list[Any] = []
    for value in arguments_of(name):
        array = np.empty(*value) if value is EMPTY else value
        _, address = driver.cuMemAlloc(array.nbytes)
        if value is not EMPTY:
            driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes)
        words += flatten(int(address), array.shape, array.itemsize)
    config = core.LaunchConfig(grid=CASES[name].grid, block=CASES[name].block)
    core.launch(device.default_stream, config, loaded, *words)
    device.sync()


def sanitize(name: str, folder: Path) -> dict[str, Any]:
    """One kernel under the tool that should catch its mistake."""
    tool = TOOLS[name.split("_")[0]]
    process = start_sanitizer(tool, "tools.gpu_check", "--alone", name, str(folder / f"{name}.cubin"))
    try:
        text = process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {"tool": tool, "clean": False, "says": ["stopped after 60 s"]}
    found = re.findall(r"=========\s+(\S.*)", text)
    reports = [line for line in found if not line.startswith(("COMPUTE-SANITIZER", "Host Frame", "Saved host"))]
    why = {"why": BLIND[name]} if name in BLIND else {}
    return {"tool": tool, "clean": is_clean(text), "says": reports[:3], **why}


def check_sanitizer(arch: str) -> dict[str, Any]:
    """Wrong kernels and their repaired twins: what compute-sanitizer says and what the PTX machine says."""
    if not shutil.which("compute-sanitizer"):
        return {"skipped": "compute-sanitizer is not on the PATH"}
    names = names_of("_wrong", "_racy", "_fixed")
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            Path(scratch, f"{name}.cubin").write_bytes(link(as_kernel(name).ptx(arch), arch)[0].code)
        with ThreadPoolExecutor(6) as pool:
            reports = list(pool.map(lambda name: sanitize(name, Path(scratch)), names))
    return {name: {**report, "machine": ask_machine(name)} for name, report in zip(names, reports, strict=True)}


def ask_machine(name: str) -> str:
    """What the PTX machine says to a case: "clean", or the kind of its error."""
    try:
        run_case(name, PtxDevice())
    except PtxError as error:
        return error.kind
    return "clean"


def check_example(arch: str, prebuilt: Path | None) -> dict[str, str]:
    """The C++ example, compiled by g++, on kernels built here and on kernels built elsewhere."""
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        build_kernels(arch, scratch)
        program = str(Path(scratch, "example"))
        command = ["g++", "-std=c++11", "-O2", "-Wall", "-I", scratch, str(ROOT / "kernels" / "example.cpp")]
        subprocess.run([*command, "-o", program, "-ldl"], check=True)
        for label, folder in {"built here": scratch, "built elsewhere": prebuilt}.items():
            if folder is not None:
                run = subprocess.run([program, str(folder), str(VECTORS)], capture_output=True, text=True, check=False)
                failed = "" if run.returncode == 0 else f"FAILED with {run.returncode}: {run.stderr}"
                results[label] = failed + run.stdout.strip()
    return results


def check_interop(gpu: GpuDevice) -> dict[str, str]:
    """torch and CuPy arrays go in as they are and stay on the GPU; a CPU tensor is refused."""
    results = {}
    log_probs = -np.sort(np.random.default_rng(1).random((3, 15, 64), np.float32), axis=2)
    ids = np.broadcast_to(np.arange(64), log_probs.shape).astype(np.int64)
    expected = [build_tree(log_probs[r], ids[r], 64) for r in range(3)]
    for name in ("torch", "cupy"):
        if not find_spec(name):
            results[name] = "not installed"
            continue
        module = import_module(name)
        host = (log_probs, ids.copy())
        there = [module.asarray(x) if name == "cupy" else module.from_numpy(x).cuda() for x in host]
        trees = build_trees(*there, 64, device=gpu)
        for request, tree in enumerate(expected):
            assert_equal(gpu.numpy(trees.scores)[request], tree.scores, f"{name} scores")
        own = gpu.array(ids)  # an array of ours goes the other way without a copy
        back = module.as_tensor(own, device="cuda") if name == "torch" else module.asarray(own)
        same = (back.data_ptr() if name == "torch" else back.data.ptr) == int(own.memory.handle)
        kept = type(trees.parents) is type(there[0])
        results[name] = "equal, of its kind, no copy of ours" if same and kept else f"FAILED: {same=}, {kept=}"
    return {**results, **(check_torch(gpu) if find_spec("torch") else {})}


@kernel("E0", block=128, grid="cdiv(N, 128)")
def copy_bits_kernel(x: Annotated[Any, "const uint16[N]"], out: Annotated[Any, "uint16[N]"]) -> None:
    """Copies 16-bit elements."""
    i = device_side.grid(1)
    if i < x.size:
        out[i] = x[i]


def check_torch(gpu: GpuDevice) -> dict[str, str]:
    """bfloat16, torch's streams, torch's graph capture, and refusals."""
    torch = import_module("torch")
    x = torch.randn(1000, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy_bits_kernel(x, out, device=gpu, stream=stream.cuda_stream)
    stream.synchronize()
    results = {"torch bfloat16 on a torch stream": "equal" if torch.equal(x, out) else "FAILED"}
    out.zero_()
    run = copy_bits_kernel.prepare(x, out, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    results["captured by torch"] = "equal" if torch.equal(x, out) else "FAILED"
    try:
        copy_bits_kernel(x.cpu(), out, device=gpu)
        results["CPU tensor"] = "FAILED: taken"
    except TypeError as error:
        results["CPU tensor"] = f"refused: {error}"
    return results


@kernel("E1", block=128, grid="cdiv(N, 128)")
def scale_kernel(
    x: Annotated[Any, "const float32[N]"], factor: Annotated[Any, "float32"], out: Annotated[Any, "float32[N]"]
) -> None:
    """The kernel whose launches are timed."""
    i = device_side.grid(1)
    if i < x.size:
        out[i] = np.float32(factor) * x[i]


def time_calls(
    call: Callable[[], Any], finish: Callable[[], Any], calls: int = 500, repeats: int = 21
) -> dict[str, float]:
    """Microseconds a call on the host, median and quartiles of `repeats` runs of `calls` calls."""
    times = []
    for _ in range(repeats):
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    finish()
    return spread(times[1:])


def time_launches(gpu: GpuDevice) -> dict[str, Any]:
    """What one launch of a tiny kernel costs the host, by the ways there are; numba's dispatcher for comparison."""
    x, out = gpu.array(np.ones(128, np.float32)), gpu.empty(128, np.float32)
    run = scale_kernel.prepare(x, 2.0, out, device=gpu)
    with gpu.graph() as graph:
        for _ in range(100):
            run(graph)
    numba_cuda = import_module("numba.cuda")
    dispatcher, factor = numba_cuda.jit(_compilable(scale_kernel.function, gpu.arch)), np.float32(2)
    arrays = numba_cuda.to_device(np.ones(128, np.float32)), numba_cuda.device_array(128, np.float32)
    configured = dispatcher[1, 128]
    configured(arrays[0], factor, arrays[1])
    replay = time_calls(graph.replay, gpu.synchronize, calls=20)
    return {
        "numba_dispatcher": time_calls(lambda: configured(arrays[0], factor, arrays[1]), gpu.synchronize),
        "kernel_call": time_calls(lambda: scale_kernel(x, 2.0, out, device=gpu), gpu.synchronize),
        "prepared": time_calls(run, gpu.synchronize),
        "graph_of_100_per_launch": {key: value / 100 if key != "n" else value for key, value in replay.items()},
    }


def misjudged(results: dict[str, Any]) -> list[str]:
    """Every kernel that the sanitizer or the machine misjudged."""
    found = []
    for name, value in results.items():
        fixed = name.endswith("_fixed")
        if fixed and not (value["clean"] and value["machine"] == "clean"):
            found.append(f"{name}: repaired, but not clean")
        if not fixed and (value["machine"] == "clean" or value["clean"] != (name in BLIND)):
            found.append(f"{name}: wrong, but not seen as expected")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--prebuilt", type=Path, help="a folder of kernels built elsewhere for this GPU's architecture")
    parser.add_argument("--alone", nargs=2, metavar=("NAME", "CUBIN"), help="launch one case, under compute-sanitizer")
    options = parser.parse_args()
    if options.alone:
        run_alone(Path(options.alone[1]), options.alone[0])
        return 0
    gpu = GpuDevice()
    sections: dict[str, Callable[[], Any]] = {
        "conformance": lambda: check_conformance(gpu),
        "trees": lambda: check_trees(gpu),
        "example": lambda: check_example(gpu.arch, options.prebuilt),
        "interop": lambda: check_interop(gpu),
        "launch_us": lambda: time_launches(gpu),
        "sanitizer": lambda: check_sanitizer(gpu.arch),
    }
    facts = {"arch": gpu.arch, "toolchain": read_toolchain(build_trees_kernel.ptx(gpu.arch))}
    prebuilt = f" --prebuilt {options.prebuilt}" if options.prebuilt else ""
    command = f"python -m tools.gpu_check --out {options.out.name if options.out else 'FILE'}{prebuilt}"
    results = run_sections(sections, options.out, command, facts)
    judged = results["sanitizer"]
    found = failures(results) + (misjudged(judged) if isinstance(judged, dict) and "skipped" not in judged else [])
    print("\n".join(found) or "everything as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
