"""A simulator that is made to be filmed: from one or several cameras, with errors that say what a machine lacks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.factory import SimFactory, SimWrapper
from embodied_rl.sim.text.panel import text_panel
from embodied_rl.types import StepBuffers

DEFAULT_CAMERA = "default"
"""The camera of `SimEnv.render`."""


def filmed(config: SimConfig, size: int, cameras: Sequence[str] = ()) -> SimConfig:
    """The same simulator, made for pictures of about `size` pixels a side where it can choose.

    A fault ends the filming: a driver that kills the process does so every time, and trying again only takes longer to say so.

    Args:
        config: what to film.
        size: pixels.
        cameras: names of the simulator's cameras, or "default"; none: the default one. `render` then gives their pictures one below
            the other, [cameras · H, W, 3].
    """
    kwargs = {
        "target": config.target,
        "inner_task": config.task,
        "inner_kwargs": config.kwargs,
        "extra": config.extra,
        "size": size,
        "cameras": list(cameras) or [DEFAULT_CAMERA],
    }
    return dataclasses.replace(config, target="embodied_rl.sim.film:FilmedSim", task=None, kwargs=kwargs, on_fault="stop")


@contextmanager
def drawing(task: str) -> Iterator[None]:
    """Raises UserError for whatever a driver raises within."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # drivers fail in their own ways: OpenGL, Vulkan, GLFW and pygame share no base class
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"Task '{task}' cannot be drawn on this machine ({reason}). "
            "`python -m embodied_rl.doctor` tries every way of drawing and names the packages to install."
        ) from error


class FilmedSim(SimWrapper):
    """Passes everything on to the simulator named by `target`. For a text task without pictures it draws the text."""

    def __init__(
        self,
        num_envs: int,
        target: str,
        inner_task: str | None,
        inner_kwargs: Mapping[str, Any],
        extra: str | None,
        size: int,
        cameras: Sequence[str] = (DEFAULT_CAMERA,),
    ) -> None:
        parameters = inspect.signature(load_target(target, extra=extra)).parameters
        wanted = {"render": True, "render_size": size}
        # Simulators that must know beforehand that they will draw say so by taking these.
        drawing = {name: value for name, value in wanted.items() if name in parameters}
        super().__init__(SimFactory(target, inner_task, {**drawing, **inner_kwargs}, extra).make(num_envs))
        # A text task that draws nothing is shown as its text.
        self._shows_text = not self._sim.spec.can_render and "text" in self._sim.spec.variables
        if self._shows_text:
            self.spec = dataclasses.replace(self.spec, can_render=True)
        self._cameras, self._size = tuple(cameras), size
        self._texts = [""] * num_envs

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._sim.reset(env_ids, seeds, out, options)
        self._keep_texts(env_ids, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, out)
        self._keep_texts(env_ids, out)

    def render(self, env_id: int) -> np.ndarray:
        """Pictures [cameras · H, W, 3] uint8, one below the other; of several sizes, the smaller ones in the middle of black.

        Raises:
            UserError: the task or this machine cannot draw, or there is no such camera.
        """
        with drawing(self.spec.task):
            # Some simulators hand out the buffer that they draw the next picture into.
            views = [np.array(self._view(env_id, camera), np.uint8) for camera in self._cameras]
        return _stacked(views)

    def _keep_texts(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        if self._shows_text:
            for env_id in env_ids:
                self._texts[env_id] = str(out.observation["text"][env_id])

    def _view(self, env_id: int, camera: str) -> np.ndarray:
        if camera == DEFAULT_CAMERA:
            if self._shows_text:
                return text_panel(self._texts[env_id], self._size)
            return self._sim.render(env_id)
        if not self._sim.film_cameras(env_id):
            raise UserError(f"Task '{self.spec.task}' has no camera '{camera}': it is drawn one way only, which is cameras=default.")
        return self._sim.film_from(env_id, camera)


def _stacked(views: Sequence[np.ndarray]) -> np.ndarray:
    if len({view.shape for view in views}) == 1:
        return np.concatenate(views)
    height, width = (max(view.shape[axis] for view in views) for axis in (0, 1))
    canvas = np.zeros((len(views) * height, width, 3), np.uint8)
    for index, view in enumerate(views):
        y, x = index * height + (height - view.shape[0]) // 2, (width - view.shape[1]) // 2
        canvas[y : y + view.shape[0], x : x + view.shape[1]] = view
    return canvas
