"""Probability ratios of two policies on the same actions: per entry, per chunk, per sequence.

Every log-ratio is clamped to ±MAX_LOG_RATIO, so that a stray action cannot overflow exp.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import visible_entries
from embodied_rl.errors import require_known

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, so that a stray action cannot overflow exp."""

Level = Literal["token", "chunk", "sequence", "geometric"]

LEVELS: tuple[str, ...] = get_args(Level)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to ±MAX_LOG_RATIO; beyond it there is no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_mean(x: Tensor, *, mask: Tensor | None = None, chunk_id: Tensor | None = None) -> Tensor:
    """Mean over each row, or over each chunk of each row, returned at every entry of it; detached, summed in float64.

    Args:
        x: [B, L].
        mask: [B, L] bool; entries that count. Other entries get 0.
        chunk_id: [B, L] integers, any values; entries of one row with the same number form a chunk, adjacent or not. None: the row
            is one chunk.

    Returns [B, L] of the type of `x`.
    """
    if x.dim() != 2:
        raise ValueError(f"segment_mean needs [B, L], got shape {tuple(x.shape)}.")
    shown = torch.ones(x.shape, dtype=torch.bool, device=x.device) if mask is None else mask
    values = torch.where(shown, x.detach(), torch.zeros_like(x)).double()
    if chunk_id is None:
        mean = values.sum(-1, keepdim=True) / shown.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(shown, mean.expand(x.shape), 0.0).to(x.dtype)
    if chunk_id.shape != x.shape or chunk_id.is_floating_point():
        raise ValueError(f"chunk_id must be integers of shape {tuple(x.shape)}, got {chunk_id.dtype} of shape {tuple(chunk_id.shape)}.")
    row = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape)
    # Masked entries may have any chunk number: they are not counted, so nothing needs cleaning.
    pairs, inverse = torch.unique(torch.stack([row.flatten(), chunk_id.flatten().long()], dim=1), dim=0, return_inverse=True)
    total = torch.zeros(len(pairs), dtype=torch.float64, device=x.device).index_add_(0, inverse, values.flatten())
    count = torch.zeros_like(total).index_add_(0, inverse, shown.flatten().double())
    mean = (total / count.clamp(min=1))[inverse].reshape(x.shape)
    return torch.where(shown, mean, 0.0).to(x.dtype)


def log_ratio_at(
    level: Level,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    mask: Tensor | None = None,
    chunk_id: Tensor | None = None,
) -> Tensor:
    """Detached log(pi / pi_old) of the unit that each entry belongs to, for use as a weight.

    ``token``: the entry itself. ``sequence``: the whole row, summed over its entries; the exact importance weight of the row.
    ``geometric``: the row's mean over entries, that is the geometric mean of the ratios, which does not grow with the length. ``chunk``:
    the mean over the entry's chunk.

    Args:
        log_prob, old_log_prob: [B, L], or [B] (then all levels are the same).
        mask: bool; entries that count.
        chunk_id: [B, L] integers, only for ``chunk``.

    Returns log-ratios of the shape of `log_prob`, within ±MAX_LOG_RATIO, 0 where the mask is False.

    Raises ValueError: unknown level, or ``chunk`` without `chunk_id`.
    """
    require_known(level, LEVELS, f"Level {level!r} is not known.")
    if level == "chunk" and chunk_id is None:
        raise ValueError("Level 'chunk' needs chunk_id [B, L], the number of the chunk that each entry belongs to.")
    new, old = visible_entries(mask, log_prob=log_prob.detach(), old_log_prob=old_log_prob.detach())
    log_ratio = new - old
    if log_ratio.dim() == 1 or level == "token":
        return clamp_log_ratio(log_ratio)
    if level == "sequence":
        total = log_ratio.double().sum(-1, keepdim=True).to(log_ratio.dtype).expand_as(log_ratio)
        return clamp_log_ratio(total if mask is None else torch.where(mask, total, torch.zeros_like(total)))
    return clamp_log_ratio(segment_mean(log_ratio, mask=mask, chunk_id=chunk_id if level == "chunk" else None))
