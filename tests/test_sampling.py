import numpy as np
import pytest

from ddtree.check import assert_close
from ddtree.sampling import Sampling, choose_token, uniform


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 2**64},
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
    ],
)
def test_sampling_refuses_values_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"seed": 1.5}, {"top_k": 1.5}, {"seed": True}, {"temperature": "x"}, {"temperature": True}, {"top_p": [1]}],
)
def test_sampling_refuses_other_types(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_tiny_temperature_is_greedy():
    logits = np.array([0.0, 1.0, 0.5], np.float32)
    assert {choose_token(logits, position, Sampling(1e-320)) for position in range(50)} == {1}


def test_sampling_draws_the_model_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    draws = [choose_token(logits, position, Sampling(temperature=1.0, seed=3)) for position in range(20_000)]
    share = np.bincount(draws, minlength=4) / 20_000
    assert_close(share, np.array([0.5, 0.3, 0.15, 0.05]), atol=0.015, name="shares (4 standard deviations)")


def test_top_k_and_top_p_keep_the_most_probable():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for rule, allowed in (
        (Sampling(1.0, top_k=2), {0, 1}),
        (Sampling(1.0, top_p=0.81), {0, 1, 2}),
        (Sampling(1.0, top_p=0.4), {0}),
    ):
        assert {choose_token(logits, position, rule) for position in range(400)} == allowed


def test_a_masked_token_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    assert {choose_token(logits, position, Sampling(5.0)) for position in range(500)} == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_target_that_gives_no_number_is_an_error(bad):
    with pytest.raises(ValueError, match="largest logit for position 4"):
        choose_token(np.array([0.0, bad], np.float32), 4, Sampling())


def test_random_numbers_depend_on_seed_and_position_alone():
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
