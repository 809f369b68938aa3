"""Turns of token ids, which make up an agent's episode, and the rows of tokens on which they are trained.

Shapes: T turns; P tokens of a prompt, n sampled ones; S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodied_rl.agents.parsing import ParsedAction
from embodied_rl.types import Episode, EpisodeGroup


@dataclass(frozen=True, eq=False)
class Turn:
    """One prompt, the answer sampled for it, and the result."""

    observation: str
    prompt_ids: np.ndarray
    """[P] int64"""
    token_ids: np.ndarray
    """[n] int64 sampled tokens, a stop token included."""
    log_prob: np.ndarray
    """[n] float32 of each token under the policy that sampled it, at `temperature`."""
    version: np.ndarray
    """[n] int64 version of the weights that sampled each token."""
    answer: str
    """The sampled tokens as text, for people and parsers."""
    parsed: ParsedAction
    reward: float
    """Simulator's reward minus the penalty of an invalid answer."""
    game_reward: float
    """Simulator's reward."""
    dropped: int = 0
    """Number of earlier turns that the prompt left out."""
    images: tuple[np.ndarray, ...] = ()
    """uint8 [H, W, 3] each: pictures of the prompt."""
    structure: str | None = None
    """Constraint on the answer (`GenerationRequest.structure`): log-probabilities are relative to the allowed tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that may end an answer with a structure."""
    temperature: float = 1.0
    """Training divides the logits by it, as sampling did."""


@dataclass(frozen=True, eq=False)
class AgentEpisode(Episode):
    """An episode whose messages are turns; `action` is the text for the simulator, [T] str."""

    turns: tuple[Turn, ...] = ()
    next_prompt: tuple[np.ndarray, tuple[np.ndarray, ...]] | None = None
    """[P] int64 tokens and pictures of the prompt after a truncated episode's last answer; None: it did not fit, no critic reads it, or
    nothing was cut off."""

    @property
    def game_return(self) -> float:
        return float(sum(turn.game_reward for turn in self.turns))


def episode_of(
    turns: Sequence[Turn], *, terminated: bool, truncated: bool, success: bool, seed: int, domain: str, final_text: str, greedy: bool
) -> AgentEpisode:
    """Put turns of different lengths into the arrays of an episode, [T, L] with L the largest number of tokens in a turn."""
    longest = max(len(turn.token_ids) for turn in turns)
    shape = (len(turns), longest)
    log_prob, mask, version = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, np.int64)
    for row, turn in enumerate(turns):
        count = len(turn.token_ids)
        log_prob[row, :count], mask[row, :count], version[row, :count] = turn.log_prob, True, turn.version
    return AgentEpisode(
        observation={"text": texts([turn.observation for turn in turns])},
        action=texts([turn.parsed.text for turn in turns]),
        log_prob=log_prob,
        reward=np.array([turn.reward for turn in turns], np.float32),
        terminated=terminated,
        truncated=truncated,
        success=success,
        seed=seed,
        domain=domain,
        policy_version=version,
        final_observation={"text": texts([final_text]).reshape(())},
        mask=mask,
        metadata={"greedy": greedy},
        turns=tuple(turns),
    )


def texts(values: Sequence[str]) -> np.ndarray:
    """[n] object array of `str`."""
    return np.fromiter(values, object, len(values))


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Tokens that are trained in one forward pass: a turn, or several that continue one another token by token."""

    token_ids: np.ndarray
    """[S] int64"""
    mask: np.ndarray
    """[S] bool: sampled by the policy."""
    log_prob: np.ndarray
    """[S] float32 under the policy that sampled; 0 where `mask` is False."""
    turn: np.ndarray
    """[S] int64 number of the turn in its episode; 0 where `mask` is False."""
    images: tuple[np.ndarray, ...] = ()
    """uint8 [H, W, 3] each, in the order of their tokens."""
    structures: tuple[tuple[int, int, str, tuple[int, ...]], ...] = ()
    """(first token, end, structure, stop tokens) of each answer with a structure."""
    temperature: float = 1.0
    """Of `log_prob`."""


def rows_of(turns: Sequence[Turn]) -> list[TokenRow]:
    """Rows of an episode. A turn whose prompt begins with the whole previous turn is appended to that turn's row, so that each token is
    evaluated once, after exactly the tokens that it was sampled after."""
    rows: list[list[tuple[int, Turn]]] = []
    known = np.zeros(0, np.int64)
    for number, turn in enumerate(turns):
        continues = bool(rows) and len(turn.prompt_ids) >= len(known) and np.array_equal(turn.prompt_ids[: len(known)], known)
        if continues and turn.temperature == rows[-1][-1][1].temperature:
            rows[-1].append((number, turn))
        else:
            rows.append([(number, turn)])
        known = np.concatenate([turn.prompt_ids, turn.token_ids])
    return [_row(parts) for parts in rows]


def _row(parts: Sequence[tuple[int, Turn]]) -> TokenRow:
    last = parts[-1][1]
    token_ids = np.concatenate([last.prompt_ids, last.token_ids]).astype(np.int64)
    mask, log_prob, turn = np.zeros(len(token_ids), bool), np.zeros(len(token_ids), np.float32), np.zeros(len(token_ids), np.int64)
    structures = []
    for number, part in parts:
        where = slice(len(part.prompt_ids), len(part.prompt_ids) + len(part.token_ids))
        mask[where], log_prob[where], turn[where] = True, part.log_prob, number
        if part.structure is not None:
            structures.append((where.start, where.stop, part.structure, part.stop_ids))
    return TokenRow(token_ids, mask, log_prob, turn, last.images, tuple(structures), last.temperature)


def agent_episodes(groups: Sequence[EpisodeGroup]) -> list[AgentEpisode]:
    """Episodes in the order of groups and members."""
    episodes = [episode for group in groups for episode in group.episodes]
    agents = [episode for episode in episodes if isinstance(episode, AgentEpisode)]
    assert len(agents) == len(episodes), "the agent's collector makes nothing else"
    return agents
