"""A worker that fails is replaced, its episodes go on where they were, and the others never notice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.distributed.channel import Channel
from embodied_rl.distributed.processes import start_module
from embodied_rl.sim import worker_pool as process
from embodied_rl.sim import worker_simulators
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.transport import PENDING
from tests.sim.runs import PassingTime, action_of, assert_same, hangs, note, play_asynchronously, play_lockstep

pytestmark = pytest.mark.usefixtures("forked")
COUNTING = "tests.sim.toy:CountingSim"
SAVED = "tests.sim.toy:SavedCountingSim"


def make(target: str = COUNTING, slots: int = 4, workers: int = 2, policy: FaultPolicy | None = None, **kwargs) -> EnvManager:
    options = {name: kwargs.pop(name) for name in ("step_timeout_s", "chunk_size", "spare_workers") if name in kwargs}
    return EnvManager(SimFactory(target, kwargs={"length": 7, **kwargs}), slots, num_workers=workers, faults=policy, **options)


def clean_run(messages: int, **kwargs) -> dict:
    with make(**kwargs) as manager:
        manager.reset()
        return play_lockstep(manager, messages)


@pytest.mark.parametrize("target", [COUNTING, SAVED, "gymnasium:CartPole-v1"])
def test_a_killed_worker_changes_nothing_but_the_time(target: str) -> None:
    if target.startswith("gymnasium"):
        factory = SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1")
        managers = [EnvManager(factory, 4, num_workers=2) for _ in range(2)]

        def act(manager: EnvManager, number: int) -> np.ndarray:
            return np.random.default_rng(number).integers(0, 2, (4, 1))
    else:
        managers = [make(target) for _ in range(2)]

        def act(manager: EnvManager, number: int) -> np.ndarray:
            return np.random.default_rng(number).uniform(-1, 1, (4, 1))

    outcomes: list[list] = []
    for kills, manager in zip(((), (3, 10, 11)), managers, strict=True):
        seen = []
        with manager:
            manager.reset()
            for number in range(40):
                if number in kills:
                    os.kill(manager.worker_pids()[number % 2], signal.SIGKILL)
                batch = manager.step(act(manager, number))
                seen.append(({key: part.copy() for key, part in batch.observation.items()}, batch.reward.copy(), batch.episodes))
            assert manager.num_restarts == len(kills)
            assert all(record.kind is FaultKind.DIED and "SIGKILL" in record.detail for record in manager.fault_records)
            assert all(slot.outcome == "restored" and slot.drift in (None, 0.0) for r in manager.fault_records for slot in r.slots)
        outcomes.append(seen)
    for (o1, r1, e1), (o2, r2, e2) in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(o1["state"], o2["state"])
        np.testing.assert_array_equal(r1, r2)
        assert e1 == e2


@pytest.mark.parametrize(
    ("misbehave", "kind", "cause", "options"),
    [
        ("raise", FaultKind.RAISED, r"RuntimeError: the gripper fell off", {}),
        ("exit", FaultKind.DIED, r"exit status 7", {}),
        (
            "hang",
            FaultKind.TIMED_OUT,
            r'No answer within 3600 s while it should step\. File ".*toy\.py", line \d+ in _hang_here',
            {"step_timeout_s": 3600.0},
        ),
        ("nan_observation", FaultKind.NON_FINITE, r"NaN or infinity in the observation: .*", {}),
        ("nan_reward", FaultKind.NON_FINITE, r"NaN or infinity in the reward: .*", {}),
        ("leak", FaultKind.OUT_OF_MEMORY, r"\d+ MB resident; the limit is 300 MB\.", {"policy": FaultPolicy(memory_limit_mb=300)}),
    ],
)
def test_a_passing_fault_of_any_kind_is_healed_without_a_trace(
    misbehave: str, kind: FaultKind, cause: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = PassingTime(monkeypatch)
    with make(misbehave=misbehave, at=5, once=str(tmp_path / "happened"), **options) as manager:
        manager.reset()
        passing.pass_hours_when_hanging(manager, tmp_path / "happened")
        trace = play_lockstep(manager, 20)
        assert [record.kind for record in manager.fault_records] == [kind]
        assert manager.fault_records[0].to_dict()["kind"] == kind.name
        assert re.fullmatch(cause, manager.fault_records[0].cause)
    assert_same(trace, clean_run(20))


def test_a_wrong_shape_is_a_fault_of_its_own(tmp_path: Path) -> None:
    factory = SimFactory("tests.sim.toy:BentEnv", kwargs={"once": str(tmp_path / "happened")})
    with EnvManager(factory, 2, num_workers=1) as manager:
        manager.reset()
        steps = [manager.step(np.zeros((2, 1))).observation["state"][:, 0].tolist() for _ in range(8)]
        assert steps == [[1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [0, 0], [1, 1], [2, 2]]
        (record,) = manager.fault_records
        assert record.kind is FaultKind.WRONG_SHAPE
        assert "'BentEnv'" in record.detail
        assert "(4,)" in record.detail
        assert "(3,)" in record.detail


def test_an_episode_that_always_fails_is_given_up_and_the_others_are_not() -> None:
    seeds = EpisodeSeeds.training(0)
    victim = seeds.seed(2, 1, 4)  # the second episode of slot 2
    with make(misbehave="raise", at=3, victim=victim) as manager:
        manager.reset()
        trace = play_lockstep(manager, 30)
        aborted = [slot for record in manager.fault_records for slot in record.slots if slot.outcome == "aborted"]
        assert [(slot.slot, slot.episode, slot.seed) for slot in aborted] == [(2, 1, victim)]
        assert "the gripper fell off" in manager.fault_records[0].detail
        assert len(manager.fault_records) == 2  # it was tried twice
    clean = clean_run(30)
    others = {slot: steps for slot, steps in trace.items() if slot != 2}
    assert_same(others, {slot: steps for slot, steps in clean.items() if slot != 2})
    # Slot 2: 7 steps, then 2 of the second episode, then the step that was given up, then the third episode from its start.
    given_up = trace[2][9]
    assert given_up[1:5] == (0.0, False, True, False)
    assert given_up[0]["state"].tolist() == [seeds.seed(2, 2, 4), 0, 0]
    assert given_up[6]["state"].tolist() == trace[2][8][0]["state"].tolist()  # the last good observation
    assert [step[5].index for step in trace[2] if step[5]] == [0, 2, 3]


def test_an_episode_is_not_to_blame_for_workers_that_die_before_they_touch_it() -> None:
    with make(slots=2, workers=1) as manager:
        manager.reset()
        trace = play_lockstep(manager, 3)
        first = manager.worker_pids()[0]
        os.kill(first, signal.SIGSTOP)
        manager.send([0], action_of(0, 3)[None])  # pending alone: it would be the culprit
        os.kill(first, signal.SIGKILL)
        for _ in range(2):  # and who takes its place dies on the way back
            before, deadline = manager.worker_pids()[0], time.monotonic() + 120
            while manager.worker_pids()[0] == before and time.monotonic() < deadline:
                manager.recv(min_ready=1, timeout_s=0.01)
            os.kill(manager.worker_pids()[0], signal.SIGKILL)
        note(trace, manager.recv([0]))
        manager.send([1], action_of(1, 3)[None])
        note(trace, manager.recv([1]))
        assert [slot.outcome for record in manager.fault_records for slot in record.slots if slot.slot == 0] == ["restored"] * 3
        for slot, steps in play_lockstep(manager, 10, start=4).items():
            trace[slot] += steps
    assert_same(trace, clean_run(14, slots=2, workers=1))


@pytest.mark.parametrize("when", ["before it is told what to build", "before it is handed the memory"])
def test_who_takes_a_workers_place_may_die_at_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to it then finds nobody."""
    monkeypatch.setattr("embodied_rl.sim.worker_pool.start_module", start_module)  # its keeper is a child of this process
    hurt: list[int] = []

    def kill(pid: int) -> None:
        if not hurt:
            hurt.append(pid)
            os.kill(pid, signal.SIGKILL)
            keeper = manager._pool.workers[0]._process.pid  # type: ignore[union-attr]
            os.waitid(os.P_PID, pid if when.endswith("build") else keeper, os.WEXITED | os.WNOWAIT)  # gone, and nobody has been told

    with make(slots=2, workers=1) as manager:
        manager.reset()
        trace = play_lockstep(manager, 3)
        if when.endswith("build"):
            start = subprocess.Popen

            def started(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
                process = start(*words, **options)
                kill(process.pid)
                return process

            monkeypatch.setattr(subprocess, "Popen", started)
        else:
            ask = Channel.ask

            def asked(channel: Channel, *message: Any, fds: Sequence[int] = (), **options: Any) -> None:
                if fds:
                    kill(manager.worker_pids()[0])
                ask(channel, *message, fds=fds, **options)

            monkeypatch.setattr(Channel, "ask", asked)
        first = manager.worker_pids()[0]
        os.kill(first, signal.SIGKILL)
        for slot, steps in play_lockstep(manager, 10, start=3).items():
            trace[slot] += steps
        assert [(record.kind, record.pid) for record in manager.fault_records] == [(FaultKind.DIED, pid) for pid in (first, *hurt)]
    monkeypatch.undo()
    assert_same(trace, clean_run(13, slots=2, workers=1))


def test_a_beginning_is_made_again_wherever_the_worker_ended_in_it() -> None:
    for taken_back in (0, 1):  # the word for it, before the worker said that it is done
        with make(slots=1, workers=1) as manager:
            manager.reset()
            manager.step(np.ones((1, 1)))
            worker = manager.worker_pids()[0]
            os.kill(worker, signal.SIGSTOP)
            manager.begin([0], [77])
            manager._pool.slab.arrays["begin"][0] = 1 - taken_back  # type: ignore[union-attr]
            os.kill(worker, signal.SIGKILL)
            first = manager.recv([0])
            assert first.observation["state"].tolist() == [[77, 0, 0]]
            assert (first.reward.tolist(), first.episodes) == ([0.0], ())
            assert manager.step(np.full((1, 1), 0.5)).observation["state"].tolist() == [[77, 1, 0.5]]


def kill_behind_the_step(manager: EnvManager) -> None:
    """End the first worker when it has stepped the first slot, and return when that is noticed."""
    deadline = time.monotonic() + 120
    while manager._pool.state[0] == PENDING and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    os.kill(manager.worker_pids()[0], signal.SIGKILL)
    while not manager.num_restarts and time.monotonic() < deadline:
        manager._supervisor.poll()


def test_an_end_that_nobody_fetched_yet_is_no_drift() -> None:
    factory = SimFactory(COUNTING, kwargs={"length": 2})
    with EnvManager(factory, 1, num_workers=1, autoreset=False) as manager:
        manager.reset()
        manager.step(np.ones((1, 1)))
        manager.send([0], np.ones((1, 1)))
        kill_behind_the_step(manager)
        manager._supervisor.settle()
        assert [(slot.outcome, slot.drift) for record in manager.fault_records for slot in record.slots] == [("restored", None)]
        last = manager.recv([0])
        assert last.terminated.tolist() == [True]
        assert last.observation["state"][0, 1:].tolist() == [2, 2]
        manager.begin([0], [77])
        assert manager.recv([0]).observation["state"].tolist() == [[77, 0, 0]]


@pytest.mark.parametrize("target", [COUNTING, "tests.sim.toy:ForgottenSim"])
def test_an_episode_may_go_on_after_an_end_while_its_worker_is_away(target: str) -> None:
    """The next one, which had not begun for anybody: nothing of it is lost, and its first step is no beginning."""
    with make(target, slots=1, workers=1, length=2) as manager:
        manager.reset()
        manager.step(np.ones((1, 1)))
        manager.send([0], np.ones((1, 1)))
        kill_behind_the_step(manager)
        assert manager.recv([0]).terminated.tolist() == [True]
        manager.send([0], np.full((1, 1), 0.5))
        batch = manager.recv([0])
        assert batch.aborted is None
        assert batch.observation["state"].tolist() == [[EpisodeSeeds.training(0).seed(0, 1, 1), 1, 0.5]]


def test_restart_begins_new_episodes_for_the_failed_worker_alone() -> None:
    with make(policy=FaultPolicy(recovery="restart")) as manager:
        manager.reset()
        kill = {3: 0}

        def before(number: int) -> None:
            if number in kill:
                os.kill(manager.worker_pids()[kill[number]], signal.SIGKILL)

        trace = play_lockstep(manager, 14, before)
        assert {slot.slot: slot.outcome for slot in manager.fault_records[0].slots} == {0: "aborted", 1: "aborted"}
    clean = clean_run(14)
    assert_same({slot: trace[slot] for slot in (2, 3)}, {slot: clean[slot] for slot in (2, 3)})
    for slot in (0, 1):
        assert trace[slot][3][2:4] == (False, True)
        assert trace[slot][3][5] is None
        assert trace[slot][10][5].index == 1
        assert trace[slot][10][5].length == 7


def test_the_batch_says_which_slots_were_given_up() -> None:
    with make(policy=FaultPolicy(recovery="restart")) as manager:
        manager.reset()
        assert manager.step(np.ones((4, 1))).aborted is None
        os.kill(manager.worker_pids()[1], signal.SIGKILL)
        batch = manager.step(np.ones((4, 1)))
        assert batch.aborted is not None
        assert batch.aborted.tolist() == [False, False, True, True]


def test_other_slots_go_on_while_a_worker_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing, once = PassingTime(monkeypatch), tmp_path / "happened"
    victim = EpisodeSeeds.training(0).seed(0, 0, 4)
    with make(misbehave="hang", at=2, victim=victim, once=str(once), step_timeout_s=3600.0) as manager:
        manager.reset()
        manager.send(range(4), np.ones((4, 1)))
        manager.recv(range(4))
        manager.send(range(4), np.ones((4, 1)))
        manager.recv([2, 3])
        for _ in range(30):
            manager.send([2, 3], np.ones((2, 1)))
            assert set(manager.recv(min_ready=2).slots.tolist()) == {2, 3}
        deadline = time.monotonic() + 240
        while not hangs(once) and time.monotonic() < deadline:
            time.sleep(0.01)
        manager._supervisor.poll()  # it is seen to do nothing
        assert manager.fault_records == []
        passing.pass_hours()
        assert set(manager.recv(min_ready=1).slots.tolist()) <= {0, 1}  # they come back
        assert manager.fault_records[0].kind is FaultKind.TIMED_OUT
        assert "_hang_here" in manager.fault_records[0].detail


def test_time_between_two_steps_is_not_a_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours for loading a model or for an update, then a step that takes long enough to be looked at."""
    passing = PassingTime(monkeypatch)
    with make(slots=2, workers=1, step_timeout_s=3600.0) as manager:
        manager.reset()
        for _ in range(2):
            passing.pass_hours(looks=1)
            (pid,) = manager.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            manager.send(range(2), np.ones((2, 1)))
            manager._supervisor.poll()
            os.kill(pid, signal.SIGCONT)
            manager.recv()
            manager._supervisor.poll()  # the slots wait for actions
        assert manager.fault_records == []
        assert manager.num_restarts == 0


def test_a_machine_that_stood_still_during_a_step_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a queue that stops all processes of a job for a while."""
    passing = PassingTime(monkeypatch)
    with make(slots=2, workers=1, step_timeout_s=3600.0) as manager:
        manager.reset()
        (pid,) = manager.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        manager.send(range(2), np.ones((2, 1)))
        manager._supervisor.poll()
        passing.pass_hours(looks=1)
        for _ in range(3):
            manager._supervisor.poll()
        os.kill(pid, signal.SIGCONT)
        manager.recv()
        assert manager.num_restarts == 0


def test_a_machine_that_stood_still_during_a_reset_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    passing, wait, looks = PassingTime(monkeypatch), worker_simulators.wait, list[float]()
    with make(slots=2, workers=1) as manager:
        (pid,) = manager.worker_pids()
        os.kill(pid, signal.SIGSTOP)

        def look(sockets: Any, timeout_s: float) -> list[Any]:
            looks.append(timeout_s)
            if len(looks) == 1:
                passing.pass_hours(looks=1)
                return []
            os.kill(pid, signal.SIGCONT)
            return wait(sockets, timeout_s)

        monkeypatch.setattr(worker_simulators, "wait", look)
        manager.reset()
        assert len(looks) > 1
        assert manager.num_restarts == 0


def test_a_report_that_a_socket_cannot_hold_is_read() -> None:
    """The manager reads while the worker sends."""
    with make(slots=1, workers=1, misbehave="raise at length", at=2, policy=FaultPolicy(stop_on=frozenset(FaultKind))) as manager:
        manager.reset()
        manager.step(np.ones((1, 1)))
        with pytest.raises(SimFault) as caught:
            manager.step(np.ones((1, 1)))
        assert caught.value.kind is FaultKind.RAISED
        assert len(caught.value.detail) > 1_000_000


def test_a_picture_waits_for_a_step_in_flight_and_for_its_failure(tmp_path: Path) -> None:
    once = tmp_path / "happened"
    with make(slots=1, workers=1, misbehave="wait and raise", at=2, once=str(once)) as manager:
        manager.reset()
        manager.step(np.ones((1, 1)))
        manager.send([0], np.ones((1, 1)))
        while not hangs(once):
            time.sleep(0.01)
        threading.Timer(0.1, once.with_name(f"{once.name}.goes_on").touch).start()
        assert manager.render([0])[0][0, 0, 0] == 2
        assert [record.kind for record in manager.fault_records] == [FaultKind.RAISED]
        assert manager.recv().observation["state"][0, 1:].tolist() == [2, 2]


def test_a_simulator_that_fails_at_once_ends_the_run_with_the_cause() -> None:
    with make(misbehave="raise", at=1) as manager:
        manager.reset()
        with pytest.raises(SimFault, match="the gripper fell off") as caught:
            manager.step(np.ones((4, 1)))
        assert caught.value.kind is FaultKind.RAISED


def test_a_simulator_that_always_fails_ends_the_run_with_the_cause() -> None:
    with make(misbehave="raise", at=3, policy=FaultPolicy(max_restarts=2, backoff_s=0.01)) as manager:
        manager.reset()
        with pytest.raises(SimFault, match="the run ends here"):
            play_lockstep(manager, 60)


def test_a_worker_that_dies_in_a_row_ends_the_run() -> None:
    with make(slots=1, workers=1, misbehave="exit", at=2, policy=FaultPolicy(max_restarts=0)) as manager:
        manager.reset()
        with pytest.raises(SimFault, match="1 times in a row") as caught:
            play_lockstep(manager, 10)
        assert caught.value.kind is FaultKind.DIED


def test_pauses_double_up_to_their_limit() -> None:
    policy = FaultPolicy(backoff_s=0.1, max_backoff_s=0.5)
    assert [policy.pause_s(failures) for failures in range(1, 7)] == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]
    with pytest.raises(ValueError, match="must not be negative"):
        FaultPolicy(max_restarts=-1)


def test_a_spare_takes_a_failed_workers_place() -> None:
    with make(spare_workers=1) as manager:
        manager.reset()
        spare = manager._pool.spares[0].pid  # type: ignore[union-attr]
        os.kill(manager.worker_pids()[0], signal.SIGKILL)
        trace = play_lockstep(manager, 10)
        assert manager.worker_pids()[0] == spare
        assert len(manager.fault_records) == 1  # and its place as a spare is filled
        (dead,) = manager._pool.spares  # type: ignore[union-attr]
        os.kill(dead.pid, signal.SIGKILL)
        dead._process.wait(120)
        manager._pool.refill_spares()  # type: ignore[union-attr]
        assert dead not in manager._pool.spares  # type: ignore[union-attr]
        assert dead.channel.socket.fileno() == -1, "its files are closed"
    assert_same(trace, clean_run(10))


def test_chunks_are_played_again_too() -> None:
    traces = []
    for kill in (False, True):
        with make(chunk_size=3, length=20) as manager:
            manager.reset()
            seen = []
            for number in range(12):
                if kill and number in (2, 8):
                    os.kill(manager.worker_pids()[0], signal.SIGKILL)
                batch = manager.step(np.random.default_rng(number).uniform(-1, 1, (4, 3, 1)))
                seen.append((batch.observation["state"].copy(), batch.chunk_reward.copy(), batch.executed.copy(), batch.episodes))
            traces.append(seen)
    for mine, theirs in zip(*traces, strict=True):
        for a, b in zip(mine[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert mine[3] == theirs[3]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_asynchronous_play_gives_every_slot_what_lockstep_gives_it(workers: int) -> None:
    with make(workers=workers) as manager:
        manager.reset()
        trace = play_asynchronously(manager, 25)
    assert_same(trace, clean_run(25))


@pytest.mark.parametrize("learned", [True, False])
def test_a_worker_that_is_stopped_in_a_reset_is_found_by_the_deadline_of_resets(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if learned:
        monkeypatch.setattr(process, "_FLOOR_S", 3.0)
        monkeypatch.setattr(process, "_FACTOR", 0.0)
    factory = SimFactory(COUNTING, kwargs={"length": 7})
    with EnvManager(factory, 4, num_workers=2, reset_timeout_s=None if learned else 3.0) as manager:
        manager.reset()
        stopped = manager.worker_pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        batch = manager.reset(seed_round=1)
        seeds = EpisodeSeeds.training(0)
        assert batch.observation["state"].tolist() == [[SeedStream(seeds, 1, slot, 4).seed(0), 0.0, 0.0] for slot in range(4)]
        (detail,) = [record.detail for record in manager.fault_records if record.pid == stopped]
        assert detail.startswith("No answer within 3 s while it should reset.")


def test_a_worker_that_is_stopped_in_its_very_first_reset_is_found_long_before_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FIRST_FLOOR_S", 3.0)
    monkeypatch.setattr(process, "_FACTOR", 0.1)
    with EnvManager(SimFactory(COUNTING, kwargs={"length": 7}), 4, num_workers=2, start_timeout_s=600.0) as manager:
        stopped = manager.worker_pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        begun = time.perf_counter()
        manager.reset()
        assert time.perf_counter() - begun < 120.0
        (detail,) = [record.detail for record in manager.fault_records if record.pid == stopped]
        assert detail.startswith("No answer within ")
        assert "while it should reset." in detail


def test_patience_is_learned_from_the_longest() -> None:
    learned = process.Patience(180.0, num_workers=2, built_s=3.0)
    assert learned.limit_s() == 60.0
    assert process.Patience(180.0, num_workers=2, built_s=9.0).limit_s() == 90.0
    assert process.Patience(180.0, num_workers=2, built_s=30.0).limit_s() == 180.0
    learned.took(0.5)
    assert learned.limit_s() == 60.0, "one of two may have built what the other waits for"
    learned.took(0.1)
    assert learned.limit_s() == 20.0
    learned.took(3.5)
    learned.took(1.0)
    assert learned.limit_s() == 35.0
    learned.took(40.0)
    assert learned.limit_s() == 180.0
    assert process.Patience(5.0, num_workers=1, built_s=0.1).limit_s() == 5.0
