"""Exceptions of another process, serialised so that they can be raised here with their own type."""

from __future__ import annotations

import functools
import traceback
from typing import Any

from embodied_rl.errors import NonFiniteError, UserError
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.sim.faults import FaultKind, NonFiniteSimulationError, SimFault

_USER_ERRORS: dict[str, type[UserError]] = {kind.__name__: kind for kind in (UserError, BatchNeverFullError)}


class RoleLost(ConnectionError):
    """A process or an actor that held a role has ended unexpectedly."""


class RoleError(RuntimeError):
    """A role raised something unexpected; the message holds its own traceback."""


@functools.singledispatch
def encode_error(error: BaseException) -> dict[str, Any]:
    """An exception, as plain values."""
    return {"type": "RoleError", "message": "".join(traceback.format_exception(error)).rstrip()}


@encode_error.register
def _(error: RoleLost) -> dict[str, Any]:
    return {"type": "RoleLost", "message": str(error)}


@encode_error.register
def _(error: SimFault) -> dict[str, Any]:
    fields = {"kind": error.kind.name, "worker": error.worker, "detail": error.detail}
    return {"type": "SimFault", **fields, "slots": list(error.slots), "seeds": list(error.seeds), "steps": list(error.steps)}


@encode_error.register
def _(error: NonFiniteSimulationError) -> dict[str, Any]:
    return {**encode_error.dispatch(SimFault)(error), "type": "NonFiniteSimulationError"}


@encode_error.register
def _(error: UserError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"type": kind if kind in _USER_ERRORS else "UserError", "message": str(error)}


@encode_error.register
def _(error: NonFiniteError) -> dict[str, Any]:
    return {"type": "NonFiniteError", "message": str(error), "batch": error.batch or {}}


def decode_error(what: dict[str, Any]) -> Exception:
    """The exception that `encode_error` serialised: same type for a user's mistakes, simulators' faults and lost roles, or `RoleError`."""
    kind = what["type"]
    if kind in ("SimFault", "NonFiniteSimulationError"):
        make = NonFiniteSimulationError if kind == "NonFiniteSimulationError" else SimFault
        slots, seeds, steps = what["slots"], what["seeds"], what["steps"]
        return make(FaultKind[what["kind"]], what["worker"], what["detail"], slots=slots, seeds=seeds, steps=steps)
    if kind == "RoleLost":  # one that the role itself depends on: it is begun anew as a whole
        return RoleLost(what["message"])
    if kind in _USER_ERRORS:
        return _USER_ERRORS[kind](what["message"])
    if kind == "NonFiniteError":
        error = NonFiniteError(what["message"])
        error.batch = what["batch"]  # the training loop writes it down
        return error
    return RoleError(what["message"])
