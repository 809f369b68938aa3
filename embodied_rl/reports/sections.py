"""Parts of the page, among them learning curves and timeline, each from runs to HTML; a part without contents is empty."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from embodied_rl.evaluation.output import FIGURE_COLUMNS, comparison_cells, figure_cells, number, number_range, percent, percent_range
from embodied_rl.files import flat
from embodied_rl.loggers.jsonl import choose_panels
from embodied_rl.loggers.meanings import SUCCESS_ENDS, meaning_of
from embodied_rl.reading import yaml_text
from embodied_rl.reports.charts import (
    NUM_COLOURS,
    Series,
    card,
    clock,
    details,
    facts,
    grid,
    line_chart,
    scatter_chart,
    stacked_chart,
    text,
    tile,
)
from embodied_rl.reports.run_data import NOT_MATHEMATICS, RunData

GRID_POINTS = 200
"""Steps at which the curves of several seeds are averaged."""
_ALWAYS_PERCENT = ("episode/success", "eval/success")
_ON_CHARTS_OF_THEIR_OWN = ("time/", "speed/wall_clock_s")
_MAX_DIFFERENCES = 3


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    runs: Sequence[RunData]


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """Groups in the order of their first run, labelled by their differences."""
    found: dict[str, list[RunData]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    members = list(found.values())
    return [Group(label, own) for label, own in zip(_labels([own[0] for own in members]), members, strict=True)]


def differences(runs: Sequence[RunData]) -> list[str]:
    """Keys of the configuration that differ between runs, ascending."""
    rows = [flat({key: value for key, value in run.config.items() if key not in NOT_MATHEMATICS}) for run in runs]
    keys = sorted(set().union(*rows)) if rows else []
    return [key for key in keys if len({str(row.get(key)) for row in rows}) > 1]


def curve_charts(runs: Sequence[RunData]) -> str:
    """Figures of the most important metrics, then all others, folded; a constant metric shows only its value."""
    groups = grouped(runs)
    names = dict.fromkeys(name for run in runs for name in run.metric_names() if not name.startswith(_ON_CHARTS_OF_THEIR_OWN))
    values = {name: found for name in names if (found := [value for run in runs for value in run.curve(name)[1]])}
    moving = {name for name, found in values.items() if not _is_flat(found)}
    panels = [(title, metrics) for title, metrics in choose_panels(list(values)) if not moving.isdisjoint(metrics)]
    shown = {metric for _, metrics in panels for metric in metrics}
    ends = any(run.success_ends_episode for run in runs)
    main = [_panel(title, metrics, groups, ends) for title, metrics in panels]
    rest = [_panel(name, [name], groups, ends) for name in sorted(moving - shown)]
    several = any(len(group.runs) > 1 for group in groups)
    note = '<p class="note">Line: mean over seeds. Band: lowest to highest. Thin lines: single runs.</p>' if several else ""
    page = f'{note}<div class="charts">{"".join(main)}</div>' if main else ""
    if rest:
        page += details(f"{len(rest)} more curve{'s' * (len(rest) > 1)}", f'<div class="charts">{"".join(rest)}</div>')
    return page + _constants({name: values[name][0] for name in sorted(values.keys() - moving - shown)})


def _constants(values: Mapping[str, float]) -> str:
    """Constant metrics, folded."""
    said = {name: meaning_of(name).text for name in values}
    shown = {name: f'<span title="{text(said[name])}">{text(name)}</span>' if said[name] else text(name) for name in values}
    rows = [[shown[name], number(value)] for name, value in values.items()]
    title = f"{len(rows)} figures that never change" if len(rows) > 1 else "1 figure that never changes"
    return details(title, card(grid(("figure", "value"), rows, numbers=(1,)))) if rows else ""


def _is_flat(values: Sequence[float]) -> bool:
    """Whether a metric has the same value in several rows; a single row is drawn."""
    return len(values) > 1 and max(values) - min(values) <= 1e-9 * max(abs(values[0]), 1e-9)


def _panel(title: str, metrics: Sequence[str], groups: Sequence[Group], success_ends: bool) -> str:
    percent = all(metric in _ALWAYS_PERCENT for metric in metrics)
    series: list[Series] = []
    for position, group in enumerate(groups):
        for offset, metric in enumerate(metrics):
            kind = "interim evaluation" if metric.startswith("eval/") else "training"
            several = len(groups) > 1
            label = " ".join(word for word in (group.label if several else "", kind if len(metrics) > 1 or several else "") if word)
            # One group has a colour per metric; several have one each, and measured points distinguish evaluation from training.
            series += group_series(group, metric, label or title, (position if several else offset) % NUM_COLOURS)
    return line_chart(
        title,
        series,
        percent=percent,
        y_range=(-0.03, 1.03) if percent else None,
        note=SUCCESS_ENDS if success_ends and metrics[0] == "episode/return" else "",
        meaning=" ".join(filter(None, (meaning_of(metric).text for metric in metrics))),
    )


def group_series(group: Group, metric: str, label: str, colour: int) -> list[Series]:
    """Curve of a run; for several runs their mean with the range, and each of them thin."""
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
    """(steps [n], values [curves, n]) by linear interpolation, in the common range of all curves; n = 0 if there is none."""
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if high < low:
        return np.empty(0), np.empty((len(curves), 0))
    steps = np.unique(np.concatenate([np.asarray(x, np.float64) for x, _ in curves]))
    steps = steps[(steps >= low) & (steps <= high)]
    if steps.size > GRID_POINTS:
        steps = np.linspace(low, high, GRID_POINTS)
    return steps, np.stack([np.interp(steps, np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in curves])


def _labels(firsts: Sequence[RunData]) -> list[str]:
    """Labels of the differences between runs of different groups."""
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


MAX_STRETCHES = 120
OTHER = "other (start-up, evaluation, saving)"
_WALL, _TIME = "speed/wall_clock_s", "time/"
_MEANING = "Time spent on simulators (simulate), the policy (act) and the update; dashed lines are evaluations and faults."


@dataclass(frozen=True)
class Timeline:
    """A run's wall-clock time, cut into stretches."""

    edges_s: np.ndarray
    """[n + 1] seconds since the start."""
    phases: dict[str, np.ndarray]
    """{phase: [n] seconds}; together at most a stretch, and `OTHER` is the rest."""


def timeline_of(rows: Sequence[dict[str, Any]]) -> Timeline | None:
    """Timeline from the rows of metrics.jsonl; None if they have no times."""
    timed = [row for row in rows if isinstance(row.get(_WALL), int | float)]
    names = list(dict.fromkeys(name for row in timed for name in row if name.startswith(_TIME) and name.endswith("_s")))
    if not timed or not names:
        return None
    walls = np.maximum.accumulate(np.array([float(row[_WALL]) for row in timed]))
    spans = np.diff(walls, prepend=0.0)
    spent = {name: np.array([max(0.0, float(row.get(name) or 0.0)) for row in timed]) for name in names}
    total = np.sum(list(spent.values()), axis=0)
    # Clocks of two processes differ slightly; no phase may take longer than the stretch.
    scale = np.where(total > spans, np.divide(spans, total, out=np.zeros_like(total), where=total > 0), 1.0)
    phases = {name.removeprefix(_TIME).removesuffix("_s").replace("_", " "): values * scale for name, values in spent.items()}
    phases[OTHER] = np.maximum(0.0, spans - np.sum(list(phases.values()), axis=0))
    edges, summed = _summed(np.concatenate([[0.0], walls]), phases)
    return Timeline(edges, summed)


def _summed(edges: np.ndarray, phases: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Merge neighbouring stretches, so that there are at most `MAX_STRETCHES`."""
    count = len(edges) - 1
    starts = np.unique(np.linspace(0, count, min(count, MAX_STRETCHES) + 1).astype(int))[:-1]
    merged = {name: np.add.reduceat(values, starts) for name, values in phases.items()}
    return np.append(edges[starts], edges[-1]), merged


def timeline_section(run: RunData) -> str:
    """A figure of the phases over the run, and a table of their sums; empty if the run logged no times."""
    timeline = timeline_of(run.metrics)
    if timeline is None or timeline.edges_s[-1] <= 0:
        return ""
    spans = np.maximum(np.diff(timeline.edges_s), 1e-9)
    colours = {name: NUM_COLOURS - 1 if name == OTHER else number % (NUM_COLOURS - 1) for number, name in enumerate(timeline.phases)}
    shares = [(colours[name], name, (values / spans).tolist()) for name, values in timeline.phases.items()]
    minutes = (timeline.edges_s / 60).tolist()
    chart = stacked_chart("Time by phase", minutes, shares, marks_of(run), note="share of the time", meaning=_MEANING)
    sums = {name: float(values.sum()) for name, values in timeline.phases.items()}
    whole = sum(sums.values())
    rows = [
        [f'<i class="swatch c{colours[name]}"></i>{text(name)}', text(clock(value)), percent(value / whole)] for name, value in sums.items()
    ]
    return chart + '<div style="height:14px"></div>' + card(grid(("phase", "time", "share"), rows, numbers=(1, 2)))


def marks_of(run: RunData) -> list[tuple[float, str, str]]:
    """(minutes, kind, text) of evaluations and faults, by the step at which they were recorded."""
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


MAX_EMBEDDED_BYTES = 5_000_000
"""Most bytes of an embedded video; a larger one becomes a link."""
MAX_PAGE_BYTES = 25_000_000
"""Most bytes of all embedded videos together."""
_MAX_ROWS = 50
_TWO_EVALUATIONS = (
    "The interim evaluations (in the curves) and the final evaluation (here and at the top) play different held-out seeds. Training uses "
    "neither."
)


# ---- results --------------------------------------------------------------------------------------------------------


def tiles(runs: Sequence[RunData]) -> str:
    """Most important figures."""
    shown = _tiles_of_one(runs[0]) if len(runs) == 1 else _tiles_of_many(runs)
    return f'<div class="tiles">{"".join(shown)}</div>' if shown else ""


def _tiles_of_one(run: RunData) -> list[str]:
    results = run.results
    if not results:
        last = run.metrics[-1] if run.metrics else {}
        steps = last.get("step")
        return [tile("environment steps so far", f"{steps:,}" if isinstance(steps, int) else "–", "the run has no results yet")]
    shown = []
    seeds = f"final evaluation, {results.get('num_episodes')} held-out seeds"
    if (success := results.get("success")) is not None:
        low, high = interval = results.get("success_interval_95") or (success, success)
        shown.append(tile("success", percent(success), f"{seeds}; 95%: {percent_range(interval)}", (low, success, high)))
        if not (run.success_ends_episode and results.get("success_at_end") == success):
            at_end = results.get("success_at_end_interval_95")
            shown.append(tile("success at the end", percent(results.get("success_at_end")), f"95%: {percent_range(at_end)}"))
    spread = number(results.get("return_std"), 3)
    interval = number_range(results.get("return_mean_interval_95"))
    total, length = results.get("return_mean"), results.get("length_mean")
    shown.append(tile("return", number(total), f"95%: {interval}; ± {spread}"))
    if isinstance(total, int | float) and isinstance(length, int | float) and length:
        shown.append(tile("reward per step", number(total / length, 3), "return over steps"))
    shown.append(tile("steps of an episode", number(length), "success ends them" if run.success_ends_episode else "mean"))
    if cloned := run.warm_start:
        shown.append(
            tile("after cloning", percent(cloned["after"].get("success")), f"success; before: {percent(cloned['before'].get('success'))}")
        )
    trained = f"{results['steps']:,}" if isinstance(results.get("steps"), int) else "–"
    shown.append(
        tile("environment steps", trained, f"{number(results.get('steps_per_s'))} a second, {results.get('iterations')} iterations")
    )
    note = f"{clock(results.get('train_wall_clock_s'))} to the end of training"
    if (whole := results.get("whole_wall_clock_s")) is not None:
        note += f", {clock(whole)} with films"
    shown.append(tile("wall-clock", clock(results.get("wall_clock_s")), note))
    return shown


def _tiles_of_many(runs: Sequence[RunData]) -> list[str]:
    shown = []
    for group in grouped(runs):
        finished = [run.results for run in group.runs if run.results]
        name = f"{group.label}: " if group.label else ""
        whole = len(finished) == len(group.runs)
        count = f"{len(finished)} seed{'s' * (len(finished) > 1)}" if whole else f"{len(finished)} of {len(group.runs)} runs finished"
        rates = [float(results["success"]) for results in finished if results.get("success") is not None]
        returns = [float(results["return_mean"]) for results in finished if results.get("return_mean") is not None]
        if rates:
            mean = sum(rates) / len(rates)
            more = f"{percent(min(rates))} to {percent(max(rates))}, {count}"
            shown.append(tile(f"{name}mean success", percent(mean), more, (min(rates), mean, max(rates))))
        if returns:
            more = f"{min(returns):.4g} to {max(returns):.4g}, {count}"
            shown.append(tile(f"{name}mean return", number(sum(returns) / len(returns)), more))
    return shown


def runs_table(runs: Sequence[RunData]) -> str:
    """A row for each run, if there are several."""
    if len(runs) == 1:
        return ""
    keys = [key for key in differences(runs) if key != "seed"][:4]
    rows = []
    for run in runs:
        results, config = run.results, flat(run.config)
        steps = results.get("steps") or (run.metrics[-1]["step"] if run.metrics else None)
        cells = [text(run.name), text(run.seed if run.seed is not None else "–"), *(text(config.get(key, "–")) for key in keys)]
        cells += [*_cells(results), f"{steps:,}" if isinstance(steps, int) else "–", clock(results.get("wall_clock_s"))]
        rows.append(cells)
    columns = ("run", "seed", *keys, *FIGURE_COLUMNS, "steps", "wall-clock")
    return card(grid(columns, rows, numbers=range(2 + len(keys), len(columns))))


def evaluation_section(run: RunData) -> str:
    """Final evaluation's episodes, figures by task, and later results of `evaluate`."""
    results = run.results
    charts = _episodes_chart(results) if results else ""
    both = results and any(run.curve(f"eval/{name}")[0] for name in ("success", "return"))
    parts = [f'<p class="note">{_TWO_EVALUATIONS}</p>' if both else "", _cloning(run)]
    tasks = [((task,), figures) for task, figures in (results.get("tasks") or {}).items()]
    parts += [f'<div class="charts">{charts}</div>' if charts else "", card(_figure_grid(("task", "episodes"), tasks), "By task")]
    columns: tuple[str, ...] = ("file", "policy", "task", "seeds")
    rows: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [
        ((name, one.get("label") or _policy_of(one), one.get("task") or document.get("task")), one)
        for name, document in run.evaluations.items()
        for one in document.get("evaluations") or [document]
    ]
    if {text(cells[2]) for cells, _ in rows} == {text(run.task)}:
        columns, rows = ("file", "policy", "seeds"), [(cells[:2], one) for cells, one in rows]
    parts.append(card(_figure_grid(columns, rows), "Later evaluations"))
    for name, document in run.evaluations.items():
        parts.append(card(_comparisons(document), f"Compared seed by seed ({name})") if document.get("comparisons") else "")
    return "".join(parts)


def _cloning(run: RunData) -> str:
    """A warm start's figures, with those of the run's end below."""
    cloned = run.warm_start
    if not cloned:
        return ""
    stages = {"before cloning": cloned["before"], "after cloning": cloned["after"]}
    stages |= {"after reinforcement learning": run.results} if run.results.get("num_episodes") else {}
    return card(_figure_grid(("stage", "seeds"), [((stage,), figures) for stage, figures in stages.items()]), "Before and after cloning")


def _figure_grid(names: Sequence[str], rows: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> str:
    """A table of figures of evaluations: (cells before the number of episodes, figures) of each; `names` of these cells and that number."""
    cells = [[*map(text, own), text(figures.get("num_episodes", "–")), *_cells(figures)] for own, figures in rows]
    columns = (*names, *FIGURE_COLUMNS)
    return grid(columns, cells, numbers=range(len(names) - 1, len(columns))) if rows else ""


def _cells(figures: Mapping[str, Any]) -> list[str]:
    return [text(cell) for cell in figure_cells(figures)]


def _policy_of(one: Mapping[str, Any]) -> str:
    return "random" if one.get("policy") == "random" else f"step {one.get('step', '–')}"


def _comparisons(document: Mapping[str, Any]) -> str:
    rows = []
    for one in document.get("comparisons") or []:
        cells = [*(one.get(key) for key in ("policy", "against", "num_pairs")), *comparison_cells(one)]
        rows.append([text(cell) for cell in cells])
    columns = ("policy", "against", "pairs", "success", "95% interval", "p", "return", "95% interval", "p")
    return grid(columns, rows, numbers=range(2, len(columns)))


def _episodes_chart(results: Mapping[str, Any]) -> str:
    """Return over length, a point per episode."""
    episodes = [row for row in results.get("episodes") or [] if None not in (row.get("return"), row.get("length"))]
    has_success = results.get("success") is not None
    points = []
    for row in episodes[:2000]:
        outcome = "" if not has_success else ", success" if row.get("success_once") else ", no success"
        colour = 0 if not has_success else 2 if row.get("success_once") else 3
        points.append((float(row["length"]), float(row["return"]), colour, f"seed {row.get('seed')}: return {row['return']:.4g}{outcome}"))
    legend = [("success", 2), ("no success", 3)] if has_success else []
    meaning = "Each point is an episode of the final evaluation. Point at it to see its seed, return and outcome."
    return scatter_chart("Final evaluation: return and length", points, legend=legend, x_label="steps of the episode", meaning=meaning)


# ---- videos ---------------------------------------------------------------------------------------------------------


def video_section(runs: Sequence[RunData], folder: Path) -> str:
    """Embedded videos as far as they fit, the others as links relative to `folder`, the page's folder."""
    left, parts = MAX_PAGE_BYTES, []
    for run in runs:
        for index, path in enumerate(run.videos if len(runs) == 1 else run.videos[:1]):
            size = path.stat().st_size
            name = "/".join(path.relative_to(run.path / "videos").parts)  # each of several domains has its folder
            caption = name if len(runs) == 1 else f"{run.name}: {name}"
            if size > min(MAX_EMBEDDED_BYTES, left):
                content = f'<p><a href="{text(_address(path, folder))}">{text(path.name)}</a> ({size / 1e6:.1f} MB)</p>'
            else:
                left -= size
                content = _player(path, plays=index == 0)
            wide = ' class="wide"' if len(runs) == 1 and index == 0 else ""
            parts.append(f"<figure{wide}><figcaption>{text(caption)}</figcaption>{content}</figure>")
    return f'<div class="videos">{"".join(parts)}</div>' if parts else ""


def dialogue_section(runs: Sequence[RunData], folder: Path) -> str:
    """Links to the pages of language agents' episodes, relative to `folder`."""
    links = []
    for run in runs:
        for path in run.dialogues:
            what = "episodes of the film" if "videos" in path.relative_to(run.path).parts else "the last training episodes"
            name = text(path.name) if len(runs) == 1 else f"{text(run.name)}: {text(path.name)}"
            links.append(f'<li><a href="{text(_address(path, folder))}">{name}</a>: {what}, failures first</li>')
    return card(f"<ul>{''.join(links)}</ul>") if links else ""


def _player(path: Path, *, plays: bool) -> str:
    if path.suffix == ".gif":
        return f'<img alt="{text(path.stem)}" src="data:image/gif;base64,{_base64(path)}">'
    start = "autoplay " if plays else ""
    return f'<video controls loop muted playsinline {start}src="data:video/mp4;base64,{_base64(path)}"></video>'


def _address(path: Path, folder: Path) -> str:
    """Relative address if possible, so that the folder can be moved."""
    return quote(os.path.relpath(path.resolve(), folder.resolve()))


def image(path: Path) -> str:
    return f'<img alt="{text(path.name)}" src="data:image/png;base64,{_base64(path)}">'


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")


# ---- failures -------------------------------------------------------------------------------------------------------


def failure_section(runs: Sequence[RunData]) -> str:
    """Failed simulators, dumps of NaN, and unreadable files."""
    return "".join(_failures(run, run.name if len(runs) > 1 else "") for run in runs)


def _failures(run: RunData, title: str) -> str:
    parts = []
    if run.faults:
        rows = [_fault_row(fault) for fault in run.faults[:_MAX_ROWS]]
        more = f'<p class="note">{len(run.faults) - _MAX_ROWS} more in faults.jsonl</p>' if len(run.faults) > _MAX_ROWS else ""
        columns = ("step", "worker", "what happened", "its episodes", "back after", "cause")
        parts.append(
            f"<h3>{len(run.faults)} simulator fault{'s' if len(run.faults) > 1 else ''}</h3>"
            + grid(columns, rows, numbers=(0, 1, 4))
            + more
        )
    parts += [f"<h3>NaN or infinity: {text(dump['file'])}</h3>{_dump(dump)}" for dump in run.failures]
    if run.problems:
        parts.append("<h3>Files that could not be read</h3>" + "".join(f'<p class="bad">{text(problem)}</p>' for problem in run.problems))
    return card("".join(parts), title)


def _fault_row(fault: Mapping[str, Any]) -> list[str]:
    outcomes = [str(slot.get("outcome")) for slot in fault.get("slots") or []]
    counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)) or "none"
    lines = str(fault.get("detail") or "").strip().splitlines()
    cause = text(lines[-1] if lines else "no details")
    if len(lines) > 1:
        cause = details(lines[-1], f"<pre>{text(chr(10).join(lines))}</pre>")
    step = fault.get("step")
    back = f"{fault['recovery_s']:.2f} s" if isinstance(fault.get("recovery_s"), int | float) else "–"
    kind = str(fault.get("kind", "")).replace("_", " ").lower()
    return [f"{step:,}" if isinstance(step, int) else "–", text(fault.get("worker", "–")), text(kind), text(counted), back, cause]


def _dump(dump: Mapping[str, Any]) -> str:
    if "problem" in dump:
        return f'<p class="bad">{text(dump["problem"])}</p>'
    rows = [[text(array["name"]), text(array["shape"]), text(array["not_finite"])] for array in dump["arrays"]]
    context = {key: value for key, value in dump["context"].items() if key != "message"}
    message = dump["context"].get("message")
    shown = f"<pre>{text(message)}</pre>" if message else ""
    return shown + facts(context) + grid(("array", "shape", "not finite"), rows, numbers=(2,))


# ---- configuration and provenance -----------------------------------------------------------------------------------


def config_section(runs: Sequence[RunData]) -> str:
    """Differences between runs, then the configuration of the first, group by group."""
    parts = []
    if len(runs) > 1 and (keys := differences(runs)):
        rows = [[text(key), *(text(flat(run.config).get(key, "–")) for run in runs)] for key in keys[:_MAX_ROWS]]
        parts.append(card(grid(("key", *(run.name for run in runs)), rows), "What differs"))
    config = runs[0].config
    single = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    blocks = [details("run", _yaml(single))] if single else []
    blocks += [details(key, _yaml(value)) for key, value in config.items() if isinstance(value, Mapping)]
    title = f"All values of {runs[0].name}" if len(runs) > 1 else ""
    return "".join(parts) + card("".join(blocks), title)


def provenance_section(runs: Sequence[RunData]) -> str:
    """Commands, versions, machine."""
    parts = []
    for run in runs:
        results = run.results
        if results:
            made_with = {**(results.get("versions") or {}), **(results.get("machine") or {})}
            rows = {"finished": results.get("finished"), "checkpoint": results.get("checkpoint"), **made_with}
            rows["configuration SHA-256"] = results.get("config_sha256")
            content = f"<pre>{text(results.get('command'))}</pre>" + facts(rows)
            parts.append(card(content, run.name if len(runs) > 1 else ""))
    return "".join(parts)


def _yaml(value: object) -> str:
    return f"<pre>{text(yaml_text(_plain(value), width=120, default_flow_style=None).rstrip())}</pre>"


def _plain(value: object) -> object:
    """Mappings and lists of plain values, which YAML writes without tags."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode("utf-8", "replace").decode()  # YAML refuses half of a surrogate pair
