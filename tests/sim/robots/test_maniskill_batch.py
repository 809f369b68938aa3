"""ManiSkill as a batch on the CPU: every number as with environments by themselves, whatever is done to some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError
from embodied_rl.sim.robots import maniskill
from embodied_rl.types import StepBuffers
from tests.sim.robots.batch_equality import Pair, play

CONTROL_MODES = ("pd_joint_delta_pos", "pd_ee_delta_pose", "pd_ee_target_delta_pos")


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    try:
        maniskill.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def pair_of(task: str, num_envs: int, **kwargs: Any) -> Pair:
    pair = Pair(task, num_envs, **kwargs)
    if task == "PullCubeTool-v1":
        pair.aggregates = frozenset({"cube_progress", "cube_distance"})
    return pair


@pytest.mark.parametrize("task", ["PushCube-v1", "PickCube-v1"])
def test_equal_to_environments_by_themselves(task: str) -> None:
    pair = pair_of(task, 3)
    play(pair, 35)
    for env_id in range(3):
        pair.compare_physics(env_id)
    pair.close()


def test_things_fall_in_every_scene_and_come_to_rest_on_its_ground() -> None:
    """ManiSkill's builders give a ground plane to the first scene of a GPU's only."""
    sim: Any = maniskill.make("MS-HumanoidStand-v1", 4, batched=True)
    out = StepBuffers.allocate(sim.spec, 4)
    sim.reset(range(4), range(4), out)
    for _ in range(60):
        sim.step(range(4), np.zeros((4, sim.spec.action.dim), np.float32), out)
    heights = [float(env.agent.robot.links_map["torso"].pose.p[0, 2]) for env in sim.envs]
    sim.close()
    assert all(0.0 < height < 1.2 for height in heights), heights  # from 1.28 m at the start


def test_nan_actions_are_refused_before_anything_moves() -> None:
    sim: Any = maniskill.make("PushCube-v1", 3, batched=True)
    out = StepBuffers.allocate(sim.spec, 3)
    sim.reset(range(3), range(3), out)
    before = [sim.physics(i) for i in range(3)]
    actions = np.zeros((2, sim.spec.action.dim), np.float32)
    actions[1, 3] = np.nan
    with pytest.raises(ValueError, match=r"NaN.*\[2\]"):
        sim.step([0, 2], actions, out)
    for i in range(3):
        after = sim.physics(i)
        assert all((after[name] == row).all() for name, row in before[i].items())
    sim.close()


def test_only_what_was_asked_for_moves() -> None:
    sim: Any = maniskill.make("PickCube-v1", 3, batched=True)
    out = StepBuffers.allocate(sim.spec, 3)
    sim.reset(range(3), range(3), out)
    sim.step(range(3), np.full((3, sim.spec.action.dim), 0.5, np.float32), out)
    before = [sim.physics(i) for i in range(3)]
    for _ in range(3):
        sim.step([1], np.full((1, sim.spec.action.dim), -0.5, np.float32), out)
    changed = [any((sim.physics(i)[name] != row).any() for name, row in before[i].items()) for i in range(3)]
    sim.close()
    assert changed == [False, True, False]


def test_physics_can_be_set_in_one_environment() -> None:
    pair = pair_of("PushCube-v1", 2)
    pair.reset([0, 1], [5, 6])
    state = pair.alone.physics(0)
    state["actors/cube"][:3] += np.float32([0.03, -0.02, 0.0])
    for sim in (pair.alone, pair.batch):
        sim.set_physics(1, state)
    pair.compare_physics(0)
    pair.compare_physics(1)
    pair.step([0, 1], np.zeros((2, pair.spec.action.dim), np.float32))
    pair.close()
