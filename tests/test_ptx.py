"""The PTX machine on compiled kernels: same results as numpy, wrong kernels named, waiting lanes, exact counts."""

import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddtree.ptx
from ddtree.ptx import GlobalMemory, Machine, PtxError, load_ptx
from ddtree.ptx.text import control_flow, parse

KERNELS = Path(__file__).parent.parent / "fixtures" / "ptx"
HEAD = ".version 9.5\n.target sm_120\n.address_size 64\n"


def run(name, grid, block, *args, **options):
    """Launch a kernel of fixtures/ptx; arrays are passed in numba's ABI."""
    memory, flat = GlobalMemory(), []
    for arg in args:
        if isinstance(arg, np.ndarray):
            flat += [0, 0, arg.size, arg.itemsize, memory.bind(arg), *arg.shape, *arg.strides]
        else:
            flat.append(arg)
    return (
        load_ptx((KERNELS / f"{name}.ptx").read_text())
        .launch(name, grid, block, flat, memory=memory, **options)
        .counters
    )


def launch(body, *arrays, grid=1, block=32, declare="", **options):
    """Run PTX statements with %a, %b, ... bound to arrays, %t the thread and %d1 = a + 4·thread."""
    names = "abcdefgh"[: len(arrays)]
    text = f"{HEAD}{declare}.visible .entry k(" + ", ".join(f".param .u64 p{name}" for name in names) + ") {\n"
    text += ".reg .pred %p<9>; .reg .b32 %r<20>; .reg .b32 %t; .reg .b64 %d<20>;\n"
    text += "".join(f".reg .b64 %{name};\nld.param.u64 %{name}, [p{name}];\n" for name in names)
    text += "mov.u32 %t, %tid.x;\n" + ("mad.wide.u32 %d1, %t, 4, %a;\n" if names else "") + body + "\nret;\n}\n"
    memory = GlobalMemory()
    bound = [memory.bind(a) if isinstance(a, np.ndarray) else a for a in arrays]
    return load_ptx(text).launch("k", grid, block, bound, memory=memory, **options).counters


def per_lane(body, n=32, **options):
    """What each thread leaves in %r1."""
    out = np.zeros(n, "u4")
    launch(body + "\nst.global.u32 [%d1], %r1;", out, block=n, **options)
    return out


# --- compiled kernels against numpy ---------------------------------------------------------------------------------


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_block_sums_through_shuffles_and_shared_memory(rng):
    x, out = rng.standard_normal(1000).astype("f4"), np.zeros(4, "f4")
    run("block_sum", 4, 256, x, out)
    lanes = np.pad(x, (0, 24)).reshape(4, 8, 32)
    for step in (16, 8, 4, 2, 1):
        lanes = lanes.copy()
        lanes[..., : 32 - step] += lanes[..., step:]
    lanes = np.pad(lanes[..., 0], ((0, 0), (0, 24)))
    for step in (16, 8, 4, 2, 1):
        lanes = lanes.copy()
        lanes[..., : 32 - step] += lanes[..., step:]
    assert (out == lanes[:, 0]).all()


def test_warp_scans(rng):
    x, out = rng.integers(0, 100, 512).astype("f4"), np.zeros(512, "f4")
    run("warp_scan", 2, 256, x, out)
    assert (out.reshape(-1, 32) == np.cumsum(x.reshape(-1, 32), axis=1)).all()


def test_a_histogram_with_shared_and_global_atomics(rng):
    x, out = rng.integers(0, 16, 5000).astype("i4"), np.zeros(16, "i4")
    counts = run("histogram", 4, 128, x, out)
    assert (out == np.bincount(x, minlength=16)).all()
    assert counts.atomics == 5000 + 4 * 16


def test_matrix_product_by_tiles(rng):
    a, b = (rng.integers(-9, 9, shape).astype("f4") for shape in ((16, 24), (24, 32)))
    c = np.zeros((16, 32), "f4")
    counts = run("matmul", (4, 2), (8, 8), a, b, c)
    assert (c == a @ b).all()
    assert counts.global_load_bytes == 4 * 2 * 64 * 3 * 2 * 4 and counts.barriers == 8 * 6


def best_first_ref(scores):
    """The kernel `best_first` in plain Python for one block."""
    frontier, parent = np.full(64, -np.inf), np.zeros(64, int)
    frontier[0], parent[0], used = scores[0], -1, 1
    parents, values = [], []
    for step in range(16):
        index = int(np.argmax(frontier))
        best = frontier[index]
        parents.append(parent[index])
        values.append(best)
        frontier[index] = -np.inf
        for k in range(2):
            frontier[used + k] = best + scores[(used + k) % scores.size]
            parent[used + k] = step
        used += 2
    return parents, values


@settings(max_examples=5)
@given(st.integers(0, 1000), st.sampled_from([1, 3, 7]))
def test_a_best_first_search_in_one_warp_for_each_request(seed, blocks):
    scores = np.round(np.random.default_rng(seed).standard_normal((blocks, 40)), 1)
    parents, values = np.zeros((blocks, 16), "i4"), np.zeros((blocks, 16))
    run("best_first", blocks, 32, scores.ravel(), 40, parents.ravel(), values.ravel())
    for row in range(blocks):
        wanted = best_first_ref(scores[row])
        assert parents[row].tolist() == wanted[0] and values[row].tolist() == wanted[1]


def test_lanes_leave_a_loop_one_by_one_and_meet_again():
    x, out = np.arange(1, 301), np.zeros(300, "i4")
    counts = run("collatz", 3, 128, x, out)
    lengths = []
    for n in range(1, 301):
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        lengths.append(steps)
    assert out.tolist() == lengths
    assert counts.groups < 5 * max(lengths)


def test_votes_and_matches(rng):
    x, out = rng.integers(0, 20, 128).astype("u4"), np.zeros(128, "u4")
    run("votes", 2, 64, x, out)
    w = x.reshape(-1, 32).astype(int)
    same = w[:, :, None] == w[:, None, :]
    wanted = (w % 2 == 1).sum(1)[:, None] + 100 * same.sum(2) + 10000 * (w < 100).all(1)[:, None]
    wanted = wanted + 20000 * (w == 7).any(1)[:, None] + 100000 * (same.argmax(2) + 1)
    assert (out.reshape(-1, 32) == wanted).all()


def test_two_branches_shuffle_under_their_own_masks():
    x, out = np.arange(64, dtype="f4"), np.zeros(64, "f4")
    run("half_warps", 1, 64, x, out)
    assert out.reshape(2, 2, 16).tolist() == [[[3] * 16, [-20] * 16], [[35] * 16, [-52] * 16]]


def test_local_arrays(rng):
    x, out = rng.integers(0, 99, 512).astype("i4"), np.zeros(512, "i4")
    run("locals_sort", 2, 32, x, out)
    assert (out.reshape(-1, 8) == np.sort(x.reshape(-1, 8), axis=1)).all()


def test_a_spin_lock_gets_released():
    lock, out = np.zeros(1, "i4"), np.zeros(1, "i4")
    run("spin_lock", 8, 32, lock, out)
    value = 0
    for _ in range(8):
        value = value * 3 + 1
    assert out[0] == value and lock[0] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_transcendental_functions_are_close(rng):
    x, y, out = rng.uniform(-5, 5, 512).astype("f4"), rng.uniform(0.1, 10, 512).astype("f4"), np.zeros(512, "f4")
    x[3], y[4] = 1e6, np.inf  # the slow argument reduction of sin; a special case of pow
    run("maths", 2, 256, x, y, out)
    a, b = x.astype("f8"), y.astype("f8")
    np.testing.assert_allclose(
        out, np.exp(a) + np.log(b) + np.sin(a) + np.sqrt(b) + b**a, rtol=4e-6
    )  # 1 to 8 ulp each (CUDA)


def test_float64_functions_call_a_function_and_are_close(rng):
    x, y, out = rng.uniform(-5, 5, 512), rng.uniform(0.1, 10, 512), np.zeros(512)
    x[3] = -1e16  # the argument reduction of cos is a call
    counts = run("maths64", 2, 256, x, y, out)
    wanted = np.exp(x) + np.log(y) + np.cos(x) + np.sqrt(y) / np.tanh(y)
    np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)  # sums that cancel lose some of their 2^-52
    assert (
        load_ptx((KERNELS / "maths64.ptx").read_text()).approximations == ("ex2.approx.ftz.f32", "rcp.approx.ftz.f64")
        or counts
    )


def test_axpy_contracts_to_one_fma(rng):
    x, y, out = (rng.standard_normal(1000).astype("f4") for _ in range(3))
    run("axpy", 4, 256, 1.7, x, y, out)
    assert (out == (np.float64(np.float32(1.7)) * x.astype("f8") + y).astype("f4")).all()


def test_integer_kernels_match_python(rng):
    x, y = rng.integers(-(2**31), 2**31, 512).astype("i4"), rng.integers(1, 1000, 512).astype("i4")
    out = np.zeros(512, "i4")
    run("integers", 2, 256, x, y, out)
    for a, b, got in zip(x.tolist(), y.tolist(), out.tolist(), strict=True):
        clz, brev = 32 - (a % 2**32).bit_length(), int(f"{b % 2**32:032b}"[::-1], 2)
        wanted = a // b + a % b * 3 + (a >> 3) * (b << 2) + (a ^ b) - (a & b) * (a | b) + clz + brev
        assert got == (wanted + 2**31) % 2**32 - 2**31


def test_float_atomics_and_compare_and_swap_loops(rng):
    x, out = rng.standard_normal(64), np.zeros(3)
    run("float_atomics", 1, 64, x, out)
    assert out.tolist() == [sum(x.tolist()), max(0, x.max()), min(0.0, *np.cumsum(x)[:-1])]


def test_dynamic_shared_memory(rng):
    x, out = rng.standard_normal(128).astype("f4"), np.zeros(128, "f4")
    run("dynamic_shared", 2, 64, x, out, dynamic_shared=256)
    assert (out.reshape(2, 64) == x.reshape(2, 64)[:, ::-1]).all()
    with pytest.raises(PtxError, match="out of bounds"):
        run("dynamic_shared", 2, 64, x, out, dynamic_shared=252)


def test_constant_tables(rng):
    x, out = rng.integers(0, 8, 64).astype("i4"), np.zeros(64, "i4")
    run("constants", 1, 64, x, out)
    assert (out == np.array([3, 1, 4, 1, 5, 9, 2, 6])[x]).all()


def test_barriers_that_reduce(rng):
    x, out = rng.integers(0, 10, 256).astype("i4"), np.zeros(256, "i4")
    run("count_true", 4, 64, x, out)
    w = x.reshape(4, 64)
    wanted = (w > 3).sum(1) * 4 + (w > 0).all(1) * 2 + (w > 8).any(1)
    assert (out.reshape(4, 64) == wanted[:, None]).all()


def test_more_blocks_than_fit_at_once_run_in_turns():
    x, out = np.arange(300_000, dtype="f4"), np.zeros(300_000, "f4")
    run("axpy", 1172, 256, 2.0, x, x, out, count=False)
    assert (out == 3 * x).all()


# --- wrong kernels and their repaired twins -------------------------------------------------------------------------

WRONG = {
    "reverse_racy": ("race", 64, "tile[63 - t]"),
    "warp_racy": ("race", 32, "tile[31 - t]"),
    "bounds_wrong": ("out of bounds", 96, "x[i] + float32(1)"),
    "uninit_wrong": ("uninitialised read", 64, "tile[t]"),
    "barrier_wrong": ("divergent barrier", 64, "cuda.syncthreads()"),
    "mask_wrong": ("mask", 32, "shfl_xor_sync(0xFFFFFFFF"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named_with_its_thread_and_source_line(name):
    kind, threads, source = WRONG[name]
    x, out = np.arange(64, dtype="f4"), np.zeros(64, "f4")
    with pytest.raises(PtxError) as caught:
        run(name, 1, threads, x, out)
    error = caught.value
    assert error.kind == kind and error.thread is not None and error.block == (0, 0, 0)
    file, line = error.source.split(":")
    assert source in (Path(__file__).parent / file).read_text().splitlines()[int(line) - 1]
    text = (KERNELS / f"{name}.ptx").read_text().splitlines()
    assert str(error).split(": ")[1].split()[0] in text[error.ptx_line - 1]


@pytest.mark.parametrize("name", [name.rsplit("_", 1)[0] + "_fixed" for name in WRONG])
def test_the_repaired_twin_is_clean(name):
    threads = WRONG.get(name.replace("fixed", "racy"), WRONG.get(name.replace("fixed", "wrong")))[1]
    x, out = np.arange(64, dtype="f4"), np.zeros(64, "f4")
    run(name, 1, threads, x, out)
    assert out.any()


def test_wrong_kernels_run_on_without_check():
    x = np.arange(64, dtype="f4")
    for name in ("reverse_racy", "uninit_wrong", "barrier_wrong"):
        run(name, 1, 64, x, np.zeros(64, "f4"), check=False)


# --- lanes that wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("amount", [0, 1, 5, 31])
@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffles_follow_the_manual(mode, amount, width):
    """The pseudocode of shfl.sync in the PTX ISA, lane by lane."""
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = (
        f"add.u32 %r2, %t, 100; shfl.sync.{mode}.b32 %r3|%p1, %r2, {amount}, {clamp}, -1; "
        f"selp.u32 %r4, 1000, 0, %p1; add.u32 %r1, %r3, %r4;"
    )
    wanted = []
    for lane in range(32):
        segment, limit = clamp >> 8 & 31, clamp & 31
        top, bottom = lane & segment | limit & ~segment, lane & segment
        source = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount, "idx": bottom | amount & ~segment}[
            mode
        ]
        inside = source >= top if mode == "up" else source <= top
        wanted.append(100 + (source if inside else lane) + 1000 * inside)
    assert per_lane(body).tolist() == wanted
    in_branch = f"mov.u32 %r1, 0; setp.ge.u32 %p2, %t, 64; @%p2 bra over; {body} over:"
    assert per_lane(in_branch, 96).tolist() == [v + 32 * (i // 32) for i, v in enumerate(wanted * 2)] + [0] * 32


def test_lanes_with_one_mask_meet_from_different_branches():
    body = """setp.lt.u32 %p1, %t, 16; @%p1 bra low; add.u32 %r2, %t, 1000;
    shfl.sync.bfly.b32 %r1, %r2, 16, 31, -1; bra done;
    low: shfl.sync.bfly.b32 %r1, %t, 16, 31, -1; done:"""
    assert per_lane(body).tolist() == [1000 + 16 + i for i in range(16)] + list(range(16))


def test_ended_lanes_are_not_waited_for():
    body = "setp.ge.u32 %p1, %t, 20; @%p1 exit; vote.sync.ballot.b32 %r1, 1, -1;"
    assert (
        per_lane(
            body.replace("ballot.b32 %r1, 1", "ballot.b32 %r1, %p2").replace("vote", "setp.lt.u32 %p2, %t, 40; vote")
        ).tolist()
        == [0xFFFFF] * 20 + [0] * 12
    )


def test_waiting_lanes_go_on_when_the_others_end():
    body = """setp.lt.u32 %p1, %t, 16; @%p1 bra low; mov.u32 %r1, 3; vote.sync.ballot.b32 %r1, %p2, -1; bra done;
    low: bar.warp.sync 0xffff; exit; done: add.u32 %r1, %r1, 1;"""
    ballot = body.replace("mov.u32 %r1, 3;", "setp.lt.u32 %p2, %t, 40;")
    assert per_lane(ballot).tolist() == [0] * 16 + [0xFFFF0001] * 16


def test_the_predicate_of_a_shuffle_may_be_overwritten():
    """In some lanes, between two shuffles that both give it."""
    body = """mov.u32 %r2, 0; again: shfl.sync.up.b32 %r3|%p1, %t, 1, 0, -1; selp.u32 %r4, 1, 0, %p1;
    add.u32 %r1, %r1, %r4; setp.lt.u32 %p2, %t, 9;
    @!%p2 bra over; setp.eq.u32 %p1, %t, 99; over: selp.u32 %r4, 10, 0, %p1;
    add.u32 %r1, %r1, %r4; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 2; @%p3 bra again;"""
    wanted = [2 * (lane > 0) + 20 * (lane >= 9) for lane in range(32)]
    assert per_lane("mov.u32 %r1, 0;" + body).tolist() == wanted


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "setp.lt.u32 %p1, %t, 16; @%p1 bra low; vote.sync.any.pred %p2, %p1, 0xffff0000; "
            "vote.sync.any.pred %p2, %p1, -1; bra done; low: bar.sync 0; done:",
            "never come",
        ),
        ("vote.sync.any.pred %p2, %p1, 0xff;", "does not name the lane itself"),
        ("setp.lt.u32 %p1, %t, 16; selp.u32 %r2, 0xffff, -1, %p1; bar.warp.sync %r2; bar.sync 0;", "never come"),
        ("setp.ge.u32 %p1, %t, 20; @%p1 exit; shfl.sync.down.b32 %r1, %t, 4, 31, -1;", "has ended"),
    ],
)
def test_masks_that_do_not_fit_are_named(body, words):
    with pytest.raises(PtxError, match=words) as caught:
        launch(body)
    assert caught.value.kind == "mask" and caught.value.ptx_line


def test_a_value_from_outside_the_mask_is_an_error_or_poison():
    body = "mov.u32 %r1, 0; setp.ge.u32 %p1, %t, 16; @%p1 bra over; shfl.sync.down.b32 %r1, %t, 8, 31, 0xffff; over:"
    with pytest.raises(PtxError, match="does not name the lane it reads") as caught:
        per_lane(body)
    assert (caught.value.kind, caught.value.thread) == ("mask", (8, 0, 0))
    assert per_lane(body, check=False).tolist() == list(range(8, 16)) + [0xBAD0BAD0] * 8 + [0] * 16


def test_reductions_matches_and_elections():
    t = np.arange(32)
    assert (per_lane("redux.sync.add.u32 %r1, %t, -1;") == t.sum()).all()
    assert (per_lane("sub.u32 %r2, 5, %t; redux.sync.min.s32 %r1, %r2, -1;").view("i4") == -26).all()
    assert (per_lane("sub.u32 %r2, 5, %t; redux.sync.max.u32 %r1, %r2, -1;") == 2**32 - 1).all()
    assert (per_lane("shl.b32 %r2, 1, %t; redux.sync.or.b32 %r1, %r2, -1;") == 2**32 - 1).all()
    assert (per_lane("add.u32 %r2, %t, 8; redux.sync.and.b32 %r1, 7, -1;") == 7).all()
    assert (per_lane("redux.sync.xor.b32 %r1, %t, -1;") == np.bitwise_xor.reduce(t)).all()
    half = "mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 10; @!%p1 bra over; redux.sync.max.u32 %r1, %t, 0x3ff; over:"
    assert per_lane(half).tolist() == [9] * 10 + [0] * 22
    assert (per_lane("cvt.rn.f32.u32 %r2, %t; redux.sync.min.f32 %r1, %r2, -1;").view("f4") == 0).all()
    assert (per_lane("match.all.sync.b32 %r1|%p1, 7, -1;") == 2**32 - 1).all()
    assert (per_lane("match.all.sync.b32 %r1|%p1, %t, -1;") == 0).all()
    assert per_lane("and.b32 %r2, %t, 1; match.any.sync.b32 %r1, %r2, -1;").tolist() == [0x55555555, 0xAAAAAAAA] * 16
    assert per_lane("elect.sync %r2|%p1, -1; selp.u32 %r1, 5, %r2, %p1;").tolist() == [5] + [0] * 31
    assert (
        per_lane("setp.lt.u32 %p1, %t, 4; vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;").tolist()
        == [0] * 32
    )
    assert (
        per_lane("mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 4; @!%p1 bra over; activemask.b32 %r1; over:").tolist()
        == [15] * 4 + [0] * 28
    )


def test_barriers_wait_for_all_warps_and_divergence_in_a_warp_is_named():
    """Different warps may meet at different instructions; lanes of one warp may not."""
    by_warp = "setp.lt.u32 %p1, %t, 32; @%p1 bra low; bar.sync 0; bra done; low: bar.sync 0; done: mov.u32 %r1, 1;"
    assert (per_lane(by_warp, 64) == 1).all()
    with pytest.raises(PtxError, match="came together") as caught:
        per_lane(by_warp.replace("%t, 32", "%t, 16"), 64)
    assert caught.value.kind == "divergent barrier"
    assert (per_lane(by_warp.replace("%t, 32", "%t, 16").replace("bar.sync", "barrier.sync"), 64) == 1).all()


def test_threads_that_ended_are_not_waited_for_at_a_barrier():
    """On sm_70 and later exited threads do not count, whole warps or parts of one."""
    body = "mov.u32 %r1, 7; setp.ge.u32 %p1, %t, 40; @%p1 exit; bar.sync 0; mov.u32 %r1, 1;"
    assert per_lane(body, 96).tolist() == [1] * 40 + [0] * 56


def test_threads_that_wait_for_ever_are_named():
    with pytest.raises(PtxError, match="never come") as caught:
        launch("setp.lt.u32 %p1, %t, 32; @%p1 bra low; bar.sync 1; bra done; low: bar.sync 2; done:", block=64)
    assert caught.value.kind == "divergent barrier"


WAIT = """setp.ne.u32 %p1, %r9, PLACE; @%p1 bra set; wait: LOAD %r2, [%a]; setp.eq.u32 %p2, %r2, 0; bra next;
    next: add.u32 %r3, %r3, 1; @%p2 bra wait; bra done; set: ATOM [%a], 1; done:"""


@pytest.mark.parametrize("load", ["atom.global.add.u32 %r2, [%a], 0", "ld.volatile.global.u32 %r2, [%a]"])
def test_threads_that_poll_let_the_others_go_on(load):
    """The polling loop has the lower blocks, and a block without memory access in each turn."""
    body = WAIT.replace("LOAD %r2, [%a]", load).replace("ATOM", "red.global.or.b32").replace("PLACE", "0")
    out = np.zeros(32, "u4")
    launch("mov.u32 %r3, 0; mov.u32 %r9, %t;" + body, out, max_steps=1000)
    assert out[0] == 1


def test_a_launch_without_an_end_is_an_error():
    with pytest.raises(PtxError, match="no end after 500 steps") as caught:
        launch("again: add.u32 %r1, %r1, 1;\nbra again;", max_steps=500)
    assert caught.value.kind == "endless" and caught.value.ptx_line


def test_a_block_that_waits_for_one_that_runs_later_is_an_error():
    """Block 0 of 65 blocks of 1,024 threads waits for the last one, which runs when block 0 has ended."""
    body = WAIT.replace("LOAD", "ld.volatile.global.u32").replace("ATOM", "st.global.u32").replace("PLACE", "0")
    with pytest.raises(PtxError, match="a block wait for one that runs later") as caught:
        flag = "setp.ne.u32 %p4, %r9, 64; setp.ne.u32 %p5, %r9, 0; and.pred %p5, %p4, %p5; @%p5 exit;"
        launch("mov.u32 %r9, %ctaid.x;" + flag + body, np.zeros(1, "u4"), grid=65, block=1024, max_steps=300)
    assert caught.value.kind == "endless" and caught.value.block == (0, 0, 0)


def test_barrier_reductions_in_part_of_the_block():
    body = (
        "mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 64; @!%p1 bra over; setp.lt.u32 %p2, %t, 40; "
        "bar.red.popc.u32 %r1, 3, 64, !%p2; over:"
    )
    assert per_lane(body, 96).tolist() == [24] * 64 + [0] * 32


def test_a_trap_names_the_thread():
    with pytest.raises(PtxError) as caught:
        launch("setp.ne.u32 %p1, %t, 7; @%p1 bra fine; trap; fine:")
    assert caught.value.kind == "trap" and caught.value.thread == (7, 0, 0)


# --- control flow, functions, registers -----------------------------------------------------------------------------


def test_guards_protect_any_instruction():
    assert per_lane(
        "mov.u32 %r1, 1; setp.lt.u32 %p1, %t, 5; @%p1 add.u32 %r1, %r1, 10; @!%p1 mov.u32 %r1, %t;"
    ).tolist() == [11] * 5 + list(range(5, 32))


def test_jump_tables():
    body = """rem.u32 %r2, %t, 3; bra over; table: .branchtargets zero, one, two; over: brx.idx %r2, table;
    zero: mov.u32 %r1, 100; bra.uni done; one: mov.u32 %r1, 200; bra.uni done; two: mov.u32 %r1, 300; done:"""
    assert per_lane(body).tolist() == [100 * (i % 3 + 1) for i in range(32)]


FUNCTION = """.func (.param .b32 result) twice(.param .b32 value) { .reg .b32 %x;
    ld.param.b32 %x, [value]; add.u32 %x, %x, %x;
st.param.b32 [result], %x; ret; }
.func (.param .b32 result) four(.param .b32 value) { .reg .b32 %x; ld.param.b32 %x, [value]; { .param .b32 p;
    st.param.b32 [p], %x;
.param .b32 q; call.uni (q), twice, (p); ld.param.b32 %x, [q]; } { .param .b32 p; st.param.b32 [p], %x;
    .param .b32 q;
call (q), twice, (p); ld.param.b32 %x, [q]; } st.param.b32 [result], %x; ret; }
"""


def test_functions_call_functions_from_diverged_lanes():
    body = """setp.lt.u32 %p1, %t, 7; @%p1 bra other; { .param .b32 p; .param .b32 q;
    st.param.b32 [p], %t; call (q), four, (p);
    ld.param.b32 %r1, [q]; } bra done; other: { .param .b32 p; .param .b32 q; st.param.b32 [p], %t;
    call (q), twice, (p);
    ld.param.b32 %r1, [q]; } done:"""
    assert per_lane(body, declare=FUNCTION).tolist() == [i * (2 if i < 7 else 4) for i in range(32)]


SAME_NAMES = """.func (.param .align 16 .b8 r[16]) a(.param .b32 x) { .reg .b64 %d; mov.u64 %d, 7; st.param.b64 [r], %d;
    mov.u64 %d, 99; st.param.b64 [r+8], %d; ret; }
.func (.param .b64 r) b(.param .b32 y) { .reg .b64 %d; mov.u64 %d, 5; st.param.b64 [r], %d; ret; }
.func (.param .b32 q) c(.param .b32 x) { .reg .b32 %r; .local .align 4 .b8 l[4]; .reg .b64 %d; st.local.u32 [l], 8;
    { .param .b32 i; .param .align 16 .b8 o[16]; st.param.b32 [i], 1; call.uni (o), a, (i); ld.param.b64 %d, [o]; }
    ld.param.b32 %r, [x]; st.param.b32 [q], %r; ret; }
"""


def test_functions_may_use_one_name_for_different_variables():
    """Compilers call every result func_retval0; sizes and places are each function's own."""
    body = """.local .align 4 .b8 l[4]; st.local.u32 [l], 30; { .param .b32 x; .param .b32 r; st.param.b32 [x], %t;
    call.uni (r), c, (x); ld.param.b32 %r1, [r]; } ld.local.u32 %r2, [l]; add.u32 %r1, %r1, %r2;"""
    assert per_lane(body, declare=SAME_NAMES).tolist() == [30 + i for i in range(32)]


def test_entries_have_shared_memory_of_their_own():
    text = HEAD + "".join(
        f".entry {name}() {{ .shared .align 4 .b8 s[{size}]; st.shared.u32 [s+{at}], 1; ret; }}\n"
        for name, size, at in (("a", 4000, 3996), ("b", 100, 100))
    )
    program = load_ptx(text)
    assert {name: entry.static_shared for name, entry in program.entries.items()} == {"a": 4000, "b": 100}
    program.launch("a", 1, 1)
    with pytest.raises(PtxError, match="out of bounds"):
        program.launch("b", 1, 1)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (".func f() { call f; ret; }\n", "recursion"),
        (".extern .func g();\n.func f() { call g; ret; }\n", "call of g"),
    ],
)
def test_calls_that_cannot_be_made_are_refused(declare, words):
    with pytest.raises(PtxError, match=words) as caught:
        launch("call f;", declare=declare)
    assert caught.value.kind == "unsupported" and caught.value.ptx_line


def test_special_registers():
    names = [
        "tid.x",
        "tid.y",
        "tid.z",
        "ctaid.x",
        "ctaid.y",
        "ctaid.z",
        "ntid.x",
        "ntid.y",
        "nctaid.z",
        "laneid",
        "warpid",
        "lanemask_lt",
        "lanemask_ge",
        "nwarpid",
    ]
    out = np.zeros((12, 48, len(names)), "u4")
    body = (
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; "
        "mad.lo.u32 %r2, %r3, 3, %r2; mad.lo.u32 %r1, %r2, 2, %r1;"
    )
    body += (
        "mov.u32 %r4, %tid.y; mov.u32 %r5, %tid.z; mad.lo.u32 %r4, %r5, 3, %r4; "
        "mad.lo.u32 %r4, %r4, 8, %t; mad.lo.u32 %r1, %r1, 48, %r4;"
    )
    body += f"mad.wide.u32 %d1, %r1, {4 * len(names)}, %a;" + "".join(
        f"mov.u32 %r6, %{name}; st.global.u32 [%d1+{4 * i}], %r6;" for i, name in enumerate(names)
    )
    launch(body, out, grid=(2, 3, 2), block=(8, 3, 2))
    for block in range(12):
        for thread in range(48):
            lane = thread % 32
            assert out[block, thread].tolist() == [
                thread % 8,
                thread // 8 % 3,
                thread // 24,
                block % 2,
                block // 2 % 3,
                block // 6,
                8,
                3,
                2,
                lane,
                thread // 32,
                (1 << lane) - 1,
                2**32 - (1 << lane),
                2,
            ]


def test_registers_keep_their_own_values_when_lanes_part():
    """A mov shares nothing: writing one register in some lanes leaves its copy alone."""
    body = (
        "mov.u32 %r2, %t; mov.u32 %r1, %r2; setp.lt.u32 %p1, %t, 9; @!%p1 bra over; mov.u32 %r2, 77; "
        "over: add.u32 %r1, %r1, %r2;"
    )
    assert per_lane(body).tolist() == [i + (77 if i < 9 else i) for i in range(32)]


def test_float_nan_is_canonical_wherever_its_bits_are_seen():
    """0·∞ made by a float instruction is 0x7fffffff in an integer instruction, in memory and after a branch."""
    nan = "mov.b32 %r2, 0f7F800000; mul.f32 %r3, %r2, 0f00000000;"
    assert (per_lane(nan + "xor.b32 %r1, %r3, 0;") == 0x7FFFFFFF).all()
    assert (per_lane(nan + "mov.b32 %r1, %r3;") == 0x7FFFFFFF).all()
    assert (
        per_lane(nan + "setp.lt.u32 %p1, %t, 9; @%p1 bra over; add.u32 %r9, %t, 1; over: mov.b32 %r1, %r3;")
        == 0x7FFFFFFF
    ).all()


def test_packing_and_unpacking_of_vectors():
    body = (
        "mov.b64 %d2, {%t, 7}; mov.b64 {%r2, %r3}, %d2; mov.b64 {_, %r4}, %d2; "
        "mad.lo.u32 %r1, %r3, 100, %r2; add.u32 %r1, %r1, %r4;"
    )
    assert per_lane(body).tolist() == [707 + i for i in range(32)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 11), st.integers(1, 11)), min_size=1, max_size=10), st.integers(0, 2**32 - 1))
def test_any_control_flow_gives_what_each_lane_would_do_alone(edges, seed):
    """Random programs of conditional jumps: every lane is compared with a Python walk of its own."""
    body = "mov.u32 %r1, %t; mov.u32 %r2, 0;"
    n = len(edges)
    for i, (yes, no) in enumerate(edges):
        body += (
            f"L{i}: add.u32 %r2, %r2, 1; setp.gt.u32 %p1, %r2, 40; @%p1 bra L{n}; "
            f"mad.lo.u32 %r1, %r1, 5, {i + seed % 97};"
        )
        body += (
            f"and.b32 %r3, %r1, {1 << i % 5}; setp.ne.u32 %p2, %r3, 0; @%p2 bra L{yes % (n + 1)}; "
            f"bra.uni L{no % (n + 1)};"
        )
    got = per_lane(body + f"L{n}:").tolist()
    for lane in range(32):
        value, steps, at = lane, 0, 0
        while at < n:
            steps += 1
            if steps > 40:
                break
            value = (value * 5 + at + seed % 97) % 2**32
            at = edges[at][0 if value & 1 << at % 5 else 1] % (n + 1)
        assert got[lane] == value


def test_blocks_are_ordered_so_that_lanes_meet():
    """Arms come before the join, a loop's blocks before what follows, and several ways back to its head meet first."""
    function = parse(
        HEAD
        + """.entry k() { .reg .pred %p<3>;
    top: @%p1 bra out; @%p2 bra top; @%p1 bra arm; bra top; arm: bra top; out: ret; }"""
    ).functions["k"]
    blocks = control_flow(function)
    heads = [i for i, block in enumerate(blocks) if any(s <= i for s in block.successors)]
    assert len(heads) == 1 and not blocks[heads[0]].body and blocks[-1].end.opcode == "ret"


# --- counters -------------------------------------------------------------------------------------------------------


def test_counts_of_a_straight_kernel_are_exact():
    x, out = np.arange(64, dtype="f4"), np.zeros(64, "f4")
    counts = run("bounds_fixed", 1, 96, x, out)
    assert counts.warp_instructions == sum(counts.by_class.values())
    assert (counts.global_load_bytes, counts.global_store_bytes) == (256, 256)
    assert (counts.global_load_sectors, counts.global_store_sectors) == (8, 8)
    assert counts.branches == 3 and counts.divergent_branches == 0


def test_divergence_counts_each_part_of_a_warp():
    body = (
        "setp.lt.u32 %p1, %t, 40; @%p1 bra low; add.u32 %r1, %t, 1; add.u32 %r1, %r1, 1; bra done; "
        "low: mov.u32 %r1, 0; done: mov.u32 %r2, 0;"
    )
    counts = launch(body, block=96)
    assert (counts.branches, counts.divergent_branches) == (3, 1)
    # mov, setp, bra in 3 warps; two adds and a bra in warps 1 and 2; mov in warps 0 and 1; mov, ret in 3 warps
    assert counts.warp_instructions == 9 + 6 + 2 + 6
    assert counts.thread_instructions == 3 * 96 + 3 * 56 + 40 + 2 * 96


def test_counts_do_not_depend_on_checks():
    x, out = np.arange(512, dtype="f4"), np.zeros(2, "f4")
    assert run("block_sum", 2, 256, x, out) == run("block_sum", 2, 256, x, out, check=False)
    counts = run("block_sum", 2, 256, x, out, count=False)
    assert counts.global_load_sectors == 0 and counts.global_load_bytes == 2048


# --- what the caller may do wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "args", "words"),
    [
        (0, 32, 2, "grid is 0"),
        (1, 1025, 2, "at most 1024"),
        (1, (32, 64), 2, "at most 1024"),
        ((1, 1, 1, 1), 32, 2, "1 to 3"),
        (1, 32, 1, "takes 2 arguments, 1 were given"),
        (1, 32, 3, "takes 2 arguments, 3 were given"),
    ],
)
def test_launch_says_what_is_wrong_with_its_arguments(grid, block, args, words):
    program = load_ptx(HEAD + ".entry k(.param .u64 a, .param .u32 b) { ret; }")
    with pytest.raises(PtxError, match=words) as caught:
        program.launch("k", grid, block, [1] * args)
    assert caught.value.kind == "arguments"


def test_arguments_are_packed_by_the_parameters_type():
    text = (
        HEAD
        + """.entry k(.param .u64 out, .param .f32 x, .param .u8 y, .param .b64 z, .param .align 4 .b8 w[8]) {
    .reg .b64 %o, %z;
    .reg .b32 %x<4>;
    ld.param.u64 %o, [out]; ld.param.f32 %x0, [x]; ld.param.u8 %x1, [y]; ld.param.b64 %z, [z];
    ld.param.v2.b32 {%x2, %x3}, [w];
    st.global.f32 [%o], %x0; st.global.u32 [%o+4], %x1; st.global.b64 [%o+8], %z;
    st.global.v2.b32 [%o+16], {%x2, %x3}; ret; }"""
    )
    out, memory = np.zeros(6, "u4"), GlobalMemory()
    load_ptx(text).launch(None, 1, 1, [memory.bind(out), 1.5, -1, 2.5, bytes(range(8))], memory=memory)
    assert (
        out.view("f4")[0] == 1.5
        and out[1] == 255
        and out[2:4].view("f8")[0] == 2.5
        and out[4:].tobytes() == bytes(range(8))
    )
    with pytest.raises(PtxError, match="pass a number, or bytes"):
        load_ptx(text).launch(None, 1, 1, [out, 1.5, -1, 2.5, bytes(8)])
    with pytest.raises(PtxError, match="has 7 bytes, the kernel wants 8"):
        load_ptx(text).launch(None, 1, 1, [0, 1.5, -1, 2.5, bytes(7)])


def test_entries_say_what_a_launcher_needs():
    entry = load_ptx((KERNELS / "axpy.ptx").read_text()).entries["axpy"]
    assert [(p.type, p.size, p.offset) for p in entry.params[:3]] == [("f32", 4, 0), ("u64", 8, 8), ("u64", 8, 16)]
    assert load_ptx((KERNELS / "block_sum.ptx").read_text()).entries["block_sum"].static_shared == 128
    limited = load_ptx(HEAD + ".entry k() .maxntid 64, 1, 1 .minnctapersm 2 { ret; }")
    assert limited.entries["k"].max_threads == 64
    with pytest.raises(PtxError, match="at most 64 threads"):
        limited.launch("k", 1, 96)
    with pytest.raises(PtxError, match="no entry 'other'"):
        limited.launch("other", 1, 1)


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        (".version 9.5\n.entry k() {\n.reg .b32 %r<2>;\nadd.u32 %r0 %r1;\n}", "syntax", 4),
        (".entry k() {\n^", "syntax", 2),
        (".entry k() {\nbra nowhere;\n}", "syntax", 2),
        (".entry k() {\nret;", "syntax", 2),
        ("hello", "syntax", 1),
        (".entry k() {\n.reg .b128 %q;\nret; }", "unsupported", 2),
        (".entry k() {\n.reg .b32 %r<2>;\nld.shared.q8 %r0, [%r1];\nret; }", "unsupported", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nshfl.down.b32 %r0, %r1, 1, 31;\nret; }", "unsupported", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nld.weird.u32 %r0, [%r1];\nret; }", "unsupported", 3),
        (".entry k() {\n.reg .b32 %r<200000000>;\nret; }", "unsupported", 2),
        ("\n.global .b8 x[3000000000];", "unsupported", 2),
        ("\n.global .align 3 .b8 x[3];", "unsupported", 2),
        (".entry k() {\n.reg .b32 %r<2>;\nmov.u32 %r0, (3+4);\nret; }", "unsupported", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nmov.u32 %r0;\nret; }", "syntax", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nadd.u32 %r0, %r1;\nret; }", "syntax", 3),
        (".entry k() {\n.reg .b32 %r<2>;\natom.global.add.u32 %r0, [%r1], 1, 2;\nret; }", "syntax", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nmov.foo %r0, %r1;\nret; }", "unsupported", 3),
        (".entry k() {\n.reg .b32 %r<2>;\nbar.sync 16;\nret; }", "syntax", 3),
        (".entry k() {\nbra;\n}", "syntax", 2),
        (".entry k() {\n.reg .b32 %r;\nbrx.idx %r, nowhere;\n}", "syntax", 3),
        (".entry k() {\n.loc x y z\n}", "syntax", 3),
        (".entry k() {\n.local x[4];\n}", "syntax", 2),
        (".func f(.param .b32 x) { ret; }\n.entry k() {\ncall f, (y);\nret; }", "syntax", 3),
        (".const .b8 c[4];\n.entry k() {\nst.const.u32 [c], 1;\nret; }", "unsupported", 3),
    ],
)
def test_text_that_cannot_run_is_refused_with_its_line(text, kind, line):
    with pytest.raises(PtxError) as caught:
        load_ptx(text)
    assert (caught.value.kind, caught.value.ptx_line) == (kind, line)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("mov.u32 %r1, nowhere;", "syntax"),
        ("ld.global.u32 %r1, [nowhere+4];", "syntax"),
        ("@%nowhere bra over; over:", "syntax"),
        ("mov.b64 {%r1, %r2, %r3}, %d1;", "unsupported"),
        ("ld.param.u64 %d1, [pa+4];", "out of bounds"),
    ],
)
def test_code_that_cannot_be_made_is_refused_with_its_line(body, kind):
    with pytest.raises(PtxError) as caught:
        launch("\n" + body, np.zeros(32, "u4"))
    assert caught.value.kind == kind and caught.value.ptx_line == 11


@pytest.mark.parametrize(("literal", "value"), [("017", 15), ("0b101", 5), ("0x1F", 31), ("0", 0), ("19U", 19)])
def test_integer_literals(literal, value):
    assert (per_lane(f"mov.u32 %r1, {literal};") == value).all()


def test_machines_of_earlier_blocks_are_given_up(monkeypatch):
    alive = []
    tally = Machine.tally

    def counted(self):
        assert not [each for each in alive if each() is not None]
        alive.append(weakref.ref(self))
        return tally(self)

    monkeypatch.setattr(Machine, "tally", counted)
    launch("mov.u32 %r1, 1;", grid=200, block=1024)
    assert len(alive) == 4


def test_the_same_text_is_the_same_program():
    text = (KERNELS / "axpy.ptx").read_text()
    assert load_ptx(text) is load_ptx(text)


@pytest.mark.parametrize(
    "names",
    [
        "MAX_STEPS Tally Shape Step PtxProgram load_ptx Launch Machine pack_parameters launch Counters counters",
        "Value BlockCoder ValueCoder OperandCoder InstructionCoder MemoryCoder BlockCode reuse_names",
        "Scheduler Waiting WarpExchange SyncUnit BarrierRelease BarrierUnit Flow GlobalMemory PtxError",
    ],
)
def test_the_machines_parts_can_be_had_from_the_family_by_name(names):
    for name in names.split():
        assert getattr(ddtree.ptx, name) is not None and name in ddtree.ptx.__all__
