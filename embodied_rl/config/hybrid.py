"""Where generation and training run, how training is spread over processes, and the machines and costs that the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from embodied_rl.bounds import (
    Bounds,
    Coefficient,
    Devices,
    Gibibytes,
    Positive,
    Processes,
    Retries,
    Rows,
    Seconds,
    Size,
    Slots,
    Staleness,
    Units,
)
from embodied_rl.config.building import Config, require
from embodied_rl.errors import UserError

PlacementKind = Literal["collocated", "disaggregated", "hybrid", "multiplexed", "explicit"]


@dataclass(frozen=True)
class NodesConfig(Config, place="nodes"):
    """Machines that are alike. Links are in 10^9 bytes per second and direction, memory in GiB."""

    count: Devices = 1
    cores: Devices = 8
    """Physical cores that simulators may use."""
    memory_gib: Positive = 32.0
    gpus: Annotated[int, Bounds(0, 65_536)] = 0
    """Of each machine."""
    gpu_memory_gib: Positive = 80.0
    gpu_speed: Positive = 1.0
    """In multiples of the device that the workload's times were measured on."""
    core_speed: Positive = 1.0
    """The same for one core."""
    gpu_link_gb_s: Positive = 200.0
    """Between two GPUs of a machine."""
    host_link_gb_s: Positive = 25.0
    """Between a GPU and its machine's memory."""
    network_gb_s: Positive = 12.5
    """Between two machines."""


@dataclass(frozen=True)
class ClusterConfig(Config, place="cluster"):
    """All machines, numbered in the order of the list."""

    nodes: tuple[NodesConfig, ...]
    name: str = "cluster"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.nodes) >= 1, "cluster.nodes", "a list of at least one entry", list(self.nodes))


@dataclass(frozen=True)
class PlacementConfig(Config, place="hybrid.placement"):
    """Which devices simulators, generation, rewards and training run on."""

    kind: PlacementKind = "collocated"
    """collocated: generation and training take turns on all GPUs. disaggregated: each has its own, all the time. hybrid: simulators and
    generation have their own GPUs and work at the same time, training then takes all. multiplexed: all GPUs generate, and some leave for
    training when enough was collected. explicit: as `roles` says."""
    num_pipeline_stages: Processes = 1
    """Parts of the slots that take turns: one is simulated while the policy acts for another."""
    num_env_gpus: Devices | None = None
    """Of simulators that run on GPUs (disaggregated, hybrid); null: what the planner finds best, or a third."""
    num_train_gpus: Devices | None = None
    """GPUs that training has for itself (disaggregated) or takes over (multiplexed; without GPUs, generating hosts); null: a third, or
    half. On GPUs a run takes over as many as it has training ranks."""
    num_hosts: Annotated[int, Bounds(2, 65_536)] | None = None
    """Of kind multiplexed without GPUs: parts of the processor that generate, each by itself; null: two. With GPUs each is a host. With Ray
    the actors that generate, on GPUs too; null: one more than are lent."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Of kind explicit: {env, generation, reward, train: devices such as ["0/gpu:0-3", "1/cpu", "*/gpu:*"]}; reward may be left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.roles) == (self.kind == "explicit"), "hybrid.placement.roles", "given for kind=explicit, and only there", self.roles
        )

    @classmethod
    def from_value(cls, value: object, where: str | None = None) -> Self:
        """From ``hybrid.placement``: the name of a kind, a mapping of fields, or a mapping of roles to devices. Raises UserError."""
        if isinstance(value, str):
            return super().from_value({"kind": value}, where)
        if isinstance(value, Mapping) and {"env", "generation", "train"} & set(value):
            extra = {"num_pipeline_stages"} & set(value)
            fields = {"kind": "explicit", "roles": {key: value[key] for key in value if key not in extra}}
            return super().from_value({**fields, **{key: value[key] for key in extra}}, where)
        return super().from_value(value, where)


@dataclass(frozen=True)
class SpreadConfig(Config):
    """A positive quantity that varies: lognormal, exp(N(log median, sigma))."""

    median: Positive
    sigma: Annotated[float, Bounds(0, 5)] = 0.0
    """0: always the median; 1: the slowest of a hundred is ten times the median."""
    most: Positive | None = None
    """Larger values are cut to this; null: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.most is None or self.most >= self.median, "most", f">= median ({self.median:g}) or null", self.most)


@dataclass(frozen=True)
class BatchTimeConfig(Config):
    """Seconds of a batch of n rows: base_s + per_row_s · n. What is bound by memory has a large base."""

    base_s: Coefficient
    per_row_s: Coefficient = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.base_s + self.per_row_s > 0, "base_s + per_row_s", "> 0", 0.0)

    def of(self, rows: float) -> float:
        """Seconds of `rows` rows."""
        return self.base_s + self.per_row_s * rows


@dataclass(frozen=True)
class WorkloadConfig(Config, place="workload"):
    """What one iteration of a run takes, measured or known, on a device of speed 1. Sizes are in GiB."""

    num_slots: Slots
    """Environments in all."""
    act: BatchTimeConfig
    """One decision of n slots on one copy of the policy."""
    train_per_decision_s: Coefficient
    """On one device, all epochs included."""
    name: str = "workload"
    rollout_steps: Annotated[int, Bounds(0, 1_000_000)] = 0
    """Decisions of each slot between two updates; 0: whole episodes are collected (episodes_per_iteration)."""
    episodes_per_iteration: Annotated[int, Bounds(0, 1_000_000_000)] = 0
    group_size: Size = 1
    """Episodes of a group, which is trained on when all are there."""
    episode_decisions: SpreadConfig = field(default_factory=lambda: SpreadConfig(1.0))
    """Length of an episode."""
    steps_per_decision: Size = 1
    """A chunk's environment steps."""
    simulator: Literal["cpu", "gpu"] = "cpu"
    step: SpreadConfig = field(default_factory=lambda: SpreadConfig(1e-3))
    """Seconds of one decision of one environment on one core (of simulators that run on the CPU)."""
    step_batch: BatchTimeConfig | None = None
    """Seconds of one decision of n environments on one GPU (of simulators that run there)."""
    train_base_s: Coefficient = 0.0
    """Of an update, whatever the number of decisions."""
    updates_per_iteration: Size = 1
    """Optimizer steps; each adds up gradients over the training devices."""
    reward_per_decision_s: Coefficient = 0.0
    """On one device of the role reward."""
    switch_s: Coefficient = 0.0
    """Each time a device changes from generation to training or back, beside what moving bytes takes."""
    weights_gib: Gibibytes = 0.01
    """What is published."""
    train_state_gib: Gibibytes = 0.04
    """Weights, gradients and optimizer of training together; spread over the training devices."""
    activations_gib: Gibibytes = 0.0
    """Of training, on each device."""
    cache_gib: Gibibytes = 0.0
    """Of generation, on each device."""
    gib_per_slot: Gibibytes = 0.0
    """Of one environment: host memory, or that of the GPU which simulates it."""
    devices_per_copy: Devices = 1
    """GPUs that one copy of the policy is spread over while it generates."""
    max_staleness: Staleness = 0
    """Versions that an episode may be behind where generation and training run at the same time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.rollout_steps > 0) + (self.episodes_per_iteration > 0)
        require(
            given == 1,
            "workload",
            "given either rollout_steps or episodes_per_iteration",
            (self.rollout_steps, self.episodes_per_iteration),
        )
        require(
            self.episodes_per_iteration % self.group_size == 0,
            "workload.episodes_per_iteration",
            f"a multiple of group_size ({self.group_size})",
            self.episodes_per_iteration,
        )
        require(self.simulator == "cpu" or self.step_batch is not None, "workload.step_batch", "given for simulator=gpu", None)


def load_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping of a YAML file. Raises UserError where there is none."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read {what} '{path}': {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} '{path}' is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{what} '{path}' must be a mapping of keys to values, got {type(data).__name__}.")
    return data


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
    what was sent before. adapter: of policies with LoRA, what is trained: adapters, which are merged there, and value heads."""
    players: Processes = 1
    """Who plays side by side, each a part of the slots and of the groups of a batch: processes with placement=disaggregated or roles on
    devices of their own, or pairs of actors with cluster=ray."""
    max_restarts: Retries = 3
    """How often roles outside this process are begun anew in a run, when they end unexpectedly."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training and generation run; auto: a GPU where there is one, and a processor for an MLP of narrow layers."""
    num_threads: Processes | None = None
    """Threads of the learner on a CPU, of each rank with sharding; null: as many as there are cores, one with sharding. Each of them
    computes its own part of a minibatch of images."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products in training without sharding; weights, sums, probabilities and the optimizer's state are float32 always."""
    offload: tuple[Literal["parameters", "gradients", "optimizer", "kv_cache", "simulators"], ...] = ()
    """What leaves the device while the other side has its turn: the first three while actions are generated, the others while training.
    Only what is trained apart from the policy that generates has parameters to move (sharding)."""
    sharding: ShardingConfig | None = None
    """Train on a mesh of ranks; null: in this process."""

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
