"""The engine that a configuration describes."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from embodied_rl.config import HybridConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.hybrid.engine import HybridEngine, TrainedCopy
from embodied_rl.hybrid.residency import Gradients, Hooks, Residency, Tensors
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.ranks import RankExecutor


class Simulators(Protocol):
    """What `EnvManager` offers."""

    def offload(self) -> int: ...

    def onload(self) -> None: ...


class Trains(Protocol):
    """What a `Method` says of where training happens."""

    @property
    def learner(self) -> Learner | None: ...

    @property
    def sharded(self) -> RankExecutor | None: ...

    @property
    def trained_copy(self) -> TrainedCopy | None: ...


def make_engine(config: HybridConfig, policy: nn.Module, generator: Generator, method: Trains, simulators: Simulators) -> HybridEngine:
    """Engine with residency for a method's learner.

    Raises UserError: the method has nothing of what `config` wants to move, or cannot train on several ranks.
    """
    sharded = method.sharded
    if config.sharding is not None and sharded is None:
        raise UserError(f"hybrid.sharding: {type(method).__name__} has no policy that is divided over ranks. Set hybrid=local.")
    residency = Residency()
    if "simulators" in config.offload:
        residency.register("simulators", Hooks(simulators.offload, simulators.onload))
    if "kv_cache" in config.offload:
        residency.register("kv_cache", _cache_of(generator))
    # Several domains without ranks have several learners.
    trains = method.learner if sharded is None else sharded
    parameters = list(policy.parameters()) if trains is None else trains.trained()
    if "parameters" in config.offload:
        residency.register("parameters", Tensors(lambda: parameters))
    if "gradients" in config.offload:
        residency.register("gradients", Gradients(lambda: parameters))
    if "optimizer" in config.offload:
        if trains is None or trains.optimizer_tensors() is None:
            raise UserError(
                "hybrid.offload=[optimizer]: this learner keeps its optimizer's state in its own arrays on the CPU (small networks). "
                "Leave it out; there is nothing to gain."
            )
        optimizer_tensors = trains.optimizer_tensors
        residency.register("optimizer", Tensors(lambda: optimizer_tensors() or ()))
    return HybridEngine(policy, generator, trained=method.trained_copy, residency=residency)


def _cache_of(generator: Generator) -> Hooks:
    """A token backend's key-value cache; nothing of it is kept on the host."""
    backend = generator.cache
    if backend is None or not backend.can_free_memory:
        why = "keeps no cache that could be let go (vLLM gives its own back on GPUs only)"
        raise UserError(
            f"hybrid.offload=[kv_cache]: {type(backend or generator).__name__} {why}. Leave it out, or use generation=tokens_torch."
        )

    def release() -> int:
        backend.release_memory()
        return 0

    return Hooks(release, backend.restore_memory, lambda: {str(backend.device): backend.cache_bytes})
