"""TensorBoard scalars and videos through tensorboard's own writer: no torch, no TensorFlow, no moviepy."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from embodied_rl.errors import MissingExtraError
from embodied_rl.files import append_whole, cannot_write, next_free
from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import with_aliases

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

VIDEO_TAG = "video"
_RGB = 3
"""Value of an image summary's field "colorspace"."""


class TensorBoardLogger(Logger):
    """Writes ``<run_dir>/tensorboard``; look at it with ``tensorboard --logdir <run_dir>``."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise MissingExtraError("Logger 'tensorboard'", "all", error) from error
        self._event, self._summary = Event, Summary
        folder = run_dir / "tensorboard"
        if resume_step is None and folder.exists():
            folder.rename(next_free(folder))  # of an earlier attempt at this run, as `metrics.jsonl` is kept
        # tensorboard's own EventFileWriter writes in a thread, some time later, and names files of one second in the order of their
        # process's numbers: a run that is killed would lose what it logged before its checkpoint, or what follows be read before it.
        self._file = _EventFile(folder)
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step is not None:
            # TensorBoard drops what earlier files of this folder hold from this step on.
            self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=name, simple_value=value) for name, value in with_aliases(metrics).items()])

    def log_video(self, step: int, path: Path) -> None:
        """Show an mp4 or a GIF in TensorBoard's "Images", which plays GIFs. An mp4 is shown as the GIF beside it, or made one.
        Raises UserError: the mp4 cannot be read."""
        from embodied_rl.video import gif_size, mp4_as_gif

        beside = path.with_suffix(".gif")
        data = beside.read_bytes() if beside.is_file() else mp4_as_gif(path)
        width, height = gif_size(data)
        image = self._summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=data)
        self._add(step, [self._summary.Value(tag=VIDEO_TAG, image=image)])

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


class _EventFile:
    """A new event file that TensorBoard reads after all others of its folder; a record is in it when `write` returns."""

    def __init__(self, folder: Path) -> None:
        seconds = [int(match[1]) for path in folder.glob("*tfevents*") if (match := re.search(r"tfevents\.(\d+)\.", path.name))]
        second = max([int(time.time()), *(1 + earlier for earlier in seconds)])
        self.path = folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, record: bytes) -> None:
        append_whole(self._file, record, self.path)

    def close(self) -> None:
        self._file.close()
