"""Contract of the training loop and its collectors: environments of one kind behind slots, in any process or machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodied_rl.sim.batches import Slots
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import EpisodeSummary, SimSpec, StepBatch


class Simulators:
    """Environments behind slots: `send` starts steps and never waits, `recv` returns ready ones. `EnvManager` owns worker processes.

    Agent programs, rollout workers in another process and several domains set `plays_itself`: callers request whole episodes, not steps.
    """

    spec: SimSpec
    num_slots: int
    num_workers: int = 1
    """Number of processes."""
    seeds: EpisodeSeeds = EpisodeSeeds.training(0)
    """Seeds of `reset`."""
    chunk_size: int = 1
    """K: the most steps in one message."""
    autoreset: bool = True
    """Whether a slot whose episode ended begins the next one in the same step; False: it waits for `begin`."""
    num_turns: int | None = None
    """Groups of slots that take turns in the next rollout; 1: all together; 0: one by one, as they are ready; None: the collector's own."""
    last_drift: Mapping[int, float | None] = {}
    """{slot: difference between the saved and the replayed observation} of the last restored episode, if it was replayed."""
    plays_itself: bool = False
    """Whether callers use `evaluate` and request no steps."""

    def reset(self, seeds: EpisodeSeeds | None = None, *, seed_round: int = 0, reconfigure: bool = False) -> StepBatch:
        """Start a new episode in every slot; see `EnvManager.reset`."""
        raise self._no_steps()

    def begin(self, slots: Slots, seeds: Sequence[int] | np.ndarray) -> None:
        """Start new episodes of given seeds in these slots; see `EnvManager.begin`."""
        raise self._no_steps()

    def send(self, slots: Slots, actions: np.ndarray | Sequence[str], watched: Sequence[bool] | None = None) -> None:
        """Start a step of each slot with its action; see `EnvManager.send`."""
        raise self._no_steps()

    def recv(self, slots: Slots | None = None, *, min_ready: int | None = None, timeout_s: float | None = None) -> StepBatch:
        """Wait for steps and hand them out; see `EnvManager.recv`."""
        raise self._no_steps()

    def is_ready(self, slots: range) -> bool:
        """Whether `recv` of these slots would return at once."""
        return True

    def rollout_took(self, seconds: float, num_steps: int) -> None:
        """Report a finished rollout of `num_steps` steps, after which the next one may use other turns."""

    def release(self, slot: int) -> None:
        """Mark the slot's episode as over or no longer needed."""

    def discard(self) -> None:
        """Let steps in flight finish and forget them; call `begin`, `restore` or `reset` next."""

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """Save the running episodes of these slots; see `EnvManager.snapshot`."""
        raise self._no_steps()

    def room(self) -> int:
        """Slots that `restore` can fill at once; `begin` queues episodes without a free slot."""
        return self.num_slots

    def restore(self, slots: Slots, snapshots: Sequence[Snapshot]) -> StepBatch:
        """Resume saved episodes in these slots; see `EnvManager.restore`."""
        raise self._no_steps()

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """Play held-out episodes if `plays_itself`, see `rollout.evaluation.evaluate`; `generator` acts for episodes in this process."""
        raise NotImplementedError(f"{type(self).__name__} is stepped by rollout.evaluation.evaluate")

    def record(self, run_dir: Path, command: str) -> bool:
        """Let remote players record their training episodes (`record.share`); False: there are none. `command`: how the run was started."""
        return False

    def demonstrate(self) -> list[Any]:
        """Successful `AgentEpisode`s of a warm start's scripted player, if `plays_itself`."""
        raise NotImplementedError(f"{type(self).__name__} is stepped by methods.warm_start.play_script")

    def texts(self, num_slots: int | None = None) -> list[str]:
        """Texts of the first observations of so many slots, numbered on from these where there are more; None: of these. Episodes in
        progress are lost."""
        whole, shown = num_slots or self.num_slots, list[str]()
        while len(shown) < whole:
            shown += map(str, self.reset(replace(self.seeds, before=len(shown))).observation["text"])
        self.discard()
        return shown[:whole]

    @property
    def fault_records(self) -> list[FaultRecord]:
        """All faults so far, oldest first."""
        return []

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """{name: copies of these slots' memory}, also after a fault, for a dump."""
        return {}

    def worker_pids(self) -> list[int]:
        """Ids of the processes that can be killed."""
        return []

    def offload(self) -> int:
        """Free the memory of everything that runs; returns the bytes that are kept instead."""
        return 0

    def onload(self) -> None:
        """Resume where `offload` stopped."""

    def close(self) -> None:
        """End everything that was started; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _no_steps(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__} plays whole episodes and cannot be stepped.")


class SimulatorsElsewhere(Simulators):
    """Simulators in other processes, of which this one knows only the spec."""

    plays_itself = True

    def __init__(self, spec: SimSpec) -> None:
        self.spec, self.num_slots = spec, 0
