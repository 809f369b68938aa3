"""Any advantage and loss of the tables, on groups of whole episodes: of one domain or several, by one policy or one of each domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_rl.algorithms.episode_method import Credit, EpisodeBatch, EpisodeMethod, EpisodeValues
from embodied_rl.algorithms.units import Level
from embodied_rl.config import TrainConfig
from embodied_rl.learning.episode_objectives import EpisodeObjective
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.rows import EpisodeRows
from embodied_rl.methods.base import Experience
from embodied_rl.methods.learners import PolicyLearner, RobotLearner, StreamsMethod, together
from embodied_rl.methods.streams import Stream, episode_figures, make_collector, make_queue, prefixed
from embodied_rl.policies.base import Policy, TensorObservation, prepare_observation
from embodied_rl.rollout.domains import PLAYER_SIGN, place_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.types import EpisodeGroup


@dataclass(frozen=True)
class PreparedEpisodes:
    """Episodes with their credit, as rows of the learner."""

    batch: EpisodeBatch
    credit: Credit
    rows: EpisodeRows


def of_domain(name: str, groups: Sequence[EpisodeGroup]) -> list[EpisodeGroup]:
    """Those that were played in a domain; the only one of a run has no name."""
    return [group for group in groups if not name or group.domain.partition(PLAYER_SIGN)[0] == name]


class EpisodeLearner(RobotLearner[EpisodeMethod]):
    """Learns from episodes: a row is an episode."""

    place = "episodes"

    def __init__(self, config: TrainConfig, configs: Mapping[str, TrainConfig], policy: Policy, ranks: RankHost | None = None) -> None:
        """See `RobotLearner`."""
        self._objective = EpisodeObjective(policy, config.algorithm, config.hybrid.precision)
        super().__init__(config, configs, policy, EpisodeMethod, self._objective, ranks)

    def gather(self, groups: Sequence[EpisodeGroup]) -> dict[str, EpisodeBatch]:
        """{domain: its episodes}"""
        own = {name: of_domain(name, groups) for name in self.methods}
        return {name: EpisodeBatch.of(found, lambda seen: prepare_observation(self.policy, seen)) for name, found in own.items() if found}

    def observation(self, gathered: dict[str, EpisodeBatch]) -> TensorObservation:
        return together([batch.observation for batch in gathered.values()]) if self.moves_statistics else {}

    def prepare(self, gathered: dict[str, EpisodeBatch]) -> list[PreparedEpisodes]:
        return [prepare_episodes(self.methods[name], self.learner, self._objective, batch) for name, batch in gathered.items()]

    def update(self, prepared: list[PreparedEpisodes], *, iteration: int, steps: int) -> dict[str, float]:
        rows = EpisodeRows.joined([part.rows for part in prepared])
        if iteration < self.config.algorithm.critic_warmup:
            rows = replace(rows, inputs={**rows.inputs, "advantage": torch.zeros_like(rows.inputs["advantage"])})
        stats = self.learner.update(
            rows,
            minibatch_rows=rows.episodes_of(self.config.algorithm.minibatch_size),
            progress=min(steps / self.config.total_steps, 1.0),
            seed=[self.config.seed, iteration],
            kl_coef=self.kl.coefficient.value,
        )
        credit = {key: value for part in prepared for key, value in part.credit.metrics.items()}
        return {**stats, **credit, **self.kl.measured(stats, int(rows.inputs["decisions"].sum()))}


class GroupMethod(StreamsMethod):
    """Groups of all streams out of one queue; every policy learns from its own."""

    def __init__(
        self,
        config: TrainConfig,
        streams: Sequence[Stream],
        learners: Mapping[str, PolicyLearner],
        run_dir: Path,
        queue: GroupQueue | None = None,
        *,
        divided: str,
    ) -> None:
        """`queue`: what the streams' collectors fill; None: they are played elsewhere; else see `StreamsMethod`."""
        super().__init__(config, streams, learners, run_dir, divided=divided)
        self.queue = queue or make_queue(config, streams)
        if queue is not None:
            self.collector = make_collector(streams, queue)
        self._figures: dict[str, float] = {}

    def collect(self, iteration: int) -> Experience[dict[str, Any]]:
        groups = self.collector.next_groups(iteration)
        self._note(groups)
        streams = {stream.name: stream for stream in self.streams}
        trained = [group for group in groups if streams[group.domain].trained]
        episodes = [episode for group in trained for episode in group.episodes]
        # Success rates, and what is chosen by them, are of ordinary starts.
        ordinary = [episode for episode in episodes if episode.metadata.get("start", {}).get("source") is None]
        finished = [(episode.success, episode.game_return, episode.num_steps) for episode in ordinary]
        own = {name: [group for group in trained if streams[group.domain].policy == name] for name in self.learners}
        gathered, observation = self.gathered({name: found for name, found in own.items() if found})
        return Experience(sum(episode.num_steps for episode in episodes), finished, observation, gathered)

    def published(self, version: int) -> None:
        self.queue.published(version)
        self.starts.commit(self.queue)

    def restart(self, iteration: int) -> None:
        """Episodes in flight are asked for again, with the same seeds; a warm start comes before the first ones."""
        self.warm_start.run(iteration)
        self._go_on_with(self.queue.state_dict())
        self.starts.record()

    def metrics(self) -> dict[str, float]:
        figures = self.queue.counts().figures()
        if self.streams[0].domain:
            for name, own in self.queue.domain_counts().items():
                counts = own.figures("").items()
                figures |= {f"{place_of(name)}/groups_{outcome}": value for outcome, value in counts if outcome != "in_flight"}
        figures |= self.starts.metrics()
        learned = {key: value for learner in self.learners.values() for key, value in learner.metrics().items()}
        return {**figures, **self._figures, **self.collector.metrics(), **learned}

    def played_state(self) -> dict[str, Any]:
        """See `StreamsMethod.played_state`: the queue, and where groups start."""
        return {"queue": self.queue.state_dict(), **self.starts.of_method(self.queue)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._go_on_with(state["queue"])

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _go_on_with(self, state: Mapping[str, Any]) -> None:
        """Give what is being played up, and ask for what a queue's state says."""
        self.queue = make_queue(self.config, self.streams)
        self.queue.load_state_dict(state)
        self.starts.discard()
        self.collector.restart(self.queue)

    def _note(self, groups: Sequence[EpisodeGroup]) -> None:
        """Figures of this batch: of each named domain as the run's own player played it, and of every player where there are several."""
        self._figures = {}
        for stream in self.streams:
            own = [group for group in groups if group.domain == stream.name]
            if stream.is_own:
                self.learners[stream.policy].note(stream, own)
            if stream.is_own and stream.domain:
                self._figures |= prefixed(f"domains/{stream.domain}", _figures(own))
            if self.config.generation.mix:
                self._figures |= prefixed(f"players/{stream.player}/{stream.domain}", _figures(own))


def _figures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """``groups`` of a batch, and `episode_figures`."""
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [(episode.success, episode.game_return, episode.num_steps) for episode in episodes]
    return {"groups": float(len(groups)), **episode_figures(finished)}


def prepare_episodes(algorithm: EpisodeMethod, learner: Learner, objective: EpisodeObjective, batch: EpisodeBatch) -> PreparedEpisodes:
    """Credit of every step, by what the learner's policy says of a batch before its update; `objective`: the learner's."""
    ready, action = batch.observation, batch.action
    present = learner.log_probs(ready, action) if learner.needs_present else None
    reference = learner.log_probs(ready, action, of_reference=True) if learner.has_reference else None
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(batch.shape[0]))
    if algorithm.composition.needs_critic:
        flat, final = learner.values(ready), learner.values(batch.final_observation)
        first = final if final.ndim == 1 else final[:, 0].copy()  # of each step of a chunk: what comes after begins with the first
        values = EpisodeValues(batch.scatter(torch.from_numpy(flat)), torch.from_numpy(first))
    level: Level = "action" if algorithm.looks_into_chunks else "chunk"
    credit = algorithm.prepare(batch, values, objective.of_decisions(batch, algorithm.kl.divergence(present, reference), level))
    rows = objective.rows_of(batch, credit, present, reference)
    if algorithm.config.correction.enabled:
        sampled = {name: rows.inputs[name] for name in ("behaviour_log_prob", "mask", "chunk_id")}
        advantage, figures = algorithm.corrected(rows.inputs["advantage"], rows.inputs["old_log_prob"], **sampled)
        rows, credit = replace(rows, inputs={**rows.inputs, "advantage": advantage}), replace(credit, metrics=credit.metrics | figures)
    return PreparedEpisodes(batch, credit, rows)
