"""One served environment: its process, its limits, and the memory that makes a repeated request harmless."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.serving.http_server import HttpProblem
from embodied_rl.sim.faults import FaultKind, SimFault
from embodied_rl.sim.process import WorkerProcess
from embodied_rl.sim.wire import Encoding

OPERATIONS = ("reset", "step", "snapshot", "restore", "render")
_DETAIL = 2000
"""Characters of a simulator's traceback that clients receive."""


@dataclass(frozen=True)
class ServiceLimits:
    """What environments may use. Raises UserError for a limit that is not above 0 and finite."""

    max_environments: int = 64
    memory_mb: float | None = 4096.0
    """Resident memory (2**20 bytes) of one environment's process, looked at four times a second; beyond it the process is ended."""
    cpu_s: float | None = None
    """CPU seconds of one environment's process in all (RLIMIT_CPU)."""
    idle_s: float = 600.0
    """An environment without a request for so long is closed."""
    step_timeout_s: float = 60.0
    """Of one reset, step, snapshot, restore or picture; then the process is ended."""
    start_timeout_s: float = 180.0
    """Of building a simulator."""
    threads: int = 1
    """Of the thread pools of one environment's process."""
    max_batch: int = 256
    """Requests in one batch, and environments in one make."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be a finite number above 0, got {value}.")


@dataclass(frozen=True)
class Outcome:
    """How one request ended."""

    status: int
    body: bytes
    """JSON"""

    @staticmethod
    def of(problem: HttpProblem) -> Outcome:
        return Outcome(problem.status, json.dumps(problem.to_dict()).encode())


@dataclass(frozen=True)
class EnvRequest:
    """Something asked of one environment."""

    env_id: str
    operation: str
    """One of `OPERATIONS`."""
    number: int | None
    """Ascending over the requests of an environment; the same number again is the same request again. None: always executed."""
    arguments: Mapping[str, Any]

    @property
    def digest(self) -> bytes:
        """Of what is asked, so that a number that is used twice for different things is noticed."""
        return hashlib.sha256(json.dumps([self.operation, self.arguments], sort_keys=True).encode()).digest()


def _read_spec(message: Mapping[str, Any], payload: bytes) -> dict[str, Any]:
    return dict(message["spec"])


def _read_outcome(message: Mapping[str, Any], payload: bytes) -> Outcome:
    return Outcome(int(message["status"]), payload)


class Environment:
    """A process with one environment. The thread that talks to it holds `lock`; `begin` and `finish` are called with it held."""

    def __init__(self, env_id: str, config: SimConfig, encoding: Encoding, limits: ServiceLimits) -> None:
        """Start the process; `started` waits for its simulator."""
        self.env_id, self.sim = env_id, config.name
        self._limits = limits
        self.lock = threading.Lock()
        self.last_used = time.monotonic()
        self.num_steps = 0
        self.spec: dict[str, Any] = {}
        self.fate: HttpProblem | None = None
        """Why the environment is no more."""
        self._condemned: HttpProblem | None = None
        self._number = -1
        self._digest = b""
        self._last: Outcome | None = None
        self._request: EnvRequest | None = None
        self._deadline = 0.0
        setup = {
            "num_envs": [1],
            "factory": {"target": config.target, "task": config.task, "kwargs": config.kwargs, "extra": config.extra},
            "encoding": encoding,
            "cpu_s": limits.cpu_s,
        }
        self._process = WorkerProcess(0, setup, limits.threads, module="embodied_rl.serving.environments.host")

    @property
    def number(self) -> int | None:
        """Of the last numbered request; None before the first."""
        return self._number if self._number >= 0 else None

    def started(self) -> None:
        """Wait for the simulator. Raises HttpProblem when it cannot be built; the process is then gone."""
        try:
            self.spec = self._process.receive(self._limits.start_timeout_s, "build its simulator", _read_spec)
        except UserError as error:
            self.end(HttpProblem(422, "user_error", str(error)))
        except SimFault as fault:
            self.end(self._problem(fault, "while it was built"))
        if self.fate is not None:
            raise self.fate

    @property
    def idle_s(self) -> float:
        """Seconds since its last request."""
        return time.monotonic() - self.last_used

    def touch(self) -> None:
        """It is being used."""
        self.last_used = time.monotonic()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(self, request: EnvRequest) -> Outcome | None:
        """Hand a request to the process, or answer it at once: a repeated one, one out of order, or one to an environment that is gone."""
        if self.fate is not None:
            return Outcome.of(self.fate)
        self.touch()
        if request.number is not None:
            if request.number == self._number and self._last is not None:
                if request.digest == self._digest:
                    return self._last
                return Outcome.of(HttpProblem(409, "number_reused", f"Request number {request.number} asked for something else before."))
            if request.number <= self._number:
                message = f"Request number {request.number} comes after number {self._number}; numbers ascend."
                return Outcome.of(HttpProblem(409, "stale_request", message))
            self._number, self._digest, self._last = request.number, request.digest, None
        self._request, self._deadline = request, time.monotonic() + self._limits.step_timeout_s
        try:
            self._process.request({"operation": request.operation, "arguments": dict(request.arguments)})
        except SimFault as fault:
            return self._failed(fault)
        return None

    def finish(self) -> Outcome:
        """Wait for what `begin` began."""
        request = self._request
        assert request is not None
        self._request = None
        try:
            outcome = self._process.receive(max(self._deadline - time.monotonic(), 0.01), request.operation, _read_outcome)
        except SimFault as fault:
            return self._failed(fault)
        self.num_steps = 0 if request.operation == "reset" else self.num_steps + (request.operation == "step" and outcome.status == 200)
        if request.number is not None:
            self._last = outcome
        self.touch()
        return outcome

    def _failed(self, fault: SimFault) -> Outcome:
        problem = self._condemned or self._problem(fault, f"after {self.num_steps} steps")
        self.end(problem)
        return Outcome.of(problem)

    def _problem(self, fault: SimFault, when: str) -> HttpProblem:
        kind = fault.kind.name.lower()
        if fault.kind is FaultKind.DIED and "SIGXCPU" in fault.detail:
            kind = "cpu_limit"
        detail = fault.detail.strip()[-_DETAIL:]
        what = f"used its {self._limits.cpu_s:g} s of CPU time" if kind == "cpu_limit" else fault.kind.value
        return HttpProblem(500, kind, f"Environment '{self.env_id}' ({self.sim}) {what} {when}.\n{detail}".rstrip())

    # ---- life -------------------------------------------------------------------------------------------------------

    def over_memory(self) -> HttpProblem | None:
        """What becomes of an environment whose process holds more than it may; None while it does not."""
        limit = self._limits.memory_mb
        if limit is None or self._process.resident_mb() <= limit:
            return None
        message = f"Environment '{self.env_id}' ({self.sim}) ran over its {limit:g} MB of memory after {self.num_steps} steps."
        return HttpProblem(500, FaultKind.OUT_OF_MEMORY.name.lower(), message)

    def condemn(self, problem: HttpProblem) -> None:
        """End the process from another thread than the one that talks to it; that one then hears why."""
        self._condemned = problem
        self._process.end_at_once()  # not waited for here: the thread that holds the lock does that

    def end(self, fate: HttpProblem) -> None:
        """Close the process; every later request is answered with `fate`."""
        if self.fate is None:
            self.fate = fate
            if fate.status == 500:
                self._process.kill()
            else:
                self._process.close()

    def describe(self) -> dict[str, Any]:
        """For GET: where the environment stands."""
        return {
            "id": self.env_id,
            "sim": self.sim,
            "spec": self.spec,
            "number": self.number,
            "steps": self.num_steps,
            "memory_mb": round(self._process.resident_mb(), 1),
            "idle_s": round(self.idle_s, 3),
        }
