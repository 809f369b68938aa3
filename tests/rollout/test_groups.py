"""The group queue transition by transition; schedules at random are in test_groups_random.py, latencies in test_groups_throughput.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from embodied_rl.algorithms.filters import mean_score, zero_variance
from embodied_rl.config import GroupsConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import Assignment, BatchNeverFullError, GroupQueue, group_seed
from embodied_rl.types import EpisodeGroup
from tests.rollout.samples import Clock, answer


def make(
    filters: Sequence[Any] = (), clock: Callable[[], float] | None = None, seed: int = 5, greedy: str = "", **settings: Any
) -> GroupQueue:
    config = GroupsConfig(**{"group_size": 2, "groups_per_step": 2, **settings})
    return GroupQueue(config, seed=seed, domains=DomainMixture.single("only"), filters=filters, greedy=[greedy], clock=clock or Clock())


def assignments(queue: GroupQueue) -> list[Assignment]:
    """All that it gives out now."""
    found = []
    while (assignment := queue.next_assignment()) is not None:
        found.append(assignment)
    return found


def test_one_synchronous_step_by_hand() -> None:
    queue = make()
    given = assignments(queue)
    assert [(a.group, a.member, a.version, a.attempt) for a in given] == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]
    assert [a.seed for a in given] == [group_seed(5, "only", 0)] * 2 + [group_seed(5, "only", 1)] * 2
    for index in (3, 0, 2):
        assert queue.finished(given[index], answer(given[index], float(index)))
    assert queue.take(0) is None, "group 0 is not complete"
    queue.finished(given[1], answer(given[1], 1.0))
    batch = queue.take(0)
    assert batch is not None
    assert [(group.number, group.scores.tolist()) for group in batch] == [(0, [0.0, 1.0]), (1, [2.0, 3.0])]
    assert queue.next_assignment() is None, "places are held until publication"
    queue.published(1)
    assert [(a.group, a.version) for a in assignments(queue)] == [(2, 1), (2, 1), (3, 1), (3, 1)]
    counts = queue.counts()
    assert (counts.admitted, counts.consumed, counts.in_flight) == (4, 2, 2)
    assert (queue.lengths()["held"], queue.domain_counts()["only"].consumed, queue.episode_counts().running) == (2, 2, 4)


def test_first_finished_win_and_the_late_are_stopped() -> None:
    queue = make(groups_per_step=1, redundancy=2)
    given = assignments(queue)
    assert len(given) == 4
    assert queue.finished(given[3], answer(given[3], 3.0))
    assert not any(queue.should_stop(a) for a in given[:3])
    assert queue.should_stop(given[3]), "handed in"
    assert queue.finished(given[1], answer(given[1], 1.0))
    assert all(queue.should_stop(a) for a in given)
    assert not queue.finished(given[0], answer(given[0], 100.0)), "too late"
    queue.failed(given[2], "stopped by the collector")
    (group,) = queue.take(0) or []
    assert group.scores.tolist() == [1.0, 3.0]
    episodes = queue.episode_counts()
    assert (episodes.started, episodes.accepted, episodes.abandoned, episodes.failed, episodes.running) == (4, 2, 2, 0, 0)


def test_a_greedy_member_is_one_of_its_group_whichever_others_finish_first() -> None:
    queue = make(groups_per_step=1, group_size=3, redundancy=2, max_retries=1, greedy="only")
    given = [queue.next_assignment() for _ in range(4)]
    assert [a is not None and a.greedy for a in given] == [True, False, False, False]
    zero, one, two, three = (a for a in given if a is not None)
    assert queue.finished(two, answer(two, 2.0))
    assert not queue.should_stop(one), "there is a place beside that of the greedy one"
    assert queue.finished(three, answer(three, 3.0))
    assert queue.should_stop(one)
    assert not queue.finished(one, answer(one, 1.0))
    assert not queue.should_stop(zero)
    queue.failed(zero, "died")
    (again,) = assignments(queue)
    assert (again.member, again.attempt, again.greedy) == (0, 1, True), "member 4 is needed no more, and was not begun"
    assert queue.finished(again, answer(again, 0.0))
    (group,) = queue.take(0) or []
    assert group.scores.tolist() == [0.0, 2.0, 3.0]
    episodes = queue.episode_counts()
    assert (episodes.started, episodes.accepted, episodes.abandoned, episodes.failed, episodes.running) == (5, 3, 1, 1, 0)


def test_a_group_without_its_greedy_member_fails_whatever_else_there_is() -> None:
    queue = make(groups_per_step=1, redundancy=2, max_retries=0, greedy="only")
    zero, one, *_ = assignments(queue)
    assert queue.finished(one, answer(one))
    queue.failed(zero, "died")
    assert queue.counts().failed == 1
    assert "1 × group failed: its greedy member lost" in queue.describe()


def test_filtered_groups_are_replaced_at_once() -> None:
    queue = make([zero_variance()], groups_per_step=1)
    for number in range(3):
        given = assignments(queue)
        assert [a.group for a in given] == [number, number]
        for a in given:
            queue.finished(a, answer(a, float(a.member) if number == 2 else 1.0))
    (group,) = queue.take(0) or []
    assert group.number == 2
    counts = queue.counts()
    assert (counts.admitted, counts.filtered, counts.consumed) == (3, 2, 1)


def test_too_many_rejected_groups_stop_the_run_with_the_counts() -> None:
    queue = make([zero_variance(), mean_score(minimum=0.6)], groups_per_step=1, max_rejected_per_step=2)
    with pytest.raises(BatchNeverFullError) as caught:  # noqa: PT012
        for scores in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)):
            for a, score in zip(assignments(queue), scores, strict=True):
                queue.finished(a, answer(a, score))
    message = str(caught.value)
    assert "3 groups were rejected since the last batch, more than algorithm.groups.max_rejected_per_step allows (2)" in message
    assert "admitted 3 = consumed 0 + filtered 3 + stale 0 + failed 0 + in flight 0" in message
    assert "2 × group filtered: zero_variance; 1 × group filtered: mean_score" in message
    with pytest.raises(BatchNeverFullError):
        queue.take(0)


def test_the_limit_counts_from_the_last_batch() -> None:
    queue = make([zero_variance()], groups_per_step=1, max_rejected_per_step=1)
    for version in range(4):
        for equal in (True, False):
            for a in assignments(queue):
                queue.finished(a, answer(a, 0.0 if equal else float(a.member)))
        assert queue.take(version) is not None
        queue.published(version + 1)
    assert queue.counts().filtered == 4


def test_failed_episodes_are_begun_again_and_then_the_group_fails() -> None:
    queue = make(groups_per_step=1, max_retries=1)
    first, second = assignments(queue)
    queue.finished(first, answer(first))
    queue.failed(second, "worker died\nwith a long traceback")
    assert queue.should_stop(second)
    (again,) = assignments(queue)
    assert (again.group, again.member, again.attempt, again.seed) == (0, 1, 1, second.seed)
    assert not queue.finished(second, answer(second)), "the first attempt was given up"
    queue.failed(again, "worker died")
    counts = queue.counts()
    assert (counts.failed, counts.in_flight) == (1, 0)
    assert "2 × episode failed: worker died" in queue.describe()
    assert [a.group for a in assignments(queue)] == [1, 1], "a new group takes its place"


def test_redundancy_makes_up_for_lost_members() -> None:
    queue = make(groups_per_step=1, redundancy=1, max_retries=0)
    given = assignments(queue)
    queue.failed(given[0], "died")
    assert queue.counts().failed == 0
    for a in given[1:]:
        queue.finished(a, answer(a))
    assert queue.take(0) is not None


def test_nan_is_a_failure_of_the_episode() -> None:
    queue = make(groups_per_step=1)
    first, second = assignments(queue)
    assert not queue.finished(first, answer(first, float("nan")))
    assert queue.episode_counts().failed == 1
    (again,) = assignments(queue)
    assert (again.member, again.attempt) == (0, 1)
    assert queue.finished(again, answer(again, 1.0))
    assert queue.finished(second, answer(second, 0.0))


def test_mixed_up_episodes_are_refused() -> None:
    queue = make()
    given = assignments(queue)
    with pytest.raises(ValueError, match="episodes were mixed up"):
        queue.finished(given[0], answer(given[2]))


def test_timeouts_of_steps_and_episodes() -> None:
    clock = Clock()
    queue = make(clock=clock, groups_per_step=1, group_size=3, step_timeout_s=10.0, episode_timeout_s=25.0, max_retries=1)
    slow, silent, healthy = assignments(queue)
    for now_s in (4.0, 8.0, 12.0, 16.0, 20.0, 24.0):
        clock.now_s = now_s
        queue.progressed(slow)
        queue.progressed(healthy)
        if now_s == 16.0:
            queue.finished(healthy, answer(healthy))
        assert queue.tick() == ([silent] if now_s == 12.0 else [])
    clock.now_s = 25.0
    assert queue.tick() == [], "exactly the limit is not over it"
    clock.now_s = 25.5
    assert queue.tick() == [slow]
    assert "1 × episode timed_out: no message for 10 s" in queue.describe()
    assert "1 × episode timed_out: episode longer than 25 s" in queue.describe()
    retries = assignments(queue)
    assert [(a.member, a.attempt) for a in retries] == [(0, 1), (1, 1)]
    # Both hang again; the group dies with the first, so that the second is not given up by itself.
    for clock.now_s in (30.5, 35.5):
        assert queue.tick() == [], "exactly the limit is not over it"
    clock.now_s = 36.0
    assert queue.tick() == retries[:1]
    episodes, counts = queue.episode_counts(), queue.counts()
    assert (episodes.started, episodes.accepted, episodes.timed_out, episodes.abandoned) == (5, 1, 3, 1)
    assert (counts.failed, counts.in_flight) == (1, 0)


def test_a_time_without_a_tick_is_no_fault_of_the_episodes_nor_of_the_queue() -> None:
    """Nothing is played while an update is computed in the same process, and nothing moves while the machine stands still."""
    clock = Clock()
    queue = make(clock=clock, step_timeout_s=10.0, episode_timeout_s=40.0, batch_timeout_s=30.0)
    silent, slow, *_ = assignments(queue)
    assert queue.take(0) is None
    clock.now_s = 3600.0
    queue.progressed(slow)
    assert queue.tick() == []
    clock.now_s = 3604.0
    assert queue.tick() == []
    clock.now_s = 3606.0
    late = queue.tick()
    assert silent in late, "only half of its limit had counted"
    assert slow not in late


def test_a_trainer_that_waits_too_long_is_told_for_what() -> None:
    clock = Clock()
    queue = make(clock=clock, batch_timeout_s=100.0)
    given = assignments(queue)
    clock.now_s = 500.0
    queue.tick()  # nobody waits yet
    assert queue.take(0) is None
    clock.now_s = 550.0
    queue.tick()
    clock.now_s = 599.0
    queue.finished(given[0], answer(given[0]))
    queue.tick()
    clock.now_s = 601.0
    with pytest.raises(BatchNeverFullError, match=r"waited 101 s .* 0 groups ready of the 2 .* group 0 member 1 \(601 s\)"):
        queue.tick()


def test_age_is_measured_at_consumption_on_tokens() -> None:
    queue = make(groups_per_step=1, max_staleness=1)
    given = assignments(queue)
    old, young = given[:2], given[2:]
    # Group 0 says that a token is of version -1: two versions before the batch of version 1, one before that of version 0.
    for a in old:
        queue.finished(a, answer(a, versions=(0, -1, 0)))
    for a in young:
        queue.finished(a, answer(a))
    assert queue.counts().stale == 0
    queue.published(1)
    batch = queue.take(1)
    assert batch is not None
    assert [group.number for group in batch] == [1]
    assert batch[0].age(1) == 1
    assert queue.counts().stale == 1


def test_what_comes_in_too_old_after_a_publication_is_not_consumed() -> None:
    # Begun with version 0, handed in at version 1, but with a token of version -1: too old by one when it is to be consumed.
    queue = make(groups_per_step=1, max_staleness=1)
    given = assignments(queue)
    queue.published(1)
    play(queue, [1], given)
    for a in given[:2]:
        assert queue.finished(a, answer(a, versions=(-1, 1)))
    batch = queue.take(1)
    assert batch is not None
    assert [group.number for group in batch] == [1]
    assert queue.counts().stale == 1


def play(queue: GroupQueue, groups: Sequence[int], given: Sequence[Assignment]) -> None:
    for a in given:
        if a.group in groups:
            queue.finished(a, answer(a))


def test_free_overtaking_drops_what_has_become_too_old_even_unfinished() -> None:
    queue = make(groups_per_step=1, max_staleness=1, overtaking="free")
    given = assignments(queue)
    assert sorted({a.group for a in given}) == [0, 1]
    play(queue, [1], given)
    for version in (0, 1):
        batch = queue.take(version)
        assert batch is not None
        assert batch[0].number == version + 1
        queue.published(version + 1)
        more = assignments(queue)
        play(queue, [2], more)
    # Group 0 was begun with version 0 and still runs at version 2: whatever it brings is too old.
    assert queue.counts().stale == 1
    assert all(queue.should_stop(a) for a in given if a.group == 0)


def test_bounded_overtaking_waits_instead() -> None:
    queue = make(groups_per_step=1, max_staleness=1, overtaking="bounded")
    given = assignments(queue)
    play(queue, [1], given)
    batch = queue.take(0)
    assert batch is not None
    assert batch[0].number == 1
    queue.published(1)
    more = assignments(queue)
    play(queue, [2], more)
    assert queue.take(1) is None, "group 0 has its last chance now"
    play(queue, [0], given)
    batch = queue.take(1)
    assert batch is not None
    assert batch[0].number == 0
    assert queue.counts().stale == 0


def arrivals(order_seed: int) -> list[tuple[int, list[float]]]:
    """Six synchronous steps whose episodes arrive in an order of their own; an episode's score follows from its seed and member."""
    queue = make([zero_variance()], groups_per_step=3, group_size=3, seed=1)
    shuffled = random.Random(order_seed)
    running: list[Assignment] = []
    batches: list[tuple[int, list[float]]] = []
    version = 0
    while version < 6:
        running += assignments(queue)
        if running:
            a = running.pop(shuffled.randrange(len(running)))
            queue.finished(a, answer(a, float((a.seed >> a.member) % 2)))
        batch = queue.take(version)
        if batch is not None:
            assert all(group.age(version) == 0 for group in batch)
            batches += [(group.number, group.scores.tolist()) for group in batch]
            version += 1
            queue.published(version)
    assert queue.counts().filtered > 0, "the filter had nothing to do"
    return batches


def test_synchronous_training_does_not_depend_on_the_order_of_arrival() -> None:
    first = arrivals(0)
    assert [number for number, _ in first] == sorted(number for number, _ in first)
    assert all(arrivals(order) == first for order in range(1, 6))


def test_resume_asks_for_everything_in_flight_again() -> None:
    def domains() -> DomainMixture:
        return DomainMixture({"easy": 3.0, "hard": 1.0})

    config = GroupsConfig(group_size=2, groups_per_step=1, max_staleness=2)
    queue = GroupQueue(config, seed=9, domains=domains(), filters=[zero_variance()])
    given = assignments(queue)
    seeds = {a.group: (a.domain, a.seed) for a in given}
    assert sorted(seeds) == [0, 1, 2]
    for a in given:
        if a.group != 2:
            queue.finished(a, answer(a, float(a.member)))
    assert queue.take(0) is not None
    queue.published(1)
    for a in (a for a in assignments(queue) if a.group == 3):
        queue.finished(a, answer(a, 1.0))  # filtered
    # Group 1 is ready, 2 runs, 3 was filtered.
    state = json.loads(json.dumps(queue.state_dict()))
    resumed = GroupQueue(config, seed=9, domains=domains(), filters=[zero_variance()])
    resumed.load_state_dict(state)
    assert resumed.version == 1
    counts = resumed.counts()
    assert (counts.admitted, counts.consumed, counts.filtered, counts.in_flight) == (2, 1, 1, 0)
    assert resumed.episode_counts().add_up
    again = assignments(resumed)
    assert [a.group for a in again] == [1, 1, 2, 2, 4, 4]
    assert all(seeds[a.group] == (a.domain, a.seed) for a in again if a.group in seeds)
    assert {a.version for a in again} == {1}
    for a in again:
        resumed.finished(a, answer(a, float(a.member)))
    batch = resumed.take(1)
    assert batch is not None
    assert batch[0].number == 1


def test_a_batch_that_was_not_published_is_played_again() -> None:
    queue = make(groups_per_step=1)
    play(queue, [0], assignments(queue))
    assert queue.take(0) is not None
    state = queue.state_dict()
    resumed = make(groups_per_step=1)
    resumed.load_state_dict(state)
    assert (resumed.counts().admitted, resumed.counts().consumed) == (0, 0)
    assert [a.group for a in assignments(resumed)] == [0, 0]
    assert [a.group for a in assignments(queue)] == [], "the saved queue itself goes on as it was"


def test_a_state_of_another_run_is_refused() -> None:
    state = make(seed=5).state_dict()
    with pytest.raises(IncompatibleCheckpointError, match="seed=5, this run 6"):
        make(seed=6).load_state_dict(state)
    other = GroupQueue(GroupsConfig(group_size=2, groups_per_step=2), seed=5, domains=DomainMixture.single("other"))
    with pytest.raises(IncompatibleCheckpointError, match="weights"):
        other.load_state_dict(state)


def test_wrong_order_of_calls_is_refused() -> None:
    queue = make(groups_per_step=1)
    with pytest.raises(ValueError, match=r"take\(1\), but the latest published version is 0"):
        queue.take(1)
    with pytest.raises(ValueError, match="versions must grow"):
        queue.published(0)
    play(queue, [0], assignments(queue))
    assert queue.take(0) is not None
    with pytest.raises(ValueError, match=r"Call published\(1\)"):
        queue.take(0)


def test_max_concurrent_groups_and_domains() -> None:
    config = GroupsConfig(group_size=1, groups_per_step=4, max_concurrent_groups=2)
    queue = GroupQueue(config, seed=0, domains=DomainMixture({"a": 1.0, "b": 1.0}))
    first = assignments(queue)
    assert [a.group for a in first] == [0, 1]
    play(queue, [0, 1], first)
    second = assignments(queue)
    assert [a.group for a in second] == [2, 3]
    play(queue, [2, 3], second)
    batch = queue.take(0)
    assert batch is not None
    assert sorted(group.domain for group in batch) == ["a", "a", "b", "b"]
    assert {domain: counts.consumed for domain, counts in queue.domain_counts().items()} == {"a": 2, "b": 2}


def test_a_filter_that_cannot_be_applied_is_an_error() -> None:
    queue = make([zero_variance()], group_size=1)
    (first, _) = assignments(queue)
    with pytest.raises(UserError, match="at least two episodes"):
        queue.finished(first, answer(first))


def test_filters_see_the_whole_group() -> None:
    seen: list[EpisodeGroup] = []

    def keep(group: EpisodeGroup) -> None:
        seen.append(group)

    queue = make([keep], groups_per_step=1)
    second, first = reversed(assignments(queue))
    queue.finished(first, answer(first, 2.0, metadata={"late": True}))
    queue.finished(second, answer(second, 1.0))
    np.testing.assert_array_equal(seen[0].scores, [2.0, 1.0])
    assert seen[0].created_version == 0
