"""A run's end: results.json, the video, report.html, the model card, and where all of it lies."""

from __future__ import annotations

import inspect
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embodied_rl.checkpoint import add_result_to_card, load_checkpoint, resume_command
from embodied_rl.checkpoint.card import python_of
from embodied_rl.errors import UserError
from embodied_rl.progress import clock_text, progress_bar
from embodied_rl.registry import load_target
from embodied_rl.reporting import RESULTS_FILE, RunSummary, shows_progress, write_results
from embodied_rl.reports.page import REPORT_FILE, write_report
from embodied_rl.trust import code_names


def finish_run(summary: RunSummary, film: Callable[..., list[Path]], *, tells: bool = True) -> dict[str, Any]:
    """Everything at a run's end: results, video, model card, report, and the closing text on standard output.

    Args:
        summary: the run.
        film: `embodied_rl.commands.render.render_videos`. Handed over, for commands stand above this module.
        tells: whether there is a closing text.

    Returns:
        The content of results.json.

    Raises:
        UserError: ``video.enabled=yes`` and this machine cannot render (after everything else was written).
    """
    began_s = time.monotonic()
    results = write_results(summary)
    add_result_to_card(summary.checkpoint, _card_rows(results))
    videos, reason, failure = _videos(summary, film)
    if summary.loggers is not None:
        for video in videos[:1]:
            summary.loggers.log_video(summary.steps, video)
        summary.loggers.log_checkpoint(summary.steps, summary.checkpoint)
        # The curves are drawn, and the live display ends, before the report and the closing text.
        summary.loggers.close()
    # Written before as well: filming may take long, and fail.
    results = write_results(summary, whole_wall_clock_s=summary.wall_clock_s + time.monotonic() - began_s)
    write_report([summary.run_dir])
    if tells:
        print(closing_text(summary, results, videos, reason), flush=True)
    if failure is not None:
        raise failure
    return results


def closing_text(summary: RunSummary, results: dict[str, Any], videos: Sequence[Path], no_video_reason: str = "") -> str:
    """The result in a sentence, where everything lies, and the command for each next step."""
    run_dir = summary.run_dir
    films = [("dialogues" if path.suffix == ".html" else "video", path) for path in videos]
    places = [("checkpoint", run_dir / "checkpoints" / "last"), ("curves", run_dir / "curves.png"), *films]
    places += [("dialogues", path) for path in sorted(run_dir.glob("dialogues*.html"))]
    places += [("report", run_dir / REPORT_FILE), ("results", run_dir / RESULTS_FILE)]
    lines = [f"  {name:<11} {path}" for name, path in places if path.exists()]
    if no_video_reason:
        lines.append(f"  {'no video':<11} {no_video_reason}")
    stopped_early = summary.steps < summary.config.total_steps
    changes = {"total_steps": summary.steps + summary.config.total_steps, **({"stop_at_success": "null"} if stopped_early else {})}
    if summary.config.max_minutes is not None:
        changes["max_minutes"] = "null"  # they are those of the whole run
    # Where filming was tried, its outcome decides; otherwise what the simulator declares.
    filmable = bool(videos) or (not no_video_reason and _can_be_filmed(summary))
    domain = f" domain={next(iter(summary.config.domains))}" if summary.config.domains else ""
    given, python = shlex.quote(f"checkpoint={run_dir}"), python_of(summary.command)
    commands = [
        ("more held-out episodes", f"{python} -m embodied_rl.evaluate {given}{domain} num_episodes=500"),
        *([("more videos", f"{python} -m embodied_rl.render {given}{domain} num_episodes=4")] if filmable else []),
        ("train on", resume_command(summary.command, run_dir, **changes)),
    ]
    if (run_dir / "tensorboard").is_dir():
        commands.append(("look at the curves", f"tensorboard --logdir {shlex.quote(str(run_dir))}"))
    next_steps = [f"  {name:<24} {command}" for name, command in commands]
    told = [f"{result_text(results)}.", *_cloning_text(results), f"{summary.steps:,} steps. {_time_text(results)}"]
    return "\n".join(["", *told, "", *lines, "", "Next:", *next_steps])


def _time_text(results: dict[str, Any]) -> str:
    """How long everything took, on the clock that begins with the user's command."""
    parts = [("trained", "train_wall_clock_s"), ("evaluated", "wall_clock_s"), ("filmed and reported", "whole_wall_clock_s")]
    return f"Wall-clock since the command: {', '.join(f'{what} after {clock_text(results[key])}' for what, key in parts if results[key])}."


def _cloning_text(results: dict[str, Any]) -> list[str]:
    """A warm start's success in a line; empty without one, or where the task has no success."""
    told = results.get("warm_start") or {}
    rates = [told.get(f"success_{when}", (told.get(when) or {}).get("success")) for when in ("before", "after")]
    return [] if None in rates else [f"Cloning the expert: success {rates[0]:.1%} before, {rates[1]:.1%} after."]


def result_text(results: dict[str, Any]) -> str:
    """``Final evaluation, success on 100 held-out seeds: 97.0% (95% interval 91.5–99.0%)``, or the return where there is no success."""
    n = results["num_episodes"]
    if results["success"] is None:
        low, high = results["return_mean_interval_95"]
        return f"Final evaluation, return on {n} held-out seeds: {results['return_mean']:.4g} (95% interval {low:.4g} to {high:.4g})"
    low, high = results["success_interval_95"]
    return f"Final evaluation, success on {n} held-out seeds: {results['success']:.1%} (95% interval {100 * low:.1f}–{100 * high:.1f}%)"


def _videos(summary: RunSummary, film: Callable[..., list[Path]]) -> tuple[list[Path], str, UserError | None]:
    """(videos, why there is none, the error to raise at the end where a video was insisted on)."""
    config = summary.config.video
    if config.enabled == "no":
        return [], "", None
    if config.enabled == "auto" and not summary.time_for_films:
        return [], f"max_minutes={summary.config.max_minutes:g} was over", None
    try:
        checkpoint = load_checkpoint(summary.checkpoint, with_learner=False, trust=code_names(summary.config.to_dict()))
        folder = summary.run_dir / "videos"
        seed = summary.config.evaluation.seed
        with progress_bar("filming", shown=shows_progress(summary.config)):
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
