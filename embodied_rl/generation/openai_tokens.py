"""Any OpenAI-compatible HTTP server as a token backend.

A server of token ids with log-probabilities (vLLM's) also serves training, if another program updates its weights. Other servers answer in
text and serve only evaluation, as a baseline or as another player; `Completion.trainable` is then False.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from embodied_rl.errors import UserError, brief
from embodied_rl.generation import tokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.reading import parse_json
from embodied_rl.stopping import waiting

# ---- one request: streaming, retries with back-off, rate limits, and a typed result -----------------------------------


_TOO_LONG = ("maximum context length", "context_length_exceeded", "max_model_len", "longer than the maximum model length")
_FINISHED: dict[str, tokens.FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass
class Reply:
    """A server's answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    finish_reason: tokens.FinishReason | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """Retries after connection errors, timeouts, 408, 429, 5xx and invalid answers."""

    max_attempts: int = 6
    first_wait_s: float = 0.5
    """Wait before the first retry; doubles with each attempt. Half of it is random, so that many clients do not return together."""
    max_wait_s: float = 30.0
    max_retry_after_s: float = 120.0
    """Longest accepted ``Retry-After``; a server that asks for more is given up."""

    def wait_s(self, attempt: int, generator: random.Random) -> float:
        """Seconds to wait before attempt number `attempt` + 1."""
        longest = min(self.first_wait_s * 2.0 ** (attempt - 1), self.max_wait_s)
        return longest * (0.5 + 0.5 * generator.random())


class FailedAttemptError(Exception):
    """An attempt without an answer."""

    def __init__(self, kind: tokens.FailureKind, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.status, self.retry_after_s = kind, status, retry_after_s


class Gate:
    """Holds all requests back after a 429."""

    def __init__(self) -> None:
        self._not_before = 0.0

    def hold(self, seconds: float) -> None:
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def passed(self) -> None:
        """Return when a request may be sent."""
        while (left := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(left)


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], reply: Reply, *, policy: RetryPolicy, gate: Gate, timeout_s: float
) -> tokens.Failure | None:
    """Fill `reply`, which keeps the partial answer if this is cancelled; a retry starts from nothing.
    `timeout_s`: limit of one whole attempt. Returns None, or the reason why there is no whole answer."""
    generator = random.Random()
    attempt = 0
    while True:
        attempt += 1
        await gate.passed()
        reply.text, reply.token_ids, reply.log_prob, reply.finish_reason = "", [], [], None
        try:
            async with asyncio.timeout(timeout_s):
                await _attempt(client, path, body, reply)
            return None
        except TimeoutError:
            failed = FailedAttemptError("timeout", f"No whole answer within {timeout_s:g} s.")
        except httpx.TimeoutException as error:
            failed = FailedAttemptError("timeout", f"The server does not answer ({type(error).__name__}).")
        except (httpx.RequestError, httpx.InvalidURL) as error:
            kind: tokens.FailureKind = "bad_response" if isinstance(error, httpx.DecodingError) else "connection"
            failed = FailedAttemptError(kind, f"{client.base_url}: {brief(str(error)) or type(error).__name__}")
        except FailedAttemptError as error:
            failed = error
        patience = failed.retry_after_s
        is_last = failed.kind in ("rejected", "prompt_too_long") or attempt >= policy.max_attempts
        if is_last or (patience is not None and patience > policy.max_retry_after_s):
            return tokens.Failure(failed.kind, str(failed), attempts=attempt, status=failed.status)
        wait = max(policy.wait_s(attempt, generator), patience or 0.0)
        if failed.kind == "rate_limited":
            gate.hold(wait)
        else:
            await asyncio.sleep(wait)


async def _attempt(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], reply: Reply) -> None:
    async with client.stream("POST", path, json=dict(body)) as response:
        if response.status_code != 200:
            await response.aread()
            raise _refusal(response)
        if body.get("stream"):
            async for event in _events(response):
                _take(event, reply)
        else:
            _take(_parsed((await response.aread()).decode("utf-8", "replace")), reply)
    if reply.finish_reason is None:
        raise FailedAttemptError("bad_response", "The answer ends without a finish_reason.", status=200)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of server-sent events, up to ``[DONE]``."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            # Comments that keep the connection open, event names and blank lines are skipped; anything else is no event stream.
            if line.strip() and not line.startswith((":", "event:", "id:", "retry:")):
                raise FailedAttemptError("bad_response", f"The stream contains a line that is not an event: '{brief(line)}'", status=200)
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        yield _parsed(data)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        raise FailedAttemptError("bad_response", f"The answer is not JSON: '{brief(text)}'", status=200) from None
    if not isinstance(found, dict):
        raise FailedAttemptError("bad_response", f"The answer is not a JSON object: '{brief(text)}'", status=200)
    return found


def _take(event: dict[str, Any], reply: Reply) -> None:
    """Add an answer, or a piece of a stream, to `reply`. Raises FailedAttemptError if it violates the protocol."""
    if "error" in event:
        raise FailedAttemptError("server_error", f"The server reports: {brief(_message(event))}", status=200)
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise FailedAttemptError("bad_response", f"The answer has no choices: '{brief(json.dumps(event))}'", status=200)
    if not choices:
        return  # the last event of a stream may hold only usage
    choice = choices[0]
    try:
        message = choice.get("delta") or choice.get("message") or {}
        reply.text += choice.get("text") or message.get("content") or ""
        reply.token_ids += [_token_id(token) for token in choice.get("token_ids") or ()]
        reply.log_prob += _log_probs(choice.get("logprobs") or {})
        reason = choice.get("finish_reason")
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise FailedAttemptError("bad_response", f"A choice is malformed ({error}): '{brief(json.dumps(choice))}'", status=200) from None
    if reason is not None:
        # A filter or a tool call: the server ended the answer.
        reply.finish_reason = _FINISHED.get(str(reason), "stop")


def _token_id(value: object) -> int:
    if type(value) is int and 0 <= value < 2**31:
        return value
    raise ValueError(f"{value!r:.40} is not a token id")


def _log_probs(found: dict[str, Any]) -> list[float]:
    """Log-probabilities in the completions form (``token_logprobs``) or the chat form (``content``)."""
    if found.get("token_logprobs") is not None:
        return [float(number) for number in found["token_logprobs"]]
    return [float(entry["logprob"]) for entry in found.get("content") or ()]


def _refusal(response: httpx.Response) -> FailedAttemptError:
    status = response.status_code
    try:
        message = _message(parse_json(response.content))
    except ValueError:
        message = response.text
    text = f"HTTP {status}: {brief(message, 200) or response.reason_phrase}"
    if status in (408, 429) or status >= 500:
        kind: tokens.FailureKind = "rate_limited" if status == 429 else "server_error"
        return FailedAttemptError(kind, text, status=status, retry_after_s=retry_after_s(response.headers.get("retry-after")))
    if any(sign in message for sign in _TOO_LONG):
        return FailedAttemptError("prompt_too_long", text, status=status)
    hint = " Check the API key: the variable that api_key_env (openai.api_key_env) names holds it." if status in (401, 403) else ""
    return FailedAttemptError("rejected", text + hint, status=status)


def retry_after_s(header: str | None) -> float | None:
    """Seconds in a ``Retry-After`` header, given as a number or a date; None if it is missing or invalid."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        # "-0000" is UTC, too, and Python leaves it out.
        seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if seconds == seconds else None


def _message(data: object) -> str:
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)


# ---- the backend ------------------------------------------------------------------------------------------------------


Result = TypeVar("Result")

_END_S = 60.0
"""Seconds for requests and connections to end, and again for the loop's thread, even on a machine that stalls."""


@dataclass(frozen=True)
class OpenAIOptions:
    """Address and abilities of a server."""

    base_url: str
    """Base URL with the version: ``http://127.0.0.1:8000/v1``."""
    model: str
    """The server's model name."""
    api: Literal["token_ids", "completions", "chat"] = "token_ids"
    """token_ids: completions of token ids, answered with token ids and log-probabilities (vLLM). completions, chat: only text."""
    api_key_env: str | None = None
    """Environment variable with the key; None: no key."""
    stream: bool = True
    """Whether to stream; without it an aborted request has no partial answer."""
    max_concurrent: int = 32
    timeout_s: float = 300.0
    """Limit of one whole attempt."""
    connect_timeout_s: float = 10.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    version: int = 0
    """Version stamped on the tokens."""
    seed: int = 0
    """Seed for requests without one."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"base_url must be like http://127.0.0.1:8000/v1, got '{self.base_url}'.")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise UserError(f"The environment variable '{self.api_key_env}', which should contain the API key, is not set.")
        if self.max_concurrent < 1 or self.timeout_s <= 0:
            raise UserError(f"max_concurrent must be >= 1 and timeout_s > 0, got {self.max_concurrent} and {self.timeout_s}.")


class OpenAITokens(tokens.TokenBackend):
    """Implements `TokenBackend`. Requests run concurrently in a background thread; each ends in a completion, whatever the server does."""

    def __init__(self, options: OpenAIOptions, tokenizer: ChatTokenizer | None = None) -> None:
        """Prepare the client; nothing is sent yet.
        `tokenizer`: turns prompts into text for ``api: completions``, and text answers into token ids.
        Raises UserError: ``api: completions`` without a tokenizer."""
        if options.api == "completions" and tokenizer is None:
            raise UserError("api 'completions' sends prompts as text and needs the tokenizer that they were made with.")
        self._options, self._tokenizer = options, tokenizer
        self._condition = threading.Condition()
        self._in_flight: set[int] = set()
        self._ready: list[tokens.Completion] = []
        self._broken: BaseException | None = None
        """Exception that ended the loop's thread."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        self._thread.start()
        self._gate = Gate()
        self._client, self._places = self._wait(self._open())

    def _wait(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run a coroutine in the loop's thread and wait for its result. Raises its exceptions, or TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _open(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        options = self._options
        headers = {} if options.api_key_env is None else {"Authorization": f"Bearer {os.environ[options.api_key_env]}"}
        client = httpx.AsyncClient(
            base_url=options.base_url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=options.max_concurrent),
            # A server on this machine is reached without the environment's proxy.
            trust_env=not _is_loopback(urlsplit(options.base_url).hostname or ""),
        )
        return client, asyncio.Semaphore(options.max_concurrent)

    @property
    def version(self) -> int:
        """Version from the options: the server keeps its weights."""
        return self._options.version

    @property
    def num_in_flight(self) -> int:
        """Number of unfinished requests."""
        return len(self._in_flight)

    def submit(self, requests: Sequence[tokens.GenerationRequest]) -> None:
        """See `TokenBackend.submit`. Raises UserError for images, and for a chat without messages."""
        tokens.refuse_structures(requests)
        for request in requests:
            if request.images:
                raise UserError(f"Request {request.request_id} has images, which the openai backend does not send.")
            if self._options.api == "chat" and not request.messages:
                raise UserError(
                    f"Request {request.request_id} has no messages, which api 'chat' sends. Use api 'completions' with a tokenizer."
                )
            if self._options.api != "token_ids" and request.top_k:
                raise UserError(f"Request {request.request_id}: OpenAI's interface has no top_k; set it to 0.")
        with self._condition:
            tokens.check_new_ids(requests, self._in_flight)
            self._in_flight.update(request.request_id for request in requests)
        self._wait(self._begin(requests))

    async def _begin(self, requests: Sequence[tokens.GenerationRequest]) -> None:
        for request in requests:
            self._tasks[request.request_id] = asyncio.create_task(self._answer(request))

    async def _answer(self, request: tokens.GenerationRequest) -> None:
        reply = Reply()
        path = "chat/completions" if self._options.api == "chat" else "completions"
        try:
            async with self._places:
                failure = await ask(
                    self._client,
                    path,
                    self._body(request),
                    reply,
                    policy=self._options.retry,
                    gate=self._gate,
                    timeout_s=self._options.timeout_s,
                )
            if failure is None:
                completion = self._completion(request, reply, reply.finish_reason or "stop")
            else:
                completion = tokens.Completion.failed(request.request_id, failure)
            self._put(completion)
        except asyncio.CancelledError:
            self._put(self._completion(request, reply, "aborted"))
        except BaseException as error:
            with self._condition:
                self._broken = error
                self._condition.notify_all()
            raise
        finally:
            self._tasks.pop(request.request_id, None)

    def _put(self, completion: tokens.Completion) -> None:
        """Store a completion, unless the request already has one (it was aborted while it ended)."""
        with self._condition:
            if completion.request_id in self._in_flight:
                self._in_flight.discard(completion.request_id)
                self._ready.append(completion)
                self._condition.notify_all()

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[tokens.Completion]:
        """See `TokenBackend.poll`. Raises RuntimeError, with its cause, if the answering thread has died."""

        def is_over() -> bool:
            return self._broken is not None or len(self._ready) >= max(min_ready, 1) or not self._in_flight

        with self._condition:
            with waiting:
                self._condition.wait_for(is_over, timeout_s)
            if self._broken is not None:
                raise RuntimeError("The generation backend has died.") from self._broken
            ready, self._ready = self._ready, []
            return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`; closes the connections, so that servers stop sampling."""
        self._wait(self._abort(list(request_ids)))

    async def _abort(self, request_ids: list[int]) -> None:
        tasks = [self._tasks[request_id] for request_id in request_ids if request_id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id in [one for one in request_ids if one in self._in_flight]:
            # The task was cancelled before it ran its first line.
            self._tasks.pop(request_id, None)
            self._put(tokens.Completion.of(request_id, [], [], [], [], "aborted"))

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Raise UserError: the server owns its weights."""
        raise UserError(
            f"The openai backend cannot load weights: they belong to the server at {self._options.base_url}. Use vllm or torch."
        )

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._wait(self._end(), _END_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
            self._loop.close()

    async def _end(self) -> None:
        await self._abort(list(self._tasks))
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()

    # ---- requests and answers -----------------------------------------------------------------------------------------

    def _body(self, request: tokens.GenerationRequest) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": options.stream,
        }
        if options.api == "token_ids":
            seed = tokens.derive_seed(options.seed, request.request_id) if request.seed is None else request.seed
            body |= {
                "prompt": request.prompt_ids.tolist(),
                "top_k": request.top_k,
                "seed": seed,
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": list(request.stop_ids),
                "ignore_eos": True,
                "skip_special_tokens": False,
            }
        elif options.api == "chat":
            body["messages"] = [dict(message) for message in request.messages or ()]
        else:
            assert self._tokenizer is not None
            body["prompt"] = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        if options.api != "token_ids":
            body |= {} if request.seed is None else {"seed": request.seed}
            body |= {"stop": stops} if (stops := self._stop_texts(request)) else {}
        return body

    def _stop_texts(self, request: tokens.GenerationRequest) -> list[str]:
        """Texts that end an answer beside the server's own end of sequence."""
        if self._tokenizer is None:
            return []
        own = [token for token in request.stop_ids if token != self._tokenizer.eos_id]
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in own]

    def _completion(self, request: tokens.GenerationRequest, reply: Reply, reason: tokens.FinishReason) -> tokens.Completion:
        if self._options.api == "token_ids":
            token_ids, log_prob = reply.token_ids, reply.log_prob
            if len(log_prob) != len(token_ids) or (reply.text and not token_ids):
                return tokens.Completion.failed(request.request_id, self._without_ids(reply))
        else:
            token_ids = [] if self._tokenizer is None else self._tokenizer.encode(reply.text).tolist()
            log_prob = [float("nan")] * len(token_ids)
        limit: tokens.LengthLimit | None = None
        if reason == "length":
            limit = "max_new_tokens" if self._options.api != "token_ids" or len(token_ids) >= request.max_new_tokens else "context"
        sampling = [float("nan")] * len(log_prob)
        if request.samples_from_policy:
            sampling = log_prob
        elif request.temperature == 0 and self._options.api == "token_ids":
            sampling = [0.0] * len(log_prob)
        versions = [self._options.version] * len(token_ids)
        return tokens.Completion.of(request.request_id, token_ids, log_prob, sampling, versions, reason, limit=limit, text=reply.text)

    def _without_ids(self, reply: Reply) -> tokens.Failure:
        return tokens.Failure(
            "bad_response",
            f"The server at {self._options.base_url} gave {len(reply.token_ids)} token ids and {len(reply.log_prob)} log-probabilities for "
            f"{len(reply.text)} characters. It must know return_token_ids and logprobs; api 'completions' or 'chat' evaluates in text.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
