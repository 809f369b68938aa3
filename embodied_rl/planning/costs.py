"""What a placement costs beside computing: memory of each device, and bytes that cross links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from embodied_rl.config.placement import NodesConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, Device, Placement

_GB = 1.073741824
"""10^9 bytes of a GiB: link speeds are given in the former, memory in the latter."""


@dataclass(frozen=True)
class Costs:
    """Seconds of moving bytes, and GiB on the fullest device of each kind."""

    train_gather_s: float
    """Adding up gradients over the training devices, all updates of an iteration."""
    publish_s: float
    """From training to generation, once per iteration; generation stands still."""
    switch_s: float
    """Out and in again where generation and training do not fit side by side, and `WorkloadConfig.switch_s` twice."""
    gpu_gib: float
    """Of the fullest compute device; the larger of both phases where something moves out."""
    host_gib: float
    """Of the fullest machine's memory."""
    offloads: bool
    """Whether something has to move out for the other phase."""


def costs(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> Costs:
    """Raises UserError where something does not fit into a device's memory, with the nearest that does."""
    generation, train = placement["generation"], placement["train"]
    both = set(generation) & set(train)
    room = min(device.memory_gib for device in (*generation, *train))
    acting, training = _gib(workload, placement)
    simulating = _simulating_gib(workload, placement)
    offloads = bool(both) and acting + training + simulating > room
    for what, need in (("generation", acting), ("training", training)):
        if need + simulating > room:
            raise UserError(_does_not_fit(workload, placement, cluster, what, need + simulating, room))
    fullest = max(acting, training) + simulating if offloads or not both else acting + training + simulating
    host = _host_gib(workload, placement, cluster, len(both) if offloads else 0)
    switch = 2 * workload.switch_s if both else 0.0
    if offloads:
        link = min(_spec(cluster, device).host_link_gb_s for device in both)
        states = workload.train_state_gib / len(train) + workload.weights_gib / workload.devices_per_copy
        switch += 2 * states * _GB / link
    share = (len(train) - 1) / len(train)
    link = slowest_link(cluster, train)
    gather = workload.updates_per_iteration * 2 * share * workload.weights_gib * _GB / link if len(train) > 1 else 0.0
    return Costs(gather, _publish_s(workload, placement, cluster), switch, fullest, host, offloads)


def slowest_link(cluster: Cluster, devices: Sequence[Device]) -> float:
    """10^9 bytes per second between any two of these devices."""
    nodes = {device.node for device in devices}
    specs = [cluster.nodes[node] for node in nodes]
    return min(spec.network_gb_s for spec in specs) if len(nodes) > 1 else specs[0].gpu_link_gb_s


def _publish_s(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> float:
    generation, train = placement["generation"], placement["train"]
    bytes_gb = workload.weights_gib * _GB
    if set(generation) <= set(train):
        # Everybody gathers the others' shards; a single device has them all.
        return bytes_gb * (len(train) - 1) / len(train) / slowest_link(cluster, train)
    return bytes_gb / slowest_link(cluster, (*generation, *train))


def _gib(workload: WorkloadConfig, placement: Placement) -> tuple[float, float]:
    """(of a generating device, of a training one)"""
    acting = workload.weights_gib / workload.devices_per_copy + workload.cache_gib
    training = workload.train_state_gib / len(placement["train"]) + workload.activations_gib
    return acting, training


def _simulating_gib(workload: WorkloadConfig, placement: Placement) -> float:
    """On a GPU that simulates and does something else as well."""
    others = set(placement["generation"]) | set(placement["train"])
    if workload.simulator == "cpu" or not set(placement["env"]) & others:
        return 0.0
    return workload.gib_per_slot * workload.num_slots / len(placement["env"])


def _host_gib(workload: WorkloadConfig, placement: Placement, cluster: Cluster, num_offloading: int) -> float:
    """Of the fullest machine. Raises UserError where a machine's memory is too small."""
    slots_gib = workload.gib_per_slot * workload.num_slots / len(placement["env"]) if workload.simulator == "cpu" else 0.0
    simulating = {device.node for device in placement["env"]}
    both = sorted(set(placement["generation"]) & set(placement["train"]))[:num_offloading]
    # Caches and activations are dropped; one side's states lie here while the other works.
    state = max(workload.train_state_gib / len(placement["train"]), workload.weights_gib / workload.devices_per_copy)
    fullest = 0.0
    for node in sorted(simulating | {device.node for device in both}):
        offloaded = state * sum(device.node == node for device in both)
        need, has = slots_gib * (node in simulating) + offloaded, cluster.nodes[node].memory_gib
        fullest = max(fullest, need)
        if need <= has:
            continue
        if offloaded > has:
            raise UserError(
                f"{placement.label}: {offloaded:.1f} GiB are moved out of machine {node}'s GPUs, and its memory has {has:.1f}. "
                "The nearest possible: disaggregated, where nothing is moved out."
            )
        most = math.floor((has - offloaded) * len(placement["env"]) / workload.gib_per_slot)
        raise UserError(
            f"{placement.label}: simulators ({need - offloaded:.1f} GiB) and what is moved out of GPUs ({offloaded:.1f} GiB) do not fit "
            f"into machine {node}'s memory ({has:.1f} GiB). The nearest possible: workload.num_slots={most}."
        )
    return fullest


def _does_not_fit(workload: WorkloadConfig, placement: Placement, cluster: Cluster, what: str, need: float, room: float) -> str:
    text = f"{placement.label}: {what} needs {need:.1f} GiB on each of its devices, and the smallest has {room:.1f}."
    fixed = workload.activations_gib + _simulating_gib(workload, placement)
    if what == "training" and room > fixed:
        least = math.ceil(workload.train_state_gib / (room - fixed))
        known = len(cluster.compute)
        return f"{text} The nearest possible: training on {least} devices" + ("." if least <= known else f"; the cluster has {known}.")
    if what == "generation" and room > workload.cache_gib + _simulating_gib(workload, placement):
        copies = math.ceil(workload.weights_gib / (room - workload.cache_gib - _simulating_gib(workload, placement)))
        return f"{text} The nearest possible: workload.devices_per_copy={copies}."
    return f"{text} Devices with more memory are needed, or a smaller cache, or fewer simulators."


def _spec(cluster: Cluster, device: Device) -> NodesConfig:
    return cluster.nodes[device.node]
