"""Intervals against closed forms, scipy's own implementation and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_rl.statistics import bootstrap_mean_interval, wilson_interval


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
