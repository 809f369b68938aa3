"""PPO's inner loop on several ranks, behind the same door as the one of a single process.

```
 rank 0 (training loop, simulators)                      rank 1, 2, … (train workers)
 begin(batch) ── whitens, keeps the batch
 epoch(minibatches) ── rows of each rank ── socket ────▶ rows
        │  forward, backward ◀════ FSDP2: gather parameters, sum gradients ════▶  forward, backward
        │  clip by the global norm, Adam on the own part                          the same
 write_back(policy) ◀═════════════ gather, parameter by parameter ═══════════▶
```
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

import embodied_rl
from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.batch import Batch
from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.learner import resolve_device
from embodied_rl.hybrid.link import Link, LinkClosed
from embodied_rl.hybrid.rank import Rank, Step, join, rendezvous_file
from embodied_rl.hybrid.train_worker import pack
from embodied_rl.hybrid.updater import METRICS, VALUE_ROWS, Minibatches, raise_if_not_finite, select_rows
from embodied_rl.policies.actor_critic import ActorCritic

_END_S = 10.0


class TrainWorkerError(RuntimeError):
    """Another rank of the training ended."""


class ShardedUpdater:
    """Implements `Updater` over the ranks of `config.sharding`, of which it starts all but the first as processes.

    The policy that is given stays whole: it acts, is saved and keeps the statistics. What is trained is a sharded copy; `write_back`
    brings its weights over.
    """

    def __init__(self, policy: ActorCritic, algorithm: AlgorithmConfig, config: HybridConfig, device: torch.device) -> None:
        """Start the ranks.

        Raises:
            UserError: there are fewer GPUs than ranks, the policy cannot be cut, or torch.distributed is in use already.
            TrainWorkerError: a rank did not start.
        """
        assert config.sharding is not None
        self.policy, self.algorithm, self.sharding = policy, algorithm, config.sharding
        self._batch: Batch | None = None
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        _check(policy, algorithm, self.sharding.num_ranks, device)
        self._finalizer = weakref.finalize(self, _end, self._links, self._processes)
        try:
            self.rank = self._start(config, torch.device("cuda", 0) if device.type == "cuda" else device)
        except BaseException:
            self.close()
            raise

    def _start(self, config: HybridConfig, device: torch.device) -> Rank:
        sharding = self.sharding
        with rendezvous_file() as store:
            for index in range(1, sharding.num_ranks):
                ours, theirs = socket.socketpair()
                command = [sys.executable, "-m", "embodied_rl.hybrid.train_worker", str(theirs.fileno())]
                # A group of its own: Ctrl-C is rank 0's alone, and the others end with it.
                self._processes.append(
                    subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=_environment(), process_group=0)
                )
                theirs.close()
                self._links.append(Link(ours))
                setup = {
                    "rank": index,
                    "store": str(store),
                    "timeout_s": sharding.start_timeout_s,
                    "device": device.type,
                    "num_threads": config.rank_threads or 1,
                    "sharding": dataclasses.asdict(sharding),
                    "algorithm": dataclasses.asdict(self.algorithm),
                    "policy": dataclasses.asdict(self.policy.config),
                    "spec": self.policy.spec.to_dict(),
                }
                self._links[-1].send(setup, self.policy.state_dict())
            with self.blaming_workers():
                for link in self._links:
                    link.recv(sharding.start_timeout_s)
                join(store, 0, sharding.num_ranks, device, sharding.start_timeout_s)
                rank = Rank(copy.deepcopy(self.policy), self.algorithm, sharding, device)
                for link in self._links:
                    link.recv(sharding.start_timeout_s)
        return rank

    # ---- Updater ----------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """See `Updater.begin`."""
        self.send_buffers()
        self._batch = batch

    def epoch(self, minibatches: Minibatches, learning_rate: float) -> np.ndarray:
        """See `Updater.epoch`: each minibatch is divided over the ranks, and the loss by the rows of the whole one."""
        assert self._batch is not None, "begin comes first"
        batch = self._whitened(self._batch, minibatches)
        size = self.sharding.micro_batch_size or self.algorithm.micro_batch_size
        plans = [plan_rows(minibatches, index, self.num_parts, size) for index in range(self.num_parts)]
        tensor_shards = self.sharding.num_tensor_shards
        for index, link in enumerate(self._links, start=1):
            rows, mask, steps = plans[index // tensor_shards]
            part = dataclasses.replace(select_rows(batch, torch.from_numpy(rows)), mask=torch.from_numpy(mask))
            message = {"do": "epoch", "learning_rate": learning_rate, "steps": [[step.parts, step.denominator] for step in steps]}
            self._send(link, message, pack(part))
        rows, mask, steps = plans[0]
        with self.blaming_workers():
            own = dataclasses.replace(select_rows(batch, torch.from_numpy(rows)), mask=torch.from_numpy(mask))
            figures = self.rank.epoch(own, steps, learning_rate)
        start, stop = minibatches.bounds[len(figures) - 1]
        raise_if_not_finite(figures[-1, -1], figures[-1, METRICS.index("grad_norm")], minibatches.permutation[start:stop])
        return figures[:, :-1]

    def values(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """See `Updater.values`: each rank computes as many rows."""
        self.send_buffers()
        num_rows = len(next(iter(observation.values())))
        size = max(-(-num_rows // self.num_parts), 1)
        tensors = {key: torch.from_numpy(part) for key, part in observation.items()}
        if num_rows == 0:
            return np.zeros(0, np.float32)

        def part(index: int) -> dict[str, Tensor]:
            rows = torch.arange(index * size, (index + 1) * size).clamp(max=num_rows - 1)  # filled up with the last row
            return {key: tensor.index_select(0, rows) for key, tensor in tensors.items()}

        tensor_shards = self.sharding.num_tensor_shards
        for index, link in enumerate(self._links, start=1):
            self._send(link, {"do": "values", "chunk": VALUE_ROWS}, part(index // tensor_shards))
        with self.blaming_workers():
            found = [self.rank.values(part(0), VALUE_ROWS)]
            answers = [link.recv()[1]["value"] for link in self._links]
            found += answers[tensor_shards - 1 :: tensor_shards]
        return torch.cat(found)[:num_rows].numpy()

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Updater.state_tensors`; whole tensors, so that a run goes on with any number of ranks."""
        self._tell({"do": "optimizer_state"})
        with self.blaming_workers():
            return self.rank.optimizer_state()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `Updater.load_state_tensors`. The policy's present weights are taken too: they were loaded before."""
        weights = self.policy.state_dict()
        self._tell({"do": "load_weights"}, weights)
        self.rank.load_weights(weights)
        self._tell({"do": "load_optimizer_state"}, state)
        self.rank.load_optimizer_state(state)

    # ---- the trained weights ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self, policy: ActorCritic) -> None:
        """Bring the trained parameters into the whole policy, one at a time; its statistics stay as they are."""
        self._tell({"do": "weights"})
        own = dict(policy.named_parameters())
        with self.blaming_workers():
            for name, tensor in self.rank.weights():
                if name in own:
                    own[name].copy_(tensor)

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        if self._finalizer.alive and dist.is_initialized():
            with contextlib.suppress(TrainWorkerError, LinkClosed):
                self._tell({"do": "leave"})
            dist.destroy_process_group()
        self._finalizer()

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Parts that a minibatch is divided into."""
        return self.sharding.num_shards * self.sharding.num_replicas

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this rank's part."""
        return self.rank.optimizer

    def send_parts(self, what: str, part_of: Callable[[int], tuple[Any, dict[str, Tensor]]]) -> None:
        """Ask each other rank for one step on its part: `part_of` gives what a part's step is (a dataclass), and its tensors."""
        for index, link in enumerate(self._links, start=1):
            step, tensors = part_of(index // self.sharding.num_tensor_shards)
            self._send(link, {"do": what, "step": dataclasses.asdict(step)}, tensors)

    def _whitened(self, batch: Batch, minibatches: Minibatches) -> Batch:
        """Advantages whitened by minibatch, where the algorithm says so: a rank does not know the others' mean."""
        if self.algorithm.normalize_advantage != "minibatch":
            return batch
        advantage = batch.advantage.clone()
        for start, stop in minibatches.bounds:
            rows = torch.from_numpy(minibatches.permutation[start:stop])
            advantage[rows] = torch.from_numpy(whiten(advantage[rows].numpy()))
        return dataclasses.replace(batch, advantage=advantage)

    def send_buffers(self) -> None:
        """Give the ranks the statistics that the training loop keeps; before anything is computed on new rows."""
        buffers = dict(self.policy.named_buffers())
        if buffers:
            self._tell({"do": "buffers"}, buffers)
            self.rank.set_buffers(buffers)

    def _tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        for link in self._links:
            self._send(link, message, tensors)

    def _send(self, link: Link, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        with self.blaming_workers():
            link.send(message, tensors)

    @contextlib.contextmanager
    def blaming_workers(self) -> Any:
        """A collective call that fails because another rank ended says which; that rank's own error stands above, on stderr."""
        try:
            yield
        except (RuntimeError, LinkClosed, TimeoutError) as error:
            ended = _first_ended(self._processes)
            if ended is None:
                raise
            status = self._processes[ended].returncode
            raise TrainWorkerError(f"Train worker of rank {ended + 1} ended with status {status}.") from error


def make_sharded_updater(policy: Any, algorithm: AlgorithmConfig, config: HybridConfig) -> ShardedUpdater:
    """The updater of a configuration with `sharding`. Raises as `ShardedUpdater`."""
    return ShardedUpdater(policy, algorithm, config, resolve_device(config.device))


def plan_rows(
    minibatches: Minibatches, index: int, num_parts: int, micro_batch_size: int | None
) -> tuple[np.ndarray, np.ndarray, list[Step]]:
    """What part `index` of `num_parts` trains on in one epoch: rows [n] of the batch, whether they count [n], and its steps.

    Each minibatch is divided evenly. All parts have equally many micro-batches, because their ranks gather parameters together; a part
    that has fewer rows repeats one that does not count.
    """
    rows, counts, steps = [], [], []
    first = 0
    for start, stop in minibatches.bounds:
        chosen = minibatches.permutation[start:stop]
        most = -(-len(chosen) // num_parts)
        size = micro_batch_size or most
        num_micro = -(-most // size)
        edges = np.linspace(0, len(chosen), num_parts + 1).astype(np.int64)
        own = chosen[edges[index] : edges[index + 1]]
        # Filled up to one row per micro-batch at least.
        filled = np.concatenate([own, np.repeat(chosen[:1], max(num_micro - len(own), 0))])
        cuts = np.linspace(0, len(filled), num_micro + 1).astype(np.int64)
        rows.append(filled)
        counts.append(np.arange(len(filled)) < len(own))
        steps.append(Step([(first + a, first + b) for a, b in itertools.pairwise(cuts.tolist())], float(len(chosen))))
        first += len(filled)
    return np.concatenate(rows), np.concatenate(counts), steps


def _check(policy: Any, algorithm: AlgorithmConfig, num_ranks: int, device: torch.device) -> None:
    if not isinstance(policy, ActorCritic):
        raise UserError(f"hybrid.sharding trains actor-critics (policy=mlp, policy=cnn), and policy is a {type(policy).__name__}.")
    for name in ("value_learning_rate", "head_learning_rate"):
        if getattr(algorithm, name, None) is not None:
            raise UserError(f"hybrid.sharding knows one learning rate: set algorithm.{name}=null, or hybrid=local.")
    if algorithm.warm_start is not None:
        raise UserError("hybrid.sharding: a warm start trains in one process alone. Set algorithm.warm_start=null, or hybrid=local.")
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise UserError(
            f"hybrid.sharding has {num_ranks} ranks, and this machine {torch.cuda.device_count()} GPUs: each rank needs one of its own. "
            "Choose smaller num_shards, or hybrid.device=cpu."
        )
    if dist.is_initialized():
        raise UserError("torch.distributed is in use in this process already: hybrid.sharding makes its own process group.")


def _first_ended(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Index of a process that ended; a connection closes a little before its process is gone."""
    deadline = time.monotonic() + _END_S
    while processes and time.monotonic() < deadline:
        for index, process in enumerate(processes):
            if process.poll() is not None:
                return index
        time.sleep(0.01)
    return None


def _environment() -> dict[str, str]:
    """This process's, with its import path: it may have been started from anywhere."""
    own = [str(Path(embodied_rl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(own)}


def _end(links: list[Link], processes: list[subprocess.Popen[bytes]]) -> None:
    for link in links:
        link.close()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
