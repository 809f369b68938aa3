"""Your own MJCF file as a simulator: MuJoCo (Todorov et al. 2012) with the model's actuators as the action.

The configuration names Python functions of (model, data) for reward and success. A process's environments share a model and a drawing
context.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean, require_known
from embodied_rl.files import assets_dir
from embodied_rl.registry import load_target
from embodied_rl.sim.factory import named
from embodied_rl.sim.robots.mujoco_model import Drawing, MujocoSim, import_mujoco
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

if TYPE_CHECKING:
    from mujoco import MjData, MjModel

STATE_PARTS = ("qpos", "qvel", "sensors", "act", "mocap")
"""Possible parts of the observation ``state``, each flat: generalised positions and velocities, sensor readings, actuator activations,
positions (3) then quaternions (4) of the mocap bodies."""


def tasks() -> list[str]:
    """Names of the package's scenes (assets/mujoco); the path of any other MJCF file is a task too."""
    return sorted(path.stem for path in (assets_dir() / "mujoco").glob("*.xml"))


class MjcfSim(MujocoSim):
    """Actions are the actuators' controls within their ``ctrlrange``; positions start at a keyframe or at ``qpos0``, with noise.

    Snapshots are exact.

    Args:
        task: path of an MJCF file, or the name of a scene of this package (see `tasks`).
        frame_skip: physics steps of one control step.
        observe: parts of the observation ``state``, in this order: see `STATE_PARTS`.
        reward: ``package.module:function`` of (model, data) → float, called after each control step with everything in
            ``data`` computed for the new state; None: no reward.
        success: as `reward`, → bool; None: the task does not define success.
        terminated: as `reward`, → bool: the task's own end.
        keyframe: name or number of the keyframe that episodes start from; None: ``qpos0`` at rest.
        reset_noise: episodes start with uniform noise in [-reset_noise, reset_noise] on every joint's position and velocity (in the
            tangent space, so that quaternions keep unit length).
        randomise: ``package.module:function`` of (model, data, rng: numpy.random.Generator) → None, called afterwards; places
            goals, say. All environments share the model, so the function must change only `data`.
        camera: also observe ``rgb`` [image_size, image_size, 3] from this camera; None: no picture.
        render_camera: camera of `render`: a name, or -1, the free camera.

    Raises:
        UserError: no such file, an MJCF error, an actuator without ``ctrlrange``, an unknown keyframe, camera or function.
        MissingExtraError: MuJoCo is not installed.
    """

    def __init__(
        self,
        num_envs: int,
        task: str,
        frame_skip: int = 5,
        max_episode_steps: int = 1000,
        observe: str | Sequence[str] = ("qpos", "qvel", "sensors"),
        reward: str | None = None,
        success: str | None = None,
        terminated: str | None = None,
        keyframe: str | int | None = None,
        reset_noise: float = 0.0,
        randomise: str | None = None,
        camera: str | None = None,
        image_size: int = 96,
        render_camera: str | int = -1,
        render_size: int = 256,
        instruction: str | None = None,
    ) -> None:
        _check_numbers(frame_skip, reset_noise)
        self._mujoco = import_mujoco("The MJCF simulator")
        model = load_model(task)
        # A diverging simulation then shows NaN, which is noticed, instead of jumping back to the start unnoticed.
        model.opt.disableflags |= self._mujoco.mjtDisableBit.mjDSBL_AUTORESET
        data = [self._mujoco.MjData(model) for _ in range(num_envs)]
        super().__init__(model, data, Drawing(model), render_camera, render_size)
        self._reward, self._success, self._terminated = _function(reward), _function(success), _function(terminated)
        self._randomise = _function(randomise)
        self._keyframe = self._keyframe_index(keyframe, task)
        self._frame_skip, self._noise = frame_skip, float(reset_noise)
        self._parts = [_state_parts(each, named(observe)) for each in data]
        self._camera = camera
        for each in (camera, render_camera):
            if each is not None:
                self._drawing.check_camera(each)
        self._signature = _signature(self._mujoco, self.model)
        parts = {"state": TensorSpec((sum(part.size for part in self._parts[0]),))} if observe else {}
        if camera is not None:
            parts["rgb"] = TensorSpec((image_size, image_size, 3), "uint8")
        self.spec = SimSpec(
            task=task,
            observation=parts,
            action=action_spec(self.model),
            max_episode_steps=int(max_episode_steps),
            control_hz=round(1.0 / (self.model.opt.timestep * self._frame_skip), 6),
            instruction=instruction,
            reports_success=success is not None,
            can_render=True,
            snapshots="exact",
        )

    def _begin(self, i: int, seed: int) -> None:
        data, rng = self.data[i], np.random.default_rng(seed)
        if self._keyframe is None:
            self._mujoco.mj_resetData(self.model, data)
        else:
            self._mujoco.mj_resetDataKeyframe(self.model, data, self._keyframe)
        if self._noise:
            self._mujoco.mj_integratePos(self.model, data.qpos, rng.uniform(-self._noise, self._noise, self.model.nv), 1.0)
            data.qvel[:] += rng.uniform(-self._noise, self._noise, self.model.nv)
        if self._randomise is not None:
            self._randomise(self.model, data, rng)
        self._mujoco.mj_forward(self.model, data)

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        model, data = self.model, self.data[i]
        data.ctrl[:] = action
        self._mujoco.mj_step(model, data, self._frame_skip)
        self._mujoco.mj_forward(model, data)  # mj_step leaves sensors and body positions one physics step behind
        out.reward[i] = 0.0 if self._reward is None else float(self._reward(model, data))
        out.success[i] = self._success is not None and bool(self._success(model, data))
        out.terminated[i] = self._terminated is not None and bool(self._terminated(model, data))
        out.info[i] = {"time_s": float(data.time)}

    def snapshot(self, env_id: int) -> bytes:
        return encode_state({"kind": "mjcf", "model": self._signature, **self._saved(env_id)})

    def restore(self, env_id: int, data: bytes) -> None:
        saved = decode_state(data)
        if not isinstance(saved, dict) or saved.get("kind") != "mjcf" or saved.get("model") != self._signature:
            raise SnapshotError(f"This snapshot was not taken from the model '{self.spec.task}' (or from another version of it).")
        self._mujoco.mj_resetData(self.model, self.data[env_id])
        self._take_up(env_id, saved)

    def _observe(self, i: int, out: StepBuffers) -> None:
        if "state" in out.observation:
            np.concatenate(self._parts[i], out=out.observation["state"][i], casting="same_kind")
        if self._camera is not None:
            self._draw(i, self._camera, out.observation["rgb"][i])

    def _keyframe_index(self, keyframe: str | int | None, task: str) -> int | None:
        names = [self.model.key(index).name or str(index) for index in range(self.model.nkey)]
        if keyframe is None or (isinstance(keyframe, int) and 0 <= keyframe < self.model.nkey):
            return keyframe
        require_known(str(keyframe), names, f"Model '{task}' has no keyframe '{keyframe}'.")
        return names.index(str(keyframe))


def _state_parts(data: MjData, observe: Sequence[str]) -> list[np.ndarray]:
    """Parts of ``state`` as views of MuJoCo's memory."""
    for name in observe:
        require_known(name, STATE_PARTS, f"'{name}' cannot be observed of an MJCF model.")
    parts = {"qpos": [data.qpos], "qvel": [data.qvel], "sensors": [data.sensordata], "act": [data.act]}
    parts["mocap"] = [data.mocap_pos.reshape(-1), data.mocap_quat.reshape(-1)]
    return [part for name in observe for part in parts[name]]


make = MjcfSim
"""`num_envs` environments of one MJCF file."""


def load_model(task: str) -> MjModel:
    """MjModel of an MJCF file or of a scene of this package.

    Raises MissingExtraError; UserError: there is no such file, or MuJoCo rejects it (the message is MuJoCo's own).
    """
    path = assets_dir() / "mujoco" / f"{task}.xml" if task in tasks() else Path(task).expanduser()
    if not path.is_file():
        raise UserError(f"'{task}' is neither an MJCF file nor a scene of this package.{did_you_mean(task, tasks())}")
    try:
        return import_mujoco("The MJCF simulator").MjModel.from_xml_path(str(path))
    except ValueError as error:
        raise UserError(f"MuJoCo cannot load '{path}': {' '.join(str(error).split())}") from error


def action_spec(model: MjModel) -> ActionSpec:
    """Controls of all actuators within their ``ctrlrange``. Raises UserError naming the actuators without one."""
    if model.nu == 0:
        raise UserError("The model has no actuator and cannot act: add an <actuator> section.")
    free = [model.actuator(index).name or f"actuator {index}" for index in range(model.nu) if not model.actuator_ctrllimited[index]]
    if free:
        raise UserError(f"These actuators have no limits: {', '.join(free)}. Give each a ctrlrange in the MJCF file.")
    return ActionSpec.continuous(model.actuator_ctrlrange[:, 0], model.actuator_ctrlrange[:, 1])


def _function(target: str | None) -> Callable[..., Any] | None:
    if target is None:
        return None
    function = load_target(target)
    if not callable(function):
        raise UserError(f"'{target}' is not a function of (model, data) but a {type(function).__name__}.")
    return function


def _check_numbers(frame_skip: int, reset_noise: float) -> None:
    if not isinstance(frame_skip, int) or frame_skip < 1:
        raise UserError(f"sim.kwargs.frame_skip must be a whole number >= 1, got {frame_skip!r}.")
    if not isinstance(reset_noise, int | float) or not 0 <= reset_noise < math.inf:
        raise UserError(f"sim.kwargs.reset_noise must be a finite number >= 0, got {reset_noise!r}.")


def _signature(mujoco: ModuleType, model: MjModel) -> str:
    """Signature that is equal for models from the same file, and different for models that differ in any number."""
    saved = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, saved)
    return hashlib.blake2b(saved.tobytes(), digest_size=16).hexdigest()
