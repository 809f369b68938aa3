"""What backends that sample inside `poll` share: the wait for enough, the pause, and turns for other threads between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from embodied_rl.generation.tokens import Completion, TokenBackend

_YIELD_S = 0.0005


class Stepwise(TokenBackend):
    """Half of a `TokenBackend`: a subclass gives `_step` and `num_in_flight`, and appends to `_ready`."""

    def __init__(self) -> None:
        self._ready: list[Completion] = []
        self._paused = False
        self._lock = threading.Lock()
        self._callers = 0
        self._callers_lock = threading.Lock()

    @property
    def num_in_flight(self) -> int:
        """Requests that are waited for, those not yet begun included."""
        raise NotImplementedError

    def _step(self) -> None:
        """Sample one token for each active request."""
        raise NotImplementedError

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`: runs steps until enough is ready, at least one of them."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._enough(min_ready) and not self._paused:
                    self._step()
                over = deadline is not None and time.monotonic() >= deadline
                if self._enough(min_ready) or over or (self._paused and deadline is None):
                    ready, self._ready = self._ready, []
                    return ready
            self._let_others_in()

    def pause(self) -> None:
        with self._turn():
            self._paused = True

    def resume(self) -> None:
        with self._turn():
            self._paused = False

    def _enough(self, min_ready: int) -> bool:
        return len(self._ready) >= max(min_ready, 1) or self.num_in_flight == 0

    def _let_others_in(self) -> None:
        """A lock that is let go and taken again at once would hardly ever be had by another thread."""
        if self._paused:
            time.sleep(_YIELD_S)
        while self._callers:
            time.sleep(_YIELD_S)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold still between two steps of a `poll` that may run in another thread."""
        with self._callers_lock:
            self._callers += 1
        try:
            with self._lock:
                yield
        finally:
            with self._callers_lock:
                self._callers -= 1
