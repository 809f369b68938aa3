"""Finished episodes that are written together: a few large pieces cost a fraction of many small ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.recording import RecordingError

if TYPE_CHECKING:
    from embodied_rl.episodes.part import PartWriter
    from embodied_rl.episodes.sink import EpisodeSink

GATHER_S = 0.5
"""How long a finished episode waits for others, where it may."""
_MAX_EPISODES, _MAX_BYTES = 32, 2**22


@dataclass(frozen=True, eq=False)
class Gathered:
    """A finished episode all of whose columns are in memory."""

    columns: list[list[np.ndarray]]
    """Of each column of the part its rows, in pieces [t, *shape] of the column's dtype."""
    about: Mapping[str, Any]
    """``seed``, ``task``, ``instruction`` and ``metadata``."""


class Gathering:
    """Episodes of one part that wait to be written."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.waiting: list[tuple[EpisodeSink, Mapping[str, Any]]] = []
        """With what `summary_of` is to be told about each."""
        self.deadline = 0.0
        """When they are due (time.perf_counter seconds)."""
        self._part: PartWriter | None = None
        self._bytes = 0

    def add(self, sink: EpisodeSink, about: Mapping[str, Any]) -> int:
        """Take a finished episode with all rows in memory. Returns the number that it will have in its part. Raises as `flush` does."""
        assert sink.part is not None
        self.flush_due()
        if sink.part is not self._part:
            self.flush()
            self._part = sink.part
        if not self.waiting:
            self.deadline = time.perf_counter() + self.max_wait_s
        self.waiting.append((sink, about))
        self._bytes += self._part.step_bytes * sink.num_steps
        if len(self.waiting) >= _MAX_EPISODES or self._bytes >= _MAX_BYTES:
            self.deadline = 0.0
        return self._part.num_episodes + len(self.waiting) - 1

    def flush_due(self) -> None:
        """Write them if the first has waited long enough, or they are many. Raises as `flush` does."""
        if self.waiting and time.perf_counter() >= self.deadline:
            self.flush()

    def flush(self) -> None:
        """Write all.

        Raises:
            RecordingError: one holds NaN or infinity; the others are written.
            UserError: they cannot be written.
        """
        waiting, self.waiting, self._bytes = self.waiting, [], 0
        if not waiting:
            return
        assert self._part is not None
        errors: list[RecordingError] = []
        episodes: list[Gathered] = []
        for sink, about in waiting:
            try:
                episodes.append(Gathered(sink.take_columns(), about))
            except RecordingError as error:
                errors.append(error)
        try:
            self._part.commit_together(episodes)
        except RecordingError:
            for episode in episodes:
                try:
                    self._part.commit_together([episode])
                except RecordingError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
