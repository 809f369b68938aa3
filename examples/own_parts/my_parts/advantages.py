"""Advantages. The names of the arrays say what the function is: `score` and `group` are of episodes in groups."""

from __future__ import annotations

import torch
from torch import Tensor


def median(*, score: Tensor, group: Tensor, scale: float = 1.0) -> Tensor:
    """scale · (score - median of the group): an outlier moves the baseline less than it moves a mean.

    Args:
        score: [B] return of each episode.
        group: [B] integer of the group that it belongs to.

    Returns:
        [B]
    """
    advantage = torch.zeros_like(score)
    for number in group.unique():
        own = group == number
        advantage[own] = scale * (score[own] - score[own].quantile(0.5))
    return advantage
