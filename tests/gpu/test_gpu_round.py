"""Caches on the GPU after compaction: every byte is numpy's, whatever the layout, and the sanitizers are clean."""

import shutil

import pytest

from tools import gpu_round


@pytest.mark.parametrize("name", gpu_round.SHAPES)
def test_a_replayed_compaction_leaves_numpys_bytes(gpu, name):
    assert gpu_round.compare(gpu, name, rounds=50) == 50


def test_slots_are_permuted_as_in_numpy(gpu):
    assert gpu_round.compare_slots(gpu, rounds=50) == 50


def test_tensors_of_torch_with_heads_first_are_compacted_in_place(gpu):
    pytest.importorskip("torch")
    assert gpu_round.compare_torch(gpu)


def test_compute_sanitizers_four_tools_are_clean(gpu):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    assert set(gpu_round.check_sanitizer().values()) == {"clean"}
