"""A generator whose way of acting can be switched: with exploration noise, by the mode, or at random."""

from __future__ import annotations

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.generation.wrapped import WrappedGenerator
from embodied_rl.types import Observation, SimSpec


class SwitchedGenerator(WrappedGenerator):
    """Passes on to `generator`, to random actions where `way` is "random", and without noise where it is "mode"."""

    def __init__(self, generator: Generator, spec: SimSpec) -> None:
        super().__init__(generator)
        self._random = RandomGenerator(spec)

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._random.version = self.version
        self._present().send(slots, observation, None if self.way == "mode" else noise)

    def recv(self) -> ActedBatch:
        return self._present().recv()

    def _present(self) -> Generator:
        return self._random if self.way == "random" else self._generator
