"""Meta-World v3 (Yu et al. 2020, arXiv:1910.10897; McLean et al. 2025): fifty tasks of a Sawyer arm, each by its name.

Single-task reinforcement learning: the goal is part of the observation, and goal and object are placed anew by every seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.errors import MissingExtraError, UserError, did_you_mean
from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.sim.robots.mujoco import cheapen_rendering

UPSIDE_DOWN_CAMERAS = frozenset({"corner", "corner2", "corner3", "corner4"})
"""Cameras of Meta-World's scenes whose pictures come out turned by 180 degrees."""


def tasks() -> list[str]:
    """The fifty task names, such as "reach-v3". Raises MissingExtraError where Meta-World is not installed."""
    return sorted(_classes())


def make(task: str, num_envs: int, render_size: int = 256, camera: str = "corner2") -> GymnasiumSim:
    """`num_envs` environments of one task; dense reward in [0, 10], 500 steps, success from Meta-World's own measure.

    Args:
        task: name such as "drawer-open-v3".
        num_envs: environments in this process.
        render_size: pixels a side of `render`'s picture.
        camera: "corner", "corner2", "corner3", "corner4", "topview", "behindGripper" or "gripperPOV".

    Raises:
        MissingExtraError: Meta-World is not installed.
        UserError: unknown task or camera.
    """
    classes = _classes()
    if task not in classes:
        raise UserError(f"Meta-World task '{task}' is not known.{did_you_mean(task, classes)}")
    envs = [SeededTask(classes[task], camera, render_size) for _ in range(num_envs)]
    sim = GymnasiumSim(envs, task=task)
    sim.spec = dataclasses.replace(sim.spec, max_episode_steps=envs[0].max_path_length, instruction=instruction(task))
    return sim


def instruction(task: str) -> str:
    """The task's name in words: "button-press-topdown-v3" is "button press topdown"."""
    return task.rsplit("-v", 1)[0].replace("-", " ")


class SeededTask(gymnasium.Wrapper):
    """A Meta-World task whose episodes follow from the seed of `reset`, which Meta-World itself ignores."""

    def __init__(self, task_class: type, camera: str, render_size: int) -> None:
        env: Any = task_class(render_mode="rgb_array", camera_name=camera, width=render_size, height=render_size)
        super().__init__(env)
        cameras = [env.model.camera(index).name for index in range(env.model.ncam)]
        if camera not in cameras:
            raise UserError(f"Meta-World camera '{camera}' is not known.{did_you_mean(camera, cameras)}")
        cheapen_rendering(env)
        self._turn = camera in UPSIDE_DOWN_CAMERAS
        self.task: Any = env
        self.max_path_length = int(env.max_path_length)
        # What its benchmark classes set through set_task, except that positions are drawn at every reset, from the
        # environment's own generator, instead of frozen.
        env._partially_observable = False
        del env.sawyer_observation_space  # cached while the goal was hidden: its bounds would clip the goal to zero at every step
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        self.observation_space = env.sawyer_observation_space

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.task.seed(seed)
        return self.task.reset()

    def render(self) -> Any:
        frame: Any = self.env.render()
        return np.ascontiguousarray(frame[::-1, ::-1]) if self._turn else frame


def _classes() -> Mapping[str, type]:
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise MissingExtraError("Meta-World", "metaworld", error) from error
    return ALL_V3_ENVIRONMENTS
