"""DPPO's two-layer decision process (Ren et al. 2024, arXiv:2409.00588): each denoising step is an action.

`FlowPolicy` with ``method="dppo"`` gives log-probabilities of S·K·A units, step by step. These functions bring them, and a decision's
advantage, to one number for each denoising step, as `algorithms.losses.ppo_clip_loss` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step_log_prob(log_prob: Tensor, num_steps: int) -> Tensor:
    """[B, S·K·A] → [B, S]: log-probability of each denoising step's whole chunk."""
    return log_prob.unflatten(-1, (num_steps, -1)).sum(-1)


def step_advantage(advantage: Tensor, num_steps: int, gamma: float) -> Tensor:
    """[B] → [B, S]: γ^(S - 1 - k)·A for step k. The noisiest step is furthest from the reward and counts least; the last counts whole."""
    distance = torch.arange(num_steps - 1, -1, -1, dtype=advantage.dtype, device=advantage.device)
    return advantage[:, None] * gamma**distance
