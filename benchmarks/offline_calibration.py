"""Are offline estimates right? Several checkpoints, two tasks: estimates from recordings of one policy against true returns.

For each task one short training run leaves checkpoints of increasing quality. One of them, exploring, plays the recordings; the others
are the target policies. What each is really worth is measured by playing thousands of episodes with it.
`embodied_rl.evaluation.offline_study` estimates it from each recording alone. Printed: how well the estimates order the policies
(Spearman's rank correlation, averaged over recordings), how often the intervals hold the true value, bias and error.

Use: python benchmarks/offline_calibration.py runs/offline_calibration --plot
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import markdown_table, provenance, text_table

from embodied_rl.checkpoint import Checkpoint, load_checkpoint
from embodied_rl.episodes.assessment import Assumptions
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.evaluation.offline_study import ALL_ESTIMATORS, OfflineSettings, study_recording
from embodied_rl.files import write_atomic

WEIGHTED = ("is", "wis", "pdis", "wpdis")
"""Estimators that cost no regression."""
OPEN_LOOP = "open loop: log-likelihood"
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Task:
    """A simulator, the training run, and which of its checkpoints play which part."""

    name: str
    env_id: str
    limit: int
    """Steps of an episode."""
    reward_range: tuple[float, float]
    training: tuple[str, ...]
    total_steps: int
    every: int
    behaviour: int
    """Environment steps at which the policy that plays the recordings was saved (or the next checkpoint after), and …"""
    targets: tuple[int, ...]
    """… the policies that are judged."""


CARTPOLE = Task(
    "CartPole-v1, 100 steps", "CartPole-v1", 100, (0.0, 1.0), ("experiment=cartpole",), 24_000, 2_000,
    8_000, (2_000, 4_000, 6_000, 10_000, 12_000, 16_000),
)  # fmt: skip
PENDULUM = Task(
    "Pendulum-v1, 50 steps", "Pendulum-v1", 50, (-(math.pi**2 + 0.1 * 64 + 0.001 * 4), 0.0),
    ("experiment=cartpole", "sim=pendulum", "sim.max_episode_steps=50", "policy.normalize_observation=true", "algorithm.gamma=0.9",
     "algorithm.learning_rate=1e-3", "algorithm.rollout_steps=128"), 80_000, 4_000,
    36_000, (16_000, 28_000, 40_000, 52_000, 64_000, 76_000),
)  # fmt: skip
REACHER = Task(
    "Reacher-v5, 50 steps", "Reacher-v5", 50, (-0.7, 0.0),
    ("experiment=cartpole", "sim=pendulum", "sim.task=Reacher-v5", "sim.max_episode_steps=50", "policy.normalize_observation=true",
     "algorithm.gamma=0.95", "algorithm.learning_rate=1e-3", "algorithm.rollout_steps=128"), 120_000, 8_000,
    40_000, (24_000, 72_000, 104_000),
)  # fmt: skip
"""A robot's arm of two joints in MuJoCo that reaches for a target."""
TASKS = {"cartpole": CARTPOLE, "pendulum": PENDULUM, "reacher": REACHER}


@dataclass(frozen=True)
class Row:
    """One estimate of one policy from one recording, beside the truth."""

    task: str
    recording: int
    policy: int
    """Its environment steps."""
    estimator: str
    truth: float
    value: float | None
    """None: refused."""
    bootstrap: tuple[float, float] | None
    concentration: tuple[float, float] | None


# ---- playing ----------------------------------------------------------------------------------------------------------


class MemoryRecording:
    """Episodes in memory, as `study_recording` reads them."""

    def __init__(self, info: RecordingInfo, episodes: Sequence[RecordedEpisode]) -> None:
        self.info, self._episodes = info, episodes

    @property
    def tasks(self) -> np.ndarray:
        return np.array([self.info.spec.task] * len(self._episodes), object)

    def __len__(self) -> int:
        return len(self._episodes)

    def episode(self, number: int) -> RecordedEpisode:
        return self._episodes[number]


def play(checkpoint: Checkpoint, task: Task, num_episodes: int, first_seed: int, *, keep: bool) -> tuple[np.ndarray, list[RecordedEpisode]]:
    """Play episodes in plain gymnasium, all at once, with the exploring policy.

    Returns:
        ([num_episodes] returns, the episodes where `keep`).
    """
    import gymnasium

    from embodied_rl.commands.evaluate import make_generator

    generator, action = make_generator(checkpoint, checkpoint.spec), checkpoint.spec.action
    envs = [gymnasium.make(task.env_id, max_episode_steps=task.limit) for _ in range(num_episodes)]
    observation = np.stack([env.reset(seed=first_seed + index)[0] for index, env in enumerate(envs)]).astype(np.float32)
    random = np.random.default_rng(first_seed)
    returns, alive = np.zeros(num_episodes), np.arange(num_episodes)
    steps: list[list[tuple[Any, ...]]] = [[] for _ in envs]
    while alive.size:
        shape = (alive.size, action.dim)
        noise = random.random(shape, np.float32) if action.kind == "discrete" else random.standard_normal(shape, np.float32)
        generator.send(alive, {"state": observation[alive]}, noise)
        acted = generator.recv()
        taken, going = action.denormalise(acted.action), []
        for row, index in enumerate(alive):
            before = observation[index].copy()
            choice = int(taken[row, 0]) if action.kind == "discrete" else taken[row]
            after, reward, terminated, truncated, _ = envs[index].step(choice)
            observation[index] = after
            returns[index] += float(reward)
            if keep:
                last = (taken[row], acted.action[row], acted.log_prob[row], float(reward), terminated, truncated)
                steps[index].append((before, *last, observation[index].copy()))
            if not (terminated or truncated):
                going.append(index)
        alive = np.array(going, int)
    for env in envs:
        env.close()
    return returns, [_episode(first_seed + index, rows) for index, rows in enumerate(steps)] if keep else []


def _episode(seed: int, rows: Sequence[tuple[Any, ...]]) -> RecordedEpisode:
    before, taken, drawn, log_prob, reward, terminated, truncated, after = (list(column) for column in zip(*rows, strict=True))
    return RecordedEpisode(
        seed=seed,
        observation={"state": np.stack([*before, after[-1]])},
        action=np.stack(taken),
        reward=np.array(reward, np.float32),
        terminated=np.array(terminated, bool),
        truncated=np.array(truncated, bool),
        success=np.zeros(len(rows), bool),
        sampled_action=np.stack(drawn),
        log_prob=np.stack(log_prob),
    )


def checkpoints_of(task: Task, folder: Path) -> dict[int, Checkpoint]:
    """{wanted steps: the first checkpoint at or after it} of the task's run, which is trained where it is missing."""
    if not (folder / "results.json").is_file():
        arguments = [
            *task.training, f"run_dir={folder}", f"total_steps={task.total_steps}", f"checkpoint.every_steps={task.every}",
            "checkpoint.keep_last=1000", "video.enabled=no", "logger=quiet", "evaluation.num_episodes=20", "seed=1",
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "embodied_rl.train", *arguments], check=True, stdout=subprocess.DEVNULL)
    saved = {int(path.name.removeprefix("step_")): path for path in sorted((folder / "checkpoints").glob("step_*"))}
    wanted = (task.behaviour, *task.targets)
    return {step: load_checkpoint(saved[min(s for s in saved if s >= step)], with_learner=False) for step in wanted}


# ---- the study --------------------------------------------------------------------------------------------------------


def study(task: Task, folder: Path, *, num_episodes: int, num_recordings: int, num_fitted: int, num_true: int) -> list[Row]:
    """All estimates of a task's policies from all recordings; the first `num_fitted` recordings with the regression."""
    checkpoints = checkpoints_of(task, folder)
    truth = {step: float(play(checkpoints[step], task, num_true, 10_000_000, keep=False)[0].mean()) for step in task.targets}
    print(f"{task.name}: true returns {', '.join(f'{step}: {value:.1f}' for step, value in truth.items())}", flush=True)
    behaviour = checkpoints[task.behaviour]
    info = RecordingInfo(behaviour.spec, {"max_episode_steps": task.limit}, {"kind": "checkpoint", "sample": True})
    targets = [(str(step), checkpoints[step]) for step in task.targets]
    rows = []
    for index in range(num_recordings):
        _, episodes = play(behaviour, task, num_episodes, 1_000_000 * (index + 1), keep=True)
        given = Assumptions(gamma=1.0, reward_range=task.reward_range, seed=index)
        names = ALL_ESTIMATORS if index < num_fitted else WEIGHTED
        found = study_recording(MemoryRecording(info, episodes), targets, OfflineSettings(given=given, estimators=names))
        for policy in found.policies:
            step = int(policy.label)
            for estimate in policy.estimates:
                ends = [None if part is None else (part.low, part.high) for part in (estimate.bootstrap, estimate.concentration)]
                rows.append(Row(task.name, index, step, estimate.estimator, truth[step], estimate.value, *ends))
            rows.append(Row(task.name, index, step, OPEN_LOOP, truth[step], policy.open_loop.log_likelihood.mean, None, None))
        print(f"{task.name}: recording {index + 1} of {num_recordings}", flush=True)
    return rows


# ---- what comes of it -------------------------------------------------------------------------------------------------


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation (Spearman 1904): Pearson's of the ranks, ties sharing their mean rank; NaN where either never changes."""
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (first, second)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])


def summary(rows: Sequence[Row], task: str, estimator: str) -> dict[str, Any]:
    """Figures of one estimator in one task."""
    own = [row for row in rows if (row.task, row.estimator) == (task, estimator)]
    given = [row for row in own if row.value is not None]
    by_recording = {row.recording: [other for other in given if other.recording == row.recording] for row in given}
    ranks = [
        spearman([r.value for r in group if r.value is not None], [r.truth for r in group])
        for group in by_recording.values()
        if len(group) >= 3
    ]
    errors = np.array([row.value - row.truth for row in given if row.value is not None])
    held = {
        name: [interval[0] <= row.truth <= interval[1] for row in own if (interval := getattr(row, name)) is not None]
        for name in ("bootstrap", "concentration")
    }
    widths = [row.bootstrap[1] - row.bootstrap[0] for row in given if row.bootstrap is not None]
    return {
        "asked": len(own),
        "given": len(given),
        "spearman": float(np.nanmean(ranks)) if ranks and not np.isnan(ranks).all() else None,
        "bias": float(errors.mean()) if given else None,
        "rmse": float(np.sqrt((errors**2).mean())) if given else None,
        "coverage": float(np.mean(held["bootstrap"])) if held["bootstrap"] else None,
        "width": float(np.mean(widths)) if widths else None,
        "concentration_coverage": float(np.mean(held["concentration"])) if held["concentration"] else None,
    }


HEADER = ("estimator", "given", "rank correlation", "bias", "RMSE", "95% bootstrap holds", "its width", "concentration holds")


def table_rows(rows: Sequence[Row], task: str) -> list[tuple[str, ...]]:
    """A row of text per estimator."""
    lines = []
    for name in (*ALL_ESTIMATORS, OPEN_LOOP):
        figures = summary(rows, task, name)
        if figures["asked"]:
            loop = name == OPEN_LOOP
            cells = [_text(figures["spearman"], ".2f"), *("" if loop else _text(figures[key], ".3g") for key in ("bias", "rmse"))]
            cells += [_text(figures["coverage"], ".0%"), _text(figures["width"], ".3g"), _text(figures["concentration_coverage"], ".0%")]
            lines.append((name, f"{figures['given']} of {figures['asked']}", *cells))
    return lines


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Estimates against true returns, a panel per task and estimator."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks, names = sorted({row.task for row in rows}), [name for name in ALL_ESTIMATORS if any(row.estimator == name for row in rows)]
    figure = Figure(figsize=(2.3 * len(names), 2.7 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    for line, task in enumerate(tasks):
        truths = [row.truth for row in rows if row.task == task]
        room = 0.25 * (max(truths) - min(truths))
        limits = (min(truths) - room, max(truths) + room)
        for column, name in enumerate(names):
            axes = figure.add_subplot(len(tasks), len(names), line * len(names) + column + 1)
            axes.plot(limits, limits, color="#8c959f", lw=1)
            for row in rows:
                if (row.task, row.estimator) == (task, name) and row.value is not None and row.bootstrap is not None:
                    error = np.abs(np.array([[row.value - row.bootstrap[0]], [row.bootstrap[1] - row.value]]))
                    axes.errorbar([row.truth], [row.value], yerr=error, fmt="o", color="#0969da", alpha=0.35, markersize=3, lw=1)
            axes.set(xlim=limits, ylim=limits)
            axes.tick_params(labelsize=7)
            axes.set_title(name if line == 0 else "", fontsize=9)
            if column == 0:
                axes.set_ylabel(f"{task}\nestimate", fontsize=8)
            axes.set_xlabel("true return" if line == len(tasks) - 1 else "", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and results lie; tasks that are there are not computed again")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=["cartpole", "pendulum"])
    parser.add_argument("--episodes", type=int, default=200, help="of one recording")
    parser.add_argument("--recordings", type=int, default=10)
    parser.add_argument("--fitted", type=int, default=3, help="recordings that values are fitted to as well, which takes most of the time")
    parser.add_argument("--true-episodes", type=int, default=4000, help="that measure what a policy is worth")
    parser.add_argument("--plot", action="store_true", help="write offline_calibration.png into the folder")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in chosen.tasks:
        file = chosen.folder / name / f"calibration-{RESULTS_FILE}"
        if file.is_file():
            rows += [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
            continue
        sizes = {"num_episodes": chosen.episodes, "num_recordings": chosen.recordings}
        found = study(TASKS[name], chosen.folder / name, **sizes, num_fitted=chosen.fitted, num_true=chosen.true_episodes)
        write_atomic(file, json.dumps([asdict(row) for row in found]) + "\n")
        rows += found
    print(provenance())
    for task in sorted({row.task for row in rows}):
        print(f"\n{task}\n{text_table(HEADER, table_rows(rows, task))}\n\n{markdown_table(HEADER, table_rows(rows, task))}")
    if chosen.plot:
        draw(rows, chosen.folder / "offline_calibration.png")
    print(figure_line(rows))


def figure_line(rows: Sequence[Row]) -> str:
    """The last line: each estimator's rank correlation and coverage, task by task."""
    tasks, told = sorted({row.task for row in rows}), []
    for name in ALL_ESTIMATORS:
        each = [summary(rows, task, name) for task in tasks]
        if any(part["asked"] for part in each):
            correlations = "/".join(_text(part["spearman"], ".2f") or "-" for part in each)
            coverages = "/".join(_text(part["coverage"], ".0%") or "-" for part in each)
            told.append(f"{name} {correlations} ({coverages})")
    return f"figure: rank correlation (coverage of the 95% bootstrap), {' / '.join(tasks)}: {'; '.join(told)}"


if __name__ == "__main__":
    main()
