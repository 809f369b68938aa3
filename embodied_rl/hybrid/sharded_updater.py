"""PPO's inner loop on several ranks, behind the same door as the one of a single process.

```
 rank 0 (training loop, simulators)                      rank 1, 2, … (train workers)
 begin(batch) ── keeps the batch
 epoch(minibatches) ── rows of each rank ── socket ────▶ rows
        │  forward, backward ◀════ FSDP2: gather parameters, sum gradients ════▶  forward, backward
        │  clip by the global norm, Adam on the own part                          the same
```
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.hybrid.learner import resolve_device
from embodied_rl.hybrid.policy_updater import ROWS, PolicyObjective, chosen_rows, whitened
from embodied_rl.hybrid.rank import Step
from embodied_rl.hybrid.rank_group import RankGroup
from embodied_rl.hybrid.rank_hosts import TrainWorkerError
from embodied_rl.hybrid.train_worker import pack
from embodied_rl.hybrid.updater import METRICS, VALUE_ROWS, Minibatches, raise_if_not_finite
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import prepare_observation

__all__ = ["ShardedUpdater", "TrainWorkerError", "make_sharded_updater", "plan_rows"]


class ShardedUpdater(RankGroup):
    """Implements `Updater` over the ranks of `config.sharding`, for any policy that acts by itself. See `RankGroup`."""

    def __init__(self, policy: Any, algorithm: AlgorithmConfig, config: HybridConfig, device: torch.device) -> None:
        """Start the ranks. Raises as `RankGroup`."""
        self._batch: Batch | None = None
        self.objective = PolicyObjective(policy, algorithm, torch.device("cpu"))
        super().__init__(policy, algorithm, config, device)

    # ---- Updater ----------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """See `Updater.begin`."""
        self.send_buffers()
        self._batch = batch

    def epoch(self, minibatches: Minibatches, learning_rate: float) -> np.ndarray:
        """See `Updater.epoch`: each minibatch is divided over the ranks, and the loss by the counts of the whole one."""
        assert self._batch is not None, "begin comes first"
        batch = self._with_advantages(self._batch, minibatches)
        size = self.sharding.micro_batch_size or self.algorithm.micro_batch_size
        counts = [self.objective.counts(chosen_rows(batch, torch.from_numpy(rows))) for rows in _minibatch_rows(minibatches)]

        def part_of(index: int) -> tuple[Batch, list[Step]]:
            rows, mask, parts = plan_rows(minibatches, index, self.num_parts, size)
            own = chosen_rows(batch, torch.from_numpy(rows)).replaced(mask=torch.from_numpy(mask))
            return own, [Step(own_parts, count) for own_parts, count in zip(parts, counts, strict=True)]

        for index, link in self.links():
            part, steps = part_of(index)
            message = {"do": "epoch", "learning_rate": learning_rate, "steps": [dataclasses.asdict(step) for step in steps]}
            self.send(link, message, pack(part))
        with self.blaming_workers():
            figures = self.rank.epoch(*part_of(0), learning_rate)
        start, stop = minibatches.bounds[len(figures) - 1]
        raise_if_not_finite(figures[-1, -1], figures[-1, METRICS.index("grad_norm")], minibatches.permutation[start:stop])
        return figures[:, :-1]

    def values(self, observation: dict[str, Any]) -> np.ndarray:
        """See `Updater.values`: each rank computes as many rows."""
        return self.prepared_values(prepare_observation(self.policy, observation))

    def prepared_values(self, ready: dict[str, Tensor]) -> np.ndarray:
        """The same of prepared observations; [B, K] of a policy with a value for each step of a chunk."""
        self.send_buffers()
        num_rows = len(next(iter(ready.values())))
        size = max(-(-num_rows // self.num_parts), 1)
        if num_rows == 0:
            return np.zeros(0, np.float32)
        chunk = VALUE_ROWS if isinstance(self.policy, ActorCritic) else self.algorithm.micro_batch_size or ROWS

        def part(index: int) -> dict[str, Tensor]:
            rows = torch.arange(index * size, (index + 1) * size).clamp(max=num_rows - 1)  # filled up with the last row
            return {key: tensor.index_select(0, rows) for key, tensor in ready.items()}

        for index, link in self.links():
            self.send(link, {"do": "values", "chunk": chunk}, part(index))
        with self.blaming_workers():
            found = [self.rank.values(part(0), chunk)]
            answers = [link.recv()[1]["value"] for _, link in self.links()]
            shards = self.sharding.num_tensor_shards
            found += answers[shards - 1 :: shards]
        return torch.cat(found)[:num_rows].numpy()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _with_advantages(self, batch: Batch, minibatches: Minibatches) -> Batch:
        """Advantages whitened by minibatch, where the algorithm says so: a rank does not know the others' mean."""
        if self.algorithm.normalize_advantage != "minibatch":
            return batch
        advantage = batch.advantage.clone()
        for numbers in _minibatch_rows(minibatches):
            rows = torch.from_numpy(numbers)
            advantage[rows] = whitened(chosen_rows(batch, rows)).advantage
        return batch.replaced(advantage=advantage)

    def send_buffers(self) -> None:
        """Give the ranks the statistics that the training loop keeps; before anything is computed on new rows."""
        buffers = dict(self.policy.named_buffers())
        if buffers:
            self.tell({"do": "buffers"}, buffers)
            self.rank.set_buffers(buffers)


def make_sharded_updater(policy: Any, algorithm: AlgorithmConfig, config: HybridConfig) -> ShardedUpdater:
    """The updater of a configuration with `sharding`. Raises as `ShardedUpdater`."""
    return ShardedUpdater(policy, algorithm, config, resolve_device(config.device))


def plan_rows(
    minibatches: Minibatches, index: int, num_parts: int, micro_batch_size: int | None
) -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, int]]]]:
    """What part `index` of `num_parts` trains on in one epoch: rows [n] of the batch, whether they count [n], and for each minibatch the
    half-open ranges of these rows that are its micro-batches.

    Each minibatch is divided evenly. All parts have equally many micro-batches, because their ranks gather parameters together; a part
    that has fewer rows repeats one that does not count.
    """
    rows, counts, steps = [], [], []
    first = 0
    for chosen in _minibatch_rows(minibatches):
        most = -(-len(chosen) // num_parts)
        size = micro_batch_size or most
        num_micro = -(-most // size)
        edges = np.linspace(0, len(chosen), num_parts + 1).astype(np.int64)
        own = chosen[edges[index] : edges[index + 1]]
        # Filled up to one row per micro-batch at least.
        filled = np.concatenate([own, np.repeat(chosen[:1], max(num_micro - len(own), 0))])
        cuts = np.linspace(0, len(filled), num_micro + 1).astype(np.int64)
        rows.append(filled)
        counts.append(np.arange(len(filled)) < len(own))
        steps.append([(first + a, first + b) for a, b in itertools.pairwise(cuts.tolist())])
        first += len(filled)
    return np.concatenate(rows), np.concatenate(counts), steps


def _minibatch_rows(minibatches: Minibatches) -> list[np.ndarray]:
    return [minibatches.permutation[start:stop] for start, stop in minibatches.bounds]
