"""Objectives on stored steps: imitation of their actions, and critics of actions with the policy that follows them.

An update of critics takes several steps on the same rows, each with its own objective and parameters (`steps_of`): implicit
Q-learning steps the state value, the policy and the critics; AWAC the policy and the critics; soft actor-critic the critics, and the
policy with the entropy coefficient. The target networks move after the critics' step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms import offline_rl
from embodied_rl.algorithms.aggregation import masked_mean
from embodied_rl.algorithms.losses import behaviour_cloning_loss
from embodied_rl.config import CloningConfig, OffPolicyConfig
from embodied_rl.episodes.dataset import EpisodeDataset, Transitions
from embodied_rl.learning.objectives import Metrics, Numbers, Objective, Trained
from embodied_rl.learning.rows import StepRows, StoredRows, TransitionRows
from embodied_rl.policies.base import Policy, prepare_observation
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.types import Observation

Stored = TypeVar("Stored", bound=StoredRows)


def read_statistics(policy: Policy, data: EpisodeDataset) -> None:
    """Fold every recorded observation once into the policy's normalisation statistics."""
    for seen in data.observations():
        policy.update_statistics({key: torch.from_numpy(part) for key, part in seen.items() if part.dtype != object})


class StoredObjective(Objective[Trained, Stored]):
    """Objective on stored steps; every mean is over the steps of the whole minibatch."""

    unit = "steps"

    def begin(self, rows: Stored, *, kl_coef: float) -> tuple[Stored, Numbers]:
        return rows, {"entries": float(rows.num_rows if rows.mask is None else int(rows.mask.sum()))}


# ---- imitation ----------------------------------------------------------------------------------------------------------


class CloningObjective(StoredObjective[Policy, StepRows]):
    """Maximum likelihood of recorded actions, or the policy's own cloning loss; the critic stays unchanged."""

    name, what, rows = "cloning", "cloning loss", StepRows

    @property
    def options(self) -> CloningConfig:
        """`algorithm.cloning`."""
        assert self.config.cloning is not None, "the algorithm clones"
        return self.config.cloning

    def __call__(self, policy: Policy, rows: StepRows, numbers: Numbers) -> tuple[Tensor, Metrics]:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            if self.options.loss == "mse":
                each = (policy.act(rows.observation, None).action - rows.action).square().mean(-1)
            else:
                each = policy.cloning_loss(rows.observation, rows.action, rows.executed, rows.cloning_noise)
        loss = masked_mean(each.float(), rows.mask, numbers["entries"])
        return loss, {"imitation_loss": loss.detach()}

    def stepped(self, policy: Policy) -> None:
        policy.limit_noise(self.options.min_log_std)

    @torch.no_grad()
    def validate(self, policy: Policy, batches: Iterable[Transitions]) -> dict[str, float]:
        """``validation_loss``, and the distance of the policy's mode from recorded actions: ``validation_mae`` (normalised units), or
        ``validation_accuracy`` for discrete choices. Means over all rows, without augmentation and with the same draws each time. For a
        policy that `translates`, only the loss."""
        discrete = policy.spec.action.kind == "discrete"
        was_training, device = policy.training, next(policy.parameters()).device
        policy.train(False)
        total, away, count = 0.0, 0.0, 0
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(0)  # a flow's loss draws noise: the same each time, so that losses can be compared
                for batch in batches:
                    rows = step_rows(policy, batch).moved(device)
                    total += float(self(policy, *self.begin(rows, kl_coef=0.0))[0]) * rows.num_rows
                    count += rows.num_rows
                    if not policy.translates:
                        mode = policy.act(rows.observation, None).action
                        off = (mode == rows.action).float() if discrete else (mode.clamp(-1.0, 1.0) - rows.action).abs().mean(-1)
                        away += float(off.sum())
        finally:
            policy.train(was_training)
        if policy.translates:
            return {"validation_loss": total / count}
        return {"validation_loss": total / count, ("validation_accuracy" if discrete else "validation_mae"): away / count}


def step_rows(policy: Policy, batch: Transitions) -> StepRows:
    """Convert steps to the rows of `CloningObjective`, with all random numbers of their loss."""
    executed = None if batch.executed is None else torch.from_numpy(batch.executed)
    noise = policy.cloning_noise(batch.num_rows)
    return StepRows(prepare_observation(policy, batch.observation), torch.from_numpy(batch.action), executed, noise)


# ---- critics ------------------------------------------------------------------------------------------------------------


class CriticsObjective(StoredObjective[ActorWithCritics, TransitionRows]):
    """The critics' error: Q(s, a) follows r + γ V(s'). An image trunk learns only from this error."""

    name, what, rows = "critics", "loss of critics", TransitionRows
    groups: ClassVar[tuple[str, ...]] = ("critics",)

    @property
    def options(self) -> OffPolicyConfig:
        """`algorithm.off_policy`."""
        assert self.config.off_policy is not None, "the algorithm learns off policy"
        return self.config.off_policy

    def __call__(self, policy: ActorWithCritics, rows: TransitionRows, numbers: Numbers) -> tuple[Tensor, Metrics]:
        return policy.gathered(lambda: self.terms(policy, rows, numbers["entries"]))

    def terms(self, networks: ActorWithCritics, rows: TransitionRows, entries: float) -> tuple[Tensor, Metrics]:
        """Loss and metrics of these rows, divided by the `entries` of the whole minibatch."""
        features = networks.policy.features(rows.observation)
        with torch.no_grad():
            target = offline_rl.td_target(reward=rows.reward, discount=rows.discount, next_value=self.next_value(networks, rows))
        return offline_rl.critic_loss(values=networks.critics(features, rows.action), target=target, mask=rows.mask, denominator=entries)

    def next_value(self, networks: ActorWithCritics, rows: TransitionRows) -> Tensor:
        """[B] value of the next observation: the target critics' of a sampled action, or implicit Q-learning's V."""
        features = networks.policy.features(rows.next_observation)
        if self.options.update == "iql":
            return networks.policy.state_value(features)
        acted, log_prob = networks.policy.drawn(rows.next_observation, features, given(rows.next_noise))
        value = offline_rl.smallest_of(networks.targets(features, acted), rows.members)
        if self.options.update == "awac" or not self.options.entropy_in_target:
            return value
        return offline_rl.soft_value(value=value, log_prob=log_prob.sum(-1), entropy_coef=networks.log_entropy_coef.exp())

    def stepped(self, policy: ActorWithCritics) -> None:
        policy.move_targets()


class StateValueObjective(CriticsObjective):
    """Implicit Q-learning: V follows an expectile of Q̄ at recorded actions."""

    name, what = "state_value", "loss of value"
    groups: ClassVar[tuple[str, ...]] = ("value",)

    def terms(self, networks: ActorWithCritics, rows: TransitionRows, entries: float) -> tuple[Tensor, Metrics]:
        with torch.no_grad():
            features = networks.policy.features(rows.observation)
            recorded = offline_rl.smallest_of(networks.targets(features, rows.action))
        value = networks.policy.state_value(features)
        expectile = self.options.expectile
        return offline_rl.expectile_loss(value=value, target=recorded, expectile=expectile, mask=rows.mask, denominator=entries)

    def stepped(self, policy: ActorWithCritics) -> None:
        """See `Objective.stepped`."""


class ImitationObjective(CriticsObjective):
    """Imitation of recorded actions, weighted by how much better than V(s) they are."""

    name, what = "imitation", "loss of policy"
    groups: ClassVar[tuple[str, ...]] = ("policy",)

    def terms(self, networks: ActorWithCritics, rows: TransitionRows, entries: float) -> tuple[Tensor, Metrics]:
        policy, options = networks.policy, self.options
        with torch.no_grad():
            features = policy.features(rows.observation)
            if options.update == "iql":
                advantage = offline_rl.smallest_of(networks.targets(features, rows.action)) - policy.state_value(features)
            else:
                acted, _ = policy.drawn(rows.observation, features, given(rows.noise))
                baseline = offline_rl.smallest_of(networks.critics(features, acted))
                advantage = offline_rl.smallest_of(networks.critics(features, rows.action)) - baseline
            weight, metrics = offline_rl.advantage_weights(
                advantage=advantage,
                temperature=options.temperature,
                max_weight=options.max_weight,
                mask=rows.mask,
                denominator=entries,
            )
        likelihood = policy.likelihood(rows.observation, features, rows.action, rows.executed, rows.cloning_noise)
        loss, imitation = behaviour_cloning_loss(log_prob=likelihood, weight=weight, mask=rows.mask, denominator=entries)
        return loss, metrics | imitation

    def stepped(self, policy: ActorWithCritics) -> None:
        policy.policy.limit_noise(self.options.min_log_std)


class SoftPolicyObjective(ImitationObjective):
    """Soft actor-critic: the policy follows the critics, and the coefficient keeps its entropy at the target."""

    name, what = "soft_policy", "loss of policy and entropy"
    groups: ClassVar[tuple[str, ...]] = ("policy", "entropy")

    def terms(self, networks: ActorWithCritics, rows: TransitionRows, entries: float) -> tuple[Tensor, Metrics]:
        with torch.no_grad():
            features = networks.policy.features(rows.observation)
        acted, log_prob = networks.policy.drawn(rows.observation, features, given(rows.noise))
        values = networks.critics(features, acted)
        # Two critics: the smaller (Haarnoja et al. 2018); a larger ensemble: the mean (Ball et al. 2023).
        followed = offline_rl.smallest_of(values) if self.options.num_critics == 2 else values.mean(dim=0)
        of_action, coefficient = log_prob.sum(-1), networks.log_entropy_coef
        loss, metrics = offline_rl.soft_policy_loss(
            values=followed, log_prob=of_action, entropy_coef=coefficient.exp(), mask=rows.mask, denominator=entries
        )
        entropy_loss, entropy = offline_rl.entropy_coef_loss(
            log_coef=coefficient.squeeze(), log_prob=of_action, target_entropy=networks.target_entropy, mask=rows.mask, denominator=entries
        )
        return loss + entropy_loss, metrics | entropy


def steps_of(options: OffPolicyConfig, *, with_policy: bool) -> tuple[type[CriticsObjective], ...]:
    """Objectives whose steps one update takes, in order."""
    if options.update == "sac":
        return (CriticsObjective, SoftPolicyObjective) if with_policy else (CriticsObjective,)
    value, policy = (StateValueObjective,) if options.update == "iql" else (), (ImitationObjective,) if with_policy else ()
    return (*value, *policy, CriticsObjective)


def transition_rows(networks: ActorWithCritics, batch: Transitions, rng: np.random.Generator, *, with_policy: bool) -> TransitionRows:
    """Convert steps to the rows of the critics' objectives, with all random numbers of their update.

    Args:
        batch: steps with observations from `prepared`.
        rng: draws the policy's noise and chooses critics.
    """
    policy, options = networks.policy, networks.options

    def drawn() -> Tensor:
        return torch.from_numpy(policy.action_layout.noise(rng, (batch.num_rows,)))

    def read(observation: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {key: torch.from_numpy(part) for key, part in observation.items()}

    noise = drawn() if with_policy and options.update == "awac" else None
    next_noise = None if options.update == "iql" else drawn()
    members = np.arange(0) if options.update == "iql" else rng.permutation(options.num_critics)[: options.target_critics]
    noise = drawn() if with_policy and options.update == "sac" else noise
    return TransitionRows(
        observation=read(batch.observation),
        next_observation=read(batch.next_observation),
        action=torch.from_numpy(batch.action),
        reward=torch.from_numpy(batch.reward),
        discount=torch.from_numpy(batch.discount),
        members=torch.from_numpy(members),
        executed=None if batch.executed is None else torch.from_numpy(batch.executed),
        noise=noise,
        next_noise=next_noise,
        cloning_noise=policy.cloning_noise(batch.num_rows) if with_policy and options.update != "sac" else None,
    )


def prepared(policy: Policy, batch: Transitions) -> Transitions:
    """Replace the observations by those that the policy's networks read."""

    def read(observation: Observation) -> Observation:
        return {key: part.numpy() for key, part in prepare_observation(policy, observation).items()}

    return dataclasses.replace(batch, observation=read(batch.observation), next_observation=read(batch.next_observation))


def given(noise: Tensor | None) -> Tensor:
    """The noise of rows, which must be there if the update draws actions."""
    assert noise is not None, "transition_rows draws it"
    return noise
