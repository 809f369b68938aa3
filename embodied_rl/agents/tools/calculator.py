"""Arithmetic from a text, by walking its syntax tree: nothing is evaluated that is not in the tables below."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from embodied_rl.agents.tools.base import ToolError, argument, text_schema

Number = int | float

_MAX_CHARS = 1000
_MAX_BITS = 4096
"""Of an integer: beyond it a power or factorial would eat the machine, and no answer needs it."""


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


class Calculator:
    """The tool ``calculator``: {expression} to a number."""

    name = "calculator"
    description = "Compute an arithmetic expression such as (3 + 4) * sqrt(2) / 7 ** 2."
    parameters = text_schema("expression", "numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin, min, max")

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`."""
        return _written(calculate(argument(arguments, "expression", str)))

    def close(self) -> None:
        """Nothing is held."""


def calculate(expression: str) -> Number:
    """The value of an expression. Raises ToolError for anything that is not arithmetic, or has no finite value."""
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


def _written(value: Number) -> str:
    return repr(value) if isinstance(value, float) else str(value)
