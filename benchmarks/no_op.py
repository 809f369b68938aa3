"""Environments that do nothing but count their steps: what is left to measure is the transport.

The same payload exists twice: as a `gymnasium.Env`, which every library takes (ours through its adapter), and as a `SimEnv`,
which only ours takes. The first entry of an observation is the number of steps taken, modulo 256, so that a transport which
loses or repeats a step is found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.sim.env import SimEnv
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

COUNT_MODULUS = 256
"""The count must fit into the uint8 of an image."""


class NoOpEnv(gymnasium.Env):
    """One environment. An episode never ends.

    Args:
        num_floats: length of the float32 observation: 25 are 100 bytes.
        image: if not 0, the observation is an image [image, image, 3] uint8 instead.
    """

    def __init__(self, num_floats: int = 25, image: int = 0) -> None:
        if image:
            self.observation_space: gymnasium.Space = gymnasium.spaces.Box(0, 255, (image, image, 3), np.uint8)
        else:
            self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_floats,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._observation = np.ones(self.observation_space.shape or (), self.observation_space.dtype)
        self._flat = self._observation.reshape(-1)
        self._count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._count = 0
        self._flat[0] = 0
        return self._observation, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._count = (self._count + 1) % COUNT_MODULUS
        self._flat[0] = self._count
        return self._observation, 0.0, False, False, {}


class NoOpSim(SimEnv):
    """The same as a batch of environments that writes straight into the manager's memory. Arguments as `NoOpEnv`."""

    def __init__(self, num_envs: int, num_floats: int = 25, image: int = 0) -> None:
        self._key = "rgb" if image else "state"
        part = TensorSpec((image, image, 3), "uint8") if image else TensorSpec((num_floats,))
        self.spec = SimSpec("no-op", {self._key: part}, ActionSpec.continuous([-1.0], [1.0]))
        self._observations = [np.ones(part.shape, part.dtype) for _ in range(num_envs)]
        self._flat = [observation.reshape(-1) for observation in self._observations]
        self._counts = [0] * num_envs

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i in env_ids:
            self._counts[i] = -1
        self._step(env_ids, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._step(env_ids, out)
        out.reward[env_ids] = 0.0
        out.terminated[env_ids] = out.truncated[env_ids] = out.success[env_ids] = False

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass

    def _step(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        rows = out.observation[self._key]
        for i in env_ids:
            self._counts[i] = (self._counts[i] + 1) % COUNT_MODULUS
            self._flat[i][0] = self._counts[i]
            rows[i] = self._observations[i]
