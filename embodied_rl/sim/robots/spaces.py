"""Gymnasium spaces as our specs, and how a nested observation is written into rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, Observation, TensorSpec

SUCCESS_KEYS = ("success", "is_success")
"""Where simulators put success in their info; the first that is there counts."""


@dataclass(frozen=True)
class ObservationPart:
    """One leaf of an observation space."""

    name: str
    """Key in our observation: "state", "rgb", or a Dict's keys joined by dots."""
    path: tuple[Any, ...]
    """Keys from the root of the simulator's observation to this leaf."""
    space: gymnasium.Space
    spec: TensorSpec

    @property
    def is_plain_vector(self) -> bool:
        """Whether the simulator's observation itself can be assigned to a row."""
        return not self.path and isinstance(self.space, spaces.Box) and len(self.space.shape) == 1


def observation_parts(space: gymnasium.Space) -> list[ObservationPart]:
    """Flatten an observation space into named parts.

    Raises:
        UserError: a space that is neither Box, Discrete, MultiDiscrete, MultiBinary, Dict nor Tuple.
    """
    return _parts(space, ())


def _parts(space: gymnasium.Space, path: tuple[Any, ...]) -> list[ObservationPart]:
    if isinstance(space, spaces.Dict):
        return [part for key, inner in space.spaces.items() for part in _parts(inner, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [part for index, inner in enumerate(space.spaces) for part in _parts(inner, (*path, index))]
    name = ".".join(map(str, path))
    if _is_image(space):
        return [ObservationPart(name or "rgb", path, space, TensorSpec(tuple(space.shape or ()), "uint8"))]
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return [ObservationPart(name or "state", path, space, TensorSpec((spaces.flatdim(space),)))]
    where = f" under '{name}'" if name else ""
    raise UserError(
        f"Observation space {space}{where} cannot be adapted. Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple can: "
        "wrap the environment (gymnasium.wrappers.TransformObservation) so that it gives one of these."
    )


def _is_image(space: gymnasium.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[-1] == 3


def action_spec(space: gymnasium.Space) -> ActionSpec:
    """ActionSpec of a Discrete space, a bounded Box (flattened) or a Dict of bounded Boxes (concatenated; see `action_splits`).

    Raises:
        UserError: another space, or a Box without finite bounds.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpec.discrete(int(space.n))
    if isinstance(space, spaces.Box):
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UserError(
                f"Action space {space} has no finite bounds: wrap the environment in gymnasium.wrappers.RescaleAction or ClipAction."
            )
        return ActionSpec.continuous(space.low, space.high)
    if isinstance(space, spaces.Dict) and all(isinstance(inner, spaces.Box) for inner in space.spaces.values()):
        parts = [action_spec(inner) for inner in space.spaces.values()]
        return ActionSpec.continuous(sum((part.low for part in parts), ()), sum((part.high for part in parts), ()))
    raise UserError(
        f"Action space {space} cannot be adapted; Box, Discrete and a Dict of Boxes can. "
        "Wrap the environment so that it takes one of these."
    )


def action_splits(space: gymnasium.Space) -> dict[str, slice]:
    """Which columns of a flat action belong to which key of a Dict of Boxes (several robots, say); empty for other spaces."""
    splits: dict[str, slice] = {}
    start = 0
    for key, inner in space.spaces.items() if isinstance(space, spaces.Dict) else ():
        splits[key] = slice(start, start + spaces.flatdim(inner))
        start = splits[key].stop
    return splits


def row_writer(parts: list[ObservationPart]) -> Callable[[Observation, int, Any], None]:
    """A function ``write(observation, row, value)`` that puts one environment's nested observation into its row of each part."""
    writers = [(part.name, part.path, _leaf(part)) for part in parts]

    def write(observation: Observation, row: int, value: Any) -> None:
        for name, path, convert in writers:
            leaf = value
            for key in path:
                leaf = leaf[key]
            observation[name][row] = leaf if convert is None else convert(leaf)

    return write


def _leaf(part: ObservationPart) -> Callable[[Any], Any] | None:
    space = part.space
    if isinstance(space, spaces.Box):
        return None if space.shape == part.spec.shape else lambda value: np.asarray(value).reshape(-1)
    return lambda value: spaces.flatten(space, value)  # one-hot for choices


def control_hz(env: Any) -> float | None:
    """Control steps a second: from the environment's ``dt`` (seconds) where it has one, else its frame rate."""
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, (int, float)) and dt > 0:
        return round(1.0 / float(dt), 6)
    fps = env.metadata.get("render_fps")
    return float(fps) if fps else None


def action_converter(space: gymnasium.Space) -> Callable[[np.ndarray], Any]:
    """From rows [n, A] to what `env.step` takes; a copy, because rows may lie in shared memory and tasks keep their last action."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: [start + int(action) for action in actions[:, 0]]
    if isinstance(space, spaces.Dict):
        splits = {key: (columns, action_converter(space[key])) for key, columns in action_splits(space).items()}

        def split(actions: np.ndarray) -> list[dict[str, Any]]:
            parts = {key: convert(actions[:, columns]) for key, (columns, convert) in splits.items()}
            return [{key: part[row] for key, part in parts.items()} for row in range(len(actions))]

        return split
    if len(space.shape or ()) == 1:
        dtype = space.dtype
        return lambda actions: np.array(actions, dtype)
    shape, dtype = space.shape or (), space.dtype
    return lambda actions: np.array(actions, dtype).reshape(len(actions), *shape)
