"""PPO's inner loop for any policy: action units of chunks, learning rates of its parts, micro-batches, mixed precision."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.aggregation import Aggregation
from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import entropy_bonus, ppo_clip_loss, value_loss
from embodied_rl.algorithms.units import at_level, mask_at_level, spread, unit_steps
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid.updater import BETAS, METRICS, AutogradUpdater, Minibatches, raise_if_not_finite
from embodied_rl.policies.base import Policy, Role, layout_of, prepare_observation

Precision = Literal["float32", "bfloat16"]
ROWS = 512
"""Rows of one forward without gradients at most."""


def is_needed(config: AlgorithmConfig, precision: Precision) -> bool:
    """Whether a configuration asks for something that the updaters of actor-critics do not have."""
    rates = config.value_learning_rate is not None or config.head_learning_rate is not None
    return rates or config.micro_batch_size is not None or config.ratio != "chunk" or precision != "float32"


def parameter_groups(policy: Policy, config: AlgorithmConfig) -> list[dict[str, Any]]:
    """Trained parameters by learning rate; ``scale`` is what the schedule's rate is multiplied with."""
    rates: dict[Role, float | None] = {"backbone": None, "head": config.head_learning_rate, "value": config.value_learning_rate}
    role_of = getattr(policy, "role_of", _role_of_actor_critic)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((rates[role_of(name)] or config.learning_rate) / config.learning_rate, []).append(parameter)
    return [{"params": parameters, "scale": scale, "lr": scale * config.learning_rate} for scale, parameters in groups.items()]


def _role_of_actor_critic(name: str) -> Role:
    return "value" if name.startswith("critic") else "backbone"


class PolicyObjective:
    """PPO's loss of some rows of a minibatch, divided by the counts of the whole: parts add up, metrics too."""

    def __init__(self, policy: Policy, config: AlgorithmConfig, device: torch.device, precision: Precision = "float32") -> None:
        """`policy` says how its actions are made up; which one is evaluated is told with each call."""
        self.config, self.device, self.precision = config, device, precision
        self.layout = layout_of(policy)
        self.steps = unit_steps(self.layout.num_units, self.layout.chunk_size, max(policy.spec.action.dim, 1)).to(device)
        """[L] step of the chunk that each action unit belongs to."""
        self.aggregation = Aggregation(config.aggregation or "token-mean", config.horizon)

    def counts(self, batch: Batch) -> dict[str, float]:
        """What the sums over a whole minibatch are divided by."""
        mask = mask_at_level(batch.unit_mask, self.config.ratio, self.steps.to(batch.advantage.device))
        return {
            "policy": float(self._entries(batch) if mask is None else self.aggregation.count(mask).clamp(min=1)),
            "value": float(batch.returns.numel() if batch.value_mask is None else batch.value_mask.sum().clamp(min=1)),
            "rows": float(batch.num_rows),
        }

    def _entries(self, batch: Batch) -> int:
        per_row = {"chunk": 1, "action": self.layout.chunk_size, "token": self.layout.num_units}[self.config.ratio]
        return batch.num_rows * (per_row if self.aggregation.mode == "token-mean" else 1)

    def __call__(self, policy: Policy, batch: Batch, counts: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of the rows of `batch`; advantages come whitened, where the algorithm whitens them."""
        config, steps = self.config, self.steps
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            evaluation = policy.evaluate(batch.observation, batch.action)
        level = config.ratio
        policy_part, metrics = ppo_clip_loss(
            log_prob=at_level(evaluation.log_prob.float(), level, batch.unit_mask, steps),
            old_log_prob=at_level(batch.log_prob, level, batch.unit_mask, steps),
            advantage=spread(batch.advantage, level, steps),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            mask=mask_at_level(batch.unit_mask, level, steps),
            denominator=counts["policy"],
            aggregation=self.aggregation,
        )
        value_part, value_metrics = value_loss(
            value=evaluation.value.float(),
            returns=batch.returns,
            old_value=batch.value,
            clip=config.value_clip,
            mask=batch.value_mask,
            denominator=counts["value"],
        )
        entropy = at_level(evaluation.entropy.float(), "chunk", batch.unit_mask, steps)
        entropy_part, entropy_metrics = entropy_bonus(entropy=entropy, denominator=counts["rows"])
        loss = policy_part + config.value_coef * value_part + config.entropy_coef * entropy_part
        return loss, {**metrics, **value_metrics, **entropy_metrics}


class PolicyUpdater(AutogradUpdater):
    """Any `Policy`. Implements `Updater`.

    A minibatch is stepped on in parts of ``micro_batch_size`` rows whose sums are divided by the counts of the whole minibatch: the
    gradient is that of one pass, up to rounding. With precision=bfloat16 matrix products run in bfloat16; weights, sums, probabilities
    and Adam's state stay float32.
    """

    def __init__(self, policy: Policy, config: AlgorithmConfig, device: torch.device, precision: Precision = "float32") -> None:
        super().__init__(policy, config, device)  # type: ignore[arg-type]
        self.optimizer = torch.optim.Adam(
            parameter_groups(policy, config), lr=config.learning_rate, betas=BETAS, eps=config.adam_eps, fused=True
        )
        self.precision = precision
        self.objective = PolicyObjective(policy, config, device, precision)
        self.layout, self.steps = self.objective.layout, self.objective.steps

    def begin(self, batch: Batch) -> None:
        self._batch = moved(batch, self.device)

    def epoch(self, minibatches: Minibatches, learning_rate: float) -> np.ndarray:
        assert self._batch is not None, "begin comes first"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["scale"]
        rows = torch.from_numpy(minibatches.permutation).to(self.device)
        metrics = np.empty((len(minibatches.bounds), len(METRICS)))
        for index, (start, stop) in enumerate(minibatches.bounds):
            metrics[index] = self._step(chosen_rows(self._batch, rows[start:stop]), minibatches.permutation[start:stop])
        return metrics

    def _step(self, batch: Batch, rows: np.ndarray) -> list[float]:
        self.optimizer.zero_grad(set_to_none=True)
        total, metrics = self.accumulate(batch)
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        *figures, loss = torch.stack([*(metrics[name] for name in METRICS), total]).tolist()
        raise_if_not_finite(loss, figures[-1], rows)
        self.optimizer.step()
        return figures

    def accumulate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of a minibatch to the parameters', part by part; the loss and metrics of the whole."""
        batch = self._with_advantages(batch)
        counts = self.objective.counts(batch)
        size = self.config.micro_batch_size or batch.num_rows
        total = torch.zeros((), device=self.device)
        sums: dict[str, Tensor] = {}
        for start in range(0, batch.num_rows, size):
            part = chosen_rows(batch, torch.arange(start, min(start + size, batch.num_rows), device=self.device))
            loss, metrics = self.objective(self.policy, part, counts)
            loss.backward()
            total += loss.detach()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return total, sums

    def _with_advantages(self, batch: Batch) -> Batch:
        return batch if self.config.normalize_advantage != "minibatch" else whitened(batch)

    @torch.no_grad()
    def values(self, observation: dict[str, Any]) -> np.ndarray:
        """[B] float32, or [B, K] of a policy with a value for each action, of the simulator's observations."""
        return self.prepared_values(prepare_observation(self.policy, observation))

    @torch.no_grad()
    def prepared_values(self, ready: dict[str, Tensor]) -> np.ndarray:
        """The same of prepared observations."""
        num_rows, size = len(next(iter(ready.values()))), self.config.micro_batch_size or ROWS
        parts = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            for start in range(0, num_rows, size):
                part = {key: tensor[start : start + size].to(self.device) for key, tensor in ready.items()}
                parts.append(self.policy.value(part).float().cpu().numpy())
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def whitened(batch: Batch) -> Batch:
    """The batch with advantages of mean 0 and deviation 1."""
    mask = None if batch.value_mask is None else batch.value_mask.cpu()
    return batch.replaced(advantage=whiten(batch.advantage.cpu().contiguous(), mask).to(batch.advantage.device))


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return batch.mapped(lambda tensor: tensor.to(device, non_blocking=True))


def chosen_rows(batch: Batch, rows: Tensor) -> Batch:
    """The named rows [n] of a batch."""
    return batch.mapped(lambda tensor: tensor.index_select(0, rows))
