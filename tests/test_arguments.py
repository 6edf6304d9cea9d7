"""Arguments that do not fit are refused by name, and one rule holds for rows that are all masked by large numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.cuda import PtxDevice
from ddtree.draft import Draft, DraftPlan, draft_tree, empty_draft
from ddtree.engine import Engine
from ddtree.topk import top_k, top_k_ref
from ddtree.tree import build_tree, plan_compaction, top_log_probs
from random_models import random_engine

LOGITS = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">u2"])
def test_numbers_in_another_byte_order_are_refused(dtype):
    bits = LOGITS.astype(np.float16).view(np.uint16) if dtype == ">u2" else LOGITS
    for call in (lambda x: draft_tree(x, 4), lambda x: draft_tree(x, 4, device=PtxDevice())):
        with pytest.raises(TypeError, match=rf"(logits|dtype).*({dtype}|big-endian)|{dtype}"):
            call(bits.astype(dtype))
    with pytest.raises(TypeError, match="bias is >f4; it takes float32, in the byte order"):
        draft_tree(LOGITS, 4, bias=np.zeros((1, 40), ">f4"))


@pytest.mark.parametrize("value", ["cpu", "cuda:0", 3, object])
def test_what_is_no_device_and_no_output_is_refused_by_name(value):
    for call in (draft_tree, top_k):
        with pytest.raises(TypeError, match=r"device is .*; it takes a Device"):
            call(LOGITS, 4, device=value)
        with pytest.raises(TypeError, match=r"out is .*; it takes a (Draft|TopK), e\.g\. empty"):
            call(LOGITS, 4, out=value)


@pytest.mark.parametrize("value", ["cpu", 3, object])
def test_a_plan_refuses_the_same_by_name(value):
    for call in (DraftPlan, lambda shape, device: empty_draft(shape, 5, device)):
        with pytest.raises(TypeError, match=r"device is .*; it takes a (Device|Library), e\.g\. PtxDevice"):
            call(LOGITS.shape, device=value)
    with pytest.raises(TypeError, match=r"out is .*; it takes a Draft, e\.g\. plan\.empty"):
        DraftPlan(LOGITS.shape, device=PtxDevice()).run(LOGITS, out=value)
    with pytest.raises(ValueError, match="a budget is 40000; with 1 requests it is at most 32767"):
        DraftPlan(LOGITS.shape, budget=40_000, device=PtxDevice())


@given(made=st.integers(1, 40), used=st.integers(1, 40), budget=st.integers(1, 45))
def test_an_output_for_another_vocabulary_is_refused_if_it_would_hold_other_candidates(made, used, budget):
    out = empty_draft((1, made), budget + 1, PtxDevice())
    if min(made, budget) == min(used, budget) and (made > 32) == (used > 32):
        return
    with pytest.raises(ValueError, match=r"out was not made for logits"):
        draft_tree(LOGITS[:1, :used], budget, out=out, device=PtxDevice())


@pytest.mark.parametrize("budget", [40_000, 10**7, 2**31 - 1])
def test_a_budget_beyond_what_fits_is_told_the_largest(budget):
    for device in (None, PtxDevice()):
        with pytest.raises(ValueError, match=rf"a budget is {budget}; with 1 requests it is at most 32767"):
            draft_tree(LOGITS, budget, device=device)
    with pytest.raises(ValueError, match="with 64 requests it is at most 11584"):
        draft_tree(np.zeros((64, 2, 4), np.float32), [20_000] * 64)


@given(value=st.sampled_from([2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]), wide=st.booleans())
def test_integers_near_the_end_of_int64_are_refused_and_never_wrap(value, wide):
    if wide and value < 2**64:
        value = np.uint64(value)
    tree = build_tree(*top_log_probs(LOGITS, 3), 3)
    for call in (tree.positions, lambda x: plan_compaction([0, 2], x), lambda x: draft_tree(LOGITS, x)):
        with pytest.raises((ValueError, TypeError)):
            call(value)
    with pytest.raises((ValueError, TypeError)):
        draft_tree(LOGITS, 3, lengths=value)
    engine = random_engine(0)
    for prompt, limit in (([value], 2), ([1], value)):
        with pytest.raises((ValueError, TypeError), match=r"token id|prompt_ids|new ones exceed"):
            engine.generate(prompt, limit, 0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.target.embed([value])


def test_the_engine_names_the_device_that_it_has():
    with pytest.raises(ValueError, match="device is 'cuda'; this engine runs on 'cpu'"):
        Engine.load("nowhere", device="cuda")


# ------------------------------------------------------------------ rows below -2**20


@given(seed=st.integers(0, 2**32), shift=st.sampled_from([0, -(2**20), -(2.0**20) - 1, -2e6, -1e9, -1e30, -np.inf]))
def test_a_row_far_below_zero_has_the_same_scores_on_every_path(seed, shift):
    rng = np.random.default_rng(seed)
    rows = (np.float32(shift) + np.round(rng.standard_normal((3, 12)) * 4).astype(np.float32)).astype(np.float32)
    log_probs, ids = top_log_probs(rows, 6)
    top = top_k_ref(rows, 6)
    np.testing.assert_array_equal(ids, top.ids)
    beyond = rows.max(axis=1) < -(2.0**20)
    np.testing.assert_array_equal(log_probs[beyond], np.take_along_axis(rows, ids, 1)[beyond])
    np.testing.assert_array_equal(log_probs[beyond], top.log_probs[beyond])
    if shift in (0, -2e6):
        draft: Draft = draft_tree(rows, 5)
        np.testing.assert_allclose(draft.tree().scores, build_tree(log_probs, ids, 5).scores, atol=1e-5)
