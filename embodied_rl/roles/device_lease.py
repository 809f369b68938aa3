"""Hosts that are lent to training and come back, as the rollout worker of a multiplexed run sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from embodied_rl.hybrid.host_times import HostState, HostTimes, Span
from embodied_rl.hybrid.multiplex import Host, Multiplexer
from embodied_rl.roles.hosts import HostPlan


class DeviceLease:
    """Hosts of one run, their multiplexers with their figures: each domain's simulators, each token backend has its part of every host.

    ```
     a batch is full ── shrink ──▶ vacating ── vacated, lend ──▶ training elsewhere ── weights come, take_back ──▶ all generate
    ```
    """

    def __init__(self, plan: HostPlan, *, keep_spans: bool = False) -> None:
        """`keep_spans`: for a timeline."""
        self.plan = plan
        self.multiplexers: list[Multiplexer] = []
        self.times = HostTimes(plan.num_hosts, keep_spans=keep_spans)
        self.num_shrinks = 0
        self.is_lent = False
        """Training has the hosts."""
        self._on_lent: list[Callable[[Collection[int]], None]] = []
        self._on_back: list[Callable[[Collection[int]], None]] = []
        self._asked_at = 0.0
        self._vacate_s = 0.0

    def share(
        self,
        hosts: Sequence[Host],
        on_lent: Callable[[Collection[int]], None] = lambda hosts: None,
        on_back: Callable[[Collection[int]], None] = lambda hosts: None,
    ) -> Multiplexer:
        """What plays on these parts of the hosts, in their order; it is vacated with the others.

        Args:
            on_lent: called with the numbers of empty hosts that go to training; frees their memory.
            on_back: called with the numbers of hosts that are about to generate again.

        Raises UserError as `Multiplexer` does.
        """
        self.multiplexers.append(Multiplexer(hosts, self.plan.train_on))
        self._on_lent.append(on_lent)
        self._on_back.append(on_back)
        return self.multiplexers[-1]

    def shrink(self) -> None:
        """Have the hosts vacated that training is to have; play on until they are `vacated`, then `lend` them."""
        self._asked_at = time.perf_counter()
        self.num_shrinks += 1
        for multiplexer in self.multiplexers:
            multiplexer.shrink()
        self.note()

    @property
    def vacated(self) -> bool:
        return all(multiplexer.vacated for multiplexer in self.multiplexers)

    def lend(self) -> None:
        """Nothing is played on them any more: training may begin."""
        assert self.vacated, "episodes are being played there"
        self._vacate_s = time.perf_counter() - self._asked_at
        for lend in self._on_lent:
            lend(self.plan.train_on)
        self.is_lent = True
        self.note()

    def take_back(self) -> None:
        """All hosts generate again, if some did not."""
        if not any(multiplexer.shrunk for multiplexer in self.multiplexers):
            return
        for restore in self._on_back if self.is_lent else ():
            restore(self.plan.train_on)
        self.is_lent = False
        for multiplexer in self.multiplexers:
            multiplexer.expand()
        self.note()

    def note(self) -> None:
        """Record the hosts' states; call it after every change of which hosts play."""
        self.times.note([self._state(number) for number in range(self.plan.num_hosts)])

    def figures(self) -> dict[str, float]:
        """Counts of the worker's whole life, and times since the last call."""
        counts = [multiplexer.counts() for multiplexer in self.multiplexers]
        return {
            "multiplex/shrinks": float(self.num_shrinks),
            "multiplex/moved": float(sum(one.moves for one in counts)),
            "multiplex/parked": float(sum(one.parked for one in counts)),
            "multiplex/running": float(sum(one.running for one in counts)),
            "multiplex/vacate_s": self._vacate_s,
            **self.times.take(),
        }

    def spans(self) -> list[Span]:
        """Bars of a timeline since the last call."""
        return self.times.take_spans()

    def _state(self, number: int) -> HostState:
        if self.is_lent and number in self.plan.train_on:
            return "training"
        return "generation" if any(multiplexer.hosts[number].running for multiplexer in self.multiplexers) else "idle"
