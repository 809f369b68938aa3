"""Who is in a run: the simulators, the policy, whoever turns observations into actions, and the method that learns; here or elsewhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.methods import Method, make_method, training_sim
from embodied_rl.methods.domain_building import build_domains, build_domains_apart, start_domains
from embodied_rl.methods.language_player import make_agent_generator, make_language_policy
from embodied_rl.methods.multi_domain import DomainManagers
from embodied_rl.policies.build import build_policy
from embodied_rl.roles.assembly import connect, hybrid_here, start_player
from embodied_rl.roles.remote import RemotePlayer
from embodied_rl.rollout.program_manager import make_manager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import SimSpec


@dataclass(frozen=True)
class Cast:
    """Who acts, with what, and who learns from it."""

    policy: Any
    generator: Generator
    method: Method


def start_simulators(config: TrainConfig) -> Any:
    """What stands for the simulators of a run: several domains', a player elsewhere with its own, or an environment manager here.

    Raises:
        UserError: a simulator rejects its configuration, packages, assets or devices are missing.
    """
    return (
        start_player(config)
        or start_domains(config)
        or make_manager(
            training_sim(config),
            EpisodeSeeds.training(config.seed),
            autoreset=config.algorithm.groups is None,
            chunk_size=config.policy.chunk_size,
        )
    )


def assemble(config: TrainConfig, manager: Any, spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None) -> Cast:
    """Build policy, generator and method around what `start_simulators` started.

    Args:
        config: the validated configuration.
        manager: of `start_simulators`.
        spec: the simulators', as the policy sees it.
        run_dir: where a language model that is begun here, and the method, keep their files.
        folder: the checkpoint that the run goes on from, whose models are taken; None: a new run.
        base: the folder of a language policy's model, where that checkpoint holds an adapter alone.

    Raises:
        UserError: they do not fit together.
    """
    if isinstance(manager, DomainManagers):
        return Cast(*build_domains(config, manager, run_dir, folder))
    is_remote, generator = isinstance(manager, RemotePlayer), manager
    own = dataclasses.replace(config, hybrid=hybrid_here(config))
    if config.domains:
        policies, apart = build_domains_apart(own, manager, run_dir, folder)
        try:
            manager.take_policy(policies)
            return Cast(policies, generator, connect(config, apart, manager))
        except BaseException:
            end_ranks(apart)
            raise
    if config.policy.name == "language":
        policy: Any = make_language_policy(config, manager, run_dir, folder, base)
        if not is_remote:
            generator = make_agent_generator(config, policy, spec, run_dir)
    else:
        policy = build_policy(config.policy, spec)
        if not is_remote:
            generator = make_generator(config.generation, policy)
    if is_remote:
        manager.take_policy(policy)
    method = make_method(own, manager, policy, generator, run_dir)
    try:
        return Cast(policy, generator, connect(config, method, manager))
    except BaseException:
        end_ranks(method)
        raise


def end_ranks(method: Any) -> None:
    """End the training processes that a method started, where there is no engine yet that would."""
    if (sharded := getattr(method, "sharded", None)) is not None:
        sharded.close()
