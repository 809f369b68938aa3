"""Open loop: what a policy says to recorded observations, against what was done there; numpy only.

The policy is asked every H steps, its own action horizon, and its whole chunk of H actions is compared; it never sees what its
actions lead to. Figures are averaged over the steps of an episode first and over episodes then, so that long ones do not weigh more.

Shape legend: T steps, Q queries, H action horizon, A action dimensions, L units that each have a log-probability, N episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from embodied_rl.episodes.estimators import Interval, bca_interval, resample_counts
from embodied_rl.types import ActionSpec

DEFAULT_BINS = 256
"""Equal bins of each action dimension that count as tokens (Brohan et al. 2022, "RT-1")."""


@dataclass(frozen=True)
class Summary:
    """A figure's mean over episodes and its bootstrap interval (BCa)."""

    mean: float
    interval: Interval

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OpenLoop:
    """A policy against the recorded actions of N episodes."""

    horizon: int
    """H: every how many steps the policy was asked."""
    num_episodes: int
    num_steps: int
    log_likelihood: Summary
    """Mean over steps of the log-probability (density, of actions scaled to [-1, 1]) of the recorded action, all units summed."""
    mse: Summary | None
    """Mean squared error over dimensions, in the simulator's units; None for choices, here and below."""
    mae: Summary | None
    mse_by_dim: tuple[float, ...]
    """[A]"""
    mae_by_dim: tuple[float, ...]
    """[A]"""
    explained_by_dim: tuple[float, ...]
    """[A] 1 − MSE / variance of the recorded actions: 0 is what their mean would reach; NaN where they never change."""
    accuracy: Summary
    """Share of choices that are equal; for vectors, of dimensions in the same of `num_bins` equal bins between the simulator's bounds."""
    accuracy_by_dim: tuple[float, ...]
    """[A]"""
    num_bins: int
    """0 for choices."""
    majority: float
    """The accuracy of always saying the most frequent choice (or bin, dimension by dimension)."""
    bound_share: float
    """Of all recorded vector entries, those at the simulator's bounds, where what the policy had drawn was cut; 0 for choices."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; NaN is null."""
        data = asdict(self)
        data["explained_by_dim"] = [None if np.isnan(value) else value for value in self.explained_by_dim]
        return data


def query_steps(num_steps: int, horizon: int) -> np.ndarray:
    """[Q] the steps 0, H, 2H, … before which the policy is asked."""
    if num_steps < 1 or horizon < 1:
        raise ValueError(f"steps and horizon must be >= 1, got {num_steps} and {horizon}")
    return np.arange(0, num_steps, horizon)


def chunks_of(actions: np.ndarray, horizon: int) -> np.ndarray:
    """[T, A] → [Q, H, A] the actions that follow each query; the last chunk is filled up with its last action."""
    missing = -len(actions) % horizon
    filled = np.concatenate([actions, np.repeat(actions[-1:], missing, axis=0)]) if missing else actions
    return filled.reshape(-1, horizon, *actions.shape[1:])


def steps_of(chunks: np.ndarray, num_steps: int) -> np.ndarray:
    """[Q, H, …] → [T, …], the inverse of `chunks_of`: what was filled up is cut off."""
    return chunks.reshape(-1, *chunks.shape[2:])[:num_steps]


def compare(
    predicted: Sequence[np.ndarray],
    recorded: Sequence[np.ndarray],
    log_prob: Sequence[np.ndarray],
    action: ActionSpec,
    *,
    horizon: int = 1,
    num_bins: int = DEFAULT_BINS,
    confidence: float = 0.95,
    seed: int = 0,
) -> OpenLoop:
    """Hold predicted actions against recorded ones.

    Args:
        predicted: N arrays [Tᵢ, A] of what the policy would do at most likely, in the simulator's units.
        recorded: N arrays [Tᵢ, A] of what was done.
        log_prob: N arrays [Tᵢ, L] of the recorded actions under the policy.
        action: what the actions mean; vectors or choices.
        horizon: every how many steps the policy was asked, for the record.
        num_bins: for the accuracy of vectors.
        confidence: of the intervals.
        seed: of the resampling.

    Raises:
        ValueError: no episode, arrays of different lengths, text actions.
    """
    if action.kind == "text" or not recorded:
        raise ValueError("open-loop figures are for vectors or choices, of at least one episode")
    if any(len(ours) != len(theirs) for parts in (predicted, log_prob) for ours, theirs in zip(parts, recorded, strict=True)):
        raise ValueError("predicted actions and log-probabilities must have as many steps as the recorded actions")

    def summary(values: np.ndarray) -> Summary:
        return _summary(values, confidence, seed)

    likelihood = summary(np.array([part.sum(axis=1).mean() for part in log_prob], np.float64))
    num_steps = sum(map(len, recorded))
    if action.kind == "discrete":
        hits = np.array([np.mean(ours == theirs) for ours, theirs in zip(predicted, recorded, strict=True)], np.float64)
        majority = _majority([part.astype(np.int64) for part in recorded])
        return OpenLoop(
            horizon=horizon,
            num_episodes=len(recorded),
            num_steps=num_steps,
            log_likelihood=likelihood,
            mse=None,
            mae=None,
            mse_by_dim=(),
            mae_by_dim=(),
            explained_by_dim=(),
            accuracy=summary(hits),
            accuracy_by_dim=(float(hits.mean()),),
            num_bins=0,
            majority=majority,
            bound_share=0.0,
        )
    # [N, A]: episodes first, so that each counts once.
    error = [ours.astype(np.float64) - theirs for ours, theirs in zip(predicted, recorded, strict=True)]
    squared, absolute = np.stack([(e**2).mean(axis=0) for e in error]), np.stack([np.abs(e).mean(axis=0) for e in error])
    tokens = [token_ids(part, action, num_bins) for part in recorded]
    hit = np.stack([(token_ids(part, action, num_bins) == t).mean(axis=0) for part, t in zip(predicted, tokens, strict=True)])
    return OpenLoop(
        horizon=horizon,
        num_episodes=len(recorded),
        num_steps=num_steps,
        log_likelihood=likelihood,
        mse=summary(squared.mean(axis=1)),
        mae=summary(absolute.mean(axis=1)),
        mse_by_dim=tuple(squared.mean(axis=0).tolist()),
        mae_by_dim=tuple(absolute.mean(axis=0).tolist()),
        explained_by_dim=tuple((1 - squared.mean(axis=0) / _variance(recorded)).tolist()),
        accuracy=summary(hit.mean(axis=1)),
        accuracy_by_dim=tuple(hit.mean(axis=0).tolist()),
        num_bins=num_bins,
        majority=_majority(tokens),
        bound_share=_bound_share(recorded, action),
    )


def token_ids(actions: np.ndarray, action: ActionSpec, num_bins: int = DEFAULT_BINS) -> np.ndarray:
    """[T, A] int64 number of the bin that each entry lies in, 0 … num_bins − 1 from the lower to the upper bound."""
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    share = (actions - low) / np.where(high > low, high - low, 1.0)
    return np.clip((share * num_bins).astype(np.int64), 0, num_bins - 1)


def normalise(actions: np.ndarray, action: ActionSpec) -> np.ndarray:
    """The simulator's vectors [..., A] scaled to [-1, 1], the inverse of `ActionSpec.denormalise`; choices pass through."""
    if action.kind != "continuous":
        return actions
    low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
    return np.clip(2 * (actions - low) / np.where(high > low, high - low, 1.0) - 1, -1.0, 1.0).astype(np.float32)


def _summary(values: np.ndarray, confidence: float, seed: int) -> Summary:
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(values).all():
        # −inf is the likelihood of a policy that would never do what was done; it has no spread.
        return Summary(mean, Interval(mean, mean, confidence, "none"))
    samples = resample_counts(len(values), 2000, seed) @ values / len(values)
    jackknife = (values.sum() - values) / (len(values) - 1)
    return Summary(mean, bca_interval(mean, samples, jackknife, confidence))


def _variance(recorded: Sequence[np.ndarray]) -> np.ndarray:
    """[A] mean over episodes of the mean squared distance from the mean of all episodes; NaN where nothing changes."""
    centre = np.mean([part.mean(axis=0, dtype=np.float64) for part in recorded], axis=0)
    variance = np.mean([((part - centre) ** 2).mean(axis=0) for part in recorded], axis=0)
    return np.where(variance > 1e-12, variance, np.nan)


def _majority(tokens: Sequence[np.ndarray]) -> float:
    """Mean over dimensions of the share of the most frequent token, each episode counting once."""
    shares = []
    for dim in range(tokens[0].shape[1]):
        size = 1 + max(int(part[:, dim].max()) for part in tokens)
        shares.append(np.mean([np.bincount(part[:, dim], minlength=size) / len(part) for part in tokens], axis=0).max())
    return float(np.mean(shares))


def _bound_share(recorded: Sequence[np.ndarray], action: ActionSpec) -> float:
    low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
    slack = 1e-6 * (high - low)
    return float(np.mean(np.concatenate([(part <= low + slack) | (part >= high - slack) for part in recorded])))
