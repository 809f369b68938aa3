"""Values and exceptions between processes as JSON and plain arrays: nothing is pickled, and no unknown type is built."""

from __future__ import annotations

import dataclasses
import enum
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.agents.parsing import InvalidAction, MalformedCall, ToolCall, ToolRequest, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn
from embodied_rl.distributed.channel import Link
from embodied_rl.errors import NonFiniteError, UserError
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.sim.faults import FaultKind, FaultRecord, NonFiniteSimulationError, SimFault, SlotFault
from embodied_rl.sim.snapshots import SnapshotError, TreeReader, TreeWriter
from embodied_rl.specs import Json
from embodied_rl.types import Episode, EpisodeGroup, EpisodeSummary, Rollout

_AGENTS: tuple[type[Any], ...] = (AgentEpisode, InvalidAction, MalformedCall, ToolCall, ToolRequest, Turn, ValidAction)
_ROBOTS: tuple[type[Any], ...] = (CollectorTimes, Episode, EpisodeGroup, EpisodeSummary, FaultRecord, Rollout, SlotFault)
_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_ROBOTS, *_AGENTS)}
_ENUMS: dict[str, type[enum.Enum]] = {kind.__name__: kind for kind in (FaultKind,)}


def register(kind: type[Any]) -> type[Any]:
    """Allow dataclass `kind` on the wire; a decorator."""
    _TYPES[kind.__name__] = kind
    return kind


class RoleLink(Link):
    """A link whose messages are values.

    Plain values, arrays, torch tensors and registered dataclasses arrive as they were; any other object (such as a simulator's own in an
    info) arrives as its `repr`.
    """

    def send_value(self, value: object, read: Callable[[], object] | None = None) -> None:
        """Send a value. `read`: see `send_bytes`. Raises ChannelClosed."""
        writer = _Writer()
        skeleton = writer.node(value)
        self.send_bytes({"value": skeleton}, b"".join(writer.blocks), read)

    def recv_value(self, timeout_s: float | None = None) -> Any:
        """Receive the next value. Raises as `Link.recv`, and ValueError for an unknown type."""
        message, payload = self.recv_bytes(timeout_s)
        return _Reader(memoryview(payload)).node(message["value"])


class _Writer(TreeWriter):
    """Tags beside those of a snapshot: D dataclass, E member of an enumeration, O array of objects, T tensor."""

    def node(self, value: object) -> Json:
        try:
            return super().node(value)
        except SnapshotError:  # a set of objects
            return repr(value)

    def other(self, value: object) -> Json:
        name = type(value).__name__
        match value:
            case np.ndarray() if value.dtype == object:
                return ["O", list(value.shape), self.items(value.reshape(-1))]
            case Tensor():
                flat = value.detach().cpu().contiguous().reshape(-1)
                raw = flat.view(torch.uint8).numpy() if len(flat) else None  # of no entries there may be no view, see `pack_tensors`
                return ["T", str(value.dtype).removeprefix("torch."), list(value.shape), self.node(raw)]
            case Mapping():
                return self.node(dict(value))
            case list():
                return self.node(list(value))
            case tuple():
                return self.node(tuple(value))
            case enum.Enum() if name in _ENUMS:
                return ["E", name, value.name]
        if _TYPES.get(name) is not type(value):
            return repr(value)
        return ["D", name, {field.name: self.node(vars(value)[field.name]) for field in dataclasses.fields(_TYPES[name])}]


class _Reader(TreeReader):
    def others(self) -> dict[str, Callable[..., Any]]:
        return {"D": self._object, "E": lambda kind, name: _ENUMS[kind][name], "O": self._objects, "T": self._tensor}

    def _object(self, kind: str, fields: dict[str, Json]) -> Any:
        if kind not in _TYPES:
            raise ValueError(f"a message contains the unknown type {kind!r}")
        return _TYPES[kind](**{name: self.node(item) for name, item in fields.items()})

    def _objects(self, shape: list[int], items: list[Json]) -> np.ndarray:
        found: np.ndarray = np.empty(len(items), object)
        for place, item in enumerate(items):  # one by one: numpy would look inside arrays
            found[place] = self.node(item)
        return found.reshape(shape)

    def _tensor(self, dtype: str, shape: list[int], raw: Json) -> Tensor:
        if raw is None:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.from_numpy(self.node(raw)).view(getattr(torch, dtype)).reshape(shape)


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
