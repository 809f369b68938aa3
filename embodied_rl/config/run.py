"""Configuration of a whole run: its simulator, domains and players, and the small groups of keys."""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from embodied_rl.bounds import (
    Bounds,
    Episodes,
    Fraction,
    FramesPerSecond,
    HeldOutSeed,
    Megabytes,
    Pixels,
    Positive,
    PositiveShare,
    PositiveTemperature,
    Processes,
    Retries,
    Score,
    Seconds,
    Seed,
    Share,
    Size,
    Slots,
    Steps,
    Temperature,
)
from embodied_rl.config.agent import AgentConfig
from embodied_rl.config.algorithm import AlgorithmConfig
from embodied_rl.config.building import Checks, Config, build, require
from embodied_rl.config.hybrid import HybridConfig
from embodied_rl.config.policy import AnyPolicyConfig, LanguageConfig
from embodied_rl.errors import require_known, shown
from embodied_rl.registry import installed_targets


@dataclass(frozen=True)
class SimConfig(Config, place="sim"):
    """One simulator task, and its processes."""

    name: str
    """Name of the simulator: its file in configs/sim."""
    target: str
    """``package.module:Attribute`` of a SimEnv, gymnasium.Env or VectorEnv factory."""
    task: str | None = None
    """The simulator's name of the task; null: the target has one task."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the target."""
    extra: str | None = None
    """Extra of the package that installs the simulator."""
    num_slots: Slots = 16
    """Environments that are stepped in parallel."""
    num_workers: Processes | Literal["auto"] | None = "auto"
    """Processes. auto: the fastest number, measured when training with this simulator first began on this machine, else one per core. null:
    one per core, at most one per slot. Results do not depend on it."""
    placement: Literal["auto", "none", "pack", "spread", "near_gpu"] = "auto"
    """Cores and memory of each worker. auto: near_gpu or spread on a machine with several NUMA nodes that only this run uses; elsewhere
    none, or with num_workers=auto a core of its own, if that was measured to be faster and nothing else runs on the machine."""
    pipeline_groups: Slots | Literal["auto"] = "auto"
    """Groups of slots that are stepped in turns: one group simulates while the policy acts for another. auto: the policy acts for two
    halves, which are stepped in turns, together or slot by slot, whichever num_workers=auto measured as fastest in rollouts."""
    max_episode_steps: Annotated[int, Bounds(1, 1_000_000_000)] | None = None
    """Truncate episodes after this many steps; null: the simulator's limit."""
    success_ends_episode: bool = False
    """End an episode (as truncated) at its first success."""
    step_timeout_s: Seconds = 60.0
    """Replace a worker that makes no progress in a step for this long."""
    start_timeout_s: Seconds = 180.0
    """The same for building and restoring."""
    reset_timeout_s: Seconds | None = None
    """The same for a reset of all slots; null: ten times the longest so far, or before the first the time of building; at least 20 s (60 s
    until every worker has reset once) and at most sim.start_timeout_s."""
    on_fault: Literal["restore", "restart", "stop"] = "restore"
    """When a worker fails: continue its episodes where they were (restore), begin new ones (restart), or end the run (stop)."""
    non_finite: Literal["stop", "recover"] = "stop"
    """On NaN or infinity from a simulator: end the run and dump what led to it, or treat it as any other fault."""
    max_restarts: Retries = 5
    """Failures of a worker in a row before the run ends, at most."""
    memory_limit_mb: Megabytes | None = None
    """Resident memory of one worker above which it is replaced; null: no limit."""
    spare_workers: Annotated[int, Bounds(0, 65_536)] = 0
    """Workers built ahead, each ready to replace a failed one at once."""

    def checks(self) -> Checks:
        workers, slots = self.fixed_workers, self.num_slots
        yield workers is None or workers <= slots, "num_workers", f"<= sim.num_slots ({slots})", workers
        yield self.num_groups <= slots, "pipeline_groups", f"<= sim.num_slots ({slots})", self.pipeline_groups

    def with_target(self) -> Self:
        """This configuration. Raises UserError if its target is ???, OmegaConf's mark of a value that the user must give."""
        rule = "given for a simulator of your own, such as sim.target=my_package.my_module:MyEnv"
        require(self.target != "???", "sim.target", rule, self.target)
        return self

    @property
    def num_groups(self) -> int:
        """Groups of slots that the policy acts for in turn; two if measurements decide whether they are stepped in turns."""
        return self.pipeline_groups if isinstance(self.pipeline_groups, int) else min(2, self.num_slots)

    @property
    def fixed_workers(self) -> int | None:
        """`num_workers` if it is a number; None if the machine decides."""
        return self.num_workers if isinstance(self.num_workers, int) else None


CREDIT_KEYS = ("advantage", "advantage_options", "gamma", "gae_lambda", "reward", "warm_start")
"""Keys of `algorithm` that a domain sharing the run's policy may override: the valuation of its episodes, and its warm start."""


OF_STEPS = ("gae", "gae_chunk", "gae_action")
"""Advantages that fixed rollouts contain enough for."""

LANGUAGE, SHARED = "language", "shared"
"""Names of the run's policy if several domains share it: of texts and of robots."""


def model_place(policy: str) -> str:
    """Subfolder of ``model``, in a checkpoint and in a run's folder, with a language policy's Hugging Face files: none for the run's
    policy, the domain's name for a domain's own."""
    return "" if policy == LANGUAGE else policy


@dataclass(frozen=True)
class DomainConfig(Config, place="domains.…"):
    """One domain of a run with several: its simulator, its weight, and its differences from the run's settings."""

    sim: SimConfig
    """Its simulator: ``/sim@domains.NAME.sim: frozenlake`` in an experiment's defaults."""
    weight: Positive = 1.0
    """Share against other domains of the same kind of learning: of the groups; of the environment steps of an iteration's rollouts, except
    for domains with their own algorithm.rollout_steps; or, if the domains play nothing, of their gradient steps."""
    policy: AnyPolicyConfig | None = None
    """Its own policy, ``/policy@domains.NAME.policy: mlp``; null: the run's, which all such domains share."""
    agent: dict[str, Any] = field(default_factory=dict)
    """Overrides of the run's `agent`."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """Overrides of the run's `algorithm`; with a `name` all of it (``/algorithm@domains.NAME.algorithm: bc``). Then ppo, sac, bc and the
    like learn from single steps there, whatever the run learns from. groups and max_staleness are always the run's. A domain that shares
    the run's policy can set only advantage, advantage_options, gamma, gae_lambda, reward and warm_start."""
    backend: Literal["tokens_torch", "vllm"] | None = None
    """Backend that samples its tokens; null: the run's generation.backend."""
    recording: tuple[str, ...] = ()
    """Folders of recorded episodes that its policy learns from, or that its warm start clones; empty: its expert's."""

    @property
    def learns_from_steps(self) -> bool:
        """Whether it has its own method, and one of single steps, whatever the run learns from."""
        own = self.algorithm
        return bool(own.get("cloning") or own.get("off_policy")) or ("name" in own and own.get("advantage", "gae") in OF_STEPS)

    def checks(self) -> Checks:
        nearest = " (choose algorithm=grpo or the like for the run, and for domains of single steps +algorithm@domains.NAME.algorithm=ppo)"
        for key, further in (("groups", nearest), ("max_staleness", "")):
            yield key not in self.algorithm, "algorithm", f"without {key}: all domains share the run's{further}", key
        if self.policy is None:
            unknown = sorted(set(self.algorithm) - set(CREDIT_KEYS))
            rule = f"some of {', '.join(CREDIT_KEYS)} in a domain that shares the run's policy"
            yield not unknown, "algorithm", rule, unknown


@dataclass(frozen=True)
class PlayerConfig(Config, place="generation.mix.…"):
    """Another player of a share of the groups: the same policy on another backend, or a baseline (another model, random actions)."""

    share: Fraction
    """Share of the groups of each domain."""
    backend: Literal["tokens_torch", "vllm", "openai", "random"] = "openai"
    """tokens_torch, vllm: the domain's policy. openai: a server at `base_url`. random: any of agent.actions. The last two train nothing."""
    train: bool = True
    """Learn from its episodes too (tokens_torch, vllm)."""
    domains: tuple[str, ...] = ()
    """Domains that it plays; empty: all domains of text."""
    num_slots: Slots = 8
    """Number of its own simulators, in each domain."""
    temperature: Temperature | None = None
    """Sampling temperature; null: agent.temperature."""
    base_url: str | None = None
    """openai: address of the server, with the version: ``http://127.0.0.1:8000/v1``."""
    model: str | None = None
    """openai: the server's name of the model."""
    api: Literal["chat", "completions"] = "chat"
    """openai: chat sends messages, for the server's own chat template; completions sends the prompt's text."""
    api_key_env: str | None = None
    """openai: name of the environment variable with the key."""
    timeout_s: Seconds = 60.0
    """openai: timeout of one attempt."""

    def checks(self) -> Checks:
        for name, given in (("base_url", self.base_url), ("model", self.model)):
            yield self.backend != "openai" or given is not None, name, "given for backend=openai", given

    @property
    def is_policy(self) -> bool:
        """Whether it is the policy that learns from the domain."""
        return self.backend in ("tokens_torch", "vllm")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `base` and replace values by those of `changes`, in nested mappings too."""
    result = dict(base)
    for key, value in changes.items():
        own = result.get(key)
        result[key] = merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return result


@dataclass(frozen=True)
class GenerationConfig(Config, place="generation"):
    """Backend that turns observations into actions."""

    backend: Literal["torch", "random", "tokens_torch", "vllm"] = "torch"
    """torch: the policy acts in batches. random: random actions. tokens_torch, vllm: language agents' tokens, request by request."""
    max_batch: Slots = 64
    """Requests that sample at the same time (tokens_torch, vllm)."""
    gpu_memory_share: PositiveShare = 0.5
    """Share of a GPU's memory for weights and cache together (vllm)."""
    compiled: bool = False
    """Compile the model and capture graphs: slower to start, faster on GPUs (vllm)."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """Caches of requests in flight when weights change: recompute or keep them (tokens_torch, vllm)."""
    mix: dict[str, PlayerConfig] = field(default_factory=dict)
    """{name: another player of a share of the groups}, with separate metrics (language agents)."""

    def checks(self) -> Checks:
        shares = sum(player.share for player in self.mix.values())
        yield shares < 1, "mix", "of shares that leave something to the run's own backend (their sum < 1)", shares
        for name in self.mix:
            yield name.isidentifier(), "mix", "of names made of letters, digits and _", name


@dataclass(frozen=True)
class EvaluationConfig(Config, place="evaluation"):
    """Evaluation on held-out seeds, which training never uses."""

    num_episodes: Episodes = 100
    """Episodes of the evaluation at the end of the run."""
    every_steps: Steps | None = None
    """Environment steps between evaluations during the run; null: evaluate at the end only."""
    interim_episodes: Episodes = 32
    """Episodes of an evaluation during the run."""
    temperature: PositiveTemperature | None = None
    """Temperature of action tokens that are sampled (tiny_vla, openvla, openvla_oft); null: the policy's mode, its likeliest tokens."""
    seed: HeldOutSeed = 0
    """Held-out seeds are 2**30 + seed, 2**30 + seed + 1, …; training seeds are below 2**30."""


@dataclass(frozen=True)
class CheckpointConfig(Config, place="checkpoint"):
    every_steps: Steps | None = 50_000
    """Environment steps between checkpoints; null: at the end only."""
    keep_last: Annotated[int, Bounds(1, 1_000_000)] = 2
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the best checkpoint: by evaluations during the run, or without them by the last 100 training episodes."""
    within_episodes: bool = False
    """Save the running episodes too and continue within them, if the simulator can save them; groups have no running episodes there. false:
    all slots begin new episodes at a checkpoint, whether the run was interrupted there or not."""
    asynchronous: bool = False
    """Write in the background while training continues; the link `last` moves once everything is written."""


@dataclass(frozen=True)
class RecordConfig(Config, place="record"):
    """Recording of training episodes in <run_dir>/episodes as they are played, with log-probabilities and versions."""

    share: Share = 0.0
    """Share of the training episodes, chosen by their seeds; 0: none."""
    max_episodes: Episodes | None = None
    """Stop recording after this many; null: no limit."""
    video: Literal["mp4", "png", "raw"] = "mp4"
    """Storage of pictures; mp4 is lossless for what the policy sees."""


@dataclass(frozen=True)
class VideoConfig(Config, place="video"):
    enabled: Literal["auto", "yes", "no"] = "auto"
    """auto: film the final policy if this machine can render, else report that it cannot."""
    num_episodes: Size = 4
    """Episodes to film at the end of a run."""
    fps: FramesPerSecond = 20
    """Pictures per second."""
    size: Pixels = 384
    """Pixels per side of the square picture."""


@dataclass(frozen=True)
class LoggerConfig(Config, place="logger"):
    names: tuple[str, ...] = ("console", "jsonl", "tensorboard", "plot")
    """console, jsonl, tensorboard, plot, wandb, mlflow, trackio, those of installed packages, ``package.module:Class`` of your own."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{mlflow, trackio or logger of your own: arguments of its class}, by its name, or by the class of a ``package.module:Class``."""
    wandb_project: str = "embodied_rl"
    """Project in Weights & Biases."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """Send to Weights & Biases during the run, or keep files for `wandb sync`."""

    def checks(self) -> Checks:
        known = ("console", "jsonl", "tensorboard", "wandb", "plot", "mlflow", "trackio", *installed_targets("loggers"))
        for index, name in enumerate(self.names):
            require_known(name, known if ":" not in name else (name,), f"logger.names[{index}]={shown(name)} is not a choice.")
        short = [name.rpartition(":")[2] for name in self.names]
        for name in self.options:
            require_known(name, short, f"logger.options.{name}: logger.names does not contain this logger.")
        return iter(())


@dataclass(frozen=True)
class TrainConfig(Config):
    """Configuration of one run."""

    sim: SimConfig
    policy: AnyPolicyConfig
    algorithm: AlgorithmConfig
    generation: GenerationConfig
    hybrid: HybridConfig
    logger: LoggerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    video: VideoConfig
    run_dir: str
    """The run's folder."""
    record: RecordConfig = RecordConfig()
    agent: AgentConfig = field(default_factory=AgentConfig)
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    """{name: domain}: several domains in one run (docs/multi_domain.md), which then does not play `sim`. Empty: only `sim`."""
    seed: Seed = 1
    """Seed of all randomness: the same seed gives the same run."""
    total_steps: Steps = 200_000
    """Environment steps to train for, at most; gradient steps if the run plays nothing."""
    stop_at_success: PositiveShare | None = None
    """Stop when the success rate reaches this: that of evaluations during the run if evaluation.every_steps is set (without exploration
    noise), else of the last 100 training episodes; null: train all steps."""
    stop_at_return: Score | None = None
    """Stop when the mean return of an evaluation during the run reaches this (needs evaluation.every_steps); null: no such limit."""
    max_minutes: Positive | None = None
    """Wall-clock minutes of the whole run, from the command to the final evaluation; a started iteration is finished; null: no limit."""
    recording: tuple[str, ...] = ()
    """Recorded episodes to learn from: a folder or file, or a list of them (see algorithm.recorded)."""
    profile: bool = False
    """Write a timeline to run_dir/timeline.json, for ui.perfetto.dev or chrome://tracing, and the shares of each role into the metrics."""
    resume: str | None = None
    """auto: continue run_dir's run, or the newest unfinished one of this simulator and seed, if there is one; a path: continue from that
    run or checkpoint."""
    trust: tuple[str, ...] = ()
    """Code that the checkpoint of `resume` may name beside registered code: package.module:Attribute, or a list (docs/trust.md)."""

    def checks(self) -> Checks:
        yield bool(self.run_dir.strip()), "run_dir", "a folder", self.run_dir
        longest = max(self.run_dir.split("/"), key=len)
        yield len(longest.encode()) <= 255, "run_dir", "a folder whose names have at most 255 bytes each", longest
        self.sim.with_target()
        _ = self._own_parts  # checks each domain's overrides now, not only when its method is built

    @cached_property
    def _own_parts(self) -> dict[str, tuple[AgentConfig, AlgorithmConfig]]:
        """{domain: the run's agent and algorithm with its overrides}"""
        return {name: self._with_overrides(name, domain) for name, domain in self.domains.items()}

    def _with_overrides(self, name: str, domain: DomainConfig) -> tuple[AgentConfig, AlgorithmConfig]:
        agent = build(AgentConfig, merged(dataclasses.asdict(self.agent), domain.agent), f"domains.{name}.agent")
        shared = dataclasses.asdict(self.algorithm)
        if "name" in domain.algorithm:
            shared = {key: shared[key] for key in ("groups", "rollout_steps", "max_staleness")}
        if self.algorithm.groups is not None and domain.learns_from_steps:
            shared |= {"groups": None, "max_staleness": self.algorithm.max_staleness or self.algorithm.groups.max_staleness}
        return agent, build(AlgorithmConfig, merged(shared, domain.algorithm), f"domains.{name}.algorithm")

    @cached_property
    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """{domain: its policy's algorithm}; a run's only domain has no name."""
        return {name: algorithm for name, (_, algorithm) in self._own_parts.items()} or {"": self.algorithm}

    @property
    def plays(self) -> bool:
        """Whether any domain plays to learn from it."""
        return any(own.plays for own in self.algorithms.values())

    @property
    def keeps_steps(self) -> bool:
        """Whether any policy learns from stored steps, recorded or played."""
        return not all(own.on_policy for own in self.algorithms.values())

    def for_domain(self, name: str) -> TrainConfig:
        """Configuration of a run of only this domain, with its overrides; this configuration for the empty name of a run's only domain.
        Raises UserError: an override is invalid."""
        if not name:
            return self
        domain = self.domains[name]
        agent, algorithm = self._own_parts[name]
        policy = self.policy if domain.policy is None else domain.policy
        backend = self.generation.backend if domain.backend is None else domain.backend
        if policy.name == "language":
            backend = "tokens_torch" if backend == "torch" else backend
        elif domain.policy is not None or (domain.backend is None and any(map(self.speaks_in, self.domains))):
            backend = "torch"  # the run's samples another domain's tokens
        generation = dataclasses.replace(self.generation, backend=backend, mix={})
        if algorithm.groups is None:
            algorithm = dataclasses.replace(algorithm, rollout_steps=self._rollout_steps(name))
        return dataclasses.replace(
            self,
            sim=domain.sim,
            policy=policy,
            agent=agent,
            algorithm=algorithm,
            generation=generation,
            recording=domain.recording,
            domains={},
        )

    def policy_of(self, domain: str) -> str:
        """Name of the policy that plays a domain, in metrics and checkpoints: the domain's name if the policy is its own; `LANGUAGE` or
        `SHARED` if domains share the run's; empty if the run has one task."""
        if not domain or self.domains[domain].policy is not None:
            return domain
        return LANGUAGE if self.policy.name == "language" else SHARED

    @property
    def sim_names(self) -> str:
        """Names of the simulators that are played."""
        return "+".join(dict.fromkeys(domain.sim.name for domain in self.domains.values())) or self.sim.name

    def of_policy(self, policy: str) -> TrainConfig:
        """Configuration of a run of only this policy (`policy_of`): its domain's if it is a domain's own, else this one."""
        return self.for_domain(policy) if policy in self.domains else self

    def speaks_in(self, domain: str) -> bool:
        """Whether the policy that plays a domain is a language policy."""
        return (self.domains[domain].policy or self.policy).name == "language"

    @property
    def language(self) -> LanguageConfig:
        """Configuration of the language policy, in a run that has one."""
        assert isinstance(self.policy, LanguageConfig), "policy.name=language says so"
        return self.policy

    @property
    def decisions_per_iteration(self) -> int:
        """Decisions of one rollout: num_slots × rollout_steps. (Whole episodes have no fixed number.)"""
        return self.sim.num_slots * self.algorithm.rollout_steps

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of one rollout of each domain, if no episode ends within a chunk: decisions × the policy's chunk."""
        if self.domains:
            return sum(steps * self._rollout_steps(name) for name, steps in self._steps_at_once.items())
        return self.decisions_per_iteration * self.policy.chunk_size

    @property
    def _steps_at_once(self) -> dict[str, int]:
        """{domain that plays rollouts: environment steps of one decision in all of its slots}; all domains if the run plays nothing."""
        of_steps = {name: own for name, own in self.algorithms.items() if own.groups is None}
        played = {name: self.domains[name] for name, own in of_steps.items() if own.plays or not self.plays}
        return {name: one.sim.num_slots * (one.policy or self.policy).chunk_size for name, one in played.items()}

    def _rollout_steps(self, name: str) -> int:
        """Steps of each slot in a domain: its own, else the environment steps of the run's in all such domains, divided by weight."""
        steps = {key: number for key, number in self._steps_at_once.items() if "rollout_steps" not in self.domains[key].algorithm}
        if name not in steps:
            return self.algorithms[name].rollout_steps
        weights = {key: fractions.Fraction(self.domains[key].weight) for key in steps}
        share = weights[name] / sum(weights.values()) * sum(steps.values())
        return max(1, round(self.algorithm.rollout_steps * share / steps[name]))

    def progress(self, steps: int) -> float:
        """Share of the run that is over after `steps` environment steps."""
        return min(steps / self.total_steps, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
