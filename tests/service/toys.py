"""A simulator that computes and never comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied_rl.types import StepBuffers
from tests.sim.toy import CountingSim


class BusySim(CountingSim):
    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        while True:
            pass
