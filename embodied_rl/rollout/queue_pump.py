"""Base classes of the pumps that fill a group queue, and collectors for several domains, of groups or of fixed rollouts."""

from __future__ import annotations

import abc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from embodied_rl.generation.base import Way
from embodied_rl.rollout.collector import PATIENCE_S, Collector, CollectorTimes, RolloutCollector
from embodied_rl.rollout.domains import place_of
from embodied_rl.rollout.groups import Assignment, GroupQueue
from embodied_rl.rollout.initialized import SnapshotCache, Start, StartLibrary
from embodied_rl.rollout.scoring import Scorer
from embodied_rl.sim.simulators import Simulators
from embodied_rl.timeline import span
from embodied_rl.types import Episode, EpisodeGroup, EpisodeSummary, Rollout, StepBatch


def batch_figures(queue: GroupQueue, groups: Sequence[EpisodeGroup], version: int) -> dict[str, float]:
    """Figures of a batch just taken for the weights `version`.

    ``groups/ready`` and ``groups/held`` are the queue's lengths: complete groups that wait, and all places in use, the batch's included.
    ``groups/age_*`` describe the batch, see `age_figures`.
    """
    lengths = queue.lengths()
    figures = {f"groups/{name}": float(value) for name, value in lengths.items()}
    return figures | age_figures("groups", (group.age(version) for group in groups), queue.config.max_staleness)


def age_figures(place: str, ages: Iterable[int], max_age: int) -> dict[str, float]:
    """``<place>/age_mean``, ``age_max``, and the histogram: ``age_0``, ``age_1``, … count items 0, 1, … `max_age` versions old."""
    found = list(ages)
    counts = Counter(found)
    histogram = {f"{place}/age_{age}": float(counts[age]) for age in range(max(max_age, max(found, default=0)) + 1)}
    return {f"{place}/age_mean": float(np.mean(found)) if found else 0.0, f"{place}/age_max": float(max(found, default=0)), **histogram}


class Running(Protocol):
    """A pump's state of a running episode."""

    @property
    def assignment(self) -> Assignment: ...


Playing = TypeVar("Playing", bound=Running)


class QueuePump(Collector, abc.ABC):
    """Fills a queue's groups, one round per `pump` call."""

    def __init__(self, queue: GroupQueue, *, seed: int) -> None:
        self.queue, self.seed = queue, seed
        self.domain: str | None = None
        """Domain of the queue whose groups this pump plays; None: all."""
        self.times = CollectorTimes()
        self._waited = 0.0
        self._batch: dict[str, float] = {}
        self.awaited: dict[int, tuple[QueuePump, Assignment, Callable[[], object]]] = {}
        """Episodes being scored, by the scorer's number: (pump that played it, assignment, callback for when the queue accepts it). Pumps
        that share a scorer share this too, and each may hand in the episodes of all."""
        self._ticked_at = time.monotonic()

    @abc.abstractmethod
    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Move on what is ready. False: no episode is running, and none may begin.
        `patience_s`: longest wait if nothing is ready."""

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """Play until the queue has a batch for the weights `version`.
        Raises SimFault: see EnvManager; BatchNeverFullError: the queue rejects too many groups, or waited too long."""
        self.take_waited()
        started = time.perf_counter()
        while (groups := self.queue.take(version)) is None:
            if not self.pump():
                raise RuntimeError(f"No episode is running and no batch is full. {self.queue.describe()}")
        waited = self.take_waited()
        self.times = CollectorTimes(waited, time.perf_counter() - started - waited)
        self._batch = batch_figures(self.queue, groups, version)
        return groups

    def take_waited(self) -> float:
        """Seconds spent waiting for simulators since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _sampling_seed(self, whose: Assignment, *stream: int) -> int:
        """Seed for sampling in an episode, made of the run's seed, the group, the member, the attempt and a stream of randomness."""
        key = (self.seed, whose.group, whose.member, whose.attempt, *stream)
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)

    def _tick(self) -> None:
        if time.monotonic() - self._ticked_at >= PATIENCE_S:
            self._ticked_at = time.monotonic()
            self.queue.tick()  # an episode it gives up is dropped when its slot returns

    def _hand_in(self, assignment: Assignment, episode: Episode, taken: Callable[[], object] = lambda: None) -> None:
        """Give a finished episode to the scorer, if any, and then to the queue, which calls `taken` if it accepts the episode."""
        if self.scorer is not None:
            self.awaited[self.scorer.submit(episode)] = self, assignment, taken
        elif self.queue.finished(assignment, episode):
            taken()

    def _take_scores(self) -> bool:
        """Hand in the episodes scored meanwhile; return whether there were any."""
        scored = [] if self.scorer is None else self.scorer.ready()
        for number, found in scored:
            if number not in self.awaited:
                continue  # submitted before a restart
            _, assignment, taken = self.awaited.pop(number)
            if isinstance(found, str):
                self.queue.failed(assignment, f"it was not scored: {found}")
            elif self.queue.finished(assignment, found):
                taken()
        return bool(scored)

    @property
    def _awaits_scores(self) -> bool:
        """Whether episodes of this pump are being scored."""
        return any(pump is self for pump, *_ in self.awaited.values())

    def _wait_for_scores(self, patience_s: float) -> bool:
        """Wait for scores, for a pump with nothing else to wait for; return whether any are pending."""
        if self._awaits_scores and self.scorer is not None:
            self.scorer.wait(patience_s)
            self._tick()
        return self._awaits_scores

    def _go_on_with(self, queue: GroupQueue | None) -> None:
        """Fill another queue; pending scores for the last one are dropped."""
        assert queue is not None, "groups are asked for by a queue"
        self.queue = queue
        self.awaited.clear()

    def metrics(self) -> dict[str, float]:
        """`figures` under their logged names, the last batch's figures (`batch_figures`), and the reward workers' scores."""
        scores = {} if self.scorer is None else self.scorer.metrics()
        return {**{f"agent/{name}": value for name, value in self.figures().items()}, **self._batch, **scores}


class SlotPump(QueuePump, Generic[Playing]):
    """Pump over a manager made with ``autoreset=False``: each slot plays an episode of the queue, or stands still."""

    def __init__(
        self, manager: Simulators, queue: GroupQueue, *, seed: int, min_ready: int | None = None, starts: StartLibrary | None = None
    ) -> None:
        """`starts`: library of starts inside other episodes; with one, every episode has ``metadata["start"]``."""
        super().__init__(queue, seed=seed)
        self.manager, self.min_ready = manager, min_ready
        self._starts, self._snapshot_cache = starts, None if starts is None else SnapshotCache(manager, starts)
        self._playing: dict[int, Playing] = {}
        self._idle = list(range(manager.num_slots))
        self._in_step = 0
        """Number of slots with a step in flight."""
        self._to_restore: dict[int, Start] = {}
        """Starts by slot that wait for room (`Simulators.room`)."""

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Play one round: take in what is ready, or everything in lockstep, begin what the queue requests, and answer. False: no episode is
        running, and none may begin.

        `patience_s`: longest wait if nothing is ready; in lockstep the pump waits for everything.

        Raises as `next_groups` does.
        """
        moved = self._move_on(patience_s)
        moved = self._take_scores() or moved
        moved = self._begin_idle() or moved  # episodes may end at once: their first prompt is too long
        if not self._playing:
            return self._wait_for_scores(patience_s) or moved
        if self._in_step or self._to_restore:
            before = time.perf_counter()
            # Lockstep waits for all slots; otherwise a slow step would split them into batches that depend on timing.
            wait_s = None if self.min_ready is None else 0.0 if self._is_answering else patience_s
            with span("env", "wait"):
                batch = self.manager.recv(min_ready=self.min_ready, timeout_s=wait_s)
            self._waited += time.perf_counter() - before
            self._take_steps(batch)
        self._answer(patience_s)
        self._tick()
        return True

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Give up every running episode and continue with another queue: after an evaluation or a resume."""
        self.manager.discard()
        self._go_on_with(queue)
        self._playing.clear()
        self._to_restore.clear()
        self._idle, self._in_step = list(range(self.manager.num_slots)), 0
        if self._starts is not None and self._snapshot_cache is not None:
            self._starts.discard()
            self._snapshot_cache.clear()

    # ---- a pump's own -----------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        """Whether answers are under way, so that the pump does not block on a simulator."""
        return False

    def _move_on(self, patience_s: float) -> bool:
        """Move on what waits neither for a simulator nor for an answer; return whether there was any."""
        return False

    @abc.abstractmethod
    def _take_steps(self, batch: StepBatch) -> None:
        """Note the outcomes of the actions; hand in episodes that ended, and take up the others' observations."""

    @abc.abstractmethod
    def _answer(self, patience_s: float) -> None:
        """Send the actions that are ready."""

    @abc.abstractmethod
    def _new(self, assignment: Assignment, start: Start | None) -> Playing:
        """State of a new episode; `start`: inside another episode, None: an ordinary start."""

    @abc.abstractmethod
    def _took_up(self, seen: Mapping[int, dict[str, Any]]) -> None:
        """Continue with slots whose starts inside other episodes were restored: {slot: {key: observation}}."""

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin_idle(self) -> bool:
        """Begin the queue's next episodes in idle slots; return whether there were any."""
        begun: list[tuple[int, int]] = []
        restored: dict[int, Start] = {}
        while self._idle and (assignment := self.queue.next_assignment(self.domain)) is not None:
            slot, start = self._idle.pop(0), None if self._starts is None else self._starts.start_of(assignment.group)
            self._playing[slot] = self._new(assignment, start)
            if start is None:
                begun.append((slot, assignment.seed))
            else:
                restored[slot] = start
        if seen := self._restored(restored):
            self._took_up(seen)
        if begun:
            slots, seeds = zip(*sorted(begun), strict=True)
            self.manager.begin(list(slots), list(seeds))
            self._in_step += len(slots)
        return bool(begun or restored)

    def _start_metadata(self, start: Start | None) -> dict[str, Any]:
        """Metadata entry for an episode's start."""
        if self._starts is None:
            return {}
        return {"start": {"source": None if start is None else start.source, "step": 0 if start is None else start.step}}

    def _restored(self, wanted: Mapping[int, Start]) -> dict[int, dict[str, Any]]:
        """Restore the start of each slot, and of slots that waited, while there is room; return {slot: {key: observation}}."""
        self._to_restore |= wanted
        for slot in [slot for slot in self._to_restore if self.queue.should_stop(self._playing[slot].assignment)]:
            del self._to_restore[slot]  # the library may have dropped its start
            self._stop(slot)
        if not self._to_restore or self._snapshot_cache is None:
            return {}
        now = [slot for slot, _ in zip(self._to_restore, range(self.manager.room()), strict=False)]
        return self._snapshot_cache.restore({slot: self._to_restore.pop(slot) for slot in now})

    def _stop(self, slot: int) -> None:
        """End the slot's episode, which is over or no longer needed."""
        del self._playing[slot]
        self.manager.release(slot)
        self._idle.append(slot)
        self._idle.sort()

    def _outcomes(self, batch: StepBatch) -> Iterator[tuple[int, int, Playing, EpisodeSummary | None]]:
        """(row, slot, its episode, summary if it ended) of each slot that has stepped; ends those whose simulator failed."""
        self._in_step -= len(batch.slots)
        ended = {episode.slot: episode for episode in batch.episodes}
        for row, slot in enumerate(batch.slots.tolist()):
            if batch.aborted is not None and batch.aborted[row]:
                self._fail(slot, self._playing[slot].assignment, "its simulator failed")
            else:
                yield row, slot, self._playing[slot], ended.get(slot)

    def _fail(self, slot: int, assignment: Assignment, why: str) -> None:
        """End the slot's episode as failed: it cannot continue, or cannot be learned from."""
        self._stop(slot)
        self.queue.failed(assignment, why)


_GLANCE_S = 0.002
"""Seconds to wait for a collector with only busy slots while others may be ready."""


class DomainCollector(QueuePump):
    """Fills one queue from several collectors: each plays the groups of one domain of the queue, and none waits for another.

    ```
                        ┌── "lake" ──▶ AgentCollector ──▶ its simulators, its backend
       GroupQueue ──────┼── "sums" ──▶ AgentCollector ──▶ …
                        └── "arm"  ──▶ GroupCollector ──▶ …
    ```

    In lockstep the collectors take turns, each moving all of its slots once, so the episodes depend only on the seeds. Otherwise whatever
    is ready moves on.
    """

    def __init__(self, collectors: Mapping[str, QueuePump], queue: GroupQueue, *, lockstep: bool) -> None:
        """`collectors`: {domain of the queue: its collector}."""
        super().__init__(queue, seed=0)
        self.collectors = dict(collectors)
        self.min_ready = None if lockstep else 1
        for domain, collector in self.collectors.items():
            collector.domain = domain

    def score_with(self, scorer: Scorer | None) -> None:
        """See `Collector.score_with`: all collectors share one scorer."""
        super().score_with(scorer)
        for collector in self.collectors.values():
            collector.score_with(scorer)
            collector.awaited = self.awaited

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Play a round of all collectors. False: no episode is running, and none may begin."""
        patience_s = patience_s if self.min_ready is None else _GLANCE_S
        ran = [collector.pump(patience_s) for collector in self.collectors.values()]
        return any(ran)

    def take_waited(self) -> float:
        return sum(collector.take_waited() for collector in self.collectors.values())

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """See `QueuePump.next_groups`; also notes the agents' figures up to here, as ``domains/lake/agent/invalid``."""
        groups = super().next_groups(version)
        self._batch |= {
            f"{place_of(domain)}/agent/{key}": value
            for domain, collector in self.collectors.items()
            for key, value in collector.figures().items()
        }
        return groups

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Give up every running episode and continue with another queue."""
        self._go_on_with(queue)
        for collector in self.collectors.values():
            collector.restart(queue)


class DomainRollouts(Collector):
    """Collects a rollout of each domain with its own collector, one decision of each in turn, so that simulators work while others act.
    Then it collects the groups of the other domains, if any; with staleness the two take turns.

    The rollouts depend on the seeds, not on the order.
    """

    def __init__(self, collectors: Mapping[str, RolloutCollector], groups: DomainCollector | None = None) -> None:
        """`collectors`: {domain: its rollout collector}; `groups`: collector of the domains that play groups."""
        super().__init__()
        self.collectors, self._groups = dict(collectors), groups or Collector()
        self.min_ready = self._groups.min_ready

    def score_with(self, scorer: Scorer | None) -> None:
        super().score_with(scorer)
        self._groups.score_with(scorer)

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        self._groups.restart(queue)
        for collector in self.collectors.values():
            collector.restart(seed_round=seed_round)

    def give_up_groups(self, queue: GroupQueue) -> None:
        self._groups.restart(queue)

    def draw(self, way: Way, *, random_before: int = 0, first: int = 0, domain: str = "") -> None:
        self.collectors[domain].draw(way, random_before=random_before, first=first)

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        """See `Collector.next_rollouts`; covers the domains that have begun (`draw`)."""
        while sum(collector.advance(version) for collector in self.collectors.values()):
            pass
        rollouts = {domain: own[""] for domain, collector in self.collectors.items() if (own := collector.next_rollouts(version))}
        self.times = _sum_of([self.collectors[domain].times for domain in rollouts])
        return rollouts

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        groups = self._groups.next_groups(version)
        self.times = _sum_of([self.times, self._groups.times])
        return groups

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """See `Collector.pump`; a queue's pump always waits, so with a patience of 0 only rollouts move on."""
        ran = patience_s > 0.0 and self._groups.pump(patience_s)
        return sum(collector.pump(0.0 if ran else patience_s) for collector in self.collectors.values()) > 0 or ran

    @property
    def keeps_weights(self) -> bool:
        return any(collector.keeps_weights for collector in self.collectors.values())

    def episodes(self) -> list[bytes]:
        """See `Collector.episodes`; covers the rollouts."""
        return [episode for collector in self.collectors.values() for episode in collector.episodes()]

    def take_up(self, episodes: Sequence[bytes]) -> None:
        left = iter(episodes)
        for collector in self.collectors.values():
            collector.take_up(list(itertools.islice(left, collector.manager.num_slots)))

    def figures(self) -> dict[str, float]:
        return self._groups.figures()

    def metrics(self) -> dict[str, float]:
        return self._groups.metrics()


def _sum_of(times: Sequence[CollectorTimes]) -> CollectorTimes:
    return CollectorTimes(sum(own.simulate_s for own in times), sum(own.act_s for own in times))
