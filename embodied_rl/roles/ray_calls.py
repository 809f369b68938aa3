"""Calls of a Ray cluster's actors: what they return, what they raise, and which role was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from embodied_rl.roles.wire import RoleLost, decode_error, encode_error
from embodied_rl.stopping import waiting

Outcome = tuple[str, Any]
"""("value", …), ("error", what `wire.encode_error` gives), or ("lost", which other role ended)."""
Actor = Any
"""Handle of an actor: Ray makes its methods when they are called."""
Reference = Any
"""To what an actor's method will have returned."""
_SLICE_S = 0.5
GONE = (RayActorError, ObjectLostError)
"""What Ray raises for an actor that ended, or for a lost node and its objects."""


def outcome_of(task: Callable[[], Any]) -> Outcome:
    """Run a task of an actor; Ray's own exceptions hide what was raised, so that ours travel as values."""
    try:
        return "value", task()
    except (*GONE, RoleLost) as error:
        return "lost", first_line(error)
    except Exception as error:
        return "error", encode_error(error)


def value_of(reference: Reference, role: str, *, can_give_up: bool = True) -> Any:
    """What an actor's method returned. Raises RoleLost, and what was raised there.

    `can_give_up`: a run that is to end may do without the answer (see `stopping`).
    """
    try:
        while not ray.wait([reference], timeout=_SLICE_S)[0]:
            if can_give_up:
                with waiting:  # in between: what a signal raises inside of Ray comes out as another exception
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
    """An exception's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
