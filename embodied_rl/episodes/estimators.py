"""Off-policy estimates of a target policy's value from another policy's episodes, and their reliability; numpy only.

Shape legend: N episodes, which are independent draws (steps of one episode are not), T steps of the longest, B resamples. π is the target
policy, μ the behaviour policy. With the ratios ρₖ = π(aₖ|sₖ) / μ(aₖ|sₖ), the weight of the first t + 1 decisions is wₜ = ρ₀ ρ₁ … ρₜ; after
an episode's end there are no decisions and wₜ stays constant. The estimated value is V = E_π[Σₜ γᵗ rₜ] until the episode's recorded kind of
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CAPS: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Weight caps that `capped_lower_bound` tries; the bound holds for all of them together."""
_NORMAL = NormalDist()
_RESAMPLING, _REFITTING = 0xB007, 0xB008


@dataclass(frozen=True)
class Interval:
    """Two-sided interval. Raises ValueError: confidence out of range."""

    low: float
    high: float
    confidence: float
    """Nominal (bootstrap) or guaranteed (concentration) coverage, between 0 and 1."""
    method: str

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {self.confidence}")

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


# ---- resampling -----------------------------------------------------------------------------------------------------


def resample_counts(num_episodes: int, num_samples: int, seed: int) -> np.ndarray:
    """[B, N] float64: number of times that each of N episodes is in each of B resamples of N with replacement; a pure function.

    Several estimates of the same episodes share their resamples, so that differences between them can be resampled too.
    """
    if num_episodes < 1 or num_samples < 1:
        raise ValueError(f"resampling needs episodes and samples, got {num_episodes} and {num_samples}")
    # A separate stream: the program that made the data may have used the plain seed.
    generator = np.random.default_rng([seed, _RESAMPLING])
    return generator.multinomial(num_episodes, np.full(num_episodes, 1.0 / num_episodes), size=num_samples).astype(np.float64)


def percentile_interval(samples: np.ndarray, confidence: float = 0.95) -> Interval:
    """Quantiles of the resampled estimates [B] (Efron 1979); non-finite ones are ignored."""
    finite = _finite(samples)
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence, "bootstrap percentile")


def bca_interval(estimate: float, samples: np.ndarray, jackknife: np.ndarray, confidence: float = 0.95) -> Interval:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987, "Better bootstrap confidence intervals", section 4).

    The quantiles are shifted by the bias z₀ (share of resamples below the estimate) and by the jackknife's acceleration a = Σ(θ̄ − θ₍ᵢ₎)³ /
    (6 (Σ(θ̄ − θ₍ᵢ₎)²)^{3/2}).

    Args:
        estimate: θ of all episodes.
        samples: [B] θ of resamples; non-finite ones are ignored.
        jackknife: [N] θ without the i-th episode.

    Raises ValueError: confidence out of range, or no finite sample.
    """
    finite = np.sort(_finite(samples))
    if finite[0] == finite[-1]:
        return Interval(float(finite[0]), float(finite[0]), confidence, "bootstrap BCa")
    # Half of the ties count as below, otherwise an estimator with few distinct values would look biased. Never 0 or 1: z₀ stays finite.
    below = float(np.mean(finite < estimate) + 0.5 * np.mean(finite == estimate))
    bias = _NORMAL.inv_cdf(min(max(below, 0.5 / finite.size), 1 - 0.5 / finite.size))
    deviations = jackknife.mean() - jackknife
    squares = float((deviations**2).sum())
    acceleration = float((deviations**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
    ends = [bias + _NORMAL.inv_cdf(q) for q in ((1 - confidence) / 2, (1 + confidence) / 2)]
    shares = [_NORMAL.cdf(bias + end / max(1 - acceleration * end, 1e-6)) for end in ends]
    low, high = np.quantile(finite, shares)
    return Interval(float(low), float(high), confidence, "bootstrap BCa")


def student_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """Interval mean ± t · s · √(1 + 1/E), for few resampled estimates [E >= 2] without usable quantiles.

    Their standard deviation s is the estimate's own standard error, so it is not divided by √E; the mean of E of them adds s/√E from the
    resampling.
    """
    data = _members(values)
    half = student_quantile(0.5 + confidence / 2, data.size - 1) * float(data.std(ddof=1)) * math.sqrt(1 + 1 / data.size)
    centre = float(data.mean())
    return Interval(centre - half, centre + half, confidence, f"bootstrap of {data.size} members")


def refit_errors(values: Sequence[float] | np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """[B] draws of the estimate's error from fitting its model to these episodes and not to others.

    `values` are the estimates with each of E models [E >= 2], each fitted to a resample of the episodes. The draws are Student's t with E −
    1 degrees times s √(1 + 1/E), as in `student_interval`. Estimates with models of the same resamples get draws correlated like their
    values: one set of weights mixes the members' deviations.
    """
    data = _members(values)
    degrees = data.size - 1
    generator = np.random.default_rng([seed, _REFITTING])
    mixed = generator.standard_normal((num_samples, data.size)) @ (data - data.mean()) / math.sqrt(degrees)
    return mixed * math.sqrt(1 + 1 / data.size) / np.sqrt(generator.chisquare(degrees, num_samples) / degrees)


def _members(values: Sequence[float] | np.ndarray) -> np.ndarray:
    data = np.asarray(values, np.float64)
    if data.size < 2:
        raise ValueError(f"a spread needs at least two values, got {data.size}")
    return data


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution with integer degrees of freedom, by bisection of its distribution function."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"probability must be in [0.5, 1) and degrees >= 1, got {probability} and {degrees}")
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return 0.5 * (low + high)


def _student_cdf(t: float, degrees: int) -> float:
    """0.5 + Γ((ν + 1) / 2) / (Γ(ν / 2) √π) ∫ cosᵛ⁻¹ from 0 to the angle arctan(t / √ν), by the midpoint rule (error below 1e-8)."""
    angle = math.atan2(t, math.sqrt(degrees))
    middles = angle * (np.arange(4096) + 0.5) / 4096
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    return 0.5 + factor * angle * float(np.mean(np.cos(middles) ** (degrees - 1)))


def _finite(samples: np.ndarray) -> np.ndarray:
    data = np.asarray(samples, np.float64).ravel()
    finite = data[np.isfinite(data)]
    if finite.size == 0:
        raise ValueError("an interval needs at least one finite resampled estimate, got none")
    return finite


# ---- bounds that hold for any distribution --------------------------------------------------------------------------


def empirical_bernstein(values: np.ndarray, low: float, high: float, confidence: float = 0.95) -> Interval:
    """Interval of the mean of independent values in [low, high] (Maurer & Pontil 2009, theorem 4, both sides).

    |mean − E| <= √(2 V ln(4/δ) / n) + 7 (high − low) ln(4/δ) / (3 (n − 1)), V the sample variance, δ = 1 − confidence.
    Raises ValueError: fewer than two values, a value outside of [low, high], or confidence out of range.
    """
    _check_range(values, low, high)
    margin = bernstein_margin(values, high - low, (1 - confidence) / 2)
    mean = float(values.mean())
    return Interval(max(low, mean - margin), min(high, mean + margin), confidence, "empirical Bernstein")


def bernstein_margin(values: np.ndarray, span: float, delta: float) -> float:
    """Largest excess of the mean of independent values [n] over its expectation, except with probability `delta` (Maurer & Pontil 2009,
    theorem 4); the values lie in an interval of length `span`."""
    log_term, n = math.log(2.0 / delta), values.size
    return math.sqrt(2.0 * float(values.var(ddof=1)) * log_term / n) + 7.0 * span * log_term / (3.0 * (n - 1))


def capped_lower_bound(scores_at: Callable[[float], np.ndarray], span: float, delta: float, caps: Sequence[float] = CAPS) -> float:
    """Lower bound of E[w · x] with x >= 0 and unbounded importance weights w; it fails with probability at most `delta`.

    Capping weights at c can only lower a mean of non-negative terms, so a lower bound of E[min(w, c) · x] is one of E[w · x] (Thomas,
    Theocharous & Ghavamzadeh 2015, "High-confidence off-policy evaluation", section 4). With capped weights the terms are at most c · span,
    and Maurer & Pontil's theorem holds. Each cap gets its share of `delta`, and the best bound counts.

    Args:
        scores_at: cap → [N] min(w, cap) · x of each episode.
        span: largest x.
        delta: probability that the bound may fail.
        caps: weight caps to try.

    Raises ValueError: fewer than two episodes, or a score outside of [0, cap · span].
    """
    best = 0.0
    for cap in caps:
        scores = scores_at(cap)
        _check_range(scores, 0.0, cap * span)
        best = max(best, float(scores.mean()) - bernstein_margin(scores, cap * span, delta / len(caps)))
    return best


def _check_range(values: np.ndarray, low: float, high: float) -> None:
    if values.size < 2:
        raise ValueError(f"a bound needs at least two values, got {values.size}")
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    if not (np.isfinite(values).all() and values.min() >= low - slack and values.max() <= high + slack):
        raise ValueError(f"values must lie within [{low:g}, {high:g}], got {values.min():g} to {values.max():g}")


# ---- how many episodes count ----------------------------------------------------------------------------------------


def effective_sample_size(log_weight: np.ndarray) -> np.ndarray:
    """Kish's effective sample size (1965), (Σ w)² / Σ w² over the first axis: the equivalent number of equally weighted episodes.

    `log_weight`: [N, ...]; −inf is a weight of 0. Logarithms, because products of many ratios overflow.

    Returns [...] between 1 and N; 0 where all weights are 0.
    """
    weight = scaled_weights(log_weight)
    squares = (weight**2).sum(axis=0)
    return np.divide(weight.sum(axis=0) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)


def largest_share(log_weight: np.ndarray) -> np.ndarray:
    """Share of the heaviest episode in the total weight: [N, ...] → [...] between 1/N and 1; 1 where all weights are 0."""
    weight = scaled_weights(log_weight)
    total = weight.sum(axis=0)
    return np.divide(weight.max(axis=0), total, out=np.ones_like(total), where=total > 0)


def scaled_weights(log_weight: np.ndarray) -> np.ndarray:
    """exp(log_weight) [N, ...] divided by the largest along the first axis, to avoid overflow; zeros where all are 0."""
    largest = log_weight.max(axis=0, keepdims=True)
    return np.exp(log_weight - np.where(np.isfinite(largest), largest, 0.0))


_LARGEST_LOG = 700.0
"""Largest exponent; exp of more overflows float64."""


@dataclass(frozen=True, eq=False)
class OffPolicyEpisodes:
    """N episodes side by side, padded to T steps; `stack` builds it."""

    length: np.ndarray
    """[N] int64 number of steps, each >= 1."""
    reward: np.ndarray
    """[N, T] float64 rewards; 0 after the end."""
    log_ratio: np.ndarray
    """[N, T] float64 log ρ of each step; −inf where π never takes the action; 0 after the end."""
    model_q: np.ndarray | None = None
    """[N, T] float64 a model's Q(sₜ, aₜ) under π; 0 after the end."""
    model_v: np.ndarray | None = None
    """[N, T + 1] float64 the model's V(sₜ) under π. At t = length: the value after the end (0 if nothing follows, V of the last observation
    if the model continues a truncated episode); 0 beyond."""

    @property
    def num_episodes(self) -> int:
        return int(self.reward.shape[0])

    @property
    def running(self) -> np.ndarray:
        """[N, T] bool: whether the episode was still running at this step."""
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
        model_v: N arrays [Tᵢ + 1], the last entry is the value after the end.

    Raises ValueError: no episode, inconsistent lengths, NaN, or an infinite number other than a log ratio of −inf.
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
    """[N, T] log wₜ, constant after the end; with `max_weight` c, log min(wₜ, c) (Ionides 2008, "Truncated importance sampling")."""
    cumulative = np.cumsum(data.log_ratio, axis=1)
    return cumulative if max_weight is None else np.minimum(cumulative, np.log(max_weight))


def discounted_returns(data: OffPolicyEpisodes, gamma: float) -> np.ndarray:
    """[N] Σₜ γᵗ rₜ of each episode."""
    return data.reward @ discounts(data.reward.shape[1], gamma)


def discounts(num_steps: int, gamma: float) -> np.ndarray:
    """[T] discounts γᵗ."""
    return gamma ** np.arange(num_steps, dtype=np.float64)


# ---- the estimators -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Terms:
    """An estimate as a sum of K ratios of sums over episodes, Σₖ (Σᵢ numeratorᵢₖ / Σᵢ denominatorᵢₖ), which can be resampled."""

    numerator: np.ndarray
    """[N, K] numerators of the episodes."""
    denominator: np.ndarray
    """[N, K]; ones if the estimate is a mean over episodes, weights if it is self-normalised."""

    def value(self) -> float:
        """Estimate with each episode once; NaN if all weights are 0."""
        return float(self.values(np.ones((1, self.numerator.shape[0])))[0])

    def values(self, counts: np.ndarray) -> np.ndarray:
        """[B] estimates of resamples, given as counts of the episodes [B, N]; NaN where all their weights are 0."""
        return _ratio_sums(counts @ self.numerator, counts @ self.denominator)

    def jackknife(self) -> np.ndarray:
        """[N] estimates without the i-th episode."""
        numerator = self.numerator.sum(axis=0) - self.numerator
        # A subtraction may leave only rounding errors.
        denominator = np.maximum(self.denominator.sum(axis=0) - self.denominator, 0.0)
        return _ratio_sums(numerator, denominator)


def _ratio_sums(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0).sum(axis=1)


def behaviour_value(data: OffPolicyEpisodes, gamma: float) -> Terms:
    """Mean return of the behaviour policy: (1/N) Σᵢ Gᵢ, without ratios."""
    return _mean(discounted_returns(data, gamma)[:, None])


@dataclass(frozen=True)
class Estimator:
    """An importance-sampling estimator, by what it weights and how; `max_weight` biases each of them.

    is, wis: Precup, Sutton & Singh 2000, "Eligibility traces for off-policy policy evaluation", section 2. (1/N) Σᵢ wᵢ Gᵢ with the weight
    of the whole episode is unbiased, and its variance grows exponentially with the number of steps; Σᵢ wᵢ Gᵢ / Σᵢ wᵢ is consistent,
    biased towards μ's value with few episodes (equal to it with one), and never outside the recorded returns.

    pdis, wpdis: section 3 of the same. (1/N) Σᵢ Σₜ γᵗ wₜ rₜ is unbiased with mostly less variance ("step-wise IS" in Jiang & Li 2016,
    section 3.1). Σₜ γᵗ (Σᵢ wₜ rₜ / Σᵢ wₜ) normalises each step separately and is consistent (CWPDIS in Thomas 2015, "Safe reinforcement
    learning", section 3.10), unlike division by Σᵢ Σₜ γᵗ wₜ. Ended episodes keep their weight in the denominator.

    dr: Jiang & Li 2016, "Doubly robust off-policy value evaluation for reinforcement learning", equation 10, with its recursion
    D(t) = V(sₜ) + ρₜ (rₜ + γ D(t + 1) − Q(sₜ, aₜ)) written out: (1/N) Σᵢ [V(s₀) + Σₜ γᵗ wₜ (rₜ + γ V(sₜ₊₁) − Q(sₜ, aₜ))]. Unbiased for
    any model made without these episodes, if V(s) = E_π Q(s, ·); pdis for a model of 0.

    wdr: Thomas & Brunskill 2016, "Data-efficient off-policy policy evaluation for reinforcement learning", section 4: dr with wₜ
    replaced by N wₜ / Σᵢ wₜ at each step; wpdis for a model of 0.
    """

    name: str
    per_decision: bool
    """Whether the decisions before a reward weight it, instead of the whole episode's."""
    self_normalised: bool
    needs_model: bool

    def terms(self, data: OffPolicyEpisodes, gamma: float, max_weight: float | None = None) -> Terms:
        """Estimate from the episodes; with `max_weight` c, weights are min(w, c). Raises ValueError: it needs a model and there is none."""
        log_weight, earned = log_weights(data, max_weight), data.reward
        first = np.zeros((data.num_episodes, 0))
        if self.needs_model:
            model_v, earned = _corrections(data, gamma)
            first = model_v[:, :1]
        if self.per_decision:
            earned = earned * discounts(earned.shape[1], gamma)
        else:
            log_weight, earned = log_weight[:, -1:], discounted_returns(data, gamma)[:, None]
        if self.self_normalised:
            weight = scaled_weights(log_weight)
            return Terms(np.hstack([first, weight * earned]), np.hstack([np.ones_like(first), weight]))
        weighted = np.exp(np.minimum(log_weight, _LARGEST_LOG)) * earned
        return _mean(np.hstack([first, weighted]).sum(axis=1, keepdims=True))


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator("is", per_decision=False, self_normalised=False, needs_model=False),
        Estimator("wis", per_decision=False, self_normalised=True, needs_model=False),
        Estimator("pdis", per_decision=True, self_normalised=False, needs_model=False),
        Estimator("wpdis", per_decision=True, self_normalised=True, needs_model=False),
        Estimator("dr", per_decision=True, self_normalised=False, needs_model=True),
        Estimator("wdr", per_decision=True, self_normalised=True, needs_model=True),
    )
}


def _corrections(data: OffPolicyEpisodes, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """The model's V [N, T + 1], and the advantage of each step over the model: rₜ + γ V(sₜ₊₁) − Q(sₜ, aₜ) [N, T]."""
    if data.model_q is None or data.model_v is None:
        raise ValueError("doubly robust estimates need a model's values (model_q and model_v)")
    return data.model_v, data.reward + gamma * data.model_v[:, 1:] - data.model_q


def _mean(values: np.ndarray) -> Terms:
    return Terms(values, np.ones_like(values))
