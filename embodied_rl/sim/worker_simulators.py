"""Worker processes behind slots, and what is done with them beside stepping: started and closed, drawn, saved and taken up, exchanged."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from embodied_rl.sim.batches import Slots, ViewsOfSlots
from embodied_rl.sim.episode_log import EpisodeLog, Snapshot
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultPolicy, FaultRecord
from embodied_rl.sim.process import Patience, WorkerProcess, close_all
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.sim.supervisor import Supervisor, read_drift
from embodied_rl.sim.transport import IDLE, PENDING, READY
from embodied_rl.sim.worker_pool import WorkerPool, WorkerPoolPlan
from embodied_rl.types import SimSpec, StepBatch


class WorkerSimulators(Simulators):
    """What `EnvManager` does with its workers beside stepping; see there for what every call raises."""

    spec: SimSpec
    last_drift: dict[int, float | None]
    """{slot: largest difference between the saved observation and the replayed one} of the last `restore`; None: not replayed."""
    _pool: WorkerPool | None = None

    def __init__(self, factory: SimFactory, plan: WorkerPoolPlan, faults: FaultPolicy) -> None:
        """Start the workers that `plan` describes, and wait for their simulators."""
        self.num_slots, self.num_workers = plan.num_slots, plan.num_workers
        self.chunk_size, self.autoreset = plan.chunk_size, plan.autoreset
        self._plan, self._policy = plan, faults
        self._processes: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, close_all, self._processes)
        self._idle_pools: dict[str, WorkerPool] = {}
        self._offloaded = False
        try:
            pool = WorkerPool(factory, plan, self._processes)
            pool.begin()
            self._take_pool(pool)
        except BaseException:
            self.close()
            raise

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and let go of the memory; may be called twice. Views that were handed out stay readable."""
        self._finalizer()
        for pool in [*self._idle_pools.values(), *([self._pool] if self._pool is not None else [])]:
            pool.close()
        self._idle_pools.clear()
        self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_pool(self, pool: WorkerPool) -> None:
        if pool.slab is None:
            pool.finish()
        self._pool, self.spec = pool, pool.spec
        self._episode_log = EpisodeLog(self.num_slots, keep_actions=self.spec.snapshots != "none")
        self._supervisor = Supervisor(pool, self._policy, self._episode_log)
        self._resets = {reconfigure: self._plan.reset_patience(pool.built_s) for reconfigure in (False, True)}
        self.last_drift = {}
        self._views = ViewsOfSlots(pool, self.num_slots, self.chunk_size)
        self._all = self._views.of(range(self.num_slots))

    def _live_pool(self) -> WorkerPool:
        assert self._pool is not None, "the manager is closed"
        if self._offloaded:
            raise RuntimeError("The manager is offloaded: call onload() first.")
        return self._pool

    def _drain(self) -> None:
        """Let steps in flight finish, so that a worker's next message is the answer to the next request."""
        pool = self._live_pool()
        if PENDING in bytes(pool.state):
            pool.doorbell.wait(lambda: PENDING not in bytes(pool.state), math.inf, self._supervisor.poll)
        self._supervisor.settle()

    def render(self, slots: Sequence[int]) -> list[np.ndarray]:
        """One picture [H, W, 3] uint8 of each slot. Raises UserError where the simulator cannot draw."""
        pool = self._live_pool()
        frames = []
        for slot in slots:
            index = int(pool.worker_of[slot])
            request = {"operation": "render", "slot": int(slot)}
            patience = Patience(max(self._plan.step_timeout_s, 60.0))
            frames.append(self._supervisor.command({index: (request, b"")}, patience, "render", _read_frame)[index])
        return frames

    # ---- snapshots and offload --------------------------------------------------------------------------------------

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """Save the running episodes of these slots; steps in flight finish first (and stay ready to be received).

        Raises UserError where the simulator's episodes cannot be saved (`spec.snapshots`).
        """
        pool = self._live_pool()
        self._require_snapshots()
        self._drain()
        chosen = [int(slot) for slot in slots]
        if self.spec.snapshots in ("exact", "approximate"):
            self._rebase(chosen)
        elif lost := [slot for slot in chosen if self._episode_log.is_lost(slot)]:
            raise SnapshotError(f"The episodes of slots {lost} are too long to be saved as actions from their seed.")
        return [
            self._episode_log.snapshot(slot, pool.state[slot], pool.observation(slot), self.spec.task, self.chunk_size) for slot in chosen
        ]

    def restore(self, slots: Slots, snapshots: Sequence[Snapshot]) -> StepBatch:
        """Take up saved episodes in these slots, whatever they were doing; their seeds, and those of later episodes, come along.

        Returns the batch of these slots: `observation` as it was saved. `last_drift` then holds how far each replayed one was off.
        Raises SnapshotError: a snapshot of another task or chunk size.
        """
        pool = self._live_pool()
        self._drain()
        items: dict[int, list[dict[str, Any]]] = {}
        for slot, snapshot in zip(slots, snapshots, strict=True):
            if (snapshot.task, snapshot.chunk_size) != (self.spec.task, self.chunk_size):
                raise SnapshotError(
                    f"A snapshot of task '{snapshot.task}' with chunk_size {snapshot.chunk_size} does not fit this manager's "
                    f"'{self.spec.task}' with chunk_size {self.chunk_size}."
                )
            self._episode_log.load(int(slot), snapshot)
            item = self._episode_log.resume_item(int(slot), IDLE, snapshot.observation, abort=False, cautious=False)
            items.setdefault(int(pool.worker_of[slot]), []).append({**item, "publish": True})
            self._supervisor.episode_aborted(int(slot))  # whatever was to be given up there is gone
        requests = {index: ({"operation": "resume"}, encode_state(own)) for index, own in items.items()}
        answers = self._supervisor.command(requests, Patience(self._plan.start_timeout_s), "restore episodes", read_drift)
        self.last_drift = {slot: drift for drifts in answers.values() for slot, drift in drifts.items()}
        views = self._views.of([int(slot) for slot in slots])
        views.mark(IDLE)  # a step that was ready belonged to what the slot did before
        views.clear_outcome()
        return views.batch(None)

    def offload(self) -> int:
        """Save every slot's episode and end the processes, so that their memory is free; returns the bytes that are kept instead.

        What was received, or is ready to be, stays; `onload` brings the rest back. Raises UserError as `snapshot`.
        """
        kept = sum(len(snapshot.to_bytes()) for snapshot in self.snapshot(range(self.num_slots)))
        self._live_pool().stop()
        self._offloaded = True
        return kept

    def onload(self) -> None:
        """Start the processes again and take up every episode where it was."""
        if self._offloaded:
            assert self._pool is not None, "the manager is closed"
            self._offloaded = False
            self._pool.begin()
            self._supervisor.revive_all()

    def _rebase(self, slots: Sequence[int]) -> None:
        pool = self._live_pool()
        wanted: dict[int, list[int]] = {}
        for slot in slots:
            wanted.setdefault(int(pool.worker_of[slot]), []).append(slot)
        requests = {index: ({"operation": "snapshot", "slots": own}, b"") for index, own in wanted.items()}
        answers = self._supervisor.command(requests, Patience(self._plan.start_timeout_s), "save its state", _read_states)
        for index, own in wanted.items():
            for slot, state in zip(own, answers[index], strict=True):
                if pool.state[slot] > READY:
                    continue  # the next episode has just begun, and its seed says all
                self._episode_log.rebase(slot, {**state, "observation": pool.observation(slot)})

    def _require_snapshots(self) -> None:
        if self.spec.snapshots == "none":
            raise SnapshotError(f"Episodes of task '{self.spec.task}' cannot be saved and taken up again (its spec says snapshots='none').")

    # ---- warm pool --------------------------------------------------------------------------------------------------

    def prepare(self, factory: SimFactory) -> None:
        """Start to build the workers of another task or scene in the background; `switch` then takes them."""
        if (key := factory.key) not in self._idle_pools:
            self._idle_pools[key] = WorkerPool(factory, self._plan, self._processes)
            self._idle_pools[key].begin()

    def switch(self, factory: SimFactory, *, keep: bool = False) -> None:
        """Go over to another task: at once where `prepare` was called in time. `reset` comes next.

        `keep`: leave the present task's workers as they are, so that switching back is immediate too.
        """
        pool = self._live_pool()
        if factory.key == pool.factory.key:
            return
        self._drain()
        self.prepare(factory)
        replacement = self._idle_pools.pop(factory.key)
        if keep:
            self._idle_pools[pool.factory.key] = pool
        else:
            pool.close()
        self._take_pool(replacement)

    # ---- what happened ----------------------------------------------------------------------------------------------

    @property
    def fault_records(self) -> list[FaultRecord]:
        """All faults so far, oldest first; one that is being recovered from comes when its worker is back."""
        self._supervisor.catch_up()
        return self._supervisor.records

    @property
    def num_restarts(self) -> int:
        """Workers that were replaced."""
        return self._supervisor.restarts

    def placement_report(self) -> list[dict[str, Any]]:
        """For each worker what it read back about its cores and memory nodes; empty entries where none were asked for."""
        return list(self._live_pool().applied)

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """Copies of what lies in the slab for these slots (observation, action, reward), also after a fault: for a dump."""
        assert self._pool is not None, "the manager is closed"
        assert self._pool.slab is not None, "the manager is closed"
        arrays = self._pool.slab.arrays
        names = [name for name in arrays if name.startswith("observation/") or name in ("action", "reward")]
        return {name: arrays[name][list(slots)].copy() for name in names}

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._live_pool().workers]


def _read_frame(message: Mapping[str, Any], payload: bytes) -> np.ndarray:
    height, width, *colours = message["shape"]
    return np.frombuffer(payload, np.uint8).reshape(height, width, *colours)


def _read_states(message: Mapping[str, Any], payload: bytes) -> list[dict[str, Any]]:
    """Of the slots that were asked for: the simulator's own state and the counters."""
    return [{"sim": state["sim"], "counters": dict(state["counters"])} for state in decode_state(payload)]


assert os.name == "posix", "embodied_rl needs Linux or macOS (on Windows: WSL 2)"
