"""Playing fixed rollouts, whether one update consumes them or stores them: with actions that can be switched."""

from __future__ import annotations

import numpy as np
import torch

from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import RandomGenerator, WrappedGenerator
from embodied_rl.policies.base import TensorObservation
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.rollout.groups import WHOLE, Share, group_seed
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, Observation, Rollout, SimSpec


class SwitchedGenerator(WrappedGenerator):
    """Acts with `generator`; with random actions if `way` is "random", and without noise if it is "mode"."""

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
    """Build the collector that a configuration describes, in the simulators' process; `share`: share of the slots. Methods with stored
    steps set how it acts (`Collector.draw`). Each named domain draws its own seeds and noise."""
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
    """Finished episodes as in `Experience.finished`."""
    # Success rates, and decisions based on them, count ordinary starts only.
    ordinary = [episode for episode in rollout.episodes if "start" not in episode.final_info]
    return [(episode.success_once, episode.episode_return, episode.length) for episode in ordinary]


def seen_in(rollout: Rollout) -> TensorObservation:
    """{key: [B, ...]} the numeric observations."""
    # Arrays that came through Ray are read-only, of which torch warns.
    parts = {key: part if part.flags.writeable else part.copy() for key, part in rollout.observation.items() if part.dtype != object}
    return {key: torch.from_numpy(part).flatten(0, 1) for key, part in parts.items()}
