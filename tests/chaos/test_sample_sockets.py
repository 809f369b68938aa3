"""A sample of the attack on sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import run_attack
from tests.chaos.sockets import KINDS


def test_sockets(tmp_path: Path) -> None:
    tally = run_attack("sockets", tmp_path, seed=0, attempts=10)
    assert tally.failures == []
    assert tally.further["workers replaced"] >= 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_sockets(tmp_path: Path) -> None:
    tally = run_attack("sockets", tmp_path, seed=1, attempts=12 * len(KINDS))
    assert tally.failures == []
