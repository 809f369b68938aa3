"""Writer of a part of a recording: the files with one process's episodes of one layout.

Rows are written at explicit offsets, so that the next write replaces leftovers of a failure.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

from embodied_rl.episodes import folder as files
from embodied_rl.episodes.buffers import UNFINISHED, BlobBuffer, Buffer, EpisodeRows, VideoBuffer
from embodied_rl.episodes.layout import SNAPSHOT_COLUMN, Column, Per
from embodied_rl.episodes.recording import RecordingError, not_finite
from embodied_rl.files import cannot_write, fsync, write_atomic, writing_to

_NEW = ".new-"
_MAGIC = b"\x93NUMPY\x01\x00"
_COUNT_DIGITS = 20


def npy_header(dtype: str, shape: tuple[int, ...], num_rows: int) -> bytes:
    """Header of an .npy file (version 1.0) of `num_rows` rows; its length depends only on dtype and shape, so it can be rewritten."""
    before, after, size = _header_parts(dtype, shape)
    return (before + str(num_rows).encode() + after).ljust(size - 1) + b"\n"


@lru_cache(maxsize=256)
def _header_parts(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """Header parts before and after the number of rows, and the length of the whole header."""
    before, after = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': (", f"{''.join(f', {side}' for side in shape) or ','}), }}"
    longest = len(_MAGIC) + 2 + len(before) + _COUNT_DIGITS + len(after) + 1
    size = -(-longest // 64) * 64
    return _MAGIC + (size - len(_MAGIC) - 2).to_bytes(2, "little") + before.encode(), after.encode(), size


class OpenFile:
    """A file that is written at offsets; raises UserError if a write fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing_to(path):
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def write(self, data: bytes | memoryview, offset: int) -> None:
        try:
            written = os.pwrite(self.descriptor, data, offset)
            if written == (len(data) if isinstance(data, bytes) else data.nbytes):
                return
            view = memoryview(data).cast("B")[written:]
            while view:
                offset += written
                written = os.pwrite(self.descriptor, view, offset)
                view = view[written:]
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self, size: int, durable: bool) -> None:
        """Cut the file to its valid size, flush it to disk (if `durable`) and close it."""
        try:
            os.ftruncate(self.descriptor, size)
            if durable:
                os.fsync(self.descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            os.close(self.descriptor)


class ArrayFile:
    """An .npy file that grows by rows: `append` writes rows, `announce` counts them in the header, `commit` counts them in this object.

    Until `commit`, which cannot fail, the next `append` overwrites them.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], num_rows: int) -> None:
        self.dtype, self.shape, self.num_rows = np.dtype(dtype), shape, num_rows
        self._row_bytes = self.dtype.itemsize * math.prod(shape)
        self._new_rows = 0
        self._file = OpenFile(path)
        self._header_size = len(npy_header(self.dtype.str, shape, 0))
        self._write_header(num_rows)

    def append(self, chunks: Iterable[np.ndarray]) -> int:
        """Write rows [n, *shape] after the committed ones, over any uncommitted ones. Returns their CRC-32."""
        checksum, self._new_rows = 0, 0
        for chunk in chunks:
            rows = np.ascontiguousarray(chunk, self.dtype)
            if self._row_bytes and len(rows):
                data = rows.reshape(-1).view(np.uint8).data
                checksum = zlib.crc32(data, checksum)
                self._file.write(data, self._header_size + (self.num_rows + self._new_rows) * self._row_bytes)
            self._new_rows += len(rows)
        return checksum

    def append_together(self, rows: np.ndarray, lengths: Sequence[int]) -> list[int]:
        """Append several pieces at once: rows [sum of lengths, *shape] in contiguous memory. Returns each piece's CRC-32."""
        self._new_rows = len(rows)
        if not self._row_bytes or not len(rows):
            return [0] * len(lengths)
        data, offset, sums = rows.reshape(-1).view(np.uint8).data, 0, []
        for length in lengths:
            size = length * self._row_bytes
            sums.append(zlib.crc32(data[offset : offset + size]))
            offset += size
        self._file.write(data, self._header_size + self.num_rows * self._row_bytes)
        return sums

    def announce(self) -> None:
        if self._new_rows:
            self._write_header(self.num_rows + self._new_rows)

    def commit(self) -> None:
        self.num_rows, self._new_rows = self.num_rows + self._new_rows, 0

    def close(self, durable: bool = True) -> None:
        # A failure may have left a header with a larger count.
        self._write_header(self.num_rows)
        self._file.close(self._header_size + self.num_rows * self._row_bytes, durable)

    def _write_header(self, num_rows: int) -> None:
        self._file.write(npy_header(self.dtype.str, self.shape, num_rows), 0)


class BlobFile:
    """Rows of varying size: a .bin file, and an .npy file [R, 2] int64 with (offset, size) of each row; [R, 3] with a mark first."""

    def __init__(self, folder: Path, column: Column, num_rows: int) -> None:
        places = folder / f"{column.stem}.npy"
        self._places = ArrayFile(places, *column.stored, num_rows)
        self._file = OpenFile(folder / f"{column.stem}.bin")
        self._size = int(np.load(places, mmap_mode="r", allow_pickle=False)[num_rows - 1, -2:].sum()) if num_rows else 0
        self._new_size = self._size

    def append(self, chunks: Iterable[bytes], sizes: Sequence[int], marks: Sequence[int] | None = None) -> int:
        """Write rows whose concatenated bytes are `chunks`. Returns the CRC-32 of the bytes, then of their (mark and) size."""
        checksum, offset = 0, self._size
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            self._file.write(chunk, offset)
            offset += len(chunk)
        lengths = np.asarray(sizes, "<i8")
        offsets = self._size + np.cumsum(lengths) - lengths
        columns = [offsets, lengths] if marks is None else [np.asarray(marks, "<i8"), offsets, lengths]
        self._places.append([np.stack(columns, axis=1)])
        self._new_size = offset
        return files.blob_checksum(checksum, lengths, marks)

    def announce(self) -> None:
        self._places.announce()

    def commit(self) -> None:
        self._size = self._new_size
        self._places.commit()

    def close(self, durable: bool = True) -> None:
        self._file.close(self._size, durable)
        self._places.close(durable)


class VideoFolder:
    """A folder with one video per episode, named by the episode's number in the part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[Path] = []
        with writing_to(path):
            path.mkdir(exist_ok=True)

    def append(self, finished: Path, number: int) -> int:
        """Move a finished video into the folder. Returns the CRC-32 of its bytes."""
        target = self.path / files.video_name(number)
        with writing_to(target):
            checksum = files.file_checksum(finished)
            os.replace(finished, target)
        self._written.append(target)
        return checksum

    def close(self, durable: bool = True) -> None:
        if durable and self._written:
            for path in (*self._written, self.path):
                fsync(path)


Gathered = tuple[list[list[np.ndarray]], files.EpisodeAbout]
"""A finished episode in memory: rows of each column of the part, in pieces [t, *shape] of the column's dtype; and the rest."""


class PartWriter:
    """Appends episodes to the files of a part, and holds the part's lock.

    It writes data first, then the headers of the .npy files, then the line of the index. A part killed at any moment contains every episode
    with a line; later writes replace all other data.
    """

    def __init__(self, folder: Path, columns: tuple[Column, ...], lock: int, index: files.Index | None) -> None:
        self.folder, self.columns, self._lock = folder, columns, lock
        self.num_episodes, self._index_size = (index.num_episodes, index.size) if index else (0, 0)
        self._num_rows: dict[Per, int] = {per: int(index.starts(per)[-1]) if index else 0 for per in get_args(Per)}
        self.step_bytes = sum(column.row_bytes for column in columns if column.encoding == "array")
        """Bytes of a step in the columns of fixed size."""
        self._scratch: dict[int, np.ndarray] = {}
        self._reward = next(number for number, column in enumerate(columns) if column.name == "reward")
        if index:
            _require_headers(folder, columns, files.array_offsets(folder, columns, index))
        self._files: dict[str, ArrayFile | BlobFile | VideoFolder] = {}
        for column in columns:
            if column.is_video:
                self._files[column.name] = VideoFolder(folder / column.stem)
            elif column.is_blob:
                self._files[column.name] = BlobFile(folder, column, self._num_rows[column.per])
            else:
                self._files[column.name] = ArrayFile(folder / f"{column.stem}.npy", *column.stored, self._num_rows[column.per])
        self._snapshots = BlobFile(folder, SNAPSHOT_COLUMN, self._num_rows["snapshot"])
        self._growing = [*(file for file in self._files.values() if not isinstance(file, VideoFolder)), self._snapshots]

    def commit(self, rows: EpisodeRows, about: files.EpisodeAbout) -> int:
        """Append a finished episode; return its number in the part.
        Raises RecordingError: it contains NaN or infinity, and the part is unchanged, here and below; UserError: a write fails."""
        entry = about.summary({name: rows.whole(name) for name in files.SUMMED})
        sums = [self._append(column, rows.buffers[column.name]) for column in self.columns]
        sums.append(self._snapshots.append(rows.snapshots.chunks(), rows.snapshots.sizes, rows.marks))
        self._count(self._line(entry, sums, len(rows.marks)), 1, entry["steps"], len(rows.marks))
        return self.num_episodes - 1

    def commit_together(self, episodes: Sequence[Gathered]) -> Iterator[None]:
        """Append finished episodes without snapshots to a part with only fixed-size rows, in a few writes.

        The iterator does a bit of work per item, and nothing else may be appended meanwhile; the episodes count when it is exhausted.

        Raises:
            RecordingError: an episode contains NaN or infinity; the part is unchanged, here and below.
            UserError: a write fails.
        """
        if not episodes:
            return
        whole: dict[str, np.ndarray] = {}
        sums: list[list[int]] = []
        lengths = [sum(map(len, columns[self._reward])) for columns, _ in episodes]
        for number, column in enumerate(self.columns):
            file = self._files[column.name]
            assert isinstance(file, ArrayFile)
            sizes = [length + (column.per == "observation") for length in lengths]
            rows = self._scratch_for(number, sum(sizes))
            np.concatenate([piece for columns, _ in episodes for piece in columns[number]], out=rows)
            if column.must_be_finite:
                _require_finite(column, rows, sizes)
            yield
            whole[column.name] = rows
            sums.append(file.append_together(rows, sizes))
            yield
        # No rows, over any that a failure left behind.
        of_snapshots = self._snapshots.append((), (), ())
        lines, first = [], 0
        for number, ((_, about), length) in enumerate(zip(episodes, lengths, strict=True)):
            summed = {name: whole[name][first : first + length] for name in files.SUMMED}
            entry = about.summary(summed)
            crcs = [*(of_column[number] for of_column in sums), of_snapshots]
            lines.append(self._line(entry, crcs, 0, first, number))
            first += length
        self._count(b"".join(lines), len(episodes), first, 0)

    def _scratch_for(self, number: int, num_rows: int) -> np.ndarray:
        """Memory [num_rows, *shape] for rows of a column, reused every time because fresh pages take longer than the copy."""
        column, scratch = self.columns[number], self._scratch.get(number)
        if scratch is None or len(scratch) < num_rows:
            scratch = self._scratch[number] = np.empty((num_rows, *column.shape), column.dtype)
        return scratch[:num_rows]

    def _line(self, entry: Mapping[str, Any], sums: list[int], num_snapshots: int, steps: int = 0, episodes: int = 0) -> bytes:
        """Index line for an episode that follows so many new steps and episodes."""
        return files.encode_entry(
            {
                "steps": entry["steps"],
                "step_row": self._num_rows["step"] + steps,
                "observation_row": self._num_rows["observation"] + steps + episodes,
                **{key: value for key, value in entry.items() if key not in ("steps", "metadata")},
                "snapshots": num_snapshots,
                "snapshot_row": self._num_rows["snapshot"],
                "crc32": sums,
                "metadata": entry["metadata"],
            }
        )

    def _count(self, lines: bytes, num_episodes: int, num_steps: int, num_snapshots: int) -> None:
        """Make the appended episodes count: in the headers, in the index, and in this object."""
        for file in self._growing:
            file.announce()
        self._write_lines(lines)
        for file in self._growing:
            file.commit()
        self.num_episodes += num_episodes
        self._num_rows["step"] += num_steps
        self._num_rows["observation"] += num_steps + num_episodes
        self._num_rows["snapshot"] += num_snapshots

    def close(self, durable: bool = True) -> None:
        """Cut the files to their valid size, flush them to disk (if `durable`), and release the part."""
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
        return file.append(_finite(column, buffer.chunks()) if column.must_be_finite else buffer.chunks())

    def _write_lines(self, lines: bytes) -> None:
        try:
            if os.pwrite(self._lock, lines, self._index_size) != len(lines):
                raise OSError("the disk took a part of the line")
        except OSError as error:
            os.ftruncate(self._lock, self._index_size)
            raise cannot_write(self.folder / files.INDEX_FILE, error) from error
        self._index_size += len(lines)


def _finite(column: Column, chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pass rows on. Raises RecordingError naming the first row with NaN or infinity."""
    row = 0
    for chunk in chunks:
        _require_finite(column, chunk, (len(chunk),), row)
        row += len(chunk)
        yield chunk


def _require_finite(column: Column, rows: np.ndarray, lengths: Sequence[int], first: int = 0) -> None:
    """Raise RecordingError naming the first non-finite row; `lengths` of the episodes, `first`: number of the first row in its own."""
    if (bad := not_finite(rows)) is None:
        return
    row, value = bad
    for length in lengths:
        if row < length:
            break
        row -= length
    raise RecordingError(f"Field '{column.name}' holds {value} in row {first + row} of the episode; it must be finite.")


def create_part(recording: Path, columns: tuple[Column, ...]) -> PartWriter:
    """Create the recording's next ``part-NNNN`` with these columns, elsewhere and renamed, so two processes never get the same part."""
    number = len(files.part_folders(recording))
    # Not the process id, which often repeats after a container was killed.
    temporary = recording / f"{_NEW}{uuid.uuid4().hex}"
    try:
        temporary.mkdir()
        write_atomic(temporary / files.LAYOUT_FILE, json.dumps({"columns": [column.to_dict() for column in columns]}, indent=1))
        lock = os.open(temporary / files.INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The files exist before the part does, so a reader never meets a part without them.
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
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(recording, error) from error


def resume_part(folder: Path, columns: tuple[Column, ...]) -> PartWriter | None:
    """Continue a part after its last finished episode; None if it has other columns, or a process is writing it.
    Raises RecordingError: the part is damaged."""
    if files.read_columns(folder) != columns:
        return None
    path = folder / files.INDEX_FILE
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
        index = files.read_index(path, len(columns))
        for left in folder.glob(f"{UNFINISHED}*"):
            left.unlink(missing_ok=True)
        os.ftruncate(lock, index.size)
        return PartWriter(folder, columns, lock, index)
    except BaseException:
        os.close(lock)
        raise


def _require_headers(folder: Path, columns: tuple[Column, ...], offsets: Mapping[str, int]) -> None:
    """Raise RecordingError if another program has written a file with a header of another length: rows would be misaligned."""
    for column in (*columns, SNAPSHOT_COLUMN):
        if not column.is_video and offsets[column.name] != len(npy_header(*column.stored, 0)):
            path = folder / f"{column.stem}.npy"
            raise RecordingError(f"'{path}', field '{column.name}': another program has written it; episodes cannot be added to it.")
