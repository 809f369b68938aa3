"""Hosts of a multiplexed run: their number and devices, and the lease that lends some of them to training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from embodied_rl.config import HybridConfig, SimConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.multiplex import Host, HostState, HostTimes, Multiplexer
from embodied_rl.roles.local_devices import this_machine, visible_gpu
from embodied_rl.sim.affinity import available_cores

_HOSTS_ON_A_PROCESSOR = 2


@dataclass(frozen=True)
class HostPlan:
    """Numbers and devices of the hosts. The first ones are lent, since training has the first GPUs."""

    num_hosts: int
    num_lent: int
    num_cores: int
    """Number of cores of this machine."""
    devices: tuple[str, ...] = ()
    """Device of each host; empty: all hosts share the CPU, where one copy of a robot's policy acts for them."""

    @property
    def train_on(self) -> list[int]:
        """Numbers of the lent hosts."""
        return list(range(self.num_lent))

    @property
    def threads_per_host(self) -> int:
        return max(1, self.num_cores // self.num_hosts)

    @property
    def train_threads(self) -> int:
        """Threads for training: the lent hosts' share of the cores."""
        return max(1, self.num_cores * self.num_lent // self.num_hosts)

    def gpu(self, number: int) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES for host `number`; None: there are no GPUs."""
        return visible_gpu(number) if self.devices else None


def plan_hosts(hybrid: HybridConfig, *, num_gpus: int, num_cores: int) -> HostPlan:
    """Plan the hosts. `num_gpus`: GPUs of this machine; 0 with Ray, where each host is an actor with the resources of `hybrid.ray`.
    Raises UserError for what this machine cannot provide, with the nearest possible setting."""
    placement, sharding = hybrid.placement, hybrid.sharding
    ranks = 1 if sharding is None else sharding.num_ranks
    on_ray = hybrid.cluster == "ray"
    on_gpus = num_gpus > 0 or (on_ray and hybrid.ray.gpus.generation > 0)
    if num_gpus == 1:
        raise UserError("hybrid.placement=multiplexed needs at least 2 GPUs, and this machine has 1. Nearest valid choice: collocated.")
    if num_gpus and placement.num_hosts not in (None, num_gpus):
        raise UserError(
            f"hybrid.placement.num_hosts={placement.num_hosts}: each GPU is one host, and this machine has {num_gpus}. Leave it out, or "
            "set CUDA_VISIBLE_DEVICES."
        )
    hosts = num_gpus or placement.num_hosts or max(_HOSTS_ON_A_PROCESSOR, ranks + 1 if on_gpus else 0)
    lent = placement.num_train_gpus or (ranks if on_gpus else max(1, hosts // 2))
    if lent >= hosts:
        nearest = f"num_hosts={lent + 1}" if on_ray else f"num_train_gpus={hosts - 1}, or hybrid.placement=collocated"
        raise UserError(
            f"hybrid.placement=multiplexed lends {lent} of {hosts} hosts to training, but at least one must keep generating. Nearest valid "
            f"choice: {nearest}."
        )
    if on_gpus and ranks != lent:
        raise UserError(
            f"hybrid.placement.num_train_gpus={lent}, and {ranks} ranks train (hybrid.sharding): set num_train_gpus={ranks}, or use "
            f"{lent} ranks."
        )
    return HostPlan(hosts, lent, num_cores, tuple(f"cuda:{number}" for number in range(num_gpus)))


def plan_here(config: TrainConfig) -> HostPlan:
    """Plan for this machine, or for a Ray cluster with this machine's cores. Raises UserError as `plan_hosts`."""
    gpus = 0 if config.hybrid.cluster == "ray" else len(this_machine(config).gpus)
    return plan_hosts(config.hybrid, num_gpus=gpus, num_cores=available_cores())


def hosted_sim(config: TrainConfig, sim: SimConfig) -> SimConfig:
    """Simulator configuration with workers that each belong to one host; unchanged in a run without multiplexing."""
    if config.hybrid.placement.kind != "multiplexed" or config.policy.name == "language":
        return sim
    workers = max(sim.fixed_workers or available_cores(), plan_here(config).num_hosts)
    return dataclasses.replace(sim, num_workers=min(workers, sim.num_slots), pipeline_groups=1)


def with_host_threads(config: TrainConfig, plan: HostPlan) -> TrainConfig:
    """Configuration of the training side: on a CPU, it has the threads of the hosts lent to it."""
    if plan.devices or config.hybrid.num_threads is not None:
        return config
    ranks = 1 if config.hybrid.sharding is None else config.hybrid.sharding.num_ranks
    return dataclasses.replace(config, hybrid=dataclasses.replace(config.hybrid, num_threads=max(1, plan.train_threads // ranks)))


class DeviceLease:
    """Lends hosts of a run to training. Each domain's simulators and each token backend have a multiplexer with a part of every host.

    ```
     a batch is full ── shrink ──▶ vacating ── vacated, lend ──▶ training elsewhere ── weights come, take_back ──▶ all generate
    ```
    """

    def __init__(self, plan: HostPlan, *, keep_spans: bool = False) -> None:
        """`keep_spans`: keep the hosts' states for a timeline."""
        self.plan = plan
        self.multiplexers: list[Multiplexer] = []
        self.times = HostTimes(plan.num_hosts, keep_spans=keep_spans)
        self.num_shrinks = 0
        self.is_lent = False
        """Whether training has the lent hosts."""
        self._on_lent: list[Callable[[Collection[int]], None]] = []
        self._on_back: list[Callable[[Collection[int]], None]] = []
        self._asked_at = 0.0
        self._vacate_s = 0.0

    def share(self, hosts: Sequence[Host]) -> Multiplexer:
        """Create the multiplexer of these parts of the hosts, in their order; it vacates them together with the others.
        Raises UserError as `Multiplexer` does."""
        self.multiplexers.append(Multiplexer(hosts, self.plan.train_on))
        return self.multiplexers[-1]

    def follow(self, on_lent: Callable[[Collection[int]], None], on_back: Callable[[Collection[int]], None]) -> None:
        """Call `on_lent` with the numbers of empty hosts that go to training, to free their memory, and `on_back` with those that are about
        to generate again."""
        self._on_lent.append(on_lent)
        self._on_back.append(on_back)

    def shrink(self) -> None:
        """Start to vacate the hosts for training; play on until they are `vacated`, then `lend` them."""
        self._asked_at = time.perf_counter()
        self.num_shrinks += 1
        for multiplexer in self.multiplexers:
            multiplexer.shrink()
        self.note()

    @property
    def vacated(self) -> bool:
        return all(multiplexer.vacated for multiplexer in self.multiplexers)

    def lend(self) -> None:
        """Hand the vacated hosts to training."""
        assert self.vacated, "episodes are being played there"
        self._vacate_s = time.perf_counter() - self._asked_at
        for lend in self._on_lent:
            lend(self.plan.train_on)
        self.is_lent = True
        self.note()

    def take_back(self) -> None:
        """Let all hosts generate again, if some did not."""
        if not self.is_lent and not any(multiplexer.shrunk for multiplexer in self.multiplexers):
            return
        for restore in self._on_back if self.is_lent else ():
            restore(self.plan.train_on)
        self.is_lent = False
        for multiplexer in self.multiplexers:
            multiplexer.expand()
        self.note()

    def note(self) -> None:
        """Record the hosts' states; call it after every change of which hosts play."""
        self.times.note([self._state(number) for number in range(self.plan.num_hosts)])

    def figures(self) -> dict[str, float]:
        """Counts since the worker's start, and times since the last call."""
        counts = [multiplexer.counts() for multiplexer in self.multiplexers]
        return {
            "multiplex/shrinks": float(self.num_shrinks),
            "multiplex/moved": float(sum(one.moves for one in counts)),
            "multiplex/parked": float(sum(one.parked for one in counts)),
            "multiplex/running": float(sum(one.running for one in counts)),
            "multiplex/vacate_s": self._vacate_s,
            **self.times.take(),
        }

    def _state(self, number: int) -> HostState:
        if self.is_lent and number in self.plan.train_on:
            return "training"
        return "generation" if any(multiplexer.hosts[number].running for multiplexer in self.multiplexers) else "idle"
