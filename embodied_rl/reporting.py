"""What a run leaves behind for people: results.json, report.html, the video, and where all of it lies."""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from embodied_rl.checkpoint import add_result_to_card, resume_command
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.files import write_atomic
from embodied_rl.registry import load_target
from embodied_rl.statistics import bootstrap_mean_interval, wilson_interval
from embodied_rl.types import EpisodeSummary, SimSpec
from embodied_rl.versions import machine, versions

if TYPE_CHECKING:
    from embodied_rl.loggers import LoggerGroup

RESULTS_FILE, REPORT_FILE = "results.json", "report.html"


@dataclass(frozen=True)
class Figures:
    """Statistics of the episodes of an evaluation. Success is None where the task has no notion of it."""

    num_episodes: int
    success: float | None
    """Share of episodes with success at any step."""
    success_interval: tuple[float, float] | None
    """Wilson, 95%."""
    success_at_end: float | None
    success_at_end_interval: tuple[float, float] | None
    return_mean: float
    return_std: float
    """Standard deviation between episodes (n - 1); 0 for one episode."""
    return_interval: tuple[float, float]
    """Of the mean: percentile bootstrap, 95%."""
    length_mean: float
    seeds: tuple[int, int]
    """First and last seed."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_episodes": self.num_episodes,
            "success": self.success,
            "success_interval_95": self.success_interval,
            "success_at_end": self.success_at_end,
            "success_at_end_interval_95": self.success_at_end_interval,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "return_mean_interval_95": self.return_interval,
            "length_mean": self.length_mean,
            "held_out_seeds": {"first": self.seeds[0], "last": self.seeds[1], "count": self.num_episodes},
        }


def summarise(episodes: Sequence[EpisodeSummary], reports_success: bool) -> Figures:
    """Statistics of at least one episode. Raises ValueError without any."""
    if not episodes:
        raise ValueError("there is no episode to summarise")
    n = len(episodes)
    returns = np.array([episode.episode_return for episode in episodes], np.float64)
    once, at_end = sum(e.success_once for e in episodes), sum(e.success_at_end for e in episodes)
    seeds = [episode.seed for episode in episodes]
    return Figures(
        num_episodes=n,
        success=once / n if reports_success else None,
        success_interval=wilson_interval(once, n) if reports_success else None,
        success_at_end=at_end / n if reports_success else None,
        success_at_end_interval=wilson_interval(at_end, n) if reports_success else None,
        return_mean=float(returns.mean()),
        return_std=float(returns.std(ddof=1)) if n > 1 else 0.0,
        return_interval=bootstrap_mean_interval(returns),
        length_mean=float(np.mean([episode.length for episode in episodes])),
        seeds=(min(seeds), max(seeds)),
    )


def by_task(episodes: Sequence[EpisodeSummary]) -> dict[str, list[EpisodeSummary]]:
    """{task: its episodes}, in the order of names, where the simulator says which task an episode was of; empty for a single task."""
    tasks: dict[str, list[EpisodeSummary]] = {}
    for episode in episodes:
        if (task := task_of(episode)) is not None:
            tasks.setdefault(task, []).append(episode)
    return dict(sorted(tasks.items())) if len(tasks) > 1 else {}


def task_of(episode: EpisodeSummary) -> str | None:
    """The episode's own task, which multi-task simulators put into their info; None for others."""
    task = episode.final_info.get("task")
    return task if isinstance(task, str) else None


def task_figures(episodes: Sequence[EpisodeSummary], reports_success: bool) -> dict[str, Any]:
    """``{"tasks": {task: its figures}}`` for JSON; empty for a single task."""
    tasks = {task: summarise(own, reports_success).to_dict() for task, own in by_task(episodes).items()}
    return {"tasks": tasks} if tasks else {}


@dataclass(frozen=True)
class RunSummary:
    """A finished run, as the trainer knows it."""

    run_dir: Path
    config: TrainConfig
    spec: SimSpec
    episodes: Sequence[EpisodeSummary]
    """Of the final evaluation on held-out seeds."""
    steps: int
    """Environment steps trained."""
    iterations: int
    train_wall_clock_s: float
    """From the user's command to the end of training, start-up included, pauses between resumed parts left out."""
    wall_clock_s: float
    """The same, final evaluation included."""
    command: str
    checkpoint: Path
    """The final one."""
    loggers: LoggerGroup | None = None
    """Given the video and closed before the closing text is printed."""
    peak_memory_gib: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Further figures for results.json."""


def write_results(summary: RunSummary) -> dict[str, Any]:
    """Write ``<run_dir>/results.json``: figures, seeds, time, command, configuration, versions, machine.

    Returns:
        What was written.

    Raises:
        UserError: the file cannot be written.
    """
    config = summary.config
    results = {
        "task": summary.spec.task,
        "sim": config.sim.name,
        "algorithm": config.algorithm.name,
        "policy": config.policy.name,
        "seed": config.seed,
        **summarise(summary.episodes, summary.spec.reports_success).to_dict(),
        **task_figures(summary.episodes, summary.spec.reports_success),
        "steps": summary.steps,
        "iterations": summary.iterations,
        "wall_clock_s": round(summary.wall_clock_s, 2),
        "train_wall_clock_s": round(summary.train_wall_clock_s, 2),
        "steps_per_s": round(summary.steps / summary.train_wall_clock_s, 1) if summary.train_wall_clock_s > 0 else None,
        "command": summary.command,
        "checkpoint": str(summary.checkpoint),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_sha256": config_hash(config),
        "versions": versions(),
        "machine": machine(),
        **summary.extra,
        "config": config.to_dict(),
        "episodes": episode_rows(summary.episodes),
    }
    write_atomic(summary.run_dir / RESULTS_FILE, json.dumps(results, indent=1, default=_plain) + "\n")
    return results


def episode_rows(episodes: Sequence[EpisodeSummary]) -> list[dict[str, Any]]:
    """One plain object per episode, for JSON."""
    return [
        {
            "seed": e.seed,
            "success_once": e.success_once,
            "success_at_end": e.success_at_end,
            "return": e.episode_return,
            "length": e.length,
            "terminated": e.terminated,
            **({} if (task := task_of(e)) is None else {"task": task}),
        }
        for e in episodes
    ]


def config_hash(config: TrainConfig) -> str:
    """SHA-256 of what determines a run: everything but its folder, where it was resumed from, and what it is logged to."""
    data = {key: value for key, value in config.to_dict().items() if key not in ("run_dir", "resume", "logger", "video")}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=_plain).encode()).hexdigest()


def finish_run(summary: RunSummary, film: Callable[..., list[Path]], *, stream: TextIO | None = None) -> dict[str, Any]:
    """Everything at a run's end: results, video, model card, report, and the closing text on `stream` (standard output).

    Args:
        summary: the run.
        film: `embodied_rl.render.render_videos`. Handed over, for a command line stands above this module.
        stream: where the closing text goes.

    Returns:
        The content of results.json.

    Raises:
        UserError: ``video.enabled=yes`` and this machine cannot render (after everything else was written).
    """
    from embodied_rl.report_page import write_report

    results = write_results(summary)
    add_result_to_card(summary.checkpoint, _card_rows(results))
    videos, reason, failure = _videos(summary, film)
    if summary.loggers is not None:
        for video in videos[:1]:
            summary.loggers.log_video(summary.steps, video)
        # The curves are drawn, and the live display ends, before the report and the closing text.
        summary.loggers.close()
    write_report([summary.run_dir])
    print(closing_text(summary, results, videos, reason), file=stream or sys.stdout, flush=True)
    if failure is not None:
        raise failure
    return results


def closing_text(summary: RunSummary, results: dict[str, Any], videos: Sequence[Path], no_video_reason: str = "") -> str:
    """The result in a sentence, where everything lies, and the command for each next step."""
    from embodied_rl.loggers.console import clock_text

    run_dir = summary.run_dir
    places = [("checkpoint", run_dir / "checkpoints" / "last"), ("curves", run_dir / "curves.png"), *(("video", path) for path in videos)]
    places += [("report", run_dir / REPORT_FILE), ("results", run_dir / RESULTS_FILE)]
    lines = [f"  {name:<11} {path}" for name, path in places if path.exists()]
    if no_video_reason:
        lines.append(f"  {'no video':<11} {no_video_reason}")
    stopped_early = summary.steps < summary.config.total_steps
    changes = {"total_steps": summary.steps + summary.config.total_steps, **({"stop_at_success": "null"} if stopped_early else {})}
    # Where filming was tried, its outcome decides; otherwise what the simulator declares.
    filmable = bool(videos) or (not no_video_reason and _can_be_filmed(summary))
    domain = f" domain={next(iter(summary.config.domains))}" if summary.config.domains else ""
    given = shlex.quote(f"checkpoint={run_dir}")
    commands = [
        ("more held-out episodes", f"python -m embodied_rl.evaluate {given}{domain} num_episodes=500"),
        *([("more videos", f"python -m embodied_rl.render {given}{domain} num_episodes=4")] if filmable else []),
        ("train on", resume_command(summary.command, run_dir, **changes)),
    ]
    if (run_dir / "tensorboard").is_dir():
        commands.append(("look at the curves", f"tensorboard --logdir {shlex.quote(str(run_dir))}"))
    next_steps = [f"  {name:<24} {command}" for name, command in commands]
    took = f"{summary.steps:,} steps, {clock_text(summary.wall_clock_s)} of wall-clock"
    return "\n".join(["", f"{result_text(results)} ({took}).", "", *lines, "", "Next:", *next_steps])


def result_text(results: dict[str, Any]) -> str:
    """``Success on 100 held-out seeds: 97.0% (95% interval 91.5–99.0%)``, or the return where there is no success."""
    n = results["num_episodes"]
    if results["success"] is None:
        low, high = results["return_mean_interval_95"]
        return f"Return on {n} held-out seeds: {results['return_mean']:.4g} (95% interval {low:.4g} to {high:.4g})"
    low, high = results["success_interval_95"]
    return f"Success on {n} held-out seeds: {results['success']:.1%} (95% interval {100 * low:.1f}–{100 * high:.1f}%)"


def _videos(summary: RunSummary, film: Callable[..., list[Path]]) -> tuple[list[Path], str, UserError | None]:
    """(videos, why there is none, the error to raise at the end where a video was insisted on)."""
    config = summary.config.video
    if config.enabled == "no":
        return [], "", None
    from embodied_rl.checkpoint import load_checkpoint
    from embodied_rl.trust import code_names

    try:
        checkpoint = load_checkpoint(summary.checkpoint, with_learner=False, trust=code_names(summary.config.to_dict()))
        folder = summary.run_dir / "videos"
        seed = summary.config.evaluation.seed
        return film(checkpoint, folder, num_episodes=config.num_episodes, fps=config.fps, size=config.size, seed=seed), "", None
    except UserError as error:
        return [], str(error), error if config.enabled == "yes" else None


def _can_be_filmed(summary: RunSummary) -> bool:
    """Whether the task can be drawn, as it ran or made anew for drawing (ManiSkill then takes ``render``)."""
    sim = summary.config.sim
    return summary.spec.can_render or "render" in inspect.signature(load_target(sim.target, sim.extra)).parameters


def _card_rows(results: dict[str, Any]) -> dict[str, str]:
    low, high = results["return_mean_interval_95"]
    rows = {f"held-out return ({results['num_episodes']} seeds)": f"{results['return_mean']:.4g} (95% interval {low:.4g} to {high:.4g})"}
    if results["success"] is not None:
        low, high = results["success_interval_95"]
        text = f"{results['success']:.1%} (95% interval {100 * low:.1f}–{100 * high:.1f}%)"
        rows = {f"held-out success ({results['num_episodes']} seeds)": text, **rows}
    return rows


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
