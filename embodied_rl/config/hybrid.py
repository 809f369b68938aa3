"""Where generation and training run, and how training is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.bounds import Processes, Retries, Rows, Seconds, Units
from embodied_rl.config.building import Config, require
from embodied_rl.config.placement import PlacementConfig


@dataclass(frozen=True)
class ShardingConfig(Config, place="hybrid.sharding"):
    """Training on a mesh of ranks with FSDP2; the ranks are num_replicas x num_shards x num_tensor_shards processes."""

    num_shards: Processes = 1
    """Ranks over which each parameter is cut (FSDP)."""
    num_replicas: Processes = 1
    """Copies of the sharded model, each of which trains other rows (HSDP); 1: none."""
    num_tensor_shards: Processes = 1
    """Ranks that compute each matrix product together (tensor parallelism); needs a model with a plan."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of parameters in forward and backward; the optimizer's parameters and the sums over ranks are float32 always."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after each block's forward and gather them again for its backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; on processors it has no effect, and a run says so."""
    checkpoint_activations: bool = False
    """Compute each block's activations again in the backward instead of keeping them."""
    micro_batch_size: Rows | None = None
    """Rows (of episodes: decisions) of one forward of one rank; gradients of a minibatch's parts are added up. null: its whole part."""
    start_timeout_s: Seconds = 180.0
    """A rank that is not there after so long is an error."""

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas * self.num_tensor_shards


@dataclass(frozen=True)
class RayCpusConfig(Config, place="hybrid.ray.cpus"):
    """Logical CPUs of each role's actor; the roles together fit a machine of two cores."""

    env: Units = 1.0
    """Simulators and what collects from them, of each rollout worker."""
    generation: Units = 0.25
    """The policy that acts, of each rollout worker."""
    reward: Units = 0.25
    """Of each reward worker."""
    train: Units = 0.5
    """The policy that is trained: of all its ranks together (sharding), which may be on different nodes."""


@dataclass(frozen=True)
class RayGpusConfig(Config, place="hybrid.ray.gpus"):
    """GPUs of each role's actor; parts of one may be shared (0.5)."""

    env: Units = 0.0
    """Of each rollout worker's simulators."""
    generation: Units = 0.0
    """Of each rollout worker's generator."""
    reward: Units = 0.0
    """Of each reward worker."""
    train: Units = 0.0
    """Of all ranks together: each needs a whole one, or as many as the others."""


@dataclass(frozen=True)
class RayConfig(Config, place="hybrid.ray"):
    """The roles of a run as actors of a Ray cluster."""

    address: str | None = None
    """Of a running cluster (``auto``, or ``host:port``); null: one is started on this machine, and ends with the run."""
    cpus: RayCpusConfig = field(default_factory=RayCpusConfig)
    gpus: RayGpusConfig = field(default_factory=RayGpusConfig)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement of the roles on the nodes, where hybrid.placement names no devices (collocated: STRICT_PACK always)."""
    start_timeout_s: Seconds = 180.0
    """Resources that others hold for so long, or actors that do not start, are an error."""


@dataclass(frozen=True)
class RewardWorkerConfig(Config, place="hybrid.reward_worker"):
    """Scores of whole episodes by a callable outside the simulator, while further episodes are played."""

    target: str
    """``package.module:name``, called with an `Episode`, returns a number; or, where `kwargs` are given, called with them once to make
    what is called with episodes. ``embodied_rl.rollout.judge:OpenAIJudge`` asks a language model over HTTP."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the target."""
    num_workers: Processes = 1
    """Episodes scored at a time: threads, or actors with hybrid.cluster=ray."""
    combine: Literal["add", "replace"] = "add"
    """add: the score is added to the last message's reward. replace: all other rewards become zero."""
    timeout_s: Seconds = 120.0
    """An episode that is not scored after so long counts as failed, and is begun again while retries last."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(":" in self.target, "hybrid.reward_worker.target", "of the form package.module:name", self.target)


@dataclass(frozen=True)
class HybridConfig(Config, place="hybrid"):
    """Where generation and training run."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """collocated: one process, in turns. disaggregated: another process plays (simulators, generation), and this one trains. Also the
    long forms that `python -m embodied_rl.plan` prints."""
    cluster: Literal["local", "ray"] = "local"
    """ray: simulators, generation, rewards and training are actors, on one machine or many (hybrid.ray)."""
    ray: RayConfig = field(default_factory=RayConfig)
    reward_worker: RewardWorkerConfig | None = None
    """Who scores whole episodes (methods on groups); null: only the simulator's rewards."""
    publish: Literal["full", "changed", "adapter"] = "full"
    """What of the weights goes to rollout workers elsewhere, after the first time. full: all of them. changed: what differs from
    what was sent before. adapter: of a language policy with LoRA, only the adapter, which is merged there."""
    players: Processes = 1
    """Who plays side by side, each a part of the slots and of the groups of a batch: processes with placement=disaggregated, or pairs of
    actors with cluster=ray."""
    max_restarts: Retries = 3
    """How often roles outside this process are begun anew in a run, when they end unexpectedly."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training and generation run; auto: a GPU where there is one."""
    num_threads: Processes | None = None
    """Threads of the learner on a CPU, of each rank with sharding; null: as many as there are cores, one with sharding."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products in training without sharding; weights, sums, probabilities and the optimizer's state are float32 always."""
    offload: tuple[Literal["parameters", "gradients", "optimizer", "kv_cache", "simulators"], ...] = ()
    """What leaves the device while the other side has its turn: the first three while actions are generated, the others while training.
    Only what is trained apart from the policy that generates has parameters to move (sharding)."""
    sharding: ShardingConfig | None = None
    """Train on a mesh of ranks; null: in this process."""

    @property
    def plays_apart(self) -> bool:
        """Whether episodes are played outside the process of the training loop."""
        return self.cluster == "ray" or self.placement.kind in ("disaggregated", "multiplexed")

    @property
    def rank_threads(self) -> int | None:
        """Threads of one rank's learner; None: as many as there are cores."""
        return self.num_threads if self.sharding is None else self.num_threads or 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(set(self.offload)) == len(self.offload), "hybrid.offload", "without repetition", self.offload)
        require(
            "parameters" not in self.offload or self.sharding is not None,
            "hybrid.sharding",
            "set where hybrid.offload names parameters: without it, the policy that generates is the one that is trained",
            self.sharding,
        )
        fits = self.sharding is None or self.precision == "float32"
        require(fits, "hybrid.precision", "float32 with hybrid.sharding, which has its own precision", self.precision)
        on_cpu = self.sharding is not None and self.sharding.cpu_offload and self.device == "cpu"
        require(not on_cpu, "hybrid.sharding.cpu_offload", "false with hybrid.device=cpu: everything lies there already", True)
