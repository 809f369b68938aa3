"""Combined usage of a program and its descendants, from /proc and a control group, and their end. For the launching process, so it imports
little.

Each program gets a control group (version 2) of its own if this process may make one. Without a group, the supervisor adds up /proc and the
kernel's accounts of ended children, which omit children of parents that ignore SIGCHLD. A group needs no controller: every group has
`cpu.stat`, and `cgroup.kill` from Linux 5.14 on.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import time

from embodied_rl.sandbox import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from embodied_rl.sandbox.box import Spec

_GROUP = "embodied-sandbox-"
_INTERVAL_S = 0.05
_FORGET_S = 1.0
"""Seconds after which a foreign process number is looked up anew, because numbers are reused."""
_PAGE = resource.getpagesize()
_TICK = os.sysconf("SC_CLK_TCK")
_MAX_FILES = 16384
_MAX_DEPTH = 256
"""Most folders in each other."""
_SOCKET_BYTES = 224 * 1024
"""Kernel memory that a full socket holds, at Linux's default buffers."""
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


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
        group = Group(f"{folder}/{_GROUP}{os.getpid()}")
        group.used_s()
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return group


def has_groups() -> bool:
    """Whether each program gets its own group here."""
    group = new_group()
    if group is None:
        return False
    group.remove()
    return True


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()


class Tree:
    """Descendants of this process, which adopts orphans."""

    def __init__(self, launched: int, *, hulls: int, group: Group | None = None) -> None:
        """Args:
        launched: the first descendant.
        hulls: number of processes, in a line from `launched` down, that belong to the sandbox and not to the program.
        group: their group; it is removed once they have been killed.
        """
        self._launched, self._hulls, self._group = launched, hulls, group
        self._foreign: set[int] = set()
        self._forget_s = 0.0

    def read(self) -> dict[int, list[bytes]]:
        """{process: the fields of its `stat` from its state on}."""
        if time.monotonic() > self._forget_s:
            self._foreign, self._forget_s = set(), time.monotonic() + _FORGET_S
        found: dict[int, list[bytes]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (number := int(name)) not in self._foreign and (fields := _stat(number)):
                found[number] = fields
        me = os.getpid()
        ours: dict[int, bool] = {me: True}
        for number in found:
            line = []
            while number not in ours and number in found:
                line.append(number)
                number = int(found[number][1])
            is_ours = ours.get(number, False)
            ours.update((one, is_ours) for one in line)
        self._foreign |= {number for number in found if not ours[number]} | {me}
        return {number: fields for number, fields in found.items() if ours[number] and number != me}

    def of_program(self) -> dict[int, list[bytes]]:
        """`read` without the processes that are ours."""
        tree, hull = self.read(), self._launched
        for _ in range(self._hulls):
            tree.pop(hull, None)
            hull = next((number for number, fields in tree.items() if int(fields[1]) == hull), 0)
        return tree

    def used_s(self, processes: dict[int, list[bytes]]) -> float:
        """Processor seconds of everything that ran: the group's figure, or that of `processes` and ended children if larger."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = sum(int(ticks) for fields in processes.values() for ticks in fields[11:15])
        # The other sum includes processes that left the group, which prlimit cannot prevent.
        return max(ticks / _TICK + ended.ru_utime + ended.ru_stime, self._group.used_s() if self._group is not None else 0.0)

    def kill(self) -> None:
        """Kill all of them, and wait until none is left."""
        if self._group is not None:
            self._group.kill()
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                if self._group is not None:
                    self._group.remove()
                return
            for number in self.read():
                try:  # (importing `contextlib` would slow every program's start)
                    os.kill(number, signal.SIGKILL)
                except OSError:
                    continue
            signal.sigtimedwait({signal.SIGCHLD}, 0.005)


def watch(tree: Tree, launched: int, spec: Spec) -> tuple[str, int | None]:
    """Wait until the program ends or must be ended; returns (reason, its wait status).

    The reason is empty for a program that ended unforced, `stopped` for a request from outside, `time`, or a sentence.
    """
    ends = time.monotonic() + spec["timeout_s"] if spec["timeout_s"] else float("inf")
    next_look = time.monotonic() + _INTERVAL_S
    while True:
        caught = signal.sigtimedwait(_SIGNALS, max(0.0, min(next_look, ends) - time.monotonic()))
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == launched:
                return "", status
            if not number:
                break
        # If our own process is killed, this one is adopted by another.
        if (caught is not None and caught.si_signo == signal.SIGTERM) or os.getppid() != spec["parent"]:
            return "stopped", None
        if time.monotonic() >= ends:
            return "time", None
        # By the clock: a program whose orphans end all the time sends us a signal each time.
        if time.monotonic() >= next_look:
            if reason := _beyond(tree, spec):
                return reason, None
            next_look = time.monotonic() + _INTERVAL_S


def _beyond(everything: Tree, spec: Spec) -> str:
    """Sentence about an exceeded limit; empty: none."""
    tree = everything.of_program()
    threads = sum(int(fields[17]) for fields in tree.values())
    if threads > spec["processes"]:
        return f"it ran {threads} processes and threads at a time (limit: {spec['processes']})"
    without_name, sockets = _open_files(tree)
    held = sum(int(fields[21]) for fields in tree.values()) * _PAGE + sockets
    if held > spec["memory_mb"] * 2**20:
        held = sum(_proportional(number, int(fields[21]) * _PAGE) for number, fields in tree.items()) + sockets
        if held > spec["memory_mb"] * 2**20:
            return f"it held {held >> 20} MB of memory in {len(tree)} processes (limit: {spec['memory_mb']})"
    used = everything.used_s(tree)
    if spec["cpu_s"] and used > spec["cpu_s"]:
        return f"it used {used:.1f} s of processor time (limit: {spec['cpu_s']:g})"
    in_scratch = 0 if spec["level"] == "namespaces" else _size(spec["scratch"])
    if in_scratch is None:
        return f"it made more than {_MAX_FILES} files, more than {_MAX_DEPTH} folders in each other, or folders that cannot be read"
    written = without_name + in_scratch
    if written > spec["scratch_mb"] * 2**20:
        return f"it wrote {written >> 20} MB (limit: {spec['scratch_mb']})"
    return ""


def _stat(number: int) -> list[bytes]:
    try:
        with open(f"/proc/{number}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return []


def _proportional(number: int, resident: int) -> int:
    """Bytes of memory of a process, with shared pages divided by their users. `resident`: the answer if they cannot be read."""
    try:
        with open(f"/proc/{number}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident


def _open_files(tree: dict[int, list[bytes]]) -> tuple[int, int]:
    """(bytes of open files without a name: deleted ones, and those in memory only; bytes that the sockets may hold)."""
    found: dict[tuple[int, int], int] = {}
    sockets: set[int] = set()
    for number in tree:
        for name in _names(f"/proc/{number}/fd"):
            try:
                about = os.stat(f"/proc/{number}/fd/{name}")
            except OSError:  # closed since then
                continue
            if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                found[about.st_dev, about.st_ino] = about.st_blocks * 512
            elif stat.S_ISSOCK(about.st_mode):
                sockets.add(about.st_ino)
    return sum(found.values()), len(sockets) * _SOCKET_BYTES


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _size(folder: str) -> int | None:
    """Bytes of the files below a folder; None: there are too many, they lie too deep, or some cannot be seen."""
    total, number, folders = 0, 0, [(folder, 0)]
    while folders:
        path, depth = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    number += 1
                    if number > _MAX_FILES or depth > _MAX_DEPTH:
                        return None
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    except FileNotFoundError:  # deleted since then
                        continue
        except (FileNotFoundError, NotADirectoryError):  # deleted since then, or a file now
            continue
        except OSError:  # a path beyond the longest that the kernel takes, or a mode that keeps us out
            return None
    return total
