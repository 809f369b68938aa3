"""Any advantage and loss of the tables on groups of text episodes: a language agent learns from its own turns."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.agents.dialogue import write_dialogues
from embodied_rl.agents.turns import AgentEpisode, TokenRow, agent_episodes, rows_of
from embodied_rl.algorithms.episode_method import Credit, EpisodeBatch, EpisodeMethod, EpisodeValues
from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.learning.episode_objectives import TokenObjective
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.methods.learners import PlayingLearner, Prepared
from embodied_rl.methods.streams import Stream, prefixed
from embodied_rl.methods.warm_start import NO_START, WarmStart
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.types import EpisodeGroup

DIALOGUES = "dialogues.html"
"""File in a run's folder."""
_DIALOGUES, _DOMAIN_DIALOGUES = 12, 4
"""Number of episodes written at the end: of a run's only domain, and of each of several domains."""


class TokenLearner(PlayingLearner[EpisodeMethod]):
    """One language policy that plays one or several domains of text; each domain values its episodes by its own configuration."""

    policy: LanguagePolicy

    def __init__(
        self,
        config: TrainConfig,
        configs: Mapping[str, TrainConfig],
        policy: LanguagePolicy,
        sampling: Collection[str],
        ranks: RankHost | None = None,
    ) -> None:
        """`config`: for the update; `configs`: {domain: its own}; `sampling`: kinds of backends whose samples are learned from."""
        groups = config.algorithm.groups
        assert groups is not None, "the configuration was checked"
        super().__init__(config, configs, policy, EpisodeMethod, TokenObjective(policy, config.algorithm), ranks)
        self.generator: Generator | None = None
        """Generator that a warm start publishes to: that of the whole run."""
        self.warm_starts: dict[str, WarmStart] = {}
        # Sampled in the same precision by the same code, with the weights of this very version.
        self._trust_sampled = set(sampling) == {"tokens_torch"} and groups.max_staleness == 0
        self._last: dict[str, list[AgentEpisode]] = {}

    def valued(self, method: EpisodeMethod, experience: Sequence[EpisodeGroup]) -> Prepared:
        return prepare_turns(method, self.learner, experience, trust_sampled=self._trust_sampled)

    @property
    def wants_start(self) -> bool:
        return any(start.wanted for start in self.warm_starts.values())

    def begin(self, version: int) -> None:
        """See `PolicyLearner.begin`: clones the players' episodes of all domains together, so that no domain is forgotten."""
        wanted = {name: start for name, start in self.warm_starts.items() if start.wanted}
        if wanted:
            before = {name: start.success() for name, start in wanted.items()}
            sequences = [sequence for start in wanted.values() for sequence in start.sequences()]
            options = next(iter(wanted.values())).options
            loss = self.learner.clone(
                sequences,
                num_epochs=options.num_epochs,
                minibatch_rows=options.minibatch_rows,
                learning_rate=options.learning_rate,
                seed=self.config.seed,
            )
            assert self.generator is not None, "a learner with warm starts publishes"
            self.generator.publish(version)
            for name, start in wanted.items():
                start.note(before[name], start.success(), loss)
        self.learner.keep_reference()

    def note(self, stream: Stream, groups: Sequence[EpisodeGroup]) -> None:
        if groups:
            self._last[stream.name] = agent_episodes(groups)[: _DOMAIN_DIALOGUES if stream.domain else _DIALOGUES]

    def finish(self, run_dir: Path) -> None:
        """See `PolicyLearner.finish`: writes the last training episodes."""
        page, decode = Path(DIALOGUES), functools.partial(self.policy.tokenizer.decode, skip_special_tokens=False)
        for name, episodes in self._last.items():
            path = run_dir / (page if "" in self.methods else page.with_stem(f"{page.stem}-{name}"))
            write_dialogues(path, episodes, decode, f"{name}: the last training episodes")

    def metrics(self) -> dict[str, float]:
        figures = {key: value for name, start in self.warm_starts.items() for key, value in prefixed(name, start.figures).items()}
        return prefixed("warm_start", figures)

    def state_dict(self) -> dict[str, Any]:
        starts = {name: start.state_dict() for name, start in self.warm_starts.items()}
        episodes = {name: method.state_dict() for name, method in self.methods.items()}
        if "" in episodes:
            return {"episodes": episodes[""], "warm_start": starts.get("", NO_START)}
        return {"episodes": episodes, "warm_starts": starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, method in self.methods.items():
            method.load_state_dict(state["episodes"][name] if name else state["episodes"])
        for name, start in self.warm_starts.items():
            start.load_state_dict(state["warm_starts"][name] if name else state["warm_start"])


def prepare_turns(algorithm: EpisodeMethod, learner: Learner, groups: Sequence[EpisodeGroup], *, trust_sampled: bool) -> Prepared:
    """Credit of the turns of groups, and the turns' tokens.

    Args:
        trust_sampled: the sampled tokens' log-probabilities are those of the policy at the start of the update (the generator
            computes as the trainer does, and nothing is stale), so they are not computed again.
    """
    turns, (rows, owner) = turn_batch(groups), token_rows(agent_episodes(groups))
    # The sequences do not depend on the credit, and a KL term in the reward needs their log-probabilities first.
    everything = Credit(torch.zeros(turns.shape), turns.mask, torch.zeros(turns.shape), None, turns.success, {})
    tokens = token_batch(rows, owner, everything)
    present = reference = of_states = None
    if learner.has_reference:
        reference = learner.token_log_probs(tokens.sequences, of_reference=True)
    final = torch.zeros(turns.shape[0])
    if algorithm.advantage.returns_value_target:
        # A copy of the prompt's last token stands for an answer that was not sampled; the value before it is that of the cut-off state.
        after = {number: one.next_prompt for number, one in enumerate(agent_episodes(groups)) if one.next_prompt is not None}
        ends = [TokenSequence.of(token_ids, token_ids[-1:], images) for token_ids, images in after.values()]
        of_all = learner.token_values([*tokens.sequences, *ends])
        final[torch.tensor(list(after), dtype=torch.int64)] = of_all[1][len(rows) :].sum(1)
        present, of_states = (found[: len(rows), : tokens.mask.shape[1]] for found in of_all)
    if not learner.needs_present:
        present = None
    elif trust_sampled:
        present = tokens.behaviour_log_prob
    elif present is None:
        present = learner.token_log_probs(tokens.sequences)
    values = EpisodeValues(torch.zeros(turns.shape), final)
    if of_states is not None:
        of_states = of_states * _first_tokens(tokens.mask, tokens.chunk_id)
        values = replace(values, value=of_turns(of_states, rows, owner, turns.shape))
    divergence = algorithm.kl.divergence(present, reference)
    credit = algorithm.prepare(turns, values, None if divergence is None else of_turns(divergence, rows, owner, turns.shape))
    learned = token_batch(rows, owner, credit)
    sampled = {"behaviour_log_prob": learned.behaviour_log_prob, "mask": learned.mask, "chunk_id": learned.chunk_id}
    advantage, figures = algorithm.corrected(learned.advantage, present, **sampled)
    learned = replace(learned, advantage=advantage, present=present, reference=reference)
    return Prepared(learned, int(credit.mask.sum()), {**credit.metrics, **figures})


def turn_batch(groups: Sequence[EpisodeGroup]) -> EpisodeBatch:
    """Groups in the form that advantages read: a row is an episode, an entry one of its turns; observations are texts, for anchors."""
    episodes = agent_episodes(groups)
    text = np.concatenate([episode.observation["text"] for episode in episodes])
    log_prob = [episode.log_prob.sum(axis=1) for episode in episodes]
    batch = EpisodeBatch.of_steps(groups, ({"text": text}, {}), torch.zeros(len(text), 0), log_prob)
    tokens = torch.tensor([len(turn.token_ids) for episode in episodes for turn in episode.turns])
    return replace(batch, num_tokens=batch.scatter(tokens))


def token_rows(episodes: Sequence[AgentEpisode]) -> tuple[list[TokenRow], list[int]]:
    """Token rows of all episodes, and the index of each row's episode."""
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
    critic = {}
    if credit.returns is not None:
        of_states = {"returns": credit.returns, "value": credit.value}
        critic = {name: value[episode[:, None], turns] for name, value in of_states.items()}
        critic["valued"] = _first_tokens(learned, turns)
    return TokenBatch(
        sequences=tuple(TokenSequence(row.token_ids, row.mask, row.images, row.structures, row.temperature) for row in rows),
        mask=learned,
        advantage=torch.where(learned, advantage, torch.zeros_like(advantage)),
        behaviour_log_prob=torch.from_numpy(log_prob),
        chunk_id=turns,
        positive=credit.positive[episode],
        **critic,
    )


def _first_tokens(sampled: Tensor, turns: Tensor) -> Tensor:
    """[R, S] bool: first of each turn's sampled tokens, which are contiguous."""
    first = sampled.clone()
    first[:, 1:] &= ~sampled[:, :-1] | (turns[:, 1:] != turns[:, :-1])
    return first


def of_turns(values: Tensor, rows: Sequence[TokenRow], owner: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Sum values of tokens [R, S] over the sampled tokens of each turn → [B, T]."""
    total = torch.zeros(shape, dtype=values.dtype)
    for number, (row, episode) in enumerate(zip(rows, owner, strict=True)):
        sampled = torch.from_numpy(np.flatnonzero(row.mask))
        total[episode].index_add_(0, torch.from_numpy(row.turn)[sampled], values[number, sampled])
    return total
