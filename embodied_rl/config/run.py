"""Everything of one run, and the groups that are too small for a file of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from embodied_rl.bounds import (
    Bounds,
    Episodes,
    FramesPerSecond,
    HeldOutSeed,
    Pixels,
    Positive,
    PositiveShare,
    PositiveTemperature,
    Score,
    Seed,
    Share,
    Size,
    Slots,
    Steps,
)
from embodied_rl.config.agent import AgentConfig
from embodied_rl.config.algorithm import AlgorithmConfig
from embodied_rl.config.building import Config, build, require
from embodied_rl.config.domains import DomainConfig, PlayerConfig, merged
from embodied_rl.config.hybrid import HybridConfig
from embodied_rl.config.language import LanguageConfig
from embodied_rl.config.policy import AnyPolicyConfig
from embodied_rl.config.sim import SimConfig
from embodied_rl.errors import UserError, did_you_mean, shown
from embodied_rl.registry import installed_targets


@dataclass(frozen=True)
class GenerationConfig(Config, place="generation"):
    """What turns observations into actions."""

    backend: Literal["torch", "random", "tokens_torch", "vllm"] = "torch"
    """torch: the policy acts in batches. random: chance. tokens_torch, vllm: language agents' tokens, request by request."""
    max_batch: Slots = 64
    """Requests that sample at a time (tokens_torch, vllm)."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the caches of requests in flight when weights change (tokens_torch, vllm)."""
    mix: dict[str, PlayerConfig] = field(default_factory=dict)
    """{name: another player of a share of the groups}, with metrics apart (language agents)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = sum(player.share for player in self.mix.values())
        require(shares < 1, "generation.mix", "of shares that leave something to the run's own backend (their sum < 1)", shares)
        for name in self.mix:
            require(name.isidentifier(), "generation.mix", "of names made of letters, digits and _", name)


@dataclass(frozen=True)
class EvaluationConfig(Config, place="evaluation"):
    """Held-out evaluation: seeds that training never sees."""

    num_episodes: Episodes = 100
    """At the end of the run."""
    every_steps: Steps | None = None
    """Also evaluate after this many environment steps; null: at the end only."""
    interim_episodes: Episodes = 32
    """Episodes of an evaluation during the run."""
    temperature: PositiveTemperature | None = None
    """Of action tokens that are drawn (tiny_vla, openvla, openvla_oft); null: the policy's mode, its likeliest tokens."""
    seed: HeldOutSeed = 0
    """Held-out seeds are 2**30 + seed, 2**30 + seed + 1, …; training seeds lie below 2**30."""


@dataclass(frozen=True)
class CheckpointConfig(Config, place="checkpoint"):
    every_steps: Steps | None = 50_000
    """Environment steps between checkpoints; null: at the end only."""
    keep_last: Annotated[int, Bounds(1, 1_000_000)] = 2
    """So many of the newest stay."""
    keep_best: bool = True
    """The one with the best evaluation stays too."""
    within_episodes: bool = False
    """Save the running episodes too and go on within them, where the simulator's can be saved (rollouts of all slots); false: all slots
    begin new episodes at a checkpoint, whether the run was interrupted there or not."""
    asynchronous: bool = False
    """Write in the background while training goes on; the link `last` moves when everything is written."""


@dataclass(frozen=True)
class RecordConfig(Config, place="record"):
    """Training episodes that are written into <run_dir>/episodes as they are played, with log-probabilities and versions."""

    share: Share = 0.0
    """Of the training episodes, chosen by their seeds; 0: none."""
    max_episodes: Episodes | None = None
    """Stop recording after this many; null: no limit."""
    video: Literal["mp4", "png", "raw"] = "mp4"
    """How pictures are stored; mp4 is lossless for what the policy sees."""


@dataclass(frozen=True)
class VideoConfig(Config, place="video"):
    enabled: Literal["auto", "yes", "no"] = "auto"
    """auto: film the final policy where this machine can render, and say so where it cannot."""
    num_episodes: Size = 4
    """Episodes that are filmed at the end of a run."""
    fps: FramesPerSecond = 20
    """Pictures a second."""
    size: Pixels = 384
    """Pixels per side of the square picture."""


@dataclass(frozen=True)
class LoggerConfig(Config, place="logger"):
    names: tuple[str, ...] = ("console", "jsonl", "tensorboard", "plot")
    """console, jsonl, tensorboard, plot, wandb, mlflow, trackio, those of installed packages, ``package.module:Class`` of your own."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{mlflow, trackio or logger of your own: arguments of its class}, by its name, or by the class of a ``package.module:Class``."""
    wandb_project: str = "embodied_rl"
    """Of Weights & Biases."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """Send to Weights & Biases while the run goes on, or keep files for `wandb sync`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("console", "jsonl", "tensorboard", "wandb", "plot", "mlflow", "trackio", *installed_targets("loggers"))
        for index, name in enumerate(self.names):
            if ":" not in name and name not in known:
                raise UserError(f"logger.names[{index}]={shown(name)} is not a choice.{did_you_mean(name, known)}")
        short = [name.rpartition(":")[2] for name in self.names]
        for name in self.options:
            if name not in short:
                raise UserError(f"logger.options.{name} is of no logger in logger.names.{did_you_mean(name, short)}")


@dataclass(frozen=True)
class TrainConfig(Config):
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
    """The run's folder."""
    record: RecordConfig = RecordConfig()
    agent: AgentConfig = field(default_factory=AgentConfig)
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    """{name: what is played there}: several domains in one run (docs/multi_domain.md); `sim` is not played then. Empty: only `sim`."""
    seed: Seed = 1
    """Of everything that is drawn: the same seed gives the same run."""
    total_steps: Steps = 200_000
    """Environment steps to train for, at most."""
    stop_at_success: PositiveShare | None = None
    """Stop when the success rate reaches this: of the evaluations during the run where evaluation.every_steps is set (without
    exploration noise), else of the last 100 training episodes; null: train all steps."""
    stop_at_return: Score | None = None
    """Stop when the mean return of an evaluation during the run reaches this (needs evaluation.every_steps); null: no such end."""
    max_minutes: Positive | None = None
    """Of wall-clock for the whole run, from the command to the final evaluation; an iteration that has begun is finished; null: no
    limit."""
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
        super().__post_init__()
        require(bool(self.run_dir.strip()), "run_dir", "a folder", self.run_dir)
        longest = max(self.run_dir.split("/"), key=len)
        require(len(longest.encode()) <= 255, "run_dir", "a folder whose names have at most 255 bytes each", longest)
        require(
            self.sim.target != "???",  # how YAML files for OmegaConf mark a value that the user must give
            "sim.target",
            "given for a simulator of your own, such as sim.target=my_package.my_module:MyEnv",
            self.sim.target,
        )
        # Each domain's overrides are checked now too, not when its method is built.
        for name in self.domains:
            self._own_parts(name)

    def _own_parts(self, name: str) -> tuple[AgentConfig, AlgorithmConfig]:
        """The run's agent and algorithm with what the domain has in their place."""
        domain = self.domains[name]
        agent = build(AgentConfig, merged(dataclasses.asdict(self.agent), domain.agent), f"domains.{name}.agent")
        algorithm = build(AlgorithmConfig, merged(dataclasses.asdict(self.algorithm), domain.algorithm), f"domains.{name}.algorithm")
        return agent, algorithm

    def for_domain(self, name: str) -> TrainConfig:
        """The configuration of a run of only this domain, with the domain's overrides; this one for the empty name of a run's only domain.

        Raises:
            UserError: a value of the domain makes no sense in its place.
        """
        if not name:
            return self
        domain = self.domains[name]
        agent, algorithm = self._own_parts(name)
        policy = self.policy if domain.policy is None else domain.policy
        backend = self.generation.backend if domain.backend is None else domain.backend
        if domain.policy is not None and policy.name != "language":
            backend = "torch"
        generation = dataclasses.replace(self.generation, backend=backend, mix={})
        return dataclasses.replace(self, sim=domain.sim, policy=policy, agent=agent, algorithm=algorithm, generation=generation, domains={})

    @property
    def language(self) -> LanguageConfig:
        """The policy, of a run whose policy speaks."""
        assert isinstance(self.policy, LanguageConfig), "policy.name=language says so"
        return self.policy

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
