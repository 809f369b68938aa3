"""Requests in a form common to all interfaces, and constraints on answers: xgrammar's structural tags, tool calls in text, stop texts."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied_rl.generation.tokens import Completion
from embodied_rl.reading import parse_json
from embodied_rl.serving.http_server import DEEPEST, HttpProblem

CALL, CALL_END = "<tool_call>", "</tool_call>"


def forced_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """Beginning of a call of one of these tools: up to its name, or, for a single tool, up to its arguments."""
    name = f'{json.dumps(tools[0]["function"].get("name"))}, "arguments":' if len(tools) == 1 else '"'
    return f'{CALL}\n{{"name": {name}'


def sampled_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, calls in the text); a malformed call leaves the whole as text, so that the agent sees it."""
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
        found = parse_json(text, finite=True, depth=DEEPEST // 2)  # the client sends it back inside a body
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not isinstance(name, str):
        return None
    # OpenAI's arguments are a JSON text.
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


_MOST_SPACES = 16
"""Most consecutive spaces, so that a model does not write spaces forever."""
_LARGEST_BYTES = 2**18


def schema_structure(schema: object, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Structure of an answer that is JSON by a schema, or calls of tools if there are any."""
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
    """Structure after `forced_call`: one call of one of these tools, with arguments that satisfy its parameters."""
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


_MOST_STOPS, _LONGEST_STOP = 32, 512
"""Most stop texts of an answer, and characters of each: all are looked for with every token."""
_TAIL = 8
"""Last tokens of a growing answer that are checked again, because they may contain a part of a stop text."""


@dataclass(frozen=True)
class StopTexts:
    """Stop texts of an answer; the first one to be complete counts."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    """Converts token ids to text."""

    def before(self, text: str) -> str:
        """Text before the first stop text."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def first(self, text: str) -> str | None:
        """Earliest stop text in a text; None: there is none."""
        return min((stop for stop in self.texts if stop in text), key=text.find, default=None)

    def certain(self, text: str) -> str:
        """Beginning of a growing text that no stop text can still remove."""
        text = self.before(text)
        half = max((n for stop in self.texts for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - half]

    def reached(self, token_ids: Sequence[int], num_seen: int = 0) -> bool:
        """Whether tokens contain a stop text; the first `num_seen` are known to contain none."""
        # Every token except special ones has at least one byte of the text.
        longest = max((len(stop.encode()) for stop in self.texts), default=0)
        tail = self.decode(token_ids[max(num_seen - longest - _TAIL, 0) :])
        return self._inside(tail) and self._inside(self.decode(token_ids))

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a stop text, as stopped; unchanged if there is none.

        The sampled tokens up to there do not depend on later ones, nor on when a backend noticed the stop.
        """
        token_ids = completion.token_ids.tolist()
        if completion.failure is not None or not self.texts or not self._inside(self.decode(token_ids)):
            return completion
        low, high = 0, len(token_ids)  # the first `low` tokens contain none, the first `high` do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._inside(self.decode(token_ids[:middle])) else (middle, high)
        return completion.first(high, "stop")

    def _inside(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


# ---- requests -------------------------------------------------------------------------------------------------------


ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One validated request."""

    messages: tuple[dict[str, Any], ...]
    """Messages with text contents; see `plain_message`."""
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
    """Number of likeliest tokens that are sent for each position."""
    num_choices: int = 1
    """n: answers, each sampled and captured separately."""
    forced: str = ""
    """Beginning of every answer (``tool_choice``). The model gets it as the end of its prompt; it is neither sampled nor trained."""
    structure: str | None = None
    """Constraint on the rest (`GenerationRequest.structure`): a JSON schema (``response_format``), or a required tool call."""
    needs_structure: bool = False
    """Whether to refuse backends that cannot constrain: for ``response_format``. For calls, only the beginning is then forced."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Body of the request."""
    recalled_from: int | None = None
    """Position of the messages that `Recall` returns for its answer; None: nothing is kept for it."""


def sampling(body: Mapping[str, Any], limit: str) -> dict[str, Any]:
    """Fields of a `ChatRequest` that all interfaces share; `limit`: name of the token limit."""
    return {
        "max_new_tokens": body.get(limit),
        "temperature": 1.0 if (value := body.get("temperature")) is None else float(value),
        "top_p": float(body.get("top_p") or 1.0),
        "stream": bool(body.get("stream")),
        "asked": body,
    }


def bad(message: str, kind: str = "invalid_request", choices: Iterable[str] = ()) -> HttpProblem:
    """HttpProblem with status 400."""
    return HttpProblem(400, kind, message, choices=choices)


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text or a list of texts as a tuple. Raises HttpProblem 400."""
    stop = body.get(name)
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise bad(f"'{name}' must be a text or a list of texts, none of them empty.")
    if len(texts) > _MOST_STOPS or any(len(text) > _LONGEST_STOP for text in texts):
        longest = max(map(len, texts))
        most = f"at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters"
        raise bad(f"'{name}' can have {most} here, got {len(texts):,}, the longest with {longest:,}.", "unsupported_parameter")
    return tuple(dict.fromkeys(texts))


def schema_of(form: object, where: str, holder: str | None = None) -> object:
    """JSON schema in OpenAI's `form` of an answer, or in its `holder`; None: any text. Raises HttpProblem 400."""
    if form is None or form == {"type": "text"}:
        return None
    kind, named = (form.get("type"), form if holder is None else form.get(holder)) if isinstance(form, dict) else (None, None)
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return named["schema"]
    message = f"'{where}' must be {{'type': …}} with text, json_object, or json_schema and its schema, got {form!r:.80}."
    raise bad(message, choices=["text", "json_object", "json_schema"])


def constraints(choice: object, tools: Sequence[Mapping[str, Any]] | None, schema: object, several: bool) -> dict[str, Any]:
    """Effect of ``tool_choice`` and a schema: `forced`, `structure` and `needs_structure` of a `ChatRequest`.

    Args:
        choice: in the form of chat completions.
        schema: of the answer; None: any text.
        several: whether an answer may contain several calls.

    Raises HttpProblem: 400 for an impossible choice.
    """
    names = [str(tool["function"].get("name")) for tool in tools or ()]
    if choice in (None, "auto", "none"):
        return {} if schema is None else {"structure": schema_structure(schema, tools or (), several), "needs_structure": True}
    named = choice.get("function") if isinstance(choice, dict) else None
    wanted = str(named.get("name")) if isinstance(named, dict) else None
    if not ((choice == "required" and names) or wanted in names):
        lacking = "" if names else ", and there are no 'tools'"
        message = f"'tool_choice' must be 'auto', 'none', 'required' or the function of one of 'tools', got {choice!r:.80}{lacking}."
        raise bad(message, choices=names)
    able = [tool for tool, name in zip(tools or (), names, strict=True) if choice == "required" or name == wanted]
    return {"forced": forced_call(able), "structure": call_structure(able)}


def plain_message(message: object, place: int) -> dict[str, Any]:
    """A message for templates: role, text content, tool calls with arguments as objects; no nulls. Raises HttpProblem 400 if not text."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else None
        raise bad(f"messages[{place}]: the role must be one of {', '.join(ROLES)}, got {role!r:.80}.")
    plain: dict[str, Any] = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain["content"] = plain_text(message.get("content"), f"messages[{place}]")
    for key in ("function_call", "audio"):
        if message.get(key) is not None:
            raise bad(f"messages[{place}]: '{key}' is not supported; calls are sent as 'tool_calls'.", "unsupported_content")
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            plain[key] = str(message[key])
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, place) for call in calls] if isinstance(calls, list) else _plain_call(calls, place)
    return plain


def plain_text(content: object, where: str) -> str:
    """A text, or the joined texts of its parts; "" for null. Raises HttpProblem 400."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise bad(f"{where}: the content must be text; images and audio are not supported.", "unsupported_content")


def plain_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A tool call for templates."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # malformed arguments are kept as the model wrote them
            arguments = parse_json(arguments, finite=True)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _plain_call(call: object, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not {"name", "arguments"} <= set(function):
        raise bad(f"messages[{place}]: a tool call must be an object with a function that has a name and arguments.")
    return plain_call(call.get("id"), function["name"], function["arguments"])
