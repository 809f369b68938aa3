"""Python programs of an agent as a tool; what is held back from them: `embodied_rl.sandbox`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from embodied_rl.agents.tools.base import ToolError, argument, text_schema
from embodied_rl.errors import UserError
from embodied_rl.sandbox import PythonLimits, can_isolate, run_program

__all__ = ["PythonLimits", "PythonTool", "can_isolate", "run_program"]


class PythonTool:
    """The tool ``python``: {code} to what it prints. Every call is a new interpreter in an empty folder."""

    name = "python"
    description = "Run a Python program and get what it prints. Nothing is kept between calls; there is no network."
    parameters = text_schema("code", "the program; print what you want to see")

    def __init__(self, limits: PythonLimits | None = None, *, allow_network: bool = False) -> None:
        """
        Args:
            allow_network: also run where the network cannot be cut off, and do not cut it off.

        Raises:
            UserError: this kernel gives no namespaces, so that the network cannot be cut off, and `allow_network` is False.
        """
        self._limits, self._isolate = limits or PythonLimits(), not allow_network
        if self._isolate and not can_isolate():
            raise UserError(
                "The python tool cannot cut programs off from the network here: the kernel gives no network namespace (containers often "
                "forbid it). Allow namespaces, or pass allow_network=True where that is no danger."
            )

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`. A program that fails is a ToolError with its output and traceback."""
        ended = run_program(argument(arguments, "code", str), self._limits, isolate=self._isolate)
        status, output = ended.status, ended.output
        if ended.timed_out:
            raise ToolError(f"the program did not end within {self._limits.timeout_s:g} s and was stopped\n{output}".rstrip())
        if status != 0:
            how = f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"ended with status {status}"
            raise ToolError(f"the program {how}\n{output}".rstrip())
        return output

    def close(self) -> None:
        """Nothing is held."""
