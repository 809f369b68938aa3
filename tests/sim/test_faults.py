"""What happens when a worker, or the manager itself, goes wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim import worker_pool
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, NonFiniteSimulationError, SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.worker_pool import WorkerProcess
from tests.sim.runs import PassingTime

pytestmark = pytest.mark.usefixtures("forked")

COUNTING = "tests.sim.toy:CountingSim"


def run_until_fault(misbehave: str, once: Path | None = None, passing: PassingTime | None = None, **options) -> tuple[SimFault, list[int]]:
    """`passing` passes when the simulator of `once` hangs."""
    kwargs = {"misbehave": misbehave, "at": 3, "length": 10, "once": None if once is None else str(once)}
    manager = EnvManager(SimFactory(COUNTING, kwargs=kwargs), 2, num_workers=2, faults=FaultPolicy(stop_on=frozenset(FaultKind)), **options)
    pids = manager.worker_pids()
    with manager:
        if passing is not None and once is not None:
            passing.pass_hours_when_hanging(manager, once)
        manager.reset()
        for _ in range(2):
            manager.step(np.ones((2, 1)))
        with pytest.raises(SimFault) as caught:
            manager.step(np.ones((2, 1)))
    return caught.value, pids


def assert_gone(pids: list[int], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_exception_comes_with_the_workers_traceback() -> None:
    fault, pids = run_until_fault("raise")
    assert fault.kind is FaultKind.RAISED
    assert fault.steps == (2,)
    assert "RuntimeError: the gripper fell off" in str(fault)
    assert "in _misbehave" in str(fault)
    assert_gone(pids)


def test_a_dead_worker_is_noticed_at_once() -> None:
    """Not at the deadline, which is after the end of this test."""
    fault, pids = run_until_fault("exit", step_timeout_s=3600.0)
    assert fault.kind is FaultKind.DIED
    assert "exit status 7" in str(fault)
    assert_gone(pids)


def test_a_hanging_worker_misses_its_deadline_and_says_where_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, pids = run_until_fault("hang", tmp_path / "happened", PassingTime(monkeypatch), step_timeout_s=3600.0)
    assert fault.kind is FaultKind.TIMED_OUT
    assert "No answer within 3600 s" in str(fault)
    assert "_hang_here" in str(fault)
    assert_gone(pids)


def test_what_simulators_print_does_not_fill_the_disk() -> None:
    with EnvManager(SimFactory(COUNTING), 1, num_workers=1) as manager:
        (worker,) = manager._live_pool().workers
        worker._output.file.write(b"x" * 2**21 + b"last words")
        worker.check(failed=False)
        assert worker._output.size() == 6_000
        told = str(worker.timed_out(1.0, "step"))  # the worker prints its stack behind what was kept
        assert 6_000 < worker._output.size() < 2**14
    assert "last words" in told


@pytest.mark.parametrize("where", ["observation", "reward"])
def test_nan_names_slot_seed_and_step(where: str) -> None:
    fault, pids = run_until_fault(f"nan_{where}")
    assert isinstance(fault, NonFiniteSimulationError)
    assert f"NaN or infinity in the {where}" in str(fault)
    assert len(fault.slots) == 1
    assert fault.steps == (3,)
    assert 0 <= fault.seeds[0] < 2**30
    assert_gone(pids)


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("tests.sim.toy:CountingSym", {}, "Did you mean 'CountingSim'"),
        ("tests.sim.toi:CountingSim", {}, "cannot be imported"),
        ("nonsense", {}, "not of the form"),
        (COUNTING, {"colour": "red"}, "does not take 'colour'. Known: at, busy_s, image, length"),
        ("embodied_rl.sim.robots.metaworld:make", {"colour": "red"}, "Simulator 'metaworld' does not take 'colour'"),
        (
            "embodied_rl.sim.text.frozenlake:make",
            {"hole_share": "much"},
            "frozenlake:make' cannot be made with {'hole_share': 'much'}",
        ),
        ("math:pi", {}, "3.14159.* must be a class or function that makes a gymnasium.Env"),
        ("time:time", {}, "must be a class or function that makes a gymnasium.Env"),
        ("os:getcwd", {}, "without num_envs must return a gymnasium.Env, got str"),
    ],
)
def test_a_wrong_target_is_one_line(target: str, kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(". ", r"\. ")) as caught:
        EnvManager(SimFactory(target, kwargs=kwargs), 1)
    assert "\n" not in str(caught.value)


def our_shared_memory() -> set[str]:
    """Names of ours in /dev/shm; those of other programs, and of tests that run beside this one, come and go."""
    return {name for name in os.listdir("/dev/shm") if "embodied" in name}


SCRIPT = """
    import signal, sys, time, numpy as np
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests were started with it ignored (nohup)
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.sim.manager import EnvManager
    manager = EnvManager(SimFactory("tests.sim.toy:CountingSim", kwargs={kwargs}), 4, num_workers=2)
    manager.reset()
    print(*manager.worker_pids(), flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "kwargs", "how"),
    [
        ("while True: manager.step(np.zeros((4, 1)))", {}, signal.SIGKILL),
        ("while True: manager.step(np.zeros((4, 1)))", {}, signal.SIGINT),
        ("while True: manager.step(np.zeros((4, 1)))", {"misbehave": "hang"}, signal.SIGKILL),
        ("sys.exit(3)", {}, None),
        ("raise RuntimeError", {}, None),
    ],
)
def test_nothing_is_left_behind_however_the_manager_ends(then: str, kwargs: dict, how: signal.Signals | None) -> None:
    before = our_shared_memory()
    script = textwrap.dedent(SCRIPT).format(kwargs=kwargs, then=then)
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if how is not None:
        time.sleep(0.3)
        process.send_signal(how)
    process.wait(60)
    process.stdout.close()
    assert_gone(pids)
    assert our_shared_memory() - before == set()


def test_two_threads_learn_the_same_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's watcher asks while another thread closes: the number comes once."""
    readable = worker_pool.can_be_read

    def readable_for_both(*descriptors: int, timeout_s: float | None) -> bool:
        found = readable(*descriptors, timeout_s=timeout_s)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(worker_pool, "can_be_read", readable_for_both)
    process = WorkerProcess(0, {"num_envs": [1]})
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: process.pid, range(2))
        assert first == second
        assert first != process._process.pid, "the keeper's"
    finally:
        process.close()


def test_descriptors_and_processes_do_not_pile_up() -> None:
    own = psutil.Process()
    gc.collect()  # of other tests: what is closed while this one counts
    counts = []
    for _ in range(3):
        with EnvManager(SimFactory(COUNTING), 2, num_workers=1) as manager:
            manager.reset()
        counts.append((own.num_fds(), len(own.children())))
    assert len(set(counts)) == 1, counts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, last = max(map(int, os.listdir("/proc/self/fd"))), -1
    with contextlib.ExitStack() as gaps:
        while last < highest:  # the limit is one of numbers, and other tests leave gaps among them
            last = os.open(os.devnull, os.O_RDONLY)
            gaps.callback(os.close, last)
        before = own.num_fds(), len(own.children())
        for further in range(3, 7):  # of all that a worker needs, so many can be opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + further, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    WorkerProcess(0, {"num_envs": [1]})
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            gc.collect()
            assert (own.num_fds(), len(own.children())) == before


def test_a_thousand_slabs_leave_nothing_behind() -> None:
    from embodied_rl.sim.transport import Slab, slab_layout
    from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

    layout = slab_layout(SimSpec("t", {"rgb": TensorSpec((64, 64, 3), "uint8")}, ActionSpec.continuous([-1.0], [1.0])), 16, 4)
    own, shm = psutil.Process(), our_shared_memory()
    Slab(layout).close()
    gc.collect()  # of other tests too
    before = own.num_fds()
    for _ in range(1000):
        Slab(layout).close()
    assert own.num_fds() == before
    assert our_shared_memory() - shm == set()
