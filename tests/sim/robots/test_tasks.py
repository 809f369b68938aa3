"""Meta-World, gymnasium-robotics and gym-pusht: the real simulators behind their adapters."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots import gymnasium_robotics, metaworld, pusht
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.trajectories import actions_for, assert_depends_on_seed_alone

draws = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


def installed(adapter: Any) -> None:
    try:
        adapter.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


# ---- Meta-World ----


def test_metaworld_spec() -> None:
    installed(metaworld)
    assert len(metaworld.tasks()) == 50
    spec = metaworld.make("button-press-topdown-v3", 1).spec
    assert spec.observation == {"state": TensorSpec((39,))}
    assert (spec.action.dim, spec.max_episode_steps, spec.control_hz, spec.reports_success) == (4, 500, 80.0, True)
    assert spec.instruction == "button press topdown"


@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3"])
def test_metaworld_depends_on_its_seed_alone(task: str) -> None:
    installed(metaworld)
    assert_depends_on_seed_alone(metaworld.make(task, 2))


def test_metaworld_shows_the_goal_and_success_is_its_own() -> None:
    """Its scripted expert reaches the goal; the goal is where the environment keeps it, in the last three numbers."""
    installed(metaworld)
    from metaworld.policies import SawyerReachV3Policy

    sim = metaworld.make("reach-v3", 1)
    out, expert = StepBuffers.allocate(sim.spec, 1), SawyerReachV3Policy()
    goals, solved = set(), 0
    for seed in range(5):
        sim.reset([0], [seed], out)
        goal = sim.envs[0].unwrapped._target_pos  # type: ignore[attr-defined]
        np.testing.assert_allclose(out.observation["state"][0, 36:], goal, atol=1e-6)
        goals.add(tuple(goal))
        for _ in range(200):
            action = np.clip(expert.get_action(out.observation["state"][0].astype(np.float64)), -1, 1)
            sim.step([0], action[None].astype(np.float32), out)
            assert out.success[0] == bool(out.info[0]["success"])  # type: ignore[index]
            if out.success[0]:
                break
        solved += bool(out.success[0])
        assert not out.terminated[0], "success ends nothing by itself"
    assert len(goals) == 5
    assert solved >= 4


def test_metaworld_truncates_at_five_hundred() -> None:
    installed(metaworld)
    sim = metaworld.make("reach-v3", 1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    flags = []
    for _ in range(500):
        sim.step([0], np.zeros((1, 4), np.float32), out)
        flags.append(bool(out.truncated[0]))
    assert flags == [False] * 499 + [True]


@draws
def test_metaworld_pictures_stand_upright() -> None:
    """The wall behind the table is plain grey; it belongs at the top of the picture, the wooden table below it."""
    installed(metaworld)
    sim = metaworld.make("drawer-open-v3", 1, render_size=96)
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
    frame = sim.render(0).astype(int)
    assert frame.shape == (96, 96, 3)
    is_grey = (np.ptp(frame, axis=-1) < 12) & (frame.mean(-1) > 100) & (frame.mean(-1) < 150)
    assert is_grey[:24].mean() > 0.5 > is_grey[48:].mean()
    sim.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["assembly-v3", "window-open-v3", "peg-insert-side-v3", "sweep-into-v3", "stick-pull-v3", "basketball-v3"])
def test_more_metaworld_tasks(task: str) -> None:
    installed(metaworld)
    assert_depends_on_seed_alone(metaworld.make(task, 2), num_steps=30)


def test_metaworld_names_are_checked() -> None:
    installed(metaworld)
    with pytest.raises(UserError, match="Did you mean 'drawer-open-v3'"):
        metaworld.make("draweropen-v3", 1)
    with pytest.raises(UserError, match=r"camera 'cornr2' is not known. Did you mean 'corner2'"):
        metaworld.make("reach-v3", 1, camera="cornr2")


# ---- gymnasium-robotics ----


def test_fetch_state_is_observation_and_goal() -> None:
    installed(gymnasium_robotics)
    sim = gymnasium_robotics.make("FetchReachDense-v4", 2)
    assert sim.spec.observation == {"state": TensorSpec((13,))}
    assert (sim.spec.action.dim, sim.spec.max_episode_steps, sim.spec.control_hz, sim.spec.reports_success) == (4, 50, 25.0, True)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 4], out)
    plain = gymnasium.make("FetchReachDense-v4")
    plain.reset(seed=4)
    for action in actions_for(sim, 10):
        sim.step([0, 1], np.stack([-action, action]), out)
        expected, reward, *_, info = plain.step(action)
    wanted = np.concatenate([expected["observation"], expected["desired_goal"]]).astype(np.float32)
    np.testing.assert_array_equal(out.observation["state"][1], wanted)
    assert out.reward[1] == np.float32(reward)
    assert out.success[1] == bool(info["is_success"])
    np.testing.assert_allclose(expected["observation"][:3], expected["achieved_goal"])  # why the achieved goal can be left out


def test_fetch_success_is_five_centimetres_and_depends_on_the_seed_alone() -> None:
    installed(gymnasium_robotics)
    sim = gymnasium_robotics.make("FetchReachDense-v4", 2)
    assert_depends_on_seed_alone(sim, num_steps=10)
    out, solved = StepBuffers.allocate(sim.spec, 2), np.zeros(2, bool)
    sim.reset([0, 1], [5, 6], out)
    for _ in range(30):
        state = out.observation["state"]
        action = np.zeros((2, 4), np.float32)
        action[:, :3] = np.clip(5 * (state[:, 10:] - state[:, :3]), -1, 1)
        sim.step([0, 1], action, out)
        distance = np.linalg.norm(out.observation["state"][:, 10:] - out.observation["state"][:, :3], axis=1)
        np.testing.assert_array_equal(out.success, distance < 0.05)
        np.testing.assert_allclose(out.reward, -distance, atol=1e-5)
        solved |= out.success
    assert solved.all()


def test_fetch_names_are_checked() -> None:
    installed(gymnasium_robotics)
    assert {"FetchReachDense-v4", "FetchPickAndPlace-v4"} <= set(gymnasium_robotics.tasks())
    with pytest.raises(UserError, match="Did you mean 'FetchReachDense-v4'"):
        gymnasium_robotics.make("FetchReachDens-v4", 1)


# ---- gym-pusht ----


def test_pusht_pixels_equal_gym_pusht() -> None:
    installed(pusht)
    sim = pusht.make("PushT-v0", 2, observation="pixels", image_size=48, render_size=48)
    assert sim.spec.observation == {"rgb": TensorSpec((48, 48, 3), "uint8")}
    assert (sim.spec.max_episode_steps, sim.spec.control_hz, sim.spec.action.high) == (300, 10.0, (512.0, 512.0))
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 4], out)
    plain = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels", observation_width=48, observation_height=48)
    plain.reset(seed=4)
    for action in actions_for(sim, 8):
        sim.step([0, 1], np.stack([512 - action, action]), out)
        expected, reward, *_ = plain.step(action)
    np.testing.assert_array_equal(out.observation["rgb"][1], expected)
    assert out.reward[1] == np.float32(reward)
    assert sim.render(0).std() > 5


def test_pusht_success_ends_nothing_by_itself() -> None:
    installed(pusht)
    sim = pusht.make("PushT-v0", 2)
    assert_depends_on_seed_alone(sim)
    out = StepBuffers.allocate(sim.spec, 2)
    # At rest on its outline (256, 256, 45 degrees), with the disc far away. gym-pusht places the block by its corner and then
    # turns it about its centre of mass, 45 below: solved for the corner, (256, 256) = c + m - R m with m = (0, 45).
    turn, middle = np.pi / 4, np.array([0.0, 45.0])
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    corner = np.array([256.0, 256.0]) - middle + rotation @ middle
    sim.reset([0], [0], out, options={"reset_to_state": [40.0, 40.0, *corner, turn]})
    np.testing.assert_allclose(out.observation["state"][0, 2:], [256, 256, turn], atol=1.5)
    sim.step([0], np.array([[40.0, 40.0]], np.float32), out)
    assert out.success[0]
    assert out.reward[0] > 0.95
    assert not out.terminated[0]


def test_pusht_names_are_checked() -> None:
    installed(pusht)
    with pytest.raises(UserError, match="Did you mean 'pixels'"):
        pusht.make("PushT-v0", 1, observation="pixel")
    with pytest.raises(UserError, match="Did you mean 'PushT-v0'"):
        pusht.make("PushT-v1", 1)


# ---- missing packages ----


@pytest.mark.parametrize(
    ("adapter", "module", "extra"),
    [(metaworld, "metaworld.env_dict", "metaworld"), (gymnasium_robotics, "gymnasium_robotics", "robotics"), (pusht, "gym_pusht", "pusht")],
)
def test_a_missing_package_names_its_extra(adapter: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for attempt in (adapter.tasks, lambda: adapter.make("anything", 1)):
        with pytest.raises(MissingExtraError, match=rf'pip install "embodied-rl\[{extra}\]"'):
            attempt()
