"""The simulators of one manager, or one token backend, as several hosts. Some hosts are lent to training and come back; episodes and
answers move between them.

A *slot* here is the collector's: it keeps its number while its episode moves between the manager's slots.

```
 collector's slot ──▶ episode ──▶ host ──▶ manager's slot        waiting: its host is yet to be found, or
                                                                 parked: taken from a lent host; its next action is held
```
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.distributed.channel import can_be_read
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.token_process import TokenProcess, TokensElsewhere
from embodied_rl.rollout.migration import PartialAnswer, SimHost, TokenHost
from embodied_rl.sim.batches import Slots, rows_of
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import Observation, StepBatch

Key = tuple[int, int]
"""Key of an episode: (slot, number of the episode)."""
Sent = tuple[np.ndarray, bool]
"""(action, whether its chunk is observed step by step)"""
_NAP_S = 0.002


class MultiplexedSimulators(Simulators):
    """Slots of an `EnvManager` whose episodes move between hosts."""

    def __init__(self, manager: Simulators, lease: DeviceLease) -> None:
        """`manager`: manager whose workers each belong to one host; `lease`: lease of the run's hosts.
        Raises UserError: the simulator's episodes cannot be moved, or there are not enough slots or workers."""
        if manager.spec.steps_together:
            raise UserError(
                f"hybrid.placement=multiplexed moves single episodes, but episodes of task '{manager.spec.task}' step together. Nearest "
                "valid choice: hybrid.placement=disaggregated."
            )
        if min(manager.num_slots, manager.num_workers) < (hosts := lease.plan.num_hosts):
            slots = f"sim.num_slots={hosts} " if manager.num_slots < hosts else ""
            raise UserError(
                f"hybrid.placement=multiplexed has {hosts} hosts, each with its own simulators, but there are {manager.num_workers} "
                f"workers with {manager.num_slots} slots. Nearest valid choice: {slots}sim.num_workers={hosts}."
            )
        self.manager, self.lease = manager, lease
        parts = [[slot for worker in workers for slot in worker] for workers in _dealt(manager, lease.plan.num_hosts)]
        self._hosts = [SimHost(manager, part) for part in parts]
        self._host_of = {slot: number for number, part in enumerate(parts) for slot in part}
        self._multiplexer = lease.share(self._hosts)
        self.spec, self.num_slots, self.chunk_size, self.autoreset = manager.spec, manager.num_slots, manager.chunk_size, manager.autoreset
        self._episodes: dict[int, Key] = {}
        """Key of each slot's episode; with ``autoreset``, of all its episodes until the next `reset`."""
        self._num_begun = 0
        self._waiting: deque[tuple[Key, int]] = deque()
        """Episodes with their seeds that no host has begun yet."""
        self._held: dict[Key, Sent] = {}
        """Actions of parked episodes."""

    @property
    def fault_records(self) -> list[FaultRecord]:
        """See `EnvManager.fault_records`; the slots are the manager's."""
        return self.manager.fault_records

    def reset(self, seeds: EpisodeSeeds | None = None, *, seed_round: int = 0, reconfigure: bool = False) -> StepBatch:
        """See `EnvManager.reset`; all hosts play. Slots get the seeds that they have in the manager."""
        self.discard()
        for slot, host in sorted(self._host_of.items()):
            key = self._named(slot)
            assert self._hosts[host].adopt(key) == slot, "hosts have their slots in order"
            self._multiplexer.started(key, host)
        return self.manager.reset(seeds, seed_round=seed_round, reconfigure=reconfigure)

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """See `EnvManager.snapshot`; no episode may be parked."""
        keys = [self._episodes[slot] for slot in slots]
        hosts = [self._multiplexer.host_of(key) for key in keys]
        return self.manager.snapshot([self._hosts[host].slot_of(key) for host, key in zip(hosts, keys, strict=True) if host is not None])

    def room(self) -> int:
        """See `Simulators.room`: free slots of hosts that are not lent."""
        self._settle()
        return self._multiplexer.num_free

    def restore(self, slots: Slots, snapshots: Sequence[Snapshot]) -> StepBatch:
        """See `EnvManager.restore`; accepts no more slots than there is `room` for."""
        placed: dict[int, int] = {}
        for slot in slots:
            self.release(slot)
            number = self._multiplexer.room()
            assert number is not None, "there is room"
            key = self._named(slot)
            placed[self._hosts[number].adopt(key)] = slot
            self._multiplexer.started(key, number)
        batch = self.manager.restore(list(placed), snapshots)
        self.last_drift = {slot: self.manager.last_drift[own] for own, slot in placed.items()}
        self.lease.note()
        return _renamed(batch, np.asarray([placed[own] for own in batch.slots.tolist()], np.int64))

    def hosts_of(self, slots: np.ndarray) -> np.ndarray:
        """[n] host numbers of the slots' episodes; for parked ones, any host that is not lent."""
        active, found = self._multiplexer.active, [self._multiplexer.host_of(self._episodes[slot]) for slot in slots.tolist()]
        return np.array([active[place % len(active)] if host is None else host for place, host in enumerate(found)])

    def begin(self, slots: Slots, seeds: Sequence[int] | np.ndarray) -> None:
        """See `EnvManager.begin`; an episode without a free slot begins when there is one."""
        for slot, seed in zip(slots, seeds, strict=True):
            self.release(slot)
            self._waiting.append((self._named(slot), int(seed)))
        self._settle()

    def send(self, slots: Slots, actions: np.ndarray | Sequence[str], watched: Sequence[bool] | None = None) -> None:
        """See `EnvManager.send`; a parked episode gets its action when a host has room for it."""
        playing: dict[int, Sent] = {}
        for slot, action, shown in zip(slots, actions, watched or [False] * len(slots), strict=True):
            key = self._episodes[slot]
            number = self._multiplexer.host_of(key)
            if number is None:
                self._held[key] = np.array(action), shown
            else:
                playing[self._hosts[number].sending([key])[0]] = np.asarray(action), shown
        self._send(playing)

    def recv(self, slots: Slots | None = None, *, min_ready: int | None = None, timeout_s: float | None = None) -> StepBatch:
        """See `EnvManager.recv`; returns any ready slots. While all sent actions are parked, the batch is empty."""
        self._settle()  # hosts may have come back since
        if not any(host.num_in_flight for host in self._hosts):
            time.sleep(min(_NAP_S, timeout_s or _NAP_S))
            return _empty(self.manager)
        batch = self.manager.recv(min_ready=min_ready, timeout_s=timeout_s)
        keys: list[Key] = []
        for slot in batch.slots.tolist():
            (key,) = self._hosts[self._host_of[slot]].received([slot])
            keys.append(key)  # type: ignore[arg-type]  # this class gives no other keys
        given = _renamed(batch, np.asarray([slot for slot, _ in keys], np.int64))
        over = batch.done if batch.aborted is None else batch.done | batch.aborted
        for key, is_over in zip(keys, over.tolist(), strict=True):
            if is_over and not self.autoreset:
                self.release(key[0])
        self._settle()
        return given

    def release(self, slot: int) -> None:
        """Drop the slot's episode; no step of it may be in flight."""
        key = self._episodes.pop(slot, None)
        if key is None:
            return
        unbegun = [entry for entry in self._waiting if entry[0] == key]
        if unbegun:
            self._waiting.remove(unbegun[0])
            return
        self._held.pop(key, None)
        number = self._multiplexer.host_of(key)
        if number is not None:
            self._hosts[number].end(key)
        self._multiplexer.give_up(key)
        self._multiplexer.settle()

    def discard(self) -> None:
        self.manager.discard()
        self._held.clear()
        episodes, self._episodes = list(self._episodes.values()), {}
        unbegun = {key for key, _ in self._waiting}
        self._waiting.clear()
        for host in self._hosts:
            host.discard()
        for key in episodes:
            if key not in unbegun:
                self._multiplexer.give_up(key)
        self.lease.note()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _named(self, slot: int) -> Key:
        """Key of the episode that begins in a slot."""
        self._num_begun += 1
        self._episodes[slot] = (slot, self._num_begun)
        return self._episodes[slot]

    def _settle(self) -> None:
        """Move episodes that can be moved, send held actions to those that have a slot again, and begin waiting ones."""
        self._multiplexer.settle()
        due: dict[int, Sent] = {}
        for host in self._hosts:
            for key in host.arrived():
                if (action := self._held.pop(key, None)) is not None:  # type: ignore[call-overload]
                    due[host.sending([key])[0]] = action
        self._send(due)
        while self._waiting and (number := self._multiplexer.room()) is not None:
            key, seed = self._waiting.popleft()
            self._hosts[number].begin(key, seed)
            self._multiplexer.started(key, number)
        self.lease.note()

    def _send(self, due: dict[int, Sent]) -> None:
        """Send {manager's slot: (action, watched)}."""
        if due:
            slots = sorted(due)
            actions, watched = zip(*(due[slot] for slot in slots), strict=True)
            self.manager.send(slots, np.stack(actions), watched)


def _dealt(manager: Simulators, num_hosts: int) -> list[list[range]]:
    """Slots of each host's workers, in the same split as a manager with one group of slots."""
    of_workers = split_slots(range(manager.num_slots), manager.num_workers)
    return [[of_workers[worker] for worker in own] for own in split_slots(range(manager.num_workers), num_hosts)]


def _renamed(batch: StepBatch, slots: np.ndarray) -> StepBatch:
    """Renumber a batch's rows by the collector's slots, ascending; copies them, since slots may change owners before the next send."""
    order = np.argsort(slots)
    renamed = dict(zip(batch.slots.tolist(), slots.tolist(), strict=True))
    episodes = [dataclasses.replace(episode, slot=renamed[episode.slot]) for episode in batch.episodes]
    ordered = tuple(sorted(episodes, key=lambda episode: episode.slot))
    return dataclasses.replace(rows_of(batch, order), slots=slots[order], episodes=ordered)


def _empty(manager: Simulators) -> StepBatch:
    """A batch without rows."""
    observation: Observation = {key: np.empty(0, object) for key in manager.spec.observation}
    observation |= {key: np.empty((0, *part.shape), part.dtype) for key, part in manager.spec.tensors.items()}
    flags = np.empty(0, bool)
    return StepBatch(np.empty(0, np.int64), observation, np.empty(0, np.float32), flags, flags, flags, observation, ())


LoadAll = Callable[[int, Iterable[tuple[str, Any]]], None]


class MultiplexedTokens(TokensElsewhere):
    """Token backend over several hosts; a request goes to the emptiest host. Only the collector's thread may call it."""

    def __init__(self, backends: Sequence[TokenBackend], lease: DeviceLease, capacity: int, load_all: LoadAll) -> None:
        """
        Args:
            backends: backends of the hosts. Those with a ``fileno()`` are waited for; others work inside `poll`.
            lease: lease of the run's hosts.
            capacity: requests of one host at a time.
            load_all: loads weights into all of them.

        Raises UserError as `Multiplexer` does.
        """
        self.backends = list(backends)
        self._hosts = [TokenHost(backend, capacity) for backend in backends]
        self.lease = lease
        self._multiplexer = lease.share(self._hosts)
        lease.follow(partial(self._on, "release_memory"), partial(self._on, "restore_memory"))
        self._load_all = load_all
        self.can_constrain = all(backend.can_constrain for backend in self.backends)
        self._waiting: deque[GenerationRequest] = deque()
        self._ready: list[Completion] = []
        self._in_flight: set[int] = set()
        """Ids of unfinished requests."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check(requests, self._in_flight)
        self._waiting.extend(requests)
        self._place()

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._place()
        while True:
            for host in self._hosts:
                if host.running:
                    self._end(host.poll(1, 0.0))
            self._place()
            left_s = None if deadline is None else deadline - time.monotonic()
            if len(self._ready) >= max(min_ready, 1) or not self._in_flight or (left_s is not None and left_s <= 0):
                break
            self._wait(left_s)
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`; the tokens so far, on any host, are ready when this returns."""
        wanted = self._in_flight & set(request_ids)
        unasked = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        self._ready += [_aborted(PartialAnswer(request)) for request in unasked]
        wanted -= {request.request_id for request in unasked}
        for host in self._hosts:
            here = sorted(wanted & set(host.movable()))
            for key, part in host.take(here).items() if here else ():
                self._multiplexer.finished(key)
                self._ready.append(_aborted(part))
            if len(host.running) > len(host.movable()):  # some have just ended
                self._end(host.poll(1, 0.0))
        for number in sorted(wanted):
            if number in self._multiplexer.parked:
                self._ready.append(_aborted(self._multiplexer.give_up(number)))
        self._in_flight -= {completion.request_id for completion in self._ready}
        self._place()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; loads into all hosts, including those that are training."""
        self._load_all(version, tensors)
        self.version = version

    def close(self) -> None:
        self._ask("close")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, what: str, *arguments: object) -> None:
        self._on(what, range(len(self.backends)))

    def _on(self, what: str, hosts: Iterable[int]) -> None:
        for number in hosts:
            methodcaller(what)(self.backends[number])

    def _place(self) -> None:
        """Give waiting requests to hosts with room, and let moves happen."""
        self._multiplexer.settle()
        while self._waiting and (number := self._multiplexer.room()) is not None:
            request = self._waiting.popleft()
            self._hosts[number].submit([request])
            self._multiplexer.started(request.request_id, number)
        self.lease.note()

    def _end(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._multiplexer.finished(completion.request_id)
            self._in_flight.discard(completion.request_id)
        self._ready += completions

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until a host has a result; hosts without a socket work when they are polled."""
        playing = [host.backend for host in self._hosts if host.running]
        for backend in playing:
            backend.flush()
        sockets = [backend.fileno() for backend in playing]
        if min(sockets, default=0) >= 0:
            can_be_read(*sockets, timeout_s=timeout_s)


def start_token_hosts(config: TrainConfig, files: ModelFiles, lease: DeviceLease) -> MultiplexedTokens:
    """Start a process for each host of `lease`. Raises UserError as `blank_backend` does, and RoleLost."""
    plan = lease.plan
    processes: list[TokenProcess] = []

    def load_all(version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        path, _ = processes[0].put(version, dict(tensors))
        # All hosts load the weights at the same time.
        for process in processes:
            process.load(version, path)
        for process in processes:
            process.loaded(version)

    try:
        for number in range(plan.num_hosts):
            gpu = plan.gpu(number)
            processes.append(TokenProcess(config, files, gpu=gpu, num_threads=plan.threads_per_host))
        for process in processes:
            process.started()
        return MultiplexedTokens(processes, lease, capacity_of(config, plan), load_all)
    except BaseException:
        for process in processes:
            process.close()
        raise


def capacity_of(config: TrainConfig, plan: HostPlan) -> int:
    """Requests of one host at a time: the hosts that stay have room for all requests."""
    return -(-config.sim.num_slots // (plan.num_hosts - plan.num_lent))


def _aborted(part: PartialAnswer) -> Completion:
    return part.whole(Completion.of(part.request.request_id, [], [], [], [], "aborted"))
