"""Fixed rollouts whose episodes may start inside earlier ones: what a slot plays now, and where its next episode starts."""

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
"""Bits of the episodes that a slot begins between two restarts."""


@dataclass
class _Playing:
    """The episode of a slot."""

    number: int
    """Of all episodes of the run: where it starts follows from it, as of a group."""
    stream: SeedStream
    index: int
    """Its place in the stream."""
    start: Start | None
    """None: it began ordinarily."""
    num_messages: int = 0
    """Since its start."""
    success_at: int | None = None
    """Messages up to the first success since the start; None: there was none."""
    given: list[np.ndarray] = field(default_factory=list)
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    """{messages since the start: observation before the next one}, at places where others may start."""

    @property
    def seed(self) -> int:
        return self.stream.seed(self.index)


class SlotStarts:
    """Episode n of a slot starts where `StartLibrary.start_of` says, which is asked with a number of its own for every episode of a run.

    Simulators begin their next episodes by themselves; one that is to start elsewhere is taken there before its first action. The slot's
    seeds after it follow from its number.
    """

    def __init__(self, manager: Simulators, library: StartLibrary, *, share: Share = WHOLE) -> None:
        self._manager, self._library, self._share = manager, library, share
        self._cache = SnapshotCache(manager, library)
        self._keeps = any(library.wants(success) for success in (True, False))
        self._playing: list[_Playing] = []

    def restart(self, whole: StepBatch, seeds: EpisodeSeeds, seed_round: int) -> StepBatch:
        """All slots begin, as `whole` shows; what they see, some of them inside other episodes."""
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
        """These slots are about to be sent actions for what they see: {key: [n, ...]}, [n, ...]."""
        if not self._keeps:
            return
        for row, slot in enumerate(slots.tolist()):
            one = self._playing[slot]
            if ((0 if one.start is None else one.start.step) + one.num_messages) % self._library.config.chunk_steps == 0:
                one.seen[one.num_messages] = {key: copied(part[row]) for key, part in observation.items()}
            one.given.append(given[row].copy())

    def received(self, batch: StepBatch) -> StepBatch:
        """What came of it: the batch, whose summaries say which episodes did not start ordinarily."""
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
        """What the slots of a batch see whose episodes were over, and are taken to where the next ones start."""
        over = batch.terminated | batch.truncated
        slots = batch.slots[over if batch.aborted is None else over | batch.aborted].tolist()
        for slot in slots:
            last = self._playing[slot]
            number = last.number + self._all
            self._playing[slot] = _Playing(number, last.stream, last.index + 1, self._library.start_of(number))
        return self._taken_there(batch, slots)

    def seed_of(self, slot: int) -> int | None:
        """Seed of the slot's episode; None: it starts inside another, and could not be played again from a seed."""
        one = self._playing[slot]
        return one.seed if one.start is None else None

    def states(self) -> list[dict[str, Any]]:
        """For `encode_state`: what of each slot's episode its simulator does not know. A run that goes on from them has no snapshots, nor
        has this one from now on."""
        self._cache.clear()
        starts = [None if one.start is None else dict(vars(one.start)) for one in self._playing]
        return [{**vars(one), "stream": one.stream.to_dict(), "start": start} for one, start in zip(self._playing, starts, strict=True)]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on in episodes that `states` gave, of all slots."""
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
        """What a batch shows after those of `slots` that start inside others were taken there."""
        wanted = {slot: start for slot in slots if (start := self._playing[slot].start) is not None}
        if not wanted:
            return batch
        for slot, start in wanted.items():
            one = self._playing[slot]
            after = EpisodeSeeds.training(group_seed(self._library.seed, "start", one.number), (self._library.source_of(start).seed,))
            one.stream, one.index = SeedStream(after, 0, 0, 1), 0
        # What the batch shows of the others lies in memory that the simulators write to.
        observation = {key: part.copy() for key, part in batch.observation.items()}
        rows = {int(slot): row for row, slot in enumerate(batch.slots)}
        streams = {slot: self._playing[slot].stream for slot in wanted}
        for slot, seen in self._cache.restore(wanted, streams).items():
            for key, value in seen.items():
                observation[key][rows[slot]] = value
        return replace(batch, observation=observation)
