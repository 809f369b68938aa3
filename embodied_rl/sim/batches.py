"""The manager's view of a slab's slots: it writes actions and reads a StepBatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from embodied_rl.sim.transport import (
    ABORTED,
    ENDED,
    IDLE,
    INFO_BUFFER,
    OBSERVATIONS,
    PENDING,
    READY,
    Marks,
    VariableLengthBuffers,
    fence,
    observation_buffers,
)
from embodied_rl.sim.worker_pool import WorkerPool
from embodied_rl.specs import Rows
from embodied_rl.types import EpisodeSummary, StepBatch, VariableSpec

Slots = range | Sequence[int] | np.ndarray
Actions = np.ndarray | Sequence[str]
"""[n, A], with chunks [n, k, A], or one text per slot."""

_KEPT = 1024
"""Sets of slots whose views are kept."""


class SlotViews:
    """A set of slots, ascending. A contiguous range gives views, made once; scattered slots give copies, made by each call."""

    def __init__(self, pool: WorkerPool, slots: range | np.ndarray, chunk_size: int) -> None:
        self.pool, self.slots, self._chunk_size = pool, slots, chunk_size
        self._arrays = pool.slab.arrays
        self._is_range = isinstance(slots, range)
        self._rows: Rows = slice(slots.start, slots.stop) if isinstance(slots, range) else slots
        self._size = len(slots)
        self.doorbells = [pool.doorbells[worker] for worker in dict.fromkeys(pool.worker_of[self._rows].tolist())]
        state = self._arrays["slot_state"]
        self._state = state[self._rows].data if self._is_range else None
        self._whole_state = state
        runs = [slots] if isinstance(slots, range) else [range(slot, slot + 1) for slot in slots.tolist()]
        self.mark = Marks(state, runs).write
        self.idle, self.all_ready = (bytes([mark]) * self._size for mark in (IDLE, READY))
        text = pool.spec.action.part
        self._text = VariableLengthBuffers("action", text, self._arrays) if isinstance(text, VariableSpec) else None
        self._actions, self._shape = self._arrays["action"], (self._size, pool.spec.action.dim)
        self._own_actions = self._actions[self._rows] if self._is_range else None
        names = (*OBSERVATIONS, "inner_observation") if chunk_size > 1 else OBSERVATIONS
        self._buffers = {name: observation_buffers(name, pool.spec, self._arrays) for name in names}
        self._template = self._gather() if self._is_range else None

    # ---- marks ------------------------------------------------------------------------------------------------------

    def marks(self) -> bytes:
        return self._state.tobytes() if self._state is not None else self._whole_state[self._rows].tobytes()

    def is_ready(self) -> bool:
        """Whether every slot has a step ready."""
        marks = self._state.tobytes() if self._state is not None else self.marks()
        return marks == self.all_ready or (PENDING not in marks and IDLE not in marks)

    def start(self) -> None:
        """Hand the slots to their workers, after everything that these read is written."""
        fence()
        self.mark(PENDING)
        for doorbell in self.doorbells:
            doorbell.ring()

    # ---- actions ----------------------------------------------------------------------------------------------------

    def put_actions(self, actions: Actions, watched: Sequence[bool] | None = None) -> np.ndarray | list[str]:
        """Write actions into the slab; returns a copy of them, one entry per slot. `watched`: see `Simulators.send`. Raises ValueError."""
        if self._text is not None:
            return self._put_texts(actions)
        if self._chunk_size > 1:
            self._arrays["watched"][self._rows] = False if watched is None else watched
            return self._put_chunks(np.asarray(actions))
        given = np.asarray(actions)
        if given.shape != self._shape:  # numpy would stretch one row over all
            raise ValueError(f"Actions must be {list(self._shape)}, got {list(given.shape)}.")
        if self._own_actions is not None:
            self._own_actions[...] = given
            return self._own_actions.copy()
        self._actions[self._rows] = given
        return self._actions[self._rows]

    def _put_chunks(self, actions: np.ndarray) -> np.ndarray:
        action = self._actions
        if actions.ndim != 3 or actions.shape[0] != self._size or not 1 <= actions.shape[1] <= self._chunk_size:
            raise ValueError(
                f"Chunks must be [{self._size}, k, {action.shape[2]}] with 1 ≤ k ≤ {self._chunk_size}, got {list(actions.shape)}."
            )
        length = actions.shape[1]
        if isinstance(self._rows, slice):
            action[self._rows, :length] = actions
        else:
            action[self._rows[:, None], np.arange(length)] = actions
        self._arrays["chunk_length"][self._rows] = length
        return action[self._rows][:, :length].copy()

    def _put_texts(self, actions: Actions) -> list[str]:
        assert self._text is not None
        if isinstance(actions, str) or len(actions) != self._size:
            raise ValueError(f"One text for each of {self._size} slots is needed, got {actions!r:.80}.")
        for slot, action in zip(self.slots, actions, strict=True):
            self._text.write(int(slot), str(action))
        return [str(action) for action in actions]

    # ---- batches ----------------------------------------------------------------------------------------------------

    def batch(self, marks: bytes | None) -> StepBatch:
        """Batch in the slab; `marks`: the slots' marks if an episode ended in one of them."""
        batch = self._template if self._template is not None else self._gather()
        if self._buffers["observation"]:
            batch = dataclasses.replace(
                batch, observation=batch.observation | self._values("observation"), final_observation=dict(batch.final_observation)
            )
        if self._chunk_size > 1 and (watched := self._arrays["watched"][self._rows]).any():
            batch = dataclasses.replace(batch, inner=self._inner(watched))
        if marks is None:
            return batch
        ended = [int(slot) for slot, mark in zip(self.slots, marks, strict=True) if mark == ENDED]
        aborted = np.frombuffer(marks, np.uint8) == ABORTED
        return dataclasses.replace(
            batch,
            final_observation=batch.final_observation | self._values("final_observation"),
            episodes=tuple(self._summary(slot) for slot in ended),
            aborted=aborted if aborted.any() else None,
        )

    def clear_outcome(self) -> None:
        """Zero the reward and flags before a batch that has only observations."""
        for name in ("reward", "terminated", "truncated", "success"):
            self._arrays[name][self._rows] = 0

    def _gather(self) -> StepBatch:
        """Views of a range, or copies of scattered rows."""
        arrays, rows, spec = self._arrays, self._rows, self.pool.spec

        def optional(name: str) -> np.ndarray | None:
            return arrays[name][rows] if name in arrays else None

        return StepBatch(
            slots=np.arange(self.slots.start, self.slots.stop) if isinstance(self.slots, range) else self.slots,
            observation={key: arrays[f"observation/{key}"][rows] for key in spec.tensors},
            reward=arrays["reward"][rows],
            terminated=arrays["terminated"][rows],
            truncated=arrays["truncated"][rows],
            success=arrays["success"][rows],
            final_observation={key: arrays[f"final_observation/{key}"][rows] for key in spec.tensors},
            episodes=(),
            chunk_reward=optional("chunk_reward"),
            chunk_success=optional("chunk_success"),
            executed=optional("executed"),
        )

    def _values(self, name: str) -> dict[str, np.ndarray]:
        slots = [int(slot) for slot in self.slots]
        return {key: buffers.read_all(slots) for key, buffers in self._buffers[name].items()}

    def _inner(self, watched: np.ndarray) -> dict[str, np.ndarray]:
        """`StepBatch.inner` of chunks that were watched."""
        num_inner, slots = self._chunk_size - 1, [int(slot) for slot in self.slots]
        shown = {key: self._arrays[f"inner_observation/{key}"][self._rows] for key in self.pool.spec.tensors}
        for key, buffers in self._buffers["inner_observation"].items():
            shown[key] = np.full((self._size, num_inner), None, object)
            for row in np.flatnonzero(watched).tolist():
                first = slots[row] * num_inner
                shown[key][row] = buffers.read_all(range(first, first + num_inner))
        return shown

    def _summary(self, slot: int) -> EpisodeSummary:
        arrays = self._arrays
        return EpisodeSummary(
            slot=slot,
            index=int(arrays["episode_index"][slot]),
            seed=int(arrays["episode_seed"][slot]),
            episode_return=float(arrays["episode_return"][slot]),
            length=int(arrays["episode_length"][slot]),
            success_once=bool(arrays["episode_success_once"][slot]),
            success_at_end=bool(arrays["episode_success_at_end"][slot]),
            terminated=bool(arrays["terminated"][slot]),
            final_info=VariableLengthBuffers("final_info", INFO_BUFFER, arrays).read(slot) or {},
        )


class ViewsOfSlots:
    """Caches the `SlotViews` of a `WorkerPool`: callers use a few ranges, and repeat scattered sets."""

    def __init__(self, pool: WorkerPool, num_slots: int, chunk_size: int) -> None:
        self._made = lru_cache(_KEPT)(partial(_checked_views, pool, num_slots, chunk_size))
        self._last: tuple[range | None, SlotViews | None] = (None, None)

    def of(self, slots: Slots) -> SlotViews:
        """Views of these slots. Raises ValueError for slots that do not exist."""
        last, views = self._last  # the same range is sent and received; its hash costs as much as writing actions
        if slots is last and views is not None:
            return views
        if isinstance(slots, range) and slots.step == 1:
            views = self._made(slots)
            self._last = (slots, views)
            return views
        ids = sorted(slots.tolist() if isinstance(slots, np.ndarray) else map(int, slots))
        if ids and ids[-1] - ids[0] == len(ids) - 1 and len(set(ids)) == len(ids):
            return self.of(range(ids[0], ids[-1] + 1))
        return self._made(tuple(ids))


def _checked_views(pool: WorkerPool, num_slots: int, chunk_size: int, slots: range | tuple[int, ...]) -> SlotViews:
    if len(slots) and not (slots[0] >= 0 and slots[-1] < num_slots):
        raise ValueError(f"Slots {list(slots)} are not within 0 … {num_slots - 1}.")
    if len(set(slots)) < len(slots):
        raise ValueError(f"Slots {list(slots)} name a slot twice.")
    return SlotViews(pool, slots if isinstance(slots, range) else np.asarray(slots, np.int64), chunk_size)


def ascending(slots: Slots, actions: Actions | Sequence[int]) -> tuple[Slots, Any]:
    """Slots in ascending order, each with its own action."""
    order = np.argsort(slots, kind="stable").tolist()
    if order == list(range(len(order))):
        return slots, actions
    return [int(slots[row]) for row in order], [actions[row] for row in order]


def rows_of(batch: StepBatch, rows: slice | np.ndarray) -> StepBatch:
    """These rows of a batch, as views if `rows` is a slice; without its episodes."""
    taken: dict[str, Any] = {"episodes": ()}
    for name, part in vars(batch).items():
        if isinstance(part, Mapping):
            taken[name] = {key: values[rows] for key, values in part.items()}
        elif name not in taken:
            taken[name] = None if part is None else part[rows]
    return StepBatch(**taken)


def joined(batches: Sequence[StepBatch]) -> StepBatch:
    """Observations of consecutive batches as one batch, without the results of their last step."""
    seen = [batch.observation for batch in batches]
    observation = {key: np.concatenate([part[key] for part in seen]) for key in seen[0]}
    slots = np.concatenate([batch.slots for batch in batches])
    flags = np.zeros(len(slots), bool)
    return StepBatch(slots, observation, np.zeros(len(slots), np.float32), flags, flags, flags, {}, ())


def from_zero(parts: Sequence[slice]) -> list[slice]:
    """The same parts moved together, from 0 on."""
    ends = np.cumsum([part.stop - part.start for part in parts]).tolist()
    return [slice(end - (part.stop - part.start), end) for part, end in zip(parts, ends, strict=True)]
