"""PPO on a fixed number of steps of every slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.ppo import PPO, RolloutValues, decoupled
from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.learner import Learner
from embodied_rl.hybrid.sharded_updater import make_sharded_updater
from embodied_rl.methods.base import Experience
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import Policy, layout_of, prepare_observation
from embodied_rl.rollout.batch_figures import age_figures
from embodied_rl.rollout.collector import CollectorTimes, RolloutCollector
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import ActionLayout, Rollout


class RolloutMethod:
    """PPO on `rollout_steps` of every slot. Implements `Method`."""

    def __init__(self, config: TrainConfig, manager: EnvManager, policy: Policy, generator: Generator) -> None:
        compose(config.algorithm)
        self.config = config
        hybrid = config.hybrid
        self.sharded = None if hybrid.sharding is None else make_sharded_updater(policy, config.algorithm, hybrid)
        self.learner = Learner(
            policy,
            config.algorithm,
            device=hybrid.device,
            num_threads=hybrid.rank_threads,
            updater=self.sharded,
            precision=hybrid.precision,
        )
        self._policy, self._algorithm = policy, PPO(config.algorithm)
        self._ages: dict[str, float] = {}
        """Of the last rollout."""
        self._weights: dict[str, float] = {}
        """Figures of the weights of what was prepared last."""
        self.collector = make_rollout_collector(config, manager, generator, layout_of(policy))

    @property
    def finished(self) -> bool:
        return False

    @property
    def times(self) -> CollectorTimes:
        return self.collector.times

    def collect(self, iteration: int) -> Experience:
        rollout = self.collector.next_rollout(iteration)
        if bound := self.config.algorithm.max_staleness:
            self._ages = age_figures("rollout", (iteration - rollout.policy_version).ravel().tolist(), bound)
        finished = [(episode.success_once, episode.episode_return, episode.length) for episode in rollout.episodes]
        # What came through Ray is read-only, of which torch warns.
        parts = {key: part if part.flags.writeable else part.copy() for key, part in rollout.observation.items() if part.dtype != object}
        seen = {key: torch.from_numpy(part).flatten(0, 1) for key, part in parts.items()}
        return Experience(rollout.num_steps, finished, seen, rollout)

    def prepare(self, experience: Experience) -> Batch:
        rollout: Rollout = experience.data
        batch = self._batch(rollout, self.learner.values(rollout))
        if self.config.algorithm.loss != "decoupled_ppo":
            return batch
        weighed, self._weights = decoupled(batch, self.learner.log_probs(batch), self.config.algorithm.loss_options)
        return weighed

    def _batch(self, rollout: Rollout, values: RolloutValues) -> Batch:
        if isinstance(self._policy, ActorCritic):
            return self._algorithm.prepare(rollout, values)
        seen = {key: rollout.observation[key].reshape(-1, *rollout.observation[key].shape[2:]) for key in self._policy.observation_keys}
        ready = prepare_observation(self._policy, seen)
        return self._algorithm.prepare(rollout, values, ready, action_dim=max(self._policy.spec.action.dim, 1))

    def update(self, prepared: Batch, *, iteration: int, steps: int) -> dict[str, float]:
        if iteration < self.config.algorithm.critic_warmup:
            # Without advantages the policy's loss has no gradient.
            prepared = prepared.replaced(advantage=torch.zeros_like(prepared.advantage))
        stats = self.learner.update(prepared, iteration=iteration, num_iterations=self.config.num_iterations, seed=self.config.seed)
        return {**stats, **self._weights}

    def published(self, version: int) -> None:
        pass

    def restart(self, iteration: int) -> None:
        self._algorithm.restart_episodes()
        self.collector.restart(seed_round=iteration)

    def episodes(self) -> dict[str, Tensor]:
        """The running episodes of all slots, as bytes [n] uint8 by slot. Raises UserError where the simulator's cannot be saved."""
        return {f"{slot}": torch.frombuffer(bytearray(saved), dtype=torch.uint8) for slot, saved in enumerate(self.collector.episodes())}

    def take_up(self, episodes: Mapping[str, Tensor]) -> None:
        """Go on within what `episodes` gave. Raises SnapshotError."""
        self.collector.take_up([episodes[str(slot)].numpy().tobytes() for slot in range(len(episodes))])

    def finish(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {**self.collector.metrics(), **self._ages}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return self._algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state)


def make_rollout_collector(config: TrainConfig, manager: EnvManager, generator: Generator, layout: ActionLayout) -> RolloutCollector:
    """The collector that a configuration describes, in whatever process the simulators are."""
    return RolloutCollector(
        manager,
        generator,
        rollout_steps=config.algorithm.rollout_steps,
        num_groups=config.sim.pipeline_groups,
        seed=config.seed,
        layout=layout,
        max_staleness=config.algorithm.max_staleness,
    )
