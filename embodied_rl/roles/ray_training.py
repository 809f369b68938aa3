"""Training as an actor of a Ray cluster: `TrainWorker` holds the trained policy and the optimizer's state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from embodied_rl.config import HybridConfig, TrainConfig
from embodied_rl.hybrid.weight_sync import RayPublisher, ray_tensors
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.methods import Experience, Method
from embodied_rl.methods.building import build_run
from embodied_rl.methods.language_player import ModelFiles, blank_policy, write_model_files
from embodied_rl.methods.streams import streams_elsewhere
from embodied_rl.policies.base import TrainedModule
from embodied_rl.roles.device_lease import plan_here, with_host_threads
from embodied_rl.roles.ray_calls import Actor, Outcome, Reference, outcome_of, value_of
from embodied_rl.roles.ray_cluster import RayCluster
from embodied_rl.roles.ray_ranks import RankWorker, RayRanks
from embodied_rl.roles.ray_roles import RayTeam, RayWorker, wait_for_start
from embodied_rl.roles.remote import RemoteCollector, RemoteWorker, WorkerHandle
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.types import SimSpec


class TrainWorker:
    """Actor with the learning half of a method."""

    policy: TrainedModule
    method: Method
    """Method; it and the policy exist only if they were built without an error."""

    def __init__(
        self,
        config: TrainConfig,
        models: Mapping[str, ModelFiles],
        specs: Sequence[dict[str, Any]],
        ranks: Sequence[Any] = (),
    ) -> None:
        """
        Args:
            models: {policy: files of a language policy}; empty without one.
            specs: simulator specs of all streams (`RemoteWorker.specs`).
            ranks: `RankWorker` actors of rank 1, 2, …
        """
        self._publisher, self._lends = RayPublisher(), config.hybrid.placement.kind == "multiplexed"

        def build() -> None:
            threads = config
            if config.hybrid.placement.kind == "multiplexed":
                threads = with_host_threads(config, plan_here(config))
            # Playing, and with it the rest of `hybrid`, is elsewhere.
            hybrid = HybridConfig(
                device=config.hybrid.device,
                placement=config.hybrid.placement,
                num_threads=threads.hybrid.num_threads,
                precision=config.hybrid.precision,
                sharding=config.hybrid.sharding,
            )
            # The warm start runs before training starts here: see `TrainedApart.restart`.
            own = dataclasses.replace(config, hybrid=hybrid, algorithm=dataclasses.replace(config.algorithm, warm_start=None))
            torch.manual_seed(config.seed)
            # The model's files are read inside the block, so a killed actor leaves nothing behind.
            with tempfile.TemporaryDirectory(prefix="embodied_rl_trained_") as folder:
                found = [SimSpec.from_dict(one) for one in specs]
                self.policy, self.method = _learner(own, found, models, Path(folder), RayRanks(ranks))

        self._built = outcome_of(build)

    def load(self, weights: dict[str, Tensor]) -> Outcome:
        """Load a policy's state: the initial one, or a checkpoint's."""
        if self._built[0] != "value":
            return self._built

        def take() -> None:
            self.policy.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
            if self._ranks is not None:
                self._ranks.take_weights()

        return outcome_of(take)

    def update(self, experience: Experience, iteration: int, steps: int) -> Outcome:
        """Run one iteration: prepare, update, observation statistics; return metrics."""

        def learn() -> dict[str, float]:
            self.policy.train()
            prepared = self.method.prepare(experience)
            stats = self.method.update(prepared, iteration=iteration, steps=steps)
            if experience.observation:
                self.policy.update_statistics(experience.observation)
            return stats

        return outcome_of(learn)

    def weights(self) -> Outcome:
        """Put the policy's state into the object store; return references for `ray_tensors`, valid until the next call."""

        def publish() -> list[Any]:
            if self._ranks is not None:
                self._ranks.write_back()
            references, _ = self._publisher.publish(self.policy.state_dict().items())
            if self._lends:
                torch.cuda.empty_cache()  # see `HybridEngine.publish`
            return references

        return outcome_of(publish)

    @property
    def _ranks(self) -> RankExecutor | None:
        """Executor that shards the policy over actors (`hybrid.sharding`); None: training is in this actor only."""
        return self.method.sharded

    def ask(self, what: str, *arguments: Any) -> Outcome:
        """Call the method's `what`, which returns or accepts its state."""
        return outcome_of(lambda: _OF_METHODS[what](self.method, *arguments))


_OF_METHODS: dict[str, Callable[..., object]] = {
    "restart": lambda method, iteration: method.restart(iteration),
    "state_tensors": lambda method: method.state_tensors(),
    "load_state_tensors": lambda method, state: method.load_state_tensors(state),
    "state_dict": lambda method: method.state_dict(),
    "load_state_dict": lambda method, state: method.load_state_dict(state),
}
"""Methods of the learning half that may be called by name."""


class TrainedApart(Method):
    """A method whose learning half is a `TrainWorker`. Also the engine's `TrainedCopy`.
    Raises RoleLost when the worker has ended: its weights are gone, and the run restarts from its last checkpoint."""

    def __init__(self, config: TrainConfig, method: Method, worker: RemoteWorker, cluster: RayCluster) -> None:
        self.inner, self._config = method, config
        assert worker.policy is not None, "take_policy comes first"
        self._policy = worker.policy
        num_ranks = 1 if config.hybrid.sharding is None else config.hybrid.sharding.num_ranks
        rank: Actor = ray.remote(RankWorker)
        self._ranks = [rank.options(**cluster.options("train", number)).remote() for number in range(1, num_ranks)]
        actor: Actor = ray.remote(TrainWorker).options(**cluster.options("train"))
        specs = [spec.to_dict() for spec in worker.specs]
        self._worker: Actor = actor.remote(config, worker.models, specs, self._ranks)
        try:
            first = self._worker.load.remote(_on_host(self._policy.state_dict()))
            ranks_s = 0.0 if config.hybrid.sharding is None else config.hybrid.sharding.start_timeout_s
            wait_for_start(cluster, first, config.hybrid.ray.start_timeout_s + ranks_s, "TrainWorker")
            value_of(first, "TrainWorker")
        except BaseException:
            self.close()
            raise

    @property
    def trained_copy(self) -> TrainedApart:
        return self

    @property
    def all_learners(self) -> Sequence[Learner]:
        """Learners of this process; they have nothing to do."""
        return self.inner.all_learners

    @property
    def finished(self) -> bool:
        return self.inner.finished

    @property
    def times(self) -> CollectorTimes:
        return self.inner.times

    def collect(self, iteration: int) -> Experience:
        return self.inner.collect(iteration)

    def prepare(self, experience: Experience) -> Experience:
        """Return the experience unchanged: the worker prepares it with the update."""
        return experience

    def update(self, prepared: Experience, *, iteration: int, steps: int) -> dict[str, float]:
        stats: dict[str, float] = self._ask(self._worker.update.remote(prepared, iteration, steps))
        return stats

    def write_back(self) -> None:
        """Copy the trained weights and statistics into the whole policy of this process."""
        references = self._ask(self._worker.weights.remote())
        self._policy.load_state_dict(dict(ray_tensors(references)))

    def take_weights(self) -> None:
        self._ask(self._worker.load.remote(_on_host(self._policy.state_dict())))

    def published(self, version: int) -> None:
        self.inner.published(version)

    def restart(self, iteration: int) -> None:
        if self.inner.wants_start:
            # A language agent's warm start runs here, where policy and rollout worker are available; the worker then loads the result.
            self.inner.begin_learning(iteration)
            self.take_weights()
        self._ask(self._worker.ask.remote("restart", iteration))
        self.inner.restart(iteration)

    def running_episodes(self) -> dict[str, Tensor]:
        return self.inner.running_episodes()

    def take_up(self, episodes: Mapping[str, Tensor]) -> None:
        """See `Method.take_up`; only this process continues episodes, the training worker has none."""
        self.inner.take_up(episodes)

    def finish(self) -> None:
        self.inner.finish()

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def state_tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._ask(self._worker.ask.remote("state_tensors"))
        return state

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert optimizer state that the ranks of a run without Ray wrote to the form of `state_tensors`."""
        return self.inner.of_ranks(state)

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Load the state; also sends the policy's current weights, which were loaded before."""
        self.take_weights()
        self._ask(self._worker.ask.remote("load_state_tensors", state))

    def state_dict(self) -> dict[str, Any]:
        """The worker's state, with this process's own part."""
        state: dict[str, Any] = self._ask(self._worker.ask.remote("state_dict"))
        return self.inner.with_trained(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ask(self._worker.ask.remote("load_state_dict", state))
        self.inner.load_state_dict(state)

    def close(self) -> None:
        """End the worker and the other ranks. May be called twice."""
        workers, self._worker, self._ranks = [self._worker, *self._ranks], None, []
        for worker in filter(None, workers):
            _end(worker)

    def _ask(self, reference: Reference) -> Any:
        # The answer must come: otherwise the checkpoint would lack the trained policy.
        return value_of(reference, "TrainWorker", can_give_up=False)


class RayRun(RemoteWorker):
    """Rollout workers and the training worker as actors; closing them ends the cluster."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises UserError as `RayCluster` does."""
        self._cluster = RayCluster(config.hybrid)
        super().__init__(config, self._start_actors, at_close=[self._cluster.close])

    def _start_actors(self, config: TrainConfig) -> WorkerHandle:
        if config.hybrid.players == 1:
            return RayWorker(config, self._cluster)
        return RayTeam(config, lambda own, share: RayWorker(own, self._cluster, share))

    def connect(self, method: Method) -> Method:
        """See `RemoteWorker.connect`: moves the method's learning half to an actor, unless the method keeps the steps that it learns from.
        Raises UserError when the actor cannot start."""
        if self.config.keeps_steps:
            return super().connect(method)
        trained = TrainedApart(self.config, method, self, self._cluster)
        self.at_close.append(trained.close)
        method.collector = RemoteCollector(self, trained.restart)
        return trained

    def ranks(self, hybrid: HybridConfig) -> RankHost | None:
        """See `RemoteWorker.ranks`; for a method that keeps its steps and sends minibatches to its ranks."""
        if not self.config.keeps_steps or hybrid.sharding is None:
            return None
        rank: Actor = ray.remote(RankWorker)
        actors = [rank.options(**self._cluster.options("train", number)).remote() for number in range(hybrid.sharding.num_ranks)]
        self.at_close += [functools.partial(_end, actor) for actor in actors]
        for actor in actors:
            wait_for_start(self._cluster, actor.address.remote(), hybrid.ray.start_timeout_s, "RankWorker")
        return RayRanks(actors, device="cuda" if hybrid.ray.gpus.train > 0 and hybrid.device != "cpu" else "cpu")


def _end(actor: Actor) -> None:
    with contextlib.suppress(Exception):  # ignore any failure of the cluster: this is the end of the run
        ray.kill(actor)


def _learner(
    config: TrainConfig, specs: Sequence[SimSpec], models: Mapping[str, ModelFiles], folder: Path, ranks: RankHost
) -> tuple[TrainedModule, Method]:
    """Build (policy with random weights, method). `specs`: of all streams; `models`: {policy: files of a language policy}."""
    languages = {}
    for name, files in models.items():
        write_model_files(files, folder / name)
        languages[name] = blank_policy(config.of_policy(name).language, folder / name)
    parts = build_run(config, streams_elsewhere(config, specs), Path(config.run_dir), languages=languages, ranks=ranks)
    return parts.policy, parts.method


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
