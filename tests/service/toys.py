"""A simulator that computes and never comes back, and one that waits for others of its kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.types import StepBuffers
from tests.sim.toy import CountingSim


class BusySim(CountingSim):
    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        while True:
            pass


class MeetingSim(CountingSim):
    """Its steps do not end before `count` environments, each with a seed of its own, are stepping; they leave word in `folder`."""

    def __init__(self, num_envs: int, folder: str, count: int, **kwargs: Any) -> None:
        super().__init__(num_envs, length=7, **kwargs)
        self._folder, self._count = Path(folder), count

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for env_id in env_ids:
            (self._folder / f"{self.state[env_id, 0]:g}").touch()
        while len(list(self._folder.iterdir())) < self._count:
            time.sleep(0.005)
        super().step(env_ids, actions, out)
