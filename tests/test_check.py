"""`ddtree.check` decides what equal means for the whole project, so it is tested to the last float."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.check import assert_close, assert_equal, ulp_distance

FLOATS = [np.float16, np.float32, np.float64]
repeatable = settings(derandomize=True, deadline=None, max_examples=200)


def float16_line():
    """All 63,489 different numbers of float16, infinities included, in ascending order; both zeros are one."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return np.unique(every[~np.isnan(every)].astype(np.float64)).astype(np.float16)


def test_ulp_distance_counts_every_float16():
    line = float16_line()
    assert len(line) == 63_489
    for anchor in (0, 1, 12_345, 31_744, 31_745, 63_488):
        expected = np.abs(np.arange(len(line)) - anchor).astype(np.uint64)
        assert np.array_equal(ulp_distance(line, line[anchor]), expected)


@repeatable
@given(st.sampled_from(FLOATS), st.floats(-1e4, 1e4, width=16), st.integers(0, 20))
def test_ulp_distance_counts_the_steps_of_nextafter(dtype, start, steps):
    x = end = dtype(start)
    for _ in range(steps):
        end = np.nextafter(end, dtype(np.inf))
    assert ulp_distance(x, end) == ulp_distance(end, x) == steps


def test_ulp_distance_spans_the_whole_float64_range():
    largest = np.finfo(np.float64).max
    bits = int(np.float64(largest).view(np.uint64))
    assert int(ulp_distance(-largest, largest)) == 2 * bits
    assert int(ulp_distance(largest, np.inf)) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance_of_special_values(dtype):
    a = np.array([-0.0, np.nan, np.nan, 1.0, np.inf], dtype)
    b = np.array([0.0, -np.nan, 1.0, np.nan, np.inf], dtype)
    assert ulp_distance(a, b).tolist() == [0, 0, 2**64 - 1, 2**64 - 1, 0]


@pytest.mark.parametrize(("a", "b"), [([1], [1]), (np.float32([1]), np.float64([1])), (np.longdouble([1]),) * 2])
def test_ulp_distance_refuses_other_dtypes(a, b):
    with pytest.raises(TypeError, match="float16, float32 or float64"):
        ulp_distance(a, b)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int32, np.uint64, np.int64, *FLOATS])
def test_equal_arrays_pass_and_one_changed_value_fails(dtype):
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    assert_equal(array, array.copy(), "same")
    assert_equal(array[:, ::2], np.ascontiguousarray(array[:, ::2]), "strided")
    assert_equal(array.astype(array.dtype.newbyteorder(">")), array.astype(array.dtype.newbyteorder(">")), "big-endian")
    changed = array.copy()
    changed[1, 1] = 1
    with pytest.raises(AssertionError, match=r"weights: 1 of 6 values differ, the first at \[1, 1\]"):
        assert_equal(changed, array, "weights")


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_scalar_arrays_compare(shape):
    assert_equal(np.zeros(shape, np.float32), np.zeros(shape, np.float32), "zeros")
    assert_close(np.zeros(shape, np.float32), np.zeros(shape, np.float32), "zeros", atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_minus_zero_differs_and_nans_do_not(dtype):
    assert_equal(np.array([np.nan, -np.inf], dtype), np.array([-np.nan, -np.inf], dtype), "nan")
    for actual, expected in ((-0.0, 0.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, -np.inf)):
        with pytest.raises(AssertionError, match="1 of 1 values differ"):
            assert_equal(np.array([actual], dtype), np.array([expected], dtype), "special")


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF])
def test_payload_and_sign_of_a_nan_are_not_compared(bits):
    assert_equal(np.array([bits], np.uint32).view(np.float32), np.array([np.nan], np.float32), "nan")


@repeatable
@given(st.integers(0, 2**32 - 1), st.integers(0, 31))
def test_any_flipped_bit_of_a_float_is_seen(bits, position):
    a, b = np.array([bits, bits ^ (1 << position)], np.uint32).view(np.float32).reshape(2, 1)
    if np.isnan(a) & np.isnan(b):
        assert_equal(a, b, "two nans")
    else:
        with pytest.raises(AssertionError, match=f"{bits:#010x}"):
            assert_equal(a, b, "flipped")


def test_the_message_shows_both_sides_and_the_distance():
    actual, expected = np.float32([1, 2, 3, 4]), np.float32([1, np.nextafter(np.float32(2), np.float32(3)), 3, 5])
    with pytest.raises(AssertionError) as error:
        assert_equal(actual, expected, "scores")
    assert str(error.value) == (
        "scores: 2 of 4 values differ, the first at [1]: actual 2.0 (0x40000000), expected 2.0000002 (0x40000001); "
        "largest error 1, 2097152 ulp"
    )


def test_the_largest_integer_error_is_exact():
    extremes = np.iinfo(np.int64)
    with pytest.raises(AssertionError, match=f"largest error {2**64 - 1}$"):
        assert_equal(np.array([extremes.max]), np.array([extremes.min]), "ids")


@pytest.mark.parametrize("check", [assert_equal, lambda *args: assert_close(*args, atol=1e9)])
def test_other_shapes_fail_even_if_they_broadcast(check):
    with pytest.raises(AssertionError, match=r"shapes differ: actual \(1, 2\), expected \(2,\)"):
        check(np.zeros((1, 2)), np.zeros(2), "row")


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32, ">i4"])
def test_other_dtypes_fail_even_if_the_values_are_equal(dtype):
    with pytest.raises(AssertionError, match="dtypes differ"):
        assert_equal(np.zeros(2, np.int32), np.zeros(2, dtype), "ids")


@pytest.mark.parametrize("value", [np.array([None]), np.array(["a"]), np.array([1j]), np.array([1], np.longdouble)])
def test_arrays_without_plain_numbers_are_refused(value):
    for check in (assert_equal, lambda *args: assert_close(*args, atol=1)):
        with pytest.raises(TypeError, match="only bool, integers and floats up to 64 bits"):
            check(value, value, "strange")


def test_the_bound_is_inclusive_and_the_next_float_is_out():
    bound = 0.25
    assert_close([1.25, 0.75], [1.0, 1.0], "edge", atol=bound)
    for outside in (np.nextafter(1.25, 2), np.nextafter(0.75, 0)):
        with pytest.raises(AssertionError, match=r"1 of 2 .* at \[1\].*allowed 0.25"):
            assert_close([1.0, outside], [1.0, 1.0], "edge", atol=bound)


def test_the_relative_bound_scales_with_the_expected_side():
    assert_close([110.0], [100.0], "tenth", atol=0, rtol=0.1)
    with pytest.raises(AssertionError):
        assert_close([100.0], [90.0], "tenth", atol=0, rtol=0.1)


def test_no_bound_lets_infinity_or_nan_meet_a_number():
    for actual, expected in ((1.0, np.inf), (np.inf, 1.0), (-np.inf, np.inf), (np.nan, 1.0), (1.0, np.nan)):
        with pytest.raises(AssertionError, match="1 of 1"):
            assert_close([actual], [expected], "special", atol=1e300, rtol=1e300)


def test_equal_infinities_and_nans_are_close():
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert_close(special, np.array([np.inf, -np.inf, np.nan, np.nan]), "special", atol=0)


def test_a_difference_beyond_the_float64_range_is_not_close():
    with pytest.raises(AssertionError, match="largest error inf"):
        assert_close([1.7e308], [-1.7e308], "huge", atol=1)


@pytest.mark.parametrize("bound", [{"atol": -1e-9}, {"atol": np.nan}, {"atol": np.inf}, {"atol": 0, "rtol": np.nan}])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="two finite numbers"):
        assert_close([1.0], [2.0], "bound", **bound)
