"""From noise to actions in steps: the ordinary differential equation of a flow, and stochastic ones with the same marginals.

Times run backward, as pi0 has them (Black et al. 2024, arXiv:2410.24164): x_t = t·ε + (1 - t)·a, pure noise ε at t = 1, the action a at
t = 0, and the velocity v(x, t) = E[ε - a | x_t = x]. Hence a's estimate x - t·v and the noise's x + (1 - t)·v.

Shape legend: B rows, H steps of a chunk, D action dimensions. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.policies.heads import LOG_SQRT_2PI


@dataclass(frozen=True)
class Transition:
    """The normal distribution of one stochastic denoising step."""

    mean: Tensor
    """[B, H, D]"""
    std: Tensor
    """Broadcasts with `mean`."""

    def sample(self, noise: Tensor) -> Tensor:
        """[B, H, D] from standard normal noise."""
        return self.mean + self.std * noise

    def log_prob(self, x: Tensor) -> Tensor:
        """[B, H, D] of each dimension."""
        z = (x - self.mean) / self.std
        return -0.5 * z * z - torch.log(self.std) - LOG_SQRT_2PI

    def entropy(self) -> Tensor:
        """[B, H, D]"""
        return (torch.log(self.std) + 0.5 + LOG_SQRT_2PI).expand_as(self.mean)


def mix(action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t [B, H, D] between actions (t = 0) and noise (t = 1), times [B]."""
    share = _column(t)
    return share * noise + (1.0 - share) * action


def ode_step(x: Tensor, velocity: Tensor, delta: float) -> Tensor:
    """One Euler step from t to t - delta."""
    return x - velocity * delta


def sde_sigma(t: Tensor, delta: float, noise_level: float) -> Tensor:
    """σ(t) = λ·sqrt(t / (1 - t)) [B] (Flow-GRPO, Liu et al. 2025, arXiv:2505.05470).

    It is infinite at t = 1; there 1 - t is taken from the next time of the grid, t = 1 - delta.
    """
    return noise_level * torch.sqrt(t / (1.0 - t).clamp_min(delta))


def sde_step(x: Tensor, velocity: Tensor, t: Tensor, delta: float, noise_level: float) -> Transition:
    """Euler-Maruyama step from t to t - delta of the equation with noise σ(t) that keeps the flow's marginals.

    With the score ∇log p_t(x) = -(noise's estimate)/t:  mean = â(1 - (t - δ)) + ε̂(t - δ - σ²δ/(2t)),  std = σ·sqrt(δ).

    Args:
        x, velocity: [B, H, D]
        t: [B] in (0, 1].
        noise_level: λ; 0 is the ordinary equation (with std 0).
    """
    time = _column(t)
    sigma = _column(sde_sigma(t, delta, noise_level))
    action, noise = x - time * velocity, x + (1.0 - time) * velocity
    after = time - delta
    mean = action * (1.0 - after) + noise * (after - sigma**2 * delta / (2.0 * time))
    return Transition(mean, sigma * math.sqrt(delta))


def initial_log_prob(x: Tensor) -> Tensor:
    """[B, H, D] log-density of the noise that a chain starts from."""
    return -0.5 * x * x - LOG_SQRT_2PI


def step_time(index: Tensor, num_steps: int) -> Tensor:
    """Time [B] float32 at which denoising step `index` [B] (0 … S - 1) starts."""
    return 1.0 - index.to(torch.float32) / num_steps


def _column(t: Tensor) -> Tensor:
    return t[:, None, None]


Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, H, D], t [B]) → [B, H, D]"""


def log_density(velocity: Velocity, action: Tensor, *, num_steps: int = 32) -> Tensor:
    """log p(a) [B] of actions [B, H, D] = log N(x_1; 0, 1) + ∫₀¹ div v(x_t, t) dt, along dx/dt = v from x_0 = a.

    Runge-Kutta of fourth order with `num_steps` steps, in the action's own dtype. Nothing is differentiated by the caller's graph.
    """
    x = action.detach().clone()
    total = x.new_zeros(len(x))
    h = 1.0 / num_steps
    for step in range(num_steps):
        t = step * h
        v1, d1 = _with_divergence(velocity, x, t)
        v2, d2 = _with_divergence(velocity, x + 0.5 * h * v1, t + 0.5 * h)
        v3, d3 = _with_divergence(velocity, x + 0.5 * h * v2, t + 0.5 * h)
        v4, d4 = _with_divergence(velocity, x + h * v3, t + h)
        x = x + h / 6.0 * (v1 + 2.0 * v2 + 2.0 * v3 + v4)
        total = total + h / 6.0 * (d1 + 2.0 * d2 + 2.0 * d3 + d4)
    return initial_log_prob(x).flatten(1).sum(-1) + total


def _with_divergence(velocity: Velocity, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """v [B, H, D] and Σ ∂v_i/∂x_i [B]. Rows do not touch each other, so one backward pass serves all rows of a dimension."""
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        v = velocity(place, place.new_full((len(place),), t))
        components = v.flatten(1)
        divergence = components.new_zeros(len(place))
        for index in range(components.shape[1]):
            last = index == components.shape[1] - 1
            (gradient,) = torch.autograd.grad(components[:, index].sum(), place, retain_graph=not last, materialize_grads=True)
            divergence = divergence + gradient.flatten(1)[:, index]
    return v.detach(), divergence.detach()


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
