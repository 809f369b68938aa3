"""Play a set of seeds, each exactly once, and record the episodes, with any player in any simulator.

    consumes: seeds        waits for: a group's simulators        unblocked by: the other group's turn

One group of slots simulates while the player acts for the other. An episode depends only on its seed: a seed always plays in the same slot
and row of the player's batch, whose shape never changes, and has its own noise. So a recording that was killed and resumed equals an
uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, Protocol

import numpy as np

from embodied_rl.episodes.layout import Films
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.files import append_row
from embodied_rl.generation.base import Generator
from embodied_rl.rollout.batch_sinks import BatchSinks, done_in_steps
from embodied_rl.rollout.group_collector import EpisodeNoise
from embodied_rl.sim.instrumented import IMAGE, Split, plain_snapshot, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import ActionLayout, ActionSpec, EpisodeSummary, Observation, SimSpec, StepBatch


class Player(Protocol):
    """Chooses the actions of a recording: an expert or a generator."""

    draws: bool
    """Whether the player draws its actions with noise."""
    layout: ActionLayout | None
    """Layout of the player's actions; None: the simulator's own, step by step."""

    def act(self, seen: Split, noise: np.ndarray | None) -> dict[str, Any]:
        """{column: [n, ...]} of the actions for all rows, in arrays of their own; columns that are not known are left out. With chunks of K
        steps each has an axis [n, K, ...]. The columns, in this order:

        - action: [n, A] in the simulator's units, or n texts.
        - sampled_action: [n, A] normalised and unclipped; int64 action tokens for a policy that gives tokens.
        - log_prob: [n, L] under the acting policy; for chunks [n, K, L / K], the units of each step.
        - value: [n]; not known inside chunks.
        - policy_version: [n]

        `noise`: [n, noise_width] as for `Generator.send`, None if `draws` is False.
        """


class ExpertPlayer:
    """Plays the simulator's expert (`embodied_rl.sim.instrumented`). Implements `Player`."""

    draws = False
    layout: ActionLayout | None = None

    def act(self, seen: Split, noise: np.ndarray | None) -> dict[str, Any]:
        assert seen.expert_action is not None, "the simulator was made without an expert"
        return {"action": seen.expert_action.copy()}


class GeneratorPlayer:
    """Plays a generator: a policy's mode, or its samples with their log-probabilities. Implements `Player`.

    Args:
        generator: generator with published weights.
        draws: sample; False: play the mode, which has no log-probability because it is deterministic.
        layout: layout of the policy's actions, if they are not the simulator's own, normalised, step by step.
        values: also request values from a generator that has them; False: the policy has no critic.
    """

    def __init__(
        self, generator: Generator, action: ActionSpec, draws: bool, layout: ActionLayout | None = None, *, values: bool = True
    ) -> None:
        self.draws, self.layout = draws, layout
        self._generator, self._action = generator, action
        self._value: Callable[[Observation], np.ndarray] | None = generator.value if values and generator.has_values else None

    def act(self, seen: Split, noise: np.ndarray | None) -> dict[str, Any]:
        num_rows = len(next(iter(seen.observation.values())))
        self._generator.send(np.arange(num_rows), seen.observation, noise)
        acted = self._generator.recv()
        chunk_size = 1 if self.layout is None else self.layout.chunk_size
        done = done_in_steps(acted, acted.for_simulator(self._action, chunk_size))
        known = ("action", "sampled_action", "log_prob") if self.draws else ("action", "sampled_action")
        columns = {name: np.array(done[name]) for name in known if name in done}
        if self._value is not None and chunk_size == 1:
            value = self._value(seen.observation)
            columns["value"] = np.array(value if value.ndim == 1 else value[:, 0], np.float64)
        return columns | {"policy_version": np.full(done["log_prob"].shape[:-1], acted.version)}


@dataclass
class ChunkInPlay:
    """Chunk that a slot is playing."""

    columns: Mapping[str, Any]
    """{column: [n, K, ...]} that the player gave."""
    row: int
    """Row of the slot in the columns."""
    number: int
    """Number of the chunk in its episode."""
    next: int = 0
    """Index of the next step in the chunk."""

    @property
    def is_over(self) -> bool:
        return self.next >= self.columns["action"].shape[1]

    def take(self) -> dict[str, Any]:
        """Return {column: value} of the next step, and advance."""
        self.next += 1
        return {**{name: rows[self.row, self.next - 1] for name, rows in self.columns.items()}, "chunk": self.number}


_AHEAD = 4
"""Seeds per slot that may run ahead of the first undecided one, if only successes are kept."""

Outcome = Literal["recorded", "unsuccessful", "given_up"]


@dataclass(frozen=True)
class RecordingPlan:
    """Which episodes to record. Raises ValueError for impossible numbers."""

    num_episodes: int
    first_seed: int = 0
    """First seed; the plan plays first_seed, first_seed + 1, …"""
    only_success: bool = False
    """Keep the first `num_episodes` successful episodes in the order of seeds, not in the order of finishing."""
    max_seeds: int | None = None
    """Number of seeds after which an only_success recording stops; None: 10 × num_episodes."""
    noise_seed: int = 0
    """Seed of the player's randomness, combined with the episode's own seed."""
    snapshot_every: int | None = None
    """Number of steps between simulator snapshots; None: no snapshots."""
    max_retries: int = 2
    """Number of restarts of an episode that its simulator gave up. With on_fault=restart the neighbours in the same process are given up
    too; otherwise only this episode is."""

    def __post_init__(self) -> None:
        limits = (self.num_episodes, self.seed_limit, 1 if self.snapshot_every is None else self.snapshot_every)
        if min(limits) < 1 or min(self.first_seed, self.noise_seed, self.max_retries) < 0 or self.seed_limit < self.num_episodes:
            raise ValueError(f"A recording of impossible size: {self}.")

    @property
    def seed_limit(self) -> int:
        """Largest number of seeds to play."""
        if not self.only_success:
            return self.num_episodes
        return 10 * self.num_episodes if self.max_seeds is None else self.max_seeds


class SeedQueue:
    """Decides which slot plays which seed, and which episodes are kept. Numbers count seeds from the plan's first.

    Slot s of N plays the numbers s, s + N, … in this order.
    """

    def __init__(self, plan: RecordingPlan, num_slots: int, outcomes: Mapping[int, Outcome]) -> None:
        """`outcomes`: {number: outcome} from an earlier part of the recording."""
        self._plan, self._num_slots = plan, num_slots
        self._outcomes = dict(outcomes)
        self._next = list(range(num_slots))
        self._cursor, self.num_kept = 0, 0  # num_kept: the plan's episodes that are certain to stay
        self._held: set[int] = set()
        """Successful numbers that wait for earlier numbers."""
        self._advance()

    @property
    def done(self) -> bool:
        """Whether every number is decided."""
        return self.num_kept >= self._plan.num_episodes or self._cursor >= self._plan.seed_limit

    @property
    def missing(self) -> list[int]:
        """Numbers that were given up, ascending."""
        return sorted(number for number, outcome in self._outcomes.items() if outcome == "given_up")

    def take(self, slot: int) -> int | None:
        """Next number for the slot to play; None: nothing for now."""
        while (number := self._next[slot]) in self._outcomes:
            self._next[slot] += self._num_slots
        if self.done or number >= self._plan.seed_limit or (self._plan.only_success and not self._is_wanted(number)):
            return None
        self._next[slot] += self._num_slots
        return number

    def finished(self, number: int, outcome: Outcome) -> list[int]:
        """Note the outcome of a number; return the numbers of episodes to write now."""
        self._outcomes[number] = outcome
        if outcome == "recorded":
            self._held.add(number)
            if not self._plan.only_success:
                self._advance()
                self._held.discard(number)
                return [number]
        return self._advance()

    def _is_wanted(self, number: int) -> bool:
        """Whether a success would be kept even if every undecided number before it succeeded."""
        if number >= self._cursor + _AHEAD * self._num_slots:
            return False
        may_succeed = sum(self._outcomes.get(other, "recorded") == "recorded" for other in range(self._cursor, number))
        return self.num_kept + may_succeed < self._plan.num_episodes

    def _advance(self) -> list[int]:
        decided = []
        while not self.done and self._cursor in self._outcomes:
            if self._outcomes[self._cursor] == "recorded":
                self.num_kept += 1
                if self._cursor in self._held:
                    self._held.remove(self._cursor)
                    decided.append(self._cursor)
            self._cursor += 1
        return decided


ATTEMPTS_FILE = "attempts.jsonl"
"""File beside the parts of a recording: one line, with the reason, for each episode that was played and not recorded."""
_NOISE_STREAM = 3


@dataclass(frozen=True)
class RecordingResult:
    """Counts and missing seeds of a finished recording run."""

    num_recorded: int
    """Number of the plan's episodes in the recording, including those found at the start."""
    num_played: int
    """Number of episodes finished in this run."""
    num_successful: int
    """Number of successful episodes finished in this run."""
    num_steps: int
    """Number of steps in the episodes finished in this run."""
    missing: tuple[int, ...]
    """Seeds whose simulator failed after all retries."""
    complete: bool
    """Whether the recording contains all requested episodes."""


@dataclass
class _Playing:
    """Running episode of a slot."""

    number: int
    seed: int
    attempt: int
    noise: EpisodeNoise
    started: bool = False
    """Whether the first observation has arrived."""
    num_steps: int = 0
    snapshot: bytes | None = None
    """Snapshot from before the step in flight, if one is due."""
    chunk: ChunkInPlay | None = None
    """Current chunk of a player that acts in chunks."""


class Recorder:
    """Plays and records the episodes of a plan.

    Args:
        manager: manager of an `instrumented` simulator with ``autoreset=False``; its running episodes are lost.
        num_groups: number of slot groups that step in turns.
        films: where the simulators of a `filmed` configuration put their videos; None: this process encodes pictures.

    Raises UserError: snapshots are requested and the simulator has none.
    """

    def __init__(
        self,
        manager: EnvManager,
        player: Player,
        writer: RecordingWriter,
        plan: RecordingPlan,
        *,
        num_groups: int = 1,
        on_episode: Callable[[EpisodeSummary], object] | None = None,
        films: Films | None = None,
    ) -> None:
        if plan.snapshot_every is not None and manager.spec.snapshots not in ("exact", "approximate"):
            raise UserError(
                f"Task '{manager.spec.task}' has no snapshots (spec.snapshots is '{manager.spec.snapshots}'): its recorded seed and "
                "actions restore the same states. Set states=none."
            )
        self._manager, self._player, self._writer, self._plan = manager, player, writer, plan
        self._layout = player.layout or ActionLayout.of(manager.spec.action)
        self._on_episode = on_episode
        self._groups = split_slots(range(manager.num_slots), min(num_groups, manager.num_slots))
        self._seen = [_room(manager.spec, len(group)) for group in self._groups]
        self._playing: dict[int, _Playing] = {}
        self._moving: list[list[int]] = [[] for _ in self._groups]
        """Slots of each group with a reset or step in flight."""
        self._films = films
        self._sinks = BatchSinks(writer, manager.num_slots, films)
        self._acted: list[dict[str, Any]] = [{} for _ in self._groups]
        """{column: [rows of the group, ...]} of each group's actions in flight."""
        self._finished: dict[int, tuple[EpisodeSink, dict[str, Any]]] = {}
        self._attempts = Path(writer.folder) / ATTEMPTS_FILE
        self._queue = SeedQueue(plan, manager.num_slots, self._known())
        self._num_played = self._num_successful = self._num_steps = 0

    @property
    def num_recorded(self) -> int:
        """Number of the plan's episodes recorded so far."""
        return self._queue.num_kept

    def run(self) -> RecordingResult:
        """Record until the plan is complete. Raises SimFault: see EnvManager; UserError: the recording cannot be written."""
        for index in range(len(self._groups)):
            self._begin(index)
            self._act(index)
        while any(self._moving) and not self._queue.done:
            for index, moving in enumerate(self._moving):
                if moving:
                    self._take_in(index, self._manager.recv(_as_range(moving)))
                self._begin(index)
                self._act(index)
                self._sinks.settle()
        for slot, playing in self._playing.items():
            if playing.started:
                self._sinks.discard(slot)
        for sink, _ in self._finished.values():
            sink.discard()
        self._writer.flush()
        self._manager.discard()
        first = self._plan.first_seed
        return RecordingResult(
            num_recorded=self._queue.num_kept,
            num_played=self._num_played,
            num_successful=self._num_successful,
            num_steps=self._num_steps,
            missing=tuple(first + number for number in self._queue.missing),
            complete=self._queue.num_kept >= self._plan.num_episodes,
        )

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _known(self) -> dict[int, Outcome]:
        """Outcomes of seeds in an earlier part of this recording. Seeds that were given up are tried again."""
        first, limit = self._plan.first_seed, self._plan.seed_limit
        known: dict[int, Outcome] = {}
        if self._plan.only_success:
            known = {seed - first: "unsuccessful" for seed in unsuccessful_seeds(self._attempts) if 0 <= seed - first < limit}
        return known | {seed - first: "recorded" for seed in self._writer.seeds if 0 <= seed - first < limit}

    def _begin(self, index: int) -> None:
        """Begin the next episodes in a group's idle slots, and restart those that were given up."""
        group = self._groups[index]
        begun: list[int] = []
        for slot in group:
            if slot not in self._playing and (number := self._queue.take(slot)) is not None:
                self._playing[slot] = self._new(number, 0)
                begun.append(slot)
            elif slot in self._playing and not self._playing[slot].started:
                begun.append(slot)
        if not begun:
            return
        self._manager.begin(begun, [self._playing[slot].seed for slot in begun])
        if self._manager.spec.steps_together:
            # The others' next step would overwrite these rows, so they are taken in before it.
            self._take_in(index, self._manager.recv(_as_range(begun)))
            if not any(self._playing[slot].started for slot in group if slot in self._playing):
                self._begin(index)  # all were given up
        else:
            self._moving[index] = begun

    def _new(self, number: int, attempt: int) -> _Playing:
        seed = self._plan.first_seed + number
        return _Playing(number, seed, attempt, EpisodeNoise(self._layout, (self._plan.noise_seed, seed, _NOISE_STREAM)))

    def _take_in(self, index: int, batch: StepBatch) -> None:
        """Note the outcomes of a group's actions and its new observations."""
        group, seen = self._groups[index], self._seen[index]
        self._moving[index] = []
        places: np.ndarray | EllipsisType = batch.slots - group.start if len(batch.slots) < len(group) else ...
        for key, part in batch.observation.items():
            if key in seen:
                seen[key][places] = part
        summaries = {episode.slot: episode for episode in batch.episodes}
        now: Split | None = None
        stepped: list[int] = []
        for row, slot in enumerate(batch.slots.tolist()):
            playing = self._playing[slot]
            if batch.aborted is not None and batch.aborted[row]:
                self._gave_up(slot, playing)
            elif not playing.started:
                now = now or split(batch.observation)
                self._start(slot, playing, now, row)
            else:
                stepped.append(row)
        if stepped:
            ended = [row for row in stepped if int(batch.slots[row]) in summaries]
            self._stepped(index, batch, stepped)
            for row in ended:
                slot = int(batch.slots[row])
                playing = self._playing[slot]
                if self._films is not None and not self._films.are_whole(playing.seed, playing.num_steps + 1):
                    # Its simulator failed and restored the episode from a snapshot: the film of its earlier steps is lost.
                    self._gave_up(slot, playing)
                    continue
                del self._playing[slot]
                self._ended(slot, playing, summaries[slot])

    def _start(self, slot: int, playing: _Playing, seen: Split, row: int) -> None:
        instruction = seen.observation["instruction"][row] if "instruction" in seen.observation else None
        self._sinks.start(
            slot,
            playing.seed,
            seen.observation,
            row,
            task=None if seen.task is None else str(seen.task[row]),
            instruction=instruction if isinstance(instruction, str) else None,
            state=seen.state,
            images=seen.images,
        )
        playing.started = True

    def _stepped(self, index: int, batch: StepBatch, rows: list[int]) -> None:
        """Record a step of the slots in these rows of a batch."""
        slots, group, acted = batch.slots.tolist(), self._groups[index], self._acted[index]
        playing = [self._playing[slots[row]] for row in rows]
        snapshots = [one.snapshot for one in playing] if self._plan.snapshot_every is not None else None
        if len(slots) < len(group):
            acted = {name: _rows(column, [slot - group.start for slot in slots]) for name, column in acted.items()}
        self._sinks.step_batch(batch, acted, rows=None if len(rows) == len(slots) else rows, snapshots=snapshots)
        for one in playing:
            one.num_steps += 1

    def _ended(self, slot: int, playing: _Playing, summary: EpisodeSummary) -> None:
        assert summary.seed == playing.seed, "another episode ended"
        self._num_played += 1
        self._num_successful += summary.success_once
        self._num_steps += summary.length
        self._finished[playing.number] = self._sinks.take(slot), {"final_info": summary.final_info, "attempt": playing.attempt}
        keep = summary.success_once or not self._plan.only_success
        self._decide(playing.number, "recorded" if keep else "unsuccessful")
        if self._on_episode is not None:
            self._on_episode(summary)

    def _gave_up(self, slot: int, playing: _Playing) -> None:
        """Retry the seed after a simulator failure, or give it up."""
        if playing.started:
            self._sinks.discard(slot)
        if playing.attempt < self._plan.max_retries:
            self._playing[slot] = self._new(playing.number, playing.attempt + 1)
            return
        del self._playing[slot]
        self._decide(playing.number, "given_up")

    def _decide(self, number: int, outcome: Outcome) -> None:
        if outcome != "recorded":
            metadata: dict[str, Any] = {}
            if number in self._finished:
                sink, metadata = self._finished.pop(number)
                sink.discard()
            append_row(self._attempts, {"seed": self._plan.first_seed + number, "outcome": outcome, **metadata})
        for ready in self._queue.finished(number, outcome):
            sink, metadata = self._finished.pop(ready)
            sink.finish(metadata)

    def _act(self, index: int) -> None:
        """Let the player act for the whole group; send the actions to the slots that play."""
        group, seen = self._groups[index], split(self._seen[index])
        slots = [slot for slot in group if slot in self._playing and self._playing[slot].started]
        if not slots:
            return
        if self._layout.chunk_size == 1:
            self._acted[index] = self._ask(group, seen, slots)
        else:
            self._acted[index] = self._next_of_chunks(group, seen, slots)
        marks = self._snapshots(slots)
        for slot in slots:
            self._playing[slot].snapshot = marks.get(slot)
        self._manager.send(_as_range(slots), _rows(self._acted[index]["action"], [slot - group.start for slot in slots]))
        self._moving[index] = sorted([*self._moving[index], *slots])

    def _ask(self, group: range, seen: Split, slots: Sequence[int]) -> dict[str, Any]:
        """The player's columns for all rows of the group; the episodes of `slots` provide their noise."""
        noise, action = None, self._manager.spec.action
        if self._player.draws:
            noise = np.zeros((len(group), self._layout.noise_width), np.float32)
            for slot in slots:
                noise[slot - group.start] = self._playing[slot].noise.next()
        columns = self._player.act(seen, noise)
        acted = columns["action"]
        # The type of the simulator's slab.
        return {**columns, "action": [str(one) for one in acted] if action.kind == "text" else np.asarray(acted, action.dtype)}

    def _next_of_chunks(self, group: range, seen: Split, slots: Sequence[int]) -> dict[str, Any]:
        """{column: [rows of the group, ...]} of the next chunk step of each slot.

        When a chunk is over or an episode begins, the player acts for the whole group, so its batch keeps its shape.
        """
        due = [slot for slot in slots if (chunk := self._playing[slot].chunk) is None or chunk.is_over]
        if due:
            played = self._ask(group, seen, due)
            for slot in due:
                before = self._playing[slot].chunk
                self._playing[slot].chunk = ChunkInPlay(played, slot - group.start, 0 if before is None else before.number + 1)
        columns: dict[str, Any] = {}
        for slot in slots:
            chunk = self._playing[slot].chunk
            assert chunk is not None, "it was asked for"
            for name, value in chunk.take().items():
                part = np.asarray(value)
                if name not in columns:
                    columns[name] = np.zeros((len(group), *part.shape), part.dtype)
                columns[name][slot - group.start] = part
        return columns

    def _snapshots(self, slots: Sequence[int]) -> dict[int, bytes]:
        every = self._plan.snapshot_every
        if every is None:
            return {}
        due = [slot for slot in slots if self._playing[slot].num_steps % every == 0]
        return (
            {slot: plain_snapshot(snapshot).to_bytes() for slot, snapshot in zip(due, self._manager.snapshot(due), strict=True)}
            if due
            else {}
        )


def unsuccessful_seeds(path: Path) -> set[int]:
    """Seeds that were played without success, read from the file of attempts; a torn last line is ignored."""
    seeds = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            attempt = json.loads(line)
        except ValueError:
            continue
        if isinstance(attempt, dict) and attempt.get("outcome") == "unsuccessful":
            seeds.add(int(attempt["seed"]))
    return seeds


def _room(spec: SimSpec, num_slots: int) -> dict[str, np.ndarray]:
    """Empty observation arrays of a group; pictures for people are left out."""
    tensors = {key: np.zeros((num_slots, *part.shape), part.dtype) for key, part in spec.tensors.items() if not key.startswith(IMAGE)}
    return tensors | {key: np.full(num_slots, None, dtype=object) for key in spec.variables}


def _rows(column: np.ndarray | list[str], rows: Sequence[int]) -> np.ndarray | list[str]:
    return column[list(rows)] if isinstance(column, np.ndarray) and column.dtype != object else [column[row] for row in rows]


def _as_range(slots: Sequence[int]) -> range | Sequence[int]:
    """Contiguous slots as a range, the manager's fast path."""
    return range(slots[0], slots[-1] + 1) if len(slots) == slots[-1] - slots[0] + 1 else slots
