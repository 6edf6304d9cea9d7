"""Matrices and asynchronous copies on the PTX machine: numpy's bits, every hazard named, nothing right flagged."""

import numpy as np
import pytest

import ddtree.ptx.fragments
from ddtree import mma
from ddtree.cuda import PtxDevice
from ddtree.ptx import GlobalMemory, PtxError, load_ptx
from ddtree.ptx.fragments import from_registers, places, to_registers
from ddtree.tensor_cores import mma_ref
from tools import gpu_tiles

HEAD = ".version 9.5\n.target sm_120\n.address_size 64\n"
MACHINE = PtxDevice()


def launch(body, *arrays, grid=1, block=32, shared=1024, **options):
    """Run PTX statements with %a, %b, ... bound to arrays, %t the thread, %w its warp, and `s` the shared bytes."""
    names = "abcd"[: len(arrays)]
    text = f"{HEAD}.visible .entry k(" + ", ".join(f".param .u64 p{name}" for name in names) + ") {\n"
    text += f".shared .align 16 .b8 s[{shared}];\n.reg .pred %p<9>; .reg .b32 %r<40>, %t, %w, %s; .reg .b64 %d<20>;\n"
    text += "".join(f".reg .b64 %{name};\nld.param.u64 %{name}, [p{name}];\n" for name in names)
    text += "mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; mov.u32 %s, s;\n" + body + "\nret;\n}\n"
    memory = GlobalMemory()
    bound = [memory.bind(a) for a in arrays]
    return load_ptx(text).launch("k", grid, block, bound, memory=memory, **options).counters


def failure(body, *arrays, **options):
    with pytest.raises(PtxError) as caught:
        launch(body, *arrays, **options)
    return caught.value


# --- what a GPU must do, too ----------------------------------------------------------------------------------------


def test_the_recorded_inputs_give_the_recorded_bits():
    assert sum(gpu_tiles.check_recorded(MACHINE).values()) == 26_624


def test_fresh_products_have_numpys_bits():
    assert len(gpu_tiles.check_products(MACHINE, 32)) == 8


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("k", [64, 128, 640])
def test_a_right_pipeline_is_never_flagged_and_has_numpys_bits(stages, k):
    found, expected = gpu_tiles.run_pipeline(MACHINE, stages, k)
    np.testing.assert_array_equal(found.view("u4"), expected.view("u4"))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [("early", "still fills"), ("unsynced", "no barrier"), ("eager", "no barrier"), ("source", "still reads")],
)
def test_a_wrong_pipeline_is_named(stages, wrong, words):
    with pytest.raises(PtxError, match=f"race: .*cp.async.*{words}") as caught:
        gpu_tiles.run_pipeline(MACHINE, stages, 640, wrong)
    assert caught.value.source.startswith("gpu_tiles.py:")


def test_copies_of_every_size_and_length():
    assert set(gpu_tiles.check_copies(MACHINE).values()) == {"equal"}


def test_matrix_loads_deal_out_the_rows_that_lanes_point_to():
    rng = np.random.default_rng(3)
    tile, rows = rng.integers(0, 1 << 16, 512).astype("u2"), rng.permutation(64)[:32]
    found = gpu_tiles.load_matrices(MACHINE)
    for name, (_, count) in gpu_tiles.LOADS.items():
        for register, matrix in zip(found[name], tile.reshape(64, 8)[rows].reshape(4, 8, 8)[:count], strict=True):
            dealt = matrix.T if "trans" in name else matrix
            np.testing.assert_array_equal(register, np.ascontiguousarray(dealt).reshape(-1).view("u4"))


def test_matrix_stores_and_moves_undo_each_other():
    rng = np.random.default_rng(3)
    tile, _ = rng.integers(0, 1 << 16, 512).astype("u2"), rng.permutation(64)
    registers, rows = rng.integers(0, 1 << 32, (4, 32)).astype("u4"), rng.permutation(32)
    square = registers.view("u2").reshape(4, 8, 8)
    expected = tile.reshape(64, 8).copy()
    expected[rows] = square.reshape(32, 8)
    expected[32 + rows[:16]] = square[[1, 0]].transpose(0, 2, 1).reshape(16, 8)
    found = gpu_tiles.load_matrices(MACHINE)
    np.testing.assert_array_equal(found["stmatrix"][0].reshape(64, 8), expected)
    np.testing.assert_array_equal(found["movmatrix"][0].view("u2").reshape(8, 8), square[0].T)


@pytest.mark.parametrize("make", [lambda: mma.mma_bf16_kernel, lambda: gpu_tiles.make_pipeline(2)], ids=["mma", "pipe"])
def test_the_kernels_compile_for_sm_80(make):
    assert ".target sm_80" in make().ptx("sm_80")


# --- fragments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", "abc")
@pytest.mark.parametrize("k", [8, 16])
def test_every_element_of_a_tile_is_held_once(matrix, k):
    rows, columns = places(matrix, k)
    assert len(set(zip(rows.ravel(), columns.ravel(), strict=True))) == rows.size


def test_tiles_go_to_registers_and_back():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 1 << 16, (7, 16, 16)).astype("u2")
    np.testing.assert_array_equal(from_registers(to_registers(a, "a"), "a"), a)


# --- the warp must be whole -----------------------------------------------------------------------------------------

PRODUCT = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7}, "
PRODUCT += "{%r8, %r9, %r10, %r11};"


def test_a_product_in_one_warp_of_a_block_and_not_in_the_other():
    launch(f"setp.eq.u32 %p1, %w, 1; @%p1 bra go; bra done; go: {PRODUCT} done:", block=64)
    launch(f"setp.eq.u32 %p1, %w, 1; @%p1 {PRODUCT}", block=96)


@pytest.mark.parametrize(
    ("body", "block", "mask"),
    [
        (f"setp.lt.u32 %p1, %t, 16; @%p1 {PRODUCT}", 32, "0x0000ffff of warp 0"),
        (f"setp.lt.u32 %p1, %t, 40; @%p1 {PRODUCT}", 64, "0x000000ff of warp 1"),
        (PRODUCT, 48, "0x0000ffff of warp 1"),
        (f"setp.eq.u32 %p1, %t, 3; @%p1 exit; {PRODUCT}", 32, "0xfffffff7 of warp 0"),
        ("setp.ne.u32 %p1, %t, 0; @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;", 32, "0xfffffffe of warp 0"),
        ("setp.gt.u32 %p1, %t, 7; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%s];", 32, "0xffffff00"),
    ],
)
def test_a_warp_that_comes_in_parts_is_named(body, block, mask):
    error = failure(body, block=block)
    assert error.kind == "divergent warp" and mask in error.message


def test_lanes_that_parted_and_met_again_are_whole():
    out = np.zeros(32, "u4")
    body = f"""setp.lt.u32 %p1, %t, 9; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0; mov.u32 %r8, 0f3f800000;
        @%p1 bra one; mov.u32 %r8, 0f40000000; one: mov.u32 %r9, %r8; mov.u32 %r10, %r8; mov.u32 %r11, %r8; {PRODUCT}
        mad.wide.u32 %d1, %t, 4, %a; st.global.b32 [%d1], %r1;"""
    launch(body, out)
    np.testing.assert_array_equal(out.view("f4"), np.where(np.arange(32) < 9, 1, 2))


# --- copies ---------------------------------------------------------------------------------------------------------

TO = "mad.lo.u32 %r1, %t, 16, %s; mad.wide.u32 %d1, %t, 16, %a;"
COPY = f"{TO} cp.async.cg.shared.global [%r1], [%d1], 16;"
DONE = "cp.async.commit_group; cp.async.wait_group 0;"


def numbers(lanes=32):
    return np.arange(4 * lanes, dtype="u4")


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("ld.shared.u32 %r2, [%r1];", "reads shared byte 0, which cp.async"),
        ("ld.shared.u8 %r2, [%r1+15];", "reads shared byte 15"),
        ("st.shared.u32 [%r1+8], %t;", "writes shared byte 8"),
        ("atom.shared.add.u32 %r2, [%r1+4], 1;", "writes shared byte 4"),
        ("cp.async.commit_group; ld.shared.u32 %r2, [%r1];", "reads shared byte 0"),
        ("cp.async.wait_group 0; ld.shared.u32 %r2, [%r1];", "reads shared byte 0"),
        ("cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r2, [%r1];", "reads shared byte 0"),
        ("bar.sync 0; ld.shared.u32 %r2, [%r1];", "reads shared byte 0"),
        ("cp.async.ca.shared.global [%r1+4], [%d1], 4;", "writes shared byte 4"),
        ("st.global.u32 [%d1+12], %t;", "writes global memory that cp.async"),
        ("st.u32 [%d1+12], %t;", "writes global memory that cp.async"),
        ("red.global.add.u32 [%d1], 1;", "writes global memory that cp.async"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", "reads shared byte 0"),
    ],
)
def test_nothing_may_be_touched_before_the_wait(rest, words):
    error = failure(f"{COPY} {rest}", numbers())
    assert error.kind == "race" and words in error.message and error.thread == (0, 0, 0)


@pytest.mark.parametrize(
    "rest",
    [
        f"{DONE} ld.shared.u32 %r2, [%r1];",
        f"{DONE} st.shared.u32 [%r1], %t; st.global.u32 [%d1], %t;",
        "cp.async.wait_all; ld.shared.u32 %r2, [%r1];",
        f"{DONE} bar.warp.sync -1; xor.b32 %r1, %r1, 16; ld.shared.u32 %r2, [%r1];",
        f"{DONE} bar.sync 0; xor.b32 %r1, %r1, 16; ld.shared.u32 %r2, [%r1];",
        f"{DONE} bar.sync 0; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r1];",
        "ld.global.u32 %r2, [%d1];",
        "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r2, [%r1];",
        "exit;",
    ],
)
def test_what_is_right_is_not_flagged(rest):
    launch(f"{COPY} {rest}", numbers())


def test_another_lane_needs_a_barrier_after_the_wait():
    error = failure(f"{COPY} {DONE} xor.b32 %r1, %r1, 16; ld.shared.u32 %r2, [%r1];", numbers())
    assert error.kind == "race" and "no barrier between them" in error.message


def test_a_barrier_before_the_wait_orders_nothing():
    body = f"{COPY} cp.async.commit_group; bar.sync 0; cp.async.wait_group 0; xor.b32 %r1, %r1, 512;"
    body += "ld.shared.u32 %r2, [%r1];"
    assert "no barrier between them" in failure(body, numbers(64), block=64).message


def test_a_copy_into_what_another_warp_reads_is_a_race():
    body = f"{TO} st.shared.v4.u32 [%r1], {{%t, %t, %t, %t}}; bar.sync 0;"
    body += f"xor.b32 %r2, %r1, 512; ld.shared.u32 %r3, [%r2]; {COPY}"
    error = failure(body, numbers(64), block=64)
    assert error.kind == "race" and error.message.startswith("cp.async")


def test_half_of_the_lanes_may_wait():
    body = f"{COPY} cp.async.commit_group; setp.lt.u32 %p1, %t, 16;"
    body += "@%p1 cp.async.wait_group 0; @%p1 ld.shared.u32 %r2, [%r1];"
    launch(body, numbers())
    assert failure(f"{body} ld.shared.u32 %r2, [%r1];", numbers()).thread == (16, 0, 0)


def test_checks_can_be_turned_off():
    launch(f"{COPY} ld.shared.u32 %r2, [%r1]; st.global.u32 [%d1], %t;", numbers(), check=False)


def test_blocks_have_copies_of_their_own():
    out = np.zeros(256, "u4")
    body = f"""{COPY} {DONE} bar.sync 0; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, 32, %t;
        mad.wide.u32 %d2, %r3, 4, %b; xor.b32 %r1, %r1, 16; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d2], %r2;"""
    launch(body, numbers(), out, grid=8)
    np.testing.assert_array_equal(out.reshape(8, 32), np.broadcast_to((np.arange(32) ^ 1) * 4, (8, 32)))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"{TO} cp.async.cg.shared.global [%r1+8], [%d1], 16;", "misaligned"),
        (f"{TO} cp.async.cg.shared.global [%r1], [%d1+4], 16;", "misaligned"),
        (f"{TO} cp.async.ca.shared.global [%r1], [%d1+16], 8;", "out of bounds"),
        (f"{TO} cp.async.ca.shared.global [%r1+1016], [%d1], 8;", "out of bounds"),
        (f"{TO} cp.async.cg.shared.global [%r1], [%d1], 16, 20;", "unsupported"),
    ],
)
def test_addresses_and_lengths_of_copies_are_checked(body, kind):
    assert failure(body, numbers(33) if kind == "misaligned" else numbers()).kind == kind


def test_a_source_of_no_bytes_is_never_looked_at():
    launch(f"{TO} cp.async.cg.shared.global [%r1], [%d1+4096], 16, 0; {DONE} ld.shared.u32 %r2, [%r1];", numbers())


def test_a_predicate_can_ignore_the_source():
    out = np.ones(32, "u4")
    body = f"""{TO} setp.gt.u32 %p1, %t, 9; cp.async.cg.shared.global [%r1], [%d1], 16, %p1; {DONE}
        ld.shared.u32 %r2, [%r1+4]; mad.wide.u32 %d2, %t, 4, %b; st.global.u32 [%d2], %r2;"""
    launch(body, numbers(), out)
    np.testing.assert_array_equal(out, np.where(np.arange(32) > 9, 0, 4 * np.arange(32) + 1))


def test_a_source_nobody_wrote_is_unset():
    memory = GlobalMemory()
    address = memory.bind(np.zeros(128, "u4"), initialised=False)
    text = f"{HEAD}.entry k(.param .u64 p) {{ .shared .align 16 .b8 s[512]; .reg .b64 %a; .reg .b32 %r;"
    text += "ld.param.u64 %a, [p]; mov.u32 %r, s; cp.async.ca.shared.global [%r], [%a], 4; ret; }"
    with pytest.raises(PtxError, match="uninitialised read"):
        load_ptx(text).launch("k", 1, 1, [address], memory=memory)


def test_bytes_and_sectors_of_copies_are_counted():
    counted = launch(f"{COPY} {DONE}", numbers())
    moved = (
        counted.global_load_bytes,
        counted.global_load_sectors,
        counted.shared_store_bytes,
        counted.shared_wavefronts,
    )
    assert moved == (512, 16, 512, 4) and counted.by_class["copy"] == 3


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r1}, {%r1}, {%r1};", "recorded only for"),
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1}, {%r1}, {%r1}, {%r1};", "with f32 sums"),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r1}, {%r1}, {%r1};", "recorded only for"),
        ("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1}, {%r1};", "recorded only for"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r1}, {%r1}, {%r1};", r"takes \[4, 4, 2, 4\]"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%s];", r"takes \[2, 0\]"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r1}, [%s];", "known are m8n8 of b16"),
        ("movmatrix.sync.aligned.m8n8.b16 %r1, %r2;", "known are"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%a], 16, [%s];", "no bulk copies"),
        ("cp.async.mbarrier.arrive.shared.b64 [%s];", "no mbarriers"),
        ("cp.async.cg.shared.global.L2::cache_hint [%s], [%a], 16, %d1;", "no cache policies"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%a], [%s], 16;", "no bulk copies"),
        ("cp.async.ca.shared.global [%s], [%a], 12;", "4, 8 or 16"),
        ("cp.async.cg.shared.global [%s], [%a], 8;", "16 for .cg"),
        ("cp.async.wait_group %r1;", "a number"),
        ("createpolicy.fractional.L2::evict_last.b64 %d1, 1.0;", "createpolicy"),
    ],
)
def test_what_has_no_known_rule_is_refused_with_its_line(text, words):
    with pytest.raises(PtxError, match=words) as caught:
        launch("\n" + text, numbers())
    assert caught.value.ptx_line == 11


# --- a card that rounds differently ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "cut"), [(8, 25), (4, 24), (16, 24), (16, 23)])
def test_a_device_with_another_rule_is_reported(monkeypatch, step, cut):
    def other(a, b, c, kind, k):
        return mma_ref(a, b, c, kind, step, cut)

    monkeypatch.setattr(ddtree.ptx.fragments, "mma_ref", other)
    line = mma.report_rule(PtxDevice())["bf16"]
    assert line.startswith("NOT as recorded") and f"sums of {step} products, cut {cut} places" in line


def test_a_device_without_a_rule_is_reported(monkeypatch):
    monkeypatch.setattr(ddtree.ptx.fragments, "mma_ref", lambda a, b, c, kind, k: np.float32(0) * c)
    assert "by no rule that is known here" in mma.report_rule(PtxDevice())["f16"]


def test_the_machine_follows_the_recorded_rule():
    assert all(line.startswith("as recorded") for line in mma.report_rule(PtxDevice()).values())
