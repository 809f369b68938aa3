"""Rewards from outside the simulator: rules, models or services score whole episodes while the collector plays further ones."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal

import numpy as np

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.stopping import waiting
from embodied_rl.types import Episode

Score = Callable[[Episode], float]
"""Function from an episode to a reward beside the simulator's; must be deterministic for repeatable runs."""


def load_score(target: str, kwargs: Mapping[str, Any]) -> Score:
    """Load the function that a configuration names, or call its factory with `kwargs`. Raises UserError if there is none."""
    found = load_target(target)
    if kwargs or isinstance(found, type):
        try:
            found = found(**kwargs)
        except TypeError as error:
            raise UserError(f"hybrid.reward_worker.kwargs={dict(kwargs)} do not fit {target}: {error}.") from error
    if not callable(found):
        raise UserError(f"hybrid.reward_worker.target={target} cannot be called with an episode.")
    return found


def checked_score(score: Score, episode: Episode) -> float:
    """Score an episode. Raises ValueError if the score is NaN, infinite or not a number."""
    value = float(score(episode))
    if not math.isfinite(value):
        raise ValueError(f"the score is {value}")
    return value


class RewardWorker:
    """Scores episodes, one at a time: an actor of Ray's. It lies here because its process then imports no torch."""

    def __init__(self, target: str, kwargs: Mapping[str, Any]) -> None:
        self._score = load_score(target, kwargs)

    def score(self, episode: Episode) -> float:
        """Score an episode. Raises ValueError for a score that is no finite number, and any exception of the function."""
        return checked_score(self._score, episode)


def rewarded(episode: Episode, score: float, combine: Literal["add", "replace"]) -> Episode:
    """Add `score` to the episode's last reward, or replace the rewards by it; metadata gains ``score`` and ``simulator_return``.

    Within a chunk (`Episode.chunk_reward`) the score goes to the last executed step. For a language agent, penalties of invalid answers
    count as rewards, and `AgentEpisode.game_return` stays the simulator's.
    """
    reward = episode.reward.copy() if combine == "add" else np.zeros_like(episode.reward)
    reward[-1] += score
    chunks = episode.chunk_reward
    if chunks is not None and episode.executed is not None:
        chunks = chunks.copy() if combine == "add" else np.zeros_like(chunks)
        chunks[-1, np.flatnonzero(episode.executed[-1])[-1]] += score
    if isinstance(episode, AgentEpisode):
        turns = tuple(dataclasses.replace(turn, reward=float(value)) for turn, value in zip(episode.turns, reward, strict=True))
        metadata = {**episode.metadata, "score": score, "simulator_return": episode.game_return}
        return dataclasses.replace(episode, reward=reward, metadata=metadata, turns=turns)
    metadata = {**episode.metadata, "score": score, "simulator_return": episode.episode_return}
    return dataclasses.replace(episode, reward=reward, chunk_reward=chunks, metadata=metadata)


class Scorer(abc.ABC):
    """Scores episodes in the background: applies scores when they arrive, and gives up those that take too long."""

    def __init__(self, combine: Literal["add", "replace"], timeout_s: float) -> None:
        self._combine, self._timeout_s = combine, timeout_s
        self._pending: dict[int, tuple[Episode, float, Future[float]]] = {}
        self._num_begun = 0
        self._scores: list[float] = []
        self._seconds: list[float] = []
        self._num_scored = self._num_failed = 0

    def submit(self, episode: Episode) -> int:
        """Begin to score an episode; return its number, 0, 1, …, at once."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._pending[number] = episode, time.monotonic(), self._ask(number, episode)
        return number

    def ready(self) -> list[tuple[int, Episode | str]]:
        """(number, episode with its new rewards, or the reason for failure) of everything scored since the last call, by number."""
        settled: list[tuple[int, Episode | str]] = []
        now = time.monotonic()
        for number, (episode, since, future) in list(self._pending.items()):
            if not future.done() and now - since <= self._timeout_s:
                continue
            del self._pending[number]
            if not future.done():
                result: Episode | str = f"no score after {self._timeout_s:g} s (hybrid.reward_worker.timeout_s)"
            elif (error := future.exception()) is not None:
                result = self._reason(error)
            else:
                self._scores.append(future.result())
                self._seconds.append(now - since)
                result = rewarded(episode, future.result(), self._combine)
            self._num_failed += isinstance(result, str)
            self._num_scored += not isinstance(result, str)
            settled.append((number, result))
        return settled

    def wait(self, timeout_s: float) -> None:
        """Wait until a score is ready, at most `timeout_s`."""
        with waiting:
            wait([future for *_, future in self._pending.values()], timeout_s, FIRST_COMPLETED)

    def metrics(self) -> dict[str, float]:
        """Metrics ``reward_worker/…``: episodes scored and failed in the whole run, and their mean score since the last call;
        ``roles/score_s``: seconds per score."""
        figures = {"reward_worker/scored": float(self._num_scored), "reward_worker/failed": float(self._num_failed)}
        if self._scores:
            figures |= {"reward_worker/score": float(np.mean(self._scores)), "roles/score_s": float(np.mean(self._seconds))}
        self._scores, self._seconds = [], []
        return figures

    @abc.abstractmethod
    def close(self) -> None:
        """Stop scoring; unscored episodes are dropped."""

    @abc.abstractmethod
    def _ask(self, number: int, episode: Episode) -> Future[float]:
        """Let a worker score an episode."""

    def _reason(self, error: BaseException) -> str:
        """Why an episode has no score."""
        return f"{type(error).__name__}: {error}"


class ThreadScorer(Scorer):
    """Scores in threads of this process: for rules, and for services over the network."""

    def __init__(self, score: Score, *, num_workers: int, combine: Literal["add", "replace"], timeout_s: float) -> None:
        super().__init__(combine, timeout_s)
        self._score = score
        self._todo: queue.SimpleQueue[tuple[Future[float], Episode] | None] = queue.SimpleQueue()
        # Daemon threads: a service that never answers does not keep the process from ending.
        self._threads = [threading.Thread(target=self._work, name=f"reward_worker_{n}", daemon=True) for n in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)

    def _ask(self, number: int, episode: Episode) -> Future[float]:
        future: Future[float] = Future()
        self._todo.put((future, episode))
        return future

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            future, episode = task
            try:
                future.set_result(checked_score(self._score, episode))
            except Exception as error:  # any exception of a user's function becomes a reason, not the end of the run
                future.set_exception(error)
