"""The rollout worker: simulators, generators and collectors behind calls by name from the training side; and its policies and token
backends, which load the published weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.generation.torch_backend import HostActors, HostedGenerator, TorchGenerator
from embodied_rl.hybrid.engine import residency_of_playing
from embodied_rl.hybrid.multiplex import Span
from embodied_rl.hybrid.residency import Residency
from embodied_rl.learning.devices import resolve_device
from embodied_rl.methods import language_player as player
from embodied_rl.methods import training_sim
from embodied_rl.methods.building import Acting, Playing, let_play
from embodied_rl.methods.starts import Starts, give_starts
from embodied_rl.methods.streams import (
    Stream,
    make_collector,
    make_queue,
    of_name,
    recordable_streams,
    simulators_of,
    start_recorders,
    streams_of,
)
from embodied_rl.methods.warm_start import play_script
from embodied_rl.policies.base import load_saved
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.roles.device_lease import DeviceLease, hosted_sim, plan_here
from embodied_rl.roles.multiplexed import MultiplexedSimulators, start_token_hosts
from embodied_rl.roles.wire import register
from embodied_rl.rollout.batch_sinks import TrainingRecorder
from embodied_rl.rollout.collector import Collector, CollectorTimes
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share
from embodied_rl.rollout.initialized import Lesson, Outcome, ReplayFigures, Report, SourceEpisode, Start
from embodied_rl.rollout.programs import make_manager
from embodied_rl.rollout.scoring import Scorer, ThreadScorer, load_score
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeGroup, EpisodeSummary, Rollout, SimSpec

Weights = Any
"""Published weights: (name, tensor) pairs, or references to them in Ray's object store."""
HostsOf = Callable[[np.ndarray], np.ndarray]
"""Type of `MultiplexedSimulators.hosts_of`."""


class OwnPolicy:
    """A robot's policy in this process, with its generator."""

    def __init__(self, config: TrainConfig, spec: SimSpec, lease: DeviceLease | None = None) -> None:
        """`lease`: lease of the hosts on whose devices the policy acts."""
        torch.manual_seed(config.seed)
        self.policy = build_policy(config.policy, spec)
        self.policy.eval()
        self.layout = self.policy.action_layout
        self.generator: Generator
        self._hosted: tuple[TorchGenerator, HostActors] | None = None
        # A policy of vectors only always acts on the CPU.
        if lease is not None and lease.plan.devices and config.generation.backend == "torch" and self.policy.work != "vectors":
            actors = HostActors(self.policy, lease.plan.devices)
            lease.follow(actors.lend, actors.take_back)
            self.generator = own = TorchGenerator(self.policy, actors)
            self._hosted = own, actors
            return
        self.generator = make_generator(config.generation, self.policy)
        # As in one process: a `ModuleActor` decides where its copy acts, and a large policy acts where it is.
        self.policy.to(resolve_device(config.hybrid.device))

    def on_hosts(self, hosts_of: HostsOf) -> Generator:
        """Generator for slots that play on hosts."""
        return self.generator if self._hosted is None else HostedGenerator(*self._hosted, hosts_of)

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Act with these weights as `version` from now on: the whole state, or the output of `TrainedModule.unmerged_weights`."""
        load_saved(self.policy, dict(tensors))
        self.generator.publish(version)


class WorkerActing(Acting):
    """Policies and token backends of a rollout worker; `load` takes weights by name."""

    lease: DeviceLease | None = None
    """Lease of the hosts that training borrows (placement multiplexed)."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.speaking: dict[str, player.ModelReader] = {}
        self.models: Mapping[str, player.ModelFiles] = {}
        self.folder = Path()

    @contextlib.contextmanager
    def reading(self, models: Mapping[str, player.ModelFiles]) -> Iterator[None]:
        """Write the files of each language policy's model to a folder of its name for the duration of the block. All must be read inside
        it, so that a killed process leaves nothing behind. Raises UserError if a model's files are invalid."""
        with tempfile.TemporaryDirectory(prefix="embodied_rl_model_") as name:
            self.models, self.folder = models, Path(name)
            for policy, files in models.items():
                player.write_model_files(files, self.folder / policy)
                self.speaking[policy] = player.read_model(self.config.of_policy(policy).language, self.folder / policy)
            yield

    def on_hosts(self, stream: Stream, hosts_of: HostsOf) -> Generator:
        """The stream's generator, for a collector whose slots are on several hosts."""
        raise NotImplementedError

    def load(self, version: int, tensors: Weights) -> None:
        """Act with these weights as `version` from now on."""
        raise NotImplementedError


class LoadedActing(WorkerActing):
    """Policies and backends in this process; token backends of a multiplexed run are hosts in separate processes."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.policies: dict[str, OwnPolicy] = {}
        self.backends: dict[tuple[str, str], TokenBackend] = {}
        """{(policy, name): backend}"""
        self._merging: dict[str, LanguagePolicy] = {}
        """Policies that hold the loaded weights, if adapters arrive separately (first with their base model) and are merged here."""

    def policy(self, name: str, config: TrainConfig, spec: SimSpec, lease: DeviceLease | None = None) -> OwnPolicy:
        """The policy `name`, built for the first simulator that requests it; `lease`: of this process only, which is one of the hosts."""
        if name not in self.policies:
            self.policies[name] = OwnPolicy(config, spec, lease or self.lease)
        return self.policies[name]

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        own = self.policy(stream.policy, stream.config, stream.spec)
        return own.generator, own.layout

    def on_hosts(self, stream: Stream, hosts_of: HostsOf) -> Generator:
        return self.policies[stream.policy].on_hosts(hosts_of)

    def tokens(self, policy: str, name: str, config: TrainConfig) -> TokenBackend:
        """See `Acting.tokens`. Raises UserError as `blank_backend` does."""
        backend: TokenBackend
        if self.lease is not None:
            backend = start_token_hosts(config, self.models[policy], self.lease)
        else:
            backend = player.blank_backend(config, self.folder / policy, resolve_device(config.hybrid.device))
        if config.hybrid.publish == "adapter" and policy not in self._merging:
            self._merging[policy] = player.blank_policy(config.language, self.folder / policy)
        self.backends[policy, name] = backend
        return backend

    def weights_go_through(self, policy: str, name: str, backend: TokenBackend) -> None:
        self.backends[policy, name] = backend

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `WorkerActing.load`: in a run with several policies their names precede those of the tensors (`RunPolicies`)."""
        whole = dict(tensors) if self.config.domains else {}
        for name in dict.fromkeys([*self.policies, *(policy for policy, _ in self.backends)]):
            named = of_name(name, whole).items() if name else tensors
            if name in self.policies:
                self.policies[name].load(version, named)
            else:
                if (merging := self._merging.get(name)) is not None:
                    load_saved(merging, dict(named))
                for (policy, _), backend in self.backends.items():
                    if policy == name:
                        backend.load_weights(version, named if merging is None else merging.named_weights())


for _kind in (Lesson, Outcome, ReplayFigures, Report, SourceEpisode, Start):
    register(_kind)


@register
@dataclass(frozen=True)
class Collected:
    """Experience for one update, and the state that its receiver needs to continue if the worker ends."""

    groups: list[EpisodeGroup]
    """Groups of the update; empty in a run of fixed rollouts."""
    times: CollectorTimes
    queue: dict[str, Any] | None
    """State of the group queue as if the groups were trained on. It travels with the groups, so that none is consumed twice."""
    faults: list[FaultRecord]
    """Simulator faults since the last call."""
    metrics: dict[str, float]
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """{domain: its fixed rollout}"""
    spans: list[Span] = field(default_factory=list)
    """Spans of the hosts, for a timeline."""
    starts: dict[str, list[Report]] = field(default_factory=dict)
    """{domain: for each worker, the changes in its copy of the start library}"""


def make_scorer(config: TrainConfig) -> Scorer | None:
    """Reward workers as threads of this process; None: not configured. Raises UserError for a wrong target."""
    options = config.hybrid.reward_worker
    if options is None:
        return None
    score = load_score(options.target, options.kwargs)
    return ThreadScorer(score, num_workers=options.num_workers, combine=options.combine, timeout_s=options.timeout_s)


class RolloutWorker:
    """Plays what the training loop requests and, if staleness is allowed, continues to play while it trains.

    ```
                publish(v)              play(v)
     trainer ───────────────▶ worker ◀──────────── trainer waits; gets groups (or a rollout) with the queue's state
                                 │ pump(): plays on between requests, as long as the queue has places: (max_staleness + 1) batches
    ```
    The worker starts before the model exists, because a tiny model's tokenizer is made of the text environments' words: the trainer first
    requests the `texts`, then sends the model (`take_models`). Kinds of experience differ only in the collectors of the streams.
    Implements `Role`.
    """

    works_after = ("play", "load", "restart", "learn_starts")
    """See `Role.works_after`: after an evaluation, nothing is played until new episodes begin."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        acting: WorkerActing | None = None,
        make_scoring: Callable[[TrainConfig], Scorer | None] = make_scorer,
        share: Share = WHOLE,
    ) -> None:
        """Start the simulators.

        Args:
            acting: policies and token backends for the simulators; None: in this process.
            make_scoring: makes the reward workers, if the configuration has any.
            share: groups and slots of this worker; other workers play the rest.

        Raises UserError: as `EnvManager` does.
        """
        self.config, self._share, self._make_scoring = config, share, make_scoring
        self.acting = LoadedActing(config) if acting is None else acting
        self.streams = streams_of(config, self._start)
        self.manager = simulators_of(self.streams)
        self.queue: GroupQueue | None = None
        """Group queue; None: no groups are played."""
        self.lease = DeviceLease(plan_here(config), keep_spans=config.profile) if config.hybrid.placement.kind == "multiplexed" else None
        """Lease of the hosts that training borrows (placement multiplexed)."""
        self.acting.lease = self.lease
        self._collector: Collector | None = None
        self._playing: Playing | None = None
        self.recorders: list[TrainingRecorder] = []
        self._faults_logged = 0
        self.starts = Starts(())
        """Start libraries of the streams, after `take_models`: copies of the trainer's."""
        self._residency = Residency()
        """Offloading during training."""
        self._pending: deque[tuple[int, Weights]] = deque()
        """Versions with their weights that do not act yet."""
        self._may_pump = False
        """Whether the worker may play on: from `restart` until an evaluation or another use of the simulators."""

    @property
    def collector(self) -> Collector:
        """Collector; exists after `take_models`."""
        assert self._collector is not None, "take_models comes first"
        return self._collector

    def _start(self, config: TrainConfig, num_slots: int | None) -> Simulators:
        """Start the simulators of a stream."""
        return make_manager(
            hosted_sim(config, training_sim(config)),
            EpisodeSeeds.training(config.seed),
            num_slots=num_slots,
            autoreset=config.algorithm.groups is None,
            chunk_size=config.policy.chunk_size,
        )

    @property
    def asked(self) -> dict[str, Callable[..., Any]]:
        """See `Role.asked`."""
        own: list[Callable[..., Any]] = [self.describe, self.texts, self.take_models, self.record, self.load, self.restart, self.play]
        own += [self.demonstrate, self.evaluate, self.episodes, self.take_up, self.peek, self.start_states]
        return {
            **{method.__name__: method for method in own},
            "load_starts": lambda states: self.starts.copy(states),
            "learn_starts": lambda lessons: self.starts.learn(lessons, self.queue),
        }

    # ---- what may be asked ------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Description of the simulators for the training loop; ``specs`` covers all streams, in their order."""
        return {
            "spec": self.manager.spec.to_dict(),
            "num_slots": self.manager.num_slots,
            "worker_pids": list(self.manager.worker_pids()),
            "specs": [stream.spec.to_dict() for stream in self.streams],
        }

    def texts(self, domain: str, num_slots: int) -> list[str]:
        """First observations of all slots of a domain, which a tiny model's tokenizer must know; call before any episode. Other workers
        may have some of the slots."""
        return self._stream(domain).manager.texts(num_slots)

    def take_models(self, models: Mapping[str, player.ModelFiles]) -> None:
        """Build what acts, once; weights come with `load`.
        `models`: {policy: files of its language model}, if any. Raises UserError: a backend or an agent cannot use a model."""
        assert self._collector is None, "a worker takes models once"
        config, first = self.config, self.streams[0]
        self.starts = give_starts(self.streams)
        with self.acting.reading(models):
            if config.algorithm.groups is not None:
                self.queue = make_queue(config, self.streams, self._share)
            self._playing = let_play(self.streams, self.acting, self.queue, Path(config.run_dir), self._hosted, self._share)
        backends = list(self._playing.backends.values())
        self._residency = residency_of_playing(config.hybrid.offload, self.manager, backends, first.generator)
        self._collector = make_collector(self.streams, self.queue)
        self._collector.score_with(self._make_scoring(config))

    def record(self, run_dir: str, command: str) -> None:
        """Record a share of the episodes from now on, each worker into its own folder. Call once, after `take_models`.
        Raises UserError: see `start_recorders`."""
        own = f"worker_{self._share.index}" if self._share.count > 1 else ""
        self.recorders = start_recorders(self.config, recordable_streams(self.streams), Path(run_dir), command, own)

    def load(self, version: int, tensors: Weights) -> None:
        """Accept weights as `version`; they act as soon as nothing is left to play with older ones. The last batch then counts as trained
        on, and its places are free."""
        self._pending.append((version, tensors))
        self._take_weights()
        self._take_back()

    def restart(self, seed_round: int, queue: Mapping[str, Any] | None = None, drawn: Mapping[str, Any] | None = None) -> None:
        """Begin new episodes: in all slots, or those in the state of a group queue. `drawn`: see `play`."""
        self._give_up_weights()
        for domain, words in (drawn or {}).items():
            self.collector.draw(domain=domain, **words)
        self._may_pump = True
        if self.queue is not None:
            assert queue is not None, "groups are asked for by a queue's state"
            self.queue.mirror(queue)
        self.starts.record()
        self.collector.restart(self.queue, seed_round=seed_round)

    def play(self, version: int, drawn: Mapping[str, Any] | None = None) -> Collected:
        """Collect experience for one update with the weights `version`. `drawn`: {domain: arguments of `Collector.draw`}, from now on.
        Raises SimFault and BatchNeverFullError."""
        for domain, words in (drawn or {}).items():
            self.collector.draw(domain=domain, **words)
        groups: list[EpisodeGroup] = []
        state = None
        self._take_weights()
        self._residency.begin("generation")
        rollouts = self.collector.next_rollouts(version)
        if self.queue is not None:
            self._act_with_newest()
            groups = self.collector.next_groups(version)
        self._lend()
        if self.queue is not None:
            state = self.queue.state_dict(settled=True)
        spans, faults = [] if self.lease is None else self.lease.times.take_spans(), self._new_faults()
        self._residency.begin("training")
        return Collected(groups, self.collector.times, state, faults, self._metrics(), rollouts, spans, self.starts.report())

    def start_states(self) -> dict[str, Any]:
        """See `Starts.state`. Records the expert's episodes first, because fixed rollouts begin in all slots at once."""
        self.starts.record()
        return self.starts.state(self.queue)

    def demonstrate(self, domain: str = "") -> list[AgentEpisode]:
        """See `play_script`; running episodes are lost, so `restart` must follow."""
        self._give_up_episodes()
        return play_script(self._stream(domain))

    def evaluate(self, num_episodes: int, first_seed: int, domain: str = "") -> list[EpisodeSummary]:
        """See `rollout.evaluation.evaluate`; running episodes are lost, so `restart` must follow.
        `domain`: domain to evaluate; empty: `num_episodes` of every domain."""
        self._give_up_episodes()
        if num_episodes == 0:  # of a team with more workers than episodes
            return []
        stream = self._stream(domain)
        assert stream.generator is not None, "take_models comes first"
        manager = stream.manager if domain else self.manager
        return evaluate(manager, stream.generator, num_episodes, first_seed=first_seed, temperature=stream.temperature)

    def episodes(self) -> list[np.ndarray]:
        """See `Collector.episodes`: the running episodes, each [bytes] uint8, after older weights have nothing left to play."""
        self._residency.begin("generation")
        self._act_with_newest()
        return [np.frombuffer(episode, np.uint8) for episode in self.collector.episodes()]

    def take_up(self, episodes: list[np.ndarray]) -> None:
        """See `Collector.take_up`."""
        self._residency.begin("generation")
        self.collector.take_up([episode.tobytes() for episode in episodes])
        self._may_pump = True

    def peek(self, slots: list[int]) -> dict[str, np.ndarray]:
        """See `EnvManager.peek`."""
        return {name: np.array(part) for name, part in self.manager.peek(slots).items()}

    def pump(self) -> bool:
        """Play on for a moment between requests; False: nothing may be played now."""
        if not self._may_pump or self._residency.has_out:
            return False
        in_lockstep = self.queue is not None and self.collector.min_ready is None
        return not in_lockstep and (self.collector.pump() or self._take_weights())

    def close(self) -> None:
        """End recordings, reward workers, tools, backends and simulators."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.manager.close)
            for recorder in self.recorders:
                stack.callback(recorder.close)
            if self._playing is not None:
                stack.callback(self._playing.close)
            if self._collector is not None:
                stack.callback(self._collector.close)

    def _give_up_episodes(self) -> None:
        """Drop running episodes, so that the simulators are free for other uses."""
        self._give_up_weights()
        if self.queue is not None:
            self.collector.give_up_groups(self.queue)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _stream(self, domain: str) -> Stream:
        """The stream in which the run's own policy plays a domain; empty: the first stream."""
        return next(stream for stream in self.streams if stream.is_own and domain in ("", stream.domain))

    def _hosted(self, stream: Stream, generator: Generator) -> tuple[Simulators, Generator]:
        """Simulators and generator of a robot's collector: the stream's own, or multiplexed over the hosts."""
        if self.lease is None:
            return stream.manager, generator
        simulators = MultiplexedSimulators(stream.manager, self.lease)
        return simulators, self.acting.on_hosts(stream, simulators.hosts_of)

    def _lend(self) -> None:
        """Vacate the hosts for training and lend them. In lockstep nothing is played meanwhile, so nothing has to move."""
        if self.lease is None or self.collector.min_ready is None:
            return
        self.lease.shrink()
        while not self.lease.vacated and self.pump():
            pass
        self.lease.lend()

    def _take_weights(self) -> bool:
        """Load published weights once older ones have nothing left to play; return whether newer ones act now."""
        before = len(self._pending)
        while self._pending and not (self._may_pump and self.collector.keeps_weights):
            version, tensors = self._pending.popleft()
            self.acting.load(version, tensors)
            if self.queue is not None and version > self.queue.version:
                self.queue.published(version)
        return len(self._pending) < before

    def _act_with_newest(self) -> None:
        """Play what older weights must still play, so that the newest ones act."""
        self._take_weights()
        while self._pending:
            self.collector.pump()
            self._take_weights()

    def _give_up_weights(self) -> None:
        """Give up what was played ahead, and act with the newest weights. What older weights must play is recorded first, so that the
        recording does not depend on how far the worker was."""
        self._residency.begin("generation")
        self._take_back()
        if self.recorders:
            self._act_with_newest()
        self._may_pump = False
        self._take_weights()

    def _take_back(self) -> None:
        if self.lease is not None:
            self.lease.take_back()

    def _new_faults(self) -> list[FaultRecord]:
        records = self.manager.fault_records
        new, self._faults_logged = list(records[self._faults_logged :]), len(records)
        return new

    def _metrics(self) -> dict[str, float]:
        figures = {**self.collector.metrics(), **self._residency.metrics()}
        if self.queue is not None:
            counts = self.queue.counts()
            figures["groups/in_flight"] = float(counts.in_flight)
        return figures if self.lease is None else {**figures, **self.lease.figures()}
