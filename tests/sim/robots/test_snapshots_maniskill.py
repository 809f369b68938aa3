"""Snapshots of ManiSkill on the CPU, in contact: the saved environment, another one and a new process continue bit by bit alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import StepBuffers
from tests.sim.robots.continuation import Subject, continue_elsewhere, differences, play, random_actions, start

PUSH_CUBE = Subject("maniskill:make", "PushCube-v1", {"control_mode": "pd_ee_target_delta_pos"})  # whose controller keeps a target
OTHERS = [
    Subject("maniskill:make", "PickCube-v1", {"control_mode": "pd_ee_delta_pose"}),
    Subject("maniskill:make", "StackCube-v1"),
    Subject("maniskill:make", "PegInsertionSide-v1"),
    Subject("maniskill:make", "TwoRobotPickCube-v1"),
    Subject("maniskill:make", "MS-AntRun-v1"),
    Subject("maniskill:make", "MS-HumanoidStand-v1"),
]


def made(one: Subject, num_envs: int) -> Any:
    try:
        return one.make(num_envs)
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pushing() -> Any:
    sim = made(PUSH_CUBE, 2)
    yield sim
    sim.close()


def robot_touches(env: Any, name: str) -> bool:
    """Whether PhysX reports a contact closer than 1 mm between a link of the robot and this actor (impulses come and go)."""
    for contact in env.scene.px.get_contacts():
        names = [body.entity.name for body in contact.bodies]
        concerned = any(other.endswith(f"_{name}") for other in names) and any(other.startswith("panda") for other in names)
        if concerned and min(point.separation for point in contact.points) < 1e-3:
            return True
    return False


def push_until_contact(sim: Any, env_id: int, seed: int) -> None:
    """Lower the closed gripper behind the cube and go forward until finger and cube have touched for some steps."""
    out, env = StepBuffers.allocate(sim.spec, env_id + 1), sim.envs[env_id]
    sim.reset([env_id], [seed], out, {"reconfigure": True})
    touched = 0
    for _ in range(49):
        tip, cube = env.agent.tcp.pose.p[0].numpy(), env.obj.pose.p[0].numpy()
        behind = cube + np.array([-0.06, 0.0, 0.0], np.float32)
        goal = behind if np.abs(tip - behind)[[1, 2]].max() > 0.02 else cube + np.array([0.1, 0.0, 0.0], np.float32)
        sim.step([env_id], np.array([[*np.clip((goal - tip) * 2, -1, 1), -1.0]], np.float32), out)
        touched += int(robot_touches(env, "cube"))
        if touched == 3:
            return
    pytest.fail("the gripper did not touch the cube")


def bodies(sim: Any, env_id: int) -> dict[str, np.ndarray]:
    """Positions and velocities as ManiSkill itself reports them, which is not the way that snapshots read them."""
    flat: dict[str, np.ndarray] = {}

    def walk(states: dict[str, Any], path: str) -> None:
        for name, state in states.items():
            if isinstance(state, dict):
                walk(state, f"{path}{name} ")
            else:
                flat[path + name] = state.numpy().copy()

    walk(sim.envs[env_id].get_state_dict(), "")
    return flat


@pytest.mark.slow
@pytest.mark.ci_sample
def test_in_contact_here_and_in_a_new_process(pushing: Any, tmp_path: Path) -> None:
    sim, actions = pushing, random_actions(pushing.spec)
    assert sim.spec.snapshots == "exact"
    push_until_contact(sim, 1, seed=4)
    never_saved = play(sim, 1, actions[:3])
    push_until_contact(sim, 0, seed=4)
    before = bodies(sim, 0)
    data = sim.snapshot(0)
    after = bodies(sim, 0)
    assert before.keys() == after.keys() >= {"actors cube"}
    for name, state in before.items():
        np.testing.assert_allclose(after[name], state, rtol=0, atol=1e-6, err_msg=name)
    live = play(sim, 0, actions)
    assert live["truncated"].sum() == 2, "120 steps of 50-step episodes: the trace runs over two ends and resets"
    # A run that was never saved kept its contact caches and differs, slightly.
    np.testing.assert_allclose(live["state"][:3], never_saved["state"], atol=0.05)

    start(sim, 1, seed=77)
    play(sim, 1, random_actions(sim.spec, 15, seed=9))
    for env_id in (0, 1):
        sim.restore(env_id, data)
        assert differences(live, play(sim, env_id, actions)) == [], env_id
    assert differences(live, continue_elsewhere([(PUSH_CUBE, data)], tmp_path)[0]) == []


def test_snapshots_of_something_else_are_refused(pushing: Any) -> None:
    start(pushing, 0, seed=1)
    tree = decode_state(pushing.snapshot(0))
    with pytest.raises(SnapshotError, match="of task 'PickCube-v1'"):
        pushing.restore(0, encode_state({**tree, "task": "PickCube-v1"}))
    episode = tree["episode"]
    foreign: dict[str, Any] = {**episode["physics"], "actors": {"teapot": {}}}
    with pytest.raises(SnapshotError, match="teapot"):
        pushing.restore(0, encode_state({**tree, "episode": {**episode, "physics": foreign}}))
    with pytest.raises(SnapshotError, match="same arguments"):
        pushing.restore(0, encode_state({**tree, "episode": {**episode, "attributes": {"env": episode["attributes"]["env"]}}}))


@pytest.mark.slow
def test_a_scene_is_built_from_its_own_seed() -> None:
    """PegInsertionSide draws the peg's size when it builds the scene; a plain reset of PickCube leaves the scene as it was."""
    sim = made(Subject("maniskill:make", "PegInsertionSide-v1"), 2)
    start(sim, 0, seed=5)
    start(sim, 1, seed=6)
    sizes = [env.peg_half_sizes.numpy().copy() for env in sim.envs]
    assert (sizes[0] != sizes[1]).any()
    data = sim.snapshot(0)
    sim.restore(1, data)
    assert (sim.envs[1].peg_half_sizes.numpy() == sizes[0]).all()
    shapes = [env.peg._bodies[0].collision_shapes[0].half_size for env in sim.envs]
    assert (shapes[0] == shapes[1]).all()
    sim.close()


@pytest.mark.slow
def test_an_episode_that_began_with_a_plain_reset() -> None:
    """Its scene was built with another seed than the episode's."""
    sim = made(Subject("maniskill:make", "PickCube-v1"), 2)
    out, actions = StepBuffers.allocate(sim.spec, 2), random_actions(sim.spec)
    start(sim, 0, seed=5)
    for seed in (11, 12):
        play(sim, 0, random_actions(sim.spec, 10, seed=seed))
        sim.reset([0], [seed], out)
    goal = sim.envs[0].goal_site.pose.p.numpy().copy()
    data = sim.snapshot(0)
    assert (sim.envs[0].goal_site.pose.p.numpy() == goal).all()
    live = play(sim, 0, actions)
    sim.restore(1, data)
    assert differences(live, play(sim, 1, actions)) == []
    sim.close()


@pytest.mark.slow
def test_more_tasks_here_and_in_a_new_process(tmp_path: Path) -> None:
    cases, expected = [], []
    for one in OTHERS:
        sim = made(one, 2)
        start(sim, 0, seed=5)
        play(sim, 0, random_actions(sim.spec, 25, seed=1), next_seed=100)
        data, actions = sim.snapshot(0), random_actions(sim.spec)
        live = play(sim, 0, actions)
        start(sim, 1, seed=77)
        play(sim, 1, random_actions(sim.spec, 12, seed=9), next_seed=300)
        sim.restore(1, data)
        assert differences(live, play(sim, 1, actions)) == [], one.task
        cases.append((one, data))
        expected.append(live)
        sim.close()
    for (one, _), wanted, got in zip(cases, expected, continue_elsewhere(cases, tmp_path), strict=True):
        assert differences(wanted, got) == [], one.task
