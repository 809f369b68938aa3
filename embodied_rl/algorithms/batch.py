"""What the learner trains on: rows, of which a minibatch is some."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_OBSERVATION = "observation."


class Rows(ABC):
    """Rows of one kind: decisions (`Batch`), whole episodes, or texts of tokens."""

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def chosen(self, rows: Tensor) -> Self:
        """The rows of these numbers [n], which lie on the host."""

    @abstractmethod
    def filler(self) -> Self:
        """The first row; it counts for nothing in any sum. Ranks without rows of their own step on it."""

    @abstractmethod
    def counted(self) -> Self:
        """Those rows that count for something."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything under flat names, for other processes and for files."""

    @classmethod
    @abstractmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """What `tensors` took apart."""

    def moved(self, device: torch.device) -> Self:
        """The same on a device, for one forward; rows that the policy itself moves stay where they are."""
        return self

    def staged(self, device: torch.device) -> Self:
        """As all rows of an update wait: on the device where they are small, on the host where they are moved part by part."""
        return self


@dataclass(frozen=True)
class Batch(Rows):
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
        return Batch.of_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def chosen(self, rows: Tensor) -> Batch:
        """See `Rows.chosen`."""
        numbers = rows.to(self.advantage.device, non_blocking=True)
        return self.mapped(lambda tensor: tensor.index_select(0, numbers))

    def filler(self) -> Batch:
        """See `Rows.filler`."""
        first = self.mapped(lambda tensor: tensor[:1])
        return first.replaced(
            unit_mask=torch.zeros_like(first.log_prob, dtype=torch.bool), value_mask=torch.zeros_like(first.returns, dtype=torch.bool)
        )

    def counted(self) -> Batch:
        """See `Rows.counted`: those that `mask` keeps."""
        if self.mask is None:
            return self
        return self.replaced(mask=None).chosen(self.mask.nonzero().squeeze(-1).cpu())

    def moved(self, device: torch.device) -> Batch:
        """See `Rows.moved`."""
        return self if self.action.device == device else self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def staged(self, device: torch.device) -> Batch:
        """See `Rows.staged`."""
        return self.moved(device)

    def tensors(self) -> dict[str, Tensor]:
        """See `Rows.tensors`: the fields that are there, and ``observation.<key>``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "observation"}
        named = {name: tensor for name, tensor in fields.items() if tensor is not None}
        return {**named, **{f"{_OBSERVATION}{key}": part for key, part in self.observation.items()}}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """See `Rows.of_tensors`."""
        fields: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OBSERVATION)}
        return cls({name.removeprefix(_OBSERVATION): part for name, part in tensors.items() if name.startswith(_OBSERVATION)}, **fields)
