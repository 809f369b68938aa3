"""Pictures to the pixel, and videos decoded again: mp4 by PyAV, GIF by PIL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from embodied_rl import video
from embodied_rl.episodes.layout import picture_column
from embodied_rl.errors import UserError
from embodied_rl.sim.instrumented import INK, text_panel
from embodied_rl.video import (
    GREEN,
    GREY,
    LONGEST_SIDE,
    add_border,
    border_width,
    fit_square,
    font_for,
    load_font,
    num_columns,
    overlay,
    play_rate,
    tile,
    write_gif,
    write_mp4,
)

GRADIENT = np.broadcast_to(np.arange(40, 168, 2, dtype=np.uint8)[None, :, None], (64, 64, 3))


def moving_square(num_frames: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """A yellow square that moves three pixels a picture over blue."""
    frames = []
    for index in range(num_frames):
        frame = np.full((height, width, 3), (20, 40, 120), np.uint8)
        x = 3 * index % (width - 16)
        frame[16:32, x : x + 16] = (230, 210, 40)
        frames.append(frame)
    return frames


def decoded_mp4(path: Path) -> tuple[list[np.ndarray], av.VideoStream]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)], stream


def decoded_gif(path: Path) -> tuple[list[np.ndarray], list[int], int | None]:
    """(pictures, how long each stays in ms, loop count: 0 for ever)."""
    frames, durations = [], []
    with Image.open(path) as image:
        loop = image.info.get("loop")
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            durations.append(image.info["duration"])
            frames.append(np.asarray(image.convert("RGB")))
    return frames, durations, loop


def error(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first.astype(int) - second.astype(int)).mean())


def test_a_wide_picture_gets_black_bars_and_keeps_its_shape() -> None:
    frame = np.full((30, 60, 3), 200, np.uint8)
    square = fit_square(frame, 40)
    assert square.shape == (40, 40, 3)
    # 60 x 30 scaled by 40 / 60 is 40 x 20, with 10 black rows above and below.
    assert (square[:10] == 0).all()
    assert (square[10:30] == 200).all()
    assert (square[30:] == 0).all()
    tall = fit_square(frame.transpose(1, 0, 2).copy(), 40)
    np.testing.assert_array_equal(tall, square.transpose(1, 0, 2))
    same = np.array(GRADIENT)
    copied = fit_square(same, 64)
    np.testing.assert_array_equal(copied, same)
    assert copied is not same
    assert copied.flags.writeable


@pytest.mark.parametrize("size", [48, 64, 128, 256, 500])
def test_text_lies_in_bands_outside_the_picture(size: int) -> None:
    frame = np.full((size, size, 3), 100, np.uint8)
    written, empty = overlay(frame, "Ågjpqy|", "Ågjpqy|", "y"), overlay(frame, "", "")
    assert (frame == 100).all(), "the picture given was changed"
    assert written.shape == empty.shape
    height = (len(written) - size) // 2
    assert len(written) == size + 2 * height
    assert height < max(size // 6, 20)
    for picture in (written, empty):
        np.testing.assert_array_equal(picture[height : height + size], frame)
    changed = (written != empty).any(axis=-1)
    text = changed.copy()
    text[:, size // 2 :] = False  # without the badge
    assert text[:height].any()
    assert text[-height:].any()
    assert written[text].max() > 200, "letters should be bright"
    edges = text.copy()
    edges[1:-1, 1:-1] = False
    assert not edges.any(), "a letter touches the edge"


def test_long_text_is_cut_and_never_runs_into_the_badge() -> None:
    frame = np.full((256, 256, 3), 100, np.uint8)
    long = overlay(frame, "WIDE" * 50, "WIDE" * 50, "success", GREEN)
    short = overlay(frame, "", "", "success", GREEN)
    badge = np.flatnonzero((short[0] == GREEN).all(axis=-1))
    assert badge[-1] == 255
    assert 40 < badge.size < 100
    np.testing.assert_array_equal(long[:30, badge[0] :], short[:30, badge[0] :])
    changed = np.flatnonzero((long != short).any(axis=(0, 2)))
    assert changed[-1] < 255
    # "success" is written in white on the badge, and touches no edge.
    letters = (short[: 256 // 8] > 240).all(axis=-1)
    rows, columns = np.nonzero(letters)
    assert rows.min() > 0
    assert columns.min() > badge[0]
    assert columns.max() < 255
    # An answer of any length costs a few measurements, and no letter begins a second line.
    started = time.process_time()
    np.testing.assert_array_equal(overlay(frame, "WIDE" * 250_000, "WI\nDE\t" * 50), overlay(frame, "WIDE" * 50, "WI DE " * 50))
    assert time.process_time() - started < 1


def test_other_text_gives_another_picture() -> None:
    frame = np.zeros((128, 128, 3), np.uint8)
    pictures = {overlay(frame, top, bottom).tobytes() for top, bottom in (("a", "b"), ("b", "b"), ("a", "a"), ("a", "b"))}
    assert len(pictures) == 3


def test_a_border_lies_around_the_whole_picture() -> None:
    frame = np.array(GRADIENT)
    bordered = add_border(frame, GREEN)
    width = border_width(64)
    assert width == 2  # 2% of 64 is 1.3, and two is the least
    assert border_width(256) == 5
    inside = bordered[width:-width, width:-width]
    np.testing.assert_array_equal(inside, GRADIENT)
    outside = np.ones(bordered.shape[:2], bool)
    outside[width:-width, width:-width] = False
    assert (bordered[outside] == GREEN).all()
    np.testing.assert_array_equal(frame, GRADIENT)


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 3), (9, 3, 3), (10, 3, 4)])
def test_tiles_lie_row_by_row_and_gaps_are_black(count: int, rows: int, columns: int) -> None:
    grid = tile([np.full((6, 6, 3), 10 * (index + 1), np.uint8) for index in range(count)])
    gap = 4
    assert grid.shape == (rows * (6 + gap) - gap, columns * (6 + gap) - gap, 3)
    assert (grid[6 : 6 + gap] == 0).all()
    for place in range(rows * columns):
        y, x = place // columns * (6 + gap), place % columns * (6 + gap)
        assert (grid[y : y + 6, x : x + 6] == (10 * (place + 1) if place < count else 0)).all()


@pytest.mark.parametrize(
    ("count", "aspect", "columns"),
    [(2, 2.0, 1), (3, 2.0, 2), (4, 2.0, 2), (1, 6.0, 1), (4, 4.0, 1), (9, 0.5, 5), (4, 0.79, 2), (6, 0.75, 3)],
)
def test_wide_pictures_stand_in_fewer_columns(count: int, aspect: float, columns: int) -> None:
    # One row as wide as three squares; beyond, columns · aspect is about the number of rows.
    assert num_columns(count, aspect) == columns
    assert tile([np.zeros((4, round(4 * aspect), 3), np.uint8)] * count).shape[1] == columns * (round(4 * aspect) + 4) - 4


@pytest.mark.parametrize(
    ("num_pictures", "fps", "rate"),
    # Two seconds long where five pictures a second allow it, and never faster than asked for.
    [(5, 20, 5), (10, 20, 5), (16, 20, 8), (39, 20, 19), (40, 20, 20), (250, 20, 20), (3, 4, 4), (100, 120, 50), (1, 1, 1)],
)
def test_short_episodes_play_slowly_enough_to_follow(num_pictures: int, fps: int, rate: int) -> None:
    assert play_rate(num_pictures, fps) == rate


def test_an_mp4_decodes_to_the_same_pictures(tmp_path: Path) -> None:
    frames = moving_square(12, height=49, width=65)
    path = write_mp4(tmp_path / "new" / "folder" / "film.mp4", frames, fps=8, hold_s=1.5)
    decoded, stream = decoded_mp4(path)
    assert len(decoded) == 12 + 12  # 1.5 s at 8 pictures a second
    assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert stream.average_rate == 8
    for index, picture in enumerate(decoded):
        assert picture.shape == (48, 64, 3)  # odd sides lose one line
        assert error(picture, frames[min(index, 11)][:48, :64]) < 6
        # Nearer to its own moment than to any other: nothing is out of order.
        errors = [error(picture, frame[:48, :64]) for frame in frames]
        assert int(np.argmin(errors)) == min(index, 11)
    assert [entry.name for entry in path.parent.iterdir()] == ["film.mp4"]


def test_a_gif_decodes_to_the_same_pictures_loops_and_holds_its_end(tmp_path: Path) -> None:
    frames = moving_square(14)
    path = write_gif(tmp_path / "film.gif", frames, fps=8, hold_s=1.0)
    decoded, durations, loop = decoded_gif(path)
    assert loop == 0
    # 1000 / 8 = 125 ms, in hundredths of a second; the last one stays a second longer.
    assert durations == [120] * 13 + [1120]
    assert len(decoded) == 14
    for picture, frame in zip(decoded, frames, strict=True):
        assert error(picture, frame) < 6


def test_a_fast_gif_leaves_pictures_out_and_keeps_its_pace_and_its_end(tmp_path: Path) -> None:
    frames = moving_square(30)
    decoded, durations, _ = decoded_gif(write_gif(tmp_path / "film.gif", frames, fps=20))
    # Every second picture, 0, 2, … 28, and the last.
    assert len(decoded) == 16
    for picture, index in zip(decoded, [*range(0, 30, 2), 29], strict=True):
        assert error(picture, frames[index]) < 6
    assert sum(durations) == pytest.approx(1000 * 30 / 20, abs=100)


def test_a_small_object_keeps_its_colour_in_a_gif(tmp_path: Path) -> None:
    # Half table, half robot, both with a grain, and a blue cube of 0.2% of the pixels: what a manipulation task looks like.
    rng = np.random.default_rng(0)
    frame = np.empty((128, 128, 3), np.uint8)
    frame[:64] = rng.integers(90, 250, (64, 128, 1))
    frame[64:] = np.array([150, 80, 40]) + rng.integers(-40, 60, (64, 128, 1)) * np.array([1.5, 0.8, 0.5])
    frame[100:106, 60:66] = (30, 60, 170)
    frames = [np.roll(frame, index, axis=1) for index in range(3)]
    decoded, _, _ = decoded_gif(write_gif(tmp_path / "film.gif", frames, fps=5))
    cube = decoded[0][100:106, 60:66].astype(int)
    assert abs(cube - (30, 60, 170)).max() < 30


def test_a_gif_that_is_too_large_gets_smaller_until_it_fits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (128, 128, 3), np.uint8) for _ in range(60)]
    whole = write_gif(tmp_path / "whole.gif", frames, fps=20)
    limit = whole.stat().st_size // 3
    small = write_gif(tmp_path / "small.gif", frames, fps=20, max_bytes=limit)
    assert small.stat().st_size <= limit
    decoded, durations, _ = decoded_gif(small)
    assert len(decoded) > 10
    assert sum(durations) == pytest.approx(3000, rel=0.1)
    assert decoded[0].std() > 10
    large = write_gif(tmp_path / "large.gif", [np.zeros((64, 2048, 3), np.uint8), np.full((64, 2048, 3), 9, np.uint8)], fps=5)
    assert decoded_gif(large)[0][0].shape == (32, 1024, 3)  # nobody needs a GIF wider than 1024 pixels


@pytest.mark.parametrize("write", [write_mp4, write_gif])
def test_one_picture_is_a_video_and_a_bad_place_is_one_line(tmp_path: Path, write: Callable[..., Path]) -> None:
    suffix = "mp4" if write is write_mp4 else "gif"
    path = write(tmp_path / f"one.{suffix}", [add_border(np.array(GRADIENT), GREY)], 5)
    (picture, *_) = decoded_mp4(path)[0] if suffix == "mp4" else decoded_gif_of_one(path)
    assert error(picture, add_border(np.array(GRADIENT), GREY)) < 8
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"Cannot write '.*two\.") as caught:
        write(tmp_path / "file" / f"two.{suffix}", moving_square(2), 5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 40, 3), (16, LONGEST_SIDE + 2, 3)])
def test_sides_that_h264_does_not_take_are_refused_in_one_line(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match=rf"Pictures of {shape[1]:,} × {shape[0]} pixels cannot be an mp4"):
        write_mp4(tmp_path / "film.mp4", [np.zeros(shape, np.uint8)], 5)
    write_gif(tmp_path / "film.gif", [np.zeros(shape, np.uint8)], 5)
    assert [path.name for path in tmp_path.iterdir()] == ["film.gif"]
    assert picture_column("images.front", np.dtype(np.uint8), shape) is None  # recorded as an array


def decoded_gif_of_one(path: Path) -> list[np.ndarray]:
    with Image.open(path) as image:
        return [np.asarray(image.convert("RGB"))]


def test_letters_that_the_font_lacks_are_drawn_by_another() -> None:
    font = load_font(18)
    assert font_for("step 3   return 1.50 …", font) is font
    for text in ("pousse le cube bleu à côté", "value –"):
        other = font_for(text, font)
        nothing = bytes(other.getmask("\uffff"))
        assert all(bytes(other.getmask(letter)) != nothing for letter in set(text) - {" "}), text


def test_letters_of_an_installed_font_are_found_by_fontconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A font with one letter, a filled square, and a stand-in of fontconfig's command that names it."""
    builder_of = pytest.importorskip("fontTools.fontBuilder").FontBuilder
    pen_of = pytest.importorskip("fontTools.pens.ttGlyphPen").TTGlyphPen
    builder, pen = builder_of(1000, isTTF=True), pen_of(None)
    for step, point in enumerate(((0, 0), (0, 1000), (1000, 1000), (1000, 0))):
        (pen.moveTo if step == 0 else pen.lineTo)(point)
    pen.closePath()
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord("中"): "square"})
    builder.setupGlyf({".notdef": pen_of(None).glyph(), "square": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "square": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupPost()
    builder.save(tmp_path / "square.ttf")
    command = tmp_path / "fc-match"
    command.write_text(f"#!/bin/sh\necho $2 >> {tmp_path}/asked\nprintf '{tmp_path}/square.ttf\\n0'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for remembered in (video._font_with, video._explain_boxes):
        remembered.cache_clear()
    font = load_font(20)
    for _ in range(2):
        found = font_for("推中", font)
        assert found.path == str(tmp_path / "square.ttf")
    assert (tmp_path / "asked").read_text() == "sans:charset=4e2d 7ea2 5186\n", "once, with letters of all Chinese and Japanese fonts"
    canvas = np.zeros((30, 60, 3), np.uint8)
    with video.drawing(canvas) as draw:
        video.write_line(draw, (0, 0), "中", font, 60)
    assert (canvas[5:15, 2:18] == 255).all()
    assert (text_panel("中中", 256) == INK).all(-1).sum() > 2 * 20**2, "the largest letters are 22 pixels wide"
    with pytest.warns(UserWarning, match="Pictures show boxes for letters that no installed font has"):
        assert font_for("가", font) is video._wider_font(20)
    for remembered in (video._font_with, video._explain_boxes):
        remembered.cache_clear()
