"""One thread that talks to a token backend, for many waiting threads."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any

from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, TokenCache

_POLL_S = 0.02
"""Longest delay of new requests by a decoding step of those in flight."""
_LOOK_S = 0.1
"""Seconds between a waiting thread's checks that its client is still there."""
_END_S = 60.0
"""Seconds for the backend's present step to end, after which the backend returns to its owner."""


@dataclass(frozen=True)
class _Asked:
    request: GenerationRequest
    future: Future[Completion]
    arriving: queue.SimpleQueue[list[int] | None] | None = None
    """Queue for the growing tokens, with None at the end; None: the client does not stream."""


@dataclass(frozen=True)
class _Call:
    function: Callable[[TokenBackend], Any]
    future: Future[Any]


class BackendPump(TokenCache):
    """Makes every call of a backend in its own thread, so that a single-threaded backend serves any number of threads, and its trainer.

    The backend stays its owner's: `close` does not close it.
    """

    def __init__(self, backend: TokenBackend) -> None:
        self._backend = backend
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[_Asked | _Call | None] = queue.SimpleQueue()
        self._in_flight: dict[int, Future[Completion]] = {}
        self._watched: dict[int, queue.SimpleQueue[list[int] | None]] = {}
        self._num_sent: dict[int, int] = {}
        self._closed = False
        self._entry = threading.Lock()
        """Held while a request enters and while the thread closes: earlier requests are answered, later ones refused."""
        self._thread = threading.Thread(target=self._run, name="token pump", daemon=True)
        self._thread.start()

    def stream(
        self,
        request: GenerationRequest,
        gone: Callable[[], bool] = lambda: False,
        enough: Callable[[list[int]], bool] | None = lambda tokens: False,
    ) -> Generator[list[int] | Completion]:
        """Answer one request (its id is replaced by one of ours): repeatedly its token ids so far, if the backend reports them; then the
        completion.

        Args:
            gone: checked now and then; True aborts the request, as closing the generator does.
            enough: aborts the request once it is True for the tokens so far. None: there is only the completion.

        Raises UserError: the backend cannot fulfil the request; RuntimeError: the pump was closed, or the backend has died.
        """
        number = next(self._ids)
        arriving: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        future: Future[Completion] = Future()
        future.add_done_callback(lambda _: arriving.put(None))
        self._put(_Asked(replace(request, request_id=number), future, arriving if enough is not None else None))
        abort: Callable[[TokenBackend], None] = lambda backend: backend.abort([number])  # noqa: E731
        aborted, looked_s = False, time.monotonic()
        try:
            while True:
                if not aborted and time.monotonic() - looked_s >= _LOOK_S:
                    looked_s = time.monotonic()
                    if gone():
                        aborted = True
                        self.call(abort)
                try:
                    tokens = arriving.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if tokens is None:
                    break
                if not aborted and enough is not None and enough(tokens):
                    aborted = True
                    self.call(abort)
                yield tokens
            yield future.result()
        except CancelledError:
            raise RuntimeError("The proxy was closed while a request was waiting.") from None
        finally:
            if not future.done():
                with contextlib.suppress(RuntimeError):
                    self.call(abort)

    def call(self, function: Callable[[TokenBackend], Any]) -> Any:
        """Run a function with the backend between two polls, in the pump's thread: to load weights, say.

        Raises the function's exception, and RuntimeError: the pump was closed.
        """
        future: Future[Any] = Future()
        self._put(_Call(function, future))
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("The proxy was closed while a request waited for its backend.") from None

    # ---- the backend's weights and cache ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._backend.version

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; requests in flight continue with the new weights."""
        self.call(lambda backend: backend.load_weights(version, tensors))

    @property
    def can_free_memory(self) -> bool:
        return self._backend.can_free_memory

    @property
    def device(self) -> object:
        return self._backend.device

    @property
    def cache_bytes(self) -> int:
        return int(self.call(lambda backend: backend.cache_bytes))

    def release_memory(self) -> int:
        return int(self.call(lambda backend: backend.release_memory()))

    def restore_memory(self) -> None:
        self.call(lambda backend: backend.restore_memory())

    def close(self) -> None:
        """End the thread; waiting callers get a RuntimeError. May be called twice."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join(_END_S)

    def _put(self, item: _Asked | _Call) -> None:
        with self._entry:
            if self._closed:
                raise RuntimeError("The proxy is closed.")
            self._inbox.put(item)

    def _run(self) -> None:
        try:
            while self._take_in():
                self._poll()
        except BaseException as error:
            for future in self._in_flight.values():
                future.set_exception(_dead(error))
            self._in_flight.clear()
            raise
        finally:
            with self._entry:
                self._closed = True
            self._drop_all()

    def _take_in(self) -> bool:
        """Accept arrived requests, waiting for one if nothing is in flight; returns False at the end."""
        item = self._inbox.get() if not self._in_flight else None
        while not self._closed:
            if isinstance(item, _Asked):
                self._submit(item)
            elif item is not None:
                _fulfil(item.future, lambda call=item: call.function(self._backend))  # type: ignore[misc]
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True
        if item is not None:  # taken out, but not begun
            item.future.cancel()
        return False

    def _submit(self, asked: _Asked) -> None:
        try:
            self._backend.submit([asked.request])
        except ValueError as error:  # includes UserError: this request is refused, others continue
            asked.future.set_exception(error)
        except BaseException as error:
            asked.future.set_exception(_dead(error))
            raise
        else:
            self._in_flight[asked.request.request_id] = asked.future
            if asked.arriving is not None:
                self._watched[asked.request.request_id] = asked.arriving

    def _poll(self) -> None:
        if not self._in_flight:
            return
        completions = self._backend.poll(1, _POLL_S)
        for completion in completions:
            future = self._in_flight.pop(completion.request_id, None)
            self._watched.pop(completion.request_id, None)
            self._num_sent.pop(completion.request_id, None)
            if future is not None:
                future.set_result(completion)
        for number, tokens in self._backend.sampled_so_far(list(self._watched)).items() if self._watched else ():
            if len(tokens) > self._num_sent.get(number, 0):
                self._num_sent[number] = len(tokens)
                self._watched[number].put(tokens)
        if not completions:
            time.sleep(0.001)  # a paused backend answers at once

    def _drop_all(self) -> None:
        for future in self._in_flight.values():
            future.cancel()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item.future.cancel()


def _dead(error: BaseException) -> RuntimeError:
    return RuntimeError(f"The generation backend has died ({type(error).__name__}: {error}).")


def _fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
