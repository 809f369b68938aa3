"""Groups of whole episodes as a batch, and their advantages: rewards are shaped and normalised, then the configured method assigns credit.
A row is an episode, an entry one of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantage_table import AdvantageInfo
from embodied_rl.algorithms.advantages import sum_chunks, whiten
from embodied_rl.algorithms.anchors import anchor_groups, step_returns
from embodied_rl.algorithms.composition import method_options
from embodied_rl.algorithms.grouped import group_statistics, outcome_score, rounding_of
from embodied_rl.algorithms.off_policy import correction_weights
from embodied_rl.algorithms.rewards import Moments, group_ids, normalize_reward, penalize_overlong
from embodied_rl.algorithms.step_rewards import StepRewards
from embodied_rl.config import AlgorithmConfig
from embodied_rl.errors import UserError
from embodied_rl.types import EpisodeGroup

_EVEN_UPDATES = 3
"""Updates in a row without any advantage after which the run warns."""


@dataclass(frozen=True)
class EpisodeBatch:
    """B episodes of at most L steps, M steps in all.

    Inputs of networks are flat, [M, ...], one episode after another; values of a row's steps are [B, L], 0 where the mask is
    False. `scatter` converts the first form to the second.
    """

    observation: dict[str, Tensor]
    """{key: [M, ...]}"""
    final_observation: dict[str, Tensor]
    """{key: [B, ...]}"""
    action: Tensor
    """[M, A]"""
    row: Tensor
    """[M] int64 episode of each step."""
    column: Tensor
    """[M] int64 index of each step in its episode."""
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
    """[B] bool: played by the mode of the policy, as a baseline only."""
    groups: tuple[EpisodeGroup, ...] = field(repr=False)
    num_tokens: Tensor | None = field(repr=False, default=None)
    """[B, L] int64 sampled tokens of each answer of a language agent; None for other policies."""
    unit_log_prob: Tensor | None = field(repr=False, default=None)
    """[M, U] log-probabilities of action units under the policy that acted; None: not kept."""
    unit_mask: Tensor | None = field(repr=False, default=None)
    """[M, U] bool: units that count (in a chunk, those whose step was executed); None: all units."""
    chunk_reward: Tensor | None = field(repr=False, default=None)
    """[B, L, K] float32 reward of each step of a chunk; None: decisions are single steps."""
    executed: Tensor | None = field(repr=False, default=None)
    """[B, L, K] bool: steps of a chunk taken before the episode's end."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)"""
        return int(self.mask.shape[0]), int(self.mask.shape[1])

    def scatter(self, flat: Tensor) -> Tensor:
        """[M, ...] → [B, L, ...] with zeros elsewhere; gradients flow."""
        shape = (*self.shape, *flat.shape[1:])
        return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put((self.row, self.column), flat)

    @staticmethod
    def of(groups: Sequence[EpisodeGroup], prepare: Callable[[dict[str, Any]], dict[str, Tensor]]) -> EpisodeBatch:
        """Rows in the order of groups and members.
        `prepare`: turns {key: array [n, ...]}, texts included, into inputs of networks."""
        episodes = [episode for group in groups for episode in group.episodes]
        seen = {key: np.concatenate([episode.observation[key] for episode in episodes]) for key in episodes[0].observation}
        final = {key: _stacked([episode.final_observation[key] for episode in episodes]) for key in seen}
        log_prob = [np.where(True if e.mask is None else e.mask, e.log_prob, 0.0).sum(axis=1, dtype=e.log_prob.dtype) for e in episodes]
        action = torch.from_numpy(np.concatenate([episode.action for episode in episodes]))
        batch = EpisodeBatch.of_steps(groups, (prepare(seen), prepare(final)), action, log_prob)

        def flat(name: str) -> Tensor | None:
            """[M, ...] an array of all episodes, if all have it."""
            parts = [vars(episode)[name] for episode in episodes]
            return None if any(part is None for part in parts) else torch.from_numpy(np.concatenate(parts))

        chunk_reward, executed = (None if found is None else batch.scatter(found) for found in map(flat, ("chunk_reward", "executed")))
        return replace(batch, chunk_reward=chunk_reward, executed=executed, unit_log_prob=flat("log_prob"), unit_mask=flat("mask"))

    @staticmethod
    def of_steps(
        groups: Sequence[EpisodeGroup],
        observations: tuple[dict[str, Any], dict[str, Any]],
        action: Tensor,
        log_prob: Sequence[np.ndarray],
    ) -> EpisodeBatch:
        """Rows in the order of groups and members.

        Args:
            observations: {key: [M, ...]} of all steps, and {key: [B, ...]} after the episodes' last steps.
            action: [M, A]
            log_prob: [T] log-probabilities of each episode's actions under the policy that acted.
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


def _stacked(values: Sequence[Any]) -> np.ndarray:
    """[B, ...]"""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    whole = np.empty(len(values), object)
    whole[:] = values
    return whole


@dataclass(frozen=True)
class EpisodeValues:
    """The critic's values of a batch of episodes; zeros if the method has no critic."""

    value: Tensor
    """[B, L]"""
    final_value: Tensor
    """[B] values of the final observations."""


@dataclass(frozen=True)
class Credit:
    """Inputs of an update beside the episodes."""

    advantage: Tensor
    """[B, L], 0 where `mask` is False; [B, L·K] if each step of a chunk has its own, and then `value` and `returns` too."""
    mask: Tensor
    """[B, L] bool: steps that are learned from (greedy baselines are not)."""
    value: Tensor
    """[B, L] values that the returns were computed with."""
    returns: Tensor | None
    """[B, L] targets of the critic; None: there is no critic."""
    positive: Tensor
    """[B] bool: episodes that succeeded."""
    metrics: dict[str, float]
    executed: Tensor | None = None
    """[B, L·K] bool: steps of chunks that are learned from; None: `mask` says so."""


class EpisodeMethod(StepRewards):
    """Credit of episodes. Pure except for its state across updates: running moments of the returns, and an adaptive KL coefficient.
    Raises UserError for an impossible combination."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.moments = Moments()
        self._num_even = 0

    def corrected(
        self, advantage: Tensor, log_prob: Tensor | None, *, behaviour_log_prob: Tensor, mask: Tensor, chunk_id: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Multiply advantages by the configured importance weights; return them with metrics of the weights.
        `log_prob`: shaped as `advantage`, of the policy at the start of the update; None if nothing is corrected."""
        if not self.config.correction.enabled:
            return advantage, {}
        assert log_prob is not None, "the learner computes it"
        given = {"log_prob": log_prob, "behaviour_log_prob": behaviour_log_prob, "mask": mask, "chunk_id": chunk_id}
        weight, metrics = correction_weights(self.config.correction, **given)
        return advantage * weight.to(advantage.dtype), metrics

    def prepare(self, batch: EpisodeBatch, values: EpisodeValues, kl: Tensor | None = None) -> Credit:
        """Credit of every step.

        Args:
            values: the critic's, if the advantage has one.
            kl: for a KL term in the reward: [B, L] `kl.divergence`, summed over the units or tokens of a step, or [B, L, K] of each
                step of a chunk if `looks_into_chunks`.
        """
        reward, given, metrics = self._reward(batch, kl)
        counted = of_values = self._counted(batch)
        returns: Tensor | None = None
        info = self.advantage
        options = method_options(info, self.config.advantage_options, self.config)
        if info.layout == "time":
            advantage, returns = self._over_time(batch, reward, values, options)
        elif "anchors" in info.needs:
            advantage = self._from_anchors(batch, reward, self._score(batch, reward, given), options)
        else:
            arrays = self._row_arrays(batch, reward, self._score(batch, reward, given))
            advantage = info.load()(**info.taken(arrays), **options)
        of_steps = advantage.dim() == 3
        if of_steps:
            assert batch.executed is not None, "the configuration was checked"
            assert returns is not None, "advantages of chunks' steps have a critic"
            advantage, returns, of_values = advantage.flatten(1), returns.flatten(1), (counted[..., None] & batch.executed).flatten(1)
        _require_shape(info, advantage, (batch.shape[0], of_values.shape[1]))
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand(batch.shape)
        if self.config.normalize_advantage == "batch" and info.layout == "time":
            advantage = whiten(advantage.contiguous(), of_values)
        if self.config.advantage_clip is not None:
            advantage = advantage.clamp(-self.config.advantage_clip, self.config.advantage_clip)
        advantage = torch.where(of_values, advantage, torch.zeros_like(advantage))
        self._warn_of_even(advantage, counted)
        value = values.value.flatten(1)
        return Credit(advantage, counted, value, returns, batch.success, metrics, of_values if of_steps else None)

    def _warn_of_even(self, advantage: Tensor, counted: Tensor) -> None:
        """Warn if several updates in a row have no advantage: a run could continue to its end without learning."""
        self._num_even = 0 if bool(advantage.any()) else self._num_even + 1
        if self._num_even == _EVEN_UPDATES:
            why, help_ = (
                "the episodes of each group had equal returns",
                "algorithm.groups.filters=[{name: zero_variance}] plays until groups differ. An easier task, intermediate rewards, "
                "algorithm.warm_start or a larger algorithm.groups.group_size makes more groups differ.",
            )
            if not bool(counted.any()):
                why, help_ = (
                    "a limit cut off every episode, and algorithm.reward.truncated=mask leaves such episodes out",
                    "Raise sim.max_episode_steps (for answers, agent.max_new_tokens), or set algorithm.reward.truncated=zero.",
                )
            warnings.warn(
                f"In {_EVEN_UPDATES} updates in a row every advantage was 0, because {why}. Nothing was learned. {help_}", stacklevel=2
            )

    def _counted(self, batch: EpisodeBatch) -> Tensor:
        """[B, L] bool: steps that are learned from and compared."""
        counted = batch.mask & ~batch.greedy[:, None]
        return counted & ~self._cut_off(batch)[:, None] if self.config.reward.truncated == "mask" else counted

    def _cut_off(self, batch: EpisodeBatch) -> Tensor:
        """[B] bool: episodes that a step limit ended, or with an answer of the largest allowed number of tokens."""
        most = self.config.reward.overlong_tokens
        if most is None or batch.num_tokens is None:
            return batch.truncated
        return batch.truncated | (batch.mask & (batch.num_tokens >= most)).any(1)

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def _reward(self, batch: EpisodeBatch, kl: Tensor | None) -> tuple[Tensor, Tensor, dict[str, float]]:
        """[B, L] reward to learn from, or [B, L·K] of the steps of chunks; as it was before returns were normalised; and its metrics."""
        config, given, mask = self.config.reward, batch.reward, batch.mask
        if self.looks_into_chunks:
            assert batch.chunk_reward is not None, "the configuration was checked"
            assert batch.executed is not None, "the configuration was checked"
            given, mask, kl = batch.chunk_reward.flatten(1), batch.executed.flatten(1), None if kl is None else kl.flatten(1)
        reward = self.scaled(given, mask)
        if config.truncated == "zero":
            reward = torch.where(self._cut_off(batch)[:, None], torch.zeros_like(reward), reward)
        if config.overlong_penalty and batch.num_tokens is not None:
            assert config.overlong_tokens is not None, "the configuration was checked"
            reward = penalize_overlong(
                reward=reward,
                length=batch.num_tokens,
                max_length=config.overlong_tokens,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
                mask=batch.mask,
            )
        learned = self._counted(batch)
        reward, metrics = self.less_costs(reward, kl, mask, mask & learned.any(1, keepdim=True))
        if self.reward_normalizer is not None:
            self.restart_episodes()
            decided = self._of_decisions(batch, reward)
            seen = decided.T.contiguous().numpy(), _ends(batch).T.contiguous().numpy(), learned.T.contiguous().numpy()
            steps = reward.T.contiguous().numpy() if self.looks_into_chunks else None
            reward = torch.from_numpy(self.reward_normalizer(*seen, steps=steps)).T * mask
        normalizes = config.mean != "none" or config.std != "none"
        return self._normalized(batch, reward, mask) if normalizes else reward, reward, metrics

    def _of_decisions(self, batch: EpisodeBatch, reward: Tensor) -> Tensor:
        """[B, L·K] → [B, L]: each chunk's return for an advantage that looks into chunks; [B, L] stays as it is."""
        if batch.executed is None or not self.looks_into_chunks:
            return reward
        steps = reward.view(batch.executed.shape)
        of_chunks = self.advantage.unit == "chunk"
        return sum_chunks(reward=steps, executed=batch.executed, gamma=self.config.gamma)[0] if of_chunks else steps.sum(2)

    def _normalized(self, batch: EpisodeBatch, reward: Tensor, mask: Tensor) -> Tensor:
        """Normalise the returns of whole episodes, and spread the difference evenly over the steps in `mask`."""
        config, whole = self.config.reward, outcome_score(reward=reward)
        counted = self._counted(batch).any(1)
        if "running" in (config.mean, config.std):
            self.moments = self.moments.merge(Moments.of(whole, counted))
        rows = [
            {"number": group.number, "seed": group.seed, "domain": group.domain, "metadata": dict(episode.metadata)}
            for group in batch.groups
            for episode in group.episodes
        ]
        normalized = normalize_reward(
            reward=whole,
            mean=config.mean,
            std=config.std,
            group=group_ids(rows, config.group_by) if "group" in (config.mean, config.std) else None,
            mask=counted,
            others=batch.greedy,
            running=self.moments,
        )
        lengths = mask.sum(1).to(reward.dtype)
        return reward + mask * ((normalized - whole) / lengths)[:, None]

    # ---- credit -----------------------------------------------------------------------------------------------------

    def _score(self, batch: EpisodeBatch, reward: Tensor, given: Tensor) -> Tensor:
        """[B] returns; equal in a group whose returns were before they were normalised, and 0 if rewards cancel: rounding would look like a
        signal."""
        score, counted = reward.sum(1), self._counted(batch).any(1)
        score = torch.where(score.abs() <= rounding_of(score) * reward.abs().sum(1), torch.zeros_like(score), score)
        found = group_statistics(score=outcome_score(reward=given), group=batch.group, rows=counted)
        common = group_statistics(score=score, group=batch.group, rows=counted).mean[found.index]
        return torch.where(counted & found.equal[found.index], common.to(score.dtype), score)

    def _row_arrays(self, batch: EpisodeBatch, reward: Tensor, score: Tensor) -> dict[str, Tensor]:
        mask = self._counted(batch)
        arrays = {"score": score, "group": batch.group, "mask": mask, "reward": reward}
        # A language agent's action units are its tokens.
        arrays["length"] = (batch.mask if batch.num_tokens is None else batch.num_tokens).sum(1)
        arrays["chunk_id"] = torch.arange(batch.shape[1]).expand(batch.shape)  # every step is a separate decision
        if batch.greedy.any():
            of_group = {int(number): float(score[row]) for row, number in enumerate(batch.group) if batch.greedy[row]}
            arrays["greedy_score"] = torch.tensor([of_group[int(number)] for number in batch.group], dtype=score.dtype)
        return arrays

    def _over_time(
        self, batch: EpisodeBatch, reward: Tensor, values: EpisodeValues, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Apply a time-major method to the episodes in parallel, [L, B], each ending at its last step."""
        info = self.advantage
        ends = _ends(batch)
        terminated, truncated = (ends & batch.terminated[:, None]).T, (ends & batch.truncated[:, None]).T
        cut = (truncated & ~terminated).nonzero()
        arrays: dict[str, Any] = {
            "reward": reward.T.contiguous(),
            "terminated": terminated.contiguous(),
            "truncated": truncated.contiguous(),
            "mask": batch.mask.T.contiguous(),
        }
        if self.looks_into_chunks:
            assert batch.executed is not None, "the configuration was checked"
            steps = reward.view(batch.executed.shape)
            arrays |= {"reward": steps.transpose(0, 1).contiguous(), "executed": batch.executed.transpose(0, 1).contiguous()}
        if info.returns_value_target:
            arrays |= {
                "value": values.value.transpose(0, 1).contiguous(),
                "last_value": torch.zeros(batch.shape[0]),
                "final_value": values.final_value[cut[:, 1]].contiguous(),
            }
        result = info.load()(**info.taken(arrays), **options)
        if info.returns_value_target and not (isinstance(result, tuple) and len(result) == 2):
            raise UserError(f"'{info.name}' takes values and must return (advantage, returns), the critic's target.")
        if info.returns_value_target:
            return result[0].transpose(0, 1).contiguous(), result[1].transpose(0, 1).contiguous()
        return result.T.contiguous(), None

    def _from_anchors(self, batch: EpisodeBatch, reward: Tensor, score: Tensor, options: dict[str, Any]) -> Tensor:
        """Apply GiGPO, whose rows are steps: [M], scattered to [B, L]."""
        kept = self._counted(batch).any(1)[batch.row]
        flat_reward = reward[batch.row, batch.column]
        group = batch.group[batch.row]
        anchors: list[Any] = [{key: part[step] for key, part in batch.observation.items()} for step in range(len(batch.row))]
        similarity = self.config.anchor_similarity
        if similarity is not None:
            if any(set(anchor) != {"text"} for anchor in anchors):
                raise UserError("algorithm.anchor_similarity compares texts, and these observations are not texts: set it to null.")
            anchors = [str(anchor["text"]) for anchor in anchors]
        arrays = {
            "episode_return": score[batch.row],
            "step_return": step_returns(reward=flat_reward, trajectory=batch.row, step=batch.column, gamma=self.config.gamma, rows=kept),
            "group": group,
            "trajectory": batch.row,
            "anchor_group": anchor_groups(anchor=anchors, group=group, rows=kept, similarity=similarity),
            "mask": kept[:, None],
        }
        info = self.advantage
        advantage: Tensor = info.load()(**info.taken(arrays), **options)
        _require_shape(info, advantage, (len(batch.row), 1))
        return batch.scatter(advantage if advantage.dim() == 1 else advantage[:, 0])

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.to_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.moments = Moments.from_dict(state["moments"])


def _ends(batch: EpisodeBatch) -> Tensor:
    """[B, L] bool: the last step of each episode."""
    ends = torch.zeros(batch.shape, dtype=torch.bool)
    ends[torch.arange(batch.shape[0]), batch.mask.sum(1) - 1] = True
    return ends


def _require_shape(info: AdvantageInfo, advantage: Tensor, shape: tuple[int, int]) -> None:
    """Raise UserError unless a method returned one number per row or per entry."""
    if not isinstance(advantage, Tensor) or tuple(advantage.shape) not in (shape[:1], shape):
        got = list(advantage.shape) if isinstance(advantage, Tensor) else type(advantage).__name__
        raise UserError(f"'{info.name}' must return one advantage for each row {list(shape[:1])} or entry {list(shape)}, got {got}.")
