"""Common fields of the tables of methods, and users' own functions. Importing this loads no tensor library."""

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
    """``package.module:function``, with keyword arguments only."""
    summary: str
    """Formula in one line."""
    source: str
    inputs: tuple[str, ...]
    """Names of the arrays it requires."""
    optional_inputs: tuple[str, ...] = ()
    """Names of the arrays it takes and can do without."""
    options: tuple[str, ...] = ()
    """Names of its own parameters that a configuration may set."""
    required_options: tuple[str, ...] = ()
    """The `options` without a default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fixed arguments that turn the function into this method."""
    own: bool = False
    """Whether it is a user's own function, described by its signature."""

    def taken(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arrays that the function takes."""
        return {name: arrays[name] for name in (*self.inputs, *self.optional_inputs) if name in arrays}

    def load(self) -> Callable[..., Any]:
        """Import the function, without applying `fixed`."""
        return load_target(self.target)


def described(name: str, target: str, *, arrays: Collection[str], shared: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a `MethodInfo` for a user's own function, read from its signature.

    An argument in `arrays` is an input; every such function takes those in `shared`; all others are options, which a configuration
    sets (and must set if they have no default).
    Raises UserError: the function does not exist, an argument cannot be passed by name, or one of `shared` is missing.
    """
    function = load_target(target)
    if not callable(function):
        raise UserError(f"'{target}' must be a function, got {type(function).__name__}.")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise UserError(f"The types in the signature of '{target}' cannot be read: {error}. Import the names that they use.") from error
    unnamed = [p.name for p in parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if unnamed:
        raise UserError(f"'{target}' takes '{unnamed[0]}' without a name: name each argument, so that options can be checked.")
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
