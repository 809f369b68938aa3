"""Slots stepped together, in turns, one by one, and in another way in each rollout: the same rollouts bit by bit, by real policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from embodied_rl.config.compose import load_train_config
from embodied_rl.generation import make_generator
from embodied_rl.learning.devices import compute_threads
from embodied_rl.methods.building import make_rollout_collector
from embodied_rl.policies.build import build_policy
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import AS_READY
from embodied_rl.types import Rollout

POLICIES = {
    "numpy": ("sim=pendulum", "sim.max_episode_steps=7"),
    "torch": ("sim=cartpole",),
    "cnn": ("sim=pixel_reach", "policy=cnn", "sim.max_episode_steps=7"),
    "tiny_vla": ("experiment=tiny_vla", "algorithm.rollout_steps=6"),
}
SMALL = ("sim.num_slots=10", "sim.num_workers=2", "hybrid.device=cpu", "algorithm.rollout_steps=12")


def rollouts(overrides: Sequence[str], turns: Sequence[int]) -> list[Rollout]:
    """One for each of these, of the same run."""
    config = load_train_config([*SMALL, *overrides])
    torch.manual_seed(0)
    with compute_threads(1), EnvManager.from_config(config.sim, EpisodeSeeds.training(1), chunk_size=config.policy.chunk_size) as manager:
        policy = build_policy(config.policy, manager.spec)
        generator = make_generator(config.generation, policy)
        generator.publish(0)
        collector, found = make_rollout_collector(config, manager, generator, policy.action_layout), []
        collector.restart()
        for version, manager.num_turns in enumerate(turns):
            found.append(collector.next_rollout(version))
    return found


def parts(rollout: Rollout) -> dict[str, bytes]:
    whole = vars(rollout)
    arrays = {key: part for key, part in whole.items() if isinstance(part, np.ndarray)}
    arrays |= {f"{key}/{name}": part for key, named in whole.items() if isinstance(named, dict) for name, part in named.items()}
    return {key: repr(part.tolist()).encode() if part.dtype == object else part.tobytes() for key, part in arrays.items()}


@pytest.mark.parametrize("kind", POLICIES)
def test_rollouts_do_not_depend_on_the_turns(kind: str) -> None:
    expected = rollouts(POLICIES[kind], [2, 2, 2])
    assert sum(len(rollout.episodes) for rollout in expected) > 10
    for turns in ([AS_READY] * 3, [1, AS_READY, 2]):
        for own, other in zip(expected, rollouts(POLICIES[kind], turns), strict=True):
            assert own.episodes == other.episodes  # in the same order too
            assert parts(own) == parts(other)
