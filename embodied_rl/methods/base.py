"""What one iteration of the training loop consists of, whatever is learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from embodied_rl.policies.base import TensorObservation
from embodied_rl.rollout.collector import CollectorTimes


@dataclass(frozen=True)
class Experience:
    """What was collected for one update."""

    num_steps: int
    finished: list[tuple[bool, float, int]]
    """(success, return, length) of the episodes that ended."""
    observation: TensorObservation
    """{key: [M, ...]} everything the policy saw, for its statistics."""
    data: Any


class Method(Protocol):
    """How experience is collected and learned from; one iteration is `collect`, `prepare`, `update`."""

    learner: Any

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to learn (early stopping)."""
        ...

    @property
    def times(self) -> CollectorTimes:
        """Of the last `collect`."""
        ...

    def collect(self, iteration: int) -> Experience:
        """Play with the weights that were published as version `iteration`. Raises SimFault (see EnvManager)."""
        ...

    def prepare(self, experience: Experience) -> Any:
        """Rewards → advantages; no parameter changes."""
        ...

    def update(self, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        """Train; metrics. Raises NonFiniteLossError."""
        ...

    def published(self, version: int) -> None: ...

    def restart(self, iteration: int) -> None:
        """Begin new episodes, with seeds that depend on the run's seed and what was consumed alone: where a run can be resumed."""
        ...

    def finish(self) -> None:
        """The run is over: leave the policy as it is to be kept."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_tensors(self) -> dict[str, Tensor]:
        """What resuming needs beside the policy's own tensors: the learner's state, and data that only this run has."""
        ...

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue exactly. Raises IncompatibleCheckpointError, KeyError or ValueError for the state of another run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside tensors, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
