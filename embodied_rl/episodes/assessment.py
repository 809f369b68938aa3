"""Estimates with their reliability (intervals, weights, refusals if the episodes cannot support them), and open-loop comparison.

Shape legend: N episodes, T steps of the longest, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from embodied_rl.episodes import estimators
from embodied_rl.errors import UserError
from embodied_rl.files import finite
from embodied_rl.types import ActionSpec

DEFAULT_BINS = 256
"""Number of equal bins per action dimension that count as tokens (Brohan et al. 2022, "RT-1")."""


@dataclass(frozen=True)
class Summary:
    """A figure's mean over episodes and its bootstrap interval (BCa)."""

    mean: float
    interval: estimators.Interval


@dataclass(frozen=True)
class OpenLoop:
    """Comparison of a policy with the recorded actions of N episodes."""

    horizon: int
    """H: number of steps between the policy's decisions."""
    num_episodes: int
    num_steps: int
    log_likelihood: Summary
    """Mean log-probability of the recorded action over steps (density for actions scaled to [-1, 1]), summed over units."""
    mse: Summary | None
    """Mean squared error over dimensions, in the simulator's units; None for choices, here and below."""
    mae: Summary | None
    mse_by_dim: tuple[float, ...]
    """[A] mean squared error by dimension."""
    mae_by_dim: tuple[float, ...]
    """[A] mean absolute error by dimension."""
    explained_by_dim: tuple[float, ...]
    """[A] 1 − MSE / variance of the recorded actions: 0 is the score of their mean; NaN where they never change."""
    accuracy: Summary
    """Share of equal choices; for vectors, of dimensions in the same of `num_bins` equal bins between the simulator's bounds."""
    accuracy_by_dim: tuple[float, ...]
    """[A] accuracy by dimension."""
    num_bins: int
    """Number of bins; 0 for choices."""
    majority: float
    """Accuracy of always predicting the most frequent choice (or bin, per dimension)."""
    bound_share: float
    """Share of recorded vector entries at the simulator's bounds, where drawn actions were clipped; 0 for choices."""


def query_steps(num_steps: int, horizon: int) -> np.ndarray:
    """[Q] steps 0, H, 2H, … before which the policy decides."""
    if num_steps < 1 or horizon < 1:
        raise ValueError(f"steps and horizon must be >= 1, got {num_steps} and {horizon}")
    return np.arange(0, num_steps, horizon)


def chunks_of(actions: np.ndarray, horizon: int) -> np.ndarray:
    """[T, A] → [Q, H, A] actions after each decision; the last chunk is padded with its last action."""
    missing = -len(actions) % horizon
    filled = np.concatenate([actions, np.repeat(actions[-1:], missing, axis=0)]) if missing else actions
    return filled.reshape(-1, horizon, *actions.shape[1:])


def steps_of(chunks: np.ndarray, num_steps: int) -> np.ndarray:
    """[Q, H, …] → [T, …], the inverse of `chunks_of`, without the padding."""
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
    """Compare predicted actions with recorded ones.

    Args:
        predicted: N arrays [Tᵢ, A] of the policy's most likely actions, in the simulator's units.
        recorded: N arrays [Tᵢ, A] of the recorded actions.
        log_prob: N arrays [Tᵢ, L] of the recorded actions under the policy.
        action: spec of the actions; vectors or choices.
        horizon: number of steps between the policy's decisions, for the result.
        num_bins: number of bins for the accuracy of vectors.

    Raises ValueError: no episode, arrays of different lengths, text actions.
    """
    if action.kind == "text" or not recorded:
        raise ValueError("open-loop figures are for vectors or choices, of at least one episode")
    if any(len(ours) != len(theirs) for parts in (predicted, log_prob) for ours, theirs in zip(parts, recorded, strict=True)):
        raise ValueError("predicted actions and log-probabilities must have as many steps as the recorded actions")

    def summary(values: np.ndarray) -> Summary:
        return _summary(values, confidence, seed)

    def by_dim(shares: np.ndarray) -> tuple[float, ...]:
        return tuple(shares.mean(axis=0).tolist())

    discrete = action.kind == "discrete"
    bins = 0 if discrete else num_bins
    tokens = [token_ids(part, action, bins) for part in recorded]
    guesses = [token_ids(part, action, bins) for part in predicted]
    # [N, A]: episodes first, so that each counts once.
    hit = np.stack([(ours == theirs).mean(axis=0) for ours, theirs in zip(guesses, tokens, strict=True)])
    error = [] if discrete else [ours.astype(np.float64) - theirs for ours, theirs in zip(predicted, recorded, strict=True)]
    squared = np.array([(e**2).mean(axis=0) for e in error])
    absolute = np.array([np.abs(e).mean(axis=0) for e in error])
    return OpenLoop(
        horizon=horizon,
        num_episodes=len(recorded),
        num_steps=sum(map(len, recorded)),
        log_likelihood=summary(np.array([part.sum(axis=1).mean() for part in log_prob], np.float64)),
        mse=None if discrete else summary(squared.mean(axis=1)),
        mae=None if discrete else summary(absolute.mean(axis=1)),
        mse_by_dim=() if discrete else by_dim(squared),
        mae_by_dim=() if discrete else by_dim(absolute),
        explained_by_dim=() if discrete else tuple((1 - squared.mean(axis=0) / _variance(recorded)).tolist()),
        accuracy=summary(hit.mean(axis=1)),
        accuracy_by_dim=by_dim(hit),
        num_bins=bins,
        majority=_majority(tokens),
        bound_share=0.0 if discrete else _bound_share(recorded, action),
    )


def token_ids(actions: np.ndarray, action: ActionSpec, num_bins: int = DEFAULT_BINS) -> np.ndarray:
    """[T, A] int64 bin of each entry, 0 … num_bins − 1 from the lower to the upper bound; choices stay what they are."""
    if action.kind == "discrete":
        return actions.astype(np.int64)
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    share = (actions - low) / np.where(high > low, high - low, 1.0)
    return np.clip((share * num_bins).astype(np.int64), 0, num_bins - 1)


def _summary(values: np.ndarray, confidence: float, seed: int) -> Summary:
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(values).all():
        # A policy that would never take a recorded action has likelihood −inf, which has no spread.
        return Summary(mean, estimators.Interval(mean, mean, confidence, "none"))
    samples = estimators.resample_counts(len(values), 2000, seed) @ values / len(values)
    jackknife = (values.sum() - values) / (len(values) - 1)
    return Summary(mean, estimators.bca_interval(mean, samples, jackknife, confidence))


def _variance(recorded: Sequence[np.ndarray]) -> np.ndarray:
    """[A] mean over episodes of the mean squared distance from the mean of all episodes; NaN where the actions never change."""
    centre = np.mean([part.mean(axis=0, dtype=np.float64) for part in recorded], axis=0)
    variance = np.mean([((part - centre) ** 2).mean(axis=0) for part in recorded], axis=0)
    return np.where(variance > 1e-12, variance, np.nan)


def _majority(tokens: Sequence[np.ndarray]) -> float:
    """Mean over dimensions of the share of the most frequent token; each episode counts once."""
    shares = []
    for dim in range(tokens[0].shape[1]):
        size = 1 + max(int(part[:, dim].max()) for part in tokens)
        shares.append(np.mean([np.bincount(part[:, dim], minlength=size) / len(part) for part in tokens], axis=0).max())
    return float(np.mean(shares))


def _bound_share(recorded: Sequence[np.ndarray], action: ActionSpec) -> float:
    low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
    slack = 1e-6 * (high - low)
    return float(np.mean(np.concatenate([(part <= low + slack) | (part >= high - slack) for part in recorded])))


RATIO_TOLERANCE = 0.05
"""Tolerance for the mean single-step ratio's distance from 1, beyond four standard errors."""


@dataclass(frozen=True)
class Assumptions:
    """Settings and assumptions of the estimates."""

    gamma: float = 0.99
    confidence: float = 0.95
    num_samples: int = 2000
    """Number of bootstrap resamples, B."""
    bootstrap: str = "bca"
    """Kind of bootstrap: bca or percentile."""
    seed: int = 0
    min_ess: float = 10.0
    """Smallest effective sample size; an estimate below it is refused."""
    max_weight: float | None = None
    """Cap of importance weights, which biases the estimate; None: no cap."""
    reward_range: tuple[float, float] | None = None
    """Known range of every reward; None: not known, so there is no concentration interval."""
    horizon: int | None = None
    """Largest number of steps in an episode; None: no known limit."""

    @property
    def total_discount(self) -> float:
        """Σₜ γᵗ over the longest possible episode; infinite without a limit of any kind."""
        if self.horizon is not None:
            return float(estimators.discounts(self.horizon, self.gamma).sum())
        return math.inf if self.gamma == 1.0 else 1 / (1 - self.gamma)

    def return_range(self) -> tuple[float, float] | None:
        """Range of every discounted return, from `reward_range` and `horizon`; None: no finite range is known."""
        if self.reward_range is None or math.isinf(self.total_discount):
            return None
        # After an episode's end the reward is 0, so 0 is possible at any step.
        low, high = self.reward_range
        return min(low, 0.0) * self.total_discount, max(high, 0.0) * self.total_discount


@dataclass(frozen=True)
class Weights:
    """Distribution of the episodes' importance weights."""

    ess: float
    """Effective sample size: of the whole episodes' weights; for per-decision estimates the mean over steps, each weighted by its discount
    times the number of running episodes."""
    largest: float
    """Largest weight of an episode, before `max_weight`; infinite if it exceeds float64."""
    largest_share: float
    """Share of the heaviest episode in the sum of whole-episode weights."""
    mean: float
    """Mean of the whole episodes' weights: 1 in expectation. Far below 1: the important episodes were not recorded."""
    cut_share: float
    """Share of steps with a weight above `max_weight`."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate of the target policy's value."""

    estimator: str
    value: float | None
    """Estimate; None if it was refused."""
    bootstrap: estimators.Interval | None = None
    """Interval over episodes, and over fits of the model if there is one. It misses its nominal coverage if few episodes carry all the
    weight, or if the model is biased: an error that all fits share shows in no spread."""
    concentration: estimators.Interval | None = None
    """Interval that holds with its confidence for any number of episodes and any weights, if rewards are in the stated range, episodes are
    independent and the recorded log-probabilities are true."""
    no_concentration: str = ""
    """Reason why there is no concentration interval."""
    weights: Weights | None = None
    """Weights of the estimate; None if it uses none."""
    refused: str = ""
    """Reason why there is no value."""
    notes: tuple[str, ...] = ()
    samples: np.ndarray | None = field(default=None, repr=False)
    """[B] resampled estimates; several policies share their resamples."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form without the samples."""
        return {name: finite(value) for name, value in asdict(replace(self, samples=None)).items() if name != "samples"}


def assess(
    data: estimators.OffPolicyEpisodes,
    names: Sequence[str],
    given: Assumptions,
    *,
    unsupported: str = "",
    refits: Sequence[estimators.OffPolicyEpisodes] = (),
) -> list[Estimate]:
    """Estimate by each of `names` (keys of `ESTIMATORS`), or give the reason for a refusal.

    Args:
        data: the episodes, with a model if a doubly robust estimate is requested.
        unsupported: reason that rules out importance weights altogether (no log-probabilities, say); "": none.
        refits: the same episodes with models fitted to resamples of them. With two or more, intervals of doubly robust estimates include
            the error of the fit; otherwise they treat the model as given.
    """
    reason = unsupported or ratio_mismatch(data)
    counts = estimators.resample_counts(data.num_episodes, given.num_samples, given.seed)
    return [_assess(data, estimators.ESTIMATORS[name], given, counts, reason, refits) for name in names]


def assess_behaviour(data: estimators.OffPolicyEpisodes, given: Assumptions) -> Estimate:
    """Value of the behaviour policy, with which the target policies are compared."""
    terms = estimators.behaviour_value(data, given.gamma)
    samples = terms.values(estimators.resample_counts(data.num_episodes, given.num_samples, given.seed))
    value, concentration = terms.value(), None
    (bounded, missing), bounds = _bounded(data, given), given.return_range()
    if not missing and bounds is not None:
        concentration = estimators.empirical_bernstein(estimators.discounted_returns(bounded, given.gamma), *bounds, given.confidence)
    return Estimate("behaviour", value, _bootstrap(terms, value, samples, given), concentration, missing, samples=samples)


def assess_model(values: np.ndarray, given: Assumptions, *, refused: str = "", notes: tuple[str, ...] = ()) -> Estimate:
    """A fitted model's own estimate.

    Args:
        values: [E] mean model value of first states, for E members, each fitted to its own resample of the episodes.
        refused: reason for a refusal; "": none.
    """
    none = "a fitted model has no bound that holds without assumptions on its class"
    if refused:
        return Estimate("fqe", None, no_concentration=none, refused=refused, notes=notes)
    samples = float(values.mean()) + estimators.refit_errors(values, given.num_samples, given.seed)
    return Estimate(
        "fqe", float(values.mean()), estimators.student_interval(values, given.confidence), None, none, notes=notes, samples=samples
    )


def note_contradictions(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Add a note to each of a policy's model-based estimates whose interval is disjoint from that of an estimate without a model.

    At most one of the two contains the value. If the model is wrong, it has a bias that no resampling of the episodes shows.
    """
    models = {"fqe", *(name for name, estimator in estimators.ESTIMATORS.items() if estimator.needs_model)}
    plain = [estimate for estimate in estimates if estimate.estimator not in models and estimate.bootstrap is not None]
    noted = []
    for estimate in estimates:
        own = estimate.bootstrap
        apart = [
            f"{other.estimator} ({other.bootstrap.low:.4g} to {other.bootstrap.high:.4g})"
            for other in plain
            if own is not None and other.bootstrap is not None and (own.high < other.bootstrap.low or own.low > other.bootstrap.high)
        ]
        if estimate.estimator in models and apart:
            note = f"contradicts {', '.join(apart)}: one of them has a larger error than its interval"
            estimate = replace(estimate, notes=(*estimate.notes, note))
        noted.append(estimate)
    return noted


# ---- inside ---------------------------------------------------------------------------------------------------------

_NO_RANGE = "rewards have no known bound: set reward_range=LOW,HIGH (and with gamma=1 also a horizon)"


def _assess(
    data: estimators.OffPolicyEpisodes,
    estimator: estimators.Estimator,
    given: Assumptions,
    counts: np.ndarray,
    reason: str,
    refits: Sequence[estimators.OffPolicyEpisodes],
) -> Estimate:
    if estimator.needs_model and data.model_q is None:
        reason = reason or "it needs the fitted model, which was refused or not requested"
    if reason:
        return Estimate(estimator.name, None, refused=reason, no_concentration=reason)
    weights = describe_weights(data, given, per_decision=estimator.per_decision)
    concentration, missing = _concentration(data, estimator, given)
    if weights.ess < given.min_ess:
        refused = (
            f"the effective sample size is {weights.ess:.1f} of {data.num_episodes} episodes, below min_ess={given.min_ess:g}: "
            "the two policies differ too much for episodes of this length"
        )
        return Estimate(estimator.name, None, None, concentration, missing, weights, refused)
    terms = estimator.terms(data, given.gamma, given.max_weight)
    value, samples = terms.value(), terms.values(counts)
    if not math.isfinite(value):
        refused = "all weights are 0 at some step: the target policy would have played no episode as it was recorded"
        return Estimate(estimator.name, None, None, concentration, missing, weights, refused)
    notes = () if given.max_weight is None else (f"weights clipped at {given.max_weight:g} ({weights.cut_share:.1%} of the steps): biased",)
    if estimator.needs_model and len(refits) > 1:
        values = [estimator.terms(refit, given.gamma, given.max_weight).value() for refit in refits]
        samples = samples + estimators.refit_errors(values, given.num_samples, given.seed)
    elif estimator.needs_model:
        notes = (*notes, "the interval does not include the error of the fitted values")
    interval = _bootstrap(terms, value, samples, given)
    return Estimate(estimator.name, value, interval, concentration, missing, weights, notes=notes, samples=samples)


def _bootstrap(terms: estimators.Terms, value: float, samples: np.ndarray, given: Assumptions) -> estimators.Interval:
    if given.bootstrap == "percentile":
        return estimators.percentile_interval(samples, given.confidence)
    jackknife = terms.jackknife()
    return estimators.bca_interval(value, samples, jackknife[np.isfinite(jackknife)], given.confidence)


def describe_weights(data: estimators.OffPolicyEpisodes, given: Assumptions, *, per_decision: bool) -> Weights:
    """See `Weights`; effective sample size and share are of the weights in use, capped if `max_weight` is given."""
    raw, used = estimators.log_weights(data), estimators.log_weights(data, given.max_weight)
    last = raw[:, -1]
    ess = estimators.effective_sample_size(used[:, -1])
    if per_decision:
        importance = data.running.sum(axis=0) * estimators.discounts(used.shape[1], given.gamma)
        ess = np.average(estimators.effective_sample_size(used), weights=importance)
    with np.errstate(over="ignore"):
        largest, mean = float(np.exp(last.max())), float(np.exp(last).mean())
    cut = 0.0 if given.max_weight is None else float(np.mean(raw[data.running] > math.log(given.max_weight)))
    return Weights(float(ess), largest, float(estimators.largest_share(used[:, -1])), mean, cut)


def ratio_mismatch(data: estimators.OffPolicyEpisodes) -> str:
    """Reason why the ratios cannot be those of π to the behaviour policy; "" if they can.

    E_μ[ρ | s] = 1 at every step if μ takes every action that π takes. This compares the mean over all steps with 1; steps of an episode
    depend on each other, so the error is taken over episodes (a ratio of two means, linearised).
    """
    ratio = np.exp(np.minimum(data.log_ratio, 50.0)) * data.running
    mean = float(ratio.sum() / data.length.sum())
    if data.num_episodes < 2:
        return ""
    residual = ratio.sum(axis=1) - mean * data.length
    error = math.sqrt(float((residual**2).sum()) * data.num_episodes / (data.num_episodes - 1)) / float(data.length.sum())
    if mean + 4 * error < 1 - RATIO_TOLERANCE:
        return (
            f"support mismatch: the mean single-step ratio is {mean:.3g} ± {error:.1g} where 1 is expected, so that at least "
            f"{1 - mean - 4 * error:.0%} of the target policy's actions were almost never taken in these states"
        )
    if mean - 4 * error > 1 + RATIO_TOLERANCE:
        return (
            f"the mean single-step ratio is {mean:.3g} ± {error:.1g} where 1 is expected: the recorded log-probabilities are not the "
            "acting policy's"
        )
    return ""


def _bounded(data: estimators.OffPolicyEpisodes, given: Assumptions) -> tuple[estimators.OffPolicyEpisodes, str]:
    """(The episodes, with every reward within the stated range; why there is no concentration interval, or "").
    Raises UserError: `reward_range` is wrong."""
    if given.return_range() is None or given.reward_range is None:
        return data, _NO_RANGE
    if data.num_episodes < 2:
        return data, "it needs at least two episodes"
    if given.horizon is not None and data.reward.shape[1] > given.horizon:
        return data, f"an episode has {data.reward.shape[1]} steps, more than the horizon of {given.horizon}"
    (low, high), rewards = given.reward_range, data.reward[data.running]
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    if rewards.min() < low - slack or rewards.max() > high + slack:
        raise UserError(
            f"reward_range={low:g},{high:g} is wrong: recorded rewards reach from {rewards.min():g} to {rewards.max():g}. Give a range of "
            "all possible rewards."
        )
    # Recorded rewards are float32, in which a bound such as 0.1 is a little larger.
    return replace(data, reward=np.where(data.running, np.clip(data.reward, low, high), 0.0)), ""


def _concentration(
    data: estimators.OffPolicyEpisodes, estimator: estimators.Estimator, given: Assumptions
) -> tuple[estimators.Interval | None, str]:
    """Interval for the value itself, for any weights; only the ordinary forms have one."""
    if estimator.self_normalised or estimator.needs_model:
        other = "pdis" if estimator.per_decision else "is"
        return None, f"only sums of independent, bounded terms have one; that of '{other}' holds for the same value"
    data, missing = _bounded(data, given)
    bounds = given.return_range()
    if missing or bounds is None:
        return None, missing
    (low, high), delta = bounds, (1 - given.confidence) / 2
    above, below = (_scores(data, given, estimator.per_decision, sign) for sign in (1.0, -1.0))
    lower = low + estimators.capped_lower_bound(above, high - low, delta)
    upper = high - estimators.capped_lower_bound(below, high - low, delta)
    return estimators.Interval(lower, upper, given.confidence, "empirical Bernstein with cut weights"), ""


def _scores(data: estimators.OffPolicyEpisodes, given: Assumptions, per_decision: bool, sign: float) -> Callable[[float], np.ndarray]:
    """cap → min(w, cap) · |G − the end of its range| [N] (`sign` 1: the lower end), at most |V − that end| in expectation. `per_decision`:
    each reward's distance from the end of its range, weighted by the decisions before it."""
    bounds = given.return_range()
    assert given.reward_range is not None
    assert bounds is not None
    gammas = estimators.discounts(data.reward.shape[1], given.gamma)
    if per_decision:
        edge = min(given.reward_range[0], 0.0) if sign > 0 else max(given.reward_range[1], 0.0)
        distance = sign * (data.reward - edge) * gammas
        # Steps after the longest recorded episode earn 0, which also has a distance.
        beyond = abs(edge) * (given.total_discount - float(gammas.sum()))
    else:
        distance, beyond = sign * (data.reward @ gammas - bounds[0 if sign > 0 else 1])[:, None], 0.0

    def scores(cap: float) -> np.ndarray:
        weight = np.exp(estimators.log_weights(data, cap))
        return ((weight if per_decision else weight[:, -1:]) * distance).sum(axis=1) + weight[:, -1] * beyond

    return scores


# ---- comparing policies ---------------------------------------------------------------------------------------------


def choose_ranking(estimates: Mapping[str, Sequence[Estimate]], preference: Sequence[str]) -> str | None:
    """First estimator of `preference` that has a value for every policy; None if there is none.

    Args:
        estimates: {policy: its estimates}.
        preference: names, the most trusted first.
    """
    given = [{e.estimator for e in rows if e.value is not None} for rows in estimates.values()]
    return next((name for name in preference if given and all(name in names for names in given)), None)


def share_of_best(samples: Sequence[np.ndarray]) -> np.ndarray:
    """[P] for each of P policies, the share of shared resamples [B] in which its estimate is the highest; ties are split."""
    table = np.stack([np.nan_to_num(np.asarray(part, np.float64), nan=-np.inf) for part in samples])
    best = table == table.max(axis=0)
    return (best / best.sum(axis=0)).mean(axis=1)
