"""Worker processes of one simulator, and the memory that they share with their manager."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import Placement, available_cores
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.process import WorkerProcess, done
from embodied_rl.sim.transport import MANAGER_YIELDS, Doorbell, Slab, VariableLengthBuffers, memory_of, slab_layout
from embodied_rl.types import SimSpec, VariableSpec


@dataclass(frozen=True)
class WorkerPoolPlan:
    """How many workers, with which slots, on which cores, and with which timeouts."""

    num_slots: int
    num_workers: int
    num_groups: int = 1
    """Contiguous groups of slots, of which each worker has a share: while one group waits for actions, all workers step another."""
    chunk_size: int = 1
    autoreset: bool = True
    max_episode_steps: int | None = None
    success_ends_episode: bool = False
    step_timeout_s: float = 60.0
    start_timeout_s: float = 180.0
    reset_timeout_s: float | None = None
    """Seconds for a reset; None: learned from earlier resets."""
    placements: Sequence[Placement] | None = None
    """Place of each worker; None: the scheduler chooses the cores."""
    spare_workers: int = 0
    """Workers built ahead, so that replacing a failed one does not wait for a build."""

    def __post_init__(self) -> None:
        """Raises ValueError for a count below 1."""
        for name in ("num_slots", "num_workers", "num_groups", "chunk_size", "max_episode_steps"):
            if (count := vars(self)[name]) is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")

    @property
    def runs(self) -> list[list[range]]:
        """Slots of each worker: one contiguous run per group, with sizes as equal as possible."""
        runs: list[list[range]] = [[] for _ in range(self.num_workers)]
        load = [0] * self.num_workers
        for group in split_slots(range(self.num_slots), self.num_groups):
            least = sorted(range(self.num_workers), key=lambda worker: (load[worker], worker))
            share, more = divmod(len(group), self.num_workers)  # the workers with the fewest slots get one more
            first = group.start
            for worker in range(self.num_workers):
                size = share + (worker in least[:more])
                if size:
                    runs[worker].append(range(first, first + size))
                first, load[worker] = first + size, load[worker] + size
        return runs


def worker_pool_size(num_workers: int | None, num_slots: int) -> int:
    """Number of processes: as requested, or one per core, and at most one per slot. Warns if there are more than cores."""
    if isinstance(num_workers, str):
        raise UserError(f"EnvManager needs a number of workers, or None for one per core, got {num_workers!r}.")
    cores = available_cores()
    size = min(cores if num_workers is None else num_workers, num_slots)
    if size > cores:
        warnings.warn(
            f"num_workers={size} is more than the {cores} cores this process may use; workers will wait for each other.", stacklevel=3
        )
    return size


class WorkerPool:
    """Starts and replaces workers. `begin` starts the processes, which build their simulators in parallel; `finish` waits for them.

    `processes` lists every running process; the owner, `EnvManager`, closes them.
    """

    def __init__(self, factory: SimFactory, plan: WorkerPoolPlan, processes: list[WorkerProcess]) -> None:
        self.factory, self.plan = factory, plan
        self.runs = plan.runs
        self.slots_of = [[slot for run in runs for slot in run] for runs in self.runs]
        self.worker_of = np.zeros(plan.num_slots, np.int64)
        for worker, slots in enumerate(self.slots_of):
            self.worker_of[slots] = worker
        self.workers: list[WorkerProcess] = []
        self.spares: list[WorkerProcess] = []
        self._were_spares = WeakSet[WorkerProcess]()
        self.applied: list[dict[str, Any]] = [{} for _ in self.runs]
        """Cores and memory that each worker reports."""
        self._said: set[str] = set()
        """Warnings of simulators that were passed on already."""
        self.built_s = 0.0
        """Seconds from the start of the processes until all had built their simulators."""
        self._spins = plan.num_workers < available_cores()
        """Whether each waiting process, the manager included, can have its own core."""
        self.has_slab = False
        self.slab: Slab
        self.spec: SimSpec
        self._processes = processes

    def begin(self) -> None:
        """Start all workers; does not wait."""
        self._begun = time.perf_counter()
        self.workers = [self._spawn(index) for index in range(self.plan.num_workers)]

    def finish(self) -> None:
        """Wait until all workers have built their simulators, and share the memory with them. Raises SimFault: a worker failed to build;
        UserError: the simulator rejects its configuration, or shared memory is too small."""
        specs = [self.receive_spec(index) for index in range(len(self.workers))]
        self.built_s = time.perf_counter() - self._begun
        self.spec = specs[0]
        if any(spec != self.spec for spec in specs):
            raise UserError(f"The workers' simulators differ: {[spec.to_dict() for spec in specs]}.")
        if self.spec.action.kind == "text" and self.plan.chunk_size > 1:
            raise UserError(f"Task '{self.spec.task}' takes text, which has no chunks: chunk_size must be 1, got {self.plan.chunk_size}.")
        layout = slab_layout(self.spec, self.plan.num_slots, self.plan.num_workers, self.plan.chunk_size)
        try:
            self.slab = Slab.create(layout)
        except OSError as error:
            raise UserError(
                f"{layout.num_bytes / 2**20:.0f} MiB of shared memory cannot be had: {error}. Fewer sim.num_slots need less."
            ) from error
        self.has_slab, arrays = True, self.slab.arrays
        arrays["stepping"][:] = -1
        self.state = memory_of(arrays["slot_state"][: self.plan.num_slots])
        self.doorbell = Doorbell(arrays["manager_doorbell"], arrays["manager_waiting"], MANAGER_YIELDS, spins=self._spins)
        self.doorbells = [Doorbell(arrays["worker_doorbell"][i, :1], arrays["worker_waiting"][i, :1]) for i in range(self.plan.num_workers)]
        for index in range(len(self.workers)):
            self.share(index)
        for worker in self.workers:
            worker.receive(self.plan.start_timeout_s, "map the shared memory", done)
        self.refill_spares()

    def receive_spec(self, index: int) -> SimSpec:
        """Receive a worker's first message, and pass on warnings from building its simulator, each text once.

        Raises SimFault or UserError.
        """
        spec, applied, said = self.workers[index].receive(self.plan.start_timeout_s, "build its simulator", _read_spec)
        self.applied[index] = applied
        problems = applied.get("problems")
        if problems and index == 0:
            warnings.warn(f"Placement of the simulators: {'; '.join(map(str, problems))}.", stacklevel=2)
        for text in said:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(text, stacklevel=2)
        return spec

    def share(self, index: int, episodes: bytes = b"") -> None:
        """Send a worker the slab, its slots and the `episodes` to resume before it steps; it answers once it has."""
        plan, worker = self.plan, self.workers[index]
        assignment = {
            "worker": index,
            "runs": [[run.start, run.stop] for run in self.runs[index]],
            "num_slots": plan.num_slots,
            "max_episode_steps": plan.max_episode_steps,
            "success_ends_episode": plan.success_ends_episode,
            "chunk_size": plan.chunk_size,
            "autoreset": plan.autoreset,
            "spins": self._spins,
            "placement": self._placement(index) if worker in self._were_spares else None,
        }
        layout = self.slab.layout
        worker.request(
            {"fields": dict(layout.fields), "num_bytes": layout.num_bytes, "assignment": assignment}, episodes, fds=[self.slab.fd]
        )

    def replace(self, index: int) -> None:
        """Replace a worker that is gone, by a spare if there is one, whose simulator is built or being built."""
        sizes = [len(run) for run in self.runs[index]]
        for spare in self.spares:
            if spare.num_envs == sizes and spare.alive():
                self.spares.remove(spare)
                self._were_spares.add(spare)
                spare.index = index
                self.workers[index] = spare
                return
        self.workers[index] = self._spawn(index)

    def remove(self, index: int) -> None:
        """End a failed worker, which then writes nothing more, and clear its words in the slab."""
        self.workers[index].kill()
        self._forget(self.workers[index])
        for name in ("worker_waiting", "control_pending", "failed"):
            self.slab.arrays[name][index] = 0

    def refill_spares(self) -> None:
        """Start spares up to the planned number."""
        for spare in [spare for spare in self.spares if not spare.alive()]:
            self.spares.remove(spare)
            self._forget(spare)
        while len(self.spares) < self.plan.spare_workers:
            self.spares.append(self._spawn(0, spare=True))

    def stop(self) -> None:
        """End all processes and keep the slab."""
        own = [*self.workers, *self.spares]
        for worker in own:
            worker.release()
        for worker in own:
            self._forget(worker)
        self.workers, self.spares = [], []

    def close(self) -> None:
        """End all processes and release the memory."""
        self.stop()
        if self.has_slab:
            self.slab.close()

    def observation(self, slot: int) -> dict[str, Any]:
        """Copy of a slot's observation, parts of varying size included."""
        rows = {key: self.slab.arrays[f"observation/{key}"][slot].copy() for key in self.spec.tensors}
        return rows | {key: self.slab.buffers(f"observation/{key}", buffer).read(slot) for key, buffer in self.spec.variables.items()}

    def action_buffers(self) -> VariableLengthBuffers:
        return self.slab.buffers("action", VariableSpec("text", self.spec.action.max_bytes))

    def _forget(self, worker: WorkerProcess) -> None:
        """End a worker that was released or is dead, and close its files."""
        worker.close()
        if worker in self._processes:
            self._processes.remove(worker)

    def _placement(self, index: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """(cores, memory nodes) of a worker."""
        return None if self.plan.placements is None else (self.plan.placements[index].cores, self.plan.placements[index].memory_nodes)

    def _spawn(self, index: int, *, spare: bool = False) -> WorkerProcess:
        """Start a process. A spare moves to its cores once it has its index."""
        setup = {
            "factory": dataclasses.asdict(self.factory),
            "num_envs": [len(run) for run in self.runs[index]],
            "placement": None if spare else self._placement(index),
        }
        worker = WorkerProcess(index, setup)
        self._processes.append(worker)
        return worker


def _read_spec(message: Mapping[str, Any], payload: bytes) -> tuple[SimSpec, dict[str, Any], list[str]]:
    return SimSpec.from_dict(message["spec"]), dict(message["placement"]), [str(text) for text in message["warnings"]]


def split_slots(slots: range, parts: int) -> list[range]:
    """Contiguous parts with sizes as equal as possible; some are empty if there are more parts than slots."""
    bounds = [slots.start + round(part * len(slots) / parts) for part in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
