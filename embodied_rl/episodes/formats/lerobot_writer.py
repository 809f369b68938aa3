"""Writes a LeRobotDataset v3 with LeRobot's statistics; see `lerobot` for the files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from embodied_rl.episodes.formats import lerobot as layout
from embodied_rl.episodes.formats.base import (
    Advance,
    NoteBook,
    note_side_episode,
    side_episode,
    side_info,
)
from embodied_rl.episodes.formats.lerobot import Feature
from embodied_rl.episodes.layout import picture_column
from embodied_rl.episodes.pictures import DEFAULT_FPS, VideoWriter, encode_png
from embodied_rl.episodes.recording import OPTIONAL_COLUMNS, FieldNote, RecordedEpisode, Recording, RecordingError
from embodied_rl.types import SimSpec, VariableSpec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_PICTURES, _SIDE = 100, 150
"""Sample for the statistics: number of pictures per episode, and approximate number of lines and columns of each."""

Stats = dict[str, np.ndarray]
"""{min, max, mean, std, count, q01 … q99: array}; ``count`` is [1], the others have a number per column of the feature."""


def vector_stats(rows: np.ndarray) -> Stats:
    """Statistics of numbers [T, …, D] over all but the last axis, [D] ([1] for [T]); float64, min and max in the rows' own type."""
    flat = rows.reshape(-1, 1) if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1])
    values = flat.astype(np.float64)
    stats = {"min": flat.min(axis=0), "max": flat.max(axis=0), "mean": values.mean(axis=0), "std": values.std(axis=0)}
    stats["count"] = np.array([len(rows)])
    return stats | dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))


def picture_stats(pictures: np.ndarray) -> Stats:
    """Statistics of pictures [T, H, W, C] uint8 per channel, scaled to 0 … 1, [C, 1, 1]; from a sample of pictures and pixels."""
    count = min(len(pictures), _PICTURES)
    chosen = np.round(np.linspace(0, len(pictures) - 1, count)).astype(int)
    stride = max(1, max(pictures.shape[1:3]) // _SIDE)
    sample = np.asarray(pictures[chosen])[:, ::stride, ::stride] / 255.0
    stats = vector_stats(sample.reshape(-1, sample.shape[-1]))
    shaped = {name: value[:, None, None] for name, value in stats.items() if name != "count"}
    return shaped | {"count": np.array([count])}


def pooled(episodes: Sequence[Stats]) -> Stats:
    """Statistics of several episodes from each one's: exact except for the quantiles, which are averaged by count."""
    weights = np.array([stats["count"][0] for stats in episodes], np.float64)
    weights /= weights.sum()

    def mean(name: str) -> np.ndarray:
        return np.asarray(sum(weight * np.asarray(stats[name], np.float64) for weight, stats in zip(weights, episodes, strict=True)))

    centre = mean("mean")
    spread = sum(w * (s["std"] ** 2 + (s["mean"] - centre) ** 2) for w, s in zip(weights, episodes, strict=True))
    whole = {
        "min": np.min([stats["min"] for stats in episodes], axis=0),
        "max": np.max([stats["max"] for stats in episodes], axis=0),
        "mean": centre,
        "std": np.sqrt(spread),
        "count": np.array([sum(int(stats["count"][0]) for stats in episodes)]),
    }
    return whole | {name: mean(name) for name in QUANTILES}


def to_lists(stats: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JSON-able form of the statistics."""
    return {name: value.tolist() for name, value in stats.items()}


Video = Literal["mp4", "png"]
_LARGEST_VECTOR = 1_024
"""Numbers in a row from which it is taken for a picture of another kind (grey, depth)."""
_EPISODES_PER_WRITE = 100
_LAST_LOST = "the one after the last step is lost: LeRobot has a row for each step"


class _UnevenError(Exception):
    """The optional field that is missing or differs in shape in some episodes; LeRobot needs the same columns everywhere."""


def write(recording: Recording, folder: Path, target: Path, advance: Advance, video: Video = "mp4") -> tuple[FieldNote, ...]:
    """Write the data set into an empty folder; `target` is unused.

    Args:
        recording: recording with at least one episode.
        target: final location of the folder.
        video: mp4: pictures as H.264, small and not exact; png: a PNG file per row, exact.

    Raises RecordingError: the recording contains nothing that fits the format, or is damaged; OSError: the files cannot be written.
    """
    if video not in ("mp4", "png"):
        raise RecordingError(f"LeRobot's data sets hold pictures as mp4 or png, not as '{video}'.")
    dropped: set[str] = set()
    while True:
        target = folder / f"attempt_{len(dropped)}"
        writer = _Writer(recording, target, video, dropped)
        try:
            notes = writer.write(advance)
        except _UnevenError as uneven:
            # Known only when the episode is read; checking all episodes first would decode all their pictures twice.
            dropped.add(str(uneven))
            continue
        for part in target.iterdir():
            part.rename(folder / part.name)
        for attempt in folder.glob("attempt_*"):
            shutil.rmtree(attempt)
        return notes


class _Writer:
    """One attempt; `dropped` are fields known to be missing in some episodes."""

    def __init__(self, recording: Recording, folder: Path, video: Video, dropped: set[str]) -> None:
        self._arrow, self._parquet = layout.import_pyarrow()
        self._recording, self._folder, self._dropped = recording, folder, dropped
        self._notes = NoteBook()
        for field in dropped:
            self._notes.add(field, "lost", "not in all episodes alike, and LeRobot has the same columns for all")
        self._fps = self._rate(recording.spec)
        first = recording.episode(0)
        self._features = tuple(_features(recording.spec, first, video, dropped, self._notes))
        self._data = _DataFiles(folder, self._arrow, self._parquet, self._schema())
        self._videos = {f.name: _VideoFiles(folder, f, self._fps) for f in self._features if f.storage == "video"}
        self._tasks: dict[str, int] = {}
        self._pooled: dict[str, list[Stats]] = {f.name: [] for f in self._features if f.is_picture or math.prod(f.shape) > _LARGEST_VECTOR}
        """Statistics of each episode for the columns whose rows of all episodes may not fit in memory."""
        self._num_frames = 0

    def _rate(self, spec: SimSpec) -> int:
        fps = max(1, round(spec.control_hz or DEFAULT_FPS))
        if spec.control_hz is None:
            self._notes.add("fps", "filled", f"the recording does not say how often it acts; {fps} a second")
        elif fps != spec.control_hz:
            self._notes.add("fps", "changed", f"{spec.control_hz:g} a second, rounded to {fps} as LeRobot needs a whole number")
        return fps

    def write(self, advance: Advance) -> tuple[FieldNote, ...]:
        side = self._folder / layout.SIDE_EPISODES
        side.parent.mkdir(parents=True)
        episodes = _EpisodesFile(self._folder, self._arrow, self._parquet)
        with side.open("w", encoding="utf-8") as lines:
            try:
                for number, episode in enumerate(self._recording):
                    episodes.add(self._add(number, episode))
                    lines.write(json.dumps(side_episode(episode)) + "\n")
                    note_side_episode(episode, self._notes, layout.SIDE_EPISODES)
                    advance(1)
            finally:
                episodes.close()
                self._data.close()
                for files in self._videos.values():
                    files.close()
        self._write_meta()
        return tuple(self._notes)

    def _add(self, number: int, episode: RecordedEpisode) -> dict[str, Any]:
        """Write one episode's rows and pictures; return its row of ``meta/episodes``."""
        length = episode.num_steps
        task = episode.instruction or episode.task or self._recording.spec.instruction or self._recording.spec.task
        task = task.encode("utf-8", "replace").decode()  # parquet stores no half of a surrogate pair; the side entry is exact
        task_index = self._tasks.setdefault(task, len(self._tasks))
        columns: dict[str, np.ndarray] = {
            "timestamp": (np.arange(length) / self._fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": self._num_frames + np.arange(length),
            "task_index": np.full(length, task_index),
            "next.done": episode.terminated | episode.truncated,
        }
        row: dict[str, Any] = {"episode_index": number, "tasks": [task], "length": length}
        fields = episode.columns()
        noted_as_lost = {note.field for note in self._notes if note.fate == "lost"}
        for uneven in fields.keys() - {f.field for f in self._features} - self._dropped - noted_as_lost:
            raise _UnevenError(uneven)
        stats: dict[str, Stats] = {}
        for feature in self._features:
            if feature.field not in fields:
                raise _UnevenError(feature.field)
            part = fields[feature.field][:length]
            if feature.storage not in ("text", "json") and tuple(part.shape[1:]) != feature.shape:
                raise _UnevenError(feature.field)
            if feature.is_picture:
                stats[feature.name] = picture_stats(part)
            if feature.storage == "video":
                row |= self._videos[feature.name].add(part)
            else:
                columns[feature.name] = part
        row |= self._data.add(self._table(columns), length)
        row |= {"dataset_from_index": self._num_frames, "dataset_to_index": self._num_frames + length}
        stats |= {name: vector_stats(part) for name, part in columns.items() if part.dtype != object and name not in stats}
        for name, episodes in self._pooled.items():
            episodes.append(stats[name])
        row |= {f"stats/{name}/{key}": value for name, each in stats.items() for key, value in to_lists(each).items()}
        self._num_frames += length
        return row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}

    # ---- tables ----

    def _schema(self) -> Any:
        pa = self._arrow
        fields = [pa.field(name, pa.float32() if entry["dtype"] == "float32" else pa.int64()) for name, entry in layout.COUNTERS.items()]
        fields.append(pa.field("next.done", pa.bool_()))
        for feature in self._features:
            if feature.storage == "image":
                fields.append(pa.field(feature.name, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
            elif feature.storage in ("text", "json"):
                fields.append(pa.field(feature.name, pa.string()))
            elif feature.storage == "column":
                kind = pa.from_numpy_dtype(np.dtype(feature.dtype))
                if feature.shape not in ((), (1,)):
                    for size in reversed(feature.shape):
                        kind = pa.list_(kind, size)
                fields.append(pa.field(feature.name, kind))
        return pa.schema(fields)

    def _table(self, columns: Mapping[str, np.ndarray]) -> Any:
        pa, features = self._arrow, {feature.name: feature for feature in self._features}
        arrays = []
        for field in self._data.schema:
            part, feature = columns[field.name], features.get(field.name)
            if feature is not None and feature.storage == "image":
                files = [{"bytes": encode_png(picture), "path": None} for picture in part]
                arrays.append(pa.array(files, field.type))
            elif feature is not None and feature.storage == "json":
                arrays.append(pa.array([json.dumps(value) for value in part], field.type))
            elif part.dtype == object:
                try:
                    arrays.append(pa.array(list(part), field.type))
                except UnicodeError as error:
                    raise RecordingError(
                        f"Feature '{field.name}': parquet files cannot store text with half a surrogate pair ({error})."
                    ) from error
            else:
                arrays.append(_nested(pa, part, field.type))
        return pa.Table.from_arrays(arrays, schema=self._data.schema)

    # ---- meta ----

    def _write_meta(self) -> None:
        pa, folder, count = self._arrow, self._folder, len(self._recording)
        features = {feature.name: feature.to_info(self._fps) for feature in self._features}
        features |= {"next.done": {"dtype": "bool", "shape": [1], "names": None}, **layout.COUNTERS}
        info = {
            "codebase_version": layout.VERSION,
            "robot_type": dict(self._recording.info.sim.get("kwargs") or {}).get("robot_uids"),
            "total_episodes": count,
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.FILES_PER_CHUNK,
            "data_files_size_in_mb": layout.DATA_FILE_MB,
            "video_files_size_in_mb": layout.VIDEO_FILE_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{count}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH if self._videos else None,
            "features": features,
        }
        (folder / layout.INFO).write_text(json.dumps(info, indent=4), encoding="utf-8")
        tasks = pa.table({"task_index": pa.array(self._tasks.values(), pa.int64()), "__index_level_0__": pa.array(self._tasks)})
        self._parquet.write_table(tasks.replace_schema_metadata(_pandas_index("__index_level_0__")), folder / layout.TASKS)
        stats = {name: pooled(each) for name, each in self._pooled.items()}
        stats |= {name: vector_stats(self._data.column(name)) for name in self._data.numeric() if name not in stats}
        (folder / layout.STATS).write_text(json.dumps({name: to_lists(each) for name, each in stats.items()}, indent=4), encoding="utf-8")
        kept = {
            key: part
            for key, part in self._recording.spec.observation.items()
            if any(f.field == f"observation.{key}" for f in self._features)
        }
        side = side_info(self._recording.info, kept) | {"features": [feature.to_dict() for feature in self._features]}
        (folder / layout.SIDE_INFO).write_text(json.dumps(side, indent=1), encoding="utf-8")


def _levels(pa: ModuleType, kind: pa.DataType) -> tuple[list[int], pa.DataType]:
    """Lengths of nested fixed-length lists from the outside in, and the type of the innermost values."""
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return sizes, kind


def _nested(pa: ModuleType, part: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Convert numbers [T, …] to an arrow array of fixed-length lists."""
    sizes, inner = _levels(pa, kind)
    array = pa.array(np.ascontiguousarray(part).reshape(-1), inner)
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _pandas_index(name: str) -> dict[str, str]:
    """Schema metadata that makes a string column the table's index in pandas."""

    def column(label: str | None, field: str, pandas_type: str, numpy_type: str) -> dict[str, Any]:
        return {"name": label, "field_name": field, "pandas_type": pandas_type, "numpy_type": numpy_type, "metadata": None}

    about = {
        "index_columns": [name],
        "column_indexes": [column(None, "None", "unicode", "object") | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [column("task_index", "task_index", "int64", "int64"), column(None, name, "unicode", "object")],
        "creator": {"library": "pyarrow", "version": "17"},
        "pandas_version": "2.2.0",
    }
    return {"pandas": json.dumps(about)}


# ---- features -------------------------------------------------------------------------------------------------------


def _features(spec: SimSpec, episode: RecordedEpisode, video: Video, dropped: set[str], notes: NoteBook) -> Iterator[Feature]:
    taken: set[str] = set()
    for field, part in {**episode.per_step(), **episode.columns()}.items():
        if field in dropped:
            continue
        feature = _feature(field, part, spec, video, taken, notes)
        if feature is not None:
            taken.add(feature.name)
            yield feature


def _feature(field: str, part: np.ndarray, spec: SimSpec, video: Video, taken: set[str], notes: NoteBook) -> Feature | None:
    key = field.partition(".")[2]
    variable = spec.observation.get(key) if field.startswith("observation.") else None
    around = field.startswith(("observation.", "state.", "images."))
    kept = layout.feature_name(field, False, taken)
    said = f"'{kept}'; {_LAST_LOST}" if around else f"'{kept}'"
    if isinstance(variable, VariableSpec) or part.dtype == object:
        kind = variable.kind if isinstance(variable, VariableSpec) else "text"
        if kind == "array" or (kind == "text" and not all(isinstance(value, str) for value in part)):
            notes.add(field, "lost", "LeRobot has no columns for arrays of varying size")
            return None
        notes.add(field, "changed" if around else "kept", said)
        return Feature(field, kept, "text" if kind == "text" else "json")
    shape = tuple(part.shape[1:])
    if part.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3:
        name = layout.feature_name(field, True, taken)
        if video == "png" or picture_column(field, part.dtype, shape) is None:
            notes.add(field, "changed", f"'{name}', PNG; {_LAST_LOST}")
            return Feature(field, name, "image", "uint8", shape)
        notes.add(field, "changed", f"'{name}', as H.264, which is not exact (video=png is); {_LAST_LOST}")
        return Feature(field, name, "video", "uint8", shape)
    if len(shape) > 5 or 0 in shape:
        notes.add(field, "lost", f"LeRobot has no columns of shape {list(shape)}")
        return None
    fate: Literal["changed", "extra", "kept"] = "changed" if around else "extra" if field in OPTIONAL_COLUMNS else "kept"
    notes.add(field, fate, said)
    return Feature(field, kept, "column", str(part.dtype), shape)


# ---- files ----------------------------------------------------------------------------------------------------------


def _next(chunk: int, file: int) -> tuple[int, int]:
    return (chunk + 1, 0) if file + 1 >= layout.FILES_PER_CHUNK else (chunk, file + 1)


Writer = TypeVar("Writer", "pq.ParquetWriter", VideoWriter)


class _Files(Generic[Writer]):
    """Numbered files with episodes in order; a new file begins when one is too large."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self._folder, self._megabytes = folder, megabytes
        self._place = (0, 0)
        self._writer: Writer | None = None
        self._paths: list[Path] = []

    def _open(self, pattern: str, make: Callable[[Path], Writer], **named: str) -> Writer:
        """Writer for the next episode; `pattern`: path pattern with the numbers and `named`."""
        # A video appears with the encoder's first picture, which may come out after an episode of one step.
        if self._writer is not None and self._paths[-1].exists() and self._paths[-1].stat().st_size >= self._megabytes * 2**20:
            self.close()
            self._place = _next(*self._place)
        if self._writer is None:
            path = self._folder / pattern.format(chunk_index=self._place[0], file_index=self._place[1], **named)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._paths.append(path)
            self._writer = make(path)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _DataFiles(_Files["pq.ParquetWriter"]):
    """Files below ``data/``: a row group per episode; a new file begins when one is too large."""

    def __init__(self, folder: Path, arrow: ModuleType, parquet: ModuleType, schema: pa.Schema) -> None:
        super().__init__(folder, layout.DATA_FILE_MB)
        self.schema, self._arrow, self._parquet = schema, arrow, parquet

    def add(self, table: pa.Table, length: int) -> dict[str, int]:
        """Add an episode's rows; return its columns of ``meta/episodes``."""
        writer = self._open(layout.DATA_PATH, lambda path: self._parquet.ParquetWriter(path, schema=self.schema, compression="snappy"))
        writer.write_table(table, row_group_size=length)
        return {"data/chunk_index": self._place[0], "data/file_index": self._place[1]}

    def numeric(self) -> list[str]:
        types = self._arrow.types
        return [field.name for field in self.schema if not (types.is_string(field.type) or types.is_struct(field.type))]

    def column(self, name: str) -> np.ndarray:
        """All rows of a column of numbers, [T of all episodes, …, D]."""
        sizes, _ = _levels(self._arrow, self.schema.field(name).type)
        parts = []
        for path in self._paths:
            chunks = self._parquet.read_table(path, columns=[name]).column(0).combine_chunks()
            for _ in sizes:
                chunks = chunks.flatten()
            parts.append(chunks.to_numpy(zero_copy_only=False).reshape(-1, *sizes))
        return np.concatenate(parts)


class _VideoFiles(_Files[VideoWriter]):
    """Files below ``videos/{feature}/``: episodes in order; a new file begins when one is too large."""

    def __init__(self, folder: Path, feature: Feature, fps: int) -> None:
        super().__init__(folder, layout.VIDEO_FILE_MB)
        self._feature, self._fps = feature, fps

    def add(self, pictures: np.ndarray) -> dict[str, Any]:
        """Encode [T, H, W, 3]; return the episode's columns of ``meta/episodes``."""
        (height, width), name = self._feature.shape[:2], self._feature.name
        writer = self._open(layout.VIDEO_PATH, lambda path: VideoWriter(path, height, width, self._fps, lossless=False), video_key=name)
        start = writer.count
        for picture in pictures:
            writer.add(picture)
        key = f"videos/{name}"
        return {
            f"{key}/chunk_index": self._place[0],
            f"{key}/file_index": self._place[1],
            f"{key}/from_timestamp": start / self._fps,
            f"{key}/to_timestamp": writer.count / self._fps,
        }


class _EpisodesFile:
    """``meta/episodes``, written in blocks."""

    def __init__(self, folder: Path, arrow: ModuleType, parquet: ModuleType) -> None:
        self._path = folder / layout.EPISODES_PATH.format(chunk_index=0, file_index=0)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._arrow, self._parquet = arrow, parquet
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _EPISODES_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = {name: [row[name] for row in self._rows] for name in self._rows[0]}
        table = self._arrow.table(columns) if self._writer is None else self._arrow.table(columns, schema=self._writer.schema)
        self._writer = self._writer or self._parquet.ParquetWriter(self._path, schema=table.schema, compression="snappy")
        self._writer.write_table(table)
        self._rows = []

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
