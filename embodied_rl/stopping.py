"""A run that is asked to end while it waits for somebody who does not answer.

Whatever waits says so (``with waiting:``); a `Stopper` then ends that wait, and none but a wait: between two of them a collector or a queue
may be in the middle of a change.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class WaitStopped(BaseException):
    """What was waited for is given up, because the run is to end. No `Exception`: nobody on the way is to take it for a fault."""


class _Waiting:
    """How many waits the main thread is inside of; those of other threads are not ended."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_over = False
        """The next one is not to begin."""

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self.is_over:
                self.is_over = False
                raise WaitStopped
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self.depth -= 1


waiting = _Waiting()
"""Around a wait for another process, thread or machine; costs nothing worth measuring beside one that blocks."""


class Stopper:
    """Ends the waits of a `stoppable` block some seconds after `stop`; of the main thread, which alone gets signals."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: what is nearly there may still come."""
        self._patience_s = patience_s
        self._stopped = self._inside = False

    def stop(self) -> None:
        """To be called by a handler of signals."""
        self._stopped = True
        if self._inside:
            signal.setitimer(signal.ITIMER_REAL, self._patience_s)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Raises WaitStopped out of a wait inside; in a thread that gets no signals, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: Any = signal.signal(signal.SIGALRM, self._on_alarm)
        self._inside, waiting.depth, waiting.is_over = True, 0, False  # one that was ended may not have been counted out
        try:
            if self._stopped:
                self.stop()
            yield
        finally:
            self._inside = waiting.is_over = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if not self._inside:
            return
        self._inside = False  # once
        if waiting.depth > 0:
            raise WaitStopped
        waiting.is_over = True
