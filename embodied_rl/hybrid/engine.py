"""The hybrid engine: generation and training take turns on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.threads import compute_threads
from embodied_rl.policies.actor_critic import ActorCritic


class HybridEngine:
    """Owns the device and says whose turn it is. Collocated: both sides share it, so the turns never overlap.

    What a turn means is a matter of placement, not of the training loop: small models stay where they are and only the
    processor's threads change hands; a larger model would move its weights, optimizer state and caches here.
    """

    def __init__(self, policy: ActorCritic, generator: Generator) -> None:
        self.policy = policy
        self.generator = generator
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
        self.generator.publish(version)

    @contextmanager
    def _turn(self, phase: str) -> Iterator[None]:
        if self.phase is not None:
            raise RuntimeError(f"{phase} cannot begin inside {self.phase}: they share the device.")
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None
