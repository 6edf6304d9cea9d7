"""Arguments that are one number or one per request: what is read, kept, refused, and handed back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.batch import PerRequest, check_rows, hand_back, positive, put, show_arrays, whole
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice

MACHINE = PtxDevice()
SIZES = PerRequest("sizes", "int32", "integers from 0 to 99, one or {requests}", lambda values: whole(values, 99))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_numbers_are_read_as_they_are_and_one_stands_for_all(values):
    assert_equal(SIZES.read(values, len(values), "f"), np.array(values, np.int32), "one per request")
    assert_equal(SIZES.read(values[0], 3, "f"), np.full(3, values[0], np.int32), "one for all")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_any_integer_dtype_is_read(dtype):
    assert_equal(SIZES.read(np.array([3, 99], dtype), 2, "f"), np.int32([3, 99]), "values")


@pytest.mark.parametrize("values", [-1, 100, 1.0, True, "7", None, [[1]], [1, -1], [1, 2.5], 2**70])
def test_what_it_does_not_take_is_named_with_what_it_takes(values):
    with pytest.raises(ValueError, match=r"^f: sizes is .*; it takes integers from 0 to 99, one or 2$"):
        SIZES.read(values, 2, "f")


def test_another_number_of_them_is_refused():
    with pytest.raises(ValueError, match=r"^f: sizes has shape \[3\]; it takes one number or 2 of them$"):
        SIZES.read([1, 2, 3], 2, "f")
    counted = PerRequest("sizes", "int32", "integers", SIZES.fits, "has {count} numbers for {requests}: {values!r}")
    with pytest.raises(ValueError, match=r"^f: sizes has 3 numbers for 2: \[1, 2, 3\]$"):
        counted.read([1, 2, 3], 2, "f")


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, 1e39, 1e-46, "1", None, True])
def test_a_positive_number_is_finite_and_above_0_as_float32(value):
    assert not positive(np.asarray(value)) and positive(np.array([1, 3])) and positive(np.float64([1e-45, 3e38]))


def test_no_requests_take_no_numbers():
    assert SIZES.read(7, 0, "f").shape == SIZES.read(np.zeros(0, np.int64), 0, "f").shape == (0,)


class OnGpu:
    """Something that says it is in the memory of a GPU."""

    __cuda_array_interface__ = {}  # noqa: RUF012

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def test_arrays_on_a_gpu_are_kept_and_not_read():
    there = OnGpu((2,))
    assert put(SIZES, there, 2, "f", MACHINE) == (there, None)
    with pytest.raises(ValueError, match=r"^f: sizes has shape \[3\]; on the device it takes \[2\]$"):
        put(SIZES, OnGpu((3,)), 2, "f", MACHINE)


def test_numpy_is_read_now_or_when_a_graph_replays():
    values = np.array([1, 2], np.int32)
    assert put(SIZES, values, 2, "f", MACHINE, stream=MACHINE.graph()) == (values, None)
    there, host = put(SIZES, values, 2, "f", MACHINE)
    assert_equal(MACHINE.numpy(there), host, "there")
    assert there is values, "what fits is not copied: a recorded call follows it"
    with pytest.raises(ValueError, match=r"^f: sizes is array\(\[-1,  2\]"):
        put(SIZES, np.array([-1, 2]), 2, "f", MACHINE)


def test_rows_of_another_shape_or_dtype_are_refused():
    check_rows("bias", (2, 8), np.dtype("float32"), [2, 8], ("float32",), "f")
    with pytest.raises(ValueError, match=r"^f: bias has shape \[8\]; it takes one row a request: \[2, 8\]$"):
        check_rows("bias", (8,), np.dtype("float32"), (2, 8), ("float32",), "f")
    with pytest.raises(TypeError, match=r"^f: allowed is int64; it takes bool or uint8$"):
        check_rows("allowed", (2, 8), np.dtype("int64"), (2, 8), ("bool", "uint8"), "f")


@dataclass(frozen=True)
class Made:
    sizes: Any


def test_results_come_back_in_the_callers_kind():
    made = Made(MACHINE.empty(2, np.int32))
    assert hand_back(made, OnGpu((2,)), None, MACHINE) is made
    assert hand_back(made, np.zeros(2), MACHINE.graph(), MACHINE) is made
    assert type(hand_back(made, np.zeros(2), None, MACHINE).sizes) is np.ndarray


class OfTorch:
    """Something whose dtype has the name that torch gives it, and that may not be read."""

    shape, dtype = (2, 3), "torch.int64"

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("read")

    __array__ = __repr__ = __iter__ = __getitem__


def test_arrays_are_shown_by_name_dtype_and_shape_and_what_is_none_is_left_out():
    assert show_arrays(Made(OfTorch())) == "Made(sizes int64[2, 3])"
    assert show_arrays(Made(None)) == "Made()"
