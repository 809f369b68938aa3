"""Any OpenAI-compatible HTTP server as a token backend.

A server that takes and gives token ids with log-probabilities (vLLM's) serves training too, provided that another program keeps its
weights up to date. Others answer in text: they serve evaluation, as a baseline or as another player; `Completion.trainable` is then False.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from embodied_rl.errors import UserError
from embodied_rl.generation.background_loop import BackgroundLoop, Mailbox
from embodied_rl.generation.openai_http import Gate, Reply, RetryPolicy, ask
from embodied_rl.generation.tokens import (
    Completion,
    Failure,
    FinishReason,
    GenerationRequest,
    LengthLimit,
    TokenBackend,
    derive_seed,
    refuse_structures,
)
from embodied_rl.policies.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True)
class OpenAIOptions:
    """Where the server is and what it understands."""

    base_url: str
    """With the version: ``http://127.0.0.1:8000/v1``."""
    model: str
    """The server's name of the model."""
    api: Literal["token_ids", "completions", "chat"] = "token_ids"
    """token_ids: completions of token ids, answered with token ids and log-probabilities (vLLM). completions, chat: only text."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None: no key."""
    stream: bool = True
    """Without it an aborted request has no partial answer."""
    max_concurrent: int = 32
    timeout_s: float = 300.0
    """Of one attempt as a whole."""
    connect_timeout_s: float = 10.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    version: int = 0
    """What the tokens are stamped with."""
    seed: int = 0
    """Of requests that bring none."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Sent with every request."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"base_url must be like http://127.0.0.1:8000/v1, got '{self.base_url}'.")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise UserError(f"The environment variable '{self.api_key_env}', which is to hold the API key, is not set.")
        if self.max_concurrent < 1 or self.timeout_s <= 0:
            raise UserError(f"max_concurrent must be >= 1 and timeout_s > 0, got {self.max_concurrent} and {self.timeout_s}.")


class OpenAITokens(TokenBackend):
    """Implements `TokenBackend`. Requests run side by side in a thread of their own; each ends in a completion, whatever the server does.

    While paused nothing new is sent; what a server is answering goes on there and is taken.
    """

    def __init__(self, options: OpenAIOptions, tokenizer: ChatTokenizer | None = None) -> None:
        """Nothing is sent yet.

        Args:
            tokenizer: turns prompts into text for ``api: completions``, and answers in text into token ids.

        Raises:
            UserError: ``api: completions`` without a tokenizer.
        """
        if options.api == "completions" and tokenizer is None:
            raise UserError("api 'completions' sends prompts as text and needs the tokenizer that they were made with.")
        self._options, self._tokenizer = options, tokenizer
        self._mailbox = Mailbox()
        self._loop = BackgroundLoop("openai")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gate, self._client, self._places = self._loop.call(self._open())

    async def _open(self) -> tuple[Gate, httpx.AsyncClient, asyncio.Semaphore]:
        options = self._options
        headers = {} if options.api_key_env is None else {"Authorization": f"Bearer {os.environ[options.api_key_env]}"}
        client = httpx.AsyncClient(
            base_url=options.base_url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=options.max_concurrent),
            # A proxy of the environment is no way to a server on this machine.
            trust_env=not _is_loopback(urlsplit(options.base_url).hostname or ""),
        )
        return Gate(), client, asyncio.Semaphore(options.max_concurrent)

    @property
    def version(self) -> int:
        """What the options say: the server keeps its weights."""
        return self._options.version

    @property
    def num_in_flight(self) -> int:
        """Requests that are waited for."""
        return self._mailbox.num_in_flight

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `TokenBackend.submit`. Raises UserError for images, and for a chat without messages."""
        refuse_structures(requests)
        for request in requests:
            if request.images:
                raise UserError(f"Request {request.request_id} has images, which the openai backend does not send.")
            if self._options.api == "chat" and not request.messages:
                raise UserError(
                    f"Request {request.request_id} has no messages, which api 'chat' sends. Use api 'completions' with a tokenizer."
                )
            if self._options.api != "token_ids" and request.top_k:
                raise UserError(f"Request {request.request_id}: top_k is no part of OpenAI's interface; set it to 0.")
        self._mailbox.expect(requests)
        self._loop.call(self._begin(requests))

    async def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._tasks[request.request_id] = asyncio.create_task(self._answer(request))

    async def _answer(self, request: GenerationRequest) -> None:
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
                completion = Completion.failed(request.request_id, failure)
            self._mailbox.put(completion)
        except asyncio.CancelledError:
            self._mailbox.put(self._completion(request, reply, "aborted"))
        except BaseException as error:
            self._mailbox.break_down(error)
            raise
        finally:
            self._tasks.pop(request.request_id, None)

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        return self._mailbox.take(min_ready, timeout_s)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`: closes the connections, at which servers stop sampling."""
        self._loop.call(self._abort(list(request_ids)))

    async def _abort(self, request_ids: list[int]) -> None:
        tasks = [self._tasks[request_id] for request_id in request_ids if request_id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id in self._mailbox.expects(request_ids):
            # Cancelled before its first line ran.
            self._tasks.pop(request_id, None)
            self._mailbox.put(Completion.of(request_id, [], [], [], [], "aborted"))

    def pause(self) -> None:
        """Send nothing new."""
        self._set_paused(True)

    def resume(self) -> None:
        """Send again."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        self._loop.loop.call_soon_threadsafe(self._gate.set_paused, paused)
        self._mailbox.set_paused(paused)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Raises UserError: the weights are the server's own."""
        raise UserError(
            f"The openai backend cannot load weights: they belong to the server at {self._options.base_url}. Use vllm or torch."
        )

    def close(self) -> None:
        """Drop all connections."""
        if not self._loop.loop.is_closed():
            self._loop.call(self._abort(list(self._tasks)))
            self._loop.call(self._client.aclose())
            self._loop.close()

    # ---- requests and answers -----------------------------------------------------------------------------------------

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": options.stream,
        }
        if options.api == "token_ids":
            seed = derive_seed(options.seed, request.request_id) if request.seed is None else request.seed
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
        if options.api != "token_ids" and request.seed is not None:
            body["seed"] = request.seed
        return {**body, **options.extra_body}

    def _completion(self, request: GenerationRequest, reply: Reply, reason: FinishReason) -> Completion:
        if self._options.api == "token_ids":
            token_ids, log_prob = reply.token_ids, reply.log_prob
            if len(log_prob) != len(token_ids) or (reply.text and not token_ids):
                return Completion.failed(request.request_id, self._without_ids(reply))
        else:
            token_ids = [] if self._tokenizer is None else self._tokenizer.encode(reply.text).tolist()
            log_prob = [float("nan")] * len(token_ids)
        limit: LengthLimit | None = None
        if reason == "length":
            limit = "max_new_tokens" if self._options.api != "token_ids" or len(token_ids) >= request.max_new_tokens else "context"
        sampling = [float("nan")] * len(log_prob)
        if request.samples_from_policy:
            sampling = log_prob
        elif request.temperature == 0 and self._options.api == "token_ids":
            sampling = [0.0] * len(log_prob)
        versions = [self._options.version] * len(token_ids)
        return Completion.of(request.request_id, token_ids, log_prob, sampling, versions, reason, limit=limit, text=reply.text)

    def _without_ids(self, reply: Reply) -> Failure:
        return Failure(
            "bad_response",
            f"The server at {self._options.base_url} gave {len(reply.token_ids)} token ids and {len(reply.log_prob)} log-probabilities for "
            f"{len(reply.text)} characters. It must know return_token_ids and logprobs; api 'completions' or 'chat' evaluates in text.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
