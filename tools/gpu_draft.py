"""Holds the kernels from logits to a laid-out tree on a GPU against their references, and under compute-sanitizer.

`python -m tools.gpu_draft --out FILE` needs an NVIDIA GPU and the extra `gpu`. It draws requests of every kind (ties,
bfloat16 steps, peaked, flat, masked, tiny vocabularies, 1 to 64 positions, budgets to 4,096, batches of 1 to 256 with
mixed budgets and limits) until there are `--requests` of them, compares to the bit, and runs each kernel under the four
tools of compute-sanitizer. It writes one JSON and ends with an error if anything differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench import VOCABULARY
from ddtree.bench import draw_logits as bench_logits
from ddtree.build import (
    Trees,
    build_trees,
    build_trees_kernel,
    build_trees_one_warp_kernel,
    choose_kernel,
    empty_trees,
    worthwhile_size,
)
from ddtree.check import assert_equal
from ddtree.cuda import GpuArray, GpuDevice
from ddtree.cuda.arguments import element_type
from ddtree.draft import draft_tree, draft_tree_ref, empty_draft
from ddtree.kdtr import load
from ddtree.layout import attention_mask, eagle_tensors, layout_trees, layout_trees_ref
from ddtree.topk import merge_top_k, top_k, top_k_ref
from ddtree.tree import DraftTree, build_tree
from tools.gpu import (
    ROOT,
    count_with_ncu,
    failures,
    is_clean,
    read_resources,
    run_sections,
    start_sanitizer,
    with_texts,
)

FIXTURES = ROOT / "fixtures"
KINDS = ("normal", "ties", "bfloat16", "peaked", "flat", "masked", "tiny steps", "zeros")
TREE_FIELDS = ("tokens", "parents", "depths", "scores", "ranks")
LIMITS = {"max_depth": np.int32, "min_log_prob": np.float64, "chain_length": np.int32}


def draw_logits(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 logits of a kind."""
    x = rng.normal(0, rng.choice([1, 3, 5]), shape).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "bfloat16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif kind == "peaked":
        x = x * np.float32(8)
    elif kind == "flat":
        x = np.full(shape, rng.choice([0, -3.25, 11]), np.float32)
    elif kind == "masked":
        x[rng.random(shape) < rng.choice([0.5, 0.99])] = -np.inf
    elif kind == "tiny steps":
        x = (1 + rng.integers(0, 4, shape) * 2.0**-23).astype(np.float32)
    elif kind == "zeros":
        x[..., 1:] = -np.inf
    return x


def draw_batches(rng: np.random.Generator, wanted: int) -> Iterator[dict[str, Any]]:
    """Batches until `wanted` requests are drawn: logits (R, L, V), K, budgets, roots and limits."""
    drawn = 0
    while drawn < wanted:
        top = int(rng.choice([1, 5, 16, 64, 128, 256, 1024, 4096], p=[0.08, 0.1, 0.2, 0.25, 0.2, 0.12, 0.04, 0.01]))
        requests = int(rng.choice([1, 3, 16, 64, 256] if top <= 256 else [1, 2, 4]))
        positions = int(rng.choice([1, 2, 3, 7, 15, 15, 31, 64]))
        vocabulary = int(rng.choice([1, 2, 5, 17, 300, 1000] if requests > 16 else [1, 2, 5, 300, 5000]))
        batch = {
            "logits": draw_logits(rng, str(rng.choice(KINDS)), (requests, positions, vocabulary)),
            "k": min(top, vocabulary, 1024),
            "budgets": rng.integers(0, top + 1, requests).astype(np.int32),
            "roots": rng.integers(0, 2**40, requests),
            "places": top + 1,
        }
        limits = {
            "max_depth": rng.integers(0, positions + 2, requests).astype(np.int32),
            "min_log_prob": -rng.exponential(6, requests),
            "chain_length": rng.integers(0, positions + 2, requests).astype(np.int32),
        }
        batch["limits"] = {name: values for name, values in limits.items() if rng.random() < 0.25}
        drawn += requests
        yield batch


def limits_of(batch: dict[str, Any], request: int) -> dict[str, Any]:
    """The limits of one request."""
    return {name: values[request] for name, values in batch["limits"].items()}


def reference(job: tuple[Any, ...]) -> DraftTree:
    """The reference's tree."""
    log_probs, ids, budget, root, limits = job
    return build_tree(log_probs, ids, budget, root, **limits)


def check_batch(gpu: GpuDevice, batch: dict[str, Any], build: Callable[..., Any]) -> list[Any]:
    """Top-k, trees and layout of a batch on the GPU: the first and last are compared at once; returns (trees, jobs)."""
    logits, requests = batch["logits"], len(batch["logits"])
    top = top_k(gpu.array(logits), batch["k"], device=gpu)
    expected = top_k_ref(logits.reshape(-1, logits.shape[-1]), batch["k"])
    for name in ("ids", "logits", "log_probs", "log_z", "state"):
        value = getattr(expected, name)
        assert_equal(gpu.numpy(getattr(top, name)).reshape(value.shape), value, f"top_k {name}")
    trees = build(gpu, top, batch)
    host = Trees(*map(gpu.numpy, vars(trees).values()))
    lengths = np.arange(requests) * 37
    layout = layout_trees(trees, gpu.array(lengths), device=gpu)
    for name, value in vars(layout_trees_ref(host, lengths)).items():
        assert_equal(gpu.numpy(getattr(layout, name)), value, f"layout {name}")
    shape = (*logits.shape[:2], batch["k"])
    log_probs, ids = expected.log_probs.reshape(shape), expected.ids.reshape(shape)
    jobs = [
        (
            log_probs[r],
            ids[r],
            int(batch["budgets"][r]),
            int(batch["roots"][r]),
            {n: v[r] for n, v in batch["limits"].items()},
        )
        for r in range(requests)
    ]
    return [host, jobs]


def build_fast(gpu: GpuDevice, top: Any, batch: dict[str, Any]) -> Trees:
    """`build_trees` into memory that holds something else."""
    trees = poisoned(gpu, len(batch["logits"]), batch["places"])
    limits = {name: gpu.array(values) for name, values in batch["limits"].items()}
    budgets, roots = gpu.array(batch["budgets"]), gpu.array(batch["roots"])
    return build_trees(top.log_probs, top.ids, budgets, roots, **limits, out=trees, device=gpu)


def build_slow(gpu: GpuDevice, top: Any, batch: dict[str, Any]) -> Trees:
    """The same by the kernel of one warp."""
    trees = poisoned(gpu, len(batch["logits"]), batch["places"])
    limits = [gpu.array(batch["limits"].get(name, np.zeros(0, dtype)).astype(dtype)) for name, dtype in LIMITS.items()]
    inputs = [gpu.array(batch["budgets"]), gpu.array(batch["roots"]), *limits, gpu.empty((0,), np.float64)]
    build_trees_one_warp_kernel(top.log_probs, top.ids, *inputs, *vars(trees).values(), device=gpu)
    return trees


def poisoned(gpu: GpuDevice, requests: int, places: int) -> Trees:
    """Trees full of 77."""
    fields = vars(empty_trees(requests, places, gpu)).values()
    return Trees(*(gpu.array(np.full(field.shape, 77, field.dtype)) for field in fields))


def check_generated(gpu: GpuDevice, wanted: int) -> dict[str, Any]:
    """Generated requests through both builders; every tree, index and padding held against the reference."""
    rng, found = np.random.default_rng(20261129), {"requests": 0, "nodes": 0, "batches": 0, "positions": 0}
    found |= {"by both builders": 0, "largest budget": 0, "largest budget of build_trees": 0, "largest batch": 0}
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        for batch in draw_batches(rng, wanted):
            builders = (build_fast, build_slow) if batch["places"] <= 257 else (build_fast,)
            results = [check_batch(gpu, batch, build) for build in builders]
            jobs = results[0][1]
            for request, tree in enumerate(pool.map(reference, jobs, chunksize=max(1, len(jobs) // 14))):
                for host, _ in results:
                    compare(host, request, tree, f"{batch['logits'].shape} k {batch['k']} {batch['limits'].keys()}")
                found["nodes"] += len(tree) - 1
            fast = choose_kernel(batch["logits"].shape[1], batch["places"], gpu) is build_trees_kernel
            largest = int(batch["budgets"].max())
            found["by both builders"] += len(jobs) if len(builders) == 2 and fast else 0
            found["largest budget"] = max(found["largest budget"], largest)
            found["largest budget of build_trees"] = max(found["largest budget of build_trees"], largest * fast)
            found["largest batch"] = max(found["largest batch"], len(jobs))
            found["requests"] += len(jobs)
            found["batches"] += 1
            found["positions"] += len(jobs) * batch["logits"].shape[1]
    return found


def check_recorded(gpu: GpuDevice) -> dict[str, Any]:
    """Recorded trees of the paper authors' code, trees of recorded drafter logits, large budgets and cost curves."""
    vectors, drafts = load(FIXTURES / "tree_vectors.kdtr"), 0
    for case in vectors.metadata["cases"]:
        log_probs, ids = (vectors[f"{case['case']}.top_{field}"][None] for field in ("log_probs", "token_ids"))
        trees = build_trees(log_probs, ids.astype(np.int64), case["budget"], 42, device=gpu)
        compare(trees, 0, build_tree(log_probs[0], ids[0], case["budget"], 42), case["case"])
        recorded = vectors[f"{case['case']}.parents"].astype(np.int32)
        assert_equal(trees.parents[0, : len(recorded)], recorded, f"{case['case']} recorded")
    for name in ("e2e_qwen3", "e2e_deepseek_v3"):
        recorded = load(FIXTURES / f"{name}.kdtr")
        for key in (key for key in recorded if key.endswith("draft_logits")):
            logits = recorded[key].reshape(-1, *recorded[key].shape[-2:]).astype(np.float32)
            for budget in (15, 64, 256, 1024):
                draft, expected = (run(logits, budget, 5) for run in (partial(draft_tree, device=gpu), draft_tree_ref))
                for field, value in vars(expected.trees).items():
                    assert_equal(getattr(draft.trees, field), value, f"{name} {key} budget {budget} {field}")
                drafts += len(logits)
    return {"trees": len(vectors.metadata["cases"]), "trees of recorded logits": drafts, **check_large(gpu)}


def check_large(gpu: GpuDevice) -> dict[str, Any]:
    """Trees of thousands of nodes by both builders, with and without a cost curve."""
    rng, found = np.random.default_rng(9), dict[str, Any]()
    for budget in (2500, 3500, 3871, 4096):
        log_probs = -np.sort(rng.exponential(1, (2, 15, 700)), axis=2).astype(np.float32)
        ids = rng.integers(0, 10**6, log_probs.shape)
        costs = 1 + 1e-3 * np.arange(budget + 1.0)
        for curve in (None, costs):
            trees = build_trees(log_probs, ids, budget, 7, costs=curve, device=gpu)
            for request in range(2):
                tree = build_tree(log_probs[request], ids[request], budget, 7)
                tree = tree if curve is None else tree.cut(worthwhile_size(tree, costs))
                compare(trees, request, tree, f"budget {budget}")
        found[f"budget {budget}"] = choose_kernel(15, budget + 1, gpu).name
    return found


def compare(host: Trees, request: int, tree: DraftTree, name: str) -> None:
    """One request's tree and the places beyond it; raises AssertionError for a difference."""
    assert host.counts[request] == len(tree), f"{name}: {host.counts[request]} nodes, expected {len(tree)}"
    for field, empty in zip(TREE_FIELDS, (-1, -1, 0, -np.inf, -1), strict=True):
        values = getattr(host, field)[request]
        assert_equal(values[: len(tree)], getattr(tree, field), f"{name} request {request} {field}")
        assert (values[len(tree) :] == empty).all(), f"{name} request {request}: {field} beyond the tree"


class PlainDevice(GpuDevice):
    """A GPU whose arrays are separate allocations, so that a tool sees where each ends."""

    def empty(self, shape: int | tuple[int, ...], dtype: Any, stream: Any = None) -> GpuArray:
        driver, kind = import_module("cuda.bindings.driver"), element_type(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        _, address = driver.cuMemAlloc(max(1, int(np.prod(sizes)) * kind.itemsize))
        return GpuArray(Plain(int(address)), sizes, kind)


class Plain:
    """Memory of `PlainDevice`; never freed, the process is short."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


def run_kernels(gpu: GpuDevice) -> None:
    """Each kernel of the way from logits to layout once or more, on small inputs of several kinds."""
    rng = np.random.default_rng(5)
    budgets, roots, lengths = np.array([40, 17], np.int32), np.array([1, 2]), gpu.array(np.array([7, 70]))
    limits = {
        "max_depth": np.array([3, 5], np.int32),
        "chain_length": np.array([2, 9], np.int32),
        "min_log_prob": np.array([-9.0, -5.0]),
    }
    for kind in ("normal", "ties", "zeros", "masked"):
        logits = draw_logits(rng, kind, (2, 5, 640))
        top = top_k(gpu.array(logits), 40, device=gpu)
        batch = {"logits": logits, "budgets": budgets, "roots": roots, "places": 41}
        for build in (build_fast, build_slow):
            trees = build(gpu, top, {**batch, "limits": limits if kind == "normal" else {}})
            layout = layout_trees(trees, lengths, device=gpu)
    for dtype in ("bool", "float32", "float16", "bfloat16"):
        attention_mask(layout, lengths, capacity=80, dtype=dtype, device=gpu)
    eagle_tensors(trees, layout, lengths, "qlen", device=gpu)
    parts = (slice(0, 320), slice(320, 640))
    halves = [top_k(gpu.array(logits[..., part]), 40, first_id=part.start, device=gpu) for part in parts]
    merge_top_k(*halves, device=gpu)
    bias, allowed = gpu.array(draw_logits(rng, "normal", (2, 640))), gpu.array(rng.random((2, 640)) < 0.9)
    warm = gpu.array(np.array([0.5, 2], np.float32))
    top_k(gpu.array(logits), 40, temperature=warm, bias=bias, allowed=allowed, device=gpu)
    top_k(gpu.array(logits[..., :637].copy()), 40, device=gpu)
    top_k(gpu.array((logits.view(np.uint32) >> 16).astype(np.uint16)), 40, device=gpu)
    top_k(gpu.array(logits.astype(np.float16)), 300, device=gpu)
    costs, out = gpu.array(1 + 0.01 * np.arange(41.0)), empty_trees(2, 41, gpu)
    build_trees(top.log_probs, top.ids, gpu.array(budgets), gpu.array(roots), costs=costs, out=out, device=gpu)
    gpu.synchronize()


TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def start_tools(folder: Path) -> dict[str, subprocess.Popen[str]]:
    """`run_kernels` in a process of its own under each of compute-sanitizer's tools; kernels come from the folder."""
    return {tool: start_sanitizer(tool, "tools.gpu_draft", "--run", str(folder)) for tool in TOOLS}


def read_tools(running: dict[str, subprocess.Popen[str]]) -> dict[str, Any]:
    """What each tool says; raises AssertionError unless all are clean."""
    found = {}
    for tool, process in running.items():
        text = process.communicate()[0]
        clean = is_clean(text) and process.returncode == 0
        found[tool] = {"clean": clean, "says": [line for line in text.splitlines() if "=====" in line][-3:]}
        if not clean:
            print(text[-3000:], flush=True)
    if dirty := [tool for tool, result in found.items() if not result["clean"]]:
        raise AssertionError(f"{', '.join(dirty)}: {[found[tool]['says'] for tool in dirty]}")
    return found


def check_kernels(folder: Path) -> dict[str, Any]:
    """What each kernel of `run_kernels` takes, as the driver tells; their PTX goes to the folder. None may spill."""
    gpu = GpuDevice()
    run_kernels(gpu)
    for kernel in gpu._kernels:
        Path(folder, f"{kernel.name}.ptx").write_text(kernel.ptx_to_run(gpu.arch), encoding="utf-8")
    resources = read_resources(gpu)
    if spills := [name for name, found in resources.items() if found["local_bytes"]]:
        raise AssertionError(f"{', '.join(spills)} have local memory: registers that spill")
    return resources


METRICS = {
    "gpu__time_duration.sum": "ns",
    "smsp__inst_executed.sum": "warp_instructions",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_active_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__bytes_read.sum": "dram_bytes_read",
}


def run_draft() -> None:
    """One whole step for one request in float32 and for 64 in bfloat16."""
    gpu = GpuDevice()
    for shape, dtype in (((15, VOCABULARY), "float32"), ((64, 15, VOCABULARY), "bfloat16")):
        logits, out = bench_logits(shape, dtype), empty_draft(shape, 65, gpu)
        draft_tree(gpu.array(logits), 64, out=out, device=gpu)
        gpu.synchronize()


def read_counters(folder: Path) -> list[dict[str, Any]]:
    """The GPU's counters of `run_draft`'s kernels, by ncu."""
    return count_with_ncu(METRICS, "tools.gpu_draft", "--draft", "--texts", str(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--requests", type=int, default=10_000, help="how many requests to draw")
    parser.add_argument("--texts", type=Path, help="a folder of PTX built elsewhere, to use by kernel name")
    parser.add_argument("--draft", action="store_true", help="only run two whole steps: under ncu")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="only run the kernels once: under compute-sanitizer")
    options = parser.parse_args()
    folder = options.texts or options.run
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.ptx")} if folder else {}
    with with_texts(texts), tempfile.TemporaryDirectory() as scratch:
        if options.run:
            run_kernels(PlainDevice())
            return 0
        if options.draft:
            run_draft()
            return 0
        command = f"python -m tools.gpu_draft{' --texts texts' if options.texts else ''} --requests {options.requests}"
        return check_all(Path(scratch), options.requests, options.out, command, options.texts)


def check_all(folder: Path, requests: int, out: Path | None, command: str, texts: Path | None) -> int:
    """Every section in turn, written to `out` after each; compute-sanitizer runs beside the generated requests."""
    running: dict[str, subprocess.Popen[str]] = {}

    def generate() -> dict[str, Any]:
        if shutil.which("compute-sanitizer"):
            running.update(start_tools(folder))
        return check_generated(GpuDevice(), requests)

    sections: dict[str, Callable[[], Any]] = {
        "kernels": lambda: check_kernels(folder),
        "recorded": lambda: check_recorded(GpuDevice()),
        "generated": generate,
        "sanitizer": lambda: read_tools(running) or "not on the PATH",
        "counters": lambda: read_counters(folder) if shutil.which("ncu") else "ncu is not on the PATH",
    }
    facts = {"compiled": "PTX of the folder --texts, built elsewhere; other kernels here" if texts else "here"}
    return 1 if failures(run_sections(sections, out, command, facts)) else 0


if __name__ == "__main__":
    sys.exit(main())
