"""Placement of generation and training, training over several processes, and the machines and costs that the planner reads."""

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
from embodied_rl.config.building import Checks, Config
from embodied_rl.errors import UserError
from embodied_rl.reading import parse_yaml, read_regular

PlacementKind = Literal["collocated", "disaggregated", "hybrid", "multiplexed", "explicit"]


@dataclass(frozen=True)
class NodesConfig(Config, place="nodes"):
    """Machines of one kind. Links are in 10^9 bytes per second and direction, memory in GiB."""

    count: Devices = 1
    cores: Devices = 8
    """Physical cores that simulators may use."""
    memory_gib: Positive = 32.0
    gpus: Annotated[int, Bounds(0, 65_536)] = 0
    """GPUs of each machine."""
    gpu_memory_gib: Positive = 80.0
    gpu_speed: Positive = 1.0
    """Speed of a GPU, in multiples of the device that the workload's times were measured on."""
    core_speed: Positive = 1.0
    """Speed of one core, in the same unit."""
    gpu_link_gb_s: Positive = 200.0
    """Link between two GPUs of a machine."""
    host_link_gb_s: Positive = 25.0
    """Link between a GPU and its machine's memory."""
    network_gb_s: Positive = 12.5
    """Link between two machines."""


@dataclass(frozen=True)
class ClusterConfig(Config, place="cluster"):
    """All machines, numbered in the order of the list."""

    nodes: tuple[NodesConfig, ...]
    name: str = "cluster"

    def checks(self) -> Checks:
        yield len(self.nodes) >= 1, "nodes", "a list of at least one entry", list(self.nodes)


@dataclass(frozen=True)
class PlacementConfig(Config, place="hybrid.placement"):
    """Which devices simulators, generation, rewards and training run on."""

    kind: PlacementKind = "collocated"
    """collocated: generation and training take turns on all GPUs. disaggregated: each always has its own GPUs. hybrid: simulators and
    generation have separate GPUs and work at the same time; then training takes all. multiplexed: all GPUs generate, and some leave for
    training once enough is collected. explicit: as in `roles`."""
    num_pipeline_stages: Processes = 1
    """Parts of the slots that take turns: one is simulated while the policy acts for another."""
    num_env_gpus: Devices | None = None
    """GPUs of simulators that run on GPUs (disaggregated, hybrid); null: the planner's best number, or a third."""
    num_train_gpus: Devices | None = None
    """GPUs that training always has (disaggregated) or takes over (multiplexed; without GPUs: generating hosts); null: a third, or half. A
    multiplexed run on GPUs takes over one per training rank."""
    num_hosts: Annotated[int, Bounds(2, 65_536)] | None = None
    """For kind multiplexed without GPUs: parts of the processor that generate, each separately; null: two. With GPUs each GPU is a host.
    With Ray: number of generating actors, on GPUs too; null: one more than are lent."""
    roles: dict[str, Any] = field(default_factory=dict)
    """For kind explicit: {env, generation, reward, train: devices such as ["0/gpu:0-3", "1/cpu", "*/gpu:*"]}; reward is optional."""

    def checks(self) -> Checks:
        yield bool(self.roles) == (self.kind == "explicit"), "roles", "given for kind=explicit, and only there", self.roles

    @classmethod
    def from_value(cls, value: object, where: str | None = None) -> Self:
        """Build from ``hybrid.placement``: the name of a kind, a mapping of fields, or a mapping of roles to devices. Raises UserError."""
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
    """Upper limit of the values; null: none."""

    def checks(self) -> Checks:
        yield self.most is None or self.most >= self.median, "most", f">= median ({self.median:g}) or null", self.most


@dataclass(frozen=True)
class BatchTimeConfig(Config):
    """Seconds of a batch of n rows: base_s + per_row_s · n. Memory-bound work has a large base."""

    base_s: Coefficient
    per_row_s: Coefficient = 0.0

    def checks(self) -> Checks:
        yield self.base_s + self.per_row_s > 0, "base_s + per_row_s", "> 0", 0.0

    def of(self, rows: float) -> float:
        """Seconds of `rows` rows."""
        return self.base_s + self.per_row_s * rows


@dataclass(frozen=True)
class WorkloadConfig(Config, place="workload"):
    """Costs of one iteration of a run, measured or known, on a device of speed 1. Sizes are in GiB."""

    num_slots: Slots
    """Number of environments in all."""
    act: BatchTimeConfig
    """Time of one decision of n slots on one copy of the policy."""
    train_per_decision_s: Coefficient
    """Time on one device, including all epochs."""
    name: str = "workload"
    rollout_steps: Annotated[int, Bounds(0, 1_000_000)] = 0
    """Decisions of each slot between two updates; 0: whole episodes are collected (episodes_per_iteration)."""
    episodes_per_iteration: Annotated[int, Bounds(0, 1_000_000_000)] = 0
    group_size: Size = 1
    """Episodes of a group, which is trained on once all have finished."""
    episode_decisions: SpreadConfig = field(default_factory=lambda: SpreadConfig(1.0))
    """Length of an episode, in decisions."""
    steps_per_decision: Size = 1
    """Environment steps of a chunk."""
    simulator: Literal["cpu", "gpu"] = "cpu"
    step: SpreadConfig = field(default_factory=lambda: SpreadConfig(1e-3))
    """Seconds of one decision of one environment on one core (of simulators that run on the CPU)."""
    step_batch: BatchTimeConfig | None = None
    """Seconds of one decision of n environments on one GPU (of simulators that run there)."""
    train_base_s: Coefficient = 0.0
    """Fixed time of an update, for any number of decisions."""
    updates_per_iteration: Size = 1
    """Optimizer steps; each adds up gradients over the training devices."""
    reward_per_decision_s: Coefficient = 0.0
    """Time on one device of the role reward."""
    switch_s: Coefficient = 0.0
    """Time of each change of a device between generation and training, beside the transfer of data."""
    weights_gib: Gibibytes = 0.01
    """Size of the published weights."""
    train_state_gib: Gibibytes = 0.04
    """Weights, gradients and optimizer of training together; divided among the training devices."""
    activations_gib: Gibibytes = 0.0
    """Activations of training, on each device."""
    cache_gib: Gibibytes = 0.0
    """Cache of generation, on each device."""
    gib_per_slot: Gibibytes = 0.0
    """Memory of one environment: on the host, or on the GPU that simulates it."""
    devices_per_copy: Devices = 1
    """GPUs that one copy of the policy occupies while it generates."""
    max_staleness: Staleness = 0
    """Versions that an episode may be behind if generation and training run at the same time."""

    def checks(self) -> Checks:
        steps, episodes = self.rollout_steps, self.episodes_per_iteration
        yield (steps > 0) != (episodes > 0), "", "given either rollout_steps or episodes_per_iteration", (steps, episodes)
        yield episodes % self.group_size == 0, "episodes_per_iteration", f"a multiple of group_size ({self.group_size})", episodes
        yield self.simulator == "cpu" or self.step_batch is not None, "step_batch", "given for simulator=gpu", None


def load_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping of a YAML file. Raises UserError if there is none."""
    try:
        data = parse_yaml(read_regular(path))
    except OSError as error:
        raise UserError(f"Cannot read {what} '{path}': {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{what} '{path}' is not YAML: {error}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{what} '{path}' must be a mapping of keys to values, got {type(data).__name__}.")
    return data


@dataclass(frozen=True)
class ShardingConfig(Config, place="hybrid.sharding"):
    """Training on a mesh of ranks with FSDP2; the ranks are num_replicas x num_shards x num_tensor_shards processes."""

    num_shards: Processes = 1
    """Ranks that each parameter is divided over (FSDP)."""
    num_replicas: Processes = 1
    """Copies of the sharded model, each of which trains on other rows (HSDP); 1: none."""
    num_tensor_shards: Processes = 1
    """Ranks that compute each matrix product together (tensor parallelism); needs a model with a plan."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters in forward and backward; the optimizer's parameters and sums over ranks are always float32."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after each block's forward and gather them again for its backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; without effect on processors, where the run says so."""
    checkpoint_activations: bool = False
    """Compute each block's activations again in the backward pass instead of keeping them."""
    micro_batch_size: Rows | None = None
    """Rows (for episodes: decisions) of one forward of one rank; gradients of a minibatch's parts are added up. null: its whole part."""
    start_timeout_s: Seconds = 180.0
    """Longest wait for a rank to start; then the run fails."""

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas * self.num_tensor_shards


@dataclass(frozen=True)
class RayCpusConfig(Config, place="hybrid.ray.cpus"):
    """Logical CPUs of each role's actor; all roles together fit a machine of two cores."""

    env: Units = 1.0
    """Simulators and the collector, of each rollout worker."""
    generation: Units = 0.25
    """The policy that acts, of each rollout worker."""
    reward: Units = 0.25
    """Each reward worker."""
    train: Units = 0.5
    """The policy that is trained: all its ranks together (sharding), which may be on different nodes."""


@dataclass(frozen=True)
class RayGpusConfig(Config, place="hybrid.ray.gpus"):
    """GPUs of each role's actor, which sees no others; roles may share one GPU (0.5)."""

    env: Units = 0.0
    """Simulators of each rollout worker."""
    generation: Units = 0.0
    """Generator of each rollout worker."""
    reward: Units = 0.0
    """Each reward worker."""
    train: Units = 0.0
    """All ranks together: each rank needs a whole GPU, or several."""


@dataclass(frozen=True)
class RayConfig(Config, place="hybrid.ray"):
    """The roles of a run as actors of a Ray cluster."""

    address: str | None = None
    """Address of a running cluster (``auto``, or ``host:port``); null: start one on this machine, which ends with the run."""
    cpus: RayCpusConfig = field(default_factory=RayCpusConfig)
    gpus: RayGpusConfig = field(default_factory=RayGpusConfig)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement of the roles on the nodes, unless hybrid.placement names devices (collocated: always STRICT_PACK)."""
    start_timeout_s: Seconds = 180.0
    """Longest wait for resources and for actors to start; then the run fails."""


@dataclass(frozen=True)
class RewardWorkerConfig(Config, place="hybrid.reward_worker"):
    """Scores of whole episodes by a callable outside the simulator, while other episodes are played."""

    target: str
    """``package.module:name`` that is called with an `Episode` and returns a number. With `kwargs` it is called with them once, and returns
    that callable. ``embodied_rl.rollout.judge:OpenAIJudge`` asks a language model over HTTP."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the target."""
    num_workers: Processes = 1
    """Episodes scored at the same time: threads, or actors with hybrid.cluster=ray."""
    combine: Literal["add", "replace"] = "add"
    """add: add the score to the last message's reward. replace: also set all other rewards to zero."""
    timeout_s: Seconds = 120.0
    """Longest scoring of an episode; then it counts as failed and starts again while retries last."""

    def checks(self) -> Checks:
        yield ":" in self.target, "target", "of the form package.module:name", self.target


@dataclass(frozen=True)
class HybridConfig(Config, place="hybrid"):
    """Processes and devices of generation and training."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """collocated: one process, in turns. disaggregated: another process plays (simulators, generation), and this one trains. Also takes the
    long forms that `python -m embodied_rl.plan` prints."""
    cluster: Literal["local", "ray"] = "local"
    """ray: simulators, generation, rewards and training are actors, on one machine or many (hybrid.ray)."""
    ray: RayConfig = field(default_factory=RayConfig)
    reward_worker: RewardWorkerConfig | None = None
    """Scores whole episodes (methods on groups); null: only the simulator's rewards."""
    publish: Literal["full", "changed", "adapter"] = "full"
    """Weights sent to rollout workers in other processes, after the first time. full: all. changed: those that differ from the last ones
    sent. adapter: for policies with LoRA, the trained ones: adapters, which the workers merge, and value heads."""
    players: Processes = 1
    """Rollout workers in parallel, each with a part of the slots and of the groups of a batch: processes with placement=disaggregated or
    roles on devices of their own, or pairs of actors with cluster=ray."""
    max_restarts: Retries = 3
    """Restarts in a run of roles outside this process, after unexpected ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training and generation; auto: a GPU if there is one, but a processor for an MLP of narrow layers."""
    num_threads: Processes | None = None
    """Threads of the learner on a CPU, or of each rank with sharding; null: one per core, or one with sharding. Each thread computes its
    own part of a minibatch of images."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products in training without sharding; weights, sums, probabilities and optimizer state are always float32."""
    offload: tuple[Literal["parameters", "gradients", "optimizer", "kv_cache", "simulators"], ...] = ()
    """State to move off the device while the other side has its turn: the first three while generating, the others while training. Only
    a trained copy apart from the generating policy (sharding) has parameters to move."""
    sharding: ShardingConfig | None = None
    """Train on a mesh of ranks; null: in this process."""

    @property
    def rank_threads(self) -> int | None:
        """Threads of one rank's learner; None: one per core."""
        return self.num_threads if self.sharding is None else self.num_threads or 1

    def checks(self) -> Checks:
        yield len(set(self.offload)) == len(self.offload), "offload", "without repetition", self.offload
        rule = "set where hybrid.offload names parameters: without it, the policy that generates is the one that is trained"
        yield "parameters" not in self.offload or self.sharding is not None, "sharding", rule, self.sharding
        fits = self.sharding is None or self.precision == "float32"
        yield fits, "precision", "float32 with hybrid.sharding, which has its own precision", self.precision
        on_cpu = self.sharding is not None and self.sharding.cpu_offload and self.device == "cpu"
        yield not on_cpu, "sharding.cpu_offload", "false with hybrid.device=cpu: everything lies there already", True
