"""EnvManager: many environments in worker processes, seen as slots that take actions and return observations."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.sim.affinity import PlacementPolicy, place_workers
from embodied_rl.sim.batches import Slots, SlotViews, ascending
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultPolicy
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.transport import ABORTED, IDLE, PENDING, READY, fence
from embodied_rl.sim.worker_choice import auto_workers
from embodied_rl.sim.worker_pool import WorkerPoolPlan, done, worker_pool_size
from embodied_rl.sim.worker_simulators import WorkerSimulators
from embodied_rl.types import StepBatch

_POLL_EVERY_SENDS = 1024
_LOOK_EVERY_SENDS = 16
_POLL_EVERY_S = 0.1


class EnvManager(WorkerSimulators):
    """`num_slots` environments over `num_workers` processes.

    Lockstep is ``step``: ``send`` and ``recv`` of all slots. With groups of slots the caller keeps the workers busy while it
    thinks: ``send`` one group, ``recv`` the other. Or it takes the slots that are ready: ``recv(min_ready=4)``. A slot's results
    depend only on its seeds and actions, not on the number of workers or the order of calls.

    A failed worker is replaced as `faults` says, while the other slots continue; `fault_records` reports it. `WorkerSimulators` holds
    everything beside stepping: pictures, snapshots, offload, another task.

    Raises (from every call that talks to a worker):
        SimFault: a worker failed and the policy says to stop, or it keeps failing; with the worker's traceback.
        NonFiniteSimulationError: the same for NaN or infinity in an observation or reward.
        UserError: the simulator rejected its configuration, or an observation is larger than its buffer.
    """

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
            num_workers: number of processes; None: one per core.
            num_groups: contiguous groups of slots that are stepped in turns; each worker has a share of each group.
            seeds: seeds of the episodes; None: training seeds of 0.
            success_ends_episode: cut (truncate) an episode at its first success.
            max_episode_steps: cut an episode after this many steps.
            chunk_size: K > 1: a message holds up to K actions, which the worker plays in one go.
            autoreset: a slot whose episode ended begins the next one in the same step; False: it waits for `begin`.
            placement: "none", "pack", "spread", "near_gpu" or "auto": the cores and memory that each worker is bound to.
            gpus: GPUs that take the observations; "near_gpu" and "auto" place workers on their node.
            spare_workers: workers built ahead, each ready to replace a failed one at once.
            step_timeout_s: a worker that makes no progress in a step for this long has failed.
            start_timeout_s: the same for building and restoring.
            reset_timeout_s: the same for `reset`; None: ten times the longest seen (see `Patience`), at most start_timeout_s.
        """
        workers = worker_pool_size(num_workers, num_slots)
        plan = WorkerPoolPlan(
            num_slots=num_slots,
            num_workers=workers,
            num_groups=num_groups,
            chunk_size=chunk_size,
            autoreset=autoreset,
            max_episode_steps=max_episode_steps,
            success_ends_episode=success_ends_episode,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            reset_timeout_s=reset_timeout_s,
            placements=place_workers(workers, placement, gpus) if placement != "none" else None,
            spare_workers=spare_workers,
        )
        self.seeds = seeds or EpisodeSeeds.training(0)
        """Seeds of the episodes if `reset` gets none."""
        self._all_slots, self._sends, self._polled_at = range(num_slots), 0, 0.0
        super().__init__(factory, plan, faults or FaultPolicy())

    @staticmethod
    def from_config(
        config: SimConfig,
        seeds: EpisodeSeeds,
        *,
        num_slots: int | None = None,
        autoreset: bool = True,
        chunk_size: int = 1,
    ) -> EnvManager:
        """Build the manager that a configuration describes.
        ``num_workers=auto`` takes the number that a training run measured at its start, else one per core."""
        slots = num_slots or config.num_slots
        return EnvManager(
            SimFactory(config.target, config.task, config.kwargs, config.extra),
            slots,
            num_workers=auto_workers(config, slots, chunk_size),
            num_groups=min(config.num_groups, slots),
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
        """Abort the episodes of all slots, start new ones, and count episodes from 0 again.

        Args:
            seeds: seeds from now on; None: the manager's own.
            seed_round: selects the training seeds, so that a run continues with different ones after each checkpoint.
            reconfigure: also clear what the simulator keeps between episodes, so that all depends only on the seeds (ManiSkill; slow).
        """
        pool = self._live_pool()
        self._drain()
        chosen = seeds or self.seeds
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

    def send(self, slots: Slots, actions: np.ndarray | Sequence[str], watched: Sequence[bool] | None = None) -> None:
        """Start a step of each slot with its action; never waits for simulation.

        Args:
            slots: slots to step; a contiguous range is fastest.
            actions: [len(slots), A] in the simulator's units; with a chunk_size K > 1 chunks [len(slots), k, A], k ≤ K; for text
                actions one `str` each.
            watched: for each slot, whether every step of its chunk is observed (`StepBatch.inner`); None: no slot. Single steps always are.

        Raises ValueError: actions of the wrong shape, or a slot whose last step was not received; UserError: a text exceeds its buffer.
        """
        if self._offloaded or self._pool is None:
            self._live_pool()  # raises
        if not isinstance(slots, range):
            _, watched = ascending(slots, watched) if watched is not None else (None, None)
            slots, actions = ascending(slots, actions)
        views = self._views.of(slots)
        if views.marks() != views.idle:
            raise _not_received(views)
        self._episode_log.sent(views.slots, views.put_actions(actions, watched))
        views.start()
        self._sends += 1
        if not self._sends % _POLL_EVERY_SENDS:
            self._supervisor.poll()
        if self.core_binding is not None and not self._sends % _LOOK_EVERY_SENDS:
            self.core_binding.look(self.worker_pids())

    def begin(self, slots: Slots, seeds: Sequence[int] | np.ndarray) -> None:
        """Start new episodes with the given seeds in these slots, and drop the running ones; never waits. `recv` then returns the slots as
        after a step, with the first observation, reward 0 and no end. Raises ValueError: a slot that is still stepping."""
        pool = self._live_pool()
        ordered, chosen = ascending(slots, seeds)
        views = self._views.of(ordered)
        if PENDING in views.marks():
            raise _not_received(views)
        for slot, seed in zip(views.slots, chosen, strict=True):
            pool.slab.arrays["begin_seed"][slot] = int(seed)
            pool.slab.arrays["begin"][slot] = 1
            self._episode_log.begin(int(slot), int(seed))
            self._supervisor.episode_aborted(int(slot))  # an abort that was pending there is void
        views.start()

    def recv(self, slots: Slots | None = None, *, min_ready: int | None = None, timeout_s: float | None = None) -> StepBatch:
        """Wait for steps and return them.

        Args:
            slots: exactly these slots, all of which were sent; None: the slots that are ready.
            min_ready: without `slots`, number to wait for; None: all that were sent.
            timeout_s: longest wait; None: as long as the workers are well (see step_timeout_s).

        Returns:
            A batch of views (a contiguous range) or copies, ascending by slot; without `slots` and after the timeout it may hold
            fewer than min_ready, or none.

        Raises TimeoutError: the requested `slots` are not ready in time; ValueError: a slot that was not sent.
        """
        pool = self._live_pool()
        if slots is None:
            slots = self._wait_any(min_ready, timeout_s)
        views = self._views.of(slots)
        if not views.is_ready():
            if IDLE in (marks := views.marks()):
                idle = [int(slot) for slot, mark in zip(views.slots, marks, strict=True) if mark == IDLE]
                raise ValueError(f"Slots {idle} were not sent an action, so they cannot be received.")
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

    def is_ready(self, slots: range) -> bool:
        return self._views.of(slots).is_ready()

    def discard(self) -> None:
        self._drain()
        self._live_pool().state[:] = self._all.idle

    def _wait_any(self, min_ready: int | None, timeout_s: float | None) -> list[int]:
        pool = self._live_pool()
        marks = bytes(pool.state)
        in_flight = self.num_slots - marks.count(IDLE)
        if in_flight == 0:
            raise ValueError("recv() needs a slot that was sent an action.")
        wanted = in_flight if min_ready is None else min(min_ready, in_flight)
        waiting = self.num_slots - in_flight
        deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s

        def enough() -> bool:
            now = bytes(pool.state)
            return self.num_slots - now.count(PENDING) - waiting >= wanted

        pool.doorbell.wait(enough, deadline, self._supervisor.poll)
        if (now := time.perf_counter()) - self._polled_at > _POLL_EVERY_S:
            self._polled_at = now
            self._supervisor.poll()  # other workers may have failed while enough slots stay ready
        return [slot for slot, mark in enumerate(bytes(pool.state)) if mark >= READY]


def _not_received(views: SlotViews) -> ValueError:
    return ValueError(f"Slots {list(views.slots)} were sent an action and have not been received yet.")
