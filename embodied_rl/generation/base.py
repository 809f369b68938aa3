"""Generators turn observations into actions and carry a weight version; they face the environment manager with the same shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from embodied_rl.types import ActionSpec, Observation


@dataclass(frozen=True)
class ActedBatch:
    """Actions for the slots whose observations were sent."""

    slots: np.ndarray
    """[n] int64"""
    action: np.ndarray
    """[n, A] float32 normalised and unclipped; int64 [n, 1] for discrete actions; [n, W] of a policy with an `ActionLayout` of its own."""
    log_prob: np.ndarray
    """[n, L] float32"""
    version: int
    """Version of the weights that acted."""
    given: np.ndarray | None = None
    """[n, A], or chunks [n, K, A], in the simulator's units: what it gets of actions that are not its own. None: `action`, denormalised."""

    def for_simulator(self, action: ActionSpec, chunk_size: int = 1) -> np.ndarray:
        """What `EnvManager.send` takes: [n, A], or [n, k, A] where the manager plays chunks of up to `chunk_size` steps."""
        given = action.denormalise(self.action) if self.given is None else self.given
        return given[:, None] if chunk_size > 1 and given.ndim == 2 else given


class Generator(Protocol):
    """`send` hands over observations, `recv` returns the oldest batch that has been acted on."""

    version: int

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """Ask for actions. Observations are read before this returns, so views into shared memory may be passed.

        Args:
            slots: [n] int64.
            observation: {key: [n, ...]}.
            noise: [n, A] float32: standard normal for continuous actions, uniform in [0, 1) for discrete ones (or as the policy's
                `ActionLayout` says); the caller draws it so that a run's randomness depends on its seed alone. None: the mode.
        """
        ...

    def recv(self) -> ActedBatch: ...

    def publish(self, version: int) -> None:
        """Take the policy's present weights as `version`."""
        ...


class WrappedGenerator:
    """Passes everything on to another generator: the base of those that change how it is asked. Implements `Generator`."""

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


@runtime_checkable
class EpisodicGenerator(Generator, Protocol):
    """A generator that remembers an episode's past, and so must be told where a new one begins; it acts only for slots that play."""

    def begin(self, slots: Iterable[int]) -> None:
        """The next observations of these slots are the first ones of new episodes."""
        ...
