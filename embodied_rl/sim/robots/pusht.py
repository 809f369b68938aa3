"""gym-pusht: a disc pushes a T onto its outline (Chi et al. 2023, arXiv:2303.04137), from its state or from pixels.

Its episodes are replayed, not saved: pymunk warm-starts its solver with the impulses of cached contacts, which cannot be read or set.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium
import numpy as np

from embodied_rl.errors import from_extra, require_known
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one

if TYPE_CHECKING:
    from gym_pusht.envs.pusht import PushTEnv
    from pymunk import Arbiter, Body
    from shapely import MultiPolygon

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
    for env in envs:
        shorten_steps(env.unwrapped)
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


def shorten_steps(task: PushTEnv) -> None:
    """Take detours out of gym-pusht's steps: objects for vectors and contact points, and a goal that is cut out anew each time. The numbers
    are the same bit for bit (tests/sim/robots/test_known_indices.py)."""
    from gym_pusht.envs.pusht import PushTEnv

    if type(task).step is PushTEnv.step:
        task.step = ShortStep(task).step
        task._handle_collision = partial(_count_contacts, task)


class ShortStep:
    """`PushTEnv.step` in plain numbers."""

    def __init__(self, task: PushTEnv) -> None:
        from pymunk._chipmunk import lib

        self._task, self._lib = task, lib

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The agent is drawn towards the action; the reward is the covered share of the goal."""
        task, lib = self._task, self._lib
        task.n_contact_points, task._last_action = 0, action
        body, dt, pull, brake, (x, y) = task.agent._body, task.dt, task.k_p, task.k_v, action.tolist()
        for _ in range(int(1 / (dt * task.control_hz))):
            at, moving = lib.cpBodyGetPosition(body), lib.cpBodyGetVelocity(body)
            vx, vy = moving.x, moving.y
            towards_x, towards_y = pull * (x - at.x) + brake * (0 - vx), pull * (y - at.y) + brake * (0 - vy)
            lib.cpBodySetVelocity(body, (vx + towards_x * dt, vy + towards_y * dt))
            task.space.step(dt)
        goal, area = self._goal
        coverage = goal.intersection(self._placed(task.block)).area / area
        is_success = coverage > task.success_threshold
        observation, info = task.get_obs(), task._get_info()
        info |= {"is_success": is_success, "coverage": coverage}
        return observation, min(max(coverage / task.success_threshold, 0.0), 1.0), is_success, False, info

    @cached_property
    def _corners(self) -> list[list[tuple[float, float]]]:
        """Of the T's two boxes, in its own coordinates, the first again at the end."""
        found = [[tuple(corner) for corner in shape.get_vertices()] for shape in self._task._block_shapes]
        return [[*corners, corners[0]] for corners in found]

    @cached_property
    def _goal(self) -> tuple[MultiPolygon, float]:
        """The T where it should be, and its area."""
        goal = self._placed(self._task.get_goal_pose_body(self._task.goal_pose))
        return goal, goal.area

    def _placed(self, body: Body) -> MultiPolygon:
        """The T where a body is."""
        import shapely

        own, place = body._body, self._lib.cpBodyLocalToWorld
        placed = [[(at.x, at.y) for at in (place(own, corner) for corner in corners)] for corners in self._corners]
        return shapely.multipolygons(shapely.polygons(np.array(placed)))


def _count_contacts(task: PushTEnv, arbiter: Arbiter, space: object, data: object) -> None:
    from pymunk._chipmunk import lib

    task.n_contact_points += lib.cpArbiterGetCount(arbiter._arbiter)
