"""A run with several domains from its configuration: who plays what on which backend, and who learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embodied_rl.agents.agent import Agent
from embodied_rl.config import PlayerConfig, TrainConfig
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.generation import make_generator
from embodied_rl.generation.scripted_tokens import RandomTokens
from embodied_rl.generation.shared_tokens import SharedTokens
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.methods.agents import check_agent
from embodied_rl.methods.base import Method
from embodied_rl.methods.domain_roles import LanguageRole, OwnRole, Role, RolePolicies
from embodied_rl.methods.groups import GroupMethod
from embodied_rl.methods.language_player import make_agent, make_backend, make_language_policy
from embodied_rl.methods.multi_domain import (
    OWN_PLAYER,
    DomainGenerators,
    DomainManagers,
    DomainsMethod,
    Seat,
    played_by,
    policies_of,
)
from embodied_rl.methods.warm_start import WarmStart
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.domains import DomainMixture, queue_weights
from embodied_rl.sim.instrumented import plain_spec

LANGUAGE = "language"
"""The role of the run's own policy, in metrics and checkpoints; the others have their domains' names."""


def with_domains(config: TrainConfig) -> TrainConfig:
    """The configuration as a run with several domains sees it: one with players alone has `sim` for its only domain."""
    if config.domains or not config.generation.mix:
        return config
    from embodied_rl.config import DomainConfig

    start = config.algorithm.warm_start
    own = {} if start is None else {"warm_start": dataclasses.asdict(start)}
    algorithm = dataclasses.replace(config.algorithm, warm_start=None)
    return dataclasses.replace(config, algorithm=algorithm, domains={config.sim.name: DomainConfig(config.sim, algorithm=own)})


def start_domains(config: TrainConfig) -> DomainManagers | None:
    """The simulators of a run with several domains; None: it has one."""
    return DomainManagers.start(config) if config.domains else None


def build_domains(
    config: TrainConfig, managers: DomainManagers, run_dir: Path, checkpoint: Path | None
) -> tuple[RolePolicies, Any, Method]:
    """Policies, players and learners around the simulators. Raises UserError as their makers do."""
    roles: dict[str, Role] = {}
    if any(domain.policy is None for domain in config.domains.values()):
        roles[LANGUAGE] = _language_role(config, managers, run_dir, checkpoint)
    for name, domain in config.domains.items():
        if domain.policy is not None:
            own = config.for_domain(name)
            # A small network is trained where it acts; the ranks are the language policy's.
            own = dataclasses.replace(own, hybrid=dataclasses.replace(own.hybrid, sharding=None))
            roles[name] = _own_role(own, name, next(seat for seat in managers.seats if seat.domain == name))
    shares = {name: (player.share, played_by(config, name)) for name, player in config.generation.mix.items()}
    weights = queue_weights({name: domain.weight for name, domain in config.domains.items()}, shares)
    method = DomainsMethod(config, managers, roles, DomainMixture(weights), run_dir)
    return policies_of(roles), DomainGenerators(list(roles.values())), method


# ---- the language policy --------------------------------------------------------------------------------------------


def _language_role(config: TrainConfig, managers: DomainManagers, run_dir: Path, checkpoint: Path | None) -> LanguageRole:
    seats = [seat for seat in managers.seats if config.domains[seat.domain].policy is None]
    configs = {seat.domain: config.for_domain(seat.domain) for seat in seats}
    main = [seat for seat in seats if seat.player == OWN_PLAYER]
    speaking = [(configs[seat.domain].agent, seat.manager) for seat in main]
    policy = make_language_policy(configs[main[0].domain], main[0].manager, run_dir, checkpoint, further=speaking[1:])
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    sampling: set[str] = {configs[seat.domain].generation.backend for seat in main}
    sampling |= {player.backend for player in config.generation.mix.values() if player.train and player.is_policy}
    role = LanguageRole(config, configs, policy, trust_sampled=sampling == {"tokens_torch"} and groups.max_staleness == 0)
    shared: dict[str, SharedTokens] = {}
    for seat in seats:
        own = configs[seat.domain]
        player = None if seat.player == OWN_PLAYER else config.generation.mix[seat.player]
        agent = make_agent(own.agent, policy, seat.manager.spec)
        backend = _backend_of(own, seat, player, agent, policy, shared, role, managers, run_dir)
        seat.collector = AgentCollector(
            seat.manager,
            agent,
            backend,
            None,  # type: ignore[arg-type]  # the method gives it its share of the queue
            seed=config.seed,
            min_ready=1 if groups.max_staleness else None,
            greedy_member="greedy_baseline" in role.needs_of(seat.domain),
            trained=seat.trained,
            temperature=None if player is None else player.temperature,
        )
        if player is None:
            seat.generator = AgentGenerator(agent, backend, seed=config.seed)
            start = WarmStart(own, seat.manager, role.learner, seat.generator)
            if start.options is not None:
                role.warm_starts[seat.domain] = start
    return role


def _backend_of(
    config: TrainConfig,
    seat: Seat,
    player: PlayerConfig | None,
    agent: Agent,
    policy: LanguagePolicy,
    shared: dict[str, SharedTokens],
    role: LanguageRole,
    managers: DomainManagers,
    run_dir: Path,
) -> TokenBackend:
    """A view of the one backend of its kind that has the policy's weights, or somebody else's own."""
    kind = config.generation.backend if player is None else player.backend
    if player is not None and not player.is_policy:
        backend = _others_backend(player, agent, policy, seed=config.seed)
        agent.writes_messages = player.backend == "openai" and player.api == "chat"
        managers.backends.append(backend)
        return backend
    if kind not in shared:
        generation = dataclasses.replace(config.generation, backend=kind)  # type: ignore[arg-type]  # both are kinds of tokens
        backend = make_backend(generation, policy, run_dir, seed=config.seed)
        shared[kind] = SharedTokens(backend)
        role.backends.append(backend)
        managers.backends.append(backend)
    return shared[kind].view()


def _others_backend(player: PlayerConfig, agent: Agent, policy: LanguagePolicy, *, seed: int) -> TokenBackend:
    if player.backend == "random":
        if not agent.config.actions:
            raise UserError("generation.mix: backend=random needs a list of actions, and agent.actions is empty: any text may be answered.")
        return RandomTokens(choices=[agent.answer_ids(action) for action in agent.config.actions], seed=seed)
    from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens

    assert player.base_url is not None, "the configuration was checked"
    assert player.model is not None, "the configuration was checked"
    options = OpenAIOptions(
        player.base_url, player.model, api=player.api, api_key_env=player.api_key_env, timeout_s=player.timeout_s, seed=seed
    )
    return OpenAITokens(options, policy.tokenizer)


# ---- policies of their own ------------------------------------------------------------------------------------------


def _own_role(config: TrainConfig, name: str, seat: Seat) -> OwnRole:
    policy: Any = build_policy(config.policy, plain_spec(seat.manager.spec))
    generator = make_generator(config.generation, policy)
    method = GroupMethod(config, seat.manager, policy, generator)
    seat.collector, seat.generator = method.collector, generator
    return OwnRole(name, config, policy, generator, method)


# ---- what makes no sense --------------------------------------------------------------------------------------------


def check_domains(config: TrainConfig) -> None:
    """Raises UserError for what a run with several domains cannot do, before any simulator is started."""
    if config.algorithm.groups is None:
        raise UserError(
            f"domains: all domains fill one queue of groups, and algorithm={config.algorithm.name} has none: choose one with groups "
            "(algorithm=grpo, gigpo, …)."
        )
    if config.algorithm.warm_start is not None:
        raise UserError("domains: players are cloned by domain: set domains.NAME.algorithm.warm_start, and algorithm.warm_start=null.")
    refused = {
        "hybrid.offload": bool(config.hybrid.offload),
        "hybrid.reward_worker": config.hybrid.reward_worker is not None,
        "hybrid.placement": config.hybrid.plays_apart,
        "recording": bool(config.recording),
        "algorithm.initialized.share": config.algorithm.initialized.share > 0,
    }
    for key, given in refused.items():
        if given:
            raise UserError(f"{key} is not offered in a run with several domains or players: leave it out.")
    if config.hybrid.sharding is not None and all(domain.policy is not None for domain in config.domains.values()):
        raise UserError("hybrid.sharding divides the run's language policy, and every domain has a policy of its own: set hybrid=local.")
    if config.video.enabled != "no":
        raise UserError("A run with several domains or players makes no film at its end: set video.enabled=no.")
    for name in config.domains:
        _check_domain(config, name)
    for name, player in config.generation.mix.items():
        text = [domain for domain, own in config.domains.items() if own.policy is None]
        for domain in player.domains:
            if domain not in text:
                raise UserError(f"generation.mix.{name}.domains: '{domain}' is no domain of text.{did_you_mean(domain, text)}")
        if not text:
            raise UserError(f"generation.mix.{name}: there is no domain of text to play.")


def _check_domain(config: TrainConfig, name: str) -> None:
    if not name.isidentifier() or name in (LANGUAGE, "roles"):
        raise UserError(f"domains: '{name}' must be made of letters, digits and _, and not be '{LANGUAGE}'.")
    own = config.for_domain(name)
    domain = config.domains[name]
    if domain.policy is None:
        if config.policy.name != "language":
            raise UserError(
                f"domains.{name} has no policy of its own, and the run's, policy.name='{config.policy.name}', is no language policy: "
                f"choose policy=language, or give domains.{name}.policy."
            )
        check_agent(own)
        return
    if domain.policy.name == "language":
        raise UserError(
            f"domains.{name}.policy: a run has one language policy, its own (policy=language); leave domains.{name}.policy out."
        )
    if own.policy.chunk_size != 1:
        raise UserError(f"domains.{name}.policy acts in chunks, which several domains are not offered: choose mlp or cnn.")
    if own.algorithm.warm_start is not None:
        raise UserError(f"domains.{name}.algorithm.warm_start is offered for domains of text: set it null.")
    if domain.backend is not None:
        raise UserError(f"domains.{name}.backend samples tokens, and its policy acts in batches: leave it out.")
