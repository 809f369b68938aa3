"""Places the playing and the training roles as a configuration says."""

from __future__ import annotations

import dataclasses
import os

from embodied_rl.config import HybridConfig, TrainConfig
from embodied_rl.methods import Method
from embodied_rl.roles.hosts import this_machine
from embodied_rl.roles.player import make_scorer
from embodied_rl.roles.player_process import PlayerProcess
from embodied_rl.roles.player_team import PlayerTeam
from embodied_rl.roles.remote import PlayerHandle, RemoteCollector, RemotePlayer
from embodied_rl.rollout.groups import WHOLE, Share


def hybrid_here(config: TrainConfig) -> HybridConfig:
    """What of `hybrid` is about the process of the training loop: with Ray the ranks of training are elsewhere."""
    return dataclasses.replace(config.hybrid, sharding=None) if config.hybrid.cluster == "ray" else config.hybrid


def start_player(config: TrainConfig) -> RemotePlayer | None:
    """Start the player that runs outside this process; None: the run plays here.

    Raises:
        UserError: the simulators or the cluster cannot be had; see also `config.rules`, which come first.
    """
    if not config.hybrid.plays_apart:
        return None
    if config.hybrid.cluster == "ray":
        from embodied_rl.roles.ray_cluster import prepare

        prepare(config.hybrid.ray)
        from embodied_rl.roles.ray_roles import start_on_ray

        return start_on_ray(config)
    return RemotePlayer(config, _start_process)


def add_scorer(config: TrainConfig, method: Method) -> None:
    """Give the collector of this process its reward workers, where the configuration asks for some."""
    if (scorer := make_scorer(config)) is not None:
        method.collector.score_with(scorer)


def connect(config: TrainConfig, method: Method, player: RemotePlayer) -> Method:
    """Tie a method to the player elsewhere, and with Ray to the actor that trains; returns what the training loop asks."""
    outer = method
    if config.hybrid.cluster == "ray":
        from embodied_rl.roles.ray_training import train_on_ray

        outer = train_on_ray(config, method, player)
    method.collector = RemoteCollector(player, lambda iteration: outer.restart(iteration))
    return outer


def _start_process(config: TrainConfig) -> PlayerHandle:
    if config.hybrid.players > 1:
        return PlayerTeam(config, _start_one)
    return _start_one(config, WHOLE)


def _start_one(config: TrainConfig, share: Share) -> PlayerHandle:
    # Hosts of a multiplexed run see one GPU each, and share the machine with the player's own process.
    gpus = 0 if config.hybrid.placement.kind == "multiplexed" else len(this_machine(config).gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return PlayerProcess(config, share, gpu=playing_gpu(visible, gpus, share.index) if gpus else None)


def playing_gpu(visible: str | None, count: int, player: int = 0) -> str:
    """The last of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them, the last but one of the second player, and so on:
    training begins with the first."""
    number = count - 1 - player
    return str(number) if visible is None else visible.split(",")[number].strip()
