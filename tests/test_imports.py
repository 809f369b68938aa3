"""What importing costs: simulator processes load no torch, and ``train --help`` answers at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "matplotlib", "gymnasium", "mujoco", "sapien", "mani_skill", "tensorboard", "wandb", "scipy", "av", "PIL")

HELP_MODULES = 600
"""What may be imported to answer ``--help``, the standard library's modules and Hydra's included: some 370 take half a second of a
processor. Seconds are measured by hand (docs/results.md): what they are here depends on the machine and on who else is there."""


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has imported after `statement`."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_probe_notices_what_is_loaded() -> None:
    assert loaded_by("import json, wave", ("json", "wave", "chunk")) == ["json", "wave"]


@pytest.mark.parametrize("module", ["sim", "sim.env", "sim.manager", "sim.worker", "sim.rendering", "types", "config", "registry"])
def test_simulator_side_loads_no_torch(module: str) -> None:
    heavy = tuple(name for name in HEAVY if name not in ("PIL",))
    assert loaded_by(f"import embodied_rl.{module}", heavy) == []


@pytest.mark.parametrize(
    "module",
    [
        "train",
        "evaluate",
        "render",
        "catalog",
        "doctor",
        "report",
        "commands.episode_tools",
        "offline_eval",
        "serve_envs",
        "serve_agent",
        "plan",
    ],
)
def test_command_lines_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import embodied_rl.{module}", HEAVY) == []


def test_train_help_answers_at_once_and_loads_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "embodied_rl.train", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "embodied_rl" in result.stdout
    assert "experiment" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in imported, "the import log was not read"
    assert not imported & set(HEAVY)
    assert len(imported) < HELP_MODULES, sorted(imported)
