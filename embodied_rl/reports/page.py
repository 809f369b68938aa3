"""One self-contained page about one run or several, and the end of a run: results.json, video, page and model card."""

from __future__ import annotations

import base64
import hashlib
import inspect
import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from embodied_rl import __version__
from embodied_rl.checkpoint import add_result_to_card, load_checkpoint, resume_command
from embodied_rl.checkpoint.card import python_of
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.errors import UserError
from embodied_rl.evaluation.output import number, number_range, percent, percent_range
from embodied_rl.files import assets_dir, write_atomic
from embodied_rl.progress import clock_text, progress_bar, screen_lines
from embodied_rl.registry import load_target
from embodied_rl.reporting import RESULTS_FILE, RunSummary, shows_progress, write_results
from embodied_rl.reports import sections as run_sections
from embodied_rl.reports.charts import card, text
from embodied_rl.reports.run_data import RunData, load_run
from embodied_rl.reports.sections import MAX_EMBEDDED_BYTES, tiles
from embodied_rl.trust import code_names


@cache
def asset(name: str) -> str:
    """The page's style (page.css) or its script (page.js), for light and dark and the display under the pointer.
    Raises UserError if the installation lacks it."""
    path = assets_dir() / "report_page" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"'{path}' is missing from this installation ({error.strerror}). Install embodied_rl again.") from error


__all__ = ["MAX_EMBEDDED_BYTES", "REPORT_FILE", "write_report"]

REPORT_FILE = "report.html"
MAX_RUNS = 64


def write_report(run_dirs: Sequence[Path | str], output: Path | None = None) -> Path:
    """Write one page about one run, or about several together.

    `output`: path of the page; None: report.html in the run's folder, or for several in the folder that contains them all.

    Returns the page's path.

    Raises UserError: a folder is not a run's, or the page cannot be written.
    """
    if not 1 <= len(run_dirs) <= MAX_RUNS:
        raise UserError(f"A report needs 1 to {MAX_RUNS} runs, got {len(run_dirs)}.")
    runs = [load_run(path) for path in run_dirs]
    target = output or _folder_of(runs) / REPORT_FILE
    page = html_page(_title(runs), _subtitle(runs), _sections(runs, target.parent), badge=_badge(runs), tiles=tiles(runs))
    return write_atomic(target, page)


def html_page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, badge: str = "", tiles: str = "") -> str:
    """A page of titled sections with HTML contents; empty ones are left out. `badge` follows the title, `tiles` precede the sections."""
    sections = [(name, content) for name, content in sections if content]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name, _ in sections)
    body = "".join(f'<section id="{name.lower()}"><h2>{name}</h2>{content}</section>' for name, content in sections)
    page = (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{asset('page.css')}</style></head>\n<body><main>"
        f'<header><div><h1>{text(title)}{badge}</h1><p class="under">{text(subtitle)}</p></div>'
        '<button type="button" class="theme">Dark</button></header>'
        f"<nav>{links}</nav>{tiles}\n{body}\n"
        f"<footer>Written by embodied_rl {__version__}. This page is self-contained.</footer>"
        f"</main>\n<script>{asset('page.js')}</script></body></html>\n"
    )
    # JSON files and file names may hold halves of surrogate pairs, which UTF-8 lacks.
    return page.encode("utf-8", "replace").decode()


def _sections(runs: Sequence[RunData], folder: Path) -> list[tuple[str, str]]:
    one = runs[0] if len(runs) == 1 else None
    curves = run_sections.curve_charts(runs)
    if not curves and one is not None and one.curves_image is not None:
        curves = card(run_sections.image(one.curves_image))
    return [
        ("Runs", run_sections.runs_table(runs)),
        ("Videos", run_sections.video_section(runs, folder)),
        ("Dialogues", run_sections.dialogue_section(runs, folder)),
        ("Curves", curves),
        ("Evaluation", run_sections.evaluation_section(one) if one is not None else ""),
        ("Timeline", run_sections.timeline_section(one) if one is not None else ""),
        ("Failures", run_sections.failure_section(runs)),
        ("Configuration", run_sections.config_section(runs)),
        ("Provenance", run_sections.provenance_section(runs)),
    ]


def _policy() -> str:
    """Content policy: only our own script, no network, no frames, so that text from a run's files stays text."""
    digest = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    parts = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:", "media-src data:")
    return "; ".join((*parts, "base-uri 'none'", "form-action 'none'"))


def _title(runs: Sequence[RunData]) -> str:
    tasks = list(dict.fromkeys(run.task for run in runs))
    name = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    return name if len(runs) == 1 else f"{name}: {len(runs)} runs"


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return ", ".join(run.name for run in runs[:8]) + (" …" if len(runs) > 8 else "")
    run = runs[0]
    algorithm = run.results.get("algorithm") or (run.config.get("algorithm") or {}).get("name")
    policy = run.results.get("policy") or (run.config.get("policy") or {}).get("name")
    seed = None if run.seed is None else f"seed {run.seed}"
    finished = str(run.results.get("finished") or "").replace("T", " ").replace("+00:00", " UTC")
    parts = (algorithm, policy, seed, run.name, finished or None)
    return " · ".join(str(part) for part in parts if part is not None)


def _badge(runs: Sequence[RunData]) -> str:
    unfinished = sum(not run.results for run in runs)
    failed = sum(bool(run.failures) for run in runs)
    faults = sum(len(run.faults) for run in runs)
    badges = [("bad", "stopped at NaN")] if failed else []
    badges += [("warn", f"{unfinished} unfinished" if len(runs) > 1 else "unfinished")] if unfinished and not failed else []
    badges += [("warn", f"{faults} faults" if faults > 1 else "1 fault")] if faults else []
    return "".join(f'<span class="badge {kind}">{label}</span>' for kind, label in badges or [("good", "finished")])


def _folder_of(runs: Sequence[RunData]) -> Path:
    """The run's own folder, or the one that contains all of them."""
    if len(runs) == 1:
        return runs[0].path
    return Path(os.path.commonpath([run.path.resolve() for run in runs]))


def finish_run(summary: RunSummary, film: Callable[..., list[Path]], *, tells: bool = True) -> dict[str, Any]:
    """Do everything at a run's end: results, video, model card, report, and the closing text on standard output.

    Args:
        film: `embodied_rl.commands.render.render_videos`; an argument, because commands are above this module.
        tells: whether to print a closing text.

    Returns the content of results.json.

    Raises UserError: ``video.enabled=yes`` and this machine cannot render (after everything else was written).
    """
    began_s = time.monotonic()
    results = write_results(summary)
    seeds = f"({results['num_episodes']} seeds)"
    add_result_to_card(summary.checkpoint, {f"held-out {name} {seeds}": text for name, text in _figures(results).items()})
    videos, reason, failure = _videos(summary, film)
    if summary.loggers is not None:
        for video in videos[:1]:
            summary.loggers.log_video(summary.steps, video)
        summary.loggers.log_checkpoint(summary.steps, summary.checkpoint)
        # This draws the curves and ends the live display, before the report and the closing text.
        summary.loggers.close()
    # Written before the film too, since filming may take long and fail.
    results = write_results(summary, whole_wall_clock_s=summary.wall_clock_s + time.monotonic() - began_s)
    write_report([summary.run_dir])
    if tells:
        print(closing_text(summary, results, videos, reason), flush=True)
    if failure is not None:
        raise failure
    return results


def closing_text(summary: RunSummary, results: dict[str, Any], videos: Sequence[Path], no_video_reason: str = "") -> str:
    """Result in a sentence, the paths of all files, and the command for each next step."""
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
        changes["max_minutes"] = "null"  # the present limits are those of the whole run
    # If filming was tried, its outcome decides; otherwise the simulator's declaration.
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
    parts = [f"{result_text(results)}.", *_cloning_text(results), f"{summary.steps:,} steps. {_time_text(results, filmed=bool(videos))}"]
    return "\n".join(["", *(line for text in parts for line in screen_lines(text)), "", *lines, "", "Next:", *next_steps])


def _time_text(results: dict[str, Any], *, filmed: bool) -> str:
    """Duration of everything, on the clock that starts with the user's command."""
    last = "films and report done" if filmed else "report done"
    parts = [("trained", "train_wall_clock_s"), ("evaluated", "wall_clock_s"), (last, "whole_wall_clock_s")]
    return f"Wall-clock since the command: {', '.join(f'{what} after {clock_text(results[key])}' for what, key in parts if results[key])}."


def _cloning_text(results: dict[str, Any]) -> list[str]:
    """A warm start's success in a line per domain; empty without a warm start, or if a task does not define success."""
    warm_start, lines = results.get("warm_start") or {}, []
    for name in ("", *(results.get("tasks") or ())):
        own = warm_start if not name else warm_start.get(name) or {key.removeprefix(f"{name}/"): value for key, value in warm_start.items()}
        rates = [own.get(f"success_{when}", (own.get(when) or {}).get("success")) for when in ("before", "after")]
        if None not in rates:
            lines.append(f"Cloning the expert{f' of {name}' if name else ''}: success {rates[0]:.1%} before, {rates[1]:.1%} after.")
    return lines


def result_text(results: dict[str, Any]) -> str:
    """``Final evaluation, success on 100 held-out seeds: 97.0% (95% interval 91.5–99.0%)``, or the return without success."""
    figures = _figures(results)
    name = "success" if "success" in figures else "return"
    return f"Final evaluation, {name} on {results['num_episodes']} held-out seeds: {figures[name]}"


def _videos(summary: RunSummary, film: Callable[..., list[Path]]) -> tuple[list[Path], str, UserError | None]:
    """(videos, reason if there are none, error to raise at the end if a video was required)."""
    config = summary.config.video
    if config.enabled == "no":
        return [], "", None
    if config.enabled == "auto" and not summary.time_for_films:
        return [], f"max_minutes={summary.config.max_minutes:g} was over", None
    try:
        checkpoint = load_checkpoint(summary.checkpoint, with_learner=False, trust=code_names(summary.config.to_dict()))
    except UserError as error:
        return [], str(error), error if config.enabled == "yes" else None
    videos: list[Path] = []
    failures: dict[str, UserError] = {}
    filmed = {"num_episodes": config.num_episodes, "fps": config.fps, "size": config.size, "seed": summary.config.evaluation.seed}
    with progress_bar("filming", shown=shows_progress(summary.config)):
        for domain in summary.config.domains or (None,):
            try:
                videos += film(domain_part(checkpoint, domain), summary.run_dir / "videos" / (domain or ""), **filmed)
            except UserError as error:
                failures[f"{domain}: {error}" if domain else str(error)] = error
    failure = next(iter(failures.values()), None) if config.enabled == "yes" else None
    return videos, "; ".join(failures), failure


def _can_be_filmed(summary: RunSummary) -> bool:
    """Whether the task can be drawn, as it ran or rebuilt for drawing (ManiSkill then uses ``render``)."""
    sim = summary.config.sim
    return summary.spec.can_render or "render" in inspect.signature(load_target(sim.target, sim.extra)).parameters


def _figures(results: dict[str, Any]) -> dict[str, str]:
    """Success, if defined, and return, each with its interval."""
    shown = {"success": f"{percent(results['success'])} (95% interval {percent_range(results['success_interval_95'])})"}
    total = f"{number(results['return_mean'])} (95% interval {number_range(results['return_mean_interval_95'])})"
    return {**(shown if results["success"] is not None else {}), "return": total}
