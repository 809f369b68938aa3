"""Readers of recordings; those in the native format (docs/episodes.md) are memory-mapped."""

from __future__ import annotations

import bisect
import json
import math
import mmap
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from embodied_rl.episodes import folder as files
from embodied_rl.episodes.layout import SNAPSHOT_COLUMN, Column, Per, decode_row, layout_for
from embodied_rl.episodes.pictures import Frames, VideoError, VideoReader
from embodied_rl.episodes.recording import (
    OPTIONAL_COLUMNS,
    EpisodeBlock,
    EpisodeTable,
    RecordedEpisode,
    RecordedStep,
    Recording,
    RecordingError,
    RecordingInfo,
    cut_by_steps,
    damaged,
    fields_of,
    joined,
    raised_as_damage,
    runs_of,
)
from embodied_rl.errors import brief, did_you_mean
from embodied_rl.reading import open_regular

__all__ = ["NativeRecording", "Recording", "RecordingError", "open_recording"]

OPEN_VIDEOS = 8
"""Number of videos kept open: neighbouring pictures are read one after another."""
MAPPED_BYTES = 2**25
"""Number of bytes read after which mapped pages are released; they stay in the system's page cache."""


def open_recording(path: Path | str, *, verify: bool = True) -> Recording:
    """Open a recording of any format.
    `verify`: native format: check data against its checksum at the first read. False: verified data is read again a little faster.
    Raises RecordingError: there is none, or it is damaged; the message names the file, the episode and the field."""
    path = Path(path)
    if (path / files.RECORDING_FILE).is_file():
        return NativeRecording(path, verify=verify)
    if not path.exists():
        parent = path.parent if path.parent.is_dir() else Path()
        raise RecordingError(f"Recording '{path}' does not exist.{did_you_mean(path.name, (entry.name for entry in parent.iterdir()))}")
    from embodied_rl.episodes.formats import open_foreign

    return open_foreign(path)


class NativeRecording(Recording):
    """A folder from `RecordingWriter`, in its state when it was opened; it may be written meanwhile.

    Arrays of an episode are read-only views into the files; they are valid until the recording is closed.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        info = files.read_info(path)
        self._parts = [PartReader(folder, info, verify) for folder in files.part_folders(path)]
        super().__init__(path, info, _joined([part.index.table for part in self._parts]))
        self._ends = np.cumsum([part.index.num_episodes for part in self._parts]).tolist()
        self._handed_out = 0

    def episode(self, number: int) -> RecordedEpisode:
        part, local = self.place(number)
        self._count(part, int(part.index.table.lengths[local]) + 1)
        return part.episode(local)

    def step(self, number: int, time: int) -> RecordedStep:
        part, local = self.place(number)
        # A page fault also loads the pages around it.
        self._count(part, 2**16 // max(1, part.bytes_per_step) + 1)
        return part.step(local, time)

    def column(self, name: str) -> list[np.ndarray]:
        """All rows of a column of plain arrays at once: a view [rows, ...] per part that has it, in the order of episodes.

        Names as in `RecordedEpisode`, with the key after a dot: ``observation.state``. This is the fastest way to read a whole recording.
        Raises RecordingError: no part has a column of this name that is a plain array.
        """
        parts = [part for part in self._parts if name in part.by_name and part.by_name[name].encoding == "array"]
        found = [part.run(part.by_name[name], 0, part.index.num_episodes) for part in parts]
        if not found:
            names = {column.name for part in self._parts for column in part.columns if column.encoding == "array"}
            raise RecordingError(f"'{self.path}' has no arrays '{name}'.{did_you_mean(name, names)}")
        return found

    def _read_block(self, positions: np.ndarray, columns: Sequence[str]) -> EpisodeBlock:
        starts = np.concatenate([[0], self._ends])
        found: dict[str, list[np.ndarray]] = {name: [] for name in columns}
        for first, stop in runs_of(positions):
            while first < stop:
                index = bisect.bisect_right(self._ends, first)
                last = min(stop, self._ends[index])
                part, local = self._parts[index], (first - int(starts[index]), last - int(starts[index]))
                self._count(part, int(self.lengths[first:last].sum()) + last - first)
                for name, rows in found.items():
                    column = part.by_name.get(name)
                    if column is None:
                        raise self._lacks(name, part.by_name)
                    rows.append(part.run(column, *local))
                first = last
        return EpisodeBlock(positions, self.lengths[positions], {name: joined(rows) for name, rows in found.items()})

    def _block_ends(self, max_steps: int) -> list[int]:
        ends, first = list[int](), 0
        # Each part's rows are in separate files.
        for stop in self._ends:
            ends += [first + end for end in cut_by_steps(self.lengths[first:stop], max_steps)]
            first = stop
        return ends

    def _checked(self, block: EpisodeBlock) -> EpisodeBlock:
        bad = block.first_not_finite(name for name in ("action", "reward") if name in block.columns)
        if bad is not None:
            number, name = bad
            part, local = self.place(number)
            raise part.damaged(part.by_name[name], local, "holds NaN or infinity")
        return super()._checked(block)

    def place(self, number: int) -> tuple[PartReader, int]:
        """The part that contains an episode, and its number there. Raises IndexError."""
        position = self._position(number)
        part = bisect.bisect_right(self._ends, position)
        return self._parts[part], position - (self._ends[part - 1] if part else 0)

    def damage(self, number: int) -> list[str]:
        part, local = self.place(number)
        return part.damage(local)

    def fingerprint(self, number: int) -> Hashable:
        part, local = self.place(number)
        entry = part.index.entry(local)
        return entry["seed"], entry["task"], json.dumps(entry["metadata"].get("policy"), sort_keys=True), tuple(entry["crc32"])

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _count(self, part: PartReader, num_rows: int) -> None:
        self._handed_out += num_rows * part.bytes_per_step
        if self._handed_out > MAPPED_BYTES:
            self._handed_out = 0
            for each in self._parts:
                each.release_pages()


class PartReader:
    """Files of one part, mapped on first use."""

    def __init__(self, folder: Path, info: RecordingInfo, verify: bool = True) -> None:
        self.folder, self.columns = folder, files.read_columns(folder)
        _require_fit(folder, self.columns, info)
        self.index: files.Index = files.read_index(folder / files.INDEX_FILE, len(self.columns))
        self.by_name = {column.name: column for column in self.columns}
        self._offsets = files.array_offsets(folder, self.columns, self.index)
        self.bytes_per_step = sum(column.row_bytes for column in self.columns if column.encoding == "array")
        self._starts: dict[Per, list[int]] = {per: self.index.starts(per).tolist() for per in get_args(Per)}
        self._seen = [column for column in self.columns if column.name.startswith("observation.")]
        self._finite = [column for column in self.columns if column.name in ("action", "reward") and column.must_be_finite]
        self._maps: dict[str, tuple[mmap.mmap, np.ndarray]] = {}
        self._blobs: dict[str, mmap.mmap | bytes] = {}
        self._videos: OrderedDict[tuple[str, int], VideoReader] = OrderedDict()
        # [C + 1, E] whether data was checked against its checksum, snapshots last.
        self._verified = np.full((len(self.columns) + 1, self.index.num_episodes), not verify)
        self._numbers = {column.name: number for number, column in enumerate((*self.columns, SNAPSHOT_COLUMN))}

    def episode(self, number: int) -> RecordedEpisode:
        """Read an episode. Raises RecordingError if its data are damaged."""
        entry = self.index.entry(number)
        where = {per: slice(starts[number], starts[number + 1]) for per, starts in self._starts.items()}
        if not self._verified[:, number].all():  # the other columns are verified when they are read
            for column in self.columns:
                if column.encoding == "array":
                    self.verify(column, number)
        read = {}
        for column in self.columns:
            read[column.name] = self.rows(column)[where[column.per]] if column.encoding == "array" else self.column(column, number)
        for column in self._finite:  # they are few, and NaN in them would spread into training
            if not np.isfinite(read[column.name]).all():
                raise self.damaged(column, number, "holds NaN or infinity")
        about = {name: entry[name] for name in files.ABOUT_KINDS}
        snapshots = self.snapshots(number)
        try:
            return RecordedEpisode(**fields_of(read), **about, snapshots=snapshots, same_lengths=True)
        except ValueError as error:
            raise damaged(self.folder, str(error).rstrip("."), number) from error

    def step(self, number: int, time: int) -> RecordedStep:
        """Read a step. Raises IndexError, or RecordingError if its data are damaged."""
        length = int(self.index.table.lengths[number])
        if not 0 <= time < length:
            raise IndexError(f"Episode {number} has {length} steps; step {time} does not exist.")
        return RecordedStep.of(
            {column.name: self.row(column, number, time) for column in self.columns},
            {column.name: self.row(column, number, time + 1) for column in self._seen},
        )

    # ---- columns ----

    def column(self, column: Column, number: int) -> Any:
        """All rows of an episode: a view, an object array, or pictures that are decoded on access."""
        if column.is_picture:
            count = self._count(column, number)
            if column.is_video:
                # Opened and verified now, to find a damaged file now, since copies are made of the file as it is.
                self._video(column, number)
                self.verify(column, number)
            video = (self._path(column, number), column.encoding) if column.is_video else None
            return Frames(count, column.shape, lambda time: self.row(column, number, time), video)
        self.verify(column, number)
        rows = self._rows_of(column, number)
        if column.encoding == "array":
            return rows
        values = [self.row(column, number, time) for time in range(len(rows))]
        if column.encoding == "arrays" and not column.name.startswith("observation."):
            # Rows of one message each, with one shape within an episode.
            try:
                return np.stack(values)
            except ValueError as error:
                raise self.damaged(column, number, f"holds rows of several shapes ({error})") from error
        return np.fromiter(values, object, len(rows))

    def run(self, column: Column, first: int, stop: int) -> np.ndarray:
        """All rows of neighbouring episodes in order: a view if they are plain arrays."""
        if column.encoding != "array":
            return joined([self.column(column, number) for number in range(first, stop)])
        for number in np.flatnonzero(~self._verified[self._numbers[column.name], first:stop]).tolist():
            self.verify(column, first + number)
        starts = self._starts[column.per]
        return self.rows(column)[starts[first] : starts[stop]]

    def row(self, column: Column, number: int, time: int) -> Any:
        self.verify(column, number)
        if column.is_video:
            try:
                return self._video(column, number).read(time)
            except VideoError as error:
                raise self.damaged(column, number, str(error)) from error
        if column.encoding == "array":
            return self.rows(column)[self._starts[column.per][number] + time]
        data = self.blob_bytes(column, number, self._rows_of(column, number)[time])
        try:
            return decode_row(column, data)
        except (ValueError, EOFError, RecursionError) as error:
            raise self.damaged(column, number, f"row {time} {brief(error)}") from error

    def snapshots(self, number: int) -> dict[int, bytes]:
        """{step: bytes} of an episode's snapshots."""
        if not self.index.snapshots[number]:
            return {}
        self.verify(SNAPSHOT_COLUMN, number)
        return {int(row[0]): self.blob_bytes(SNAPSHOT_COLUMN, number, row) for row in self._rows_of(SNAPSHOT_COLUMN, number)}

    def blob_bytes(self, column: Column, number: int, place: np.ndarray) -> bytes:
        """Bytes of a row of varying size; `place` ends with its offset and size. Raises RecordingError if they are outside the file."""
        blob = self._blobs.get(column.name)
        if blob is None:
            path = self._path(column, number)
            with raised_as_damage(path, number, column.name), open_regular(path) as file:
                # An empty file cannot be mapped.
                blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
            self._blobs[column.name] = blob
        offset, size = int(place[-2]), int(place[-1])
        if offset < 0 or size < 0 or offset + size > len(blob):
            raise self.damaged(column, number, f"bytes {offset} to {offset + size} are needed, but the file has {len(blob)}")
        return blob[offset : offset + size]

    def damage(self, number: int) -> list[str]:
        """Columns whose checksum differs from the index, one line each."""
        problems = []
        for column in (*self.columns, SNAPSHOT_COLUMN):
            try:
                self._compare(column, number)
            except RecordingError as error:
                problems.append(str(error))
        return problems

    def verify(self, column: Column, number: int) -> None:
        """Check an episode's rows of a column against their checksum, once. Raises RecordingError."""
        place = self._numbers[column.name], number
        if not self._verified[place]:
            self._compare(column, number)
            self._verified[place] = True

    def _compare(self, column: Column, number: int) -> None:
        if self.checksum(column, number) != self.index.sums[number, self._numbers[column.name]]:
            raise self.damaged(column, number, "the checksum does not match: bytes were altered")

    def checksum(self, column: Column, number: int) -> int:
        """CRC-32 of an episode's rows of a column, as in `RecordingWriter`."""
        if column.is_video:
            with raised_as_damage(path := self._path(column, number), number, column.name):
                return files.file_checksum(path)
        rows, checksum = self._rows_of(column, number), 0
        if column.encoding == "array":
            return zlib.crc32(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data) if column.row_bytes else 0
        for place in rows:
            checksum = zlib.crc32(self.blob_bytes(column, number, place), checksum)
        return files.blob_checksum(checksum, rows[:, -1], rows[:, 0] if column is SNAPSHOT_COLUMN else None)

    def release_pages(self) -> None:
        """Release the mapped pages; later reads come from the page cache."""
        for mapped in (*(mapped for mapped, _ in self._maps.values()), *self._blobs.values()):
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        for video in self._videos.values():
            video.close()
        self._videos.clear()
        self._blobs.clear()
        # Views that callers still hold keep their mapping; unused mappings go now.
        self._maps.clear()

    def _rows_of(self, column: Column, number: int) -> np.ndarray:
        """An episode's part of `rows`."""
        starts = self._starts[column.per]
        return self.rows(column)[starts[number] : starts[number + 1]]

    def _count(self, column: Column, number: int) -> int:
        starts = self._starts[column.per]
        return starts[number + 1] - starts[number]

    def rows(self, column: Column) -> np.ndarray:
        """Rows of all episodes: of a column of plain arrays, or the (offset, size) of rows of varying size, of snapshots after their step.
        The file's header and size were checked when the part was opened."""
        mapped = self._maps.get(column.name)
        if mapped is not None:
            return mapped[1]
        (dtype, shape), count = column.stored, self._starts[column.per][-1]
        offset, size = self._offsets[column.name], math.prod(shape)
        path = self.folder / f"{column.stem}.npy"
        with raised_as_damage(path, field=column.name), open_regular(path) as file:
            memory = mmap.mmap(file.fileno(), offset + count * np.dtype(dtype).itemsize * size, access=mmap.ACCESS_READ)
        rows = np.frombuffer(memory, dtype, count * size, offset).reshape(count, *shape)
        self._maps[column.name] = (memory, rows)
        return rows

    def _path(self, column: Column, number: int) -> Path:
        """File with an episode's rows of a column."""
        if column.is_video:
            return self.folder / column.stem / files.video_name(number)
        return self.folder / f"{column.stem}.{'bin' if column.is_blob else 'npy'}"

    def _video(self, column: Column, number: int) -> VideoReader:
        key = (column.name, number)
        video = self._videos.pop(key, None)
        if video is None:
            with raised_as_damage(path := self._path(column, number), number, column.name, said=""):
                video = VideoReader(path, column.shape, self._count(column, number))
            while len(self._videos) >= OPEN_VIDEOS:
                self._videos.popitem(last=False)[1].close()
        self._videos[key] = video
        return video

    def damaged(self, column: Column, number: int, complaint: str) -> RecordingError:
        """Error that names the problem with an episode's rows of a column, and their location."""
        return damaged(self._path(column, number), complaint, number, column.name)


def _joined(tables: list[EpisodeTable]) -> EpisodeTable:
    if not tables:
        return EpisodeTable.of([])
    return EpisodeTable(*(np.concatenate(columns) for columns in zip(*(vars(table).values() for table in tables), strict=True)))


def _require_fit(folder: Path, columns: tuple[Column, ...], info: RecordingInfo) -> None:
    """Raise RecordingError if the columns do not match the recording's simulator."""
    path = folder / files.LAYOUT_FILE
    found = {column.name: column for column in columns}
    try:
        wanted = layout_for(info.spec, "raw", {})
    except (TypeError, ValueError) as error:
        raise damaged(folder.parent / files.RECORDING_FILE, f"describes no simulator: {brief(error)}") from error
    for column in wanted:
        other = found.pop(column.name, None)
        if other is None:
            raise damaged(path, "is missing", field=column.name)
        same = (other.dtype, other.shape, other.per) == (column.dtype, column.shape, column.per)
        if not same or (other.encoding != column.encoding and not other.is_picture):
            what = f"is {brief(other.to_dict(), 120)}, and the simulator has {brief(column.to_dict(), 120)}"
            raise damaged(path, what, field=column.name)
    for name, column in found.items():
        known = name.startswith(("state.", "images.")) and column.per == "observation"
        known |= name in OPTIONAL_COLUMNS and column.per == "step"
        if not known:
            raise damaged(path, "does not belong to a recording", field=name)
