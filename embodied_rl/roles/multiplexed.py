"""The simulators of one manager, or one token backend, as several hosts. Some hosts are lent to training and come back; episodes move
between them by snapshots, answers of a language model by their first tokens (`hybrid.multiplex.Multiplexer`).

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.distributed.channel import can_be_read
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, derive_seed
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.token_process import TokenProcess, TokensElsewhere
from embodied_rl.sim.batches import Slots, rows_of
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import Observation, StepBatch

Key = int
"""Key of an episode at the hosts: the collector's slot, or the id of a request."""
_ABORT_TIMEOUT_S = 60.0


class SimHost:
    """Host of the episodes in the slots of one manager.

    An episode is movable while it waits for its action; a step in flight must be received first. With ``autoreset``, a slot's whole
    sequence of episodes moves: the snapshot contains the seeds of those that follow.
    """

    def __init__(self, manager: Simulators, slots: Sequence[int] | None = None) -> None:
        """`slots`: the manager's slots that belong to this host; None: all. Hosts may share a manager.
        Raises UserError: the simulator cannot save its episodes."""
        if manager.spec.snapshots == "none":
            raise UserError(f"Episodes of task '{manager.spec.task}' cannot be moved: the simulator cannot save them (snapshots='none').")
        self.manager = manager
        self._slots: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._own = list(range(manager.num_slots) if slots is None else slots)
        self.capacity = len(self._own)
        self._free = self._own[::-1]
        self._in_flight: set[int] = set()
        self._arrived: list[Key] = []

    @property
    def running(self) -> Collection[Key]:
        """Keys of the episodes that have a slot here."""
        return self._slots.keys()

    @property
    def num_in_flight(self) -> int:
        """Number of slots with a step in flight."""
        return len(self._in_flight)

    def slot_of(self, key: Key) -> int:
        """The manager's slot that plays an episode of this host."""
        return self._slots[key]

    def begin(self, key: Key, seed: int) -> None:
        """Start a new episode in a free slot, whose first observation is to be received. Raises ValueError when all slots are taken."""
        slot = self.adopt(key)
        self.manager.begin([slot], [seed])
        self._in_flight.add(slot)

    def sending(self, key: Key) -> int:
        """Mark an episode as in flight and return its slot, for the caller to send to the manager, perhaps with other hosts'."""
        self._in_flight.add(self._slots[key])
        return self._slots[key]

    def received(self, slot: int) -> Key:
        """Mark a slot of this host, which the caller has received from the manager, and return its key."""
        self._in_flight.discard(slot)
        return self._keys[slot]

    def arrived(self) -> list[Key]:
        """Episodes that came from another host since the last call: they wait for their actions."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def discard(self) -> None:
        """Forget all episodes, after `EnvManager.discard`."""
        self._slots.clear()
        self._keys.clear()
        self._in_flight.clear()
        self._arrived.clear()
        self._free = self._own[::-1]

    # ---- Host -------------------------------------------------------------------------------------------------------

    def movable(self) -> Collection[Key]:
        """Keys of the episodes that wait for an action."""
        return [key for key, slot in self._slots.items() if slot not in self._in_flight]

    def take(self, keys: Sequence[Key]) -> dict[Key, Snapshot]:
        """Take snapshots of these episodes and free their slots. Raises ValueError for an episode whose step is in flight."""
        slots = [self._slots[key] for key in keys]
        if busy := [key for key, slot in zip(keys, slots, strict=True) if slot in self._in_flight]:
            raise ValueError(f"Episodes {busy} have a step in flight: receive it first.")
        snapshots = self.manager.snapshot(slots)
        for key in keys:
            self.end(key)
        return dict(zip(keys, snapshots, strict=True))

    def give(self, states: Mapping[Key, Snapshot]) -> None:
        """Restore episodes in free slots. Steps in flight here are not disturbed."""
        self.manager.restore([self.adopt(key) for key in states], list(states.values()))
        self._arrived += states

    def adopt(self, key: Key) -> int:
        """Give an episode the first free slot, and return it: the manager begins or restores it there.
        Raises ValueError when all slots are taken, or the episode has one."""
        if key in self._slots:
            raise ValueError(f"Episode {key!r} already has a slot here.")
        if not self._free:
            raise ValueError(f"Episode {key!r} has no free slot: all {self.capacity} are in use.")
        slot = self._free.pop()
        self._slots[key], self._keys[slot] = slot, key
        return slot

    def end(self, key: Key) -> None:
        """End an episode and free its slot."""
        slot = self._slots.pop(key)
        self._arrived = [other for other in self._arrived if other != key]
        del self._keys[slot]
        self._free.append(slot)


_SAMPLED = ("token_ids", "log_prob", "sampling_log_prob", "version")
"""Arrays [n] of a completion."""


@dataclass(frozen=True, eq=False)
class PartialAnswer:
    """A request and the n tokens that were sampled for it so far."""

    request: GenerationRequest
    """The original request."""
    so_far: Completion | None = None
    """Completion with those tokens; None: there are none."""

    def rest(self) -> GenerationRequest:
        """Request for the remaining tokens: the tokens so far belong to its prompt.

        Its seed derives from the original seed and n; with the same seed, the sampler would repeat its first draws. The continuation after
        a move therefore differs from the one without a move (temperature 0 excepted), but is as likely.
        """
        request = self.request
        if self.so_far is None or not (num_tokens := self.so_far.num_tokens):
            return request
        return dataclasses.replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, self.so_far.token_ids.astype(request.prompt_ids.dtype)]),
            max_new_tokens=request.max_new_tokens - num_tokens,
            seed=None if request.seed is None else derive_seed(request.seed, num_tokens),
            messages=None,
        )

    def kept(self) -> PartialAnswer:
        """Part of the answer from which another backend continues. Structured answers restart from the same seed, since no backend resumes
        a structure in the middle. So do answers with the likeliest tokens of each position, which are not kept."""
        return self if self.request.structure is None and not self.request.top_logprobs else PartialAnswer(self.request)

    def plus(self, completion: Completion) -> PartialAnswer:
        """Add the tokens of a completion of `rest`."""
        if completion.text is not None and completion.num_tokens == 0 and completion.text:
            raise UserError(
                f"Request {self.request.request_id} was answered in text without token ids, and cannot continue elsewhere: only backends "
                "with tokens (torch, vllm) can move answers."
            )
        return PartialAnswer(self.request, self.whole(completion))

    def whole(self, last: Completion) -> Completion:
        """Completion of the original request; `last` is the completion of `rest`."""
        if self.so_far is None:
            return last
        before, after = vars(self.so_far), vars(last)
        return dataclasses.replace(last, **{name: np.concatenate([before[name], after[name]]) for name in _SAMPLED})


class TokenHost:
    """Host of the requests to one token backend, keyed by their ids. The caller submits to and polls the host in place of the backend."""

    def __init__(self, backend: TokenBackend, capacity: int) -> None:
        """`capacity`: number of requests that the host is to have at a time."""
        self.backend, self.capacity = backend, capacity
        self._parts: dict[Key, PartialAnswer] = {}
        self._ready: list[Completion] = []

    @property
    def running(self) -> Collection[Key]:
        """Ids of requests whose answer is unfinished or not yet polled."""
        return [*self._parts, *(completion.request_id for completion in self._ready)]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.backend.submit(requests)
        self._parts |= {request.request_id: PartialAnswer(request) for request in requests}

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; answers that began elsewhere come out whole."""
        if len(self._ready) < min_ready and self._parts:
            self._collect(self.backend.poll(min_ready - len(self._ready), timeout_s))
        ready, self._ready = self._ready, []
        return ready

    # ---- Host -------------------------------------------------------------------------------------------------------

    def movable(self) -> Collection[Key]:
        """Ids of the unfinished requests."""
        return list(self._parts)

    def take(self, keys: Sequence[Key]) -> dict[Key, PartialAnswer]:
        """Stop these requests between two tokens; one that has just finished stays here, for `poll`.
        Raises TimeoutError: the backend did not return them."""
        wanted = {key for key in keys if key in self._parts}
        self.backend.abort(wanted)
        taken: dict[Key, PartialAnswer] = {}
        deadline = time.monotonic() + _ABORT_TIMEOUT_S
        while wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Requests {sorted(map(str, wanted))} were aborted but not returned within {_ABORT_TIMEOUT_S:g} s.")
            others = []
            for completion in self.backend.poll(1, _ABORT_TIMEOUT_S):
                key = completion.request_id
                if key in wanted and completion.finish_reason == "aborted":
                    taken[key] = self._parts.pop(key).plus(completion)
                else:
                    others.append(completion)
                wanted.discard(key)
            self._collect(others)
        return taken

    def give(self, states: Mapping[Key, PartialAnswer]) -> None:
        """Continue answers that began elsewhere."""
        parts = {key: part.kept() for key, part in states.items()}
        self.backend.submit([part.rest() for part in parts.values()])
        self._parts |= parts

    def _collect(self, completions: Sequence[Completion]) -> None:
        self._ready += [self._parts.pop(completion.request_id).whole(completion) for completion in completions]


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
        self._playing: set[int] = set()
        """Slots with an episode. The slot is its key at the hosts; with ``autoreset``, that of all its episodes until the next `reset`."""
        self._waiting: deque[tuple[int, int]] = deque()
        """(slot, seed) of episodes that no host has begun yet."""
        self._held: dict[int, Sent] = {}
        """Actions of parked episodes."""

    @property
    def fault_records(self) -> list[FaultRecord]:
        """See `EnvManager.fault_records`; the slots are the manager's."""
        return self.manager.fault_records

    def reset(self, seeds: EpisodeSeeds | None = None, *, seed_round: int = 0, reconfigure: bool = False) -> StepBatch:
        """See `EnvManager.reset`; all hosts play. Slots get the seeds that they have in the manager."""
        self.discard()
        for slot, host in sorted(self._host_of.items()):
            self._playing.add(slot)
            assert self._hosts[host].adopt(slot) == slot, "hosts have their slots in order"
            self._multiplexer.started(slot, host)
        return self.manager.reset(seeds, seed_round=seed_round, reconfigure=reconfigure)

    def snapshot(self, slots: Slots) -> list[Snapshot]:
        """See `EnvManager.snapshot`; no episode may be parked."""
        hosts = [(slot, self._multiplexer.host_of(slot)) for slot in slots]
        return self.manager.snapshot([self._hosts[host].slot_of(slot) for slot, host in hosts if host is not None])

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
            self._playing.add(slot)
            placed[self._hosts[number].adopt(slot)] = slot
            self._multiplexer.started(slot, number)
        batch = self.manager.restore(list(placed), snapshots)
        self.last_drift = {slot: self.manager.last_drift[own] for own, slot in placed.items()}
        self.lease.note()
        return _renamed(batch, np.asarray([placed[own] for own in batch.slots.tolist()], np.int64))

    def hosts_of(self, slots: np.ndarray) -> np.ndarray:
        """[n] host numbers of the slots' episodes; for parked ones, any host that is not lent."""
        active, found = self._multiplexer.active, [self._multiplexer.host_of(slot) for slot in slots.tolist()]
        return np.array([active[place % len(active)] if host is None else host for place, host in enumerate(found)])

    def begin(self, slots: Slots, seeds: Sequence[int] | np.ndarray) -> None:
        """See `EnvManager.begin`; an episode without a free slot begins when there is one."""
        for slot, seed in zip(slots, seeds, strict=True):
            self.release(slot)
            self._playing.add(slot)
            self._waiting.append((int(slot), int(seed)))
        self._settle()

    def send(self, slots: Slots, actions: np.ndarray | Sequence[str], watched: Sequence[bool] | None = None) -> None:
        """See `EnvManager.send`; a parked episode gets its action when a host has room for it."""
        playing: dict[int, Sent] = {}
        for slot, action, shown in zip(slots, actions, watched or [False] * len(slots), strict=True):
            number = self._multiplexer.host_of(slot)
            if number is None:
                self._held[slot] = np.array(action), shown
            else:
                playing[self._hosts[number].sending(slot)] = np.asarray(action), shown
        self._send(playing)

    def recv(self, slots: Slots | None = None, *, min_ready: int | None = None, timeout_s: float | None = None) -> StepBatch:
        """See `EnvManager.recv`; returns any ready slots. While all sent actions are parked, the batch is empty."""
        self._settle()  # hosts may have come back since
        if not any(host.num_in_flight for host in self._hosts):
            time.sleep(min(_NAP_S, timeout_s or _NAP_S))
            return _empty(self.manager)
        batch = self.manager.recv(min_ready=min_ready, timeout_s=timeout_s)
        theirs = np.array([self._hosts[self._host_of[slot]].received(slot) for slot in batch.slots.tolist()], np.int64)
        given = _renamed(batch, theirs)
        over = batch.done if batch.aborted is None else batch.done | batch.aborted
        for slot in theirs[over].tolist() if not self.autoreset else ():
            self.release(slot)
        self._settle()
        return given

    def release(self, slot: int) -> None:
        """Drop the slot's episode; no step of it may be in flight."""
        if slot not in self._playing:
            return
        self._playing.remove(slot)
        unbegun = [entry for entry in self._waiting if entry[0] == slot]
        if unbegun:
            self._waiting.remove(unbegun[0])
            return
        self._held.pop(slot, None)
        number = self._multiplexer.host_of(slot)
        if number is not None:
            self._hosts[number].end(slot)
        self._multiplexer.give_up(slot)
        self._multiplexer.settle()

    def discard(self) -> None:
        self.manager.discard()
        self._held.clear()
        begun = self._playing - {slot for slot, _ in self._waiting}
        self._playing.clear()
        self._waiting.clear()
        for host in self._hosts:
            host.discard()
        for slot in begun:
            self._multiplexer.give_up(slot)
        self.lease.note()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Move episodes that can be moved, send held actions to those that have a slot again, and begin waiting ones."""
        self._multiplexer.settle()
        due: dict[int, Sent] = {}
        for host in self._hosts:
            for slot in host.arrived():
                if (action := self._held.pop(slot, None)) is not None:
                    due[host.sending(slot)] = action
        self._send(due)
        while self._waiting and (number := self._multiplexer.room()) is not None:
            slot, seed = self._waiting.popleft()
            self._hosts[number].begin(slot, seed)
            self._multiplexer.started(slot, number)
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
        # Nothing moves meanwhile: a parked request could come to a host that has been asked already.
        for number in sorted(wanted & set(self._multiplexer.parked)):
            self._ready.append(_aborted(self._multiplexer.give_up(number)))
        for host in self._hosts:
            here = sorted(wanted & set(host.movable()))
            for key, part in host.take(here).items() if here else ():
                self._multiplexer.give_up(key)
                self._ready.append(_aborted(part))
            if len(host.running) > len(host.movable()):  # some have just ended
                self._end(host.poll(1, 0.0))
        self._in_flight -= {completion.request_id for completion in self._ready}
        self._place()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; loads into all hosts, including those that are training."""
        self._load_all(version, tensors)
        self.version = version

    def close(self) -> None:
        self._ask("close")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, what: str, **arguments: object) -> None:
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
