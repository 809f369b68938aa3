"""Recorded episodes from the view of target policies: their actions, and their probability of the recorded actions.

No simulator is needed: the spaces come from the recording, the networks from the checkpoints. Episodes are read one at a time, and pictures
are freed as soon as the policies have seen them.

Shape legend: T steps of an episode, A action dimensions, L units that each have a log-probability, C choices, D features, K draws, H action
horizon, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from embodied_rl.checkpoint import Checkpoint, check_compatible
from embodied_rl.config import PolicyConfig
from embodied_rl.episodes.assessment import chunks_of, query_steps, steps_of
from embodied_rl.episodes.recording import RecordedEpisode, Recording, RecordingInfo, not_finite
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.policies.base import Policy, given_action, prepare_observation
from embodied_rl.policies.build import build_policy
from embodied_rl.resuming import load_policy
from embodied_rl.types import Observation, SimSpec

Mode = Literal["sample", "mode"]
"""sample: the policy with its exploration. mode: its most likely action, as in `evaluate`."""

_DRAWING = 0xD4A3
_UNIFORM_LOG_DENSITY = float(np.log(0.5))
"""Log-density of a number drawn uniformly from [-1, 1]."""


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """One recorded episode, without the parts that only policies read."""

    number: int
    seed: int
    action: np.ndarray
    """[T, A] in the simulator's units."""
    scaled_action: np.ndarray
    """[T, A] float32 scaled to [-1, 1] (int64 [T, 1] for choices): the policy's output as the simulator applied it."""
    drawn: np.ndarray | None
    """[T, A] actions that the log-probabilities refer to: unclipped vectors, or choices; None: unknown."""
    log_prob: np.ndarray | None
    """[T, L] under the policy that acted; None: not recorded."""
    reward: np.ndarray
    """[T] float64"""
    terminated: bool
    truncated: bool
    """Whether a step limit or horizon cut it. If it neither terminated nor was truncated, the recorder was stopped in its middle."""
    vectors: np.ndarray | None
    """[T + 1, D] float32 flat parts of the observation, concatenated; None: there are none."""

    @property
    def complete(self) -> bool:
        return self.terminated or self.truncated

    @property
    def num_steps(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, eq=False)
class ScoredEpisode:
    """A target policy's view of one recorded episode."""

    predicted: np.ndarray
    """[T, A] its most likely actions in the simulator's units, predicted every H steps."""
    log_prob: np.ndarray
    """[T, L] of the recorded action (as drawn, if known)."""
    draws: np.ndarray | None
    """[T + 1, K, A] float32 actions drawn in each state, scaled and clipped to [-1, 1]; None for choices, for H > 1 and for K = 0."""
    probability: np.ndarray | None
    """[T + 1, C] of each choice; None for vectors, for H > 1 and for K = 0."""
    features: np.ndarray | None
    """[T + 1, D] float32 the policy's own features; only if the observation has no flat parts."""


class TargetPolicy:
    """A checkpoint's policy on recorded observations. Made by `load_target`."""

    rows_at_once = 2048
    """Observations per forward pass."""

    def __init__(
        self, label: str, policy: Policy, spec: SimSpec, *, mode: Mode = "sample", bounded: bool = False, horizon: int = 1
    ) -> None:
        self.label, self.policy, self.spec, self.mode, self.keys = label, policy, spec, mode, policy.observation_keys
        self.horizon = horizon
        """H: actions from one observation."""
        self.num_bins: int | None = None
        """Bins of an action dimension, for a policy with action tokens."""
        self._bounded = bounded
        self.path, self.step = "", 0

    @property
    def has_density(self) -> bool:
        """Whether its log-probabilities are meaningful: the mode of a vector has all its mass in one point."""
        return self.mode == "sample" or self.spec.action.kind == "discrete"

    def predict(self, observation: Observation) -> np.ndarray:
        """[Q, H, A] the most likely actions, normalised and unclipped."""
        return self._chunks(self._by_rows(observation, lambda part, _: self.policy.act(part, None).action))

    def log_prob(self, observation: Observation, chunks: np.ndarray) -> np.ndarray:
        """[Q, H, L] of normalised, unclipped actions [Q, H, A] that were drawn independently; −inf for impossible actions."""
        action = self.spec.action
        if action.kind == "discrete" and self.mode == "mode":
            return np.where(self.predict(observation) == chunks, 0.0, -np.inf)
        flat = torch.from_numpy(np.array(chunks).reshape(len(chunks), -1))
        result = self._by_rows(observation, partial(self._log_prob_of, flat))
        log_prob = result.reshape(len(chunks), self.horizon, -1).astype(np.float64)
        # The squashed policy's own arithmetic moves values outside to the edge.
        return np.where(np.abs(chunks) > 1, -np.inf, log_prob) if self._bounded else log_prob

    def draw(self, observation: Observation, num_draws: int, random: np.random.Generator) -> np.ndarray:
        """[S, K, A] actions in each state, normalised and unclipped; only the mode, K = 1, if that is the policy."""
        if self.mode == "mode":
            return self.predict(observation)
        rows = len(next(iter(observation.values())))
        noise = [torch.from_numpy(self.policy.action_layout.noise(random, (rows,))) for _ in range(num_draws)]
        return np.concatenate([self._chunks(self._by_rows(observation, partial(self._act_with, one))) for one in noise], axis=1)

    def probability(self, observation: Observation) -> np.ndarray:
        """[S, C] of each choice."""
        choices = self.spec.action.num_actions
        if self.mode == "mode":
            return np.eye(choices)[self.predict(observation)[:, 0, 0]]
        rows = len(next(iter(observation.values())))
        columns = [self._by_rows(observation, partial(self._log_prob_of, torch.full((rows, 1), choice))) for choice in range(choices)]
        return np.exp(np.stack([column.sum(axis=1) for column in columns], axis=1).astype(np.float64))

    def features(self, observation: Observation) -> np.ndarray:
        """[S, D] inputs of the policy's last layers. Raises UserError if the policy has none."""
        if self.policy.num_features is None:
            raise UserError(f"'{self.label}': the policy offers no features, and the observation has no flat part to fit values to.")
        return self._by_rows(observation, lambda part, _: self.policy.features(part))

    def _chunks(self, units: np.ndarray) -> np.ndarray:
        """Actions of the policy [Q, L] → [Q, H, A] normalised."""
        return units.reshape(len(units), self.horizon, -1)

    def _act_with(self, noise: torch.Tensor, part: dict[str, torch.Tensor], rows: slice) -> torch.Tensor:
        return self.policy.act(part, noise[rows]).action

    def _log_prob_of(self, actions: torch.Tensor, part: dict[str, torch.Tensor], rows: slice) -> torch.Tensor:
        return self.policy.evaluate(part, actions[rows]).log_prob

    @torch.inference_mode()
    def _by_rows(self, observation: Observation, compute: Callable[[Any, slice], torch.Tensor]) -> np.ndarray:
        # Copies: a recording's arrays may be read-only.
        ready = prepare_observation(self.policy, {key: np.array(observation[key]) for key in self.keys})
        rows = len(next(iter(ready.values())))
        slices = [slice(first, min(first + self.rows_at_once, rows)) for first in range(0, rows, self.rows_at_once)]
        return torch.cat([compute({key: part[at] for key, part in ready.items()}, at) for at in slices]).numpy()


class TokenTarget(TargetPolicy):
    """A policy whose actions are chunks of tokens (`tiny_vla`, `openvla`, `openvla_oft`), with the tokens' log-probabilities."""

    rows_at_once = 256  # it reads images

    def __init__(self, label: str, policy: Policy, spec: SimSpec, *, mode: Mode) -> None:
        """Raises UserError if the policy cannot map recorded actions to tokens."""
        super().__init__(label, policy, spec, mode=mode)
        self._layout = policy.action_layout
        if policy.action_tokens is None or self._layout.dtype != "int64":  # OpenVLA's regression head has tokens that it does not use
            raise UserError(
                f"offline_eval scores recorded actions by their likelihood, but the policy of '{label}' ({type(policy).__name__}) cannot "
                "compute it. Use evaluate, with the simulator."
            )
        self.horizon, self.num_bins = self._layout.chunk_size, policy.action_tokens.num_bins - 1
        self._steps = self._layout.unit_steps(spec.action.dim)

    @property
    def has_density(self) -> bool:
        return self.mode == "sample"

    def log_prob(self, observation: Observation, chunks: np.ndarray) -> np.ndarray:
        return self._by_step(observation, self.policy.units_of(torch.from_numpy(np.clip(chunks, -1.0, 1.0).astype(np.float32))))

    def token_log_prob(self, observation: Observation, tokens: np.ndarray, action: np.ndarray) -> np.ndarray | None:
        """[Q, H, L / H] of recorded tokens [Q, H, A]; None if they come from another tokenizer and do not mean the recorded actions.

        Two tokens mean the topmost action, so the action does not show which one was drawn.
        """
        flat = tokens.reshape(len(tokens), -1)
        with np.errstate(all="ignore"):
            meant = self._chunks(flat)
        if not np.allclose(meant, action, atol=1e-4):
            return None
        return self._by_step(observation, torch.from_numpy(flat.astype(np.int64)))

    def _by_step(self, observation: Observation, units: torch.Tensor) -> np.ndarray:
        found = self._by_rows(observation, partial(self._log_prob_of, units)).astype(np.float64)
        return np.stack([found[:, self._steps == step] for step in range(self.horizon)], axis=1)

    def _chunks(self, units: np.ndarray) -> np.ndarray:
        given = given_action(self.policy, units)
        return self.spec.action.normalise(given.reshape(len(units), self.horizon, -1))


def load_target(checkpoint: Checkpoint, label: str, info: RecordingInfo, mode: Mode = "sample") -> TargetPolicy:
    """Policy of a checkpoint, for a recording.

    Raises:
        IncompatibleCheckpointError: its spaces differ from the recording's, or its tensors do not fit.
        UserError: actions are texts, or come from denoising, which has no likelihood of a recorded action.
    """
    own = checkpoint.config.policy
    if info.spec.action.kind == "text":
        raise UserError("offline_eval is for recordings with vector or discrete actions; this one's actions are texts.")
    # Parts of a recording that the policy was not trained with do no harm.
    shared = {key: part for key, part in info.spec.observation.items() if key in checkpoint.spec.observation}
    # An imported recording has the task name of its own format.
    check_compatible(checkpoint, replace(info.spec, observation=shared), same_task=bool(info.sim))
    module = build_policy(own, checkpoint.spec)
    load_policy(module, checkpoint)
    module.train(False)
    if isinstance(own, PolicyConfig):
        bounded = own.distribution == "squashed" and checkpoint.spec.action.kind == "continuous"
        target = TargetPolicy(label, module, checkpoint.spec, mode=mode, bounded=bounded)
    else:
        target = TokenTarget(label, module, checkpoint.spec, mode=mode)
    target.path, target.step = str(checkpoint.path), checkpoint.step
    return target


# ---- reading --------------------------------------------------------------------------------------------------------


def score_recording(
    recording: Recording,
    targets: Sequence[TargetPolicy],
    *,
    horizon: int | None = None,
    task: str | None = None,
    max_episodes: int | None = None,
    num_draws: int = 8,
    seed: int = 0,
    on_episode: Callable[[int], object] | None = None,
) -> tuple[tuple[PlayedEpisode, ...], dict[str, list[ScoredEpisode]]]:
    """Read a recording once and let every target score each episode: (episodes, {label of a target: its view of each}).

    Args:
        targets: policies whose spaces are the recording's.
        horizon: cut episodes after so many steps; None: whole ones.
        task: only episodes of this task; None: all.
        max_episodes: only the episodes of the lowest seeds; None: all.
        num_draws: K; 0: neither draws nor probabilities of choices are needed.
        on_episode: called with 1 after each episode, for a progress bar.

    Raises UserError: no episode is left, or one has non-finite numbers; RecordingError: an episode is damaged.
    """
    tasks = [str(name) for name in recording.tasks]
    numbers = [number for number, name in enumerate(tasks) if task is None or name == task]
    # By seed: a recording begins with the episodes that ended first, and those are the short ones. A seed below 0 is a number in the file.
    numbers = sorted(sorted(numbers, key=lambda number: abs(int(recording.seeds[number])))[:max_episodes])
    if not numbers:
        raise UserError(f"The recording has no episode of task '{task}'.{did_you_mean(str(task), tasks)}" if task else "No episodes left.")
    random = np.random.default_rng([seed, _DRAWING])
    played: list[PlayedEpisode] = []
    scores: dict[str, list[ScoredEpisode]] = {target.label: [] for target in targets}
    for number in numbers:
        episode = recording.episode(number)
        steps = episode.num_steps if horizon is None else min(horizon, episode.num_steps)
        tokens = None
        if drew_tokens(recording.info):  # a token's number is no vector in [-1, 1]
            tokens = None if episode.sampled_action is None else np.array(episode.sampled_action[:steps])
            episode = replace(episode, sampled_action=None)
        cut = played_episode(episode, number, recording.info.spec, steps)
        played.append(cut)
        observation = {key: part[: steps + 1] for key, part in episode.observation.items()}
        for target in targets:
            scores[target.label].append(score_episode(target, cut, observation, num_draws, random, tokens))
        if on_episode is not None:
            on_episode(1)
    return tuple(played), scores


def played_episode(episode: RecordedEpisode, number: int, spec: SimSpec, num_steps: int) -> PlayedEpisode:
    """The first `num_steps` of a recorded episode. Raises UserError for a non-finite number, among them a bound of the actions."""
    rows = slice(0, num_steps)
    whole = num_steps == episode.num_steps
    # Copies: a recording's arrays end with it, and may be read-only.
    action = np.array(episode.action[rows], np.int64 if spec.action.kind == "discrete" else None)
    drawn = episode.sampled_action if episode.sampled_action is not None else episode.action if spec.action.kind == "discrete" else None
    parts = [episode.observation[key] for key, part in spec.tensors.items() if len(part.shape) == 1]
    vectors = np.concatenate([part[: num_steps + 1].astype(np.float32) for part in parts], axis=1) if parts else None
    log_prob = None if episode.log_prob is None else episode.log_prob[rows].astype(np.float64)
    for name, part in (("log_prob", log_prob), ("reward", episode.reward[rows]), ("observation", vectors), ("sampled_action", drawn)):
        if part is not None and (bad := not_finite(part)) is not None:
            raise UserError(f"Episode {number} (seed {episode.seed}) has a non-finite {name} at step {bad[0]}.")
    return PlayedEpisode(
        number=number,
        seed=episode.seed,
        action=action,
        scaled_action=spec.action.normalise(action),
        drawn=None if drawn is None else np.array(drawn[rows], np.int64 if spec.action.kind == "discrete" else np.float32),
        log_prob=log_prob,
        reward=episode.reward[rows].astype(np.float64),
        terminated=whole and bool(episode.terminated[-1]),
        truncated=not whole or bool(episode.truncated[-1] and not episode.terminated[-1]),
        vectors=vectors,
    )


def score_episode(
    target: TargetPolicy,
    episode: PlayedEpisode,
    observation: Observation,
    num_draws: int,
    random: np.random.Generator,
    tokens: np.ndarray | None = None,
) -> ScoredEpisode:
    """A target's view of one episode and its T + 1 observations; `tokens` [T, A]: the tokens drawn for its actions."""
    steps, horizon = episode.num_steps, target.horizon
    asked = {key: observation[key][query_steps(steps, horizon)] for key in target.keys}
    done = episode.scaled_action if episode.drawn is None else episode.drawn
    predicted = steps_of(target.predict(asked), steps)
    likelihood: np.ndarray | None = None
    if tokens is not None and isinstance(target, TokenTarget):
        likelihood = target.token_log_prob(asked, chunks_of(tokens, horizon), chunks_of(done, horizon))
    log_prob = steps_of(target.log_prob(asked, chunks_of(done, horizon)) if likelihood is None else likelihood, steps)
    draws = probability = features = None
    if horizon == 1 and num_draws > 0:
        seen = {key: observation[key] for key in target.keys}
        if target.spec.action.kind == "discrete":
            probability = target.probability(seen)
        else:
            draws = np.clip(target.draw(seen, num_draws, random), -1.0, 1.0)
        features = target.features(seen) if episode.vectors is None else None
    return ScoredEpisode(target.spec.action.denormalise(predicted), log_prob, draws, probability, features)


# ---- reasons against importance weights -------------------------------------------------------------------------------


def drew_tokens(info: RecordingInfo) -> bool:
    """Whether the policy that acted drew units (tokens or chunks): its log-probabilities refer to them, not to vectors."""
    return info.policy.get("units") is not None


def deterministic_behaviour(info: RecordingInfo, episodes: Sequence[PlayedEpisode]) -> str:
    """Why the policy that acted must have been deterministic; "" if it may have drawn its actions.

    The recording may say so. Otherwise its log-probabilities show it: choices of probability 1, or vectors with the same density at every
    step (that of the distribution's mode) other than the uniform one.
    """
    if info.policy.get("sample") is False or info.policy.get("deterministic") is True:
        return "the recording says that the policy took its most likely actions"
    known = [episode.log_prob for episode in episodes if episode.log_prob is not None]
    if not known or sum(map(len, known)) < 10:
        return ""
    table = np.concatenate(known)
    if info.spec.action.kind == "discrete":
        return "every recorded choice has probability 1" if (table > -1e-6).all() else ""
    constant = bool((np.ptp(table, axis=0) < 1e-5).all())
    uniform = bool(np.allclose(table, _UNIFORM_LOG_DENSITY, atol=1e-4))
    return "every recorded action has the density of its distribution's mode" if constant and not uniform else ""


def weights_unsupported(info: RecordingInfo, episodes: Sequence[PlayedEpisode], target: TargetPolicy) -> str:
    """Why importance weights are unavailable; "" if they are available."""
    if reason := info.selected_by_outcome:
        return reason
    if reason := deterministic_behaviour(info, episodes):
        return f"deterministic behaviour: {reason}, so no other action was tried in these states"
    if drew_tokens(info) or isinstance(target, TokenTarget):
        return "weights need densities of single actions, but a policy here samples tokens or chunks"
    missing = sum(episode.log_prob is None for episode in episodes)
    if missing:
        return (
            f"{missing} of {len(episodes)} episodes were recorded without log-probabilities of the policy that acted: "
            "record with `python -m embodied_rl.record … sample=true`"
        )
    if any(episode.drawn is None for episode in episodes):
        return "the recording has no sampled_action, the sampled vectors that the log-probabilities belong to"
    if not target.has_density:
        return "the target is the policy's most likely action, which has no density for weights: use target=sample, or fqe"
    return ""
