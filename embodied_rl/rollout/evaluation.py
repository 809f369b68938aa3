"""Playing whole episodes of a fixed set of seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from embodied_rl.generation.base import Generator
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeSummary

_NOISE = 0x6E6F6973
"""Keeps these random numbers apart from all others that begin with the same seeds."""
Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(seeds of episodes [n], numbers of their decisions [n]) → noise [n, W]."""


def evaluate(
    manager: Simulators,
    generator: Generator,
    num_episodes: int,
    *,
    first_seed: int = 0,
    reconfigure: bool = False,
    temperature: float | None = None,
    on_episode: Callable[[EpisodeSummary], object] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> list[EpisodeSummary]:
    """Play the held-out seeds 2**30 + first_seed + 0 … num_episodes − 1, each exactly once, with the policy's mode, or with its samples.

    Every seed counts, so that short episodes are not over-represented (as they are where the first n episodes to finish
    are taken). Slots that have played their share stand still. The manager's episodes are lost: reset it afterwards.

    Args:
        reconfigure: begin as in fresh simulators, whatever was played before (see `EnvManager.reset`).
        temperature: of action tokens that are drawn, from random numbers that depend only on an episode's seed; None: the mode.
        is_over: asked before every step; once it is true, the evaluation ends with the seeds up to the first that was not played to its
            end. Simulators that play by themselves do not ask.

    Returns:
        One summary per seed, ascending by seed; an episode that its simulator could not finish (see the manager's fault records)
        is missing, with a warning.

    Raises:
        UserError: a temperature, and what acts draws no action tokens.
    """
    if manager.plays_itself:
        return manager.evaluate(generator, num_episodes, first_seed, on_episode)
    with _drawing(generator, temperature) as draw:
        return _evaluate(manager, generator, num_episodes, first_seed, reconfigure, draw, on_episode, is_over or _never)


def _never() -> bool:
    return False


@contextmanager
def _drawing(generator: Generator, temperature: float | None) -> Iterator[Draw | None]:
    """What noise a generator is given meanwhile; None: none."""
    if temperature is None:
        yield None
        return
    with generator.at_temperature(temperature) as layout:
        yield episode_noise(layout)


def episode_noise(layout: ActionLayout) -> Draw:
    """Random numbers of a decision by its episode's seed and its number there, so that neither slots nor neighbours matter."""

    def draw(seeds: np.ndarray, decisions: np.ndarray) -> np.ndarray:
        rows = [np.random.default_rng([_NOISE, int(seed), int(number)]) for seed, number in zip(seeds, decisions, strict=True)]
        if layout.noise_kind == "uniform":
            return np.stack([row.random(layout.noise_width, np.float32) for row in rows])
        return np.stack([row.standard_normal(layout.noise_width, np.float32) for row in rows])

    return draw


def _evaluate(
    manager: Simulators,
    generator: Generator,
    num_episodes: int,
    first_seed: int,
    reconfigure: bool,
    draw: Draw | None,
    on_episode: Callable[[EpisodeSummary], object] | None,
    is_over: Callable[[], bool],
) -> list[EpisodeSummary]:
    batch = manager.reset(EpisodeSeeds.held_out(first_seed), reconfigure=reconfigure)
    first = HELD_OUT_START + first_seed
    # Slot s plays the seeds first + s, first + s + N, …: its share of num_episodes.
    share = np.array([len(range(slot, num_episodes, manager.num_slots)) for slot in range(manager.num_slots)])
    left, decisions = share.copy(), np.zeros(manager.num_slots, np.int64)
    finished: list[EpisodeSummary] = []
    observation = {key: part.copy() for key, part in batch.observation.items()}
    slots = np.arange(manager.num_slots)
    remembering = generator if generator.remembers else None
    if remembering is not None:
        remembering.begin(slots)
    while left.any() and not is_over():
        active = slots if manager.spec.steps_together else np.flatnonzero(left)
        acting = slots if remembering is None else active
        seeds = first + slots + (share - left) * manager.num_slots
        noise = None if draw is None else draw(seeds[acting], decisions[acting])
        generator.send(acting, observation if remembering is None else {key: part[acting] for key, part in observation.items()}, noise)
        actions = generator.recv().for_simulator(manager.spec.action, manager.chunk_size)
        manager.send(active, actions[active] if remembering is None else actions)
        outcome = manager.recv(active)
        for key, part in outcome.observation.items():
            observation[key][active] = part
        new = [episode for episode in outcome.episodes if left[episode.slot]]
        finished += new
        if on_episode is not None:
            for episode in new:
                on_episode(episode)
        over = [episode.slot for episode in outcome.episodes]
        if outcome.aborted is not None:
            over += outcome.slots[outcome.aborted].tolist()
        decisions += 1
        left[over], decisions[over] = np.maximum(left[over] - 1, 0), 0
        if remembering is not None:
            remembering.begin(over)
        if not manager.autoreset and (again := [slot for slot in sorted(over) if left[slot]]):
            following = [first + slot + int(share[slot] - left[slot]) * manager.num_slots for slot in again]
            _begin_next(manager, again, following, observation)
    if left.any():  # given up: slot s would play this seed next
        num_episodes = int(np.min(slots + (share - left) * manager.num_slots, where=left > 0, initial=num_episodes))
        finished = [episode for episode in finished if episode.seed < first + num_episodes]
    return _whole(finished, first, num_episodes)


def _begin_next(manager: Simulators, slots: list[int], seeds: list[int], observation: dict[str, np.ndarray]) -> None:
    """Where episodes do not begin by themselves: these slots' next ones, with their first observations put in place."""
    manager.begin(slots, seeds)
    for key, part in manager.recv(slots).observation.items():
        observation[key][slots] = part


def _whole(finished: list[EpisodeSummary], first: int, num_episodes: int) -> list[EpisodeSummary]:
    """Ascending by seed; warns of seeds that are missing."""
    missing = sorted(set(range(first, first + num_episodes)) - {episode.seed for episode in finished})
    assert len(finished) + len(missing) == num_episodes, "a seed was played twice"
    if missing:
        warnings.warn(
            f"{len(missing)} of {num_episodes} episodes were given up because their simulator failed: seeds {missing}.", stacklevel=3
        )
    return sorted(finished, key=lambda episode: episode.seed)
