"""Searching with Optuna: what is searched is read as Hydra writes it, and a real study's trials are held against their runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.commands.tune import Range, main, split_words
from embodied_rl.errors import UserError
from tests.neighbours.overlay import REPOSITORY, overlay
from tests.short_run import QUICK, last_of, one_line_error


def test_what_is_searched_is_told_from_what_stays() -> None:
    words = ["experiment=cartpole", "policy.hidden_sizes=[8,8]", "algorithm.gamma=interval(0.8,0.99)", "algorithm.num_epochs=range(2,10,3)"]
    words += ["algorithm.learning_rate=tag(log,interval(1e-5,1e-2))", "algorithm.normalize_reward=choice(true,false)"]
    fixed, ranges = split_words(words)
    assert fixed == words[:2]
    assert ranges == [
        Range("algorithm.gamma", low=0.8, high=0.99),
        Range("algorithm.num_epochs", low=2, high=8, step=3),
        Range("algorithm.learning_rate", low=1e-5, high=1e-2, log=True),
        Range("algorithm.normalize_reward", choices=(True, False)),
    ]
    assert [one.word(value) for one, value in zip(ranges, (0.95, 5, 0.00012345678, True), strict=True)] == [
        "algorithm.gamma=0.95",
        "algorithm.num_epochs=5",
        "algorithm.learning_rate=0.000123457",
        "algorithm.normalize_reward=true",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=cartpole"], "No search space"),
        (["algorithm.gamma=interval(0.9"], "'algorithm.gamma': the search space 'interval(0.9' cannot be read"),
        (["algorithm.gamma=interval(0.9,0.8)"], "'algorithm.gamma': invalid search space"),
        (["algorithm.learning_rate=tag(log,interval(0,0.1))"], "above 0 with tag(log,…)"),
        (["algorithm.num_epochs=range(3,3)"], "'algorithm.num_epochs': invalid search space"),
        (["algorithm.gamma=0.9", "+algorithm.gamma=choice(0.8,0.9)"], "'algorithm.gamma' is given twice"),
    ],
)
def test_what_cannot_be_searched_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        split_words(words)
    assert message in str(caught.value)


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    line = one_line_error(main, ["experiment=cartpole", "seed=choice(1,2)", f"study={tmp_path / 'study'}"], capsys)
    assert line.startswith("error: Command 'tune' needs packages that are not installed")
    assert line.endswith('pip install "embodied-rl[tune]"')
    assert not (tmp_path / "study").exists()


@pytest.fixture
def optuna(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment's, or one beside it."""
    if importlib.util.find_spec("optuna") is None:
        folder = str(overlay("optuna==5.0.0", "alembic==1.20.1", "colorlog==6.12.0", "mako==1.4.3", "sqlalchemy==2.1.9"))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return importlib.import_module("optuna")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_runs_its_trials_ends_poor_ones_and_goes_on(tmp_path: Path, optuna: Any) -> None:
    quick = [word for word in QUICK if not word.startswith("algorithm.num_epochs=")]
    fixed = ["sim=cartpole", *quick, "total_steps=1024", "evaluation.every_steps=512", "evaluation.interim_episodes=2", "sim.num_slots=4"]
    searched = ["algorithm.learning_rate=tag(log,interval(1e-4,1e-1))", "algorithm.num_epochs=choice(1,3)"]

    def tune(trials: int, status: int = 0) -> str:
        words = [
            sys.executable,
            "-m",
            "embodied_rl.tune",
            *last_of(fixed),
            *searched,
            f"study={tmp_path / 'study'}",
            f"trials={trials}",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    tune(2)
    printed = tune(6)
    lines = [line for line in printed.splitlines() if line.startswith("trial ") and ": " in line]
    assert [line.split(":")[0] for line in lines] == [f"trial {number} of 6" for number in (3, 4, 5, 6)], "two were there already"
    assert "Next:" not in printed, "a line for each trial, no closing text"
    assert printed.startswith(
        "Optuna searches algorithm.learning_rate=tag(log,interval(1e-4,1e-1)), algorithm.num_epochs=choice(1,3): 6 trials"
    )
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    study = optuna.load_study(study_name="study", storage=JournalStorage(JournalFileBackend(str(tmp_path / "study" / "study.journal"))))
    assert len(study.trials) == 6
    before: dict[int, list[float]] = {}
    for trial in study.trials:
        run = tmp_path / "study" / f"trial{trial.number + 1:04d}"
        if trial.state.name == "COMPLETE":
            assert trial.value == json.loads((run / "results.json").read_text())["return_mean"]
        else:
            # Below the median of those before it, from the fourth on.
            step, value = max(trial.intermediate_values.items())
            others = sorted(before[step])
            assert len(others) >= 3
            middle = len(others) // 2
            assert value < (others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2)
        if trial.state.name == "COMPLETE":
            for step, value in trial.intermediate_values.items():
                before.setdefault(step, []).append(value)
    (command,) = [line.split("train it", 1)[1].strip() for line in printed.splitlines() if "train it" in line]
    assert shlex.split(command)[-2:] == study.best_trial.user_attrs["overrides"]
    assert (tmp_path / "study" / "report.html").is_file()
    searched[1] = "algorithm.num_epochs=choice(1,2)"
    assert "has searched other values of a key" in tune(7, status=2)
