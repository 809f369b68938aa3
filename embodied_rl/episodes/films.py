"""Videos of episodes in progress that are encoded by the processes that draw them, on their way into a recording.

    written by: the process that draws an episode        taken by: the process that records it, when the episode is over

They lie in a folder of the recording, under names that both sides know: column, seed and number of pictures.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.pictures import PictureRoom, VideoWriter
from embodied_rl.files import cannot_write

PICTURES_AT_ONCE = 8
"""So many pictures of an episode are encoded one after another, while the processor's caches hold its encoder; they wait until then."""
WAITING_BYTES = 2 << 20
"""What may wait of an episode, for large pictures are not helped by caches."""
_PREFIX = ".films-"


@dataclass(frozen=True)
class Films:
    """Where the videos of some columns come from."""

    folder: Path
    columns: frozenset[str]
    """Names of the columns that are encoded elsewhere."""

    def path(self, column: str, seed: int, num_pictures: int) -> Path:
        """The finished video of an episode."""
        return _film_path(self.folder, column, seed, num_pictures)

    def are_whole(self, seed: int, num_pictures: int) -> bool:
        """Whether there is a video of every column with so many pictures; not so where a simulator was restored in mid-episode."""
        return all(self.path(column, seed, num_pictures).is_file() for column in self.columns)

    def remove(self, seed: int, num_pictures: int) -> None:
        """Give the videos of an episode up, where there are any."""
        for column in self.columns:
            self.path(column, seed, num_pictures).unlink(missing_ok=True)


class FilmingTools:
    """What the films of a thread lend each other: memory for pictures."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, ...], list[PictureRoom]] = {}

    def take_room(self, shape: tuple[int, ...]) -> PictureRoom:
        free = self._rooms.setdefault(shape, [])
        return free.pop() if free else PictureRoom(shape)

    def give_back(self, room: PictureRoom) -> None:
        self._rooms[room.array.shape].append(room)


class Filming:
    """The videos of one running episode, picture by picture; for the process that draws it. Raises UserError: a file cannot be written."""

    def __init__(self, folder: Path, columns: Mapping[str, Column], fps: int, seed: int, tools: FilmingTools) -> None:
        """`columns`: {part of the observation: its column}; `tools` are shared by all episodes of a thread."""
        self._folder, self._seed, self._tools, self._count = folder, seed, tools, 0
        self._writers: dict[str, tuple[str, VideoWriter]] = {}
        self._waiting: dict[str, list[PictureRoom]] = {part: [] for part in columns}
        at_once = WAITING_BYTES // max(1, sum(math.prod(column.shape) for column in columns.values()))
        self._at_once = max(1, min(PICTURES_AT_ONCE, at_once))
        # Episodes that go in step take turns.
        self._next = 1 + seed % self._at_once
        for part, column in columns.items():
            height, width, _ = column.shape
            # Of a killed process, or an earlier attempt: it is written over.
            path = folder / f".{quote(column.name, safe='')}-{seed}.mp4"
            lossless = column.encoding == "mp4_lossless"
            self._writers[part] = column.name, VideoWriter(path, height, width, fps, lossless)

    def add(self, pictures: Mapping[str, np.ndarray]) -> None:
        """The next picture [H, W, 3] uint8 of every part."""
        for part, (_, writer) in self._writers.items():
            room = self._tools.take_room(writer.shape)
            room.fill(pictures[part])
            self._waiting[part].append(room)
        self._count += 1
        if self._count >= self._next:
            self._next += self._at_once
            self._encode()

    def _encode(self) -> None:
        """Encode the pictures that wait."""
        for part, (_, writer) in self._writers.items():
            for room in self._waiting[part]:
                writer.encode(room)
        self._free_rooms()

    def _free_rooms(self) -> None:
        for rooms in self._waiting.values():
            while rooms:
                self._tools.give_back(rooms.pop())

    def finish(self) -> None:
        """The episode is over: close its videos and move them to where the recorder finds them."""
        self._encode()
        for column, writer in self._writers.values():
            writer.close()
            target = _film_path(self._folder, column, self._seed, self._count)
            try:
                os.replace(writer.path, target)
            except OSError as error:
                raise cannot_write(target, error) from error
        self._writers.clear()

    def discard(self) -> None:
        """Give the episode up."""
        self._free_rooms()
        for _, writer in self._writers.values():
            writer.discard()
        self._writers.clear()


def _film_path(folder: Path, column: str, seed: int, num_pictures: int) -> Path:
    return folder / f"{quote(column, safe='')}-{seed}-{num_pictures}.mp4"


def films_folder(recording: Path) -> Path:
    """A folder for the videos that one process records, which is not there yet."""
    return recording / f"{_PREFIX}{uuid.uuid4().hex}"


@contextmanager
def keep_films(folder: Path) -> Iterator[None]:
    """Make a folder of `films_folder` and hold it; remove it in the end, and at the beginning those of processes that were killed.
    Raises UserError: the folder cannot be written."""
    for left in folder.parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    try:
        folder.mkdir(parents=True)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder unless a living process holds it."""
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
