"""A simulator of a few lines in which most recorded actions are wrong: what to learn from them is not what they are on average."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Line(gymnasium.Env):
    """A point on [-1, 1] moves by a tenth of its action; success at the right end, which the episode ends at; 30 steps at most."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._steps = float(self.np_random.uniform(-1.0, 0.9)), 0
        return np.array([self._x], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._x = min(max(self._x + 0.1 * float(action[0]), -1.0), 1.0)
        self._steps += 1
        success = self._x > 0.95
        return np.array([self._x], np.float32), float(success), success, self._steps >= 30, {"success": success}


class Named(gymnasium.Env):
    """The same, and what is seen has a name with a slash, as what is composed of parts may."""

    observation_space = gymnasium.spaces.Dict({"arm/place": Line.observation_space})
    action_space = Line.action_space

    def __init__(self) -> None:
        self._line = Line()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        place, info = self._line.reset(seed=seed, options=options)
        return {"arm/place": place}, info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        place, *rest = self._line.step(action)
        return {"arm/place": place}, *rest


class Lazy:
    """Drifts to the left, without looking: three of five actions are uniform in [-1, 0], the others in [0, 1]."""

    def __init__(self) -> None:
        self._rng: np.random.Generator | None = None

    def __call__(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        if self._rng is None:  # another walk for each start, the same one for the same start
            self._rng = np.random.default_rng(int(1e6 * (1.0 + float(observation["state"][0]))))
        sign = 1.0 if self._rng.random() < 0.4 else -1.0
        return np.array([sign * self._rng.random()], np.float32)


class Wave:
    """Answers by what it sees alone."""

    def __call__(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        (seen,) = observation.values()
        return np.sin(10.0 * seen[:1]).astype(np.float32)
