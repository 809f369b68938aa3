"""What the README shows is run: every command in order, as a reader would, in an empty folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.test_examples import blocks, commands

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLONES = ["algorithm.warm_start.episodes=8", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=2"]
ONE_BATCH = ["algorithm.groups.groups_per_step=4", "algorithm.groups.filters=[]"]
ONE_ROLLOUT = ["algorithm.rollout_steps=8", "algorithm.num_epochs=1", "algorithm.minibatch_size=32"]
ENOUGH = ["evaluation.num_episodes=25", "video.num_episodes=1"]
FEW = ["evaluation.num_episodes=2", "evaluation.every_steps=null", "video.enabled=no", "sim.num_workers=1"]
SHORT = {
    "train": ["total_steps=1024", *FEW],
    "train -m": ["seed=1,2", "total_steps=1024", *FEW],
    "train sim=maniskill_pickcube": ["total_steps=256", *FEW, "sim.num_slots=4"],
    "train experiment=fetch_reach": ENOUGH,  # it learns as it is: the smoke run, with its film
    "train experiment=tiny_vla": [*CLONES, *FEW, "total_steps=128", "sim.num_slots=4", *ONE_ROLLOUT],
    "train experiment=frozenlake_text": [*CLONES, *FEW, "total_steps=64", "sim.num_slots=8", *ONE_BATCH],
    "evaluate": ["num_episodes=10"],
    "render": ["num_episodes=1"],
    "record": ["num_episodes=12"],
    "replay": ["num_episodes=2"],
    "offline_eval": ["fqe.num_steps=50", "num_samples=200"],
}
"""What a command is shortened by: learning itself is shown by test_main_job.py and by docs/results.md."""
ELSEWHERE = {"doctor": "test_doctor.py"}
"""A command that takes long and has nothing of the others', and the file of tests that runs it in a process of its own."""
ONE_AFTER_THE_OTHER = """
import json, runpy, sys

for name, *words in json.loads(sys.argv[1]):
    sys.argv = [name, *words]
    print(">", *sys.argv, file=sys.stderr, flush=True)
    try:
        runpy.run_module(f"embodied_rl.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
"""
"""In one process, which need not import torch for each."""


def shortened(name: str, arguments: list[str]) -> list[str]:
    """The command with fewer steps and episodes, whether it says how many or not."""
    changes = SHORT.get(" ".join([name, *arguments[:1]]), SHORT.get(name, []))
    keys = {word.partition("=")[0] for word in changes}
    return [name, *(word for word in arguments if word.partition("=")[0] not in keys), *changes]


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("forked")
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
    listed = json.dumps([shortened(name, arguments) for name, arguments in shown if name not in ELSEWHERE])
    (tmp_path / "one_after_the_other.py").write_text(ONE_AFTER_THE_OTHER, encoding="utf-8")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run_forked("one_after_the_other", listed, cwd=tmp_path, env=environment, timeout=1500)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    results = json.loads((tmp_path / "runs/fetch_reach/results.json").read_text(encoding="utf-8"))
    assert results["success"] >= 0.9


def test_what_runs_elsewhere_is_run_there() -> None:
    for name, file in ELSEWHERE.items():
        assert f'"embodied_rl.{name}"' in (ROOT / "tests" / file).read_text(encoding="utf-8")


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
