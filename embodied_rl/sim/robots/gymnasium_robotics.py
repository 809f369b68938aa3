"""gymnasium-robotics (de Lazcano et al. 2024).

Fetch arm and Shadow hand (Plappert et al. 2018, arXiv:1802.09464), Adroit hand (Rajeswaran et al. 2018, arXiv:1709.10087), Franka kitchen
(Gupta et al. 2019, arXiv:1910.11956), point and ant mazes (Fu et al. 2020, arXiv:2004.07219).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import operator
import warnings
from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one, newest
from embodied_rl.sim.robots.known_indices import know_indices
from embodied_rl.sim.robots.mujoco import cheapen_rendering
from embodied_rl.sim.robots.spaces import control_hz

FAMILIES = ("fetch", "shadow_dexterous_hand", "adroit_hand", "franka_kitchen", "maze")
"""Modules of gymnasium_robotics.envs whose tasks work; its old copies of gymnasium's own tasks need a discontinued package."""

INNER = ("robot_env", "point_env", "ant_env")
"""Attributes of kitchen and mazes that hold the environment with the MuJoCo model."""

INSTRUCTIONS = {
    "FetchReach": "move the gripper to the goal",
    "FetchPush": "push the box to the goal",
    "FetchSlide": "slide the puck to the goal",
    "FetchPickAndPlace": "pick up the box and move it to the goal",
    "HandReach": "touch the goals with the finger tips",
    "HandManipulateBlock": "turn the block to the goal pose",
    "HandManipulateEgg": "turn the egg to the goal pose",
    "HandManipulatePen": "turn the pen to the goal pose",
    "AdroitHandDoor": "open the door",
    "AdroitHandHammer": "drive the nail in with the hammer",
    "AdroitHandPen": "turn the pen to the goal orientation",
    "AdroitHandRelocate": "carry the ball to the goal",
    "PointMaze": "go to the goal",
    "AntMaze": "walk to the goal",
}
"""Beginning of an id → instruction; the kitchen's follows from its list of tasks."""


KITCHEN_TASKS = ("microwave", "kettle", "bottom burner", "light switch")
"""The tasks of D4RL's data set kitchen-complete, in its order: the default of ``tasks_to_complete``."""

KITCHEN_WORDS = {
    "microwave": "open the microwave",
    "kettle": "move the kettle to the top left burner",
    "bottom burner": "turn on the bottom burner",
    "top burner": "turn on the top burner",
    "light switch": "switch the light on",
    "slide cabinet": "open the slide cabinet",
    "hinge cabinet": "open the hinge cabinet",
}


def tasks() -> list[str]:
    """Newest version of each task. Raises MissingExtraError where gymnasium-robotics is not installed."""
    _register()
    return newest(task for task, spec in gymnasium.registry.items() if _family(str(spec.entry_point)) in FAMILIES)


def make(task: str, num_envs: int, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` environments of one task; goal tasks show one flat ``state``: observation, then desired goal.

    The achieved goal is left out where the observation holds it (gripper, finger tips or object), and comes in between for the ant maze,
    where it does not. The kitchen's ``state`` is its observation, which holds every object; success is that all of
    ``tasks_to_complete`` are done. Success ends nothing by itself. Ids with "Dense" have a reward that guides, the others minus one
    (mazes: zero) until success.

    Args:
        task: id such as "FetchPushDense-v4", "HandReachDense-v3", "AdroitHandDoor-v1", "FrankaKitchen-v1" or "AntMaze_UMazeDense-v5".
        **kwargs: passed to the task: ``max_episode_steps``, the kitchen's ``tasks_to_complete``, a maze's ``maze_map``, …

    Raises MissingExtraError; UserError: unknown task or argument.
    """
    known = set(tasks())
    require_known(task, known, f"gymnasium-robotics task '{task}' is not known.")
    family = _family(str(gymnasium.spec(task).entry_point))
    if family == "franka_kitchen":
        kwargs = {"tasks_to_complete": list(KITCHEN_TASKS), "terminate_on_tasks_completed": False, **kwargs}
        _check_kitchen(kwargs["tasks_to_complete"])
    envs = [make_one(task, extra="robotics", width=render_size, height=render_size, **kwargs) for _ in range(num_envs)]
    for env in envs:
        cheapen_rendering(inner(env))
        know_indices(env)
    wrapped = [_flat(env, family) for env in envs]
    sim = GymnasiumSim(wrapped, task=task, exact_snapshots=True)
    words = ", ".join(KITCHEN_WORDS[name] for name in kwargs["tasks_to_complete"]) if family == "franka_kitchen" else _instruction(task)
    # Kitchen and mazes name a frame rate that is not their control rate.
    sim.spec = dataclasses.replace(sim.spec, instruction=words, control_hz=control_hz(inner(envs[0])))
    return sim


def inner(env: gymnasium.Env) -> gymnasium.Env:
    """The environment that holds the MuJoCo model and data: kitchen and mazes are built around another one."""
    held = vars(env.unwrapped)
    return next((held[name] for name in INNER if name in held), env)


def _flat(env: gymnasium.Env, family: str) -> gymnasium.Env:
    if family == "franka_kitchen":
        return KitchenState(env)
    if isinstance(env.observation_space, spaces.Dict):
        return GoalState(env, with_achieved=hasattr(env.unwrapped, "ant_env"))
    return env


def _instruction(task: str) -> str | None:
    return next((words for beginning, words in INSTRUCTIONS.items() if task.startswith(beginning)), None)


def _family(entry_point: str) -> str:
    """Of "gymnasium_robotics.envs.fetch.push:MujocoFetchPushEnv" that is "fetch"."""
    module = entry_point.partition(":")[0].split(".")
    return module[2] if module[:2] == ["gymnasium_robotics", "envs"] and len(module) > 2 else ""


def _check_kitchen(names: Sequence[str]) -> None:
    for name in names:
        require_known(name, KITCHEN_WORDS, f"The kitchen has no task '{name}'.")
    if not names:
        raise UserError("sim.kwargs.tasks_to_complete is empty: name at least one of " + ", ".join(KITCHEN_WORDS) + ".")


def _parts_of(env: gymnasium.Env) -> spaces.Dict:
    assert isinstance(env.observation_space, spaces.Dict), env
    return env.observation_space


class GoalState(gymnasium.ObservationWrapper):
    """The goal dictionary {observation, achieved_goal, desired_goal} as one vector: observation, (achieved goal,) desired goal."""

    def __init__(self, env: gymnasium.Env, with_achieved: bool = False) -> None:
        super().__init__(env)
        space = _parts_of(env)
        keys = ("observation", "achieved_goal", "desired_goal") if with_achieved else ("observation", "desired_goal")
        self._parts = operator.itemgetter(*keys)
        size = sum(spaces.flatdim(part) for part in self._parts(space.spaces))
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate(self._parts(observation))


class KitchenState(gymnasium.ObservationWrapper):
    """Only the kitchen's array ``observation``, and its success: no task left to complete."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = _parts_of(env)["observation"]

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        return observation["observation"]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        left = info["tasks_to_complete"]
        return observation, reward, terminated, truncated, {"success": not left, "tasks_left": len(left)}


def _register() -> None:
    # Its import prints a notice about other tasks (the Adroit hand) to every process that imports it.
    with from_extra("gymnasium-robotics", "robotics"), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import gymnasium_robotics
    if "FetchReachDense-v4" not in gymnasium.registry:
        gymnasium.register_envs(gymnasium_robotics)
