"""Experts of tests. Simulators' processes import them, so they import nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied_rl.sim.text import frozenlake


class CartPoleController:
    """Pushes towards where the pole falls; balances for hundreds of steps."""

    def __call__(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        position, speed, angle, turning = observation["state"]
        return np.array([int(angle + 0.5 * turning + 0.05 * position + 0.1 * speed > 0)])


class LakeExpert:
    """FrozenLake's scripted player, as an expert: it needs the text only."""

    def __call__(self, observation: Mapping[str, Any]) -> str:
        return frozenlake.player(str(observation["text"]))
