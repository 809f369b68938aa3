"""Learning from recorded episodes: which ones, by cloning what they do, or with a critic that they teach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from embodied_rl.bounds import (
    Bounds,
    Coefficient,
    Episodes,
    Epochs,
    Fraction,
    LogStd,
    Megabytes,
    Positive,
    PositiveShare,
    Score,
    Share,
    Size,
)
from embodied_rl.config.building import Config, require


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
