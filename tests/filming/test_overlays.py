"""What is drawn into pictures, switched on one at a time and measured in pixels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.media.episodes import Moment
from embodied_rl.media.overlays import DEFAULT, NAMES, Bands, Overlays, add_action, annotate, normalised, parse_overlays
from embodied_rl.types import ActionSpec
from embodied_rl.video import GREEN, TextLook, overlay
from tests.filming.samples import SPEC, filmed_episode

BLUE = (88, 166, 255)
MOMENT = Moment(step=3, reward=0.25, episode_return=1.5, success=True, value=2.5, action=np.array([0.5, 5.0]))
EPISODE = filmed_episode(100, 4, True, size=256)
FRAME = EPISODE.frames[0]


def drawn(text: str, moment: Moment = MOMENT, cameras: tuple[str, ...] = (), frame: np.ndarray = FRAME) -> np.ndarray:
    return annotate(frame, EPISODE, moment, Overlays(parse_overlays(text), SPEC.action, cameras))


def test_names_can_be_chosen_one_by_one_or_together() -> None:
    assert parse_overlays("none") == frozenset()
    assert parse_overlays("all") == frozenset(NAMES)
    assert parse_overlays("default") == frozenset(DEFAULT) == {"task", "instruction", "step", "answer", "success"}
    assert parse_overlays(" default, actions ") == {*DEFAULT, "actions"}
    with pytest.raises(UserError, match=r"overlay=rewards: 'rewards' is not a choice. Did you mean 'reward'\?"):
        parse_overlays("rewards")


def test_each_overlay_writes_its_own_text_and_no_other() -> None:
    np.testing.assert_array_equal(drawn("none"), FRAME)
    np.testing.assert_array_equal(drawn("task"), overlay(FRAME, ["Toy-v0"], []))
    np.testing.assert_array_equal(drawn("instruction"), overlay(FRAME, ["push the cube"], []))
    np.testing.assert_array_equal(drawn("step"), overlay(FRAME, [], ["seed 7   step 3   return 1.50"]))
    np.testing.assert_array_equal(drawn("reward,value"), overlay(FRAME, [], ["reward 0.250   value 2.50"]))
    np.testing.assert_array_equal(drawn("success"), overlay(FRAME, [], [], "success", GREEN))
    np.testing.assert_array_equal(drawn("success", dataclasses.replace(MOMENT, success=False)), FRAME)
    unknown = dataclasses.replace(MOMENT, value=None, action=None)
    np.testing.assert_array_equal(drawn("value", unknown), overlay(FRAME, [], ["value –"]))
    np.testing.assert_array_equal(drawn("actions", unknown), add_action(FRAME, None, SPEC.action))
    assert (FRAME == 100).all(), "the episode's own picture was drawn into"


def test_a_long_instruction_takes_two_lines_and_no_more() -> None:
    long = dataclasses.replace(EPISODE, instruction="pick up the red cube and put it into the drawer that is open " * 3)
    overlays = Overlays(parse_overlays("instruction"), SPEC.action)
    picture = annotate(FRAME, long, MOMENT, overlays)
    strip = TextLook.of(FRAME).strip(2)
    np.testing.assert_array_equal(picture[strip:], FRAME)
    rows = np.flatnonzero((picture[:strip] > 200).all(axis=-1).any(axis=1))
    assert rows.max() - rows.min() > TextLook.of(FRAME).line, "there are letters in both lines"


def test_bars_stand_for_the_share_of_each_dimensions_range() -> None:
    # [-1, 1] and [0, 10]: 0.5 is half way up, 5 is the middle; -1 is all the way down, 10 all the way up.
    np.testing.assert_allclose(normalised(np.array([0.5, 5.0]), SPEC.action), [0.5, 0.0])
    np.testing.assert_allclose(normalised(np.array([-7.0, 10.0]), SPEC.action), [-1.0, 1.0])
    unbounded = ActionSpec.continuous([-np.inf, -1.0], [np.inf, 1.0])
    np.testing.assert_allclose(normalised(np.array([0.3, np.nan]), unbounded), [0.3, 0.0])

    def heights(action: list[float]) -> list[int]:
        """Signed pixels of each bar: up from the middle is positive."""
        picture = add_action(FRAME, np.array(action), SPEC.action)
        np.testing.assert_array_equal(picture[: len(FRAME)], FRAME)
        blue = (picture == BLUE).all(axis=-1)
        middle = (len(FRAME) + len(picture)) / 2
        columns = np.flatnonzero(blue.any(axis=0))
        groups = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
        found = []
        for group in groups:
            rows = np.flatnonzero(blue[:, group[0]])
            up, down = middle - rows.min(), rows.max() - middle
            found.append(round(up) if up > down else -round(down))
        return found

    full_up, full_down = heights([1.0, 0.0])
    assert full_up == pytest.approx(-full_down, abs=1)
    assert 12 < full_up < 20  # half of an eighth of 256 pixels
    half, nothing = heights([0.5, 5.0])
    assert half == pytest.approx(full_up / 2, abs=1)
    assert abs(nothing) <= 1


@pytest.mark.parametrize("count", [1, 7, 26, 64, 200])
def test_bars_of_any_number_stay_inside_the_band(count: int) -> None:
    spec = ActionSpec.continuous([-1.0] * count, [1.0] * count)
    for size in (64, 256):
        frame = np.full((size, size, 3), 100, np.uint8)
        empty, full = add_action(frame, None, spec), add_action(frame, np.ones(count), spec)
        assert empty.shape == full.shape
        rows, columns = np.nonzero((empty != full).any(axis=-1))
        assert rows.min() > size
        pad = TextLook.of(frame).pad
        assert columns.min() >= pad
        assert columns.max() < size - pad


def test_a_choice_is_one_filled_square() -> None:
    spec = ActionSpec.discrete(3)
    pictures = [add_action(FRAME, np.array([choice]), spec) for choice in range(3)]
    places = [np.flatnonzero((picture == BLUE).all(axis=-1).any(axis=0)).mean() for picture in pictures]
    assert places == sorted(places)
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    words = Overlays(parse_overlays("actions"), ActionSpec.text())
    np.testing.assert_array_equal(annotate(FRAME, EPISODE, MOMENT, words), FRAME)


def test_several_cameras_carry_their_names_below_the_strip() -> None:
    wide = np.full((256, 512, 3), 100, np.uint8)
    plain, named = drawn("task", frame=wide), drawn("task", cameras=("front", "wrist"), frame=wide)
    strip = TextLook.of(wide).strip(1)
    np.testing.assert_array_equal(named[:strip], plain[:strip])
    np.testing.assert_array_equal(named[2 * strip :], wide)
    columns = np.flatnonzero((named[strip : 2 * strip] > 200).all(axis=-1).any(axis=0))
    assert (columns < 256).any()
    assert (columns > 256).any()
    np.testing.assert_array_equal(drawn("task", cameras=("front",)), drawn("task"))


def test_tiles_of_one_film_have_one_size_and_no_band_covers_a_picture() -> None:
    talkative = dataclasses.replace(EPISODE, instruction="pick up the red cube and put it into the drawer that is open " * 3)
    overlays = Overlays(parse_overlays("all"), SPEC.action)
    bands = Bands.of([EPISODE, talkative], overlays)
    assert bands == Bands(above=3, below=2)  # the task and two lines; seed and step, reward and value
    quiet, loud = (annotate(FRAME, episode, MOMENT, overlays, bands) for episode in (EPISODE, talkative))
    assert quiet.shape == loud.shape
    top = TextLook.of(FRAME).strip(3)
    for picture in (quiet, loud):
        np.testing.assert_array_equal(picture[top : top + len(FRAME)], FRAME)
