"""The manager's record of every slot's running episode: enough to resume it in another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.sim.transport import ABORTED, ENDED, PENDING

_TRIM_AT, _TRIM_LATEST = 64, 4096
"""Messages after which those that no episode needs are forgotten: after as many as were left the last time, within these bounds."""
_FORMAT = "embodied_rl episode snapshot"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """A running episode of one slot, which any slot of any manager of the same simulator can resume.

    `to_bytes` writes a versioned format without pickle; the simulator decides how exact it is (`SimSpec.snapshots`).
    """

    task: str
    chunk_size: int
    stream: SeedStream
    """Seeds of this episode and those after it."""
    index: int
    """The episode's number in its stream."""
    base: Mapping[str, Any] | None
    """Simulator's state, counters and observation before `actions`; None: the episode's first reset."""
    options: Mapping[str, Any]
    actions: tuple[Any, ...]
    """Messages since `base`: actions [A], chunks [k, A] or texts."""
    observation: Mapping[str, Any]
    """{key: value} of the last observation that the slot's owner saw."""

    @property
    def seed(self) -> int:
        """Seed of the episode."""
        return self.stream.seed(self.index)

    def to_bytes(self) -> bytes:
        fields = {**vars(self), "stream": self.stream.to_dict(), "actions": list(self.actions)}
        return encode_state({"format": _FORMAT, "version": _FORMAT_VERSION, **fields})

    @staticmethod
    def from_bytes(data: bytes) -> Snapshot:
        """Decode a snapshot. Raises SnapshotError if the bytes are not a snapshot, damaged, or of another version."""
        fields = decode_state(data)
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise SnapshotError("These bytes are not an episode snapshot of embodied_rl.")
        version = fields.pop("version", None)
        if version != _FORMAT_VERSION:
            raise SnapshotError(f"The episode snapshot is of version {version}; this embodied_rl reads version {_FORMAT_VERSION}.")
        try:
            fields["stream"] = SeedStream.from_dict(fields["stream"])
            return Snapshot(**{**fields, "actions": tuple(fields["actions"])})
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"The episode snapshot lacks a field or holds a wrong one: {error!r}.") from error


class EpisodeLog:
    """Keeps seeds, episode numbers and the actions since each episode's start (or last snapshot), for all slots.

    Actions are stored once per message, whatever the number of slots; a slot's own are picked out on demand.
    """

    def __init__(self, num_slots: int, *, keep_actions: bool, max_messages: int = 200_000) -> None:
        """`max_messages`: longer episodes lose their beginning, and can then be resumed only from a snapshot."""
        self.num_slots, self.keep_actions, self._max_messages = num_slots, keep_actions, max_messages
        self._trim_at = _TRIM_AT
        self.begin_all(EpisodeSeeds.training(0), 0, {})

    def begin_all(self, seeds: EpisodeSeeds, seed_round: int, options: Mapping[str, Any]) -> None:
        """Record new episodes in all slots, counted from 0."""
        num_slots = self.num_slots
        self.streams = [SeedStream(seeds, seed_round, slot, num_slots) for slot in range(num_slots)]
        self.index, self._start, self._offset = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64), 0
        self.base: list[Mapping[str, Any] | None] = [None] * num_slots
        self.prior: list[tuple[Any, ...]] = [()] * num_slots
        """Earlier actions of episodes that came from a snapshot."""
        self.options = [options] * num_slots
        self._log: list[tuple[Sequence[int] | np.ndarray, Any]] = []

    def begin(self, slot: int, seed: int) -> None:
        """Record a new episode with a given seed in one slot."""
        self.streams[slot] = SeedStream(EpisodeSeeds.given(seed), 0, slot, self.num_slots)
        self.index[slot] = 0
        self._begin_at(slot, None, (), {})

    def sent(self, slots: Sequence[int] | np.ndarray, actions: np.ndarray | Sequence[str]) -> None:
        """Record a message. `actions` has one entry per slot, and the log keeps it without a copy."""
        if self.keep_actions:
            self._log.append((slots, actions))
            if len(self._log) >= self._trim_at:
                self._trim()

    def ended(self, slots: Iterable[int]) -> None:
        """Record that these slots' episodes ended and their next ones began."""
        for slot in slots:
            self.index[slot] += 1
            self._begin_at(slot, None, (), {})

    def rebase(self, slot: int, base: Mapping[str, Any]) -> None:
        """Continue the episode from this state from now on."""
        self._begin_at(slot, base, (), self.options[slot])

    def load(self, slot: int, snapshot: Snapshot) -> None:
        """Put a snapshot's episode into the slot."""
        self.streams[slot], self.index[slot] = snapshot.stream, snapshot.index
        self._begin_at(slot, snapshot.base, snapshot.actions, snapshot.options)

    def _begin_at(self, slot: int, base: Mapping[str, Any] | None, prior: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """The slot's messages count from now on."""
        self.base[slot], self.prior[slot], self.options[slot] = base, prior, options
        self._start[slot] = self._offset + len(self._log)

    def is_lost(self, slot: int) -> bool:
        """Whether the episode cannot be resumed, because its beginning was forgotten or actions are not kept."""
        return bool(self._start[slot] < 0) or not self.keep_actions

    def actions(self, slot: int) -> list[Any]:
        """Messages to a slot since its base, oldest first."""
        own = [actions[row] for slots, actions in self._log[self._start[slot] - self._offset :] for row in _rows(slots, slot)]
        return [*self.prior[slot], *own]

    def point(self, slot: int) -> tuple[int, int]:
        """Present point of an episode: (its number, messages since its base)."""
        return int(self.index[slot]), len(self.actions(slot))

    def resume_item(self, slot: int, mark: int, observation: Mapping[str, Any] | None, *, abort: bool, cautious: bool) -> dict[str, Any]:
        """What a worker needs to resume the slot's episode at the point that its owner expects.

        `mark` is the slot's state in the slab. The worker repeats a pending step and counts a ready one as done; after an end that the
        manager has not fetched yet, the next episode is the running one.
        """
        over = mark in (ENDED, ABORTED)
        actions = [] if over or abort else self.actions(slot)
        if mark == PENDING:
            actions = actions[:-1]
        return {
            "slot": slot,
            "stream": self.streams[slot].to_dict(),
            "index": int(self.index[slot]) + over,
            "base": None if over else self.base[slot],
            "options": {} if over else dict(self.options[slot]),
            "actions": actions,
            "observation": None if mark == PENDING else observation,
            "publish": mark == PENDING,
            "abort": abort,
            "cautious": cautious,
        }

    def snapshot(self, slot: int, mark: int, observation: Mapping[str, Any], task: str, chunk_size: int) -> Snapshot:
        """The slot's episode as `mark` and `observation` show it."""
        item = self.resume_item(slot, mark, observation, abort=False, cautious=False)
        stream, actions = self.streams[slot], tuple(item["actions"])
        return Snapshot(task, chunk_size, stream, item["index"], item["base"], item["options"], actions, observation)

    def _trim(self) -> None:
        """Forget actions that no running episode needs."""
        first = int(self._start[self._start >= 0].min(initial=self._offset + len(self._log)))
        if self._offset + len(self._log) - first > self._max_messages:
            self._start[self._start < self._offset + len(self._log) - self._max_messages // 2] = -1
            first = int(self._start[self._start >= 0].min(initial=self._offset + len(self._log)))
        del self._log[: first - self._offset]
        self._offset = first
        self._trim_at = len(self._log) + min(max(len(self._log), _TRIM_AT), _TRIM_LATEST)


def _rows(slots: Sequence[int] | np.ndarray, slot: int) -> list[int]:
    """Row of a slot in a message, if it is there."""
    if isinstance(slots, range):
        return [slot - slots.start] if slot in slots else []
    return np.flatnonzero(np.asarray(slots) == slot).tolist()
