"""Iterations as simulations: a clock of events with stations that serve jobs, rollouts in lockstep, and whole episodes.

Rollouts of a fixed number of decisions: stages of slots that go round between simulators and the policy, and what follows them.

Pure arithmetic over arrays; R repetitions at once. A stage is stepped as a whole, then acted for as a whole. With constant times s and g of
one stage, T rounds of K stages take T·(s + g) for K = 1, T·K·(s + g) where both sides share a device, and for K = 2
2·T·max(s, g) + min(s, g).

Whole episodes of very different length: slots, simulators, the policy's devices and the trainer as stations of a simulation.

```
 slot: ── admitted ─▶ [cores] step ─▶ [devices] act ─▶ … L times … ─▶ finished ─┐        at most (S + 1) · groups per batch are held
                                                                            group complete ─▶ ready ─▶ [train] ─▶ published
```
The bound on staleness is the group queue's: a place is held from a group's admission until the weights that its batch was trained into are
published, and a batch is only taken when all that is older can still be consumed in time (the rule ``bounded`` of `GroupQueue`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from embodied_rl.config.hybrid import BatchTimeConfig, SpreadConfig


class EventClock:
    """Simulated seconds; callbacks run in the order of their times, and equal times in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call `callback` in `delay_s` >= 0 seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, callback, arguments))

    def run(self, until: Callable[[], bool]) -> bool:
        """Advance time until `until()` is true after an event; returns False if the events run out first."""
        while not until():
            if not self._events:
                return False
            self.now_s, _, callback, arguments = heapq.heappop(self._events)
            callback(*arguments)
        return True


class Station:
    """Servers that take waiting jobs in order of arrival: one at a time, or all waiting jobs, spread over the idle servers.

    `num_servers` may change during the run: a server that is to leave finishes its batch first.
    """

    def __init__(
        self,
        clock: EventClock,
        num_servers: int,
        seconds: Callable[[Sequence[Any]], float],
        done: Callable[[Any], None],
        *,
        batches: bool = False,
    ) -> None:
        """Args:
        seconds: duration of a batch of jobs (of length 1 without `batches`).
        done: called with each job when its batch is served.
        batches: an idle server takes its share of all waiting jobs.
        """
        self._clock, self._seconds, self._done = clock, seconds, done
        self._batches = batches
        self.num_servers = num_servers
        self.num_busy = 0
        self.busy_s = 0.0
        """Server-seconds of work, counted when a batch begins."""
        self._waiting: deque[Any] = deque()
        self._starting = False
        self._left: Callable[[], None] | None = None

    def put(self, job: object) -> None:
        """Queue a job for a server."""
        self._waiting.append(job)
        self._wake()

    def resize(self, num_servers: int, left: Callable[[], None] | None = None) -> None:
        """Change the number of servers; `left` is called (once) when the leaving ones have finished their batches."""
        self.num_servers, self._left = num_servers, left
        self._tell_left()
        self._wake()

    def _start(self) -> None:
        self._starting = False
        while self._waiting and self.num_busy < self.num_servers:
            idle = self.num_servers - self.num_busy
            count = -(-len(self._waiting) // idle) if self._batches else 1
            batch = [self._waiting.popleft() for _ in range(count)]
            seconds = self._seconds(batch)
            self.num_busy += 1
            self.busy_s += seconds
            self._clock.after(seconds, self._finish, batch)

    def _finish(self, batch: Sequence[Any]) -> None:
        self.num_busy -= 1
        for job in batch:
            self._done(job)
        self._tell_left()
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._starting and self.num_busy < self.num_servers:
            # Jobs that arrive at the same moment belong to the same batch.
            self._starting = True
            self._clock.after(0.0, self._start)

    def _tell_left(self) -> None:
        if self._left is not None and self.num_busy <= self.num_servers:
            left, self._left = self._left, None
            self._clock.after(0.0, left)


def pipelined_rollout(step_s: np.ndarray, act_s: np.ndarray, *, shared: bool) -> np.ndarray:
    """[R] seconds of T rounds of K stages, served in turns, from the start of the first step to the end of the last action.

    Args:
        step_s: [R, T, K] seconds of simulating a stage.
        act_s: [R, T, K] seconds of acting for it.
        shared: whether both use the same device, so that nothing overlaps.
    """
    num_repetitions, num_rounds, num_stages = step_s.shape
    env_free = np.zeros(num_repetitions)
    act_free = np.zeros(num_repetitions)
    ready = np.zeros((num_stages, num_repetitions))
    for t in range(num_rounds):
        for k in range(num_stages):
            env_free = np.maximum(ready[k], env_free if not shared else np.maximum(env_free, act_free)) + step_s[:, t, k]
            act_free = np.maximum(env_free, act_free) + act_s[:, t, k]
            ready[k] = act_free
    return act_free


def stage_steps(
    rng: np.random.Generator, shape: tuple[int, int, int], rows: int, servers: float, median_s: float, sigma: float
) -> np.ndarray:
    """[R, T, K] seconds until all `rows` environments of a stage have stepped, dealt in blocks to `servers` cores.

    With fewer than one core (a core that several groups share), a step takes that much longer.
    """
    cores = max(1, min(rows, math.floor(servers)))
    slower = 1.0 if servers >= 1 else 1.0 / servers
    if sigma == 0:
        return np.full(shape, median_s * slower * -(-rows // cores))
    per_core = -(-rows // cores)
    drawn = np.exp(rng.normal(math.log(median_s), sigma, (*shape, cores, per_core)))
    # The last cores may have one environment less than the others.
    missing = cores * per_core - rows
    if missing:
        drawn[..., cores - missing :, -1] = 0.0
    return drawn.sum(-1).max(-1) * slower


def iterations(rollout_s: np.ndarray, train_s: float, publish_s: float, max_staleness: int, *, overlap: bool) -> np.ndarray:
    """[N] seconds at which each iteration's weights are published.

    Args:
        rollout_s: [N] seconds of each iteration's rollout.
        overlap: generation and training have separate devices. Rollout n begins once version n − S is published
            (S = `max_staleness`), and training n once its rollout and the previous update are done.
    """
    published = np.zeros(len(rollout_s))
    collected = 0.0
    for n, seconds in enumerate(rollout_s):
        before = published[n - 1] if n else 0.0
        if overlap:
            place = published[n - 1 - max_staleness] if n - 1 - max_staleness >= 0 else 0.0
            collected = max(collected, place) + seconds
        else:
            collected = before + seconds
        published[n] = max(collected, before) + train_s + publish_s
    return published


def slowest_of(values: np.ndarray, count: int) -> float:
    """Expected largest of `count` independent draws from the distribution of the sample `values`.

    Blom's approximation for normal variables, mean + std · Φ⁻¹((count − 0.375) / (count + 0.25)). So equal groups are simulated a few
    times, whatever their number.
    """
    if count <= 1 or len(values) == 1:
        return float(values.mean())
    from statistics import NormalDist

    return float(values.mean() + values.std(ddof=1) * NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))


@dataclass(frozen=True)
class EpisodeRun:
    """A cell of a cluster: slots, cores and devices, and the share of each batch that they collect."""

    num_slots: int
    num_cores: float
    """Cores of the cell; below 1: a core is shared with other cells."""
    num_devices: int
    """Copies of the policy, each a server of the simulation."""
    devices_while_training: int
    """Copies that generate during training: all if training is separate, none if it alternates, some if they are multiplexed."""
    groups_per_batch: int
    group_size: int
    length: SpreadConfig
    step: SpreadConfig
    act: BatchTimeConfig
    train_s: Callable[[int], float]
    """Seconds of training on so many decisions of this cell, with everything that occupies the trainer."""
    publish_s: float
    """Seconds for which generation stands still for new weights."""
    switch_s: float = 0.0
    """Seconds that a device loses when it changes sides, there and back."""
    max_staleness: int = 0


@dataclass
class _Group:
    number: int
    version: int
    left: int
    decisions: int = 0


class EpisodeSimulation:
    """Simulates one cell for a number of versions. The work of `cores` and `devices` is in their `busy_s`."""

    def __init__(self, run: EpisodeRun, rng: np.random.Generator) -> None:
        self.run, self._rng = run, rng
        self.published_s: list[float] = []
        """Time at which each version was published."""
        self.decisions: list[int] = []
        """Decisions of each batch."""
        self.ages = Counter[int]()
        """{versions between admission and training: groups}"""
        self.train_busy_s = 0.0
        self.clock = EventClock()
        self._slower = 1.0 if run.num_cores >= 1 else 1.0 / run.num_cores
        cores = max(1, min(run.num_slots, math.floor(run.num_cores)))
        self.devices = Station(self.clock, run.num_devices, lambda batch: run.act.of(len(batch)), self._acted, batches=True)
        self.cores = Station(self.clock, cores, lambda _: _draw(rng, run.step) * self._slower, self.devices.put)
        self._idle_slots = run.num_slots
        self._waiting_members: list[_Group] = []
        self._unfinished: dict[int, _Group] = {}
        self._ready: list[_Group] = []
        self._training: list[_Group] = []
        self._next_number = 0
        self._version = 0

    def simulate(self, num_versions: int) -> Self:
        """Run the cell until `num_versions` are published."""
        self._admit()
        finished = self.clock.run(lambda: self._version >= num_versions)
        assert finished, "nothing is left to happen and no batch is full: the model has deadlocked"
        return self

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        run = self.run
        while self._idle_slots:
            if not self._waiting_members:
                held = len(self._unfinished) + len(self._ready) + len(self._training)
                if held >= (run.max_staleness + 1) * run.groups_per_batch:
                    return
                group = _Group(self._next_number, self._version, run.group_size)
                self._next_number += 1
                self._unfinished[group.number] = group
                self._waiting_members = [group] * run.group_size
            group = self._waiting_members.pop()
            self._idle_slots -= 1
            length = max(1, round(_draw(self._rng, run.length)))
            group.decisions += length
            self.cores.put((group, length))

    def _acted(self, job: tuple[_Group, int]) -> None:
        group, left = job
        if left > 1:
            self.cores.put((group, left - 1))
            return
        self._idle_slots += 1
        group.left -= 1
        if group.left == 0:
            self._ready.append(self._unfinished.pop(group.number))
            self._train_when_full()
        self._admit()

    # ---- trainer ----------------------------------------------------------------------------------------------------

    def _train_when_full(self) -> None:
        """Train on the oldest ready groups, if taking them leaves no group that must grow too old."""
        run, version = self.run, self._version
        if self._training or len(self._ready) < run.groups_per_batch:
            return
        self._ready.sort(key=lambda group: (group.version, group.number))
        chosen, kept = self._ready[: run.groups_per_batch], self._ready[run.groups_per_batch :]
        rest = [group.version for group in (*kept, *self._unfinished.values())]
        for later in range(run.max_staleness + 1):
            # Later batches can consume this many of the rest before it is too old.
            if sum(v <= version - run.max_staleness + later for v in rest) > later * run.groups_per_batch:
                return
        self._training, self._ready = chosen, kept
        self.decisions.append(sum(group.decisions for group in chosen))
        self.ages.update(version - group.version for group in chosen)
        self.devices.resize(run.devices_while_training, self._train)

    def _train(self) -> None:
        """Start training: the devices that it needs are free."""
        run = self.run
        seconds = run.train_s(self.decisions[-1])
        self.train_busy_s += seconds
        changing = run.switch_s if run.devices_while_training < run.num_devices else 0.0
        self.clock.after(seconds + changing, self._trained)

    def _trained(self) -> None:
        self.devices.resize(0, lambda: self.clock.after(self.run.publish_s, self._published))

    def _published(self) -> None:
        self._version += 1
        self.published_s.append(self.clock.now_s)
        self._training = []
        self.devices.resize(self.run.num_devices)
        self._admit()
        self._train_when_full()


def _draw(rng: np.random.Generator, spread: SpreadConfig) -> float:
    value = spread.median if spread.sigma == 0 else spread.median * math.exp(spread.sigma * rng.standard_normal())
    return value if spread.most is None else min(value, spread.most)
