"""A token backend in a `GenerationWorker`, as the agents' collector in an `EnvWorker` sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend
from embodied_rl.methods.language_apart import ModelFiles
from embodied_rl.roles.ray_calls import value_of

_ROLE = "GenerationWorker"


class RayTokens(TokenBackend):
    """Implements `TokenBackend`; every call is answered by the worker before it returns, so that their order is the caller's.

    Raises RoleLost when the worker has ended, and what the backend raised there.
    """

    version: int = 0
    """Of the weights that sample now."""

    def __init__(self, worker: Any, files: ModelFiles, kind: str) -> None:
        """Have the worker build its backend of a kind (`generation.backend`). Raises UserError as `blank_backend` does."""
        self._worker, self._kind = worker, kind
        value_of(worker.begin_tokens.remote(dict(files), kind), _ROLE)
        self._closed = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `TokenBackend.submit`."""
        if requests:
            self._ask("submit", list(requests))

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`."""
        return list(self._ask("poll", min_ready, timeout_s))

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`."""
        if wanted := list(request_ids):
            self._ask("abort", wanted)

    def pause(self) -> None:
        """See `TokenBackend.pause`."""
        self._ask("pause")

    def resume(self) -> None:
        """See `TokenBackend.resume`."""
        self._ask("resume")

    def load_weights(self, version: int, tensors: Iterable[Any]) -> None:
        """See `TokenBackend.load_weights`; `tensors` are references of a `RayPublisher`."""
        value_of(self._worker.load.remote(version, list(tensors)), _ROLE)
        self.version = version

    def close(self) -> None:
        """The driver ends the worker."""

    def _ask(self, what: str, *arguments: Any) -> Any:
        return value_of(self._worker.tokens.remote(self._kind, what, *arguments), _ROLE)
