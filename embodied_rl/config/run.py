"""Everything of one run, and the groups that are too small for a file of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.config.agent import AgentConfig
from embodied_rl.config.algorithm import AlgorithmConfig
from embodied_rl.config.building import build, require
from embodied_rl.config.domains import DomainConfig, PlayerConfig, merged
from embodied_rl.config.hybrid import HybridConfig
from embodied_rl.config.policy import AnyPolicyConfig
from embodied_rl.config.sim import SimConfig


@dataclass(frozen=True)
class GenerationConfig:
    """What turns observations into actions."""

    backend: Literal["torch", "random", "tokens_torch", "vllm"] = "torch"
    """torch: the policy acts in batches. random: chance. tokens_torch, vllm: language agents' tokens, request by request."""
    max_batch: int = 64
    """Requests that sample at a time (tokens_torch, vllm)."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the caches of requests in flight when weights change (tokens_torch, vllm)."""
    mix: dict[str, PlayerConfig] = field(default_factory=dict)
    """{name: another player of a share of the groups}, with metrics apart (language agents)."""

    def __post_init__(self) -> None:
        require(self.max_batch >= 1, "generation.max_batch", ">= 1", self.max_batch)
        shares = sum(player.share for player in self.mix.values())
        require(shares < 1, "generation.mix", "of shares that leave something to the run's own backend (their sum < 1)", shares)
        for name in self.mix:
            require(name.isidentifier(), "generation.mix", "of names made of letters, digits and _", name)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation: seeds that training never sees."""

    num_episodes: int = 100
    """At the end of the run."""
    every_steps: int | None = None
    """Also evaluate after this many environment steps; null: at the end only."""
    interim_episodes: int = 32
    """Episodes of an evaluation during the run."""
    temperature: float | None = None
    """Of action tokens that are drawn (tiny_vla, openvla, openvla_oft); null: the policy's mode, its likeliest tokens."""
    seed: int = 0
    """Held-out seeds are 2**30 + seed, 2**30 + seed + 1, …; training seeds lie below 2**30."""

    def __post_init__(self) -> None:
        require(self.num_episodes >= 1, "evaluation.num_episodes", ">= 1", self.num_episodes)
        require(self.every_steps is None or self.every_steps >= 1, "evaluation.every_steps", ">= 1 or null", self.every_steps)
        require(self.interim_episodes >= 1, "evaluation.interim_episodes", ">= 1", self.interim_episodes)
        require(0 <= self.seed < 2**29, "evaluation.seed", "between 0 and 2**29", self.seed)
        require(self.temperature is None or self.temperature > 0, "evaluation.temperature", "> 0 or null", self.temperature)


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int | None = 50_000
    """Environment steps between checkpoints; null: at the end only."""
    keep_last: int = 2
    keep_best: bool = True
    within_episodes: bool = False
    """Save the running episodes too and go on within them, where the simulator's can be saved (rollouts of all slots); false: all slots
    begin new episodes at a checkpoint, whether the run was interrupted there or not."""
    asynchronous: bool = False
    """Write in the background while training goes on; the link `last` moves when everything is written."""

    def __post_init__(self) -> None:
        require(self.every_steps is None or self.every_steps >= 1, "checkpoint.every_steps", ">= 1 or null", self.every_steps)
        require(self.keep_last >= 1, "checkpoint.keep_last", ">= 1", self.keep_last)


@dataclass(frozen=True)
class RecordConfig:
    """Training episodes that are written into <run_dir>/episodes as they are played, with log-probabilities and versions."""

    share: float = 0.0
    """Of the training episodes, chosen by their seeds; 0: none."""
    max_episodes: int | None = None
    """Stop recording after this many; null: no limit."""
    video: Literal["mp4", "png", "raw"] = "mp4"
    """How pictures are stored; mp4 is lossless for what the policy sees."""

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "record.share", "between 0 and 1", self.share)
        require(self.max_episodes is None or self.max_episodes >= 1, "record.max_episodes", ">= 1 or null", self.max_episodes)


@dataclass(frozen=True)
class VideoConfig:
    enabled: Literal["auto", "yes", "no"] = "auto"
    """auto: film the final policy where this machine can render, and say so where it cannot."""
    num_episodes: int = 4
    fps: int = 20
    size: int = 256
    """Pixels per side of the square picture."""

    def __post_init__(self) -> None:
        require(self.num_episodes >= 1, "video.num_episodes", ">= 1", self.num_episodes)
        require(self.fps >= 1, "video.fps", ">= 1", self.fps)
        require(self.size >= 16, "video.size", ">= 16", self.size)


@dataclass(frozen=True)
class LoggerConfig:
    names: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "plot"], ...] = ("console", "jsonl", "tensorboard", "plot")
    wandb_project: str = "embodied_rl"
    wandb_mode: Literal["online", "offline"] = "offline"


@dataclass(frozen=True)
class TrainConfig:
    """Everything of one run."""

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
    record: RecordConfig = RecordConfig()
    agent: AgentConfig = field(default_factory=AgentConfig)
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    """{name: what is played there}: several domains in one run (docs/multi_domain.md); `sim` is not played then. Empty: `sim` alone."""
    seed: int = 1
    total_steps: int = 200_000
    """Environment steps to train for, at most."""
    stop_at_success: float | None = None
    """Stop when the success rate reaches this: of the evaluations during the run where evaluation.every_steps is set (without
    exploration noise), else of the last 100 training episodes; null: train all steps."""
    stop_at_return: float | None = None
    """Stop when the mean return of an evaluation during the run reaches this (needs evaluation.every_steps); null: no such end."""
    max_minutes: float | None = None
    """Stop training after this much wall-clock time; null: no limit."""
    recording: tuple[str, ...] = ()
    """Recorded episodes to learn from: a folder or file, or a list of them (see algorithm.recorded)."""
    profile: bool = False
    """Write what happened when into run_dir/timeline.json, for ui.perfetto.dev or chrome://tracing, and the shares of each role into the
    metrics."""
    resume: str | None = None
    """'auto': continue from run_dir's last checkpoint where there is one; a path: continue from that checkpoint."""
    trust: tuple[str, ...] = ()
    """Code that the checkpoint of `resume` may name beside what is registered: package.module:Attribute, or a list (docs/trust.md)."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", "between 0 and 2**31 - 1", self.seed)
        require(
            self.sim.target != "???",  # how YAML files for OmegaConf mark a value that the user must give
            "sim.target",
            "given for a simulator of your own, such as sim.target=my_package.my_module:MyEnv",
            self.sim.target,
        )
        require(self.total_steps >= 1, "total_steps", ">= 1", self.total_steps)
        require(self.stop_at_success is None or 0 < self.stop_at_success <= 1, "stop_at_success", "in (0, 1] or null", self.stop_at_success)
        require(
            self.stop_at_return is None or self.evaluation.every_steps is not None,
            "evaluation.every_steps",
            "set where stop_at_return is",
            self.evaluation.every_steps,
        )
        require(self.max_minutes is None or self.max_minutes > 0, "max_minutes", "> 0 or null", self.max_minutes)
        require(
            self.evaluation.temperature is None or (hasattr(self.policy, "temperature") and not self.domains),
            "evaluation.temperature",
            f"null for policy.name={self.policy.name}: it is of action tokens (tiny_vla, openvla, openvla_oft)",
            self.evaluation.temperature,
        )
        require(
            self.algorithm.groups is not None
            or not self.algorithm.on_policy
            or self.algorithm.minibatch_size <= self.decisions_per_iteration,
            "algorithm.minibatch_size",
            f"<= sim.num_slots * algorithm.rollout_steps ({self.decisions_per_iteration})",
            self.algorithm.minibatch_size,
        )

    def for_domain(self, name: str) -> TrainConfig:
        """The configuration of a run of one of the domains alone, with what is different there.

        Raises:
            UserError: a value of the domain makes no sense in its place.
        """
        domain = self.domains[name]
        agent = build(AgentConfig, merged(dataclasses.asdict(self.agent), domain.agent), f"domains.{name}.agent")
        algorithm = build(AlgorithmConfig, merged(dataclasses.asdict(self.algorithm), domain.algorithm), f"domains.{name}.algorithm")
        policy = self.policy if domain.policy is None else domain.policy
        backend = self.generation.backend if domain.backend is None else domain.backend
        if domain.policy is not None and policy.name != "language":
            backend = "torch"
        generation = dataclasses.replace(self.generation, backend=backend, mix={})
        return dataclasses.replace(self, sim=domain.sim, policy=policy, agent=agent, algorithm=algorithm, generation=generation, domains={})

    @property
    def decisions_per_iteration(self) -> int:
        """Of one rollout: num_slots × rollout_steps. (Whole episodes have no fixed number.)"""
        return self.sim.num_slots * self.algorithm.rollout_steps

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of one rollout, where no episode ends within a chunk: decisions × the policy's chunk."""
        return self.decisions_per_iteration * self.policy.chunk_size

    @property
    def num_iterations(self) -> int:
        """Rollouts in total_steps, rounded up."""
        return -(-self.total_steps // self.steps_per_iteration)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TrainConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return build(TrainConfig, data, "")
