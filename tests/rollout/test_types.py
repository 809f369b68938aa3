"""Episode and EpisodeGroup: what is derived from messages, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.types import EpisodeGroup
from tests.rollout.samples import episode, group


def test_versions_of_masked_tokens_do_not_count() -> None:
    # Two messages of three tokens; the prompt's token (version 1) and a padded one (version 0) are masked.
    made = episode(
        versions=(0, 0),
        log_prob=np.zeros((2, 3), np.float32),
        policy_version=np.array([[1, 4, 5], [5, 6, 0]]),
        mask=np.array([[False, True, True], [True, True, False]]),
    )
    assert made.oldest_version == 4


def test_versions_per_message_with_a_masked_message() -> None:
    made = episode(versions=(2, 7, 9), log_prob=np.zeros((3, 2)), mask=np.array([[False, False], [True, False], [True, True]]))
    assert made.oldest_version == 7
    nothing_counts = episode(versions=(2, 7), log_prob=np.zeros((2, 2)), mask=np.zeros((2, 2), bool))
    assert nothing_counts.oldest_version == 2


def test_steps_are_those_executed_and_returns_are_summed_in_float64() -> None:
    executed = np.array([[True, True, True], [True, False, False]])
    made = episode(versions=(0, 0), executed=executed, chunk_reward=np.zeros((2, 3)))
    assert (made.num_messages, made.num_steps) == (2, 4)
    assert episode(versions=(0, 0)).num_steps == 2
    # 2**24 + 1 is no float32: a float32 sum would lose the ones.
    big = episode(versions=(0,) * 3, reward=np.array([2**24, 1, 1], np.float32))
    assert big.episode_return == 2**24 + 2


def test_nan_matters_where_it_counts_alone() -> None:
    nan = np.array([[np.nan, 1.0]])
    assert not episode(log_prob=nan).is_finite
    assert episode(log_prob=nan, mask=np.array([[False, True]])).is_finite
    assert not episode(reward=np.array([np.inf])).is_finite


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward": np.zeros(0)}, "at least one"),
        ({"action": np.zeros((2, 1))}, "action"),
        ({"observation": {"rgb": np.zeros((3, 1))}}, r"observation\.rgb"),
        ({"log_prob": np.zeros(1)}, r"\[T, L\]"),
        ({"mask": np.ones((1, 4), bool)}, r"\[T, L\]"),
        ({"policy_version": np.zeros((1, 4), np.int64)}, r"\[T, L\]"),
        ({"executed": np.ones(1, bool)}, "executed"),
    ],
)
def test_shapes_that_do_not_agree_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        episode(**changes)


def test_group_statistics_and_age() -> None:
    made = EpisodeGroup(3, "only", 0, 1, (episode(1.0, versions=(5, 4)), episode(0.0, versions=(6,)), episode(2.0, versions=(6, 7))))
    assert made.scores.tolist() == [1.0, 0.0, 2.0]
    assert made.scores.dtype == np.float64
    assert (made.mean_score, made.num_episodes, made.num_messages) == (1.0, 3, 5)
    assert made.success_rate == pytest.approx(2 / 3)
    assert (made.oldest_version, made.age(7)) == (4, 3)


def test_mixed_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="domain 'only' and only seed 0"):
        EpisodeGroup(0, "only", 0, 0, (episode(), episode(seed=1)))
    with pytest.raises(ValueError, match="domain"):
        group([])
