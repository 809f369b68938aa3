"""Scales rewards by the running return or by statistics of a batch or of groups of rows, and changes what is rewarded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import masked_mean, visible_entries
from embodied_rl.algorithms.filters import follow
from embodied_rl.algorithms.grouped import group_statistics
from embodied_rl.errors import NonFiniteError, UserError, require_known

Statistic = Literal["none", "batch", "group", "running"]

MIN_STD = 1e-6
"""Largest standard deviation that counts as none: equal rewards differ by rounding, and dividing by it would turn that into a signal."""


@dataclass(frozen=True)
class Moments:
    """Mean and variance of numbers; parts merge exactly, in any order up to rounding (Chan, Golub and LeVeque 1979)."""

    mean: float = 0.0
    var: float = 0.0
    """Biased variance (divided by the count)."""
    count: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation (divided by the count minus 1); 0 for fewer than two numbers."""
        return float(np.sqrt(self.var * self.count / (self.count - 1))) if self.count > 1 else 0.0

    @staticmethod
    def of(x: Tensor | np.ndarray, mask: Tensor | np.ndarray | None = None) -> Moments:
        """Moments of all entries of `x`, or of those in `mask`, in float64. Equal entries have exactly no variance."""
        if isinstance(x, Tensor):
            x = x.detach().double().cpu().numpy()
        if isinstance(mask, Tensor):
            mask = mask.cpu().numpy()
        values = (x if mask is None else x[mask]).astype(np.float64, copy=False).ravel()
        if values.size == 0:
            return Moments()
        if values.min() == values.max():
            return Moments(float(values[0]), 0.0, float(values.size))
        return Moments(float(values.mean()), float(values.var()), float(values.size))

    def merge(self, other: Moments) -> Moments:
        """Moments of both parts together."""
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        total = self.count + other.count
        delta = other.mean - self.mean
        squares = self.var * self.count + other.var * other.count + delta**2 * self.count * other.count / total
        return Moments(self.mean + delta * other.count / total, squares / total, total)

    def to_dict(self) -> dict[str, float]:
        """JSON-able; floats survive JSON bit for bit."""
        return {"mean": self.mean, "var": self.var, "count": self.count}

    @staticmethod
    def from_dict(data: Mapping[str, float]) -> Moments:
        return Moments(float(data["mean"]), float(data["var"]), float(data["count"]))


class ReturnNormalizer:
    """Divide rewards by the running standard deviation of the discounted return, then clip (Engstrom et al. 2020, "code-level" PPO).

    The return of a slot is summed forward, R_t = r_t + gamma R_(t-1), across rollouts, and restarts after an episode's end, by
    termination or truncation. A whole rollout is counted before its rewards are divided, so that one number divides all of them.
    The mean is not subtracted: that would change which policy is best.
    """

    def __init__(self, gamma: float, clip: float = 10.0, eps: float = 1e-8) -> None:
        self.gamma = gamma
        self.clip = clip
        self.eps = eps
        self.moments = Moments()
        """Moments of the discounted returns."""
        self.carried: np.ndarray | None = None
        """[N] float64 discounted return of each slot's running episode."""

    def __call__(
        self, reward: np.ndarray, done: np.ndarray, mask: np.ndarray | None = None, *, steps: np.ndarray | None = None
    ) -> np.ndarray:
        """Count rewards [T, N] with dones [T, N]; return them normalised, in the same type. `mask`: [T, N] that count; None: all.
        `steps`: [T, N, K] rewards that these are the sums of; they are divided and returned instead."""
        self.fold(reward, done, mask)
        return self.divided(reward if steps is None else steps)

    def fold(self, reward: np.ndarray, done: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Count rewards [T, N] with dones [T, N] in the statistics."""
        from embodied_rl.algorithms.kernels import discounted_returns_kernel

        if self.carried is None or self.carried.shape != reward.shape[1:]:
            self.carried = np.zeros(reward.shape[1], np.float64)
        returns = np.empty(reward.shape, np.float64)
        discounted_returns_kernel(reward, done, self.gamma, self.carried, returns)
        self.moments = self.moments.merge(Moments.of(returns, mask))

    def divided(self, reward: np.ndarray) -> np.ndarray:
        """Divide rewards by the statistics so far and clip them, in the same type."""
        return np.clip(reward / np.sqrt(self.moments.var + self.eps), -self.clip, self.clip).astype(reward.dtype)

    def restart_episodes(self) -> None:
        """Clear the returns of running episodes; keep the statistics."""
        self.carried = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able numbers and lists; floats survive JSON bit for bit."""
        carried = None if self.carried is None else self.carried.tolist()
        return {**self.moments.to_dict(), "carried": carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = Moments.from_dict(state)
        self.carried = None if state["carried"] is None else np.asarray(state["carried"], np.float64)


def normalize_reward(
    *,
    reward: Tensor,
    mean: Statistic = "none",
    std: Statistic = "none",
    group: Tensor | None = None,
    mask: Tensor | None = None,
    others: Tensor | None = None,
    running: Moments | None = None,
) -> Tensor:
    """r' = (r - mu) / (sigma + 1e-6), with mu and sigma each from nothing, the batch, the row's group or a running record.

    As in ROLL (Wang et al. 2025, arXiv:2506.06122). sigma is unbiased. If a sigma is required and there is none (fewer than two
    rows, or sigma <= 1e-6), the result is exactly 0. Statistics are float64.

    Args:
        reward: [B], one number per row (an episode's or a turn's).
        group: [B] integers, any values, in any order; see `group_ids`. Only for ``group``.
        mask: [B] bool; rows that count. Other rows get 0 and may be NaN.
        others: [B] bool; rows that enter no statistic and are normalised by those of the rows that count (a greedy baseline).
        running: the record for ``running``; merge this batch into it first, so that one number divides the whole batch.

    Returns [B] of the type of `reward`.

    Raises:
        ValueError: an unknown statistic, shapes that do not agree, or a statistic whose source is missing.
        NonFiniteError: a reward in the mask is NaN or infinite.
    """
    _check_normalize(reward, mean, std, group, mask, running)
    shown = torch.ones_like(reward, dtype=torch.bool) if mask is None else mask
    given = shown if others is None else shown | others
    values = torch.where(given, reward, torch.zeros_like(reward)).double()
    if not bool(torch.isfinite(values).all()):
        row = int(torch.argmin(torch.isfinite(values).int()))
        raise NonFiniteError(f"The reward of row {row} is {float(values[row])}; it would make other rows' rewards NaN.")
    sources: dict[str, tuple[Tensor | float, Tensor | float]] = {"none": (0.0, 0.0)}
    for name in {mean, std} - {"none"}:
        if name == "running":
            assert running is not None, "checked above"
            sources[name] = (running.mean, running.std)
        else:
            ids = torch.zeros_like(values, dtype=torch.int64) if name == "batch" or group is None else group
            # In the type that they came in, which says how far equal values may differ.
            found = group_statistics(score=values.to(reward.dtype), group=ids, rows=shown)
            # The mean of equal values is rounded and would leave a difference in their last bit.
            sources[name] = (torch.where(found.equal[found.index] & shown, values, found.mean[found.index]), found.std[found.index])
    centred = values - sources[mean][0]
    if std != "none":
        spread = torch.as_tensor(sources[std][1], dtype=torch.float64, device=values.device)
        centred = torch.where(spread > MIN_STD, centred / (spread + MIN_STD), torch.zeros_like(centred))
    return torch.where(given, centred, torch.zeros_like(centred)).to(reward.dtype)


def _check_normalize(reward: Tensor, mean: str, std: str, group: Tensor | None, mask: Tensor | None, running: Moments | None) -> None:
    for what, name in (("mean", mean), ("std", std)):
        require_known(name, get_args(Statistic), f"{what}={name!r} of the reward normalisation is not known.")
    if reward.dim() != 1 or not reward.is_floating_point():
        raise ValueError(f"reward must be floating point of shape [B], got {reward.dtype} of shape {tuple(reward.shape)}.")
    if mask is not None and (mask.shape != reward.shape or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool of shape {tuple(reward.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}.")
    if "group" in (mean, std):
        if group is None:
            raise ValueError(f"mean={mean}, std={std} needs group, an integer per row; `group_ids` makes them from metadata.")
        if group.shape != reward.shape or group.is_floating_point():
            raise ValueError(f"group must be integers of shape {tuple(reward.shape)}, got {group.dtype} of shape {tuple(group.shape)}.")
    if "running" in (mean, std) and running is None:
        raise ValueError(f"mean={mean}, std={std} needs running, the Moments of the rewards seen so far.")


def group_ids(rows: Sequence[Any], keys: str | Sequence[str]) -> Tensor:
    """Number the groups of rows that agree in a dotted key of their metadata, such as ``task``, ``env.seed`` or ``group.number``.

    Args:
        rows: [B] mappings, nested or with dots in their keys, or objects with attributes.
        keys: one path, or several, all of which must agree.

    Returns:
        [B] int64, from 0 in order of first appearance. Values are compared as JSON: lists and mappings by content, 1 is not "1" nor True.

    Raises UserError: a row lacks the key; the message has its keys.
    """
    paths = (keys,) if isinstance(keys, str) else tuple(keys)
    if not paths:
        raise UserError("group_ids needs at least one key.")
    numbers: dict[tuple[str, ...], int] = {}
    ids = [numbers.setdefault(tuple(_canonical(follow(row, path)) for path in paths), len(numbers)) for row in rows]
    return torch.tensor(ids, dtype=torch.int64)


def _canonical(value: object) -> str:
    def plain(x: object) -> object:
        if isinstance(x, np.ndarray | np.generic | Tensor):
            return x.tolist()
        return str(x)

    return json.dumps(value, sort_keys=True, default=plain)


# ---- What is rewarded: clipping, penalties, divergence from a reference policy ----------------------------------------

# Pure functions; each returns the new reward in the type of the old one. `mask` is bool: masked entries do not count, even if they are NaN,
# and get 0. Shapes are [B] (one number per row), [B, L] (per action unit) or [T, N] (time-major: T steps of N slots), as stated.


def clip_reward(*, reward: Tensor, low: float = -math.inf, high: float = math.inf, mask: Tensor | None = None) -> Tensor:
    """Clamp to [low, high] (any shape). Raises ValueError for low > high."""
    if not low <= high:
        raise ValueError(f"clip_reward needs low <= high, got low={low}, high={high}.")
    (visible,) = visible_entries(mask, reward=reward)
    clipped = visible.clamp(low, high)
    return (clipped if mask is None else torch.where(mask, clipped, torch.zeros_like(clipped))).to(reward.dtype)


def penalize_overlong(
    *, reward: Tensor, length: Tensor, max_length: int, buffer: int, penalty: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Soft overlong punishment (DAPO: Yu et al. 2025, arXiv:2503.14476): 0 up to max_length - buffer, then linear to `penalty`.

    The full penalty applies from max_length on. [B] rewards and lengths in tokens or steps.
    Raises ValueError: unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"penalize_overlong needs 0 < buffer <= max_length, got buffer={buffer}, max_length={max_length}.")
    _require_not_negative("penalty", penalty)
    visible, lengths = visible_entries(mask, reward=reward, length=length.to(torch.float64))
    share = ((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)
    return (visible - penalty * share).to(reward.dtype)


def kl_in_reward(
    *,
    reward: Tensor,
    kl: Tensor,
    coefficient: float,
    mask: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """reward - coefficient · KL estimate, entry by entry (Ziegler et al. 2019, arXiv:1909.08593).

    Args:
        reward: [B, L], or [B].
        kl: the same shape, `kl.kl_estimate` between the sampling policy, as the trainer computes it, and the reference, on the same
            actions; k1 is the paper's. An entry of several tokens has the sum of their estimates: an estimate from the tokens' summed
            log-ratio would vary many times as much, exponentially in their number for k3.
        coefficient: >= 0; `step_rewards.KlTerm` may control it.
        counted: entries of the means; None: those of `mask`.

    Returns rewards, and ``kl`` and ``kl_penalty``, their means.
    """
    _require_not_negative("coefficient", coefficient)
    visible, estimate = visible_entries(mask, reward=reward, kl=kl.detach())
    mean = masked_mean(estimate, mask if counted is None else counted)
    return (visible - coefficient * estimate).to(reward.dtype), {"kl": mean, "kl_penalty": coefficient * mean}


def _require_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be >= 0, got {value}.")
