"""How many hosts generate in a multiplexed run, which of them are lent to training, and what each computes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster
from embodied_rl.learning.devices import resolve_device
from embodied_rl.sim.affinity import available_cores

_HOSTS_ON_A_PROCESSOR = 2


@dataclass(frozen=True)
class HostPlan:
    """Hosts are numbered; the first ones are lent, since training has the first GPUs."""

    num_hosts: int
    num_lent: int
    num_cores: int
    """Of this machine."""
    on_gpus: bool
    """Host i has GPU i."""

    @property
    def train_on(self) -> list[int]:
        """Numbers of the hosts that are lent."""
        return list(range(self.num_lent))

    @property
    def threads_per_host(self) -> int:
        return max(1, self.num_cores // self.num_hosts)

    @property
    def train_threads(self) -> int:
        """The lent hosts' share of the cores."""
        return max(1, self.num_cores * self.num_lent // self.num_hosts)

    def gpu(self, number: int, visible: str | None) -> str | None:
        """What host `number` is to see, as CUDA_VISIBLE_DEVICES names it (`visible`: what this process sees); None: there are no GPUs."""
        if not self.on_gpus:
            return None
        return str(number) if visible is None else visible.split(",")[number].strip()


def plan_hosts(config: TrainConfig, *, num_gpus: int, num_cores: int) -> HostPlan:
    """Raises UserError for what this machine cannot have, with the nearest that it can."""
    placement, sharding = config.hybrid.placement, config.hybrid.sharding
    ranks = 1 if sharding is None else sharding.num_ranks
    if num_gpus == 1:
        raise UserError("hybrid.placement=multiplexed needs at least 2 GPUs, and this machine has 1. The nearest possible: collocated.")
    if num_gpus and placement.num_hosts not in (None, num_gpus):
        raise UserError(
            f"hybrid.placement.num_hosts={placement.num_hosts}: each GPU is a host, and there are {num_gpus}. Leave it out, or "
            "set CUDA_VISIBLE_DEVICES."
        )
    hosts = num_gpus or placement.num_hosts or _HOSTS_ON_A_PROCESSOR
    lent = placement.num_train_gpus or (ranks if num_gpus else max(1, hosts // 2))
    if lent >= hosts:
        raise UserError(
            f"hybrid.placement=multiplexed lends {lent} of {hosts} hosts to training, and one must go on generating. The nearest possible: "
            f"num_train_gpus={hosts - 1}, or hybrid.placement=collocated."
        )
    if num_gpus and ranks != lent:
        raise UserError(
            f"hybrid.placement.num_train_gpus={lent}, and {ranks} ranks train (hybrid.sharding): set "
            f"num_train_gpus={ranks}, or have as many ranks."
        )
    return HostPlan(hosts, lent, num_cores, num_gpus > 0)


def plan_here(config: TrainConfig) -> HostPlan:
    """Of this machine. Raises UserError as `plan_hosts`."""
    return plan_hosts(config, num_gpus=len(this_machine(config).gpus), num_cores=available_cores())


def this_machine(config: TrainConfig) -> Cluster:
    """The devices that a run without Ray has."""
    gpus = 0
    if resolve_device(config.hybrid.device).type == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    return Cluster(ClusterConfig((NodesConfig(cores=available_cores(), gpus=gpus),), name="this machine"))


def hosted_sim(config: TrainConfig, sim: SimConfig) -> SimConfig:
    """Simulators as hosts need them: each worker belongs to one host. Unchanged where nothing is multiplexed."""
    if config.hybrid.placement.kind != "multiplexed" or config.policy.name == "language":
        return sim
    workers = max(sim.fixed_workers or available_cores(), plan_here(config).num_hosts)
    return dataclasses.replace(sim, num_workers=min(workers, sim.num_slots), pipeline_groups=1)


def with_host_threads(config: TrainConfig, plan: HostPlan) -> TrainConfig:
    """The configuration of the side that trains: on a processor it has the threads of the hosts that are lent to it."""
    if plan.on_gpus or config.hybrid.num_threads is not None:
        return config
    ranks = 1 if config.hybrid.sharding is None else config.hybrid.sharding.num_ranks
    return dataclasses.replace(config, hybrid=dataclasses.replace(config.hybrid, num_threads=max(1, plan.train_threads // ranks)))
