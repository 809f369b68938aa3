"""MuJoCo tasks against gymnasium itself, and our own PixelReach against closed forms."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots import mujoco as adapter
from embodied_rl.sim.robots import pixel_reach
from embodied_rl.sim.robots.pixel_reach import PixelReach
from embodied_rl.types import StepBuffers
from tests.sim.robots.trajectories import actions_for, assert_depends_on_seed_alone, episode

draws = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")
VIEW_M = 0.56
"""What the camera sees, a side."""


def test_halfcheetah_equals_gymnasium_step_by_step() -> None:
    sim = adapter.make("HalfCheetah-v5", 2)
    assert (sim.spec.max_episode_steps, sim.spec.control_hz, sim.spec.reports_success) == (1000, 20.0, False)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 4], out)
    plain = gymnasium.make("HalfCheetah-v5")
    plain.reset(seed=4)
    for action in actions_for(sim, 50):
        sim.step([0, 1], np.stack([-action, action]), out)
        observation, reward, *_ = plain.step(action)
    np.testing.assert_array_equal(out.observation["state"][1], observation.astype(np.float32))
    assert out.reward[1] == np.float32(reward)


def test_hopper_depends_on_its_seed_alone() -> None:
    assert_depends_on_seed_alone(adapter.make("Hopper-v5", 2), num_steps=10)


def test_tasks_and_unknown_task() -> None:
    assert {"HalfCheetah-v5", "Ant-v5", "Humanoid-v5"} <= set(adapter.tasks())
    with pytest.raises(UserError, match="Did you mean 'Walker2d-v5'"):
        adapter.make("Walkr2d-v5", 1)


@draws
def test_rendering_is_cheap_and_shows_something() -> None:
    sim = adapter.make("HalfCheetah-v5", 1, render_size=64)
    model = sim.envs[0].unwrapped.model  # type: ignore[attr-defined]
    assert model.vis.quality.shadowsize <= 1024
    assert model.vis.quality.offsamples == 0
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
    frame = sim.render(0)
    assert frame.shape == (64, 64, 3)
    assert frame.dtype == np.uint8
    assert frame.std() > 5
    sim.close()


# ---- PixelReach ----


def test_state_reward_and_success_follow_from_the_geometry() -> None:
    sim = PixelReach(4, pixels=False)
    out = StepBuffers.allocate(sim.spec, 4)
    sim.reset(range(4), [1, 2, 3, 4], out)
    for action in actions_for(sim, 20):
        sim.step(range(4), np.tile(action, (4, 1)), out)
        for i in range(4):
            state = out.observation["state"][i].astype(np.float64)
            np.testing.assert_allclose(state[:2], sim.data[i].qpos, atol=1e-6)  # the rails are the axes
            distance = np.hypot(*(state[:2] - state[2:]))
            assert out.reward[i] == pytest.approx(1 - np.tanh(distance / 0.2), abs=1e-5)
            assert out.success[i] == (distance <= 0.03)
            assert np.abs(state[2:]).max() <= 0.22


def test_a_control_step_moves_an_axis_by_speed_over_frequency_and_leaves_no_hidden_velocity() -> None:
    sim = PixelReach(1, pixels=False)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.data[0].qpos[:] = 0.02, -0.03  # away from the ends of the rails
    for command in ((1.0, -1.0), (-1.0, 0.5), (0.0, 0.0)):
        before = sim.data[0].qpos.copy()
        sim.step([0], np.array([command], np.float32), out)
        wanted = np.array(command) * pixel_reach.MAX_SPEED / pixel_reach.CONTROL_HZ
        np.testing.assert_allclose(sim.data[0].qpos - before, wanted, atol=0.003)  # it takes some milliseconds to get up to speed
        np.testing.assert_allclose(sim.data[0].qvel, np.array(command) * pixel_reach.MAX_SPEED, atol=0.01)


def test_episode_is_truncated_after_fifty_steps() -> None:
    sim = PixelReach(2, pixels=False)
    record = episode(sim, 2, {0: 1, 1: 2}, 50)
    for i in (0, 1):
        assert [row[-2] for row in record[i][1:]] == [0] * 49 + [1]
        assert not any(row[-3] for row in record[i][1:])


def test_a_proportional_controller_solves_it() -> None:
    sim = PixelReach(1, pixels=False)
    out, solved = StepBuffers.allocate(sim.spec, 1), 0
    for seed in range(20):
        sim.reset([0], [seed], out)
        for _ in range(50):
            state = out.observation["state"][0].astype(np.float64)
            step = (state[2:] - state[:2]) * pixel_reach.CONTROL_HZ / pixel_reach.MAX_SPEED
            sim.step([0], np.clip(step, -1, 1)[None].astype(np.float32), out)
            if out.success[0]:
                solved += 1
                break
    assert solved == 20, f"{solved} of 20"


def test_unknown_task() -> None:
    with pytest.raises(UserError, match="Known: PixelReach"):
        PixelReach(1, task="PixelPush")


@draws
def test_the_picture_shows_disc_and_tip_where_the_state_says() -> None:
    size = 48
    sim, blind = PixelReach(3, image_size=size), PixelReach(3, pixels=False)
    out, truth = StepBuffers.allocate(sim.spec, 3), StepBuffers.allocate(blind.spec, 3)
    rows, columns = np.mgrid[0:size, 0:size] + 0.5
    compared = 0
    for seed in range(12):
        sim.reset([1], [seed], out)
        blind.reset([1], [seed], truth)
        image, state = out.observation["rgb"][1].astype(int), truth.observation["state"][1]
        # A pixel counts from half covered on: the floor is (31, 33, 41), and four samples a pixel blend the edges.
        red = (image[..., 0] > 130) & (image[..., 1] < 90)
        yellow = (image[..., 0] > 130) & (image[..., 1] > 120) & (image[..., 2] < 110)
        for mask, place, full in ((red, state[2:], np.pi * 0.03**2), (yellow, state[:2], np.pi * 0.022**2)):
            if mask.sum() * (VIEW_M / size) ** 2 < 0.85 * full:
                continue  # partly hidden by the bridge: no centroid to speak of
            centroid = columns[mask].mean(), rows[mask].mean()
            expected = (place[0] / VIEW_M + 0.5) * size, (0.5 - place[1] / VIEW_M) * size  # orthographic; rows grow downwards
            np.testing.assert_allclose(centroid, expected, atol=0.7)
            compared += 1
    assert compared >= 15
    assert not out.observation["rgb"][[0, 2]].any(), "rows of other environments were written"
    sim.close()


@draws
def test_pictures_depend_on_the_seed_alone_and_render_is_larger() -> None:
    sim = PixelReach(2, render_size=96)
    assert_depends_on_seed_alone(sim, num_steps=5)
    assert sim.render(0).shape == (96, 96, 3)
    assert sim.render(0).std() > 5
    assert len(sim._drawing._renderers) == 2, "environments of a process share a drawing context per size"
    sim.close()
