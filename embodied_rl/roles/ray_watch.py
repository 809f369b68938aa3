"""Ends what a run's own Ray cluster leaves behind: ``python -m embodied_rl.roles.ray_watch DRIVER SESSION``, started with the cluster.

Ray's servers die with the process that started them. The agents of a node do not: they try for a minute to tell a server that is gone why
they end. This process notes what runs below the cluster's servers, and ends what is still there some seconds after its driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from embodied_rl.sim.keeper import parents

_LOOK_S = 1.0
_ALONE_S = 3.0
"""For processes to end by themselves."""
_END_S = 3.0


class ClusterWatch:
    """The watching process, as the driver sees it."""

    def __init__(self, session: str) -> None:
        """`session`: the folder of the cluster's session, which all its servers name in their command lines."""
        # A session of its own: Ctrl-C is the driver's alone.
        command = [sys.executable, "-m", "embodied_rl.roles.ray_watch", str(os.getpid()), session]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """After the cluster was shut down: wait until it is gone, and end what is not. May be called twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class _Watcher:
    """What the watching process knows."""

    def __init__(self, driver: int, session: str) -> None:
        self._driver, self._session = driver, os.fsencode(session)
        self._handles: dict[int, int] = {}
        """{process of the cluster: a descriptor that stands for it, whichever process gets its number later}."""

    def watch(self) -> None:
        """Until the driver ends, or closes our standard input."""
        poll = select.poll()
        poll.register(os.pidfd_open(self._driver), select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while True:
            self.note()
            if poll.poll(_LOOK_S * 1000):
                return

    def note(self) -> None:
        """Take in what has begun since."""
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
        """Wait a moment for all to end, and end what does not."""
        self._wait(_ALONE_S)
        until = time.monotonic() + _END_S
        while self._running() and time.monotonic() < until:
            self.note()  # what the last ones started
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
        """Whether it is one of those that the driver started for this cluster."""
        if above[pid] != self._driver:
            return False
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return self._session in file.read()
        return False


def _has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])


def main() -> None:
    """Watch, and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = _Watcher(int(sys.argv[1]), sys.argv[2])
    watcher.watch()
    watcher.end()


if __name__ == "__main__":
    main()
