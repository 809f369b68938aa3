"""What fills the one training loop: how experience comes about, and what is learned from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), recorded episodes (`cloning`, `off_policy`), and recorded
and fresh steps together (`off_policy.MixedMethod`, `cloning.DaggerMethod`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.cloning import CloningMethod, DaggerMethod
from embodied_rl.methods.demonstrations import training_sim
from embodied_rl.methods.groups import GroupMethod
from embodied_rl.methods.off_policy import MixedMethod, OfflineMethod
from embodied_rl.methods.rollout import RolloutMethod
from embodied_rl.methods.starts import ORDINARY, Starts, make_starts
from embodied_rl.methods.streams import queue_config
from embodied_rl.sim.simulators import Simulators

__all__ = [
    "CloningMethod",
    "DaggerMethod",
    "Experience",
    "GroupMethod",
    "Method",
    "MixedMethod",
    "OfflineMethod",
    "RolloutMethod",
    "make_method",
    "make_starts",
    "queue_config",
    "training_sim",
]


def make_method(
    config: TrainConfig,
    manager: Simulators,
    policy: Any,
    generator: Generator,
    run_dir: Path,
    ranks: RankHost | None = None,
    starts: Starts = ORDINARY,
) -> Method:
    """What keeps its steps or learns from recorded ones; `methods.building` makes what consumes what it plays.

    Args:
        ranks: see `make_learner`.
        starts: where its episodes start that do not start ordinarily.
    """
    algorithm = config.algorithm
    if algorithm.cloning is not None:
        clone = DaggerMethod if algorithm.cloning.dagger else CloningMethod
        return clone(config, manager, policy, generator, run_dir, ranks)
    assert algorithm.off_policy is not None, "the others are built otherwise"
    if algorithm.off_policy.fresh:
        return MixedMethod(config, manager, policy, generator, run_dir, ranks, starts)
    return OfflineMethod(config, manager, policy, generator, run_dir, ranks)
