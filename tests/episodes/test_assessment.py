"""Estimates with intervals, weights and refusals: simulated coverage, hand arithmetic, and what must be refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from embodied_rl.episodes.assessment import (
    Assumptions,
    Estimate,
    assess,
    assess_behaviour,
    assess_model,
    choose_ranking,
    describe_weights,
    note_contradictions,
    ratio_mismatch,
    share_of_best,
)
from embodied_rl.episodes.estimators import ESTIMATORS, Interval, OffPolicyEpisodes, resample_counts, stack
from embodied_rl.errors import UserError
from tests.episodes.tiny_mdp import REWARD, TRANSITION, exact_value, exact_values, off_policy, sample_paths

GAMMA, STEPS = 0.9, 4
GIVEN = Assumptions(gamma=GAMMA, num_samples=400, reward_range=(-0.5, 2.0), horizon=STEPS)
NAMES = tuple(ESTIMATORS)


def played(count: int, seed: int, *, num_steps: int = STEPS, model: bool = True) -> OffPolicyEpisodes:
    values = exact_values(num_steps, GAMMA)
    # Nearly the true Q of a state with t steps behind it.
    tables = [REWARD + 0.8 * GAMMA * TRANSITION @ values[t + 1] for t in range(num_steps)] if model else None
    return off_policy(sample_paths(count, num_steps, np.random.default_rng(seed)), GAMMA, tables)


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    truth, runs = exact_value(2, GAMMA), 200
    given = dataclasses.replace(GIVEN, horizon=2, num_samples=300)
    held = {name: [0, 0] for name in NAMES}
    for seed in range(runs):
        for estimate in assess(played(120, seed, num_steps=2), NAMES, dataclasses.replace(given, seed=seed)):
            assert estimate.value is not None
            assert estimate.bootstrap is not None
            held[estimate.estimator][0] += estimate.bootstrap.covers(truth)
            if estimate.concentration is not None:
                held[estimate.estimator][1] += estimate.concentration.covers(truth)
                assert estimate.concentration.low < estimate.concentration.high
    for name, (bootstrap, concentration) in held.items():
        # 95% aimed at; standard error 1.5% of 200 runs, and a bootstrap of 120 skewed episodes falls a little short.
        assert 0.88 <= bootstrap / runs <= 0.995, (name, bootstrap)
        if name in ("is", "pdis"):
            assert concentration / runs >= 0.95, (name, concentration)


def test_concentration_becomes_narrow_with_many_episodes() -> None:
    given = dataclasses.replace(GIVEN, num_samples=20)
    few, many = (assess(played(count, 0, model=False), ["pdis"], given)[0].concentration for count in (50, 10_000))
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.35 * (few.high - few.low)
    assert many.covers(exact_value(STEPS, GAMMA))
    # The widest that is possible: all rewards at their ends, 4 steps.
    total = sum(GAMMA**t for t in range(STEPS))
    assert few.low >= -0.5 * total - 1e-9
    assert few.high <= 2.0 * total + 1e-9


def test_the_range_of_returns_by_hand() -> None:
    assert Assumptions(gamma=0.5, reward_range=(1.0, 2.0), horizon=3).return_range() == (0.0, 3.5)  # an episode may end at once
    assert Assumptions(gamma=0.5, reward_range=(-1.0, 2.0)).return_range() == (-2.0, 4.0)
    assert Assumptions(gamma=1.0, reward_range=(0.0, 1.0)).return_range() is None
    assert Assumptions(gamma=0.5).return_range() is None


def test_steps_after_the_longest_episode_count_for_the_per_decision_bound() -> None:
    """Three episodes of one step with reward −1 where a hundred steps were possible: what was not played earned 0."""
    data = stack([np.array([-1.0])] * 3000, [np.zeros(1)] * 3000)
    given = Assumptions(gamma=1.0, reward_range=(-1.0, 0.0), horizon=100, num_samples=20)
    (estimate,) = assess(data, ["pdis"], given)
    assert estimate.value == -1.0
    assert estimate.concentration is not None
    # From above: 0 − mean(1) is exact but for the margin. From below: −100 + (0 + 99) likewise.
    margin = 7 * 100 * math.log(2 / (0.025 / 8)) / (3 * 2999)
    assert estimate.concentration.high == pytest.approx(-1 + margin)
    assert estimate.concentration.low == pytest.approx(-1 - margin)


def test_a_false_range_of_rewards_is_told() -> None:
    with pytest.raises(UserError, match=r"reward_range=0,1 is wrong: recorded rewards reach from -0.5 to 2"):
        assess(played(200, 0), ["is"], dataclasses.replace(GIVEN, reward_range=(0.0, 1.0)))


def test_weights_are_described_by_hand() -> None:
    # Weights after the steps: 2, 6 and ½, (½ carried); γ = 1. ESS of whole episodes: 6.5² / 36.25.
    data = stack([np.ones(2), np.ones(1)], [np.log([2.0, 3.0]), np.log([0.5])])
    whole = describe_weights(data, Assumptions(gamma=1.0), per_decision=False)
    assert whole.ess == pytest.approx(6.5**2 / 36.25)
    assert (whole.largest, whole.mean) == pytest.approx((6.0, 3.25))
    assert whole.largest_share == pytest.approx(6 / 6.5)
    # Step 0 (two episodes running): 2.5² / 4.25; step 1 (one): as above.
    each = describe_weights(data, Assumptions(gamma=1.0), per_decision=True)
    assert each.ess == pytest.approx((2 * 2.5**2 / 4.25 + 6.5**2 / 36.25) / 3)
    # Cut at 3: weights 3 and ½; of three steps one was above.
    cut = describe_weights(data, Assumptions(gamma=1.0, max_weight=3.0), per_decision=False)
    assert cut.ess == pytest.approx(3.5**2 / 9.25)
    assert cut.cut_share == pytest.approx(1 / 3)
    assert cut.largest == pytest.approx(6.0)


def test_a_small_effective_sample_size_is_refused_and_says_so() -> None:
    rng = np.random.default_rng(0)
    far = stack([np.ones(60)] * 50, list(rng.normal(-0.3, 0.8, (50, 60))))
    (estimate,) = assess(far, ["wis"], Assumptions(gamma=1.0, num_samples=100))
    assert estimate.value is None
    assert estimate.bootstrap is None
    assert estimate.weights is not None
    assert estimate.weights.ess < 10
    assert f"the effective sample size is {estimate.weights.ess:.1f} of 50 episodes, below min_ess=10" in estimate.refused
    (forced,) = assess(far, ["wis"], Assumptions(gamma=1.0, num_samples=100, min_ess=0))
    assert forced.value == pytest.approx(60.0)
    # π does the first step more often than μ and the second never: nothing speaks against the ratios, whose mean is 1.
    nothing = stack([np.ones(2)] * 3, [np.array([np.log(2.0), -np.inf])] * 3)
    for estimate in assess(nothing, ["wis", "wpdis"], Assumptions(num_samples=10, min_ess=0)):
        assert "all weights are 0 at some step" in estimate.refused


def test_ratios_that_do_not_average_to_one_are_refused() -> None:
    rng = np.random.default_rng(1)
    # μ never does what π does half of the time: E_μ[ρ] = 1/2.
    half = stack([np.ones(10)] * 100, list(np.log(rng.choice([0.25, 0.75], size=(100, 10)))))
    assert "support mismatch: the mean single-step ratio is 0.49" in ratio_mismatch(half)
    found = assess(half, NAMES, Assumptions(gamma=1.0, num_samples=100))
    assert all(estimate.value is None and "support mismatch" in estimate.refused for estimate in found)
    # Log-probabilities that are too small by a half at every step.
    wrong = stack([np.ones(10)] * 100, list(np.log(rng.choice([1.0, 2.0], size=(100, 10)))))
    assert "the recorded log-probabilities are not the acting policy's" in ratio_mismatch(wrong)
    assert ratio_mismatch(played(300, 0)) == ""
    # Few, heavy-tailed ratios of mean 1 prove nothing.
    assert ratio_mismatch(stack([np.ones(2)] * 5, list(rng.normal(-0.5, 1.0, (5, 2))))) == ""


def test_a_reason_given_from_outside_refuses_all_weights_and_no_model_refuses_robust_forms() -> None:
    told = assess(played(300, 0), NAMES, GIVEN, unsupported="no log-probabilities")
    assert [estimate.refused for estimate in told] == ["no log-probabilities"] * len(NAMES)
    for estimate in assess(played(300, 0, model=False), NAMES, GIVEN):
        assert (estimate.value is None) == (estimate.estimator in ("dr", "wdr"))
        assert ("needs the fitted model" in estimate.refused) == (estimate.value is None)


def test_cut_weights_are_reported() -> None:
    (estimate,) = assess(played(200, 0), ["is"], dataclasses.replace(GIVEN, max_weight=2.0))
    assert estimate.weights is not None
    assert estimate.weights.cut_share > 0
    assert estimate.notes == (f"weights clipped at 2 ({estimate.weights.cut_share:.1%} of the steps): biased",)


def test_the_recorded_policys_own_value() -> None:
    data = played(500, 2)
    estimate = assess_behaviour(data, GIVEN)
    returns = [sum(GAMMA**t * r for t, r in enumerate(row[:length])) for row, length in zip(data.reward, data.length, strict=True)]
    assert estimate.value == pytest.approx(np.mean(returns))
    assert estimate.bootstrap is not None
    half = 1.96 * np.std(returns) / math.sqrt(500)
    assert (estimate.bootstrap.low, estimate.bootstrap.high) == pytest.approx(
        (np.mean(returns) - half, np.mean(returns) + half), abs=0.3 * half
    )
    assert estimate.concentration is not None
    assert estimate.concentration.low < estimate.bootstrap.low


def test_a_models_estimate_and_its_refusal() -> None:
    estimate = assess_model(np.array([1.0, 2.0, 3.0]), GIVEN)
    assert estimate.value == 2.0
    assert estimate.bootstrap is not None
    # t with two degrees of freedom, standard deviation 1, and a third of its variance for the mean of three.
    assert estimate.bootstrap.high == pytest.approx(2 + 4.3027 * math.sqrt(4 / 3), abs=1e-4)
    assert assess_model(np.zeros(0), GIVEN, refused="why").to_dict()["refused"] == "why"


def test_an_interval_holds_the_error_of_the_fit_where_refits_tell_it() -> None:
    """Weights are cut until the estimate is what the model says of first states, 10 and an error that all episodes share: a bootstrap of
    the episodes cannot know it."""
    rng, held, runs = np.random.default_rng(0), {"with": 0, "without": 0}, 300
    given = Assumptions(gamma=1.0, num_samples=300, max_weight=1e-9, min_ess=0.0)

    def model(error: float) -> OffPolicyEpisodes:
        noise = 0.1 * np.arange(-20, 20)
        zeros = [np.zeros(1)] * 40
        return stack(zeros, zeros, model_q=zeros, model_v=[np.array([10.0 + error + part, 0.0]) for part in noise - noise.mean()])

    for seed in range(runs):
        error = rng.normal()
        refits = [model(error + rng.normal()) for _ in range(8)]
        # The model at hand is the mean of the members, each an error of its own away from it.
        for name, others in (("with", refits), ("without", [])):
            (estimate,) = assess(model(error), ["dr"], dataclasses.replace(given, seed=seed), refits=others)
            assert estimate.bootstrap is not None
            held[name] += estimate.bootstrap.covers(10.0)
            assert any("does not include the error of the fitted values" in note for note in estimate.notes) == (name == "without")
    # 0.95, with a standard error of 0.013; the episodes' spread is 1.15, of their mean 0.18, against an error of 1.
    assert 0.91 <= held["with"] / runs <= 0.995
    assert held["without"] / runs < 0.5


def test_intervals_beside_each_other_are_told() -> None:
    def estimate(name: str, low: float, high: float) -> Estimate:
        return Estimate(name, (low + high) / 2, Interval(low, high, 0.95, "by hand"))

    found = note_contradictions([estimate("wpdis", 30, 50), estimate("fqe", 20, 29), estimate("dr", 25, 31), Estimate("wdr", None)])
    assert [len(each.notes) for each in found] == [0, 1, 0, 0]
    assert found[1].notes[0].startswith("contradicts wpdis (30 to 50)")


def test_ranking_takes_the_first_estimator_that_all_have() -> None:
    def estimates(**values: float | None) -> list[Estimate]:
        return [Estimate(name, value) for name, value in values.items()]

    table = {"a": estimates(wdr=None, fqe=1.0, wis=2.0), "b": estimates(wdr=3.0, fqe=2.0, wis=1.0)}
    assert choose_ranking(table, ("wdr", "fqe", "wis")) == "fqe"
    assert choose_ranking(table, ("wis", "fqe")) == "wis"
    assert choose_ranking({"a": estimates(wdr=None), "b": estimates(wdr=1.0)}, ("wdr",)) is None
    assert choose_ranking({}, ("wdr",)) is None


def test_best_shares_by_hand_and_paired() -> None:
    # Four resamples: a wins two, b one, and they tie once; c is never known.
    a, b, c = np.array([3.0, 3.0, 1.0, 2.0]), np.array([1.0, 2.0, 2.0, 2.0]), np.full(4, np.nan)
    np.testing.assert_allclose(share_of_best([a, b, c]), [2.5 / 4, 1.5 / 4, 0.0])
    # Shared resamples: a policy that is better by a little in every episode is better in every resample.
    returns = np.random.default_rng(0).normal(0, 100, 50)
    counts = resample_counts(50, 500, 0)
    np.testing.assert_allclose(share_of_best([counts @ returns, counts @ (returns + 0.1)]), [0.0, 1.0])


def test_json_has_no_samples_and_no_infinity() -> None:
    data = stack([np.ones(30)] * 40, [np.full(30, 30.0)] * 40)
    (estimate,) = assess(data, ["wis"], Assumptions(gamma=1.0, num_samples=100, min_ess=0))
    assert "recorded log-probabilities" in estimate.refused
    weights = describe_weights(data, GIVEN, per_decision=False)
    assert weights.largest == math.inf
    told = dataclasses.replace(estimate, weights=weights).to_dict()
    assert told["weights"]["largest"] is None
    assert "samples" not in told


def test_rewards_at_the_stated_bound_count_and_others_are_told_for_every_estimate() -> None:
    """The float32 of 0.1 is 1.5e-9 above 0.1: fifty of them sum up to more than fifty times the stated bound."""
    data = stack([np.full(50, np.float32(0.1)).astype(np.float64)] * 12, [np.zeros(50)] * 12)
    given = Assumptions(gamma=1.0, num_samples=20, reward_range=(-0.1, 0.1), horizon=50)
    for estimate in (assess_behaviour(data, given), *assess(data, ["is", "pdis"], given)):
        assert estimate.concentration is not None, estimate.estimator
        assert estimate.concentration.covers(5.0)
    with pytest.raises(UserError, match=r"reward_range=0,0\.05 is wrong: recorded rewards reach from 0\.1 to 0\.1"):
        assess_behaviour(data, dataclasses.replace(given, reward_range=(0.0, 0.05)))
    shorter = assess_behaviour(data, dataclasses.replace(given, horizon=20))
    assert (shorter.concentration, shorter.no_concentration) == (None, "an episode has 50 steps, more than the horizon of 20")
