"""Ends leftover processes of a run's own Ray cluster: ``python -m embodied_rl.roles.ray_watch DRIVER SOCKET MARK``, started before it.

Ray's servers die with the process that started them. A node's agents do not: for a minute they try to report to a server that is gone. All
processes of the cluster inherit a mark in their environment. Some seconds after the driver's end, this process ends those that remain.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time

from embodied_rl.distributed.channel import can_be_read
from embodied_rl.distributed.processes import start_module, started

_MARK = "EMBODIED_RL_RAY_CLUSTER"
"""Environment variable with the mark."""
_ALONE_S = 3.0
"""Seconds that processes have to end before they are killed."""
_END_S = 3.0


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
        """Note that the cluster's servers run. May be called twice."""
        os.environ.pop(_MARK, None)

    def close(self) -> None:
        """Wait until the stopped cluster's processes are gone, and end the rest. May be called twice."""
        self.began()
        self._socket.close()
        self._process.wait()


def _marked(mark: bytes) -> list[int]:
    """Running processes with the mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read():
                    found.append(int(name))
    return found


def main() -> None:
    """Wait until the driver ends or closes the connection, then end the leftover processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started()
    driver, connection, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
    with contextlib.suppress(ProcessLookupError):
        can_be_read(os.pidfd_open(driver), connection, timeout_s=None)
    last_s = time.monotonic() + _ALONE_S
    while (left := _marked(mark)) and time.monotonic() < last_s + _END_S:
        for pid in left if time.monotonic() > last_s else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
