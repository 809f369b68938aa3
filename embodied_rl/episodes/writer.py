"""Writes whole episodes into a folder (docs/episodes.md): safe against being killed, and for several processes at once.

`EpisodeSink` receives an episode step by step and passes it on here; `RecordingWriter.add` takes a whole episode.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied_rl.episodes.buffers import Encoder, EpisodeRows
from embodied_rl.episodes.folder import INDEX_FILE, RECORDING_FILE, EpisodeAbout, part_folders, read_columns, read_index, read_info
from embodied_rl.episodes.layout import Column, VideoFormat, is_extra, layout_for
from embodied_rl.episodes.part import Gathered, PartWriter, create_part, resume_part
from embodied_rl.episodes.pictures import frame_rate
from embodied_rl.episodes.recording import RecordedEpisode, RecordingError, RecordingInfo
from embodied_rl.errors import UserError
from embodied_rl.files import cannot_write, fsync

SKIPPED = -1
"""Number returned for an episode that already exists."""
GATHER_S = 0.5
"""Seconds that a finished episode waits for others, if it may."""
_ENOUGH_EPISODES, _ENOUGH_BYTES = 16, 2**20
"""Numbers of waiting episodes and bytes from which `advance` writes."""
_MAX_EPISODES, _MAX_BYTES = 32, 2**22
"""Numbers of waiting episodes and bytes from which `add` writes first, while its caller waits."""
_SLICE_S = 50e-6
"""Approximate duration of one `advance`: simulator processes have work for a few hundred microseconds, and wait if it takes longer."""
_KNOWN_LAYOUTS = 64
SAME_SIM = ("target", "task", "kwargs", "max_episode_steps", "success_ends_episode")
"""Parts of the simulator's configuration that determine episodes; the rest is about processes."""

Duplicates = Literal["refuse", "skip", "allow"]


_Waiting = tuple[EpisodeAbout, Callable[[], list[list[np.ndarray]]]]
"""A finished episode that is not written yet, and the function that returns the rows of each column, in pieces [t, *shape]; called once."""


class Gathering:
    """Episodes of one part that wait to be written."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.waiting: list[_Waiting] = []
        self.deadline = 0.0
        """Time when they are due (time.perf_counter seconds)."""
        self._part: PartWriter | None = None
        self._bytes = 0
        self._work: Iterator[None] | None = None
        """Writer of waiting episodes, a bit per item."""
        self._behind = 0
        """Number in the part of the first episode after these."""

    def add(self, part: PartWriter, episode: _Waiting, num_steps: int) -> int:
        """Add a finished episode with all rows in memory to the part's queue.
        Returns the number that it will have in its part, unless an earlier one cannot be written. Raises as `flush` does."""
        are_many = len(self.waiting) >= _MAX_EPISODES or self._bytes >= _MAX_BYTES
        if part is not self._part or are_many or (self.waiting and time.perf_counter() >= self.deadline):
            self.flush()
            self._part = part
        if not self.waiting:
            self.deadline = time.perf_counter() + self.max_wait_s
        self.waiting.append(episode)
        self._bytes += part.step_bytes * num_steps
        return (part.num_episodes if self._work is None else self._behind) + len(self.waiting) - 1

    def advance(self) -> None:
        """Write a bit if the first episode has waited long enough, or enough are waiting. Raises as `flush` does."""
        if self._work is None:
            if not self.waiting:
                return
            are_enough = len(self.waiting) >= _ENOUGH_EPISODES or self._bytes >= _ENOUGH_BYTES
            if not are_enough and time.perf_counter() < self.deadline:
                return
            self._begin()
        self._go_on(time.perf_counter() + _SLICE_S)

    def flush(self) -> None:
        """Write all. Raises RecordingError: one contains NaN or infinity; the others are written; UserError: they cannot be written."""
        try:
            self._go_on(math.inf)
        finally:
            if self.waiting:
                self._begin()
                self._go_on(math.inf)

    def _begin(self) -> None:
        """Start writing the waiting episodes through `_go_on`."""
        assert self._part is not None
        waiting, self.waiting, self._bytes = self.waiting, [], 0
        self._work, self._behind = _written(waiting, self._part), self._part.num_episodes + len(waiting)

    def _go_on(self, until: float) -> None:
        while (work := self._work) is not None:
            self._work = None  # in case it raises
            for _ in work:
                self._work = work
                break
            if time.perf_counter() >= until:
                break


def _written(waiting: Sequence[_Waiting], part: PartWriter) -> Iterator[None]:
    """Write episodes, a bit per item. Raises as `Gathering.flush`."""
    errors: list[UserError] = []
    episodes: list[Gathered] = []
    for about, take in waiting:
        try:
            episodes.append((take(), about))
        except UserError as error:
            errors.append(error)
        yield
    try:
        yield from part.commit_together(episodes)
    except RecordingError:
        for gathered in episodes:
            try:
                yield from part.commit_together([gathered])
            except RecordingError as error:
                errors.append(error)
    if errors:
        raise errors[0]


class RecordingWriter:
    """Writes episodes into `folder`; a context manager, for one thread of one process.

    Every process can read a finished episode at once (or `gather_s` later), even after this process is killed. Several processes may write
    into one folder, each with `resume`; each writes its own parts. Files are flushed to disk only when the writer is closed, so a power
    failure may lose the last seconds.

    Args:
        folder: created if missing.
        video: storage of pictures. mp4: lossless for what a policy saw, small for `images` for people; png: both exact, larger and slower;
            raw: both as arrays.
        duplicates: what to do with an episode of a seed that this policy has already played in this task: refuse it, skip it (its number is
            `SKIPPED`) or add it. The policy is the one in the episode's metadata (``policy``), else the recording's.
        gather_s: seconds that a finished episode of states may wait to be written with others, which takes a fraction of the time. A
            waiting episode is lost when the process is killed, like an episode in progress. 0: each is written at once.

    Raises:
        RecordingError: the folder contains a recording (and `resume` is False), one of another simulator or policy, or a damaged one.
        UserError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        info: RecordingInfo,
        *,
        video: VideoFormat = "mp4",
        resume: bool = False,
        duplicates: Duplicates = "refuse",
        gather_s: float = 0.0,
    ) -> None:
        self.folder, self.info, self.video = Path(folder), info, video
        self._duplicates = duplicates
        self._fps = frame_rate(info.spec.control_hz)
        self._parts: list[PartWriter] = []
        self._layouts: dict[tuple[tuple[str, str, tuple[int, ...]], ...], tuple[Column, ...]] = {}
        self._resumable: list[Path] = []
        self._encoder = Encoder()
        self.gathering = Gathering(gather_s)
        """Finished episodes that are not written yet."""
        self._in_progress: dict[int, EpisodeRows] = {}
        """Episodes in progress by `id`."""
        self._known: set[tuple[int, str, str]] = set()
        self._policy = _identity(info.policy)
        _claim(self.folder, info, resume)
        if resume:
            self._resumable = part_folders(self.folder)
            for part in self._resumable:
                index = read_index(part / INDEX_FILE, len(read_columns(part)))
                for entry in map(index.entry, range(index.num_episodes)):
                    self._remember(EpisodeAbout(entry["seed"], entry["task"], None, entry["metadata"]))

    @property
    def seeds(self) -> AbstractSet[int]:
        """Seeds of the recorded episodes: those in the folder when this writer opened it, and those written since."""
        return {seed for seed, *_ in self._known}

    def has(self, seed: int, task: str | None = None, policy: Mapping[str, Any] | None = None) -> bool:
        """Whether an episode of this seed, task (None: the only one) and policy (None: the recording's) is recorded."""
        return (seed, task or self.info.spec.task, self._policy if policy is None else _identity(policy)) in self._known

    def add(self, episode: RecordedEpisode) -> int:
        """Write a whole episode. Returns its number in its part, or `SKIPPED`.
        Raises RecordingError: it does not fit the simulator, contains NaN or infinity, or is a refused duplicate."""
        about = EpisodeAbout(episode.seed, episode.task, episode.instruction, episode.metadata)
        if self.is_duplicate(about):
            return SKIPPED
        given = episode.columns()
        columns = self.columns_for({name: rows[0] for name, rows in given.items() if is_extra(name)})
        _require_columns(columns, given)
        rows = self.room_for(columns)
        try:
            for name, buffer in rows.buffers.items():
                buffer.extend(given[name])
            for mark in sorted(episode.snapshots):
                rows.keep_snapshot(episode.snapshots[mark], mark)
            return self.commit(columns, rows, about)
        finally:
            self.give_up(rows)

    def close(self) -> None:
        """Drop the episodes in progress, and flush everything to disk."""
        with ExitStack() as stack:
            # Called in the opposite order, each even if another fails.
            for part in self._parts:
                stack.callback(part.close)
            self._parts = []
            stack.callback(self._encoder.close)
            for rows in list(self._in_progress.values()):
                stack.callback(self.give_up, rows)
            stack.callback(self.flush)

    def flush(self) -> None:
        """Write the finished episodes that wait for others.
        Raises RecordingError: one contains NaN or infinity; the others are written; UserError: they cannot be written."""
        self.gathering.flush()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for `EpisodeSink` ----

    @property
    def gathers(self) -> bool:
        """Whether finished episodes may wait for others."""
        return self.gathering.max_wait_s > 0

    def columns_for(self, extras: Mapping[str, Any]) -> tuple[Column, ...]:
        """See `layout_for`; results are cached. Raises RecordingError as that does."""
        rows = {name: np.asarray(row) for name, row in extras.items()}
        key = tuple((name, row.dtype.str, row.shape) for name, row in rows.items())
        if key not in self._layouts:
            if len(self._layouts) >= _KNOWN_LAYOUTS:  # rows of texts vary in length
                self._layouts.clear()
            self._layouts[key] = layout_for(self.info.spec, self.video, extras)
        return self._layouts[key]

    def room_for(self, columns: tuple[Column, ...]) -> EpisodeRows:
        """Buffers for an episode in progress; `give_up` or the end of the writer frees them."""
        rows = EpisodeRows(columns, self._part_for(columns).folder, self._fps, self._encoder)
        self._in_progress[id(rows)] = rows
        return rows

    def give_up(self, rows: EpisodeRows) -> None:
        """Free the buffers of an episode that is written, or never will be."""
        if self._in_progress.pop(id(rows), None) is not None:
            rows.discard()

    def commit(self, columns: tuple[Column, ...], rows: EpisodeRows, about: EpisodeAbout) -> int:
        """Write a finished episode. Returns its number in its part, or `SKIPPED`."""
        if self.is_duplicate(about):
            return SKIPPED
        self.flush()
        number = self._part_for(columns).commit(rows, about)
        self._remember(about)
        return number

    def gather(self, columns: tuple[Column, ...], about: EpisodeAbout, num_steps: int, take: Callable[[], list[list[np.ndarray]]]) -> int:
        """Write a finished episode together with others; `take` is then called for the rows of its columns. Returns as `commit` does."""
        if self.is_duplicate(about):
            return SKIPPED
        number = self.gathering.add(self._part_for(columns), (about, take), num_steps)
        self._remember(about)
        return number

    def is_duplicate(self, about: EpisodeAbout) -> bool:
        """Whether to skip an episode. Raises RecordingError if it must be refused."""
        if self._duplicates == "allow" or self._key(about) not in self._known:
            return False
        if self._duplicates == "skip":
            return True
        raise RecordingError(
            f"'{self.folder}' holds an episode of seed {about.seed}, task '{about.task or self.info.spec.task}' and this policy already. "
            "Use other seeds, or choose to skip or allow duplicates."
        )

    # ---- inside ----

    def _part_for(self, columns: tuple[Column, ...]) -> PartWriter:
        """Part for episodes of these columns: one of this writer's, one that no process writes any more, or a new one."""
        for part in self._parts:
            if part.columns is columns or part.columns == columns:
                return part
        for folder in self._resumable:
            resumed = resume_part(folder, columns)
            if resumed is not None:
                self._resumable.remove(folder)
                break
        else:
            resumed = create_part(self.folder, columns)
        self._parts.append(resumed)
        return resumed

    def _key(self, about: EpisodeAbout) -> tuple[int, str, str]:
        policy = about.metadata.get("policy")
        return about.seed, about.task or self.info.spec.task, self._policy if policy is None else _identity(policy)

    def _remember(self, about: EpisodeAbout) -> None:
        self._known.add(self._key(about))


def _claim(folder: Path, info: RecordingInfo, resume: bool) -> None:
    """Create the folder and its ``recording.json``; only one of several processes writes it."""
    path = folder / RECORDING_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not the process's number: containers that share a disk have the same ones.
        temporary = folder / f".{RECORDING_FILE}.tmp-{uuid.uuid4().hex}"
        try:
            temporary.write_text(json.dumps(info.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            fsync(temporary)
            # Unlike a rename, a link fails if another process was first.
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return
    except FileExistsError as error:
        if not path.is_file():
            raise cannot_write(folder, error) from error
    except OSError as error:
        raise cannot_write(folder, error) from error
    except (TypeError, ValueError) as error:
        raise RecordingError(f"The recording's metadata must be valid JSON: {error}.") from error
    if not resume:
        raise RecordingError(f"'{folder}' already has a recording. Resume it (resume=True), or use another folder.")
    _require_same(folder, read_info(folder), info)


def _require_same(folder: Path, there: RecordingInfo, here: RecordingInfo) -> None:
    """Raise RecordingError if the episodes of two recordings cannot share a folder."""
    if here.selected_by_outcome and not there.selected_by_outcome:
        # Later readers could not tell which episodes are a fair sample.
        raise RecordingError(
            f"'{folder}' has episodes of every outcome, and these are chosen by success (only_success). Use another folder."
        )
    ours, theirs = json.loads(json.dumps(here.to_dict())), there.to_dict()
    differing = [f"spec.{key}" for key, value in ours["spec"].items() if theirs["spec"].get(key) != value]
    differing += [
        f"sim.{key}" for key in SAME_SIM if key in ours["sim"] and key in theirs["sim"] and ours["sim"][key] != theirs["sim"][key]
    ]
    differing += ["policy"] if _identity(ours["policy"]) != _identity(theirs["policy"]) else []
    if differing:
        name = differing[0]
        room, _, key = name.partition(".")
        here_value, there_value = (data[room][key] if key else data[room] for data in (ours, theirs))
        raise RecordingError(
            f"'{folder}' has a recording of another kind: {', '.join(differing)} differ ({name} is {there_value!r:.200} there and "
            f"{here_value!r:.200} here). Use another folder."
        )


def _identity(policy: object) -> str:
    return sys.intern(json.dumps(policy, sort_keys=True, default=str))  # one for all episodes of a policy


def _require_columns(columns: tuple[Column, ...], given: Mapping[str, Any]) -> None:
    """Raise RecordingError if the episode lacks a column of the simulator, or has one that the simulator lacks."""
    names = {column.name for column in columns}
    missing, unknown = sorted(names - given.keys()), sorted(given.keys() - names)
    if missing or unknown:
        raise RecordingError(f"The episode does not fit the simulator: it lacks {missing or 'nothing'} and adds {unknown or 'nothing'}.")
