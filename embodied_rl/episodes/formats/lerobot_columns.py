"""Columns of LeRobot's parquet files as arrays, pictures in them, and videos by the second."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.formats.base import damaged
from embodied_rl.episodes.formats.hdf5 import MAX_RATIO, SMALL_BYTES
from embodied_rl.episodes.formats.lerobot_layout import Feature, Storage

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from av import VideoFrame


def open_parquet(parquet: ModuleType, path: Path) -> pq.ParquetFile:
    """A parquet file, mapped. Raises ValueError where it claims more rows than its bytes can stand for, and what pyarrow raises."""
    size = path.stat().st_size
    file = parquet.ParquetFile(path, memory_map=True)
    groups = file.metadata
    # Columns that say the same in every row take next to nothing.
    unpacked = [8 * groups.num_rows, *(groups.row_group(number).total_byte_size for number in range(groups.num_row_groups))]
    if max(unpacked) > max(SMALL_BYTES, MAX_RATIO * size):
        file.close()
        raise ValueError(f"{size:,} bytes cannot hold the {max(unpacked):,} that it claims")
    return file


class DataFile:
    """One parquet file under ``data/``. Raises RecordingError where it cannot be read."""

    def __init__(self, path: Path, parquet: ModuleType) -> None:
        self.path = path
        if not path.is_file():
            raise damaged(path, "is missing")
        try:
            self._file = open_parquet(parquet, path)
            groups = self._file.metadata
            sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
            numbers = np.asarray(self._file.read(columns=["episode_index"])["episode_index"].to_numpy(), np.int64)
        except Exception as error:  # pyarrow's errors have half a dozen classes
            raise damaged(path, f"cannot be read as parquet: it is damaged or cut short ({_line(error)})") from error
        self._names = set(self._file.schema_arrow.names)
        self._ends = np.cumsum(sizes)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        self._spans = dict(
            zip(numbers[starts].tolist(), zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)], strict=True), strict=True)
        )
        """{episode: (its first row, the row after its last)}"""
        self._cached: tuple[Any, Any] = (None, None)

    def episode(self, number: int, length: int, names: list[str]) -> Rows:
        """Columns of an episode of `length` steps."""
        if missing := [name for name in names if name not in self._names]:
            raise damaged(self.path, "is missing", number, missing[0])
        start, end = self._spans.get(number, (0, 0))
        if end - start != length:
            raise damaged(self.path, f"holds {end - start} rows of it one after another instead of {length}", number, "episode_index")
        first, last = (int(np.searchsorted(self._ends, row, side="right")) for row in (start, end - 1))
        before = int(self._ends[first - 1]) if first else 0
        # Some writers put many episodes into a row group, which is decoded as a whole: the next episode's is likely the same.
        if self._cached[0] != (first, last, names):
            try:
                self._cached = (first, last, names), self._file.read_row_groups(list(range(first, last + 1)), columns=names)
            except Exception as error:
                raise damaged(self.path, f"cannot be read ({_line(error)})", number) from error
        return Rows(self.path, number, self._cached[1].slice(start - before, length))

    def close(self) -> None:
        self._file.close()


class Rows:
    """Some columns of one episode."""

    def __init__(self, path: Path, number: int, table: pa.Table) -> None:
        self._path, self._number, self._table = path, number, table

    def column(self, name: str, storage: Storage, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """[T, *shape] of numbers; object arrays [T] of str, of JSON values, or of the bytes of picture files. Raises RecordingError."""
        import pyarrow as pa

        column = self._table[name]
        if column.null_count:
            raise self._damaged(name, f"has no value in {column.null_count} rows")
        try:
            if storage == "image":
                return _objects(value["bytes"] if isinstance(value, dict) else value for value in column.to_pylist())
            if storage in ("text", "json"):
                values = column.to_pylist()
                if any(not isinstance(value, str) for value in values):
                    raise self._damaged(name, "must hold text")
                return _objects(values if storage == "text" else map(json.loads, values))
            rows = column.combine_chunks()
            return self._numbers(name, rows.chunk(0) if isinstance(rows, pa.ChunkedArray) else rows, dtype, shape)
        except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
            from embodied_rl.episodes.recording import RecordingError

            if isinstance(error, RecordingError):
                raise
            raise self._damaged(name, f"cannot be read ({_line(error)})") from error

    def _numbers(self, name: str, rows: pa.Array, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        import pyarrow as pa

        if isinstance(rows, pa.ExtensionArray):
            rows = rows.storage
        count, levels = len(rows), []
        while pa.types.is_list(rows.type) or pa.types.is_large_list(rows.type) or pa.types.is_fixed_size_list(rows.type):
            sizes = set(np.unique(rows.value_lengths().to_numpy(zero_copy_only=False)).tolist())
            if len(sizes) != 1 or rows.null_count:
                raise self._damaged(name, f"has rows of {len(sizes)} lengths instead of {list(shape)}")
            levels.append(int(sizes.pop()))
            rows = rows.flatten()
        if tuple(levels) != (() if shape in ((), (1,)) and not levels else shape):
            raise self._damaged(name, f"has rows of {levels or 'single numbers'} instead of {list(shape)}")
        if rows.null_count or not (pa.types.is_integer(rows.type) or pa.types.is_floating(rows.type) or pa.types.is_boolean(rows.type)):
            raise self._damaged(name, f"must hold numbers, holds {rows.type} with {rows.null_count} gaps")
        return rows.to_numpy(zero_copy_only=False).astype(dtype, copy=False).reshape(count, *shape)

    def _damaged(self, field: str, what: str) -> ValueError:
        return damaged(self._path, what, self._number, field)


def _objects(values: Iterable[object]) -> np.ndarray:
    found = list(values)
    array = np.empty(len(found), object)
    array[:] = found
    return array


def decode_picture(path: Path, number: int, feature: Feature, data: object) -> np.ndarray:
    """A PNG or JPEG file as [H, W, 3] uint8. Raises RecordingError."""
    from PIL import Image

    try:
        if not isinstance(data, bytes):
            raise ValueError("the picture is not in the row")
        with Image.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as image:
            if (image.height, image.width) != feature.shape[:2]:
                raise ValueError(f"a picture of {image.height} × {image.width}")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged(path, f"holds no picture of {list(feature.shape)} ({_line(error)})", number, feature.name) from error


class Clip:
    """A video of several episodes, by the second; consecutive pictures are decoded without seeking."""

    def __init__(self, path: Path, fps: float, number: int, feature: Feature) -> None:
        import av

        self.path, self._tolerance = path, 0.5 / fps
        if not path.is_file():
            raise damaged(path, "is missing", number, feature.name)
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
            if self._stream.time_base is None:
                raise ValueError("it does not say when its pictures are shown")
            self._time_base = self._stream.time_base
        except (av.FFmpegError, OSError, ValueError, IndexError) as error:
            raise damaged(
                path, f"cannot be opened as a video: it is damaged or cut short ({_line(error)})", number, feature.name
            ) from error
        self._frames: Iterator[VideoFrame] = iter(())
        self._last = -np.inf
        self._gap = 8 / fps

    def read(self, second: float, number: int, feature: Feature) -> np.ndarray:
        """The picture [H, W, 3] uint8 at a second of the file. Raises RecordingError."""
        import av

        try:
            if not self._last < second <= self._last + self._gap:
                self._container.seek(max(0, int(second / self._time_base)), stream=self._stream)
                self._frames = self._container.decode(self._stream)
            for frame in self._frames:
                self._last = float(frame.time or 0.0)
                if abs(self._last - second) < self._tolerance:
                    return self._array(frame, feature)
                if self._last > second:
                    break
        except (av.FFmpegError, OSError, ValueError, TypeError, OverflowError) as error:
            self._last = -np.inf
            raise damaged(self.path, f"cannot be decoded at {second:.3f} s ({_line(error)})", number, feature.name) from error
        self._last = -np.inf
        raise damaged(self.path, f"has no picture at {second:.3f} s", number, feature.name)

    def _array(self, frame: VideoFrame, feature: Feature) -> np.ndarray:
        picture = frame.to_ndarray(format="rgb24")
        height, width = feature.shape[:2]
        extra = picture.shape[0] - height, picture.shape[1] - width
        # One line more where the writer made odd sides even.
        if not all(0 <= more <= 1 for more in extra):
            raise ValueError(f"a picture of {picture.shape[0]} × {picture.shape[1]} instead of {height} × {width}")
        return picture if extra == (0, 0) else np.ascontiguousarray(picture[:height, :width])

    def close(self) -> None:
        self._frames = iter(())
        self._container.close()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
