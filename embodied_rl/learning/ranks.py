"""Steps on several ranks: this process trains one part of the policy and sends the others their work.

```
 rank 0 (training loop, simulators, the whole policy that acts)        rank 1, 2, … (train workers)
 RankExecutor.step ─ divides the minibatch ─ socket (JSON, safetensors) ▶ Rank.serve: the same objective on other rows
        │  forward, backward ◀════ FSDP2: gather parameters, sum gradients ════▶  forward, backward
        │  clip by the global norm, Adam on the own part                          the same
write_back() ◀═════════════ gather, parameter by parameter ═══════════▶
 save_parts(folder) ── each rank writes its own file ────────────────▶
```
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from embodied_rl.algorithms.batch import Rows
from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.distributed.channel import ChannelClosed
from embodied_rl.errors import UserError
from embodied_rl.learning import fsdp
from embodied_rl.learning.episode_objectives import EpisodeObjective, TokenCloning, TokenObjective
from embodied_rl.learning.executors import Executor, Figures, LocalExecutor, forward_rows, forwards
from embodied_rl.learning.objectives import Objective, RolloutObjective
from embodied_rl.learning.rank_hosts import LocalRanks, RankHost, RankLink, TrainWorkerError, open_store
from embodied_rl.learning.recorded import CloningObjective, CriticsObjective, ImitationObjective, SoftPolicyObjective, StateValueObjective
from embodied_rl.learning.sharded_checkpoint import SavingCheckpoint, load_sharded, save_sharded
from embodied_rl.policies.base import TrainedModule

_END_S = 10.0
_CLOSED_S = 60.0
_KINDS: tuple[type[Objective[Any, Any]], ...] = (
    *(RolloutObjective, EpisodeObjective, TokenObjective, TokenCloning),
    *(CloningObjective, CriticsObjective, StateValueObjective, ImitationObjective, SoftPolicyObjective),
)
OBJECTIVES: dict[str, type[Objective[Any, Any]]] = {kind.name: kind for kind in _KINDS}
"""{name: class} of the objectives that ranks compute."""


class Rank:
    """One rank: its part of a policy on the mesh, and its optimizer. Every method is collective: all ranks call it in the same order."""

    def __init__(self, policy: TrainedModule, config: AlgorithmConfig, sharding: ShardingConfig, device: torch.device) -> None:
        """Shard `policy` in place; all ranks pass equal ones. Raises UserError as `fsdp.shard` does."""
        self.mesh = fsdp.make_mesh(sharding, device.type)
        self.policy = fsdp.shard(policy.to(device), self.mesh, sharding)
        self.local = LocalExecutor(self.policy, config, device, "float32")  # the shards' own precision is that of `hybrid.sharding`
        self.saving: SavingCheckpoint | None = None
        self.lost: Callable[[], Exception | None] = lambda: None
        """See `save_sharded`."""
        self._data_group = None if sharding.num_tensor_shards == 1 else self.mesh["replicate", "shard"]._flatten("data").get_group()
        self._made: dict[str, Objective[Any, Any]] = {}

    def objective(self, name: str) -> Objective[Any, Any]:
        """The objective of that name, made alike on every rank."""
        if name not in self._made:
            self._made[name] = OBJECTIVES[name](self.policy, self.local.config)
        return self._made[name]

    def serve(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Execute a request of the `RankExecutor`; return its answer, or None. Of a result that all ranks have, only the rank with
        ``answers`` returns it: the first. Raises IncompatibleCheckpointError: a part cannot be loaded."""
        what, answers = message["do"], message.get("answers", False)
        if what == "step":  # on this rank's rows in these micro-batches (`Part`); figures are those of the whole minibatch
            made = self.objective(message["objective"])
            own, rate = made.rows.of_tensors(tensors).staged(self.local.device), message["learning_rate"]
            figures = self.local.take(made, own, message["micro"], message["numbers"], rate, self._summed)
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()} if answers else None
        if what == "values":
            return {"value": self._values(tensors)}
        if what == "weights":
            kept = {name: tensor.cpu().clone() for name, tensor in self.weights() if answers}  # all ranks gather them
            if message.get("frees"):
                torch.cuda.empty_cache()  # see `HybridEngine.publish`
            return kept if answers else None
        with torch.no_grad():
            fsdp.reshard(self.policy)
            if what == "optimizer_state":
                state = self.local.state_tensors()
                return state if answers else None
            self._change(what, message, tensors)
        return None

    @torch.no_grad()
    def _values(self, observation: Mapping[str, Tensor]) -> Tensor:
        """[n] or [n, K] float32 values of this rank's observations; n is the same on every rank."""
        parts = forwards(observation, forward_rows(self.policy, self.local.config))
        moved = ({key: tensor.to(self.local.device) for key, tensor in part.items()} for part in parts)
        return torch.cat([self.policy.value(part).float().cpu() for part in moved])

    def _change(self, what: str, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Execute a request that needs no answer."""
        if what == "buffers":  # statistics that the training loop keeps (normalisation of observations)
            own = dict(self.policy.named_buffers())
            for name, value in tensors.items():
                own[name].copy_(value)
        elif what == "load_weights":  # whole tensors, without communication between ranks
            fsdp.load_named(self.policy, tensors)
        elif what == "load_optimizer_state":  # as `optimizer_state` returned it, on any number of ranks
            self.local.load_state_tensors(dict(tensors))
        elif what == "forget":
            self.local.forget()
        elif what == "save_parts":  # after the previous part is written; rank 0 reports what went wrong
            self._finish_saving()
            self.saving = save_sharded(message["folder"], self._optimizer_parts(), asynchronous=True, lost=self.lost)
        elif what == "load_parts":  # written by any number of ranks
            self.local.forget()
            found = self._optimizer_parts()
            load_sharded(message["folder"], found)
            for optimizer in self.local.optimizers.values():
                optimizer.take_parts(found)
        elif what == "leave":
            self._finish_saving()
            dist.destroy_process_group()
        else:
            raise ValueError(f"unknown request {what!r}")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the parameters that learning changes, one at a time."""
        return fsdp.gather_named(self.policy, self.policy.changing())

    def _optimizer_parts(self) -> dict[str, Tensor]:
        """This rank's part of the optimizers' state, see `Optimizer.parts`."""
        return {name: part for optimizer in self.local.optimizers.values() for name, part in optimizer.parts().items()}

    def _finish_saving(self) -> None:
        """Wait until this rank's part of the last checkpoint is written."""
        if self.saving is not None:
            self.saving.finish()

    def _summed(self, totals: Tensor) -> Tensor:
        """Sum over the ranks that train other rows."""
        on_device = totals.to(self.local.device)
        dist.all_reduce(on_device, group=self._data_group)
        return on_device.cpu()


class RankExecutor(Executor):
    """Takes each step on the ranks of `hybrid.sharding`: starts all but the first, and sends them their work. If the host also holds the
    first rank (`RankHost.first`), this process trains nothing itself.

    The given policy stays whole: it acts, is saved and keeps the statistics. Training changes a sharded copy; `write_back`
    copies its weights to the policy.
    """

    def __init__(
        self, policy: TrainedModule, algorithm: AlgorithmConfig, config: HybridConfig, device: torch.device, host: RankHost | None = None
    ) -> None:
        """Start the ranks on `host`; None: as processes of this machine.

        Raises:
            UserError: there are fewer GPUs than ranks, the policy cannot be sharded, torch.distributed is already in use, or a rank did not
                start in time.
            TrainWorkerError: a rank has ended.
        """
        assert config.sharding is not None
        super().__init__(policy, algorithm, device)
        self.sharding, self._lends = config.sharding, config.placement.kind == "multiplexed"
        self._objective: Objective[Any, Any] | None = None
        self._rows: Rows | None = None
        self._is_apart = False
        if dist.is_initialized():
            raise UserError("torch.distributed is already in use in this process, but hybrid.sharding needs its own process group.")
        self.host = LocalRanks() if host is None else host
        if self.sharding.num_tensor_shards > 1:
            fsdp.check_plan(policy, self.sharding.num_tensor_shards)
        self._finalizer = weakref.finalize(self, self.host.close)
        self.rank: Rank | None = None
        """The first rank, if it is in this process."""
        try:
            self._start(config, torch.device("cuda", self.host.device_index(0)) if device.type == "cuda" else device)
        except BaseException:
            self.close()
            raise

    @property
    def writes_parts(self) -> bool:
        """Whether each rank writes its part of a checkpoint (`save_parts`); if no rank is in this process, it writes the whole state."""
        return self.rank is not None

    def _start(self, config: HybridConfig, device: torch.device) -> None:
        host, sharding = self.host, self.sharding
        host.start(sharding.num_ranks, device)
        common = {
            "timeout_s": sharding.start_timeout_s,
            "device": host.device_type(device),
            "num_threads": config.rank_threads or 1,
            "sharding": dataclasses.asdict(sharding),
            "algorithm": dataclasses.asdict(self.config),
            **self.policy.describe(),
        }
        state = self.policy.state_dict()
        links = [*([] if host.first is None else [(0, host.first)]), *enumerate(host.links, start=1)]
        with self._blaming_workers():
            for index, link in links:
                link.send({"do": "build", "rank": index, "device_index": host.device_index(index), **common}, state)
            self._await_start(links)  # reports early failures at once; from here on all ranks wait for each other
            # Kept, because ranks read it later, and nothing else here refers to it if the first rank is elsewhere.
            where, self._store = host.meeting(sharding.num_ranks, sharding.start_timeout_s)
            for _, link in links:
                link.send({"do": "join", "store": where})
            if host.first is None:
                join(self._store, 0, sharding.num_ranks, device, sharding.start_timeout_s)
                self.rank = Rank(copy.deepcopy(self.policy), self.config, sharding, device)
                self.rank.lost = partial(host.ended, 0.0)
            self._await_start(links)

    def _await_start(self, links: Sequence[tuple[int, RankLink]]) -> None:
        for index, link in links:
            try:
                link.recv(self.sharding.start_timeout_s)
            except TimeoutError:
                raise UserError(
                    f"hybrid.sharding: rank {index} of training did not start within {self.sharding.start_timeout_s:g} s: set a longer "
                    "hybrid.sharding.start_timeout_s."
                ) from None

    @property
    def num_parts(self) -> int:
        return self.sharding.num_shards * self.sharding.num_replicas

    # ---- steps ------------------------------------------------------------------------------------------------------

    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        self._send_buffers()
        self._objective, self._rows = objective, rows

    def step(self, chosen: np.ndarray | None, learning_rate: float, *, kl_coef: float = 0.0) -> Figures:
        """See `Executor.step`: sends each rank its rows of the minibatch, and the counts of the whole minibatch."""
        objective, rows = self._objective, self._rows
        assert objective is not None, "begin comes first"
        assert rows is not None, "begin comes first"
        minibatch, numbers = objective.begin(rows if chosen is None else rows.chosen(torch.from_numpy(chosen)), kl_coef=kl_coef)
        parts = objective.divide(self.policy, minibatch, self.num_parts, self.sharding.micro_batch_size or self.config.micro_batch_size)
        own = [minibatch.chosen(torch.from_numpy(part.rows)) if len(part.rows) else minibatch.filler() for part in parts]
        message = {"do": "step", "objective": objective.name, "numbers": numbers, "learning_rate": learning_rate}
        with self._blaming_workers():
            for index, link in self._links():
                link.send({**message, "micro": parts[index].micro}, own[index].tensors())
            figures = self._ask_first({**message, "micro": parts[0].micro}, own[0].tensors())
            return {name: float(value) for name, value in figures.items()}

    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        """See `Executor.values`: each rank computes equally many rows."""
        self._send_buffers()
        num_rows = len(next(iter(ready.values())))
        if num_rows == 0:
            return np.zeros(0, np.float32)
        size = -(-num_rows // self.num_parts)

        def part(index: int) -> dict[str, Tensor]:
            rows = torch.arange(index * size, (index + 1) * size).clamp(max=num_rows - 1)  # padded with the last row
            return {key: tensor.index_select(0, rows) for key, tensor in ready.items()}

        with self._blaming_workers():
            for index, link in self._links():
                link.send({"do": "values"}, part(index))
            found = [self._ask_first({"do": "values"}, part(0))["value"]]
            answers = [link.recv()[1]["value"] for _, link in self._links()]
            shards = self.sharding.num_tensor_shards
            found += answers[shards - 1 :: shards]
        return torch.cat(found)[:num_rows].numpy()

    def trained(self) -> list[Tensor]:
        return [] if self.rank is None else self.rank.local.trained()

    def optimizer_tensors(self) -> list[Tensor] | None:
        return None if self.rank is None else self.rank.local.optimizer_tensors()

    # ---- the trained weights ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self) -> None:
        """See `Executor.write_back`: one parameter at a time; frozen parameters and statistics stay unchanged."""
        message, own = {"do": "weights", "frees": self._lends}, dict(self.policy.named_parameters())
        self._tell(message)
        with self._blaming_workers():
            for name, tensor in self._ask_first(message).items() if self.rank is None else self.rank.weights():
                own[name].copy_(tensor)

    def take_weights(self) -> None:
        self._all("load_weights", self.policy.state_dict())

    def forget(self) -> None:
        self._all("forget")

    # ---- the optimizer's state --------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Executor.state_tensors`; whole tensors, so that a run can continue on any number of ranks. Empty inside `apart`."""
        if self._is_apart:
            return {}
        self._tell({"do": "optimizer_state"})
        with self._blaming_workers():
            return self._ask_first({"do": "optimizer_state"})

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `Executor.load_state_tensors`. Also takes the policy's present weights, which were loaded before."""
        self.take_weights()
        if not self._is_apart:
            self._all("load_optimizer_state", state)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, `state_tensors` leaves the optimizer's state to `save_parts` and `load_parts`."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def save_parts(self, folder: Path) -> Callable[[], Path]:
        """Start writing each rank's part of the optimizer's state; the returned function waits until the folder is whole.

        That wait raises UserError if a part cannot be written, and TrainWorkerError if a rank ends before it has written its part.
        """
        self._all("save_parts", folder=str(folder))
        assert self.rank is not None, "the first rank is elsewhere"
        assert self.rank.saving is not None, "it has just begun"
        return self.rank.saving.wait

    def load_parts(self, folder: Path) -> None:
        """Load on each rank its own part of a state that any number of ranks wrote. Raises IncompatibleCheckpointError."""
        self._all("load_parts", folder=str(folder))

    # ---- messages to the ranks ---------------------------------------------------------------------------------------

    def _send_buffers(self) -> None:
        """Send the ranks the statistics that the training loop keeps, before they compute on new rows."""
        buffers = dict(self.policy.named_buffers())
        if buffers:
            self._all("buffers", buffers)

    def _all(self, what: str, tensors: Mapping[str, Tensor] | None = None, **arguments: object) -> None:
        """Have every rank execute a request that needs no answer."""
        message = {"do": what, **arguments}
        self._tell(message, tensors)
        with self._blaming_workers():
            if self.rank is not None:
                self.rank.serve(message, tensors or {})
            elif self.host.first is not None:
                self.host.first.send(message, tensors)

    def _ask_first(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Have the first rank execute a request, wherever it is; return its answer."""
        if self.rank is not None:
            return self.rank.serve({**message, "answers": True}, tensors or {}) or {}
        assert self.host.first is not None, "it is there or here"
        self.host.first.send({**message, "answers": True}, tensors)
        return self.host.first.recv()[1]

    def _tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send the same message to every other rank."""
        with self._blaming_workers():
            self.host.tell(message, tensors)

    def _links(self) -> Iterator[tuple[int, RankLink]]:
        """(index of the part of a minibatch, link) of every other rank."""
        return ((index // self.sharding.num_tensor_shards, link) for index, link in enumerate(self.host.links, start=1))

    @contextlib.contextmanager
    def _blaming_workers(self) -> Iterator[None]:
        """Say which rank ended if a collective call fails because of it; that rank's own error is above, on stderr."""
        try:
            yield
        except (RuntimeError, ChannelClosed, TimeoutError) as error:
            # The process behind a closed connection may still be shutting down its libraries, which takes a while on a busy machine.
            ended = self.host.ended(_CLOSED_S if isinstance(error, ChannelClosed) else _END_S)
            if ended is None:
                raise
            raise ended from error

    def close(self) -> None:
        if self._finalizer.alive and dist.is_initialized():
            with contextlib.suppress(TrainWorkerError, ConnectionError):
                self._tell({"do": "leave"})
            dist.destroy_process_group()
        self._finalizer()


def join(store: str | Store, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """Make the process group of the ranks; gloo listens on the loopback interface unless the environment says otherwise.

    Args:
        store: store where the ranks meet (`rank_hosts.open_store`), or its address.
        timeout_s: longest wait for all ranks, and later for each exchange between them.
    Raises RuntimeError: the other ranks did not join in time.
    """
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    uncaught = sys.excepthook
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store if isinstance(store, Store) else open_store(store, num_ranks, timeout_s),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    if rank == 0:
        sys.excepthook = uncaught  # torch's prints "[rank0]:" before every line, also for the caller when the ranks are gone
