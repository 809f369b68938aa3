"""Flow matching (Lipman et al. 2023, arXiv:2210.02747): supervised learning of the velocity from recorded actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.policies.flow.schedule import mix

TimeDistribution = Literal["uniform", "beta"]
"""beta: pi0's, 0.001 + 0.999·Beta(1.5, 1), which prefers noisy times."""


def flow_matching_loss(
    velocity: Callable[[Tensor, Tensor], Tensor], action: Tensor, noise: Tensor, t: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Mean of (v(x_t, t) - (ε - a))² over each row's numbers [B], x_t = t·ε + (1 - t)·a.

    Args:
        velocity: (x [B, H, D], t [B]) → [B, H, D]
        action, noise: [B, H, D]
        t: [B]
        mask: [B, H] bool, steps that exist (a chunk may reach beyond the episode's end). A row without any has loss 0.
    """
    error = (velocity(mix(action, noise, t), t) - (noise - action)).square().mean(-1)
    if mask is None:
        return error.mean(-1)
    # where, not a product: what is masked may be NaN.
    kept = torch.where(mask, error, torch.zeros_like(error))
    return kept.sum(-1) / mask.sum(-1).clamp_min(1)


def sample_times(rows: int, distribution: TimeDistribution, generator: torch.Generator) -> Tensor:
    """Times [rows] float32 on the CPU. Beta(1.5, 1) by its inverse distribution function, u^(1/1.5)."""
    uniform = torch.rand(rows, generator=generator)
    return uniform if distribution == "uniform" else 0.001 + 0.999 * uniform.pow(1.0 / 1.5)
