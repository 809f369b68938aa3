"""Locks of cores between real processes; workers that are bound and let go again, as the kernel says; how busy others are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embodied_rl.sim import core_binding
from embodied_rl.sim.core_binding import CoreBinding, CoreLocks, OthersLoad
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.topology import Topology

ALL = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(Topology.read(with_gpus=False).physical_cores) < 2, reason="needs two physical cores")

HOLDER = """
import sys, time
from pathlib import Path
from embodied_rl.sim.core_binding import CoreLocks
locks = CoreLocks.take([1, 2], Path(sys.argv[1]))
print(locks is not None, flush=True)
time.sleep(60)
"""


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert CoreLocks.take([2, 3], tmp_path) is None
        free = CoreLocks.take([0, 3], tmp_path)  # and the failure above kept nothing
        assert free is not None
        assert CoreLocks.take([3], tmp_path) is None  # not in this process either
        free.release()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.communicate()
    again = CoreLocks.take([1, 2, 3], tmp_path)
    assert again is not None
    again.release()
    again.release()


def test_links_and_folders_that_cannot_be_made_give_no_locks(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "0").symlink_to(tmp_path / "target")
    assert CoreLocks.take([0], tmp_path / "there") is None
    assert CoreLocks.take([0], tmp_path / "absent" / "deeper") is None
    assert not (tmp_path / "target").exists()


def test_load_that_cannot_be_told_is_not_taken_for_none() -> None:
    with pytest.raises(OSError, match="does not tell of all"):
        OthersLoad([*ALL, 100_000])


def test_time_of_others_is_told_from_our_own() -> None:
    """A spinning process of ours counts as ours; one that has another parent, as others'."""
    spin = "import time\nuntil = time.time() + 600\nwhile time.time() < until: pass"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    orphan = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {spin!r}], {quiet}).pid, flush=True)"
    ours = subprocess.Popen([sys.executable, "-c", spin])
    pid = int(subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True).stdout)

    def spun() -> float:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    try:
        counted = {int(line.split()[0]) for line in core_binding._our_stats()}
        assert {os.getpid(), ours.pid} <= counted
        assert pid not in counted
        load, began, used = OthersLoad(ALL), time.monotonic(), spun()
        while spun() < used + 0.2:
            time.sleep(0.05)
        found = load.since()[0] * (time.monotonic() - began)
    finally:
        ours.kill()
        ours.wait()
        os.kill(pid, signal.SIGKILL)
    assert found > 0.1


def affinities(manager: EnvManager) -> list[list[int]]:
    return [sorted(os.sched_getaffinity(pid)) for pid in manager.worker_pids()]


@needs_two
def test_workers_are_bound_until_others_take_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_binding.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(core_binding, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(core_binding, "_JUDGED_S", 0.0)
    others, own = 0.0, 1.0
    monkeypatch.setattr(OthersLoad, "since", lambda self: (others, own))
    with EnvManager(SimFactory("tests.sim.toy:CountingSim"), 4, num_workers=2) as manager:
        assert affinities(manager) == [ALL, ALL]
        binding = CoreBinding.take()
        assert binding is not None

        def look(binding: CoreBinding = binding) -> None:
            binding._pause_s = 0.0
            binding.look(manager.worker_pids())

        assert CoreBinding.take() is None  # another run
        assert binding.most_workers >= 2
        binding.bind(manager.worker_pids())
        first, second = affinities(manager)
        assert not set(first) & set(second)
        manager.core_binding = binding
        os.kill(manager.worker_pids()[0], signal.SIGKILL)
        manager.reset()
        look()
        assert affinities(manager) == [first, second]  # the new worker too
        others, own = 0.5, 0.1
        look()
        assert affinities(manager) == [first, second]  # it was not our turn
        own, binding._looked = 1.0, binding._looked - 5.0
        look()
        assert affinities(manager) == [first, second]  # nor for most of that time
        with pytest.warns(UserWarning, match=r"Other processes use 0\.5 cores"):
            look()
        assert affinities(manager) == [ALL, ALL]
        others = 0.0
        look()
        assert affinities(manager) == [ALL, ALL]  # for good
        other = CoreBinding.take()  # and the cores are free
        assert other is not None
        other.release()
        others = 0.5
        assert CoreBinding.take() is None


@needs_two
def test_bound_by_the_user_holds_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_binding.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(core_binding, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(OthersLoad, "since", lambda self: (0.0, 1.0))
    with EnvManager(SimFactory("tests.sim.toy:CountingSim"), 4, num_workers=2, placement="spread") as manager:
        assert CoreBinding.take() is None
        with EnvManager(SimFactory("tests.sim.toy:CountingSim"), 4, num_workers=2, placement="spread") as second:
            assert affinities(second) == affinities(manager)  # what the user says holds
    binding = CoreBinding.take()
    assert binding is not None
    binding.release()
