"""Grids and duels, tile by tile."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.media.overlays import BANDS, Overlays, Pictures, Row, parse_overlays
from embodied_rl.types import ActionSpec
from embodied_rl.video import BAND, GREEN, GREY, RED, TextLook, border_width
from tests.filming.samples import filmed_episode

ACTION = ActionSpec.discrete(2)
BORDERS = Overlays(parse_overlays("success"), ACTION)
SIZE, GAP = 96, 4


def test_an_ended_tile_keeps_its_last_moment_in_a_frame_of_its_outcome() -> None:
    # Badges aside: the episode that succeeds does so in its last picture, whose badge lies in the upper right corner.
    short, long = filmed_episode(50, 1, True), filmed_episode(150, 3, False)
    pictures = Pictures([Row("", [short, long])], BORDERS, reports_success=True)
    assert len(pictures) == 4
    width, strip = border_width(SIZE), TextLook.of(short.frames[0]).strip(1)
    wide = SIZE + 2 * width
    assert pictures[0].shape == (SIZE + strip + 2 * width, 2 * wide + GAP, 3)
    for index, frame in enumerate(pictures):
        left, right = frame[:, :wide], frame[:, wide + GAP :]
        # The whole picture, to its last pixel, lies within the frame.
        assert (left[width + strip : -width, width:-width] == 50 + min(index, 1)).all()
        assert (right[width + strip : -width, width:-width] == 150 + index).all()
        for tile, colour in ((left, GREEN if index >= 1 else BAND), (right, RED if index >= 3 else BAND)):
            assert all((edge == colour).all() for edge in (tile[:width], tile[-width:], tile[:, :width], tile[:, -width:]))
    assert (Pictures([Row("", [short])], BORDERS, reports_success=False)[-1][-1] == GREY).all()
    plain = Pictures([Row("", [short])], Overlays(frozenset(), ACTION), reports_success=True)
    assert (plain[-1] == 51).all(), "without overlays there is no frame either"
    with pytest.raises(IndexError):
        plain[2]
    assert [picture[0, 0, 0] for picture in pictures[1:3]] == [GREEN[0], GREEN[0]]


def test_many_episodes_become_a_grid() -> None:
    pictures = Pictures(
        [Row("", [filmed_episode(10 * n, 1, False) for n in range(1, 7)])], Overlays(frozenset(), ACTION), reports_success=True
    )
    frame = pictures[0]
    assert frame.shape == (2 * SIZE + GAP, 3 * SIZE + 2 * GAP, 3)
    assert [int(frame[y * (SIZE + GAP) + 48, x * (SIZE + GAP) + 48, 0]) for y in range(2) for x in range(3)] == [10, 20, 30, 40, 50, 60]


def test_wide_tiles_of_several_cameras_fill_fewer_columns() -> None:
    wide = filmed_episode(10, 1, False)
    wide.frames = [np.concatenate([frame, frame], axis=1) for frame in wide.frames]
    assert Pictures([Row("", [wide] * 4)], Overlays(frozenset(), ACTION), reports_success=True)[0].shape == (
        2 * SIZE + GAP,
        4 * SIZE + GAP,
        3,
    )
    two = Overlays(frozenset(), ACTION, ("front", "wrist"))
    duel = Pictures([Row("a", [wide] * 3), Row("b", [wide] * 3)], two, reports_success=True)[0]
    assert duel.shape[1] == 4 * SIZE + GAP


@pytest.mark.parametrize(("count", "blocks", "columns"), [(1, 1, 1), (4, 1, 4), (6, 2, 4)])
def test_in_a_duel_the_same_seeds_stand_one_above_the_other(count: int, blocks: int, columns: int) -> None:
    ours, theirs = ([filmed_episode(base + 5 * n, 1, False) for n in range(count)] for base in (40, 140))
    frame = Pictures([Row("ours", ours), Row("theirs", theirs)], Overlays(frozenset(), ACTION), reports_success=True)[0]
    height, width, _ = frame.shape
    assert width == columns * (SIZE + GAP) - GAP
    band = (height // (2 * blocks)) - SIZE
    assert 8 < band < 40
    for number in range(count):
        block, column = divmod(number, columns)
        for row, base in enumerate((40, 140)):
            top = (2 * block + row) * (SIZE + band)
            assert tuple(frame[top + 1, -2]) == BANDS[row]
            tile = frame[top + band : top + band + SIZE, column * (SIZE + GAP) : column * (SIZE + GAP) + SIZE]
            assert (tile == base + 5 * number).all()
    # The names are written in white.
    assert frame[:band, :, 0].max() > 180
