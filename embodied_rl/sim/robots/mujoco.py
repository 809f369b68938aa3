"""MuJoCo (Todorov et al. 2012): gymnasium's tasks such as HalfCheetah-v5, with cheap rendering and fast walkers.

In gymnasium, a third of a walker's step (HalfCheetah, Hopper, Walker2d, Ant; version 5) is Python around the physics: attribute look-ups,
small arrays, wrappers. Here the physics is called directly, and observations and rewards are computed for all environments of a process at
once, with the same operations in the same precision. So every number equals gymnasium's bit for bit (tests/sim/robots/test_locomotion.py).
Resets, rendering and snapshots are gymnasium's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from embodied_rl.errors import UserError, require_known
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, Limit, make_one, newest, saved_whole
from embodied_rl.sim.robots.mujoco_model import limit_quality, model_cameras
from embodied_rl.sim.robots.saved_state import layers_of
from embodied_rl.sim.robots.spaces import WhenRead
from embodied_rl.specs import Rows
from embodied_rl.types import StepBuffers

if TYPE_CHECKING:
    from mujoco import MjData, MjModel

# ---- walkers ----------------------------------------------------------------------------------------------------------


_MODULES = {
    "gymnasium.envs.mujoco.half_cheetah_v5": "HalfCheetahEnv",
    "gymnasium.envs.mujoco.hopper_v5": "HopperEnv",
    "gymnasium.envs.mujoco.walker2d_v5": "Walker2dEnv",
    "gymnasium.envs.mujoco.ant_v5": "AntEnv",
}
"""Supported classes, without their subclasses, which may do anything."""


@dataclass(frozen=True)
class _Body:
    """One environment's memory: views that MuJoCo writes into, and our rows that receive the copies."""

    model: MjModel
    data: MjData
    ctrl: np.ndarray
    position: np.ndarray
    """[2] of the main body or the root joint, from which a step measures, whatever has moved it since the last one."""
    copies: tuple[tuple[np.ndarray, np.ndarray], ...]
    """(our row, MuJoCo's memory): qpos, qvel and, for Ant, cfrc_ext and the main body's position."""
    limit: Limit | None
    """Counter of the step limit."""


class _Terms(NamedTuple):
    """Terms of a reward, one entry per environment."""

    velocity: np.ndarray
    """[n, 2] m/s, from the positions before and after"""
    forward: np.ndarray
    control: np.ndarray
    contact: np.ndarray | None
    """[n]; None for every task but Ant"""
    healthy: np.ndarray | None
    """[n] bool; None if the task cannot fall over"""
    survive: np.ndarray | None


def is_known(env: gymnasium.Env) -> bool:
    """Whether `LocomotionSim` can step this environment: a known task inside wrappers of gymnasium's registry only."""
    *wrappers, base = layers_of(env)
    plain = all(type(wrapper) in (TimeLimit, OrderEnforcing) for wrapper in wrappers)
    return plain and _MODULES.get(type(base).__module__) == type(base).__name__ and env.render_mode != "human"


class LocomotionSim(GymnasiumSim):
    """Environments of one walking task, all alike. See `GymnasiumSim`. Raises AssertionError for one that is not `is_known`."""

    def __init__(self, envs: Sequence[gymnasium.Env], task: str | None = None, exact_snapshots: bool = False) -> None:
        super().__init__(envs, task, exact_snapshots)
        assert all(map(is_known, envs)), "only gymnasium's own walkers are known"
        import mujoco

        first: Any = envs[0].unwrapped
        self._advance = mujoco.mj_step
        self._is_ant = type(first).__name__ == "AntEnv"
        # Gymnasium computes contact forces after every step of every task; only Ant reads them, and the motion does not depend on them.
        self._forces = mujoco.mj_rnePostConstraint if self._is_ant else None
        self._frame_skip, self._dt = int(first.frame_skip), float(first.dt)
        num_envs, self._nq, self._nv = len(envs), int(first.model.nq), int(first.model.nv)
        self._joints = np.zeros((num_envs, self._nq + self._nv))
        self._contact = np.zeros((num_envs, 6 * int(first.model.nbody)))
        self._position = np.zeros((num_envs, 2)) if self._is_ant else self._joints[:, :2]
        """Position of the main body or the root joint; column 0 is x, for Ant column 1 is y."""
        self._before = np.zeros((num_envs, 2))
        self._bodies = [self._body(i, env) for i, env in enumerate(envs)]
        self._infos = [WhenRead(partial(self._info, i)) for i in range(num_envs)]
        """Read once per episode: building them in every step cost as much as the rewards."""
        self._terms = first
        """Environment with the reward's weights and the healthy ranges; all were made with the same arguments."""
        kinds: dict[str, Callable[[Rows], np.ndarray | None]] = {
            "HalfCheetahEnv": lambda rows: None,
            "HopperEnv": self._hopper_is_healthy,
            "Walker2dEnv": self._walker_is_healthy,
            "AntEnv": self._ant_is_healthy,
        }
        self._is_healthy = kinds[type(first).__name__]
        self._clips_velocity = type(first).__name__ in ("HopperEnv", "Walker2dEnv")
        self._skipped = (2 if self._is_ant else 1) * bool(first._exclude_current_positions_from_observation)
        self._shows_contact = self._is_ant and bool(first._include_cfrc_ext_in_observation)

    def _body(self, index: int, env: gymnasium.Env) -> _Body:
        limit = next((layer for layer in layers_of(env) if isinstance(layer, TimeLimit)), None)
        inner: Any = env.unwrapped
        data, row = inner.data, self._joints[index]
        copies, position = [(row[: self._nq], data.qpos), (row[self._nq :], data.qvel)], data.qpos[:2]
        if self._is_ant:
            position = data.body(inner._main_body).xpos[:2]
            copies += [(self._contact[index], data.cfrc_ext.reshape(-1)), (self._position[index], position)]
        assert all(
            np.shares_memory(source, getattr(data, name)) for (_, source), name in zip(copies, ("qpos", "qvel", "cfrc_ext"), strict=False)
        )
        return _Body(inner.model, data, data.ctrl, position, tuple(copies), cast("Limit | None", limit))

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def _step_rows(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        advance, forces, frame_skip = self._advance, self._forces, self._frame_skip
        bodies, before, truncated, infos = self._bodies, self._before, out.truncated, self._infos
        first, last = env_ids[0], env_ids[-1] + 1
        rows: Rows = slice(first, last) if last - first == len(env_ids) else np.asarray(env_ids)
        for i, action in zip(env_ids, actions, strict=True):
            body = bodies[i]
            before[i] = body.position
            body.ctrl[:] = action
            advance(body.model, body.data, frame_skip)
            if forces is not None:
                forces(body.model, body.data)
            for row, source in body.copies:
                row[:] = source
            limit = body.limit
            if limit is None:
                truncated[i] = False
            else:
                limit._elapsed_steps += 1
                truncated[i] = limit._elapsed_steps >= limit._max_episode_steps
            out.info[i] = infos[i]
        self._observe(rows, out.observation["state"])
        self._judge(rows, actions, out)

    def _observe(self, rows: Rows, state: np.ndarray) -> None:
        """Observations of the environments `rows` [n, dim]."""
        end, skipped = self._nq + self._nv - self._skipped, self._skipped
        if self._is_ant:
            low, high = self._terms._contact_force_range
            self._contact[rows] = np.clip(self._contact[rows], low, high)
        if not self._shows_contact and not self._clips_velocity:
            state[rows] = self._joints[rows, skipped:]
            return
        state[rows, :end] = self._joints[rows, skipped:]
        if self._shows_contact:
            state[rows, end:] = self._contact[rows, 6:]  # without the world's forces
        if self._clips_velocity:
            state[rows, end - self._nv : end] = np.clip(self._joints[rows, self._nq :], -10, 10)

    def _judge(self, rows: Rows, actions: np.ndarray, out: StepBuffers) -> None:
        terms = self._reward_terms(rows, actions)
        if terms.healthy is None:
            out.reward[rows] = terms.forward - terms.control
            out.terminated[rows] = False
        else:
            costs = terms.control if terms.contact is None else terms.control + terms.contact
            out.reward[rows] = terms.forward + terms.survive - costs
            out.terminated[rows] = ~terms.healthy & bool(self._terms._terminate_when_unhealthy)
        out.success[rows] = False

    def _reward_terms(self, rows: Rows, actions: np.ndarray) -> _Terms:
        """Terms in gymnasium's order of operations and mixture of precisions: see the tests."""
        terms = self._terms
        velocity = (self._position[rows] - self._before[rows]) / self._dt
        forward = terms._forward_reward_weight * velocity[:, 0]
        control = terms._ctrl_cost_weight * np.add.reduce(np.square(actions), axis=1)
        contact = terms._contact_cost_weight * np.square(self._contact[rows]).sum(axis=1) if self._is_ant else None
        healthy = self._is_healthy(rows)
        return _Terms(velocity, forward, control, contact, healthy, None if healthy is None else healthy * terms._healthy_reward)

    def _info(self, env_id: int) -> dict[str, float]:
        """Gymnasium's info of the last step of one environment."""
        rows = slice(env_id, env_id + 1)
        # The action was a float32, and its squares are summed in float32.
        terms = self._reward_terms(rows, self._bodies[env_id].ctrl[None].astype(np.float32))
        columns = {"x_position": self._joints[rows, 0], "x_velocity": terms.velocity[:, 0], "reward_forward": terms.forward}
        columns["reward_ctrl"] = -terms.control
        if terms.survive is not None:
            columns["reward_survive"] = terms.survive
            if terms.contact is not None:
                place = self._joints[rows, :2]
                columns |= {"y_position": place[:, 1], "y_velocity": terms.velocity[:, 1], "reward_contact": -terms.contact}
                columns["distance_from_origin"] = np.hypot(place[:, 0], place[:, 1])
            else:
                columns["z_distance_from_origin"] = self._joints[rows, 1] - self._terms.init_qpos[1]
        return {name: column.item() for name, column in columns.items()}

    def _ant_is_healthy(self, rows: Rows) -> np.ndarray:
        low, high = self._terms._healthy_z_range
        state = self._joints[rows]
        return np.isfinite(state).all(axis=1) & (low <= state[:, 2]) & (state[:, 2] <= high)

    def _walker_is_healthy(self, rows: Rows) -> np.ndarray:
        (low_z, high_z), (low, high) = self._terms._healthy_z_range, self._terms._healthy_angle_range
        z, angle = self._joints[rows, 1], self._joints[rows, 2]
        return (low_z < z) & (z < high_z) & (low < angle) & (angle < high)

    def _hopper_is_healthy(self, rows: Rows) -> np.ndarray:
        low, high = self._terms._healthy_state_range
        state = self._joints[rows, 2:]
        return self._walker_is_healthy(rows) & ((low < state) & (state < high)).all(axis=1)


# ---- all tasks --------------------------------------------------------------------------------------------------------


def tasks() -> list[str]:
    """Newest version of each of gymnasium's MuJoCo tasks."""
    return newest(task for task, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("gymnasium.envs.mujoco"))


def make(task: str, num_envs: int, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` environments of a MuJoCo task.

    Args:
        task: id such as "HalfCheetah-v5".
        **kwargs: arguments of the task: ``camera_name``, ``frame_skip``, reward weights, …

    Raises MissingExtraError; UserError: unknown task or camera.
    """
    envs = [make_one(task, "mujoco", width=render_size, height=render_size, **kwargs) for _ in range(num_envs)]
    for env in envs:
        cheapen_rendering(env)
    if (camera := kwargs.get("camera_name")) is not None:  # MuJoCo draws its free camera in place of an unknown one
        require_known(camera, model_cameras(envs[0]), f"Camera '{camera}' is not known.")
    kind = LocomotionSim if all(map(is_known, envs)) else GymnasiumSim
    return kind(envs, task=task, exact_snapshots=saved_whole(task))


def cheapen_rendering(env: gymnasium.Env) -> None:
    """Limit the shadow map and disable multisampling before the first frame: 3–4 times as fast on a CPU, with nearly equal pictures."""
    model = vars(env.unwrapped).get("model")
    if model is None:
        raise UserError(f"'{env}' is not a MuJoCo environment.")
    limit_quality(model)
