import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree.check import assert_close, assert_equal
from ddtree.layers import (
    KEY_BLOCK,
    TILE_BYTES,
    Llama3,
    Rope,
    Yarn,
    absorb_query,
    ancestor_table,
    apply_rope,
    attention,
    expand_rows,
    latent_values,
    linear,
    project,
    rms_norm,
    rope_frequencies,
    rope_tables,
    silu,
    tree_attention,
)

SHAPES = [(1, 1), (7, 33), (64, 199), (256, 768), (768, 256), (576, 49), (300, 2500), (300_000, 3)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 65])
def test_a_row_of_linear_has_the_same_bits_in_every_batch(inner, outer, rows):
    rng = np.random.default_rng(inner * outer + rows)
    x = rng.standard_normal((rows, inner), dtype=np.float32)
    weight = rng.standard_normal((outer, inner), dtype=np.float32)
    whole = linear(x, weight)
    assert_close(whole, x.astype(np.float64) @ weight.T.astype(np.float64), atol=1e-4 * inner**0.5, name="product")
    for row in range(rows):
        assert_equal(linear(x[row : row + 1], weight)[0], whole[row], name=f"row {row} alone")
        assert_equal(linear(x[row:], weight)[0], whole[row], name=f"row {row} first of the rest")


def test_tiles_of_a_large_weight_are_its_rows_in_order():
    inner = 512
    weight = np.zeros((2 * TILE_BYTES // (4 * inner) + 3, inner), np.float32)
    weight[np.arange(len(weight)), np.arange(len(weight)) % inner] = np.arange(len(weight))
    assert_equal(
        linear(np.ones((1, inner), np.float32), weight)[0], np.arange(len(weight), dtype=np.float32), name="rows"
    )


def test_a_packed_weight_is_unpacked_for_the_call():
    class Packed:
        shape = (2, 3)

        def dequantise(self):
            return np.arange(6, dtype=np.float32).reshape(2, 3)

    x = np.ones((4, 3), np.float32)
    assert linear(x, Packed()).tolist() == [[3, 12]] * 4
    assert project(x, {"a": Packed(), "a.bias": np.array([1, 2], np.float32)}, "a").tolist() == [[4, 14]] * 4


def test_linear_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"rows of 3 values do not fit a weight of shape \(2, 4\)"):
        linear(np.zeros((1, 3), np.float32), np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("rows", [1, 3, 17, 65])
def test_elementwise_layers_and_norms_have_the_same_bits_in_every_batch(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 96), dtype=np.float32) * 4
    weight = rng.standard_normal(96, dtype=np.float32)
    rope = Rope(96, 10_000.0, Yarn(8.0, 64), amplitude=1.2)
    cos, sin = rope_tables(np.arange(rows) * 37, rope)
    for row in range(rows):
        one = x[row : row + 1]
        assert_equal(rms_norm(one, weight, 1e-6)[0], rms_norm(x, weight, 1e-6)[row], name="rms_norm")
        assert_equal(silu(one)[0], silu(x)[row], name="silu")
        alone = rope_tables(np.array([row * 37]), rope)
        assert_equal(alone[0][0], cos[row], name="cos")
        assert_equal(alone[1][0], sin[row], name="sin")


def test_silu_of_extremes_is_finite_and_warns_nothing():
    big = np.array([-np.inf, -1e30, -89.0, 0.0, 89.0, 1e30], np.float32)
    assert np.all(np.abs(silu(big[1:4])) < 1e-30)
    assert_equal(silu(big[5:]), big[5:], name="silu of a large value")


@given(seed=st.integers(0, 10_000))
def test_interleaved_pairs_give_the_dot_products_of_their_rotate_half_twins(seed):
    rng = np.random.default_rng(seed)
    half = int(rng.integers(1, 9))
    q, k = rng.standard_normal((2, 5, 3, 2 * half), dtype=np.float32)
    cos, sin = rope_tables(rng.integers(0, 5000, size=5), Rope(2 * half, 10_000.0))
    order = [*range(0, 2 * half, 2), *range(1, 2 * half, 2)]  # neighbours apart
    for x in (q, k):
        twin = apply_rope(x[..., order], cos, sin)
        assert_equal(apply_rope(x, cos, sin, interleaved=True), twin, name="turned")


def slow_llama3(frequency, scaling):
    """Pair by pair, as the published code words it: by wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength > scaling.original / scaling.low:
        return frequency / scaling.factor
    if wavelength < scaling.original / scaling.high:
        return frequency
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def slow_yarn(pair, rope):
    """Pair by pair, from arXiv 2309.00071: between the pair that turns beta_fast times and the one of beta_slow."""
    scaling, frequency = rope.scaling, rope.theta ** (-2 * pair / rope.dim)

    def index(turns):
        return rope.dim / 2 * math.log(scaling.original / (2 * math.pi * turns)) / math.log(rope.theta)

    low, high = max(math.floor(index(scaling.beta_fast)), 0), min(math.ceil(index(scaling.beta_slow)), rope.dim - 1)
    slow = min(max((pair - low) / (high - low if high != low else 0.001), 0), 1)
    return frequency * (1 - slow) + frequency / scaling.factor * slow


@given(dim=st.integers(1, 64), theta=st.floats(100, 1e7), factor=st.floats(1, 64), original=st.integers(16, 9000))
def test_scaled_frequencies_are_the_published_ones(dim, theta, factor, original):
    rope = Rope(2 * dim, theta, Llama3(factor, 1.0, 4.0, original))
    plain = theta ** (-np.arange(dim) / dim)
    expected = np.array([slow_llama3(frequency, rope.scaling) for frequency in plain])
    # float32 powers; near the ends of the ramp a rounding is multiplied by up to its slope
    assert_close(rope_frequencies(rope), expected, atol=1e-12, rtol=2e-5, name="llama3")
    rope = Rope(2 * dim, theta, Yarn(factor, original))
    expected = np.array([slow_yarn(pair, rope) for pair in range(dim)])
    assert_close(rope_frequencies(rope), expected, atol=1e-12, rtol=2e-5, name="yarn")


def test_ancestor_table_of_a_tree():
    depths, table = ancestor_table(np.array([-1, 0, 0, 1, -1, 4]))
    assert depths.tolist() == [0, 1, 1, 2, 0, 1]
    assert table.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [4, -1, -1], [4, 5, -1]]


@pytest.mark.parametrize(("parents", "token"), [([0], 0), ([-1, 1], 1), ([-1, 0, -2], 2)])
def test_ancestor_table_refuses_parents_that_do_not_come_first(parents, token):
    with pytest.raises(ValueError, match=f"token {token} names parent"):
        ancestor_table(np.array(parents))


def random_tree(rng, n):
    return np.array([-1 if i == 0 else int(rng.integers(-1, i)) for i in range(n)])


def visible(parents, prefix, window):
    """The textbook mask: prefix, ancestors and self, no further back than the window."""
    depths, table = ancestor_table(parents)
    mask = np.zeros((len(parents), prefix + len(parents)), bool)
    for row, path, depth in zip(mask, table, depths, strict=True):
        positions = np.concatenate([np.arange(prefix), prefix + np.arange(depth + 1)])
        row[np.concatenate([np.arange(prefix), prefix + path[: depth + 1]])] = (
            True if window is None else positions > prefix + depth - window
        )
    return mask


@given(seed=st.integers(0, 10_000), prefix=st.integers(0, 2 * KEY_BLOCK + 5), n=st.integers(1, 40))
def test_tree_attention_is_attention_under_the_ancestor_mask(seed, prefix, n):
    rng = np.random.default_rng(seed)
    groups, kv_heads, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(1, 9))
    window = int(rng.integers(1, prefix + n + 2)) if rng.integers(2) else None
    q = rng.standard_normal((n, groups * kv_heads, dim), dtype=np.float32)
    rows = rng.standard_normal((kv_heads, prefix + n, 2 * dim), dtype=np.float32)
    parents = random_tree(rng, n)
    table = ancestor_table(parents)[1]
    ours = tree_attention(q, rows[:, :prefix], rows[:, prefix:], table, slice(dim, None), window=window)
    k, v = rows[..., :dim].transpose(1, 0, 2), rows[..., dim:].transpose(1, 0, 2)
    # float32 rounding of sums of up to 200 weights that add to 1, values of a few units
    assert_close(ours, attention(q, k, v, visible(parents, prefix, window)), atol=3e-6, name="attention")


@given(seed=st.integers(0, 10_000), prefix=st.integers(0, 2 * KEY_BLOCK + 5), n=st.integers(1, 24))
def test_a_node_has_the_same_bits_in_the_tree_and_after_its_committed_ancestors(seed, prefix, n):
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    window = int(rng.integers(1, prefix + n + 2)) if rng.integers(2) else None
    q = rng.standard_normal((n, int(rng.integers(1, 3)) * kv_heads, 8), dtype=np.float32)
    rows = rng.standard_normal((kv_heads, prefix + n, 14), dtype=np.float32)
    _, table = ancestor_table(random_tree(rng, n))
    value = (slice(8, None), slice(6))[rng.integers(2)]
    tree = tree_attention(q, rows[:, :prefix], rows[:, prefix:], table, value, 0.3, window)
    alone = np.array([[0]])
    for node, path in enumerate(table):
        committed = [*range(prefix), *(prefix + path[path >= 0][:-1])]
        own = slice(prefix + node, prefix + node + 1)
        plain = tree_attention(q[node : node + 1], rows[:, committed], rows[:, own], alone, value, 0.3, window)
        assert_equal(plain[0], tree[node], name=f"node {node}")


@given(seed=st.integers(0, 10_000), prefix=st.integers(0, KEY_BLOCK + 5), n=st.integers(1, 12))
def test_absorbed_and_expanded_latent_attention_agree(seed, prefix, n):
    rng = np.random.default_rng(seed)
    heads, rank, nope, turned, values = (int(size) for size in rng.integers(1, 9, size=5))
    rows = rng.standard_normal((1, prefix + n, rank + 2 * turned), dtype=np.float32)
    q = rng.standard_normal((n, heads, nope + 2 * turned), dtype=np.float32)
    kv_b = rng.standard_normal((heads * (nope + values), rank), dtype=np.float32)
    table, scale = ancestor_table(random_tree(rng, n))[1], float((nope + 2 * turned) ** -0.5)
    wide = expand_rows(rows, kv_b, heads, nope)
    expanded = tree_attention(q, wide[:, :prefix], wide[:, prefix:], table, slice(nope + 2 * turned, None), scale)
    latent = absorb_query(q, kv_b, nope)
    attended = tree_attention(latent, rows[:, :prefix], rows[:, prefix:], table, slice(rank), scale)
    # scores of a few tens before the softmax, so float32 rounding of about 1e-5 in the weights
    assert_close(latent_values(attended, kv_b, nope), expanded, atol=2e-4, name="absorbed and expanded")
