"""Values and exceptions between processes as JSON and plain arrays: nothing is pickled, and no unknown type is built."""

from __future__ import annotations

import dataclasses
import enum
import math
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.agents.parsing import InvalidAction, MalformedCall, ToolCall, ToolRequest, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn
from embodied_rl.errors import NonFiniteError, UserError
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.sim.faults import FaultKind, FaultRecord, NonFiniteSimulationError, SimFault, SlotFault
from embodied_rl.types import Episode, EpisodeGroup, EpisodeSummary, Rollout

_AGENTS: tuple[type[Any], ...] = (AgentEpisode, InvalidAction, MalformedCall, ToolCall, ToolRequest, Turn, ValidAction)
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
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = type(value).__name__
    match value:
        case np.ndarray():
            return _pack_array(value, parcel)
        case np.bool_() | np.number():
            return {_KIND: "scalar", "t": value.dtype.str, "v": value.item()}
        case Tensor():
            return {_KIND: "tensor", "n": parcel.add(value)}
        case list():
            return [_pack(item, parcel) for item in value]
        case tuple():
            return {_KIND: "tuple", "v": [_pack(item, parcel) for item in value]}
        case Mapping():
            return {_KIND: "mapping", "v": [[_pack(key, parcel), _pack(item, parcel)] for key, item in value.items()]}
        case enum.Enum() if name in _ENUMS:
            return {_KIND: "enum", "t": name, "v": value.name}
    if _TYPES.get(name) is not type(value):
        return repr(value)
    fields = {field.name: _pack(vars(value)[field.name], parcel) for field in dataclasses.fields(_TYPES[name])}
    return {_KIND: "object", "t": name, "v": fields}


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


class RoleLost(ConnectionError):
    """A process or actor of a role has ended unexpectedly."""


class RoleError(RuntimeError):
    """A role raised an unexpected exception; the message contains its traceback."""


_ERRORS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (UserError, BatchNeverFullError, NonFiniteError, NonFiniteSimulationError, SimFault, RoleLost)
}


def encode_error(error: BaseException) -> dict[str, Any]:
    """Convert an exception to plain values."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind), "RoleError")
    if kind == "RoleError":
        return {"type": kind, "message": "".join(traceback.format_exception(error)).rstrip()}
    what: dict[str, Any] = {"type": kind, "message": str(error)}
    if isinstance(error, SimFault):
        what["fault"] = error.kind.name, error.worker, error.detail, list(error.slots), list(error.seeds), list(error.steps)
    elif isinstance(error, NonFiniteError):
        what["batch"] = error.batch or {}
    return what


def decode_error(what: dict[str, Any]) -> Exception:
    """Inverse of `encode_error`: same type for user mistakes, simulator faults and lost roles; otherwise `RoleError`."""
    make = _ERRORS.get(what["type"], RoleError)
    if "fault" in what:
        kind, worker, detail, slots, seeds, steps = what["fault"]
        fault: SimFault = make(FaultKind[kind], worker, detail, slots=slots, seeds=seeds, steps=steps)
        return fault
    error: Exception = make(what["message"])
    if isinstance(error, NonFiniteError):
        error.batch = what["batch"]  # for the training loop, which writes it to a file
    return error
