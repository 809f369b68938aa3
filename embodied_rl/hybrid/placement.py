"""Roles and devices: what a configured placement means on a described cluster, or why it is impossible there.

Devices are named ``node/kind:index``, such as ``0/gpu:3`` or ``12/cpu``; a machine's cores are one device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from embodied_rl.config.hybrid import ClusterConfig, NodesConfig, PlacementConfig, PlacementKind
from embodied_rl.errors import UserError, require_known
from embodied_rl.sim.topology import format_list

Role = Literal["env", "generation", "reward", "train"]
ROLES: tuple[Role, ...] = get_args(Role)

_DEVICE = re.compile(r"^(?P<nodes>\*|\d+(?:-\d+)?)/(?P<kind>cpu|gpu)(?::(?P<indices>\*|\d+(?:-\d+)?))?$")


@dataclass(frozen=True, order=True)
class Device:
    """One GPU, or all cores of one machine."""

    node: int
    kind: Literal["cpu", "gpu"]
    index: int
    memory_gib: float

    @property
    def name(self) -> str:
        """``0/gpu:3``, ``0/cpu``"""
        return f"{self.node}/cpu" if self.kind == "cpu" else f"{self.node}/gpu:{self.index}"


class Cluster:
    """The devices of a described cluster, in the order of their machines."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.nodes: list[NodesConfig] = [nodes for nodes in config.nodes for _ in range(nodes.count)]
        """Each machine's description."""
        self.gpus = [Device(n, "gpu", i, spec.gpu_memory_gib) for n, spec in enumerate(self.nodes) for i in range(spec.gpus)]
        self.cpus = [Device(n, "cpu", 0, spec.memory_gib) for n, spec in enumerate(self.nodes)]
        self._known = {device.name: device for device in (*self.gpus, *self.cpus)}

    @property
    def compute(self) -> list[Device]:
        """Devices that policies run on: the GPUs, or the processors if there are none."""
        return self.gpus or self.cpus

    def device(self, name: str) -> Device:
        """The device of this name. Raises UserError for an unknown device, with the nearest one."""
        if name in self._known:
            return self._known[name]
        counts = f"{len(self.nodes)} machines (0-{len(self.nodes) - 1}) with {len(self.gpus)} GPUs in all"
        near = min(self._known.values(), key=lambda device: _distance(device, name))
        raise UserError(f"Device '{name}' does not exist: '{self.config.name}' has {counts}. Nearest existing device: '{near.name}'.")

    def select(self, patterns: Sequence[str] | str) -> tuple[Device, ...]:
        """Devices of patterns such as ``0/gpu:0-3``, ``*/gpu:*``, ``2-5/cpu``. Raises UserError for a wrong or repeated pattern."""
        found: list[Device] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            match = _DEVICE.match(str(pattern))
            if match is None:
                raise UserError(f"'{pattern}' is not a device: write node/kind:index, such as 0/gpu:3, 0-7/gpu:*, */gpu:0-3 or 1/cpu.")
            nodes = range(len(self.nodes)) if match["nodes"] == "*" else _range(match["nodes"])
            for node in nodes:
                if match["kind"] == "cpu":
                    found.append(self.device(f"{node}/cpu"))
                    continue
                every = match["indices"] in (None, "*")
                if every and node >= len(self.nodes):
                    self.device(f"{node}/gpu:0")  # raises
                indices = range(self.nodes[node].gpus) if every else _range(match["indices"])
                found += [self.device(f"{node}/gpu:{index}") for index in indices]
        if len(set(found)) < len(found):
            raise UserError(f"hybrid.placement names a device twice in {patterns!r}.")
        if not found:
            raise UserError(f"{patterns!r} selects no device of '{self.config.name}' ({len(self.gpus)} GPUs).")
        return tuple(sorted(found))


@dataclass(frozen=True)
class Placement:
    """Each role's devices."""

    kind: PlacementKind
    roles: Mapping[Role, tuple[Device, ...]]
    num_pipeline_stages: int = 1
    num_takeover: int = 0
    """For kind multiplexed: number of generating GPUs that leave for training and come back."""

    def __getitem__(self, role: Role) -> tuple[Device, ...]:
        return self.roles[role]

    @property
    def trains_apart(self) -> bool:
        """Whether training has devices on which nothing is generated or simulated."""
        return not set(self["train"]) & (set(self["generation"]) | {device for device in self["env"] if device.kind == "gpu"})

    @property
    def simulates_apart(self) -> bool:
        """Whether no simulator runs on a device that generates actions."""
        return not set(self["env"]) & set(self["generation"])

    @property
    def label(self) -> str:
        """Short label for tables: ``hybrid, 2 stages``."""
        stages = f", {self.num_pipeline_stages} stages" if self.num_pipeline_stages > 1 else ""
        return f"{self.kind}{stages}"

    def to_dict(self) -> dict[str, Any]:
        """The value of ``hybrid.placement``: devices by role, or for multiplexed the number that leave for training."""
        if self.kind == "multiplexed":
            return {"kind": self.kind, "num_train_gpus": self.num_takeover, "num_pipeline_stages": self.num_pipeline_stages}
        roles: dict[str, Any] = {role: describe(devices) for role, devices in self.roles.items()}
        return {**roles, "num_pipeline_stages": self.num_pipeline_stages}


def resolve(config: PlacementConfig, cluster: Cluster, *, simulator: Literal["cpu", "gpu"] = "cpu") -> Placement:
    """Devices of a configured placement on this cluster. `simulator`: kind of device that simulators run on. Raises UserError: the cluster
    cannot have it; with the reason and the nearest possible placement."""
    if simulator == "gpu" and not cluster.gpus:
        raise UserError(f"The simulator runs on GPUs and '{cluster.config.name}' has none. Use a cluster with GPUs, or a CPU simulator.")
    if config.kind == "explicit":
        return _explicit(config, cluster, simulator)
    if config.kind == "multiplexed" and simulator == "gpu":
        raise UserError(
            "hybrid.placement=multiplexed moves episodes between GPUs while the simulators run, and simulators on these GPUs cannot "
            "move. Nearest valid choice: hybrid."
        )
    devices, num = cluster.compute, len(cluster.compute)
    apart = 1 if simulator == "gpu" and config.kind in ("disaggregated", "hybrid") else 0
    if config.kind == "collocated" or (config.kind == "hybrid" and simulator == "cpu"):  # only the pipeline remains of this kind
        return _roles(config, devices if simulator == "gpu" else cluster.cpus, devices, devices)
    train = 0 if config.kind == "hybrid" else _share(config.num_train_gpus, num, 2 if config.kind == "multiplexed" else 3)
    env = _share(config.num_env_gpus, num - train, 3) if apart else 0
    least = 1 + (config.kind != "hybrid") + apart
    if num < least or num - train - env < 1:
        raise UserError(_too_few(config, cluster, num, train, env, least))
    if config.kind == "multiplexed":
        return _roles(config, cluster.cpus, devices, devices[num - train :], num_takeover=train)
    env_devices = devices[:env] if apart else cluster.cpus
    return _roles(config, env_devices, devices[env : num - train], devices[num - train :] if train else devices)


def _roles(
    config: PlacementConfig, env: Sequence[Device], generation: Sequence[Device], train: Sequence[Device], num_takeover: int = 0
) -> Placement:
    devices = zip(ROLES, (env, generation, generation, train), strict=True)
    return Placement(config.kind, {role: tuple(own) for role, own in devices}, config.num_pipeline_stages, num_takeover)


def _explicit(config: PlacementConfig, cluster: Cluster, simulator: Literal["cpu", "gpu"]) -> Placement:
    for role in config.roles:
        require_known(role, ROLES, f"hybrid.placement: role '{role}' is not known.")
    missing = [role for role in ROLES if role not in config.roles and role != "reward"]
    if missing:
        raise UserError(f"hybrid.placement.roles lacks {', '.join(missing)}: give each a list of devices such as ['0/gpu:*'].")
    roles: dict[Role, tuple[Device, ...]] = {role: cluster.select(config.roles[role]) for role in ROLES if role in config.roles}
    roles.setdefault("reward", roles["generation"])
    wrong = [device.name for device in roles["env"] if device.kind != simulator]
    if wrong:
        instead = describe(cluster.gpus if simulator == "gpu" else cluster.cpus)
        raise UserError(f"The simulator runs on {simulator.upper()}s, but role env names {', '.join(wrong[:4])}. Possible: env: {instead}.")
    policy_roles: tuple[Role, ...] = ("generation", "train")
    for role in policy_roles:
        kinds = {device.kind for device in roles[role]}
        if len(kinds) > 1:
            gpus = describe([device for device in roles[role] if device.kind == "gpu"])
            raise UserError(f"Role {role} mixes GPUs and CPUs, and would be as slow as the CPUs. Nearest: {role}: {gpus}.")
    generation, train = set(roles["generation"]), set(roles["train"])
    if (both := generation & train) and not (generation <= train or train <= generation):
        raise UserError(
            f"Roles generation and train share {len(both)} devices, and each also has its own: they can neither take turns nor run at the "
            f"same time. Nearest: train: {describe(sorted(generation | train))}, or train: {describe(sorted(train - generation))}."
        )
    return Placement("explicit", roles, config.num_pipeline_stages)


def describe(devices: Sequence[Device]) -> list[str]:
    """Patterns that select these devices, with ranges: ``["0-7/gpu:0-3"]``."""
    by_node: dict[tuple[int, str], list[int]] = {}
    for device in sorted(devices):
        by_node.setdefault((device.node, device.kind), []).append(device.index)
    nodes_of: dict[str, list[int]] = {}
    for (node, kind), indices in by_node.items():
        for part in ["cpu"] if kind == "cpu" else [f"gpu:{run}" for run in format_list(indices).split(",")]:
            nodes_of.setdefault(part, []).append(node)
    return [f"{run}/{part}" for part, nodes in nodes_of.items() for run in format_list(nodes).split(",")]


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    if last and int(last) < int(first):
        raise UserError(f"'{text}' is an empty range of devices: put the smaller number first.")
    return range(int(first), int(last or first) + 1)


def _share(wanted: int | None, num: int, parts: int) -> int:
    return max(1, num // parts) if wanted is None else wanted


def _too_few(config: PlacementConfig, cluster: Cluster, num: int, train: int, env: int, least: int) -> str:
    what = "GPUs" if cluster.gpus else "machines"
    text = f"hybrid.placement={config.kind} needs "
    if num < least:
        return text + f"at least {least} {what}, and '{cluster.config.name}' has {num}. Nearest valid choice: collocated."
    room = num - (1 if config.kind == "hybrid" else 2) - (env > 0) + 1
    return (
        text
        + f"a device for generation beside {train} for training and {env} for simulators, and '{cluster.config.name}' has {num} {what}. "
        f"Nearest valid choice: num_train_gpus + num_env_gpus <= {num - 1} (at most {room} of one of them)."
    )


def _distance(device: Device, name: str) -> tuple[bool, int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", name)] + [0, 0]
    return (device.kind not in name, abs(device.node - numbers[0]), abs(device.index - numbers[1]))
