"""Actions as tokens: the binning of RT-2 and OpenVLA, and the categorical distribution of an action's tokens.

Shape legend: B rows, L action tokens of one decision (action dimensions × steps of the chunk), V choices of one token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError


@dataclass(frozen=True)
class ActionTokenizer:
    """Maps normalised actions in [-1, 1] to the last `num_bins` tokens of a vocabulary and back (OpenVLA, section 3.3).

    The edges are ``linspace(-1, 1, num_bins)``, so there are ``num_bins - 1`` intervals and as many centers. A value's token is
    ``vocab_size - k``, where k in 1..num_bins counts the edges that are not above it. Only the topmost edge has k = num_bins; its token
    decodes to the last center, as its neighbour's does. Decoding loses this difference, so keep tokens, not actions.
    """

    vocab_size: int = 32000
    """Number of tokens of the text tokenizer, without the embedding's padding rows."""
    num_bins: int = 256

    @property
    def first_token(self) -> int:
        """Smallest action token; the largest is ``vocab_size - 1``."""
        return self.vocab_size - self.num_bins

    @functools.cached_property
    def centers(self) -> np.ndarray:
        """Centers [num_bins - 1] float64, ascending; read-only."""
        edges = np.linspace(-1.0, 1.0, self.num_bins)
        return (edges[:-1] + edges[1:]) / 2.0

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Convert normalised actions [...] to tokens [...] int64; values outside [-1, 1] are clipped."""
        clipped = np.clip(action, -1.0, 1.0)
        return (self.vocab_size - np.digitize(clipped, np.linspace(-1.0, 1.0, self.num_bins))).astype(np.int64)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens [...] to normalised actions [...] float64.

        Tokens outside the action range decode to the nearest center, as in the original, where a greedy search over the whole vocabulary
        may produce them.
        """
        index = np.clip(self.vocab_size - np.asarray(tokens, np.int64) - 1, 0, self.num_bins - 2)
        return self.centers[index]

    def choices(self, tokens: Tensor) -> Tensor:
        """Convert tokens [...] to their index [...] among the action tokens.
        Raises UserError: a token is not an action's; on a GPU, RuntimeError at the next synchronisation."""
        choice = tokens - self.first_token
        inside = ((choice >= 0) & (choice < self.num_bins)).all()
        if tokens.device.type != "cpu":
            torch._assert_async(inside, "action tokens of another policy")  # reading the result would wait for the device
        elif not bool(inside):
            raise UserError(
                f"Action tokens must lie in [{self.first_token}, {self.vocab_size - 1}], got "
                f"{int(tokens.min())} to {int(tokens.max())}. Was the action recorded with another policy?"
            )
        return choice


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Choices [...] int64 from their probabilities [..., V] by the inverse cumulative distribution at `noise` [...], uniform in [0, 1)."""
    cumulative = probabilities.cumsum(dim=-1)
    # Rounding may leave the last sum below the noise: the draw then ends at the last choice that the sum feels, however many follow.
    return ((cumulative <= noise.unsqueeze(-1)) & (cumulative < cumulative[..., -1:])).sum(dim=-1)


@dataclass(frozen=True)
class TokenDistribution:
    """Categorical distribution over V choices for each of L tokens, at a temperature, in float32."""

    log_probs: Tensor
    """[B, L, V] log-probabilities of all choices."""

    @staticmethod
    def from_logits(logits: Tensor, temperature: float = 1.0) -> TokenDistribution:
        """Distribution of logits [B, L, V] of any floating dtype, divided by `temperature` > 0.

        The log-probabilities are those of the sampling policy, which uses the same temperature.
        """
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        return TokenDistribution(torch.log_softmax(scaled, dim=-1))

    def sample(self, noise: Tensor | None) -> Tensor:
        """Sample choices [B, L] int64 by the inverse cumulative distribution at `noise` (uniform in [0, 1), [B, L]); None: the mode."""
        if noise is None:
            return self.log_probs.argmax(dim=-1)
        return draw(self.log_probs.exp(), noise)

    def log_prob(self, choice: Tensor) -> Tensor:
        """Log-probabilities [B, L] of the choices [B, L]."""
        return self.log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropies [B, L] in nats."""
        return -(self.log_probs.exp() * self.log_probs).sum(dim=-1)


def mean_of_steps(loss: Tensor, mask: Tensor | None) -> Tensor:
    """[B] mean of a chunk's losses [B, L] over the steps that exist, [B, K] bool (None: all); masked losses may be NaN. A row without any
    has 0."""
    if mask is None:
        return loss.mean(-1)
    counted = mask.to(loss.device).repeat_interleave(loss.shape[1] // mask.shape[1], dim=1)
    return torch.where(counted, loss, torch.zeros_like(loss)).sum(-1) / counted.sum(-1).clamp_min(1)
