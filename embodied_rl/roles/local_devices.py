"""Devices of each process of a run without Ray: this process, its training ranks, and the playing processes."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from embodied_rl.config import HybridConfig, TrainConfig
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, Device, describe, resolve
from embodied_rl.learning.devices import resolve_device
from embodied_rl.sim.affinity import available_cores


@dataclass(frozen=True)
class LocalDevices:
    """GPU numbers in this process's numbering; None: the CPU."""

    ranks: tuple[int | None, ...]
    """Device of each training rank; the first is this process."""
    players: tuple[int | None, ...] = ()
    """Device of each playing process; empty: this process plays."""


def this_machine(config: TrainConfig) -> Cluster:
    """The devices available to a run without Ray."""
    gpus = 0
    if resolve_device(config.hybrid.device).type == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    name = "this machine with hybrid.device=cpu" if config.hybrid.device == "cpu" else "this machine"
    return Cluster(ClusterConfig((NodesConfig(cores=available_cores(), gpus=gpus),), name=name))


def devices_here(config: TrainConfig) -> LocalDevices:
    """Devices for this machine. Raises UserError as `plan_devices`."""
    return plan_devices(config, this_machine(config))


def plays_apart(config: TrainConfig) -> bool:
    """Whether episodes are played outside the process of the training loop. Raises UserError as `plan_devices`."""
    return config.hybrid.cluster == "ray" or bool(devices_here(config).players)


def plan_devices(config: TrainConfig, machine: Cluster) -> LocalDevices:
    """Assign the first GPUs to training and the last to playing, unless `hybrid.placement` names devices. If training shares no device with
    generation, other processes play.

    Raises UserError for an impossible assignment, with the nearest possible one.
    """
    hybrid = config.hybrid
    num_ranks = 1 if hybrid.sharding is None else hybrid.sharding.num_ranks
    if hybrid.placement.kind == "explicit":
        return _named(config, machine, num_ranks)
    ranks = tuple(range(num_ranks)) if machine.gpus else (None,) * num_ranks
    if hybrid.placement.kind == "multiplexed":
        return LocalDevices(ranks, (None,))  # multiplexed hosts have their own devices (`HostPlan`)
    if hybrid.placement.kind != "disaggregated":
        return LocalDevices(ranks)
    last = len(machine.gpus) - 1
    return LocalDevices(ranks, tuple(last - index if machine.gpus else None for index in range(hybrid.players)))


def _named(config: TrainConfig, machine: Cluster, num_ranks: int) -> LocalDevices:
    placement = resolve(config.hybrid.placement, machine)
    train, generation = placement["train"], placement["generation"]
    on_gpus = train[0].kind == "gpu"
    if on_gpus and len(train) != num_ranks:
        raise UserError(
            f"hybrid.placement gives role train {len(train)} GPUs, and training has {num_ranks} "
            f"{'ranks' if num_ranks > 1 else 'rank'} (hybrid.sharding): each needs one. Nearest valid choice: "
            + (f"train: {describe(train[:num_ranks])}, or " if len(train) > num_ranks else "")
            + f"hybrid.sharding.num_shards={len(train)}."
        )
    lent = [device for device in placement["reward"] if device.kind == "gpu" and device not in generation]
    if lent and config.hybrid.reward_worker is not None:
        raise UserError(
            f"hybrid.placement gives role reward {lent[0].name}, but without Ray reward workers are threads of the player, which sees "
            f"only the GPUs of role generation. Nearest valid choice: reward: {describe(generation)}, or hybrid.cluster=ray."
        )
    # A player that shares a device with training shares it with the first rank.
    train = tuple(sorted(train, key=lambda device: (device not in generation, device)))
    ranks = tuple(device.index for device in train) if on_gpus else (None,) * num_ranks
    if placement.trains_apart:
        return LocalDevices(ranks, _of_players(generation, config.hybrid.players))
    if len(generation) > 1:
        raise UserError(
            f"hybrid.placement gives role generation {len(generation)} GPUs, but the process that trains on one of them acts only there. "
            f"Nearest valid choice: generation: ['{train[0].name}'], or GPUs that role train does not name, with hybrid.players."
        )
    backends = [config.generation.backend, *(player.backend for player in config.generation.mix.values())]
    if ranks[0] and "vllm" in backends:
        raise UserError(
            f"hybrid.placement has {train[0].name} for generation and training, but vLLM uses the first GPU that its process sees. Nearest "
            f"valid choice: 0/gpu:0 for both with CUDA_VISIBLE_DEVICES={ranks[0]}, or another GPU for role generation."
        )
    return LocalDevices(ranks)


def _of_players(devices: tuple[Device, ...], players: int) -> tuple[int | None, ...]:
    """Distribute the players evenly over the devices."""
    if devices[0].kind == "cpu":
        return (None,) * players
    if players % len(devices):
        raise UserError(
            f"hybrid.placement gives role generation {len(devices)} GPUs, and hybrid.players={players}: each GPU must have the same "
            f"number of players. Nearest valid choice: hybrid.players={-(-players // len(devices)) * len(devices)}, or generation: "
            f"{describe(devices[:1])}."
        )
    return tuple(device.index for device in devices for _ in range(players // len(devices)))


def visible_gpu(number: int) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a process that sees only this GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if visible is None else visible.split(",")[number].strip()


def on_processor(hybrid: HybridConfig) -> HybridConfig:
    """Configuration of a process whose role has none of the machine's GPUs."""
    sharding = None if hybrid.sharding is None else dataclasses.replace(hybrid.sharding, cpu_offload=False)
    return dataclasses.replace(hybrid, device="cpu", sharding=sharding)
