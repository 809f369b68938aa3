"""LeRobot's data sets: read by an independent reader, by LeRobot itself where it is there, and theirs by ours."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import lerobot as layout
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.formats.lerobot import LeRobotRecording
from embodied_rl.episodes.formats.lerobot_writer import _DataFiles, picture_stats, pooled, vector_stats
from embodied_rl.episodes.pictures import VideoWriter
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingError
from embodied_rl.errors import MissingExtraError
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats import lerobot_independent
from tests.episodes.formats.samples import STATE, info_of, record, rich_episode

SPEC = SimSpec(
    "PickCube-v1",
    {"state": TensorSpec((3,)), "rgb": TensorSpec((33, 48, 3), "uint8"), "grid": TensorSpec((2, 3), "float64")},
    ActionSpec.continuous([-1, -2], [1, 2]),
    control_hz=20,
    instruction="move it",
    reports_success=True,
)


def smooth_episode(seed: int, num_steps: int, **fields: Any) -> RecordedEpisode:
    """Pictures as a camera makes them: noise would not survive a video. Each has a colour of its own, to be told from its neighbours."""
    y, x = np.mgrid[:33, :48]
    pictures = [np.stack([y * 2 + 15 * t, x * 2 + 40 * seed, np.full_like(y, 20 * t)], -1) for t in range(num_steps + 1)]
    episode = make_episode(SPEC, seed, num_steps, **fields)
    episode.observation["rgb"][:] = np.stack(pictures).astype(np.uint8)
    return episode


@pytest.fixture(scope="module")
def episodes() -> list[RecordedEpisode]:
    return [
        smooth_episode(0, 5, images={"front": np.zeros((6, 20, 20, 3), np.uint8)}, ends="truncated"),
        smooth_episode(1, 7, images={"front": np.full((8, 20, 20, 3), 200, np.uint8)}, instruction="the other"),
        smooth_episode(2, 3, images={"front": np.full((4, 20, 20, 3), 90, np.uint8)}, success=False),
    ]


@pytest.fixture(scope="module")
def written(episodes: list[RecordedEpisode], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lerobot")
    with record(folder / "native", info_of(SPEC), episodes) as source:
        for video in ("mp4", "png"):
            write_foreign(source, folder / video, "lerobot", video=video)
    return folder


@pytest.mark.parametrize("video", ["mp4", "png"])
def test_an_independent_reader_finds_everything(video: str, written: Path, episodes: list[RecordedEpisode]) -> None:
    info, found = lerobot_independent.read(written / video)
    assert (info["codebase_version"], info["fps"], info["total_tasks"]) == ("v3.0", 20, 2)
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [3], "names": None}
    assert info["splits"] == {"train": "0:3"}
    side = {"mp4": [34, 48, 3], "png": [33, 48, 3]}[video]
    assert info["features"]["observation.images.rgb"]["shape"] == side, "H.264 has even sides"
    for there, episode in zip(found, episodes, strict=True):
        steps = episode.num_steps
        assert there["task"] == (episode.instruction or "move it")
        assert there["tasks"] == [there["task"]]
        np.testing.assert_array_equal(np.array(there["action"], np.float32), episode.action)
        np.testing.assert_array_equal(np.array(there["observation.state"], np.float32), episode.observation["state"][:steps])
        np.testing.assert_array_equal(np.array(there["observation.grid"]), episode.observation["grid"][:steps])
        np.testing.assert_array_equal(np.array(there["next.reward"], np.float32), episode.reward)
        assert there["next.success"] == episode.success.tolist()
        assert there["next.done"] == [False] * (steps - 1) + [True]
        np.testing.assert_allclose(there["timestamp"], np.arange(steps) / 20, rtol=1e-6)
        expected = episode.observation["rgb"][:steps].astype(int)
        if video == "png":
            decoded = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in there["observation.images.rgb"]]
            np.testing.assert_array_equal(decoded, expected)
        else:
            # A neighbouring picture would be off by 15 in red and 20 in blue everywhere.
            assert np.abs(there["observation.images.rgb"][:, :33].astype(int) - expected).mean() < 4
            assert np.abs(there["observation.images.view.front"].astype(int) - episode.images["front"][:steps]).max() <= 3


def test_ours_reads_videos_at_any_place(written: Path, episodes: list[RecordedEpisode]) -> None:
    with open_recording(written / "mp4") as recording:
        assert validate(recording) == []
        for number, time in ((2, 1), (0, 4), (1, 6), (1, 0), (0, 0), (2, 2)):
            step = recording.step(number, time)
            expected = episodes[number].observation["rgb"][time].astype(int)
            assert step.observation["rgb"].shape == (33, 48, 3)
            assert np.abs(step.observation["rgb"].astype(int) - expected).mean() < 4
            np.testing.assert_array_equal(step.action, episodes[number].action[time])


def test_statistics_are_those_of_all_steps(written: Path, episodes: list[RecordedEpisode]) -> None:
    stats = json.loads((written / "mp4" / "meta" / "stats.json").read_text())
    states = np.concatenate([episode.observation["state"][:-1] for episode in episodes]).astype(np.float64)
    for name, expected in (("mean", states.mean(0)), ("std", states.std(0)), ("q90", np.quantile(states, 0.9, axis=0))):
        np.testing.assert_allclose(stats["observation.state"][name], expected, rtol=1e-9)
    assert stats["observation.state"]["count"] == [5 + 7 + 3]
    assert stats["next.reward"]["max"] == [float(max(episode.reward.max() for episode in episodes))]
    # Pictures of one colour: (5 · 0 + 7 · 200 + 3 · 90) / 15 / 255 = 1670 / 3825, and extremes 0 and 200 / 255.
    front = stats["observation.images.view.front"]
    np.testing.assert_allclose(front["mean"], np.full((3, 1, 1), 1670 / 3825))
    np.testing.assert_allclose(front["min"], np.zeros((3, 1, 1)))
    np.testing.assert_allclose(front["max"], np.full((3, 1, 1), 200 / 255))
    # Var = (7 · 200² + 3 · 90²) / 15 − (1670 / 15)² = 20286.67 − 12395.11 = 7891.56.
    np.testing.assert_allclose(front["std"], np.full((3, 1, 1), np.sqrt(7891.5556) / 255), rtol=1e-6)
    rows = pq.read_table(written / "mp4" / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    np.testing.assert_allclose(rows[1]["stats/action/min"], episodes[1].action.min(0))


def test_a_first_episode_of_one_step_begins_a_video_and_grey_pictures_are_not_held_together(tmp_path: Path, monkeypatch: Any) -> None:
    spec = SimSpec(
        "Look-v1", {"grey": TensorSpec((33, 48, 1), "uint8"), "rgb": TensorSpec((17, 33, 3), "uint8")}, SPEC.action, control_hz=20
    )
    shown = [make_episode(spec, seed, steps, ends="truncated") for seed, steps in ((0, 1), (1, 1), (2, 4))]
    read: list[str] = []
    column = _DataFiles.column

    def noted(self: _DataFiles, name: str) -> np.ndarray:
        read.append(name)
        return column(self, name)

    monkeypatch.setattr(_DataFiles, "column", noted)
    with record(tmp_path / "native", info_of(spec), shown) as source:
        write_foreign(source, tmp_path / "there", "lerobot")
    grey = np.concatenate([episode.observation["grey"][:-1] for episode in shown])
    stats = json.loads((tmp_path / "there" / "meta" / "stats.json").read_text())["observation.grey"]
    np.testing.assert_allclose([stats["mean"], stats["std"], stats["max"]], [[grey.mean()], [grey.std()], [grey.max()]])
    assert "action" in read
    assert "observation.grey" not in read
    with open_recording(tmp_path / "there") as recording:
        assert validate(recording) == []
        assert recording.lengths.tolist() == [1, 1, 4]


def test_a_text_of_every_step_is_in_memory_once(tmp_path: Path) -> None:
    """As in the file, where the same text of thousands of steps takes no space."""
    spec = SimSpec("Chat-v0", {"text": VariableSpec("text"), "note": VariableSpec("json")}, SPEC.action, control_hz=20)
    rows = {"text": np.array(["the same"] * 3 + ["another"], object), "note": np.array([{"a": 1}] * 4, object)}
    with record(tmp_path / "native", info_of(spec), [make_episode(spec, 0, 3, observation=rows)]) as source:
        write_foreign(source, tmp_path / "there", "lerobot")
    with open_recording(tmp_path / "there") as recording:
        found = recording.episode(0).observation
    assert found["text"].tolist() == ["the same"] * 4
    assert len({id(text) for text in found["text"]}) == len({id(note) for note in found["note"]}) == 1
    assert found["note"][0] == {"a": 1}


def test_statistics_by_hand() -> None:
    stats = vector_stats(np.array([1, 2, 3, 6], np.float32))
    # Mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5, median 2.5; the quantile 0.1 of 4 numbers lies 0.3 of the way from 1 to 2.
    assert [stats[name].tolist() for name in ("min", "max", "mean", "count", "q50")] == [[1], [6], [3], [4], [2.5]]
    np.testing.assert_allclose([stats["std"][0], stats["q10"][0]], [np.sqrt(3.5), 1.3])
    whole = vector_stats(np.arange(12.0).reshape(6, 2))
    parts = pooled([vector_stats(np.arange(4.0).reshape(2, 2)), vector_stats(np.arange(4.0, 12.0).reshape(4, 2))])
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(parts[name], whole[name], err_msg=name)
    half = np.zeros((1, 2, 2, 3), np.uint8)
    half[0, 0] = 255
    pictures = picture_stats(half)
    assert (pictures["mean"].shape, pictures["mean"].ravel().tolist(), pictures["std"].ravel().tolist()) == (
        (3, 1, 1),
        [0.5] * 3,
        [0.5] * 3,
    )


def test_files_are_continued_in_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has reached its size is closed; each of these episodes is larger than that."""
    monkeypatch.setattr(layout, "DATA_FILE_MB", 1e-6)
    monkeypatch.setattr(layout, "VIDEO_FILE_MB", 1e-6)
    monkeypatch.setattr(layout, "FILES_PER_CHUNK", 2)
    made = [smooth_episode(seed, 2 + seed) for seed in range(3)]
    with record(tmp_path / "native", info_of(SPEC), made) as source:
        write_foreign(source, tmp_path / "there", "lerobot")
    assert {path.relative_to(tmp_path / "there" / "data").as_posix() for path in (tmp_path / "there" / "data").rglob("*.parquet")} == {
        "chunk-000/file-000.parquet",
        "chunk-000/file-001.parquet",
        "chunk-001/file-000.parquet",
    }
    _, found = lerobot_independent.read(tmp_path / "there")
    with open_recording(tmp_path / "there") as recording:
        for there, again, episode in zip(found, recording, made, strict=True):
            np.testing.assert_array_equal(np.array(there["action"], np.float32), episode.action)
            np.testing.assert_array_equal(again.action, episode.action)
            assert np.abs(np.asarray(again.observation["rgb"])[:-1].astype(int) - there["observation.images.rgb"][:, :33]).max() == 0


def test_fps_is_a_whole_number(tmp_path: Path) -> None:
    from dataclasses import replace

    for hz, fps, fate in ((12.5, 12, "changed"), (None, 10, "filled"), (20.0, 20, None)):
        spec = replace(STATE, control_hz=hz)
        with record(tmp_path / f"native{fps}", info_of(spec), [make_episode(spec, 0, 3)]) as source:
            notes = write_foreign(source, tmp_path / f"there{fps}", "lerobot")
        assert json.loads((tmp_path / f"there{fps}" / "meta" / "info.json").read_text())["fps"] == fps
        assert next((note.fate for note in notes if note.field == "fps"), None) == fate


def test_tasks_are_the_index_of_a_pandas_table(written: Path) -> None:
    """LeRobot looks a task up by `tasks.iloc[index].name`."""
    pd = pytest.importorskip("pandas")
    tasks = pd.read_parquet(written / "mp4" / "meta" / "tasks.parquet")
    assert list(tasks.columns) == ["task_index"]
    assert [tasks.iloc[index].name for index in range(2)] == ["move it", "the other"]


def test_lerobot_itself_reads_ours(written: Path, episodes: list[RecordedEpisode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
    for video in ("mp4", "png"):
        data = module.LeRobotDataset("local/ours", root=written / video, video_backend="pyav")
        rows = [(episode, step) for episode in episodes for step in range(episode.num_steps)]
        assert len(data) == len(rows)
        for index, (episode, step) in enumerate(rows):
            item = data[index]
            np.testing.assert_array_equal(item["action"].numpy(), episode.action[step])
            np.testing.assert_array_equal(item["observation.state"].numpy(), episode.observation["state"][step])
            assert item["task"] == (episode.instruction or "move it")
            picture = 255 * item["observation.images.rgb"].numpy().transpose(1, 2, 0)[:33]
            assert np.abs(picture - episode.observation["rgb"][step]).mean() < (1e-3 if video == "png" else 4)


# ---- theirs ---------------------------------------------------------------------------------------------------------

FPS = 10


def their_data_set(root: Path, info: dict[str, Any] | None = None, **columns: Any) -> Path:
    """Two episodes of T = 3 and 4 in one file and one row group, as LeRobot's own conversion from older versions leaves them."""
    lengths, total = (3, 4), 7
    picture = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 77, np.uint8)).save(picture, "PNG")
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
        "observation.images.top": {"dtype": "video", "shape": [16, 16, 3], "names": ["height", "width", "channels"]},
        "observation.images.wrist": {"dtype": "image", "shape": [3, 16, 16], "names": ["channels", "height", "width"]},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "effort": {"dtype": "float32", "shape": [2], "names": None},
        **layout.COUNTERS,
    }
    data = {
        "observation.state": pa.array(np.arange(14, dtype=np.float32).reshape(7, 2).tolist(), pa.list_(pa.float32())),
        "observation.images.wrist": pa.array([{"bytes": picture.getvalue(), "path": "x.png"}] * total),
        "action": pa.array([[0.5, -3.0]] * total, pa.list_(pa.float32())),
        "next.reward": pa.array(np.arange(7, dtype=np.float32)),
        "next.done": pa.array([False, False, True, False, False, False, False]),
        "effort": pa.array([[0.0, 0.0]] * total, pa.list_(pa.float32())),
        "timestamp": pa.array([step / FPS for length in lengths for step in range(length)], pa.float32()),
        "frame_index": pa.array([step for length in lengths for step in range(length)]),
        "episode_index": pa.array([0] * 3 + [1] * 4),
        "index": pa.array(range(total)),
        "task_index": pa.array([1] * 3 + [0] * 4),
    }
    for name, array in columns.items():
        if array is None:
            del data[name.replace("__", ".")]
        else:
            data[name.replace("__", ".")] = array
    about = {
        "codebase_version": "v3.0",
        "robot_type": "so100",
        "total_episodes": 2,
        "total_frames": total,
        "fps": FPS,
        "features": features,
    }
    about |= {"data_path": layout.DATA_PATH, "video_path": layout.VIDEO_PATH} | (info or {})
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", "videos/observation.images.top/chunk-000"):
        (root / folder).mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(about))
    pq.write_table(pa.table(data), root / "data" / "chunk-000" / "file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["stack", "sort"]}), root / "meta" / "tasks.parquet")
    video = VideoWriter(root / "videos" / "observation.images.top" / "chunk-000" / "file-000.mp4", 16, 16, FPS, lossless=False)
    for step in range(total):
        video.add(np.full((16, 16, 3), 30 * step, np.uint8))
    video.close()
    places = [
        {
            "episode_index": number,
            "tasks": ["x"],
            "length": length,
            "dataset_from_index": first,
            "dataset_to_index": first + length,
            "videos/observation.images.top/from_timestamp": first / FPS,
        }
        for number, (length, first) in enumerate(zip(lengths, (0, 3), strict=True))
    ]
    zeros = dict.fromkeys(("data/chunk_index", "data/file_index"), 0)
    zeros |= {f"videos/observation.images.top/{name}": 0 for name in ("chunk_index", "file_index")}
    pq.write_table(pa.Table.from_pylist([place | zeros for place in places]), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    return root


def test_their_layout_is_read(tmp_path: Path) -> None:
    with open_recording(their_data_set(tmp_path / "sorting")) as recording:
        assert isinstance(recording, LeRobotRecording)
        assert (recording.spec.task, recording.spec.control_hz, recording.spec.instruction) == ("sorting", 10.0, None)
        assert recording.spec.action == ActionSpec.continuous([0.5, -3], [0.5, -3])
        assert recording.lengths.tolist() == [3, 4]
        assert recording.returns.tolist() == [0 + 1 + 2, 3 + 4 + 5 + 6]
        assert recording.seeds.tolist() == [-1, -2]
        first, second = recording.episode(0), recording.episode(1)
        assert (first.instruction, second.instruction) == ("sort", "stack")
        assert second.observation["state"].tolist() == [[6, 7], [8, 9], [10, 11], [12, 13], [12, 13]]
        assert first.terminated.tolist() == [False, False, True]
        assert (second.terminated.any(), second.truncated[-1]) == (False, True), "its last step is not done"
        colours = np.asarray(second.observation["rgb.top"]).reshape(5, -1).mean(axis=1)
        np.testing.assert_allclose(colours, [90, 120, 150, 180, 180], atol=3)
        assert np.asarray(second.observation["rgb.wrist"]).shape == (5, 16, 16, 3)
        assert (np.asarray(second.observation["rgb.wrist"]) == 77).all()
        assert validate(recording) == []
        fates = {note.field: note.fate for note in recording.notes}
        assert fates["effort"] == "lost"
        assert fates["seed"] == fates["success"] == fates["observation"] == "filled"


def test_a_lone_camera_is_called_rgb(tmp_path: Path) -> None:
    root = their_data_set(tmp_path / "one")
    info = json.loads((root / "meta" / "info.json").read_text())
    del info["features"]["observation.images.wrist"]
    (root / "meta" / "info.json").write_text(json.dumps(info))
    with open_recording(root) as recording:
        assert list(recording.spec.observation) == ["state", "rgb"]


def test_episodes_that_lerobot_appended_to_ours_are_read(written: Path, tmp_path: Path) -> None:
    """Our side entry knows fewer episodes then; the new ones have what the format itself says."""
    shutil.copytree(written / "png", tmp_path / "grown")
    side = tmp_path / "grown" / layout.SIDE_EPISODES
    side.write_text("".join(side.read_text().splitlines(keepends=True)[:2]))
    with open_recording(tmp_path / "grown") as recording:
        assert recording.seeds.tolist() == [0, 1, -3]
        assert recording.episode(2).instruction == "move it"


# ---- damage ---------------------------------------------------------------------------------------------------------


def broken(path: Path, change: Any) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def column(name: str, values: Any) -> Any:
    """A change of one column of a table."""
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


DATA, PLACES, TASKS = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"
VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            DATA,
            column("action", [[0.0, 0.0]] * 6 + [[0.0, float("nan")]]),
            r"file-000\.parquet', episode 1, field 'action': holds nan at step 3",
        ),
        (DATA, column("action", [[0.0, 0.0]] * 6 + [None]), r"episode 1, field 'action': has no value in 1 rows"),
        (DATA, column("action", [[0.0, 0.0]] * 6 + [[0.0]]), r"episode 1, field 'action': has rows of 2 lengths instead of \[2\]"),
        (DATA, column("action", [[0.0, 0.0, 0.0]] * 7), r"episode 0, field 'action': has rows of \[3\] instead of \[2\]"),
        (DATA, column("next.reward", ["a"] * 7), r"episode 0, field 'next\.reward': must hold numbers, holds string"),
        (
            DATA,
            column("episode_index", [0, 0, 1, 1, 1, 1, 1]),
            r"episode 0, field 'episode_index': holds 2 rows of it one after another instead of 3",
        ),
        (DATA, column("task_index", [5] * 7), r"episode 0, field 'task_index': names task 5, which meta/tasks\.parquet does not have"),
        (DATA, lambda table: table.drop_columns(["action"]), r"episode 0, field 'action': is missing"),
        (PLACES, column("length", [3, 5]), r"episodes', episode 1, field 'length': says rows 3 to 7 and length 5; row 3 is next"),
        (PLACES, lambda table: table.slice(0, 1), r"episodes': lists 1 episodes, meta/info\.json says 2"),
        (PLACES, lambda table: table.drop_columns(["data/file_index"]), r"field 'data/file_index': is missing"),
        (PLACES, column("data/file_index", [0, 3]), r"data/chunk-000/file-003\.parquet': is missing"),
        (TASKS, lambda table: table.drop_columns(["task"]), r"tasks\.parquet': must have the columns 'task' and 'task_index'"),
    ],
)
def test_tables_that_lie_are_refused(file: str, change: Any, message: str, tmp_path: Path) -> None:
    root = their_data_set(tmp_path / "x")
    broken(root / file, change)
    with pytest.raises(RecordingError, match=message) as caught, open_recording(root) as recording:
        list(recording)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"codebase_version": "v2.1"},
            r"info\.json', field 'codebase_version': is 'v2\.1'; v3\.x is read\. LeRobot's own convert_dataset_v21",
        ),
        ({"fps": 0}, r"info\.json', field 'fps': must be above 0"),
        ({"features": []}, r"info\.json', field 'features': is \[\]"),
        ({"features": {"action": {"dtype": "float32"}}}, r"info\.json', field 'features\.action': must have a dtype and a shape"),
        ({"data_path": "../../{chunk_index}{file_index}"}, r"info\.json': names '.*', which is not in the data set's folder"),
        ({"data_path": "{nothing}"}, r"info\.json': holds a template '\{nothing\}' that cannot be filled in"),
        ({"total_frames": 9}, r"lists 7 steps, meta/info\.json says 9"),
    ],
)
def test_info_that_lies_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=message):
        open_recording(their_data_set(tmp_path / "x", info=change))


@pytest.mark.parametrize("file", [DATA, PLACES, TASKS])
def test_parquet_files_cut_short(file: str, tmp_path: Path) -> None:
    root = their_data_set(tmp_path / "x")
    whole = (root / file).read_bytes()
    (root / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match=rf"{Path(file).name}': cannot be read as parquet: it is damaged or cut short"):
        open_recording(root)


def test_videos_cut_short_missing_or_too_short(tmp_path: Path) -> None:
    root = their_data_set(tmp_path / "x")
    whole = (root / VIDEO).read_bytes()
    (root / VIDEO).write_bytes(whole[: len(whole) // 2])
    with (
        open_recording(root) as recording,
        pytest.raises(RecordingError, match=r"file-000\.mp4', episode 0, field 'observation\.images\.top': cannot be opened as a video"),
    ):
        recording.episode(0)
    (root / VIDEO).unlink()
    with open_recording(root) as recording, pytest.raises(RecordingError, match=r"file-000\.mp4', episode 1, .* \(No such file"):
        recording.episode(1)
    short = VideoWriter(root / VIDEO, 16, 16, FPS, lossless=False)
    for _ in range(5):
        short.add(np.zeros((16, 16, 3), np.uint8))
    short.close()
    with open_recording(root) as recording:
        problems = validate(recording)
        assert recording.episode(0).num_steps == 3
    # Pictures 0 to 4 are there: the second episode's third, 0.3 + 0.2 s, is not.
    assert len(problems) == 1
    assert "episode 1, field 'observation.images.top': has no picture at 0.500 s" in problems[0]


def test_pictures_that_are_none(tmp_path: Path) -> None:
    rows = pa.array([{"bytes": b"\x80\x04 no picture", "path": "/etc/passwd"}] * 7)
    with open_recording(their_data_set(tmp_path / "x", observation__images__wrist=rows)) as recording:
        problems = validate(recording)
    assert len(problems) == 2
    assert "episode 0, field 'observation.images.wrist': has no picture of [16, 16, 3]" in problems[0]
    with open_recording(
        their_data_set(tmp_path / "y", observation__images__wrist=pa.array([{"bytes": None, "path": "/etc/passwd"}] * 7))
    ) as recording:
        assert "the picture is not in the row" in validate(recording)[0], "paths are not followed"


def test_our_side_entry_is_checked(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "png", tmp_path / "x")
    side = tmp_path / "x" / layout.SIDE_EPISODES
    lines = side.read_text().splitlines()
    side.write_text("\n".join([lines[0], '{"seed": "7"}', lines[2]]))
    with pytest.raises(RecordingError, match=r"episodes\.jsonl', episode 1, field 'embodied_rl': holds '7' for 'seed'"):
        open_recording(tmp_path / "x")
    side.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(RecordingError, match=r"episodes\.jsonl': holds 4 episodes, the data set 3"):
        open_recording(tmp_path / "x")
    path = tmp_path / "x" / layout.SIDE_INFO
    data = json.loads(path.read_text())
    data["features"][0]["name"] = "no.such"
    path.write_text(json.dumps(data))
    with pytest.raises(RecordingError, match=r"recording\.json', field 'no\.such': names a feature that meta/info\.json does not have"):
        open_recording(tmp_path / "x")


def test_states_and_pictures_for_people_have_columns_too(tmp_path: Path) -> None:
    with record(tmp_path / "native", info_of(STATE), [rich_episode(STATE, 0, 3)]) as source:
        write_foreign(source, tmp_path / "there", "lerobot")
    info, (episode,) = lerobot_independent.read(tmp_path / "there")
    assert info["features"]["state.actors.cube"]["shape"] == [13]
    assert not any("/" in name for name in info["features"]), "LeRobot forbids slashes"
    assert len(episode["state.articulations.panda"]) == 3


def test_a_missing_package_is_named_with_the_pip_line(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r'LeRobot data sets needs packages .* pip install "embodied-rl\[formats\]"'):
        open_recording(written / "mp4")
