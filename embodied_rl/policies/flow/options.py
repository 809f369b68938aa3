"""How a flow policy samples, and what it keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.config.policy import FlowOptions, Method
from embodied_rl.errors import UserError

__all__ = ["FlowOptions", "Method", "Record", "RecordLayout"]


@dataclass(frozen=True)
class Record:
    """What `evaluate` needs of a decision beside its observation. One of the two parts is set."""

    chunk: Tensor
    """[B, K, A] the action: the first K steps and A dimensions of x at t = 0."""
    before: Tensor
    """flow_sde: [B, 1, H, D] x before the stochastic step. Others: [B, S, H, D] x before each step."""
    after: Tensor | None = None
    """flow_sde: [B, K, A] x after the stochastic step."""
    index: Tensor | None = None
    """flow_sde: [B] int64 which step was stochastic."""


@dataclass(frozen=True)
class RecordLayout:
    """A `Record` as one float32 row, so that it travels wherever an action does. The action itself comes first.

    ``flow_sde``: [chunk K·A | before H·D | after K·A | index].  Others: [chunk K·A | before S·H·D].
    """

    chunk: tuple[int, int]
    """(K, A)"""
    latent: tuple[int, int]
    """(H, D): K <= H, A <= D."""
    num_steps: int
    one_step: bool
    """flow_sde"""

    @property
    def num_used(self) -> int:
        """K·A"""
        return self.chunk[0] * self.chunk[1]

    @property
    def num_latent(self) -> int:
        """H·D"""
        return self.latent[0] * self.latent[1]

    @property
    def width(self) -> int:
        """W: numbers of a row."""
        if self.one_step:
            return 2 * self.num_used + self.num_latent + 1
        return self.num_used + self.num_steps * self.num_latent

    @property
    def noise_width(self) -> int:
        """Standard normal numbers that one decision takes: the start, then one for each stochastic step, and one for its index."""
        return 2 * self.num_latent + 1 if self.one_step else (1 + self.num_steps) * self.num_latent

    def used(self, x: Tensor) -> Tensor:
        """[B, ..., H, D] → [B, ..., K, A]: what the simulator gets of a model's chunk."""
        return x[..., : self.chunk[0], : self.chunk[1]]

    def pack(self, record: Record) -> Tensor:
        """[B, W] float32"""
        parts = [record.chunk.flatten(1), record.before.flatten(1)]
        if self.one_step:
            assert record.after is not None
            assert record.index is not None
            parts += [record.after.flatten(1), record.index[:, None].to(record.chunk.dtype)]
        return torch.cat(parts, dim=1)

    def unpack(self, row: Tensor) -> Record:
        """The inverse of `pack`. Raises UserError where the rows have another width."""
        if row.dim() != 2 or row.shape[1] != self.width:
            raise UserError(
                f"A flow policy's recorded action has {self.width} numbers (the chunk and its denoising), got {list(row.shape)}. "
                "Was it recorded with another policy.method, policy.num_steps or chunk?"
            )
        rows, used, latent = len(row), self.num_used, self.num_latent
        chunk = row[:, :used].reshape(rows, *self.chunk)
        before = row[:, used : used + (1 if self.one_step else self.num_steps) * latent].reshape(rows, -1, *self.latent)
        if not self.one_step:
            return Record(chunk, before)
        after = row[:, used + latent : 2 * used + latent].reshape(rows, *self.chunk)
        return Record(chunk, before, after, row[:, -1].round().long())
