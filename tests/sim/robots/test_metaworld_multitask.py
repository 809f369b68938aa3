"""Several Meta-World tasks in one simulator, against the tasks one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.robots import metaworld
from embodied_rl.sim.robots.metaworld import MultiTaskSim
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers, TensorSpec, VariableSpec
from tests.sim.robots.trajectories import actions_for

THREE = ["reach-v3", "drawer-open-v3", "button-press-topdown-v3"]


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        metaworld.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def make(num_envs: int, tasks: list[str] | None = None, **kwargs: object) -> MultiTaskSim:
    sim = metaworld.make("several", num_envs, tasks=tasks or THREE, **kwargs)  # type: ignore[arg-type]
    assert isinstance(sim, MultiTaskSim)
    return sim


def alone(task: str, seed: int, actions: np.ndarray) -> list[np.ndarray]:
    """State, reward and success of an episode in a simulator of this task only."""
    sim = metaworld.make(task, 1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out)
    record = [out.observation["state"][0].copy()]
    for action in actions:
        sim.step([0], action[None], out)
        record.append(np.append(out.observation["state"][0], [out.reward[0], out.success[0]]))
    return record


def test_every_episode_equals_one_of_its_task_alone() -> None:
    """Three slots at once, tasks that change from episode to episode, two slots with the same task among them."""
    sim = make(3)
    assert sim.spec.observation == {"state": TensorSpec((39,)), "instruction": VariableSpec("text", 1024)}
    assert (sim.spec.task, sim.spec.instruction, sim.spec.max_episode_steps, sim.spec.snapshots) == ("several", None, 500, "exact")
    assert sim.spec.reports_success
    out, actions = StepBuffers.allocate(sim.spec, 3), actions_for(sim, 25)
    for seeds in ([0, 1, 4], [5, 3, 0], [7, 7, 2]):
        sim.reset([2, 0, 1], [seeds[2], seeds[0], seeds[1]], out)
        names = [THREE[seed % 3] for seed in seeds]
        assert list(out.observation["instruction"]) == [metaworld.instruction(name) for name in names]
        records = [[out.observation["state"][i].copy()] for i in range(3)]
        for action in actions:
            sim.step([1, 0, 2], np.stack([action] * 3), out)
            for i in range(3):
                records[i].append(np.append(out.observation["state"][i], [out.reward[i], out.success[i]]))
        assert [info["task"] for info in out.info] == names  # type: ignore[index]
        for record, name, seed in zip(records, names, seeds, strict=True):
            for ours, expected in zip(record, alone(name, seed, actions), strict=True):
                np.testing.assert_array_equal(ours, expected)
    sim.close()


def test_environments_are_built_when_needed_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = make(2)
    built: list[str] = []
    single = metaworld._single
    monkeypatch.setattr(metaworld, "_single", lambda task, *rest: built.append(task) or single(task, *rest))  # type: ignore[func-returns-value]
    out = StepBuffers.allocate(sim.spec, 2)
    for seeds in ([0, 1], [1, 0], [2, 2], [0, 1], [5, 4]):
        sim.reset([0, 1], seeds, out)
    # The first task's environment came with the simulator. [1, 0] needs a second "drawer-open" (the other slot still has the first one),
    # [2, 2] two of "button-press"; everything after that is taken from the stock.
    assert Counter(built) == {"drawer-open-v3": 2, "button-press-topdown-v3": 2}
    total = sum(map(len, sim._stock.values())) + sum(running is not None for running in sim._running)
    assert total == 1 + len(built)
    monkeypatch.undo()
    assert all(len(stock) == 1 for stock in make(1, ahead=True)._stock.values())


def test_the_task_as_numbers() -> None:
    part, state = make(1, one_hot="part"), make(1, one_hot="state")
    assert part.spec.tensors == {"state": TensorSpec((39,)), "task": TensorSpec((3,))}
    assert state.spec.tensors == {"state": TensorSpec((42,))}
    first, second = StepBuffers.allocate(part.spec, 1), StepBuffers.allocate(state.spec, 1)
    action = np.zeros((1, 4), np.float32)
    for seed in range(4):
        for sim, out in ((part, first), (state, second)):
            sim.reset([0], [seed], out)
            sim.step([0], action, out)
        np.testing.assert_array_equal(first.observation["task"][0], np.eye(3)[seed % 3])
        np.testing.assert_array_equal(second.observation["state"][0], [*first.observation["state"][0], *np.eye(3)[seed % 3]])


def test_snapshots_continue_bit_by_bit_in_another_slot() -> None:
    first, second = make(2), make(1)
    out, other = StepBuffers.allocate(first.spec, 2), StepBuffers.allocate(second.spec, 1)
    actions = actions_for(first, 120)
    first.reset([0, 1], [1, 0], out)  # drawer-open, reach
    second.reset([0], [2], other)
    for action in actions[:20]:
        first.step([0], action[None], out)
    saved = first.snapshot(0)
    first.restore(1, saved)
    second.restore(0, saved)
    for action in actions[20:]:
        first.step([0, 1], np.stack([action, action]), out)
        second.step([0], action[None], other)
        for row in (out.observation["state"][1], other.observation["state"][0]):
            np.testing.assert_array_equal(out.observation["state"][0], row)
        assert out.reward[0] == out.reward[1] == other.reward[0]
    assert out.observation["instruction"][1] == other.observation["instruction"][0] == "drawer open"
    with pytest.raises(SnapshotError):
        metaworld.make("MT10", 1).restore(0, saved)
    with pytest.raises(SnapshotError, match="'drawer-open-v3', which is not among"):
        make(1, ["reach-v3"]).restore(0, saved)


def sweep(name: str, num_tasks: int) -> None:
    """Every task of a set makes, resets and steps; instructions, rewards and starting places differ."""
    sim = metaworld.make(name, 1)
    assert isinstance(sim, MultiTaskSim)
    assert len(set(sim.tasks)) == num_tasks
    out, starts = StepBuffers.allocate(sim.spec, 1), set()
    for seed, task in enumerate(sim.tasks):
        sim.reset([0], [seed], out)
        assert out.observation["instruction"][0] == task.removesuffix("-v3").replace("-", " ")
        state = out.observation["state"][0].copy()
        starts.add(state.tobytes())
        for action in actions_for(sim, 5, seed):
            sim.step([0], action[None], out)
        assert np.isfinite(out.observation["state"]).all()
        assert 0 <= out.reward[0] <= 10
        assert (out.observation["state"][0, :3] != state[:3]).all(), "the hand has not moved"
        np.testing.assert_array_equal(out.observation["state"][0, 36:], state[36:])  # the goal stays
    assert len(starts) == num_tasks
    assert set(sim.tasks) <= set(metaworld.tasks())
    sim.close()


@pytest.mark.slow
@pytest.mark.ci_sample
def test_all_tasks_of_mt10() -> None:
    sweep("MT10", 10)


@pytest.mark.slow
def test_all_fifty_tasks() -> None:
    sweep("MT50", 50)
    assert sorted(metaworld.task_set("MT50")) == metaworld.tasks()
    assert set(metaworld.task_set("MT10")) < set(metaworld.task_set("MT25")) < set(metaworld.task_set("MT50"))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="Did you mean 'MT10'"):
        metaworld.make("MT1", 1)
    with pytest.raises(UserError, match=r"'draweropen-v3' is not known. Did you mean 'drawer-open-v3'"):
        make(1, ["reach-v3", "draweropen-v3"])
    with pytest.raises(UserError, match="tasks is empty"):
        metaworld.make("several", 1, tasks=[])
    with pytest.raises(UserError, match="Did you mean 'state'"):
        make(1, one_hot="states")
