import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.kdtr import load
from ddtree.layers import linear
from ddtree.quant import PackedInt4, pack_weight
from random_models import FIXTURES

RECORDED = load(FIXTURES / "quant.kdtr")


def recorded_int4():
    scale = RECORDED["int4.weight_scale"].view(ml_dtypes.bfloat16)
    return PackedInt4(RECORDED["int4.weight_packed"], scale, tuple(RECORDED["int4.weight_shape"].tolist()))


def test_int4_words_give_the_values_of_compressed_tensors():
    assert_equal(recorded_int4().dequantise(), RECORDED["int4.dequantised"], name="dequantised")


def test_int4_matrix_takes_a_seventh_of_float32():
    packed = recorded_int4()
    assert packed.nbytes == 48 * 128 // 2 + 48 * 4 * 2 < packed.dequantise().nbytes / 7


def naive(packed):
    """The formula of the format, one weight at a time."""
    rows, columns = packed.shape
    out = np.empty(packed.shape, np.float32)
    for n in range(rows):
        for j in range(columns):
            u = (int(packed.packed[n, j // 8]) >> 4 * (j % 8)) & 15
            out[n, j] = np.float32(u - 8) * np.float32(packed.scale[n, j // 32])
    return out


@given(st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_any_words_and_width_give_the_formulas_values(rows, columns, seed):
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (rows, -(-columns // 8)), dtype=np.int32)
    scale = rng.standard_normal((rows, -(-columns // 32))).astype(ml_dtypes.bfloat16)
    packed = PackedInt4(words, scale, (rows, columns))
    assert_equal(packed.dequantise(), naive(packed), name="dequantised")


@given(st.integers(1, 4), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing_rounds_to_the_nearest_level_and_is_stable(rows, columns, seed):
    weight = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    packed = pack_weight(weight)
    restored = packed.dequantise()
    assert_equal(pack_weight(restored).dequantise(), restored, name="packed again")
    step = np.repeat(packed.scale.astype(np.float32), 32, axis=1)[:, :columns]
    assert (np.abs(restored - weight) <= step * (0.5 + 1e-6)).all()  # 1e-6: float32 rounding of the division


def test_a_group_of_zeros_packs_to_zeros():
    packed = pack_weight(np.zeros((2, 40), np.float32))
    assert_equal(packed.dequantise(), np.zeros((2, 40), np.float32), name="zeros")


@pytest.mark.parametrize("weight", [np.zeros(32, np.float32), np.full((1, 32), np.nan, np.float32)])
def test_packing_refuses_what_is_no_finite_matrix(weight):
    with pytest.raises(ValueError, match="it takes a matrix of finite values"):
        pack_weight(weight)


@pytest.mark.parametrize(
    ("packed", "scale", "shape", "message"),
    [
        (np.zeros((2, 4), np.int32), np.zeros((2, 1), np.float32), (2, 33), r"packed is int32 \(2, 4\)"),
        (np.zeros((2, 4), np.uint8), np.zeros((2, 1), np.float32), (2, 32), "packed is uint8"),
        (np.zeros((2, 4), np.int32), np.zeros((2, 2), np.float32), (2, 32), r"scale is float32 \(2, 2\)"),
        (np.zeros((2, 4), np.int32), np.zeros((2, 1), np.int16), (2, 32), "scale is int16"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(packed, scale, shape, message):
    with pytest.raises(ValueError, match=message):
        PackedInt4(packed, scale, shape)


def test_a_packed_matrix_multiplies_as_its_dequantised_twin():
    packed = recorded_int4()
    x = np.random.default_rng(0).standard_normal((5, 128), dtype=np.float32)
    assert_equal(linear(x, packed.dequantise()), linear(x, RECORDED["int4.dequantised"]), name="product")


def test_names_that_moved_to_gguf_are_still_there():
    from ddtree import gguf, quant

    for name in ("BLOCK_TYPES", "BlockType", "Gguf", "GgufTensor", "decode_blocks", "read_gguf"):
        assert getattr(quant, name) is getattr(gguf, name)
