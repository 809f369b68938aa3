"""Episodes that wait for others: written in few pieces, the same bytes as one by one; what is not written yet is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes import writer as writing
from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import assert_same_episode, info_of, make_episode, stream

FOREVER = 1e9


def seeds_of(folder: Path) -> list[int]:
    with open_recording(folder) as recording:
        assert validate(recording) == []
        return recording.seeds.tolist()


def advance(writer: RecordingWriter) -> None:
    """As often as it takes."""
    for _ in range(500):
        writer.gathering.advance()


def test_the_same_bytes_as_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 episodes, so that some are written because there are many; the last ones when the writer is closed."""
    monkeypatch.setattr(writing, "_MAX_EPISODES", 32)
    episodes = [
        make_episode(seed=seed, num_steps=1 + seed % 7, value=np.arange(1.0 + seed % 7), metadata={"n": seed}) for seed in range(70)
    ]
    for name, wait in (("together", FOREVER), ("single", 0.0)):
        with RecordingWriter(tmp_path / name, info_of(), gather_s=wait) as writer:
            assert [stream(writer, episode) for episode in episodes] == list(range(70))
            assert seeds_of(tmp_path / name) == list(range(64 if wait else 70))  # each 33rd finds that they are many
    files = sorted(path.name for path in (tmp_path / "single/part-0000").iterdir())
    assert "value.npy" in files
    for file in files:
        assert (tmp_path / "together/part-0000" / file).read_bytes() == (tmp_path / "single/part-0000" / file).read_bytes(), file


def test_many_bytes_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_ENOUGH_BYTES", 3 * 1000 * (4 * 3 + 4 * 2 + 4 + 3))  # state, action, reward and flags
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER) as writer:
        for seed in range(3):
            stream(writer, make_episode(seed=seed, num_steps=1000))
            if seed < 2:
                advance(writer)
                assert seeds_of(tmp_path / "r") == []
        advance(writer)
        assert seeds_of(tmp_path / "r") == [0, 1, 2]


def test_when_they_are_due(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=0.0) as writer:
        stream(writer, make_episode(seed=0))
        writer.gathering.max_wait_s = 0.01
        stream(writer, make_episode(seed=1))
        writer.gathering.deadline += FOREVER
        advance(writer)
        assert seeds_of(tmp_path / "r") == [0]
        assert writer.seeds == {0, 1}
        writer.gathering.deadline -= 2 * FOREVER
        advance(writer)
        assert seeds_of(tmp_path / "r") == [0, 1]


def test_what_cannot_wait_is_written_behind_what_waits(tmp_path: Path) -> None:
    """An episode with a snapshot, one with words, one of other columns, a whole one: the order of the part stays that of finishing."""
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER, duplicates="skip") as writer:
        given = [make_episode(seed=0), make_episode(seed=1, snapshots={2: b"x"}), make_episode(seed=2)]
        assert [stream(writer, episode) for episode in given] == [0, 1, 2]
        assert seeds_of(tmp_path / "r") == [0, 1]
        assert stream(writer, make_episode(seed=2)) == SKIPPED
        assert writer.add(make_episode(seed=3)) == 3
        assert stream(writer, make_episode(seed=4, value=np.arange(4.0))) == 0
        assert stream(writer, make_episode(seed=5)) == 4
    assert sorted(seeds_of(tmp_path / "r")) == [0, 1, 2, 3, 4, 5]
    extras: dict[int, dict[str, Any]] = {1: {"snapshots": {2: b"x"}}, 4: {"value": np.arange(4.0)}}
    with open_recording(tmp_path / "r") as recording:
        for episode in recording:
            assert_same_episode(episode, make_episode(seed=episode.seed, **extras.get(episode.seed, {})))
    words = SimSpec("toy", {"s": TensorSpec((2,)), "t": VariableSpec("text")}, ActionSpec.continuous([-1], [1]))
    with RecordingWriter(tmp_path / "w", info_of(words), gather_s=FOREVER) as writer:
        stream(writer, make_episode(words, seed=0))
        assert seeds_of(tmp_path / "w") == [0]


@pytest.mark.parametrize("bad", [None, 7])
def test_written_bit_by_bit_while_others_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int | None) -> None:
    """Some bits after each episode: readers see whole groups of episodes, whose numbers are those that they were told."""
    monkeypatch.setattr(writing, "_SLICE_S", 0.0)
    monkeypatch.setattr(writing, "_ENOUGH_EPISODES", 4)
    episodes = [make_episode(seed=seed, num_steps=1 + seed % 7, value=np.arange(1.0 + seed % 7)) for seed in range(60)]
    if bad is not None:
        episodes[bad].observation["state"][0] = np.inf
    seen, failures = set[int](), list[str]()
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER) as writer:
        for number, episode in enumerate(episodes):
            told = stream(writer, episode)
            assert told == number - len(failures) or (bad is not None and told == number)  # the bad one is not known yet
            for _ in range(5):
                try:
                    writer.gathering.advance()
                except RecordingError as error:
                    failures.append(str(error))
            if number % 5 == 4:
                seen.add(len(seeds_of(tmp_path / "r")))
        assert len(failures) == (0 if bad is None else 1)
        assert all("holds inf in row 0 of the episode" in text for text in failures)
    assert len(seen) > 2
    assert seeds_of(tmp_path / "r") == [seed for seed in range(60) if seed != bad]
    with open_recording(tmp_path / "r") as recording:
        for found in recording:
            assert_same_episode(found, episodes[found.seed])


def test_nan_is_told_and_the_others_are_written(tmp_path: Path) -> None:
    bad = make_episode(seed=1, num_steps=5)
    bad.observation["state"][3, 1] = np.nan
    writer = RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER)
    for episode in (make_episode(seed=0), bad, make_episode(seed=2, num_steps=9)):
        stream(writer, episode)
    with pytest.raises(RecordingError, match=r"Field 'observation\.state' holds nan in row 3 of the episode"):
        writer.close()
    assert seeds_of(tmp_path / "r") == [0, 2]


def test_a_full_disk_leaves_the_recording_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER) as writer:
        stream(writer, make_episode(seed=0))
        writer.flush()
        real, calls = os.pwrite, [0]

        def failing(descriptor: int, data: bytes, offset: int) -> int:
            calls[0] += 1
            if calls[0] == 9:
                raise OSError(28, "No space left on device")
            return real(descriptor, data, offset)

        stream(writer, make_episode(seed=1))
        monkeypatch.setattr("embodied_rl.episodes.part.os.pwrite", failing)
        with pytest.raises(UserError, match="No space left"):
            writer.flush()
        monkeypatch.undo()
        stream(writer, make_episode(seed=2))
    assert seeds_of(tmp_path / "r") == [0, 2]


def test_after_a_full_disk_snapshots_that_were_not_taken_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has no room for the line of an episode with a snapshot; those after it begin where it would have."""
    with RecordingWriter(tmp_path / "r", info_of(), gather_s=FOREVER) as writer:
        stream(writer, make_episode(seed=0, snapshots={1: b"first"}))

        def full(part: Any, lines: bytes) -> None:
            raise UserError("No space left on device")

        monkeypatch.setattr("embodied_rl.episodes.part.PartWriter._write_lines", full)
        with pytest.raises(UserError, match="No space left"):
            stream(writer, make_episode(seed=1, snapshots={1: b"lost", 2: b"lost too"}))
        monkeypatch.undo()
        stream(writer, make_episode(seed=2))
        stream(writer, make_episode(seed=3, snapshots={0: b"third"}))
    assert seeds_of(tmp_path / "r") == [0, 2, 3]
    with open_recording(tmp_path / "r") as recording:
        assert [episode.snapshots for episode in recording] == [{1: b"first"}, {}, {0: b"third"}]


def test_what_waits_is_lost_with_a_killed_process_and_nothing_else(tmp_path: Path) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from embodied_rl.episodes.writer import RecordingWriter
        from tests.episodes.episode_toys import info_of, make_episode, stream

        with RecordingWriter(Path(sys.argv[1]), info_of(), gather_s=1e9) as writer:
            for seed in range(40):
                stream(writer, make_episode(seed=seed))
            print("finished", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "r")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "finished\n"
        process.send_signal(signal.SIGKILL)
    assert seeds_of(tmp_path / "r") == list(range(32))
    with RecordingWriter(tmp_path / "r", info_of(), resume=True) as writer:
        assert writer.seeds == set(range(32))
        stream(writer, make_episode(seed=32))
    assert seeds_of(tmp_path / "r") == list(range(33))
