"""Functions of tensors, called with arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arrays for its tensors; called with tensors, it stays as it is."""

    def called(*arguments: Any, **named: Any) -> Any:
        def tensor(value: Any) -> Any:
            return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

        result = function(*map(tensor, arguments), **{name: tensor(value) for name, value in named.items()})
        if not any(isinstance(value, np.ndarray) for value in (*arguments, *named.values())):
            return result
        return tuple(part.numpy() for part in result) if isinstance(result, tuple) else result.numpy()

    return called
