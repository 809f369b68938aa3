"""Token backends without a model: a script, and chance. Baselines, warm starts, and tests of what stands around a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import (
    Completion,
    FinishReason,
    GenerationRequest,
    LengthLimit,
    TokenBackend,
    check_new_ids,
    derive_seed,
    refuse_structures,
    uniform_stream,
)

Script = Callable[[GenerationRequest], Sequence[int]]
"""What to answer to a prompt, its stop token included where it ends with one."""


class _Instant(TokenBackend):
    """Requests wait in order and are answered in full by the `poll` that comes to them. The shared part of both backends."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._waiting: list[GenerationRequest] = []
        self._aborted: list[Completion] = []
        self._paused = False

    @property
    def version(self) -> int:
        """Of the last `load_weights`; there are no weights."""
        return self._version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        check_new_ids(requests, (request.request_id for request in self._waiting))
        refuse_structures(requests)
        self._waiting += requests

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`: everything that waits, at once; while paused, only what was aborted."""
        ready, self._aborted = self._aborted, []
        if self._paused:
            return ready
        waiting, self._waiting = self._waiting, []
        return ready + [self._answer(request) for request in waiting]

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`: no token was sampled yet."""
        wanted = set(request_ids)
        self._aborted += [Completion.of(r.request_id, [], [], [], [], "aborted") for r in self._waiting if r.request_id in wanted]
        self._waiting = [request for request in self._waiting if request.request_id not in wanted]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take the version; there are no weights to load."""
        self._version = version

    def close(self) -> None:
        """Forget what waits."""
        self._waiting, self._aborted = [], []

    def _answer(self, request: GenerationRequest) -> Completion:
        raise NotImplementedError

    def _completion(
        self, request: GenerationRequest, token_ids: Sequence[int], log_prob: Sequence[float], *, ends: bool = True
    ) -> Completion:
        """Cut at the first stop token and at the request's length; `ends`: the last token is an end even if it is no stop token."""
        stops = [place for place, token in enumerate(token_ids) if token in request.stop_ids]
        whole = stops[0] + 1 if stops else len(token_ids)
        count = min(whole, request.max_new_tokens)
        reason: FinishReason = "stop" if count == whole and (ends or stops) else "length"
        limit: LengthLimit | None = None if reason == "stop" else "max_new_tokens"
        return Completion.of(
            request.request_id, token_ids[:count], log_prob[:count], log_prob[:count], [self._version] * count, reason, limit=limit
        )


class ScriptedTokens(_Instant):
    """Answers with what a function gives: every token has probability 1. Implements `TokenBackend`."""

    def __init__(self, script: Script, version: int = 0) -> None:
        super().__init__(version)
        self._script = script

    def _answer(self, request: GenerationRequest) -> Completion:
        token_ids = [int(token) for token in self._script(request)]
        return self._completion(request, token_ids, [0.0] * len(token_ids))


class RandomTokens(_Instant):
    """Uniform chance, from the request's seed. Implements `TokenBackend`.

    With `choices`, one whole answer out of several, each as likely: a token's probability is the share of the answers that begin so.
    With `token_ids`, any of these tokens at each place until a stop token is drawn.
    """

    def __init__(
        self,
        *,
        choices: Sequence[Sequence[int]] | None = None,
        token_ids: Sequence[int] | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """Give one of the two. Raises UserError for neither, both, or nothing to choose from."""
        super().__init__(version)
        if (choices is None) == (token_ids is None) or not (choices or token_ids) or any(len(choice) == 0 for choice in choices or ()):
            raise UserError("RandomTokens needs either choices (answers of at least one token) or token_ids, not both.")
        self._choices = None if choices is None else [[int(token) for token in choice] for choice in choices]
        self._token_ids = None if token_ids is None else np.unique(np.asarray(token_ids, np.int64))
        self._seed = seed

    def _answer(self, request: GenerationRequest) -> Completion:
        generator = uniform_stream(derive_seed(self._seed, request.request_id) if request.seed is None else request.seed)
        if self._choices is not None:
            chosen = self._choices[int(generator.integers(len(self._choices)))]
            return self._completion(request, chosen, self._prefix_log_prob(chosen))
        assert self._token_ids is not None
        drawn = self._token_ids[generator.integers(len(self._token_ids), size=request.max_new_tokens)].tolist()
        # Drawn as far as the request reaches: nothing but a stop token ends it before.
        return self._completion(request, drawn, [-math.log(len(self._token_ids))] * len(drawn), ends=False)

    def _prefix_log_prob(self, chosen: Sequence[int]) -> list[float]:
        assert self._choices is not None
        # Of all answers that begin like the chosen one, how many go on like it?
        counts = [sum(choice[:length] == chosen[:length] for choice in self._choices) for length in range(len(chosen) + 1)]
        return [math.log(counts[place + 1] / counts[place]) for place in range(len(chosen))]
