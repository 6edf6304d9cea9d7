"""Caches after compaction, and rounds that are replayed: every byte is numpy's, and the sanitizers are clean."""

import os
import shutil

import pytest

from tools import gpu_round

REPLAYS = 100_000 if os.environ.get("DDTREE_DEEP") else 2_000


@pytest.mark.parametrize("name", gpu_round.SHAPES)
def test_a_replayed_compaction_leaves_numpys_bytes(gpu, name):
    assert gpu_round.compare(gpu, name, rounds=50) == 50


def test_slots_are_permuted_as_in_numpy(gpu):
    assert gpu_round.compare_slots(gpu, rounds=50) == 50


def test_tensors_of_torch_with_heads_first_are_compacted_in_place(gpu):
    pytest.importorskip("torch")
    assert gpu_round.compare_torch(gpu)


def test_replayed_rounds_give_the_texts_of_plain_decoding_and_no_memory_grows(gpu):
    assert gpu_round.soak(gpu, REPLAYS)["tokens"] > REPLAYS


def test_compute_sanitizers_four_tools_are_clean(gpu):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    assert set(gpu_round.check_sanitizer().values()) == {"clean"}
