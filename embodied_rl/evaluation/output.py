"""Play held-out episodes with any policy, compute the figures, compare policies seed by seed, and write tables, JSON and CSV."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.checkpoint import Checkpoint
from embodied_rl.errors import UserError
from embodied_rl.progress import Advance, figure_table, number_text, progress_bar
from embodied_rl.reporting import Figures, by_task, config_hash, episode_rows, summarise, task_figures, task_of
from embodied_rl.statistics import bootstrap_mean_interval, holm, mcnemar_p_value, paired_rate_interval, sign_flip_p_value
from embodied_rl.types import EpisodeSummary, SimSpec
from embodied_rl.versions import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from embodied_rl.config import SimConfig, TrainConfig
    from embodied_rl.generation.base import Generator
    from embodied_rl.sim.simulators import Simulators


@dataclass(frozen=True)
class RateComparison:
    """Success of two policies in pairs of episodes with the same seed."""

    both: int
    only_policy: int
    """Seeds at which only this policy succeeded."""
    only_against: int
    neither: int
    difference: float
    """Success rate of the policy minus that of the other one."""
    interval: tuple[float, float]
    """95% interval of the difference: Newcombe's for paired rates."""
    p_value: float
    """p-value for equal rates: McNemar, exact, two-sided."""


@dataclass(frozen=True)
class Comparison:
    """A policy compared with another one, seed by seed."""

    num_pairs: int
    num_unpaired: int
    """Seeds that only one of them finished, because the other's simulator failed; the comparison leaves them out."""
    success: RateComparison | None
    """Success at any step; None if the task does not define success."""
    success_at_end: RateComparison | None
    return_difference: float
    """Mean return of the policy minus that of the other one."""
    return_interval: tuple[float, float]
    """95% interval of that difference: percentile bootstrap over seeds."""
    return_p_value: float
    """p-value for equal means: paired permutation test, two-sided."""
    length_difference: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(episodes: Sequence[EpisodeSummary], against: Sequence[EpisodeSummary], *, reports_success: bool) -> Comparison:
    """Pair the episodes of two evaluations by seed; differences are `episodes` minus `against`. Raises ValueError: no common seed."""
    first, second = ({episode.seed: episode for episode in played} for played in (episodes, against))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("the two evaluations have no common seed")
    pairs = [(first[seed], second[seed]) for seed in shared]
    returns = np.array([ours.episode_return - theirs.episode_return for ours, theirs in pairs], np.float64)
    return Comparison(
        num_pairs=len(pairs),
        num_unpaired=len(first.keys() ^ second.keys()),
        success=_rates([(ours.success_once, theirs.success_once) for ours, theirs in pairs]) if reports_success else None,
        success_at_end=_rates([(ours.success_at_end, theirs.success_at_end) for ours, theirs in pairs]) if reports_success else None,
        return_difference=float(returns.mean()),
        return_interval=bootstrap_mean_interval(returns),
        return_p_value=sign_flip_p_value(returns),
        length_difference=float(np.mean([ours.length - theirs.length for ours, theirs in pairs])),
    )


def _rates(pairs: Sequence[tuple[bool, bool]]) -> RateComparison:
    both, neither = sum(a and b for a, b in pairs), sum(not a and not b for a, b in pairs)
    only_policy, only_against = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return RateComparison(
        both=both,
        only_policy=only_policy,
        only_against=only_against,
        neither=neither,
        difference=(only_policy - only_against) / len(pairs),
        interval=paired_rate_interval(both, only_against, only_policy, neither),
        p_value=mcnemar_p_value(only_policy, only_against),
    )


@dataclass(frozen=True)
class Contestant:
    """A participant of an evaluation."""

    policy: str
    """checkpoint or random; for a policy that no run of ours trained, its kind and path."""
    label: str
    """Its name among the participants."""
    config: TrainConfig
    make: Callable[[Simulators], Generator]
    """Makes the generator for such simulators. May raise IncompatibleCheckpointError and UserError."""
    origin: Callable[[Path], Mapping[str, Any]]
    """Source of its weights, for a file in that folder (reads the weights)."""
    step: str = ""
    """Training steps; empty for random actions and for a policy that no run of ours trained."""
    temperature: float | None = None
    """Temperature of drawn action tokens; None: the mode."""


@dataclass(frozen=True)
class EvaluationResult:
    """Episodes of one evaluation and their figures."""

    player: Contestant
    sim: SimConfig
    spec: SimSpec
    episodes: Sequence[EpisodeSummary]
    figures: Figures
    wall_clock_s: float
    answers: Mapping[str, float] = field(default_factory=dict)
    """Shares of kinds of a language agent's answers, such as answers without an action."""


# ---- figures as texts, of results or of their JSON files --------------------------------------------------------------


def percent(value: object) -> str:
    """``97.0%``, or a dash."""
    return f"{100 * value:.1f}%" if isinstance(value, int | float) else "–"


def percent_range(interval: Sequence[float] | None) -> str:
    """``91.5–99.0%``, or a dash."""
    return f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}%" if interval else "–"


def number_range(interval: Sequence[float] | None) -> str:
    """``-0.25 to -0.17``, or a dash."""
    return f"{number_text(interval[0])} to {number_text(interval[1])}" if interval else "–"


def number(value: object, digits: int = 4) -> str:
    """Significant figures, or a dash."""
    return number_text(value, digits) if isinstance(value, int | float) else "–"


def p_text(p_value: object) -> str:
    """A p-value with three digits, as it is usually reported, or a dash."""
    return "–" if not isinstance(p_value, int | float) else "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


FIGURE_COLUMNS = ("success (once)", "95% interval", "at end", "return", "95% interval", "length")
"""Headings of `figure_cells`; the first three are of tasks with success."""


def figure_cells(figures: Mapping[str, Any], reports_success: bool = True) -> list[str]:
    """Cells of `FIGURE_COLUMNS` of `Figures.to_dict`, without those of success for a task without it."""
    success = [percent(figures.get("success")), percent_range(figures.get("success_interval_95")), percent(figures.get("success_at_end"))]
    total = [number(figures.get("return_mean")), number_range(figures.get("return_mean_interval_95"))]
    return [*(success if reports_success else ()), *total, number(figures.get("length_mean"))]


def comparison_cells(comparison: Mapping[str, Any]) -> list[str]:
    """Difference, interval and p-value of success, then of the return, of `Comparison.to_dict`."""
    success, moved = comparison.get("success") or {}, comparison.get("return_difference")
    points, ends = success.get("difference"), success.get("interval")
    shown = ["–" if points is None else f"{100 * points:+.1f} points", f"{100 * ends[0]:+.1f} to {100 * ends[1]:+.1f}" if ends else "–"]
    total = ["–" if moved is None else f"{moved:+.4g}", number_range(comparison.get("return_interval"))]
    return [*shown, p_text(success.get("p_value")), *total, p_text(comparison.get("return_p_value"))]


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables_of(results: Sequence[EvaluationResult], *, against: bool) -> list[Table]:
    """The figures of one policy, or an overview of several; with `against` their comparison with the last one; and figures by task."""
    tables = [_result_table(results[0]) if len(results) == 1 else _overview(results, against=against)]
    return [*tables, *([_comparison_table(results)] if against else []), *_task_tables(results)]


def _result_table(result: EvaluationResult) -> Table:
    figures, player = result.figures, result.player
    drawn = "" if player.temperature is None else f", sampled at temperature {player.temperature:g}"
    title = f"{result.spec.task}, {player.policy} policy{drawn}, {figures.num_episodes} held-out seeds {_seed_range(figures)}"
    table = figure_table(title, ("", "value", "95% interval"))
    for label, rate, interval in (
        ("success (once)", figures.success, figures.success_interval),
        ("success (at end)", figures.success_at_end, figures.success_at_end_interval),
    ):
        if rate is not None and interval is not None:
            table.add_row(label, percent(rate), percent_range(interval))
    table.add_row("return", f"{number(figures.return_mean)} ± {number(figures.return_std, 3)}", number_range(figures.return_interval))
    table.add_row("reward per step", f"{figures.return_mean / figures.length_mean:.4g}", "")
    table.add_row("episode length", f"{figures.length_mean:.1f}", "")
    return table


def _seed_range(figures: Figures) -> str:
    """``0 … 99``: held-out seeds count from 0, as ``seed=`` does; the simulator gets 2**30 more."""
    from embodied_rl.sim.seeding import HELD_OUT_START  # studies without a simulator import this module too

    return " … ".join(f"{seed - HELD_OUT_START if seed >= HELD_OUT_START else seed}" for seed in figures.seeds)


def _overview(results: Sequence[EvaluationResult], *, against: bool) -> Table:
    """A row of figures for each policy; with `against` the others are compared with the last one."""
    first = results[0]
    title = f"{first.spec.task}, {first.figures.num_episodes} held-out seeds {_seed_range(first.figures)}, the same for all"
    table = figure_table(title, ("policy", *FIGURE_COLUMNS[0 if first.spec.reports_success else 3 :]))
    for index, result in enumerate(results):
        is_last = against and index == len(results) - 1
        before_last = against and index == len(results) - 2
        table.add_row(
            f"against: {result.player.label}" if is_last else result.player.label,
            *figure_cells(result.figures.to_dict(), first.spec.reports_success),
            end_section=before_last,
        )
    return table


def _comparison_table(results: Sequence[EvaluationResult]) -> Table:
    """Differences from the last policy, seed by seed: one in detail, or a row for each."""
    names, comparisons = [result.player.label for result in results], compare_all(results)
    if len(comparisons) == 1:
        return _one_comparison(f"{names[0]} against {names[-1]}", comparisons[0])
    reports_success = comparisons[0].success is not None
    columns = ("policy", *(("success (once)", "95% interval", "p") if reports_success else ()), "return", "95% interval", "p")
    table = figure_table(f"Against {names[-1]}, seed by seed ({comparisons[0].num_pairs} pairs)", columns)
    for name, comparison, adjusted in zip(names, comparisons, adjusted_p_values(comparisons), strict=False):
        cells = comparison_cells(comparison.to_dict())
        rate = (*cells[:2], p_text(adjusted["success"])) if reports_success else ()
        table.add_row(name, *rate, *cells[3:5], p_text(adjusted["return"]))
    table.caption = "p: adjusted for the number of comparisons (Holm)"
    return table


def _one_comparison(title: str, comparison: Comparison) -> Table:
    table = figure_table(f"{title}, seed by seed ({comparison.num_pairs} pairs)", ("", "difference", "95% interval", "p"))
    for label, rate in (("success (once)", comparison.success), ("success (at end)", comparison.success_at_end)):
        if rate is not None:
            table.add_row(label, *comparison_cells({"success": asdict(rate)})[:3])
    table.add_row("return", *comparison_cells(comparison.to_dict())[3:])
    table.add_row("episode length", f"{comparison.length_difference:+.1f}", "", "")
    if (rate := comparison.success) is not None:
        text = f"success: both {rate.both}, only this one {rate.only_policy}, only the other {rate.only_against}, neither {rate.neither}"
        left_out = f"; {comparison.num_unpaired} seeds that only one policy finished are left out" if comparison.num_unpaired else ""
        table.caption = text + left_out
    return table


def _task_tables(results: Sequence[EvaluationResult]) -> list[Table]:
    """A row of figures for each task of a multi-task simulator, and each policy; no table for a single task."""
    tasks = [by_task(result.episodes) for result in results]
    names = sorted(set().union(*tasks))
    if not names:
        return []
    several = len(results) > 1
    reports_success = results[0].spec.reports_success
    columns = ("task", *(("policy",) if several else ()), "episodes", *FIGURE_COLUMNS[0 if reports_success else 3 :])
    table = figure_table("By task", columns, leading=1 + several)
    for name in names:
        for index, (result, own) in enumerate(zip(results, tasks, strict=True)):
            if name in own:
                figures = summarise(own[name], reports_success).to_dict()
                cells = (name if index == 0 else "", *((result.player.label,) if several else ()), str(figures["num_episodes"]))
                table.add_row(*cells, *figure_cells(figures, reports_success), end_section=several and index == len(results) - 1)
    return [table]


def labels(players: Sequence[tuple[Checkpoint, str]]) -> list[str]:
    """Short names that distinguish the policies: ``step 4096``, preceded by the run if there are several; ``random``."""
    runs = {checkpoint.run_dir for checkpoint, _ in players}
    names = [
        "random" if policy == "random" else ("" if len(runs) == 1 else f"{checkpoint.run_dir.name} ") + f"step {checkpoint.step}"
        for checkpoint, policy in players
    ]
    if len(set(names)) == len(names):
        return names
    return [name if policy == "random" else str(checkpoint.path) for name, (checkpoint, policy) in zip(names, players, strict=True)]


# ---- files ----------------------------------------------------------------------------------------------------------


def origin_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Source of a checkpoint's weights."""
    return {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "policy_sha256": checkpoint.weights_sha256()}


def document_of(results: Sequence[EvaluationResult], command: str, folder: Path, *, against: bool) -> dict[str, Any]:
    """Contents of a file in `folder`. Of one policy, evaluation.json: figures, provenance and a row per episode. Of several,
    comparison.json: figures and episodes of every policy and, with `against`, comparisons with the last one."""
    made = {**provenance(command), "sim": asdict(results[0].sim)}
    if len(results) == 1:
        return {**_one(results[0], folder), **made, "episodes": episode_rows(results[0].episodes)}
    evaluations = [{"label": result.player.label, **_one(result, folder), "episodes": episode_rows(result.episodes)} for result in results]
    comparisons: list[dict[str, Any]] = []
    if against:
        found, last = compare_all(results), results[-1].player.label
        for result, comparison, adjusted in zip(results, found, adjusted_p_values(found), strict=False):
            comparisons.append({"policy": result.player.label, "against": last, **comparison.to_dict(), "p_values_holm": adjusted})
    return {
        "task": results[0].spec.task,
        **made,
        "wall_clock_s": round(sum(result.wall_clock_s for result in results), 2),
        "evaluations": evaluations,
        "comparisons": comparisons,
    }


def episodes_csv(results: Sequence[EvaluationResult]) -> str:
    """One line per episode: policy, step, task, seed, success_once, success_at_end, return, length, terminated."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("policy", "step", "task", "seed", "success_once", "success_at_end", "return", "length", "terminated"))
    for result in results:
        for e in result.episodes:
            # An undefined success is an empty cell, which no mean counts as a failure.
            success = (int(e.success_once), int(e.success_at_end)) if result.spec.reports_success else ("", "")
            task = task_of(e) or result.spec.task
            writer.writerow(
                (result.player.label, result.player.step, task, e.seed, *success, repr(e.episode_return), e.length, int(e.terminated))
            )
    return buffer.getvalue()


def compare_all(results: Sequence[EvaluationResult]) -> list[Comparison]:
    """Compare each of the evaluations with the last one."""
    *others, last = results
    return [compare(result.episodes, last.episodes, reports_success=last.spec.reports_success) for result in others]


def adjusted_p_values(comparisons: Sequence[Comparison]) -> list[dict[str, float]]:
    """p-values by Holm's method over the comparisons of each figure."""
    families: dict[str, list[float | None]] = {
        "success": [None if c.success is None else c.success.p_value for c in comparisons],
        "success_at_end": [None if c.success_at_end is None else c.success_at_end.p_value for c in comparisons],
        "return": [c.return_p_value for c in comparisons],
    }
    rows: list[dict[str, float]] = [{} for _ in comparisons]
    for name, family in families.items():
        known = [value for value in family if value is not None]
        if len(known) == len(family):
            for row, value in zip(rows, holm(known), strict=True):
                row[name] = value
    return rows


def _one(result: EvaluationResult, folder: Path) -> dict[str, Any]:
    return {
        "task": result.spec.task,
        "policy": result.player.policy,
        "temperature": result.player.temperature,
        **({"answers": result.answers} if result.answers else {}),
        **result.player.origin(folder),
        "config_sha256": config_hash(result.player.config),
        **result.figures.to_dict(),
        **task_figures(result.episodes, result.spec.reports_success),
        "wall_clock_s": round(result.wall_clock_s, 2),
    }


def play(contestants: Sequence[Contestant], sim: SimConfig, num_episodes: int, *, seed: int, chunk_size: int) -> list[EvaluationResult]:
    """Play the same held-out seeds with each contestant, one after another in the same simulators, and compute the figures.

    Args:
        seed: the seeds are 2**30 + seed + 0 … num_episodes - 1.
        chunk_size: longest chunk of actions of any of them.

    Returns one result each, in their order.

    Raises:
        UserError: no episode could be finished, or a temperature for a policy without action tokens; and errors of `make`.
        SimFault: from the simulator.
    """
    from embodied_rl.rollout.programs import make_manager
    from embodied_rl.sim.seeding import EpisodeSeeds

    started = time.perf_counter()  # the first one's time includes the simulators' start
    # Slots without an episode would start simulators in vain.
    slots = min(sim.num_slots, num_episodes)
    results: list[EvaluationResult] = []
    with ExitStack() as stack:
        manager = stack.enter_context(make_manager(sim, EpisodeSeeds.held_out(seed), num_slots=slots, chunk_size=chunk_size))
        # Make all of them first: a checkpoint that does not fit raises before anything is played.
        generators = [stack.enter_context(closing(contestant.make(manager))) for contestant in contestants]
        advance = stack.enter_context(progress_bar(manager.spec.task, num_episodes * len(contestants)))
        for contestant, generator in zip(contestants, generators, strict=True):
            # Later contestants start like the first: the simulator forgets earlier episodes.
            episodes = _play(manager, generator, advance, num_episodes, seed, contestant.temperature, reconfigure=bool(results))
            figures, seconds = summarise(episodes, manager.spec.reports_success), time.perf_counter() - started
            results.append(EvaluationResult(contestant, sim, manager.spec, episodes, figures, seconds, generator.figures()))
            started = time.perf_counter()
    return results


def _play(
    manager: Simulators, generator: Generator, advance: Advance, number: int, seed: int, temperature: float | None, *, reconfigure: bool
) -> Sequence[EpisodeSummary]:
    from embodied_rl.rollout.evaluation import evaluate

    finished = list[bool]()

    def on_episode(episode: EpisodeSummary) -> None:
        finished.append(episode.success_once)
        advance(1, f"success {np.mean(finished):.0%}" if manager.spec.reports_success else "")

    episodes = evaluate(
        manager, generator, number, first_seed=seed, reconfigure=reconfigure, temperature=temperature, on_episode=on_episode
    )
    if not episodes:
        raise UserError(f"None of the {number} episodes finished: the simulator failed in each.")
    return episodes
