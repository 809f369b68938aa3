"""Simulators that leave out observations that are not read: drawing or not, everything else is the same to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend, vulkan_available
from embodied_rl.sim.robots import maniskill
from embodied_rl.types import StepBuffers
from tests.sim.robots.trajectories import actions_for

CHUNK = 4
ROBOTS = "embodied_rl.sim.robots"
DRAWS = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")
VULKAN = pytest.mark.skipif(not vulkan_available(), reason="no Vulkan device")


def factory(module: str, task: str | None, **kwargs: Any) -> SimFactory:
    return SimFactory(f"{ROBOTS}.{module}", task, kwargs)


SMALL: dict[str, Any] = {"image_size": 24}
SIMULATORS = {
    "pixel_tasks": pytest.param(factory("pixel_tasks:PixelTasks", "all", reward="dense", **SMALL), 66, marks=DRAWS),
    "pixel_reach": pytest.param(factory("pixel_reach:PixelReach", "PixelReach", **SMALL), 54, marks=DRAWS),
    "mjcf": pytest.param(factory("mjcf:make", "pixel_reach", camera="top", max_episode_steps=14, **SMALL), 22, marks=DRAWS),
    "metaworld": pytest.param(factory("metaworld:make", "MT10", one_hot="state"), 13),
    "robosuite": pytest.param(
        factory("robosuite:make", "Lift", observation="rgb+state", max_episode_steps=6, **SMALL), 9, marks=[DRAWS, pytest.mark.slow]
    ),
    "libero": pytest.param(
        factory("libero:make", "libero_spatial", max_episode_steps=6, cameras=["agentview"], **SMALL), 9, marks=[DRAWS, pytest.mark.slow]
    ),
    "aloha": pytest.param(
        factory("aloha:make", "AlohaTransferCube-v0", observation="pixels", image_height=24, image_width=32, max_episode_steps=6),
        9,
        marks=DRAWS,
    ),
    "pusht": pytest.param(factory("pusht:make", "PushT-v0", observation="pixels_agent_pos", **SMALL), 21),
    "maniskill": pytest.param(factory("maniskill:make", "PickCube-v1"), 14),
    "maniskill_batch": pytest.param(factory("maniskill:make", "PushCube-v1", batched=True), 14),
    "maniskill_rgb": pytest.param(
        factory("maniskill:make", "PushCube-v1", obs_mode="rgb+segmentation+state", camera_size=24), 14, marks=[VULKAN, pytest.mark.slow]
    ),
}


def played(sim: SimEnv, num_steps: int, unread: bool) -> list[dict[str, Any]]:
    """What each step of two environments puts out; of observations, those after chunks and at episodes' ends."""
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 9], out, {"reconfigure": True})
    actions = np.stack([actions_for(sim, num_steps, seed) for seed in (3, 9)], axis=1)
    told = [observed(sim, out)]
    for step, rows in enumerate(actions, start=1):
        if unread:
            assert type(sim).observe is not SimEnv.observe
            sim.advance([0, 1], rows, out)
        else:
            sim.step([0, 1], rows, out)
        over = [i for i in (0, 1) if out.terminated[i] or out.truncated[i]]
        now: dict[str, Any] = {name: getattr(out, name).copy() for name in ("reward", "terminated", "truncated", "success")}
        now["info"] = [dict(info) if info is not None else None for info in out.info]
        if type(sim).physics is not SimEnv.physics:
            now |= {f"{name} {i}": part for i in (0, 1) for name, part in physics(sim, i).items()}
        if over or step % CHUNK == 0:
            due = over if step % CHUNK else [0, 1]
            if unread:
                sim.observe(due, out)  # type: ignore[attr-defined]
            now |= {key: part[due] for key, part in observed(sim, out).items()}
        told.append(now)
        if over:
            sim.reset(over, [100 * step + i for i in over], out, {"reconfigure": True})
            told.append({key: part[over] for key, part in observed(sim, out).items()})
    return told


def physics(sim: SimEnv, env_id: int) -> Mapping[str, np.ndarray]:
    try:
        return sim.physics(env_id)
    except UserError:  # a task that keeps it where we do not look
        return {}


def observed(sim: SimEnv, out: StepBuffers) -> dict[str, np.ndarray]:
    return {key: out.observation[key].copy() for key in sim.spec.observation}


def count_pictures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by who drew, a picture each: MuJoCo, gym-pusht, ManiSkill's cameras of one environment."""
    pictures: list[str] = []
    for module, name, draw in (
        ("mujoco", "Renderer", "render"),
        ("gym_pusht.envs.pusht", "PushTEnv", "_draw"),
        ("mani_skill.envs.sapien_env", "BaseEnv", "capture_sensor_data"),
    ):
        if module in sys.modules:  # what the simulator imported
            owner = getattr(sys.modules[module], name)
            monkeypatch.setattr(owner, draw, counted(getattr(owner, draw), pictures))
    return pictures


def counted(draw: Callable[..., Any], pictures: list[str]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        pictures.append(draw.__qualname__)
        return draw(*args, **kwargs)

    return counting


def resets(told: list[dict[str, Any]]) -> int:
    """How many episodes began."""
    return sum(len(next(iter(now.values()))) for now in told if "reward" not in now)


def rows_of(told: list[dict[str, Any]], key: str) -> int:
    """How many rows of an observation were made."""
    return sum(len(now[key]) for now in told if key in now)


@pytest.mark.parametrize(("made", "num_steps"), SIMULATORS.values(), ids=SIMULATORS)
def test_nothing_changes_where_observations_are_left_out(made: SimFactory, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        always, sometimes = made.make(2), made.make(2)
    except (MissingExtraError, MissingAssetsError) as error:
        pytest.skip(str(error))
    drawn = count_pictures(monkeypatch)
    try:
        expected, pictures = played(always, num_steps, unread=False), len(drawn)
        drawn.clear()
        actual, pictures_read = played(sometimes, num_steps, unread=True), len(drawn)
        drawn.clear()
        if sometimes.spec.snapshots == "exact":
            sometimes.restore(1, sometimes.snapshot(0))
        assert not drawn, "the worker keeps an episode's last observation"
    finally:
        always.close()
        sometimes.close()
    assert len(actual) == len(expected) > num_steps
    key, draws = next(iter(always.spec.tensors)), any(len(part.shape) == 3 for part in always.spec.tensors.values())
    assert pictures == draws * (rows_of(expected, "reward") + resets(expected)), "one a step and a reset"
    assert pictures_read == draws * rows_of(actual, key), "one for each observation that is read"
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_equal(a[name], b[name], err_msg=f"{name}, after {number} calls")


@pytest.mark.slow
def test_nothing_changes_in_any_maniskill_task() -> None:
    """Rewards that read the observation get it, and tasks that keep something while they observe keep the same."""
    try:
        # SO100GraspCube shakes its camera by torch's own generator: no two of its episodes are the same.
        tasks = [task for task in maniskill.tasks() if task != "SO100GraspCube-v1"]
    except MissingExtraError as error:
        pytest.skip(str(error))
    for task in tasks:
        always, sometimes = maniskill.make(task, 2), maniskill.make(task, 2)
        expected, actual = played(always, 9, unread=False), played(sometimes, 9, unread=True)
        always.close()
        sometimes.close()
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            for name in b:
                np.testing.assert_equal(a[name], b[name], err_msg=f"{task}, {name}, after {number} calls")
    assert len(tasks) > 20
