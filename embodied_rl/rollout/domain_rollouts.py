"""Fixed rollouts of several domains at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from embodied_rl.rollout.collector import PATIENCE_S, Collector, CollectorTimes, RolloutCollector
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.types import Rollout


class DomainRollouts(Collector):
    """A rollout of each domain by its own collector, a decision of each in turn: while the simulators of one answer, others are acted for.

    What is collected depends on the seeds, not on the order.
    """

    def __init__(self, collectors: Mapping[str, RolloutCollector]) -> None:
        """`collectors`: {domain: what plays its rollouts}."""
        super().__init__()
        self.collectors = dict(collectors)

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        for collector in self.collectors.values():
            collector.restart(seed_round=seed_round)

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        while sum(collector.advance(version) for collector in self.collectors.values()):
            pass
        rollouts = {domain: collector.next_rollout(version) for domain, collector in self.collectors.items()}
        times = [collector.times for collector in self.collectors.values()]
        self.times = CollectorTimes(sum(own.simulate_s for own in times), sum(own.act_s for own in times))
        return rollouts

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        return sum(collector.pump(patience_s) for collector in self.collectors.values()) > 0

    @property
    def keeps_weights(self) -> bool:
        return any(collector.keeps_weights for collector in self.collectors.values())

    def episodes(self) -> list[bytes]:
        """See `Collector.episodes`: domain after domain."""
        return [episode for collector in self.collectors.values() for episode in collector.episodes()]

    def take_up(self, episodes: Sequence[bytes]) -> None:
        left = iter(episodes)
        for collector in self.collectors.values():
            collector.take_up(list(itertools.islice(left, collector.manager.num_slots)))

    def close(self) -> None:
        for collector in self.collectors.values():
            collector.close()
