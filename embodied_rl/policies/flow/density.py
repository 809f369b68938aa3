"""The density of a flow's actions, by integrating the divergence of its velocity (Chen et al. 2018, arXiv:1806.07366).

Exact but for the integration; it costs 4·num_steps·H·D backward passes, so it is for diagnosis and tests, not for training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied_rl.policies.flow.schedule import initial_log_prob

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
