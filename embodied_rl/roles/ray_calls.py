"""Calls of Ray actors: their results, their exceptions, and which role was lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from operator import methodcaller
from typing import Any, ParamSpec

import ray
from ray.exceptions import ObjectLostError, RayActorError

from embodied_rl.roles.wire import RoleLost, decode_error, encode_error
from embodied_rl.stopping import waiting

Outcome = tuple[str, Any]
"""("value", result), ("error", output of `wire.encode_error`), or ("lost", other role that ended)."""
Actor = Any
"""Handle of an actor; Ray creates its methods on first call."""
Reference = Any
"""Reference to the result of an actor's method."""
_P = ParamSpec("_P")
_SLICE_S = 0.5
GONE = (RayActorError, ObjectLostError)
"""Exceptions that Ray raises for an actor that ended, or for a lost node and its objects."""


def outcome_of(task: Callable[[], Any]) -> Outcome:
    """Run a task of an actor. Exceptions travel as values, because Ray's own exceptions would hide them."""
    try:
        return "value", task()
    except Exception as error:
        return failed(error)


def failed(error: BaseException) -> Outcome:
    """Outcome of a task that raised an exception."""
    return ("lost", first_line(error)) if isinstance(error, (*GONE, RoleLost)) else ("error", encode_error(error))


def answering(method: Callable[_P, object]) -> Callable[_P, Outcome]:
    """Let an actor's method return its `Outcome`."""

    @functools.wraps(method)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> Outcome:
        return outcome_of(lambda: method(*args, **kwargs))

    return answer


def call_named(target: object, names: Collection[str], what: str, *arguments: object, **named: object) -> Any:
    """Call a method of `target` whose name is in `names`. Raises ValueError for another one."""
    if what not in names:
        raise ValueError(f"{type(target).__name__}.{what} is not to be called by name")
    return methodcaller(what, *arguments, **named)(target)


def value_of(reference: Reference, role: str, *, can_give_up: bool = True) -> Any:
    """Wait for the result of an actor's method. Raises RoleLost, and any exception raised there.
    `can_give_up`: an ending run may do without the answer (see `stopping`)."""
    try:
        while not ray.wait([reference], timeout=_SLICE_S)[0]:
            if can_give_up:
                with waiting:  # in between: a signal's exception raised inside Ray arrives as another exception
                    pass
        kind, value = ray.get(reference)
    except GONE as error:
        raise RoleLost(f"The Ray actor {role} has ended: {first_line(error)}") from error
    if kind == "lost":
        raise RoleLost(f"A Ray actor that {role} works with has ended: {value}")
    if kind == "error":
        raise decode_error(value)
    return value


def first_line(error: BaseException) -> str:
    """Type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
