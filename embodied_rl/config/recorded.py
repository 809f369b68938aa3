"""Learning from recorded episodes: which ones, by cloning what they do, or with a critic that they teach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embodied_rl.config.building import require


@dataclass(frozen=True)
class RecordedConfig:
    """Which recorded episodes a run learns from, and what is recorded first where the run is given no `recording`."""

    max_episodes: int | None = None
    """Use this many, the first ones; null: all."""
    only_success: bool = False
    """Use episodes alone that succeeded at some step."""
    memory_mb: float = 1024.0
    """Recorded steps held in memory at a time; of a larger recording, changing parts of this size are learned from."""
    verify: bool = True
    """Hold recordings of our own format against their checksums where they are read first; false: trusted, and read a little faster."""
    expert: str | None = None
    """``package.module:Attribute`` that makes an expert for one episode: called with an observation, it returns the action. It plays
    where no recording is given, and answers for DAgger."""
    expert_episodes: int = 100
    """Episodes that the expert plays first where no recording is given."""
    expert_randomness: tuple[float, ...] = (0.0,)
    """Share of steps with a random action instead of the expert's; the expert's episodes take these values in turn."""

    def __post_init__(self) -> None:
        where = "algorithm.recorded"
        require(self.max_episodes is None or self.max_episodes >= 1, f"{where}.max_episodes", ">= 1 or null", self.max_episodes)
        require(self.memory_mb > 0, f"{where}.memory_mb", "> 0", self.memory_mb)
        require(self.expert_episodes >= 1, f"{where}.expert_episodes", ">= 1", self.expert_episodes)
        shares = self.expert_randomness
        require(len(shares) > 0 and all(0 <= s <= 1 for s in shares), f"{where}.expert_randomness", "shares between 0 and 1", list(shares))


@dataclass(frozen=True)
class CloningConfig:
    """Supervised learning of recorded actions: behaviour cloning, and DAgger."""

    loss: Literal["nll", "mse"] = "nll"
    """nll: maximum likelihood of the recorded actions; mse: squared error of the policy's mode (continuous actions)."""
    validation_share: float = 0.1
    """Of the episodes; they are not trained on, and tell when to stop. 0: none."""
    patience: int | None = 20
    """Stop after this many epochs without a lower validation loss, and keep the weights of the lowest; null: train all steps."""
    action_margin: float = 0.01
    """A squashed policy cannot reach ±1: recorded actions are moved this far inside."""
    min_log_std: float = -3.0
    """Smallest log standard deviation of a Gaussian policy: recorded actions without noise would drive it to minus infinity."""
    weight_decay: float = 0.0
    """Of AdamW."""
    dagger: bool = False
    """After a first iteration on recorded episodes, the policy plays, and the expert says what it would have done in each state."""

    def __post_init__(self) -> None:
        where = "algorithm.cloning"
        require(0 <= self.validation_share < 1, f"{where}.validation_share", "at least 0, below 1", self.validation_share)
        require(self.patience is None or self.patience >= 1, f"{where}.patience", ">= 1 or null", self.patience)
        require(0 < self.action_margin < 1, f"{where}.action_margin", "between 0 and 1", self.action_margin)
        require(self.weight_decay >= 0, f"{where}.weight_decay", ">= 0", self.weight_decay)


@dataclass(frozen=True)
class OffPolicyConfig:
    """An actor beside an ensemble of critics Q(s, a), learned from stored steps: recorded ones, fresh ones, or both."""

    update: Literal["sac", "iql", "awac"] = "sac"
    """How the policy follows the critics: soft actor-critic, implicit Q-learning, advantage-weighted actor-critic."""
    fresh: bool = True
    """Play, and learn from that too; false: from recorded steps alone."""
    recorded_share: float = 0.0
    """Of each minibatch, where the run plays; 0.5 is RLPD's symmetric sampling."""
    reward: Literal["recorded", "success"] = "recorded"
    """recorded: the simulator's. success: 1 at a step that succeeds, which ends the episode, else 0."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Of each critic."""
    num_critics: int = 2
    target_critics: int = 2
    """Of these many critics, drawn for each update, the smallest value is the target."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers: keeps their values bounded for actions that no data hold (Ball et al. 2023)."""
    target_rate: float = 0.005
    """Share of the way that the target networks go towards the critics in each update."""
    n_step: int = 1
    """Rewards summed before a target bootstraps."""
    updates_per_step: float = 1.0
    """Gradient steps for each fresh environment step."""
    policy_every: int = 1
    """Critic updates for each update of the policy."""
    updates_per_iteration: int = 500
    """Gradient steps of an iteration without fresh steps."""
    replay_capacity: int = 200_000
    """Fresh steps that are kept."""
    warmup_steps: int = 1_000
    """Fresh steps with random actions, before the first update."""
    temperature: float = 1.0
    """iql, awac: a step's weight is exp(advantage / temperature)."""
    max_weight: float = 100.0
    """iql, awac: largest such weight."""
    expectile: float = 0.7
    """iql: of Q that the state value follows; 0.5 is the mean, towards 1 the best recorded action."""
    init_entropy_coef: float = 0.1
    """sac: first weight of the entropy; it adapts."""
    entropy_in_target: bool = True
    """sac: whether critics count the policy's entropy as reward. With a reward at success alone it can be worth more than success."""
    target_entropy: float | None = None
    """sac: what the entropy coefficient keeps the policy's entropy at, in nats; null: minus the number of action dimensions."""
    min_log_std: float = -5.0
    """Smallest log standard deviation of the policy."""

    def __post_init__(self) -> None:
        where = "algorithm.off_policy"
        for name in ("num_critics", "target_critics", "n_step", "policy_every", "updates_per_iteration", "replay_capacity"):
            require(getattr(self, name) >= 1, f"{where}.{name}", ">= 1", getattr(self, name))
        require(
            self.target_critics <= self.num_critics, f"{where}.target_critics", f"<= num_critics ({self.num_critics})", self.target_critics
        )
        for name in ("updates_per_step", "temperature", "max_weight", "init_entropy_coef"):
            require(getattr(self, name) > 0, f"{where}.{name}", "> 0", getattr(self, name))
        require(all(size >= 1 for size in self.hidden_sizes), f"{where}.hidden_sizes", "positive", list(self.hidden_sizes))
        require(0 < self.target_rate <= 1, f"{where}.target_rate", "above 0, at most 1", self.target_rate)
        require(0 < self.expectile < 1, f"{where}.expectile", "between 0 and 1", self.expectile)
        require(0 <= self.recorded_share < 1, f"{where}.recorded_share", "at least 0, below 1", self.recorded_share)
        require(self.warmup_steps >= 0, f"{where}.warmup_steps", ">= 0", self.warmup_steps)
