"""The files of a part that is being written: rows at explicit places, so that whatever a failure left behind is written over."""

from __future__ import annotations

import math
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from embodied_rl.files import cannot_write, fsync
from embodied_rl.reading import open_regular

_MAGIC = b"\x93NUMPY\x01\x00"
_COUNT_DIGITS = 20


def npy_header(dtype: str, shape: tuple[int, ...], num_rows: int) -> bytes:
    """Header of an .npy file (version 1.0) of `num_rows` rows; its length depends on dtype and shape only, so that it can be rewritten."""
    before, after, size = _header_parts(dtype, shape)
    return (before + str(num_rows).encode() + after).ljust(size - 1) + b"\n"


@lru_cache(maxsize=256)
def _header_parts(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """What stands before and after the number of rows, and the length of the whole."""
    before, after = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': (", f"{''.join(f', {side}' for side in shape) or ','}), }}"
    longest = len(_MAGIC) + 2 + len(before) + _COUNT_DIGITS + len(after) + 1
    size = -(-longest // 64) * 64
    return _MAGIC + (size - len(_MAGIC) - 2).to_bytes(2, "little") + before.encode(), after.encode(), size


class OpenFile:
    """A file that is written at places; raises UserError where that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise cannot_write(path, error) from error

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
        """Cut the file to what counts, flush it to the disk (where `durable`) and close it."""
        try:
            os.ftruncate(self.descriptor, size)
            if durable:
                os.fsync(self.descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            os.close(self.descriptor)


class ArrayFile:
    """An .npy file that grows by rows: `append` writes them, `announce` counts them in the header, `commit` makes them count here.

    Until `commit`, which cannot fail, the next `append` writes over them.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], num_rows: int) -> None:
        self.dtype, self.shape, self.num_rows = np.dtype(dtype), shape, num_rows
        self._row_bytes = self.dtype.itemsize * math.prod(shape)
        self._new_rows = 0
        self._file = OpenFile(path)
        self._header_size = len(npy_header(self.dtype.str, shape, 0))
        self._write_header(num_rows)

    def append(self, chunks: Iterable[np.ndarray]) -> int:
        """Write rows [n, *shape] behind those that count, instead of any that were not committed. Returns their CRC-32."""
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
        """As `append`, of several pieces at once: rows [sum of lengths, *shape] in one piece of memory. Returns each piece's CRC-32."""
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
        # A failure may have left one that counts more.
        self._write_header(self.num_rows)
        self._file.close(self._header_size + self.num_rows * self._row_bytes, durable)

    def _write_header(self, num_rows: int) -> None:
        self._file.write(npy_header(self.dtype.str, self.shape, num_rows), 0)


class BlobFile:
    """Rows of varying size: a .bin file, and an .npy file [R, 2] int64 with (offset, size) of each; with marks [R, 3], a mark first."""

    def __init__(self, stem: Path, num_rows: int, size: int, marked: bool = False) -> None:
        self._file = OpenFile(stem.with_name(stem.name + ".bin"))
        self._places = ArrayFile(stem.with_name(stem.name + ".npy"), "<i8", (3 if marked else 2,), num_rows)
        self._size, self._new_size = size, size

    def append(self, chunks: Iterable[bytes], sizes: Sequence[int], marks: Sequence[int] | None = None) -> int:
        """Write rows whose bytes, one after another, are `chunks`. Returns the CRC-32 of the bytes, then of their (mark and) size."""
        checksum, offset = 0, self._size
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            self._file.write(chunk, offset)
            offset += len(chunk)
        lengths = np.asarray(sizes, "<i8")
        offsets = self._size + np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
        columns = [offsets, lengths] if marks is None else [np.asarray(marks, "<i8"), offsets, lengths]
        self._places.append([np.stack(columns, axis=1)])
        self._new_size = offset
        return blob_checksum(checksum, lengths, marks)

    def announce(self) -> None:
        self._places.announce()

    def commit(self) -> None:
        self._size = self._new_size
        self._places.commit()

    def close(self, durable: bool = True) -> None:
        self._file.close(self._size, durable)
        self._places.close(durable)


def blob_checksum(of_bytes: int, sizes: np.ndarray, marks: Sequence[int] | np.ndarray | None) -> int:
    """CRC-32 of a blob column's rows: goes on from that of their bytes over the marks, where there are any, and the sizes."""
    if marks is not None:
        of_bytes = zlib.crc32(np.ascontiguousarray(marks, "<i8").tobytes(), of_bytes)
    return zlib.crc32(np.ascontiguousarray(sizes, "<i8").tobytes(), of_bytes)


class VideoFolder:
    """A folder with one file per episode, named by its number in the part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[Path] = []
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error

    def append(self, finished: Path, number: int) -> int:
        """Move a finished video to its place. Returns the CRC-32 of its bytes."""
        target = self.path / video_name(number)
        try:
            checksum = file_checksum(finished)
            os.replace(finished, target)
        except OSError as error:
            raise cannot_write(target, error) from error
        self._written.append(target)
        return checksum

    def close(self, durable: bool = True) -> None:
        if durable and self._written:
            for path in (*self._written, self.path):
                fsync(path)


def video_name(number: int) -> str:
    """Of the video of episode `number` of the part."""
    return f"{number:06d}.mp4"


def file_checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with open_regular(path) as file:
        while chunk := file.read(2**20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def remove_folder(path: Path) -> None:
    """Remove a folder that was begun and not taken into use."""
    shutil.rmtree(path, ignore_errors=True)
