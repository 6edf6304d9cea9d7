"""Attention of trees: the bits of the reference, which is float64 within rounding; and the tree does not matter."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree.attention import (
    AttentionPlan,
    Softmax,
    attention,
    attention_ref,
    choose_tiles,
    far_shared,
    first_key,
    make_attend_f32_kernel,
    make_attend_far_kernel,
    make_join_kernel,
)
from ddtree.attention.reference import count_groups
from ddtree.attention.tiles import MOST_SHARED
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice, link
from tools import gpu_attention
from tools.gpu_attention import Case, as_bits, draw, run, run_ref

FAST = PtxDevice()
HERE = [case for case in gpu_attention.CASES if "both sizes" not in case.name]


def smaller(case):
    """The case with few heads and short texts, for the PTX machine."""
    heads = case.heads if case.heads[1] == 1 else (2, 1)
    nodes = case.nodes if case.deepest > 16 else min(case.nodes, 9)
    return replace(case, heads=heads, nodes=nodes, lengths=case.lengths[:2] if case.seed == 0 else case.lengths)


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_every_number_has_the_bits_of_the_reference(case):
    assert gpu_attention.compare(FAST, smaller(case)) > 0


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("extra", [{}, {"window": 70}, {"soft_cap": 4.0}, {"page": 16}], ids=str)
def test_every_node_attends_to_its_own_path_within_four_times_the_error_of_a_naive_computation(kind, extra):
    case = Case("error", lengths=(150,), nodes=24, heads=(3, 1), size=64, kind=kind, **extra)
    assert gpu_attention.measure_error(FAST, case)["error"] > 0


@pytest.mark.parametrize("length", [0, 17, 63, 64, 240, 255, 256, 257])
def test_a_nodes_bits_are_those_of_plain_decoding_however_much_is_committed(length):
    case = Case("one result", heads=(1, 1), size=64)
    assert gpu_attention.check_one_result(FAST, (17,), (length,), case) > 1


def test_a_nodes_bits_do_not_depend_on_the_size_of_the_tree():
    case = Case("growing", lengths=(130,), nodes=65, heads=(2, 1), size=64, room=200)
    drawn = draw(case)
    whole = run(gpu_attention.plan_of(case, FAST), drawn)
    for nodes in (2, 17, 33):
        part = replace(
            drawn, **{name: getattr(drawn, name)[:, :nodes].copy() for name in ("queries", "parents", "depths")}
        )
        assert_equal(
            as_bits(run(gpu_attention.plan_of(case, FAST, nodes), part)), as_bits(whole[:, :nodes]), f"{nodes}"
        )


def test_no_tiling_changes_a_bit():
    assert gpu_attention.check_tilings(FAST, Case("tilings", lengths=(200,), nodes=9, heads=(4, 1), size=64)) == 9


def test_a_requests_bits_do_not_depend_on_its_neighbours_or_on_pages():
    case = Case("batch", lengths=(140, 33), nodes=5, heads=(2, 1), size=64)
    drawn = draw(case)
    whole = run(gpu_attention.plan_of(case, FAST), drawn)
    for r in range(2):
        part = gpu_attention.Drawn(*[x[r : r + 1] for x in list(vars(drawn).values())[:6]], None)
        alone = run(gpu_attention.plan_of(replace(case, lengths=case.lengths[r : r + 1]), FAST), part)
        assert_equal(as_bits(alone[0]), as_bits(whole[r]), f"request {r}")


def test_a_nan_spoils_the_queries_that_see_it_and_no_other():
    assert gpu_attention.check_nan(FAST) == 2


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_an_infinite_score_gives_nan(kind):
    case = Case("infinite", lengths=(100,), nodes=1, heads=(1, 1), size=64, kind=kind)
    drawn = draw(case)
    endless = {"bf16": 0x7F80, "f16": np.float16(np.inf), "f32": np.float32(np.inf)}[kind]
    for at in (3, 99):
        spoiled = replace(drawn, keys=drawn.keys.copy(), queries=np.abs(gpu_attention.number(drawn.queries, kind)))
        queries = np.ones_like(drawn.queries) if kind != "bf16" else np.full_like(drawn.queries, 0x3F80)
        spoiled = replace(spoiled, queries=queries)
        spoiled.keys[0, at] = endless
        found = gpu_attention.number(run(gpu_attention.plan_of(case, FAST), spoiled), kind)
        assert np.isnan(found).all(), at


def test_a_text_longer_than_the_plan_gives_nan():
    case = Case("long", lengths=(300,), nodes=1, heads=(1, 1), size=64)
    drawn = draw(case)
    plan = AttentionPlan((1, 1, 1, 64), 1, 256, device=FAST)
    assert np.isnan(gpu_attention.number(run(plan, drawn), "bf16")).all()


def test_groups_follow_each_other_and_cover_all_keys():
    firsts = [int(first_key(group)) for group in range(60)]
    assert firsts[0] == 0 and (np.diff(firsts) > 0).all()
    assert all(
        first_key(count_groups(keys)) >= keys > first_key(count_groups(keys) - 1) for keys in range(1, 40_000, 13)
    )


@pytest.mark.parametrize("size", range(16, 257, 16))
def test_every_size_of_heads_fits_an_sm_120(size):
    for rows in (1, 16, 68, 260, 4100):
        assert far_shared(size, *choose_tiles(rows, size, 32768))[3] <= MOST_SHARED


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_kernels_compile_for_every_architecture_and_spill_on_none_from_9_0_on(arch):
    kernels = [make_attend_far_kernel(128, "bf16", *tiles, False) for tiles in ((1, 4), (2, 1), (4, 1))]
    kernels += [
        make_join_kernel(128, "bf16", False),
        make_join_kernel(256, "f16", True),
        make_attend_f32_kernel(128, False),
    ]
    for kernel in kernels:
        text = kernel.ptx(arch)
        log = link(text, arch)[1]
        assert arch == "sm_80" or " 0 bytes spill stores" in log, kernel.name
        assert text.count("griddepcontrol.wait") == (arch != "sm_80"), kernel.name


def test_arrays_of_a_run_are_exchanged_without_a_new_preparation():
    case = Case("twice", lengths=(80,), nodes=5, heads=(2, 1), size=64)
    plan = gpu_attention.plan_of(case, FAST)
    for seed in (1, 2):
        drawn = draw(replace(case, seed=seed))
        assert_equal(as_bits(run(plan, drawn)), as_bits(run_ref(case, drawn)), f"seed {seed}")
    assert len(plan._ready) <= 2  # by where memory begins modulo 16


WRONG = {
    "shape of the queries": ({"queries": np.zeros((1, 4, 2, 64), np.uint16)}, r"queries has shape .* it takes \[1, 5"),
    "dtype of the queries": ({"queries": np.zeros((1, 5, 2, 64), np.float16)}, "queries has dtype float16; the"),
    "another number of heads": ({"keys": np.zeros((1, 90, 2, 64), np.uint16)}, r"keys has shape .*1, 64\]"),
    "values unlike keys": ({"values": np.zeros((1, 91, 1, 64), np.uint16)}, "keys have steps of"),
    "more requests": ({"keys": np.zeros((2, 90, 1, 64), np.uint16), "values": np.zeros((2, 90, 1, 64), np.uint16)},
                      "keys of 2 requests for queries of 1"),
    "no tree": ({"parents": None, "depths": None}, "trees of 5 nodes; give their parents"),
    "parents without depths": ({"depths": None}, "give parents and depths, or masks"),
    "parents of another size": ({"parents": np.zeros((1, 6), np.int32)}, "parents|depths"),
    "a page of 20": ({"keys": np.zeros((6, 20, 1, 64), np.uint16), "values": np.zeros((6, 20, 1, 64), np.uint16),
                      "page_table": np.zeros((1, 6), np.int32)}, "page has 20 rows; it takes a power of two"),
    "numbers apart": ({"keys": np.zeros((1, 90, 1, 128), np.uint16)[..., ::2],
                       "values": np.zeros((1, 90, 1, 128), np.uint16)[..., ::2]}, "must be neighbours"),
    "a wide length": ({"lengths": np.int32([80])}, "lengths"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named(change, message):
    case = Case("wrong", lengths=(80,), nodes=5, heads=(2, 1), size=64, room=90)
    drawn = draw(case)
    given = {name: value for name, value in vars(drawn).items() if name != "page_table"} | change
    with pytest.raises((TypeError, ValueError), match=message):
        gpu_attention.plan_of(case, FAST).run(**given)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shape": (1, 5, 2, 60)}, "multiple of 16"),
        ({"shape": (5, 2, 64)}, r"takes \[R, N, H, D\]"),
        ({"key_heads": 3}, "4 heads for 3 key heads"),
        ({"longest": -1}, "longest is -1"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": -1.0}, "soft_cap -1.0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"depth": -1}, "depth is -1"),
        ({"device": "cpu"}, "device"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change, message):
    given = {"shape": (1, 5, 4, 64), "key_heads": 2, "longest": 100, "device": FAST} | change
    with pytest.raises((TypeError, ValueError), match=message):
        AttentionPlan(given.pop("shape"), given.pop("key_heads"), given.pop("longest"), **given)


def test_attention_for_once_is_the_plans():
    case = Case("once", lengths=(70,), nodes=5, heads=(2, 1), size=64, window=50, soft_cap=3.0)
    drawn = draw(case)
    arrays = list(vars(drawn).values())[:6]
    found = attention(*arrays, window=50, soft_cap=3.0, device=FAST)
    assert_equal(found, run_ref(case, drawn), "once")


def test_a_scale_is_followed_and_one_of_nothing_is_the_usual():
    case = Case("scale", lengths=(70,), nodes=3, heads=(1, 1), size=64)
    drawn = draw(case)
    arrays = list(vars(drawn).values())[:6]
    usual = attention_ref(*arrays)
    assert_equal(attention_ref(*arrays, scale=0.125), usual, "64 ** -0.5")
    assert_equal(attention(*arrays, scale=0.3, device=FAST), attention_ref(*arrays, scale=0.3), "another")
    assert (attention_ref(*arrays, scale=0.3) != usual).any()
    assert Softmax.of(0.125).numbers[2] == 0
