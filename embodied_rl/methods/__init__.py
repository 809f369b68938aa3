"""What fills the one training loop: how experience comes about, and what is learned from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), recorded episodes (`cloning`, `off_policy`), and recorded
and fresh steps together (`off_policy.MixedMethod`, `cloning.DaggerMethod`).
"""

from __future__ import annotations

from pathlib import Path

from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.cloning import CloningMethod, DaggerMethod
from embodied_rl.methods.demonstrations import training_sim
from embodied_rl.methods.groups import GroupMethod, make_starts, queue_config
from embodied_rl.methods.off_policy import MixedMethod, OfflineMethod
from embodied_rl.methods.rollout import RolloutMethod
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.sim.manager import EnvManager

__all__ = [
    "CloningMethod",
    "DaggerMethod",
    "Experience",
    "GroupMethod",
    "Method",
    "MixedMethod",
    "OfflineMethod",
    "RolloutMethod",
    "check_method",
    "make_method",
    "make_starts",
    "queue_config",
    "training_sim",
]


def check_method(config: TrainConfig) -> None:
    """Raises UserError for what makes no sense together, or is not there, before any simulator is started."""
    algorithm = config.algorithm
    compose(algorithm)
    if algorithm.groups is not None:
        queue_config(algorithm.groups)
        build_filters(algorithm.groups.filters)
    elif algorithm.initialized.share > 0:
        raise UserError("algorithm.initialized is about groups of whole episodes: choose a method with groups (algorithm=grpo, say).")
    if algorithm.off_policy is not None:
        _check_off_policy(config)
    if config.recording and not algorithm.learns_from_recordings:
        raise UserError(
            f"recording={config.recording[0]} is given, and algorithm={algorithm.name} learns from its own episodes alone. "
            "Choose one that learns from recorded ones: bc, dagger, iql, awac, rlpd."
        )
    if config.recording:
        from embodied_rl.episodes.reader import open_recording

        for path in config.recording:
            open_recording(path).close()
    training_sim(config)


def _check_off_policy(config: TrainConfig) -> None:
    options = config.algorithm.off_policy
    assert options is not None
    if options.update == "sac" and config.policy.distribution != "squashed":
        raise UserError(
            f"algorithm.off_policy.update='sac' needs a policy whose actions are bounded, got policy.distribution="
            f"'{config.policy.distribution}': set policy.distribution=squashed (continuous actions)."
        )
    if options.update == "sac" and not options.fresh:
        raise UserError(
            "algorithm.off_policy.update='sac' follows its critics to actions that recordings do not hold; without fresh steps nothing "
            "corrects it. Take iql or awac, or set algorithm.off_policy.fresh=true."
        )
    if not options.fresh and options.recorded_share > 0:
        raise UserError("algorithm.off_policy.recorded_share is about minibatches with fresh steps: leave it at 0 with fresh=false.")


def make_method(config: TrainConfig, manager: EnvManager, policy: ActorCritic, generator: Generator, run_dir: Path) -> Method:
    """What the configuration asks for. Raises UserError for a combination that makes no sense."""
    algorithm = config.algorithm
    if algorithm.cloning is not None:
        clone = DaggerMethod if algorithm.cloning.dagger else CloningMethod
        return clone(config, manager, policy, generator, run_dir)
    if algorithm.off_policy is not None:
        learn = MixedMethod if algorithm.off_policy.fresh else OfflineMethod
        return learn(config, manager, policy, generator, run_dir)
    make = RolloutMethod if algorithm.groups is None else GroupMethod
    return make(config, manager, policy, generator)
