"""Record episodes of many slots side by side, for a recording or for a share of a run's training.

The run does not depend on it: it observes what the collectors pass on, draws no random number and touches no simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.agents.turns import Turn, texts
from embodied_rl.config import RecordConfig
from embodied_rl.episodes.folder import RECORDING_FILE
from embodied_rl.episodes.layout import Films
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingError, RecordingInfo, Value, last_only
from embodied_rl.episodes.sink import EpisodeSink, SteadyGroup, columns_around
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.generation.base import ActedBatch
from embodied_rl.rollout.groups import Assignment
from embodied_rl.rollout.observations import copied, stacked
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.instrumented import split
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import Episode, Observation, StepBatch

_OUTCOME = ("reward", "terminated", "truncated", "success")
"""Columns of a step's outcome."""
_KNOWN_BATCHES = 8
"""Limit on remembered batches of slot ranges. There are few ranges unless slots step together in arbitrary order."""
_STEADY_BYTES = 2**20
"""Approximate size of all slots' steady rows together."""


class _Known:
    """A range of slots whose steps one group keeps. Their outcome lies in the same arrays at every step, until an episode ends; or it
    comes in new arrays every time, which are given to the group like the actions."""

    def __init__(self, place: StepBatch, given: tuple[str, ...], group: SteadyGroup, moved: Sequence[str] | None) -> None:
        """
        Args:
            place: batch of the range.
            given: names of the columns that no batch contains.
            moved: recorded parts of the observation, if the steps arrive in other arrays than those of `place`; None: they do not.
        """
        self.place, self.given, self.group, self.moved = place, given, group, moved
        self.last: np.ndarray | None = None
        """Rewards of the previous step, if they move."""

    def covers(self, batch: StepBatch) -> bool:
        """Whether a batch is of this range."""
        own = self.place
        if self.moved is not None:
            return _place_of(batch) == _place_of(own)
        left, right = batch.observation, own.observation
        return (
            batch.reward is own.reward
            and batch.terminated is own.terminated
            and batch.truncated is own.truncated
            and batch.success is own.success
            and (left is right or (left.keys() == right.keys() and all(left[key] is right[key] for key in left)))
        )


def _place_of(batch: StepBatch) -> tuple[int, int] | None:
    """(first slot, number of slots) of a batch; None if its slots are no range."""
    slots = batch.slots
    return (int(slots[0]), slots.size) if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size else None


class BatchSinks:
    """Episodes in progress, one per slot, stepped in batches. Writes the same as an `EpisodeSink` per slot.

    The batches of pipeline groups are views into shared memory, the same at every step. From the third step on they are copied whole, and
    columns are made of hundreds of steps at once (`SteadyGroup`). Batches in new arrays each time are given to such a group. All other
    batches, and those with snapshots, go to the slots' sinks row by row.

    Args:
        films: columns whose pictures another process encodes; only an episode's first observation needs them, for their size.
        observations_alone: leave out states and images, which the batches may also contain.
    """

    def __init__(self, writer: RecordingWriter, num_slots: int, films: Films | None = None, *, observations_alone: bool = False) -> None:
        self._writer, self._num_slots, self._films = writer, num_slots, films
        self._observations_alone = observations_alone
        self._filmed = films.columns if films else frozenset()
        self._sinks: list[EpisodeSink | None] = [None] * num_slots
        self._steady: dict[int, SteadyGroup] = {}
        """{slot: the group that its steps may be in}"""
        self._full: list[SteadyGroup] = []
        """Groups without room for more steps."""
        self._known: dict[int, _Known] = {}
        """Known ranges by the `id` of their place, which stays unique while the batch is held here."""
        self._last: dict[tuple[int, int], StepBatch] = {}
        """{(first slot, number of slots): the last batch} of batches that are not known."""

    def start(
        self,
        slot: int,
        seed: int,
        observation: Mapping[str, Any],
        row: int,
        *,
        task: str | None = None,
        instruction: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin an episode; `row` is the slot's row in the given batches.
        Raises RecordingError: an episode is in progress, or this one is a duplicate and duplicates are refused."""
        if self._sinks[slot] is not None:
            raise RecordingError(f"The episode of slot {slot} is in progress: finish or discard it first.")
        sink = EpisodeSink(self._writer, seed, task=task, instruction=instruction, metadata=metadata, films=self._films)
        first, first_state, first_images = ({key: rows[row] for key, rows in (part or {}).items()} for part in (observation, state, images))
        sink.start(first, first_state, first_images)
        self._sinks[slot] = sink
        if (group := self._steady.get(slot)) is not None:
            group.taken[group.rows[slot]], group.ready = group.fill, False

    def step_batch(
        self,
        batch: StepBatch,
        given: Mapping[str, Any],
        *,
        rows: Sequence[int] | None = None,
        snapshots: Sequence[bytes | None] | None = None,
    ) -> list[int]:
        """Record one step of the slots of a batch, each with an episode in progress.

        Args:
            batch: from `EnvManager.recv`, with or without automatic resets.
            given: {column: [n, ...]} the actions and other columns, in the order of `batch.slots`.
            rows: rows of the batch to record; None: all.
            snapshots: snapshot of each of these rows from before the step.

        Returns the rows whose episode ended; `finish`, `take` or `discard` these slots' episodes before the next step.

        Raises RecordingError: as `EpisodeSink.step` does.
        """
        if snapshots is not None and not any(snapshots):
            snapshots = None  # no snapshot was due before this step
        known = self._known.get(id(batch))
        if known is not None and rows is None and snapshots is None and tuple(given) == known.given:
            # No episode ended, otherwise it would be another object.
            group = known.group
            if group.ready and group.fill + 1 < group.max_rows:
                group.keep(tuple(given.values()))  # inlined from `_step_group`; a third faster
            else:
                self._step_group(group, tuple(given.values()))
            return []
        if snapshots is None and (over := self._step_known(batch, given, rows)) is not None:
            return over
        over = self._step_apart(batch, given, range(len(batch.slots)) if rows is None else rows, snapshots)
        if rows is None and snapshots is None:
            self._get_to_know(batch, given)
        return over

    def settle(self) -> None:
        """Do a part of the deferred work, so that simulators need not wait for it: call this after every step, while they run.
        Raises UserError: see `RecordingWriter.flush`."""
        while self._full:
            group = self._full.pop()
            if group.fill == group.max_rows:
                self._hand_over_group(group)
        self._writer.gathering.advance()

    def finish(self, slot: int, metadata: Mapping[str, Any] | None = None) -> int:
        """Write the slot's episode. Returns and raises as `EpisodeSink.finish` does."""
        return self.take(slot).finish(metadata)

    def take(self, slot: int) -> EpisodeSink:
        """Take the slot's episode, to finish or discard later; the slot is free for the next one."""
        group, sink = self._steady.get(slot), self._require(slot)
        if group is not None and self._writer.gathers:
            # The rows are fetched together with those of many other steps.
            group.end(group.rows[slot], sink, self._hand_over_group)
        else:
            self._hand_over(slot)
        return self._release(slot)

    def discard(self, slot: int) -> None:
        """Drop the slot's episode."""
        self._release(slot).discard()

    def in_progress(self, slot: int) -> bool:
        return self._sinks[slot] is not None

    def steps_of(self, batch: StepBatch, given: Mapping[str, Any], rows: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row, {column: value, copied}) of a `step_batch` call, for rows whose episodes continue."""
        columns = {**given, **self._outcome(batch)}
        for row in rows:
            yield row, {name: copied(column[row]) for name, column in columns.items()}

    def go_on(self, slot: int, steps: Sequence[Mapping[str, Any]]) -> None:
        """Append steps from `steps_of`, in order, to the slot's episode that `start` began."""
        for step in steps:
            self._require(slot).append(dict(step))

    def forget_batches(self) -> None:
        """Release the known batches, and the memory that they are views into."""
        self._known.clear()
        self._last.clear()
        for slot in list(self._steady):
            self._leave_group(slot)

    # ---- row by row -------------------------------------------------------------------------------------------------

    def _step_apart(
        self, batch: StepBatch, given: Mapping[str, Any], rows: Sequence[int], snapshots: Sequence[bytes | None] | None
    ) -> list[int]:
        """`step_batch` through the sinks of the slots."""
        over_now = batch.terminated | batch.truncated
        ends = [row for row in rows if over_now[row]] if over_now.any() else []
        after, final, slots = self._seen(batch.observation), self._seen(batch.final_observation) if ends else {}, batch.slots.tolist()
        outcome: dict[str, Any] = {name: vars(batch)[name].tolist() for name in _OUTCOME}
        going, over = ([*{**given, **outcome, **seen}.items()] for seen in (after, final))
        for position, row in enumerate(rows):
            slot = slots[row]
            if self._steady:
                self._leave_group(slot)
            step = {name: column[row] for name, column in (over if row in ends else going)}
            self._require(slot).append(step, None if snapshots is None else snapshots[position])
        return ends

    def _release(self, slot: int) -> EpisodeSink:
        sink, self._sinks[slot] = self._require(slot), None
        if (group := self._steady.get(slot)) is not None:
            group.ready = False
        return sink

    def _require(self, slot: int) -> EpisodeSink:
        sink = self._sinks[slot]
        if sink is None:
            raise RecordingError(f"Slot {slot} has no episode in progress.")
        return sink

    # ---- batches that are known -------------------------------------------------------------------------------------

    def _step_known(self, batch: StepBatch, given: Mapping[str, Any], rows: Sequence[int] | None) -> list[int] | None:
        """`step_batch` for a known range in which episodes begin or end, or which moves; None if the range is not known."""
        known = next((known for known in self._known.values() if known.covers(batch)), None)
        absent = [] if rows is None else sorted(set(range(len(batch.slots))) - set(rows))
        if known is None or any(self._has_stepped(int(batch.slots[row])) for row in absent):
            return None
        if tuple(given) != known.given or batch.reward is known.last:
            if known.moved is not None and (place := _place_of(batch)) is not None:
                del self._known[id(known.place)]
                self._last.pop(place, None)
            return None
        rows_given = tuple(given.values())
        if known.moved is not None:
            known.last = batch.reward
            rows_given += batch.reward, batch.terminated, batch.truncated, batch.success, *(batch.observation[key] for key in known.moved)
        over: list[int] = [row for row in np.flatnonzero(batch.terminated | batch.truncated).tolist() if row not in absent]
        self._step_group(known.group, rows_given, over, self._seen(batch.final_observation) if over else {}, absent)
        return over

    def _has_stepped(self, slot: int) -> bool:
        """Whether a slot has an episode in progress with at least one step."""
        sink = self._sinks[slot]
        return sink is not None and sink.columns is not None

    def _get_to_know(self, batch: StepBatch, given: Mapping[str, Any]) -> None:
        """Remember a batch object that came a second time, or a range whose arrays differ from the last ones."""
        if (place := _place_of(batch)) is None:
            return
        last = self._last.get(place)
        if last is not batch:
            if len(self._last) >= _KNOWN_BATCHES:
                self._last.clear()
            self._last[place] = batch
            if last is None or last.reward is batch.reward:
                return
        if (known := self._known_of(batch, given, moves=last is not batch)) is not None:
            if len(self._known) >= _KNOWN_BATCHES:
                self._known.clear()
            self._known[id(known.place)] = known

    def _known_of(self, batch: StepBatch, given: Mapping[str, Any], *, moves: bool) -> _Known | None:
        """Range of a batch; `moves`: its steps arrive in new arrays. None if they must be recorded row by row: a column varies in size, the
        arrays' memory is not contiguous, or what moves is filmed, is no array, or is one array under two names."""
        outcome, moved = self._outcome(batch), None
        if moves:
            keys = {id(rows): key for key, rows in batch.observation.items() if isinstance(rows, np.ndarray)}
            moved = [keys.get(id(rows), "") for name, rows in outcome.items() if name not in _OUTCOME]
            if self._films is not None or "" in moved or len(set(moved)) < len(moved):
                return None
        layout = self._require(int(batch.slots[0])).columns or ()
        columns = {column.name: column for column in layout if column.name not in self._filmed}
        if columns.keys() != {*outcome, *given} or any(column.encoding != "array" for column in columns.values()):
            return None
        if any(array.shape != (len(batch.slots), *columns[name].shape) for name, array in outcome.items()):
            return None
        there, names = ({}, [*given, *outcome]) if moves else (outcome, list(given))
        try:
            group = SteadyGroup(batch.slots.tolist(), there, names, layout, _STEADY_BYTES * len(batch.slots) // self._num_slots)
        except ValueError:
            return None
        return _Known(replace(batch) if moves else batch, tuple(given), group, moved)

    def _outcome(self, batch: StepBatch) -> dict[str, Any]:
        """{column: [n, ...]} of a batch's recorded parts."""
        return {name: vars(batch)[name] for name in _OUTCOME} | self._seen(batch.observation)

    def _seen(self, observation: Observation) -> dict[str, Any]:
        """{column: [n, ...]} of the recorded parts of an observation."""
        parts = split(observation)
        around = () if self._observations_alone else (parts.state, parts.images)
        columns = columns_around(parts.observation, *around)
        return {name: rows for name, rows in columns.items() if name not in self._filmed} if self._filmed else columns

    # ---- steady groups ----------------------------------------------------------------------------------------------

    def _step_group(
        self,
        group: SteadyGroup,
        given: tuple[Any, ...],
        over: Sequence[int] = (),
        final: Mapping[str, np.ndarray] | None = None,
        absent: Sequence[int] = (),
    ) -> None:
        """Record one step of a steady group. Each slot that is not absent has an episode in progress.

        Args:
            group: group whose arrays contain the outcome.
            given: the other columns of the step, in the order of the group's names.
            over: rows whose episode ends.
            final: {column: [n, ...]} replacement columns for these rows.
            absent: rows of slots that did not step; their episode, if any, has no step yet.
        """
        if group.fill == group.max_rows:
            self._hand_over_group(group)
        if absent or not group.ready:
            self._enter_group(group, absent)
        group.keep(given)
        for row in absent:
            group.taken[row] = group.fill
        for row in over:
            group.correct(row, {name: rows[row] for name, rows in (final or {}).items()})
            self._require(group.slots[row]).is_over = True
            group.ready = False
        if group.fill == group.max_rows:
            self._full.append(group)

    def _enter_group(self, group: SteadyGroup, absent: Sequence[int]) -> None:
        """Move a group's slots into it from any earlier group, and what they handed over to files if it is much."""
        for row, slot in enumerate(group.slots):
            if row not in absent:
                sink = self._require(slot)
                if sink.is_over:
                    raise RecordingError(f"The episode of slot {slot} has ended: finish or discard it first.")
                if sink.columns is None:
                    sink.begin_as(group.layout)
                sink.spill()
            if self._steady.get(slot) is not group:
                self._leave_group(slot)
                self._steady[slot], group.taken[row] = group, group.fill
        group.ready = not absent

    def _leave_group(self, slot: int) -> None:
        if slot in self._steady:
            self._hand_over(slot)
            self._steady.pop(slot).ready = False

    def _hand_over(self, slot: int) -> None:
        group, sink = self._steady.get(slot), self._sinks[slot]
        if group is not None and sink is not None and (num_steps := group.fill - group.taken[group.rows[slot]]):
            sink.num_steps += num_steps
            sink.add_rows(dict(group.of_slot(group.rows[slot])), num_steps * group.step_bytes)

    def _hand_over_group(self, group: SteadyGroup) -> None:
        """Give all episodes their rows. Writes nothing, so that a full disk loses none; the next step may."""
        fill, parts, group.ready = group.fill, group.ended, False
        for slot, row in group.rows.items():
            sink, first = self._sinks[slot], group.taken[row]
            if sink is not None and self._steady.get(slot) is group and first < fill:
                sink.num_steps += fill - first
                parts.append((sink, row, first, fill))
        columns = group.of_all()
        for sink, row, first, stop in parts:
            if not sink.is_discarded:
                sink.add_rows({name: rows[row, first:stop] for name, rows in columns}, (stop - first) * group.step_bytes)


FOLDER = "episodes"
"""Folder of the recording in a run's folder."""


@dataclass
class _Slot:
    """Recording state of a slot."""

    index: int = 0
    """Number of the slot's episode since the restart."""
    recorded: bool = False
    """Whether the episode is recorded; decided at its first action."""
    fresh: bool = True
    """Whether the episode has had no action yet."""
    num_chunks: int = 0
    """Number of decisions in the episode."""
    version: int = 0
    """Version of the weights at the start of a recorded episode."""
    first: dict[str, Any] = field(default_factory=dict)
    """First observation of the episode; with its `steps` as columns, kept if checkpoints continue within episodes."""
    steps: list[dict[str, Any]] = field(default_factory=list)


class TrainingRecorder:
    """Records chosen episodes of the collectors into ``<run_dir>/episodes``.

    The choice follows from the episodes' seeds, so a resumed run chooses the same ones; episodes that it plays a second time are already in
    the recording and are skipped.

    Args:
        folder: folder of the recording; an existing one is continued.
        seeds: seeds of the slots of fixed rollouts.
        keeps_running: keep the data of running episodes so far, for `running`.

    Raises RecordingError: the folder contains a recording of another simulator, or a damaged one.
    """

    def __init__(
        self, folder: Path, info: RecordingInfo, config: RecordConfig, *, seeds: EpisodeSeeds, num_slots: int, keeps_running: bool = False
    ) -> None:
        self._keeps_running = keeps_running
        resume = (folder / RECORDING_FILE).is_file()
        self.num_recorded = len(open_recording(folder)) if resume else 0
        self._writer = RecordingWriter(folder, info, video=config.video, resume=resume, duplicates="skip")
        self._config, self._seeds, self._num_slots = config, seeds, num_slots
        self._sinks = BatchSinks(self._writer, num_slots, observations_alone=True)
        self._round = 0
        self._seed_of: Callable[[int], int | None] | None = None
        self._slots: list[_Slot] = []
        self._done: dict[str, np.ndarray] = {}
        """{column: [N, ...]} of each slot's action in flight."""

    # ---- fixed rollouts of all slots --------------------------------------------------------------------------------

    def restarted(self, seed_round: int, seed_of: Callable[[int], int | None] | None = None) -> None:
        """All slots begin new episodes, counted as `EnvManager.reset` does; their running episodes are dropped.
        `seed_of`: seed of a slot's episode if it does not follow from that count; None: no seed reproduces the episode."""
        self._seed_of = seed_of
        self._give_up()
        self._sinks.forget_batches()
        self._round, self._slots = seed_round, [_Slot() for _ in range(self._num_slots)]

    def running(self, slot: int) -> dict[str, Any]:
        """Plain state of a slot's episode, from which `taken_up` continues it: observations as they came, so that pictures are encoded
        again from the first one."""
        playing = self._slots[slot]
        columns = {name: _plain(stacked([step[name] for step in playing.steps])) for name in next(iter(playing.steps), ())}
        return {**vars(playing), "first": {key: _plain(value) for key, value in playing.first.items()}, "steps": columns}

    def taken_up(
        self,
        snapshots: Sequence[Snapshot],
        running: Sequence[Mapping[str, Any] | None],
        seed_of: Callable[[int], int | None] | None = None,
    ) -> None:
        """Continue the episodes that `running` described in all slots; None: an episode without a recorder at its start, which is not
        recorded. Episodes that the interrupted run finished after its checkpoint are not recorded again. `seed_of`: see `restarted`."""
        self.restarted(snapshots[0].stream.seed_round, seed_of)
        for slot, (snapshot, saved) in enumerate(zip(snapshots, running, strict=True)):
            if saved is None:
                self._slots[slot] = _Slot(snapshot.index, fresh=False)
                continue
            columns = saved["steps"]
            steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            playing = self._slots[slot] = _Slot(**{**saved, "steps": steps})
            playing.recorded = playing.recorded and not self._has(slot, playing)
            if playing.recorded:
                self._start(slot, playing, {key: [value] for key, value in playing.first.items()}, 0)
                self._sinks.go_on(slot, steps)

    def acted(self, slots: np.ndarray, observation: Observation, acted: ActedBatch, given: np.ndarray) -> list[bool]:
        """Note the actions that a batch of slots is about to receive.

        Args:
            slots: [n]
            observation: {key: [n, ...]} observed before the actions.
            acted: what the policy drew.
            given: [n, A] the simulator's actions, or chunks [n, K, A].

        Returns, for each slot, whether its episode is recorded, so that every step of its chunk must be observed (`Simulators.send`).
        """
        seen: Observation | None = None
        for row, slot in enumerate(slots.tolist()):
            playing = self._slots[slot]
            if playing.fresh:
                playing.fresh = False
                playing.version = acted.version
                seed = self._seed(slot, playing.index)
                playing.recorded = seed is not None and self._is_chosen(str(seed)) and not self._has(slot, playing)
                if playing.recorded:
                    seen = seen or split(observation).observation
                    self._start(slot, playing, seen, row)
                    if self._keeps_running:
                        playing.first = {key: copied(rows[row]) for key, rows in seen.items()}
        done = done_in_steps(acted, given) | {"policy_version": np.full(given.shape[: given.ndim - 1], acted.version)}
        if given.ndim == 3:
            numbers = np.array([self._slots[slot].num_chunks for slot in slots.tolist()])
            done["chunk"] = np.broadcast_to(numbers[:, None], given.shape[:2])
        for name, rows in done.items():
            if name not in self._done:
                self._done[name] = np.empty((self._num_slots, *rows.shape[1:]), rows.dtype)
            self._done[name][slots] = rows
        playing = [self._slots[slot] for slot in slots.tolist()]
        for one in playing:
            one.num_chunks += 1
        return [one.recorded for one in playing]

    def stepped(self, batch: StepBatch) -> None:
        """Note the outcome of the actions, as `EnvManager.recv` returns it."""
        slots = batch.slots.tolist()
        aborted = [] if batch.aborted is None else np.flatnonzero(batch.aborted).tolist()
        for row in aborted:
            if self._slots[slots[row]].recorded:
                self._sinks.discard(slots[row])
        rows = [row for row, slot in enumerate(slots) if self._slots[slot].recorded and row not in aborted]
        if rows:
            self._write(batch, rows)
        for summary in batch.episodes:
            if self._slots[summary.slot].recorded:
                # Seeds differ only if recorder and simulators count episodes differently.
                assert summary.seed == self._seed(summary.slot, self._slots[summary.slot].index), "another episode ended"
                self._count(self._sinks.finish(summary.slot, {"final_info": summary.final_info}))
        for slot in (*(slots[row] for row in aborted), *(summary.slot for summary in batch.episodes)):
            self._slots[slot] = _Slot(self._slots[slot].index + 1)

    # ---- groups of whole episodes -----------------------------------------------------------------------------------

    def chooses(self, seed: int, member: int) -> bool:
        """Whether to record a finished episode of this group member."""
        return self._is_chosen(f"{seed}/{member}")

    def finished(
        self,
        episode: Episode,
        given: np.ndarray,
        success: Sequence[bool] | np.ndarray,
        *,
        group: int,
        member: int,
        inner: Sequence[Observation] = (),
    ) -> None:
        """Record a finished episode of a group.

        Args:
            given: [T, A] the simulator's actions, or T texts; chunks [T, K, A].
            success: success of each step; [T, K] for chunks.
            inner: for each chunk {key: [K - 1, ...]} observed after its steps but the last.
        """
        if not self.chooses(episode.seed, member):
            return
        who = {"kind": "training", "group": group, "member": member}
        drawn = ActedBatch(np.empty(0), episode.action, episode.log_prob, 0)
        columns = done_in_steps(drawn, given) | {"policy_version": episode.policy_version, "success": np.asarray(success, bool)}
        columns["reward"] = np.asarray(episode.reward, np.float32)
        seen = split(episode.observation).observation
        if (executed := episode.executed) is not None:
            assert episode.chunk_reward is not None, "chunks come with the rewards of their steps"
            num_steps = executed.sum(axis=1)
            columns |= {"chunk": np.arange(len(executed)), "reward": episode.chunk_reward}
            columns = {name: np.repeat(rows, num_steps, 0) if rows.ndim == 1 else rows[executed] for name, rows in columns.items()}
            seen = {key: _interleaved(part, [own[key] for own in inner], num_steps) for key, part in seen.items()}
        length = len(columns["reward"])
        recorded = RecordedEpisode(
            seed=episode.seed,
            observation={key: _joined(part, episode.final_observation[key]) for key, part in seen.items()},
            action=columns["action"],
            reward=columns["reward"],
            terminated=last_only(length, episode.terminated),
            truncated=last_only(length, episode.truncated),
            success=columns["success"],
            sampled_action=columns.get("sampled_action"),
            # The mode was not drawn, so its log-probability is left out.
            log_prob=None if episode.metadata.get("greedy") else columns["log_prob"],
            policy_version=columns["policy_version"],
            chunk=columns.get("chunk"),
            metadata={**episode.metadata, "policy": who},
        )
        self._count(self._writer.add(recorded))

    def finished_turns(
        self,
        whose: Assignment,
        turns: Sequence[Turn],
        seen: Sequence[Mapping[str, Any]],
        success: Sequence[bool],
        *,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """Record a language agent's finished episode of T turns, each one step of the simulator, with the sampled texts.
        `seen`: [T + 1] {key: observation} before each turn and after the last."""
        assert len(seen) == len(turns) + 1, "a look before each step, and one after the last"
        actions = texts([turn.parsed.text for turn in turns])
        episode = Episode(
            observation={key: stacked([part[key] for part in seen[:-1]]) for key in seen[0]},
            action=actions,
            log_prob=np.array([[turn.log_prob.sum(dtype=np.float64)] for turn in turns], np.float32),
            reward=np.array([turn.game_reward for turn in turns], np.float32),
            terminated=terminated,
            truncated=truncated,
            success=any(success),
            seed=whose.seed,
            domain=whose.domain,
            policy_version=np.array([turn.version.min() for turn in turns], np.int64),
            final_observation=dict(seen[-1]),
            metadata={"greedy": whose.greedy, "answers": [turn.answer for turn in turns]},
        )
        self.finished(episode, actions, success, group=whose.group, member=whose.member)

    def close(self) -> None:
        """Drop episodes in progress and flush the rest."""
        self._give_up()
        self._writer.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _seed(self, slot: int, index: int) -> int | None:
        return self._seed_of(slot) if self._seed_of is not None else self._seeds.seed(slot, index, self._num_slots, self._round)

    def _has(self, slot: int, playing: _Slot) -> bool:
        """Whether a slot's episode is already in the recording."""
        seed = self._seed(slot, playing.index)
        return seed is not None and self._writer.has(seed, policy=_who(playing))

    def _start(self, slot: int, playing: _Slot, seen: Mapping[str, Any], row: int) -> None:
        seed = self._seed(slot, playing.index)
        assert seed is not None, "it is written down"
        self._sinks.start(slot, seed, seen, row, metadata={"policy": _who(playing)})

    def _is_chosen(self, name: str) -> bool:
        limit = self._config.max_episodes
        if limit is not None and self.num_recorded >= limit:
            return False
        digest = hashlib.blake2b(f"record/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._config.share * 2**64

    def _write(self, batch: StepBatch, rows: list[int]) -> None:
        """Record a step of the slots in these rows of a batch."""
        done = {name: column[batch.slots] for name, column in self._done.items()}
        for number, step in enumerate(_single_steps(batch)):
            own, now = done, rows
            if batch.executed is not None:
                own = {name: column[:, number] for name, column in done.items()}
                now = [row for row in rows if batch.executed[row, number]]
            if now:
                self._sinks.step_batch(step, own, rows=None if len(now) == len(batch.slots) else now)
            if self._keeps_running:
                over = step.terminated | step.truncated
                for row, shown in self._sinks.steps_of(step, own, [row for row in now if not over[row]]):
                    self._slots[int(batch.slots[row])].steps.append(shown)
        self._sinks.settle()

    def _count(self, number: int) -> None:
        self.num_recorded += number != SKIPPED

    def _give_up(self) -> None:
        for slot in range(self._num_slots):
            if self._sinks.in_progress(slot):
                self._sinks.discard(slot)
        self._slots = []


def _who(playing: _Slot) -> dict[str, Any]:
    return {"kind": "training", "version": playing.version}


def _plain(value: Any) -> Any:
    """Plain value for a checkpoint: texts of any length become a list."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def done_in_steps(acted: ActedBatch, given: np.ndarray) -> dict[str, np.ndarray]:
    """{column: [n, ...]} of a policy's actions; for chunks [n, K, ...], the units of each step.

    Sampled actions can be stored if they are a text, one choice, or one number per unit; a denoising chain is left out.
    """
    columns = {"log_prob": acted.log_prob}
    if acted.action.ndim == 1 or acted.action.shape[1] == acted.log_prob.shape[1]:
        columns["sampled_action"] = acted.action
    if given.ndim == 3:
        (num_rows, num_steps, dim), units = given.shape, columns
        columns = {name: rows.reshape(num_rows, -1, num_steps, dim).swapaxes(1, 2) for name, rows in units.items()}
        columns = {name: rows.reshape(num_rows, num_steps, -1) for name, rows in columns.items()}
    return {"action": given, **columns}


def _single_steps(batch: StepBatch) -> Iterator[StepBatch]:
    """Split a batch of chunks into one batch per step, with all rows, of which executed ones count; other batches pass unchanged."""
    if batch.executed is None or batch.chunk_reward is None or batch.chunk_success is None:
        yield batch
        return
    last = batch.executed.sum(axis=1) - 1
    for number in range(batch.executed.shape[1]):
        ends = last == number
        seen = {key: part.copy() for key, part in batch.observation.items()}
        for key, part in batch.inner.items():
            if number < part.shape[1]:
                seen[key][~ends] = part[~ends, number]
        yield replace(
            batch,
            observation=seen,
            reward=batch.chunk_reward[:, number],
            terminated=batch.terminated & ends,
            truncated=batch.truncated & ends,
            success=batch.chunk_success[:, number],
        )


def _interleaved(before: np.ndarray, inner: Sequence[np.ndarray], num_steps: np.ndarray) -> np.ndarray:
    """[sum of num_steps, ...]: observations before each step, from those before each chunk and those inside it."""
    room = np.empty((int(num_steps.sum()), *before.shape[1:]), before.dtype)
    firsts = np.cumsum(num_steps) - num_steps
    room[firsts] = before
    for first, steps, shown in zip(firsts.tolist(), num_steps.tolist(), inner, strict=True):
        room[first + 1 : first + steps] = shown[: steps - 1]
    return room


def _joined(part: np.ndarray, last: Value) -> np.ndarray:
    """Append the last observation: [T + 1, ...]."""
    if part.dtype != object:
        return np.concatenate([part, np.asarray(last, part.dtype)[None]])
    joined = np.empty(len(part) + 1, dtype=object)
    joined[:-1], joined[-1] = part, last
    return joined
