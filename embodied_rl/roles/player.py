"""The role that plays: simulators, generator and collector together, asked by name from wherever training is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.host_times import Span
from embodied_rl.hybrid.weight_sync import NamedTensors
from embodied_rl.learning.devices import compute_threads, resolve_device
from embodied_rl.methods import training_sim
from embodied_rl.methods.groups import make_group_collector, make_group_queue
from embodied_rl.methods.rollout import make_rollout_collector
from embodied_rl.policies.base import layout_of
from embodied_rl.policies.build import build_policy
from embodied_rl.roles.device_lease import DeviceLease
from embodied_rl.roles.hosts import hosted_sim, plan_here
from embodied_rl.roles.multiplexed_simulators import MultiplexedSimulators
from embodied_rl.roles.wire import register
from embodied_rl.rollout.collector import Collector, CollectorTimes, RolloutCollector
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share
from embodied_rl.rollout.scoring import Scorer, ThreadScorer, load_score
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeGroup, EpisodeSummary, Rollout, SimSpec


@register
@dataclass(frozen=True)
class Played:
    """What was collected for one update, and what its receiver needs to go on should the player end."""

    data: Rollout | list[EpisodeGroup]
    times: CollectorTimes
    queue: dict[str, Any] | None
    """Of groups: the queue's state as if `data` were trained on. It comes with the groups, so that none is consumed twice."""
    faults: list[FaultRecord]
    """Of simulators, since the last time."""
    metrics: dict[str, float]
    spans: list[Span] = field(default_factory=list)
    """Of hosts, for a timeline."""


class Acting(Protocol):
    """What acts for a player."""

    @property
    def generator(self) -> Generator: ...

    def load(self, version: int, tensors: Any) -> None:
        """Act with these weights as `version` from now on."""
        ...


class PlayingGenerator(Acting, Protocol):
    """What acts for simulators of robots."""

    @property
    def layout(self) -> ActionLayout: ...


class OwnGenerator:
    """A policy in the player's own process. Implements `PlayingGenerator`."""

    def __init__(self, config: TrainConfig, spec: SimSpec) -> None:
        torch.manual_seed(config.seed)
        self.policy = build_policy(config.policy, spec)
        self.policy.eval()
        self.generator = make_generator(config.generation, self.policy)
        self.layout = layout_of(self.policy)
        # As in one process: small policies act as a copy on the CPU, large ones where they are.
        self.policy.to(resolve_device(config.hybrid.device))

    def load(self, version: int, tensors: NamedTensors) -> None:
        """See `PlayingGenerator.load`: (name, tensor) of the policy's whole state."""
        self.policy.load_state_dict(dict(tensors))
        self.generator.publish(version)


class Player:
    """Plays what the training loop asks for and, where staleness is allowed, goes on playing while it trains.

    ```
                publish(v)              play(v)
     trainer ───────────────▶ player ◀──────────── trainer waits; gets groups (or a rollout) with the queue's state
                                 │ pump(): plays on between requests, as long as the queue has places: (max_staleness + 1) batches
    ```
    """

    acting: Acting
    collector: Collector
    queue: GroupQueue | None
    """None: fixed rollouts."""
    scorer: Scorer | None
    lease: DeviceLease | None
    """Hosts that are lent to training, where it takes some over (placement multiplexed)."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        make_acting: Callable[[TrainConfig, SimSpec], PlayingGenerator] = OwnGenerator,
        make_scoring: Callable[[TrainConfig], Scorer | None] | None = None,
        share: Share = WHOLE,
    ) -> None:
        """Start the simulators and what acts for them; `share`: of the groups. Raises UserError as `EnvManager` does."""
        self._start(config)
        try:
            spec = plain_spec(self.manager.spec)
            acting = make_acting(config, spec)
            self.acting = acting
            if config.algorithm.groups is None:
                self.collector = make_rollout_collector(config, self.manager, acting.generator, acting.layout)
            else:
                self.queue = make_group_queue(config, spec.task, share)
                simulators = self._simulators()
                collector = make_group_collector(config, simulators, acting.generator, self.queue, acting.layout)
                self.collector = collector
                collector.on_stop = simulators.release
                self.scorer = (make_scoring or make_scorer)(config)
                collector.score_with(self.scorer)
        except BaseException:
            self.close()
            raise

    def _simulators(self) -> Simulators:
        """What the collector plays in: the manager, or its slots as hosts of which some are lent to training."""
        if self.config.hybrid.placement.kind != "multiplexed":
            return self.manager
        simulators = MultiplexedSimulators(self.manager, plan_here(self.config), keep_spans=self.config.profile)
        self.lease = simulators.lease
        return simulators

    def _start(self, config: TrainConfig) -> None:
        """The simulators."""
        self.config = config
        self.manager = self._simulate(config)
        self.scorer = None
        self.lease = None
        self._faults_told = 0
        self._may_pump = False
        """True after `restart`; False before it, and after an evaluation or another use of the simulators."""
        self.queue = None

    def _simulate(self, config: TrainConfig) -> Simulators:
        """Start them."""
        return EnvManager.from_config(
            hosted_sim(config, training_sim(config)),
            EpisodeSeeds.training(config.seed),
            autoreset=config.algorithm.groups is None,
            chunk_size=config.policy.chunk_size,
        )

    # ---- what may be asked ------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What the training loop knows of the simulators."""
        return {"spec": self.manager.spec.to_dict(), "num_slots": self.manager.num_slots, "worker_pids": list(self.manager.worker_pids())}

    def load(self, version: int, tensors: Any) -> None:
        """Take weights as `version`; the batch that was played last is settled then, and places are free."""
        self.acting.load(version, tensors)
        self._take_back()
        if self.queue is not None and version > self.queue.version:
            self.queue.published(version)

    def restart(self, seed_round: int, queue: Mapping[str, Any] | None = None) -> None:
        """Begin new episodes: of all slots, or what the state of a group queue asks for."""
        self._take_back()
        self._may_pump = True
        if self.queue is not None:
            assert queue is not None, "groups are asked for by a queue's state"
            self.queue.mirror(queue)
        self.collector.restart(self.queue, seed_round=seed_round)

    def play(self, version: int) -> Played:
        """Collect for one update of the weights `version`. Raises SimFault and BatchNeverFullError."""
        data: Rollout | list[EpisodeGroup]
        if self.queue is None:
            data = self.collector.next_rollout(version)
        else:
            data = self.collector.next_groups(version)
            self._lend()
        state = None if self.queue is None else self.queue.state_dict(settled=True)
        spans = [] if self.lease is None else self.lease.spans()
        return Played(data, self.collector.times, state, self._new_faults(), self._metrics(), spans)

    def evaluate(self, num_episodes: int, first_seed: int) -> list[EpisodeSummary]:
        """See `rollout.evaluation.evaluate`; what was being played is lost, so that `restart` must follow."""
        self._give_up_episodes()
        temperature = self.config.evaluation.temperature
        return evaluate(self.manager, self.acting.generator, num_episodes, first_seed=first_seed, temperature=temperature)

    def episodes(self) -> list[np.ndarray]:
        """See `RolloutCollector.episodes`: the running episodes of all slots, [bytes] uint8 each."""
        assert isinstance(self.collector, RolloutCollector), "fixed rollouts"
        return [np.frombuffer(episode, np.uint8) for episode in self.collector.episodes()]

    def take_up(self, episodes: list[np.ndarray]) -> None:
        """See `RolloutCollector.take_up`."""
        assert isinstance(self.collector, RolloutCollector), "fixed rollouts"
        self.collector.take_up([episode.tobytes() for episode in episodes])
        self._may_pump = True

    def peek(self, slots: list[int]) -> dict[str, np.ndarray]:
        """See `EnvManager.peek`."""
        return {name: np.array(part) for name, part in self.manager.peek(slots).items()}

    def pump(self) -> bool:
        """Play on for a moment, between requests; False: nothing may be played now."""
        if not self._may_pump:
            return False
        if self.queue is None:
            # A checkpoint takes the running episodes between two rollouts.
            in_lockstep = self.config.checkpoint.within_episodes
        else:
            in_lockstep = self.collector.min_ready is None
        return not in_lockstep and self.collector.pump()

    def close(self) -> None:
        """End the simulators."""
        if self.scorer is not None:
            self.scorer.close()
        self.manager.close()

    def _give_up_episodes(self) -> None:
        """For whatever else is to be played: nothing may answer for the slots' old episodes."""
        self._take_back()
        self._may_pump = False
        if self.queue is not None:
            self.collector.restart(self.queue)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _lend(self) -> None:
        """Have the hosts vacated that training takes over. In lockstep nothing can be played meanwhile, and nothing has to move."""
        if self.lease is None or self.collector.min_ready is None:
            return
        self.lease.shrink()
        while not self.lease.vacated and self.collector.pump():
            pass
        self.lease.lend()

    def _take_back(self) -> None:
        if self.lease is not None:
            self.lease.take_back()

    def _new_faults(self) -> list[FaultRecord]:
        records = self.manager.fault_records
        new, self._faults_told = list(records[self._faults_told :]), len(records)
        return new

    def _metrics(self) -> dict[str, float]:
        figures = self.collector.metrics()
        if self.queue is not None:
            counts = self.queue.counts()
            figures["groups/in_flight"] = float(counts.in_flight)
        return figures if self.lease is None else {**figures, **self.lease.figures()}


def make_scorer(config: TrainConfig) -> Scorer | None:
    """Reward workers as threads of this process; None: the configuration asks for none. Raises UserError for a wrong target."""
    options = config.hybrid.reward_worker
    if options is None:
        return None
    score = load_score(options.target, options.kwargs)
    return ThreadScorer(score, num_workers=options.num_workers, combine=options.combine, timeout_s=options.timeout_s)


class Inbox(Protocol):
    """Where requests come from."""

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Callable[[Any, BaseException | None], None]] | None:
        """(what, arguments, how to answer), in order; None: there is none and `wait` is false. Raises EOFError when no client is left."""
        ...


def serve(player: Player, inbox: Inbox) -> None:
    """Serve requests in order, and play on between them where that is allowed, until `Inbox.take` raises EOFError."""
    plays_on, failure = False, None
    with compute_threads(1):  # the other cores are the simulators'
        while True:
            try:
                request = inbox.take(wait=not plays_on)
            except EOFError:
                return
            if request is None:
                try:
                    plays_on = player.pump()
                except BaseException as error:
                    # The next request gets it as its answer.
                    plays_on, failure = False, error
                continue
            what, arguments, answer = request
            if failure is not None:
                answer(None, failure)
                failure = None
                continue
            try:
                value = getattr(player, what)(**arguments)
            except Exception as error:
                plays_on = False
                answer(None, error)
            else:
                # After an evaluation nothing is played until episodes were begun anew.
                plays_on = what in ("play", "load", "restart")
                answer(value, None)
