"""Trackers: MLflow, TensorBoard, trackio and Weights & Biases; each library is imported only by its own logger.

MLflow: one run of its experiment per run folder; without a server its files are in ``<run_dir>/mlflow.db``. TensorBoard: through
tensorboard's own writer, without torch, TensorFlow or moviepy. trackio, Hugging Face's: a folder; ``trackio show`` opens the board.
Weights & Biases: the offline mode needs no account and no network.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.errors import UserError, from_extra
from embodied_rl.files import append_whole, flat, next_free, write_atomic, writing_to
from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import with_aliases
from embodied_rl.video import mp4_as_gif

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary


_MAX_PARAMS = 100
"""Most parameters that MLflow takes in one call."""


class MlflowLogger(Logger):
    """Logs to MLflow; a resumed run continues the same MLflow run. ``logger.options.mlflow.{tracking_uri,experiment}``."""

    def __init__(
        self, run_dir: Path, run_config: Mapping[str, Any], resume_step: int | None, tracking_uri: str = "", experiment: str = "embodied_rl"
    ) -> None:
        """
        Args:
            tracking_uri: address of a server or store; empty: MLFLOW_TRACKING_URI, or a file in the run's folder.
            experiment: name of the experiment there.
        """
        with from_extra("Logger 'mlflow'", "mlflow"):
            from mlflow import MlflowClient
        run_dir.mkdir(parents=True, exist_ok=True)
        store = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(store)
        remembered = run_dir / "mlflow_run_id.txt"
        if resume_step is not None and remembered.is_file():
            self._run_id = remembered.read_text(encoding="utf-8").strip()
            return
        found = self._client.get_experiment_by_name(experiment)
        artefacts = None if "://" in tracking_uri and not tracking_uri.startswith("sqlite") else (run_dir.resolve() / "mlflow").as_uri()
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment, artefacts)
        self._run_id = self._client.create_run(number, run_name=run_dir.name).info.run_id
        write_atomic(remembered, f"{self._run_id}\n")
        self._log_config(run_config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`: names are those of the other loggers."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run_id, [Metric(name, value, now, step) for name, value in with_aliases(metrics).items()])

    def log_video(self, step: int, path: Path) -> None:
        """See `Logger.log_video`: an artefact in ``videos``."""
        self._client.log_artifact(self._run_id, str(path), "videos")

    def log_checkpoint(self, step: int, path: Path) -> None:
        """See `Logger.log_checkpoint`: an artefact in ``model``."""
        self._client.log_artifacts(self._run_id, str(path.resolve()), "model")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_config(self, run_config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:500]) for name, value in flat(run_config).items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])


VIDEO_TAG = "video"
_RGB = 3
"""Value of an image summary's field "colorspace"."""
_GIF_SIZE = slice(6, 10)
"""Bytes of a GIF with its width and height."""


class TensorBoardLogger(Logger):
    """Writes ``<run_dir>/tensorboard``; look at it with ``tensorboard --logdir <run_dir>``."""

    def __init__(self, run_dir: Path, resume_step: int | None = None, *, beside: bool = False) -> None:
        """`beside`: the run's own files stay as they are, and what is logged here is shown with them."""
        with from_extra("Logger 'tensorboard'", "all"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._summary = Event, Summary
        folder = run_dir / "tensorboard"
        if resume_step is None and folder.exists() and not beside:
            folder.rename(next_free(folder))  # kept from an earlier attempt at this run, as `metrics.jsonl` is
        # tensorboard's own EventFileWriter writes later, in a thread, and orders files of the same second by process number. A killed
        # run would lose what it logged before its checkpoint, or its continuation would be read first.
        self._file = _EventFile(folder)
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step is not None:
            # TensorBoard drops what earlier files of this folder hold from this step on.
            self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=name, simple_value=value) for name, value in with_aliases(metrics).items()])

    def log_video(self, step: int, path: Path) -> None:
        """Show an mp4 or a GIF under "Images" in TensorBoard, which plays GIFs. An mp4 is shown as the GIF beside it, or converted to one.
        Raises UserError: neither can be read."""
        beside = path.with_suffix(".gif")
        data = beside.read_bytes() if beside.is_file() else b""
        if not data.startswith(b"GIF8") or len(data) < _GIF_SIZE.stop:
            data = mp4_as_gif(path)
        width, height = struct.unpack("<HH", data[_GIF_SIZE])
        image = self._summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=data)
        self._add(step, [self._summary.Value(tag=VIDEO_TAG, image=image)])

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


class _EventFile:
    """A new event file that TensorBoard reads after all others in its folder; a record is in it when `write` returns."""

    def __init__(self, folder: Path) -> None:
        seconds = [int(match[1]) for path in folder.glob("*tfevents*") if (match := re.search(r"tfevents\.(\d+)\.", path.name))]
        second = max([int(time.time()), *(1 + earlier for earlier in seconds)])
        self.path = folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"
        with writing_to(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)

    def write(self, record: bytes) -> None:
        append_whole(self._file, record, self.path)

    def close(self) -> None:
        self._file.close()


class TrackioLogger(Logger):
    """One trackio run per run folder; a resumed run continues it. ``logger.options.trackio.{project,space_id}``."""

    def __init__(
        self, run_dir: Path, run_config: Mapping[str, Any], resume_step: int | None, project: str = "embodied_rl", space_id: str = ""
    ) -> None:
        """
        Args:
            project: name of the project; TRACKIO_DIR says where projects are.
            space_id: a Hugging Face Space that shows the run while it continues; empty: none.
        """
        with from_extra("Logger 'trackio'", "trackio"):
            import trackio
        self._trackio = trackio
        self._run = trackio.init(
            project=project,
            name=run_dir.name,
            config=dict(run_config),
            space_id=space_id or None,
            resume="never" if resume_step is None else "allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(with_aliases(metrics), step=step)

    def log_video(self, step: int, path: Path) -> None:
        if path.suffix in (".mp4", ".gif"):
            self._run.log({"video": self._trackio.Video(str(path), format=path.suffix[1:])}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbLogger(Logger):
    """Logs to one W&B run per run folder; a resumed run continues it. Offline files are in ``<run_dir>/wandb``."""

    def __init__(self, run_dir: Path, project: str, mode: str, run_config: Mapping[str, Any], resume_step: int | None = None) -> None:
        with from_extra("Logger 'wandb'", "wandb"):
            import wandb
        self._wandb = wandb
        os.environ.setdefault("WANDB_SILENT", "true")
        run_dir.mkdir(parents=True, exist_ok=True)
        remembered = run_dir / "wandb_run_id.txt"
        run_id = remembered.read_text(encoding="utf-8").strip() if resume_step is not None and remembered.is_file() else None
        try:
            self._run = wandb.init(
                project=project,
                mode="offline" if mode == "offline" else "online",
                dir=str(run_dir),
                name=run_dir.name,
                id=run_id,
                resume="allow" if mode == "online" and run_id is not None else None,
                config=dict(run_config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise UserError(
                f"Logger 'wandb' cannot start: {error}. Log in with `wandb login`, or use logger.wandb_mode=offline."
            ) from error
        write_atomic(remembered, f"{self._run.id}\n")
        # Everything is plotted against environment steps; W&B's own counter only grows and would refuse a resumed step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **with_aliases(metrics)})

    def log_video(self, step: int, path: Path) -> None:
        # By path, because arrays would need moviepy.
        if path.suffix in (".mp4", ".gif"):
            self._run.log({"step": step, "video": self._wandb.Video(str(path), format="gif" if path.suffix == ".gif" else "mp4")})

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Keep the checkpoint as an artefact of type ``model`` with the alias ``step-N``; offline it waits for `wandb sync`."""
        artefact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"step": step})
        artefact.add_dir(str(path.resolve()))
        self._run.log_artifact(artefact, aliases=["latest", f"step-{step}"])

    def close(self) -> None:
        self._run.finish()
