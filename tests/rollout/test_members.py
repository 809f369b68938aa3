"""What a group that is not complete yet can still become."""

from __future__ import annotations

from embodied_rl.config import GroupsConfig
from embodied_rl.rollout.groups import OpenGroup
from tests.rollout.samples import answer, episode


def opened(*versions: int) -> OpenGroup:
    """Members 0, 1, … that were handed out with these versions."""
    group = OpenGroup(number=4, domain="only", seed=0, created_version=versions[0])
    for member, version in enumerate(versions):
        group.start(member, 0, version, now_s=0.0)
    return group


def test_members_that_are_needed_decide_whether_it_can_be_young() -> None:
    # Two of three rollouts are needed. One old one can be left out, two cannot; nor can one when another member is lost.
    config = GroupsConfig(group_size=2, groups_per_step=1, redundancy=1)
    assert not opened(1, 3, 3).cannot_be_as_young_as(3, config)
    assert opened(1, 1, 3).cannot_be_as_young_as(3, config)
    assert opened(1, 1, 3).cannot_be_as_young_as(2, config)
    assert not opened(1, 1, 3).cannot_be_as_young_as(1, config)
    with_a_loss = opened(1, 3)
    with_a_loss.num_lost = 1
    assert with_a_loss.cannot_be_as_young_as(3, config)
    # Members not handed out yet will be young.
    assert not opened(1).cannot_be_as_young_as(3, config)


def test_an_old_greedy_member_cannot_be_left_out() -> None:
    config = GroupsConfig(group_size=2, groups_per_step=1, redundancy=2)
    group = OpenGroup(number=4, domain="only", seed=0, created_version=1, greedy=True)
    for member, version in enumerate((1, 3, 3)):
        group.start(member, 0, version, now_s=0.0)
    assert group.cannot_be_as_young_as(3, config)
    assert not group.cannot_be_as_young_as(1, config)


def test_an_accepted_episode_counts_with_its_oldest_token() -> None:
    config = GroupsConfig(group_size=2, groups_per_step=1)
    group = opened(3, 3)
    group.accept(0, episode(versions=(3, 2, 4)))
    assert group.cannot_be_as_young_as(3, config)
    assert not group.cannot_be_as_young_as(2, config)


def test_oldest_version_that_it_may_carry() -> None:
    group = opened(5, 3)
    assert group.oldest_version(6) == 3
    group.accept(1, episode(versions=(4, 6)))
    assert group.oldest_version(6) == 4
    group.accept(0, episode(versions=(6, 2)))
    assert group.oldest_version(6) == 2
    assert OpenGroup(0, "only", 0, created_version=1).oldest_version(6) == 6, "nothing was begun"


def test_episodes_are_ordered_by_member_not_by_arrival() -> None:
    group = opened(0, 0, 0)
    running = [attempt.assignment for attempt in group.running.values()]
    for member in (2, 0):
        group.accept(member, answer(running[member], float(member)))
    complete = group.complete()
    assert complete.scores.tolist() == [0.0, 2.0]
    assert (complete.number, complete.created_version, complete.seed) == (4, 0, 0)
