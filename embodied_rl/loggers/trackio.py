"""trackio, Hugging Face's tracker: everything lies in a folder; ``trackio show`` opens the board."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.errors import MissingExtraError
from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import with_aliases


class TrackioLogger(Logger):
    """One trackio run per run folder; a resumed run continues it. ``logger.options.trackio.{project,space_id}``."""

    def __init__(
        self, run_dir: Path, run_config: Mapping[str, Any], resume_step: int | None, project: str = "embodied_rl", space_id: str = ""
    ) -> None:
        """
        Args:
            project: its name; TRACKIO_DIR says where projects lie.
            space_id: a Hugging Face Space that shows the run while it goes on; empty: none.
        """
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise MissingExtraError("Logger 'trackio'", "trackio", error) from error
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
