"""A sample of the attack on the HTTP servers; `make chaos` goes on for as long as it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import run_attack


def _withstands(folder: Path, attempts: int, seed: int) -> None:
    tally = run_attack("requests", folder, seed=seed, attempts=attempts)
    assert tally.attempts == attempts
    assert tally.failures == [], "\n".join(tally.reproductions())
    assert tally.further["leaked"] == 0
    assert tally.further["refused"] > attempts / 2, "it did attack: most of what is sent is refused"


def test_wrong_requests_are_refused_in_one_line_and_leave_nothing_behind(tmp_path: Path) -> None:
    _withstands(tmp_path, 200, seed=17)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_wrong_requests(tmp_path: Path) -> None:
    _withstands(tmp_path, 2000, seed=18)
