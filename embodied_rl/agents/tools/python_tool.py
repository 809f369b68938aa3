"""Python programs of an agent as a tool; what is held back from them: `embodied_rl.sandbox`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from embodied_rl.agents.tools.base import ToolError, argument, text_schema
from embodied_rl.sandbox.levels import protection
from embodied_rl.sandbox.python import PythonLimits, run_program


class PythonTool:
    """The tool ``python``: {code} to what it prints. Every call is a new interpreter in an empty folder."""

    name = "python"
    description = "Run a Python program and get what it prints. Nothing is kept between calls; there is no network."
    parameters = text_schema("code", "the program; print what you want to see")

    def __init__(self, limits: PythonLimits | None = None, *, allow_network: bool = False, sandbox: str = "landlock") -> None:
        """
        Args:
            allow_network: programs may use the network; all else is held back as without.
            sandbox: the weakest protection that will do (`embodied_rl.sandbox.levels`).

        Raises:
            UserError: this machine's protection is weaker.
        """
        self._limits, self._network = limits or PythonLimits(), allow_network
        self._level = protection(sandbox, "agent.tool_options.python_sandbox")

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`. A program that fails is a ToolError with its output and traceback."""
        ended = run_program(argument(arguments, "code", str), self._limits, self._level, network=self._network)
        status, output = ended.status, ended.output
        if ended.timed_out:
            raise ToolError(f"the program did not end within {self._limits.timeout_s:g} s and was stopped\n{output}".rstrip())
        if ended.stopped:
            raise ToolError(f"the program was stopped: {ended.stopped}\n{output}".rstrip())
        if status != 0:
            how = f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"ended with status {status}"
            raise ToolError(f"the program {how}\n{output}".rstrip())
        return output

    def close(self) -> None:
        """Nothing is held."""
