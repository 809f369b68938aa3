"""What fills the one training loop: how experience comes about, and what is learned from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), recorded episodes (`cloning`, `off_policy`), and recorded
and fresh steps together (`off_policy.MixedMethod`, `cloning.DaggerMethod`).
"""

from __future__ import annotations

from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.cloning import CloningMethod, DaggerMethod
from embodied_rl.methods.demonstrations import KeptRun, training_sim
from embodied_rl.methods.off_policy import MixedMethod, OfflineMethod

__all__ = ["Experience", "KeptRun", "Method", "make_method", "training_sim"]


def make_method(run: KeptRun) -> Method:
    """What keeps its steps or learns from recorded ones; `methods.building` makes what consumes what it plays."""
    algorithm = run.config.algorithm
    if algorithm.cloning is not None:
        return DaggerMethod(run) if algorithm.cloning.dagger else CloningMethod(run)
    assert algorithm.off_policy is not None, "the others are built otherwise"
    return MixedMethod(run) if algorithm.off_policy.fresh else OfflineMethod(run)
