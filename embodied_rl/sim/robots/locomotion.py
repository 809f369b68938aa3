"""Gymnasium's walkers (HalfCheetah, Hopper, Walker2d, Ant; version 5) stepped without a Python call per quantity.

A third of a walker's step in gymnasium is Python around the physics: attribute look-ups, small arrays, wrappers. Here the physics
is called directly and observations and rewards are computed for all environments of a process at once, with the same operations in
the same precision, so that every number equals gymnasium's bit for bit (tests/sim/robots/test_locomotion.py). Resets, rendering
and snapshots are gymnasium's own: the environments stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.types import StepBuffers

_MODULES = {
    "gymnasium.envs.mujoco.half_cheetah_v5": "HalfCheetahEnv",
    "gymnasium.envs.mujoco.hopper_v5": "HopperEnv",
    "gymnasium.envs.mujoco.walker2d_v5": "Walker2dEnv",
    "gymnasium.envs.mujoco.ant_v5": "AntEnv",
}
"""The classes that are known; of each exactly this one, for a subclass may do anything."""


@dataclass(frozen=True)
class _Body:
    """One environment's memory: views that MuJoCo writes into, and our rows that they are copied to."""

    model: Any
    data: Any
    ctrl: np.ndarray
    position: np.ndarray
    """Where x is measured: the root joint or the main body; element 0 is x, for Ant 1 is y."""
    sources: tuple[np.ndarray, ...]
    """qpos, qvel and, for Ant, cfrc_ext."""
    rows: tuple[np.ndarray, ...]
    """Where they are copied to."""
    limit: Any
    """The TimeLimit, or None."""


def is_known(env: gymnasium.Env) -> bool:
    """Whether `LocomotionSim` can step this environment: one of the known tasks inside the wrappers of gymnasium's registry alone."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env) not in (TimeLimit, OrderEnforcing):
            return False
        env = env.env
    return _MODULES.get(type(env).__module__) == type(env).__name__ and env.render_mode != "human"


class LocomotionSim(GymnasiumSim):
    """Environments of one walking task, all alike. See `GymnasiumSim`; raises AssertionError for one that is not `is_known`."""

    def __init__(self, envs: Sequence[gymnasium.Env], task: str | None = None, exact_snapshots: bool = False) -> None:
        super().__init__(envs, task, exact_snapshots)
        assert all(map(is_known, envs)), "only gymnasium's own walkers are known"
        import mujoco

        first: Any = envs[0].unwrapped
        self._advance, self._forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        self._is_ant = type(first).__name__ == "AntEnv"
        self._frame_skip, self._dt = int(first.frame_skip), float(first.dt)
        num_envs, self._nq, self._nv = len(envs), int(first.model.nq), int(first.model.nv)
        self._joints = np.zeros((num_envs, self._nq + self._nv))
        self._contact = np.zeros((num_envs, 6 * int(first.model.nbody)))
        self._position = np.zeros((num_envs, 2))
        self._before = np.zeros((num_envs, 2))
        self._bodies = [self._body(i, env) for i, env in enumerate(envs)]
        self._terms = first
        """Where the reward's weights and the healthy ranges stand; the environments were made with the same arguments."""
        kinds: dict[str, Callable[[Any], np.ndarray | None]] = {
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
        limit = env
        while isinstance(limit, gymnasium.Wrapper) and not isinstance(limit, TimeLimit):
            limit = limit.env
        inner: Any = env.unwrapped
        data, row = inner.data, self._joints[index]
        sources, rows = [data.qpos, data.qvel], [row[: self._nq], row[self._nq :]]
        position = data.qpos[:2]
        if self._is_ant:
            sources.append(data.cfrc_ext.reshape(-1))
            rows.append(self._contact[index])
            position = data.body(inner._main_body).xpos[:2]
        assert all(
            np.shares_memory(source, getattr(data, name)) for source, name in zip(sources, ("qpos", "qvel", "cfrc_ext"), strict=False)
        )
        return _Body(inner.model, data, data.ctrl, position, tuple(sources), tuple(rows), limit if isinstance(limit, TimeLimit) else None)

    def _step_rows(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        advance, forces, frame_skip = self._advance, self._forces, self._frame_skip
        before, after, truncated = self._before, self._position, out.truncated
        for i, action in zip(env_ids, actions, strict=True):
            body = self._bodies[i]
            before[i] = body.position
            body.ctrl[:] = action
            advance(body.model, body.data, frame_skip)
            forces(body.model, body.data)
            after[i] = body.position
            for row, source in zip(body.rows, body.sources, strict=True):
                row[:] = source
            limit = body.limit
            if limit is None:
                truncated[i] = False
            else:
                limit._elapsed_steps += 1
                truncated[i] = limit._elapsed_steps >= limit._max_episode_steps
        first, last = env_ids[0], env_ids[-1] + 1
        rows: Any = slice(first, last) if last - first == len(env_ids) else np.asarray(env_ids)
        self._observe(rows, out.observation["state"])
        self._judge(env_ids, rows, actions, out)

    def _observe(self, rows: Any, state: np.ndarray) -> None:
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
            state[rows, end:] = self._contact[rows, 6:]  # without the world's
        if self._clips_velocity:
            state[rows, end - self._nv : end] = np.clip(self._joints[rows, self._nq :], -10, 10)

    def _judge(self, env_ids: Sequence[int], rows: Any, actions: np.ndarray, out: StepBuffers) -> None:
        """Rewards, ends and infos. Gymnasium's order of operations and mixture of precisions is kept: see the tests."""
        terms = self._terms
        velocity = (self._position[rows] - self._before[rows]) / self._dt
        forward = terms._forward_reward_weight * velocity[:, 0]
        control = terms._ctrl_cost_weight * np.square(actions).sum(axis=1)
        healthy = self._is_healthy(rows)
        infos = {"x_position": self._joints[rows, 0], "x_velocity": velocity[:, 0], "reward_forward": forward, "reward_ctrl": -control}
        if healthy is None:
            reward = forward - control
            out.terminated[rows] = False
        else:
            survive = healthy * terms._healthy_reward
            costs = control
            if self._is_ant:
                contact = terms._contact_cost_weight * np.square(self._contact[rows]).sum(axis=1)
                costs = control + contact
                place = self._joints[rows, :2]
                infos |= {"y_position": place[:, 1], "y_velocity": velocity[:, 1], "reward_contact": -contact}
                infos["distance_from_origin"] = np.hypot(place[:, 0], place[:, 1])
            else:
                infos["z_distance_from_origin"] = self._joints[rows, 1] - terms.init_qpos[1]
            reward = forward + survive - costs
            infos["reward_survive"] = survive
            out.terminated[rows] = ~healthy & bool(terms._terminate_when_unhealthy)
        out.reward[rows] = reward
        out.success[rows] = False
        names, columns = list(infos), [column.tolist() for column in infos.values()]
        for i, values in zip(env_ids, zip(*columns, strict=True), strict=True):
            out.info[i] = dict(zip(names, values, strict=True))

    def _ant_is_healthy(self, rows: Any) -> np.ndarray:
        low, high = self._terms._healthy_z_range
        state = self._joints[rows]
        return np.isfinite(state).all(axis=1) & (low <= state[:, 2]) & (state[:, 2] <= high)

    def _walker_is_healthy(self, rows: Any) -> np.ndarray:
        (low_z, high_z), (low, high) = self._terms._healthy_z_range, self._terms._healthy_angle_range
        z, angle = self._joints[rows, 1], self._joints[rows, 2]
        return (low_z < z) & (z < high_z) & (low < angle) & (angle < high)

    def _hopper_is_healthy(self, rows: Any) -> np.ndarray:
        low, high = self._terms._healthy_state_range
        state = self._joints[rows, 2:]
        return self._walker_is_healthy(rows) & ((low < state) & (state < high)).all(axis=1)
