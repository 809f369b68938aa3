"""Learning curves of one run, or of several: those that differ only in their seed as their mean and range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embodied_rl.loggers.meanings import SUCCESS_ENDS, meaning_of
from embodied_rl.loggers.plot import choose_panels
from embodied_rl.reports.charts import NUM_COLOURS, Series, line_chart
from embodied_rl.reports.run_data import RunData
from embodied_rl.reports.tables import details

GRID_POINTS = 200
"""Steps at which the curves of several seeds are averaged."""
_ALWAYS_PERCENT = ("episode/success", "eval/success")
_ON_CHARTS_OF_THEIR_OWN = ("time/", "speed/wall_clock_s")
_MAX_DIFFERENCES = 3


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: Sequence[RunData]


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """In the order of their first run; labelled by what the groups differ in."""
    found: dict[str, list[RunData]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    members = list(found.values())
    return [Group(label, own) for label, own in zip(_labels([own[0] for own in members]), members, strict=True)]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"algorithm.gamma": 0.99, …}"""
    rows: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows |= flat(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = value
    return rows


def differences(runs: Sequence[RunData], *, without: Sequence[str] = ("run_dir", "resume", "logger", "video")) -> list[str]:
    """Keys of the configuration that are not the same in all runs, ascending."""
    rows = [flat({key: value for key, value in run.config.items() if key not in without}) for run in runs]
    keys = sorted(set().union(*rows)) if rows else []
    return [key for key in keys if len({str(row.get(key)) for row in rows}) > 1]


def curve_charts(runs: Sequence[RunData]) -> str:
    """Figures of the metrics that matter most, then all others, folded; what never changes is folded away too."""
    groups = grouped(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    panels = choose_panels(names)
    shown = {metric for _, metrics in panels for metric in metrics}
    others = sorted(name for name in names if name not in shown and not name.startswith(_ON_CHARTS_OF_THEIR_OWN))
    flat_ones = [name for name in others if _is_flat(name, runs)]
    flat_panels = [(title, metrics) for title, metrics in panels if all(_is_flat(name, runs) for name in metrics)]
    ends = any(run.success_ends_episode for run in runs)
    main = [_panel(title, metrics, groups, ends) for title, metrics in panels if (title, metrics) not in flat_panels]
    rest = [_panel(name, [name], groups, ends) for name in others if name not in flat_ones]
    flat_charts = [_panel(title, metrics, groups, ends) for title, metrics in [*flat_panels, *((name, [name]) for name in flat_ones)]]
    several = any(len(group.runs) > 1 for group in groups)
    note = '<p class="note">Line: mean over seeds. Band: from the lowest to the highest. Thin: each run.</p>' if several else ""
    page = f'{note}<div class="charts">{"".join(main)}</div>' if any(main) else ""
    for told, charts in (("more curves", rest), ("curves that never change", flat_charts)):
        drawn = [chart for chart in charts if chart]
        if drawn:
            word = (
                told if len(drawn) > 1 else told.replace("curves that never change", "curve that never changes").replace("curves", "curve")
            )
            page += details(f"{len(drawn)} {word}", f'<div class="charts">{"".join(drawn)}</div>')
    return page


def _is_flat(metric: str, runs: Sequence[RunData]) -> bool:
    """Whether a metric has the same value throughout, in several rows; a single one is worth a look."""
    values = [value for run in runs for value in run.curve(metric)[1]]
    return len(values) > 1 and max(values) - min(values) <= 1e-9 * max(abs(values[0]), 1e-9)


def _panel(title: str, metrics: Sequence[str], groups: Sequence[Group], success_ends: bool) -> str:
    percent = all(metric in _ALWAYS_PERCENT for metric in metrics)
    series: list[Series] = []
    for number, group in enumerate(groups):
        for offset, metric in enumerate(metrics):
            kind = "interim evaluation" if metric.startswith("eval/") else "training"
            several = len(groups) > 1
            label = " ".join(word for word in (group.label if several else "", kind if len(metrics) > 1 or several else "") if word)
            # One group has a colour for each metric; several have one each, and measured points distinguish evaluation from training.
            series += group_series(group, metric, label or title, (number if several else offset) % NUM_COLOURS)
    return line_chart(
        title,
        series,
        percent=percent,
        y_range=(-0.03, 1.03) if percent else None,
        note=SUCCESS_ENDS if success_ends and metrics[0] == "episode/return" else "",
        meaning=" ".join(filter(None, (meaning_of(metric).text for metric in metrics))),
    )


def group_series(group: Group, metric: str, label: str, colour: int) -> list[Series]:
    """The curve of a run; or of several their mean with the range, and each of them thin."""
    curves = [curve for run in group.runs if (curve := run.curve(metric))[0]]
    if not curves:
        return []
    kind: Literal["dots", "line"] = "dots" if metric.startswith("eval/") else "line"
    if len(curves) == 1:
        return [Series(label, *curves[0], colour, kind)]
    steps, rows = on_one_grid(curves)
    if not len(steps):
        return [Series(label, x, y, colour, "thin") for x, y in curves]
    mean = Series(label, steps.tolist(), rows.mean(axis=0).tolist(), colour, "line", (rows.min(axis=0).tolist(), rows.max(axis=0).tolist()))
    return [*(Series(label, x, y, colour, "thin") for x, y in curves), mean]


def on_one_grid(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n], values [curves, n]) by straight lines between points, where all curves have any; n = 0 where they never meet."""
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if high < low:
        return np.empty(0), np.empty((len(curves), 0))
    steps = np.unique(np.concatenate([np.asarray(x, np.float64) for x, _ in curves]))
    steps = steps[(steps >= low) & (steps <= high)]
    if steps.size > GRID_POINTS:
        steps = np.linspace(low, high, GRID_POINTS)
    return steps, np.stack([np.interp(steps, np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in curves])


def _labels(firsts: Sequence[RunData]) -> list[str]:
    """What runs of different groups differ in."""
    if len(firsts) == 1:
        return [""]
    keys = [key for key in differences(firsts) if key != "seed"]
    named = [key for key in ("sim.task", "sim.name", "algorithm.name", "policy.name") if key in keys]
    chosen = (named[:1] + [key for key in keys if key not in named])[:_MAX_DIFFERENCES] if named else keys[:_MAX_DIFFERENCES]
    rows = [flat(run.config) for run in firsts]
    labels = [", ".join(_short(key, row.get(key)) for key in chosen) for row in rows]
    return labels if len(set(labels)) == len(labels) and all(labels) else [run.name for run in firsts]


def _short(key: str, value: object) -> str:
    return str(value) if key in ("sim.task", "sim.name", "algorithm.name", "policy.name") else f"{key.rpartition('.')[2]}={value}"
