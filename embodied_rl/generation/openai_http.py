"""One request to an OpenAI-compatible server: streaming, retries with back-off, rate limits, and a typed result for whatever comes back."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from embodied_rl.generation.tokens import Failure, FailureKind, FinishReason

_LINE = 200
"""Characters of a server's message that are shown."""
_TOO_LONG = ("maximum context length", "context_length_exceeded", "max_model_len", "longer than the maximum model length")
_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass
class Reply:
    """What a server has said so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """When a request is tried again: connection errors, time-outs, 408, 429, 5xx and answers that make no sense."""

    max_attempts: int = 6
    first_wait_s: float = 0.5
    """Doubles with each attempt; half of it is drawn at random, so that many clients do not come back together."""
    max_wait_s: float = 30.0
    max_retry_after_s: float = 120.0
    """A server that asks for more patience than this is given up on."""

    def wait_s(self, attempt: int, generator: random.Random) -> float:
        """Before attempt number `attempt` + 1."""
        longest = min(self.first_wait_s * 2.0 ** (attempt - 1), self.max_wait_s)
        return longest * (0.5 + 0.5 * generator.random())


class FailedAttemptError(Exception):
    """One attempt that brought no answer."""

    def __init__(self, kind: FailureKind, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.status, self.retry_after_s = kind, status, retry_after_s

    @property
    def may_retry(self) -> bool:
        return self.kind not in ("rejected", "prompt_too_long")


class Gate:
    """Holds requests back: all of them after a 429, new ones while paused."""

    def __init__(self) -> None:
        self._not_before = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def set_paused(self, paused: bool) -> None:
        if paused:
            self._open.clear()
        else:
            self._open.set()

    def hold(self, seconds: float) -> None:
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def passed(self) -> None:
        """Returns when a request may be sent."""
        while True:
            await self._open.wait()
            left = self._not_before - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], reply: Reply, *, policy: RetryPolicy, gate: Gate, timeout_s: float
) -> Failure | None:
    """Fill `reply`, which holds what came so far when this is cancelled; a new attempt begins from nothing.

    Args:
        timeout_s: of one attempt as a whole.

    Returns:
        None, or why there is no whole answer.
    """
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
        except (httpx.TransportError, httpx.InvalidURL) as error:
            failed = FailedAttemptError("connection", f"{client.base_url}: {_short(str(error)) or type(error).__name__}")
        except FailedAttemptError as error:
            failed = error
        patience = failed.retry_after_s
        if not failed.may_retry or attempt >= policy.max_attempts or (patience is not None and patience > policy.max_retry_after_s):
            return Failure(failed.kind, str(failed), attempts=attempt, status=failed.status)
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
    """The data of server-sent events, up to ``[DONE]``."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            # Comments that keep the connection open, event names, blank lines; anything else is no event stream.
            if line.strip() and not line.startswith((":", "event:", "id:", "retry:")):
                raise FailedAttemptError("bad_response", f"The stream holds a line that is no event: '{_short(line)}'", status=200)
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        yield _parsed(data)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise FailedAttemptError("bad_response", f"The answer is not JSON: '{_short(text)}'", status=200) from None
    if not isinstance(found, dict):
        raise FailedAttemptError("bad_response", f"The answer is no JSON object: '{_short(text)}'", status=200)
    return found


def _take(event: dict[str, Any], reply: Reply) -> None:
    """Add one answer, or one piece of a stream, to what is known. Raises FailedAttemptError when it is not what the protocol promises."""
    if "error" in event:
        raise FailedAttemptError("server_error", f"The server reports: {_short(_message(event))}", status=200)
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise FailedAttemptError("bad_response", f"The answer has no choices: '{_short(json.dumps(event))}'", status=200)
    if not choices:
        return  # the last event of a stream may hold only usage
    choice = choices[0]
    try:
        message = choice.get("delta") or choice.get("message") or {}
        reply.text += choice.get("text") or message.get("content") or ""
        reply.token_ids += [int(token) for token in choice.get("token_ids") or ()]
        reply.log_prob += _log_probs(choice.get("logprobs") or {})
        reason = choice.get("finish_reason")
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise FailedAttemptError("bad_response", f"A choice is malformed ({error}): '{_short(json.dumps(choice))}'", status=200) from None
    if reason is not None:
        # A filter, a tool call: the server ended it.
        reply.finish_reason = _FINISHED.get(str(reason), "stop")


def _log_probs(found: dict[str, Any]) -> list[float]:
    """Of the completions' form (``token_logprobs``) and the chat's (``content``)."""
    if found.get("token_logprobs") is not None:
        return [float(number) for number in found["token_logprobs"]]
    return [float(entry["logprob"]) for entry in found.get("content") or ()]


def _refusal(response: httpx.Response) -> FailedAttemptError:
    status = response.status_code
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text
    text = f"HTTP {status}: {_short(message) or response.reason_phrase}"
    if status == 429:
        return FailedAttemptError("rate_limited", text, status=status, retry_after_s=retry_after_s(response.headers.get("retry-after")))
    if status >= 500 or status == 408:
        wait = retry_after_s(response.headers.get("retry-after"))
        return FailedAttemptError("server_error", text, status=status, retry_after_s=wait)
    if any(sign in message for sign in _TOO_LONG):
        return FailedAttemptError("prompt_too_long", text, status=status)
    hint = " Check the API key: the variable that api_key_env (openai.api_key_env) names holds it." if status in (401, 403) else ""
    return FailedAttemptError("rejected", text + hint, status=status)


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header, given as a number or a date; None when it is missing or senseless."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if seconds == seconds else None


def _message(data: object) -> str:
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE else line[:_LINE] + "…"
