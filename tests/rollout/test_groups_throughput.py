"""The group queue in simulated time, with episodes whose lengths have long tails: what redundancy and staleness buy, and that ages
stay within their bound. Expected times come from order statistics, from a recursion over batches, and from a closed form."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import GroupsConfig
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import Assignment, GroupQueue
from tests.rollout.samples import answer

Latency = Callable[[Assignment], float]


@dataclass
class Simulation:
    """Slots that play what the queue asks for, and a trainer that needs `train_s` for a batch: events in the order of their times."""

    config: GroupsConfig
    latency: Latency
    num_slots: int
    train_s: float = 0.0
    publish_times_s: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    """Numbers of the groups, batch by batch."""
    now_s: float = 0.0

    def run(self, num_steps: int) -> Simulation:
        self.queue = GroupQueue(self.config, seed=0, domains=DomainMixture.single("only"), clock=lambda: self.now_s)
        self._events: list[tuple[float, int, Assignment | None]] = []
        self._tie, self._playing, self._training = 0, set[Assignment](), False
        while len(self.publish_times_s) < num_steps:
            self._pump()
            self.now_s, _, assignment = heapq.heappop(self._events)
            if assignment is None:
                self._training = False
                self.publish_times_s.append(self.now_s)
                self.queue.published(len(self.publish_times_s))
            elif assignment in self._playing:
                self._playing.remove(assignment)
                # Versions change while an episode runs: its last message carries the newest.
                self.queue.finished(assignment, answer(assignment, versions=(assignment.version, self.queue.version)))
        return self

    def _pump(self) -> None:
        if not self._training and (batch := self.queue.take(self.queue.version)) is not None:
            self.consumed += [group.number for group in batch]
            self.ages += [group.age(self.queue.version) for group in batch]
            self._training = True
            self._push(self.train_s, None)
        self._playing = {assignment for assignment in self._playing if not self.queue.should_stop(assignment)}
        while len(self._playing) < self.num_slots and (given := self.queue.next_assignment()) is not None:
            self._playing.add(given)
            self._push(self.latency(given), given)

    def _push(self, delay_s: float, what: Assignment | None) -> None:
        self._tie += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._tie, what))

    @property
    def step_times_s(self) -> np.ndarray:
        return np.diff([0.0, *self.publish_times_s])


def draw(kind: str, size: tuple[int, ...], seed: int) -> np.ndarray:
    """Latencies in seconds with mean 1 (exponential), exp(1/2) (log-normal, sigma 1) and 1.5 (Pareto, shape 3, from 1 s on)."""
    rng = np.random.default_rng(seed)
    if kind == "pareto":
        return 1.0 + rng.pareto(3.0, size)
    return rng.lognormal(size=size) if kind == "lognormal" else rng.exponential(size=size)


def cdf(kind: str, x: np.ndarray) -> np.ndarray:
    """Of the same latencies."""
    if kind == "lognormal":
        return np.array([0.5 * math.erfc(-math.log(max(value, 1e-300)) / math.sqrt(2.0)) for value in x])
    return np.where(x > 1.0, 1.0 - np.maximum(x, 1.0) ** -3.0, 0.0)


def expected_batch_s(kind: str, group_size: int, rollouts: int, groups: int) -> float:
    """Mean of the largest of `groups` draws, each the `group_size`-th smallest of `rollouts` latencies: the integral of 1 - F(x), F
    being P(at least group_size of the rollouts are done)^groups."""
    x = np.linspace(0.0, 40.0, 40_001)
    x = np.concatenate([x, np.geomspace(40.0, 1e5, 4001)[1:]])
    done = cdf(kind, x)
    group = sum(math.comb(rollouts, j) * done**j * (1.0 - done) ** (rollouts - j) for j in range(group_size, rollouts + 1))
    return float(np.trapezoid(1.0 - group**groups, x))


def by_table(table: np.ndarray) -> Latency:
    """The latency of a member of a group, whenever it is played."""
    return lambda assignment: float(table[assignment.group, assignment.member])


def simulate(table: np.ndarray, num_steps: int, *, num_slots: int = 10**6, train_s: float = 0.0, **settings: Any) -> Simulation:
    config = GroupsConfig(**{"group_size": 4, "groups_per_step": 4, **settings})
    simulation = Simulation(config, by_table(table), num_slots, train_s).run(num_steps)
    assert max(simulation.ages) <= config.max_staleness
    assert simulation.queue.counts().consumed == num_steps * config.groups_per_step
    return simulation


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
def test_synchronous_time_and_what_redundancy_saves_are_those_of_order_statistics(kind: str) -> None:
    steps, table = 200, draw(kind, (800, 6), seed=1)
    measured, expected = {}, {}
    for redundancy in (0, 1, 2):
        times = simulate(table, steps, redundancy=redundancy).step_times_s
        expected[redundancy] = expected_batch_s(kind, 4, 4 + redundancy, 4)
        measured[redundancy] = times.mean()
        # Five standard errors; steps are independent.
        assert measured[redundancy] == pytest.approx(expected[redundancy], abs=5 * times.std() / math.sqrt(steps))
    assert measured[2] < measured[1] < measured[0]
    # The largest of 16 draws against the largest of four, each the fourth of six: 2.3 times (log-normal), 1.9 times (Pareto).
    assert measured[0] / measured[2] == pytest.approx(expected[0] / expected[2], rel=0.15)
    assert expected[0] / expected[2] > 1.5


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_in_order_times_are_those_of_a_recursion(kind: str, staleness: int) -> None:
    """With slots enough, batch b is begun when batch b - S - 1 is published (that is when its places become free), and published
    train_s after its slowest episode and the batch before: P_b = max(P_(b-1), P_(b-S-1) + M_b) + train_s."""
    steps, train_s = 120, 0.7
    table = draw(kind, ((steps + staleness + 1) * 4, 4), seed=2)
    simulation = simulate(table, steps, train_s=train_s, max_staleness=staleness, overtaking="never")
    published = [0.0] * (staleness + 1)
    for slowest in table[: steps * 4].reshape(steps, 16).max(axis=1):
        published.append(max(published[-1], published[-staleness - 1] + slowest) + train_s)
    np.testing.assert_allclose(simulation.publish_times_s, published[staleness + 1 :], rtol=1e-12)
    assert set(simulation.ages[steps:]) <= set(range(staleness + 1))
    assert simulation.queue.counts().stale == 0


def test_one_version_of_staleness_gains_a_half_with_exponential_latencies() -> None:
    """One episode a batch, no training time. Steps D_n = max(0, L_n - D_(n-1)): the next episode has run all the while. For L ~ Exp(1)
    P(D > x) = E[exp(-(x + D))] = p exp(-x) with p = E[exp(-D)] = (1 - p) + p/2, so that p = 2/3 and E[D] = p · 1 = 2/3 against E[L] = 1.
    """
    steps = 1500
    table = draw("exponential", (steps + 2, 1), seed=3)
    means = {}
    for staleness in (0, 1):
        simulation = simulate(table, steps, group_size=1, groups_per_step=1, max_staleness=staleness, overtaking="never")
        means[staleness] = simulation.step_times_s.mean()
    # Standard errors: 1/sqrt(1500) = 0.026, and less with S = 1 (steps are then negatively correlated).
    assert means[0] == pytest.approx(1.0, abs=0.08)
    assert means[1] == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
def test_staleness_and_overtaking_raise_throughput_up_to_the_slots_capacity(kind: str) -> None:
    """48 slots, 16 episodes a batch: work alone needs 16 E[L] / 48 a step; nobody can be faster than that, nor than the trainer."""
    steps, train_s, slots = 90, 0.2, 48
    table = draw(kind, (steps * 16, 4), seed=4)
    mean_latency = {"lognormal": math.exp(0.5), "pareto": 1.5}[kind]
    times = {}
    for staleness in (0, 1, 3):
        for overtaking in ("never", "bounded", "free"):
            run = simulate(table, steps, num_slots=slots, train_s=train_s, max_staleness=staleness, overtaking=overtaking)
            times[staleness, overtaking] = run.step_times_s.mean()
            assert (run.queue.counts().stale > 0) == (overtaking == "free" and staleness > 0)
    synchronous = expected_batch_s(kind, 4, 4, 4) + train_s
    for overtaking in ("never", "bounded", "free"):
        assert times[0, overtaking] == times[0, "never"], "synchronous is synchronous, whatever overtaking says"
        assert times[0, overtaking] == pytest.approx(synchronous, rel=0.2)
        assert times[3, overtaking] < times[1, overtaking] < times[0, overtaking]
    for staleness in (1, 3):
        # Places leave little room for overtaking: in order, nearly as fast. Without waiting it is faster still, at the price of the
        # longest episodes.
        assert times[staleness, "bounded"] <= times[staleness, "never"]
        assert times[staleness, "free"] < times[staleness, "bounded"]
        # Work that runs when the clock stops, or has run ahead, is at most S + 1 batches: hence the slack.
        floor = max(train_s, 16 * mean_latency / slots) * (1 - (staleness + 1) / steps)
        assert times[staleness, "bounded"] > 0.95 * floor
    assert times[0, "never"] / times[1, "never"] > 1.5
    assert times[0, "never"] / times[3, "never"] > 2.5


def test_what_never_waits_prefers_short_episodes() -> None:
    """Why `free` is not the default: the mean latency of what is consumed falls below that of what there is."""
    steps, table = 150, draw("lognormal", (2400, 4), seed=4)
    means, dropped = {}, {}
    for overtaking in ("bounded", "free"):
        run = simulate(table, steps, train_s=0.2, max_staleness=1, overtaking=overtaking)
        means[overtaking], dropped[overtaking] = table[run.consumed].mean(), run.queue.counts().stale
    # In the one case nothing is left out but what has not been waited for when the clock stops.
    assert means["bounded"] == pytest.approx(table[:600].mean(), rel=0.01)
    assert dropped["bounded"] == 0
    assert dropped["free"] > 60
    assert means["free"] < 0.95 * means["bounded"]
