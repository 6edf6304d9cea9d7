"""From logits to laid-out trees: every bit on the GPU is the reference's, no kernel spills, and all tools are clean."""

import os
import shutil

import pytest

from tools.gpu_check import check_large_tree, check_trees
from tools.gpu_draft import check_generated, check_kernels, check_recorded, read_tools, start_tools

REQUESTS = 10_000 if os.environ.get("DDTREE_DEEP") else 2_000


def test_recorded_trees_and_one_that_needs_much_shared_memory_are_built_to_the_bit(gpu):
    assert check_trees(gpu)["equal"] and check_large_tree(gpu)["large_tree_nodes"] == 6001


def test_recorded_drafts_large_budgets_and_cost_curves_are_built_to_the_bit(gpu):
    assert check_recorded(gpu)["trees of recorded logits"] > 500


def test_generated_requests_of_every_kind_are_built_and_laid_out_to_the_bit(gpu):
    assert check_generated(gpu, REQUESTS)["requests"] >= REQUESTS


def test_no_kernel_spills_and_compute_sanitizers_four_tools_are_clean(gpu, tmp_path):
    assert check_kernels(tmp_path)
    if not shutil.which("compute-sanitizer"):
        pytest.skip("no kernel spills; compute-sanitizer is not installed")
    assert all(found["clean"] for found in read_tools(start_tools(tmp_path)).values())
