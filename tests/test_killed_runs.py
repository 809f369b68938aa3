"""Runs that are killed with SIGKILL at random moments and continued with ``resume=auto`` have the curve of those that were not."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.checkpoint import find_last, load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.train import train
from tests.forks import start_forked
from tests.short_run import last_of

pytestmark = pytest.mark.usefixtures("forked")
COMMON = (
    *("video.enabled=no", "evaluation.num_episodes=2", "evaluation.interim_episodes=2", "stop_at_success=null", "hybrid.num_threads=1"),
    *("sim.num_workers=1", "sim.num_slots=4", "checkpoint.keep_last=2", "logger.names=[jsonl,tensorboard]"),
)
CARTPOLE = (*COMMON, "sim=cartpole", "policy.hidden_sizes=[16]", "algorithm.minibatch_size=32", "algorithm.lr_schedule=linear")
PPO = (
    *(*CARTPOLE, "algorithm.rollout_steps=16", "algorithm.num_epochs=2", "algorithm.normalize_reward=true", "total_steps=1280"),
    *("checkpoint.every_steps=192", "evaluation.every_steps=640"),
)
GROUPS = (
    *(*CARTPOLE, "algorithm=grpo", "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=1", "algorithm.kl.coef=0.1"),
    *("algorithm.kl.target=0.01", "total_steps=1000", "checkpoint.every_steps=200", "evaluation.every_steps=null"),
)
LANGUAGE = (
    *(*COMMON, "experiment=frozenlake_text", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=2"),
    *("algorithm.groups.filters=[]", "algorithm.minibatch_size=8", "agent.max_new_tokens=2", "evaluation.every_steps=null"),
    "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}",
    *("algorithm.warm_start.episodes=4", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=2"),
    *("total_steps=400", "checkpoint.every_steps=60"),
)
START_S = 240.0
"""Until a run on a busy machine has logged something."""


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged, without clocks."""
    try:
        rows = read_metrics(run_dir / "metrics.jsonl")
    except FileNotFoundError:  # not yet, or just put aside by a run that begins again
        return []
    return [{key: value for key, value in row.items() if not key.startswith(("time", "speed"))} for row in rows]


def scalars_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: {name: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    names = [name for name in shown.Tags()["scalars"] if not name.startswith(("time", "speed"))]
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in names}


def kill_at_random(run_dir: Path, overrides: tuple[str, ...], rng: random.Random, later_than: int, num_rows: int) -> int:
    """Start (or continue) a run in a process of its own and kill it; the number of rows that it had logged, `num_rows` - 1 at most.

    However late we come to it, it has not ended by itself.
    """
    wanted = rng.randint(later_than + 1, num_rows - 1)
    words = [str(num_rows - 1), *last_of(overrides), f"run_dir={run_dir}", "resume=auto"]
    with tempfile.TemporaryFile() as output:
        process = start_forked("tests.held_back", *words, output=output, collects=True)
        deadline = time.monotonic() + START_S
        while len(rows_of(run_dir)) < wanted and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill(signal.SIGKILL)
        ended = process.wait(60)
        output.seek(0)
        assert ended == -signal.SIGKILL, output.read().decode()
    return len(rows_of(run_dir))


def check_killed(tmp_path: Path, overrides: tuple[str, ...], *, seed: int, kills: int) -> None:
    whole = train(load_train_config([*overrides, f"run_dir={tmp_path / 'whole'}"]))
    check_killed_against(whole, tmp_path / "killed", overrides, random.Random(seed), kills)


def check_killed_against(whole: Path, killed: Path, overrides: tuple[str, ...], rng: random.Random, kills: int) -> int:
    """Kill a run into the folder `killed` and let it end: it is the unbroken run `whole`. Returns how often it was killed."""
    rows, done, killings = rows_of(whole), 0, 0
    for _ in range(kills):
        if done < len(rows) - 1:
            done = kill_at_random(killed, overrides, rng, done, len(rows))
            killings += 1
    assert not (killed / "results.json").exists(), "every run was killed before its end: the test means something"
    if (last := find_last(killed)) is not None:
        load_checkpoint(last)  # whole, whatever was being written
    resumed = train(load_train_config([*overrides, f"run_dir={killed}", "resume=auto"]))
    assert resumed == killed
    assert rows_of(killed) == rows
    assert scalars_of(killed) == scalars_of(whole)
    one, other = load_checkpoint(whole), load_checkpoint(killed)
    assert one.step == other.step
    for mine, theirs in ((one.policy, other.policy), (one.learner, other.learner)):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    for document in ("results.json",):
        first, second = (json.loads((folder / document).read_text()) for folder in (whole, killed))
        assert first["episodes"] == second["episodes"]
    return killings


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_rollouts(tmp_path: Path, seed: int) -> None:
    check_killed(tmp_path, PPO, seed=seed, kills=2)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_groups(tmp_path: Path, seed: int) -> None:
    check_killed(tmp_path, GROUPS, seed=seed, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.ci_sample), 1])
def test_rollouts_that_go_on_within_their_episodes(tmp_path: Path, seed: int) -> None:
    overrides = (*PPO, "checkpoint.within_episodes=true")
    check_killed(tmp_path, overrides, seed=seed, kills=1)


@pytest.mark.slow
def test_checkpoints_in_the_background(tmp_path: Path) -> None:
    check_killed(tmp_path, (*PPO, "checkpoint.asynchronous=true"), seed=4, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_language_agents(tmp_path: Path, seed: int) -> None:
    check_killed(tmp_path, LANGUAGE, seed=seed, kills=2)


def test_before_the_first_checkpoint_it_begins_again_in_its_folder(tmp_path: Path) -> None:
    overrides = (*PPO, "total_steps=640", "checkpoint.every_steps=null", "evaluation.every_steps=null", "algorithm.num_epochs=1")
    check_killed(tmp_path, overrides, seed=0, kills=1)
    assert (tmp_path / "killed" / "metrics_2.jsonl").is_file(), "what the killed run had logged is kept, aside"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_a_disk_that_fills_up_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """A run into a file system of 1.5 MB: it ends with the reason, the last checkpoint is whole, and with room the run goes on."""
    run, kept, root = tmp_path / "run", tmp_path / "kept", Path(__file__).parents[1]
    run.mkdir()
    mount = f"mount -t tmpfs -o size=1500k tmpfs {run}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    overrides = (
        *PPO,
        "total_steps=2560",
        "policy.hidden_sizes=[64,64]",
        "checkpoint.keep_last=99",
        "checkpoint.every_steps=64",
        "evaluation.every_steps=null",
    )
    words = [sys.executable, "-m", "embodied_rl.train", *last_of(overrides), f"run_dir={run}/it", "resume=auto"]
    command = f'{mount} && {shlex.join(words)}; status=$?; cp -a "{run}/it" "{kept}" && exit $status'
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", command], cwd=root, capture_output=True, text=True, check=False, timeout=START_S)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: Cannot write '{run}/it/")
    assert "No space left on device" in lines[0]
    assert "Traceback" not in done.stderr
    survivor = load_checkpoint(kept)
    assert survivor.path.name == (kept / "checkpoints" / "last").readlink().name
    assert survivor.step > 0
    total = survivor.step + 64
    resumed = train(load_train_config([*overrides, f"total_steps={total}", f"resume={kept}"]), overrides=[f"total_steps={total}"])
    assert rows_of(resumed)[-1]["step"] == total
    steps = [row["step"] for row in rows_of(resumed)]
    assert steps == sorted(set(steps)), "no row twice"
