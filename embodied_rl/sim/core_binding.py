"""Bind workers to cores as long as no other program wants these cores.

The kernel now and then wakes two unbound workers on one core, which makes a rollout wait. Bound workers avoid that, but cannot move away:
two runs bound to the same cores lose a third, and so does one run beside other work. A run that binds its workers therefore locks each
core, binds only on a nearly idle machine, and checks every few seconds: once other processes take time, its workers may move for good.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from embodied_rl.sim.affinity import available_cores, choose_policy, plan_placement, set_cores
from embodied_rl.sim.topology import Topology

QUIET = 0.25
"""Processor time, in cores, that others may take of ours."""
_SAMPLE_S, _OLD_S = 0.2, 5.0
"""Shortest observation of other processes before workers are bound, and age in seconds from which an observation is too old."""
_LOOK_EVERY_S, _JUDGED_S = 0.25, 3.0
_RESTING = 0.3
"""Processor time, in cores, below which this run was idle: work of others meanwhile takes nothing from it."""


class CoreLocks:
    """Locks on cores that all runs of this user see. The kernel releases them when the process ends, however it ends."""

    def __init__(self, files: Sequence[int]) -> None:
        self._files = list(files)

    @staticmethod
    def take(cores: Sequence[int], folder: Path | None = None) -> CoreLocks | None:
        """Lock all of these cores; None if another run or another manager of this run has one of them, or locks are impossible."""
        import fcntl

        folder, files = folder or Path(tempfile.gettempdir()) / f"embodied_rl-cores-{os.getuid()}", list[int]()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                return None
            for core in sorted(cores):
                files.append(os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # BlockingIOError if it is held
            CoreLocks(files).release()
            return None
        return CoreLocks(files)

    def release(self) -> None:
        """Release the locks; may be called twice."""
        while self._files:
            os.close(self._files.pop())


class OthersLoad:
    """Measures how much time of the cores other processes take, without this process and its descendants. Linux only."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = {f"cpu{core}" for core in cores}
        self._seen = self._now()

    @staticmethod
    def recent(cores: Sequence[int]) -> OthersLoad:
        """Observation that began when this module was imported, tenths of a second before a run needs it; a later call may start anew."""
        while _since_import:
            if (load := _since_import.pop())._cores == {f"cpu{core}" for core in cores} and load.passed_s < _OLD_S:
                return load
        return OthersLoad(cores)

    @property
    def passed_s(self) -> float:
        """Seconds since the observation began."""
        return time.monotonic() - self._seen[0]

    def since(self) -> tuple[float, float]:
        """(others', our own) processor time since the last call, in cores; the resolution is a tick of the clock (10 ms)."""
        before, self._seen = self._seen, self._now()
        passed_s, busy, own = (new - old for new, old in zip(self._seen, before, strict=True))
        ticks = os.sysconf("SC_CLK_TCK") * max(passed_s, 1e-3)
        return max(0.0, (busy - own) / ticks), own / ticks

    def _now(self) -> tuple[float, float, float]:
        """(seconds, busy ticks of the cores, ticks of our own processes). Raises OSError."""
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        counted = [line for line in lines if line[0] in self._cores]
        if len(counted) < len(self._cores):  # some containers number other cores in this file
            raise OSError(f"/proc/stat does not tell of all of {sorted(self._cores)}")
        busy = sum(sum(map(int, line[1:4])) + int(line[6]) + int(line[7]) for line in counted)
        own = sum(sum(map(int, each.rpartition(")")[2].split()[11:15])) for each in _our_stats())
        return time.monotonic(), float(busy), float(own)


def _our_stats() -> Iterator[str]:
    """Kernel's status line of this process and of each descendant."""
    waiting = [os.getpid()]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield (folder / "stat").read_text(encoding="utf-8", errors="replace")
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())


class CoreBinding:
    """Cores that this run has locked, to which it may bind workers."""

    def __init__(self, topology: Topology, locks: CoreLocks, load: OthersLoad) -> None:
        self._topology, self._locks, self._load = topology, locks, load
        self._bound: list[int] = []
        """Process ids that are bound now."""
        self.released = False
        """Whether the locks are released."""
        self._looked, self._pause_s, self._seen_s, self._taken_s = time.monotonic(), _LOOK_EVERY_S, 0.0, 0.0
        """Time of the last look, and seconds until the next; since the last verdict: observed seconds, and core seconds of others."""

    @staticmethod
    def take() -> CoreBinding | None:
        """Lock all cores; None if workers should stay free.

        They stay free on machines where placement=auto pins anyway, under a quota (unseen containers share these cores), if another run has
        a core, and if the machine is busy.
        """
        try:
            topology = Topology.read(with_gpus=False)
            cores = topology.cores
            if len(topology.physical_cores) < 2 or available_cores() < len(cores) or choose_policy(topology) != "none":
                return None
            load = OthersLoad.recent(cores)
            time.sleep(max(0.0, _SAMPLE_S - load.passed_s))
            locks = CoreLocks.take(cores) if load.since()[0] < QUIET else None
        except (OSError, ValueError, IndexError, AttributeError):  # only Linux has /proc
            return None
        return None if locks is None else CoreBinding(topology, locks, load)

    @property
    def most_workers(self) -> int:
        """Most workers that can have a core each."""
        return len(self._topology.physical_cores)

    def bind(self, pids: Sequence[int]) -> None:
        """Bind each of these workers to its own cores."""
        for pid, placement in zip(pids, plan_placement(self._topology, len(pids), "spread"), strict=True):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                set_cores(pid, placement.cores)
        self._bound = list(pids)

    def unbind(self) -> None:
        """Let the kernel move the workers again."""
        for pid in self._bound:
            with contextlib.suppress(OSError):
                set_cores(pid, self._topology.cores)
        self._bound = []

    def look(self, pids: Sequence[int]) -> None:
        """Check now and then: free the workers for good if others took time while we worked; bind replacements of bound workers."""
        passed_s, longest_s = time.monotonic() - self._looked, 4 * max(self._pause_s, _LOOK_EVERY_S)
        if not self._bound or passed_s < self._pause_s:
            return
        self._looked, (others, own) = time.monotonic(), self._load.since()
        self._pause_s = max(_LOOK_EVERY_S, 100 * (time.monotonic() - self._looked))  # looking at many processes takes long
        if list(pids) != self._bound:
            self.bind(pids)
        if own < _RESTING or passed_s > longest_s:  # over a long interval, what others did while we rested would count too
            return
        self._seen_s, self._taken_s = self._seen_s + passed_s, self._taken_s + others * passed_s
        if self._seen_s >= _JUDGED_S:
            if (share := self._taken_s / self._seen_s) >= QUIET:
                warnings.warn(f"Other processes use {share:.1f} cores: the simulator workers are no longer pinned.", stacklevel=2)
                self.release()
            self._seen_s = self._taken_s = 0.0

    def release(self) -> None:
        """Unbind the workers and release the locks; may be called twice."""
        self.unbind()
        self._locks.release()
        self.released = True


_since_import: list[OthersLoad] = []
with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # as in `CoreBinding.take`
    _since_import.append(OthersLoad(sorted(os.sched_getaffinity(0))))
