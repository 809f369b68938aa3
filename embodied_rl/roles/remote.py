"""A remote rollout worker for the training loop, in place of the manager, the generator and the collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from embodied_rl.config import HybridConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator, Way
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.iteration import StreamsMethod
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.methods.starts import Starts, give_starts
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import TrainedModule
from embodied_rl.roles.wire import RoleLost
from embodied_rl.roles.worker import Collected
from embodied_rl.rollout.collector import Collector, CollectorTimes
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.initialized import Lesson, Report
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.simulators import Simulators
from embodied_rl.timeline import record
from embodied_rl.types import EpisodeGroup, EpisodeSummary, Rollout, SimSpec


class WorkerHandle(Protocol):
    """Handle of a rollout worker in a process or an actor."""

    def call(self, what: str, **arguments: object) -> Any:
        """Call the worker's method `what`. Raises RoleLost, and any exception of the method."""

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
        """Put weights where the worker can read them; return (what its method `load` takes for them, number of bytes). Raises RoleLost."""

    def close(self) -> None: ...


class RemoteWorker(Simulators):
    """Simulators with their generator in another process; a worker that ends is replaced.

    A lost worker costs only time: groups in flight are requested again with their seeds, and this process knows what was consumed. Fixed
    rollouts begin new episodes.
    """

    plays_itself = True

    def __init__(
        self, config: TrainConfig, start: Callable[[TrainConfig], WorkerHandle], at_close: Callable[[], None] = lambda: None
    ) -> None:
        """Start a worker; `at_close` runs after the last worker has ended. Raises UserError as `EnvManager` does."""
        self.config, self._start = config, start
        self.at_close = ExitStack()
        """What ends after the last worker, last first."""
        self.at_close.callback(at_close)
        self.version = 0
        self.num_restarts = 0
        self._faults: list[FaultRecord] = []
        self.publish_s = 0.0
        self.published_bytes = 0
        """Number of bytes published last."""
        self._has_base = False
        """Whether the worker has the weights that never change."""
        self.policy: TrainedModule | None = None
        """Policy whose weights `publish` sends; see `take_policy`."""
        self.models: Mapping[str, ModelFiles] = {}
        """{policy: files of a language model}, from which the worker builds the model (`language_player.model_files`)."""
        self.starts: RemoteStarts | None = None
        """Start libraries of the streams; workers use copies."""
        self._recorded: dict[str, str] = {}
        """Arguments of `RolloutWorker.record`; empty: nothing is recorded."""
        self.needs_restart = False
        """Whether a new worker waits for `restart`, which says which episodes to play."""
        self._handle: WorkerHandle | None = None
        try:
            self._handle = start(config)
            described = self._handle.call("describe")
        except RoleLost as lost:
            self.close()
            raise UserError(f"{lost} It had not started; see its message above.") from lost
        except BaseException:
            self.close()
            raise
        self.spec = SimSpec.from_dict(described["spec"])
        self.num_slots = int(described["num_slots"])
        self._worker_pids: list[int] = described["worker_pids"]
        self.specs = [SimSpec.from_dict(spec) for spec in described["specs"]]
        """Simulator specs of all streams, in their order (`methods.streams`)."""
        self.generator = RemoteGenerator(self)

    def take_policy(self, policy: TrainedModule, models: Mapping[str, ModelFiles]) -> None:
        """Set the trained policy, whose weights are published from now on.

        `models`: {policy: files of a language model} for the worker; empty without language policies.

        Raises UserError for a model that the worker's token backend cannot run.
        """
        self.policy, self.models = policy, models
        try:
            self._live().call("take_models", models=models)
        except RoleLost as lost:
            self.replace(lost)

    def ranks(self, hybrid: HybridConfig) -> RankHost | None:
        """Host of the `hybrid.sharding` ranks with which a method of this process trains; None: processes of this machine."""
        return None

    @property
    def method(self) -> Callable[..., StreamsMethod]:
        """Maker of the method that learns from what the worker plays."""
        return StreamsMethod

    def connect(self, method: StreamsMethod) -> None:
        """Connect a method that plays to the worker."""
        if self.config.plays:
            method.collector = RemoteCollector(self, method.restart)

    def worker_pids(self) -> list[int]:
        """Process ids of the worker's simulators."""
        return self._worker_pids

    @property
    def fault_records(self) -> list[FaultRecord]:
        return self._faults

    def publish(self, version: int) -> None:
        started = time.perf_counter()
        self.version = version
        try:
            self._send_weights()
        except RoleLost as lost:
            self.replace(lost)
        self.publish_s = time.perf_counter() - started

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """See `RolloutWorker.evaluate`; covers every domain."""
        return list(self.insist("evaluate", num_episodes=num_episodes, first_seed=first_seed, domain=""))

    def ask(self, what: str, **arguments: object) -> Any:
        """See `WorkerHandle.call`."""
        return self._live().call(what, **arguments)

    def record(self, run_dir: Path, command: str) -> bool:
        """See `Simulators.record`; writes on the worker's machine."""
        if not self.config.plays:
            return False
        self._recorded = {"run_dir": str(run_dir.resolve()), "command": command}
        self.insist("record", **self._recorded)
        return True

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """See `EnvManager.peek`; empty if the worker is gone."""
        try:
            return dict(self._live().call("peek", slots=list(slots)))
        except RoleLost:
            return {}

    def replace(self, lost: RoleLost) -> None:
        """Start another worker with the weights published last. Raises UserError after too many replacements."""
        if self.num_restarts >= self.config.hybrid.max_restarts:
            raise UserError(
                f"{lost} It was already replaced {self.num_restarts} times (hybrid.max_restarts). Continue from the last checkpoint with "
                f"resume=auto run_dir={self.config.run_dir}."
            ) from lost
        self.num_restarts += 1
        self.needs_restart = True
        self._end_worker()
        try:
            self._handle = self._start(self.config)
            self._worker_pids = self._handle.call("describe")["worker_pids"]
            if self.policy is not None:
                self._handle.call("take_models", models=self.models)
                if self.starts is not None and self.starts.libraries:
                    self._handle.call("load_starts", states=self.starts.now)
                if self._recorded:
                    self._handle.call("record", **self._recorded)
                self._send_weights()
        except RoleLost as again:
            self.replace(again)

    def close(self) -> None:
        """End the worker. May be called twice."""
        self._end_worker()
        self.at_close.close()

    def _send_weights(self) -> None:
        worker = self._live()
        where, self.published_bytes = worker.put(self.version, self._weights())
        worker.call("load", version=self.version, tensors=where)
        self._has_base = True

    def _weights(self) -> dict[str, Tensor]:
        """The worker's weights; for a language agent only the model, with any adapter merged unless the worker merges it."""
        assert self.policy is not None, "take_policy comes first"
        if self.config.hybrid.publish == "adapter":
            return dict(self.policy.unmerged_weights(base=not self._has_base))
        return dict(self.policy.named_weights())

    def insist(self, what: str, begin: Callable[[], None] | None = None, /, **arguments: object) -> Any:
        """`ask`, repeated with a new worker if one ends. `begin`: first starts the episodes of a new worker that waits for that."""
        while True:
            if begin is not None and self.needs_restart:
                begin()
            try:
                return self.ask(what, **arguments)
            except RoleLost as lost:
                self.replace(lost)

    def _end_worker(self) -> None:
        handle, self._handle, self._has_base = self._handle, None, False
        if handle is not None:
            handle.close()

    def _live(self) -> WorkerHandle:
        if self._handle is None:
            raise RuntimeError("The rollout worker was closed.")
        return self._handle


class RemoteGenerator(Generator):
    """Generator of a worker's process for the engine: it publishes weights and does not act here."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker

    def publish(self, version: int) -> None:
        self._worker.publish(version)
        self.version = version


class RemoteStarts(Starts):
    """Start libraries of streams that rollout workers play with copies."""

    def __init__(self, worker: RemoteWorker, streams: Sequence[Stream]) -> None:
        """Raises UserError: see `give_starts`."""
        give_starts(streams)
        super().__init__(streams)
        self._worker = worker
        self._queue: GroupQueue | None = None
        """Group queue of the last commit or resume; None: fixed rollouts, or no commit yet."""

    @property
    def now(self) -> dict[str, Any]:
        """{domain: library state} for a starting worker."""
        return self.state(self._queue)

    def record(self) -> None:
        """See `Starts.record`: one worker records, and all load its result."""
        if any("expert" in starts.config.sources and starts.num_expert_messages == 0 for starts in self.libraries.values()):
            self.load(self._worker.insist("start_states"))
            for starts in self.libraries.values():
                starts.report()

    def take_in(self, reports: Mapping[str, Sequence[Report]]) -> None:
        """Add the changes that workers report of their copies."""
        for domain, found in reports.items():
            for report in found:
                self.libraries[domain].take_in(report)

    def commit(self, queue: GroupQueue | None = None) -> dict[str, Lesson]:
        """See `Starts.commit`; the workers learn the same lessons."""
        self._queue = queue
        lessons = super().commit(queue)
        if lessons:
            try:
                self._worker.ask("learn_starts", lessons=lessons)
            except RoleLost as lost:
                self._worker.replace(lost)
        return lessons

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._worker.insist("load_starts", states=dict(state))


class RemoteCollector(Collector):
    """A method's collector of rollouts or groups, played by the remote worker."""

    def __init__(self, worker: RemoteWorker, begin_again: Callable[[int], None]) -> None:
        """`begin_again(iteration)`: restarts the method after a worker was replaced, which starts the new worker's episodes."""
        self._worker, self._begin_again = worker, begin_again
        self._queue: GroupQueue | None = None
        self._played: Collected | None = None
        """Experience of the last request for rollouts."""
        self._figures: dict[str, float] = {}
        self._drawn: dict[str, Any] = {}
        """{domain: arguments of `draw`}, for domains where it was called."""
        self.times = CollectorTimes()

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """See `RolloutCollector.restart` and `GroupCollector.restart`; `queue` becomes the image of the worker's."""
        self._queue, self._played = queue, None
        state = None if queue is None else queue.state_dict()
        self._worker.insist("restart", seed_round=seed_round, queue=state, drawn=self._drawn)
        self._worker.needs_restart = False

    def episodes(self) -> list[bytes]:
        """See `RolloutCollector.episodes`; after a replacement, the new worker's episodes."""
        return [episode.tobytes() for episode in self._insist("episodes", self._worker.version)]

    def take_up(self, episodes: Sequence[bytes]) -> None:
        self._worker.insist("take_up", episodes=[np.frombuffer(episode, np.uint8) for episode in episodes])
        self._worker.needs_restart = False

    def draw(self, way: Way, *, random_before: int = 0, first: int = 0, domain: str = "") -> None:
        self._drawn[domain] = {"way": way, "random_before": random_before, "first": first}

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        """See `Collector.next_rollouts`; the worker plays groups with them, for `next_groups`."""
        self._played = self._play(version)
        return self._played.rollouts

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """See `GroupCollector.next_groups`; also marks the groups as consumed in this process's queue."""
        played, self._played = self._played or self._play(version), None
        assert self._queue is not None, "restart comes first"
        assert played.queue is not None
        self._queue.mirror(played.queue)
        return played.groups

    def metrics(self) -> dict[str, float]:
        """Metrics of the last iteration: the trainer's waiting time, the worker's times, and the time of publishing."""
        return {
            **self._figures,
            "roles/publish_s": self._worker.publish_s,
            "roles/published_bytes": float(self._worker.published_bytes),
            "roles/restarts": float(self._worker.num_restarts),
        }

    def _insist(self, what: str, iteration: int, **arguments: object) -> Any:
        """See `RemoteWorker.insist`; a new worker first begins the method's episodes again."""
        return self._worker.insist(what, lambda: self._begin_again(iteration), **arguments)

    def _play(self, version: int) -> Collected:
        started = time.perf_counter()
        played: Collected = self._insist("play", version, version=version, drawn=self._drawn)
        waited = time.perf_counter() - started
        self._worker.fault_records.extend(played.faults)
        if self._worker.starts is not None:
            self._worker.starts.take_in(played.starts)
        for role, name, begin_ns, end_ns in played.spans:
            record(role, name, begin_ns, end_ns)
        times = played.times
        # The loop's own times are waiting times, so they are split in the proportions of the worker's times.
        share = waited / max(times.simulate_s + times.act_s, 1e-9)
        self.times = CollectorTimes(times.simulate_s * min(share, 1.0), times.act_s * min(share, 1.0))
        figures = {"roles/wait_s": waited, "roles/simulate_s": times.simulate_s, "roles/act_s": times.act_s}
        self._figures = {**played.metrics, **figures}
        return played
