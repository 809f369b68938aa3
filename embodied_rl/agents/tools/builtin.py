"""The package's own tools, and tools by their names in a configuration."""

from __future__ import annotations

import ast
import math
import operator
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied_rl.agents.tools.base import Tool, Toolbox, ToolError, argument, text_schema
from embodied_rl.agents.tools.mcp import McpServer
from embodied_rl.config.agent import ToolsConfig
from embodied_rl.sandbox.box import PythonLimits, protection, run_program
from embodied_rl.sim.text.search_qa import Bm25, read_corpus

Number = int | float

_MAX_CHARS = 1000
_MAX_BITS = 4096
"""Most bits of an integer: larger powers or factorials would exhaust the machine, and no answer needs them."""


def _rounded(number: Number, digits: int = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 400:  # Python would compute 10 ** 400 and more
        raise ToolError("round takes a whole number of digits, at most 400")
    return round(number, digits) if digits else round(number)


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_PLAIN = "sqrt exp log2 log10 sin cos tan asin acos atan sinh cosh tanh floor ceil radians degrees"
_ONE_NUMBER: Mapping[str, Callable[[Any], Number]] = {**{name: getattr(math, name) for name in _PLAIN.split()}, "abs": abs}
_MANY: Mapping[str, Callable[..., Number]] = {
    "min": min, "max": max, "round": _rounded, "log": math.log, "atan2": math.atan2, "hypot": math.hypot, "gcd": math.gcd, "lcm": math.lcm
}  # fmt: skip
_FUNCTIONS = {**_ONE_NUMBER, **_MANY}


class Calculator(Tool):
    """The tool ``calculator``: computes {expression}."""

    name = "calculator"
    description = "Compute an arithmetic expression such as (3 + 4) * sqrt(2) / 7 ** 2."
    parameters = text_schema("expression", "numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin, min, max")

    def run(self, arguments: Mapping[str, Any]) -> str:
        return str(calculate(argument(arguments, "expression", str)))


def calculate(expression: str) -> Number:
    """Value of an expression. Raises ToolError for anything that is not arithmetic, or has no finite value."""
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are taken")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except ToolError:
        raise
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"'{expression:.100}' is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(str(error)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the value is not finite")
    return value


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
    raise ToolError(
        f"'{ast.unparse(node):.60}' is not arithmetic; known are numbers, + - * / // % **, pi, e and {', '.join(sorted(_FUNCTIONS))}"
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent * math.log2(abs(base)) > _MAX_BITS:
        raise ToolError("a power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("a root of a negative number is not real")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("an intermediate value is too large")
    return value


class Search(Tool):
    """The tool ``search``: returns the best documents for {query, count}."""

    name = "search"
    description = "Search a collection of texts by keywords."

    def __init__(self, index: Bm25, *, max_count: int = 10, max_chars: int = 1000) -> None:
        """`max_chars`: characters of each document that are shown."""
        self._index, self._max_count, self._max_chars = index, max_count, max_chars
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "keywords"},
                "count": {"type": "integer", "description": f"how many results, at most {max_count}; 3 if left out"},
            },
            "required": ["query"],
        }

    def run(self, arguments: Mapping[str, Any]) -> str:
        query, count = argument(arguments, "query", str), argument(arguments, "count", int, 3)
        if not 1 <= count <= self._max_count:
            raise ToolError(f"count must be between 1 and {self._max_count}, got {count}")
        found = self._index.best(query, count)
        if not found:
            return "nothing found"
        return "\n\n".join(f"[{rank}] {doc.title}\n{doc.text[: self._max_chars]}" for rank, (_, doc) in enumerate(found, start=1))


class PythonTool(Tool):
    """The tool ``python``: returns the output of {code}. Every call is a new interpreter in an empty folder."""

    name = "python"
    description = "Run a Python program and get what it prints. Nothing is kept between calls; there is no network."
    parameters = text_schema("code", "the program; print what you want to see")

    def __init__(self, limits: PythonLimits | None = None, *, allow_network: bool = False, sandbox: str = "landlock") -> None:
        """Args:
        allow_network: programs may use the network; all other limits stay.
        sandbox: the weakest acceptable protection (`embodied_rl.sandbox.box`).

        Raises UserError: this machine's protection is weaker.
        """
        self._limits = limits or PythonLimits()
        self._box = self._limits.box(protection(sandbox, "agent.tool_options.python_sandbox"), network=allow_network)

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`. A failing program is a ToolError with its output and traceback."""
        ended = run_program(argument(arguments, "code", str), self._box, self._limits.output_bytes)
        status, output = ended.status, ended.output
        if ended.timed_out:
            raise ToolError(f"the program did not end within {self._limits.timeout_s:g} s and was stopped\n{output}".rstrip())
        if ended.stopped:
            raise ToolError(f"the program was stopped: {ended.stopped}\n{output}".rstrip())
        if status != 0:
            signals = {128 + number: number.name for number in signal.Signals}
            how = f"was killed by {signals[status]}" if status in signals else f"ended with status {status}"
            raise ToolError(f"the program {how}\n{output}".rstrip())
        return output


def make_toolbox(names: Sequence[str], options: ToolsConfig) -> Toolbox:
    """Tools that `agent.tools` names, including those of MCP servers, which are started. Raises UserError: the corpus cannot be read, this
    machine lacks the protection of `python_sandbox`, or a server does not start."""
    tools: list[Tool] = []
    try:
        for name in names:
            if name == "calculator":
                tools.append(Calculator())
            elif name == "search":
                assert options.corpus is not None, "the configuration was checked"
                tools.append(Search(Bm25(read_corpus(Path(options.corpus).expanduser()))))
            elif name == "python":
                limits = PythonLimits(timeout_s=options.python_timeout_s, memory_mb=options.python_memory_mb)
                tools.append(PythonTool(limits, allow_network=options.python_network, sandbox=options.python_sandbox))
            else:
                assert name == "mcp", "the configuration was checked"
                for server in options.mcp:
                    tools += McpServer(server["command"], env=server.get("env"), timeout_s=float(server.get("timeout_s", 30.0))).tools
        return Toolbox(tools, options)
    except BaseException:
        for tool in tools:
            tool.close()
        raise
