"""A generator around another."""

from __future__ import annotations

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.types import Observation


class WrappedGenerator(Generator):
    """Forwards every call to another generator: the base of wrappers that change how it is called."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def version(self) -> int:
        return self._generator.version

    @version.setter
    def version(self, version: int) -> None:
        self._generator.version = version

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._generator.send(slots, observation, noise)

    def recv(self) -> ActedBatch:
        return self._generator.recv()

    def publish(self, version: int) -> None:
        self._generator.publish(version)
