"""Loggers. The constructor gets the run's folder and what logger.options says."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from embodied_rl.loggers import Logger


class CsvLogger(Logger):
    """Some metrics as a table: ``csv.csv`` in the run's folder."""

    def __init__(self, run_dir: Path, resume_step: int | None = None, *, columns: tuple[str, ...] = ("episode/return",)) -> None:
        self._columns = columns
        new = resume_step is None
        self._file = (run_dir / "csv.csv").open("w" if new else "a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if new:
            self._writer.writerow(["step", *columns])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.writerow([step, *(metrics.get(name, "") for name in self._columns)])

    def close(self) -> None:
        self._file.close()
