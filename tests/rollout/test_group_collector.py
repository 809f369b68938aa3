"""Groups of whole episodes, played by real simulator processes."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from embodied_rl.config import GroupsConfig
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import GroupQueue, group_seed
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeGroup

COUNTING = "tests.sim.toy:CountingSim"


def make(
    slots: int = 4, workers: int = 2, length: int = 5, *, min_ready: int | None = None, target: str = COUNTING, **queue
) -> GroupCollector:
    task = "CartPole-v1" if "gymnasium" in target else None
    factory = SimFactory(target, task, kwargs={} if task else {"length": length})
    manager = EnvManager(factory, slots, num_workers=workers, autoreset=False)
    config = GroupsConfig(**{"group_size": 2, "groups_per_step": 3, **queue})
    groups = GroupQueue(config, seed=7, domains=DomainMixture.single("count"))
    return GroupCollector(manager, RandomGenerator(manager.spec), groups, seed=7, min_ready=min_ready)


def collect(collector: GroupCollector, batches: int) -> list[list[EpisodeGroup]]:
    made = []
    with collector.manager:
        for version in range(batches):
            made.append(collector.next_groups(version))
            collector.generator.publish(version + 1)
            collector.queue.published(version + 1)
        counts = collector.queue.counts()
        assert counts.admitted == counts.consumed + counts.filtered + counts.stale + counts.failed + counts.in_flight
    return made


def test_episodes_hold_what_was_seen_done_and_given() -> None:
    (groups,) = collect(make(), 1)
    assert [group.number for group in groups] == [0, 1, 2]
    for group in groups:
        assert group.seed == group_seed(7, "count", group.number)
        for episode in group.episodes:
            assert episode.num_messages == 5
            assert episode.terminated
            # CountingSim: observation [seed, steps, sum of actions so far], reward = action, which spans ±10 where the policy's is ±1.
            np.testing.assert_array_equal(episode.observation["state"][:, 0], group.seed)
            np.testing.assert_array_equal(episode.observation["state"][:, 1], range(5))
            np.testing.assert_allclose(episode.reward, 10 * episode.action[:, 0], atol=1e-5)
            np.testing.assert_allclose(episode.observation["state"][1:, 2], np.cumsum(episode.reward)[:-1], atol=1e-5)
            np.testing.assert_allclose(episode.final_observation["state"], [group.seed, 5, episode.reward.sum()], rtol=1e-5)
            np.testing.assert_allclose(episode.log_prob, np.log(0.5), rtol=1e-6)
            assert episode.success == bool((np.cumsum(episode.reward) >= 3).any())
        assert (group.episodes[0].action != group.episodes[1].action).all()


def content(batches: list[list[EpisodeGroup]]) -> list:
    return [
        (group.number, [(episode.action.tolist(), episode.reward.tolist(), episode.seed) for episode in group.episodes])
        for groups in batches
        for group in groups
    ]


@pytest.mark.parametrize("target", [COUNTING, "embodied_rl.sim.robots.gymnasium:make"])
def test_the_same_seed_gives_the_same_groups_whatever_the_slots_and_workers(target: str) -> None:
    reference = content(collect(make(4, 1, target=target), 3))
    for slots, workers, min_ready in ((4, 2, None), (2, 1, None), (9, 2, 1)):
        assert content(collect(make(slots, workers, target=target, min_ready=min_ready), 3)) == reference


def test_a_killed_worker_changes_no_group() -> None:
    reference = content(collect(make(length=40), 2))
    collector = make(length=40)
    os.kill(collector.manager.worker_pids()[0], signal.SIGKILL)
    assert content(collect(collector, 2)) == reference


def test_redundant_episodes_are_stopped_when_their_group_is_complete() -> None:
    collector = make(8, redundancy=2, group_size=2, groups_per_step=2, target="embodied_rl.sim.robots.gymnasium:make")
    with collector.manager:
        (first, second) = collector.next_groups(0)
        # Of four CartPole episodes the two that fall first win; the others are given up while they stand.
        assert first.num_episodes == second.num_episodes == 2
        counts = collector.queue.episode_counts()
        assert counts.accepted >= 4
        assert counts.add_up


def test_asynchronous_collection_keeps_within_the_staleness() -> None:
    collector = make(6, max_staleness=2, min_ready=1, target="embodied_rl.sim.robots.gymnasium:make")
    with collector.manager:
        ages = []
        for version in range(8):
            groups = collector.next_groups(version)
            ages += [group.age(version) for group in groups]
            collector.generator.publish(version + 1)
            collector.queue.published(version + 1)
        assert max(ages) <= 2
        assert len(ages) == 24


def test_a_restart_in_the_middle_forgets_what_was_in_flight() -> None:
    """As an evaluation or a resume does, with episodes of the next batches running: they are asked for again, from another queue."""
    collector = make(6, max_staleness=2, min_ready=1, length=30, overtaking="never")  # else arrival decides which groups make a batch
    with collector.manager:
        first = collector.next_groups(0)
        for reset_in_between in (False, True):
            if reset_in_between:
                collector.manager.reset()
            state = collector.queue.state_dict()
            queue = GroupQueue(collector.queue.config, seed=7, domains=DomainMixture.single("count"))
            queue.load_state_dict(state)
            collector.restart(queue)
            again = collector.next_groups(0)
        # The batch was not published, so that it is played again: the same seeds and noise give the same episodes.
        assert content([again]) == content([first])
