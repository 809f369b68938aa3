"""The contract of one iteration of the training loop, for every kind of experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.learning.executors import TrainedCopy
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import TensorObservation
from embodied_rl.rollout.collector import NOT_PLAYED, Collector, CollectorTimes


@dataclass(frozen=True)
class Experience:
    """Experience collected for one update."""

    num_steps: int
    finished: list[tuple[bool, float, int]]
    """(success, return, length) of each episode that ended."""
    observation: TensorObservation
    """{key: [M, ...]} all observations of the policy, for its statistics; empty: the statistics stay unchanged."""
    data: Any
    """What was played, in the form that the method's own `prepare` reads."""


class Method:
    """Collects experience and learns from it; one iteration is `collect`, `prepare`, `update`."""

    collector: Collector = NOT_PLAYED
    """Collector of the method's experience; `NOT_PLAYED` until a rollout worker elsewhere sets it, or for good if nothing is played."""

    @property
    def all_learners(self) -> Sequence[Learner]:
        """Learners of all policies that are trained in this process."""
        return ()

    @property
    def wants_start(self) -> bool:
        """Whether `begin_learning` has a warm start to run."""
        return False

    def begin_learning(self, version: int) -> None:
        """Before the run's first episodes: run the warm starts, and publish their weights as `version`."""

    @property
    def sharded(self) -> RankExecutor | None:
        """The executor whose ranks train a policy; None: training happens in one process."""
        return next((learner.ranks for learner in self.all_learners if learner.ranks is not None), None)

    @property
    def trained_copy(self) -> TrainedCopy | None:
        """Source of the trained weights if this process's policy is not the trained copy; else None."""
        return self.sharded

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to learn (early stopping)."""
        return False

    @property
    def times(self) -> CollectorTimes:
        """Times of the last `collect`."""
        return self.collector.times

    def collect(self, iteration: int) -> Experience:
        """Play with the weights that were published as version `iteration`. Raises SimFault (see EnvManager)."""
        raise NotImplementedError

    def prepare(self, experience: Experience) -> Any:
        """Turn rewards into advantages; no parameter changes."""
        raise NotImplementedError

    def update(self, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        """Train and return metrics. Raises NonFiniteError."""
        raise NotImplementedError

    def play_ahead(self) -> None:
        """Finish the rollouts that need the present weights, before newer ones are published. Raises SimFault."""

    def published(self, version: int) -> None:
        """Called when the generator acts with the policy's weights as `version`."""

    def restart(self, iteration: int) -> None:
        """Begin new episodes, with seeds that depend only on the run's seed and on what was consumed; a run can be resumed here."""
        raise NotImplementedError

    def running_episodes(self) -> dict[str, Tensor]:
        """{slot: running episode as bytes [n] uint8}; empty if none runs between two batches, or all begin again from their seeds.
        Raises UserError if the simulator cannot save episodes."""
        saved = enumerate(self.collector.episodes())
        return {str(slot): torch.frombuffer(bytearray(episode), dtype=torch.uint8) for slot, episode in saved}

    def take_up(self, episodes: Mapping[str, Tensor]) -> None:
        """Continue the episodes that `running_episodes` returned, instead of `restart`. Raises SnapshotError."""
        self.collector.take_up([episodes[str(slot)].numpy().tobytes() for slot in range(len(episodes))])

    def finish(self) -> None:
        """Called at the end of the run: leave the policy as it is to be saved."""

    def metrics(self) -> dict[str, float]:
        return {}

    def recordable(self) -> Sequence[Stream]:
        """Streams of this process whose episodes can be recorded (`record.share`)."""
        return ()

    def state_tensors(self) -> dict[str, Tensor]:
        """Tensors that a resume needs beside the policy's own: the learner's state, and data that only this run has."""
        raise NotImplementedError

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Load what `state_tensors` returned. Raises IncompatibleCheckpointError, KeyError or ValueError for another run's state."""
        raise NotImplementedError

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the optimizer state that ranks wrote to the names of a run without ranks (`state_tensors`)."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a resume needs beside tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after `load_state_tensors`."""
        raise NotImplementedError
