"""What a simulator declares before its first step: parts of observations, actions, and a policy's division of actions; numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from embodied_rl.errors import UserError

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""Any JSON value."""
PartValue: TypeAlias = np.ndarray | Json
"""One environment's value of one part of an observation."""
Rows: TypeAlias = slice | np.ndarray
"""Rows of an array [n, ...]: a slice, whose result is a view, or any rows."""


@dataclass(frozen=True)
class TensorSpec:
    """One named part of an observation."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raises UserError for a size that is not a whole number of at least 0."""
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in self.shape):
            raise UserError(f"An observation cannot have the shape {list(self.shape)}.")

    @property
    def is_picture(self) -> bool:
        """[height, width, 3] uint8"""
        return len(self.shape) == 3 and self.shape[-1] == 3 and self.dtype == "uint8"

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TensorSpec:
        return TensorSpec(tuple(int(size) for size in data["shape"]), str(data["dtype"]))


@dataclass(frozen=True)
class VariableSpec:
    """One named part of an observation whose size varies: rows hold Python values, separate from the tensors.

    The manager returns an object array [n] of `str` ("text"), of JSON values ("json": numbers, strings, lists, dictionaries), or
    of numpy arrays of any shape and numeric dtype ("array": such as images of varying size).
    """

    kind: Literal["text", "json", "array"]
    max_bytes: int = 2**16
    """Buffer of one slot. A larger value is an error that names the key and both sizes; values are never cut. Unused buffer
    costs no memory."""

    @property
    def is_picture(self) -> bool:
        """Whether it may be a picture: an array of any shape."""
        return self.kind == "array"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "max_bytes": self.max_bytes}


def part_spec_from_dict(data: Mapping[str, Any]) -> TensorSpec | VariableSpec:
    return VariableSpec(data["kind"], int(data["max_bytes"])) if "kind" in data else TensorSpec.from_dict(data)


@dataclass(frozen=True)
class ActionSpec:
    """Actions that a simulator takes: a bounded vector, one of ``num_actions`` choices, or text.

    Policies use normalised actions, [-1, 1] per dimension; `denormalise` maps these onto [low, high].
    """

    kind: Literal["continuous", "discrete", "text"]
    dim: int
    """A: vector length; 1 for a discrete action; 0 for text."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    num_actions: int = 0
    """Number of choices of a discrete action; 0 for others."""
    max_bytes: int = 0
    """Buffer of one text action; 0 for others."""

    @staticmethod
    def continuous(low: Sequence[float] | np.ndarray, high: Sequence[float] | np.ndarray) -> ActionSpec:
        lows, highs = np.asarray(low, np.float64).ravel(), np.asarray(high, np.float64).ravel()
        return ActionSpec("continuous", lows.size, tuple(lows.tolist()), tuple(highs.tolist()))

    @staticmethod
    def discrete(num_actions: int) -> ActionSpec:
        return ActionSpec("discrete", 1, num_actions=int(num_actions))

    @staticmethod
    def text(max_bytes: int = 2**16) -> ActionSpec:
        """Actions are strings: `EnvManager.send` takes a sequence of `str`, `SimEnv.step` gets a list of them."""
        return ActionSpec("text", 0, max_bytes=max_bytes)

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"

    @property
    def part(self) -> TensorSpec | VariableSpec:
        """One action as a part of an observation has it."""
        return VariableSpec("text", self.max_bytes) if self.kind == "text" else TensorSpec((self.dim,), self.dtype)

    def denormalise(self, action: np.ndarray) -> np.ndarray:
        """Clip normalised actions [..., A] to [-1, 1] and map them onto the simulator's bounds; discrete ones pass through."""
        if self.kind != "continuous":
            return action
        clipped = np.clip(action, -1.0, 1.0)
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        if (low == -1.0).all() and (high == 1.0).all():
            return clipped
        return np.minimum(low + (clipped + 1.0) * (0.5 * (high - low)), high)  # rounding may lead beyond

    def normalise(self, action: np.ndarray, *, margin: float = 0.0) -> np.ndarray:
        """The inverse: map actions [..., A] in the simulator's units onto [-1 + margin, 1 - margin] float32; choices stay int64.

        Values beyond the bounds are clipped, as simulators do; a dimension without extent becomes 0.

        `margin`: keeps a squashed policy's targets in the range of tanh, which is 1 only at infinity.

        Raises UserError: the simulator's bounds are not finite, so that actions cannot be normalised.
        """
        if self.kind != "continuous":
            return action.astype(np.int64)
        low, high = np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise UserError(
                "Recorded actions cannot be normalised: the simulator's action bounds are not finite. Wrap it so that they are."
            )
        half = 0.5 * (high - low)
        flat = half <= 0
        unit = (np.asarray(action, np.float64) - low) / np.where(flat, 1.0, half) - 1.0
        limit = 1.0 - margin
        return np.clip(np.where(flat, 0.0, unit), -limit, limit).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "low": list(self.low), "high": list(self.high)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ActionSpec:
        low, high, dim = tuple(data["low"]), tuple(data["high"]), int(data["dim"])
        if not all(isinstance(bound, float) or (isinstance(bound, int) and abs(bound) < 2**63) for bound in (*low, *high)):
            raise TypeError("a bound of the actions is no number")
        if data["kind"] == "continuous" and not len(low) == len(high) == dim:
            raise ValueError(f"{dim} dimensions of the actions have {len(low)} and {len(high)} bounds")
        return ActionSpec(
            data["kind"],
            dim,
            low,
            high,
            int(data["num_actions"]),
            int(data.get("max_bytes", 0)),
        )


@dataclass(frozen=True)
class ActionLayout:
    """Layout of a policy's recorded actions, and of the randomness that they take."""

    width: int
    """W: values of one recorded action: A, or what the policy needs to score it again (token ids, a denoising)."""
    dtype: str
    num_units: int
    """L: log-probabilities of one action."""
    noise_width: int
    noise_kind: Literal["normal", "uniform"]
    """normal: standard normal. uniform: in [0, 1)."""
    chunk_size: int = 1
    """K: steps that the simulator plays per action."""

    @staticmethod
    def of(action: ActionSpec) -> ActionLayout:
        """Layout of a policy that outputs the simulator's own action, normalised, for one step."""
        noise: Literal["normal", "uniform"] = "normal" if action.kind == "continuous" else "uniform"
        return ActionLayout(action.dim, action.dtype, action.dim, action.dim, noise)

    def unit_steps(self, action_dim: int) -> np.ndarray:
        """[L] int64: step of the chunk that each action unit belongs to, with A dimensions per step."""
        return (np.arange(self.num_units) // max(action_dim, 1)) % self.chunk_size

    def about_units(self) -> dict[str, Any]:
        """Entry of a recording about actions that are not the simulator's own, which importance weights of log-probabilities need."""
        return {"chunk_size": self.chunk_size, "units": "tokens" if self.dtype == "int64" else "own"}

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw noise [*shape, noise_width] float32."""
        whole = (*shape, self.noise_width)
        draw = generator.standard_normal if self.noise_kind == "normal" else generator.random
        return draw(whole, dtype=np.float32)


SnapshotKind = Literal["exact", "approximate", "replay", "none"]
"""exact: the simulator's `snapshot` and `restore` continue bit by bit. approximate: they exist, and the continuation drifts (check_sim
measures how much). replay: no simulator state is saved; the episode is replayed from its seed, which is exact if the simulator is
deterministic. none: an episode cannot be continued."""


@dataclass(frozen=True)
class SimSpec:
    """What a simulator offers; slabs are laid out from it, policies are built from it, checkpoints store it."""

    task: str
    observation: Mapping[str, TensorSpec | VariableSpec]
    action: ActionSpec
    max_episode_steps: int | None = None
    control_hz: float | None = None
    instruction: str | None = None
    reports_success: bool = False
    """Whether `success` has a meaning for this task."""
    can_render: bool = False
    snapshots: SnapshotKind = "replay"
    """How an episode can be continued elsewhere: see `SnapshotKind`."""
    steps_together: bool = False
    """Whether all environments of a process advance in one call, whichever were requested (a GPU simulation, a VectorEnv)."""
    spaces: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """{"observation", "action"}: an adapted gymnasium environment's own spaces, as `embodied_rl.sim.robots.spaces.describe` writes them;
    empty for a simulator without any. Only views for other libraries read them; everything here is built from the parts above."""

    def __post_init__(self) -> None:
        """Raises UserError for an observation without a number, and for a step limit below 1."""
        if not self.variables and not any(math.prod(part.shape) for part in self.tensors.values()):
            raise UserError(f"Task '{self.task}' has an empty observation.")
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise UserError(f"Task '{self.task}' needs max_episode_steps of at least 1, or none, got {self.max_episode_steps}.")

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The parts of fixed size."""
        return {key: part for key, part in self.observation.items() if isinstance(part, TensorSpec)}

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """The parts of varying size."""
        return {key: part for key, part in self.observation.items() if isinstance(part, VariableSpec)}

    def to_dict(self) -> dict[str, Any]:
        parts = {"observation": {key: spec.to_dict() for key, spec in self.observation.items()}, "action": self.action.to_dict()}
        whole = {**vars(self), **parts, "spaces": dict(self.spaces)}
        return whole if self.spaces else {name: value for name, value in whole.items() if name != "spaces"}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SimSpec:
        if not isinstance(data["task"], str) or not isinstance(data.get("instruction"), str | None):
            raise TypeError("the task or its instruction is no text")
        return SimSpec(
            **{
                **data,
                "observation": {key: part_spec_from_dict(spec) for key, spec in data["observation"].items()},
                "action": ActionSpec.from_dict(data["action"]),
            }
        )


def show_part(part: TensorSpec | VariableSpec | None) -> str:
    """A part of an observation in a few words."""
    if part is None:
        return "absent"
    return f"{list(part.shape)} {part.dtype}" if isinstance(part, TensorSpec) else part.kind


def show_action(action: ActionSpec) -> str:
    """A simulator's actions in a few words."""
    if action.kind == "discrete":
        return f"discrete({action.num_actions})"
    if action.kind == "text":
        return "text"
    low, high = np.asarray(action.low), np.asarray(action.high)
    bounds = f"[{low.min():g}, {high.max():g}]" if low.size else "[]"
    return f"continuous({action.dim}) within {bounds}"


def spec_differences(ours: SimSpec, theirs: SimSpec, *, same_task: bool = False, keys: Iterable[str] | None = None) -> list[str]:
    """Every difference that a policy would notice, as ``ours ≠ theirs``.

    `same_task`: the task's name counts too; `keys`: parts of the observation that count, None: all.
    """
    found = [f"task {ours.task} ≠ {theirs.task}"] if same_task and ours.task != theirs.task else []
    for key in sorted({*ours.observation, *theirs.observation}) if keys is None else keys:
        mine, other = ours.observation.get(key), theirs.observation.get(key)
        if _content(mine) != _content(other):
            found.append(f"observation '{key}' {show_part(mine)} ≠ {show_part(other)}")
    if _content(ours.action) != _content(theirs.action):
        mine_shown, other_shown = show_action(ours.action), show_action(theirs.action)
        same = f"bounds of single dimensions of the action {mine_shown}"
        found.append(f"action {mine_shown} ≠ {other_shown}" if mine_shown != other_shown else same)
    return found


def _content(part: TensorSpec | VariableSpec | ActionSpec | None) -> TensorSpec | VariableSpec | ActionSpec | None:
    """A part without the size of a text's buffer, which a policy does not see."""
    return part if part is None or isinstance(part, TensorSpec) else replace(part, max_bytes=0)
