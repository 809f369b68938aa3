"""The hybrid engine, which lets generation and training take turns on the same device, and its construction from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from embodied_rl.config import HybridConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenCache
from embodied_rl.hybrid.residency import Gradients, Hooks, Residency, Tensors
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.executors import TrainedCopy
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.sim.simulators import Simulators


class HybridEngine:
    """Owns the device and decides whose turn it is. Collocated: both sides share it, so the turns never overlap.

    The placement decides what a turn does, not the training loop. Small models stay where they are, and only the processor's threads
    change hands; `residency` moves what is registered with it between the turns.
    """

    def __init__(
        self,
        policy: Any,
        generator: Generator,
        *,
        trained: TrainedCopy | None = None,
        residency: Residency | None = None,
        lends: bool = False,
    ) -> None:
        """
        Args:
            policy: the module that acts; also the trained one, unless there is a `trained` copy.
            trained: copy whose weights `publish` writes into the policy first.
            residency: moves state between the turns; None: nothing moves.
            lends: other processes act on the training devices between updates (placement multiplexed).
        """
        self.policy = policy
        self.generator = generator
        self.trained = trained
        self.residency, self._lends = residency or Residency(), lends
        self.phase: str | None = None
        """``generation``, ``training``, or None outside both."""

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Context in which actions are generated, with one thread: the other cores belong to the simulators, and idle threads spin."""
        with self._turn("generation"), compute_threads(1):
            self.policy.eval()
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context in which the policy is updated; the learner takes the threads that its networks can use."""
        with self._turn("training"):
            self.policy.train()
            yield

    def publish(self, version: int) -> None:
        """Hand the policy's present weights to the generator, as `version`."""
        if self.trained is not None:
            self.residency.onload("parameters")
            self.trained.write_back()
        if self._lends:
            torch.cuda.empty_cache()  # what torch keeps of an update's memory is lost to the hosts, which act again from now on
        self.generator.publish(version)

    def metrics(self) -> dict[str, float]:
        """Bytes by kind and place, and the time of moving them since the last call; empty if nothing moves."""
        return self.residency.metrics()

    def close(self) -> None:
        """Bring tensors back, and stop what the engine started. Offloaded simulators stay so, because they are about to be closed."""
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


class Trains(Protocol):
    """The part of a `Method` that says where training happens."""

    @property
    def all_learners(self) -> Sequence[Learner]: ...

    @property
    def sharded(self) -> RankExecutor | None: ...

    @property
    def trained_copy(self) -> TrainedCopy | None: ...


def make_engine(config: HybridConfig, policy: nn.Module, generator: Generator, method: Trains, simulators: Simulators) -> HybridEngine:
    """Make the engine, with residency for a method's learner.
    Raises UserError: the method has nothing that `config` wants to move, or cannot train on several ranks."""
    sharded = method.sharded
    if config.sharding is not None and sharded is None:
        raise UserError(f"hybrid.sharding: {type(method).__name__} cannot divide its policy over ranks. Set hybrid=local.")
    residency = residency_of_playing(config.offload, simulators, generator.caches, generator)
    learners = method.all_learners
    parameters = [part for learner in learners for part in learner.executor.trained()] if learners else list(policy.parameters())
    if "parameters" in config.offload:
        residency.register("parameters", Tensors(lambda: parameters))
    if "gradients" in config.offload:
        residency.register("gradients", Gradients(lambda: parameters))
    if "optimizer" in config.offload:
        # Read again at each turn, because an optimizer that has not stepped has no state yet.
        moved = [learner.executor.optimizer_tensors for learner in learners if learner.executor.optimizer_tensors() is not None]
        if not moved:
            raise UserError(
                "hybrid.offload=[optimizer]: this learner (for small networks) already keeps its optimizer state on the CPU. Leave it out."
            )
        residency.register("optimizer", Tensors(lambda: [part for tensors in moved for part in tensors() or ()]))
    return HybridEngine(policy, generator, trained=method.trained_copy, residency=residency, lends=config.placement.kind == "multiplexed")


def residency_of_playing(offload: Sequence[str], simulators: Simulators, caches: Sequence[TokenCache], acting: object) -> Residency:
    """Residency of what plays in this process; key-value caches keep nothing on the host.
    Raises UserError: there is no cache that can be freed; the message names `acting` if there is no cache at all."""
    residency = Residency()
    if "simulators" in offload:
        residency.register("simulators", Hooks(simulators.offload, simulators.onload))
    if "kv_cache" in offload:
        freed = [cache for cache in caches if cache.can_free_memory]
        if not freed:
            why = "has no cache to offload (vLLM frees its own only on GPUs)"
            holder = type(next(iter(caches), acting)).__name__
            raise UserError(f"hybrid.offload=[kv_cache]: {holder} {why}. Leave it out, or use generation=tokens_torch.")
        for cache in freed:
            residency.register("kv_cache", _let_go(cache))
    return residency


def _let_go(cache: TokenCache) -> Hooks:
    def release() -> int:
        cache.release_memory()
        return 0

    return Hooks(release, cache.restore_memory, lambda: {str(cache.device): cache.cache_bytes})
