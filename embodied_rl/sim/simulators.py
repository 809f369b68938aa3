"""What the training loop and its collectors hold: environments of one kind behind slots, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.sim.batches import Slots
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import EpisodeSummary, SimSpec, StepBatch


class Simulators:
    """`send` starts steps of slots and never waits, `recv` hands out what is ready. `EnvManager` is the one that owns worker processes.

    Agent programs, rollout workers in another process and several domains play by themselves (`plays_itself`): whole episodes are asked
    of them, and not steps.
    """

    spec: SimSpec
    num_slots: int
    num_workers: int = 1
    """Processes."""
    chunk_size: int = 1
    """K: steps that a message may hold."""
    autoreset: bool = True
    """A slot whose episode ended begins the next one in the same step; False: it waits for `begin`."""
    num_turns: int | None = None
    """Groups of slots that are stepped in turns in the next rollout; 1: all together; 0: each slot by itself, as it is ready; None: as
    the collector has them."""
    last_drift: Mapping[int, float | None] = {}
    """{slot: how far the episode that was restored last is off what was saved}, where it was played again."""
    plays_itself: bool = False
    """Whether `evaluate` is to be asked, and no steps."""

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
        """Whether `recv` of these would not wait."""
        return True

    def rollout_took(self, seconds: float, num_steps: int) -> None:
        """A rollout of so many steps is over, and the next one may have other turns."""

    def release(self, slot: int) -> None:
        """What this slot plays is over, or needed no more."""

    def discard(self) -> None:
        """Let steps in flight finish and forget them; `begin`, `restore` or `reset` comes next."""

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """Save the running episodes of these slots; see `EnvManager.snapshot`."""
        raise self._no_steps()

    def room(self) -> int:
        """Slots that `restore` can take up at once; `begin` has those wait that find none."""
        return self.num_slots

    def restore(self, slots: Slots, snapshots: Sequence[Snapshot]) -> StepBatch:
        """Take up saved episodes in these slots; see `EnvManager.restore`."""
        raise self._no_steps()

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """Where they play by themselves: held-out episodes, see `rollout.evaluation.evaluate`; `generator` acts where they are here."""
        raise NotImplementedError(f"{type(self).__name__} is stepped by rollout.evaluation.evaluate")

    def record(self, run_dir: Path, command: str) -> bool:
        """Have what plays elsewhere write its training episodes down (`record.share`); False: nothing plays elsewhere.
        `command`: how the run was started."""
        return False

    def demonstrate(self) -> list[Any]:
        """Where they play by themselves: successful `AgentEpisode`s of a warm start's scripted player."""
        raise NotImplementedError(f"{type(self).__name__} is stepped by methods.warm_start.play_script")

    def texts(self) -> list[str]:
        """What the first observations say; episodes that were begun are lost."""
        shown = [str(text) for text in self.reset().observation["text"]]
        self.discard()
        return shown

    @property
    def fault_records(self) -> list[FaultRecord]:
        """All faults so far, oldest first."""
        return []

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """{name: copies of what lies in memory for these slots}, also after a fault: for a dump."""
        return {}

    def worker_pids(self) -> list[int]:
        """Of the processes that can be killed."""
        return []

    def offload(self) -> int:
        """Free the memory of what is running; returns the bytes that are kept instead."""
        return 0

    def onload(self) -> None:
        """Go on where `offload` stopped."""

    def close(self) -> None:
        """End what was started; may be called twice."""

    def _no_steps(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__} plays by itself: whole episodes are asked of it, and no steps.")


class SimulatorsElsewhere(Simulators):
    """Simulators of which only the spec is known in this process."""

    plays_itself = True

    def __init__(self, spec: SimSpec, num_slots: int = 0) -> None:
        self.spec, self.num_slots = spec, num_slots
