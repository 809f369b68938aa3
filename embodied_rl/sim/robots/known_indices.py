"""Fetch arm, Shadow hand and point maze without detours in their steps.

gymnasium-robotics finds each joint, site and weld anew in every step, by name and one after the other. Here the same functions know where
things are, and read and write them at once; the point maze measures its distance to the goal once, not four times. The numbers are the same
bit for bit (tests/sim/robots/test_known_indices.py).
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, SupportsFloat

import gymnasium
import numpy as np

if TYPE_CHECKING:
    from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
    from mujoco import MjData, MjModel


def know_indices(env: gymnasium.Env) -> None:
    """Have a Fetch arm or Shadow hand of gymnasium-robotics use functions that know its model, and a point maze step in plain numbers; any
    other environment stays as it is."""
    from gymnasium_robotics.envs.maze.point import PointEnv
    from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
    from gymnasium_robotics.envs.robot_env import MujocoRobotEnv
    from gymnasium_robotics.utils import mujoco_utils

    robot = env.unwrapped
    if isinstance(robot, MujocoRobotEnv) and robot._utils is mujoco_utils:
        robot._utils = KnownIndices(mujoco_utils, robot.model, robot._model_names.joint_names).functions()
    elif isinstance(robot, PointMazeEnv) and type(robot) is PointMazeEnv and type(robot.point_env) is PointEnv:
        vars(robot)["step"] = ShortMazeStep(robot).step


class ShortMazeStep:
    """`PointMazeEnv.step` with `PointEnv.step`, for views of MuJoCo's memory that are made once."""

    def __init__(self, maze: PointMazeEnv) -> None:
        import mujoco

        point = maze.point_env
        self._maze, self._model, self._data, self._frame_skip = maze, point.model, point.data, point.frame_skip
        self._forward, self._advance, self._forces = mujoco.mj_forward, mujoco.mj_step, mujoco.mj_rnePostConstraint
        self._qpos, self._qvel, self._ctrl = point.data.qpos, point.data.qvel, point.data.ctrl

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], SupportsFloat, bool, bool, dict[str, bool]]:
        """A ball is pushed towards the goal."""
        maze, model, data, qvel, ctrl = self._maze, self._model, self._data, self._qvel, self._ctrl
        vx, vy = qvel.tolist()
        if not (-5.0 <= vx <= 5.0 and -5.0 <= vy <= 5.0):
            np.clip(qvel, -5.0, 5.0, out=qvel)  # a ball that is pushed would grow ever faster
        self._forward(model, data)
        x, y = action.tolist()
        ctrl[0], ctrl[1] = min(max(x, -1.0), 1.0), min(max(y, -1.0), 1.0)
        self._advance(model, data, self._frame_skip)
        self._forces(model, data)
        (x, y), (vx, vy), (goal_x, goal_y) = self._qpos.tolist(), qvel.tolist(), maze.goal.tolist()
        achieved, goal = np.array((x, y)), np.array((goal_x, goal_y))
        away_x, away_y = x - goal_x, y - goal_y
        squared = away_x * away_x + away_y * away_y
        near = not squared > 0.25 and bool(np.linalg.norm(achieved - goal) <= 0.45)  # whose square may have another last bit
        if maze.reward_type == "dense":
            reward = np.exp(-math.sqrt(squared))
        else:
            reward = maze.compute_reward(achieved, goal, {})
        if near and maze.continuing_task:
            maze.update_goal(achieved)
        shown = {"observation": np.array((x, y, vx, vy)), "achieved_goal": achieved, "desired_goal": goal}
        return shown, reward, near and not maze.continuing_task, False, {"success": near}


class KnownIndices:
    """The functions of ``gymnasium_robotics.utils.mujoco_utils`` that a step calls, for one model.

    Args:
        utils: that module; it does what is not here.
        model: MjModel, whose joints, actuators and welds stay what they are (their numbers may change).
        joint_names: of all joints.
    """

    def __init__(self, utils: ModuleType, model: MjModel, joint_names: tuple[str, ...]) -> None:
        import mujoco

        self._mujoco, self._utils, self._num_mocap = mujoco, utils, int(model.nmocap)
        self._joint_names = joint_names
        robot = np.array([model.joint(name).id for name in joint_names if name.startswith("robot")], dtype=int)
        scalar = np.isin(model.jnt_type[robot], (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE))
        self._simple = len(robot) > 1 and bool(scalar.all())
        """Whether each joint of the robot has one position and one velocity."""
        self._qpos, self._qvel = model.jnt_qposadr[robot], model.jnt_dofadr[robot]
        self._relative = np.flatnonzero(model.actuator_biastype != 0)
        """Actuators whose target is relative to the joint's position."""
        self._actuated = model.jnt_qposadr[model.actuator_trnid[self._relative, 0]]
        self._sites = {model.site(index).name: index for index in range(model.nsite)}
        self._welds = [
            (int(model.body_mocapid[mocap]), int(body))
            for kind, one, other in zip(model.eq_type, model.eq_obj1id, model.eq_obj2id, strict=True)
            if kind == mujoco.mjtEq.mjEQ_WELD
            for mocap, body in ((one, other) if model.body_mocapid[one] != -1 else (other, one),)
        ]

    def functions(self) -> SimpleNamespace:
        """All names of the module."""
        own = {
            "robot_get_obs": self.robot_get_obs,
            "ctrl_set_action": self.ctrl_set_action,
            "mocap_set_action": self.mocap_set_action,
            "get_site_xpos": self.get_site_xpos,
            "get_site_xmat": self.get_site_xmat,
            "get_site_xvelp": self.get_site_xvelp,
            "get_site_xvelr": self.get_site_xvelr,
        }
        return SimpleNamespace(**{**vars(self._utils), **own})

    def robot_get_obs(self, model: MjModel, data: MjData, joint_names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the robot's joints."""
        if self._simple and joint_names is self._joint_names:
            return data.qpos[self._qpos], data.qvel[self._qvel]
        return self._utils.robot_get_obs(model, data, joint_names)

    def ctrl_set_action(self, model: MjModel, data: MjData, action: np.ndarray) -> None:
        """The part of an action that is the actuators'."""
        own = action[7 * self._num_mocap :]
        if len(own) != len(data.ctrl):
            self._utils.ctrl_set_action(model, data, action)
            return
        data.ctrl[:] = own
        data.ctrl[self._relative] = data.qpos[self._actuated] + own[self._relative]

    def mocap_set_action(self, model: MjModel, data: MjData, action: np.ndarray) -> None:
        """The part of an action that moves the mocap bodies, from where the bodies are that are welded to them."""
        if any(mocap == -1 for mocap, _ in self._welds):
            self._utils.mocap_set_action(model, data, action)
        elif self._num_mocap:
            moved = action[: 7 * self._num_mocap].reshape(self._num_mocap, 7)
            for mocap, body in self._welds:
                data.mocap_pos[mocap], data.mocap_quat[mocap] = data.xpos[body], data.xquat[body]
            data.mocap_pos[:] += moved[:, :3]
            data.mocap_quat[:] += moved[:, 3:]

    def get_site_xpos(self, model: MjModel, data: MjData, name: str) -> np.ndarray:
        """[3] metres."""
        return data.site_xpos[self._sites[name]]

    def get_site_xmat(self, model: MjModel, data: MjData, name: str) -> np.ndarray:
        """[3, 3]"""
        return data.site_xmat[self._sites[name]].reshape(3, 3)

    def get_site_xvelp(self, model: MjModel, data: MjData, name: str) -> np.ndarray:
        """[3] m/s"""
        jacobian = np.zeros((3, model.nv))
        self._mujoco.mj_jacSite(model, data, jacobian, None, self._sites[name])
        return jacobian @ data.qvel

    def get_site_xvelr(self, model: MjModel, data: MjData, name: str) -> np.ndarray:
        """[3] rad/s"""
        jacobian = np.zeros((3, model.nv))
        self._mujoco.mj_jacSite(model, data, None, jacobian, self._sites[name])
        return jacobian @ data.qvel
