"""One rank of sharded training: a policy on the mesh with its optimizer, and the steps that all ranks take together.

Every method here is collective: each rank calls it, in the same order, with its own rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.config import AlgorithmConfig, ShardingConfig
from embodied_rl.hybrid import fsdp
from embodied_rl.hybrid.policy_updater import PolicyObjective, chosen_rows, parameter_groups
from embodied_rl.hybrid.rank_hosts import open_store
from embodied_rl.hybrid.sharded_checkpoint import SavingCheckpoint, load_sharded, save_sharded
from embodied_rl.hybrid.updater import BETAS, METRICS
from embodied_rl.policies.language import LanguagePolicy

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Step:
    """One optimizer step as a rank sees it."""

    parts: list[tuple[int, int]]
    """Half-open ranges of this rank's rows, one per micro-batch; as many on every rank."""
    counts: dict[str, float]
    """Of the whole minibatch, over all ranks (`PolicyObjective.counts`)."""


@dataclass(frozen=True)
class EpisodeStep:
    """One optimizer step on whole episodes as a rank sees it."""

    parts: list[tuple[int, int]]
    """As of `Step`, of this rank's episodes."""
    num_units: float
    """What the loss is divided by: the aggregation's count of the whole minibatch."""
    num_steps: float
    """Steps of the whole minibatch."""
    kl_coef: float
    learning_rate: float
    num_entries: float = 0.0
    """Probability ratios of the whole minibatch; 0: as many as steps."""


class Rank:
    """A policy's part on this rank."""

    def __init__(self, policy: Any, config: AlgorithmConfig, sharding: ShardingConfig, device: torch.device) -> None:
        """Cut `policy`, in place; all ranks give equal ones. Raises UserError as `fsdp.shard` does."""
        self.config, self.sharding, self.device = config, sharding, device
        self.mesh = fsdp.make_mesh(sharding, device.type)
        sharded: Any = fsdp.shard(policy.to(device), self.mesh, sharding)
        self.policy = sharded
        self.parameters = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        offloaded = sharding.cpu_offload and device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            parameter_groups(self.policy, config), lr=config.learning_rate, betas=BETAS, eps=config.adam_eps, fused=not offloaded
        )
        # Tokens of texts have an objective of their own (`TokenRank`).
        self.objective = None if isinstance(self.policy, LanguagePolicy) else PolicyObjective(self.policy, config, device)
        self.saving: SavingCheckpoint | None = None
        self._data_group = None if sharding.num_tensor_shards == 1 else self.mesh["replicate", "shard"]._flatten("data").get_group()

    # ---- training ---------------------------------------------------------------------------------------------------

    def epoch(self, rows: Batch, steps: Sequence[Step], learning_rate: float) -> np.ndarray:
        """Take the steps on this rank's rows [n]; rows that only fill up a micro-batch are masked.

        Returns:
            [M, len(METRICS) + 1] of the whole minibatches: the metrics and the loss. The steps end at the first that is not finite,
            which is not taken; its figures are the last row.
        """
        self.set_learning_rate(learning_rate)
        rows = rows.mapped(lambda tensor: tensor.to(self.device))
        figures = []
        for step in steps:
            figures.append(self._step(rows, step))
            if not np.isfinite(figures[-1]).all():
                break
        return np.stack(figures)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of the schedule; parts of the policy with a rate of their own keep its ratio to it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["scale"]

    def _step(self, rows: Batch, step: Step) -> np.ndarray:
        totals = torch.zeros(len(METRICS), dtype=torch.float64)

        def loss_of(start: int, stop: int) -> Tensor:
            nonlocal totals
            assert self.objective is not None
            part = without_fillers(chosen_rows(rows, torch.arange(start, stop, device=self.device)))
            loss, metrics = self.objective(self.policy, part, step.counts)
            named = {**metrics, "grad_norm": loss.detach()}
            totals = totals + torch.stack([named[name].double().cpu() for name in METRICS])
            return loss

        self.optimizer.zero_grad(set_to_none=True)
        fsdp.accumulate(self.policy, [lambda start=start, stop=stop: loss_of(start, stop) for start, stop in step.parts])  # type: ignore[misc]
        totals = self.summed(totals)
        norm = fsdp.clip_gradients(self.parameters.values(), self.config.max_grad_norm)
        place = METRICS.index("grad_norm")
        loss_value, totals[place] = float(totals[place]), norm
        figures = np.append(totals.numpy(), loss_value)
        if np.isfinite(figures).all():
            self.optimizer.step()
        return figures

    def summed(self, totals: Tensor) -> Tensor:
        """The sum over the ranks that train other rows."""
        on_device = totals.to(self.device)
        dist.all_reduce(on_device, group=self._data_group)
        return on_device.cpu()

    @torch.no_grad()
    def values(self, observation: Mapping[str, Tensor], chunk: int) -> Tensor:
        """[n] float32 values of this rank's observations, `chunk` of them at a time; n is the same on every rank."""
        num_rows = len(next(iter(observation.values())))
        parts = [
            self.policy.value({key: part[start : start + chunk].to(self.device) for key, part in observation.items()}).float().cpu()
            for start in range(0, num_rows, chunk)
        ]
        return torch.cat(parts) if parts else torch.zeros(0)

    # ---- state ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Take statistics that the training loop keeps (normalisation of observations)."""
        own = dict(self.policy.named_buffers())
        for name, value in buffers.items():
            own[name].copy_(value)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of what is trained, one at a time."""
        return fsdp.gather_named(self.policy, self.parameters.keys())

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole tensors; no rank talks to another."""
        fsdp.load_named(self.policy, tensors)

    @torch.no_grad()
    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's state as `AutogradUpdater.state_tensors` names it, whole, on the host."""
        fsdp.reshard(self.policy)
        state, step = {}, torch.zeros((), dtype=torch.int64)
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state.get(parameter)
            for key in _MOMENTS:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                state[f"{key}.{name}"] = fsdp.whole(entry[key]).cpu().clone() if entry else zeros
            if entry:  # parameters that the loss does not touch stay behind
                step = torch.maximum(step, _local(entry["step"]).detach().cpu().to(torch.int64))
        return {"step": step, **state}

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `optimizer_state` gave, on any number of ranks."""
        fsdp.reshard(self.policy)
        for name, parameter in self.parameters.items():
            moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            for key, moment in moments.items():
                fsdp.fill(moment, state[f"{key}.{name}"])
            self.optimizer.state[parameter] = {"step": state["step"].to(_local(parameter).device, torch.float32).clone(), **moments}

    def forget_moments(self) -> None:
        """Begin the optimizer anew; no rank talks to another."""
        self.optimizer.state.clear()

    def save_parts(self, folder: Path) -> SavingCheckpoint:
        """Begin to write this rank's part of the optimizer's state, when the one before is written."""
        if self.saving is not None:
            self.saving.finish()
        self.saving = save_sharded(folder, self._parts(), asynchronous=True)
        return self.saving

    @torch.no_grad()
    def load_parts(self, folder: Path) -> None:
        """Take up this rank's part of what any number of ranks wrote. Raises IncompatibleCheckpointError."""
        found = {name: torch.zeros_like(tensor) for name, tensor in self._parts().items()}
        load_sharded(folder, found)
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                "step": found["step"].to(_local(parameter).device, torch.float32),
                **{key: found[f"{key}.{name}"] for key in _MOMENTS},
            }

    def _parts(self) -> dict[str, Tensor]:
        """Named as `optimizer_state`, each tensor as it is cut."""
        fsdp.reshard(self.policy)
        parts: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.int64)}
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state.get(parameter)
            parts |= {f"{key}.{name}": entry[key] if entry else torch.zeros_like(parameter).detach() for key in _MOMENTS}
            if entry:
                parts["step"] = torch.maximum(parts["step"], _local(entry["step"]).detach().cpu().to(torch.int64))
        return parts


def without_fillers(batch: Batch) -> Batch:
    """Rows that `mask` leaves out, which only make all ranks compute equally often, count for nothing in any sum."""
    if batch.mask is None or bool(batch.mask.all()):
        return batch.replaced(mask=None)
    counted = batch.mask
    units = torch.ones(batch.log_prob.shape, dtype=torch.bool, device=counted.device) if batch.unit_mask is None else batch.unit_mask
    values = torch.ones(batch.returns.shape, dtype=torch.bool, device=counted.device) if batch.value_mask is None else batch.value_mask
    wide = counted if values.dim() == 1 else counted[:, None]
    return replace(batch, mask=None, unit_mask=units & counted[:, None], value_mask=values & wide)


def join(store: Path | str | Store, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """Make the process group of the ranks; gloo listens on the loopback interface unless the environment says otherwise.

    Args:
        store: where they meet (`rank_hosts.open_store`, or its address).
        timeout_s: for all to be there, and later for each exchange between them.

    Raises:
        RuntimeError: the others did not come in time.
    """
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store if isinstance(store, Store) else open_store(str(store), num_ranks, timeout_s),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
