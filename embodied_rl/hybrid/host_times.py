"""What each host of a multiplexed run did when: it generated, was lent to training, or stood idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

HostState = Literal["generation", "training", "idle"]
Span: TypeAlias = tuple[str, str, int, int]
"""(role, name, begin, end) in nanoseconds of `time.perf_counter_ns`, which is one clock for all processes of a machine."""


class HostTimes:
    """Adds up the time of each state, over all hosts; call `note` at every change."""

    def __init__(self, num_hosts: int, *, keep_spans: bool = False, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """`keep_spans`: for a timeline; `take_spans` hands them out."""
        self._clock_ns, self._keep_spans = clock_ns, keep_spans
        self._states: list[HostState] = ["idle"] * num_hosts
        self._since_ns = [clock_ns()] * num_hosts
        self._last_ns = clock_ns()
        self._of: dict[HostState, int] = {"generation": 0, "training": 0, "idle": 0}
        self._both_ns = 0
        self._spans: list[Span] = []

    def note(self, states: Sequence[HostState]) -> None:
        """The hosts' states from now on."""
        now = self._clock_ns()
        passed, self._last_ns = now - self._last_ns, now
        for state in self._states:
            self._of[state] += passed
        if {"generation", "training"} <= set(self._states):
            self._both_ns += passed
        for number, (before, after) in enumerate(zip(self._states, states, strict=True)):
            if before != after:
                self._keep(number, before, now)
        self._states = list(states)

    def take(self) -> dict[str, float]:
        """Since the last call: ``multiplex/overlap_s`` (some hosts generated while others trained), and ``multiplex/bubble`` (idle share of
        all hosts' time)."""
        self.note(self._states)
        total = sum(self._of.values())
        figures = {"multiplex/overlap_s": self._both_ns / 1e9, "multiplex/bubble": self._of["idle"] / total if total else 0.0}
        self._of, self._both_ns = {"generation": 0, "training": 0, "idle": 0}, 0
        return figures

    def take_spans(self) -> list[Span]:
        """What ended since the last call; states that go on are cut here, so that nothing is late."""
        self.note(self._states)
        for number, state in enumerate(self._states):
            self._keep(number, state, self._last_ns)
        spans, self._spans = self._spans, []
        return spans

    def _keep(self, number: int, state: HostState, now_ns: int) -> None:
        if self._keep_spans and state != "idle" and now_ns > self._since_ns[number]:
            self._spans.append((f"host {number}", state, self._since_ns[number], now_ns))
        self._since_ns[number] = now_ns
