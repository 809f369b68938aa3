"""Statistics of played episodes, and a run's results.json."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.files import RememberedAnswers, write_atomic
from embodied_rl.progress import clock_text, number_text
from embodied_rl.specs import show_action
from embodied_rl.statistics import bootstrap_mean_interval, wilson_interval
from embodied_rl.types import EpisodeSummary, SimSpec
from embodied_rl.versions import provenance

if TYPE_CHECKING:
    from embodied_rl.loggers import LoggerGroup

RESULTS_FILE = "results.json"
_STARTS = "starts"


@dataclass(frozen=True)
class Figures:
    """Statistics of an evaluation's episodes. Success is None if the task does not report it."""

    num_episodes: int
    success: float | None
    """Share of episodes with success at any step."""
    success_interval: tuple[float, float] | None
    """Wilson interval, 95%."""
    success_at_end: float | None
    success_at_end_interval: tuple[float, float] | None
    return_mean: float
    return_std: float
    """Standard deviation between episodes (n - 1); 0 for one episode."""
    return_interval: tuple[float, float]
    """Interval of the mean: percentile bootstrap, 95%."""
    length_mean: float
    seeds: tuple[int, int]
    """First and last seed."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the names of intervals say their confidence."""
        names = {"return_interval": "return_mean_interval"}
        own = {names.get(name, name): value for name, value in vars(self).items() if name != "seeds"}
        own = {f"{name}_95" if name.endswith("_interval") else name: value for name, value in own.items()}
        return {**own, "held_out_seeds": {"first": self.seeds[0], "last": self.seeds[1], "count": self.num_episodes}}


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
    """{task: its episodes}, sorted by name, if the simulator names each episode's task; empty for a single task."""
    tasks: dict[str, list[EpisodeSummary]] = {}
    for episode in episodes:
        if (task := task_of(episode)) is not None:
            tasks.setdefault(task, []).append(episode)
    return dict(sorted(tasks.items())) if len(tasks) > 1 else {}


def task_of(episode: EpisodeSummary) -> str | None:
    """The episode's own task, which multi-task simulators write into their info; None for others."""
    task = episode.final_info.get("task")
    return task if isinstance(task, str) else None


def task_figures(episodes: Sequence[EpisodeSummary], reports_success: bool) -> dict[str, Any]:
    """``{"tasks": {task: its figures}}`` for JSON; empty for a single task."""
    tasks = {task: summarise(own, reports_success).to_dict() for task, own in by_task(episodes).items()}
    return {"tasks": tasks} if tasks else {}


def warm_start_figures(
    figures: Mapping[str, Mapping[str, Any]], before: Sequence[EpisodeSummary], after: Sequence[EpisodeSummary], reports_success: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """(for results.json, for the log) results of warm starts, from each domain's figures and the held-out episodes before and after.

    A run's only domain has no name; several domains' figures are below their names.
    """
    cloned: dict[str, Any] = {}
    logged: dict[str, float] = {}
    for domain, own in figures.items():
        place = f"warm_start/{domain}/" if domain else "warm_start/"
        cloned[domain] = dict(own)
        for name, played in (("before", before), ("after", after)):
            episodes = [episode for episode in played if not domain or episode.final_info["task"] == domain]
            cloned[domain][name] = {**summarise(episodes, reports_success).to_dict(), **task_figures(episodes, reports_success)}
            logged[f"{place}success_{name}"] = float(np.mean([episode.success_once for episode in episodes]))
        logged |= {f"{place}{key}": float(own[key]) for key in ("loss", "episodes", "steps")}
    return cloned.get("", cloned), logged


@dataclass(frozen=True)
class RunSummary:
    """A finished run, from the trainer."""

    run_dir: Path
    config: TrainConfig
    spec: SimSpec
    episodes: Sequence[EpisodeSummary]
    """Episodes of the final evaluation on held-out seeds."""
    steps: int
    """Environment steps trained."""
    iterations: int
    train_wall_clock_s: float
    """Seconds from the user's command to the end of training, with start-up, without pauses before a resume."""
    wall_clock_s: float
    """The same, including the final evaluation."""
    command: str
    checkpoint: Path
    """Folder of the final checkpoint."""
    loggers: LoggerGroup | None = None
    """Loggers that get the video, and are closed before the closing text is printed."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further figures for results.json."""
    time_for_films: bool = True
    """Whether max_minutes leaves time for films."""


def shows_progress(config: TrainConfig) -> bool:
    """Whether a run shows its progress: the console is among its loggers."""
    return "console" in config.logger.names


def plan_text(config: TrainConfig, run_dir: Path) -> tuple[str, str]:
    """Lines printed before anything is started: what a run will do, and its folder."""
    task = f"domains {', '.join(config.domains)}" if config.domains else f"{config.sim.name} ({config.sim.task or config.sim.target})"
    ends = [f"at most {config.total_steps:,} steps"]
    ends += [f"until success {config.stop_at_success:.0%}"] if config.stop_at_success is not None else []
    ends += [f"until return {config.stop_at_return:g}"] if config.stop_at_return is not None else []
    ends += [f"at most {config.max_minutes:g} minutes"] if config.max_minutes is not None else []
    first = f"Training {config.policy.name} with {config.algorithm.name} in {task}, seed {config.seed}: {', '.join(ends)}."
    return first, f"Run folder: {run_dir}"


def too_short(config: TrainConfig) -> list[str]:
    """A sentence if `max_minutes` would end before a new run can train and be evaluated, judged by the last run with the same simulator,
    policy and warm start on this machine; else none."""
    known = RememberedAnswers(_STARTS).read(*_start_question(config)) or {}
    start_s, episode_s = known.get("start_s"), known.get("episode_s")
    if config.max_minutes is None or not isinstance(start_s, float) or not isinstance(episode_s, float):
        return []
    limit_s, final_s, number = 60 * config.max_minutes, episode_s * config.evaluation.num_episodes, config.evaluation.num_episodes
    if start_s + final_s < limit_s:
        return []
    what = "nothing will be trained, unless this run is faster" if limit_s <= start_s else "little will be trained"
    before = f"the last such run needed {clock_text(start_s)} to start and {clock_text(final_s)} to evaluate {number} episodes"
    enough = math.ceil((1.5 * start_s + final_s) / 6) / 10
    return [f"max_minutes={config.max_minutes:g} is short: {before}; {what}. Set max_minutes={enough:g} or more."]


def remember_start(config: TrainConfig, start_s: float, episode_s: float) -> None:
    """Remember, for such a run's next plan, the time before its first iteration and the time per episode of its final evaluation."""
    RememberedAnswers(_STARTS).write(*_start_question(config), {"start_s": round(start_s, 1), "episode_s": round(episode_s, 4)})


def _start_question(config: TrainConfig) -> tuple[str, object]:
    sim = [(each.target, each.task) for each in (config.sim, *(domain.sim for domain in config.domains.values()))]
    return config.sim.name, [sim, config.policy.name, repr(config.algorithm.warm_start), platform.node()]


def require_time(config: TrainConfig, elapsed_s: float, moment: str) -> None:
    """Raise UserError if `max_minutes` has passed before anything was trained; `moment`: when the run noticed."""
    if config.max_minutes is not None and elapsed_s >= 60 * config.max_minutes:
        over = f"max_minutes={config.max_minutes:g} was over {moment}, at {clock_text(elapsed_s)}"
        raise UserError(f"Nothing was trained: {over}. Set a larger max_minutes.")


def parts_text(config: TrainConfig, spec: SimSpec, *, num_parameters: int, device: str, num_slots: int, num_workers: int) -> str:
    """One line about a run's parts, once they are built."""
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    policy = f"policy {config.policy.name} with {num_parameters:,} parameters on {device}"
    text = f"{spec.task}: {policy}; action {show_action(spec.action)}; {num_slots} slots over {workers}."
    if config.stop_at_success is not None and not spec.reports_success:
        text += " The task reports no success: stop_at_success has no effect."
    if spec.action.kind != "text" and spec.max_episode_steps is None and config.sim.max_episode_steps is None:
        text += " It has no step limit: an episode lasts until the simulator ends it, or set sim.max_episode_steps."
    return text


def sweep_table(folders: Sequence[Path]) -> str:
    """Table of runs, one per row: folder, result, and differences; the best first."""
    rows = []
    for folder in folders:
        try:
            results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:  # the run was interrupted
            rows.append((-math.inf, (str(folder), "not evaluated", "", "")))
            continue
        success, score = results["success"], results["return_mean"]
        shown = number_text(score) if success is None else f"{success:.1%}"
        rows.append(
            (score if success is None else success, (str(folder), shown, f"{results['steps']:,}", clock_text(results["wall_clock_s"])))
        )
    rows.sort(key=lambda row: -row[0])
    table = [("run", "held-out success, or return", "steps", "wall-clock"), *(row for _, row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def write_results(summary: RunSummary, *, whole_wall_clock_s: float | None = None) -> dict[str, Any]:
    """Write ``<run_dir>/results.json``: figures, seeds, time, command, configuration, versions, machine. `whole_wall_clock_s`: from the
    user's command to the end of filming; None: not known yet. Returns what was written. Raises UserError: the file cannot be written."""
    config = summary.config
    results = {
        "task": summary.spec.task,
        "sim": config.sim_names,
        "algorithm": config.algorithm.name,
        "policy": config.policy.name,
        "seed": config.seed,
        **summarise(summary.episodes, summary.spec.reports_success).to_dict(),
        **task_figures(summary.episodes, summary.spec.reports_success),
        "steps": summary.steps,
        "iterations": summary.iterations,
        "wall_clock_s": round(summary.wall_clock_s, 2),
        "train_wall_clock_s": round(summary.train_wall_clock_s, 2),
        "whole_wall_clock_s": None if whole_wall_clock_s is None else round(whole_wall_clock_s, 2),
        "steps_per_s": round(summary.steps / summary.train_wall_clock_s, 1) if summary.train_wall_clock_s > 0 else None,
        "checkpoint": str(summary.checkpoint),
        "config_sha256": config_hash(config),
        **provenance(summary.command),
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
    """SHA-256 of what determines a run: everything except its folder, the checkpoint it resumes from, its loggers and its videos."""
    data = {key: value for key, value in config.to_dict().items() if key not in ("run_dir", "resume", "logger", "video")}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)
