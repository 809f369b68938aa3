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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError
from torch import Tensor

from embodied_rl.config import RewardWorkerConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.weight_sync import DeltaSource, NamedTensors, RayPublisher
from embodied_rl.roles.device_lease import plan_here
from embodied_rl.roles.ray_calls import GONE, Actor, Outcome, Reference, first_line, outcome_of, value_of
from embodied_rl.roles.ray_cluster import RayCluster
from embodied_rl.roles.ray_generation import GenerationWorker, RayActing
from embodied_rl.roles.worker import RolloutWorker, serve
from embodied_rl.roles.worker_team import WorkerTeam
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.rollout.scoring import ScoreLog, Scorer, checked_score, load_score
from embodied_rl.stopping import waiting
from embodied_rl.types import Episode

_END_S = 5.0
"""Time for an orderly shutdown of simulators; they may wait for a server that does not answer."""


class RewardWorker:
    """Scores episodes, one at a time."""

    def __init__(self, target: str, kwargs: Mapping[str, Any]) -> None:
        self._score = load_score(target, kwargs)

    def score(self, episode: Episode) -> float:
        """Score an episode. Raises ValueError for a score that is no finite number, and any exception of the function."""
        return checked_score(self._score, episode)


class RayScorer(Scorer):
    """Reward workers as actors. Ray restarts a lost one and repeats its calls."""

    def __init__(self, workers: list[Any], options: RewardWorkerConfig) -> None:
        self._workers = workers
        self._log = ScoreLog(options.combine, options.timeout_s)
        self._asked: dict[Any, int] = {}

    def submit(self, episode: Episode) -> int:
        number = self._log.begin(episode)
        self._asked[self._workers[number % len(self._workers)].score.remote(episode)] = number
        return number

    def ready(self) -> list[tuple[int, Episode | str]]:
        """See `Scorer.ready`. Raises RayActorError when workers ended too often."""
        references = list(self._asked)
        done = ray.wait(references, num_returns=len(references), timeout=0)[0] if references else []
        found: dict[int, float | str] = {}
        for reference in done:
            number = self._asked.pop(reference)
            try:
                found[number] = ray.get(reference)
            except RayTaskError as error:
                found[number] = first_line(error.cause if error.cause is not None else error)
        return self._log.settle(found)

    def wait(self, timeout_s: float) -> None:
        if self._asked:
            ray.wait(list(self._asked), num_returns=1, timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        return self._log.metrics()

    def close(self) -> None:
        """Do nothing: the driver ends the workers."""


class EnvWorker:
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
            with contextlib.suppress(EOFError):
                serve(worker, self)
            worker.close()
        while True:  # a daemon thread until the actor ends: late requests get an answer instead of waiting for ever
            _, _, answer = self._requests.get()
            answer.set_result((kind, worker) if kind != "value" else ("lost", "it was ended"))

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Callable[[Any, BaseException | None], None]] | None:
        """See `Inbox.take`."""
        try:
            what, arguments, answer = self._requests.get(block=wait)
        except queue.Empty:
            return None
        if what == "end":
            answer.set_result(("value", None))
            raise EOFError

        def reply(value: object, error: BaseException | None) -> None:
            answer.set_result(("value", value) if error is None else outcome_of(lambda: _raise(error)))

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

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """See `WorkerHandle.publish`; sends through the object store."""
        references, num_bytes = self.put(version, tensors)
        self.call("load", version=version, tensors=references)
        return num_bytes

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[list[Any], int]:
        """Put weights into the object store; return (references that `load` accepts until the next call, number of bytes)."""
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


class RayTeam(WorkerTeam):
    """Several rollout workers of a cluster, each an `EnvWorker` with a `GenerationWorker`, on any node."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """See `WorkerHandle.publish`; the weights are in the object store once, and all workers read them there."""
        references, num_bytes = self._workers[0].put(version, tensors)
        self._all(lambda worker: worker.call("load", version=version, tensors=references), self._workers)
        return int(num_bytes)


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


def _raise(error: BaseException) -> None:
    raise error
