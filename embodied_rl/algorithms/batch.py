"""What the learner trains on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Transitions of one or more rollouts as flat rows (B = T·N, time-major)."""

    observation: dict[str, Tensor]
    """{key: [B, ...]}"""
    action: Tensor
    """[B, A] as the policy sampled it."""
    log_prob: Tensor
    """[B, L] under the policy that acted."""
    advantage: Tensor
    """[B] whitened where the algorithm says so; 0 where mask is False."""
    returns: Tensor
    """[B] target of the value function: advantage before whitening + value."""
    value: Tensor
    """[B] value that the returns were computed with."""
    mask: Tensor | None = None
    """[B] bool: rows that count; None: all."""

    @property
    def num_rows(self) -> int:
        return int(self.advantage.shape[0])
