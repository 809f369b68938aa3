"""Starts, watches and ends worker processes: one, with timeouts for its answers, and all of a simulator with the memory that they share."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled, can_be_read
from embodied_rl.distributed.processes import Output, start_module
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import Placement, available_cores, thread_variables
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, NonFiniteSimulationError, SimFault
from embodied_rl.sim.transport import MANAGER_YIELDS, Doorbell, Slab, observation_buffers, slab_layout
from embodied_rl.stopping import waiting
from embodied_rl.types import SimSpec

Answer = TypeVar("Answer")

# ---- one process ------------------------------------------------------------------------------------------------------


_OUTPUT_TAIL_BYTES, _OUTPUT_BYTES = 6000, 2**20
"""Bytes of a fault's output, and those beyond which earlier output is dropped: what simulators print over days must not fill the disk."""
_SEND_TIMEOUT_S = 30.0
_STACK_S = 1.0
"""Seconds that a hanging worker has to write its stack."""
_STACK_ENDS = (b" in _run_module_as_main\n", b"\n  ...\n")
"""Endings of a complete stack: the outermost call of ``python -m``, or the marker of a shortened one."""
_READY_S = 60.0
"""Seconds that a keeper has to start its worker, on a busy machine."""
_KEEPER_S = 10.0
"""Seconds that a keeper has to end a worker and its descendants."""
_REAP_S = 10.0
"""Seconds that a process with a closed socket has to end, on a busy machine; its status tells why it ended."""


class WorkerProcess:
    """One ``embodied_rl.sim.worker`` with its socket, its output and the means to end it.

    The process is a fresh interpreter, never a fork of ours: simulators hold threads, locks and graphics contexts. Its own process group
    keeps Ctrl-C to the manager. The worker and all its descendants die with the manager, even after a SIGKILL, because its keeper
    (`embodied_rl.sim.keeper`), our child, stands between the two.
    """

    def __init__(self, index: int, setup: dict[str, Any], threads: int = 1, module: str = "embodied_rl.sim.worker") -> None:
        """Call `main` of `module`, with its ends of the socket and of the pipe that closes with us in ``sys.argv``."""
        self.index = index
        self.num_envs: list[int] = setup["num_envs"]
        self._output = Output()
        self._pid: int | None = None
        self._reads_pid = threading.Lock()
        # Some simulators iterate over sets of strings; without a fixed hash seed each process would play another episode for a seed.
        environment = {**thread_variables(threads), "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ours.callback(self._output.file.close)
            connection, other_end = socket.socketpair()
            theirs.callback(other_end.close)
            ours.callback(connection.close)
            life_read, self._life_write = os.pipe()
            theirs.callback(os.close, life_read)
            ours.callback(os.close, self._life_write)
            self._ready, ready_write = os.pipe()
            theirs.callback(os.close, ready_write)
            ours.callback(os.close, self._ready)
            handed = (other_end.fileno(), life_read, ready_write)
            keeper = ("embodied_rl.sim.keeper", module, os.getpid(), *handed)
            self._process = start_module(*keeper, pass_fds=handed, environment=environment, output=self._output.file)
            ours.pop_all()  # they live as long as the process
        self.channel = Channel(connection, asks=True)
        # A process that died before it read this is found dead when its first message is awaited.
        with contextlib.suppress(ChannelClosed):
            self.channel.ask({**setup, "sys_path": sys.path})

    @property
    def pid(self) -> int:
        """Id of the process that runs the simulator; the keeper's id if the keeper ended or stalled before it started that process."""
        with self._reads_pid:  # a service's watcher asks too; only one of the two would find it, or read what has the number after `close`
            if self._pid is None:
                answer = os.read(self._ready, 32) if can_be_read(self._ready, timeout_s=_READY_S) else b""
                self._pid = int(answer or self._process.pid)
            return self._pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: dict[str, Any], payload: bytes = b"", *, fds: Sequence[int] = ()) -> None:
        """Send a message and descriptors. Raises SimFault if the worker is gone or accepts nothing for half a minute."""
        self._output.cut(_OUTPUT_BYTES, _OUTPUT_TAIL_BYTES)
        try:
            self.channel.ask(message, payload, fds=fds, timeout_s=_SEND_TIMEOUT_S)
        except ChannelClosed:
            raise self._death() from None

    def receive(self, timeout_s: float, doing: str, read: Callable[[dict[str, Any], bytes], Answer]) -> Answer:
        """Receive the answer to the last request, decoded by `read`. Raises SimFault: the worker failed, died, was too slow at `doing`, or
        sent no valid answer; UserError: the worker refuses."""
        try:
            with waiting:
                message, payload = self.channel.next_answer(timeout_s)
            if (kind := message.get("kind")) in ("user_error", "fault"):
                raise self._reported(message)
            if kind != "done":
                raise ChannelGarbled(f"a message of kind {kind!r:.40}")
        except ChannelClosed:
            raise self._death() from None
        except TimeoutError:
            raise self.timed_out(timeout_s, doing) from None
        except ChannelGarbled as error:
            raise self._garbled(str(error), doing) from None
        try:
            return read(message, payload)
        except Exception as error:  # whatever `read` raises, this is not the expected answer
            raise self._garbled(f"{type(error).__name__}: {error}", doing) from None

    def check(self, failed: bool) -> None:
        """Raise the worker's failure, if there is one; `failed` is its own flag in shared memory."""
        self._output.cut(_OUTPUT_BYTES, _OUTPUT_TAIL_BYTES)
        if failed:
            self.receive(5.0, "report a failure", no_answer)
        if not self.alive():
            # Its last message may still be in the socket.
            try:
                self.receive(0.5, "report its end", no_answer)
            except SimFault as fault:
                if fault.kind is not FaultKind.GARBLED:
                    raise
            raise self._death()

    def timed_out(self, timeout_s: float, doing: str) -> SimFault:
        """Fault of a live worker that does not answer, with the place where it hangs."""
        if self.alive() and hasattr(signal, "SIGUSR1"):
            before, until = self._output.size(), time.monotonic() + _STACK_S
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            # The stack is written call by call, so the first read may be incomplete.
            while not self._output.read(before).endswith(_STACK_ENDS) and time.monotonic() < until:
                time.sleep(0.005)
        return self._fault(FaultKind.TIMED_OUT, f"No answer within {timeout_s:.4g} s while it should {doing}.")

    def release(self) -> None:
        """Tell the process that the manager has let go: it ends within about a second, whatever it is doing."""
        if self._life_write >= 0:
            # Send a byte as well as close the pipe: a process forked from ours since then keeps our end open.
            with contextlib.suppress(OSError):
                os.write(self._life_write, b"x")
            os.close(self._life_write)
            self._life_write = -1

    def end_at_once(self) -> None:
        """SIGKILL the process; its keeper kills the descendants. Does not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once and wait until it is gone, after which it cannot write to shared memory."""
        self.end_at_once()
        try:
            self._process.wait(_KEEPER_S)
        except subprocess.TimeoutExpired:  # the keeper was stopped, and the worker dies with it
            self._process.kill()
            self._process.wait()
        self.close()

    def resident_mb(self) -> float:
        """Resident memory in MB (2**20 bytes); 0 if unknown."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self, grace_s: float = 2.0) -> None:
        """End the process gracefully, else by SIGKILL. May be called twice."""
        self.release()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._ready >= 0:
            worker = self.pid
            os.close(self._ready)
            self._ready = -1
            if self._process.returncode < 0 and worker != self._process.pid:  # the keeper was killed: kill what is left of its group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker, signal.SIGKILL)
        self.channel.close()
        self._output.file.close()

    def _reported(self, message: Mapping[str, Any]) -> UserError | SimFault:
        """Failure that a worker reports. Raises ChannelGarbled if the message is not a failure."""
        try:
            if message["kind"] == "user_error":
                return UserError(str(message["message"]))
            kind = FaultKind[message["fault"]]
            error = NonFiniteSimulationError if kind is FaultKind.NON_FINITE else SimFault
            where = {key: [int(number) for number in message[key]] for key in ("slots", "seeds", "steps") if key in message}
            return error(kind, self.index, str(message["detail"]), **where)
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelGarbled(f"a failure report without content ({error!r})") from None

    def _garbled(self, what: str, doing: str) -> SimFault:
        return self._fault(FaultKind.GARBLED, f"While it should {doing}, it sent {what[:400]}.")

    def _death(self) -> SimFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        code = self._process.returncode
        number = 0 if code is None else -code if code < 0 else code - 128  # signal that ended the keeper or the worker
        how = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit status {code}"
        if code is None:
            how = f"closed its connection, and still ran {_REAP_S:g} s later"
        return self._fault(FaultKind.DIED, how)

    def _fault(self, kind: FaultKind, what: str) -> SimFault:
        """Fault with the end of the worker's output."""
        return SimFault(kind, self.index, f"{what}\n{self._output.read(self._output.size() - _OUTPUT_TAIL_BYTES).decode(errors='replace')}")


def no_answer(message: Mapping[str, Any], payload: bytes) -> None:
    """Reader for a request that only a failure can answer. Raises ValueError."""
    raise ValueError("an answer to a request that was answered")


def done(message: Mapping[str, Any], payload: bytes) -> None:
    """Reader for an answer without content."""


# ---- how long an answer may take --------------------------------------------------------------------------------------


_FACTOR = 10.0
"""Factor of a reset's timeout over the longest reset so far, or before the first over the build time: machines and seeds differ."""
_FLOOR_S = 20.0
_FIRST_FLOOR_S = 60.0
"""Shortest timeout in seconds until every worker has reset once: a first reset may build a scene, and one worker may build it for all."""


class Patience:
    """Timeout for answers: `longest_s`. With `built_s`, the seconds that building the simulators took, it is learned from earlier answers:
    ten times the longest (before the first: of `built_s`), at least 20 s (60 s until each of `num_workers` has answered), at most
    `longest_s`."""

    def __init__(self, longest_s: float, num_workers: int = 0, built_s: float | None = None) -> None:
        self._most_s, self._num_workers, self._built_s = longest_s, num_workers, built_s
        self._seen, self._longest_s = 0, 0.0

    def limit_s(self) -> float:
        """Seconds after a request when its answer is late."""
        if self._built_s is None:
            return self._most_s
        floor = _FLOOR_S if self._seen >= self._num_workers else _FIRST_FLOOR_S
        return min(self._most_s, max(floor, _FACTOR * (self._longest_s if self._seen else self._built_s)))

    def took(self, seconds: float) -> None:
        """Record that an answer took `seconds`."""
        self._seen, self._longest_s = self._seen + 1, max(self._longest_s, seconds)


# ---- all workers of one simulator ------------------------------------------------------------------------------------


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
    """Starts and replaces workers. `begin` starts the processes, which build their simulators in parallel; `finish` waits for them."""

    def __init__(self, factory: SimFactory, plan: WorkerPoolPlan) -> None:
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

    def begin(self) -> None:
        """Start all workers; does not wait."""
        self._begun = time.perf_counter()
        for index in range(self.plan.num_workers):
            self.workers.append(self._spawn(index))  # one by one: those that have started are closed if another cannot

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
        self._layout = slab_layout(self.spec, self.plan.num_slots, self.plan.num_workers, self.plan.chunk_size)
        self.slab = Slab(self._layout)
        self.has_slab, arrays = True, self.slab.arrays
        arrays["stepping"][:] = -1
        self.state = arrays["slot_state"][: self.plan.num_slots].data
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
        worker = self.workers[index]
        names = ("num_slots", "chunk_size", "autoreset", "max_episode_steps", "success_ends_episode")
        assignment = {
            **{name: vars(self.plan)[name] for name in names},
            # Not computed there: a worker's equal spec may list its parts in another order, and a later worker may have newer code.
            "layout": self._layout,
            "worker": index,
            "runs": [[run.start, run.stop] for run in self.runs[index]],
            "spins": self._spins,
            "placement": self._placement(index) if worker in self._were_spares else None,
        }
        worker.request(assignment, episodes, fds=[self.slab.fd])

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
        for name in ("worker_waiting", "control_pending", "failed"):
            self.slab.arrays[name][index] = 0

    def refill_spares(self) -> None:
        """Start spares up to the planned number."""
        for spare in [spare for spare in self.spares if not spare.alive()]:
            self.spares.remove(spare)
            spare.close()
        while len(self.spares) < self.plan.spare_workers:
            self.spares.append(self._spawn(0, spare=True))

    def release(self) -> None:
        """Tell all processes that the manager has let go, so that closing them takes as long as the slowest one."""
        for worker in (*self.workers, *self.spares):
            worker.release()

    def stop(self) -> None:
        """End all processes and keep the slab."""
        self.release()
        for worker in (*self.workers, *self.spares):
            worker.close()
        self.workers, self.spares = [], []

    def close(self) -> None:
        """End all processes and release the memory."""
        self.stop()
        if self.has_slab:
            self.slab.close()

    def observation(self, slot: int) -> dict[str, Any]:
        """Copy of a slot's observation, parts of varying size included."""
        rows = {key: self.slab.arrays[f"observation/{key}"][slot].copy() for key in self.spec.tensors}
        buffers = observation_buffers("observation", self.spec, self.slab.arrays)
        return rows | {key: buffer.read(slot) for key, buffer in buffers.items()}

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
        return WorkerProcess(index, setup)


def _read_spec(message: Mapping[str, Any], payload: bytes) -> tuple[SimSpec, dict[str, Any], list[str]]:
    return SimSpec.from_dict(message["spec"]), dict(message["placement"]), [str(text) for text in message["warnings"]]


def close_pools(pools: dict[str, WorkerPool]) -> None:
    """End the processes of all pools at the same time, and release their memory; empties the dictionary."""
    for pool in pools.values():
        pool.release()
    for pool in pools.values():
        pool.close()
    pools.clear()


def split_slots(slots: range, parts: int) -> list[range]:
    """Contiguous parts with sizes as equal as possible; some are empty if there are more parts than slots."""
    bounds = [slots.start + round(part * len(slots) / parts) for part in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
