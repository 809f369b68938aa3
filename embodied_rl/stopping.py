"""Ends a run that waits for a process, thread or machine that does not answer.

Waiting code marks its wait (``with waiting:``). A `Stopper` interrupts that wait and nothing else, because between two waits a collector or
a queue may be in the middle of a change.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.5
"""Seconds between two signals to a wait: one that comes a moment before the wait's system call does not interrupt it."""


class WaitStopped(BaseException):
    """The run must end, so its wait is given up. Not an `Exception`, so that no handler of faults on the way catches it."""


class _Waiting:
    """Number of nested waits of the main thread; other threads' waits are not ended."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_over = False
        """Whether the next wait must not begin."""

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
"""Context around a wait for another process, thread or machine; its cost is negligible beside a blocking wait."""


def uncounted_s(since_look_s: float, limit_s: float) -> float:
    """Seconds since the last look at a wait that its limit does not count: all beyond half of the limit. Everything may have stood still (a
    pause of the machine, a suspended job), and what is waited for with it."""
    return max(0.0, since_look_s - limit_s / 2)


class Stopper:
    """Ends the waits of a `stoppable` block some seconds after `stop`; only in the main thread, which gets the signals.

    SIGURG wakes the main thread. Its default action is nothing, so a late one does no harm. SIGALRM would need the process's only alarm
    clock, which other code may use.
    """

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: seconds before a wait is ended, because its result may be close."""
        self._patience_s = patience_s
        self.asked = False
        """Whether the first signal has come: the run must end."""
        self.gave_up = False
        """Whether a wait was ended for it."""
        self._stopped = self._inside = False
        self._number = 0
        """Number of the current `stoppable` block, so that a thread of `stop` for an earlier block does not end this one."""

    def stop(self) -> None:
        """Called by a signal handler."""
        self._stopped = True
        if self._inside:
            # `threading.Thread` would take a lock that the interrupted code may hold.
            _thread.start_new_thread(self._knock_later, (self._number,))

    @contextmanager
    def ending_in_order(self) -> Iterator[None]:
        """Inside, the first Ctrl-C (or SIGTERM) sets `asked` and ends long waits, which ends this block (`gave_up`); the second raises
        KeyboardInterrupt."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            self.stop()

        previous: dict[signal.Signals, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, on_signal)
        except ValueError:  # not the main thread: the calling program handles signals
            pass
        try:
            yield
        except WaitStopped:
            self.gave_up = True
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Raise WaitStopped from a wait inside; does nothing in a thread that gets no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGURG, self._on_knock)
        self._number += 1
        self._inside, waiting.depth, waiting.is_over = True, 0, False  # an interrupted wait may not have been counted out
        try:
            if self._stopped:
                self.stop()
            yield
        finally:
            self._inside = waiting.is_over = False
            signal.signal(signal.SIGURG, before or signal.SIG_DFL)

    def _knock_later(self, number: int) -> None:
        time.sleep(self._patience_s)
        while self._inside and number == self._number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            time.sleep(_AGAIN_S)

    def _on_knock(self, number: int, frame: FrameType | None) -> None:
        if not (self._inside and self._stopped):  # not a signal of this Stopper
            return
        self._inside = False  # once
        if waiting.depth > 0:
            raise WaitStopped
        waiting.is_over = True
