"""Any advantage and loss of the tables on groups of text episodes: a language agent learns from its own turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.agents.dialogue import write_dialogues
from embodied_rl.agents.turns import AgentEpisode, TokenRow, rows_of
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.config import TrainConfig
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import TokenObjective
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.groups import queue_config
from embodied_rl.methods.warm_start import WarmStart
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import EpisodeGroup

DIALOGUES = "dialogues.html"
"""In a run's folder."""
_DIALOGUES_SHOWN = 12


@dataclass(frozen=True)
class PreparedTurns:
    """Turns with their credit, as tokens."""

    tokens: TokenBatch
    num_turns: int
    """Those that are learned from."""
    metrics: dict[str, float]


class AgentMethod(Method):
    """Groups of text episodes → credit of turns → tokens."""

    learner: Learner

    def __init__(self, config: TrainConfig, manager: Simulators, policy: LanguagePolicy, generator: Any, run_dir: Path) -> None:
        """
        Args:
            manager: simulators that are stepped here; or a player in another process, whose connection sets `collector`.
            generator: an `AgentGenerator` where the simulators are stepped here.
            run_dir: gets the dialogues of the last episodes, `DIALOGUES`, when the run ends.
        """
        groups = config.algorithm.groups
        assert groups is not None, "the configuration was checked"
        self.config = config
        self.algorithm = EpisodeMethod(config.algorithm)
        # In the same precision by the same code, of the weights of this very version.
        self._trust_sampled = config.generation.backend == "tokens_torch" and groups.max_staleness == 0
        self.learner = make_learner(TokenObjective(policy, config.algorithm), policy, config.algorithm, config.hybrid)
        self._queue_config = queue_config(groups)
        self._filters = build_filters(groups.filters)
        self._domains = DomainMixture.single(manager.spec.task)
        self._tokenizer = policy.tokenizer
        self.queue = self._new_queue()
        self.collector: Any = self._new_collector(manager, generator)
        self.warm_start: WarmStart = WarmStart(config, manager, self.learner, generator)
        self._run_dir, self._task = run_dir, manager.spec.task
        self._last: list[AgentEpisode] = []

    def collect(self, iteration: int) -> Experience:
        groups: list[EpisodeGroup] = self.collector.next_groups(iteration)
        episodes = agent_episodes(groups)
        self._last = episodes[:_DIALOGUES_SHOWN]
        finished = [(episode.success, episode.game_return, episode.num_messages) for episode in episodes]
        return Experience(sum(episode.num_messages for episode in episodes), finished, {}, groups)

    def prepare(self, experience: Experience) -> PreparedTurns:
        return prepare_turns(self.algorithm, self.learner, experience.data, trust_sampled=self._trust_sampled)

    def update(self, prepared: PreparedTurns, *, iteration: int, steps: int) -> dict[str, float]:
        num_turns = max(prepared.num_turns, 1)
        stats = self.learner.update(
            prepared.tokens,
            minibatch_rows=round(self.config.algorithm.minibatch_size * prepared.tokens.num_rows / num_turns),
            progress=steps / self.config.total_steps,
            seed=[self.config.seed, iteration],
            kl_coef=self.algorithm.kl_coefficient.value,
        )
        if "kl" in stats and self.config.algorithm.kl.place == "loss":
            self.algorithm.adapt(stats["kl"], num_turns)
            stats["kl_coef"] = self.algorithm.kl_coefficient.value
        return {**stats, **prepared.metrics}

    def published(self, version: int) -> None:
        self.queue.published(version)

    def restart(self, iteration: int) -> None:
        """Episodes in flight are asked for again, with the same seeds; a warm start comes before the first ones."""
        self.warm_start.run(iteration)
        self.learner.keep_reference()
        state = self.queue.state_dict()
        self.queue = self._new_queue()
        self.queue.load_state_dict(state)
        self.collector.restart(self.queue)

    def finish(self) -> None:
        """Write down the last training episodes, to be read."""
        if self._last:
            tokenizer = self._tokenizer
            write_dialogues(
                self._run_dir / DIALOGUES,
                self._last,
                lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
                f"{self._task}: the last training episodes",
            )

    def metrics(self) -> dict[str, float]:
        return {**self.queue.counts().figures(), **self.collector.metrics(), **self.warm_start.metrics()}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.algorithm.state_dict(), "queue": self.queue.state_dict(), "warm_start": self.warm_start.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["episodes"])
        self.warm_start.load_state_dict(state["warm_start"])
        self.queue = self._new_queue()
        self.queue.load_state_dict(state["queue"])
        self.collector.restart(self.queue)

    def _new_queue(self) -> GroupQueue:
        return GroupQueue(self._queue_config, seed=self.config.seed, domains=self._domains, filters=self._filters)

    def _new_collector(self, manager: Simulators, generator: Any) -> Any:
        """None: it is elsewhere."""
        return make_agent_collector(self.config, manager, generator, self.queue) if not manager.plays_itself else None


def make_agent_collector(config: TrainConfig, manager: Simulators, generator: AgentGenerator, queue: GroupQueue) -> AgentCollector:
    """The collector that a configuration describes, in whatever process the simulators are."""
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    return AgentCollector(
        manager,
        generator.agent,
        generator.backend,
        queue,
        seed=config.seed,
        min_ready=1 if groups.max_staleness else None,
        greedy_member="greedy_baseline" in compose(config.algorithm).advantage.needs,
    )


def prepare_turns(algorithm: EpisodeMethod, learner: Learner, groups: Sequence[EpisodeGroup], *, trust_sampled: bool) -> PreparedTurns:
    """Credit of the turns of groups, and its tokens.

    Args:
        trust_sampled: the log-probabilities of sampled tokens are those of the policy as it is when an update begins (the generator
            computes as the trainer does, and nothing is stale), so that they need not be computed again.
    """
    turns, (rows, owner) = turn_batch(groups), token_rows(agent_episodes(groups))
    # The sequences are the same whatever the credit is, and a KL term in the reward needs their log-probabilities first.
    everything = Credit(torch.zeros(turns.shape), turns.mask, torch.zeros(turns.shape), None, turns.success, {})
    tokens = token_batch(rows, owner, everything)
    present = reference = None
    if learner.has_reference:
        reference = learner.token_log_probs(tokens.sequences, of_reference=True)
    if learner.needs_present:
        present = tokens.behaviour_log_prob if trust_sampled else learner.token_log_probs(tokens.sequences)
    values = EpisodeValues(torch.zeros(turns.shape), torch.zeros(turns.shape[0]))
    kl = of_turns(algorithm.divergence(present, reference), rows, owner, turns.shape)
    credit = algorithm.prepare(turns, values, kl)
    learned = token_batch(rows, owner, credit)
    sampled = {"behaviour_log_prob": learned.behaviour_log_prob, "mask": learned.mask, "chunk_id": learned.chunk_id}
    advantage, figures = algorithm.corrected(learned.advantage, present, **sampled)
    learned = replace(learned, advantage=advantage, present=present, reference=reference)
    return PreparedTurns(learned, int(credit.mask.sum()), {**credit.metrics, **figures})


def agent_episodes(groups: Sequence[EpisodeGroup]) -> list[AgentEpisode]:
    """Episodes in the order of groups and members."""
    episodes = [episode for group in groups for episode in group.episodes]
    agents = [episode for episode in episodes if isinstance(episode, AgentEpisode)]
    assert len(agents) == len(episodes), "the agent's collector makes nothing else"
    return agents


def turn_batch(groups: Sequence[EpisodeGroup]) -> EpisodeBatch:
    """Groups as advantages see them: a row is an episode, an entry one of its turns; observations are texts, for anchors."""
    episodes = agent_episodes(groups)
    lengths = np.array([episode.num_messages for episode in episodes])
    row, column = np.repeat(np.arange(len(episodes)), lengths), np.concatenate([np.arange(length) for length in lengths])
    shape = (len(episodes), int(lengths.max()))

    def padded(parts: Sequence[np.ndarray]) -> Tensor:
        values = np.zeros(shape, np.float32)
        values[row, column] = np.concatenate(parts)
        return torch.from_numpy(values)

    def flags(values: Sequence[bool]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.bool)

    mask = np.zeros(shape, bool)
    mask[row, column] = True
    observation: dict[str, Any] = {"text": np.concatenate([episode.observation["text"] for episode in episodes])}
    return EpisodeBatch(
        episodes=tuple(episodes),
        observation=observation,
        final_observation={},
        action=torch.zeros(len(row), 0),
        row=torch.from_numpy(row),
        column=torch.from_numpy(column),
        mask=torch.from_numpy(mask),
        reward=padded([episode.reward for episode in episodes]),
        behaviour_log_prob=padded([episode.log_prob.sum(axis=1) for episode in episodes]),
        group=torch.tensor([group.number for group in groups for _ in group.episodes]),
        terminated=flags([episode.terminated for episode in episodes]),
        truncated=flags([episode.truncated and not episode.terminated for episode in episodes]),
        success=flags([episode.success for episode in episodes]),
        greedy=flags([bool(episode.metadata.get("greedy", False)) for episode in episodes]),
        groups=tuple(groups),
        num_tokens=padded([np.array([len(turn.token_ids) for turn in episode.turns]) for episode in episodes]).long(),
    )


def token_rows(episodes: Sequence[AgentEpisode]) -> tuple[list[TokenRow], list[int]]:
    """Rows of tokens of all episodes, and the number of the episode that each belongs to."""
    rows = [(row, number) for number, episode in enumerate(episodes) for row in rows_of(episode.turns)]
    return [row for row, _ in rows], [number for _, number in rows]


def token_batch(rows: Sequence[TokenRow], owner: Sequence[int], credit: Credit) -> TokenBatch:
    """Spread the credit of turns [B, T] over their tokens [R, S]: each sampled token has its turn's advantage."""
    width = max(len(row.token_ids) for row in rows)
    shape = (len(rows), width)
    turn, mask, log_prob = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        count = len(row.token_ids)
        turn[number, :count], mask[number, :count], log_prob[number, :count] = row.turn, row.mask, row.log_prob
    turns, sampled, episode = torch.from_numpy(turn), torch.from_numpy(mask), torch.tensor(owner)
    learned = sampled & credit.mask[episode[:, None], turns]
    advantage = credit.advantage[episode[:, None], turns]
    return TokenBatch(
        sequences=tuple(TokenSequence(row.token_ids, row.mask, row.images) for row in rows),
        mask=learned,
        advantage=torch.where(learned, advantage, torch.zeros_like(advantage)),
        behaviour_log_prob=torch.from_numpy(log_prob),
        chunk_id=turns,
        positive=credit.positive[episode],
    )


def of_turns(values: Tensor | None, rows: Sequence[TokenRow], owner: Sequence[int], shape: tuple[int, int]) -> Tensor | None:
    """[R, S] of tokens → [B, T] sums over the sampled tokens of each turn."""
    if values is None:
        return None
    total = torch.zeros(shape, dtype=values.dtype)
    for number, (row, episode) in enumerate(zip(rows, owner, strict=True)):
        sampled = torch.from_numpy(np.flatnonzero(row.mask))
        total[episode].index_add_(0, torch.from_numpy(row.turn)[sampled], values[number, sampled])
    return total
