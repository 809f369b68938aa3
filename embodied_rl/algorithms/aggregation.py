"""From a loss per entry to one number: aggregation with an explicit, global denominator.

A mean over the entries of one micro-batch is not the mean over the batch: with ragged masks it gives the entries of a short
micro-batch more weight. So each aggregation here is a *sum over rows* divided by a denominator of the whole batch, which the caller
passes: count the units of every micro-batch (`Aggregation.count`) on every rank, then divide each part by that number. Parts then
add up to the whole, values and gradients alike.

Shapes: entries are [B, L] (B rows or sequences, L action units), or [B] with one entry per row. `mask` is bool; masked entries do not
count, even if they are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from embodied_rl.errors import did_you_mean

Mode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

AGGREGATION_MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class Aggregation:
    """Reduces entries [B, L] to one number.

    ======================== ============================================== ======================= ==========================
    mode                     numerator                                      denominator (a count)   known from
    ======================== ============================================== ======================= ==========================
    token-mean               sum of all entries                             entries                 DAPO (arXiv:2503.14476)
    seq-mean-token-sum       sum of all entries                             sequences               REINFORCE
    seq-mean-token-mean      sum over rows of the row's mean                sequences               GRPO (arXiv:2402.03300)
    seq-mean-token-sum-norm  sum of all entries / horizon                   sequences               Dr. GRPO (arXiv:2503.20783)
    ======================== ============================================== ======================= ==========================

    A sequence is a row with at least one entry in the mask. `horizon` is a constant (the limit of generated tokens), never the
    padded width L, which differs from one micro-batch to the next.
    Raises ValueError: unknown mode, or a horizon that is missing, not positive, or given for another mode.
    """

    mode: Mode = "token-mean"
    horizon: int | None = None
    """Most entries of a sequence; only for ``seq-mean-token-sum-norm``."""

    def __post_init__(self) -> None:
        if self.mode not in AGGREGATION_MODES:
            raise ValueError(f"Aggregation mode {self.mode!r} is not known.{did_you_mean(str(self.mode), AGGREGATION_MODES)}")
        if self.mode == "seq-mean-token-sum-norm":
            if self.horizon is None or self.horizon < 1:
                raise ValueError(
                    f"Aggregation '{self.mode}' needs horizon >= 1, the most entries that a sequence may have, got {self.horizon}."
                )
        elif self.horizon is not None:
            raise ValueError(f"horizon={self.horizon} has no effect with aggregation '{self.mode}': leave it out.")

    def count(self, mask: Tensor) -> Tensor:
        """Share of `mask` [B, L] or [B] in the denominator: its entries (token-mean) or its sequences; int64 scalar, may be 0."""
        if self.mode == "token-mean" or mask.dim() == 1:
            return mask.sum()
        return mask.any(-1).sum()

    def reduce(self, x: Tensor, mask: Tensor | None = None, denominator: float | Tensor | None = None) -> Tensor:
        """The aggregate of `x` [B, L] or [B], a scalar; a `denominator` of None is the count of this mask (at least 1)."""
        if self.mode == "token-mean":
            return masked_mean(x, mask, denominator)
        if x.dim() == 1:
            x, mask = x[:, None], None if mask is None else mask[:, None]
        rows = (x if mask is None else torch.where(mask, x, torch.zeros_like(x))).sum(-1)
        if self.mode == "seq-mean-token-mean":
            rows = rows / (x.shape[1] if mask is None else mask.sum(-1).clamp(min=1).to(rows.dtype))
        elif self.horizon is not None:
            rows = rows / self.horizon
        if denominator is None:
            denominator = float(max(x.shape[0], 1)) if mask is None else self.count(mask).clamp(min=1)
        return rows.sum() / denominator

    def mean(self, x: Tensor, mask: Tensor | None = None, denominator: float | Tensor | None = None) -> Tensor:
        """Like `reduce`, but always a mean, for metrics such as a share of clipped entries.

        It is over entries for token-mean, and over the sequences' means for the others. The denominator is that of `reduce`, so these
        metrics add up over micro-batches as the losses do.
        """
        if self.mode in ("token-mean", "seq-mean-token-mean"):
            return self.reduce(x, mask, denominator)
        return Aggregation("seq-mean-token-mean").reduce(x, mask, denominator)


TOKEN_MEAN = Aggregation("token-mean")
SEQUENCE_TOKEN_MEAN = Aggregation("seq-mean-token-mean")


def masked_mean(x: Tensor, mask: Tensor | None = None, denominator: float | Tensor | None = None) -> Tensor:
    """Sum of the entries in `mask` (None: all) over `denominator` (None: their number, at least 1)."""
    if mask is None:
        return x.sum() / (max(x.numel(), 1) if denominator is None else denominator)
    # `where` instead of multiplication, because NaN * 0 is NaN.
    total = torch.where(mask, x, torch.zeros_like(x)).sum()
    return total / (mask.sum().clamp(min=1) if denominator is None else denominator)


def visible_entries(mask: Tensor | None, **tensors: Tensor) -> list[Tensor]:
    """Bring the tensors to the shape of the first, with 0 where `mask` is False, in at least float32.

    Entries are emptied before any arithmetic, not only after it: a NaN behind the mask would return in the gradient, where the
    chain rule multiplies it by a zero. A tensor [B] beside a first one of [B, L] gives its number to the whole row.
    Raises ValueError: shapes that do not agree, or a mask that is not bool; never broadcasts [B] silently against [B, 1].
    """
    shape = next(iter(tensors.values())).shape
    if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool of shape {tuple(shape)}, got {mask.dtype} of shape {tuple(mask.shape)}.")
    result = []
    for name, x in tensors.items():
        if x.shape != shape:
            if len(shape) != 2 or x.shape != shape[:1]:
                raise ValueError(
                    f"{name} must have shape {tuple(shape)}{f' or {tuple(shape[:1])}' * (len(shape) == 2)}, got {tuple(x.shape)}."
                )
            x = x[:, None].expand(shape)
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        result.append(x if mask is None else torch.where(mask, x, torch.zeros_like(x)))
    return result
