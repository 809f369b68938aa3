"""An episode on its way into a recording, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

import numpy as np

from embodied_rl.episodes.buffers import SPILL_BYTES, BlobBuffer, Buffer, RowBuffer, VideoBuffer
from embodied_rl.episodes.films import Films
from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.part import PartWriter
from embodied_rl.episodes.recorded import OPTIONAL_COLUMNS
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.summary import SUMMED, summary_of


class EpisodeHome(Protocol):
    """Where a sink's episode goes: a `RecordingWriter`."""

    @property
    def gathers(self) -> bool:
        """Whether finished episodes may wait for others."""
        ...

    def columns_for(self, extras: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns of an episode whose first step has these extras. Raises RecordingError."""
        ...

    def part_for(self, columns: tuple[Column, ...]) -> PartWriter:
        """The part that takes episodes of these columns."""
        ...

    def room_in(self, part: PartWriter) -> tuple[dict[str, Buffer], BlobBuffer]:
        """Room for an episode in progress, and for its snapshots."""
        ...

    def gather(self, sink: EpisodeSink, about: Mapping[str, Any]) -> int:
        """Take a finished episode that may wait for others; its number."""
        ...

    def commit(
        self, part: PartWriter, buffers: Mapping[str, Buffer], snapshots: BlobBuffer, marks: list[int], summary: Mapping[str, Any]
    ) -> int:
        """Append a finished episode to a part; its number."""
        ...

    def forget(self, sink: EpisodeSink) -> None:
        """The episode is over, or given up."""
        ...


class EpisodeSink:
    """Takes one episode: `start`, `step` T times, then `finish` or `discard`. Made by `RecordingWriter.open_episode`.

    Values are copied at once, so that views into shared memory may be given. Pictures go to the encoder; other columns
    beyond a few MB wait in temporary files.
    """

    def __init__(
        self,
        writer: EpisodeHome,
        seed: int,
        task: str | None,
        instruction: str | None,
        metadata: Mapping[str, Any],
        films: Films | None = None,
    ) -> None:
        self.seed, self.num_steps = int(seed), 0
        self.filmed: Set[str] = films.columns if films else frozenset()
        """Names of columns whose pictures are encoded elsewhere: only the first is given here, and it is not written."""
        self.columns: tuple[Column, ...] | None = None
        """Known when the first step is."""
        self.buffers: dict[str, Buffer] = {}
        self._writer, self._task, self._instruction, self._metadata = writer, task, instruction, dict(metadata)
        self._films = films
        self._first: dict[str, Any] | None = None
        self.part: PartWriter | None = None
        """Known with the columns."""
        self.fetch: Callable[[], None] | None = None
        """Has the rows added that lie elsewhere (`SteadyGroup`); None: there are none."""
        self._late: list[Mapping[str, np.ndarray]] = []
        """Rows [t, *shape] of every column, to come behind the first observation and what is in the buffers."""
        self._late_bytes = 0
        self._snapshots: BlobBuffer | None = None
        self._marks: list[int] = []
        self._ended = self._closed = self.is_discarded = False

    def start(
        self,
        observation: Mapping[str, Any],
        state: Mapping[str, np.ndarray] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """What was there after the reset.

        Args:
            observation: {key: [...]} of this environment.
            state: {name: [...]} of the simulator; given here, it is due at every step.
            images: {camera: [H, W, 3] uint8}; given here, they are due at every step.
        """
        self._require(self._first is None and not self._closed, "has begun already")
        # The columns are known when the first step is: until then a copy waits.
        self._first = {name: _copied(value) for name, value in _around(observation, state, images).items()}

    def step(
        self,
        *,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        success: bool,
        observation: Mapping[str, Any],
        sampled_action: Any = None,
        log_prob: Any = None,
        value: float | None = None,
        policy_version: Any = None,
        chunk: int | None = None,
        state: Mapping[str, np.ndarray] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        snapshot: bytes | None = None,
    ) -> None:
        """One step; names and shapes are those of `RecordedEpisode`, without the time axis.

        Args:
            action: [A] what the simulator was given.
            reward, terminated, truncated, success: of the step.
            observation: {key: [...]} after the step; where the environment was reset at once, the episode's last, not the next one's first.
            sampled_action, log_prob, value, policy_version, chunk: given at the first step, they are due at every one.
            state, images: after the step.
            snapshot: of the moment before the step.

        Raises:
            RecordingError: the episode has ended, a field is missing, or has another shape than before.
        """
        row = {
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "success": success,
            "sampled_action": sampled_action,
            "log_prob": log_prob,
            "value": value,
            "policy_version": policy_version,
            "chunk": chunk,
        }
        after = _around(observation, state, images)
        if self.columns is None:
            self.begin({name: row[name] for name in OPTIONAL_COLUMNS if row[name] is not None})
        row.update(after)
        self._require(not self._ended and not self._closed, "has ended")
        if snapshot is not None:
            self.keep_snapshot(snapshot, self.num_steps)
        self.num_steps += 1
        self._ended = bool(terminated or truncated)
        try:
            for name, buffer in self.buffers.items():
                if name not in self.filmed:
                    buffer.append(row.pop(name))
        except KeyError as error:
            raise RecordingError(f"The episode of seed {self.seed} lacks {error} at step {self.num_steps - 1}.") from None
        for name in row:
            self._require(row[name] is None, f"had no '{name}' before, and has one")

    def finish(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Write the episode; it is readable from then on.

        Args:
            metadata: what else is known, added to what `open_episode` was given.

        Returns:
            Its number in its part, or `SKIPPED`.

        Raises:
            RecordingError: it has no step, or holds NaN or infinity (of one that waits for others, when it is written).
            UserError: it cannot be written.
        """
        self._require(self.num_steps > 0 and not self._closed, "has no steps to write")
        assert self.part is not None
        try:
            about: dict[str, Any] = {
                "seed": self.seed,
                "task": self._task,
                "instruction": self._instruction,
                "metadata": {**self._metadata, **(metadata or {})},
            }
            if self._may_wait():
                number = self._writer.gather(self, about)
                if number >= 0:  # its rows are taken later
                    self._closed = True
                    self._writer.forget(self)
                return number
            if self.fetch is not None:
                self.fetch()
            self.make_room()
            assert self._snapshots is not None
            if self._films is not None:
                for name in self.filmed:
                    buffer = self.buffers[name]
                    assert isinstance(buffer, VideoBuffer)
                    buffer.take_over(self._films.path(name, self.seed, self.num_steps + 1), self.num_steps + 1)
            summed = {name: np.concatenate(list(self.buffers[name].chunks())) for name in SUMMED}  # type: ignore[union-attr]
            summary = summary_of(**about, summed=summed)
            return self._writer.commit(self.part, self.buffers, self._snapshots, self._marks, summary)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give the episode up; nothing of it stays. Does nothing where it is finished."""
        if not self._closed:
            self._closed = self.is_discarded = True
            self._writer.forget(self)
            if self._snapshots is not None:
                discard(self.buffers, self._snapshots)
            if self._films is not None:
                self._films.remove(self.seed, self.num_steps + 1)

    # ---- for `step` and `SlotSinks` ----

    def begin(self, optional: Mapping[str, Any]) -> None:
        """Make room for the columns, which follow from the first step's optional ones, and write the first observation."""
        self._require(self._first is not None and not self._closed, "has not begun")
        assert self._first is not None
        extras = {**optional, **{name: value for name, value in self._first.items() if is_extra(name)}}
        columns = self._writer.columns_for(extras)
        self.begin_as(columns, self._writer.part_for(columns))
        self.make_room()

    def begin_as(self, columns: tuple[Column, ...], part: PartWriter) -> None:
        """As `begin`, where the columns are known; room for them is made when it is needed."""
        self._require(self._first is not None and not self._closed, "has not begun")
        self.columns, self.part = columns, part

    def add_late(self, rows: Mapping[str, np.ndarray], num_bytes: int) -> None:
        """Take rows [t, *shape] of every column, of its dtype, that are this episode's from now on; they count as steps already."""
        self._late.append(rows)
        self._late_bytes += num_bytes
        if self._late_bytes > SPILL_BYTES and not self._closed:
            self.make_room()

    def take_columns(self) -> list[list[np.ndarray]]:
        """Of each column its rows, in pieces [t, *shape], of an episode of which `_may_wait` holds; nothing of them stays here."""
        if self.fetch is not None:
            self.fetch()
        assert self.columns is not None
        if not self.buffers and self._begins_as(self.columns):
            assert self._first is not None
            # Without buffers, which would take longer than the rest.
            first, late = self._first, self._late
            self._first, self._late = {}, []
            return [
                [first[column.name][None], *[rows[column.name] for rows in late]]
                if column.per == "observation"
                else [rows[column.name] for rows in late]
                for column in self.columns
            ]
        self.make_room()
        taken = []
        for buffer in self.buffers.values():
            assert isinstance(buffer, RowBuffer)
            taken.append(list(buffer.chunks()))  # from a file what was fetched just now and is much
            buffer.discard()
        return taken

    def make_room(self) -> None:
        """Have buffers for what comes next, with all that came before in them."""
        assert self.columns is not None
        if not self.buffers:
            assert self.part is not None
            self.buffers, self._snapshots = self._writer.room_in(self.part)
            self._put_first()
        late, self._late, self._late_bytes = self._late, [], 0
        for rows in late:
            for name, part in rows.items():
                buffer = self.buffers[name]
                assert isinstance(buffer, RowBuffer)
                buffer.extend_block(part)

    def _begins_as(self, columns: tuple[Column, ...]) -> bool:
        """Whether the first observation is what the columns hold, to the dtype; a buffer says what is wrong, or converts it."""
        first = self._first or {}
        due = [column for column in columns if column.per == "observation"]
        return len(due) == len(first) and all(
            isinstance(value := first.get(column.name), np.ndarray) and value.shape == column.shape and value.dtype.str == column.dtype
            for column in due
        )

    def _may_wait(self) -> bool:
        """Whether all its rows are of fixed size, and in memory."""
        assert self.columns is not None
        if not self._writer.gathers or self._marks or any(column.encoding != "array" for column in self.columns):
            return False
        return all(isinstance(buffer, RowBuffer) and buffer.is_in_memory for buffer in self.buffers.values())

    def _put_first(self) -> None:
        """Write the first observation."""
        assert self.columns is not None
        assert self._first is not None
        for column in self.columns:
            if column.per == "observation":
                self._require(column.name in self._first, f"lacks '{column.name}' at its beginning, and")
                first = self._first.pop(column.name)
                if column.name not in self.filmed:
                    self.buffers[column.name].append(first)
        self._require(not self._first, f"has {sorted(self._first)}, which the simulator lacks, and")

    def keep_snapshot(self, snapshot: bytes, time: int) -> None:
        """Of the moment before step `time`."""
        assert self._snapshots is not None
        self._snapshots.append_bytes(bytes(snapshot))
        self._marks.append(time)

    def _require(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise RecordingError(f"The episode of seed {self.seed} {complaint} at step {self.num_steps}.")


def is_extra(name: str) -> bool:
    """Whether a column is one that the simulator's spec does not speak of."""
    return name in OPTIONAL_COLUMNS or name.startswith(("state.", "images."))


def discard(buffers: Mapping[str, Buffer], snapshots: BlobBuffer) -> None:
    """Let go of the temporary files of an episode."""
    for buffer in (*buffers.values(), snapshots):
        buffer.discard()


def _around(
    observation: Mapping[str, Any], state: Mapping[str, np.ndarray] | None, images: Mapping[str, np.ndarray] | None
) -> dict[str, Any]:
    columns = {f"observation.{key}": value for key, value in observation.items()}
    if state:
        columns.update({f"state.{name}": value for name, value in state.items()})
    if images:
        columns.update({f"images.{camera}": value for camera, value in images.items()})
    return columns


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)
