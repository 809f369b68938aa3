"""Flows whose everything is known: normal targets, and mixtures of them.

With x_t = t·ε + (1 - t)·a and a ~ N(μ, s²):  Var x_t = t² + (1 - t)²s²,  Cov(ε - a, x_t) = t - (1 - t)s²,  E[ε - a] = -μ, so that
v(x, t) = -μ + Cov/Var · (x - (1 - t)μ), and the flow maps noise ε to μ + s·ε.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]


def variance(t: Tensor, std: Tensor) -> Tensor:
    return t**2 + (1.0 - t) ** 2 * std**2


def slope(t: Tensor, std: Tensor) -> Tensor:
    """∂v/∂x"""
    return (t - (1.0 - t) * std**2) / variance(t, std)


def normal_velocity(mean: Tensor, std: Tensor) -> Velocity:
    """Of a diagonal normal target, mean and std [H, D]."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        time = t[:, None, None]
        return -mean + slope(time, std) * (x - (1.0 - time) * mean)

    return velocity


def mixture_velocity(means: Tensor, std: float) -> Velocity:
    """Of equal shares of normals with means [M, H, D]: the components' velocities, weighed by their posterior given x_t."""
    parts = [normal_velocity(mean, torch.full_like(mean, std)) for mean in means]

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        time = t[:, None, None]
        centres = (1.0 - time)[None] * means[:, None]
        score = (-0.5 * (x - centres) ** 2 / variance(time, torch.tensor(std, dtype=x.dtype))).sum((-1, -2))
        weights = torch.softmax(score, dim=0)[..., None, None]
        return (weights * torch.stack([part(x, t) for part in parts])).sum(0)

    return velocity
