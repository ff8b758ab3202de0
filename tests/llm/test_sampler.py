"""The whole sampler: penalties, biases and bans exactly, log probabilities of the raw distribution, pure functions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.llm.sampler import LOGPROB_MIN, NonFiniteLogits, adjust, check, sample, score, uniform
from engine.llm.sequence import Sampling, Sequence

LOGITS = np.array([1.0, 3.0, 3.0, -2.0, 2.0], dtype=np.float32)
NOTHING: frozenset[int] = frozenset()


def changed(sampling: Sampling | None, history: list[int] | None = None, num_prompt: int = 0, **more: object) -> list:
    return adjust(LOGITS, sampling, history or [], num_prompt, more.get("banned", NOTHING)).tolist()


def test_nothing_asked_for_is_the_very_row():
    assert adjust(LOGITS, None, [1], 0, NOTHING) is LOGITS
    assert adjust(LOGITS, Sampling(0.7, 5, 0.9, 0.1), [1], 0, NOTHING) is LOGITS


def test_repetition_counts_prompt_and_output_once():
    """Positive logits are divided, negative ones multiplied (Keskar et al. 2019)."""
    assert changed(Sampling(repetition_penalty=2.0), [1, 3, 3, 4], 2) == [1.0, 1.5, 3.0, -4.0, 1.0]
    assert changed(Sampling(repetition_penalty=0.5), [1, 3], 2) == [1.0, 6.0, 3.0, -1.0, 2.0]


def test_presence_and_frequency_count_the_output_alone():
    history = [0, 1, 2, 2, 2, 4]  # a prompt of two
    assert changed(Sampling(presence_penalty=1.0), history, 2) == [1.0, 3.0, 2.0, -2.0, 1.0]
    assert changed(Sampling(frequency_penalty=0.5), history, 2) == [1.0, 3.0, 1.5, -2.0, 1.5]
    assert changed(Sampling(presence_penalty=1.0, frequency_penalty=-1.0), history, 2) == [1.0, 3.0, 5.0, -2.0, 2.0]


def test_a_bias_is_added_last_and_a_ban_is_final():
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((1, 10.0), (3, -100.0)))
    assert changed(sampling, [1], 1) == [1.0, 11.5, 3.0, -102.0, 2.0]
    assert changed(sampling, [1], 1, banned=frozenset({1})) == [1.0, -math.inf, 3.0, -102.0, 2.0]
    assert LOGITS.tolist() == [1.0, 3.0, 3.0, -2.0, 2.0]  # never in place


def test_a_bias_forces_a_token():
    forced = adjust(LOGITS, Sampling(logit_bias=((3, 100.0),)), [], 0, NOTHING)
    assert sample(forced, Sampling(logit_bias=((3, 100.0),)), 0.5) == 3
    assert {sample(forced, Sampling(1.5), u) for u in np.linspace(1e-9, 1, 500, endpoint=False)} == {3}


def test_everything_excluded_fails_by_name():
    """sglang#13030: every logit at minus infinity killed the device."""
    with pytest.raises(NonFiniteLogits, match="no token is left"):
        sample(adjust(LOGITS, None, [], 0, frozenset(range(5))), None, 0.5)
    one_left = adjust(LOGITS, None, [], 0, frozenset({0, 1, 2, 4}))
    assert sample(one_left, Sampling(1.0, 3, 0.9, 0.5), 0.999) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_refused_before_anything_is_added(bad: float):
    row = LOGITS.copy()
    row[2] = bad
    with pytest.raises(NonFiniteLogits, match="not finite"):
        check(row)
    with pytest.raises(NonFiniteLogits):
        check(np.full(5, -np.inf, np.float32))
    check(LOGITS)


def test_what_ends_a_text_is_banned_until_it_is_long_enough():
    one = Sequence(1, [5], 1, 9, min_tokens=2, stop_ids=frozenset({7}), eos_ids=frozenset({0}))
    assert [one.banned_ids(count) for count in (0, 1, 2)] == [{0, 7}, {0, 7}, frozenset()]
    other = Sequence(1, [5], 1, 9, min_tokens=2, ignore_eos=True, stop_ids=frozenset({7}), eos_ids=frozenset({0}))
    assert other.banned_ids(0) == {7}


def test_log_probabilities_are_of_the_raw_row():
    expected = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    told = score(LOGITS, 3, 3)
    assert told.logprob == pytest.approx(expected[3])
    assert [id for id, _ in told.top] == [1, 2, 4]  # equals by id
    assert [value for _, value in told.top] == pytest.approx(expected[[1, 2, 4]].tolist())
    assert score(LOGITS, 0, 0).top == []
    assert len(score(LOGITS, 0, 20).top) == 5


def test_log_probabilities_are_finite_and_bounded():
    row = np.array([0.0, -np.inf, -1e9], dtype=np.float32)
    told = score(row, 1, 3)
    assert told.logprob == LOGPROB_MIN
    assert [value for _, value in told.top] == [0.0, LOGPROB_MIN, LOGPROB_MIN]


@given(st.integers(0, 10_000), st.floats(0.5, 3.0), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 30))
def test_penalties_against_the_definition(seed: int, repetition: float, presence: float, frequency: float, cut: int):
    dice = np.random.default_rng(seed)
    row = dice.normal(0, 3, 40).astype(np.float32)
    history = dice.integers(0, 40, 30).tolist()
    expected = row.astype(np.float64)
    for id in range(40):
        if id in history:
            expected[id] *= 1 / repetition if expected[id] > 0 else repetition
        count = history[cut:].count(id)
        expected[id] -= presence * (count > 0) + frequency * count
    sampling = Sampling(1.0, 0, 1.0, 0.0, repetition, presence, frequency)
    got = adjust(row, sampling, history, cut, NOTHING)
    assert np.allclose(got, expected, atol=1e-4)
    assert np.array_equal(got, adjust(row, sampling, list(history), cut, NOTHING))


def test_choices_of_one_seed_differ_and_repeat():
    """mlx-vlm#1818: the same seed gives the same text, and several answers to it are not all the same."""
    row = np.zeros(1000, np.float32)
    draws = [[sample(row, Sampling(1.0), uniform(7, choice, at)) for at in range(8)] for choice in range(3)]
    assert draws == [[sample(row, Sampling(1.0), uniform(7, choice, at)) for at in range(8)] for choice in range(3)]
    assert len({tuple(each) for each in draws}) == 3


@pytest.mark.parametrize("top_k", [0, 5, 6, 10**9])
def test_a_top_k_as_large_as_the_vocabulary_cuts_nothing(top_k: int):
    """gemma#789."""
    drawn = {sample(LOGITS, Sampling(2.0, top_k), u) for u in np.linspace(0, 1, 2000, endpoint=False)}
    assert drawn == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-12, 100.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_every_temperature_samples_and_the_least_take_the_best(temperature: float, cut: dict):
    """A quotient that overflowed made every weight NaN, and some other token came out."""
    logits = np.array([3.0, 60_000.0, -60_000.0, 59_999.0], np.float32)
    token = sample(logits, Sampling(temperature, **cut), 0.999)
    assert token == 1 if temperature < 0.01 else token in {1, 3}


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_the_ends_of_the_penalties_leave_every_row_finite(penalty: float):
    logits = np.array([-1e30, 1e30, 0.0], np.float32)
    adjusted = adjust(logits, Sampling(1.0, repetition_penalty=penalty), [0, 1, 2], 1, ())
    assert np.isfinite(adjusted).all()
    assert sample(adjusted, Sampling(1.0), 0.5) == 1
