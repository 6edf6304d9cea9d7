"""Top-k and the functions it is made of: every bit on the GPU is numpy's."""

import numpy as np
import pytest

from tools import gpu_topk


def test_exp_log_and_their_kin_have_numpys_bits(gpu):
    assert len(gpu_topk.check_numerics(gpu, np.random.default_rng(0))) == 5


@pytest.mark.parametrize("name", gpu_topk.CHECKS)
def test_top_k_is_the_reference_to_the_bit(gpu, name):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    assert gpu_topk.CHECKS[name](gpu, *gpu_topk.draw_rows(rng), rng)
