"""Off-policy estimates: by hand, by enumeration of every possible episode, and where a model makes them exact."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.episodes.estimators import (
    ESTIMATORS,
    behaviour_value,
    discounted_returns,
    log_weights,
    stack,
)
from tests.episodes.tiny_mdp import REWARD, TARGET, exact_value, exact_values, off_policy, paths, sample_paths

GAMMA, STEPS = 0.9, 4

# Two episodes by hand, γ = 1/2. A: rewards 1, 2, ratios 2, 3, so that w = 2, 6. B: reward 4, ratio 1/2; ends after a step, w = ½, ½.
HAND = stack(
    [np.array([1.0, 2.0]), np.array([4.0])],
    [np.log([2.0, 3.0]), np.log([0.5])],
    model_q=[np.array([0.5, 1.0]), np.array([3.0])],
    model_v=[np.array([2.0, 1.0, 0.0]), np.array([5.0, 0.0])],
)
BY_HAND = {
    # G_A = 1 + ½ · 2 = 2, G_B = 4.
    "is": (6 * 2 + 0.5 * 4) / 2,
    "wis": (6 * 2 + 0.5 * 4) / 6.5,
    "pdis": ((2 * 1 + 0.5 * 6 * 2) + 0.5 * 4) / 2,
    # Step 0: (2·1 + ½·4) / 2.5; step 1: ½ · (6·2 + ½·0) / 6.5, B with the weight that it had.
    "wpdis": 4 / 2.5 + 0.5 * 12 / 6.5,
    # A: 2 + 2 (1 + ½·1 − 0.5) + ½ · 6 (2 + 0 − 1) = 2 + 2 + 3; B: 5 + ½ (4 + 0 − 3) = 5.5.
    "dr": (7 + 5.5) / 2,
    # First states: 3.5; step 0: (2 · 1 + ½ · 1) / 2.5; step 1: ½ · 6 · 1 / 6.5.
    "wdr": 3.5 + 1 + 3 / 6.5,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_episodes_by_hand(name: str) -> None:
    assert ESTIMATORS[name].terms(HAND, 0.5, None).value() == pytest.approx(BY_HAND[name], rel=1e-12)


def test_weights_and_returns_by_hand() -> None:
    np.testing.assert_allclose(np.exp(log_weights(HAND)), [[2, 6], [0.5, 0.5]])
    np.testing.assert_allclose(np.exp(log_weights(HAND, max_weight=3.0)), [[2, 3], [0.5, 0.5]])
    np.testing.assert_allclose(discounted_returns(HAND, 0.5), [2, 4])
    np.testing.assert_array_equal(HAND.running, [[True, True], [True, False]])
    assert behaviour_value(HAND, 0.5).value() == 3.0
    # Weights cut at 3: IS (3·2 + ½·4) / 2, WIS 8 / 3.5.
    assert ESTIMATORS["is"].terms(HAND, 0.5, 3.0).value() == pytest.approx(4.0)
    assert ESTIMATORS["wis"].terms(HAND, 0.5, 3.0).value() == pytest.approx(8 / 3.5)


@pytest.mark.parametrize("name", ["is", "pdis", "dr"])
def test_ordinary_forms_are_unbiased_over_every_possible_episode(name: str) -> None:
    every = paths(STEPS)
    # Any model will do for DR, as long as V = E_π Q; this one is far off.
    wrong = [np.array([[3.0, -1.0], [0.5, 0.2]]) * (t + 1) for t in range(STEPS)]
    terms = ESTIMATORS[name].terms(off_policy(every, GAMMA, wrong), GAMMA, None)
    expectation = sum(path.probability * float(row) for path, (row,) in zip(every, terms.numerator, strict=True))
    assert expectation == pytest.approx(exact_value(STEPS, GAMMA), rel=1e-10)
    assert len(every) > 100


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_form_is_exact_for_the_whole_population(name: str) -> None:
    """A resample that holds each episode as often as it is probable is the whole population: all sums are expectations there."""
    every = paths(STEPS)
    wrong = [np.array([[3.0, -1.0], [0.5, 0.2]]) * (t + 1) for t in range(STEPS)]
    terms = ESTIMATORS[name].terms(off_policy(every, GAMMA, wrong), GAMMA, None)
    (value,) = terms.values(np.array([[path.probability for path in every]]))
    assert value == pytest.approx(exact_value(STEPS, GAMMA), rel=1e-10)


def test_the_enumeration_knows_the_difference() -> None:
    every = paths(STEPS)
    data = off_policy(every, GAMMA)
    (behaviour,) = behaviour_value(data, GAMMA).values(np.array([[path.probability for path in every]]))
    assert abs(behaviour - exact_value(STEPS, GAMMA)) > 0.3


def test_doubly_robust_without_a_model_is_per_decision() -> None:
    chosen = sample_paths(50, STEPS, np.random.default_rng(0))
    nothing = off_policy(chosen, GAMMA, [np.zeros((2, 2))] * STEPS)
    for robust, plain in (("dr", "pdis"), ("wdr", "wpdis")):
        ours, theirs = (ESTIMATORS[name].terms(nothing, GAMMA, None) for name in (robust, plain))
        assert ours.value() == pytest.approx(theirs.value(), rel=1e-12)
    with pytest.raises(ValueError, match="model_q"):
        ESTIMATORS["dr"].terms(off_policy(chosen, GAMMA), GAMMA)


def test_doubly_robust_with_the_true_model_is_the_true_value_of_its_first_state() -> None:
    """Where nothing is left to chance but the policy: V(s₀) from every single episode, whatever its ratios."""
    values = np.array([[2.0, 5.0], [1.0, 3.0]])  # deterministic: state s and action a lead to state a, and pay this
    random = np.random.default_rng(3)
    v = [np.zeros(2)]
    for _ in range(3):
        v.insert(0, (TARGET * (values + GAMMA * v[0])).sum(axis=1))
    rewards, ratios, model_q, model_v, first = [], [], [], [], []
    for _ in range(20):
        state, row = int(random.integers(2)), []
        first.append(v[0][state])
        for t in range(3):
            action = int(random.integers(2))
            row.append(
                (values[state, action], np.log(TARGET[state, action] / 0.5), values[state, action] + GAMMA * v[t + 1][action], v[t][state])
            )
            state = action
        r, ratio, q, own = (np.array(column) for column in zip(*row, strict=True))
        rewards.append(r), ratios.append(ratio), model_q.append(q), model_v.append(np.append(own, 0.0))
    data = stack(rewards, ratios, model_q=model_q, model_v=model_v)
    np.testing.assert_allclose(ESTIMATORS["dr"].terms(data, GAMMA).numerator[:, 0], first, rtol=1e-12)


def test_the_recursion_of_the_paper_is_the_written_out_sum() -> None:
    chosen = sample_paths(10, STEPS, np.random.default_rng(1))
    model = [np.random.default_rng(5).normal(size=(2, 2)) for _ in range(STEPS)]
    data = off_policy(chosen, GAMMA, model)
    assert data.model_q is not None
    assert data.model_v is not None
    found = ESTIMATORS["dr"].terms(data, GAMMA).numerator[:, 0]
    for row, path in enumerate(chosen):
        value = 0.0  # Jiang & Li 2016, equation 10, from the end
        for t in range(len(path.actions) - 1, -1, -1):
            ratio = float(np.exp(data.log_ratio[row, t]))
            value = data.model_v[row, t] + ratio * (data.reward[row, t] + GAMMA * value - data.model_q[row, t])
        assert found[row] == pytest.approx(value, rel=1e-10)


def test_a_cut_episode_is_continued_by_the_model() -> None:
    """With ratios of 1 and Q = V = 10 everywhere, one step of reward 1 and a cut: 10 + (1 + γ·10 − 10) = 1 + 10γ."""
    data = stack([np.array([1.0])], [np.zeros(1)], model_q=[np.array([10.0])], model_v=[np.array([10.0, 10.0])])
    for name in ("dr", "wdr"):
        assert ESTIMATORS[name].terms(data, 0.5, None).value() == pytest.approx(6.0)


def test_weighted_forms_survive_weights_beyond_any_float() -> None:
    log_ratio = [np.full(50, 40.0), np.full(50, 40.0 - np.log(3) / 50), np.full(50, -np.inf)]
    data = stack([np.ones(50), np.zeros(50), np.ones(50)], log_ratio)
    # The weights are 3 : 1 : 0 at the end, so that WIS is 50 · 3/4.
    assert ESTIMATORS["wis"].terms(data, 1.0).value() == pytest.approx(37.5, rel=1e-9)
    assert np.isfinite(ESTIMATORS["is"].terms(data, 1.0, None).value())
    nobody = stack([np.ones(2)], [np.full(2, -np.inf)])
    assert np.isnan(ESTIMATORS["wis"].terms(nobody, 1.0).value())
    assert ESTIMATORS["pdis"].terms(nobody, 1.0, None).value() == 0.0


def test_one_episode_makes_weighted_forms_the_recorded_return() -> None:
    data = stack([np.array([1.0, 2.0])], [np.log([0.1, 7.0])])
    assert ESTIMATORS["wis"].terms(data, 1.0).value() == pytest.approx(3.0)
    assert ESTIMATORS["wpdis"].terms(data, 1.0, None).value() == pytest.approx(3.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_jackknife_leaves_one_out_and_resamples_repeat(name: str) -> None:
    chosen = sample_paths(12, STEPS, np.random.default_rng(2))
    model = [REWARD] * STEPS

    def value(numbers: list[int]) -> float:
        return ESTIMATORS[name].terms(off_policy([chosen[n] for n in numbers], GAMMA, model), GAMMA, None).value()

    terms = ESTIMATORS[name].terms(off_policy(chosen, GAMMA, model), GAMMA, None)
    expected = [value([n for n in range(12) if n != left_out]) for left_out in range(12)]
    np.testing.assert_allclose(terms.jackknife(), expected, rtol=1e-9)
    counts = np.zeros((1, 12))
    counts[0, [3, 5, 7]] = [2, 1, 3]
    assert terms.values(counts)[0] == pytest.approx(value([3, 3, 5, 7, 7, 7]), rel=1e-9)


def test_what_cannot_be_stacked_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        stack([])
    with pytest.raises(ValueError, match="log_ratios must have 0 entries more"):
        stack([np.ones(2)], [np.zeros(3)])
    with pytest.raises(ValueError, match="rewards of episode 1, step 0 is nan"):
        stack([np.ones(2), np.array([np.nan])])
    with pytest.raises(ValueError, match="log_ratios of episode 0, step 1 is inf"):
        stack([np.ones(2)], [np.array([-np.inf, np.inf])])


def test_backward_induction_is_the_matrix_inverse_in_the_limit() -> None:
    """The tests' own yardstick: with many steps, V = (I − γ P_π)⁻¹ r_π."""
    from tests.episodes.tiny_mdp import TRANSITION

    transition = (TARGET[:, :, None] * TRANSITION).sum(axis=1)
    solved = np.linalg.solve(np.eye(2) - GAMMA * transition, (TARGET * REWARD).sum(axis=1))
    np.testing.assert_allclose(exact_values(200, GAMMA)[0], solved, rtol=1e-9)
