"""Sessions: requests of an agent program, the earlier answer that a new request continues, and the result for training.

Shapes: P tokens of a prompt, n sampled tokens, S tokens of a trajectory, T turns of a session.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import Limits, UserError
from embodied_rl.files import next_free, write_atomic
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.reading import parse_json, read_regular
from embodied_rl.serving.http_server import HttpProblem

_FORMAT = 1
_OF_SESSION = ("session", "reward", "ended_by", "metadata", "num_rewards")
_OF_TURN: Mapping[str, type[np.generic] | None] = {
    **dict.fromkeys(("completion_id", "parent", "finish_reason", "reward")),
    **dict.fromkeys(("prompt_ids", "sampled_ids"), np.int64),
    **dict.fromkeys(("log_prob", "sampling_log_prob"), np.float32),
    "version": np.int64,
}
"""{field in a file: dtype of its array, None for a plain value}; in the file's order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTurn:
    """One request and its answer. Raises ValueError if the arrays of sampled tokens differ in length."""

    completion_id: str
    """Id that the client received; rewards refer to it."""
    parent: int | None
    """Index of the turn that this one continues: its prompt and sampled tokens begin `prompt_ids`."""
    prompt_ids: np.ndarray
    """[P] int64 the model's whole input."""
    sampled_ids: np.ndarray
    """[n] int64, the stop token included."""
    log_prob: np.ndarray
    """[n] float32 under the model's own distribution."""
    sampling_log_prob: np.ndarray
    """[n] float32 under the distribution of the draws (temperature, top-p)."""
    version: np.ndarray
    """[n] int64 version of the weights that sampled each token."""
    finish_reason: str
    reward: float = 0.0
    """Reward of this turn."""
    structure: str | None = None
    """Constraint on the answer (`GenerationRequest.structure`): `log_prob` is relative to the allowed tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that may end an answer with a structure."""

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.sampled_ids, self.log_prob, self.sampling_log_prob, self.version)}
        if len(lengths) != 1:
            raise ValueError(
                f"Turn {self.completion_id}: sampled_ids, log_prob, sampling_log_prob and version differ in length: {lengths}."
            )

    def to_dict(self) -> dict[str, Any]:
        kept = {} if self.structure is None else {"structure": self.structure, "stop_ids": list(self.stop_ids)}
        return {**{name: _plain(vars(self)[name]) for name in _OF_TURN}, **kept}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CapturedTurn:
        own: dict[str, Any] = {name: data[name] if kind is None else np.array(data[name], kind) for name, kind in _OF_TURN.items()}
        return CapturedTurn(**own, structure=data.get("structure"), stop_ids=tuple(data.get("stop_ids", ())))

    @property
    def token_ids(self) -> np.ndarray:
        """[P + n] int64"""
        return np.concatenate([self.prompt_ids, self.sampled_ids])


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTrajectory:
    """A conversation from its first request to its last answer, as one training sequence.

    If a conversation was continued in two ways, each way is a trajectory. Only the first one trains their shared tokens.
    """

    session: str
    turns: tuple[int, ...]
    """Indices of its turns in the session."""
    token_ids: np.ndarray
    """[S] int64"""
    mask: np.ndarray
    """[S] bool: sampled by the model, and trained in this trajectory."""
    log_prob: np.ndarray
    """[S] float32; 0 where mask is False."""
    sampling_log_prob: np.ndarray
    """[S] float32; 0 where mask is False."""
    version: np.ndarray
    """[S] int64; -1 where mask is False."""
    turn: np.ndarray
    """[S] int64: index of the turn that sampled each token; -1 where mask is False."""
    turn_reward: np.ndarray
    """[len(turns)] float32"""
    reward: float
    """Session's reward plus those of its turns."""

    @property
    def prompt_ids(self) -> np.ndarray:
        """[P] int64: tokens before the first trained one."""
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
    """Reward of the session as a whole."""
    ended_by: str
    """client: the client ended it. idle: requests stopped coming. close: the server shut down."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata from the opening of the session."""
    num_rewards: int = 0
    """Number of rewards given to the session or a turn; 0: the client gave none."""

    @property
    def total_reward(self) -> float:
        """Reward of the session plus its turns'."""
        return self.reward + sum(turn.reward for turn in self.turns)

    def trajectories(self) -> list[CapturedTrajectory]:
        """One per conversation, in the order of their last turns; every sampled token is in the mask of exactly one."""
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
        """As JSON; NaN (an unknown log-probability of the backend) becomes null."""
        own = {name: vars(self)[name] for name in _OF_SESSION}
        return {"format": _FORMAT, **own, "metadata": dict(self.metadata), "turns": [turn.to_dict() for turn in self.turns]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CapturedSession:
        """Parse a `to_dict`, bit by bit. Raises UserError for another format."""
        if data.get("format") != _FORMAT:
            raise UserError(f"A captured session has format {data.get('format')!r}; this version of embodied_rl reads {_FORMAT}.")
        own = {name: {"num_rewards": 0, **data}[name] for name in _OF_SESSION}
        return CapturedSession(**own, turns=tuple(map(CapturedTurn.from_dict, data["turns"])))

    def save(self, folder: Path) -> Path:
        """Write ``<session>.json`` into a folder, completely or not at all; if the file exists, a number is added."""
        return write_atomic(next_free(folder / f"{self.session}.json"), json.dumps(self.to_dict(), allow_nan=False))


def read_captured(folder: Path) -> list[CapturedSession]:
    """Sessions in a proxy's folder, by name. Raises UserError: a file is not a captured session."""
    found = []
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            found.append(CapturedSession.from_dict(parse_json(read_regular(path))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"'{path}' is not a captured session: {error}") from error
    return found


def _plain(value: object) -> object:
    """Value for JSON: null for a number that is not finite."""
    if not isinstance(value, np.ndarray):
        return value
    return [number if math.isfinite(number) else None for number in value.tolist()]


_MARK = "\u2402turn\u2403"
"""Placeholder for an earlier answer, to find what a template writes around it; templates and tokenizers do not parse it."""


@dataclass(frozen=True)
class SessionSampling:
    """Sampling of every answer of a session, whatever its program requests, because training must know the distribution."""

    seed: int
    """Seed that, with a request's number in its session, determines all its randomness."""
    temperature: float = 1.0
    """Temperature; 0 selects the likeliest tokens."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""

    def request_seed(self, number: int) -> int:
        """Seed of the session's request number 0, 1, …: 63 bits."""
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0] >> 1)


class Session:
    """One agent program's session. Thread-safe: the program may send requests in parallel."""

    def __init__(self, name: str, metadata: Mapping[str, Any] | None = None, sampling: SessionSampling | None = None) -> None:
        self.name, self.metadata, self.sampling = name, dict(metadata or {}), sampling
        self.last_used = time.monotonic()
        self.in_flight = 0
        self._lock = threading.RLock()
        self._turns: list[CapturedTurn] = []
        self._by_history: dict[str, int] = {}
        self._recalled: dict[str, tuple[dict[str, Any], ...]] = {}
        self._reward = 0.0
        self._num_rewards = 0
        self._num_requests = 0
        self._reward_ids: set[str] = set()
        self._captured: CapturedSession | None = None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def total_reward(self) -> float:
        """Sum of all rewards so far, the turns' included."""
        with self._lock:
            return self._reward + sum(turn.reward for turn in self._turns)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def next_request(self) -> int:
        """Number of the next request: 0, 1, …"""
        with self._lock:
            self._num_requests += 1
            return self._num_requests - 1

    def begin(self) -> None:
        """Admit a request. Raises HttpProblem 409 if the session has ended."""
        with self._lock:
            if self._captured is not None:
                raise HttpProblem(409, "session_ended", f"Session '{self.name}' has ended; open another one.")
            self.in_flight += 1
            self.last_used = time.monotonic()

    def release(self) -> None:
        """Mark an admitted request as over, however it ended."""
        with self._lock:
            self.in_flight -= 1
            self.last_used = time.monotonic()

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, tokenizer: ChatTokenizer
    ) -> tuple[np.ndarray, int | None]:
        """([P] token ids of a request: those of the longest earlier conversation that its messages extend, unchanged, then the new part;
        the number of that conversation's last turn).

        If the template hides the position of an earlier answer, or the messages extend none, everything is tokenised anew and a new
        conversation begins. Raises UserError: the template refuses the messages.
        """
        keys = history_keys(messages, tools)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] != "assistant" or (number := self._by_history.get(keys[length - 1])) is None:
                continue
            turn = self._turns[number]
            added = added_text(messages, length, tools, tokenizer, turn)
            if added is not None:
                return np.concatenate([turn.token_ids, tokenizer.encode(added)]), number
        return tokenizer.chat(messages, tools=tools), None

    def add(self, turn: CapturedTurn, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Store an answer. `messages`: its conversation, itself included as the client will send it back, after `plain_message`."""
        with self._lock:
            if self._captured is not None:
                raise HttpProblem(409, "session_ended", f"Session '{self.name}' ended while this was sampled.")
            self._turns.append(turn)  # before its number can be found: `prompt` takes no lock
            self._by_history[history_keys(messages, tools)[-1]] = len(self._turns) - 1

    def recall(self, completion_id: str) -> tuple[dict[str, Any], ...] | None:
        """Messages that `remember` stored for an answer; None if there are none."""
        with self._lock:
            return self._recalled.get(completion_id)

    def remember(self, completion_id: str, messages: Sequence[dict[str, Any]]) -> None:
        """Store an answer's conversation, itself included, for a request that names only the answer."""
        with self._lock:
            self._recalled[completion_id] = tuple(messages)

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def give(self, reward: float, completion_id: str | None = None, reward_id: str | None = None) -> float:
        """Add a reward to the session or to one turn, once per `reward_id`. Returns the sum so far. Raises HttpProblem: 404 for an answer
        of another session, 409 after the session's end."""
        with self._lock:
            self.last_used = time.monotonic()
            if reward_id is None or reward_id not in self._reward_ids:
                if self._captured is not None:
                    raise HttpProblem(409, "session_ended", f"Session '{self.name}' has ended; its reward cannot change.")
                number = next((place for place, turn in enumerate(self._turns) if turn.completion_id == completion_id), None)
                if completion_id is None:
                    self._reward += reward
                elif number is not None:
                    self._turns[number] = replace(self._turns[number], reward=self._turns[number].reward + reward)
                else:
                    known = [turn.completion_id for turn in self._turns]
                    raise HttpProblem(404, "unknown_turn", f"Session '{self.name}' has no answer '{completion_id}'.", choices=known)
                self._num_rewards += 1
                self._reward_ids.update([] if reward_id is None else [reward_id])
            return self.total_reward

    def captured(self, ended_by: str = "") -> CapturedSession:
        """The session so far."""
        with self._lock:
            return self._captured or CapturedSession(
                session=self.name,
                turns=tuple(self._turns),
                reward=self._reward,
                ended_by=ended_by,
                metadata=self.metadata,
                num_rewards=self._num_rewards,
            )

    def end(self, ended_by: str) -> tuple[CapturedSession, bool]:
        """End the session; returns (what was captured, whether this call ended it)."""
        with self._lock:
            first = self._captured is None
            self._captured = self.captured(ended_by)
            return self._captured, first


def history_keys(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """For the conversation up to each message a key that is equal for conversations that a model sees as equal; spaces around an answer,
    which clients strip, are ignored. In one pass: conversations have thousands of messages."""
    so_far, keys = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()), []
    for message in messages:
        plain = {**message, "content": message["content"].strip()} if message["role"] == "assistant" else message
        so_far.update(b"\n" + json.dumps(plain, sort_keys=True).encode())  # JSON has no such line breaks
        keys.append(so_far.hexdigest())
    return keys


def added_text(
    messages: Sequence[Mapping[str, Any]],
    length: int,
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: ChatTokenizer,
    turn: CapturedTurn,
) -> str | None:
    """Text that the template writes after the answer `messages[length - 1]`, including the start of the next answer; None: unknown.

    Leaves out the stop token if the model sampled it.
    """
    marked = [*messages[: length - 1], {"role": "assistant", "content": _MARK}, *messages[length:]]
    try:
        pieces = tokenizer.chat_text(marked, tools=tools).split(_MARK)
    except UserError:  # the template misses the calls that a tool's result answers
        return None
    if len(pieces) != 2:
        return None
    added = pieces[1]
    if turn.finish_reason == "stop" and len(turn.sampled_ids):
        added = added.removeprefix(tokenizer.decode(turn.sampled_ids[-1:], skip_special_tokens=False))
    return added


@dataclass
class SessionLimits(Limits):
    """Limits on the number and duration of sessions. Raises UserError for a limit that is not above 0 and finite."""

    max_sessions: int = 1024
    """Most open sessions."""
    idle_s: float = 3600.0
    """Seconds without a request after which a session ends, as ``idle``."""


_MOST_COUNTED = 2**16


@dataclass
class SessionBook:
    """All open sessions by name, and by the API key of their agent program."""

    limits: SessionLimits
    open_to_any_key: bool
    """Whether an unregistered key opens a session of the same name."""
    sessions: dict[str, Session] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Number of sessions that each of the `_MOST_COUNTED` free keys opened last has had."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def open(self, name: str, key: str, metadata: Mapping[str, Any] | None = None, sampling: SessionSampling | None = None) -> Session:
        """Open a session behind a key. Raises HttpProblem if there is no room, or the name is taken."""
        with self.lock:
            if len(self.sessions) >= self.limits.max_sessions:
                message = f"{len(self.sessions)} sessions are open, the most of this proxy; end some."
                raise HttpProblem(429, "too_many_sessions", message, headers={"Retry-After": "2"})
            if name in self.sessions:
                raise HttpProblem(409, "session_exists", f"Session '{name}' is open already.")
            self.keys[key] = name
            self.sessions[name] = Session(name, metadata, sampling)
            return self.sessions[name]

    def by_key(self, key: str | None) -> Session:
        """Session of a key. Raises HttpProblem 401 for an invalid key."""
        if key is None:
            raise HttpProblem(401, "unauthorized", "Send an API key ('Authorization: Bearer KEY'): it identifies the session of a request.")
        with self.lock:
            if key in self.keys:
                return self.sessions[self.keys[key]]
            if not self.open_to_any_key:
                raise HttpProblem(401, "unauthorized", "This API key belongs to no open session. Open one with POST /v1/sessions.")
            number = self.counts.get(key, 0) + 1
            session = self.open(key if number == 1 else f"{key}.{number}", key)
            self.counts.pop(key, None)  # not if the session was refused
            self.counts[key] = number
            if len(self.counts) > _MOST_COUNTED:
                del self.counts[next(iter(self.counts))]
            return session

    def by_name(self, name: str) -> Session:
        """Session by its name, or by its free key. Raises HttpProblem 404."""
        with self.lock:
            found = self.sessions.get(self.keys.get(name, name) if self.open_to_any_key else name)
        if found is None:
            raise HttpProblem(404, "unknown_session", f"Session '{name}' is not open.")
        return found

    def forget(self, session: Session) -> None:
        """Forget an ended session, which frees its key."""
        with self.lock:
            self.sessions.pop(session.name, None)
            self.keys = {key: name for key, name in self.keys.items() if name != session.name}

    def idle(self) -> list[Session]:
        """Sessions without a request for longer than `limits.idle_s`."""
        now = time.monotonic()
        with self.lock:
            return [s for s in self.sessions.values() if s.in_flight == 0 and now - s.last_used > self.limits.idle_s]
