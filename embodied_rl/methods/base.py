"""What one iteration of the training loop consists of, whatever is learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from embodied_rl.config import SimConfig
from embodied_rl.learning.executors import TrainedCopy
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.policies.base import TensorObservation
from embodied_rl.rollout.collector import NOT_PLAYED, Collector, CollectorTimes
from embodied_rl.types import SimSpec

Played = TypeVar("Played")  # what a method's collector hands over
Prepared = TypeVar("Prepared")  # what its update learns from


@dataclass(frozen=True)
class Experience(Generic[Played]):
    """What was collected for one update."""

    num_steps: int
    finished: list[tuple[bool, float, int]]
    """(success, return, length) of the episodes that ended."""
    observation: TensorObservation
    """{key: [M, ...]} everything the policy saw, for its statistics; empty: these stay as they are."""
    data: Played


class WarmStarts(Protocol):
    """What comes before a run's first episodes."""

    @property
    def wanted(self) -> bool:
        """Whether a warm start is still to be made."""

    def run(self, version: int) -> None:
        """Make it, and publish the weights it leaves as `version`."""


@dataclass(frozen=True)
class Recordable:
    """A collector whose episodes may be written down (`record.share`), and whose simulators they come from."""

    collector: Collector
    folder: str
    """Below that of the run's episodes; empty: that one."""
    num_slots: int
    spec: SimSpec
    sim: SimConfig


class Method(Generic[Played, Prepared]):
    """How experience is collected and learned from; one iteration is `collect`, `prepare`, `update`."""

    learner: Learner | None = None
    """Trains the policy, of a method that has one; None: see `all_learners`."""
    collector: Collector = NOT_PLAYED
    """Of the method's kind of experience; `NOT_PLAYED` until the rollout worker that plays elsewhere sets it, or for good."""
    warm_start: WarmStarts | None = None
    divided: str = ""
    """Name of the policy that ranks train, of several."""

    @property
    def all_learners(self) -> Sequence[Learner]:
        """Of every policy that is trained in this process."""
        return () if self.learner is None else (self.learner,)

    @property
    def sharded(self) -> RankExecutor | None:
        """The ranks that train a policy; None: training happens in one process."""
        return next((learner.ranks for learner in self.all_learners if learner.ranks is not None), None)

    @property
    def trained_copy(self) -> TrainedCopy | None:
        """Where the trained weights come from when the policy of this process is not what is trained."""
        return self.sharded

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to learn (early stopping)."""
        return False

    @property
    def times(self) -> CollectorTimes:
        """Of the last `collect`."""
        return self.collector.times

    def collect(self, iteration: int) -> Experience[Played]:
        """Play with the weights that were published as version `iteration`. Raises SimFault (see EnvManager)."""
        raise NotImplementedError

    def prepare(self, experience: Experience[Played]) -> Prepared:
        """Rewards → advantages; no parameter changes."""
        raise NotImplementedError

    def update(self, prepared: Prepared, *, iteration: int, steps: int) -> dict[str, float]:
        """Train; metrics. Raises NonFiniteLossError."""
        raise NotImplementedError

    def play_ahead(self) -> None:
        """Play what is left to play with the weights that act now: newer ones are about to be published. Raises SimFault."""

    def published(self, version: int) -> None:
        """The policy's weights are the generator's as `version`."""

    def restart(self, iteration: int) -> None:
        """Begin new episodes, with seeds that depend only on the run's seed and what was consumed: where a run can be resumed."""
        raise NotImplementedError

    def running_episodes(self) -> dict[str, Tensor]:
        """{slot: the running episode as bytes [n] uint8}; empty where none runs between two batches, or all begin again from their seeds.

        Raises UserError where the simulator's cannot be saved.
        """
        saved = enumerate(self.collector.episodes())
        return {str(slot): torch.frombuffer(bytearray(episode), dtype=torch.uint8) for slot, episode in saved}

    def take_up(self, episodes: Mapping[str, Tensor]) -> None:
        """Go on within what `running_episodes` gave, in place of `restart`. Raises SnapshotError."""
        self.collector.take_up([episodes[str(slot)].numpy().tobytes() for slot in range(len(episodes))])

    def finish(self) -> None:
        """The run is over: leave the policy as it is to be kept."""

    def metrics(self) -> dict[str, float]:
        return {}

    def recordable(self, num_slots: int, spec: SimSpec, sim: SimConfig) -> Sequence[Recordable]:
        """Collectors whose episodes can be written down: by default the one there is, in simulators as the arguments say."""
        return (Recordable(self.collector, "", num_slots, spec, sim),) if self.collector.plays else ()

    def state_tensors(self) -> dict[str, Tensor]:
        """What resuming needs beside the policy's own tensors: the learner's state, and data that only this run has."""
        raise NotImplementedError

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue exactly. Raises IncompatibleCheckpointError, KeyError or ValueError for the state of another run."""
        raise NotImplementedError

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What ranks wrote of their optimizer, as it stands in `state_tensors` of a run without ranks."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside tensors, JSON-able."""
        raise NotImplementedError

    def with_trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` of this method, whose learning half is elsewhere: `state` is that half's."""
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `load_state_tensors`."""
        raise NotImplementedError
