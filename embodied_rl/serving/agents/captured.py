"""What an agent program's requests leave for training: token ids as they were sampled, never decoded and tokenised again.

Shapes: P tokens of a prompt, n sampled tokens, S tokens of a trajectory, T turns of a session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.files import next_free, write_atomic

_FORMAT = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTurn:
    """One request and its answer. Raises ValueError when the arrays of sampled tokens differ in length."""

    completion_id: str
    """The id that the client received; rewards name it."""
    parent: int | None
    """Number of the turn whose conversation this one goes on with: its prompt and sampled tokens begin `prompt_ids`."""
    prompt_ids: np.ndarray
    """[P] int64, all that the model was given."""
    sampled_ids: np.ndarray
    """[n] int64, the stop token included."""
    log_prob: np.ndarray
    """[n] float32 under the model's own distribution: what training recomputes."""
    sampling_log_prob: np.ndarray
    """[n] float32 under the distribution that was drawn from (temperature, top-p)."""
    version: np.ndarray
    """[n] int64 of the weights that sampled each token."""
    finish_reason: str
    reward: float = 0.0
    """Given to this turn."""

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.sampled_ids, self.log_prob, self.sampling_log_prob, self.version)}
        if len(lengths) != 1:
            raise ValueError(
                f"Turn {self.completion_id}: sampled_ids, log_prob, sampling_log_prob and version differ in length: {lengths}."
            )

    @property
    def token_ids(self) -> np.ndarray:
        """[P + n] int64"""
        return np.concatenate([self.prompt_ids, self.sampled_ids])


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTrajectory:
    """A conversation from its first request to its last answer, as one sequence that a model can be trained on.

    Where a conversation was gone on with in two ways, each way is a trajectory; the tokens that they share are masked in all but the
    first, so that nothing is trained twice.
    """

    session: str
    turns: tuple[int, ...]
    """Numbers of its turns in the session."""
    token_ids: np.ndarray
    """[S] int64"""
    mask: np.ndarray
    """[S] bool: sampled by the model, and counted here."""
    log_prob: np.ndarray
    """[S] float32; 0 where mask is False."""
    sampling_log_prob: np.ndarray
    """[S] float32; 0 where mask is False."""
    version: np.ndarray
    """[S] int64; -1 where mask is False."""
    turn: np.ndarray
    """[S] int64: the turn that sampled each token; -1 where mask is False."""
    turn_reward: np.ndarray
    """[len(turns)] float32"""
    reward: float
    """The session's, and those of its turns."""

    @property
    def prompt_ids(self) -> np.ndarray:
        """[P] int64: what comes before the first token that is trained."""
        return self.token_ids[: int(np.argmax(self.mask)) if self.mask.any() else len(self.mask)]

    @property
    def sampled_ids(self) -> np.ndarray:
        """[mask.sum()] int64"""
        return self.token_ids[self.mask]


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedSession:
    """All turns of one session, in the order of their answers."""

    session: str
    turns: tuple[CapturedTurn, ...]
    reward: float
    """Given to the session as a whole."""
    ended_by: str
    """client: the client ended it. idle: no request came any more. close: the server went down."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """As it was given when the session was opened."""
    num_rewards: int = 0
    """How often a reward was given, to the session or to a turn; 0: the client gave none."""

    @property
    def total_reward(self) -> float:
        """The session's and its turns'."""
        return self.reward + sum(turn.reward for turn in self.turns)

    def trajectories(self) -> list[CapturedTrajectory]:
        """One for each conversation, in the order of their last turns; every sampled token is in the mask of exactly one."""
        parents = {turn.parent for turn in self.turns}
        counted: set[int] = set()
        return [self._trajectory(number, counted) for number in range(len(self.turns)) if number not in parents]

    def _trajectory(self, leaf: int, counted: set[int]) -> CapturedTrajectory:
        path = [leaf]
        while (parent := self.turns[path[0]].parent) is not None:
            path.insert(0, parent)
        token_ids = self.turns[leaf].token_ids
        mask, turn_of = np.zeros(len(token_ids), bool), np.full(len(token_ids), -1)
        log_prob, sampling = np.zeros(len(token_ids), np.float32), np.zeros(len(token_ids), np.float32)
        version = np.full(len(token_ids), -1)
        for number in path:
            turn = self.turns[number]
            if number in counted:
                continue
            counted.add(number)
            here = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids))
            mask[here], turn_of[here], log_prob[here], version[here] = True, number, turn.log_prob, turn.version
            sampling[here] = turn.sampling_log_prob
        rewards = [self.turns[number].reward for number in path]
        return CapturedTrajectory(
            session=self.session,
            turns=tuple(path),
            token_ids=token_ids,
            mask=mask,
            log_prob=log_prob,
            sampling_log_prob=sampling,
            version=version,
            turn=turn_of,
            turn_reward=np.array(rewards, np.float32),
            reward=self.reward + sum(rewards),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON; NaN (a log-probability that a backend cannot say) is null."""
        return {
            "format": _FORMAT,
            "session": self.session,
            "reward": self.reward,
            "ended_by": self.ended_by,
            "metadata": dict(self.metadata),
            "num_rewards": self.num_rewards,
            "turns": [
                {
                    "completion_id": turn.completion_id,
                    "parent": turn.parent,
                    "finish_reason": turn.finish_reason,
                    "reward": turn.reward,
                    "prompt_ids": turn.prompt_ids.tolist(),
                    "sampled_ids": turn.sampled_ids.tolist(),
                    "log_prob": _numbers(turn.log_prob),
                    "sampling_log_prob": _numbers(turn.sampling_log_prob),
                    "version": turn.version.tolist(),
                }
                for turn in self.turns
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CapturedSession:
        """The inverse of `to_dict`, bit by bit. Raises UserError for another format."""
        if data.get("format") != _FORMAT:
            raise UserError(f"A captured session has format {data.get('format')!r}; this version of embodied_rl reads {_FORMAT}.")
        turns = [
            CapturedTurn(
                completion_id=turn["completion_id"],
                parent=turn["parent"],
                prompt_ids=np.array(turn["prompt_ids"], np.int64),
                sampled_ids=np.array(turn["sampled_ids"], np.int64),
                log_prob=_floats(turn["log_prob"]),
                sampling_log_prob=_floats(turn["sampling_log_prob"]),
                version=np.array(turn["version"], np.int64),
                finish_reason=turn["finish_reason"],
                reward=turn["reward"],
            )
            for turn in data["turns"]
        ]
        return CapturedSession(
            session=data["session"],
            turns=tuple(turns),
            reward=data["reward"],
            ended_by=data["ended_by"],
            metadata=data["metadata"],
            num_rewards=int(data.get("num_rewards", 0)),
        )

    def save(self, folder: Path) -> Path:
        """Write ``<session>.json`` into a folder, whole or not at all; earlier files are kept, and this one is numbered then."""
        return write_atomic(next_free(folder / f"{self.session}.json"), json.dumps(self.to_dict(), allow_nan=False))


def read_captured(folder: Path) -> list[CapturedSession]:
    """The sessions that a proxy wrote into a folder, by name.

    Raises:
        UserError: a file is no captured session.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(CapturedSession.from_dict(json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"'{path}' is no captured session: {error}") from error
    return found


def _numbers(array: np.ndarray) -> list[float | None]:
    return [float(number) if np.isfinite(number) else None for number in array]


def _floats(numbers: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if number is None else number for number in numbers], np.float32)
