"""Accepted rows on the PTX machine: every layout of a cache against numpy, and numbers that no walk has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.compact import (
    UNITS,
    CompactPlan,
    compact_ref,
    make_compact_kernel,
    permute_slots,
    permute_slots_kernel,
    permute_slots_ref,
)
from ddtree.cuda import PtxDevice, link, watch_launches
from ddtree.ptx.text import PtxError

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

WATCHED, FAST = PtxDevice(), PtxDevice(check=False, count=False)


def draw_walks(rng, requests, nodes, most):
    """Accepted nodes (R, M), ascending from the root, with noise behind them; their counts, 0 among them."""
    accepted = rng.integers(-5, nodes + 5, (requests, most)).astype(np.int32)
    counts = rng.integers(0, min(most, nodes) + 1, requests).astype(np.int32)
    for row, count in zip(accepted, counts, strict=True):
        if count:
            row[:count] = [0, *np.sort(rng.choice(np.arange(1, nodes), count - 1, replace=False))]
    return accepted, counts


def draw_cache(rng, shape, dtype, layout="rows"):
    """A cache (..., S, H, D) of random bytes: in C order, heads first in memory, or a piece of a larger array."""
    if layout == "heads first":
        return draw_cache(rng, (*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype).swapaxes(-2, -3)
    if layout == "a piece":
        return draw_cache(rng, (*shape[:-1], shape[-1] + 3), dtype)[..., 1 : 1 + shape[-1]]
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize)).astype(np.uint8).view(dtype)


def split(cache, axes=4):
    """The arrays of one layer each."""
    front = cache.shape[: cache.ndim - axes]
    return [cache[index] for index in np.ndindex(front)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.sampled_from(["float32", "uint16", "uint8"]),
    st.sampled_from([(1, 1), (2, 8), (3, 5), (1, 33)]),
    st.sampled_from(["rows", "heads first", "a piece"]),
    st.booleans(),
)
def test_rows_of_any_size_and_order_move_and_nothing_else(seed, requests, dtype, row, layout, advance):
    rng = np.random.default_rng(seed)
    cache = draw_cache(rng, (2, requests, 24, *row), dtype, layout)
    accepted, counts = draw_walks(rng, requests, 9, 6)
    lengths = rng.integers(0, 15, requests)
    before, start = cache.copy(), lengths.copy()
    CompactPlan(cache, 9, device=FAST).run(accepted, counts, lengths, lengths_are="advanced" if advance else "before")
    for r, (n, at) in enumerate(zip(counts, start, strict=True)):
        before[:, r, at : at + n] = before[:, r, at + accepted[r, :n]]  # numpy reads all of it first
    assert_equal(cache.copy(), before, "rows")
    assert_equal(lengths, start + counts * advance, "lengths")


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("row_axes", [1, 2])
def test_pages_of_every_size_hold_the_rows_of_the_reference(page, row_axes):
    rng = np.random.default_rng(page)
    each = -(-300 // page)  # pages of a request
    pool = draw_cache(rng, (2, 2 * each + 1, page, *((2, 4) if row_axes == 2 else (9,))), "float16")
    table = rng.permutation(2 * each + 1)[: 2 * each].astype(np.int32).reshape(2, each)
    accepted, counts = draw_walks(rng, 2, 33, 20)
    accepted[0, :3], counts[:] = [0, 2, 32], [3, 20]
    accepted[1, :20] = np.arange(0, 40, 2)[:20] * 33 // 40
    lengths, expected = np.int64([page - 1, 250]), pool.copy()
    ends = compact_ref(split(expected, 2 + row_axes), accepted, counts, lengths, 33, table)
    plan = CompactPlan(pool, 33, row_axes=row_axes, paged=True, device=WATCHED)
    plan.run(accepted, counts, lengths, page_table=table, lengths_are="advanced")
    assert_equal(pool, expected, "pages")
    assert_equal(lengths, ends, "lengths")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 129])
def test_long_walks_move_in_place_without_a_race(count):
    rng = np.random.default_rng(count)
    cache = draw_cache(rng, (1, 400, 1, 8), "uint16")
    path = np.concatenate([[0], 1 + np.arange(1, count)]).astype(np.int32)  # every row lands on the one before it
    expected, lengths = cache.copy(), np.int64([11])
    expected[0, 11 : 11 + count] = cache[0, 11 + path]
    CompactPlan(cache, 200, device=WATCHED).run(path[None], np.int32([count]), lengths)
    assert_equal(cache, expected, "rows that overlap")


def test_arrays_of_several_dtypes_and_shapes_share_a_launch():
    rng = np.random.default_rng(0)
    caches = [
        draw_cache(rng, (2, 20, 2, 16), "uint16"),
        draw_cache(rng, (2, 20, 4, 3), "uint8"),
        draw_cache(rng, (3, 2, 20, 1, 6), "float32"),
    ]
    expected = [array.copy() for array in caches]
    accepted, counts, lengths = np.int32([[0, 3, 7], [0, 1, 4]]), np.int32([3, 3]), np.int64([5, 0])
    compact_ref([part for array in expected for part in split(array)], accepted, counts, lengths, 8)
    with watch_launches() as seen:
        CompactPlan(caches, 8, device=WATCHED).run(accepted, counts, lengths)
    assert len(seen) == 1
    for array, wanted in zip(caches, expected, strict=True):
        assert_equal(array, wanted, "rows")


def test_a_prefix_touches_no_byte_of_the_cache():
    cache, lengths = draw_cache(np.random.default_rng(0), (2, 2, 30, 2, 8), "float32"), np.int64([4, 9])
    before, walks = cache.copy(), (np.int32([[0, 1, 2, 3], [0, 1, 9, 9]]), np.int32([4, 2]))
    with watch_launches() as seen:
        CompactPlan(cache, 12, device=WATCHED).run(*walks, lengths)
    assert_equal(cache, before, "cache")
    assert seen[0].counters.global_store_bytes == 0


HOSTILE = {
    "a count beyond the array": ([0, 2, 3], 4, 5),
    "a negative count": ([0, 2, 3], -1, 5),
    "nodes that do not ascend": ([0, 3, 2], 3, 5),
    "a node twice": ([0, 2, 2], 3, 5),
    "a negative node": ([-1, 2, 3], 3, 5),
    "a node beyond the tree": ([0, 2, 8], 3, 5),
    "a huge node": ([0, 2, 2**31 - 1], 3, 5),
    "a negative length": ([0, 2, 3], 3, -1),
    "no room": ([0, 2, 7], 3, 13),
    "a full cache": ([0, 2, 3], 3, 20),
    "a huge length": ([0, 2, 3], 3, 2**63 - 1),
    "a length whose sum wraps": ([0, 2, 3], 3, 2**63 - 4),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_with_numbers_of_no_walk_is_left_alone_and_others_are_not(name, at):
    path, count, length = HOSTILE[name]
    cache = draw_cache(np.random.default_rng(0), (2, 2, 20, 2, 4), "uint16")
    accepted, counts, lengths, expected = np.int32([[0, 2, 5]] * 2), np.int32([3, 3]), np.int64([4, 4]), cache.copy()
    accepted[at], counts[at], lengths[at] = path, count, length
    ends = compact_ref(split(expected), accepted, counts, lengths, 8)
    CompactPlan(cache, 8, device=WATCHED).run(accepted, counts, lengths, lengths_are="advanced")
    assert_equal(cache, expected, "cache")
    assert_equal(lengths, ends, "lengths")
    assert lengths[at] == length and lengths[1 - at] == 7


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(("where", "length"), [(1, 4), (2, 4), (1, 6)])  # of both, of a source, of a target
def test_a_page_outside_the_pool_is_never_followed(wrong, where, length):
    pool = draw_cache(np.random.default_rng(0), (9, 4, 2, 4), "uint16")
    table = np.int32([[3, 1, 0, 8], [2, 4, 5, 7]])
    table[0, where] = wrong
    walks, lengths, expected = (np.int32([[0, 2, 6]] * 2), np.int32([3, 3])), np.int64([length, 5]), pool.copy()
    ends = compact_ref([expected], *walks, lengths, 8, table)
    plan = CompactPlan(pool, 8, paged=True, device=WATCHED)
    plan.run(*walks, lengths, page_table=table, lengths_are="advanced")
    assert_equal(pool, expected, "pool")
    assert_equal(lengths, ends, "lengths")
    assert_equal(lengths, np.int64([length, 8]), "only the second went on")


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_a_cache_that_begins_anywhere_moves_in_the_units_that_fit(offset):
    memory = draw_cache(np.random.default_rng(0), (1, 1, 1 + 20 * 16 + 24), "uint16").reshape(-1)
    begin = -memory.ctypes.data % 16 // 2 + offset
    cache = memory[begin : begin + 20 * 16].reshape(1, 20, 2, 8)
    walk, expected = (np.int32([[0, 2, 5]]), np.int32([3]), np.int64([4])), cache.copy()
    compact_ref([expected], *walk, 8)
    plan = CompactPlan(cache, 8, device=WATCHED)
    plan.run(*walk)
    assert plan.table.unit == {0: 16, 1: 2, 2: 4, 4: 8, 8: 16}[offset]
    assert_equal(cache, expected, "rows")


def test_a_recorded_round_follows_new_walks_tables_and_lengths():
    rng = np.random.default_rng(3)
    pool, table = draw_cache(rng, (40, 16, 2, 4), "uint16"), rng.permutation(40).astype(np.int32).reshape(4, 10)
    accepted, counts, lengths = np.zeros((4, 6), np.int32), np.zeros(4, np.int32), np.zeros(4, np.int64)
    plan, expected = CompactPlan(pool, 17, paged=True, device=FAST), pool.copy()
    with FAST.graph() as graph:
        plan.run(accepted, counts, lengths, page_table=table, lengths_are="advanced", stream=graph)
    for _ in range(20):
        accepted[:], counts[:] = draw_walks(rng, 4, 17, 6)
        rng.shuffle(table.reshape(-1))
        ends = compact_ref([expected], accepted, counts, lengths, 17, table)
        graph.replay()
        assert_equal(lengths, ends, "lengths")
        assert_equal(pool, expected, "pool")


def test_lengths_of_a_walk_that_counted_on_give_the_same_rows():
    rng = np.random.default_rng(1)
    cache = draw_cache(rng, (2, 3, 40, 2, 4), "uint16")
    accepted, counts = draw_walks(rng, 3, 9, 6)
    lengths, other = np.int64([3, 0, 20]), cache.copy()
    CompactPlan(cache, 9, device=WATCHED).run(accepted, counts, lengths, lengths_are="before")
    CompactPlan(other, 9, device=WATCHED).run(accepted, counts, lengths + counts, lengths_are="after")
    assert_equal(other, cache, "rows")
    table = rng.permutation(120).astype(np.int32).reshape(3, 40)
    again = table.copy()
    permute_slots(table, accepted, counts, lengths, 9, device=WATCHED)
    permute_slots(again, accepted, counts, lengths + counts, 9, lengths_are="after", device=WATCHED)
    assert_equal(again, table, "slots")


def test_what_does_not_fit_is_refused_by_name():
    cache = np.zeros((2, 9, 2, 4), np.float32)
    walks = np.zeros((2, 3), np.int32), np.ones(2, np.int32), np.zeros(2, np.int64)
    for made, words in [
        (lambda: CompactPlan(cache, 0, device=FAST), "nodes is 0"),
        (lambda: CompactPlan(cache, 8, row_axes=3, device=FAST), "row_axes is 3"),
        (lambda: CompactPlan(np.broadcast_to(cache, (3, 2, 9, 2, 4)), 8, device=FAST), "the same array"),
        (lambda: CompactPlan(np.broadcast_to(cache, cache.shape), 8, device=FAST), "read-only"),
        (lambda: CompactPlan(cache[:, ::-1], 8, device=FAST), "no step negative"),
        (lambda: CompactPlan(cache[:0], 8, device=FAST), "none of them 0"),
        (lambda: CompactPlan(cache, 8, paged=True, device=FAST).run(*walks), "page_table is missing"),
        (lambda: CompactPlan(cache, 8, device=FAST).run(*walks, page_table=walks[0]), "page_table is given"),
        (lambda: CompactPlan(cache, 8, device=FAST).run(walks[0][:1], *walks[1:]), "must be 2"),
        (lambda: CompactPlan(cache, 8, device=FAST).run(*walks, lengths_are="now"), "lengths_are is 'now'"),
    ]:
        with pytest.raises(ValueError, match=words):
            made()
    with pytest.raises(TypeError, match="accepted is int64"):
        CompactPlan(cache, 8, device=FAST).run(walks[0].astype(np.int64), *walks[1:])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 300))
def test_permuted_slots_show_the_rows_that_a_copy_would_have(seed, requests, nodes):
    rng = np.random.default_rng(seed)
    room = nodes + 12
    table = rng.permutation(requests * room).astype(np.int32).reshape(requests, room)
    rows = rng.integers(0, 2**31, (requests * room, 1, 1))
    accepted, counts = draw_walks(rng, requests, nodes, 8)
    lengths, moved = rng.integers(0, 12, requests), rows.copy()
    start, expected, pages = lengths.copy(), table.copy(), table.copy()
    ends = compact_ref([moved], accepted, counts, lengths, nodes, pages)
    assert_equal(permute_slots_ref(expected, accepted, counts, lengths, nodes), ends, "ends of both")
    permute_slots(table, accepted, counts, lengths, nodes, lengths_are="advanced", device=FAST)
    assert_equal(table, expected, "slots")
    assert_equal(lengths, ends, "lengths")
    for r in range(requests):
        kept = slice(0, ends[r])
        assert_equal(rows[table[r, kept]], moved[pages[r, kept]], "rows by position")
        assert_equal(np.sort(table[r]), np.sort(pages[r]), "no slot is lost")
        assert_equal(table[r, start[r] + nodes :], pages[r, start[r] + nodes :], "slots behind the tree")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", HOSTILE)
def test_slots_of_a_request_with_numbers_of_no_walk_stay(name, at):
    path, count, length = HOSTILE[name]
    table, lengths = np.arange(40, dtype=np.int32).reshape(2, 20), np.int64([4, 4])
    walks, expected = (np.int32([[0, 2, 5]] * 2), np.int32([3, 3])), table.copy()
    walks[0][at], walks[1][at], lengths[at] = path, count, length
    permute_slots_ref(expected, *walks, lengths, 8)
    permute_slots(table, *walks, lengths, 8, lengths_are="advanced", device=WATCHED)
    assert_equal(table, expected, "slots")
    assert lengths[at] == length and lengths[1 - at] == 7


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_kernel_compiles_for_every_architecture_without_spills(arch):
    """NVVM has an older dialect below sm_100, and refuses there what it takes for the PTX machine's sm_120."""
    kernels = [make_compact_kernel(unit, advance) for unit in UNITS for advance in (False, True)]
    for kernel in [*kernels, permute_slots_kernel]:
        assert " 0 bytes spill stores" in link(kernel.ptx(arch), arch)[1], kernel.name


def test_the_machine_watches_what_a_table_leads_to():
    walks = np.int32([[0, 2]]), np.int32([2]), np.int64([1])
    fresh, whole = WATCHED.empty((1, 9, 1, 4), np.float32), np.zeros((1, 9, 1, 4), np.float32)
    with pytest.raises(PtxError, match="nobody wrote"):
        CompactPlan(fresh, 4, device=WATCHED).run(*walks)
    plan = CompactPlan(whole[:, :3], 4, device=WATCHED)
    object.__setattr__(plan.table, "page", 9)  # more rows than there are
    with pytest.raises(PtxError, match="out of bounds"):
        plan.run(*walks)
