"""Bringing slots to the starts of their groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.rollout.initialized import Start, StartLibrary
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.simulators import Simulators

_MAX_KEPT = 256
_MAX_DRIFT = 1e-3
"""Largest difference of an observation after a replay from the one before that counts as the same start."""


class SnapshotCache:
    """Restores slots, and keeps the snapshots of starts that were come to once.

    The first member that starts at a place is brought there from the nearest recorded state, or from the seed, by playing the
    messages since; then its own snapshot serves the others, so that where a simulator saves its state nothing is played twice and
    all members start in the same bits.
    """

    def __init__(self, manager: Simulators, library: StartLibrary) -> None:
        self._manager, self._library = manager, library
        self._kept: dict[Start, Snapshot] = {}

    def restore(self, wanted: Mapping[int, Start]) -> dict[int, dict[str, Any]]:
        """Take up the start of each slot, and return what is seen there: {slot: {key: value}}.

        Steps in flight in other slots finish first (they stay ready to be received): with asynchronous collection this waits for
        the slowest of them, once for all the slots that are restored together.

        Raises:
            SimFault: see EnvManager; a simulator whose episodes end earlier when they are played again is one.
        """
        first: dict[Start, int] = {}
        for slot, start in sorted(wanted.items()):
            if start not in self._kept:
                first.setdefault(start, slot)
        seen = self._take_up(sorted(first.values()), wanted) if first else {}
        others = [slot for slot in sorted(wanted) if slot not in seen]
        if others:
            seen |= self._take_up(others, wanted)
        while len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return seen

    def clear(self) -> None:
        """Forget the snapshots; a run that is resumed has none either."""
        self._kept.clear()

    def _take_up(self, slots: Sequence[int], wanted: Mapping[int, Start]) -> dict[int, dict[str, Any]]:
        snapshots = [self._snapshot(wanted[slot]) for slot in slots]
        batch = self._manager.restore(slots, snapshots)
        seen = {
            int(slot): {
                key: part[row].copy() if isinstance(part[row], np.ndarray) else part[row] for key, part in batch.observation.items()
            }
            for row, slot in enumerate(batch.slots)
        }
        self._note(snapshots, [self._manager.last_drift[slot] for slot in slots])
        new = [slot for slot in slots if wanted[slot] not in self._kept]
        if new:
            self._kept |= {wanted[slot]: snapshot for slot, snapshot in zip(new, self._manager.snapshot(new), strict=True)}
        return seen

    def _snapshot(self, start: Start) -> Snapshot:
        kept = self._kept.get(start)
        if kept is not None:
            return kept
        source = self._library.sources[start.source].source
        return source.snapshot(start.step, task=self._manager.spec.task, chunk_size=self._manager.chunk_size)

    def _note(self, snapshots: Sequence[Snapshot], drifts: Sequence[float | None]) -> None:
        replay = self._library.replay
        replay.num_messages += sum(len(snapshot.actions) for snapshot in snapshots)
        known = [drift for drift in drifts if drift is not None]
        replay.num_mismatches += sum(drift > _MAX_DRIFT for drift in known)
        replay.max_drift = max([replay.max_drift, *(drift for drift in known if math.isfinite(drift))])
