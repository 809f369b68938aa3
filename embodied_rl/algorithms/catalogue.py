"""What the tables of methods have in common, and functions of the user's own; importing this loads no tensor library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_rl.errors import UserError
from embodied_rl.registry import load_target


@dataclass(frozen=True)
class MethodInfo:
    """A pure function that a configuration can name."""

    name: str
    target: str
    """``package.module:function``; keyword arguments only."""
    summary: str
    """Its formula in one line."""
    source: str
    inputs: tuple[str, ...]
    """Arrays it takes by these names, all required."""
    optional_inputs: tuple[str, ...] = ()
    """Arrays it takes but can do without."""
    options: tuple[str, ...] = ()
    """Its own numbers and choices that a configuration may set."""
    required_options: tuple[str, ...] = ()
    """Those of `options` that have no default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that make the function this method."""
    own: bool = False
    """A function of the user's own, described by its signature."""

    def load(self) -> Callable[..., Any]:
        """The function, without `fixed`."""
        return load_target(self.target)


def described(name: str, target: str, *, arrays: Collection[str], shared: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a `MethodInfo` for a function of the user's own, read from its signature.

    An argument that `arrays` names is an input, `shared` ones every such function takes, all others are options: a configuration sets
    them, and those without a default it must set.
    Raises UserError: there is no such function, its arguments cannot be given by name, or one of `shared` is missing.
    """
    function = load_target(target)
    if not callable(function):
        raise UserError(f"'{target}' is no function, but {type(function).__name__}.")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise UserError(f"The types in the signature of '{target}' cannot be read: {error}. Import what they name.") from error
    unnamed = [p.name for p in parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if unnamed:
        raise UserError(f"'{target}' takes '{unnamed[0]}' without a name: give each argument one, so that options can be checked.")
    missing = [wanted for wanted in shared if wanted not in parameters]
    if missing:
        raise UserError(f"'{target}' does not take '{missing[0]}'. Its arguments must include {', '.join(shared)}.")
    own = {n: p for n, p in parameters.items() if n not in shared}
    return {
        "name": name,
        "target": target,
        "summary": (inspect.getdoc(function) or "a function of your own").splitlines()[0],
        "source": target,
        "inputs": tuple(n for n, p in own.items() if n in arrays and p.default is p.empty),
        "optional_inputs": tuple(n for n, p in own.items() if n in arrays and p.default is not p.empty),
        "options": tuple(n for n in own if n not in arrays),
        "required_options": tuple(n for n, p in own.items() if n not in arrays and p.default is p.empty),
        "own": True,
    }
