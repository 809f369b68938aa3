"""Processes of the package that import torch, forked from one that has imported it: most of what a short run elsewhere takes is imports.

The first use starts ``python -m tests.forks``, which imports what rollout workers, ranks and token processes import, runs nothing, and
forks once for each process that is asked for. The fork has the standard streams, descriptors, environment and folder that a process of
its own would have, and runs the module as ``python -m`` does.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "embodied_rl.roles.worker",
    "embodied_rl.methods.language_apart",
    "embodied_rl.learning.ranks",
    "embodied_rl.trainer",
    "hydra",
    "transformers.models.llama.modeling_llama",
)
_LONGEST = 2**18
"""Bytes of a request: mostly its environment."""
_MANY = 64
"""Descriptors of a request at most."""


class Fork:
    """A forked process, as `subprocess.Popen` is one that was started: as far as the package asks."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
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

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        told = self._report.recv(8)
        assert len(told) == 8, "the process that forks ended"
        return int.from_bytes(told, "big", signed=True)


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
    with theirs:
        command = [sys.executable, "-X", "embodied_rl_starts", "-m", "tests.forks", str(theirs.fileno())]
        handed = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "cwd": ROOT, "process_group": 0}
        process = subprocess.Popen(command, **handed)
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def start_forked(
    module: str,
    *arguments: object,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> Fork:
    """What `embodied_rl.distributed.processes.start_module` does."""
    streams = (1, 2) if output is None else (output.fileno(), output.fileno())
    return _start(module, list(map(str, arguments)), {**os.environ, **(environment or {})}, os.getcwd(), streams, pass_fds)


def run_forked(
    module: str, *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` of ``python -m module words`` says, as text. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fork = _start(module, list(words), {**os.environ, **(env or {})}, str(cwd), (out.fileno(), err.fileno()), (), collects=True)
        try:
            fork.wait(timeout)
        finally:
            fork.kill()
            code = fork.wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(["python", "-m", module, *words], code, out.read().decode(), err.read().decode())


def _start(
    module: str,
    words: list[str],
    environment: Mapping[str, str],
    folder: str,
    streams: tuple[int, int],
    pass_fds: Sequence[int],
    *,
    collects: bool = False,
) -> Fork:
    """`collects`: its garbage collector is on, as in any Python; what `start_module` starts turns it on by itself."""
    ours, theirs = socket.socketpair()
    what = {"module": module, "words": words, "environment": environment, "folder": folder, "collects": collects}
    with theirs:
        message = json.dumps({**what, "descriptors": [1, 2, *pass_fds]}).encode()
        socket.send_fds(_server(), [message], [theirs.fileno(), *streams, *pass_fds])
    return Fork(ours)


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """The roles and ranks that a module's tests start are forks. What starts them is there in other modules' tests as it is."""
    from embodied_rl.learning import rank_hosts
    from embodied_rl.roles import role_process

    with pytest.MonkeyPatch.context() as patched:
        for user in (rank_hosts, role_process):
            patched.setattr(user, "start_module", start_forked)
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
    os.setpgid(0, 0)
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, max(descriptors) + 1) for number in received]
    for number in received:
        os.close(number)
    for number, wanted in zip(above, descriptors, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *(place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path)]


def main(descriptor: int) -> Callable[[], object]:
    """What is left to be done in this process: nothing in the server, when the tests are over; in a fork, its module."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    asked = _serve(socket.socket(fileno=descriptor))
    if asked is None:
        return lambda: None
    request, received = asked
    _become(received, request["descriptors"], request["environment"], request["folder"])
    sys.argv[1:] = request["words"]
    if request["collects"]:
        gc.enable()
    return functools.partial(runpy.run_module, request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))()
