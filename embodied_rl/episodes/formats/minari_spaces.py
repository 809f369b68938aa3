"""Gymnasium's spaces in the JSON that Minari keeps them in, and our specs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.types import ActionSpec, TensorSpec, VariableSpec

MIN_PICTURE = 32
"""Minari takes a uint8 Box of 0 … 255 for a picture from this many pixels a side on."""


@dataclass(frozen=True)
class Leaf:
    """One part of an observation space."""

    key: str
    """Its name here: ``state`` or ``rgb`` where it is the whole observation, else the keys joined by dots."""
    path: tuple[str, ...]
    """Names of its groups below ``observations``."""
    spec: TensorSpec | VariableSpec
    is_picture: bool = False
    """Minari may have stored it as JPEG files."""


def leaves_of(space: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """The parts of a serialised observation space. Raises KeyError, TypeError or ValueError where it is none."""
    kind = space["type"]
    if kind == "Dict":
        for key, inner in space["subspaces"].items():
            yield from leaves_of(inner, (*path, str(key)))
    elif kind == "Tuple":
        for index, inner in enumerate(space["subspaces"]):
            yield from leaves_of(inner, (*path, f"_index_{index}"))
    elif kind == "Text":
        yield Leaf(_key(path, "text"), path, VariableSpec("text"))
    elif kind == "Box":
        shape, dtype = tuple(int(size) for size in space["shape"]), str(np.dtype(space["dtype"]))
        wide = dtype == "uint8" and len(shape) in (2, 3) and min(shape[:2]) >= MIN_PICTURE
        picture = wide and bool(np.all(np.asarray(space["low"]) == 0) and np.all(np.asarray(space["high"]) == 255))
        yield Leaf(_key(path, "rgb" if picture and len(shape) == 3 else "state"), path, TensorSpec(shape, dtype), picture)
    elif kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        yield Leaf(_key(path, "state"), path, TensorSpec(_integer_shape(space), "int64"))
    else:
        raise ValueError(f"{kind} is not among Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text and Tuple")


def _key(path: tuple[str, ...], single: str) -> str:
    return ".".join(step.removeprefix("_index_") for step in path) or single


def _integer_shape(space: Mapping[str, Any]) -> tuple[int, ...]:
    if space["type"] == "Discrete":
        return ()
    if space["type"] == "MultiDiscrete":
        return tuple(np.shape(space["nvec"]))
    n = space["n"]
    return tuple(int(size) for size in n) if isinstance(n, list) else (int(n),)


def action_spec_of(space: Mapping[str, Any]) -> ActionSpec | None:
    """Our spec of a serialised action space; None for a Box without finite bounds.

    Raises KeyError, TypeError or ValueError for a space that has none.
    """
    kind = space["type"]
    if kind == "Discrete":
        if space.get("start", 0) != 0:
            raise ValueError(f"actions begin at {space['start']}, not at 0")
        return ActionSpec.discrete(int(space["n"]))
    if kind == "Text":
        return ActionSpec.text()
    if kind != "Box":
        raise ValueError(f"actions of kind {kind}; Box, Discrete and Text are read")
    low, high = np.asarray(space["low"], np.float64).ravel(), np.asarray(space["high"], np.float64).ravel()
    if not low.size == high.size == math.prod(space["shape"]):
        raise ValueError("action bounds of another shape than the actions")
    return ActionSpec.continuous(low, high) if np.isfinite(low).all() and np.isfinite(high).all() else None


def observation_space_of(parts: Mapping[str, TensorSpec | VariableSpec], texts: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """The serialised space of observations: the Box itself for a lone ``state``, else a Dict.

    Args:
        parts: {key: spec}; of varying size are only texts.
        texts: {key: (longest text, letters)}.
    """
    spaces = {key: _text(texts[key]) if isinstance(part, VariableSpec) else _box(part) for key, part in parts.items()}
    return spaces["state"] if tuple(parts) == ("state",) else {"type": "Dict", "subspaces": spaces}


def action_space_of(spec: ActionSpec, text: tuple[int, str] | None) -> dict[str, Any]:
    """The serialised space of actions; `text` is (longest text, letters) where they are texts."""
    if spec.kind == "discrete":
        return {"type": "Discrete", "dtype": "int64", "start": 0, "n": spec.num_actions}
    if text is not None:
        return _text(text)
    return {"type": "Box", "dtype": "float32", "shape": [spec.dim], "low": list(spec.low), "high": list(spec.high)}


def _text(text: tuple[int, str]) -> dict[str, Any]:
    return {"type": "Text", "max_length": max(1, text[0]), "min_length": 0, "charset": text[1]}


def _box(part: TensorSpec) -> dict[str, Any]:
    dtype = np.dtype(part.dtype)
    if dtype.kind == "f":
        low, high = -math.inf, math.inf
    elif dtype.kind == "b":
        low, high = 0, 1
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    full = np.full(part.shape, low).tolist(), np.full(part.shape, high).tolist()
    return {"type": "Box", "dtype": part.dtype, "shape": list(part.shape), "low": full[0], "high": full[1]}
