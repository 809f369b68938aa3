"""A sample of the attack by signals."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos.harness import run_attack
from tests.chaos.kills import _MARK, still_running


def test_what_is_left_is_found() -> None:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, _MARK: "here"}, start_new_session=True)
    until = time.monotonic() + 5.0
    while not (left := still_running("here", 0.0)) and time.monotonic() < until:
        pass  # a program that has just begun shows no environment for a moment
    assert [one.pid for one in left] == [process.pid]
    process.kill()
    process.wait()
    assert still_running("here", 5.0) == []


def test_kills(tmp_path: Path) -> None:
    tally = run_attack("kills", tmp_path, seed=0, attempts=3)
    assert tally.failures == []
    assert tally.further["kills survived"] >= 3
    assert tally.further["episodes accounted for"] >= 10
    assert tally.further["processes left"] == 0


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_killed_training_run(tmp_path: Path) -> None:
    assert run_attack("kills", tmp_path, seed=0, only=3).failures == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills(tmp_path: Path) -> None:
    assert run_attack("kills", tmp_path, seed=1, attempts=40).failures == []
