"""ManiSkill's nested observations as our named parts: the same names for one scene on a CPU and for thousands on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from embodied_rl.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch
    from mani_skill.envs.sapien_env import BaseEnv

    Tensors: TypeAlias = torch.Tensor | Mapping[str, Any]
    """What ManiSkill calls an observation: the state, or nested dictionaries by the mode's own names."""

TEXTURES = ("rgb", "depth", "segmentation", "position", "normal", "albedo")
"""What a camera can be asked for, joined by "+" in an observation mode."""

MODES = ("state", "state_dict", "rgbd", "pointcloud", *TEXTURES)
"""Observation modes by themselves; textures, "state" and "state_dict" also combine: "rgb+segmentation+state"."""


def check_mode(task: str, obs_mode: str) -> bool:
    """Whether an observation mode needs pictures. Raises UserError for one that cannot be adapted."""
    if obs_mode in ("state", "state_dict", "rgbd", "pointcloud"):
        return obs_mode in ("rgbd", "pointcloud")
    for word in str(obs_mode).split("+"):
        if word not in (*TEXTURES, "state", "state_dict"):
            raise UserError(
                f"ManiSkill task '{task}': obs_mode='{obs_mode}' is not a choice.{did_you_mean(word, MODES)} "
                "The textures of cameras and the state combine with '+', as in rgb+segmentation+state."
            )
    return any(word in TEXTURES for word in str(obs_mode).split("+"))


def cameras(observation: Tensors) -> tuple[str, ...]:
    """Names of the cameras, in the order of the parts: the first one's parts carry no name."""
    return tuple(observation.get("sensor_data", {})) if isinstance(observation, Mapping) else ()


def named_parts(observation: Tensors) -> dict[str, torch.Tensor]:
    """Tensors [n, ...] by the names of our parts.

    ``state`` is flat: all that the task shows of the simulation where the mode has "state", else the robot's own joints and what
    the task adds to them. Of the first camera ``rgb`` [H, W, 3] uint8, ``depth`` [H, W, 1] int16 in millimetres, ``segmentation``
    [H, W, 1] int16 with the number of the object (0: background) and ``position`` [H, W, 3] int16 in millimetres; of every further
    camera ``rgb.<camera>`` and so on. A point cloud is ``pointcloud`` [P, 4] float32 (metres, and 1 where there is a surface),
    with ``pointcloud.rgb`` and ``pointcloud.segmentation``.
    """
    if not isinstance(observation, Mapping):
        return {"state": observation}
    parts: dict[str, torch.Tensor] = {}
    if "state" in observation:
        parts["state"] = observation["state"]
    else:
        from mani_skill.utils import common

        shown = {key: observation[key] for key in ("agent", "extra") if key in observation}
        parts["state"] = common.flatten_state_dict(shown, use_torch=True)
    for index, (camera, textures) in enumerate(observation.get("sensor_data", {}).items()):
        for texture, picture in textures.items():
            parts[f"{texture}.{camera}" if index else texture] = picture
    for key, points in observation.get("pointcloud", {}).items():
        parts["pointcloud" if key == "xyzw" else f"pointcloud.{key}"] = points
    return parts


@contextmanager
def observing(env: BaseEnv, observed: bool) -> Iterator[None]:
    """Around ``env.step`` or ``env.reset``: unless `observed`, no observation is made, but for one that the task's reward reads. What is
    returned in its place is not to be used.

    `env` is ManiSkill's own (`BaseEnv`), of one scene or of many.
    """
    if observed:
        yield
        return
    make = env.get_obs
    env.get_obs = lambda info=None, unflattened=False: _WhenRead(lambda: make(info, unflattened))
    env._flatten_raw_obs = lambda observation: None
    try:
        yield
    finally:
        del env.get_obs, env._flatten_raw_obs


class _WhenRead(Mapping[str, Any]):
    """An observation that is made when a part of it is asked for."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, key: str) -> Any:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def dtype_name(tensor: torch.Tensor) -> str:
    """numpy's name of a tensor's dtype: "float32" of torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def numbered_objects(env: BaseEnv) -> dict[int, str]:
    """{number in segmentation pictures: name of the object or robot link}."""
    return {int(number): str(thing.name) for number, thing in env.unwrapped.segmentation_id_map.items()}


# ---- pictures from a camera of the user's choice ----------------------------------------------------------------------


def film_cameras(env: BaseEnv) -> list[str]:
    """Names of the cameras for people, then of those that are sensors."""
    scene = env.unwrapped.scene
    return list(dict.fromkeys([*scene.human_render_cameras, *scene.sensors]))


def film_from(env: BaseEnv, camera: str) -> np.ndarray:
    """One picture [H, W, 3] uint8 of the first scene; `camera` is one of `film_cameras`."""
    base = env.unwrapped
    if camera in base.scene.human_render_cameras:
        return base.render_rgb_array(camera).cpu().numpy()[0]
    # What ManiSkill hides from sensors (the marker of a goal, say) stays hidden: the picture is what the sensor sees.
    for hidden in base._hidden_objects:
        hidden.hide_visual()
    base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
    sensor = base.scene.sensors[camera]
    sensor.capture()
    observed = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)
    return observed["rgb"].cpu().numpy()[0]
