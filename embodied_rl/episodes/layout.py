"""Columns of a part of a recording, their storage and files, and videos on their way into them.

A *part* is a folder with one row of every column per step (or per observation), in the order of episodes. All episodes of a part have the
same columns; an episode with other columns goes into another part.

    written by: the process that draws an episode        taken by: the process that records it, when the episode is over

Videos wait in a folder of the recording, under names that both processes know: column, seed and number of pictures.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

import numpy as np

from embodied_rl.episodes.pictures import PictureRoom, VideoWriter, decode_picture, encode_png
from embodied_rl.episodes.recording import OPTIONAL_COLUMNS, RecordingError, Value
from embodied_rl.errors import brief
from embodied_rl.files import writing_to
from embodied_rl.reading import parse_npy
from embodied_rl.types import SimSpec, VariableSpec
from embodied_rl.video import LONGEST_SIDE

Encoding = Literal["array", "text", "json", "arrays", "png", "mp4", "mp4_lossless"]
"""array: rows of one shape, in one .npy file. text, json: UTF-8 of varying size; arrays: an .npy file per row; png: a PNG file per row;
these share one .bin file, with (offset, size) of each row in an .npy file beside it. mp4, mp4_lossless: one video per episode."""

Per = Literal["step", "observation", "snapshot"]
"""What a row of a column belongs to. An episode of T steps has T rows per step, T + 1 per observation, and any number per snapshot."""
VideoFormat = Literal["mp4", "png", "raw"]
VIDEO_FORMATS: tuple[str, ...] = get_args(VideoFormat)

FINITE_COLUMNS = ("action", "reward", "sampled_action", "log_prob", "value")
"""Columns that may contain neither NaN nor infinity. The same holds for observations, but not for the simulator's state."""
_SMALLEST_VIDEO = 16
"""Smallest side of a video in pixels; smaller pictures, and those that no video takes, are stored as arrays."""
_NUMERIC_KINDS = "biufc"


@dataclass(frozen=True)
class Column:
    """A field of the episodes of a part."""

    name: str
    """Name as in `RecordedEpisode`: ``reward``, ``observation.state``, ``state.qpos``, ``images.front``."""
    encoding: Encoding
    per: Per
    dtype: str = ""
    """numpy dtype with byte order (``<f4``); empty for rows of varying size."""
    shape: tuple[int, ...] = ()
    """Shape of a row; empty for rows of varying size."""

    @property
    def stem(self) -> str:
        """Name of the column's file or folder without suffix; characters that file names cannot contain are percent-encoded."""
        return quote(self.name, safe="")

    @property
    def is_blob(self) -> bool:
        return self.encoding in ("text", "json", "arrays", "png")

    @property
    def is_video(self) -> bool:
        return self.encoding in ("mp4", "mp4_lossless")

    @property
    def is_picture(self) -> bool:
        return self.is_video or self.encoding == "png"

    @cached_property
    def must_be_finite(self) -> bool:
        floating = self.encoding == "array" and np.dtype(self.dtype).kind in "fc"
        return floating and (self.name in FINITE_COLUMNS or self.name.startswith("observation."))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of fixed size."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """dtype and row shape of the .npy file; for rows of varying size (offset, size), for snapshots (step, offset, size)."""
        return ("<i8", (3 if self.per == "snapshot" else 2,)) if self.is_blob else (self.dtype, self.shape)

    def to_dict(self) -> dict[str, Any]:
        fixed = {"dtype": self.dtype, "shape": list(self.shape)} if self.dtype else {}
        return {"name": self.name, "encoding": self.encoding, "per": self.per, **fixed}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Column:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        name, encoding, per = data["name"], data["encoding"], data["per"]
        if not isinstance(name, str) or not name or encoding not in Encoding.__args__ or per not in ("step", "observation"):  # type: ignore[attr-defined]
            raise ValueError(f"column {name!r:.60} has encoding {encoding!r:.40} and rows per {per!r:.40}")
        shape = tuple(data.get("shape", ()))
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"column {name!r:.60} has shape {brief(list(shape), 60)}")
        dtype = ""
        if encoding in ("text", "json", "arrays"):
            shape = ()
        else:
            dtype = _plain_dtype(data["dtype"])
            if encoding != "array" and (dtype != "|u1" or len(shape) != 3 or shape[2] != 3):
                raise ValueError(f"column {name!r:.60} holds pictures of shape {brief(list(shape), 60)} and dtype {dtype}")
        return Column(name, encoding, per, dtype, shape)


SNAPSHOT_COLUMN = Column("snapshots", "arrays", "snapshot")
"""Column of snapshots, outside a part's columns."""


def _plain_dtype(text: object) -> str:
    dtype = np.dtype(str(text))
    if dtype.kind not in _NUMERIC_KINDS or dtype.shape or dtype.names:
        raise ValueError(f"dtype {text!r:.60} is not a plain number")
    return dtype.str


def is_extra(name: str) -> bool:
    """Whether a column is outside the simulator's spec."""
    return name in OPTIONAL_COLUMNS or name.startswith(("state.", "images."))


def layout_for(spec: SimSpec, video: VideoFormat, extras: Mapping[str, Any]) -> tuple[Column, ...]:
    """Columns of an episode of this simulator.

    `extras`: {name of an optional column: one row of it}, including ``state.<name>`` and ``images.<camera>``.

    Raises RecordingError: a column cannot be stored.
    """
    text_action = spec.action.kind == "text"
    columns = []
    for key, part in spec.observation.items():
        name = f"observation.{key}"
        if isinstance(part, VariableSpec):
            columns.append(Column(name, "arrays" if part.kind == "array" else part.kind, "observation"))
        else:
            columns.append(_fixed(name, np.dtype(part.dtype), part.shape, "observation", video))
    if text_action:
        columns.append(Column("action", "text", "step"))
    else:
        columns.append(_fixed("action", np.dtype(spec.action.dtype), (spec.action.dim,), "step", "raw"))
    columns.append(_fixed("reward", np.dtype(np.float32), (), "step", "raw"))
    columns += [_fixed(name, np.dtype(bool), (), "step", "raw") for name in ("terminated", "truncated", "success")]
    for name, row in extras.items():
        per: Per = "step" if name in OPTIONAL_COLUMNS else "observation"
        value = np.asarray(row)
        if value.dtype.kind in "OU" and name == "sampled_action":
            columns.append(Column(name, "text", per))
        elif text_action and name in ("sampled_action", "log_prob", "policy_version"):
            # One value per token of the turn: a fixed shape would give nearly every episode its own part.
            columns.append(Column(name, "arrays", per))
        else:
            pictures = name.startswith("images.")
            if pictures and (value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3):
                raise RecordingError(f"Field '{name}' must hold pictures [H, W, 3] uint8, got {value.dtype} {list(value.shape)}.")
            columns.append(_fixed(name, value.dtype, value.shape, per, video if pictures else "raw"))
    return tuple(columns)


def picture_column(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Column | None:
    """Video column of an observation or of images (`video="mp4"`); None if they are not kept as videos."""
    if dtype.kind not in _NUMERIC_KINDS:
        return None
    column = _fixed(name, dtype, shape, "observation", "mp4")
    return column if column.is_video else None


def _fixed(name: str, dtype: np.dtype, shape: tuple[int, ...], per: Per, video: VideoFormat) -> Column:
    if dtype.kind not in _NUMERIC_KINDS:
        raise RecordingError(f"Field '{name}' must hold numbers, got dtype {dtype}.")
    encoding: Encoding = "array"
    if dtype == np.uint8 and len(shape) == 3 and shape[2] == 3:
        if video == "png" and min(shape) > 0:
            encoding = "png"
        elif video == "mp4" and _SMALLEST_VIDEO <= min(shape[:2]) <= max(shape[:2]) <= LONGEST_SIDE:
            # Pictures that a policy saw must be restored bit by bit; pictures for people may be smaller.
            encoding = "mp4" if name.startswith("images.") else "mp4_lossless"
    return Column(name, encoding, per, dtype.str, tuple(int(size) for size in shape))


def encode_row(column: Column, value: Value) -> bytes:
    """Encode a row of varying size. Raises RecordingError if the value is of another kind."""
    if column.encoding == "text":
        if not isinstance(value, str):
            raise RecordingError(f"Field '{column.name}' must hold str, got {type(value).__name__}: {value!r:.80}.")
        return value.encode("utf-8", "surrogatepass")
    if column.encoding == "json":
        try:
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordingError(f"Field '{column.name}' must hold what JSON can: {error}.") from error
    if column.encoding == "png":
        return encode_png(np.asarray(value))
    array = np.asarray(value)
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise RecordingError(f"Field '{column.name}' must hold arrays of numbers, got dtype {array.dtype}.")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def decode_row(column: Column, data: bytes) -> Any:
    """Inverse of `encode_row`. Raises ValueError (including RecordingError) for anything else."""
    if column.encoding == "text":
        return data.decode("utf-8", "surrogatepass")
    if column.encoding == "json":
        return json.loads(data.decode("utf-8", "surrogatepass"))
    if column.encoding == "png":
        return decode_picture(data, column.shape, ["PNG"])
    array = parse_npy(data)
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise ValueError("is not an array of numbers")
    return array


PICTURES_AT_ONCE = 8
"""Number of pictures of an episode that wait and are then encoded in a row, while the encoder is in the processor's caches."""
WAITING_BYTES = 2 << 20
"""Limit on waiting bytes of an episode; caches do not help large pictures."""
_PREFIX = ".films-"


@dataclass(frozen=True)
class Films:
    """Source of the videos of some columns."""

    folder: Path
    columns: frozenset[str]
    """Names of the columns that another process encodes."""

    def path(self, column: str, seed: int, num_pictures: int) -> Path:
        """Path of an episode's finished video."""
        return _film_path(self.folder, column, seed, num_pictures)

    def are_whole(self, seed: int, num_pictures: int) -> bool:
        """Whether every column has a video with this number of pictures; not so if a simulator was restored in mid-episode."""
        return all(self.path(column, seed, num_pictures).is_file() for column in self.columns)

    def remove(self, seed: int, num_pictures: int) -> None:
        """Delete the videos of an episode, if any."""
        for column in self.columns:
            self.path(column, seed, num_pictures).unlink(missing_ok=True)


FilmingTools = defaultdict[tuple[int, ...], list[PictureRoom]]
"""Free picture memory by shape, which the films of a thread share; missing shapes have none."""


class Filming:
    """Videos of one running episode, picture by picture, for the process that draws it. Raises UserError: a file cannot be written."""

    def __init__(self, folder: Path, columns: Mapping[str, Column], fps: int, seed: int, tools: FilmingTools) -> None:
        """`columns`: {part of the observation: its column}; `tools` are shared by all episodes of a thread."""
        self._folder, self._seed, self._tools, self._count = folder, seed, tools, 0
        self._writers: dict[str, tuple[str, VideoWriter]] = {}
        self._waiting: dict[str, list[PictureRoom]] = {part: [] for part in columns}
        at_once = WAITING_BYTES // max(1, sum(math.prod(column.shape) for column in columns.values()))
        self._at_once = max(1, min(PICTURES_AT_ONCE, at_once))
        # Episodes in lockstep take turns.
        self._next = 1 + seed % self._at_once
        for part, column in columns.items():
            height, width, _ = column.shape
            # A leftover of a killed process or an earlier attempt is overwritten.
            path = folder / f".{quote(column.name, safe='')}-{seed}.mp4"
            lossless = column.encoding == "mp4_lossless"
            self._writers[part] = column.name, VideoWriter(path, height, width, fps, lossless)

    def add(self, pictures: Mapping[str, np.ndarray]) -> None:
        """Add the next picture [H, W, 3] uint8 of every part."""
        for part, (_, writer) in self._writers.items():
            free = self._tools[writer.shape]
            room = free.pop() if free else PictureRoom(writer.shape)
            room.fill(pictures[part])
            self._waiting[part].append(room)
        self._count += 1
        if self._count >= self._next:
            self._next += self._at_once
            self._encode()

    def _encode(self) -> None:
        """Encode the waiting pictures."""
        for part, (_, writer) in self._writers.items():
            for room in self._waiting[part]:
                writer.encode(room)
        self._free_rooms()

    def _free_rooms(self) -> None:
        for rooms in self._waiting.values():
            while rooms:
                self._tools[rooms[-1].array.shape].append(rooms.pop())

    def finish(self) -> None:
        """Close the finished episode's videos and move them to where the recorder finds them."""
        self._encode()
        for column, writer in self._writers.values():
            writer.close()
            target = _film_path(self._folder, column, self._seed, self._count)
            with writing_to(target):
                os.replace(writer.path, target)
        self._writers.clear()

    def discard(self) -> None:
        self._free_rooms()
        for _, writer in self._writers.values():
            writer.discard()
        self._writers.clear()


def _film_path(folder: Path, column: str, seed: int, num_pictures: int) -> Path:
    return folder / f"{quote(column, safe='')}-{seed}-{num_pictures}.mp4"


def films_folder(recording: Path) -> Path:
    """Name of a new folder for the videos that one process records."""
    return recording / f"{_PREFIX}{uuid.uuid4().hex}"


@contextmanager
def keep_films(folder: Path) -> Iterator[None]:
    """Create and lock a folder from `films_folder`, and remove it in the end; first remove those of killed processes.
    Raises UserError: the folder cannot be written."""
    for left in folder.parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    with writing_to(folder):
        unseen = folder.with_name(f".new{folder.name}")  # another process that found it without its lock would remove it
        unseen.mkdir(parents=True)
        lock = os.open(unseen, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unseen.rename(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder unless a living process holds its lock."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # another process is recording
    finally:
        os.close(lock)
