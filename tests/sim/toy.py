"""Small simulators with known arithmetic, run in real worker processes by the tests of the manager."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec


class CountingSim:
    """Observation = [seed, steps taken, sum of actions]; ends (terminated) after ``length`` steps; reward = action.

    `misbehave` says what environment of the first worker does at step `at`: raise, exit, hang, nan_observation, nan_reward.
    """

    def __init__(
        self, num_envs: int, length: int = 5, misbehave: str | None = None, at: int = 3, image: bool = False, task: str | None = None
    ) -> None:
        observation = {"state": TensorSpec((3,), "float64")}
        if image:
            observation["rgb"] = TensorSpec((8, 8, 3), "uint8")
        self.spec = SimSpec(task or "count", observation, ActionSpec.continuous([-10.0], [10.0]), reports_success=True, can_render=True)
        self.length, self.misbehave, self.at, self.image = length, misbehave, at, image
        self.state = np.zeros((num_envs, 3))

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            self.state[env_id] = (seed, 0, 0)
            self._observe(env_id, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for row, env_id in enumerate(env_ids):
            self.state[env_id, 1] += 1
            self.state[env_id, 2] += actions[row, 0]
            if self.misbehave and self.state[env_id, 1] == self.at:
                self._misbehave(env_id)
            out.reward[env_id] = actions[row, 0]
            if self.misbehave == "nan_reward" and self.state[env_id, 1] == self.at:
                out.reward[env_id] = np.nan
            out.terminated[env_id] = self.state[env_id, 1] >= self.length
            out.truncated[env_id] = False
            out.success[env_id] = self.state[env_id, 2] >= 3
            self._observe(env_id, out)

    def render(self, env_id: int) -> np.ndarray:
        if self.misbehave == "blind":
            raise UserError("Task 'count' cannot be drawn here.")
        return np.full((4, 6, 3), int(self.state[env_id, 1]), np.uint8)

    def close(self) -> None:
        pass

    def _observe(self, env_id: int, out: StepBuffers) -> None:
        out.observation["state"][env_id] = self.state[env_id]
        if self.image:
            out.observation["rgb"][env_id] = int(self.state[env_id, 1])

    def _misbehave(self, env_id: int) -> None:
        if self.misbehave == "raise":
            raise RuntimeError("the gripper fell off")
        if self.misbehave == "exit":
            os._exit(7)
        if self.misbehave == "hang":
            self._hang_here()
        if self.misbehave == "nan_observation":
            self.state[env_id, 2] = np.nan

    def _hang_here(self) -> None:
        while True:
            time.sleep(0.01)


class NoOpSim:
    """Does nothing, for measuring the transport: observations of `num_floats` float32, or a frame of `image` pixels per side."""

    def __init__(self, num_envs: int, num_floats: int = 25, image: int = 0) -> None:
        observation = {"rgb": TensorSpec((image, image, 3), "uint8")} if image else {"state": TensorSpec((num_floats,))}
        self.spec = SimSpec("no-op", observation, ActionSpec.continuous([-1.0], [1.0]))
        self._rows = [{key: np.ones(part.shape, part.dtype) for key, part in observation.items()} for _ in range(num_envs)]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._write(env_ids, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._write(env_ids, out)

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass

    def _write(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for key, rows in out.observation.items():
            for env_id in env_ids:
                rows[env_id] = self._rows[env_id][key]
