"""The physical state of MuJoCo and of gymnasium's classic tasks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.robots.saved_state import layers_of, unique_held

MUJOCO_PARTS = ("qpos", "qvel", "act", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat", "eq_active", "userdata")
"""Arrays of MjData that the next physics step depends on, in MuJoCo's names; forces applied from outside are not among them."""


class Physics(Protocol):
    """One environment's state as named arrays: see `SimEnv.physics`."""

    def get(self) -> dict[str, np.ndarray]: ...

    def set(self, state: Mapping[str, np.ndarray]) -> None: ...


class MujocoPhysics:
    """``time`` [1] and the arrays of `MUJOCO_PARTS` that are not empty, each flat and in its own dtype."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model, self._data = model, data
        self._parts = {name: array.reshape(-1) for name in MUJOCO_PARTS if (array := getattr(data, name)).size}

    def get(self) -> dict[str, np.ndarray]:
        return {"time": np.array([self._data.time]), **{name: part.copy() for name, part in self._parts.items()}}

    def set(self, state: Mapping[str, np.ndarray]) -> None:
        import mujoco

        self._data.time = float(state["time"][0])
        for name, part in self._parts.items():
            part[:] = state[name]
        mujoco.mj_forward(self._model, self._data)
        # mj_forward leaves its own solution as the next warm start; the saved one is what the uninterrupted episode would use.
        self._data.qacc_warmstart[:] = state["qacc_warmstart"]


class AttributeState:
    """``state``: the array of that name in which gymnasium's classic control tasks keep all they have."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def get(self) -> dict[str, np.ndarray]:
        return {"state": np.array(self._env.state, np.float64).reshape(-1)}

    def set(self, state: Mapping[str, np.ndarray]) -> None:
        present = self._env.state
        kind = present.dtype if isinstance(present, np.ndarray) else np.dtype(np.float64)
        self._env.state = np.array(state["state"], kind).reshape(np.shape(present))


def physics_of(env: gymnasium.Env) -> Physics:
    """Of an environment that has been reset. Raises UserError where its state is not found."""
    layers = layers_of(env)
    held = [value for layer in layers for value in vars(layer).values()]
    models, data = unique_held(held, "MjModel"), unique_held(held, "MjData")
    if len(models) == len(data) == 1:
        return MujocoPhysics(models[0], data[0])
    base: Any = env.unwrapped
    if type(base).__module__.startswith("gymnasium.envs.classic_control.") and getattr(base, "state", None) is not None:
        return AttributeState(base)
    raise UserError(
        f"Where '{getattr(env.spec, 'id', type(base).__name__)}' keeps its physical state is not known: it is no MuJoCo task and none of "
        "gymnasium's classic ones. Leave it out: states=none, or states=snapshots:1 where the task has snapshots."
    )
