"""PixelTasks: what the words ask for, what counts as success, and that an episode continues from a snapshot bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.files import assets_dir
from embodied_rl.sim.rendering import configure_rendering, mujoco_backend
from embodied_rl.sim.robots.experts import expert_target
from embodied_rl.sim.robots.pixel_tasks import (
    APART_M,
    CONTROL_HZ,
    INSTRUCTIONS,
    MAX_EPISODE_STEPS,
    MAX_SPEED,
    PixelTasks,
    PixelTasksExpert,
    task_set,
)
from embodied_rl.sim.robots.saved_state import DataState
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import StepBuffers

pytestmark = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


def make(num_envs: int = 1, **kwargs: object) -> tuple[PixelTasks, StepBuffers]:
    configure_rendering()
    sim = PixelTasks(num_envs, **{"image_size": 16, **kwargs})
    return sim, StepBuffers.allocate(sim.spec, num_envs)


def test_seeds_take_the_tasks_in_turn_and_place_things_apart() -> None:
    sim, out = make()
    assert task_set("reach") == ("reach_red", "reach_green", "reach_blue")
    for seed in range(10):
        sim.reset([0], [seed], out)
        assert sim.task_at(0) == list(INSTRUCTIONS)[seed % 5]
        assert out.observation["instruction"][0] == INSTRUCTIONS[sim.task_at(0)]
        places = [sim.tip(0), sim.block(0), *(sim.disc(0, colour) for colour in ("red", "green", "blue"))]
        gaps = [np.hypot(*(one - other)) for i, one in enumerate(places) for other in places[:i]]
        assert min(gaps) >= APART_M - 1e-9
    sim.close()


def test_the_expert_does_what_the_words_say() -> None:
    sim, out = make()
    for seed in range(15):
        sim.reset([0], [seed], out)
        expert, steps = PixelTasksExpert(sim, 0), 0
        before = sim.block(0).copy()
        while not out.success[0] or steps == 0:
            sim.step([0], expert({})[None], out)
            steps += 1
            assert steps < MAX_EPISODE_STEPS, f"seed {seed}: {sim.task_at(0)}"
            assert out.reward[0] == float(out.success[0])
        task = sim.task_at(0)
        if task.startswith("reach"):
            assert np.hypot(*(sim.tip(0) - sim.disc(0, task[6:]))) <= 0.03
        else:
            assert np.sign(sim.block(0)[0] - before[0]) == (-1 if task == "push_left" else 1)
            assert abs(sim.block(0)[0]) >= 0.17
    sim.close()


def test_a_step_moves_the_tip_by_its_speed_and_the_dense_reward_is_the_way_made() -> None:
    sim, out = make(task="reach_red", reward="dense")
    assert (sim.spec.instruction, "instruction" in sim.spec.observation) == ("move the tip onto the red disc", False)
    sim.reset([0], [3], out)
    tip, before = sim.tip(0).copy(), sim.distance(0)
    direction = np.sign(sim.disc(0, "red") - tip)
    sim.step([0], direction[None], out)
    np.testing.assert_allclose(sim.tip(0) - tip, direction * MAX_SPEED / CONTROL_HZ, atol=1.5e-3)
    assert out.reward[0] == pytest.approx(10 * (before - sim.distance(0)), abs=1e-5), "decimetres"
    assert not out.success[0]
    sim.close()


def test_pictures_are_those_that_mujoco_draws_by_itself() -> None:
    """Its own renderer draws into the buffer that the model asks for, here with finer meshes, which flat light does not show; ours are as
    large as their pictures, and beside one another."""
    sim, out = make(image_size=40)
    sim.reset([0], [7], out)
    import mujoco

    plain = mujoco.MjModel.from_xml_path(str(assets_dir() / "mujoco" / "pixel_tasks.xml"))
    assert (plain.vis.global_.offheight, plain.vis.global_.offwidth) == (512, 512)
    plain.vis.quality.numquads, plain.vis.quality.numstacks = 4, 8
    for size, ours in ((40, out.observation["rgb"][0]), (256, sim.render(0)), (40, out.observation["rgb"][0])):
        sim.observe([0], out)
        with mujoco.Renderer(plain, size, size) as renderer:
            renderer.update_scene(sim.data[0], camera="top")
            expected = renderer.render()
        np.testing.assert_array_equal(ours, expected)
        assert len(np.unique(expected.reshape(-1, 3), axis=0)) > 5


def test_an_episode_is_taken_up_again_bit_by_bit() -> None:
    sim, out = make(2)
    rng = np.random.default_rng(0)
    sim.reset([0, 1], [3, 4], out)
    for _ in range(5):
        sim.step([0], rng.uniform(-1, 1, (1, 2)), out)
    saved = decode_state(sim.snapshot(0))
    older = {**saved, "data": DataState(sim.data[0]).capture()}
    del older["state"]
    actions = rng.uniform(-1, 1, (10, 1, 2))
    for action in actions:
        sim.step([0], action, out)
    for form in (saved, older):
        sim.restore(1, encode_state(form))
        for action in actions:
            sim.step([1], action, out)
        assert sim.task_at(1) == sim.task_at(0) == "push_left"
        np.testing.assert_array_equal(out.observation["rgb"][0], out.observation["rgb"][1])
        assert sim.distance(0) == sim.distance(1)
        sim.reset([1], [4], out)
    sim.close()


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UserError, match=r"Task 'reach_rad' is not known. Did you mean 'reach_red'"):
        make(task="reach_rad")
    with pytest.raises(UserError, match=r"reward 'spars' is not known. Did you mean 'sparse'"):
        make(reward="spars")
    assert expert_target(load_sim_config("pixel_tasks")).endswith("pixel_tasks:PixelTasksExpert")
