"""PPO on a fixed number of steps of every slot: for one domain or several, with one policy for all or one per domain."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embodied_rl.algorithms.ppo import PPO, RolloutValues, corrected, flat_rows
from embodied_rl.algorithms.units import at_level
from embodied_rl.config import TrainConfig
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.objectives import RolloutObjective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.learners import PlayingLearner, Prepared, seen_in
from embodied_rl.policies.base import Policy, TensorObservation, prepare_observation
from embodied_rl.types import Rollout


class RolloutLearner(PlayingLearner[PPO]):
    """PPO on fixed rollouts: a row is a decision."""

    policy: Policy

    def __init__(self, config: TrainConfig, configs: Mapping[str, TrainConfig], policy: Policy, ranks: RankHost | None = None) -> None:
        """See `PlayingLearner`."""
        self._objective = RolloutObjective(policy, config.algorithm, config.hybrid.precision)
        super().__init__(config, configs, policy, PPO, self._objective, ranks)

    def observation(self, gathered: dict[str, Rollout]) -> TensorObservation:
        return seen_in(gathered.values()) if self.moves_statistics else {}

    def valued(self, method: PPO, experience: Rollout) -> Prepared:
        """See `PlayingLearner.valued`; metrics are those of importance weights and of the KL term of the rewards."""
        learner, policy, kl, rollout = self.learner, self.policy, method.kl, experience
        values = rollout_values(learner, policy, rollout)
        seen = {key: rollout.observation[key].reshape(-1, *rollout.observation[key].shape[2:]) for key in policy.observation_keys}
        ready, action = prepare_observation(policy, seen), flat_rows(rollout.action)
        present = learner.log_probs(ready, action) if method.config.correction.enabled or kl.in_reward else None
        reference = learner.log_probs(ready, action, of_reference=True) if learner.has_reference else None
        steps = self._objective.steps(action.device)
        of_units = kl.divergence(present, reference)
        of_steps = None if of_units is None else at_level(of_units, "action", None, steps)
        rollout, figures = method.shaped(rollout, of_steps)
        batch = method.prepare(rollout, values, ready, action_dim=max(policy.spec.action.dim, 1))
        if kl.in_loss:
            batch = batch.replaced(reference_log_prob=reference)
        if method.config.correction.enabled and present is not None:
            batch, weighed = corrected(batch, present, method.config.correction, level=method.config.ratio, steps=steps)
            figures |= weighed
        return Prepared(batch, batch.num_rows, figures)

    def begin(self, version: int) -> None:
        super().begin(version)
        for method in self.methods.values():
            method.restart_episodes()


def rollout_values(learner: Learner, policy: Policy, rollout: Rollout) -> RolloutValues:
    """The critic's values of all observations of a rollout, in one pass."""
    steps, slots = rollout.reward.shape
    seen = {key: rollout.observation[key].reshape(steps * slots, *rollout.observation[key].shape[2:]) for key in policy.observation_keys}
    flat = {key: np.concatenate([rows, rollout.last_observation[key], rollout.final_observation[key]]) for key, rows in seen.items()}
    values = learner.values(prepare_observation(policy, flat))
    value, last, final = np.split(values, [steps * slots, (steps + 1) * slots])
    if values.ndim == 2:  # a value per step of a chunk: the next state's is the first
        return RolloutValues(value.reshape(steps, slots, -1), last[:, 0].copy(), final[:, 0].copy())
    return RolloutValues(value.reshape(steps, slots), last, final)
