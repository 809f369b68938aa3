"""Intervals against closed forms, scipy's own implementation and simulated coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from embodied_rl.statistics import (
    bootstrap_mean_interval,
    holm,
    mcnemar_p_value,
    paired_rate_interval,
    sign_flip_p_value,
    wilson_interval,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 100), (1, 100), (37, 50), (97, 100), (100, 100), (512, 1000)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_equals_scipy(successes: int, n: int, confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_at_the_edges_is_the_closed_form() -> None:
    # With no success the score equation p² (1 + z²/n) = p z²/n has the roots 0 and z² / (n + z²); z = 1.959963984540054.
    z2 = 1.959963984540054**2
    low, high = wilson_interval(0, 10)
    assert low == 0.0
    assert high == pytest.approx(z2 / (10 + z2), rel=1e-12)
    mirrored = wilson_interval(10, 10)
    assert mirrored[1] == 1.0
    assert mirrored[0] == pytest.approx(1 - high, rel=1e-12)


def test_wilson_ends_solve_the_score_equation() -> None:
    # By definition |p̂ - p| = z sqrt(p (1 - p) / n) at both ends p.
    for end in wilson_interval(83, 100):
        assert abs(0.83 - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / 100), rel=1e-9)


def test_wilson_of_nothing_is_everything_and_bad_input_is_refused() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for bad in ((-1, 10, 0.95), (11, 10, 0.95), (1, 10, 0.0), (1, 10, 1.0)):
        with pytest.raises(ValueError, match="between 0"):
            wilson_interval(*bad)


def test_bootstrap_is_near_the_normal_interval_and_reproducible() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, 400)
    low, high = bootstrap_mean_interval(values)
    half = 1.96 * values.std() / math.sqrt(values.size)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert bootstrap_mean_interval(values) == (low, high)
    assert bootstrap_mean_interval(values, seed=1) != (low, high)
    assert bootstrap_mean_interval([2.5]) == (2.5, 2.5)


def test_bootstrap_covers_the_true_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_mean_interval(generator.exponential(1.0, 60), confidence=0.9, num_samples=300)
        covered += low <= 1.0 <= high
    # 0.9 aimed at; skewed data and 200 trials: within 0.81 … 0.96 (four standard errors, and the known slight undercoverage).
    assert 0.81 <= covered / 200 <= 0.96


def test_bootstrap_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_mean_interval([])


# ---- paired comparisons ---------------------------------------------------------------------------------------------


def test_mcnemar_is_the_sign_test_of_the_pairs_that_differ() -> None:
    # One of eight: 2 · (C(8,0) + C(8,1)) / 2⁸ = 2 · 9 / 256.
    assert mcnemar_p_value(1, 7) == mcnemar_p_value(7, 1) == 18 / 256
    # None of six: 2 / 2⁶.
    assert mcnemar_p_value(0, 6) == 2 / 64
    assert mcnemar_p_value(0, 0) == mcnemar_p_value(3, 3) == mcnemar_p_value(0, 1) == 1.0
    with pytest.raises(ValueError, match="not be negative"):
        mcnemar_p_value(-1, 2)


@pytest.mark.parametrize(("first", "second"), [(0, 5), (3, 4), (12, 30), (200, 260)])
def test_mcnemar_equals_scipy(first: int, second: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert mcnemar_p_value(first, second) == pytest.approx(stats.binomtest(first, first + second).pvalue, rel=1e-12)


def test_sign_flips_are_counted_by_hand() -> None:
    # Signs of (1, 2, 3): sums ±6, ±4, ±2, 0, 0. Six or more: 2 of 8; for (-1, 2, 3), sum 4: 4 of 8; for (1, 2, -3), sum 0: all.
    assert sign_flip_p_value([1, 2, 3]) == 2 / 8
    assert sign_flip_p_value([-1, 2, 3]) == 4 / 8
    assert sign_flip_p_value([1, 2, -3]) == 1.0
    assert sign_flip_p_value([0.0, 0.0]) == 1.0
    # Equal pairs add nothing.
    assert sign_flip_p_value([1, 2, 3, 0, 0]) == 2 / 8
    # 0.1 + 0.2 + 0.3 is not 0.6 in floating point, and its own sign pattern has to count all the same.
    assert sign_flip_p_value([0.1, 0.2, 0.3]) == 2 / 8
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite"):
            sign_flip_p_value(bad)


def test_sign_flips_equal_scipy_and_a_second_enumeration() -> None:
    stats = pytest.importorskip("scipy.stats")
    differences = np.random.default_rng(5).normal(0.4, 1.0, 11)
    p_value = sign_flip_p_value(differences)
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in itertools.product((-1, 1), repeat=11)]
    assert p_value == np.mean([total >= abs(differences.sum()) - 1e-9 for total in sums])
    by_scipy = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert p_value == pytest.approx(by_scipy.pvalue, abs=1e-12)


def test_random_sign_flips_are_near_the_t_test_valid_and_reproducible() -> None:
    stats = pytest.importorskip("scipy.stats")
    differences = np.random.default_rng(6).normal(0.2, 1.0, 150)
    p_value = sign_flip_p_value(differences)
    exact = stats.ttest_1samp(differences, 0.0).pvalue
    assert 0.001 < exact < 0.2
    # Four standard errors of 20,000 draws, and what separates the two tests themselves.
    assert p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000) + 0.1 * exact)
    assert sign_flip_p_value(differences) == p_value
    assert sign_flip_p_value(differences + 100.0, num_samples=999) == 1 / 1000


def test_a_true_hypothesis_is_rejected_as_rarely_as_the_level_says() -> None:
    generator, trials = np.random.default_rng(1), 400
    rejected = sum(sign_flip_p_value(generator.exponential(1, 20) - generator.exponential(1, 20), 400) <= 0.1 for _ in range(trials))
    # 0.1 ± four standard errors of 400 trials.
    assert abs(rejected / trials - 0.1) < 4 * math.sqrt(0.09 / trials)


def test_paired_interval_by_hand() -> None:
    # Newcombe 1998 squares and adds: with both rates ½ of n = 20 and independent pairs (5, 5, 5, 5), φ is 0 and the interval
    # ± sqrt(2) · half the width of Wilson's, which is z/(1 + z²/n) · sqrt(1/(4n) + z²/(4n²)).
    z2, n = 1.959963984540054**2, 20
    half = math.sqrt(z2) / (1 + z2 / n) * math.sqrt(0.25 / n + z2 / (4 * n * n))
    low, high = paired_rate_interval(5, 5, 5, 5)
    assert (low, high) == pytest.approx((-math.sqrt(2) * half, math.sqrt(2) * half), rel=1e-12)
    # Where the pairs always agree (10, 0, 0, 10): φ = (100 - 10) / 100 = 0.9 after the correction n / 2; the rates are ½ again.
    low, high = paired_rate_interval(10, 0, 0, 10)
    assert high == pytest.approx(half * math.sqrt(2 - 2 * 0.9), rel=1e-12)
    assert low == pytest.approx(-high, rel=1e-12)
    # All succeed twice: no correlation can be seen, and the interval still has a width.
    assert paired_rate_interval(20, 0, 0, 0) == pytest.approx((-z2 / (n + z2), z2 / (n + z2)), rel=1e-12)
    for bad in ((0, 0, 0, 0), (-1, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"pair|negative"):
            paired_rate_interval(*bad)


def test_paired_interval_turns_with_its_sides_and_stays_within_one() -> None:
    low, high = paired_rate_interval(12, 3, 9, 6)
    # Rates 15/30 and 21/30.
    assert low < 6 / 30 < high
    assert paired_rate_interval(12, 9, 3, 6) == pytest.approx((-high, -low), rel=1e-12)
    assert paired_rate_interval(0, 0, 30, 0)[1] == 1.0


def test_paired_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    # P(both, first alone, second alone, neither) = .5, .1, .25, .15: the rates differ by .15.
    generator, covered = np.random.default_rng(2), 0
    for _ in range(500):
        low, high = paired_rate_interval(*(int(count) for count in generator.multinomial(50, (0.5, 0.1, 0.25, 0.15))))
        covered += low <= 0.15 <= high
    # 0.95 ± four standard errors of 500 trials.
    assert abs(covered / 500 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 500)


def test_holm_by_hand() -> None:
    # Sorted .01, .02, .03, .9 times 4, 3, 2, 1: .04, .06, .06, .9, never falling.
    assert holm([0.02, 0.9, 0.01, 0.03]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.6]) == [0.6]
    assert holm([0.7, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
