"""Objectives on whole episodes: decisions of robots, and tokens of language agents. See `objectives`.

Shapes: M executed steps of B episodes of up to T; L action units of a decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.episode_method import Credit, EpisodeBatch
from embodied_rl.algorithms.losses import behaviour_cloning_loss, explained_variance
from embodied_rl.algorithms.units import Level, at_level, mask_at_level, spread
from embodied_rl.config import AlgorithmConfig
from embodied_rl.learning import objectives
from embodied_rl.learning.rows import VALUED, EpisodeRows, TokenBatch
from embodied_rl.policies.base import Policy

if TYPE_CHECKING:
    from embodied_rl.policies.language import LanguagePolicy

_HOST = torch.device("cpu")


class EpisodeObjective(objectives.ActingObjective[EpisodeRows]):
    """Any loss of the table on whole episodes; steps that were not executed are masked."""

    name, unit, rows = "episodes", "episodes", EpisodeRows

    def of_decisions(self, batch: EpisodeBatch, log_prob: Tensor | None, level: Level = "chunk") -> Tensor | None:
        """Sum values of action units, such as log-probabilities [M, L], over whole decisions → [B, T], or over each of their steps (`level`
        action) → [B, T, K]."""
        return None if log_prob is None else batch.scatter(at_level(log_prob, level, batch.unit_mask, self.steps(_HOST)))

    def rows_of(self, batch: EpisodeBatch, credit: Credit, present: Tensor | None, reference: Tensor | None) -> EpisodeRows:
        """Episodes with the inputs that losses request by name. `present`, `reference`: [M, L] log-probabilities of the policy at the start
        of the update, and of the first one; None: not needed."""
        columns = torch.arange(batch.shape[1]).expand(batch.shape)
        of_decisions = {"advantage": credit.advantage, "chunk_id": columns, "mask": credit.mask}
        inputs = {"positive": credit.positive, "value": credit.value, "decisions": credit.mask}
        if credit.executed is not None:
            of_steps = of_decisions.pop("advantage").reshape(batch.mask.numel(), -1)
            inputs["advantage"] = spread(of_steps, self.config.ratio, self.steps(_HOST)).reshape(len(batch.mask), -1)
            inputs[VALUED] = credit.executed
        inputs |= {name: value.repeat_interleave(self.units, dim=1) for name, value in of_decisions.items()}
        if credit.returns is not None:
            inputs["returns"] = credit.returns

        log_probs = {"old_log_prob": present, "reference_log_prob": reference}
        if self.config.ratio == "chunk":
            inputs["behaviour_log_prob"] = batch.behaviour_log_prob
        else:
            log_probs["behaviour_log_prob"] = batch.unit_log_prob
        for name, flat in log_probs.items():
            if flat is not None:
                inputs[name] = batch.scatter(at_level(flat, self.config.ratio, batch.unit_mask, self.steps(_HOST))).flatten(1)
        there = None if self.config.ratio == "chunk" else mask_at_level(batch.unit_mask, self.config.ratio, self.steps(_HOST))
        if there is not None:
            inputs["mask"] = inputs["mask"] & batch.scatter(there).flatten(1)
        return EpisodeRows(inputs, batch.observation, batch.action, batch.row, batch.column, batch.unit_mask)

    def begin(self, rows: EpisodeRows, *, kl_coef: float) -> tuple[EpisodeRows, objectives.Numbers]:
        mask, decisions = rows.inputs["mask"], float(rows.inputs["decisions"].sum().clamp(min=1))
        entries, ratios = float(self.loss.aggregation.count(mask).clamp(min=1)), float(mask.sum().clamp(min=1))
        values = float(_valued(rows).sum().clamp(min=1))
        return rows, {"entries": entries, "decisions": decisions, "values": values, "ratios": ratios, "kl_coef": kl_coef}

    def __call__(self, policy: Policy, rows: EpisodeRows, numbers: objectives.Numbers) -> tuple[Tensor, objectives.Metrics]:
        inputs, units, at = rows.inputs, rows.unit_mask, (rows.row, rows.column)
        decisions, steps = inputs["decisions"], self.steps(rows.action.device)
        found = self.evaluate(policy, rows.observation, rows.action)

        def scatter(flat: Tensor) -> Tensor:
            """[m] → [n, T], [m, U] → [n, T·U]."""
            shape = (*decisions.shape, *flat.shape[1:])
            return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put(at, flat).flatten(1)

        terms = objectives.Terms(
            log_prob=scatter(at_level(found.log_prob, self.config.ratio, units, steps)),
            mask=inputs["mask"],
            entropy=scatter(at_level(found.entropy, "chunk", units, steps)),
            entropy_mask=decisions,
            value=scatter(found.value) if "returns" in inputs else None,
            value_mask=_valued(rows),
        )
        return self.loss(inputs, terms, numbers)

    def divide(self, policy: Policy, rows: EpisodeRows, num_parts: int, size: int | None) -> list[objectives.Part]:
        """See `Objective.divide`; `size` counts decisions."""
        return objectives.divide(rows.inputs["decisions"].sum(1).numpy(), num_parts, size)

    def summary(self, rows: EpisodeRows, num_epochs: int, num_minibatches: int) -> dict[str, float]:
        inputs, found = rows.inputs, super().summary(rows, num_epochs, num_minibatches)
        if "returns" not in inputs:
            return found
        value, returns = (inputs[name][_valued(rows)] for name in ("value", "returns"))
        return {**found, "explained_variance": explained_variance(value=value, returns=returns)}


def _valued(rows: EpisodeRows) -> Tensor:
    """[B, T] or [B, T·K] bool: values that have a target."""
    return rows.inputs.get(VALUED, rows.inputs["decisions"])


class TokenObjective(objectives.Objective["LanguagePolicy", TokenBatch]):
    """Any loss of the table on texts of tokens; an entry is a token."""

    name, unit, rows, shows_loss, frees_gradients = "tokens", "rows of tokens", TokenBatch, True, True

    def __init__(self, policy: LanguagePolicy, config: AlgorithmConfig, precision: objectives.Precision = "float32") -> None:
        super().__init__(policy, config, precision)
        self.loss = objectives.PolicyLoss(config)
        self.needs_present = self.loss.needs_present

    def begin(self, rows: TokenBatch, *, kl_coef: float) -> tuple[TokenBatch, objectives.Numbers]:
        numbers = {"entries": float(self.loss.aggregation.count(rows.mask).clamp(min=1)), "kl_coef": kl_coef}
        return rows, numbers if rows.valued is None else {**numbers, "values": float(rows.valued.sum().clamp(min=1))}

    def __call__(self, policy: LanguagePolicy, rows: TokenBatch, numbers: objectives.Numbers) -> tuple[Tensor, objectives.Metrics]:
        found = policy.evaluate(list(rows.sequences))
        width, device = found.log_prob.shape[1], found.log_prob.device
        entries = {
            "advantage": rows.advantage,
            "behaviour_log_prob": rows.behaviour_log_prob,
            "chunk_id": rows.chunk_id,
            "old_log_prob": rows.present,
            "reference_log_prob": rows.reference,
            "returns": rows.returns,
            "value": rows.value,
        }
        inputs = {name: value[:, :width].to(device) for name, value in entries.items() if value is not None}
        mask = rows.mask[:, :width].to(device)
        critic = (None, None) if rows.valued is None else (found.value, rows.valued[:, :width].to(device))
        terms = objectives.Terms(found.log_prob, mask, found.entropy, mask, *critic)
        return self.loss({**inputs, "positive": rows.positive.to(device)}, terms, numbers)

    def divide(self, policy: LanguagePolicy, rows: TokenBatch, num_parts: int, size: int | None) -> list[objectives.Part]:
        """See `Objective.divide`; each micro-batch also fits one forward of the model (`LanguagePolicy.micro_batches`).

        Parts get about equally many tokens: the longest remaining row goes to the part with the fewest.
        """
        loads, owned = [0] * num_parts, [[] for _ in range(num_parts)]  # type: ignore[var-annotated]
        lengths = [len(sequence) for sequence in rows.sequences]
        for index in range(len(lengths)) if num_parts == 1 else sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
            part = loads.index(min(loads))
            loads[part] += lengths[index]
            owned[part].append(index)
        parts = []
        for own in owned:
            micro = policy.micro_batches([rows.sequences[row] for row in own]) if own else []
            most = size or max(len(own), 1)
            cut = [part[start : start + most] for part in micro for start in range(0, len(part), most)]
            parts.append(objectives.Part(np.array(own, np.int64), cut))
        return objectives.filled_up(parts)

    def summary(self, rows: TokenBatch, num_epochs: int, num_minibatches: int) -> dict[str, float]:
        """See `Objective.summary`; ``log_prob_difference``: difference between the generator's and the trainer's log-probabilities."""
        found = {**super().summary(rows, num_epochs, num_minibatches), "tokens": float(rows.mask.sum())}
        if rows.valued is not None and rows.value is not None and rows.returns is not None:
            found["explained_variance"] = explained_variance(value=rows.value[rows.valued], returns=rows.returns[rows.valued])
        if rows.present is None or rows.present is rows.behaviour_log_prob:
            return found
        difference = (rows.present - rows.behaviour_log_prob).abs()[rows.mask]
        return {**found, "log_prob_difference": float(difference.mean()) if len(difference) else 0.0}


class TokenCloning(TokenObjective):
    """Cross-entropy of the masked tokens."""

    name, what = "token_cloning", "cross-entropy"

    def begin(self, rows: TokenBatch, *, kl_coef: float) -> tuple[TokenBatch, objectives.Numbers]:
        return rows, {"entries": float(rows.mask.sum())}

    def __call__(self, policy: LanguagePolicy, rows: TokenBatch, numbers: objectives.Numbers) -> tuple[Tensor, objectives.Metrics]:
        found = policy.evaluate(list(rows.sequences))
        mask = rows.mask[:, : found.log_prob.shape[1]].to(found.log_prob.device)
        return behaviour_cloning_loss(log_prob=found.log_prob, mask=mask, denominator=numbers["entries"])
