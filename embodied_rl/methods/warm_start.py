"""Before a language agent learns by itself: behaviour cloning of a scripted player, measured before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.turns import AgentEpisode, rows_of
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.scripted_tokens import ScriptedTokens
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.learning.learner import Learner
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.registry import load_target
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.schedule import GroupQueueConfig
from embodied_rl.sim.simulators import Simulators

_SEEDS = 2**29
"""Held-out seeds of the measurements: neither those of interim nor those of final evaluations."""
_TRIES = 4
"""Episodes that the player may play for each successful one that is wanted."""

Player = Callable[[str], str]
"""From an observation's text to the action's."""


class WarmStart:
    """Runs once, before the first episode of a run that asks for it (`algorithm.warm_start`)."""

    def __init__(self, config: TrainConfig, manager: Simulators, learner: Learner, generator: Any) -> None:
        """
        Args:
            manager: simulators that are stepped here, or a player in another process that can `evaluate` and `demonstrate`.
            generator: an `AgentGenerator` where the simulators are stepped here.
        """
        self.options = config.algorithm.warm_start
        self._config, self._seed = config, config.seed
        self._manager, self._learner, self._generator = manager, learner, generator
        self._figures: dict[str, float] = {}
        self._episodes: list[AgentEpisode] = []
        self._done = self.options is None

    def run(self, version: int) -> None:
        """Clone the player and publish the weights as `version`; nothing where it is done already.

        Raises:
            UserError: there is no such player, or it does not succeed.
            SimFault: see EnvManager.
        """
        if self._done or self.options is None:
            return
        before = self.success()
        sequences = self.sequences()
        loss = self._learner.clone(
            sequences,
            num_epochs=self.options.num_epochs,
            minibatch_rows=self.options.minibatch_rows,
            learning_rate=self.options.learning_rate,
            seed=self._seed,
        )
        self._generator.publish(version)
        self.note(before, self.success(), loss)

    @property
    def wanted(self) -> bool:
        """Whether there is something to clone that was not cloned yet."""
        return not self._done

    def sequences(self) -> list[TokenSequence]:
        """Successful episodes of the player, as rows of tokens. Raises as `run`."""
        if self._manager.plays_itself:
            self._episodes = self._manager.demonstrate()
        else:
            self._episodes = play_script(self._config, self._manager, self._generator.agent)
        return [TokenSequence(row.token_ids, row.mask, row.images) for episode in self._episodes for row in rows_of(episode.turns)]

    def note(self, before: float, after: float, loss: float) -> None:
        """It is done: what came of it."""
        self._figures = {
            "warm_start/success_before": before,
            "warm_start/success_after": after,
            "warm_start/episodes": float(len(self._episodes)),
            "warm_start/turns": float(sum(episode.num_messages for episode in self._episodes)),
            "warm_start/loss": loss,
        }
        self._done, self._episodes = True, []

    def metrics(self) -> dict[str, float]:
        """Success on held-out seeds before and after, and what was learned from."""
        return self._figures

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, JSON-able."""
        return {"done": self._done, "figures": self._figures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done, self._figures = bool(state["done"]) or self.options is None, dict(state["figures"])

    def success(self) -> float:
        """Share of held-out episodes that succeed now."""
        assert self.options is not None, "there is a warm start"
        count = self.options.measured_episodes
        episodes = evaluate(self._manager, self._generator, count, first_seed=_SEEDS)
        return float(np.mean([episode.success_once for episode in episodes]))


def play_script(config: TrainConfig, manager: Simulators, agent: Agent) -> list[AgentEpisode]:
    """Successful episodes of the scripted player, through the collector that training uses; those of the manager are lost.

    Raises:
        UserError: there is no such player, or it does not succeed.
        SimFault: see EnvManager.
    """
    options = config.algorithm.warm_start
    assert options is not None, "there is a warm start"
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
