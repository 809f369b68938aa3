"""Several domains (tasks, simulators, data sets) in one run: which group belongs to which domain, and each domain's results."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction

from embodied_rl.errors import UserError

PLAYER_SIGN = "@"
"""Separator in ``domain@player``, the groups of a domain that another player plays."""


class DomainMixture:
    """Assigns group numbers 0, 1, 2, … to domains in proportion to their weights: a function of only the number and the weights.

    After every n groups each domain's count differs from its share n·wᵢ/Σw by at most 1 − 1/(2k − 2), with k domains: the best possible
    bound (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). Random draws would stray by √n. The sums are
    exact (whole numbers), so every machine assigns alike.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` {domain: weight >= 0}; a domain of weight 0 gets no group. Raises UserError for invalid weights."""
        if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights.values()) or not any(weights.values()):
            raise UserError(f"Domain weights must be numbers >= 0, at least one of them above 0, got {dict(weights)}.")
        self.weights = {domain: float(weight) for domain, weight in weights.items()}
        # Sorted, so that the order in a configuration file does not matter.
        self._domains = sorted(domain for domain, weight in self.weights.items() if weight > 0)
        exact = [Fraction(self.weights[domain]) for domain in self._domains]
        scale = math.lcm(*(fraction.denominator for fraction in exact))
        whole = [int(fraction * scale) for fraction in exact]
        divisor = math.gcd(*whole)
        self._whole = [number // divisor for number in whole]
        self._dealt = array("H")
        self._counts = [0] * len(self._domains)

    @staticmethod
    def single(domain: str) -> DomainMixture:
        return DomainMixture({domain: 1.0})

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains with a weight above 0, sorted."""
        return tuple(self._domains)

    def domain_of(self, number: int) -> str:
        """Domain of group `number` >= 0. The first call with a large number assigns all groups up to it (per group two bytes, and about a
        microsecond per domain)."""
        assert number >= 0, number
        while len(self._dealt) <= number:
            self._deal()
        return self._domains[self._dealt[number]]

    def _deal(self) -> None:
        total, k = sum(self._whole), len(self._domains)
        if k == 1:
            self._dealt.append(0)
            return
        n = len(self._dealt) + 1
        best, best_slack = -1, 0
        for index, (weight, count) in enumerate(zip(self._whole, self._counts, strict=True)):
            # All terms are scaled by 2(k - 1) · total. A domain may be chosen when its deficit n·w - count has reached 1/(2k - 2) ...
            deficit = (2 * k - 2) * (n * weight - count * total)
            if deficit < total:
                continue
            # ... and the domain comes first whose deficit reaches 1 - 1/(2k - 2) soonest: (bound - deficit) / weight, cross-multiplied.
            slack = (2 * k - 3) * total - deficit
            if best < 0 or slack * self._whole[best] < best_slack * weight:
                best, best_slack = index, slack
        assert best >= 0, "deficits sum to 1, so that some domain's reaches 1/(2k - 2)"
        self._dealt.append(best)
        self._counts[best] += 1


def queue_weights(domains: Mapping[str, float], shares: Mapping[str, tuple[float, Sequence[str]]]) -> dict[str, float]:
    """Weights of the group queue's domains, where each player beside the run's own gets a part of its domains' weights.

    Args:
        domains: {domain: weight}.
        shares: {player: (its share, the domains where it plays)}.
    """
    weights: dict[str, float] = {}
    for domain, weight in domains.items():
        theirs = {player: share for player, (share, where) in shares.items() if domain in where}
        weights[domain] = weight * (1.0 - sum(theirs.values()))
        weights |= {f"{domain}{PLAYER_SIGN}{player}": weight * share for player, share in theirs.items()}
    return weights


def place_of(name: str) -> str:
    """Metric prefix of a queue's domain: ``domains/lake`` for ``lake``, ``players/cool/lake`` for ``lake@cool``."""
    domain, _, player = name.partition(PLAYER_SIGN)
    return f"players/{player}/{domain}" if player else f"domains/{domain}"
