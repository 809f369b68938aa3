"""Methods on a fixed number of steps of every slot: how these are played, ahead of training too, and PPO on them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.ppo import PPO, RolloutValues, corrected, flat_rows
from embodied_rl.algorithms.units import at_level
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import RolloutObjective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.acting import SwitchedGenerator
from embodied_rl.methods.base import Experience, Method, Played, Prepared
from embodied_rl.methods.starts import ORDINARY, Starts
from embodied_rl.policies.base import Policy, TensorObservation, prepare_observation
from embodied_rl.rollout.collector import PATIENCE_S, RolloutCollector
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.queue_pump import age_figures
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, Rollout


class PlayingMethod(Method[Played, Prepared]):
    """Plays `rollout_steps` of every slot, whether an update consumes them or keeps them; with `algorithm.max_staleness`, ahead of it."""

    learner: Learner
    config: TrainConfig
    starts: Starts
    """Where episodes start that do not start ordinarily."""

    def play_in(self, manager: Simulators, generator: Generator, layout: ActionLayout, starts: Starts = ORDINARY) -> None:
        """Once, when there is a learner. Raises UserError: nothing can be played while training."""
        config, self.starts = self.config, starts
        self.collector = make_rollout_collector(config, manager, generator, layout, starts=self.starts.libraries.get(""))
        self._ages: dict[str, float] = {}
        """Of the last rollout."""
        if config.algorithm.max_staleness:
            if generator.shares_weights:
                raise UserError(
                    f"algorithm.max_staleness={config.algorithm.max_staleness}: a policy of this size acts with the parameters that are "
                    "trained, not with a copy, so that nothing can be played meanwhile. The nearest possible: hybrid=disaggregated, or "
                    "algorithm.max_staleness=0."
                )
            self.learner.executor.meanwhile = functools.partial(self.play_ahead, 0.0)

    def next_rollout(self, iteration: int) -> Rollout:
        """What version `iteration` learns from, at most `algorithm.max_staleness` versions old. Raises SimFault."""
        rollout = self.collector.next_rollout(iteration)
        self.play_ahead(0.0)
        if bound := self.config.algorithm.max_staleness:
            assert rollout.age(iteration) <= bound, "newer weights wait until older ones have played"
            self._ages = age_figures("rollout", (iteration - rollout.policy_version).ravel().tolist(), bound)
        return rollout

    @staticmethod
    def finished_in(rollout: Rollout) -> list[tuple[bool, float, int]]:
        """See `Experience.finished`."""
        # Success rates, and what is chosen by them, are of ordinary starts.
        ordinary = [episode for episode in rollout.episodes if "start" not in episode.final_info]
        return [(episode.success_once, episode.episode_return, episode.length) for episode in ordinary]

    @staticmethod
    def seen_in(rollout: Rollout) -> TensorObservation:
        """{key: [B, ...]} what is numbers."""
        # What came through Ray is read-only, of which torch warns.
        parts = {key: part if part.flags.writeable else part.copy() for key, part in rollout.observation.items() if part.dtype != object}
        return {key: torch.from_numpy(part).flatten(0, 1) for key, part in parts.items()}

    def play_ahead(self, patience_s: float = PATIENCE_S) -> None:
        with compute_threads(1):
            while self.collector.pump(patience_s):
                pass

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.collector.metrics(), **self._ages, **self.starts.metrics()}

    def published(self, version: int) -> None:
        self.starts.commit()

    def begin(self, iteration: int) -> None:
        """New episodes in all slots; before a run's first ones, those of an expert that others start in."""
        self.starts.begin_anew()
        self.starts.record()
        self.collector.restart(seed_round=iteration)

    @property
    def start_state(self) -> dict[str, Any]:
        """What resuming needs of starts, to be a part of `state_dict`."""
        return {"starts": libraries[""]} if (libraries := self.starts.state()) else {}

    def load_starts(self, state: Mapping[str, Any]) -> None:
        """Out of what `state_dict` gave."""
        if self.starts.wanted:
            self.starts.load({"": state["starts"]})

    def with_trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `Method.with_trained`: starts are of this process."""
        return {**state, **self.start_state}


class RolloutMethod(PlayingMethod[Rollout, Batch]):
    """PPO on `rollout_steps` of every slot."""

    def __init__(
        self,
        config: TrainConfig,
        manager: Simulators,
        policy: Policy,
        generator: Generator,
        ranks: RankHost | None = None,
        starts: Starts = ORDINARY,
    ) -> None:
        """`ranks`, `starts`: see `make_method`."""
        compose(config.algorithm)
        self.config = config
        self._objective = RolloutObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(self._objective, policy, config.algorithm, config.hybrid, ranks=ranks)
        self._policy, self._algorithm = policy, PPO(config.algorithm)
        self._figures: dict[str, float] = {}
        """Of what was prepared last: its weights, and the KL term of its rewards."""
        self.play_in(manager, generator, policy.action_layout, starts)

    def collect(self, iteration: int) -> Experience[Rollout]:
        rollout = self.next_rollout(iteration)
        seen = self.seen_in(rollout) if self.config.algorithm.moves_statistics else {}
        return Experience(rollout.num_steps, self.finished_in(rollout), seen, rollout)

    def prepare(self, experience: Experience[Rollout]) -> Batch:
        rollout, algorithm, learner = experience.data, self.config.algorithm, self.learner
        values = rollout_values(learner, self._policy, rollout)
        seen = {key: rollout.observation[key].reshape(-1, *rollout.observation[key].shape[2:]) for key in self._policy.observation_keys}
        ready, action = prepare_observation(self._policy, seen), flat_rows(rollout.action)
        kl, steps, present, reference = self._algorithm.kl, self._objective.steps(action.device), None, None
        if algorithm.correction.enabled or kl.in_reward:
            present = learner.log_probs(ready, action)
        if learner.has_reference:
            reference = learner.log_probs(ready, action, of_reference=True)
        action_dim = max(self._policy.spec.action.dim, 1)
        of_units = kl.divergence(present, reference)
        of_steps = None if of_units is None else at_level(of_units, "action", None, steps)
        rollout, self._figures = self._algorithm.shaped(rollout, of_steps)
        batch = self._algorithm.prepare(rollout, values, ready, action_dim=action_dim)
        if kl.in_loss:
            batch = batch.replaced(reference_log_prob=reference)
        if not algorithm.correction.enabled:
            return batch
        assert present is not None, "it was computed"
        weighed, figures = corrected(batch, present, algorithm.correction, level=algorithm.ratio, steps=steps)
        self._figures |= figures
        return weighed

    def update(self, prepared: Batch, *, iteration: int, steps: int) -> dict[str, float]:
        if iteration < self.config.algorithm.critic_warmup:
            # Without advantages the policy's loss has no gradient.
            prepared = prepared.replaced(advantage=torch.zeros_like(prepared.advantage))
        stats = self.learner.update(
            prepared,
            minibatch_rows=self.config.algorithm.minibatch_size,
            progress=iteration / self.config.num_iterations,
            seed=[self.config.seed, iteration],
            kl_coef=self._algorithm.kl.coefficient.value,
        )
        return {**stats, **self._figures, **self._algorithm.kl.measured(stats, prepared.num_rows)}

    def restart(self, iteration: int) -> None:
        self.learner.keep_reference()
        self._algorithm.restart_episodes()
        self.begin(iteration)

    def state_tensors(self) -> dict[str, Tensor]:
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        return {**self._algorithm.state_dict(), **self.start_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state)
        self.load_starts(state)


def rollout_values(learner: Learner, policy: Policy, rollout: Rollout) -> RolloutValues:
    """The critic's values of everything the rollout saw, in one pass."""
    steps, slots = rollout.reward.shape
    flat = {}
    for key in policy.observation_keys:
        seen = rollout.observation[key]
        rows = seen.reshape(steps * slots, *seen.shape[2:])
        flat[key] = np.concatenate([rows, rollout.last_observation[key], rollout.final_observation[key]])
    values = learner.values(prepare_observation(policy, flat))
    value, last, final = np.split(values, [steps * slots, (steps + 1) * slots])
    if values.ndim == 2:  # of each step of a chunk: what comes after begins with the first
        return RolloutValues(value.reshape(steps, slots, -1), last[:, 0].copy(), final[:, 0].copy())
    return RolloutValues(value.reshape(steps, slots), last, final)


def make_rollout_collector(
    config: TrainConfig,
    manager: Simulators,
    generator: Generator,
    layout: ActionLayout,
    share: Share = WHOLE,
    starts: StartLibrary | None = None,
) -> RolloutCollector:
    """The collector that a configuration describes, in whatever process the simulators are; `share`: of the slots. What learns from steps
    that it keeps says how they are acted in (`Collector.draw`)."""
    has_hosts, max_staleness = config.hybrid.placement.kind == "multiplexed", config.algorithm.max_staleness
    return RolloutCollector(
        manager,
        generator if config.algorithm.on_policy else SwitchedGenerator(generator, manager.spec),
        rollout_steps=config.algorithm.rollout_steps,
        num_groups=1 if has_hosts else config.sim.num_groups,
        seed=config.seed,
        layout=layout,
        max_staleness=max_staleness,
        min_ready=1 if has_hosts and max_staleness else None,
        share=share,
        starts=starts,
    )
