import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree.check import assert_close, assert_equal
from ddtree.layers import linear, swiglu
from ddtree.moe import Routing, choose_experts, moe, route, router_scores, run_experts

SIZES = {"gate_proj": (12, 10), "up_proj": (12, 10), "down_proj": (10, 12)}


class Counted:
    """A packed weight that counts how often it is unpacked."""

    def __init__(self, weight):
        self.weight, self.shape, self.unpacked = weight, weight.shape, 0

    def dequantise(self):
        self.unpacked += 1
        return self.weight


def random_routing(rng):
    groups = int(rng.integers(1, 5))
    experts, top_groups = groups * int(rng.integers(1, 6)), int(rng.integers(1, groups + 1))
    return Routing(
        experts, int(rng.integers(1, experts // groups * top_groups + 1)), bool(rng.integers(2)), groups, top_groups,
        bool(rng.integers(2)), float(rng.uniform(0.5, 3)),
    )  # fmt: skip


def random_block(rng, routing, shared=True):
    w = {
        f"mlp.experts.{e}.{name}": rng.standard_normal(shape, dtype=np.float32)
        for e in range(routing.experts)
        for name, shape in SIZES.items()
    }
    w["mlp.gate"] = rng.standard_normal((routing.experts, 10), dtype=np.float32)
    if not routing.softmax:
        w["mlp.gate.e_score_correction_bias"] = rng.standard_normal(routing.experts, dtype=np.float32)
    if shared:
        w |= {f"mlp.shared_experts.{name}": rng.standard_normal(s, dtype=np.float32) for name, s in SIZES.items()}
    return w


def slow_route(logits, bias, routing):
    """One token at a time, in float64 and plain Python: the published description word for word."""
    chosen, weighed = [], []
    for row in logits.astype(np.float64):
        powers = np.exp(row - row.max())
        scores = powers / powers.sum() if routing.softmax else 1 / (1 + np.exp(-row))
        corrected = scores if bias is None else scores + bias.astype(np.float64)
        size = routing.experts // routing.groups
        groups = [corrected[g * size : (g + 1) * size] for g in range(routing.groups)]
        strength = [sum(sorted(group)[-2:]) for group in groups]
        allowed = sorted(range(routing.groups), key=lambda g: -strength[g])[: routing.top_groups]
        candidates = [e for e in range(routing.experts) if e // size in allowed]
        picked = sorted(sorted(candidates, key=lambda e: -corrected[e])[: routing.top_k])
        total = scores[picked].sum() if routing.normalise else 1.0
        chosen.append(picked)
        weighed.append(scores[picked] / total * routing.scale)
    return np.array(chosen), np.array(weighed)


@given(seed=st.integers(0, 100_000), n=st.integers(1, 30))
def test_routing_is_the_published_description(seed, n):
    rng = np.random.default_rng(seed)
    routing = random_routing(rng)
    logits = rng.standard_normal((n, routing.experts), dtype=np.float32) * 2
    bias = None if routing.softmax else rng.standard_normal(routing.experts, dtype=np.float32)
    experts, weights = route(logits, bias, routing)
    slow_experts, slow_weights = slow_route(logits, bias, routing)
    assert_equal(experts, slow_experts, name="experts")
    assert_close(weights, slow_weights, atol=2e-6, name="weights of at most 3, float32 rounding")


def test_the_correction_bias_selects_and_does_not_weigh():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    scores = router_scores(logits, softmax=False)[0]
    experts, weights = route(logits, np.array([0, 0, 0, 5], np.float32), Routing(4, 2, normalise=False))
    assert experts.tolist() == [[0, 3]]
    assert_equal(weights[0], scores[[0, 3]], name="weights")


def test_a_group_of_middling_experts_beats_a_group_with_one_star_by_its_two_best():
    logits = np.array([[3.0, -9.0, 0.5, 0.5]], np.float32)
    assert route(logits, None, Routing(4, 1, groups=2, top_groups=1))[0].tolist() == [[2]]
    assert route(logits, None, Routing(4, 1))[0].tolist() == [[0]]


def test_an_expert_outside_the_groups_is_never_chosen_even_if_all_inside_are_negative():
    scores = np.array([[0.1, 0.1, 0.2, 0.2]], np.float32)
    bias = np.full(4, -1.0, np.float32)
    assert choose_experts(scores, bias, Routing(4, 2, groups=2, top_groups=1)).tolist() == [[2, 3]]


def test_equal_scores_go_to_the_lower_expert():
    assert route(np.zeros((2, 6), np.float32), None, Routing(6, 3))[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("softmax", [False, True])
def test_scores_of_extreme_logits_are_finite_and_warn_nothing(softmax):
    scores = router_scores(np.array([[-1e30, -200.0, 0.0, 200.0, 1e30]], np.float32), softmax)
    assert np.all((scores >= 0) & (scores <= 1)) and scores[0, -1] == 1


@given(seed=st.integers(0, 100_000), n=st.integers(1, 40))
def test_a_row_of_the_block_has_the_same_bits_in_every_batch(seed, n):
    rng = np.random.default_rng(seed)
    routing = random_routing(rng)
    w, x = random_block(rng, routing, bool(rng.integers(2))), rng.standard_normal((n, 10), dtype=np.float32)
    whole = moe(x, w, routing)
    for row in range(n):
        assert_equal(moe(x[row : row + 1], w, routing)[0], whole[row], name=f"row {row} alone")
    order = rng.permutation(n)
    assert_equal(moe(x[order], w, routing), whole[order], name="in another order")


@given(seed=st.integers(0, 100_000))
def test_the_block_is_the_weighted_sum_of_all_experts(seed):
    rng = np.random.default_rng(seed)
    routing = random_routing(rng)
    w, x = random_block(rng, routing), rng.standard_normal((7, 10), dtype=np.float32)
    experts, weights = route(linear(x, w["mlp.gate"]), w.get("mlp.gate.e_score_correction_bias"), routing)
    total = swiglu(x, w, "mlp.shared_experts").astype(np.float64)
    for token in range(7):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            total[token] += weight * swiglu(x[token], w, f"mlp.experts.{expert}").astype(np.float64)
    # sums of up to 6 values of a few hundred
    assert_close(moe(x, w, routing), total, atol=1e-3, name="block")


def test_only_the_experts_in_use_are_unpacked_and_each_once():
    rng, routing = np.random.default_rng(0), Routing(8, 2)
    plain = random_block(rng, routing, shared=False)
    w = {name: Counted(weight) if "experts" in name else weight for name, weight in plain.items()}
    x = rng.standard_normal((5, 10), dtype=np.float32)
    experts = np.array([[1, 3], [1, 3], [3, 6], [1, 6], [1, 3]])
    weights = rng.random((5, 2), dtype=np.float32)
    assert_equal(run_experts(x, w, experts, weights), run_experts(x, plain, experts, weights), name="packed")
    for name, weight in w.items():
        if "experts" in name:
            assert weight.unpacked == (name.split(".")[2] in "136"), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 8, "top_k": 9}, "top_k is 9; the chosen groups have 8 experts"),
        ({"experts": 8, "top_k": 0}, "top_k is 0"),
        ({"experts": 8, "top_k": 3, "groups": 4, "top_groups": 1}, "the chosen groups have 2 experts"),
        ({"experts": 8, "top_k": 1, "groups": 3}, "8 experts in 3 groups"),
        ({"experts": 8, "top_k": 1, "groups": 2, "top_groups": 3}, "3 of them chosen"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Routing(**wrong)
