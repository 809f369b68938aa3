"""Streams of a run: one for each domain and player. One queue requests the groups of all streams that learn from whole episodes.

A run with one domain has one stream, whose domain has no name: its configuration is the run's, and its metrics and tensors have no prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.algorithms.filters import GroupFilter, build_filters
from embodied_rl.config import PlayerConfig, TrainConfig
from embodied_rl.config.policy import draws_tokens
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.generation.base import Generator
from embodied_rl.rollout.batch_sinks import FOLDER, TrainingRecorder
from embodied_rl.rollout.collector import NOT_PLAYED, Collector, RolloutCollector
from embodied_rl.rollout.domains import PLAYER_SIGN, DomainMixture, queue_weights
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share, group_seed
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.queue_pump import DomainCollector, DomainRollouts, QueuePump
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.sim.simulators import Simulators, SimulatorsElsewhere
from embodied_rl.sim.text.program import is_program
from embodied_rl.types import ActionLayout, EpisodeSummary, SimSpec
from embodied_rl.versions import versions

OWN_PLAYER = "policy"
"""Name of the run's own backend in metrics, beside the players of generation.mix."""


@dataclass
class Stream:
    """One player in one domain; the generator and the collector (`pump` or `rollouts`) are None if they are in another process."""

    domain: str
    """Name of the domain in the configuration; empty: the run's only one."""
    player: str
    """`OWN_PLAYER`, or a name in generation.mix."""
    config: TrainConfig
    """Configuration of the domain."""
    manager: Simulators
    policy: str
    """Name of the policy that learns from the stream (`TrainConfig.policy_of`)."""
    other: PlayerConfig | None = None
    """Configuration of a player of generation.mix; None: the run's own."""
    generator: Generator | None = None
    """Plays held-out episodes; None also for players other than the run's own."""
    pump: QueuePump | None = None
    """Collector of a method on groups."""
    rollouts: RolloutCollector | None = None
    """Collector of fixed rollouts."""
    agent: Agent | None = None
    """Agent of a domain of text."""
    starts: StartLibrary | None = None
    """Library of starts inside other episodes; None: all start ordinarily."""
    weight: float = 1.0
    """Weight of the domain against the others."""

    @property
    def seed(self) -> int:
        """Seed of the stream's draws: each named domain draws its own."""
        return group_seed(self.config.seed, self.domain, 0) if self.domain else self.config.seed

    @property
    def collector(self) -> Collector:
        return self.pump or self.rollouts or NOT_PLAYED

    @property
    def plays_groups(self) -> bool:
        """Whether the queue requests groups from it; else it plays rollouts, or nothing."""
        return self.config.algorithm.groups is not None

    @property
    def is_own(self) -> bool:
        """Whether the run's own policy plays."""
        return self.other is None

    @property
    def trained(self) -> bool:
        """Whether the run's policy learns from it."""
        return self.other is None or (self.other.is_policy and self.other.train)

    @property
    def name(self) -> str:
        """Name of its groups in the queue."""
        domain = self.domain or self.manager.spec.task
        return domain if self.is_own else f"{domain}{PLAYER_SIGN}{self.player}"

    @property
    def spec(self) -> SimSpec:
        """Spec of the simulators as the policy sees it."""
        return plain_spec(self.manager.spec)

    @property
    def temperature(self) -> float | None:
        """Temperature of evaluation; None: the policy acts by its mode, or draws no action tokens."""
        return self.config.evaluation.temperature if draws_tokens(self.config.policy) else None


def domains_of(config: TrainConfig) -> tuple[str, ...]:
    """Names of a run's domains; a single unnamed domain is ``""``."""
    return tuple(config.domains) or ("",)


def played_by(config: TrainConfig, player: str) -> tuple[str, ...]:
    """Domains that a player of generation.mix plays: by default those of text, except agent programs, which talk to their policy."""
    chosen = config.generation.mix[player].domains
    text = [name for name, domain in config.domains.items() if config.speaks_in(name) and not is_program(domain.sim)]
    return tuple(name for name in config.domains if name in (chosen or text))


def streams_of(config: TrainConfig, start: Callable[[TrainConfig, int | None], Simulators]) -> list[Stream]:
    """All streams of a run, in order.
    `start`: makes a stream's simulators from its domain's configuration, and the number of slots if that is not the domain's."""
    found: list[Stream] = []
    with ExitStack() as stack:
        for domain in domains_of(config):
            for player in (OWN_PLAYER, *(name for name in config.generation.mix if domain in played_by(config, name))):
                own, other = config.for_domain(domain), config.generation.mix.get(player)
                manager = start(own, None if other is None else other.num_slots)
                stack.callback(manager.close)
                weight = config.domains[domain].weight if domain else 1.0
                found.append(Stream(domain, player, own, manager, config.policy_of(domain), other, weight=weight))
        stack.pop_all()
    return found


def streams_elsewhere(config: TrainConfig, specs: Sequence[SimSpec], ask: Callable[..., Any] | None = None) -> list[Stream]:
    """Streams that another process plays; `specs`: specs of all streams' simulators, in order.
    `ask`: calls a method of a rollout worker that plays them (`roles.worker`); None: this process requests nothing of them."""
    left = list(specs)
    streams = streams_of(config, lambda own, num_slots: SimulatorsElsewhere(left.pop(0)))
    if ask is not None:
        for stream in streams:
            stream.manager = StreamElsewhere(stream, ask)
    return streams


class StreamElsewhere(SimulatorsElsewhere):
    """The simulators of a stream that another process plays."""

    def __init__(self, stream: Stream, ask: Callable[..., Any]) -> None:
        super().__init__(stream.manager.spec)
        self._domain, self._all_slots, self._ask = stream.domain, stream.config.sim.num_slots, ask

    def texts(self, num_slots: int | None = None) -> list[str]:
        """Texts of the first observations of all slots of the run."""
        return [str(text) for text in self._ask("texts", domain=self._domain, num_slots=self._all_slots)]

    def demonstrate(self) -> list[AgentEpisode]:
        """Successful episodes of a warm start's scripted player."""
        return list(self._ask("demonstrate", domain=self._domain))

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """Play held-out episodes with the last published weights."""
        return list(self._ask("evaluate", num_episodes=num_episodes, first_seed=first_seed, domain=self._domain))


class DomainSimulators(Simulators):
    """The simulators of all streams, as one manager for the training loop."""

    plays_itself = True

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = list(streams)
        self._faults: list[FaultRecord] = []
        self._num_faults = [0] * len(self.streams)
        played = [stream for stream in self.streams if stream.config.algorithm.plays]
        going_on = [stream for stream in played if not stream.plays_groups]  # their episodes run from one batch to the next
        self.num_slots = sum(stream.manager.num_slots for stream in going_on or played or self.streams)
        specs = [stream.manager.spec for stream in self.streams]
        task = "+".join(dict.fromkeys(stream.domain for stream in self.streams))
        self.spec: SimSpec = dataclasses.replace(specs[0], task=task, reports_success=all(spec.reports_success for spec in specs))

    @property
    def fault_records(self) -> list[FaultRecord]:
        """See `EnvManager.fault_records`: of all streams, in the order in which they were first read here."""
        for index, stream in enumerate(self.streams):
            found = stream.manager.fault_records
            self._faults += found[self._num_faults[index] :]
            self._num_faults[index] = len(found)
        return self._faults

    def worker_pids(self) -> list[int]:
        """Process ids of all streams' workers."""
        return [pid for stream in self.streams for pid in stream.manager.worker_pids()]

    def evaluate(
        self,
        generator: object,
        num_episodes: int,
        first_seed: int,
        on_episode: Callable[[EpisodeSummary], object] | None = None,
    ) -> list[EpisodeSummary]:
        """Play `num_episodes` held-out seeds in every domain; each episode names its domain in ``final_info["task"]``."""
        played: list[EpisodeSummary] = []
        for stream in self.streams:
            if stream.is_own and stream.generator is not None:
                drawn = stream.temperature
                own = evaluate(
                    stream.manager, stream.generator, num_episodes, first_seed=first_seed, temperature=drawn, on_episode=on_episode
                )
                played += [dataclasses.replace(e, final_info={**e.final_info, "task": stream.domain}) for e in own]
        return played

    def offload(self) -> int:
        return sum(stream.manager.offload() for stream in self.streams)

    def onload(self) -> None:
        for stream in self.streams:
            stream.manager.onload()

    def close(self) -> None:
        """Close all simulators."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.callback(stream.manager.close)


def simulators_of(streams: Sequence[Stream]) -> Simulators:
    """The simulators of a run's streams as one."""
    return DomainSimulators(streams) if streams[0].domain else streams[0].manager


def make_collector(streams: Sequence[Stream], queue: GroupQueue | None) -> Collector:
    """Collector that fills rollouts and the queue through the streams' own collectors; `NOT_PLAYED` for streams of another process."""
    if not streams[0].domain or not any(stream.collector.plays for stream in streams):
        return streams[0].collector
    rollouts = {stream.domain: stream.rollouts for stream in streams if stream.rollouts is not None}
    if queue is None:
        return DomainRollouts(rollouts)
    pumps = {stream.name: stream.pump for stream in streams if stream.pump is not None}
    groups = DomainCollector(pumps, queue, lockstep=queue.config.max_staleness == 0)
    return DomainRollouts(rollouts, groups) if rollouts else groups


def recordable_streams(streams: Sequence[Stream]) -> list[Stream]:
    """Streams of a run that can be recorded (`record.share`): every domain as the run's own policy plays it."""
    return [stream for stream in streams if stream.is_own and stream.collector.plays]


def make_queue(config: TrainConfig, streams: Sequence[Stream], share: Share = WHOLE) -> GroupQueue:
    """Make one queue for all streams of groups; `share`: share of its groups. Filters apply only to groups that are learned from, not to a
    baseline's."""
    groups = config.algorithm.groups
    assert groups is not None, "a method on groups"
    shares = {name: (player.share, played_by(config, name)) for name, player in config.generation.mix.items()}
    streams = [stream for stream in streams if stream.plays_groups]
    own = {stream.name: stream.weight for stream in streams if stream.is_own}
    trained = {stream.name: stream.trained for stream in streams}

    def only_trained(apply: GroupFilter) -> GroupFilter:
        return lambda group: apply(group) if trained[group.domain] else None

    filters = [only_trained(apply) for apply in build_filters(groups.filters)]
    mixture = DomainMixture(queue_weights(own, shares))
    greedy = {stream.name for stream in streams if "greedy_baseline" in advantage_info(stream.config.algorithm.advantage).needs}
    return GroupQueue(groups, seed=config.seed, domains=mixture, filters=filters, greedy=greedy, share=share)


def prefixed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """{name/key: value}; unchanged without a name (a run's only policy or domain)."""
    return {f"{name}/{key}" if name else key: value for key, value in values.items()}


def of_name(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `prefixed`: the values of this name, without the prefix."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")} if name else dict(values)


def episode_figures(finished: Sequence[tuple[bool, float, int]]) -> dict[str, float]:
    """Number of ``episodes`` of a batch (`Experience.finished`), and their mean ``success``, ``return`` and ``length`` if there are any."""
    columns = zip(("success", "return", "length"), zip(*finished, strict=True), strict=False)
    return {"episodes": float(len(finished)), **{name: float(np.mean(column)) for name, column in columns}}


def start_recorders(
    config: TrainConfig, recordable: Sequence[Stream], run_dir: Path, command: str, worker: str = ""
) -> list[TrainingRecorder]:
    """Record a share of the training episodes in ``<run_dir>/episodes``, or in each domain's folder there, with a subfolder `worker`.
    Raises RecordingError: see `TrainingRecorder`."""
    who = {"kind": "training", "algorithm": config.algorithm.name, "seed": config.seed}
    recorders = []
    for one in recordable:
        layout = one.collector.layout
        units = {} if layout is None or layout == ActionLayout.of(one.spec.action) else layout.about_units()
        info = RecordingInfo(one.spec, dataclasses.asdict(one.config.sim), who | units, command, versions()).signed()
        recorder = TrainingRecorder(
            run_dir / FOLDER / one.domain / worker,
            info,
            config.record,
            seeds=one.collector.seeds,
            num_slots=one.manager.num_slots,
            keeps_running=config.checkpoint.within_episodes,
        )
        one.collector.recorder = recorder
        recorders.append(recorder)
    return recorders
