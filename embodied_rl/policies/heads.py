"""Action distributions: the interpretation of a policy network's outputs.

A head turns network outputs [B, K] into actions, log-probabilities [B, L] and entropies [B, L], one per action dimension (L = A; 1 for
discrete actions). It draws no random numbers: the caller passes the noise.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.policies.action_tokens import draw

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
MAX_SQUASHED = 1.0 - 1e-6
"""Largest magnitude of a squashed action: keeps atanh finite (|u| <= 7.25) and, in float32, differs from 1."""


class Head(nn.Module):
    """Base of the heads below."""

    num_outputs: int
    """Number of network outputs that the head reads, K."""
    squashed: bool = False
    """Whether actions come close to the simulator's bounds and never reach them."""

    def sample(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions [B, A] and their log-probabilities [B, L]; without noise, the mode."""
        raise NotImplementedError

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities [B, L] of actions."""
        raise NotImplementedError

    def entropy(self, outputs: Tensor) -> Tensor:
        """Entropies [B, L]."""
        raise NotImplementedError


class DiagonalGaussian(Head):
    """Independent normals with a state-independent standard deviation per dimension.

    Actions are unbounded here; the simulator's side clips them, and log-probabilities are those of the unclipped sample.
    """

    def __init__(self, dim: int, init_log_std: float) -> None:
        super().__init__()
        self.num_outputs = dim
        self.log_std = nn.Parameter(torch.full((dim,), float(init_log_std)))

    def sample(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action = outputs if noise is None else outputs + noise * self.log_std.exp()
        return action, self.log_prob(outputs, action)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        z = (action - outputs) * torch.exp(-self.log_std)
        return -0.5 * z * z - self.log_std - LOG_SQRT_2PI

    def entropy(self, outputs: Tensor) -> Tensor:
        return (self.log_std + 0.5 + LOG_SQRT_2PI).expand_as(outputs)


class SquashedGaussian(Head):
    """tanh of a `DiagonalGaussian`'s sample: bounded to (-1, 1) (Haarnoja et al. 2018, appendix C).

    The simulator receives, and recordings contain, the action tanh(u). `sample` and `log_prob` both recover u from it by atanh in float64,
    so that they agree although tanh rounds: near ±1 many u share one float32 action.
    """

    squashed = True

    def __init__(self, dim: int, init_log_std: float, num_nodes: int = 32) -> None:
        super().__init__()
        self.num_outputs = dim
        self.gaussian = DiagonalGaussian(dim, init_log_std)
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
        self._nodes = torch.tensor(nodes, dtype=torch.float32)
        self._weights = torch.tensor(weights / weights.sum(), dtype=torch.float32)

    def sample(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        unsquashed = outputs if noise is None else outputs + noise * self.gaussian.log_std.exp()
        action = torch.tanh(unsquashed).clamp(-MAX_SQUASHED, MAX_SQUASHED)
        return action, self.log_prob(outputs, action)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        unsquashed = torch.atanh(action.double().clamp(-MAX_SQUASHED, MAX_SQUASHED))
        return self.gaussian.log_prob(outputs, unsquashed.to(outputs.dtype)) - _log_slope(unsquashed).to(outputs.dtype)

    def entropy(self, outputs: Tensor) -> Tensor:
        """Gaussian entropy + E[log |d tanh(u)/du|], the expectation by Gauss-Hermite quadrature; differentiable in mean and std."""
        nodes, weights = self._nodes.to(outputs.device), self._weights.to(outputs.device)
        u = outputs[..., None] + self.gaussian.log_std.exp()[:, None] * nodes
        return self.gaussian.entropy(outputs) + (_log_slope(u) * weights).sum(-1)


class Categorical(Head):
    """One of K choices; noise is uniform in [0, 1) and selects from the cumulative distribution."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_outputs = num_actions

    def sample(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        if noise is None:
            action = outputs.argmax(dim=-1, keepdim=True)
        else:
            action = draw(torch.softmax(outputs, dim=-1).unsqueeze(-2), noise)
        return action, self.log_prob(outputs, action)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        return torch.log_softmax(outputs, dim=-1).gather(-1, action)

    def entropy(self, outputs: Tensor) -> Tensor:
        log_prob = torch.log_softmax(outputs, dim=-1)
        return -(log_prob.exp() * log_prob).sum(dim=-1, keepdim=True)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)**2), stable for large |u|."""
    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))
