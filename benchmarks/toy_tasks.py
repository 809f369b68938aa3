"""Small tasks on which a method shows that it learns: `method_table.py` uses them beside CartPole.

Both are plain gymnasium environments; `sim=custom sim.target=toy_tasks:BanditChain` trains on one from this folder.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

CHAIN = 6
"""Links of the chain."""
PIXELS = 16
"""Pixels a side of `ColumnReach`."""


class BanditChain(gymnasium.Env):
    """A chain of bandits: the right one of two arms leads on to the next link, the other one back to the last.

    Which arm is right differs from link to link. Success, with reward 1, at the chain's end; nothing before, and 20 pulls at most, so
    that random pulls come to the end in three of ten episodes. For methods whose credit flows back from success at the end.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (CHAIN,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    _right = (0, 1, 1, 0, 1, 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._link = self._pulls = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._link = self._link + 1 if int(action) == self._right[self._link] else max(self._link - 1, 0)
        self._pulls += 1
        done = self._link == CHAIN
        self._link = min(self._link, CHAIN - 1)
        return self._seen(), float(done), done, self._pulls >= 20, {"success": done}

    def _seen(self) -> np.ndarray:
        return np.eye(CHAIN, dtype=np.float32)[self._link]


class ColumnReach(gymnasium.Env):
    """A picture of a bright column and a dim one; the action moves the bright one, at most two pixels a step, eight steps.

    Observation "rgb" [16, 16, 3] uint8 and "state" [2] = both places in [-1, 1]. The reward of a step is how much nearer the columns
    came, in widths of the picture. For policies that act in chunks, from pictures or from states.
    """

    observation_space = gymnasium.spaces.Dict(
        {
            "rgb": gymnasium.spaces.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8),
            "state": gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._own, self._goal = self.np_random.uniform(0, PIXELS - 1, 2)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        before = abs(self._own - self._goal)
        self._own = float(np.clip(self._own + 2.0 * float(np.clip(action[0], -1.0, 1.0)), 0, PIXELS - 1))
        self._steps += 1
        after = abs(self._own - self._goal)
        return self._seen(), float(before - after) / (PIXELS - 1), False, self._steps >= 8, {"success": after < 1.0}

    def _seen(self) -> dict[str, np.ndarray]:
        picture = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        picture[:, round(self._goal), 0] = 128
        picture[:, round(self._own), 1] = 255
        return {"rgb": picture, "state": np.array([self._own, self._goal], np.float32) / (PIXELS - 1) * 2 - 1}
