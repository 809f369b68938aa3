"""One thread that talks to a token backend, for many waiting threads."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, TokenCache

_POLL_S = 0.02
"""Longest delay of new requests by a decoding step of those in flight."""
_LOOK_S = 0.1
"""Seconds between a waiting thread's checks that its client is still there."""
_END_S = 60.0
"""Seconds for the backend's present step to end, after which the backend returns to its owner."""


class BackendDiedError(RuntimeError):
    """The backend raised something that no request is to blame for."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"The generation backend has died ({type(cause).__name__}: {cause}).")


@dataclass
class _Asked:
    """A request in flight."""

    request: GenerationRequest
    watched: bool
    """Whether `arriving` gets its tokens as they grow."""
    future: Future[Completion] = field(default_factory=Future)
    arriving: queue.SimpleQueue[list[int] | None] = field(default_factory=queue.SimpleQueue)
    """Tokens so far, repeatedly; None: the future is done."""
    num_sent: int = 0


class BackendPump(TokenCache):
    """Makes every call of a backend in its own thread, so that a single-threaded backend serves any number of threads, and its trainer.

    The backend stays its owner's: `close` does not close it.
    """

    def __init__(self, backend: TokenBackend) -> None:
        self._backend = backend
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[Callable[[TokenBackend], Any], Future[Any]] | None] = queue.SimpleQueue()
        """Calls, and the futures of their results; None: the end."""
        self._in_flight: dict[int, _Asked] = {}
        self._closed = False
        self._entry = threading.Lock()
        """Held while a call enters and while the thread closes: earlier calls are answered, later ones refused."""
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
        asked = _Asked(replace(request, request_id=number), watched=enough is not None)
        asked.future.add_done_callback(lambda _: asked.arriving.put(None))
        self.call(functools.partial(self._submit, asked))
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
                    tokens = asked.arriving.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if tokens is None:
                    break
                if not aborted and enough is not None and enough(tokens):
                    aborted = True
                    self.call(abort)
                yield tokens
            yield asked.future.result()
        except CancelledError:
            raise RuntimeError("The proxy was closed while a request was waiting.") from None
        finally:
            if not asked.future.done():
                with contextlib.suppress(RuntimeError):
                    self.call(abort)

    def call(self, function: Callable[[TokenBackend], Any]) -> Any:
        """Run a function with the backend between two polls, in the pump's thread: to load weights, say.

        Raises the function's exception, and RuntimeError: the pump was closed.
        """
        future: Future[Any] = Future()
        with self._entry:
            if self._closed:
                raise RuntimeError("The proxy is closed.")
            self._inbox.put((function, future))
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

    def _run(self) -> None:
        try:
            while self._take_in():
                self._poll()
        except BaseException as error:
            for asked in self._in_flight.values():
                asked.future.set_exception(error if isinstance(error, BackendDiedError) else BackendDiedError(error))
            self._in_flight.clear()
            raise
        finally:
            with self._entry:
                self._closed = True
            self._drop_all()

    def _take_in(self) -> bool:
        """Make the calls that arrived, waiting for one if nothing is in flight; returns False at the end."""
        item = self._inbox.get() if not self._in_flight else None
        while not self._closed:
            if item is not None:
                function, future = item
                try:
                    future.set_result(function(self._backend))
                except BaseException as error:
                    future.set_exception(error)
                    if isinstance(error, BackendDiedError):
                        raise
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True
        if item is not None:  # taken out, but not begun
            item[1].cancel()
        return False

    def _submit(self, asked: _Asked, backend: TokenBackend) -> None:
        try:
            backend.submit([asked.request])
        except ValueError:  # includes UserError: this request is refused, others continue
            raise
        except BaseException as error:
            raise BackendDiedError(error) from error
        self._in_flight[asked.request.request_id] = asked

    def _poll(self) -> None:
        if not self._in_flight:
            return
        completions = self._backend.poll(1, _POLL_S)
        for completion in completions:
            if (ended := self._in_flight.pop(completion.request_id, None)) is not None:
                ended.future.set_result(completion)
        watched = [number for number, asked in self._in_flight.items() if asked.watched]
        for number, tokens in self._backend.sampled_so_far(watched).items() if watched else ():
            asked = self._in_flight[number]
            if len(tokens) > asked.num_sent:
                asked.num_sent = len(tokens)
                asked.arriving.put(tokens)
        if not completions:
            time.sleep(0.001)  # a paused backend answers at once

    def _drop_all(self) -> None:
        for asked in self._in_flight.values():
            asked.future.cancel()
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._inbox.get_nowait()) is not None:
                    item[1].cancel()
