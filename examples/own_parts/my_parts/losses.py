"""Losses. A loss is a pure function of named tensors; what a configuration may set are its other arguments."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from embodied_rl.algorithms.aggregation import Aggregation, visible_entries
from embodied_rl.bounds import Bounds


def spo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    denominator: float | Tensor | None,
    aggregation: Aggregation,
    epsilon: Annotated[float, Bounds(0.001, 1.0)] = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r + |A| (r - 1)^2 / (2 epsilon): a penalty in the place of PPO's clip (Xie et al. 2024, arXiv:2401.16025)."""
    new, old, a = visible_entries(mask, log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    ratio = (new - old).exp()
    loss = aggregation.reduce(-a * ratio + a.abs() * (ratio - 1.0) ** 2 / (2.0 * epsilon), mask, denominator)
    outside = ((ratio - 1.0).abs() > epsilon).to(ratio.dtype)
    return loss, {"outside_fraction": aggregation.mean(outside, mask, denominator)}
