"""What a target policy would earn, from episodes that another policy played: importance sampling and doubly robust estimates; numpy only.

Shape legend: N episodes, T steps of the longest, B resamples. π is the target policy, μ the one that acted (the behaviour policy).
With the ratios ρₖ = π(aₖ|sₖ) / μ(aₖ|sₖ), the weight of the first t + 1 decisions is wₜ = ρ₀ ρ₁ … ρₜ; after an episode's end nothing
is decided and wₜ stays what it was. The value estimated is V = E_π[Σₜ γᵗ rₜ] until the episode's recorded kind of end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from embodied_rl.episodes.intervals import scaled_weights

_LARGEST_LOG = 700.0
"""exp of more overflows float64."""


@dataclass(frozen=True, eq=False)
class OffPolicyEpisodes:
    """N episodes side by side, padded to T steps; `stack` builds it."""

    length: np.ndarray
    """[N] int64 steps, each >= 1."""
    reward: np.ndarray
    """[N, T] float64; 0 after the end."""
    log_ratio: np.ndarray
    """[N, T] float64 log ρ of each step; −inf where π never does this; 0 after the end."""
    model_q: np.ndarray | None = None
    """[N, T] float64 a model's Q(sₜ, aₜ) under π; 0 after the end."""
    model_v: np.ndarray | None = None
    """[N, T + 1] float64 the model's V(sₜ) under π, with what is to count after the end at t = length (0 where nothing comes, V of the
    last observation where a cut episode is to be continued by the model); 0 beyond."""

    @property
    def num_episodes(self) -> int:
        return int(self.reward.shape[0])

    @property
    def running(self) -> np.ndarray:
        """[N, T] bool: the episode had not ended before this step."""
        return np.arange(self.reward.shape[1]) < self.length[:, None]


def stack(
    rewards: Sequence[np.ndarray],
    log_ratios: Sequence[np.ndarray] | None = None,
    *,
    model_q: Sequence[np.ndarray] | None = None,
    model_v: Sequence[np.ndarray] | None = None,
) -> OffPolicyEpisodes:
    """Pad episodes of different lengths.

    Args:
        rewards: N arrays [Tᵢ].
        log_ratios: N arrays [Tᵢ]; None: π is μ, all ratios are 1.
        model_q: N arrays [Tᵢ].
        model_v: N arrays [Tᵢ + 1], the last entry what counts after the end.

    Raises:
        ValueError: no episode, lengths that do not agree, NaN, or an infinite number other than a log ratio of −inf.
    """
    lengths = [len(part) for part in rewards]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"estimates need episodes of at least one step, got lengths {lengths[:5]}")
    num_steps = max(lengths)

    def padded(name: str, parts: Sequence[np.ndarray], extra: int) -> np.ndarray:
        if [len(part) for part in parts] != [length + extra for length in lengths]:
            raise ValueError(f"{name} must have {extra} entries more than there are rewards, in every episode")
        whole = np.zeros((len(parts), num_steps + extra))
        for row, part in zip(whole, parts, strict=True):
            row[: len(part)] = part
        allowed = np.isfinite(whole) | (np.isneginf(whole) if name == "log_ratios" else False)
        if not allowed.all():
            episode, step = np.argwhere(~allowed)[0]
            raise ValueError(f"{name} of episode {episode}, step {step} is {whole[episode, step]}")
        return whole

    return OffPolicyEpisodes(
        np.asarray(lengths, np.int64),
        padded("rewards", rewards, 0),
        np.zeros((len(lengths), num_steps)) if log_ratios is None else padded("log_ratios", log_ratios, 0),
        None if model_q is None else padded("model_q", model_q, 0),
        None if model_v is None else padded("model_v", model_v, 1),
    )


def log_weights(data: OffPolicyEpisodes, max_weight: float | None = None) -> np.ndarray:
    """[N, T] log wₜ, carried on after the end; with `max_weight` c, log min(wₜ, c) (Ionides 2008, "Truncated importance sampling")."""
    cumulative = np.cumsum(data.log_ratio, axis=1)
    return cumulative if max_weight is None else np.minimum(cumulative, np.log(max_weight))


def discounted_returns(data: OffPolicyEpisodes, gamma: float) -> np.ndarray:
    """[N] Σₜ γᵗ rₜ of each episode."""
    return data.reward @ discounts(data.reward.shape[1], gamma)


def discounts(num_steps: int, gamma: float) -> np.ndarray:
    """[T] γᵗ"""
    return gamma ** np.arange(num_steps, dtype=np.float64)


# ---- the estimators -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Terms:
    """An estimate as a sum of K ratios of sums over episodes, Σₖ (Σᵢ numeratorᵢₖ / Σᵢ denominatorᵢₖ), so that it can be resampled."""

    numerator: np.ndarray
    """[N, K]"""
    denominator: np.ndarray
    """[N, K]; ones where the estimate is a mean over episodes, weights where it is self-normalised."""

    def value(self) -> float:
        """The estimate of all episodes, each once; NaN where all weights are 0."""
        return float(self.values(np.ones((1, self.numerator.shape[0])))[0])

    def values(self, counts: np.ndarray) -> np.ndarray:
        """[B] the estimate of resamples given as how often each episode is in them [B, N]; NaN where all their weights are 0."""
        return _ratio_sums(counts @ self.numerator, counts @ self.denominator)

    def jackknife(self) -> np.ndarray:
        """[N] the estimate without the i-th episode."""
        numerator = self.numerator.sum(axis=0) - self.numerator
        # What is left after a subtraction may be only rounding.
        denominator = np.maximum(self.denominator.sum(axis=0) - self.denominator, 0.0)
        return _ratio_sums(numerator, denominator)


def _ratio_sums(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0).sum(axis=1)


def behaviour_value(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """The mean return of the policy that acted: (1/N) Σᵢ Gᵢ. No ratio enters."""
    return _mean(discounted_returns(data, gamma)[:, None])


def importance_sampling(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Ordinary importance sampling (IS): (1/N) Σᵢ wᵢ Gᵢ with the weight of the whole episode.

    Precup, Sutton & Singh 2000, "Eligibility traces for off-policy policy evaluation", section 2; Jiang & Li 2016, section 3.1.
    Unbiased (without `max_weight`) and of a variance that grows exponentially with the number of steps.
    """
    return _mean((_exp(log_weights(data, max_weight)[:, -1]) * discounted_returns(data, gamma))[:, None])


def weighted_importance_sampling(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Weighted importance sampling (WIS): Σᵢ wᵢ Gᵢ / Σᵢ wᵢ.

    Precup, Sutton & Singh 2000, section 2. Consistent; biased towards μ's value with few episodes (exactly it with one), and never
    outside of the recorded returns.
    """
    weight = _normalisable(log_weights(data, max_weight)[:, -1:])
    return Terms(weight * discounted_returns(data, gamma)[:, None], weight)


def per_decision_importance_sampling(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Per-decision importance sampling (PDIS): (1/N) Σᵢ Σₜ γᵗ wₜ rₜ.

    Precup, Sutton & Singh 2000, section 3; "step-wise IS" in Jiang & Li 2016, section 3.1. Unbiased like IS; a reward is weighted only by
    the decisions before it, so that its variance is mostly smaller.
    """
    terms = _exp(log_weights(data, max_weight)) * data.reward
    return _mean((terms @ discounts(terms.shape[1], gamma))[:, None])


def weighted_per_decision_importance_sampling(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Weighted per-decision importance sampling (WPDIS): Σₜ γᵗ (Σᵢ wₜ rₜ / Σᵢ wₜ).

    The form that normalises each step by itself and is consistent (CWPDIS in Thomas 2015, "Safe reinforcement learning", section 3.10);
    that of Precup, Sutton & Singh 2000, section 3, divides by Σᵢ Σₜ γᵗ wₜ and is not. Episodes that have ended stay in the denominator
    with the weight that they had.
    """
    weight = _normalisable(log_weights(data, max_weight))
    return Terms(weight * data.reward * discounts(weight.shape[1], gamma), weight)


def doubly_robust(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Doubly robust (DR): (1/N) Σᵢ [V(s₀) + Σₜ γᵗ wₜ (rₜ + γ V(sₜ₊₁) − Q(sₜ, aₜ))].

    Jiang & Li 2016, "Doubly robust off-policy value evaluation for reinforcement learning", equation 10, its recursion
    D(t) = V(sₜ) + ρₜ (rₜ + γ D(t + 1) − Q(sₜ, aₜ)) written out. Unbiased for any model that was made without these episodes, when
    V(s) = E_π Q(s, ·); PDIS where the model is 0.

    Raises:
        ValueError: there is no model.
    """
    model_v, correction = _corrections(data, gamma)
    steps = (_exp(log_weights(data, max_weight)) * correction) @ discounts(correction.shape[1], gamma)
    return _mean((model_v[:, 0] + steps)[:, None])


def weighted_doubly_robust(data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
    """Weighted doubly robust (WDR): DR with wₜ replaced by N wₜ / Σᵢ wₜ at each step.

    Thomas & Brunskill 2016, "Data-efficient off-policy policy evaluation for reinforcement learning", section 4; WPDIS where the
    model is 0.

    Raises:
        ValueError: there is no model.
    """
    model_v, correction = _corrections(data, gamma)
    weight = _normalisable(log_weights(data, max_weight))
    numerator = weight * correction * discounts(correction.shape[1], gamma)
    first, ones = model_v[:, :1], np.ones((data.num_episodes, 1))
    return Terms(np.concatenate([first, numerator], axis=1), np.concatenate([ones, weight], axis=1))


def _corrections(data: OffPolicyEpisodes, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """The model's V [N, T + 1], and what each step was better than the model said: rₜ + γ V(sₜ₊₁) − Q(sₜ, aₜ) [N, T]."""
    if data.model_q is None or data.model_v is None:
        raise ValueError("doubly robust estimates need a model's values (model_q and model_v)")
    return data.model_v, data.reward + gamma * data.model_v[:, 1:] - data.model_q


def _mean(values: np.ndarray) -> Terms:
    return Terms(values, np.ones_like(values))


def _exp(log_weight: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(log_weight, _LARGEST_LOG))


def _normalisable(log_weight: np.ndarray) -> np.ndarray:
    """Weights up to a factor for each step, which normalisation cancels: the heaviest is 1, so that none overflows."""
    return scaled_weights(log_weight)


@dataclass(frozen=True)
class Estimator:
    """One way to estimate, and what it needs."""

    name: str
    title: str
    terms: Callable[[OffPolicyEpisodes, float, float | None], Terms]
    per_decision: bool
    """Rewards are weighted by the decisions before them, not by the whole episode's."""
    self_normalised: bool
    needs_model: bool


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator("is", "importance sampling", importance_sampling, False, False, False),
        Estimator("wis", "weighted importance sampling", weighted_importance_sampling, False, True, False),
        Estimator("pdis", "per-decision importance sampling", per_decision_importance_sampling, True, False, False),
        Estimator("wpdis", "weighted per-decision importance sampling", weighted_per_decision_importance_sampling, True, True, False),
        Estimator("dr", "doubly robust", doubly_robust, True, False, True),
        Estimator("wdr", "weighted doubly robust", weighted_doubly_robust, True, True, True),
    )
}
