"""What a step on groups of episodes adds up: a loss of the table, the entropy bonus, the critic's error, and the KL term.

Shapes: rows of E entries (action units or tokens) and of D decisions; a decision has one value and one entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation
from embodied_rl.algorithms.composition import method_options
from embodied_rl.algorithms.kl import kl_estimate, kl_loss
from embodied_rl.algorithms.loss_table import LossInfo
from embodied_rl.algorithms.losses import entropy_bonus, value_loss
from embodied_rl.algorithms.units import at_level
from embodied_rl.config import AlgorithmConfig
from embodied_rl.policies.base import Evaluation


@dataclass(frozen=True)
class Divisors:
    """What sums are divided by; None: by the counts of the masks that are given, which are then the whole minibatch's."""

    loss: float | Tensor | None = None
    """Of the loss and the KL term: the aggregation's count of the whole minibatch."""
    decisions: float | None = None
    """Of entropy and value."""
    entries: float | Tensor | None = None
    """Of ``approx_kl``; None: the mean that the aggregation gives."""


class LossTerms:
    """Any loss of the table on some rows of a minibatch: parts add up, metrics too, where `Divisors` are the whole's."""

    def __init__(self, config: AlgorithmConfig, info: LossInfo) -> None:
        self.config, self.info = config, info
        self.aggregation = Aggregation(config.aggregation or info.default_aggregation, config.horizon)  # type: ignore[arg-type]
        self._options: dict[str, Any] = method_options(info, config.loss_options, config)

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        *,
        log_prob: Tensor,
        entropy: Tensor,
        mask: Tensor,
        divisors: Divisors,
        kl_coef: float,
        decisions: Tensor | None = None,
        value: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics.

        Args:
            inputs: {name: [n, E], [n, D] or [n]} that losses ask for by name; ``returns`` and ``value`` where there is a critic,
                ``reference_log_prob`` where there is a KL term.
            log_prob, mask: [n, E]
            entropy, value: [n, D]
            decisions: [n, D] mask of these; None: they are entries, D = E, and entropy is aggregated as the loss is.
            kl_coef: present coefficient of a KL term in the loss.
        """
        config = self.config
        shared: dict[str, Any] = {"mask": mask, "aggregation": self.aggregation, "denominator": divisors.loss}
        of_decisions = shared
        if decisions is not None:
            of_decisions = {"mask": decisions, "aggregation": TOKEN_MEAN, "denominator": divisors.decisions}
        given = {name: inputs[name] for name in (*self.info.inputs, *self.info.optional_inputs) if name in inputs}
        loss, metrics = self.info.load()(**{**given, "log_prob": log_prob}, **self._options, **shared)
        entropy_part, entropy_metrics = entropy_bonus(entropy=entropy, **of_decisions)
        total, metrics = loss + config.entropy_coef * entropy_part, {**metrics, **entropy_metrics}
        if value is not None and "returns" in inputs:
            value_part, value_metrics = value_loss(
                value=value, returns=inputs["returns"], old_value=inputs["value"], clip=config.value_clip, **of_decisions
            )
            total, metrics = total + config.value_coef * value_part, {**metrics, **value_metrics}
        if "reference_log_prob" in inputs and config.kl.place == "loss":
            reference = inputs["reference_log_prob"]
            kl_part, kl_metrics = kl_loss(log_prob=log_prob, reference_log_prob=reference, kind=config.kl.kind, **shared)
            total, metrics = total + kl_coef * kl_part, {**metrics, **kl_metrics}
        with torch.no_grad():
            before = inputs.get("old_log_prob", inputs["behaviour_log_prob"])
            moved = kl_estimate(log_prob=before, reference_log_prob=log_prob, kind="k3")
            if divisors.entries is None:
                metrics["approx_kl"] = self.aggregation.mean(moved, mask, divisors.loss)
            else:
                metrics["approx_kl"] = torch.where(mask, moved, torch.zeros_like(moved)).sum() / divisors.entries
        return total, metrics

    def of_evaluation(
        self,
        part: Mapping[str, Tensor],
        evaluation: Evaluation,
        at: tuple[Tensor, Tensor],
        *,
        unit_mask: Tensor | None,
        steps: Tensor,
        divisors: Divisors,
        kl_coef: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of m decisions that a policy evaluated, on n episodes of at most T decisions.

        Args:
            part: the episodes' inputs, with ``mask`` [n, T·U] and ``decisions`` [n, T].
            evaluation: of the m decisions, in action units.
            at: (episode, decision) [m] each: where they belong.
            unit_mask: [m, L] of action units; None: all count.
            steps: [L] step of the chunk that each action unit belongs to.
        """
        decisions = part["decisions"]

        def scatter(flat: Tensor) -> Tensor:
            """[m] → [n, T], [m, U] → [n, T·U]."""
            shape = (*decisions.shape, *flat.shape[1:])
            return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put(at, flat).flatten(1)

        return self(
            part,
            log_prob=scatter(at_level(evaluation.log_prob.float(), self.config.ratio, unit_mask, steps)),
            entropy=scatter(at_level(evaluation.entropy.float(), "chunk", unit_mask, steps)),
            value=scatter(evaluation.value.float()) if "returns" in part else None,
            mask=part["mask"],
            decisions=decisions,
            divisors=divisors,
            kl_coef=kl_coef,
        )
