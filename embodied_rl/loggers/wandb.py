"""Weights & Biases; the offline mode needs no account and no network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.files import write_atomic
from embodied_rl.loggers.base import LoggedRun, Logger
from embodied_rl.loggers.meanings import with_aliases

if TYPE_CHECKING:
    from embodied_rl.config import LoggerConfig


class WandbLogger(Logger):
    """Logs to one W&B run per run folder; a resumed run continues the same one. Offline files lie in ``<run_dir>/wandb``."""

    def __init__(self, run_dir: Path, project: str, mode: str, run_config: Mapping[str, Any], resume_step: int | None = None) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MissingExtraError("Logger 'wandb'", "wandb", error) from error
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
        # Everything is drawn against environment steps; W&B's own counter only ever grows and would refuse a resumed step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @classmethod
    def from_config(cls, config: LoggerConfig, run: LoggedRun) -> WandbLogger:
        return cls(run.run_dir, config.wandb_project, config.wandb_mode, run.run_config, run.resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **with_aliases(metrics)})

    def log_video(self, step: int, path: Path) -> None:
        # By path: arrays would need moviepy.
        if path.suffix in (".mp4", ".gif"):
            self._run.log({"step": step, "video": self._wandb.Video(str(path), format="gif" if path.suffix == ".gif" else "mp4")})

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Keep the checkpoint as an artefact of type ``model`` with the alias ``step-N``; offline it waits for `wandb sync`."""
        artefact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"step": step})
        artefact.add_dir(str(path.resolve()))
        self._run.log_artifact(artefact, aliases=["latest", f"step-{step}"])

    def close(self) -> None:
        self._run.finish()
