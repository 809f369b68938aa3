"""Rows of observations: taken out of a batch, which is overwritten, and put together again."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

_Row = TypeVar("_Row")


def copied(value: _Row) -> _Row:
    """A row that stays as it is when its batch is overwritten."""
    return value.copy() if isinstance(value, np.ndarray) else value


def stacked(values: list[Any]) -> np.ndarray:
    """[n, ...]; an object array where the values are not arrays of one shape."""
    first = values[0]
    if isinstance(first, (np.ndarray, np.generic)) and all(np.shape(value) == np.shape(first) for value in values):
        return np.stack(values)
    rows = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        rows[row] = value
    return rows
