"""PPO on a fixed number of steps of every slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.ppo import PPO, RolloutValues, corrected, flat_rows
from embodied_rl.algorithms.units import at_level
from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import RolloutObjective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.acting import PlayingMethod
from embodied_rl.methods.base import Experience
from embodied_rl.methods.starts import ORDINARY, Starts
from embodied_rl.policies.base import Policy, prepare_observation
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import Rollout


class RolloutMethod(PlayingMethod[Rollout, Batch]):
    """PPO on `rollout_steps` of every slot."""

    def __init__(
        self,
        config: TrainConfig,
        manager: Simulators,
        policy: Policy,
        generator: Generator,
        ranks: RankHost | None = None,
        starts: Starts = ORDINARY,
    ) -> None:
        """`ranks`, `starts`: see `make_method`."""
        compose(config.algorithm)
        self.config = config
        self._objective = RolloutObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(self._objective, policy, config.algorithm, config.hybrid, ranks=ranks)
        self._policy, self._algorithm = policy, PPO(config.algorithm)
        self._figures: dict[str, float] = {}
        """Of what was prepared last: its weights, and the KL term of its rewards."""
        self.play_in(manager, generator, policy.action_layout, starts)

    def collect(self, iteration: int) -> Experience[Rollout]:
        rollout = self.next_rollout(iteration)
        seen = self.seen_in(rollout) if self.config.algorithm.moves_statistics else {}
        return Experience(rollout.num_steps, self.finished_in(rollout), seen, rollout)

    def prepare(self, experience: Experience[Rollout]) -> Batch:
        rollout, algorithm, learner = experience.data, self.config.algorithm, self.learner
        values = rollout_values(learner, self._policy, rollout)
        seen = {key: rollout.observation[key].reshape(-1, *rollout.observation[key].shape[2:]) for key in self._policy.observation_keys}
        ready, action = prepare_observation(self._policy, seen), flat_rows(rollout.action)
        kl, steps, present, reference = self._algorithm.kl, self._objective.steps(action.device), None, None
        if algorithm.correction.enabled or kl.in_reward:
            present = learner.log_probs(ready, action)
        if learner.has_reference:
            reference = learner.log_probs(ready, action, of_reference=True)
        action_dim = max(self._policy.spec.action.dim, 1)
        of_units = kl.divergence(present, reference)
        of_steps = None if of_units is None else at_level(of_units, "action", None, steps)
        rollout, self._figures = self._algorithm.shaped(rollout, of_steps)
        batch = self._algorithm.prepare(rollout, values, ready, action_dim=action_dim)
        if kl.in_loss:
            batch = batch.replaced(reference_log_prob=reference)
        if not algorithm.correction.enabled:
            return batch
        assert present is not None, "it was computed"
        weighed, figures = corrected(batch, present, algorithm.correction, level=algorithm.ratio, steps=steps)
        self._figures |= figures
        return weighed

    def update(self, prepared: Batch, *, iteration: int, steps: int) -> dict[str, float]:
        if iteration < self.config.algorithm.critic_warmup:
            # Without advantages the policy's loss has no gradient.
            prepared = prepared.replaced(advantage=torch.zeros_like(prepared.advantage))
        stats = self.learner.update(
            prepared,
            minibatch_rows=self.config.algorithm.minibatch_size,
            progress=iteration / self.config.num_iterations,
            seed=[self.config.seed, iteration],
            kl_coef=self._algorithm.kl.coefficient.value,
        )
        return {**stats, **self._figures, **self._algorithm.kl.measured(stats, prepared.num_rows)}

    def restart(self, iteration: int) -> None:
        self.learner.keep_reference()
        self._algorithm.restart_episodes()
        self.begin(iteration)

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return {**self._algorithm.state_dict(), **self.start_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state)
        self.load_starts(state)


def rollout_values(learner: Learner, policy: Policy, rollout: Rollout) -> RolloutValues:
    """The critic's values of everything the rollout saw, in one pass."""
    steps, slots = rollout.reward.shape
    flat = {}
    for key in policy.observation_keys:
        seen = rollout.observation[key]
        rows = seen.reshape(steps * slots, *seen.shape[2:])
        flat[key] = np.concatenate([rows, rollout.last_observation[key], rollout.final_observation[key]])
    values = learner.values(prepare_observation(policy, flat))
    value, last, final = np.split(values, [steps * slots, (steps + 1) * slots])
    if values.ndim == 2:  # of each step of a chunk: what comes after begins with the first
        return RolloutValues(value.reshape(steps, slots, -1), last[:, 0].copy(), final[:, 0].copy())
    return RolloutValues(value.reshape(steps, slots), last, final)
