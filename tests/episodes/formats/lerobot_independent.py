"""A reader of LeRobotDataset v3 made of pyarrow and PyAV by its published layout alone; nothing of this package is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq


def read(root: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(info.json, {column or camera: rows, "task": text} of each episode), found as LeRobot finds them."""
    info = json.loads((root / "meta" / "info.json").read_text())
    table = pq.read_table(root / "meta" / "tasks.parquet")
    index = json.loads(table.schema.metadata[b"pandas"])["index_columns"][0]
    by_index = dict(zip(table["task_index"].to_pylist(), table[index].to_pylist(), strict=True))
    rows = [row for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["episode_index"] for row in rows] == list(range(info["total_episodes"]))
    assert rows[-1]["dataset_to_index"] == info["total_frames"]
    episodes = []
    for row in rows:
        path = root / info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        data = pq.read_table(path, filters=[("episode_index", "=", row["episode_index"])])
        assert data["index"].to_pylist() == list(range(row["dataset_from_index"], row["dataset_to_index"]))
        assert data["frame_index"].to_pylist() == list(range(row["length"]))
        episode: dict[str, Any] = {"task": by_index[data["task_index"][0].as_py()], "tasks": row["tasks"]}
        for name, feature in info["features"].items():
            if feature["dtype"] == "video":
                episode[name] = _pictures(root, info, name, row, np.asarray(data["timestamp"]))
            else:
                episode[name] = data[name].to_pylist()
        episodes.append(episode)
    return info, episodes


def _pictures(root: Path, info: dict[str, Any], name: str, row: dict[str, Any], seconds: np.ndarray) -> np.ndarray:
    """The picture whose time is nearest to that of each step, within LeRobot's default tolerance of 1e-4 s."""
    where = {"chunk_index": row[f"videos/{name}/chunk_index"], "file_index": row[f"videos/{name}/file_index"]}
    with av.open(str(root / info["video_path"].format(video_key=name, **where))) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    times, found = np.array([time for time, _ in frames]), []
    for second in row[f"videos/{name}/from_timestamp"] + seconds.astype(np.float64):
        nearest = int(np.abs(times - second).argmin())
        assert abs(times[nearest] - second) < 1e-4
        assert second < row[f"videos/{name}/to_timestamp"]
        found.append(frames[nearest][1])
    return np.stack(found)
