"""Any advantage and loss of the tables, on groups of whole episodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.config import GroupsConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import EpisodeObjective
from embodied_rl.learning.rows import EpisodeRows
from embodied_rl.methods.base import Experience, Method
from embodied_rl.policies.base import Policy, layout_of, prepare_observation
from embodied_rl.registry import load_target
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.schedule import GroupQueueConfig, group_seed
from embodied_rl.rollout.start_sources import record_expert, shown_expert
from embodied_rl.sim.instrumented import Expert, instrumented, needs_simulator
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeGroup, SimSpec

_EXPERT_TRIES = 3
"""Episodes that an expert may play for each one that is wanted."""


@dataclass(frozen=True)
class PreparedEpisodes:
    """Episodes with their credit, as rows of the learner."""

    batch: EpisodeBatch
    credit: Credit
    rows: EpisodeRows

    def minibatch_rows(self, minibatch_size: int) -> int:
        """As many episodes as have about `minibatch_size` steps."""
        return round(minibatch_size * int(self.credit.mask.any(1).sum()) / max(int(self.credit.mask.sum()), 1))


class GroupMethod(Method):
    """Any advantage and loss of the tables, on whole episodes in groups."""

    learner: Learner

    def __init__(self, config: TrainConfig, manager: Simulators, policy: Policy, generator: Generator) -> None:
        assert config.algorithm.groups is not None, "RolloutMethod is for runs without groups"
        self.config = config
        self.algorithm = EpisodeMethod(config.algorithm)
        objective = EpisodeObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(objective, policy, config.algorithm, config.hybrid)
        self.learner.keep_reference()
        self._prepare = functools.partial(prepare_observation, policy)
        self._task = manager.spec.task
        self.queue = self._new_queue()
        self.starts = make_starts(config, manager.spec)
        self.collector = make_group_collector(config, manager, generator, self.queue, layout_of(policy), self.starts)

    def collect(self, iteration: int) -> Experience:
        groups: list[EpisodeGroup] = self.collector.next_groups(iteration)
        episodes = [episode for group in groups for episode in group.episodes]
        batch = self.batch(groups)
        # Success rates, and what is chosen by them, are of ordinary starts.
        ordinary = [episode for episode in episodes if episode.metadata.get("start", {}).get("source") is None]
        finished = [(episode.success, episode.episode_return, episode.num_steps) for episode in ordinary]
        return Experience(sum(episode.num_steps for episode in episodes), finished, batch.observation, batch)

    def batch(self, groups: list[EpisodeGroup]) -> EpisodeBatch:
        """Groups as `prepare` takes them, in an `Experience`."""
        return EpisodeBatch.of(groups, self._prepare)

    def prepare(self, experience: Experience) -> PreparedEpisodes:
        return prepare_episodes(self.algorithm, self.learner, experience.data)

    def update(self, prepared: PreparedEpisodes, *, iteration: int, steps: int) -> dict[str, float]:
        stats = self.learner.update(
            prepared.rows,
            minibatch_rows=prepared.minibatch_rows(self.config.algorithm.minibatch_size),
            progress=steps / self.config.total_steps,
            seed=[self.config.seed, iteration],
            kl_coef=self.algorithm.kl_coefficient.value,
        )
        stats |= prepared.credit.metrics
        if "kl" in stats and self.config.algorithm.kl.place == "loss":
            self.algorithm.adapt(stats["kl"], int(prepared.credit.mask.sum()))
            stats["kl_coef"] = self.algorithm.kl_coefficient.value
        return stats

    def published(self, version: int) -> None:
        self.queue.published(version)
        if self.starts is not None:
            self.starts.commit(self._in_flight())

    def restart(self, iteration: int) -> None:
        """Episodes in flight are asked for again, with the same seeds."""
        state = self.queue.state_dict()
        self.queue = self._new_queue()
        self.queue.load_state_dict(state)
        self.collector.restart(self.queue)
        self._record_expert()

    def metrics(self) -> dict[str, float]:
        return {**self.queue.counts().figures(), **({} if self.starts is None else self.starts.metrics()), **self.collector.metrics()}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        state = {"episodes": self.algorithm.state_dict(), "queue": self.queue.state_dict()}
        return state | ({} if self.starts is None else {"starts": self.starts.state_dict(self._in_flight())})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["episodes"])
        self.queue = self._new_queue()
        self.queue.load_state_dict(state["queue"])
        if self.starts is not None:
            self.starts.load_state_dict(state["starts"])
        self.collector.restart(self.queue)

    def _in_flight(self) -> list[int]:
        """Numbers of the groups that would be asked for again, were the run resumed now."""
        return [int(number) for number in self.queue.state_dict()["redo"]]

    def _record_expert(self) -> None:
        """At the beginning of a run; a resumed one has the expert's episodes in its checkpoint. Raises UserError."""
        options = self.config.algorithm.initialized
        if self.starts is None or "expert" not in options.sources or self.starts.num_expert_messages > 0:
            return
        assert options.expert is not None, "the configuration was checked"
        if not needs_simulator(options.expert):
            self._record_with(self.collector.manager, load_target(options.expert))
            return
        # The expert reads the simulator's state, in separate processes: the run's simulators stay as they are.
        shown = instrumented(self.config.sim, expert=options.expert, reconfigure=False)
        chunk_size = self.config.policy.chunk_size
        with EnvManager.from_config(shown, EpisodeSeeds.given(0), autoreset=False, chunk_size=chunk_size) as manager:
            self._record_with(manager, shown_expert)

    def _record_with(self, manager: Simulators, make_expert: Callable[[], Expert]) -> None:
        options = self.config.algorithm.initialized
        assert self.starts is not None, "no start source, but starts inside an expert's episodes"
        wanted, first = options.expert_episodes, 0
        while wanted and first < _EXPERT_TRIES * options.expert_episodes:
            seeds = [group_seed(self.config.seed, "expert", number) for number in range(first, first + wanted)]
            recorded, played = record_expert(manager, make_expert, seeds, every=options.chunk_steps)
            good = [source for source in recorded if self.starts.is_success(source.success, source.episode_return)]
            self.starts.add(good, num_messages=played)
            wanted, first = wanted - len(good), first + len(seeds)
        if wanted:
            raise UserError(
                f"The expert algorithm.initialized.expert={options.expert} succeeded in {options.expert_episodes - wanted} of {first} "
                f"episodes, and {options.expert_episodes} successful ones were asked for (algorithm.initialized.expert_episodes)."
            )

    def _new_queue(self) -> GroupQueue:
        return make_group_queue(self.config, self._task)


def prepare_episodes(algorithm: EpisodeMethod, learner: Learner, batch: EpisodeBatch) -> PreparedEpisodes:
    """Credit of every step, by what the learner's policy says of a batch before its update."""
    objective = learner.objective
    assert isinstance(objective, EpisodeObjective), "a learner of episodes"
    ready, action = batch.observation, batch.action
    present = learner.log_probs(ready, action) if learner.needs_present else None
    reference = learner.log_probs(ready, action, of_reference=True) if learner.has_reference else None
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(batch.shape[0]))
    if algorithm.composition.needs_critic:
        flat, final = learner.values(ready), learner.values(batch.final_observation)
        values = EpisodeValues(batch.scatter(torch.from_numpy(flat)), torch.from_numpy(final))
    whole, first = (objective.of_decisions(batch, log_prob) for log_prob in (present, reference))
    credit = algorithm.prepare(batch, values, algorithm.divergence(whole, first), present=whole)
    return PreparedEpisodes(batch, credit, objective.rows_of(batch, credit, present, reference))


def make_group_queue(config: TrainConfig, task: str, share: Share = WHOLE) -> GroupQueue:
    """The queue that a configuration describes, for groups of one task; `share`: which of them."""
    groups = config.algorithm.groups
    assert groups is not None, "a method on groups"
    filters = build_filters(groups.filters)
    return GroupQueue(queue_config(groups), seed=config.seed, domains=DomainMixture.single(task), filters=filters, share=share)


def make_group_collector(
    config: TrainConfig,
    manager: Simulators,
    generator: Generator,
    queue: GroupQueue,
    layout: ActionLayout,
    starts: StartLibrary | None = None,
) -> GroupCollector:
    """The collector that a configuration describes, in whatever process the simulators are."""
    groups = config.algorithm.groups
    assert groups is not None, "a method on groups"
    return GroupCollector(
        manager,
        generator,
        queue,
        seed=config.seed,
        min_ready=1 if groups.max_staleness else None,
        greedy_member="greedy_baseline" in compose(config.algorithm).advantage.needs,
        starts=starts,
        layout=layout,
    )


def queue_config(groups: GroupsConfig) -> GroupQueueConfig:
    """The group queue that a configuration describes. Raises UserError for an impossible setting."""
    return GroupQueueConfig(
        group_size=groups.group_size,
        groups_per_step=groups.groups_per_step,
        redundancy=groups.redundancy,
        max_staleness=groups.max_staleness,
        max_retries=groups.max_retries,
        max_rejected_per_step=groups.max_rejected_per_step,
        episode_timeout_s=groups.episode_timeout_s,
    )


def make_starts(config: TrainConfig, spec: SimSpec) -> StartLibrary | None:
    """Where groups start that do not start ordinarily; None: there are none. Raises UserError where the task does not allow it."""
    options = config.algorithm.initialized
    if options.share == 0:
        return None
    if spec.snapshots == "none":
        raise UserError(f"algorithm.initialized starts inside episodes, and those of task '{spec.task}' cannot be taken up again.")
    if options.success_return is None and not spec.reports_success:
        raise UserError(f"Task '{spec.task}' does not report success: set algorithm.initialized.success_return.")
    return StartLibrary(options, seed=config.seed)
