"""Combinations that no run may have, and values that follow from others: one table of rules, and one `resolve` at the boundary.

A field's type bounds a single value, and a part of a configuration checks itself in its class. The combinations are here: a `Rule` is
a condition and the line that a user reads. `resolve` runs before any simulator or process is started.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl.algorithms.composition import check_methods
from embodied_rl.algorithms.filters import build_filters
from embodied_rl.config import policy as policies
from embodied_rl.config.agent import AgentConfig
from embodied_rl.config.algorithm import RewardConfig
from embodied_rl.config.facts import Run
from embodied_rl.config.hybrid import RayConfig
from embodied_rl.config.run import LANGUAGE, OF_STEPS, SHARED, DomainConfig, SimConfig, TrainConfig
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.methods.demonstrations import expert_of, training_sim
from embodied_rl.policies.build import custom_class
from embodied_rl.roles.device_lease import plan_here, with_host_threads

_TOKENS = ("tokens_torch", "vllm")
_OF_CHUNKS = ("gae_chunk", "gae_action")


Condition = Callable[[Run], Any]


@dataclass(frozen=True)
class Rule:
    """A combination to refuse, or to warn of."""

    name: str
    when: Condition
    """Condition under which it applies; any true value."""
    says: str
    """One line for the user; {names} are the attributes of a `Run`, {found} is the condition's value."""

    def message(self, run: Run, found: object) -> str:
        """The message for the user."""
        parts = {name: getattr(run, name) for name in ("config", "algorithm", "policy", "hybrid", "sim")}
        return self.says.format(run=run, found=found, **parts)


# ---- for each task: a domain, or the run itself ------------------------------------------------------------------------

OF_TASKS = (
    # fixed rollouts
    Rule(
        "rollouts_of_steps",
        lambda run: (
            run.groups is None and run.advantage.name not in OF_STEPS and not (run.advantage.own and run.advantage.returns_value_target)
        ),
        "algorithm.advantage='{algorithm.advantage}' needs whole episodes, and algorithm.groups is null: choose a method with groups "
        "(algorithm=grpo, for example), or set algorithm.advantage=gae.",
    ),
    Rule(
        "one_ratio_for_steps",
        lambda run: run.advantage.name == "gae_action" and run.algorithm.ratio == "chunk",
        "algorithm.advantage='gae_action' computes one advantage for each step of a chunk, and algorithm.ratio=chunk computes one ratio "
        "for the whole chunk: set algorithm.ratio=action or token.",
    ),
    Rule(
        "rollout_loss",
        lambda run: run.groups is None and run.why_episodes,
        "algorithm.loss='{algorithm.loss}' needs whole episodes ({found}): set algorithm.groups, or choose a loss of single "
        "decisions (ppo_clip, cispo or your own).",
    ),
    Rule(
        "old_without_ratio",
        lambda run: (
            run.groups is None and "old_log_prob" not in run.loss.inputs and (run.algorithm.max_staleness or run.algorithm.num_epochs > 1)
        ),
        "algorithm.loss='{algorithm.loss}' has no ratio, so it cannot correct for decisions of older weights: set algorithm.num_epochs=1 "
        "and algorithm.max_staleness=0, or choose algorithm.loss=ppo_clip or cispo.",
    ),
    Rule(
        "weighed_normalisation",
        lambda run: run.groups is None and run.algorithm.correction.enabled and run.algorithm.normalize_advantage == "minibatch",
        "algorithm.correction multiplies the advantages by weights once per update, and algorithm.normalize_advantage=minibatch would "
        "cancel the weights: set algorithm.normalize_advantage=batch.",
    ),
    Rule(
        "cloned_reward",
        lambda run: (
            (own := run.algorithm).cloning is not None
            and (own.reward != RewardConfig() or own.normalize_reward or own.critic_warmup or own.initialized.share)
        ),
        "algorithm={algorithm.name} imitates actions and uses neither rewards nor success: leave out algorithm.reward, .normalize_reward, "
        ".critic_warmup and .initialized.",
    ),
    Rule(
        "rollout_reward",
        lambda run: run.groups is None and run.shapes_returns,
        "algorithm.reward.mean, .std, .group_by, .truncated and .overlong_* need whole episodes, and algorithm={algorithm.name} learns "
        "from fixed rollouts or stored steps: set algorithm.groups, or use algorithm.normalize_reward, algorithm.reward.clip, .scale or "
        ".length_penalty, which need only single steps.",
    ),
    Rule(
        "initialized_ahead",
        lambda run: run.groups is None and run.algorithm.initialized.share > 0 and run.algorithm.max_staleness,
        "algorithm.initialized chooses starts by the results of earlier episodes. With algorithm.max_staleness={algorithm.max_staleness} "
        "these are learned from while the next rollouts are played, so the clock would choose: set algorithm.max_staleness=0, or "
        "algorithm.groups.",
    ),
    Rule(
        "initialized_unplayed",
        lambda run: run.algorithm.initialized.share > 0 and run.algorithm.cloning is None and not run.algorithm.plays,
        "algorithm.initialized sets where played episodes start, and algorithm={algorithm.name} plays none: leave it out.",
    ),
    Rule(
        "minibatch_of_a_rollout",
        lambda run: run.groups is None and run.algorithm.on_policy and run.algorithm.minibatch_size > run.num_decisions,
        "algorithm.minibatch_size must be <= sim.num_slots * algorithm.rollout_steps ({run.num_decisions}), got "
        "{algorithm.minibatch_size}.",
    ),
    # whole episodes
    Rule(
        "rollout_staleness",
        lambda run: run.groups is not None and run.algorithm.max_staleness,
        "algorithm.max_staleness={algorithm.max_staleness} contradicts algorithm.groups.max_staleness={run.groups.max_staleness}: set "
        "only one of them.",
    ),
    Rule(
        "critic_warmup",
        lambda run: run.groups is not None and run.algorithm.critic_warmup and not run.advantage.returns_value_target,
        "algorithm.critic_warmup={algorithm.critic_warmup} trains only the critic at first, and "
        "algorithm.advantage='{algorithm.advantage}' has no critic: set algorithm.critic_warmup=0, or choose a method with a critic "
        "(algorithm=ppo_episodes).",
    ),
    Rule(
        "group_of_one",
        lambda run: run.groups is not None and run.advantage.needs & {"groups", "greedy_baseline"} and run.groups.group_size < 2,
        "algorithm.advantage='{algorithm.advantage}' compares the episodes of a group, and algorithm.groups.group_size is "
        "{algorithm.groups.group_size}: set it to 2 or more, or choose an advantage without groups (reinforce, gae).",
    ),
    Rule(
        "loss_of_demonstrations",
        lambda run: run.groups is not None and "demonstrations" in run.loss.needs,
        "algorithm.loss='{algorithm.loss}' learns from demonstrations, and algorithm={algorithm.name} from the policy's own episodes: "
        "choose algorithm=bc or dagger.",
    ),
    Rule(
        "advantage_of_its_own",
        lambda run: run.groups is not None and run.loss.name in ("gpg", "ipa") and run.advantage.name != run.loss.name,
        "algorithm.loss='{algorithm.loss}' computes with the returns of its own advantage: set algorithm.advantage={algorithm.loss}, not "
        "'{algorithm.advantage}'.",
    ),
    Rule(
        "anchor_similarity",
        lambda run: run.algorithm.anchor_similarity is not None and (run.groups is None or "anchors" not in run.advantage.needs),
        "algorithm.anchor_similarity={algorithm.anchor_similarity:g} compares observations, and "
        "algorithm.advantage='{algorithm.advantage}' does not use the comparison: leave it out.",
    ),
    Rule(
        "stale_without_ratio",
        lambda run: run.groups is not None and run.groups.max_staleness > 0 and run.loss.name in ("policy_gradient", "gpg"),
        "algorithm.loss='{algorithm.loss}' has no ratio, so it cannot correct for episodes of older weights: set "
        "algorithm.groups.max_staleness=0, or choose algorithm.loss=ppo_clip or topr.",
    ),
    Rule(
        "aggregation_horizon",
        lambda run: (run.algorithm.aggregation == "seq-mean-token-sum-norm") != (run.algorithm.horizon is not None),
        "algorithm.aggregation=seq-mean-token-sum-norm needs algorithm.horizon (the most steps of an episode), and other aggregations do "
        "not use it: got aggregation={algorithm.aggregation} and horizon={algorithm.horizon}.",
    ),
    # divergence, and updates
    Rule(
        "updates_of_stored",
        lambda run: (
            not (own := run.algorithm).on_policy
            and (own.correction.enabled or (own.advantage_clip, own.adjust_batch, own.aggregation) != (None, None, None))
        ),
        "algorithm.correction, .advantage_clip, .adjust_batch and .aggregation belong to updates on played advantages, and "
        "algorithm={algorithm.name} has none: leave them out.",
    ),
    Rule(
        "kl_of_recordings",
        lambda run: run.algorithm.kl.coef > 0 and not run.algorithm.on_policy,
        "algorithm.kl needs actions that the policy itself sampled, and algorithm={algorithm.name} learns from actions of others: set "
        "algorithm.kl.coef=0 (its objective already keeps the policy near those actions).",
    ),
    Rule(
        "kl_without_gradient",
        lambda run: (kl := run.algorithm.kl).coef > 0 and kl.place == "loss" and kl.kind == "k1" and not kl.straight_through,
        "algorithm.kl.kind='k1' as a loss has the gradient 0: set algorithm.kl.kind=k2 or k3, or algorithm.kl.place=reward.",
    ),
    Rule(
        "adapted_from_zero",
        lambda run: run.algorithm.kl.target is not None and run.algorithm.kl.coef == 0,
        "algorithm.kl.target multiplies algorithm.kl.coef, which is 0 and would stay 0: set algorithm.kl.coef above 0.",
    ),
    # off policy
    Rule(
        "unbounded_sac",
        lambda run: run.by_sac and isinstance(run.policy, policies.PolicyConfig) and run.policy.distribution != "squashed",
        "algorithm.off_policy.update='sac' needs bounded actions, got policy.distribution='{policy.distribution}': set "
        "policy.distribution=squashed, the default of SAC (for discrete actions: algorithm=ppo).",
    ),
    Rule(
        "fixed_noise_sac",
        lambda run: run.by_sac and isinstance(run.policy, policies.FlowOptions) and run.policy.method != "flow_noise",
        "algorithm.off_policy.update='sac' adjusts the policy's entropy, and policy.method='{policy.method}' has fixed noise: set "
        "policy.method=flow_noise, which learns its noise, or algorithm.off_policy.update=iql or awac.",
    ),
    Rule(
        "recorded_sac",
        lambda run: run.by_sac and not run.algorithm.plays,
        "algorithm.off_policy.update='sac' tries actions that no recording contains, and without fresh steps nothing corrects its "
        "critics: set algorithm.off_policy.update=iql or awac, or algorithm.off_policy.fresh=true.",
    ),
    Rule(
        "share_of_nothing_fresh",
        lambda run: (options := run.algorithm.off_policy) is not None and not options.fresh and options.recorded_share > 0,
        "algorithm.off_policy.recorded_share={algorithm.off_policy.recorded_share:g} mixes recorded steps with fresh ones, and "
        "algorithm.off_policy.fresh=false plays none: set recorded_share=0, or fresh=true.",
    ),
    Rule(
        "recording_unused",
        lambda run: run.config.recording and not run.algorithm.learns_from_recordings and run.algorithm.warm_start is None,
        "recording={config.recording[0]} has no effect: algorithm={algorithm.name} learns only from actions that its own policy sampled. "
        "Choose a method that learns from recordings (bc, dagger, iql, awac, rlpd), or clone them first (algorithm.warm_start).",
    ),
    # agent programs
    Rule(
        "program_without_words",
        lambda run: run.of_program and not run.speaks,
        "sim={sim.name} is an agent program, which calls a language model: set policy=language.",
    ),
    Rule(
        "program_initialized",
        lambda run: run.of_program and run.algorithm.initialized.share > 0,
        "algorithm.initialized restores saved simulator states, and the state of an agent program cannot be saved: set "
        "algorithm.initialized.share=0.",
    ),
    # language agents
    Rule(
        "agent_without_groups",
        lambda run: run.speaks and run.groups is None,
        "policy.name=language learns from whole episodes, and algorithm={algorithm.name} does not: choose a method with groups "
        "(algorithm=grpo, gigpo, reinforce_plus_plus, …).",
    ),
    Rule(
        "agent_critic",
        lambda run: (
            isinstance(run.policy, policies.LanguageConfig) and run.advantage.returns_value_target and run.policy.value_head == "none"
        ),
        "algorithm.advantage='{algorithm.advantage}' needs a critic: set policy.value_head=linear, or choose an advantage without one "
        "(grpo, gigpo, rloo, segment_returns, …).",
    ),
    Rule(
        "agent_tokens",
        lambda run: run.speaks and run.config.generation.backend not in _TOKENS,
        "generation.backend='{config.generation.backend}' does not sample tokens, which policy=language needs: set "
        "generation=tokens_torch or generation=vllm.",
    ),
    Rule(
        "agent_player",
        lambda run: run.speaks and run.algorithm.warm_start is not None and run.algorithm.warm_start.player is None,
        "algorithm.warm_start of a language agent clones a scripted player, and none is set: set algorithm.warm_start.player (for example "
        "embodied_rl.sim.text.frozenlake:player), or algorithm.warm_start=null.",
    ),
    Rule(
        "initialized_tools",
        lambda run: run.speaks and run.algorithm.initialized.share > 0 and run.config.agent.tools,
        "algorithm.initialized restores saved simulator states, and the state of tools (variables, files, calls) cannot be saved: set "
        "agent.tools=[], or algorithm.initialized.share=0.",
    ),
    # robots
    Rule(
        "robot_tokens",
        lambda run: not run.speaks and run.config.generation.backend in _TOKENS,
        "generation.backend='{config.generation.backend}' samples tokens, and policy.name='{policy.name}' computes batches of actions: "
        "set generation=torch, or policy=language.",
    ),
    Rule(
        "robot_player",
        lambda run: not run.speaks and run.algorithm.warm_start is not None and run.algorithm.warm_start.player is not None,
        "algorithm.warm_start.player={algorithm.warm_start.player} answers in text, and policy.name='{policy.name}' gives actions: set "
        "algorithm.warm_start.player=null, and clone the task's expert (algorithm.recorded.expert) or recording=….",
    ),
    Rule(
        "warm_start_of_cloning",
        lambda run: not run.speaks and run.algorithm.warm_start is not None and run.algorithm.cloning is not None,
        "algorithm.warm_start clones before the training, and algorithm={algorithm.name} is cloning already: leave it out.",
    ),
    Rule(
        "small_without_chunks",
        lambda run: (run.is_small and run.algorithm.ratio == "action") or (not run.gives_others and run.algorithm.advantage in _OF_CHUNKS),
        "algorithm.ratio=action and the advantages gae_chunk and gae_action need a policy that acts in chunks, and "
        "policy.name='{policy.name}' does not: choose policy=tiny_vla, for example.",
    ),
    Rule(
        "small_head_learning_rate",
        # A domain's network may be beside a language policy, which the run's key is for.
        lambda run: run.is_small and run.domain is None and run.algorithm.head_learning_rate is not None,
        "algorithm.head_learning_rate trains the head of a large model, and policy.name='{policy.name}' has none: set it to null, and use "
        "algorithm.learning_rate and .value_learning_rate.",
    ),
    Rule(
        "no_model_folder",
        lambda run: (
            isinstance(run.policy, policies.OpenVLAPolicyConfig | policies.PI0PolicyConfig)
            and run.config.resume is None
            and not Path(run.policy.path).is_dir()
        ),
        "policy.path='{policy.path}' is not a folder. Give the folder of a checkpoint, with config.json, safetensors files and a "
        "tokenizer.",
    ),
    Rule(
        "no_probabilities",
        lambda run: isinstance(run.policy, policies.OpenVLAOFTPolicyConfig) and run.policy.head == "l1" and run.algorithm.cloning is None,
        "policy.head=l1 gives actions without probabilities, which only cloning and evaluation can use: set policy.head=discrete.",
    ),
    Rule(
        "headless_critic",
        lambda run: isinstance(run.policy, policies.OpenVLAPolicyConfig) and not run.policy.value_head and run.needs_critic,
        "algorithm={algorithm.name} needs a critic, and policy.value_head=false has none: set policy.value_head=true, or choose a method "
        "without one (grpo, gigpo, rloo, awac, …).",
    ),
    Rule(
        "values_of_stored",
        lambda run: run.values_steps and run.algorithm.off_policy is not None,
        "policy.value=action gives a value for each step of a chunk, and algorithm={algorithm.name} learns the value of whole chunks: set "
        "policy.value=chunk.",
    ),
    Rule(
        "values_of_steps",
        lambda run: (
            run.gives_others
            and run.algorithm.cloning is None
            and run.values_steps != (run.algorithm.advantage == "gae_action")
            and ("action" if run.values_steps else "chunk")
        ),
        "policy.value=action (a value for each step of a chunk) and algorithm.advantage=gae_action need each other: got "
        "policy.value={found} and algorithm.advantage={algorithm.advantage}.",
    ),
    Rule(
        "chunks_of_one",
        lambda run: run.gives_others and run.algorithm.advantage in _OF_CHUNKS and run.policy.chunk_size == 1,
        "algorithm.advantage={algorithm.advantage} needs chunks, and policy.name='{policy.name}' has chunks of one step: set "
        "algorithm.advantage=gae.",
    ),
    # ranks
    Rule(
        "no_tensor_plan",
        lambda run: run.tensor_shards > 1 and (run.is_small or isinstance(run.policy, policies.TinyVLAConfig | policies.FlowPolicyConfig)),
        "hybrid.sharding.num_tensor_shards={run.tensor_shards} divides the layers of a transformers model (language, openvla, openvla_oft, "
        "pi0), and policy.name='{policy.name}' has none: set it to 1, and use num_shards, which shards the parameters of any module.",
    ),
    Rule(
        "tensor_shards_of_adapters",
        lambda run: run.tensor_shards > 1 and "all-linear" in run.lora_targets,
        "hybrid.sharding.num_tensor_shards={run.tensor_shards} divides linear layers, and policy.lora_rank={policy.lora_rank} adds LoRA to "
        "all of them, which only num_shards can shard: set it to 1, or policy.lora_rank=0.",
    ),
)
"""Rules for each domain's own configuration, or for the run's if it has no domains."""

# ---- for the whole run -------------------------------------------------------------------------------------------------

_DOMAINS = (
    Rule(
        "domains_recording",
        lambda run: run.config.domains and run.config.recording,
        "recording={config.recording[0]} has episodes of one task, and this run has several domains: set domains.NAME.recording.",
    ),
    Rule(
        "domain_name",
        lambda run: [name for name in run.config.domains if not name.isidentifier() or name in (LANGUAGE, SHARED, "roles")],
        "domains: the name '{found[0]}' is not allowed. Use letters, digits and _, not a digit first, and none of 'language', "
        "'shared' and 'roles'.",
    ),
    Rule(
        "domain_backend",
        lambda run: [
            name
            for name, domain in run.config.domains.items()
            if domain.policy is not None and domain.backend is not None and not run.config.speaks_in(name)
        ],
        "domains.{found[0]}.backend samples tokens of a language policy, and domains.{found[0]}.policy computes batches of actions: leave "
        "the backend out.",
    ),
    Rule(
        "mix_in_no_text",
        lambda run: [
            (name, domain, did_you_mean(domain, run.played))
            for name, player in run.config.generation.mix.items()
            for domain in player.domains
            if domain not in run.played
        ],
        "generation.mix.{found[0][0]}.domains: '{found[0][1]}' is not a text domain of this run.{found[0][2]}",
    ),
    Rule(
        "mix_without_text",
        lambda run: [] if run.played else [*run.config.generation.mix],
        "generation.mix.{found[0]} plays text domains, and this run has none: leave generation.mix out.",
    ),
    Rule(
        "mix_without_actions",
        lambda run: [
            (name, domain)
            for name, player in run.config.generation.mix.items()
            for domain in (player.domains or run.played if player.backend == "random" else ())
            if not run.config.for_domain(domain).agent.actions
        ],
        "generation.mix.{found[0][0]}.backend=random draws one of agent.actions, and domain '{found[0][1]}' lists none (any text is "
        "allowed): list them, or name other domains in generation.mix.{found[0][0]}.domains.",
    ),
)

EVALUATION = (
    Rule(
        "return_never_measured",
        lambda run: run.config.stop_at_return is not None and run.config.evaluation.every_steps is None,
        "stop_at_return={config.stop_at_return:g} needs evaluations during the run, and evaluation.every_steps is null: set "
        "evaluation.every_steps.",
    ),
    Rule(
        "nothing_drawn",
        lambda run: run.config.evaluation.temperature is not None and not any(policies.draws_tokens(task.policy) for task in run.tasks),
        "evaluation.temperature={config.evaluation.temperature:g} applies to action tokens (tiny_vla, openvla, openvla_oft), and "
        "policy.name={policy.name} samples none: set it to null.",
    ),
)

OF_RUNS = (*_DOMAINS, *EVALUATION)
"""Rules for the run, checked before its tasks."""

OF_PLACEMENT = (
    Rule(
        "nothing_recorded",
        lambda run: run.config.record.share > 0 and not run.config.plays,
        "record.share={config.record.share:g}: algorithm={algorithm.name} plays no episodes. Set record.share=0.",
    ),
    Rule(
        "within_ahead",
        lambda run: (
            run.config.checkpoint.within_episodes and run.max_staleness > 0 and (run.groups is not None or run.kind == "multiplexed")
        ),
        "checkpoint.within_episodes repeats a run exactly, and with {run.staleness_key}={run.max_staleness} no run repeats exactly: the "
        "clock decides when new weights arrive, and with hosts which slots share a forward pass. Set checkpoint.within_episodes=false; a "
        "resumed run then plays unfinished episodes again from their seeds.",
    ),
    Rule(
        "scored_rollouts",
        lambda run: run.hybrid.reward_worker is not None and run.groups is None,
        "hybrid.reward_worker scores finished episodes, and algorithm={algorithm.name} learns from steps before their episode ends: "
        "choose a method with groups (algorithm=grpo, ppo_episodes, …).",
    ),
    Rule(
        "stale_recordings",
        lambda run: run.algorithm.max_staleness > 0 and not run.config.plays,
        "algorithm.max_staleness={algorithm.max_staleness} lets the simulators play during training, and algorithm={algorithm.name} plays "
        "nothing: set algorithm.max_staleness=0.",
    ),
    Rule(
        "stale_in_turns",
        lambda run: (
            run.max_staleness > 0
            and {"simulators", "kv_cache"} & set(run.hybrid.offload)
            and (any(own.plays and own.groups is None for own in run.config.algorithms.values()) or run.plays_apart)
        ),
        "{run.staleness_key}={run.max_staleness} plays during training, and hybrid.offload={hybrid.offload} offloads the simulators or "
        "the KV cache then: leave both out of hybrid.offload, or set {run.staleness_key}=0.",
    ),
    # placement
    Rule(
        "pipeline_stages",
        lambda run: not run.on_ray and run.hybrid.placement.num_pipeline_stages not in (1, run.sim.num_groups),
        "hybrid.placement.num_pipeline_stages={hybrid.placement.num_pipeline_stages} contradicts "
        "sim.pipeline_groups={sim.pipeline_groups}: set only one of them.",
    ),
    Rule(
        "too_few_gpus",
        lambda run: (
            not run.on_ray
            and run.kind == "disaggregated"
            and run.machine.gpus
            and bool(run.roles)  # raises if there are fewer than two
            and run.ranks + run.hybrid.players > run.num_gpus
            and max(run.num_gpus - run.hybrid.players, 1)
        ),
        "hybrid.placement=disaggregated needs a GPU for each player ({hybrid.players}) and one for each of {run.ranks} training ranks, and "
        "this machine has {run.num_gpus}: use {found} ranks, or hybrid.placement=collocated.",
    ),
    Rule(
        "shared_gpus",
        lambda run: (
            run.on_ray
            and run.kind == "multiplexed"
            and (gpus := run.hybrid.ray.gpus).generation + gpus.train > 0
            and not (gpus.generation > 0 and gpus.train > 0 and gpus.generation + gpus.train / run.ranks <= 1)
            and 0.5 * run.ranks
        ),
        "hybrid.placement=multiplexed shares a GPU between a host and a training rank, so their parts must add up to at most 1, got "
        "hybrid.ray.gpus.generation={hybrid.ray.gpus.generation:g} and hybrid.ray.gpus.train={hybrid.ray.gpus.train:g} for {run.ranks} "
        "ranks. Set generation=0.5 and train={found:g}.",
    ),
    Rule(
        "divided_gpus",
        lambda run: (
            run.on_ray
            and run.hybrid.sharding is not None
            and run.kind != "multiplexed"
            and (gpus := run.hybrid.ray.gpus.train) % run.ranks
            and max(gpus // run.ranks, 1) * run.ranks
        ),
        "hybrid.ray.gpus.train={hybrid.ray.gpus.train:g} cannot be divided evenly among {run.ranks} ranks (hybrid.sharding), which need "
        "whole GPUs: set hybrid.ray.gpus.train={found:g}, or change the number of ranks.",
    ),
    Rule(
        "recordings_multiplexed",
        lambda run: run.kind == "multiplexed" and not run.config.plays,
        "hybrid.placement=multiplexed lends the devices of playing hosts to training, and algorithm={algorithm.name} learns from "
        "recordings and plays nothing: set hybrid=collocated.",
    ),
    Rule(
        "apart_offload",
        lambda run: run.on_ray and set(run.hybrid.offload) - {"simulators", "kv_cache"},
        "hybrid.offload={hybrid.offload}: with hybrid.cluster=ray nothing else uses the training devices, so offloading from them gains "
        "nothing: leave parameters, gradients and optimizer out.",
    ),
    Rule(
        "players_of_one_process",
        lambda run: run.hybrid.players > run.most_players,
        "hybrid.players={hybrid.players} needs players in their own processes (hybrid=disaggregated or hybrid=ray), and with "
        "hybrid.placement={run.kind} one player has all slots: set hybrid.players=1, or one of these.",
    ),
    Rule(
        "idle_players",
        lambda run: run.hybrid.players > run.scarcest[1],
        "hybrid.players={hybrid.players} is more than {run.scarcest[0]}={run.scarcest[1]}, and each player needs at least one of the "
        "{run.scarcest[2]}: set hybrid.players={run.scarcest[1]}.",
    ),
    Rule(
        "nothing_sent",
        lambda run: run.hybrid.publish != "full" and not run.plays_apart,
        "hybrid.publish={hybrid.publish} applies to weights sent to another process, and this run sends none: set hybrid.publish=full, or "
        "hybrid=disaggregated.",
    ),
    Rule(
        "no_adapter",
        lambda run: run.hybrid.publish == "adapter" and not any(task.has_adapter for task in run.tasks),
        "hybrid.publish=adapter sends only a LoRA adapter, and no policy of this run has one: set policy.lora_rank=8 (policy=language or "
        "openvla), or hybrid.publish=changed.",
    ),
)
"""Rules for the run's playing and training, checked after its tasks."""

RULES = (*OF_RUNS, *OF_TASKS, *OF_PLACEMENT)
"""All rules that refuse a combination."""

WARNINGS = (
    Rule(
        "multiplexed_in_turns",
        lambda run: run.kind == "multiplexed" and run.max_staleness == 0,
        "hybrid.placement=multiplexed with {run.staleness_key}=0: playing and training take turns, because no episode may use older "
        "weights. Set {run.staleness_key}=1 to let them work at the same time.",
    ),
    Rule(
        # One configuration serves a laptop and a machine with GPUs: the run reports settings without effect here.
        "offloaded_to_itself",
        lambda run: run.hybrid.sharding is not None and run.hybrid.sharding.cpu_offload and run.why_no_gpu,
        "hybrid.sharding.cpu_offload has no effect: training runs on the CPU here ({found}), where all weights are in host memory already.",
    ),
    Rule(
        "other_distribution",
        lambda run: any(
            task.speaks and task.groups is not None and (own.temperature == 0.0 or own.top_p < 1.0 or own.top_k > 0)
            for task in run.tasks
            for own in (task.config.agent,)
        ),
        "agent.top_p, agent.top_k or agent.temperature=0 cut tokens off when answers are sampled: log-probabilities, ratios and gradients "
        "are those of the model's own distribution, so the policy's gradient is biased, and algorithm.correction does not see it. Set "
        "top_p=1, top_k=0 and a temperature above 0 for an unbiased one.",
    ),
    Rule(
        "reference_without_adapter",
        lambda run: any(
            isinstance(own, policies.LanguageConfig)
            and task.algorithm.kl.coef > 0
            and (own.adapter is not None or (own.lora_rank > 0 and task.algorithm.warm_start is not None))
            for task in run.tasks
            for own in (task.policy,)
        ),
        "algorithm.kl compares a policy with LoRA with its model alone, not with what policy.adapter or algorithm.warm_start made of it. "
        "The term undoes their work. Set algorithm.kl.coef=0, or start from a folder with the adapter merged in (policy.model).",
    ),
    Rule(
        "options_of_no_critic",
        lambda run: (
            run.algorithm.on_policy
            and (run.algorithm.value_clip, run.algorithm.value_learning_rate) != (None, None)
            and not any(task.advantage.returns_value_target for task in run.tasks)
        ),
        "algorithm.value_clip and .value_learning_rate have no effect: algorithm.advantage='{algorithm.advantage}' has no critic.",
    ),
    Rule(
        "overlong_actions",
        lambda run: run.algorithm.reward.overlong_tokens is not None and not any(task.speaks for task in run.tasks),
        "algorithm.reward.overlong_* have no effect: they are about a language agent's answers.",
    ),
    Rule(
        "options_of_no_agent",
        lambda run: run.config.agent != AgentConfig() and not any(task.speaks for task in run.tasks),
        "agent.* has no effect: no policy of this run is a language model (policy=language).",
    ),
    Rule(
        "options_of_no_cluster",
        lambda run: run.hybrid.ray != RayConfig() and not run.on_ray,
        "hybrid.ray.* has no effect with hybrid.cluster=local: set hybrid=ray.",
    ),
)
"""Rules that only warn."""


def resolve(config: TrainConfig) -> TrainConfig:
    """Check every rule, and return the configuration with everything that follows from it. Starts nothing.
    Raises UserError: an impossible combination, an unknown name, or a placement that this machine cannot have."""
    config = _with_tokens(_with_one_staleness(_with_stages(_with_domains(config))))
    run = Run(config)
    refuse(OF_RUNS, run)
    for task in run.tasks:
        _find_methods(task)
        refuse(OF_TASKS, task)
        _find_teachers(task)
    refuse(OF_PLACEMENT, run)
    config = _with_host_threads(config)
    for rule in WARNINGS:
        if found := rule.when(run):
            warnings.warn(rule.message(run, found), stacklevel=3)
    return config


def refuse(rules: Sequence[Rule], run: Run) -> None:
    """Raise UserError with the message of the first of `rules` that applies."""
    for rule in rules:
        if found := rule.when(run):
            raise UserError(rule.message(run, found))


def _find_methods(task: Run) -> None:
    """Raise UserError for an unknown advantage, loss, option, filter or user's own policy."""
    algorithm = task.algorithm
    check_methods(algorithm)
    if isinstance(task.policy, policies.CustomPolicyConfig):
        custom_class(task.policy)
    if algorithm.groups is not None:
        build_filters(algorithm.groups.filters)


def _find_teachers(task: Run) -> None:
    """Raise UserError for unreadable recordings, and for a task without the expert that must play it."""
    config = task.config
    num_episodes = 0
    for path in config.recording:
        with open_recording(path) as recording:
            num_episodes += len(recording)
    if config.recording and not num_episodes:
        raise UserError(f"recording={', '.join(config.recording)} has no episodes. Record some: python -m embodied_rl.record.")
    training_sim(config)
    if task.algorithm.warm_start is not None and not task.speaks and not config.recording:
        expert_of(config)


def _with_domains(config: TrainConfig) -> TrainConfig:
    """Give a run with players but without domains `sim` as its only domain."""
    if config.domains or not config.generation.mix:
        return config
    return dataclasses.replace(config, domains={config.sim.name: DomainConfig(config.sim)})


def _with_stages(config: TrainConfig) -> TrainConfig:
    """Step simulators in as many groups as the placement has stages, where their number is ``auto``."""
    stages = config.hybrid.placement.num_pipeline_stages

    def staged(sim: SimConfig) -> SimConfig:
        return dataclasses.replace(sim, pipeline_groups=stages) if stages > 1 and sim.pipeline_groups == "auto" else sim

    domains = {name: dataclasses.replace(domain, sim=staged(domain.sim)) for name, domain in config.domains.items()}
    return dataclasses.replace(config, sim=staged(config.sim), domains=domains)


def _with_one_staleness(config: TrainConfig) -> TrainConfig:
    """With groups, only theirs; remove the groups of a run whose domains all have their own method of single steps."""
    own, groups = config.algorithm, config.algorithm.groups
    if groups is None:
        return config
    if not any(one.groups is not None for one in config.algorithms.values()):
        own = dataclasses.replace(own, groups=None, max_staleness=own.max_staleness or groups.max_staleness)
    elif own.max_staleness and groups.max_staleness in (0, own.max_staleness):
        own = dataclasses.replace(own, max_staleness=0, groups=dataclasses.replace(groups, max_staleness=own.max_staleness))
    return dataclasses.replace(config, algorithm=own)


def _with_tokens(config: TrainConfig) -> TrainConfig:
    """For a language policy, sample tokens with torch."""
    if config.policy.name != "language" or config.generation.backend != "torch":
        return config
    return dataclasses.replace(config, generation=dataclasses.replace(config.generation, backend="tokens_torch"))


def _with_host_threads(config: TrainConfig) -> TrainConfig:
    """With a processor divided among hosts, give training its share of the threads; with Ray, a share of the training machine's."""
    if config.hybrid.placement.kind != "multiplexed":
        return config
    plan = plan_here(config)
    return with_host_threads(config, plan) if config.hybrid.cluster == "local" else config
