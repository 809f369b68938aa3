"""What is rewarded: clipping, penalties, divergence from a reference policy.

Pure functions; each returns the new reward in the type of the old one. `mask` is bool: what it hides counts for nothing, be it NaN, and
gets 0. Shapes are [B] (one number per row), [B, L] (per action unit) or [T, N] (time-major: T steps of N slots), as stated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, visible_entries


def clip_reward(*, reward: Tensor, low: float = -math.inf, high: float = math.inf, mask: Tensor | None = None) -> Tensor:
    """Clamp to [low, high] (any shape). Raises ValueError for low > high."""
    if not low <= high:
        raise ValueError(f"clip_reward needs low <= high, got low={low}, high={high}.")
    (visible,) = visible_entries(mask, reward=reward)
    clipped = visible.clamp(low, high)
    return (clipped if mask is None else torch.where(mask, clipped, torch.zeros_like(clipped))).to(reward.dtype)


def penalize_length(*, reward: Tensor, length: Tensor, coefficient: float, free_length: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """reward - coefficient · max(length - free_length, 0), for [B] rewards and lengths in steps or tokens."""
    _require_not_negative("coefficient", coefficient)
    _require_not_negative("free_length", free_length)
    visible, lengths = visible_entries(mask, reward=reward, length=length.to(torch.float64))
    return (visible - coefficient * (lengths - free_length).clamp(min=0.0)).to(reward.dtype)


def penalize_overlong(
    *, reward: Tensor, length: Tensor, max_length: int, buffer: int, penalty: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Soft overlong punishment (DAPO: Yu et al. 2025, arXiv:2503.14476): nothing up to max_length - buffer, then linear to `penalty`.

    The penalty is reached at max_length and stays beyond it. [B] rewards and lengths in tokens or steps.
    Raises ValueError: unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"penalize_overlong needs 0 < buffer <= max_length, got buffer={buffer}, max_length={max_length}.")
    _require_not_negative("penalty", penalty)
    visible, lengths = visible_entries(mask, reward=reward, length=length.to(torch.float64))
    share = ((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)
    return (visible - penalty * share).to(reward.dtype)


def kl_in_reward(
    *,
    reward: Tensor,
    kl: Tensor,
    coefficient: float,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, dict[str, Tensor]]:
    """reward - coefficient · KL estimate, entry by entry (Ziegler et al. 2019, arXiv:1909.08593).

    Args:
        reward: [B, L], or [B].
        kl: the same shape, `kl.kl_estimate` of the policy that sampled, as the trainer computes it, from the reference on the same
            actions; k1 is the paper's. An entry of several tokens has the sum of their estimates: an estimate of the tokens' summed
            log-ratio spreads many times as far, exponentially in their number for k3.
        coefficient: >= 0; `kl.KlCoefficient` may steer it.

    Returns:
        Rewards, and ``kl`` and ``kl_penalty``, their means as `aggregation` takes them.
    """
    _require_not_negative("coefficient", coefficient)
    visible, estimate = visible_entries(mask, reward=reward, kl=kl.detach())
    mean = aggregation.mean(estimate, mask, denominator)
    return (visible - coefficient * estimate).to(reward.dtype), {"kl": mean, "kl_penalty": coefficient * mean}


def _require_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be >= 0, got {value}.")
