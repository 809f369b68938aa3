"""How far an estimate from N recorded episodes can be trusted: resampling, bounds without a model, effective sample size; numpy only.

Shape legend: N episodes, B resamples. Everything here takes episodes as independent draws: two steps of one episode never are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CAPS: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Largest weights that `capped_lower_bound` tries; the bound holds for all of them together."""
_NORMAL = NormalDist()
_RESAMPLING, _REFITTING = 0xB007, 0xB008


@dataclass(frozen=True)
class Interval:
    """Two-sided."""

    low: float
    high: float
    confidence: float
    """Coverage aimed at (bootstrap) or guaranteed (concentration), between 0 and 1."""
    method: str

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


def check_confidence(confidence: float) -> None:
    """Raises ValueError unless it lies between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")


# ---- resampling -----------------------------------------------------------------------------------------------------


def resample_counts(num_episodes: int, num_samples: int, seed: int) -> np.ndarray:
    """[B, N] float64: how often each of N episodes is in each of B resamples of N with replacement; a function of its arguments.

    Several estimates of the same episodes share their resamples, so that differences between them can be resampled too.
    """
    if num_episodes < 1 or num_samples < 1:
        raise ValueError(f"resampling needs episodes and samples, got {num_episodes} and {num_samples}")
    # A separate stream: the program that made the data may have used the plain seed.
    generator = np.random.default_rng([seed, _RESAMPLING])
    return generator.multinomial(num_episodes, np.full(num_episodes, 1.0 / num_episodes), size=num_samples).astype(np.float64)


def percentile_interval(samples: np.ndarray, confidence: float = 0.95) -> Interval:
    """Quantiles of the resampled estimates [B] (Efron 1979); those that are not finite are left out."""
    check_confidence(confidence)
    finite = _finite(samples)
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence, "bootstrap percentile")


def bca_interval(estimate: float, samples: np.ndarray, jackknife: np.ndarray, confidence: float = 0.95) -> Interval:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987, "Better bootstrap confidence intervals", section 4).

    The quantiles that are read off are moved by the bias z₀ (how many resamples lie below the estimate) and by the acceleration
    a = Σ(θ̄ − θ₍ᵢ₎)³ / (6 (Σ(θ̄ − θ₍ᵢ₎)²)^{3/2}) of the jackknife.

    Args:
        estimate: θ of all episodes.
        samples: [B] θ of resamples; those that are not finite are left out.
        jackknife: [N] θ without the i-th episode.
        confidence: coverage aimed at.

    Raises:
        ValueError: confidence out of range, or no finite sample.
    """
    check_confidence(confidence)
    finite = np.sort(_finite(samples))
    if finite[0] == finite[-1]:
        return Interval(float(finite[0]), float(finite[0]), confidence, "bootstrap BCa")
    # Half of the ties count as below: an estimator of few distinct values would look biased otherwise. Never 0 or 1: z₀ stays finite.
    below = float(np.mean(finite < estimate) + 0.5 * np.mean(finite == estimate))
    bias = _NORMAL.inv_cdf(min(max(below, 0.5 / finite.size), 1 - 0.5 / finite.size))
    deviations = jackknife.mean() - jackknife
    squares = float((deviations**2).sum())
    acceleration = float((deviations**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
    shares = [_moved(bias, acceleration, _NORMAL.inv_cdf(q)) for q in ((1 - confidence) / 2, (1 + confidence) / 2)]
    low, high = np.quantile(finite, shares)
    return Interval(float(low), float(high), confidence, "bootstrap BCa")


def student_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """mean ± t · s · √(1 + 1/E), for few resampled estimates [E >= 2] whose quantiles cannot be read off.

    Their standard deviation s is the estimate's own standard error, so that it is not divided by √E; the mean of E of them has another
    s/√E of the resampling's own.
    """
    check_confidence(confidence)
    data = _members(values)
    half = student_quantile(0.5 + confidence / 2, data.size - 1) * float(data.std(ddof=1)) * math.sqrt(1 + 1 / data.size)
    centre = float(data.mean())
    return Interval(centre - half, centre + half, confidence, f"bootstrap of {data.size} members")


def refit_errors(values: Sequence[float] | np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """[B] draws of how far an estimate may lie off because the model in it was fitted to these episodes and not to others.

    Given is the estimate with each of E models [E >= 2], fitted to a resample of the episodes each. The draws are Student's t with
    E − 1 degrees times s √(1 + 1/E), as in `student_interval`. Estimates whose models were fitted to the same resamples get draws that
    are correlated as their values are: one set of weights mixes the members' deviations.
    """
    data = _members(values)
    degrees = data.size - 1
    generator = np.random.default_rng([seed, _REFITTING])
    mixed = generator.standard_normal((num_samples, data.size)) @ (data - data.mean()) / math.sqrt(degrees)
    return mixed * math.sqrt(1 + 1 / data.size) / np.sqrt(generator.chisquare(degrees, num_samples) / degrees)


def _members(values: Sequence[float] | np.ndarray) -> np.ndarray:
    data = np.asarray(values, np.float64)
    if data.size < 2:
        raise ValueError(f"a spread needs at least two values, got {data.size}")
    return data


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution with integer degrees of freedom, by bisection of its distribution function."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"probability must be in [0.5, 1) and degrees >= 1, got {probability} and {degrees}")
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return 0.5 * (low + high)


def _student_cdf(t: float, degrees: int) -> float:
    """Abramowitz & Stegun 26.7.3 and 26.7.4: a finite sum in the angle arctan(t / √ν)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine2 = math.cos(angle) ** 2
    term = total = 1.0
    if degrees % 2 == 0:
        for k in range(1, degrees // 2):
            term *= cosine2 * (2 * k - 1) / (2 * k)
            total += term
        return 0.5 + 0.5 * math.sin(angle) * total
    if degrees == 1:
        return 0.5 + angle / math.pi
    for k in range(1, (degrees - 1) // 2):
        term *= cosine2 * 2 * k / (2 * k + 1)
        total += term
    return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi


def _moved(bias: float, acceleration: float, z: float) -> float:
    """Which quantile BCa reads instead of the z-quantile."""
    return _NORMAL.cdf(bias + (bias + z) / max(1 - acceleration * (bias + z), 1e-6))


def _finite(samples: np.ndarray) -> np.ndarray:
    data = np.asarray(samples, np.float64).ravel()
    finite = data[np.isfinite(data)]
    if finite.size == 0:
        raise ValueError("an interval needs at least one finite resampled estimate, got none")
    return finite


# ---- bounds that hold for any distribution --------------------------------------------------------------------------


def empirical_bernstein(values: np.ndarray, low: float, high: float, confidence: float = 0.95) -> Interval:
    """Interval of the mean of independent values that lie in [low, high] (Maurer & Pontil 2009, theorem 4, both sides).

    |mean − E| <= √(2 V ln(4/δ) / n) + 7 (high − low) ln(4/δ) / (3 (n − 1)), V the sample variance, δ = 1 − confidence.

    Raises:
        ValueError: fewer than two values, a value outside of [low, high], or confidence out of range.
    """
    check_confidence(confidence)
    _check_range(values, low, high)
    margin = bernstein_margin(values, high - low, (1 - confidence) / 2)
    mean = float(values.mean())
    return Interval(max(low, mean - margin), min(high, mean + margin), confidence, "empirical Bernstein")


def bernstein_margin(values: np.ndarray, span: float, delta: float) -> float:
    """What the mean of independent values [n] may lie above its expectation, but for probability `delta` (Maurer & Pontil 2009,
    theorem 4); `span` is the length of the interval that they lie in."""
    log_term, n = math.log(2.0 / delta), values.size
    return math.sqrt(2.0 * float(values.var(ddof=1)) * log_term / n) + 7.0 * span * log_term / (3.0 * (n - 1))


def capped_lower_bound(scores_at: Callable[[float], np.ndarray], span: float, delta: float, caps: Sequence[float] = CAPS) -> float:
    """Lower bound of E[w · x] with x >= 0 for importance weights w without any bound, but for probability `delta`.

    Cutting weights at c can only lower a mean of non-negative terms, so that a lower bound of E[min(w, c) · x] is one of E[w · x]
    (Thomas, Theocharous & Ghavamzadeh 2015, "High-confidence off-policy evaluation", section 4); with weights cut, the terms are
    bounded by c · span and Maurer & Pontil's theorem holds. Each of the caps gets its share of `delta`, and the best one counts.

    Args:
        scores_at: cap → [N] min(w, cap) · x of each episode.
        span: largest x.
        delta: probability with which the bound may fail.
        caps: largest weights to try.

    Raises:
        ValueError: fewer than two episodes, or a score outside of [0, cap · span].
    """
    best = 0.0
    for cap in caps:
        scores = scores_at(cap)
        _check_range(scores, 0.0, cap * span)
        best = max(best, float(scores.mean()) - bernstein_margin(scores, cap * span, delta / len(caps)))
    return best


def _check_range(values: np.ndarray, low: float, high: float) -> None:
    if values.size < 2:
        raise ValueError(f"a bound needs at least two values, got {values.size}")
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    if not (np.isfinite(values).all() and values.min() >= low - slack and values.max() <= high + slack):
        raise ValueError(f"values must lie within [{low:g}, {high:g}], got {values.min():g} to {values.max():g}")


# ---- how many episodes count ----------------------------------------------------------------------------------------


def effective_sample_size(log_weight: np.ndarray) -> np.ndarray:
    """(Σ w)² / Σ w² over the first axis (Kish 1965): as many episodes with equal weights would be as good.

    Args:
        log_weight: [N, ...]; −inf is a weight of 0. Logarithms, because products of many ratios overflow.

    Returns:
        [...] between 1 and N; 0 where all weights are 0.
    """
    weight = scaled_weights(log_weight)
    squares = (weight**2).sum(axis=0)
    return np.divide(weight.sum(axis=0) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)


def largest_share(log_weight: np.ndarray) -> np.ndarray:
    """Of all weight, what the heaviest episode has: [N, ...] → [...] between 1/N and 1; 1 where all weights are 0."""
    weight = scaled_weights(log_weight)
    total = weight.sum(axis=0)
    return np.divide(weight.max(axis=0), total, out=np.ones_like(total), where=total > 0)


def scaled_weights(log_weight: np.ndarray) -> np.ndarray:
    """exp(log_weight) [N, ...] divided by the largest along the first axis, so that nothing overflows; zeros where all are 0."""
    largest = log_weight.max(axis=0, keepdims=True)
    return np.exp(log_weight - np.where(np.isfinite(largest), largest, 0.0))
