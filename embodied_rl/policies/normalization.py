"""Observation normalisation by running moments."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNorm(nn.Module):
    """Scales vectors [B, D] by the mean and standard deviation of all data so far, then clips.

    The statistics change only in `update`, so normalisation is constant between two updates. Moments are float64 buffers (part of the
    state_dict). Batches are merged exactly, in one step each, by the pairwise formula of Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979). Before the first batch, observations pass unscaled.
    """

    mean: Tensor
    """[D] float64"""
    var: Tensor
    """[D] float64, biased (divided by the count)."""
    count: Tensor
    """[] float64 number of rows added."""

    def __init__(self, size: int, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.eps = eps
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation, both [D] float32."""
        return self.mean.float(), torch.rsqrt(self.var + self.eps).float()

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] → [B, D] float32 within ±clip."""
        mean, inverse_std = self.scale()
        return ((x.float() - mean) * inverse_std).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add a batch [B, D]; an empty one changes nothing."""
        if x.shape[0] == 0:
            return
        rows = x.detach().to(self.mean.device, torch.float64)
        num_rows = float(rows.shape[0])
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        total = self.count + num_rows
        delta = mean - self.mean
        # Before the first batch, the initial variance of 1 has no weight because its count is 0.
        squares = self.var * self.count + var * num_rows + delta**2 * self.count * num_rows / total
        self.mean += delta * (num_rows / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)
