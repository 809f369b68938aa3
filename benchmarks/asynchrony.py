"""Training while episodes are played, with bounded staleness, against waiting for all of them: episodes with a long tail.

``python benchmarks/asynchrony.py``: the group queue is the real one, in real time, used by two threads under one lock; what GPUs would do
is slept. A GPU decodes one message of each of its episodes per round, and a round takes almost as long for few as for many, since reading
the weights is what takes the time. Synchronous runs have all GPUs for both, in turns; asynchronous ones split them.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from dataclasses import dataclass

import numpy as np
from long_tails import LongTail, episode_of
from tables import provenance, text_table

from embodied_rl.rollout.groups import Assignment, GroupQueue


@dataclass(frozen=True)
class Side:
    """How one run is arranged."""

    name: str
    max_staleness: int
    train_gpus: int
    """All, in turns with generation, where max_staleness is 0."""


@dataclass(frozen=True)
class Result:
    """Of a run without its first steps."""

    episodes_per_s: float
    mean_age: float
    busy: float
    """Share of the time in which GPUs decode or train."""


class Player(threading.Thread):
    """Plays what the queue asks for in rounds until `stop`; every episode moves on by a message in each."""

    def __init__(self, trace: LongTail, queue: GroupQueue, gpus: int) -> None:
        super().__init__(daemon=True)
        self.trace, self.queue, self.gpus = trace, queue, gpus
        self.lock = threading.Lock()
        """Held around each use of the queue, which is for one thread."""
        self.stop = threading.Event()
        self.busy_s = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        left: dict[Assignment, int] = {}
        try:
            while not self.stop.is_set():
                with self.lock:
                    while len(left) < self.trace.num_slots and (assignment := self.queue.next_assignment()) is not None:
                        left[assignment] = self.trace.length(assignment)
                if not left:
                    time.sleep(0.0005)  # all places are held: the trainer has its turn
                    continue
                # Spread over the GPUs evenly; those without an episode have nothing to do.
                seconds = self.trace.round_s(len(left) / self.gpus)
                time.sleep(seconds)
                self.busy_s += seconds * min(len(left), self.gpus)
                for assignment in [a for a, rest in left.items() if rest == 1]:
                    del left[assignment]
                    with self.lock:
                        episode = episode_of(assignment, self.trace.length(assignment), self.queue.version)
                        assert self.queue.finished(assignment, episode), "nothing is abandoned here"
                left = {assignment: rest - 1 for assignment, rest in left.items()}
        except BaseException as error:
            self.error = error


def run(trace: LongTail, side: Side, num_steps: int, warm_up: int) -> Result:
    """Train `warm_up` + `num_steps` batches."""
    queue = trace.queue(side.max_staleness, trace.num_slots)
    apart = side.max_staleness > 0
    player = Player(trace, queue, trace.num_gpus - side.train_gpus if apart else trace.num_gpus)
    player.start()
    ages: list[int] = []
    train_busy_s, measured_from, busy_from = 0.0, 0.0, 0.0
    for step in range(warm_up + num_steps):
        while True:
            with player.lock:
                batch = queue.take(step)
            if batch is not None:
                break
            if player.error is not None:
                raise player.error
            time.sleep(0.001)
        if step >= warm_up:
            ages += [group.age(step) for group in batch]
        messages = sum(episode.num_messages for group in batch for episode in group.episodes)
        seconds = trace.train_s(messages, side.train_gpus)
        time.sleep(seconds)
        with player.lock:
            queue.published(step + 1)
        train_busy_s += seconds * side.train_gpus * (step >= warm_up)
        if step == warm_up - 1:
            measured_from, busy_from = time.perf_counter(), player.busy_s
    elapsed = time.perf_counter() - measured_from
    busy_s = player.busy_s - busy_from + train_busy_s
    player.stop.set()
    player.join()
    counts = queue.counts()
    assert counts.add_up
    assert counts.stale == counts.failed == 0
    assert max(ages) <= side.max_staleness
    return Result(num_steps * trace.episodes_per_step / elapsed, float(np.mean(ages)), busy_s / elapsed / trace.num_gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="batches that are measured")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.3, 0.9], help="of the logarithm of episode lengths")
    parser.add_argument("--train-gpus", type=int, nargs="+", default=[2, 4], help="of the eight, where training is apart")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--scale", type=float, default=1.5, help="of all seconds")
    options = parser.parse_args()
    print(provenance())
    told = []
    for sigma in options.sigma:
        plain = LongTail(sigma=sigma)
        trace = dataclasses.replace(
            plain,
            round_base_s=plain.round_base_s * options.scale,
            round_per_row_s=plain.round_per_row_s * options.scale,
            train_per_message_s=plain.train_per_message_s * options.scale,
        )
        apart = [Side(f"asynchronous, {gpus} train, S={s}", s, gpus) for gpus in options.train_gpus for s in options.staleness]
        results = {side.name: run(trace, side, options.steps, options.warm_up) for side in [Side("synchronous", 0, trace.num_gpus), *apart]}
        base = results["synchronous"].episodes_per_s
        rows = [
            [name, f"{r.episodes_per_s:.1f}", f"{r.episodes_per_s / base:.2f}x", f"{r.mean_age:.2f}", f"{r.busy:.0%}"]
            for name, r in results.items()
        ]
        print(f"\nepisode lengths: lognormal, sigma {sigma:g}, {trace.episodes_per_step} episodes per step, {trace.num_gpus} GPUs")
        print(text_table(["arrangement", "episodes/s", "to synchronous", "mean age", "GPUs busy"], rows))
        best = max(apart, key=lambda side: results[side.name].episodes_per_s)
        told.append(f"sigma {sigma:g} {results[best.name].episodes_per_s / base:.2f}x")
    print(f"\nfigure: asynchronous at its best / synchronous: {'; '.join(told)} (ROLL Flash reports up to 2.72x, AReaL up to 2.77x)")


if __name__ == "__main__":
    main()
