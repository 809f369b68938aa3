"""Typed configuration, validated once, here; nothing below this room knows OmegaConf.

Every field is checked for its type and range when the configuration is built; an unknown key, a wrong type or an
impossible combination is one `UserError` line with the choices. Derived quantities are properties.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from embodied_rl.errors import UserError, did_you_mean


def _require(condition: bool, where: str, rule: str, got: Any) -> None:
    if not condition:
        raise UserError(f"{where} must be {rule}, got {got!r}.")


@dataclass(frozen=True)
class SimConfig:
    """One simulator task and how its processes run."""

    name: str
    target: str
    """``package.module:Attribute`` of a SimEnv, gymnasium.Env or VectorEnv factory."""
    task: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the target."""
    extra: str | None = None
    """Which extra of the package brings the simulator."""
    num_slots: int = 16
    num_workers: int | None = None
    """Processes; null: as many as there are cores, at most one per slot."""
    placement: Literal["auto", "none", "pack", "spread", "near_gpu"] = "auto"
    """Which cores and memory each worker gets; auto: near_gpu or spread on a machine with several NUMA nodes that is ours alone,
    none elsewhere."""
    pipeline_groups: int = 2
    """Slots are stepped in this many alternating groups: one group simulates while the policy acts for another."""
    max_episode_steps: int | None = None
    """Truncate after this many steps; null: what the simulator says."""
    success_ends_episode: bool = False
    """End an episode (as truncated) at its first success."""
    step_timeout_s: float = 60.0
    """A worker that does nothing for so long while it should step is replaced."""
    start_timeout_s: float = 180.0
    """The same for building, resetting and restoring."""
    on_fault: Literal["restore", "restart", "stop"] = "restore"
    """When a worker fails: take its episodes up where they were (restore), begin new ones (restart), or end the run (stop)."""
    non_finite: Literal["stop", "recover"] = "stop"
    """NaN or infinity from a simulator: end the run and dump what led to it, or treat it as any other fault."""
    max_restarts: int = 5
    """End the run when a worker fails more often than this in a row."""
    memory_limit_mb: float | None = None
    """Resident size of one worker beyond which it is replaced; null: no limit."""
    spare_workers: int = 0
    """Workers built ahead, which take a failed one's place at once."""

    def __post_init__(self) -> None:
        workers, slots, limit = self.num_workers, self.num_slots, self.max_episode_steps
        _require(slots >= 1, "sim.num_slots", ">= 1", slots)
        _require(workers is None or workers >= 1, "sim.num_workers", ">= 1 or null", workers)
        _require(workers is None or workers <= slots, "sim.num_workers", f"<= sim.num_slots ({slots})", workers)
        _require(1 <= self.pipeline_groups <= slots, "sim.pipeline_groups", f"between 1 and sim.num_slots ({slots})", self.pipeline_groups)
        _require(limit is None or limit >= 1, "sim.max_episode_steps", ">= 1 or null", limit)
        for name in ("step_timeout_s", "start_timeout_s"):
            _require(getattr(self, name) > 0, f"sim.{name}", "> 0", getattr(self, name))
        _require(self.max_restarts >= 0, "sim.max_restarts", ">= 0", self.max_restarts)
        _require(self.memory_limit_mb is None or self.memory_limit_mb > 0, "sim.memory_limit_mb", "> 0 or null", self.memory_limit_mb)
        _require(self.spare_workers >= 0, "sim.spare_workers", ">= 0", self.spare_workers)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SimConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return _build(SimConfig, data, "sim")


@dataclass(frozen=True)
class PolicyConfig:
    """An actor-critic over a flat state or an image."""

    name: str = "actor_critic"
    encoder: Literal["mlp", "cnn"] = "mlp"
    observation_key: str = "state"
    """Which part of the observation the policy reads: 'state', or 'rgb' for the CNN."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    distribution: Literal["gaussian", "squashed"] = "gaussian"
    """For continuous actions; discrete ones are always categorical."""
    init_log_std: float = -0.5
    normalize_observation: bool = False
    observation_clip: float = 10.0
    cnn_channels: tuple[int, ...] = (32, 64, 64)
    """Of each convolution; with `cnn_kernels` and `cnn_strides` those of Mnih et al. (2015)."""
    cnn_kernels: tuple[int, ...] = (8, 4, 3)
    cnn_strides: tuple[int, ...] = (4, 2, 1)

    def __post_init__(self) -> None:
        _require(all(size >= 1 for size in self.hidden_sizes), "policy.hidden_sizes", "positive", self.hidden_sizes)
        _require(all(size >= 1 for size in self.cnn_channels), "policy.cnn_channels", "positive", self.cnn_channels)
        for name in ("cnn_kernels", "cnn_strides"):
            sizes = getattr(self, name)
            _require(all(size >= 1 for size in sizes), f"policy.{name}", "positive", sizes)
            _require(len(sizes) == len(self.cnn_channels), f"policy.{name}", f"as many as policy.cnn_channels {self.cnn_channels}", sizes)
        _require(self.observation_clip > 0, "policy.observation_clip", "> 0", self.observation_clip)


@dataclass(frozen=True)
class GroupsConfig:
    """Whole episodes in groups from the same initial state (see `embodied_rl.rollout.groups`)."""

    group_size: int = 8
    """Episodes of a group."""
    groups_per_step: int = 4
    """Groups between two updates."""
    redundancy: int = 0
    """Further episodes started for each group; the first `group_size` to finish win."""
    max_staleness: int = 0
    """Largest age, in updates, of anything that is trained on; 0: synchronous and deterministic."""
    max_retries: int = 2
    """How often one episode is begun again after a failure."""
    max_rejected_per_step: int | None = None
    """Groups that may be filtered or fail between two updates before the run stops; null: 10 × groups_per_step."""
    episode_timeout_s: float | None = None
    """An episode that takes longer is given up; null: never."""
    filters: tuple[dict[str, Any], ...] = ()
    """Which groups are dropped and replaced: ``{name: zero_variance}``, ``{name: mean_score, minimum: 0.1}``, ``{name: path, …}``."""


@dataclass(frozen=True)
class RewardConfig:
    """What happens to the episodes' rewards before credit is assigned (whole episodes only)."""

    mean: Literal["none", "batch", "group", "running"] = "none"
    """What is subtracted from an episode's return."""
    std: Literal["none", "batch", "group", "running"] = "none"
    """What it is divided by."""
    group_by: str = "number"
    """Dotted key that makes a group for `mean` and `std`: number (the episode group), seed, domain, metadata.<key>."""
    clip: float | None = None
    """Limit each step's reward to ± this; null: no limit."""
    length_penalty: float = 0.0
    """Taken from the return for each step."""


@dataclass(frozen=True)
class KlConfig:
    """Divergence from the policy that the run started with (whole episodes only)."""

    coef: float = 0.0
    """0: none, and no reference is kept."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    target: float | None = None
    """Adapt the coefficient to keep the divergence here (Ziegler et al. 2019); null: fixed."""
    horizon: float = 10_000
    """Samples of the adaptation."""

    def __post_init__(self) -> None:
        _require(self.coef >= 0, "algorithm.kl.coef", ">= 0", self.coef)
        _require(self.target is None or self.target > 0, "algorithm.kl.target", "> 0 or null", self.target)
        _require(self.horizon > 0, "algorithm.kl.horizon", "> 0", self.horizon)


@dataclass(frozen=True)
class InitializedConfig:
    """Groups that start from a snapshot inside an expert's or an earlier episode (see `embodied_rl.rollout.initialized`)."""

    share: float = 0.0
    """Of the groups that start so; the others, and all evaluation, start ordinarily. 0: off."""
    mode: Literal["rollback", "parallel"] = "rollback"
    """rollback: from the last chunk of each source episode, moving back as success rises; parallel: from all over it."""
    sources: tuple[Literal["expert", "success", "best"], ...] = ("success",)
    """Episodes that are started in: an expert's, own successful ones, own ones with the highest return."""
    expert: str | None = None
    """``package.module:Attribute`` that makes an expert for one episode: called with an observation, it returns the action."""
    expert_episodes: int = 4
    """Successful episodes of the expert that are recorded when a run begins."""
    max_sources: int = 8
    chunk_steps: int = 10
    """Messages of a chunk; starts lie at its multiples."""
    threshold: float = 0.5
    """rollback: success rate at which the start moves back by a chunk."""
    min_episodes: int = 8
    """Episodes from a start that are counted before it moves, or before its chunk is called crucial."""
    anchors: Literal["uniform", "random", "crucial"] = "random"
    """parallel: one of `num_anchors` evenly spaced starts, any start, or the one before the chunk that decides most."""
    num_anchors: int = 8
    crucial_effect: float = 0.3
    """A chunk is crucial when success after it exceeds that before it by at least this, and beyond doubt."""
    success_return: float | None = None
    """Return of a whole episode that counts as success; null: what the simulator reports."""

    def __post_init__(self) -> None:
        for name in ("expert_episodes", "max_sources", "chunk_steps", "min_episodes", "num_anchors"):
            _require(getattr(self, name) >= 1, f"algorithm.initialized.{name}", ">= 1", getattr(self, name))
        for name in ("share", "threshold", "crucial_effect"):
            _require(0 <= getattr(self, name) <= 1, f"algorithm.initialized.{name}", "between 0 and 1", getattr(self, name))
        _require(len(self.sources) > 0, "algorithm.initialized.sources", "some of expert, success, best", self.sources)
        needs_expert = "expert" in self.sources and self.share > 0
        _require(not needs_expert or self.expert is not None, "algorithm.initialized.expert", "given for sources=[expert]", self.expert)


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which mathematics turn experience into a gradient: an advantage, a loss, what surrounds them, and how long."""

    name: str = "ppo"
    advantage: str = "gae"
    """How credit is assigned; `python -m embodied_rl.catalog algorithms` lists them."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the advantage."""
    loss: str = "ppo_clip"
    """Loss of the policy."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the loss."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How a loss per step becomes one number; null: as the loss's paper has it."""
    horizon: int | None = None
    """For seq-mean-token-sum-norm alone: the most steps that an episode may have."""
    groups: GroupsConfig | None = None
    """Learn from whole episodes in groups; null: from `rollout_steps` of every slot."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    initialized: InitializedConfig = field(default_factory=InitializedConfig)
    rollout_steps: int = 64
    """T: steps of every slot between two updates, without groups."""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_epochs: int = 10
    minibatch_size: int = 256
    learning_rate: float = 3e-4
    lr_schedule: Literal["constant", "linear"] = "constant"
    adam_eps: float = 1e-5
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1 of dual-clip PPO (Ye et al. 2020); null: off."""
    value_clip: float | None = None
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    """Stop an update's epochs when the approximate KL divergence to the acting policy exceeds this; null: never."""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_clip: float = 10.0

    def __post_init__(self) -> None:
        _require(self.rollout_steps >= 1, "algorithm.rollout_steps", ">= 1", self.rollout_steps)
        _require(0.0 <= self.gamma <= 1.0, "algorithm.gamma", "between 0 and 1", self.gamma)
        _require(0.0 <= self.gae_lambda <= 1.0, "algorithm.gae_lambda", "between 0 and 1", self.gae_lambda)
        _require(self.num_epochs >= 1, "algorithm.num_epochs", ">= 1", self.num_epochs)
        _require(self.minibatch_size >= 2, "algorithm.minibatch_size", ">= 2", self.minibatch_size)
        for name in ("learning_rate", "adam_eps", "clip_high", "max_grad_norm", "reward_clip"):
            _require(getattr(self, name) > 0, f"algorithm.{name}", "> 0", getattr(self, name))
        _require(0.0 < self.clip_low <= 1.0, "algorithm.clip_low", "above 0, at most 1", self.clip_low)
        _require(self.dual_clip is None or self.dual_clip > 1, "algorithm.dual_clip", "> 1 or null", self.dual_clip)
        for name in ("value_clip", "target_kl"):
            _require(getattr(self, name) is None or getattr(self, name) > 0, f"algorithm.{name}", "> 0 or null", getattr(self, name))
        for name in ("value_coef", "entropy_coef"):
            _require(getattr(self, name) >= 0, f"algorithm.{name}", ">= 0", getattr(self, name))


@dataclass(frozen=True)
class GenerationConfig:
    """What turns observations into actions."""

    backend: Literal["torch", "random"] = "torch"


@dataclass(frozen=True)
class HybridConfig:
    """Where generation and training run."""

    placement: Literal["collocated"] = "collocated"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    """Threads of the learner on a CPU; null: as many as there are cores."""

    def __post_init__(self) -> None:
        _require(self.num_threads is None or self.num_threads >= 1, "hybrid.num_threads", ">= 1 or null", self.num_threads)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation: seeds that training never sees."""

    num_episodes: int = 100
    """At the end of the run."""
    every_steps: int | None = None
    """Also evaluate after this many environment steps; null: at the end only."""
    interim_episodes: int = 32
    """Episodes of an evaluation during the run."""
    seed: int = 0
    """Held-out seeds are 2**30 + seed, 2**30 + seed + 1, …; training seeds lie below 2**30."""

    def __post_init__(self) -> None:
        _require(self.num_episodes >= 1, "evaluation.num_episodes", ">= 1", self.num_episodes)
        _require(self.every_steps is None or self.every_steps >= 1, "evaluation.every_steps", ">= 1 or null", self.every_steps)
        _require(self.interim_episodes >= 1, "evaluation.interim_episodes", ">= 1", self.interim_episodes)
        _require(0 <= self.seed < 2**29, "evaluation.seed", "between 0 and 2**29", self.seed)


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int | None = 50_000
    """Environment steps between checkpoints; null: at the end only."""
    keep_last: int = 2
    keep_best: bool = True

    def __post_init__(self) -> None:
        _require(self.every_steps is None or self.every_steps >= 1, "checkpoint.every_steps", ">= 1 or null", self.every_steps)
        _require(self.keep_last >= 1, "checkpoint.keep_last", ">= 1", self.keep_last)


@dataclass(frozen=True)
class VideoConfig:
    enabled: Literal["auto", "yes", "no"] = "auto"
    """auto: film the final policy where this machine can render, and say so where it cannot."""
    num_episodes: int = 4
    fps: int = 20
    size: int = 256
    """Pixels per side of the square picture."""

    def __post_init__(self) -> None:
        _require(self.num_episodes >= 1, "video.num_episodes", ">= 1", self.num_episodes)
        _require(self.fps >= 1, "video.fps", ">= 1", self.fps)
        _require(self.size >= 16, "video.size", ">= 16", self.size)


@dataclass(frozen=True)
class LoggerConfig:
    names: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "plot"], ...] = ("console", "jsonl", "tensorboard", "plot")
    wandb_project: str = "embodied_rl"
    wandb_mode: Literal["online", "offline"] = "offline"


@dataclass(frozen=True)
class TrainConfig:
    """Everything of one run."""

    sim: SimConfig
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    generation: GenerationConfig
    hybrid: HybridConfig
    logger: LoggerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    video: VideoConfig
    run_dir: str
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
    resume: str | None = None
    """'auto': continue from run_dir's last checkpoint where there is one; a path: continue from that checkpoint."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**31, "seed", "between 0 and 2**31 - 1", self.seed)
        _require(
            self.sim.target != "???",  # how YAML files for OmegaConf mark a value that the user must give
            "sim.target",
            "given for a simulator of your own, such as sim.target=my_package.my_module:MyEnv",
            self.sim.target,
        )
        _require(self.total_steps >= 1, "total_steps", ">= 1", self.total_steps)
        _require(
            self.stop_at_success is None or 0 < self.stop_at_success <= 1, "stop_at_success", "in (0, 1] or null", self.stop_at_success
        )
        _require(
            self.stop_at_return is None or self.evaluation.every_steps is not None,
            "evaluation.every_steps",
            "set where stop_at_return is",
            self.evaluation.every_steps,
        )
        _require(self.max_minutes is None or self.max_minutes > 0, "max_minutes", "> 0 or null", self.max_minutes)
        _require(
            self.algorithm.groups is not None or self.algorithm.minibatch_size <= self.steps_per_iteration,
            "algorithm.minibatch_size",
            f"<= sim.num_slots * algorithm.rollout_steps ({self.steps_per_iteration})",
            self.algorithm.minibatch_size,
        )

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of one rollout: num_slots × rollout_steps. (Whole episodes have no fixed number.)"""
        return self.sim.num_slots * self.algorithm.rollout_steps

    @property
    def num_iterations(self) -> int:
        """Rollouts in total_steps, rounded up."""
        return -(-self.total_steps // self.steps_per_iteration)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TrainConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return _build(TrainConfig, data, "")


def load_sim_config(name: str) -> SimConfig:
    """Read ``configs/sim/<name>.yaml``, ours or an installed package's, or take the target that a package registered under this
    name. Raises UserError with the nearest name."""
    import yaml

    from embodied_rl.registry import installed_targets

    path = config_file("sim", name)
    if path is not None:
        return _build(SimConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "sim")
    target = installed_targets("sim").get(name)
    if target is None:
        raise UserError(f"Simulator '{name}' is not known.{did_you_mean(name, group_names('sim'))}")
    return SimConfig(name=name, target=target)


def config_folders() -> list[Path]:
    """Where configuration files are looked for: ours, then those of installed packages (entry points ``embodied_rl.configs``)."""
    from embodied_rl.paths import configs_dir
    from embodied_rl.registry import installed_config_folders

    return [configs_dir(), *installed_config_folders().values()]


def config_file(group: str, name: str) -> Path | None:
    """The file of one choice of a group; the first folder of `config_folders` that has it wins."""
    paths = (folder / group / f"{name}.yaml" for folder in config_folders())
    return next((path for path in paths if path.is_file()), None)


def group_names(group: str) -> list[str]:
    """Names of the choices of one group (sim, policy, algorithm, experiment, …): the configuration files', and for ``sim`` those
    that installed packages registered."""
    from embodied_rl.registry import installed_targets

    names = {path.stem for folder in config_folders() for path in Path(folder / group).glob("*.yaml")}
    return sorted(names.union(installed_targets("sim") if group == "sim" else ()))


def _build(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UserError(f"'{where}' must be a mapping of keys to values, got {data!r}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{where}." if where else ""
    for key in data:
        if key not in fields:
            raise UserError(f"Configuration key '{prefix}{key}' is not known.{did_you_mean(str(key), fields)}")
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], prefix + name)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise UserError(f"Configuration key '{prefix}{name}' is missing.")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _convert(inner, value, where)
    if origin is Literal:
        if value in arguments:
            return value
        raise UserError(f"{where}={value!r} is not a choice.{did_you_mean(str(value), map(str, arguments))}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        raise UserError(f"{where} must be a list, got {value!r}.")
    if origin is dict:
        if isinstance(value, Mapping):
            return dict(value)
        raise UserError(f"{where} must be a mapping, got {value!r}.")
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (isinstance(value, hint) and not (hint is int and isinstance(value, bool))):
        return value
    raise UserError(f"{where} must be {hint.__name__}, got {value!r} ({type(value).__name__}).")
