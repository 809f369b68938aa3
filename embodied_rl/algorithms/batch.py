"""What the learner trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    unit_mask: Tensor | None = None
    """[B, L] bool: action units whose step of the chunk was executed; None: all."""
    value_mask: Tensor | None = None
    """[B, K] bool, where advantage, returns and value are [B, K], a number for each step of a chunk: those that were executed."""

    @property
    def num_rows(self) -> int:
        return int(self.advantage.shape[0])

    def replaced(self, **changes: Any) -> Batch:
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor changed."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "observation"}
        changed: dict[str, Any] = {name: None if tensor is None else change(tensor) for name, tensor in own.items()}
        return Batch({key: change(part) for key, part in self.observation.items()}, **changed)
