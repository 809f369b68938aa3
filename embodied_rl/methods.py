"""The two shapes of experience behind one loop: fixed rollouts of all slots, and groups of whole episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.config import GroupsConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.episode_learner import EpisodeLearner
from embodied_rl.hybrid.learner import Learner
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import TensorObservation
from embodied_rl.registry import load_target
from embodied_rl.rollout.collector import CollectorTimes, RolloutCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.schedule import GroupQueueConfig, group_seed
from embodied_rl.rollout.start_sources import record_expert
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeGroup, Rollout, SimSpec

_EXPERT_TRIES = 3
"""Episodes that an expert may play for each one that is wanted."""


@dataclass(frozen=True)
class Experience:
    """What was collected for one update."""

    num_steps: int
    finished: list[tuple[bool, float, int]]
    """(success, return, length) of the episodes that ended."""
    observation: TensorObservation
    """{key: [M, ...]} everything the policy saw, for its statistics."""
    data: Any


class Method(Protocol):
    """How experience is collected and learned from; one iteration is `collect`, `prepare`, `update`."""

    learner: Any

    @property
    def times(self) -> CollectorTimes:
        """Of the last `collect`."""
        ...

    def collect(self, iteration: int) -> Experience:
        """Play with the weights that were published as version `iteration`. Raises SimFault (see EnvManager)."""
        ...

    def prepare(self, experience: Experience) -> Any:
        """Rewards → advantages; no parameter changes."""
        ...

    def update(self, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        """Train; metrics. Raises NonFiniteLossError."""
        ...

    def published(self, version: int) -> None: ...

    def restart(self, iteration: int) -> None:
        """Begin new episodes, with seeds that depend on the run's seed and what was consumed alone: where a run can be resumed."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside the learner's tensors, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RolloutMethod:
    """PPO on `rollout_steps` of every slot. Implements `Method`."""

    def __init__(self, config: TrainConfig, manager: EnvManager, policy: ActorCritic, generator: Generator) -> None:
        compose(config.algorithm)
        self.config = config
        self.learner = Learner(policy, config.algorithm, device=config.hybrid.device, num_threads=config.hybrid.num_threads)
        self._algorithm = PPO(config.algorithm)
        self.collector = RolloutCollector(
            manager, generator, rollout_steps=config.algorithm.rollout_steps, num_groups=config.sim.pipeline_groups, seed=config.seed
        )

    @property
    def times(self) -> CollectorTimes:
        return self.collector.times

    def collect(self, iteration: int) -> Experience:
        rollout = self.collector.next_rollout(iteration)
        finished = [(episode.success_once, episode.episode_return, episode.length) for episode in rollout.episodes]
        seen = {key: torch.from_numpy(part).flatten(0, 1) for key, part in rollout.observation.items() if part.dtype != object}
        return Experience(rollout.num_steps, finished, seen, rollout)

    def prepare(self, experience: Experience) -> Batch:
        rollout: Rollout = experience.data
        return self._algorithm.prepare(rollout, self.learner.values(rollout))

    def update(self, prepared: Batch, *, iteration: int, steps: int) -> dict[str, float]:
        return self.learner.update(prepared, iteration=iteration, num_iterations=self.config.num_iterations, seed=self.config.seed)

    def published(self, version: int) -> None:
        pass

    def restart(self, iteration: int) -> None:
        self._algorithm.restart_episodes()
        self.collector.restart(seed_round=iteration)

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self._algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state)


@dataclass(frozen=True)
class _Prepared:
    batch: EpisodeBatch
    credit: Credit
    log_prob: torch.Tensor | None
    reference: torch.Tensor | None


class GroupMethod:
    """Any advantage and loss of the tables, on whole episodes in groups. Implements `Method`."""

    def __init__(self, config: TrainConfig, manager: EnvManager, policy: ActorCritic, generator: Generator) -> None:
        groups = config.algorithm.groups
        assert groups is not None, "RolloutMethod is for runs without groups"
        self.config = config
        self.algorithm = EpisodeMethod(config.algorithm)
        composition = self.algorithm.composition
        self.learner = EpisodeLearner(policy, config.algorithm, composition, config.hybrid.device, config.hybrid.num_threads)
        self._queue_config = queue_config(groups)
        self._filters = build_filters(groups.filters)
        self._domains = DomainMixture.single(manager.spec.task)
        self.queue = self._new_queue()
        self.starts = make_starts(config, manager.spec)
        self.collector = GroupCollector(
            manager,
            generator,
            self.queue,
            seed=config.seed,
            min_ready=1 if groups.max_staleness else None,
            greedy_member="greedy_baseline" in composition.advantage.needs,
            starts=self.starts,
        )

    @property
    def times(self) -> CollectorTimes:
        return self.collector.times

    def collect(self, iteration: int) -> Experience:
        groups: list[EpisodeGroup] = self.collector.next_groups(iteration)
        episodes = [episode for group in groups for episode in group.episodes]
        batch = EpisodeBatch.of(groups)
        # Success rates, and what is chosen by them, are of ordinary starts.
        ordinary = [episode for episode in episodes if episode.metadata.get("start", {}).get("source") is None]
        finished = [(episode.success, episode.episode_return, episode.num_messages) for episode in ordinary]
        return Experience(len(batch.row), finished, batch.observation, batch)

    def prepare(self, experience: Experience) -> _Prepared:
        batch: EpisodeBatch = experience.data
        log_prob, reference = self.learner.log_probs(batch)
        credit = self.algorithm.prepare(batch, self.learner.values(batch), log_prob, reference)
        return _Prepared(batch, credit, log_prob, reference)

    def update(self, prepared: _Prepared, *, iteration: int, steps: int) -> dict[str, float]:
        stats = self.learner.update(
            prepared.batch,
            prepared.credit,
            prepared.log_prob,
            prepared.reference,
            progress=steps / self.config.total_steps,
            seed=[self.config.seed, iteration],
            kl_coef=self.algorithm.kl_coefficient.value,
        )
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
        wanted = ("consumed", "filtered", "stale", "failed", "in_flight")
        counts = {f"groups/{name}": float(getattr(self.queue.counts(), name)) for name in wanted}
        return counts | ({} if self.starts is None else self.starts.metrics())

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
        wanted, first = options.expert_episodes, 0
        while wanted and first < _EXPERT_TRIES * options.expert_episodes:
            seeds = [group_seed(self.config.seed, "expert", number) for number in range(first, first + wanted)]
            recorded, played = record_expert(self.collector.manager, load_target(options.expert), seeds, every=options.chunk_steps)
            good = [source for source in recorded if self.starts.is_success(source.success, source.episode_return)]
            self.starts.add(good, num_messages=played)
            wanted, first = wanted - len(good), first + len(seeds)
        if wanted:
            raise UserError(
                f"The expert algorithm.initialized.expert={options.expert} succeeded in {options.expert_episodes - wanted} of {first} "
                f"episodes, and {options.expert_episodes} successful ones were asked for (algorithm.initialized.expert_episodes)."
            )

    def _new_queue(self) -> GroupQueue:
        return GroupQueue(self._queue_config, seed=self.config.seed, domains=self._domains, filters=self._filters)


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


def check_method(config: TrainConfig) -> None:
    """Raises UserError for mathematics that make no sense together, before any simulator is started."""
    compose(config.algorithm)
    if config.algorithm.groups is not None:
        queue_config(config.algorithm.groups)
        build_filters(config.algorithm.groups.filters)
    elif config.algorithm.initialized.share > 0:
        raise UserError("algorithm.initialized is about groups of whole episodes: choose a method with groups (algorithm=grpo, say).")


def make_method(config: TrainConfig, manager: EnvManager, policy: ActorCritic, generator: Generator) -> Method:
    """What the configuration asks for. Raises UserError for a combination that makes no sense."""
    make = RolloutMethod if config.algorithm.groups is None else GroupMethod
    return make(config, manager, policy, generator)
