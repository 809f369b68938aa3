"""Episodes of many slots recorded from what a manager hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.episodes.films import Films
from embodied_rl.episodes.slots import SlotSinks
from embodied_rl.episodes.steady import SteadyGroup
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.sim.instrumented import Split, split
from embodied_rl.types import Observation, StepBatch

_KNOWN_BATCHES = 8
"""Of ranges of slots; there are few, unless whatever is ready steps together."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A range of slots whose batch is the same object at every step, until an episode ends."""

    batch: StepBatch
    given: tuple[str, ...]
    """Names of what else comes with a step."""
    group: SteadyGroup

    def is_place_of(self, batch: StepBatch) -> bool:
        """Whether a batch's outcome lies in the same arrays."""
        own = self.batch
        return (
            batch.reward is own.reward
            and batch.terminated is own.terminated
            and batch.truncated is own.truncated
            and batch.success is own.success
            and (batch.observation is own.observation or _same_arrays(batch.observation, own.observation))
        )


class BatchSinks(SlotSinks):
    """`SlotSinks` that take a `StepBatch` as it is."""

    def __init__(self, writer: RecordingWriter, num_slots: int, films: Films | None = None, *, observations_alone: bool = False) -> None:
        """`observations_alone`: leave out states and images, which the batches may hold too."""
        super().__init__(writer, num_slots, films)
        self._rooms = ("observation",) if observations_alone else ("observation", "state", "images")
        self._filmed = films.columns if films else frozenset()
        self._known: dict[int, _Known] = {}
        """By the batch's identity, which stays its own as long as it is held here."""
        self._last: dict[tuple[int, int], StepBatch] = {}
        """{(first slot, how many): the last batch}, of those that are not known."""

    def step_batch(
        self,
        batch: StepBatch,
        given: Mapping[str, Any],
        *,
        rows: Sequence[int] | None = None,
        snapshots: Sequence[bytes | None] | None = None,
    ) -> list[int]:
        """One step of the slots of a batch, each with an episode in progress.

        Args:
            batch: as `EnvManager.recv` hands it out, after automatic resets or without.
            given: {column: [n, ...]} the actions and what else was done, in the order of `batch.slots`.
            rows: of the batch that are meant; None: all.
            snapshots: of each of these rows, of the moment before the step.

        Returns:
            The rows whose episode ended; `finish`, `take` or `discard` these slots' episodes before the next step.

        Raises:
            RecordingError: as of `SlotSinks.step`.
        """
        known = self._known.get(id(batch))
        if known is not None and rows is None and snapshots is None and tuple(given) == known.given:
            # Nothing ended, or it would be another object.
            group = known.group
            if group.ready and group.fill + 1 < group.max_rows:
                group.keep(tuple(given.values()))  # all that is left of `step_steady`, without which it is a third quicker
            else:
                self.step_steady(group, tuple(given.values()))
            return []
        if snapshots is None and (over := self._step_known(batch, given, rows)) is not None:
            return over
        chosen: Any = ... if rows is None else list(rows)
        after, final = split(batch.observation), split(batch.final_observation)
        over = np.flatnonzero(batch.terminated[chosen] | batch.truncated[chosen]).tolist()
        self.step(
            batch.slots[chosen],
            **{name: _rows(column, chosen) for name, column in given.items()},
            reward=batch.reward[chosen],
            terminated=batch.terminated[chosen],
            truncated=batch.truncated[chosen],
            success=batch.success[chosen],
            observation=self._to_write(after, "observation", chosen),
            final_observation=self._to_write(final, "observation", chosen) if over else None,
            state=_ended_as(self._to_write(after, "state", chosen), self._to_write(final, "state", chosen), over),
            images=_ended_as(self._to_write(after, "images", chosen), self._to_write(final, "images", chosen), over),
            snapshots=snapshots,
        )
        if rows is None and snapshots is None:
            self._get_to_know(batch, given)
            return over
        return over if rows is None else [rows[row] for row in over]

    def forget_batches(self) -> None:
        """Let go of the batches that are known, and of the memory that they are views into."""
        self._known.clear()
        self._last.clear()
        self._leave_groups()

    def _step_known(self, batch: StepBatch, given: Mapping[str, Any], rows: Sequence[int] | None) -> list[int] | None:
        """`step_batch` where episodes begin or end in a range that is known; None where it is not."""
        for known in self._known.values():
            if known.is_place_of(batch):
                break
        else:
            return None
        absent = [] if rows is None else sorted(set(range(len(batch.slots))) - set(rows))
        if tuple(given) != known.given or any(self.has_stepped(int(batch.slots[row])) for row in absent):
            return None
        over: list[int] = [row for row in np.flatnonzero(batch.terminated | batch.truncated).tolist() if row not in absent]
        final = self._seen(batch.final_observation) if over else {}
        self.step_steady(known.group, tuple(given.values()), over, final, absent)
        return over

    def _get_to_know(self, batch: StepBatch, given: Mapping[str, Any]) -> None:
        """Remember a batch that came a second time."""
        if not self.may_be_steady or not batch.slots.size or int(batch.slots[-1]) - int(batch.slots[0]) + 1 != batch.slots.size:
            return
        place = int(batch.slots[0]), batch.slots.size
        if self._last.get(place) is not batch:
            if len(self._last) >= _KNOWN_BATCHES:
                self._last.clear()
            self._last[place] = batch
            return
        outcome = {"reward": batch.reward, "terminated": batch.terminated, "truncated": batch.truncated, "success": batch.success}
        group = self.steady(batch.slots, outcome | self._seen(batch.observation), given)
        if group is not None:
            if len(self._known) >= _KNOWN_BATCHES:
                self._known.clear()
            self._known[id(batch)] = _Known(batch, tuple(given), group)

    def _seen(self, observation: Observation) -> dict[str, np.ndarray]:
        """{column: [n, ...]} what is written of what is seen."""
        parts = split(observation)
        return {f"{room}.{key}": rows for room in self._rooms for key, rows in self._to_write(parts, room, ...).items()}

    def _to_write(self, parts: Split, room: str, chosen: Any) -> dict[str, Any]:
        """Of what is seen, what is written here: all but the filmed columns."""
        if room not in self._rooms:
            return {}
        seen: Observation = getattr(parts, room)
        return {key: part if chosen is ... else part[chosen] for key, part in seen.items() if f"{room}.{key}" not in self._filmed}


def _same_arrays(left: Observation, right: Observation) -> bool:
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)


def _ended_as(after: dict[str, Any], final: Mapping[str, Any], over: list[int]) -> dict[str, Any]:
    """What is seen after a step: where an episode ended its last, not the next one's first."""
    if not over:
        return after
    copies = {key: part.copy() for key, part in after.items()}
    for key, part in copies.items():
        part[over] = final[key][over]
    return copies


def _rows(column: Any, chosen: Any) -> Any:
    """The chosen rows of a column, which may be a list of texts."""
    if chosen is ...:
        return column
    return column[chosen] if isinstance(column, np.ndarray) and column.dtype != object else [column[row] for row in chosen]
