"""Hosts that are lent to training and come back, as the rollout worker of a multiplexed run sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from embodied_rl.hybrid.host_times import HostState, HostTimes, Span
from embodied_rl.hybrid.multiplex import Multiplexer


class DeviceLease:
    """The multiplexer with its figures.

    ```
     a batch is full ── shrink ──▶ vacating ── vacated, lend ──▶ training elsewhere ── weights come, take_back ──▶ all generate
    ```
    """

    def __init__(
        self,
        multiplexer: Multiplexer,
        *,
        keep_spans: bool = False,
        on_lent: Callable[[Collection[int]], None] = lambda hosts: None,
        on_back: Callable[[Collection[int]], None] = lambda hosts: None,
    ) -> None:
        """
        Args:
            keep_spans: for a timeline.
            on_lent: called with the numbers of empty hosts that go to training; frees their memory.
            on_back: called with the numbers of hosts that are about to generate again.
        """
        self.multiplexer = multiplexer
        self.times = HostTimes(len(multiplexer.hosts), keep_spans=keep_spans)
        self.num_shrinks = 0
        self.is_lent = False
        """Training has the hosts."""
        self._on_lent, self._on_back = on_lent, on_back
        self._asked_at = 0.0
        self._vacate_s = 0.0

    def shrink(self) -> None:
        """Have the hosts vacated that training is to have; play on until they are `vacated`, then `lend` them."""
        self._asked_at = time.perf_counter()
        self.num_shrinks += 1
        self.multiplexer.shrink()
        self.note()

    @property
    def vacated(self) -> bool:
        return self.multiplexer.vacated

    def lend(self) -> None:
        """Nothing is played on them any more: training may begin."""
        assert self.vacated, "episodes are being played there"
        self._vacate_s = time.perf_counter() - self._asked_at
        self._on_lent(self.multiplexer.train_on)
        self.is_lent = True
        self.note()

    def take_back(self) -> None:
        """All hosts generate again, if some did not."""
        if not self.multiplexer.shrunk:
            return
        if self.is_lent:
            self._on_back(self.multiplexer.train_on)
        self.is_lent = False
        self.multiplexer.expand()
        self.note()

    def note(self) -> None:
        """Record the hosts' states; call it after every change of which hosts play."""
        self.times.note([self._state(number) for number in range(len(self.multiplexer.hosts))])

    def figures(self) -> dict[str, float]:
        """Counts of the worker's whole life, and times since the last call."""
        counts = self.multiplexer.counts()
        return {
            "multiplex/shrinks": float(self.num_shrinks),
            "multiplex/moved": float(counts.moves),
            "multiplex/parked": float(counts.parked),
            "multiplex/running": float(counts.running),
            "multiplex/vacate_s": self._vacate_s,
            **self.times.take(),
        }

    def spans(self) -> list[Span]:
        """Bars of a timeline since the last call."""
        return self.times.take_spans()

    def _state(self, number: int) -> HostState:
        if self.is_lent and number in self.multiplexer.train_on:
            return "training"
        return "generation" if self.multiplexer.hosts[number].running else "idle"
