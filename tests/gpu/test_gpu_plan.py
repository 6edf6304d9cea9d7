"""A plan and torch: results of the caller's kind, in order with torch's streams, in captures, and from many threads."""

import pytest

from tools import gpu_plan

pytestmark = pytest.mark.usefixtures("torch_and_cupy")


@pytest.fixture
def torch_and_cupy():
    pytest.importorskip("torch")
    pytest.importorskip("cupy")


def test_results_are_of_the_callers_kind_and_have_the_references_bits(gpu):
    assert {"torch", "cupy", "ddtree"} <= set(gpu_plan.check_kinds(gpu))


def test_results_are_in_order_with_what_torch_does_before_and_after(gpu):
    assert gpu_plan.check_order(gpu)["different"] == 0


def test_captures_follow_new_logits_and_keep_their_numbers(gpu):
    assert gpu_plan.check_captures(gpu)


def test_threads_with_streams_of_their_own(gpu):
    assert gpu_plan.check_threads(gpu)["different"] == 0
