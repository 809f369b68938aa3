"""The core of the simulation: a clock of events, and stations at which jobs wait for servers."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class EventClock:
    """Simulated seconds; callbacks run in the order of their times, equal times in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call `callback` in `delay_s` >= 0 seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, callback, arguments))

    def run(self, until: Callable[[], bool]) -> bool:
        """Let time pass until `until()` holds after an event; False when there was nothing left to happen before that."""
        while not until():
            if not self._events:
                return False
            self.now_s, _, callback, arguments = heapq.heappop(self._events)
            callback(*arguments)
        return True


class Station:
    """Servers that take waiting jobs in the order they came: one at a time, or all that wait, evenly over the idle servers.

    `num_servers` may change while it runs: a server that is to leave finishes its batch first.
    """

    def __init__(
        self,
        clock: EventClock,
        num_servers: int,
        seconds: Callable[[Sequence[Any]], float],
        done: Callable[[Any], None],
        *,
        batches: bool = False,
        most: int | None = None,
    ) -> None:
        """
        Args:
            seconds: of a batch of jobs (of length 1 without `batches`).
            done: called with each job when its batch is served.
            batches: an idle server takes its share of all that waits.
            most: jobs of one batch; None: no limit.
        """
        self._clock, self._seconds, self._done = clock, seconds, done
        self._batches, self._most = batches, most
        self.num_servers = num_servers
        self.num_busy = 0
        self.busy_s = 0.0
        """Server-seconds that were worked, counted when a batch begins."""
        self._waiting: deque[Any] = deque()
        self._starting = False
        self._left: Callable[[], None] | None = None

    def put(self, job: object) -> None:
        """Let a job wait for a server."""
        self._waiting.append(job)
        if not self._starting and self.num_busy < self.num_servers:
            # Those that come at the same moment belong into the same batch.
            self._starting = True
            self._clock.after(0.0, self._start)

    def resize(self, num_servers: int, left: Callable[[], None] | None = None) -> None:
        """Have so many servers from now on; `left` is called (once) when those that are to leave have finished their batches."""
        self.num_servers, self._left = num_servers, left
        self._tell_left()
        if self._waiting and not self._starting and self.num_busy < num_servers:
            self._starting = True
            self._clock.after(0.0, self._start)

    def _start(self) -> None:
        self._starting = False
        while self._waiting and self.num_busy < self.num_servers:
            idle = self.num_servers - self.num_busy
            count = -(-len(self._waiting) // idle) if self._batches else 1
            count = count if self._most is None else min(count, self._most)
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
        if self._waiting and not self._starting and self.num_busy < self.num_servers:
            self._starting = True
            self._clock.after(0.0, self._start)

    def _tell_left(self) -> None:
        if self._left is not None and self.num_busy <= self.num_servers:
            left, self._left = self._left, None
            self._clock.after(0.0, left)
