"""Which episodes are shown, against sorting by hand."""

from __future__ import annotations

import pytest

from embodied_rl.errors import UserError
from embodied_rl.media.episodes import Selection, stride_of
from embodied_rl.types import EpisodeSummary


def episode(seed: int, episode_return: float, success: bool) -> EpisodeSummary:
    return EpisodeSummary(0, 0, seed, episode_return, 10, success, success, False)


EPISODES = [episode(5, 9.0, False), episode(3, 1.0, True), episode(4, 2.0, True), episode(9, 9.0, False), episode(1, -4.0, False)]


def test_success_comes_before_return_and_the_smaller_seed_before_the_larger() -> None:
    assert Selection("best", 5, 5).ranked(EPISODES) == [2, 1, 0, 3, 4]
    assert Selection("best", 3, 5).ranked(EPISODES) == [2, 1, 0]
    # The worst begin with failures of the least return; of equal ones the smaller seed comes first again.
    assert Selection("worst", 5, 5).ranked(EPISODES) == [4, 0, 3, 1, 2]


@pytest.mark.parametrize(
    ("text", "among", "expected"),
    [
        ("first", None, ("first", 4, 4)),
        ("first:2", None, ("first", 2, 2)),
        ("best", None, ("best", 4, 16)),
        ("worst:3", None, ("worst", 3, 12)),
        ("random:3", 50, ("random", 3, 50)),
    ],
)
def test_what_is_written_and_how_many_are_played_for_it(text: str, among: int | None, expected: tuple[str, int, int]) -> None:
    selection = Selection.parse(text, None, among)
    assert (selection.kind, selection.num_shown, selection.among) == expected
    assert selection.is_known_before == (expected[0] in ("first", "random"))


def test_random_ones_follow_from_the_seed_and_are_all_met_in_time() -> None:
    selection = Selection("random", 3, 10)
    assert selection.positions(1) == selection.positions(1)
    draws = [selection.positions(seed) for seed in range(60)]
    assert all(positions == sorted(set(positions)) and len(positions) == 3 for positions in draws)
    # Each of ten is missed by one draw with probability 7/10, by sixty with 5e-10.
    assert {position for positions in draws for position in positions} == set(range(10))
    assert Selection("first", 3, 10).positions(5) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "among", "message"),
    [
        ("first", 10, "among=10 has no effect with select=first"),
        ("first:4", 10, "among=10 has no effect with select=first:4"),
        ("frist", None, "Did you mean 'first'"),
        ("best:", None, "'' is not a number"),
        ("best:-1", None, "'-1' is not a number"),
        ("best:0", None, "'0' is not a number of episodes"),
        ("best:7", 6, "between 1 and among=6"),
    ],
)
def test_an_impossible_selection_is_one_line(text: str, among: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Selection.parse(text, None, among)


def test_two_numbers_of_episodes_are_not_both_obeyed() -> None:
    assert Selection.parse("best:3", 3, None).num_shown == Selection.parse("best", 3, None).num_shown == 3
    with pytest.raises(UserError, match="select=best:2 and num_episodes=3 contradict each other"):
        Selection.parse("best:2", 3, None)


def test_pictures_that_never_fit_still_show_the_first_and_the_last_step() -> None:
    """64 episodes with two pictures of 2048 x 2048 each are 1.6 GB, more than `MAX_BYTES`."""
    assert stride_of([40] * 63 + [300], 3 * 2048**2) == 512
    assert stride_of([40, 300], 3 * 64**2) == 2
