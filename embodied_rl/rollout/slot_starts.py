"""Starts inside earlier episodes for fixed rollouts: what a slot plays now, and where its next episode starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from embodied_rl.rollout.groups import WHOLE, Assignment, Share, group_seed
from embodied_rl.rollout.initialized import SnapshotCache, Start, StartLibrary
from embodied_rl.rollout.observations import copied
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import EpisodeSummary, Observation, StepBatch

_ROUND = 24
"""Bits reserved for the number of episodes that a slot begins between two restarts."""


@dataclass
class _Playing:
    """Running episode of a slot."""

    number: int
    """Number among all episodes of the run; its start derives from it, as a group's start does."""
    stream: SeedStream
    index: int
    """Index of the episode's seed in the stream."""
    start: Start | None
    """Start inside another episode; None: an ordinary start."""
    num_messages: int = 0
    """Number of messages since the start."""
    success_at: int | None = None
    """Messages from the start to the first success; None: no success yet."""
    given: list[np.ndarray] = field(default_factory=list)
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    """{messages since the start: observation before the next message}, where other episodes may start."""

    @property
    def seed(self) -> int:
        return self.stream.seed(self.index)


class SlotStarts:
    """Starts episodes of a slot where `StartLibrary.start_of` says; every episode of the run has its own number there.

    Simulators begin the next episode automatically. If it starts inside another one, its slot is restored to that start before the first
    action, and the slot's later seeds derive from the episode's number.
    """

    def __init__(self, manager: Simulators, library: StartLibrary, *, share: Share = WHOLE) -> None:
        self._manager, self._library, self._share = manager, library, share
        self._cache = SnapshotCache(manager, library)
        self._keeps = any(library.wants(success) for success in (True, False))
        self._playing: list[_Playing] = []

    def restart(self, whole: StepBatch, seeds: EpisodeSeeds, seed_round: int) -> StepBatch:
        """Begin a new episode in every slot, as `whole` shows; return the batch with the restored starts put in."""
        self._library.goes_on({})
        self._cache.clear()
        count = self._manager.num_slots
        numbers = [(seed_round << _ROUND) * self._all + self._share.slots_before + slot for slot in range(count)]
        self._playing = [
            _Playing(number, SeedStream(seeds, seed_round, slot, count), 0, self._library.start_of(number))
            for slot, number in enumerate(numbers)
        ]
        return self._taken_there(whole, range(count))

    def acted(self, slots: np.ndarray, observation: Observation, given: np.ndarray) -> None:
        """Note the actions `given` [n, ...] that answer `observation` {key: [n, ...]} in these slots."""
        if not self._keeps:
            return
        for row, slot in enumerate(slots.tolist()):
            one = self._playing[slot]
            if ((0 if one.start is None else one.start.step) + one.num_messages) % self._library.config.chunk_steps == 0:
                one.seen[one.num_messages] = {key: copied(part[row]) for key, part in observation.items()}
            one.given.append(given[row].copy())

    def received(self, batch: StepBatch) -> StepBatch:
        """Note the outcome of the actions; return the batch with each start added to its episode's summary."""
        summaries = {episode.slot: episode for episode in batch.episodes}
        for row, slot in enumerate(batch.slots.tolist()):
            one = self._playing[slot]
            one.num_messages += 1
            if one.success_at is None and batch.success[row]:
                one.success_at = one.num_messages
            if slot in summaries:
                self._over(one, summaries[slot])
                if one.start is not None:
                    summaries[slot] = replace(summaries[slot], final_info={**summaries[slot].final_info, "start": vars(one.start)})
            elif batch.aborted is not None and batch.aborted[row]:
                self._over(one, None)
        return replace(batch, episodes=tuple(summaries[episode.slot] for episode in batch.episodes))

    def begun(self, batch: StepBatch) -> StepBatch:
        """Begin the next episode in slots whose episode ended; return the batch with the restored starts put in."""
        over = batch.terminated | batch.truncated
        slots = batch.slots[over if batch.aborted is None else over | batch.aborted].tolist()
        for slot in slots:
            last = self._playing[slot]
            number = last.number + self._all
            self._playing[slot] = _Playing(number, last.stream, last.index + 1, self._library.start_of(number))
        return self._taken_there(batch, slots)

    def seed_of(self, slot: int) -> int | None:
        """Seed of the slot's episode; None: the episode starts inside another one, so a seed cannot reproduce it."""
        one = self._playing[slot]
        return one.seed if one.start is None else None

    def states(self) -> list[dict[str, Any]]:
        """State of each slot's episode beyond its simulator, for `encode_state`. Clears the snapshot cache, as a resumed run has none
        either."""
        self._cache.clear()
        starts = [None if one.start is None else dict(vars(one.start)) for one in self._playing]
        return [{**vars(one), "stream": one.stream.to_dict(), "start": start} for one, start in zip(self._playing, starts, strict=True)]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue the episodes of all slots that `states` returned."""
        self._cache.clear()
        self._playing = []
        for own in states:
            start = None if own["start"] is None else Start(**own["start"])
            self._playing.append(_Playing(**{**own, "stream": SeedStream.from_dict(own["stream"]), "start": start}))
        self._library.goes_on({one.number: one.start for one in self._playing})

    @property
    def _all(self) -> int:
        return self._share.all_slots or self._manager.num_slots

    def _over(self, one: _Playing, summary: EpisodeSummary | None) -> None:
        whose = Assignment(one.number, 0, one.seed, "", 0)
        self._library.played(whose, one.start, summary, given=one.given[: one.success_at], seen=one.seen)

    def _taken_there(self, batch: StepBatch, slots: Sequence[int]) -> StepBatch:
        """Restore those of `slots` that start inside other episodes; return the batch with what is seen there."""
        wanted = {slot: start for slot in slots if (start := self._playing[slot].start) is not None}
        if not wanted:
            return batch
        for slot, start in wanted.items():
            one = self._playing[slot]
            after = EpisodeSeeds.training(group_seed(self._library.seed, "start", one.number), (self._library.source_of(start).seed,))
            one.stream, one.index = SeedStream(after, 0, 0, 1), 0
        # The simulators overwrite the memory of the batch, so the other rows are copied.
        observation = {key: part.copy() for key, part in batch.observation.items()}
        rows = {int(slot): row for row, slot in enumerate(batch.slots)}
        streams = {slot: self._playing[slot].stream for slot in wanted}
        for slot, seen in self._cache.restore(wanted, streams).items():
            for key, value in seen.items():
                observation[key][rows[slot]] = value
        return replace(batch, observation=observation)
