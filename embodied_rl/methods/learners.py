"""Learners of a run: one for each policy, for every kind of experience."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Rows
from embodied_rl.algorithms.step_rewards import StepRewards
from embodied_rl.config import AlgorithmConfig, TrainConfig
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import Objective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.streams import Stream, prefixed
from embodied_rl.policies.base import TensorObservation, TrainedModule
from embodied_rl.types import EpisodeGroup, Rollout


class PolicyLearner:
    """One policy with its learner, which learns from what its streams play."""

    config: TrainConfig
    policy: TrainedModule
    learner: Learner
    finished: bool = False
    """Whether there is nothing more to learn."""

    def gather(self, played: dict[str, Any]) -> dict[str, Any]:
        """Turn {domain: a rollout, or groups} into the input of `prepare`; by default unchanged."""
        return played

    def observation(self, gathered: Any) -> TensorObservation:
        """All observations of the policy, for its statistics; empty for texts."""
        return {}

    def prepare(self, gathered: Any) -> Any:
        """Turn rewards into advantages; no parameter changes."""
        raise NotImplementedError

    def update(self, prepared: Any, *, iteration: int, progress: float) -> dict[str, float]:
        """Make one update after a share `progress` of the run; return its metrics. Raises NonFiniteError."""
        raise NotImplementedError

    @property
    def wants_start(self) -> bool:
        """Whether `begin` still has a warm start to run."""
        return False

    def begin(self, version: int) -> None:
        """Called before the run's first episodes: run a warm start, if there is one, and publish its weights as `version`."""

    def note(self, stream: Stream, groups: Sequence[EpisodeGroup]) -> None:
        """Note the groups of this batch that a stream played."""

    def finish(self, run_dir: Path) -> None:
        """Called at the end of the run: write files to be read."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """The learner's state, and data that only this run has."""
        return self.learner.state_tensors()

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a resume needs beside tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


Valued = TypeVar("Valued", bound=StepRewards)
"""Values a domain's experience."""


@dataclass(frozen=True)
class Prepared:
    """A domain's experience with its credit."""

    rows: Rows
    num_decisions: int
    """Number of decisions that are learned from: the turns of a language agent."""
    metrics: dict[str, float]


class PlayingLearner(PolicyLearner, Generic[Valued]):
    """A policy that learns from what each iteration plays: each domain's experience is valued by its own configuration, and one update
    learns from all of it."""

    place: str = ""
    """Key of the domains' part in `state_dict`; empty: that part is the whole."""

    def __init__(
        self,
        config: TrainConfig,
        configs: Mapping[str, TrainConfig],
        policy: TrainedModule,
        values: Callable[[AlgorithmConfig], Valued],
        objective: Objective[Any, Any],
        ranks: RankHost | None,
    ) -> None:
        """
        Args:
            config: configuration of the update.
            configs: {domain that the policy plays: its own}; `values` makes the valuation of its experience from each.
            ranks: see `make_learner`.
        """
        self.config, self.policy = config, policy
        self.methods = {name: values(own.algorithm) for name, own in configs.items()}
        self.moves_statistics = all(own.algorithm.moves_statistics for own in configs.values())
        self.learner = make_learner(objective, policy, config.algorithm, config.hybrid, ranks=ranks)

    def valued(self, method: Valued, experience: Any) -> Prepared:
        """Give a domain's part of what `gather` returned its credit; `method`: the domain's."""
        raise NotImplementedError

    def prepare(self, gathered: Mapping[str, Any]) -> dict[str, Prepared]:
        return {name: self.valued(self.methods[name], own) for name, own in gathered.items()}

    def minibatch_rows(self, rows: Any, num_decisions: int) -> int:
        """Number of rows that together have about `algorithm.minibatch_size` of the decisions."""
        return round(self.config.algorithm.minibatch_size * rows.num_rows / max(num_decisions, 1))

    def update(self, prepared: Mapping[str, Prepared], *, iteration: int, progress: float) -> dict[str, float]:
        parts, kl = list(prepared.values()), next(iter(self.methods.values())).kl  # all domains have the same KL term
        rows, num_decisions = type(parts[0].rows).joined([part.rows for part in parts]), sum(part.num_decisions for part in parts)
        if iteration < self.config.algorithm.critic_warmup:  # without advantages the policy's loss has no gradient
            rows = rows.without_advantages()
        stats = self.learner.update(
            rows,
            minibatch_rows=self.minibatch_rows(rows, num_decisions),
            progress=progress,
            seed=[self.config.seed, iteration],
            kl_coef=kl.coefficient,
        )
        stats |= kl.measured(stats, num_decisions)
        return {**stats, **of_domains({name: (part.num_decisions, part.metrics) for name, part in prepared.items()})}

    def begin(self, version: int) -> None:
        """See `PolicyLearner.begin`: keeps the weights after any cloning as the KL term's reference."""
        self.learner.keep_reference()

    def state_dict(self) -> dict[str, Any]:
        states = {name: method.state_dict() for name, method in self.methods.items()}
        own = states if len(states) > 1 else next(iter(states.values()))
        return {self.place: own} if self.place else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = state[self.place] if self.place else state
        for name, method in self.methods.items():
            method.load_state_dict(own[name] if len(self.methods) > 1 else own)


def of_domains(parts: Mapping[str, tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Figures of a batch from {domain: (its rows, its figures)}: of several domains their means by rows, and ``domain/figure`` of each."""
    if len(parts) == 1:
        return dict(next(iter(parts.values()))[1])
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for _, own in parts.values() for name in own):
        rows, values = zip(*((max(count, 1), own[name]) for count, own in parts.values() if name in own), strict=True)
        figures[name] = float(np.average(values, weights=rows))
    return figures | {name: value for domain, (_, own) in parts.items() for name, value in prefixed(domain, own).items()}


def seen_in(rollouts: Iterable[Rollout]) -> TensorObservation:
    """{key: [B, ...]} the numeric observations of all rollouts."""
    # Arrays that came through Ray are read-only, of which torch warns.
    given = [{key: part for key, part in rollout.observation.items() if part.dtype != object} for rollout in rollouts]
    parts = [{key: part if part.flags.writeable else part.copy() for key, part in own.items()} for own in given]
    return together([{key: torch.from_numpy(part).flatten(0, 1) for key, part in own.items()} for own in parts])


def together(seen: Sequence[TensorObservation]) -> TensorObservation:
    """Concatenate observations."""
    if len(seen) < 2:
        return seen[0] if seen else {}
    return {key: torch.cat([part[key] for part in seen]) for key in seen[0]}
