"""Divergence from a reference policy: estimates from samples, and as a loss."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, visible_entries

KlKind = Literal["k1", "k2", "k3"]

K3_SLOPE = 10.0
"""Steepest slope of k3: beyond d = -ln(1 + K3_SLOPE) = -2.4 its tangent continues it."""
_K3_FAR = math.log1p(K3_SLOPE)


def kl_estimate(*, log_prob: Tensor, reference_log_prob: Tensor, kind: str) -> Tensor:
    """Estimators of KL(pi || reference) from samples of pi, entry by entry (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log reference: k1 = d (unbiased), k2 = d^2 / 2, k3 = exp(-d) - 1 + d (unbiased, never negative). k3 grows
    exponentially with -d: at d = -10 one entry would weigh 22,015 and dominate a clipped gradient. Where its slope would exceed `K3_SLOPE`,
    its tangent replaces it, so that value and gradient stay finite and a far entry is still pulled back. Raises ValueError: unknown `kind`.
    """
    d = log_prob - reference_log_prob
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        # The exponential of a clamped d: an infinity in the unused branch would be NaN in the gradient.
        near = torch.expm1(-d.clamp(min=-_K3_FAR)) + d
        return torch.where(d < -_K3_FAR, K3_SLOPE - _K3_FAR - K3_SLOPE * (d + _K3_FAR), near)
    raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}.")


def kl_loss(
    *,
    log_prob: Tensor,
    reference_log_prob: Tensor,
    kind: KlKind = "k3",
    straight_through: bool = False,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(pi || reference) as a loss; multiply it by the coefficient.

    An unbiased value does not make an unbiased gradient. On samples of pi, the gradient of k2, E[d grad log pi], is that of the
    divergence. The gradient of k3 is that of KL(reference || pi) (weights 1 - exp(-d)), which agrees with it near d = 0 and lies
    between -`K3_SLOPE` and 1. The gradient of k1 is E[grad log pi] = 0, only noise, so k1 is refused unless `straight_through` is set,
    which combines the value of `kind` with the gradient of k2 (Tang and Munos 2025, arXiv:2506.09477).

    `log_prob`, `reference_log_prob`: [B, L] or [B]; the gradient goes only into the former.
    Returns the loss, and ``kl``, a mean over entries (token-mean) or over sequences' means (the other aggregations).
    Raises ValueError: unknown `kind`, or k1 without `straight_through`.
    """
    if kind == "k1" and not straight_through:
        raise ValueError(
            "k1 as a loss has the gradient E[grad log pi] = 0, so it does not regularise. Use k2 or k3, set straight_through=True, or "
            "put k1 in the reward (algorithm.kl.place=reward)."
        )
    new, reference = visible_entries(mask, log_prob=log_prob, reference_log_prob=reference_log_prob.detach())
    per_entry = kl_estimate(log_prob=new, reference_log_prob=reference, kind=kind)
    if straight_through:
        gradient = kl_estimate(log_prob=new, reference_log_prob=reference, kind="k2")
        per_entry = per_entry.detach() + (gradient - gradient.detach())
    loss = aggregation.reduce(per_entry, mask, denominator)
    return loss, {"kl": aggregation.mean(per_entry.detach(), mask, denominator)}
