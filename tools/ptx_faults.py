"""Kernels with one fault each, and their twins without it: `python -m tools.ptx_faults` records what the machine says.

It writes `fixtures/measurements/ptx_faults.json`: planted faults found, correct kernels flagged, launches of threads
that share a device, and stray pointers caught. `--check` runs all of it again and exits 1 where the record differs.
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddtree.bench import write_measurement
from ddtree.cuda import Kernel, PtxDevice, cuda, kernel
from ddtree.ptx import PtxError

In = Annotated[Any, "const int32[N]"]
Out = Annotated[Any, "int32[N]"]
RECORD = Path(__file__).parent.parent / "fixtures" / "measurements" / "ptx_faults.json"
BLOCK, GRID = 64, 4


def read_after_write(good: bool) -> Any:
    """A barrier is missing between a write and a read of another warp."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t = cuda.shared.array(64, np.int32), cuda.threadIdx.x
        tile[t] = x[t]
        if good:
            cuda.syncthreads()
        out[cuda.grid(1)] = tile[63 - t]

    return run_kernel


def write_after_read(good: bool) -> Any:
    """A barrier is missing between a read and the next write."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t = cuda.shared.array(64, np.int32), cuda.threadIdx.x
        tile[t] = x[t]
        cuda.syncthreads()
        found = tile[63 - t]
        if good:
            cuda.syncthreads()
        tile[t] = found + 1
        out[cuda.grid(1)] = tile[t]

    return run_kernel


def buffer_used_again(good: bool) -> Any:
    """A loop fills a tile again while another warp still reads it."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t, total = cuda.shared.array(64, np.int32), cuda.threadIdx.x, np.int32(0)
        for step in range(3):
            tile[t] = x[t] + step
            cuda.syncthreads()
            total += tile[63 - t]
            if good:
                cuda.syncthreads()
        out[cuda.grid(1)] = total

    return run_kernel


def no_syncwarp(good: bool) -> Any:
    """Lanes of a warp exchange through shared memory and do not meet."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t = cuda.shared.array(64, np.int32), cuda.threadIdx.x
        tile[t] = x[t]
        if good:
            cuda.syncwarp()
        out[cuda.grid(1)] = tile[t ^ 1]

    return run_kernel


def mask_too_small(good: bool) -> Any:
    """Half a warp meets, and reads what the other half wrote."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t = cuda.shared.array(64, np.int32), cuda.threadIdx.x
        tile[t] = x[t]
        if good:
            cuda.syncwarp(0xFFFFFFFF)
        elif t & 16:
            cuda.syncwarp(0xFFFF0000)
        else:
            cuda.syncwarp(0xFFFF)
        out[cuda.grid(1)] = tile[t ^ 16]

    return run_kernel


def sum_of_blocks(good: bool) -> Any:
    """Blocks add to one number without an atomic."""

    def run_kernel(x: In, out: Out) -> None:
        if cuda.threadIdx.x == 0:
            if good:
                cuda.atomic.add(out, 0, x[cuda.blockIdx.x])
            else:
                out[0] += x[cuda.blockIdx.x]

    return run_kernel


def histogram(good: bool) -> Any:
    """Threads count in global memory without atomics."""

    def run_kernel(x: In, out: Out) -> None:
        if good:
            cuda.atomic.add(out, x[cuda.grid(1)] & 7, 1)
        else:
            out[x[cuda.grid(1)] & 7] += 1

    return run_kernel


def histogram_in_shared(good: bool) -> Any:
    """Threads count in shared memory without atomics."""

    def run_kernel(x: In, out: Out) -> None:
        bins, t = cuda.shared.array(64, np.int32), cuda.threadIdx.x
        bins[t] = 0
        cuda.syncthreads()
        if good:
            cuda.atomic.add(bins, x[t] & 7, 1)
        else:
            bins[x[t] & 7] += 1
        cuda.syncthreads()
        out[cuda.grid(1)] = bins[t]

    return run_kernel


def count_read_too_early(good: bool) -> Any:
    """An atomic, and a plain read of another thread without a barrier."""

    def run_kernel(x: In, out: Out) -> None:
        count, t = cuda.shared.array(1, np.int32), cuda.threadIdx.x
        if t == 0:
            count[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(count, 0, x[t])
        if good:
            cuda.syncthreads()
        out[cuda.grid(1)] = count[0]

    return run_kernel


def cleared_too_late(good: bool) -> Any:
    """One thread clears a counter, others add to it, and no barrier is between."""

    def run_kernel(x: In, out: Out) -> None:
        count, t = cuda.shared.array(1, np.int32), cuda.threadIdx.x
        if t == 0:
            count[0] = 0
        if good:
            cuda.syncthreads()
        cuda.atomic.add(count, 0, x[t])
        cuda.syncthreads()
        out[cuda.grid(1)] = count[0]

    return run_kernel


def neighbours_in_place(good: bool) -> Any:
    """A thread reads its neighbour's element of the block while that is written."""

    def run_kernel(x: In, out: Out) -> None:
        start, t = cuda.blockIdx.x * 64, cuda.threadIdx.x
        out[start + t] = x[t]
        cuda.syncthreads()
        found = out[start + (t + 1) % 64]
        if good:
            cuda.syncthreads()
        out[start + t] = found

    return run_kernel


def halo_of_a_block(good: bool) -> Any:
    """A block reads what the next block writes."""

    def run_kernel(x: In, out: Out) -> None:
        i = cuda.grid(1)
        out[i] = x[i]
        cuda.syncthreads()
        if cuda.threadIdx.x == 63 and i + 1 < out.size:
            out[i] += x[i + 1] if good else out[i + 1]

    return run_kernel


def everybody_writes(good: bool) -> Any:
    """All threads write their number to one place."""

    def run_kernel(x: In, out: Out) -> None:
        if not good or cuda.grid(1) == 5:
            out[0] = cuda.grid(1)

    return run_kernel


def overlapping_outputs(good: bool) -> Any:
    """Blocks write one element too many, which is the next block's."""

    def run_kernel(x: In, out: Out) -> None:
        i = cuda.grid(1)
        out[i] = x[i]
        if cuda.threadIdx.x == 63 and not good and i + 1 < out.size:
            out[i + 1] = x[i]

    return run_kernel


def transpose(good: bool) -> Any:
    """A tile is read by columns before all rows are there."""

    def run_kernel(x: In, out: Out) -> None:
        tile, t = cuda.shared.array((8, 9), np.int32), cuda.threadIdx.x
        tile[t // 8, t % 8] = x[t]
        if good:
            cuda.syncthreads()
        out[cuda.grid(1)] = tile[t % 8, t // 8]

    return run_kernel


def scan(good: bool) -> Any:
    """Each step of a prefix sum in place needs a barrier after its reads."""

    def run_kernel(x: In, out: Out) -> None:
        sums, t, step = cuda.shared.array(64, np.int32), cuda.threadIdx.x, 1
        sums[t] = x[t]
        cuda.syncthreads()
        while step < 64:
            more = sums[t - step] if t >= step else 0
            if good:
                cuda.syncthreads()
            sums[t] += more
            cuda.syncthreads()
            step *= 2
        out[cuda.grid(1)] = sums[t]

    return run_kernel


def reduction_by_halves(good: bool) -> Any:
    """A tree of sums without the barrier of its steps."""

    def run_kernel(x: In, out: Out) -> None:
        sums, t, half = cuda.shared.array(64, np.int32), cuda.threadIdx.x, 32
        sums[t] = x[t]
        cuda.syncthreads()
        while half:
            if t < half:
                sums[t] += sums[t + half]
            if good:
                cuda.syncthreads()
            half //= 2
        if t == 0:
            out[cuda.blockIdx.x] = sums[0]

    return run_kernel


def _last_block(fence: str) -> Any:
    """Blocks leave parts, and the last one adds them up; `fence` comes before the ticket."""

    def run_kernel(x: In, out: Out) -> None:
        last, t = cuda.shared.array(1, np.int32), cuda.threadIdx.x
        if t == 0:
            out[1 + cuda.blockIdx.x] = x[cuda.blockIdx.x]
            if fence == "wide":
                cuda.threadfence()
            elif fence == "block":
                cuda.threadfence_block()
            elif fence == "early":
                cuda.threadfence()
                out[1 + cuda.blockIdx.x] += 1
            last[0] = cuda.atomic.add(out, 0, 1)
        cuda.syncthreads()
        if t == 0 and last[0] == cuda.gridDim.x - 1:
            total = 0
            for block in range(cuda.gridDim.x):
                total += out[1 + block]
            out[63] = total

    return run_kernel


def no_fence(good: bool) -> Any:
    """Parts of other blocks are read after a ticket without a fence."""
    return _last_block("wide" if good else "none")


def fence_of_a_block(good: bool) -> Any:
    """The fence before the ticket is for the block only."""
    return _last_block("wide" if good else "block")


def write_after_the_fence(good: bool) -> Any:
    """The part is written once more between the fence and the ticket."""
    return _last_block("wide" if good else "early")


MAKERS = (
    read_after_write, write_after_read, buffer_used_again, no_syncwarp, mask_too_small, sum_of_blocks, histogram,
    histogram_in_shared, count_read_too_early, cleared_too_late, neighbours_in_place, halo_of_a_block,
    everybody_writes, overlapping_outputs, transpose, scan, reduction_by_halves, no_fence, fence_of_a_block,
    write_after_the_fence,
)  # fmt: skip


def make(maker: Any, good: bool) -> Kernel:
    """A kernel with its fault, or without it."""
    return kernel("E0", block=BLOCK, grid=str(GRID))(maker(good))


def verdict(run: Kernel) -> str:
    """What the machine says of a launch: "", or the kind of its error."""
    x, out = np.arange(BLOCK * GRID, dtype=np.int32) % 11, np.zeros(BLOCK * GRID, np.int32)
    try:
        run(x, out, device=PtxDevice(count=False))
    except PtxError as error:
        return error.kind
    return ""


@kernel("E0", block=32, grid="1")
def plus_kernel(x: In, c: Annotated[Any, "int32"], out: Out) -> None:
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x] + c


def launch_in_threads(threads: int, launches: int) -> dict[str, int]:
    """Launches of threads that share a device and are switched at every chance: how many, and how many went wrong."""
    device, wrong, before = PtxDevice(), list[str](), sys.getswitchinterval()

    def work(i: int) -> None:
        x = np.full(32, 1000 * i, np.int32)
        for k in range(launches):
            try:
                out = device.empty(32, np.int32)
                plus_kernel(x, k % 900, out, device=device)
                if (out != 1000 * i + k % 900).any():
                    wrong.append("numbers")
            except (PtxError, RuntimeError, KeyError) as error:
                wrong.append(repr(error))

    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return {"threads": threads, "launches": threads * launches, "wrong": len(wrong)}


@kernel("E0", block=32, grid="1")
def stray_kernel(
    a: Out, other: Annotated[Any, "int32[M]"], at: Annotated[Any, "int64"], write: Annotated[Any, "int32"]
) -> None:
    if cuda.threadIdx.x == 7:
        if write:
            a[at] = 99
        else:
            other[0] = a[at]


FAR = [0, 1, 1 << 10, 1 << 20, 1 << 22, 1 << 29, 1 << 30, 1 << 33, 1 << 40, 1 << 61]


def stray(count: int, seed: int = 0) -> dict[str, int]:
    """Indices past the end, 4 MiB, 2^31, 2^32 bytes beyond, before the beginning, at random: how many are caught."""
    rng, device, caught = np.random.default_rng(seed), PtxDevice(check=False, count=False), 0
    others = [device.empty(size, np.int32) for size in (1, 77, 1 << 20)]
    for turn in range(count):
        size = int(rng.choice([32, 33, 1024, 1 << 18]))
        distance = int(rng.choice(FAR)) if turn % 2 else int(rng.integers(1 << int(rng.integers(1, 45))))
        index = size + distance if rng.random() < 0.6 else -size - 1 - distance  # numba adds the size to it
        a, other = np.zeros(size, np.int32), others[turn % 3]
        other[...] = 5
        try:
            stray_kernel(a, other, index, int(turn % 3 != 0), device=device)
        except PtxError as error:
            untouched = not a.any() and bool((other == 5).all())
            caught += error.kind == "out of bounds" and error.thread == (7, 0, 0) and untouched
    return {"offsets": count, "caught": caught}


def measure() -> dict[str, Any]:
    """Everything the record holds."""
    faults = [{"fault": m.__name__, "is": m.__doc__, "found": verdict(make(m, good=False)) == "race"} for m in MAKERS]
    flagged = [m.__name__ for m in MAKERS if verdict(make(m, good=True))]
    return {
        "faults": faults,
        "correct": {"kernels": len(MAKERS), "flagged": flagged},
        "threads": launch_in_threads(4, 2500),
        "strays": stray(1000),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the record")
    options, found = parser.parse_args(), measure()
    if options.check:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        wrong = [name for name, value in found.items() if record[name] != value]
        print(f"{RECORD.name}: {', '.join(wrong)} differ" if wrong else f"{RECORD.name}: as recorded")
        return 1 if wrong else 0
    write_measurement(RECORD, "python -m tools.ptx_faults", found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
