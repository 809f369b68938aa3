"""One frozen type per stage of the data flow; numpy only, so that simulator processes do not import torch.

Shape legend: T decisions of a rollout, N slots, n slots of one message, K steps of an action chunk, A action dimensions (1 for a discrete
action), L action units, each with a log-probability (A, unless the policy has its own `ActionLayout`), W numbers of a recorded action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from embodied_rl.specs import ActionLayout as ActionLayout
from embodied_rl.specs import ActionSpec as ActionSpec
from embodied_rl.specs import SimSpec as SimSpec
from embodied_rl.specs import TensorSpec as TensorSpec
from embodied_rl.specs import VariableSpec as VariableSpec

Observation = dict[str, np.ndarray]
"""Named arrays with the slot as first axis. ``state`` is the flat vector, ``rgb`` an image [n, H, W, 3] uint8."""


@dataclass(frozen=True)
class StepBuffers:
    """Rows that a simulator fills in place, one per environment of its process (often shared memory: copy what you keep)."""

    observation: Observation
    """{key: [n, *shape]}; parts of varying size are object arrays [n]."""
    reward: np.ndarray
    """[n] float32"""
    terminated: np.ndarray
    """[n] bool: the task itself ended; the value after it is 0."""
    truncated: np.ndarray
    """[n] bool: a limit cut the episode; the value of the final observation still counts."""
    success: np.ndarray
    """[n] bool: success at this step; False if the simulator does not report success."""
    info: list[Mapping[str, Any] | None]
    """[n] the simulator's own info of this step; may change with the next step, as the rows do."""

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """{reward, terminated, truncated, success: [n]}"""
        return {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated, "success": self.success}

    @staticmethod
    def allocate(spec: SimSpec, num_envs: int) -> StepBuffers:
        """Allocate plain memory of the right shapes, for tests, checks and simulators without a manager."""
        return StepBuffers(
            observation={
                **{key: np.zeros((num_envs, *part.shape), part.dtype) for key, part in spec.tensors.items()},
                **{key: np.full(num_envs, None, dtype=object) for key in spec.variables},
            },
            reward=np.zeros(num_envs, np.float32),
            terminated=np.zeros(num_envs, bool),
            truncated=np.zeros(num_envs, bool),
            success=np.zeros(num_envs, bool),
            info=[None] * num_envs,
        )


@dataclass(frozen=True)
class EpisodeSummary:
    """One finished episode, as the worker counted it."""

    slot: int
    index: int
    """Number of episodes that this slot finished before."""
    seed: int
    episode_return: float
    """Sum of the simulator's rewards, undiscounted and not normalised."""
    length: int
    """Steps taken."""
    success_once: bool
    """Success at any step; the figure we report as success."""
    success_at_end: bool
    terminated: bool
    final_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepBatch:
    """What `EnvManager.recv` returns. Arrays may be views into shared memory, valid until their slots are sent again."""

    slots: np.ndarray
    """[n] int64, ascending."""
    observation: Observation
    """{key: [n, ...]}; after an episode's end, the first observation of the next one (autoreset)."""
    reward: np.ndarray
    """[n] float32"""
    terminated: np.ndarray
    """[n] bool"""
    truncated: np.ndarray
    """[n] bool"""
    success: np.ndarray
    """[n] bool"""
    final_observation: Observation
    """{key: [n, ...]}; the episode's last observation if terminated or truncated, else stale."""
    episodes: tuple[EpisodeSummary, ...]
    """Episodes that ended with this step, ascending by slot."""
    aborted: np.ndarray | None = None
    """[n] bool: the manager gave the episode up because its simulator failed. Its step counts as truncated with reward 0, and it appears in
    the manager's fault records, not in `episodes`. None: no slot of the batch was aborted."""
    chunk_reward: np.ndarray | None = None
    """[n, K] float32, 0 where not executed, with `reward` as their sum; None unless the manager has a chunk_size."""
    chunk_success: np.ndarray | None = None
    """[n, K] bool, False where not executed; `success` is whether any step of the chunk succeeded."""
    executed: np.ndarray | None = None
    """[n, K] bool: steps that were executed; a chunk is cut at its episode's end."""
    inner: Observation = field(default_factory=dict)
    """{key: [n, K - 1, ...]} observation after each step of a chunk except the last executed one, for slots that were sent `watched`; else
    stale. Empty if no slot of the batch was watched."""

    @property
    def done(self) -> np.ndarray:
        """[n] bool: terminated or truncated."""
        return self.terminated | self.truncated


@dataclass(frozen=True)
class Rollout:
    """T lockstep decisions of N slots, time-major: what the collector hands to the learner."""

    observation: Observation
    """{key: [T, N, ...]} observations before each decision."""
    action: np.ndarray
    """[T, N, A] normalised and unclipped, as sampled (int64 [T, N, 1] for discrete); [T, N, W] if the policy has an `ActionLayout`."""
    log_prob: np.ndarray
    """[T, N, L] log-probabilities under the policy that acted."""
    reward: np.ndarray
    """[T, N] float32"""
    terminated: np.ndarray
    """[T, N] bool"""
    truncated: np.ndarray
    """[T, N] bool"""
    last_observation: Observation
    """{key: [N, ...]} after the last step: the value is bootstrapped from it."""
    final_observation: Observation
    """{key: [F, ...]} last observations of the F truncated episodes, in the order of np.argwhere(truncated & ~terminated)."""
    policy_version: np.ndarray
    """[T, N] int64 version of the weights that acted."""
    episodes: tuple[EpisodeSummary, ...]
    success: np.ndarray | None = None
    """[T, N] bool: success at each step; None: not kept."""
    chunk_reward: np.ndarray | None = None
    """[T, N, K] reward of each step of a chunk, 0 where not executed; `reward` is their sum. None: decisions are single steps."""
    chunk_success: np.ndarray | None = None
    """[T, N, K] bool: success at each step of a chunk; None: decisions are single steps."""
    executed: np.ndarray | None = None
    """[T, N, K] bool: steps of a chunk taken before the episode's end; None: decisions are single steps."""

    def age(self, version: int) -> int:
        """Number of versions that the oldest action is behind `version`."""
        return version - int(self.policy_version.min())

    @property
    def num_steps(self) -> int:
        """Number of environment steps."""
        return int(self.reward.size) if self.executed is None else int(np.count_nonzero(self.executed))


@dataclass(frozen=True, eq=False)
class Episode:
    """One finished episode as T messages: observations, answers and rewards.

    A message is one decision: a step of a robot, a chunk of K steps, or a turn of a language agent. Raises ValueError when the
    shapes do not agree or an action unit that counts carries no number.
    """

    observation: Observation
    """{key: [T, ...]} observation before each message; parts of varying size are object arrays [T]."""
    action: np.ndarray
    """[T, ...] as sampled: normalised and unclipped vectors, choices, token ids, or texts (object array)."""
    log_prob: np.ndarray
    """[T, L] log-probabilities under the policy that acted; 0.0 where mask is False."""
    reward: np.ndarray
    """[T] reward of each message: a chunk's rewards summed."""
    terminated: bool
    """Whether the task itself ended; the value after it is 0."""
    truncated: bool
    """Whether a limit cut the episode; the value of the final observation still counts."""
    success: bool
    """Success at any step; False if the simulator does not report success."""
    seed: int
    """Seed of the reset; equal within a group."""
    domain: str
    """Task or data set that the episode belongs to."""
    policy_version: np.ndarray
    """[T] int64 version of the weights that sampled each message, or [T, L] of each action unit if weights change within a message."""
    final_observation: Observation
    """{key: [...]} after the last message, without the axis T."""
    mask: np.ndarray | None = None
    """[T, L] bool: action units that the policy chose itself; None: all units."""
    executed: np.ndarray | None = None
    """[T, K] bool: steps of a chunk taken before the episode's end; None: messages are single steps."""
    chunk_reward: np.ndarray | None = None
    """[T, K] reward of each step of a chunk, 0 where not executed; None: messages are single steps."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Nested mappings of further facts (task, difficulty, a judge's score, …). Filters and reward keys read them by dotted paths such as
    ``metadata.task.difficulty``."""

    def __post_init__(self) -> None:
        length = self.num_messages
        shapes: dict[str, tuple[int, ...]] = {f"observation.{key}": part.shape[:1] for key, part in self.observation.items()}
        shapes |= {"action": self.action.shape[:1], "reward": self.reward.shape, "log_prob": self.log_prob.shape[:1]}
        shapes |= {"policy_version": self.policy_version.shape[:1]}
        chunks = {"executed": self.executed, "chunk_reward": self.chunk_reward}
        shapes |= {name: part.shape[:1] for name, part in {"mask": self.mask, **chunks}.items() if part is not None}
        wrong = {name: shape for name, shape in shapes.items() if shape != (length,)}
        if length < 1 or wrong:
            raise ValueError(f"An episode of {length} messages needs at least one, and this first axis everywhere; got {wrong}.")
        units = self.log_prob.shape
        if len(units) != 2 or self.policy_version.shape not in (units, units[:1]) or (self.mask is not None and self.mask.shape != units):
            given = [units, self.policy_version.shape, None if self.mask is None else self.mask.shape]
            raise ValueError(f"log_prob and mask must be [T, L], policy_version [T] or [T, L]; got {given}.")
        for name, part in chunks.items():
            if part is not None and part.ndim != 2:
                raise ValueError(f"{name} must be [T, K], got {part.shape}.")

    @property
    def num_messages(self) -> int:
        """T: number of messages."""
        return int(self.reward.shape[0])

    @property
    def num_steps(self) -> int:
        """Number of environment steps: the executed ones of every chunk, else one per message."""
        return self.num_messages if self.executed is None else int(np.count_nonzero(self.executed))

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of rewards, in float64."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def game_return(self) -> float:
        """Sum of the simulator's rewards: `episode_return` without a language agent's penalties."""
        return self.episode_return

    @cached_property
    def oldest_version(self) -> int:
        """Smallest version among the action units that count; among all units if none counts."""
        return int(self._counted_versions().min())

    @property
    def is_finite(self) -> bool:
        """Whether every reward, and every log-probability that counts, is a finite number."""
        counted = self.log_prob if self.mask is None else self.log_prob[self.mask]
        return bool(np.isfinite(self.reward).all() and np.isfinite(counted).all())

    def _counted_versions(self) -> np.ndarray:
        if self.mask is None or not self.mask.any():
            return self.policy_version
        return self.policy_version[self.mask if self.policy_version.ndim == 2 else self.mask.any(axis=1)]


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """G episodes from the same initial state: advantages compare them with each other, and training batches consist of such groups.
    Raises ValueError if there is no episode, or if seeds or domains differ (episodes of several groups were mixed)."""

    number: int
    """Number of the group in its run; the seed and the domain follow from it."""
    domain: str
    seed: int
    created_version: int
    """Version of the weights when the group was admitted."""
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        origins = {(episode.domain, episode.seed) for episode in self.episodes}
        if origins != {(self.domain, self.seed)}:
            raise ValueError(
                f"Group {self.number} must hold episodes of domain '{self.domain}' and only seed {self.seed}, got {sorted(origins)}."
            )

    @property
    def num_episodes(self) -> int:
        """G: number of episodes."""
        return len(self.episodes)

    @property
    def num_messages(self) -> int:
        return sum(episode.num_messages for episode in self.episodes)

    @property
    def scores(self) -> np.ndarray:
        """[G] float64 returns, undiscounted."""
        return np.array([episode.episode_return for episode in self.episodes], np.float64)

    @property
    def mean_score(self) -> float:
        return float(self.scores.mean())

    @property
    def success_rate(self) -> float:
        return float(np.mean([episode.success for episode in self.episodes]))

    @cached_property
    def oldest_version(self) -> int:
        return min(episode.oldest_version for episode in self.episodes)

    def age(self, version: int) -> int:
        """Versions between the oldest action unit and the weights `version` that would train on it now."""
        return version - self.oldest_version
