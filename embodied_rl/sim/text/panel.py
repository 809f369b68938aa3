"""Pictures of text: what films show of a task that draws nothing itself."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

PAPER, INK, FAINT = (250, 249, 245), (35, 38, 45), (140, 140, 140)
_LARGEST, _SMALLEST = 22, 9
"""Pixels of a line's letters in a picture of 256: the largest that fits is taken."""
_LETTER_WIDTH, _LINE_HEIGHT = 0.6, 1.35
"""Of the fixed-width font, as shares of its size."""


def text_panel(text: str, size: int) -> np.ndarray:
    """A picture [size, size, 3] uint8 of a text, in letters as large as fit; of a longer one the end is shown, below an ellipsis.

    Lines keep their order and their spaces, so that boards stay boards; long lines are wrapped.
    """
    from PIL import Image, ImageDraw

    margin = max(4, size // 24)
    top, room = size // 9, size - size // 9 - size // 5  # strips of a film are written above and below
    width = size - 2 * margin
    scale = size / 256
    largest, smallest = max(6, round(_LARGEST * scale)), max(6, round(_SMALLEST * scale))
    lines: list[str] = []
    for height in range(largest, smallest - 1, -1):
        columns, rows = max(8, int(width / (_LETTER_WIDTH * height))), max(1, int(room / (_LINE_HEIGHT * height)))
        lines = _wrapped(text, columns)
        if len(lines) <= rows:
            break
    cut = len(lines) > rows
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
    """A fixed-width font, for boards drawn in letters: matplotlib brings one; Pillow's own where it is missing."""
    from PIL import ImageFont

    try:
        from matplotlib import get_data_path

        return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", height)
    except (ImportError, OSError):
        return ImageFont.load_default(height)
