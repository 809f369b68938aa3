"""Which chunks of an episode decide its success: those after which it is far likelier than before them.

Both rates are measured by resampling, that is, by playing from a snapshot just before the chunk and from one just after it
(IPA; ROME, Wang et al. 2025). The interval of their difference is Newcombe's hybrid score interval (Statistics in Medicine 17, 1998,
method 10), put together from the two Wilson intervals, which is right for few episodes and for rates of 0 and 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from embodied_rl.statistics import wilson_interval


@dataclass(frozen=True)
class ChunkEffect:
    """What a chunk of an episode adds to the chance of success."""

    first: int
    """Messages of the episode before the chunk."""
    stop: int
    """Messages of the episode up to and with the chunk."""
    effect: float
    """Success rate after it minus that before it, in [-1, 1]."""
    low: float
    """Lower end of the effect's confidence interval."""
    high: float
    is_crucial: bool


def success_difference(before: tuple[int, int], after: tuple[int, int], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Difference of two success rates: (estimate, low, high); low = d - √((p₁ - l₁)² + (u₂ - p₂)²) and high likewise, 1 being after.

    Args:
        before, after: (successes, episodes), at least one episode each.
        confidence: coverage aimed at, between 0 and 1.

    Raises:
        ValueError: no episodes, impossible counts, or a confidence out of range.
    """
    if before[1] < 1 or after[1] < 1:
        raise ValueError(f"a difference of success rates needs episodes on both sides, got {before[1]} before and {after[1]} after")
    rate_before, rate_after = before[0] / before[1], after[0] / after[1]
    low_before, high_before = wilson_interval(*before, confidence=confidence)
    low_after, high_after = wilson_interval(*after, confidence=confidence)
    effect = rate_after - rate_before
    low = effect - math.hypot(rate_after - low_after, high_before - rate_before)
    high = effect + math.hypot(high_after - rate_after, rate_before - low_before)
    return effect, max(-1.0, low), min(1.0, high)


def chunk_effects(
    outcomes: Mapping[int, tuple[int, int]], *, min_episodes: int = 8, effect: float = 0.3, confidence: float = 0.95
) -> list[ChunkEffect]:
    """The chunks between neighbouring starts of one episode that were played from often enough, ascending.

    A chunk is crucial when success after it exceeds that before it by at least `effect` (well above), and the interval of the
    difference lies above 0 (surely above).

    Args:
        outcomes: {messages before the start: (successes, episodes)}.
        min_episodes: from both starts, for a chunk to be judged at all.

    Raises:
        ValueError: see `success_difference`.
    """
    judged = [(step, counts) for step, counts in sorted(outcomes.items()) if counts[1] >= max(1, min_episodes)]
    found = []
    for (first, before), (stop, after) in itertools.pairwise(judged):
        estimate, low, high = success_difference(before, after, confidence=confidence)
        found.append(ChunkEffect(first, stop, estimate, low, high, estimate >= effect and low > 0))
    return found
