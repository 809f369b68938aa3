"""Turn-based text games: the shared parts of text adapters.

An adapter writes a `TextGame`; this module adds batches, limits and isolated random generators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.private_random import PrivateRandom
from embodied_rl.specs import SnapshotKind
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, VariableSpec


@dataclass(frozen=True)
class TextTurn:
    """Result of one action."""

    text: str
    """Next text for the player."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """Whether the environment's own limit ended the episode; `TextSim` has another limit."""
    success: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class TextGame(ABC):
    """One environment. It may use the process's generators (`random`, `numpy.random`): `TextSim` keeps a separate state for each."""

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Begin the episode of this seed; returns the first text."""

    @abstractmethod
    def step(self, action: str) -> TextTurn:
        """Play one action."""

    @abstractmethod
    def sample_action(self, random: np.random.Generator) -> str:
        """A random action; does not change the episode. Raises UserError if none can be drawn."""

    def close(self) -> None:  # noqa: B027  # a default
        """Release its resources."""


class TurnSim(SimEnv):
    """Text in, text out, one turn at a time. A subclass has the games: it begins one (`_begin`) and plays one action (`_play`)."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        max_turns: int | None,
        cuts: bool = True,
        instruction: str | None = None,
        snapshots: SnapshotKind = "replay",
        observation_bytes: int = 2**16,
        action_bytes: int = 2**14,
        parts: Mapping[str, VariableSpec] | None = None,
        can_render: bool = False,
    ) -> None:
        """Args:
        max_turns: most turns of an episode; None: unknown.
        cuts: truncate episodes there; False: the games enforce the limit themselves.
        snapshots: "exact" if a subclass has `_saved`, "replay" if an episode is a function of its seed and actions, else "none".
        observation_bytes, action_bytes: largest text in bytes (UTF-8); a longer one is an error and never shortened.
        """
        self._turns, self._limit = np.zeros(num_envs, np.int64), max_turns if cuts else None
        self.spec = SimSpec(
            task=task,
            observation={"text": VariableSpec("text", observation_bytes), **(parts or {})},
            action=ActionSpec.text(action_bytes),
            max_episode_steps=max_turns,
            instruction=instruction,
            reports_success=True,
            can_render=can_render,
            snapshots=snapshots,
        )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            text = self._begin(env_id, int(seed))
            self._turns[env_id] = 0
            self._show(env_id, text, out)

    def step(self, env_ids: Sequence[int], actions: Sequence[str] | np.ndarray, out: StepBuffers) -> None:
        for env_id, action in zip(env_ids, actions, strict=True):
            turn = self._play(env_id, str(action))
            self._turns[env_id] += 1
            late = self._limit is not None and self._turns[env_id] >= self._limit
            self._show(env_id, turn.text, out)
            out.reward[env_id] = turn.reward
            out.terminated[env_id] = turn.terminated
            out.truncated[env_id] = not turn.terminated and (turn.truncated or late)
            out.success[env_id] = turn.success
            out.info[env_id] = dict(turn.info)

    def _begin(self, env_id: int, seed: int) -> str:
        """Begin an episode; returns the first text."""
        raise NotImplementedError

    def _play(self, env_id: int, action: str) -> TextTurn:
        """Play one action."""
        raise NotImplementedError

    def _show(self, env_id: int, text: str, out: StepBuffers) -> None:
        out.observation["text"][env_id] = text


class TextSim(TurnSim):
    """`num_envs` text games in this process, each with its own state of the process's random generators."""

    def __init__(self, task: str, make: Callable[[], TextGame], num_envs: int, *, max_turns: int | None, **options: Any) -> None:
        """`make` makes one game, after the process's generators were seeded; `options`: see `TurnSim`.

        Raises UserError: from `make`; or `max_turns` below 1.
        """
        if max_turns is not None and max_turns < 1:
            raise UserError(f"{task}: max_turns must be >= 1 or null, got {max_turns}.")
        self._random = [PrivateRandom() for _ in range(num_envs)]
        self._games: list[TextGame] = []
        for random in self._random:
            with random.active(0):
                self._games.append(make())
        super().__init__(task, num_envs, max_turns=max_turns, **options)

    def sample_action(self, env_id: int, seed: int) -> str:
        return self._games[env_id].sample_action(np.random.default_rng(seed))

    def close(self) -> None:
        for game in self._games:
            game.close()
        self._games = []

    def _begin(self, env_id: int, seed: int) -> str:
        with self._random[env_id].active(seed % 2**32):
            return self._games[env_id].reset(seed)

    def _play(self, env_id: int, action: str) -> TextTurn:
        with self._random[env_id].active():
            return self._games[env_id].step(action)
