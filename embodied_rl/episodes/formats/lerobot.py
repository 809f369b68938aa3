"""Files and columns of a LeRobotDataset v3 (https://huggingface.co/docs/lerobot/lerobot-dataset-v3), and its reader.

``meta/info.json`` lists the *features*: columns of ``data/chunk-000/file-000.parquet`` (a row per step, several episodes per file), and
videos ``videos/{feature}/chunk-000/file-000.mp4`` (several episodes per file, in order). ``meta/episodes`` gives each episode's rows and
seconds, ``meta/tasks.parquet`` the tasks, ``meta/stats.json`` the features' statistics.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from embodied_rl.episodes.formats import base
from embodied_rl.episodes.formats.hdf5 import MAX_RATIO, SMALL_BYTES
from embodied_rl.episodes.pictures import Frames, VideoError, VideoReader, decode_picture
from embodied_rl.episodes.recording import (
    OPTIONAL_COLUMNS,
    STEP_COLUMNS,
    RecordedEpisode,
    RecordingInfo,
    damaged,
    fields_of,
    per_observation,
    raised_as_damage,
)
from embodied_rl.errors import brief, from_extra
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES_DIR = "meta/episodes"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = EPISODES_DIR + "/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
SIDE_INFO, SIDE_EPISODES = f"meta/{base.SIDE_ENTRY}/recording.json", f"meta/{base.SIDE_ENTRY}/episodes.jsonl"
"""This package's side entry, in separate files, so that LeRobot can append episodes to the data set."""
FILES_PER_CHUNK, DATA_FILE_MB, VIDEO_FILE_MB = 1000, 100, 200

COUNTERS: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
"""Columns of every data set."""

Storage = Literal["column", "text", "json", "image", "video"]
"""column: numbers. text, json: strings. image: a PNG file in each row. video: an mp4 file."""


@dataclass(frozen=True)
class Feature:
    """A field of a recording as a LeRobot feature."""

    field: str
    """Name as in `RecordedEpisode`: ``observation.state``, ``reward``, ``state.actors/cube``."""
    name: str
    storage: Storage
    dtype: str = ""
    """numpy dtype; empty for strings."""
    shape: tuple[int, ...] = ()
    """Shape of a row of the field. LeRobot has no rows without axes: () is (1,) there."""

    @property
    def is_picture(self) -> bool:
        return self.storage in ("image", "video")

    def to_info(self, fps: int) -> dict[str, Any]:
        """Entry of the feature in ``info.json``."""
        if self.storage in ("text", "json"):
            return {"dtype": "string", "shape": [1], "names": None}
        if self.storage == "column":
            return {"dtype": self.dtype, "shape": list(self.shape or (1,)), "names": None}
        # H.264 in yuv420p has even sides.
        height, width = (side + side % 2 if self.storage == "video" else side for side in self.shape[:2])
        entry: dict[str, Any] = {"dtype": self.storage, "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        if self.storage == "video":
            video = {
                "height": height,
                "width": width,
                "codec": "h264",
                "pix_fmt": "yuv420p",
                "is_depth_map": False,
                "fps": fps,
                "channels": 3,
            }
            entry["info"] = {f"video.{key}": value for key, value in video.items()} | {"has_audio": False}
        return entry

    def to_dict(self) -> dict[str, Any]:
        return {"field": self.field, "name": self.name, "storage": self.storage, "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Feature:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        if data["storage"] not in ("column", "text", "json", "image", "video"):
            raise ValueError(f"storage {data['storage']!r}")
        return Feature(
            str(data["field"]), str(data["name"]), data["storage"], str(data["dtype"]), tuple(int(size) for size in data["shape"])
        )


FIXED_NAMES = {
    "action": "action",
    "reward": "next.reward",
    "success": "next.success",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
}
"""{field: feature}, with the names of LeRobot's own simulated data sets; ``next.done`` is written too."""


def feature_name(field: str, picture: bool, taken: set[str]) -> str:
    """Feature name of a field: without slashes, which LeRobot forbids, and different from those `taken`."""
    if field in FIXED_NAMES:
        return FIXED_NAMES[field]
    room, _, key = field.partition(".")
    name = field
    if picture:
        name = f"observation.images.{key.removeprefix('rgb.') if room == 'observation' else f'view.{key}'}"
    name = name.replace("/", ".")
    while name in taken or name in COUNTERS:
        name = f"{name}_{len(taken)}"
    return name


def import_pyarrow() -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet. Raises MissingExtraError with the pip line."""
    with from_extra("Reading and writing LeRobot data sets", "formats"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    return pa, pq


def inside(root: Path, template: str, **indices: int | str) -> Path:
    """Path of a file that ``info.json`` names by a template. Raises RecordingError if it is outside the data set's folder."""
    try:
        for _, name, form, conversion in Formatter().parse(template):
            # Other formats could reach into attributes, or fill the memory with zeros.
            if name is not None and (name not in indices or conversion or not re.fullmatch(r"(0\dd)?", form or "")):
                raise ValueError(f"{{{name}:{form}}} is none of {', '.join(indices)}")
        path = root / template.format(**indices)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise damaged(root / INFO, f"holds a template '{brief(template, 80)}' that cannot be filled in ({error})") from error
    if not path.resolve().is_relative_to(root.resolve()):
        raise damaged(root / INFO, f"names '{brief(path, 120)}', which is not in the data set's folder")
    return path


# ---- files of columns ----------------------------------------------------------------------------------------------------


def open_parquet(parquet: ModuleType, path: Path) -> pq.ParquetFile:
    """Map a parquet file; texts and bytes are read as dictionaries.
    Raises ValueError if it claims more rows than its bytes can contain, and pyarrow's errors."""
    size, groups = path.stat().st_size, parquet.read_metadata(path, memory_map=True)
    columns = [groups.schema.column(number) for number in range(len(groups.schema))]
    shared = [column.path for column in columns if column.physical_type == "BYTE_ARRAY" and not column.max_repetition_level]
    file = parquet.ParquetFile(path, metadata=groups, memory_map=True, read_dictionary=shared)
    # Columns with the same value in every row take almost no space.
    unpacked = [8 * groups.num_rows, *(groups.row_group(number).total_byte_size for number in range(groups.num_row_groups))]
    if max(unpacked) > max(SMALL_BYTES, MAX_RATIO * size):
        file.close()
        raise ValueError(f"{size:,} bytes cannot hold the {max(unpacked):,} that it claims")
    return file


_NO_PARQUET = "cannot be read as parquet: it is damaged or cut short"


class DataFile:
    """One parquet file under ``data/``. Raises RecordingError if it cannot be read."""

    def __init__(self, path: Path, parquet: ModuleType) -> None:
        self.path = path
        if not path.is_file():
            raise damaged(path, "is missing")
        with raised_as_damage(path, said=_NO_PARQUET):
            self._file = open_parquet(parquet, path)
            groups = self._file.metadata
            sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
            numbers = np.asarray(self._file.read(columns=["episode_index"])["episode_index"].to_numpy(), np.int64)
        self._names = set(self._file.schema_arrow.names)
        self._ends = np.cumsum(sizes)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        self._spans = dict(
            zip(numbers[starts].tolist(), zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)], strict=True), strict=True)
        )
        """{episode: (its first row, the row after its last)}"""
        self._cached: tuple[Any, Any] = (None, None)

    def columns(self, number: int, length: int, features: Sequence[Feature]) -> dict[str, np.ndarray]:
        """{field: rows} of an episode of `length` steps: [T, *shape] numbers; object arrays [T] of str, JSON values, or bytes of picture
        files."""
        names = sorted({"episode_index", *(feature.name for feature in features)})
        if missing := [name for name in names if name not in self._names]:
            raise damaged(self.path, "is missing", number, missing[0])
        start, end = self._spans.get(number, (0, 0))
        if end - start != length:
            raise damaged(self.path, f"holds {end - start} rows of it one after another instead of {length}", number, "episode_index")
        first, last = (int(np.searchsorted(self._ends, row, side="right")) for row in (start, end - 1))
        before = int(self._ends[first - 1]) if first else 0
        # Some writers put many episodes into a row group, which is decoded as a whole and probably contains the next episode too.
        if self._cached[0] != (first, last, names):
            with raised_as_damage(self.path, number):
                self._cached = (first, last, names), self._file.read_row_groups(list(range(first, last + 1)), columns=names)
        rows = self._cached[1].slice(start - before, length)
        return {feature.field: self._column(rows[feature.name], number, feature) for feature in features}

    def _column(self, column: pa.ChunkedArray, number: int, feature: Feature) -> np.ndarray:
        import pyarrow as pa

        if column.null_count:
            raise damaged(self.path, f"has no value in {column.null_count} rows", number, feature.name)
        with raised_as_damage(self.path, number, feature.name):
            if feature.storage == "image":
                return np.fromiter(_distinct(column, lambda value: value), object)
            if feature.storage in ("text", "json"):
                if not (pa.types.is_string(kind := _kind(column)) or pa.types.is_large_string(kind)):
                    raise damaged(self.path, "must hold text", number, feature.name)
                return np.fromiter(_distinct(column, str if feature.storage == "text" else json.loads), object)
            rows = column.combine_chunks()
            return self._numbers(rows.chunk(0) if isinstance(rows, pa.ChunkedArray) else rows, number, feature)

    def _numbers(self, rows: pa.Array, number: int, feature: Feature) -> np.ndarray:
        import pyarrow as pa

        if isinstance(rows, pa.ExtensionArray):
            rows = rows.storage
        count, levels, shape, name = len(rows), [], feature.shape, feature.name
        while pa.types.is_list(rows.type) or pa.types.is_large_list(rows.type) or pa.types.is_fixed_size_list(rows.type):
            sizes = set(np.unique(rows.value_lengths().to_numpy(zero_copy_only=False)).tolist())
            if len(sizes) != 1 or rows.null_count:
                raise damaged(self.path, f"has rows of {len(sizes)} lengths instead of {list(shape)}", number, name)
            levels.append(int(sizes.pop()))
            rows = rows.flatten()
        if tuple(levels) != (() if shape in ((), (1,)) and not levels else shape):
            raise damaged(self.path, f"has rows of {levels or 'single numbers'} instead of {list(shape)}", number, name)
        if rows.null_count or not (pa.types.is_integer(rows.type) or pa.types.is_floating(rows.type) or pa.types.is_boolean(rows.type)):
            raise damaged(self.path, f"must hold numbers, holds {_kind(rows)} with {rows.null_count} gaps", number, name)
        return rows.to_numpy(zero_copy_only=False).astype(feature.dtype, copy=False).reshape(count, *shape)

    def close(self) -> None:
        self._file.close()


def _distinct(column: pa.ChunkedArray, read: Callable[[Any], Any]) -> Iterator[Any]:
    """A column's texts, or the bytes of its files, each `read`; equal ones are one object, as they take no space in the file either."""
    import pyarrow as pa

    for chunk in column.chunks:
        values = chunk.field("bytes") if isinstance(chunk, pa.StructArray) else chunk
        places = values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()
        known = {place: read(places.dictionary[place].as_py()) for place in places.indices.unique().drop_null().to_pylist()}
        yield from map(known.get, places.indices.to_pylist())


def _kind(rows: pa.Array | pa.ChunkedArray) -> pa.DataType:
    """Type of a column's values."""
    import pyarrow as pa

    return rows.type.value_type if isinstance(rows.type, pa.DictionaryType) else rows.type


_TASK = Feature("task", "task_index", "column", "int64")
_OPEN_CLIPS, _OPEN_FILES = 8, 4
_FILLED = ("reward", "success")
_REWARDS, _SUCCESSES, _DONES = ("next.reward", "reward"), ("next.success", "success"), ("next.done", "done")
_PLACES = ("episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")


@dataclass(frozen=True)
class _Place:
    """Location of an episode."""

    length: int
    data: Path
    videos: Mapping[str, tuple[Path, float]]
    """{feature: (file, second of the first picture)}"""


class LeRobotRecording(base.ForeignRecording):
    """Reads one data set. Raises RecordingError if it is damaged or inconsistent."""

    format = "lerobot"

    def __init__(self, path: Path) -> None:
        self._parquet = import_pyarrow()[1]
        self._root = path
        self._files: OrderedDict[Path, DataFile] = OrderedDict()
        self._clips: OrderedDict[Path, VideoReader] = OrderedDict()
        super().__init__(path)

    def _open(self, notes: base.NoteBook) -> tuple[int, RecordingInfo | None]:
        self._info = self._read_info()
        self._fps: float = self._info["fps"]
        self._tasks = self._read_tasks()
        self._places = self._read_places()
        side = self._read_side()
        self._side_episodes = self._read_side_episodes() if side else None
        info, self._features = side or (None, tuple(self._foreign_features(notes)))
        notes.add("observation", "filled", "the format has none after the last step; the last one stands twice")
        if any(feature.field.startswith("state.") for feature in self._features):
            notes.add("state", "filled", "the format has none after the last step; NaN")
        return len(self._places), info

    # ---- episodes ----

    def _episode(self, number: int) -> RecordedEpisode:
        place, notes = self._places[number], base.NoteBook()
        rows = self._rows(number, [feature for feature in self._features if feature.storage != "video"])
        fields = self._flags(number, notes, rows)
        columns: dict[str, Any] = {name: rows[name] for name in OPTIONAL_COLUMNS if name in rows}
        for feature in self._features:
            room = feature.field.partition(".")[0]
            if per_observation(feature.field) and room in ("observation", "state", "images"):
                if feature.is_picture:
                    columns[feature.field] = self._pictures(number, feature, rows)
                else:
                    last = base.unknown_last if room == "state" else base.repeat_last
                    columns[feature.field] = last(rows[feature.field])
        fields |= fields_of(columns)
        own = {"instruction": self._episode_tasks[number], "metadata": {}} if self._side_episodes is None else self._side_episodes[number]
        fields |= own
        fields["metadata"] = {**fields["metadata"], "final_observation": "repeated"}
        return base.finish_episode(place.data, number, fields)

    def _flags(self, number: int, notes: base.NoteBook, rows: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Action, reward, flags, seed and task of an episode; `rows`: its columns, if they have been read."""
        length = self._places[number].length
        rows = self._rows(number, [feature for feature in self._features if feature.field in STEP_COLUMNS]) if rows is None else rows
        fields = {name: rows[name] if name in rows else base.filled(name, length, notes, "the data set has none") for name in _FILLED}
        fields |= {"reward": base.as_float32(fields["reward"], "reward", notes), "success": fields["success"].astype(bool)}
        action = rows["action"]
        fields["action"] = action if action.dtype.kind in "iO" else base.as_float32(action, "action", notes)
        if "terminated" in rows and "truncated" in rows:
            fields |= {name: rows[name].astype(bool) for name in ("terminated", "truncated")}
        else:
            fields |= base.guessed_ends(rows.get("done"), length, "next.done", notes)
        side = {} if self._side_episodes is None else self._side_episodes[number]
        return fields | {"seed": base.seed_or_unknown(side.get("seed"), number, notes, "the format has none"), "task": side.get("task")}

    def _rows(self, number: int, features: list[Feature]) -> dict[str, np.ndarray]:
        """{field: [T, …]} of an episode's columns; pictures as object arrays of bytes."""
        place, done = self._places[number], [Feature("done", name, "column", "bool") for name in _DONES if name in self._info["features"]]
        return self._file(place.data).columns(number, place.length, [*features, *done[:1]])

    def _pictures(self, number: int, feature: Feature, rows: Mapping[str, np.ndarray]) -> Any:
        """Pictures [T + 1, H, W, 3]; the last picture is repeated."""
        place = self._places[number]
        last = place.length - 1
        is_file = feature.storage == "image"
        path, start = (place.data, 0.0) if is_file else place.videos[feature.name]

        def read(time: int) -> np.ndarray:
            row = min(time, last)
            with raised_as_damage(path, number, feature.name, said=""):
                if is_file:
                    if not isinstance(data := rows[feature.field][row], bytes):
                        raise VideoError("the picture is not in the row")
                    return decode_picture(data, feature.shape, ["PNG", "JPEG"])
                # Opened on first use: a data set may have more videos than a process may have open files.
                return self._clip(path, feature).at(start + row / self._fps)

        if not is_file:
            with raised_as_damage(path, number, feature.name, said=""):
                self._clip(path, feature)
        return Frames(place.length + 1, feature.shape, read)

    # ---- files ----

    def _file(self, path: Path) -> DataFile:
        return _cached(self._files, path, _OPEN_FILES, partial(DataFile, path, self._parquet))

    def _clip(self, path: Path, feature: Feature) -> VideoReader:
        return _cached(self._clips, path, _OPEN_CLIPS, partial(VideoReader, path, feature.shape, fps=self._fps))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for clip in self._clips.values():
            clip.close()
        self._files.clear()
        self._clips.clear()

    # ---- meta ----

    def _read_info(self) -> dict[str, Any]:
        path = self._root / INFO
        info = base.read_json(path)
        version = info.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            raise damaged(
                path,
                f"is {version!r}; v3.x is read. LeRobot's own convert_dataset_v21_to_v30 brings older data sets up to it",
                field="codebase_version",
            )
        for name, kinds in (("fps", (int, float)), ("features", (dict,)), ("data_path", (str,))):
            if type(info.get(name)) not in kinds:
                raise damaged(path, f"is {info.get(name)!r:.60}", field=name)
        if not info["fps"] > 0:
            raise damaged(path, f"must be above 0, is {info['fps']}", field="fps")
        for name, feature in info["features"].items():
            shape = feature.get("shape") if isinstance(feature, dict) else None
            if not isinstance(shape, list) or not isinstance(feature.get("dtype"), str) or any(type(size) is not int for size in shape):
                raise damaged(path, "must have a dtype and a shape of whole numbers", field=f"features.{name}")
        return info

    def _table(self, path: Path) -> Any:
        with raised_as_damage(path, said=_NO_PARQUET), open_parquet(self._parquet, path) as file:
            return file.read()

    def _read_tasks(self) -> dict[int, str]:
        """{task_index: text}"""
        path = self._root / TASKS
        if not path.is_file():
            raise damaged(path, "is missing")
        table = self._table(path)
        texts = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
        if texts is None or "task_index" not in table.column_names:
            raise damaged(path, f"must have the columns 'task' and 'task_index', has {table.column_names}")
        return dict(zip(map(int, table["task_index"].to_pylist()), map(str, table[texts].to_pylist()), strict=True))

    def _read_places(self) -> list[_Place]:
        """Locations from ``meta/episodes``, whose rows must be the episodes 0, 1, … in order."""
        folder = self._root / EPISODES_DIR
        paths = sorted(folder.glob("*/*.parquet"))
        if not paths:
            raise damaged(folder, "has no parquet file")
        videos = [name for name, feature in self._info["features"].items() if feature["dtype"] == "video"]
        wanted = [*_PLACES, *(f"videos/{name}/{column}" for name in videos for column in ("chunk_index", "file_index", "from_timestamp"))]
        rows: list[dict[str, Any]] = []
        for path in paths:
            present = self._table(path)
            if missing := [name for name in wanted if name not in present.column_names]:
                raise damaged(path, "is missing", field=missing[0])
            rows += present.select(wanted).to_pylist()
        rows.sort(key=lambda row: row["episode_index"])
        total, first = self._info.get("total_episodes", len(rows)), 0
        if not rows or len(rows) != total or any(row["episode_index"] != number for number, row in enumerate(rows)):
            raise damaged(folder, f"lists {len(rows)} episodes, {INFO} says {total}, numbered from 0")
        places = []
        for number, row in enumerate(rows):
            if row["dataset_from_index"] != first or row["dataset_to_index"] != first + row["length"] or row["length"] < 1:
                what = f"says rows {row['dataset_from_index']} to {row['dataset_to_index']} and length {row['length']}; row {first} is next"
                raise damaged(folder, what, number, "length")
            places.append(self._place(row, videos))
            first += row["length"]
        if first != self._info.get("total_frames", first):
            raise damaged(folder, f"lists {first} steps, {INFO} says {self._info['total_frames']}")
        return places

    def _place(self, row: Mapping[str, Any], videos: list[str]) -> _Place:
        indices = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        found = {}
        for name in videos:
            where = {index: row[f"videos/{name}/{index}"] for index in ("chunk_index", "file_index")}
            template = str(self._info.get("video_path") or VIDEO_PATH)
            found[name] = (inside(self._root, template, video_key=name, **where), float(row[f"videos/{name}/from_timestamp"]))
        return _Place(row["length"], inside(self._root, self._info["data_path"], **indices), found)

    # ---- ours ----

    def _read_side(self) -> tuple[RecordingInfo, tuple[Feature, ...]] | None:
        path = self._root / SIDE_INFO
        if not path.is_file():
            return None
        data = base.read_json(path)
        with raised_as_damage(path, field="features"):
            features = tuple(Feature.from_dict(entry) for entry in data["features"])
        for feature in features:
            if feature.name not in self._info["features"]:
                raise damaged(path, f"names a feature that {INFO} does not have", field=feature.name)
        return base.parse_side_info(path, data), features

    def _read_side_episodes(self) -> list[dict[str, Any]] | None:
        """Side entry of each episode; episodes that another program has appended get the values of an imported one."""
        path = self._root / SIDE_EPISODES
        with raised_as_damage(path):
            lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > len(self._places):
            raise damaged(path, f"holds {len(lines)} episodes, the data set {len(self._places)}")
        ours = [base.parse_side_episode(path, base.parse_json(path, line, "line", number), number) for number, line in enumerate(lines)]
        theirs = range(len(lines), len(self._places))
        return ours + [{"seed": base.unknown_seed(n), "task": None, "instruction": self._episode_tasks[n], "metadata": {}} for n in theirs]

    @cached_property
    def _episode_tasks(self) -> list[str | None]:
        """Text of each episode's first step."""
        tasks: list[str | None] = []
        for number, place in enumerate(self._places):
            index = int(self._file(place.data).columns(number, place.length, [_TASK])["task"][0])
            if index not in self._tasks:
                raise damaged(place.data, f"names task {index}, which {TASKS} does not have", number, "task_index")
            tasks.append(self._tasks[index])
        return tasks

    # ---- theirs ----

    def _foreign_features(self, notes: base.NoteBook) -> Iterator[Feature]:
        features: dict[str, dict[str, Any]] = self._info["features"]
        if "action" not in features:
            raise damaged(self._root / INFO, "is missing", field="features.action")
        fields = {"action": "action"}
        for ours, theirs in (("reward", _REWARDS), ("success", _SUCCESSES)):
            if found := next((name for name in theirs if name in features), None):
                fields[found] = ours
        for ours in ("terminated", "truncated"):
            if f"next.{ours}" in features:
                fields[f"next.{ours}"] = ours
        cameras = [name for name, feature in features.items() if feature["dtype"] in ("image", "video") and _is_rgb(feature)]
        for name, feature in features.items():
            if name in COUNTERS or name in _DONES:
                continue
            if name in cameras:
                camera = name.removeprefix("observation.").removeprefix("images.")
                key = "rgb" if len(cameras) == 1 else f"rgb.{camera}"
                # Some data sets put the channels first, and say so in the names or not at all.
                sides = feature["shape"][:2] if feature["shape"][2] == 3 else feature["shape"][1:]
                yield Feature(f"observation.{key}", name, feature["dtype"], "uint8", (*sides, 3))
            elif name in fields or name.startswith("observation."):
                if (read := _column(fields.get(name, name), name, feature)) is not None:
                    yield read
                else:
                    notes.add(name, "lost", f"columns of {feature['dtype']} are not read")
            else:
                notes.add(name, "lost", "no part of an episode here")

    def _foreign_info(self, bounds: base.ActionBounds, notes: base.NoteBook) -> RecordingInfo:
        observation: dict[str, TensorSpec | VariableSpec] = {}
        for feature in self._features:
            if feature.field.startswith("observation."):
                key = feature.field.removeprefix("observation.")
                observation[key] = VariableSpec("text") if feature.storage == "text" else TensorSpec(feature.shape, feature.dtype)
        if not observation:
            raise damaged(self._root / INFO, "names no feature 'observation.…'", field="features")
        notes.add("spec.task", "filled", "the format has no name of a simulator's task; the folder's")
        several = len(set(self._episode_tasks)) > 1
        if several:
            notes.add("instruction", "kept", "differs between episodes")
        spec = SimSpec(
            task=self._root.resolve().name,
            observation=observation,
            action=ActionSpec.text() if any(f.field == "action" and f.storage == "text" for f in self._features) else bounds.spec(notes),
            control_hz=float(self._fps),
            instruction=None if several else self._episode_tasks[0],
            reports_success=any(feature.field == "success" for feature in self._features),
        )
        return RecordingInfo(
            spec, sim={}, policy=base.IMPORTED, metadata={"format": self.format, "robot_type": self._info.get("robot_type")}
        )


def _is_rgb(feature: Mapping[str, Any]) -> bool:
    info = feature.get("info") or {}
    depth = isinstance(info, dict) and (info.get("video.is_depth_map") or info.get("is_depth_map"))
    return len(feature["shape"]) == 3 and 3 in (feature["shape"][0], feature["shape"][-1]) and not depth


def _column(field: str, name: str, feature: Mapping[str, Any]) -> Feature | None:
    """A column of numbers or texts; None for any other."""
    shape = tuple(feature["shape"])
    if feature["dtype"] == "string":
        return Feature(field, name, "text") if field.startswith("observation.") or field == "action" else None
    try:
        dtype = np.dtype(feature["dtype"])
    except TypeError:
        return None
    if dtype.kind not in "biuf":
        return None
    if field == "action" and dtype.kind in "iu":
        return Feature(field, name, "column", "int64", (1,)) if shape in ((), (1,)) else Feature(field, name, "column", "float32", shape)
    scalar = field in ("reward", "success", "terminated", "truncated")
    return Feature(field, name, "column", str(dtype), () if scalar else shape)


_Open = TypeVar("_Open", DataFile, VideoReader)


def _cached(cache: OrderedDict[Path, _Open], path: Path, limit: int, make: Callable[[], _Open]) -> _Open:
    """Open a file or return it from the cache; closes the least recently used ones beyond `limit`."""
    if path not in cache:
        cache[path] = make()
    cache.move_to_end(path)
    while len(cache) > limit:
        cache.popitem(last=False)[1].close()
    return cache[path]
