"""`ddtree.tree` against trees of other people's code, against slow and obvious searches, and against hostile input."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.check import assert_close, assert_equal
from ddtree.kdtr import load
from ddtree.tree import DraftTree, build_tree, follow_tree, plan_compaction, top_log_probs

FIXTURES = Path(__file__).parent.parent / "fixtures"
VECTORS = load(FIXTURES / "tree_vectors.kdtr")
CASES = VECTORS.metadata["cases"]
WITH_LOGITS = [case for case in CASES if f"{case['case']}.logits" in VECTORS]
RUNS = load(FIXTURES / "e2e_qwen3.kdtr")

repeatable = settings(derandomize=True, deadline=None, max_examples=200)


def case_id(case):
    return f"{case['case']}-{case['name']}"


def tuples(tree):
    """The ranks from below the root to each node: how the tie rule names it."""
    names = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        names.append((*names[parent], int(rank)))
    return names


def tree_from(log_probs, budget, **limits):
    """A tree whose tokens are the ranks, shifted by ten for each position."""
    length, width = log_probs.shape
    return build_tree(log_probs, 10 * np.arange(length)[:, None] + np.arange(width), budget, root_token=7, **limits)


# Recorded: what the paper authors' implementation did.


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_recorded_tree_and_its_walk_are_identical(case):
    def recorded(field):
        return VECTORS[f"{case['case']}.{field}"]

    tree = build_tree(recorded("top_log_probs"), recorded("top_token_ids"), case["budget"], root_token=3)
    assert len(tree) == case["nodes"] + 1
    assert_equal(tree.tokens, np.array([3, *recorded("node_token_ids")], np.int64), "tokens")
    assert_equal(tree.depths, np.array([0, *recorded("node_depths")], np.int32), "depths")
    assert_equal(tree.parents, recorded("parents"), "parents")
    bits = recorded("visibility_bits")
    visibility = np.unpackbits(bits, axis=1, count=len(tree), bitorder="little").astype(np.bool_)
    assert_equal(tree.visibility, visibility, "visibility")
    accepted, bonus = follow_tree(tree, recorded("posterior"))
    assert_equal(accepted, recorded("accepted_indices").astype(np.int64), "accepted")
    assert bonus == recorded("next_token")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_float64_adds_recorded_log_probs_without_rounding(case):
    log_probs = VECTORS[f"{case['case']}.top_log_probs"]
    tree = tree_from(log_probs, case["budget"])
    exact = [math.fsum(float(log_probs[depth, rank]) for depth, rank in enumerate(name)) for name in tuples(tree)]
    assert_equal(tree.scores, np.array(exact), "scores")


@pytest.mark.parametrize("case", WITH_LOGITS, ids=case_id)
def test_top_of_recorded_logits(case):
    logits, recorded = VECTORS[f"{case['case']}.logits"], VECTORS[f"{case['case']}.top_log_probs"]
    log_probs, ids = top_log_probs(logits, case["budget"])
    order = np.argsort(-logits, axis=1, kind="stable")[:, : case["K"]]
    assert_equal(ids, order, "ids")
    # Both subtract log_z in float32. The recorded log_z was summed in float32 and may be one step off, after which
    # logit - log_z may round one step further: two steps at the largest number involved.
    largest = np.abs(np.where(np.isfinite(logits), logits, 0)).max()
    assert_close(log_probs, recorded, "log-probabilities", atol=2 * np.spacing(largest + np.float32(np.log(case["V"]))))


def recorded_rounds(prompt):
    """Each round of the run with budget 64: draft logits, the text from the root on, nodes, parents and accepted."""
    name, first = f"p{prompt}.b64", 0
    text = np.append(RUNS[f"p{prompt}.ar_tokens"], np.full(64, 259))
    columns = [
        np.split(RUNS[f"{name}.{field}"], RUNS[f"{name}.{field}_splits"][:-1])
        for field in ("node_token_ids", "parents", "accepted")
    ]
    for draft, length, *fields in zip(
        RUNS[f"{name}.draft_logits"], RUNS[f"{name}.acceptance_lengths"], *columns, strict=True
    ):
        yield draft, text[first:], *fields
        first += length


@pytest.mark.parametrize("prompt", range(4))
def test_trees_from_recorded_draft_logits_are_identical(prompt):
    for draft, text, tokens, parents, _ in recorded_rounds(prompt):
        tree = build_tree(*top_log_probs(draft, 64), 64, root_token=int(text[0]))
        assert_equal(tree.tokens, np.array([text[0], *tokens], np.int64), "tokens")
        assert_equal(tree.parents, parents, "parents")


@pytest.mark.parametrize("prompt", range(4))
def test_the_text_of_the_target_leads_along_the_recorded_path(prompt):
    compared = 0
    for draft, text, _, _, accepted in recorded_rounds(prompt):
        tree = build_tree(*top_log_probs(draft, 64), 64, root_token=int(text[0]))
        if 259 not in text[: len(accepted) + 1]:  # the recorded text ends within the last rounds
            path, bonus = follow_tree(tree, text[1:][tree.depths])
            assert_equal(path, accepted.astype(np.int64), "accepted")
            assert bonus == text[len(accepted)]
            compared += 1
    assert compared >= 14


# Generated: against searches that are slow and obvious.

negative = st.floats(-30, 0, width=32) | st.sampled_from([0.0, -0.0, -1e-16, -2e-16, -1e-30, -1.0, -math.inf])
lopsided = st.sampled_from([-math.inf, -2.0, -1.0, -0.5, -4e-16, -3e-16, -2e-16, -1.2e-16, -1e-16, 0.0])  # sums round
coarse = st.integers(-6, 0).map(lambda quarter: quarter / 4) | st.just(-math.inf)  # sums are exact, ties are many


def tables(values, length=4, width=4):
    """(L, K) float32 log-probabilities with descending rows."""
    shapes = st.tuples(st.integers(0, length), st.integers(0, width))
    return shapes.flatmap(
        lambda shape: st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)).map(
            lambda flat: -np.sort(-np.array(flat, np.float32).reshape(shape), axis=1)
        )
    )


def contract_score(log_probs, name):
    """The score of a prefix by the contract's operations: down the first children, along the siblings."""
    score = 0.0
    for row, rank in zip(log_probs.tolist(), name, strict=False):
        score = score + row[0]
        for r in range(rank):
            score = (score - row[r]) + row[r + 1]
    return score


def slow_search(log_probs, budget, chain_length=0, min_log_prob=-np.inf):
    """The first `budget` prefixes: the chain, then of those whose parent and previous sibling are taken the best."""
    length, width = log_probs.shape
    every = [name for depth in range(1, length + 1) for name in product(range(width), repeat=depth)]
    left = {n: contract_score(log_probs, n) for n in every if all(log_probs[d, r] > -np.inf for d, r in enumerate(n))}
    taken = [()]
    while left and len(taken) <= budget:
        ready = [n for n in left if n[:-1] in taken and (n[-1] == 0 or (*n[:-1], n[-1] - 1) in taken)]
        chain = [n for n in ready if n == (0,) * len(taken) and len(taken) <= chain_length]
        best = chain[0] if chain else min(ready, key=lambda n: (-left[n], n))
        if not chain and left[best] < min_log_prob:
            break
        taken.append(best)
        del left[best]
    return taken


@repeatable
@given(tables(negative, length=3) | tables(lopsided, length=3), st.integers(0, 12))
def test_the_pops_are_those_of_a_slow_search_and_scores_agree_to_the_bit(log_probs, budget):
    tree = tree_from(log_probs, budget)
    assert tuples(tree) == slow_search(log_probs, budget)
    assert_equal(tree.scores, np.array([contract_score(log_probs, name) for name in tuples(tree)]), "scores")


@repeatable
@given(tables(negative, length=3), st.integers(0, 12), st.integers(0, 4), st.integers(0, 4), st.floats(-9, 0))
def test_the_limits_are_those_of_a_slow_search(log_probs, budget, max_depth, chain_length, min_log_prob):
    tree = tree_from(log_probs, budget, max_depth=max_depth, chain_length=chain_length, min_log_prob=min_log_prob)
    assert tuples(tree) == slow_search(log_probs[:max_depth], budget, chain_length, min_log_prob)
    assert tuples(tree.cut(1 + len(tree) // 2)) == tuples(tree)[: 1 + len(tree) // 2]


@repeatable
@given(tables(coarse), st.integers(0, 60))
def test_the_nodes_are_the_best_of_all_prefixes_in_sorted_order(log_probs, budget):
    length, width = log_probs.shape
    every = [name for depth in range(1, length + 1) for name in product(range(width), repeat=depth)]
    score = {name: math.fsum(float(log_probs[d, r]) for d, r in enumerate(name)) for name in every}
    finite = [name for name in every if score[name] > -math.inf]
    best = sorted(finite, key=lambda name: (-score[name], name))[:budget]
    assert tuples(tree_from(log_probs, budget)) == [(), *best]


@repeatable
@given(tables(negative), st.integers(0, 40))
def test_fields_describe_one_tree(log_probs, budget):
    tree = tree_from(log_probs, budget)
    names = tuples(tree)
    assert len(set(names)) == len(tree) <= budget + 1
    assert [names[parent] for parent in tree.parents[1:]] == [name[:-1] for name in names[1:]]
    assert tree.depths.tolist() == [len(name) for name in names]
    assert tree.tokens.tolist() == [7, *(10 * (len(name) - 1) + name[-1] for name in names[1:])]
    assert (tree.parents < np.arange(len(tree))).all()
    assert (tree.tokens[0], tree.parents[0], tree.scores[0], tree.ranks[0]) == (7, -1, 0.0, -1)
    assert tree.positions(100).tolist() == [100 + len(name) for name in names]
    dtypes = [getattr(tree, field).dtype.name for field in ("tokens", "parents", "depths", "scores", "ranks")]
    assert dtypes == ["int64", "int32", "int32", "float64", "int32"]


@repeatable
@given(tables(negative), st.integers(0, 40), st.integers(0, 40))
def test_a_larger_budget_begins_with_the_smaller_tree(log_probs, one, other):
    small, large = (tree_from(log_probs, budget) for budget in sorted((one, other)))
    for field in ("tokens", "parents", "depths", "scores", "ranks"):
        assert_equal(getattr(large, field)[: len(small)], getattr(small, field), field)


@repeatable
@given(tables(negative, length=3, width=8), st.integers(0, 8))
def test_candidates_beyond_the_budget_change_nothing(log_probs, budget):
    assert tuples(tree_from(log_probs, budget)) == tuples(tree_from(log_probs[:, :budget], budget))


@repeatable
@given(tables(negative), st.integers(0, 40))
def test_visibility_is_ancestor_or_self(log_probs, budget):
    tree = tree_from(log_probs, budget)
    for node in range(len(tree)):
        ancestors = [node]
        while ancestors[-1] > 0:
            ancestors.append(int(tree.parents[ancestors[-1]]))
        assert np.flatnonzero(tree.visibility[node]).tolist() == tree.path(node).tolist() == ancestors[::-1]


@repeatable
@given(tables(negative), st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_walk_goes_as_deep_as_the_target_agrees(log_probs, budget, random):
    tree = tree_from(log_probs, budget)
    steps = dict(zip(tuples(tree), range(len(tree)), strict=True))
    width = log_probs.shape[1] + 1
    wants = [random.randrange(width) for _ in range(len(tree))]
    name = ()
    while (*name, wants[steps[name]]) in steps:
        name = (*name, wants[steps[name]])
    accepted, bonus = follow_tree(tree, np.array(wants) + 10 * tree.depths)
    assert accepted.tolist() == [steps[name[:depth]] for depth in range(len(name) + 1)]
    assert bonus == wants[steps[name]] + 10 * len(name)


@repeatable
@given(st.sets(st.integers(1, 30)), st.integers(0, 5))
def test_compaction_in_place_equals_a_gather(beyond_root, prefix_length):
    accepted = [0, *sorted(beyond_root)]
    before = np.arange(prefix_length + 31)
    cache = before.copy()
    sources, destinations = plan_compaction(accepted, prefix_length)
    for source, destination in zip(sources, destinations, strict=True):
        cache[destination] = cache[source]
    length = prefix_length + len(accepted)
    assert_equal(cache[:prefix_length], before[:prefix_length], "prefix")
    assert_equal(cache[prefix_length:length], before[prefix_length:][accepted], "accepted rows")
    assert_equal(cache[length:], before[length:], "rows behind")
    assert (sources > destinations).all() and (np.diff(destinations) > 0).all()
    assert len(sources) == sum(node != place for place, node in enumerate(accepted))


@repeatable
@given(
    st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 3e38, -3e38]), min_size=24, max_size=24)
    | st.lists(st.floats(-50, 50, width=32), min_size=24, max_size=24),
    st.integers(0, 9),
)
def test_top_log_probs_sorts_by_logit_then_id(values, k):
    logits = np.array(values, np.float32).reshape(3, 8)
    log_probs, ids = top_log_probs(logits, k)
    assert log_probs.shape == ids.shape == (3, min(k, 8))
    for row, row_ids, row_log_probs in zip(logits.tolist(), ids.tolist(), log_probs, strict=True):
        assert row_ids == sorted(range(8), key=lambda token: (-row[token], token))[:k]
        finite = [value for value in row if value > -math.inf]
        log_z = 0.0
        if finite:
            log_z = max(finite) + math.log(math.fsum(math.exp(value - max(finite)) for value in finite))
        with np.errstate(over="ignore"):
            expected = np.array([row[token] for token in row_ids], np.float32) - np.float32(log_z)
        assert_equal(row_log_probs, expected, "log-probabilities")
        assert not (row_log_probs > 0).any()


def test_a_row_does_not_depend_on_the_others():
    logits = np.random.default_rng(0).normal(size=(7, 3000)).astype(np.float32) * 5
    together = top_log_probs(logits, 64)
    for row in range(7):
        for whole, alone in zip(together, top_log_probs(logits[row : row + 1], 64), strict=True):
            assert_equal(whole[row : row + 1], alone, f"row {row}")


# Chosen by hand.


def test_a_siblings_score_is_the_difference_then_the_sum():
    log_probs = np.array([[-1.0], [-1e-16]], np.float32).repeat(2, axis=1)
    log_probs[1, 1] = -2e-16
    tree = tree_from(log_probs, 6)
    node = tuples(tree).index((0, 1))
    first, second = (float(value) for value in log_probs[1])
    assert tree.scores[node] == ((-1.0 + first) - first) + second == -1.0
    assert -1.0 + second < -1.0


def test_a_prefix_comes_before_what_continues_it_and_both_before_the_next_rank():
    tree = tree_from(np.zeros((3, 2), np.float32), 14)
    assert tuples(tree)[1:6] == [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1)]
    assert tuples(tree) == sorted(tuples(tree))


def test_siblings_with_one_token_lead_to_the_first():
    tree = build_tree(np.array([[-1.0, -1.0, -1.0]], np.float32), np.array([[5, 5, 5]]), 3)
    accepted, bonus = follow_tree(tree, [5, 6, 7, 8])
    assert (accepted.tolist(), bonus) == ([0, 1], 6)


@pytest.mark.parametrize(
    ("shape", "budget", "nodes"),
    [
        ((4, 3), 0, 1),
        ((4, 3), 1, 2),
        ((0, 3), 9, 1),
        ((4, 0), 9, 1),
        ((1, 3), 9, 4),
        ((4, 1), 9, 5),
        ((2, 3), 10**18, 13),
    ],
)
def test_degenerate_sizes_give_small_trees(shape, budget, nodes):
    tree = tree_from(np.full(shape, -1.0, np.float32), budget)
    assert len(tree) == nodes
    assert tree.visibility.shape == (nodes, nodes)
    accepted, bonus = follow_tree(tree, np.full(nodes, 99))
    assert (accepted.tolist(), bonus) == ([0], 99)


def test_masked_tokens_are_never_chosen():
    assert len(tree_from(np.full((3, 4), -np.inf, np.float32), 9)) == 1
    log_probs = np.array([[-1, -2, -np.inf], [-np.inf, -np.inf, -np.inf], [-1, -1, -1]], np.float32)
    assert tuples(tree_from(log_probs, 9)) == [(), (0,), (1,)]
    log_probs, ids = top_log_probs(np.array([[-np.inf, 1.0], [-np.inf, -np.inf]], np.float32), 2)
    assert log_probs.tolist() == [[0.0, -math.inf], [-math.inf, -math.inf]]
    assert ids.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("shape", "k"), [((0, 5), 3), ((3, 0), 3), ((3, 5), 0)])
def test_top_log_probs_of_nothing(shape, k):
    log_probs, ids = top_log_probs(np.zeros(shape, np.float32), k)
    assert log_probs.shape == ids.shape == (shape[0], min(k, shape[1]))
    assert (log_probs.dtype, ids.dtype) == (np.float32, np.int64)


def test_inputs_may_be_read_only_strided_and_of_any_integer_type_and_stay_as_they_are():
    wide = np.repeat(np.array([[-1.0, -2.0], [-0.5, -3.0]], np.float32), 2, axis=1)
    wide.setflags(write=False)
    copy = wide.copy()
    expected = build_tree(wide[:, ::2].copy(), np.array([[1, 2], [3, 4]]), 6)
    for dtype in (np.int8, np.uint16, np.int32, np.uint32):
        tree = build_tree(wide[:, ::2], np.array([[1, 2], [3, 4]], dtype), np.int32(6))
        assert_equal(tree.tokens, expected.tokens, "tokens")
        assert_equal(tree.scores, expected.scores, "scores")
    assert_equal(wide, copy, "input")


def test_a_tree_cannot_be_changed():
    tokens = np.array([1, 2], np.int64)
    tree = DraftTree(tokens, np.int32([-1, 0]), np.int32([0, 1]), np.float64([0, -1]), np.int32([-1, 0]))
    tokens[:] = 9
    assert tree.tokens.tolist() == [1, 2]
    for field in ("tokens", "parents", "depths", "scores", "ranks", "visibility"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, field)[0] = 0
    with pytest.raises(AttributeError):
        tree.tokens = tokens


# Hostile.

ROWS = np.array([[-1.0, -2.0], [-0.5, -3.0]], np.float32)
IDS = np.array([[1, 2], [3, 4]])


def changed(row, column, value):
    rows = ROWS.copy()
    rows[row, column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "ids", "budget", "message"),
    [
        (changed(1, 0, np.nan), IDS, 4, "top_log_probs row 1 has nan in column 0"),
        (changed(1, 1, np.inf), IDS, 4, "top_log_probs row 1 has inf in column 1"),
        (changed(1, 0, 0.25), IDS, 4, "row 1 has 0.25 in column 0; a log-probability is at most 0"),
        (changed(1, 1, -0.25), IDS, 4, "row 1 has -0.25 in column 1; more than the column before"),
        (changed(0, 0, -np.inf), IDS, 4, "row 0 has -2.0 in column 1; more than the column before"),
        (ROWS[0], IDS, 4, r"top_log_probs has shape \(2,\); it takes two axes"),
        (ROWS, IDS[:1], 4, r"top_token_ids has shape \(1, 2\); here it must be \(2, 2\)"),
        (ROWS, IDS, -1, "budget is -1; it takes an integer of at least 0"),
    ],
)
def test_bad_values_are_named(rows, ids, budget, message):
    with pytest.raises(ValueError, match=message):
        build_tree(rows, ids, budget)


@pytest.mark.parametrize(
    ("rows", "ids", "budget", "message"),
    [
        (ROWS.astype(np.float64), IDS, 4, "top_log_probs has dtype float64"),
        (ROWS.astype(np.float16), IDS, 4, "top_log_probs has dtype float16"),
        (ROWS.astype(np.int32), IDS, 4, "top_log_probs has dtype int32"),
        ([[None]], IDS, 4, "top_log_probs has dtype object"),
        (ROWS, IDS.astype(np.float32), 4, "top_token_ids has dtype float32"),
        (ROWS, IDS > 2, 4, "top_token_ids has dtype bool"),
        (ROWS, IDS.astype(np.uint64), 4, "top_token_ids has dtype uint64"),
        (ROWS, IDS, True, "budget is True, a bool"),
        (ROWS, IDS, 4.0, "budget is 4.0, a float"),
        (ROWS, IDS, None, "budget is None, a NoneType"),
    ],
)
def test_bad_types_are_named(rows, ids, budget, message):
    with pytest.raises(TypeError, match=message):
        build_tree(rows, ids, budget)


@pytest.mark.parametrize(("limit", "message"), [
    ({"max_depth": -1}, "max_depth is -1"),
    ({"chain_length": -2}, "chain_length is -2"),
    ({"min_log_prob": np.nan}, "min_log_prob is nan; it is a log-probability"),
])  # fmt: skip
def test_bad_limits_are_named(limit, message):
    with pytest.raises(ValueError, match=message):
        build_tree(ROWS, IDS, 4, **limit)
    with pytest.raises(ValueError, match="size is 9; this tree has 5 nodes"):
        build_tree(ROWS, IDS, 4).cut(9)


def test_bad_root_tokens_are_named():
    with pytest.raises(TypeError, match=r"root_token is 1\.5, a float"):
        build_tree(ROWS, IDS, 4, root_token=1.5)
    with pytest.raises(ValueError, match="root_token is -1"):
        build_tree(ROWS, IDS, 4, root_token=-1)


def test_bad_logits_are_named():
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"logits row 1 has {value} in"):
            top_log_probs(changed(1, 0, value), 2)
    with pytest.raises(TypeError, match="logits has dtype float64"):
        top_log_probs(ROWS.astype(np.float64), 2)
    with pytest.raises(ValueError, match=r"logits has shape \(2,\)"):
        top_log_probs(ROWS[0], 2)
    with pytest.raises(ValueError, match="k is -1"):
        top_log_probs(ROWS, -1)


def test_bad_target_tokens_are_named():
    tree = build_tree(ROWS, IDS, 4)
    with pytest.raises(ValueError, match=r"target_tokens has shape \(4,\); here it must be \(5,\)"):
        follow_tree(tree, np.zeros(4, np.int64))
    with pytest.raises(TypeError, match="target_tokens has dtype float64"):
        follow_tree(tree, np.zeros(5))


@pytest.mark.parametrize("accepted", [[], [1], [0, 2, 2], [0, 3, 1], [-1, 0]])
def test_a_path_that_is_none_is_refused(accepted):
    with pytest.raises(ValueError, match="must begin with the root 0 and strictly ascend"):
        plan_compaction(np.array(accepted, np.int64), 4)


def test_other_bad_compactions_are_named():
    with pytest.raises(ValueError, match="prefix_length is -1"):
        plan_compaction([0, 1], -1)
    with pytest.raises(TypeError, match="accepted has dtype float64"):
        plan_compaction([0.0, 1.0], 4)
    with pytest.raises(ValueError, match="accepted has shape"):
        plan_compaction([[0, 1]], 4)


FIELDS = {
    "tokens": np.array([1, 2, 3]),
    "parents": np.array([-1, 0, 1], np.int32),
    "depths": np.array([0, 1, 2], np.int32),
    "scores": np.array([0.0, -1.0, -2.0]),
    "ranks": np.array([-1, 0, 0], np.int32),
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parents", [0, 0, 1], "node 0 has parent 0 and depth 0"),
        ("parents", [-1, 1, 0], "node 1 has parent 1 and depth 1"),
        ("parents", [-1, -1, 1], "node 1 has parent -1"),
        ("parents", [-1, 0, 2**31 - 1], "node 2 has parent 2147483647"),
        ("depths", [1, 2, 3], "node 0 has parent -1 and depth 1"),
        ("depths", [0, 1, 1], "node 2 has parent 1 and depth 1"),
        ("ranks", [-1, 0], r"ranks has shape \(2,\)"),
        ("scores", [[0.0, -1.0, -2.0]], r"scores has shape \(1, 3\)"),
    ],
)
def test_fields_that_are_no_tree_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(**(FIELDS | {field: np.array(value, FIELDS[field].dtype)}))


def test_fields_of_other_types_and_empty_trees_are_refused():
    for field, array in FIELDS.items():
        with pytest.raises(TypeError, match=f"{field} has dtype float32"):
            DraftTree(**(FIELDS | {field: array.astype(np.float32)}))
    with pytest.raises(ValueError, match=r"tokens has shape \(0,\)"):
        DraftTree(**{field: array[:0] for field, array in FIELDS.items()})
