"""Uncertainty of the figures that we report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided score interval of a success rate (Wilson 1927, without continuity correction).

    Args:
        successes: how many of the trials succeeded.
        n: number of independent trials; 0 gives (0, 1), for nothing is known.
        confidence: coverage aimed at, between 0 and 1.

    Returns:
        (low, high), both within [0, 1].

    Raises:
        ValueError: the counts or the confidence are out of range.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n={n}, got {successes}")
    z = _two_sided_quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, z * z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    # Both ends are exact at the edges; rounding would leave 1e-17 there.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def bootstrap_mean_interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95, num_samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean (Efron 1979); the same seed gives the same interval.

    Args:
        values: [n] independent values, n >= 1.
        confidence: coverage aimed at, between 0 and 1.
        num_samples: number of resamples.
        seed: of the resampling.

    Raises:
        ValueError: no value, or the confidence is out of range.
    """
    data = np.asarray(values, np.float64).ravel()
    if data.size == 0:
        raise ValueError("a bootstrap needs at least one value, got none")
    _two_sided_quantile(confidence)
    generator = np.random.default_rng(seed)
    means = np.array([data[generator.integers(0, data.size, data.size)].mean() for _ in range(num_samples)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _two_sided_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
