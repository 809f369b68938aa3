"""Finished episodes that are written together: a few large pieces cost a fraction of many small ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodied_rl.episodes.part import Gathered, PartWriter
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import EpisodeSink

GATHER_S = 0.5
"""How long a finished episode waits for others, where it may."""
_ENOUGH_EPISODES, _ENOUGH_BYTES = 16, 2**20
"""`advance` begins to write so many."""
_MAX_EPISODES, _MAX_BYTES = 32, 2**22
"""`add` writes so many before it takes another, and its caller waits."""
_SLICE_S = 50e-6
"""How long `advance` takes, about: processes that simulate have work for some hundred microseconds, and while it takes longer they wait."""

_Waiting = Sequence[tuple[EpisodeSink, Mapping[str, Any]]]


class Gathering:
    """Episodes of one part that wait to be written."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.waiting: list[tuple[EpisodeSink, Mapping[str, Any]]] = []
        """Each with the arguments of `summary_of` for it."""
        self.deadline = 0.0
        """When they are due (time.perf_counter seconds)."""
        self._part: PartWriter | None = None
        self._bytes = 0
        self._work: Iterator[None] | None = None
        """Writes episodes that waited, a bit at a time."""
        self._behind = 0
        """The number in the part of the first episode after these."""

    def add(self, sink: EpisodeSink, about: Mapping[str, Any]) -> int:
        """Take a finished episode with all rows in memory.

        Returns the number that it will have in its part, unless one before it cannot be written. Raises as `flush` does.
        """
        assert sink.part is not None
        are_many = len(self.waiting) >= _MAX_EPISODES or self._bytes >= _MAX_BYTES
        if sink.part is not self._part or are_many or (self.waiting and time.perf_counter() >= self.deadline):
            self.flush()
            self._part = sink.part
        if not self.waiting:
            self.deadline = time.perf_counter() + self.max_wait_s
        self.waiting.append((sink, about))
        self._bytes += self._part.step_bytes * sink.num_steps
        return (self._part.num_episodes if self._work is None else self._behind) + len(self.waiting) - 1

    def advance(self) -> None:
        """Write a bit, if the first has waited long enough, or there are enough. Raises as `flush` does."""
        if self._work is None:
            if not self.waiting:
                return
            are_enough = len(self.waiting) >= _ENOUGH_EPISODES or self._bytes >= _ENOUGH_BYTES
            if not are_enough and time.perf_counter() < self.deadline:
                return
            self._begin()
        self._go_on(time.perf_counter() + _SLICE_S)

    def flush(self) -> None:
        """Write all.

        Raises:
            RecordingError: one holds NaN or infinity; the others are written.
            UserError: they cannot be written.
        """
        try:
            self._go_on(math.inf)
        finally:
            if self.waiting:
                self._begin()
                self._go_on(math.inf)

    def _begin(self) -> None:
        """Have those that wait written by `_go_on`."""
        assert self._part is not None
        waiting, self.waiting, self._bytes = self.waiting, [], 0
        self._work, self._behind = _written(waiting, self._part), self._part.num_episodes + len(waiting)

    def _go_on(self, until: float) -> None:
        while (work := self._work) is not None:
            self._work = None  # in case that it raises
            for _ in work:
                self._work = work
                break
            if time.perf_counter() >= until:
                break


def _written(waiting: _Waiting, part: PartWriter) -> Iterator[None]:
    """Write episodes, a bit between one item and the next. Raises as `Gathering.flush`."""
    errors: list[RecordingError] = []
    episodes: list[Gathered] = []
    for sink, about in waiting:
        try:
            episodes.append(Gathered(sink.take_columns(), about))
        except RecordingError as error:
            errors.append(error)
        yield
    try:
        yield from part.commit_together(episodes)
    except RecordingError:
        for episode in episodes:
            try:
                yield from part.commit_together([episode])
            except RecordingError as error:
                errors.append(error)
    if errors:
        raise errors[0]
