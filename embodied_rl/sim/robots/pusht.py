"""gym-pusht: a disc pushes a T onto its outline (Chi et al. 2023, arXiv:2303.04137), from its state or from pixels.

Its episodes are replayed, not saved: pymunk warm-starts its solver with the impulses of cached contacts, which cannot be read or set.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium
import numpy as np

from embodied_rl.errors import from_extra, require_known
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one

if TYPE_CHECKING:
    from gym_pusht.envs.pusht import PushTEnv

OBSERVATIONS = {"state": "state", "pixels": "pixels", "keypoints": "environment_state_agent_pos", "pixels_agent_pos": "pixels_agent_pos"}
"""Our name: gym-pusht's."""


def tasks() -> list[str]:
    """The one task, "PushT-v0". Raises MissingExtraError where gym-pusht is not installed."""
    with from_extra("gym-pusht", "pusht"):
        import gym_pusht
    assert gym_pusht
    return ["PushT-v0"]


def make(task: str, num_envs: int, observation: str = "state", image_size: int = 96, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` PushT environments. The action is a target position in [0, 512]² pixels; the reward is the covered share of the goal.

    Args:
        observation: "state" (agent x, y; block x, y, angle), "keypoints", "pixels" (part "rgb") or "pixels_agent_pos".
        **kwargs: passed to gym-pusht.

    Raises MissingExtraError; UserError: unknown task or observation.
    """
    known = tasks()
    require_known(task, known, f"gym-pusht task '{task}' is not known.")
    require_known(observation, OBSERVATIONS, f"gym-pusht observation '{observation}' is not known.")
    sizes = {"observation_width": image_size, "observation_height": image_size}
    sizes |= {"visualization_width": render_size, "visualization_height": render_size}
    envs = [make_one(f"gym_pusht/{task}", extra="pusht", obs_type=OBSERVATIONS[observation], **sizes, **kwargs) for _ in range(num_envs)]
    sim = GymnasiumSim([SuccessGoesOn(env) for env in envs], task=task)
    sim.spec = dataclasses.replace(sim.spec, control_hz=10.0, instruction="push the T onto the green outline")
    return sim


class SuccessGoesOn(gymnasium.Wrapper):
    """gym-pusht terminates at success, which makes the value of a solved state 0 under a reward that is largest there.

    As in the other simulators, success is reported and ends nothing by itself; ``sim.success_ends_episode`` decides.
    Observes on demand (`ObservesOnDemand`): gym-pusht draws pixels in every step.
    """

    def step(self, action: np.ndarray) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = self.env.step(action)
        return observation, reward, False, truncated, info

    def set_observing(self, observing: bool) -> None:
        """See `ObservesOnDemand`."""
        if observing:
            vars(self.task).pop("get_obs", None)
        else:
            self.task.get_obs = lambda: None

    def observe(self) -> np.ndarray | dict[str, np.ndarray]:
        """See `ObservesOnDemand`."""
        return self.task.get_obs()

    @property
    def task(self) -> PushTEnv:
        """gym-pusht's own environment."""
        return self.unwrapped
