"""What the PTX machine must never let pass: races of random kernels, planted faults, pointers that go astray, endless
launches, and launches of other threads."""

import gc
import os
import sys
import threading
import weakref
from typing import Annotated, Any

import numpy as np
import pytest
import race_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.cuda import PtxDevice, cuda, kernel, watch_launches
from ddtree.ptx import GlobalMemory, launch, load_ptx
from ddtree.ptx.text import PtxError
from deep import DEEP, DEEPER
from tools.ptx_faults import (
    MAKERS,
    launch_in_threads,
    make,
    plus_kernel,
    stray,
    stray_kernel,
    verdict,
)


@settings(max_examples=250)
@given(race_oracle.KERNELS, st.booleans())
def test_a_random_kernel_races_exactly_if_vector_clocks_of_all_threads_say_so(made, apart):
    program, memory = load_ptx(race_oracle.text(made)), GlobalMemory()
    address = memory.bind(np.zeros(race_oracle.WORDS, "u4"))
    lanes = race_oracle.THREADS if apart else 1 << 16
    blocks = race_oracle.BLOCKS, race_oracle.THREADS
    try:
        launch(program, "k", *blocks, [address], memory, 0, check=True, count=False, lanes_at_once=lanes)
        found = False
    except PtxError as error:
        assert error.kind == "race", error
        found = True
    assert found == race_oracle.races(made, apart)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_planted_fault_is_found_and_its_twin_without_it_is_not_flagged(maker):
    assert (verdict(make(maker, good=False)), verdict(make(maker, good=True))) == ("race", "")


# Pointers that go astray


def test_a_thousand_strays_of_all_sizes_are_all_found():
    """Indices just past the end, 4 MiB, 2³¹ and 2³² bytes and more beyond it, before the beginning, and at random."""
    count = 1000 * (DEEPER if DEEP else 1)
    assert stray(count, seed=int.from_bytes(os.urandom(4)) if DEEP else 0) == {"offsets": count, "caught": count}


@settings(max_examples=100)
@given(st.lists(st.integers(0, 1 << 24), min_size=2, max_size=40), st.integers(-(1 << 35), 1 << 35))
def test_no_32_bit_index_leads_from_one_array_to_another(sizes, step):
    memory, unused = GlobalMemory(), np.zeros(1, "u1")
    bases = [memory.bind(np.broadcast_to(unused, size) if size == 1 else np.empty(size, "u1")) for size in sizes]
    for base, size in zip(bases, sizes, strict=True):
        for start in (base, base + size):
            region = memory.find(start + step)
            inside = region is not None and start + step < region.base + region.size
            assert not inside or region.base == base


def test_a_kernel_that_leaves_its_argument_finds_no_other_array_of_the_device():
    """An index computed from the true distance of two arrays in the process."""
    device = PtxDevice()
    whole = device.empty(4096, np.int32)
    whole[...] = 1
    with pytest.raises(PtxError, match="out of bounds"):
        stray_kernel(whole[:32], whole[64:96], 64, 1, device=device)
    assert (whole == 1).all()


# Endless launches


def endless(body, **options):
    head = ".version 9.5\n.target sm_120\n.entry poll(.param .u64 a) { .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %a;\n"
    text = head + f"ld.param.u64 %a, [a]; mov.u32 %r1, %tid.x;\nagain: {body} bra again;\nret; }}"
    memory = GlobalMemory()
    address = memory.bind(np.zeros(64, "u4"))
    with pytest.raises(PtxError) as caught:
        load_ptx(text).launch("poll", 1, 32, [address], memory=memory, **options)
    return caught.value


ENDLESS = ["add.u32 %r2, %r2, 1;", "atom.global.cas.b32 %r2, [%a], 1, 2;", "atom.global.exch.b32 %r2, [%a], %r1;",
           "ld.volatile.global.u32 %r2, [%a];", "bar.sync 0;", "membar.gl;"]  # fmt: skip


@pytest.mark.parametrize("body", ENDLESS)
def test_a_loop_without_an_end_is_named_with_its_kernel_block_and_line(body):
    error = endless(body, max_steps=400)
    assert error.kind == "endless" and "poll has no end after 400 steps; max_steps" in str(error)
    assert error.block == (0, 0, 0) and error.ptx_line is not None


def test_an_atomic_on_one_place_counts_for_as_many_steps_as_lanes_wait():
    assert endless("atom.global.exch.b32 %r2, [%a], %r1;", max_steps=1 << 17).kind == "endless"  # 4,096 loops


def test_a_device_takes_the_limit():
    @kernel("E0", block=32, grid="1")
    def wait_kernel(flag: Annotated[Any, "int32[N]"]) -> None:
        while cuda.atomic.add(flag, 0, 0) == 0:
            pass

    with pytest.raises(PtxError, match="wait has no end after 300 steps"):
        wait_kernel(np.zeros(1, np.int32), device=PtxDevice(max_steps=300))


# Threads


@pytest.fixture
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work, count=4):
    """Run work(i) in threads; what they raised."""
    raised, start = [], threading.Barrier(count)

    def run(i):
        start.wait()
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_threads_share_a_device_and_never_see_each_other(quick_switches, monkeypatch):
    device, finalizers = PtxDevice(), []
    monkeypatch.setattr(sys, "unraisablehook", finalizers.append)

    def work(i):
        x = np.full(32, 1000 * i, np.int32)
        with device.graph() as graph:
            recorded = device.empty(32, np.int32)
            plus_kernel(x, 5, recorded, stream=graph, device=device)
        for k in range(60):
            with watch_launches() as seen:
                out = device.empty(32, np.int32)
                plus_kernel(x, k, out, device=device)
            assert (out == 1000 * i + k).all() and len(seen) == 1
            with pytest.raises(PtxError, match="uninitialised read"):
                plus_kernel(device.empty(32, np.int32), k, out, device=device)
            graph.replay()
            assert (recorded == 1000 * i + 5).all()

    assert in_threads(work) == [] and finalizers == []


def test_many_launches_of_threads_are_all_right():
    count = 200 * (DEEPER if DEEP else 1)
    assert launch_in_threads(4, count) == {"threads": 4, "launches": 4 * count, "wrong": 0}


def test_threads_make_the_code_of_a_new_program_together(quick_switches):
    for turn in range(8):
        text = race_oracle.text([("red", "global", "own", "even"), ("block",), ("st", "shared", "own", "warp")])
        text = text.replace("red.global.add.u32 [%p], 1;", f"red.global.add.u32 [%p], {turn + 2};")

        def work(i, text=text, turn=turn):
            memory, x = GlobalMemory(), np.zeros(race_oracle.WORDS, "u4")
            load_ptx(text).launch("k", 2, 64, [memory.bind(x)], memory=memory)
            assert (x == np.tile([turn + 2, 0], 64)).all()

        assert in_threads(work) == []


def test_threads_bind_and_release_in_one_memory(quick_switches):
    memory = GlobalMemory()

    def work(i):
        for _ in range(300):
            x = np.full(4, i, "u1")
            address = memory.bind(x)
            assert memory.find(address + 2).view("u1")[2] == i
            memory.release(address)

    assert in_threads(work) == [] and memory.bases == []


def test_threads_read_one_watched_array_that_numpy_wrote(quick_switches):
    device = PtxDevice()
    x = device.empty(32, np.int32)
    x[...] = 3

    def work(i):
        for _ in range(60):
            out = device.empty(32, np.int32)
            plus_kernel(x, i, out, device=device)
            assert (out == 3 + i).all()

    assert in_threads(work) == []


def test_what_a_thread_made_dies_with_its_last_array():
    device = PtxDevice()
    alive = weakref.ref(device)

    def work(i, device=device):
        plus_kernel(np.zeros(32, np.int32), i, device.empty(32, np.int32), device=device)

    assert in_threads(work) == []
    del device, work
    gc.collect()
    assert alive() is None
