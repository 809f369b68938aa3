"""Interface of a tool, and the box that calls tools in parallel with episodes: failures return as text, and every use is counted."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from embodied_rl.agents.parsing import AnyCall, MalformedCall, response_text
from embodied_rl.config.agent import ToolsConfig
from embodied_rl.errors import UserError, did_you_mean

_NONE_LEFT = "error: no tool call is left; answer without tools."


class ToolError(Exception):
    """A tool failed; the agent reads the message."""


class Tool(ABC):
    """Something that an agent calls by name."""

    name: str
    description: str
    """Description for the agent."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    @abstractmethod
    def run(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool. Raises ToolError with a text for the agent."""

    def close(self) -> None:  # noqa: B027  # a default
        """End its processes. May be called twice."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a call for the agent."""

    text: str
    failed: bool


@dataclass
class ToolBudget:
    """Calls that are left to one episode."""

    per_turn: int
    """Calls per turn of the environment."""
    episode: int
    turn: int = 0

    def begin_turn(self) -> None:
        """Allow `per_turn` calls again, after the environment's answer."""
        self.turn = self.per_turn

    @property
    def left(self) -> int:
        """Calls that are allowed now."""
        return min(self.turn, self.episode)

    def spend(self, count: int) -> int:
        """Use up to `count` calls; returns how many."""
        taken = min(count, self.left)
        self.turn -= taken
        self.episode -= taken
        return taken


class Toolbox:
    """Tools by name, called at once or in separate threads. Thread-safe; never raises for an agent's mistakes."""

    def __init__(self, tools: Iterable[Tool], options: ToolsConfig | None = None) -> None:
        """`options`: limits of results and calls. Raises UserError: two tools have the same name."""
        self.options = options or ToolsConfig(max_chars=8000)
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise UserError(f"Two tools are called '{tool.name}'.")
            self._tools[tool.name] = tool
        self._threads = ThreadPoolExecutor(self.options.threads, thread_name_prefix="tools")
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(float)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of OpenAI's interface and chat templates."""
        return [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}
            for tool in self._tools.values()
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. A result beyond `ToolsConfig.max_chars` loses its middle, with a note in the text."""
        tool = self._tools.get(name)
        if tool is None:
            self._count({"unknown": 1})
            return ToolResult(f"error: there is no tool '{name}'.{did_you_mean(name, self._tools)}", failed=True)
        started = time.monotonic()
        try:
            result = ToolResult(self._shortened(tool.run(arguments)), failed=False)
        except ToolError as error:
            result = ToolResult(self._shortened(f"error: {error}"), failed=True)
        self._count({f"{name}/calls": 1, f"{name}/failures": result.failed, f"{name}/seconds": time.monotonic() - started})
        return result

    def budget(self) -> ToolBudget:
        return ToolBudget(self.options.max_calls_per_turn, self.options.max_calls)

    def start(self, calls: Sequence[AnyCall], budget: ToolBudget) -> Future[str]:
        """Start the calls of one answer, which run one after the other; the future's text has all results for the agent.

        Calls beyond the budget get an error as result, and a malformed call counts as one.
        """
        allowed = budget.spend(len(calls))
        malformed = sum(isinstance(call, MalformedCall) for call in calls[:allowed])
        self._count({"malformed": malformed, "over_limit": len(calls) - allowed})
        return self._threads.submit(self._run, tuple(calls), allowed)

    def figures(self) -> dict[str, float]:
        """Figures since the last call: {tools/<name>/calls, …/failures, …/seconds}, tools/unknown, tools/malformed, tools/over_limit."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
        names = [f"{tool}/{figure}" for tool in self._tools for figure in ("calls", "failures", "seconds")]
        return {f"tools/{name}": counts[name] for name in (*names, "unknown", "malformed", "over_limit")}

    def close(self) -> None:
        """End the tools and drop calls that have not started. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for tool in self._tools.values():
            tool.close()

    def _count(self, counts: Mapping[str, float]) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def _run(self, calls: Sequence[AnyCall], allowed: int) -> str:
        return response_text([self._result(call) if number < allowed else _NONE_LEFT for number, call in enumerate(calls)])

    def _result(self, call: AnyCall) -> str:
        return f"error: {call.reason}" if isinstance(call, MalformedCall) else self.call(call.name, call.arguments).text

    def _shortened(self, text: str) -> str:
        if len(text) <= self.options.max_chars:
            return text
        half = self.options.max_chars // 2
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
