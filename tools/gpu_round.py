"""Compaction of caches on a GPU, held against numpy byte by byte, and timed for the cache of a Qwen3-8B.

`python -m tools.gpu_round --out FILE` needs an NVIDIA GPU and the extra `gpu`; torch, if there, is a yardstick.
It writes one JSON: what was compared (caches in one piece, in pages, with heads first, latent rows; numbers that are no
walk; graphs that follow new walks), compute-sanitizer's four tools, and microseconds in a CUDA graph for paths of 1 to
16 nodes in trees of 65. Exit status 1 if anything differs. `--here` compares on the PTX machine and times nothing.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.check import assert_equal
from ddtree.compact import CompactPlan, compact_ref, permute_slots, permute_slots_ref
from ddtree.cuda import Device, GpuDevice, PtxDevice
from ddtree.measure import time_launches, time_torch
from tools.gpu import failures, is_clean, run_sections, start_sanitizer

LAYERS, HEADS, SIZE, NODES = 36, 8, 128, 65
COPY_SPEED = 4.28e6  # bytes a microsecond, read and written; measured on an H200


def draw_walks(rng: np.random.Generator, requests: int, nodes: int, most: int) -> list[np.ndarray]:
    """Accepted nodes, ascending, with noise behind them, and their counts; now and then one that is no walk."""
    accepted = rng.integers(-5, nodes + 5, (requests, most)).astype(np.int32)
    counts = rng.integers(0, min(most, nodes) + 1, requests).astype(np.int32)
    for row, count in zip(accepted, counts, strict=True):
        if count and rng.random() < 0.9:
            row[:count] = [0, *np.sort(rng.choice(np.arange(1, nodes), count - 1, replace=False))]
    return [accepted, counts]


def draw_bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


# --- against numpy ---------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], int, bool, str]] = {  # of the array, row axes, whether paged, dtype
    "in one piece": ((3, 2, 4, 200, 2, 64), 2, False, "uint16"),
    "a row of 15 numbers": ((4, 4, 200, 3, 5), 2, False, "uint16"),
    "single bytes": ((2, 4, 200, 1, 33), 2, False, "uint8"),
    "latent": ((4, 4, 200, 576), 1, False, "uint16"),
    "pages of 1": ((2, 2, 820, 1, 2, 16), 2, True, "float32"),
    "pages of 16": ((2, 2, 60, 16, 2, 64), 2, True, "uint16"),
    "pages of 64": ((2, 2, 17, 64, 2, 16), 2, True, "float32"),
    "pages of 256, latent": ((2, 5, 256, 40), 1, True, "uint16"),
}


def compare(device: Device, name: str, rounds: int = 20) -> int:
    """A graph of a plan follows new walks, tables and lengths; the whole cache is compared after each replay."""
    rng, (shape, row_axes, paged, dtype) = np.random.default_rng(len(name)), SHAPES[name]
    *front, pages, page = shape[: len(shape) - row_axes]
    host = draw_bytes(rng, *shape[:-1], shape[-1] * np.dtype(dtype).itemsize).view(dtype)
    room = 200 if paged else page
    table = np.arange(pages // 4 * 4 if paged else 4, dtype=np.int32).reshape(4, -1)
    walks = [*draw_walks(rng, 4, 33, 20), rng.integers(0, 2, 4)]
    cache, *there = [device.array(values) for values in (host, table, *walks)]
    plan, given = CompactPlan(cache, 33, row_axes=row_axes, paged=paged, device=device), there[1:]
    options = {"page_table": there[0]} if paged else {}
    with device.graph() as graph:
        plan.run(*given, **options, lengths_are="advanced", stream=graph)
    arrays = host.reshape(-1, *shape[len(front) :])
    for _ in range(rounds):
        walks = [*draw_walks(rng, 4, 33, 20), rng.integers(0, room - 20, 4)]
        table = rng.permutation(table.size).astype(np.int32).reshape(4, -1) if paged else table
        for array, values in zip(there, (table, *walks), strict=True):
            device.write(array, values)
        graph.replay()
        ends = compact_ref(list(arrays), *walks, 33, table if paged else None)
        assert_equal(device.numpy(given[2]), ends, f"{name}: lengths")
        assert_equal(device.numpy(cache), host, name)
    return rounds


def compare_slots(device: Device, rounds: int = 20) -> int:
    """Page tables with one row a page, permuted."""
    rng = np.random.default_rng(5)
    table = rng.permutation(4 * 400).astype(np.int32).reshape(4, 400)
    there = device.array(table)
    for _ in range(rounds):
        walks = [*draw_walks(rng, 4, 257, 20), rng.integers(0, 400, 4)]
        given = [device.array(values) for values in walks]
        permute_slots(there, *given, 257, lengths_are="advanced", device=device)
        ends = permute_slots_ref(table, *walks, 257)
        assert_equal(device.numpy(given[2]), ends, "lengths")
        assert_equal(device.numpy(there), table, "slots")
    return rounds


def compare_all(device: Device, rounds: int = 20) -> dict[str, int]:
    found = {name: compare(device, name, rounds) for name in SHAPES}
    return {**found, "slots": compare_slots(device, rounds)}


def compare_torch(device: Device) -> dict[str, str]:
    """torch's tensors, heads first as Hugging Face has them, in a list of layers, on a stream of torch."""
    torch, rng = import_module("torch"), np.random.default_rng(1)
    host = [draw_bytes(rng, 2, 3, 60, 32).view(np.float16) for _ in range(6)]  # (R, H, S, D)
    walks = [np.int32([[0, 2, 5, 9], [0, 1, 3, 0]]), np.int32([4, 3]), np.int64([7, 30])]
    with torch.cuda.stream(torch.cuda.Stream()):
        there = [torch.from_numpy(array).cuda() for array in host]
        given = [torch.from_numpy(array).cuda() for array in walks]
        plan = CompactPlan([cache.transpose(1, 2) for cache in there], 12, device=device)
        plan.run(*given, lengths_are="advanced")
        found, lengths = [cache.cpu().numpy() for cache in there], given[2].cpu().numpy()
    ends = compact_ref([array.transpose(0, 2, 1, 3) for array in host], *walks, nodes=12)
    assert_equal(lengths, ends, "lengths")
    for i, (cache, wanted) in enumerate(zip(found, host, strict=True)):
        assert_equal(cache, wanted, f"layer {i}")
    return {"heads first, strided": repr(plan)}


def check_sanitizer() -> dict[str, str]:
    """Small comparisons under the four tools of compute-sanitizer."""
    if not shutil.which("compute-sanitizer"):
        return {"skipped": "compute-sanitizer is not on the PATH"}
    found = {}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        text = start_sanitizer(tool, "tools.gpu_round", "--alone").communicate(timeout=240)[0]
        found[tool] = "clean" if is_clean(text) else f"FAILED: {text[-1500:]}"
    return found


# --- times -----------------------------------------------------------------------------------------------------------


def make_path(length: int, prefix: bool) -> np.ndarray:
    """A path of so many nodes of a tree of 65; all but the root move, or none."""
    far = np.linspace(NODES - length, NODES - 1, length).round().astype(np.int32)
    return np.arange(length, dtype=np.int32) if prefix else np.concatenate([[0], far[1:]]).astype(np.int32)


def time_compaction(
    gpu: GpuDevice, requests: int, page: int, paths: Sequence[tuple[int, bool]]
) -> list[dict[str, Any]]:
    """Rows of times for a cache of 36 layers. page: 0 for one piece. cold: each launch works on rows of its own, more
    than the L2 cache holds together; hot: all on the same."""
    room = 1280 if requests < 64 else 512
    pages = requests if page == 0 else requests * room // page
    cache = gpu.empty((LAYERS, 2, pages, page or room, HEADS, SIZE), np.uint16)
    plan = CompactPlan(cache, NODES, paged=bool(page), device=gpu)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(requests, -1)
    options = {"page_table": gpu.array(table)} if page else {}
    starts = [gpu.array(np.full(requests, 5 + NODES * i, np.int64)) for i in range((room - 5) // NODES)]
    rows = []
    for length, prefix in paths:
        walk = np.zeros((requests, 16), np.int32)
        walk[:, :length] = make_path(length, prefix)
        given = gpu.array(walk), gpu.array(np.full(requests, length, np.int32))
        moved = 0 if prefix else length - 1
        size = 2 * moved * requests * LAYERS * 2 * HEADS * SIZE * 2
        row: dict[str, Any] = {"requests": requests, "page": page, "path": length, "prefix": prefix, "bytes": size}
        for kind, lengths in (("cold", starts), ("hot", starts[:1] * len(starts))):
            views = [{"accepted": given[0], "counts": given[1], "lengths": start} for start in lengths]
            launches = [plan.prepare(**view, **options) for view in views]
            row[f"{kind}_us"] = round(time_launches(gpu, launches, len(launches), rounds=8)["median"], 2)
        rows.append({**row, "floor_us": round(size / COPY_SPEED, 2)})
    return rows


def time_slots(gpu: GpuDevice, requests: int) -> dict[str, Any]:
    """Permuting slots instead, for a path of 8 of 65 nodes."""
    table = gpu.array(np.arange(requests * 1280, dtype=np.int32).reshape(requests, 1280))
    walk = np.tile(make_path(8, False), (requests, 1))
    given = [gpu.array(x) for x in (walk, np.full(requests, 8, np.int32), np.full(requests, 100, np.int64))]
    launch = permute_slots(table, *given, NODES, device=gpu)
    return {"requests": requests, "slots_us": round(time_launches(gpu, [launch] * 16, 16)["median"], 2)}


def time_copies_of_torch(path: int) -> dict[str, Any]:
    """torch in a graph, layer by layer: the accepted rows indexed out, and copied behind the prefix."""
    torch = import_module("torch")
    layers = [torch.zeros(1, HEADS, 1280, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
    index = torch.from_numpy(1000 + make_path(path, False).astype(np.int64)).cuda()

    def move(_: Any) -> None:
        for layer in layers:
            layer[:, :, 1000 : 1000 + path] = layer.index_select(2, index)

    return {"path": path, "torch_us": round(time_torch(move, [0])["median"], 1)}


def time_all(gpu: GpuDevice) -> dict[str, Any]:
    few: list[tuple[int, bool]] = [(1, True), (2, False), (4, False), (6, False), (8, False), (8, True), (16, False)]
    found = [row for page in (0, 16) for requests in (1, 16, 64) for row in time_compaction(gpu, requests, page, few)]
    print(print_table(found))
    torch = [time_copies_of_torch(path) for path in (4, 16)] if find_spec("torch") else []
    return {"compaction": found, "slots": [time_slots(gpu, requests) for requests in (1, 16, 64)], "torch": torch}


def print_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    names = list(rows[0])
    lines = [names, *[[str(row[name]) for name in names] for row in rows]]
    return "\n".join(" ".join(f"{word:>9}" for word in line) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--here", action="store_true", help="compare on the PTX machine, without a GPU")
    parser.add_argument("--alone", action="store_true", help="compare a little, under compute-sanitizer")
    options = parser.parse_args()
    if options.here or options.alone:
        print(compare_all(PtxDevice() if options.here else GpuDevice(), rounds=2))
        return 0
    gpu = GpuDevice()
    sections: dict[str, Callable[[], Any]] = {"compared": lambda: compare_all(gpu)}
    if find_spec("torch"):
        sections["torch"] = lambda: compare_torch(gpu)
    sections |= {"times": lambda: time_all(gpu), "sanitizer": check_sanitizer}
    command = f"python -m tools.gpu_round --out {options.out.name if options.out else 'FILE'}"
    found = failures(run_sections(sections, options.out, command, {"arch": gpu.arch}))
    print("\n".join(found) or "everything as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
