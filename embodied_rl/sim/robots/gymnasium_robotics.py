"""gymnasium-robotics: the Fetch arm's goal tasks (Plappert et al. 2018, arXiv:1802.09464), from a flat state."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.errors import MissingExtraError, UserError, did_you_mean
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one, newest
from embodied_rl.sim.robots.mujoco import cheapen_rendering


def tasks() -> list[str]:
    """Newest version of each Fetch task. Raises MissingExtraError where gymnasium-robotics is not installed."""
    _register()
    return newest(task for task, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("gymnasium_robotics.envs.fetch"))


def make(task: str, num_envs: int, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` Fetch environments; ``state`` is the robot's observation followed by the desired goal.

    The achieved goal is left out because the observation holds it (gripper or object position). "FetchReachDense-v4" has the
    reward minus the distance, "FetchReach-v4" minus one until success.

    Args:
        task: id of a Fetch task.
        num_envs: environments in this process.
        render_size: pixels a side of `render`'s picture.
        **kwargs: passed to the task.

    Raises:
        MissingExtraError: gymnasium-robotics is not installed.
        UserError: unknown task or argument.
    """
    known = set(tasks())
    if task not in known:
        raise UserError(f"gymnasium-robotics task '{task}' is not known.{did_you_mean(task, known)}")
    envs = [make_one(task, extra="robotics", width=render_size, height=render_size, **kwargs) for _ in range(num_envs)]
    for env in envs:
        cheapen_rendering(env)
    return GymnasiumSim([GoalState(env) for env in envs], task=task)


class GoalState(gymnasium.ObservationWrapper):
    """The goal dictionary {observation, achieved_goal, desired_goal} as one vector: observation, then desired goal."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        size = space["observation"].shape[0] + space["desired_goal"].shape[0]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate((observation["observation"], observation["desired_goal"]))


def _register() -> None:
    try:
        # Its import prints a notice about other tasks (the Adroit hand) to every process that imports it.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import gymnasium_robotics
    except ImportError as error:
        raise MissingExtraError("gymnasium-robotics", "robotics", error) from error
    if "FetchReachDense-v4" not in gymnasium.registry:
        gymnasium.register_envs(gymnasium_robotics)
