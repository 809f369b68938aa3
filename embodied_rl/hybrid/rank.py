"""One rank of sharded training: a policy on the mesh with its optimizer, and the steps that all ranks take together.

Every method here is collective: each rank calls it, in the same order, with its own rows.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import entropy_bonus, ppo_clip_loss, value_loss
from embodied_rl.config import AlgorithmConfig, ShardingConfig
from embodied_rl.hybrid import fsdp
from embodied_rl.hybrid.updater import BETAS, METRICS, select_rows
from embodied_rl.policies.actor_critic import ActorCritic

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Step:
    """One optimizer step as a rank sees it."""

    parts: list[tuple[int, int]]
    """Half-open ranges of this rank's rows, one per micro-batch; as many on every rank."""
    denominator: float
    """Rows of the whole minibatch, over all ranks."""


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


class Rank:
    """A policy's part on this rank."""

    def __init__(self, policy: ActorCritic, config: AlgorithmConfig, sharding: ShardingConfig, device: torch.device) -> None:
        """Cut `policy`, in place; all ranks give equal ones. Raises UserError as `fsdp.shard` does."""
        self.config, self.sharding, self.device = config, sharding, device
        self.mesh = fsdp.make_mesh(sharding, device.type)
        self.policy = fsdp.shard(policy.to(device), self.mesh, sharding)
        self.parameters = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(
            list(self.parameters.values()), lr=config.learning_rate, betas=BETAS, eps=config.adam_eps, fused=not sharding.cpu_offload
        )
        self._data_group = None if sharding.num_tensor_shards == 1 else self.mesh["replicate", "shard"]._flatten("data").get_group()

    # ---- training ---------------------------------------------------------------------------------------------------

    def epoch(self, rows: Batch, steps: Sequence[Step], learning_rate: float) -> np.ndarray:
        """Take the steps on this rank's rows [n]; rows that only fill up a micro-batch are masked.

        Returns:
            [M, len(METRICS) + 1] of the whole minibatches: the metrics and the loss. The steps end at the first that is not finite,
            which is not taken; its figures are the last row.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        rows = rows.mapped(lambda tensor: tensor.to(self.device))
        figures = []
        for step in steps:
            figures.append(self._step(rows, step))
            if not np.isfinite(figures[-1]).all():
                break
        return np.stack(figures)

    def _step(self, rows: Batch, step: Step) -> np.ndarray:
        totals = torch.zeros(len(METRICS), dtype=torch.float64)

        def loss_of(start: int, stop: int) -> Tensor:
            nonlocal totals
            index = torch.arange(start, stop, device=self.device)
            assert rows.mask is not None
            loss, metrics = masked_objective(self.policy, select_rows(rows, index), rows.mask[start:stop], self.config, step.denominator)
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
            self.policy.value({key: part[start : start + chunk].to(self.device) for key, part in observation.items()}).float().cpu()  # type: ignore[operator]
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
        """(name, whole tensor), one at a time."""
        return fsdp.gather_named(self.policy)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole tensors; no rank talks to another."""
        fsdp.load_named(self.policy, tensors)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's state as `AutogradUpdater.state_tensors` names it, whole, on the host."""
        fsdp.reshard(self.policy)
        state, step = {}, torch.zeros((), dtype=torch.int64)
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state.get(parameter)
            for key in _MOMENTS:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                state[f"{key}.{name}"] = fsdp.whole(entry[key]).cpu().clone() if entry else zeros
            if entry:
                step = _local(entry["step"]).detach().cpu().to(torch.int64)
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


def masked_objective(
    policy: nn.Module, batch: Batch, mask: Tensor, config: AlgorithmConfig, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of some rows of a minibatch, divided by the whole minibatch's `denominator`: parts add up, metrics too.

    Advantages come whitened, where the algorithm whitens them: a part does not know the others' mean.
    """
    evaluation = policy.evaluate(batch.observation, batch.action)  # type: ignore[operator]
    shared = {"mask": mask, "denominator": denominator}
    policy_part, metrics = ppo_clip_loss(
        log_prob=evaluation.log_prob.sum(-1),
        old_log_prob=batch.log_prob.sum(-1),
        advantage=batch.advantage,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        **shared,  # type: ignore[arg-type]
    )
    value_part, value_metrics = value_loss(
        value=evaluation.value,
        returns=batch.returns,
        old_value=batch.value,
        clip=config.value_clip,
        **shared,  # type: ignore[arg-type]
    )
    entropy_part, entropy_metrics = entropy_bonus(entropy=evaluation.entropy.sum(-1), **shared)  # type: ignore[arg-type]
    loss = policy_part + config.value_coef * value_part + config.entropy_coef * entropy_part
    return loss, {**metrics, **value_metrics, **entropy_metrics}


@contextlib.contextmanager
def rendezvous_file() -> Iterator[Path]:
    """A place where the ranks of one machine meet."""
    with tempfile.TemporaryDirectory(prefix="embodied_ranks_") as folder:
        yield Path(folder) / "store"


def join(store: Path | str, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """Make the process group of the ranks of this machine; gloo listens on the loopback interface unless the environment says otherwise.

    Raises:
        RuntimeError: the others did not come in time.
    """
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
