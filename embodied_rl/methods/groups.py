"""Any advantage and loss of the tables, on groups of whole episodes: of one domain or several, by one policy or one of each domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.units import Level
from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.learning.episode_objectives import EpisodeObjective
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.rows import EpisodeRows
from embodied_rl.methods.base import Experience, Method, Recordable
from embodied_rl.methods.starts import Starts
from embodied_rl.methods.streams import Stream, make_collector, make_queue, of_name, prefixed, recordable_streams
from embodied_rl.policies.base import Policy, TensorObservation, TrainedModule, prepare_observation
from embodied_rl.rollout.domains import PLAYER_SIGN, place_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.types import EpisodeGroup, SimSpec


@dataclass(frozen=True)
class PreparedEpisodes:
    """Episodes with their credit, as rows of the learner."""

    batch: EpisodeBatch
    credit: Credit
    rows: EpisodeRows


class GroupLearner:
    """One policy with its learner: what it learns from the groups of its streams."""

    config: TrainConfig
    policy: TrainedModule
    learner: Learner

    @staticmethod
    def of_domain(name: str, groups: Sequence[EpisodeGroup]) -> list[EpisodeGroup]:
        """Those that were played in a domain; the only one of a run has no name."""
        return [group for group in groups if not name or group.domain.partition(PLAYER_SIGN)[0] == name]

    def gather(self, groups: Sequence[EpisodeGroup]) -> Any:
        """Its groups as `prepare` takes them; by default as they are."""
        return list(groups)

    def observation(self, gathered: Any) -> TensorObservation:
        """Everything that the policy saw, for its statistics; texts have none."""
        return {}

    def prepare(self, gathered: Any) -> Any:
        """Rewards become advantages; no parameter changes."""
        raise NotImplementedError

    def update(self, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        """One update; its metrics. Raises NonFiniteLossError."""
        raise NotImplementedError

    @property
    def wants_start(self) -> bool:
        """Whether `begin` has a warm start to make."""
        return False

    def begin(self, version: int) -> None:
        """Before the run's first episodes: a warm start, where there is one; the weights it leaves are published as `version`."""

    def note(self, stream: Stream, groups: Sequence[EpisodeGroup]) -> None:
        """What was played in a separate stream for this batch."""

    def finish(self, run_dir: Path) -> None:
        """The run is over: write down what is to be read."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside the learner's tensors, JSON-able."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class EpisodeLearner(GroupLearner):
    """Learns from robots' episodes: a row is an episode. Each domain's are valued in its own way, and one update learns from all."""

    def __init__(self, config: TrainConfig, configs: Mapping[str, TrainConfig], policy: Policy, ranks: RankHost | None = None) -> None:
        """`config`: of the update; `configs`: {domain that the policy plays: its own}; `ranks`: see `make_learner`."""
        self.config, self.policy = config, policy
        self._methods = {name: EpisodeMethod(own.algorithm) for name, own in configs.items()}
        self._moves = all(own.algorithm.moves_statistics for own in configs.values())
        self._objective = EpisodeObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(self._objective, policy, config.algorithm, config.hybrid, ranks=ranks)
        self._policy = policy

    def gather(self, groups: Sequence[EpisodeGroup]) -> dict[str, EpisodeBatch]:
        """{domain: its episodes}"""
        own = {name: self.of_domain(name, groups) for name in self._methods}
        return {name: EpisodeBatch.of(found, lambda seen: prepare_observation(self._policy, seen)) for name, found in own.items() if found}

    def observation(self, gathered: dict[str, EpisodeBatch]) -> TensorObservation:
        batches = [batch.observation for batch in gathered.values()] if self._moves else []
        return {key: torch.cat([seen[key] for seen in batches]) for key in batches[0]} if batches else {}

    def begin(self, version: int) -> None:
        """See `GroupLearner.begin`: what was cloned, if anything was, is what a KL term compares with."""
        self.learner.keep_reference()

    def prepare(self, gathered: dict[str, EpisodeBatch]) -> list[PreparedEpisodes]:
        return [prepare_episodes(self._methods[name], self.learner, self._objective, batch) for name, batch in gathered.items()]

    def update(self, prepared: list[PreparedEpisodes], *, iteration: int, steps: int) -> dict[str, float]:
        rows, kl = EpisodeRows.joined([part.rows for part in prepared]), next(iter(self._methods.values())).kl
        if iteration < self.config.algorithm.critic_warmup:
            rows = replace(rows, inputs={**rows.inputs, "advantage": torch.zeros_like(rows.inputs["advantage"])})
        stats = self.learner.update(
            rows,
            minibatch_rows=rows.episodes_of(self.config.algorithm.minibatch_size),
            progress=min(steps / self.config.total_steps, 1.0),
            seed=[self.config.seed, iteration],
            kl_coef=kl.coefficient.value,
        )
        told = {key: value for part in prepared for key, value in part.credit.metrics.items()}
        return {**stats, **told, **kl.measured(stats, int(rows.inputs["decisions"].sum()))}

    def state_dict(self) -> dict[str, Any]:
        states = {name: method.state_dict() for name, method in self._methods.items()}
        return {"episodes": states if len(states) > 1 else next(iter(states.values()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, method in self._methods.items():
            method.load_state_dict(state["episodes"][name] if len(self._methods) > 1 else state["episodes"])


@dataclass(frozen=True)
class Gathered:
    """What one update learns from."""

    groups: list[EpisodeGroup]
    """Those that are learned from, ascending by number."""
    of: dict[str, Any]
    """{policy: what its `GroupLearner.gather` made of its groups}, of those that have any."""


class LearnersStart:
    """What comes before a run's first episodes, of all learners."""

    def __init__(self, learners: Sequence[GroupLearner]) -> None:
        self._learners = list(learners)

    @property
    def wanted(self) -> bool:
        """Whether any learner has a warm start to make."""
        return any(learner.wants_start for learner in self._learners)

    def run(self, version: int) -> None:
        """See `GroupLearner.begin`."""
        for learner in self._learners:
            learner.begin(version)


class GroupMethod(Method[Gathered, dict[str, Any]]):
    """Groups of all streams out of one queue; every policy learns from its own."""

    def __init__(
        self,
        config: TrainConfig,
        streams: Sequence[Stream],
        learners: Mapping[str, GroupLearner],
        run_dir: Path,
        queue: GroupQueue | None = None,
        *,
        divided: str,
    ) -> None:
        """
        Args:
            streams: where they play in this process, with collectors that fill `queue`.
            learners: {name of the policy (`Stream.policy`): what trains it}.
            run_dir: gets what is written down when the run ends.
            divided: name of the policy that ranks train, in this run or in the one that wrote its checkpoint.
            queue: None: the streams are played elsewhere, and what connects them sets `collector`.
        """
        self.config, self.streams, self.learners, self._run_dir = config, list(streams), dict(learners), run_dir
        self._divided = divided
        self.warm_start: LearnersStart = LearnersStart(list(self.learners.values()))
        self.queue, self.starts = queue or make_queue(config, streams), Starts(streams)
        if queue is not None:
            self.collector = make_collector(config, streams, queue)
        self._figures: dict[str, float] = {}

    @property
    def all_learners(self) -> list[Learner]:
        return [own.learner for own in self.learners.values()]

    def recordable(self, num_slots: int, spec: SimSpec, sim: SimConfig) -> list[Recordable]:
        """See `Method.recordable`: one for each domain."""
        return recordable_streams(self.streams)

    def collect(self, iteration: int) -> Experience[Gathered]:
        groups = self.collector.next_groups(iteration)
        self._note(groups)
        streams = {stream.name: stream for stream in self.streams}
        trained = [group for group in groups if streams[group.domain].trained]
        episodes = [episode for group in trained for episode in group.episodes]
        # Success rates, and what is chosen by them, are of ordinary starts.
        ordinary = [episode for episode in episodes if episode.metadata.get("start", {}).get("source") is None]
        finished = [(episode.success, episode.game_return, episode.num_steps) for episode in ordinary]
        gathered: dict[str, Any] = {}
        observation: TensorObservation = {}
        for name, learner in self.learners.items():
            if own := [group for group in trained if streams[group.domain].policy == name]:
                gathered[name] = learner.gather(own)
                observation |= prefixed(name, learner.observation(gathered[name]))
        return Experience(sum(episode.num_steps for episode in episodes), finished, observation, Gathered(trained, gathered))

    def prepare(self, experience: Experience[Gathered]) -> dict[str, Any]:
        return {name: self.learners[name].prepare(own) for name, own in experience.data.of.items()}

    def update(self, prepared: dict[str, Any], *, iteration: int, steps: int) -> dict[str, float]:
        stats: dict[str, float] = {}
        for name, own in prepared.items():
            stats |= prefixed(name, self.learners[name].update(own, iteration=iteration, steps=steps))
        return stats

    def published(self, version: int) -> None:
        self.queue.published(version)
        self.starts.commit(self.queue)

    def restart(self, iteration: int) -> None:
        """Episodes in flight are asked for again, with the same seeds; a warm start comes before the first ones."""
        self.warm_start.run(iteration)
        self._go_on_with(self.queue.state_dict())
        self.starts.record()

    def finish(self) -> None:
        for learner in self.learners.values():
            learner.finish(self._run_dir)

    def metrics(self) -> dict[str, float]:
        figures = self.queue.counts().figures()
        if self.streams[0].domain:
            for name, own in self.queue.domain_counts().items():
                counts = own.figures("").items()
                figures |= {f"{place_of(name)}/groups_{outcome}": value for outcome, value in counts if outcome != "in_flight"}
        figures |= self.starts.metrics()
        told = {key: value for learner in self.learners.values() for key, value in learner.metrics().items()}
        return {**figures, **self._figures, **self.collector.metrics(), **told}

    def state_tensors(self) -> dict[str, Tensor]:
        return {key: part for name, own in self.learners.items() for key, part in prefixed(name, own.learner.state_tensors()).items()}

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What ranks wrote of their optimizer, as it stands in `state_tensors` of a run without ranks."""
        return prefixed(self._divided, state)

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for name, own in self.learners.items():
            own.learner.load_state_tensors(of_name(name, state))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"queue": self.queue.state_dict()}
        if libraries := self.starts.state(self.queue):
            state["starts"] = libraries.get("", libraries)
        own = {name: learner.state_dict() for name, learner in self.learners.items()}
        if "" in own:
            return {**own[""], **state}
        specs = {stream.domain: stream.spec.to_dict() for stream in self.streams if stream.is_own}
        return {**state, "roles": own, "specs": specs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_state_dict(state["roles"][name] if name else state)
        if self.starts.wanted:
            told = state["starts"]
            self.starts.load(told if self.streams[0].domain else {"": told})
        self._go_on_with(state["queue"])

    def with_trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `Method.with_trained`: queue, starts and warm starts are of this process."""
        own = self.state_dict()
        for name in ("queue", "starts", "warm_start"):
            state |= {name: own[name]} if name in own else {}
        roles = {name: {**role, **_started(own["roles"][name])} for name, role in state.get("roles", {}).items()}
        return {**state, "roles": roles} if roles else state

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


def _started(role: Mapping[str, Any]) -> dict[str, Any]:
    """What a policy's state says of its warm starts."""
    return {name: role[name] for name in ("warm_starts",) if name in role}


def _figures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """``groups`` and ``episodes`` of a batch, and means over its episodes, where there are any: ``success``, ``return``, ``length``."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts = {"groups": float(len(groups)), "episodes": float(len(episodes))}
    if not episodes:
        return counts
    return {
        **counts,
        "success": float(np.mean([episode.success for episode in episodes])),
        "return": float(np.mean([episode.game_return for episode in episodes])),
        "length": float(np.mean([episode.num_steps for episode in episodes])),
    }


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
