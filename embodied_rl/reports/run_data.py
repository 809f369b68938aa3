"""Contents of a run's folder, read once; a missing or damaged part is left out and reported."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.loggers.jsonl import CURVES_FILE, METRICS_FILE, read_metrics
from embodied_rl.loggers.meanings import derived
from embodied_rl.reading import parse_json, parse_yaml, read_regular

RESULTS_FILE, FAULTS_FILE = "results.json", "faults.jsonl"
NOT_MATHEMATICS = ("run_dir", "resume", "logger", "video")
"""Parts of a configuration without effect on what is learned."""
_NUMBER, _PAIR = "a finite number", "a list of two finite numbers"
_OF_POLICY: dict[str, Any] = {
    **dict.fromkeys(("success", "success_at_end", "return_mean", "return_std", "length_mean"), _NUMBER),
    **dict.fromkeys(("success_interval_95", "success_at_end_interval_95", "return_mean_interval_95"), _PAIR),
}
_COMPARED = {"success": {"difference": _NUMBER, "interval": _PAIR}, "return_difference": _NUMBER, "return_interval": _PAIR}
_SHAPE: dict[str, Any] = {
    **_OF_POLICY,
    **dict.fromkeys(("wall_clock_s", "train_wall_clock_s", "whole_wall_clock_s"), _NUMBER),
    "warm_start": {"before": _OF_POLICY, "after": _OF_POLICY},
    "tasks": {"*": _OF_POLICY},
    "versions": {},
    "machine": {},
    "episodes": [{"return": _NUMBER, "length": _NUMBER}],
    "evaluations": [_OF_POLICY],
    "comparisons": [_COMPARED],
}
"""Figures in results.json, evaluation*.json and comparison*.json that the page reads; see `_shaped`."""
_FAULT: dict[str, Any] = {"step": _NUMBER, "recovery_s": _NUMBER, "slots": [{}]}
"""The same of a line in faults.jsonl."""


@dataclass(frozen=True)
class RunData:
    """One run according to its files."""

    path: Path
    results: Mapping[str, Any]
    """results.json; empty while the run continues, or if it was stopped."""
    config: Mapping[str, Any]
    """The whole configuration; empty if neither results nor checkpoint contain it."""
    metrics: list[dict[str, Any]]
    """Rows of metrics.jsonl, ascending by step."""
    evaluations: Mapping[str, Mapping[str, Any]]
    """{file: content} of evaluation*.json and comparison*.json."""
    faults: list[dict[str, Any]]
    """Rows of faults.jsonl: simulators that failed and were replaced."""
    failures: list[dict[str, Any]]
    """One for each dump of NaN or infinity: {"file", "context", "arrays": [{"name", "shape", "not_finite"}]} or {"file", "problem"}."""
    videos: list[Path]
    """mp4, or GIF if there is no mp4 of the same name; newest first."""
    dialogues: list[Path]
    """Pages of a language agent's episodes: those of training, then those of films."""
    curves_image: Path | None
    """curves.png."""
    problems: list[str] = field(default_factory=list)
    """Unreadable files, one line each."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def task(self) -> str:
        sim = self.config.get("sim") or {}
        return str(self.results.get("task") or sim.get("task") or sim.get("name") or self.name)

    @property
    def success_ends_episode(self) -> bool:
        return bool((self.config.get("sim") or {}).get("success_ends_episode"))

    @property
    def warm_start(self) -> dict[str, Mapping[str, Any]]:
        """{"before", "after": figures of an evaluation before and after cloning}; empty for a run without a warm start."""
        warm_start = self.results.get("warm_start") or {}
        if warm_start.get("before") and warm_start.get("after"):
            return {"before": warm_start["before"], "after": warm_start["after"]}
        if "success_before" in warm_start:  # those of a language agent: rates
            return {when: {"success": warm_start.get(f"success_{when}")} for when in ("before", "after")}
        rates = {when: self.curve(f"warm_start/success_{when}")[1] for when in ("before", "after")}
        return {when: {"success": values[-1]} for when, values in rates.items()} if all(rates.values()) else {}

    @property
    def group(self) -> str:
        """Key that is equal for runs that differ only in their seed (and their logging)."""
        kept = {key: value for key, value in self.config.items() if key not in (*NOT_MATHEMATICS, "seed")}
        return json.dumps(kept, sort_keys=True, default=str) if kept else str(self.path)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """(environment steps, values) of one metric, without non-finite values."""
        rows = [(float(row["step"]), float(row[name])) for row in self.metrics if isinstance(row.get(name), int | float)]
        return [step for step, _ in rows], [value for _, value in rows]

    def metric_names(self) -> list[str]:
        """Names in all rows, each once, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.metrics for name, value in row.items() if "/" in name and value is not None))


def load_run(path: Path | str) -> RunData:
    """Read a run's folder. Raises UserError: there is no such folder, or it is not a run's."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        beside = folder.parent if folder.parent.is_dir() else Path()
        raise UserError(
            f"Run '{path}' does not exist.{did_you_mean(folder.name, (entry.name for entry in beside.iterdir() if entry.is_dir()))}"
        )
    problems: list[str] = []
    results = _shaped(_read(folder / RESULTS_FILE, parse_json, problems), _SHAPE, RESULTS_FILE, problems)
    checkpoint_config = _read(folder / "checkpoints" / "last" / "config.yaml", parse_yaml, problems)
    metrics = _metrics(folder, problems)
    config = results.get("config") or checkpoint_config
    if not isinstance(config, dict) or any(not isinstance(config.get(part) or {}, dict) for part in ("sim", "algorithm", "policy")):
        problems.append(f"{RESULTS_FILE} has no configuration")
        config = {}
    if not (results or checkpoint_config or metrics):
        raise UserError(f"'{path}' is not the folder of a run: it has no {RESULTS_FILE}, {METRICS_FILE} or checkpoint.")
    files = [*sorted(folder.glob("evaluation*.json")), *sorted(folder.glob("comparison*.json"))]
    evaluations = {file.name: _shaped(_read(file, parse_json, problems), _SHAPE, file.name, problems) for file in files}
    curves = folder / CURVES_FILE
    return RunData(
        path=folder,
        results=results,
        config=config,
        metrics=metrics,
        evaluations={name: content for name, content in evaluations.items() if content},
        faults=_shaped(_lines(folder / FAULTS_FILE, problems), [_FAULT], FAULTS_FILE, problems),
        failures=[_dump(file) for file in sorted(folder.glob("failures/[!.]*.npz"))],
        videos=_videos(folder),
        dialogues=[*sorted(folder.glob("dialogues*.html")), *sorted(folder.glob("videos/**/*_dialogues*.html"))],
        curves_image=curves if curves.is_file() else None,
        problems=problems,
    )


def _is_metric(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e300)


def _metrics(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    try:
        read = [row for row in read_metrics(folder) if isinstance(row, dict)]
        rows = [row for row in read if isinstance(row.get("step"), int) and _is_metric(row["step"])]
        strange = {name for row in rows for name, value in row.items() if "/" in name and not _is_metric(value)}
        problems += [f"{METRICS_FILE} has '{name}' that is not a finite number" for name in sorted(strange)]
        rows = [derived({name: value for name, value in row.items() if name not in strange}) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{METRICS_FILE} cannot be read: {error}")
        return []
    return sorted(rows, key=lambda row: row["step"])


def _shaped(value: Any, shape: Any, where: str, problems: list[str]) -> Any:
    """`value` without the parts that are null or not of their shape: `_NUMBER`, `_PAIR`, [shape of each], {key, or "*": shape}, or None:
    any but an infinite number. Each of the latter is reported. None if nothing is left."""
    if value is None or (shape is None and not isinstance(value, int | float)):
        return value
    if shape in (None, _NUMBER):
        shape, fits = _NUMBER, _is_metric(value)
    elif shape == _PAIR:
        fits = isinstance(value, list) and len(value) == 2 and None not in value and all(map(_is_metric, value))
    else:
        fits = isinstance(value, type(shape))
    if not fits:
        problems.append(f"{where} is not {shape if isinstance(shape, str) else 'a list' if isinstance(shape, list) else 'a JSON object'}")
        return None
    if isinstance(shape, list):
        found = [_shaped(part, shape[0], f"{where}, {number}", problems) for number, part in enumerate(value)]
        return [part for part in found if part is not None]
    if isinstance(shape, dict):
        parts = {key: _shaped(part, shape.get(key, shape.get("*")), f"{where}, {key}", problems) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None}
    return value


def _read(path: Path, parse: Callable[[bytes], object], problems: list[str]) -> dict[str, Any]:
    """Mapping in a file; empty if the file is missing or unreadable."""
    if not path.is_file():
        return {}
    try:
        content = parse(read_regular(path))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return content


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    rows = []
    if path.is_file():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                row = parse_json(line)
            except ValueError:
                problems.append(f"{path.name}, line {number} is not JSON")
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _dump(path: Path) -> dict[str, Any]:
    """The trainer's dump of NaN or infinity, read without unpickling."""
    try:
        with zipfile.ZipFile(path) as packed:
            if any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist()):
                raise ValueError("it is compressed, as no dump is, and could fill the memory")
        with np.load(path, allow_pickle=False) as arrays:
            context = dict(json.loads(bytes(arrays["context_json"]))) if "context_json" in arrays else {}
            found = [_array(name, arrays[name]) for name in arrays.files if name != "context_json"]
    except Exception as error:  # a file cut off by a crash fails in zipfile, numpy's header or JSON
        return {"file": path.name, "problem": f"{type(error).__name__}: {error}"}
    return {"file": path.name, "context": context, "arrays": found}


def _array(name: str, values: np.ndarray) -> dict[str, Any]:
    wrong = int(np.count_nonzero(~np.isfinite(values))) if values.dtype.kind in "fc" else 0
    return {"name": name, "shape": list(values.shape), "not_finite": wrong}


def _videos(folder: Path) -> list[Path]:
    found = [*folder.glob("videos/**/[!.]*.mp4")]
    movies = {path.with_suffix("") for path in found}
    found += [path for path in folder.glob("videos/**/[!.]*.gif") if path.with_suffix("") not in movies]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))
