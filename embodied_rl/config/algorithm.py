"""Configuration of a run's mathematics, including learning from recorded episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from embodied_rl.bounds import (
    Bounds,
    Coefficient,
    Episodes,
    Epochs,
    Fraction,
    LearningRate,
    LogStd,
    Megabytes,
    Positive,
    PositiveShare,
    Retries,
    Rows,
    Score,
    Seconds,
    Share,
    Size,
    Staleness,
    Steps,
)
from embodied_rl.config.agent import WarmStartConfig
from embodied_rl.config.building import Checks, Config
from embodied_rl.errors import UserError


@dataclass(frozen=True)
class RecordedConfig(Config, place="algorithm.recorded"):
    """Recorded episodes to learn from, and what the expert records first if the run has no `recording`."""

    max_episodes: Episodes | None = None
    """Learn from only this many episodes, drawn by the run's seed, of which a smaller number draws a part; null: all."""
    only_success: bool = False
    """Use only episodes that succeeded at some step."""
    memory_mb: Megabytes = 1024.0
    """Recorded steps in memory at a time; learning from a larger recording uses changing parts of this size."""
    verify: bool = True
    """Check recordings of our own format against their checksums on first reading; false: trust them and read a little faster."""
    expert: str | None = None
    """Your own expert, as in `algorithm.initialized.expert`, instead of the task's. It plays if there is no recording, and answers for
    DAgger."""
    expert_episodes: Episodes = 100
    """Episodes that the expert plays first if there is no recording."""
    expert_randomness: tuple[Share, ...] = (0.0,)
    """Share of steps with a random action instead of the expert's; the expert's episodes take these values in turn."""

    def checks(self) -> Checks:
        yield len(self.expert_randomness) > 0, "expert_randomness", "at least one share", []


@dataclass(frozen=True)
class CloningConfig(Config, place="algorithm.cloning"):
    """Supervised learning of recorded actions: behaviour cloning, and DAgger."""

    loss: Literal["nll", "mse"] = "nll"
    """nll: maximum likelihood of the recorded actions; mse: squared error of the policy's mode (continuous actions)."""
    validation_share: Annotated[float, Bounds(0, 1, below=True)] = 0.1
    """Share of the episodes that are not trained on and decide when to stop. 0: none."""
    patience: Epochs | None = 20
    """Stop after this many epochs without a lower validation loss, and keep the weights of the lowest; null: train all steps."""
    action_margin: Fraction = 0.01
    """Recorded actions are moved this far inside ±1, which a squashed policy cannot reach."""
    min_log_std: LogStd = -3.0
    """Smallest log standard deviation of a Gaussian policy: recorded actions without noise would drive it to minus infinity."""
    weight_decay: Coefficient = 0.0
    """Weight decay of AdamW."""
    dagger: bool = False
    """After a first iteration on recorded episodes, the policy plays, and the expert gives the right action for each state."""


@dataclass(frozen=True)
class OffPolicyConfig(Config, place="algorithm.off_policy"):
    """An actor and an ensemble of critics Q(s, a), learned from stored steps: recorded, fresh, or both."""

    update: Literal["sac", "iql", "awac"] = "sac"
    """Policy update: soft actor-critic, implicit Q-learning, or advantage-weighted actor-critic."""
    fresh: bool = True
    """Play, and learn from that too; false: only from recorded steps."""
    recorded_share: Annotated[float, Bounds(0, 1, below=True)] = 0.0
    """Share of recorded steps in each minibatch, if the run plays; 0.5 is RLPD's symmetric sampling."""
    reward: Literal["recorded", "success"] = "recorded"
    """recorded: the simulator's reward. success: 1 at a step that succeeds, which ends the episode, else 0."""
    hidden_sizes: tuple[Size, ...] = (256, 256)
    """Units of each critic's hidden layers."""
    num_critics: Size = 2
    """Number of critic networks; the least estimate counts."""
    target_critics: Size = 2
    """Number of critics, drawn for each update, whose smallest value is the target."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers, which keeps their values bounded for actions outside the data (Ball et al. 2023)."""
    target_rate: PositiveShare = 0.005
    """Fraction of the distance to the critics that the target networks move in each update."""
    n_step: Size = 1
    """Decisions whose rewards are summed before a target bootstraps."""
    updates_per_step: Positive = 1.0
    """Gradient steps for each fresh step, or for each decision if the policy acts in chunks."""
    policy_every: Size = 1
    """Critic updates for each update of the policy."""
    updates_per_iteration: Size = 500
    """Gradient steps of an iteration without fresh steps."""
    replay_capacity: Annotated[int, Bounds(1, 1_000_000_000)] = 200_000
    """Fresh steps (decisions) that the buffer keeps."""
    warmup_steps: Annotated[int, Bounds(0, 10**12)] = 1_000
    """Fresh steps (decisions) with random actions before the first update."""
    temperature: Positive = 1.0
    """iql, awac: a step's weight is exp(advantage / temperature)."""
    max_weight: Positive = 100.0
    """iql, awac: largest weight of a step."""
    expectile: Fraction = 0.7
    """iql: expectile of Q that the state value follows; 0.5 is the mean, towards 1 the best recorded action."""
    init_entropy_coef: Positive = 0.1
    """sac: initial coefficient of the entropy; it adapts."""
    entropy_in_target: bool = True
    """sac: critics count the policy's entropy as reward. With a reward only at success, entropy can be worth more than success."""
    target_entropy: Score | None = None
    """sac: entropy in nats that the coefficient keeps the policy at; null: minus the action dimensions (of a chunk)."""
    min_log_std: LogStd = -5.0
    """Smallest log standard deviation of the policy."""

    def checks(self) -> Checks:
        yield self.target_critics <= self.num_critics, "target_critics", f"<= num_critics ({self.num_critics})", self.target_critics


@dataclass(frozen=True)
class GroupsConfig(Config, place="algorithm.groups"):
    """Whole episodes in groups from the same initial state (see `embodied_rl.rollout.groups`)."""

    group_size: Size = 8
    """Episodes of a group."""
    groups_per_step: Size = 4
    """Groups of an update."""
    redundancy: Retries = 0
    """Extra episodes started for each group; the first `group_size` to finish are used."""
    max_staleness: Staleness = 0
    """Largest age, in updates, of anything that is trained on; 0: synchronous and deterministic."""
    overtaking: Literal["never", "bounded", "free"] = "bounded"
    """Order of groups in updates. never: by number. bounded: finished groups pass slower ones that can still be used in time. free:
    finished groups first, and groups that get too old are dropped; fastest, but it prefers short episodes."""
    max_concurrent_groups: Size | None = None
    """Unfinished groups of a rollout worker at a time; null: as many as staleness allows."""
    max_retries: Retries = 2
    """Restarts of one episode after failures, at most."""
    max_rejected_per_step: Annotated[int, Bounds(0, 1_000_000_000)] | None = None
    """Groups that may be filtered or fail between two updates before the run stops; null: 10 × groups_per_step."""
    step_timeout_s: Seconds | None = None
    """Longest time of an episode without a new message before it is given up; null: no limit."""
    episode_timeout_s: Seconds | None = None
    """Longest time of an episode before it is given up; null: no limit."""
    batch_timeout_s: Seconds | None = None
    """Longest time that training waits for groups before the run stops with the reason; null: no limit."""
    filters: tuple[dict[str, Any], ...] = ()
    """Filters that drop and replace groups: ``{name: zero_variance}``, ``{name: mean_score, minimum: 0.1}``, ``{name: path, …}``."""

    @property
    def num_places(self) -> int:
        """(S + 1) · groups_per_step: groups between admission and publication."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def rollouts_per_group(self) -> int:
        return self.group_size + self.redundancy

    @property
    def rejected_limit(self) -> int:
        return 10 * self.groups_per_step if self.max_rejected_per_step is None else self.max_rejected_per_step


@dataclass(frozen=True)
class RewardConfig(Config, place="algorithm.reward"):
    """Changes of rewards before credit is assigned, in the order of the keys. Fixed rollouts have only `clip`, `scale` and
    `length_penalty`."""

    clip: Positive | None = None
    """Limit each step's reward to ± this; null: no limit."""
    scale: Positive = 1.0
    """Factor of each step's reward: a critic learns returns of about 1 soonest."""
    length_penalty: Score = 0.0
    """Cost of each step."""
    mean: Literal["none", "batch", "group", "running"] = "none"
    """Mean to subtract from an episode's return."""
    std: Literal["none", "batch", "group", "running"] = "none"
    """Standard deviation to divide an episode's return by."""
    overlong_tokens: Size | None = None
    """Most tokens of a language agent's answer, as agent.max_new_tokens: an answer of this length is cut off. null: not checked."""
    overlong_buffer: Size = 1
    """The overlong penalty begins this many tokens before `overlong_tokens`, and is full there (DAPO: Yu et al. 2025)."""
    overlong_penalty: Coefficient = 0.0
    """Subtracted from the reward of an answer of `overlong_tokens`; 0: nothing."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Episodes cut off by the step limit or in an answer: keep them as they are, zero their rewards, or do not learn from them."""
    group_by: str = "number"
    """Dotted key of the groups for `mean` and `std`: number (the episode group), seed, domain, metadata.<key>."""

    def checks(self) -> Checks:
        most, buffer = self.overlong_tokens, self.overlong_buffer
        yield most is not None or not self.overlong_penalty, "overlong_tokens", "given for overlong_penalty", most
        yield most is None or buffer <= most, "overlong_buffer", f"<= overlong_tokens ({most})", buffer


@dataclass(frozen=True)
class CorrectionConfig(Config, place="algorithm.correction"):
    """Importance weights for rows that another policy sampled: an older one, or the same in another precision. They work with every loss:
    they multiply the advantage, and losses are proportional to it.

    With w = pi / behaviour, pi the policy at the start of the update: ``mode=clamp`` is truncated importance sampling, ``mode=mask`` is
    IcePop, and with ``loss=ppo_clip`` decoupled PPO; ``reject`` drops whole sequences.
    """

    mode: Literal["none", "clamp", "mask"] = "none"
    """For weights outside [low, high]: clamp them, or give their entries weight 0. none: no weights."""
    level: Literal["token", "chunk", "sequence", "geometric"] = "token"
    """Unit of the ratio: the entry, the geometric mean of its chunk, the whole sequence, or the geometric mean of the sequence."""
    low: Coefficient = 0.0
    """Smallest weight that stays as it is."""
    high: Positive = 2.0
    """Largest weight that stays as it is."""
    batch_normalise: bool = False
    """Divide the weights by their mean over the batch (self-normalised importance sampling)."""
    reject: Annotated[float, Bounds(1, 10**9, above=True)] | None = None
    """H > 1: drop a sequence whose geometric mean of w lies outside [1 / H, H]; null: drop none."""

    @property
    def enabled(self) -> bool:
        return self.mode != "none" or self.reject is not None

    def checks(self) -> Checks:
        yield self.low <= self.high, "low", f"<= algorithm.correction.high ({self.high:g})", self.low
        yield not self.batch_normalise or self.mode != "none", "mode", "clamp or mask for batch_normalise", self.mode


@dataclass(frozen=True)
class KlConfig(Config, place="algorithm.kl"):
    """Divergence from the policy that the run, or its learning after a warm start, began with."""

    coef: Coefficient = 0.0
    """Coefficient of the divergence; 0: none, and no reference is kept."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimate from the log-ratio r of policy to reference: r, r² / 2, or exp(-r) - 1 + r, which is never negative (Schulman 2020)."""
    straight_through: bool = False
    """As a loss: combine the value of `kind` with the gradient of k2, which is that of the divergence (Tang and Munos 2025)."""
    place: Literal["loss", "reward"] = "loss"
    """Add the divergence to the loss, or subtract it from the rewards."""
    target: Positive | None = None
    """Divergence that the coefficient adapts to (Ziegler et al. 2019); null: the coefficient is fixed."""
    horizon: Positive = 10_000
    """Samples over which the coefficient adapts."""


@dataclass(frozen=True)
class InitializedConfig(Config, place="algorithm.initialized"):
    """Groups, or episodes of fixed rollouts, that start inside an expert's or an earlier episode: `embodied_rl.rollout.initialized`."""

    share: Share = 0.0
    """Share of the groups or episodes that start so; the others, and all evaluation, start ordinarily. 0: off."""
    mode: Literal["rollback", "parallel"] = "rollback"
    """rollback: start from the last chunk of each source episode, and move back as success rises; parallel: start all over it."""
    sources: tuple[Literal["expert", "success", "best"], ...] = ("success",)
    """Episodes to start in: an expert's, the run's successful ones, or its ones with the highest return."""
    expert: str | None = None
    """``package.module:Attribute`` that makes an expert for one episode, with no argument or with (simulator, environment's number): called
    with an observation, the expert returns the action."""
    expert_episodes: Episodes = 4
    """Successful episodes of the expert to record when a run begins."""
    max_sources: Size = 8
    """Episodes to keep for starts."""
    chunk_steps: Size = 10
    """Messages of a chunk; starts are at its multiples. A message is a step, or a chunk if the policy acts in chunks."""
    threshold: Share = 0.5
    """rollback: success rate at which the start moves back by a chunk."""
    min_episodes: Episodes = 8
    """Episodes from a start that count before it moves, or before its chunk can be crucial."""
    anchors: Literal["uniform", "random", "crucial"] = "random"
    """parallel: one of `num_anchors` evenly spaced starts, any start, or the start before the chunk that matters most."""
    num_anchors: Size = 8
    """States of an episode at which groups may start."""
    crucial_effect: Share = 0.3
    """Least difference of success before and after a chunk that makes it crucial, if it is also significant."""
    success_return: Score | None = None
    """Return of a whole episode that counts as success; null: the simulator reports success."""

    def checks(self) -> Checks:
        yield len(self.sources) > 0, "sources", "some of expert, success, best", self.sources
        needs_expert = "expert" in self.sources and self.share > 0
        yield not needs_expert or self.expert is not None, "expert", "given for sources=[expert]", self.expert


@dataclass(frozen=True)
class AlgorithmConfig(Config, place="algorithm"):
    """The mathematics that turn experience into a gradient: an advantage, a loss, their settings, and the schedule."""

    name: str = "ppo"
    """Name of the method: its file in configs/algorithm."""
    advantage: str = "gae"
    """Credit assignment; `python -m embodied_rl.catalog algorithms` lists the choices."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the advantage."""
    loss: str = "ppo_clip"
    """Loss of the policy."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the loss."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """Reduction of a loss per step to one number; null: as in the loss's paper."""
    horizon: Steps | None = None
    """Only for seq-mean-token-sum-norm: most steps of an episode."""
    groups: GroupsConfig | None = None
    """Learn from whole episodes in groups; null: from `rollout_steps` of every slot."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    initialized: InitializedConfig = field(default_factory=InitializedConfig)
    recorded: RecordedConfig = field(default_factory=RecordedConfig)
    cloning: CloningConfig | None = None
    """Learn recorded actions (see configs/algorithm/bc.yaml); null: off."""
    warm_start: WarmStartConfig | None = None
    """Clone a scripted player (language agents) or the task's expert (robots) first; null: off."""
    off_policy: OffPolicyConfig | None = None
    """Learn from stored steps with critics of actions (see configs/algorithm/iql.yaml); null: off."""
    rollout_steps: Size = 64
    """T: steps of every slot between two updates, without groups."""
    max_staleness: Staleness = 0
    """Age, in updates, of the weights that played what an update learns from. Above 0 the run plays on while it trains. 0: playing and
    updates take turns. With groups the same as groups.max_staleness."""
    gamma: Share = 0.99
    """Discount of later rewards."""
    gae_lambda: Share = 0.95
    """λ of generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    num_epochs: Epochs = 10
    """Passes over each batch."""
    minibatch_size: Annotated[int, Bounds(2, 1_000_000_000)] = 256
    """Rows of a gradient step."""
    adjust_batch: Literal["copy", "delete", "auto", "random_sample"] | None = None
    """Make the rows of an update a multiple of minibatch_size and of ranks × micro_batch_size, after advantages, so that minibatches are
    equal. copy: add copies, which do not count. delete: drop random rows. auto: the smaller change of the two. random_sample: draw the
    largest multiple of random rows. null: minibatches differ by a row."""
    micro_batch_size: Rows | None = None
    """Rows of one forward and backward pass; gradients of a minibatch's parts are added up. null: the whole minibatch."""
    ratio: Literal["chunk", "action", "token"] = "chunk"
    """Unit of a probability ratio: a whole decision, each step of its chunk, or each action unit (token, action dimension). Units of steps
    that were not executed are left out."""
    learning_rate: LearningRate = 3e-4
    """Learning rate of Adam."""
    value_learning_rate: LearningRate | None = None
    """Learning rate of the critic's own parameters; null: learning_rate."""
    head_learning_rate: LearningRate | None = None
    """Learning rate of the layer that outputs actions, if the policy separates it (tiny_vla); null: learning_rate."""
    critic_warmup: Annotated[int, Bounds(0, 1_000_000_000)] = 0
    """Iterations at the beginning that train only the critic: after a warm start, the first advantages would be noise. On policy,
    advantages are 0 then, and an entropy bonus still counts."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Learning rate over the run: constant, or falling linearly to 0."""
    adam_eps: PositiveShare = 1e-5
    """Added to Adam's denominator."""
    clip_low: PositiveShare = 0.2
    """Lower bound of the probability ratio is 1 minus this."""
    clip_high: Positive = 0.2
    """Upper bound of the probability ratio is 1 plus this."""
    dual_clip: Annotated[float, Bounds(1, 10**9, above=True)] | None = None
    """c > 1 of dual-clip PPO (Ye et al. 2020); null: off."""
    value_clip: Positive | None = None
    """Largest change of the critic's values in an update; null: no limit."""
    value_loss: Literal["mse", "huber"] = "mse"
    """Loss of the critic's error."""
    huber_delta: Positive = 1.0
    """Error from which Huber's loss is linear."""
    value_coef: Coefficient = 0.5
    """Weight of the critic's loss."""
    entropy_coef: Coefficient = 0.0
    """Weight of the policy's entropy, which keeps it exploring."""
    max_grad_norm: Positive = 0.5
    """Largest norm of gradients; larger ones are scaled down."""
    target_kl: Positive | None = None
    """Stop an update's epochs when the approximate KL divergence to the acting policy exceeds this; null: never."""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    """Rows over which advantages are normalised to mean 0 and standard deviation 1."""
    advantage_clip: Positive | None = None
    """Limit advantages to ± this after their normalisation (not by minibatch); null: no limit."""
    anchor_similarity: PositiveShare | None = None
    """For advantages by equal observations (gigpo): difflib ratio from which texts count as equal; null: equal texts only."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_clip: Positive = 10.0
    """With normalize_reward: limit normalised rewards to ± this (for stored steps, their sum over `off_policy.n_step` decisions)."""

    @classmethod
    def from_value(cls, value: object, where: str | None = None) -> Self:
        """See `Config.from_value`; ``loss: decoupled_ppo`` is short for PPO with a correction (see `_preset`)."""
        if isinstance(value, Mapping) and value.get("loss") == "decoupled_ppo":
            value = _preset(value)
        return super().from_value(value, where)

    @property
    def on_policy(self) -> bool:
        """Whether each update consumes the steps that were last played."""
        return self.cloning is None and self.off_policy is None

    @property
    def plays(self) -> bool:
        """Whether the run plays to learn from it."""
        if self.cloning is not None:
            return self.cloning.dagger
        return self.off_policy is None or self.off_policy.fresh

    @property
    def moves_statistics(self) -> bool:
        """Whether played observations update the normalisation statistics. After a warm start the cloned statistics stay, because a cloned
        policy fails when its observations are scaled differently."""
        return self.warm_start is None

    @property
    def learns_from_recordings(self) -> bool:
        off_policy = self.off_policy
        return self.cloning is not None or (off_policy is not None and (not off_policy.fresh or off_policy.recorded_share > 0))

    def checks(self) -> Checks:
        ways = [name for name in ("groups", "cloning", "off_policy") if vars(self)[name] is not None]
        yield len(ways) <= 1, "", "one of groups, cloning and off_policy, the others null", ways


def _preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Express decoupled PPO (Hilton et al. 2021; AReaL), which had options of its own until November 2026, as a `CorrectionConfig`."""
    correction, options = dict(data.get("correction") or {}), dict(data.get("loss_options") or {})
    if correction.get("mode", "none") != "none" or correction.get("reject") is not None:
        raise UserError(
            "algorithm.loss='decoupled_ppo' has its own importance weights: set algorithm.loss=ppo_clip, or algorithm.correction.mode=none."
        )
    if "weight_high" not in options:
        raise UserError(
            "'decoupled_ppo' needs algorithm.loss_options.weight_high. Equivalent: algorithm.loss=ppo_clip algorithm.correction={mode: "
            "mask, high: 5}."
        )
    named = {key: options.pop(f"weight_{key}") for key in ("low", "high", "mode", "level") if f"weight_{key}" in options}
    return {**data, "loss": "ppo_clip", "loss_options": options, "correction": {**correction, "mode": "mask", **named}}
