"""Any text environment with GEM's five methods as a simulator, such as our own tasks with verifiable rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn

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
    return TaskSim(task or environment.rpartition(":")[2], num_envs, one, success_return, observation_bytes, action_bytes)


class TaskSim(TextSim):
    """`num_envs` text tasks in this process."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        make_one: Callable[[], TextTask],
        success_return: float = 1.0,
        observation_bytes: int = 2**16,
        action_bytes: int = 2**16,
    ) -> None:
        """See `make`."""
        super().__init__(
            task,
            lambda: TaskGame(make_one(), task, success_return),
            num_envs,
            snapshots="exact",
            observation_bytes=observation_bytes,
            action_bytes=action_bytes,
            isolated=False,
        )


class TaskGame(TextGame):
    """Game of one `TextTask`."""

    def __init__(self, task: TextTask, name: str, success_return: float) -> None:
        """Raises UserError: it lacks a method. `name`: the task's, for the message."""
        for method in ("reset", "step", "sample_random_action", "get_state", "set_state"):
            if not callable(getattr(task, method, None)):
                raise UserError(
                    f"Environment '{name}' ({type(task).__name__}) has no method '{method}'; GEM's five are reset, step, "
                    "sample_random_action, get_state and set_state."
                )
        self.max_turns, self.instruction = getattr(task, "max_turns", None), getattr(task, "instruction", None)
        self._task, self._success_return, self._return = task, success_return, 0.0

    def reset(self, seed: int) -> str:
        text, _ = self._task.reset(seed)
        self._return = 0.0
        return text

    def step(self, action: str) -> TextTurn:
        text, reward, terminated, truncated, info = self._task.step(action)
        self._return += float(reward)
        reached = (terminated or truncated) and self._return >= self._success_return - _TOLERANCE
        return TextTurn(text, reward, terminated, truncated, bool(info.get("success", reached)), info)

    def sample_action(self, random: np.random.Generator) -> str:
        return self._task.sample_random_action()

    def state(self) -> dict[str, Any]:
        return {"return": self._return, "state": self._task.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._return = state["return"]
        self._task.set_state(state["state"])

    def close(self) -> None:
        if (close := getattr(self._task, "close", None)) is not None:
            close()
