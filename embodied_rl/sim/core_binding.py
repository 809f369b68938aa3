"""Workers bound to cores, for as long as nothing else wants these cores.

Unbound workers that are stepped together are woken on one core now and then, which makes a rollout wait; bound ones never are. But bound
workers cannot get out of the way either: two runs that bind theirs to the same cores lose a third, and so does one beside other work. So a
run that binds its workers holds a lock of each core, binds them only where the machine does next to nothing else, and looks again every
few seconds: once other processes take time, its workers are free to move for the rest of the run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from embodied_rl.sim.affinity import available_cores, choose_policy, plan_placement
from embodied_rl.sim.topology import Topology

QUIET = 0.25
"""Cores' worth of processor time that others may take of ours."""
_SAMPLE_S, _OLD_S = 0.2, 5.0
"""Others are looked at for so long at least before workers are bound; what they did longer ago says nothing about now."""
_LOOK_EVERY_S, _JUDGED_S = 0.25, 3.0
_RESTING = 0.3
"""Cores' worth of time below which we did next to nothing ourselves: who is busy meanwhile takes nothing from us."""


class CoreLocks:
    """A lock of each of some cores, seen by all runs of this user. The kernel lets go of them when the process ends, however it ends."""

    def __init__(self, files: Sequence[int]) -> None:
        self._files = list(files)

    @staticmethod
    def take(cores: Sequence[int], folder: Path | None = None) -> CoreLocks | None:
        """All of these cores' locks; None where another run, or another manager of this one, holds one of them, or none can be had."""
        import fcntl

        folder, files = folder or Path(tempfile.gettempdir()) / f"embodied_rl-cores-{os.getuid()}", list[int]()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                return None
            for core in sorted(cores):
                files.append(os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # BlockingIOError, where it is held
            CoreLocks(files).release()
            return None
        return CoreLocks(files)

    def release(self) -> None:
        """May be called twice."""
        while self._files:
            os.close(self._files.pop())


class OthersLoad:
    """How much of the cores' time other processes take: neither this one nor those that it started. Linux only."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = {f"cpu{core}" for core in cores}
        self._seen = self._now()

    @staticmethod
    def recent(cores: Sequence[int]) -> OthersLoad:
        """Since this module was imported, which a run does some tenths of a second before it needs to know; or, later, from now on."""
        while _since_import:
            if (load := _since_import.pop())._cores == {f"cpu{core}" for core in cores} and load.passed_s < _OLD_S:
                return load
        return OthersLoad(cores)

    @property
    def passed_s(self) -> float:
        """Since it was looked at."""
        return time.monotonic() - self._seen[0]

    def since(self) -> tuple[float, float]:
        """(others', our own) cores' worth of time since the last call, about: a tick of the clock (10 ms) is the smallest that is seen."""
        before, self._seen = self._seen, self._now()
        passed_s, busy, own = (new - old for new, old in zip(self._seen, before, strict=True))
        ticks = os.sysconf("SC_CLK_TCK") * max(passed_s, 1e-3)
        return max(0.0, (busy - own) / ticks), own / ticks

    def _now(self) -> tuple[float, float, float]:
        """(seconds, ticks in which one of the cores worked, ticks of our own processes). Raises OSError."""
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        counted = [line for line in lines if line[0] in self._cores]
        if len(counted) < len(self._cores):  # some containers number other cores there
            raise OSError(f"/proc/stat does not tell of all of {sorted(self._cores)}")
        busy = sum(sum(map(int, line[1:4])) + int(line[6]) + int(line[7]) for line in counted)
        own = sum(sum(map(int, each.rpartition(")")[2].split()[11:15])) for each in _our_stats())
        return time.monotonic(), float(busy), float(own)


def _our_stats() -> Iterator[str]:
    """The line of the kernel's about this process and each that descends from it."""
    waiting = [os.getpid()]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):  # it has ended since
            yield (folder / "stat").read_text(encoding="utf-8", errors="replace")
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())


class CoreBinding:
    """Cores that this run has the locks of, and workers that may be bound to them."""

    def __init__(self, topology: Topology, locks: CoreLocks, load: OthersLoad) -> None:
        self._topology, self._locks, self._load = topology, locks, load
        self._bound: list[int] = []
        """Processes that are bound now."""
        self.released = False
        """Whether the locks are gone."""
        self._looked, self._pause_s, self._seen_s, self._taken_s = time.monotonic(), _LOOK_EVERY_S, 0.0, 0.0
        """When, and for how long not again; since the last judgement: seconds that were looked at, cores' seconds that others took."""

    @staticmethod
    def take() -> CoreBinding | None:
        """The locks of all cores; None where workers are better left free.

        That is on machines where placement=auto pins anyway, under a quota (runs of other containers share these cores unseen), where
        another run holds a core, and where the machine works for others.
        """
        try:
            topology = Topology.read(with_gpus=False)
            cores = topology.cores
            if len(topology.physical_cores) < 2 or available_cores() < len(cores) or choose_policy(topology) != "none":
                return None
            load = OthersLoad.recent(cores)
            time.sleep(max(0.0, _SAMPLE_S - load.passed_s))
            locks = CoreLocks.take(cores) if load.since()[0] < QUIET else None
        except (OSError, ValueError, IndexError, AttributeError):  # other systems than Linux have no /proc
            return None
        return None if locks is None else CoreBinding(topology, locks, load)

    @property
    def most_workers(self) -> int:
        """So many have a core each."""
        return len(self._topology.physical_cores)

    def bind(self, pids: Sequence[int]) -> None:
        """Give each of these workers its own cores."""
        for pid, placement in zip(pids, plan_placement(self._topology, len(pids), "spread"), strict=True):
            _set_cores(pid, placement.cores)
        self._bound = list(pids)

    def unbind(self) -> None:
        """Let the kernel move them."""
        for pid in self._bound:
            _set_cores(pid, self._topology.cores)
        self._bound = []

    def look(self, pids: Sequence[int]) -> None:
        """Now and then: let the workers go, for good, where others took time while we worked; bind those that have replaced a bound one."""
        passed_s, longest_s = time.monotonic() - self._looked, 4 * max(self._pause_s, _LOOK_EVERY_S)
        if not self._bound or passed_s < self._pause_s:
            return
        self._looked, (others, own) = time.monotonic(), self._load.since()
        self._pause_s = max(_LOOK_EVERY_S, 100 * (time.monotonic() - self._looked))  # many processes take long to look at
        if list(pids) != self._bound:
            self.bind(pids)
        if own < _RESTING or passed_s > longest_s:  # a long look adds up what others did while we rested
            return
        self._seen_s, self._taken_s = self._seen_s + passed_s, self._taken_s + others * passed_s
        if self._seen_s >= _JUDGED_S:
            if (share := self._taken_s / self._seen_s) >= QUIET:
                warnings.warn(f"Other processes take {share:.1f} cores: the simulators' workers may move again.", stacklevel=2)
                self.release()
            self._seen_s = self._taken_s = 0.0

    def release(self) -> None:
        """Unbind the workers and let go of the locks; may be called twice."""
        self.unbind()
        self._locks.release()
        self.released = True


def _set_cores(pid: int, cores: Sequence[int]) -> None:
    """For every thread of a process; one that has ended stays as it was."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


_since_import: list[OthersLoad] = []
with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # as `CoreBinding.take`
    _since_import.append(OthersLoad(sorted(os.sched_getaffinity(0))))
