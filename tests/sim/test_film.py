"""Simulators made to be filmed: each camera against the same simulator made with that camera from the start."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory, SimWrapper
from embodied_rl.sim.instrumented import FilmedSim, filmed
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.rendering import configure_rendering, mujoco_backend, vulkan_available
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import StepBuffers

SIZE = 64
needs_mujoco = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


def open_filmed(config: SimConfig, cameras: tuple[str, ...]) -> FilmedSim:
    return FilmedSim(1, **filmed(config, SIZE, cameras).kwargs)


def begun(sim: FilmedSim, seed: int = 3, num_steps: int = 2) -> FilmedSim:
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out)
    for _ in range(num_steps):
        sim.step([0], sim.spec.action.denormalise(np.full((1, sim.spec.action.dim), 0.5, np.float32)), out)
    return sim


def views(config: SimConfig, cameras: tuple[str, ...]) -> list[np.ndarray]:
    """One picture from each camera of the same moment."""
    sim = begun(open_filmed(config, cameras))
    try:
        return np.split(sim.render(0), max(1, len(cameras)))
    finally:
        sim.close()


def alone(config: SimConfig, **kwargs: object) -> np.ndarray:
    """The picture of the same moment in a simulator that was made with other arguments."""
    sim = begun(FilmedSim(1, **filmed(dataclasses.replace(config, kwargs={**config.kwargs, **kwargs}), SIZE).kwargs))
    try:
        return sim.render(0)
    finally:
        sim.close()


@needs_mujoco
def test_a_camera_of_a_mujoco_task_is_the_one_it_could_be_made_with() -> None:
    config = load_sim_config("halfcheetah")
    default, track = views(config, ("default", "track"))
    np.testing.assert_array_equal(track, alone(config, camera_name="track"))
    np.testing.assert_array_equal(default, alone(config))
    assert (default != track).any()
    assert default.shape == (SIZE, SIZE, 3)


@needs_mujoco
def test_wrapped_robots_are_seen_from_all_sides() -> None:
    pytest.importorskip("gymnasium_robotics")
    pictures = views(load_sim_config("fetch_reach"), ("default", "external_camera_0", "gripper_camera_rgb"))
    assert len({picture.tobytes() for picture in pictures}) == 3
    np.testing.assert_array_equal(pictures[0], alone(load_sim_config("fetch_reach")))


@needs_mujoco
@pytest.mark.parametrize(("task", "cameras"), [("reach-v3", ("corner", "topview", "default")), ("MT10", ("topview", "default"))])
def test_cameras_of_meta_world_are_upright_whichever_it_was_made_with(task: str, cameras: tuple[str, ...]) -> None:
    pytest.importorskip("metaworld")
    config = SimConfig("mt", "embodied_rl.sim.robots.metaworld:make", task)
    for picture, name in zip(views(config, cameras), cameras, strict=True):
        camera = "corner2" if name == "default" else name
        np.testing.assert_array_equal(picture, alone(config, camera=camera), err_msg=camera)


@needs_mujoco
def test_drawing_from_another_camera_leaves_the_default_one_as_it_was() -> None:
    sim = begun(open_filmed(load_sim_config("halfcheetah"), ("track", "default")))
    first = sim.render(0)
    np.testing.assert_array_equal(first, sim.render(0))
    np.testing.assert_array_equal(first[SIZE:], alone(load_sim_config("halfcheetah")))
    sim.close()


@needs_mujoco
def test_scenes_of_our_own_have_cameras_too() -> None:
    config = SimConfig("mjcf", "embodied_rl.sim.robots.mjcf:make", "pixel_reach", kwargs={"frame_skip": 5})
    free, top = views(config, ("default", "top"))
    np.testing.assert_array_equal(top, alone(config, render_camera="top"))
    assert (free != top).any()


@needs_mujoco
def test_an_unknown_camera_is_one_line_with_the_choices() -> None:
    pytest.importorskip("gymnasium_robotics")
    sim = begun(open_filmed(load_sim_config("fetch_reach"), ("gripper_camera",)))
    with pytest.raises(UserError, match=r"Camera 'gripper_camera' is not known. Did you mean 'gripper_camera_rgb'\? Known: default, ext"):
        sim.render(0)
    sim.close()
    plain = begun(open_filmed(load_sim_config("cartpole"), ("top",)))
    with pytest.raises(UserError, match="Task 'CartPole-v1' has no camera 'top': it has only one view"):
        plain.render(0)
    plain.close()


def test_pictures_of_several_sizes_lie_in_the_middle_of_black() -> None:
    sim = begun(FilmedSim(1, {"target": "tests.sim.test_film:TwoSizes"}, SIZE, cameras=("large", "small")))
    stacked = sim.render(0)
    assert stacked.shape == (2 * 40, 60, 3)
    assert (stacked[:40] == 1).all()
    assert (stacked[50:70, 20:40] == 2).all()
    rest = np.ones((80, 60), bool)
    rest[:40] = rest[50:70, 20:40] = False
    assert (stacked[rest] == 0).all()


class TwoSizes(SimWrapper):
    """A camera of 40 × 60 pixels and one of 20 × 20."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(SimFactory("embodied_rl.sim.robots.key_door:KeyDoor").make(num_envs))

    def film_cameras(self, env_id: int) -> list[str]:
        return ["large", "small"]

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        return np.full((40, 60, 3), 1, np.uint8) if camera == "large" else np.full((20, 20, 3), 2, np.uint8)


def test_a_simulator_without_cameras_says_so() -> None:
    door = SimFactory("embodied_rl.sim.robots.key_door:KeyDoor").make(1)
    assert door.film_cameras(0) == []
    with pytest.raises(UserError, match=r"KeyDoor.*has no camera 'top'"):
        door.film_from(0, "top")


@pytest.mark.slow
def test_cameras_of_maniskill_are_its_own() -> None:
    pytest.importorskip("mani_skill")
    configure_rendering()
    if not vulkan_available():
        pytest.skip("no Vulkan device here")
    config = load_sim_config("maniskill_pushcube")
    seeds = EpisodeSeeds.held_out(3)
    with EnvManager.from_config(filmed(config, SIZE, ("default", "render_camera", "base_camera")), seeds, num_slots=1) as manager:
        manager.reset(seeds)
        default, people, base = np.split(manager.render([0])[0], 3)
    np.testing.assert_array_equal(default, people)
    # The same camera as an observation of the policy.
    observing = dataclasses.replace(config, kwargs={**config.kwargs, "obs_mode": "rgb", "camera_size": SIZE})
    with EnvManager.from_config(observing, seeds, num_slots=1) as manager:
        seen = manager.reset(seeds).observation["rgb"][0].copy()
    assert abs(base.astype(int) - seen.astype(int)).mean() < 1.0
    assert (default != base).any()
