"""From the text of an answer to an action, or to the reason why it is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embodied_rl.agents.tool_calls import AnyCall

Reason = Literal["empty", "no_tag", "several_tags", "unknown_action", "cut", "tool_limit"]
"""empty: nothing was answered. no_tag, several_tags: not exactly one tag. unknown_action: not one of the allowed ones. cut: the answer
was as long as it may be, and what there is of it is no action. tool_limit: it calls a tool, and no call is left."""


@dataclass(frozen=True)
class ValidAction:
    """What the simulator gets."""

    text: str


@dataclass(frozen=True)
class InvalidAction:
    """An answer that is no action; the simulator gets the empty text."""

    reason: Reason
    answer: str

    @property
    def text(self) -> str:
        """What the simulator gets."""
        return ""


@dataclass(frozen=True)
class ToolRequest:
    """An answer that calls tools; the simulator gets nothing, and waits."""

    calls: tuple[AnyCall, ...]

    @property
    def text(self) -> str:
        """What the simulator gets: nothing yet."""
        return ""


ParsedAction = ValidAction | InvalidAction | ToolRequest


class ActionParser:
    """Reads answers as `AgentConfig.answer` says. Spaces around an action and its case do not matter where actions are listed."""

    def __init__(self, *, tag: str | None, actions: Sequence[str] = (), beside: str | None = None) -> None:
        """
        Args:
            beside: ``<beside>…</beside>`` is no part of the action (a summary).
            tag: the action stands in ``<tag>…</tag>``; None: the whole answer is the action.
            actions: what may be answered; empty: any text.
        """
        self._tag = None if tag is None else re.compile(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL | re.IGNORECASE)
        self._beside = None if beside is None else re.compile(rf"<{re.escape(beside)}>.*?</{re.escape(beside)}>", re.DOTALL | re.IGNORECASE)
        self._actions = {" ".join(action.lower().split()): action for action in actions}

    def parse(self, answer: str, *, cut: bool = False) -> ParsedAction:
        """Read one answer; `cut`: it ended because it was as long as it may be."""
        result = self._parse(answer)
        return InvalidAction("cut", answer) if cut and isinstance(result, InvalidAction) else result

    def _parse(self, answer: str) -> ParsedAction:
        content = answer = answer if self._beside is None else self._beside.sub("", answer)
        if self._tag is not None:
            found = self._tag.findall(answer)
            if len(found) != 1:
                return InvalidAction("several_tags" if found else "no_tag" if answer.strip() else "empty", answer)
            content = found[0]
        content = content.strip()
        if not content:
            return InvalidAction("empty", answer)
        if not self._actions:
            return ValidAction(content)
        action = self._actions.get(" ".join(content.lower().split()))
        return InvalidAction("unknown_action", answer) if action is None else ValidAction(action)


def tagged(answer: str, tag: str) -> str | None:
    """What stands in the answer's last ``<tag>…</tag>``; None: there is none."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", answer, re.DOTALL | re.IGNORECASE)
    return found[-1].strip() if found else None
