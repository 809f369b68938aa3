"""A sample of the attack on files; `make chaos` goes on for as long as it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.genuine import KINDS
from tests.chaos.harness import run_attack


def _withstands(folder: Path, attempts: int, seed: int) -> None:
    tally = run_attack("files", folder, seed=seed, attempts=attempts)
    assert tally.attempts == attempts
    assert tally.failures == [], "\n".join(tally.reproductions())
    # It did attack: most of what is damaged cannot be read, and some of it can.
    assert tally.further["told"] > attempts / 3
    assert tally.further["read"] > attempts / 30


def test_damaged_files_are_told_in_one_line_or_read_as_they_were(tmp_path: Path) -> None:
    _withstands(tmp_path, 9 * len(KINDS), seed=17)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_damaged_files_of_each_kind(tmp_path: Path) -> None:
    _withstands(tmp_path, 300 * len(KINDS), seed=18)
