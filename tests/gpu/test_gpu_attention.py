"""Attention of trees on a GPU: the reference's bits, one result whatever the tree, and the sanitizers are clean."""

import shutil

import pytest

from tools import gpu_attention


@pytest.mark.parametrize("case", gpu_attention.CASES, ids=lambda case: case.name)
def test_every_number_has_the_bits_of_the_reference(gpu, case):
    assert gpu_attention.compare(gpu, case) > 0


@pytest.mark.parametrize("case", gpu_attention.CASES, ids=lambda case: case.name)
def test_errors_are_those_of_rounding(gpu, case):
    assert gpu_attention.measure_error(gpu, case)["error"] > 0


@pytest.mark.parametrize("nodes", [1, 2, 17, 65, 257, 1025])
def test_a_nodes_bits_are_those_of_plain_decoding(gpu, nodes):
    assert gpu_attention.check_one_result(gpu, (nodes,), (0, 15, 17, 63, 64, 255, 256, 257, 1000)) > 0


def test_no_tiling_changes_a_bit(gpu):
    assert gpu_attention.check_tilings(gpu, gpu_attention.CASES[0]) == 9


def test_a_requests_bits_do_not_depend_on_its_neighbours_or_on_pages(gpu):
    assert gpu_attention.check_batch(gpu) == 8


def test_a_nan_spoils_the_queries_that_see_it_and_no_other(gpu):
    assert gpu_attention.check_nan(gpu) == 2


def test_compute_sanitizers_four_tools_are_clean(gpu):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    assert set(gpu_attention.check_sanitizer().values()) == {"clean"}
