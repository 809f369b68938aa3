"""Stepping simulators with and without a recorder: in worker processes by the clock, in one process by processor time."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied_rl.config import load_sim_config
from embodied_rl.episodes.recorded import RecordingInfo
from embodied_rl.episodes.slots import SlotSinks
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.rollout.collector import split_groups
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import Observation, SimSpec, StepBatch, StepBuffers

NUM_SLOTS = 8
Side = Literal["plain", "slots", "sinks"]
SIDES: tuple[Side, ...] = ("plain", "slots", "sinks")
"""Not recorded; recorded through `SlotSinks`; recorded through one `EpisodeSink` per slot."""


@dataclass(frozen=True)
class Case:
    """A simulator whose recording is measured."""

    name: str
    sim: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    camera: bool = False
    """Record the observed pictures as pictures for people (lossy) instead of as observations (lossless)."""
    reach: float = 0.05
    """Share of the time per step that recording may add."""


@dataclass
class Costs:
    """Of one side; one entry per round."""

    wall_us: list[float] = field(default_factory=list)
    """Per environment step."""
    cpu_us: list[float] = field(default_factory=list)
    """Processor time per environment step where everything happens in one process, the encoder's thread included."""


class SinkPerSlot:
    """`SlotSinks`'s calls by a sink of its own for every slot."""

    def __init__(self, writer: RecordingWriter, num_slots: int) -> None:
        self._writer, self._sinks = writer, [None] * num_slots  # type: list[Any]

    def start(self, slot: int, seed: int, observation: Observation, row: int, images: Observation | None = None) -> None:
        self._sinks[slot] = self._writer.open_episode(seed)
        self._sinks[slot].start(row_of(observation, row), images=images and row_of(images, row))

    def step(
        self,
        slots: np.ndarray,
        observation: Observation,
        final_observation: Observation,
        images: Observation | None = None,
        **columns: np.ndarray,
    ) -> None:
        done = columns["terminated"] | columns["truncated"]
        for row, slot in enumerate(slots.tolist()):
            after = final_observation if done[row] else observation
            values = {name: rows[row] for name, rows in columns.items()}
            self._sinks[slot].step(**values, observation=row_of(after, row), images=images and row_of(images, row))

    def finish(self, slot: int) -> None:
        self._sinks[slot].finish()

    def discard(self, slot: int) -> None:
        self._sinks[slot].discard()


Recorder = SlotSinks | SinkPerSlot


def row_of(part: Observation, row: int) -> dict[str, Any]:
    return {key: rows[row] for key, rows in part.items()}


class Loop:
    """What is common to both ways of stepping: actions drawn beforehand, and what a recorder is told."""

    def __init__(self, spec: SimSpec, num_rows: int, camera: bool) -> None:
        self._camera = camera
        rng, action = np.random.default_rng(0), spec.action
        low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
        self.actions = rng.uniform(low, high, (64, num_rows, action.dim)).astype(np.float32)
        self._log_probs = rng.normal(size=(64, num_rows, action.dim)).astype(np.float32)
        self._values = rng.normal(size=(64, num_rows)).astype(np.float32)
        self._versions = np.zeros(num_rows, np.int64)
        self._seed = 0
        self._begun: set[int] = set()
        """Slots whose episode has no step yet."""

    def start(self, recorder: Recorder, batch: StepBatch, rows: Sequence[int]) -> None:
        """Begin the episodes whose first observations are `rows` of a batch."""
        for row in rows:
            self._seed += 1
            self._begun.add(int(batch.slots[row]))
            images = {"front": batch.observation["rgb"]} if self._camera else None
            recorder.start(int(batch.slots[row]), self._seed, {} if self._camera else batch.observation, row, images=images)

    def record(self, recorder: Recorder, batch: StepBatch, tick: int) -> None:
        camera = self._camera
        if self._begun:
            self._begun.difference_update(batch.slots.tolist())
        recorder.step(
            batch.slots,
            action=self.actions[tick],
            sampled_action=self.actions[tick],
            log_prob=self._log_probs[tick],
            value=self._values[tick],
            policy_version=self._versions,
            reward=batch.reward,
            terminated=batch.terminated,
            truncated=batch.truncated,
            success=batch.success,
            observation={} if camera else batch.observation,
            final_observation={} if camera else batch.final_observation,
            images={"front": batch.observation["rgb"]} if camera else None,
        )
        done = batch.done
        if done.any():
            rows = np.flatnonzero(done).tolist()
            for row in rows:
                recorder.finish(int(batch.slots[row]))
            self.start(recorder, batch, rows)

    def end(self, recorder: Recorder) -> None:
        """Write the episodes in progress."""
        for slot in range(NUM_SLOTS):
            if slot in self._begun:
                recorder.discard(slot)
            else:
                recorder.finish(slot)
        self._begun.clear()


class ManagerLoop(Loop):
    """Two alternating groups of slots in worker processes; measured by the clock."""

    def __init__(self, manager: EnvManager, camera: bool) -> None:
        self._manager, self._groups = manager, split_groups(manager.num_slots, 2)
        super().__init__(manager.spec, len(self._groups[0]), camera)

    def run(self, seconds: float, recorder: Recorder | None) -> float:
        """Wall-clock time in µs per environment step, writing of the last episodes included."""
        manager = self._manager
        batch = manager.reset()
        if recorder is not None:
            self.start(recorder, batch, range(manager.num_slots))
        start, tick, steps, sent = time.perf_counter(), 0, 0, [0] * len(self._groups)
        for group in self._groups:
            manager.send(group, self.actions[0])
        while time.perf_counter() < start + seconds:
            for index, group in enumerate(self._groups):
                batch = manager.recv(group)
                if recorder is not None:
                    self.record(recorder, batch, sent[index])
                tick = (tick + 1) % 64
                sent[index] = tick
                manager.send(group, self.actions[tick])
                steps += len(group)
        for group in self._groups:
            manager.recv(group)
        if recorder is not None:
            self.end(recorder)
        return 1e6 * (time.perf_counter() - start) / steps


class ProcessLoop(Loop):
    """All environments in this process; measured by its processor time, which other work on the machine disturbs less."""

    def __init__(self, factory: SimFactory, camera: bool) -> None:
        self._sim: Any = factory.make(NUM_SLOTS)
        self._out = StepBuffers.allocate(self._sim.spec, NUM_SLOTS)
        super().__init__(self._sim.spec, NUM_SLOTS, camera)

    def run(self, seconds: float, recorder: Recorder | None) -> float:
        """Processor time of all threads in µs per environment step, writing of the last episodes included."""
        sim, out, slots = self._sim, self._out, np.arange(NUM_SLOTS)
        sim.reset(slots, slots, out)
        batch = self._batch(out.observation)
        if recorder is not None:
            self.start(recorder, batch, range(NUM_SLOTS))
        start, tick, steps = time.process_time(), 0, 0
        while time.process_time() < start + seconds:
            tick = (tick + 1) % 64
            sim.step(slots, self.actions[tick], out)
            done = np.flatnonzero(out.terminated | out.truncated)
            final = out.observation
            if done.size:
                final = {key: rows.copy() for key, rows in out.observation.items()}
                sim.reset(done, done + steps, out)
            if recorder is not None:
                self.record(recorder, self._batch(final), tick)
            steps += NUM_SLOTS
        if recorder is not None:
            self.end(recorder)
        return 1e6 * (time.process_time() - start) / steps

    def close(self) -> None:
        self._sim.close()

    def _batch(self, final: Observation) -> StepBatch:
        out = self._out
        flags = (out.reward, out.terminated, out.truncated, out.success)
        return StepBatch(np.arange(NUM_SLOTS), out.observation, *flags, final_observation=final, episodes=())


def measure_recording(case: Case, rounds: int, seconds: float, folder: Path) -> dict[Side, Costs]:
    """Wall-clock and processor time per step of each side, in turns."""
    config = load_sim_config(case.sim)
    factory = SimFactory(config.target, config.task, {**config.kwargs, **case.kwargs}, config.extra)
    costs: dict[Side, Costs] = {side: Costs() for side in SIDES}
    alone = ProcessLoop(factory, case.camera)
    with EnvManager(factory, NUM_SLOTS, num_groups=2) as manager:
        spec = dataclasses.replace(manager.spec, observation={}) if case.camera else manager.spec
        info = RecordingInfo(spec, {}, {"kind": "random"})
        loops = (ManagerLoop(manager, case.camera), alone)
        for loop in loops:
            loop.run(0.5, None)
        for number in range(rounds):
            # Whoever goes first meets other caches.
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                found = [recorded(loop, side, info, folder / f"{side}-{number}", seconds) for loop in loops]
                costs[side].wall_us.append(found[0])
                costs[side].cpu_us.append(found[1])
    alone.close()
    return costs


def recorded(loop: ManagerLoop | ProcessLoop, side: Side, info: RecordingInfo, path: Path, seconds: float) -> float:
    """One side of a round."""
    if side == "plain":
        return loop.run(seconds, None)
    with RecordingWriter(path, info, duplicates="allow") as writer:
        per_step = loop.run(seconds, SlotSinks(writer, NUM_SLOTS) if side == "slots" else SinkPerSlot(writer, NUM_SLOTS))
    shutil.rmtree(path)
    return per_step
