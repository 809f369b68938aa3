"""OpenAI's chat completions: what a request may ask, and how an answer looks, whole or as a stream."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied_rl.errors import did_you_mean
from embodied_rl.serving.agents.stop_texts import StopTexts
from embodied_rl.serving.http_server import HttpProblem

ROLES = ("system", "developer", "user", "assistant", "tool")
_HARMLESS = frozenset({"user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Asked for by clients as a habit; they change nothing about what is sampled."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""What is accepted only where it asks for nothing."""
_KNOWN = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "n",
)
_MAX_CHOICES = 128
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ChatRequest:
    """One request, checked."""

    messages: tuple[dict[str, Any], ...]
    """With text contents; see `plain_message`."""
    tools: tuple[dict[str, Any], ...] | None
    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    num_choices: int
    """n: answers, each sampled and captured separately."""
    forced: str = ""
    """How every answer begins (``tool_choice``). It is given to the model as the end of its prompt: nothing of it is sampled or trained."""


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check a request's body.

    Raises:
        HttpProblem: 400 for what is missing, malformed, or asks for something that this server cannot do; nothing is ignored silently.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("The request holds half of a surrogate pair, which no tokenizer takes.") from None
    for key, value in body.items():
        if key in _KNOWN or key in _HARMLESS or value is None:
            continue
        if key not in _NEUTRAL:
            raise HttpProblem(400, "unknown_parameter", f"'{key}' is not known.{did_you_mean(key, _KNOWN)}", choices=_KNOWN)
        if value not in _NEUTRAL[key]:
            raise HttpProblem(400, "unsupported_parameter", f"'{key}' can only be {_NEUTRAL[key][0]!r} here, got {value!r:.80}.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("'messages' must be a list of at least one message.")
    limit = body.get("max_completion_tokens")
    tools = _tools(body)
    options = body.get("stream_options")
    return ChatRequest(
        messages=tuple(plain_message(message, place) for place, message in enumerate(messages)),
        tools=tools,
        max_new_tokens=_number(body, "max_tokens" if limit is None else "max_completion_tokens", int, None, 1, 2**20),
        temperature=_number(body, "temperature", float, 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", float, 1.0, 1e-6, 1.0),
        top_k=max(_number(body, "top_k", int, 0, -1, 2**20), 0),
        seed=_number(body, "seed", int, None, 0, 2**63 - 1),
        stop=_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        num_choices=_number(body, "n", int, 1, 1, _MAX_CHOICES),
        forced=_forced(body.get("tool_choice"), tools),
    )


def _bad(message: str) -> HttpProblem:
    return HttpProblem(400, "invalid_request", message)


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _bad("'stop' must be a text or a list of texts, none of them empty.")
    return tuple(dict.fromkeys(texts))


def _number(body: Mapping[str, Any], name: str, kind: type, default: Any, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        raise _bad(f"'{name}' must be a{' whole' if kind is int else ''} number between {low:g} and {high:g}, got {value!r:.80}.")
    return kind(value)


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise _bad("'tools' must be a list of objects with a 'function'.")
    return tuple(tools)


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The beginning of a tool call that `tool_choice` asks for: up to the tool's name, or up to its arguments where the tool is known."""
    if choice in (None, "auto", "none"):
        return ""
    names = [str(tool["function"].get("name")) for tool in tools or ()]
    if choice == "required" and names:
        return f'{_CALL}\n{{"name": "' if len(names) > 1 else _forced_call(names[0])
    named = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(named, dict) and named.get("name") in names:
        return _forced_call(str(named["name"]))
    lacking = "" if names else ", and there are no 'tools'"
    message = f"'tool_choice' must be 'auto', 'none', 'required' or the function of one of 'tools', got {choice!r:.80}{lacking}."
    raise HttpProblem(400, "invalid_request", message, choices=names)


def _forced_call(name: str) -> str:
    return f'{_CALL}\n{{"name": {json.dumps(name)}, "arguments":'


def plain_message(message: Any, place: int) -> dict[str, Any]:
    """A message as templates take it: role, a text as content, tool calls with their arguments as objects; what is null is left out.

    Raises:
        HttpProblem: 400 for anything else than text.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else None
        raise _bad(f"messages[{place}]: the role must be one of {', '.join(ROLES)}, got {role!r:.80}.")
    plain: dict[str, Any] = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain["content"] = _text(message.get("content"), place)
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            plain[key] = str(message[key])
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, place) for call in calls] if isinstance(calls, list) else _call(calls, place)
    return plain


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise HttpProblem(400, "unsupported_content", f"messages[{place}]: the content must be a text; pictures and sounds are not taken here.")


def _call(call: Any, place: int) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # the model's own, and as malformed as it made it
                arguments = json.loads(arguments)
        return {"id": str(call.get("id", "")), "type": "function", "function": {"name": str(function["name"]), "arguments": arguments}}
    except (TypeError, KeyError, AttributeError):
        raise _bad(f"messages[{place}]: a tool call must be an object with a function that has a name and arguments.") from None


# ---- answers --------------------------------------------------------------------------------------------------------


def answer_message(text: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The assistant's message for a sampled text. Where tools were offered, ``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes, Qwen)
    becomes a tool call; one that is malformed stays text, for the agent to see."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if not tools or _CALL not in text:
        return message
    before, *pieces = text.split(_CALL)
    calls, rest = [], [before]
    for piece in pieces:
        inner, closed, after = piece.partition(_CALL_END)
        call = _sampled_call(inner)
        if call is None:
            return message
        calls.append(call)
        rest.append(after if closed else "")
    return {"role": "assistant", "content": "".join(rest).strip() or None, "tool_calls": calls}


def _sampled_call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    # OpenAI's arguments are a text that holds JSON.
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@dataclass(frozen=True)
class ChatAnswer:
    """What the client receives about one completion: a choice of an answer."""

    completion_id: str
    model: str
    message: dict[str, Any]
    finish_reason: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    index: int = 0

    def choice(self) -> dict[str, Any]:
        """One of ``choices``."""
        return {"index": self.index, "message": self.message, "finish_reason": self.finish_reason, "logprobs": self.told_logprobs()}

    def told_logprobs(self) -> dict[str, Any] | None:
        """As a choice holds them."""
        return None if self.logprobs is None else {"content": self.logprobs}


def whole(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """``chat.completion`` of all choices of a request."""
    head = _head("chat.completion", answers[0].completion_id, answers[0].model)
    return {**head, "choices": [answer.choice() for answer in answers], "usage": usage(answers)}


def usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    """Tokens of one prompt and of all its choices."""
    prompt, sampled = answers[0].num_prompt_tokens, sum(answer.num_sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str, completion_id: str, model: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


@dataclass
class ChatStream:
    """A choice as ``chat.completion.chunk`` events while it grows: the role, pieces of the content, tool calls, the end; then, of all
    choices, the usage."""

    completion_id: str
    model: str
    with_tools: bool
    """Whether a part of the text may become tool calls, and is held back."""
    stop: StopTexts
    """What may take back the end of the text, which is held back too."""
    index: int = 0
    told: str = ""
    """Content that was sent."""

    def begin(self) -> bytes:
        """The first event."""
        return self._event({"role": "assistant", "content": ""}, None)

    def grown(self, text: str) -> bytes | None:
        """The answer's text so far; None: nothing new is certain yet."""
        certain = _certain(self.stop.certain(text), self.with_tools)
        if len(certain) <= len(self.told) or not certain.startswith(self.told):
            return None
        new, self.told = certain[len(self.told) :], certain
        return self._event({"content": new}, None)

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        """What is left of the content, tool calls, and the end."""
        content = answer.message.get("content") or ""
        delta: dict[str, Any] = {}
        same = next((place for place, (a, b) in enumerate(zip(content, self.told, strict=False)) if a != b), len(self.told))
        if rest := content[same:]:
            delta["content"] = rest
        if calls := answer.message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        logprobs = answer.told_logprobs()
        if delta or logprobs is not None:
            yield self._event(delta, None, logprobs)
        yield self._event({}, answer.finish_reason)

    def done(self, answers: Sequence[ChatAnswer], include_usage: bool) -> Iterator[bytes]:
        """The usage, where it was asked for, and the last event."""
        if include_usage:
            yield sse({**_head("chat.completion.chunk", self.completion_id, self.model), "choices": [], "usage": usage(answers)})
        yield b"data: [DONE]\n\n"

    def _event(self, delta: dict[str, Any], reason: str | None, logprobs: Any = None) -> bytes:
        choice = {"index": self.index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return sse({**_head("chat.completion.chunk", self.completion_id, self.model), "choices": [choice]})


def _certain(text: str, with_tools: bool) -> str:
    """The beginning of a growing text that further tokens will not change: without half a character, and without what may be a tool
    call, or spaces before one."""
    certain = text.rstrip("\ufffd")
    if not with_tools:
        return certain
    if (place := certain.find(_CALL)) >= 0:
        return certain[:place].rstrip()
    half = next((n for n in range(len(_CALL) - 1, 0, -1) if certain.endswith(_CALL[:n])), 0)
    return certain[: len(certain) - half].rstrip()


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def openai_error(problem: HttpProblem) -> dict[str, Any]:
    """A refusal in OpenAI's form, with our word for it as ``code``."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind, "choices": problem.choices}}
