"""Compaction and whole rounds on a GPU, held against numpy, and timed for the cache of a Qwen3-8B.

`python -m tools.gpu_round --out FILE` needs an NVIDIA GPU and the extra `gpu`; torch, if there, is a yardstick.
It writes one JSON: what was compared (caches in one piece, in pages, with heads first, latent rows; numbers that are no
walk; graphs that follow new walks; rounds of a stand-in, replayed `--replays` times, whose texts and caches are those
of plain decoding), compute-sanitizer's four tools, and microseconds in a CUDA graph: paths of 1 to 16 nodes in trees of
65, and whole rounds. Exit status 1 if anything differs. `--here` compares on the PTX machine and times nothing.
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

from ddtree.accept import Requests
from ddtree.check import assert_equal
from ddtree.compact import CompactPlan, compact_ref, permute_slots, permute_slots_ref
from ddtree.cuda import Device, GpuDevice, Launch, PtxDevice
from ddtree.draft import Draft, DraftPlan
from ddtree.measure import note_launches, time_graph, time_launches, time_torch
from ddtree.round import (
    RoundPlan,
    StandIn,
    StandInCache,
    StandInModel,
    forward_ref,
    propose_ref,
    round_ref,
    rows_of_text,
)
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


# --- rounds ----------------------------------------------------------------------------------------------------------

MODEL, TREE, AHEAD, LONGEST, PAGE = StandIn(vocabulary=64, arrays=4, size=4), 17, 6, 8, 16


class Texts:
    """Requests of a stand-in on a device: prompts in the cache, a round recorded. wanted: tokens of each."""

    def __init__(self, device: Device, wanted: Sequence[int]) -> None:
        rng, count, self.device = np.random.default_rng(1), len(wanted), device
        self.wanted, self.prompts = list(wanted), [rng.integers(0, 64, 3 + 5 * r) for r in range(count)]
        room = -(-(max(wanted) + 5 * count + TREE + LONGEST) // PAGE)
        table = rng.permutation(count * room).astype(np.int32).reshape(count, room)
        rows = np.zeros((MODEL.arrays, count * room, PAGE, MODEL.size), np.uint32)
        self.host, self.texts = StandInCache(rows, table), np.full((count, room * PAGE), -1, np.int64)
        for r, prompt in enumerate(self.prompts):
            at, self.texts[r, : len(prompt)] = np.arange(len(prompt) - 1), prompt
            fresh = rows_of_text(prompt[:-1], MODEL.arrays * MODEL.size).reshape(len(at), MODEL.arrays, -1)
            rows[:, table[r, at // PAGE], at % PAGE] = fresh.swapaxes(0, 1)
        lengths = np.array([len(prompt) - 1 for prompt in self.prompts])
        self.state = Requests(np.array([prompt[-1] for prompt in self.prompts]), lengths, np.array(self.wanted))
        self.requests = Requests(*map(device.array, vars(self.state).values()))
        self.cache = StandInCache(device.array(rows), device.array(table))
        self.written = device.array(self.texts)
        draft = DraftPlan((count, AHEAD, MODEL.vocabulary), budget=TREE - 1, device=device)
        compact = CompactPlan(self.cache.rows, TREE, row_axes=1, paged=True, device=device)
        options = {"texts": self.written, "longest": LONGEST, "page_table": self.cache.page_table}
        self.plan = RoundPlan(draft, compact, self.requests, **options)
        model = StandInModel(MODEL, self.cache, self.requests, AHEAD, TREE, device)
        self.graph = self.plan.graph(model.propose, model.verify)

    def compare_rounds(self, rounds: int) -> None:
        """Replay and hold state, walk and cache against the reference, round for round."""
        stops, state = np.full((len(self.wanted), 1), -1, np.int64), self.state
        for _ in range(rounds):
            now = state
            _, accepted, state = round_ref(
                propose_ref(now.lengths, AHEAD, MODEL.vocabulary), TREE - 1, now,
                lambda trees, now=now: forward_ref(MODEL, self.host, trees, now)[0], self.host.rows, stops, LONGEST,
                self.host.page_table,
            )  # fmt: skip
            self.graph.replay()
            for name in ("counts", "tokens", "nodes", "ends"):
                assert_equal(self.device.numpy(getattr(self.plan.accepted, name)), getattr(accepted, name), name)
            for name, values in vars(state).items():
                assert_equal(self.device.numpy(getattr(self.requests, name)), values, name)
        assert_equal(self.device.numpy(self.cache.rows), self.host.rows, "cache")

    def check(self) -> int:
        """Hold texts and caches against plain decoding; returns how many tokens were compared."""
        lengths, texts = self.device.numpy(self.requests.lengths), self.device.numpy(self.written)
        rows, compared = self.device.numpy(self.cache.rows), 0
        for r, (prompt, length) in enumerate(zip(self.prompts, lengths, strict=True)):
            expected = MODEL.decode(prompt, int(length) + 1 - len(prompt))
            assert_equal(texts[r, : length + 1], expected, f"text {r}")
            assert (texts[r, length + 1 :] == -1).all(), f"text {r} goes on"
            at = np.arange(length)
            found = rows[:, self.host.page_table[r, at // PAGE], at % PAGE].swapaxes(0, 1).reshape(length, -1)
            assert_equal(found, rows_of_text(expected[:-1], found.shape[1]), f"cache {r}")
            compared += int(length) + 1 - len(prompt)
        return compared


def free_memory(gpu: Device) -> int:
    """Bytes of the GPU that nobody has; 0 on the PTX machine."""
    return int(gpu._call("cuMemGetInfo")[0]) if isinstance(gpu, GpuDevice) else 0


def soak(device: Device, replays: int, compared: int = 300) -> dict[str, Any]:
    """Replay a round so many times, with requests that end early; memory must not grow, texts must be right."""
    texts = Texts(device, [LONGEST * replays, replays // 3 + 3, replays // 10 + 3, 5])
    texts.compare_rounds(min(compared, replays))
    device.synchronize()
    before = free_memory(device)
    for done in range(min(compared, replays), replays):
        texts.graph.replay()
        if done % 1000 == 0:
            device.synchronize()
    device.synchronize()
    grown = before - free_memory(device)
    assert grown <= 0, f"{grown} bytes of memory are gone after {replays} replays"
    remaining = texts.device.numpy(texts.requests.remaining)
    assert remaining[3] == 0, remaining
    return {"replays": replays, "round for round": compared, "tokens": texts.check(), "bytes grown": grown}


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


class Replays:
    """So many replays of a graph as one."""

    def __init__(self, graph: Any, count: int) -> None:
        self.graph, self.count = graph, count

    def replay(self) -> None:
        for _ in range(self.count):
            self.graph.replay()


class Round:
    """A round of the sizes of a Qwen3-8B with logits that stay as they are: each one accepts the same path.

    path: nodes of it, at most the tree's depth and one.
    """

    def __init__(self, gpu: Device, requests: int, vocabulary: int, dtype: str, room: int, path: int) -> None:
        shape, rng, self.gpu = (requests, 15, vocabulary), np.random.default_rng(0), gpu
        self.cache = gpu.empty((LAYERS, 2, requests, room, HEADS, SIZE), np.uint16)
        row = rng.normal(0, 1, shape[1:]).astype(np.float32)
        row[:, :32] = 14 - 1.5 * np.arange(32)  # the first token stands out: deep trees
        self.drafted = gpu.array(np.tile(row, (requests, 1, 1)))
        numbers = np.full(requests, 7), np.full(requests, 500), np.full(requests, 10**9)
        self.start, self.requests = numbers[1], Requests(*map(gpu.array, numbers))
        draft, compact = DraftPlan(shape, budget=NODES - 1, device=gpu), CompactPlan(self.cache, NODES, device=gpu)
        self.plan = RoundPlan(draft, compact, self.requests)
        self.choices = self.choose(draft.run(self.drafted, self.requests.root_tokens), path)
        target = np.zeros((requests, NODES, vocabulary), np.float32)
        np.put_along_axis(target, self.choices[..., None], 1, axis=2)
        bits = (target.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else target
        self.target = gpu.array(bits)

    def choose(self, draft: Draft, path: int) -> np.ndarray:
        """Choices (R, N) that follow the tree to a node of depth path - 1, the last of them, and leave it there."""
        tokens, parents, depths = (
            self.gpu.numpy(getattr(draft.trees, name)) for name in ("tokens", "parents", "depths")
        )
        choices = np.full(tokens.shape, 40, np.int64)  # a token that no tree has
        for row, up, depth, chosen in zip(tokens, parents, depths, choices, strict=True):
            node = int(np.flatnonzero(depth == path - 1)[-1])
            while node > 0:
                chosen[up[node]], node = row[node], int(up[node])
        return choices

    def graph(self, rounds: int) -> Any:
        """So many rounds recorded."""
        with self.gpu.graph() as graph:
            for _ in range(rounds):
                self.plan.run(lambda _: self.drafted, lambda *_: self.target, stream=graph)
        return graph

    def restart(self) -> None:
        self.gpu.write(self.requests.lengths, self.start)

    def walk_and_move(self) -> list[Launch]:
        """The launches of the walk, from choices, and of the compaction."""
        there, made = self.gpu.array(self.choices), self.plan.accepted
        with note_launches(self.gpu) as noted:
            self.plan.run(lambda _: self.drafted, lambda *_: there)
        walk = [launch for launch in noted if launch.kernel.name == "walk_trees"]
        lengths = self.requests.lengths
        return [*walk, self.plan.compact.prepare(made.nodes, made.counts, lengths, lengths_are="after")]


def time_round(
    gpu: GpuDevice, requests: int, dtype: str, path: int, vocabulary: int = 151_936, rounds: int = 20
) -> dict[str, Any]:
    """Microseconds of a round without the models, and what the gap between two replays adds to one within a graph."""
    timed = Round(gpu, requests, vocabulary, dtype, 6144, path)
    one, many = timed.graph(1), timed.graph(rounds)
    one.replay()
    counts = gpu.numpy(timed.plan.accepted.counts)
    assert (counts == path).all(), f"{counts} nodes were accepted, not {path}"
    found: dict[str, Any] = {"requests": requests, "logits": dtype, "path": path}
    for name, graph in (("alone_us", Replays(one, rounds)), ("in_a_graph_us", many)):
        timed.restart()
        found[name] = round(time_graph(graph, rounds)["median"], 2)
    timed.restart()
    found["walk_and_compaction_us"] = round(time_launches(gpu, timed.walk_and_move(), 1, rounds=20)["median"], 2)
    assert int(gpu.numpy(timed.requests.lengths).max()) + NODES <= 6144, "rows did not fit, so they did not move"
    return {**found, "gap_us": round(found["alone_us"] - found["in_a_graph_us"], 2)}


def time_all(gpu: GpuDevice) -> dict[str, Any]:
    few: list[tuple[int, bool]] = [(1, True), (2, False), (4, False), (6, False), (8, False), (8, True), (16, False)]
    found = [row for page in (0, 16) for requests in (1, 16, 64) for row in time_compaction(gpu, requests, page, few)]
    print(print_table(found))
    torch = [time_copies_of_torch(path) for path in (4, 16)] if find_spec("torch") else []
    rounds = [time_round(gpu, 1, dtype, path) for dtype in ("float32", "bfloat16") for path in (1, 6)]
    rounds.append(time_round(gpu, 16, "bfloat16", 6))
    print(print_table(rounds))
    return {
        "compaction": found,
        "rounds": rounds,
        "slots": [time_slots(gpu, requests) for requests in (1, 16, 64)],
        "torch": torch,
    }


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
    parser.add_argument("--replays", type=int, default=100_000, help="of a round, in the soak")
    options = parser.parse_args()
    if options.here or options.alone:
        device = PtxDevice() if options.here else GpuDevice()
        print(compare_all(device, rounds=2), soak(device, 12, compared=4))
        return 0
    gpu = GpuDevice()
    sections: dict[str, Callable[[], Any]] = {"compared": lambda: compare_all(gpu)}
    if find_spec("torch"):
        sections["torch"] = lambda: compare_torch(gpu)
    sections |= {"soak": lambda: soak(gpu, options.replays), "times": lambda: time_all(gpu)}
    sections["sanitizer"] = check_sanitizer
    command = (
        f"python -m tools.gpu_round --replays {options.replays} --out {options.out.name if options.out else 'FILE'}"
    )
    found = failures(run_sections(sections, options.out, command, {"arch": gpu.arch}))
    print("\n".join(found) or "everything as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
