"""EnvManager: many environments in worker processes, seen as slots that are sent actions and give back observations."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import available_cores
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.process import WorkerProcess
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.transport import ENDED, IDLE, PENDING, READY, Bell, Slab, fence, memory_of, slab_layout
from embodied_rl.types import EpisodeSummary, SimSpec, StepBatch


class _Group:
    """A contiguous run of slots with its views, made once: the fast path of `send` and `recv`."""

    def __init__(self, slots: range, slab: Slab, bells: list[Bell]) -> None:
        arrays, rows = slab.arrays, slice(slots.start, slots.stop)
        self.rows = rows
        self.state = memory_of(arrays["slot_state"][rows])
        self.action = arrays["action"][rows]
        self.bells = bells
        size = len(slots)
        self.pending, self.idle, self.all_ready = bytes([PENDING]) * size, bytes([IDLE]) * size, bytes([READY]) * size
        self.batch = StepBatch(
            slots=np.arange(slots.start, slots.stop),
            observation=slab.group("observation", slots.start, slots.stop),
            reward=arrays["reward"][rows],
            terminated=arrays["terminated"][rows],
            truncated=arrays["truncated"][rows],
            success=arrays["success"][rows],
            final_observation=slab.group("final_observation", slots.start, slots.stop),
            episodes=(),
        )

    def is_ready(self) -> bool:
        """Whether every slot of the group has a step waiting."""
        marks = self.state.tobytes()
        return marks == self.all_ready or min(marks) >= READY


class EnvManager:
    """`num_slots` environments over `num_workers` processes.

    Lockstep is ``step``, which is ``send`` and ``recv`` of all slots. With groups of slots the caller keeps the workers busy
    while it thinks: ``send`` one group, ``recv`` the other. What comes back for a slot depends on its seeds and actions
    alone, not on the number of workers or the order of calls.

    Raises (from every call that talks to a worker):
        SimFault: a worker raised, died or missed its deadline; with the worker's traceback.
        NonFiniteSimulationError: NaN or infinity in an observation or reward.
        UserError: the simulator rejected its configuration.
    """

    def __init__(
        self,
        factory: SimFactory,
        num_slots: int,
        *,
        num_workers: int | None = None,
        seeds: EpisodeSeeds | None = None,
        success_ends_episode: bool = False,
        max_episode_steps: int | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 180.0,
    ) -> None:
        cores = available_cores()
        self.num_slots = num_slots
        self.num_workers = min(num_workers or cores, num_slots)
        self.step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        if self.num_workers > cores:
            warnings.warn(
                f"num_workers={self.num_workers} is more than the {cores} cores this process may use; workers will wait for each other.",
                stacklevel=2,
            )
        self._seeds = seeds if seeds is not None else EpisodeSeeds.training(0)
        bounds = [round(worker * num_slots / self.num_workers) for worker in range(self.num_workers + 1)]
        self._ranges = [range(first, last) for first, last in itertools.pairwise(bounds)]
        self._worker_of = np.repeat(np.arange(self.num_workers), [len(slots) for slots in self._ranges])
        self._groups: dict[range, _Group] = {}
        self._workers: list[WorkerProcess] = []
        self._slab: Slab | None = None
        self._finalizer = weakref.finalize(self, _close_workers, self._workers)
        setup = {
            "factory": dataclasses.asdict(factory),
            "num_slots": num_slots,
            "seeds": dataclasses.asdict(self._seeds),
            "max_episode_steps": max_episode_steps,
            "success_ends_episode": success_ends_episode,
        }
        try:
            self._start(setup)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def from_config(config: SimConfig, seeds: EpisodeSeeds, *, num_slots: int | None = None, render: bool = False) -> EnvManager:
        """The manager a configuration describes. `render` asks simulators that must know beforehand to be able to draw."""
        kwargs = {**config.kwargs, **({"render": True} if render else {})}
        slots = num_slots or config.num_slots
        return EnvManager(
            SimFactory(config.target, config.task, kwargs, config.extra),
            slots,
            num_workers=None if config.num_workers is None else min(config.num_workers, slots),
            seeds=seeds,
            success_ends_episode=config.success_ends_episode,
            max_episode_steps=config.max_episode_steps,
            step_timeout_s=config.step_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )

    # ---- lockstep ---------------------------------------------------------------------------------------------------

    def reset(self, seeds: EpisodeSeeds | None = None, *, seed_round: int = 0, reconfigure: bool = False) -> StepBatch:
        """Start a new episode in every slot, whatever it was doing, and count episodes from 0 again.

        Args:
            seeds: from now on; None: the manager's own.
            seed_round: part of the training seeds, so that a run can go on with seeds of its own after each checkpoint.
            reconfigure: also forget what the simulator keeps between episodes, so that what follows depends on the seeds
                alone (ManiSkill; slow there).
        """
        self._drain()
        message = {
            "operation": "reset",
            "seeds": dataclasses.asdict(seeds or self._seeds),
            "seed_round": seed_round,
            "reconfigure": reconfigure,
        }
        for worker in self._workers:
            self._control(worker, message)
        for worker in self._workers:
            worker.receive(self._start_timeout_s, "reset")
        return self._group(range(self.num_slots)).batch

    def step(self, actions: np.ndarray) -> StepBatch:
        """Step all slots with actions [num_slots, A] in the simulator's units."""
        slots = range(self.num_slots)
        self.send(slots, actions)
        return self.recv(slots)

    # ---- asynchronous -----------------------------------------------------------------------------------------------

    def send(self, slots: range | Sequence[int] | np.ndarray, actions: np.ndarray) -> None:
        """Start a step of each slot with its row of actions [len(slots), A]; does not wait for simulation.

        Raises:
            ValueError: actions of the wrong shape, or a slot that is still stepping.
        """
        assert self._slab is not None, "the manager is closed"
        if isinstance(slots, range) and slots.step == 1:
            group = self._group(slots)
            if PENDING in group.state.tobytes():
                raise ValueError(f"Slots {slots} were sent an action and have not been received yet.")
            group.action[:] = actions
            fence()
            group.state[:] = group.pending
            for bell in group.bells:
                bell.ring()
            return
        for slot, action in zip(slots, actions, strict=True):
            self.send(range(int(slot), int(slot) + 1), action[None])

    def recv(
        self, slots: range | Sequence[int] | np.ndarray | None = None, *, min_ready: int | None = None, timeout_s: float | None = None
    ) -> StepBatch:
        """Wait for steps and hand them out.

        Args:
            slots: exactly these, all of which were sent; None: whichever are ready.
            min_ready: without `slots`, how many to wait for (default: all that were sent).
            timeout_s: default: the manager's step_timeout_s.

        Returns:
            A batch of views (contiguous slots) or copies, ascending by slot.
        """
        limit = self.step_timeout_s if timeout_s is None else timeout_s
        if isinstance(slots, range) and slots.step == 1:
            group = self._group(slots)
            if not group.is_ready():
                self._wait(group.is_ready, limit, slots)
            fence()
            marks = group.state.tobytes()
            group.state[:] = group.idle
            if ENDED in marks:
                return dataclasses.replace(group.batch, episodes=self._episodes(slots.start, marks))
            return group.batch
        if slots is None:
            slots = self._wait_any(min_ready, limit)
        return _join([self.recv(run, timeout_s=limit) for run in _runs(slots)])

    def render(self, slots: Sequence[int]) -> list[np.ndarray]:
        """One picture [H, W, 3] uint8 of each slot."""
        frames = []
        for slot in slots:
            index = int(self._worker_of[slot])
            worker = self._workers[index]
            self._control(worker, {"operation": "render", "env_id": int(slot) - self._ranges[index].start})
            message, payload = worker.receive(max(self.step_timeout_s, 60.0), "render")
            frames.append(np.frombuffer(payload, np.uint8).reshape(message["shape"]))
        return frames

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """Copies of what lies in the slab for these slots (observation, action, reward), also after a fault: for a dump."""
        assert self._slab is not None, "the manager is closed"
        names = [name for name in self._slab.arrays if name.startswith("observation/") or name in ("action", "reward")]
        return {name: self._slab.arrays[name][list(slots)].copy() for name in names}

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers and let go of the memory; may be called twice. Views that were handed out stay readable."""
        self._finalizer()
        self._groups.clear()
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def __enter__(self) -> EnvManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self, setup: dict[str, object]) -> None:
        for index, slots in enumerate(self._ranges):
            self._workers.append(WorkerProcess(index, {**setup, "start": slots.start, "stop": slots.stop}))
        specs = [SimSpec.from_dict(worker.receive(self._start_timeout_s, "build its simulator")[0]["spec"]) for worker in self._workers]
        self.spec = specs[0]
        if any(spec != self.spec for spec in specs):
            raise UserError(f"The workers' simulators differ: {[spec.to_dict() for spec in specs]}.")
        layout = slab_layout(self.spec, self.num_slots, self.num_workers)
        try:
            self._slab = Slab.create(layout)
        except OSError as error:
            raise UserError(
                f"{layout.num_bytes / 2**20:.0f} MiB of shared memory cannot be had: {error}. Fewer sim.num_slots need less."
            ) from error
        for worker in self._workers:
            worker.request({"fields": dict(layout.fields), "num_bytes": layout.num_bytes})
            worker.channel.send_fd(self._slab.fd)
        for worker in self._workers:
            worker.receive(self._start_timeout_s, "map the shared memory")
        arrays = self._slab.arrays
        self._bell = Bell(arrays["manager_bell"], arrays["manager_waiting"])
        self._worker_bells = [Bell(arrays["worker_bell"][i, :1], arrays["worker_waiting"][i, :1]) for i in range(self.num_workers)]
        self._state = memory_of(arrays["slot_state"])
        self._failed = arrays["failed"]

    def _group(self, slots: range) -> _Group:
        group = self._groups.get(slots)
        if group is None:
            assert self._slab is not None, "the manager is closed"
            if not (0 <= slots.start < slots.stop <= self.num_slots):
                raise ValueError(f"Slots {slots} are not within 0 … {self.num_slots - 1}.")
            workers = dict.fromkeys(self._worker_of[slots.start : slots.stop].tolist())
            group = self._groups[slots] = _Group(slots, self._slab, [self._worker_bells[worker] for worker in workers])
        return group

    def _wait(self, ready: object, limit: float, slots: Sequence[int] | range | None) -> None:
        assert callable(ready)
        if not self._bell.wait(ready, time.perf_counter() + limit, self._check_workers):
            self._check_workers()
            marks = self._state.tobytes()
            late = [slot for slot in (slots if slots is not None else range(self.num_slots)) if marks[slot] in (PENDING, IDLE)]
            if any(marks[slot] == IDLE for slot in late):
                raise ValueError(
                    f"Slots {[slot for slot in late if marks[slot] == IDLE]} were received without having been sent an action."
                )
            worker = self._workers[int(self._worker_of[late[0]])]
            fault = worker.timed_out(limit, "step")
            fault.slots = tuple(late)
            raise fault

    def _wait_any(self, min_ready: int | None, limit: float) -> list[int]:
        marks = self._state.tobytes()
        in_flight = sum(mark != IDLE for mark in marks)
        if in_flight == 0:
            raise ValueError("recv() without any slot that was sent an action.")
        wanted = in_flight if min_ready is None else min(min_ready, in_flight)
        self._wait(
            lambda: sum(mark >= READY for mark in self._state.tobytes()) >= wanted,
            limit,
            [s for s, mark in enumerate(marks) if mark != IDLE],
        )
        return [slot for slot, mark in enumerate(self._state.tobytes()) if mark >= READY]

    def _check_workers(self) -> None:
        for worker in self._workers:
            worker.check(bool(self._failed[worker.index, 0]))

    def _drain(self) -> None:
        """Let steps in flight finish, so that a worker's next message is the answer to the next request."""
        if any(mark == PENDING for mark in self._state.tobytes()):
            self._wait(lambda: PENDING not in self._state.tobytes(), self.step_timeout_s, None)

    def _control(self, worker: WorkerProcess, message: dict[str, object]) -> None:
        assert self._slab is not None, "the manager is closed"
        worker.request(message)
        self._slab.arrays["control_pending"][worker.index, 0] = 1
        self._worker_bells[worker.index].ring()

    def _episodes(self, first: int, marks: bytes) -> tuple[EpisodeSummary, ...]:
        assert self._slab is not None
        arrays = self._slab.arrays
        ended = [first + offset for offset, mark in enumerate(marks) if mark == ENDED]
        return tuple(
            EpisodeSummary(
                slot=slot,
                index=int(arrays["episode_index"][slot]),
                seed=int(arrays["episode_seed"][slot]),
                episode_return=float(arrays["episode_return"][slot]),
                length=int(arrays["episode_length"][slot]),
                success_once=bool(arrays["episode_success_once"][slot]),
                success_at_end=bool(arrays["success"][slot]),
                terminated=bool(arrays["terminated"][slot]),
            )
            for slot in ended
        )


def _close_workers(workers: list[WorkerProcess]) -> None:
    """Let go of all first, then wait for each, so that closing takes as long as the slowest alone."""
    for worker in workers:
        worker.release()
    for worker in workers:
        worker.close()
    workers.clear()


def _runs(slots: Sequence[int] | np.ndarray | range) -> list[range]:
    """Slots, ascending, as contiguous ranges."""
    ordered = sorted(int(slot) for slot in slots)
    runs: list[range] = []
    for slot in ordered:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs


def _join(batches: list[StepBatch]) -> StepBatch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]

    def together(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name) for batch in batches])

    return StepBatch(
        **{name: together(name) for name in ("slots", "reward", "terminated", "truncated", "success")},
        observation={key: np.concatenate([batch.observation[key] for batch in batches]) for key in first.observation},
        final_observation={key: np.concatenate([batch.final_observation[key] for batch in batches]) for key in first.final_observation},
        episodes=tuple(episode for batch in batches for episode in batch.episodes),
    )


assert os.name == "posix", "embodied_rl needs Linux or macOS (on Windows: WSL 2)"
