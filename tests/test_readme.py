"""What the README shows is run: every command in order, as a reader would, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import blocks, commands

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLONES = ["algorithm.warm_start.episodes=8", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=2"]
SHORT = {
    (): ["total_steps=2048", "evaluation.every_steps=null", "evaluation.num_episodes=4"],
    ("experiment=fetch_reach",): [],  # as it is: the smoke run
    ("experiment=tiny_vla",): [*CLONES, "evaluation.num_episodes=2", "evaluation.every_steps=null", "total_steps=512", "video.enabled=no"],
    ("experiment=frozenlake_text",): [*CLONES, "evaluation.num_episodes=2", "evaluation.every_steps=null", "total_steps=64"],
}
"""What a training command is shortened by: learning itself is shown by test_main_job.py and by docs/results.md."""


def run(folder: Path, *words: str, timeout: float = 600) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.timeout(1800)
def test_every_command_runs(tmp_path: Path) -> None:
    code, _ = blocks(README, "python")  # the lines from Python run in tests/test_learn.py
    path = re.match(r"# (\S+\.py)\n", code)
    assert path is not None
    module = tmp_path / path.group(1)
    module.parent.mkdir(parents=True)
    (module.parent / "__init__.py").touch()
    module.write_text(code, encoding="utf-8")
    shown = commands(README)
    everyday = {"train", "evaluate", "render", "record", "replay", "episodes", "offline_eval", "report", "catalog", "doctor"}
    assert {name for name, _ in shown} == everyday
    for name, arguments in shown:
        shortened = SHORT.get(tuple(arguments[:1]), SHORT[()]) if name == "train" else []
        given = [argument.split("=")[0] for argument in arguments]
        run(tmp_path, f"embodied_rl.{name}", *arguments, *(word for word in shortened if word.split("=")[0] not in given))
    results = json.loads((tmp_path / "runs/fetch_reach/results.json").read_text(encoding="utf-8"))
    assert results["success"] >= 0.9


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\S+)", "\n".join(blocks(README, "bash")), re.MULTILINE)
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_what_it_prints_is_what_the_code_prints() -> None:
    """The pasted console text has the lines that a run prints today."""
    (pasted,) = blocks(README, "text")
    assert re.search(r"^Final evaluation, success on 100 held-out seeds: \d+\.\d% \(95% interval [\d.]+–[\d.]+%\)", pasted, re.MULTILINE)
    for line in ("checkpoint", "curves", "video", "report", "results", "Next:"):
        assert line in pasted
