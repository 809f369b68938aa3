"""Losses and diagnostics of policy gradients: pure functions with an explicit mask, aggregation and denominator.

Every tensor of one call has the same shape, [B, L] (B rows, L action units) or [B]; with log-probabilities [B, L], an advantage or weight
[B] applies to the whole row. A masked entry does not count, even if it is NaN, and its gradient is exactly 0. Sums are divided by the
denominator: by default the count in this mask. For micro-batches or ranks pass `aggregation.Aggregation.count`, so that the parts of a
batch add up to the whole. Each loss returns ``(loss, metrics)``; metrics are detached and add up over parts in the same manner.

This module holds the losses that most algorithms share. Off-policy corrections are in `off_policy`, ratios of sequences and chunks in
`sequence_losses`, divergences in `kl`; `loss_table` lists them all.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, visible_entries
from embodied_rl.algorithms.kl import kl_estimate
from embodied_rl.algorithms.ratios import clamp_log_ratio
from embodied_rl.errors import require_known

Metrics = dict[str, Tensor]


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
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of PPO (Schulman et al. 2017), with separate bounds (Yu et al. 2025) and the dual clip (Ye et al. 2020).

    With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); if A < 0, at most -A dual_clip.

    Args:
        log_prob, old_log_prob: [B, L] or [B].
        advantage: the same, or [B].
        dual_clip: > 1.

    Returns the loss, and ``policy_loss``, ``approx_kl`` (k3) and ``clip_fraction``: the share of ratios outside the bounds. Raises
    ValueError for shapes that do not agree, or invalid bounds.
    """
    new, old, advantages = visible_entries(mask, log_prob=log_prob, old_log_prob=old_log_prob.detach(), advantage=advantage.detach())
    ratio = clamp_log_ratio(new - old).exp()
    per_entry, clipped = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss = aggregation.reduce(per_entry, mask, denominator)
    return loss, ratio_metrics(loss, new, old, clipped, mask, denominator, aggregation)


def ratio_metrics(
    loss: Tensor,
    new: Tensor,
    old: Tensor,
    clipped: Tensor,
    mask: Tensor | None,
    denominator: float | Tensor | None,
    aggregation: Aggregation,
) -> Metrics:
    """``policy_loss``, ``approx_kl`` (k3) and ``clip_fraction``, from log-probabilities and the entries whose ratio was clipped."""
    with torch.no_grad():
        kl = kl_estimate(log_prob=old, reference_log_prob=new, kind="k3")
        return {
            "policy_loss": loss.detach(),
            "approx_kl": aggregation.mean(kl, mask, denominator),
            "clip_fraction": aggregation.mean(clipped.to(kl.dtype), mask, denominator),
        }


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's term of every entry, and 1.0 if its ratio lies outside the bounds (else 0.0); see `ppo_clip_loss`."""
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be > 1 (a bound on ratios that have grown) or None, got {dual_clip}.")
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_entry = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None:
        per_entry = torch.where(advantage < 0, torch.minimum(per_entry, -advantage * dual_clip), per_entry)
    return per_entry, (clipped != ratio).detach().to(ratio.dtype)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError unless the bounds allow ratios from 1 - clip_low >= 0 to 1 + clip_high >= 1."""
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low must be between 0 and 1 and clip_high >= 0, got clip_low={clip_low}, clip_high={clip_high}.")


def policy_gradient_loss(
    *,
    log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """-A log pi: REINFORCE (Williams 1992), and the loss of GPG (Chu et al. 2025, arXiv:2504.02546).

    GPG's factor B / (number of rows whose advantage is not 0) belongs to its advantages. There is no ratio and no clipping: rows should
    come from the present policy.

    Args:
        log_prob: [B, L] or [B].
        advantage: the same, or [B]; a constant.
    """
    new, advantages = visible_entries(mask, log_prob=log_prob, advantage=advantage.detach())
    loss = aggregation.reduce(-advantages * new, mask, denominator)
    return loss, {"policy_loss": loss.detach()}


def behaviour_cloning_loss(
    *,
    log_prob: Tensor,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """-log pi of recorded actions: maximum likelihood (Pomerleau 1991; cross-entropy for tokens).

    Args:
        log_prob: [B, L] or [B] of the demonstrated actions under the policy in training.
        weight: the same, or [B]; constants, such as exp(advantage / temperature) for advantage-weighted regression.

    Returns the loss, and ``imitation_loss``.
    """
    (new,) = visible_entries(mask, log_prob=log_prob)
    if weight is not None:
        new = new * visible_entries(mask, log_prob=new, weight=weight.detach())[1]
    loss = aggregation.reduce(-new, mask, denominator)
    return loss, {"imitation_loss": loss.detach()}


def value_loss(
    *,
    value: Tensor,
    returns: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    kind: Literal["mse", "huber"] = "mse",
    huber_delta: float = 1.0,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """Error of the value function; with `clip`, the larger of it and the error of old_value + clamp(value - old_value, ±clip).

    With e = value - returns: ``mse`` is e^2; ``huber`` (Huber 1964) is e^2 up to |e| = huber_delta and huber_delta (2 |e| - huber_delta)
    beyond: twice the value of torch.nn.functional, so that the coefficient means the same for both kinds.
    Raises ValueError: `clip` without `old_value`, an unknown kind, bounds that are not positive, or shapes that do not agree.
    """
    require_known(kind, ("mse", "huber"), f"kind={kind!r} of value loss is not a choice.")
    if kind == "huber" and not huber_delta > 0:
        raise ValueError(f"huber_delta must be > 0, got {huber_delta}.")

    def error(estimate: Tensor) -> Tensor:
        if kind == "mse":
            return (estimate - target) ** 2
        return 2.0 * torch.nn.functional.huber_loss(estimate, target, reduction="none", delta=huber_delta)

    estimate, target = visible_entries(mask, value=value, returns=returns)
    per_entry = error(estimate)
    metrics: Metrics = {}
    if clip is not None:
        if old_value is None or not clip > 0:
            raise ValueError(f"Clipping the value needs old_value and clip > 0, got clip={clip}, old_value={type(old_value).__name__}.")
        _, old = visible_entries(mask, value=value, old_value=old_value)
        clipped = error(old + (estimate - old).clamp(-clip, clip))
        metrics["value_clip_fraction"] = aggregation.mean((clipped > per_entry).to(per_entry.dtype), mask, denominator)
        per_entry = torch.maximum(per_entry, clipped)
    loss = aggregation.reduce(per_entry, mask, denominator)
    return loss, {"value_loss": loss.detach(), **metrics}


def entropy_bonus(
    *,
    entropy: Tensor,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """Minus the aggregated entropy, as a loss."""
    (visible,) = visible_entries(mask, entropy=entropy)
    mean = aggregation.reduce(visible, mask, denominator)
    return -mean, {"entropy": mean.detach()}


def explained_variance(*, value: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - value) / Var(returns): 1 is perfect, 0 as good as a constant. NaN if the returns do not vary."""
    variance = float(returns.double().var(correction=0))
    if variance == 0.0:
        return float("nan")
    return 1.0 - float((returns.double() - value.double()).var(correction=0)) / variance
