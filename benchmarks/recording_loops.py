"""Stepping simulators with and without a recorder: in worker processes by the clock, in one process by processor time."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
SIDES: tuple[Side, ...] = ("plain", "slots")
"""Not recorded; recorded through `SlotSinks`, as `embodied_rl.record` does. "sinks": through one `EpisodeSink` per slot."""


@dataclass(frozen=True)
class Case:
    """A simulator whose recording is measured."""

    key: str
    """What the command line calls it."""
    name: str
    sim: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    camera: bool = False
    """Record the observed pictures as pictures for people (lossy) instead of as observations (lossless)."""
    reach: float = 0.05
    """Share of the time per step that recording may add."""
    num_workers: int | None = None
    """Processes that simulate; None: as many as the manager starts by itself, which leaves no core to whoever records."""


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
        self._writer = writer
        self._sinks: list[Any] = [None] * num_slots

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
    ) -> list[int]:
        done = columns["terminated"] | columns["truncated"]
        for row, slot in enumerate(slots.tolist()):
            after = final_observation if done[row] else observation
            values = {name: rows[row] for name, rows in columns.items()}
            self._sinks[slot].step(**values, observation=row_of(after, row), images=images and row_of(images, row))
        rows: list[int] = np.flatnonzero(done).tolist()
        return rows

    def finish(self, slot: int) -> None:
        self._sinks[slot].finish()

    def discard(self, slot: int) -> None:
        self._sinks[slot].discard()


Recorder = SlotSinks | SinkPerSlot


def row_of(part: Observation, row: int) -> dict[str, Any]:
    return {key: rows[row] for key, rows in part.items()}


class Loop:
    """What is common to both ways of stepping: actions drawn beforehand, and what a recorder is told.

    The simulators go on from one turn to the next, and so do the recorder's episodes, which end where the simulator's do: beginning and
    ending an episode costs its share of an episode, however short the turns are.
    """

    def __init__(self, spec: SimSpec, num_rows: int, camera: bool) -> None:
        self._camera = camera
        rng, action = np.random.default_rng(0), spec.action
        low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
        self.actions = rng.uniform(low, high, (64, num_rows, action.dim)).astype(np.float32)
        self._log_probs = rng.normal(size=(64, num_rows, action.dim)).astype(np.float32)
        self._values = rng.normal(size=(64, num_rows)).astype(np.float32)
        self._versions = np.zeros(num_rows, np.int64)
        self._seed = 0

    def start(self, recorder: Recorder, batch: StepBatch, rows: Sequence[int]) -> None:
        """Begin the episodes whose first observations are `rows` of a batch."""
        for row in rows:
            self._seed += 1
            images = {"front": batch.observation["rgb"]} if self._camera else None
            recorder.start(int(batch.slots[row]), self._seed, {} if self._camera else batch.observation, row, images=images)

    def record(self, recorder: Recorder, batch: StepBatch, tick: int) -> None:
        camera, action = self._camera, self.actions[tick]
        rows = recorder.step(
            batch.slots,
            action=action,
            sampled_action=action,
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
        for row in rows:
            recorder.finish(int(batch.slots[row]))
        self.start(recorder, batch, rows)


def staggered(limit: int | None) -> Iterator[range]:
    """Which slots to step before anything is measured, so that their episodes end one after another and not all at once."""
    for first in range(1, NUM_SLOTS):
        for _ in range((limit or 0) // NUM_SLOTS):
            yield range(first, NUM_SLOTS)


class ManagerLoop(Loop):
    """Two alternating groups of slots in worker processes; measured by the clock."""

    def __init__(self, manager: EnvManager, camera: bool) -> None:
        self._manager, self._groups = manager, split_groups(manager.num_slots, 2)
        super().__init__(manager.spec, len(self._groups[0]), camera)
        self._batch = manager.reset()
        for slots in staggered(manager.spec.max_episode_steps):
            manager.send(slots, np.resize(self.actions[0], (len(slots), self.actions.shape[2])))
            manager.recv(slots)

    def begin(self, recorder: Recorder) -> None:
        """Have the recorder begin an episode in every slot."""
        self.start(recorder, self._batch, range(NUM_SLOTS))

    def run(self, seconds: float, recorder: Recorder | None) -> float:
        """Wall-clock time in µs per environment step."""
        manager = self._manager
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
        for index, group in enumerate(self._groups):
            batch = manager.recv(group)
            if recorder is not None:
                self.record(recorder, batch, sent[index])
            steps += len(group)
        return 1e6 * (time.perf_counter() - start) / steps


class ProcessLoop(Loop):
    """All environments in this process; measured by its processor time, which other work on the machine disturbs less."""

    def __init__(self, factory: SimFactory, camera: bool) -> None:
        self._sim: Any = factory.make(NUM_SLOTS)
        self._out = StepBuffers.allocate(self._sim.spec, NUM_SLOTS)
        super().__init__(self._sim.spec, NUM_SLOTS, camera)
        self._sim.reset(range(NUM_SLOTS), range(NUM_SLOTS), self._out)
        self._resets = NUM_SLOTS
        for slots in staggered(self._sim.spec.max_episode_steps):
            self._step(np.array(slots), np.resize(self.actions[0], (len(slots), self.actions.shape[2])))

    def begin(self, recorder: Recorder) -> None:
        """Have the recorder begin an episode in every slot."""
        self.start(recorder, self._batch(self._out.observation), range(NUM_SLOTS))

    def run(self, seconds: float, recorder: Recorder | None) -> float:
        """Processor time of all threads in µs per environment step."""
        slots = np.arange(NUM_SLOTS)
        start, tick, steps = time.process_time(), 0, 0
        while time.process_time() < start + seconds:
            tick = (tick + 1) % 64
            final = self._step(slots, self.actions[tick])
            if recorder is not None:
                self.record(recorder, self._batch(final), tick)
            steps += NUM_SLOTS
        return 1e6 * (time.process_time() - start) / steps

    def close(self) -> None:
        self._sim.close()

    def _step(self, slots: np.ndarray, actions: np.ndarray) -> Observation:
        """Step, and reset where an episode is over; the observations before that."""
        out = self._out
        self._sim.step(slots, actions, out)
        done = slots[(out.terminated | out.truncated)[slots]]
        if not done.size:
            return out.observation
        final = {key: rows.copy() for key, rows in out.observation.items()}
        flags = {name: getattr(out, name).copy() for name in ("reward", "terminated", "truncated", "success")}
        self._sim.reset(done, self._resets + np.arange(done.size), out)
        self._resets += done.size
        for name, values in flags.items():
            getattr(out, name)[:] = values
        return final

    def _batch(self, final: Observation) -> StepBatch:
        out = self._out
        flags = (out.reward, out.terminated, out.truncated, out.success)
        return StepBatch(np.arange(NUM_SLOTS), out.observation, *flags, final_observation=final, episodes=())


def measure_recording(case: Case, rounds: int, seconds: float, folder: Path, sides: Sequence[Side] = SIDES) -> dict[Side, Costs]:
    """Wall-clock and processor time per step of each side, in turns."""
    config = load_sim_config(case.sim)
    factory = SimFactory(config.target, config.task, {**config.kwargs, **case.kwargs}, config.extra)
    costs: dict[Side, Costs] = {side: Costs() for side in sides}
    alone = ProcessLoop(factory, case.camera)
    with ExitStack() as stack:
        stack.callback(alone.close)
        manager = stack.enter_context(EnvManager(factory, NUM_SLOTS, num_groups=2, num_workers=case.num_workers))
        spec = dataclasses.replace(manager.spec, observation={}) if case.camera else manager.spec
        info = RecordingInfo(spec, {}, {"kind": "random"})
        loops: tuple[ManagerLoop | ProcessLoop, ...] = (ManagerLoop(manager, case.camera), alone)
        recorders: dict[Side, list[Recorder | None]] = {side: [None, None] for side in sides}
        for side in sides:
            for index, loop in enumerate(loops):
                if side != "plain":
                    path = folder / f"{case.key}-{side}-{index}"
                    stack.callback(shutil.rmtree, path)
                    writer = stack.enter_context(RecordingWriter(path, info, duplicates="allow"))
                    recorders[side][index] = recorder = (SlotSinks if side == "slots" else SinkPerSlot)(writer, NUM_SLOTS)
                    loop.begin(recorder)
                loop.run(0.5, recorders[side][index])
        for number in range(rounds):
            # Whoever goes first meets other caches.
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                wall, cpu = (loop.run(seconds, recorder) for loop, recorder in zip(loops, recorders[side], strict=True))
                costs[side].wall_us.append(wall)
                costs[side].cpu_us.append(cpu)
    return costs
