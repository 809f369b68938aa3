"""How fixed rollouts are played, whether an update consumes them or keeps them: ahead of training, and in ways that can be switched."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import RandomGenerator, WrappedGenerator
from embodied_rl.learning.devices import compute_threads
from embodied_rl.methods.base import Method, Played, Prepared
from embodied_rl.methods.starts import Starts
from embodied_rl.methods.streams import episode_figures, prefixed
from embodied_rl.policies.base import TensorObservation
from embodied_rl.rollout.collector import PATIENCE_S, Collector, RolloutCollector
from embodied_rl.rollout.groups import WHOLE, Share, group_seed
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.queue_pump import age_figures
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, Observation, Rollout, SimSpec


class SwitchedGenerator(WrappedGenerator):
    """Passes on to `generator`, to random actions where `way` is "random", and without noise where it is "mode"."""

    def __init__(self, generator: Generator, spec: SimSpec) -> None:
        super().__init__(generator)
        self._random = RandomGenerator(spec)

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._random.version = self.version
        self._present().send(slots, observation, None if self.way == "mode" else noise)

    def recv(self) -> ActedBatch:
        return self._present().recv()

    def _present(self) -> Generator:
        return self._random if self.way == "random" else self._generator


def make_rollout_collector(
    config: TrainConfig,
    manager: Simulators,
    generator: Generator,
    layout: ActionLayout,
    share: Share = WHOLE,
    starts: StartLibrary | None = None,
    domain: str = "",
) -> RolloutCollector:
    """The collector that a configuration describes, in whatever process the simulators are; `share`: of the slots. What learns from steps
    that it keeps says how they are acted in (`Collector.draw`). Each named domain draws its own seeds and noise."""
    has_hosts, max_staleness = config.hybrid.placement.kind == "multiplexed", config.algorithm.max_staleness
    return RolloutCollector(
        manager,
        generator if config.algorithm.on_policy else SwitchedGenerator(generator, manager.spec),
        rollout_steps=share.rollout_steps or config.algorithm.rollout_steps,
        num_groups=1 if has_hosts else config.sim.num_groups,
        seed=group_seed(config.seed, domain, 0) if domain else config.seed,
        layout=layout,
        max_staleness=max_staleness,
        min_ready=1 if has_hosts and max_staleness else None,
        share=share,
        starts=starts,
    )


def finished_in(rollout: Rollout) -> list[tuple[bool, float, int]]:
    """See `Experience.finished`."""
    # Success rates, and what is chosen by them, are of ordinary starts.
    ordinary = [episode for episode in rollout.episodes if "start" not in episode.final_info]
    return [(episode.success_once, episode.episode_return, episode.length) for episode in ordinary]


def seen_in(rollout: Rollout) -> TensorObservation:
    """{key: [B, ...]} what is numbers."""
    # What came through Ray is read-only, of which torch warns.
    parts = {key: part if part.flags.writeable else part.copy() for key, part in rollout.observation.items() if part.dtype != object}
    return {key: torch.from_numpy(part).flatten(0, 1) for key, part in parts.items()}


class PlayingMethod(Method[Played, Prepared]):
    """Plays `rollout_steps` of every slot, whether an update consumes them or keeps them; with `algorithm.max_staleness`, ahead of it."""

    config: TrainConfig
    starts: Starts
    """Where episodes start that do not start ordinarily."""

    def play_by(self, collector: Collector, acting: Sequence[Generator]) -> None:
        """Once, when there are learners; `acting`: what acts for the collector. Raises UserError: nothing can be played while training."""
        config, self.collector = self.config, collector
        self._figures: dict[str, float] = {}
        """Of the last rollouts: each named domain's, and ages."""
        if config.algorithm.max_staleness:
            if any(generator.shares_weights for generator in acting):
                raise UserError(
                    f"algorithm.max_staleness={config.algorithm.max_staleness}: a policy of this size acts with the parameters that are "
                    "trained, not with a copy, so that nothing can be played meanwhile. The nearest possible: hybrid=disaggregated, or "
                    "algorithm.max_staleness=0."
                )
            for learner in self.all_learners:
                learner.executor.meanwhile = functools.partial(self.play_ahead, 0.0)

    def next_rollouts(self, iteration: int) -> dict[str, Rollout]:
        """{domain: what version `iteration` learns from}, at most `algorithm.max_staleness` versions old. Raises SimFault."""
        rollouts, self._figures = self.collector.next_rollouts(iteration), {}
        for domain in filter(None, rollouts):
            figures = {"steps": float(rollouts[domain].num_steps), **episode_figures(finished_in(rollouts[domain]))}
            self._figures |= prefixed(f"domains/{domain}", figures)
        self.play_ahead(0.0)
        if bound := self.config.algorithm.max_staleness:
            ages = [age for rollout in rollouts.values() for age in (iteration - rollout.policy_version).ravel().tolist()]
            assert max(ages) <= bound, "newer weights wait until older ones have played"
            self._figures |= age_figures("rollout", ages, bound)
        return rollouts

    def play_ahead(self, patience_s: float = PATIENCE_S) -> None:
        with compute_threads(1):
            while self.collector.pump(patience_s):
                pass

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.collector.metrics(), **self._figures, **self.starts.metrics()}

    def published(self, version: int) -> None:
        self.starts.commit()

    def begin(self, iteration: int) -> None:
        """New episodes in all slots; before a run's first ones, those of an expert that others start in."""
        self.starts.begin_anew()
        self.starts.record()
        self.collector.restart(seed_round=iteration)
