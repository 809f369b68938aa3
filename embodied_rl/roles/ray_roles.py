"""The playing roles as actors of a Ray cluster: `EnvWorker` (simulators, collector), `GenerationWorker` (policy), `RewardWorker`.

```
 driver: training loop          EnvWorker                                GenerationWorker
 play(v), restart, evaluate ──▶ EnvManager ─▶ collector ── observations ─▶ policy
                            ◀── episodes        ▲   └──── actions ◀──────────┘
                                                │ scores
 publish(v): object store ──────────────────────┼──────────────────────────▶ weights of version v
                                          RewardWorker × n
```
The driver owns the actors. If one ends, the driver replaces all, as it replaces a worker process. `hybrid.players` sets the number of
EnvWorkers, each with its own actors and its share of the groups.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError
from torch import Tensor

from embodied_rl.config import RewardWorkerConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.hybrid.weight_sync import DeltaSink, DeltaSource, NamedTensors, RayPublisher, ray_tensors
from embodied_rl.learning.devices import compute_threads, resolve_device, set_compute_threads
from embodied_rl.methods.building import with_backend
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.methods.streams import Stream
from embodied_rl.roles.device_lease import DeviceLease, HostPlan, plan_here
from embodied_rl.roles.multiplexed import MultiplexedTokens, capacity_of
from embodied_rl.roles.ray_calls import GONE, Actor, Outcome, Reference, answering, call_named, failed, first_line, outcome_of, value_of
from embodied_rl.roles.ray_cluster import RayCluster
from embodied_rl.roles.role_process import Inbox, Reply, serve
from embodied_rl.roles.token_process import HostTokens
from embodied_rl.roles.worker import HostsOf, LoadedActing, RolloutWorker, WorkerActing
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.rollout.scoring import RewardWorker, Scorer
from embodied_rl.stopping import waiting
from embodied_rl.types import ActionLayout, Episode, Observation, SimSpec

_GENERATION = "GenerationWorker"
_OF_TOKENS = ("submit", "poll", "abort", "release_memory", "restore_memory", "forget")
"""Token backend methods that may be called by name."""


class GenerationWorker:
    """Actor with the policies that act for remote simulators, and the token backends of language agents: of one domain or of all."""

    def __init__(self, config: TrainConfig) -> None:
        set_compute_threads(1, 1)
        self._acting = LoadedActing(config)
        self._sink = DeltaSink() if config.hybrid.publish == "changed" else None
        self._lease: DeviceLease | None = None
        """Lease of a host with a GPU that has copies of robots' policies; it follows the run's lease."""
        if acts_on_hosts(config):
            self._lease = DeviceLease(HostPlan(1, 1, 1, devices=(str(resolve_device(config.hybrid.device)),)))

    @answering
    def begin(self, name: str, domain: str, spec: Mapping[str, Any]) -> ActionLayout:
        """Build the policy `name` of a domain for its simulator; return the layout of its actions."""
        own = self._acting.config.for_domain(domain)
        return self._acting.policy(name, own, SimSpec.from_dict(dict(spec)), self._lease).layout

    @answering
    def begin_tokens(self, files: ModelFiles, policy: str, name: str, kind: str) -> tuple[bool, bool, str]:
        """Build the token backend `name` of a kind (`generation.backend`) for a policy's model; return (`can_constrain`, `can_free_memory`,
        device)."""
        with self._acting.reading({policy: files}):
            backend = self._acting.tokens(policy, name, with_backend(self._acting.config.of_policy(policy), kind))
        return backend.can_constrain, backend.can_free_memory, str(backend.device)

    @answering
    def tokens(self, name: tuple[str, str], what: str, **arguments: object) -> Any:
        """Call the method `what` of a token backend, or return its `cache_bytes`."""
        backend = self._acting.backends[name]
        return backend.cache_bytes if what == "cache_bytes" else call_named(backend, _OF_TOKENS, what, **arguments)

    @answering
    def act(self, name: str, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> ActedBatch:
        """See `Generator.send` and `Generator.recv`."""
        generator = self._acting.policies[name].generator
        generator.send(slots, observation, noise)
        return generator.recv()

    @answering
    def load(self, version: int, references: list[Reference]) -> None:
        """Load the weights that a `RayPublisher` published."""
        tensors: NamedTensors = ray_tensors(references)
        self._acting.load(version, tensors if self._sink is None else self._sink.take(version, tensors).items())

    @answering
    def lease(self, what: str) -> None:
        """Free the GPU memory of robots' policies (``lend``), or act on the GPU again, with the newest weights (``take_back``)."""
        call_named(self._lease, ("lend", "take_back"), what)


def acts_on_hosts(config: TrainConfig) -> bool:
    """Whether a robot's policy has a copy on each host's GPU."""
    return config.hybrid.placement.kind == "multiplexed" and config.hybrid.ray.gpus.generation > 0


class RayActing(WorkerActing):
    """Remote policies and token backends (`GenerationWorker`) for the rollout worker of an `EnvWorker`."""

    def __init__(self, config: TrainConfig, workers: Sequence[Actor]) -> None:
        """`workers`: one per host; the last is never lent."""
        super().__init__(config)
        self._workers = list(workers)
        self._acts_in = self._workers if acts_on_hosts(config) else self._workers[-1:]
        """Workers that have robots' policies."""
        self._handles: list[RayGenerator | RayTokens | MultiplexedTokens] = []

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        begun = [worker.begin.remote(stream.policy, stream.domain, stream.spec.to_dict()) for worker in self._acts_in]
        layout: ActionLayout = self._all(begun)[-1]
        generator = RayGenerator(self._workers, stream.policy)
        self._handles.append(generator)
        return generator, layout

    def on_hosts(self, stream: Stream, hosts_of: HostsOf) -> Generator:
        assert stream.generator is not None, "it was asked for before"
        if len(self._acts_in) == 1 or self.lease is None:
            return stream.generator
        hosted = RayGenerator(self._workers, stream.policy, hosts_of)
        self._handles.append(hosted)
        self.lease.follow(partial(self._ask_lease, "lend"), partial(self._ask_lease, "take_back"))
        return hosted

    def tokens(self, policy: str, name: str, config: TrainConfig) -> TokenBackend:
        kind, files = config.generation.backend, dict(self.models[policy])
        begun = [worker.begin_tokens.remote(files, policy, name, kind) for worker in self._workers]
        backends = [
            RayTokens(worker, (policy, name), *value_of(own, _GENERATION)) for worker, own in zip(self._workers, begun, strict=True)
        ]
        self._handles += backends
        if self.lease is None:
            return backends[0]
        hosts = MultiplexedTokens(backends, self.lease, capacity_of(config, self.lease.plan), _from_the_trainer)
        self._handles.append(hosts)
        return hosts

    def load(self, version: int, tensors: list[Reference]) -> None:
        """See `WorkerActing.load`; `tensors` are references from a `RayPublisher`."""
        self._all([worker.load.remote(version, tensors) for worker in self._workers])
        for handle in self._handles:
            handle.version = version

    def _ask_lease(self, what: str, hosts: Collection[int]) -> None:
        self._all([self._workers[number].lease.remote(what) for number in hosts])

    def _all(self, asked: Sequence[Reference]) -> list[Any]:
        return [value_of(reference, _GENERATION) for reference in asked]


class RayGenerator(Generator):
    """Generator for a robot's policy in `GenerationWorker`s: the last one's, or on the hosts where its slots play, all at the same time."""

    def __init__(self, workers: Sequence[Actor], name: str, hosts_of: HostsOf | None = None) -> None:
        self._workers, self._name, self._hosts_of = list(workers), name, hosts_of
        self.version = 0
        self._asked: deque[tuple[list[Reference], np.ndarray | None]] = deque()
        """(answers, row of each of their rows; None: as sent) of every batch."""

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """See `Generator.send`; the observation is copied into the object store, and each host gets its slots' rows."""
        if self._hosts_of is None:
            self._asked.append(([self._workers[-1].act.remote(self._name, slots, observation, noise)], None))
            return
        hosts = self._hosts_of(slots)
        rows = {number: np.flatnonzero(hosts == number) for number in np.unique(hosts).tolist()}
        asked: list[Reference] = []
        for number, own in rows.items():
            seen = {key: part[own] for key, part in observation.items()}
            asked.append(self._workers[number].act.remote(self._name, slots[own], seen, None if noise is None else noise[own]))
        self._asked.append((asked, np.concatenate(list(rows.values()))))

    def recv(self) -> ActedBatch:
        asked, rows = self._asked.popleft()
        acted = ActedBatch.joined([value_of(reference, _GENERATION) for reference in asked])
        return acted if rows is None else acted.rows(np.argsort(rows))

    def publish(self, version: int) -> None:
        _from_the_trainer(version, ())


class ActorCall:
    """A call of a `GenerationWorker` that may be under way. Implements `Call`."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def is_over(self, timeout_s: float) -> bool:
        return bool(ray.wait([self._reference], timeout=timeout_s)[0])

    def value(self) -> Any:
        return value_of(self._reference, _GENERATION)


class RayTokens(HostTokens):
    """A token backend in a `GenerationWorker`. Raises RoleLost when the worker has ended, and any exception of the backend."""

    def __init__(self, worker: Actor, name: tuple[str, str], can_constrain: bool, can_free_memory: bool, device: str) -> None:
        super().__init__(lambda what, **arguments: ActorCall(worker.tokens.remote(name, what, **arguments)))
        self.can_constrain, self.can_free_memory, self.device = can_constrain, can_free_memory, device

    @property
    def cache_bytes(self) -> int:
        return int(self._ask("cache_bytes"))

    def release_memory(self) -> int:
        return int(self._ask("release_memory"))

    def load_weights(self, version: int, tensors: Iterable[Any]) -> None:
        _from_the_trainer(version, tensors)

    def close(self) -> None:
        """Do nothing: the driver ends the worker."""


def _from_the_trainer(version: int, tensors: Iterable[Any]) -> None:
    raise RuntimeError("Weights come from the trainer: see RayActing.load.")


_END_S = 5.0
"""Time for an orderly shutdown of simulators; they may wait for a server that does not answer."""


class RayScorer(Scorer):
    """Reward workers as actors. Ray restarts a lost one and repeats its calls."""

    def __init__(self, workers: list[Any], options: RewardWorkerConfig) -> None:
        super().__init__(options.combine, options.timeout_s)
        self._workers = workers

    def _ask(self, number: int, episode: Episode) -> Future[float]:
        future: Future[float] = self._workers[number % len(self._workers)].score.remote(episode).future()
        return future

    def close(self) -> None:
        """Do nothing: the driver ends the workers."""

    def _reason(self, error: BaseException) -> str:
        """See `Scorer._reason`. Raises RayActorError when workers ended too often."""
        if not isinstance(error, RayTaskError):
            raise error
        return first_line(error.cause if error.cause is not None else error)


class EnvWorker(Inbox):
    """Simulators with the collector, which plays on between requests; a separate thread answers the requests."""

    def __init__(self, config: TrainConfig, generation: list[Actor], rewards: list[Actor], share: Share = WHOLE) -> None:
        """`generation`: the actor of each host; `share`: this worker's share of the groups."""
        self._requests: queue.SimpleQueue[tuple[str, dict[str, Any], Future[Outcome]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(config, generation, rewards, share), daemon=True).start()

    def do(self, what: str, arguments: dict[str, Any]) -> Outcome:
        """Call the worker's method `what`."""
        answer: Future[Outcome] = Future()
        self._requests.put((what, arguments, answer))
        return answer.result()

    def _run(self, config: TrainConfig, generation: list[Actor], rewards: list[Actor], share: Share) -> None:
        options = config.hybrid.reward_worker

        def make_scoring(_: TrainConfig) -> RayScorer | None:
            return None if options is None else RayScorer(rewards, options)

        def build() -> RolloutWorker:
            return RolloutWorker(config, acting=RayActing(config, generation), make_scoring=make_scoring, share=share)

        kind, worker = outcome_of(build)
        if kind == "value":
            with contextlib.suppress(EOFError), compute_threads(1):  # the simulators use the other cores
                serve(worker, self)
            worker.close()
        while True:  # a daemon thread until the actor ends: late requests get an answer instead of waiting for ever
            _, _, answer = self._requests.get()
            answer.set_result((kind, worker) if kind != "value" else ("lost", "it was ended"))

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Reply] | None:
        try:
            what, arguments, answer = self._requests.get(block=wait)
        except queue.Empty:
            return None
        if what == "end":
            answer.set_result(("value", None))
            raise EOFError

        def reply(value: object, error: BaseException | None) -> None:
            answer.set_result(("value", value) if error is None else failed(error))

        return what, arguments, reply


class RayWorker:
    """Handle of the playing actors. Implements `WorkerHandle`."""

    def __init__(self, config: TrainConfig, cluster: RayCluster, share: Share = WHOLE) -> None:
        """Create the actors; `share`: their share of the groups. Raises UserError if the cluster can never hold them."""
        cluster.check()
        self._cluster, self._publisher = cluster, RayPublisher()
        self._differences = DeltaSource() if config.hybrid.publish == "changed" else None
        self._timeout_s: float | None = cluster.config.ray.start_timeout_s + config.sim.start_timeout_s
        rewards = config.hybrid.reward_worker
        generation: Actor = ray.remote(GenerationWorker)
        hosts = plan_here(config).num_hosts if config.hybrid.placement.kind == "multiplexed" else 1
        where_hosts = [cluster.options("generation", share.index * hosts + number) for number in range(hosts)]
        self.hosts: list[Actor] = [generation.options(**where).remote(config) for where in where_hosts]
        again = {"max_restarts": config.hybrid.max_restarts, "max_task_retries": -1}
        self.rewards: list[Any] = []
        for number in range(0 if rewards is None else rewards.num_workers):
            assert rewards is not None
            where = cluster.options("reward", share.index * rewards.num_workers + number)
            self.rewards.append(ray.remote(RewardWorker).options(**where, **again).remote(rewards.target, rewards.kwargs))
        env: Actor = ray.remote(EnvWorker).options(**cluster.options("env", share.index))
        self.env: Actor = env.remote(config, self.hosts, self.rewards, share)

    @property
    def generation(self) -> Actor:
        """The last generation actor, which is never lent."""
        return self.hosts[-1]

    def call(self, what: str, **arguments: object) -> Any:
        """See `WorkerHandle.call`. Raises UserError when the actors do not begin in time."""
        reference = self.env.do.remote(what, arguments)
        if self._timeout_s is not None:
            wait_for_start(self._cluster, reference, self._timeout_s, "EnvWorker")
            self._timeout_s = None
        return value_of(reference, "EnvWorker")

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[list[Any], int]:
        """See `WorkerHandle.put`: into the object store; the references are valid until the next call."""
        stream: NamedTensors = tensors.items()
        if self._differences is not None:
            stream = self._differences.stream(version, stream)
        return self._publisher.publish(stream)

    def close(self) -> None:
        """End the actors; simulators shut down in order if their actor is alive."""
        with contextlib.suppress(*GONE, ray.exceptions.GetTimeoutError):
            ray.get(self.env.do.remote("end", {}), timeout=_END_S)
        for actor in (self.env, *self.hosts, *self.rewards):
            ray.kill(actor)


def wait_for_start(cluster: RayCluster, reference: Reference, timeout_s: float, role: str) -> None:
    """Wait for an actor's first answer. Raises UserError: it does not come in time, or the cluster has lost a needed resource."""
    deadline = time.monotonic() + timeout_s
    while not ray.wait([reference], timeout=1.0)[0]:
        with waiting:  # see `value_of`
            pass
        cluster.check()
        if time.monotonic() > deadline:
            raise UserError(
                f"hybrid.cluster=ray: {role} did not start within {timeout_s:g} s (hybrid.ray.start_timeout_s + sim.start_timeout_s); "
                "`ray status` shows what it waits for."
            )
