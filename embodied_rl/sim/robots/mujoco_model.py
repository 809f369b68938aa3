"""Shared parts of the MuJoCo adapters: pictures of a model, its cameras, and an environment's physical state by name."""

from __future__ import annotations

import atexit
import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots.saved_state import DataState, layers_of, unique_held
from embodied_rl.types import StepBuffers

if TYPE_CHECKING:
    from types import ModuleType

    from gymnasium.envs.classic_control.cartpole import CartPoleEnv
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
    from mujoco import MjData, MjModel, Renderer

MAX_SHADOW_MAP = 1024
"""Side in pixels. Models request up to 8192, which on a CPU takes most of a frame's time."""


def import_mujoco(what: str) -> ModuleType:
    """Raises MissingExtraError if MuJoCo, which `what` needs, is not installed."""
    with from_extra(what, "mujoco"):
        import mujoco
    return mujoco


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Compile each model's file once inside: environments after the first of a task get copies, in a tenth of the time."""
    mujoco = import_mujoco("This simulator")
    compile_file = mujoco.MjModel.from_xml_path
    kept: dict[str, MjModel] = {}

    def copied(filename: str, assets: dict[str, bytes] | None = None) -> MjModel:
        if assets is not None:
            return compile_file(filename, assets)
        if filename not in kept:
            kept[filename] = compile_file(filename)
        return copy.copy(kept[filename])

    mujoco.MjModel.from_xml_path = copied
    try:
        yield
    finally:
        mujoco.MjModel.from_xml_path = compile_file


def limit_quality(model: MjModel, multisampling: bool = False) -> None:
    """Limit the shadow map, and disable multisampling unless `multisampling`. MuJoCo reads both when a rendering context is made."""
    quality = model.vis.quality
    quality.shadowsize = min(int(quality.shadowsize), MAX_SHADOW_MAP)
    if not multisampling:
        quality.offsamples = 0


class Drawing:
    """Off-screen pictures of one MjModel. Needs no graphics driver before the first `frame`.

    Args:
        model: the MjModel; its shadow map is limited.
        hidden_groups: groups of geoms to leave out, such as robosuite's collision shapes (group 0).
        multisampling: keep the model's; without it edges are jagged and frames are faster.
        without: names of ``mujoco.mjtRndFlag`` that are not drawn.
    """

    def __init__(
        self, model: MjModel, hidden_groups: tuple[int, ...] = (), multisampling: bool = False, without: Sequence[str] = ()
    ) -> None:
        import mujoco

        self._mujoco, self.model = mujoco, model
        limit_quality(model, multisampling)
        self._option = mujoco.MjvOption()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        self._flags = [vars(mujoco.mjtRndFlag)[name] for name in without]
        self._renderers: dict[tuple[int, int], Renderer] = {}

    def check_camera(self, camera: str | int) -> None:
        """Raise UserError with the nearest name if the model lacks the camera, given by its name or number (-1: the free camera)."""
        if not (isinstance(camera, int) and -1 <= camera < self.model.ncam):
            require_known(camera, camera_names(self.model), f"Camera '{camera}' is not known.")

    def frame(self, data: MjData, camera: str | int = -1, height: int = 256, width: int = 256, out: np.ndarray | None = None) -> np.ndarray:
        """One picture [height, width, 3] uint8, the top row first; camera -1 is MuJoCo's free camera.

        Raises UserError: this machine cannot draw off-screen.
        """
        renderer = self._renderers.get((height, width)) or self._new(height, width)
        renderer.update_scene(data, camera=camera, scene_option=self._option)
        if out is None or out.flags.c_contiguous:
            return renderer.render(out=out)
        out[...] = renderer.render()
        return out

    def close(self) -> None:
        _close_all(self._renderers)

    def _new(self, height: int, width: int) -> Renderer:
        buffer = self.model.vis.global_
        before = buffer.offheight, buffer.offwidth
        # MuJoCo reads these when the context is made and clears the whole buffer for each frame, so it is no larger than the pictures.
        buffer.offheight, buffer.offwidth = height, width
        try:
            renderer = self._mujoco.Renderer(self.model, height, width)
        except Exception as error:  # without a driver this may be ImportError, AttributeError, RuntimeError or mujoco.FatalError
            raise UserError(
                f"MuJoCo cannot draw on this machine ({type(error).__name__}: {error}). Install libegl1 with Mesa, or libosmesa6; "
                "`python -m embodied_rl.doctor` lists the available renderers."
            ) from error
        finally:
            buffer.offheight, buffer.offwidth = before
        for flag in self._flags:
            renderer.scene.flags[flag] = 0
        if not self._renderers:
            # Runs before MuJoCo closes its display, which it registered earlier; a deleted drawing has closed itself already.
            atexit.register(_close_all, self._renderers)
            weakref.finalize(self, _close_all, self._renderers).atexit = False
        self._renderers[height, width] = renderer
        return renderer


def camera_names(model: MjModel) -> list[str]:
    """Names of the model's fixed cameras, unnamed ones left out."""
    return [name for index in range(model.ncam) if (name := model.camera(index).name)]


def _close_all(renderers: dict[tuple[int, int], Renderer]) -> None:
    while renderers:
        renderers.popitem()[1].close()


# ---- cameras of a model inside a gymnasium environment, which draws with its initial one ------------------------------


def model_cameras(env: gymnasium.Env) -> list[str]:
    """Names of the model's fixed cameras; empty if MuJoCo does not draw the environment."""
    renderer = _renderer(env)
    return [] if renderer is None else camera_names(renderer.model)


def draw_from(env: gymnasium.Env, camera: str) -> np.ndarray:
    """Picture of ``env.render()`` from one of `model_cameras`."""
    renderer = _renderer(env)
    assert renderer is not None, "it has cameras"
    before = renderer.camera_id
    renderer.camera_id = renderer.model.camera(camera).id
    try:
        return np.asarray(env.render(), np.uint8)
    finally:
        renderer.camera_id = before


def camera_in_use(env: gymnasium.Env) -> str | None:
    """Name of the camera of ``env.render()``; None: the free camera."""
    renderer = _renderer(env)
    return renderer.model.camera(renderer.camera_id).name if renderer is not None and renderer.camera_id >= 0 else None


def _renderer(env: gymnasium.Env) -> MujocoRenderer | None:
    found = (vars(layer).get("mujoco_renderer") for layer in layers_of(env))
    return next((renderer for renderer in found if renderer is not None), None)


# ---- the physical state by name ---------------------------------------------------------------------------------------


MUJOCO_PARTS = ("qpos", "qvel", "act", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat", "eq_active", "userdata")
"""Arrays of MjData that the next physics step depends on, by MuJoCo's names, without forces applied from outside."""


class MujocoPhysics:
    """``time`` [1] and the arrays of `MUJOCO_PARTS` that are not empty, each flat and in its own dtype."""

    def __init__(self, model: MjModel, data: MjData) -> None:
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
    """``state``: the array of that name with the whole state of gymnasium's classic control tasks."""

    def __init__(self, env: CartPoleEnv) -> None:
        self._env = env

    def get(self) -> dict[str, np.ndarray]:
        return {"state": np.array(self._env.state, np.float64).reshape(-1)}

    def set(self, state: Mapping[str, np.ndarray]) -> None:
        present = self._env.state
        kind = present.dtype if isinstance(present, np.ndarray) else np.dtype(np.float64)
        self._env.state = np.array(state["state"], kind).reshape(np.asarray(present).shape)


def physics_of(env: gymnasium.Env) -> MujocoPhysics | AttributeState:
    """Access to the named state of an environment that has been reset. Raises UserError if it is not found."""
    layers = layers_of(env)
    models, data = unique_held(layers, "MjModel"), unique_held(layers, "MjData")
    if len(models) == len(data) == 1:
        return MujocoPhysics(models[0], data[0])
    base = env.unwrapped
    if type(base).__module__.startswith("gymnasium.envs.classic_control.") and vars(base).get("state") is not None:
        return AttributeState(base)  # type: ignore[arg-type]
    name = env.spec.id if env.spec is not None else type(base).__name__
    raise UserError(
        f"The physical state of '{name}' cannot be read: it is neither a MuJoCo task nor one of gymnasium's classic tasks. Set "
        "states=none, or states=snapshots:1 if the task has snapshots."
    )


# ---- our simulators with their own MuJoCo model -----------------------------------------------------------------------


class DrawnSim(SimEnv):
    """Environments stepped one after the other and drawn by a `Drawing`. A subclass sets `spec` with a step limit, begins an episode
    (`_begin`), takes a step (`_advance`), observes one environment (`_observe`) and returns its drawing (`_drawn`)."""

    def __init__(self, num_envs: int, camera: str | int, render_size: int) -> None:
        self._render_camera, self._render_size = camera, render_size
        self._elapsed = [0] * num_envs

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            self._begin(i, int(seed))
            self._elapsed[i] = 0
            self._observe(i, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        limit = self.spec.max_episode_steps
        assert limit is not None, "a subclass sets it"
        for i, action in zip(env_ids, actions, strict=True):
            self._elapsed[i] += 1
            out.terminated[i], out.truncated[i] = False, self._elapsed[i] >= limit
            self._advance(i, action, out)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            self._observe(i, out)

    def render(self, env_id: int) -> np.ndarray:
        drawing, data = self._drawn(env_id)
        return drawing.frame(data, self._render_camera, self._render_size, self._render_size)

    def film_cameras(self, env_id: int) -> list[str]:
        return camera_names(self._drawn(env_id)[0].model)

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        drawing, data = self._drawn(env_id)
        return drawing.frame(data, camera, self._render_size, self._render_size)

    def _draw(self, i: int, camera: str | int, frame: np.ndarray) -> None:
        """Fill a row of the observation."""
        drawing, data = self._drawn(i)
        drawing.frame(data, camera, frame.shape[0], frame.shape[1], out=frame)

    def _drawn(self, i: int) -> tuple[Drawing, MjData]:
        """Drawing of one environment, and its state."""
        raise NotImplementedError

    def _begin(self, i: int, seed: int) -> None:
        """Start an episode."""
        raise NotImplementedError

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        """Take one control step; write reward, success and info, and the task's own end if it has one."""
        raise NotImplementedError

    def _observe(self, i: int, out: StepBuffers) -> None:
        """Write the observation of one environment."""
        raise NotImplementedError


class MujocoSim(DrawnSim):
    """Environments that share one MjModel and one drawing context, each with its own MjData. A subclass may override what an episode
    consists of (`_saved`, `_take_up`)."""

    def __init__(self, model: MjModel, data: Sequence[MjData], drawing: Drawing, camera: str | int, render_size: int) -> None:
        super().__init__(len(data), camera, render_size)
        self.model, self.data, self._drawing = model, list(data), drawing

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        return MujocoPhysics(self.model, self.data[env_id]).get()

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        MujocoPhysics(self.model, self.data[env_id]).set(state)

    def close(self) -> None:
        self._drawing.close()

    def _drawn(self, i: int) -> tuple[Drawing, MjData]:
        return self._drawing, self.data[i]

    def _saved(self, env_id: int) -> dict[str, Any]:
        """MuJoCo's integration state (positions, velocities, activations, warm start, controls, applied forces, mocap poses) and the
        elapsed steps, the whole state of most tasks."""
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data[env_id], state, kind)
        return {"state": state, "elapsed": self._elapsed[env_id]}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        """Restore what `_saved` returns, and derive everything else in the MjData, since the next step may need it."""
        import mujoco

        kind, data = mujoco.mjtState.mjSTATE_INTEGRATION, self.data[env_id]
        if "data" in saved:  # PixelReach and PixelTasks in older recordings and checkpoints
            DataState(data).restore(saved["data"])
        else:
            mujoco.mj_setState(self.model, data, saved["state"], kind)
            mujoco.mj_forward(self.model, data)
            # mj_forward leaves its own solution as the next warm start; the uninterrupted run would use the saved one.
            mujoco.mj_setState(self.model, data, saved["state"], kind)
        self._elapsed[env_id] = saved["elapsed"]
