"""Tools beside the episodes that use them: calls run in threads, and what they give comes back as text when it is ready."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from embodied_rl.agents.parsing import AnyCall, MalformedCall, response_text
from embodied_rl.agents.tools.base import Toolbox
from embodied_rl.agents.tools.builtin import make_tools
from embodied_rl.config.agent import ToolsConfig

_NONE_LEFT = "error: no tool call is left; answer without tools."


@dataclass
class ToolBudget:
    """Calls that an episode has left; one for each episode."""

    per_turn: int
    """Of each turn of the environment."""
    episode: int
    turn: int = 0

    def begin_turn(self) -> None:
        """Allow `per_turn` calls again, once the environment has answered."""
        self.turn = self.per_turn

    @property
    def left(self) -> int:
        """Calls that may be made now."""
        return min(self.turn, self.episode)

    def spend(self, count: int) -> int:
        """Take up to `count` calls; how many there were."""
        taken = min(count, self.left)
        self.turn -= taken
        self.episode -= taken
        return taken


class ToolRunner:
    """Calls the tools of a `Toolbox` in its own threads. Thread-safe."""

    def __init__(self, toolbox: Toolbox, options: ToolsConfig) -> None:
        self.toolbox, self.options = toolbox, options
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="tools")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @staticmethod
    def make(names: Sequence[str], options: ToolsConfig) -> ToolRunner:
        """The tools that a configuration names. Raises UserError as `make_tools` does."""
        tools = make_tools(names, options)
        return ToolRunner(Toolbox(tools, max_chars=options.max_chars), options)

    def budget(self) -> ToolBudget:
        """Of a new episode."""
        return ToolBudget(self.options.max_calls_per_turn, self.options.max_calls)

    def start(self, calls: Sequence[AnyCall], budget: ToolBudget) -> Future[str]:
        """Begin the calls of one answer, which run one after the other; the future's text is what the agent reads of all of them.

        Calls beyond the budget are answered with an error, and a call that cannot be read counts as one.
        """
        allowed = budget.spend(len(calls))
        with self._lock:
            self._counts["malformed"] += sum(isinstance(call, MalformedCall) for call in calls[:allowed])
            self._counts["over_limit"] += len(calls) - allowed
        return self._threads.submit(self._run, tuple(calls), allowed)

    def figures(self) -> dict[str, float]:
        """Since the last call: {tools/<name>/calls, …/failures, …/seconds} in all, tools/unknown, tools/malformed, tools/over_limit."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        beside = {f"tools/{name}": float(counts[name]) for name in ("malformed", "over_limit")}
        return {**self.toolbox.take_metrics(), **beside}

    def close(self) -> None:
        """End the tools; calls that have not begun are dropped. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.toolbox.close()

    def _run(self, calls: Sequence[AnyCall], allowed: int) -> str:
        results = [self._result(call) if number < allowed else _NONE_LEFT for number, call in enumerate(calls)]
        return response_text(results)

    def _result(self, call: AnyCall) -> str:
        if isinstance(call, MalformedCall):
            return f"error: {call.reason}"
        return self.toolbox.call(call.name, call.arguments).text
