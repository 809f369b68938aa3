"""metrics.jsonl, one JSON object per iteration and whole after every line; and curves.png, redrawn from it during the run."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied_rl.files import append_whole, next_free, write_atomic, write_atomic_with, writing_to
from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import REWARD_PER_STEP, derived
from embodied_rl.reading import parse_json, read_regular

METRICS_FILE = "metrics.jsonl"


class JsonlLogger(Logger):
    """Appends ``{"step": 1024, "time_unix_s": …, "episode/success": 0.5, …}``; non-finite numbers become null."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """Open the file: an existing one up to `resume_step`, or a new one, after renaming an earlier run's file to the next free name."""
        self.path = run_dir / METRICS_FILE
        with writing_to(self.path):
            run_dir.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if resume_step is None:
                    self.path.rename(next_free(self.path))
                else:
                    write_atomic(self.path, history_until(run_dir, resume_step))
            self._file = self.path.open("a+b", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = (json.dumps({"step": int(step), "time_unix_s": round(time.time(), 3), **finite}, allow_nan=False) + "\n").encode()
        append_whole(self._file, line, self.path)

    def rescue(self, folder: Path) -> None:
        # A removed file is readable as long as it is open.
        self._file.seek(0)
        write_atomic(folder / METRICS_FILE, self._file.read())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl (or of the one in a run's folder), without a last line that a crash cut off."""
    return [row for row, _ in _whole_lines(path / METRICS_FILE if path.is_dir() else path)]


def history_until(run_dir: Path, step: int) -> str:
    """The whole lines of a run's metrics.jsonl up to a step. Raises OSError if the file cannot be read."""
    return "".join(
        line
        for row, line in _whole_lines(run_dir / METRICS_FILE)
        if isinstance(row, dict) and type(row.get("step")) is int and row["step"] <= step
    )


def _whole_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """(value, line) of each line that is JSON."""
    for line in read_regular(path).decode("utf-8", "replace").splitlines(keepends=True):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        yield row, line.removesuffix("\n") + "\n"


CURVES_FILE = "curves.png"
Curve = tuple[list[int], list[float]]

_FIRST_PANELS = (
    ("Success rate", ("episode/success", "eval/success")),
    ("Return per episode", ("episode/return", "eval/return")),
    ("Reward per step", (REWARD_PER_STEP,)),
    ("Steps of an episode", ("episode/length",)),
)
_LAST_PANELS = (("Steps per second", ("speed/steps_per_s",)),)
_SKIPPED_TRAIN = ("train/learning_rate",)
_NUM_COLUMNS = 3
_NUM_TRAIN_PANELS = 6
_MOST_POINTS = 4096
"""Points of a curve, of which a panel can show a tenth: a longer curve has every second point, then every fourth, and so on."""


class PlotLogger(Logger):
    """Draws every `interval_s`, less often if drawing is slow (never more than 2% of the time), and at the end."""

    def __init__(
        self, run_dir: Path, resume_step: int | None = None, *, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = run_dir / CURVES_FILE
        self._curves: dict[str, Curve] = defaultdict(lambda: ([], []))
        self._logged: dict[str, int] = defaultdict(int)
        self._every: dict[str, int] = defaultdict(lambda: 1)
        self._interval_s, self._clock = interval_s, clock
        if resume_step is not None and (run_dir / METRICS_FILE).is_file():
            for row in read_metrics(run_dir):
                if row["step"] <= resume_step:
                    self._add(row["step"], {name: value for name, value in row.items() if "/" in name and value is not None})
        self._next_s = clock() + interval_s

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        if self._clock() >= self._next_s:
            started = self._clock()
            draw_curves(self._curves, self.path)
            self._next_s = self._clock() + max(self._interval_s, 50 * (self._clock() - started))

    def rescue(self, folder: Path) -> None:
        self.path = folder / CURVES_FILE

    def close(self) -> None:
        if self._curves:
            draw_curves(self._curves, self.path)

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in derived(metrics).items():
            if not math.isfinite(value):
                continue
            steps, values = self._curves[name]
            if self._logged[name] % self._every[name] == 0:
                steps.append(step)
                values.append(value)
            self._logged[name] += 1
            if len(steps) > _MOST_POINTS:
                del steps[1::2], values[1::2]
                self._every[name] *= 2


def draw_curves(curves: Mapping[str, Curve], path: Path) -> Path:
    """Draw {metric: (steps, values)} as panels into a PNG. Raises UserError if it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = choose_panels(list(curves))
    num_rows = max(1, math.ceil(len(panels) / _NUM_COLUMNS))
    width, height = 4.2 * _NUM_COLUMNS, 2.8 * num_rows
    figure = Figure(figsize=(width, height))
    # In inches. matplotlib would find them by drawing all letters twice, which takes half a second.
    figure.subplots_adjust(0.7 / width, 0.45 / height, 1 - 0.15 / width, 1 - 0.3 / height, 0.8 / (4.2 - 0.8), 0.6 / (2.8 - 0.6))
    for index, (title, names) in enumerate(panels):
        axes = figure.add_subplot(num_rows, _NUM_COLUMNS, index + 1)
        for name in names:
            steps, values = curves[name]
            held_out = name.startswith("eval/")
            axes.plot(
                steps,
                values,
                label="interim evaluation" if held_out else "training",
                marker="o" if held_out or len(steps) == 1 else None,
                markersize=4,
            )
        axes.set_title(title, fontsize=10, y=1.0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if title == "Success rate":
            axes.set_ylim(-0.03, 1.03)
        if len(names) > 1:
            axes.legend(fontsize=8)
        if index >= len(panels) - _NUM_COLUMNS:
            axes.set_xlabel("environment steps", fontsize=8)
    return write_atomic_with(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))


def choose_panels(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """[(title, metrics drawn together)] from the metrics that a run has."""
    losses = sorted((n for n in names if n.startswith("train/") and n not in _SKIPPED_TRAIN), key=lambda n: ("loss" not in n, n))
    train = [(name.removeprefix("train/").replace("_", " ").capitalize(), (name,)) for name in losses[:_NUM_TRAIN_PANELS]]
    chosen = [(title, [name for name in wanted if name in names]) for title, wanted in (*_FIRST_PANELS, *_LAST_PANELS, *train)]
    return [(title, found) for title, found in chosen if found]
