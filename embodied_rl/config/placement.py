"""Which machines there are, which part of the work goes to which of them, and what the work takes: the planner's three inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from embodied_rl.bounds import Bounds, Coefficient, Devices, Gibibytes, Positive, Processes, Size, Slots, Staleness
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
    half. A run without Ray takes over as many as it has training ranks."""
    num_hosts: Annotated[int, Bounds(2, 65_536)] | None = None
    """Of kind multiplexed without GPUs: parts of the processor that generate, each by itself; null: two. With GPUs each is a host."""
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
        if isinstance(value, Mapping) and {"env", "generation", "train"} <= set(value):
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
