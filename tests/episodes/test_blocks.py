"""Many episodes read at once, against the same episodes one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import EpisodeBlock, Recording, RecordingError, cut_by_steps, runs_of
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import assert_same_rows, info_of, make_episode
from tests.episodes.learning_samples import episode as sample_episode
from tests.episodes.learning_samples import recording as in_memory

SPEC = SimSpec(
    "toy",
    {"state": TensorSpec((3,)), "text": VariableSpec("text"), "rgb": TensorSpec((16, 18, 3), "uint8")},
    ActionSpec.continuous([-1], [1]),
)
LENGTHS = (3, 1, 5, 2, 4, 1, 6)
NAMES = ("action", "reward", "terminated", "truncated", "observation.state", "observation.text", "observation.rgb")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes in two parts: from the fourth on each has a value too."""
    folder = tmp_path_factory.mktemp("blocks") / "r"
    with RecordingWriter(folder, info_of(SPEC)) as writer:
        for seed, length in enumerate(LENGTHS):
            value: dict[str, Any] = {"value": np.arange(length) + 10.0 * seed} if seed >= 3 else {}
            writer.add(make_episode(SPEC, seed, length, ends="truncated" if seed % 2 else "nothing", **value))
    assert (folder / "part-0001").is_dir()
    return folder


def assert_is(block: EpisodeBlock, recording: Recording, numbers: list[int], names: tuple[str, ...] = NAMES) -> None:
    """Every column of every episode stands where the block says."""
    assert block.numbers.tolist() == numbers
    assert block.lengths.tolist() == [LENGTHS[number] for number in numbers]
    assert block.num_steps == sum(block.lengths)
    for place, number in enumerate(numbers):
        columns = recording.episode(number).columns()
        for name in names:
            starts = block.observation_starts if "." in name else block.step_starts
            rows = block.columns[name][starts[place] : starts[place] + len(columns[name])]
            assert_same_rows(rows, np.asarray(columns[name]), name)


def test_blocks_hold_what_the_episodes_hold(path: Path) -> None:
    with open_recording(path) as recording:
        for max_steps in (1, 6, 1000):
            blocks = list(recording.blocks(NAMES, max_steps))
            assert [number for block in blocks for number in block.numbers.tolist()] == list(range(7))
            first = 0
            for block in blocks:
                assert_is(block, recording, list(range(first, first + len(block))))
                assert len(block) == 1 or block.num_steps <= max_steps
                first += len(block)
        # The parts are cut from each other however many steps there may be.
        assert [len(block) for block in recording.blocks(("reward",), 1000)] == [3, 4]
        assert [len(block) for block in recording.blocks(("reward",), 8)] == [2, 1, 3, 1]


def test_any_episodes_in_any_order(path: Path) -> None:
    with open_recording(path) as recording:
        for numbers in ([4], [2, 3, 4], [6, 0, 1, 1, 5], [-1]):
            assert_is(recording.read_many(numbers, NAMES), recording, [number % 7 for number in numbers])
        assert_is(recording.read_many([3, 5, 4], ["value"]), recording, [3, 5, 4], ("value",))
        with pytest.raises(IndexError, match="episode 7 does not exist"):
            recording.read_many([0, 7], NAMES)


def test_neighbours_are_views_and_nobody_can_write_them(path: Path) -> None:
    with open_recording(path) as recording:
        block = recording.read_many([0, 1], ("reward", "observation.state"))
        whole = recording.read_many([0, 1, 2], ("reward", "observation.state"))
        for name, rows in block.columns.items():
            assert np.shares_memory(rows, whole.columns[name])
            assert not rows.flags.writeable


def test_episodes_in_memory_are_read_alike() -> None:
    source = in_memory([sample_episode(length, number) for number, length in enumerate(LENGTHS)])
    assert_is(source.read_many([5, 2, 3], ("action", "observation.state")), source, [5, 2, 3], ("action", "observation.state"))
    assert [block.numbers.tolist() for block in source.blocks(("reward",), 6)] == [[0, 1], [2], [3, 4], [5], [6]]
    with pytest.raises(RecordingError, match=r"without a column 'rewards'\. Did you mean 'reward'\?"):
        source.read_many([0], ["rewards"])


def test_what_is_wrong_names_the_episode(path: Path, tmp_path: Path) -> None:
    with open_recording(path) as recording, pytest.raises(RecordingError, match=r"without a column 'value'"):
        recording.read_many([2, 3], ["value"])
    with RecordingWriter(tmp_path / "r", info_of()) as writer:
        for seed in range(4):
            writer.add(make_episode(seed=seed, num_steps=3))
    # Rows 0 … 11: the eighth is the second step of episode 2.
    for name, dtype, wrong, message in (
        ("reward", "<f4", np.nan, r"reward\.npy', episode 2, field 'reward': holds NaN or infinity"),
        ("terminated", "?", True, r"episode 2: it continues after a step that ends it"),
    ):
        file = tmp_path / "r" / "part-0000" / f"{name}.npy"
        data = file.read_bytes()
        size = np.dtype(dtype).itemsize
        at = len(data) - 12 * size + 7 * size
        file.write_bytes(data[:at] + np.array(wrong, dtype).tobytes() + data[at + size :])
        with open_recording(tmp_path / "r", verify=False) as recording:
            names = ("action", "reward", "terminated", "truncated")
            assert recording.read_many([0, 1, 3], names).num_steps == 9
            with pytest.raises(RecordingError, match=message):
                recording.read_many([3, 1, 2], names)
            with pytest.raises(RecordingError, match=message):
                list(recording.blocks(names))
        file.write_bytes(data)


def test_runs_and_cuts_by_hand() -> None:
    assert runs_of(np.array([3, 4, 5, 9, 2])) == [(3, 6), (9, 10), (2, 3)]
    assert runs_of(np.array([7])) == [(7, 8)]
    # 3 + 1, then 9 alone although it is longer, 2 + 2.
    assert cut_by_steps(np.array([3, 1, 9, 2, 2]), 4) == [2, 3, 5]
    assert cut_by_steps(np.zeros(0, np.int64), 4) == []
