"""The mathematics of a run and what surrounds them, learning from recorded episodes included."""

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
from embodied_rl.config.building import Config, require
from embodied_rl.errors import UserError


@dataclass(frozen=True)
class RecordedConfig(Config, place="algorithm.recorded"):
    """Which recorded episodes a run learns from, and what is recorded first where the run is given no `recording`."""

    max_episodes: Episodes | None = None
    """Use this many, the first ones; null: all."""
    only_success: bool = False
    """Use only episodes that succeeded at some step."""
    memory_mb: Megabytes = 1024.0
    """Recorded steps held in memory at a time; of a larger recording, changing parts of this size are learned from."""
    verify: bool = True
    """Hold recordings of our own format against their checksums where they are read first; false: trusted, and read a little faster."""
    expert: str | None = None
    """``package.module:Attribute`` that makes an expert for one episode: called with an observation, it returns the action. It plays
    where no recording is given, and answers for DAgger."""
    expert_episodes: Episodes = 100
    """Episodes that the expert plays first where no recording is given."""
    expert_randomness: tuple[Share, ...] = (0.0,)
    """Share of steps with a random action instead of the expert's; the expert's episodes take these values in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.expert_randomness) > 0, "algorithm.recorded.expert_randomness", "at least one share", [])


@dataclass(frozen=True)
class CloningConfig(Config, place="algorithm.cloning"):
    """Supervised learning of recorded actions: behaviour cloning, and DAgger."""

    loss: Literal["nll", "mse"] = "nll"
    """nll: maximum likelihood of the recorded actions; mse: squared error of the policy's mode (continuous actions)."""
    validation_share: Annotated[float, Bounds(0, 1, below=True)] = 0.1
    """Of the episodes; they are not trained on, and tell when to stop. 0: none."""
    patience: Epochs | None = 20
    """Stop after this many epochs without a lower validation loss, and keep the weights of the lowest; null: train all steps."""
    action_margin: Fraction = 0.01
    """A squashed policy cannot reach ±1: recorded actions are moved this far inside."""
    min_log_std: LogStd = -3.0
    """Smallest log standard deviation of a Gaussian policy: recorded actions without noise would drive it to minus infinity."""
    weight_decay: Coefficient = 0.0
    """Of AdamW."""
    dagger: bool = False
    """After a first iteration on recorded episodes, the policy plays, and the expert says what it would have done in each state."""


@dataclass(frozen=True)
class OffPolicyConfig(Config, place="algorithm.off_policy"):
    """An actor beside an ensemble of critics Q(s, a), learned from stored steps: recorded ones, fresh ones, or both."""

    update: Literal["sac", "iql", "awac"] = "sac"
    """How the policy follows the critics: soft actor-critic, implicit Q-learning, advantage-weighted actor-critic."""
    fresh: bool = True
    """Play, and learn from that too; false: only from recorded steps."""
    recorded_share: Annotated[float, Bounds(0, 1, below=True)] = 0.0
    """Of each minibatch, where the run plays; 0.5 is RLPD's symmetric sampling."""
    reward: Literal["recorded", "success"] = "recorded"
    """recorded: the simulator's. success: 1 at a step that succeeds, which ends the episode, else 0."""
    hidden_sizes: tuple[Size, ...] = (256, 256)
    """Of each critic."""
    num_critics: Size = 2
    """Networks that estimate the value of actions; the least of them counts."""
    target_critics: Size = 2
    """Of these many critics, drawn for each update, the smallest value is the target."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers: keeps their values bounded for actions that no data hold (Ball et al. 2023)."""
    target_rate: PositiveShare = 0.005
    """Share of the way that the target networks go towards the critics in each update."""
    n_step: Size = 1
    """Decisions whose rewards are summed before a target bootstraps."""
    updates_per_step: Positive = 1.0
    """Gradient steps for each fresh step, or decision of a policy that acts in chunks."""
    policy_every: Size = 1
    """Critic updates for each update of the policy."""
    updates_per_iteration: Size = 500
    """Gradient steps of an iteration without fresh steps."""
    replay_capacity: Annotated[int, Bounds(1, 1_000_000_000)] = 200_000
    """Fresh steps (decisions) that are kept."""
    warmup_steps: Annotated[int, Bounds(0, 10**12)] = 1_000
    """Fresh steps (decisions) with random actions, before the first update."""
    temperature: Positive = 1.0
    """iql, awac: a step's weight is exp(advantage / temperature)."""
    max_weight: Positive = 100.0
    """iql, awac: largest such weight."""
    expectile: Fraction = 0.7
    """iql: of Q that the state value follows; 0.5 is the mean, towards 1 the best recorded action."""
    init_entropy_coef: Positive = 0.1
    """sac: first weight of the entropy; it adapts."""
    entropy_in_target: bool = True
    """sac: whether critics count the policy's entropy as reward. With a reward only at success it can be worth more than success."""
    target_entropy: Score | None = None
    """sac: what the entropy coefficient keeps the policy's entropy at, in nats; null: minus the action dimensions (of a chunk)."""
    min_log_std: LogStd = -5.0
    """Smallest log standard deviation of the policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, given = f"<= num_critics ({self.num_critics})", self.target_critics
        require(given <= self.num_critics, "algorithm.off_policy.target_critics", rule, given)


@dataclass(frozen=True)
class GroupsConfig(Config, place="algorithm.groups"):
    """Whole episodes in groups from the same initial state (see `embodied_rl.rollout.groups`)."""

    group_size: Size = 8
    """Episodes of a group."""
    groups_per_step: Size = 4
    """Groups between two updates."""
    redundancy: Retries = 0
    """Further episodes started for each group; the first `group_size` to finish win."""
    max_staleness: Staleness = 0
    """Largest age, in updates, of anything that is trained on; 0: synchronous and deterministic."""
    max_retries: Retries = 2
    """How often one episode is begun again after a failure."""
    max_rejected_per_step: Annotated[int, Bounds(0, 1_000_000_000)] | None = None
    """Groups that may be filtered or fail between two updates before the run stops; null: 10 × groups_per_step."""
    episode_timeout_s: Seconds | None = None
    """An episode that takes longer is given up; null: never."""
    filters: tuple[dict[str, Any], ...] = ()
    """Which groups are dropped and replaced: ``{name: zero_variance}``, ``{name: mean_score, minimum: 0.1}``, ``{name: path, …}``."""


@dataclass(frozen=True)
class RewardConfig(Config, place="algorithm.reward"):
    """What happens to rewards before credit is assigned, in the order of the keys; of fixed rollouts `clip`, `scale` and
    `length_penalty`."""

    clip: Positive | None = None
    """Limit each step's reward to ± this; null: no limit."""
    scale: Positive = 1.0
    """Each step's reward times this: a critic learns returns of about 1 soonest."""
    length_penalty: Score = 0.0
    """What each step costs."""
    mean: Literal["none", "batch", "group", "running"] = "none"
    """What is subtracted from an episode's return."""
    std: Literal["none", "batch", "group", "running"] = "none"
    """What it is divided by."""
    overlong_tokens: Size | None = None
    """Most tokens of a language agent's answer, as agent.max_new_tokens: an answer that takes them all is cut off. null: not looked at."""
    overlong_buffer: Size = 1
    """The overlong penalty begins so many tokens before `overlong_tokens` and is whole there (DAPO: Yu et al. 2025)."""
    overlong_penalty: Score = 0.0
    """Taken from the reward of an answer of `overlong_tokens`; 0: nothing."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Episodes that were cut off, by the step limit or in an answer: as they are, without any reward, or not learned from."""
    group_by: str = "number"
    """Dotted key that makes a group for `mean` and `std`: number (the episode group), seed, domain, metadata.<key>."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most, buffer = self.overlong_tokens, self.overlong_buffer
        require(most is not None or not self.overlong_penalty, "algorithm.reward.overlong_tokens", "given for overlong_penalty", most)
        require(most is None or buffer <= most, "algorithm.reward.overlong_buffer", f"<= overlong_tokens ({most})", buffer)


@dataclass(frozen=True)
class CorrectionConfig(Config, place="algorithm.correction"):
    """Importance weights for rows that another policy sampled: an older one, or the same in another precision. For every loss: they
    multiply the advantage, and losses are proportional to it.

    With w = pi / behaviour, pi the policy as it is when the update begins: ``mode=clamp`` is truncated importance sampling, ``mode=mask``
    is IcePop, and with ``loss=ppo_clip`` decoupled PPO; ``reject`` drops whole sequences.
    """

    mode: Literal["none", "clamp", "mask"] = "none"
    """What is done with weights outside [low, high]: clamp them, or give 0 to their entries. none: no weights."""
    level: Literal["token", "chunk", "sequence", "geometric"] = "token"
    """Whose ratio it is: the entry's, its chunk's by geometric mean, the whole sequence's, or the sequence's by geometric mean."""
    low: Coefficient = 0.0
    high: Positive = 2.0
    batch_normalise: bool = False
    """Divide the weights by their mean over the batch (self-normalised importance sampling)."""
    reject: Annotated[float, Bounds(1, 10**9, above=True)] | None = None
    """H > 1: a sequence whose geometric mean of w lies outside [1 / H, H] counts for nothing; null: none is dropped."""

    @property
    def enabled(self) -> bool:
        return self.mode != "none" or self.reject is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low <= self.high, "algorithm.correction.low", f"<= algorithm.correction.high ({self.high:g})", self.low)
        require(
            not self.batch_normalise or self.mode != "none", "algorithm.correction.mode", "clamp or mask for batch_normalise", self.mode
        )


@dataclass(frozen=True)
class KlConfig(Config, place="algorithm.kl"):
    """Divergence from the policy that the run, or its learning after a warm start, began with."""

    coef: Coefficient = 0.0
    """0: none, and no reference is kept."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    straight_through: bool = False
    """As a loss: the value of `kind` with the gradient of k2, that of the divergence (Tang and Munos 2025)."""
    place: Literal["loss", "reward"] = "loss"
    target: Positive | None = None
    """Adapt the coefficient to keep the divergence here (Ziegler et al. 2019); null: fixed."""
    horizon: Positive = 10_000
    """Samples of the adaptation."""


@dataclass(frozen=True)
class InitializedConfig(Config, place="algorithm.initialized"):
    """Groups, or episodes of fixed rollouts, that start inside an expert's or an earlier episode: `embodied_rl.rollout.initialized`."""

    share: Share = 0.0
    """Of the groups or episodes that start so; the others, and all evaluation, start ordinarily. 0: off."""
    mode: Literal["rollback", "parallel"] = "rollback"
    """rollback: from the last chunk of each source episode, moving back as success rises; parallel: from all over it."""
    sources: tuple[Literal["expert", "success", "best"], ...] = ("success",)
    """Episodes that are started in: an expert's, own successful ones, own ones with the highest return."""
    expert: str | None = None
    """``package.module:Attribute`` that makes an expert for one episode, of no argument or of (simulator, environment's number): called
    with an observation, it returns the action."""
    expert_episodes: Episodes = 4
    """Successful episodes of the expert that are recorded when a run begins."""
    max_sources: Size = 8
    """Episodes that are kept to start in."""
    chunk_steps: Size = 10
    """Messages of a chunk; starts lie at its multiples. A message is a step or, of a policy that acts in chunks, one of its chunks."""
    threshold: Share = 0.5
    """rollback: success rate at which the start moves back by a chunk."""
    min_episodes: Episodes = 8
    """Episodes from a start that are counted before it moves, or before its chunk is called crucial."""
    anchors: Literal["uniform", "random", "crucial"] = "random"
    """parallel: one of `num_anchors` evenly spaced starts, any start, or the one before the chunk that decides most."""
    num_anchors: Size = 8
    """States of an episode at which groups may begin."""
    crucial_effect: Share = 0.3
    """A chunk is crucial when success after it exceeds that before it by at least this, and beyond doubt."""
    success_return: Score | None = None
    """Return of a whole episode that counts as success; null: what the simulator reports."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.sources) > 0, "algorithm.initialized.sources", "some of expert, success, best", self.sources)
        needs_expert = "expert" in self.sources and self.share > 0
        require(not needs_expert or self.expert is not None, "algorithm.initialized.expert", "given for sources=[expert]", self.expert)


@dataclass(frozen=True)
class AlgorithmConfig(Config, place="algorithm"):
    """Which mathematics turn experience into a gradient: an advantage, a loss, what surrounds them, and how long."""

    name: str = "ppo"
    """Of the method, as its file in configs/algorithm is called."""
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
    horizon: Steps | None = None
    """Only for seq-mean-token-sum-norm: the most steps that an episode may have."""
    groups: GroupsConfig | None = None
    """Learn from whole episodes in groups; null: from `rollout_steps` of every slot."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    initialized: InitializedConfig = field(default_factory=InitializedConfig)
    recorded: RecordedConfig = field(default_factory=RecordedConfig)
    cloning: CloningConfig | None = None
    """Learn recorded actions (see configs/algorithm/bc.yaml); null: not that."""
    warm_start: WarmStartConfig | None = None
    """Clone a scripted player (language agents) or the task's expert (robots) first; null: not that."""
    off_policy: OffPolicyConfig | None = None
    """Learn from stored steps with critics of actions (see configs/algorithm/iql.yaml); null: not that."""
    rollout_steps: Size = 64
    """T: steps of every slot between two updates, without groups."""
    max_staleness: Staleness = 0
    """Age, in updates, of the weights that play what is learned from: above 0 more is collected while training. 0: playing and updates
    take turns. With groups the same as groups.max_staleness."""
    gamma: Share = 0.99
    """Discount of later rewards."""
    gae_lambda: Share = 0.95
    """Of generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    num_epochs: Epochs = 10
    """Passes over each batch."""
    minibatch_size: Annotated[int, Bounds(2, 1_000_000_000)] = 256
    """Rows of a gradient step."""
    adjust_batch: Literal["copy", "delete", "auto", "random_sample"] | None = None
    """Make the rows of an update a multiple of minibatch_size and of ranks × micro_batch_size, after advantages: minibatches are equal.
    copy: fill up with copies, which count for nothing. delete: drop random rows. auto: the nearer of the two. random_sample: as many random
    rows as the largest multiple. null: minibatches differ by a row."""
    micro_batch_size: Rows | None = None
    """Rows of one forward and backward pass; the gradients of a minibatch's parts are added up. null: the whole minibatch."""
    ratio: Literal["chunk", "action", "token"] = "chunk"
    """What has one probability ratio: a whole decision, each step of its chunk, or each action unit (token, action dimension) by itself.
    Units of steps that were not executed are left out."""
    learning_rate: LearningRate = 3e-4
    """Of Adam."""
    value_learning_rate: LearningRate | None = None
    """Of the critic's own parameters; null: learning_rate."""
    head_learning_rate: LearningRate | None = None
    """Of the layer that gives actions, where the policy tells it apart (tiny_vla); null: learning_rate."""
    critic_warmup: Annotated[int, Bounds(0, 1_000_000_000)] = 0
    """Iterations at the beginning in which only the critic is trained (on policy advantages are 0, and an entropy bonus goes on): after a
    warm start, the first advantages would be noise."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Over the run: the same, or falling to 0 with the steps."""
    adam_eps: PositiveShare = 1e-5
    """Added to Adam's denominator."""
    clip_low: PositiveShare = 0.2
    """The probability ratio is cut to 1 minus this from below."""
    clip_high: Positive = 0.2
    """The probability ratio is cut to 1 plus this from above."""
    dual_clip: Annotated[float, Bounds(1, 10**9, above=True)] | None = None
    """c > 1 of dual-clip PPO (Ye et al. 2020); null: off."""
    value_clip: Positive | None = None
    """The critic may move by this much in an update; null: by any."""
    value_loss: Literal["mse", "huber"] = "mse"
    """Of the critic's error."""
    huber_delta: Positive = 1.0
    """Error from which on Huber's loss is linear."""
    value_coef: Coefficient = 0.5
    """Weight of the critic's loss."""
    entropy_coef: Coefficient = 0.0
    """Weight of the policy's entropy, which keeps it exploring."""
    max_grad_norm: Positive = 0.5
    """Gradients of a larger norm are scaled down to it."""
    target_kl: Positive | None = None
    """Stop an update's epochs when the approximate KL divergence to the acting policy exceeds this; null: never."""
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    """Over what advantages are brought to mean 0 and standard deviation 1."""
    advantage_clip: Positive | None = None
    """Limit advantages to ± this, after they were normalised (not by minibatch); null: no limit."""
    anchor_similarity: PositiveShare | None = None
    """Of advantages by equal observations (gigpo): take texts for equal from this likeness on (difflib's ratio); null: equal ones only."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_clip: Positive = 10.0
    """With normalize_reward: normalised rewards are cut to ± this (of stored steps, their sum over `off_policy.n_step` decisions)."""

    @classmethod
    def from_value(cls, value: object, where: str | None = None) -> Self:
        """See `Config.from_value`; ``loss: decoupled_ppo`` is short for PPO with a correction (see `_preset`)."""
        if isinstance(value, Mapping) and value.get("loss") == "decoupled_ppo":
            value = _preset(value)
        return super().from_value(value, where)

    @property
    def on_policy(self) -> bool:
        """Whether each update consumes the steps that were just played."""
        return self.cloning is None and self.off_policy is None

    @property
    def plays(self) -> bool:
        """Whether anything is played to be learned from."""
        if self.cloning is not None:
            return self.cloning.dagger
        return self.off_policy is None or self.off_policy.fresh

    @property
    def moves_statistics(self) -> bool:
        """Whether what is played is folded into the normalisation of observations; after a warm start that of the cloned ones stays,
        because a cloned policy is lost as soon as it reads its observations on another scale."""
        return self.warm_start is None

    @property
    def learns_from_recordings(self) -> bool:
        off_policy = self.off_policy
        return self.cloning is not None or (off_policy is not None and (not off_policy.fresh or off_policy.recorded_share > 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {"groups": self.groups, "cloning": self.cloning, "off_policy": self.off_policy}
        ways = [name for name, given in named.items() if given is not None]
        require(len(ways) <= 1, "algorithm", "one of groups, cloning and off_policy, the others null", ways)


def _preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Decoupled PPO (Hilton et al. 2021; AReaL), whose weights had their own options until November 2026, as `CorrectionConfig` says it."""
    correction, options = dict(data.get("correction") or {}), dict(data.get("loss_options") or {})
    if correction.get("mode", "none") != "none" or correction.get("reject") is not None:
        raise UserError(
            "algorithm.loss='decoupled_ppo' brings its own weights: set loss=ppo_clip with algorithm.correction, or correction.mode=none."
        )
    if "weight_high" not in options:
        raise UserError(
            "'decoupled_ppo' needs algorithm.loss_options.weight_high. The same: loss=ppo_clip correction={mode: mask, high: 5}."
        )
    named = {key: options.pop(f"weight_{key}") for key in ("low", "high", "mode", "level") if f"weight_{key}" in options}
    return {**data, "loss": "ppo_clip", "loss_options": options, "correction": {**correction, "mode": "mask", **named}}
