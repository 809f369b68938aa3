"""Paired comparisons against pairs counted by hand."""

from __future__ import annotations

import pytest

from embodied_rl.evaluation.output import compare
from embodied_rl.types import EpisodeSummary
from tests.sample_run import make_episodes


def episodes(outcomes: dict[int, tuple[bool, bool, float, int]]) -> list[EpisodeSummary]:
    """{seed: (success once, at end, return, length)}"""
    return [EpisodeSummary(0, 0, seed, total, length, once, at_end, False) for seed, (once, at_end, total, length) in outcomes.items()]


OURS = episodes({7: (True, True, 5.0, 10), 3: (True, False, 4.0, 20), 4: (True, True, 3.0, 10), 9: (False, False, 1.0, 50)})
THEIRS = episodes({3: (True, True, 4.5, 30), 4: (False, False, 1.0, 50), 7: (False, False, 2.0, 50), 8: (True, True, 9.0, 1)})


def test_pairs_are_made_by_seed_and_counted_by_hand() -> None:
    comparison = compare(OURS, THEIRS, reports_success=True)
    # Seeds 3, 4 and 7 are in both; 8 and 9 in one alone.
    assert (comparison.num_pairs, comparison.num_unpaired) == (3, 2)
    success, at_end = comparison.success, comparison.success_at_end
    assert success is not None
    assert at_end is not None
    assert (success.both, success.only_policy, success.only_against, success.neither) == (1, 2, 0, 0)
    assert success.difference == pytest.approx(2 / 3)
    # None of two: 2 / 2².
    assert success.p_value == 0.5
    assert success.interval[0] < 2 / 3 < success.interval[1]
    assert (at_end.both, at_end.only_policy, at_end.only_against, at_end.neither) == (0, 2, 1, 0)
    assert at_end.difference == pytest.approx(1 / 3)
    # Returns differ by -0.5, 2 and 3. Of their 8 sign patterns those with a sum of at least 4.5 in size are ±(-0.5, 2, 3) and
    # ±(0.5, 2, 3): 4 of 8.
    assert comparison.return_difference == pytest.approx(1.5)
    assert comparison.return_p_value == 0.5
    # Of the 27 resamples of three, more than 2.5% are all -0.5 and all 3.
    assert comparison.return_interval == (-0.5, 3.0)
    # Lengths: 20 - 30, 10 - 50, 10 - 50.
    assert comparison.length_difference == pytest.approx(-30.0)


def test_turned_round_everything_changes_its_sign() -> None:
    there, back = compare(OURS, THEIRS, reports_success=True), compare(THEIRS, OURS, reports_success=True)
    assert there.success is not None
    assert back.success is not None
    assert back.success.difference == -there.success.difference
    assert back.success.interval == pytest.approx((-there.success.interval[1], -there.success.interval[0]))
    assert back.success.p_value == there.success.p_value
    assert back.return_difference == -there.return_difference
    assert back.return_p_value == there.return_p_value


def test_without_success_there_is_none_and_without_pairs_nothing() -> None:
    comparison = compare(OURS, THEIRS, reports_success=False)
    assert comparison.success is None
    assert comparison.success_at_end is None
    with pytest.raises(ValueError, match="no common seed"):
        compare(make_episodes([True], first_seed=1), make_episodes([True], first_seed=2), reports_success=True)
