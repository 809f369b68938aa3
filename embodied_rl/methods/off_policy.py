"""Critics of actions that learn from stored steps: only recorded ones, or mixed with those that the run plays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.step_rewards import StepRewards
from embodied_rl.episodes.dataset import EpisodeDataset, ReplayBuffer, SeenRewards, Transitions, decisions, rollout_transitions
from embodied_rl.errors import UserError
from embodied_rl.learning.executors import Figures
from embodied_rl.learning.learner import make_learner, scheduled
from embodied_rl.learning.recorded import CriticsObjective, prepared, read_statistics, steps_of, transition_rows
from embodied_rl.methods.acting import PlayingMethod, finished_in, seen_in
from embodied_rl.methods.base import Experience
from embodied_rl.methods.cloning import mean_figures, single_threaded
from embodied_rl.methods.demonstrations import Demonstrations, KeptRun, RecordedMethod, nothing_seen
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.types import Rollout

_UPDATE, _FRESH = 21, 22
"""Streams of randomness: of an update's noise, and of the fresh steps that it learns from."""
_BUFFER = "replay."


class OfflineMethod(RecordedMethod[int]):
    """Implicit Q-learning or AWAC on recorded steps only: nothing is played.

    One iteration is `updates_per_iteration` gradient steps, which are the run's steps. Normalisation statistics are those of the
    recorded observations. Rewards are shaped as they are stored, and divided by the running statistics of all as they are drawn: what was
    stored early is on the scale of what comes late.
    """

    def __init__(self, run: KeptRun) -> None:
        config, policy, options = run.config, run.policy, run.config.algorithm.off_policy
        assert options is not None, "the configuration was checked"
        if options.reward == "success" and not run.manager.spec.reports_success:
            raise UserError(f"Task '{run.manager.spec.task}' does not report success: set algorithm.off_policy.reward=recorded.")
        self.config, self.policy, self.options = config, policy, options
        self.networks = ActorWithCritics(policy, options)
        self._objectives = {
            kind: kind(self.networks, config.algorithm) for with_policy in (True, False) for kind in self._steps(with_policy)
        }
        learn = self._objectives[CriticsObjective]
        self.learner = make_learner(learn, self.networks, config.algorithm, single_threaded(config.hybrid), ranks=run.ranks)
        learns = config.algorithm.learns_from_recordings
        self.demonstrations = Demonstrations(config, run.manager, policy, run.run_dir) if learns else None
        self.recorded: EpisodeDataset | None = None
        self._rewards = StepRewards(config.algorithm)
        self._seen = SeenRewards(options.reward, self._rewards.of_steps)
        self._updates = 0
        self._has_statistics = not config.algorithm.moves_statistics

    def collect(self, iteration: int) -> Experience[Rollout | None]:
        return Experience(self.options.updates_per_iteration, [], nothing_seen(self.policy), None)

    def prepare(self, experience: Experience[Rollout | None]) -> int:
        return self.options.updates_per_iteration

    def update(self, prepared: int, *, iteration: int, steps: int) -> dict[str, float]:
        """Take `prepared` gradient steps; metrics averaged over them."""
        rate = scheduled(self.config.algorithm, steps / self.config.total_steps)
        taken = [self._step(rate, only_critics=iteration < self.config.algorithm.critic_warmup) for _ in range(prepared)]
        return {**mean_figures(taken), "learning_rate": rate, "updates": float(self._updates)}

    def _steps(self, with_policy: bool) -> tuple[type[CriticsObjective], ...]:
        return steps_of(self.options, with_policy=with_policy)

    def _step(self, rate: float, *, only_critics: bool) -> Figures:
        """One step of critics and state value, of the policy every `policy_every` updates unless `only_critics`, and of the targets."""
        rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, self._updates, _UPDATE]))
        with_policy = not only_critics and self._updates % self.options.policy_every == 0
        drawn, normalizer = self._minibatch(self._updates), self._rewards.reward_normalizer
        if normalizer is not None:
            drawn = dataclasses.replace(drawn, reward=normalizer.divided(drawn.reward))
        rows = transition_rows(self.networks, drawn, rng, with_policy=with_policy)
        self._updates += 1
        return self.learner.step(rows, rate, [self._objectives[kind] for kind in self._steps(with_policy)])

    def _minibatch(self, number: int) -> Transitions:
        assert self.recorded is not None, "restart() comes first"
        return prepared(self.policy, self.recorded.sample(number, self.config.algorithm.minibatch_size))

    def _read_recordings(self) -> None:
        """Once, where there are some."""
        if self.demonstrations is None or self.recorded is not None:
            return
        demonstrations, config = self.demonstrations, self.config
        options = demonstrations.options(rewards=self._seen, n_step=self.options.n_step, action_margin=self._action_margin())
        memory_mb = config.algorithm.recorded.memory_mb
        self.recorded = EpisodeDataset(demonstrations.load(), demonstrations.spec, options, seed=config.seed, memory_mb=memory_mb)
        if not self._has_statistics:
            read_statistics(self.policy, self.recorded)
            self._has_statistics = True
        normalizer = self._rewards.reward_normalizer
        if normalizer is not None and normalizer.count == 0:
            for reward, over in self.recorded.rewards():
                normalizer.fold(reward, over)

    def _action_margin(self) -> float:
        """Keeps recorded actions where a squashed policy can imitate them."""
        return 0.01 if self.policy.squashed and self.options.update != "sac" else 0.0

    def metrics(self) -> dict[str, float]:
        if self.recorded is None:
            return {}
        return {"data/recorded_episodes": float(self.recorded.num_episodes), "data/recorded_steps": float(self.recorded.num_steps)}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, **self._rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates, self._has_statistics = int(state["updates"]), True
        self._rewards.load_state_dict(state)


class MixedMethod(PlayingMethod[Rollout | None, int], OfflineMethod):
    """Off-policy learning while playing: soft actor-critic, with a share of recorded steps RLPD.

    RLPD (Ball et al. 2023, arXiv:2302.02948): half of each minibatch recorded and half fresh, critics with layer normalisation, an
    ensemble whose target is the smallest of a random few. Steps are environment steps. Normalisation statistics are those of the
    recorded observations, or of the first fresh ones where there are none; they do not change after.
    """

    def __init__(self, run: KeptRun) -> None:
        super().__init__(run)
        self.play_in(run.manager, run.generator, run.policy.action_layout, run.starts)
        self.buffer = ReplayBuffer(self.options.replay_capacity)

    @property
    def _warming_up(self) -> bool:
        return self.buffer.num_added < self.options.warmup_steps

    def collect(self, iteration: int) -> Experience[Rollout | None]:
        self._draw(iteration)
        rollout = self.next_rollouts(iteration)[""]
        seen = nothing_seen(self.policy)
        if not self._has_statistics:
            seen = {key: part for key, part in seen_in(rollout).items() if key in seen}
        return Experience(rollout.num_steps, finished_in(rollout), seen, rollout)

    def _draw(self, iteration: int) -> None:
        """Say in which of the rollouts from this one on the warm-up ends: it goes by what is stored when one is learned from. A policy that
        draws its own actions explores with them, untrained as it is."""
        left = 0 if self.policy.translates else max(0, self.options.warmup_steps - self.buffer.num_added)
        self.collector.draw("noisy", random_before=iteration + -(-left // self.config.decisions_per_iteration))

    def prepare(self, experience: Experience[Rollout | None]) -> int:
        """Store the fresh steps; how many updates they allow."""
        rollout = experience.data
        assert rollout is not None, "it plays"
        before, gamma, policy = self._due(), self.config.algorithm.gamma, self.policy
        if (normalizer := self._rewards.reward_normalizer) is not None:
            units = decisions(rollout, gamma, self._seen)
            normalizer.fold(units.reward, units.terminated | units.truncated)
        fresh = rollout_transitions(
            rollout,
            policy.observation_keys,
            policy.normalised_action(rollout.action.reshape(rollout.reward.size, -1)),
            gamma=gamma,
            n_step=self.options.n_step,
            rewards=self._seen,
        )
        self.buffer.add(prepared(policy, fresh))
        if self._warming_up:
            return 0
        self._has_statistics = True
        return self._due() - before

    def _due(self) -> int:
        """Updates that the fresh steps so far are worth, those of the warm-up left out."""
        return int(max(0, self.buffer.num_added - self.options.warmup_steps) * self.options.updates_per_step)

    def _minibatch(self, number: int) -> Transitions:
        size = self.config.algorithm.minibatch_size
        recorded = round(size * self.options.recorded_share) if self.recorded is not None else 0
        rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, number, _FRESH]))
        parts = [self.buffer.sample(rng, size - recorded)]
        if recorded:
            assert self.recorded is not None
            parts.append(prepared(self.policy, self.recorded.sample(number, recorded)))
        return Transitions.concatenate(parts)

    def restart(self, iteration: int) -> None:
        super().restart(iteration)
        self._rewards.restart_episodes()
        self._draw(iteration)
        self.begin(iteration)

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "data/fresh_steps": float(len(self.buffer))}

    def state_tensors(self) -> dict[str, Tensor]:
        stored = {_BUFFER + name: torch.from_numpy(part) for name, part in self.buffer.state_arrays().items()}
        return {**super().state_tensors(), **stored}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        stored = {name.removeprefix(_BUFFER): part.numpy() for name, part in state.items() if name.startswith(_BUFFER)}
        self.buffer.load_state_arrays(stored)
        super().load_state_tensors({name: part for name, part in state.items() if not name.startswith(_BUFFER)})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.starts.of_method()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.starts.load_of_method(state)
        self._has_statistics = self.recorded is not None or self.demonstrations is not None or not self._warming_up
