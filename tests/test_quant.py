import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.kdtr import load
from ddtree.layers import linear
from ddtree.quant import PackedInt4, PackedInts, ScaledBytes, join_parts, pack_weight, read_quantisation
from ddtree.quant.bytes import E4M3
from ddtree.quant.packed import scale_blocks
from random_models import FIXTURES

RECORDED = load(FIXTURES / "quant.kdtr")
FORMATS = load(FIXTURES / "quant_formats.kdtr")
ORDERED = load(FIXTURES / "quant_ordered.kdtr")


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


# recorded by other people's code: tools/record_quant.py

GROUP_128 = {"num_bits": 4, "group_size": 128}
ROWS = {"strategy": "channel"}
FLOAT8 = {"type": "float", "num_bits": 8}
CASES = {
    "group_32": ("pack", GROUP_128 | {"group_size": 32}, "bfloat16"),
    "group_128": ("pack", GROUP_128 | {"strategy": "group"}, "bfloat16"),
    "group_128_asymmetric": ("pack", GROUP_128 | {"symmetric": False}, "bfloat16"),
    "group_128_half": ("pack", GROUP_128 | {"symmetric": False}, "float16"),
    "channel": ("pack", ROWS | {"num_bits": 4, "group_size": None}, "bfloat16"),
    "channel_asymmetric": ("pack", ROWS | {"num_bits": 4, "group_size": -1, "symmetric": False}, "float32"),
    "bits_8_group_128": ("pack", GROUP_128 | {"num_bits": 8}, "bfloat16"),
    "bits_8_channel_asymmetric": ("pack", ROWS | {"symmetric": False}, "bfloat16"),
    "awq": ("pack", GROUP_128 | {"symmetric": False}, "float16"),
    "float8_channel": ("float", FLOAT8 | ROWS, "bfloat16"),
    "float8_tensor": ("float", FLOAT8, "float32"),
    "float8_block": ("naive", FLOAT8 | {"strategy": "block", "block_structure": "16x32"}, "float32"),
    "int8_channel": ("int", ROWS, "bfloat16"),
    "int8_channel_asymmetric": ("int", ROWS | {"symmetric": False}, "bfloat16"),
    "int8_group": ("naive", {"strategy": "group", "group_size": 32}, "float16"),
}


def compressed_config(form, weights, **more):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": f"{form}-quantized", "config_groups": groups, **more}


def typed(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)


def recorded_weight(name):
    """One recorded matrix, joined as its config says; every part must have a form that is allowed."""
    form, arguments, dtype = CASES[name]
    scheme = read_quantisation({"quantization_config": compressed_config(form, arguments)}).scheme("up.weight")
    parts = {key.removeprefix(f"{name}.weight"): FORMATS[key] for key in FORMATS if key.startswith(f"{name}.weight")}
    parts["_scale"] = parts["_scale"].view(typed(dtype))
    if form != "pack" and parts[""].dtype == np.uint8:
        parts[""] = parts[""].view(ml_dtypes.float8_e4m3fn)
    shape = FORMATS[f"{name}.values"].shape
    assert {part: value.shape for part, value in parts.items()}.items() <= {
        (part, shape) for part, (shapes, _) in scheme.parts(shape).items() for shape in shapes
    }
    return join_parts("up.weight", scheme, shape, parts)


def test_every_recorded_matrix_is_compared():
    assert set(CASES) == {key.partition(".")[0] for key in FORMATS} - {"fp8_square", "fp8_rest", "fp8_small"}


@pytest.mark.parametrize("name", CASES)
def test_words_and_bytes_give_the_values_of_compressed_tensors(name):
    weight, dtype = recorded_weight(name), typed(CASES[name][2])
    assert_equal(weight.dequantise(), FORMATS[f"{name}.values"], name="scales in float32")
    rounded = weight.dequantise().astype(dtype)  # in the scale's own type it rounds the same product once
    assert_equal(rounded.view(FORMATS[f"{name}.rounded"].dtype), FORMATS[f"{name}.rounded"], name="as stored")


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_matrix_is_smaller_than_float32_and_multiplies_as_its_twin(name):
    weight = recorded_weight(name)
    x = np.random.default_rng(0).standard_normal((3, weight.shape[1]), dtype=np.float32)
    assert_equal(linear(x, weight), linear(x, weight.dequantise()), name="product")
    assert weight.nbytes < weight.dequantise().nbytes / 2


@pytest.mark.parametrize(("name", "block"), [("square", (128, 128)), ("rest", (128, 128)), ("small", (16, 32))])
def test_fp8_blocks_give_the_values_of_compressed_tensors_and_transformers(name, block):
    codes = FORMATS[f"fp8_{name}.weight"].view(ml_dtypes.float8_e4m3fn)
    weight = ScaledBytes(codes, FORMATS[f"fp8_{name}.weight_scale_inv"], block)
    assert_equal(weight.dequantise(), FORMATS[f"fp8_{name}.values"], name="dequantised")
    assert len(np.unique(codes.view(np.uint8))) > (200 if name == "small" else 253)


@pytest.mark.parametrize(("name", "group"), [("symmetric", 16), ("asymmetric", 32), ("one", 40)])
def test_columns_in_the_order_of_their_activations_give_the_values_of_compressed_tensors(name, group):
    arguments = {"num_bits": 4, "group_size": group, "actorder": "group", "symmetric": name == "symmetric"}
    scheme = read_quantisation({"quantization_config": compressed_config("pack", arguments)}).scheme("up.weight")
    parts = {f"_{key.partition('.')[2]}": ORDERED[key] for key in ORDERED if key.startswith(f"{name}.")}
    values = parts.pop("_values")
    parts["_shape"] = np.array(values.shape)
    weight = join_parts("up.weight", scheme, values.shape, parts)
    assert_equal(weight.dequantise(), values, name="dequantised")
    assert set(parts) == set(scheme.parts(values.shape))
    in_order = join_parts("up.weight", scheme, values.shape, parts | {"_g_idx": np.full(values.shape[1], -1)})
    plain = join_parts("up.weight", scheme, values.shape, parts | {"_g_idx": np.arange(values.shape[1]) // group})
    assert_equal(in_order.dequantise(), plain.dequantise(), name="-1 is in order")


# generated


def one_at_a_time(levels, scale, block, zeros):
    """The formula, one weight at a time."""
    out = np.empty_like(levels)
    for n, j in np.ndindex(levels.shape):
        at = n // block[0], j // block[1]
        out[n, j] = (levels[n, j] - (0 if zeros is None else zeros[at])) * scale[at]
    return out


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 12), st.integers(1, 25), st.booleans(), st.integers(0, 99))
def test_blocks_of_any_size_over_any_matrix_follow_the_formula(rows, columns, m, n, zeros, seed):
    rng = np.random.default_rng(seed)
    levels = rng.integers(-128, 128, (rows, columns)).astype(np.float32)
    grid = -(-rows // m), -(-columns // n)
    scale = rng.standard_normal(grid, dtype=np.float32)
    zero = rng.integers(-8, 8, grid).astype(np.float32) if zeros else None
    expected = one_at_a_time(levels, scale, (m, n), zero)
    assert_equal(scale_blocks(levels, scale, (m, n), zero), expected, name="scaled")


def test_a_block_that_is_larger_than_memory_costs_nothing():
    scaled = scale_blocks(np.ones((3, 5), np.float32), np.full((1, 1), 2, np.float32), (2**31, 2**31))
    assert_equal(scaled, np.full((3, 5), 2, np.float32), name="scaled")


def test_the_values_of_e4m3_are_those_of_its_definition():
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        value = (-1) ** (code >> 7) * size
        assert np.isnan(E4M3[code]) if code & 127 == 127 else E4M3[code] == value, hex(code)


# what cannot be


def eight(rows=4, columns=6):
    return np.zeros((rows, columns), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [(0, 0), (2, 5), (3, 1)])
def test_a_code_that_is_no_number_is_refused_where_it_stands(code, at):
    values = eight()
    values.view(np.uint8)[at] = code
    with pytest.raises(ValueError, match=rf"the value at row {at[0]}, column {at[1]} is no number \(NaN\)"):
        ScaledBytes(values, np.ones((1, 1), np.float32), (4, 6))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_scale_that_is_not_finite_is_refused(scale, dtype):
    with pytest.raises(ValueError, match="a scale is not finite; the file is damaged"):
        ScaledBytes(eight(), np.array([[1, scale]]).astype(dtype), (4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (eight(), np.ones((2, 1), np.float32), (4, 6)),
            r"scale is \(2, 1\); \(4, 6\) in blocks of \(4, 6\) needs \(1, 1\)",
        ),
        ((eight(), np.ones(1, np.float32), (4, 6)), r"scale is \(1,\)"),
        ((eight(), np.ones((1, 1), np.float32), (4, 6), np.ones((1, 2), np.int8)), r"zero_point is \(1, 2\)"),
        ((np.zeros((4, 6), np.uint8), np.ones((1, 1), np.float32), (4, 6)), "values are uint8"),
        ((eight().astype(ml_dtypes.float8_e5m2), np.ones((1, 1), np.float32), (4, 6)), "values are float8_e5m2"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScaledBytes(*arguments)


def words(**change):
    found = {"packed": np.zeros((4, 2), np.int32), "scale": np.ones((4, 2), np.float32), "shape": (4, 16), "group": 8}
    return PackedInts(**(found | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "words of 3 bits a weight; 4 and 8 are supported"),
        ({"bits": 8}, r"packed is int32 \(4, 2\); \(4, 16\) needs int32 \(4, 4\)"),
        ({"group": 16}, r"needs bfloat16 \(4, 1\)"),
        ({"zero_point": np.zeros((4, 2), np.int32)}, r"zero_point is int32 \(4, 2\); \(4, 16\) needs int32 \(1, 2\)"),
        ({"zero_point": np.zeros((1, 2), np.int8)}, "zero_point is int8"),
        ({"group_index": np.zeros(15, np.int32)}, r"group_index has shape \(15,\); it is 16 groups from 0 to 1"),
        ({"group_index": np.full(16, 2)}, "it is 16 groups from 0 to 1"),
        ({"group_index": np.full(16, -2)}, "it is 16 groups from 0 to 1"),
    ],
)
def test_words_that_do_not_fit_are_refused(change, message):
    assert words().dequantise().shape == (4, 16)
    with pytest.raises(ValueError, match=message):
        words(**change)
