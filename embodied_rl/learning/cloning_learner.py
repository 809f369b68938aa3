"""Supervised learning of recorded actions: epochs, validation, and the weights that validated best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.losses import behaviour_cloning_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.episodes.transitions import Transitions
from embodied_rl.learning.devices import compute_threads, resolve_device
from embodied_rl.learning.executors import Figures, take_step
from embodied_rl.learning.learner import checked
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.policies.base import Policy, prepare_observation


class CloningLearner:
    """Fits a policy's actions to recorded ones with AdamW; the critic is left as it is."""

    def __init__(self, policy: Policy, config: AlgorithmConfig, device: str | torch.device = "cpu", num_threads: int | None = None) -> None:
        assert config.cloning is not None
        self.policy, self.config, self.options = policy, config, config.cloning
        self.device = resolve_device(device)
        policy.to(self.device)
        self.compute_threads = num_threads or 1
        self._optimizer = Optimizer(
            {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad},
            learning_rate=config.learning_rate,
            eps=config.adam_eps,
            max_grad_norm=config.max_grad_norm,
            weight_decay=self.options.weight_decay,
        )
        self.best_loss = math.inf
        """Lowest validation loss so far."""
        self._best: dict[str, Tensor] = {}

    def epoch(self, minibatches: Iterable[Transitions], learning_rate: float) -> dict[str, float]:
        """Step once for each minibatch; figures averaged over them, and their number as ``minibatches``.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite; the parameters were not stepped with it.
        """
        taken: list[Figures] = []
        with compute_threads(self.compute_threads):
            for batch in minibatches:
                figures = take_step(self.policy, self._optimizer, [lambda batch=batch: (self._loss(batch), {})], learning_rate)  # type: ignore[misc]
                taken.append(checked(figures, "cloning loss", "steps", np.arange(batch.num_rows), batch.arrays))
                limit_log_std(self.policy, self.options.min_log_std)
        loss, norm = (float(np.mean([figures[name] for figures in taken])) for name in ("loss", "grad_norm"))
        return {"imitation_loss": loss, "grad_norm": norm, "minibatches": float(len(taken))}

    @torch.no_grad()
    def validate(self, minibatches: Iterable[Transitions]) -> dict[str, float]:
        """``validation_loss``, and how far the policy's mode is from the recorded actions: ``validation_mae`` (normalised units), or
        ``validation_accuracy`` of choices; means over all rows. For policies with their own loss, only that."""
        discrete = self.policy.spec.action.kind == "discrete"
        total, away, rows = 0.0, 0.0, 0
        with compute_threads(self.compute_threads):
            for batch in minibatches:
                total += float(self._loss(batch)) * batch.num_rows
                rows += batch.num_rows
                if hasattr(self.policy, "cloning_loss"):
                    continue
                observation, action = self._tensors(batch)
                mode = self.policy.act(observation, None).action
                off = (mode == action).float() if discrete else (mode.clamp(-1.0, 1.0) - action).abs().mean(-1)
                away += float(off.sum())
        if hasattr(self.policy, "cloning_loss"):
            return {"validation_loss": total / rows}
        return {"validation_loss": total / rows, ("validation_accuracy" if discrete else "validation_mae"): away / rows}

    def keep_if_best(self, loss: float) -> bool:
        """Remember the present weights where no validation loss was lower."""
        if loss >= self.best_loss:
            return False
        self.best_loss = loss
        self._best = {name: value.detach().cpu().clone() for name, value in self.policy.state_dict().items()}
        return True

    def restore_best(self) -> None:
        """Go back to the weights that were remembered, if any were."""
        if self._best:
            self.policy.load_state_dict(self._best)

    def _loss(self, batch: Transitions) -> Tensor:
        observation, action = self._tensors(batch)
        own = getattr(self.policy, "cloning_loss", None)
        if own is not None:
            chunk = action if action.dim() == 3 else action[:, None]
            mask = None if batch.executed is None else torch.from_numpy(batch.executed).to(self.device)
            return own(observation, chunk, mask=mask).mean()
        if self.options.loss == "mse":
            return nn.functional.mse_loss(self.policy.act(observation, None).action, action)
        return behaviour_cloning_loss(log_prob=self.policy.evaluate(observation, action).log_prob.sum(-1))[0]

    def _tensors(self, batch: Transitions) -> tuple[dict[str, Tensor], Tensor]:
        observation = {key: part.to(self.device) for key, part in prepare_observation(self.policy, batch.observation).items()}
        return observation, torch.from_numpy(batch.action).to(self.device)

    def trained(self) -> list[Tensor]:
        """See `Executor.trained`."""
        return list(self.policy.parameters())

    def optimizer_tensors(self) -> list[Tensor]:
        """See `Executor.optimizer_tensors`."""
        return self._optimizer.tensors()

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state, and the best weights with their validation loss."""
        best = {f"best.{name}": value.clone() for name, value in self._best.items()}
        return {**self._optimizer.state_tensors(), **best, "best_loss": torch.tensor(self.best_loss, dtype=torch.float64)}

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly. Raises KeyError or ValueError when the state is another policy's."""
        self._best = {name.removeprefix("best."): value.clone() for name, value in state.items() if name.startswith("best.")}
        self.best_loss = float(state["best_loss"])
        self._optimizer.load_state_tensors(state)


@torch.no_grad()
def limit_log_std(policy: Policy, smallest: float) -> None:
    """Keep the log standard deviations of a Gaussian head above a bound: data without noise would drive them to minus infinity."""
    head = getattr(policy, "head", None)
    for name, parameter in () if head is None else head.named_parameters():
        if name.endswith("log_std"):
            parameter.clamp_(min=smallest)
