"""metrics.jsonl: one JSON object per iteration, whole after every line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from embodied_rl.files import append_whole, cannot_write, next_free, write_atomic
from embodied_rl.loggers.base import Logger
from embodied_rl.reading import parse_json, read_regular

METRICS_FILE = "metrics.jsonl"


class JsonlLogger(Logger):
    """Appends ``{"step": 1024, "time_unix_s": …, "episode/success": 0.5, …}``; what is not finite becomes null."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """Open the file: continued up to `resume_step`, or new, with an earlier run's file kept under the next free name."""
        self.path = run_dir / METRICS_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if resume_step is None:
                    self.path.rename(next_free(self.path))
                else:
                    _keep_until(self.path, resume_step)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = (json.dumps({"step": int(step), "time_unix_s": round(time.time(), 3), **finite}, allow_nan=False) + "\n").encode()
        append_whole(self._file, line, self.path)

    def rescue(self, folder: Path) -> None:
        # What was removed is there for as long as it is open.
        self._file.seek(0)
        write_atomic(folder / METRICS_FILE, self._file.read())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl (or of the one in a run's folder); a last line that a crash cut off is left out."""
    return [json.loads(line) for line in _whole_lines(path / METRICS_FILE if path.is_dir() else path)]


def logged_steps(run_dir: Path) -> set[int]:
    """Steps that a run's metrics.jsonl has rows of; empty where there is none."""
    try:
        return {step for step, _ in _rows(run_dir / METRICS_FILE)}
    except OSError:
        return set()


def history_until(run_dir: Path, step: int) -> str | None:
    """The lines of a run's metrics.jsonl up to a step; None where there is no such file."""
    try:
        return "".join(line for logged, line in _rows(run_dir / METRICS_FILE) if logged <= step)
    except OSError:
        return None


def _rows(path: Path) -> Iterator[tuple[int, str]]:
    """(step, line) of all whole lines that have one."""
    for line in _whole_lines(path):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row["step"], line


def _whole_lines(path: Path) -> Iterator[str]:
    for line in read_regular(path).decode("utf-8", "replace").splitlines(keepends=True):
        try:
            parse_json(line)
        except ValueError:
            continue
        yield line if line.endswith("\n") else line + "\n"


def _keep_until(path: Path, step: int) -> None:
    write_atomic(path, "".join(line for logged, line in _rows(path) if logged <= step))
