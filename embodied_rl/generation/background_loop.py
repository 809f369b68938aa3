"""An asyncio loop in its own thread, for clients and engines that are asynchronous by nature."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from embodied_rl.generation.tokens import Completion, GenerationRequest, check_new_ids
from embodied_rl.stopping import waiting

Result = TypeVar("Result")

_END_S = 60.0
"""For what was cancelled to end, on a machine that stands still for a while."""


class BackgroundLoop:
    """Runs coroutines for callers that are not asynchronous."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Begin without waiting."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Wait for the result. Raises what the coroutine raises, or TimeoutError."""
        future = self.start(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, let it end, stop the thread. May be called twice."""
        if self.loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        self.call(cancel_all(), _END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)
        self.loop.close()


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
