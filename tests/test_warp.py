"""What the lanes of a warp do together, in many warps at once, and at the ends of the numbers."""

import numpy as np
import pytest

from ddtree.check import assert_equal
from ddtree.probe import each, run_function
from ddtree.warp import (
    least_key_of_warp,
    least_of_warp,
    most_key_of_warp,
    most_of_warp,
    place_among,
    sum_of_warp,
    sum_up,
)

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

BITS = np.random.default_rng(0).integers(0, 2**32, 256, dtype=np.uint64).astype(np.uint32)
BITS[:4] = 0, 2**31 - 1, 2**31, 2**32 - 1


@pytest.mark.parametrize(
    ("instruction", "in_numpy", "dtype"),
    [
        (sum_of_warp, np.sum, np.int32),
        (least_of_warp, np.min, np.int32),
        (most_of_warp, np.max, np.int32),
        (least_key_of_warp, np.min, np.uint32),
        (most_key_of_warp, np.max, np.uint32),
    ],
)
def test_each_warp_reduces_its_own_32_numbers(instruction, in_numpy, dtype):
    x = BITS.view(dtype)
    rows = x.reshape(8, 32) if in_numpy is not np.sum else x.reshape(8, 32).astype(np.int64)
    expected = in_numpy(rows, axis=1).astype(dtype).repeat(32)  # a sum wraps around
    assert_equal(run_function(instruction, each(x), returns=np.dtype(dtype).name), expected, "reduced")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_each_warp_scans_its_own_32_numbers(dtype):
    x = (BITS % 1000).astype(dtype)
    lanes = np.arange(256, dtype=np.int32) % 32
    scanned = run_function(sum_up, each(lanes), each(x), returns=np.dtype(dtype).name)
    assert_equal(scanned, np.cumsum(x.reshape(8, 32), axis=1, dtype=dtype).ravel(), "scanned")


@pytest.mark.parametrize("votes", [0, -1, 1, -(2**31), 0x55555555])
def test_a_place_is_the_number_of_votes_below(votes):
    voted = np.int32([votes]).view(np.uint32) >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    places = run_function(place_among, each(range(32)), np.int32(votes), returns="int32")
    assert_equal(places, (np.cumsum(voted) - voted).astype(np.int32), "places")
