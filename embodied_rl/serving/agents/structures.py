"""What an answer must keep to, in xgrammar's structural tags, which torch's decoding and vLLM's read alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl.serving.agents.tool_calls import CALL, CALL_END
from embodied_rl.serving.http_server import HttpProblem

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
