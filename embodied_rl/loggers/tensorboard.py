"""TensorBoard scalars through tensorboard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.errors import MissingExtraError
from embodied_rl.loggers.base import Logger


class TensorBoardLogger(Logger):
    """Writes ``<run_dir>/tensorboard``; look at it with ``tensorboard --logdir <run_dir>``."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise MissingExtraError("Logger 'tensorboard'", "all", error) from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if resume_step is not None:
            # TensorBoard drops what earlier files of this folder hold from this step on.
            restart = Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(restart)

    @staticmethod
    def from_config(
        config: Any, run_dir: Path, run_config: Any, total_steps: int, resume_step: int | None, stream: Any
    ) -> TensorBoardLogger:
        return TensorBoardLogger(run_dir, resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
