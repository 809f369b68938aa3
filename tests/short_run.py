"""Real runs of two seconds, and what several tests of the command lines ask of a mistake and of an interval."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.compose import load_train_config
from embodied_rl.train import train

QUICK = (
    "video.enabled=no",
    "logger=quiet",
    "evaluation.num_episodes=2",
    "stop_at_success=null",
    "sim.num_slots=4",
    "sim.num_workers=1",
    "algorithm.rollout_steps=64",
    "algorithm.minibatch_size=64",
    "algorithm.num_epochs=1",
    "policy.hidden_sizes=[16]",
    "total_steps=256",
)


def train_shortly(run_dir: Path, *overrides: str) -> Path:
    """Train one iteration as `overrides` say; they win over `QUICK`. Returns the run's folder."""
    changes = [*QUICK, *overrides, f"run_dir={run_dir}"]
    return train(load_train_config(changes), command=shlex.join(["python", "-m", "embodied_rl.train", *changes]))


def last_of(words: Iterable[str]) -> list[str]:
    """Of each key the last: on a command line it is given one value."""
    return list({word.partition("=")[0]: word for word in words}.values())


def told(err: str) -> list[str]:
    """The lines of stderr but those of progress, which a slow machine prints before a mistake is found."""
    return [line for line in err.splitlines() if " · elapsed " not in line]


def one_line_error(main: Callable[[Sequence[str]], None], argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command line that is called with a mistake: exactly one line, exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2, err
    assert out == ""
    (line,) = told(err)
    assert line.startswith("error: ")
    return line


def score_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval as the two roots of (p̂ - p)² = z² p (1 - p) / n, found by numpy."""
    z2, rate = 1.959963984540054**2, successes / n
    roots = np.roots([1 + z2 / n, -(2 * rate + z2 / n), rate * rate])
    low, high = sorted(float(root.real) for root in roots)
    return low, high
