"""The environment manager on simulators whose every number is known beforehand."""

from __future__ import annotations

import os
import signal
import warnings

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from tests.sim.runs import assert_same, play_lockstep

pytestmark = pytest.mark.usefixtures("forked")

COUNTING = "tests.sim.toy:CountingSim"


def make(num_slots: int = 4, num_workers: int = 2, **kwargs) -> EnvManager:
    options = {name: kwargs.pop(name) for name in ("seeds", "success_ends_episode", "max_episode_steps") if name in kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EnvManager(SimFactory(COUNTING, kwargs=kwargs), num_slots, num_workers=num_workers, **options)


def test_lockstep_arithmetic_and_autoreset() -> None:
    with make(length=3, seeds=EpisodeSeeds.held_out(10)) as manager:
        first = manager.reset()
        seeds = HELD_OUT_START + 10 + np.arange(4)
        np.testing.assert_array_equal(first.observation["state"], np.stack([seeds, np.zeros(4), np.zeros(4)], axis=1))
        for step in (1, 2):
            batch = manager.step(np.full((4, 1), float(step)))
            np.testing.assert_array_equal(batch.observation["state"][:, 1], step)
            np.testing.assert_array_equal(batch.reward, step)
            assert not batch.done.any()
            assert batch.episodes == ()
        batch = manager.step(np.full((4, 1), 3.0))
        # The episode is over: its last observation is kept, and the next episode's first one is already there.
        np.testing.assert_array_equal(batch.final_observation["state"], np.stack([seeds, np.full(4, 3.0), np.full(4, 6.0)], axis=1))
        np.testing.assert_array_equal(batch.observation["state"], np.stack([seeds + 4, np.zeros(4), np.zeros(4)], axis=1))
        assert batch.terminated.all()
        assert not batch.truncated.any()
        assert [e.seed for e in batch.episodes] == list(seeds)
        assert [(e.episode_return, e.length, e.success_once, e.index) for e in batch.episodes] == [(6.0, 3, True, 0)] * 4


def test_workers_that_list_their_parts_in_another_order_share_one_layout() -> None:
    with EnvManager(SimFactory("tests.sim.toy:TurnedSim"), 3, num_workers=2, seeds=EpisodeSeeds.held_out(0)) as manager:
        assert manager.reset().observation["state"][:, 0].tolist() == [HELD_OUT_START + slot for slot in range(3)]
        batch = manager.step(np.full((3, 1), 2.0))
        assert batch.observation["state"][:, 1:].tolist() == [[1, 2]] * 3
        assert (batch.observation["rgb"] == 1).all()


def test_time_limit_and_success_truncate() -> None:
    with make(length=100, max_episode_steps=2) as manager:
        manager.reset()
        assert not manager.step(np.zeros((4, 1))).done.any()
        batch = manager.step(np.zeros((4, 1)))
        assert batch.truncated.all()
        assert not batch.terminated.any()
        assert not any(e.success_once for e in batch.episodes)
    with make(length=100, success_ends_episode=True) as manager:
        manager.reset()
        actions = np.array([[3.0], [0.0], [3.0], [0.0]])
        batch = manager.step(actions)
        np.testing.assert_array_equal(batch.truncated, [True, False, True, False])
        assert [(e.slot, e.success_once, e.success_at_end, e.terminated) for e in batch.episodes] == [
            (0, True, True, False),
            (2, True, True, False),
        ]


@pytest.mark.parametrize("seeds", [EpisodeSeeds.training(5), EpisodeSeeds.held_out(5)])
def test_numbers_do_not_depend_on_the_number_of_workers(seeds: EpisodeSeeds) -> None:
    traces = []
    for num_workers in (1, 2, 4):
        with make(num_workers=num_workers, length=4, seeds=seeds) as manager:
            trace = [manager.reset().observation["state"].copy()]
            actions = np.random.default_rng(0).normal(size=(15, 4, 1))
            for action in actions:
                batch = manager.step(action)
                trace += [batch.observation["state"].copy(), batch.reward.copy()[:, None]]
            traces.append(np.concatenate(trace, axis=1))
    np.testing.assert_array_equal(traces[0], traces[1])
    np.testing.assert_array_equal(traces[0], traces[2])


def test_groups_in_flight_and_any_ready() -> None:
    with make(num_slots=6, num_workers=3, length=50) as manager:
        manager.reset()
        left, right = range(3), range(3, 6)
        manager.send(left, np.ones((3, 1)))
        manager.send(right, np.full((3, 1), 2.0))
        np.testing.assert_array_equal(manager.recv(left).reward, 1.0)
        np.testing.assert_array_equal(manager.recv(right).reward, 2.0)
        manager.send([0, 4, 5], np.array([[1.0], [4.0], [5.0]]))
        batch = manager.recv()
        np.testing.assert_array_equal(batch.slots, [0, 4, 5])
        np.testing.assert_array_equal(batch.reward, [1.0, 4.0, 5.0])
        np.testing.assert_array_equal(batch.observation["state"][:, 1], 2.0)
        manager.send(range(6), np.zeros((6, 1)))
        seen: list[int] = []
        while len(seen) < 6:
            seen += manager.recv(min_ready=1).slots.tolist()
        assert sorted(seen) == list(range(6))


def test_no_end_of_an_episode_is_ever_missed() -> None:
    with make(length=2) as manager:
        manager.reset()
        left, right = range(2), range(2, 4)
        counted = 0
        for group in (left, right):
            manager.send(group, np.zeros((2, 1)))
        for step in range(3000):
            for group in (left, right):
                batch = manager.recv(group)
                assert [e.slot for e in batch.episodes] == batch.slots[batch.done].tolist()
                assert batch.done.all() == (step % 2 == 1)
                counted += len(batch.episodes)
                manager.send(group, np.zeros((2, 1)))
        assert counted == 6000


def test_misuse_is_told() -> None:
    with make() as manager:
        manager.reset()
        workers = manager.worker_pids()
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # a step that is over may be sent again, and a step takes microseconds
        manager.send(range(2), np.zeros((2, 1)))
        with pytest.raises(ValueError, match="not been received yet"):
            manager.send(range(2), np.zeros((2, 1)))
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        manager.recv(range(2))
        with pytest.raises(ValueError, match="needs a slot that was sent"):
            manager.recv()
        with pytest.raises(ValueError, match="were not sent an action"):
            manager.recv(range(2), timeout_s=0.1)
        with pytest.raises(ValueError, match="not within 0"):
            manager.send(range(3, 6), np.zeros((3, 1)))


def test_reset_in_the_middle_of_a_step_starts_anew() -> None:
    with make(length=50) as manager:
        manager.reset(seed_round=1)
        seeds = manager.reset(seed_round=2).observation["state"][:, 0].copy()
        manager.send(range(4), np.ones((4, 1)))
        again = manager.reset(seed_round=2)
        np.testing.assert_array_equal(again.observation["state"], np.stack([seeds, np.zeros(4), np.zeros(4)], axis=1))
        assert (manager.reset(seed_round=3).observation["state"][:, 0] != seeds).any()


def test_training_seeds_are_spread_and_never_held_out() -> None:
    seeds = [EpisodeSeeds.training(base).seed(slot, index, 16) for base in range(3) for slot in range(16) for index in range(50)]
    assert len(set(seeds)) > 2390  # of 2400: a collision among 2**30 is rare
    assert max(seeds) < HELD_OUT_START
    assert EpisodeSeeds.held_out(7).seed(3, 2, 16) == HELD_OUT_START + 7 + 3 + 32


def test_images_and_pictures() -> None:
    with make(image=True) as manager:
        manager.reset()
        manager.step(np.zeros((4, 1)))
        batch = manager.step(np.zeros((4, 1)))
        assert batch.observation["rgb"].shape == (4, 8, 8, 3)
        np.testing.assert_array_equal(batch.observation["rgb"], 2)
        for slots in ([2, 3], [3]):  # a slot's picture shows how many steps its episode has
            manager.send(slots, np.zeros((len(slots), 1)))
            manager.recv(slots)
        frames = manager.render([3, 0, 2, 1])  # two slots of each worker
        assert [frame.shape for frame in frames] == [(4, 6, 3)] * 4
        assert [int(frame.max()) for frame in frames] == [4, 2, 3, 2]


def test_a_picture_that_cannot_be_had_stops_nothing() -> None:
    with make(misbehave="blind", length=50) as manager:
        manager.reset()
        with pytest.raises(UserError, match="cannot be drawn here"):
            manager.render([0])
        np.testing.assert_array_equal(manager.step(np.ones((4, 1))).observation["state"][:, 1], 1.0)


def test_workers_never_import_torch(tmp_path) -> None:
    with make() as manager:
        manager.reset()
        for pid in manager.worker_pids():
            with open(f"/proc/{pid}/maps") as maps:
                assert "libtorch" not in maps.read()


def test_more_workers_than_cores_warns_with_the_figure() -> None:
    cores = len(os.sched_getaffinity(0))
    with (
        pytest.warns(UserWarning, match=rf"num_workers={cores + 1} is more than the \d+ cores"),
        EnvManager(SimFactory(COUNTING), cores + 1, num_workers=cores + 1),
    ):
        pass


def test_workers_go_where_they_are_told_and_read_it_back() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with EnvManager(SimFactory(COUNTING), 4, num_workers=2, placement="pack", spare_workers=1) as manager:
        report = manager.placement_report()
        for worker, pid in enumerate(manager.worker_pids()):
            assert report[worker]["cores"] == sorted(os.sched_getaffinity(pid))
        if len(cores) >= 2:
            assert set(report[0]["cores"]).isdisjoint(report[1]["cores"])
        manager.reset()
        os.kill(manager.worker_pids()[1], signal.SIGKILL)
        manager.step(np.zeros((4, 1)))
        assert manager.fault_records
        assert sorted(os.sched_getaffinity(manager.worker_pids()[1])) == report[1]["cores"]  # the spare went there too
    with EnvManager(SimFactory(COUNTING), 1, placement="none") as manager:
        assert manager.placement_report() == [{}]


@pytest.mark.parametrize("trouble", [False, True])
def test_episodes_of_given_seeds_begin_when_they_are_asked_for(trouble: bool) -> None:
    """Without autoreset an ended slot keeps its last observation until the next episode is given to it."""
    with EnvManager(SimFactory(COUNTING, kwargs={"length": 3}), 3, num_workers=2, autoreset=False) as manager:
        manager.reset()
        manager.begin([2, 0], [77, 55])
        if trouble:
            os.kill(manager.worker_pids()[0], signal.SIGKILL)
        batch = manager.recv([0, 2])
        assert batch.observation["state"].tolist() == [[55, 0, 0], [77, 0, 0]]
        assert not batch.done.any()
        for step in range(3):
            if trouble and step == 2:
                os.kill(manager.worker_pids()[1], signal.SIGKILL)
            manager.send([0, 2], np.array([[1.0], [2.0]]))
            batch = manager.recv([0, 2])
        assert batch.terminated.all()
        assert [(e.slot, e.seed, e.length, e.episode_return) for e in batch.episodes] == [(0, 55, 3, 3.0), (2, 77, 3, 6.0)]
        assert batch.observation["state"].tolist() == [[55, 3, 3], [77, 3, 6]]
        manager.send([1], np.array([[1.0]]))  # the slot between goes on by itself
        manager.begin([0], [99])
        both = manager.recv()
        assert both.slots.tolist() == [0, 1]
        assert both.observation["state"][0].tolist() == [99, 0, 0]
        assert len(manager.fault_records) == 2 * trouble


@pytest.mark.parametrize(("slots", "workers", "groups"), [(8, 2, 2), (5, 5, 2), (4, 4, 4), (7, 3, 2), (16, 3, 1), (9, 2, 4), (3, 2, 3)])
def test_every_worker_has_a_share_of_every_group(slots: int, workers: int, groups: int) -> None:
    from embodied_rl.sim.worker_pool import WorkerPoolPlan, split_slots

    plan = WorkerPoolPlan(slots, workers, groups)
    dealt = sorted(slot for runs in plan.runs for run in runs for slot in run)
    assert dealt == list(range(slots))
    loads = [sum(len(run) for run in runs) for runs in plan.runs]
    assert max(loads) - min(loads) <= 1
    assert min(loads) >= 1
    for group in split_slots(range(slots), groups):
        shares = [sum(slot in group for run in runs for slot in run) for runs in plan.runs]
        assert max(shares) - min(shares) <= 1
    assert all(any(set(run) <= set(group) for group in split_slots(range(slots), groups)) for runs in plan.runs for run in runs)


def test_the_dealing_of_slots_changes_no_number() -> None:
    traces = []
    for workers, groups in ((1, 1), (2, 2), (3, 2)):
        factory = SimFactory(COUNTING, kwargs={"length": 7})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager = EnvManager(factory, 6, num_workers=workers, num_groups=groups)
        with manager:
            manager.reset()
            if workers == 2:
                os.kill(manager.worker_pids()[0], signal.SIGKILL)
            traces.append(play_lockstep(manager, 20))
            manager.snapshot(range(6))
            assert len(manager.render([0, 5])) == 2
    for other in traces[1:]:
        assert_same(traces[0], other)


@pytest.mark.parametrize(
    "arguments", [{"num_slots": 0}, {"num_workers": 0}, {"num_groups": 0}, {"chunk_size": 0}, {"max_episode_steps": 0}]
)
def test_a_count_below_one_is_refused_before_anything_starts(arguments: dict[str, int]) -> None:
    ((name, count),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {count}"):
        EnvManager(SimFactory(COUNTING), **{"num_slots": 2, **arguments})  # type: ignore[arg-type]
