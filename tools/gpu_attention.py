"""Attention of trees on a GPU: every bit beside numpy, one result whatever the tree, and times beside torch's.

`python -m tools.gpu_attention --out FILE` needs an NVIDIA GPU and the extra `gpu`; torch, if there, is a yardstick. It
writes one JSON: what was compared with the reference (kinds of numbers, sizes of heads, pages, windows, caps), that a
query's bits are the same in trees of 1 to 1,025 nodes, in batches, in pages and after its path was committed, the error
against float64, compute-sanitizer's four tools, what the kernels take, and microseconds in a CUDA graph and of a call.
Exit status 1 if anything differs. `--here` compares on the PTX machine and times nothing.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ddtree.attention as attention
from ddtree.attention import AttentionPlan, attention_ref, choose_tiles
from ddtree.attention.reference import round_to, rows_of_path
from ddtree.check import assert_equal
from ddtree.cuda import Device, GpuDevice, PtxDevice
from ddtree.measure import note_launches, quartiles, time_launches, time_torch
from ddtree.tensor_cores import values_of
from tools.gpu import failures, is_clean, read_resources, run_sections, start_sanitizer

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Case:
    """A cache and trees behind it, drawn at random."""

    name: str
    lengths: tuple[int, ...] = (300, 45)
    nodes: int = 17
    heads: tuple[int, int] = (8, 2)  # of queries and of keys
    size: int = 128
    kind: str = "bf16"
    page: int = 0  # rows of a page; 0 for one piece
    room: int = 0  # rows a request has; 0 for those it needs
    deepest: int = 15
    depth: int = 16
    window: int | None = None
    soft_cap: float | None = None
    seed: int = 0


CASES = [
    Case("a tree"),
    Case("one node", nodes=1),
    Case("float16", kind="f16"),
    Case("float32", kind="f32", nodes=9),
    Case("heads of 64", size=64, heads=(6, 6)),
    Case("heads of 80", size=80),
    Case("heads of 96", size=96),
    Case("heads of 192", size=192, nodes=9),
    Case("heads of 256", size=256, nodes=9),
    Case("one key head for sixteen", heads=(16, 1)),
    Case("nine heads to a key head", heads=(9, 1), size=64),
    Case("pages of 1", page=1),
    Case("pages of 16", page=16),
    Case("pages of 64, float16", page=64, kind="f16"),
    Case("pages of 256", page=256),
    Case("a window", window=100),
    Case("a window of one page", window=16, page=16),
    Case("a window, float32", window=33, kind="f32", nodes=9),
    Case("a soft cap", soft_cap=5.0),
    Case("a soft cap, float32", soft_cap=5.0, kind="f32", nodes=5),
    Case("deep trees", deepest=40, depth=63, nodes=48),
    Case("deeper than said", deepest=30, depth=16, nodes=40),
    Case("nothing committed", lengths=(0, 1)),
    Case("at borders", lengths=(16, 31, 32, 64, 255, 256)),
    Case("both sizes of groups", lengths=(9300,), nodes=5, heads=(2, 1)),
]


@dataclass(frozen=True)
class Drawn:
    """The arrays of a case, in numpy."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    page_table: np.ndarray | None


def draw_numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Normal numbers as 16-bit floats (bits for bf16) or float32."""
    x = rng.standard_normal(shape, dtype=np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else x.astype({"f16": "f2", "f32": "f4"}[kind])


def draw_trees(rng: np.random.Generator, requests: int, nodes: int, deepest: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of random trees; the first nodes are a chain to the deepest."""
    parents, depths = np.full((requests, nodes), -1, np.int32), np.zeros((requests, nodes), np.int32)
    for r in range(requests):
        for i in range(1, nodes):
            able = np.flatnonzero(depths[r, :i] < deepest)
            parents[r, i] = i - 1 if i <= min(deepest, nodes // 2) else rng.choice(able)
            depths[r, i] = depths[r, parents[r, i]] + 1
    return parents, depths


def draw(case: Case) -> Drawn:
    rng, requests = np.random.default_rng(case.seed), len(case.lengths)
    parents, depths = draw_trees(rng, requests, case.nodes, case.deepest)
    room = case.room or max(case.lengths) + case.nodes
    table, shape = None, (requests, room)
    if case.page:
        pages = -(-room // case.page)
        table = rng.permutation(requests * pages).astype(np.int32).reshape(requests, pages)
        shape = requests * pages, case.page
    keys, values = (draw_numbers(rng, (*shape, case.heads[1], case.size), case.kind) for _ in range(2))
    queries = draw_numbers(rng, (requests, case.nodes, case.heads[0], case.size), case.kind)
    return Drawn(queries, keys, values, np.array(case.lengths, np.int64), parents, depths, table)


def plan_of(case: Case, device: Device, nodes: int = 0, requests: int = 0) -> AttentionPlan:
    shape = requests or len(case.lengths), nodes or case.nodes, case.heads[0], case.size
    longest, options = max(case.lengths) + 64, {"window": case.window, "soft_cap": case.soft_cap}
    return AttentionPlan(
        shape, case.heads[1], longest, dtype=DTYPES[case.kind], depth=case.depth, device=device, **options
    )


def run(plan: AttentionPlan, drawn: Drawn) -> np.ndarray:
    device = plan.device
    arrays = drawn.queries, drawn.keys, drawn.values, drawn.lengths, drawn.parents, drawn.depths
    put = [device.array(x) for x in arrays]
    table = None if drawn.page_table is None else device.array(drawn.page_table)
    return device.numpy(plan.run(*put, page_table=table))


def run_ref(case: Case, drawn: Drawn) -> np.ndarray:
    arrays = drawn.queries, drawn.keys, drawn.values, drawn.lengths, drawn.parents, drawn.depths
    options = {"window": case.window, "soft_cap": case.soft_cap, "depth": case.depth}
    kind_of = [x.view(np.uint16) if case.kind == "f16" else x for x in arrays[:3]]
    return attention_ref(*kind_of, *arrays[3:], page_table=drawn.page_table, kind=case.kind, **options)


def as_bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.dtype(f"u{x.itemsize}"))


# --- against numpy ---------------------------------------------------------------------------------------------------


def compare(device: Device, case: Case) -> int:
    """A case on the device and in numpy, bit for bit. Returns how many numbers were equal."""
    drawn = draw(case)
    found, right = run(plan_of(case, device), drawn), run_ref(case, drawn)
    assert_equal(as_bits(found), as_bits(right), case.name)
    return found.size


def number(x: np.ndarray, kind: str) -> np.ndarray:
    return x.astype(np.float64) if kind == "f32" else values_of(x.view(np.uint16), kind)


def by_paths(case: Case, drawn: Drawn, dtype: Any = np.float64) -> np.ndarray:
    """Every node as the last token of its own text, in float64; in float32 as one writes it, with weights and results
    rounded to the kind of the numbers, as all attention on tensor cores does."""
    q, k, v = (number(x, case.kind).astype(dtype) for x in (drawn.queries, drawn.keys, drawn.values))
    rough = case.kind if dtype == np.float32 and case.kind != "f32" else None
    out, share, page = np.empty(q.shape, dtype), case.heads[0] // case.heads[1], drawn.keys.shape[1]
    table = np.arange(len(q))[:, None] if drawn.page_table is None else drawn.page_table
    for r, node in np.ndindex(q.shape[:2]):
        path = rows_of_path(drawn.parents[r], drawn.depths[r], node, int(drawn.lengths[r]))
        rows = path[-(case.window or len(path)) :]
        where = table[r][rows // page], rows % page
        for head in range(q.shape[2]):
            scores = k[where][:, head // share] @ q[r, node, head] * dtype(case.size**-0.5)
            scores = dtype(case.soft_cap) * np.tanh(scores / dtype(case.soft_cap)) if case.soft_cap else scores
            weights = np.exp(scores - scores.max())
            weights = values_of(round_to(rough, weights), rough).astype(dtype) if rough else weights
            out[r, node, head] = weights @ v[where][:, head // share] / weights.sum()
    return values_of(round_to(rough, out), rough) if rough else out.astype(np.float64)


def measure_error(device: Device, case: Case) -> dict[str, float]:
    """The largest error against float64, at most four times that of attention as one writes it in the same numbers:
    logarithms in base 2 are rounded once more, and 16-bit results fall to one side or the other of a boundary."""
    drawn = draw(case)
    found, right = number(run(plan_of(case, device), drawn), case.kind), by_paths(case, drawn)
    naive = by_paths(case, drawn, np.float32)
    errors = {"error": float(np.abs(found - right).max()), "naive": float(np.abs(naive - right).max())}
    assert errors["error"] <= 4 * errors["naive"], errors
    return errors


# --- one result ------------------------------------------------------------------------------------------------------


def commit(drawn: Drawn, node: int, count: int) -> Drawn:
    """The text with `count` nodes of a node's path committed, and the rest of the path as a chain behind them."""
    r, (length,) = 0, drawn.lengths
    path = rows_of_path(drawn.parents[r], drawn.depths[r], node, int(length))
    rows = np.concatenate([path, np.setdiff1d(np.arange(drawn.keys.shape[1]), path)])
    left = len(path) - int(length) - count
    nodes = [int(i) for i in path[int(length) + count :] - int(length)]
    chain = np.arange(left, dtype=np.int32)
    moved = [np.ascontiguousarray(x[:, rows]) for x in (drawn.keys, drawn.values)]
    queries = np.ascontiguousarray(drawn.queries[:, nodes])
    return Drawn(queries, *moved, drawn.lengths + count, chain[None] - 1, chain[None], None)


def check_one_result(device: Device, sizes: tuple[int, ...], lengths: tuple[int, ...], case: Case | None = None) -> int:
    """A node's bits are those of plain decoding: for trees of these sizes, behind texts of these lengths, with every
    number of its ancestors committed, in every tiling. Returns how many results were compared."""
    compared, case = 0, case or Case("one result", heads=(4, 2))
    for length in lengths:
        for nodes in sizes:
            one = replace(case, lengths=(length,), nodes=nodes, room=length + nodes + 1, seed=length + nodes)
            drawn, node = draw(one), nodes - 1
            whole = run(plan_of(one, device), drawn)[0, node]
            for count in range(int(drawn.depths[0, node]) + 1):
                chain = commit(drawn, node, count)
                alone = run(plan_of(one, device, chain.queries.shape[1]), chain)[0, -1]
                assert_equal(as_bits(alone), as_bits(whole), f"{nodes} nodes behind {length}, {count} committed")
                compared += 1
    return compared


def check_tilings(device: Device, case: Case) -> int:
    """All tilings give one result."""
    drawn, results = draw(case), []
    for tiles in ((2, 1), (4, 1), (6, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)):
        if case.size // 8 % (2 * tiles[1]) == 0:
            with mock.patch.object(attention, "choose_tiles", lambda *_, tiles=tiles: tiles):
                results.append(run(plan_of(case, device), drawn))
    for result in results[1:]:
        assert_equal(as_bits(result), as_bits(results[0]), case.name)
    return len(results)


def check_batch(device: Device) -> int:
    """A request's bits are the same alone and beside others, in one piece and in pages."""
    case = Case("a batch", lengths=(700, 33, 511, 64), nodes=33, heads=(4, 2))
    drawn = draw(case)
    whole = run(plan_of(case, device), drawn)
    for r in range(4):
        part = Drawn(*[x[r : r + 1] for x in list(vars(drawn).values())[:6]], None)
        alone = run(plan_of(replace(case, lengths=case.lengths[r : r + 1]), device), part)
        assert_equal(as_bits(alone[0]), as_bits(whole[r]), f"request {r}")
    for page in (1, 16, 64, 256):
        pages = -(-drawn.keys.shape[1] // page)
        table = np.random.default_rng(page).permutation(4 * pages).astype(np.int32).reshape(4, pages)
        pools = [np.zeros((4 * pages, page, *drawn.keys.shape[2:]), drawn.keys.dtype) for _ in range(2)]
        at = np.arange(drawn.keys.shape[1])
        for pool, rows in zip(pools, (drawn.keys, drawn.values), strict=True):
            pool[table[:, at // page], at % page] = rows
        paged = replace(drawn, keys=pools[0], values=pools[1], page_table=table)
        assert_equal(as_bits(run(plan_of(case, device), paged)), as_bits(whole), f"pages of {page}")
    return 8


def check_nan(device: Device) -> int:
    """A NaN in a query or a key spoils the queries that see it, and no other."""
    case = Case("NaN", lengths=(300,), nodes=9, heads=(2, 1), size=64)
    drawn = draw(case)
    drawn.keys[0, 300 + 3] = 0x7FC0  # node 3 and those below it
    found = np.isnan(values_of(run(plan_of(case, device), drawn), "bf16")).all(axis=(2, 3))[0]
    below = [3 in rows_of_path(drawn.parents[0], drawn.depths[0], i, 300)[300:] - 300 for i in range(9)]
    assert_equal(found, np.array(below), "who sees it")
    drawn.keys[0, 5] = 0x7FC0
    assert np.isnan(values_of(run(plan_of(case, device), drawn), "bf16")).all()
    return 2


# --- times -----------------------------------------------------------------------------------------------------------

XQA = {(1024, 1): 9.5, (8192, 1): 18.0, (32768, 1): 44.0, (1024, 17): 12.6, (8192, 17): 46.0, (32768, 17): 103.0,
       (1024, 65): 31.0, (8192, 65): 118.0, (32768, 65): 293.0, (1024, 129): 54.0, (8192, 129): 220.0,
       (32768, 129): 551.0}  # fmt: skip  # FlashInfer's xqa with a packed mask, microseconds, recorded before
AIM = {(1024, 65): 15, (8192, 65): 40, (32768, 65): 130, (1024, 1): 9.5, (8192, 1): 18, (32768, 1): 44}
READ, PRODUCTS = 4.65e6, 625e6  # bytes a microsecond, and operations of mma.sync in bfloat16; measured on an H200


def time_torch_too(drawn: Drawn, tensors: tuple[Any, ...]) -> float:
    """torch's scaled_dot_product_attention with the same mask, the fastest it has."""
    torch: Any = import_module("torch")
    queries, keys, values = tensors
    length, nodes = int(drawn.lengths[0]), drawn.queries.shape[1]
    mask = np.zeros((nodes, length + nodes), bool)
    for node in range(nodes):
        mask[node, rows_of_path(drawn.parents[0], drawn.depths[0], node, length)] = True
    q, k, v = (x.transpose(1, 2) for x in (queries, keys[:, : length + nodes], values[:, : length + nodes]))
    seen = torch.tensor(mask, device="cuda")

    def call(x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=seen, enable_gqa=True)

    return round(time_torch(call, [q])["median"], 1)


def time_case(gpu: GpuDevice, length: int, nodes: int, tiles: tuple[int, int] | None = None) -> dict[str, Any]:
    """Times of one layer, 32 / 8 heads of 128: in a graph, far and near alone, and a call's host time."""
    torch: Any = import_module("torch")
    case = Case("times", lengths=(length,), nodes=nodes, heads=(32, 8))
    drawn = draw(case)
    tensors = tuple(torch.tensor(x.view(np.int16), device="cuda").view(torch.bfloat16) for x in
                    (drawn.queries, drawn.keys, drawn.values))  # fmt: skip
    numbers = [torch.tensor(x, device="cuda") for x in (drawn.lengths, drawn.parents, drawn.depths)]
    chosen = tiles or choose_tiles(4 * nodes, 128, length)
    with mock.patch.object(attention, "choose_tiles", lambda *_: chosen):
        plan = AttentionPlan((1, nodes, 32, 128), 8, length, device=gpu)
    with note_launches(gpu) as found:
        out = plan.run(*tensors, *numbers)
    row: dict[str, Any] = {"context": length, "nodes": nodes, "tiles": f"{chosen[0]}x{chosen[1]}"}
    row["us"] = time_launches(gpu, list(found) * 20, 20)["median"]
    for name, launch in zip(("far_us", "join_us"), found, strict=True):
        row[name] = time_launches(gpu, [launch] * 20, 20)["median"]
    host = []
    for _ in range(300):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan.run(*tensors, *numbers, out=out)
        host.append((time.perf_counter() - start) * 1e6)
    row["host_us"] = quartiles(host[100:])["median"]
    if tiles is None:
        row["torch_us"] = time_torch_too(drawn, tensors)
    floor = {"bytes_us": 4 * length * 8 * 128 / READ, "products_us": 4 * length * 128 * 32 * nodes / PRODUCTS}
    row |= {"floor_us": max(floor.values()), "xqa_us": XQA.get((length, nodes)), "aim_us": AIM.get((length, nodes))}
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


def time_all(gpu: GpuDevice) -> list[dict[str, Any]]:
    rows = [time_case(gpu, length, nodes) for nodes in (1, 17, 65, 129) for length in (1024, 8192, 32768)]
    for row in rows:
        print(row, flush=True)
    return rows


def time_tilings(gpu: GpuDevice) -> list[dict[str, Any]]:
    """What `choose_tiles` rests on."""
    rows = []
    for nodes, tilings in ((1, ((1, 4), (1, 2), (2, 1))), (17, ((2, 1), (4, 1), (2, 2), (1, 4))),
                           (65, ((2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (2, 2), (4, 2)))):  # fmt: skip
        for length in (1024, 8192, 32768):
            for tiles in tilings:
                row = time_case(gpu, length, nodes, tiles)
                rows.append({name: row[name] for name in ("context", "nodes", "tiles", "us", "far_us", "join_us")})
                print(rows[-1], flush=True)
    return rows


def check_sanitizer() -> dict[str, str]:
    """Small comparisons under the four tools of compute-sanitizer."""
    if not shutil.which("compute-sanitizer"):
        return {"skipped": "compute-sanitizer is not on the PATH"}
    found = {}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        text = start_sanitizer(tool, "tools.gpu_attention", "--alone").communicate(timeout=240)[0]
        found[tool] = "clean" if is_clean(text) else f"FAILED: {text[-1500:]}"
    return found


SMALL = [Case("small", lengths=(300, 45), nodes=9, heads=(4, 2), size=64), Case("one", nodes=1, heads=(4, 2), size=64)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--here", action="store_true", help="compare on the PTX machine, without a GPU")
    parser.add_argument("--alone", action="store_true", help="compare a little, under compute-sanitizer")
    options = parser.parse_args()
    if options.here or options.alone:
        device = PtxDevice() if options.here else GpuDevice()
        print({case.name: compare(device, case) for case in [*SMALL, *(CASES[:3] if options.alone else [])]})
        return 0
    gpu = GpuDevice()
    sizes, lengths = (1, 2, 17, 65, 257, 1025), (0, 15, 16, 17, 63, 64, 240, 255, 256, 257, 1000, 8190, 8300)
    sections: dict[str, Callable[[], Any]] = {
        "compared": lambda: {case.name: compare(gpu, case) for case in CASES},
        "errors": lambda: {case.name: measure_error(gpu, case) for case in CASES},
        "one result": lambda: check_one_result(gpu, sizes, lengths),
        "tilings": lambda: {case.name: check_tilings(gpu, case) for case in CASES if case.kind != "f32"},
        "batch": lambda: check_batch(gpu),
        "nan": lambda: check_nan(gpu),
        "sanitizer": check_sanitizer,
    }
    if find_spec("torch"):
        sections |= {"times": lambda: time_all(gpu), "all tilings": lambda: time_tilings(gpu)}
    sections["resources"] = lambda: read_resources(gpu)
    command = f"python -m tools.gpu_attention --out {options.out.name if options.out else 'FILE'}"
    found = failures(run_sections(sections, options.out, command, {"arch": gpu.arch}))
    print("\n".join(found) or "everything as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
