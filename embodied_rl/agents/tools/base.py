"""Interface of a tool, and the box that calls tools: failures return as text, and every use is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from embodied_rl.errors import UserError, did_you_mean


class ToolError(Exception):
    """A tool failed; the agent reads the message."""


class Tool(Protocol):
    """Something that an agent calls by name."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """Description for the agent."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool. Raises ToolError with a text for the agent."""

    def close(self) -> None:
        """End its processes. May be called twice."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a call for the agent."""

    text: str
    failed: bool


@dataclass
class ToolUse:
    """Counts of one tool's calls and results."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


class Toolbox:
    """Tools by name. `call` never raises for an agent's mistakes, and is thread-safe."""

    def __init__(self, tools: Iterable[Tool], *, max_chars: int = 8000) -> None:
        """`max_chars`: most characters of a result; a longer one loses its middle, with a note in the text. Raises UserError: two tools
        have the same name, or `max_chars` is below 100."""
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
        """{tool: counts of its use}"""
        self.num_unknown = 0
        """Calls of unknown tools."""

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of OpenAI's interface and chat templates."""
        return [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}
            for tool in self._tools.values()
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool."""
        tool = self._tools.get(name)
        if tool is None:
            with self._lock:
                self.num_unknown += 1
            return ToolResult(f"error: there is no tool '{name}'.{did_you_mean(name, self._tools)}", failed=True)
        started = time.monotonic()
        try:
            result = ToolResult(self._shortened(tool.run(arguments)), failed=False)
        except ToolError as error:
            result = ToolResult(self._shortened(f"error: {error}"), failed=True)
        with self._lock:
            use = self.uses[name]
            use.calls += 1
            use.failures += result.failed
            use.seconds += time.monotonic() - started
        return result

    def take_metrics(self) -> dict[str, float]:
        """Figures for a log since the last call: {tools/<name>/calls, …/failures, …/seconds} and tools/unknown."""
        with self._lock:
            counted = {f"tools/{name}/{key}": float(value) for name, use in self.uses.items() for key, value in vars(use).items()}
            now, before = {**counted, "tools/unknown": float(self.num_unknown)}, self._taken
            self._taken = now
        return {name: value - before.get(name, 0.0) for name, value in now.items()}

    def close(self) -> None:
        for tool in self._tools.values():
            tool.close()

    def _shortened(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def argument(arguments: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One argument of a call; `default` None: it is required. Raises ToolError."""
    value = arguments.get(name, default)
    if value is None:
        raise ToolError(f"the argument '{name}' is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ToolError(f"the argument '{name}' must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def text_schema(name: str, description: str) -> dict[str, Any]:
    """Schema of a tool with a single text argument."""
    return {"type": "object", "properties": {name: {"type": "string", "description": description}}, "required": [name]}
