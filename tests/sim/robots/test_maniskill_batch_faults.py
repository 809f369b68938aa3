"""A batch behind the environment manager: killed workers, actions that are NaN and tasks that raise cost what they did one by one."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots import maniskill
from tests.sim.runs import Trace, assert_same, play_asynchronously, play_lockstep

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    try:
        maniskill.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def make_breaking(task: str, num_envs: int, batched: bool, raise_at: int) -> Any:
    """PushCube whose `evaluate` raises when its second environment has taken `raise_at` steps; a target for SimFactory."""
    sim: Any = maniskill.make(task, num_envs, batched=batched)
    env = sim._batch if batched else sim.envs[1]
    evaluate, row = env.evaluate, 1 if batched else 0

    def raising() -> dict[str, Any]:
        if int(env._elapsed_steps[row]) == raise_at:
            raise RuntimeError("the cube has left the table")
        return evaluate()

    env.evaluate = raising
    return sim


def manager_of(batched: bool, slots: int = 3, **kwargs: Any) -> EnvManager:
    factory = SimFactory("embodied_rl.sim.robots.maniskill:make", "PickCube-v1", {"batched": batched, **kwargs}, "maniskill")
    return EnvManager(factory, slots, num_workers=1)


def played(manager: EnvManager, messages: int, kills: tuple[int, ...] = ()) -> Trace:
    def before(number: int) -> None:
        if number in kills:
            os.kill(manager.worker_pids()[0], signal.SIGKILL)

    with manager:
        manager.reset()
        trace = play_lockstep(manager, messages, before)
        assert manager.num_restarts == len(kills)
        assert all(slot.outcome == "restored" and slot.drift in (None, 0.0) for r in manager.fault_records for slot in r.slots)
    return trace


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_killed_worker_goes_on_as_one_with_environments_by_themselves() -> None:
    alone = played(manager_of(batched=False), 30)
    assert_same(alone, played(manager_of(batched=True), 30, kills=(7, 20)))


@pytest.mark.slow
def test_slots_that_step_at_their_own_pace_see_what_they_saw_together() -> None:
    together = played(manager_of(batched=True), 25)
    with manager_of(batched=True) as manager:
        manager.reset()
        apart = play_asynchronously(manager, 25, timeout_s=120.0)
    assert_same(together, apart)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_a_task_that_raises_costs_its_own_slot(batched: bool) -> None:
    factory = SimFactory(f"{__name__}:make_breaking", "PushCube-v1", {"batched": batched, "raise_at": 6})
    with EnvManager(factory, 3, num_workers=1) as manager:
        manager.reset()
        aborted = {0: 0, 1: 0, 2: 0}
        for number in range(15):
            batch = manager.step(np.full((3, manager.spec.action.dim), 0.01 * number, np.float32))
            if batch.aborted is not None:
                for slot in batch.slots[batch.aborted]:
                    aborted[int(slot)] += 1
        assert all(record.kind is FaultKind.RAISED for record in manager.fault_records)
        assert any("left the table" in record.detail for record in manager.fault_records)
        assert aborted[1] >= 1
        assert aborted[0] == aborted[2] == 0


def test_why_environments_are_stepped_one_by_one_is_said_once_for_all_workers() -> None:
    factory = SimFactory("embodied_rl.sim.robots.maniskill:make", "PushCube-v1", {"batched": True}, "maniskill")
    with pytest.warns(UserWarning, match="stepped one environment at a time") as said, EnvManager(factory, 2, num_workers=2):
        pass
    assert [str(each.message) for each in said] == [
        "ManiSkill task 'PushCube-v1' is stepped one environment at a time: a batch of one is no batch."
    ]
