"""Any advantage and loss of the tables, on groups of whole episodes: one domain or several, one policy for all or one per domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from embodied_rl.algorithms.episode_method import Credit, EpisodeBatch, EpisodeMethod, EpisodeValues
from embodied_rl.algorithms.units import Level
from embodied_rl.config import TrainConfig
from embodied_rl.learning.episode_objectives import EpisodeObjective
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.rows import EpisodeRows
from embodied_rl.methods.learners import PlayingLearner, Prepared, together
from embodied_rl.policies.base import Policy, TensorObservation, prepare_observation
from embodied_rl.types import EpisodeGroup


class EpisodeLearner(PlayingLearner[EpisodeMethod]):
    """Learns from episodes: a row is an episode."""

    policy: Policy
    place = "episodes"

    def __init__(self, config: TrainConfig, configs: Mapping[str, TrainConfig], policy: Policy, ranks: RankHost | None = None) -> None:
        """See `PlayingLearner`."""
        self._objective = EpisodeObjective(policy, config.algorithm, config.hybrid.precision)
        super().__init__(config, configs, policy, EpisodeMethod, self._objective, ranks)

    def gather(self, played: dict[str, list[EpisodeGroup]]) -> dict[str, EpisodeBatch]:
        return {name: EpisodeBatch.of(own, lambda seen: prepare_observation(self.policy, seen)) for name, own in played.items()}

    def observation(self, gathered: dict[str, EpisodeBatch]) -> TensorObservation:
        return together([batch.observation for batch in gathered.values()]) if self.moves_statistics else {}

    def valued(self, method: EpisodeMethod, experience: EpisodeBatch) -> Prepared:
        rows, credit = prepare_episodes(method, self.learner, self._objective, experience)
        return Prepared(rows, int(credit.mask.sum()), credit.metrics)

    def minibatch_rows(self, rows: EpisodeRows, num_decisions: int) -> int:
        return rows.episodes_of(self.config.algorithm.minibatch_size)


def prepare_episodes(
    algorithm: EpisodeMethod, learner: Learner, objective: EpisodeObjective, batch: EpisodeBatch
) -> tuple[EpisodeRows, Credit]:
    """Episodes as rows, and the credit of every step, from the learner's policy before the update; `objective`: the learner's."""
    ready, action = batch.observation, batch.action
    present = learner.log_probs(ready, action) if learner.needs_present else None
    reference = learner.log_probs(ready, action, of_reference=True) if learner.has_reference else None
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(batch.shape[0]))
    if algorithm.advantage.returns_value_target:
        flat, final = learner.values(ready), learner.values(batch.final_observation)
        first = final if final.ndim == 1 else final[:, 0].copy()  # a value per step of a chunk: the next state's is the first
        values = EpisodeValues(batch.scatter(torch.from_numpy(flat)), torch.from_numpy(first))
    level: Level = "action" if algorithm.looks_into_chunks else "chunk"
    credit = algorithm.prepare(batch, values, objective.of_decisions(batch, algorithm.kl.divergence(present, reference), level))
    rows = objective.rows_of(batch, credit, present, reference)
    if algorithm.config.correction.enabled:
        sampled = {name: rows.inputs[name] for name in ("behaviour_log_prob", "mask", "chunk_id")}
        advantage, figures = algorithm.corrected(rows.inputs["advantage"], rows.inputs["old_log_prob"], **sampled)
        rows, credit = replace(rows, inputs={**rows.inputs, "advantage": advantage}), replace(credit, metrics=credit.metrics | figures)
    return rows, credit
