"""Action units of chunks: which were executed, and which of them share a probability ratio. Pure functions.

Shape legend: B rows, K steps of a chunk, A action dimensions, S denoising steps (1 for tokens), L = S·K·A action units; denoising step s,
step k of the chunk and dimension a are at unit (s·K + k)·A + a.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["chunk", "action", "token"]
"""Unit with one probability ratio: the whole decision, each step of its chunk, or each action unit."""


def unit_steps(num_units: int, chunk_size: int, action_dim: int) -> Tensor:
    """[L] int64: step of the chunk that each unit belongs to. Raises ValueError if L is no multiple of K·A."""
    if num_units % (chunk_size * action_dim):
        raise ValueError(f"{num_units} action units do not fit {chunk_size} steps of {action_dim} dimensions.")
    return (torch.arange(num_units) // action_dim) % chunk_size


def at_level(x: Tensor, level: Level, mask: Tensor | None, steps: Tensor) -> Tensor:
    """Sum log-probabilities (or entropies) [B, L] over each unit of the level: [B], [B, K], or [B, L] unchanged.

    Args:
        mask: [B, L] bool, units that count; the sums leave out the others. None: all units.
        steps: [L] of `unit_steps`.
    """
    if level == "token":
        return x
    visible = x if mask is None else torch.where(mask, x, torch.zeros_like(x))
    if level == "chunk":
        return visible.sum(-1)
    return visible.new_zeros(len(x), int(steps.max()) + 1).index_add(1, steps, visible)


def mask_at_level(mask: Tensor | None, level: Level, steps: Tensor) -> Tensor | None:
    """[B, L] bool → [B], [B, K] or [B, L]: which sums of `at_level` are over any counted unit."""
    if mask is None or level == "token":
        return mask
    return at_level(mask.float(), level, None, steps) > 0


def spread(x: Tensor, level: Level, steps: Tensor) -> Tensor:
    """Bring advantages [B] or [B, K] to the shape of `level`: each number for all of its units; [B, L] stays.
    Raises ValueError: numbers of single steps, with a level that has one number for the whole decision."""
    if x.dim() == 1:
        return x  # losses give a row's number to all its entries
    if level == "chunk":
        raise ValueError("Advantages of single actions need ratios of actions or tokens, not of whole chunks.")
    return x if level == "action" or x.shape[1] == len(steps) else x[:, steps]
