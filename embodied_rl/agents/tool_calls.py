"""Tool calls in the text of an answer, and what is put back for the agent to read.

The format is that of Hermes and Qwen: each call is a JSON object between tags, and each result comes back between its own tags:

    <tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>
    <tool_response>
    42
    </tool_response>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}(.*?)({_CLOSE}|(?={_OPEN})|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made; whether there is such a tool is the toolbox's affair."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read, and why; the agent reads the reason."""

    reason: str
    text: str


AnyCall = ToolCall | MalformedCall


def tool_calls(answer: str) -> tuple[AnyCall, ...]:
    """The calls of an answer in their order; empty: there are none. A call that is not closed is malformed."""
    if _OPEN not in answer:
        return ()
    return tuple(_call(found.group(1), ended=found.group(2) == _CLOSE) for found in _CALL.finditer(answer))


def _call(text: str, *, ended: bool) -> AnyCall:
    text = text.strip()
    if not ended:
        return MalformedCall(f"the tool call is not closed by {_CLOSE}", text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the tool call is not JSON: {error}", text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return MalformedCall('a tool call must be an object {"name": …, "arguments": {…}}', text)
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's interface writes them as JSON within JSON
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments of {found['name']} are not JSON: {error}", text)
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {found['name']} must be an object", text)
    return ToolCall(found["name"], arguments)


def response_text(results: Sequence[str]) -> str:
    """What the agent reads of its calls' results, in their order."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def tools_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a prompt says about the tools, as far as the model's own chat template does not."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        "You may use these tools before you answer:\n"
        f"<tools>\n{lines}\n</tools>\n"
        'To use one, write <tool_call>{"name": NAME, "arguments": {…}}</tool_call> and end your turn; '
        "what it gives comes back as <tool_response>…</tool_response>.\n"
    )
