"""benchmarks/episodes.py: its arithmetic by hand, and a run with tiny sizes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import BENCHMARKS, Range, agree, columns, minus, over, printed


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [path.stem for path in BENCHMARKS.glob("*.py")]:
        sys.modules.pop(name, None)


def test_overhead_is_the_median_of_ratios() -> None:
    from episodes import overhead

    # 1.1, 1.5 and 1.02: the middle one is 1.1.
    assert overhead([11.0, 30.0, 102.0], [10.0, 20.0, 100.0]) == pytest.approx(0.1)


def test_reading_copies_every_byte(tmp_path: Path) -> None:
    """Bytes of a step: actions and log-probabilities of 4 floats, value, reward, flags; of an observation: 39 floats, 60 doubles."""
    from episodes import read_blocks, read_columns, read_episodes, write_states

    from embodied_rl.episodes.reader import open_recording

    write_states(tmp_path / "states", num_episodes=3, num_steps=5)
    with open_recording(tmp_path / "states") as recording:
        total = 3 * 5 * (3 * 16 + 4 + 4 + 3) + 3 * 6 * (39 * 4 + 60 * 8)
        # A room of any size, and one that is smaller than a column.
        for size in (10_000, 64):
            room = np.empty(size, np.uint8)
            assert read_columns(recording, room) == read_episodes(recording, room) == total  # type: ignore[arg-type]
            assert read_blocks(recording, room) == total


@pytest.mark.slow
@pytest.mark.ci_sample
def test_reading_and_random_access_run() -> None:
    pytest.importorskip("gym_pusht")
    small = ("--episodes", "20", "--steps", "6", "--reads", "50", "--rounds", "2", "--only", "reading", "access")
    lines = run_script("episodes.py", *small)
    reading = columns(lines, below="reading, GB/s")
    assert set(reading) == {"episodes of 6 steps", "episodes of 60 steps"}
    # Two digits of a GB/s: 0.00 where the machine had no time.
    assert all(re.fullmatch(r"\d+\.\d\d", speed) for cells in reading.values() for speed in cells)
    steps = columns(lines, below="random steps")
    assert set(steps) == {"20 episodes, states", "20 episodes, 224x224 lossless"}
    figure = re.search(r"random step of 20 episodes states ([\d.]+) ms, p99 ([\d.]+)", lines[-1])
    assert figure is not None
    # Printed to 0.001 and 0.01 ms.
    assert float(figure[1]) == pytest.approx(float(steps["20 episodes, states"][1]), abs=0.0051)
    assert lines[-1].startswith("figure: reading / page cache, episodes of 6 steps: by column ")


def percent(text: str) -> Range:
    low, high = printed(text)
    return low / 100, high / 100


@pytest.mark.slow
def test_recording_runs() -> None:
    pytest.importorskip("gym_pusht")
    pytest.importorskip("gymnasium_robotics")
    pytest.importorskip("mani_skill")
    lines = run_script("episodes.py", "--rounds", "1", "--seconds", "0.1", "--only", "recording")
    rows = columns(lines, below="recording")
    assert len(rows) == 10 * 2
    for case in ("states, HalfCheetah-v5", "224x224 lossless, PushT"):
        plain, slots = rows[f"{case}: plain"], rows[f"{case}: recorded"]
        # With one round the overhead is that of the two figures beside it.
        assert agree(percent(slots[2]), minus(over(printed(slots[0]), printed(plain[0])), (1.0, 1.0)))
        assert slots[3] == f"{slots[2]} to {slots[2]}", "the quartiles of one round"
        assert agree(percent(slots[4]), minus(over(printed(slots[1]), printed(plain[1])), (1.0, 1.0)))
        assert f"recording {case} {slots[2]} wall, {slots[4]} cpu" in lines[-1]
