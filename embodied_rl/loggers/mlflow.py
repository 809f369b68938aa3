"""MLflow: a run of its experiment per run folder; without a server its files lie in ``<run_dir>/mlflow.db``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.errors import MissingExtraError
from embodied_rl.files import write_atomic
from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import with_aliases

_MAX_PARAMS = 100
"""MLflow takes so many parameters at a time."""


class MlflowLogger(Logger):
    """A resumed run continues the same MLflow run. ``logger.options.mlflow.{tracking_uri,experiment}``."""

    def __init__(
        self, run_dir: Path, run_config: Mapping[str, Any], resume_step: int | None, tracking_uri: str = "", experiment: str = "embodied_rl"
    ) -> None:
        """
        Args:
            tracking_uri: of a server or store; empty: MLFLOW_TRACKING_URI, or a file in the run's folder.
            experiment: its name there.
        """
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            raise MissingExtraError("Logger 'mlflow'", "mlflow", error) from error
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
        """See `Logger.log_video`: an artefact below ``videos``."""
        self._client.log_artifact(self._run_id, str(path), "videos")

    def log_checkpoint(self, step: int, path: Path) -> None:
        """See `Logger.log_checkpoint`: an artefact below ``model``."""
        self._client.log_artifacts(self._run_id, str(path.resolve()), "model")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_config(self, run_config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        def flat(part: Mapping[str, Any], prefix: str = "") -> list[Param]:
            found = []
            for key, value in part.items():
                name = f"{prefix}{key}"
                found += flat(value, f"{name}.") if isinstance(value, Mapping) and value else [Param(name, str(value)[:500])]
            return found

        params = flat(run_config)
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
