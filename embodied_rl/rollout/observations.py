"""Rows of observations: copy them out of reused batches, stack them again, and convert rollouts to plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from embodied_rl.types import EpisodeSummary, Rollout

_Row = TypeVar("_Row")


def copied(value: _Row) -> _Row:
    """Copy a row, so that it survives when its batch is overwritten."""
    return value.copy() if isinstance(value, np.ndarray) else value


def stacked(values: list[Any]) -> np.ndarray:
    """Stack to [n, ...]; an object array if the values are not arrays of one shape."""
    first = values[0]
    if isinstance(first, (np.ndarray, np.generic)) and all(np.shape(value) == np.shape(first) for value in values):
        return np.stack(values)
    rows = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        rows[row] = value
    return rows


_SEEN = ("observation", "last_observation", "final_observation")


def tree_of(rollout: Rollout) -> dict[str, Any]:
    """Convert a rollout to plain values and arrays; `rollout_of` is the inverse. Object arrays (texts) become lists."""
    tree: dict[str, Any] = {**vars(rollout), "episodes": [dict(vars(episode)) for episode in rollout.episodes]}
    for name in _SEEN:
        tree[name] = {key: part if part.dtype != object else (part.shape, part.ravel().tolist()) for key, part in tree[name].items()}
    return tree


def rollout_of(tree: Mapping[str, Any]) -> Rollout:
    """The inverse of `tree_of`."""

    def part(saved: Any) -> np.ndarray:
        if isinstance(saved, np.ndarray):
            return saved
        shape, values = saved
        array = np.empty(len(values), object)
        array[:] = values
        return array.reshape(shape)

    seen = {name: {key: part(saved) for key, saved in tree[name].items()} for name in _SEEN}
    return Rollout(**{**tree, **seen, "episodes": tuple(EpisodeSummary(**episode) for episode in tree["episodes"])})
