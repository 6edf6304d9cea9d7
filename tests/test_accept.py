"""The greedy choice and the walk: lowest token of the largest logits, the path of plain decoding, EAGLE's tensors."""

import numpy as np
import pytest

from ddtree.accept import (
    Requests,
    accept_trees,
    choose_ranks,
    choose_tokens_ref,
    eagle_accepted,
    eagle_accepted_kernel,
    empty_accepted,
    empty_best,
    make_choose,
    walk_trees_kernel,
)
from ddtree.build import Trees
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice, link
from ddtree.tree import DraftTree, follow_tree

FAST = PtxDevice()


def draw_trees(rng, requests, places):
    """Trees of 1 to `places` nodes with small token ids, siblings of different tokens, padded as by a kernel."""
    tokens, parents = np.full((requests, places), -1, np.int64), np.full((requests, places), -1, np.int32)
    depths, counts = np.zeros((requests, places), np.int32), rng.integers(1, places + 1, requests).astype(np.int32)
    for r, count in enumerate(counts):
        taken = set()
        tokens[r, 0] = rng.integers(0, 9)
        for i in range(1, count):
            while (pair := (int(rng.integers(0, i)), int(rng.integers(0, places)))) in taken:
                pass
            taken.add(pair)
            parents[r, i], tokens[r, i] = pair
            depths[r, i] = depths[r, pair[0]] + 1
    return Trees(tokens, parents, depths, np.zeros((requests, places)), np.zeros((requests, places), np.int32), counts)


def fresh(trees, remaining=1000):
    count = len(trees.counts)
    return Requests(
        trees.tokens[:, 0].copy(), np.arange(count, dtype=np.int64) + 5, np.full(count, remaining, np.int64)
    )


def as_bfloat16(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def chain(tokens):
    """One tree that is a chain of these tokens."""
    n = len(tokens)
    rows = np.array([tokens], np.int64), np.arange(-1, n - 1, dtype=np.int32)[None], np.arange(n, dtype=np.int32)[None]
    return Trees(*rows, np.zeros((1, n)), np.zeros((1, n), np.int32), np.array([n], np.int32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_choice_is_the_lowest_token_of_the_largest_logit(dtype):
    rng, (requests, places, vocabulary) = np.random.default_rng(0), (3, 5, 1037)
    logits = rng.integers(-40, 9, (requests, places, vocabulary)).astype(np.float32)  # many equal ones
    given = as_bfloat16(logits) if dtype == "bfloat16" else logits.astype(dtype)
    trees = draw_trees(rng, requests, places)
    found = accept_trees(trees, given, fresh(trees), device=FAST).choices
    for r, count in enumerate(trees.counts):
        assert_equal(found[r, :count], logits[r, :count].argmax(axis=-1), f"request {r}")


def test_a_vocabulary_in_parts_gives_the_choice_of_the_whole():
    logits = np.random.default_rng(1).integers(-9, 9, (2, 3, 100)).astype(np.float32)
    best, trees = empty_best(2, 3, FAST), draw_trees(np.random.default_rng(2), 2, 3)
    for first in (64, 0, 32):
        part = np.ascontiguousarray(logits[:, :, first : first + 32 if first < 64 else 100])
        choose_ranks(part, best, first_id=first, device=FAST)
    found = accept_trees(trees, None, fresh(trees), best=best, device=FAST)
    whole = accept_trees(trees, logits, fresh(trees), device=FAST)
    assert_equal(found.tokens, whole.tokens, "tokens")
    assert_equal(best, np.zeros((2, 3), np.int64), "the walk sets the ranks back")


def test_masks_and_biases_are_followed():
    logits = np.zeros((1, 1, 40), np.float32)
    logits[0, 0, 7], bias, allowed = 3, np.zeros((1, 40), np.float32), np.ones((1, 40), bool)
    bias[0, 11], allowed[0, 11] = 9, False
    tree = chain([1])
    for options, token in (({}, 7), ({"bias": bias}, 11), ({"bias": bias, "allowed": allowed}, 7)):
        found = accept_trees(tree, logits, fresh(tree), device=FAST, **options)
        assert found.tokens[0, 0] == token, options


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_without_a_choice_ends_its_request_and_is_told(wrong):
    tree, logits = chain([4, 6, 8]), np.zeros((1, 3, 10), np.float32)
    logits[0, 0, 6], logits[0, 1, 3] = 1, wrong
    requests = fresh(tree)
    found = accept_trees(tree, logits, requests, device=FAST)
    assert (found.counts[0], found.ends[0], requests.remaining[0]) == (1, -2, 0)
    assert_equal(choose_tokens_ref(logits)[0], np.array([6, -1, 0]), "the reference")


def test_thousands_of_walks_are_those_of_following_the_tree():
    rng, walked = np.random.default_rng(3), 0
    for places in (1, 2, 7, 33, 65):
        trees = draw_trees(rng, 500, places)
        choices = rng.integers(0, places, trees.tokens.shape)
        for r, count in enumerate(trees.counts):  # mostly along the tree
            for i in range(1, count):
                if rng.random() < 0.7:
                    choices[r, trees.parents[r, i]] = trees.tokens[r, i]
        requests = fresh(trees)
        found = accept_trees(trees, choices.astype(np.int64), requests, longest=64, device=FAST)
        for r, count in enumerate(trees.counts):
            parts = (getattr(trees, name)[r, :count] for name in ("tokens", "parents", "depths", "scores", "ranks"))
            nodes, bonus = follow_tree(DraftTree(*parts), choices[r, :count])
            most = found.counts[r]
            assert_equal(found.nodes[r, :most].astype(np.int64), nodes, f"{places} places, request {r}")
            assert_equal(found.tokens[r, : most - 1], trees.tokens[r, nodes[1:]], "tokens of the path")
            assert (found.tokens[r, most - 1], requests.root_tokens[r]) == (bonus, bonus)
            assert requests.lengths[r] == 5 + r + most
            walked += 1
    assert walked == 2500


def test_stop_tokens_and_what_remains_end_a_request_where_plain_decoding_ends():
    tree = chain([1, 2, 3, 4])
    choices = np.array([[2, 3, 4, 5]], np.int64)
    for stops, remaining, tokens, end in (
        (None, 99, [2, 3, 4, 5], 0), ([3], 99, [2, 3], 1), (None, 3, [2, 3, 4], 2), ([4], 3, [2, 3, 4], 1),
        (None, 0, [], 0), ([[5, -1]], 99, [2, 3, 4, 5], 1),
    ):  # fmt: skip
        requests = fresh(tree, remaining)
        found = accept_trees(tree, choices, requests, stop_tokens=stops, device=FAST)
        assert found.tokens[0, : found.counts[0]].tolist() == tokens and found.ends[0] == end, (stops, remaining)
        assert requests.remaining[0] == (remaining - len(tokens) if end == 0 else 0)


def test_a_path_longer_than_its_room_goes_on_in_the_next_round():
    tree, choices = chain([1, 2, 3, 4]), np.array([[2, 3, 4, 5]], np.int64)
    requests = fresh(tree)
    found = accept_trees(tree, choices, requests, longest=2, device=FAST)
    assert found.tokens[0].tolist() == [2, 3] and (requests.root_tokens[0], requests.remaining[0]) == (3, 998)


def test_eagles_tensors_are_those_of_sglangs_golden_case():
    """Candidates, links and the target's choices of SGLang's test of its verifier; predicts holds the path's rows."""
    tokens = np.array([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]], np.int64)
    parents = np.array([[-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 0, 4]], np.int32)
    depths = np.array([[0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 1, 2]], np.int32)
    trees = Trees(tokens, parents, depths, np.zeros((2, 6)), np.zeros((2, 6), np.int32), np.array([6, 6], np.int32))
    choices = np.full((2, 6), 18, np.int64)
    choices[0, [0, 3, 4]], choices[1, [0, 4]] = [3, 4, 5], [11, 12]
    found = eagle_accepted(accept_trees(trees, choices, fresh(trees), longest=4, device=FAST), device=FAST)
    assert_equal(found.predicts, np.int32([3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]), "predicts")
    assert_equal(found.accept_index, np.int32([[0, 3, 4, 5], [6, 10, 11, -1]]), "accept_index")
    assert_equal(found.accept_token_num, np.int32([3, 2]), "accept_token_num")


def test_arrays_given_with_out_are_those_that_come_back():
    tree, out = chain([1, 2]), empty_accepted(1, 2, 16, FAST)
    found = accept_trees(tree, np.array([[2, 9]], np.int64), fresh(tree), out=out, device=FAST)
    assert_equal(found.tokens[0, :2], np.int64([2, 9]), "tokens")
    assert_equal(out.tokens[0, :2], np.int64([2, 9]), "in the arrays given")


@pytest.mark.parametrize(
    "target, options, message",
    [
        (np.zeros((1, 5), np.int64), {}, r"target has shape \[1, 5\]"),
        (np.zeros((1, 2, 8)), {}, "choose_ranks: logits is float64"),
        (None, {}, "target is None"),
        (np.zeros((1, 2), np.int64), {"stop_tokens": [0.5]}, "stop_tokens is float64"),
        (np.zeros((1, 2), np.int64), {"longest": 0}, "longest is 0"),
    ],
)
def test_what_does_not_fit_is_named(target, options, message):
    tree = chain([1, 2])
    with pytest.raises(ValueError, match=message):
        accept_trees(tree, target, fresh(tree), device=FAST, **options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_kernel_compiles_for_every_architecture_without_spills(arch):
    for kernel in (
        make_choose("bfloat16", "wide"),
        make_choose("float32", "adjusted"),
        walk_trees_kernel,
        eagle_accepted_kernel,
    ):
        assert " 0 bytes spill stores" in link(kernel.ptx(arch), arch)[1], kernel.name
