"""Places the playing and the training roles as a configuration says; an impossible placement is refused with the nearest possible one."""

from __future__ import annotations

import dataclasses
import os
import warnings

from embodied_rl.config import HybridConfig, LanguageConfig, TrainConfig
from embodied_rl.config.placement import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, resolve
from embodied_rl.learning.devices import resolve_device
from embodied_rl.methods import Method
from embodied_rl.roles.hosts import plan_here, with_host_threads
from embodied_rl.roles.player import make_scorer
from embodied_rl.roles.player_process import PlayerProcess
from embodied_rl.roles.player_team import PlayerTeam
from embodied_rl.roles.remote import PlayerHandle, RemoteCollector, RemotePlayer
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.sim.affinity import available_cores
from embodied_rl.sim.text.program import is_program


def with_roles(config: TrainConfig) -> TrainConfig:
    """The configuration with what follows from its placement: a processor that is shared gives training its part of the threads."""
    if config.hybrid.placement.kind != "multiplexed" or config.hybrid.cluster != "local":
        return config
    return with_host_threads(config, plan_here(config))


def hybrid_here(config: TrainConfig) -> HybridConfig:
    """What of `hybrid` is about the process of the training loop: with Ray the ranks of training are elsewhere."""
    return dataclasses.replace(config.hybrid, sharding=None) if config.hybrid.cluster == "ray" else config.hybrid


def start_player(config: TrainConfig) -> RemotePlayer | None:
    """Start the player that runs outside this process; None: the run plays here.

    Raises:
        UserError: the simulators or the cluster cannot be had; see also `check_roles`, which comes first.
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
    scorer = make_scorer(config)
    if scorer is not None:
        method.collector.scorer = scorer


def connect(config: TrainConfig, method: Method, player: RemotePlayer) -> Method:
    """Tie a method to the player elsewhere, and with Ray to the actor that trains; returns what the training loop asks."""
    outer = method
    if config.hybrid.cluster == "ray":
        from embodied_rl.roles.ray_training import train_on_ray

        outer = train_on_ray(config, method, player)
    method.collector = RemoteCollector(player, lambda iteration: outer.restart(iteration))
    return outer


def check_roles(config: TrainConfig) -> None:
    """Raises UserError for a placement that this machine, or this run, cannot have."""
    hybrid, algorithm = config.hybrid, config.algorithm
    if hybrid.reward_worker is not None:
        if algorithm.groups is None:
            raise UserError(
                f"hybrid.reward_worker scores whole episodes, and algorithm={algorithm.name} learns from fixed rollouts or recordings: "
                "choose a method on groups (algorithm=grpo, ppo_episodes, …)."
            )
        if is_program(config.sim) or config.domains:
            raise UserError(
                "hybrid.reward_worker scores the episodes of one task's simulators; agent programs and several domains have rewards of "
                "their own: set hybrid.reward_worker=null."
            )
        if algorithm.initialized.share > 0:
            raise UserError(
                "algorithm.initialized learns where episodes succeed before they are scored: set algorithm.initialized.share=0, or "
                "hybrid.reward_worker=null."
            )
    if algorithm.max_staleness > 0 and not algorithm.on_policy:
        raise UserError(
            f"algorithm.max_staleness is about rollouts, and algorithm={algorithm.name} keeps what it learns from: set it to 0."
        )
    if algorithm.max_staleness > 0 and not hybrid.plays_apart:
        raise UserError(
            f"algorithm.max_staleness={algorithm.max_staleness}: the next rollout is collected while training where another process "
            "plays, and here generation and training take turns. The nearest possible: hybrid=disaggregated, or algorithm.max_staleness=0."
        )
    if hybrid.cluster == "local":
        _check_local(config)
    if hybrid.plays_apart:
        _check_apart(config)
    if hybrid.players > 1:
        _check_players(config)
    if hybrid.publish != "full":
        _check_publish(config)
    if hybrid.sharding is not None and hybrid.sharding.cpu_offload:
        _check_cpu_offload(hybrid)


def _check_cpu_offload(hybrid: HybridConfig) -> None:
    """One configuration serves a laptop and a machine with GPUs: what has no effect here is said."""
    on_ray = hybrid.cluster == "ray"
    on_gpu = hybrid.ray.gpus.train > 0 if on_ray else resolve_device(hybrid.device).type == "cuda"
    if not on_gpu:
        why = "hybrid.ray.gpus.train=0" if on_ray else "hybrid.device=auto finds no GPU"
        warnings.warn(
            f"hybrid.sharding.cpu_offload has no effect: training runs on processors here ({why}), where everything lies in host memory "
            "already.",
            stacklevel=3,
        )


def _check_publish(config: TrainConfig) -> None:
    """What is sent instead of all weights."""
    where = f"hybrid.publish={config.hybrid.publish}"
    if not config.hybrid.plays_apart:
        raise UserError(
            f"{where} is about weights that are sent to another process, and here nothing is sent: set hybrid.publish=full, or "
            "hybrid=disaggregated."
        )
    if config.hybrid.publish == "adapter":
        policy = config.policy
        if config.domains or not isinstance(policy, LanguageConfig) or (policy.lora_rank == 0 and policy.adapter is None):
            raise UserError(
                f"{where} sends the LoRA adapter of a language policy of one task (policy=language policy.lora_rank=8). The nearest "
                "possible: hybrid.publish=changed."
            )


def _check_players(config: TrainConfig) -> None:
    """Several players divide groups among them."""
    players, algorithm = config.hybrid.players, config.algorithm
    where, one = f"hybrid.players={players}", "The nearest possible: hybrid.players=1"
    if config.hybrid.cluster == "local" and config.hybrid.placement.kind != "disaggregated":
        raise UserError(f"{where} are processes of hybrid=disaggregated, or actors of hybrid=ray. {one}, or one of these.")
    if algorithm.groups is None:
        raise UserError(
            f"{where} divide groups of episodes, and algorithm={algorithm.name} has fixed rollouts. {one}, or a method on groups "
            "(algorithm=grpo, ppo_episodes, …)."
        )
    if config.domains:
        raise UserError(f"{where} divide the groups of one task, and a run with several domains has many. {one}.")
    if algorithm.groups.groups_per_step % players or players > config.sim.num_slots:
        fitting = [n for n in range(players, 0, -1) if algorithm.groups.groups_per_step % n == 0 and n <= config.sim.num_slots]
        raise UserError(
            f"{where} divide algorithm.groups.groups_per_step={algorithm.groups.groups_per_step} groups and "
            f"sim.num_slots={config.sim.num_slots} slots: each needs as many groups as the others, and a slot. "
            f"The nearest possible: hybrid.players={fitting[0]}."
        )


def _check_local(config: TrainConfig) -> None:
    """Kinds of placement on one machine without Ray."""
    placement, stages = config.hybrid.placement, config.hybrid.placement.num_pipeline_stages
    if stages not in (1, config.sim.pipeline_groups):
        raise UserError(
            f"hybrid.placement.num_pipeline_stages={stages} is what sim.pipeline_groups says (now {config.sim.pipeline_groups}): set "
            f"sim.pipeline_groups={stages}."
        )
    if placement.kind in ("collocated", "hybrid"):
        return  # simulators have the processor; generation and training take turns on the device
    machine = this_machine(config)
    if placement.kind == "multiplexed":
        _check_multiplexed(config, on_gpus=bool(machine.gpus))
        return
    if placement.kind == "explicit":
        roles = resolve(placement, machine)
        if roles.trains_apart or len(machine.gpus) > 1:
            raise UserError(
                "hybrid.placement by roles is for Ray (hybrid.cluster=ray) or for what shares one device. The nearest possible here: "
                f"hybrid.placement={'disaggregated' if roles.trains_apart else 'collocated'}."
            )
        return
    if machine.gpus:
        resolve(placement, machine)  # needs two of them
        ranks = 1 if config.hybrid.sharding is None else config.hybrid.sharding.num_ranks
        players, who = config.hybrid.players, "the player" if config.hybrid.players == 1 else "each player"
        if ranks + players > len(machine.gpus):
            raise UserError(
                f"hybrid.placement=disaggregated needs a GPU for {who} beside those of {ranks} training ranks, and this machine has "
                f"{len(machine.gpus)}. The nearest possible: {max(len(machine.gpus) - players, 1)} ranks, or hybrid.placement=collocated."
            )


def _check_multiplexed(config: TrainConfig, *, on_gpus: bool) -> None:
    """Running episodes must be worth moving, and possible to move."""
    algorithm, here = config.algorithm, "The nearest possible: hybrid.placement=disaggregated."
    if config.domains:
        raise UserError(f"hybrid.placement=multiplexed moves episodes of one task, and a run with several domains has many. {here}")
    if algorithm.groups is None and algorithm.on_policy:
        raise UserError(
            "hybrid.placement=multiplexed moves episodes that are unfinished when a batch is full, and fixed rollouts "
            f"(algorithm={algorithm.name}) have all slots end together: choose a method on groups (algorithm=grpo, …). {here}"
        )
    if on_gpus and config.policy.name != "language":
        raise UserError(
            "hybrid.placement=multiplexed moves unfinished answers between GPUs, and a robot's policy answers in one pass: on GPUs it is "
            f"for policy=language. {here}"
        )
    plan_here(config)
    if algorithm.groups is not None and algorithm.groups.max_staleness == 0:
        warnings.warn(
            "hybrid.placement=multiplexed with algorithm.groups.max_staleness=0: nothing may be played while training, so that hosts and "
            "training take turns. Set algorithm.groups.max_staleness=1 to have them work at the same time.",
            stacklevel=2,
        )


def this_machine(config: TrainConfig) -> Cluster:
    """The devices that a run without Ray has."""
    gpus = 0
    if resolve_device(config.hybrid.device).type == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    return Cluster(ClusterConfig((NodesConfig(cores=available_cores(), gpus=gpus),), name="this machine"))


def _check_apart(config: TrainConfig) -> None:
    """What needs the simulators, or the generator, in the process of the training loop."""
    algorithm = config.algorithm
    if config.hybrid.cluster == "ray" and config.hybrid.placement.kind == "multiplexed":
        raise UserError(
            "hybrid.placement=multiplexed moves episodes between processes of one machine, and hybrid.cluster=ray has one generating "
            "actor. The nearest possible: hybrid.cluster=local, or hybrid.placement=disaggregated."
        )
    sharding, gpus = config.hybrid.sharding, config.hybrid.ray.gpus.train
    if config.hybrid.cluster == "ray" and sharding is not None and gpus % sharding.num_ranks:
        nearest = max(gpus // sharding.num_ranks, 1) * sharding.num_ranks
        raise UserError(
            f"hybrid.sharding: {sharding.num_ranks} ranks need a GPU each, or as many whole ones, and hybrid.ray.gpus.train={gpus:g} are "
            f"divided among them. The nearest possible: hybrid.ray.gpus.train={nearest:g}, or another number of ranks."
        )
    where = "hybrid.cluster=ray" if config.hybrid.cluster == "ray" else f"hybrid.placement={config.hybrid.placement.kind}"
    here = "The nearest possible: hybrid=collocated."
    if not algorithm.on_policy:
        raise UserError(
            f"{where} is for learning by playing, and algorithm={algorithm.name} learns from recorded or replayed steps. {here}"
        )
    wrong = {
        "algorithm.initialized.share": algorithm.initialized.share > 0,
        "record.share": config.record.share > 0,
        "hybrid.offload": bool({"simulators", "kv_cache"} & set(config.hybrid.offload)),
        "algorithm.warm_start": config.hybrid.cluster == "ray" and algorithm.warm_start is not None and config.policy.name != "language",
    }
    for key, given in wrong.items():
        if given:
            raise UserError(f"{where} does not go together with {key}: leave that out. {here}")


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
