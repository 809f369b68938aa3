"""Before a language agent learns by itself: behaviour cloning of a scripted player, measured before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embodied_rl.agents.turns import AgentEpisode, rows_of
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.scripted_tokens import ScriptedTokens
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.methods.streams import Stream, of_name, prefixed
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.registry import load_target
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import GroupQueue, GroupQueueConfig

_SEEDS = 2**29
"""Held-out seeds of the measurements: neither those of interim nor those of final evaluations."""
_TRIES = 4
"""Episodes that the player may play for each successful one that is wanted."""

Player = Callable[[str], str]
"""From an observation's text to the action's."""


NO_START: dict[str, Any] = {"done": True, "figures": {}}
"""State of a warm start that was not asked for."""


class WarmStart:
    """Of one domain, once: before the first episode of a run that asks for it (`algorithm.warm_start`)."""

    def __init__(self, stream: Stream, generator: Generator) -> None:
        """`generator`: acts in the stream's simulators; any, where these play by themselves."""
        options = stream.config.algorithm.warm_start
        assert options is not None, "the domain has a warm start"
        self.options = options
        self._stream, self._generator = stream, generator
        self._figures: dict[str, float] = {}
        self._episodes: list[AgentEpisode] = []
        self._done = False

    @property
    def wanted(self) -> bool:
        """Whether there is something to clone that was not cloned yet."""
        return not self._done

    def sequences(self) -> list[TokenSequence]:
        """Successful episodes of the player, as rows of tokens.

        Raises:
            UserError: there is no such player, or it does not succeed.
            SimFault: see EnvManager.
        """
        manager = self._stream.manager
        self._episodes = manager.demonstrate() if manager.plays_itself else play_script(self._stream)
        return [TokenSequence(row.token_ids, row.mask, row.images) for episode in self._episodes for row in rows_of(episode.turns)]

    def note(self, before: float, after: float, loss: float) -> None:
        """It is done: what came of it."""
        self._figures = {
            "success_before": before,
            "success_after": after,
            "episodes": float(len(self._episodes)),
            "turns": float(sum(episode.num_messages for episode in self._episodes)),
            "loss": loss,
        }
        self._done, self._episodes = True, []

    def metrics(self) -> dict[str, float]:
        """Success on held-out seeds before and after, and what was learned from."""
        return self._figures

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, JSON-able."""
        return {"done": self._done, "figures": prefixed("warm_start", self._figures)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done, self._figures = bool(state["done"]), of_name("warm_start", state["figures"])

    def success(self) -> float:
        """Share of held-out episodes that succeed now."""
        episodes = evaluate(self._stream.manager, self._generator, self.options.measured_episodes, first_seed=_SEEDS)
        return float(np.mean([episode.success_once for episode in episodes]))


def play_script(stream: Stream) -> list[AgentEpisode]:
    """Successful episodes of a stream's scripted player, through a collector as training has it; those of its simulators are lost.

    Raises:
        UserError: there is no such player, or it does not succeed.
        SimFault: see EnvManager.
    """
    config, manager, options = stream.config, stream.manager, stream.config.algorithm.warm_start
    assert options is not None, "there is a warm start"
    agent = stream.agent
    assert agent is not None, "a domain of text that is stepped here"
    assert options.player is not None, "the configuration was checked"
    player: Player = load_target(options.player)
    wanted = options.episodes

    def script(request: GenerationRequest) -> list[int]:
        assert request.messages is not None, "the agent's requests hold the observation"
        return agent.answer_ids(player(str(request.messages[-1]["content"])))

    queue = GroupQueue(
        GroupQueueConfig(group_size=1, groups_per_step=min(wanted, 4 * manager.num_slots)),
        seed=config.seed,
        domains=DomainMixture.single(f"{manager.spec.task}/warm start"),
    )
    backend = ScriptedTokens(script)
    collector = AgentCollector(manager, agent, backend, queue, seed=config.seed)
    collector.restart(queue)
    found: list[AgentEpisode] = []
    played = 0
    for version in itertools.count():
        groups = collector.next_groups(version)
        played += len(groups)
        found += [e for group in groups for e in group.episodes if isinstance(e, AgentEpisode) and e.success]
        if len(found) >= wanted:
            return found[:wanted]
        if played >= _TRIES * wanted:
            raise UserError(
                f"The player algorithm.warm_start.player={options.player} succeeded in {len(found)} of {played} episodes, and "
                f"{wanted} successful ones were asked for (algorithm.warm_start.episodes)."
            )
        backend.load_weights(version + 1, ())
        queue.published(version + 1)
    raise AssertionError("the loop ends by itself")
