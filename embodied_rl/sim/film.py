"""Simulators for filming, from one or several cameras, with errors that name what a machine lacks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory, SimWrapper, wrapped
from embodied_rl.types import StepBuffers

DEFAULT_CAMERA = "default"
"""Camera of `SimEnv.render`."""


def filmed(config: SimConfig, size: int, cameras: Sequence[str] = ()) -> SimConfig:
    """The same simulator, configured for pictures of about `size` pixels a side if it has the choice.

    A fault ends the filming: a driver that kills the process does so every time, and retries only delay the message.

    Args:
        cameras: names of the simulator's cameras, or "default"; empty: the default one. `render` returns their pictures one below
            the other, [cameras · H, W, 3].
    """
    shown = wrapped(config, "embodied_rl.sim.film:FilmedSim", size=size, cameras=list(cameras) or [DEFAULT_CAMERA])
    return dataclasses.replace(shown, on_fault="stop")


@contextmanager
def drawing(task: str) -> Iterator[None]:
    """Turn whatever a driver raises in the block into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # errors of OpenGL, Vulkan, GLFW and pygame share no base class
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"Task '{task}' cannot be drawn on this machine ({reason}). `python -m embodied_rl.doctor` tests each renderer and names the "
            "packages to install."
        ) from error


def picture(sim: SimEnv, env_id: int, camera: str) -> np.ndarray:
    """[H, W, 3] uint8 from one of a simulator's cameras or `DEFAULT_CAMERA`. Raises UserError for an unknown camera."""
    if camera == DEFAULT_CAMERA:
        return np.asarray(sim.render(env_id), np.uint8)
    if not sim.film_cameras(env_id):
        raise UserError(f"Task '{sim.spec.task}' has no camera '{camera}': it has only one view: set cameras=default.")
    return np.asarray(sim.film_from(env_id, camera), np.uint8)


class FilmedSim(SimWrapper):
    """Passes everything on to the simulator named by `target`; for a text task without pictures it draws the text."""

    def __init__(
        self,
        num_envs: int,
        inner: Mapping[str, Any],
        size: int,
        cameras: Sequence[str] = (DEFAULT_CAMERA,),
    ) -> None:
        super().__init__(SimFactory(**inner).make(num_envs, picture_size=size))
        # A text task without pictures is drawn as its text.
        self._shows_text = not self._sim.spec.can_render and "text" in self._sim.spec.variables
        if self._shows_text:
            self.spec = dataclasses.replace(self.spec, can_render=True)
        self._cameras, self._size = tuple(cameras), size
        self._texts = [""] * num_envs

    def render(self, env_id: int) -> np.ndarray:
        """Pictures [cameras · H, W, 3] uint8, one below the other; smaller ones are centred on black.

        Raises UserError: the task or this machine cannot draw, or the camera does not exist.
        """
        with drawing(self.spec.task):
            # Some simulators return the buffer into which they draw the next picture.
            views = [np.array(self._view(env_id, camera), np.uint8) for camera in self._cameras]
        return _stacked(views)

    def _seen(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        if self._shows_text:
            for env_id in env_ids:
                self._texts[env_id] = str(out.observation["text"][env_id])

    def _view(self, env_id: int, camera: str) -> np.ndarray:
        if camera == DEFAULT_CAMERA and self._shows_text:
            return text_panel(self._texts[env_id], self._size)
        return picture(self._sim, env_id, camera)


def _stacked(views: Sequence[np.ndarray]) -> np.ndarray:
    if len({view.shape for view in views}) == 1:
        return np.concatenate(views)
    height, width = (max(view.shape[axis] for view in views) for axis in (0, 1))
    canvas = np.zeros((len(views) * height, width, 3), np.uint8)
    for index, view in enumerate(views):
        y, x = index * height + (height - view.shape[0]) // 2, (width - view.shape[1]) // 2
        canvas[y : y + view.shape[0], x : x + view.shape[1]] = view
    return canvas


# ---- pictures of text, for films of tasks that draw nothing ---------------------------------------------------------------


PAPER, INK, FAINT = (250, 249, 245), (35, 38, 45), (140, 140, 140)
_LARGEST, _SMALLEST = 22, 9
"""Largest and smallest letter size in pixels for a picture of 256; the largest that fits is used."""
_LETTER_WIDTH, _LINE_HEIGHT = 0.6, 1.35
"""Width and line height of the fixed-width font, relative to its size."""


def text_panel(text: str, size: int) -> np.ndarray:
    """Picture [size, size, 3] uint8 of a text, in the largest letters that fit; of a longer text, the end below an ellipsis.

    Lines keep their order and their spaces, so that boards stay readable; long lines are wrapped.
    """
    from PIL import Image, ImageDraw

    margin = max(4, size // 24)
    top, room = size // 9, size - size // 9 - size // 5  # leave room for the film's strips above and below
    width = size - 2 * margin
    scale = size / 256
    largest, smallest = max(6, round(_LARGEST * scale)), max(6, round(_SMALLEST * scale))
    lines: list[str] = []
    most = 2 * int(width * room / (_LETTER_WIDTH * _LINE_HEIGHT * smallest**2))  # letters, of which no more are wrapped than can be seen
    is_long, text = len(text) > most, text[-most:]
    for height in range(largest, smallest - 1, -1):
        columns, rows = max(8, int(width / (_LETTER_WIDTH * height))), max(1, int(room / (_LINE_HEIGHT * height)))
        lines = _wrapped(text, columns)
        if len(lines) <= rows:
            break
    cut = is_long or len(lines) > rows
    shown = lines[-(rows - 1) :] if cut and rows > 1 else lines[-rows:]
    image = Image.new("RGB", (size, size), PAPER)
    draw, font = ImageDraw.Draw(image), _font(height)
    y = float(top)
    if cut:
        draw.text((margin, y), "…", fill=FAINT, font=font)
        y += _LINE_HEIGHT * height
    for line in shown:
        draw.text((margin, y), line, fill=INK, font=font)
        y += _LINE_HEIGHT * height
    return np.asarray(image, np.uint8).copy()


def _wrapped(text: str, columns: int) -> list[str]:
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines() or [""]:
        lines += textwrap.wrap(line, columns, replace_whitespace=False, drop_whitespace=len(line) > columns) or [""]
    return lines


def _font(height: int) -> Any:
    """Fixed-width font for boards drawn in letters: matplotlib's, or Pillow's if that is missing."""
    from PIL import ImageFont

    try:
        from matplotlib import get_data_path

        return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", height)
    except (ImportError, OSError):
        return ImageFont.load_default(height)
