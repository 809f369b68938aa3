"""What a tool is, and the box that calls tools: failures come back as text, and every use is counted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from embodied_rl.errors import UserError, did_you_mean


class ToolError(Exception):
    """A tool could not do what it was asked; the message is what the agent reads."""


class Tool(Protocol):
    """Something an agent calls by name."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """For the agent."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError with a text for the agent."""

    def close(self) -> None:
        """Let go of processes. May be called twice."""


@dataclass(frozen=True)
class ToolResult:
    """What the agent reads."""

    text: str
    failed: bool


@dataclass
class ToolUse:
    """How often one tool was called, and what came of it."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


class Toolbox:
    """Tools by name. `call` never raises for what an agent does, and may be made from several threads at a time."""

    def __init__(self, tools: Iterable[Tool], *, max_chars: int = 8000) -> None:
        """`max_chars`: of a result; the middle of a longer one is left out, and the text says so.
        Raises UserError: two tools have the same name, or `max_chars` is below 100."""
        if max_chars < 100:
            raise UserError(f"max_chars must be >= 100, got {max_chars}.")
        self._tools: dict[str, Tool] = {}
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._taken: dict[str, float] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise UserError(f"Two tools are called '{tool.name}'.")
            self._tools[tool.name] = tool
        self.uses = {name: ToolUse() for name in self._tools}
        """{tool: how it was used}"""
        self.num_unknown = 0
        """Calls of tools that there are not."""

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as OpenAI's interface and chat templates take them."""
        return [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}
            for tool in self._tools.values()
        ]

    def call(self, name: str, arguments: Mapping[str, Any] | str) -> ToolResult:
        """Use a tool; arguments are an object, or its JSON."""
        tool = self._tools.get(name)
        if tool is None:
            with self._lock:
                self.num_unknown += 1
            return ToolResult(f"error: there is no tool '{name}'.{did_you_mean(name, self._tools)}", failed=True)
        started = time.monotonic()
        try:
            result = ToolResult(self._shortened(tool.run(_object(arguments))), failed=False)
        except ToolError as error:
            result = ToolResult(self._shortened(f"error: {error}"), failed=True)
        with self._lock:
            use = self.uses[name]
            use.calls += 1
            use.failures += result.failed
            use.seconds += time.monotonic() - started
        return result

    def metrics(self) -> dict[str, float]:
        """For a log: {tools/<name>/calls, …/failures, …/seconds} and tools/unknown."""
        with self._lock:
            return self._metrics()

    def take_metrics(self) -> dict[str, float]:
        """What `metrics` gained since the last call of this."""
        with self._lock:
            now, before = self._metrics(), self._taken
            self._taken = now
        return {name: value - before.get(name, 0.0) for name, value in now.items()}

    def _metrics(self) -> dict[str, float]:
        counted = {f"tools/{name}/{key}": float(value) for name, use in self.uses.items() for key, value in vars(use).items()}
        return {**counted, "tools/unknown": float(self.num_unknown)}

    def close(self) -> None:
        for tool in self._tools.values():
            tool.close()

    def _shortened(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments must be an object, got {type(arguments).__name__}")
    return arguments


def argument(arguments: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One argument of a call; `default` None: it is required. Raises ToolError."""
    value = arguments.get(name, default)
    if value is None:
        raise ToolError(f"the argument '{name}' is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ToolError(f"the argument '{name}' must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def text_schema(name: str, description: str) -> dict[str, Any]:
    """The schema of a tool with one text as its argument."""
    return {"type": "object", "properties": {name: {"type": "string", "description": description}}, "required": [name]}
