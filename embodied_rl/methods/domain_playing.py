"""Playing the domains of a run: a collector for each seat (domain, player), in the process of its simulators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from embodied_rl.agents.agent import Agent
from embodied_rl.algorithms.composition import compose
from embodied_rl.config import PlayerConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.scripted_tokens import RandomTokens
from embodied_rl.generation.shared_tokens import SharedTokens
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.methods.language_player import Speaking, make_agent
from embodied_rl.methods.multi_domain import OWN_PLAYER, DomainManagers
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.agent_generator import AgentGenerator

MakeBackend = Callable[[TrainConfig], TokenBackend]
"""From a domain's own configuration, whose generation.backend says which kind."""


def seat_agents(config: TrainConfig, managers: DomainManagers, speaking: Speaking, make_backend: MakeBackend) -> dict[str, TokenBackend]:
    """Give every seat of the language policy its agent and its collector, which receives its queue from `restart`.

    Args:
        config: the run's.
        speaking: the language policy, or what is known of it where its weights are elsewhere.
        make_backend: samples with the policy's weights, once for each kind of backend.

    Returns:
        {kind: backend} of those that sample with the policy's weights. All that were made are closed with `managers`.

    Raises:
        UserError: as `Agent` and the backends do.
    """
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    shared: dict[str, SharedTokens] = {}
    for seat in managers.seats:
        if config.domains[seat.domain].policy is not None:
            continue
        own = config.for_domain(seat.domain)
        player = None if seat.player == OWN_PLAYER else config.generation.mix[seat.player]
        agent = make_agent(own.agent, speaking, seat.manager.spec)
        backend = _backend_of(own, player, agent, speaking, shared, managers, make_backend)
        seat.agent = agent
        seat.collector = AgentCollector(
            seat.manager,
            agent,
            backend,
            None,  # type: ignore[arg-type]  # `restart` gives it its share of the queue
            seed=config.seed,
            min_ready=1 if groups.max_staleness else None,
            greedy_member="greedy_baseline" in compose(own.algorithm).advantage.needs,
            trained=seat.trained,
            temperature=None if player is None else player.temperature,
        )
        if player is None:
            seat.generator = AgentGenerator(agent, backend, seed=config.seed)
    return {kind: tokens.backend for kind, tokens in shared.items()}


def _backend_of(
    config: TrainConfig,
    player: PlayerConfig | None,
    agent: Agent,
    speaking: Speaking,
    shared: dict[str, SharedTokens],
    managers: DomainManagers,
    make_backend: MakeBackend,
) -> TokenBackend:
    """A view of the one backend of its kind that has the policy's weights; of a player with another model, that player's own backend."""
    kind = config.generation.backend if player is None else player.backend
    if player is not None and not player.is_policy:
        backend = _others_backend(player, agent, speaking, seed=config.seed)
        agent.writes_messages = player.backend == "openai" and player.api == "chat"
        managers.backends.append(backend)
        return backend
    if kind not in shared:
        backend = make_backend(with_backend(config, kind))
        managers.backends.append(backend)
        shared[kind] = SharedTokens(backend)
    return shared[kind].view()


def with_backend(config: TrainConfig, kind: str) -> TrainConfig:
    """The configuration with another kind of token backend."""
    generation = dataclasses.replace(config.generation, backend=kind)  # type: ignore[arg-type]  # a kind of tokens
    return dataclasses.replace(config, generation=generation)


def _others_backend(player: PlayerConfig, agent: Agent, speaking: Speaking, *, seed: int) -> TokenBackend:
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
    return OpenAITokens(options, speaking.tokenizer)
