"""Columns of an episode in progress: a little in memory, the rest in temporary files."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from embodied_rl.episodes.layout import SNAPSHOT_COLUMN, Column, encode_row
from embodied_rl.episodes.pictures import Frames, PictureRoom, VideoWriter
from embodied_rl.episodes.recording import RecordingError, Value
from embodied_rl.files import writing_to

BLOCK_BYTES = 2**16
"""Approximate size of a block of rows."""
SPILL_BYTES = 2**21
"""Size above which a column of an episode in progress goes to an unnamed temporary file, which leaves no trace when killed."""
QUEUED_PICTURES = 16
"""Number of pictures that may wait for the encoder; more make the recorder wait."""
UNFINISHED = ".open-"
"""Name prefix of a video of an episode in progress."""
_ENCODER_NICENESS = 5
_OPENED = itertools.count(1)
_STUCK_S = 300.0
"""Seconds without progress after which the encoder counts as dead."""


class _Spill:
    """Bytes on their way to an unnamed temporary file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, data: bytes | memoryview) -> None:
        with writing_to(self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed by `close`)
            self._file.write(data)

    def chunks(self, size: int) -> Iterator[bytes]:
        if self._file is not None:
            self._file.seek(0)
            while chunk := self._file.read(size):
                yield chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RowBuffer:
    """Buffer of rows of one shape."""

    def __init__(self, column: Column, folder: Path) -> None:
        self.column, self.num_rows = column, 0
        self._dtype, self._shape = np.dtype(column.dtype), column.shape
        self._block_rows = max(1, min(BLOCK_BYTES // max(1, column.row_bytes), 1024))
        self._block: np.ndarray | None = None
        self._fill = self._room = 0
        """Number of rows in the block, and its capacity."""
        self._blocks: list[np.ndarray] = []
        self._own_bytes = 0
        """Size of the blocks, without the caller's own."""
        self._spill = _Spill(folder)

    def append(self, value: npt.ArrayLike) -> None:
        """Add a copy of a row [*shape]."""
        if self._fill == self._room:
            self._next_block()
        # Reading the attribute takes a quarter of np.shape's time, and this runs in every step, slot and column.
        if self._shape and (shape := value.shape if isinstance(value, np.ndarray) else np.shape(value)) != self._shape:
            raise _wrong_shape(self.column, shape)
        if self.num_rows == 0 and value is not None and not np.can_cast(np.asarray(value).dtype, self._dtype, "same_kind"):
            raise RecordingError(f"Field '{self.column.name}' must hold {self._dtype}, got {np.asarray(value).dtype}.")
        try:
            assert self._block is not None
            self._block[self._fill] = value
        except (TypeError, ValueError) as error:
            raise RecordingError(f"Field '{self.column.name}' must hold {self._dtype} {list(self._shape)}: {error}.") from error
        self._fill += 1
        self.num_rows += 1

    def extend(self, rows: np.ndarray) -> None:
        """Add rows [n, *shape], which must not change until the episode is finished."""
        array = np.asarray(rows)
        if array.shape[1:] != self._shape:
            raise _wrong_shape(self.column, array.shape[1:])
        if not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise RecordingError(f"Field '{self.column.name}' must hold {self._dtype}, got {array.dtype}.")
        self._close_block()
        self._blocks.append(array)
        self.num_rows += len(array)

    def extend_block(self, rows: np.ndarray) -> None:
        """Take ownership of rows [n, *shape] of the right dtype; large ones go to the temporary file."""
        self._close_block()
        self._blocks.append(rows)
        self._own_bytes += rows.nbytes
        self.num_rows += len(rows)
        self._spill_much()

    def chunks(self) -> Iterator[np.ndarray]:
        if self.column.row_bytes:
            for data in self._spill.chunks(max(1, BLOCK_BYTES // self.column.row_bytes) * self.column.row_bytes):
                yield np.frombuffer(data, self._dtype).reshape(-1, *self._shape)
        self._close_block()
        if len(self._blocks) > 1 and all(block.dtype == self._dtype for block in self._blocks):
            # At most `SPILL_BYTES`: one piece is checked and written in a fraction of the time of many.
            self._blocks = [np.concatenate(self._blocks)]
        yield from self._blocks

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing is in a file."""
        return not self._spill.is_open

    def discard(self) -> None:
        self._spill.close()
        self._blocks.clear()

    def _next_block(self) -> None:
        # Doubling from 32: most episodes are short, and thousands may be in progress.
        rows = min(self._block_rows, max(32, 2 * self._room))
        self._close_block()
        self._spill_much()
        self._block, self._room = np.empty((rows, *self._shape), self._dtype), rows

    def _close_block(self) -> None:
        if self._fill:
            assert self._block is not None
            self._blocks.append(self._block[: self._fill])
            self._own_bytes += self._blocks[-1].nbytes
        self._block, self._fill, self._room = None, 0, 0

    def _spill_much(self) -> None:
        if self._own_bytes >= SPILL_BYTES:
            for block in self._blocks:
                self._spill.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
            self._blocks.clear()
            self._own_bytes = 0


class BlobBuffer:
    """Buffer of rows of varying size, as bytes."""

    def __init__(self, column: Column, folder: Path) -> None:
        self.column, self.sizes = column, list[int]()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._spill = _Spill(folder)

    @property
    def num_rows(self) -> int:
        return len(self.sizes)

    def append(self, value: Value) -> None:
        if self.column.encoding == "png" and ((picture := np.asarray(value)).shape != self.column.shape or picture.dtype != np.uint8):
            raise _wrong_shape(self.column, picture.shape)
        self.append_bytes(encode_row(self.column, value))

    def append_bytes(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= SPILL_BYTES:
            self._spill.write(b"".join(self._pending))
            self._pending, self._pending_bytes = [], 0

    def extend(self, rows: Iterable[Value]) -> None:
        for row in rows:
            self.append(row)

    def chunks(self) -> Iterator[bytes]:
        yield from self._spill.chunks(BLOCK_BYTES)
        if self._pending:
            yield b"".join(self._pending)

    def discard(self) -> None:
        self._spill.close()
        self._pending.clear()


class VideoBuffer:
    """Buffer of pictures, which go to the encoder at once."""

    def __init__(self, column: Column, temporary: Path, fps: int, encoder: Encoder) -> None:
        self.column, self.path, self.num_rows = column, temporary, 0
        self._fps, self._encoder = fps, encoder
        self._writer: VideoWriter | None = None

    def append(self, value: npt.ArrayLike) -> None:
        """Add a picture [H, W, 3] uint8."""
        picture = np.asarray(value)
        if picture.shape != self.column.shape or picture.dtype != np.uint8:
            raise _wrong_shape(self.column, picture.shape)
        if self._writer is None:
            height, width, _ = self.column.shape
            self._writer = VideoWriter(self.path, height, width, self._fps, lossless=self.column.encoding == "mp4_lossless")
        self._encoder.put(self._writer, picture)
        self.num_rows += 1

    def extend(self, rows: np.ndarray | Frames) -> None:
        """Add pictures [n, H, W, 3]; a whole video in the same encoding is copied, because encoding it again would cost quality."""
        video = rows.video if isinstance(rows, Frames) else None
        if video is not None and video[1] == self.column.encoding and rows.shape[1:] == self.column.shape and self.num_rows == 0:
            with writing_to(self.path):
                shutil.copyfile(video[0], self.path)
            self.num_rows = len(rows)
            return
        for number in range(len(rows)):
            self.append(rows[number])

    def take_over(self, video: Path, num_rows: int) -> None:
        """Use a video that another process has encoded, in place of pictures. Raises RecordingError if there is none."""
        if not video.is_file():
            raise RecordingError(f"Field '{self.column.name}': the video with {num_rows} pictures is missing ('{video}').")
        self.path, self.num_rows = video, num_rows

    def finish(self) -> Path:
        """Wait for the encoder; return the video's file."""
        if self._writer is not None:
            self._encoder.wait(self._writer)
            writer, self._writer = self._writer, None
            writer.close()
        return self.path

    def discard(self) -> None:
        if self._writer is not None:
            self._encoder.wait(self._writer, complain=False)
            writer, self._writer = self._writer, None
            writer.discard()
        # The video was finished but not moved into the part.
        self.path.unlink(missing_ok=True)


Buffer = RowBuffer | BlobBuffer | VideoBuffer


class EpisodeRows:
    """Rows of an episode in progress, column by column, and its snapshots, on their way into a part."""

    def __init__(self, columns: tuple[Column, ...], folder: Path, fps: int, encoder: Encoder) -> None:
        """`folder`: folder of the part, for temporary files; `fps` and `encoder` are for videos."""
        self.buffers: dict[str, Buffer] = {}
        for column in columns:
            if column.is_video:
                path = folder / f"{UNFINISHED}{next(_OPENED)}.mp4"
                self.buffers[column.name] = VideoBuffer(column, path, fps, encoder)
            else:
                self.buffers[column.name] = (BlobBuffer if column.is_blob else RowBuffer)(column, folder)
        self._arrays = {name: buffer for name, buffer in self.buffers.items() if isinstance(buffer, RowBuffer)}
        self.snapshots = BlobBuffer(SNAPSHOT_COLUMN, folder)
        self.marks: list[int] = []
        """Steps that follow the snapshots."""

    def keep_snapshot(self, snapshot: bytes, time: int) -> None:
        """Keep a snapshot from before step `time`."""
        self.snapshots.append_bytes(bytes(snapshot))
        self.marks.append(time)

    def extend(self, blocks: Mapping[str, np.ndarray]) -> None:
        """Take ownership of rows [t, *shape] of every column, all of fixed size and of the column's dtype."""
        for name, rows in blocks.items():
            self._arrays[name].extend_block(rows)

    @property
    def are_in_memory(self) -> bool:
        """Whether all rows are of fixed size, there are no snapshots, and nothing is in a file."""
        return not self.marks and len(self._arrays) == len(self.buffers) and all(buffer.is_in_memory for buffer in self._arrays.values())

    def whole(self, name: str) -> np.ndarray:
        """All rows [t, *shape] of a column of fixed size."""
        return np.concatenate(list(self._arrays[name].chunks()))

    def take(self) -> list[list[np.ndarray]]:
        """Release the rows of each column, all of fixed size, in pieces [t, *shape]."""
        taken = [list(buffer.chunks()) for buffer in self._arrays.values()]
        self.discard()
        return taken

    def discard(self) -> None:
        """Delete the temporary files."""
        for buffer in (*self.buffers.values(), self.snapshots):
            buffer.discard()


def _stuck() -> RecordingError:
    return RecordingError(f"The video encoder made no progress within {_STUCK_S:g} s.")


class Encoder:
    """Thread that encodes pictures, so that simulators need not wait; libx264 runs without the interpreter's lock.

    A picture waits in one of `QUEUED_PICTURES` rooms; `put` blocks while all are taken.
    """

    def __init__(self) -> None:
        # SimpleQueue is written in C; other queues take longer than the copy of a small picture.
        self._queue: queue.SimpleQueue[tuple[VideoWriter, PictureRoom] | threading.Event | None] = queue.SimpleQueue()
        self._free: dict[tuple[int, ...], queue.SimpleQueue[PictureRoom]] = {}
        """{picture size: free rooms}"""
        self._thread: threading.Thread | None = None
        self._errors: dict[VideoWriter, Exception] = {}
        """The last error of a writer that was not raised yet."""

    def put(self, writer: VideoWriter, picture: np.ndarray) -> None:
        """Copy a picture [H, W, 3] uint8 and queue it for encoding."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="episode-encoder", daemon=True)
            self._thread.start()
        self._raise_error(writer)
        try:
            room = self._rooms(writer.shape).get(timeout=_STUCK_S)
        except queue.Empty:
            raise _stuck() from None
        room.fill(picture)
        self._queue.put((writer, room))

    def wait(self, writer: VideoWriter, complain: bool = True) -> None:
        """Wait until everything is encoded. Raises the writer's error unless `complain` is False."""
        if self._thread is not None:
            reached = threading.Event()
            self._queue.put(reached)
            if not reached.wait(_STUCK_S):
                raise _stuck()
        if complain:
            self._raise_error(writer)
        self._errors.pop(writer, None)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _rooms(self, shape: tuple[int, ...]) -> queue.SimpleQueue[PictureRoom]:
        if shape not in self._free:
            self._free[shape] = queue.SimpleQueue()
            for _ in range(QUEUED_PICTURES):
                self._free[shape].put(PictureRoom(shape))
        return self._free[shape]

    def _run(self) -> None:
        if sys.platform == "linux":  # only there does each thread have its own priority
            # If all cores simulate, a delayed simulator holds up its whole batch; a picture can wait.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _ENCODER_NICENESS)
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            writer, room = item
            try:
                writer.encode(room)
            except Exception as error:  # raised by the writer's next `put` or `wait`
                self._errors[writer] = error
            finally:
                self._free[writer.shape].put(room)

    def _raise_error(self, writer: VideoWriter) -> None:
        if (error := self._errors.pop(writer, None)) is not None:
            raise RecordingError(f"A video cannot be encoded: {error}.") from error


def _wrong_shape(column: Column, shape: tuple[int, ...]) -> RecordingError:
    kind = "pictures uint8" if column.is_picture else column.dtype
    return RecordingError(f"Field '{column.name}' must hold rows {kind} {list(column.shape)}, got {list(shape)}.")
