"""Drawing tokens from logits: a pure function of the logits, each row's settings and one uniform number a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.generation.tokens import GenerationRequest


@dataclass(frozen=True)
class SamplingSettings:
    """Of n rows."""

    temperature: Tensor
    """[n] float64; 0 takes the likeliest token."""
    top_p: Tensor
    """[n] float64"""
    top_k: Tensor
    """[n] int64; 0 keeps all."""

    @staticmethod
    def of(requests: list[GenerationRequest], device: torch.device) -> SamplingSettings:
        return SamplingSettings(
            torch.tensor([request.temperature for request in requests], dtype=torch.float64, device=device),
            torch.tensor([request.top_p for request in requests], dtype=torch.float64, device=device),
            torch.tensor([request.top_k for request in requests], dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class SampledTokens:
    """One token for each of n rows."""

    token: Tensor
    """[n] int64"""
    log_prob: Tensor
    """[n] float32 under the model's own distribution."""
    sampling_log_prob: Tensor
    """[n] float32 under the distribution that it was drawn from; 0 at temperature 0."""


def sample_tokens(logits: Tensor, settings: SamplingSettings, uniform: Tensor, allowed: Tensor | None = None) -> SampledTokens:
    """Temperature, then what is allowed, top-k, top-p, and the inverse of the cumulative distribution in the order of the vocabulary.

    Args:
        logits: [n, V]
        uniform: [n] float64 in [0, 1).
        allowed: [n, V] bool, at least one a row; None: all tokens. The model's own distribution is that over the allowed ones.

    A token at the border of top-k that is as likely as the k-th is kept or not by the order of the vocabulary; at least one is kept.
    """
    possible = logits.float() if allowed is None else logits.float().masked_fill(~allowed, float("-inf"))
    own = torch.log_softmax(possible, dim=-1)
    greedy = settings.temperature == 0
    scaled = own / torch.where(greedy, 1.0, settings.temperature)[:, None].to(own.dtype)
    used = torch.log_softmax(_cut(scaled, settings), dim=-1)
    cumulative = used.double().exp().cumsum(-1)
    # Scaled by what rounding made of the sum, so that a uniform number near 1 cannot fall behind the last token.
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    token = torch.where(greedy, own.argmax(-1), drawn)
    sampling = torch.where(greedy, torch.zeros_like(own[:, 0]), used.gather(-1, token[:, None]).squeeze(-1))
    return SampledTokens(token, own.gather(-1, token[:, None]).squeeze(-1), sampling)


def _cut(scaled: Tensor, settings: SamplingSettings) -> Tensor:
    """-inf for tokens outside of top-k and top-p; the vocabulary is sorted only when a row asks for either."""
    if not bool((settings.top_k > 0).any() or (settings.top_p < 1.0).any()):
        return scaled
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    size = scaled.shape[-1]
    rank = torch.arange(size, device=scaled.device)
    kept = rank < torch.where(settings.top_k > 0, settings.top_k, size)[:, None]
    probability = torch.softmax(torch.where(kept, ordered, float("-inf")).double(), dim=-1)
    before = probability.cumsum(-1) - probability
    # The smallest set that reaches top_p: a token is in it when those before it do not reach it yet.
    kept &= (before < settings.top_p[:, None]) | (settings.top_p[:, None] >= 1.0) | (rank == 0)
    return torch.empty_like(scaled).scatter_(-1, order, torch.where(kept, ordered, float("-inf")))
