"""Served environments with their processes, limits and memory of repeated requests; and all environments of a service."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from embodied_rl.config import SimConfig, group_names, load_sim_config
from embodied_rl.errors import Limits, UserError, did_you_mean
from embodied_rl.serving.http_server import HttpProblem
from embodied_rl.sim.faults import FaultKind, SimFault
from embodied_rl.sim.wire import Encoding
from embodied_rl.sim.worker_pool import WorkerProcess
from embodied_rl.trust import named_code

_DETAIL = 2000
"""Characters of a simulator's traceback that clients receive."""


@dataclass(frozen=True)
class ServiceLimits(Limits):
    """Limits of environments. Raises UserError for a limit that is not above 0 and finite."""

    max_environments: int = 64
    memory_mb: float | None = 4096.0
    """Resident memory (2**20 bytes) of one environment's process, checked four times a second; a larger process is ended."""
    cpu_s: float | None = None
    """CPU seconds of one environment's process in all (RLIMIT_CPU)."""
    idle_s: float = 600.0
    """Seconds without a request after which an environment is closed."""
    step_timeout_s: float = 60.0
    """Seconds for one reset, step, snapshot, restore or picture, after which the process is ended."""
    start_timeout_s: float = 180.0
    """Seconds for building a simulator."""
    threads: int = 1
    """Threads in each pool of one environment's process."""
    max_batch: int = 256
    """Most requests in one batch, and most environments in one make."""


@dataclass(frozen=True)
class Outcome:
    """Result of one request."""

    status: int
    body: bytes
    """JSON body."""

    @staticmethod
    def of(problem: HttpProblem) -> Outcome:
        return Outcome(problem.status, json.dumps(problem.to_dict()).encode())


@dataclass(frozen=True)
class EnvRequest:
    """A request to one environment."""

    env_id: str
    operation: str
    """reset, step, snapshot, restore or render."""
    number: int | None
    """Ascending number of the request within its environment; an equal number repeats a request. None: always executed."""
    arguments: Mapping[str, Any]

    @property
    def digest(self) -> bytes:
        """Digest of the contents, to notice a number that is used twice for different requests."""
        return hashlib.sha256(json.dumps([self.operation, self.arguments], sort_keys=True).encode()).digest()


class Environment:
    """A process with one environment. The thread that talks to it holds `lock` while it calls `begin` and `finish`."""

    def __init__(self, env_id: str, config: SimConfig, encoding: Encoding, limits: ServiceLimits) -> None:
        """Start the process; `started` waits for its simulator."""
        self.env_id, self.sim = env_id, config.name
        self._limits = limits
        self.lock = threading.Lock()
        self.last_used = time.monotonic()
        self.num_steps = 0
        self.spec: dict[str, Any] = {}
        self.fate: HttpProblem | None = None
        """Reason why the environment is gone."""
        self._condemned: HttpProblem | None = None
        self.number: int | None = None
        """Number of the last numbered request; None before the first."""
        self._digest = b""
        self._last: Outcome | None = None
        self._deadline = 0.0
        setup = {
            "num_envs": [1],
            "factory": {"target": config.target, "task": config.task, "kwargs": config.kwargs, "extra": config.extra},
            "encoding": encoding,
            "cpu_s": limits.cpu_s,
        }
        self._process = WorkerProcess(0, setup, limits.threads, module="embodied_rl.serving.environments.host")

    def started(self) -> None:
        """Wait for the simulator. Raises HttpProblem if it cannot be built; the process is then gone."""
        try:
            self.spec = self._process.receive(self._limits.start_timeout_s, "build its simulator", lambda message, _: dict(message["spec"]))
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

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(self, request: EnvRequest) -> Outcome | None:
        """Send a request to the process, or answer at once a repeated or out-of-order request, or one to an environment that is gone."""
        if self.fate is not None:
            return Outcome.of(self.fate)
        self.last_used = time.monotonic()
        if request.number is not None:
            if request.number == self.number and self._last is not None:
                if request.digest == self._digest:
                    return self._last
                return Outcome.of(
                    HttpProblem(409, "number_reused", f"Request number {request.number} was used before for another request.")
                )
            if self.number is not None and request.number <= self.number:
                message = f"Request number {request.number} comes after number {self.number}; numbers ascend."
                return Outcome.of(HttpProblem(409, "stale_request", message))
            self.number, self._digest, self._last = request.number, request.digest, None
        self._deadline = time.monotonic() + self._limits.step_timeout_s
        try:
            self._process.request({"operation": request.operation, "arguments": dict(request.arguments)})
        except SimFault as fault:
            return self._failed(fault)
        return None

    def finish(self, request: EnvRequest) -> Outcome:
        """Wait for the result of `begin`."""
        try:
            left_s = max(self._deadline - time.monotonic(), 0.01)
            outcome = self._process.receive(left_s, request.operation, lambda message, body: Outcome(int(message["status"]), body))
        except SimFault as fault:
            return self._failed(fault)
        self.num_steps = 0 if request.operation == "reset" else self.num_steps + (request.operation == "step" and outcome.status == 200)
        if request.number is not None:
            self._last = outcome
        self.last_used = time.monotonic()
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
        """Problem of an environment whose process exceeds its memory limit, or was ended for that; None if it does not."""
        limit = self._limits.memory_mb
        if self._condemned is not None:
            return self._condemned
        if limit is None or self._process.resident_mb() <= limit:
            return None
        message = f"Environment '{self.env_id}' ({self.sim}) ran over its {limit:g} MB of memory after {self.num_steps} steps."
        return HttpProblem(500, FaultKind.OUT_OF_MEMORY.name.lower(), message)

    def condemn(self, problem: HttpProblem) -> None:
        """End the process from another thread than the one that talks to it; that thread then gets `problem`."""
        self._condemned = problem
        self._process.end_at_once()  # the thread with the lock waits for the end

    def end(self, fate: HttpProblem) -> None:
        """Close the process; every later request gets `fate` as its answer."""
        if self.fate is None:
            self.fate = fate
            if fate.status == 500:
                self._process.kill()
            else:
                self._process.close()

    def describe(self) -> dict[str, Any]:
        """State of the environment for GET."""
        return {
            "id": self.env_id,
            "sim": self.sim,
            "spec": self.spec,
            "number": self.number,
            "steps": self.num_steps,
            "memory_mb": round(self._process.resident_mb(), 1),
            "idle_s": round(self.idle_s, 3),
        }


OPERATORS_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "embodied_rl.sim.remote:make": frozenset({"url", "sim", "sim_kwargs", "protocol", "token_env"}),
    "embodied_rl.sim.robots.mjcf:make": frozenset({"task", "reward", "success", "terminated"}),
    "embodied_rl.sim.text.judged:make": frozenset({"path", "base_url", "model", "api_key_env"}),
    "embodied_rl.sim.text.program:AgentProgram": frozenset({"command", "function", "env", "tasks", "held_out_tasks"}),
    "embodied_rl.sim.text.tasks:make": frozenset({"environment"}),
    "embodied_rl.sim.text.textarena:make": frozenset({"opponent", "opponent_options"}),
}
"""{simulator: its arguments that name code, servers or files}: the operator sets them; by default these simulators are not offered."""
_PATHS = re.compile(r"path|data|corpus|questions|held_out_questions|\w+_(path|file|folder|dir|root)|file|folder|directory|root")
"""Names of arguments that are files and folders."""
_PATH_FORM = re.compile(r"~.*|\.{1,2}|.*[\\\0].*|.+/.*|.*/.+|\S*\.[A-Za-z][A-Za-z0-9]{0,9}", re.DOTALL)
_GIVEN = frozenset({"self", "num_envs", "task"})
"""Parameters that are not arguments of a request, which has a separate task."""
_NAMESPACED_TASK = re.compile(r"[A-Za-z_]\w*/[\w-]+-v\d+")
"""``ALE/Pong-v5``: gymnasium's ids of a package that is imported already."""
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 1000, 2000, 3


def offered_simulators(names: tuple[str, ...] | None = None) -> dict[str, SimConfig]:
    """Simulators that a service offers.

    Args:
        names: registered ones, or the operator's ``package.module:Attribute``; None: all registered ones without code arguments.

    Raises UserError: an unknown name.
    """
    known = [name for name in group_names("sim") if name != "custom"]
    if names is None:
        found = {name: load_sim_config(name) for name in known}
        return {name: config for name, config in found.items() if config.target not in OPERATORS_ARGUMENTS}
    offered = {}
    for name in names:
        if name not in known and ":" not in name:
            raise UserError(f"Simulator '{name}' cannot be offered.{did_you_mean(name, known)}")
        offered[name] = SimConfig(name=name, target=name) if ":" in name else load_sim_config(name)
    return offered


def as_requested(config: SimConfig, task: str | None, kwargs: Mapping[str, Any]) -> SimConfig:
    """The offered configuration with a client's task and arguments; the simulator's process checks whether it accepts these. Raises
    HttpProblem: 403 for an argument that is the operator's, names code or a path; 422 for an unknown one."""
    for name, value in kwargs.items():
        if name in config.kwargs and config.kwargs[name] == value:
            continue
        if name in _GIVEN or name.startswith("_") or not name.isidentifier():
            raise HttpProblem(422, "user_error", f"Simulator '{config.name}' does not take '{name}'.")
        if name in OPERATORS_ARGUMENTS.get(config.target, ()) or _PATHS.fullmatch(name):
            raise _refused(config, name, "it names code, a server or a file, which only the operator of this service may set")
        _require_plain(config, name, value, DEEPEST)
    if task is not None and task != config.task:
        if "task" in OPERATORS_ARGUMENTS.get(config.target, ()):
            raise _refused(config, "task", "it is a file, which only the operator of this service may set")
        _require_plain(config, "task", task, 0)
    return replace(config, task=config.task if task is None else task, kwargs={**config.kwargs, **kwargs})


def _require_plain(config: SimConfig, name: str, value: Any, depth: int) -> None:
    if isinstance(value, list):
        if depth == 0 or len(value) > MOST_ITEMS:
            raise _refused(config, name, f"lists hold at most {MOST_ITEMS} values and are at most {DEEPEST} deep")
        for item in value:
            _require_plain(config, name, item, depth - 1)
    elif isinstance(value, bool) and len(named_code({"target": config.target, name: value})) > 1:
        raise _refused(config, name, "it opens the sandbox, which only the operator of this service may do")
    elif isinstance(value, str):
        path = _PATH_FORM.fullmatch(value) and not (name == "task" and _NAMESPACED_TASK.fullmatch(value))
        if path or len(named_code({"target": config.target, name: value})) > 1 or len(value) > LONGEST_TEXT:
            raise _refused(config, name, "a request may not name code, a server or a path, and texts are short")
    elif not (value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise _refused(config, name, "values are numbers, texts, true and false, and lists of these")


def _refused(config: SimConfig, name: str, why: str) -> HttpProblem:
    return HttpProblem(403, "refused_argument", f"'{name[:80]}' of simulator '{config.name}' cannot be set by a request: {why}.")


_WATCH_S = 0.25
_GRACE_S = 2.0
_REMEMBERED = 1000
"""Closed environments, and requests that made some, that are remembered for clients' questions."""


class Hub:
    """All environments of a service. Thread-safe.

    Environments are independent: a request waits only for another one of the same environment.
    """

    def __init__(self, simulators: Mapping[str, SimConfig], limits: ServiceLimits) -> None:
        """`simulators`: {name: configuration} that may be made."""
        self._simulators, self.limits = dict(simulators), limits
        self._environments: dict[str, Environment] = {}
        self._gone: OrderedDict[str, HttpProblem] = OrderedDict()
        self._made: OrderedDict[str, tuple[str, Future[list[Environment]]]] = OrderedDict()
        self._being_made = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="environment watcher", daemon=True)
        self._watcher.start()

    @property
    def names(self) -> list[str]:
        return sorted(self._simulators)

    @property
    def num_environments(self) -> int:
        return len(self._environments)

    # ---- making -----------------------------------------------------------------------------------------------------

    def make(
        self,
        sim: str,
        task: str | None,
        kwargs: Mapping[str, Any],
        count: int,
        encoding: Encoding,
        request_id: str | None,
    ) -> list[Environment]:
        """Make `count` environments of one simulator in parallel; a repeated `request_id` gets the same ones. Raises HttpProblem: unknown
        simulator, no room, or a failed build, which leaves none."""
        if sim not in self._simulators:
            raise HttpProblem(
                404, "unknown_simulator", f"Simulator '{sim}' is not offered here.{did_you_mean(sim, self._simulators)}", choices=self.names
            )
        asked = json.dumps([sim, task, dict(kwargs), count, encoding], sort_keys=True)
        future: Future[list[Environment]] = Future()
        if request_id is not None:
            with self._lock:
                before = self._made.setdefault(request_id, (asked, future))
                while len(self._made) > _REMEMBERED:
                    self._made.popitem(last=False)
            if before[0] != asked:
                raise HttpProblem(409, "number_reused", f"Request '{request_id}' was used before for other environments.")
            if before[1] is not future:
                try:
                    return before[1].result(self.limits.start_timeout_s)
                except TimeoutError:
                    raise HttpProblem(503, "busy", f"Request '{request_id}' is still in progress.", headers={"Retry-After": "2"}) from None
        try:
            future.set_result(self._build(sim, task, kwargs, count, encoding))
        except BaseException as error:
            with self._lock:
                if request_id is not None:
                    self._made.pop(request_id, None)  # another try may find room
            future.set_exception(error)
        return future.result()

    def _build(self, sim: str, task: str | None, kwargs: Mapping[str, Any], count: int, encoding: Encoding) -> list[Environment]:
        config = as_requested(self._simulators[sim], task, kwargs)
        self._reserve(count)
        made: list[Environment] = []
        try:
            # Not by way of a list: if there is no room for a further process, the earlier ones must end.
            made.extend(Environment(secrets.token_hex(8), config, encoding, self.limits) for _ in range(count))
            for environment in made:
                environment.started()
            for environment in made:
                environment.last_used = time.monotonic()  # the first ones waited for the last
            with self._lock:
                self._require_open()  # `close` ends those that are here, and no later ones
                self._environments.update({environment.env_id: environment for environment in made})
                self._being_made -= count
        except BaseException:
            for environment in made:
                environment.end(HttpProblem(410, "closed", "One of the environments that were made together could not be built."))
            with self._lock:
                self._being_made -= count
            raise
        return made

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise HttpProblem(503, "closing", "The service is going down.")

    def _reserve(self, count: int) -> None:
        with self._lock:
            self._require_open()
            taken, most = len(self._environments) + self._being_made, self.limits.max_environments
            if taken + count > most:
                message = f"{count} more environments would make {taken + count}; the limit of this service is {most}. Close some, or wait."
                raise HttpProblem(429, "too_many_environments", message, headers={"Retry-After": "2"})
            self._being_made += count

    # ---- requests ---------------------------------------------------------------------------------------------------

    def get(self, env_id: str) -> Environment:
        """Environment by its id. Raises HttpProblem: 404 for an unknown id, its fate for one that is gone."""
        with self._lock:
            if env_id in self._environments:
                return self._environments[env_id]
            fate = self._gone.get(env_id)
        if fate is not None:  # a copy: the traceback of one exception would keep the frames, and so the bodies, of all requests
            raise HttpProblem(fate.status, fate.kind, fate.message)
        raise HttpProblem(404, "unknown_environment", f"Environment '{env_id}' does not exist; the service may have been restarted.")

    def run(self, requests: Sequence[EnvRequest]) -> list[Outcome]:
        """Send requests to several environments in parallel; returns their outcomes in order. Raises HttpProblem: two for the same."""
        if len({request.env_id for request in requests}) != len(requests):
            raise HttpProblem(400, "bad_request", "A batch asks each environment once.")
        outcomes: dict[str, Outcome] = {}
        found: list[tuple[EnvRequest, Environment]] = []
        for request in requests:
            try:
                found.append((request, self.get(request.env_id)))
            except HttpProblem as problem:
                outcomes[request.env_id] = Outcome.of(problem)
        with contextlib.ExitStack() as held:
            for _, environment in sorted(found, key=lambda pair: pair[0].env_id):  # one order for all, so that batches never deadlock
                held.enter_context(environment.lock)
            waiting = []
            for request, environment in found:
                outcome = environment.begin(request)
                if outcome is None:
                    waiting.append((request, environment))
                else:
                    outcomes[request.env_id] = outcome
            for request, environment in waiting:
                outcomes[request.env_id] = environment.finish(request)
        for _, environment in found:
            if environment.fate is not None:
                self._bury(environment)
        return [outcomes[request.env_id] for request in requests]

    def close_environment(self, env_id: str) -> None:
        """End one environment; repeating this is no error. Raises HttpProblem for an unknown id."""
        try:
            environment = self.get(env_id)
        except HttpProblem as problem:
            if problem.status == 404:
                raise
            return
        with environment.lock:
            environment.end(HttpProblem(410, "closed", f"Environment '{env_id}' was closed."))
        self._bury(environment)

    def describe(self) -> list[dict[str, Any]]:
        """State of every environment, without its spec."""
        with self._lock:
            environments = list(self._environments.values())
        return [{key: value for key, value in e.describe().items() if key != "spec"} for e in environments]

    def close(self) -> None:
        """End all environments; a running step gets two more seconds. May be called twice."""
        self._closing.set()
        self._watcher.join(5.0)
        closing = HttpProblem(503, "closing", "The service is going down.")

        def end(environment: Environment) -> None:
            if not environment.lock.acquire(timeout=_GRACE_S):
                environment.condemn(closing)
                environment.lock.acquire()
            try:
                environment.end(closing)
            finally:
                environment.lock.release()
            self._bury(environment)

        with self._lock:
            environments = list(self._environments.values())
        if environments:
            with ThreadPoolExecutor(min(len(environments), 32)) as pool:
                list(pool.map(end, environments))

    # ---- watching ---------------------------------------------------------------------------------------------------

    def _bury(self, environment: Environment) -> None:
        with self._lock:
            if self._environments.pop(environment.env_id, None) is not None and environment.fate is not None:
                self._gone[environment.env_id] = environment.fate
                while len(self._gone) > _REMEMBERED:
                    self._gone.popitem(last=False)

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_S):
            for environment in list(self._environments.values()):
                if (problem := environment.over_memory()) is not None:
                    environment.condemn(problem)  # a thread that talks to it hears of it, and buries it
                if (problem or self._idle(environment)) and environment.lock.acquire(blocking=False):
                    try:
                        problem = problem or self._idle(environment)  # unless a request arrived meanwhile
                        if problem is not None:
                            environment.end(problem)
                    finally:
                        environment.lock.release()
                    self._bury(environment)

    def _idle(self, environment: Environment) -> HttpProblem | None:
        """Problem of an environment without requests for too long; None if it has some."""
        if environment.idle_s <= self.limits.idle_s:
            return None
        idle = f"Environment '{environment.env_id}' was closed after {self.limits.idle_s:g} s without a request."
        return HttpProblem(410, "idle", idle)
