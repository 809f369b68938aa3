"""Credit by comparison within a group: episodes from the same initial state, compared only by their scores; no critic.

Rows [B] carry one score each and belong to a group by an integer id [B]; rows of a group need not be adjacent, and ids are arbitrary.
With a mask [B, L] the results are [B, L], the row's number at every action unit that counts and 0 elsewhere; without one, [B].
A row without a counted unit is padding: it enters no statistic, and its score may be NaN.

- Groups are compared as a whole: call these on the whole batch of a step, before it is split over ranks or micro-batches.
- Statistics are float64; results have the type of the score (float32 for integers).
- A group whose scores are all equal gives exactly 0. "Equal" is up to rounding, ``1e-6`` of the largest score in float32: equal scores
  summed in different orders differ by noise, which divided by a standard deviation of the same noise would look like a signal.
- A group of one has no other row to compare with. It keeps its raw score as in the published implementations (a baseline of 0), or
  gets 0 with ``alone="zero"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import token_returns, whiten
from embodied_rl.errors import NonFiniteError, require_known

STD_EPS = 1e-6
"""Added to standard deviations before dividing by them."""

SingleGroup = Literal["raw", "zero"]
"""Advantage of a group of one: its score, or 0."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the rows that count; G groups, ascending by id."""

    index: Tensor
    """[B] int64, 0 to G - 1: the group of each row."""
    rows: Tensor
    """[B] bool: rows that count."""
    count: Tensor
    """[G] float64"""
    mean: Tensor
    """[G] float64; 0 for a group of padding."""
    std: Tensor
    """[G] float64, unbiased; 0 for groups of one and for equal scores."""
    largest: Tensor
    """[G] float64, largest magnitude of a score."""
    equal: Tensor
    """[G] bool: the scores are all the same, up to rounding; True for groups of one."""
    centered: Tensor
    """[B] float64, score - mean; exactly 0 if the group's scores are equal, and for padding."""

    @property
    def single(self) -> Tensor:
        """[B] bool: rows that count and are the only ones of their groups."""
        return self.rows & (self.count[self.index] == 1)


@torch.no_grad()
def group_statistics(*, score: Tensor, group: Tensor, rows: Tensor | None = None) -> GroupStatistics:
    """Mean, spread and differences from the mean within groups.

    Args:
        score: [B]
        group: [B] integer ids.
        rows: [B] bool, rows that count; None: all rows.

    Raises ValueError: shapes or types do not agree; NonFiniteError: the score of a row that counts is NaN or infinite.
    """
    rows = _check_rows(score, group, rows)
    index = torch.unique(group, return_inverse=True)[1]
    num_groups = int(index.max()) + 1 if index.numel() else 0
    exact = torch.where(rows, score.detach().double(), 0.0)
    zeros = exact.new_zeros(num_groups)
    count = zeros.index_add(0, index, rows.double())
    mean = zeros.index_add(0, index, exact) / count.clamp(min=1)
    low = torch.full_like(zeros, torch.inf).scatter_reduce(0, index, torch.where(rows, exact, torch.inf), "amin")
    high = torch.full_like(low, -torch.inf).scatter_reduce(0, index, torch.where(rows, exact, -torch.inf), "amax")
    largest = torch.where(count > 0, torch.maximum(low.abs(), high.abs()), 0.0)
    equal = (high - low <= rounding_of(score) * largest) | (count < 2)
    centered = torch.where(rows & ~equal[index], exact - mean[index], 0.0)
    squares = torch.zeros_like(mean).index_add(0, index, centered**2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return GroupStatistics(index, rows, count, mean, std, largest, equal, centered)


def rounding_of(score: Tensor) -> float:
    """Relative difference below which two scores of this type are one number, summed in another order."""
    if not score.dtype.is_floating_point:
        return 0.0
    return 1e-10 if score.dtype == torch.float64 else max(1e-6, 8 * torch.finfo(score.dtype).eps)


@torch.no_grad()
def outcome_score(*, reward: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B] sum of the rewards [B, L] in the mask, added up in float64: the score of a row that is a whole episode."""
    counted = reward.double() if mask is None else torch.where(mask, reward.double(), 0.0)
    return counted.sum(-1).to(reward.dtype)


@torch.no_grad()
def grpo(*, score: Tensor, group: Tensor, mask: Tensor | None = None, std: bool = True, alone: SingleGroup = "raw") -> Tensor:
    """Group-relative advantages: (s - mean) / (std + 1e-6), with the group's unbiased standard deviation.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2). ``std=False`` leaves the division out: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783), which also needs a loss that is not divided by the length of the row.

    Returns [B, L] if a mask is given, else [B].
    Raises ValueError, NonFiniteError: see `group_statistics`; so do all functions of this module.
    """
    statistics = group_statistics(score=score, group=group, rows=counted_rows(mask))
    scale = statistics.std[statistics.index] + STD_EPS if std else 1.0
    return _result(statistics.centered / scale, statistics, score, mask, alone)


@torch.no_grad()
def rloo(*, score: Tensor, group: Tensor, mask: Tensor | None = None, alone: SingleGroup = "raw") -> Tensor:
    """Leave-one-out: the score minus the mean of the others in the group (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740)."""
    statistics = group_statistics(score=score, group=group, rows=counted_rows(mask))
    # s_i - (S - s_i) / (n - 1) = n / (n - 1) (s_i - S / n), which needs no difference of large sums.
    count = statistics.count[statistics.index]
    return _result(statistics.centered * count / (count - 1).clamp(min=1), statistics, score, mask, alone)


@torch.no_grad()
def opo(*, score: Tensor, group: Tensor, mask: Tensor | None = None, length: Tensor | None = None, alone: SingleGroup = "raw") -> Tensor:
    """Minus the length-weighted mean of the group, sum(l s) / sum(l): OPO (Hao et al. 2025, arXiv:2505.23585).

    This is the baseline of least variance if the squared norm of a row's gradient grows with its length.

    `length`: [B] number of action units; None: counted from the mask.
    """
    if length is None:
        if mask is None:
            raise ValueError("opo weighs rows by their lengths: give mask [B, L] or length [B].")
        length = mask.sum(-1)
    statistics = group_statistics(score=score, group=group, rows=counted_rows(mask))
    if length.shape != score.shape:
        raise ValueError(f"length must be [B] as score is, {tuple(score.shape)}, got {tuple(length.shape)}.")
    weight = torch.where(statistics.rows, length.double(), 0.0)
    if bool((weight < 0).any()):
        raise ValueError("length must not be negative.")
    zeros = torch.zeros_like(statistics.mean)
    total = zeros.index_add(0, statistics.index, weight)
    # Computed from the differences from the plain mean, so that equal groups stay exactly 0.
    offset = zeros.index_add(0, statistics.index, weight * statistics.centered) / torch.where(total > 0, total, 1.0)
    unequal = statistics.rows & ~statistics.equal[statistics.index]
    return _result(torch.where(unequal, statistics.centered - offset[statistics.index], 0.0), statistics, score, mask, alone)


@torch.no_grad()
def gpg(
    *,
    score: Tensor,
    group: Tensor,
    mask: Tensor | None = None,
    nonzero: Literal["advantage", "score"] = "advantage",
    alone: SingleGroup = "raw",
) -> Tensor:
    """(s - mean) · B / #nonzero: GPG (Chu et al. 2025, arXiv:2504.02546), with F_norm = 1.

    The factor compensates for rows without a gradient, such as those of a group that solved everything or nothing. B counts the
    batch's rows without padding.

    Args:
        nonzero: "advantage" counts the rows whose advantage is not 0, which is the paper's B - M; "score" counts the rows whose
            score is not 0, as verl does, so that a group that solved everything still counts.
    """
    statistics = group_statistics(score=score, group=group, rows=counted_rows(mask))
    require_known(nonzero, ("advantage", "score"), f"nonzero={nonzero!r} is not a choice.")
    exact = torch.where(statistics.single if alone == "raw" else torch.zeros_like(statistics.rows), score.double(), statistics.centered)
    if nonzero == "score":
        counted = torch.where(statistics.rows, score.double(), 0.0) != 0
    else:
        # A row at its group's mean differs from it by rounding.
        counted = exact.abs() > rounding_of(score) * statistics.largest[statistics.index]
    factor = statistics.rows.sum().double() / counted.sum().clamp(min=1)
    return spread(exact * factor, like=score, mask=mask)


@torch.no_grad()
def pass_at_k(*, score: Tensor, group: Tensor, mask: Tensor | None = None, std: bool = False) -> Tensor:
    """Only the best row of a group is credited, with best - second best (Tang et al. 2025, arXiv:2503.19595, leave-one-out of the max).

    If two rows are best, no row is credited. ``std=True`` divides by the group's standard deviation + 1e-6.
    Raises ValueError: a group of one, which has no second best.
    """
    statistics = group_statistics(score=score, group=group, rows=counted_rows(mask))
    if bool(statistics.single.any()):
        single = int(group[statistics.single][0])
        raise ValueError(f"pass_at_k compares the best row of a group with the second best, and group {single} has one row.")
    exact = torch.where(statistics.rows, score.detach().double(), -torch.inf)
    # By group, then by score, descending.
    order = exact.argsort(descending=True, stable=True)
    order = order[statistics.index[order].argsort(stable=True)]
    members, sorted_score = statistics.index[order], exact[order]
    first = torch.ones_like(members, dtype=torch.bool)
    first[1:] = members[1:] != members[:-1]
    gap = torch.zeros_like(sorted_score)
    gap[:-1] = sorted_score[:-1] - sorted_score[1:]
    credited = first & ~statistics.equal[members]
    advantage = torch.zeros_like(exact).index_copy(0, order, torch.where(credited, gap, 0.0))
    if std:
        advantage = advantage / (statistics.std[statistics.index] + STD_EPS)
    return spread(advantage, like=score, mask=mask)


@torch.no_grad()
def remax(*, score: Tensor, greedy_score: Tensor, mask: Tensor | None = None) -> Tensor:
    """Minus the score of the greedy rollout from the same initial state: ReMax (Li et al. 2023, arXiv:2310.10505).

    Args:
        score: [B], or [B, L] returns-to-go of tokens (`token_returns`).
        greedy_score: [B] score of the greedy rollout from each row's prompt or initial state.

    Returns [B, L] if a mask or returns of tokens are given, else [B].
    """
    if greedy_score.shape != score.shape[:1] or score.ndim not in (1, 2):
        raise ValueError(f"score must be [B] or [B, L] and greedy_score [B], got {tuple(score.shape)} and {tuple(greedy_score.shape)}.")
    check_finite(greedy_score, counted_rows(mask), "greedy_score")
    if score.ndim == 1:
        check_finite(score, counted_rows(mask), "score")
        return spread(score.double() - greedy_score.double(), like=score, mask=mask)
    if mask is not None and mask.shape != score.shape:
        raise ValueError(f"mask must be {tuple(score.shape)} as score is, got {tuple(mask.shape)}.")
    advantage = (score.double() - greedy_score.double()[:, None]).to(score.dtype)
    return advantage if mask is None else torch.where(mask, advantage, torch.zeros_like(advantage))


@torch.no_grad()
def reinforce_plus_plus(*, reward: Tensor, gamma: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Discounted returns of tokens, whitened over the batch: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), without its KL penalty.

    Subtract the penalty from `reward` [B, L] beforehand.
    """
    return whiten(token_returns(reward=reward, gamma=gamma, mask=mask), mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(*, score: Tensor, group: Tensor, mask: Tensor, alone: SingleGroup = "raw") -> Tensor:
    """Minus the group's mean, then whitened over all action units of the batch: REINFORCE++-baseline (Hu et al. 2025, arXiv:2501.03262).

    The whitening moves the zero: a group of equal scores gets one number everywhere, which is 0 only if the batch's mean is.
    """
    return whiten(grpo(score=score, group=group, mask=mask, std=False, alone=alone), mask)


# ---- rows and action units ------------------------------------------------------------------------------------------


def counted_rows(mask: Tensor | None) -> Tensor | None:
    """[B] bool: rows with at least one action unit that counts."""
    return None if mask is None else mask.any(-1)


def spread(advantage: Tensor, *, like: Tensor, mask: Tensor | None) -> Tensor:
    """[B] → [B, L], 0 outside the mask, of the type of `like` (float32 for integers); [B] without a mask."""
    typed = advantage.to(like.dtype if like.dtype.is_floating_point else torch.float32)
    if mask is None:
        return typed
    if mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[:1] != typed.shape:
        raise ValueError(f"mask must be bool [B, L] with B = {typed.shape[0]}, got {mask.dtype} {tuple(mask.shape)}.")
    return torch.where(mask, typed[:, None], typed.new_zeros(()))


def of_single(value: Tensor, choice: SingleGroup) -> Tensor:
    """Advantage of a group's only member: `value`, or 0. Raises ValueError for another choice."""
    require_known(choice, ("raw", "zero"), f"alone={choice!r} is not a choice.")
    return value if choice == "raw" else torch.zeros_like(value)


def _result(advantage: Tensor, statistics: GroupStatistics, score: Tensor, mask: Tensor | None, choice: SingleGroup) -> Tensor:
    single = of_single(score.detach().double(), choice)
    return spread(torch.where(statistics.single, single, advantage), like=score, mask=mask)


def _check_rows(score: Tensor, group: Tensor, rows: Tensor | None) -> Tensor:
    if score.ndim != 1 or group.shape != score.shape or (rows is not None and rows.shape != score.shape):
        shapes = [tuple(score.shape), tuple(group.shape), None if rows is None else tuple(rows.shape)]
        raise ValueError(f"score, group and rows must be [B], got {shapes}. The score of tokens' rewards is outcome_score(...).")
    if group.dtype.is_floating_point or group.dtype == torch.bool or group.dtype.is_complex:
        raise ValueError(f"group must hold integer ids, got {group.dtype}.")
    rows = torch.ones_like(group, dtype=torch.bool) if rows is None else rows
    check_finite(score, rows, "score")
    return rows


def check_finite(score: Tensor, rows: Tensor | None, name: str) -> None:
    """Raise NonFiniteError if `score` [B] is NaN or infinite in one of the `rows` (None: all rows)."""
    wrong = ~score.detach().double().isfinite()
    wrong = wrong if rows is None else wrong & rows
    if bool(wrong.any()):
        places = wrong.nonzero().flatten().tolist()
        raise NonFiniteError(
            f"{name} is NaN or infinite in {len(places)} rows (row {', '.join(map(str, places[:5]))}). Mask these rows, or check the "
            "source of their rewards."
        )


# ---- Credit by chunks of a row's action units: the tokens between two interactions with the environment, one turn of an agent ----

# Here a row [L] is a whole episode. `chunk_id` [B, L] integers give the chunk of each unit: units of a row with the same number, adjacent
# or not, in the order in which they first appear. Without it, the chunks are the runs of the mask, because tokens that an agent did not
# write separate its turns. Units outside the mask may hold any number, and chunks without a unit in the mask are not counted.


@torch.no_grad()
def chunk_ranks(*, mask: Tensor, chunk_id: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Number the chunks of each row from 0.

    Args:
        mask: [B, L] bool.
        chunk_id: [B, L] integers; None: each run of the mask is a chunk.

    Returns [B, L] int64 number of each unit's chunk, 0 outside the mask; and [B] int64 number of chunks of each row.

    Raises ValueError: shapes or types do not agree.
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
    # Pairs are already sorted by row; within a row, sort by first appearance.
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
    anywhere inside a chunk count, not only those of its last token.

    `reward`: [B, L] float32 or float64; any value outside the mask. Returns [B, L], 0 outside the mask.
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
    rewarded only at its end. If each chunk is a separate row, `anchors.step_returns` gives the same.

    `score`: [B] the episode's final reward.

    Returns [B, L] of the type of `score`, 0 outside the mask.

    Raises ValueError: shapes or types do not agree; NonFiniteError: the score of a row that counts is NaN or infinite.
    """
    if score.shape != mask.shape[:1] or not score.dtype.is_floating_point:
        raise ValueError(f"score must be floating [B] with B = {mask.shape[0]}, got {score.dtype} {tuple(score.shape)}.")
    check_finite(score, counted_rows(mask), "score")
    ranks, num_chunks = chunk_ranks(mask=mask, chunk_id=chunk_id)
    distance = (num_chunks[:, None] - 1 - ranks).clamp(min=0)
    returns = score.double()[:, None] * torch.pow(float(gamma), distance.double())
    return torch.where(mask, returns, 0.0).to(score.dtype)
