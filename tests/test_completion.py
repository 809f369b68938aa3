"""Completion by a real bash, and of sweeps' configurations by the command itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embodied_rl.__main__ import COMMANDS
from embodied_rl.commands.completion import completions, script
from embodied_rl.config.compose import check_overrides, runs_to_show
from embodied_rl.errors import UserError


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("embodied-rl ev", {"evaluate"}),
        ("embodied-rl train sim=cartp", {"sim=cartpole"}),
        ("embodied-rl train see", {"seed="}),
        ("embodied-rl train experiment=x sim.num_s", {"sim.num_slots="}),
        ("embodied-rl evaluate checkp", {"checkpoint="}),
        ("embodied-rl record sim=pendu", {"sim=pendulum"}),
        ("embodied-rl completion z", {"zsh"}),
        ("embodied-rl train run_dir=/tm", set()),
    ],
)
def test_what_is_offered(line: str, found: set[str]) -> None:
    assert set(completions(line, [*COMMANDS, "completion"])) == found


def test_bash_completes_with_it(tmp_path: Path) -> None:
    """The functions that `eval` defines, called as readline calls them."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    command = tmp_path / "embodied-rl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m embodied_rl "$@"\n')
    command.chmod(0o755)
    asked = 'COMP_LINE="embodied-rl train sim=cartp"; COMP_POINT=${#COMP_LINE}; _embodied_rl 2>/dev/null; echo "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    told = subprocess.run(
        [bash, "-c", f'eval "$(embodied-rl completion bash)"; complete -p embodied-rl; {asked}'],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert told.stdout.splitlines() == ["complete -o default -F _embodied_rl embodied-rl", "cartpole"]
    with pytest.raises(UserError, match="Did you mean 'bash'"):
        script("bahs")


@pytest.mark.parametrize("word", ["hydra.sweeper.params={seed: '1,2'}", "+hydra.sweeper.params.seed=1,2", "seed=1,2"])
def test_sweeps_are_given_in_hydras_three_ways(word: str) -> None:
    assert check_overrides(["-m", word, "sim=cartpole"]) == ["-m", *sorted(["seed=1,2", "sim=cartpole"])]
    shown = runs_to_show(check_overrides(["-m", word, "sim=cartpole,pendulum", "--cfg", "job"]))
    assert [run[2:] for run in shown] == [[f"seed={seed}", f"sim={sim}"] for seed in (1, 2) for sim in ("cartpole", "pendulum")]


def test_what_is_no_sweep_is_told() -> None:
    with pytest.raises(UserError, match="Add -m"):
        check_overrides(["hydra.sweeper.params.seed=1,2"])
    with pytest.raises(UserError, match="must be a mapping"):
        check_overrides(["-m", "hydra.sweeper.params=3"])


@pytest.mark.slow
def test_a_sweeps_configurations_are_shown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embodied_rl.train", "-m", "sim=cartpole", "seed=3,4", "--cfg", "job"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout
    documents = list(yaml.safe_load_all(told))
    assert [document["seed"] for document in documents] == [3, 4]
    assert {document["sim"]["name"] for document in documents} == {"cartpole"}
    assert not list(tmp_path.iterdir())
