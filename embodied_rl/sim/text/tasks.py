"""Any text environment with GEM's five methods as a simulator, such as our own tasks with verifiable rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.text.turns import TextTurn, TurnSim

_TOLERANCE = 1e-9


class TextTask(Protocol):
    """One environment with GEM's five methods; the simulator also reads `instruction` and `max_turns` if present."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin the episode of this seed; returns (the agent's text, info)."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play an action; returns (the agent's text, reward, terminated, truncated, info).

        ``info["success"]`` tells whether the episode succeeded; without it an episode succeeds if its rewards add up to `success_return`.
        ``info["failure"]``: a sentence why the answer could not be judged; the episode ends and is excluded from learning.
        """

    def sample_random_action(self) -> str:
        """An arbitrary action."""

    def get_state(self) -> dict[str, Any]:
        """Everything that the rest of the episode depends on, in plain values and arrays."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""


PLACEHOLDER = "package.module:Class"
"""Value in configs/sim/text_task.yaml that the user replaces."""


def make(
    num_envs: int,
    environment: str,
    task: str | None = None,
    success_return: float = 1.0,
    observation_bytes: int = 2**16,
    action_bytes: int = 2**16,
    **kwargs: Any,
) -> TaskSim:
    """`num_envs` environments of a class in this process.

    Args:
        environment: ``package.module:Class`` of a class with GEM's five methods; it receives ``**kwargs``.
        task: a name for it; None: the class's.
        success_return: see `TextTask.step`.
        observation_bytes, action_bytes: largest text in bytes (UTF-8).

    Raises UserError: the class cannot be loaded, or lacks a method.
    """
    if environment == PLACEHOLDER:
        raise UserError(
            "sim=text_task plays your own text environment (docs/text_environments.md). Set "
            "sim.kwargs.environment=my_package.my_module:MyTask policy=language generation=tokens_torch algorithm=grpo"
        )
    one = functools.partial(load_target(environment), **kwargs)
    return TaskSim(task or environment.rpartition(":")[2], num_envs, one, success_return, room_bytes=(observation_bytes, action_bytes))


class TaskSim(TurnSim):
    """`num_envs` text tasks in this process."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        make_one: Callable[[], TextTask],
        success_return: float = 1.0,
        *,
        room_bytes: tuple[int, int] = (2**16, 2**16),
    ) -> None:
        """See `make`; `room_bytes`: largest observation and largest action in bytes."""
        self._tasks = [make_one() for _ in range(num_envs)]
        self._returns = np.zeros(num_envs)
        self._success_return = success_return
        first = self._tasks[0]
        for name in ("reset", "step", "sample_random_action", "get_state", "set_state"):
            if not callable(getattr(first, name, None)):
                raise UserError(
                    f"Environment '{task}' ({type(first).__name__}) has no method '{name}'; GEM's five are reset, step, "
                    "sample_random_action, get_state and set_state."
                )
        super().__init__(
            task,
            num_envs,
            max_turns=getattr(first, "max_turns", None),
            cuts=False,
            instruction=getattr(first, "instruction", None),
            snapshots="exact",
            observation_bytes=room_bytes[0],
            action_bytes=room_bytes[1],
        )

    def sample_action(self, env_id: int, seed: int) -> str:
        return self._tasks[env_id].sample_random_action()

    def _begin(self, env_id: int, seed: int) -> str:
        text, _ = self._tasks[env_id].reset(seed)
        self._returns[env_id] = 0.0
        return text

    def _play(self, env_id: int, action: str) -> TextTurn:
        text, reward, terminated, truncated, info = self._tasks[env_id].step(action)
        self._returns[env_id] += float(reward)
        reached = (terminated or truncated) and self._returns[env_id] >= self._success_return - _TOLERANCE
        return TextTurn(text, reward, terminated, truncated, bool(info["success"]) if "success" in info else bool(reached), info)

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"return": float(self._returns[env_id]), "state": self._tasks[env_id].get_state()}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        self._returns[env_id] = saved["return"]
        self._tasks[env_id].set_state(saved["state"])

    def close(self) -> None:
        for task in self._tasks:
            close = getattr(task, "close", None)
            if close is not None:
                close()
