"""Hosts that change between generation and training, against every fixed split of them, on the same episodes with a long tail.

``python benchmarks/multiplexing.py``: the multiplexer and the group queue are the real ones, in simulated time; what a GPU does takes
as long as in `asynchrony.py`. Multiplexed, all GPUs play; when a batch is full, some leave for training, their episodes move to the others
(each move costs: the new GPU reads the episode's tokens first), and they come back when the weights are published.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from long_tails import LongTail, episode_of
from tables import provenance, text_table

from embodied_rl.hybrid.multiplex import Multiplexer
from embodied_rl.planning.stations import EventClock
from embodied_rl.rollout.groups import Assignment


class PlayingGpu:
    """A host whose rounds move all of its episodes on by a message. Implements `hybrid.multiplex.Host`."""

    def __init__(self, run: Run, capacity: int) -> None:
        self.capacity = capacity
        self._run = run
        self.left: dict[Assignment, int] = {}
        self.under_way: set[Assignment] = set()
        self.delay_s = 0.0
        self.busy_s = 0.0

    @property
    def running(self) -> Collection[Assignment]:
        return self.left.keys()

    def movable(self) -> Collection[Assignment]:
        return [assignment for assignment in self.left if assignment not in self.under_way]

    def take(self, keys: Sequence[Assignment]) -> Mapping[Assignment, int]:
        return {key: self.left.pop(key) for key in keys}

    def give(self, states: Mapping[Assignment, int]) -> None:
        self.left.update(states)
        self.delay_s += self._run.move_s * len(states)
        self.go()

    def go(self) -> None:
        """Begin a round where none is under way."""
        if self.under_way or not self.left:
            return
        seconds = self._run.trace.round_s(len(self.left)) + self.delay_s
        self.delay_s = 0.0
        self.busy_s += seconds
        self.under_way = set(self.left)
        self._run.clock.after(seconds, self._played)

    def _played(self) -> None:
        done = []
        for assignment in self.under_way:
            self.left[assignment] -= 1
            if self.left[assignment] == 0:
                del self.left[assignment]
                done.append(assignment)
        self.under_way = set()
        self._run.round_over(self, done)


@dataclass(frozen=True)
class Result:
    episodes_per_s: float
    mean_age: float
    moves: int
    busy: float
    """Share of all GPUs' time in which they decode or train."""


class Run:
    """One arrangement: a fixed split (`train_gpus` never play), or multiplexed (they play while there is nothing to train)."""

    def __init__(self, trace: LongTail, train_gpus: int, max_staleness: int, *, multiplexed: bool, switch_s: float, move_s: float) -> None:
        self.trace, self.train_gpus, self.max_staleness = trace, train_gpus, max_staleness
        self.switch_s, self.move_s = (switch_s if multiplexed else 0.0), move_s
        self.clock = EventClock()
        self.queue = trace.queue(max_staleness, trace.num_slots)
        playing = trace.num_gpus if multiplexed else trace.num_gpus - train_gpus
        # While some are away, the others have room for all.
        capacity = -(-trace.num_slots // (trace.num_gpus - train_gpus))
        self.hosts = [PlayingGpu(self, capacity) for _ in range(playing)]
        leaving = range(playing - train_gpus, playing)
        self.multiplexer = Multiplexer(self.hosts, list(leaving)) if multiplexed else None
        self.version = 0
        self.published_s: list[float] = []
        self.ages: list[int] = []
        self.train_busy_s = 0.0
        self._batch_messages: int | None = None
        self._training = False

    def run(self, num_steps: int, warm_up: int) -> Result:
        """Train so many batches."""
        self._begin()
        going_on = self.clock.run(lambda: self.version >= num_steps + warm_up)
        assert going_on, self.queue.describe()
        counts = self.queue.counts()
        assert counts.add_up
        assert counts.stale == counts.failed == 0
        assert max(self.ages) <= self.max_staleness
        moves = 0
        if self.multiplexer is not None:
            assert self.multiplexer.counts().add_up
            moves = self.multiplexer.counts().moves
        elapsed = self.published_s[-1] - self.published_s[warm_up - 1]
        busy_s = sum(host.busy_s for host in self.hosts) + self.train_busy_s
        ages = float(np.mean(self.ages[warm_up * self.trace.groups_per_step :]))
        busy = busy_s / self.published_s[-1] / self.trace.num_gpus
        return Result(num_steps * self.trace.episodes_per_step / elapsed, ages, moves, busy)

    def round_over(self, host: PlayingGpu, done: Sequence[Assignment]) -> None:
        """Hand in what has ended, move what should, begin new episodes and rounds."""
        for assignment in done:
            assert self.queue.finished(assignment, episode_of(assignment, self.trace.length(assignment), self.queue.version))
            if self.multiplexer is not None:
                self.multiplexer.finished(assignment)
        if self.multiplexer is not None:
            self.multiplexer.settle()
        self._take()
        self._train()
        self._begin()
        host.go()

    def _begin(self) -> None:
        while sum(len(host.left) for host in self.hosts) < self.trace.num_slots and (number := self._room()) is not None:
            assignment = self.queue.next_assignment()
            if assignment is None:
                break
            self.hosts[number].left[assignment] = self.trace.length(assignment)
            if self.multiplexer is not None:
                self.multiplexer.started(assignment, number)
        for host in self.hosts:
            host.go()

    def _room(self) -> int | None:
        if self.multiplexer is not None:
            return self.multiplexer.room()
        free = [(host.capacity - len(host.left), -number) for number, host in enumerate(self.hosts)]
        return -max(free)[1] if max(free)[0] > 0 else None

    def _take(self) -> None:
        """When a batch is full, have the devices vacated."""
        if self._batch_messages is not None or (batch := self.queue.take(self.version)) is None:
            return
        self.ages += [group.age(self.version) for group in batch]
        self._batch_messages = sum(episode.num_messages for group in batch for episode in group.episodes)
        if self.multiplexer is not None:
            self.multiplexer.shrink()

    def _train(self) -> None:
        """When they are vacated, train there."""
        if self._batch_messages is None or self._training or (self.multiplexer is not None and not self.multiplexer.vacated):
            return
        self._training = True
        seconds = self.trace.train_s(self._batch_messages, self.train_gpus)
        self.train_busy_s += seconds * self.train_gpus
        self.clock.after(seconds + 2 * self.switch_s, self._published)

    def _published(self) -> None:
        self.version += 1
        self.queue.published(self.version)
        self.published_s.append(self.clock.now_s)
        self._batch_messages, self._training = None, False
        if self.multiplexer is not None:
            self.multiplexer.expand()
        self._take()
        self._train()
        self._begin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="batches that are measured")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=0.9, help="of the logarithm of episode lengths")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1])
    parser.add_argument("--switch-s", type=float, default=0.02, help="a device's change of sides, each way")
    parser.add_argument("--move-s", type=float, default=0.001, help="of each episode that moves")
    parser.add_argument("--train-gpus", type=int, nargs="+", default=[2, 3, 4, 5, 6], help="of the eight")
    parser.add_argument("--train-per-message-s", type=float, default=0.002, help="on one GPU")
    options = parser.parse_args()
    print(provenance())
    told = []
    for name, per_row_s in (("decoding is bound by memory", 5e-5), ("decoding is bound by compute", 1e-3)):
        trace = LongTail(sigma=options.sigma, round_per_row_s=per_row_s, train_per_message_s=options.train_per_message_s)
        for staleness in options.staleness:
            rows, best = [], {}
            for multiplexed in (False, True):
                for gpus in options.train_gpus:
                    arranged = Run(trace, gpus, staleness, multiplexed=multiplexed, switch_s=options.switch_s, move_s=options.move_s)
                    result = arranged.run(options.steps, options.warm_up)
                    kind = "multiplexed" if multiplexed else "split"
                    rows.append((f"{kind}, {gpus} train", result))
                    best[kind] = max(best.get(kind, 0.0), result.episodes_per_s)
            print(f"\n{name}, staleness {staleness}, {trace.episodes_per_step} episodes per step, {trace.num_gpus} GPUs")
            cells = [
                [
                    label,
                    f"{r.episodes_per_s:.1f}",
                    f"{r.episodes_per_s / best['split']:.2f}x",
                    f"{r.mean_age:.2f}",
                    f"{r.busy:.0%}",
                    str(r.moves),
                ]
                for label, r in rows
            ]
            print(text_table(["arrangement", "episodes/s", "to the best split", "mean age", "GPUs busy", "moves"], cells))
            told.append(f"{name.removeprefix('decoding is ')}, S={staleness} {best['multiplexed'] / best['split']:.2f}x")
    print(f"\nfigure: multiplexed / best fixed split (simulated time): {'; '.join(told)}")


if __name__ == "__main__":
    main()
