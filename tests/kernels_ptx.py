"""Sources of `fixtures/ptx/*.ptx`; `python tests/kernels_ptx.py fixtures/ptx` rebuilds (extra `dev`, no GPU needed)."""

import math
import re
import sys
from pathlib import Path

import numpy as np
from numba import cuda, float32, float64, int32, int64, types, uint32

f4, f8, i4, i8, u4 = (types.Array(t, 1, "C") for t in (float32, float64, int32, int64, uint32))
f4x2 = types.Array(float32, 2, "C")
FULL = 0xFFFFFFFF


def block_sum(x, out):
    """One sum a block: shuffles in a warp, shared memory between warps."""
    partial = cuda.shared.array(32, float32)
    i = cuda.grid(1)
    value = x[i] if i < x.size else float32(0)
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(FULL, value, step)
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        value = partial[cuda.threadIdx.x] if cuda.threadIdx.x < cuda.blockDim.x // 32 else float32(0)
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(FULL, value, step)
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = value


def warp_scan(x, out):
    """Inclusive prefix sum within each warp."""
    i = cuda.grid(1)
    value = x[i]
    for shift in range(5):
        other = cuda.shfl_up_sync(FULL, value, 1 << shift)
        if cuda.laneid >= 1 << shift:
            value += other
    out[i] = value


def histogram(x, out):
    """Bins counted in shared memory, then added to global memory."""
    bins = cuda.shared.array(16, int32)
    if cuda.threadIdx.x < 16:
        bins[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(bins, x[i], 1)
    cuda.syncthreads()
    if cuda.threadIdx.x < 16:
        cuda.atomic.add(out, cuda.threadIdx.x, bins[cuda.threadIdx.x])


def matmul(a, b, c):
    """C = A @ B by tiles of 8 × 8 in shared memory; sizes are multiples of 8."""
    left = cuda.shared.array((8, 8), float32)
    right = cuda.shared.array((8, 8), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    total = float32(0)
    for tile in range(a.shape[1] // 8):
        left[y, x] = a[row, tile * 8 + x]
        right[y, x] = b[tile * 8 + y, column]
        cuda.syncthreads()
        for k in range(8):
            total += left[y, k] * right[k, x]
        cuda.syncthreads()
    c[row, column] = total


def best_first(scores, width, out_parent, out_score):
    """Best-first search over a binary heap of implied nodes: each step takes the lane with the best frontier score."""
    lane = cuda.laneid
    frontier = cuda.shared.array(64, float64)
    parent = cuda.shared.array(64, int32)
    row = cuda.blockIdx.x * width
    frontier[lane] = -math.inf
    frontier[lane + 32] = -math.inf
    cuda.syncwarp()
    if lane == 0:
        frontier[0] = scores[row]
        parent[0] = -1
    cuda.syncwarp()
    used = 1
    for step in range(16):
        best = frontier[lane]
        index = lane
        if frontier[lane + 32] > best:
            best = frontier[lane + 32]
            index = lane + 32
        for shift in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, best, shift)
            other_index = cuda.shfl_xor_sync(FULL, index, shift)
            if other > best or (other == best and other_index < index):
                best = other
                index = other_index
        cuda.syncwarp()
        if lane == 0:
            out_parent[cuda.blockIdx.x * 16 + step] = parent[index]
            out_score[cuda.blockIdx.x * 16 + step] = best
            frontier[index] = -math.inf
        if lane < 2:
            frontier[used + lane] = best + scores[row + (used + lane) % width]
            parent[used + lane] = step
        used += 2
        cuda.syncwarp()


def collatz(x, out):
    """Steps until 1: every lane leaves the loop at its own time."""
    i = cuda.grid(1)
    if i >= x.size:
        return
    n = x[i]
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    out[i] = steps


def votes(x, out):
    """Vote, match, popc and the predicates of a warp."""
    i = cuda.grid(1)
    value = x[i]
    odd = cuda.ballot_sync(FULL, value % 2 == 1)
    same = cuda.match_any_sync(FULL, value)
    every = cuda.all_sync(FULL, value < 100)
    some = cuda.any_sync(FULL, value == 7)
    out[i] = cuda.popc(odd) + 100 * cuda.popc(same) + 10000 * every + 20000 * some + 100000 * cuda.ffs(same)


def half_warps(x, out):
    """The two halves of a warp shuffle in different branches, each under its own mask."""
    i = cuda.grid(1)
    if cuda.laneid < 16:
        out[i] = cuda.shfl_sync(0xFFFF, x[i], 3)
    else:
        out[i] = -cuda.shfl_sync(0xFFFF0000, x[i], 20)


def locals_sort(x, out):
    """Insertion sort of 8 values in local memory."""
    i = cuda.grid(1)
    values = cuda.local.array(8, int32)
    for k in range(8):
        values[k] = x[i * 8 + k]
    for k in range(1, 8):
        value = values[k]
        j = k - 1
        while j >= 0 and values[j] > value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value
    for k in range(8):
        out[i * 8 + k] = values[k]


def spin_lock(lock, out):
    """A lock taken by one thread of each block; the others wait at the barrier."""
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        out[0] = out[0] * 3 + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)
    cuda.syncthreads()


def maths(x, y, out):
    """Transcendental functions: compared within a tolerance, not to the bit."""
    i = cuda.grid(1)
    out[i] = math.exp(x[i]) + math.log(y[i]) + math.sin(x[i]) + math.sqrt(y[i]) + math.pow(y[i], x[i])


def maths64(x, y, out):
    """The same in float64: long polynomials of fma."""
    i = cuda.grid(1)
    out[i] = math.exp(x[i]) + math.log(y[i]) + math.cos(x[i]) + math.sqrt(y[i]) / math.tanh(y[i])


def axpy(a, x, y, out):
    """out = a·x + y in float32: contracts to one fma."""
    i = cuda.grid(1)
    if i < x.size:
        out[i] = a * x[i] + y[i]


def integers(x, y, out):
    """Integer division, shifts and products of every width."""
    i = cuda.grid(1)
    a, b = x[i], y[i]
    out[i] = a // b + (a % b) * 3 + (a >> 3) * (b << 2) + (a ^ b) - (a & b) * (a | b) + cuda.clz(a) + cuda.brev(b)


def float_atomics(x, out):
    """Float and 64-bit atomics whose old value is used, max and compare-and-swap."""
    i = cuda.grid(1)
    old = cuda.atomic.add(out, 0, x[i])
    cuda.atomic.max(out, 1, x[i])
    cuda.atomic.min(out, 2, old)


def dynamic_shared(x, out):
    """Reverses a block through dynamic shared memory."""
    tile = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[cuda.blockDim.x - 1 - t]


TABLE = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def constants(x, out):
    """Reads a table in constant memory."""
    table = cuda.const.array_like(TABLE)
    i = cuda.grid(1)
    out[i] = table[x[i] % 8]


def count_true(x, out):
    """A barrier that counts."""
    i = cuda.grid(1)
    many = cuda.syncthreads_count(int32(x[i] > 3))
    every = cuda.syncthreads_and(int32(x[i] > 0))
    out[i] = many * 4 + every * 2 + cuda.syncthreads_or(int32(x[i] > 8))


def reverse_racy(x, out):
    """Wrong: the tile is read before the other warp has written it."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[63 - t]


def reverse_fixed(x, out):
    """The same with the barrier."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    out[t] = tile[63 - t]


def warp_racy(x, out):
    """Wrong: lanes of one warp exchange through shared memory without syncwarp."""
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[31 - t]


def warp_fixed(x, out):
    """The same with syncwarp."""
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncwarp()
    out[t] = tile[31 - t]


def bounds_wrong(x, out):
    """Wrong: no test against the size."""
    i = cuda.grid(1)
    out[i] = x[i] + float32(1)


def bounds_fixed(x, out):
    """The same with the test."""
    i = cuda.grid(1)
    if i < x.size:
        out[i] = x[i] + float32(1)


def uninit_wrong(x, out):
    """Wrong: the last element of the tile is never written."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t < 63:
        tile[t] = x[t]
    cuda.syncthreads()
    out[t] = tile[t]


def uninit_fixed(x, out):
    """The same with every element written."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    out[t] = tile[t]


def barrier_wrong(x, out):
    """Wrong: some lanes of a warp wait at the first barrier while the others wait at the second."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    if t < 40:
        cuda.syncthreads()
    cuda.syncthreads()
    out[t] = tile[63 - t]


def barrier_fixed(x, out):
    """The same with one barrier for all."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    out[t] = tile[63 - t]


def mask_wrong(x, out):
    """Wrong: the mask names all lanes, half of them come."""
    t = cuda.threadIdx.x
    out[t] = x[t]
    if t < 16:
        out[t] = cuda.shfl_xor_sync(0xFFFFFFFF, x[t], 16)


def mask_fixed(x, out):
    """The same with the mask of those that come."""
    t = cuda.threadIdx.x
    out[t] = x[t]
    if t < 16:
        out[t] = cuda.shfl_xor_sync(0xFFFF, x[t], 8)


KERNELS = {
    block_sum: (f4, f4),
    warp_scan: (f4, f4),
    histogram: (i4, i4),
    matmul: (f4x2, f4x2, f4x2),
    best_first: (f8, int64, i4, f8),
    collatz: (i8, i4),
    votes: (u4, u4),
    half_warps: (f4, f4),
    locals_sort: (i4, i4),
    spin_lock: (i4, i4),
    maths: (f4, f4, f4),
    maths64: (f8, f8, f8),
    axpy: (float32, f4, f4, f4),
    integers: (i4, i4, i4),
    float_atomics: (f8, f8),
    dynamic_shared: (f4, f4),
    constants: (i4, i4),
    count_true: (i4, i4),
    reverse_racy: (f4, f4),
    reverse_fixed: (f4, f4),
    warp_racy: (f4, f4),
    warp_fixed: (f4, f4),
    bounds_wrong: (f4, f4),
    bounds_fixed: (f4, f4),
    uninit_wrong: (f4, f4),
    uninit_fixed: (f4, f4),
    barrier_wrong: (f4, f4),
    barrier_fixed: (f4, f4),
    mask_wrong: (f4, f4),
    mask_fixed: (f4, f4),
}


def build(folder: Path) -> None:
    """Compile every kernel to PTX for sm_120, under its own short name and without the path of this machine."""
    for kernel, signature in KERNELS.items():
        text, _ = cuda.compile_ptx(kernel, signature, cc=(12, 0), lineinfo=True)
        mangled = re.search(r"\.visible \.entry (\w+)", text)[1]
        env = re.search(r"_ZN08NumbaEnv\w+", text)[0]
        text = text.replace(env, f"{kernel.__name__}_env").replace(mangled, kernel.__name__)
        text = re.sub(r'\.file\s+(\d+)\s+".*/(\w+\.py)"', r'.file \1 "\2"', text)
        (folder / f"{kernel.__name__}.ptx").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
