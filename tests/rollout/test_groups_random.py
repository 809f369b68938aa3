"""The group queue under random schedules of arrivals, failures, delays, publications and resumes."""

from __future__ import annotations

import json
import random

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from embodied_rl.algorithms.filters import zero_variance
from embodied_rl.config import GroupsConfig
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import Assignment, GroupQueue, group_seed
from embodied_rl.types import Episode, EpisodeGroup
from tests.rollout.samples import Clock, answer

WEIGHTS = {"a": 2.0, "b": 1.0}
SEED = 3
OVER_S = 1000.0

configs = st.builds(
    GroupsConfig,
    group_size=st.integers(2, 3),
    groups_per_step=st.integers(1, 3),
    redundancy=st.sampled_from([0, 0, 1, 2]),
    max_staleness=st.integers(0, 3),
    overtaking=st.sampled_from(["never", "bounded", "free"]),
    max_concurrent_groups=st.sampled_from([None, None, 2, 4]),
    max_retries=st.integers(0, 2),
    max_rejected_per_step=st.just(10**6),
    episode_timeout_s=st.none() | st.just(OVER_S - 1),
)


class Schedules(RuleBasedStateMachine):
    """An independent account of what was handed out and what came back, held against the queue's."""

    @initialize(config=configs, lag=st.sampled_from([0, 0, 1]), greedy=st.sampled_from(["", "", "a", "ab"]))
    def begin(self, config: GroupsConfig, lag: int, greedy: str) -> None:
        """`lag`: how much older than promised tokens may be (weights that arrive late at the generator)."""
        self.greedy = greedy
        self.config = config
        self.lag = lag
        self.clock = Clock()
        self.queue = self.new_queue()
        self.version = 0
        self.running: list[Assignment] = []
        self.void: list[Assignment] = []
        self.batch: list[EpisodeGroup] = []
        self.consumed: list[int] = []
        self.seen: set[int] = set()
        self.used: dict[int, Episode] = {}  # by identity; kept alive, so that an id means one episode

    def new_queue(self) -> GroupQueue:
        return GroupQueue(
            self.config, seed=SEED, domains=DomainMixture(WEIGHTS), filters=[zero_variance()], greedy=self.greedy, clock=self.clock
        )

    # --- what can happen ---------------------------------------------------------------------------------------------

    @rule(most=st.sampled_from([1, 5, 1000]))
    def start(self, most: int) -> None:
        mixture = DomainMixture(WEIGHTS)
        for _ in range(most):
            given = self.queue.next_assignment()
            if given is None:
                return
            assert given.version == self.version
            assert given.seed == group_seed(SEED, given.domain, given.group)
            assert given.domain == mixture.domain_of(given.group)
            assert 0 <= given.member < self.config.rollouts_per_group
            assert given.greedy == (given.domain in self.greedy and given.member == 0)
            same = [a for a in self.running if (a.group, a.member) == (given.group, given.member) and not self.queue.should_stop(a)]
            assert not same, "a member is played twice at a time"
            self.running.append(given)
            self.seen.add(given.group)

    @precondition(lambda self: self.running)
    @rule(order=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 1.0]), equal=st.sampled_from([0.0, 0.3]))
    def finish(self, order: int, share: float, equal: float) -> None:
        """One running episode, some or all of them come back, in a random order, but those of every third group late, which tempts
        others to overtake them; some groups have equal scores."""
        draw = random.Random(order)
        self.running.sort(key=lambda given: draw.random() + (given.group % 3 == 0), reverse=True)
        for _ in range(max(1, int(share * len(self.running)))):
            given = self.pick(-1)
            needed = not self.queue.should_stop(given)
            score = 0.0 if random.Random(given.group).random() < equal else float(given.member)
            oldest = given.version - draw.randint(0, self.lag)
            episode = answer(given, score, versions=(draw.randint(given.version, self.version), oldest))
            assert self.queue.finished(given, episode) == needed
            assert self.queue.should_stop(given)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 10**6))
    def fail(self, which: int) -> None:
        self.queue.failed(self.pick(which % len(self.running)), "made to fail")

    @precondition(lambda self: self.void)
    @rule(which=st.integers(0, 10**6), dead=st.booleans())
    def come_back_from_the_dead(self, which: int, dead: bool) -> None:
        """What was handed in, given up or not needed any more changes nothing, whatever is reported of it."""
        given = self.void[which % len(self.void)]
        before = (self.queue.counts(), self.queue.episode_counts())
        if dead:
            self.queue.failed(given, "again")
        else:
            assert not self.queue.finished(given, answer(given))
        assert (self.queue.counts(), self.queue.episode_counts()) == before

    @rule(seconds=st.sampled_from([1.0, OVER_S]))
    def time_passes(self, seconds: float) -> None:
        late: list[Assignment] = []
        for _ in range(3):  # of a longer time between two ticks only half of the limit counts
            self.clock.now_s += seconds / 3
            late += self.queue.tick()
        for given in late:
            assert self.config.episode_timeout_s is not None
            assert seconds == OVER_S or self.clock.now_s > self.config.episode_timeout_s
            assert self.queue.should_stop(given)

    @precondition(lambda self: not self.batch)
    @rule()
    def take(self) -> None:
        batch = self.queue.take(self.version)
        if batch is None:
            return
        self.batch = batch
        numbers = [group.number for group in batch]
        assert len(batch) == self.config.groups_per_step
        assert numbers == sorted(set(numbers))
        if self.config.max_staleness == 0 or self.config.overtaking == "never":
            assert numbers == sorted(self.numbers_in_flight())[: len(numbers)], "not in the order of their numbers"
        for group in batch:
            assert group.number not in self.consumed
            assert group.num_episodes == self.config.group_size
            assert group.age(self.version) <= self.config.max_staleness
            assert zero_variance()(group) is None
            assert group.domain not in self.greedy or group.scores[0] == 0.0, "member 0, whose score is its number, is missing"
            for episode in group.episodes:
                assert id(episode) not in self.used
                assert self.version - int(np.min(episode.policy_version)) <= self.config.max_staleness
                self.used[id(episode)] = episode
        self.consumed += numbers

    @rule(order=st.integers(0, 2**32), share=st.sampled_from([0.5, 0.7, 0.9]))
    def whole_step(self, order: int, share: float) -> None:
        """As a healthy run does it, whatever was going on."""
        self.start(1000)
        if self.running:
            self.finish(order, share, 0.2)
        if not self.batch:
            self.take()
        self.start(1000)
        if self.batch:
            self.publish()

    @precondition(lambda self: self.batch)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.batch = []
        self.queue.published(self.version)

    @rule(rarely=st.integers(0, 3))
    def resume(self, rarely: int) -> None:
        if rarely:
            return
        state = json.loads(json.dumps(self.queue.state_dict()))
        before = self.queue.counts()
        undone = {group.number for group in self.batch}
        self.queue = self.new_queue()
        self.queue.load_state_dict(state)
        after = self.queue.counts()
        assert (after.filtered, after.stale, after.failed) == (before.filtered, before.stale, before.failed)
        assert after.consumed == before.consumed - len(undone)
        self.consumed = [number for number in self.consumed if number not in undone]
        self.batch, self.running, self.void = [], [], []

    # --- what must hold at every moment ------------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        counts, episodes = self.queue.counts(), self.queue.episode_counts()
        assert counts.admitted == counts.consumed + counts.filtered + counts.stale + counts.failed + counts.in_flight
        assert episodes.started == sum((episodes.accepted, episodes.failed, episodes.timed_out, episodes.abandoned, episodes.running))
        assert episodes.running == sum(not self.queue.should_stop(given) for given in self.running)
        assert counts.consumed == len(self.consumed)
        by_domain = self.queue.domain_counts().values()
        assert sum(part.admitted for part in by_domain) == counts.admitted
        assert all(part.add_up for part in by_domain)

    @invariant()
    def places_are_those_of_areal(self) -> None:
        """Accepted and running groups never exceed (S + version + 1) · groups_per_step."""
        counts = self.queue.counts()
        bound = (self.config.max_staleness + self.version + 1) * self.config.groups_per_step
        assert counts.consumed + counts.in_flight <= bound

    @invariant()
    def nothing_is_wasted_by_waiting(self) -> None:
        if self.config.overtaking != "free" and self.lag == 0:
            assert self.queue.counts().stale == 0

    def teardown(self) -> None:
        """Nothing is stuck: if all goes well from here on, batch after batch gets full, and every group is accounted for."""
        if not hasattr(self, "queue"):
            return
        if self.batch:
            self.publish()
        for _ in range(self.config.max_staleness + 3):
            for _ in range(200):
                self.start(100)
                for given in self.running:
                    self.queue.finished(given, answer(given, float(given.member)))
                self.running = []
                self.take()
                if self.batch:
                    break
            assert self.batch, self.queue.describe()
            self.publish()
        counts = self.queue.counts()
        assert len(self.seen) == counts.admitted, "a group was lost on the way"
        self.counts_add_up()

    # --- help --------------------------------------------------------------------------------------------------------

    def pick(self, which: int) -> Assignment:
        given = self.running.pop(which)
        self.void.append(given)
        return given

    def numbers_in_flight(self) -> set[int]:
        """Those of groups that are held, the batch in training included."""
        redo = set(self.queue.state_dict()["redo"])
        return {number for number in redo if number in self.seen}


Schedules.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestSchedules = Schedules.TestCase
