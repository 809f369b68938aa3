"""Small runs, their curves, and their weights."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.methods import Experience
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from embodied_rl.types import EpisodeGroup

QUICK = ["video.enabled=no", "evaluation.num_episodes=4", "logger=quiet", "sim.num_workers=1", "sim.num_slots=4", "stop_at_success=null"]
ROLLOUTS = [
    *("sim=pendulum", *QUICK, "algorithm.rollout_steps=32", "algorithm.num_epochs=2", "algorithm.minibatch_size=64"),
    *("algorithm.normalize_reward=true", "hybrid.num_threads=1"),
    "sim.max_episode_steps=40",  # more than a rollout, and evaluations take no longer
]
GROUPS = [
    *("sim=cartpole", "algorithm=grpo", "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=2", "hybrid.num_threads=1"),
    *(*QUICK, "algorithm.num_epochs=2", "algorithm.minibatch_size=64", "policy.hidden_sizes=[16]", "algorithm.kl.coef=0.1"),
    *("algorithm.kl.target=0.01", "algorithm.reward.std=running"),
]

TEXTS = [
    *("experiment=frozenlake_text", *QUICK, "sim.num_slots=8", "evaluation.every_steps=null", "hybrid.num_threads=1"),
    *("algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=4", "algorithm.groups.filters=[]", "agent.max_new_tokens=2"),
    "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}",
    *("algorithm.minibatch_size=16", "evaluation.interim_episodes=8"),
    *("algorithm.warm_start.episodes=8", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=4"),
]
"""A language agent, with a warm start."""


POLE = "{name: cartpole, target: 'embodied_rl.sim.robots.gymnasium:make', task: CartPole-v1, num_slots: 3, num_workers: 1}"
TWO_POLES = [
    *(word for word in GROUPS if not word.startswith(("sim", "algorithm.kl", "algorithm.groups.groups_per_step"))),
    "algorithm.groups.groups_per_step=6",
    *(f"domains.{name}={{weight: {weight}, sim: {POLE}, policy: {{hidden_sizes: [8]}}}}" for name, weight in (("near", 1), ("far", 2))),
]
"""Two domains, each with its own network."""

BARE = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
"""A Ray node without the processes that show and scale it, each of which imports Ray."""


def groups_of(experience: Experience[dict[str, Any]]) -> list[EpisodeGroup]:
    """Those that an update learns from, ascending by number: a language policy's as they are, a robot's in each domain's batch."""
    of_domains = [own for gathered in experience.data.values() for own in gathered.values()]
    groups = [group for own in of_domains for group in (own if isinstance(own, list) else own.groups)]
    return sorted(groups, key=lambda group: group.number)


def configured(run_dir: Path, *overrides: str) -> TrainConfig:
    return load_train_config([*overrides, f"run_dir={run_dir}"])


def trained(run_dir: Path, *overrides: str) -> Path:
    return train(configured(run_dir, *overrides))


def run_with_a_kill(run_dir: Path, overrides: Sequence[str], pid: Callable[[Any], int]) -> None:
    """A run whose player is killed in its second update: `pid` finds the process from the trainer's manager."""
    run_dir.mkdir()
    with Trainer(configured(run_dir, *overrides), run_dir, command="test") as trainer:
        method: Any = trainer.method
        update = method.update

        def kill_first(prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
            if iteration == 1:
                os.kill(pid(trainer.manager), signal.SIGKILL)
            return dict(update(prepared, iteration=iteration, steps=steps))

        method.update = kill_first
        trainer.run()
        assert trainer.manager.num_restarts == 1


class Naps:
    """Pauses of training in which somebody else is to play on: short ones, and long ones as long as nothing was seen of it.

    On a machine that keeps the player from its turn a short one may pass without a step.
    """

    def __init__(self, short_s: float) -> None:
        self._short_s, self._taken = short_s, 0

    def take(self, seen: bool) -> None:
        """`seen`: whether something was played in an earlier one."""
        time.sleep(self._short_s if seen or self._taken == 0 else min(3.0 * self._taken, 12.0))
        self._taken += 1


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that depend on the seed alone."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(("time", "speed", "roles", "multiplex"))} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """Curves and final weights are the same, bit for bit."""
    assert curve(one) == curve(other)
    first, second = (load_checkpoint(folder).policy for folder in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
