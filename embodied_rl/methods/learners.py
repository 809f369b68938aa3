"""What a run learns with: a learner for each policy, whatever it learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodied_rl.algorithms.step_rewards import KlTerm, StepRewards
from embodied_rl.config import AlgorithmConfig, TrainConfig
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import Objective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import Policy, TensorObservation, TrainedModule
from embodied_rl.types import EpisodeGroup


class PolicyLearner:
    """One policy with its learner: what it learns from what its streams play."""

    config: TrainConfig
    policy: TrainedModule
    learner: Learner
    finished: bool = False
    """Whether there is nothing more to learn."""

    def gather(self, played: Any) -> Any:
        """What was played by its policy as `prepare` takes it; by default as it is."""
        return played

    def observation(self, gathered: Any) -> TensorObservation:
        """Everything that the policy saw, for its statistics; texts have none."""
        return {}

    def prepare(self, gathered: Any) -> Any:
        """Rewards become advantages; no parameter changes."""
        raise NotImplementedError

    def update(self, prepared: Any, *, iteration: int, progress: float) -> dict[str, float]:
        """One update, where a share `progress` of the run is over; its metrics. Raises NonFiniteLossError."""
        raise NotImplementedError

    @property
    def wants_start(self) -> bool:
        """Whether `begin` has a warm start to make."""
        return False

    def begin(self, version: int) -> None:
        """Before the run's first episodes: a warm start, where there is one; the weights it leaves are published as `version`."""

    def note(self, stream: Stream, groups: Sequence[EpisodeGroup]) -> None:
        """What was played in a separate stream for this batch."""

    def finish(self, run_dir: Path) -> None:
        """The run is over: write down what is to be read."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """The learner's, and data that only this run has."""
        return self.learner.state_tensors()

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside tensors, JSON-able."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class LearnersStart:
    """What comes before a run's first episodes, of all learners."""

    def __init__(self, learners: Sequence[PolicyLearner]) -> None:
        self._learners = list(learners)

    @property
    def wanted(self) -> bool:
        """Whether any learner has a warm start to make."""
        return any(learner.wants_start for learner in self._learners)

    def run(self, version: int) -> None:
        """See `PolicyLearner.begin`."""
        for learner in self._learners:
            learner.begin(version)


Valued = TypeVar("Valued", bound=StepRewards)
"""How a domain's experience is valued."""


class RobotLearner(PolicyLearner, Generic[Valued]):
    """A robot's policy: what was played in each of its domains is valued in its own way, and one update learns from all."""

    policy: Policy
    place: str = ""
    """Of the domains' part in `state_dict`; empty: that is the whole."""

    def __init__(
        self,
        config: TrainConfig,
        configs: Mapping[str, TrainConfig],
        policy: Policy,
        values: Callable[[AlgorithmConfig], Valued],
        objective: Objective[Any, Any],
        ranks: RankHost | None,
    ) -> None:
        """
        Args:
            config: of the update.
            configs: {domain that the policy plays: its own}; `values` makes of each how its experience is valued.
            ranks: see `make_learner`.
        """
        self.config, self.policy = config, policy
        self.methods = {name: values(own.algorithm) for name, own in configs.items()}
        self.moves_statistics = all(own.algorithm.moves_statistics for own in configs.values())
        self.learner = make_learner(objective, policy, config.algorithm, config.hybrid, ranks=ranks)

    @property
    def kl(self) -> KlTerm:
        """Of the update: the first domain's, since all have the same."""
        return next(iter(self.methods.values())).kl

    def begin(self, version: int) -> None:
        """See `PolicyLearner.begin`: what was cloned, if anything was, is what a KL term compares with."""
        self.learner.keep_reference()

    def state_dict(self) -> dict[str, Any]:
        states = {name: method.state_dict() for name, method in self.methods.items()}
        own = states if len(states) > 1 else next(iter(states.values()))
        return {self.place: own} if self.place else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = state[self.place] if self.place else state
        for name, method in self.methods.items():
            method.load_state_dict(own[name] if len(self.methods) > 1 else own)


def together(seen: Sequence[TensorObservation]) -> TensorObservation:
    """One after the other."""
    if len(seen) < 2:
        return seen[0] if seen else {}
    return {key: torch.cat([part[key] for part in seen]) for key in seen[0]}
