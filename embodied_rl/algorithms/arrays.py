"""Numpy arrays and torch tensors side by side: what the recursions over time check and convert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)
"""A numpy array or a torch tensor: all arguments of a call are the same kind, and so are the results."""

_FLOATS = frozenset({np.dtype(np.float32), np.dtype(np.float64), torch.float32, torch.float64})
_FLAGS = frozenset({np.dtype(np.bool_), torch.bool})


def check_types(numbers: Iterable[Any], flags: Iterable[Any]) -> None:
    """Raises ValueError where kinds are mixed, a number is not float32 or float64, or a flag is not bool."""
    numbers, flags = tuple(numbers), tuple(flags)
    kinds = {isinstance(array, Tensor) for array in (*numbers, *flags)}
    if len(kinds) > 1:
        raise ValueError("All arguments must be numpy arrays, or all torch tensors; got both.")
    for array in numbers:
        if array.dtype not in _FLOATS:
            raise ValueError(f"Rewards and values must be float32 or float64, got {array.dtype}. Convert them first.")
    for array in flags:
        if array.dtype not in _FLAGS:
            raise ValueError(f"terminated, truncated, executed and mask must be bool, got {array.dtype}. Convert them first.")


def check_final_value(shape: tuple[int, ...], num_cut: int) -> None:
    """Raises ValueError unless there is one final value for each truncated step."""
    if shape != (num_cut,):
        raise ValueError(f"final_value must hold one value for each of the {num_cut} truncated steps, got shape {shape}.")


def as_numpy(array: np.ndarray | Tensor) -> np.ndarray:
    """The same numbers, contiguous; shared where possible. The tensor lies on the CPU."""
    # One memory layout: numba recompiles the kernel for each.
    return np.ascontiguousarray(array.detach().numpy() if isinstance(array, Tensor) else array)


def alike(result: np.ndarray, given: Array) -> Array:
    """`result` as the kind of array that was given."""
    return torch.from_numpy(result) if isinstance(given, Tensor) else result
