"""Losses and diagnostics of policy gradients: pure functions with an explicit mask and denominator.

Every tensor of one call has the same shape, [B] or [B, L]. A masked entry counts for nothing, be it NaN. The denominator is the
number that sums are divided by (by default the number of entries in the mask), so that parts of a batch add up to the whole.
Each loss returns ``(loss, metrics)``; metrics are detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, so that a stray action cannot overflow exp."""


def masked_mean(x: Tensor, mask: Tensor | None = None, denominator: float | Tensor | None = None) -> Tensor:
    """Sum of the entries in `mask` (None: all) over `denominator` (None: their number, at least 1)."""
    if mask is None:
        return x.sum() / (x.numel() if denominator is None else denominator)
    # where, not multiplication: NaN * 0 is NaN.
    total = torch.where(mask, x, torch.zeros_like(x)).sum()
    return total / (mask.sum().clamp(min=1) if denominator is None else denominator)


def ppo_clip_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of PPO (Schulman et al. 2017), with separate bounds (Yu et al. 2025) and the dual clip (Ye et al. 2020).

    With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0, at most -A dual_clip.

    Returns:
        The loss, and ``policy_loss``, ``approx_kl`` (k3) and ``clip_fraction``: the share of ratios outside the bounds.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_entry = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None:
        per_entry = torch.where(advantage < 0, torch.minimum(per_entry, -advantage * dual_clip), per_entry)
    loss = masked_mean(per_entry, mask, denominator)
    with torch.no_grad():
        metrics = {
            "policy_loss": loss.detach(),
            "approx_kl": masked_mean(kl_estimate(log_prob=old_log_prob, reference_log_prob=log_prob, kind="k3"), mask, denominator),
            "clip_fraction": masked_mean((clipped != ratio).to(ratio.dtype), mask, denominator),
        }
    return loss, metrics


def value_loss(
    *,
    value: Tensor,
    returns: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Mean squared error; with `clip`, the larger of it and the error of old_value + clamp(value - old_value, ±clip)."""
    per_entry = (value - returns) ** 2
    if clip is not None:
        assert old_value is not None, "value clipping needs the old values"
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        per_entry = torch.maximum(per_entry, (clipped - returns) ** 2)
    loss = masked_mean(per_entry, mask, denominator)
    return loss, {"value_loss": loss.detach()}


def entropy_bonus(*, entropy: Tensor, mask: Tensor | None = None, denominator: float | Tensor | None = None) -> tuple[Tensor, Metrics]:
    """Minus the mean entropy, as a loss."""
    mean = masked_mean(entropy, mask, denominator)
    return -mean, {"entropy": mean.detach()}


def kl_estimate(*, log_prob: Tensor, reference_log_prob: Tensor, kind: str) -> Tensor:
    """Estimators of KL(pi || reference) from samples of pi, entry by entry (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log reference: k1 = d (unbiased), k2 = d^2 / 2, k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    d = (log_prob - reference_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}.")


def explained_variance(*, value: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - value) / Var(returns): 1 is perfect, 0 as good as a constant. NaN where the returns do not vary."""
    variance = float(returns.double().var(correction=0))
    if variance == 0.0:
        return float("nan")
    return 1.0 - float((returns.double() - value.double()).var(correction=0)) / variance
