"""A sample of the attack on command lines; `make chaos` goes on for as long as it is given."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import commands
from tests.chaos.commands import Wrong, in_process, judge
from tests.chaos.harness import run_attack
from tests.chaos.mistakes import wrong_value

ATTEMPTS = 50


def _withstands(folder: Path, attempts: int, seed: int) -> None:
    tally = run_attack("commands", folder, seed=seed, attempts=attempts)
    assert tally.attempts == attempts
    assert tally.failures == [], "\n".join(tally.reproductions())
    assert tally.further["of train"] > attempts / 3
    assert tally.further["in a process of their own"] >= attempts // commands.EVERY - attempts // 200


def test_generated_mistakes_end_in_one_line(tmp_path: Path) -> None:
    _withstands(tmp_path, ATTEMPTS, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_four_thousand_generated_mistakes_end_in_one_line(tmp_path: Path) -> None:
    _withstands(tmp_path, 4_000, seed=22)


def test_the_attack_notices_a_command_that_is_accepted_and_one_that_says_too_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    right = Wrong("train", ("sim=cartpole", "seed=3"), "seed")
    assert in_process(right)[0] == "accepted"
    assert (judge(right, "accepted", "") or "").startswith("accepted")
    assert (judge(right, 2, "error: something is wrong") or "").startswith("does not name seed")
    assert (judge(right, 2, "error: seed\nerror: seed") or "").startswith("not one line")
    assert (judge(right, 2, "error: seed " + "x" * 400) or "").endswith("…")
    assert (judge(right, 1, "error: seed") or "").startswith("status 1")
    assert judge(right, 2, "error: seed must be 3") is None


def test_what_is_generated_for_a_number_lies_outside_its_bounds() -> None:
    from embodied_rl.bounds import Share, Size

    chance = random.Random(5)
    for hint, least, most in ((Size, 1, 1_000_000), (Share, 0, 1)):
        for _ in range(200):
            text = wrong_value(hint, chance)
            try:
                value = float(text)
            except ValueError:
                continue
            inside = least <= value <= most
            # Of an integer's, a number inside is wrong for its form.
            assert not inside or (hint is Size and not text.isdecimal()) or not text.isascii(), text
