"""Tensor cores, matrix loads and asynchronous copies on a GPU, held against numpy and the PTX machine to the bit.

`python -m tools.gpu_tiles --out FILE` needs an NVIDIA GPU (sm_90 or newer) and the extra `gpu`, and writes one JSON:
the rule that the card follows, outputs of `mma.sync` compared with `mma_ref` and with the recording of an H200, loads
and copies compared with the PTX machine, pipelines of two to four stages, and wrong ones under compute-sanitizer. Exit
status 1 if anything is not as it must be. `tests/test_tiles.py` runs the same kernels on the PTX machine.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddtree import mma
from ddtree.check import assert_equal
from ddtree.copies import commit_group, copy_async_4, copy_async_8, copy_async_16, copy_async_16_zfill, wait_group
from ddtree.cuda import (
    Assembly,
    Device,
    GpuDevice,
    Kernel,
    PtxDevice,
    cuda,
    device_function,
    global_address,
    kernel,
    shared_address,
)
from ddtree.kdtr import load
from ddtree.mma import ldmatrix_x2, ldmatrix_x4, mma_m16n8k16_bf16, rows_of_a, rows_of_b
from ddtree.probe import each, run_function
from ddtree.ptx.fragments import from_registers, to_registers
from ddtree.ptx.text import PtxError
from ddtree.tensor_cores import mma_ref
from tools.gpu import ROOT, failures, is_clean, run_sections, start_sanitizer

RECORDED = ROOT / "fixtures" / "mma_h200.kdtr"
PRODUCTS = {
    ("bf16", 16): mma.mma_m16n8k16_bf16, ("f16", 16): mma.mma_m16n8k16_f16,
    ("bf16", 8): mma.mma_m16n8k8_bf16, ("f16", 8): mma.mma_m16n8k8_f16,
}  # fmt: skip
FOUR = ("uint32",) * 4


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, device: Device) -> np.ndarray:
    """Tiles (n, 16, k), (n, k, 8), (n, 16, 8) by one `mma.sync` each, a warp a tile, as many as fill whole blocks."""
    k = a.shape[2]
    registers = [tuple(map(each, to_registers(tile, matrix))) for tile, matrix in ((a, "a"), (b, "b"), (c, "c"))]
    found = run_function(PRODUCTS[kind, k], *registers, returns=("float32",) * 4, device=device)
    return from_registers(found, "c")


def check_recorded(device: Device) -> dict[str, int]:
    """The inputs of the recording: the bits that were recorded, and those of `mma_ref`."""
    recorded, compared = load(RECORDED), {}
    for name in recorded.metadata["sets"]:
        kind = name.split(".")[0]
        a, b, c, d = (np.array(recorded[f"{name}.{part}"]) for part in "ABCD")
        found = multiply(a, b, c, kind, device)
        assert_equal(found.view(np.uint32), d.view(np.uint32), name)
        compared[name] = int(d.size)
    return compared


def draw_tiles(rng: np.random.Generator, n: int, kind: str, k: int, how: str) -> list[np.ndarray]:
    """Random A, B and C: all bit patterns, or numbers whose exponents spread so widely that the cut shows."""
    shapes = ((n, 16, k), (n, k, 8), (n, 16, 8))
    if how == "bits":
        a, b = (rng.integers(0, 1 << 16, shape).astype(np.uint16) for shape in shapes[:2])
        return [a, b, rng.integers(0, 1 << 32, shapes[2]).astype(np.uint32).view(np.float32)]
    spread = 6 if kind == "f16" else 20
    a, b, c = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, shape) for shape in shapes)
    narrow = [x.astype(np.float16).view(np.uint16) if kind == "f16" else
              (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]  # fmt: skip
    return [*narrow, c.astype(np.float32)]


def check_products(device: Device, n: int = 1024) -> dict[str, int]:
    """Fresh random tiles of every instruction against `mma_ref`."""
    rng, compared = np.random.default_rng(7), {}
    for kind, k in PRODUCTS:
        for how in ("bits", "wide"):
            a, b, c = draw_tiles(rng, n, kind, k, how)
            expected = mma_ref(a, b, c, kind, step=k)
            name = f"{kind} k{k} {how}"
            assert_equal(multiply(a, b, c, kind, device).view(np.uint32), expected.view(np.uint32), name)
            compared[name] = int(expected.size)
    return compared


def check_rule(device: Device) -> dict[str, str]:
    """What the seven questions say."""
    lines = {kind: mma.describe_rule(mma.measure_rule(kind, device)) for kind in ("bf16", "f16")}
    return {kind: line if line.startswith("as recorded") else f"FAILED: {line}" for kind, line in lines.items()}


# --- loads and stores of matrices ------------------------------------------------------------------------------------

stmatrix_x4 = Assembly("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", (), ("uint32", FOUR), True)
stmatrix_x2_trans = Assembly(
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};", (), ("uint32", FOUR[:2]), True
)
movmatrix = Assembly("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "uint32", ("uint32",))
LOADS = {
    "ldmatrix x1": (mma.ldmatrix_x1, 1), "ldmatrix x2": (mma.ldmatrix_x2, 2), "ldmatrix x4": (mma.ldmatrix_x4, 4),
    "ldmatrix x1 trans": (mma.ldmatrix_x1_trans, 1), "ldmatrix x2 trans": (mma.ldmatrix_x2_trans, 2),
    "ldmatrix x4 trans": (mma.ldmatrix_x4_trans, 4),
}  # fmt: skip


@cache
def make_load(instruction: Assembly) -> Any:
    """A function that loads matrices from rows of a tile given lane by lane."""

    @device_function
    def load_rows(tile, row, lane):
        rows = cuda.shared.array((64, 8), np.uint16, 16)
        for i in range(lane, 512, 32):
            rows[i // 8, i % 8] = tile[i]
        cuda.syncwarp()
        return instruction(np.uint32(shared_address(rows, 0) + 16 * row))

    return load_rows


@device_function
def store_rows(tile, row, registers, lane):
    """stmatrix in both forms, then what lies in the rows: 512 elements back into the tile."""
    rows = cuda.shared.array((64, 8), np.uint16, 16)
    for i in range(lane, 512, 32):
        rows[i // 8, i % 8] = tile[i]
    cuda.syncwarp()
    first = np.uint32(shared_address(rows, 0) + 16 * row)
    stmatrix_x4(first, registers)
    stmatrix_x2_trans(np.uint32(first + 512), (registers[1], registers[0]))
    cuda.syncwarp()
    for i in range(lane, 512, 32):
        tile[i] = rows[i // 8, i % 8]


def load_matrices(device: Device) -> dict[str, list[np.ndarray]]:
    """What each load, stmatrix and movmatrix leaves, on drawn data and row numbers in any order."""
    rng = np.random.default_rng(3)
    tile, rows = rng.integers(0, 1 << 16, 512).astype(np.uint16), rng.permutation(64)[:32].astype(np.int32)
    registers = rng.integers(0, 1 << 32, (4, 32)).astype(np.uint32)
    found: dict[str, list[np.ndarray]] = {}
    for name, (instruction, count) in LOADS.items():
        given = (tile.copy(), each(rows), each(range(32)))
        found[name] = list(run_function(make_load(instruction), *given, returns=FOUR[:count], device=device))
    stored, places = tile.copy(), each(rng.permutation(32).astype(np.int32))
    run_function(store_rows, stored, places, tuple(map(each, registers)), each(range(32)), device=device)
    found["stmatrix"] = [stored]
    found["movmatrix"] = [run_function(movmatrix, each(registers[0]), returns="uint32", device=device)]
    return found


def check_loads(device: Device) -> dict[str, str]:
    """On the device and on the PTX machine, and the plain ones against numpy's own words."""
    here, there = load_matrices(PtxDevice()), load_matrices(device)
    for name, arrays in here.items():
        for ours, theirs in zip(arrays, there[name], strict=True):
            assert_equal(theirs, ours, name)
    return dict.fromkeys(here, "equal")


# --- copies and pipelines --------------------------------------------------------------------------------------------

COPIES = {"4": copy_async_4, "8": copy_async_8, "16": copy_async_16}


@cache
def make_copy(instruction: Assembly, sized: bool) -> Any:
    """A function that copies to its row of shared memory and returns the row."""
    wait = wait_group(0)

    @device_function
    def through(source, length, lane):
        rows = cuda.shared.array((64, 4), np.uint32, 16)
        for i in range(4):
            rows[lane, i] = np.uint32(0xFFFFFFFF)
        if sized:
            instruction(shared_address(rows, 4 * lane), global_address(source, 4 * lane), np.uint32(length))
        else:
            instruction(shared_address(rows, 4 * lane), global_address(source, 4 * lane))
        commit_group()
        wait()
        return rows[lane, 0], rows[lane, 1], rows[lane, 2], rows[lane, 3]

    return through


def check_copies(device: Device) -> dict[str, str]:
    """Every size, and every length of a source from 0 to 16 bytes, against numpy."""
    source = np.random.default_rng(5).integers(0, 1 << 32, 256).astype(np.uint32)
    lanes, lengths = each(range(64)), np.arange(64, dtype=np.int32) % 17
    for name, instruction in (*COPIES.items(), ("zfill", copy_async_16_zfill)):
        sized = name == "zfill"
        given = (source.copy(), each(lengths), lanes)
        found = np.stack(run_function(make_copy(instruction, sized), *given, returns=FOUR, device=device), axis=1)
        limit = lengths[:, None] if sized else np.full((64, 1), int(name))
        rest = np.uint8(0 if sized else 255)
        expected = np.where(np.arange(16) < limit, source.view(np.uint8).reshape(64, 16), rest)
        assert_equal(found.view(np.uint8), expected, f"copy of {name}")
    return dict.fromkeys((*COPIES, "zfill"), "equal")


STRIDE, MATRIX, STAGE = 144, 16 * 144, 2 * 16 * 144


@cache
def make_pipeline(stages: int, wrong: str = "") -> Kernel:
    """A product with so many stages: "" is right, the others break it (see `WRONG`)."""
    wait = wait_group(stages - (1 if wrong == "early" else 2))
    words, unsynced, eager, overwrites = stages * STAGE // 2, wrong == "unsynced", wrong == "eager", wrong == "source"

    @device_function
    def fetch(tiles, a, b, k):
        chunk = cuda.threadIdx.x % 8
        if k < a.shape[1]:
            for row in range(cuda.threadIdx.x // 8, 16, 8):
                to = np.uint32(tiles + k // 64 % stages * STAGE + row * STRIDE + chunk * 16)
                copy_async_16(to, global_address(a, row * a.shape[1] + k + chunk * 8))
                copy_async_16(np.uint32(to + MATRIX), global_address(b, row * a.shape[1] + k + chunk * 8))
        commit_group()

    @kernel("E1", block=64, grid="1")
    def tile_pipeline_kernel(
        a: Annotated[Any, "uint16[16, K]"],
        b: Annotated[Any, "const uint16[16, K]"],
        c: Annotated[Any, "float32[16, 16]"],
    ) -> None:
        lane, warp, zero = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32, np.float32(0)
        tiles = shared_address(cuda.shared.array(words, np.uint16, 16), 0)
        for stage in range(stages - 1):
            fetch(tiles, a, b, stage * 64)
        sums = (zero, zero, zero, zero)
        for k in range(0, a.shape[1], 64):
            wait()
            if eager:
                fetch(tiles, a, b, k + (stages - 1) * 64)
            if not unsynced:
                cuda.syncthreads()
            if not eager:
                fetch(tiles, a, b, k + (stages - 1) * 64)
            if overwrites and k + (stages - 1) * 64 < a.shape[1]:
                a[lane % 16, k + (stages - 1) * 64] = np.uint16(0)
            stage = tiles + k // 64 % stages * STAGE
            for step in range(0, 128, 32):
                left = ldmatrix_x4(np.uint32(stage + step + rows_of_a(lane, STRIDE)))
                right = ldmatrix_x2(np.uint32(stage + step + MATRIX + 8 * warp * STRIDE + rows_of_b(lane, STRIDE)))
                sums = mma_m16n8k16_bf16(left, right, sums)
        row, column = lane // 4, 8 * warp + lane % 4 * 2
        c[row, column], c[row, column + 1], c[row + 8, column], c[row + 8, column + 1] = sums

    return tile_pipeline_kernel


WRONG = {  # what each breaks
    "early": "it waits for one group too few", "unsynced": "no barrier after the wait",
    "eager": "it fills a stage before all have read it", "source": "it stores into what a copy still reads",
}  # fmt: skip


def run_pipeline(device: Device, stages: int, k: int, wrong: str = "") -> tuple[np.ndarray, np.ndarray]:
    """What a pipeline computes, and what `mma_ref` does."""
    a, b, _ = draw_tiles(np.random.default_rng(stages * k), 2, "bf16", k, "wide")
    left, right = a[0], np.ascontiguousarray(np.swapaxes(b, 1, 2).reshape(16, k))
    out = device.array(np.zeros((16, 16), np.float32))
    make_pipeline(stages, wrong)(device.array(left), device.array(right), out, device=device)
    return device.numpy(out), mma_ref(left, np.ascontiguousarray(right.T))


def check_pipelines(device: Device) -> dict[str, str]:
    """Two to four stages and several lengths of K against `mma_ref`."""
    for stages in (2, 3, 4):
        for k in (64, 128, 192, 640):
            found, expected = run_pipeline(device, stages, k)
            assert_equal(found.view(np.uint32), expected.view(np.uint32), f"{stages} stages, K = {k}")
    return {f"{stages} stages": "equal" for stages in (2, 3, 4)}


def ask_machine(wrong: str) -> str:
    """What the PTX machine says to a pipeline: "clean", or its error."""
    try:
        run_pipeline(PtxDevice(), 2, 256, wrong)
    except PtxError as error:
        return f"{error.kind}: {error.message}"
    return "clean"


def check_sanitizer() -> dict[str, Any]:
    """The right pipeline and the wrong ones: what the PTX machine must say, and what racecheck says to each."""
    if not shutil.which("compute-sanitizer"):
        return {"skipped": "compute-sanitizer is not on the PATH"}
    results: dict[str, Any] = {}
    for wrong in ("", *WRONG):
        text = start_sanitizer("racecheck", "tools.gpu_tiles", "--alone", wrong or "right").communicate(timeout=120)[0]
        row = {"racecheck_clean": is_clean(text), "machine": ask_machine(wrong)}
        good = row["machine"].startswith("race") if wrong else row["racecheck_clean"] and row["machine"] == "clean"
        results[wrong or "right"] = row if good else f"FAILED: {row}"
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--alone", choices=("right", *WRONG), help="run one pipeline, under compute-sanitizer")
    options = parser.parse_args()
    gpu = GpuDevice()
    if options.alone:
        run_pipeline(gpu, 2, 256, "" if options.alone == "right" else options.alone)
        return 0
    sections: dict[str, Callable[[], Any]] = {
        "rule": lambda: check_rule(gpu),
        "recorded": lambda: check_recorded(gpu),
        "products": lambda: check_products(gpu),
        "loads": lambda: check_loads(gpu),
        "copies": lambda: check_copies(gpu),
        "pipelines": lambda: check_pipelines(gpu),
        "sanitizer": check_sanitizer,
    }
    command = f"python -m tools.gpu_tiles --out {options.out.name if options.out else 'FILE'}"
    found = failures(run_sections(sections, options.out, command, {"arch": gpu.arch}))
    print("\n".join(found) or "everything as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
