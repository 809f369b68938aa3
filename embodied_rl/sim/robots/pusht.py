"""gym-pusht: a disc pushes a T onto its outline (Chi et al. 2023, arXiv:2303.04137), from its state or from pixels.

Its episodes are replayed, not saved: pymunk warm-starts its solver with the impulses of cached contacts, which cannot be read or set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
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
"""{our name: gym-pusht's name}."""


def tasks() -> list[str]:
    """The one task, "PushT-v0". Raises MissingExtraError if gym-pusht is not installed."""
    with from_extra("gym-pusht", "pusht"):
        import gym_pusht
    assert gym_pusht
    return ["PushT-v0"]


def make(task: str, num_envs: int, observation: str = "state", image_size: int = 96, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` PushT environments. The action is a target position in [0, 512]² pixels; the reward is the covered share of the goal.

    `observation`: "state" (agent x, y; block x, y, angle), "keypoints", "pixels" (part "rgb") or "pixels_agent_pos".

    Raises MissingExtraError; UserError: unknown task or observation.
    """
    require_known(task, tasks(), f"gym-pusht task '{task}' is not known.")
    require_known(observation, OBSERVATIONS, f"gym-pusht observation '{observation}' is not known.")
    sizes = {"observation_width": image_size, "observation_height": image_size}
    drawn = max(render_size, 96)  # the cross at the target is a 96th of the picture wide, and OpenCV draws none of 0 pixels
    sizes |= {"visualization_width": drawn, "visualization_height": drawn}
    envs = [make_one(f"gym_pusht/{task}", extra="pusht", obs_type=OBSERVATIONS[observation], **sizes, **kwargs) for _ in range(num_envs)]
    for env in envs:
        shorten_steps(env.unwrapped)
    words = "push the T onto the green outline"
    return GymnasiumSim([SuccessGoesOn(env) for env in envs], task=task, control_hz=10.0, instruction=words)


class SuccessGoesOn(gymnasium.Wrapper):
    """Undoes gym-pusht's termination at success, which makes the value of a solved state 0 although its reward is the largest.

    As in the other simulators, success is reported and does not end the episode; ``sim.success_ends_episode`` decides. Observes on demand
    (`ObservesOnDemand`), because gym-pusht draws pixels in every step.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observe: Callable[[], Any] = self.task.get_obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = self.env.step(action)
        return observation, reward, False, truncated, info

    def set_observing(self, observing: bool) -> None:
        """See `ObservesOnDemand`."""
        self.task.get_obs = self.observe if observing else lambda: None

    @property
    def task(self) -> PushTEnv:
        """gym-pusht's own environment."""
        return self.unwrapped


def shorten_steps(task: PushTEnv) -> None:
    """Speed up gym-pusht's steps, which make objects for vectors and contact points and cut out the goal in each step. The numbers are the
    same bit for bit (tests/sim/robots/test_known_indices.py)."""
    from gym_pusht.envs.pusht import PushTEnv

    if type(task).step is PushTEnv.step:
        short = ShortStep(task)
        task.step, task._get_info, task._handle_collision = short.step, short.info, short.count_contacts
        if task.obs_type == "state":
            task.get_obs = short.state


class ShortStep:
    """`PushTEnv.step` in plain numbers."""

    def __init__(self, task: PushTEnv) -> None:
        from pymunk._chipmunk import lib

        self._task, self._lib = task, lib
        space = lib.cpSpaceNew()
        self._uncounted = lib.cpSpaceAddCollisionHandler(space, 0, 0).postSolveFunc
        """Chipmunk's default contact handler, which does nothing."""
        lib.cpSpaceFree(space)
        self._covered: tuple[tuple[float, ...], float] = (), 0.0
        """Last pose of the T and its share of the goal: in most steps the T rests."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pull the agent towards the action; the reward is the covered share of the goal."""
        task, lib = self._task, self._lib
        task.n_contact_points, task._last_action = 0, action
        task.collision_handeler._handler.postSolveFunc = lib.ext_cpCollisionPostSolveFunc
        space, body, dt, pull, brake, (x, y) = task.space._space, task.agent._body, task.dt, task.k_p, task.k_v, action.tolist()
        place, push, advance, moving = lib.cpBodyGetPosition, lib.cpBodySetVelocity, lib.cpSpaceStep, lib.cpBodyGetVelocity(body)
        vx, vy = moving.x, moving.y  # a kinematic body: contacts do not change its velocity
        for _ in range(int(1 / (dt * task.control_hz))):
            at = place(body)
            vx += (pull * (x - at.x) + brake * (0 - vx)) * dt
            vy += (pull * (y - at.y) + brake * (0 - vy)) * dt
            push(body, (vx, vy))
            advance(space, dt)
        coverage = self._coverage()
        is_success = coverage > task.success_threshold
        observation, info = task.get_obs(), task._get_info()
        info |= {"is_success": is_success, "coverage": coverage}
        return observation, min(max(coverage / task.success_threshold, 0.0), 1.0), is_success, False, info

    def state(self) -> np.ndarray:
        """[5]: `PushTEnv.get_obs`."""
        (agent, _), (x, y, angle) = self._agent(), self._pose()
        return np.array((*agent, x, y, angle % (2 * math.pi)))

    def info(self) -> dict[str, Any]:
        """`PushTEnv._get_info`."""
        task, (agent, moving) = self._task, self._agent()
        return {
            "pos_agent": np.array(agent),
            "vel_agent": np.array(moving),
            "block_pose": np.array(self._pose()),
            "goal_pose": task.goal_pose.copy(),
            "n_contacts": math.ceil(task.n_contact_points / int(1 / task.dt * task.control_hz)),
        }

    def count_contacts(self, arbiter: Arbiter, space: object, data: object) -> None:
        """`PushTEnv._handle_collision`, for a step's first contact; `info` divides the count by a thousand and rounds up."""
        self._task.n_contact_points += self._lib.cpArbiterGetCount(arbiter._arbiter)
        self._task.collision_handeler._handler.postSolveFunc = self._uncounted

    def _agent(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Position and velocity of the agent."""
        body, lib = self._task.agent._body, self._lib
        at, moving = lib.cpBodyGetPosition(body), lib.cpBodyGetVelocity(body)
        return (at.x, at.y), (moving.x, moving.y)

    def _pose(self) -> tuple[float, float, float]:
        """x, y and angle of the T."""
        body, lib = self._task.block._body, self._lib
        at = lib.cpBodyGetPosition(body)
        return at.x, at.y, lib.cpBodyGetAngle(body)

    def _coverage(self) -> float:
        place = self._place(self._task.block)
        if place != self._covered[0]:
            goal, area = self._goal
            self._covered = place, goal.intersection(self._t_at(*place)).area / area
        return self._covered[1]

    @cached_property
    def _goal(self) -> tuple[MultiPolygon, float]:
        """The T at its goal, and its area."""
        goal = self._t_at(*self._place(self._task.get_goal_pose_body(self._task.goal_pose)))
        return goal, goal.area

    def _place(self, body: Body) -> tuple[float, float, float, float]:
        """Rotation of a body (cosine and sine), and its origin."""
        turned, origin = self._lib.cpBodyGetRotation(body._body), self._lib.cpBodyLocalToWorld(body._body, (0.0, 0.0))
        return turned.x, turned.y, origin.x, origin.y

    def _t_at(self, cos: float, sin: float, x: float, y: float) -> MultiPolygon:
        """The T at a pose."""
        import shapely

        corners, shape = self._corners
        return shapely.set_coordinates(shape, [(cos * px - sin * py + x, sin * px + cos * py + y) for px, py in corners])

    @cached_property
    def _corners(self) -> tuple[list[tuple[float, float]], MultiPolygon]:
        """Corners of the T's two boxes in its own coordinates, each box closed by its first corner; and the shape of both."""
        import shapely

        boxes = [[tuple(corner) for corner in shape.get_vertices()] for shape in self._task._block_shapes]
        closed = [[*corners, corners[0]] for corners in boxes]
        return [corner for corners in closed for corner in corners], shapely.multipolygons(shapely.polygons(np.array(closed)))
