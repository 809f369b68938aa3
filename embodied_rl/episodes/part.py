"""A part of a recording that is being written: one process's episodes of one layout."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.episodes.buffers import BlobBuffer, Buffer, Encoder, RowBuffer, VideoBuffer
from embodied_rl.episodes.index import INDEX_FILE, Index, encode_entry, read_index
from embodied_rl.episodes.layout import SNAPSHOTS, Column
from embodied_rl.episodes.opening import LAYOUT_FILE, array_dtype, array_offsets, part_folders, read_columns
from embodied_rl.episodes.part_files import ArrayFile, BlobFile, VideoFolder, npy_header, remove_folder
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.summary import SUMMED, summary_of
from embodied_rl.files import cannot_write, fsync, write_atomic

_UNFINISHED = ".open-"
_NEW = ".new-"


@dataclass(frozen=True, eq=False)
class Gathered:
    """A finished episode all of whose columns are in memory."""

    columns: list[list[np.ndarray]]
    """Of each column of the part its rows, in pieces [t, *shape] of the column's dtype."""
    about: Mapping[str, Any]
    """``seed``, ``task``, ``instruction`` and ``metadata``."""


class PartWriter:
    """Appends episodes to the files of a part, which it holds a lock on.

    Data first, then the headers of the .npy files, then the line of the index: killed at any moment, the part holds every episode that
    has a line, and what else was written is written over later.
    """

    def __init__(self, folder: Path, columns: tuple[Column, ...], lock: int, index: Index | None) -> None:
        self.folder, self.columns, self._lock = folder, columns, lock
        self.num_episodes = index.num_episodes if index else 0
        steps = index.num_steps if index else 0
        self._num_steps, self._num_snapshots = steps, index.num_snapshots if index else 0
        self._index_size = index.size if index else 0
        self._opened = 0
        self.step_bytes = sum(column.row_bytes for column in columns if column.encoding == "array")
        """Of a step, in the columns of fixed size."""
        self._scratch: dict[int, np.ndarray] = {}
        self._reward = next(number for number, column in enumerate(columns) if column.name == "reward")
        if index:
            _require_headers(folder, columns, array_offsets(folder, columns, index))
        self._files: dict[str, ArrayFile | BlobFile | VideoFolder] = {}
        for column in columns:
            stem, rows = folder / column.stem, steps + (0 if column.per == "step" else self.num_episodes)
            if column.is_video:
                self._files[column.name] = VideoFolder(stem)
            elif column.is_blob:
                self._files[column.name] = BlobFile(stem, rows, _blob_size(stem, rows))
            else:
                self._files[column.name] = ArrayFile(stem.with_name(stem.name + ".npy"), column.dtype, column.shape, rows)
        stem = folder / SNAPSHOTS
        self._snapshots = BlobFile(stem, self._num_snapshots, _blob_size(stem, self._num_snapshots), marked=True)

    def buffers(self, fps: int, encoder: Encoder) -> dict[str, Buffer]:
        """Room for an episode in progress, by column."""
        made: dict[str, Buffer] = {}
        for column in self.columns:
            if column.is_video:
                self._opened += 1
                made[column.name] = VideoBuffer(column, self.folder / f"{_UNFINISHED}{self._opened}.mp4", fps, encoder)
            else:
                made[column.name] = (BlobBuffer if column.is_blob else RowBuffer)(column, self.folder)
        return made

    def commit(self, buffers: Mapping[str, Buffer], snapshots: BlobBuffer, marks: Sequence[int], entry: Mapping[str, Any]) -> int:
        """Append a finished episode, and return its number in the part.

        Args:
            buffers: of every column.
            snapshots: in the order of `marks`.
            marks: steps that they were taken before.
            entry: what else the line of the index holds.

        Raises:
            UserError: something cannot be written; the part is as it was.
        """
        sums = [self._append(column, buffers[column.name]) for column in self.columns]
        sums.append(self._snapshots.append(snapshots.chunks(), snapshots.sizes, marks))
        line = self._line(entry, sums, len(marks), self._num_steps, self.num_episodes)
        self._count(line, 1, entry["steps"], len(marks))
        return self.num_episodes - 1

    def commit_together(self, episodes: Sequence[Gathered]) -> Iterator[None]:
        """Append finished episodes without snapshots to a part whose rows are all of fixed size, in a few writes.

        A bit is done between one item and the next, and nothing else may be appended meanwhile; they count when there are no more items.

        Raises:
            RecordingError: one holds NaN or infinity; the part is as it was, here and below.
            UserError: something cannot be written.
        """
        if not episodes:
            return
        whole: dict[str, np.ndarray] = {}
        sums: list[list[int]] = []
        lengths = [sum(map(len, episode.columns[self._reward])) for episode in episodes]
        for number, column in enumerate(self.columns):
            file = self._files[column.name]
            assert isinstance(file, ArrayFile)
            sizes = [column.rows_of(length) for length in lengths]
            rows = self._scratch_for(number, sum(sizes))
            np.concatenate([piece for episode in episodes for piece in episode.columns[number]], out=rows)
            if column.must_be_finite:
                _require_finite(column, rows, sizes)
            yield
            whole[column.name] = rows
            sums.append(file.append_together(rows, sizes))
            yield
        # No rows, instead of any that a failure left behind.
        of_snapshots = self._snapshots.append((), (), ())
        lines, first = [], 0
        for number, (episode, length) in enumerate(zip(episodes, lengths, strict=True)):
            summed = {name: whole[name][first : first + length] for name in SUMMED}
            entry = summary_of(**episode.about, summed=summed)
            crcs = [*(of_column[number] for of_column in sums), of_snapshots]
            lines.append(self._line(entry, crcs, 0, self._num_steps + first, self.num_episodes + number))
            first += length
        self._count(b"".join(lines), len(episodes), first, 0)

    def _scratch_for(self, number: int, num_rows: int) -> np.ndarray:
        """Memory [num_rows, *shape] for rows of a column; the same every time, for fresh pages take longer than the copy."""
        column, scratch = self.columns[number], self._scratch.get(number)
        if scratch is None or len(scratch) < num_rows:
            scratch = self._scratch[number] = np.empty((num_rows, *column.shape), column.dtype)
        return scratch[:num_rows]

    def _line(self, entry: Mapping[str, Any], sums: list[int], num_snapshots: int, step_row: int, number: int) -> bytes:
        """The line of the index for an episode that begins at a row."""
        return encode_entry(
            {
                "steps": entry["steps"],
                "step_row": step_row,
                "observation_row": step_row + number,
                **{key: value for key, value in entry.items() if key not in ("steps", "metadata")},
                "snapshots": num_snapshots,
                "snapshot_row": self._num_snapshots,
                "crc32": sums,
                "metadata": entry["metadata"],
            }
        )

    def _count(self, lines: bytes, num_episodes: int, num_steps: int, num_snapshots: int) -> None:
        """Make what was appended count: in the headers, by the lines of the index, here."""
        growing = [self._snapshots, *(file for file in self._files.values() if not isinstance(file, VideoFolder))]
        for file in growing:
            file.announce()
        self._write_lines(lines)
        for file in growing:
            file.commit()
        self._num_steps += num_steps
        self._num_snapshots += num_snapshots
        self.num_episodes += num_episodes

    def close(self, durable: bool = True) -> None:
        """Cut the files to what counts, flush them to the disk (where `durable`), and let go of the part."""
        try:
            for file in self._files.values():
                file.close(durable)
            self._snapshots.close(durable)
            if durable:
                os.fsync(self._lock)
                fsync(self.folder)
        finally:
            os.close(self._lock)

    def _append(self, column: Column, buffer: Buffer) -> int:
        file = self._files[column.name]
        if isinstance(buffer, VideoBuffer):
            assert isinstance(file, VideoFolder)
            return file.append(buffer.finish(), self.num_episodes)
        if isinstance(buffer, BlobBuffer):
            assert isinstance(file, BlobFile)
            return file.append(buffer.chunks(), buffer.sizes)
        assert isinstance(file, ArrayFile)
        return file.append(finite(column, buffer.chunks()) if column.must_be_finite else buffer.chunks())

    def _write_lines(self, lines: bytes) -> None:
        try:
            if os.pwrite(self._lock, lines, self._index_size) != len(lines):
                raise OSError("the disk took a part of the line")
        except OSError as error:
            os.ftruncate(self._lock, self._index_size)
            raise cannot_write(self.folder / INDEX_FILE, error) from error
        self._index_size += len(lines)


def finite(column: Column, chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pass rows on. Raises RecordingError naming the first that holds NaN or infinity."""
    row = 0
    for chunk in chunks:
        _require_finite(column, chunk, (len(chunk),), row)
        row += len(chunk)
        yield chunk


def _require_finite(column: Column, rows: np.ndarray, lengths: Sequence[int], first: int = 0) -> None:
    """Raise RecordingError naming the first row that is not; `lengths` of the episodes, `first`: number of the first row in its own."""
    numbers = np.isfinite(rows)
    if numbers.all():
        return
    row = int(np.argmin(numbers.reshape(len(rows), -1).all(axis=1)))
    for length in lengths:
        if row < length:
            break
        row -= length
    value = rows[~numbers].ravel()[0]
    raise RecordingError(f"Field '{column.name}' holds {value} in row {first + row} of the episode; it must be finite.")


def create_part(recording: Path, columns: tuple[Column, ...]) -> PartWriter:
    """The next ``part-NNNN`` of a recording, with these columns. Made beside its place and renamed, so that two processes never get one."""
    number = len(part_folders(recording))
    # Not by process number, which is often the same again after a container was killed.
    temporary = recording / f"{_NEW}{uuid.uuid4().hex}"
    try:
        temporary.mkdir()
        write_atomic(temporary / LAYOUT_FILE, json.dumps({"columns": [column.to_dict() for column in columns]}, indent=1))
        lock = os.open(temporary / INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # So that a reader never meets a part without its files.
        PartWriter(temporary, columns, os.dup(lock), None).close(durable=False)
        while True:
            folder = recording / f"part-{number:04d}"
            number += 1
            if folder.exists():
                continue
            try:
                temporary.rename(folder)
            except OSError:
                if folder.exists():
                    continue
                raise
            return PartWriter(folder, columns, lock, None)
    except OSError as error:
        remove_folder(temporary)
        raise cannot_write(recording, error) from error


def resume_part(folder: Path, columns: tuple[Column, ...]) -> PartWriter | None:
    """Go on with a part, behind its last finished episode; None where it has other columns, or a process is writing it.

    Raises:
        RecordingError: the part is damaged.
    """
    if read_columns(folder) != columns:
        return None
    path = folder / INDEX_FILE
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RecordingError(f"'{path}' cannot be opened: {error.strerror or error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    try:
        index = read_index(path, len(columns))
        for left in folder.glob(f"{_UNFINISHED}*"):
            left.unlink(missing_ok=True)
        os.ftruncate(lock, index.size)
        return PartWriter(folder, columns, lock, index)
    except BaseException:
        os.close(lock)
        raise


def _blob_size(stem: Path, num_rows: int) -> int:
    """Where the bytes of the rows that count end."""
    if num_rows == 0:
        return 0
    places = np.load(stem.with_name(stem.name + ".npy"), mmap_mode="r", allow_pickle=False)
    return int(places[num_rows - 1, -2] + places[num_rows - 1, -1])


def _require_headers(folder: Path, columns: tuple[Column, ...], offsets: Mapping[str, int]) -> None:
    """Raise RecordingError where another program has written a file with a header of another length: rows would not line up."""
    for column in columns:
        if not column.is_video and offsets[column.name] != len(npy_header(*array_dtype(column), 0)):
            path = folder / f"{column.stem}.npy"
            raise RecordingError(f"'{path}', field '{column.name}': another program has written it; episodes cannot be added to it.")
