"""Migration of running episodes: simulator slots move by snapshots, answers of a language model by their first tokens.

`hybrid.multiplex.Multiplexer` moves episodes between both kinds of host; neither module imports the other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, derive_seed
from embodied_rl.rollout.observations import copied
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.simulators import Simulators

Key = Hashable
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
        self._free = self._own[::-1]
        self._in_flight: set[int] = set()
        self._arrived: dict[Key, Mapping[str, np.ndarray]] = {}

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._own)

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

    def sending(self, keys: Sequence[Key]) -> list[int]:
        """Mark these episodes as in flight and return their slots, for the caller to send to the manager, perhaps with other hosts'."""
        slots = [self._slots[key] for key in keys]
        self._in_flight.update(slots)
        return slots

    def received(self, slots: Sequence[int]) -> list[Key]:
        """Mark this host's slots, which the caller has received from the manager, and return their keys."""
        self._in_flight.difference_update(slots)
        return [self._keys[slot] for slot in slots]

    def arrived(self) -> dict[Key, Mapping[str, np.ndarray]]:
        """{key: observation} of episodes that came from another host since the last call: they wait for their actions."""
        arrived, self._arrived = self._arrived, {}
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
        """Restore episodes in free slots; `arrived` returns their observations. Steps in flight here are not disturbed."""
        slots = [self.adopt(key) for key in states]
        batch = self.manager.restore(slots, list(states.values()))
        rows = {int(slot): row for row, slot in enumerate(batch.slots)}
        for key, slot in zip(states, slots, strict=True):
            self._arrived[key] = {name: copied(part[rows[slot]]) for name, part in batch.observation.items()}

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
        self._arrived.pop(key, None)
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
        self.backend = backend
        self._capacity = capacity
        self._parts: dict[Key, PartialAnswer] = {}
        self._ready: list[Completion] = []

    @property
    def capacity(self) -> int:
        return self._capacity

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
        self.backend.abort([int(str(key)) for key in wanted])
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
