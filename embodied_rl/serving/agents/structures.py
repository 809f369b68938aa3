"""What an answer must keep to in xgrammar's structural tags, tool calls in its text, and stop texts across the borders of tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied_rl.generation.tokens import Completion
from embodied_rl.serving.http_server import HttpProblem

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
