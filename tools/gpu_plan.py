"""Holds `DraftPlan` and `draft_tree` on a GPU against numpy for arrays of torch and CuPy, and times what a call costs.

`python -m tools.gpu_plan --out FILE` needs an NVIDIA GPU, torch and CuPy. It writes one JSON: what was checked (kinds
of results, order with torch's work on its streams, captures, threads), and for each size the microseconds of the host
for a run of a plan, a call of `draft_tree` and a replay, beside those of the GPU in a graph. It ends with an error if
anything differs.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench import VOCABULARY, time_pipeline
from ddtree.check import assert_equal
from ddtree.cuda import GpuDevice
from ddtree.draft import Draft, DraftPlan, draft_tree, draft_tree_ref, empty_draft
from tools.gpu import failures, run_sections

SMALL = 4099  # tokens; rows of an odd size, so they are not aligned


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, shape).astype(np.float32)


def same(gpu: GpuDevice, draft: Draft, logits: np.ndarray, budget: int, **options: Any) -> None:
    """Hold every field against the reference, to the bit."""
    expected = draft_tree_ref(logits, budget, **options)
    for part in ("top", "trees", "layout"):
        for name, wanted in vars(getattr(expected, part)).items():
            if name != "work":
                assert_equal(gpu.numpy(getattr(getattr(draft, part), name)), wanted, f"{part}.{name}")


def check_kinds(gpu: GpuDevice) -> dict[str, str]:
    """Results are of the kind of the logits, whatever that is, and have the bits of the reference."""
    torch, cupy, found = import_module("torch"), import_module("cupy"), {}
    logits = draw(1, 2, 5, SMALL)
    kinds = {
        "torch": (torch.from_numpy(logits).cuda(), torch.Tensor),
        "torch parameter": (torch.nn.Parameter(torch.from_numpy(logits).cuda()), torch.Tensor),
        "cupy": (cupy.asarray(logits), cupy.ndarray),
        "ddtree": (gpu.array(logits), type(gpu.empty(1, np.int8))),
    }
    for name, (there, kind) in kinds.items():
        for _ in range(2):
            draft = draft_tree(there, 20, [3, 4], lengths=[7, 8])
            assert all(isinstance(array, kind) for array in vars(draft.trees).values()), name
            same(gpu, draft, logits, 20, root_tokens=[3, 4], lengths=[7, 8])
        found[name] = type(draft.layout.masks).__module__
    half = torch.from_numpy(logits).cuda().bfloat16()
    same(gpu, draft_tree(half, 20), half.float().cpu().numpy(), 20)
    strided = torch.from_numpy(np.concatenate([logits, logits], 2)).cuda()[:, :, 3 : 3 + SMALL]
    same(gpu, draft_tree(strided, 20), strided.cpu().numpy(), 20)
    own = empty_draft(logits.shape, 21, gpu)  # arrays of ours for the results of torch's
    for _ in range(2):
        same(gpu, draft_tree(kinds["torch"][0], 20, out=own), logits, 20)
    options = {"temperature": 0.7, "bias": draw(5, 2, SMALL), "allowed": draw(6, 2, SMALL) > -3, "max_depth": [1, 3]}
    same(gpu, draft_tree(kinds["torch"][0], 20, **options), logits, 20, **options)
    there = {name: torch.from_numpy(np.asarray(x)).cuda() for name, x in options.items() if name in ("bias", "allowed")}
    same(gpu, draft_tree(kinds["torch"][0], 20, **{**options, **there}), logits, 20, **options)
    return {**found, "options": "temperature, bias, allowed, max_depth of the host and of the device"}


def check_order(gpu: GpuDevice, rounds: int = 400) -> dict[str, int]:
    """On a stream of torch: logits are made late, and results are read by torch at once; no wait is asked for."""
    torch, wrong = import_module("torch"), 0
    rows = [draw(seed, 3, SMALL) for seed in range(4)]
    wanted = [draft_tree_ref(row, 12).trees for row in rows]
    with torch.cuda.stream(torch.cuda.Stream()):
        there, plan = [torch.from_numpy(row).cuda() for row in rows], DraftPlan((3, SMALL), budget=12, device=gpu)
        slow, logits = torch.randn(3000, 3000, device="cuda"), torch.empty(3, SMALL, device="cuda")
        kept = []
        for number in range(rounds):
            slow @ slow  # so that a launch elsewhere would come too early
            logits.copy_(there[number % 4])
            trees = (plan.run(logits) if number % 2 else draft_tree(logits, 12)).trees
            kept.append((number % 4, trees.tokens.clone(), trees.scores.clone()))
            logits.fill_(float("nan"))  # and one that came too late would find this
        for which, tokens, scores in kept:
            good = np.array_equal(tokens.cpu().numpy(), wanted[which].tokens)
            wrong += not (good and np.array_equal(scores.cpu().numpy(), wanted[which].scores))
    assert wrong == 0, f"{wrong} of {rounds} rounds differ"
    return {"rounds": rounds, "different": wrong}


def check_captures(gpu: GpuDevice) -> dict[str, str]:
    """Runs recorded by torch's graph, by `plan.graph` and by `device.graph` follow new logits and lengths."""
    torch, logits = import_module("torch"), draw(3, 4, SMALL)
    there, lengths = torch.from_numpy(logits).cuda(), torch.tensor([50], device="cuda")
    plan, graph = DraftPlan(logits.shape, budget=16, device=gpu), torch.cuda.CUDAGraph()
    out = plan.empty(there)
    plan.run(there, 9, lengths=lengths, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.run(there, 9, lengths=lengths, out=out)
        fresh = draft_tree(there, 16, 11, lengths=lengths)
    recorded = plan.graph(there, 9, lengths=lengths)
    for seed in range(5):
        new = draw(seed, 4, SMALL)
        there.copy_(torch.from_numpy(new))
        lengths.fill_(50 + seed)
        draft_tree(there, 16, 12345)  # other numbers of the host do not change what was recorded
        plan.run(there, 777)
        graph.replay()
        same(gpu, out, new, 16, root_tokens=9, lengths=50 + seed)
        same(gpu, fresh, new, 16, root_tokens=11, lengths=50 + seed)
        same(gpu, recorded.replay(), new, 16, root_tokens=9, lengths=50 + seed)
    return {"replays": "5 each of torch.cuda.graph and plan.graph"}


def check_threads(gpu: GpuDevice, threads: int = 4, calls: int = 200) -> dict[str, int]:
    """Threads with streams of their own call `draft_tree` at once; a new thread has no context of the driver yet."""
    torch, failed = import_module("torch"), list[Any]()

    def work(seed: int) -> None:
        logits = draw(seed, 3, SMALL)
        wanted = draft_tree_ref(logits, 12).trees.tokens
        with torch.cuda.stream(torch.cuda.Stream()):
            there = torch.from_numpy(logits).cuda()
            for _ in range(calls):
                if not np.array_equal(draft_tree(there, 12).trees.tokens.cpu().numpy(), wanted):
                    failed.append(seed)

    def bare() -> None:
        try:
            same(gpu, draft_tree(gpu.array(draw(1, 3, SMALL)), 12), draw(1, 3, SMALL), 12)
        except Exception as error:
            failed.append(repr(error))

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)] + [threading.Thread(target=bare)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed, failed
    return {"threads": threads + 1, "calls": threads * calls + 1, "different": len(failed)}


def host_us(call: Callable[[], Any], calls: int = 200, repeats: int = 21) -> dict[str, float]:
    """Microseconds of the host for one call: medians of batches that fit the queue, each after a wait."""
    torch, times = import_module("torch"), []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    low, median, high = statistics.quantiles(times[1:], n=4)
    return {"median": median, "q1": low, "q3": high, "n": repeats}


def read(draft: Draft) -> list[Any]:
    """Every part of a draft."""
    return [draft.top, draft.trees, draft.layout]


def time_pieces(gpu: GpuDevice) -> dict[str, float]:
    """What the host pays for the parts of a call and for what was not chosen, microseconds."""
    torch = import_module("torch")
    where = torch.device("cuda", gpu.ordinal)
    slab = torch.empty(8192, dtype=torch.int64, device=where)
    floats, logits = slab.view(torch.float32), torch.randn(15, VOCABULARY, device=where)
    like, stream = [torch.empty(15, 64, device=where)] * 5, torch.cuda.current_stream().cuda_stream
    plan = DraftPlan(logits.shape, logits.dtype, 64, device=gpu)
    plan.run(logits, 7)
    assert plan._last is not None
    ready, number, view_of = (
        plan._last[2],
        np.array([5]),
        import_module("cuda.core.utils").StridedMemoryView.from_dlpack,
    )
    timed: dict[str, Callable[[], Any]] = {
        "torch.empty": lambda: torch.empty(8192, dtype=torch.int64, device=where),
        "view as another dtype": lambda: slab.view(torch.float32),
        "as_strided": lambda: floats.as_strided((15, 64), (64, 1), 128),
        "split into 5": lambda: floats.split([960] * 4 + [16384 - 3840]),
        "unflatten into 5": lambda: torch._C._nn.unflatten_dense_tensors(floats, like),
        "current_stream": lambda: torch.cuda.current_stream(gpu.ordinal).cuda_stream,
        "current stream, raw": lambda: gpu.library(logits).current_stream(),
        "a view of a tensor": lambda: gpu.view("logits", logits),
        "a view by DLPack": lambda: view_of(logits, stream_ptr=-1),
        "a copy of 8 bytes": lambda: gpu.write(slab[:1], number, stream),
        "a word set by the stream": lambda: gpu._call("cuStreamWriteValue64", stream, slab.data_ptr(), 5, 0),
        "four launches": lambda: ready.run(stream, True),
        "four launches as one graph": lambda: ready.run(stream),
    }
    return {name: host_us(call)["median"] for name, call in timed.items()}


def time_size(gpu: GpuDevice, shape: tuple[int, ...], dtype: str, budget: int) -> list[dict[str, Any]]:
    """The host's time of a run, of a call with changing buffers and of a replay, and the GPU's in a graph."""
    torch, requests, turn = import_module("torch"), shape[0] if len(shape) == 3 else 1, iter(range(10**9))
    there = [torch.randn(shape, device="cuda").mul_(4).to(getattr(torch, dtype)) for _ in range(2)]
    roots, lengths = (torch.full((requests,), x, device="cuda") for x in (7, 1024))
    plan = DraftPlan(shape, dtype, budget, device=gpu)
    graph, calls = plan.graph(there[0], roots, lengths=lengths), 100 if requests == 1 else 40
    timed = {
        "plan.run": lambda: plan.run(there[next(turn) % 2], roots, lengths=lengths),
        "plan.run, numbers of the host": lambda: plan.run(there[next(turn) % 2], next(turn), lengths=next(turn)),
        "draft_tree": lambda: draft_tree(there[next(turn) % 2], budget, roots, lengths=lengths),
        "draft_tree, all results read": lambda: read(draft_tree(there[next(turn) % 2], budget, roots, lengths=lengths)),
        "replay": graph.replay,
    }
    row = {"logits": f"{list(shape)} {dtype}", "budget": budget}
    rows: list[dict[str, Any]] = [
        {**row, "call": name, "host_us": host_us(call, calls)} for name, call in timed.items()
    ]
    host = [(x.view(torch.uint16) if dtype == "bfloat16" else x).cpu().numpy() for x in there]
    inputs = [gpu.array(x) for x in host] * (4 if requests == 1 else 1)
    return [*rows, {**row, "call": "in a graph", "gpu_us": time_pipeline(gpu, row["logits"], inputs, budget)[0]["us"]}]


def time_calls(gpu: GpuDevice) -> list[dict[str, Any]]:
    """Rows for one request and budgets 16 to 1,024, and for 64 requests."""
    sizes = [((15, VOCABULARY), "float32", budget) for budget in (16, 64, 256, 1024)]
    found = [time_size(gpu, *size) for size in [*sizes, ((64, 15, VOCABULARY), "bfloat16", 64)]]
    return [row for rows in found for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options, gpu = parser.parse_args(), GpuDevice()
    sections: dict[str, Callable[[], Any]] = {
        "kinds": lambda: check_kinds(gpu),
        "order": lambda: check_order(gpu),
        "captures": lambda: check_captures(gpu),
        "threads": lambda: check_threads(gpu),
        "pieces": lambda: time_pieces(gpu),
        "times": lambda: time_calls(gpu),
    }
    return 1 if failures(run_sections(sections, options.out, "python -m tools.gpu_plan", {})) else 0


if __name__ == "__main__":
    sys.exit(main())
