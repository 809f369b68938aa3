"""Two policies on the same seeds: which succeeded where, by how much they differ, and whether chance could explain the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from embodied_rl.statistics import bootstrap_mean_interval, mcnemar_p_value, paired_rate_interval, sign_flip_p_value
from embodied_rl.types import EpisodeSummary


@dataclass(frozen=True)
class RateComparison:
    """Success of pairs of episodes of the same seed."""

    both: int
    only_policy: int
    """Seeds at which the policy succeeded and the other one did not."""
    only_against: int
    neither: int
    difference: float
    """Success rate of the policy minus that of the other one."""
    interval: tuple[float, float]
    """Of the difference, 95%: Newcombe's for paired rates."""
    p_value: float
    """Of equal rates: McNemar, exact, two-sided."""


@dataclass(frozen=True)
class Comparison:
    """A policy against another one, seed by seed."""

    num_pairs: int
    num_unpaired: int
    """Seeds that only one of them finished (its simulator failed with the other one); they count nowhere here."""
    success: RateComparison | None
    """At any step; None where the task has no notion of success."""
    success_at_end: RateComparison | None
    return_difference: float
    """Mean return of the policy minus that of the other one."""
    return_interval: tuple[float, float]
    """Of that mean, 95%: percentile bootstrap over seeds."""
    return_p_value: float
    """Of equal means: paired permutation test, two-sided."""
    length_difference: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(episodes: Sequence[EpisodeSummary], against: Sequence[EpisodeSummary], *, reports_success: bool) -> Comparison:
    """Pair the episodes of two evaluations by seed; differences are `episodes` minus `against`.

    Raises:
        ValueError: no seed is in both.
    """
    first, second = ({episode.seed: episode for episode in played} for played in (episodes, against))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("the two evaluations have no seed in common")
    pairs = [(first[seed], second[seed]) for seed in shared]
    returns = np.array([ours.episode_return - theirs.episode_return for ours, theirs in pairs], np.float64)
    return Comparison(
        num_pairs=len(pairs),
        num_unpaired=len(first.keys() ^ second.keys()),
        success=_rates([(ours.success_once, theirs.success_once) for ours, theirs in pairs]) if reports_success else None,
        success_at_end=_rates([(ours.success_at_end, theirs.success_at_end) for ours, theirs in pairs]) if reports_success else None,
        return_difference=float(returns.mean()),
        return_interval=bootstrap_mean_interval(returns),
        return_p_value=sign_flip_p_value(returns),
        length_difference=float(np.mean([ours.length - theirs.length for ours, theirs in pairs])),
    )


def _rates(pairs: Sequence[tuple[bool, bool]]) -> RateComparison:
    both, neither = sum(a and b for a, b in pairs), sum(not a and not b for a, b in pairs)
    only_policy, only_against = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return RateComparison(
        both=both,
        only_policy=only_policy,
        only_against=only_against,
        neither=neither,
        difference=(only_policy - only_against) / len(pairs),
        interval=paired_rate_interval(both, only_against, only_policy, neither),
        p_value=mcnemar_p_value(only_policy, only_against),
    )
