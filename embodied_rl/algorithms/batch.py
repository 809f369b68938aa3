"""Rows that the learner trains on; a minibatch is a part of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


class Rows(ABC):
    """Rows of one kind: decisions (`Batch`), stored steps, whole episodes, or texts of tokens. Each is a data class of tensors [B, ...],
    some of which may be None, and of dictionaries of them."""

    of_all: ClassVar[frozenset[str]] = frozenset()
    """Fields without a dimension B, which belong to all rows together."""

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of all tensors."""

    @abstractmethod
    def filler(self) -> Self:
        """The first row, masked so that it counts in no sum. Ranks without rows of their own step on it."""

    @property
    def counts(self) -> Tensor | None:
        """[n] bool on the host: rows that count; None: all do."""
        return None

    def counted(self) -> Self:
        """The rows that count."""
        counts = self.counts
        return self if counts is None or bool(counts.all()) else self.chosen(counts.nonzero().squeeze(-1))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the rows of several domains, padded to the longest."""
        raise NotImplementedError

    def without_advantages(self) -> Self:
        """Set all advantages to 0: only the critic learns."""
        raise NotImplementedError

    def replaced(self, **changes: Tensor | None) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self.of_tensors({name: tensor if name in self.of_all else change(tensor) for name, tensor in self.tensors().items()})

    def chosen(self, rows: Tensor) -> Self:
        """The rows with these numbers [n], a tensor on the host."""
        numbers = rows.to(self.device, non_blocking=True)
        return self.mapped(lambda tensor: tensor.index_select(0, numbers))

    def moved(self, device: torch.device) -> Self:
        """Move the rows to a device for one forward; rows that the policy itself moves stay on the host."""
        if self.device == device:
            return self
        return self.of_tensors({name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()})

    def staged(self, device: torch.device) -> Self:
        """Place the rows of a whole update: on the device if they are small, on the host if they are moved part by part."""
        return self.moved(device)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None under flat names (``observation.<key>``), for other processes and for files."""
        found: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, dict):
                found |= {f"{name}.{key}": part for key, part in value.items()}
        return found

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`."""
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        fields: dict[str, Any] = {}
        for name, tensor in tensors.items():
            own, _, key = name.partition(".")
            if name in known:
                fields[name] = tensor
            else:
                fields.setdefault(own, {})[key] = tensor
        return cls(**fields)


@dataclass(frozen=True)
class Batch(Rows):
    """Transitions of one or more rollouts as flat rows (B = T·N, time-major)."""

    observation: dict[str, Tensor]
    """{key: [B, ...]}"""
    action: Tensor
    """[B, A] as the policy sampled it."""
    log_prob: Tensor
    """[B, L] log-probabilities under the policy that acted."""
    advantage: Tensor
    """[B] whitened if the algorithm is configured so."""
    returns: Tensor
    """[B] target of the value function: advantage before whitening + value."""
    value: Tensor
    """[B] value that the returns were computed with."""
    unit_mask: Tensor | None = None
    """[B, L] bool: action units whose step of the chunk was executed; None: all units."""
    value_mask: Tensor | None = None
    """[B, K] bool: executed steps of chunks, if advantage, returns and value are [B, K], one number per step; else None."""
    reference_log_prob: Tensor | None = None
    """[B, L] log-probabilities under the policy that the run started with; None: the loss does not use them."""

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        if len(parts) == 1:
            return parts[0]
        found = [part.tensors() for part in parts]
        return cls.of_tensors({name: torch.cat([tensors[name] for tensors in found]) for name in found[0]})

    def without_advantages(self) -> Batch:
        return self.replaced(advantage=torch.zeros_like(self.advantage))

    @property
    def num_rows(self) -> int:
        return int(self.advantage.shape[0])

    @property
    def device(self) -> torch.device:
        return self.advantage.device

    def filler(self) -> Batch:
        first = self.mapped(lambda tensor: tensor[:1])
        return first.replaced(
            unit_mask=torch.zeros_like(first.log_prob, dtype=torch.bool), value_mask=torch.zeros_like(first.returns, dtype=torch.bool)
        )
