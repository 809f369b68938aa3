"""An asyncio loop in its own thread, for clients and engines that are asynchronous by nature."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

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
