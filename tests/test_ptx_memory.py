"""Memory of the PTX machine: bounds, alignment, spaces, atomics in order, sectors, banks and races."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.ptx import GlobalMemory, PtxError, load_ptx

HEAD = ".version 9.5\n.target sm_120\n.address_size 64\n"


def kernel(body, params="a", shared=0, more=""):
    """A kernel `k` with 64-bit parameters in %a, %b, ..., the thread number in %t and its 64-bit form in %w."""
    text = HEAD + more + (f".shared .align 16 .b8 tile[{shared}];\n" if shared else "")
    text += ".visible .entry k(" + ", ".join(f".param .u64 p{name}" for name in params) + ") {\n"
    text += ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<20>;\n"
    text += "".join(f".reg .b64 %{name};\nld.param.u64 %{name}, [p{name}];\n" for name in params)
    text += ".reg .b32 %t;\n.reg .b64 %w;\nmov.u32 %t, %tid.x;\ncvt.u64.u32 %w, %t;\n"
    return text + body + "\nret;\n}\n"


def launch(text, *arrays, grid=1, block=32, **options):
    """Run `k` on bound arrays (numbers go in as they are)."""
    memory = GlobalMemory()
    bound = [memory.bind(a) if isinstance(a, np.ndarray) else a for a in arrays]
    return load_ptx(text).launch("k", grid, block, bound, memory=memory, **options).counters


def failure(text, *arrays, **options):
    """The PtxError of a launch."""
    with pytest.raises(PtxError) as caught:
        launch(text, *arrays, **options)
    return caught.value


COPY = "mad.lo.u64 %d1, %w, 4, %a; mad.lo.u64 %d2, %w, 4, %b; ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;"


def test_stores_land_in_the_bound_array_without_a_copy():
    x, y = np.arange(32, dtype="u4"), np.zeros(32, "u4")
    launch(kernel(COPY, "ab"), x, y)
    assert (y == x).all()


@pytest.mark.parametrize(("size", "offset", "first"), [(31, 0, 31), (32, 4, 31), (0, 0, 0), (32, -4, 0)])
def test_the_first_lane_out_of_bounds_is_named(size, offset, first):
    x, y = np.arange(size, dtype="u4"), np.zeros(32, "u4")
    error = failure(kernel(COPY.replace("[%d1]", f"[%d1+{offset}]"), "ab"), x, y)
    assert (error.kind, error.thread, error.block) == ("out of bounds", (first, 0, 0), (0, 0, 0))
    assert (
        f"at byte {4 * first + offset} of the array bound there, which has {4 * size}" in str(error) and error.ptx_line
    )


def test_bounds_are_checked_without_check():
    assert (
        failure(kernel(COPY, "ab"), np.arange(31, dtype="u4"), np.zeros(32, "u4"), check=False).kind == "out of bounds"
    )


@pytest.mark.parametrize("address", [0, 8, 1 << 40, (1 << 64) - 8, 1 << 56, (1 << 57) + 64])
def test_an_address_that_nobody_bound_is_out_of_bounds(address):
    error = failure(kernel("ld.u64 %d1, [%a];", "a"), address)
    assert error.kind == "out of bounds" and error.thread == (0, 0, 0)


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.global.u32 %r1, [%a+2];",
        "ld.global.u64 %d1, [%a+4];",
        "st.global.u16 [%a+1], %h1;",
        "ld.global.v2.u32 {%r1, %r2}, [%a+4];",
        "ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%a+8];",
    ],
)
def test_misaligned_access_is_refused(instruction):
    error = failure(kernel(instruction), np.zeros(64, "u1"))
    assert error.kind == "misaligned" and "multiple of" in str(error)


def test_a_read_only_array_refuses_stores_and_atomics():
    for body in ("st.global.u32 [%a], 1;", "red.global.add.u32 [%a], 1;"):
        x = np.zeros(4, "u4")
        x.flags.writeable = False
        assert failure(kernel(body), x).kind == "read-only"
    assert launch(kernel("ld.global.u32 %r1, [%a];"), x).global_load_bytes == 128


def test_bind_refuses_what_is_not_a_plain_array():
    for given_ in ([1, 2], np.zeros((4, 4))[:, 1], np.array([None])):
        with pytest.raises(PtxError, match="C-contiguous numpy array"):
            GlobalMemory().bind(given_)


def test_a_released_array_is_gone():
    memory = GlobalMemory()
    address = memory.bind(np.zeros(4, "u4"))
    memory.release(address)
    with pytest.raises(PtxError, match="out of bounds"):
        load_ptx(kernel("ld.global.u32 %r1, [%a];")).launch("k", 1, 1, [address], memory=memory)
    with pytest.raises(PtxError, match="nothing is bound"):
        memory.release(address)


def test_reading_bytes_nobody_wrote_is_an_error_until_somebody_writes():
    text = kernel("mad.lo.u64 %d1, %w, 8, %a; ld.global.u32 %r1, [%d1];")
    memory = GlobalMemory()
    address = memory.bind(np.empty(64, "u4"), initialised=False)
    with pytest.raises(PtxError, match="uninitialised read"):
        load_ptx(text).launch("k", 1, 32, [address], memory=memory)
    load_ptx(text).launch("k", 1, 32, [address], memory=memory, check=False)
    load_ptx(kernel("mad.lo.u64 %d1, %w, 8, %a; st.global.u32 [%d1], 5;")).launch("k", 1, 32, [address], memory=memory)
    load_ptx(text).launch("k", 1, 32, [address], memory=memory)


def test_partly_written_words_are_still_uninitialised():
    body = "mul.lo.u32 %r1, %t, 4; st.shared.u16 [%r1], 1; ld.shared.u32 %r2, [%r1];"
    assert failure(kernel(body, "", 128)).kind == "uninitialised read"
    launch(kernel(body.replace("ld.", "st.shared.u16 [%r1+2], 1; ld."), "", 128))


@pytest.mark.parametrize("space", ["shared", "local"])
def test_shared_and_local_memory_start_uninitialised_and_bounded(space):
    more = f".{space} .align 4 .b8 cell[4];" if space == "shared" else ""
    inside = ".local .align 4 .b8 cell[4];\n" if space == "local" else ""
    assert failure(kernel(inside + f"ld.{space}.u32 %r1, [cell];", "", more=more), block=1).kind == "uninitialised read"
    error = failure(kernel(inside + f"ld.{space}.u32 %r1, [cell+4];", "", more=more), block=1)
    assert error.kind == "out of bounds" and space in str(error)


def test_signed_and_short_loads_extend_and_stores_cut():
    x = np.array([0x80, 0xFF, 0x7F, 0x01], "u1")
    out = np.zeros(6, "u8")
    launch(
        kernel(
            "ld.global.s8 %r1, [%a]; ld.global.u8 %r2, [%a]; ld.global.s16 %d1, [%a]; ld.global.u16 %d2, [%a];"
            "cvt.s64.s32 %d3, %r1; cvt.u64.u32 %d4, %r2; st.global.u64 [%b], %d3; st.global.u64 [%b+8], %d4;"
            "st.global.u64 [%b+16], %d1; st.global.u64 [%b+24], %d2; mov.u32 %r3, 0x12345678;"
            "st.global.u8 [%b+32], %r3; st.global.u16 [%b+40], %r3;",
            "ab",
        ),
        x,
        out,
        block=1,
    )
    assert out.tolist() == [2**64 - 128, 128, 2**64 - 128, 0xFF80, 0x78, 0x5678]


def test_vectors_load_and_store_neighbours():
    x, y = np.arange(128, dtype="u4"), np.zeros(128, "u4")
    body = "mad.lo.u64 %d1, %w, 16, %a; mad.lo.u64 %d2, %w, 16, %b; ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];"
    counts = launch(
        kernel(body + "st.global.v2.u32 [%d2], {%r4, %r3}; st.global.v2.b32 [%d2+8], {%r2, %r1};", "ab"), x, y
    )
    assert (y.reshape(-1, 4) == x.reshape(-1, 4)[:, ::-1]).all()
    assert (counts.global_load_bytes, counts.global_load_sectors) == (512, 16)


def test_generic_addresses_reach_every_space_even_in_one_instruction():
    body = """.local .align 4 .b8 mine[4];
    mov.u64 %d1, tile; cvta.shared.u64 %d1, %d1; mad.lo.u64 %d1, %w, 4, %d1; mov.u64 %d2, mine;
    cvta.local.u64 %d2, %d2;
    mad.lo.u64 %d3, %w, 4, %a; st.u32 [%d1], %t; st.u32 [%d2], 7; bar.warp.sync -1;
    rem.u32 %r1, %t, 3; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1; selp.u64 %d4, %d1, %d2, %p1;
    selp.u64 %d4, %d3, %d4, %p2;
    ld.u32 %r2, [%d4]; isspacep.shared %p3, %d4; selp.u32 %r3, 1000, 0, %p3; add.u32 %r2, %r2, %r3;
    mad.lo.u64 %d5, %w, 4, %b; st.u32 [%d5], %r2;"""
    x, y = np.arange(100, 132, dtype="u4"), np.zeros(32, "u4")
    launch(kernel(body, "ab", 128), x, y)
    t = np.arange(32)
    assert (y == np.where(t % 3 == 0, 1000 + t, np.where(t % 3 == 1, 100 + t, 7))).all()


def test_lanes_may_point_into_different_arrays():
    x, y, out = np.arange(32, dtype="u4"), np.arange(100, 132, dtype="u4"), np.zeros(32, "u4")
    body = """and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 0; selp.u64 %d1, %a, %b, %p1;
    mad.lo.u64 %d1, %w, 4, %d1;
    ld.global.u32 %r2, [%d1]; add.u32 %r3, %r2, 1; st.global.u32 [%d1], %r3; mad.lo.u64 %d2, %w, 4, %c;
    st.global.u32 [%d2], %r2;"""
    launch(kernel(body, "abc"), x, y, out)
    t = np.arange(32)
    assert (out == np.where(t % 2 == 0, t, 100 + t)).all() and (x == t + (t % 2 == 0)).all()
    y = np.zeros(3, "u4")
    error = failure(kernel(body, "abc"), x, y, out)
    assert (error.kind, error.thread) == ("out of bounds", (3, 0, 0))


def test_module_variables_start_from_their_initial_bytes_at_each_launch():
    more = ".global .align 4 .u32 counter = 41;\n.const .align 4 .b8 table[8] = {1, 2, 3, 4, 255};\n"
    text = kernel(
        "mov.u64 %d1, counter; atom.global.add.u32 %r1, [%d1], 1; st.global.u32 [%a], %r1; ld.const.u32 %r2, [table];"
        "st.global.u32 [%a+4], %r2; ld.const.u32 %r2, [table+4]; st.global.u32 [%a+8], %r2;",
        more=more,
    )
    for _ in range(2):
        out = np.zeros(3, "u4")
        launch(text, out, block=1)
        assert out.tolist() == [41, 0x04030201, 255]


def in_turn(operation, memory, places, values, others, dtype):
    """Atomics one lane after the other, on Python numbers."""
    top = 1 << 8 * np.dtype(dtype).itemsize
    memory, old = memory.tolist(), []
    for place, value, other in zip(places, values.tolist(), others.tolist(), strict=True):
        was = memory[place]
        old.append(was)
        new = {
            "add": lambda a, b: a + b,
            "min": min,
            "max": max,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "exch": lambda a, b: b,
            "inc": lambda a, b: 0 if a >= b else a + 1,
            "dec": lambda a, b: b if a == 0 or a > b else a - 1,
            "cas": lambda a, b, c=other: c if a == b else a,
        }[operation](was, value)
        if dtype[0] != "f":
            new %= top
            new -= top if dtype[0] == "i" and new >= top // 2 else 0
        memory[place] = new if dtype != "f4" else float(np.float32(new))
    return memory, old


ATOMICS = [
    (op, kind)
    for kind in ("u32", "s32", "u64", "s64", "b32", "b64", "f32", "f64")
    for op in (
        {
            "u": ["add", "min", "max", "inc", "dec"],
            "s": ["add", "min", "max"],
            "b": ["and", "or", "xor", "exch", "cas"],
            "f": ["add"],
        }[kind[0]]
    )
    if not (op in ("inc", "dec") and kind == "u64")
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("operation", "kind"), ATOMICS)
def test_atomics_happen_in_lane_order(operation, kind, space):
    dtype = {"u": "u", "s": "i", "b": "u", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8)
    rng = np.random.default_rng(3)
    n, size = 96, int(kind[1:]) // 8
    memory = rng.integers(0, 9, 4).astype(dtype)
    places, values, others = (
        rng.integers(0, 4, n).astype("u8"),
        rng.integers(0, 9, n).astype(dtype),
        rng.integers(0, 9, n).astype(dtype),
    )
    if kind[0] == "f":
        values = rng.standard_normal(n).astype(dtype)
    old = np.zeros(n, dtype)
    r = "%d" if size == 8 else "%r"
    load = (
        f"mad.lo.u64 %d1, %w, 8, %b; ld.global.u64 %d1, [%d1]; mad.lo.u64 %d2, %w, {size}, %c; "
        f"ld.global.b{8 * size} {r}3, [%d2];"
    )
    load += (
        f"mad.lo.u64 %d4, %w, {size}, %d; ld.global.b{8 * size} {r}5, [%d4]; "
        f"mad.lo.u64 %d9, %w, {size}, %e; mul.lo.u64 %d1, %d1, {size};"
    )
    swap = f", {r}5" if operation == "cas" else ""
    if space == "global":
        body = load + f"add.u64 %d1, %d1, %a; atom.global.{operation}.{kind} {r}6, [%d1], {r}3{swap};"
    else:
        copy = (
            f"setp.gt.u32 %p1, %t, 3; @%p1 bra skip; mad.lo.u64 %d10, %w, {size}, %a; cvt.u32.u64 %r10, %w; "
            f"mul.lo.u32 %r10, %r10, {size};"
        )
        into = f"ld.global.b{8 * size} {r}11, [%d10]; st.shared.b{8 * size} [%r10], {r}11; skip: bar.sync 0;"
        back = (
            f"bar.sync 0; @%p1 bra over; ld.shared.b{8 * size} {r}11, [%r10]; "
            f"st.global.b{8 * size} [%d10], {r}11; over:"
        )
        body = copy + into + load + f"atom.shared.{operation}.{kind} {r}6, [%d1], {r}3{swap};" + back
    body += f"st.global.b{8 * size} [%d9], {r}6;"
    wanted, wanted_old = in_turn(operation, memory, places.tolist(), values, others, dtype)
    launch(kernel(body, "abcde", 64 if space == "shared" else 0), memory, places, values, others, old, block=n)
    assert memory.tolist() == wanted
    assert old.tolist() == wanted_old


def test_red_and_an_atom_whose_result_is_unused_do_the_same_as_atom():
    for body in (
        "red.global.add.f32 [%a], %r1;",
        "atom.global.add.f32 %r2, [%a], %r1;",
        "atom.global.add.f32 _, [%a], %r1;",
    ):
        total, x = np.zeros(1, "f4"), np.random.default_rng(0).standard_normal(64).astype("f4")
        counts = launch(kernel("mad.lo.u64 %d1, %w, 4, %b; ld.global.f32 %r1, [%d1];" + body, "ab"), total, x, block=64)
        expected = np.float32(0)
        for value in x:
            expected = np.float32(expected + value)
        assert total[0] == expected and counts.atomics == 64


@given(st.lists(st.integers(0, 255), min_size=32, max_size=32), st.sampled_from([4, 8, 16]))
def test_sectors_and_bank_passes_match_a_count_by_hand(index, size):
    """Sectors are distinct address // 32 in a warp; passes are the most words any bank has to give, part by part."""
    x, where = np.zeros(256 * size, "u1"), np.array(index, "u8")
    vector = {4: ".u32 %r1", 8: ".u64 %d5", 16: ".v2.u64 {%d5, %d6}"}[size]
    body = (
        f"mad.lo.u64 %d1, %w, 8, %b; ld.global.u64 %d1, [%d1]; mul.lo.u64 %d1, %d1, {size}; "
        f"add.u64 %d2, %d1, %a; ld.global{vector}, [%d2];"
    )
    counts = launch(kernel(body + f"ld.shared{vector}, [%d1];", "ab", 4096), x, where, check=False)
    assert counts.global_load_sectors - 8 == len({i * size // 32 for i in index})
    passes = parts = 0
    for start in range(0, 32, 128 // size):
        words = {i * size // 4 + k for i in index[start : start + 128 // size] for k in range(size // 4)}
        passes += max(sum(word % 32 == bank for word in words) for bank in range(32))
        parts += 1
    assert (counts.shared_wavefronts, counts.shared_bank_conflicts) == (passes, passes - parts)


RACES = {
    "a write seen by another warp": ("st.shared.u32 [%r1], %t; ld.shared.u32 %r3, [%r2];", True),
    "a barrier between": ("st.shared.u32 [%r1], %t; bar.sync 0; ld.shared.u32 %r3, [%r2];", False),
    "a warp barrier is not enough across warps": (
        "st.shared.u32 [%r1], %t; bar.warp.sync -1; ld.shared.u32 %r3, [%r2];",
        True,
    ),
    "a read, then a write": (
        "st.shared.u32 [%r1], %t; bar.sync 0; ld.shared.u32 %r3, [%r2]; st.shared.u32 [%r1], 1;",
        True,
    ),
    "a read, a barrier, then a write": (
        ("st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r3, [%r2]; bar.sync 0; st.shared.u32 [%r1], 1;"),
        False,
    ),
    "a vote does not order memory": (
        "st.shared.u32 [%r1], %t; vote.sync.any.pred %p1, %p2, -1; ld.shared.u32 %r3, [%r2];",
        True,
    ),
    "atomics do not race with each other": (
        "st.shared.u32 [%r1], 1; bar.sync 0; atom.shared.add.u32 %r3, [0], 1; red.shared.add.u32 [0], 1;",
        False,
    ),
    "one of many readers writes": (
        "st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r3, [0]; @%p2 bra over; st.shared.u32 [0], 5; over:",
        True,
    ),
    "the last of many readers writes": (
        "st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r3, [0]; setp.ne.u32 %p3, %t, 63; @%p3 bra over; "
        "st.shared.u32 [0], 5; over:",
        True,
    ),
    "an atomic races with a read": (
        "st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r3, [0]; red.shared.add.u32 [0], 1;",
        True,
    ),
    "a read races with an atomic before": (
        "st.shared.u32 [%r1], 1; bar.sync 0; red.shared.add.u32 [0], 1; ld.shared.u32 %r3, [0];",
        True,
    ),
    "two warps write one place at once": ("st.shared.u32 [0], 1;", True),
    "everybody reads one place": (
        "st.shared.u32 [%r1], 1; bar.sync 0; ld.shared.u32 %r3, [0]; ld.shared.u32 %r3, [0];",
        False,
    ),
    "neighbouring bytes are not one place": ("st.shared.u8 [%t], %t; ld.shared.u8 %r3, [%t];", False),
}


@pytest.mark.parametrize("name", RACES)
def test_races_between_warps(name):
    body, races = RACES[name]
    text = kernel("shl.b32 %r1, %t, 2; sub.u32 %r2, 252, %r1; setp.ne.u32 %p2, %t, 0; mov.u32 %r9, 0;" + body, "", 256)
    if races:
        error = failure(text, block=64)
        assert (
            error.kind == "race" and error.thread is not None and "no barrier between" in str(error)
        ) or "same step" in str(error)
        launch(text, block=64, check=False)
    else:
        launch(text, block=64)


WARP_RACES = {
    "no syncwarp": ("st.shared.u32 [%r1], %t; ld.shared.u32 %r3, [%r2];", True),
    "syncwarp": ("st.shared.u32 [%r1], %t; bar.warp.sync -1; ld.shared.u32 %r3, [%r2];", False),
    "a shuffle does not order memory": (
        "st.shared.u32 [%r1], %t; shfl.sync.idx.b32 %r4, %t, 0, 31, -1; ld.shared.u32 %r3, [%r2];",
        True,
    ),
    "one instruction, one place, one value": ("st.shared.u32 [0], 1;", False),
    "one instruction, one place, many values": ("st.shared.u32 [0], %t;", True),
    "masks that cover who exchanges": ("st.shared.u32 [%r1], %t; bar.warp.sync %r5; ld.shared.u32 %r3, [%r6];", False),
    "masks that do not": ("st.shared.u32 [%r1], %t; bar.warp.sync %r5; ld.shared.u32 %r3, [%r2];", True),
    "masks that pass it on": (
        "st.shared.u32 [%r1], %t; bar.warp.sync %r5; bar.warp.sync %r7; ld.shared.u32 %r3, [%r2];",
        False,
    ),
}


@pytest.mark.parametrize("name", WARP_RACES)
def test_races_within_a_warp(name):
    """%r5 names the lane's half, %r6 is a neighbour in the half, %r7 names the lane and its mirror image."""
    body, races = WARP_RACES[name]
    before = """shl.b32 %r1, %t, 2; sub.u32 %r2, 124, %r1; xor.b32 %r6, %r1, 4; setp.lt.u32 %p1, %t, 16;
    selp.u32 %r5, 0xffff, 0xffff0000, %p1;
    sub.u32 %r8, 31, %t; shl.b32 %r7, 1, %r8; shl.b32 %r9, 1, %t; or.b32 %r7, %r7, %r9;"""
    text = kernel(before + body, "", 128)
    if races:
        assert failure(text).kind == "race"
    else:
        launch(text)


def test_named_barriers_order_only_the_warps_that_meet():
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2;
    reading the partner is fine, the other pair a race."""
    body = """shl.b32 %r1, %t, 2; shr.u32 %r2, %t, 6; add.u32 %r2, %r2, 1; st.shared.u32 [%r1], %t; bar.sync %r2, 64;
    xor.b32 %r3, %r1, DISTANCE; ld.shared.u32 %r4, [%r3];"""
    launch(kernel(body.replace("DISTANCE", "128"), "", 512), block=128)
    assert failure(kernel(body.replace("DISTANCE", "256"), "", 512), block=128).kind == "race"


def test_producers_arrive_and_consumers_wait():
    """Warp 0 writes and arrives, warp 1 waits and reads; the other way round nothing is ordered."""
    body = """setp.ge.u32 %p1, %t, 32; shl.b32 %r1, %t, 2; @%p1 bra read; st.shared.u32 [%r1], %t;
    bar.arrive 1, 64; bra done;
    read: bar.sync 1, 64; ld.shared.u32 %r2, [%r1+-128]; WRONG mad.lo.u64 %d1, %w, 4, %a;
    st.global.u32 [%d1+-128], %r2; done:"""
    out = np.zeros(32, "u4")
    launch(kernel(body.replace("WRONG", ""), "a", 128), out, block=64)
    assert (out == np.arange(32)).all()
    late = """setp.ge.u32 %p1, %t, 32; shl.b32 %r1, %t, 2; st.shared.u32 [%r1], %t; bar.sync 0; @%p1 bra wait;
    bar.arrive 1, 64; ld.shared.u32 %r2, [%r1+128]; bra done; wait: bar.sync 1, 64; st.shared.u32 [%r1], 1; done:"""
    assert failure(kernel(late, "", 256), block=64).kind == "race"


@pytest.mark.parametrize(("space", "wanted"), [("global", 0), ("shared", 6)])
def test_float_atomics_flush_subnormals_in_global_memory_only(space, wanted):
    """3 + 3 in subnormal bits is 0 on an H200 in global memory; shared memory keeps subnormals (PTX ISA, atom)."""
    for old, value, result in ((3, 3, wanted), (0x00800001, 0x80800000, 1 if wanted else 0)):
        x, out = np.array([old], "u4"), np.zeros(2, "u4")
        for opcode in ("red.{}.add.f32 [%d1], %r1;", "atom.{}.add.f32 %r2, [%d1], %r1;"):
            place = "mov.u64 %d1, tile; st.shared.u32 [tile], %r3;" if space == "shared" else "mov.u64 %d1, %b;"
            store = f"ld.{space}.u32 %r4, [%d1]; st.global.u32 [%c], %r4;"
            body = f"ld.global.u32 %r3, [%a]; mov.u32 %r1, {value}; st.global.u32 [%b], %r3; {place}"
            launch(kernel(body + opcode.format(space) + store, "abc", 16), x, np.zeros(1, "u4"), out, block=1)
            assert out[0] == result


def test_float_atomics_on_one_place_flush_on_the_way():
    """2^-126 − 1.5·2^-126 is flushed before the next lane adds."""
    body = "mad.lo.u64 %d1, %w, 4, %b; ld.global.f32 %r1, [%d1]; red.global.add.f32 [%a], %r1;"
    x, y = np.array([2.0**-126], "f4"), np.array([-1.5 * 2.0**-126, 2.0**-126], "f4")
    launch(kernel(body, "ab"), x, y, block=2)
    assert x[0] == np.float32(2.0**-126)


@pytest.mark.parametrize("after", ["ld.shared.u32 %r2, [tile];", "st.shared.u32 [tile], 5;"])
@pytest.mark.parametrize("reader", [0, 32, 95])
def test_all_warps_that_did_an_atomic_are_remembered(after, reader):
    """Three warps add, then one of them reads or writes without a barrier."""
    body = "st.shared.u32 [tile], 0; bar.sync 0; atom.shared.add.u32 %r1, [tile], 1; {} setp.ne.u32 %p1, %t, {}; "
    body = body.replace("st.shared.u32 [tile], 0;", "setp.ne.u32 %p2, %t, 0; @!%p2 st.shared.u32 [tile], 0;")
    text = kernel(body.format("", reader) + f"@%p1 bra over; {after} over:", "", 16)
    assert failure(text, block=96).kind == "race"
    launch(kernel(body.format("bar.sync 0;", reader) + f"@%p1 bra over; {after} over:", "", 16), block=96)


def test_constant_memory_is_read_only_by_generic_addresses_too():
    body = "mov.u64 %d1, table; st.global.u32 [%d1], 1;"
    assert failure(kernel(body, "", more=".const .align 4 .b8 table[4];\n")).kind == "read-only"
