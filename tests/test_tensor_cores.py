"""The rule of mma.sync: recorded outputs of an H200, an independent model in exact fractions, and what it refuses."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import ptx_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kdtr import load
from ddtree.tensor_cores import FORMATS, ask, find_rule, mma_ref

RECORDED = load(Path(__file__).parent.parent / "fixtures" / "mma_h200.kdtr")


@pytest.mark.parametrize("name", RECORDED.metadata["sets"])
def test_every_recorded_output_of_an_h200(name):
    kind, k, _ = name.split(".")
    a, b, c, d = (RECORDED[f"{name}.{part}"] for part in "ABCD")
    ours = mma_ref(a, b, c, kind, step=int(k[1:]))
    np.testing.assert_array_equal(ours.view("u4"), d.view("u4"))


def stored_exponent(bits, kind):
    """The exponent of a finite number as it stands in its bits."""
    fraction, bias = {**FORMATS, "f32": (23, 127)}[kind]
    width = 31 if kind == "f32" else 15
    return max(bits >> fraction & ((1 << width - fraction) - 1), 1) - bias


def one_output(row, column, c, kind):
    """The bits of one output from bits, in exact fractions."""
    terms = [(ptx_oracle.value(int(c), "f32"), stored_exponent(int(c), "f32"))]
    for x, y in zip(row.tolist(), column.tolist(), strict=True):
        factors = [ptx_oracle.value(bits, kind) for bits in (x, y)]
        exact = Fraction(1)
        for factor in factors:
            exact *= 0 if factor == "-0" else factor
        terms.append((exact, stored_exponent(x, kind) + stored_exponent(y, kind)))
    terms = [(exact, exponent) for exact, exponent in terms if exact not in (0, "-0")]
    if not terms:
        return 0
    unit = Fraction(2) ** (max(exponent for _, exponent in terms) - 25)
    total = sum(int(exact / unit) for exact, _ in terms) * unit
    if abs(total) >= 2**128:
        return 0x7F800000 | (total < 0) << 31
    return ptx_oracle.encode(total, "f32", "rz") if total else 0


finite = {"bf16": st.integers(0, 0xFFFF).filter(lambda u: u & 0x7F80 != 0x7F80),
          "f16": st.integers(0, 0xFFFF).filter(lambda u: u & 0x7C00 != 0x7C00)}  # fmt: skip
near = {"bf16": st.integers(0x3D00, 0x4200) | st.integers(0xBD00, 0xC200),
        "f16": st.integers(0x3000, 0x4800) | st.integers(0xB000, 0xC800)}  # fmt: skip


@settings(max_examples=150)
@given(data=st.data(), kind=st.sampled_from(["bf16", "f16"]), k=st.sampled_from([8, 16]))
def test_any_finite_output_is_that_of_exact_fractions(data, kind, k):
    numbers = st.sampled_from([finite[kind], near[kind], st.just(0) | near[kind]]).flatmap(lambda x: x)
    row, column = (np.array(data.draw(st.lists(numbers, min_size=k, max_size=k)), np.uint16) for _ in range(2))
    c = data.draw(st.just(0) | st.integers(0x3D000000, 0x42000000) | st.integers(0, 0x7F7FFFFF) | st.just(0x80000000))
    ours = mma_ref(row[None], column[:, None], np.uint32([[c]]).view("f4"), kind, step=k)
    assert int(ours.view("u4")[0, 0]) == one_output(row, column, c, kind)


def test_products_may_come_in_any_order_and_steps_may_not():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype("f4").view("u4") >> 16 for shape in ((16, 32), (32, 8)))
    a, b = a.astype("u2"), b.astype("u2")
    order = rng.permutation(16)
    inside = np.concatenate([order, 16 + order])
    np.testing.assert_array_equal(mma_ref(a, b), mma_ref(a[:, inside], b[inside]))
    assert (mma_ref(a, b) != mma_ref(a[:, ::-1], b[::-1])).any()


def test_rows_and_columns_do_not_see_each_other():
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 1 << 16, shape).astype("u2") for shape in ((40, 32), (32, 24)))
    whole = mma_ref(a, b).view("u4")
    for i, j in ((0, 0), (39, 23), (17, 5)):
        np.testing.assert_array_equal(whole[i, j], mma_ref(a[i : i + 1], b[:, j : j + 1]).view("u4")[0, 0])


def test_batches_broadcast_and_many_tiles_are_those_one_by_one():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 1 << 16, (300, 16, 16)).astype("u2"), rng.integers(0, 1 << 16, (16, 8)).astype("u2")
    many = mma_ref(a, b).view("u4")
    for i in (0, 255, 256, 299):
        np.testing.assert_array_equal(many[i], mma_ref(a[i], b).view("u4"))


def test_float16_arrays_are_taken_as_they_are():
    x = np.arange(256, dtype=np.float16).reshape(16, 16)
    np.testing.assert_array_equal(mma_ref(x, np.eye(16, 8, dtype=np.float16), kind="f16"), x[:, :8].astype("f4"))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("k", [8, 16])
def test_the_questions_tell_every_rule_apart(kind, k):
    seen = {}
    for step in {k, 8, 4}:
        for cut in range(20, 32):
            seen.setdefault(mma_ref(*ask(kind, k), kind, step, cut).tobytes(), []).append((step, cut))
    assert max(map(len, seen.values())) == 1
    assert find_rule(mma_ref(*ask(kind, k), kind, k), kind, k) == (k, 25)


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8", "float16"])
def test_kinds_that_were_not_recorded_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"kind is '{kind}'.*bf16 and f16"):
        mma_ref(np.zeros((16, 16), "u2"), np.zeros((16, 8), "u2"), kind=kind)


@pytest.mark.parametrize(
    ("a", "b"), [((16, 8), (8, 8)), ((16, 16), (8, 8)), ((16, 24), (24, 8))], ids=["short", "unequal", "no multiple"]
)
def test_shapes_that_do_not_fit_are_refused_with_both(a, b):
    with pytest.raises(ValueError, match=r"a, b are uint16\(16, .*K a multiple of 16"):
        mma_ref(np.zeros(a, "u2"), np.zeros(b, "u2"))


def test_operands_of_32_bits_are_refused():
    with pytest.raises(ValueError, match="float32"):
        mma_ref(np.zeros((16, 16), "f4"), np.zeros((16, 8), "f4"))
