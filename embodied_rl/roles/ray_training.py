"""Training as actors of a Ray cluster: `TrainWorker` holds the trained policy and the optimizer's state; ranks are on any of its nodes.

```
 TrainWorker (rank 0), or a method that keeps its steps   RankWorker (rank 1, 2, …; or all), on this node or another
 part of a minibatch ── Ray: call, object store ────────▶ the same step
        │  forward, backward ◀══ gloo or NCCL between the nodes: parameters, gradients ══▶
```
The driver creates and ends the actors; rank 0, or the driver itself, sends the ranks messages through the object store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from embodied_rl.config import HybridConfig, TrainConfig
from embodied_rl.distributed.channel import ChannelClosed
from embodied_rl.hybrid.weight_sync import RayPublisher, pack_tensors, ray_tensors, unpack_tensors
from embodied_rl.learning.rank_hosts import LOOPBACK, RankHost, TrainWorkerError, listen_on, listening_store
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.learning.train_worker import RankServer
from embodied_rl.methods import Experience, Method
from embodied_rl.methods.building import build_run
from embodied_rl.methods.iteration import StreamsMethod
from embodied_rl.methods.language_player import ModelFiles, blank_policy, write_model_files
from embodied_rl.methods.streams import streams_elsewhere
from embodied_rl.policies.base import TrainedModule
from embodied_rl.roles.device_lease import plan_here, with_host_threads
from embodied_rl.roles.ray_calls import GONE, Actor, Outcome, Reference, answering, call_named, first_line, outcome_of, value_of
from embodied_rl.roles.ray_cluster import RayCluster
from embodied_rl.roles.ray_roles import RayWorker, wait_for_start
from embodied_rl.roles.remote import RemoteWorker, WorkerHandle
from embodied_rl.roles.wire import RoleLost, decode_error
from embodied_rl.roles.worker_team import WorkerTeam
from embodied_rl.types import SimSpec

_LEAVE_S = 1.0
"""Time for a failed rank to report its error before it ends."""
_LOOK_S = 0.05
_CAUSE_S = 10.0


class RankWorker:
    """Actor of one rank."""

    def __init__(self) -> None:
        self._model: ModelFiles = {}
        self._server = RankServer()

    def take_model(self, files: ModelFiles) -> None:
        """See `RankHost.take_model`."""
        self._model = files

    def address(self) -> str:
        """Address of this actor's node."""
        return str(ray.util.get_node_ip_address())

    @answering
    def ping(self) -> None:
        """Answered as soon as every earlier call is."""

    @answering
    def listen(self, address: str | None) -> None:
        """Set the address where the ranks meet; None: this actor's node."""
        listen_on(address or self.address())

    def do(self, message: dict[str, Any], text: bytes, payload: np.ndarray) -> Outcome:
        """See `RankServer.do`; tensors arrive and leave in the form of `pack_tensors`."""
        tensors = dict(unpack_tensors(text, payload))

        def task() -> tuple[bytes, Any] | None:
            if message["do"] == "build":
                self._build(message, tensors)
                return None
            answer = self._server.do(message, tensors)
            return None if answer is None else pack_tensors(answer.items())

        outcome = outcome_of(task)
        if outcome[0] != "value":
            # Other ranks may wait for this one in a collective; the end of its process ends their wait.
            threading.Timer(_LEAVE_S, os._exit, (1,)).start()
        return outcome

    def _build(self, message: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if not self._model:
            self._server.do(message, tensors)
            return
        with tempfile.TemporaryDirectory(prefix="embodied_rl_rank_") as folder:
            write_model_files(self._model, Path(folder))
            self._server.do({**message, "policy": {**message["policy"], "model": folder}}, tensors)


class RayLink:
    """Link to one `RankWorker`. Implements `RankLink`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._sent: list[Any] = []
        """References to unfinished calls, in order."""
        self._ping: Reference | None = None
        """Unanswered question of `failure`."""

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `Link.send`."""
        self.send_packed(message, *pack_tensors((tensors or {}).items()))

    def send_packed(self, message: Mapping[str, Any], text: bytes | Reference, payload: np.ndarray | Reference) -> None:
        """Send packed tensors; `text` and `payload`: from `pack_tensors`, or references to them. Raises ChannelClosed."""
        self._forget_done()
        self._sent.append(self._actor.do.remote(dict(message), text, payload))

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Answer to the last message. Raises as `Link.recv`, and UserError for a user's mistake on the other side."""
        kind, value = _answer(self._sent[-1], timeout_s)
        if kind == "error":
            raise decode_error(value)
        if kind != "value":
            raise ChannelClosed(str(value))
        return {}, {} if value is None else dict(unpack_tensors(*value))

    def failure(self, patience_s: float) -> tuple[bool, str] | None:
        """(whether its process ended without an error, description) of a rank that failed within the time; None: it continues."""
        deadline = time.monotonic() + patience_s
        ping = self._ping = self._ping or self._actor.ping.remote()  # of a rank that has answered everything, and writes a checkpoint, say
        for reference in (*self._sent, ping):  # the thread of a checkpoint asks too, while this one sends
            try:
                kind, value = _answer(reference, max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                return None
            if kind != "value":
                return kind == "gone", str(value["message"] if kind == "error" else value)
        self._ping = None
        return None

    def _forget_done(self) -> None:
        done = set(ray.wait(self._sent, num_returns=len(self._sent), timeout=0)[0]) if self._sent else set()
        for reference in done:
            kind, value = _answer(reference)
            if kind != "value":
                raise ChannelClosed(str(value))
        self._sent = [reference for reference in self._sent if reference not in done]


class RayRanks(RankHost):
    """Rank actors, each on its node; created in the process of rank 0, or in the driver if all ranks are actors."""

    def __init__(self, actors: Sequence[Any], *, device: str | None = None) -> None:
        """`device`: device of all ranks, including rank 0 (cpu, cuda); None: the actors are ranks 1, 2, … and compute where rank 0 does."""
        self._actors, self._device = list(actors), device
        self._lowest = 1 if device is None else 0
        """Rank of the first actor; without a device, rank 0 is in this process."""
        self._links = [RayLink(actor) for actor in actors]
        self.links, self.first = self._links[1 - self._lowest :], None if device is None else self._links[0]
        self._addresses: list[str] = []
        self._address = LOOPBACK
        """Address where the ranks meet."""

    def start(self, num_ranks: int, device: torch.device) -> None:
        """See `RankHost.start`: the driver has already created them. Also raises UserError for a node that the others cannot reach."""
        assert num_ranks == len(self._actors) + self._lowest, "the driver makes as many as the configuration says"
        self._addresses = ray.get([actor.address.remote() for actor in self._actors])
        own = str(ray.util.get_node_ip_address())
        within = set(self._addresses) <= {own}
        self._address = LOOPBACK if within else own
        if self._device is None:
            listen_on(self._address)
        # Check here, where all actors are awaited: a rank that fails later, at the meeting, would keep the others waiting.
        for reference in [actor.listen.remote(LOOPBACK if within else None) for actor in self._actors]:
            value_of(reference, "RankWorker")

    def take_model(self, files: ModelFiles) -> None:
        """See `RankHost.take_model`; an actor executes its calls in order."""
        shared = ray.put(dict(files))
        for actor in self._actors:
            actor.take_model.remote(shared)

    def device_type(self, own: torch.device) -> str:
        return self._device or own.type

    def device_index(self, rank: int) -> int:
        """See `RankHost.device_index`: an actor sees only its own GPU."""
        return 0

    def meeting(self, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
        """See `RankHost.meeting`: at this node's address, or at loopback if all ranks are on one node."""
        return listening_store(self._address, num_ranks, timeout_s)

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `RankHost.tell`; the tensors are in the object store once."""
        text, payload = pack_tensors((tensors or {}).items())
        shared = ray.put(payload) if len(payload) else payload
        for link in self._links[1 - self._lowest :]:
            link.send_packed(message, text, shared)

    def ended(self, patience_s: float) -> Exception | None:
        """See `RankHost.ended`. RoleLost for a rank whose process or node is gone; the others then fail too."""
        failed: dict[int, str] = {}
        deadline = time.monotonic() + patience_s
        while len(failed) < len(self._links):
            for index, link in enumerate(self._links, start=self._lowest):
                if index in failed or (found := link.failure(_LOOK_S)) is None:
                    continue
                gone, what = found
                if gone:
                    return RoleLost(f"{self._named(index)} has ended: {what}")
                if not failed:  # another rank's end may be the cause, and may not be known yet
                    deadline = min(deadline, time.monotonic() + _CAUSE_S)
                failed[index] = what
            if time.monotonic() >= deadline:
                break
        return TrainWorkerError("\n".join(f"{self._named(index)}: {what}" for index, what in failed.items())) if failed else None

    def _named(self, index: int) -> str:
        return f"Rank {index} of training (node {self._addresses[index - self._lowest]})"

    def close(self) -> None:
        """See `RankHost.close`; the driver ends the actors."""
        self._links, self.links, self.first = [], [], None


def _answer(reference: Reference, timeout_s: float | None = None) -> Outcome:
    """Outcome of an actor's method, also ("gone", description) of an actor that has ended. Raises TimeoutError."""
    try:
        kind, value = ray.get(reference, timeout=timeout_s)
    except GONE as error:
        return "gone", first_line(error)
    return kind, value


class TrainWorker:
    """Actor with the learning half of a method."""

    policy: TrainedModule
    method: Method

    @answering
    def begin(
        self, config: TrainConfig, models: Mapping[str, ModelFiles], specs: Sequence[dict[str, Any]], ranks: Sequence[Actor] = ()
    ) -> None:
        """Build the method and its policy, with random weights.

        Args:
            models: {policy: files of a language policy}; empty without one.
            specs: simulator specs of all streams (`RemoteWorker.specs`).
            ranks: `RankWorker` actors of rank 1, 2, …
        """
        self._publisher, self._lends = RayPublisher(), config.hybrid.placement.kind == "multiplexed"
        if self._lends:
            config = with_host_threads(config, plan_here(config))
        # Playing, and with it the rest of `hybrid`, is elsewhere.
        hybrid = HybridConfig(
            device=config.hybrid.device,
            placement=config.hybrid.placement,
            num_threads=config.hybrid.num_threads,
            precision=config.hybrid.precision,
            sharding=config.hybrid.sharding,
        )
        # The warm start runs before training starts here: see `TrainedApart.restart`.
        own = dataclasses.replace(config, hybrid=hybrid, algorithm=dataclasses.replace(config.algorithm, warm_start=None))
        torch.manual_seed(config.seed)
        # The models' files are read inside the block, so a killed actor leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="embodied_rl_trained_") as folder:
            languages = {}
            for name, files in models.items():
                write_model_files(files, Path(folder) / name)
                languages[name] = blank_policy(own.of_policy(name).language, Path(folder) / name)
            streams = streams_elsewhere(own, [SimSpec.from_dict(one) for one in specs])
            parts = build_run(own, streams, Path(own.run_dir), languages=languages, ranks=RayRanks(ranks))
        self.policy, self.method = parts.policy, parts.method

    @answering
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load a policy's state: the initial one, or a checkpoint's."""
        self.policy.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
        if self._ranks is not None:
            self._ranks.take_weights()

    @answering
    def update(self, experience: Experience, iteration: int, steps: int) -> dict[str, float]:
        """Run one iteration: prepare, update, observation statistics; return metrics."""
        self.policy.train()
        prepared = self.method.prepare(experience)
        stats = self.method.update(prepared, iteration=iteration, steps=steps)
        if experience.observation:
            self.policy.update_statistics(experience.observation)
        return stats

    @answering
    def weights(self) -> list[Any]:
        """Put the policy's state into the object store; return references for `ray_tensors`, valid until the next call."""
        if self._ranks is not None:
            self._ranks.write_back()
        references, _ = self._publisher.publish(self.policy.state_dict().items())
        if self._lends:
            torch.cuda.empty_cache()  # see `HybridEngine.publish`
        return references

    @property
    def _ranks(self) -> RankExecutor | None:
        """Executor that shards the policy over actors (`hybrid.sharding`); None: training is in this actor only."""
        return self.method.sharded

    @answering
    def ask(self, what: str, *arguments: Any) -> object:
        """Call the method's `what`, which returns or accepts its state."""
        return call_named(self.method, _OF_METHODS, what, *arguments)


_OF_METHODS = ("restart", "state_tensors", "load_state_tensors", "state_dict", "load_state_dict")
"""Methods of the learning half that may be called by name."""


class TrainedApart(StreamsMethod):
    """A method whose learning half is a `TrainWorker`. Also the engine's `TrainedCopy`. This process's learners have nothing to do.
    Raises RoleLost when the worker has ended: its weights are gone, and the run restarts from its last checkpoint."""

    _policy: TrainedModule
    _worker: Actor = None
    _rank_workers: Sequence[Actor] = ()

    def __init__(self, run: RayRun, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        run.apart = self

    def begin(self, run: RemoteWorker, cluster: RayCluster) -> None:
        """Start the worker and the other ranks. Raises UserError when they cannot start."""
        assert run.policy is not None, "take_policy comes first"
        self._policy, config = run.policy, run.config
        num_ranks = 1 if config.hybrid.sharding is None else config.hybrid.sharding.num_ranks
        rank: Actor = ray.remote(RankWorker)
        self._rank_workers = [rank.options(**cluster.options("train", number)).remote() for number in range(1, num_ranks)]
        actor: Actor = ray.remote(TrainWorker).options(**cluster.options("train"))
        specs = [spec.to_dict() for spec in run.specs]
        self._worker = actor.remote()
        try:
            begun = self._worker.begin.remote(config, run.models, specs, self._rank_workers)
            ranks_s = 0.0 if config.hybrid.sharding is None else config.hybrid.sharding.start_timeout_s
            wait_for_start(cluster, begun, config.hybrid.ray.start_timeout_s + ranks_s, "TrainWorker")
            value_of(begun, "TrainWorker")
            value_of(self._worker.load.remote(_on_host(self._policy.state_dict())), "TrainWorker")
        except BaseException:
            self.close()
            raise

    @property
    def trained_copy(self) -> TrainedApart:
        return self

    def prepare(self, experience: Experience) -> dict[str, Any]:
        """Return the experience unchanged: the worker prepares it with the update."""
        return {"experience": experience}

    def update(self, prepared: dict[str, Any], *, iteration: int, steps: int) -> dict[str, float]:
        stats: dict[str, float] = self._ask(self._worker.update.remote(prepared["experience"], iteration, steps))
        return stats

    def write_back(self) -> None:
        """Copy the trained weights and statistics into the whole policy of this process."""
        references = self._ask(self._worker.weights.remote())
        self._policy.load_state_dict(dict(ray_tensors(references)))

    def take_weights(self) -> None:
        self._ask(self._worker.load.remote(_on_host(self._policy.state_dict())))

    def restart(self, iteration: int) -> None:
        if self.wants_start:
            # A language agent's warm start runs here, where policy and rollout worker are available; the worker then loads the result.
            self.begin_learning(iteration)
            self.take_weights()
        self._ask(self._worker.ask.remote("restart", iteration))
        super().restart(iteration)

    def state_tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._ask(self._worker.ask.remote("state_tensors"))
        return state

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Load the state; also sends the policy's current weights, which were loaded before."""
        self.take_weights()
        self._ask(self._worker.ask.remote("load_state_tensors", state))

    def state_dict(self) -> dict[str, Any]:
        """The worker's state, with this process's own part."""
        state: dict[str, Any] = self._ask(self._worker.ask.remote("state_dict"))
        return self.with_trained(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ask(self._worker.ask.remote("load_state_dict", state))
        super().load_state_dict(state)

    def close(self) -> None:
        """End the worker and the other ranks. May be called twice."""
        workers, self._worker, self._rank_workers = [self._worker, *self._rank_workers], None, ()
        for worker in filter(None, workers):
            _end(worker)

    def _ask(self, reference: Reference) -> Any:
        # The answer must come: otherwise the checkpoint would lack the trained policy.
        return value_of(reference, "TrainWorker", can_give_up=False)


class RayRun(RemoteWorker):
    """Rollout workers and the training worker as actors; closing them ends the cluster."""

    apart: TrainedApart | None = None
    """The method whose learning half is an actor."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises UserError as `RayCluster` does."""
        self._cluster = RayCluster(config.hybrid)
        super().__init__(config, self._start_actors, self._cluster.close)

    def _start_actors(self, config: TrainConfig) -> WorkerHandle:
        if config.hybrid.players == 1:
            return RayWorker(config, self._cluster)
        return WorkerTeam(config, lambda own, share: RayWorker(own, self._cluster, share))

    @property
    def method(self) -> Callable[..., StreamsMethod]:
        """See `RemoteWorker.method`: its learning half is an actor, unless the method keeps the steps that it learns from."""
        return super().method if self.config.keeps_steps else functools.partial(TrainedApart, self)

    def connect(self, method: StreamsMethod) -> None:
        """See `RemoteWorker.connect`. Raises UserError when the actor of the learning half cannot start."""
        if self.apart is not None:
            self.apart.begin(self, self._cluster)
            self.at_close.callback(self.apart.close)
        super().connect(method)

    def ranks(self, hybrid: HybridConfig) -> RankHost | None:
        """See `RemoteWorker.ranks`; for a method that keeps its steps and sends minibatches to its ranks."""
        if not self.config.keeps_steps or hybrid.sharding is None:
            return None
        rank: Actor = ray.remote(RankWorker)
        actors = [rank.options(**self._cluster.options("train", number)).remote() for number in range(hybrid.sharding.num_ranks)]
        for actor in actors:
            self.at_close.callback(_end, actor)
        for actor in actors:
            wait_for_start(self._cluster, actor.address.remote(), hybrid.ray.start_timeout_s, "RankWorker")
        return RayRanks(actors, device="cuda" if hybrid.ray.gpus.train > 0 and hybrid.device != "cpu" else "cpu")


def _end(actor: Actor) -> None:
    with contextlib.suppress(Exception):  # ignore any failure of the cluster: this is the end of the run
        ray.kill(actor)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
