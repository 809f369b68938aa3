"""The tables of an offline study, as the console and the page show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embodied_rl.episodes.assessment import Estimate
from embodied_rl.episodes.estimators import Interval
from embodied_rl.evaluation.offline_study import OfflineStudy, PolicyResult


class Shown(NamedTuple):
    """A table of plain texts."""

    title: str
    columns: Sequence[str]
    """The first ``leading`` are names, the others figures."""
    rows: Sequence[Sequence[str]]
    leading: int = 1


def ranking(study: OfflineStudy) -> Shown:
    """The policies, the best first, where something ranks them."""
    by = study.ranked_by
    assert by is not None
    rows = []
    for place, label in enumerate(study.ranking, start=1):
        policy = study.policy(label)
        estimate, best = policy.estimate(by), f"{study.best_share[label]:.0%}"
        likelihood = f"{policy.open_loop.log_likelihood.mean:.3g}"
        rows.append((str(place), label, _number(estimate.value), _interval(estimate.bootstrap), best, likelihood))
    columns = ("", "policy", by, _bootstrap(study), "best in", "log-likelihood per step")
    return Shown(f"Ranked by {by} (γ = {study.settings.given.gamma:g})", columns, rows, leading=2)


def estimates(study: OfflineStudy, policy: PolicyResult) -> Shown:
    """All estimates of one policy, below that of the recorded one."""
    rows = []
    for estimate in all_estimates(study, policy):
        weights = estimate.weights
        cells = ("", "", "") if weights is None else (f"{weights.ess:.1f}", f"{weights.largest:.3g}", f"{weights.mean:.3g}")
        value = "refused" if estimate.refused else _number(estimate.value)
        rows.append((estimate.estimator, value, _interval(estimate.bootstrap), _interval(estimate.concentration), *cells))
    columns = ("", "value", _bootstrap(study), "concentration", "ESS", "largest weight", "mean weight")
    return Shown(f"{policy.label}: value over {study.num_episodes} episodes (γ = {study.settings.given.gamma:g})", columns, rows)


def all_estimates(study: OfflineStudy, policy: PolicyResult) -> list[Estimate]:
    """Those of `estimates`, in its order."""
    return [*([study.behaviour] if study.behaviour else []), *policy.estimates]


def open_loop(study: OfflineStudy) -> Shown:
    """Predicted against recorded actions, a row per policy."""
    first = study.policies[0].open_loop
    rows = []
    for policy in study.policies:
        loop = policy.open_loop
        distances: tuple[str, ...] = ()
        if loop.mse is not None and loop.mae is not None:
            explained = [value for value in loop.explained_by_dim if value == value]
            distances = (f"{loop.mse.mean:.4g}", f"{loop.mae.mean:.4g}", f"{sum(explained) / max(len(explained), 1):.1%}")
        likelihood = f"{loop.log_likelihood.mean:.4g} ({_interval(loop.log_likelihood.interval)})"
        rows.append((policy.label, *distances, f"{loop.accuracy.mean:.1%}", f"{loop.majority:.1%}", likelihood))
    distances = ("MSE", "MAE", "explained") if first.mse is not None else ()
    columns = ("policy", *distances, "same bin" if first.num_bins else "accuracy", "always the most frequent", "log-likelihood per step")
    asked = "step" if first.horizon == 1 else f"{first.horizon} steps"
    bins = f", {first.num_bins} bins" if first.num_bins else ""
    return Shown(f"Open loop, {first.num_episodes} episodes, asked every {asked}{bins}", columns, rows)


def by_dimension(policies: Sequence[PolicyResult]) -> Shown:
    """The same for each dimension of the action; no rows where actions are choices."""
    rows = []
    for policy in policies:
        loop = policy.open_loop
        for dim, (mse, mae) in enumerate(zip(loop.mse_by_dim, loop.mae_by_dim, strict=True)):
            explained = loop.explained_by_dim[dim]
            shares = ("" if explained != explained else f"{explained:.1%}", f"{loop.accuracy_by_dim[dim]:.1%}")
            rows.append((policy.label if dim == 0 else "", f"dimension {dim}", f"{mse:.4g}", f"{mae:.4g}", *shares))
    return Shown("By dimension", ("policy", "", "MSE", "MAE", "explained", "same bin"), rows, leading=2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.4g} to {interval.high:.4g}"


def _bootstrap(study: OfflineStudy) -> str:
    return f"{100 * study.settings.given.confidence:.3g}% bootstrap"
