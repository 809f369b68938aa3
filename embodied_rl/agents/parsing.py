"""Turn the text of an answer into an action or a tool call, or into the reason why it is neither.

The format is that of Hermes and Qwen: each call is a JSON object between tags, and each result returns between its own tags:

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
from typing import Any, Literal

from embodied_rl.reading import parse_json
from embodied_rl.sim.text.answers import tagged

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}(.*?)({_CLOSE}|(?={_OPEN})|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call; the toolbox decides whether the tool exists."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A malformed call, and the reason, which the agent reads."""

    reason: str
    text: str


AnyCall = ToolCall | MalformedCall


def tool_calls(answer: str) -> tuple[AnyCall, ...]:
    """Calls of an answer in their order; empty: none. An unclosed call is malformed."""
    if _OPEN not in answer:
        return ()
    return tuple(_call(found.group(1), ended=found.group(2) == _CLOSE) for found in _CALL.finditer(answer))


def _call(text: str, *, ended: bool) -> AnyCall:
    text = text.strip()
    if not ended:
        return MalformedCall(f"the tool call is not closed by {_CLOSE}", text)
    try:
        found = parse_json(text, finite=True)
    except ValueError as error:
        return MalformedCall(f"the tool call is not JSON: {error}", text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return MalformedCall('a tool call must be an object {"name": …, "arguments": {…}}', text)
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's interface puts them in a JSON text
        try:
            arguments = parse_json(arguments or "{}", finite=True)
        except ValueError as error:
            return MalformedCall(f"the arguments of {found['name']} are not JSON: {error}", text)
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {found['name']} must be an object", text)
    return ToolCall(found["name"], arguments)


def response_text(results: Sequence[str]) -> str:
    """Text with the calls' results for the agent, in their order."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def tools_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Description of the tools for a prompt, unless the model's own chat template describes them."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        "You may use these tools before you answer:\n"
        f"<tools>\n{lines}\n</tools>\n"
        'To use one, write <tool_call>{"name": NAME, "arguments": {…}}</tool_call> and end your turn; '
        "what it gives comes back as <tool_response>…</tool_response>.\n"
    )


Reason = Literal["empty", "no_tag", "several_tags", "unknown_action", "too_long", "cut", "tool_limit"]
"""empty: an empty answer. no_tag, several_tags: not exactly one tag. unknown_action: not one of the allowed ones. too_long: longer than the
simulator takes. cut: the answer reached its longest length without a complete action. tool_limit: it calls a tool, and no call is left."""


@dataclass(frozen=True)
class ValidAction:
    """A valid action for the simulator."""

    text: str


@dataclass(frozen=True)
class InvalidAction:
    """An answer without an action; the simulator gets the empty text."""

    reason: Reason
    answer: str
    text = ""
    """Text for the simulator."""


@dataclass(frozen=True)
class ToolRequest:
    """An answer that calls tools; the simulator gets nothing and waits."""

    calls: tuple[AnyCall, ...]
    text = ""
    """Text for the simulator: empty until the tools have answered."""


ParsedAction = ValidAction | InvalidAction | ToolRequest


class ActionParser:
    """Reads answers as `AgentConfig.answer` says. If actions are listed, surrounding spaces and case do not matter."""

    def __init__(self, *, tag: str | None, actions: Sequence[str] = (), beside: str | None = None, most_bytes: int | None = None) -> None:
        """Args:
        beside: ``<beside>…</beside>`` is not part of the action (a summary).
        tag: the action is in ``<tag>…</tag>``; None: the whole answer is the action.
        actions: allowed answers; empty: any text.
        most_bytes: longest action, in UTF-8; None: no limit.
        """
        self._most_bytes = most_bytes
        self._tag, self._beside = tag, beside
        self._actions = {" ".join(action.lower().split()): action for action in actions}

    def parse(self, answer: str, *, cut: bool = False) -> ParsedAction:
        """Read one answer; `cut`: it ended because it reached its longest length."""
        result = self._parse(answer)
        return InvalidAction("cut", answer) if cut and isinstance(result, InvalidAction) else result

    def _parse(self, answer: str) -> ParsedAction:
        for place in reversed(tagged(answer, self._beside) if self._beside is not None else []):
            answer = answer[: place.start - len(f"<{self._beside}>")] + answer[place.stop + len(f"</{self._beside}>") :]
        content = answer
        if self._tag is not None:
            found = tagged(answer, self._tag)
            if len(found) != 1:
                return InvalidAction("several_tags" if found else "no_tag" if answer.strip() else "empty", answer)
            content = answer[found[0]]
        content = content.strip()
        if not content:
            return InvalidAction("empty", answer)
        if not self._actions:
            too_long = self._most_bytes is not None and len(content.encode("utf-8", "surrogatepass")) > self._most_bytes
            return InvalidAction("too_long", answer) if too_long else ValidAction(content)
        action = self._actions.get(" ".join(content.lower().split()))
        return InvalidAction("unknown_action", answer) if action is None else ValidAction(action)
