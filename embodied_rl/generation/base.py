"""Generators turn observations into actions and carry a weight version; they face the environment manager with the same shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from embodied_rl.types import Observation


@dataclass(frozen=True)
class ActedBatch:
    """Actions for the slots whose observations were sent."""

    slots: np.ndarray
    """[n] int64"""
    action: np.ndarray
    """[n, A] float32 normalised and unclipped; int64 [n, 1] for discrete actions."""
    log_prob: np.ndarray
    """[n, L] float32"""
    version: int
    """Version of the weights that acted."""


class Generator(Protocol):
    """`send` hands over observations, `recv` returns the oldest batch that has been acted on."""

    version: int

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """Ask for actions. Observations are read before this returns, so views into shared memory may be passed.

        Args:
            slots: [n] int64.
            observation: {key: [n, ...]}.
            noise: [n, A] float32: standard normal for continuous actions, uniform in [0, 1) for discrete ones; the caller
                draws it so that a run's randomness depends on its seed alone. None: deterministic (the mode).
        """
        ...

    def recv(self) -> ActedBatch: ...

    def publish(self, version: int) -> None:
        """Take the policy's present weights as `version`."""
        ...
