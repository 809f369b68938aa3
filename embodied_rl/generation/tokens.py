"""Tokens in, tokens out: the requests of language agents to a language model, and the completions of every backend.

This module knows no tokenizer. Sampled token ids are passed on and trained as token ids; text is for people and simulators. Shapes: P
tokens of a prompt, n sampled tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from embodied_rl.errors import UserError

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""stop: a stop token was sampled (it is the last of `token_ids`). length: `max_new_tokens` or the model's context was used up. aborted: by
`abort` or `close`. failed: the backend could not answer; `failure` gives the reason."""

FailureKind = Literal["prompt_too_long", "rejected", "rate_limited", "server_error", "bad_response", "timeout", "connection"]
"""prompt_too_long: no room for one new token. rejected: the server refused the request (4xx). rate_limited: 429 after the last retry.
server_error: 5xx after the last retry. bad_response: the answer violates the protocol. timeout, connection: no answer after the last
retry."""

LengthLimit = Literal["max_new_tokens", "context"]


@dataclass(frozen=True)
class Failure:
    """Reason why a request got no (complete) answer."""

    kind: FailureKind
    message: str
    """One line for people."""
    attempts: int = 1
    """Number of attempts."""
    status: int | None = None
    """HTTP status of the last answer; None without an answer."""

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} after {self.attempts} attempt{'s' * (self.attempts != 1)}: {self.message}"


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationRequest:
    """One prompt to continue. Raises ValueError if the prompt is empty or a number is out of range."""

    request_id: int
    """Id, unique among the requests in flight."""
    prompt_ids: np.ndarray
    """Prompt tokens [P], int64."""
    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Probability that the smallest set of likeliest tokens must reach; 1 keeps all tokens."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion when sampled; the stop token stays as the last token."""
    seed: int | None = None
    """Seed; samples depend only on it, the prompt and the weights. None: the backend draws one."""
    images: tuple[np.ndarray, ...] = ()
    """Images for vision-language models, uint8 [H, W, 3] each; the prompt contains their placeholder tokens (`VisionInputs.expand`)."""
    structure: str | None = None
    """Required form of the answer, as JSON: one of xgrammar's structural tags. Only tokens that fit it are drawn, and a stop token only
    when it is complete. See `TokenBackend.can_constrain`."""
    top_logprobs: int = 0
    """Number of likeliest tokens to report per position beside the drawn one."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The prompt as chat messages, for servers that take text and apply their own template."""

    def __post_init__(self) -> None:
        if self.prompt_ids.ndim != 1 or self.prompt_ids.dtype.kind not in "iu" or len(self.prompt_ids) == 0:
            given = f"{self.prompt_ids.dtype} {list(self.prompt_ids.shape)}"
            raise ValueError(f"Request {self.request_id}: prompt_ids must be at least one integer, [P], got {given}.")
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, ">= 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), ">= 0"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "top_logprobs": (self.top_logprobs >= 0, ">= 0"),
        }
        for name, (holds, wanted) in ranges.items():
            if not holds:
                raise ValueError(f"Request {self.request_id}: {name} must be {wanted}, got {vars(self)[name]}.")

    @property
    def samples_from_policy(self) -> bool:
        """Whether tokens are drawn from the model's own distribution among the allowed ones, so that both log-probabilities are equal."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0


def as_trained(
    log_prob: np.ndarray, sampling_log_prob: np.ndarray, temperature: float, top_p: float, top_k: int
) -> tuple[np.ndarray, float]:
    """The log-probabilities [n] that training recomputes, and the temperature by which it divides the logits.

    If only a temperature shaped the draw, the policy is the distribution that drew (as in verl and ROLL). Top-p and top-k cut tokens off,
    which no gradient passes, so the model's own distribution is trained; also after a greedy answer, and if the backend does not know
    `sampling_log_prob`.
    """
    if temperature in (0.0, 1.0) or top_p < 1.0 or top_k > 0 or not np.isfinite(sampling_log_prob).all():
        return log_prob, 1.0
    return sampling_log_prob, temperature


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """The n tokens that continue one prompt. Raises ValueError if the arrays differ in length, or a failure is missing or unexpected."""

    request_id: int
    token_ids: np.ndarray
    """Sampled tokens [n], int64, with the stop token; n may be 0 (aborted or failed at once). Empty from a server of text: see `text`."""
    log_prob: np.ndarray
    """[n] float32 log-probability under the model's own distribution (temperature 1, masked only by the request's structure)."""
    sampling_log_prob: np.ndarray
    """[n] float32 log-probability under the sampling distribution (temperature, structure, top-p, top-k), renormalised; 0 for the likeliest
    token at temperature 0. NaN if the backend does not know it."""
    version: np.ndarray
    """[n] int64 version of the weights that sampled each token."""
    finish_reason: FinishReason
    limit: LengthLimit | None = None
    """Length that was used up; None unless `finish_reason` is ``length``."""
    failure: Failure | None = None
    """Reason of the failure; None unless `finish_reason` is ``failed``."""
    text: str | None = None
    """Answer of a server of text; None if tokens are the answer."""
    top_ids: np.ndarray | None = None
    """[n, k] int64 likeliest tokens of each position, likeliest first; None unless the request asked for k of them."""
    top_log_prob: np.ndarray | None = None
    """[n, k] float32 log-probabilities of `top_ids` under the model's own distribution."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.log_prob), len(self.sampling_log_prob), len(self.version)}
        if len(lengths) != 1:
            raise ValueError(f"Completion {self.request_id}: token_ids, log_prob, sampling_log_prob, version differ in length: {lengths}.")
        if (self.failure is not None) != (self.finish_reason == "failed") or (self.limit is not None) != (self.finish_reason == "length"):
            raise ValueError(
                f"Completion {self.request_id}: finish_reason '{self.finish_reason}' does not go with limit={self.limit}, "
                f"failure={self.failure}."
            )

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, n."""
        return len(self.token_ids)

    @property
    def trainable(self) -> bool:
        """Whether the tokens have log-probabilities: a text-only answer serves only evaluation."""
        return self.num_tokens > 0 and bool(np.isfinite(self.log_prob).all())

    @staticmethod
    def failed(request_id: int, failure: Failure, text: str | None = None) -> Completion:
        """Completion without tokens, with the reason."""
        return Completion.of(request_id, [], [], [], [], "failed", failure=failure, text=text)

    @staticmethod
    def of(
        request_id: int,
        token_ids: Sequence[int],
        log_prob: Sequence[float],
        sampling_log_prob: Sequence[float],
        version: Sequence[int],
        finish_reason: FinishReason,
        *,
        limit: LengthLimit | None = None,
        failure: Failure | None = None,
        text: str | None = None,
        top: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> Completion:
        """Build a completion from sequences of n numbers; `top`: k likeliest (token, log-probability) per position, or empty."""
        return Completion(
            request_id=request_id,
            token_ids=np.asarray(token_ids, np.int64).reshape(-1),
            log_prob=np.asarray(log_prob, np.float32).reshape(-1),
            sampling_log_prob=np.asarray(sampling_log_prob, np.float32).reshape(-1),
            version=np.asarray(version, np.int64).reshape(-1),
            finish_reason=finish_reason,
            limit=limit,
            failure=failure,
            text=text,
            top_ids=np.array([[token for token, _ in place] for place in top], np.int64) if top else None,
            top_log_prob=np.array([[value for _, value in place] for place in top], np.float32) if top else None,
        )

    def first(self, count: int, finish_reason: FinishReason) -> Completion:
        """Copy with the first `count` tokens and another end, which is neither failure nor length."""
        of_tokens = ("token_ids", "log_prob", "sampling_log_prob", "version", "top_ids", "top_log_prob")
        kept = {name: vars(self)[name][:count] for name in of_tokens if vars(self)[name] is not None}
        return replace(self, **kept, finish_reason=finish_reason, limit=None)


class TokenCache(ABC):  # noqa: B024  # every method has a default
    """Keys and values that a token backend keeps for its requests; by default there are none in this process."""

    @property
    def can_free_memory(self) -> bool:
        """Whether `release_memory` frees memory."""
        return False

    @property
    def device(self) -> object:
        """Device of the cache; `str` gives its name."""
        return "cpu"

    @property
    def cache_bytes(self) -> int:
        """Current size of keys and values."""
        return 0

    def release_memory(self) -> int:
        """Free the cache and stop sampling until `restore_memory`; return the number of bytes freed."""
        return 0

    def restore_memory(self) -> None:  # noqa: B027  # a default
        """Continue where `release_memory` stopped."""

    def forget(self) -> None:  # noqa: B027  # a default
        """Forget ended requests, so that later ones do not depend on them, not even in the last bits."""


class TokenBackend(TokenCache):
    """Continues prompts request by request; finished requests do not wait for slower ones.

    `poll` returns every submitted request exactly once, however it ended.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that sample now."""

    @property
    def can_constrain(self) -> bool:
        """Whether the backend supports `GenerationRequest.structure` and `top_logprobs`; otherwise `submit` refuses such requests."""
        return False

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests; the backend works on them in the background or inside `poll`.
        Raises UserError: a request id is already in flight, or the backend does not support a request's option (top_k, images, …)."""

    @abstractmethod
    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """Return the completions that are ready, oldest first.

        Waits until `min_ready` (at least 1) are ready, nothing is in flight, or `timeout_s` is over. With 0 it does not wait; a backend
        that works inside `poll` takes one step. While memory is released, a wait without a time limit returns at once with what is ready.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests now; `poll` returns their tokens so far as ``aborted``. Unknown ids are ignored (they have just ended)."""

    def flush(self) -> None:
        """Begin submitted requests, if the backend gathers requests before sending."""

    def fileno(self) -> int:
        """Descriptor of a socket that is readable when results have come; -1: no socket, work goes on inside `poll`."""
        return -1

    @abstractmethod
    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace weights in place, tensor by tensor (`LanguagePolicy.named_weights`); requests in flight continue with the new ones.

        Later tokens carry `version`. Raises UserError: the backend does not own its weights, or the tensors are another model's.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything; requests in flight are lost. May be called twice."""

    def sampled_so_far(self, request_ids: Iterable[int]) -> dict[int, list[int]]:
        """{request: its tokens so far} of requests being sampled, if known: for callers that show a growing answer."""
        return {}


def refuse_structures(requests: Sequence[GenerationRequest]) -> None:
    """Raise UserError for structures and top_logprobs, which a backend that cannot constrain does not support."""
    for request in requests:
        if request.structure is not None or request.top_logprobs:
            asked = "top_logprobs" if request.structure is None else "an answer that keeps to a structure"
            raise UserError(f"Request {request.request_id} asks for {asked}, which this backend does not support; torch and vllm do.")


def check_new_ids(requests: Sequence[GenerationRequest], in_flight: Iterable[int]) -> None:
    """Raise UserError if a request id is used twice at the same time."""
    seen = set(in_flight)
    for request in requests:
        if request.request_id in seen:
            raise UserError(f"Request id {request.request_id} is already in flight: an id must be unique until `poll` has returned it.")
        seen.add(request.request_id)


@dataclass(frozen=True)
class ContextRoom:
    """Room that a prompt leaves in a model's context."""

    max_new_tokens: int
    """Number of tokens that may be sampled: the request's own limit, or less."""
    limit: LengthLimit
    """Limit that ends the completion."""


@dataclass
class Growing:
    """A request with its tokens so far."""

    request: GenerationRequest
    room: ContextRoom
    token_ids: list[int] = field(init=False, default_factory=list)
    log_prob: list[float] = field(init=False, default_factory=list)
    sampling_log_prob: list[float] = field(init=False, default_factory=list)
    version: list[int] = field(init=False, default_factory=list)
    top: list[list[tuple[int, float]]] = field(init=False, default_factory=list)

    def add(self, token: int, log_prob: float, sampling_log_prob: float, version: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token)
        self.log_prob.append(log_prob)
        self.sampling_log_prob.append(sampling_log_prob)
        self.version.append(version)

    def completion(self, reason: FinishReason, failure: Failure | None = None) -> Completion:
        limit = self.room.limit if reason == "length" else None
        known = self.token_ids, self.log_prob, self.sampling_log_prob, self.version
        return Completion.of(self.request.request_id, *known, reason, limit=limit, failure=failure, top=self.top)


def context_room(request: GenerationRequest, max_context: int) -> ContextRoom | Failure:
    """Room of a request in a context of `max_context` tokens, or the failure if not one new token fits.

    This function never cuts a prompt.
    """
    used = len(request.prompt_ids)
    room = max_context - used
    if room < 1:
        return Failure(
            "prompt_too_long",
            f"The prompt has {used} tokens, but the model's context has {max_context}, new tokens included. Shorten the history with "
            "another agent.strategy, or use a model with a longer context.",
        )
    if room < request.max_new_tokens:
        return ContextRoom(room, "context")
    return ContextRoom(request.max_new_tokens, "max_new_tokens")


def derive_seed(base: int, request_id: int) -> int:
    """Derive a 63-bit seed for a request without one: the same on every machine."""
    digest = hashlib.sha256(f"{base}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uniform_stream(seed: int) -> np.random.Generator:
    """Random numbers of one request: its samples do not depend on other requests."""
    return np.random.Generator(np.random.Philox(key=seed))


# ---- backends that sample inside of poll ------------------------------------------------------------------------------


_YIELD_S = 0.0005


class Stepwise(TokenBackend):
    """Base of token backends that sample inside `poll`. A subclass says in `_check`, `_grow` and `_begin` how it accepts a request, samples
    in `_step`, where it ends requests by `_end`, and forgets requests in `_drop`."""

    version: int = 0
    can_constrain: bool = False

    def __init__(self, context: int = sys.maxsize, seed: int = 0) -> None:
        """`context`: tokens of prompt and answer together; `seed`: for requests without one."""
        self._context, self._seed = context, seed
        self._growing: dict[int, Growing] = {}
        """{request in flight: its tokens so far}, oldest first."""
        self._ready: list[Completion] = []
        self._paused = False
        """Whether the memory is released."""
        self._lock = threading.Lock()
        self._callers = 0
        self._callers_lock = threading.Lock()

    @property
    def num_in_flight(self) -> int:
        """Number of unfinished requests, including those not yet begun."""
        return len(self._growing)

    def _check(self, request: GenerationRequest) -> None:
        """Raise UserError for a request that the backend cannot answer; called for all before the first begins."""

    def _grow(self, request: GenerationRequest, room: ContextRoom) -> Growing:
        """Make the state of a request, before the first begins. Raises UserError."""
        return Growing(request, room)

    def _begin(self, growing: Growing) -> None:
        """Begin a request, or note it for the next step. Raises UserError."""

    def _step(self) -> None:
        """Sample one token for each active request."""
        raise NotImplementedError

    def _drop(self, growing: Sequence[Growing]) -> None:
        """Forget requests in flight, which are then aborted."""

    def _free(self) -> int:
        """Free the memory of keys and values; return its bytes."""
        return 0

    def _refill(self) -> None:
        """Bring back what `_free` freed."""

    def _end(self, growing: Growing, reason: FinishReason, failure: Failure | None = None) -> None:
        del self._growing[growing.request.request_id]
        self._ready.append(growing.completion(reason, failure))

    def _seed_of(self, request: GenerationRequest) -> int:
        return derive_seed(self._seed, request.request_id) if request.seed is None else request.seed

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._turn():
            check_new_ids(requests, self._growing)
            for request in requests:
                self._check(request)
            rooms = [(request, context_room(request, self._context)) for request in requests]
            failed = [Completion.failed(request.request_id, room) for request, room in rooms if isinstance(room, Failure)]
            begun = [self._grow(request, room) for request, room in rooms if isinstance(room, ContextRoom)]
            self._ready += failed
            for growing in begun:
                self._begin(growing)
                self._growing[growing.request.request_id] = growing

    def abort(self, request_ids: Iterable[int]) -> None:
        with self._turn():
            dropped = [self._growing[number] for number in dict.fromkeys(request_ids) if number in self._growing]
            self._drop(dropped)
            for growing in dropped:
                self._end(growing, "aborted")

    def sampled_so_far(self, request_ids: Iterable[int]) -> dict[int, list[int]]:
        with self._turn():
            return {number: list(self._growing[number].token_ids) for number in request_ids if number in self._growing}

    def release_memory(self) -> int:
        """Free the memory of keys and values and stop sampling until `restore_memory`; return the number of bytes freed.

        Requests in flight stay; the weights at the time of restoring recompute their keys and values.
        """
        with self._turn():
            if self._paused:
                return 0
            freed, self._paused = self._free(), True
            return freed

    def restore_memory(self) -> None:
        with self._turn():
            if self._paused:
                self._refill()  # first: if it fails (out of memory), nothing is sampled without it, and it can be tried again
                self._paused = False

    def close(self) -> None:
        """Drop requests in flight."""
        with self._turn():
            self._growing, self._ready = {}, []

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`: runs at least one step, until enough is ready."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._enough(min_ready) and not self._paused:
                    self._step()
                over = deadline is not None and time.monotonic() >= deadline
                if self._enough(min_ready) or over or (self._paused and deadline is None):
                    ready, self._ready = self._ready, []
                    return ready
            self._let_others_in()

    def _enough(self, min_ready: int) -> bool:
        return len(self._ready) >= max(min_ready, 1) or self.num_in_flight == 0

    def _let_others_in(self) -> None:
        """Yield to callers in other threads, which would hardly ever get a lock that is released and taken again at once."""
        if self._paused:
            time.sleep(_YIELD_S)
        while self._callers:
            time.sleep(_YIELD_S)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock between two steps of a `poll` that may run in another thread."""
        with self._callers_lock:
            self._callers += 1
        try:
            with self._lock:
                yield
        finally:
            with self._callers_lock:
                self._callers -= 1


# ---- one backend for several callers ----------------------------------------------------------------------------------


class TokenView(TokenBackend):
    """One caller's view of a backend that several callers in one thread use. Implements `TokenBackend`."""

    def __init__(self, backend: TokenBackend, other: TokenView | None = None) -> None:
        """`other`: another view of the same backend; None: this is the first."""
        self._backend = backend
        self._owners: dict[int, tuple[TokenView, int]] = {} if other is None else other._owners
        """{the backend's request id: its view, and the id there}, of all views."""
        self._next_id: Iterator[int] = itertools.count() if other is None else other._next_id
        self._numbers: dict[int, int] = {}
        self._ready: list[Completion] = []

    @property
    def version(self) -> int:
        return self._backend.version

    @property
    def can_constrain(self) -> bool:
        return self._backend.can_constrain

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if requests:
            check_new_ids(requests, self._numbers)
            numbers = {request.request_id: next(self._next_id) for request in requests}
            self._backend.submit([replace(request, request_id=numbers[request.request_id]) for request in requests])
            self._numbers |= numbers
            self._owners.update({number: (self, own) for own, number in numbers.items()})

    def _take(self, timeout_s: float | None) -> None:
        """Wait until any completion is ready, and give each to the view that submitted it."""
        for completion in self._backend.poll(min_ready=1, timeout_s=timeout_s):
            view, own = self._owners.pop(completion.request_id)
            del view._numbers[own]
            view._ready.append(replace(completion, request_id=own))

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; completions for other views are kept for them."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        asked = False
        while self._numbers and (len(self._ready) < min_ready or not asked):
            left = None if until is None else max(until - time.monotonic(), 0.0)
            if asked and left == 0.0:
                break
            in_flight = len(self._numbers)
            self._take(left if len(self._ready) < min_ready else 0.0)
            if asked and left is None and len(self._numbers) == in_flight and not self._ready:
                break  # paused: a wait without a limit returns with what is ready
            asked = True
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        self._backend.abort([self._numbers[number] for number in request_ids if number in self._numbers])

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Load into the whole backend, for all views."""
        self._backend.load_weights(version, tensors)

    def forget(self) -> None:
        """Forget ended requests in the whole backend."""
        self._backend.forget()

    def close(self) -> None:
        """Do nothing: the backend's creator closes it."""


# ---- Backends without a model ---------------------------------------------------------------------------------------


Script = Callable[[GenerationRequest], Sequence[int]]
"""Function from a request to the answer's tokens, including its stop token if it ends with one; its last token ends it in any case."""


class ScriptedTokens(Stepwise):
    """Answers from a function, where every token has probability 1. One step answers all requests in full, in order."""

    def __init__(self, script: Script, version: int = 0, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._script, self.version = script, version

    def _check(self, request: GenerationRequest) -> None:
        refuse_structures([request])

    def _step(self) -> None:
        waiting, self._growing = self._growing, {}
        self._ready += [self._answer(growing.request) for growing in waiting.values()]

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Set the version; there are no weights to load."""
        self.version = version

    def _answer(self, request: GenerationRequest) -> Completion:
        """The script's answer, cut at its first stop token and at the request's length."""
        token_ids = [int(token) for token in self._script(request)]
        whole = next((place + 1 for place, token in enumerate(token_ids) if token in request.stop_ids), len(token_ids))
        count = min(whole, request.max_new_tokens)
        reason: FinishReason = "stop" if count == whole else "length"
        limit: LengthLimit | None = None if count == whole else "max_new_tokens"
        log_prob = self._log_prob(token_ids)[:count]
        return Completion.of(request.request_id, token_ids[:count], log_prob, log_prob, [self.version] * count, reason, limit=limit)

    def _log_prob(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token of an answer."""
        return [0.0] * len(token_ids)


class RandomTokens(ScriptedTokens):
    """Random answers, from the request's seed. With `choices`, one of these, each equally likely: a token's probability is the share of
    answers that continue with it. With `token_ids`, any of these at each position, until a stop token."""

    def __init__(self, choices: Sequence[Sequence[int]] = (), *, token_ids: Sequence[int] = (), seed: int = 0) -> None:
        """Raises UserError: there are neither choices nor token ids, or both, or an empty choice."""
        super().__init__(self._draw, seed=seed)
        if bool(choices) == (len(token_ids) > 0) or not all(map(len, choices)):
            raise UserError("RandomTokens needs either choices (answers of at least one token) or token_ids, not both.")
        self._choices, self._token_ids = (
            [[int(token) for token in choice] for choice in choices],
            np.unique(np.asarray(token_ids, np.int64)),
        )

    def _draw(self, request: GenerationRequest) -> list[int]:
        generator = uniform_stream(self._seed_of(request))
        if self._choices:
            return self._choices[int(generator.integers(len(self._choices)))]
        # One more than fits: only a stop token ends the answer earlier.
        return self._token_ids[generator.integers(len(self._token_ids), size=request.max_new_tokens + 1)].tolist()

    def _log_prob(self, token_ids: Sequence[int]) -> list[float]:
        if not self._choices:
            return [-math.log(len(self._token_ids))] * len(token_ids)
        # For each prefix of the answer: the number of answers that begin with it.
        counts = [sum(choice[:length] == token_ids[:length] for choice in self._choices) for length in range(len(token_ids) + 1)]
        return [math.log(counts[place + 1] / counts[place]) for place in range(len(token_ids))]
