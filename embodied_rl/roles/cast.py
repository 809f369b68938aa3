"""The components of a run: simulators, policy, generator (observations → actions) and method (learns); in this process or another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.methods import Method, make_method, training_sim
from embodied_rl.methods.domain_building import build_domains, build_domains_apart, start_domains
from embodied_rl.methods.language_apart import ModelFiles, model_files
from embodied_rl.methods.language_player import make_agent_generator, make_language_policy
from embodied_rl.methods.multi_domain import DomainManagers
from embodied_rl.policies.build import build_policy
from embodied_rl.roles.assembly import add_scorer, connect, hybrid_here, start_player
from embodied_rl.roles.remote import RemotePlayer
from embodied_rl.rollout.program_manager import make_manager
from embodied_rl.sim.measured_workers import start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import is_program
from embodied_rl.types import SimSpec


@dataclass(frozen=True)
class Cast:
    """A run's policy, the generator that acts with it, and the method that trains it."""

    policy: Any
    generator: Generator
    method: Method


@dataclass(frozen=True)
class Started:
    """The simulators of a run, and how the rest of it is built around them."""

    simulators: Simulators
    build: Callable[[SimSpec, Path, Path | None, Path | None], Cast]
    """(spec as the policy sees it, the run's folder, folder of the checkpoint that the run goes on from, folder of the model that its
    adapter belongs to) → the other components. Raises UserError where they do not fit together."""


def start_simulators(config: TrainConfig, tell: Callable[[str], None]) -> Started:
    """Several domains' simulators, a player elsewhere with its own, agent programs, or an environment manager here.

    `tell` takes the line that says what ``sim.num_workers=auto`` came to.

    Raises:
        UserError: a simulator rejects its configuration, packages, assets or devices are missing.
    """
    if (player := start_player(config)) is not None:
        return Started(player, functools.partial(_around_player, config, player))
    if (managers := start_domains(config)) is not None:
        return Started(managers, functools.partial(_around_domains, config, managers))
    sim, seeds, autoreset = training_sim(config), EpisodeSeeds.training(config.seed), config.algorithm.groups is None
    if is_program(sim):
        manager: Simulators = make_manager(sim, seeds)
    else:
        manager = start_measured(sim, seeds, tell=tell, autoreset=autoreset, chunk_size=config.policy.chunk_size)
    return Started(manager, functools.partial(_around_manager, config, manager))


def _around_manager(config: TrainConfig, manager: Simulators, spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None) -> Cast:
    """All in this process."""
    own = dataclasses.replace(config, hybrid=hybrid_here(config))
    generator: Generator
    if config.policy.name == "language":
        policy: Any = make_language_policy(config, manager, run_dir, folder, base)
        generator = make_agent_generator(config, policy, spec, run_dir)
    else:
        policy = build_policy(config.policy, spec)
        generator = make_generator(config.generation, policy)
    method = make_method(own, manager, policy, generator, run_dir)
    with ExitStack() as undo:
        undo.callback(end_ranks, method)
        add_scorer(config, method)
        undo.pop_all()
    return Cast(policy, generator, method)


def _around_domains(
    config: TrainConfig, managers: DomainManagers, spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None
) -> Cast:
    """All in this process, of several domains."""
    policy, generator, method = build_domains(config, managers, run_dir, folder)
    with ExitStack() as undo:
        undo.callback(end_ranks, method)
        add_scorer(config, method)
        undo.pop_all()
    return Cast(policy, generator, method)


def _around_player(config: TrainConfig, player: RemotePlayer, spec: SimSpec, run_dir: Path, folder: Path | None, base: Path | None) -> Cast:
    """What acts is with the simulators; what learns is here, or with Ray elsewhere too."""
    own = dataclasses.replace(config, hybrid=hybrid_here(config))
    policy: Any
    method: Method
    model: ModelFiles | None
    if config.domains:
        policies, method = build_domains_apart(own, player, run_dir, folder)
        policy, model = policies, {} if policies.language is None else model_files(policies.language)
    elif config.policy.name == "language":
        policy = make_language_policy(config, player, run_dir, folder, base)
        model = model_files(policy)
    else:
        policy, model = build_policy(config.policy, spec), None
    with ExitStack() as undo:
        if config.domains:
            undo.callback(end_ranks, method)
        player.take_policy(policy, model)
        if not config.domains:
            method = make_method(own, player, policy, player.generator, run_dir)
            undo.callback(end_ranks, method)
        connected = connect(config, method, player)
        undo.pop_all()
    return Cast(policy, player.generator, connected)


def end_ranks(method: Method) -> None:
    """End the training processes that a method started, where there is no engine yet that would."""
    if method.sharded is not None:
        method.sharded.close()
