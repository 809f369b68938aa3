"""Where backends that work in another thread leave their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from embodied_rl.generation.tokens import Completion, GenerationRequest, check_new_ids
from embodied_rl.stopping import waiting


class Mailbox:
    """Counts requests in flight and hands out completions; for one thread that answers and any number that ask."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._in_flight: set[int] = set()
        self._ready: list[Completion] = []
        self._paused = False
        self._broken: BaseException | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def paused(self) -> bool:
        return self._paused

    def expect(self, requests: Sequence[GenerationRequest]) -> None:
        """Take note of new requests. Raises UserError when an id is in flight already."""
        with self._condition:
            check_new_ids(requests, self._in_flight)
            self._in_flight.update(request.request_id for request in requests)

    def put(self, completion: Completion) -> None:
        """An answer. A request that has had one already (it was aborted while it ended) gets no second."""
        with self._condition:
            if completion.request_id not in self._in_flight:
                return
            self._in_flight.discard(completion.request_id)
            self._ready.append(completion)
            self._condition.notify_all()

    def expects(self, request_ids: Iterable[int]) -> list[int]:
        """Those of the ids that are in flight."""
        with self._condition:
            return [request_id for request_id in request_ids if request_id in self._in_flight]

    def set_paused(self, paused: bool) -> None:
        with self._condition:
            self._paused = paused
            self._condition.notify_all()

    def break_down(self, error: BaseException) -> None:
        """The thread that answers has died: `take` raises RuntimeError from `error`."""
        with self._condition:
            self._broken = error
            self._condition.notify_all()

    def take(self, min_ready: int, timeout_s: float | None) -> list[Completion]:
        """What `TokenBackend.poll` returns. Raises RuntimeError, from its cause, when the thread that answers has died."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while True:
                if self._broken is not None:
                    raise RuntimeError("The generation backend has died.") from self._broken
                left = None if deadline is None else deadline - time.monotonic()
                enough = len(self._ready) >= max(min_ready, 1) or not self._in_flight
                if enough or (left is not None and left <= 0) or (self._paused and deadline is None):
                    ready, self._ready = self._ready, []
                    return ready
                with waiting:
                    self._condition.wait(left)
