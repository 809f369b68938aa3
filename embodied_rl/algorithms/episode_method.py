"""From groups of episodes to advantages: rewards are shaped and normalised, then credit is assigned by the method that is configured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.anchors import anchor_groups, step_returns
from embodied_rl.algorithms.composition import Composition, compose, method_options
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.kl import KlCoefficient, make_kl_coefficient
from embodied_rl.algorithms.reward_shaping import clip_reward, kl_in_reward, penalize_length
from embodied_rl.algorithms.rewards import Moments, group_ids, normalize_reward
from embodied_rl.config import AlgorithmConfig


class EpisodeMethod:
    """Pure but for what runs across updates: running moments of the returns, and an adaptive KL coefficient.

    Raises UserError for a combination that makes no sense.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.composition: Composition = compose(config)
        self.moments = Moments()
        kl = config.kl
        self.kl_coefficient: KlCoefficient = (
            make_kl_coefficient("fixed", kl.coef)
            if kl.target is None
            else make_kl_coefficient("adaptive", kl.coef, target=kl.target, horizon=kl.horizon)
        )

    def prepare(self, batch: EpisodeBatch, values: EpisodeValues, log_prob: Tensor | None, reference: Tensor | None) -> Credit:
        """Credit of every step.

        Args:
            values: of the critic, where `composition.needs_critic`.
            log_prob, reference: [B, L] of the present and of the first policy; for a KL term in the reward.
        """
        reward, metrics = self._reward(batch, log_prob, reference)
        counted = batch.mask & ~batch.greedy[:, None]
        returns: Tensor | None = None
        info = self.composition.advantage
        options = method_options(info, self.config.advantage_options, self.config)
        if info.layout == "time":
            advantage, returns = self._over_time(batch, reward, values, options)
        elif info.name == "gigpo":
            advantage = self._from_anchors(batch, reward, options)
        else:
            arrays = self._row_arrays(batch, reward)
            wanted = (*info.inputs, *(name for name in info.optional_inputs if name in ("mask", "chunk_id", "length")))
            advantage = info.load()(**{name: arrays[name] for name in wanted if name in arrays}, **options)
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand(batch.shape)
        if self.config.normalize_advantage == "batch" and info.unit == "step" and info.name != "gigpo":
            advantage = whiten(advantage.contiguous(), counted)
        advantage = torch.where(counted, advantage, torch.zeros_like(advantage))
        return Credit(advantage, counted, values.value, returns, batch.success, metrics)

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def _reward(self, batch: EpisodeBatch, log_prob: Tensor | None, reference: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """[B, L] as it is learned from, and what is worth telling about it."""
        config, reward = self.config.reward, batch.reward
        metrics: dict[str, float] = {}
        if config.clip is not None:
            reward = clip_reward(reward=reward, low=-config.clip, high=config.clip, mask=batch.mask)
        reward = reward * config.scale
        if self.config.kl.coef > 0 and self.config.kl.place == "reward":
            assert log_prob is not None, "the learner computes both"
            assert reference is not None, "the learner computes both"
            reward, told = kl_in_reward(
                reward=reward,
                log_prob=log_prob,
                reference_log_prob=reference,
                coefficient=self.kl_coefficient.value,
                kind=self.config.kl.kind,
                mask=batch.mask,
            )
            metrics = {name: float(value) for name, value in told.items()}
            self.adapt(metrics["kl"], int(batch.mask.sum()))
        if config.length_penalty:
            lengths = batch.mask.sum(1).to(reward.dtype)
            whole = reward.sum(1)
            penalized = penalize_length(reward=whole, length=lengths, coefficient=config.length_penalty)
            reward = reward + batch.mask * ((penalized - whole) / lengths)[:, None]
        if config.mean != "none" or config.std != "none":
            reward = self._normalized(batch, reward)
        return reward, metrics

    def _normalized(self, batch: EpisodeBatch, reward: Tensor) -> Tensor:
        """Returns are normalised as numbers of whole episodes, and the difference is spread evenly over the steps."""
        config, whole = self.config.reward, reward.sum(1)
        counted = ~batch.greedy
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
            running=self.moments,
        )
        lengths = batch.mask.sum(1).to(reward.dtype)
        return reward + batch.mask * ((normalized - whole) / lengths)[:, None]

    def adapt(self, kl: float, num_samples: int) -> None:
        """Tell the KL coefficient what divergence was measured."""
        self.kl_coefficient.update(kl, num_samples)

    # ---- credit -----------------------------------------------------------------------------------------------------

    def _row_arrays(self, batch: EpisodeBatch, reward: Tensor) -> dict[str, Tensor]:
        score = reward.sum(1)
        mask = batch.mask & ~batch.greedy[:, None]
        arrays = {"score": score, "group": batch.group, "mask": mask, "reward": reward, "length": batch.mask.sum(1)}
        arrays["chunk_id"] = torch.arange(batch.shape[1]).expand(batch.shape)  # every step is a decision of its own
        if batch.greedy.any():
            of_group = {int(number): float(score[row]) for row, number in enumerate(batch.group) if batch.greedy[row]}
            arrays["greedy_score"] = torch.tensor([of_group[int(number)] for number in batch.group], dtype=score.dtype)
        return arrays

    def _over_time(
        self, batch: EpisodeBatch, reward: Tensor, values: EpisodeValues, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Time-major methods see the episodes side by side, [L, B], each ending at its last step."""
        info = self.composition.advantage
        last = batch.mask.sum(1) - 1
        ends = torch.zeros(batch.shape, dtype=torch.bool)
        ends[torch.arange(batch.shape[0]), last] = True
        terminated, truncated = (ends & batch.terminated[:, None]).T, (ends & batch.truncated[:, None]).T
        cut = (truncated & ~terminated).nonzero()
        arrays: dict[str, Any] = {
            "reward": reward.T.contiguous(),
            "terminated": terminated.contiguous(),
            "truncated": truncated.contiguous(),
            "mask": batch.mask.T.contiguous(),
        }
        if info.returns_value_target:
            arrays |= {
                "value": values.value.T.contiguous(),
                "last_value": torch.zeros(batch.shape[0]),
                "final_value": values.final_value[cut[:, 1]].contiguous(),
            }
        result = info.load()(**arrays, **options)
        if info.returns_value_target:
            return result[0].T.contiguous(), result[1].T.contiguous()
        return result.T.contiguous(), None

    def _from_anchors(self, batch: EpisodeBatch, reward: Tensor, options: dict[str, Any]) -> Tensor:
        """GiGPO's rows are steps: [M], scattered to [B, L]."""
        kept = (~batch.greedy)[batch.row]
        flat_reward = reward[batch.row, batch.column]
        group = batch.group[batch.row]
        anchors = [{key: part[step] for key, part in batch.observation.items()} for step in range(len(batch.row))]
        advantage = self.composition.advantage.load()(
            episode_return=reward.sum(1)[batch.row],
            step_return=step_returns(reward=flat_reward, trajectory=batch.row, step=batch.column, gamma=self.config.gamma, rows=kept),
            group=group,
            trajectory=batch.row,
            anchor_group=anchor_groups(anchor=anchors, group=group, rows=kept),
            mask=kept[:, None],
            **options,
        )
        return batch.scatter(advantage[:, 0])

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, JSON-able."""
        return {"moments": self.moments.to_dict(), "kl_coefficient": self.kl_coefficient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = Moments.from_dict(state["moments"])
        self.kl_coefficient.load_state_dict(state["kl_coefficient"])

    def restart_episodes(self) -> None:
        """Nothing is carried from one batch's episodes to the next."""
