"""One token backend for several callers: each `TokenView` sees only its own requests and numbers them freely."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, check_new_ids


class SharedTokens:
    """A backend that callers use through `view`s; for one thread."""

    def __init__(self, backend: TokenBackend) -> None:
        self.backend = backend
        self._owners: dict[int, tuple[TokenView, int]] = {}
        self._next_id = 0

    def view(self) -> TokenView:
        """A `TokenView` for another caller."""
        return TokenView(self)

    def submit(self, view: TokenView, requests: Sequence[GenerationRequest]) -> dict[int, int]:
        """{the view's request id: the backend's} of what is now in flight."""
        numbers = {request.request_id: self._next_id + index for index, request in enumerate(requests)}
        self._next_id += len(requests)
        self.backend.submit([replace(request, request_id=numbers[request.request_id]) for request in requests])
        self._owners |= {number: (view, own) for own, number in numbers.items()}
        return numbers

    def poll(self, timeout_s: float | None) -> None:
        """Poll the backend until any completion is ready, and give each to the view that submitted it."""
        for completion in self.backend.poll(min_ready=1, timeout_s=timeout_s):
            view, own = self._owners.pop(completion.request_id)
            view.take(replace(completion, request_id=own))


class TokenView(TokenBackend):
    """One caller's view of a shared backend. Implements `TokenBackend`."""

    def __init__(self, shared: SharedTokens) -> None:
        self._shared = shared
        self._numbers: dict[int, int] = {}
        self._ready: list[Completion] = []

    @property
    def version(self) -> int:
        return self._shared.backend.version

    @property
    def can_constrain(self) -> bool:
        return self._shared.backend.can_constrain

    def take(self, completion: Completion) -> None:
        """One of its requests has ended."""
        del self._numbers[completion.request_id]
        self._ready.append(completion)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if requests:
            check_new_ids(requests, self._numbers)
            self._numbers |= self._shared.submit(self, requests)

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; what is ready for others meanwhile waits for them."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        asked = False
        while self._numbers and (len(self._ready) < min_ready or not asked):
            left = None if until is None else max(until - time.monotonic(), 0.0)
            if asked and left == 0.0:
                break
            in_flight = len(self._numbers)
            self._shared.poll(left if len(self._ready) < min_ready else 0.0)
            if asked and left is None and len(self._numbers) == in_flight and not self._ready:
                break  # paused: a wait without a limit returns with what is there
            asked = True
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        self._shared.backend.abort([self._numbers[number] for number in request_ids if number in self._numbers])

    def pause(self) -> None:
        """Pause the whole backend, for all views."""
        self._shared.backend.pause()

    def resume(self) -> None:
        """Resume the whole backend, for all views."""
        self._shared.backend.resume()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Load into the whole backend, for all views."""
        self._shared.backend.load_weights(version, tensors)

    def close(self) -> None:
        """Does nothing: the backend's creator closes it."""
