"""Ends leftover processes of a run's own Ray cluster: ``python -m embodied_rl.roles.ray_watch DRIVER SOCKET``, started before the cluster.

Ray's servers die with the process that started them. A node's agents do not: for a minute they try to report to a server that is gone. This
process tracks the descendants of the cluster's servers, and some seconds after its driver's end it ends those that remain.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
import time

from embodied_rl.distributed.channel import can_be_read
from embodied_rl.distributed.processes import start_module, started
from embodied_rl.sim.keeper import parents

_LOOK_S = 0.5
_SESSION = re.compile(rb"ray/session_\d")
_ALONE_S = 3.0
"""Seconds that processes have to end before they are killed."""
_END_S = 3.0


class ClusterWatch:
    """The driver's handle of the watching process."""

    def __init__(self) -> None:
        """Start the process; it watches the servers that this process starts from now on."""
        self._socket, theirs = socket.socketpair()
        # It outlives the driver, so it must not hold the driver's output open.
        with theirs, open(os.devnull, "wb") as nowhere:
            number = theirs.fileno()
            self._process = start_module("embodied_rl.roles.ray_watch", os.getpid(), number, pass_fds=(number,), output=nowhere)
        self.note()

    def note(self) -> None:
        """Wait until the watch has noted all running processes."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(b"\n")
            self._socket.recv(1)

    def close(self) -> None:
        """Wait until the stopped cluster's processes are gone, and end the rest. May be called twice."""
        self._socket.close()
        self._process.wait()


class _Watcher:
    """State of the watching process."""

    def __init__(self, driver: int, connection: int) -> None:
        """`connection`: descriptor of the socket to the driver."""
        self._driver, self._connection = driver, connection
        self._handles: dict[int, int] = {}
        """{process id in the cluster: pidfd, which stays valid for that process even if the id is reused}."""

    def watch(self) -> None:
        """Watch until the driver ends or closes the connection."""
        poll = select.poll()
        # A connection is reset if the driver closes it without having read an answer.
        with contextlib.suppress(ProcessLookupError, ConnectionError):
            poll.register(driver := os.pidfd_open(self._driver), select.POLLIN)
            poll.register(self._connection, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)]
                self.note()
                if driver in ready or (ready and not os.read(self._connection, 1)):
                    return
                if ready:
                    os.write(self._connection, b"\n")

    def note(self) -> None:
        """Note processes that have started since."""
        for pid in [pid for pid, handle in self._handles.items() if _has_ended(handle)]:
            os.close(self._handles.pop(pid))
        above = parents()
        above.pop(os.getpid(), None)
        for pid in sorted(above):
            line, seen = pid, set[int]()
            while line in above and line not in seen and line not in self._handles and not self._is_server(line, above):
                seen.add(line)
                line = above[line]
            if line in above and line not in seen and pid not in self._handles:
                with contextlib.suppress(OSError):
                    self._handles[pid] = os.pidfd_open(pid)

    def end(self) -> None:
        """Wait a moment for all processes to end, and kill the rest."""
        self._wait(_ALONE_S)
        until = time.monotonic() + _END_S
        while self._running() and time.monotonic() < until:
            self.note()  # children of the last ones
            for handle in self._running():
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            self._wait(0.2)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._running() and time.monotonic() < until:
            time.sleep(0.05)

    def _running(self) -> list[int]:
        return [handle for handle in self._handles.values() if not _has_ended(handle)]

    def _is_server(self, pid: int, above: dict[int, int]) -> bool:
        """Whether the driver started this process as a server of its cluster: servers name the folder of its session."""
        if above[pid] != self._driver:
            return False
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return _SESSION.search(file.read()) is not None
        return False


def _has_ended(handle: int) -> bool:
    return can_be_read(handle, timeout_s=0.0)


def main() -> None:
    """Watch until the driver ends, then end the leftover processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started()
    watcher = _Watcher(int(sys.argv[1]), int(sys.argv[2]))
    watcher.watch()
    watcher.end()


if __name__ == "__main__":
    main()
