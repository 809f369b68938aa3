"""Gymnasium spaces as our specs and as JSON, and nested observations to and from rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, Observation, TensorSpec, VariableSpec

SUCCESS_KEYS = ("success", "is_success")
"""Keys of success in a simulator's info; the first that is present counts."""


@dataclass(frozen=True)
class ObservationPart:
    """One leaf of an observation space."""

    name: str
    """Key in our observation: "state", "rgb", "text", or a Dict's keys joined by dots."""
    path: tuple[Any, ...]
    """Keys from the root of the simulator's observation to this leaf."""
    space: gymnasium.Space
    spec: TensorSpec | VariableSpec


def observation_parts(space: gymnasium.Space) -> list[ObservationPart]:
    """Flatten an observation space into named parts.

    Raises UserError: a space that is not Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple, or two parts of one name.
    """
    parts = _parts(space, ())
    names = [part.name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"Observation space {space} has two parts named '{twice[0]}': rename one (nested keys are joined by dots).")
    return parts


def _parts(space: gymnasium.Space, path: tuple[Any, ...]) -> list[ObservationPart]:
    if isinstance(space, spaces.Dict):
        return [part for key, inner in space.spaces.items() for part in _parts(inner, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [part for index, inner in enumerate(space.spaces) for part in _parts(inner, (*path, index))]
    name = _name(space, path)
    if _is_image(space):
        return [ObservationPart(name, path, space, TensorSpec(tuple(space.shape or ()), "uint8"))]
    if isinstance(space, spaces.Text):
        return [ObservationPart(name, path, space, VariableSpec("text", _text_room(space)))]
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return [ObservationPart(name, path, space, TensorSpec((spaces.flatdim(space),)))]
    where = f" under '{'.'.join(map(str, path))}'" if path else ""
    raise UserError(
        f"Observation space {space}{where} cannot be adapted. Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple can: "
        "wrap the environment (gymnasium.wrappers.TransformObservation) so that it gives one of these."
    )


def _name(space: gymnasium.Space, path: tuple[Any, ...]) -> str:
    whole = "rgb" if _is_image(space) else "text" if isinstance(space, spaces.Text) else "state"
    return ".".join(map(str, path)) or whole


def _text_room(space: spaces.Text) -> int:
    """Bytes of the longest text in UTF-8."""
    return max(2**16, 4 * space.max_length)


def _is_image(space: gymnasium.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[-1] == 3


def action_spec(space: gymnasium.Space) -> ActionSpec:
    """ActionSpec of a Discrete or Text space, a bounded Box (flattened) or a Dict of bounded Boxes (concatenated; see `action_splits`).

    Raises UserError: another space, or a Box that is empty or has no finite bounds.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpec.discrete(int(space.n))
    if isinstance(space, spaces.Text):
        return ActionSpec.text(_text_room(space))
    if isinstance(space, spaces.Box):
        if not space.low.size:
            raise UserError(f"Action space {space} is empty: an action needs at least one number.")
        if not max(abs(float(space.low.min())), abs(float(space.high.max()))) <= float(np.finfo(np.float32).max):
            raise UserError(
                f"Action space {space} has no finite bounds: wrap the environment in gymnasium.wrappers.RescaleAction or ClipAction."
            )
        return ActionSpec.continuous(space.low, space.high)
    if isinstance(space, spaces.Dict) and space.spaces and all(isinstance(inner, spaces.Box) for inner in space.spaces.values()):
        parts = [action_spec(inner) for inner in space.spaces.values()]
        return ActionSpec.continuous(sum((part.low for part in parts), ()), sum((part.high for part in parts), ()))
    raise UserError(
        f"Action space {space} cannot be adapted; Box, Discrete, Text and a Dict of Boxes can. "
        "Wrap the environment so that it takes one of these."
    )


def action_splits(space: gymnasium.Space) -> dict[str, slice]:
    """{key of a Dict of Boxes (several robots, say): its columns of a flat action}; empty for other spaces."""
    splits: dict[str, slice] = {}
    start = 0
    for key, inner in space.spaces.items() if isinstance(space, spaces.Dict) else ():
        splits[key] = slice(start, start + spaces.flatdim(inner))
        start = splits[key].stop
    return splits


def row_writer(parts: list[ObservationPart]) -> Callable[[Observation, int, Any], None]:
    """Function ``write(observation, row, value)`` that writes one environment's nested observation into its row of each part.

    It raises ValueError for a value of another form than its space, which numpy would stretch, cut or wrap around to fit the row. Numbers
    beyond the space's bounds are written.
    """
    # A vector of its space's shape is written as it is (None: no such array); the type or form of everything else is looked at.
    vectors = [part.space.shape if isinstance(part.space, spaces.Box) and len(part.space.shape) == 1 else None for part in parts]
    writers = [(part.name, part.path, _leaf(part), shape) for part, shape in zip(parts, vectors, strict=True)]
    if [path for _, path, *_ in writers] == [()]:
        name, _, convert, shape = writers[0]

        def write_one(observation: Observation, row: int, value: Any) -> None:  # the loop below would cost twice as much as the rest
            observation[name][row] = value if type(value) is np.ndarray and value.shape == shape else convert(value, name)

        return write_one

    def write(observation: Observation, row: int, value: Any) -> None:
        for name, path, convert, shape in writers:
            leaf = value
            try:
                for key in path:
                    leaf = leaf[key]
            except (LookupError, TypeError):
                raise ValueError(f"observation '{name}' is missing") from None
            observation[name][row] = leaf if type(leaf) is np.ndarray and leaf.shape == shape else convert(leaf, name)

    return write


def _leaf(part: ObservationPart) -> Callable[[Any, str], Any]:
    space, shape, is_image = part.space, part.space.shape, _is_image(part.space)

    def numbers(value: Any, name: str) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"observation '{name}' holds no real numbers: {value!r:.80}")
        if array.shape != shape:
            raise ValueError(f"observation '{name}' has the shape {array.shape}, not {shape}")
        if not is_image:
            return array.reshape(-1)
        if array.dtype != np.uint8 and not ((array >= 0) & (array <= 255) & (array % 1 == 0)).all():
            raise ValueError(f"picture '{name}' must hold whole numbers from 0 to 255 (uint8), not {array.dtype} such as {array.max():g}")
        return array

    def one_hot(value: Any, name: str) -> Any:
        if not space.contains(value):
            raise ValueError(f"observation '{name}' is {value!r:.80}, which is not in {space}")
        return spaces.flatten(space, value)

    if isinstance(space, spaces.Text):
        return lambda value, name: value  # the manager's buffers refuse what is no text
    return numbers if isinstance(space, spaces.Box) else one_hot


def control_hz(env: gymnasium.Env | gymnasium.vector.VectorEnv) -> float | None:
    """Control steps per second: from the environment's ``dt`` (seconds) if it has one, else its frame rate."""
    base = env.unwrapped
    dt = base.dt if hasattr(base, "dt") else None  # an attribute, or MuJoCo's property
    if isinstance(dt, (int, float)) and dt > 0:
        return round(1.0 / float(dt), 6)
    fps = env.metadata.get("render_fps")
    return float(fps) if fps else None


def action_converter(space: gymnasium.Space) -> Callable[[np.ndarray], Any]:
    """Converter of rows [n, A] to `env.step`'s actions. It copies: rows may be shared memory, and tasks keep their last action."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: [start + int(action) for action in actions[:, 0]]
    if isinstance(space, spaces.Text):
        return list
    if isinstance(space, spaces.Dict):
        splits = {key: (columns, action_converter(space[key])) for key, columns in action_splits(space).items()}

        def split(actions: np.ndarray) -> list[dict[str, Any]]:
            parts = {key: convert(actions[:, columns]) for key, (columns, convert) in splits.items()}
            return [{key: part[row] for key, part in parts.items()} for row in range(len(actions))]

        return split
    shape, dtype = space.shape or (), np.dtype(space.dtype)
    whole = dtype.kind in "biu"  # otherwise only an action at the very bound would be the largest number
    return lambda actions: np.array(np.rint(actions) if whole else actions, dtype).reshape(len(actions), *shape)


# ---- spaces as data, and back ---------------------------------------------------------------------------------------


def describe(space: gymnasium.Space) -> dict[str, Any]:
    """A space that `observation_parts` or `action_spec` accepts, as JSON; infinite bounds become null, equal bounds one number."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {str(key): describe(inner) for key, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [describe(inner) for inner in space.spaces]}
    if isinstance(space, spaces.Text):
        return {"type": "Text", "min_length": space.min_length, "max_length": space.max_length, "charset": space.characters}
    kind = {"dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.Box):
        low, high = _bounds(space.low, space.bounded_below), _bounds(space.high, space.bounded_above)
        return {"type": "Box", **kind, "shape": list(space.shape), "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", **kind, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", **kind, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    assert isinstance(space, spaces.MultiBinary), space
    return {"type": "MultiBinary", "n": list(space.shape)}


def _bounds(bounds: np.ndarray, bounded: np.ndarray) -> Any:
    plain = [bound if known else None for bound, known in zip(bounds.ravel().tolist(), bounded.ravel().tolist(), strict=True)]
    return plain[0] if len(set(plain)) == 1 else plain


def space_of(data: Mapping[str, Any]) -> gymnasium.Space[Any]:
    """Space from the JSON of `describe`. Raises KeyError, TypeError or ValueError for anything else."""
    kind = data["type"]
    if kind == "Dict":
        return spaces.Dict({key: space_of(inner) for key, inner in data["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_of(inner) for inner in data["spaces"]])
    if kind == "Text":
        return spaces.Text(data["max_length"], min_length=data["min_length"], charset=data["charset"])
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"], dtype=np.dtype(data["dtype"]).type)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.asarray(data["nvec"]), dtype=np.dtype(data["dtype"]).type, start=np.asarray(data["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"] if len(data["n"]) != 1 else data["n"][0])
    if kind != "Box":
        raise ValueError(f"a space of kind {kind}")
    shape = tuple(data["shape"])
    dtype = np.dtype(data["dtype"])
    low, high = (_filled(data[name], none, shape, dtype) for name, none in (("low", -np.inf), ("high", np.inf)))
    return spaces.Box(low, high, shape, dtype.type)


def _filled(bounds: float | list[float | None] | None, none: float, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values = bounds if isinstance(bounds, list) else [bounds] * math.prod(shape)
    known = [none if value is None else value for value in values]
    # gymnasium accepts an infinite bound of integers only as a float.
    return np.array(known, np.float64 if None in values and dtype.kind in "iu" else dtype).reshape(shape)


def gather(space: gymnasium.Space, observation: Observation, path: tuple[Any, ...] = ()) -> Any:
    """Observation of a vector environment with `space` from rows {name: [n, ...]}: the inverse of `row_writer` for all rows.

    Arrays are copies in the space's dtype; texts are a tuple of n.
    """
    if isinstance(space, spaces.Dict):
        return {key: gather(inner, observation, (*path, key)) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(gather(inner, observation, (*path, index)) for index, inner in enumerate(space.spaces))
    rows = observation[_name(space, path)]
    if isinstance(space, spaces.Text):
        return tuple(map(str, rows))
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start + rows.argmax(1), space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.cumsum(space.nvec.ravel())
        chosen = [part.argmax(1) for part in np.split(rows, ends[:-1], axis=1)]
        return np.asarray(space.start + np.stack(chosen, axis=1).reshape(len(rows), *space.shape), space.dtype)
    values = np.array(rows, space.dtype).reshape(len(rows), *(space.shape or ()))
    return _within(values, space) if isinstance(space, spaces.Box) and values.dtype == np.float64 else values


def _within(values: np.ndarray, space: spaces.Box) -> np.ndarray:
    """Clip to the space: rows are float32, and a value at a float64 bound may have been rounded beyond it."""
    clipped = np.clip(values, space.low, space.high)
    return np.where(np.isclose(values, clipped, rtol=1e-6, atol=0), clipped, values)


def row_of(value: Any, i: int) -> Any:
    """One environment's part of a batched observation."""
    if isinstance(value, Mapping):
        return {key: row_of(inner, i) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(row_of(inner, i) for inner in value) if not value or not isinstance(value[0], str) else value[i]
    return value[i]


class LoneActionError(UserError, TypeError):
    """One action was given instead of a row per environment: gymnasium's callers expect a TypeError."""


def action_rows(space: gymnasium.Space, actions: Any, num_envs: int) -> np.ndarray | list[str]:
    """Actions of `num_envs` environments with action space `space` as rows [num_envs, A], or as texts.

    Raises:
        LoneActionError: one number instead of a row per environment.
        UserError: another number of actions, or another kind or size.
    """
    if isinstance(actions, int | float | np.number):
        raise LoneActionError(f"A step takes {num_envs} actions of {space}, got {_described(actions)}.")
    try:
        if isinstance(space, spaces.Text):
            texts = list(actions)
            if len(texts) == num_envs and all(isinstance(text, str) for text in texts):
                return texts
        elif isinstance(space, spaces.Dict):
            return np.hstack([np.asarray(action_rows(inner, actions[key], num_envs)) for key, inner in space.spaces.items()])
        else:
            rows = np.asarray(actions)
            start = space.start if isinstance(space, spaces.Discrete) else 0
            if rows.shape[:1] == (num_envs,) and rows.size == num_envs * math.prod(space.shape or ()) and rows.dtype.kind in "biuf":
                return rows.reshape(num_envs, -1) - start if start else rows.reshape(num_envs, -1)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"A step takes {num_envs} actions of {space}: {error}.") from error
    raise UserError(f"A step takes {num_envs} actions of {space}, got {_described(actions)}.")


def _described(actions: object) -> str:
    try:
        array: np.ndarray = np.asarray(actions)
    except ValueError:
        return type(actions).__name__
    return f"{type(actions).__name__} of shape {list(array.shape)} and dtype {array.dtype}"


class WhenRead(Mapping[str, Any]):
    """A dictionary that `make` makes whenever it is read."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    def __getitem__(self, key: str) -> Any:
        return self._make()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def info_row(info: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Undo a vector environment's batching: ``key`` [n] with the mask ``_key`` [n]."""
    row: dict[str, Any] = {}
    for key, value in info.items():
        if key.startswith("_") and key[1:] in info:
            continue
        mask = info.get(f"_{key}")
        if mask is None or (i < len(mask) and mask[i]):
            row[key] = info_row(value, i) if isinstance(value, Mapping) else value[i] if np.ndim(value) else value
    return row
