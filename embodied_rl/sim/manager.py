"""EnvManager: many environments in worker processes, seen as slots that are sent actions and give back observations."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.sim.affinity import PlacementPolicy, place_workers
from embodied_rl.sim.batches import Slots, ViewsOfSlots, ascending
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.episode_log import EpisodeLog, Snapshot
from embodied_rl.sim.faults import FaultPolicy, FaultRecord
from embodied_rl.sim.patience import Patience
from embodied_rl.sim.process import WorkerProcess, close_all, done
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.sim.supervisor import Supervisor, read_drift
from embodied_rl.sim.transport import ABORTED, IDLE, PENDING, READY, fence
from embodied_rl.sim.worker_choice import auto_workers
from embodied_rl.sim.worker_pool import WorkerPool, WorkerPoolPlan, worker_pool_size
from embodied_rl.types import SimSpec, StepBatch

_POLL_EVERY_SENDS = 1024
_POLL_EVERY_S = 0.1


class EnvManager(Simulators):
    """`num_slots` environments over `num_workers` processes.

    Lockstep is ``step``, which is ``send`` and ``recv`` of all slots. With groups of slots the caller keeps the workers busy
    while it thinks: ``send`` one group, ``recv`` the other; or it takes whatever is ready: ``recv(min_ready=4)``. What comes back
    for a slot depends only on its seeds and actions, not on the number of workers or the order of calls.

    A worker that fails is replaced as `faults` says, while the other slots go on; `fault_records` reports what happened.

    Raises (from every call that talks to a worker):
        SimFault: a worker failed and the policy says to stop, or it fails again and again; with the worker's traceback.
        NonFiniteSimulationError: the same for NaN or infinity in an observation or reward.
        UserError: the simulator rejected its configuration, or an observation outgrew its room.
    """

    spec: SimSpec
    last_drift: dict[int, float | None]
    """{slot: largest difference between the saved observation and the replayed one} of the last `restore`; None: not replayed."""
    _pool: WorkerPool | None = None

    def __init__(
        self,
        factory: SimFactory,
        num_slots: int,
        *,
        num_workers: int | None = None,
        num_groups: int = 1,
        seeds: EpisodeSeeds | None = None,
        success_ends_episode: bool = False,
        max_episode_steps: int | None = None,
        chunk_size: int = 1,
        autoreset: bool = True,
        faults: FaultPolicy | None = None,
        placement: PlacementPolicy = "none",
        gpus: Sequence[int] = (0,),
        spare_workers: int = 0,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 180.0,
        reset_timeout_s: float | None = None,
    ) -> None:
        """Start the workers and wait for their simulators.

        Args:
            factory: how a worker builds its environments.
            num_slots: environments in all.
            num_workers: processes; None: as many as there are cores.
            num_groups: contiguous groups of slots that will be stepped in turns; each worker then has a share of each group.
            seeds: of the episodes; None: training seeds of 0.
            success_ends_episode: an episode is cut (truncated) at its first success.
            max_episode_steps: an episode is cut after so many steps.
            chunk_size: K > 1: a message holds up to K actions that the worker plays without coming back.
            autoreset: a slot whose episode ended begins the next one in the same step; False: it waits for `begin`.
            faults: what happens when a worker fails.
            placement: "none", "pack", "spread", "near_gpu" or "auto": which cores and memory each worker is bound to.
            gpus: whose node "near_gpu" and "auto" look for: those that take the observations.
            spare_workers: workers built ahead, that take a failed one's place at once.
            step_timeout_s: a worker that does nothing for so long while it should step has failed.
            start_timeout_s: the same for building and restoring.
            reset_timeout_s: the same for `reset`; None: ten times the longest seen (see `LearnedPatience`), at most start_timeout_s.
        """
        self.num_slots, self.chunk_size, self.autoreset = num_slots, chunk_size, autoreset
        self._all_slots = range(num_slots)
        self.num_workers = worker_pool_size(num_workers, num_slots)
        self._seeds, self._policy = seeds or EpisodeSeeds.training(0), faults or FaultPolicy()
        self._plan = WorkerPoolPlan(
            num_slots=num_slots,
            num_workers=self.num_workers,
            num_groups=num_groups,
            chunk_size=chunk_size,
            autoreset=autoreset,
            max_episode_steps=max_episode_steps,
            success_ends_episode=success_ends_episode,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            reset_timeout_s=reset_timeout_s,
            placements=[p.to_dict() for p in place_workers(self.num_workers, placement, gpus)] if placement != "none" else None,
            spare_workers=spare_workers,
        )
        self._processes: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, close_all, self._processes)
        self._idle_pools: dict[str, WorkerPool] = {}
        self._offloaded, self._sends, self._polled_at = False, 0, 0.0
        self._start(factory)

    @staticmethod
    def from_config(
        config: SimConfig,
        seeds: EpisodeSeeds,
        *,
        num_slots: int | None = None,
        render: bool = False,
        autoreset: bool = True,
        chunk_size: int = 1,
    ) -> EnvManager:
        """The manager a configuration describes. `render` asks simulators that must know beforehand to be able to draw.

        ``num_workers=auto`` is what was measured when a training run began, as many as there are cores where none did.
        """
        kwargs = {**config.kwargs, **({"render": True} if render else {})}
        slots = num_slots or config.num_slots
        return EnvManager(
            SimFactory(config.target, config.task, kwargs, config.extra),
            slots,
            num_workers=auto_workers(config, slots, chunk_size),
            num_groups=min(config.pipeline_groups, slots),
            seeds=seeds,
            success_ends_episode=config.success_ends_episode,
            max_episode_steps=config.max_episode_steps,
            chunk_size=chunk_size,
            autoreset=autoreset,
            faults=FaultPolicy.from_config(config),
            placement=config.placement,
            spare_workers=config.spare_workers,
            step_timeout_s=config.step_timeout_s,
            start_timeout_s=config.start_timeout_s,
            reset_timeout_s=config.reset_timeout_s,
        )

    # ---- lockstep ---------------------------------------------------------------------------------------------------

    def reset(self, seeds: EpisodeSeeds | None = None, *, seed_round: int = 0, reconfigure: bool = False) -> StepBatch:
        """Start a new episode in every slot, whatever it was doing, and count episodes from 0 again.

        Args:
            seeds: from now on; None: the manager's own.
            seed_round: selects the training seeds, so that a run goes on with different ones after each checkpoint.
            reconfigure: also forget what the simulator keeps between episodes, so that what follows depends only on the
                seeds (ManiSkill; slow there).
        """
        pool = self._live_pool()
        self._drain()
        chosen = seeds or self._seeds
        self._episode_log.begin_all(chosen, seed_round, {"reconfigure": True} if reconfigure else {})
        self._supervisor.forget_aborts()
        pool.state[:] = self._all.idle
        message = {"operation": "reset", "seeds": chosen.to_dict(), "seed_round": seed_round, "reconfigure": reconfigure}
        self._supervisor.command(dict.fromkeys(range(self.num_workers), (message, b"")), self._resets[reconfigure], "reset", done)
        return self._all.batch(None)

    def step(self, actions: np.ndarray | Sequence[str]) -> StepBatch:
        """Step all slots with actions [num_slots, A] (chunks: [num_slots, k, A]) in the simulator's units, or texts."""
        self.send(self._all_slots, actions)
        return self.recv(self._all_slots)

    # ---- asynchronous -----------------------------------------------------------------------------------------------

    def send(self, slots: Slots, actions: np.ndarray | Sequence[str]) -> None:
        """Start a step of each slot with its action; never waits for simulation.

        Args:
            slots: which; a contiguous range is the fast way.
            actions: [len(slots), A] in the simulator's units; with a chunk_size K > 1 chunks [len(slots), k, A], k ≤ K; for text
                actions one `str` each.

        Raises:
            ValueError: actions of the wrong shape, or a slot that is still stepping.
            UserError: a text that outgrows its room.
        """
        if self._offloaded or self._pool is None:
            self._live_pool()  # raises
        if not isinstance(slots, range):
            slots, actions = ascending(slots, actions)
        views = self._views.of(slots)
        if not views.may_send():
            raise ValueError(f"Slots {list(views.slots)} were sent an action and have not been received yet.")
        self._episode_log.sent(views.slots, views.put_actions(actions))
        fence()
        views.mark(PENDING)
        for doorbell in views.doorbells:
            doorbell.ring()
        self._sends += 1
        if not self._sends % _POLL_EVERY_SENDS:
            self._supervisor.poll()

    def begin(self, slots: Slots, seeds: Sequence[int] | np.ndarray) -> None:
        """Start new episodes of given seeds in these slots, whatever they were doing; never waits.

        `recv` then hands the slots out as after a step: their first observation, reward 0, nothing ended.

        Raises:
            ValueError: a slot that is still stepping.
        """
        pool = self._live_pool()
        assert pool.slab is not None, "the manager is closed"
        ordered, chosen = ascending(slots, seeds)
        views = self._views.of(ordered)
        if not views.may_send():
            raise ValueError(f"Slots {list(views.slots)} were sent an action and have not been received yet.")
        for slot, seed in zip(views.slots, chosen, strict=True):
            pool.slab.arrays["begin_seed"][slot] = int(seed)
            pool.slab.arrays["begin"][slot] = 1
            self._episode_log.begin(int(slot), int(seed))
            self._supervisor.episode_aborted(int(slot))  # whatever was to be given up there is gone
        fence()
        views.mark(PENDING)
        for doorbell in views.doorbells:
            doorbell.ring()

    def recv(self, slots: Slots | None = None, *, min_ready: int | None = None, timeout_s: float | None = None) -> StepBatch:
        """Wait for steps and hand them out.

        Args:
            slots: exactly these, all of which were sent; None: whichever are ready.
            min_ready: without `slots`, how many to wait for (default: all that were sent).
            timeout_s: wait no longer; None: as long as the workers are well (see step_timeout_s).

        Returns:
            A batch of views (a contiguous range) or copies, ascending by slot; without `slots` and after the timeout it may hold
            fewer than min_ready, or none.

        Raises:
            TimeoutError: `slots` were asked for and are not ready in time.
            ValueError: a slot that was not sent.
        """
        pool = self._live_pool()
        if slots is None:
            slots = self._wait_any(min_ready, timeout_s)
        views = self._views.of(slots)
        if not views.is_ready():
            if IDLE in (marks := views.marks()):
                idle = [int(slot) for slot, mark in zip(views.slots, marks, strict=True) if mark == IDLE]
                raise ValueError(f"Slots {idle} were received without having been sent an action.")
            deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s
            if not pool.doorbell.wait(views.is_ready, deadline, self._supervisor.poll):
                raise TimeoutError(f"Slots {list(views.slots)} were not ready within {timeout_s:g} s.")
        fence()
        marks = views.marks()
        views.mark(IDLE)
        if marks == views.all_ready:
            return views.batch(None)
        batch = views.batch(marks)
        for episode in batch.episodes:
            self._supervisor.episode_finished(episode.slot)
        for slot, mark in zip(views.slots, marks, strict=True):
            if mark == ABORTED:
                self._supervisor.episode_aborted(int(slot))
        self._episode_log.ended([int(slot) for slot, mark in zip(views.slots, marks, strict=True) if mark > READY])
        return batch

    def discard(self) -> None:
        """Let steps in flight finish and forget them; `begin`, `restore` or `reset` comes next."""
        self._drain()
        self._live_pool().state[:] = self._all.idle

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

        Returns:
            The batch of these slots: `observation` as it was saved. `last_drift` then holds how far each replayed one was off.

        Raises:
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

        Args:
            factory: of the other task.
            keep: leave the present task's workers as they are, so that switching back is immediate too.
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
    def seeds(self) -> EpisodeSeeds:
        """Of the episodes where `reset` is given none."""
        return self._seeds

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

    def close(self) -> None:
        """End the workers and let go of the memory; may be called twice. Views that were handed out stay readable."""
        self._finalizer()
        for pool in [*self._idle_pools.values(), *([self._pool] if self._pool is not None else [])]:
            pool.close()
        self._idle_pools.clear()
        self._pool = None

    def __enter__(self) -> EnvManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self, factory: SimFactory) -> None:
        try:
            pool = WorkerPool(factory, self._plan, self._processes)
            pool.begin()
            self._take_pool(pool)
        except BaseException:
            self.close()
            raise

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

    def _wait_any(self, min_ready: int | None, timeout_s: float | None) -> list[int]:
        pool = self._live_pool()
        marks = bytes(pool.state)
        in_flight = self.num_slots - marks.count(IDLE)
        if in_flight == 0:
            raise ValueError("recv() without any slot that was sent an action.")
        wanted = in_flight if min_ready is None else min(min_ready, in_flight)
        waiting = self.num_slots - in_flight
        deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s

        def enough() -> bool:
            now = bytes(pool.state)
            return self.num_slots - now.count(PENDING) - waiting >= wanted

        pool.doorbell.wait(enough, deadline, self._supervisor.poll)
        if (now := time.perf_counter()) - self._polled_at > _POLL_EVERY_S:
            self._polled_at = now
            self._supervisor.poll()  # others may be in trouble although enough are always ready
        return [slot for slot, mark in enumerate(bytes(pool.state)) if mark >= READY]

    def _drain(self) -> None:
        """Let steps in flight finish, so that a worker's next message is the answer to the next request."""
        pool = self._live_pool()
        if PENDING in bytes(pool.state):
            pool.doorbell.wait(lambda: PENDING not in bytes(pool.state), math.inf, self._supervisor.poll)
        self._supervisor.settle()


def _read_frame(message: Mapping[str, Any], payload: bytes) -> np.ndarray:
    height, width, *colours = message["shape"]
    return np.frombuffer(payload, np.uint8).reshape(height, width, *colours)


def _read_states(message: Mapping[str, Any], payload: bytes) -> list[dict[str, Any]]:
    """Of the slots that were asked for: the simulator's own state and the counters."""
    return [{"sim": state["sim"], "counters": dict(state["counters"])} for state in decode_state(payload)]


assert os.name == "posix", "embodied_rl needs Linux or macOS (on Windows: WSL 2)"
