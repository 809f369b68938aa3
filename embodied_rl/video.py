"""Pictures and videos: square tiles with text, grids of them, mp4 through PyAV and GIF through PIL."""

from __future__ import annotations

import bisect
import io
import math
import subprocess
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.errors import UserError, brief
from embodied_rl.files import write_atomic, write_atomic_with
from embodied_rl.reading import open_regular

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

GREEN, RED, GREY = (46, 160, 67), (218, 54, 51), (140, 140, 140)
MAX_GIF_BYTES = 3_000_000
MAX_DECODED_BYTES = 2**31
"""Most bytes of all pictures of a video that is read as a whole."""
_TEXT, BAND = (255, 255, 255), (24, 26, 30)
_GAP = 4
"""Pixels between tiles."""
_SQUARE = 0.5
"""Least width to height of a tile that still counts as a square: small pictures have tall bands."""
_SHORTEST_S, _SLOWEST_FPS = 2.0, 5
_MOST_LETTERS = 4_096
"""Letters of a line that are measured: no picture has room for more."""
_SAMPLES = {"CJK": "中红円", "HANGUL": "가", "HIRAGANA": "あ", "KATAKANA": "ア"}
"""{first word of a letter's Unicode name: letters that represent all of these in a search for a font}."""
_MOST_SAMPLES, _SEARCH_S = 32, 10.0
LONGEST_SIDE = 16_384
"""Longest side of an H.264 video in pixels that libx264 encodes."""


def fit_square(frame: np.ndarray, size: int) -> np.ndarray:
    """Scale a picture [H, W, 3] uint8 into a square [size, size, 3], keeping its shape; the rest is black."""
    from PIL import Image

    height, width = frame.shape[:2]
    if height == width == size:
        return frame.copy()
    scale = size / max(height, width)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    canvas = Image.new("RGB", (size, size))
    # When scaling down, both filters average over each pixel's area, and this one takes less than half as long.
    how = Image.Resampling.LANCZOS if scale > 1 else Image.Resampling.HAMMING
    canvas.paste(Image.fromarray(frame).resize(inner, how), ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.asarray(canvas).copy()


def overlay(
    frame: np.ndarray,
    top: str | Sequence[str],
    bottom: str | Sequence[str],
    badge: str = "",
    badge_colour: tuple[int, int, int] = GREEN,
    look: TextLook | None = None,
) -> np.ndarray:
    """Put a picture [H, W, 3] uint8 between a band with lines above and one below, with a coloured badge in the upper right corner.

    The bands are outside the picture and cover none of it. Text that is too long is cut with an ellipsis, so that it stays in the band.
    Without lines there is no band, unless there is a badge; an empty line makes an empty band. `look`: size of the text; None: fitting
    the picture.
    """
    height, width = frame.shape[:2]
    look = look or TextLook.of(frame)
    above, below = ([text] if isinstance(text, str) else list(text) for text in (top, bottom))
    first = look.strip(max(len(above), 1 if badge else 0))
    canvas = np.full((first + height + look.strip(len(below)), width, 3), BAND, np.uint8)
    canvas[first : first + height] = frame
    with drawing(canvas) as draw:
        badge_width = math.ceil(draw.textlength(badge, font=look.font)) + 4 * look.pad if badge else 0
        for lines, text_y in ((above, look.pad), (below, first + height + look.pad)):
            for index, text in enumerate(lines):
                room = width - 2 * look.pad - (badge_width if lines is above and index == 0 else 0)
                write_line(draw, (look.pad, text_y + index * look.line), text, look.font, room)
        if badge:
            draw.rectangle((width - badge_width, 0, width, look.pad + look.line - 1), fill=badge_colour)
            draw.text((width - badge_width + 2 * look.pad, look.pad), badge, font=look.font, fill=_TEXT)
    return canvas


@contextmanager
def drawing(canvas: np.ndarray) -> Iterator[ImageDraw]:
    """Context in which to draw into a picture [H, W, 3] uint8."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(canvas)
    yield ImageDraw.Draw(image)
    canvas[...] = np.asarray(image)


@dataclass(frozen=True)
class TextLook:
    """Size of text beside a picture, in pixels."""

    font: FreeTypeFont
    pad: int
    """Margin around text."""
    line: int
    """Distance between lines: the height of the font's letters, including those that reach below the line."""

    @staticmethod
    def of(frame: np.ndarray) -> TextLook:
        """Text size for a picture [H, W, 3], by its shorter side."""
        size = min(frame.shape[:2])
        font = load_font(max(9, size // 21))
        return TextLook(font, max(2, size // 64), sum(font.getmetrics()))

    def strip(self, num_lines: int) -> int:
        """Height of a strip of `num_lines` lines."""
        return num_lines * self.line + 2 * self.pad if num_lines else 0


def border_width(size: int) -> int:
    """Pixels of the border around a picture whose shorter side has `size` pixels."""
    return max(2, round(size * 0.02))


def add_border(frame: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Put a frame of one colour, `border_width` pixels wide, around a picture [H, W, 3] uint8: [H + 2 widths, W + 2 widths, 3]."""
    height, width = frame.shape[:2]
    thickness = border_width(min(height, width))
    bordered = np.full((height + 2 * thickness, width + 2 * thickness, 3), colour, np.uint8)
    bordered[thickness:-thickness, thickness:-thickness] = frame
    return bordered


def play_rate(num_pictures: int, fps: int) -> int:
    """Pictures per second at which `num_pictures` last about two seconds: at most `fps`, and at least five, so that it still moves."""
    return min(fps, max(_SLOWEST_FPS, int(num_pictures / _SHORTEST_S)))


def tile(frames: Sequence[np.ndarray], columns: int | None = None) -> np.ndarray:
    """Tile pictures of one size [n × [H, W, 3]], `columns` in a row, with black gaps between them.

    Without `columns`: one row up to three pictures, else as near to a square as possible.
    """
    columns = columns or num_columns(len(frames), frames[0].shape[1] / frames[0].shape[0])
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    grid = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), np.uint8)
    for index, frame in enumerate(frames):
        y, x = index // columns * (height + _GAP), index % columns * (width + _GAP)
        grid[y : y + height, x : x + width] = frame
    return grid


def num_columns(count: int, aspect: float = 1.0) -> int:
    """Columns of a grid of pictures `aspect` times as wide as high: one row up to the width of three squares, else nearly a square grid."""
    if _SQUARE < aspect <= 1:
        aspect = 1.0  # a square with its bands
    return count if count * aspect <= 3 else max(1, math.ceil(math.sqrt(count / aspect)))


def write_mp4(path: Path, frames: Sequence[np.ndarray], fps: int, hold_s: float = 0.0) -> Path:
    """Write pictures [H, W, 3] uint8 as H.264 (yuv420p, which every player takes; odd sides lose one line).

    Args:
        frames: at least one, all of one size.
        fps: pictures per second.
        hold_s: seconds that the last picture stays in addition, to the nearest picture.

    Raises UserError: the file cannot be written, or a side is too short or too long for H.264.
    """
    import av

    height, width = (side // 2 * 2 for side in frames[0].shape[:2])
    if not 0 < min(height, width) <= max(height, width) <= LONGEST_SIDE:
        sides = " × ".join(f"{side:,}" for side in frames[0].shape[1::-1])
        raise UserError(
            f"Pictures of {sides} pixels cannot be an mp4, whose sides have 2 to {LONGEST_SIDE:,} pixels. Choose another size=, fewer "
            "episodes or cameras, or format=gif."
        )

    def write(temporary: Path) -> None:
        with av.open(str(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": "23", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for index in range(len(frames) + round(hold_s * fps)):
                frame = frames[min(index, len(frames) - 1)]
                even = np.ascontiguousarray(frame[:height, :width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
            container.mux(stream.encode())

    return write_atomic_with(path, write)


def write_gif(path: Path, frames: Sequence[np.ndarray], fps: int, hold_s: float = 0.0, max_bytes: int = MAX_GIF_BYTES) -> Path:
    """Write pictures [H, W, 3] uint8 as a GIF that loops forever; smaller, slower and with fewer colours until it fits `max_bytes`.

    Args:
        frames: at least one, all of one size.
        fps: pictures per second; above 12 some are left out, so that the pace stays.
        hold_s: seconds that the last picture stays in addition.
        max_bytes: target size.

    Raises UserError: the file cannot be written.
    """
    return write_atomic(path, gif_bytes(frames, fps, hold_s, max_bytes=max_bytes))


def gif_bytes(frames: Sequence[np.ndarray], fps: int, hold_s: float = 0.0, *, max_bytes: int) -> bytes:
    """The bytes of `write_gif`."""
    largest = max(frames[0].shape[:2])
    width_scale, stride, colours = min(1.0, 1024 / largest), max(1, round(fps / 12)), 128
    for _ in range(8):
        data = _encode_gif(frames, fps, hold_s, width_scale, stride, colours)
        if len(data) <= max_bytes:
            break
        # The size is roughly proportional to the number of pixels and of pictures.
        if stride * 6 < fps and len(frames) // stride > 20:
            stride += max(1, stride // 2)
        else:
            width_scale *= max(0.6, min(0.9, math.sqrt(max_bytes / len(data))))
            colours = max(48, colours * 3 // 4)
    return data


def mp4_as_gif(path: Path, max_bytes: int = MAX_GIF_BYTES) -> bytes:
    """Convert an mp4 to a GIF of at most about `max_bytes`. Raises UserError for a file that is no video."""
    import av

    frames, size = [], 0
    try:
        open_regular(path).close()
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 20)
            for frame in container.decode(stream):
                size += 3 * frame.width * frame.height
                if size > MAX_DECODED_BYTES:
                    raise ValueError(f"its pictures take more than {MAX_DECODED_BYTES / 2**30:g} GiB; cut it, or make it smaller")
                frames.append(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, OSError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"'{path}' is not a video that can be read: {brief(error)}.") from error
    if not frames:
        raise UserError(f"'{path}' is not a video that can be read: it has no picture.")
    return gif_bytes(frames, max(1, round(rate)), max_bytes=max_bytes)


def _encode_gif(frames: Sequence[np.ndarray], fps: int, hold_s: float, scale: float, stride: int, colours: int) -> bytes:
    from PIL import Image

    # The last picture shows the outcome, so it is always included.
    chosen = [*range(0, len(frames) - 1, stride), len(frames) - 1]
    size = max(1, round(frames[0].shape[1] * scale)), max(1, round(frames[0].shape[0] * scale))
    images = [Image.fromarray(frames[index]).resize(size, Image.Resampling.LANCZOS) for index in chosen]
    palette = _palette(images, colours)
    # One palette for all and no dithering: still areas stay equal from picture to picture, and cost nothing.
    indexed = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    # GIF counts in hundredths of a second; browsers show pictures faster than 20 ms at 100 ms.
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
    # Octree, because a median cut spends its colours on large surfaces and paints a small blue cube as grey as the robot.
    return together.quantize(colours, method=Image.Quantize.FASTOCTREE)


@lru_cache(maxsize=8)
def load_font(size: int) -> FreeTypeFont:
    """The font of all text in pictures, `size` pixels high."""
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "PIL's wheels have FreeType"
    return font


def font_for(text: str, font: FreeTypeFont) -> FreeTypeFont:
    """`font`, or if it lacks one of `text`'s letters, matplotlib's, which covers more, or an installed one."""
    if text.isascii() or not _lacking(text, font):
        return font
    wider = _wider_font(round(font.size))
    return installed_font(text, wider) or wider


def installed_font(text: str, font: FreeTypeFont) -> FreeTypeFont | None:
    """An installed font for letters of `text` that `font` lacks; None: it lacks none, or no installed font has them."""
    lacking = () if text.isascii() else _lacking(text, font)
    samples = sorted({_SAMPLES.get(unicodedata.name(letter, "").partition(" ")[0], letter) for letter in lacking})
    return _font_with("".join(samples[:_MOST_SAMPLES]), round(font.size)) if samples else None


def _lacking(text: str, font: FreeTypeFont) -> list[str]:
    return [letter for letter in set(text) if letter.isprintable() and not _has_letter(font, letter)]


@lru_cache(maxsize=64)
def _font_with(letters: str, size: int) -> FreeTypeFont | None:
    """The font that fontconfig names for these letters; None, with a line the first time, if it has none of them."""
    from PIL import ImageFont

    pattern = f"sans:charset={' '.join(f'{ord(letter):x}' for letter in letters)}"
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        words = ["fc-match", "--format=%{file}\n%{index}", pattern]
        path, index = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_SEARCH_S).stdout.split("\n")
        font = ImageFont.truetype(path, size, int(index))
        if any(_has_letter(font, letter) for letter in letters):
            return font
    _explain_boxes()
    return None


@cache
def _explain_boxes() -> None:
    warnings.warn("Pictures show boxes for letters that no installed font has; Debian's fonts-noto-cjk has many.", stacklevel=2)


@lru_cache(maxsize=1024)
def _has_letter(font: FreeTypeFont, letter: str) -> bool:
    return bytes(font.getmask(letter)) != bytes(font.getmask("\uffff"))


@lru_cache(maxsize=8)
def _wider_font(size: int) -> FreeTypeFont:
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


def write_line(draw: ImageDraw, place: tuple[int, int], text: str, font: FreeTypeFont, room: float) -> None:
    """Draw `text` as one line in white, cut with an ellipsis if it takes more than `room` pixels."""
    # A line break or a tab would be drawn as a second line or as a box.
    text = "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_LETTERS])
    font = font_for(text, font)
    if draw.textlength(text, font=font) > room:
        kept = bisect.bisect_right(range(1, len(text)), room, key=lambda length: draw.textlength(f"{text[:length]}…", font=font))
        text = f"{text[:kept]}…"
    draw.text(place, text, font=font, fill=_TEXT)
