"""Values and exceptions between processes as JSON and plain arrays: nothing is pickled, and no unknown type is built."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.agents.parsing import InvalidAction, MalformedCall, ToolCall, ToolRequest, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Dropped, Turn
from embodied_rl.errors import NonFiniteError, UserError
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.sim.faults import FaultKind, FaultRecord, NonFiniteSimulationError, SimFault, SlotFault
from embodied_rl.types import Episode, EpisodeGroup, EpisodeSummary, Rollout

_AGENTS: tuple[type[Any], ...] = (AgentEpisode, Dropped, InvalidAction, MalformedCall, ToolCall, ToolRequest, Turn, ValidAction)
_ROBOTS: tuple[type[Any], ...] = (CollectorTimes, Episode, EpisodeGroup, EpisodeSummary, FaultRecord, Rollout, SlotFault)
_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_ROBOTS, *_AGENTS)}
_ENUMS: dict[str, type[enum.Enum]] = {kind.__name__: kind for kind in (FaultKind,)}
_SMALL_BYTES = 4096
_KIND = "$"
"""Key of the tagged objects below; mappings travel as lists of pairs, so none is mistaken for a tagged object."""


def register(kind: type[Any]) -> type[Any]:
    """Allow dataclass `kind` on the wire; a decorator."""
    _TYPES[kind.__name__] = kind
    return kind


def pack(value: object) -> tuple[Any, dict[str, Tensor]]:
    """Convert a value to JSON values and the arrays beside them.

    Numbers, texts, None, lists, tuples, mappings, arrays, torch tensors and registered dataclasses are restored by `unpack`; any other
    object (such as a simulator's own in an info) arrives as its `repr`.
    """
    parcel = _Parcel()
    return _pack(value, parcel), parcel.tensors()


def unpack(value: object, tensors: dict[str, Tensor]) -> Any:
    """Inverse of `pack`. Raises ValueError for an unknown type."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "array":
        return tensors[value["n"]].numpy()
    if kind == "small array":
        pool, start, shape = tensors[value["p"]].numpy(), value["o"], value["s"]
        return pool[start : start + math.prod(shape)].reshape(shape).copy()
    if kind == "tensor":
        return tensors[value["n"]]
    if kind == "scalar":
        return np.dtype(value["t"]).type(value["v"])
    if kind == "text array":
        return np.asarray(value["v"], value["t"]).reshape(value["s"])
    if kind == "objects":
        found: np.ndarray = np.empty(len(value["v"]), object)
        for place, item in enumerate(value["v"]):  # one by one: numpy would look inside arrays
            found[place] = unpack(item, tensors)
        return found.reshape(value["s"])
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value["v"])
    if kind == "mapping":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["v"]}
    if kind == "enum":
        return _ENUMS[value["t"]][value["v"]]
    if kind != "object" or value["t"] not in _TYPES:
        raise ValueError(f"a message contains the unknown {kind} {value.get('t')!r}")
    return _TYPES[value["t"]](**{name: unpack(item, tensors) for name, item in value["v"].items()})


def _pack(value: object, parcel: _Parcel) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else _pack_as(value, parcel)


@functools.singledispatch
def _pack_as(value: Any, parcel: _Parcel) -> Any:
    """Pack a value by its type."""
    name = type(value).__name__
    if _TYPES.get(name) is not type(value):
        return repr(value)
    fields = {field.name: _pack(vars(value)[field.name], parcel) for field in dataclasses.fields(value)}
    return {_KIND: "object", "t": name, "v": fields}


@_pack_as.register(enum.Enum)
def _(value: enum.Enum, parcel: _Parcel) -> Any:
    return {_KIND: "enum", "t": type(value).__name__, "v": value.name} if type(value).__name__ in _ENUMS else repr(value)


@_pack_as.register(Tensor)
def _(value: Tensor, parcel: _Parcel) -> Any:
    return {_KIND: "tensor", "n": parcel.add(value)}


@_pack_as.register(np.bool_)
@_pack_as.register(np.number)
def _(value: np.bool_ | np.number, parcel: _Parcel) -> Any:
    return {_KIND: "scalar", "t": value.dtype.str, "v": value.item()}


@_pack_as.register(Mapping)
def _(value: Mapping[Any, Any], parcel: _Parcel) -> Any:
    return {_KIND: "mapping", "v": [[_pack(key, parcel), _pack(item, parcel)] for key, item in value.items()]}


@_pack_as.register(list)
def _(value: list[Any], parcel: _Parcel) -> Any:
    return [_pack(item, parcel) for item in value]


@_pack_as.register(tuple)
def _(value: tuple[Any, ...], parcel: _Parcel) -> Any:
    return {_KIND: "tuple", "v": [_pack(item, parcel) for item in value]}


@_pack_as.register(np.ndarray)
def _pack_array(value: np.ndarray, parcel: _Parcel) -> Any:
    if value.dtype == object:
        return {_KIND: "objects", "s": list(value.shape), "v": [_pack(item, parcel) for item in value.reshape(-1)]}
    if value.dtype.kind not in "biuf":
        return {_KIND: "text array", "t": value.dtype.str, "s": list(value.shape), "v": value.astype(str).reshape(-1).tolist()}
    if value.nbytes <= _SMALL_BYTES:
        name, start = parcel.add_small(value)
        return {_KIND: "small array", "p": name, "o": start, "s": list(value.shape)}
    plain = np.ascontiguousarray(value).reshape(value.shape)  # numpy gives arrays without axes one axis
    return {_KIND: "array", "n": parcel.add(torch.from_numpy(plain if plain.flags.writeable else plain.copy()))}


class _Parcel:
    """Arrays of one message. Small arrays of a type share one tensor: agents' episodes have thousands, and each tensor has its own cost."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._pools: dict[str, list[np.ndarray]] = {}
        self._sizes: Counter[str] = Counter()

    def add(self, tensor: Tensor) -> str:
        """Add a tensor; return its name."""
        name = str(len(self._tensors))
        self._tensors[name] = tensor
        return name

    def add_small(self, array: np.ndarray) -> tuple[str, int]:
        """Add a small array; return (name of its pool, offset)."""
        name = f"small {array.dtype.str}"
        start = self._sizes[name]
        self._pools.setdefault(name, []).append(array.reshape(-1))
        self._sizes[name] += array.size
        return name, start

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the message, by name."""
        return {**self._tensors, **{name: torch.from_numpy(np.concatenate(parts)) for name, parts in self._pools.items()}}


# ---- Exceptions -----------------------------------------------------------------------------------------------------


_USER_ERRORS: dict[str, type[UserError]] = {kind.__name__: kind for kind in (UserError, BatchNeverFullError)}


class RoleLost(ConnectionError):
    """A process or actor of a role has ended unexpectedly."""


class RoleError(RuntimeError):
    """A role raised an unexpected exception; the message contains its traceback."""


@functools.singledispatch
def encode_error(error: BaseException) -> dict[str, Any]:
    """Convert an exception to plain values."""
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
    """Inverse of `encode_error`: same type for user mistakes, simulator faults and lost roles; otherwise `RoleError`."""
    kind = what["type"]
    if kind in ("SimFault", "NonFiniteSimulationError"):
        make = NonFiniteSimulationError if kind == "NonFiniteSimulationError" else SimFault
        slots, seeds, steps = what["slots"], what["seeds"], what["steps"]
        return make(FaultKind[what["kind"]], what["worker"], what["detail"], slots=slots, seeds=seeds, steps=steps)
    if kind == "RoleLost":  # a role that this role depends on: the whole is started again
        return RoleLost(what["message"])
    if kind in _USER_ERRORS:
        return _USER_ERRORS[kind](what["message"])
    if kind == "NonFiniteError":
        error = NonFiniteError(what["message"])
        error.batch = what["batch"]  # for the training loop, which writes it to a file
        return error
    return RoleError(what["message"])
