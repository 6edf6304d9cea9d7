"""The functions of numerics: their stated bounds over all binary orders, their special values, the bits of a kernel."""

from typing import Annotated, Any

import numpy as np
import pytest

from ddtree import numerics
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice, cuda, kernel
from ddtree.numerics import add_exp, exp, exponent_of, log, log64, rsqrt, sigmoid, silu

FUNCTIONS = {"exp": exp, "log": log, "sigmoid": sigmoid, "silu": silu, "rsqrt": rsqrt}
TRUTH = {
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
BOUNDS = {"exp": 0.9, "log": 0.501, "sigmoid": 2.5, "silu": 3, "rsqrt": 1.5}  # ulp, as in the docstrings
SPECIAL = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.2e-38, 88.72, 88.73, -103.97, -104, 3e38])


def numbers() -> np.ndarray:
    """Float32 of every exponent and sign, and more of those where the functions are not constant."""
    rng = np.random.default_rng(0)
    every = np.arange(0, 2**32, 9973, dtype=np.uint64).astype(np.uint32).view(np.float32)
    parts = [rng.uniform(-105, 89, 300_000), rng.uniform(-1, 1, 100_000), rng.uniform(0.5, 2, 100_000)]
    return np.concatenate([every, SPECIAL, *[part.astype(np.float32) for part in parts]])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_is_within_the_stated_bound(name):
    x = numbers()
    with np.errstate(all="ignore"):
        values, truth = FUNCTIONS[name](x), TRUTH[name](x.astype(np.float64))
        step = np.spacing(np.maximum(abs(truth).astype(np.float32), np.float32(2**-126))).astype(np.float64)
        off = abs(values - truth)
    normal = np.isfinite(truth) & (abs(truth) < 3.4028234e38)
    normal &= x >= -87 if name in ("sigmoid", "silu") else True
    assert (off / step)[normal].max() < BOUNDS[name]
    assert np.isnan(values[np.isnan(truth)]).all()
    low = (x < -87) & np.isfinite(x)
    if name in ("sigmoid", "silu"):
        assert off[low].max() < {"sigmoid": 1e-44, "silu": 2e-43}[name]


def test_special_values_are_the_documented_ones():
    inf, nan = np.inf, np.nan
    x = np.float32([0, -0.0, inf, -inf, nan, -1, 89, -104])
    for name, expected in {
        "exp": [1, 1, inf, 0, nan, None, inf, 0],
        "log": [-inf, -inf, inf, nan, nan, nan, None, nan],
        "sigmoid": [0.5, 0.5, 1, 0, nan, None, 1, 0],
        "silu": [0, -0.0, inf, nan, nan, None, 89, -0.0],
        "rsqrt": [inf, -inf, 0, nan, nan, nan, None, nan],
    }.items():
        for value, wanted, given in zip(FUNCTIONS[name](x), expected, x, strict=True):
            if wanted is not None:
                assert_equal(value, np.float32(wanted), f"{name}({given})")


def test_another_dtype_is_refused():
    with pytest.raises(TypeError, match="exp: x is float64; it takes float32, convert with astype"):
        exp(1.5)


def test_add_exp_keeps_its_bound_and_never_loses_what_is_there():
    rng = np.random.default_rng(1)
    for size in (1, 10, 100, 2.0**20):
        x = rng.uniform(-size, size, 100_000).astype(np.float32)
        exponent = exponent_of(x) - rng.integers(-80, 81, len(x)).astype(np.int32)
        value = add_exp(np.zeros_like(x), x, exponent).astype(np.float64)
        truth = np.exp2(x * np.float64(1.4426950408889634) - exponent)
        assert (abs(value / truth - 1) <= 2e-7 + 1.4e-8 * abs(x)).all()
    x = rng.uniform(-80, 80, 100_000).astype(np.float32)
    total = np.float32(1) + rng.random(len(x), np.float32)
    assert (add_exp(total, x, exponent_of(x)) >= total).all()
    assert add_exp(np.float32([1, 0]), np.float32([0, 0]), np.int32([0, 3])).tolist() == [2, 0.125]


def test_log64_is_zero_at_one_and_positive_above():
    x = np.concatenate([np.exp(np.random.default_rng(3).uniform(0, 14, 100_000)), [1, 1 + 2**-52, 1 + 2**-40, 2.0**18]])
    value = log64(x)
    assert value[-4] == 0 and (value[x > 1] > 0).all()
    assert (abs(value - np.log(x)) <= 3 * np.spacing(np.log(x)) + 1e-17).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_gives_the_same_bits(name):
    pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")
    function = FUNCTIONS[name]

    @kernel("E1", block=128, grid="cdiv(N, 128)")
    def apply_kernel(x: Annotated[Any, "const float32[N]"], out: Annotated[Any, "float32[N]"]) -> None:
        i = cuda.grid(1)
        if i < x.size:
            out[i] = function(x[i])

    x, device = numbers()[::9], PtxDevice(check=False, count=False)
    x = np.concatenate([x, SPECIAL])
    out = device.empty(len(x), np.float32)
    apply_kernel(x, out, device=device)
    assert_equal(out, function(x), name)
    text = apply_kernel.ptx()
    assert "approx" not in text and "fma.rn.f64" not in text and "\tmul.f32" not in text


def test_every_public_function_is_tested_here():
    made = {name for name, value in vars(numerics).items() if isinstance(value, numerics.Function)}
    assert made == set(FUNCTIONS)
