"""offline_eval.html: one file with every figure, plot and video of an offline evaluation in it; nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import html
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.assessment import Estimate
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.files import write_atomic
from embodied_rl.types import TensorSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from embodied_rl.episodes.recording import Recording
    from embodied_rl.evaluation.offline_study import OfflineStudy, PolicyResult

MAX_VIDEOS = 4
MAX_PICTURES = 250
"""Of one episode; longer ones are shown faster."""
MAX_DIMENSIONS = 8
"""Action dimensions that are drawn."""
_VIDEO_SIZE, _FPS = 224, 20
_COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d0d7de; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .5rem 0; } th { text-align: left; border-bottom: 1px solid #d0d7de; }
td, th { padding: .25rem .9rem .25rem 0; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; border-radius: 6px; font-size: 13px; white-space: pre-wrap; }
img, video { max-width: 100%; } .refused { color: #9a6700; } .note { color: #57606a; }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; } figcaption { font-size: 13px; color: #57606a; }
"""


def write_offline_report(path: Path, study: OfflineStudy, recording: Recording, document: Mapping[str, Any]) -> Path:
    """Write the report.

    Args:
        recording: read for its pictures.
        document: provenance: task, command, versions, machine.

    Raises:
        UserError: the file cannot be written.
    """
    title = f"Offline evaluation: {document['task']}"
    facts = {
        "recording": document["recording"],
        "played by": ", ".join(f"{key} {value}" for key, value in document["recorded_policy"].items()) or "not known",
        "episodes": f"{study.num_episodes} ({study.num_steps:,} steps)"
        + (f", {study.num_incomplete} more without an end" * bool(study.num_incomplete)),
        "value of": f"episodes with discount {study.settings.given.gamma:g}, {_END[study.settings.truncation]}",
        "target policies": {"sample": "as they explore", "mode": "their most likely actions"}[study.settings.target],
        "finished": document["finished"],
    }
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(("", ""), [(html.escape(key), html.escape(str(value))) for key, value in facts.items()]),
        *(f'<p class="note">{html.escape(note)}.</p>' for note in study.notes),
        _ranking(study),
        _values(study),
        _open_loop(study),
        _videos(recording, study.settings.max_episodes),
        f"<h2>Command</h2><pre>{html.escape(document['command'])}</pre>",
        _recorded_with(document),
        f"<h2>Versions and machine</h2>{_table(('', ''), [(html.escape(str(k)), html.escape(str(v))) for k, v in _made_with(document)])}",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return write_atomic(path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n')


_END = {"end": "ended where they were cut", "bootstrap": "continued by the fitted values where they were cut"}


# ---- sections ---------------------------------------------------------------------------------------------------------


def _ranking(study: OfflineStudy) -> str:
    if len(study.policies) < 2 or not study.settings.estimators:
        return ""
    if study.ranked_by is None:
        return '<h2>Ranking</h2><p class="refused">No estimator has a value for every policy, so that nothing ranks them.</p>'
    rows = []
    for place, label in enumerate(study.ranking, start=1):
        estimate = study.policy(label).estimate(study.ranked_by)
        cells = (str(place), html.escape(label), _number(estimate.value), _interval(estimate), f"{study.best_share[label]:.0%}")
        rows.append(cells)
    names = ("", "policy", study.ranked_by, f"{_percent(study)} bootstrap", "best in")
    text = (
        f"By {study.ranked_by}. “Best in” is the share of resamples of the episodes, shared by all policies, in which a policy is the best."
    )
    return f"<h2>Ranking</h2><p>{html.escape(text)}</p>{_table(names, rows, numbers=(2, 3, 4))}"


def _values(study: OfflineStudy) -> str:
    if not study.settings.estimators:
        return ""
    parts = ["<h2>Values</h2>", _picture(draw_values(study), "Estimates with their bootstrap intervals")]
    for policy in study.policies:
        rows = []
        for estimate in [*([study.behaviour] if study.behaviour else []), *policy.estimates]:
            concentration = estimate.concentration
            guaranteed = "" if concentration is None else f"{concentration.low:.4g} to {concentration.high:.4g}"
            weights = estimate.weights
            shown = ("", "", "") if weights is None else (f"{weights.ess:.1f}", f"{weights.largest:.3g}", f"{weights.mean:.3g}")
            rows.append((estimate.estimator, _number(estimate.value), _interval(estimate), guaranteed, *shown, _remarks(estimate)))
        names = ("", "value", f"{_percent(study)} bootstrap", "concentration", "ESS", "largest weight", "mean weight", "")
        parts.append(f"<h3>{html.escape(policy.label)}</h3>{_table(names, rows, numbers=(1, 2, 3, 4, 5, 6))}")
    if any(policy.ess_by_step is not None for policy in study.policies):
        parts.append(_picture(draw_ess(study), "Effective sample size of the weights up to each step"))
    parts.append(f'<p class="note">{html.escape(_EXPLANATION)}</p>')
    return "".join(parts)


_EXPLANATION = (
    "The bootstrap resamples episodes and aims at its coverage; where few episodes carry the weight it misses it. Of fitted values it "
    "holds the spread over fits, and not what all fits get wrong alike. A concentration interval "
    "holds for any weights, given that the episodes are independent, that the recorded log-probabilities are true and that every reward "
    "lies in the stated range; self-normalised and fitted estimates have none, and those of is and pdis hold for the same value. ESS is "
    "the effective sample size: as many episodes of equal weight would be as good."
)


def _remarks(estimate: Estimate) -> str:
    if estimate.refused:
        return f'<span class="refused">refused: {html.escape(estimate.refused)}</span>'
    # Of the others the explanation below the tables says why they have none.
    could = estimate.no_concentration and estimate.estimator in ("behaviour", "is", "pdis")
    texts = [*estimate.notes, *([f"no concentration interval: {estimate.no_concentration}"] if could else [])]
    return f'<span class="note">{html.escape("; ".join(texts))}</span>'


def _open_loop(study: OfflineStudy) -> str:
    rows = []
    for policy in study.policies:
        loop = policy.open_loop
        likelihood = f"{loop.log_likelihood.mean:.4g} ({loop.log_likelihood.interval.low:.4g} to {loop.log_likelihood.interval.high:.4g})"
        figures = [f"{loop.mse.mean:.4g}", f"{loop.mae.mean:.4g}"] if loop.mse is not None and loop.mae is not None else ["", ""]
        rows.append((html.escape(policy.label), *figures, f"{loop.accuracy.mean:.1%}", f"{loop.majority:.1%}", likelihood))
    first = study.policies[0].open_loop
    accuracy = f"same of {first.num_bins} bins" if first.num_bins else "accuracy"
    names = ("policy", "MSE", "MAE", accuracy, "always the most frequent", "log-likelihood per step")
    parts = [f"<h2>Open loop</h2>{_table(names, rows, numbers=(1, 2, 3, 4, 5))}"]
    if first.mse is not None:
        parts.append(_by_dimension(study))
        parts.append(f'<p class="note">{first.bound_share:.1%} of the recorded entries lie at the simulator\'s bounds.</p>')
    plots = "predicted (lines) and recorded (dots) actions"
    parts += [_picture(draw_open_loop(policy), f"{policy.label}: {plots}") for policy in study.policies]
    return "".join(parts)


def _by_dimension(study: OfflineStudy) -> str:
    rows = []
    for policy in study.policies:
        loop = policy.open_loop
        for dim, (mse, mae) in enumerate(zip(loop.mse_by_dim, loop.mae_by_dim, strict=True)):
            explained = loop.explained_by_dim[dim]
            share = "" if explained != explained else f"{explained:.1%}"
            name = html.escape(policy.label) if dim == 0 else ""
            rows.append((name, str(dim), f"{mse:.4g}", f"{mae:.4g}", share, f"{loop.accuracy_by_dim[dim]:.1%}"))
    names = ("policy", "dimension", "MSE", "MAE", "explained", "same bin")
    return f"<details><summary>By dimension</summary>{_table(names, rows, numbers=(1, 2, 3, 4, 5))}</details>"


def _videos(recording: Recording, limit: int | None) -> str:
    """Up to `MAX_VIDEOS` recorded episodes with their pictures; "" where the recording has none."""
    if not any(_is_picture(part) for part in recording.spec.observation.values()) and not recording.episode(0).images:
        return ""
    figures = []
    for number in range(min(MAX_VIDEOS, len(recording) if limit is None else limit)):
        episode = recording.episode(number)
        frames = _pictures(episode, recording)
        if frames:
            caption = f"episode {number}, seed {episode.seed}, return {episode.episode_return:.4g}"
            caption += ", success" if episode.success_once else ""
            data = _video(frames)
            source = f"data:video/mp4;base64,{base64.b64encode(data).decode('ascii')}"
            figures.append(f'<figure><video controls loop muted src="{source}"></video><figcaption>{caption}</figcaption></figure>')
    return f"<h2>Recorded episodes</h2>{''.join(figures)}" if figures else ""


def _recorded_with(document: Mapping[str, Any]) -> str:
    command = document["recorded_with"]
    return f"<h2>How the episodes were recorded</h2><pre>{html.escape(command)}</pre>" if command else ""


def _made_with(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*document["versions"].items(), *document["machine"].items()]


# ---- plots ------------------------------------------------------------------------------------------------------------


def draw_values(study: OfflineStudy) -> Figure:
    """Every estimate as a point with its bootstrap interval, a row of panels per estimator; the recorded policy's value is a line."""
    names = [e.estimator for e in study.policies[0].estimates]
    height = 0.7 + 0.32 * len(names) * len(study.policies)
    figure = _figure(8.5, max(2.2, height))
    axes = figure.add_subplot()
    ticks, places = [], []
    for row, name in enumerate(names):
        for index, policy in enumerate(study.policies):
            place = -(row * (len(study.policies) + 0.8) + index)
            estimate, colour = policy.estimate(name), _COLOURS[index % len(_COLOURS)]
            ticks.append(f"{name}  {policy.label}")
            places.append(place)
            if estimate.value is None:
                axes.annotate("refused", (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, color="#9a6700")
                continue
            if estimate.concentration is not None:
                axes.plot([estimate.concentration.low, estimate.concentration.high], [place, place], color=colour, alpha=0.25, lw=5)
            if estimate.bootstrap is not None:
                axes.plot([estimate.bootstrap.low, estimate.bootstrap.high], [place, place], color=colour, lw=1.6)
            axes.plot([estimate.value], [place], "o", color=colour, markersize=5)
    if study.behaviour is not None and study.behaviour.value is not None:
        axes.axvline(study.behaviour.value, color="#57606a", ls="--", lw=1, label="the recorded policy")
        axes.legend(fontsize=8, loc="best")
    axes.set_yticks(places, ticks, fontsize=8)
    axes.set_ylim(min(places) - 0.8, 0.8)
    axes.set_xlim(*_value_limits(study))
    axes.set_xlabel(f"value, discount {study.settings.given.gamma:g}", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _value_limits(study: OfflineStudy) -> tuple[float, float]:
    """Room for all values and bootstrap intervals; concentration intervals may be many times as wide, and run out of the picture."""
    estimates = [*([study.behaviour] if study.behaviour else []), *(e for policy in study.policies for e in policy.estimates)]
    ends = [
        end for e in estimates if e.value is not None for end in (e.value, *((e.bootstrap.low, e.bootstrap.high) if e.bootstrap else ()))
    ]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def draw_ess(study: OfflineStudy) -> Figure:
    """Effective sample size against steps."""
    figure = _figure(8.5, 2.8)
    axes = figure.add_subplot()
    for index, policy in enumerate(study.policies):
        if policy.ess_by_step is not None:
            steps = np.arange(1, len(policy.ess_by_step) + 1)
            axes.plot(steps, policy.ess_by_step, color=_COLOURS[index % len(_COLOURS)], label=policy.label)
    axes.axhline(study.settings.given.min_ess, color="#cf222e", ls=":", lw=1, label="min_ess")
    axes.set(yscale="log", xlabel="steps", ylabel="effective sample size")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def draw_open_loop(policy: PolicyResult) -> Figure:
    """Recorded actions (dots) and predicted ones (lines), a row per dimension and a column per example episode."""
    examples = policy.examples
    dims = min(MAX_DIMENSIONS, examples[0].recorded.shape[1])
    figure = _figure(3.6 * len(examples), 0.9 + 1.3 * dims)
    for column, example in enumerate(examples):
        for dim in range(dims):
            axes = figure.add_subplot(dims, len(examples), dim * len(examples) + column + 1)
            axes.plot(example.recorded[:, dim], ".", color="#57606a", markersize=3)
            axes.plot(example.predicted[:, dim], color=_COLOURS[0], lw=1)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
            if dim == 0:
                axes.set_title(f"episode {example.number}, seed {example.seed}", fontsize=9)
            if column == 0:
                axes.set_ylabel(f"action {dim}", fontsize=8)
            if dim == dims - 1:
                axes.set_xlabel("steps", fontsize=8)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _picture(figure: Figure, caption: str) -> str:
    """A plot as a separate SVG inside the page, so that its identifiers meet no other plot's."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"><figcaption>{text}</figcaption></figure>'


# ---- pictures ---------------------------------------------------------------------------------------------------------


def _is_picture(part: object) -> bool:
    return isinstance(part, TensorSpec) and len(part.shape) == 3 and part.shape[-1] == 3 and part.dtype == "uint8"


def _pictures(episode: RecordedEpisode, recording: Recording) -> list[np.ndarray]:
    """Square pictures of an episode: all cameras of `images`, else what the policy saw; every second one, every fourth, … of long ones."""
    from embodied_rl.video import fit_square, tile

    seen = {key: episode.observation[key] for key, part in recording.spec.observation.items() if _is_picture(part)}
    cameras = dict(episode.images) or seen
    stride = 1
    while episode.num_steps // stride > MAX_PICTURES:
        stride *= 2
    steps = [*range(0, episode.num_steps, stride), episode.num_steps]
    return [tile([fit_square(np.asarray(part[step]), _VIDEO_SIZE) for part in cameras.values()]) for step in steps] if cameras else []


def _video(frames: Sequence[np.ndarray]) -> bytes:
    from embodied_rl.video import play_rate, write_mp4

    with tempfile.TemporaryDirectory() as folder:
        return write_mp4(Path(folder) / "episode.mp4", frames, play_rate(len(frames), _FPS), hold_s=0.5).read_bytes()


# ---- small things -----------------------------------------------------------------------------------------------------


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""
    kind: Callable[[int], str] = lambda column: ' class="n"' if column in numbers else ""  # noqa: E731
    head = "".join(f"<th{kind(column)}>{name}</th>" for column, name in enumerate(names))
    body = "".join("<tr>" + "".join(f"<td{kind(column)}>{cell}</td>" for column, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if any(names) else ''}{body}</table>"


def _interval(estimate: Estimate) -> str:
    return "" if estimate.bootstrap is None else f"{estimate.bootstrap.low:.4g} to {estimate.bootstrap.high:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(study: OfflineStudy) -> str:
    return f"{100 * study.settings.given.confidence:.3g}%"
