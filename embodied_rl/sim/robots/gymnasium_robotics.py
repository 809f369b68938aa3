"""gymnasium-robotics (de Lazcano et al. 2024).

Fetch arm and Shadow hand (Plappert et al. 2018, arXiv:1802.09464), Adroit hand (Rajeswaran et al. 2018, arXiv:1709.10087), Franka kitchen
(Gupta et al. 2019, arXiv:1910.11956), point and ant mazes (Fu et al. 2020, arXiv:2004.07219).
"""

from __future__ import annotations

import contextlib
import io
import math
import operator
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.factory import named
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one, newest
from embodied_rl.sim.robots.mujoco import cheapen_rendering
from embodied_rl.sim.robots.mujoco_model import compiled_once
from embodied_rl.sim.robots.spaces import control_hz

if TYPE_CHECKING:
    from gymnasium_robotics.envs.maze.maze_v4 import Maze
    from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
    from mujoco import MjData, MjModel

FAMILIES = ("fetch", "shadow_dexterous_hand", "adroit_hand", "franka_kitchen", "maze")
"""Modules of gymnasium_robotics.envs with working tasks; its old copies of gymnasium's own tasks need a discontinued package."""

INNER = ("robot_env", "point_env", "ant_env")
"""Attributes in which kitchen and mazes keep the environment with the MuJoCo model."""

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
"""{beginning of an id: instruction}; the kitchen's instruction follows from its list of tasks."""


KITCHEN_TASKS = ("microwave", "kettle", "bottom burner", "light switch")
"""Tasks of D4RL's data set kitchen-complete, in its order: the default of ``tasks_to_complete``."""

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
    """Newest version of each task. Raises MissingExtraError if gymnasium-robotics is not installed."""
    # Its import prints a notice about other tasks (the Adroit hand) in every process.
    with from_extra("gymnasium-robotics", "robotics"), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import gymnasium_robotics
    if "FetchReachDense-v4" not in gymnasium.registry:
        gymnasium.register_envs(gymnasium_robotics)
    return newest(task for task, spec in gymnasium.registry.items() if _family(str(spec.entry_point)) in FAMILIES)


def make(task: str, num_envs: int, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` environments of one task; goal tasks show one flat ``state``: observation, then desired goal.

    The achieved goal is left out if the observation contains it (gripper, finger tips or object); for the ant maze, whose observation does
    not, it comes in between. The kitchen's ``state`` is its observation, which contains every object; it succeeds once all
    ``tasks_to_complete`` are done. Success does not end an episode. Ids with "Dense" have a shaped reward, the others minus one (mazes:
    zero) until success.

    Args:
        task: id such as "FetchPushDense-v4", "HandReachDense-v3", "AdroitHandDoor-v1", "FrankaKitchen-v1" or "AntMaze_UMazeDense-v5".
        **kwargs: arguments of the task: ``max_episode_steps``, the kitchen's ``tasks_to_complete``, a maze's ``maze_map``, …

    Raises MissingExtraError; UserError: unknown task or argument, or a maze without a place to start.
    """
    require_known(task, set(tasks()), f"gymnasium-robotics task '{task}' is not known.")
    family = _family(str(gymnasium.spec(task).entry_point))
    words = next((words for beginning, words in INSTRUCTIONS.items() if task.startswith(beginning)), None)
    if family == "franka_kitchen":
        names = named(kwargs.get("tasks_to_complete", KITCHEN_TASKS))
        for name in names:
            require_known(name, KITCHEN_WORDS, f"The kitchen has no task '{name}'.")
        if not names:
            raise UserError("sim.kwargs.tasks_to_complete is empty: name at least one of " + ", ".join(KITCHEN_WORDS) + ".")
        words = ", ".join(KITCHEN_WORDS[name] for name in names)
        kwargs = {"terminate_on_tasks_completed": False, **kwargs, "tasks_to_complete": names}
    with compiled_once():
        envs = [make_one(task, extra="robotics", width=render_size, height=render_size, **kwargs) for _ in range(num_envs)]
    if family == "maze":
        for env in envs:
            Path(env.unwrapped.tmp_xml_file_path).unlink(missing_ok=True)  # type: ignore[attr-defined]  # MuJoCo has read it
        _check_map(envs[0].unwrapped.maze)  # type: ignore[attr-defined]
    for env in envs:
        cheapen_rendering(inner(env))
        know_indices(env)
    wrapped = [_flat(env, family) for env in envs]
    # The frame rate that kitchen and mazes report is not their control rate.
    return GymnasiumSim(wrapped, task=task, exact_snapshots=True, instruction=words, control_hz=control_hz(inner(envs[0])))


def _check_map(maze: Maze) -> None:
    """Raise UserError if a goal has no start in another cell: gymnasium-robotics would draw starts for ever."""
    goals, starts = ({tuple(place) for place in places} for places in (maze.unique_goal_locations, maze.unique_reset_locations))
    if not goals or any(starts <= {goal} for goal in goals):
        raise UserError(
            "sim.kwargs.maze_map needs for each goal ('g', 'c'; without these 0) a start ('r', 'c'; without these 0) in another cell."
        )


def inner(env: gymnasium.Env) -> gymnasium.Env:
    """The environment with the MuJoCo model and data, which kitchen and mazes wrap."""
    held = vars(env.unwrapped)
    return next((held[name] for name in INNER if name in held), env)


def _flat(env: gymnasium.Env, family: str) -> gymnasium.Env:
    if family == "franka_kitchen":
        return KitchenState(env)
    if isinstance(env.observation_space, spaces.Dict):
        return GoalState(env, with_achieved=hasattr(env.unwrapped, "ant_env"))
    return env


def _family(entry_point: str) -> str:
    """Family in an entry point: "fetch" for "gymnasium_robotics.envs.fetch.push:MujocoFetchPushEnv"."""
    module = entry_point.partition(":")[0].split(".")
    return module[2] if module[:2] == ["gymnasium_robotics", "envs"] and len(module) > 2 else ""


class GoalState(gymnasium.ObservationWrapper):
    """Flattens the goal dictionary {observation, achieved_goal, desired_goal}: observation, (achieved goal,) desired goal."""

    def __init__(self, env: gymnasium.Env, with_achieved: bool = False) -> None:
        super().__init__(env)
        keys = ("observation", "achieved_goal", "desired_goal") if with_achieved else ("observation", "desired_goal")
        self._parts = operator.itemgetter(*keys)
        assert isinstance(env.observation_space, spaces.Dict), env
        size = sum(spaces.flatdim(part) for part in self._parts(env.observation_space.spaces))
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate(self._parts(observation))


class KitchenState(gymnasium.ObservationWrapper):
    """Shows only the kitchen's array ``observation``, and reports success once no task is left."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = env.observation_space["observation"]  # type: ignore[index]

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        return observation["observation"]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        left = info["tasks_to_complete"]
        return observation, reward, terminated, truncated, {"success": not left, "tasks_left": len(left)}


# ---- Fetch arm, Shadow hand and point maze with faster steps ---------------------------------------------------------------
# gymnasium-robotics looks up each joint, site and weld by name in every step. The functions below know where these are and access
# them at once; the point maze measures its distance to the goal once, not four times. The numbers are the same bit for bit
# (tests/sim/robots/test_known_indices.py).


def know_indices(env: gymnasium.Env) -> None:
    """Give a Fetch arm or Shadow hand of gymnasium-robotics functions that know its model, and let a point maze step in plain numbers."""
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
    """`PointMazeEnv.step` with `PointEnv.step`, on views of MuJoCo's memory that are made once."""

    def __init__(self, maze: PointMazeEnv) -> None:
        import mujoco

        point = maze.point_env
        self._maze, self._model, self._data, self._frame_skip = maze, point.model, point.data, point.frame_skip
        self._forward, self._advance, self._forces = mujoco.mj_forward, mujoco.mj_step, mujoco.mj_rnePostConstraint
        self._qpos, self._qvel, self._ctrl = point.data.qpos, point.data.qvel, point.data.ctrl

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], SupportsFloat, bool, bool, dict[str, bool]]:
        maze, model, data, qvel, ctrl = self._maze, self._model, self._data, self._qvel, self._ctrl
        vx, vy = qvel.tolist()
        if not (-5.0 <= vx <= 5.0 and -5.0 <= vy <= 5.0):
            np.clip(qvel, -5.0, 5.0, out=qvel)  # otherwise a ball that is pushed would accelerate without limit
        self._forward(model, data)
        x, y = action.tolist()
        ctrl[0], ctrl[1] = min(max(x, -1.0), 1.0), min(max(y, -1.0), 1.0)
        self._advance(model, data, self._frame_skip)
        self._forces(model, data)
        (x, y), (vx, vy), (goal_x, goal_y) = self._qpos.tolist(), qvel.tolist(), maze.goal.tolist()
        achieved, goal = np.array((x, y)), np.array((goal_x, goal_y))
        away_x, away_y = x - goal_x, y - goal_y
        squared = away_x * away_x + away_y * away_y
        near = not squared > 0.25 and bool(np.linalg.norm(achieved - goal) <= 0.45)  # the square may differ in the last bit
        if maze.reward_type == "dense":
            reward = np.exp(-math.sqrt(squared))
        else:
            reward = maze.compute_reward(achieved, goal, {})
        if near and maze.continuing_task:
            maze.update_goal(achieved)
        shown = {"observation": np.array((x, y, vx, vy)), "achieved_goal": achieved, "desired_goal": goal}
        return shown, reward, near and not maze.continuing_task, False, {"success": near}


class KnownIndices:
    """Functions of ``gymnasium_robotics.utils.mujoco_utils`` that a step calls, for one model.

    Args:
        utils: that module, which provides everything else.
        model: MjModel, whose joints, actuators and welds stay the same (their numbers may change).
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
        """Actuators with a target relative to the joint's position."""
        self._actuated = model.jnt_qposadr[model.actuator_trnid[self._relative, 0]]
        self._sites = {model.site(index).name: index for index in range(model.nsite)}
        self._welds = [
            (int(model.body_mocapid[mocap]), int(body))
            for kind, one, other in zip(model.eq_type, model.eq_obj1id, model.eq_obj2id, strict=True)
            if kind == mujoco.mjtEq.mjEQ_WELD
            for mocap, body in ((one, other) if model.body_mocapid[one] != -1 else (other, one),)
        ]

    def functions(self) -> SimpleNamespace:
        """All names of the module `utils`."""
        own = {name: getattr(self, name) for name in vars(KnownIndices) if not name.startswith("_") and name in vars(self._utils)}
        return SimpleNamespace(**{**vars(self._utils), **own})

    def robot_get_obs(self, model: MjModel, data: MjData, joint_names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities of the robot's joints."""
        if self._simple and joint_names is self._joint_names:
            return data.qpos[self._qpos], data.qvel[self._qvel]
        return self._utils.robot_get_obs(model, data, joint_names)

    def ctrl_set_action(self, model: MjModel, data: MjData, action: np.ndarray) -> None:
        """Apply the actuators' part of an action."""
        own = action[7 * self._num_mocap :]
        if len(own) != len(data.ctrl):
            self._utils.ctrl_set_action(model, data, action)
            return
        data.ctrl[:] = own
        data.ctrl[self._relative] = data.qpos[self._actuated] + own[self._relative]

    def mocap_set_action(self, model: MjModel, data: MjData, action: np.ndarray) -> None:
        """Apply the part of an action that moves the mocap bodies, starting from the bodies welded to them."""
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
        self._mujoco.mj_jacSite(model, data, jacobian := np.zeros((3, model.nv)), None, self._sites[name])
        return jacobian @ data.qvel

    def get_site_xvelr(self, model: MjModel, data: MjData, name: str) -> np.ndarray:
        """[3] rad/s"""
        self._mujoco.mj_jacSite(model, data, None, jacobian := np.zeros((3, model.nv)), self._sites[name])
        return jacobian @ data.qvel
