"""Parent of one worker process; a manager starts it as ``python -m embodied_rl.sim.keeper MODULE MANAGER SOCKET LIFE READY``.

It forks before any heavy import: the child becomes the worker, and this process waits. Orphaned descendants of the worker become children
of this process, even after `setsid` (PR_SET_CHILD_SUBREAPER of Linux). So all of them end with the worker, however the worker or the
manager ended. On other systems the worker's process group ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 2.0
"""Seconds between two checks for orphans that ended while the worker runs."""
_END_S = 5.0
"""Seconds to wait for killed processes; those stuck in the kernel, or of another user, are left."""


def parents() -> dict[int, int]:
    """{process: its parent} of all running processes; empty without /proc."""
    found = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Keeper:
    """Waits for the worker's end and for the manager's."""

    def __init__(self, manager: int) -> None:
        self._manager, self._worker = manager, 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the manager handles it
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def fork(self) -> int:
        """Fork; returns 0 in the process that becomes the worker."""
        self._worker = os.fork()
        if self._worker == 0:
            os.setpgid(0, 0)
        else:  # not earlier: until it has a worker to kill, the signal ends this process, and with it the worker
            signal.signal(signal.SIGTERM, self._on_term)
        return self._worker

    def outlive(self) -> int:
        """Wait for the worker's end, or end it once the manager is gone; returns its wait status."""
        poll = select.poll()
        for pid in (self._worker, self._manager):
            with contextlib.suppress(OSError, AttributeError):  # otherwise it polls
                poll.register(os.pidfd_open(pid), select.POLLIN)
        while True:
            if os.getppid() != self._manager:
                os.kill(self._worker, signal.SIGKILL)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._worker:
                self._worker = 0
                return status
            if pid == 0:
                gone = os.getppid() != self._manager
                poll.poll(100 if sys.platform != "linux" or gone else _LOOK_S * 1000)
                time.sleep(0.001)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if self._worker:
            os.kill(self._worker, signal.SIGKILL)


def _end_children() -> None:
    """SIGKILL every child, and the orphans that become children thereby, until there are none."""
    until, own = time.monotonic() + _END_S, os.getpid()
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there are none
            return
        for pid in [pid for pid, parent in parents().items() if parent == own]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def main() -> None:
    """Fork, then be the worker or its keeper."""
    module, manager = sys.argv[1], int(sys.argv[2])
    connection, life, ready = map(int, sys.argv[3:6])
    keeper, own = _Keeper(manager), os.getpid()
    worker = keeper.fork()
    if worker == 0:
        os.close(ready)
        die_with_parent()
        if os.getppid() != own:
            os._exit(1)
        sys.argv = [module, str(connection), str(life)]
        importlib.import_module(module).main()
        return
    gc.enable()
    for descriptor in (connection, life):  # only the worker keeps these open, so that their closing shows its end
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.write(ready, str(worker).encode())
    os.close(ready)
    status = keeper.outlive()
    if sys.platform == "linux":
        _end_children()
    else:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    # A signal, in the form that shells use; a status below zero means that the keeper was killed.
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
