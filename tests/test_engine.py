import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ddtree.check import assert_close, assert_equal
from ddtree.checkpoint import CheckpointError
from ddtree.engine import Engine, Sampling
from ddtree.kdtr import load
from ddtree.layers import KEY_BLOCK
from ddtree.models import prefill
from ddtree.tree import top_log_probs
from random_models import FIXTURES, PAIR, PAIRS, random_engine

NEAR_TIE = 1e-4  # log-probability; the recorded runs' own noise bound (metadata of the fixture)
RUNS = [(pair, prompt, budget) for pair in PAIRS for prompt in range(4) for budget in (15, 64, 256)]


@functools.cache
def engine(pair="qwen3"):
    return Engine.load(FIXTURES / f"pycode_{pair}" / "target", FIXTURES / f"pycode_{pair}" / "draft")


@functools.cache
def oracle(pair="qwen3"):
    return load(FIXTURES / f"e2e_{pair}.kdtr")


@functools.cache
def plain_run(prompt, pair="qwen3"):
    return engine(pair).generate_autoregressive(oracle(pair)[f"p{prompt}.prompt"], 96)


def recorded_rounds(pair, run, name):
    return np.split(oracle(pair)[f"{run}.{name}"], oracle(pair)[f"{run}.{name}_splits"][:-1])


def paths_of(tokens, parents):
    """Root-to-node token paths of nodes 1..n, in node order."""
    paths = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[parents[node]], int(tokens[node])))
    return paths[1:]


def path_score(path, log_probs):
    return float(sum(np.float64(log_probs[depth, token]) for depth, token in enumerate(path)))


def check_tree(tree, tokens, parents, logits):
    """Same node set but for near-ties at the budget's edge; same order wherever scores differ by more."""
    log_probs, ids = top_log_probs(logits, logits.shape[1])
    by_id = np.zeros_like(log_probs)
    np.put_along_axis(by_id, ids, log_probs, axis=1)
    ours, theirs = paths_of(tree.tokens, tree.parents), paths_of([0, *tokens], parents)
    assert len(ours) == len(theirs)
    edge = min(path_score(path, by_id) for path in ours)
    for path in set(ours) ^ set(theirs):
        assert abs(path_score(path, by_id) - edge) <= NEAR_TIE, f"{path} is not at the edge of the budget"
    scores = np.array([path_score(path, by_id) for path in theirs])
    later = np.maximum.accumulate(scores[::-1])[::-1]
    assert np.all(scores >= later - NEAR_TIE), "the recorded order is not ours where scores differ"


@pytest.mark.parametrize("pair", PAIRS)
def test_prefill_logits_and_features_agree_with_transformers(pair):
    model, cache = engine(pair).target, engine(pair).target.new_cache()
    prompt, taps = oracle(pair)["p0.prompt"], engine(pair).drafter.config.target_layer_ids
    result = model.forward(prompt, np.arange(len(prompt)) - 1, cache, taps)
    assert_close(result.logits, oracle(pair)["p0.prefill_logits"], atol=2e-4, name="prefill logits")
    assert_close(result.features, oracle(pair)["p0.target_hidden"], atol=2e-4, name="features")


@pytest.mark.parametrize("prompt", range(4))
@pytest.mark.parametrize("pair", PAIRS)
def test_plain_decoding_equals_the_recorded_plain_decoding(pair, prompt):
    recorded = oracle(pair)[f"p{prompt}.ar_tokens"].astype(np.int64)
    assert_equal(plain_run(prompt, pair).tokens, recorded, name="plain tokens")


@pytest.mark.parametrize(("pair", "prompt", "budget"), RUNS)
def test_run_equals_the_recorded_run_token_by_token_and_tree_by_tree(pair, prompt, budget, monkeypatch):
    run, logits, recording_of = f"p{prompt}.b{budget}", [], oracle(pair)
    original = engine(pair).drafter.draft

    def recording(*arguments):
        logits.append(original(*arguments))
        return logits[-1]

    monkeypatch.setattr(engine(pair).drafter, "draft", recording)
    # the recorded loop counts committed positions, so it runs while there are fewer than 97 tokens, then cuts to 96
    result = engine(pair).generate(recording_of[f"p{prompt}.prompt"], 97, budget)
    assert_equal(result.tokens[:96], recording_of[f"{run}.tokens"].astype(np.int64), name="tokens")
    assert_equal(result.tokens[:96], plain_run(prompt, pair).tokens, name="plain decoding")
    recorded = recording_of[f"{run}.acceptance_lengths"].astype(np.int64)
    assert_equal(result.acceptance_lengths, recorded, name="acceptance lengths")
    tokens, parents, accepted = (recorded_rounds(pair, run, name) for name in ("node_token_ids", "parents", "accepted"))
    for i, step in enumerate(result.rounds):
        ours = paths_of(step.tree.tokens, step.tree.parents)
        theirs = paths_of([0, *tokens[i]], parents[i])
        accepted_path = theirs[accepted[i][-1] - 1] if accepted[i][-1] else ()
        assert (ours[step.accepted[-1] - 1] if step.accepted[-1] else ()) == accepted_path
        check_tree(step.tree, tokens[i], parents[i], logits[i])
    if budget == 64:
        assert_close(
            np.stack(logits), recording_of[f"{run}.draft_logits"], atol=2e-3, name="draft logits of every round"
        )


@given(seed=st.integers(0, 100_000), budget=st.integers(1, 40), greedy=st.booleans())
@settings(max_examples=150)
def test_tree_output_equals_plain_output_for_random_models(seed, budget, greedy):
    pair, rng = random_engine(seed), np.random.default_rng(seed)
    prompt = rng.integers(0, 9, size=int(rng.integers(1, KEY_BLOCK + 9)))
    sampling = Sampling() if greedy else Sampling(temperature=1.3, top_k=5, top_p=0.9, seed=seed)
    tree = pair.generate(prompt, 24, budget, sampling)
    plain = pair.generate_autoregressive(prompt, 24, sampling)
    assert_equal(tree.tokens, plain.tokens, name="tree and plain tokens")
    assert sum(len(step.tokens) for step in tree.rounds) == 23
    assert all(len(step.tree.tokens) <= budget + 1 for step in tree.rounds)


@given(seed=st.integers(0, 100_000))
@settings(max_examples=25)
def test_logits_have_the_same_bits_in_prefill_plain_decoding_and_a_tree(seed):
    rng = np.random.default_rng(seed)
    model = random_engine(seed).target
    text = rng.integers(0, 9, size=int(rng.integers(2, KEY_BLOCK + 20)))
    cut = int(rng.integers(1, len(text)))
    whole = model.forward(text, np.arange(len(text)) - 1, model.new_cache()).logits
    cache = model.new_cache()
    prefill(model, text[:cut], cache)
    noise = rng.integers(0, 9, size=5)  # siblings that must not matter
    parents = [*range(-1, len(text) - cut - 1), *([-1] * 5)]
    tree = model.forward([*text[cut:], *noise], parents, cache)
    assert_equal(tree.logits[: len(text) - cut], whole[cut:], name="tree and prefill")
    for position in range(cut, len(text)):
        one = model.forward(text[position : position + 1], [-1], cache)
        assert_equal(one.logits[0], whole[position], name=f"plain decoding at {position}")
        cache.commit(one.new_kv, [0])


@given(seed=st.integers(0, 100_000), prompt=st.integers(1, 20), budget=st.integers(1, 20))
@settings(max_examples=25)
def test_a_text_may_fill_the_models_positions_to_the_last(seed, prompt, budget):
    pair = random_engine(seed, positions=24)
    tree = pair.generate(np.arange(prompt) % 9, 24 - prompt, budget)
    assert_equal(tree.tokens, pair.generate_autoregressive(np.arange(prompt) % 9, 24 - prompt).tokens, name="tokens")
    assert len(tree.tokens) == 24 - prompt


def test_budget_zero_is_plain_decoding():
    prompt = oracle()["p1.prompt"]
    result = engine().generate(prompt, 12, budget=0)
    assert_equal(result.tokens, plain_run(1).tokens[:12], name="budget 0")
    assert result.acceptance_lengths.tolist() == [1] * 11


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_max_new_tokens_is_exact(limit):
    assert len(engine().generate(oracle()["p0.prompt"], limit, 15).tokens) == limit


def test_stop_rule_ends_tree_and_plain_text_at_the_same_token():
    def newline(tokens):
        return tokens[-1] == 10

    prompt = oracle()["p2.prompt"]
    tree, plain = (
        engine().generate(prompt, 96, 64, stop=newline),
        engine().generate_autoregressive(prompt, 96, stop=newline),
    )
    assert tree.stopped and plain.stopped and tree.tokens[-1] == 10
    assert_equal(tree.tokens, plain.tokens, name="stopped text")


def test_an_end_token_is_kept_and_ends_the_text(monkeypatch):
    import dataclasses

    target = engine().target
    monkeypatch.setattr(
        target, "config", dataclasses.replace(target.config, eos_token_ids=(int(plain_run(0).tokens[7]),))
    )
    result = engine().generate(oracle()["p0.prompt"], 96, 64)
    first = plain_run(0).tokens.tolist().index(int(plain_run(0).tokens[7]))
    assert_equal(result.tokens, plain_run(0).tokens[: first + 1], name="up to the end token")


def test_on_tokens_sees_the_whole_text_in_pieces():
    pieces, read = [], []
    result = engine().generate(oracle()["p0.prompt"], 20, 15, on_tokens=pieces.append, on_prefill=read.append)
    assert sum(read) == len(oracle()["p0.prompt"]) and len(read) == 2
    assert_equal(np.concatenate(pieces), result.tokens, name="streamed tokens")
    assert len(pieces) == len(result.rounds) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "the prompt has no tokens"),
        (([1], 5, -1), "budget is -1"),
        (([1], -5, 1), "max_new_tokens is -5"),
        (([1], 2048), "exceed the model's 2048 positions"),
        (([260],), "token id 260 is outside the vocabulary of 260"),
        (([-1],), "token id -1 is outside"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        engine().generate(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import os",), "prompt_ids is"),
        (([1.5],), "prompt_ids is float64"),
        (([True],), "prompt_ids is bool"),
        (([[1, 2]],), r"shape \(1, 2\)"),
        (([1], 8.0), "max_new_tokens is 8.0"),
        (([1], 8, 2.5), "budget is 2.5"),
        (([1], True), "max_new_tokens is True"),
    ],
)
def test_input_of_another_type_is_refused_by_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        engine().generate(*arguments)


@pytest.mark.parametrize(("tokens", "parents"), [([1, 2, 3], [-1]), ([1], [-1, 0]), ([], [])])
def test_a_pass_takes_one_parent_for_each_token(tokens, parents):
    model = random_engine(0).target
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens and {len(parents)} parents"):
        model.forward(tokens, parents, model.new_cache())


def test_an_absurd_budget_is_refused():
    with pytest.raises(ValueError, match="budget is 3000000; a tree has at most"):
        random_engine(0).generate([1], 4, 3_000_000)


def test_positions_draw_different_random_numbers_in_a_run():
    """At a very high temperature a run that reused one number would repeat one token."""
    result = random_engine(3).generate([1, 2, 3], 40, 4, Sampling(temperature=1e6, seed=1))
    assert len(set(result.tokens.tolist())) > 4


def test_tokens_of_the_cut_last_round_are_not_counted_twice():
    result = engine().generate(oracle()["p0.prompt"], 12, 15)
    assert result.acceptance_lengths.sum() > 11
    assert result.tokens_per_round == 11 / len(result.rounds)


def test_what_is_not_built_is_refused_by_name():
    with pytest.raises(ValueError, match="device is 'cuda'; this engine runs on 'cpu'"):
        Engine.load(PAIR / "target", PAIR / "draft", device="cuda")
    with pytest.raises(CheckpointError, match="no drafter was loaded"):
        Engine(engine().target).generate([1], 4, budget=4)
    assert len(Engine(engine().target).generate_autoregressive([1], 4).tokens) == 4


def test_names_that_moved_to_sampling_are_still_there():
    from ddtree import engine as module
    from ddtree import sampling

    for name in ("GREEDY", "Sampling", "check_count", "choose_token", "keep_probable", "uniform"):
        assert getattr(module, name) is getattr(sampling, name)
