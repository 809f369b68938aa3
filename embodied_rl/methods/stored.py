"""Learning from stored steps, recorded or played: the steps of each domain, and a learner for every policy.

`weight` divides learning among domains: an iteration's environment steps (`TrainConfig.for_domain`), or its gradient steps if nothing
is played. Domains that share a policy also divide the rows of each minibatch by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied_rl.config import TrainConfig
from embodied_rl.episodes.dataset import EpisodeDataset
from embodied_rl.errors import UserError
from embodied_rl.learning.recorded import read_statistics
from embodied_rl.methods.demonstrations import Demonstrations
from embodied_rl.methods.learners import PolicyLearner
from embodied_rl.methods.streams import Stream, of_name, prefixed
from embodied_rl.policies.base import Policy
from embodied_rl.types import Rollout

_KEPT = ("replay.", "answered.")
"""Prefixes of the names of step tensors, after the domain's name."""


class StoredSteps:
    """The steps of one domain that a policy learns from."""

    recorded: EpisodeDataset | None = None
    """Dataset of recorded steps; None: not read yet, or there are none."""
    validation: EpisodeDataset | None = None
    """Dataset of the recorded episodes that are not trained on."""

    def __init__(self, stream: Stream, policy: Policy, run_dir: Path) -> None:
        """Open and check the given recordings. Raises UserError."""
        self.config, self.policy, self.spec = stream.config, policy, stream.spec
        self.seed, self.weight = stream.seed, stream.weight
        learns = self.config.algorithm.learns_from_recordings
        self.demonstrations = Demonstrations(self.config, stream.manager, policy, run_dir, domain=stream.domain) if learns else None

    def read(self, demonstrations: Demonstrations) -> None:
        """Load the recorded steps, once; without a given recording the expert plays first. Raises UserError."""
        raise NotImplementedError

    def add(self, rollout: Rollout) -> None:
        """Store a played rollout."""
        raise NotImplementedError

    def begin(self) -> None:
        """Note that all episodes begin anew."""

    def metrics(self) -> dict[str, float]:
        parts = [part for part in (self.recorded, self.validation) if part is not None]
        counts = {"recorded_episodes": sum(part.num_episodes for part in parts), "recorded_steps": sum(part.num_steps for part in parts)}
        return {name: float(count) for name, count in counts.items()} if parts else {}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Played steps that a resume needs; names begin as `_KEPT` says."""
        return {}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Load what `state_arrays` returned. Raises KeyError or ValueError for another run's state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


Steps = TypeVar("Steps", bound=StoredSteps)


class StoredLearner(PolicyLearner, Generic[Steps]):
    """A robot's policy: one update learns from the steps of all of its domains."""

    policy: Policy
    num_rounds: int = 1
    """Rounds of gradient steps per update."""
    first: int = 0
    """First iteration whose rollouts are played, if its domains are played."""

    def __init__(self, config: TrainConfig, policy: Policy, steps: Mapping[str, Steps]) -> None:
        self.config, self.policy, self.steps = config, policy, dict(steps)
        self.has_statistics = False
        """Whether the normalisation statistics are final."""
        size = config.algorithm.minibatch_size
        if without := [domain for domain, rows in self.rows(size).items() if not rows]:
            raise UserError(
                f"algorithm.minibatch_size={size} has no row of domains.{without[0]}, whose weight={self.steps[without[0]].weight:g} is "
                f"of {self.weight:g}: nothing would be learned from it. Set a larger minibatch_size, or more equal weights."
            )

    @property
    def weight(self) -> float:
        return sum(steps.weight for steps in self.steps.values())

    @property
    def num_minibatches(self) -> int:
        """Gradient steps per round, if this policy is the run's only one."""
        raise NotImplementedError

    def way(self, iteration: int) -> dict[str, Any]:
        """Arguments of `Collector.draw` for the rollouts from `iteration` on."""
        raise NotImplementedError

    def rows(self, size: int) -> dict[str, int]:
        """{domain: its number of rows in a minibatch of `size`}"""
        edges = np.rint(np.cumsum([steps.weight for steps in self.steps.values()]) / self.weight * size).astype(int)
        return dict(zip(self.steps, np.diff(edges, prepend=0).tolist(), strict=True))

    def read(self) -> None:
        """Load the recorded steps, if there are any and they are not loaded yet. Raises UserError."""
        unread = [steps for steps in self.steps.values() if steps.recorded is None]
        for steps in unread:
            if steps.demonstrations is None:
                continue
            steps.read(steps.demonstrations)
            if not self.has_statistics and steps.recorded is not None:
                read_statistics(self.policy, steps.recorded)
        self.has_statistics |= any(steps.recorded is not None for steps in unread)

    def begin(self, version: int) -> None:
        self.read()
        for steps in self.steps.values():
            steps.begin()

    def prepare(self, gathered: dict[str, Rollout]) -> int:
        """Store what was played; return the gradient steps per round that it allows."""
        for domain, rollout in gathered.items():
            self.steps[domain].add(rollout)
        return self.num_minibatches

    def go_on(self) -> None:
        """Continue after `finished`, because there is more to learn."""

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for domain, steps in self.steps.items():
            figures |= prefixed(f"domains/{domain}" if domain else "", prefixed("data", steps.metrics()))
        return figures

    def state_tensors(self) -> dict[str, Tensor]:
        kept = {self._place(domain): steps.state_arrays() for domain, steps in self.steps.items()}
        named = {key: torch.from_numpy(part) for place, own in kept.items() for key, part in prefixed(place, own).items()}
        return {**self.learner.state_tensors(), **named}

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        left = dict(state)
        for place, steps in ((self._place(domain), steps) for domain, steps in self.steps.items()):
            begins = tuple(prefixed(place, dict.fromkeys(_KEPT)))
            own = {name: left.pop(name).numpy() for name in state if name.startswith(begins)}
            steps.load_state_arrays(of_name(place, own))
        self.learner.load_state_tensors(left)

    def state_dict(self) -> dict[str, Any]:
        states = {domain: steps.state_dict() for domain, steps in self.steps.items()}
        return {"domains": states} if len(states) > 1 else next(iter(states.values()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.has_statistics = True
        for domain, steps in self.steps.items():
            steps.load_state_dict(state["domains"][domain] if len(self.steps) > 1 else state)

    def _place(self, domain: str) -> str:
        """Prefix of a domain's tensors; empty if the policy has no other domain."""
        return domain if len(self.steps) > 1 else ""
