"""robomimic's and LIBERO's HDF5: what they document, what we write, and robomimic's own loader where it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.formats.robomimic import RobomimicRecording
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.types import ActionSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import CHOICES, STATE, info_of, record, rich_episode

ENV_ARGS = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20, "reward_shaping": False}}


def their_file(path: Path, attributes: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Two demonstrations of T = 3 and 4, named 2 and 10; `changes` {dataset of demo_2: array, or None to leave it out}."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update({"env_args": json.dumps(ENV_ARGS), "total": 7} if attributes is None else attributes)
        for name, steps in (("demo_10", 4), ("demo_2", 3)):
            group = data.create_group(name)
            group.attrs["num_samples"] = steps
            group.attrs["model_file"] = "<mujoco/>"
            arrays = {
                "obs/eef_pos": np.arange(steps * 3, dtype=np.float64).reshape(steps, 3),
                "next_obs/eef_pos": np.arange(3, steps * 3 + 3, dtype=np.float64).reshape(steps, 3),
                "obs/agentview_image": np.full((steps, 4, 4, 3), steps, np.uint8),
                "actions": np.full((steps, 2), 0.5, np.float64),
                "rewards": (np.arange(steps) == steps - 1).astype(np.float64),
                "dones": (np.arange(steps) == steps - 1).astype(np.int64),
                "states": np.ones((steps, 5)),
            }
            for key, array in (arrays | (changes if steps == 3 else {})).items():
                if array is not None:
                    group.create_dataset(key, data=array)
        file.create_dataset("mask/train", data=np.array(["demo_10"], dtype="S"))
    return path


def test_their_layout_is_read(tmp_path: Path) -> None:
    with open_recording(their_file(tmp_path / "low_dim.hdf5")) as recording:
        assert isinstance(recording, RobomimicRecording)
        assert (recording.spec.task, recording.spec.control_hz) == ("Lift", 20.0)
        assert recording.spec.action == ActionSpec.continuous([-1, -1], [1, 1])
        assert recording.lengths.tolist() == [3, 4], "demo_2 comes before demo_10"
        assert recording.seeds.tolist() == [-1, -2], "not known, and different"
        episode = recording.episode(0)
        # Rows 0, 1, 2 of obs and the last of next_obs.
        assert episode.observation["eef_pos"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert episode.observation["agentview_image"].shape == (4, 4, 4, 3), "without next_obs the last picture stands twice"
        assert episode.metadata == {"demo": "demo_2", "model_file": "<mujoco/>", "final_observation": "repeated"}
        assert recording.episode(1).metadata["masks"] == ["train"]
        assert episode.action.dtype == np.float32
        assert episode.terminated.tolist() == [False, False, True]
        assert episode.success.tolist() == [False, False, True], "robosuite's sparse reward of 1"
        assert episode.state is not None
        assert episode.state["states"][:3].tolist() == [[1] * 5] * 3
        assert np.isnan(episode.state["states"][3]).all(), "the state after the last step is not in the file"
        assert validate(recording) == []
        notes = {note.field: note.fate for note in recording.notes}
        assert notes["seed"] == notes["success"] == notes["terminated"] == "filled"
        assert "observation.eef_pos" not in notes
        assert notes["observation.agentview_image"] == "filled"


def test_libero_says_its_instruction_in_an_attribute(tmp_path: Path) -> None:
    attributes = {"env_name": "Libero_Kitchen", "problem_info": json.dumps({"language_instruction": ['"', "open", " the", " drawer", '"']})}
    with open_recording(their_file(tmp_path / "demo.hdf5", attributes)) as recording:
        assert (recording.spec.task, recording.spec.instruction) == ("Libero_Kitchen", "open the drawer")
        assert not recording.success_once.any(), "nothing says that a reward of 1 is success"
        assert not recording.spec.reports_success


def test_a_shaped_reward_is_no_sign_of_success(tmp_path: Path) -> None:
    shaped = {**ENV_ARGS, "env_kwargs": {"reward_shaping": True}}
    with open_recording(their_file(tmp_path / "demo.hdf5", {"env_args": json.dumps(shaped)})) as recording:
        assert not recording.success_once.any()


def test_doubles_that_are_no_float32_are_rounded_with_a_note(tmp_path: Path) -> None:
    path = their_file(tmp_path / "demo.hdf5", actions=np.array([[0.1, 0.5]] * 3))
    with open_recording(path) as recording:
        assert recording.episode(0).action.tolist() == [[float(np.float32(0.1)), 0.5]] * 3
        assert next(note for note in recording.notes if note.field == "action").note == "float64 in the file, rounded to float32"  # type: ignore[attr-defined]


def test_their_file_goes_through_ours_and_back(tmp_path: Path) -> None:
    """Attributes, masks, models and states are where they were."""
    with open_recording(their_file(tmp_path / "demo.hdf5")) as theirs, record(tmp_path / "native", theirs.info, list(theirs)) as ours:
        write_foreign(ours, tmp_path / "again", "robomimic")
    with h5py.File(tmp_path / "demo.hdf5") as before, h5py.File(tmp_path / "again" / "demos.hdf5") as after:
        assert json.loads(after["data"].attrs["env_args"]) == ENV_ARGS
        assert after["data"].attrs["total"] == 7
        assert after["mask/train"][:].tolist() == [b"demo_1"]
        for old, new in (("demo_2", "demo_0"), ("demo_10", "demo_1")):
            assert after[f"data/{new}"].attrs["model_file"] == "<mujoco/>"
            for name in ("obs/eef_pos", "next_obs/eef_pos", "obs/agentview_image", "actions", "rewards", "dones", "states"):
                np.testing.assert_array_equal(after[f"data/{new}/{name}"][:], before[f"data/{old}/{name}"][:], name)


def test_our_files_hold_what_theirs_do(tmp_path: Path) -> None:
    """Read with h5py alone, by robomimic's description of its format."""
    mujoco = {"qvel": np.full((4, 2), 2.0), "time": np.arange(4.0)[:, None], "qpos": np.full((4, 3), 1.0), "ctrl": np.zeros((4, 1))}
    episode = rich_episode(STATE, 1, 3, ends="truncated", state=mujoco)
    with record(tmp_path / "native", info_of(STATE), [episode]) as source:
        write_foreign(source, tmp_path / "there", "robomimic")
    with h5py.File(tmp_path / "there" / "demos.hdf5") as file:
        env_args = json.loads(file["data"].attrs["env_args"])
        assert env_args == {"env_name": "Push-v1", "type": 2, "env_kwargs": {"control_mode": "delta", "control_freq": 20.0}}
        assert json.loads(file["data"].attrs["problem_info"]) == {"language_instruction": "push"}
        demo = file["data/demo_0"]
        assert demo.attrs["num_samples"] == 3
        state = episode.observation["state"]
        np.testing.assert_array_equal(demo["obs/state"][:], state[:3])
        np.testing.assert_array_equal(demo["next_obs/state"][:], state[1:])
        np.testing.assert_array_equal(demo["actions"][:], episode.action)
        assert demo["dones"][:].tolist() == [0, 0, 1]
        # robosuite's flat state: time, qpos, qvel.
        assert demo["states"][:].tolist() == [[step, 1, 1, 1, 2, 2] for step in range(3)]


def test_their_own_loader_reads_ours(tmp_path: Path) -> None:
    dataset = pytest.importorskip("robomimic.utils.dataset")
    observations = pytest.importorskip("robomimic.utils.obs_utils")
    episodes = [make_episode(STATE, seed, 3 + seed) for seed in range(2)]
    with record(tmp_path / "native", info_of(STATE), episodes) as source:
        write_foreign(source, tmp_path / "there", "robomimic")
    observations.initialize_obs_utils_with_obs_specs([{"obs": {"low_dim": ["state"], "rgb": []}}])
    loaded = dataset.SequenceDataset(
        hdf5_path=str(tmp_path / "there" / "demos.hdf5"),
        obs_keys=("state",),
        dataset_keys=("actions", "rewards", "dones"),
        frame_stack=1,
        seq_length=1,
        pad_frame_stack=True,
        pad_seq_length=True,
        hdf5_cache_mode=None,
        hdf5_use_swmr=False,
        load_next_obs=True,
    )
    assert len(loaded) == 3 + 4
    rows = [(episode, step) for episode in episodes for step in range(episode.num_steps)]
    for index, (episode, step) in enumerate(rows):
        item = loaded[index]
        np.testing.assert_array_equal(item["obs"]["state"][0], episode.observation["state"][step])
        np.testing.assert_array_equal(item["next_obs"]["state"][0], episode.observation["state"][step + 1])
        np.testing.assert_array_equal(item["actions"][0], episode.action[step])
        assert item["rewards"][0] == episode.reward[step]
        assert item["dones"][0] == (step == episode.num_steps - 1)


@pytest.mark.parametrize(("num_episodes", "valid"), [(1, []), (2, [1]), (9, [8]), (21, [9, 19])])
def test_masks_for_training_and_validation(num_episodes: int, valid: list[int], tmp_path: Path) -> None:
    """robomimic's training asks for ``train`` and ``valid``: every episode is in one of them."""
    with record(tmp_path / "native", info_of(STATE), [make_episode(STATE, seed, 2) for seed in range(num_episodes)]) as source:
        write_foreign(source, tmp_path / "there", "robomimic")
    with h5py.File(tmp_path / "there" / "demos.hdf5") as file:
        found = {name: [int(demo.decode().removeprefix("demo_")) for demo in demos[:]] for name, demos in file["mask"].items()}
    assert found.get("valid", []) == valid
    assert found["train"] == [number for number in range(num_episodes) if number not in valid]


def test_choices_stay_choices(tmp_path: Path) -> None:
    with record(tmp_path / "native", info_of(CHOICES), [make_episode(CHOICES, 0, 3)]) as source:
        write_foreign(source, tmp_path / "there", "robomimic")
    with open_recording(tmp_path / "there") as back:
        assert back.spec.action == ActionSpec.discrete(4)
        assert back.episode(0).action.dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": None}, r"episode 0, field '/data/demo_2/actions': is missing"),
        ({"actions": np.zeros((2, 2))}, r"episode 0, field 'actions': holds 2 rows, num_samples says 3"),
        ({"rewards": np.zeros(4)}, r"episode 0, field '/data/demo_2/rewards': has 4 rows instead of 3"),
        ({"dones": np.zeros((0,))}, r"episode 0, field '/data/demo_2/dones': has 0 rows instead of 3"),
        ({"obs/eef_pos": np.zeros((2, 3))}, r"episode 0, field '/data/demo_2/obs/eef_pos': has 2 rows instead of 3"),
        ({"obs/eef_pos": None, "obs/agentview_image": None}, r"episode 0, field 'obs': is missing: robomimic's dataset_states_to_obs"),
        ({"actions": np.full((3, 2), np.nan)}, r"episode 0, field 'action': holds nan at step 0"),
        ({"next_obs/eef_pos": np.full((3, 3), np.inf)}, r"episode 0, field 'observation.eef_pos': holds inf at step 3"),
    ],
)
def test_damage_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = their_file(tmp_path / "demo.hdf5", **changes)
    with pytest.raises(RecordingError, match=r"demo\.hdf5', " + message) as caught, open_recording(path) as recording:
        recording.episode(0)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = their_file(tmp_path / "demo.hdf5")
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with pytest.raises(RecordingError, match=r"demo\.hdf5': cannot be opened as HDF5"):
        open_recording(path)
    path.write_bytes(b"\x80\x04\x95 a pickle, say")
    with pytest.raises(RecordingError, match=r"demo\.hdf5': cannot be opened as HDF5"):
        open_recording(path)
    with h5py.File(path, "w") as file:
        file.create_group("data")
    with pytest.raises(RecordingError, match="has no group 'demo_0'"):
        open_recording(path)
    their_file(path)
    with h5py.File(path, "a") as file:
        file.create_dataset("mask/test", data=np.array(["demo_3"], dtype="S"))
    with pytest.raises(RecordingError, match=r"field '/mask/test': names the episode 'demo_3', which is not there"):
        open_recording(path)
    their_file(path, {"env_args": "{"})
    with pytest.raises(RecordingError, match=r"field '/data@env_args': cannot be read as JSON"):
        open_recording(path)
