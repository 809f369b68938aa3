"""Groups of whole episodes as a batch: a row is an episode, an entry one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.types import Episode, EpisodeGroup


@dataclass(frozen=True)
class EpisodeBatch:
    """B episodes of at most L steps, M steps in all.

    What networks read is kept flat, [M, ...], episode after episode; what belongs to a step of a row is [B, L], 0 where the mask is
    False. `scatter` goes from the one to the other.
    """

    episodes: tuple[Episode, ...]
    observation: dict[str, Tensor]
    """{key: [M, ...]}"""
    final_observation: dict[str, Tensor]
    """{key: [B, ...]}"""
    action: Tensor
    """[M, A]"""
    row: Tensor
    """[M] int64 episode of each step."""
    column: Tensor
    """[M] int64 its place in the episode."""
    mask: Tensor
    """[B, L] bool"""
    reward: Tensor
    """[B, L] float32"""
    behaviour_log_prob: Tensor
    """[B, L] log-probability of the whole action under the policy that acted."""
    group: Tensor
    """[B] int64 number of the episode's group."""
    terminated: Tensor
    """[B] bool"""
    truncated: Tensor
    """[B] bool"""
    success: Tensor
    """[B] bool"""
    greedy: Tensor
    """[B] bool: played by the mode of the policy, only for a baseline."""
    groups: tuple[EpisodeGroup, ...] = field(repr=False)
    num_tokens: Tensor | None = field(repr=False, default=None)
    """[B, L] int64 sampled tokens of each answer of a language agent; None: other policies."""
    unit_log_prob: Tensor | None = field(repr=False, default=None)
    """[M, U] of each action unit under the policy that acted; None: not kept."""
    unit_mask: Tensor | None = field(repr=False, default=None)
    """[M, U] bool: units that count (of a chunk, those whose step was executed); None: all."""
    chunk_reward: Tensor | None = field(repr=False, default=None)
    """[B, L, K] float32 of each step of a chunk; None: decisions are single steps."""
    executed: Tensor | None = field(repr=False, default=None)
    """[B, L, K] bool: steps of a chunk that were taken before the episode's end."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)"""
        return int(self.mask.shape[0]), int(self.mask.shape[1])

    def scatter(self, flat: Tensor) -> Tensor:
        """[M, ...] → [B, L, ...] with zeros elsewhere; gradients flow."""
        shape = (*self.shape, *flat.shape[1:])
        return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put((self.row, self.column), flat)

    @staticmethod
    def of(groups: Sequence[EpisodeGroup], prepare: Callable[[dict[str, Any]], dict[str, Tensor]] | None = None) -> EpisodeBatch:
        """Rows in the order of groups and members.

        `prepare`: {key: array [n, ...]}, texts among them, to what networks read. None: arrays as they are, without texts.
        """
        episodes = [episode for group in groups for episode in group.episodes]
        masks = [episode.mask for episode in episodes]
        unit_mask = None if any(own is None for own in masks) else np.concatenate([own for own in masks if own is not None])
        log_prob = [np.where(True if e.mask is None else e.mask, e.log_prob, 0.0).sum(axis=1, dtype=e.log_prob.dtype) for e in episodes]
        batch = EpisodeBatch.of_steps(
            groups, _observations(episodes, prepare), torch.from_numpy(np.concatenate([episode.action for episode in episodes])), log_prob
        )

        def of_chunks(parts: Sequence[np.ndarray | None]) -> Tensor | None:
            found = [part for part in parts if part is not None]
            return batch.scatter(torch.from_numpy(np.concatenate(found))) if len(found) == len(parts) else None

        return replace(
            batch,
            chunk_reward=of_chunks([episode.chunk_reward for episode in episodes]),
            executed=of_chunks([episode.executed for episode in episodes]),
            unit_log_prob=torch.from_numpy(np.concatenate([episode.log_prob for episode in episodes])),
            unit_mask=None if unit_mask is None else torch.from_numpy(unit_mask),
        )

    @staticmethod
    def of_steps(
        groups: Sequence[EpisodeGroup],
        observations: tuple[dict[str, Any], dict[str, Any]],
        action: Tensor,
        log_prob: Sequence[np.ndarray],
    ) -> EpisodeBatch:
        """Rows in the order of groups and members.

        Args:
            observations: {key: [M, ...]} of all steps, and {key: [B, ...]} after the last ones.
            action: [M, A]
            log_prob: [T] of each episode's actions under the policy that acted.
        """
        episodes = tuple(episode for group in groups for episode in group.episodes)
        lengths = torch.tensor([episode.num_messages for episode in episodes])
        place = torch.arange(len(episodes)).repeat_interleave(lengths), torch.cat([torch.arange(length) for length in lengths.tolist()])

        def padded(parts: Sequence[np.ndarray]) -> Tensor:
            flat = torch.from_numpy(np.concatenate(parts).astype(np.float32))
            return torch.zeros(len(episodes), int(lengths.max())).index_put(place, flat)

        def flags(values: Sequence[bool]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.bool)

        return EpisodeBatch(
            episodes=episodes,
            observation=observations[0],
            final_observation=observations[1],
            action=action,
            row=place[0],
            column=place[1],
            mask=torch.arange(int(lengths.max())) < lengths[:, None],
            reward=padded([episode.reward for episode in episodes]),
            behaviour_log_prob=padded(log_prob),
            group=torch.tensor([group.number for group in groups for _ in group.episodes]),
            terminated=flags([episode.terminated for episode in episodes]),
            truncated=flags([episode.truncated and not episode.terminated for episode in episodes]),
            success=flags([episode.success for episode in episodes]),
            greedy=flags([bool(episode.metadata.get("greedy", False)) for episode in episodes]),
            groups=tuple(groups),
        )


def _observations(
    episodes: Sequence[Episode], prepare: Callable[[dict[str, Any]], dict[str, Tensor]] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """{key: [M, ...]} of all steps, and {key: [B, ...]} after the last ones."""

    def stacked(key: str) -> np.ndarray:
        values = [episode.final_observation[key] for episode in episodes]
        if isinstance(values[0], np.ndarray):
            return np.stack(values)
        whole = np.empty(len(values), object)
        whole[:] = values
        return whole

    keys = [key for key, part in episodes[0].observation.items() if prepare is not None or part.dtype != object]
    seen = {key: np.concatenate([episode.observation[key] for episode in episodes]) for key in keys}
    final = {key: stacked(key) for key in keys}
    if prepare is not None:
        return prepare(seen), prepare(final)
    return {key: torch.from_numpy(part) for key, part in seen.items()}, {key: torch.from_numpy(part) for key, part in final.items()}


@dataclass(frozen=True)
class EpisodeValues:
    """The critic's view of a batch of episodes; zeros where the method has no critic."""

    value: Tensor
    """[B, L]"""
    final_value: Tensor
    """[B] of the final observations."""


@dataclass(frozen=True)
class Credit:
    """What an update needs beside the episodes."""

    advantage: Tensor
    """[B, L] 0 where `mask` is False; [B, L·K] where each step of a chunk has its own, as `value` and `returns` then."""
    mask: Tensor
    """[B, L] bool: steps that are learned from (greedy baselines are not)."""
    value: Tensor
    """[B, L] that the returns were computed with."""
    returns: Tensor | None
    """[B, L] target of the critic; None: there is none."""
    positive: Tensor
    """[B] bool: episodes that succeeded."""
    metrics: dict[str, float]
    executed: Tensor | None = None
    """[B, L·K] bool: which entries of them are learned from, where they are of steps of chunks; None: see `mask`."""
