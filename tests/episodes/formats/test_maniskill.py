"""ManiSkill's files: what it documents, what it writes itself, and its own program playing ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.formats.maniskill import TARGET, ManiSkillRecording
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording, RecordingError, RecordingInfo
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.sim.rendering import vulkan_available
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import STATE, info_of, record, rich_episode

ROOT = Path(__file__).resolve().parents[3]
REPLAY = Path(__file__).with_name("maniskill_replay.py")


def their_file(folder: Path, num_episodes: int = 2, **changes: Any) -> Path:
    """What `RecordEpisode` writes by its documentation: T = 3, 4, …; `changes` {dataset of traj_0: array, or None to leave it out}."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    with h5py.File(folder / "demo.h5", "w") as file:
        for number in range(num_episodes):
            steps = 3 + number
            group = file.create_group(f"traj_{number}", track_order=True)
            data = {
                "obs": np.arange((steps + 1) * 2, dtype=np.float32).reshape(-1, 2) + 100 * number,
                "actions": np.full((steps, 2), 0.25, np.float32),
                "terminated": np.arange(steps) == steps - 1,
                "truncated": np.zeros(steps, bool),
                "success": np.arange(steps) >= steps - 2,
                "rewards": np.arange(steps, dtype=np.float32),
                "env_states/actors/cube": np.zeros((steps + 1, 13), np.float32),
                "env_states/articulations/panda": np.ones((steps + 1, 31), np.float32),
            }
            for name, array in (data | (changes if number == 0 else {})).items():
                if array is not None:
                    group.create_dataset(name, data=array)
            reset = {"seed": [40 + number] if number else 40}
            entries.append({"episode_id": number, "episode_seed": 40 + number, "control_mode": "pd_ee_delta_pos", "elapsed_steps": steps})
            entries[-1]["reset_kwargs"] = reset
    env_info = {"env_id": "PickCube-v1", "env_kwargs": {"obs_mode": "state", "num_envs": 1}, "max_episode_steps": 50}
    (folder / "demo.json").write_text(json.dumps({"env_info": env_info, "episodes": entries, "source_type": "motionplanning"}))
    return folder / "demo.h5"


@pytest.mark.parametrize("given", ["demo.h5", "demo.json", "."])
def test_their_layout_is_read(given: str, tmp_path: Path) -> None:
    their_file(tmp_path / "demos")
    with open_recording(tmp_path / "demos" / given) as recording:
        assert isinstance(recording, ManiSkillRecording)
        assert recording.spec.task == "PickCube-v1"
        assert (recording.spec.max_episode_steps, recording.spec.control_hz) == (50, None)
        assert recording.info.sim["target"] == "embodied_rl.sim.robots.maniskill:make"
        assert recording.info.sim["kwargs"] == {"obs_mode": "state"}, "what our adapter sets itself is not handed to it"
        assert recording.info.policy == {"kind": "imported", "source_type": "motionplanning"}
        assert recording.seeds.tolist() == [40, 41]
        assert recording.lengths.tolist() == [3, 4]
        assert recording.returns.tolist() == [0 + 1 + 2, 0 + 1 + 2 + 3]
        episode = recording.episode(1)
        assert episode.observation["state"].tolist() == [[100, 101], [102, 103], [104, 105], [106, 107], [108, 109]]
        assert episode.success.tolist() == [False, False, True, True]
        assert episode.state is not None
        assert {name: part.shape for name, part in episode.state.items()} == {"actors/cube": (5, 13), "articulations/panda": (5, 31)}
        assert episode.metadata["maniskill"]["control_mode"] == "pd_ee_delta_pos"
        assert validate(recording) == []


def test_what_is_not_said_is_filled_with_a_note(tmp_path: Path) -> None:
    their_file(tmp_path, 1, success=None, rewards=None, terminated=np.array([False, True, True]))
    with ManiSkillRecording(tmp_path) as recording:
        notes = {note.field: note for note in recording.notes}
        assert notes["success"].fate == notes["reward"].fate == notes["spec.action"].fate == "filled"
        assert "continued after the task's end" in notes["terminated"].note
        assert not recording.spec.reports_success
        assert recording.spec.action == ActionSpec.continuous([-1, -1], [1, 1]), "0.25 lies within -1 … 1"
        assert recording.episode(0).terminated.tolist() == [False, False, True]


def test_bounds_come_from_the_data_where_these_leave_minus_one_to_one(tmp_path: Path) -> None:
    their_file(tmp_path, 1, actions=np.array([[0.5, -3], [2, 0], [1, 1]], np.float32))
    with ManiSkillRecording(tmp_path) as recording:
        assert recording.spec.action == ActionSpec.continuous([0.5, -3], [2, 1])


def test_nested_observations_get_the_names_of_our_simulator(tmp_path: Path) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), np.uint8)
    nested = {
        "obs": None,
        "obs/agent/qpos": np.arange(8, dtype=np.float64).reshape(4, 2),
        "obs/extra/is_grasped": np.array([False, True, True, False]),
        "obs/extra/tcp_pose": np.full((4, 1, 2), 7, np.float32),
        "obs/sensor_param/base_camera/intrinsic_cv": np.zeros((4, 3, 3), np.float32),
        "obs/sensor_data/base_camera/rgb": rgb,
        "obs/sensor_data/base_camera/depth": np.ones((4, 6, 8, 1), np.int16),
        "obs/sensor_data/hand_camera/rgb": 255 - rgb,
    }
    their_file(tmp_path, 1, **nested)
    with ManiSkillRecording(tmp_path) as recording:
        observation = recording.episode(0).observation
        # agent first, then extra: qpos 2, is_grasped 1, tcp_pose 1 × 2.
        assert observation["state"].tolist() == [[0, 1, 0, 7, 7], [2, 3, 1, 7, 7], [4, 5, 1, 7, 7], [6, 7, 0, 7, 7]]
        assert observation["state"].dtype == np.float32
        np.testing.assert_array_equal(observation["rgb"], rgb)
        np.testing.assert_array_equal(observation["rgb.hand_camera"], 255 - rgb)
        assert observation["depth"].dtype == np.int16
        assert [note.field for note in recording.notes if note.fate == "lost"] == ["obs/sensor_param"]


def test_actions_of_several_robots_stand_side_by_side(tmp_path: Path) -> None:
    two = {"actions": None, "actions/panda-0": np.zeros((3, 2), np.float32), "actions/panda-1": np.ones((3, 1), np.float32)}
    their_file(tmp_path, 1, **two)
    with ManiSkillRecording(tmp_path) as recording:
        assert recording.episode(0).action.tolist() == [[0, 0, 1]] * 3
        assert next(note for note in recording.notes if note.field == "action").fate == "changed"


def test_our_files_hold_what_theirs_do(tmp_path: Path) -> None:
    """Read with h5py and json alone, by ManiSkill's description of its format."""
    episodes = [rich_episode(STATE, seed, 4, metadata={"reset_options": {"level": 1}}) for seed in (7, 3)]
    with record(tmp_path / "native", info_of(STATE), episodes) as source:
        write_foreign(source, tmp_path / "there", "maniskill")
    document = json.loads((tmp_path / "there" / "trajectory.json").read_text())
    env_info = document["env_info"]
    assert (env_info["env_id"], env_info["max_episode_steps"]) == ("Push-v1", 50)
    assert env_info["env_kwargs"] == {"obs_mode": "state", "control_mode": "delta", "sim_backend": "physx_cpu"}
    first = {key: value for key, value in document["episodes"][0].items() if key != "success"}
    reset = {"seed": 7, "options": {"level": 1}}
    assert first == {"episode_id": 0, "episode_seed": 7, "control_mode": "delta", "elapsed_steps": 4, "reset_kwargs": reset}
    with h5py.File(tmp_path / "there" / "trajectory.h5") as file:
        for number, episode in enumerate(episodes):
            group = file[f"traj_{number}"]
            np.testing.assert_array_equal(group["obs"][:], episode.observation["state"])
            np.testing.assert_array_equal(group["actions"][:], episode.action)
            np.testing.assert_array_equal(group["rewards"][:], episode.reward)
            assert episode.state is not None
            np.testing.assert_array_equal(group["env_states/actors/cube"][:], episode.state["actors/cube"])
            for name in ("terminated", "truncated", "success"):
                assert group[name].dtype == bool
                np.testing.assert_array_equal(group[name][:], getattr(episode, name))


def test_pictures_lie_where_theirs_do(tmp_path: Path) -> None:
    spec = SimSpec(
        "PickCube-v1",
        {"state": TensorSpec((2,)), "rgb": TensorSpec((4, 4, 3), "uint8"), "depth.hand": TensorSpec((4, 4, 1), "int16")},
        STATE.action,
    )
    episode = make_episode(spec, 0, 2)
    with record(tmp_path / "native", info_of(spec), [episode]) as source:
        write_foreign(source, tmp_path / "there", "maniskill")
    with h5py.File(tmp_path / "there" / "trajectory.h5") as file:
        obs = file["traj_0/obs"]
        np.testing.assert_array_equal(obs["sensor_data/base_camera/rgb"][:], np.asarray(episode.observation["rgb"]))
        np.testing.assert_array_equal(obs["sensor_data/hand/depth"][:], episode.observation["depth.hand"])
        np.testing.assert_array_equal(obs["state"][:], episode.observation["state"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": None}, r"demo\.h5', episode 0, field '/traj_0/actions': is missing"),
        ({"terminated": None}, r"demo\.h5', episode 0, field '/traj_0/terminated': is missing"),
        ({"rewards": np.zeros(5, np.float32)}, r"demo\.h5', episode 0, field '/traj_0/rewards': has 5 rows instead of 3"),
        ({"actions": np.zeros((9, 2), np.float32)}, r"demo\.h5', episode 0, field 'actions': holds 9 rows, elapsed_steps says 3"),
        ({"actions": np.zeros(3, np.float32)}, r"demo\.h5', episode 0, field 'action': must be \[T, A\], is \[3\]"),
        ({"actions": np.zeros((0, 2), np.float32)}, r"field 'actions': holds 0 rows, elapsed_steps says 3"),
        (
            {"actions": None, "actions/a": np.zeros((3, 1)), "actions/b": np.zeros((2, 1))},
            r"field 'actions': holds 2 arrays of \[2, 3\] rows",
        ),
        ({"actions": np.zeros((3, 7), np.float32)}, r"demo\.h5', episode 1, field 'action': has 2 columns, earlier episodes 7"),
        ({"rewards": np.array([b"a", b"b", b"c"])}, r"demo\.h5', episode 0, field '/traj_0/rewards': must hold numbers"),
        ({"obs": None}, r"demo\.h5', episode 0, field 'obs': is missing: replay the file with --obs-mode state"),
        ({"obs": np.zeros((3, 2), np.float32)}, r"demo\.h5', episode 0, field '/traj_0/obs': has 3 rows instead of 4"),
    ],
)
def test_files_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    their_file(tmp_path, **changes)
    with pytest.raises(RecordingError, match=message) as caught:
        open_recording(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.array([[0, 0], [0, np.nan], [0, 0]], np.float32)}, r"episode 0, field 'action': holds nan at step 1"),
        ({"rewards": np.array([0, 0, np.inf], np.float32)}, r"episode 0, field 'reward': holds inf at step 2"),
        ({"env_states/actors/cube": np.zeros((2, 13))}, r"episode 0, field '/traj_0/env_states/actors/cube': has 2 rows instead of 4"),
    ],
)
def test_damaged_episodes_are_found_when_they_are_read(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    their_file(tmp_path, **changes)
    with ManiSkillRecording(tmp_path) as recording:
        with pytest.raises(RecordingError, match=message):
            recording.episode(0)
        assert recording.episode(1).num_steps == 4, "the others are there"


def test_files_cut_short_or_without_their_other_half(tmp_path: Path) -> None:
    path = their_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match=r"demo\.h5': cannot be opened as HDF5: it is damaged, cut short"):
        open_recording(path)
    path.write_bytes(whole)
    path.with_suffix(".json").write_text('{"env_info": ')
    with pytest.raises(RecordingError, match=r"demo\.json': cannot be read as JSON"):
        open_recording(path)
    path.with_suffix(".json").write_text('{"env_info": {"env_id": "A"}, "episodes": [{"episode_id": 9}]}')
    with pytest.raises(RecordingError, match=r"demo\.h5', episode 0, field '/traj_9': is missing"):
        open_recording(path)
    path.with_suffix(".json").unlink()
    with pytest.raises(RecordingError, match=r"demo\.json': is missing"):
        open_recording(path)


def play(folder: Path, task: str) -> Recording:
    """Two episodes of one of ManiSkill's tasks: the expert's until it succeeds, and one in which the arm only opens its gripper."""
    from embodied_rl.sim.robots import experts
    from embodied_rl.sim.robots.maniskill import make
    from embodied_rl.types import StepBuffers

    kwargs = {"obs_mode": "state", "control_mode": "pd_joint_delta_pos", "reward_mode": "normalized_dense"}
    sim = make(task, 1, **kwargs)
    out = StepBuffers.allocate(sim.spec, 1)
    info = RecordingInfo(sim.spec, {"target": TARGET, "task": task, "kwargs": kwargs}, {"kind": "expert"}, metadata={"reconfigure": True})
    with RecordingWriter(folder, info) as writer:
        for seed, tries in ((3, True), (0, False)):
            sim.reset([0], [seed], out, {"reconfigure": True})
            expert = getattr(experts, f"{task.removesuffix('-v1')}Expert")(sim, 0)
            sink = EpisodeSink(writer, seed)
            sink.start({"state": out.observation["state"][0]}, sim.physics(0))
            for step in range(50 if tries else 5):
                action = expert({}) if tries else np.array([0] * 7 + [1], np.float32)
                sim.step([0], action[None], out)
                over = bool(out.success[0]) or (step == 4 and not tries)
                row = {"reward": out.reward[0], "terminated": False, "truncated": over, "success": out.success[0]}
                sink.step(action=action, **row, observation={"state": out.observation["state"][0]}, state=sim.physics(0))
                if over:
                    break
            sink.finish({})
    sim.close()
    return open_recording(folder)


def test_success_at_the_last_step_is_termination_in_their_file(tmp_path: Path) -> None:
    """Their tasks terminate at success; ours was cut there. Ours comes back as it was, and other simulators' episodes are left alone."""
    won, lost = (make_episode(STATE, seed, 3, ends="truncated", success=seed == 1) for seed in (1, 2))
    assert won.truncated[-1]
    assert not won.terminated.any()
    for target, expected in ((TARGET, [True, False]), ("elsewhere:make", [False, False])):
        folder = tmp_path / expected.__repr__()
        with record(folder / "native", RecordingInfo(STATE, {"target": target}, {"kind": "expert"}), [won, lost]) as source:
            write_foreign(source, folder / "there", "maniskill")
        with h5py.File(folder / "there" / "trajectory.h5") as file:
            assert [bool(file[f"traj_{number}/terminated"][-1]) for number in range(2)] == expected
            assert [bool(file[f"traj_{number}/truncated"][-1]) for number in range(2)] == [True, True]
        with open_recording(folder / "there") as back:
            assert [bool(episode.terminated.any()) for episode in back] == [False, False]


@pytest.mark.slow
def test_the_documented_command_runs_in_a_fresh_shell(tmp_path: Path) -> None:
    """Nothing of this process is known there: the shell takes what drawing needs from `doctor export=true`, then runs their program."""
    pytest.importorskip("mani_skill")
    with play(tmp_path / "native", "PushCube-v1") as source:
        write_foreign(source, tmp_path / "there", "maniskill")
    script = (
        f'eval "$({sys.executable} -m embodied_rl.doctor export=true)"; '
        f"{sys.executable} -m mani_skill.trajectory.replay_trajectory --traj-path {tmp_path}/there/trajectory.h5 "
        "--save-traj --allow-failure"
    )
    fresh = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], env=fresh, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL
    )
    if (
        "export VK_ICD_FILENAMES"
        not in subprocess.run(
            [sys.executable, "-m", "embodied_rl.doctor", "export=true"], env=fresh, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        and not vulkan_available()
    ):
        pytest.skip("this machine has no Vulkan driver, of the system's or of the environment's")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Replayed 2 episodes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("PushCube-v1", marks=pytest.mark.ci_sample), "PickCube-v1"])
def test_their_own_program_plays_ours(task: str, tmp_path: Path) -> None:
    """`replay_trajectory` sees the same success, observations and rewards at every step; and we read what it writes."""
    pytest.importorskip("mani_skill")
    with play(tmp_path / "native", task) as source:
        assert source.success_once.tolist() == [True, False], "one episode that succeeds, and one that does not"
        write_foreign(source, tmp_path / "there", "maniskill")
        command = [sys.executable, REPLAY, "--traj-path", tmp_path / "there" / "trajectory.h5", "--save-traj", "--allow-failure"]
        command += ["--record-rewards", "--reward-mode", "normalized_dense"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "Replayed 2 episodes" in done.stdout
        (written,) = (tmp_path / "there").glob("trajectory.state.*.h5")
        with open_recording(written) as theirs:
            assert theirs.spec.task == task
            assert theirs.seeds.tolist() == source.seeds.tolist() == [3, 0]
            for found, expected in zip(theirs, source, strict=True):
                np.testing.assert_array_equal(found.success, expected.success)
                for name in ("action", "reward"):
                    np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
                np.testing.assert_array_equal(found.observation["state"], expected.observation["state"])
                assert found.state is not None
                assert expected.state is not None
                assert set(found.state) == set(expected.state)
                for name, part in expected.state.items():
                    np.testing.assert_array_equal(found.state[name], part, name)
