"""Intervals and sample sizes, against tables, hand arithmetic, a second implementation and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_rl.episodes.estimators import (
    Interval,
    bca_interval,
    bernstein_margin,
    capped_lower_bound,
    effective_sample_size,
    empirical_bernstein,
    largest_share,
    percentile_interval,
    refit_errors,
    resample_counts,
    student_interval,
    student_quantile,
)


def test_resamples_are_of_the_size_of_the_data_and_shared() -> None:
    counts = resample_counts(20, 4000, seed=3)
    assert (counts.sum(axis=1) == 20).all()
    # Multinomial: each count has mean 1 and variance 1 − 1/20.
    assert counts.mean(axis=0) == pytest.approx(np.ones(20), abs=5 * math.sqrt(0.95 / 4000))
    assert counts.var() == pytest.approx(0.95, rel=0.05)
    np.testing.assert_array_equal(counts, resample_counts(20, 4000, seed=3))
    assert (counts != resample_counts(20, 4000, seed=4)).any()


def test_percentiles_are_read_off() -> None:
    # 0, 1, …, 100: the 5% and 95% quantiles are 5 and 95; what is not finite is left out.
    samples = np.concatenate([np.arange(101.0), [np.nan, np.inf]])
    found = percentile_interval(samples, 0.9)
    assert (found.low, found.high) == pytest.approx((5.0, 95.0))
    with pytest.raises(ValueError, match="at least one finite"):
        percentile_interval(np.array([np.nan]))
    with pytest.raises(ValueError, match="confidence"):
        percentile_interval(samples, 1.0)


def test_bca_is_the_percentile_interval_of_a_symmetric_unbiased_bootstrap() -> None:
    samples = np.linspace(-1, 1, 2001)
    found = bca_interval(0.0, samples, np.array([-1.0, 0.0, 1.0]), 0.9)
    assert (found.low, found.high) == pytest.approx((-0.9, 0.9), abs=1e-3)


def test_bca_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    data = np.random.default_rng(0).lognormal(sigma=1.0, size=40)
    counts = resample_counts(40, 20_000, seed=1)
    ours = bca_interval(data.mean(), counts @ data / 40, (data.sum() - data) / 39)
    theirs = stats.bootstrap((data,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(2)).confidence_interval
    plain = percentile_interval(counts @ data / 40)
    # The two differ by resampling noise alone; skewed data move BCa to the right of the percentiles by far more.
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=0.01)
    assert ours.high > 1.02 * plain.high
    assert ours.low > 1.02 * plain.low


def test_a_bootstrap_without_spread_is_a_point() -> None:
    assert bca_interval(2.0, np.full(50, 2.0), np.full(5, 2.0)).low == 2.0


def test_bca_covers_the_mean_of_skewed_data_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(7), 0
    counts = resample_counts(40, 600, seed=0)
    for _ in range(500):
        data = rng.exponential(size=40)
        hits += bca_interval(data.mean(), counts @ data / 40, (data.sum() - data) / 39).covers(1.0)
    # 95% aimed at; DiCiccio & Efron (1996) find about 93% at this size. Standard error of 500 trials: 1%.
    assert 0.90 <= hits / 500 <= 0.97


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 7, 2.3646),
        (0.95, 5, 2.0150),
        (0.975, 30, 2.0423),
        (0.995, 4, 4.6041),
        (0.5, 3, 0.0),
    ],
)
def test_student_quantiles_are_those_of_the_tables(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=6e-5)


def test_errors_of_refits_have_the_spread_and_the_correlation_of_the_refits() -> None:
    """Members 1, 2, 3, 4, 5: variance 2.5, times 1 + 1/5 for their mean; Student's t with 4 degrees has twice the variance of its scale."""
    first, again = (refit_errors([1.0, 2.0, 3.0, 4.0, 5.0], 40_000, 0) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.median(np.abs(first)) == pytest.approx(0.740697 * math.sqrt(2.5 * 1.2), rel=0.02), "the median of |t| with 4 degrees"
    quantile = np.quantile(first, 0.975)
    assert quantile == pytest.approx(student_quantile(0.975, 4) * math.sqrt(2.5 * 1.2), rel=0.03)
    np.testing.assert_allclose(refit_errors([10.0, 20.0, 30.0, 40.0, 50.0], 40_000, 0), 10 * first)
    # 5, 1, 4, 2, 3 correlate with 1, …, 5 by −0.3: deviations (2, −2, 1, −1, 0) · (−2, −1, 0, 1, 2) = −3, of 10.
    other = refit_errors([5.0, 1.0, 4.0, 2.0, 3.0], 40_000, 0)
    signs = np.mean(np.sign(first) == np.sign(other))
    assert signs == pytest.approx(0.5 + math.asin(-0.3) / math.pi, abs=0.01), "of two normal numbers with this correlation"
    with pytest.raises(ValueError, match="at least two values, got 1"):
        refit_errors([1.0], 10, 0)


def test_student_interval_by_hand() -> None:
    # Mean 2, standard deviation 1, two degrees of freedom, and a third of the variance for the mean of three: 2 ± 4.3027 √(4/3).
    found = student_interval([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx((2 - 4.9683, 2 + 4.9683), abs=1e-4)
    with pytest.raises(ValueError, match="two values"):
        student_interval([1.0])


def test_empirical_bernstein_by_hand() -> None:
    values = np.array([0.0, 0.0, 1.0, 1.0])
    # V = 1/3, ln(4 / 0.05) = ln 80; within [0, 10]: √(2/3 · ln 80 / 4) + 70 ln 80 / 9.
    margin = math.sqrt(2 / 3 * math.log(80) / 4) + 70 * math.log(80) / 9
    assert bernstein_margin(values, 10.0, 0.025) == pytest.approx(margin, rel=1e-12)
    assert empirical_bernstein(values, 0.0, 10.0) == Interval(0.0, 10.0, 0.95, "empirical Bernstein"), "never beyond what is possible"
    many = np.tile(values, 1000)
    margin = math.sqrt(2 * (1000 / 3999) * math.log(80) / 4000) + 7 * math.log(80) / (3 * 3999)
    found = empirical_bernstein(many, 0.0, 1.0)
    assert (found.low, found.high) == pytest.approx((0.5 - margin, 0.5 + margin), rel=1e-12)
    with pytest.raises(ValueError, match=r"within \[0, 0.5\]"):
        empirical_bernstein(values, 0.0, 0.5)


def test_empirical_bernstein_keeps_its_promise() -> None:
    rng = np.random.default_rng(0)
    for chance in (0.02, 0.3):
        hits = [empirical_bernstein((rng.random(200) < chance).astype(float), 0, 1, 0.8).covers(chance) for _ in range(400)]
        assert np.mean(hits) >= 0.8


def test_the_capped_bound_by_hand_and_with_heavy_tails() -> None:
    weight, x = np.array([0.5, 3.0, 1.0, 2.0] * 500), np.array([1.0, 0.5, 0.25, 1.0] * 500)
    # Weights cut at 2: 0.5, 1, 0.25, 2; mean 0.9375. One cap, so that delta is not shared.
    cut = np.array([0.5, 1.0, 0.25, 2.0] * 500)
    margin = math.sqrt(2 * cut.var(ddof=1) * math.log(2 / 0.05) / 2000) + 7 * 2 * math.log(2 / 0.05) / (3 * 1999)
    assert capped_lower_bound(lambda cap: np.minimum(weight, cap) * x, 1.0, 0.05, caps=(2.0,)) == pytest.approx(0.9375 - margin, rel=1e-12)
    # Pareto weights of mean 1 and infinite variance; x = 1: the true value is 1.
    rng, above, bounds = np.random.default_rng(1), 0, []
    for _ in range(300):
        w = (1 + rng.pareto(1.5, 2000)) / 3
        bounds.append(capped_lower_bound(lambda cap, w=w: np.minimum(w, cap), 1.0, 0.2))
        above += bounds[-1] > 1.0
    assert above / 300 <= 0.2
    assert 0.5 < np.median(bounds) < 1.0, "valid, and not for being empty"
    with pytest.raises(ValueError, match="within"):
        capped_lower_bound(lambda cap: np.array([-1.0, 1.0]), 1.0, 0.05)


def test_effective_sample_size_by_hand() -> None:
    # (1 + 1 + 2)² / (1 + 1 + 4) = 16/6; equal weights count fully; one weight alone counts as one; none as none.
    weights = np.array([[1.0, 5.0, 7.0, 0.0], [1.0, 5.0, 0.0, 0.0], [2.0, 5.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    np.testing.assert_allclose(effective_sample_size(log_weights), [16 / 6, 3.0, 1.0, 0.0])
    np.testing.assert_allclose(effective_sample_size(log_weights + 2000), [16 / 6, 3.0, 1.0, 0.0])
    np.testing.assert_allclose(largest_share(log_weights), [0.5, 1 / 3, 1.0, 1.0])
