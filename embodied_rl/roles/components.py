"""Builds the components of a run (simulators, policy, generator, method) in their processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from embodied_rl.config import HybridConfig, ShardingConfig, TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.rank_hosts import LocalRanks
from embodied_rl.methods import Method, training_sim
from embodied_rl.methods.building import RunComponents, build_run, make_rollout_collector
from embodied_rl.methods.language_player import model_files
from embodied_rl.methods.streams import Stream, simulators_of, streams_elsewhere, streams_of
from embodied_rl.policies.build import MADE_OF_SIZES, build_policy
from embodied_rl.roles.local_devices import devices_here, on_processor, plays_apart, visible_gpu
from embodied_rl.roles.remote import RemoteStarts, RemoteWorker, WorkerHandle
from embodied_rl.roles.worker import make_scorer
from embodied_rl.roles.worker_process import WorkerProcess
from embodied_rl.roles.worker_team import WorkerTeam
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.rollout.programs import make_manager
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import Player, start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import is_program
from embodied_rl.sim.worker_choice import AS_READY
from embodied_rl.types import SimSpec


@dataclass(frozen=True)
class Started:
    """Simulators of a run, and the function that builds the rest of it around them."""

    simulators: Simulators
    build: Callable[[SimSpec, Path, Path | None, Path | None], RunComponents]
    """Function that builds the other components from (spec as the policy sees it, run folder, folder of the checkpoint to resume, folder of
    the adapter's base model). Raises UserError if they do not fit together."""


def start_simulators(config: TrainConfig, tell: Callable[[str], None]) -> Started:
    """Start a remote rollout worker with its simulators, or the simulators of all domains here.

    `tell` receives the line that reports the result of ``sim.num_workers=auto``.
    Raises UserError: a simulator rejects its configuration; packages, assets or devices are missing.
    """
    if (worker := start_worker(config)) is not None:
        return Started(worker, functools.partial(_around_worker, config, worker))
    streams = streams_of(config, lambda own, num_slots: _simulators(own, num_slots, None if config.domains else tell))
    manager = simulators_of(streams)
    return Started(manager, functools.partial(_around_streams, config, streams))


def _simulators(config: TrainConfig, num_slots: int | None, tell: Callable[[str], None] | None) -> Simulators:
    """Start one domain's simulators in this process; with `tell`, measure the number of workers if it is ``auto``."""
    sim, seeds = training_sim(config), EpisodeSeeds.training(config.seed)
    autoreset, chunk_size = config.algorithm.groups is None, config.policy.chunk_size
    if tell is None or is_program(sim):
        return make_manager(sim, seeds, num_slots=num_slots, autoreset=autoreset, chunk_size=chunk_size)
    return start_measured(
        sim,
        seeds,
        tell=tell,
        num_slots=num_slots,
        autoreset=autoreset,
        chunk_size=chunk_size,
        rollouts=autoreset,
        tried=_tried(config) if autoreset else (),
        player=rollout_player(config) if autoreset and config.policy.name in MADE_OF_SIZES else None,
    )


def _tried(config: TrainConfig) -> tuple[int, ...]:
    """Numbers of pipeline groups to try for rollouts. None with staleness, where playing shares its time with training; no as-ready mode
    while recording, where episodes must stay in the order of their ends."""
    groups = config.sim.num_groups
    if config.algorithm.max_staleness:
        return ()
    if config.sim.pipeline_groups != "auto" or groups == 1:
        return (groups,)
    return (1, groups) if config.record.share else (1, groups, AS_READY)


def rollout_player(config: TrainConfig) -> Player:
    """Player of short rollouts with the configured policy and random weights; torch's random state is unchanged."""

    def seconds(manager: EnvManager, num_steps: int) -> Callable[[], tuple[float, int]]:
        own = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, rollout_steps=num_steps, max_staleness=0))
        with torch.random.fork_rng(devices=[]):
            policy = build_policy(config.policy, plain_spec(manager.spec))
        generator = make_generator(config.generation, policy)
        gpu = devices_here(config).ranks[0]
        policy.to("cpu" if gpu is None else f"cuda:{gpu}")  # after, as in a run: the generator decides where a small policy acts
        generator.publish(0)
        collector = make_rollout_collector(own, manager, generator, policy.action_layout)
        collector.restart(reconfigure=False)

        def play() -> tuple[float, int]:
            with compute_threads(1):
                rollout = collector.next_rollout(0)
            return collector.times.simulate_s + collector.times.act_s, rollout.num_steps

        return play

    return Player(repr((config.policy, config.hybrid.device, config.generation)), seconds)


def _around_streams(
    config: TrainConfig, streams: list[Stream], spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None
) -> RunComponents:
    """Build all components in this process, with reward workers if they are configured."""
    components = build_run(_here(config), streams, run_dir, folder, base, here=True, ranks=_ranks_here(config))
    with ExitStack() as undo:
        undo.callback(end_ranks, components.method)
        if (scorer := make_scorer(config)) is not None:
            components.method.collector.score_with(scorer)
        undo.pop_all()
    return components


def _around_worker(
    config: TrainConfig, worker: RemoteWorker, spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None
) -> RunComponents:
    """Build components for a remote worker: generation is there, training here, or also elsewhere with Ray."""
    own = _here(config)
    streams = streams_elsewhere(own, worker.specs, worker.insist)
    starts = worker.starts = RemoteStarts(worker, streams)
    with ExitStack() as undo:
        ranks = worker.ranks(own.hybrid) or _ranks_here(config)
        kind, publisher = worker.method, worker.generator
        components = build_run(own, streams, run_dir, folder, base, generator=publisher, ranks=ranks, starts=starts, kind=kind)
        undo.callback(end_ranks, components.method)
        worker.take_policy(components.policy, {name: model_files(one) for name, one in components.languages.items()})
        worker.connect(components.method)
        undo.pop_all()
    return components


def end_ranks(method: Method) -> None:
    """End a method's training processes, if no engine exists yet to do so."""
    if method.sharded is not None:
        method.sharded.close()


def hybrid_here(config: TrainConfig) -> HybridConfig:
    """`hybrid` for the process of the training loop. With Ray the ranks are elsewhere, unless the method keeps its steps and sends them to
    its ranks, even to a single one on a GPU. A rollout worker offloads its own cache and simulators."""
    hybrid = config.hybrid
    if _names_devices(config) and devices_here(config).ranks[0] is None:
        hybrid = on_processor(hybrid)
    if not plays_apart(config):
        return hybrid
    offload = tuple(kind for kind in hybrid.offload if kind not in ("kv_cache", "simulators"))
    sharding = hybrid.sharding
    if hybrid.cluster == "ray" and not config.keeps_steps:
        sharding = None
        if all(own.warm_start is None for own in config.algorithms.values()):
            hybrid = on_processor(hybrid)  # nothing is computed here, and Ray may give this machine's GPUs to actors
    elif hybrid.cluster == "ray" and sharding is None and hybrid.ray.gpus.train > 0:
        sharding = ShardingConfig()
    return dataclasses.replace(hybrid, offload=offload, sharding=sharding)


def _here(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, hybrid=hybrid_here(config))


def _ranks_here(config: TrainConfig) -> LocalRanks | None:
    """Ranks on the GPUs that the configuration names for training; None: on the first GPUs."""
    return LocalRanks([gpu for gpu in devices_here(config).ranks if gpu is not None]) if _names_devices(config) else None


def _names_devices(config: TrainConfig) -> bool:
    return config.hybrid.cluster == "local" and config.hybrid.placement.kind == "explicit"


# ---- rollout workers elsewhere ------------------------------------------------------------------------------------------


def start_worker(config: TrainConfig) -> RemoteWorker | None:
    """Start the rollout workers outside this process; None: the run plays here.
    Raises UserError: the simulators or the cluster cannot be started; see also `config.rules`, which run first."""
    if not plays_apart(config):
        return None
    if config.hybrid.cluster == "ray":
        from embodied_rl.roles.ray_cluster import prepare

        prepare(config.hybrid.ray)
        from embodied_rl.roles.ray_training import RayRun

        return RayRun(config)
    return RemoteWorker(config, _start_process)


def _start_process(config: TrainConfig) -> WorkerHandle:
    if config.hybrid.players > 1:
        return WorkerTeam(config, _start_one)
    return _start_one(config, WHOLE)


def _start_one(config: TrainConfig, share: Share) -> WorkerHandle:
    # Each worker gets a part of the configuration, but its device follows from the whole.
    players = dataclasses.replace(config, hybrid=dataclasses.replace(config.hybrid, players=share.count))
    gpu = devices_here(players).players[share.index]
    if gpu is None and _names_devices(config):
        config = dataclasses.replace(config, hybrid=on_processor(config.hybrid))
    return WorkerProcess(config, share, gpu=None if gpu is None else visible_gpu(gpu))
