"""How long an answer of a worker may take."""

from __future__ import annotations

_FACTOR = 10.0
"""A reset may take so many times as long as the longest seen: machines are busy, and seeds differ."""
_FLOOR_S = 20.0
_FIRST_FLOOR_S = 60.0
"""While not every worker has reset once: the first to build a scene may be the one that builds it for all."""


class Patience:
    """The same for every answer."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def limit_s(self) -> float:
        """Seconds from a request until its answer is too late."""
        return self._limit_s

    def took(self, seconds: float) -> None:
        """An answer came after so long."""


class LearnedPatience(Patience):
    """Learned from the answers so far: ten times the longest, at least 20 s and at most `ceiling_s`, which holds until the first came."""

    def __init__(self, ceiling_s: float, num_workers: int) -> None:
        super().__init__(ceiling_s)
        self._num_workers, self._seen, self._longest_s = num_workers, 0, 0.0

    def limit_s(self) -> float:
        """See `Patience.limit_s`."""
        if not self._seen:
            return self._limit_s
        floor = _FLOOR_S if self._seen >= self._num_workers else _FIRST_FLOOR_S
        return min(self._limit_s, max(floor, _FACTOR * self._longest_s))

    def took(self, seconds: float) -> None:
        """See `Patience.took`."""
        self._seen, self._longest_s = self._seen + 1, max(self._longest_s, seconds)
