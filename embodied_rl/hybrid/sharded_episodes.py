"""The learner of whole episodes on several ranks: each minibatch's episodes are divided over them, its denominators are the whole's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.composition import Composition
from embodied_rl.algorithms.episodes import EpisodeBatch
from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.hybrid.episode_rank import EpisodeRank, pack_episodes
from embodied_rl.hybrid.policy_episode_learner import PolicyEpisodeLearner
from embodied_rl.hybrid.rank import EpisodeStep
from embodied_rl.hybrid.sharded_updater import ShardedUpdater, plan_rows
from embodied_rl.hybrid.updater import Minibatches
from embodied_rl.policies.base import Policy


class ShardedEpisodeLearner(PolicyEpisodeLearner):
    """`PolicyEpisodeLearner` over the ranks of `hybrid.sharding`; log-probabilities before the update are the whole policy's."""

    def __init__(self, policy: Policy, config: AlgorithmConfig, composition: Composition, hybrid: HybridConfig) -> None:
        """Start the ranks. Raises as `ShardedUpdater`."""
        super().__init__(policy, config, composition, hybrid.device, hybrid.rank_threads)
        self.sharded = ShardedUpdater(policy, config, hybrid, self.device)
        self._adam = self.sharded  # type: ignore[assignment]  # values, state and the optimizer's rate are asked of it
        self._own = EpisodeRank(self.sharded.rank)

    def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `EpisodeLearner.update`."""
        self.sharded.send_buffers()
        return super().update(*args, **kwargs)

    def _step(self, batch: EpisodeBatch, inputs: dict[str, Tensor], rows: np.ndarray, kl_coef: float) -> dict[str, float]:
        sharded, mask, decisions = self.sharded, *(inputs[name][torch.from_numpy(rows)] for name in ("mask", "decisions"))
        whole = Minibatches(rows, [(0, len(rows))])
        step = EpisodeStep(
            parts=[],
            num_units=float(self.aggregation.count(mask).clamp(min=1)),
            num_steps=float(decisions.sum().clamp(min=1)),
            num_entries=float(mask.sum().clamp(min=1)),
            kl_coef=kl_coef,
            learning_rate=sharded.optimizer.param_groups[0]["lr"] / sharded.optimizer.param_groups[0]["scale"],
        )

        def part_of(index: int) -> tuple[EpisodeStep, dict[str, Tensor]]:
            chosen, counts, parts = plan_rows(whole, index, sharded.num_parts, sharded.sharding.micro_batch_size)
            tensors = pack_episodes(batch, inputs, chosen, counts, tuple(batch.observation))
            return dataclasses.replace(step, parts=parts[0]), tensors

        sharded.send_parts("episodes", part_of)
        own, tensors = part_of(0)
        with sharded.blaming_workers():
            figures, finite = self._own.step(tensors, own)
        loss = figures.pop("loss")
        if not finite:
            part = {name: value[torch.from_numpy(rows)] for name, value in inputs.items()}
            raise self._not_finite(loss, figures["grad_norm"], rows, part)
        return figures
