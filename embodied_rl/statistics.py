"""Uncertainty of reported figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_EXACT_PAIRS = 16
"""Largest number of differing pairs for which all 2ⁿ signs are enumerated."""
_ROUNDING = 1e-12
"""Sums of the same numbers in another order differ by less than this share of the largest."""


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided score interval of a success rate (Wilson 1927, without continuity correction).

    `n`: number of independent trials; 0 gives (0, 1).

    Returns (low, high), both within [0, 1].

    Raises ValueError: the counts or the confidence are out of range.
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


_AT_ONCE = 2**16
"""Values drawn in one call: few calls, and little memory."""


def bootstrap_mean_interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95, num_samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean (Efron 1979); the same seed gives the same interval.

    `values`: [n] independent values, n >= 1.

    Raises ValueError: no value, or the confidence is out of range.
    """
    data = np.asarray(values, np.float64).ravel()
    if data.size == 0:
        raise ValueError("a bootstrap needs at least one value, got none")
    _two_sided_quantile(confidence)
    generator = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // data.size)
    blocks = [min(rows, num_samples - first) for first in range(0, num_samples, rows)]
    means = np.concatenate([data[generator.integers(0, data.size, (size, data.size))].mean(1) for size in blocks])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Two-sided exact test that two paired success rates are equal (McNemar 1947; the exact form is a sign test).

    Pairs in which both or neither succeeded carry no information. For the others each side is equally likely under the hypothesis, so the
    smaller count is binomial with probability ½, and the p-value is twice its lower tail.

    Raises ValueError: a negative count.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"counts must not be negative, got {only_first} and {only_second}")
    n = only_first + only_second
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_rate_interval(both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the difference of two paired success rates, second minus first (Newcombe 1998, Statist. Med. 17:2635, method 10).

    Combines the Wilson intervals of both rates with their correlation; unlike a bootstrap it keeps a width if no pair differs.

    Args:
        both, only_first, only_second, neither: numbers of pairs by which side succeeded; at least one pair.

    Raises ValueError: a negative count, no pair, or the confidence is out of range.
    """
    if min(both, only_first, only_second, neither) < 0:
        raise ValueError(f"counts must not be negative, got {(both, only_first, only_second, neither)}")
    n = both + only_first + only_second + neither
    if n == 0:
        raise ValueError("a paired comparison needs at least one pair, got none")
    first, second = both + only_first, both + only_second
    p1, p2 = first / n, second / n
    (low1, high1), (low2, high2) = wilson_interval(first, n, confidence), wilson_interval(second, n, confidence)
    phi = _paired_correlation(both, only_first, only_second, neither)
    down1, up1, down2, up2 = p1 - low1, high1 - p1, p2 - low2, high2 - p2
    below = math.sqrt(max(0.0, down2**2 - 2 * phi * down2 * up1 + up1**2))
    above = math.sqrt(max(0.0, up2**2 - 2 * phi * up2 * down1 + down1**2))
    return max(-1.0, p2 - p1 - below), min(1.0, p2 - p1 + above)


def _paired_correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Newcombe's φ̂: correlation of the pairs, shrunk by a continuity correction if positive."""
    n = both + only_first + only_second + neither
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    product: float = both * neither - only_first * only_second
    if product > 0:
        product = max(product - n / 2, 0.0)
    return product / math.sqrt(margins)


def sign_flip_p_value(differences: Sequence[float] | np.ndarray, num_samples: int = 20_000, seed: int = 0) -> float:
    """Two-sided paired permutation test that differences have mean 0 (Fisher 1935): the sides of every pair are exchangeable.

    Exact up to 16 pairs that differ: all 2ⁿ signs. For more pairs, `num_samples` random signs including the observed ones, so that the
    test stays valid (Phipson & Smyth 2010); the smallest p-value is then 1 / (num_samples + 1).

    Args:
        differences: [n] second minus first of each pair, n >= 1, finite.
        num_samples: number of random signs if there are too many pairs for all signs.
        seed: seed of the random signs; the same seed gives the same p-value.

    Raises ValueError: no pair, or a difference that is not finite.
    """
    data = np.asarray(differences, np.float64).ravel()
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"a paired test needs at least one pair of finite numbers, got {data.tolist()}")
    data = data[data != 0]  # equal pairs change no sum
    if data.size == 0:
        return 1.0
    # Slightly below, because the observed signs must count in any order of summation.
    threshold = abs(data.sum()) - _ROUNDING * np.abs(data).sum()
    if data.size <= _EXACT_PAIRS:
        codes = np.arange(2**data.size)[:, None]
        signs = 1.0 - 2.0 * (codes >> np.arange(data.size) & 1)
        return float(np.mean(np.abs(signs @ data) >= threshold))
    generator, extreme = np.random.default_rng(seed), 0
    for start in range(0, num_samples, 1000):
        signs = generator.choice((-1.0, 1.0), (min(1000, num_samples - start), data.size))
        extreme += int(np.count_nonzero(np.abs(signs @ data) >= threshold))
    return (extreme + 1) / (num_samples + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of several comparisons, which keep the chance of any false one at its level (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _two_sided_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
