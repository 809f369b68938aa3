"""Episodes of many slots recorded side by side: a few copies per batch instead of a few per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.episodes.buffers import RowBuffer
from embodied_rl.episodes.films import Films
from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.steady import SteadyGroup
from embodied_rl.episodes.writer import RecordingWriter

_BLOCK_BYTES = 2**20
"""Of all slots' blocks together, about."""
_STEADY_BYTES = 2**20
"""Of all slots' steady rows together, about."""
_KNOWN_GROUPS = 8
"""Groups of neighbouring slots whose places are kept; there are few, unless whatever is ready steps together."""

Batch = Mapping[str, Any]
_Place = tuple[np.ndarray | None, tuple[int, ...]]


class SlotSinks:
    """One episode in progress per slot, stepped in batches as `EnvManager` hands them out. Writes what `EpisodeSink` would.

    Columns of fixed size are gathered in blocks [K, N, *shape] that all slots share, which costs one copy per column and batch where
    the slots of a batch are neighbours that step together, as pipeline groups do. The others go to their slot's sink one by one.
    Where the arrays of a batch are the same ones every time, as views into shared memory are, `steady` gathers whole batches as bytes.
    """

    def __init__(self, writer: RecordingWriter, num_slots: int, films: Films | None = None) -> None:
        """`films`: columns whose pictures are encoded elsewhere; they are due only at an episode's beginning, for their size."""
        self._writer, self._num_slots, self._films = writer, num_slots, films
        self._gathering = writer.gathering
        self._sinks: list[EpisodeSink | None] = [None] * num_slots
        self._fresh: set[int] = set()
        """Slots whose episode has had no step."""
        self._running: set[int] = set()
        """Slots whose episode has not ended."""
        self._columns: tuple[Column, ...] = ()
        self._names: set[str] = set()
        self._one_by_one: list[str] = []
        """Columns that go to the sinks row by row."""
        self._blocks: dict[str, np.ndarray] = {}
        self._order: tuple[str, ...] = ()
        """Names of the columns as they come in a batch."""
        self._views: dict[tuple[int, int], list[tuple[_Place, ...]]] = {}
        """{(first slot, how many): of each row of the blocks, the part of these slots in every column}: found once, for finding a place
        takes as long as writing to it."""
        self._block_rows, self._unknown = 0, 0
        # Rows of each slot in the blocks, and the first that its present episode has not taken yet.
        self._fill, self._taken = [0] * num_slots, [0] * num_slots
        self._steady: dict[int, SteadyGroup] = {}
        """{slot: the group that its steps may be in}"""
        self._full: list[SteadyGroup] = []
        """Groups that have no more room."""

    def start(
        self,
        slot: int,
        seed: int,
        observation: Batch,
        row: int,
        *,
        task: str | None = None,
        instruction: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        state: Batch | None = None,
        images: Batch | None = None,
    ) -> None:
        """Begin an episode; `row` is the slot's in the batches given.

        Raises:
            RecordingError: one is in progress, or it is a duplicate and these are refused.
        """
        if self._sinks[slot] is not None:
            raise RecordingError(f"The episode of slot {slot} is in progress: finish or discard it first.")
        sink = self._writer.open_episode(seed, task=task, instruction=instruction, metadata=metadata, films=self._films)
        first, state_row, image_row = (None if part is None else _row(part, row) for part in (observation, state, images))
        sink.start(first or {}, state_row, image_row)
        self._sinks[slot], self._taken[slot] = sink, self._fill[slot]
        self._fresh.add(slot)
        self._running.add(slot)
        if (group := self._steady.get(slot)) is not None:
            group.taken[group.rows[slot]], group.ready = group.fill, False

    def step(
        self,
        slots: np.ndarray,
        *,
        action: Any,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        success: np.ndarray,
        observation: Batch,
        final_observation: Batch | None = None,
        state: Batch | None = None,
        images: Batch | None = None,
        snapshots: Sequence[bytes | None] | None = None,
        **optional: Any,
    ) -> list[int]:
        """One step of n slots, each with an episode in progress.

        Args:
            slots: [n] int64 ascending.
            action, reward, terminated, truncated, success: [n, ...].
            observation: {key: [n, ...]} after the step.
            final_observation: {key: [n, ...]} what to take instead for slots whose episode ended (they were reset at once).
            state, images: {name: [n, ...]} after the step.
            snapshots: [n] of the moment before the step; None where there is none.
            optional: [n, ...] of `OPTIONAL_COLUMNS`; those that are None are left out.

        Returns:
            The rows 0 … n − 1 whose episode ended; `finish`, `take` or `discard` these slots' episodes before the next step.

        Raises:
            RecordingError: as of `EpisodeSink.step`.
        """
        numbers = slots.tolist()
        batch: dict[str, Any] = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated, "success": success}
        batch |= {name: rows for name, rows in optional.items() if rows is not None}
        for room, part in (("observation.", observation), ("state.", state), ("images.", images)):
            for key, rows in (part or {}).items():
                batch[room + key] = rows
        if not self._fresh.isdisjoint(numbers):
            self._begin(numbers, {name: rows for name, rows in batch.items() if name in optional})
        if tuple(batch) != self._order:
            self._order_as(batch)
        self._require_running(numbers)
        for slot in numbers if self._steady else ():
            self._leave_group(slot)
        if snapshots is not None:
            for slot, snapshot in zip(numbers, snapshots, strict=True):
                if snapshot is not None:
                    self._require(slot).keep_snapshot(snapshot, self._steps(slot))
        # Looking at the bytes is the quickest way to see that there is none.
        ends = b"\1" in terminated.tobytes() or b"\1" in truncated.tobytes()
        over = np.flatnonzero(np.logical_or(terminated, truncated)).tolist() if ends else []
        final = {} if final_observation is None or not over else {f"observation.{key}": rows for key, rows in final_observation.items()}
        self._write(numbers, batch, final, over)
        if over:
            self._running.difference_update(numbers[row] for row in over)
        return over

    @property
    def may_be_steady(self) -> bool:
        """Whether the columns, where they are known, allow of groups as `steady` makes them."""
        return not self._one_by_one

    def steady(self, slots: np.ndarray, outcome: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> SteadyGroup | None:
        """A group whose steps leave their outcome in these very arrays, for `step_steady`.

        Args:
            slots: [n] int64 ascending.
            outcome: {column: [n, ...]} where rewards, flags and what is seen after a step lie.
            given: {column: [n, ...]} what else comes with a step, as an example.

        Returns:
            None where the group's steps must go through `step`: nothing was recorded yet, a column varies in size, or the arrays' memory
            is not in one piece.
        """
        if not self.may_be_steady or self._names != {*outcome, *given}:
            return None
        columns = {column.name: column for column in self._columns}
        if any(array.shape != (len(slots), *columns[name].shape) for name, array in outcome.items()):
            return None
        try:
            return SteadyGroup(slots.tolist(), outcome, list(given), columns, _STEADY_BYTES * len(slots) // self._num_slots)
        except ValueError:
            return None

    def step_steady(
        self,
        group: SteadyGroup,
        given: tuple[Any, ...],
        over: Sequence[int] = (),
        final: Mapping[str, np.ndarray] | None = None,
        absent: Sequence[int] = (),
    ) -> None:
        """One step of a steady group, each slot with an episode in progress, but for those that are absent.

        Args:
            group: see `steady`; the outcome lies in its arrays.
            given: what else comes with the step, in the order of `steady`.
            over: the rows whose episode ends; `finish`, `take` or `discard` them before the next step.
            final: {column: [n, ...]} what to take instead for these.
            absent: rows of slots that did not step, and whose episode, if there is one, has had no step (see `has_stepped`).

        Raises:
            RecordingError: as of `step`.
        """
        if group.fill == group.max_rows:
            self._hand_over_group(group)
        if absent or not group.ready:
            self._enter_group(group, absent)
        group.keep(given)
        for row in absent:
            group.taken[row] = group.fill
        for row in over:
            group.correct(row, {name: rows[row] for name, rows in (final or {}).items()})
            self._running.discard(group.slots[row])
            group.ready = False
        if group.fill == group.max_rows:
            self._full.append(group)

    def settle(self) -> None:
        """Do a bit of what can wait until the next actions are sent, so that simulators need not: call it after every step.

        Raises:
            UserError: see `RecordingWriter.flush`.
        """
        while self._full:
            group = self._full.pop()
            if group.fill == group.max_rows:
                self._hand_over_group(group)
        self._gathering.advance()

    def finish(self, slot: int, metadata: Mapping[str, Any] | None = None) -> int:
        """Write the slot's episode. Returns and raises as `EpisodeSink.finish` does."""
        return self.take(slot).finish(metadata)

    def take(self, slot: int) -> EpisodeSink:
        """The slot's episode, to be finished or discarded later; the slot is free for the next one."""
        group, sink = self._steady.get(slot), self._require(slot)
        if group is not None and self._writer.gathers:
            # The rows are fetched with those of many other steps.
            group.end(group.rows[slot], sink, self._hand_over_group)
        else:
            self._hand_over(slot)
        return self._release(slot)

    def discard(self, slot: int) -> None:
        """Give the slot's episode up."""
        self._release(slot).discard()

    def in_progress(self, slot: int) -> bool:
        return self._sinks[slot] is not None

    def has_stepped(self, slot: int) -> bool:
        """Whether a slot has an episode in progress that has had a step."""
        return self._sinks[slot] is not None and slot not in self._fresh

    def _release(self, slot: int) -> EpisodeSink:
        sink, self._sinks[slot] = self._require(slot), None
        self._fresh.discard(slot)
        self._running.discard(slot)
        if (group := self._steady.get(slot)) is not None:
            group.ready = False
        return sink

    def _require(self, slot: int) -> EpisodeSink:
        sink = self._sinks[slot]
        if sink is None:
            raise RecordingError(f"Slot {slot} has no episode in progress.")
        return sink

    def _steps(self, slot: int) -> int:
        """Steps of a slot's episode so far; it is in no group."""
        return self._require(slot).num_steps + self._fill[slot] - self._taken[slot]

    def _require_running(self, slots: list[int]) -> None:
        if not self._running.issuperset(slots):
            idle = min(set(slots) - self._running)
            raise RecordingError(f"Slot {idle} has no episode in progress, or its episode has ended.")

    def _begin(self, slots: list[int], optional: Batch) -> None:
        """Make room for the episodes of `slots` whose first step this is; the very first one decides the columns."""
        for row, slot in enumerate(slots):
            if slot not in self._fresh:
                continue
            sink = self._require(slot)
            sink.begin(_row(optional, row))
            assert sink.columns is not None
            if not self._columns:
                given = [column for column in sink.columns if column.name not in sink.filmed]
                self._columns, self._names = sink.columns, {column.name for column in given}
                arrays = [column for column in given if column.encoding == "array"]
                self._one_by_one = [column.name for column in given if column.encoding != "array"]
                row_bytes = self._num_slots * sum(column.row_bytes for column in arrays)
                self._block_rows = max(1, min(_BLOCK_BYTES // row_bytes, 256))
                shape = (self._block_rows, self._num_slots)
                self._blocks = {column.name: np.empty((*shape, *column.shape), column.dtype) for column in arrays}
            elif sink.columns != self._columns:
                raise RecordingError(f"The episode of seed {sink.seed} has other columns than those beside it.")
            self._fresh.discard(slot)

    def _write(self, slots: list[int], batch: Batch, final: Batch, over: list[int]) -> None:
        """Put a row of every slot into the blocks; `over` are the rows whose episode ends."""
        first, count = slots[0], len(slots)
        time = self._fill[first]
        together = slots[-1] - first + 1 == count
        if together and self._fill[first : first + count] != [time] * count:
            # Neighbours that were stepped apart for a while go on together.
            time = 0
            for slot in slots:
                self._empty(slot)
        if together:
            for (name, rows), (target, shape) in zip(batch.items(), self._places(time, first, count), strict=True):
                if target is not None:
                    if _shape_of(rows) != shape:
                        raise _wrong_shape(name, rows, target)
                    target[...] = rows
        else:
            times = [self._fill[slot] for slot in slots]
            for name, block in self._blocks.items():
                target = block[times, slots]
                if _shape_of(batch[name]) != target.shape:
                    raise _wrong_shape(name, batch[name], target)
                block[times, slots] = batch[name]
        for name in self._one_by_one:
            for row, slot in enumerate(slots):
                source = final.get(name, batch[name]) if row in over else batch[name]
                self._require(slot).buffers[name].append(source[row])
        for name, rows in final.items():
            if name in self._blocks:
                for row in over:
                    self._blocks[name][self._fill[slots[row]], slots[row]] = rows[row]
        for slot in slots:
            self._fill[slot] += 1
        for slot in slots if time + 1 == self._block_rows or not together else ():
            if self._fill[slot] == self._block_rows:
                self._empty(slot)

    def _order_as(self, batch: Batch) -> None:
        """The columns come in another order than before. Raises RecordingError where they are others."""
        if batch.keys() != self._names:
            raise RecordingError(f"The fields of a batch differ from those before: {sorted(batch.keys() ^ self._names)}.")
        self._order = tuple(batch)
        self._views.clear()

    def _places(self, time: int, first: int, count: int) -> tuple[_Place, ...]:
        """Where to write row `time` of neighbouring slots, in every column of a batch, with its shape; None where rows go to the sinks."""
        views = self._views.get((first, count))
        if views is None:
            parts = [None if name not in self._blocks else self._blocks[name][:, first : first + count] for name in self._order]
            if len(self._views) >= _KNOWN_GROUPS:
                self._unknown += 1
                if self._unknown > self._block_rows:
                    # Those that are known are of another time.
                    self._views.clear()
                    self._unknown = 0
                return tuple((None, ()) if part is None else (part[time], part.shape[1:]) for part in parts)
            rows = ([(None, ())] * self._block_rows if part is None else [(row, row.shape) for row in part] for part in parts)
            views = self._views[first, count] = list(zip(*rows, strict=True))
        return views[time]

    def _empty(self, slot: int) -> None:
        """Make a slot's part of the blocks free for new rows."""
        self._hand_over(slot)
        self._fill[slot] = self._taken[slot] = 0

    def _hand_over(self, slot: int) -> None:
        """Give a slot's rows to its sink."""
        first, stop, sink = self._taken[slot], self._fill[slot], self._sinks[slot]
        group = self._steady.get(slot)
        if group is not None and sink is not None and group.fill > group.taken[group.rows[slot]]:
            row = group.rows[slot]
            sink.num_steps += group.fill - group.taken[row]
            sink.make_room()
            for name, rows in group.of_slot(row):
                _extend(sink, name, rows)
        if sink is not None and stop > first:
            for name, block in self._blocks.items():
                _extend(sink, name, block[first:stop, slot].copy())
            sink.num_steps += stop - first
        self._taken[slot] = stop

    # ---- steady groups ----------------------------------------------------------------------------------------------

    def _enter_group(self, group: SteadyGroup, absent: Sequence[int]) -> None:
        """Have a group's slots go on in it, whatever they went on in before."""
        present = [slot for slot, row in group.rows.items() if row not in absent] if absent else group.slots
        for slot in self._fresh.intersection(present):
            self._require(slot).begin_as(self._columns, self._writer.part_for(self._columns))
            self._fresh.discard(slot)
        self._require_running(present)
        for slot in group.slots:
            if self._steady.get(slot) is not group:
                self._leave_group(slot)
                self._empty(slot)
                self._steady[slot], group.taken[group.rows[slot]] = group, group.fill
        group.ready = not absent

    def _leave_groups(self) -> None:
        """Let go of all groups."""
        for slot in list(self._steady):
            self._leave_group(slot)

    def _leave_group(self, slot: int) -> None:
        if slot in self._steady:
            self._hand_over(slot)
            self._steady.pop(slot).ready = False
            if (sink := self._sinks[slot]) is not None and sink.columns is not None:
                sink.make_room()

    def _hand_over_group(self, group: SteadyGroup) -> None:
        """Give all rows of a group to the sinks."""
        fill = group.fill
        parts = group.ended
        for slot, row in group.rows.items():
            sink, first = self._sinks[slot], group.taken[row]
            if sink is not None and self._steady.get(slot) is group and first < fill:
                sink.num_steps += fill - first
                parts.append((sink, row, first, fill))
        columns = group.of_all()
        for sink, row, first, stop in parts:
            if not sink.is_discarded:
                sink.add_late({name: rows[row, first:stop] for name, rows in columns}, (stop - first) * group.step_bytes)
            sink.fetch = None


def _extend(sink: EpisodeSink, name: str, rows: np.ndarray) -> None:
    buffer = sink.buffers[name]
    assert isinstance(buffer, RowBuffer)
    buffer.extend_block(rows)


def _shape_of(rows: Any) -> tuple[int, ...]:
    try:
        return rows.shape
    except AttributeError:
        return np.shape(rows)


def _wrong_shape(name: str, rows: Any, target: np.ndarray) -> RecordingError:
    return RecordingError(f"Field '{name}' must be {list(target.shape)}, got {list(_shape_of(rows))}.")


def _row(part: Batch, row: int) -> dict[str, Any]:
    return {key: rows[row] for key, rows in part.items()}
