"""Typed failures of simulator workers, the policy for them, and their records."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from embodied_rl.errors import NonFiniteError

if TYPE_CHECKING:
    from embodied_rl.config import SimConfig

STACK_BEGINS = "Stack (most recent call first):"
"""Header that `faulthandler` writes above a thread's stack."""


class FaultKind(enum.Enum):
    """Kind of a worker's failure."""

    RAISED = "raised an exception"
    DIED = "died"
    TIMED_OUT = "did not answer in time"
    NON_FINITE = "returned NaN or infinity"
    WRONG_SHAPE = "returned values of a wrong shape"
    OUT_OF_MEMORY = "ran over its memory limit"
    GARBLED = "sent an invalid message, or an answer to another request"


class SimFault(RuntimeError):
    """A simulator worker failed; has the facts to find and repeat the failure."""

    def __init__(
        self, kind: FaultKind, worker: int, detail: str, *, slots: Sequence[int] = (), seeds: Sequence[int] = (), steps: Sequence[int] = ()
    ) -> None:
        self.kind = kind
        self.worker = worker
        self.detail = detail
        """Worker's traceback, or the end of its stderr."""
        self.slots = tuple(slots)
        self.seeds = tuple(seeds)
        """Seed of each slot's episode, in the order of `slots`."""
        self.steps = tuple(steps)
        """Steps that each of these episodes had taken."""
        super().__init__(kind, worker, detail)

    def __str__(self) -> str:
        where = f" (slots {list(self.slots)}, episode seeds {list(self.seeds)}, steps {list(self.steps)})" if self.slots else ""
        detail = f"\n--- simulator worker {self.worker} ---\n{self.detail.rstrip()}" if self.detail.strip() else ""
        return f"Simulator worker {self.worker} {self.kind.value}{where}.{detail}"


class NonFiniteSimulationError(SimFault, NonFiniteError):
    """A simulator returned NaN or infinity in an observation or reward."""

    def context(self) -> dict[str, Any]:
        """See `NonFiniteError.context`; includes the episodes."""
        return {**super().context(), "slots": self.slots, "episode_seeds": self.seeds, "episode_steps": self.steps}


class WrongShapeError(ValueError):
    """A simulator returned a value that does not fit its own spec."""


@dataclass(frozen=True)
class FaultPolicy:
    """What the manager does if a worker fails. Raises ValueError: a limit below zero."""

    recovery: Literal["restore", "restart"] = "restore"
    """restore: a new worker resumes every episode, from its last snapshot or its seed, by replaying the actions since then; the caller only
    sees a late step. An episode that fails twice at the same step is given up. restart: new episodes replace the failed worker's."""
    stop_on: frozenset[FaultKind] = frozenset()
    """Kinds that end the run at once, with a SimFault from the call that notices."""
    max_restarts: int = 5
    """Most failures of a worker in a row without a step, and most episodes that it gives up without finishing one; more end the run."""
    backoff_s: float = 0.1
    """Pause before the second restart in a row; doubles with each further one."""
    max_backoff_s: float = 30.0
    memory_limit_mb: float | None = None
    """Resident size of a worker in MB beyond which it is replaced."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.backoff_s < 0 or self.max_backoff_s < 0:
            raise ValueError(f"The limits of a fault policy must not be negative: {self}.")

    @staticmethod
    def from_config(config: SimConfig) -> FaultPolicy:
        """Policy of a configuration."""
        stop_on = frozenset(FaultKind) if config.on_fault == "stop" else frozenset[FaultKind]()
        if config.non_finite == "stop":
            stop_on |= {FaultKind.NON_FINITE}
        return FaultPolicy(
            recovery="restart" if config.on_fault == "restart" else "restore",
            stop_on=stop_on,
            max_restarts=config.max_restarts,
            memory_limit_mb=config.memory_limit_mb,
        )

    def pause_s(self, failures: int) -> float:
        """Seconds to wait before restart number `failures` in a row."""
        return 0.0 if failures <= 1 else min(self.backoff_s * 2.0 ** (failures - 2), self.max_backoff_s)


@dataclass(frozen=True)
class SlotFault:
    """Effect of a fault on one slot."""

    slot: int
    episode: int
    seed: int
    step: int
    """Messages (actions or chunks) that the episode had received since its start or last snapshot."""
    outcome: Literal["restored", "aborted"]
    drift: float | None = None
    """Largest difference between the observation before the fault and after the restore; None: not comparable."""


@dataclass(frozen=True)
class FaultRecord:
    """One failure of one worker, and its outcome for each of its slots."""

    kind: FaultKind
    worker: int
    pid: int
    detail: str
    """Worker's traceback, or the end of its stderr."""
    culprits: tuple[int, ...]
    """Slots that were being stepped."""
    slots: tuple[SlotFault, ...]
    failures_in_a_row: int
    recovery_s: float
    """Seconds from noticing the fault until the new worker was ready."""

    @property
    def cause(self) -> str:
        """One line of `detail`: the exception, how the process ended, or where it hangs."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()] or [""]
        if self.kind is FaultKind.DIED:
            return lines[0]  # the rest is earlier output
        if self.kind is FaultKind.TIMED_OUT:
            stacks = [number for number, line in enumerate(lines) if line == STACK_BEGINS]
            # The innermost call comes first.
            return " ".join([lines[0], *lines[stacks[-1] + 1 : stacks[-1] + 2]] if stacks else lines[:1])
        return lines[-1]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "kind": self.kind.name, "culprits": list(self.culprits), "slots": [vars(slot) for slot in self.slots]}
