"""Neighbouring slots whose steps leave their outcome in the same arrays every time: kept as bytes, and taken apart many steps at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import EpisodeSink

_GAP_BYTES = 2**8
"""Arrays that lie no further apart in memory are copied together, with what is between them."""
_ALIGNMENT = 64
_MAX_ROWS = 256
"""More are no quicker to take apart, and simulators wait for longer at a time."""


class Places:
    """Arrays [n, ...] that are copied as they lie in memory; most are views into one block of it, and few copies do.

    Raises ValueError for arrays whose memory is not in one piece.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], max_rows: int, max_bytes: int) -> None:
        """`max_rows`, `max_bytes`: how many steps there is room for, whichever is less, but at least one."""
        spans = _spans(arrays)
        row_bytes = sum(len(source) for source, _ in spans)
        self.max_rows = max(1, min(max_rows, max_bytes // row_bytes))
        self.copies: list[tuple[memoryview, memoryview, list[slice]]] = []
        """Of each copy: where to, from where, and the part of it for each row."""
        self._blocks: dict[str, np.ndarray] = {}
        for source, members in spans:
            size = len(source)
            room = np.empty(self.max_rows * size, np.uint8)
            self.copies.append((room.data, source, [slice(t * size, (t + 1) * size) for t in range(self.max_rows)]))
            for name, offset in members:
                array = arrays[name]
                block: np.ndarray = np.ndarray((self.max_rows, *array.shape), array.dtype, room, offset, (size, *array.strides))
                self._blocks[name] = block

    def __getitem__(self, name: str) -> np.ndarray:
        """[max_rows, n, ...] view of what was kept of an array."""
        return self._blocks[name]


class SteadyGroup:
    """Rows of a group of slots that step together, each with an episode in progress; made and used by `BatchSinks`.

    What came of a step is copied as it lies in memory, and so is what was done. Columns are made of many steps at once, when there is
    no more room or an episode has to be written.
    """

    def __init__(
        self, slots: Sequence[int], outcome: Mapping[str, np.ndarray], given: Sequence[str], layout: tuple[Column, ...], max_bytes: int
    ) -> None:
        """
        Args:
            slots: [n] numbers of the slots.
            outcome: {column: [n, ...]} where the outcome of every step lies.
            given: names of the columns that come with each step.
            layout: columns of the episodes.
            max_bytes: of the rows, about.

        Raises:
            ValueError: see `Places`.
        """
        columns = {column.name: column for column in layout}
        self.slots, self.layout = list(slots), layout
        self.rows = {slot: row for row, slot in enumerate(self.slots)}
        self.ready = False
        """Whether every slot has an episode in progress that goes on in this group."""
        there = [columns[name] for name in given]
        given_bytes = len(self.slots) * sum(column.row_bytes for column in there)
        outcome_bytes = sum(array.nbytes for array in outcome.values())
        share = outcome_bytes / max(1, outcome_bytes + given_bytes)
        self._outcome = Places(outcome, _MAX_ROWS, int(max_bytes * share))
        self.max_rows, self.fill = self._outcome.max_rows, 0
        self.taken = [0] * len(self.slots)
        """The first row of each slot that its present episode has not been given."""
        self.ended: list[tuple[EpisodeSink, int, int, int]] = []
        """Episodes that are over, with the slot's row here and the first and behind the last row that they have not been given."""
        self.step_bytes = sum(columns[name].row_bytes for name in (*outcome, *given))
        """Of a slot's step."""
        self._columns = [columns[name] for name in outcome] + there
        self._dtypes = [np.dtype(column.dtype) for column in there]
        self._given_bytes = given_bytes
        self._given_room = np.empty((self.max_rows, given_bytes), np.uint8)
        self._given_rows = [row.data for row in self._given_room]
        self._given: dict[str, np.ndarray] = {}
        offset = 0
        for column in there:
            size = len(self.slots) * column.row_bytes
            rows: np.ndarray = np.ndarray(
                (self.max_rows, len(self.slots), *column.shape),
                column.dtype,
                self._given_room,
                offset,
                (given_bytes, *np.empty((len(self.slots), *column.shape), column.dtype).strides),
            )
            self._given[column.name] = rows
            offset += size

    def keep(self, given: tuple[Any, ...]) -> None:
        """Add a step: what came of it lies in its place; `given` in the order of the names, each [n, ...]. Raises RecordingError."""
        time = self.fill
        try:
            # Joining is the quickest way of copying small arrays: a tenth of what numpy takes.
            data = b"".join(given) if [rows.dtype for rows in given] == self._dtypes else b""
        except (AttributeError, TypeError, BufferError, ValueError):  # no array, or one whose memory is not in one piece
            data = b""
        if len(data) != self._given_bytes:
            data = self._converted(given)
        self._given_rows[time][:] = data
        for room, source, rows in self._outcome.copies:
            room[rows[time]] = source
        self.fill = time + 1

    def correct(self, row: int, values: Mapping[str, Any]) -> None:
        """Put other values into the last step of a slot's row."""
        for name, value in values.items():
            self._outcome[name][self.fill - 1, row] = value

    def of_slot(self, row: int) -> Iterator[tuple[str, np.ndarray]]:
        """Columns with the rows [t, ...] of a slot that its episode has not been given; they are its own from now on."""
        first, self.taken[row] = self.taken[row], self.fill
        for column in self._columns:
            yield column.name, self._block(column)[first : self.fill, row].astype(column.dtype, copy=True)

    def end(self, row: int, sink: EpisodeSink, fetch: Callable[[SteadyGroup], None]) -> None:
        """A slot's episode is over; it can have `fetch` give it the rows of this group."""
        first, self.taken[row] = self.taken[row], self.fill
        if self.fill > first:
            sink.await_rows(self.fill - first, partial(fetch, self))
            self.ended.append((sink, row, first, self.fill))

    def of_all(self) -> list[tuple[str, np.ndarray]]:
        """Columns with the rows [n, t, ...] of all slots, also those that were given; from now on there is room again."""
        fill = self.fill
        self.fill, self.taken, self.ended = 0, [0] * len(self.slots), []
        return [(column.name, np.array(self._block(column)[:fill].swapaxes(0, 1), column.dtype, order="C")) for column in self._columns]

    def _block(self, column: Column) -> np.ndarray:
        """[max_rows, n, ...]"""
        block = self._given.get(column.name)
        return self._outcome[column.name] if block is None else block

    def _converted(self, given: tuple[Any, ...]) -> bytes:
        """What was done, whatever it comes in. Raises RecordingError where it has another shape than it had."""
        parts = []
        for (name, block), rows in zip(self._given.items(), given, strict=True):
            if np.shape(rows) != block.shape[1:]:
                raise RecordingError(f"Field '{name}' must be {list(block.shape[1:])}, got {list(np.shape(rows))}.")
            parts.append(np.asarray(rows).astype(block.dtype).tobytes())
        return b"".join(parts)


def _spans(arrays: Mapping[str, np.ndarray]) -> list[tuple[memoryview, list[tuple[str, int]]]]:
    """Pieces of memory that hold the arrays, as few as are worth it, each with the names and offsets of those in it."""
    by_root: dict[int, list[tuple[int, int, str]]] = {}
    memories: dict[int, np.ndarray] = {}
    for name, array in arrays.items():
        if not array.flags.c_contiguous or array.dtype.hasobject or not array.nbytes:
            raise ValueError(f"'{name}' is not one piece of memory")
        memory = _memory(array)
        start = array.ctypes.data
        memories[memory.ctypes.data] = memory
        by_root.setdefault(memory.ctypes.data, []).append((start, start + array.nbytes, name))
    spans = []
    for root, members in by_root.items():
        members.sort()
        runs: list[list[tuple[int, int, str]]] = []
        stop = -_GAP_BYTES - 1
        for member in members:
            if member[0] - stop > _GAP_BYTES:
                runs.append([])
            runs[-1].append(member)
            stop = max(stop, member[1])
        for run in runs:
            # So that numbers are aligned in the copies too.
            low = max(root, run[0][0] // _ALIGNMENT * _ALIGNMENT)
            high = max(stop for _, stop, _ in run)
            high = min(root + memories[root].nbytes, -(-high // _ALIGNMENT) * _ALIGNMENT)
            piece = memories[root][low - root : high - root].data
            spans.append((piece, [(name, start - low) for start, _, name in run]))
    return spans


def _memory(array: np.ndarray) -> np.ndarray:
    """[bytes] the whole memory that an array is a view into."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is not None:
        try:
            return np.frombuffer(owner.base, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass  # whose memory it is says nothing about the rest of it
    return (owner if owner.flags.c_contiguous else array).reshape(-1).view(np.uint8)
