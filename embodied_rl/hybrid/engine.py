"""The hybrid engine: generation and training take turns on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.residency import Residency
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.executors import TrainedCopy


class HybridEngine:
    """Owns the device and says whose turn it is. Collocated: both sides share it, so the turns never overlap.

    What a turn means is a matter of placement, not of the training loop: small models stay where they are and only the
    processor's threads change hands; what `residency` holds is moved in and out at the turns' borders.
    """

    def __init__(
        self, policy: Any, generator: Generator, *, trained: TrainedCopy | None = None, residency: Residency | None = None
    ) -> None:
        """
        Args:
            policy: a module that acts; the one that is trained unless there is a `trained` copy.
            trained: whose weights `publish` brings into the policy first.
            residency: what moves between the turns; None: nothing does.
        """
        self.policy = policy
        self.generator = generator
        self.trained = trained
        self.residency = residency or Residency()
        self.phase: str | None = None
        """``generation``, ``training``, or None outside both."""

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Actions are generated inside. One thread: the other cores belong to the simulators, and idle threads spin."""
        with self._turn("generation"), compute_threads(1):
            self.policy.eval()
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The policy is updated inside; the learner takes the threads that its networks are worth."""
        with self._turn("training"):
            self.policy.train()
            yield

    def publish(self, version: int) -> None:
        """Hand the policy's present weights to the generator, as `version`."""
        if self.trained is not None:
            self.residency.onload("parameters")
            self.trained.write_back()
        self.generator.publish(version)

    def metrics(self) -> dict[str, float]:
        """Bytes by kind and place, and the time of moving them since the last call; empty where nothing moves."""
        return self.residency.metrics()

    def close(self) -> None:
        """Bring tensors back, and end what the engine started. Simulators that are out stay so: they are about to be ended."""
        self.residency.onload_all(but=("simulators",))
        if self.trained is not None:
            self.trained.close()

    @contextmanager
    def _turn(self, phase: str) -> Iterator[None]:
        if self.phase is not None:
            raise RuntimeError(f"{phase} cannot begin inside {self.phase}: they share the device.")
        self.phase = phase
        try:
            self.residency.begin(phase)
            yield
        finally:
            self.phase = None
