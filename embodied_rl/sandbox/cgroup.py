"""A control group (version 2) of a program and its descendants, if this process may make one.

For the launching process, so it imports little. Without a group, the supervisor adds up /proc and the kernel's accounts of ended children,
which omit children of parents that ignore SIGCHLD. A group needs no controller: every group has `cpu.stat`, and `cgroup.kill` from Linux
5.14 on.
"""

from __future__ import annotations

import os

from embodied_rl.sandbox import kernel

_NAME = "embodied-sandbox-"


class Group:
    """An empty group below this process's own."""

    def __init__(self, folder: str) -> None:
        """Make the group. Raises OSError if that is impossible."""
        self._folder = folder
        os.mkdir(folder)

    def enter(self) -> None:
        """Move the calling process, whose children follow. Raises OSError."""
        kernel.write(f"{self._folder}/cgroup.procs", "0")

    def used_s(self) -> float:
        """Processor seconds of all processes that ran in it."""
        with open(f"{self._folder}/cpu.stat", "rb") as file:
            return int(file.readline().split()[1]) / 1e6

    def kill(self) -> None:
        """Kill all processes in it at once."""
        try:
            kernel.write(f"{self._folder}/cgroup.kill", "1")
        except OSError:  # an older kernel: end them one by one
            return

    def remove(self) -> None:
        """Remove the group once nothing runs in it."""
        try:
            os.rmdir(self._folder)
        except OSError:
            return


def new_group() -> Group | None:
    """A new group for one program; None if this process may not make any."""
    try:
        own = next(line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::"))
        mount = next(words[1] for words in map(str.split, _lines("/proc/self/mounts")) if words[2] == "cgroup2")
        folder = f"{mount}/{own.strip('/')}".rstrip("/")
        # A process could not be moved out of a group that is not ours.
        if not os.access(f"{folder}/cgroup.procs", os.W_OK):
            return None
        group = Group(f"{folder}/{_NAME}{os.getpid()}")
        group.used_s()
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return group


def works() -> bool:
    """Whether each program gets its own group here."""
    group = new_group()
    if group is None:
        return False
    group.remove()
    return True


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()
