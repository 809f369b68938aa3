"""Episodes that change places while they run: simulators' slots by snapshots, answers of a language model by their first tokens.

Both kinds of host are what `hybrid.multiplex.Multiplexer` moves episodes between; the two rooms do not know each other.
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
from embodied_rl.types import StepBatch

Key = Hashable
_ABORT_TIMEOUT_S = 60.0


class SimHost:
    """Episodes in the slots of one manager.

    An episode is movable while it waits for its action; one whose step is in flight becomes so when it was received. Of a manager with
    ``autoreset`` what moves is a slot's whole row of episodes: the snapshot has the seeds of those that follow.
    """

    def __init__(self, manager: Simulators, slots: Sequence[int] | None = None) -> None:
        """`slots`: those of the manager that belong to this host; None: all of them. Hosts may share a manager.
        Raises UserError: the simulator's episodes cannot be saved."""
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
        """Slots."""
        return len(self._own)

    @property
    def running(self) -> Collection[Key]:
        """Episodes that have a slot here."""
        return self._slots.keys()

    @property
    def num_in_flight(self) -> int:
        """Slots that were sent something and not received."""
        return len(self._in_flight)

    def adopt(self, key: Key) -> int:
        """Take over what the manager began or restored in the first free slot, where it waits for its action; that slot."""
        return self._occupy(key)

    def slot_of(self, key: Key) -> int:
        """The manager's slot in which an episode is played here."""
        return self._slots[key]

    def begin(self, key: Key, seed: int) -> None:
        """Start a new episode in a free slot; `recv` hands its first observation out. Raises ValueError when all slots are taken."""
        slot = self._occupy(key)
        self.manager.begin([slot], [seed])
        self._in_flight.add(slot)

    def send(self, keys: Sequence[Key], actions: np.ndarray) -> None:
        """Step these episodes with actions [len(keys), A]."""
        slots = self.sending(keys)
        self.manager.send(slots, actions)

    def recv(self, *, min_ready: int = 1, timeout_s: float | None = None) -> tuple[list[Key], StepBatch]:
        """Steps that have come back (at least `min_ready`), a key for each row. Raises ValueError when nothing is in flight."""
        batch = self.manager.recv(min_ready=min_ready, timeout_s=timeout_s)
        return self.received([int(slot) for slot in batch.slots]), batch

    def sending(self, keys: Sequence[Key]) -> list[int]:
        """The slots of these episodes, which now count as in flight. For a caller that sends to the manager for several hosts at once."""
        slots = [self._slots[key] for key in keys]
        self._in_flight.update(slots)
        return slots

    def received(self, slots: Sequence[int]) -> list[Key]:
        """The keys of this host's slots, which have come back. For a caller that receives from the manager for several hosts at once."""
        self._in_flight.difference_update(slots)
        return [self._keys[slot] for slot in slots]

    def arrived(self) -> dict[Key, Mapping[str, np.ndarray]]:
        """{key: observation} of episodes that came from another host since the last call: they wait for their actions."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def end(self, key: Key) -> None:
        """The episode is over: its slot is free."""
        self._vacate(key)

    def discard(self) -> None:
        """Forget all episodes, after `EnvManager.discard`."""
        self._slots.clear()
        self._keys.clear()
        self._in_flight.clear()
        self._arrived.clear()
        self._free = self._own[::-1]

    # ---- Host -------------------------------------------------------------------------------------------------------

    def movable(self) -> Collection[Key]:
        """Episodes that wait for an action."""
        return [key for key, slot in self._slots.items() if slot not in self._in_flight]

    def take(self, keys: Sequence[Key]) -> dict[Key, Snapshot]:
        """Snapshots of these episodes, whose slots are free then. Raises ValueError for one whose step is in flight."""
        slots = [self._slots[key] for key in keys]
        if busy := [key for key, slot in zip(keys, slots, strict=True) if slot in self._in_flight]:
            raise ValueError(f"Episodes {busy} have a step in flight: receive it first.")
        snapshots = self.manager.snapshot(slots)
        for key in keys:
            self._vacate(key)
        return dict(zip(keys, snapshots, strict=True))

    def give(self, states: Mapping[Key, Snapshot]) -> None:
        """Take episodes up in free slots; `arrived` hands their observations out. Steps in flight here are not disturbed."""
        slots = [self._occupy(key) for key in states]
        batch = self.manager.restore(slots, list(states.values()))
        rows = {int(slot): row for row, slot in enumerate(batch.slots)}
        for key, slot in zip(states, slots, strict=True):
            self._arrived[key] = {name: copied(part[rows[slot]]) for name, part in batch.observation.items()}

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _occupy(self, key: Key) -> int:
        if key in self._slots:
            raise ValueError(f"Episode {key!r} has a slot here already.")
        if not self._free:
            raise ValueError(f"Episode {key!r} finds no free slot: all {self.capacity} are taken.")
        slot = self._free.pop()
        self._slots[key], self._keys[slot] = slot, key
        return slot

    def _vacate(self, key: Key) -> None:
        slot = self._slots.pop(key)
        self._arrived.pop(key, None)
        del self._keys[slot]
        self._free.append(slot)


@dataclass(frozen=True, eq=False)
class PartialAnswer:
    """A request and the n tokens that were sampled for it so far."""

    request: GenerationRequest
    """As it was asked at first."""
    token_ids: tuple[int, ...] = ()
    log_prob: tuple[float, ...] = ()
    sampling_log_prob: tuple[float, ...] = ()
    version: tuple[int, ...] = ()

    def rest(self) -> GenerationRequest:
        """The request for what is still to be sampled: the tokens so far belong to its prompt.

        Its seed derives from the first one's and n: with the same seed, the first draws would be made again. What is sampled after a move
        therefore differs from what would have been sampled without (temperature 0 excepted), and is as likely.
        """
        request = self.request
        if not self.token_ids:
            return request
        seed = None if request.seed is None else derive_seed(request.seed, len(self.token_ids))
        return dataclasses.replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, np.asarray(self.token_ids, request.prompt_ids.dtype)]),
            max_new_tokens=request.max_new_tokens - len(self.token_ids),
            seed=seed,
            messages=None,
        )

    def kept(self) -> PartialAnswer:
        """What another backend goes on with. An answer with a structure begins anew there, and from the same seed: no backend takes a
        structure up in its middle. So does one with the likeliest tokens of each place, which are not kept."""
        return self if self.request.structure is None and not self.request.top_logprobs else PartialAnswer(self.request)

    def plus(self, completion: Completion) -> PartialAnswer:
        """With the tokens of a completion of `rest`."""
        if completion.text is not None and completion.num_tokens == 0 and completion.text:
            raise UserError(
                f"Request {self.request.request_id} was answered in text without token ids, and cannot go on elsewhere: move answers "
                "between backends that give tokens (torch, vllm)."
            )
        return PartialAnswer(
            self.request,
            (*self.token_ids, *completion.token_ids.tolist()),
            (*self.log_prob, *completion.log_prob.tolist()),
            (*self.sampling_log_prob, *completion.sampling_log_prob.tolist()),
            (*self.version, *completion.version.tolist()),
        )

    def whole(self, last: Completion) -> Completion:
        """The answer to the request as it was asked at first, `last` being the completion of `rest`."""
        if not self.token_ids:
            return last
        all_of = self.plus(last)
        return Completion.of(
            last.request_id,
            all_of.token_ids,
            all_of.log_prob,
            all_of.sampling_log_prob,
            all_of.version,
            last.finish_reason,
            limit=last.limit,
            failure=last.failure,
            text=last.text,
        )


class TokenHost:
    """Requests to one token backend; keys are their ids. The caller submits to and polls the host in place of the backend."""

    def __init__(self, backend: TokenBackend, capacity: int) -> None:
        """`capacity`: requests that it is to have at a time."""
        self.backend = backend
        self._capacity = capacity
        self._parts: dict[Key, PartialAnswer] = {}
        self._ready: list[Completion] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def running(self) -> Collection[Key]:
        """Ids of requests that are not answered yet, or whose answer was not polled yet."""
        return [*self._parts, *(completion.request_id for completion in self._ready)]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.backend.submit(requests)
        self._parts |= {request.request_id: PartialAnswer(request) for request in requests}

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; answers that were begun elsewhere come out whole."""
        if len(self._ready) < min_ready and self._parts:
            self._collect(self.backend.poll(min_ready - len(self._ready), timeout_s))
        ready, self._ready = self._ready, []
        return ready

    # ---- Host -------------------------------------------------------------------------------------------------------

    def movable(self) -> Collection[Key]:
        """All that are not answered."""
        return list(self._parts)

    def take(self, keys: Sequence[Key]) -> dict[Key, PartialAnswer]:
        """Stop these between two tokens; one that was just answered stays here, for `poll`.
        Raises TimeoutError: the backend did not give them back."""
        wanted = {key for key in keys if key in self._parts}
        self.backend.abort([int(str(key)) for key in wanted])
        taken: dict[Key, PartialAnswer] = {}
        deadline = time.monotonic() + _ABORT_TIMEOUT_S
        while wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Requests {sorted(map(str, wanted))} were aborted and did not come back in {_ABORT_TIMEOUT_S:g} s.")
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
        """Go on with answers that were begun elsewhere."""
        parts = {key: part.kept() for key, part in states.items()}
        self.backend.submit([part.rest() for part in parts.values()])
        self._parts |= parts

    def _collect(self, completions: Sequence[Completion]) -> None:
        self._ready += [self._parts.pop(completion.request_id).whole(completion) for completion in completions]
