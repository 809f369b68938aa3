"""Processes of the package forked from one that has imported what they import: most of what a short run takes is imports.

The first use starts ``python -m tests.forks``, which imports what rollout workers, ranks, token processes and commands import, or what
simulators' processes do, or ManiSkill's, runs nothing, and forks once for each process that is asked for. The fork has the standard
streams, descriptors, environment and folder that a process of its own would have, and runs the module as ``python -m`` does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from embodied_rl.distributed.processes import end_process, start_module
from embodied_rl.sim import worker_pool as simulator_process
from embodied_rl.sim.affinity import thread_variables
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.sim.transport import Doorbell
from embodied_rl.sim.worker_pool import WorkerProcess

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = {
    "torch": (
        "embodied_rl.roles.worker",
        "embodied_rl.methods.language_player",
        "embodied_rl.learning.ranks",
        "embodied_rl.trainer",
        "hydra",
        "transformers.models.llama.modeling_llama",
        "embodied_rl.learning.fused",
        "embodied_rl.commands.evaluate",
        "embodied_rl.commands.render",
        "embodied_rl.reports.page",
        "numba.cpython",
        "numba.typed",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "rich.table",
        "tests.composing",
    ),
    "simulators": (
        "embodied_rl.sim.worker",
        "embodied_rl.serving.environments.host",
        "embodied_rl.sim.robots.gymnasium",
        "embodied_rl.sim.instrumented",
        "embodied_rl.rollout.filmed",
        "gymnasium.envs.classic_control",
    ),
    "maniskill": ("embodied_rl.sim.worker", "embodied_rl.sim.instrumented", "embodied_rl.sim.robots.maniskill", "mani_skill.envs"),
}
ALONE = {**thread_variables(1), "PYTHONHASHSEED": "0"}
"""What a simulator's process has in its environment, and its libraries read when they are imported."""
# No test ends with the machine: other processes read what was written whether it has reached the disk or not.
os.fsync = lambda descriptor: None
_LONGEST = 2**18
"""Bytes of a request: mostly its environment."""
_MANY = 64
"""Descriptors of a request at most."""


class Fork:
    """A forked process, as `subprocess.Popen` is one that was started: as far as the package asks."""

    def __init__(self, report: socket.socket, environment: Mapping[str, str]) -> None:
        self._report, self.environment = report, environment
        self.returncode: int | None = None

    @functools.cached_property
    def pid(self) -> int:
        return self._number()

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it runs."""
        if self.returncode is None and self.pid and select.select([self._report], [], [], 0)[0]:
            self.returncode = self._number()
            self._report.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None and self.pid and not select.select([self._report], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["fork", str(self.pid)], timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.kill(signal.SIGTERM)

    def _number(self) -> int:
        told = self._report.recv(8)
        assert len(told) == 8, "the process that forks ended"
        return int.from_bytes(told, "big", signed=True)


def _request_sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
    return ours, theirs


_servers: dict[str, tuple[socket.socket, int]] = {}


def server(kind: str) -> tuple[socket.socket, int]:
    """What takes requests, and its process; it is begun by the first call, with the environment of then."""
    if kind not in _servers:
        _servers[kind] = _begin_server(kind)
    return _servers[kind]


def _begin_server(kind: str) -> tuple[socket.socket, int]:
    ours, theirs = _request_sockets()
    environment = {**os.environ, **({} if kind == "torch" else ALONE)}
    with theirs:
        command = [sys.executable, "-X", "embodied_rl_starts", "-m", "tests.forks", kind, str(theirs.fileno())]
        handed = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "cwd": ROOT, "process_group": 0}
        process = subprocess.Popen(command, env=environment, **handed)
    atexit.register(end_process, process, 20.0)
    atexit.register(ours.close)
    return ours, process.pid


def start_forked(
    module: str,
    *arguments: object,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    collects: bool = False,
    folder: Path | None = None,
) -> Fork:
    """What `embodied_rl.distributed.processes.start_module` does; with `collects`, ``python -m module arguments``."""
    streams = (1, 2) if output is None else (output.fileno(), output.fileno())
    words, variables = list(map(str, arguments)), {**os.environ, **(environment or {})}
    return _start("torch", module, words, variables, str(folder or Path.cwd()), _streams(*streams, *pass_fds), collects=collects)


def start_forked_simulator(
    keeper: str, module: str, manager: int, *arguments: object, pass_fds: Sequence[int], environment: Mapping[str, str], output: IO[bytes]
) -> Fork | subprocess.Popen[bytes]:
    """The keeper of a simulator's process; one of its own where its libraries would read another environment."""
    if module not in IMPORTED["simulators"] or dict(environment) != ALONE or (_is_fork and _simulated.kind not in _servers):
        return start_module(keeper, module, manager, *arguments, pass_fds=pass_fds, environment=environment, output=output)
    _, parent = server(kind := _simulated.kind)
    words = [module, str(parent), *map(str, arguments)]  # it ends with what forked it: when this process ends
    streams = (output.fileno(), output.fileno())
    return _start(kind, keeper, words, {**os.environ, **environment}, os.getcwd(), _streams(*streams, *pass_fds))


def run_forked(
    module: str, *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` of ``python -m module words`` says, as text; of the module ``-c`` the first word is the program.

    Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = _streams(out.fileno(), err.fileno())
        fork = _start("torch", module, list(words), {**os.environ, **(env or {})}, str(cwd), streams, collects=True)
        try:
            fork.wait(timeout)
        finally:
            fork.kill()
            code = fork.wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(["python", "-m", module, *words], code, out.read().decode(), err.read().decode())


def _start(
    kind: str,
    module: str,
    words: list[str],
    environment: Mapping[str, str],
    folder: str,
    descriptors: Mapping[int, int],
    *,
    collects: bool = False,
) -> Fork:
    """Ask for a fork.

    Args:
        descriptors: {number in the fork: of ours}.
        collects: its garbage collector is on, as in any Python; what `start_module` starts turns it on by itself.
    """
    ours, theirs = socket.socketpair()
    what = {"module": module, "words": words, "environment": environment, "folder": folder, "collects": collects}
    servers = _for_its_simulators() if kind == "torch" else {}
    descriptors = {**descriptors, **{control.fileno(): control.fileno() for control, _ in servers.values()}}
    what["servers"] = {name: (control.fileno(), process) for name, (control, process) in servers.items()}
    with theirs:
        message = json.dumps({**what, "descriptors": list(descriptors)}).encode()
        socket.send_fds(server(kind)[0], [message], [theirs.fileno(), *descriptors.values()])
    return Fork(ours, environment)


def _for_its_simulators() -> dict[str, tuple[socket.socket, int]]:
    """What a fork asks for the simulators' processes that it starts, where this process has forks for its own too."""
    if simulator_process.start_module is not start_forked_simulator:
        return {}
    server("simulators")
    return {kind: known for kind, known in _servers.items() if kind != "torch"}


def _streams(out: int, err: int, *passed: int) -> dict[int, int]:
    return {1: out, 2: err, **{number: number for number in passed}}


@pytest.fixture(scope="module")
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that a module's tests start are forks. Other modules' tests start them as the package does."""
    with forked_processes(blocks=ROOT / "tests" / "sim" not in request.path.parents):
        yield


@contextlib.contextmanager
def forked_processes(*, blocks: bool = True) -> Iterator[None]:
    """Simulators' processes, roles and ranks that are started inside are forks."""
    from embodied_rl.learning import rank_hosts
    from embodied_rl.roles import role_process

    with forked_simulators(blocks=blocks), pytest.MonkeyPatch.context() as patched:
        for user in (rank_hosts, role_process):
            patched.setattr(user, "start_module", start_forked)
        yield


class _Simulated(threading.local):
    """What the process that a thread starts will simulate: ManiSkill's imports take 2.5 s."""

    kind = "simulators"


_simulated = _Simulated()
_is_fork = False
_status: int | None = None
"""With which a process ends that has nothing left to do: none after Ctrl+C, which is the signal's."""
_begin = WorkerProcess.__init__
_make_bell = Doorbell.__init__
_BLOCKS = "EMBODIED_RL_TESTS_BLOCK"
"""In the environment of processes whose waiters block at once."""


def _block_at_once(self: Doorbell, word: np.ndarray, waiting: np.ndarray, *yields: int, spins: bool = True) -> None:
    """A waiter that yields first takes a tenth of the processor from the tests beside it."""
    _make_bell(self, word, waiting, 0, spins=False)


def _begin_knowing(self: WorkerProcess, index: int, setup: dict[str, Any], *more: Any, **named: Any) -> None:
    factory = setup.get("factory", {})
    while "inner" in factory.get("kwargs", {}):  # what it wraps
        factory = factory["kwargs"]["inner"]
    _simulated.kind = "maniskill" if factory.get("target") == "embodied_rl.sim.robots.maniskill:make" else "simulators"
    _begin(self, index, setup, *more, **named)


@contextlib.contextmanager
def forked_simulators(*, blocks: bool = True) -> Iterator[None]:
    """Processes of simulators that are started inside are forks; with `blocks` neither they nor their manager yield before they block."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("embodied_rl.sim.worker_pool.start_module", start_forked_simulator)
        patched.setattr(WorkerProcess, "__init__", _begin_knowing)
        if blocks:
            patched.setattr(Doorbell, "__init__", _block_at_once)
            patched.setenv(_BLOCKS, "1")
        yield


def _serve(control: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """Fork for requests until `control` closes: None. In a fork: what it was asked for."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    reports: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            os.read(ended, 512)
            while (status := _next_ended(reports)) is not None:
                pid, code = status
                with contextlib.suppress(OSError), reports.pop(pid) as report:
                    report.sendall(code.to_bytes(8, "big", signed=True))
        if control not in ready:
            continue
        message, received, _, _ = socket.recv_fds(control, _LONGEST, _MANY)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (*reports.values(), control):
                other.close()
            for number in (ended, wake, received.pop(0)):
                os.close(number)
            return json.loads(message), received
        report, *others = received
        for number in others:
            os.close(number)
        reports[pid] = socket.socket(fileno=report)
        with contextlib.suppress(OSError):
            reports[pid].sendall(pid.to_bytes(8, "big", signed=True))


def _next_ended(running: Mapping[int, object]) -> tuple[int, int] | None:
    if not running:
        return None
    pid, status = os.waitpid(-1, os.WNOHANG)
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _become(received: list[int], descriptors: Sequence[int], environment: Mapping[str, str], folder: str) -> None:
    """Take the place of a process that was started with these."""
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, max(descriptors) + 1) for number in received]
    for number in received:
        os.close(number)
    for number, wanted in zip(above, descriptors, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    sys.path[:0] = [folder, *places]
    if places:
        from embodied_rl.registry import installed_config_folders, installed_targets

        installed_targets.cache_clear()
        installed_config_folders.cache_clear()


def _use_once() -> None:
    """What takes its time at first use and then stays: Hydra's grammar and plugins, and compiled recursions as a run calls them."""
    import torch

    from embodied_rl.algorithms.advantages import gae
    from embodied_rl.config.compose import check_overrides

    check_overrides(["experiment=cartpole", "seed=1"])
    step, flag = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.bool)
    ends = {"terminated": flag, "truncated": flag, "last_value": step[0], "final_value": step[0, :0]}
    gae(reward=step, value=step, **ends, gamma=0.9, gae_lambda=0.9)


def _run(module: str, servers: Mapping[str, Sequence[int]]) -> None:
    """Run the module of a fork, whose simulators are forks of these servers."""
    global _status
    try:
        with forked_simulators(blocks=_BLOCKS in os.environ) if servers else contextlib.nullcontext():
            if module == "-c":
                program = sys.argv.pop(1)
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        _status = 0
    except Exception:
        _status = 1
        raise
    except SystemExit as end:
        _status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        raise


def _leave() -> None:
    """End when everything else has been done at the exit: to free what was imported takes half a second, and tells nothing."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_status)


def main(kind: str, descriptor: int) -> Callable[[], object]:
    """What is left to be done in this process: nothing in the server, when the tests are over; in a fork, its module."""
    global _is_fork, _status
    atexit.register(_leave)  # before anything that is imported: the first is called last
    if kind == "maniskill":
        configure_rendering()
    for name in IMPORTED[kind]:
        importlib.import_module(name)
    if kind == "torch":
        _use_once()
    gc.freeze()
    asked = _serve(socket.socket(fileno=descriptor))
    if asked is None:
        _status = 0
        return lambda: None
    request, received = asked
    os.setpgid(0, 0)
    _become(received, request["descriptors"], request["environment"], request["folder"])
    sys.argv[1:] = request["words"]
    if request["collects"]:
        gc.enable()
    if kind != "torch" and _BLOCKS in os.environ:
        Doorbell.__init__ = _block_at_once  # type: ignore[assignment,method-assign]
    _is_fork = True
    _servers.update({name: (socket.socket(fileno=number), process) for name, (number, process) in request["servers"].items()})
    return functools.partial(_run, request["module"], request["servers"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))()
