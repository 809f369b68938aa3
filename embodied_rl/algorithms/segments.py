"""Credit by chunks of a row's action units: the tokens between two interactions with the environment, one turn of an agent.

A row [L] is a whole episode here. `chunk_id` [B, L] integers give the chunk that each unit belongs to: units of a row with the same
number, adjacent or not, and in the order in which they first appear. Without it, the chunks are the runs of the mask, for between two
turns of an agent lie tokens that it did not write. Units outside the mask may hold any number, and chunks without a unit in the mask
are not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import token_returns
from embodied_rl.algorithms.grouped import check_finite, counted_rows


@torch.no_grad()
def chunk_ranks(*, mask: Tensor, chunk_id: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Number the chunks of each row from 0.

    Args:
        mask: [B, L] bool.
        chunk_id: [B, L] integers; None: each run of the mask is a chunk.

    Returns:
        [B, L] int64 the number of each unit's chunk, 0 outside the mask; and [B] int64 how many chunks each row has.

    Raises:
        ValueError: shapes or types do not agree.
    """
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(f"mask must be bool [B, L], got {mask.dtype} {tuple(mask.shape)}.")
    if chunk_id is None:
        begins = mask.clone()
        begins[:, 1:] &= ~mask[:, :-1]
        count = begins.long().cumsum(1)
        return torch.where(mask, count - 1, 0), begins.sum(1)
    if chunk_id.shape != mask.shape or chunk_id.dtype.is_floating_point or chunk_id.dtype == torch.bool:
        raise ValueError(f"chunk_id must be integers {tuple(mask.shape)} as mask is, got {chunk_id.dtype} {tuple(chunk_id.shape)}.")
    row, unit = mask.nonzero(as_tuple=True)
    pairs, inverse = torch.unique(torch.stack([row, chunk_id[row, unit].long()], 1), dim=0, return_inverse=True)
    first = torch.full((len(pairs),), mask.shape[1], device=mask.device).scatter_reduce(0, inverse, unit, "amin")
    # Pairs are sorted by row already; within a row, by first appearance.
    order = (pairs[:, 0] * (mask.shape[1] + 1) + first).argsort()
    num_chunks = torch.bincount(pairs[:, 0], minlength=mask.shape[0])
    before = num_chunks.cumsum(0) - num_chunks
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(pairs), device=mask.device) - before[pairs[order, 0]]
    ranks = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    ranks[row, unit] = rank[inverse]
    return ranks, num_chunks


@torch.no_grad()
def segment_returns(*, reward: Tensor, gamma: float, mask: Tensor, chunk_id: Tensor | None = None) -> Tensor:
    """Discounted returns chunk by chunk, shared by a chunk's units: G_k = r_k + gamma G_(k+1), r_k the sum of the chunk's rewards.

    This is ROLL's agentic REINFORCE (Wang et al. 2025, arXiv:2506.06122): one discount per turn, however many tokens it has. Rewards
    anywhere inside a chunk count there, not only those of its last token.

    `reward`: [B, L] float32 or float64; anything outside the mask. Returns [B, L], 0 outside the mask.
    Raises ValueError: shapes or types do not agree.
    """
    if reward.shape != mask.shape:
        raise ValueError(f"reward and mask must be [B, L], got {tuple(reward.shape)} and {tuple(mask.shape)}.")
    ranks, num_chunks = chunk_ranks(mask=mask, chunk_id=chunk_id)
    most = max(int(num_chunks.max()), 1) if num_chunks.numel() else 1
    counted = torch.where(mask, reward.double(), 0.0)
    sums = torch.zeros((reward.shape[0], most), dtype=torch.float64, device=reward.device).scatter_add(1, ranks, counted)
    returns = token_returns(reward=sums, gamma=gamma).gather(1, ranks)
    return torch.where(mask, returns, 0.0).to(reward.dtype)


@torch.no_grad()
def chunk_returns(*, score: Tensor, gamma: float, mask: Tensor, chunk_id: Tensor | None = None) -> Tensor:
    """IPA's credit of chunks: G_k = gamma^(distance to the last chunk) · R_final (ROME, arXiv:2512.24873).

    The last chunk gets the whole score, the one before it gamma times that, and so on. It is `segment_returns` of a row that is
    rewarded only at its end. Where each chunk is a separate row, `anchors.step_returns` gives the same.

    Args:
        score: [B] the episode's final reward.

    Returns:
        [B, L] of the type of `score`, 0 outside the mask.

    Raises:
        ValueError: shapes or types do not agree.
        NonFiniteError: the score of a row that counts is NaN or infinite.
    """
    if score.shape != mask.shape[:1] or not score.dtype.is_floating_point:
        raise ValueError(f"score must be floating [B] with B = {mask.shape[0]}, got {score.dtype} {tuple(score.shape)}.")
    check_finite(score, counted_rows(mask), "score")
    ranks, num_chunks = chunk_ranks(mask=mask, chunk_id=chunk_id)
    distance = (num_chunks[:, None] - 1 - ranks).clamp(min=0)
    returns = score.double()[:, None] * torch.pow(float(gamma), distance.double())
    return torch.where(mask, returns, 0.0).to(score.dtype)
