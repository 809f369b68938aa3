"""The arithmetic of a recording: which slot plays which seed, and which episodes are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_AHEAD = 4
"""Seeds per slot that may be played beyond the first one that is still undecided, where only successes are kept."""

Outcome = Literal["recorded", "unsuccessful", "given_up"]


@dataclass(frozen=True)
class RecordingPlan:
    """Which episodes to record. Raises ValueError for impossible numbers."""

    num_episodes: int
    first_seed: int = 0
    """Seeds are first_seed, first_seed + 1, …"""
    only_success: bool = False
    """Keep the first `num_episodes` successful episodes in the order of their seeds, not in the order in which they finish."""
    max_seeds: int | None = None
    """With only_success: give up after so many seeds; None: 10 × num_episodes."""
    noise_seed: int = 0
    """Of the player's randomness, with the episode's own seed."""
    snapshot_every: int | None = None
    """Steps between snapshots of the simulator; None: none."""
    max_retries: int = 2
    """How often an episode that its simulator gave up is begun again. (With on_fault=restart the neighbours in the same process are
    given up with it; otherwise only this episode is.)"""

    def __post_init__(self) -> None:
        limits = (self.num_episodes, self.seed_limit, 1 if self.snapshot_every is None else self.snapshot_every)
        if min(limits) < 1 or min(self.first_seed, self.noise_seed, self.max_retries) < 0 or self.seed_limit < self.num_episodes:
            raise ValueError(f"A recording of impossible size: {self}.")

    @property
    def seed_limit(self) -> int:
        """Seeds that may be played."""
        if not self.only_success:
            return self.num_episodes
        return 10 * self.num_episodes if self.max_seeds is None else self.max_seeds


class SeedQueue:
    """Which slot plays which seed, and which episodes are kept. Numbers count seeds from the plan's first.

    Slot s of N plays the numbers s, s + N, … in this order.
    """

    def __init__(self, plan: RecordingPlan, num_slots: int, outcomes: Mapping[int, Outcome]) -> None:
        """`outcomes`: {number: what is known from before}."""
        self._plan, self._num_slots = plan, num_slots
        self._outcomes = dict(outcomes)
        self._next = list(range(num_slots))
        self._cursor = self._kept = 0
        self._held: set[int] = set()
        """Successes that wait for the numbers before them."""
        self._advance()

    @property
    def num_kept(self) -> int:
        """Episodes of the plan that are recorded for good."""
        return self._kept

    @property
    def done(self) -> bool:
        """Whether nothing is left to decide."""
        return self._kept >= self._plan.num_episodes or self._cursor >= self._plan.seed_limit

    @property
    def missing(self) -> list[int]:
        """Numbers that were given up."""
        return sorted(number for number, outcome in self._outcomes.items() if outcome == "given_up")

    def take(self, slot: int) -> int | None:
        """The next number that the slot plays; None: nothing for now."""
        while (number := self._next[slot]) in self._outcomes:
            self._next[slot] += self._num_slots
        if self.done or number >= self._plan.seed_limit or (self._plan.only_success and not self._is_wanted(number)):
            return None
        self._next[slot] += self._num_slots
        return number

    def finished(self, number: int, outcome: Outcome) -> list[int]:
        """Note what became of a number; returns the numbers of episodes that are to be written now."""
        self._outcomes[number] = outcome
        if outcome == "recorded":
            self._held.add(number)
            if not self._plan.only_success:
                self._advance()
                self._held.discard(number)
                return [number]
        return self._advance()

    def _is_wanted(self, number: int) -> bool:
        """Whether it is kept if it succeeds, should everything undecided before it succeed too."""
        if number >= self._cursor + _AHEAD * self._num_slots:
            return False
        may_succeed = sum(self._outcomes.get(other, "recorded") == "recorded" for other in range(self._cursor, number))
        return self._kept + may_succeed < self._plan.num_episodes

    def _advance(self) -> list[int]:
        decided = []
        while not self.done and self._cursor in self._outcomes:
            if self._outcomes[self._cursor] == "recorded":
                self._kept += 1
                if self._cursor in self._held:
                    self._held.remove(self._cursor)
                    decided.append(self._cursor)
            self._cursor += 1
        return decided
