"""Critics of actions: an ensemble of networks Q(s, a), evaluated together."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from embodied_rl.types import ActionSpec


class QEnsemble(nn.Module):
    """E independent MLPs with ReLU from features and an action to a number, as batched matrix products: [B, D], [B, A] → [E, B].

    With `layer_norm`, hidden layers are normalised before the activation (Ball et al. 2023, arXiv:2302.02948, section 4.2): values of
    actions that no data hold stay bounded by the norm of the weights.
    """

    def __init__(
        self, num_features: int, action: ActionSpec, hidden_sizes: tuple[int, ...], num_critics: int, *, layer_norm: bool = True
    ) -> None:
        """Weights are drawn from torch's global generator."""
        super().__init__()
        self._num_choices = action.num_actions if action.kind == "discrete" else 0
        size = num_features + (self._num_choices or action.dim)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for width in (*hidden_sizes, 1):
            # Each member as torch's own linear layer draws it.
            bound = 1.0 / math.sqrt(size)
            self.weights.append(nn.Parameter(torch.empty(num_critics, size, width).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(num_critics, 1, width).uniform_(-bound, bound)))
            size = width
        for width in hidden_sizes if layer_norm else ():
            self.scales.append(nn.Parameter(torch.ones(num_critics, 1, width)))
            self.shifts.append(nn.Parameter(torch.zeros(num_critics, 1, width)))

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """[B, D] float, [B, A] normalised (int64 [B, 1] for discrete) → [E, B]."""
        if self._num_choices:
            action = nn.functional.one_hot(action.squeeze(-1), self._num_choices)
        x = torch.cat([features, action.to(features.dtype)], dim=-1).expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if layer < last:
                if len(self.scales):
                    x = torch.addcmul(self.shifts[layer], nn.functional.layer_norm(x, x.shape[-1:]), self.scales[layer])
                x = torch.relu(x)
        return x.squeeze(-1)
