"""The ranks of `hybrid.sharding`: the part of the policy that this process trains, and the processes that it starts for the others.

```
 rank 0 (training loop, simulators, the whole policy that acts)        rank 1, 2, … (train workers)
 send(link, what to do, tensors) ── socket (JSON, safetensors) ──────▶ the same call
        │  forward, backward ◀════ FSDP2: gather parameters, sum gradients ════▶
 write_back(policy) ◀═════════════ gather, parameter by parameter ═══════════▶
 save_parts(folder) ── each rank writes its own file ────────────────▶
```
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.link import LinkClosed
from embodied_rl.hybrid.rank import Rank, join
from embodied_rl.hybrid.rank_hosts import RankLink, TrainWorkerError, make_host
from embodied_rl.hybrid.tensor_parallel import check_plan
from embodied_rl.policies.language import LanguagePolicy

_END_S = 10.0
_CLOSED_S = 60.0


class RankGroup:
    """Starts the ranks of `config.sharding`, all but the first as processes, and asks them for what they do together.

    The policy that is given stays whole: it acts, is saved and keeps the statistics. What is trained is a sharded copy; `write_back`
    brings its weights over.
    """

    def __init__(self, policy: Any, algorithm: AlgorithmConfig, config: HybridConfig, device: torch.device) -> None:
        """Start the ranks.

        Raises:
            UserError: there are fewer GPUs than ranks, the policy cannot be cut, or torch.distributed is in use already.
            TrainWorkerError: a rank did not start.
        """
        assert config.sharding is not None
        self.policy, self.algorithm, self.sharding = policy, algorithm, config.sharding
        self._is_apart = False
        if dist.is_initialized():
            raise UserError("torch.distributed is in use in this process already: hybrid.sharding makes its own process group.")
        self.host = make_host()
        if self.sharding.num_tensor_shards > 1:
            check_plan(policy, self.sharding.num_tensor_shards)
        self._finalizer = weakref.finalize(self, self.host.close)
        try:
            self.rank = self._start(config, torch.device("cuda", 0) if device.type == "cuda" else device)
        except BaseException:
            self.close()
            raise

    def _start(self, config: HybridConfig, device: torch.device) -> Rank:
        host, sharding = self.host, self.sharding
        host.start(sharding.num_ranks, device)
        common = {
            "timeout_s": sharding.start_timeout_s,
            "device": device.type,
            "num_threads": config.rank_threads or 1,
            "sharding": dataclasses.asdict(sharding),
            "algorithm": dataclasses.asdict(self.algorithm),
            **description_of(self.policy),
        }
        state = self.policy.state_dict()
        with self.blaming_workers():
            for index, link in enumerate(host.links, start=1):
                link.send({"do": "build", "rank": index, "device_index": host.device_index(index), **common}, state)
            for link in host.links:
                link.recv(sharding.start_timeout_s)  # what fails so far is known at once; all wait for each other from here on
            with host.meeting(sharding.num_ranks, sharding.start_timeout_s) as (where, store):
                host.tell({"do": "join", "store": where})
                join(store, 0, sharding.num_ranks, device, sharding.start_timeout_s)
                rank = Rank(copy.deepcopy(self.policy), self.algorithm, sharding, device)
                for link in host.links:
                    link.recv(sharding.start_timeout_s)
        return rank

    @property
    def num_parts(self) -> int:
        """Parts that a minibatch is divided into."""
        return self.sharding.num_shards * self.sharding.num_replicas

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this rank's part."""
        return self.rank.optimizer

    # ---- the trained weights ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self, policy: Any) -> None:
        """Bring the trained parameters into the whole policy, one at a time; frozen ones and statistics stay as they are."""
        self.tell({"do": "weights"})
        own = dict(policy.named_parameters())
        with self.blaming_workers():
            for name, tensor in self.rank.weights():
                if name in own:
                    own[name].copy_(tensor)

    def take_weights(self) -> None:
        """Let the ranks train on from the whole policy's present weights."""
        weights = self.policy.state_dict()
        self.tell({"do": "load_weights"}, weights)
        self.rank.load_weights(weights)

    def forget_moments(self) -> None:
        """Begin the optimizer anew."""
        self.tell({"do": "forget_moments"})
        self.rank.forget_moments()

    # ---- the optimizer's state --------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Updater.state_tensors`; whole tensors, so that a run goes on with any number of ranks. None inside `apart`."""
        if self._is_apart:
            return {}
        self.tell({"do": "optimizer_state"})
        with self.blaming_workers():
            return self.rank.optimizer_state()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `Updater.load_state_tensors`. The policy's present weights are taken too: they were loaded before."""
        self.take_weights()
        if not self._is_apart:
            self.tell({"do": "load_optimizer_state"}, state)
            self.rank.load_optimizer_state(state)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the optimizer's state is none of `state_tensors`: `save_parts` and `load_parts` see to it."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def save_parts(self, folder: Path) -> Callable[[], Path]:
        """Have each rank write its part of the optimizer's state, in the background; what is returned waits until the folder is whole.

        The waiting raises UserError where a part cannot be written.
        """
        self.tell({"do": "save_parts", "folder": str(folder)})
        with self.blaming_workers():
            saving = self.rank.save_parts(folder)
        return lambda: saving.wait()

    def load_parts(self, folder: Path) -> None:
        """Take up what any number of ranks wrote, each rank its own part. Raises IncompatibleCheckpointError."""
        self.tell({"do": "load_parts", "folder": str(folder)})
        with self.blaming_workers():
            self.rank.load_parts(folder)

    # ---- talking to the ranks ---------------------------------------------------------------------------------------

    def send_parts(self, what: str, part_of: Callable[[int], tuple[Any, dict[str, Tensor]]]) -> None:
        """Ask each other rank for one step on its part: `part_of` gives what a part's step is (a dataclass), and its tensors."""
        for index, link in enumerate(self.host.links, start=1):
            step, tensors = part_of(index // self.sharding.num_tensor_shards)
            self.send(link, {"do": what, "step": dataclasses.asdict(step)}, tensors)

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send the same to every other rank."""
        with self.blaming_workers():
            self.host.tell(message, tensors)

    def send(self, link: RankLink, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send to one rank. Raises TrainWorkerError when it ended."""
        with self.blaming_workers():
            link.send(message, tensors)

    def links(self) -> Iterator[tuple[int, RankLink]]:
        """(part of a minibatch, link) of every other rank."""
        return ((index // self.sharding.num_tensor_shards, link) for index, link in enumerate(self.host.links, start=1))

    @contextlib.contextmanager
    def blaming_workers(self) -> Iterator[None]:
        """A collective call that fails because another rank ended says which; that rank's own error stands above, on stderr."""
        try:
            yield
        except (RuntimeError, LinkClosed, TimeoutError) as error:
            # What closed the connection may be a process that still takes leave of its libraries, on a busy machine for a while.
            ended = self.host.ended(_CLOSED_S if isinstance(error, LinkClosed) else _END_S)
            if ended is None:
                raise
            raise ended from error

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        if self._finalizer.alive and dist.is_initialized():
            with contextlib.suppress(TrainWorkerError, ConnectionError):
                self.tell({"do": "leave"})
            dist.destroy_process_group()
        self._finalizer()


def description_of(policy: Any) -> dict[str, Any]:
    """What another process builds the policy from, JSON-able (see `train_worker.build_described`)."""
    if isinstance(policy, LanguagePolicy):
        return {"policy": dataclasses.asdict(policy.config), "layout": policy.layout}
    config = getattr(policy, "built_from", None) or policy.config
    return {"policy": dataclasses.asdict(config), "spec": policy.spec.to_dict()}
