"""What the learner asks of its inner loop, and the general implementation: autograd, any policy, any device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import entropy_bonus, ppo_clip_loss, value_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.errors import NonFiniteError
from embodied_rl.policies.actor_critic import ActorCritic

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Columns of what `Updater.epoch` returns."""
BETAS = (0.9, 0.999)
"""Adam's."""
VALUE_ROWS = 4096
"""Rows of one forward of `AutogradUpdater.values` at most: bounds the memory that images take."""
VALUE_ROWS_STEP = 256
"""Forwards are filled up to a multiple of this: a CPU's convolutions keep buffers for every number of rows they ever see."""


class NonFiniteLossError(NonFiniteError):
    """A minibatch whose loss or gradient is NaN or infinite; the parameters were not stepped with it."""

    def __init__(self, message: str, rows: np.ndarray) -> None:
        super().__init__(message)
        self.rows = rows
        """[n] int64 rows of the batch that made up the minibatch."""
        self.batch: dict[str, np.ndarray] = {}
        """The minibatch: ``action``, ``log_prob``, ``advantage``, ``returns``, ``value`` and ``observation.<key>``."""


@dataclass(frozen=True)
class Minibatches:
    """One epoch: a permutation of the rows, cut into nearly equal parts."""

    permutation: np.ndarray
    """[B] int64"""
    bounds: list[tuple[int, int]]
    """Half-open ranges of the permutation."""

    @staticmethod
    def shuffle(generator: np.random.Generator, num_rows: int, minibatch_size: int) -> Minibatches:
        """As few parts as keep each within `minibatch_size`; sizes differ by one at most, so that no tiny rest is stepped on."""
        edges = np.linspace(0, num_rows, -(-num_rows // minibatch_size) + 1).astype(np.int64).tolist()
        return Minibatches(generator.permutation(num_rows), list(itertools.pairwise(edges)))


class Updater(Protocol):
    """Owns the optimizer; steps the policy through minibatches."""

    def begin(self, batch: Batch) -> None:
        """Take the rows of one update; observation statistics do not change until the next `begin`."""
        ...

    def epoch(self, minibatches: Minibatches, learning_rate: float) -> np.ndarray:
        """Step once per minibatch; [M, len(METRICS)] float64. Raises NonFiniteLossError before a step that would spoil the parameters."""
        ...

    def values(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """[B] float32 state values of [B, ...] observations."""
        ...

    def state_tensors(self) -> dict[str, Tensor]: ...

    def load_state_tensors(self, state: dict[str, Tensor]) -> None: ...


class AutogradUpdater:
    """Any `Policy` on any device."""

    def __init__(self, policy: ActorCritic, config: AlgorithmConfig, device: torch.device) -> None:
        self.policy = policy
        self.config = config
        self.device = device
        self.parameters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        # One fused kernel over all parameters instead of a dozen operations each; it exists for CPU and CUDA.
        trained = list(self.parameters.values())
        self.optimizer = torch.optim.Adam(trained, lr=config.learning_rate, betas=BETAS, eps=config.adam_eps, fused=True)
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        def move(x: Tensor) -> Tensor:
            return x.to(self.device, non_blocking=True)

        self._batch = Batch(
            {key: move(batch.observation[key]) for key in self.policy.observation_keys},
            *(move(x) for x in (batch.action, batch.log_prob, batch.advantage, batch.returns, batch.value)),
        )

    def epoch(self, minibatches: Minibatches, learning_rate: float) -> np.ndarray:
        assert self._batch is not None, "begin comes first"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        rows = torch.from_numpy(minibatches.permutation).to(self.device)
        metrics = np.empty((len(minibatches.bounds), len(METRICS)))
        for index, (start, stop) in enumerate(minibatches.bounds):
            metrics[index] = self._step(select_rows(self._batch, rows[start:stop]), minibatches.permutation[start:stop])
        return metrics

    def _step(self, batch: Batch, rows: np.ndarray) -> list[float]:
        config = self.config
        loss, metrics = ppo_objective(self.policy, batch, config)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        # One transfer for all numbers; it also tells whether this step may be taken.
        *figures, loss_value = torch.stack([*(metrics[name] for name in METRICS), loss.detach()]).tolist()
        raise_if_not_finite(loss_value, figures[-1], rows)
        self.optimizer.step()
        return figures

    @torch.no_grad()
    def values(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        num_rows = len(next(iter(observation.values())))
        parts = []
        for start in range(0, num_rows, VALUE_ROWS):
            part = {key: array[start : start + VALUE_ROWS] for key, array in observation.items()}
            size = len(next(iter(part.values())))
            padded = {key: torch.from_numpy(_fill_up(array, -size % VALUE_ROWS_STEP)).to(self.device) for key, array in part.items()}
            parts.append(self.policy.value(padded).float().cpu().numpy()[:size])
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def state_tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        step = torch.zeros((), dtype=torch.int64)
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state.get(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{name}"] = entry[key].detach().cpu().clone() if entry else torch.zeros(parameter.shape, dtype=parameter.dtype)
            if entry:  # parameters that the loss does not touch stay behind
                step = torch.maximum(step, entry["step"].detach().cpu().to(torch.int64))
        return {"step": step, **state}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                # The fused kernel keeps its step count beside the parameters, as float32.
                "step": state["step"].to(parameter.device, torch.float32).clone(),
                **{key: state[f"{key}.{name}"].to(parameter.device, copy=True) for key in ("exp_avg", "exp_avg_sq")},
            }


def _fill_up(array: np.ndarray, num_rows: int) -> np.ndarray:
    """`array` with `num_rows` further rows, copies of its first."""
    return np.concatenate([array, np.repeat(array[:1], num_rows, axis=0)]) if num_rows else array


def ppo_objective(policy: ActorCritic, batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of one minibatch, with metrics; probabilities of a row are the product over its action units."""
    evaluation = policy.evaluate(batch.observation, batch.action)
    advantage = batch.advantage
    if config.normalize_advantage == "minibatch":
        advantage = torch.from_numpy(whiten(advantage.cpu().numpy())).to(advantage.device)
    policy_part, metrics = ppo_clip_loss(
        log_prob=evaluation.log_prob.sum(-1),
        old_log_prob=batch.log_prob.sum(-1),
        advantage=advantage,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    value_part, value_metrics = value_loss(value=evaluation.value, returns=batch.returns, old_value=batch.value, clip=config.value_clip)
    entropy_part, entropy_metrics = entropy_bonus(entropy=evaluation.entropy.sum(-1))
    loss = policy_part + config.value_coef * value_part + config.entropy_coef * entropy_part
    return loss, {**metrics, **value_metrics, **entropy_metrics}


def raise_if_not_finite(loss: float, grad_norm: float, rows: np.ndarray) -> None:
    if not (np.isfinite(loss) and np.isfinite(grad_norm)):
        raise NonFiniteLossError(f"The PPO loss is {loss} and its gradient's norm {grad_norm} on a minibatch of {len(rows)} rows.", rows)


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """The named rows [n] of a batch, as a batch without a mask."""
    return Batch(
        {key: x.index_select(0, rows) for key, x in batch.observation.items()},
        *(x.index_select(0, rows) for x in (batch.action, batch.log_prob, batch.advantage, batch.returns, batch.value)),
    )
