"""Episodes on their way into a recording, step by step; for slots with steady arrays, many steps at once."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from embodied_rl.episodes.buffers import SPILL_BYTES, Buffer, EpisodeRows, VideoBuffer
from embodied_rl.episodes.folder import EpisodeAbout
from embodied_rl.episodes.layout import Column, Films, is_extra
from embodied_rl.episodes.recording import OPTIONAL_COLUMNS, RecordingError, Value
from embodied_rl.episodes.writer import RecordingWriter


class Sink(ABC):
    """Receives one episode during play: `start`, `step` T times, then `finish` or `discard`."""

    def start(
        self,
        observation: Mapping[str, Any],
        state: Mapping[str, np.ndarray] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Begin with the data after the reset.

        Args:
            observation: {key: [...]} of this environment.
            state: {name: [...]} of the simulator; if given here, every step must give it.
            images: {camera: [H, W, 3] uint8}; if given here, every step must give them.
        """
        self.begin(columns_around(observation, state, images))

    def step(
        self,
        *,
        action: Value,
        reward: float,
        terminated: bool,
        truncated: bool,
        success: bool,
        observation: Mapping[str, Any],
        state: Mapping[str, np.ndarray] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        snapshot: bytes | None = None,
        **optional: Value,
    ) -> None:
        """Add one step; names and shapes are those of `RecordedEpisode`, without the time axis.

        Args:
            action: [A] the simulator's action.
            observation: {key: [...]} after the step; if the environment was reset at once, the episode's last, not the next one's first.
            state, images: after the step.
            snapshot: snapshot from before the step.
            optional: `OPTIONAL_COLUMNS`; if given at the first step, every step must give them. None means not given.

        Raises RecordingError: the episode has ended, a field is missing, or its shape has changed.
        """
        row = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated, "success": success}
        given = {name: value for name, value in optional.items() if value is not None}
        row |= {name: given.pop(name) for name in OPTIONAL_COLUMNS if name in given} | given
        self.append(row | columns_around(observation, state, images), snapshot)

    @abstractmethod
    def begin(self, row: Mapping[str, Any]) -> None:
        """`start` with {column: value}."""

    @abstractmethod
    def append(self, row: dict[str, Any], snapshot: bytes | None = None) -> None:
        """`step` with {column: value}."""

    @abstractmethod
    def finish(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Finish the episode, with `metadata` added to that from its beginning. Returns its number."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the episode. Does nothing if it is finished."""


class EpisodeSink(Sink):
    """Passes one episode to a `RecordingWriter` when it is finished.

    Values are copied at once, so callers may pass views into shared memory. Pictures go to the encoder; other columns beyond a few MB wait
    in temporary files.

    Args:
        writer: receives the finished episode. Closing the writer drops episodes in progress. seed, task, instruction, metadata: see
            `RecordedEpisode`.
        films: columns whose pictures another process encodes: only the first picture is passed here, and it is not written.

    Raises RecordingError: the episode is a duplicate, and the writer refuses duplicates.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        seed: int,
        *,
        task: str | None = None,
        instruction: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        films: Films | None = None,
    ) -> None:
        self.num_steps = 0
        self.is_over = False
        """Whether the last step has been added."""
        self.filmed: Set[str] = films.columns if films else frozenset()
        self.columns: tuple[Column, ...] | None = None
        """Columns of the episode; known from the first step on."""
        self._writer, self._films = writer, films
        self._about = EpisodeAbout(int(seed), task, instruction, dict(metadata or {}))
        self._first: dict[str, Any] | None = None
        self._rows: EpisodeRows | None = None
        self._due: dict[str, Buffer] = {}
        """Buffers of `_rows` that every step fills."""
        self._late: list[Mapping[str, np.ndarray]] = []
        """Rows [t, *shape] of every column, to follow the first observation and `_rows`."""
        self._late_bytes = 0
        self._fetch: Callable[[], None] | None = None
        self.is_closed = self.is_discarded = False
        writer.is_duplicate(self._about)

    @property
    def seed(self) -> int:
        return self._about.seed

    def begin(self, row: Mapping[str, Any]) -> None:
        self._require(self._first is None and not self.is_closed, "has begun already")
        # The columns are known from the first step on, so a copy waits until then.
        self._first = copy.deepcopy(dict(row))

    def append(self, row: dict[str, Any], snapshot: bytes | None = None) -> None:
        if self.columns is None:
            # Those of the first step, and those of the first observation.
            optional = {name: value for name, value in row.items() if name in OPTIONAL_COLUMNS}
            around = {name: value for name, value in (self._first or {}).items() if is_extra(name)}
            self.begin_as(self._writer.columns_for({**optional, **around}))
        self._require(not self.is_over and not self.is_closed, "has ended")
        rows = self.make_room() if self._rows is None or self._late else self._rows
        if snapshot is not None:
            rows.keep_snapshot(snapshot, self.num_steps)
        self.num_steps += 1
        self.is_over = bool(row["terminated"] or row["truncated"])
        if row.keys() != self._due.keys():
            missing, unknown = sorted(self._due.keys() - row.keys()), sorted(row.keys() - self._due.keys())
            if missing:
                raise RecordingError(f"The episode of seed {self.seed} lacks '{missing[0]}' at step {self.num_steps - 1}.")
            self._require(False, f"had no '{unknown[0]}' before, and has one")
        for name, buffer in self._due.items():
            buffer.append(row[name])

    def finish(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Write the episode; it is readable from then on.

        `metadata`: further metadata, added to that from the beginning.

        Returns its number in its part, or `SKIPPED`.

        Raises:
            RecordingError: it has no step, or contains NaN or infinity (an episode that waits for others: when it is written).
            UserError: it cannot be written.
        """
        self._require(self.num_steps > 0 and not self.is_closed, "has no steps to write")
        assert self.columns is not None
        about = EpisodeAbout(self.seed, self._about.task, self._about.instruction, {**self._about.metadata, **(metadata or {})})
        try:
            if self._may_wait():
                number = self._writer.gather(self.columns, about, self.num_steps, self._take_columns)
                self.is_closed = number >= 0  # its rows are taken later
                return number
            if self._fetch is not None:
                self._fetch()
            rows = self.make_room()
            if self._films is not None:
                for name in self.filmed:
                    buffer = rows.buffers[name]
                    assert isinstance(buffer, VideoBuffer)
                    buffer.take_over(self._films.path(name, self.seed, self.num_steps + 1), self.num_steps + 1)
            return self._writer.commit(self.columns, rows, about)
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop the episode and all its data. Does nothing if it is finished."""
        if not self.is_closed:
            self.is_closed = self.is_discarded = True
            if self._rows is not None:
                self._writer.give_up(self._rows)
            if self._films is not None:
                self._films.remove(self.seed, self.num_steps + 1)

    # ---- for sinks of many slots ----

    def begin_as(self, columns: tuple[Column, ...]) -> None:
        """Set the episode's columns; their buffers are allocated when needed."""
        self._require(self._first is not None and not self.is_closed, "has not begun")
        self.columns = columns

    def add_rows(self, rows: Mapping[str, np.ndarray], num_bytes: int) -> None:
        """Take ownership of rows [t, *shape] of every column, of its dtype; they already count as steps."""
        self._late.append(rows)
        self._late_bytes += num_bytes
        self._fetch = None

    def spill(self) -> None:
        """Put received rows into the buffers, which write to files, if they are many. Raises UserError."""
        if self._late_bytes > SPILL_BYTES:
            self.make_room()

    def await_rows(self, num_steps: int, fetch: Callable[[], None]) -> None:
        """Note that the last steps are elsewhere: `fetch` adds their rows, for this episode and others."""
        self.num_steps += num_steps
        self._fetch = fetch

    # ---- inside ----

    def make_room(self) -> EpisodeRows:
        """Allocate buffers, with all earlier rows in them."""
        assert self.columns is not None
        if self._rows is None:
            self._rows = self._writer.room_for(self.columns)
            self._due = {name: buffer for name, buffer in self._rows.buffers.items() if name not in self.filmed}
            self._put_first(self._rows)
        late, self._late, self._late_bytes = self._late, [], 0
        for rows in late:
            self._rows.extend(rows)
        return self._rows

    def _take_columns(self) -> list[list[np.ndarray]]:
        """Release the rows of each column in pieces [t, *shape], for an episode that `_may_wait`."""
        if self._fetch is not None:
            self._fetch()
        assert self.columns is not None
        if self._rows is None and self._begins_as(self.columns):
            assert self._first is not None
            # Without buffers, which would take longer than the rest.
            first, late = self._first, self._late
            self._first, self._late = {}, []
            return [
                [first[column.name][None], *[rows[column.name] for rows in late]]
                if column.per == "observation"
                else [rows[column.name] for rows in late]
                for column in self.columns
            ]
        rows = self.make_room()
        taken = rows.take()  # large columns come from a file just fetched
        self._writer.give_up(rows)
        return taken

    def _begins_as(self, columns: tuple[Column, ...]) -> bool:
        """Whether the first observation fits the columns, including the dtype; otherwise a buffer converts it or raises."""
        first = self._first or {}
        due = [column for column in columns if column.per == "observation"]
        return len(due) == len(first) and all(
            isinstance(value := first.get(column.name), np.ndarray) and value.shape == column.shape and value.dtype.str == column.dtype
            for column in due
        )

    def _may_wait(self) -> bool:
        """Whether all rows are of fixed size and in memory."""
        assert self.columns is not None
        if not self._writer.gathers or any(column.encoding != "array" for column in self.columns):
            return False
        return self._rows is None or self._rows.are_in_memory

    def _put_first(self, rows: EpisodeRows) -> None:
        assert self.columns is not None
        assert self._first is not None
        for column in self.columns:
            if column.per == "observation":
                self._require(column.name in self._first, f"lacks '{column.name}' at its beginning, and")
                first = self._first.pop(column.name)
                if column.name not in self.filmed:
                    rows.buffers[column.name].append(first)
        self._require(not self._first, f"has {sorted(self._first)}, which the simulator lacks, and")

    def _require(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise RecordingError(f"The episode of seed {self.seed} {complaint} at step {self.num_steps}.")


def columns_around(
    observation: Mapping[str, Any], state: Mapping[str, Any] | None = None, images: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """{column: value} of an observation, with state and images."""
    columns = {f"observation.{key}": value for key, value in observation.items()}
    if state:
        columns.update({f"state.{name}": value for name, value in state.items()})
    if images:
        columns.update({f"images.{camera}": value for camera, value in images.items()})
    return columns


_MAX_ROWS = 256
"""Limit on rows; with more, conversion is no faster, and simulators wait longer at a time."""
_ALIGNMENT = 64
_JOINED_BYTES = 2**12
"""Largest array that is copied with others; a larger one would be copied twice."""


class SteadyGroup:
    """Rows of a group of slots that step together, each with an episode in progress; created and used by `BatchSinks`.

    Outcomes and actions of a step are copied as they are in memory. They become columns many steps at a time, when the room is used up or
    an episode has to be written.
    """

    def __init__(
        self, slots: Sequence[int], outcome: Mapping[str, np.ndarray], given: Sequence[str], layout: tuple[Column, ...], max_bytes: int
    ) -> None:
        """
        Args:
            slots: [n] numbers of the slots.
            outcome: {column: [n, ...]} arrays that contain the outcome of every step.
            given: names of the columns that are passed with each step.
            layout: columns of the episodes.
            max_bytes: approximate size of the rows.

        Raises ValueError: an outcome's memory is not one piece.
        """
        columns = {column.name: column for column in layout}
        self.slots, self.layout = list(slots), layout
        self.rows = {slot: row for row, slot in enumerate(self.slots)}
        self.ready = False
        """Whether every slot has an episode in progress that continues in this group."""
        for name, array in outcome.items():
            if not array.flags.c_contiguous or array.dtype.hasobject or not array.nbytes:
                raise ValueError(f"'{name}' is not one piece of memory")
        large = [name for name, array in outcome.items() if array.nbytes > _JOINED_BYTES]
        self._columns = [columns[name] for name in (*given, *outcome)]
        self.step_bytes = sum(column.row_bytes for column in self._columns)
        """Bytes of a slot's step."""
        self.max_rows, self.fill = max(1, min(_MAX_ROWS, max_bytes // (len(self.slots) * self.step_bytes))), 0
        self.taken = [0] * len(self.slots)
        """For each slot, the first row that its current episode has not received."""
        self.ended: list[tuple[EpisodeSink, int, int, int]] = []
        """(sink, the slot's row here, first row not yet received, end of those rows) of each finished episode."""
        self._given = [columns[name] for name in given]
        self._dtypes = [np.dtype(column.dtype) for column in self._given]
        joined = {column.name: np.empty((len(self.slots), *column.shape), column.dtype) for column in self._given}
        small = {"": np.zeros(-sum(array.nbytes for array in joined.values()) % _ALIGNMENT, np.uint8)}
        # The widest numbers first, so that all are aligned.
        small |= {name: outcome[name] for name in sorted(outcome, key=lambda name: -outcome[name].itemsize) if name not in large}
        self._small = [_bytes_of(array) for array in small.values() if array.nbytes]
        joined |= small
        self._joined_bytes = sum(array.nbytes for array in joined.values())
        room = np.empty((self.max_rows, -(-self._joined_bytes // _ALIGNMENT) * _ALIGNMENT), np.uint8)
        self._rows = [row.data for row in room[:, : self._joined_bytes]]
        """Memory of each step's joined columns."""
        self._blocks: dict[str, np.ndarray] = {}
        """Rows of each column, [max_rows, n, ...]."""
        start = 0
        for name, array in joined.items():
            self._blocks[name] = room[:, start : start + array.nbytes].view(array.dtype).reshape(self.max_rows, *array.shape)
            start += array.nbytes
        self._blocks |= {name: np.empty((self.max_rows, *outcome[name].shape), outcome[name].dtype) for name in large}
        self._large = [([_bytes_of(row) for row in self._blocks[name]], _bytes_of(outcome[name])) for name in large]
        """(memory of each step, where its outcome is) of each column that is copied apart."""

    def keep(self, given: tuple[Any, ...]) -> None:
        """Add a step: the outcome is in its arrays; `given` in the order of the names, each [n, ...]. Raises RecordingError."""
        time = self.fill
        try:
            # Joining is the fastest way to copy small arrays: a tenth of numpy's time.
            data = b"".join((*given, *self._small)) if [rows.dtype for rows in given] == self._dtypes else b""
        except (AttributeError, TypeError, BufferError, ValueError):  # not an array, or not contiguous
            data = b""
        if len(data) != self._joined_bytes:
            data = b"".join((*self._converted(given), *self._small))
        self._rows[time][:] = data
        for rooms, source in self._large:
            rooms[time][:] = source
        self.fill = time + 1

    def correct(self, row: int, values: Mapping[str, Any]) -> None:
        """Replace values in the last step of a slot's row."""
        for name, value in values.items():
            self._blocks[name][self.fill - 1, row] = value

    def of_slot(self, row: int) -> Iterator[tuple[str, np.ndarray]]:
        """Columns with the slot's rows [t, ...] that its episode has not received; the caller then owns them."""
        first, self.taken[row] = self.taken[row], self.fill
        for column in self._columns:
            yield column.name, self._blocks[column.name][first : self.fill, row].astype(column.dtype, copy=True)

    def end(self, row: int, sink: EpisodeSink, fetch: Callable[[SteadyGroup], None]) -> None:
        """End a slot's episode; it can call `fetch` for its rows of this group."""
        first, self.taken[row] = self.taken[row], self.fill
        if self.fill > first:
            sink.await_rows(self.fill - first, partial(fetch, self))
            self.ended.append((sink, row, first, self.fill))

    def of_all(self) -> list[tuple[str, np.ndarray]]:
        """Columns with the rows [n, t, ...] of all slots, including received ones; empties the group."""
        fill = self.fill
        self.fill, self.taken, self.ended = 0, [0] * len(self.slots), []
        return [
            (column.name, np.array(self._blocks[column.name][:fill].swapaxes(0, 1), column.dtype, order="C")) for column in self._columns
        ]

    def _converted(self, given: tuple[Any, ...]) -> list[bytes]:
        """Convert the given columns of any type. Raises RecordingError if a shape has changed."""
        parts = []
        for column, rows in zip(self._given, given, strict=True):
            if np.shape(rows) != (shape := (len(self.slots), *column.shape)):
                raise RecordingError(f"Field '{column.name}' must be {list(shape)}, got {list(np.shape(rows))}.")
            parts.append(np.asarray(rows).astype(column.dtype).tobytes())
        return parts


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
