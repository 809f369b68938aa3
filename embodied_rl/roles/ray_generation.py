"""Generation as an actor of a Ray cluster: `GenerationWorker` holds acting policies and token backends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend
from embodied_rl.hybrid.weight_sync import DeltaSink, NamedTensors, ray_tensors
from embodied_rl.learning.devices import resolve_device, set_compute_threads
from embodied_rl.methods.building import with_backend
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.methods.streams import Stream
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.multiplexed import MultiplexedTokens, capacity_of
from embodied_rl.roles.ray_calls import Actor, Outcome, Reference, outcome_of, value_of
from embodied_rl.roles.worker import HostsOf, LoadedActing, WorkerActing
from embodied_rl.types import ActionLayout, Observation, SimSpec

_ROLE = "GenerationWorker"
_MOMENT_S = 0.05
"""Seconds that a host samples before it checks for other requests."""
_NAP_S = 0.002
_OF_TOKENS: dict[str, Callable[..., Any]] = {
    "submit": lambda backend, requests: backend.submit(requests),
    "poll": lambda backend, min_ready, timeout_s: backend.poll(min_ready, timeout_s),
    "abort": lambda backend, request_ids: backend.abort(request_ids),
    "pause": lambda backend: backend.pause(),
    "resume": lambda backend: backend.resume(),
    "release_memory": lambda backend: backend.release_memory(),
    "restore_memory": lambda backend: backend.restore_memory(),
    "forget": lambda backend: backend.forget(),
    "cache_bytes": lambda backend: backend.cache_bytes,
}
"""Token backend methods that may be called by name."""


class GenerationWorker:
    """Actor with the policies that act for remote simulators, and the token backends of language agents: of one domain or of all."""

    def __init__(self, config: TrainConfig) -> None:
        self._acting = LoadedActing(config)
        self._sink = DeltaSink() if config.hybrid.publish == "changed" else None
        self._lease: DeviceLease | None = None
        """Lease of a host with a GPU that has copies of robots' policies; it follows the run's lease."""
        if acts_on_hosts(config):
            self._lease = DeviceLease(HostPlan(1, 1, 1, devices=(str(resolve_device(config.hybrid.device)),)))

    def begin(self, name: str, domain: str, spec: Mapping[str, Any]) -> Outcome:
        """Build the policy `name` of a domain for its simulator; return the layout of its actions."""

        def build() -> ActionLayout:
            _one_thread()
            own = self._acting.config.for_domain(domain)
            return self._acting.policy(name, own, SimSpec.from_dict(dict(spec)), self._lease).layout

        return outcome_of(build)

    def begin_tokens(self, files: ModelFiles, policy: str, name: str, kind: str) -> Outcome:
        """Build the token backend `name` of a kind (`generation.backend`) for a policy's model; return (`can_constrain`, `can_free_memory`,
        device)."""

        def build() -> tuple[bool, bool, str]:
            _one_thread()
            with self._acting.reading({policy: files}):
                backend = self._acting.tokens(policy, name, with_backend(self._acting.config.of_policy(policy), kind))
            return backend.can_constrain, backend.can_free_memory, str(backend.device)

        return outcome_of(build)

    def tokens(self, name: tuple[str, str], what: str, *arguments: object) -> Outcome:
        """Call the method `what` of a token backend."""
        return outcome_of(lambda: _OF_TOKENS[what](self._acting.backends[name], *arguments))

    def act(self, name: str, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> Outcome:
        """See `Generator.send` and `Generator.recv`."""

        def answer() -> ActedBatch:
            generator = self._acting.policies[name].generator
            generator.send(slots, observation, noise)
            return generator.recv()

        return outcome_of(answer)

    def load(self, version: int, references: list[Reference]) -> Outcome:
        """Load the weights that a `RayPublisher` published."""

        def take() -> None:
            tensors: NamedTensors = ray_tensors(references)
            self._acting.load(version, tensors if self._sink is None else self._sink.take(version, tensors).items())

        return outcome_of(take)

    def lend(self) -> Outcome:
        """Free the GPU memory of robots' policies."""
        return outcome_of(lambda: self._own_lease.lend())

    def take_back(self) -> Outcome:
        """Act on the GPU again, with the newest weights."""
        return outcome_of(lambda: self._own_lease.take_back())

    @property
    def _own_lease(self) -> DeviceLease:
        assert self._lease is not None, "robots' policies act here on the processor"
        return self._lease


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
        self._handles: list[RayGenerator | RayHostedGenerator | RayTokens | MultiplexedTokens] = []

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        begun = [worker.begin.remote(stream.policy, stream.domain, stream.spec.to_dict()) for worker in self._acts_in]
        layout: ActionLayout = self._all(begun)[-1]
        generator = RayGenerator(self._workers[-1], stream.policy)
        self._handles.append(generator)
        return generator, layout

    def on_hosts(self, stream: Stream, hosts_of: HostsOf) -> Generator:
        assert stream.generator is not None, "it was asked for before"
        if len(self._acts_in) == 1 or self.lease is None:
            return stream.generator
        hosted = RayHostedGenerator(self._workers, stream.policy, hosts_of)
        self._handles.append(hosted)
        self.lease.follow(self._lend, self._take_back)
        return hosted

    def tokens(self, policy: str, name: str, config: TrainConfig) -> TokenBackend:
        kind, files = config.generation.backend, dict(self.models[policy])
        begun = [worker.begin_tokens.remote(files, policy, name, kind) for worker in self._workers]
        made = RayTokens if self.lease is None else RayHostTokens
        backends = [made(worker, (policy, name), *value_of(own, _ROLE)) for worker, own in zip(self._workers, begun, strict=True)]
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

    def _lend(self, hosts: Collection[int]) -> None:
        self._all([self._workers[number].lend.remote() for number in hosts])

    def _take_back(self, hosts: Collection[int]) -> None:
        self._all([self._workers[number].take_back.remote() for number in hosts])

    def _all(self, asked: Sequence[Reference]) -> list[Any]:
        return [value_of(reference, _ROLE) for reference in asked]


class RayGenerator(Generator):
    """Generator for a robot's policy in a `GenerationWorker`."""

    def __init__(self, worker: Actor, name: str) -> None:
        self._worker, self._name = worker, name
        self.version = 0
        self._asked: deque[Reference] = deque()

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """See `Generator.send`; the observation is copied into the object store."""
        self._asked.append(self._worker.act.remote(self._name, slots, observation, noise))

    def recv(self) -> ActedBatch:
        acted: ActedBatch = value_of(self._asked.popleft(), _ROLE)
        return acted

    def publish(self, version: int) -> None:
        _from_the_trainer(version, ())


class RayHostedGenerator(Generator):
    """Generator for a robot's policy on the hosts where its slots play; all hosts act at the same time."""

    def __init__(self, workers: Sequence[Actor], name: str, hosts_of: HostsOf) -> None:
        self._on, self._hosts_of = [RayGenerator(worker, name) for worker in workers], hosts_of
        self.version = 0
        self._asked: deque[tuple[list[int], np.ndarray]] = deque()
        """(hosts, host index of each row) of every batch."""

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """See `Generator.send`; each host gets its slots' rows."""
        hosts = self._hosts_of(slots)
        rows = {number: np.flatnonzero(hosts == number) for number in np.unique(hosts).tolist()}
        for number, own in rows.items():
            seen = {key: part[own] for key, part in observation.items()}
            self._on[number].send(slots[own], seen, None if noise is None else noise[own])
        self._asked.append((list(rows), np.concatenate(list(rows.values()))))

    def recv(self) -> ActedBatch:
        hosts, rows = self._asked.popleft()
        acted = [vars(self._on[number].recv()) for number in hosts]
        names = ["slots", "action", "log_prob", *([] if acted[0]["given"] is None else ["given"])]
        parts = {name: np.concatenate([own[name] for own in acted])[np.argsort(rows)] for name in names}
        return ActedBatch(**parts, version=acted[0]["version"])

    def publish(self, version: int) -> None:
        _from_the_trainer(version, ())


class RayTokens(TokenBackend):
    """A token backend in a `GenerationWorker`. Each call returns after the worker has executed it, so the order is the caller's.
    Raises RoleLost when the worker has ended, and any exception of the backend."""

    version: int = 0
    """Version of the weights that sample now."""
    can_constrain: bool = False
    """See `TokenBackend`, also for the attributes below; copied from the remote backend."""
    can_free_memory: bool = False
    device: str = "cpu"

    def __init__(self, worker: Actor, name: tuple[str, str], can_constrain: bool, can_free_memory: bool, device: str) -> None:
        self._worker, self._name = worker, name
        self.can_constrain, self.can_free_memory, self.device = can_constrain, can_free_memory, device

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if requests:
            self._ask("submit", list(requests))

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        return list(self._ask("poll", min_ready, timeout_s))

    def abort(self, request_ids: Iterable[int]) -> None:
        if wanted := list(request_ids):
            self._ask("abort", wanted)

    def pause(self) -> None:
        self._ask("pause")

    def resume(self) -> None:
        self._ask("resume")

    @property
    def cache_bytes(self) -> int:
        return int(self._ask("cache_bytes"))

    def release_memory(self) -> int:
        return int(self._ask("release_memory"))

    def restore_memory(self) -> None:
        self._ask("restore_memory")

    def forget(self) -> None:
        self._ask("forget")

    def load_weights(self, version: int, tensors: Iterable[Any]) -> None:
        _from_the_trainer(version, tensors)

    def close(self) -> None:
        """Do nothing: the driver ends the worker."""

    def _ask(self, what: str, *arguments: object) -> Any:
        return value_of(self._worker.tokens.remote(self._name, what, *arguments), _ROLE)


class RayHostTokens(RayTokens):
    """One of several hosts that sample at the same time; polling does not block the caller. All requests since the last poll are sent
    together: those that came later would join the others at a step that the clock decides."""

    def __init__(self, worker: Actor, name: tuple[str, str], can_constrain: bool, can_free_memory: bool, device: str) -> None:
        super().__init__(worker, name, can_constrain, can_free_memory, device)
        self._asked: Reference | None = None
        self._in_flight = 0
        self._outbox: list[GenerationRequest] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `TokenBackend.submit`; a later call raises the error of an invalid request."""
        self._in_flight += len(requests)
        self._outbox += requests

    def flush(self) -> None:
        requests, self._outbox = self._outbox, []
        super().submit(requests)
        self._ask_on()

    def abort(self, request_ids: Iterable[int]) -> None:
        self.flush()
        super().abort(request_ids)

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; with 0 it waits a moment, since the caller could only poll again."""
        self.flush()
        deadline = None if timeout_s is None else time.monotonic() + max(timeout_s, _NAP_S)
        ready: list[Completion] = []
        while len(ready) < max(min_ready, 1) and self._asked is not None:
            # Without a deadline `value_of` waits; the end of a run interrupts it.
            if deadline is not None and not ray.wait([self._asked], timeout=max(deadline - time.monotonic(), 0.0))[0]:
                break
            found: list[Completion] = value_of(self._asked, _ROLE)
            ready += found
            self._in_flight -= len(found)
            self._asked = None
            self._ask_on()
        return ready

    def _ask_on(self) -> None:
        if self._in_flight and self._asked is None:
            self._asked = self._worker.tokens.remote(self._name, "poll", 1, _MOMENT_S)


def _from_the_trainer(version: int, tensors: Iterable[Any]) -> None:
    raise RuntimeError("Weights come from the trainer: see RayActing.load.")


def _one_thread() -> None:
    """Limit a generation actor to one thread for its lifetime."""
    set_compute_threads(1, 1)
