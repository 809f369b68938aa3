"""The agent proxy, described in OpenAPI: OpenAI's and Anthropic's interfaces to a token backend, with each answer recorded as sampled."""

from __future__ import annotations

import functools
import re
import secrets
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.serving import http_server as web
from embodied_rl.serving.agents import interfaces
from embodied_rl.serving.agents.chat import ChatRequest, StopTexts, bad, plain_message
from embodied_rl.serving.agents.pump import BackendPump
from embodied_rl.serving.agents.sessions import CapturedSession, CapturedTurn, Session, SessionBook, SessionLimits, SessionSampling

_REWARD = {
    "reward": {**web.NUMBER, "minimum": -(10**12), "maximum": 10**12},
    "turn": {**web.TEXT, "description": "Id of the rewarded answer; if missing, the whole session is rewarded."},
    "reward_id": {**web.TEXT, "description": "A repeated id adds nothing."},
}
_SESSION_SCHEMA = {"id": web.TEXT, "turns": web.COUNT, "reward": web.NUMBER}


_ERROR = {
    "type": "object",
    "properties": {"message": web.TEXT, "type": web.TEXT, "code": web.TEXT, "choices": web.TEXTS},
    "required": ["message", "type"],
}
_PROBLEM = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}


_WATCH_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FAILED = {"prompt_too_long": (400, "context_length_exceeded"), "rejected": (400, "invalid_request"), "rate_limited": (429, "rate_limited")}


@dataclass(frozen=True)
class ProxyOptions:
    """Sampling options of the proxy. Raises UserError for a limit below 1."""

    model: str
    """Model name for clients."""
    stop_ids: tuple[int, ...]
    """Tokens that end an answer, such as the template's end of a turn."""
    max_new_tokens: int = 1024
    """Most tokens of one answer, whatever a client requests."""
    policy_sampling: bool = False
    """Sample from the model's own distribution (temperature 1, no truncation), whatever a client requests, as training recomputes it."""
    tells_messages: bool = False
    """Whether the backend's requests contain the chat's messages besides its tokens: a scripted player reads them."""
    output: Path | None = None
    """Folder for ended sessions, as JSON. None: they wait for `AgentProxy.take_finished`."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}.")


@dataclass(frozen=True)
class _Asked:
    """A client's request on its way to the backend."""

    session: Session
    chat: ChatRequest
    parent: int | None
    """Turn that it continues; see `Session.prompt`."""
    requests: Sequence[GenerationRequest]
    """One for each choice."""
    stop: StopTexts
    name: str
    """Id of the answer."""
    gone: Callable[[], bool]
    """Whether the client no longer waits."""


class AgentProxy:
    """Serves from construction on; see `embodied_rl.serve_agent`.

    Without a token (on the loopback only), any API key opens its session. With one, ``POST /v1/sessions`` opens sessions with keys.
    """

    def __init__(
        self,
        backend: TokenBackend,
        tokenizer: ChatTokenizer,
        options: ProxyOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: SessionLimits | None = None,
        http: web.ServerLimits | None = None,
    ) -> None:
        """`backend` belongs to the proxy's thread until `close`, and to the caller afterwards. Raises UserError: the tokenizer has no chat
        template, others could reach the proxy and there is no token, or the address is taken."""
        web.require_token_off_loopback(host, token)
        tokenizer.chat_text([{"role": "user", "content": "Hello."}])  # a missing template raises now
        self._tokenizer, self._options, self._token = tokenizer, options, token
        self._tokenizer_lock = threading.Lock()
        limits = limits or SessionLimits()
        self._book = SessionBook(limits, open_to_any_key=token is None and web.is_loopback(host))
        self._finished: deque[CapturedSession] = deque()
        self._ending = threading.RLock()
        """Held while a session ends, until it is kept or written."""
        self.shared_backend, self._can_constrain = BackendPump(backend), backend.can_constrain
        """The backend, also for users other than the proxy, as long as it is open."""
        self._entry = {"id": options.model, "object": "model", "created": 0, "owned_by": "embodied_rl"}
        self._routes = web.Routes("embodied_rl agent proxy", self._table(), _PROBLEM)
        try:
            self._server = web.HttpServer(
                self._routes.answer,
                host=host,
                port=port,
                # A client keeps a connection for each request that it sends at the same time.
                limits=http or web.ServerLimits(max_body_mb=4.0, max_connections=max(256, 2 * limits.max_sessions)),
                any_host_header=token is not None,
                admit=self._admit,
                format_problem=_refusal,
            )
        except BaseException:
            self.shared_backend.close()
            raise
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="session watcher", daemon=True).start()

    @property
    def base_url(self) -> str:
        """Base URL for an OpenAI client: ``http://127.0.0.1:PORT/v1``."""
        return f"{self._server.url}/v1"

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Load weights between two decoding steps; answers in flight continue with them. Raises UserError as the backend does."""
        self.shared_backend.load_weights(version, tensors)

    def open_session(self, metadata: Mapping[str, Any] | None = None, sampling: SessionSampling | None = None) -> tuple[str, str]:
        """Open a session for the caller's own program; returns (its name, its key). Raises UserError if there is no room."""
        name, key = f"session-{secrets.token_hex(8)}", f"sk-{secrets.token_urlsafe(24)}"
        try:
            self._book.open(name, key, metadata, sampling)
        except web.HttpProblem as problem:
            raise UserError(problem.message) from problem
        return name, key

    def num_turns(self, name: str) -> int:
        """Answers of an open session so far; 0 if it has ended."""
        session = self._book.sessions.get(name)
        return 0 if session is None else session.num_turns

    def end_session(self, name: str) -> CapturedSession | None:
        """End a session, or take one that its client ended, instead of leaving it to `take_finished`. None: there is none of that name."""
        with self._ending:
            session = self._book.sessions.get(name)
            if session is not None:
                captured, _ = session.end("close")
                self._book.forget(session)
                return captured
            taken = next((one for one in list(self._finished) if one.session == name), None)
            if taken is not None:
                self._finished.remove(taken)
            return taken

    def take_finished(self) -> list[CapturedSession]:
        """Sessions that ended since the last call, oldest first; empty if they are written to a folder."""
        taken = []
        while self._finished and self._options.output is None:
            taken.append(self._finished.popleft())
        return taken

    def close(self) -> None:
        """Stop answering; open sessions with turns are finished, as ended by ``close``. Raises UserError: a session cannot be written."""
        self._closing.set()
        self._server.close()
        self.shared_backend.close()
        with self._ending:
            for session in list(self._book.sessions.values()):
                self._finish(session, "close")
            self._write()

    # ---- routes -----------------------------------------------------------------------------------------------------

    def _table(self) -> dict[str, web.Route]:
        chat, responses, messages = interfaces.ChatCompletions(), interfaces.Responses(), interfaces.Messages()
        kept = "The answer; what was sampled is kept."

        def asked(interface: interfaces.Interface, about: str, *needed: str) -> web.Route:
            return functools.partial(self._chat, interface), web.route(about, kept, body=(interface.fields, needed), streams=True)

        def of_session(action: str, about: str, answer: str, *needed: str) -> web.Route:
            return functools.partial(self._rewarded, action), web.route(about, answer, _SESSION_SCHEMA, body=(_REWARD, needed))

        opened = {"id": web.TEXT, "api_key": web.TEXT}
        return {
            "POST /v1/chat/completions": asked(chat, "OpenAI's chat completions.", "messages"),
            "POST /v1/responses": asked(responses, "OpenAI's responses.", "input"),
            "POST /v1/messages": asked(messages, "Anthropic's messages.", "messages", "max_tokens"),
            "POST /v1/messages/count_tokens": (
                self._count_tokens,
                web.route(
                    "Number of tokens of a prompt.", "Its tokens.", {"input_tokens": web.COUNT}, body=(messages.fields, ["messages"])
                ),
            ),
            "GET /v1/models": (
                lambda request: web.Reply({"object": "list", "data": [self._entry]}),
                web.route("The served model.", "The one model.", {"data": web.LIST}),
            ),
            "GET /v1/models/{model:path}": (self._model, web.route("The model, by its name.", "The model.", {"id": web.TEXT})),
            "GET /v1/sessions": (self._list, web.route("The open sessions.", "Each of them.", {"sessions": web.LIST})),
            "POST /v1/sessions": (
                self._open,
                web.route(
                    "Open a session.", "Its name and its key.", opened, body=({"id": web.TEXT, "metadata": web.OBJECT}, []), status="201"
                ),
            ),
            "GET /v1/sessions/{id}": (
                lambda request, name: web.Reply(self._session(request, name).captured().to_dict()),
                web.route("Captured turns of a session.", "Its turns."),
            ),
            "POST /v1/sessions/{id}/reward": of_session(
                "reward", "Reward a session, or one of its answers.", "All rewards so far.", "reward"
            ),
            "POST /v1/sessions/{id}/end": of_session("end", "End a session.", "All rewards."),
        }

    def _model(self, request: web.HttpRequest, name: str) -> web.Reply:
        self._require_model(unquote(name))
        return web.Reply(self._entry)

    def _admit(self, request: web.HttpRequest) -> None:
        """Raise HttpProblem 401 if there is a token and the request has neither it nor a session's key."""
        if self._token is None or request.path in ("/openapi.json", "/docs") or web.same_token(request.key, self._token):
            return
        if request.path.startswith("/v1/sessions") and request.key not in self._book.keys:
            web.require_token(request, self._token)
        self._book.by_key(request.key)

    def _require_model(self, name: object) -> None:
        if name != self._options.model:
            raise web.HttpProblem(404, "model_not_found", f"Model {name!r:.80} is not served here.", choices=[self._options.model])

    def _chat(self, interface: interfaces.Interface, request: web.HttpRequest) -> web.Reply | web.EventStream:
        self._end_idle()
        session = self._session_of_key(request.key)
        chat = self._possible(interface.read(request.body, session.recall))
        self._require_model(request.body.get("model", self._options.model))
        session.begin()
        ask = functools.partial(self._asked, session, chat, interface.new_id(), request.client_gone)
        if not chat.stream:
            try:
                return web.Reply(interface.whole(chat, self._sample(ask())))
            finally:
                session.release()
        events = self._streamed(interface, session, ask)
        # Nothing is sent before the first token, so that a refusal gets its own status.
        return web.EventStream(_begun(next(events), events))

    def _count_tokens(self, request: web.HttpRequest) -> web.Reply:
        """Token count of a prompt, for Anthropic's clients; nothing is sampled or kept."""
        session = self._session_of_key(request.key)
        asked = self._asked(session, interfaces.Messages().read(request.body, session.recall), "", request.client_gone)
        return web.Reply({"input_tokens": len(asked.requests[0].prompt_ids)})

    def _possible(self, chat: ChatRequest) -> ChatRequest:
        """The request without what the backend cannot do. Raises HttpProblem 400 if that would change its meaning."""
        if self._can_constrain:
            return chat
        if chat.needs_structure or chat.top_logprobs:
            what = "answers that keep to a format ('response_format')" if chat.needs_structure else "the likeliest tokens ('top_logprobs')"
            raise web.HttpProblem(400, "unsupported_parameter", f"The backend of this server does not support {what}; torch and vllm do.")
        return replace(chat, structure=None)  # a required call is only begun for the model

    def _streamed(self, interface: interfaces.Interface, session: Session, ask: Callable[[], _Asked]) -> Generator[bytes]:
        """Events of an answer while it is sampled."""
        begun = False
        try:
            asked = ask()
            with closing(self._items(asked)) as items:
                for event in interface.stream(asked.chat, asked.name, self._options.model, len(asked.requests[0].prompt_ids), items):
                    begun = True
                    yield event
        except web.HttpProblem as problem:
            if not begun:
                raise
            yield interface.broken(problem)
        finally:
            session.release()

    def _items(self, asked: _Asked) -> Generator[interfaces.Item]:
        """What comes of an answer while it is sampled. Several choices come whole, as does the content of one with logprobs."""
        if len(asked.requests) > 1:
            yield from self._sample(asked)
            return
        chat, (request,) = asked.chat, asked.requests
        text = interfaces.GrowingText(asked.stop, chat.tools is not None)
        for found in self._stream_of(asked, request, grows=True):
            if isinstance(found, Completion):
                yield self._kept(asked, found)
            elif not chat.logprobs and (piece := text.grown(chat.forced + self._text(found, request.stop_ids))):
                yield piece

    def _stream_of(self, asked: _Asked, request: GenerationRequest, *, grows: bool) -> Iterator[list[int] | Completion]:
        """Tokens as they grow, then the completion, cut after the first stop text; the backend stops soon after that text. `grows` False:
        tokens are only looked at for stop texts. Raises HttpProblem if the completion failed or was aborted."""
        num_seen, stop = 0, asked.stop

        def enough(tokens: list[int]) -> bool:
            nonlocal num_seen
            seen, num_seen = num_seen, len(tokens)
            return bool(stop.texts) and stop.reached(tokens, seen)

        with closing(self.shared_backend.stream(request, asked.gone, enough if grows or stop.texts else None)) as pieces, _refused():
            for found in pieces:
                if isinstance(found, Completion):
                    found = stop.cut(found)
                    if found.failure is not None:
                        status, kind = _FAILED.get(found.failure.kind, (502, found.failure.kind))
                        raise web.HttpProblem(status, kind, found.failure.message)
                    if found.finish_reason == "aborted":
                        raise web.HttpProblem(503, "aborted", "The answer was aborted before its end.")
                yield found

    def _session_of_key(self, key: str | None) -> Session:
        if self._book.open_to_any_key and key is not None and not _NAME.fullmatch(key):
            message = "Without a token, an API key names its session: at most 128 letters, digits, '.', '_' or '-'."
            raise web.HttpProblem(400, "bad_key", message)
        return self._book.by_key(key)

    def _open(self, request: web.HttpRequest) -> web.Reply:
        web.require_token(request, self._token)
        self._end_idle()
        name = request.body.get("id")
        if name is not None and not _NAME.fullmatch(name):
            raise bad("'id' must be a name of letters, digits, '.', '_' and '-'.")
        name = name or f"session-{secrets.token_hex(8)}"
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._book.open(name, key, request.body.get("metadata"))
        return web.Reply({"id": name, "api_key": key}, 201)

    def _list(self, request: web.HttpRequest) -> web.Reply:
        web.require_token(request, self._token)
        sessions = [{"id": s.name, "turns": s.num_turns, "in_flight": s.in_flight} for s in list(self._book.sessions.values())]
        return web.Reply({"sessions": sessions})

    def _session(self, request: web.HttpRequest, name: str) -> Session:
        if request.key is None or self._book.keys.get(request.key) != name:  # a session's own key is accepted too
            web.require_token(request, self._token)
        return self._book.by_name(name)

    def _rewarded(self, action: str, request: web.HttpRequest, name: str) -> web.Reply:
        session = self._session(request, name)
        body = request.body
        reward = body.get("reward")  # a session may end without one
        total = session.total_reward if reward is None else session.give(float(reward), body.get("turn"), body.get("reward_id"))
        if action == "end":
            self._finish(session, "client")
            self._write()
        return web.Reply({"id": session.name, "turns": session.num_turns, "reward": total})

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def _sample(self, asked: _Asked) -> list[interfaces.ChatAnswer]:
        """Sample all choices in parallel and capture them in their order, as `name`, `name`:1, …"""

        def complete(request: GenerationRequest) -> Completion:
            *_, last = self._stream_of(asked, request, grows=False)
            assert isinstance(last, Completion), "a stream ends with it"
            return last

        if len(asked.requests) == 1:
            completions = [complete(asked.requests[0])]
        else:
            with ThreadPoolExecutor(len(asked.requests), "choice") as threads:
                completions = list(threads.map(complete, asked.requests))
        return [self._kept(asked, found, index) for index, found in enumerate(completions)]

    def _decoded(self, token_ids: Sequence[int] | np.ndarray) -> str:
        with self._tokenizer_lock:  # fast tokenizers are not thread-safe
            return self._tokenizer.decode(token_ids)

    def _stop_ids(self, text: str) -> list[int]:
        """Ids of a stop text that is a single token; it ends an answer at once, and may be a special token."""
        found = self._tokenizer.encode(text).tolist()
        return found if len(found) == 1 and self._tokenizer.decode(found, skip_special_tokens=False) == text else []

    def _asked(self, session: Session, chat: ChatRequest, name: str, gone: Callable[[], bool]) -> _Asked:
        with self._tokenizer_lock:
            try:
                prompt_ids, parent = session.prompt(chat.messages, chat.tools, self._tokenizer)
            except UserError as error:
                raise web.HttpProblem(400, "invalid_request", str(error)) from error
            if chat.forced:
                prompt_ids = np.concatenate([prompt_ids, self._tokenizer.encode(chat.forced)])
            # In a structure a stop token may only come at the end, so there texts are only looked for.
            texts = chat.stop if chat.structure is None else ()
            stop_ids = (*self._options.stop_ids, *(token for text in texts for token in self._stop_ids(text)))
        requests = [self._request(session, chat, prompt_ids, stop_ids, number) for number in range(chat.num_choices)]
        return _Asked(session, chat, parent, requests, StopTexts(chat.stop, self._decoded), name, gone)

    def _request(
        self, session: Session, chat: ChatRequest, prompt_ids: np.ndarray, stop_ids: tuple[int, ...], number: int
    ) -> GenerationRequest:
        """Request for choice `number`. A client's seed is that of the first choice; later choices get seeds derived from it."""
        asked_seed = chat.seed
        if chat.seed is not None and number > 0:
            asked_seed = SessionSampling(chat.seed).request_seed(number)
        options, fixed = self._options, session.sampling
        asked = (chat.temperature, chat.top_p, chat.top_k, asked_seed)
        if options.policy_sampling:
            asked = (1.0, 1.0, 0, asked_seed)
        if fixed is not None:
            cut = (1.0, 0) if fixed.temperature == 0 else (fixed.top_p, fixed.top_k)
            asked = (fixed.temperature, *cut, fixed.request_seed(session.next_request()))
        temperature, top_p, top_k, seed = asked
        return GenerationRequest(
            request_id=0,
            prompt_ids=prompt_ids,
            max_new_tokens=min(chat.max_new_tokens or options.max_new_tokens, options.max_new_tokens),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_ids=stop_ids,
            seed=seed,
            structure=chat.structure,
            top_logprobs=chat.top_logprobs,
            messages=chat.messages if options.tells_messages else None,
        )

    def _text(self, sampled: Sequence[int] | np.ndarray, stop_ids: tuple[int, ...]) -> str:
        """Text of sampled tokens, without the stop token at the end."""
        ended = len(sampled) > 0 and int(sampled[-1]) in stop_ids
        return self._decoded(sampled[:-1] if ended else sampled)

    def _kept(self, asked: _Asked, completion: Completion, index: int = 0) -> interfaces.ChatAnswer:
        """Choice `index` of the answer, as it was captured."""
        session, chat, stop, request = asked.session, asked.chat, asked.stop, asked.requests[0]
        completion_id, sampled = asked.name if index == 0 else f"{asked.name}:{index}", completion.token_ids
        text = chat.forced + self._text(sampled, request.stop_ids)
        stop_text = stop.first(text)
        if stop_text is None and len(sampled):
            with self._tokenizer_lock:
                stop_text = next((one for one in chat.stop if int(sampled[-1]) in self._stop_ids(one)), None)
        message = interfaces.answer_message(stop.before(text), chat.tools)
        plain = plain_message(message, 0)
        turn = CapturedTurn(
            completion_id=completion_id,
            parent=asked.parent,
            prompt_ids=request.prompt_ids,
            sampled_ids=sampled,
            log_prob=completion.log_prob,
            sampling_log_prob=completion.sampling_log_prob,
            version=completion.version,
            finish_reason=completion.finish_reason,
            structure=chat.structure,
            stop_ids=() if chat.structure is None else request.stop_ids,
        )
        session.add(turn, (*chat.messages, plain), chat.tools)
        if chat.recalled_from is not None:
            session.remember(completion_id, (*chat.messages[chat.recalled_from :], plain))
        reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        return interfaces.ChatAnswer(
            completion_id,
            self._options.model,
            message,
            reason,
            len(request.prompt_ids),
            len(sampled),
            self._logprobs(completion) if chat.logprobs else None,
            index,
            stop_text,
        )

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        """Log-probabilities of each sampled token, and of the likeliest alternatives if requested, under the model's own distribution."""
        places = range(completion.num_tokens)
        top_ids, top_log_prob = completion.top_ids, completion.top_log_prob
        with self._tokenizer_lock:
            entries = [self._logprob(int(completion.token_ids[place]), float(completion.log_prob[place])) for place in places]
            if top_ids is None or top_log_prob is None:
                return [{**one, "top_logprobs": []} for one in entries]
            tops = [map(self._logprob, top_ids[place].tolist(), top_log_prob[place].tolist()) for place in places]
            return [{**one, "top_logprobs": list(top)} for one, top in zip(entries, tops, strict=True)]

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": value if np.isfinite(value) else None, "bytes": list(text.encode())}

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """End idle sessions without further requests, too."""
        while not self._closing.wait(_WATCH_S):
            self._end_idle()

    def _end_idle(self) -> None:
        for session in self._book.idle():
            self._finish(session, "idle")
        try:
            self._write()
        except UserError as error:  # not of the client that asks, nor the watcher's end
            warnings.warn(f"{error} Its sessions are kept, and written as soon as that is possible.", stacklevel=2)

    def _finish(self, session: Session, ended_by: str) -> None:
        with self._ending:
            captured, first = session.end(ended_by)
            self._book.forget(session)
            if first and (captured.turns or ended_by == "client"):
                self._finished.append(captured)

    def _write(self) -> None:
        """Write finished sessions to the folder, if there is one. Raises UserError for one that cannot be written, which stays."""
        with self._ending:
            while self._finished and self._options.output is not None:
                self._finished[0].save(self._options.output)
                self._finished.popleft()


def _refusal(problem: web.HttpProblem, path: str) -> dict[str, Any]:
    """Refusal in the format of the requested interface."""
    return (interfaces.Messages() if path.startswith("/v1/messages") else interfaces.ChatCompletions()).refusal(problem)


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a backend's refusal into an answer for its client."""
    try:
        yield
    except UserError as error:
        raise web.HttpProblem(400, "invalid_request", str(error)) from error
    except RuntimeError as error:
        raise web.HttpProblem(503, "backend_gone", str(error)) from error


def _begun(first: bytes, rest: Generator[bytes]) -> Generator[bytes]:
    """A generator whose first event was taken, with that event back in front; closing it closes the original."""
    with closing(rest):
        yield first
        yield from rest
