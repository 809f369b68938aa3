"""Meta-World's steps without detours: it finds bodies and sites by name in every step, makes an object of every contact, and computes
with arrays of one to three numbers. The numbers are the same bit for bit (tests/sim/robots/test_known_indices.py)."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

if TYPE_CHECKING:
    from metaworld.sawyer_xyz_env import SawyerXYZEnv


def shorten_steps(env: SawyerXYZEnv) -> None:
    """Have a task use what is here; methods of its own stay its own."""
    from metaworld.sawyer_xyz_env import SawyerMocapBase, SawyerXYZEnv

    scene = KnownScene(env)
    known = {
        "step": scene.step,
        "set_xyz_action": scene.move_hand,
        "touching_object": scene.touches,
        "get_body_com": scene.body,
        "_get_site_pos": scene.site,
        "_set_pos_site": scene.place_site,
        "_get_obs": scene.observe,
        "_get_curr_obs_combined_no_goal": scene.seen,
        "_gripper_caging_reward": scene.caging,
    }
    for name, quick in known.items():
        method = attrgetter(name)
        if method(type(env)) is method(SawyerXYZEnv):
            vars(env)[name] = quick
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
    """The methods of a task's `SawyerXYZEnv`, for one scene: where things are in MuJoCo's memory is known."""

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
        """`SawyerXYZEnv.step`, which also has what is to be said of a step that cannot be taken."""
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

    def move_hand(self, action: np.ndarray) -> None:
        """`set_xyz_action`: the mocap body goes by an action [3]."""
        env = self._env
        bounded = action if all(-1.0 <= part <= 1.0 for part in action.tolist()) else np.clip(action, -1, 1)
        moves = (bounded * env.action_scale).tolist()  # in the action's precision
        bounds = zip(self._mocap[0].tolist(), moves, env.mocap_low.tolist(), env.mocap_high.tolist(), strict=True)
        self._mocap[0] = [min(max(at + move, low), high) for at, move, low, high in bounds]
        self._mocap_turn[:] = (1.0, 0.0, 1.0, 0.0)

    # ---- what is where ----------------------------------------------------------------------------------------------

    def body(self, body_name: str) -> np.ndarray:
        """[3]: `get_body_com`, a view of where the body is."""
        return self._bodies[body_name]

    def site(self, site_name: str) -> np.ndarray:
        """[3]"""
        return self._sites[site_name].copy()

    def place_site(self, name: str, pos: np.ndarray) -> None:
        """`_set_pos_site`"""
        self._sites[name][:] = pos[:3]

    def tool_center(self) -> np.ndarray:
        """[3]: between the finger tips."""
        right, left = self._tips
        return (right + left) / 2.0

    def touches(self, object_geom_id: int) -> bool:
        """Whether both pads of the gripper press against the object."""
        pairs = [pair if object_geom_id in pair else () for pair in self._data.contact.geom.tolist()]
        if not any(pairs):
            return False
        addresses, forces = self._data.contact.efc_address, self._data.efc_force
        return all(sum(forces[addresses[number]] for number, pair in enumerate(pairs) if pad in pair) > 0 for pad in self._pads)

    # ---- observations -----------------------------------------------------------------------------------------------

    def observe(self) -> np.ndarray:
        """[39]: what is seen, what was seen before, and the goal."""
        env = self._env
        goal, seen = env._get_pos_goal(), env._get_curr_obs_combined_no_goal()
        both = np.concatenate((seen, env._prev_obs, np.zeros_like(goal) if env._partially_observable else goal))
        env._prev_obs = seen
        return both

    def seen(self) -> np.ndarray:
        """[18]: the hand's place, how far the fingers are apart, each object's place and turn, zeros."""
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

    def caging(
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
        """`_gripper_caging_reward`: how well the gripper is around the object; parameters as there."""
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
    """`SawyerXYZEnv.tcp_center` of a task that knows its scene; of others it is Meta-World's own."""
    plain = own.fget
    assert plain is not None, "a property that can be read"

    def center(task: SawyerXYZEnv) -> np.ndarray:
        known = vars(task).get("_tool_center")
        return plain(task) if known is None else known()

    return property(center)


def turn_quickly(env: SawyerXYZEnv) -> None:
    """Have a task that says how an object is turned compute the quaternion itself: scipy first makes sure, for 25 microseconds a step, that
    MuJoCo's matrix is a rotation."""
    task = type(env)
    own: Any = task._get_quat_objects
    if own.__globals__.get("Rotation") is not None:
        with_ours = FunctionType(own.__code__, {**own.__globals__, "Rotation": _Turned}, own.__name__, own.__defaults__, own.__closure__)
        vars(env)["_get_quat_objects"] = MethodType(with_ours, env)


class _Turned:
    """What tasks use of scipy's `Rotation`."""

    def __init__(self, quaternion: np.ndarray) -> None:
        self._quaternion = quaternion

    @staticmethod
    def from_matrix(matrix: np.ndarray) -> _Turned:
        """Markley 2008, "Unit quaternion from rotation matrix", as scipy has it: divided by the largest of four, real part last."""
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
    """The function of which Meta-World's rewards are made, in plain numbers for a number and the sigmoid that nearly all of them take. It
    takes the package's place in the whole process, with the same numbers bit for bit."""
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
