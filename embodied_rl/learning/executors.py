"""Executors take a step: the loss of a minibatch, its gradients, one step of the optimizer.

`LocalExecutor` computes with autograd in this process; `fused.FusedExecutor` uses hand-derived gradients for small networks;
`ranks.RankExecutor` takes each step on several ranks. All take the same steps up to the order of sums.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Rows
from embodied_rl.config import AlgorithmConfig
from embodied_rl.learning import fsdp
from embodied_rl.learning.devices import repeatable
from embodied_rl.learning.objectives import Metrics, Numbers, Objective, Precision
from embodied_rl.learning.optimizer import Optimizer, optimizers_of
from embodied_rl.policies.base import TrainedModule

Figures = dict[str, float]
"""Figures of a step: the objective's metrics, ``loss``, and ``grad_norm`` before clipping."""


def accumulate_side_by_side(losses: Sequence[Callable[[], Tensor]], parameters: Sequence[Tensor], threads: ThreadPoolExecutor) -> None:
    """Add up the gradients of several micro-batches; this thread computes the first, `threads` the others.

    The sum is in the order of `losses`, whichever is ready first, so that every run gives the same bits.
    """

    def gradients(loss: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss(), parameters, allow_unused=True)

    others = [threads.submit(gradients, loss) for loss in losses[1:]]
    found = [gradients(losses[0]), *(other.result() for other in others)]
    for parameter, *own in zip(parameters, *found, strict=True):
        for gradient in own:
            if gradient is None:
                continue
            # In the parameter's memory layout, which the optimizer's kernel needs.
            parameter.grad = torch.empty_like(parameter).copy_(gradient) if parameter.grad is None else parameter.grad.add_(gradient)


def norm_name(group: str) -> str:
    """Name of the norm of a parameter group's gradient in a step's figures."""
    return f"grad_norm_{group}" if group else "grad_norm"


def is_finite(figures: Figures) -> bool:
    """Whether the step with these figures was taken."""
    return all(math.isfinite(value) for name, value in figures.items() if name == "loss" or name.startswith(norm_name("")))


class TrainedCopy(Protocol):
    """A copy of the policy that is trained, on ranks (`RankExecutor`) or in another process."""

    def write_back(self) -> None:
        """Copy the trained weights into the policy."""

    def take_weights(self) -> None:
        """Continue training from the policy's present weights."""

    def close(self) -> None: ...


class Executor(ABC):
    """Owns the optimizer of a policy and takes its steps."""

    def __init__(self, policy: TrainedModule, config: AlgorithmConfig, device: torch.device) -> None:
        self.policy, self.config, self.device = policy, config, device
        self.meanwhile: Callable[[], object] = lambda: None
        """Called before a step and between its parts, for other work of this process that is due."""

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Number of parts that a minibatch is divided into: one per rank that trains other rows."""
        return 1

    @abstractmethod
    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        """Take the rows of one update. Observation statistics do not change until the next `begin`."""

    @abstractmethod
    def step(self, chosen: np.ndarray | None, learning_rate: float, *, kl_coef: float = 0.0) -> Figures:
        """Step on the minibatch of these rows [n], or of all rows; takes no step if the figures are not finite."""

    @abstractmethod
    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        """[B] float32 values of prepared observations, or [B, K] from a policy with a value for each step of a chunk."""

    # ---- state ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """State of the optimizer, see `Optimizer`."""

    @abstractmethod
    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Load what `state_tensors` returned. Raises KeyError or ValueError for another policy's state."""

    @abstractmethod
    def forget(self) -> None:
        """Clear the optimizer's state."""

    def trained(self) -> list[Tensor]:
        """Parameters that the optimizer steps, as this process holds them."""
        return list(self.policy.parameters())

    def optimizer_tensors(self) -> list[Tensor] | None:
        """The optimizer's state as this process holds it; None: it is in arrays that cannot be moved."""
        return None

    # ---- a copy that is trained elsewhere ---------------------------------------------------------------------------

    def write_back(self) -> None:  # noqa: B027  # a default
        """Copy the trained weights into the whole policy; does nothing if that policy is the trained one."""

    def take_weights(self) -> None:  # noqa: B027  # a default
        """Continue training from the whole policy's present weights."""

    def close(self) -> None:  # noqa: B027  # a default
        """Stop what the executor started. May be called twice."""


class LocalExecutor(Executor):
    """Autograd in this process, for any policy on any device."""

    def __init__(
        self, policy: TrainedModule, config: AlgorithmConfig, device: torch.device, precision: Precision, *, side_by_side: int = 1
    ) -> None:
        """
        Args:
            side_by_side: equal parts of each minibatch, computed in parallel threads. A single convolution divided among threads
                waits for all of them by spinning: if other work takes a core for a moment, that is ten times as slow.
        """
        super().__init__(policy, config, device)
        self.optimizers, self._precision = optimizers_of(policy, config), precision
        self.side_by_side = side_by_side
        self._threads = ThreadPoolExecutor(side_by_side - 1, "minibatch") if side_by_side > 1 else None
        self._objective: Objective[Any, Any] | None = None
        self._rows: Rows | None = None

    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        self._objective, self._rows = objective, rows.staged(self.device)

    def step(self, chosen: np.ndarray | None, learning_rate: float, *, kl_coef: float = 0.0) -> Figures:
        assert self._objective is not None, "begin comes first"
        assert self._rows is not None, "begin comes first"
        rows = self._rows if chosen is None else self._rows.chosen(torch.from_numpy(chosen))
        minibatch, numbers = self._objective.begin(rows, kl_coef=kl_coef)
        size = self.config.micro_batch_size
        if self._threads is not None:
            size = min(size or minibatch.num_rows, -(-minibatch.num_rows // self.side_by_side))
        (part,) = self._objective.divide(self.policy, minibatch, 1, size)
        return self.take(self._objective, minibatch, part.micro, numbers, learning_rate)

    def take(
        self,
        objective: Objective[Any, Any],
        rows: Rows,
        micro: list[list[int]],
        numbers: Numbers,
        learning_rate: float,
        summed: Callable[[Tensor], Tensor] = lambda totals: totals,
    ) -> Figures:
        """Take one step on rows in these micro-batches (`Part`), with the numbers of the whole minibatch; on ranks a collective call.

        Takes no step if the loss or a gradient's norm is not finite: the caller checks both (`is_finite`).
        `summed`: sums figures [k] over the ranks that train on other rows.
        """
        parts: list[Metrics] = [{} for _ in micro]

        def loss_of(part: int) -> Tensor:
            loss, metrics = objective(self.policy, rows_at(rows, micro[part]).moved(self.device), numbers)
            parts[part] = {name: value.detach().double() for name, value in {**metrics, "loss": loss}.items()}
            return loss

        owners = [self.optimizers[group] for group in objective.groups]
        for optimizer in owners:
            optimizer.zero_grad()
        with repeatable(self.device):
            self._accumulate([functools.partial(loss_of, part) for part in range(len(micro))], owners)
            norms = [optimizer.clip() for optimizer in owners]
            sums: Metrics = {}
            for name, value in (item for part in parts for item in part.items()):  # in the order of the parts
                sums[name] = sums[name] + value if name in sums else value
            names = sorted(sums)
            totals = summed(torch.stack([sums[name] for name in names]))
            # One transfer for all numbers, which also shows whether this step may be taken.
            values = torch.cat([totals, *(norm.to(totals)[None] for norm in norms)]).tolist()
            figures = dict(zip([*names, *(norm_name(group) for group in objective.groups)], values, strict=True))
            if is_finite(figures):
                for optimizer in owners:
                    optimizer.step(learning_rate)
        if objective.frees_gradients:  # now instead of before the next step
            for optimizer in owners:
                optimizer.zero_grad()
        if is_finite(figures):
            objective.stepped(self.policy)
        return figures

    def _accumulate(self, losses: Sequence[Callable[[], Tensor]], owners: Sequence[Optimizer]) -> None:
        """Add up the gradients of micro-batches, one after another or in threads."""
        inputs = [parameter for optimizer in owners for parameter in optimizer.inputs or ()]
        if self._threads is None:
            fsdp.accumulate(self.policy, losses, inputs or None)
        else:
            accumulate_side_by_side(losses, inputs or [own for own in self.policy.parameters() if own.requires_grad], self._threads)

    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        size = forward_rows(self.policy, self.config)
        if self._threads is None:
            parts = [self._values(part) for part in forwards(ready, size)]
        else:
            # Fewer rows at a time: the next convolution still finds the last one's output in the cache.
            slices = list(forwards(ready, min(size, self.policy.even_rows) if self.policy.even_rows > 1 else size))
            turns = [slices[first :: self.side_by_side] for first in range(self.side_by_side)]
            others = [self._threads.submit(lambda own: list(map(self._values, own)), own) for own in turns[1:]]
            found = [list(map(self._values, turns[0])), *(other.result() for other in others)]
            parts = [found[index % self.side_by_side][index // self.side_by_side] for index in range(len(slices))]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @torch.no_grad()
    def _values(self, ready: dict[str, Tensor]) -> np.ndarray:
        count = len(next(iter(ready.values())))
        filled = {key: _filled_up(tensor, -count % self.policy.even_rows).to(self.device) for key, tensor in ready.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            return self.policy.value(filled).float().cpu().numpy()[:count]

    def state_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for own in self.optimizers.values() for name, tensor in own.state_tensors().items()}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for optimizer in self.optimizers.values():
            optimizer.load_state_tensors(state)

    def forget(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.forget()

    def optimizer_tensors(self) -> list[Tensor] | None:
        return [tensor for optimizer in self.optimizers.values() for tensor in optimizer.tensors()]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()


def rows_at(rows: Rows, places: list[int]) -> Rows:
    """The rows at these places, or a row that does not count (see `Part`); the same object if they are all rows in order."""
    if places == [-1]:
        return rows.filler()
    return rows if places == list(range(rows.num_rows)) else rows.chosen(torch.tensor(places))


def forward_rows(policy: TrainedModule, config: AlgorithmConfig) -> int:
    """Most rows of one forward without gradients: `algorithm.micro_batch_size`, else the policy's own limit."""
    return config.micro_batch_size or policy.forward_rows


def forwards(ready: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Slice observations into at most `size` rows each."""
    for start in range(0, len(next(iter(ready.values()))), size):
        yield {key: tensor[start : start + size] for key, tensor in ready.items()}


def _filled_up(tensor: Tensor, num_rows: int) -> Tensor:
    """Append `num_rows` copies of the first row."""
    return torch.cat([tensor, tensor[:1].expand(num_rows, *tensor.shape[1:])]) if num_rows else tensor
