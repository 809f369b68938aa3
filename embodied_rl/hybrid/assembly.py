"""The engine that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from embodied_rl.config import HybridConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenCache
from embodied_rl.hybrid.engine import HybridEngine
from embodied_rl.hybrid.residency import Gradients, Hooks, Residency, Tensors
from embodied_rl.learning.executors import TrainedCopy
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.ranks import RankExecutor


class Simulators(Protocol):
    """What `EnvManager` offers."""

    def offload(self) -> int: ...

    def onload(self) -> None: ...


class Trains(Protocol):
    """What a `Method` says of where training happens."""

    @property
    def all_learners(self) -> Sequence[Learner]: ...

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
        for cache in _caches_of(generator):
            residency.register("kv_cache", cache)
    learners = method.all_learners
    parameters = [part for learner in learners for part in learner.trained()] if learners else list(policy.parameters())
    if "parameters" in config.offload:
        residency.register("parameters", Tensors(lambda: parameters))
    if "gradients" in config.offload:
        residency.register("gradients", Gradients(lambda: parameters))
    if "optimizer" in config.offload:
        # Read anew at each turn: an optimizer that has not stepped has no state yet.
        moved = [learner.optimizer_tensors for learner in learners if learner.optimizer_tensors() is not None]
        if not moved:
            raise UserError(
                "hybrid.offload=[optimizer]: this learner keeps its optimizer's state in its own arrays on the CPU (small networks). "
                "Leave it out; there is nothing to gain."
            )
        residency.register("optimizer", Tensors(lambda: [part for tensors in moved for part in tensors() or ()]))
    return HybridEngine(policy, generator, trained=method.trained_copy, residency=residency)


def _caches_of(generator: Generator) -> list[Hooks]:
    """Token backends' key-value caches; nothing of them is kept on the host. Raises UserError where there is none that can be let go."""
    caches = [cache for cache in generator.caches if cache.can_free_memory]
    if not caches:
        why = "keeps no cache that could be let go (vLLM gives its own back on GPUs only)"
        holder = next(iter(generator.caches), generator)
        raise UserError(f"hybrid.offload=[kv_cache]: {type(holder).__name__} {why}. Leave it out, or use generation=tokens_torch.")
    return [_let_go(cache) for cache in caches]


def _let_go(cache: TokenCache) -> Hooks:
    def release() -> int:
        cache.release_memory()
        return 0

    return Hooks(release, cache.restore_memory, lambda: {str(cache.device): cache.cache_bytes})
