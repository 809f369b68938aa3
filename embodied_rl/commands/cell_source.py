"""Classes of a notebook's cells, or of the script that runs, as a module that simulator processes can import."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from embodied_rl.errors import UserError, shown
from embodied_rl.files import write_atomic

_FIX = "Write it into a file beside the notebook and import it from there."


def importable(thing: Callable[..., Any], folder: Path) -> str:
    """``module:Name`` of a class or function; what was defined in ``__main__`` is written into a module of `folder` first.

    Sent along are the imports, plain values, classes and functions of ``__main__`` that its source names. The folder goes to the front of
    ``sys.path``, which simulator processes take over.

    Raises:
        UserError: it was defined inside a function, its source is not known, or it names something that cannot be sent.
    """
    name, module = thing.__qualname__, thing.__module__
    if "<" in name:
        raise UserError(f"'{name}' is defined inside a function or as a lambda, where simulator processes cannot import it. {_FIX}")
    if module != "__main__":
        return f"{module}:{name}"
    source = _source_with_names(thing)
    stem = f"{name.lower()}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    write_atomic(folder / f"{stem}.py", source)
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    return f"{stem}:{name}"


def _source_with_names(thing: Callable[..., Any]) -> str:
    """A module's text: the thing, and before it what it names."""
    namespace = vars(sys.modules["__main__"])
    imports: dict[str, str] = {}
    values: dict[str, str] = {}
    definitions: dict[str, str] = {}

    def need(definition: Callable[..., Any]) -> None:
        if definition.__qualname__ in definitions:
            return
        source = _definition(definition)
        definitions[definition.__qualname__] = ""  # noted before what it names, which may name it
        for name in sorted({node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}):
            if name in namespace and not hasattr(builtins, name):
                take(name, namespace[name])
        del definitions[definition.__qualname__]
        definitions[definition.__qualname__] = source

    def take(name: str, value: object) -> None:
        home, own = (getattr(value, part, None) for part in ("__module__", "__qualname__"))
        if isinstance(value, ModuleType):
            imports[name] = f"import {value.__name__} as {name}"
        elif home == "__main__" and own == name and isinstance(value, type | FunctionType):
            need(value)
        elif isinstance(home, str) and isinstance(own, str) and home != "__main__" and "." not in own and "<" not in own:
            imports[name] = f"from {home} import {own} as {name}"
        elif _is_plain(value):
            values[name] = f"{name} = {value!r}"
        else:
            raise UserError(f"'{thing.__name__}' names {shown(name)}, a {type(value).__name__}, which cannot be sent along. {_FIX}")

    need(thing)
    parts = ["\n".join(["from __future__ import annotations", "", *imports.values()]), "\n".join(values.values()), *definitions.values()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _definition(thing: Callable[..., Any]) -> str:
    """The source of a class or function; of a cell from the lines that Python keeps for tracebacks."""
    code = thing.__code__ if inspect.isfunction(thing) else next(filter(None, map(_code_of, vars(thing).values())), None)
    lines = linecache.getlines(code.co_filename) if code is not None else []
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        tree = ast.parse("")
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise UserError(f"The source of '{thing.__name__}' is not known here. {_FIX}")


def _code_of(member: object) -> CodeType | None:
    found = inspect.unwrap(member) if inspect.isfunction(member) else member
    return found.__code__ if inspect.isfunction(found) else None


def _is_plain(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
