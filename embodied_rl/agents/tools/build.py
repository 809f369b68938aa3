"""Tools by the names that a configuration gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodied_rl.agents.tools.base import Tool
from embodied_rl.agents.tools.calculator import Calculator
from embodied_rl.agents.tools.python_tool import PythonTool
from embodied_rl.agents.tools.search import Bm25, Search, read_corpus
from embodied_rl.config.agent import ToolsConfig
from embodied_rl.sandbox.python import PythonLimits


def make_tools(names: Sequence[str], options: ToolsConfig) -> list[Tool]:
    """The tools `agent.tools` names, those of MCP servers among them; servers are started.

    Raises:
        UserError: the corpus cannot be read, the python tool cannot be held as `python_sandbox` asks, or a server does not start.
    """
    tools: list[Tool] = []
    try:
        for name in names:
            tools += _make(name, options)
    except BaseException:
        for tool in tools:
            tool.close()
        raise
    return tools


def _make(name: str, options: ToolsConfig) -> list[Tool]:
    if name == "calculator":
        return [Calculator()]
    if name == "search":
        assert options.corpus is not None, "the configuration was checked"
        return [Search(Bm25(read_corpus(Path(options.corpus).expanduser())))]
    if name == "python":
        limits = PythonLimits(timeout_s=options.python_timeout_s, memory_mb=options.python_memory_mb)
        return [PythonTool(limits, allow_network=options.python_network, sandbox=options.python_sandbox)]
    assert name == "mcp", "the configuration was checked"
    from embodied_rl.agents.tools.mcp import McpServer

    found: list[Tool] = []
    try:
        for server in options.mcp:
            found += McpServer(server["command"], env=server.get("env"), timeout_s=float(server.get("timeout_s", 30.0))).tools
    except BaseException:
        for tool in found:
            tool.close()
        raise
    return found
