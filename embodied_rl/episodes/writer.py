"""Records episodes into a folder (docs/episodes.md): as they come, safe against being killed, by several processes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied_rl.episodes.buffers import BlobBuffer, Buffer, Encoder
from embodied_rl.episodes.films import Films
from embodied_rl.episodes.gathering import Gathering
from embodied_rl.episodes.index import INDEX_FILE, Index, read_index
from embodied_rl.episodes.info import RECORDING_FILE, read_info
from embodied_rl.episodes.layout import SNAPSHOT_COLUMN, Column, VideoFormat, layout_for
from embodied_rl.episodes.opening import part_folders, read_columns
from embodied_rl.episodes.part import PartWriter, create_part, resume_part
from embodied_rl.episodes.pictures import frame_rate
from embodied_rl.episodes.recorded import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import EpisodeSink, discard, is_extra
from embodied_rl.episodes.summary import SUMMED, summary_of
from embodied_rl.files import cannot_write, fsync

SKIPPED = -1
"""Number of an episode that was there already."""
_KNOWN_LAYOUTS = 64
_SAME_SIM = ("target", "task", "kwargs", "max_episode_steps", "success_ends_episode")
"""What of the simulator's configuration decides how episodes go; the rest is about processes."""

__all__ = ["SKIPPED", "EpisodeSink", "RecordingWriter"]

Duplicates = Literal["refuse", "skip", "allow"]


class RecordingWriter:
    """Writes episodes into `folder`; a context manager, for one thread of one process.

    Every finished episode is readable from then on (or `gather_s` later), by any process, and stays so when this one is killed. Several
    processes may write into one folder, each with `resume`; each writes its own parts. What a power failure does to the last seconds
    is the file system's affair: files are flushed to the disk when the writer is closed.

    Args:
        folder: made where it is missing.
        info: what all episodes share.
        video: how pictures are stored. mp4: what a policy saw losslessly, `images` for people small; png: both exact, larger and
            slower; raw: both as arrays.
        resume: add to what is there.
        duplicates: what to do with an episode of a seed that this policy has played in this task already: refuse it, skip it
            (its number is `SKIPPED`) or still add it. The policy is the one that the episode's metadata name
            (``policy``), else the recording's.
        gather_s: how long a finished episode of states may wait for others to be written together with, which takes a fraction of the
            time. One that waits is lost when the process is killed, as an episode in progress is. 0: every one is written at once.

    Raises:
        RecordingError: the folder holds a recording (and `resume` is False), one of another simulator or policy, or a damaged one.
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
        self._open: list[EpisodeSink] = []
        self._seeds: set[int] = set()
        self._known: set[tuple[int, str, str]] = set()
        self._policy = _identity(info.policy)
        _claim(self.folder, info, resume)
        if resume:
            self._resumable = part_folders(self.folder)
            for part in self._resumable:
                self._learn(read_index(part / INDEX_FILE, len(read_columns(part))))

    @property
    def seeds(self) -> AbstractSet[int]:
        """Seeds of the recorded episodes: those in the folder when this writer opened it, and those that it has written since."""
        return self._seeds

    def has(self, seed: int, task: str | None = None, policy: Any = None) -> bool:
        """Whether an episode of this seed, task (None: the only one) and policy (None: the recording's) is recorded."""
        return (seed, task or self.info.spec.task, self._policy if policy is None else _identity(policy)) in self._known

    def open_episode(
        self,
        seed: int,
        *,
        task: str | None = None,
        instruction: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        films: Films | None = None,
    ) -> EpisodeSink:
        """Begin an episode; any number may be in progress. `films`: the columns whose videos are encoded elsewhere.

        Raises RecordingError where it is a duplicate, and these are refused.
        """
        self._refuse_duplicate(seed, task, dict(metadata or {}))
        sink = EpisodeSink(self, seed, task, instruction, dict(metadata or {}), films)
        self._open.append(sink)
        return sink

    def add(self, episode: RecordedEpisode) -> int:
        """Write a whole episode. Returns its number in its part, or `SKIPPED`.

        Raises:
            RecordingError: it does not fit the simulator, holds NaN or infinity, or is a duplicate and these are refused.
        """
        if self._refuse_duplicate(episode.seed, episode.task, episode.metadata):
            return SKIPPED
        columns = episode.columns()
        extras = {name: rows[0] for name, rows in columns.items() if is_extra(name)}
        part = self.part_for(self.columns_for(extras))
        buffers, snapshots = self.room_in(part)
        try:
            _require_columns(part.columns, columns)
            for name, buffer in buffers.items():
                buffer.extend(columns[name])
            for mark in sorted(episode.snapshots):
                snapshots.append_bytes(episode.snapshots[mark])
            summary = summary_of(
                episode.seed, episode.task, episode.instruction, episode.metadata, {name: columns[name] for name in SUMMED}
            )
            return self.commit(part, buffers, snapshots, sorted(episode.snapshots), summary)
        finally:
            discard(buffers, snapshots)

    def close(self) -> None:
        """Give up the episodes in progress, and flush everything to the disk."""
        with ExitStack() as stack:
            # Called in the opposite order, each even if another fails.
            for part in self._parts:
                stack.callback(part.close)
            self._parts = []
            stack.callback(self._encoder.close)
            for sink in list(self._open):
                stack.callback(sink.discard)
            stack.callback(self.flush)

    def flush(self) -> None:
        """Write the finished episodes that wait for others.

        Raises:
            RecordingError: one holds NaN or infinity; the others are written.
            UserError: they cannot be written.
        """
        self.gathering.flush()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for `EpisodeSink` ----

    def part_for(self, columns: tuple[Column, ...]) -> PartWriter:
        """The part that takes episodes of these columns: one of ours, one that no process writes any more, or a new one."""
        for part in self._parts:
            if part.columns == columns:
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

    def commit(
        self, part: PartWriter, buffers: Mapping[str, Buffer], snapshots: BlobBuffer, marks: list[int], summary: Mapping[str, Any]
    ) -> int:
        """Append a finished episode to a part."""
        if self._refuse_duplicate(summary["seed"], summary["task"], summary["metadata"]):
            return SKIPPED
        self.flush()
        number = part.commit(buffers, snapshots, marks, summary)
        self._remember(summary["seed"], summary["task"], summary["metadata"])
        return number

    @property
    def gathers(self) -> bool:
        """Whether finished episodes may wait for others."""
        return self.gathering.max_wait_s > 0

    def gather(self, sink: EpisodeSink, about: Mapping[str, Any]) -> int:
        """Take a finished episode that may wait for others, `about` as `summary_of` takes it. Returns its number, or `SKIPPED`."""
        if self._refuse_duplicate(about["seed"], about["task"], about["metadata"]):
            return SKIPPED
        number = self.gathering.add(sink, about)
        self._remember(about["seed"], about["task"], about["metadata"])
        return number

    def columns_for(self, extras: Mapping[str, Any]) -> tuple[Column, ...]:
        """See `layout_for`; what was asked for before is remembered. Raises RecordingError as that does."""
        rows = {name: np.asarray(row) for name, row in extras.items()}
        key = tuple((name, row.dtype.str, row.shape) for name, row in rows.items())
        if key not in self._layouts:
            if len(self._layouts) >= _KNOWN_LAYOUTS:  # rows of words are of any length
                self._layouts.clear()
            self._layouts[key] = layout_for(self.info.spec, self.video, extras)
        return self._layouts[key]

    def room_in(self, part: PartWriter) -> tuple[dict[str, Buffer], BlobBuffer]:
        """Room for an episode in progress, and for its snapshots."""
        return part.buffers(self._fps, self._encoder), BlobBuffer(SNAPSHOT_COLUMN, part.folder)

    def forget(self, sink: EpisodeSink) -> None:
        self._open.remove(sink)

    # ---- duplicates ----

    def _learn(self, index: Index) -> None:
        for number in range(index.num_episodes):
            entry = index.entry(number)
            self._remember(entry["seed"], entry["task"], entry["metadata"])

    def _key(self, seed: int, task: str | None, metadata: Mapping[str, Any]) -> tuple[int, str, str]:
        policy = metadata.get("policy")
        return seed, task or self.info.spec.task, self._policy if policy is None else _identity(policy)

    def _remember(self, seed: int, task: str | None, metadata: Mapping[str, Any]) -> None:
        self._seeds.add(seed)
        self._known.add(self._key(seed, task, metadata))

    def _refuse_duplicate(self, seed: int, task: str | None, metadata: Mapping[str, Any]) -> bool:
        """Whether to skip an episode. Raises RecordingError where it is to be refused."""
        if self._duplicates == "allow" or self._key(seed, task, metadata) not in self._known:
            return False
        if self._duplicates == "skip":
            return True
        raise RecordingError(
            f"'{self.folder}' holds an episode of seed {seed}, task '{task or self.info.spec.task}' and this policy already. "
            "Take other seeds, or say that duplicates are to be skipped or allowed."
        )


def _claim(folder: Path, info: RecordingInfo, resume: bool) -> None:
    """Make the folder and its ``recording.json``; only one of several processes writes it."""
    path = folder / RECORDING_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{RECORDING_FILE}.tmp-{os.getpid()}"
        try:
            temporary.write_text(json.dumps(info.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            fsync(temporary)
            # Unlike a rename, a link fails where another process was first.
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
        raise RecordingError(f"What describes the recording must be what JSON can hold: {error}.") from error
    if not resume:
        raise RecordingError(f"'{folder}' holds a recording already. Resume it (resume=True), or take another folder.")
    _require_same(folder, read_info(folder), info)


def _require_same(folder: Path, there: RecordingInfo, here: RecordingInfo) -> None:
    """Raise RecordingError where episodes of one recording cannot stand beside those of the other."""
    ours, theirs = json.loads(json.dumps(here.to_dict())), there.to_dict()
    differing = [f"spec.{key}" for key, value in ours["spec"].items() if theirs["spec"].get(key) != value]
    differing += [
        f"sim.{key}" for key in _SAME_SIM if key in ours["sim"] and key in theirs["sim"] and ours["sim"][key] != theirs["sim"][key]
    ]
    differing += ["policy"] if _identity(ours["policy"]) != _identity(theirs["policy"]) else []
    if differing:
        name = differing[0]
        room, _, key = name.partition(".")
        here_value, there_value = (data[room][key] if key else data[room] for data in (ours, theirs))
        raise RecordingError(
            f"'{folder}' holds a recording of another kind: {', '.join(differing)} differ ({name} is {there_value!r:.200} there and "
            f"{here_value!r:.200} here). Take another folder."
        )


def _identity(policy: Any) -> str:
    return json.dumps(policy, sort_keys=True, default=str)


def _require_columns(columns: tuple[Column, ...], given: Mapping[str, Any]) -> None:
    """Raise RecordingError where the episode lacks what the simulator has, or has what it lacks."""
    names = {column.name for column in columns}
    missing, unknown = sorted(names - given.keys()), sorted(given.keys() - names)
    if missing or unknown:
        raise RecordingError(f"The episode does not fit the simulator: it lacks {missing or 'nothing'} and adds {unknown or 'nothing'}.")
