"""Playing whole episodes of a fixed set of seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from embodied_rl.generation.base import EpisodicGenerator, Generator
from embodied_rl.rollout.program_manager import ProgramManager
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.types import EpisodeSummary


def evaluate(
    manager: EnvManager | ProgramManager,
    generator: Generator,
    num_episodes: int,
    *,
    first_seed: int = 0,
    reconfigure: bool = False,
    on_episode: Callable[[EpisodeSummary], object] | None = None,
) -> list[EpisodeSummary]:
    """Play the held-out seeds 2**30 + first_seed + 0 … num_episodes − 1, each exactly once, with the policy's mode.

    Every seed counts, so that short episodes are not over-represented (as they are where the first n episodes to finish
    are taken). Slots that have played their share stand still. The manager's episodes are lost: reset it afterwards.

    Args:
        manager: whose simulators are played in.
        generator: what acts.
        num_episodes: see above.
        first_seed: see above.
        reconfigure: begin as in fresh simulators, whatever was played before (see `EnvManager.reset`).
        on_episode: called with every episode as it ends.

    Returns:
        One summary per seed, ascending by seed; an episode that its simulator could not finish (see the manager's fault records)
        is missing, with a warning.
    """
    if isinstance(manager, ProgramManager):
        return manager.evaluate(generator, num_episodes, first_seed, on_episode)
    batch = manager.reset(EpisodeSeeds.held_out(first_seed), reconfigure=reconfigure)
    first = HELD_OUT_START + first_seed
    # Slot s plays the seeds first + s, first + s + N, …: its share of num_episodes.
    share = np.array([len(range(slot, num_episodes, manager.num_slots)) for slot in range(manager.num_slots)])
    left = share.copy()
    finished: list[EpisodeSummary] = []
    observation = {key: part.copy() for key, part in batch.observation.items()}
    slots = np.arange(manager.num_slots)
    remembering = generator if isinstance(generator, EpisodicGenerator) else None
    if remembering is not None:
        remembering.begin(slots)
    while left.any():
        active = slots if manager.spec.steps_together else np.flatnonzero(left)
        acting = slots if remembering is None else active
        generator.send(acting, observation if remembering is None else {key: part[acting] for key, part in observation.items()}, None)
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
        left[over] = np.maximum(left[over] - 1, 0)
        if remembering is not None:
            remembering.begin(over)
        if not manager.autoreset and (again := [slot for slot in sorted(over) if left[slot]]):
            seeds = [first + slot + int(share[slot] - left[slot]) * manager.num_slots for slot in again]
            _begin_next(manager, again, seeds, observation)
    return _whole(finished, first, num_episodes)


def _begin_next(manager: EnvManager, slots: list[int], seeds: list[int], observation: dict[str, np.ndarray]) -> None:
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
