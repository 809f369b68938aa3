"""Random actions without a model, and wrappers around other generators."""

from __future__ import annotations

import math

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator, QueuedGenerator
from embodied_rl.types import ActionLayout, Observation, SimSpec


class WrappedGenerator(Generator):
    """Base of generator wrappers: forwards every call."""

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


_erf = np.frompyfunc(math.erf, 1, 1)
"""Error function, which numpy lacks."""


class RandomGenerator(QueuedGenerator):
    """Uniform actions over the simulator's whole range, regardless of the observation.

    The caller's noise is the source of randomness: the normal distribution function maps standard normal numbers to [-1, 1], and uniform
    numbers map to the choices. Without noise (deterministic acting) the action is the middle of the range, or choice 0, unless it has its
    own seed.
    """

    def __init__(self, spec: SimSpec, seed: int | None = None) -> None:
        """`seed`: of the noise that replaces a missing one."""
        super().__init__()
        self.spec, self._layout = spec, ActionLayout.of(spec.action)
        self._random = None if seed is None else np.random.default_rng(seed)

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        action_spec = self.spec.action
        if noise is None and self._random is not None:
            noise = self._layout.noise(self._random, (len(slots),))
        shape = (len(slots), action_spec.dim)
        if action_spec.kind == "discrete":
            uniform = np.zeros(shape, np.float32) if noise is None else noise
            action = np.minimum((uniform * action_spec.num_actions).astype(np.int64), action_spec.num_actions - 1)
            density = 1.0 / action_spec.num_actions
        else:
            # With the normal distribution function Phi, 2 Phi(x) - 1 = erf(x / sqrt(2)).
            action = np.zeros(shape, np.float32) if noise is None else np.asarray(_erf(noise / math.sqrt(2.0)), np.float32)
            density = 0.5
        log_prob = np.full(shape, np.log(density), np.float32)
        self._acted.append(ActedBatch(slots.copy(), action, log_prob, self.version))
