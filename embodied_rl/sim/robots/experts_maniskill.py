"""Controllers of ManiSkill's Panda arm, out of the simulator's own poses; they keep no memory, so that they can take over at any moment.

A controller says where the gripper's centre (tcp) should go; `PandaMotion` turns that into an action of the control mode: a displacement
where the mode is one of the end effector, and where it is one of the joints, the joint displacements that bring it about (damped least
squares, Wampler 1986), with the gripper kept pointing down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv

OPEN, CLOSED = 1.0, -1.0
MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose", "pd_joint_delta_pos")
_DAMPING = 0.05
_DOWN = np.array([0.0, 0.0, -1.0])
_HOVER_M, _CARRY_M = 0.08, 0.04
_HASTE = 2.0
"""Joint displacements are asked for beyond where they should lead: within one control step the drives do some 40% of the way."""
_GRASP_M = 0.012
"""The gripper closes when its centre is this near to the cube's."""


class PandaMotion:
    """Displacements of the gripper as actions of the environment's control mode.

    Args:
        env: a ManiSkill environment of one scene with a single Panda.

    Raises:
        UserError: another robot or control mode.
    """

    def __init__(self, env: Any) -> None:
        agent = env.agent
        mode = getattr(agent, "control_mode", None)
        if not str(getattr(agent, "uid", "")).startswith("panda") or mode not in MODES:
            raise UserError(
                f"The experts of ManiSkill move a Panda in one of the control modes {', '.join(MODES)}; this task has "
                f"robot '{getattr(agent, 'uid', None)}' in '{mode}'. Choose one: sim.kwargs.control_mode=pd_ee_delta_pos."
            )
        self.agent, self._mode = agent, mode
        arm = agent.controller.controllers["arm"].config
        self._reach = float(arm.upper if mode == "pd_joint_delta_pos" else arm.pos_upper)
        self._turn = float(getattr(arm, "rot_upper", 0.1))
        if mode != "pd_joint_delta_pos":
            return
        articulation = agent.robot._objs[0]
        self._articulation = articulation
        self._model = articulation.create_pinocchio_model()
        self._link = int(agent.tcp._objs[0].index)
        self._arm_joints = [int(index) for index in agent.controller.controllers["arm"].active_joint_indices]

    @property
    def tcp(self) -> np.ndarray:
        """[3] metres."""
        return position(self.agent.tcp)

    @property
    def axis(self) -> np.ndarray:
        """[3] unit vector that the fingers point along."""
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
        # The whole motion is slowed down, so that its direction stays.
        return np.append(arm / max(1.0, float(np.abs(arm).max())), gripper).astype(np.float32)

    def _joints(self, way: np.ndarray) -> np.ndarray:
        """[7] rad"""
        qpos = np.asarray(self._articulation.qpos, np.float64)
        self._model.compute_full_jacobian(qpos)
        jacobian = np.asarray(self._model.get_link_jacobian(self._link, local=False))[:, self._arm_joints]
        # Rows: velocity of the origin of coordinates moving with the link, then angular velocity, both in the base's frame. The base
        # stands upright and unturned, and its frame is the world's but for the place.
        tcp = self.tcp - np.asarray(self._articulation.root_pose.p)
        linear = jacobian[:3] + np.cross(jacobian[3:], tcp, axisa=0, axisc=0)
        tilt = np.cross(self.axis, _DOWN)
        twist, matrix = np.concatenate([way, 0.5 * tilt]), np.concatenate([linear, 0.3 * jacobian[3:]])
        twist[3:] *= 0.3
        return matrix.T @ np.linalg.solve(matrix @ matrix.T + _DAMPING**2 * np.eye(6), twist)


class _PandaExpert:
    def __init__(self, sim: SimEnv, env_id: int) -> None:
        self.env: Any = sim.envs[env_id]  # type: ignore[attr-defined]
        self.motion = PandaMotion(self.env)

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action of this moment; `observation` is not looked at."""
        import torch

        if self.motion.agent is not self.env.agent:  # the scene was built anew: a snapshot was taken
            self.motion = PandaMotion(self.env)
        with torch.inference_mode():
            return self.act()

    def act(self) -> np.ndarray:
        raise NotImplementedError


class PushCubeExpert(_PandaExpert):
    """Behind the cube in the air, down to the table, and straight ahead."""

    def act(self) -> np.ndarray:
        tcp, cube, goal = self.motion.tcp, position(self.env.obj), position(self.env.goal_region)
        low, half = 0.02, float(self.env.cube_half_size)
        behind, aside = cube[0] - tcp[0], abs(cube[1] - tcp[1])
        if behind > half and aside < 0.02 and tcp[2] < 2 * half:
            # As far beyond the goal's middle as the cube still has to go.
            target = np.array([tcp[0] + (goal[0] - cube[0]) + 0.05, cube[1], low])
            return self.motion.action(target - tcp, CLOSED, fastest_m=0.06)
        start = np.array([cube[0] - half - 0.06, cube[1], low])
        if np.linalg.norm(start[:2] - tcp[:2]) > 0.02 and behind < half + 0.03:
            start[2] = 2 * half + 0.06
        return self.motion.action(start - tcp, CLOSED)


class PickCubeExpert(_PandaExpert):
    """Above the cube, down, close, and to the goal."""

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
            # Upwards only when the fingers have let go.
            up = np.array([0.0, 0.0, 0.03]) if not bool(env.agent.is_grasping(env.cubeA)) else np.zeros(3)
            return motion.action(up, OPEN)
        if not bool(env.agent.is_grasping(env.cubeA)):
            return grasp(motion, a)
        if over > 0.008:
            # Up and across at once, but for the last cubes' width, where A must be above B first.
            clear = over > 0.07 or from_place[2] > 0.015
            across = -from_place[:2] if clear else np.zeros(2)
            return motion.action(np.append(across, _CARRY_M - from_place[2]), CLOSED)
        return motion.action(-from_place, CLOSED, fastest_m=0.03 if from_place[2] < 0.02 else 0.06)


def grasp(motion: PandaMotion, cube: np.ndarray) -> np.ndarray:
    """Towards a grasp of a cube at [3]: above it, then down with open fingers, then close."""
    way = cube - motion.tcp
    if np.linalg.norm(way) < _GRASP_M:
        return motion.action(way, CLOSED)
    if np.linalg.norm(way[:2]) > _GRASP_M:
        way[2] += _HOVER_M
    return motion.action(way, OPEN)


def position(thing: Any) -> np.ndarray:
    """[3] metres of an actor or link."""
    return thing.pose.p[0].numpy().astype(np.float64)
