"""Losses whose ratio belongs to a whole sequence or a chunk of it. Shapes and denominators are those of `losses`.

A chunk is what an agent does between two observations: the tokens of one turn, or the K·D action units of one chunk of a robot's actions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import SEQUENCE_TOKEN_MEAN, TOKEN_MEAN, Aggregation, visible_entries
from embodied_rl.algorithms.losses import Metrics, clipped_surrogate, ratio_metrics
from embodied_rl.algorithms.ratios import clamp_log_ratio, segment_mean
from embodied_rl.bounds import Positive


def gspo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = SEQUENCE_TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of whole sequences (GSPO: Zheng et al. 2025, arXiv:2507.18071, in its token form).

    s = (pi(y) / pi_old(y))^(1/|y|), the geometric mean of the entries' ratios, enters at every entry as sg(s) · pi / sg(pi): its value
    is s, and its gradient s · grad log pi. With one advantage per row and the default aggregation this is exactly the gradient of the
    sequence form, (1/B) sum of max(-A s, -A clip(s)); advantages may also differ within a row.

    The bounds are much tighter than PPO's (the paper: 3e-4 and 4e-4), because a mean of log-ratios hardly moves.

    Args:
        log_prob, old_log_prob: [B, L], or [B] (then it is PPO).
        advantage: [B], or the same shape.

    Returns the loss, and ``policy_loss``, ``approx_kl`` (k3, entry by entry) and ``clip_fraction`` (entries of clipped sequences).
    """
    new, old, advantages = visible_entries(mask, log_prob=log_prob, old_log_prob=old_log_prob.detach(), advantage=advantage.detach())
    log_ratio = new - old
    if log_ratio.dim() == 2:
        # The value is the mean over the sequence, the gradient that of the entry; the clamp limits both, as in PPO.
        log_ratio = segment_mean(log_ratio, mask=mask) + (new - new.detach())
    ratio = clamp_log_ratio(log_ratio).exp()
    per_entry, clipped = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss = aggregation.reduce(per_entry, mask, denominator)
    return loss, ratio_metrics(loss, new, old, clipped, mask, denominator, aggregation)


def ipa_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    behaviour_log_prob: Tensor,
    advantage: Tensor,
    chunk_id: Tensor | None = None,
    positive: Tensor | None = None,
    max_mismatch: Positive,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, Metrics]:
    """Interaction-perceptive agentic policy optimisation over chunks (IPA; ROME, Wang et al. 2025, arXiv:2512.24873).

    For trajectories that succeeded: -G m log pi, imitation without a ratio. For the others: -sg(clip(rho_c, 0, 1)) G m log pi.
    rho_c is the geometric mean of pi / pi_old over the chunk; m keeps a chunk if the geometric mean of pi_old / behaviour over it
    is at most `max_mismatch`. Entries with m = 0 stay in the denominator.

    Args:
        log_prob, old_log_prob, behaviour_log_prob: [B, L] under the policy in training, under the trainer's weights before the update,
            and as the generator reported them.
        advantage: [B, L] the chunk's return G_k = gamma^(distance to the last chunk) · R_final at each of its entries, or [B].
        chunk_id: [B, L] integers; None: each row is one chunk.
        positive: [B] bool, whether the trajectory succeeded; None: whether the return is positive, which has the sign of R_final.
        max_mismatch: H > 0.

    Returns:
        The loss, and ``policy_loss``, ``approx_kl`` (k3), ``clip_fraction`` (entries of unsuccessful trajectories with rho_c > 1) and
        ``chunk_rejected_fraction`` (entries of chunks with m = 0).

    Raises ValueError: shapes that do not agree, or a bound that is not positive.
    """
    if not max_mismatch > 0:
        raise ValueError(f"max_mismatch (H, a ratio of probabilities) must be > 0, got {max_mismatch}.")
    if log_prob.dim() != 2:
        raise ValueError(f"IPA works on chunks of entries: log_prob must be [B, L], got shape {tuple(log_prob.shape)}.")
    if positive is not None and (positive.dtype != torch.bool or positive.shape != log_prob.shape[:1]):
        raise ValueError(f"positive must be bool of shape ({log_prob.shape[0]},), got {positive.dtype} of shape {tuple(positive.shape)}.")
    new, old, behaviour, returns = visible_entries(
        mask, log_prob=log_prob, old_log_prob=old_log_prob.detach(), behaviour_log_prob=behaviour_log_prob, advantage=advantage.detach()
    )
    with torch.no_grad():
        mismatch = clamp_log_ratio(segment_mean(old - behaviour, mask=mask, chunk_id=chunk_id))
        kept = mismatch <= math.log(max_mismatch)
        ratio = clamp_log_ratio(segment_mean(new - old, mask=mask, chunk_id=chunk_id)).exp()
        imitated = returns > 0 if positive is None else positive[:, None].expand_as(returns)
        taper = torch.where(imitated, torch.ones_like(ratio), ratio.clamp(0.0, 1.0)) * kept
    loss = aggregation.reduce(-taper * returns * new, mask, denominator)
    rejected = aggregation.mean((~kept).to(ratio.dtype), mask, denominator)
    metrics = ratio_metrics(loss, new, old, ~imitated & (ratio > 1.0), mask, denominator, aggregation)
    return loss, {**metrics, "chunk_rejected_fraction": rejected}
