"""Typed failures of simulator workers."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from embodied_rl.errors import NonFiniteError


class FaultKind(enum.Enum):
    """What happened to a worker."""

    RAISED = "raised an exception"
    DIED = "died"
    TIMED_OUT = "did not answer in time"
    NON_FINITE = "returned NaN or infinity"


class SimFault(RuntimeError):
    """A simulator worker failed; carries what is needed to find and repeat the failure."""

    def __init__(
        self, kind: FaultKind, worker: int, detail: str, *, slots: Sequence[int] = (), seeds: Sequence[int] = (), steps: Sequence[int] = ()
    ) -> None:
        self.kind = kind
        self.worker = worker
        self.detail = detail
        """The worker's own traceback, or the end of what it wrote to stderr."""
        self.slots = tuple(slots)
        self.seeds = tuple(seeds)
        """Seed of the episode each of `slots` was in."""
        self.steps = tuple(steps)
        """Steps each of these episodes had taken."""
        super().__init__(kind, worker, detail)

    def __str__(self) -> str:
        where = f" (slots {list(self.slots)}, episode seeds {list(self.seeds)}, steps {list(self.steps)})" if self.slots else ""
        detail = f"\n--- simulator worker {self.worker} ---\n{self.detail.rstrip()}" if self.detail.strip() else ""
        return f"Simulator worker {self.worker} {self.kind.value}{where}.{detail}"


class NonFiniteSimulationError(SimFault, NonFiniteError):
    """A simulator returned NaN or infinity in an observation or reward."""
