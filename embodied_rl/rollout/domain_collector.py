"""One collector over those of several domains."""

from __future__ import annotations

from collections.abc import Mapping

from embodied_rl.rollout.domains import place_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.queue_pump import TICK_EVERY_S, QueuePump
from embodied_rl.rollout.scoring import Scorer, divided_scorer
from embodied_rl.types import EpisodeGroup

_GLANCE_S = 0.002
"""How long a collector whose slots are all busy is waited for while others may be ready."""


class DomainCollector(QueuePump):
    """Fills one queue from several collectors: each plays the groups of one domain of the queue, and none waits for another.

    ```
                        ┌── "lake" ──▶ AgentCollector ──▶ its simulators, its backend
       GroupQueue ──────┼── "sums" ──▶ AgentCollector ──▶ …
                        └── "arm"  ──▶ GroupCollector ──▶ …
    ```

    In lockstep each collector moves all of its slots once in turn, so that what is played depends only on the seeds; else whatever is
    ready moves on.
    """

    def __init__(self, collectors: Mapping[str, QueuePump], queue: GroupQueue, *, lockstep: bool) -> None:
        """`collectors`: {domain of the queue: what plays its groups}."""
        super().__init__(queue, seed=0)
        self.collectors = dict(collectors)
        self.min_ready = None if lockstep else 1
        for domain, collector in self.collectors.items():
            collector.domain = domain

    def score_with(self, scorer: Scorer | None) -> None:
        """See `Collector.score_with`: one scorer for all collectors, each of which gets its own episodes back."""
        self.scorer = scorer
        shares = [None] * len(self.collectors) if scorer is None else divided_scorer(scorer, len(self.collectors))
        for collector, share in zip(self.collectors.values(), shares, strict=True):
            collector.score_with(share)

    def pump(self, patience_s: float = TICK_EVERY_S) -> bool:
        """A round of all collectors. False: no episode is running, and none may begin."""
        patience_s = patience_s if self.min_ready is None else _GLANCE_S
        ran = [collector.pump(patience_s) for collector in self.collectors.values()]
        return any(ran)

    def take_waited(self) -> float:
        """See `QueuePump.take_waited`: of all collectors."""
        return sum(collector.take_waited() for collector in self.collectors.values())

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """See `QueuePump.next_groups`; figures of the agents are noted up to here, as ``domains/lake/agent/invalid``."""
        groups = super().next_groups(version)
        self._batch |= {
            f"{place_of(domain)}/agent/{key}": value
            for domain, collector in self.collectors.items()
            for key, value in collector.figures().items()
        }
        return groups

    def metrics(self) -> dict[str, float]:
        """Of the last batch (`batch_figures`), of its agents, and of its scores."""
        return self._common_metrics()

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Give every running episode up and go on with another queue."""
        assert queue is not None, "groups are asked for by a queue"
        self.queue = queue
        for collector in self.collectors.values():
            collector.restart(queue)

    def close(self) -> None:
        """See `Collector.close`: of all collectors."""
        for collector in self.collectors.values():
            collector.close()
