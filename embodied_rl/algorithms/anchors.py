"""Credit by comparing steps taken from the same state: GiGPO (Feng et al. 2025, arXiv:2505.10978).

Rows [B] are steps (turns) of episodes, in any order. Each has an episode group [B] (same initial state), a trajectory [B] (the
episode in the group), and an anchor, the observation before the step. Steps of one group with the same anchor serve as rollouts
from that state, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms import grouped
from embodied_rl.algorithms.advantages import returns_to_go
from embodied_rl.bounds import Coefficient
from embodied_rl.errors import require_known

Statistics = Literal["trajectory", "row"]
Normalize = Literal["mean_std", "mean"]

SAME_RETURN = 1e-5
"""Relative difference up to which episode returns in the rows of one trajectory count as equal."""


@torch.no_grad()
def step_returns(*, reward: Tensor, trajectory: Tensor, step: Tensor, gamma: float = 0.95, rows: Tensor | None = None) -> Tensor:
    """Discounted returns of steps that are rows: R_t = r_t + gamma R_(t+1) within a trajectory (GiGPO: gamma 0.95).

    A row that does not count is skipped, as masked steps are in `gae`: it neither adds to the return nor discounts it.

    Args:
        reward: [B] float32 or float64.
        trajectory: [B] integer ids, unique over the batch.
        step: [B] integers, ascending with time within a trajectory.
        rows: [B] bool, rows that count; None: all rows. Other rows get 0.

    Returns [B] of the type of `reward`.

    Raises ValueError: shapes do not agree, or two rows are the same step of the same trajectory.
    """
    if any(given is not None and given.shape != reward.shape for given in (trajectory, step, rows)) or reward.ndim != 1:
        raise ValueError(f"reward, trajectory, step and rows must be [B], got a reward of {tuple(reward.shape)} and others.")
    kept = torch.arange(len(reward), device=reward.device) if rows is None else rows.nonzero().flatten()
    member = trajectory[kept]
    order = step[kept].argsort(stable=True)
    order = order[member[order].argsort(stable=True)]
    members, steps = member[order], step[kept][order]
    last = torch.ones_like(members, dtype=torch.bool)
    last[:-1] = members[1:] != members[:-1]
    twice = ~last[:-1] & (steps[1:] == steps[:-1])
    if bool(twice.any()):
        place = kept[order[int(twice.nonzero()[0])]]
        raise ValueError(
            f"Two rows are step {int(step[place])} of trajectory {int(trajectory[place])}; give each step of a trajectory its own number."
        )
    # All trajectories one after another in a single column, each ended by its last step.
    column = reward.detach()[kept[order]][:, None].contiguous()
    gained = returns_to_go(reward=column, terminated=last[:, None], truncated=torch.zeros_like(last)[:, None], gamma=gamma)
    returns = torch.zeros_like(reward)
    returns[kept[order]] = gained[:, 0]
    return returns


def anchor_groups(*, anchor: Sequence[Any], group: Tensor, similarity: float | None = None, rows: Tensor | None = None) -> Tensor:
    """Number the clusters of equal (or similar) anchors inside each episode group; equal states of two groups are never merged.

    Args:
        anchor: B observations: strings, numbers, arrays, tensors, or dictionaries and sequences of these.
        group: [B] integer ids of episode groups.
        similarity: None: anchors must be equal. Otherwise strings are clustered: in the order of rows, each row joins the first
            cluster of its group whose *first member* has a ``difflib.SequenceMatcher`` ratio of at least this, in (0, 1], to it,
            or opens a new cluster. The clusters then depend on the order of rows.
        rows: [B] bool, rows that count; None: all rows. Each other row gets its own cluster.

    Returns [B] int64 cluster numbers, unique over the batch, on the device of `group`.

    Raises ValueError: lengths do not agree, or similarity is out of range.
    """
    if len(anchor) != len(group) or group.ndim != 1:
        raise ValueError(f"There must be one anchor for each row of group [B], got {len(anchor)} for shape {tuple(group.shape)}.")
    if similarity is not None and not 0.0 < similarity <= 1.0:
        raise ValueError(f"similarity must be in (0, 1] or None, got {similarity}.")
    counted = [True] * len(anchor) if rows is None else rows.tolist()
    place = (lambda owner, observation: anchor_key(observation)) if similarity is None else _similar_places(similarity)
    clusters: dict[Hashable, int] = {}
    numbers = []
    for row, (observation, owner) in enumerate(zip(anchor, group.tolist(), strict=True)):
        key: Hashable = ("padding", row) if not counted[row] else (owner, place(owner, observation))
        numbers.append(clusters.setdefault(key, len(clusters)))
    return torch.tensor(numbers, dtype=torch.int64, device=group.device)


@torch.no_grad()
def gigpo(
    *,
    episode_return: Tensor,
    step_return: Tensor,
    group: Tensor,
    trajectory: Tensor,
    anchor_group: Tensor,
    step_weight: Coefficient = 1.0,
    statistics: Statistics = "trajectory",
    normalize: Normalize = "mean_std",
    mask: Tensor | None = None,
    alone: grouped.SingleGroup = "raw",
) -> Tensor:
    """GiGPO: A = A_E + step_weight · A_S (arXiv:2505.10978).

    A_E compares the episode's return with those of its group, as `grouped.grpo` does. A_S compares the step's discounted return
    with those of the steps taken from the same anchor in the same group. A step that shares its anchor with no other step, and steps of
    equal returns, get exactly 0.

    Args:
        episode_return: [B] return of the row's episode: the same in all rows of a trajectory.
        step_return: [B] see `step_returns`.
        group: [B] integer ids of episode groups.
        trajectory: [B] integer ids, unique within a group.
        anchor_group: [B] integer ids, see `anchor_groups`. An id that appears in two groups means two clusters.
        step_weight: omega.
        statistics: "trajectory": each episode enters the mean and deviation of A_E once, as in the paper; "row": once for each of
            its steps, the default of the published code, so that long episodes weigh more.
        normalize: "mean_std", or only "mean" (the paper's F_norm = 1); for both parts.
        mask: [B, L] bool.
        alone: A_E in a group with one trajectory (one row, with ``statistics="row"``): its return, or 0.

    Returns [B, L] if a mask is given, else [B].

    Raises:
        ValueError: shapes, types or choices are wrong, or rows of one trajectory differ in their episode return.
        NonFiniteError: the return of a row that counts is NaN or infinite.
    """
    require_known(statistics, ("trajectory", "row"), f"statistics={statistics!r} is not a choice.")
    require_known(normalize, ("mean_std", "mean"), f"normalize={normalize!r} is not a choice.")
    counted = grouped.counted_rows(mask)
    rows = torch.ones_like(group, dtype=torch.bool) if counted is None else counted
    grouped.check_finite(episode_return, rows, "episode_return")
    episode = _episode_part(episode_return, group, trajectory, rows, statistics, normalize, alone)
    of_step = grouped.group_statistics(score=step_return, group=_pair(group, anchor_group), rows=rows)
    step = of_step.centered
    if normalize == "mean_std":
        step = step / (of_step.std[of_step.index] + grouped.STD_EPS)
    return grouped.spread(episode + step_weight * step, like=episode_return, mask=mask)


def _episode_part(
    episode_return: Tensor,
    group: Tensor,
    trajectory: Tensor,
    rows: Tensor,
    statistics: Statistics,
    normalize: Normalize,
    choice: grouped.SingleGroup,
) -> Tensor:
    """[B] float64: A_E of each row, 0 for rows that do not count."""
    member = _pair(group, trajectory)
    representative = _first_rows(member, rows)
    stated = torch.where(rows, episode_return.double(), 0.0)
    of_trajectory = stated[representative]
    differing = rows & ((stated - of_trajectory).abs() > max(SAME_RETURN, grouped.rounding_of(episode_return)) * of_trajectory.abs())
    if bool(differing.any()):
        row = int(differing.nonzero()[0])
        raise ValueError(
            f"Row {row} has episode_return {float(stated[row])}, and another row of the same trajectory {float(of_trajectory[row])}. All "
            "rows of an episode must have the return of the whole episode."
        )
    entering = rows
    if statistics == "trajectory":
        entering = rows & (representative == torch.arange(len(rows), device=rows.device))
    found = grouped.group_statistics(score=episode_return, group=group, rows=entering)
    # Looked up by the representative row, so that rows of one trajectory get the same advantage bit by bit.
    advantage = found.centered[representative]
    if normalize == "mean_std":
        advantage = advantage / (found.std[found.index] + grouped.STD_EPS)
    single = (found.count == 1)[found.index]
    advantage = torch.where(single, grouped.of_single(of_trajectory, choice), advantage)
    return torch.where(rows, advantage, 0.0)


def _first_rows(member: Tensor, rows: Tensor) -> Tensor:
    """[B] int64: first row that counts of each row's trajectory; any row for trajectories without one."""
    index = torch.unique(member, return_inverse=True)[1]
    place = torch.arange(len(member), device=member.device)
    none = len(member)
    first = torch.full((none,), none, device=member.device).scatter_reduce(0, index, torch.where(rows, place, none), "amin")[index]
    return torch.where(first == none, place, first)


def _pair(group: Tensor, other: Tensor) -> Tensor:
    """[B] int64 ids, one for each pair of ids."""
    if group.ndim != 1 or other.shape != group.shape or group.dtype.is_floating_point or other.dtype.is_floating_point:
        shapes = [(str(ids.dtype), tuple(ids.shape)) for ids in (group, other)]
        raise ValueError(f"group, trajectory and anchor_group must be integer ids [B], got {shapes}.")
    return torch.unique(torch.stack([group.long(), other.long()], 1), dim=0, return_inverse=True)[1]


# ---- equal and similar observations ---------------------------------------------------------------------------------


def anchor_key(observation: object) -> Hashable:
    """A hashable key that is equal for equal observations: arrays by type, shape and bytes, containers part by part."""
    if isinstance(observation, Tensor):
        observation = observation.detach().cpu().numpy()
    if isinstance(observation, np.ndarray):
        if observation.dtype.kind == "O":
            return ("array", observation.shape, tuple(anchor_key(part) for part in observation.ravel()))
        # + 0 turns -0.0 into 0.0, which equals it.
        array = observation + 0 if observation.dtype.kind in "fc" else observation
        return ("array", str(array.dtype), array.shape, array.tobytes())
    if isinstance(observation, Mapping):
        return ("mapping", frozenset((key, anchor_key(part)) for key, part in observation.items()))
    if isinstance(observation, list | tuple):
        return ("sequence", tuple(anchor_key(part) for part in observation))
    if isinstance(observation, Hashable):
        return observation
    raise ValueError(f"An anchor must be a string, number, array, tensor, or a container of these, got {type(observation).__name__}.")


def _similar_places(similarity: float) -> Callable[[int, Any], Hashable]:
    matchers: dict[int, list[SequenceMatcher[str]]] = {}
    known: dict[tuple[int, str], int] = {}

    def is_similar(matcher: SequenceMatcher[str], text: str) -> bool:
        matcher.set_seq1(text)
        bounds = matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio  # the first two are cheap upper bounds
        return all(ratio() >= similarity for ratio in bounds)

    def place(owner: int, observation: str) -> Hashable:
        # The same text finds the same cluster again: earlier clusters have not changed, and newer ones come later.
        if (owner, observation) in known:
            return known[owner, observation]
        clusters = matchers.setdefault(owner, [])
        number = next((index for index, matcher in enumerate(clusters) if is_similar(matcher, observation)), len(clusters))
        if number == len(clusters):
            # difflib prepares its second text, which stays, and scans the first. Its heuristic, which published code keeps, is off:
            # it ignores frequent characters of strings over 200, so that nearly equal texts can get a ratio near 0.
            clusters.append(SequenceMatcher(None, "", observation, autojunk=False))
        known[owner, observation] = number
        return number

    return place
