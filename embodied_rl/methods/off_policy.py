"""Critics of actions that learn from stored steps: recorded ones only, or mixed with steps that the run plays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.algorithms.step_rewards import StepRewards
from embodied_rl.config import TrainConfig
from embodied_rl.episodes.dataset import EpisodeDataset, ReplayBuffer, SeenRewards, Transitions, rewards_of_steps, rollout_transitions
from embodied_rl.errors import UserError
from embodied_rl.learning.executors import Figures
from embodied_rl.learning.learner import make_learner, scheduled
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.recorded import CriticsObjective, prepared, steps_of, transition_rows
from embodied_rl.methods.cloning import mean_figures
from embodied_rl.methods.demonstrations import Demonstrations
from embodied_rl.methods.learners import seen_in
from embodied_rl.methods.stored import StoredLearner, StoredSteps
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import Policy
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.types import Rollout

_UPDATE, _FRESH = 21, 22
"""Streams of randomness, for an update's noise and for the choice of fresh steps."""
_BUFFER = "replay."


class CriticSteps(StoredSteps):
    """Steps that critics learn from: recorded ones, and a replay buffer of played ones.

    Rewards are shaped when stored, and divided by the running statistics of all rewards when drawn, so that early steps are on the
    scale of late ones.
    """

    def __init__(self, stream: Stream, policy: Policy, run_dir: Path) -> None:
        super().__init__(stream, policy, run_dir)
        options = self.config.algorithm.off_policy
        assert options is not None, "the configuration was checked"
        if options.reward == "success" and not self.spec.reports_success:
            raise UserError(f"Task '{self.spec.task}' does not report success: set algorithm.off_policy.reward=recorded.")
        self.options, self.buffer = options, ReplayBuffer(options.replay_capacity)
        self._rewards = StepRewards(self.config.algorithm)
        self._seen = SeenRewards(options.reward, self._rewards.of_steps)

    def read(self, demonstrations: Demonstrations) -> None:
        # Keeps recorded actions in the range that a squashed policy can imitate.
        margin = 0.01 if self.policy.squashed and self.options.update != "sac" else 0.0
        options = demonstrations.options(rewards=self._seen, n_step=self.options.n_step, action_margin=margin)
        memory_mb = self.config.algorithm.recorded.memory_mb
        self.recorded = EpisodeDataset(demonstrations.load(), self.spec, options, seed=self.seed, memory_mb=memory_mb)
        normalizer = self._rewards.reward_normalizer
        if normalizer is not None and normalizer.moments.count == 0:
            for reward, over in self.recorded.rewards():
                normalizer.fold(reward, over)

    def begin(self) -> None:
        if self.options.fresh:
            self._rewards.restart_episodes()

    def add(self, rollout: Rollout) -> None:
        gamma, policy = self.config.algorithm.gamma, self.policy
        if (normalizer := self._rewards.reward_normalizer) is not None:
            normalizer.fold(*rewards_of_steps(rollout, self._seen))
        fresh = rollout_transitions(
            rollout,
            policy.observation_keys,
            policy.normalised_action(rollout.action.reshape(rollout.reward.size, -1)),
            gamma=gamma,
            n_step=self.options.n_step,
            rewards=self._seen,
        )
        self.buffer.add(prepared(policy, fresh))

    def sample(self, number: int, size: int) -> Transitions:
        """Rows of minibatch `number`, from recorded and from played steps."""
        share = self.options.recorded_share if self.options.fresh else 1.0
        recorded, parts = 0 if self.recorded is None else round(size * share), []
        if size > recorded:
            parts.append(self.buffer.sample(np.random.default_rng(np.random.SeedSequence([self.seed, number, _FRESH])), size - recorded))
        if self.recorded is not None and recorded:
            parts.append(prepared(self.policy, self.recorded.sample(number, recorded)))
        drawn, normalizer = Transitions.concatenate(parts), self._rewards.reward_normalizer
        return drawn if normalizer is None else dataclasses.replace(drawn, reward=normalizer.divided(drawn.reward))

    def metrics(self) -> dict[str, float]:
        figures = super().metrics()
        return {**figures, "fresh_steps": float(len(self.buffer))} if self.options.fresh else figures

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {_BUFFER + name: part for name, part in self.buffer.state_arrays().items()} if self.options.fresh else {}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        if self.options.fresh:
            self.buffer.load_state_arrays({name.removeprefix(_BUFFER): part for name, part in state.items()})

    def state_dict(self) -> dict[str, Any]:
        return self._rewards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards.load_state_dict(state)


class CriticLearner(StoredLearner[CriticSteps]):
    """Implicit Q-learning or AWAC on recorded steps only: an iteration takes `updates_per_iteration` gradient steps, the run's steps.

    With `fresh`, off-policy learning while playing: soft actor-critic, or RLPD with a share of recorded steps (Ball et al. 2023,
    arXiv:2302.02948): half of each minibatch recorded and half fresh, critics with layer normalisation, an ensemble whose target is the
    smallest of a random few. Steps are environment steps. Normalisation statistics come from the recorded observations, or from the first
    fresh ones if there are none; then they stay fixed.
    """

    def __init__(self, config: TrainConfig, streams: Sequence[Stream], policy: Policy, run_dir: Path, ranks: RankHost | None) -> None:
        options = config.algorithm.off_policy
        assert options is not None, "the configuration was checked"
        super().__init__(config, policy, {stream.domain: CriticSteps(stream, policy, run_dir) for stream in streams})
        self.options, self.networks = options, ActorWithCritics(policy, options)
        self._objectives = {
            kind: kind(self.networks, config.algorithm)
            for with_policy in (True, False)
            for kind in steps_of(options, with_policy=with_policy)
        }
        learn = self._objectives[CriticsObjective]
        self.learner = make_learner(learn, self.networks, config.algorithm, config.hybrid, one_thread=True, ranks=ranks)
        self._updates = 0
        self.has_statistics = not config.algorithm.moves_statistics

    @property
    def num_minibatches(self) -> int:
        return self.options.updates_per_iteration

    @property
    def _num_added(self) -> int:
        return sum(steps.buffer.num_added for steps in self.steps.values())

    @property
    def _due(self) -> int:
        """Number of updates that the fresh steps so far allow, without those of the warm-up."""
        return int(max(0, self._num_added - self.options.warmup_steps) * self.options.updates_per_step)

    def way(self, iteration: int) -> dict[str, Any]:
        """See `StoredLearner.way`: the warm-up ends with the rollout at which enough steps are stored. A policy that draws its own actions
        explores with them, even untrained."""
        left = 0 if self.policy.translates else max(0, self.options.warmup_steps - self._num_added)
        decisions = sum(steps.config.decisions_per_iteration for steps in self.steps.values())
        return {"way": "noisy", "random_before": iteration + -(-left // decisions)}

    def prepare(self, gathered: dict[str, Rollout]) -> int:
        """See `StoredLearner.prepare`; during the warm-up also folds the observations into the statistics, before the first update."""
        before = self._due
        super().prepare(gathered)
        if not self.has_statistics:
            seen = seen_in(gathered.values())
            self.policy.update_statistics({key: part for key, part in seen.items() if key in self.policy.observation_keys})
        if self._num_added < self.options.warmup_steps:
            return 0
        self.has_statistics = True
        return self._due - before

    def update(self, prepared: int, *, iteration: int, progress: float) -> dict[str, float]:
        """Take `prepared` gradient steps; return their mean metrics."""
        rate = scheduled(self.config.algorithm, progress)
        taken = [self._step(rate, only_critics=iteration < self.config.algorithm.critic_warmup) for _ in range(prepared)]
        return {**mean_figures(taken), "learning_rate": rate, "updates": float(self._updates)}

    def _step(self, rate: float, *, only_critics: bool) -> Figures:
        """Step the critics and the state value, the policy every `policy_every` updates unless `only_critics`, and the targets."""
        rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, self._updates, _UPDATE]))
        with_policy = not only_critics and self._updates % self.options.policy_every == 0
        wanted = self.rows(self.config.algorithm.minibatch_size)
        drawn = [self.steps[domain].sample(self._updates, size) for domain, size in wanted.items() if size]
        rows = transition_rows(self.networks, Transitions.concatenate(drawn), rng, with_policy=with_policy)
        self._updates += 1
        return self.learner.step(rows, rate, [self._objectives[kind] for kind in steps_of(self.options, with_policy=with_policy)])

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._updates = int(state["updates"])
        algorithm, warming_up = self.config.algorithm, self._num_added < self.options.warmup_steps
        self.has_statistics = not (algorithm.moves_statistics and algorithm.plays and not algorithm.learns_from_recordings and warming_up)
