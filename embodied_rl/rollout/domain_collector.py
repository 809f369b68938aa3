"""One group queue, several collectors: each plays the groups of one domain, and none waits for another.

```
                    ┌── DomainShare("lake") ──▶ AgentCollector ──▶ its simulators, its backend
   GroupQueue ──────┼── DomainShare("sums") ──▶ AgentCollector ──▶ …
                    └── DomainShare("arm")  ──▶ GroupCollector ──▶ …
```

In lockstep each collector moves all of its slots once in turn, so that what is played depends only on the seeds; else whatever is ready
moves on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from embodied_rl.rollout.batch_figures import batch_figures
from embodied_rl.rollout.collector import Collector, CollectorTimes
from embodied_rl.rollout.domains import place_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.members import Assignment
from embodied_rl.rollout.scoring import Scorer, divided_scorer
from embodied_rl.types import Episode, EpisodeGroup

_GLANCE_S = 0.002
"""How long a collector whose slots are all busy is waited for while others may be ready."""


class DomainShare:
    """A group queue as the collector of one domain sees it. Keeps the contract of `GroupQueue`, for this one domain."""

    def __init__(self, queue: GroupQueue, domain: str) -> None:
        self._queue, self.domain = queue, domain
        self.config = queue.config

    def next_assignment(self) -> Assignment | None:
        """See `GroupQueue.next_assignment`."""
        return self._queue.next_assignment(self.domain)

    def finished(self, assignment: Assignment, episode: Episode) -> bool:
        """See `GroupQueue.finished`."""
        return self._queue.finished(assignment, episode)

    def failed(self, assignment: Assignment, reason: str) -> None:
        """See `GroupQueue.failed`."""
        self._queue.failed(assignment, reason)

    def progressed(self, assignment: Assignment) -> None:
        """See `GroupQueue.progressed`."""
        self._queue.progressed(assignment)

    def should_stop(self, assignment: Assignment) -> bool:
        """See `GroupQueue.should_stop`."""
        return self._queue.should_stop(assignment)

    def tick(self) -> list[Assignment]:
        """See `GroupQueue.tick`."""
        return self._queue.tick()

    def describe(self) -> str:
        """See `GroupQueue.describe`."""
        return self._queue.describe()


class DomainCollector(Collector):
    """Fills one queue from the collectors of its domains."""

    def __init__(self, collectors: Mapping[str, Any], queue: GroupQueue, *, lockstep: bool) -> None:
        """`collectors`: {domain of the queue: a `QueuePump`}, whatever queue they were made with."""
        self.collectors = dict(collectors)
        self.queue, self._lockstep, self.min_ready = queue, lockstep, None if lockstep else 1
        self.times = CollectorTimes()
        self._figures: dict[str, float] = {}

    def score_with(self, scorer: Scorer | None) -> None:
        """See `Collector.score_with`: one scorer for all collectors, each of which gets its own episodes back."""
        self.scorer = scorer
        shares = [None] * len(self.collectors) if scorer is None else divided_scorer(scorer, len(self.collectors))
        for collector, share in zip(self.collectors.values(), shares, strict=True):
            collector.score_with(share)

    def pump(self) -> bool:
        """A round of all collectors. False: no episode is running, and none may begin."""
        ran = [self._pump(collector) for collector in self.collectors.values()]
        return any(ran)

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """Play until the queue has a batch for the weights `version`.

        Raises:
            SimFault: see EnvManager.
            BatchNeverFullError: the queue rejects too many groups, or waited too long.
        """
        for collector in self.collectors.values():
            collector.take_waited()
        started = time.perf_counter()
        while (groups := self.queue.take(version)) is None:
            if not self.pump():
                raise RuntimeError(f"No episode is running and no batch is full. {self.queue.describe()}")
        waited = sum(collector.take_waited() for collector in self.collectors.values())
        self.times = CollectorTimes(waited, time.perf_counter() - started - waited)
        self._figures = batch_figures(self.queue, groups, version) | {
            f"{place_of(domain)}/agent/{key}": value
            for domain, collector in self.collectors.items()
            for key, value in collector.figures().items()
        }
        return groups

    def metrics(self) -> dict[str, float]:
        """Of the last batch (`batch_figures`), of its scores, and of the agents up to it (`AgentCollector.figures`):
        ``domains/lake/agent/invalid``."""
        return {**self._figures, **({} if self.scorer is None else self.scorer.metrics())}

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Give every running episode up and go on with another queue."""
        assert queue is not None, "groups are asked for by a queue"
        self.queue = queue
        for domain, collector in self.collectors.items():
            collector.restart(DomainShare(queue, domain))

    def _pump(self, collector: Any) -> bool:
        if self._lockstep:
            return bool(collector.pump())
        return bool(collector.pump(_GLANCE_S))
