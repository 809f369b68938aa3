"""Pictures of a MuJoCo model that a simulator of ours holds itself (no gymnasium environment in between)."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean

MAX_SHADOW_MAP = 1024
"""Pixels a side. Models ask for up to 8192; on a CPU the shadow map is then most of a frame."""


class Drawing:
    """Off-screen pictures of one MjModel. Nothing is drawn, and no graphics driver needed, before the first `frame`.

    Args:
        model: the MjModel; its shadow map is limited, its off-screen buffer grows with what is asked for.
        hidden_groups: groups of geoms left out, such as robosuite's collision shapes (group 0).
        multisampling: keep the model's; off, edges are jagged and frames come faster.
    """

    def __init__(self, model: Any, hidden_groups: tuple[int, ...] = (), multisampling: bool = False) -> None:
        import mujoco

        self._mujoco, self.model = mujoco, model
        quality = model.vis.quality
        quality.shadowsize = min(int(quality.shadowsize), MAX_SHADOW_MAP)
        if not multisampling:
            quality.offsamples = 0
        self._option = mujoco.MjvOption()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        self._renderers: dict[tuple[int, int], Any] = {}

    def cameras(self) -> list[str]:
        """Names of the model's fixed cameras."""
        return [self.model.camera(index).name for index in range(self.model.ncam)]

    def check_camera(self, camera: str) -> None:
        """Raises UserError with the nearest name where the model has no such camera."""
        if camera not in self.cameras():
            raise UserError(f"Camera '{camera}' is not known.{did_you_mean(camera, self.cameras())}")

    def frame(self, data: Any, camera: str | int = -1, height: int = 256, width: int = 256, out: np.ndarray | None = None) -> np.ndarray:
        """One picture [height, width, 3] uint8, the top row first; camera -1 is MuJoCo's free camera.

        Raises:
            UserError: this machine cannot draw off-screen.
        """
        renderer = self._renderers.get((height, width)) or self._new(height, width)
        renderer.update_scene(data, camera=camera, scene_option=self._option)
        if out is not None and not out.flags.c_contiguous:
            out[...] = renderer.render()
            return out
        return renderer.render(out=out) if out is not None else renderer.render()

    def close(self) -> None:
        while self._renderers:
            self._renderers.popitem()[1].close()

    def _new(self, height: int, width: int) -> Any:
        buffer = self.model.vis.global_
        buffer.offheight, buffer.offwidth = max(buffer.offheight, height), max(buffer.offwidth, width)
        renderer = new_renderer(self._mujoco, self.model, height, width)
        if not self._renderers:
            # Runs before MuJoCo takes its display down, which registered earlier; a drawing that is gone by then has closed itself.
            atexit.register(_close, weakref.ref(self))
            weakref.finalize(self, _close_all, self._renderers).atexit = False
        self._renderers[height, width] = renderer
        return renderer


def _close(reference: weakref.ref[Drawing]) -> None:
    drawing = reference()
    if drawing is not None:
        drawing.close()


def _close_all(renderers: dict[tuple[int, int], Any]) -> None:
    while renderers:
        renderers.popitem()[1].close()


def new_renderer(mujoco: Any, model: Any, height: int, width: int) -> Any:
    """``mujoco.Renderer``. Raises UserError where this machine cannot draw."""
    try:
        return mujoco.Renderer(model, height, width)
    except Exception as error:  # what fails without a driver differs: ImportError, AttributeError, RuntimeError, mujoco.FatalError
        raise UserError(
            f"MuJoCo cannot draw on this machine ({type(error).__name__}: {error}). Install libegl1 with Mesa, or libosmesa6; "
            "`python -m embodied_rl.doctor` says what is there."
        ) from error
