"""Results of an offline study: its tables, for the console and the page, and the page.

offline_eval.html is one file with every figure, plot and video; it fetches nothing.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embodied_rl.episodes.assessment import Estimate
from embodied_rl.episodes.estimators import Interval
from embodied_rl.episodes.recording import RecordedEpisode, Recording
from embodied_rl.evaluation.output import number
from embodied_rl.files import write_atomic
from embodied_rl.loggers.meanings import OFFLINE
from embodied_rl.reports.charts import NUM_COLOURS, Series, card, facts, grid, line_chart, range_chart, text
from embodied_rl.reports.page import html_page
from embodied_rl.types import TensorSpec
from embodied_rl.video import fit_square, play_rate, tile, write_mp4

if TYPE_CHECKING:
    from embodied_rl.evaluation.offline_study import OfflineStudy, PolicyResult

MAX_PICTURES = 250
"""Most pictures of one episode; longer ones are shown faster."""
MAX_DIMENSIONS = 8
"""Most action dimensions that are drawn."""
_VIDEO_SIZE, _FPS = 224, 20


# ---- tables -----------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A table of plain texts."""

    title: str
    columns: Sequence[str]
    """Headings; the first ``leading`` are names, the others figures."""
    rows: Sequence[Sequence[str]]
    leading: int = 1


def ranking(study: OfflineStudy) -> Shown:
    """The policies, best first, if an estimator ranks them."""
    by = study.ranked_by
    assert by is not None
    rows = []
    for place, label in enumerate(study.ranking, start=1):
        policy = study.policy(label)
        estimate, best = policy.estimate(by), f"{study.best_share[label]:.0%}"
        likelihood = f"{policy.open_loop.log_likelihood.mean:.3g}"
        rows.append((str(place), label, number(estimate.value), _interval(estimate.bootstrap), best, likelihood))
    columns = ("", "policy", by, _bootstrap(study), "best in", "log-likelihood per step")
    return Shown(f"Ranked by {by} (γ = {study.settings.given.gamma:g})", columns, rows, leading=2)


def estimates(study: OfflineStudy, policy: PolicyResult) -> Shown:
    """All estimates of one policy, below those of the recorded one."""
    rows = []
    for estimate in all_estimates(study, policy):
        weights = estimate.weights
        cells = ("", "", "") if weights is None else (f"{weights.ess:.1f}", f"{weights.largest:.3g}", f"{weights.mean:.3g}")
        value = "refused" if estimate.refused else number(estimate.value)
        rows.append((estimate.estimator, value, _interval(estimate.bootstrap), _interval(estimate.concentration), *cells))
    columns = ("", "value", _bootstrap(study), "concentration", "ESS", "largest weight", "mean weight")
    return Shown(f"{policy.label}: value over {study.num_episodes} episodes (γ = {study.settings.given.gamma:g})", columns, rows)


def all_estimates(study: OfflineStudy, policy: PolicyResult) -> list[Estimate]:
    """Estimates in the order of `estimates`."""
    return [*([study.behaviour] if study.behaviour else []), *policy.estimates]


def open_loop(study: OfflineStudy) -> Shown:
    """Predicted against recorded actions, a row per policy."""
    first = study.policies[0].open_loop
    rows = []
    for policy in study.policies:
        loop = policy.open_loop
        distances: tuple[str, ...] = ()
        if loop.mse is not None and loop.mae is not None:
            explained = [value for value in loop.explained_by_dim if value == value]
            distances = (f"{loop.mse.mean:.4g}", f"{loop.mae.mean:.4g}", f"{sum(explained) / max(len(explained), 1):.1%}")
        likelihood = f"{loop.log_likelihood.mean:.4g} ({_interval(loop.log_likelihood.interval)})"
        rows.append((policy.label, *distances, f"{loop.accuracy.mean:.1%}", f"{loop.majority:.1%}", likelihood))
    distances = ("MSE", "MAE", "explained") if first.mse is not None else ()
    columns = ("policy", *distances, "same bin" if first.num_bins else "accuracy", "always the most frequent", "log-likelihood per step")
    asked = "step" if first.horizon == 1 else f"{first.horizon} steps"
    bins = f", {first.num_bins} bins" if first.num_bins else ""
    return Shown(f"Open loop, {first.num_episodes} episodes, one decision every {asked}{bins}", columns, rows)


def by_dimension(policies: Sequence[PolicyResult]) -> Shown:
    """The same per dimension of the action; no rows for discrete actions."""
    rows = []
    for policy in policies:
        loop = policy.open_loop
        for dim, (mse, mae) in enumerate(zip(loop.mse_by_dim, loop.mae_by_dim, strict=True)):
            explained = loop.explained_by_dim[dim]
            shares = ("" if explained != explained else f"{explained:.1%}", f"{loop.accuracy_by_dim[dim]:.1%}")
            rows.append((policy.label if dim == 0 else "", f"dimension {dim}", f"{mse:.4g}", f"{mae:.4g}", *shares))
    return Shown("By dimension", ("policy", "", "MSE", "MAE", "explained", "same bin"), rows, leading=2)


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.4g} to {interval.high:.4g}"


def _bootstrap(study: OfflineStudy) -> str:
    return f"{100 * study.settings.given.confidence:.3g}% bootstrap"


# ---- the page ---------------------------------------------------------------------------------------------------------


def write_offline_report(path: Path, study: OfflineStudy, recording: Recording, document: Mapping[str, Any]) -> Path:
    """Write the report.

    `document`: provenance: task, command, versions, machine.

    Raises UserError: the file cannot be written.
    """
    title, settings = f"Offline evaluation: {document['task']}", study.settings
    target = {"sample": "policies as they explore", "mode": "policies' most likely actions"}[settings.target]
    subtitle = f"{target} · discount {settings.given.gamma:g} · episodes {_END[settings.truncation]} · {document['finished']}"
    episodes = f"{study.num_episodes} ({study.num_steps:,} steps)"
    rows = {
        "recording": document["recording"],
        "played by": ", ".join(f"{key} {value}" for key, value in document["recorded_policy"].items()) or "not known",
        "episodes": episodes + f", {study.num_incomplete} more unfinished" * bool(study.num_incomplete),
    }
    notes = "".join(f'<p class="note">{text(note)}.</p>' for note in study.notes)
    sections = [
        ("Recording", card(facts(rows) + notes) + _videos(recording, [example.number for example in study.policies[0].examples])),
        ("Ranking", _ranking(study)),
        ("Values", _values(study)),
        ("Open loop", _open_loop(study)),
        ("Provenance", _provenance(document)),
    ]
    return write_atomic(path, html_page(title, subtitle, sections))


_END = {"end": "ended at a cut", "bootstrap": "continued by the fitted value after a cut"}


# ---- sections ---------------------------------------------------------------------------------------------------------


def _ranking(study: OfflineStudy) -> str:
    if len(study.policies) < 2 or not study.settings.estimators:
        return ""
    if study.ranked_by is None:
        return card('<p class="bad">The policies are not ranked, because no estimator has a value for every policy.</p>')
    return card(_grid(ranking(study)), f"By {study.ranked_by}")


def _values(study: OfflineStudy) -> str:
    if not study.settings.estimators:
        return ""
    parts = [_values_chart(study)]
    for policy in study.policies:
        remarks = [_remarks(estimate) for estimate in all_estimates(study, policy)]
        parts.append(card(_grid(estimates(study, policy), remarks), policy.label))
    parts.append(_ess_chart(study))
    parts.append(card(f'<p class="note">{text(_EXPLANATION)}</p>'))
    return "".join(parts)


_EXPLANATION = (
    "The bootstrap resamples episodes; its coverage is too low if few episodes carry most of the weight. For fitted values it covers the "
    "spread over fits, but not the errors that all fits share. A concentration interval holds for any weights if the episodes are "
    "independent, the recorded log-probabilities are right, and every reward lies in the stated range; self-normalised and fitted "
    "estimates have none, but those of is and pdis bound the same value. ESS, the effective sample size, is the number of equally "
    "weighted episodes with the same precision."
)


def _remarks(estimate: Estimate) -> str:
    if estimate.refused:
        return f'<span class="bad">refused: {text(estimate.refused)}</span>'
    # For the other estimators the explanation below the tables gives the reason.
    could = estimate.no_concentration and estimate.estimator in ("behaviour", "is", "pdis")
    texts = [*estimate.notes, *([f"no concentration interval: {estimate.no_concentration}"] if could else [])]
    return f'<span class="note">{text("; ".join(texts))}</span>'


def _open_loop(study: OfflineStudy) -> str:
    first, shown = study.policies[0].open_loop, _grid(open_loop(study))
    if first.mse is not None:
        bins = f" Each dimension has {first.num_bins} equal bins." if first.num_bins else ""
        shown += f"<details><summary>By dimension</summary>{_grid(by_dimension(study.policies))}</details>"
        shown += f'<p class="note">{first.bound_share:.1%} of the recorded action values lie at the simulator\'s bounds.{bins}</p>'
    shown += '<p class="note">Lines: the policy\'s actions in the recorded states. Dots: recorded actions.</p>'
    charts = "".join(map(_action_charts, study.policies))
    return f'{card(shown)}<div class="charts">{charts}</div>'


def _videos(recording: Recording, numbers: Sequence[int]) -> str:
    """Pictures of these episodes; "" if the recording has none."""
    if not any(_is_picture(part) for part in recording.spec.observation.values()) and not recording.episode(0).images:
        return ""
    figures = []
    for index in numbers:
        episode = recording.episode(index)
        frames = _pictures(episode, recording)
        if frames:
            caption = f"episode {index}, seed {episode.seed}, return {episode.episode_return:.4g}"
            caption += ", success" if episode.success_once else ""
            data = _video(frames)
            source = f"data:video/mp4;base64,{base64.b64encode(data).decode('ascii')}"
            figures.append(f'<figure><video controls loop muted src="{source}"></video><figcaption>{caption}</figcaption></figure>')
    return f'<div class="videos">{"".join(figures)}</div>' if figures else ""


def _provenance(document: Mapping[str, Any]) -> str:
    """Commands, versions, machine."""
    recorded = document["recorded_with"]
    shown = f"<pre>{text(document['command'])}</pre>" + (f"The episodes were recorded by<pre>{text(recorded)}</pre>" if recorded else "")
    return card(shown + facts({**document["versions"], **document["machine"]}))


# ---- charts -----------------------------------------------------------------------------------------------------------


def _values_chart(study: OfflineStudy) -> str:
    """Every estimate as a point with its intervals, estimator by estimator; the recorded policy's value is a line."""
    rows: list[tuple[str, int, float | None, list[tuple[float, float]]]] = []
    for name in [estimate.estimator for estimate in study.policies[0].estimates]:
        for colour, policy in enumerate(study.policies):
            estimate = policy.estimate(name)
            intervals = [part for part in (estimate.concentration, estimate.bootstrap) if part is not None and estimate.value is not None]
            label = f"{name}  {policy.label}" + ": refused" * (estimate.value is None)
            rows.append((label, colour, estimate.value, [(part.low, part.high) for part in intervals]))
    given = [*([study.behaviour] if study.behaviour else []), *(e for policy in study.policies for e in policy.estimates)]
    # Concentration intervals may be many times wider than the others.
    shown = [(e.value, e.bootstrap.low, e.bootstrap.high) for e in given if e.value is not None and e.bootstrap is not None]
    ends = np.array(shown or [(0.0, 1.0, 1.0)])
    room = 0.08 * float(np.ptp(ends)) or 1.0
    return range_chart(
        "Estimates",
        rows,
        x_label=f"value, discount {study.settings.given.gamma:g}",
        x_range=(float(ends.min()) - room, float(ends.max()) + room),
        mark=study.behaviour.value if study.behaviour else None,
        note="Point: estimate. Line: bootstrap interval. Pale line: concentration interval. Dashed line: value of the recorded policy.",
    )


def _ess_chart(study: OfflineStudy) -> str:
    """Effective sample size over steps; empty without weights."""
    shares = [(colour, policy.label, policy.ess_by_step) for colour, policy in enumerate(study.policies) if policy.ess_by_step is not None]
    series = [Series(label, range(1, len(ess) + 1), ess.tolist(), colour) for colour, label, ess in shares]
    if not series:
        return ""
    last = max(len(one.x) for one in series)
    series.append(Series("min_ess", [1, last], [study.settings.given.min_ess] * 2, NUM_COLOURS - 1, "dots"))
    note = "Effective sample size of the importance weights up to each step. Below the dotted line, estimates are refused."
    chart = line_chart("Effective sample size", series, x_label="steps", y_range=(0.0, 1.05 * max(max(one.y) for one in series)), note=note)
    return f'<div class="charts">{chart}</div>'


def _action_charts(policy: PolicyResult) -> str:
    """Recorded and predicted actions, a chart per dimension and example episode."""
    charts = []
    for dim in range(min(MAX_DIMENSIONS, policy.examples[0].recorded.shape[1])):
        for example in policy.examples:
            steps = range(len(example.recorded))
            recorded, predicted = (rows[:, dim].tolist() for rows in (example.recorded, example.predicted))
            series = [Series("recorded", steps, recorded, 0, "dots"), Series("predicted", steps, predicted, 1)]
            title = f"{policy.label}, action {dim}: episode {example.number}, seed {example.seed}"
            charts.append(line_chart(title, series, x_label="steps"))
    return "".join(charts)


# ---- pictures ---------------------------------------------------------------------------------------------------------


def _is_picture(part: object) -> bool:
    return isinstance(part, TensorSpec) and part.is_picture


def _pictures(episode: RecordedEpisode, recording: Recording) -> list[np.ndarray]:
    """Square pictures of an episode: all cameras of `images`, else the policy's; every second one, every fourth, … of long ones."""
    seen = {key: episode.observation[key] for key, part in recording.spec.observation.items() if _is_picture(part)}
    cameras = dict(episode.images) or seen
    stride = 1
    while episode.num_steps // stride > MAX_PICTURES:
        stride *= 2
    steps = [*range(0, episode.num_steps, stride), episode.num_steps]
    return [tile([fit_square(np.asarray(part[step]), _VIDEO_SIZE) for part in cameras.values()]) for step in steps] if cameras else []


def _video(frames: Sequence[np.ndarray]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_mp4(Path(folder) / "episode.mp4", frames, play_rate(len(frames), _FPS), hold_s=0.5).read_bytes()


# ---- small things -----------------------------------------------------------------------------------------------------


def _grid(shown: Shown, remarks: Sequence[str] | None = None) -> str:
    """A table whose headings and estimators have explanations; `remarks` are its last column, in HTML."""
    columns, rows = shown.columns, [[_explained(row[0]), *map(text, row[1:])] for row in shown.rows]
    meanings = {name: OFFLINE[known] for name in columns if (known := name.rpartition("% ")[2]) in OFFLINE}
    numbers = range(shown.leading, len(columns))
    if remarks is not None:
        columns, rows = [*columns, ""], [[*row, remark] for row, remark in zip(rows, remarks, strict=True)]
    return grid(columns, rows, numbers=numbers, meanings=meanings)


def _explained(name: str) -> str:
    return f'<span title="{text(OFFLINE[name])}">{text(name)}</span>' if name in OFFLINE else text(name)
