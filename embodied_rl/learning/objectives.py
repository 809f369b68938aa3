"""Objectives: rows of a minibatch and its counts in, loss and metrics out.

`PolicyLoss` combines a loss of the table, the entropy bonus, the critic's error and the KL term, once for all objectives. An objective
defines its rows: decisions of rollouts, whole episodes, texts of tokens, recorded actions. Every sum is divided by a count of the whole
minibatch, so that the losses and metrics of its parts add up, on one device or on many ranks.

Shapes: n rows; E entries of a row (decisions, action units or tokens); D decisions, each with one value and one entropy.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, masked_mean
from embodied_rl.algorithms.batch import Batch, Rows
from embodied_rl.algorithms.composition import method_options
from embodied_rl.algorithms.kl import kl_estimate, kl_loss
from embodied_rl.algorithms.loss_table import loss_info
from embodied_rl.algorithms.losses import entropy_bonus, explained_variance, value_loss
from embodied_rl.algorithms.units import at_level, mask_at_level, spread, unit_steps
from embodied_rl.config import AlgorithmConfig
from embodied_rl.policies.base import Evaluation, Policy, TrainedModule

Metrics = dict[str, Tensor]
Numbers = dict[str, float]
"""Numbers of a whole minibatch: the denominators of its sums (``entries``, ``decisions``, ``values``, ``ratios``), and the present
``kl_coef``."""
Precision = Literal["float32", "bfloat16"]
AnyRows = TypeVar("AnyRows", bound=Rows)
Trained = TypeVar("Trained", bound=TrainedModule)


@dataclass(frozen=True)
class Part:
    """One rank's part of a minibatch."""

    rows: np.ndarray
    """[m] int64 rows of the minibatch."""
    micro: list[list[int]]
    """Positions in `rows` of each micro-batch, equally many on every rank; -1 is padding and does not count."""


@dataclass(frozen=True)
class Terms:
    """Results of one forward for some rows. A mask of None: all entries count."""

    log_prob: Tensor
    """[n, E] or [n]"""
    mask: Tensor | None
    """Same shape as `log_prob`."""
    entropy: Tensor
    """[n, D], [n] or the shape of `log_prob`"""
    entropy_mask: Tensor | None
    value: Tensor | None = None
    """[n, D] or [n]; None: there is no critic."""
    value_mask: Tensor | None = None


class PolicyLoss:
    """A loss of the table with the terms added to it: entropy, the critic's error and KL."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.info = config, loss_info(config.loss)
        self.aggregation = Aggregation(config.aggregation or self.info.default_aggregation, config.horizon)  # type: ignore[arg-type]
        self._options: dict[str, Any] = method_options(self.info, config.loss_options, config)
        self.needs_present = "old_log_prob" in self.info.inputs or config.correction.enabled

    def __call__(self, inputs: Mapping[str, Tensor], terms: Terms, numbers: Numbers) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            inputs: {name: [n, E], [n, D] or [n]} that losses request by name; ``returns`` and ``value`` if there is a critic,
                ``reference_log_prob`` if there is a KL term.
            numbers: ``entries`` divides the loss and the KL term, ``decisions`` the entropy (absent: aggregated as the loss),
                ``values`` the critic's error, ``ratios`` ``approx_kl`` (absent: the aggregation's mean).
        """
        config = self.config
        shared: dict[str, Any] = {"mask": terms.mask, "aggregation": self.aggregation, "denominator": numbers["entries"]}
        own = {"aggregation": TOKEN_MEAN, "denominator": numbers["decisions"]} if "decisions" in numbers else shared
        loss, metrics = self.info.load()(**{**self.info.taken(inputs), "log_prob": terms.log_prob}, **self._options, **shared)
        entropy_part, entropy_metrics = entropy_bonus(entropy=terms.entropy, **{**own, "mask": terms.entropy_mask})
        total, metrics = loss + config.entropy_coef * entropy_part, {**metrics, **entropy_metrics}
        if terms.value is not None:
            value_part, value_metrics = value_loss(
                value=terms.value,
                returns=inputs["returns"],
                old_value=inputs["value"],
                clip=config.value_clip,
                kind=config.value_loss,
                huber_delta=config.huber_delta,
                mask=terms.value_mask,
                denominator=numbers["values"],
            )
            total, metrics = total + config.value_coef * value_part, {**metrics, **value_metrics}
        if "reference_log_prob" in inputs and config.kl.place == "loss":
            reference = inputs["reference_log_prob"]
            kl_part, kl_metrics = kl_loss(
                log_prob=terms.log_prob,
                reference_log_prob=reference,
                kind=config.kl.kind,
                straight_through=config.kl.straight_through,
                **shared,
            )
            total, metrics = total + numbers["kl_coef"] * kl_part, {**metrics, **kl_metrics}
        if "ratios" in numbers or "approx_kl" not in metrics:
            metrics["approx_kl"] = self._approx_kl(inputs, terms, numbers)
        return total, metrics

    @torch.no_grad()
    def _approx_kl(self, inputs: Mapping[str, Tensor], terms: Terms, numbers: Numbers) -> Tensor:
        before = inputs["old_log_prob"] if "old_log_prob" in inputs else inputs["behaviour_log_prob"]
        moved = kl_estimate(log_prob=before, reference_log_prob=terms.log_prob, kind="k3")
        if "ratios" in numbers:
            return masked_mean(moved, terms.mask, numbers["ratios"])
        return self.aggregation.mean(moved, terms.mask, numbers["entries"])


class Objective(ABC, Generic[Trained, AnyRows]):
    """A loss on rows of one kind, the same on every rank. Each call is given the `policy`, because a rank holds only a part of it."""

    name: ClassVar[str]
    """Name under which ranks know the objective."""
    unit: ClassVar[str]
    """Name of a row, for messages."""
    what: ClassVar[str] = ""
    """Name of what is minimised, for messages; empty: the loss of the table."""
    rows: type[AnyRows]
    shows_loss: ClassVar[bool] = False
    """Whether an update's metrics show ``loss``."""
    groups: ClassVar[tuple[str, ...]] = ("",)
    """Groups of `TrainedModule.parameter_groups` that its steps change."""
    frees_gradients: ClassVar[bool] = False
    """Whether gradients are freed after a step instead of before the next: a language model's take as much memory as the model."""

    needs_present: bool = False
    """Whether the loss reads log-probabilities of the policy at the start of the update."""

    def __init__(self, policy: Trained, config: AlgorithmConfig, precision: Precision = "float32") -> None:
        """`policy`: gives the layout of decisions; the policy to evaluate comes with each call."""
        self.config, self.precision = config, precision

    def begin(self, rows: AnyRows, *, kl_coef: float) -> tuple[AnyRows, Numbers]:
        """Prepare a whole minibatch for the evaluation of its parts; return it with its numbers."""
        return rows, {"kl_coef": kl_coef}

    @abstractmethod
    def __call__(self, policy: Trained, rows: AnyRows, numbers: Numbers) -> tuple[Tensor, Metrics]:
        """Contribution of these rows to the loss and metrics of their minibatch."""

    def evaluate(self, policy: Trained, observation: dict[str, Tensor], action: Tensor) -> Evaluation:
        """Evaluate a policy on decisions; for tokens of a language policy see `LanguagePolicy.evaluate`."""
        raise NotImplementedError(f"{type(self).__name__} evaluates no decisions")

    def stepped(self, policy: Trained) -> None:
        """Called after each step, on every rank."""

    def divide(self, policy: Trained, rows: AnyRows, num_parts: int, size: int | None) -> list[Part]:
        """Divide a minibatch into one part per rank, in micro-batches of about `size` rows; None: each part is one micro-batch."""
        return divide(np.ones(rows.num_rows, np.int64), num_parts, size)

    def summary(self, rows: AnyRows, num_epochs: int, num_minibatches: int) -> dict[str, float]:
        """Metrics of an update beside the means over its minibatches."""
        return {"minibatches": float(num_minibatches)}


def divide(weights: np.ndarray, num_parts: int, size: int | None) -> list[Part]:
    """Divide consecutive rows into parts of nearly equal number, and micro-batches of about `size` by weight [n], at least a row each."""
    parts = []
    for start, stop in itertools.pairwise(np.linspace(0, len(weights), num_parts + 1).astype(np.int64).tolist()):
        if size is None:
            micro = [list(range(stop - start))] if stop > start else []
        else:
            own = weights[start:stop]
            place = (np.cumsum(own) - own) // size
            micro = [np.flatnonzero(place == number).tolist() for number in np.unique(place)]
        parts.append(Part(np.arange(start, stop), micro))
    return filled_up(parts)


def filled_up(parts: list[Part]) -> list[Part]:
    """Pad the parts to equally many micro-batches, because ranks gather parameters together."""
    most = max(len(part.micro) for part in parts)
    return [Part(part.rows, [*part.micro, *([[-1]] * (most - len(part.micro)))]) for part in parts]


class ActingObjective(Objective[Policy, AnyRows]):
    """Objective of a policy whose decisions consist of action units."""

    def __init__(self, policy: Policy, config: AlgorithmConfig, precision: Precision = "float32") -> None:
        super().__init__(policy, config, precision)
        self.loss, layout = PolicyLoss(config), policy.action_layout
        self.needs_present = self.loss.needs_present
        self._host_steps = unit_steps(layout.num_units, layout.chunk_size, max(policy.spec.action.dim, 1))
        self._steps: dict[torch.device, Tensor] = {}
        self.units = {"chunk": 1, "action": layout.chunk_size, "token": layout.num_units}[config.ratio]
        """U: entries of a decision."""

    def steps(self, device: torch.device) -> Tensor:
        """[L] step of the chunk that each action unit belongs to; kept on each device, so that a step copies nothing."""
        if device not in self._steps:
            self._steps[device] = self._host_steps.to(device)
        return self._steps[device]

    def evaluate(self, policy: Policy, observation: dict[str, Tensor], action: Tensor) -> Evaluation:
        """Evaluate in the configured precision; the result is float32."""
        with torch.autocast(action.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            found = policy.evaluate(observation, action)
        return Evaluation(found.log_prob.float(), found.entropy.float(), found.value.float())


class RolloutObjective(ActingObjective[Batch]):
    """PPO on decisions of rollouts; `algorithm.ratio` sets the unit of a ratio."""

    name, unit, rows = "rollouts", "rows", Batch

    def begin(self, rows: Batch, *, kl_coef: float) -> tuple[Batch, Numbers]:
        """See `Objective.begin`; whitens the advantages if the algorithm does so by minibatch."""
        if self.config.normalize_advantage == "minibatch":
            rows = rows.replaced(advantage=whiten(rows.advantage, rows.value_mask))
        mask = mask_at_level(rows.unit_mask, self.config.ratio, self.steps(rows.advantage.device))
        aggregation, each = self.loss.aggregation, self.units if self.loss.aggregation.mode == "token-mean" else 1
        entries = rows.num_rows * each if mask is None else int(aggregation.count(mask).clamp(min=1))
        values = rows.returns.numel() if rows.value_mask is None else int(rows.value_mask.sum().clamp(min=1))
        return rows, {"entries": float(entries), "values": float(values), "decisions": float(rows.num_rows), "kl_coef": kl_coef}

    def __call__(self, policy: Policy, rows: Batch, numbers: Numbers) -> tuple[Tensor, Metrics]:
        level, steps, units = self.config.ratio, self.steps(rows.action.device), rows.unit_mask
        found = self.evaluate(policy, rows.observation, rows.action)
        inputs = {
            "old_log_prob": at_level(rows.log_prob, level, units, steps),
            "advantage": spread(rows.advantage, level, steps),
            "returns": rows.returns,
            "value": rows.value,
        }
        if rows.reference_log_prob is not None:
            inputs["reference_log_prob"] = at_level(rows.reference_log_prob, level, units, steps)
        terms = Terms(
            log_prob=at_level(found.log_prob, level, units, steps),
            mask=mask_at_level(units, level, steps),
            entropy=at_level(found.entropy, "chunk", units, steps),
            entropy_mask=None,
            value=found.value,
            value_mask=rows.value_mask,
        )
        loss, metrics = self.loss(inputs, terms, numbers)
        metrics.pop("value_clip_fraction", None)  # the hand-derived gradients do not count it
        return loss, metrics

    def summary(self, rows: Batch, num_epochs: int, num_minibatches: int) -> dict[str, float]:
        there = slice(None) if rows.value_mask is None else rows.value_mask
        explained = explained_variance(value=rows.value[there], returns=rows.returns[there])
        return {"explained_variance": explained, "epochs_done": float(num_epochs)}
