"""How long an answer of a worker may take."""

from __future__ import annotations

_FACTOR = 10.0
"""A reset may take so many times as long as the longest seen, or before there was one, as building the simulators took: machines are busy,
and seeds differ."""
_FLOOR_S = 20.0
_FIRST_FLOOR_S = 60.0
"""While not every worker has reset once: a first reset may build a scene, and the first worker's for all."""


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
    """Learned from the answers so far: ten times the longest, at least 20 s (60 s until every worker has answered), at most `ceiling_s`.

    `built_s`, the seconds that building the simulators took, stands for the longest until the first answer.
    """

    def __init__(self, ceiling_s: float, num_workers: int, built_s: float) -> None:
        super().__init__(ceiling_s)
        self._num_workers, self._seen, self._longest_s, self._built_s = num_workers, 0, 0.0, built_s

    def limit_s(self) -> float:
        """See `Patience.limit_s`."""
        floor = _FLOOR_S if self._seen >= self._num_workers else _FIRST_FLOOR_S
        return min(self._limit_s, max(floor, _FACTOR * (self._longest_s if self._seen else self._built_s)))

    def took(self, seconds: float) -> None:
        """See `Patience.took`."""
        self._seen, self._longest_s = self._seen + 1, max(self._longest_s, seconds)
