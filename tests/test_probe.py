"""ddtree.probe beyond the story: kinds of arguments, blocks, and that an edited function is run as it is now."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree import probe
from ddtree.cuda import Instruction, PtxDevice, cuda, device_function, load_four
from ddtree.probe import each, run_function
from ddtree.ptx.text import PtxError

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

ADDED = 1


@device_function
def plus(x: Any) -> Any:
    return x + np.int32(ADDED)


@device_function
def twice_plus(x: Any) -> Any:
    return np.int32(2) * plus(x)


@device_function
def number_of_thread(i: Any) -> Any:
    return cuda.grid(1)


@device_function
def split(pair: Any, both: Any) -> Any:
    a, b = pair
    (low, high), last = both
    return (a + b, a - b), low + high + last


@device_function
def dot(row: Any, matrix: Any) -> Any:
    total = np.float32(0)
    for k in range(matrix.shape[0]):
        total += row[k] * matrix[k, 0]
    return total


@settings(max_examples=12)
@given(st.integers(1, 2100))
def test_every_thread_gets_its_own_element_however_many(n):
    """Up to 1,024 threads in one block, more in blocks of 256, the last one not full."""
    values = np.arange(n, dtype=np.int32)[::-1].copy()
    np.testing.assert_array_equal(run_function(plus, each(values), returns="int32"), values + 1)


@pytest.mark.parametrize("threads", [1, 31, 1024, 1025])
def test_as_many_threads_as_are_asked_for(threads):
    found = run_function(number_of_thread, 0, returns="int32", threads=threads)
    np.testing.assert_array_equal(found, np.arange(threads))


def test_without_each_there_is_one_warp():
    assert len(run_function(number_of_thread, 0, returns="int32")) == 32


@pytest.mark.parametrize("number", [3, np.int32(3), np.int64(3), 3.0])
def test_a_number_is_the_same_for_all(number):
    @device_function
    def times(x: Any, factor: Any) -> Any:
        return x * factor

    found = run_function(times, each([1, 2]), number, returns="float64")
    np.testing.assert_array_equal(found, [3, 6])


def test_tuples_go_in_and_come_out_nested():
    a, b = np.int32([5, 7]), np.int32([1, 2])
    (total, difference), three = run_function(
        split, (each(a), each(b)), ((each(a), 10), each(b)), returns=(("int32", "int32"), "int32")
    )
    assert (total.tolist(), difference.tolist(), three.tolist()) == ([6, 9], [4, 5], [16, 19])


def test_rows_are_given_out_too():
    rows, column = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([[10], [1]])
    np.testing.assert_array_equal(run_function(dot, each(rows), column, returns="float32"), (rows @ column)[:, 0])


def test_an_array_comes_back_written_unless_it_is_read_only():
    @device_function
    def store(x: Any, out: Any) -> None:
        out[x] = x

    out = np.zeros(8, np.int32)[::2]  # not in C order: written all the same
    assert run_function(store, each(range(4)), out) is None
    np.testing.assert_array_equal(out, range(4))
    fixed = np.ones(4, np.int32)
    fixed.flags.writeable = False
    column = np.ones((1, 1), np.float32)
    column.flags.writeable = False
    assert run_function(dot, each(np.ones((2, 1), np.float32)), column, returns="float32").tolist() == [1, 1]
    assert run_function(plus, each(fixed), returns="int32").tolist() == [2] * 4


def test_different_lengths_are_refused_also_within_tuples():
    with pytest.raises(ValueError, match=r"run_function: \[2, 3\] threads; all of each"):
        run_function(split, (each([1, 2]), each([1, 2, 3])), ((1, 2), 3), returns=(("int32", "int32"), "int32"))
    with pytest.raises(ValueError, match=r"\[2, 5\] threads"):
        run_function(plus, each([1, 2]), returns="int32", threads=5)


def test_instructions_and_wide_loads_are_run():
    count_zeros = Instruction("clz.b32 $0, $1;", "uint32", ("uint32",))
    x = np.uint32([0, 1, 2**31])
    assert run_function(count_zeros, each(x), returns="uint32").tolist() == [32, 31, 0]
    table = np.arange(12, dtype=np.float32)
    parts = run_function(load_four, table, each([0, 4, 8]), returns=("float32",) * 4)
    np.testing.assert_array_equal(np.stack(parts, axis=1), table.reshape(3, 4))


def test_a_plain_function_is_taken_for_a_device_function():
    def square(x: Any) -> Any:
        return x * x

    assert run_function(square, each([2.0, 3.0]), returns="float32").tolist() == [4, 9]


def test_shared_memory_is_there():
    @device_function
    def reversed_by_shared(x: Any) -> Any:
        tile, i = cuda.shared.array(0, np.int32), cuda.threadIdx.x
        tile[i] = x
        cuda.syncthreads()
        return tile[cuda.blockDim.x - 1 - i]

    assert run_function(reversed_by_shared, each(range(40)), returns="int32", shared=160).tolist()[::-1] == [*range(40)]


def test_a_constant_or_an_inner_function_that_changed_is_run_as_it_is_now(monkeypatch):
    x, this = np.int32([10, 20]), sys.modules[__name__]
    assert run_function(twice_plus, each(x), returns="int32").tolist() == [22, 42]
    monkeypatch.setattr(this, "ADDED", 5)
    assert run_function(twice_plus, each(x), returns="int32").tolist() == [30, 50]
    monkeypatch.setattr(this, "plus", device_function(lambda x: x - np.int32(1)))
    assert run_function(twice_plus, each(x), returns="int32").tolist() == [18, 38]


def test_the_same_call_compiles_once():
    x = np.arange(7, dtype=np.int32)
    run_function(plus, each(x), returns="int32")
    before = probe._make_probe.cache_info()
    run_function(plus, each(x + 1), returns="int32")
    after = probe._make_probe.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_an_error_of_the_machine_names_the_line_of_the_tiny_kernel_or_the_function():
    @device_function
    def beyond(i: Any, x: Any) -> Any:
        return x[i]

    with pytest.raises(PtxError, match=r"out of bounds.*thread \(2, 0, 0\)") as caught:
        run_function(beyond, each(range(3)), np.zeros(2, np.float32), returns="float32", device=PtxDevice())
    assert caught.value.source.startswith(("test_probe.py:", "<probe"))
