"""Offline evaluation of checkpoints on a recording: open-loop errors and estimates of the return, without a simulator.

Shape legend: N episodes, T steps of the longest, M steps of all, K draws, E members of the fitted-Q ensemble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from embodied_rl.algorithms.fitted_q import FittedQ, FittedQConfig, RecordedSteps, fit_q
from embodied_rl.checkpoint import Checkpoint
from embodied_rl.episodes import assessment
from embodied_rl.episodes.estimators import ESTIMATORS, OffPolicyEpisodes, effective_sample_size, log_weights, stack
from embodied_rl.episodes.recording import Recording
from embodied_rl.errors import UserError, require_known
from embodied_rl.evaluation.offline_policy import (
    Mode,
    PlayedEpisode,
    ScoredEpisode,
    TargetPolicy,
    deterministic_behaviour,
    load_target,
    score_recording,
    weights_unsupported,
)
from embodied_rl.files import finite

ALL_ESTIMATORS = (*ESTIMATORS, "fqe")
PREFERENCE = ("wdr", "wpdis", "fqe", "dr", "pdis", "wis", "is")
"""Estimators that may rank policies; the first with a value for all of them does."""
MAX_OUTSIDE = 0.1
"""Share of a target's actions that may be outside everything recorded; with more, fitted values are refused."""
MAX_TAIL = 0.01
"""Largest discount at the cut with which importance sampling is valid for episodes without a limit."""
MIN_FITTED = 8
"""Least episodes for a fitted model."""
NUM_EXAMPLES = 3


@dataclass(frozen=True)
class OfflineSettings:
    """Estimators and their options."""

    given: assessment.Assumptions = field(default_factory=assessment.Assumptions)
    """Assumptions of the estimators; a `horizon` of None becomes the recording's step limit."""
    estimators: tuple[str, ...] = ALL_ESTIMATORS
    """Estimators to compute; () gives only open-loop figures."""
    target: Mode = "sample"
    truncation: Literal["end", "bootstrap"] = "end"
    """end: value of episodes as they were recorded, cuts included, which `evaluate` would measure. bootstrap: value of episodes that
    continue after a cut, from the fitted values."""
    fitted_q: FittedQConfig = field(default_factory=FittedQConfig)
    num_draws: int = 8
    """K: actions drawn in each state for the expectations of fitted-Q evaluation."""
    task: str | None = None
    horizon: int | None = None
    """Steps after which episodes are cut; None: whole episodes."""
    max_episodes: int | None = None
    num_bins: int = assessment.DEFAULT_BINS

    def __post_init__(self) -> None:
        for name in self.estimators:
            require_known(name, ALL_ESTIMATORS, f"estimators: '{name}' is not a choice.")

    @property
    def needs_model(self) -> bool:
        return "fqe" in self.estimators or any(ESTIMATORS[name].needs_model for name in self.estimators if name in ESTIMATORS)


@dataclass(frozen=True, eq=False)
class Example:
    """One episode's actions, for a plot."""

    number: int
    seed: int
    recorded: np.ndarray
    """[T, A] in the simulator's units; choices [T, 1]."""
    predicted: np.ndarray
    """[T, A]"""


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """Results of one target policy."""

    label: str
    path: str
    step: int
    """Environment steps of its training."""
    open_loop: assessment.OpenLoop
    estimates: tuple[assessment.Estimate, ...]
    ess_by_step: np.ndarray | None
    """[T] effective sample size of the weights up to each step; None if there are no weights."""
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, without arrays."""
        estimates = {estimate.estimator: estimate.to_dict() for estimate in self.estimates}
        head = {"label": self.label, "checkpoint": self.path, "step": self.step}
        return {**head, "open_loop": finite(asdict(self.open_loop)), "estimates": estimates}

    def estimate(self, name: str) -> assessment.Estimate:
        return next(estimate for estimate in self.estimates if estimate.estimator == name)


@dataclass(frozen=True, eq=False)
class OfflineStudy:
    """Results of an offline evaluation."""

    settings: OfflineSettings
    num_episodes: int
    """Complete episodes, the basis of the estimates."""
    num_steps: int
    num_incomplete: int
    """Episodes without an end, because the recorder was stopped; they count in the open-loop figures only."""
    behaviour: assessment.Estimate | None
    """Value of the policy that acted; None if no estimate was requested."""
    policies: tuple[PolicyResult, ...]
    ranked_by: str | None
    """Estimator that orders the policies; None if none has a value for all."""
    ranking: tuple[str, ...]
    """Labels, the best first; in the given order if nothing ranks them."""
    best_share: Mapping[str, float]
    """{label: share of the resamples in which it is the best}; empty if nothing ranks them."""
    notes: tuple[str, ...]

    def policy(self, label: str) -> PolicyResult:
        return next(policy for policy in self.policies if policy.label == label)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, without arrays."""
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items() if name != "policies"}
        own |= {"settings": asdict(self.settings), "behaviour": None if self.behaviour is None else self.behaviour.to_dict()}
        return {**own, "best_share": dict(self.best_share), "policies": [policy.to_dict() for policy in self.policies]}


def study_recording(
    recording: Recording,
    checkpoints: Sequence[tuple[str, Checkpoint]],
    settings: OfflineSettings,
    *,
    on_episode: Callable[[int], object] | None = None,
    on_fit: Callable[[str, int], object] | None = None,
) -> OfflineStudy:
    """Evaluate checkpoints on a recording.

    Args:
        recording: result of `embodied_rl.episodes.reader.open_recording`.
        checkpoints: (label, checkpoint); labels differ.
        on_episode: called with 1 after each episode that was read.
        on_fit: called with a policy's label and the number of regression steps since the last call.

    Raises UserError: a checkpoint does not fit the recording, or no episode is left; RecordingError: an episode is damaged.
    """
    targets = [load_target(checkpoint, label, recording.info, settings.target) for label, checkpoint in checkpoints]
    if settings.given.horizon is None and settings.truncation == "end":
        limits = (settings.horizon, recording.info.sim.get("max_episode_steps"), recording.info.spec.max_episode_steps)
        limit = min((int(limit) for limit in limits if limit), default=None)
        settings = replace(settings, given=replace(settings.given, horizon=limit))
    episodes, scores = score_recording(
        recording,
        targets,
        horizon=settings.horizon,
        task=settings.task,
        max_episodes=settings.max_episodes,
        num_draws=settings.num_draws if settings.needs_model else 0,
        seed=settings.given.seed,
        on_episode=on_episode,
    )
    complete = [index for index, episode in enumerate(episodes) if episode.complete]
    if settings.estimators and not complete:
        raise UserError("No recorded episode ends, so no return is known. Use estimators=none for open-loop figures only.")
    behaviour = None
    if settings.estimators:
        # Before the fits, which take long: a wrong reward_range is an error.
        behaviour = assessment.assess_behaviour(stack([episodes[index].reward for index in complete]), settings.given)
    results = [_study_policy(recording, target, episodes, scores[target.label], settings, on_fit) for target in targets]
    ranked_by, ranking, best = _rank(results)
    return OfflineStudy(
        settings=settings,
        num_episodes=len(complete),
        num_steps=sum(episode.num_steps for episode in episodes),
        num_incomplete=len(episodes) - len(complete),
        behaviour=behaviour,
        policies=tuple(results),
        ranked_by=ranked_by,
        ranking=ranking,
        best_share=best,
        notes=_notes(recording, episodes, settings),
    )


def _study_policy(
    recording: Recording,
    target: TargetPolicy,
    episodes: Sequence[PlayedEpisode],
    scores: Sequence[ScoredEpisode],
    settings: OfflineSettings,
    on_fit: Callable[[str, int], object] | None,
) -> PolicyResult:
    spec, given = recording.info.spec, settings.given
    open_loop = assessment.compare(
        [score.predicted for score in scores],
        [episode.action for episode in episodes],
        [score.log_prob for score in scores],
        spec.action,
        horizon=target.horizon,
        num_bins=target.num_bins or settings.num_bins,
        confidence=given.confidence,
        seed=given.seed,
    )
    ended = [pair for pair in zip(episodes, scores, strict=True) if pair[0].complete]
    estimates: tuple[assessment.Estimate, ...] = ()
    ess = None
    if settings.estimators:
        case = _Case(recording, target, [episode for episode, _ in ended], [score for _, score in ended], settings)
        estimates, ess = case.estimate(None if on_fit is None else partial(on_fit, target.label))
    examples = tuple(
        Example(episodes[index].number, episodes[index].seed, episodes[index].action, scores[index].predicted)
        for index in range(min(NUM_EXAMPLES, len(episodes)))
    )
    return PolicyResult(target.label, target.path, target.step, open_loop, estimates, ess, examples)


@dataclass(frozen=True, eq=False)
class _Case:
    """The complete episodes as one target policy sees them, on the way to its estimates."""

    recording: Recording
    target: TargetPolicy
    episodes: Sequence[PlayedEpisode]
    scores: Sequence[ScoredEpisode]
    settings: OfflineSettings

    def estimate(self, on_step: Callable[[int], object] | None) -> tuple[tuple[assessment.Estimate, ...], np.ndarray | None]:
        """All estimates, and the effective sample size of the weights up to each step [T]."""
        settings, given = self.settings, self.settings.given
        fitted, refused = self._fit(on_step) if settings.needs_model else (None, "not asked for")
        no_weights = weights_unsupported(self.recording.info, self.episodes, self.target) or self._cut_short()
        ratios = None
        if not no_weights:
            pairs = zip(self.episodes, self.scores, strict=True)
            ratios = [score.log_prob.sum(axis=1) - episode.log_prob.sum(axis=1) for episode, score in pairs if episode.log_prob is not None]
        data = stack([episode.reward for episode in self.episodes], ratios)
        refits: list[OffPolicyEpisodes] = []
        if fitted is not None:
            models = zip(fitted.member_q, fitted.member_v, strict=True)
            refits = [] if no_weights else [self._with_model(data, q, v) for q, v in models]
            data = self._with_model(data, fitted.q, fitted.v)
        names = [name for name in settings.estimators if name in ESTIMATORS]
        estimates = assessment.assess(data, names, given, unsupported=no_weights, refits=refits)
        if "fqe" in settings.estimators:
            values, notes = (np.zeros(0), ()) if fitted is None else (fitted.values, self._fit_notes(fitted))
            if fitted is not None and not no_weights and assessment.ratio_mismatch(data):
                notes = (*notes, "the recording has few of the target policy's actions in these states: these values are extrapolated")
            estimates.append(assessment.assess_model(values, given, refused=refused, notes=notes))
        ess = None if no_weights else effective_sample_size(log_weights(data, given.max_weight))
        return tuple(assessment.note_contradictions(estimates)), ess

    # ---- fitted values ----

    def _fit(self, on_step: Callable[[int], object] | None) -> tuple[FittedQ | None, str]:
        """Fitted-Q evaluation of the target, or (None, why it is refused)."""
        settings, given = self.settings, self.settings.given
        if refused := self._fit_unsupported():
            return None, refused
        steps = recorded_steps(self.episodes, self.scores, truncation=settings.truncation, limit=given.horizon)
        rewards = np.concatenate([episode.reward for episode in self.episodes])
        seen = given.reward_range or (float(rewards.min()), float(rewards.max()))
        # Bounds of the sums of rewards like the recorded ones.
        possible = replace(given, reward_range=seen, horizon=given.horizon if settings.truncation == "end" else None)
        try:
            return fit_q(steps, given.gamma, settings.fitted_q, reachable=possible.return_range(), on_step=on_step), ""
        except FloatingPointError as error:
            return None, f"{error}: set a smaller fqe.learning_rate"

    def _fit_unsupported(self) -> str:
        info, settings = self.recording.info, self.settings
        if reason := info.selected_by_outcome:
            return reason
        if self.target.horizon != 1:
            return f"fitted values need single decisions, and this policy decides {self.target.horizon} steps at once"
        if len(self.episodes) < MIN_FITTED:
            return f"{len(self.episodes)} episodes are too few to fit values to; at least {MIN_FITTED} are needed"
        if settings.given.gamma >= 1 and settings.truncation == "bootstrap":
            return "gamma must be below 1 where cut episodes are continued (truncation=bootstrap)"
        if reason := deterministic_behaviour(info, self.episodes):
            return f"deterministic behaviour: {reason}, so the values of other actions are unknown"
        share = outside_share(self.episodes, self.scores)
        if share > MAX_OUTSIDE:
            return f"support mismatch: {share:.0%} of the target policy's actions lie outside the recorded range"
        return ""

    def _fit_notes(self, fitted: FittedQ) -> tuple[str, ...]:
        notes = ["the interval covers the choice of episodes and the randomness of the fit, but not the errors that all fits share"]
        spread = float(fitted.values.std(ddof=1)) if len(fitted.values) > 1 else 0.0
        if abs(fitted.drift) > max(spread, 1e-9):
            notes.append(f"not converged ({fitted.drift:+.3g} in the last steps): increase fqe.num_steps")
        if any(episode.log_prob is None for episode in self.episodes):
            notes.append(
                "it is unknown how the recorded actions were sampled: a deterministic player gives no information on other actions"
            )
        return tuple(notes)

    # ---- weights ----

    def _with_model(self, data: OffPolicyEpisodes, q: np.ndarray, v: np.ndarray) -> OffPolicyEpisodes:
        """The episodes with a model's Q of their steps [M] and V of their states [S]."""
        # The model's values are concatenated over all episodes; an episode has one state more than steps.
        ends = np.cumsum([episode.num_steps for episode in self.episodes])
        model_q = np.split(q, ends[:-1])
        model_v = np.split(v.copy(), (ends + np.arange(1, len(ends) + 1))[:-1])
        for episode, values in zip(self.episodes, model_v, strict=True):
            if episode.terminated or self.settings.truncation == "end":
                values[-1] = 0.0
        padded = stack([episode.reward for episode in self.episodes], model_q=model_q, model_v=model_v)
        return replace(data, model_q=padded.model_q, model_v=padded.model_v)

    def _cut_short(self) -> str:
        """Why importance weights cannot give the value of episodes that continue after a cut; "" if they can."""
        tails = [self.settings.given.gamma**episode.num_steps for episode in self.episodes if episode.truncated]
        if self.settings.truncation == "end" or not tails or max(tails) <= MAX_TAIL:
            return ""
        return (
            f"{len(tails)} of {len(self.episodes)} episodes were cut with up to {max(tails):.0%} of their discount left, and weights "
            "cannot estimate the rest: use truncation=end, or fqe"
        )


def recorded_steps(
    episodes: Sequence[PlayedEpisode], scores: Sequence[ScoredEpisode], *, truncation: str, limit: int | None
) -> RecordedSteps:
    """The episodes as rows for the regression.

    If episodes end when they are cut, a state's value depends on the remaining time. Then the time since the episode's start, as a share of
    `limit` (of the longest episode if it is None), is an additional feature.
    """
    longest = limit or max(episode.num_steps for episode in episodes)
    features, continues = [], []
    for episode, score in zip(episodes, scores, strict=True):
        part = episode.vectors if episode.vectors is not None else score.features
        assert part is not None
        if truncation == "end":
            part = np.concatenate([part, (np.arange(len(part), dtype=np.float32) / longest)[:, None]], axis=1)
        features.append(part)
        goes_on = np.ones(episode.num_steps, bool)
        goes_on[-1] = truncation == "bootstrap" and not episode.terminated
        continues.append(goes_on)
    lengths = np.array([episode.num_steps for episode in episodes])
    first = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]])
    state = np.concatenate([start + np.arange(length) for start, length in zip(first, lengths, strict=True)])
    discrete = scores[0].probability is not None
    target_parts = [score.probability if discrete else score.draws for score in scores]
    of_target = torch.from_numpy(np.concatenate([part for part in target_parts if part is not None]).astype(np.float32))
    return RecordedSteps(
        features=torch.from_numpy(np.concatenate(features).astype(np.float32)),
        state=torch.from_numpy(state),
        next_state=torch.from_numpy(state + 1),
        action=torch.from_numpy(np.concatenate([episode.scaled_action for episode in episodes])),
        reward=torch.from_numpy(np.concatenate([episode.reward for episode in episodes]).astype(np.float32)),
        continues=torch.from_numpy(np.concatenate(continues)),
        episode=torch.from_numpy(np.repeat(np.arange(len(episodes)), lengths)),
        first_state=torch.from_numpy(first),
        draws=None if discrete else of_target,
        probability=of_target if discrete else None,
    )


def outside_share(episodes: Sequence[PlayedEpisode], scores: Sequence[ScoredEpisode]) -> float:
    """Share of the target's actions in the recorded states outside the range of all recorded ones: probability of choices that were never
    made, or vector entries beyond the smallest and largest of their dimension."""
    done = np.concatenate([episode.scaled_action for episode in episodes])
    if scores[0].probability is not None:
        never = np.ones(scores[0].probability.shape[1], bool)
        never[np.unique(done)] = False
        of_never = [score.probability[:, never].sum(axis=1) for score in scores if score.probability is not None]
        return float(np.concatenate(of_never).mean())
    # Up to 5% beyond the range is close enough for a smooth regression.
    low, high = done.min(axis=0), done.max(axis=0)
    slack = 0.05 * (high - low) + 1e-6
    outside = [((score.draws < low - slack) | (score.draws > high + slack)).mean() for score in scores if score.draws is not None]
    return float(np.mean(outside))


# ---- ranking ----------------------------------------------------------------------------------------------------------


def _rank(results: Sequence[PolicyResult]) -> tuple[str | None, tuple[str, ...], dict[str, float]]:
    labels = tuple(result.label for result in results)
    name = assessment.choose_ranking({result.label: result.estimates for result in results}, PREFERENCE)
    if name is None:
        return None, labels, {}
    estimates = {result.label: result.estimate(name) for result in results}
    order = tuple(sorted(labels, key=lambda label: -(estimates[label].value or 0.0)))
    samples = [estimates[label].samples for label in labels]
    shares = assessment.share_of_best([part for part in samples if part is not None])
    return name, order, dict(zip(labels, shares.tolist(), strict=True))


def _notes(recording: Recording, episodes: Sequence[PlayedEpisode], settings: OfflineSettings) -> tuple[str, ...]:
    notes = []
    tasks = sorted({str(name) for name in recording.tasks})
    if len(tasks) > 1 and settings.task is None:
        notes.append(f"the recording mixes {len(tasks)} tasks ({', '.join(tasks[:5])}): figures are of the mixture; task=NAME selects one")
    if settings.target == "mode":
        notes.append("targets are the policies' most likely actions, as in `evaluate`")
    if settings.truncation == "bootstrap":
        notes.append("values are for episodes without a step limit, which `evaluate` has")
    incomplete = sum(not episode.complete for episode in episodes)
    if incomplete:
        notes.append(f"{incomplete} unfinished episodes are used only for the open-loop figures")
    return tuple(notes)
