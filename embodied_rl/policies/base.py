"""What every policy is: actions with log-probabilities out of observations, and the same log-probabilities again for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied_rl.types import SimSpec

TensorObservation = dict[str, Tensor]
"""{key: [B, ...]}"""


@dataclass(frozen=True)
class ActionOutput:
    """What `Policy.act` returns."""

    action: Tensor
    """[B, A] normalised, unclipped; int64 [B, 1] for discrete actions."""
    log_prob: Tensor
    """[B, L] log-probability of each action unit."""
    value: Tensor | None = None
    """[B] where the policy computes it on the way; None where the learner computes it in one batch afterwards."""


@dataclass(frozen=True)
class Evaluation:
    """What `Policy.evaluate` returns; all with gradients."""

    log_prob: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, L]"""
    value: Tensor
    """[B]"""


class Policy(Protocol):
    """A torch module that acts. `evaluate` on what `act` produced gives the same log-probabilities."""

    spec: SimSpec

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        """Sample with the given noise (standard normal [B, A], or uniform [B, 1] for discrete); None acts deterministically (mode)."""
        ...

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation: ...

    def value(self, observation: TensorObservation) -> Tensor:
        """[B] state values."""
        ...

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold a rollout's observations into the normalisation statistics."""
        ...

    def parameters(self) -> Any: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> Any: ...

    def train(self, mode: bool = True) -> torch.nn.Module: ...
