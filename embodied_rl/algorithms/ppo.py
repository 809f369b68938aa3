"""PPO's preparation of a rollout: rewards → advantages → batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from embodied_rl.algorithms.advantages import action_gae, gae, sum_chunks, whiten
from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import method_options
from embodied_rl.algorithms.off_policy import correction_weights
from embodied_rl.algorithms.step_rewards import StepRewards
from embodied_rl.algorithms.units import Level, at_level, mask_at_level, spread, unit_steps
from embodied_rl.config import CorrectionConfig
from embodied_rl.config.algorithm import RewardConfig
from embodied_rl.errors import UserError
from embodied_rl.types import Rollout


@dataclass(frozen=True)
class RolloutValues:
    """The critic's values of a rollout, all float32."""

    value: np.ndarray
    """[T, N]; [T, N, K] from a critic with a value for each step of a chunk."""
    last_value: np.ndarray
    """[N] values of the observations after the last step."""
    final_value: np.ndarray
    """[F] values of the truncated episodes' final observations, in the order of `Rollout.final_observation`."""


class PPO(StepRewards):
    """Proximal policy optimisation (Schulman et al. 2017): prepares a rollout for the learner."""

    def prepare(self, rollout: Rollout, values: RolloutValues, observation: dict[str, torch.Tensor], *, action_dim: int = 1) -> Batch:
        """Normalise rewards, estimate advantages, whiten them, and flatten [T, N] to [B]. Shares memory with the rollout.

        Args:
            observation: {key: [B, ...]} as the policy prepared it.
            action_dim: A, for rollouts with chunks.
        """
        advantage, returns = (part.flatten(0, 1) for part in self._estimate(rollout, values))
        executed = None if rollout.executed is None else flat_rows(rollout.executed)
        value_mask = executed if advantage.dim() == 2 else None
        if self.config.normalize_advantage == "batch":
            advantage = whiten(advantage, value_mask)
        if self.config.advantage_clip is not None:
            advantage = advantage.clamp(-self.config.advantage_clip, self.config.advantage_clip)
        unit_mask = None
        if executed is not None:
            unit_mask = executed[:, unit_steps(rollout.log_prob.shape[-1], executed.shape[1], action_dim)]
        return Batch(
            observation=observation,
            action=flat_rows(rollout.action),
            log_prob=flat_rows(rollout.log_prob),
            advantage=advantage,
            returns=returns,
            value=flat_rows(values.value),
            unit_mask=unit_mask,
            value_mask=value_mask,
        )

    def shaped(self, rollout: Rollout, kl: torch.Tensor | None) -> tuple[Rollout, dict[str, float]]:
        """Apply the configured reward changes except normalisation; return the rollout and metrics of the divergence.
        `kl`: [B, K] of `KlTerm.divergence` for each step of a chunk (K = 1 for single steps); None: the reward has no KL term."""
        if kl is None and self.config.reward == RewardConfig():
            return rollout, {}
        of_chunks, executed = rollout.chunk_reward, rollout.executed
        each = torch.from_numpy(rollout.reward if of_chunks is None else of_chunks).reshape(rollout.reward.size, -1)
        mask = None if executed is None else torch.from_numpy(executed).reshape(each.shape)
        taken, figures = self.less_costs(self.scaled(each, mask), kl, mask)
        if of_chunks is None:
            return dataclasses.replace(rollout, reward=taken.view(rollout.reward.shape).numpy()), figures
        steps = taken.view(of_chunks.shape).numpy()
        return dataclasses.replace(rollout, chunk_reward=steps, reward=steps.sum(axis=2)), figures

    def _estimate(self, rollout: Rollout, values: RolloutValues) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, N] per decision, or [T, N, K] per step of its chunk (``gae_action``). ``gae`` treats chunks as single steps; ``gae_chunk``
        discounts by the steps that each took (`chunk_gae`). Raises UserError for a wrong result of the user's own function."""
        config, info, reward, steps = self.config, self.advantage, rollout.reward, None
        options = method_options(info, config.advantage_options, config)
        if self.looks_into_chunks and rollout.executed is not None and rollout.chunk_reward is not None:
            executed = torch.from_numpy(rollout.executed)
            if info.unit == "step":
                steps, options["executed"] = rollout.chunk_reward, executed
            else:
                given = torch.from_numpy(rollout.chunk_reward)
                total, options["discount"] = sum_chunks(reward=given, executed=executed, gamma=config.gamma)
                reward = total.numpy()
        if self.reward_normalizer is not None:
            reward = self.reward_normalizer(reward, rollout.terminated | rollout.truncated, steps=steps)
        elif steps is not None:
            reward = steps
        arrays = {"reward": reward, "terminated": rollout.terminated, "truncated": rollout.truncated, **vars(values)}
        taken = {name: torch.from_numpy(array) for name, array in info.taken(arrays).items()}
        if not info.own:
            estimate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gae if steps is None else action_gae
            return estimate(**taken, **options)
        result = info.load()(**taken, **options)
        pair = isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, torch.Tensor) for part in result)
        if not pair or any(part.shape != reward.shape for part in result):
            raise UserError(f"'{info.name}' must return (advantage, returns), two tensors {list(reward.shape)} for this rollout.")
        return result[0].detach().float(), result[1].detach().float()


def corrected(
    batch: Batch, present: torch.Tensor, correction: CorrectionConfig, *, level: Level = "chunk", steps: torch.Tensor | None = None
) -> tuple[Batch, dict[str, float]]:
    """Weigh the batch's advantages for the policy that acted: decoupled PPO (Hilton et al. 2021, arXiv:2110.00641).

    With w = sg(present / behaviour) > 0, w · min(r A, clip(r) A) = min(r (w A), clip(r) (w A)): the present policy replaces the old one,
    and the advantage is weighed. Rejected rows get an advantage of 0 and still count in the mean.

    Args:
        batch: batch with whitened advantages, and the `log_prob` of the policy that acted.
        present: [B, L] log-probabilities of the policy at the start of the update.
        level: the unit with one ratio and one weight.
        steps: [L] of `unit_steps`, for levels other than chunk.

    Returns the batch, and the metrics of `correction_weights`.
    """
    steps = torch.zeros(batch.log_prob.shape[1], dtype=torch.int64) if steps is None else steps
    now, before = (at_level(log_prob, level, batch.unit_mask, steps) for log_prob in (present, batch.log_prob))
    # Units of a row are those of one chunk.
    whole = None if now.dim() == 1 else torch.zeros(now.shape, dtype=torch.int64)
    mask = None if now.dim() == 1 else mask_at_level(batch.unit_mask, level, steps)
    if now.dim() == 1 and correction.level == "chunk":  # the entry is the chunk
        correction = dataclasses.replace(correction, level="token")
    weight, metrics = correction_weights(correction, log_prob=now, behaviour_log_prob=before, mask=mask, chunk_id=whole)
    advantage = spread(batch.advantage, level, steps)
    advantage = advantage[:, None] if advantage.dim() < weight.dim() else advantage
    return batch.replaced(log_prob=present, advantage=advantage * weight.to(advantage.dtype)), metrics


def flat_rows(array: np.ndarray) -> torch.Tensor:
    """[T, N, ...] → [T·N, ...] without a copy where the memory is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(array)).flatten(0, 1)
