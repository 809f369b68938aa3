"""Episodes of a manager saved, taken up elsewhere, and put away while the memory is needed."""

from __future__ import annotations

import time

import numpy as np
import psutil
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.episode_log import EpisodeLog, Snapshot
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.snapshots import SnapshotError, encode_state
from embodied_rl.sim.worker_pool import WorkerPool, WorkerProcess
from tests.sim.runs import Trace, action_of, assert_same, note, play_lockstep
from tests.sim.test_faults import assert_gone

pytestmark = pytest.mark.usefixtures("forked")
COUNTING = "tests.sim.toy:CountingSim"
SAVED = "tests.sim.toy:SavedCountingSim"
KINDS = [COUNTING, SAVED]


def make(target: str = COUNTING, slots: int = 4, **kwargs) -> EnvManager:
    options = {name: kwargs.pop(name) for name in ("chunk_size", "num_workers") if name in kwargs}
    return EnvManager(SimFactory(target, kwargs={"length": 7, **kwargs}), slots, **{"num_workers": 2, **options})


@pytest.mark.parametrize("target", KINDS)
def test_offload_ends_the_processes_and_the_run_goes_on_as_if_nothing_was(target: str) -> None:
    with make(target) as manager:
        manager.reset()
        clean = play_lockstep(manager, 30)
    with make(target) as manager:
        manager.reset()
        trace: Trace = {}
        for first in (0, 11, 14):
            for slot, steps in play_lockstep(manager, {0: 11, 11: 3, 14: 16}[first], start=first).items():
                trace.setdefault(slot, []).extend(steps)
            pids = manager.worker_pids()
            assert manager.offload() > 0
            assert_gone(pids)
            with pytest.raises(RuntimeError, match="call onload"):
                manager.step(np.zeros((4, 1)))
            manager.onload()
        assert [psutil.Process(pid).is_running() for pid in manager.worker_pids()] == [True, True]
        assert manager.fault_records == []
    assert_same(trace, clean)


@pytest.mark.parametrize("target", KINDS)
def test_an_episode_goes_on_in_another_slot_of_another_manager(target: str) -> None:
    with make(target) as manager:
        manager.reset(EpisodeSeeds.training(5))
        play_lockstep(manager, 10)  # three steps into the second episodes
        saved = [Snapshot.from_bytes(snapshot.to_bytes()) for snapshot in manager.snapshot([1, 2])]
        rest = play_lockstep(manager, 20, start=10)
    assert [snapshot.index for snapshot in saved] == [1, 1]
    assert [snapshot.seed for snapshot in saved] == [EpisodeSeeds.training(5).seed(slot, 1, 4) for slot in (1, 2)]
    with make(target, slots=3, num_workers=1) as other:
        other.reset(EpisodeSeeds.training(9))
        other.step(np.ones((3, 1)))
        batch = other.restore([0, 2], saved)
        for row, snapshot in enumerate(saved):
            np.testing.assert_array_equal(batch.observation["state"][row], snapshot.observation["state"])
        assert not batch.done.any()
        trace: Trace = {}
        for number in range(10, 30):
            other.send([0, 2], np.stack([action_of(1, number), action_of(2, number)]))
            note(trace, other.recv([0, 2]))
    for mine, theirs in ((0, 1), (2, 2)):
        for got, expected in zip(trace[mine], rest[theirs], strict=True):
            np.testing.assert_array_equal(got[0]["state"], expected[0]["state"])
            assert got[1:5] == expected[1:5]
            assert (got[5] is None) == (expected[5] is None)
            if got[5]:  # its return counts what it got before the snapshot
                assert (got[5].seed, got[5].index, got[5].length) == (expected[5].seed, expected[5].index, expected[5].length)
                assert got[5].episode_return == expected[5].episode_return


def test_a_snapshot_after_an_episodes_end_is_of_the_next_episode() -> None:
    with make(SAVED) as manager:
        manager.reset()
        play_lockstep(manager, 6)
        manager.send(range(4), np.ones((4, 1)))  # the seventh and last step
        (snapshot,) = manager.snapshot([3])
        assert (snapshot.index, snapshot.base, snapshot.actions) == (1, None, ())
        assert len(manager.recv(range(4)).episodes) == 4


def test_a_slot_that_was_saved_can_be_saved_again_and_killed() -> None:
    with make(SAVED) as manager:
        manager.reset()
        clean = play_lockstep(manager, 20)
    with make(SAVED) as manager:
        manager.reset()
        trace = play_lockstep(manager, 3)
        manager.snapshot(range(4))
        for slot, steps in play_lockstep(manager, 2, start=3).items():
            trace[slot] += steps
        psutil.Process(manager.worker_pids()[0]).kill()
        for slot, steps in play_lockstep(manager, 15, start=5).items():
            trace[slot] += steps
        assert {fault.step for fault in manager.fault_records[0].slots} <= {2}  # played again from the snapshot, not from the seed
    assert_same(trace, clean)


def test_drift_is_told() -> None:
    """A restore that is off by 0.25: seen in slots that were idle when their worker died, whose last observation is known."""
    with make(SAVED, drifts=True) as manager:
        manager.reset()
        play_lockstep(manager, 2)
        manager.snapshot(range(4))
        play_lockstep(manager, 1, start=2)
        psutil.Process(manager.worker_pids()[0]).kill()
        deadline = time.monotonic() + 120
        while not manager.fault_records and time.monotonic() < deadline:
            manager.send([2, 3], np.zeros((2, 1)))
            manager.recv([2, 3])
            manager._supervisor.poll()
        drifts = {slot.slot: (slot.outcome, slot.drift) for slot in manager.fault_records[0].slots}
        assert drifts == {0: ("restored", 0.25), 1: ("restored", 0.25)}


def test_long_episodes_are_forgotten_at_their_beginning_alone() -> None:
    episode_log = EpisodeLog(2, keep_actions=True, max_messages=10_000)
    for number in range(30_000):
        episode_log.sent(range(2), np.full((2, 1), number))
        if number % 5 == 4:
            episode_log.ended([1])
    assert episode_log.is_lost(0)
    assert not episode_log.is_lost(1)
    assert episode_log.actions(1) == []
    assert len(episode_log._log) <= 10_000
    for number in range(3):
        episode_log.sent(np.asarray([1]), np.full((1, 1), number))
    assert [float(action[0]) for action in episode_log.actions(1)] == [0, 1, 2]
    assert episode_log.point(1) == (6000, 3)
    brief = EpisodeLog(2, keep_actions=True)
    for number in range(5 * 400):
        brief.sent(range(2), np.full((2, 1), number))
        assert [int(action[0]) for action in brief.actions(0)] == list(range(number - number % 5, number + 1))
        assert len(brief._log) <= 5 + 64, "texts of many agents take much memory"
        if number % 5 == 4:
            brief.ended([0, 1])


def test_foreign_bytes_and_snapshots_are_refused() -> None:
    with make() as manager:
        manager.reset()
        (snapshot,) = manager.snapshot([0])
        data = snapshot.to_bytes()
        for bad in (b"", data[:-3], data[:20] + b"x" + data[21:], encode_state({"some": "thing"})):
            with pytest.raises(SnapshotError):
                Snapshot.from_bytes(bad)
    with make(chunk_size=2) as other:
        other.reset()
        with pytest.raises(SnapshotError, match="does not fit"):
            other.restore([0], [snapshot])


def test_switching_tasks_keeps_both_sets_of_workers_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SimFactory(COUNTING, kwargs={"length": 7}), SimFactory(COUNTING, task="other", kwargs={"length": 3})
    with EnvManager(first, 4, num_workers=2) as manager:
        manager.prepare(second)
        manager.reset()
        clean = play_lockstep(manager, 8)
        pids = manager.worker_pids()
        manager.switch(second, keep=True)
        assert manager.spec.task == "other"
        manager.reset()
        assert {step[5].length for steps in play_lockstep(manager, 8).values() for step in steps if step[5]} == {3}
        manager.switch(first)
        assert manager.worker_pids() == pids
        manager.reset()
        assert_same(play_lockstep(manager, 8), clean)
        assert list(manager._pools) == [first.key]  # the second task's workers were not to be kept
        with pytest.raises(UserError, match="does not take 'nonsense'"):
            manager.switch(SimFactory(COUNTING, kwargs={"nonsense": 1}))
        manager.reset()
        assert_same(play_lockstep(manager, 8), clean)
        spawn = WorkerPool._spawn

        def only_one(pool: WorkerPool, index: int) -> WorkerProcess:
            if index > 0:
                raise OSError("no process")
            return spawn(pool, index)

        with monkeypatch.context() as patch:
            patch.setattr(WorkerPool, "_spawn", only_one)
            with pytest.raises(OSError, match="no process"):
                manager.prepare(second)
        manager.prepare(second)
        assert len(manager._pools[second.key].workers) == 2, "not the half that had started"
        other = manager._pools[second.key].workers[0]
        manager.offload()
        assert list(manager._pools) == [first.key]
        assert not other.alive()
        manager.onload()


def test_snapshots_that_a_socket_cannot_hold_are_restored() -> None:
    """The worker reads while they are sent."""
    factory = SimFactory("tests.sim.toy:HeavySavedSim", kwargs={"length": 9})
    with EnvManager(factory, 4, num_workers=1, autoreset=False) as manager:
        slots = list(range(4))
        manager.begin(slots, [5, 6, 7, 8])
        manager.recv()
        manager.send(slots, np.ones((4, 1), np.float32))
        seen = manager.recv().observation["state"].copy()
        saved = manager.snapshot(slots)
        manager.send(slots, np.ones((4, 1), np.float32))
        manager.recv()
        np.testing.assert_array_equal(manager.restore(slots, saved).observation["state"], seen)
        manager.send(slots, np.full((4, 1), 2.0, np.float32))
        assert manager.recv().observation["state"].tolist() == [[seed, 2.0, 3.0] for seed in (5, 6, 7, 8)]
        assert manager.fault_records == []
