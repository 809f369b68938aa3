"""Losses for rows of another policy, and the weights and masks that correct for it.

Three policies may differ: *behaviour* (the generator that sampled, perhaps old, perhaps of another numerical precision),
*proximal* (the trainer's weights before this update, which PPO stays close to), and the one in training. Shapes and denominators are
those of `losses`. Weights are constants: no gradient flows through them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, masked_mean, visible_entries
from embodied_rl.algorithms.kl import kl_estimate
from embodied_rl.algorithms.losses import Metrics, check_clip, ratio_metrics
from embodied_rl.algorithms.ratios import Level, clamp_log_ratio, log_ratio_at
from embodied_rl.bounds import Coefficient, Positive
from embodied_rl.config import CorrectionConfig
from embodied_rl.errors import require_known

WeightMode = Literal["clamp", "mask"]


def importance_weights(
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    high: float,
    low: float = 0.0,
    level: Level = "token",
    mode: WeightMode = "clamp",
    mask: Tensor | None = None,
    chunk_id: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """w = pi / behaviour, bounded: factors of a loss if the generator's policy is not the one that should have sampled.

    ``clamp`` with low = 0 is truncated importance sampling (Ionides 2008; between generator and trainer: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"); ``mask`` gives 0 to ratios outside [low, high]
    (Ling Team 2025, arXiv:2510.18855, "IcePop") and leaves the others unchanged. `level` is the unit of the ratio: the entry, the
    geometric mean of its chunk or sequence, or the whole sequence (`ratios.log_ratio_at`).

    Args:
        log_prob: [B, L] or [B] under the policy that should have sampled (the trainer's weights before the update).
        behaviour_log_prob: the same shape, as the generator reported it.
        chunk_id: [B, L] integers, for level ``chunk``.

    Returns:
        Weights of the shape of `log_prob`, 0 outside the mask, detached; and ``weight_mean``, ``weight_bounded_fraction`` (share of
        clamped or rejected entries) and ``behaviour_kl`` (k3 of KL(behaviour || pi), entry by entry).

    Raises ValueError: bounds out of order, unknown level or mode, shapes that do not agree.
    """
    _check_bounds(low, high)
    require_known(mode, ("clamp", "mask"), f"mode={mode!r} of importance weights is not a choice.")
    with torch.no_grad():
        raw = log_ratio_at(level, log_prob=log_prob, old_log_prob=behaviour_log_prob, mask=mask, chunk_id=chunk_id).exp()
        inside = (raw >= low) & (raw <= high)
        weight = raw.clamp(low, high) if mode == "clamp" else torch.where(inside, raw, torch.zeros_like(raw))
        if mask is not None:
            weight = torch.where(mask, weight, torch.zeros_like(weight))
        new, behaviour = visible_entries(mask, log_prob=log_prob, behaviour_log_prob=behaviour_log_prob)
        kl = kl_estimate(log_prob=behaviour, reference_log_prob=new, kind="k3")
        metrics = {
            "weight_mean": masked_mean(weight, mask),
            "weight_bounded_fraction": masked_mean((~inside).to(weight.dtype), mask),
            "behaviour_kl": masked_mean(kl, mask),
        }
    return weight, metrics


def correction_weights(
    correction: CorrectionConfig,
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    mask: Tensor | None = None,
    chunk_id: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Factors of the advantages of a whole batch, as `algorithm.correction` says, before its first step.

    Every policy loss f(log pi, A) is proportional to a positive factor of A, so that this multiplies the loss entry by entry:
    w max(-A r, -A clip(r)) = max(-(w A) r, -(w A) clip(r)). An entry of weight 0 stays in the denominator.

    Combines w of `importance_weights` with the sequences that `rejection_mask` keeps. ``batch_normalise`` divides by the mean of w over
    all entries before rejection, so that the batch keeps its total weight (self-normalised importance sampling: Owen 2013,
    "Monte Carlo theory, methods and examples", section 9.2).

    Args:
        log_prob: [B, L] or [B] under the policy at the start of the update.
        behaviour_log_prob: the same shape, under the policy that sampled; for all rows of the batch, because a mean is over them.

    Returns weights of the shape of `log_prob`, 0 outside the mask; the metrics of `importance_weights`, and ``rejected_fraction``.
    """
    given = {"log_prob": log_prob, "behaviour_log_prob": behaviour_log_prob, "mask": mask, "chunk_id": chunk_id}
    weight = torch.ones_like(log_prob) if mask is None else mask.to(log_prob.dtype)
    metrics: Metrics = {}
    if correction.mode != "none":
        bounds = {"low": correction.low, "high": correction.high}
        weight, metrics = importance_weights(**given, **bounds, level=correction.level, mode=correction.mode)  # type: ignore[arg-type]
        if correction.batch_normalise:
            weight = weight / metrics["weight_mean"].clamp(min=torch.finfo(weight.dtype).tiny)
    if correction.reject is not None:
        kept = rejection_mask(**given, low=1.0 / correction.reject, high=correction.reject)  # type: ignore[arg-type]
        weight = torch.where(kept, weight, torch.zeros_like(weight))
        metrics["rejected_fraction"] = masked_mean((~kept).to(weight.dtype), mask)
    return weight, {name: float(value) for name, value in metrics.items()}


def rejection_mask(
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    high: float,
    low: float = 0.0,
    level: Level = "geometric",
    token_veto: float = 0.0,
    mask: Tensor | None = None,
    chunk_id: Tensor | None = None,
) -> Tensor:
    """Entries whose ratio pi / behaviour lies within [low, high], as a bool of the shape of `log_prob`; False outside the mask.

    Use it as a `weight` (``kept.to(dtype)``), not in place of the mask: the denominator is the number *before* rejection, otherwise
    the fewer entries are left, the more each would count.

    Args:
        level: unit of the ratio; ``sequence``, ``geometric`` and ``chunk`` keep or drop the whole unit.
        token_veto: drop a row with any entry whose own ratio is below this (0: no row): a single action that the trainer finds all but
            impossible indicates a broken generator rather than an old one.
    """
    _check_bounds(low, high)
    if not 0.0 <= token_veto <= 1.0:
        raise ValueError(f"token_veto must be between 0 and 1, got {token_veto}.")
    ratio = log_ratio_at(level, log_prob=log_prob, old_log_prob=behaviour_log_prob, mask=mask, chunk_id=chunk_id).exp()
    kept = (ratio >= low) & (ratio <= high)
    if token_veto > 0.0:
        own = log_ratio_at("token", log_prob=log_prob, old_log_prob=behaviour_log_prob, mask=mask).exp()
        vetoed = own < token_veto
        kept = kept & ~(vetoed if vetoed.dim() == 1 else vetoed.any(-1, keepdim=True))
    return kept if mask is None else kept & mask


def cispo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float = 1.0,
    clip_high: float,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: CISPO (MiniMax 2025, arXiv:2506.13585).

    The ratio's weight is clipped instead of its gradient, so that every entry keeps its pull. The paper has no lower bound: clip_low = 1.

    Returns the loss, and ``policy_loss``, ``approx_kl`` (k3) and ``clip_fraction``.
    """
    check_clip(clip_low, clip_high)
    new, old, advantages = visible_entries(mask, log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage.detach())
    ratio = clamp_log_ratio(new - old).exp().detach()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = aggregation.reduce(-clipped * advantages * new, mask, denominator)
    return loss, ratio_metrics(loss, new, old, clipped != ratio, mask, denominator, aggregation)


def topr_loss(
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    advantage: Tensor,
    ratio_low: Coefficient = 0.0,
    ratio_high: Positive = 1.0,
    level: Level = "sequence",
    sign: Literal["advantage", "score"] = "advantage",
    positive: Tensor | None = None,
    mask: Tensor | None = None,
    chunk_id: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286).

    If A >= 0: -A log pi, without a ratio: good rows are imitated however unlikely they have become.
    If A < 0: -sg(clip(pi / behaviour, ratio_low, ratio_high)) A log pi: actions that the policy no longer takes are not pushed down
    further. The ratio is that of the whole sequence, as in the paper; `level` offers others. With ``sign="score"`` the ratio is tapered in
    failed rows (`positive` [B] False), whatever their advantage: the paper separates good rows from bad ones by their reward.

    Returns:
        The loss, and ``policy_loss``, ``approx_kl`` (k3) and ``clip_fraction`` (share of all entries that are tapered with a clipped
        ratio).

    Raises ValueError: invalid bounds or shapes, or ``sign="score"`` without `positive`.
    """
    _check_bounds(ratio_low, ratio_high)
    new, old, advantages = visible_entries(mask, log_prob=log_prob, behaviour_log_prob=behaviour_log_prob, advantage=advantage.detach())
    ratio = log_ratio_at(level, log_prob=log_prob, old_log_prob=behaviour_log_prob, mask=mask, chunk_id=chunk_id).exp()
    clipped = ratio.clamp(ratio_low, ratio_high)
    if sign == "score":
        if positive is None or positive.dtype != torch.bool or positive.shape != log_prob.shape[:1]:
            raise ValueError(f"topr with sign='score' needs positive, bool of shape ({log_prob.shape[0]},): which rows succeeded.")
        tapered = ~(positive if new.dim() == 1 else positive[:, None].expand_as(new))
    else:
        tapered = advantages < 0
    taper = torch.where(tapered, clipped, torch.ones_like(clipped))
    loss = aggregation.reduce(-taper * advantages * new, mask, denominator)
    return loss, ratio_metrics(loss, new, old, (clipped != ratio) & tapered, mask, denominator, aggregation)


def _check_bounds(low: float, high: float) -> None:
    if not (0.0 <= low <= high and high > 0.0):
        raise ValueError(f"Bounds of a ratio must satisfy 0 <= low <= high and high > 0, got low={low}, high={high}.")
