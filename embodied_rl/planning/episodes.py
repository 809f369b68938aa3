"""Whole episodes of very different length: slots, simulators, the policy's devices and the trainer as stations of a simulation.

```
 slot: ── admitted ─▶ [cores] step ─▶ [devices] act ─▶ … L times … ─▶ finished ─┐        at most (S + 1) · groups per batch are held
                                                                            group complete ─▶ ready ─▶ [train] ─▶ published
```
The bound on staleness is the group queue's: a place is held from a group's admission until the weights that its batch was trained into are
published, and a batch is only taken when all that is older can still be consumed in time (the rule ``bounded`` of `GroupQueue`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from embodied_rl.config.placement import BatchTimeConfig, SpreadConfig
from embodied_rl.planning.events import EventClock, Station


@dataclass(frozen=True)
class EpisodeRun:
    """A cell of a cluster: some slots, cores and devices, and the share of each batch that they collect."""

    num_slots: int
    num_cores: float
    """Below 1: a core is shared with other cells."""
    num_devices: int
    """Copies of the policy."""
    devices_while_training: int
    """Of them: all where training is apart, none where it takes turns, some where they are multiplexed."""
    groups_per_batch: int
    group_size: int
    length: SpreadConfig
    step: SpreadConfig
    act: BatchTimeConfig
    train_s: Callable[[int], float]
    """Seconds of training on so many decisions of this cell, with everything that keeps the trainer."""
    publish_s: float
    """Generation stands still so long for new weights."""
    switch_s: float = 0.0
    """What a device that changes sides is lost for, there and back."""
    max_staleness: int = 0
    most_rows: int | None = None


@dataclass
class EpisodeOutcome:
    """What came of a simulated cell."""

    published_s: list[float] = field(default_factory=list)
    """When each version was out."""
    decisions: list[int] = field(default_factory=list)
    """Of each batch."""
    ages: dict[int, int] = field(default_factory=dict)
    """{versions between admission and training: groups}"""
    env_busy_s: float = 0.0
    """Core-seconds."""
    act_busy_s: float = 0.0
    """Device-seconds."""
    train_busy_s: float = 0.0


@dataclass
class _Group:
    number: int
    version: int
    left: int
    decisions: int = 0


class EpisodeSimulation:
    """Runs one cell for a number of versions."""

    def __init__(self, run: EpisodeRun, rng: np.random.Generator) -> None:
        self.run, self._rng = run, rng
        self.outcome = EpisodeOutcome()
        self.clock = EventClock()
        self._slower = 1.0 if run.num_cores >= 1 else 1.0 / run.num_cores
        cores = max(1, min(run.num_slots, math.floor(run.num_cores)))
        self.cores = Station(self.clock, cores, self._step_s, self._stepped)
        self.devices = Station(self.clock, run.num_devices, self._act_s, self._acted, batches=True, most=run.most_rows)
        self._idle_slots = run.num_slots
        self._waiting_members: list[_Group] = []
        self._unfinished: dict[int, _Group] = {}
        self._ready: list[_Group] = []
        self._training: list[_Group] = []
        self._next_number = 0
        self._version = self._decisions = 0

    def simulate(self, num_versions: int) -> EpisodeOutcome:
        """Let the cell run until `num_versions` were published."""
        self._admit()
        finished = self.clock.run(lambda: self._version >= num_versions)
        assert finished, "nothing is left to happen and no batch is full: the model has deadlocked"
        self.outcome.env_busy_s, self.outcome.act_busy_s = self.cores.busy_s, self.devices.busy_s
        return self.outcome

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        run = self.run
        while self._idle_slots:
            if not self._waiting_members:
                held = len(self._unfinished) + len(self._ready) + len(self._training)
                if held >= (run.max_staleness + 1) * run.groups_per_batch:
                    return
                group = _Group(self._next_number, self._version, run.group_size)
                self._next_number += 1
                self._unfinished[group.number] = group
                self._waiting_members = [group] * run.group_size
            group = self._waiting_members.pop()
            self._idle_slots -= 1
            length = max(1, round(_draw(self._rng, run.length)))
            group.decisions += length
            self.cores.put((group, length))

    def _step_s(self, batch: Sequence[object]) -> float:
        return _draw(self._rng, self.run.step) * self._slower

    def _stepped(self, job: tuple[_Group, int]) -> None:
        self.devices.put(job)

    def _act_s(self, batch: Sequence[object]) -> float:
        return self.run.act.of(len(batch))

    def _acted(self, job: tuple[_Group, int]) -> None:
        group, left = job
        if left > 1:
            self.cores.put((group, left - 1))
            return
        self._idle_slots += 1
        group.left -= 1
        if group.left == 0:
            self._ready.append(self._unfinished.pop(group.number))
            self._train_when_full()
        self._admit()

    # ---- trainer ----------------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Group] | None:
        """The oldest ready groups, when taking them leaves nothing that must grow too old."""
        run, version = self.run, self._version
        if len(self._ready) < run.groups_per_batch:
            return None
        self._ready.sort(key=lambda group: (group.version, group.number))
        chosen, kept = self._ready[: run.groups_per_batch], self._ready[run.groups_per_batch :]
        rest = [group.version for group in (*kept, *self._unfinished.values())]
        for later in range(run.max_staleness + 1):
            # Of what is left, later batches can consume so many before it is too old.
            if sum(v <= version - run.max_staleness + later for v in rest) > later * run.groups_per_batch:
                return None
        return chosen

    def _train_when_full(self) -> None:
        if self._training or (chosen := self._choose()) is None:
            return
        run = self.run
        self._training = chosen
        numbers = {group.number for group in chosen}
        self._ready = [group for group in self._ready if group.number not in numbers]
        decisions = sum(group.decisions for group in chosen)
        self.outcome.decisions.append(decisions)
        for group in chosen:
            age = self._version - group.version
            self.outcome.ages[age] = self.outcome.ages.get(age, 0) + 1
        self._decisions = decisions
        self.devices.resize(run.devices_while_training, self._train)

    def _train(self) -> None:
        """The devices that training needs are free."""
        run = self.run
        seconds = run.train_s(self._decisions)
        self.outcome.train_busy_s += seconds
        changing = run.switch_s if run.devices_while_training < run.num_devices else 0.0
        self.clock.after(seconds + changing, self._trained)

    def _trained(self) -> None:
        self.devices.resize(0, lambda: self.clock.after(self.run.publish_s, self._published))

    def _published(self) -> None:
        self._version += 1
        self.outcome.published_s.append(self.clock.now_s)
        self._training = []
        self.devices.resize(self.run.num_devices)
        self._admit()
        self._train_when_full()


def _draw(rng: np.random.Generator, spread: SpreadConfig) -> float:
    value = spread.median if spread.sigma == 0 else spread.median * math.exp(spread.sigma * rng.standard_normal())
    return value if spread.most is None else min(value, spread.most)
