"""Worker processes behind slots, and everything but stepping: start, close, render, snapshot, restore, and switch tasks."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.batches import Slots, ViewsOfSlots
from embodied_rl.sim.core_binding import CoreBinding, CoreLocks
from embodied_rl.sim.episode_log import EpisodeLog, Snapshot
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, FaultRecord, SimFault, SlotFault
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.sim.transport import ABORTED, ENDED, IDLE, PENDING, READY
from embodied_rl.sim.worker_choice import Setting, Trials
from embodied_rl.sim.worker_pool import Answer, Patience, WorkerPool, WorkerPoolPlan, close_pools
from embodied_rl.stopping import uncounted_s, waiting
from embodied_rl.types import SimSpec, StepBatch

# ---- the supervisor: watches the workers of a `WorkerPool`, and replaces failed ones while the others continue --------


_MEMORY_EVERY_S = 1.0
_SETTLE_NAP_S = 0.002
_COMES_S = 5.0
"""Seconds to read an answer that has begun to arrive."""
_LOOK_S = 0.5
_AT_ONCE = frozenset({FaultKind.RAISED, FaultKind.NON_FINITE, FaultKind.WRONG_SHAPE})
"""Kinds that end the run if no step ever succeeded, because such a simulator would fail again."""

Message = tuple[dict[str, Any], bytes]


class _Phase(enum.Enum):
    LIVE = enum.auto()
    PAUSED = enum.auto()
    STARTING = enum.auto()
    RESUMING = enum.auto()


@dataclass
class _Watch:
    """State of one worker as the supervisor knows it."""

    phase: _Phase = _Phase.LIVE
    deadline: float = 0.0
    """Time when the phase ends: when a pause is over, or when the worker is late."""
    progress: int = 0
    waits_since: float | None = None
    """Time when a poll first found slots waiting without progress since the poll before; None: the last one did not."""
    looked_at: float = 0.0
    failures: int = 0
    """Failures in a row without a step in between."""
    progress_at_failure: int = -1
    aborts: int = 0
    """Episodes given up since the last one finished."""
    open_faults: list[FaultRecord] = field(default_factory=list)
    noticed_at: float = 0.0
    items: list[dict[str, Any]] = field(default_factory=list)
    back_at: int = -1
    """Progress of the worker when it came back from a fault."""

    def is_cautious(self, progress: int) -> bool:
        """Whether the worker has not finished a step since it came back."""
        return progress == self.back_at


class Supervisor:
    """Watches the workers of one `WorkerPool`: deadlines, deaths, restarts and fault records. `poll` never waits for a simulator."""

    def __init__(self, pool: WorkerPool, policy: FaultPolicy, episode_log: EpisodeLog, records: list[FaultRecord]) -> None:
        """`records`: receives one for each fault, once the worker is back."""
        self.pool, self.policy, self.episode_log, self.records = pool, policy, episode_log, records
        self._watches = [_Watch() for _ in pool.workers]
        self._to_abort: set[int] = set()
        self._strikes: dict[int, tuple[int, int]] = {}
        self._memory_at = time.perf_counter()

    # ---- called by the manager --------------------------------------------------------------------------------------

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced, those that are not back yet included."""
        return len(self.records) + sum(len(watch.open_faults) for watch in self._watches)

    def poll(self) -> None:
        """Check every worker once. Raises SimFault if the policy ends the run, and UserError as the simulator does."""
        now = time.perf_counter()
        check_memory = self.policy.memory_limit_mb is not None and now - self._memory_at > _MEMORY_EVERY_S
        if check_memory:
            self._memory_at = now
        for index, watch in enumerate(self._watches):
            try:
                if watch.phase is _Phase.LIVE:
                    self._watch(index, watch, now, check_memory)
                else:
                    self._advance(index, watch, now)
            except SimFault as fault:
                self._on_fault(index, fault)

    def catch_up(self) -> None:
        """Process the messages of workers that are being replaced."""
        if self.pool.workers and any(watch.phase is not _Phase.LIVE for watch in self._watches):
            self.poll()

    def settle(self) -> None:
        """Wait until every worker is live. Raises as `poll`."""
        while any(watch.phase is not _Phase.LIVE for watch in self._watches):
            self.poll()
            with waiting:
                time.sleep(_SETTLE_NAP_S)

    def command(
        self, messages: Mapping[int, Message], patience: Patience, doing: str, read: Callable[[dict[str, Any], bytes], Answer]
    ) -> dict[int, Answer]:
        """Send a request to some workers and collect the answers; a worker that fails is replaced and gets the request again.

        `read` decodes an answer; an exception in it counts as a failure of the worker.

        Raises SimFault if the policy ends the run, and UserError if a worker refuses (after all have answered).
        """
        unasked, refusal = dict(messages), None
        answers: dict[int, Answer] = {}
        while unasked:
            self.settle()
            asked: dict[int, float] = {}
            for index in list(unasked):
                try:
                    self._request(index, *unasked[index])
                    asked[index] = time.perf_counter()
                except SimFault as fault:
                    self._on_fault(index, fault)
            while asked:
                index, is_late = self._next_to_answer(asked, patience.limit_s())
                begun = asked.pop(index)
                try:
                    if is_late:
                        raise self.pool.workers[index].timed_out(patience.limit_s(), doing)
                    answers[index] = self.pool.workers[index].receive(_COMES_S, doing, read)
                    patience.took(time.perf_counter() - begun)
                except UserError as error:
                    refusal = refusal or error
                except SimFault as fault:
                    self._on_fault(index, fault)
                    continue
                del unasked[index]
        if refusal is not None:
            raise refusal
        return answers

    def _next_to_answer(self, asked: Mapping[int, float], limit_s: float) -> tuple[int, bool]:
        """(worker, whether it is late): the next of {worker: time of its request} with an answer to read, or the first that is late."""
        workers = {self.pool.workers[index].channel.socket: index for index in asked}
        first, looked = min(asked, key=asked.__getitem__), time.perf_counter()
        while True:
            before, looked = looked, time.perf_counter()
            limit_s += uncounted_s(looked - before, limit_s)
            left = asked[first] + limit_s - looked
            with waiting:
                ready = wait(workers, min(max(left, 0.0), _LOOK_S))
            if ready:
                return next(index for connection, index in workers.items() if connection is ready[0]), False
            if left <= 0:
                return first, True

    def forget_aborts(self) -> None:
        """Forget pending aborts, because all slots begin new episodes."""
        self._to_abort.clear()
        self._strikes.clear()

    def episode_finished(self, slot: int) -> None:
        self._watches[int(self.pool.worker_of[slot])].aborts = 0
        self._strikes.pop(slot, None)

    def episode_aborted(self, slot: int) -> None:
        self._to_abort.discard(slot)
        self._strikes.pop(slot, None)

    def revive_all(self) -> None:
        """Start the workers again after they were ended on purpose, and resume every slot's episode."""
        for watch in self._watches:
            watch.phase, watch.open_faults, watch.noticed_at = _Phase.STARTING, [], time.perf_counter()
            watch.deadline = time.perf_counter() + self.pool.plan.start_timeout_s
        self.settle()

    # ---- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, index: int, watch: _Watch, now: float, check_memory: bool) -> None:
        worker, arrays = self.pool.workers[index], self.pool.slab.arrays
        worker.check(bool(arrays["failed"][index, 0]))
        state, limit_s = self.pool.state, self.pool.plan.step_timeout_s
        progress = self._progress(index)
        if progress != watch.progress or all(state[slot] != PENDING for slot in self.pool.slots_of[index]):
            watch.progress, watch.waits_since = progress, None
        elif watch.waits_since is None:  # the poll before may be long ago: the caller does other things between two steps
            watch.waits_since = now
        else:
            watch.waits_since += uncounted_s(now - watch.looked_at, limit_s)
            if now - watch.waits_since > limit_s:
                raise worker.timed_out(limit_s, "step")
        watch.looked_at = now
        limit = self.policy.memory_limit_mb
        if check_memory and limit is not None and (used := worker.resident_mb()) > limit:
            raise SimFault(FaultKind.OUT_OF_MEMORY, index, f"{used:.0f} MB resident; the limit is {limit:.0f} MB.")

    def _advance(self, index: int, watch: _Watch, now: float) -> None:
        """Move a worker that is being replaced to its next stage, if it is ready."""
        worker = self.pool.workers[index]
        timeout = self.pool.plan.start_timeout_s
        if watch.phase is _Phase.PAUSED:
            if now >= watch.deadline:
                self.pool.replace(index)
                watch.phase, watch.deadline = _Phase.STARTING, now + timeout
            return
        if not worker.channel.has_message():
            if not worker.alive():
                worker.check(failed=False)
            if now > watch.deadline:
                raise worker.timed_out(timeout, "come back")
            return
        if watch.phase is _Phase.STARTING:
            spec = self.pool.receive_spec(index)
            if spec != self.pool.spec:
                raise UserError(f"Worker {index} came back with another simulator: {spec.to_dict()} instead of {self.pool.spec.to_dict()}.")
            watch.items = self._resume_items(index)
            self.pool.share(index, encode_state(watch.items))
            watch.phase, watch.deadline = _Phase.RESUMING, now + timeout
        else:
            self._is_back(index, watch, worker.receive(timeout, "take up its episodes", read_drift), now)

    def _is_back(self, index: int, watch: _Watch, drift: Mapping[int, float | None], now: float) -> None:
        watch.phase, watch.waits_since, watch.progress = _Phase.LIVE, None, self._progress(index)
        watch.back_at = watch.progress if watch.open_faults else -1
        slots = tuple(
            SlotFault(
                slot=item["slot"],
                episode=item["index"],
                seed=self.episode_log.streams[item["slot"]].seed(item["index"]),
                step=len(item["actions"]),
                outcome="aborted" if item["abort"] else "restored",
                drift=drift.get(item["slot"]),
            )
            for item in watch.items
        )
        for record in watch.open_faults:
            self.records.append(dataclasses.replace(record, slots=slots, recovery_s=now - watch.noticed_at))
        watch.open_faults, watch.items = [], []
        self.pool.doorbells[index].ring()  # its slots may have received actions meanwhile
        self.pool.refill_spares()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _on_fault(self, index: int, fault: SimFault) -> None:
        """Record a fault, decide what happens to the slots, and schedule the replacement. Raises `fault` if the run must end."""
        watch, worker = self._watches[index], self.pool.workers[index]
        if fault.kind in self.policy.stop_on:
            raise fault
        arrays = self.pool.slab.arrays
        progress = self._progress(index)
        if not arrays["progress"][:, 0].any() and fault.kind in _AT_ONCE:
            raise fault
        watch.failures = 1 if progress != watch.progress_at_failure else watch.failures + 1
        watch.progress_at_failure = progress
        if watch.failures > self.policy.max_restarts:
            note = f"It failed {watch.failures} times in a row; the run ends here (max_restarts={self.policy.max_restarts})."
            fault.detail = f"{note}\n{fault.detail}"
            raise fault
        culprits = self._culprits(index, fault)
        self._judge(index, culprits)
        if watch.aborts > self.policy.max_restarts:
            fault.detail = f"It gave up {watch.aborts} episodes and finished none; the run ends here.\n{fault.detail}"
            raise fault
        record = FaultRecord(fault.kind, index, worker.pid, fault.detail, tuple(culprits), (), watch.failures, 0.0)
        if not watch.open_faults:
            watch.noticed_at = time.perf_counter()
        watch.open_faults.append(record)
        self.pool.remove(index)
        watch.phase, watch.deadline = _Phase.PAUSED, time.perf_counter() + self.policy.pause_s(watch.failures)

    def _culprits(self, index: int, fault: SimFault) -> list[int]:
        """Slots that the worker was stepping: the one that it marked, those that it reports, or all pending ones.

        A worker that is being replaced, or in its first step afterwards, marks every slot before it touches it. If it dies without a mark,
        it was stepping none, and no episode is to blame.
        """
        slots, watch = self.pool.slots_of[index], self._watches[index]
        single = int(self.pool.slab.arrays["stepping"][index, 0])
        if single >= 0:
            return [single]
        if waiting := [slot for slot in fault.slots if slot in slots]:
            return waiting
        waits = watch.phase is not _Phase.LIVE
        if waits or (watch.is_cautious(self._progress(index)) and not self.pool.spec.steps_together):
            return []
        return [slot for slot in slots if self.pool.state[slot] == PENDING]

    def _judge(self, index: int, culprits: list[int]) -> None:
        """Decide which episodes to give up: those that failed at the same point before, and those that cannot be restored."""
        watch, together = self._watches[index], self.pool.spec.steps_together
        doomed = set()
        for slot in culprits:
            point = self.episode_log.point(slot)
            if len(culprits) == 1 and self._strikes.get(slot) == point:
                doomed.add(slot)
            self._strikes[slot] = point
        for slot in self.pool.slots_of[index]:
            over = self.pool.state[slot] in (ENDED, ABORTED)
            begun = self.pool.state[slot] == READY or self.episode_log.point(slot)[1] > (self.pool.state[slot] == PENDING)
            if not over and (self.episode_log.is_lost(slot) or together or (self.policy.recovery == "restart" and begun)):
                doomed.add(slot)
        watch.aborts += bool(doomed & set(culprits))
        self._to_abort |= doomed
        self.pool.slab.arrays["stepping"][index, 0] = -1

    def _resume_items(self, index: int) -> list[dict[str, Any]]:
        faulty = bool(self._watches[index].open_faults)
        begin, items = self.pool.slab.arrays["begin"], []
        for slot in self.pool.slots_of[index]:
            mark = self.pool.state[slot]
            assert mark in (IDLE, PENDING, READY, ENDED, ABORTED)
            num_actions = self.episode_log.point(slot)[1]
            abort = slot in self._to_abort and mark not in (ENDED, ABORTED)
            if mark == PENDING and (abort or not self.episode_log.is_lost(slot)):
                # A request without an action begins an episode; a worker that died in the middle of it may have cleared `begin` already.
                begin[slot] = not (abort or num_actions)
            # Without autoreset, a slot that waits for its next episode shows the end of the last one.
            waits = not self.pool.plan.autoreset and (mark == ENDED or not num_actions)
            seen = None if mark == PENDING or waits else self.pool.observation(slot)
            items.append(self.episode_log.resume_item(slot, mark, seen, abort=abort, cautious=faulty))
        return items

    def _request(self, index: int, message: dict[str, Any], payload: bytes = b"") -> None:
        # Set before the message, because the worker reads a message that exceeds the socket's buffer only once this is set.
        self.pool.slab.arrays["control_pending"][index, 0] = 1
        self.pool.doorbells[index].ring()
        self.pool.workers[index].request(message, payload)

    def _progress(self, index: int) -> int:
        """Batches of slots that this worker index has stepped; a replacement continues the count."""
        return int(self.pool.slab.arrays["progress"][index, 0])


def read_drift(message: Mapping[str, Any], payload: bytes) -> dict[int, float | None]:
    """Decode the answer to "resume": {slot: difference between its observation and the one seen before}."""
    return {int(slot): None if drift is None else float(drift) for slot, drift in message["drift"].items()}


class WorkerSimulators(Simulators):
    """Everything that `EnvManager` does with its workers except stepping; `EnvManager` documents what each call raises."""

    spec: SimSpec
    last_drift: dict[int, float | None]
    """{slot: largest difference between the saved and the replayed observation} of the last `restore`; None: not replayed."""
    _pool: WorkerPool | None = None

    def __init__(self, factory: SimFactory, plan: WorkerPoolPlan, faults: FaultPolicy) -> None:
        """Start the workers that `plan` describes, and wait for their simulators."""
        self.num_slots, self.num_workers = plan.num_slots, plan.num_workers
        self.chunk_size, self.autoreset = plan.chunk_size, plan.autoreset
        self._plan, self._policy = plan, faults
        self._pools: dict[str, WorkerPool] = {}
        """{key of its factory: pool}, the present one's and those of `prepare`."""
        weakref.finalize(self, close_pools, self._pools)
        self._records: list[FaultRecord] = []
        self._offloaded = False
        self.core_binding: CoreBinding | None = None
        """Binding that may keep the workers on their own cores as long as no other program wants these."""
        self.trials: Trials | None = None
        cores = {core for placement in plan.placements or () for core in placement.cores}
        self._core_locks = CoreLocks.take(sorted(cores)) if cores else None
        """Locks that keep other runs from binding their workers to the same cores."""
        try:
            self.prepare(factory)
            self._take_pool(factory)
        except BaseException:
            self.close()
            raise

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and release the memory; may be called twice. Views that were handed out stay readable."""
        if self.trials is not None:
            self.trials.end()
            self.trials = None
        for held in (self.core_binding, self._core_locks):
            if held is not None:
                held.release()
        close_pools(self._pools)
        self._pool = None

    # ---- how slots are stepped ----------------------------------------------------------------------------------------

    def step_as(self, setting: Setting, *, for_good: bool = False) -> None:
        """Step slots as `setting` says from the next rollout on, with the present workers. `for_good`: the setting is final."""
        self.num_turns = setting.num_turns
        if self.core_binding is None:
            return
        if setting.bound:
            self.core_binding.bind(self.worker_pids())
        elif not for_good:
            self.core_binding.unbind()
        else:
            self.core_binding.release()
            self.core_binding = None

    def try_settings(self, trials: Trials) -> None:
        """Let the next rollouts try settings until the fastest is known."""
        self.trials = trials
        self.step_as(trials.setting)

    def rollout_took(self, seconds: float, num_steps: int) -> None:
        if self.trials is None:
            return
        if self.core_binding is not None and self.core_binding.released:  # other programs take time, so the measurement is worthless
            self.step_as(dataclasses.replace(self.trials.leader, bound=False), for_good=True)
            self.trials = None
            return
        self.trials.took(seconds, num_steps)
        self.step_as(self.trials.setting, for_good=self.trials.decided)
        if self.trials.decided:
            self.trials = None

    def _take_pool(self, factory: SimFactory) -> None:
        pool = self._pools[factory.key]
        if not pool.has_slab:
            try:
                pool.finish()
            except BaseException:
                self._pools.pop(factory.key).close()
                raise
        self._pool, self.spec = pool, pool.spec
        self._episode_log = EpisodeLog(self.num_slots, keep_actions=self.spec.snapshots != "none")
        self._supervisor = Supervisor(pool, self._policy, self._episode_log, self._records)
        fixed_s = self._plan.reset_timeout_s
        self._resets = [
            Patience(self._plan.start_timeout_s, self.num_workers, pool.built_s) if fixed_s is None else Patience(fixed_s) for _ in range(2)
        ]
        """Timeouts of plain resets and of those that reconfigure."""
        self.last_drift = {}
        self._views = ViewsOfSlots(pool, self.num_slots, self.chunk_size)
        self._all = self._views.of(range(self.num_slots))

    def _live_pool(self) -> WorkerPool:
        assert self._pool is not None, "the manager is closed"
        if self._offloaded:
            raise RuntimeError("The manager is offloaded: call onload() first.")
        return self._pool

    def _drain(self) -> None:
        """Let steps in flight finish, so that a worker's next message answers the next request."""
        pool = self._live_pool()
        if PENDING in bytes(pool.state):
            pool.doorbell.wait(lambda: PENDING not in bytes(pool.state), math.inf, self._supervisor.poll)
        self._supervisor.settle()

    def render(self, slots: Sequence[int]) -> list[np.ndarray]:
        """One picture [H, W, 3] uint8 of each slot, drawn by the workers in parallel. Raises UserError if the simulator cannot draw."""
        pool = self._live_pool()
        self._drain()
        frames: dict[int, np.ndarray] = {}
        while left := [int(slot) for slot in slots if int(slot) not in frames]:
            turn = {int(pool.worker_of[slot]): slot for slot in reversed(left)}  # the first slot of each worker
            frames |= self._ask("render", list(turn.values()), max(self._plan.step_timeout_s, 60.0))
        return [frames[int(slot)] for slot in slots]

    # ---- snapshots and offload --------------------------------------------------------------------------------------

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """Save the running episodes of these slots. Steps in flight finish first and stay ready to be received.

        Raises UserError if the simulator cannot save episodes (`spec.snapshots`).
        """
        pool = self._live_pool()
        if self.spec.snapshots == "none":
            raise SnapshotError(f"Episodes of task '{self.spec.task}' cannot be saved and restored (its spec says snapshots='none').")
        self._drain()
        chosen = [int(slot) for slot in slots]
        if self.spec.snapshots in ("exact", "approximate"):
            for slot, state in self._ask("snapshot", chosen, self._plan.start_timeout_s).items():
                if pool.state[slot] <= READY:  # else the next episode has just begun; its seed is enough
                    base = {"sim": state["sim"], "counters": state["counters"], "observation": pool.observation(slot)}
                    self._episode_log.rebase(slot, base)
        elif lost := [slot for slot in chosen if self._episode_log.is_lost(slot)]:
            raise SnapshotError(f"The episodes of slots {lost} are too long to be saved as actions from their seed.")
        return [
            self._episode_log.snapshot(slot, pool.state[slot], pool.observation(slot), self.spec.task, self.chunk_size) for slot in chosen
        ]

    def restore(self, slots: Slots, snapshots: Sequence[Snapshot]) -> StepBatch:
        """Resume saved episodes in these slots, whatever the slots were doing; the seeds of later episodes are restored too.

        Returns the slots' batch with the saved `observation`. `last_drift` then tells how far each replayed one was off. Raises
        SnapshotError: a snapshot of another task or chunk size.
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
            self._supervisor.episode_aborted(int(slot))  # an abort that was pending for this slot is void
        requests = {index: ({"operation": "resume"}, encode_state(own)) for index, own in items.items()}
        answers = self._supervisor.command(requests, Patience(self._plan.start_timeout_s), "restore episodes", read_drift)
        self.last_drift = {slot: drift for drifts in answers.values() for slot, drift in drifts.items()}
        views = self._views.of([int(slot) for slot in slots])
        views.mark(IDLE)  # a step that was ready belonged to the previous episode
        views.clear_outcome()
        return views.batch(None)

    def offload(self) -> int:
        """Save every slot's episode and end all processes, those of `prepare` too, to free their memory; returns the bytes kept instead.

        Batches that were received or are ready stay. `onload` restores the rest. Raises UserError as `snapshot`.
        """
        kept = sum(len(snapshot.to_bytes()) for snapshot in self.snapshot(range(self.num_slots)))
        for key in self._pools.keys() - {self._live_pool().factory.key}:
            self._pools.pop(key).close()
        self._live_pool().stop()
        self._offloaded = True
        return kept

    def onload(self) -> None:
        """Start the processes again and resume every episode."""
        if self._offloaded:
            assert self._pool is not None, "the manager is closed"
            self._offloaded = False
            self._pool.begin()
            self._supervisor.revive_all()

    def _ask(self, operation: str, slots: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """{slot: what its worker answers}, from all workers in parallel."""
        wanted: dict[int, list[int]] = {}
        for slot in dict.fromkeys(map(int, slots)):
            wanted.setdefault(int(self._live_pool().worker_of[slot]), []).append(slot)
        requests = {index: ({"operation": operation, "slots": own}, b"") for index, own in wanted.items()}

        def read(message: dict[str, Any], payload: bytes) -> dict[int, Any]:
            return dict(zip(message["slots"], decode_state(payload), strict=True))

        answers = self._supervisor.command(requests, Patience(timeout_s), operation, read)
        return {slot: value for own in answers.values() for slot, value in own.items()}

    # ---- warm pool --------------------------------------------------------------------------------------------------

    def prepare(self, factory: SimFactory) -> None:
        """Build workers of another task or scene in the background, for `switch`."""
        if (key := factory.key) in self._pools:
            return
        self._pools[key] = WorkerPool(factory, self._plan)
        try:
            self._pools[key].begin()
        except BaseException:
            self._pools.pop(key).close()
            raise

    def switch(self, factory: SimFactory, *, keep: bool = False) -> None:
        """Change to another task, at once if `prepare` was called early enough. Call `reset` next.

        `keep`: leave the present task's workers running, so that switching back is immediate too.

        Raises SimFault or UserError if the other task cannot be built; the present one then stays.
        """
        present = self._live_pool().factory.key
        if factory.key == present:
            return
        self._drain()
        self.prepare(factory)
        self._take_pool(factory)
        if not keep:
            self._pools.pop(present).close()

    # ---- what happened ----------------------------------------------------------------------------------------------

    @property
    def fault_records(self) -> list[FaultRecord]:
        """All faults so far, oldest first; a fault appears once its worker is back."""
        self._supervisor.catch_up()
        return self._records

    @property
    def num_restarts(self) -> int:
        """Number of workers that were replaced."""
        return self._supervisor.restarts

    def placement_report(self) -> list[dict[str, Any]]:
        """Cores and memory nodes that each worker reports; empty entries if none were requested."""
        return list(self._live_pool().applied)

    def peek(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """Copies of the slab's observation, action and reward for these slots; works after a fault too, for a dump."""
        assert self._pool is not None, "the manager is closed"
        arrays = self._pool.slab.arrays
        names = [name for name in arrays if name.startswith("observation/") or name in ("action", "reward")]
        return {name: arrays[name][list(slots)].copy() for name in names}

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._live_pool().workers]


assert os.name == "posix", "embodied_rl needs Linux or macOS (on Windows: WSL 2)"
