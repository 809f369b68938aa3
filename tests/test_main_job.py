"""The main job does what it promises: `python -m embodied_rl.train` with nothing else, from random weights and with its own packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.config.compose import load_train_config, or_main_job
from tests.forks import run_forked
from tests.test_install import lean  # noqa: F401 (a fixture that this module uses too)


def test_a_command_line_that_names_no_task_trains_the_main_job() -> None:
    main_job = load_train_config(["experiment=maniskill_pushcube", "run_dir=run", "seed=3", "sim.num_slots=8"])
    assert (main_job.evaluation.every_steps, main_job.evaluation.interim_episodes) == (10_000, 64)
    assert load_train_config(["run_dir=run", "seed=3", "sim.num_slots=8"]) == main_job
    assert or_main_job(["+sim@domains.pole.sim=cartpole"]) == ["+sim@domains.pole.sim=cartpole"]
    for word in ("sim=maniskill_pushcube", "policy=mlp", "algorithm=grpo", "experiment=maniskill_pickcube"):
        assert load_train_config([word]).evaluation.interim_episodes != 64, "what names a task has nothing of the main job"


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("words", "success"),
    [
        # Its last 100 training episodes say when it ends, after half of the steps.
        pytest.param(["stop_at_success=0.9", "evaluation.every_steps=null"], 0.7, id="most", marks=pytest.mark.ci_sample),
        pytest.param([], 0.9, id="all"),
    ],
)
def test_a_robot_arm_learns_to_push_a_cube(tmp_path: Path, lean: dict[str, str], words: list[str], success: float) -> None:  # noqa: F811
    """Where there is only what requirements.train.lock brings."""
    # It ends when it has learned, in a few minutes on a quiet machine.
    command = [sys.executable, "-m", "embodied_rl", "train", "run_dir=run", "max_minutes=20", "video.num_episodes=1", *words]
    environment = {name: value for name, value in lean.items() if name != "OMP_NUM_THREADS"}  # as a user's is
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert list((tmp_path / "run").rglob("*.mp4")) or "no Vulkan device" in done.stdout, "the film, where pictures can be drawn"
    results = json.loads((tmp_path / "run/results.json").read_text(encoding="utf-8"))
    assert results["task"] == "PushCube-v1"
    assert results["num_episodes"] == 100
    assert results["held_out_seeds"] == {"first": 2**30, "last": 2**30 + 99, "count": 100}
    assert results["success"] >= success, results
    low, high = results["success_interval_95"]
    assert low < results["success"] <= high


@pytest.mark.slow
@pytest.mark.ci_sample
def test_it_runs_on_a_machine_without_vulkan_and_says_why_there_is_no_video(tmp_path: Path) -> None:
    environment = {"VK_ICD_FILENAMES": str(tmp_path / "none.json"), "VK_DRIVER_FILES": str(tmp_path / "none.json")}
    few = ["total_steps=128", "sim.num_slots=4", "sim.num_workers=1", "sim.pipeline_groups=1", "algorithm.minibatch_size=64"]
    few += ["algorithm.rollout_steps=32", "evaluation.num_episodes=2"]
    done = run_forked("embodied_rl.train", "run_dir=run", *few, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no video" in done.stdout
    assert "no Vulkan device" in done.stdout
    assert not list((tmp_path / "run").rglob("*.mp4"))
    assert (tmp_path / "run/results.json").exists()
    insisting = run_forked("embodied_rl.train", "run_dir=other", *few, "video.enabled=yes", cwd=tmp_path, env=environment)
    assert insisting.returncode == 2
    assert "no Vulkan device" in insisting.stderr


@pytest.mark.slow
def test_the_task_is_not_one_that_anything_solves(tmp_path: Path) -> None:
    words = ["sim=maniskill_pushcube", "policy=random", "num_episodes=20", "output=random.json"]
    subprocess.run([sys.executable, "-m", "embodied_rl.evaluate", *words], cwd=tmp_path, check=True, capture_output=True, timeout=280)
    assert json.loads((tmp_path / "random.json").read_text(encoding="utf-8"))["success"] <= 0.1
