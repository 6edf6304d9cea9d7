"""Holds ddtree.topk and ddtree.numerics on a GPU against numpy, to the bit, and measures top_k beside torch.

`python -m tools.gpu_topk --out FILE` needs an NVIDIA GPU, torch and the extra `gpu`, and writes one JSON: what was
checked, and microseconds by events around replays of CUDA graphs. It ends with an error if anything differs.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddtree import numerics
from ddtree.bench import (
    BYTES_PER_US,
    VOCABULARY,
    note_launches,
    time_graph,
    time_launches,
    time_torch,
)
from ddtree.check import assert_equal
from ddtree.cuda import GpuDevice, Kernel, cuda, kernel
from ddtree.kdtr import load
from ddtree.topk import TopK, empty_top_k, merge_top_k, top_k, top_k_ref
from tools.gpu import ROOT, failures, run_sections

HALF = VOCABULARY // 2
NOTE = (
    "in CUDA graphs; 8 float32 inputs of 9.1 MB and 2 bfloat16 ones of 292 MB in turn, so that none is in the L2 "
    "cache; floor: one read at 4.28 TB/s"
)


def make_kernel(f: Any) -> Kernel:
    """A kernel that applies a function of ddtree.numerics to each element."""

    @kernel("E1", block=128, grid="cdiv(N, 128)")
    def apply_kernel(x: Annotated[Any, "const float32[N]"], out: Annotated[Any, "float32[N]"]) -> None:
        i = cuda.grid(1)
        if i < x.size:
            out[i] = f(x[i])

    return apply_kernel


def check_numerics(gpu: GpuDevice, rng: np.random.Generator) -> list[str]:
    """Each function on float32 of all kinds and on a million in the range of exp: the bits of numpy."""
    patterns = np.arange(0, 2**32, 4001, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([patterns, rng.uniform(-110, 95, 1_000_000).astype(np.float32)])
    checked = []
    for name in ("exp", "log", "sigmoid", "silu", "rsqrt"):
        f = getattr(numerics, name)
        out = gpu.empty(len(x), np.float32)
        make_kernel(f)(gpu.array(x), out, device=gpu)
        assert_equal(gpu.numpy(out), f(x), name)
        checked.append(f"{name}: {len(x)} numbers")
    return checked


def same(gpu: GpuDevice, got: TopK, expected: TopK, name: str) -> str:
    """The name, if all fields of the two results have the same bits; raises AssertionError otherwise."""
    for field in ("ids", "logits", "log_probs", "log_z", "state"):
        value = getattr(expected, field)
        assert_equal(gpu.numpy(getattr(got, field)).reshape(value.shape), value, f"{name} {field}")
    print(name, "equal", flush=True)
    return name


def compare(gpu: GpuDevice, name: str, logits: np.ndarray, k: int, there: Any = None) -> str:
    """top_k of logits (R, V), or of the array on the GPU that has their values, against the reference."""
    got = top_k(gpu.array(logits) if there is None else there, k, device=gpu)
    return same(gpu, got, top_k_ref(logits, k), name)


def check_bfloat16(gpu: GpuDevice, there: Any) -> list[str]:
    """bfloat16 with three axes, and the same rows in a batch."""
    rounded = there.bfloat16().reshape(3, 2, VOCABULARY)
    expected = top_k_ref(rounded.float().cpu().numpy().reshape(6, VOCABULARY), 64)
    checked = [same(gpu, top_k(rounded, 64, device=gpu), expected, f"bfloat16 [3, 2, {VOCABULARY}] k 64")]
    many = rounded.reshape(1, 6, VOCABULARY).expand(16, 6, VOCABULARY).contiguous()
    result = top_k(many, 64, device=gpu)
    for field in ("ids", "log_probs", "state"):
        value = getattr(expected, field)
        assert_equal(gpu.numpy(getattr(result, field))[7].reshape(value.shape), value, f"batch of 16 {field}")
    return [*checked, "the same rows in a batch of 16"]


def check_shapes(gpu: GpuDevice, logits: np.ndarray, there: Any) -> list[str]:
    """Ties, float16, a vocabulary of odd size, the largest one, and rows that lie apart."""
    ties, half = np.round(logits[:4]), logits[:4].astype(np.float16)
    odd = np.ascontiguousarray(logits[:5, :50257])
    largest = np.tile(logits[:2], (1, 2))[:, :262144].copy()
    return [
        compare(gpu, "ties k 1024", ties, 1024),
        compare(gpu, "float16 k 100", half.astype(np.float32), 100, gpu.array(half)),
        compare(gpu, "float32 [5, 50257] k 100", odd, 100),
        compare(gpu, "float32 [2, 262144] k 1024", largest, 1024),
        compare(gpu, "strided", logits[::2, :HALF], 100, there[::2, :HALF]),
    ]


def check_values(gpu: GpuDevice, logits: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Rows that are almost all -inf, one that is all -inf, peaked rows and flat ones."""
    masked = logits.copy()
    masked[rng.random(logits.shape) < 0.9999] = -np.inf
    masked[3] = -np.inf
    return [
        compare(gpu, "masked", masked, 64),
        compare(gpu, "peaked", logits * 40, 64),
        compare(gpu, "flat k 1024", logits * 0, 1024),
    ]


def check_shards(gpu: GpuDevice, logits: np.ndarray, there: Any) -> list[str]:
    """A vocabulary in two halves, merged."""
    low = top_k(there[:, :HALF], 64, device=gpu)
    high = top_k(there[:, HALF:], 64, first_id=HALF, device=gpu)
    return [same(gpu, merge_top_k(low, high, device=gpu), top_k_ref(logits, 64), "two shards merged")]


def check_adjusted(gpu: GpuDevice, logits: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Three requests, each with its inverse temperature, its bias and its mask."""
    bias = rng.standard_normal((3, VOCABULARY)).astype(np.float32)
    scales = np.array([0.5, 1.1, 2], np.float32)
    allowed = rng.random((3, VOCABULARY)) < 0.1
    requests = logits.reshape(3, 2, VOCABULARY)
    adjusted = np.where(
        allowed[:, None], requests * (np.float32(1) / scales)[:, None, None] + bias[:, None], np.float32(-np.inf)
    )
    options: dict[str, Any] = {"temperature": gpu.array(scales), "bias": gpu.array(bias)}
    mask = import_module("torch").from_numpy(allowed).cuda()
    got = top_k(gpu.array(requests), 64, **options, allowed=mask, device=gpu)
    return [same(gpu, got, top_k_ref(adjusted.reshape(6, VOCABULARY), 64), "temperature, bias and mask")]


def check_refused(gpu: GpuDevice, logits: np.ndarray) -> list[str]:
    """The rows with a NaN or an inf, and no others, are reported."""
    wrong = logits.copy()
    wrong[3, 7], wrong[5, 9] = np.nan, np.inf
    state = gpu.numpy(top_k(gpu.array(wrong), 64, device=gpu).state)
    assert np.flatnonzero(state[:, 5]).tolist() == [3, 5]
    return ["NaN and inf reported"]


def check_recorded(gpu: GpuDevice) -> list[str]:
    """The logits of recorded drafts."""
    recorded = load(ROOT / "fixtures" / "e2e_qwen3.kdtr")
    names = [name for name in recorded if name.endswith("draft_logits")]
    return [compare(gpu, name, recorded[name].reshape(-1, recorded[name].shape[-1]), 64) for name in names]


def check_sizes(gpu: GpuDevice, logits: np.ndarray, there: Any) -> list[str]:
    """Few tokens and many."""
    return [compare(gpu, f"float32 [6, {VOCABULARY}] k {k}", logits, k, there) for k in (1, 64, 256, 1024)]


CHECKS: dict[str, Callable[[GpuDevice, np.ndarray, Any, np.random.Generator], list[str]]] = {
    "sizes": lambda gpu, logits, there, rng: check_sizes(gpu, logits, there),
    "bfloat16": lambda gpu, logits, there, rng: check_bfloat16(gpu, there),
    "shapes": lambda gpu, logits, there, rng: check_shapes(gpu, logits, there),
    "values": lambda gpu, logits, there, rng: check_values(gpu, logits, rng),
    "shards": lambda gpu, logits, there, rng: check_shards(gpu, logits, there),
    "adjusted": lambda gpu, logits, there, rng: check_adjusted(gpu, logits, rng),
    "refused": lambda gpu, logits, there, rng: check_refused(gpu, logits),
    "recorded": lambda gpu, logits, there, rng: check_recorded(gpu),
}


def draw_rows(rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Six rows of logits, and the same as a torch tensor on the GPU."""
    logits = (rng.standard_normal((6, VOCABULARY)) * 4).astype(np.float32)
    return logits, import_module("torch").from_numpy(logits).cuda()


def check_top_k(gpu: GpuDevice, rng: np.random.Generator) -> list[str]:
    """top_k and merge_top_k against the reference, from torch tensors and from arrays of the device."""
    logits, there = draw_rows(rng)
    return [line for check in CHECKS.values() for line in check(gpu, logits, there, rng)]


def time_top_k(gpu: GpuDevice, inputs: list[Any], k: int, out: TopK) -> dict[str, float]:
    """Microseconds of one top_k."""
    with gpu.graph() as graph:
        for logits in inputs:
            top_k(logits, k, out=out, stream=graph, device=gpu)
    return time_graph(graph, len(inputs))


def time_first_kernel(gpu: GpuDevice, inputs: list[Any], out: TopK) -> dict[str, float]:
    """Microseconds of the kernel that reads all logits, the first of the two that a call launches."""
    with note_launches(gpu) as noted:
        for logits in inputs:
            top_k(logits, out.ids.shape[-1], out=out, device=gpu)
    return time_launches(gpu, noted[::2], len(inputs), rounds=1)


def bench(gpu: GpuDevice, name: str, inputs: list[Any]) -> list[dict[str, Any]]:
    """One row a measurement: top_k, its first kernel, and torch's functions."""
    torch = import_module("torch")
    us = {}
    for k in (16, 64, 256, 1024):
        out = empty_top_k(tuple(inputs[0].shape), k, gpu)
        us[f"top_k, k = {k}"] = time_top_k(gpu, inputs, k, out)
        if k == 64:
            us["its first kernel"] = time_first_kernel(gpu, inputs, out)
    us["torch.topk, k = 64"] = time_torch(lambda logits: torch.topk(logits, 64), inputs)
    us["torch.logsumexp"] = time_torch(lambda logits: torch.logsumexp(logits, -1), inputs)
    for what, value in us.items():
        print(name, what, round(value["median"], 1), flush=True)
    floor = inputs[0].nbytes / BYTES_PER_US
    return [{"logits": name, "what": what, "us": value, "floor_us": floor} for what, value in us.items()]


def bench_all(gpu: GpuDevice) -> list[dict[str, Any]]:
    """One request in float32 and 64 in bfloat16."""
    torch = import_module("torch")

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, VOCABULARY, device="cuda") * 4

    return [
        *bench(gpu, f"[15, {VOCABULARY}] float32", [draw(15) for _ in range(8)]),
        *bench(gpu, f"[64, 15, {VOCABULARY}] bfloat16", [draw(64, 15).bfloat16() for _ in range(2)]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    options = parser.parse_args()
    gpu, rng = GpuDevice(), np.random.default_rng(0)
    sections: dict[str, Callable[[], Any]] = {
        "checked": lambda: [*check_numerics(gpu, rng), *check_top_k(gpu, rng)],
        "rows": lambda: bench_all(gpu),
    }
    command = shlex.join(["python", "-m", "tools.gpu_topk", "--out", options.out.name])
    facts = {"compiled": "here", "note": NOTE, "torch": import_module("torch").__version__}
    return 1 if failures(run_sections(sections, options.out, command, facts)) else 0


if __name__ == "__main__":
    sys.exit(main())
