"""Playing whole episodes of a fixed set of seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from embodied_rl.generation.base import Generator
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeSummary, Observation, StepBatch

_NOISE = 0x6E6F6973
"""Keeps these random numbers apart from all others that begin with the same seeds."""
Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(seeds of episodes [n], numbers of their decisions [n]) → noise [n, W]."""


class Watcher:
    """Sees what the episodes of a set of seeds do (`play_seeds`)."""

    def begun(self, slots: Sequence[int], seeds: Sequence[int], observation: Observation) -> None:
        """New episodes begin in these slots; `observation` {key: [slots, ...]} is what all slots see."""

    def stepped(self, actions: np.ndarray, outcome: StepBatch, observation: Observation, ended: Sequence[EpisodeSummary]) -> None:
        """`actions`, in the simulator's units, came to `outcome`; slots that rest may be among its rows, and not among `ended`."""


class _Summaries(Watcher):
    """Keeps the summaries of episodes that end."""

    def __init__(self, on_episode: Callable[[EpisodeSummary], object] | None) -> None:
        self.finished: list[EpisodeSummary] = []
        self._on_episode = on_episode

    def stepped(self, actions: np.ndarray, outcome: StepBatch, observation: Observation, ended: Sequence[EpisodeSummary]) -> None:
        self.finished += ended
        if self._on_episode is not None:
            for episode in ended:
                self._on_episode(episode)


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

    Raises UserError: a temperature, and what acts draws no action tokens.
    """
    if manager.plays_itself:
        return manager.evaluate(generator, num_episodes, first_seed, on_episode)
    first, watcher = HELD_OUT_START + first_seed, _Summaries(on_episode)
    with _drawing(generator, temperature) as draw:
        seeds = range(first, first + num_episodes)
        num_played = play_seeds(manager, generator, seeds, watcher, reconfigure=reconfigure, draw=draw, is_over=is_over)
    finished = [episode for episode in watcher.finished if episode.seed < first + num_played]
    return _whole(finished, first, num_played)


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


def play_seeds(
    manager: Simulators,
    generator: Generator,
    seeds: Sequence[int],
    watcher: Watcher,
    *,
    reconfigure: bool = False,
    draw: Draw | None = None,
    is_over: Callable[[], bool] | None = None,
) -> int:
    """Play each seed once: slot s of N the seeds[s], seeds[s + N], …, and then it stands still.

    Args:
        seeds: held-out ones; where the manager begins episodes by itself, consecutive ones.
        draw: noise of the generator's actions; None: it acts by its mode.
        is_over: asked before every step.

    Returns how many of the seeds, from the first on, were played to their end: all, unless it was over before.
    """
    spec, num_slots, num_seeds = manager.spec, manager.num_slots, len(seeds)
    slots, place = np.arange(num_slots), np.arange(num_slots)  # of what each slot plays, in `seeds`
    decisions, first = np.zeros(num_slots, np.int64), seeds[0]
    batch = manager.reset(EpisodeSeeds.held_out(first - HELD_OUT_START), reconfigure=reconfigure)
    observation = {key: part.copy() for key, part in batch.observation.items()}

    def seeds_of(chosen: Sequence[int] | np.ndarray) -> list[int]:
        """What these slots play; those that rest, the last one once more."""
        return [seeds[min(place[slot], num_seeds - 1)] for slot in chosen]

    def begin(begun: list[int], by_itself: bool) -> None:
        if begun and not by_itself:
            manager.begin(begun, seeds_of(begun))
            for key, part in manager.recv(begun).observation.items():
                observation[key][begun] = part
        generator.begin(begun)
        shown = [slot for slot in begun if place[slot] < num_seeds]
        if shown:
            watcher.begun(shown, seeds_of(shown), observation)

    other = [slot for slot in range(min(num_slots, num_seeds)) if seeds[slot] != first + slot]  # than what the reset began
    begin([slot for slot in range(num_slots) if slot not in other], by_itself=True)
    begin(other, by_itself=False)
    while (left := place < num_seeds).any() and not (is_over is not None and is_over()):
        active = slots if spec.steps_together else np.flatnonzero(left)
        # What rests is asked too, unless the generator remembers episodes: the shape of its batch stays what it is.
        acting = active if generator.remembers else slots
        noise = None if draw is None else draw(np.array(seeds_of(acting)), decisions[acting])
        generator.send(acting, {key: part[acting] for key, part in observation.items()} if generator.remembers else observation, noise)
        actions = generator.recv().for_simulator(spec.action, manager.chunk_size)
        actions = actions if generator.remembers else actions[active]
        manager.send(active, actions)
        outcome = manager.recv(active)
        for key, part in outcome.observation.items():
            observation[key][active] = part
        watcher.stepped(actions, outcome, observation, [episode for episode in outcome.episodes if left[episode.slot]])
        over = [episode.slot for episode in outcome.episodes]
        if outcome.aborted is not None:
            over += outcome.slots[outcome.aborted].tolist()
        decisions += 1
        if over:
            over.sort()
            decisions[over] = 0
            place[over] += num_slots
            begin(
                over if manager.autoreset or spec.steps_together else [slot for slot in over if place[slot] < num_seeds], manager.autoreset
            )
    return min(place[place < num_seeds].tolist(), default=num_seeds)


def _whole(finished: list[EpisodeSummary], first: int, num_episodes: int) -> list[EpisodeSummary]:
    """Ascending by seed; warns of seeds that are missing."""
    missing = sorted(set(range(first, first + num_episodes)) - {episode.seed for episode in finished})
    assert len(finished) + len(missing) == num_episodes, "a seed was played twice"
    if missing:
        warnings.warn(
            f"{len(missing)} of {num_episodes} episodes were given up because their simulator failed: seeds {missing}.", stacklevel=3
        )
    return sorted(finished, key=lambda episode: episode.seed)
