"""Turn-based text games: the shared parts of text adapters.

An adapter writes a `TextGame`; this module adds batches, limits, snapshots and isolated random generators.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, require_known
from embodied_rl.registry import load_target
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

    max_turns: int | None = None
    """Most turns of an episode by the game's own rules; None: unknown."""
    instruction: str | None = None
    """The task, for an agent's prompt."""

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Begin the episode of this seed; returns the first text."""

    @abstractmethod
    def step(self, action: str) -> TextTurn:
        """Play one action."""

    @abstractmethod
    def sample_action(self, random: np.random.Generator) -> str:
        """A random action; does not change the episode. Raises UserError if none can be drawn."""

    def draw(self, size: int) -> np.ndarray:
        """For games with pictures: [H, W, 3] uint8, whose longer side has about `size` pixels."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """For games with exact snapshots: everything that the rest of the episode depends on, except the process's generators, in plain
        values and arrays."""
        raise NotImplementedError

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, which may have further entries. Raises SnapshotError, or another exception if it is invalid."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  # a default
        """Release its resources."""


class TextSim(SimEnv):
    """`num_envs` text games in this process: text in, text out, one turn at a time."""

    def __init__(
        self,
        task: str,
        make: Callable[[], TextGame],
        num_envs: int,
        *,
        max_turns: int | None = None,
        instruction: str | None = None,
        snapshots: SnapshotKind = "replay",
        observation_bytes: int = 2**16,
        action_bytes: int = 2**14,
        parts: Mapping[str, VariableSpec] | None = None,
        can_render: bool = False,
        isolated: bool = True,
    ) -> None:
        """Args:
        make: makes one game, after the process's generators were seeded.
        max_turns: turns after which episodes are truncated; None: only the games end them.
        instruction: None: the game's own.
        snapshots: "exact" if the games have a `state`, "replay" if an episode is a function of its seed and actions, else "none".
        observation_bytes, action_bytes: largest text in bytes (UTF-8); a longer one is an error and never shortened.
        parts: further parts of the observation.
        isolated: keep a separate state of the process's generators for each game; False: the games use none of them.

        Raises UserError: from `make`; or `max_turns` below 1.
        """
        if max_turns is not None and max_turns < 1:
            raise UserError(f"{task}: max_turns must be >= 1 or null, got {max_turns}.")
        self._random = [PrivateRandom() if isolated else None for _ in range(num_envs)]
        self._games: list[TextGame] = []
        try:
            for env_id in range(num_envs):
                with self._private(env_id, 0):
                    self._games.append(make())
        except BaseException:
            self.close()
            raise
        self._turns, self._limit = np.zeros(num_envs, np.int64), max_turns
        self.spec = SimSpec(
            task=task,
            observation={"text": VariableSpec("text", observation_bytes), **(parts or {})},
            action=ActionSpec.text(action_bytes),
            max_episode_steps=max_turns or self._games[0].max_turns,
            instruction=instruction or self._games[0].instruction,
            reports_success=True,
            can_render=can_render,
            snapshots=snapshots,
        )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            with self._private(env_id, int(seed) % 2**32):
                text = self._games[env_id].reset(int(seed))
            self._turns[env_id] = 0
            self._show(env_id, text, out)

    def step(self, env_ids: Sequence[int], actions: Sequence[str] | np.ndarray, out: StepBuffers) -> None:
        for env_id, action in zip(env_ids, actions, strict=True):
            with self._private(env_id):
                turn = self._games[env_id].step(str(action))
            self._turns[env_id] += 1
            late = self._limit is not None and self._turns[env_id] >= self._limit
            self._show(env_id, turn.text, out)
            out.reward[env_id] = turn.reward
            out.terminated[env_id] = turn.terminated
            out.truncated[env_id] = not turn.terminated and (turn.truncated or late)
            out.success[env_id] = turn.success
            out.info[env_id] = dict(turn.info)

    def sample_action(self, env_id: int, seed: int) -> str:
        """A random action that follows from the seed, also of a game that draws it from the process's generators."""
        private: AbstractContextManager[None] = nullcontext() if self._random[env_id] is None else PrivateRandom().active(seed)
        with private:
            return self._games[env_id].sample_action(np.random.default_rng(seed))

    def close(self) -> None:
        for game in self._games:
            game.close()
        self._games = []

    def _private(self, env_id: int, seed: int | None = None) -> AbstractContextManager[None]:
        random = self._random[env_id]
        return nullcontext() if random is None else random.active(seed)

    def _show(self, env_id: int, text: str, out: StepBuffers) -> None:
        out.observation["text"][env_id] = text

    def _saved(self, env_id: int) -> dict[str, Any]:
        if self.spec.snapshots != "exact":
            return super()._saved(env_id)
        random = self._random[env_id]
        turns = {} if self._limit is None else {"steps": int(self._turns[env_id])}
        return turns | self._games[env_id].state() | ({} if random is None else {"random": random.state})

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        if self.spec.snapshots != "exact":
            super()._take_up(env_id, saved)
        self._turns[env_id] = saved["steps"] if self._limit is not None else 0
        with self._private(env_id, 0):
            self._games[env_id].set_state(saved)
        if (random := self._random[env_id]) is not None:
            random.state = saved["random"]


def check_arguments(entry: str | Callable[..., Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Raise UserError naming an argument that another package's environment does not take, and would ignore. `entry`: its class or name."""
    parameters = inspect.signature(load_target(entry) if isinstance(entry, str) else entry).parameters.values()
    named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for name in kwargs:
        require_known(name, named, f"{what} does not take '{name}'.")
