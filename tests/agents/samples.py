"""Turns and episodes written by hand, tiny policies, and collectors over real simulator processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.parsing import ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn, episode_of
from embodied_rl.config import AgentConfig, GroupsConfig, LanguageConfig
from embodied_rl.generation.tokens import RandomTokens, TokenBackend
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model, word_tokenizer
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeGroup

WORDS = ("up", "down", "left", "right")
PLAIN = AgentConfig(strategy="memory", last_turns=0, chat=False, template="{observation}\n", answer="word", actions=WORDS, max_new_tokens=3)
LAKE = SimFactory("embodied_rl.sim.text.frozenlake:make")


def tiny_folder(folder: Path, *, spread: float = 0.02, seed: int = 0) -> Path:
    """A model so small that a forward takes a millisecond; its likeliest words are the moves once it has learned them."""
    shape = TinyShape(
        hidden_size=32, num_layers=1, num_heads=1, num_key_value_heads=1, intermediate_size=32, spread=spread, max_context=2048
    )
    return make_tiny_model(folder, (), shape=shape, seed=seed, tokenizer=word_tokenizer(WORDS))


def tiny_policy(folder: Path, **options: Any) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(str(tiny_folder(folder, spread=options.pop("spread", 0.02))), layout="right", **options))


def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.read(tiny_folder(folder))


def make_turn(observation: str, prompt: Sequence[int], sampled: Sequence[int], reward: float = 0.0, log_prob: float = -1.0) -> Turn:
    count = len(sampled)
    ids = np.asarray(prompt, np.int64), np.asarray(sampled, np.int64)
    return Turn(observation, *ids, np.full(count, log_prob, np.float32), np.zeros(count, np.int64), "up", ValidAction("up"), reward, reward)


def make_episode(turns: Sequence[Turn], *, seed: int = 5, success: bool = False, greedy: bool = False) -> AgentEpisode:
    return episode_of(turns, terminated=True, truncated=False, success=success, seed=seed, domain="d", final_text="end", greedy=greedy)


def make_group(number: int, episodes: Sequence[AgentEpisode]) -> EpisodeGroup:
    return EpisodeGroup(number, "d", episodes[0].seed, 0, tuple(episodes))


def random_backend(agent: Agent, seed: int = 0) -> RandomTokens:
    """One of the moves, or a word that is none."""
    return RandomTokens(choices=[agent.answer_ids(word) for word in (*WORDS, "x")], seed=seed)


def make_collector(
    manager: EnvManager, agent: Agent, backend: TokenBackend, *, min_ready: int | None = None, has_critic: bool = False, **queue: Any
) -> AgentCollector:
    """A collector over a manager that was made with ``autoreset=False``, whatever it did before."""
    config = GroupsConfig(**{"group_size": 2, "groups_per_step": 3, **queue})
    groups = GroupQueue(config, seed=7, domains=DomainMixture.single("lake"))
    collector = AgentCollector(manager, agent, backend, groups, seed=7, min_ready=min_ready, has_critic=has_critic)
    collector.restart(groups)
    return collector


def collect(collector: AgentCollector, batches: int = 1) -> list[EpisodeGroup]:
    """Batches of one version after the other; counts of the queue add up."""
    found: list[EpisodeGroup] = []
    for version in range(batches):
        found += collector.next_groups(version)
        collector.backend.load_weights(version + 1, ())
        collector.queue.published(version + 1)
    assert collector.queue.counts().add_up
    assert collector.queue.episode_counts().add_up
    return found


def told(groups: Sequence[EpisodeGroup]) -> list[list[Any]]:
    """Everything of the episodes that must not depend on chance, comparable."""
    return [
        [
            group.number,
            group.seed,
            *([dataclasses.astuple(turn.parsed), turn.observation, turn.token_ids.tolist(), turn.reward] for turn in episode.turns),
        ]
        for group in groups
        for episode in group.episodes
        if isinstance(episode, AgentEpisode)
    ]
