"""Action distributions: the interpretation of a policy network's outputs.

A head turns network outputs [B, K] into actions, log-probabilities [B, L] and entropies [B, L], one per action dimension (L = A; 1 for
discrete actions). It draws no random numbers: the caller passes the noise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError

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


# ---- actions as tokens ------------------------------------------------------------------------------------------------

# Shape legend: B rows, L action tokens of one decision (action dimensions × steps of the chunk), V choices of one token.


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
