"""Files and columns of a LeRobotDataset v3 (https://huggingface.co/docs/lerobot/lerobot-dataset-v3), and the fields of recordings in them.

``meta/info.json`` lists the *features*: columns of ``data/chunk-000/file-000.parquet`` (a row per step, several episodes per file), and
videos ``videos/{feature}/chunk-000/file-000.mp4`` (several episodes per file, in order). ``meta/episodes`` gives each episode's rows and
seconds, ``meta/tasks.parquet`` the tasks, ``meta/stats.json`` the features' statistics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from embodied_rl.episodes.formats.base import SIDE_ENTRY
from embodied_rl.episodes.recording import damaged
from embodied_rl.errors import brief, from_extra

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES_DIR = "meta/episodes"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = EPISODES_DIR + "/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
SIDE_INFO, SIDE_EPISODES = f"meta/{SIDE_ENTRY}/recording.json", f"meta/{SIDE_ENTRY}/episodes.jsonl"
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
