"""Losses on rows of tokens: what a language agent's batch is, and the loss and metrics of a part of it.

Shapes: R rows of at most S tokens; an entry is a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.composition import Composition
from embodied_rl.algorithms.losses import behaviour_cloning_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid.loss_terms import Divisors, LossTerms
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens with what losses read of them; entries are 0 where `mask` is False."""

    sequences: tuple[TokenSequence, ...]
    mask: Tensor
    """[R, S] bool: sampled tokens that are learned from."""
    advantage: Tensor
    """[R, S]"""
    behaviour_log_prob: Tensor
    """[R, S] under the policy that sampled."""
    chunk_id: Tensor
    """[R, S] int64 number of the turn in its episode."""
    positive: Tensor
    """[R] bool: rows of episodes that succeeded."""

    @property
    def num_rows(self) -> int:
        """R"""
        return len(self.sequences)


@dataclass(frozen=True)
class ReferenceLogProbs:
    """What is computed once before an update's first step."""

    present: Tensor | None
    """[R, S] under the policy as it is; None: neither the loss nor a KL term needs it."""
    reference: Tensor | None
    """[R, S] under the policy that the run began with; None: there is no KL term."""


class TokenObjective:
    """Any loss of the table on some rows of a minibatch, divided by the whole minibatch's count: parts add up, metrics too."""

    def __init__(self, config: AlgorithmConfig, composition: Composition, device: torch.device) -> None:
        self.device = device
        self._terms = LossTerms(config, composition.loss)
        self.aggregation = self._terms.aggregation

    def __call__(
        self, policy: LanguagePolicy, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: Tensor, denominator: Tensor, kl_coef: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of the rows [n] of a batch."""
        sequences = [batch.sequences[int(row)] for row in rows]
        evaluation = policy.evaluate(sequences)
        inputs, mask = self._inputs(batch, log_probs, rows, evaluation.log_prob.shape[1])
        divisors = Divisors(loss=denominator)
        log_prob, entropy = evaluation.log_prob, evaluation.entropy
        return self._terms(inputs, log_prob=log_prob, entropy=entropy, mask=mask, divisors=divisors, kl_coef=kl_coef)

    def _inputs(self, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: Tensor, width: int) -> tuple[dict[str, Tensor], Tensor]:
        """{name: [n, width] or [n]} that losses ask for by name, and the mask."""
        entries = {
            "advantage": batch.advantage,
            "behaviour_log_prob": batch.behaviour_log_prob,
            "chunk_id": batch.chunk_id,
            "old_log_prob": log_probs.present,
            "proximal_log_prob": log_probs.present,
            "reference_log_prob": log_probs.reference,
        }
        chosen = {name: value[rows, :width].to(self.device) for name, value in entries.items() if value is not None}
        return {**chosen, "positive": batch.positive[rows].to(self.device)}, batch.mask[rows, :width].to(self.device)


def cloning_objective(policy: LanguagePolicy, batch: TokenBatch, rows: Tensor, count: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the tokens that `batch.mask` names, in the rows [n], divided by `count`."""
    evaluation = policy.evaluate([batch.sequences[int(row)] for row in rows])
    mask = batch.mask[rows, : evaluation.log_prob.shape[1]].to(evaluation.log_prob.device)
    return behaviour_cloning_loss(log_prob=evaluation.log_prob, mask=mask, denominator=count)
