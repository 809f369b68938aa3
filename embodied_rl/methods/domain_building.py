"""Builds a run with several domains from its configuration: players, their backends, and learners."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.methods.base import Method
from embodied_rl.methods.domain_playing import seat_agents
from embodied_rl.methods.domain_roles import LanguageRole, OwnRole, Role, RolePolicies
from embodied_rl.methods.domains_apart import PlayerElsewhere, seats_elsewhere
from embodied_rl.methods.groups import GroupMethod
from embodied_rl.methods.language_player import make_backend, make_language_policy
from embodied_rl.methods.multi_domain import OWN_PLAYER, DomainGenerators, DomainManagers, DomainsMethod, Seat, policies_of
from embodied_rl.methods.warm_start import WarmStart
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.sim.instrumented import plain_spec

LANGUAGE = "language"
"""The role of the run's own policy, in metrics and checkpoints; the others have their domains' names."""


def start_domains(config: TrainConfig) -> DomainManagers | None:
    """The simulators of a run with several domains; None: it has one."""
    return DomainManagers.start(config) if config.domains else None


def build_domains(
    config: TrainConfig, managers: DomainManagers, run_dir: Path, checkpoint: Path | None
) -> tuple[RolePolicies, Any, Method]:
    """Policies, players and learners around the simulators. Raises UserError as their makers do."""
    policies = _policies(config, managers.seats, run_dir, checkpoint)
    roles: dict[str, Role] = {}
    if LANGUAGE in policies:
        policy = policies[LANGUAGE]
        role = roles[LANGUAGE] = _language_role(config, policy)
        shared = seat_agents(config, managers, policy, lambda own: make_backend(own.generation, policy, run_dir, seed=config.seed))
        role.backends += shared.values()
        _add_warm_starts(config, role, managers.seats)
    for seat in managers.seats:
        if seat.domain in policies:
            own, network = _alone(config, seat.domain), policies[seat.domain]
            seat.generator = make_generator(own.generation, network)
            method = GroupMethod(own, seat.manager, network, seat.generator)
            seat.collector = method.collector
            roles[seat.domain] = OwnRole(seat.domain, own, network, seat.generator, method)
    return policies_of(roles), DomainGenerators(list(roles.values())), DomainsMethod(config, managers.seats, roles, run_dir)


def build_domains_apart(
    config: TrainConfig, player: PlayerElsewhere, run_dir: Path, checkpoint: Path | None, language: LanguagePolicy | None = None
) -> tuple[RolePolicies, DomainsMethod]:
    """Policies and learners of domains that are played in another process; the caller sets the method's `collector`.

    Args:
        player: where the simulators are.
        language: the language policy; None: of this configuration or `checkpoint`, with warm starts that play there.

    Raises:
        UserError: as the makers of policies and learners do.
    """
    seats = seats_elsewhere(config, player)
    policies = _policies(config, seats, run_dir, checkpoint, language)
    roles: dict[str, Role] = {}
    if LANGUAGE in policies:
        role = roles[LANGUAGE] = _language_role(config, policies[LANGUAGE])
        if language is None:
            role.player = player
            _add_warm_starts(config, role, seats)
    for seat in seats:
        if seat.domain in policies:
            own, network = _alone(config, seat.domain), policies[seat.domain]
            no_generator: Any = None
            roles[seat.domain] = OwnRole(seat.domain, own, network, None, GroupMethod(own, seat.manager, network, no_generator))
    return policies_of(roles), DomainsMethod(config, seats, roles, run_dir)


def _language_role(config: TrainConfig, policy: LanguagePolicy) -> LanguageRole:
    """The run's language policy with its learner; it does not play."""
    configs = {name: config.for_domain(name) for name, domain in config.domains.items() if domain.policy is None}
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    sampling: set[str] = {own.generation.backend for own in configs.values()}
    sampling |= {player.backend for player in config.generation.mix.values() if player.train and player.is_policy}
    return LanguageRole(config, configs, policy, trust_sampled=sampling == {"tokens_torch"} and groups.max_staleness == 0)


def _alone(config: TrainConfig, domain: str) -> TrainConfig:
    """Configuration of a domain with its own policy: no sharding, since only the language policy has ranks and this network is small."""
    own = config.for_domain(domain)
    return dataclasses.replace(own, hybrid=dataclasses.replace(own.hybrid, sharding=None))


def _policies(
    config: TrainConfig, seats: Sequence[Seat], run_dir: Path, checkpoint: Path | None, language: LanguagePolicy | None = None
) -> dict[str, Any]:
    """{role: policy}, all built before anything else draws random numbers: initial weights do not depend on where domains are played.

    `language`: the language policy, where it is there already.
    """
    main = [seat for seat in seats if seat.player == OWN_PLAYER]
    own = {seat.domain: seat.manager for seat in main if config.domains[seat.domain].policy is not None}
    speaking = [(config.for_domain(seat.domain), seat.manager) for seat in main if seat.domain not in own]
    policies: dict[str, Any] = {}
    if speaking:
        first, simulators = speaking[0]
        further = [(config.agent, manager) for config, manager in speaking[1:]]
        policies[LANGUAGE] = language or make_language_policy(first, simulators, run_dir, checkpoint, further=further)
    return policies | {name: build_policy(config.for_domain(name).policy, plain_spec(manager.spec)) for name, manager in own.items()}


def _add_warm_starts(config: TrainConfig, role: LanguageRole, seats: Sequence[Seat]) -> None:
    for seat in seats:
        if seat.player == OWN_PLAYER and seat.domain in role.domains:
            generator = seat.manager if seat.generator is None else seat.generator
            start = WarmStart(config.for_domain(seat.domain), seat.manager, role.learner, generator)
            if start.options is not None:
                role.warm_starts[seat.domain] = start
