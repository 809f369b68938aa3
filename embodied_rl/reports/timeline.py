"""Where a run's time went, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.reports.charts import NUM_COLOURS, stacked_chart
from embodied_rl.reports.run_data import RunData
from embodied_rl.reports.tables import card, clock, grid, percent, text

MAX_STRETCHES = 120
OTHER = "other (start-up, evaluation, saving)"
_WALL, _TIME = "speed/wall_clock_s", "time/"
_MEANING = (
    "What the run waited for: simulators that step, the policy that acts, the update that learns; dashed lines are evaluations and faults."
)


@dataclass(frozen=True)
class Timeline:
    """A run's wall-clock, cut into stretches."""

    edges_s: np.ndarray
    """[n + 1] seconds since the start."""
    phases: dict[str, np.ndarray]
    """{phase: [n] seconds}; together no more than a stretch, and `OTHER` is what is left of it."""


def timeline_of(rows: Sequence[dict[str, Any]]) -> Timeline | None:
    """From the rows of metrics.jsonl; None where they hold no times."""
    timed = [row for row in rows if isinstance(row.get(_WALL), int | float)]
    names = list(dict.fromkeys(name for row in timed for name in row if name.startswith(_TIME) and name.endswith("_s")))
    if not timed or not names:
        return None
    walls = np.maximum.accumulate(np.array([float(row[_WALL]) for row in timed]))
    spans = np.diff(walls, prepend=0.0)
    spent = {name: np.array([max(0.0, float(row.get(name) or 0.0)) for row in timed]) for name in names}
    total = np.sum(list(spent.values()), axis=0)
    # Clocks of two processes never agree to the last digit; nothing may take longer than there was time.
    scale = np.where(total > spans, np.divide(spans, total, out=np.zeros_like(total), where=total > 0), 1.0)
    phases = {_phase(name): values * scale for name, values in spent.items()}
    phases[OTHER] = np.maximum(0.0, spans - np.sum(list(phases.values()), axis=0))
    edges, summed = _summed(np.concatenate([[0.0], walls]), phases)
    return Timeline(edges, summed)


def _summed(edges: np.ndarray, phases: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Neighbouring stretches together, so that there are at most `MAX_STRETCHES`."""
    count = len(edges) - 1
    starts = np.unique(np.linspace(0, count, min(count, MAX_STRETCHES) + 1).astype(int))[:-1]
    merged = {name: np.add.reduceat(values, starts) for name, values in phases.items()}
    return np.append(edges[starts], edges[-1]), merged


def timeline_section(run: RunData) -> str:
    """A figure of the phases over the run, and a table of their sums; empty where the run logged no times."""
    timeline = timeline_of(run.metrics)
    if timeline is None or timeline.edges_s[-1] <= 0:
        return ""
    spans = np.maximum(np.diff(timeline.edges_s), 1e-9)
    colours = {name: NUM_COLOURS - 1 if name == OTHER else number % (NUM_COLOURS - 1) for number, name in enumerate(timeline.phases)}
    shares = [(colours[name], name, (values / spans).tolist()) for name, values in timeline.phases.items()]
    minutes = (timeline.edges_s / 60).tolist()
    chart = stacked_chart("Time by phase", minutes, shares, marks_of(run), note="share of each stretch of the run", meaning=_MEANING)
    sums = {name: float(values.sum()) for name, values in timeline.phases.items()}
    whole = sum(sums.values())
    rows = [
        [f'<i class="swatch c{colours[name]}"></i>{text(name)}', text(clock(value)), percent(value / whole)] for name, value in sums.items()
    ]
    return chart + '<div style="height:14px"></div>' + card(grid(("phase", "time", "share"), rows, numbers=(1, 2)))


def marks_of(run: RunData) -> list[tuple[float, str, str]]:
    """(minutes, kind, text) of evaluations and faults, by the step that they were noted at."""
    timed = [(row["step"], float(row[_WALL])) for row in run.metrics if isinstance(row.get(_WALL), int | float)]
    steps, walls = [step for step, _ in timed], [wall for _, wall in timed]

    def minute(step: float) -> float:
        return float(np.interp(step, steps, walls)) / 60

    marks = []
    for row in run.metrics:
        if any(name.startswith("eval/") for name in row):
            success = row.get("eval/success")
            figure = f"success {100 * success:.1f}%" if isinstance(success, int | float) else f"return {row.get('eval/return')}"
            marks.append((minute(row["step"]), "evaluation", f"evaluation at {row['step']:,} steps: {figure}"))
    marks += [
        (minute(fault["step"]), "fault", f"worker {fault.get('worker')}: {fault.get('kind')} at {fault['step']:,} steps")
        for fault in run.faults
        if isinstance(fault.get("step"), int)
    ]
    return marks


def _phase(name: str) -> str:
    return name.removeprefix(_TIME).removesuffix("_s").replace("_", " ")
