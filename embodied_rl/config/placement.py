"""Which machines there are, which part of the work goes to which of them, and what the work takes: the planner's three inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from embodied_rl.config.building import build, require
from embodied_rl.errors import UserError

PlacementKind = Literal["collocated", "disaggregated", "hybrid", "multiplexed", "explicit"]


@dataclass(frozen=True)
class NodesConfig:
    """Machines that are alike. Links are in 10^9 bytes per second and direction, memory in GiB."""

    count: int = 1
    cores: int = 8
    """Physical cores that simulators may use."""
    memory_gib: float = 32.0
    gpus: int = 0
    """Of each machine."""
    gpu_memory_gib: float = 80.0
    gpu_speed: float = 1.0
    """In multiples of the device that the workload's times were measured on."""
    core_speed: float = 1.0
    """The same for one core."""
    gpu_link_gb_s: float = 200.0
    """Between two GPUs of a machine."""
    host_link_gb_s: float = 25.0
    """Between a GPU and its machine's memory."""
    network_gb_s: float = 12.5
    """Between two machines."""

    def __post_init__(self) -> None:
        for name, least in {"count": 1, "cores": 1, "gpus": 0}.items():
            require(getattr(self, name) >= least, f"nodes.{name}", f">= {least}", getattr(self, name))
        for name in ("memory_gib", "gpu_memory_gib", "gpu_speed", "core_speed", "gpu_link_gb_s", "host_link_gb_s", "network_gb_s"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"nodes.{name}", "> 0", value)


@dataclass(frozen=True)
class ClusterConfig:
    """All machines, numbered in the order of the list."""

    nodes: tuple[NodesConfig, ...]
    name: str = "cluster"

    def __post_init__(self) -> None:
        require(len(self.nodes) >= 1, "cluster.nodes", "a list of at least one entry", list(self.nodes))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ClusterConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return build(ClusterConfig, data, "cluster")


@dataclass(frozen=True)
class PlacementConfig:
    """Which devices simulators, generation, rewards and training run on."""

    kind: PlacementKind = "collocated"
    """collocated: generation and training take turns on all GPUs. disaggregated: each has its own, all the time. hybrid: simulators and
    generation have their own GPUs and work at the same time, training then takes all. multiplexed: all GPUs generate, and some leave for
    training when enough was collected. explicit: as `roles` says."""
    num_pipeline_stages: int = 1
    """Parts of the slots that take turns: one is simulated while the policy acts for another."""
    num_env_gpus: int | None = None
    """Of simulators that run on GPUs (disaggregated, hybrid); null: what the planner finds best, or a third."""
    num_train_gpus: int | None = None
    """GPUs that training has for itself (disaggregated) or takes over (multiplexed; without GPUs, generating hosts); null: a third, or
    half. A run without Ray takes over as many as it has training ranks."""
    num_hosts: int | None = None
    """Of kind multiplexed without GPUs: parts of the processor that generate, each by itself; null: two. With GPUs each is a host."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Of kind explicit: {env, generation, reward, train: devices such as ["0/gpu:0-3", "1/cpu", "*/gpu:*"]}; reward may be left out."""

    def __post_init__(self) -> None:
        require(self.num_pipeline_stages >= 1, "hybrid.placement.num_pipeline_stages", ">= 1", self.num_pipeline_stages)
        require(self.num_hosts is None or self.num_hosts >= 2, "hybrid.placement.num_hosts", ">= 2 or null", self.num_hosts)
        for name in ("num_env_gpus", "num_train_gpus"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"hybrid.placement.{name}", ">= 1 or null", value)
        require(
            bool(self.roles) == (self.kind == "explicit"), "hybrid.placement.roles", "given for kind=explicit, and only there", self.roles
        )

    @staticmethod
    def from_value(value: Any) -> PlacementConfig:
        """From ``hybrid.placement``: the name of a kind, a mapping of fields, or a mapping of roles to devices. Raises UserError."""
        if isinstance(value, str):
            return build(PlacementConfig, {"kind": value}, "hybrid.placement")
        if isinstance(value, Mapping) and {"env", "generation", "train"} <= set(value):
            extra = {"num_pipeline_stages"} & set(value)
            fields = {"kind": "explicit", "roles": {key: value[key] for key in value if key not in extra}}
            return build(PlacementConfig, {**fields, **{key: value[key] for key in extra}}, "hybrid.placement")
        return build(PlacementConfig, value, "hybrid.placement")


@dataclass(frozen=True)
class SpreadConfig:
    """A positive quantity that varies: lognormal, exp(N(log median, sigma))."""

    median: float
    sigma: float = 0.0
    """0: always the median; 1: the slowest of a hundred is ten times the median."""
    most: float | None = None
    """Larger values are cut to this; null: never."""

    def __post_init__(self) -> None:
        require(self.median > 0 and math.isfinite(self.median), "median", "> 0", self.median)
        require(0 <= self.sigma <= 5, "sigma", "between 0 and 5", self.sigma)
        require(self.most is None or self.most >= self.median, "most", f">= median ({self.median:g}) or null", self.most)


@dataclass(frozen=True)
class BatchTimeConfig:
    """Seconds of a batch of n rows: base_s + per_row_s · n. What is bound by memory has a large base."""

    base_s: float
    per_row_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.base_s >= 0 and self.per_row_s >= 0, "base_s and per_row_s", ">= 0", (self.base_s, self.per_row_s))
        require(self.base_s + self.per_row_s > 0, "base_s + per_row_s", "> 0", 0.0)

    def of(self, rows: float) -> float:
        """Seconds of `rows` rows."""
        return self.base_s + self.per_row_s * rows


@dataclass(frozen=True)
class WorkloadConfig:
    """What one iteration of a run takes, measured or known, on a device of speed 1. Sizes are in GiB."""

    num_slots: int
    """Environments in all."""
    act: BatchTimeConfig
    """One decision of n slots on one copy of the policy."""
    train_per_decision_s: float
    """On one device, all epochs included."""
    name: str = "workload"
    rollout_steps: int = 0
    """Decisions of each slot between two updates; 0: whole episodes are collected (episodes_per_iteration)."""
    episodes_per_iteration: int = 0
    group_size: int = 1
    """Episodes of a group, which is trained on when all are there."""
    episode_decisions: SpreadConfig = field(default_factory=lambda: SpreadConfig(1.0))
    """Length of an episode."""
    steps_per_decision: int = 1
    """A chunk's environment steps."""
    simulator: Literal["cpu", "gpu"] = "cpu"
    step: SpreadConfig = field(default_factory=lambda: SpreadConfig(1e-3))
    """Seconds of one decision of one environment on one core (of simulators that run on the CPU)."""
    step_batch: BatchTimeConfig | None = None
    """Seconds of one decision of n environments on one GPU (of simulators that run there)."""
    train_base_s: float = 0.0
    """Of an update, whatever the number of decisions."""
    updates_per_iteration: int = 1
    """Optimizer steps; each adds up gradients over the training devices."""
    reward_per_decision_s: float = 0.0
    """On one device of the role reward."""
    switch_s: float = 0.0
    """Each time a device changes from generation to training or back, beside what moving bytes takes."""
    weights_gib: float = 0.01
    """What is published."""
    train_state_gib: float = 0.04
    """Weights, gradients and optimizer of training together; spread over the training devices."""
    activations_gib: float = 0.0
    """Of training, on each device."""
    cache_gib: float = 0.0
    """Of generation, on each device."""
    gib_per_slot: float = 0.0
    """Of one environment: host memory, or that of the GPU which simulates it."""
    devices_per_copy: int = 1
    """GPUs that one copy of the policy is spread over while it generates."""
    max_staleness: int = 0
    """Versions that an episode may be behind where generation and training run at the same time."""

    def __post_init__(self) -> None:
        least = {"num_slots": 1, "group_size": 1, "steps_per_decision": 1, "updates_per_iteration": 1, "devices_per_copy": 1}
        least |= {"rollout_steps": 0, "episodes_per_iteration": 0, "max_staleness": 0}
        for name, limit in least.items():
            require(getattr(self, name) >= limit, f"workload.{name}", f">= {limit}", getattr(self, name))
        for name in ("train_per_decision_s", "train_base_s", "reward_per_decision_s", "switch_s", "weights_gib", "train_state_gib"):
            require(getattr(self, name) >= 0, f"workload.{name}", ">= 0", getattr(self, name))
        for name in ("activations_gib", "cache_gib", "gib_per_slot"):
            require(getattr(self, name) >= 0, f"workload.{name}", ">= 0", getattr(self, name))
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

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> WorkloadConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return build(WorkloadConfig, data, "workload")


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
