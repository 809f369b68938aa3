"""PPO on a fixed number of steps of every slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.learner import Learner
from embodied_rl.methods.base import Experience
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.rollout.collector import CollectorTimes, RolloutCollector
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import Rollout


class RolloutMethod:
    """PPO on `rollout_steps` of every slot. Implements `Method`."""

    def __init__(self, config: TrainConfig, manager: EnvManager, policy: ActorCritic, generator: Generator) -> None:
        compose(config.algorithm)
        self.config = config
        self.learner = Learner(policy, config.algorithm, device=config.hybrid.device, num_threads=config.hybrid.num_threads)
        self._algorithm = PPO(config.algorithm)
        self.collector = RolloutCollector(
            manager, generator, rollout_steps=config.algorithm.rollout_steps, num_groups=config.sim.pipeline_groups, seed=config.seed
        )

    @property
    def finished(self) -> bool:
        return False

    @property
    def times(self) -> CollectorTimes:
        return self.collector.times

    def collect(self, iteration: int) -> Experience:
        rollout = self.collector.next_rollout(iteration)
        finished = [(episode.success_once, episode.episode_return, episode.length) for episode in rollout.episodes]
        seen = {key: torch.from_numpy(part).flatten(0, 1) for key, part in rollout.observation.items() if part.dtype != object}
        return Experience(rollout.num_steps, finished, seen, rollout)

    def prepare(self, experience: Experience) -> Batch:
        rollout: Rollout = experience.data
        return self._algorithm.prepare(rollout, self.learner.values(rollout))

    def update(self, prepared: Batch, *, iteration: int, steps: int) -> dict[str, float]:
        return self.learner.update(prepared, iteration=iteration, num_iterations=self.config.num_iterations, seed=self.config.seed)

    def published(self, version: int) -> None:
        pass

    def restart(self, iteration: int) -> None:
        self._algorithm.restart_episodes()
        self.collector.restart(seed_round=iteration)

    def finish(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return self._algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state)
