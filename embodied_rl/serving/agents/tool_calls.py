"""Tool calls as models of the Hermes and Qwen kind write them: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

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
