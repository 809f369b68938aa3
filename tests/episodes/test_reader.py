"""The reader: any step at once, and every kind of damage said with its file, episode and field."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes.folder import part_folders, validate
from embodied_rl.episodes.reader import NativeRecording, open_recording
from embodied_rl.episodes.recording import RecordingError, raised_as_damage, step_of
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import assert_same_episode, info_of, make_episode, moving_square

SPEC = SimSpec(
    "toy",
    {"state": TensorSpec((3,)), "text": VariableSpec("text"), "rgb": TensorSpec((20, 24, 3), "uint8")},
    ActionSpec.continuous([-1, -2], [1, 2]),
    instruction="move",
)


def episode_of(number: int) -> Any:
    pictures = moving_square(number + 4, 32, 48)
    return make_episode(SPEC, seed=number, num_steps=number + 3, snapshots={1: b"snapshot"}, images={"front": pictures})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "recording"
    with RecordingWriter(folder, info_of(SPEC)) as writer:
        for number in range(4):
            writer.add(episode_of(number))
    return folder


@pytest.fixture
def recording(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(sound, tmp_path / "recording")
    return tmp_path / "recording"


# ---- reading --------------------------------------------------------------------------------------------------------


def test_table_and_steps_are_those_of_the_episodes(sound: Path) -> None:
    episodes = [episode_of(number) for number in range(4)]
    with open_recording(sound) as recording:
        assert len(recording) == 4
        assert recording.num_steps == 3 + 4 + 5 + 6
        assert recording.returns.tolist() == [episode.episode_return for episode in episodes]
        assert recording.success_once.all()
        assert recording.tasks.tolist() == ["toy"] * 4
        for number, expected in enumerate(episodes):
            assert_same_episode(recording.episode(number), expected, images=False)
            for time in range(expected.num_steps):
                found, wanted = recording.step(number, time), step_of(expected, time)
                for key in SPEC.observation:
                    np.testing.assert_array_equal(found.observation[key], wanted.observation[key])
                    np.testing.assert_array_equal(found.next_observation[key], wanted.next_observation[key])
                np.testing.assert_array_equal(found.action, wanted.action)
                assert (found.reward, found.terminated, found.success) == (wanted.reward, wanted.terminated, wanted.success)
        np.testing.assert_array_equal(recording.episode(-1).action, episodes[3].action)
        for wrong in (4, -5):
            with pytest.raises(IndexError, match=f"has 4 episodes; episode {wrong} does not exist"):
                recording.episode(wrong)
        for wrong in (3, -1):
            with pytest.raises(IndexError, match=f"has 3 steps; step {wrong} does not exist"):
                recording.step(0, wrong)


def test_arrays_are_views_that_nobody_can_write(sound: Path) -> None:
    with open_recording(sound) as recording:
        assert isinstance(recording, NativeRecording)
        (whole,) = recording.column("action")
        part = recording.episode(1).action
        assert np.shares_memory(part, whole)
        assert whole.shape == (18, 2)
        with pytest.raises(ValueError, match="read-only"):
            part[0, 0] = 0
        with pytest.raises(RecordingError, match=r"has no arrays 'acton'\. Did you mean 'action'"):
            recording.column("acton")
    # What was handed out outlives the recording.
    np.testing.assert_array_equal(part, episode_of(1).action)


def test_a_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", info_of(SPEC)) as writer:
        writer.add(episode_of(0))
        with open_recording(tmp_path / "r") as before:
            writer.add(episode_of(1))
            assert len(before) == 1
            assert_same_episode(before.episode(0), episode_of(0), images=False)
            with open_recording(tmp_path / "r") as after:
                assert_same_episode(after.episode(1), episode_of(1), images=False)


def test_mapped_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading everything, twice, needs no more resident memory than the limit, some faults' surroundings and one episode."""
    import psutil

    monkeypatch.setattr("embodied_rl.episodes.reader.MAPPED_BYTES", 2**22)
    spec = SimSpec("toy", {"state": TensorSpec((1000,))}, ActionSpec.continuous([-1], [1]))
    with RecordingWriter(tmp_path / "r", info_of(spec)) as writer:
        for seed in range(40):
            writer.add(make_episode(spec, seed, 500))
    # 40 × 501 × 1000 × 4 bytes = 80 MB.
    assert (tmp_path / "r/part-0000/observation.state.npy").stat().st_size > 80e6
    process, highest = psutil.Process(), 0
    with open_recording(tmp_path / "r") as recording:
        recording.episode(0).observation["state"].sum()
        before = process.memory_info().rss
        for _ in range(2):
            for episode in recording:
                episode.observation["state"].sum()
                highest = max(highest, process.memory_info().rss)
    assert highest - before < 20e6


def test_no_recording_names_the_near_one(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"Recording .*recordin' does not exist\. Did you mean 'recording'\?"):
        open_recording(sound.with_name("recordin"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="empty' is not a recording in a known format"):
        open_recording(tmp_path / "empty")


def test_part_order_is_by_number(tmp_path: Path) -> None:
    for name in ("part-10", "part-9", "part-0001", "part-x", "part-²", ".new-1"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in part_folders(tmp_path)] == ["part-0001", "part-9", "part-10"]


# ---- damage that is found when it is opened -------------------------------------------------------------------------


def edit_info(recording: Path, **changes: Any) -> None:
    path = recording / "recording.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_spec(recording: Path, **changes: Any) -> None:
    edit_info(recording, spec={**json.loads((recording / "recording.json").read_text())["spec"], **changes})


def edit_line(part: Path, number: int, **changes: Any) -> None:
    lines = (part / "episodes.jsonl").read_text().splitlines()
    entry = json.loads(lines[number])
    for key, value in changes.items():
        if value is None:
            del entry[key]
        else:
            entry[key] = value
    lines[number] = json.dumps(entry)
    (part / "episodes.jsonl").write_text("\n".join(lines) + "\n")


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size if size < 0 else size)


def pickled(part: Path) -> None:
    """What `np.save` makes of objects: an .npy file whose content is a pickle."""
    np.save(part / "action.npy", np.array([{"evil": 1}] * 18, object), allow_pickle=True)


OPENING = {
    "info missing field": (
        lambda r, p: edit_json(r / "recording.json", lambda d: d.pop("sim")),
        r"recording.json': does not describe a recording: no field 'sim'",
    ),
    "info garbage": (lambda r, p: (r / "recording.json").write_text("{"), r"recording.json': does not describe a recording"),
    "info version": (lambda r, p: edit_json(r / "recording.json", lambda d: d.update(format_version=9)), r"version 9; this is .* 1"),
    "info policy": (lambda r, p: edit_info(r, policy="x"), r"recording.json': does not describe a recording: 'policy' must be a mapping"),
    "info sim": (lambda r, p: edit_info(r, sim=5), r"'sim' must be a mapping, got 5"),
    "info task": (lambda r, p: edit_spec(r, task={}), r"the task or its instruction is no text"),
    "info no task": (lambda r, p: edit_spec(r, task=None), r"the task or its instruction is no text"),
    "info few bounds": (
        lambda r, p: edit_spec(r, action={**ActionSpec.continuous([0, 0], [1, 1]).to_dict(), "low": [0]}),
        r"2 dimensions of the actions have 1 and 2 bounds",
    ),
    "info huge bound": (
        lambda r, p: edit_spec(r, action={**ActionSpec.continuous([0], [1]).to_dict(), "low": [10**400]}),
        r"a bound of the actions is no number",
    ),
    "info bounds": (lambda r, p: edit_spec(r, action={"kind": "continuous", "dim": 1, "low": "x", "high": [1]}), r"bound of the actions"),
    "info command": (lambda r, p: edit_info(r, command=[]), r"'command' must be a text"),
    "info list": (lambda r, p: (r / "recording.json").write_text("[]"), r"recording.json': does not describe a recording"),
    "info dtype": (
        lambda r, p: edit_json(r / "recording.json", lambda d: d["spec"]["observation"]["state"].update(dtype="os:system")),
        r"recording.json': describes no simulator: data type 'os:system' not understood",
    ),
    "layout missing": (lambda r, p: (p / "part.json").unlink(), r"part.json': does not describe columns: No such file"),
    "layout garbage": (lambda r, p: (p / "part.json").write_bytes(b"\xff\x00"), r"part.json': does not describe columns"),
    "layout dtype": (
        lambda r, p: edit_json(p / "part.json", lambda d: d["columns"][0].update(dtype="O")),
        r"part.json': does not describe columns: dtype 'O' is not a plain number",
    ),
    "layout shape": (
        lambda r, p: edit_json(p / "part.json", lambda d: d["columns"][0].update(shape=[2])),
        r"field 'observation.state': is .*\[2\].*and the simulator has .*\[3\]",
    ),
    "layout column lost": (
        lambda r, p: edit_json(p / "part.json", lambda d: d["columns"].pop(0)),
        r"field 'observation.state': is missing",
    ),
    "layout path": (
        lambda r, p: edit_json(p / "part.json", lambda d: d["columns"].append({**d["columns"][0], "name": "../../x"})),
        r"field '\.\./\.\./x': does not belong to a recording",
    ),
    "index missing": (lambda r, p: (p / "episodes.jsonl").unlink(), r"episodes.jsonl': cannot be read"),
    "index garbage": (
        lambda r, p: (p / "episodes.jsonl").write_text("{}\nnot json\n"),
        r"episodes.jsonl', episode 1: the line is not JSON",
    ),
    "index list": (lambda r, p: (p / "episodes.jsonl").write_text("[1]\n"), r"episodes.jsonl', episode 0: the line is not a JSON object"),
    "index two": (lambda r, p: (p / "episodes.jsonl").write_text("{},{}\n"), r"episodes.jsonl', episode 0: the line is not JSON"),
    "index no seed": (lambda r, p: edit_line(p, 2, seed=None), r"episodes.jsonl', episode 2, field 'seed': is missing"),
    "index seed text": (lambda r, p: edit_line(p, 2, seed="7"), r"episode 2, field 'seed': must be int, got '7'"),
    "index bool steps": (lambda r, p: edit_line(p, 0, steps=True), r"episode 0, field 'steps': must be int, got True"),
    "index huge seed": (lambda r, p: edit_line(p, 1, seed=2**70), r"episode 1, field 'seed': does not fit into 64 bits"),
    "index no steps": (lambda r, p: edit_line(p, 1, steps=0), r"episode 1, field 'steps': is not at least 1"),
    "index other row": (lambda r, p: edit_line(p, 3, step_row=5), r"episode 3, field 'step_row': does not follow"),
    "index past end": (
        lambda r, p: edit_line(p, 3, steps=7),
        r"observation.state.npy', episode 3, field 'observation.state': the file is cut short",
    ),
    "index sums": (lambda r, p: edit_line(p, 1, crc32=[1]), r"episode 1, field 'crc32': has not 10 sums"),
    "column missing": (lambda r, p: (p / "reward.npy").unlink(), r"reward.npy', field 'reward': cannot be read: No such file"),
    # 18 rewards of 4 bytes: the last 20 belong to episode 3, which has 6.
    "column cut": (lambda r, p: cut(p / "reward.npy", -20), r"reward.npy', episode 3, field 'reward': the file is cut short"),
    "column cut far": (lambda r, p: cut(p / "reward.npy", 130), r"reward.npy', episode 0, field 'reward': the file is cut short"),
    "column empty": (lambda r, p: cut(p / "reward.npy", 0), r"reward.npy', field 'reward': cannot be read: is not an .npy file"),
    "column other dtype": (
        lambda r, p: np.save(p / "reward.npy", np.zeros(18)),
        r"reward.npy', field 'reward': holds float64 \[18\] instead of float32 \[rows\]",
    ),
    "column pickled": (lambda r, p: pickled(p), r"action.npy', field 'action': holds object \[18\] instead of float32 \[rows, 2\]"),
    "places cut": (lambda r, p: cut(p / "observation.text.npy", -1), r"observation.text.npy', episode 3, field 'observation.text'"),
    "snapshots cut": (lambda r, p: cut(p / "snapshots.npy", -1), r"snapshots.npy', episode 3, field 'snapshots'"),
}


@pytest.mark.parametrize("case", OPENING)
def test_damage_is_found_at_opening(recording: Path, case: str) -> None:
    damage, message = OPENING[case]
    damage(recording, recording / "part-0000")
    with pytest.raises(RecordingError, match=message) as raised:
        open_recording(recording)
    assert "\n" not in str(raised.value)


# ---- damage that is found when an episode is read -------------------------------------------------------------------


def put_bytes(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def put_npy(path: Path, row: int, value: Any) -> None:
    array = np.load(path, mmap_mode="r+")
    array[row] = value
    array.flush()


# Steps: episode 0 has rows 0…2, 1: 3…6, 2: 7…11, 3: 12…17. Observations: 0…3, 4…8, 9…14, 15…21.
READING: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "nan reward": (lambda p: put_npy(p / "reward.npy", 8, np.nan), 2, r"reward.npy', episode 2, field 'reward': holds NaN or infinity"),
    "infinite action": (
        lambda p: put_npy(p / "action.npy", 3, np.inf),
        1,
        r"action.npy', episode 1, field 'action': holds NaN or infinity",
    ),
    "early end": (
        lambda p: put_npy(p / "terminated.npy", 13, True),
        3,
        r"part-0000', episode 3: The episode ends at step 1, but has 6 steps",
    ),
    "blob past end": (
        lambda p: put_npy(p / "observation.text.npy", 4, (0, 10**9)),
        1,
        r"observation.text.bin', episode 1, field 'observation.text': bytes 0 to 1000000000 are needed",
    ),
    "blob negative": (lambda p: put_npy(p / "observation.text.npy", 4, (-1, 1)), 1, r"episode 1, field 'observation.text': bytes -1"),
    "blob missing": (
        lambda p: (p / "observation.text.bin").unlink(),
        0,
        r"observation.text.bin', episode 0, field 'observation.text': cannot",
    ),
    "snapshot past end": (lambda p: cut(p / "snapshots.bin", -1), 3, r"snapshots.bin', episode 3, field 'snapshots'"),
    "video missing": (
        lambda p: (p / "images.front/000001.mp4").unlink(),
        1,
        r"000001.mp4', episode 1, field 'images.front': cannot be opened",
    ),
    "video cut": (
        lambda p: cut(p / "observation.rgb/000002.mp4", 300),
        2,
        r"000002.mp4', episode 2, field 'observation.rgb': cannot be opened",
    ),
    "video without a decoder": (
        lambda p: (p / "observation.rgb/000002.mp4").write_bytes((p / "observation.rgb/000002.mp4").read_bytes().replace(b"avc1", b"none")),
        2,
        r"000002.mp4', episode 2, field 'observation.rgb': cannot be opened as a video \(there is no decoder for its codec\)",
    ),
    "video of another": (
        lambda p: shutil.copy(p / "observation.rgb/000000.mp4", p / "observation.rgb/000003.mp4"),
        3,
        r"000003.mp4', episode 3, field 'observation.rgb': holds 4 pictures instead of 7",
    ),
    "video of another size": (
        lambda p: shutil.copy(p / "images.front/000003.mp4", p / "observation.rgb/000003.mp4"),
        3,
        r"field 'observation.rgb': holds pictures of 32 × 48, not 20 × 24",
    ),
}


@pytest.mark.parametrize("case", READING)
def test_damage_is_found_at_reading_and_other_episodes_stay_readable(recording: Path, case: str) -> None:
    damage, number, message = READING[case]
    damage(recording / "part-0000")
    with open_recording(recording, verify=False) as opened:
        with pytest.raises(RecordingError, match=message) as raised:
            opened.episode(number)
        assert "\n" not in str(raised.value)
        if case != "blob missing":
            other = (number + 1) % 4
            assert_same_episode(opened.episode(other), episode_of(other), images=False)
        assert any(re.search(message, problem) for problem in validate(opened))


# ---- damage that only `validate` and checksums find -----------------------------------------------------------------

LYING: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a state": (
        lambda p: put_npy(p / "observation.state.npy", 9, 0.5),
        r"observation.state.npy', episode 2, field 'observation.state': the checksum does not match",
    ),
    "nan in a state": (
        lambda p: put_npy(p / "observation.state.npy", 9, np.nan),
        r"episode 2, field 'observation.state': holds nan at step 0",
    ),
    "a letter": (lambda p: put_bytes(p / "observation.text.bin", 0, b"#"), r"field 'observation.text': the checksum does not match"),
    "a snapshot": (lambda p: put_bytes(p / "snapshots.bin", 9, b"#"), r"snapshots.bin', episode 1, field 'snapshots': the checksum"),
    "a snapshot's step": (lambda p: put_npy(p / "snapshots.npy", 2, (0, 16, 8)), r"episode 2, field 'snapshots': the checksum"),
    "a byte of a video": (
        lambda p: put_bytes(p / "observation.rgb/000003.mp4", 60, b"\x00\x01\x02\x03\x04"),
        r"000003.mp4', episode 3, field 'observation.rgb'",
    ),
    "a return": (
        lambda p: edit_line(p, 1, **{"return": 99.0}),
        r"episode 1, field 'return': is 99 in the metadata, but the rewards add up to",
    ),
    "a success": (
        lambda p: edit_line(p, 0, success_once=False),
        r"episode 0, field 'success_once': has the value False in the metadata, but True in the data",
    ),
    "an end": (
        lambda p: edit_line(p, 0, complete=False),
        r"episode 0, field 'complete': has the value False in the metadata, but True in the data",
    ),
}


@pytest.mark.parametrize("case", LYING)
def test_validate_finds_what_is_readable_and_wrong(recording: Path, case: str) -> None:
    damage, message = LYING[case]
    damage(recording / "part-0000")
    with open_recording(recording, verify=False) as opened:
        problems = validate(opened)
    assert any(re.search(message, problem) for problem in problems), problems
    # Nothing is said of episodes that are sound.
    numbers = {re.search(r"episode (\d)", problem).group(1) for problem in problems}  # type: ignore[union-attr]
    assert len(numbers) == 1


COLUMNS_OF = {
    "a bit of a state": "observation.state",
    "nan in a state": "observation.state",
    "a letter": "observation.text",
    "a byte of a video": "observation.rgb",
}


@pytest.mark.parametrize("case", [case for case in LYING if case not in ("a return", "a success", "an end")])
def test_checksums_are_compared_at_the_first_reading(recording: Path, case: str) -> None:
    damage, _ = LYING[case]
    damage(recording / "part-0000")
    with open_recording(recording) as opened:
        told = []
        for number in range(4):
            try:
                opened.episode(number)
            except RecordingError as error:
                told.append(str(error))
        assert len(told) == 1
        assert "the checksum does not match" in told[0]
        (number,) = re.findall(r"', episode (\d)", told[0])
        # As training reads it, and a step at a time, nothing else having been read before.
        if (name := COLUMNS_OF.get(case)) is not None:
            with open_recording(recording) as again, pytest.raises(RecordingError, match="checksum does not match"):
                again.read_many([int(number)], [name])
            with open_recording(recording) as again, pytest.raises(RecordingError, match="checksum does not match"):
                again.step(int(number), 0)
        if name == "observation.state":
            with open_recording(recording) as again, pytest.raises(RecordingError, match="checksum does not match"):
                again.column(name)  # type: ignore[attr-defined]


def test_a_checksum_is_compared_once_and_not_where_the_recording_is_trusted(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodied_rl.episodes import reader

    compared: list[tuple[str, int]] = []
    compare = reader.PartReader._compare
    monkeypatch.setattr(reader.PartReader, "_compare", lambda *given: (compared.append((given[1].name, given[2])), compare(*given))[1])
    with open_recording(sound) as opened:
        for _ in range(3):
            for number in range(4):
                opened.episode(number)
        assert len(set(compared)) == len(compared) > 4 * 9
    compared.clear()
    with open_recording(sound, verify=False) as opened:
        opened.episode(0)
    assert compared == []


def test_a_sound_recording_has_no_problems(sound: Path) -> None:
    with open_recording(sound) as recording:
        assert validate(recording) == []


def test_nothing_in_a_row_is_unpickled(tmp_path: Path) -> None:
    """An .npy file inside of a blob that holds a pickle, with checksums that match."""

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    spec = SimSpec("toy", {"cloud": VariableSpec("array")}, ActionSpec.continuous([-1], [1]))
    with RecordingWriter(tmp_path / "r", info_of(spec)) as writer:
        writer.add(make_episode(spec, 1, 2))
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    header += b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"
    bomb = header + pickle.dumps(Evil())
    (tmp_path / "r/part-0000/observation.cloud.bin").write_bytes(bomb * 3)
    np.save(tmp_path / "r/part-0000/observation.cloud.npy", np.array([[i * len(bomb), len(bomb)] for i in range(3)], "<i8"))
    with open_recording(tmp_path / "r", verify=False) as forged, pytest.raises(RecordingError, match=r"field 'observation.cloud': row 0 "):
        forged.episode(0)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_numpy_wrote_anew_is_read_and_not_added_to_blindly(recording: Path) -> None:
    """Somebody corrects a column with numpy alone; the checksum says so, and nothing else."""
    part = recording / "part-0000"
    rewards = np.load(part / "reward.npy").copy()
    np.save(part / "reward.npy", rewards)
    with open_recording(recording) as opened:
        assert validate(opened) == []
    # A header of another length, which numpy reads and we too.
    header = b"\x93NUMPY\x01\x00" + (54).to_bytes(2, "little") + b"{'descr':'<f4','fortran_order':False,'shape':(18,)}".ljust(53) + b"\n"
    (part / "reward.npy").write_bytes(header + rewards.tobytes())
    with open_recording(recording) as opened:
        assert validate(opened) == []
    with (
        RecordingWriter(recording, info_of(SPEC), resume=True) as writer,
        pytest.raises(RecordingError, match=r"reward\.npy.*another program"),
    ):
        writer.add(episode_of(9))


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), AssertionError("ours"), NameError("ours")])
def test_damage_has_one_line_and_our_own_faults_keep_their_traceback(tmp_path: Path, error: Exception) -> None:
    raised, said = (type(error), "ours") if str(error) == "ours" else (RecordingError, "file': cannot be read: ZeroDivisionError: by zero")
    with pytest.raises(raised, match=re.escape(said)), raised_as_damage(tmp_path / "file"):
        raise error
