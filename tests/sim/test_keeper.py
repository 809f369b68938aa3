"""A worker's own children end with it, however it or its manager ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from embodied_rl.sim import worker_pool as process
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind
from embodied_rl.sim.manager import EnvManager

STARTING = "tests.sim.toy:StartingSim"
NUM_STARTED = 4
"""By one worker: a child, one in its own session, a daemon, and a fork that holds all descriptors."""


def started(folder: Path, num_workers: int = 1) -> list[int]:
    """Numbers of what the workers started, once all have."""
    deadline = time.monotonic() + 120
    while len(pids := [int(path.name) for path in folder.iterdir()]) < NUM_STARTED * num_workers and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == NUM_STARTED * num_workers
    return pids


def left(pids: list[int], within_s: float) -> list[int]:
    """Those that still run when the time is over."""
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def manager_of(folder: Path) -> EnvManager:
    folder.mkdir(exist_ok=True)
    return EnvManager(SimFactory(STARTING, kwargs={"folder": str(folder)}), 1, num_workers=1)


@pytest.mark.parametrize("how", ["close", "worker", "stopped worker", "keeper and worker stopped"])
def test_what_a_simulator_started_ends_with_its_worker(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how.startswith("keeper"):
        monkeypatch.setattr(process, "_KEEPER_S", 2.0)  # it is stopped: waiting longer changes nothing
    with manager_of(tmp_path / "first") as manager:
        manager.reset()
        pids = started(tmp_path / "first")
        assert left(pids, 0.0) == pids, "they run: the test means something"
        worker = manager.worker_pids()[0]
        if how == "worker":
            os.kill(worker, signal.SIGKILL)
        elif how != "close":
            for pid in {worker, psutil.Process(worker).ppid() if how.startswith("keeper") else worker}:
                os.kill(pid, signal.SIGSTOP)
        if how == "worker":
            assert left(pids, 120.0) == []
            manager.step(np.zeros((1, 1)))
            assert [record.kind for record in manager.fault_records] == [FaultKind.DIED]
    if how.startswith("keeper"):  # what left the group is out of reach then: the session of its own, and the daemon
        pids = [pid for pid in pids if (tmp_path / "first" / str(pid)).read_text() in ("child", "fork")]
    assert left(pids, 120.0) == []
    for path in (tmp_path / "first").iterdir():
        if _runs(int(path.name)):
            os.kill(int(path.name), signal.SIGKILL)


def test_a_keeper_that_is_killed_takes_its_worker_along_and_the_run_goes_on(tmp_path: Path) -> None:
    with manager_of(tmp_path / "first") as manager:
        manager.reset()
        worker, pids = manager.worker_pids()[0], started(tmp_path / "first")
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        assert left([worker], 120.0) == []
        assert manager.step(np.ones((1, 1))).observation["state"][0, 1:].tolist() == [1.0, 1.0]
        grouped = [pid for pid in pids if (tmp_path / "first" / str(pid)).read_text() in ("child", "fork")]
        assert left(grouped, 120.0) == []
        for pid in left(pids, 0.0):  # out of reach
            os.kill(pid, signal.SIGKILL)


EARLY = """
    import os, signal
    from embodied_rl.sim import keeper
    fork = os.fork
    def fork_late():
        os.kill(os.getpid(), signal.SIGTERM)
        return fork()
    os.fork = fork_late
    keeper.main()
"""


def test_a_keeper_that_is_ended_before_it_has_a_worker_starts_none() -> None:
    """Else a fault of a worker that has only begun would cost ten seconds, because the signal was lost."""
    ours, theirs = socket.socketpair()
    life, ready = os.pipe(), os.pipe()
    handed = (theirs.fileno(), life[0], ready[1])
    ours.close()  # a worker would end by itself
    command = [sys.executable, "-c", textwrap.dedent(EARLY), "embodied_rl.sim.worker", str(os.getpid()), *map(str, handed)]
    ended = subprocess.run(command, pass_fds=handed, cwd=Path(__file__).parents[2], timeout=120, capture_output=True, check=False)
    for descriptor in (*life, *ready):
        os.close(descriptor)
    theirs.close()
    assert ended.returncode == -signal.SIGTERM


SCRIPT = """
    import sys, threading, time
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.sim.manager import EnvManager
    managers = []
    def begin():
        managers.append(EnvManager(SimFactory("tests.sim.toy:StartingSim", kwargs={{"folder": sys.argv[1]}}), 2, num_workers=2))
    {begin}
    managers[0].reset()
    print(*managers[0].worker_pids(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("begin", ["begin()", "thread = threading.Thread(target=begin); thread.start(); thread.join()"])
def test_what_a_simulator_started_ends_with_a_killed_manager(tmp_path: Path, begin: str) -> None:
    script = textwrap.dedent(SCRIPT).format(begin=begin)
    (tmp_path / "started").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "started")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    pids = started(tmp_path / "started", 2)
    keepers = [psutil.Process(worker).ppid() for worker in workers]
    assert left(pids, 0.0) == pids
    process.kill()
    process.wait(60)
    process.stdout.close()
    assert left([*workers, *keepers, *pids], 120.0) == []
