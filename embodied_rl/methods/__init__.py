"""What fills the one training loop: how experience comes about, and what is learned from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), recorded episodes (`cloning`, `off_policy`), and recorded
and fresh steps together (`off_policy.MixedMethod`, `cloning.DaggerMethod`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.config import CustomPolicyConfig, PolicyConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.methods.agents import AgentMethod, check_agent
from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.cloning import CloningMethod, DaggerMethod
from embodied_rl.methods.demonstrations import expert_of, training_sim
from embodied_rl.methods.domain_building import check_domains, with_domains
from embodied_rl.methods.groups import GroupMethod, make_starts, queue_config
from embodied_rl.methods.off_policy import MixedMethod, OfflineMethod
from embodied_rl.methods.programs import ProgramMethod, check_programs
from embodied_rl.methods.rollout import RolloutMethod
from embodied_rl.policies.custom import custom_class
from embodied_rl.rollout.program_manager import ProgramGenerator, ProgramManager
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import is_program

__all__ = [
    "AgentMethod",
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
    config = with_domains(config)
    algorithm = config.algorithm
    compose(algorithm)
    if algorithm.groups is not None:
        queue_config(algorithm.groups)
        build_filters(algorithm.groups.filters)
    elif algorithm.initialized.share > 0 and not config.domains:
        raise UserError("algorithm.initialized is about groups of whole episodes: choose a method with groups (algorithm=grpo, say).")
    if config.domains:
        check_domains(config)
        return
    if algorithm.off_policy is not None:
        _check_off_policy(config)
    if config.recording and not algorithm.learns_from_recordings and algorithm.warm_start is None:
        raise UserError(
            f"recording={config.recording[0]} is given, and algorithm={algorithm.name} learns only from its own episodes. "
            "Choose one that learns from recorded ones: bc, dagger, iql, awac, rlpd."
        )
    if config.recording:
        from embodied_rl.episodes.reader import open_recording

        for path in config.recording:
            open_recording(path).close()
    _check_kinds(config)
    if config.checkpoint.within_episodes:
        _check_within_episodes(config)
    training_sim(config)


def _check_within_episodes(config: TrainConfig) -> None:
    algorithm, why = config.algorithm, ""
    if algorithm.groups is not None:
        why = f"algorithm={algorithm.name} plays whole episodes, of which those in flight are begun again from their seeds"
    elif not algorithm.on_policy:
        why = f"algorithm={algorithm.name} learns from recordings"
    elif config.hybrid.plays_apart:
        why = "with this placement the episodes are played in another process"
    elif config.record.share > 0:
        why = f"record.share={config.record.share:g} writes episodes from their beginning"
    if why:
        raise UserError(f"checkpoint.within_episodes is about PPO's rollouts of all slots, and {why}. Set it false.")


def _check_kinds(config: TrainConfig) -> None:
    """Texts and actions are generated, and learned from, each in their own way."""
    if is_program(config.sim):
        check_programs(config)
    if config.policy.name == "language":
        check_agent(config)
        return
    if config.generation.backend in ("tokens_torch", "vllm"):
        raise UserError(
            f"generation.backend='{config.generation.backend}' samples tokens, and policy.name='{config.policy.name}' acts in batches: "
            "choose generation=torch, or policy=language."
        )
    if isinstance(config.policy, CustomPolicyConfig):
        custom_class(config.policy)
    _check_warm_start(config)
    _check_chunks(config)


def _check_warm_start(config: TrainConfig) -> None:
    options = config.algorithm.warm_start
    if options is None:
        return
    if options.player is not None:
        raise UserError(
            f"algorithm.warm_start.player={options.player} answers in text, for policy=language; a robot's policy clones the task's "
            "expert (algorithm.recorded.expert) or recording=…: set player=null."
        )
    if not config.algorithm.on_policy:
        raise UserError(f"algorithm.warm_start comes before learning by playing; algorithm={config.algorithm.name} learns from recordings.")
    if not config.recording:
        expert_of(config)


def _check_chunks(config: TrainConfig) -> None:
    """Reject options that a policy with its own actions does not support."""
    algorithm, policy = config.algorithm, config.policy
    if isinstance(policy, PolicyConfig):
        if algorithm.ratio == "action" or algorithm.advantage in ("gae_action", "gae_chunk"):
            raise UserError("algorithm.ratio=action and advantages of chunks need a policy that acts in chunks (policy=tiny_vla, say).")
        for name in ("value_learning_rate", "head_learning_rate", "micro_batch_size"):
            if algorithm.groups is not None and getattr(algorithm, name) is not None:
                raise UserError(
                    f"algorithm.{name} is not offered for policy.name='{policy.name}' with groups, whose small networks learn at one rate: "
                    f"set algorithm.{name}=null (a critic of large returns: algorithm.reward.scale)."
                )
        return
    folder = getattr(policy, "path", None)
    if folder is not None and config.resume is None and not Path(folder).is_dir():
        # Checked before simulators are started, which may take a minute.
        raise UserError(f"policy.path='{folder}' is no folder. Give the folder of a checkpoint: config.json, safetensors and a tokenizer.")
    who = f"policy.name='{policy.name}'"
    if algorithm.off_policy is not None:
        raise UserError(
            f"algorithm={algorithm.name} needs the simulator's own actions step by step; {who} gives others: take ppo, grpo, bc or dagger."
        )
    if algorithm.initialized.share > 0:
        raise UserError(f"algorithm.initialized replays actions step by step; {who} gives others: set algorithm.initialized.share=0.")
    if config.record.share > 0:
        raise UserError(f"record.share={config.record.share:g} writes actions step by step; {who} gives others: set record.share=0.")
    if getattr(policy, "head", None) == "l1" and algorithm.cloning is None:
        raise UserError("policy.head=l1 gives actions without probabilities, only for cloning and evaluation: set policy.head=discrete.")
    of_actions = getattr(policy, "value", "chunk") == "action"
    if of_actions != (algorithm.advantage == "gae_action") and algorithm.cloning is None:
        raise UserError(
            "A value for each step of a chunk (policy.value=action) goes with algorithm.advantage=gae_action, neither without the other: "
            f"got policy.value={'action' if of_actions else 'chunk'} and algorithm.advantage={algorithm.advantage}."
        )
    if algorithm.advantage in ("gae_action", "gae_chunk") and policy.chunk_size == 1:
        raise UserError(f"algorithm.advantage={algorithm.advantage} is about chunks, and {who} acts step by step: take gae.")


def _check_off_policy(config: TrainConfig) -> None:
    options = config.algorithm.off_policy
    assert options is not None
    if options.update == "sac" and isinstance(config.policy, PolicyConfig) and config.policy.distribution != "squashed":
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


def make_method(config: TrainConfig, manager: Simulators, policy: Any, generator: Generator, run_dir: Path) -> Method:
    """What the configuration asks for. Raises UserError for a combination that makes no sense."""
    algorithm = config.algorithm
    if config.policy.name == "language":
        if is_program(config.sim):
            programs, served = cast("ProgramManager", manager), cast("ProgramGenerator", generator)
            return ProgramMethod(config, programs, policy, served, run_dir)
        return AgentMethod(config, manager, policy, generator, run_dir)
    if algorithm.cloning is not None:
        clone = DaggerMethod if algorithm.cloning.dagger else CloningMethod
        return clone(config, manager, policy, generator, run_dir)
    if algorithm.off_policy is not None:
        learn = MixedMethod if algorithm.off_policy.fresh else OfflineMethod
        return learn(config, manager, policy, generator, run_dir)
    make = RolloutMethod if algorithm.groups is None else GroupMethod
    return make(config, manager, policy, generator)
