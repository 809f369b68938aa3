"""What every interface of the proxy reads a request into, and writes an answer from; and OpenAI's chat completions, the first of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied_rl.errors import did_you_mean
from embodied_rl.generation.tokens import Completion
from embodied_rl.serving.http_server import COUNT, FLAG, LIST, NUMBER, OBJECT, TEXT, HttpProblem

# ---- What an answer must keep to in xgrammar's structural tags, tool calls in its text, and stop texts across the borders of tokens ----


CALL, CALL_END = "<tool_call>", "</tool_call>"


def forced_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of a call of one of these tools: up to its name, or, of one tool, up to its arguments."""
    name = f'{json.dumps(tools[0]["function"].get("name"))}, "arguments":' if len(tools) == 1 else '"'
    return f'{CALL}\n{{"name": {name}'


def sampled_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, the calls in it): one that is malformed leaves the whole as text, for the agent to see."""
    if CALL not in text:
        return text, []
    before, *pieces = text.split(CALL)
    calls, rest = [], [before]
    for piece in pieces:
        inner, closed, after = piece.partition(CALL_END)
        call = _sampled_call(inner)
        if call is None:
            return text, []
        calls.append(call)
        rest.append(after if closed else "")
    return "".join(rest).strip() or None, calls


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


_MOST_SPACES = 16
"""Side by side: a model must not write spaces for ever."""
_LARGEST_BYTES = 2**18


def schema_structure(schema: object, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
    """An answer that is JSON by a schema, or calls of tools where there are some."""
    answer = _json(schema)
    if not tools:
        return _text(answer)
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(f'{CALL}\n{{"name": {json.dumps(_name(tool))}, "arguments": ', tool) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not several,
    }
    return _text({"type": "or", "elements": [answer, calls]})


def call_structure(tools: Sequence[Mapping[str, Any]]) -> str:
    """What follows `forced_call`: one call of one of these tools, whose arguments keep to its parameters."""
    if len(tools) == 1:
        return _text(_tag(" ", tools[0]))
    return _text({"type": "or", "elements": [_tag(f'{json.dumps(_name(tool))[1:]}, "arguments": ', tool) for tool in tools]})


def _tag(begin: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["function"].get("parameters") or {"type": "object"}
    return {"type": "tag", "begin": begin, "content": _json(schema), "end": f"}}\n{CALL_END}"}


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"].get("name"))


def _json(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES}


def _text(form: Mapping[str, Any]) -> str:
    text = json.dumps({"type": "structural_tag", "format": form})
    if len(text) > _LARGEST_BYTES:
        raise HttpProblem(400, "invalid_request", f"The schema has {len(text):,} bytes as JSON; this server takes {_LARGEST_BYTES:,}.")
    return text


_TAIL = 8
"""Tokens of an answer that grows are looked at again, for the half of a stop text that was there before."""


@dataclass(frozen=True)
class StopTexts:
    """What ends an answer. The first of the texts to be complete counts."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    """Token ids to text."""

    def before(self, text: str) -> str:
        """A text without the first stop text in it and what follows."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def first(self, text: str) -> str | None:
        """The stop text that comes first in a text; None where there is none."""
        return min((stop for stop in self.texts if stop in text), key=text.find, default=None)

    def certain(self, text: str) -> str:
        """The beginning of a growing text that no stop text will take back."""
        text = self.before(text)
        half = max((n for stop in self.texts for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - half]

    def reached(self, token_ids: Sequence[int], num_seen: int = 0) -> bool:
        """Whether tokens hold a stop text; the first `num_seen` are known to hold none."""
        # Every token but a special one has at least one byte of the text.
        longest = max((len(stop.encode()) for stop in self.texts), default=0)
        tail = self.decode(token_ids[max(num_seen - longest - _TAIL, 0) :])
        return self._inside(tail) and self._inside(self.decode(token_ids))

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a stop text, as stopped; as it is where there is none.

        What was sampled up to there does not depend on what was sampled after it, nor on when a backend noticed.
        """
        token_ids = completion.token_ids.tolist()
        if completion.failure is not None or not self.texts or not self._inside(self.decode(token_ids)):
            return completion
        low, high = 0, len(token_ids)  # the first `low` tokens hold none, the first `high` do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._inside(self.decode(token_ids[:middle])) else (middle, high)
        return completion.first(high, "stop")

    def _inside(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


ROLES = ("system", "developer", "user", "assistant", "tool")
_HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Asked for by clients as a habit; they change nothing about what is sampled."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""What is accepted only where it asks for nothing."""
SOME = {"type": "integer", "minimum": 1}
SAMPLING = {"temperature": {**NUMBER, "minimum": 0}, "top_p": {**NUMBER, "maximum": 1}}
TOOL_CHOICE = {"description": "auto, none, required, or one function."}
TOP_LOGPROBS = {**COUNT, "maximum": 20}
_FIELDS = {
    "model": TEXT,
    "messages": {**LIST, "description": "Texts, tool calls and their results."},
    "tools": LIST,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "response_format": {**OBJECT, "description": "text, json_object, or json_schema with its schema."},
    "max_tokens": SOME,
    "max_completion_tokens": SOME,
    **SAMPLING,
    "top_k": {"type": "integer"},
    "seed": COUNT,
    "stop": {"description": "A text or several; the answer ends before the first."},
    "n": SOME,
    "logprobs": FLAG,
    "top_logprobs": TOP_LOGPROBS,
    "stream": FLAG,
    "stream_options": OBJECT,
}
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20

Recall = Callable[[str], tuple[dict[str, Any], ...] | None]
"""The messages of an earlier answer by its id, itself included; None: there is no such answer."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request, checked."""

    messages: tuple[dict[str, Any], ...]
    """With text contents; see `plain_message`."""
    tools: tuple[dict[str, Any], ...] | None = None
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the likeliest tokens of each place are sent."""
    num_choices: int = 1
    """n: answers, each sampled and captured separately."""
    forced: str = ""
    """How every answer begins (``tool_choice``). It is given to the model as the end of its prompt: nothing of it is sampled or trained."""
    structure: str | None = None
    """What the rest keeps to (`GenerationRequest.structure`): a JSON schema (``response_format``), or a tool call that must be made."""
    needs_structure: bool = False
    """Whether a backend that cannot constrain is refused: ``response_format``. Calls are then only begun for the model."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The request's body."""
    recalled_from: int | None = None
    """Messages from this place on are what `Recall` gives for its answer; None: nothing is kept for it."""


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """A request of ``/v1/chat/completions``. Raises HttpProblem 400 for what is missing, malformed, or cannot be done here."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' must be a list of at least one message.")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    tools = _tools(body)
    options, top = body.get("stream_options"), whole_number(body, "top_logprobs", 0, _MAX_TOP_LOGPROBS) or 0
    if top and not body.get("logprobs"):
        raise bad("'top_logprobs' come only beside 'logprobs': true.")
    return ChatRequest(
        messages=tuple(plain_message(message, place) for place, message in enumerate(messages)),
        tools=tools,
        top_k=max(whole_number(body, "top_k", -1, 2**20) or 0, 0),
        seed=whole_number(body, "seed", 0, 2**63 - 1),
        stop=stop_texts(body, "stop"),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=top,
        num_choices=whole_number(body, "n", 1, _MAX_CHOICES) or 1,
        **constraints(body.get("tool_choice"), tools, _schema(body.get("response_format")), parallel(body)),
        **sampling(body, limit),
    )


def sampling(body: Mapping[str, Any], limit: str) -> dict[str, Any]:
    """What every interface says alike, as fields of a `ChatRequest`; `limit` names the most tokens. Raises HttpProblem 400."""
    return {
        "max_new_tokens": whole_number(body, limit, 1, 2**20),
        "temperature": real_number(body, "temperature", 0.0, 100.0),
        "top_p": real_number(body, "top_p", 1e-6, 1.0),
        "stream": bool(body.get("stream")),
        "asked": body,
    }


def bad(message: str) -> HttpProblem:
    """400, invalid_request."""
    return HttpProblem(400, "invalid_request", message)


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text or a list of texts. Raises HttpProblem 400."""
    stop = body.get(name)
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise bad(f"'{name}' must be a text or a list of texts, none of them empty.")
    return tuple(dict.fromkeys(texts))


def whole_number(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """None where it is not given. Raises HttpProblem 400."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
        raise bad(f"'{name}' must be a whole number between {low:g} and {high:g}, got {value!r:.80}.")
    return value


def real_number(body: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """1 where it is not given. Raises HttpProblem 400."""
    value = body.get(name)
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise bad(f"'{name}' must be a number between {low:g} and {high:g}, got {value!r:.80}.")
    return float(value)


def parallel(body: Mapping[str, Any]) -> bool:
    """Whether an answer may hold several calls. Raises HttpProblem 400."""
    value = body.get("parallel_tool_calls")
    if not isinstance(value, bool | None):
        raise bad(f"'parallel_tool_calls' must be true or false, got {value!r:.80}.")
    return value is not False


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise bad("'tools' must be a list of objects with a 'function'.")
    return tuple(tools)


def _schema(response_format: object) -> object:
    """The JSON schema that ``response_format`` asks for; None: any text. Raises HttpProblem 400."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    named = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if kind == "json_schema" and isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return named["schema"]
    message = f"'response_format' must be {{'type': …}} with text, json_object, or json_schema and its schema, got {response_format!r:.80}."
    raise HttpProblem(400, "invalid_request", message, choices=["text", "json_object", "json_schema"])


def constraints(choice: object, tools: Sequence[Mapping[str, Any]] | None, schema: object, several: bool) -> dict[str, Any]:
    """What ``tool_choice`` and a schema make of an answer: `forced`, `structure` and `needs_structure` of a `ChatRequest`.

    Args:
        choice: in the form of chat completions.
        schema: of the answer; None: any text.
        several: whether an answer may hold several calls.

    Raises:
        HttpProblem: 400 for a choice that cannot be made.
    """
    names = [str(tool["function"].get("name")) for tool in tools or ()]
    if choice in (None, "auto", "none"):
        return {} if schema is None else {"structure": schema_structure(schema, tools or (), several), "needs_structure": True}
    named = choice.get("function") if isinstance(choice, dict) else None
    wanted = str(named.get("name")) if isinstance(named, dict) else None
    if not ((choice == "required" and names) or wanted in names):
        lacking = "" if names else ", and there are no 'tools'"
        message = f"'tool_choice' must be 'auto', 'none', 'required' or the function of one of 'tools', got {choice!r:.80}{lacking}."
        raise HttpProblem(400, "invalid_request", message, choices=names)
    able = [tool for tool, name in zip(tools or (), names, strict=True) if choice == "required" or name == wanted]
    return {"forced": forced_call(able), "structure": call_structure(able)}


def plain_message(message: object, place: int) -> dict[str, Any]:
    """A message as templates take it: role, a text as content, tool calls with their arguments as objects; what is null is left out.
    Raises HttpProblem: 400 for anything else than text."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else None
        raise bad(f"messages[{place}]: the role must be one of {', '.join(ROLES)}, got {role!r:.80}.")
    plain: dict[str, Any] = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain["content"] = plain_text(message.get("content"), f"messages[{place}]")
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            plain[key] = str(message[key])
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, place) for call in calls] if isinstance(calls, list) else _call(calls, place)
    return plain


def plain_text(content: object, where: str) -> str:
    """A text, or the joined texts of parts that each have one; "" for null. Raises HttpProblem 400."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise HttpProblem(400, "unsupported_content", f"{where}: the content must be a text; pictures and sounds are not taken here.")


def plain_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A tool call as templates take it."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the model's own, and as malformed as it made it
            arguments = json.loads(arguments)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _call(call: object, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not {"name", "arguments"} <= set(function):
        raise bad(f"messages[{place}]: a tool call must be an object with a function that has a name and arguments.")
    return plain_call(call.get("id"), function["name"], function["arguments"])


# ---- answers --------------------------------------------------------------------------------------------------------


def answer_message(text: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The assistant's message for a sampled text; see `sampled_calls`."""
    content, calls = sampled_calls(text) if tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True)
class ChatAnswer:
    """What the client receives about one completion: a choice of an answer."""

    completion_id: str
    model: str
    message: dict[str, Any]
    """In the form of chat completions."""
    finish_reason: str
    """stop, length or tool_calls"""
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    index: int = 0
    stop_text: str | None = None
    """Which of the request's stop texts ended it."""

    @property
    def content(self) -> str:
        """The message's text."""
        return self.message["content"] or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The message's tool calls."""
        return self.message.get("tool_calls", [])


class AnswerStream(ABC):
    """A choice as server-sent events while it grows; a subclass for each interface writes them.

    What further tokens may change is held back: half a character, what may be a tool call or spaces before one, and what may become a stop
    text.
    """

    def __init__(self, chat: ChatRequest, completion_id: str, model: str, stop: StopTexts, num_prompt_tokens: int, index: int = 0) -> None:
        self.chat, self.completion_id, self.model, self.num_prompt_tokens, self.index = chat, completion_id, model, num_prompt_tokens, index
        self._stop, self._told = stop, ""

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """The first events."""

    @abstractmethod
    def piece(self, text: str) -> Iterator[bytes]:
        """More of the content."""

    @abstractmethod
    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        """What is left of the content, tool calls, and the choice's end."""

    @abstractmethod
    def done(self, answers: Sequence[ChatAnswer]) -> Iterator[bytes]:
        """The end of the stream, behind all choices."""

    def grown(self, text: str) -> str:
        """What is new and certain of the answer's text so far; "" for nothing."""
        certain = self._certain(self._stop.certain(text))
        if len(certain) <= len(self._told) or not certain.startswith(self._told):
            return ""
        new, self._told = certain[len(self._told) :], certain
        return new

    def rest(self, answer: ChatAnswer) -> str:
        """What was not yet sent of the content."""
        content, told = answer.content, self._told
        same = next((place for place, (a, b) in enumerate(zip(content, told, strict=False)) if a != b), len(told))
        return content[same:]

    def _certain(self, text: str) -> str:
        certain = text.rstrip("\ufffd")
        if self.chat.tools is None:
            return certain
        if (place := certain.find(CALL)) >= 0:
            return certain[:place].rstrip()
        half = next((n for n in range(len(CALL) - 1, 0, -1) if certain.endswith(CALL[:n])), 0)
        return certain[: len(certain) - half].rstrip()


class Interface(ABC):
    """How one interface writes requests, answers and refusals."""

    stream: type[AnswerStream]
    """Writes a choice of a streamed answer."""
    id_prefix: str
    fields: Mapping[str, Any]
    """{name: schema} of a request's body."""
    harmless: frozenset[str] = frozenset()
    """Further names whose values change nothing."""
    neutral: Mapping[str, tuple[object, ...]] = {}
    """{further name: its values that change nothing}"""

    @abstractmethod
    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        """A request from its body. Raises HttpProblem 400."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what is not known, and what asks for something that this server cannot do; nothing is ignored silently.
        Raises HttpProblem: 400, with the choices."""
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad("The request holds half of a surrogate pair, which no tokenizer takes.") from None
        for key, value in body.items():
            if key in self.fields or key in self.harmless or value is None:
                continue
            if key not in self.neutral:
                near = did_you_mean(key, self.fields)
                raise HttpProblem(400, "unknown_parameter", f"'{key}' is not known.{near}", choices=tuple(self.fields))
            if value not in self.neutral[key]:
                raise HttpProblem(400, "unsupported_parameter", f"'{key}' can only be {self.neutral[key][0]!r} here, got {value!r:.80}.")

    def new_id(self) -> str:
        """Of an answer; rewards name it."""
        return f"{self.id_prefix}{secrets.token_hex(12)}"

    @abstractmethod
    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """An answer that is not streamed."""

    def refusal(self, problem: HttpProblem) -> dict[str, Any]:
        """The body of a refusal."""
        return openai_error(problem)

    def broken(self, problem: HttpProblem) -> bytes:
        """A stream's last event where its answer failed."""
        return sse(self.refusal(problem))


class _ChatStream(AnswerStream):
    """``chat.completion.chunk`` events: the role, pieces of the content, tool calls, the end; then, of all choices, the usage."""

    def begin(self) -> Iterator[bytes]:
        yield self._event({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Iterator[bytes]:
        yield self._event({"content": text}, None)

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        delta: dict[str, Any] = {}
        if rest := self.rest(answer):
            delta["content"] = rest
        if answer.calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(answer.calls)]
        logprobs = _told_logprobs(answer)
        if delta or logprobs is not None:
            yield self._event(delta, None, logprobs)
        yield self._event({}, answer.finish_reason)

    def done(self, answers: Sequence[ChatAnswer]) -> Iterator[bytes]:
        if self.chat.include_usage:
            yield sse({**_head("chat.completion.chunk", self.completion_id, self.model), "choices": [], "usage": usage(answers)})
        yield b"data: [DONE]\n\n"

    def _event(self, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": self.index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return sse({**_head("chat.completion.chunk", self.completion_id, self.model), "choices": [choice]})


class ChatCompletions(Interface):
    """OpenAI's ``/v1/chat/completions``."""

    stream = _ChatStream
    id_prefix = "chatcmpl-"
    fields, harmless, neutral = _FIELDS, _HARMLESS, _NEUTRAL

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        self.check(body)
        return read_chat(body)

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """``chat.completion`` of all choices of a request."""
        choices = [
            {"index": one.index, "message": one.message, "finish_reason": one.finish_reason, "logprobs": _told_logprobs(one)}
            for one in answers
        ]
        return {**_head("chat.completion", answers[0].completion_id, answers[0].model), "choices": choices, "usage": usage(answers)}


def usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    """Tokens of one prompt and of all its choices."""
    prompt, sampled = answers[0].num_prompt_tokens, sum(answer.num_sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _told_logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else {"content": answer.logprobs}


def _head(kind: str, completion_id: str, model: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def openai_error(problem: HttpProblem) -> dict[str, Any]:
    """A refusal in OpenAI's form, with our word for it as ``code``."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind, "choices": problem.choices}}
