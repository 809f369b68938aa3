"""Minari's data sets: what it documents, what we write, and Minari itself where it is there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from PIL import Image

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.formats.minari import MinariRecording, action_spec_of, leaves_of, observation_space_of
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import CHOICES, PICTURES, STATE, WORDS, info_of, record, words_episode

ENV_SPEC = {
    "id": "FrozenLake-v1",
    "entry_point": "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
    "max_episode_steps": 100,
    "kwargs": {},
}


def box(shape: list[int], low: Any, high: Any, dtype: str = "float32") -> dict[str, Any]:
    return {"type": "Box", "dtype": dtype, "shape": shape, "low": np.full(shape, low).tolist(), "high": np.full(shape, high).tolist()}


def their_file(folder: Path, space: dict[str, Any], action: dict[str, Any], data: dict[str, Any], steps: int = 3, **metadata: Any) -> Path:
    """One episode; `data` goes over the standard columns, None leaves one out."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    last = np.arange(steps) == steps - 1
    columns = {"rewards": np.arange(steps, dtype=np.float64), "terminations": last, "truncations": np.zeros(steps, bool)} | data
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        group = file.create_group("episode_0")
        group.attrs.update({"id": 0, "total_steps": steps, "seed": 11, "options/level": 2})
        for name, array in columns.items():
            if array is not None:
                group.create_dataset(name, data=array)
    about = {"total_episodes": 1, "total_steps": steps, "data_format": "hdf5", "dataset_id": "toy/lake-v0", "minari_version": "0.5.3"}
    about |= {"observation_space": json.dumps(space), "action_space": json.dumps(action), "author": ["A"]}
    (folder / "data" / "metadata.json").write_text(json.dumps(about | metadata))
    return folder


def test_their_layout_is_read(tmp_path: Path) -> None:
    data = {"observations": np.arange(8, dtype=np.float64).reshape(4, 2), "actions": np.full((3, 1), 0.5, np.float32)}
    data["infos/success"] = np.array([True, False, False, True])
    path = their_file(tmp_path, box([2], -np.inf, np.inf, "float64"), box([1], -2, 2), data, env_spec=json.dumps(ENV_SPEC))
    for given in (path, path / "data"):
        with open_recording(given) as recording:
            assert isinstance(recording, MinariRecording)
            assert (recording.spec.task, recording.spec.max_episode_steps) == ("FrozenLake-v1", 100)
            assert recording.spec.action == ActionSpec.continuous([-2], [2])
            assert recording.spec.observation == {"state": TensorSpec((2,), "float64")}
            assert recording.spec.reports_success
            assert recording.info.metadata["author"] == ["A"]
            episode = recording.episode(0)
            assert (episode.seed, episode.metadata) == (11, {"reset_options": {"level": 2}})
            assert episode.observation["state"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
            assert episode.success.tolist() == [False, False, True], "the first info is the reset's"
            assert episode.reward.tolist() == [0, 1, 2]
            assert episode.terminated.tolist() == [False, False, True]
            assert validate(recording) == []


def test_spaces_within_spaces_become_parts(tmp_path: Path) -> None:
    inner = {"type": "Dict", "subspaces": {"pos": box([2], -1, 1), "n": {"type": "Discrete", "n": 5, "start": 0, "dtype": "int64"}}}
    space = {"type": "Dict", "subspaces": {"robot": inner, "pair": {"type": "Tuple", "subspaces": [box([1], 0, 1), box([1], 0, 1)]}}}
    space["subspaces"]["said"] = {"type": "Text", "max_length": 9, "min_length": 0, "charset": "ab"}
    data = {
        "observations/robot/pos": np.zeros((4, 2), np.float32),
        "observations/robot/n": np.arange(4),
        "observations/pair/_index_0": np.ones((4, 1), np.float32),
        "observations/pair/_index_1": np.full((4, 1), 2, np.float32),
        "observations/said": np.array([b"a", b"", b"b", b"ab"]),
        "actions": np.array([1, 0, 2]),
    }
    their_file(tmp_path, space, {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}, data)
    with open_recording(tmp_path) as recording:
        observation = recording.episode(0).observation
        assert list(observation) == ["robot.pos", "robot.n", "pair.0", "pair.1", "said"]
        assert observation["robot.n"].tolist() == [0, 1, 2, 3]
        assert observation["pair.1"].tolist() == [[2]] * 4
        assert list(observation["said"]) == ["a", "", "b", "ab"]
        assert recording.spec.action == ActionSpec.discrete(3)
        assert recording.episode(0).action.tolist() == [[1], [0], [2]]
        assert validate(recording) == []


@pytest.mark.parametrize("varying", [False, True])
def test_pictures_in_jpeg_are_decoded(varying: bool, tmp_path: Path) -> None:
    pictures = np.stack([np.full((32, 40, 3), 60 * row if varying else 60, np.uint8) for row in range(4)])
    files = []
    for picture in pictures:
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="JPEG")
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    their_file(tmp_path, box([32, 40, 3], 0, 255, "uint8"), box([1], -1, 1), {"actions": np.zeros((3, 1), np.float32)})
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "a") as file:
        if varying:
            rows = file["episode_0"].create_dataset("observations", (4,), dtype=h5py.vlen_dtype(np.uint8))
            for row, each in enumerate(files):
                rows[row] = each
        else:
            assert len({len(each) for each in files}) == 1
            file["episode_0"]["observations"] = np.stack(files)
    with open_recording(tmp_path) as recording:
        assert list(recording.spec.observation) == ["rgb"]
        # A picture of one colour survives JPEG to one level.
        assert np.abs(recording.episode(0).observation["rgb"].astype(int) - pictures).max() <= 1


def test_bounds_without_end_come_from_the_data(tmp_path: Path) -> None:
    data = {"observations": np.zeros((4, 2), np.float32), "actions": np.array([[3], [-1], [0]], np.float32)}
    their_file(tmp_path, box([2], -1, 1), box([1], -np.inf, np.inf), data)
    with open_recording(tmp_path) as recording:
        assert recording.spec.action == ActionSpec.continuous([-1], [3])
        notes = {note.field: note for note in recording.notes}  # type: ignore[attr-defined]
        assert notes["spec.action"].fate == notes["success"].fate == "filled"


def test_spaces_we_write_are_read_again() -> None:
    parts: dict[str, TensorSpec | VariableSpec] = {
        "a": TensorSpec((2, 3)),
        "b": TensorSpec((), "int64"),
        "rgb": TensorSpec((64, 64, 3), "uint8"),
        "flag": TensorSpec((1,), "bool"),
        "text": VariableSpec("text"),
    }
    space = json.loads(json.dumps(observation_space_of(parts, {"text": (7, "abc")})))
    assert {leaf.key: leaf.spec for leaf in leaves_of(space)} == parts
    assert space["subspaces"]["text"] == {"type": "Text", "max_length": 7, "min_length": 0, "charset": "abc"}
    assert [leaf.key for leaf in leaves_of(space) if leaf.is_picture] == ["rgb"]
    assert observation_space_of({"state": TensorSpec((1,))}, {})["type"] == "Box", "a lone state is no Dict"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"type": "Discrete", "n": 3, "start": 1}, "actions begin at 1, not at 0"),
        ({"type": "MultiDiscrete", "nvec": [2, 2]}, "actions of kind MultiDiscrete; Box, Discrete and Text are read"),
        ({"type": "Box", "shape": [2], "low": [0], "high": [1]}, "action bounds of another shape"),
    ],
)
def test_actions_that_are_not_read(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action_spec_of(space)


@pytest.mark.parametrize(
    ("data", "metadata", "message"),
    [
        ({"rewards": np.zeros(2)}, {}, r"main_data\.hdf5', episode 0, field 'rewards': holds 2 rows, total_steps says 3"),
        ({"actions": np.zeros((4, 1))}, {}, r"main_data\.hdf5', episode 0, field '/episode_0/actions': has 4 rows instead of 3"),
        ({"terminations": None}, {}, r"field '/episode_0/terminations': is missing"),
        ({"observations": np.zeros((3, 2))}, {}, r"field '/episode_0/observations': has 3 rows instead of 4"),
        ({"observations": np.zeros((4, 5))}, {}, r"field 'observations': has rows of \[5\], the space says \[2\]"),
        ({"observations": np.full((4, 2), np.nan)}, {}, r"episode 0, field 'observation\.state': holds nan at step 0"),
        ({"infos/success": np.zeros(7)}, {}, r"field 'infos/success': has 7 rows instead of 3 or 4"),
        ({}, {"total_episodes": 5}, r"holds 1 episodes, metadata\.json says 5"),
        ({}, {"observation_space": "{"}, r"metadata\.json', field 'observation_space': cannot be read as JSON"),
        ({}, {"observation_space": None}, r"metadata\.json', field 'observation_space': is missing"),
        ({}, {"action_space": '{"type": "Graph"}'}, r"metadata\.json', field 'spaces': holds a space that cannot be read"),
        ({}, {"data_format": "arrow"}, r"metadata\.json', field 'data_format': is 'arrow'; of Minari's storages only hdf5 is read"),
    ],
)
def test_damage_is_named(data: dict[str, Any], metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    columns = {"observations": np.zeros((4, 2), np.float32), "actions": np.zeros((3, 1), np.float32)} | data
    their_file(tmp_path, box([2], -1, 1), box([1], -1, 1), columns, **metadata)
    with pytest.raises(RecordingError, match=message) as caught, open_recording(tmp_path) as recording:
        recording.episode(0)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short(tmp_path: Path) -> None:
    columns = {"observations": np.zeros((4, 2), np.float32), "actions": np.zeros((3, 1), np.float32)}
    their_file(tmp_path, box([2], -1, 1), box([1], -1, 1), columns)
    path = tmp_path / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RecordingError, match=r"main_data\.hdf5': cannot be opened as HDF5"):
        open_recording(tmp_path)


def test_minari_itself_reads_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    cases = {
        "state": (STATE, [make_episode(STATE, seed, 3 + seed) for seed in range(2)]),
        "look": (PICTURES, [make_episode(PICTURES, 4, 3)]),
        "maze": (CHOICES, [make_episode(CHOICES, 2, 5)]),
        "words": (WORDS, [words_episode(1, 3)]),
    }
    for name, (spec, episodes) in cases.items():
        with record(tmp_path / ".native" / name, info_of(spec), episodes) as source:
            write_foreign(source, tmp_path / f"{name}-v0", "minari")
        loaded = minari.load_dataset(f"{name}-v0")
        assert (loaded.total_episodes, loaded.total_steps) == (len(episodes), sum(episode.num_steps for episode in episodes))
        for found, expected in zip(loaded.iterate_episodes(), episodes, strict=True):
            actions = expected.action.reshape(-1) if spec.action.kind == "discrete" else expected.action
            np.testing.assert_array_equal(np.asarray(found.actions, actions.dtype), actions)
            np.testing.assert_array_equal(found.rewards, expected.reward)
            np.testing.assert_array_equal(found.terminations, expected.terminated)
            np.testing.assert_array_equal(found.truncations, expected.truncated)
            np.testing.assert_array_equal(found.infos["success"][1:], expected.success)
            observations = {"state": found.observations} if list(spec.observation) == ["state"] else found.observations
            for key, part in expected.observation.items():
                np.testing.assert_array_equal(np.asarray(observations[key], part.dtype), np.asarray(part))
                space = loaded.observation_space if key == "state" and name == "state" else loaded.observation_space[key]
                assert space.contains(part[0] if spec.observation[key] != VariableSpec("text") else str(part[1]))
        assert [int(metadata["seed"]) for metadata in loaded.storage.get_episode_metadata(range(len(episodes)))] == [
            e.seed for e in episodes
        ]


def test_we_read_what_minari_itself_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, buffers = gymnasium.make("CartPole-v1", max_episode_steps=30), []
    for seed in (5, 6):
        observations, actions, flags = [env.reset(seed=seed)[0]], [], [(0.0, False, False)]
        while not any(flags[-1][1:]):
            actions.append(len(actions) % 3 % 2)
            observation, *row, _ = env.step(actions[-1])
            observations.append(observation)
            flags.append(tuple(row))
        rewards, terminations, truncations = (list(column) for column in zip(*flags[1:], strict=True))
        around = {"observations": np.stack(observations), "actions": actions, "infos": {}}
        buffers.append(EpisodeBuffer(seed=seed, rewards=rewards, terminations=terminations, truncations=truncations, **around))
    minari.create_dataset_from_buffers("cart-v0", buffers, env=env, algorithm_name="every third to the right")
    env.close()
    with open_recording(tmp_path / "cart-v0") as recording:
        assert (recording.spec.task, recording.spec.action) == ("CartPole-v1", ActionSpec.discrete(2))
        assert recording.seeds.tolist() == [5, 6]
        assert validate(recording) == []
        for found, expected in zip(recording, buffers, strict=True):
            np.testing.assert_array_equal(found.observation["state"], expected.observations)
            assert found.action[:, 0].tolist() == expected.actions
            assert found.reward.tolist() == expected.rewards
            assert found.terminated.tolist() == expected.terminations


def test_the_id_follows_the_folder(tmp_path: Path) -> None:
    """So that Minari finds it there."""
    spec = SimSpec("T", {"state": TensorSpec((1,))}, ActionSpec.continuous([-1], [1]))
    with record(tmp_path / "native", info_of(spec), [make_episode(spec, 0, 2)]) as source:
        for name, expected in (("push-v3", "push-v3"), ("my data", "my_data-v0")):
            write_foreign(source, tmp_path / name, "minari")
            metadata = json.loads((tmp_path / name / "data" / "metadata.json").read_text())
            assert metadata["dataset_id"] == expected
            assert metadata["jpeg_encoding"] is False


def test_below_minaris_folder_the_id_is_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    spec = SimSpec("T", {"state": TensorSpec((1,))}, ActionSpec.continuous([-1], [1]))
    with record(tmp_path / "native", info_of(spec), [make_episode(spec, 0, 2)]) as source:
        place = tmp_path / "minari" / "ours" / "push-v2"
        write_foreign(source, place, "minari")
        assert json.loads((place / "data" / "metadata.json").read_text())["dataset_id"] == "ours/push-v2"
        for wrong, typed in (("push", "push-v0"), ("our own/push", "our_own/push-v0"), ("push v1", "push_v1-v0")):
            with pytest.raises(RecordingError, match=f"Minari finds data sets by their folder.*Type: output=.*minari/{typed}"):
                write_foreign(source, tmp_path / "minari" / wrong, "minari")
    assert sorted(path.name for path in (tmp_path / "minari").rglob("*-v*")) == ["push-v2"]
