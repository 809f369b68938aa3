"""Checks that a configuration fits into this machine's memory, before the system kills the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from embodied_rl.errors import UserError

if TYPE_CHECKING:
    from torch import nn

TRAINED = 4
"""Copies of trained weights: the weights, their gradients and the optimizer's two moments."""


def require_memory(what: str, parts: Mapping[str, int], smaller: str) -> None:
    """Raise UserError if the parts together are larger than this machine's memory.

    Args:
        what: what takes the memory, beginning with its key: ``policy.name=actor_critic with these sizes``.
        parts: {name and shape: bytes}.
    """
    import psutil

    needed, there = sum(parts.values()), psutil.virtual_memory().total
    if needed > there:
        largest = max(parts, key=lambda name: parts[name])
        raise UserError(
            f"{what} takes {needed / 2**30:,.0f} GiB to train (weights, gradients and Adam's moments), and this machine has "
            f"{there / 2**30:,.0f} GiB. Its largest layer is {largest}. Reduce {smaller}."
        )


def parameter_bytes(module: nn.Module, copies: int = TRAINED) -> dict[str, int]:
    """{name and shape: bytes of all copies} of a module, which may be on the device ``meta``: shapes without memory."""
    named = module.named_parameters()
    return {f"{name} {list(tensor.shape)}": copies * tensor.numel() * tensor.element_size() for name, tensor in named}
