"""Simulators of test_render.py. Simulators' processes import them, so they import nothing heavy."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


def vector_cartpole(num_envs: int) -> gymnasium.vector.VectorEnv:
    """CartPoles that all move in one call."""
    options = {"autoreset_mode": "Disabled"}
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", render_mode="rgb_array", vector_kwargs=options)


class BrokenScreen(gymnasium.Wrapper):
    """CartPole where drawing raises what a missing driver raises."""

    def __init__(self, task: str) -> None:
        super().__init__(gymnasium.make(task, render_mode="rgb_array"))

    def render(self) -> np.ndarray:
        raise RuntimeError("no\n  driver")


class DyingDriver(BrokenScreen):
    """CartPole where drawing ends the process, as graphics drivers do."""

    def render(self) -> np.ndarray:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
        return np.zeros((1, 1, 3), np.uint8)


class BrokenPhysics(gymnasium.Wrapper):
    """CartPole whose fourth step fails; the picture is not to blame, and the film is not to be had all the same."""

    def __init__(self, task: str) -> None:
        super().__init__(gymnasium.make(task, render_mode="rgb_array"))
        self.num_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        if self.num_steps == 4:
            raise ZeroDivisionError("no mass")
        return self.env.step(action)
