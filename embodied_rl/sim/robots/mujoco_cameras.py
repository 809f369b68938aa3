"""The cameras of a MuJoCo model inside a gymnasium environment, which draws with the one it was made with."""

from __future__ import annotations

from typing import Any

import gymnasium

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.sim.robots.saved_state import layers_of


def model_cameras(env: gymnasium.Env) -> list[str]:
    """Names of the model's fixed cameras, those without one left out; empty where the environment is not drawn by MuJoCo."""
    renderer = _renderer(env)
    if renderer is None:
        return []
    names = (renderer.model.camera(index).name for index in range(renderer.model.ncam))
    return [name for name in names if name]


def draw_from(env: gymnasium.Env, camera: str) -> Any:
    """What ``env.render()`` gives with another camera. Raises UserError for a camera that there is not."""
    require_camera(camera, model_cameras(env))
    renderer: Any = _renderer(env)
    before = renderer.camera_id
    renderer.camera_id = renderer.model.camera(camera).id
    try:
        return env.render()
    finally:
        renderer.camera_id = before


def camera_in_use(env: gymnasium.Env) -> str | None:
    """Name of the camera that ``env.render()`` draws with; None: the free one."""
    renderer = _renderer(env)
    return renderer.model.camera(renderer.camera_id).name if renderer is not None and renderer.camera_id >= 0 else None


def require_camera(camera: str, known: list[str]) -> None:
    """Raises UserError with the nearest name where `camera` is not among `known`."""
    if camera not in known:
        raise UserError(f"Camera '{camera}' is not known.{did_you_mean(camera, ['default', *known])}")


def _renderer(env: gymnasium.Env) -> Any:
    found = (getattr(layer, "mujoco_renderer", None) for layer in layers_of(env))
    return next((renderer for renderer in found if renderer is not None), None)
