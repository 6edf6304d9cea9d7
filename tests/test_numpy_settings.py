"""Results do not depend on the caller's numpy settings: with every floating-point fault an error, no bit changes."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ddtree.batch import positive
from ddtree.build.stop import worthwhile_size
from ddtree.draft import draft_tree
from ddtree.engine import Engine, Sampling, choose_token
from ddtree.gguf import BLOCK_TYPES, decode_blocks
from ddtree.layers import Rope, Yarn, apply_rope, attention, linear, rms_norm, rope_tables, swiglu
from ddtree.models import Model
from ddtree.numerics import exp, log, rsqrt, sigmoid, silu
from ddtree.quant import pack_weight
from ddtree.tree import build_tree, top_log_probs
from random_models import FIXTURES, NANO, PAIR, random_engine

SPECIAL = [0, -0.0, 1e-45, -1e-45, 1e-38, -1000, -88, 88, 1e5, -1e5, 2**20, -(2**20), -2e6, -3e38, 0.5, -np.inf]


def leaves(value):
    """The arrays of a result, whatever holds them."""
    if isinstance(value, np.ndarray | np.generic | int | float | bool):
        return [np.asarray(value)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [leaf for item in vars(value).values() for leaf in leaves(item)] if hasattr(value, "__dict__") else []


def same(function):
    """Run a function as always and with every fault an error; the results have the same bits."""
    with np.errstate(all="ignore"):
        first = leaves(function())
    with np.errstate(all="raise"):
        second = leaves(function())
    assert len(first) == len(second) > 0
    assert all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@np.errstate(all="ignore")
def rows(seed, shape=(3, 17)):
    rng = np.random.default_rng(seed)
    mixed = np.where(
        rng.random(shape) < 0.4, rng.choice(SPECIAL, shape), rng.standard_normal(shape) * 10.0 ** rng.integers(-40, 6)
    )
    mixed = mixed.astype(np.float32)
    mixed[..., 0] = np.where(np.isfinite(mixed[..., 0]), mixed[..., 0], 0)
    return mixed


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([None, 1e-38, 1e-3, 1.0, 3e38]))
def test_trees(seed, temperature):
    logits = np.minimum(rows(seed), 2**20)
    same(lambda: top_log_probs(logits, 9))
    same(lambda: build_tree(*top_log_probs(logits, 9), 12))
    bias, half = rows(seed + 1, (1, 17)), np.clip(logits, -6e4, 6e4)
    with np.errstate(all="ignore"):
        half, scaled = half.astype(np.float16), np.minimum(logits, 0)
    same(lambda: draft_tree(scaled, 12, temperature=temperature))
    below = np.minimum(bias, 0)
    same(lambda: draft_tree(scaled, 12, temperature=temperature, bias=below, min_log_prob=-9))
    same(lambda: draft_tree(half, 5, allowed=np.ones((1, 17), bool)))
    same(lambda: draft_tree(logits, 12, costs=np.linspace(1e-300, 2e300, 13)))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 5e-324, 1e-300, 1e-3, 1.0, 1e300]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([5e-324, 0.5, 1.0]),
)
def test_sampling(seed, temperature, top_k, top_p):
    row = rows(seed)[0]
    same(lambda: choose_token(row, 3, Sampling(temperature, top_k, top_p, seed)))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_numerics_and_layers(seed):
    x = rows(seed, (4, 8))
    for function in (exp, log, sigmoid, silu, rsqrt):
        same(lambda function=function: function(x))
    y = np.nan_to_num(x, neginf=-1e30)
    same(lambda: rms_norm(y, y[0], 1e-6))
    same(lambda: linear(y, y))
    w = {f"mlp.{part}": matrix for part, matrix in {"gate_proj": y, "up_proj": y, "down_proj": y.T.copy()}.items()}
    w |= {f"{name}.weight": matrix for name, matrix in w.items()}
    same(lambda: swiglu(y, w, "mlp"))
    same(lambda: attention(y[:, None], y[:, None], y[:, None], np.tri(4, dtype=bool)))
    same(lambda: positive(x))


def test_quantised_readers():
    rng = np.random.default_rng(0)
    for kind in BLOCK_TYPES.values():
        raw = rng.integers(0, 256, 64 * kind.size, dtype=np.uint8)
        same(lambda raw=raw, kind=kind: decode_blocks(raw, kind))
    for scale in (1e-45, 1e-38, 1.0, 1e37):
        weight = (scale * rng.standard_normal((4, 64))).astype(np.float32)
        same(lambda weight=weight: (pack_weight(weight), pack_weight(weight).dequantise()))


@pytest.mark.parametrize("name", NANO)
def test_models(name):
    def run():
        model = Model.load(FIXTURES / "models" / name)
        return Engine(model).generate([1, 2, 3], 6, 0, Sampling(0.7, seed=1)).tokens

    same(run)


@pytest.mark.parametrize("seed", range(5))
def test_models_of_every_family_with_drafters(seed):
    same(lambda: random_engine(seed).generate([1, 2, 3], 12, 8, Sampling(1e-3, seed=seed)).tokens)


def test_weights_that_overflow_are_told_and_not_a_numpy_error(tmp_path):
    same(lambda: Engine.load(PAIR / "target", PAIR / "draft").generate(list(b"import os\n"), 12, 16).tokens)
    folder = shutil.copytree(PAIR / "target", tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    tensors = {name: np.full_like(value, 3e38 if "norm" in name else value) for name, value in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    for mode in ("ignore", "raise"):
        with np.errstate(all=mode), pytest.raises(ValueError, match="its weights are damaged"):
            Engine.load(folder).generate([1, 2, 3], 4, 0)


def test_worthwhile_sizes():
    tree = build_tree(*top_log_probs(rows(3), 9), 12)
    same(lambda: worthwhile_size(tree, np.linspace(1e-300, 1e300, 13)))


def test_rope():
    for rope in (Rope(8, 1e-30), Rope(8, 1e30, Yarn(16.0, 32)), Rope(8, 10_000.0)):
        same(lambda rope=rope: rope_tables(np.arange(5), rope))
        cos, sin = rope_tables(np.arange(4), rope)
        same(lambda cos=cos, sin=sin: apply_rope(rows(1, (4, 2, 8)), cos, sin))
