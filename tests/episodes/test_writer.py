"""The writer: what is given comes back, streamed or whole, resumed, beside others, and after being killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embodied_rl.episodes.buffers import Encoder
from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.pictures import PictureRoom, VideoWriter
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.files import fsync
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import STATE_SPEC, assert_same_episode, info_of, make_episode, moving_square, stream

TENSORS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 4), max_size=2).map(tuple) | st.just((16, 18, 3)),
    st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"]),
)
VARIABLES = st.builds(VariableSpec, st.sampled_from(["text", "json", "array"]))
ACTIONS = st.sampled_from([ActionSpec.continuous([-1, -2], [1, 2]), ActionSpec.discrete(5), ActionSpec.text()])
KEYS = st.sampled_from(["state", "rgb", "actors/cube", "a b", "..", "é", "x.y", "%2F"])
PARTS = st.dictionaries(KEYS, TENSORS | VARIABLES, max_size=4).filter(
    lambda parts: any(isinstance(part, VariableSpec) or np.prod(part.shape) > 0 for part in parts.values())
)
SPECS = st.builds(lambda parts, action: SimSpec("toy", parts, action), PARTS, ACTIONS)


# ---- round trips ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    spec=SPECS,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    video=st.sampled_from(["mp4", "png", "raw"]),
    optional=st.sets(st.sampled_from(["sampled_action", "log_prob", "value", "policy_version", "chunk", "state", "snapshots"])),
    streamed=st.booleans(),
)
def test_any_episode_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, spec: SimSpec, lengths: list[int], video: Any, optional: set[str], streamed: bool
) -> None:
    folder = tmp_path_factory.mktemp("any") / "recording"
    episodes = []
    for seed, length in enumerate(lengths):
        rng = np.random.default_rng(seed)
        given = {
            "sampled_action": rng.normal(size=(length, 2)).astype(np.float32),
            "log_prob": rng.normal(size=(length, 3)).astype(np.float32),
            "value": rng.normal(size=length).astype(np.float32),
            "policy_version": np.arange(length, dtype=np.int64),
            "chunk": np.arange(length, dtype=np.int64) // 2,
            "state": {"actors/cube": rng.normal(size=(length + 1, 4)), "qpos": np.full((length + 1, 2), np.nan, np.float32)},
            "snapshots": {0: b"", length - 1: rng.bytes(5)},
        }
        fields = {name: value for name, value in given.items() if name in optional}
        ends = ["terminated", "truncated", "nothing"][seed % 3]
        episodes.append(make_episode(spec, seed, length, ends=ends, task=["a", None][seed % 2], metadata={"k": [1, None]}, **fields))
    with RecordingWriter(folder, info_of(spec), video=video) as writer:
        numbers = [stream(writer, episode) if streamed else writer.add(episode) for episode in episodes]
    assert numbers == list(range(len(episodes)))
    with open_recording(folder) as recording:
        assert recording.spec == spec
        assert validate(recording) == []
        assert recording.lengths.tolist() == lengths
        assert recording.complete.tolist() == [episode.complete for episode in episodes]
        for found, expected in zip(recording, episodes, strict=True):
            assert_same_episode(found, expected)
        for number, expected in enumerate(episodes):
            last = recording.step(number, expected.num_steps - 1)
            for key, rows in expected.observation.items():
                assert_equal_value(last.next_observation[key], rows[-1])
                assert_equal_value(last.observation[key], rows[-2])
            assert_equal_value(last.action, expected.action[-1])
            assert (last.reward, last.terminated, last.truncated) == (expected.reward[-1], expected.terminated[-1], expected.truncated[-1])
            if "log_prob" in optional:
                assert_equal_value(last.log_prob, expected.log_prob[-1])  # type: ignore[index]


def assert_equal_value(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def test_arrays_are_plain_npy_files(tmp_path: Path) -> None:
    """What another program finds with numpy and json alone."""
    episodes = [make_episode(seed=seed, num_steps=seed + 1) for seed in range(3)]
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        for episode in episodes:
            writer.add(episode)
        # Before anything is closed.
        assert np.load(tmp_path / "r/part-0000/action.npy").shape == (6, 2)
    part = tmp_path / "r/part-0000"
    lines = [json.loads(line) for line in (part / "episodes.jsonl").read_text().splitlines()]
    # 1 + 2 + 3 steps, and an observation more each.
    assert [(line["steps"], line["step_row"], line["observation_row"]) for line in lines] == [(1, 0, 0), (2, 1, 2), (3, 3, 5)]
    states = np.load(part / "observation.state.npy", mmap_mode="r", allow_pickle=False)
    np.testing.assert_array_equal(states, np.concatenate([episode.observation["state"] for episode in episodes]))
    assert json.loads((tmp_path / "r/recording.json").read_text())["spec"]["task"] == "toy"


def test_sizes_beyond_memory_go_through_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.episodes.buffers.SPILL_BYTES", 2000)
    monkeypatch.setattr("embodied_rl.episodes.buffers.BLOCK_BYTES", 500)
    spec = SimSpec("toy", {"state": TensorSpec((17,)), "text": VariableSpec("text")}, ActionSpec.continuous([-1], [1]))
    episode = make_episode(spec, 3, 1000, snapshots={step: bytes([step % 256]) * 50 for step in range(0, 1000, 7)})
    with RecordingWriter(tmp_path / "r", info_of(spec)) as writer:
        sink = stream(writer, episode, finish=False)
        # 1001 rows × 17 × 4 bytes lie outside of memory but for the last few blocks.
        assert sum(block.nbytes for block in sink.make_room().buffers["observation.state"]._blocks) < 2000 + 500
        sink.finish()
    with open_recording(tmp_path / "r") as recording:
        assert_same_episode(recording.episode(0), episode)
    assert not [path for path in (tmp_path / "r/part-0000").iterdir() if path.name.startswith(".")]


def test_episodes_of_other_columns_go_into_other_parts(tmp_path: Path) -> None:
    plain = make_episode(seed=1)
    valued = make_episode(seed=2, value=np.ones(4, np.float32))
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        for episode in (plain, valued, make_episode(seed=3)):
            writer.add(episode)
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [1, 3, 2]
        assert [episode.value is None for episode in recording] == [True, True, False]
        assert validate(recording) == []


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("video", "largest", "mean"), [("mp4", 60, 2.0), ("png", 0, 0.0), ("raw", 0, 0.0)])
def test_pictures_for_people_are_as_good_as_documented(tmp_path: Path, video: Any, largest: int, mean: float) -> None:
    frames = moving_square(33, 65, 97)
    episode = make_episode(num_steps=32, images={"front": frames})
    with RecordingWriter(tmp_path / "r", info_of(), video=video) as writer:
        stream(writer, episode)
    with open_recording(tmp_path / "r") as recording:
        found = recording.episode(0).images["front"]
        assert found.shape == (33, 65, 97, 3)
        error = np.abs(np.asarray(found).astype(int) - frames)
        assert error.max() <= largest
        assert error.mean() <= mean
        # Any place, in any order, is the same picture as read from the beginning.
        whole = np.asarray(found)
        for time in (32, 0, 17, 18, 19, 3, -1):
            np.testing.assert_array_equal(found[time], whole[time])
        np.testing.assert_array_equal(found[5:30:6], whole[5:30:6])
        np.testing.assert_array_equal(found[::-1][0], whole[32])
        np.testing.assert_array_equal(recording.step(0, 31).images["front"], whole[31])
        with pytest.raises(IndexError, match="33"):
            found[33]


def test_pictures_that_a_policy_saw_are_exact_in_mp4_and_anybody_can_play_them(tmp_path: Path) -> None:
    import av

    spec = SimSpec("toy", {"rgb": TensorSpec((33, 47, 3), "uint8")}, ActionSpec.discrete(2))
    episode = make_episode(spec, num_steps=20)
    with RecordingWriter(tmp_path / "r", info_of(spec)) as writer:
        stream(writer, episode)
    # Read by PyAV alone.
    with av.open(str(tmp_path / "r/part-0000/observation.rgb/000000.mp4")) as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    np.testing.assert_array_equal(decoded, episode.observation["rgb"])


def test_odd_sides_repeat_the_last_line_and_rooms_are_used_again() -> None:
    room = PictureRoom((4, 4, 3))
    for picture in (np.arange(27, dtype=np.uint8).reshape(3, 3, 3), np.full((3, 3, 3), 200, np.uint8)):
        room.fill(picture)
        np.testing.assert_array_equal(room.array, np.pad(picture, ((0, 1), (0, 1), (0, 0)), mode="edge"))
        np.testing.assert_array_equal(room.frame.to_ndarray(format="rgb24"), room.array)


def test_an_encoder_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, frame: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("embodied_rl.episodes.pictures.VideoWriter.encode", fail)
    with (
        RecordingWriter(tmp_path / "r", info_of()) as writer,
        pytest.raises(RecordingError, match=r"A video cannot be encoded: no such thing"),
    ):
        writer.add(make_episode(images={"front": moving_square(5, 32, 48)}))
    with open_recording(tmp_path / "r") as recording:
        assert len(recording) == 0


def test_an_error_of_the_encoder_is_that_of_its_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes share the encoder: another one's next picture may come first."""
    first, second = (VideoWriter(tmp_path / name, 16, 16, 10, lossless=True) for name in ("first.mp4", "second.mp4"))
    monkeypatch.setattr(first, "encode", lambda room: 1 / 0)
    encoder, picture = Encoder(), np.zeros((16, 16, 3), np.uint8)
    encoder.put(first, picture)
    encoder.put(second, picture)
    encoder.wait(second)
    with pytest.raises(RecordingError, match="division"):
        encoder.wait(first)
    encoder.close()
    for writer in (first, second):
        writer.discard()


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_its_field(tmp_path: Path) -> None:
    nan = np.array([0, np.nan, 0, 0], np.float32)
    state = make_episode().observation["state"]
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    cases = [
        (make_episode(reward=nan), r"Field 'reward' holds nan in row 1"),
        (make_episode(value=nan + np.inf), r"Field 'value' holds"),
        (make_episode(observation={"state": state[:, :2]}), r"Field 'observation.state' must hold rows <f4 \[3\], got \[2\]"),
        (make_episode(observation={"state": state.astype("<U3")}), r"Field 'observation.state' must hold float32, got <U3"),
        (make_episode(observation={"pose": state}), r"lacks \['observation.state'\] and adds \['observation.pose'\]"),
        (make_episode(images={"front": np.zeros((5, 20, 20), np.uint8)}), r"Field 'images.front' must hold pictures"),
        (make_episode(metadata={"x": {1, 2}}), r"Metadata of the episode of seed 0 must hold what JSON can"),
        (make_episode(metadata={"x": float("nan")}), r"Metadata of the episode of seed 0"),
        (make_episode(metadata={"x": deep}), r"Metadata of the episode of seed 0 must hold what JSON can: maximum recursion depth"),
        (make_episode(seed=2**64), r"Seed 18446744073709551616 does not fit into 64 bits"),
    ]
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        writer.add(make_episode(seed=77))
        for episode, message in cases:
            with pytest.raises(RecordingError, match=message):
                writer.add(episode)
        writer.add(make_episode(seed=78))
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [77, 78]
        assert validate(recording) == []


def test_a_sink_is_strict_about_order_and_fields(tmp_path: Path) -> None:
    step: dict[str, Any] = {"action": [0, 0], "reward": 0.0, "terminated": False, "truncated": False, "success": False}
    seen = {"state": np.zeros(3, np.float32)}
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        sink = EpisodeSink(writer, 1)
        with pytest.raises(RecordingError, match="seed 1 has not begun at step 0"):
            sink.step(**step, observation=seen)
        with pytest.raises(RecordingError, match="seed 1 has no steps to write"):
            sink.finish()
        sink.start(seen)
        with pytest.raises(RecordingError, match="seed 1 has begun already"):
            sink.start(seen)
        sink.step(**step, observation=seen)
        with pytest.raises(RecordingError, match="had no 'value' before, and has one at step 2"):
            sink.step(**step, observation=seen, value=1.0)
        sink.discard()
        sink = EpisodeSink(writer, 2)
        sink.start(seen)
        with pytest.raises(RecordingError, match=r"lacks 'observation.state' at step 0"):
            sink.step(**step, observation={})
        sink.discard()
        sink = EpisodeSink(writer, 3)
        sink.start(seen)
        sink.step(**{**step, "truncated": True}, observation=seen)
        with pytest.raises(RecordingError, match="seed 3 has ended at step 1"):
            sink.step(**step, observation=seen)
        sink.finish()
        with pytest.raises(RecordingError, match="has no steps to write"):
            sink.finish()
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [3]


def test_a_full_disk_leaves_the_recording_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        writer.add(make_episode(seed=1))
        for allowed in range(12):
            count = iter(range(allowed + 1))

            def limited(descriptor: int, data: Any, offset: int, count: Any = count) -> int:
                if next(count, None) is None or offset < 0:
                    raise OSError(28, "No space left on device")
                return real(descriptor, data, offset)

            monkeypatch.setattr("embodied_rl.episodes.part.os.pwrite", limited)
            with pytest.raises(UserError, match="No space left on device"):
                writer.add(make_episode(seed=2 + allowed, num_steps=9))
            monkeypatch.undo()
            with open_recording(tmp_path / "r") as recording:
                assert recording.seeds.tolist() == [1]
                assert validate(recording) == []
        writer.add(make_episode(seed=99, num_steps=3))
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [1, 99]
        assert_same_episode(recording.episode(1), make_episode(seed=99, num_steps=3))
        assert validate(recording) == []


# ---- resuming, duplicates, several writers --------------------------------------------------------------------------


def test_resuming_goes_on_behind_the_last_episode(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        writer.add(make_episode(seed=5))
    with pytest.raises(RecordingError, match="already has a recording"):
        RecordingWriter(tmp_path / "r", info_of())
    with RecordingWriter(tmp_path / "r", info_of(), resume=True) as writer:
        assert writer.seeds == {5}
        assert writer.has(5)
        assert not writer.has(6)
        assert writer.add(make_episode(seed=6, num_steps=2)) == 1
    assert [path.name for path in (tmp_path / "r").iterdir() if path.is_dir()] == ["part-0000"]
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [5, 6]
        assert_same_episode(recording.episode(1), make_episode(seed=6, num_steps=2))


def test_a_recording_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "r", info_of()).close()
    other = SimSpec("toy", {"state": TensorSpec((4,))}, STATE_SPEC.action, control_hz=20, instruction="move", reports_success=True)
    with pytest.raises(RecordingError, match=r"another kind: spec.observation differ .*'shape': \[3\].*there and .*\[4\].*here"):
        RecordingWriter(tmp_path / "r", info_of(other), resume=True)
    with pytest.raises(RecordingError, match="another kind: policy differ"):
        RecordingWriter(tmp_path / "r", info_of(kind="expert"), resume=True)


def test_duplicates_are_refused_skipped_or_allowed(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        writer.add(make_episode(seed=1))
        with pytest.raises(RecordingError, match="holds an episode of seed 1, task 'toy' and this policy already"):
            writer.add(make_episode(seed=1, num_steps=7))
        with pytest.raises(RecordingError, match="seed 1"):
            EpisodeSink(writer, 1)
        # Another task, or somebody else, is another episode.
        writer.add(make_episode(seed=1, task="other"))
        writer.add(make_episode(seed=1, metadata={"policy": "expert"}))
        first, second = (stream(writer, make_episode(seed=2), finish=False) for _ in range(2))
        first.finish()
        with pytest.raises(RecordingError, match="seed 2"):
            second.finish()
    with RecordingWriter(tmp_path / "r", info_of(), resume=True, duplicates="skip") as writer:
        assert [writer.add(make_episode(seed=seed)) for seed in (1, 2, 3)] == [SKIPPED, SKIPPED, 4]
        assert stream(writer, make_episode(seed=3)) == SKIPPED
    with RecordingWriter(tmp_path / "r", info_of(), resume=True, duplicates="allow") as writer:
        assert writer.add(make_episode(seed=3)) == 5
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [1, 1, 1, 2, 3, 3]
        assert validate(recording) == [f"'{tmp_path / 'r'}', episode 5: is a copy of episode 4."]


CHILD = """
import sys
from pathlib import Path
from embodied_rl.episodes.writer import RecordingWriter
from tests.episodes.episode_toys import info_of, make_episode, moving_square, stream

folder, first, count, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
with RecordingWriter(folder, info_of(), resume=True) as writer:
    for seed in range(first, first + count):
        stream(writer, make_episode(seed=seed, num_steps=steps, images={"front": moving_square(steps + 1, 32, 64)}))
        print(seed, flush=True)
"""


def child(folder: Path, first: int, count: int, steps: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), str(first), str(count), str(steps)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_several_processes_write_side_by_side(tmp_path: Path) -> None:
    children = [child(tmp_path / "r", 100 * number, 30, 5) for number in range(3)]
    for process in children:
        process.communicate(timeout=120)
        assert process.returncode == 0
    with open_recording(tmp_path / "r") as recording:
        assert sorted(recording.seeds) == [100 * number + seed for number in range(3) for seed in range(30)]
        assert validate(recording) == []
        for episode in recording:
            assert_same_episode(episode, make_episode(seed=episode.seed, num_steps=5, images=episode.images))


def test_recorders_with_the_same_process_number_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers on a shared disk may have it: one begins while the other has written half of the recording's first file."""
    others: list[RecordingWriter] = []

    def begin_another(path: Path) -> None:
        monkeypatch.undo()
        fsync(path)
        others.append(RecordingWriter(tmp_path / "r", info_of(), resume=True))

    monkeypatch.setattr("embodied_rl.episodes.writer.fsync", begin_another)
    with RecordingWriter(tmp_path / "r", info_of(), resume=True) as writer:
        writer.add(make_episode(seed=1))
        others[0].add(make_episode(seed=2))
        others[0].close()
    with open_recording(tmp_path / "r") as recording:
        assert sorted(recording.seeds) == [1, 2]


def test_a_killed_recorder_leaves_every_finished_episode(tmp_path: Path) -> None:
    """SIGKILL at three different moments; each time the recorder is resumed where it was, and the torn tail is written over."""
    folder, finished = tmp_path / "r", list[int]()
    for kill in range(3):
        first = 1000 * kill
        process = child(folder, first, 1000, 11 + kill)
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(7 + 3 * kill)]
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()
        finished += told
        with open_recording(folder) as recording:
            assert validate(recording) == []
            seeds = recording.seeds.tolist()
            # What was said to be finished is there; at most what was finished and not said yet is there besides.
            assert set(finished) <= set(seeds)
            assert len(seeds) == len(set(seeds))
        finished = seeds
    with RecordingWriter(folder, info_of(), resume=True) as writer:
        assert writer.seeds == set(finished)
        writer.add(make_episode(seed=7777, num_steps=3, images={"front": moving_square(4, 32, 64)}))
    with open_recording(folder) as recording:
        assert recording.seeds.tolist() == [*finished, 7777]
        assert validate(recording) == []
        for number in (0, len(finished) // 2, len(finished) - 1):
            episode = recording.episode(number)
            assert_same_episode(episode, make_episode(seed=episode.seed, num_steps=11 + episode.seed // 1000, images=episode.images))
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["part-0000"]
    assert not [path for path in (folder / "part-0000").iterdir() if path.name.startswith(".")]


def test_a_torn_tail_is_ignored_and_written_over(tmp_path: Path) -> None:
    """As left by a kill between any two writes: rows without a line, a line without an end, a header that counts too many."""
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        for seed in range(3):
            writer.add(make_episode(seed=seed))
    part = tmp_path / "r/part-0000"
    index = part / "episodes.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [0, 1]
        assert validate(recording) == []
    with RecordingWriter(tmp_path / "r", info_of(), resume=True) as writer:
        assert writer.seeds == {0, 1}
        writer.add(make_episode(seed=9, num_steps=2))
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [0, 1, 9]
        assert_same_episode(recording.episode(2), make_episode(seed=9, num_steps=2))
    # 4 + 4 + 2 steps: the tail was cut.
    assert np.load(part / "reward.npy").shape == (10,)
    assert (part / "reward.npy").stat().st_size == 128 + 4 * 10


def test_an_observation_of_another_kind_is_refused(tmp_path: Path) -> None:
    step = {"action": [0, 0], "reward": 0.0, "terminated": False, "truncated": False, "success": False}
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        sink = EpisodeSink(writer, 1)
        sink.start({"state": np.zeros(3, complex)})
        with pytest.raises(RecordingError, match=r"Field 'observation\.state' must hold float32, got complex128"):
            sink.step(**step, observation={"state": np.zeros(3)})


def test_successes_alone_are_not_added_to_episodes_of_every_outcome(tmp_path: Path) -> None:
    """The folder would say that a mean over its episodes is the policy's value."""
    chosen = dataclasses.replace(info_of(STATE_SPEC), metadata={"plan": {"only_success": True}})
    RecordingWriter(tmp_path / "all", info_of(STATE_SPEC)).close()
    with pytest.raises(RecordingError, match="has episodes of every outcome, and these are chosen by success"):
        RecordingWriter(tmp_path / "all", chosen, resume=True)
    RecordingWriter(tmp_path / "chosen", chosen).close()
    RecordingWriter(tmp_path / "chosen", chosen, resume=True).close()
