import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree.check import assert_close, assert_equal
from ddtree.layers import KEY_BLOCK, ancestor_table, attention, linear, rms_norm, rope_tables, silu, tree_attention

SHAPES = [(1, 1), (7, 33), (64, 199), (256, 768), (768, 256), (576, 49)]


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


def test_linear_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"rows of 3 values do not fit a weight of shape \(2, 4\)"):
        linear(np.zeros((1, 3), np.float32), np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("rows", [1, 3, 17, 65])
def test_elementwise_layers_and_norms_have_the_same_bits_in_every_batch(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 96), dtype=np.float32) * 4
    weight = rng.standard_normal(96, dtype=np.float32)
    cos, sin = rope_tables(np.arange(rows) * 37, 96, 10_000.0)
    for row in range(rows):
        one = x[row : row + 1]
        assert_equal(rms_norm(one, weight, 1e-6)[0], rms_norm(x, weight, 1e-6)[row], name="rms_norm")
        assert_equal(silu(one)[0], silu(x)[row], name="silu")
        alone = rope_tables(np.array([row * 37]), 96, 10_000.0)
        assert_equal(alone[0][0], cos[row], name="cos")
        assert_equal(alone[1][0], sin[row], name="sin")


def test_silu_of_extremes_is_finite_and_warns_nothing():
    big = np.array([-np.inf, -1e30, -89.0, 0.0, 89.0, 1e30], np.float32)
    assert np.all(np.abs(silu(big[1:4])) < 1e-30)
    assert_equal(silu(big[5:]), big[5:], name="silu of a large value")


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


@given(seed=st.integers(0, 10_000), prefix=st.integers(0, 2 * KEY_BLOCK + 5), n=st.integers(1, 40))
def test_tree_attention_is_attention_under_the_ancestor_mask(seed, prefix, n):
    rng = np.random.default_rng(seed)
    groups, kv_heads, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(1, 9))
    q = rng.standard_normal((n, groups * kv_heads, dim), dtype=np.float32)
    k, v = rng.standard_normal((2, kv_heads, prefix + n, dim), dtype=np.float32)
    _, table = ancestor_table(random_tree(rng, n))
    mask = np.zeros((n, prefix + n), bool)
    mask[:, :prefix] = True
    for row, path in zip(mask, table, strict=True):
        row[prefix + path[path >= 0]] = True
    ours = tree_attention(q, k[:, :prefix], v[:, :prefix], k[:, prefix:], v[:, prefix:], table)
    # float32 rounding of sums of up to 200 weights that add to 1, values of a few units
    assert_close(ours, attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), mask), atol=3e-6, name="attention")


@given(seed=st.integers(0, 10_000), prefix=st.integers(0, 2 * KEY_BLOCK + 5), n=st.integers(1, 24))
def test_a_node_has_the_same_bits_in_the_tree_and_after_its_committed_ancestors(seed, prefix, n):
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    q = rng.standard_normal((n, 2 * kv_heads, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, kv_heads, prefix + n, 8), dtype=np.float32)
    _, table = ancestor_table(random_tree(rng, n))
    tree = tree_attention(q, k[:, :prefix], v[:, :prefix], k[:, prefix:], v[:, prefix:], table)
    alone = np.array([[0]])
    for node, path in enumerate(table):
        committed = [*range(prefix), *(prefix + path[path >= 0][:-1])]
        own = slice(prefix + node, prefix + node + 1)
        plain = tree_attention(q[node : node + 1], k[:, committed], v[:, committed], k[:, own], v[:, own], alone)
        assert_equal(plain[0], tree[node], name=f"node {node}")
