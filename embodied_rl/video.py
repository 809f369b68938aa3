"""Pictures and videos: square tiles with text, grids of them, mp4 through PyAV and GIF through PIL."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.files import write_atomic, write_atomic_with

if TYPE_CHECKING:
    from PIL import Image

GREEN, RED, GREY = (46, 160, 67), (218, 54, 51), (140, 140, 140)
MAX_GIF_BYTES = 3_000_000
_TEXT, _STRIP = (255, 255, 255), (0, 0, 0, 150)
_SHORTEST_S, _SLOWEST_FPS = 2.0, 5


def fit_square(frame: np.ndarray, size: int) -> np.ndarray:
    """Scale a picture [H, W, 3] uint8 into a square [size, size, 3], keeping its shape; what is left over is black."""
    from PIL import Image

    height, width = frame.shape[:2]
    if height == width == size:
        return frame.copy()
    scale = size / max(height, width)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    canvas = Image.new("RGB", (size, size))
    canvas.paste(Image.fromarray(frame).resize(inner, Image.Resampling.LANCZOS), ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.asarray(canvas).copy()


def overlay(frame: np.ndarray, top: str, bottom: str, badge: str = "", badge_colour: tuple[int, int, int] = GREEN) -> np.ndarray:
    """Write a line into a dark strip above and below a picture [H, W, 3] uint8, and a coloured badge into the upper right corner.

    Text that is too long is cut with an ellipsis, so that it never runs out of the picture. The outermost pixels stay free of
    text, so that `add_border` covers none of it.
    """
    from PIL import Image, ImageDraw

    image = Image.fromarray(frame)
    draw: Any = ImageDraw.Draw(image, "RGBA")
    height, width = frame.shape[:2]
    font, edge, pad = _font(max(9, width // 21)), border_width(width), max(2, width // 64)
    # What the letters of the font take from top to bottom, those that reach below the line included.
    ascent, descent = font.getmetrics()
    strip, left = edge + ascent + descent + pad, edge + pad
    badge_width = math.ceil(draw.textlength(badge, font=font)) + edge + 4 * pad if badge else 0
    for text, y, text_y in ((top, 0, edge), (bottom, height - strip, height - strip + pad)):
        room = width - 2 * left - (badge_width if y == 0 else 0)
        draw.rectangle((0, y, width, y + strip - 1), fill=_STRIP)
        draw.text((left, text_y), _cut(draw, text, font, room), font=font, fill=_TEXT)
    if badge:
        draw.rectangle((width - badge_width, 0, width, strip - 1), fill=badge_colour)
        draw.text((width - badge_width + 2 * pad, edge), badge, font=font, fill=_TEXT)
    return np.asarray(image).copy()


def border_width(width: int) -> int:
    """Pixels of the border around a picture that is `width` pixels wide."""
    return max(2, round(width * 0.02))


def add_border(frame: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """A copy of a picture [H, W, 3] uint8 whose edge, `border_width` pixels, has one colour."""
    thickness = border_width(frame.shape[1])
    bordered = frame.copy()
    bordered[:thickness] = bordered[-thickness:] = colour
    bordered[:, :thickness] = bordered[:, -thickness:] = colour
    return bordered


def play_rate(num_pictures: int, fps: int) -> int:
    """Pictures a second at which `num_pictures` last about two seconds: at most `fps`, and at least five, which is still a movement."""
    return min(fps, max(_SLOWEST_FPS, int(num_pictures / _SHORTEST_S)))


def tile(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Lay pictures of one size [n × [H, W, 3]] side by side: one row up to four, else as near to a square as possible; gaps are black."""
    columns = len(frames) if len(frames) <= 4 else math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    grid = np.zeros((rows * height, columns * width, 3), np.uint8)
    for index, frame in enumerate(frames):
        y, x = index // columns * height, index % columns * width
        grid[y : y + height, x : x + width] = frame
    return grid


def write_mp4(path: Path, frames: Sequence[np.ndarray], fps: int, hold_s: float = 0.0) -> Path:
    """Write pictures [H, W, 3] uint8 as H.264 (yuv420p, which every player takes; odd sides lose one line).

    Args:
        path: where to.
        frames: at least one, all of one size.
        fps: pictures a second.
        hold_s: how long the last picture stays in addition, to the nearest picture.

    Raises:
        UserError: the file cannot be written.
    """
    import av

    height, width = (side // 2 * 2 for side in frames[0].shape[:2])

    def write(temporary: Path) -> None:
        with av.open(str(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "23", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame in [*frames, *[frames[-1]] * round(hold_s * fps)]:
                even = np.ascontiguousarray(frame[:height, :width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
            container.mux(stream.encode())

    return write_atomic_with(path, write)


def write_gif(path: Path, frames: Sequence[np.ndarray], fps: int, hold_s: float = 0.0, max_bytes: int = MAX_GIF_BYTES) -> Path:
    """Write pictures [H, W, 3] uint8 as a GIF that loops for ever; smaller, slower and with fewer colours until it fits `max_bytes`.

    Args:
        path: where to.
        frames: at least one, all of one size.
        fps: pictures a second; above 12 some are left out, so that the pace stays.
        hold_s: how long the last picture stays in addition.
        max_bytes: size aimed at.

    Raises:
        UserError: the file cannot be written.
    """
    largest = max(frames[0].shape[:2])
    width_scale, stride, colours = min(1.0, 1024 / largest), max(1, round(fps / 12)), 128
    for _ in range(8):
        data = _encode_gif(frames, fps, hold_s, width_scale, stride, colours)
        if len(data) <= max_bytes:
            break
        # Bytes go roughly with the number of pixels and of pictures.
        if stride * 6 < fps and len(frames) // stride > 20:
            stride += max(1, stride // 2)
        else:
            width_scale *= max(0.6, min(0.9, math.sqrt(max_bytes / len(data))))
            colours = max(48, colours * 3 // 4)
    return write_atomic(path, data)


def _encode_gif(frames: Sequence[np.ndarray], fps: int, hold_s: float, scale: float, stride: int, colours: int) -> bytes:
    from PIL import Image

    # The last picture shows the outcome: it is always taken.
    chosen = [*range(0, len(frames) - 1, stride), len(frames) - 1]
    size = max(1, round(frames[0].shape[1] * scale)), max(1, round(frames[0].shape[0] * scale))
    images = [Image.fromarray(frames[index]).resize(size, Image.Resampling.LANCZOS) for index in chosen]
    palette = _palette(images, colours)
    # One palette for all and no dithering: what stands still stays equal from picture to picture, and costs nothing.
    indexed = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    # GIF counts in hundredths of a second; browsers show what is faster than 20 ms at 100 ms.
    each_ms = max(20, round(1000 * stride / fps, -1))
    durations = [each_ms] * len(indexed)
    durations[-1] += round(1000 * hold_s, -1)
    buffer = io.BytesIO()
    indexed[0].save(buffer, "GIF", save_all=True, append_images=indexed[1:], duration=durations, loop=0, optimize=False, disposal=1)
    return buffer.getvalue()


def _palette(images: Sequence[Image.Image], colours: int) -> Image.Image:
    from PIL import Image

    picks = [images[index] for index in sorted({0, len(images) // 2, len(images) - 1})]
    together = Image.new("RGB", (picks[0].width, picks[0].height * len(picks)))
    for index, image in enumerate(picks):
        together.paste(image, (0, index * image.height))
    # By octree: a median cut gives its colours to the large surfaces, and paints a small blue cube as grey as the robot.
    return together.quantize(colours, method=Image.Quantize.FASTOCTREE)


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _cut(draw: Any, text: str, font: Any, room: float) -> str:
    if draw.textlength(text, font=font) <= room:
        return text
    while text and draw.textlength(f"{text}…", font=font) > room:
        text = text[:-1]
    return f"{text}…"
