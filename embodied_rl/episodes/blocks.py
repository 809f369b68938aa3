"""Many episodes read at once, column by column: what a reader of a whole recording wants, at the speed of copying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.episodes.recorded import RecordedEpisode


@dataclass(frozen=True, eq=False)
class EpisodeBlock:
    """n episodes with M steps together; a column's rows lie one episode after another.

    Read-only views into the recording's files where they lie there like that, as long as the recording is open; copies otherwise.
    """

    numbers: np.ndarray
    """[n] int64 of the episodes in their recording."""
    lengths: np.ndarray
    """[n] int64 steps of each."""
    columns: Mapping[str, np.ndarray]
    """{name: [M, ...], or [M + n, ...] of observations, states and images}; named as in `RecordedEpisode`, the key behind a dot:
    ``action``, ``observation.state``."""

    def __len__(self) -> int:
        """n"""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """M"""
        return int(self.lengths.sum())

    @property
    def step_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per step."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def observation_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per observation."""
        return self.step_starts + np.arange(len(self))

    @property
    def episode_of_step(self) -> np.ndarray:
        """[M] int64 which of the n episodes each step belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def first_not_finite(self, names: Iterable[str]) -> tuple[int, str] | None:
        """(number of an episode in the recording, one of these columns that holds NaN or infinity there); None: there is none."""
        for name in names:
            rows = self.columns[name]
            if rows.dtype.kind in "fc" and not (finite := np.isfinite(rows)).all():
                row = int(np.argmin(finite.reshape(len(rows), -1).all(axis=1)))
                return self._number_at(name, row), name
        return None

    def first_early_end(self) -> int | None:
        """Number of an episode in the recording that goes on after a step that ends it; None: there is none."""
        if "terminated" not in self.columns or "truncated" not in self.columns:
            return None
        early = self.columns["terminated"] | self.columns["truncated"]
        early[np.cumsum(self.lengths) - 1] = False
        return self._number_at("terminated", int(np.argmax(early))) if early.any() else None

    def _number_at(self, name: str, row: int) -> int:
        starts = self.observation_starts if per_observation(name) else self.step_starts
        return int(self.numbers[np.searchsorted(starts, row, side="right") - 1])


def per_observation(name: str) -> bool:
    """Whether a column has a row for each observation, one more than steps."""
    return "." in name


def block_of(episodes: Sequence[RecordedEpisode], numbers: np.ndarray, names: Iterable[str]) -> EpisodeBlock:
    """Episodes in memory as a block. Raises KeyError naming a column that one of them lacks."""
    lengths = np.array([episode.num_steps for episode in episodes], np.int64)
    there = [episode.columns() for episode in episodes]
    return EpisodeBlock(numbers, lengths, {name: joined([columns[name] for columns in there]) for name in names})


def runs_of(positions: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, stop): [3, 4, 5, 9, 2] → (3, 6), (9, 10), (2, 3)."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, cuts) if len(part)]


def cut_by_steps(lengths: np.ndarray, max_steps: int) -> list[int]:
    """Where to cut episodes into blocks of at most `max_steps` steps (or a single episode): the ends of the blocks."""
    ends, cuts, first = np.cumsum(lengths), list[int](), 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        first = max(first + 1, int(np.searchsorted(ends, before + max_steps, side="right")))
        cuts.append(first)
    return cuts


def joined(parts: list[Any]) -> np.ndarray:
    """Rows one after another; pictures are decoded."""
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])
