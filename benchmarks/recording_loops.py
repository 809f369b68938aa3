"""Stepping simulators with and without a recorder: in worker processes by the clock, in one process by processor time."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.episodes.layout import Films, films_folder, keep_films
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.episodes.writer import GATHER_S, RecordingWriter
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.rollout.filmed import EncodingSim, films_of, with_films
from embodied_rl.sim.affinity import PlacementPolicy
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import IMAGE, plain_spec, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import Observation, SimSpec, StepBatch, StepBuffers, TensorSpec

NUM_SLOTS = 16
"""What `embodied_rl.record` takes unless told otherwise."""
NUM_GROUPS = 2
Side = Literal["plain", "recorded"]
SIDES: tuple[Side, ...] = ("plain", "recorded")
SEEDS = EpisodeSeeds.training(0)


@dataclass(frozen=True)
class Case:
    """A simulator whose recording is measured."""

    key: str
    """What the command line calls it."""
    name: str
    sim: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    pictures: bool = False
    """Whether it shows pictures, which its processes encode."""
    camera: bool = False
    """Record the observed pictures as pictures for people (lossy) instead of as observations (lossless)."""
    reach: float = 0.05
    """Share of the time per step that recording may add."""
    num_workers: int | None = None
    """Processes that simulate; None: as many as the manager starts by itself, which leaves no core to whoever records."""
    num_slots: int = NUM_SLOTS
    placement: PlacementPolicy = "none"
    """Which cores each of them is bound to."""


@dataclass
class Costs:
    """Of one side; one entry per round."""

    wall_us: list[float] = field(default_factory=list)
    """Per environment step."""
    cpu_us: list[float] = field(default_factory=list)
    """Processor time per environment step where everything happens in one process."""


class CameraSim(SimEnv):
    """A simulator whose observation ``rgb`` is a picture for people. A policy sees the rest, or a zero if there is none."""

    def __init__(self, num_envs: int, target: str, inner_task: str | None, inner_kwargs: Mapping[str, Any]) -> None:
        self._sim: SimEnv = SimFactory(target, inner_task, inner_kwargs).make(num_envs)
        parts = dict(self._sim.spec.observation)
        camera = {f"{IMAGE}front": parts.pop("rgb")}
        self.spec = dataclasses.replace(self._sim.spec, observation={**camera, **(parts or {"nothing": TensorSpec((1,), "float32")})})

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._sim.reset(env_ids, seeds, self._inner(out), options)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, self._inner(out))

    def render(self, env_id: int) -> np.ndarray:
        return self._sim.render(env_id)

    def close(self) -> None:
        self._sim.close()

    def _inner(self, out: StepBuffers) -> StepBuffers:
        return dataclasses.replace(out, observation={**out.observation, "rgb": out.observation[f"{IMAGE}front"]})


class Recorder:
    """What `embodied_rl.record` does with a batch; the actions and what a policy says about them are drawn beforehand."""

    def __init__(self, folder: Path, spec: SimSpec, num_slots: int, films: Films | None, stack: ExitStack) -> None:
        self.films = films.columns if films else frozenset()
        """Names of the columns whose pictures the simulators encode."""
        if films is not None:
            stack.enter_context(keep_films(films.folder))
        stack.callback(shutil.rmtree, folder)
        info = RecordingInfo(plain_spec(spec), {}, {"kind": "random"})
        writer = stack.enter_context(RecordingWriter(folder, info, duplicates="allow", gather_s=GATHER_S))
        self._sinks = BatchSinks(writer, num_slots, films)
        self._streams = [SeedStream(SEEDS, 0, slot, num_slots) for slot in range(num_slots)]
        self._index = [0] * num_slots
        rng = np.random.default_rng(1)
        self._log_probs = rng.normal(size=(64, num_slots, spec.action.dim)).astype(np.float32)
        self._values = rng.normal(size=(64, num_slots))
        self._versions = np.zeros(num_slots, np.int64)

    def start(self, batch: StepBatch, rows: Sequence[int]) -> None:
        """Begin the episodes whose first observations are `rows` of a batch."""
        seen = split(batch.observation)
        for row in rows:
            slot = int(batch.slots[row])
            self._sinks.start(slot, self._streams[slot].seed(self._index[slot]), seen.observation, row, images=seen.images)

    def step(self, batch: StepBatch, action: np.ndarray, tick: int) -> None:
        num_rows = len(batch.slots)
        acted = {
            "action": action,
            "sampled_action": action,
            "log_prob": self._log_probs[tick, :num_rows],
            "value": self._values[tick, :num_rows],
            "policy_version": self._versions[:num_rows],
        }
        rows = self._sinks.step_batch(batch, acted)
        for row in rows:
            slot = int(batch.slots[row])
            self._sinks.finish(slot)
            self._index[slot] += 1
        if rows:
            self.start(batch, rows)

    def settle(self) -> None:
        """What `embodied_rl.record` does when the next actions are sent."""
        self._sinks.settle()


class Loop:
    """What is common to both ways of stepping: actions drawn beforehand.

    The simulators go on from one turn to the next, and so do the recorder's episodes, which end where the simulator's do: beginning and
    ending an episode costs its share of an episode, however short the turns are. Where turns that are not recorded come between, an
    episode lacks their steps, which makes no difference to what it costs.
    """

    def __init__(self, spec: SimSpec, num_slots: int, recorder: Recorder | None) -> None:
        rng, action = np.random.default_rng(0), spec.action
        low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
        self.actions = rng.uniform(low, high, (64, num_slots, action.dim)).astype(np.float32)
        self.num_slots, self.recorder = num_slots, recorder

    def staggered(self, limit: int | None) -> Iterator[range]:
        """Which slots to step before anything is measured, so that their episodes end one after another and not all at once."""
        for first in range(1, self.num_slots):
            for _ in range((limit or 0) // self.num_slots):
                yield range(first, self.num_slots)


class ManagerLoop(Loop):
    """Two alternating groups of slots in worker processes; measured by the clock."""

    def __init__(self, manager: EnvManager, recorder: Recorder | None) -> None:
        super().__init__(manager.spec, manager.num_slots, recorder)
        self._manager, self._groups = manager, split_slots(range(manager.num_slots), NUM_GROUPS)
        batch = manager.reset(SEEDS)
        if recorder is not None:
            recorder.start(batch, range(self.num_slots))
        for slots in self.staggered(manager.spec.max_episode_steps):
            manager.send(slots, self.actions[0, : len(slots)])
            self._record(manager.recv(slots), 0)

    def run(self, seconds: float, record: bool) -> float:
        """Wall-clock time in µs per environment step."""
        manager = self._manager
        start, tick, steps, sent = time.perf_counter(), 0, 0, [0] * len(self._groups)
        for group in self._groups:
            manager.send(group, self.actions[0, : len(group)])
        while time.perf_counter() < start + seconds:
            for index, group in enumerate(self._groups):
                batch = manager.recv(group)
                self._record(batch, sent[index], record)
                tick = (tick + 1) % 64
                sent[index] = tick
                manager.send(group, self.actions[tick, : len(group)])
                if self.recorder is not None and record:
                    self.recorder.settle()
                steps += len(group)
        for index, group in enumerate(self._groups):
            self._record(manager.recv(group), sent[index], record)
            steps += len(group)
        return 1e6 * (time.perf_counter() - start) / steps

    def _record(self, batch: StepBatch, tick: int, record: bool = True) -> None:
        if self.recorder is not None and record:
            self.recorder.step(batch, self.actions[tick, : len(batch.slots)], tick)


class ProcessLoop(Loop):
    """All environments in this process; measured by its processor time, which other work on the machine disturbs less."""

    def __init__(self, sim: SimEnv, num_slots: int, recorder: Recorder | None) -> None:
        super().__init__(sim.spec, num_slots, recorder)
        self._sim, self._out = sim, StepBuffers.allocate(sim.spec, num_slots)
        self._streams = [SeedStream(SEEDS, 0, slot, num_slots) for slot in range(num_slots)]
        self._index = [0] * num_slots
        self._batches: dict[int, StepBatch] = {}
        """{first slot: batch of those from there on}: views, made once, as a manager's are."""
        self._reset(range(num_slots))
        if recorder is not None:
            recorder.start(self._batch(np.arange(num_slots)), range(num_slots))
        for slots in self.staggered(sim.spec.max_episode_steps):
            self._step(np.array(slots), 0)

    def run(self, seconds: float, record: bool) -> float:
        """Processor time of all threads in µs per environment step."""
        slots = np.arange(self.num_slots)
        start, tick, steps = time.process_time(), 0, 0
        while time.process_time() < start + seconds:
            tick = (tick + 1) % 64
            self._step(slots, tick, record)
            steps += self.num_slots
        return 1e6 * (time.process_time() - start) / steps

    def _step(self, slots: np.ndarray, tick: int, record: bool = True) -> None:
        """Step, and reset where an episode is over."""
        out, actions = self._out, self.actions[tick, : len(slots)]
        self._sim.step(slots, actions, out)
        done = slots[(out.terminated | out.truncated)[slots]]
        final = None
        if done.size:
            final = {key: rows.copy() for key, rows in out.observation.items()}
            flags = {name: getattr(out, name).copy() for name in ("reward", "terminated", "truncated", "success")}
            if isinstance(self._sim, EncodingSim):
                self._sim.episodes_ended(done.tolist())
            for slot in done.tolist():
                self._index[slot] += 1
            self._reset(done.tolist())
            for name, values in flags.items():
                getattr(out, name)[:] = values
        if self.recorder is not None and record:
            self.recorder.step(self._batch(slots, final), actions, tick)
            self.recorder.settle()

    def _reset(self, slots: Sequence[int]) -> None:
        self._sim.reset(slots, [self._streams[slot].seed(self._index[slot]) for slot in slots], self._out)

    def _batch(self, slots: np.ndarray, final: Observation | None = None) -> StepBatch:
        out, first = self._out, int(slots[0])
        if first not in self._batches:
            flags = (part[first:] for part in (out.reward, out.terminated, out.truncated, out.success))
            now = {key: part[first:] for key, part in out.observation.items()}
            self._batches[first] = StepBatch(np.array(slots), now, *flags, final_observation=now, episodes=())
        batch = self._batches[first]
        if final is None:
            return batch
        return dataclasses.replace(batch, final_observation={key: part[first:] for key, part in final.items()})


def measure_recording(case: Case, rounds: int, seconds: float, folder: Path) -> dict[Side, Costs]:
    """Wall-clock and processor time per step with and without a recorder, in turns.

    The simulators of both sides are the same, where they do not encode what they draw: two sets of processes differ by some per cent.
    """
    costs: dict[Side, Costs] = {side: Costs() for side in SIDES}
    with ExitStack() as stack:
        recorded = _loops(case, True, folder, stack)
        films = recorded[0].recorder is not None and recorded[0].recorder.films
        loops = {"plain": _loops(case, False, folder, stack) if films else recorded, "recorded": recorded}
        for side, both in loops.items():
            for loop in both:
                loop.run(0.5, side == "recorded")
        for number in range(rounds):
            # Whoever goes first meets other caches.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                wall, cpu = (loop.run(seconds, side == "recorded") for loop in loops[side])
                costs[side].wall_us.append(wall)
                costs[side].cpu_us.append(cpu)
    return costs


def _loops(case: Case, record: bool, folder: Path, stack: ExitStack) -> tuple[ManagerLoop, ProcessLoop]:
    paths = [folder / f"{case.key}-{name}" for name in ("manager", "process")]
    films = [films_folder(path) for path in paths]
    config = _config(case)
    configs = [with_films(config, place) for place in films] if record and case.pictures else [config, config]
    sim = SimFactory(configs[1].target, configs[1].task, configs[1].kwargs, configs[1].extra).make(case.num_slots)
    stack.callback(sim.close)
    factory = SimFactory(configs[0].target, configs[0].task, configs[0].kwargs, configs[0].extra)
    manager = stack.enter_context(
        EnvManager(factory, case.num_slots, num_groups=NUM_GROUPS, num_workers=case.num_workers, placement=case.placement)
    )
    recorders: list[Recorder | None] = [None, None]
    if record:
        recorders = [
            Recorder(path, sim.spec, case.num_slots, films_of(sim.spec, place), stack) for path, place in zip(paths, films, strict=True)
        ]
    return ManagerLoop(manager, recorders[0]), ProcessLoop(sim, case.num_slots, recorders[1])


def _config(case: Case) -> SimConfig:
    config = load_sim_config(case.sim)
    config = dataclasses.replace(config, kwargs={**config.kwargs, **case.kwargs})
    if not case.camera:
        return config
    inner = {"target": config.target, "inner_task": config.task, "inner_kwargs": config.kwargs}
    return dataclasses.replace(config, target="recording_loops:CameraSim", task=None, kwargs=inner)
