"""Ends leftover processes of a run's own Ray cluster: ``python -m embodied_rl.roles.ray_watch DRIVER SOCKET MARK``, started before it.

Ray's servers die with the process that started them. A node's agents do not: for a minute they try to report to a server that is gone. All
processes of the cluster inherit a mark in their environment, over which agents may write their title: those that run when the cluster has
begun are noted. Some seconds after the driver's end, this process ends those that remain.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time

import psutil

from embodied_rl.distributed.channel import can_be_read
from embodied_rl.distributed.processes import start_module, started

_MARK = "EMBODIED_RL_RAY_CLUSTER"
"""Environment variable with the mark."""
_ALONE_S = 3.0
"""Seconds that processes have to end before they are killed."""
_END_S = 3.0
_NOTE_S = 60.0
"""Seconds that the driver waits for the watch to note the cluster's processes."""


class ClusterWatch:
    """The driver's handle of the watching process."""

    def __init__(self) -> None:
        """Start the process; what this process starts from now on, until `began`, belongs to the cluster."""
        self._socket, theirs = socket.socketpair()
        mark, number = secrets.token_hex(16), theirs.fileno()
        # It outlives the driver, so it must not hold the driver's output open.
        with theirs, open(os.devnull, "wb") as nowhere:
            self._process = start_module("embodied_rl.roles.ray_watch", os.getpid(), number, mark, pass_fds=(number,), output=nowhere)
        os.environ[_MARK] = mark

    def began(self) -> None:
        """Wait until the watch has noted the cluster's processes, a minute at most. May be called twice."""
        if os.environ.pop(_MARK, None) is not None:
            with contextlib.suppress(OSError):  # the watch was killed, or stands still
                self._socket.settimeout(_NOTE_S)
                self._socket.send(b"\n")
                self._socket.recv(1)

    def close(self) -> None:
        """Wait until the stopped cluster's processes are gone, and end the rest. May be called twice."""
        self.began()
        self._socket.close()
        self._process.wait()


def _marked(mark: str) -> set[psutil.Process]:
    """Running processes with the mark in their environment, and what these started."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return found


def main() -> None:
    """Wait until the driver ends or closes the connection, then end the leftover processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started()
    driver, connection, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    noted: set[psutil.Process] = set()
    with contextlib.suppress(ProcessLookupError, ConnectionError):
        end = os.pidfd_open(driver)
        can_be_read(end, connection, timeout_s=None)
        if not can_be_read(end, timeout_s=0.0) and os.read(connection, 1):
            noted = _marked(mark)
            os.write(connection, b"\n")
            can_be_read(end, connection, timeout_s=None)
    last_s = time.monotonic() + _ALONE_S
    while (left := _running(noted | _marked(mark))) and time.monotonic() < last_s + _END_S:
        for process in left if time.monotonic() > last_s else ():
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)


def _running(processes: set[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    main()
