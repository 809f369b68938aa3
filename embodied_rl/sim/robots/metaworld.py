"""Meta-World v3 (Yu et al. 2020, arXiv:1910.10897; McLean et al. 2025): fifty tasks of a Sawyer arm, selected by name.

The goal is part of the observation, and each seed places goal and object anew. Multi-task: "MT10", "MT25", "MT50" or a list of tasks, which
alternate from episode to episode, each with its language instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium
import numpy as np

from embodied_rl.errors import UserError, did_you_mean, from_extra, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import named
from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.sim.robots.mujoco import cheapen_rendering
from embodied_rl.sim.robots.mujoco_model import camera_in_use, compiled_once, model_cameras
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import SimSpec, StepBuffers, TensorSpec, VariableSpec

if TYPE_CHECKING:
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

SETS = ("MT10", "MT25", "MT50")
"""Meta-World's own multi-task sets, which `make` accepts as tasks."""

ONE_HOT = ("none", "part", "state")

UPSIDE_DOWN_CAMERAS = frozenset({"corner", "corner2", "corner3", "corner4"})
"""Cameras of Meta-World's scenes whose pictures are turned by 180 degrees."""


def tasks() -> list[str]:
    """The fifty task names, such as "reach-v3". Raises MissingExtraError if Meta-World is not installed."""
    return sorted(_classes())


def make(
    task: str,
    num_envs: int,
    render_size: int = 256,
    camera: str = "corner2",
    tasks: str | Sequence[str] | None = None,
    one_hot: str = "none",
    ahead: bool = False,
) -> GymnasiumSim | MultiTaskSim:
    """`num_envs` environments; dense reward in [0, 10], 500 steps, success as Meta-World defines it.

    Args:
        task: name such as "drawer-open-v3"; or "MT10", "MT25" or "MT50"; with `tasks`, a name for that list.
        camera: "corner", "corner2", "corner3", "corner4", "topview", "behindGripper" or "gripperPOV".
        tasks: names of the tasks of a custom multi-task simulator.
        one_hot: multi-task: "part" adds the task, one-hot over the tasks, as the part ``task``; "state" appends it to ``state``, for
            policies that read one vector (Meta-World's own convention); with "none" only the instruction distinguishes the tasks.
        ahead: multi-task: build an environment of every task at the start, instead of when its first episode begins.

    Raises MissingExtraError; UserError: unknown task, camera or choice of `one_hot`, or an empty list of tasks.
    """
    if tasks is None and task not in SETS:
        return _single(task, num_envs, camera, render_size)
    names = named(tasks) if tasks is not None else task_set(task)
    if not names:
        raise UserError("sim.kwargs.tasks is empty: name at least one Meta-World task, or leave it out.")
    for name in names:
        _class_of(name)
    return MultiTaskSim(num_envs, task, names, camera, render_size, one_hot, ahead)


def task_set(name: str) -> list[str]:
    """The tasks of "MT10", "MT25" or "MT50", in Meta-World's order."""
    from metaworld import env_dict

    return list({"MT10": env_dict.MT10_V3, "MT25": env_dict.MT25_V3, "MT50": env_dict.MT50_V3}[name])


def _single(task: str, num_envs: int, camera: str, render_size: int) -> GymnasiumSim:
    task_class = _class_of(task)
    with compiled_once():
        envs = [SeededTask(task_class, camera, render_size) for _ in range(num_envs)]
    limit = envs[0].max_path_length
    return GymnasiumSim(envs, task=task, exact_snapshots=True, max_episode_steps=limit, instruction=instruction(task))


def _class_of(task: str) -> type:
    if task not in (classes := _classes()):
        raise UserError(f"Meta-World task '{task}' is not known.{did_you_mean(task, [*classes, *SETS])}")
    return classes[task]


def instruction(task: str) -> str:
    """The task's name as an instruction: "button-press-topdown-v3" is "button press topdown"."""
    return task.rsplit("-v", 1)[0].replace("-", " ")


class MultiTaskSim(SimEnv):
    """Environments with episodes of several tasks: the seed chooses ``tasks[seed % len(tasks)]``, and places goal and object.

    Every episode has the part ``instruction``, the task as text. An environment of a task is built on first use. When its slot begins an
    episode of another task, it returns to the process's pool, from which the next slot that needs it takes it.

    `name`: task in the spec.
    """

    many_tasks = True

    def __init__(
        self, num_envs: int, name: str, tasks: Sequence[str], camera: str, render_size: int, one_hot: str = "none", ahead: bool = False
    ) -> None:
        require_known(one_hot, ONE_HOT, f"Meta-World choice of one_hot '{one_hot}' is not known.")
        self.tasks = tuple(tasks)
        self._camera, self._render_size = camera, render_size
        self._stock: dict[str, list[GymnasiumSim]] = {task: [] for task in self.tasks}
        for task in self.tasks if ahead else self.tasks[:1]:
            self._stock[task].append(_single(task, 1, camera, render_size))
        single = self._stock[self.tasks[0]][0].spec
        parts: dict[str, TensorSpec | VariableSpec] = {**single.observation, "instruction": VariableSpec("text", 1024)}
        self._one_hot, self._codes = one_hot, np.eye(len(self.tasks), dtype=np.float32)
        if one_hot == "part":
            parts["task"] = TensorSpec((len(self.tasks),))
        elif one_hot == "state":
            parts["state"] = TensorSpec((single.tensors["state"].shape[0] + len(self.tasks),))
        self.spec: SimSpec = dataclasses.replace(single, task=name, observation=parts, instruction=None)
        self._running: list[tuple[str, GymnasiumSim] | None] = [None] * num_envs
        self._rows = [StepBuffers.allocate(single, 1) for _ in range(num_envs)]

    def task_at(self, env_id: int) -> str:
        return self._current(env_id)[0]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            task = self.tasks[int(seed) % len(self.tasks)]
            self._take(i, task).reset([0], [int(seed)], self._rows[i], options)
            self._observe(i, task, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for row, i in enumerate(env_ids):
            task, sim = self._current(i)
            own = self._rows[i]
            sim.advance([0], actions[row : row + 1], own)
            out.reward[i], out.terminated[i], out.truncated[i] = own.reward[0], own.terminated[0], own.truncated[0]
            out.success[i], out.info[i] = own.success[0], {**(own.info[0] or {}), "task": task}

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            task, sim = self._current(i)
            sim.observe([0], self._rows[i])
            self._observe(i, task, out)

    def _saved(self, env_id: int) -> dict[str, Any]:
        task, sim = self._current(env_id)
        return {"of": task, "episode": sim.snapshot(0)}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        if saved["of"] not in self._stock:
            raise SnapshotError(f"Snapshot is of the task '{saved['of']}', which is not among those of '{self.spec.task}'.")
        self._take(env_id, saved["of"]).restore(0, saved["episode"])

    def render(self, env_id: int) -> np.ndarray:
        return self._current(env_id)[1].render(0)

    def film_cameras(self, env_id: int) -> list[str]:
        return self._current(env_id)[1].film_cameras(0)

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        return self._current(env_id)[1].film_from(0, camera)

    def close(self) -> None:
        for sims in (*self._stock.values(), [running[1] for running in self._running if running is not None]):
            for sim in sims:
                sim.close()

    def _current(self, i: int) -> tuple[str, GymnasiumSim]:
        running = self._running[i]
        assert running is not None, "an environment is reset before it is stepped"
        return running

    def _take(self, i: int, task: str) -> GymnasiumSim:
        """The slot's environment, exchanged for one of this task from the pool if necessary."""
        running = self._running[i]
        if running is not None:
            if running[0] == task:
                return running[1]
            self._stock[running[0]].append(running[1])
        stock = self._stock[task]
        sim = stock.pop() if stock else _single(task, 1, self._camera, self._render_size)
        self._running[i] = task, sim
        return sim

    def _observe(self, i: int, task: str, out: StepBuffers) -> None:
        state, code = self._rows[i].observation["state"][0], self._codes[self.tasks.index(task)]
        out.observation["state"][i] = np.concatenate([state, code]) if self._one_hot == "state" else state
        out.observation["instruction"][i] = instruction(task)
        if self._one_hot == "part":
            out.observation["task"][i] = code


class SeededTask(gymnasium.Wrapper):
    """A Meta-World task whose episodes follow from the seed of `reset`, which Meta-World ignores."""

    def __init__(self, task_class: type, camera: str, render_size: int) -> None:
        env: SawyerXYZEnv = task_class(render_mode="rgb_array", camera_name=camera, width=render_size, height=render_size)
        super().__init__(env)
        require_known(camera, model_cameras(env), f"Meta-World camera '{camera}' is not known.")
        cheapen_rendering(env)
        shorten_steps(env)
        self.task = env
        self.max_path_length = int(env.max_path_length)
        # Meta-World's benchmarks set this in set_task; here the environment's generator draws positions at every reset.
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

    def render(self) -> np.ndarray:
        frame = np.asarray(self.env.render())
        return np.ascontiguousarray(frame[::-1, ::-1]) if camera_in_use(self) in UPSIDE_DOWN_CAMERAS else frame


def _classes() -> Mapping[str, type]:
    with from_extra("Meta-World", "metaworld"):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    return ALL_V3_ENVIRONMENTS


# ---- faster steps ----------------------------------------------------------------------------------------------------------
# Meta-World finds bodies and sites by name in every step, makes an object of every contact, and computes with arrays of one to three
# numbers. The numbers here are the same bit for bit (tests/sim/robots/test_known_indices.py).


def shorten_steps(env: SawyerXYZEnv) -> None:
    """Make a task use the methods below; methods that the task overrides stay."""
    from metaworld.sawyer_xyz_env import SawyerMocapBase, SawyerXYZEnv

    scene = KnownScene(env)
    for name in vars(KnownScene):
        method = attrgetter(name)
        if not name.startswith("__") and hasattr(SawyerXYZEnv, name) and method(type(env)) is method(SawyerXYZEnv):
            vars(env)[name] = method(scene)
    if type(env)._get_id_main_object is SawyerXYZEnv._get_id_main_object and "objGeom" in scene.shapes:
        vars(env)["_get_id_main_object"] = functools.partial(int, scene.shapes["objGeom"])
    vars(env)["_tool_center"] = scene.tool_center
    turn_quickly(env)
    reward_utils = importlib.import_module("metaworld.utils.reward_utils")
    if "__wrapped__" not in vars(reward_utils.tolerance):
        vars(reward_utils)["tolerance"] = quick_tolerance(reward_utils.tolerance)
        name = "tcp_center"
        setattr(SawyerMocapBase, name, quick_center(vars(SawyerMocapBase)[name]))


class KnownScene:
    """Methods of a task's `SawyerXYZEnv`, by their names there, for one scene with known positions in MuJoCo's memory."""

    def __init__(self, env: SawyerXYZEnv) -> None:
        import mujoco
        from metaworld.utils import reward_utils

        model, data = env.model, env.data
        self._env, self._model, self._data, self._rewards = env, model, data, reward_utils
        self._advance, self._forces, self._forward = mujoco.mj_step, mujoco.mj_rnePostConstraint, mujoco.mj_forward
        self._ctrl, self._mocap, self._mocap_turn = data.ctrl, data.mocap_pos, data.mocap_quat
        self._bodies = {model.body(index).name: data.xpos[index] for index in range(model.nbody)}
        self._sites = {model.site(index).name: data.site_xpos[index] for index in range(model.nsite)}
        self.shapes = {model.geom(index).name: index for index in range(model.ngeom)}
        self._pads = self.shapes["leftpad_geom"], self.shapes["rightpad_geom"]
        self._hand, self._right, self._left = (self._bodies[name] for name in ("hand", "rightclaw", "leftclaw"))
        self._tips = self._sites["rightEndEffector"], self._sites["leftEndEffector"]

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, action: np.ndarray) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        """`SawyerXYZEnv.step`, including its errors for an impossible step."""
        env, model, data = self._env, self._model, self._data
        if len(action) != 4 or not env._set_task_called or env._did_see_sim_exception or env.curr_path_length >= env.max_path_length:
            return type(env).step(env, action)
        env.set_xyz_action(action[:3])
        effort = float(action[-1])
        self._ctrl[:] = (effort, -effort)
        self._advance(model, data, env.frame_skip)
        self._forces(model, data)
        env.curr_path_length += 1
        for site in env._target_site_config:
            env._set_pos_site(*site)
        self._forward(model, data)
        bounds = env.sawyer_observation_space
        env._last_stable_obs = seen = env._get_obs().clip(bounds.low, bounds.high)
        reward, info = env.evaluate_state(seen, action)
        return seen.copy(), reward, False, env.curr_path_length == env.max_path_length, info

    def set_xyz_action(self, action: np.ndarray) -> None:
        """Move the mocap body by an action [3]."""
        env = self._env
        bounded = action if all(-1.0 <= part <= 1.0 for part in action.tolist()) else np.clip(action, -1, 1)
        moves = (bounded * env.action_scale).tolist()  # in the action's precision
        bounds = zip(self._mocap[0].tolist(), moves, env.mocap_low.tolist(), env.mocap_high.tolist(), strict=True)
        self._mocap[0] = [min(max(at + move, low), high) for at, move, low, high in bounds]
        self._mocap_turn[:] = (1.0, 0.0, 1.0, 0.0)

    # ---- positions --------------------------------------------------------------------------------------------------

    def get_body_com(self, body_name: str) -> np.ndarray:
        """[3], a view of the body's position."""
        return self._bodies[body_name]

    def _get_site_pos(self, site_name: str) -> np.ndarray:
        """[3], position of a site."""
        return self._sites[site_name].copy()

    def _set_pos_site(self, name: str, pos: np.ndarray) -> None:
        self._sites[name][:] = pos[:3]

    def tool_center(self) -> np.ndarray:
        """[3]: between the finger tips."""
        right, left = self._tips
        return (right + left) / 2.0

    def touching_object(self, object_geom_id: int) -> bool:
        """Whether both pads of the gripper press against the object."""
        pairs = [pair if object_geom_id in pair else () for pair in self._data.contact.geom.tolist()]
        if not any(pairs):
            return False
        addresses, forces = self._data.contact.efc_address, self._data.efc_force
        return all(sum(forces[addresses[number]] for number, pair in enumerate(pairs) if pad in pair) > 0 for pad in self._pads)

    # ---- observations -----------------------------------------------------------------------------------------------

    def _get_obs(self) -> np.ndarray:
        """[39]: the present view, the previous view, and the goal."""
        env = self._env
        goal, seen = env._get_pos_goal(), env._get_curr_obs_combined_no_goal()
        both = np.concatenate((seen, env._prev_obs, np.zeros_like(goal) if env._partially_observable else goal))
        env._prev_obs = seen
        return both

    def _get_curr_obs_combined_no_goal(self) -> np.ndarray:
        """[18]: position of the hand, opening of the fingers, position and orientation of each object, zeros."""
        env, seen = self._env, np.zeros(4 + self._env._obs_obj_max_len)
        seen[:3] = self._hand
        apart = self._right - self._left
        seen[3] = min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        positions, turns = env._get_pos_objects(), env._get_quat_objects()
        for number in range(len(positions) // 3):
            first = 4 + 7 * number
            seen[first : first + 3] = positions[3 * number : 3 * number + 3]
            seen[first + 3 : first + 7] = turns[4 * number : 4 * number + 4]
        return seen

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def _gripper_caging_reward(
        self,
        action: np.ndarray,
        obj_pos: np.ndarray,
        obj_radius: float,
        pad_success_thresh: float,
        object_reach_radius: float,
        xz_thresh: float,
        desired_gripper_effort: float = 1.0,
        high_density: bool = False,
        medium_density: bool = False,
    ) -> float:
        """How well the gripper surrounds the object; same parameters."""
        if high_density and medium_density:
            raise ValueError("Can only be either high_density or medium_density")
        env, center = self._env, self.tool_center()
        initial = env.obj_init_pos
        assert initial is not None, "`obj_init_pos` must be initialized before calling this function."
        tolerance, product = self._rewards.tolerance, self._rewards.hamacher_product
        sides, y, initial_y, around = (obj_radius, pad_success_thresh), float(obj_pos[1]), float(initial[1]), []
        for pad in (self._bodies["leftpad"], self._bodies["rightpad"]):
            pad_y = float(pad[1])
            margin = abs(abs(pad_y - initial_y) - pad_success_thresh)
            around.append(tolerance(abs(pad_y - y), bounds=sides, margin=margin, sigmoid="long_tail"))
        margin = _length(initial[::2] - env.init_tcp[::2]) - xz_thresh
        before = tolerance(_length(center[::2] - obj_pos[::2]), bounds=(0, xz_thresh), margin=margin, sigmoid="long_tail")
        caging = product(product(*around), float(before))
        # In the action's precision.
        gripping = min(max(0, action[-1]), desired_gripper_effort) / desired_gripper_effort if caging > 0.97 else 0.0
        found = product(caging, gripping)
        if high_density:
            found = (found + caging) / 2
        if medium_density:
            margin = abs(_length(initial - env.init_tcp) - object_reach_radius)
            reach = tolerance(_length(obj_pos - center), bounds=(0, object_reach_radius), margin=margin, sigmoid="long_tail")
            found = (found + float(reach)) / 2
        return found


def _length(vector: np.ndarray) -> float:
    """`np.linalg.norm` of a few numbers."""
    return math.sqrt(vector.dot(vector))


def quick_center(own: property) -> property:
    """`SawyerXYZEnv.tcp_center` for a task with a `KnownScene`; Meta-World's own for others."""
    plain = own.fget
    assert plain is not None, "a property that can be read"

    def center(task: SawyerXYZEnv) -> np.ndarray:
        known = vars(task).get("_tool_center")
        return plain(task) if known is None else known()

    return property(center)


def turn_quickly(env: SawyerXYZEnv) -> None:
    """Let a task with an object's orientation skip scipy, whose check of MuJoCo's rotation matrix takes 25 microseconds per step."""
    task = type(env)
    own: Any = task._get_quat_objects
    if own.__globals__.get("Rotation") is not None:
        with_ours = FunctionType(own.__code__, {**own.__globals__, "Rotation": _Turned}, own.__name__, own.__defaults__, own.__closure__)
        vars(env)["_get_quat_objects"] = MethodType(with_ours, env)


class _Turned:
    """The part of scipy's `Rotation` that tasks use."""

    def __init__(self, quaternion: np.ndarray) -> None:
        self._quaternion = quaternion

    @staticmethod
    def from_matrix(matrix: np.ndarray) -> _Turned:
        """Markley 2008, "Unit quaternion from rotation matrix", as in scipy: divided by the largest of four, real part last."""
        a, b, c, d, e, f, g, h, i = matrix.ravel().tolist()
        trace = a + e + i
        largest = max(a, e, i, trace)
        if a == largest:
            x, y, z, w = 1 - trace + 2 * a, d + b, g + c, h - f
        elif e == largest:
            y, z, x, w = 1 - trace + 2 * e, h + f, b + d, c - g
        elif i == largest:
            z, x, y, w = 1 - trace + 2 * i, c + g, f + h, d - b
        else:
            x, y, z, w = h - f, c - g, d - b, 1 + trace
        norm = math.sqrt(x * x + y * y + z * z + w * w)
        return _Turned(np.array([x / norm, y / norm, z / norm, w / norm]))

    def as_quat(self) -> np.ndarray:
        """[4]"""
        return self._quaternion


def quick_tolerance(own: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind Meta-World's rewards, in plain numbers for a number and the most common sigmoid. It replaces the package's
    function in the whole process, with the same numbers bit for bit."""
    scales = {0.1: math.sqrt(1 / 0.1 - 1)}

    @functools.wraps(own)
    def tolerance(
        x: Any,
        bounds: tuple[float, float] = (0.0, 0.0),
        margin: float = 0.0,
        sigmoid: str = "gaussian",
        value_at_margin: float = 0.1,
    ) -> Any:
        lower, upper = bounds
        plain = sigmoid == "long_tail" and value_at_margin in scales and isinstance(x, float)
        if not (plain and isinstance(margin, float) and margin > 0 and lower <= upper):
            return own(x, bounds, margin, sigmoid, value_at_margin)
        if lower <= x <= upper:
            return 1.0
        beyond = float((lower - x if x < lower else x - upper) / margin)
        return 1 / ((beyond * scales[value_at_margin]) ** 2 + 1)

    return tolerance
