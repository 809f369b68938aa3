"""Plays the held-out episodes of any policy and sums them up: what every way of evaluating shares."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.errors import UserError

if TYPE_CHECKING:
    from embodied_rl.config import SimConfig
    from embodied_rl.evaluation.output import EvaluationResult
    from embodied_rl.generation.base import Generator
    from embodied_rl.progress import Advance
    from embodied_rl.sim.simulators import Simulators
    from embodied_rl.types import EpisodeSummary


def play_and_sum_up(
    manager: Simulators,
    generator: Generator,
    advance: Advance,
    *,
    sim: SimConfig,
    label: str,
    num_episodes: int,
    first_seed: int,
    temperature: float | None,
    reconfigure: bool = False,
    started: float | None = None,
) -> EvaluationResult:
    """Play with `generator` as `embodied_rl.rollout.evaluation.evaluate` does, and work out the figures.

    Args:
        advance: called with every episode, and the share of successes so far.
        started: `time.perf_counter()` from which on the wall clock counts; None: now.

    Raises:
        UserError: no episode could be finished, or the temperature of what draws no action tokens.
    """
    from embodied_rl.evaluation.output import EvaluationResult
    from embodied_rl.reporting import summarise
    from embodied_rl.rollout.evaluation import evaluate

    started = time.perf_counter() if started is None else started
    spec, finished = manager.spec, list[bool]()

    def on_episode(episode: EpisodeSummary) -> None:
        finished.append(episode.success_once)
        advance(1, f"success {np.mean(finished):.0%}" if spec.reports_success else "")

    episodes = evaluate(
        manager,
        generator,
        num_episodes,
        first_seed=first_seed,
        reconfigure=reconfigure,
        temperature=temperature,
        on_episode=on_episode,
    )
    if not episodes:
        raise UserError(f"None of the {num_episodes} episodes could be finished: the simulator failed in every one.")
    figures = summarise(episodes, spec.reports_success)
    return EvaluationResult(sim, spec, label, episodes, figures, time.perf_counter() - started, temperature)
