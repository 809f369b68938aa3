"""Experts of simulators' tasks: scripted controllers that may read the simulator's state.

Each is an `Expert` (see `embodied_rl.sim.instrumented`): a function from an observation to an action in the simulator's units.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.utils.structs import Actor, Link
    from metaworld.policies.policy import Policy

_HERE = "embodied_rl.sim.robots"
ANY_TASK = ""

EXPERTS: dict[str, dict[str, str]] = {
    f"{_HERE}.maniskill:make": {task: f"{_HERE}.experts:{task}Expert" for task in ("PushCube", "PickCube", "StackCube", "LiftPegUpright")},
    f"{_HERE}.metaworld:make": {ANY_TASK: f"{_HERE}.experts:MetaWorldExpert"},
    f"{_HERE}.gymnasium_robotics:make": {
        f"{task}{reward}": f"{_HERE}.experts:{task}Expert" for task in ("FetchReach", "FetchPush") for reward in ("", "Dense")
    },
    f"{_HERE}.pixel_reach:PixelReach": {"PixelReach": f"{_HERE}.experts:PixelReachExpert"},
    f"{_HERE}.pixel_tasks:PixelTasks": {ANY_TASK: f"{_HERE}.pixel_tasks:PixelTasksExpert"},
    f"{_HERE}.key_door:KeyDoor": {"KeyDoor": f"{_HERE}.key_door:KeyDoorExpert"},
}
"""{target of the simulator: {task without its version: target of the expert}}; `ANY_TASK` covers all tasks of a simulator."""


def expert_target(config: SimConfig, key: str = "expert") -> str:
    """Target of the expert for a simulator's task. Raises UserError naming the tasks that have one, and the `key` for another expert."""
    of_target = EXPERTS.get(config.target, {})
    task = re.sub(r"-v\d+$", "", config.task or "")
    found = of_target.get(task, of_target.get(ANY_TASK))
    if found is None:
        known = sorted(
            name or {"metaworld": "all of Meta-World", "pixel_tasks": "all of PixelTasks"}[target.split(":")[0].rsplit(".", 1)[1]]
            for target, tasks in EXPERTS.items()
            for name in tasks
        )
        raise UserError(
            f"Task '{config.task}' of sim={config.name} has no expert. Tasks with one: {', '.join(known)}. Give your own: "
            f"{key}=package.module:Class."
        )
    return found


class PixelReachExpert:
    """Moves straight to the disc: one control step moves the tip by the speed times its duration."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        from embodied_rl.sim.robots.pixel_reach import PixelReach

        assert isinstance(sim, PixelReach), "its task names this expert"
        self._sim = sim
        self._env_id = env_id

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action [2], from the simulator's positions."""
        from embodied_rl.sim.robots.pixel_reach import CONTROL_HZ, MAX_SPEED

        tip, disc = self._sim.positions(self._env_id)
        return np.clip((disc - tip) * CONTROL_HZ / MAX_SPEED, -1.0, 1.0).astype(np.float32)


class MetaWorldExpert:
    """Meta-World's own scripted policy of the task (`metaworld.policies`), which reads the 39 numbers of its observation."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        # Each policy says that it asks for more than a whole step; that is intended, and clipped here.
        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")
        policies: Mapping[str, Callable[[], Policy]] = ENV_POLICY_MAP
        self._policy = policies[sim.task_at(env_id)]()

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Action [4] for ``state`` [39 or more]."""
        action = self._policy.get_action(np.asarray(observation["state"][:39], np.float64))
        return np.clip(action, -1.0, 1.0).astype(np.float32)


# ---- the Fetch arm (gymnasium-robotics); the observation has everything, in metres ------------------------------------


STEP_M = 0.05
"""Distance in metres that the task commands the gripper to move along one axis at action 1; the gripper arrives with some delay."""
_BOX_M = 0.025
"""Half the side of the box in metres."""
_TRAVEL_ABOVE_M = 0.12


class FetchReachExpert:
    """Moves straight to the goal."""

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Action [4] float32 for ``state`` [13] = gripper (3), …, goal (3)."""
        state = observation["state"]
        return towards(state[-3:] - state[:3])


class FetchPushExpert:
    """Goes above the far side of the box, down to the table, and pushes the box towards the goal from behind."""

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Action [4] float32 for ``state`` [28] = gripper (3), box (3), …, goal (3)."""
        state = observation["state"].astype(np.float64)
        gripper, box, goal = state[:3], state[3:6], state[-3:]
        to_goal = goal[:2] - box[:2]
        distance = float(np.linalg.norm(to_goal))
        if distance < 0.01:
            return towards(np.zeros(3))
        ahead = to_goal / distance
        behind = box[:2] - ahead * (_BOX_M + 0.045)
        from_box = gripper[:2] - box[:2]
        along, aside = float(from_box @ ahead), float(abs(from_box @ np.array([-ahead[1], ahead[0]])))
        if along < -_BOX_M and aside < 0.015 and gripper[2] < box[2] + 0.02:
            # Slower near the goal, because the box slides on; the line from the gripper through the box stays on the goal.
            target = box[:2] - ahead * _BOX_M + ahead * min(0.05, 0.6 * distance)
            return towards(np.append(target - gripper[:2], box[2] - gripper[2]), gain=0.6)
        if np.linalg.norm(gripper[:2] - behind) < 0.012:
            return towards(np.append(behind - gripper[:2], box[2] - gripper[2]))
        height = box[2] + _TRAVEL_ABOVE_M
        across = (behind - gripper[:2]) if gripper[2] > height - 0.04 else np.zeros(2)
        return towards(np.append(across, height - gripper[2]))


def towards(way: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """The action [4] that moves the gripper by `way` [3] metres, or as far as one step goes; the fingers do not move."""
    return np.append(np.clip(gain * way / STEP_M, -1.0, 1.0), 0.0).astype(np.float32)


# ---- ManiSkill's Panda arm --------------------------------------------------------------------------------------------

# These controllers read the simulator's poses and keep no memory, so that they can take over at any moment. Each chooses where the
# gripper's centre (tcp) should go; `PandaMotion` turns that into an action of the control mode: a displacement of the end effector, or the
# joint displacements that produce it (damped least squares, Wampler 1986), with the gripper pointing down.

OPEN, CLOSED = 1.0, -1.0
MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose", "pd_joint_delta_pos")
_DAMPING = 0.05
_DOWN = np.array([0.0, 0.0, -1.0])
_HOVER_M, _CARRY_M = 0.08, 0.04
_HASTE = 2.0
"""Factor on joint displacements, because the drives do some 40% of the way within one control step."""
_GRASP_M = 0.012
"""Distance in metres from the cube's centre at which the gripper closes."""
_LOOSE = 0.28
"""Gripper's action that presses the peg's 5 cm with a tenth of the force of CLOSED."""
_PEG_HOLD_M, _PEG_HANGS_RAD = 0.06, 0.15
"""Distance from the peg's centre at which it is held, and the tilt below which it hangs."""


class PandaMotion:
    """Turns displacements of the gripper into actions of the environment's control mode.

    `env`: a ManiSkill environment of one scene with a single Panda. Raises UserError: another robot or control mode.
    """

    def __init__(self, env: BaseEnv) -> None:
        agent = env.agent
        single = agent is not None and hasattr(agent, "uid")  # a scene may have no robot, or several
        uid, mode = (agent.uid, agent.control_mode) if single else (None, None)
        if not str(uid).startswith("panda") or mode not in MODES:
            raise UserError(
                f"The experts of ManiSkill move a Panda in one of the control modes {', '.join(MODES)}; this task has "
                f"robot '{uid}' in '{mode}'. Choose one: sim.kwargs.control_mode=pd_ee_delta_pos."
            )
        self.agent, self._mode = agent, mode
        arm = agent.controller.controllers["arm"].config
        self._reach = float(arm.upper if mode == "pd_joint_delta_pos" else arm.pos_upper)
        if mode != "pd_joint_delta_pos":
            return
        articulation = agent.robot._objs[0]
        self._articulation = articulation
        self._model = articulation.create_pinocchio_model()
        self._link = int(agent.tcp._objs[0].index)
        self._arm_joints = [int(index) for index in agent.controller.controllers["arm"].active_joint_indices]

    @property
    def tcp(self) -> np.ndarray:
        """[3] metres, the gripper's centre."""
        return position(self.agent.tcp)

    @property
    def axis(self) -> np.ndarray:
        """[3] unit vector along the fingers."""
        w, x, y, z = self.agent.tcp.pose.q[0].numpy().astype(np.float64)
        return np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])

    def action(self, way: np.ndarray, gripper: float, *, fastest_m: float = 0.1) -> np.ndarray:
        """The action that moves the tcp by `way` [3] metres, at most `fastest_m` in a step, with the gripper OPEN or CLOSED."""
        length = float(np.linalg.norm(way))
        way = way * min(1.0, fastest_m / max(length, 1e-9))
        if self._mode == "pd_joint_delta_pos":
            arm = self._joints(_HASTE * way) / self._reach
        else:
            arm = way / self._reach
            if self._mode == "pd_ee_delta_pose":
                arm = np.append(arm, np.zeros(3))
        # Slow the whole motion down, so that its direction stays.
        return np.append(arm / max(1.0, float(np.abs(arm).max())), gripper).astype(np.float32)

    def _joints(self, way: np.ndarray) -> np.ndarray:
        """[7] rad, joint displacements that move the tcp by `way`."""
        qpos = np.asarray(self._articulation.qpos, np.float64)
        self._model.compute_full_jacobian(qpos)
        jacobian = np.asarray(self._model.get_link_jacobian(self._link, local=False))[:, self._arm_joints]
        # Rows: velocity of the point on the link at the origin, then angular velocity, both in the base's frame. The base stands upright
        # and unturned, so its frame differs from the world's by a translation only.
        tcp = self.tcp - np.asarray(self._articulation.root_pose.p)
        linear = jacobian[:3] + np.cross(jacobian[3:], tcp, axisa=0, axisc=0)
        tilt = np.cross(self.axis, _DOWN)
        twist, matrix = np.concatenate([way, 0.5 * tilt]), np.concatenate([linear, 0.3 * jacobian[3:]])
        twist[3:] *= 0.3
        return matrix.T @ np.linalg.solve(matrix @ matrix.T + _DAMPING**2 * np.eye(6), twist)


class _PandaExpert:
    def __init__(self, sim: SimEnv, env_id: int) -> None:
        from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim

        assert isinstance(sim, ManiSkillSim), "its task names this expert"
        self.env = sim.envs[env_id]
        self.motion = PandaMotion(self.env)

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The present action; ignores `observation`."""
        import torch

        if self.motion.agent is not self.env.agent:  # a snapshot rebuilt the scene
            self.motion = PandaMotion(self.env)
        with torch.inference_mode():
            return self.act()

    def act(self) -> np.ndarray:
        raise NotImplementedError


class PushCubeExpert(_PandaExpert):
    """Goes behind the cube in the air, down to the table, and straight ahead."""

    def act(self) -> np.ndarray:
        tcp, cube, goal = self.motion.tcp, position(self.env.obj), position(self.env.goal_region)
        low, half = 0.02, float(self.env.cube_half_size)
        behind, aside = cube[0] - tcp[0], abs(cube[1] - tcp[1])
        if behind > half and aside < 0.02 and tcp[2] < 2 * half:
            # The gripper moves as far as the cube still has to go, plus 5 cm.
            target = np.array([tcp[0] + (goal[0] - cube[0]) + 0.05, cube[1], low])
            return self.motion.action(target - tcp, CLOSED, fastest_m=0.06)
        start = np.array([cube[0] - half - 0.06, cube[1], low])
        if np.linalg.norm(start[:2] - tcp[:2]) > 0.02 and behind < half + 0.03:
            start[2] = 2 * half + 0.06
        return self.motion.action(start - tcp, CLOSED)


class PickCubeExpert(_PandaExpert):
    """Goes above the cube, down, closes, and moves to the goal."""

    def act(self) -> np.ndarray:
        if bool(self.env.agent.is_grasping(self.env.cube)):
            way = position(self.env.goal_site) - position(self.env.cube)
            return self.motion.action(way, CLOSED)
        return grasp(self.motion, position(self.env.cube))


class StackCubeExpert(_PandaExpert):
    """Picks cube A up, carries it over cube B, sets it down, lets go and moves up."""

    def act(self) -> np.ndarray:
        env, motion = self.env, self.motion
        a, b = position(env.cubeA), position(env.cubeB)
        height = 2.0 * float(env.cube_half_size[2])
        from_place = a - b - np.array([0.0, 0.0, height])
        over = float(np.linalg.norm(from_place[:2]))
        if over < 0.012 and abs(from_place[2]) < 0.004:
            # Move up only once the fingers have let go.
            up = np.array([0.0, 0.0, 0.03]) if not bool(env.agent.is_grasping(env.cubeA)) else np.zeros(3)
            return motion.action(up, OPEN)
        if not bool(env.agent.is_grasping(env.cubeA)):
            return grasp(motion, a)
        if over > 0.008:
            # Move up and across at once, except for the last cubes' width, where A must first be above B.
            clear = over > 0.07 or from_place[2] > 0.015
            across = -from_place[:2] if clear else np.zeros(2)
            return motion.action(np.append(across, _CARRY_M - from_place[2]), CLOSED)
        return motion.action(-from_place, CLOSED, fastest_m=0.03 if from_place[2] < 0.02 else 0.06)


class LiftPegUprightExpert(_PandaExpert):
    """Lifts the peg by its farther half with a grip so loose that it swings down between the fingers, holds it once it hangs, and sets it
    down."""

    def act(self) -> np.ndarray:
        env, motion = self.env, self.motion
        peg, along = position(env.peg), env.peg.pose.to_transformation_matrix()[0, :3, 0].numpy().astype(np.float64)
        along = along if along[0] + along[2] > 0 else -along  # towards the end that is held: ahead while it lies, up while it hangs
        if not bool(env.agent.is_grasping(env.peg)):
            return grasp(motion, peg + _PEG_HOLD_M * along)
        standing = float(env.peg_half_length) + _PEG_HOLD_M
        if along[2] < np.cos(_PEG_HANGS_RAD):
            return motion.action(np.array([0.0, 0.0, standing + 0.05 - motion.tcp[2]]), _LOOSE)
        # Loose again just above the table, which sets the peg straight.
        grip = CLOSED if motion.tcp[2] > standing + 0.02 else _LOOSE
        return motion.action(np.array([0.0, 0.0, standing - motion.tcp[2]]), grip)


def grasp(motion: PandaMotion, cube: np.ndarray) -> np.ndarray:
    """Action towards a grasp of a cube at [3]: above it, then down with open fingers, then close."""
    way = cube - motion.tcp
    if np.linalg.norm(way) < _GRASP_M:
        return motion.action(way, CLOSED)
    if np.linalg.norm(way[:2]) > _GRASP_M:
        way[2] += _HOVER_M
    return motion.action(way, OPEN)


def position(thing: Actor | Link) -> np.ndarray:
    """[3] metres of an actor or link."""
    return thing.pose.p[0].numpy().astype(np.float64)
