"""The main loop, end to end, through the command line and the Python door, on real simulators."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied_rl.checkpoint import find_last, load_checkpoint
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.reporting import too_short
from embodied_rl.run_folder import _newest_unfinished, find_run_folder
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.forks import run_forked, start_forked
from tests.short_run import last_of, told

pytestmark = pytest.mark.usefixtures("forked")

QUICK = ["video.enabled=no", "evaluation.num_episodes=4", "logger=quiet", "sim.num_workers=1", "sim.num_slots=4", "stop_at_success=null"]
PENDULUM = [
    *("sim=pendulum", "sim.max_episode_steps=50", *QUICK),
    *("algorithm.rollout_steps=64", "algorithm.num_epochs=2", "algorithm.minibatch_size=64"),
]
GROUPS = [
    *("sim=cartpole", "algorithm=grpo", "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=2"),
    *(*QUICK, "algorithm.num_epochs=2", "algorithm.minibatch_size=64", "policy.hidden_sizes=[16]"),
]


def run_command(*overrides: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_forked("embodied_rl.train", *last_of(overrides), cwd=cwd)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def curve(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith(("time", "speed"))} for row in rows]


@pytest.mark.slow  # tests/test_examples.py has the notebook learn the same
def test_cartpole_learns_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embodied_rl.train", "experiment=cartpole", "run_dir=run", "video.enabled=no", "total_steps=10000"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=500)
    results = json.loads((tmp_path / "run/results.json").read_text())
    # A random policy balances for about 22 steps; with 10k steps PPO is beyond 400 here.
    assert results["return_mean"] > 150
    assert results["num_episodes"] == 100
    assert results["held_out_seeds"]["first"] == 2**30
    for name in ("metrics.jsonl", "curves.png", "report.html", "checkpoints/last/policy.safetensors", "checkpoints/last/MODEL_CARD.md"):
        assert (tmp_path / "run" / name).stat().st_size > 0


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(PENDULUM, id="fused"),
        pytest.param([*PENDULUM, "sim=cartpole", "algorithm.normalize_reward=true"], id="autograd"),
        pytest.param([*GROUPS, "algorithm.kl.coef=0.1", "algorithm.kl.target=0.01", "algorithm.reward.std=running"], id="groups"),
        pytest.param(
            [*PENDULUM, "sim=maniskill_pushcube", "evaluation.every_steps=512", "sim.num_workers=1"],
            id="maniskill",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resume_continues_to_the_same_curve_bit_for_bit(tmp_path: Path, task: list[str]) -> None:
    common = [*task, "checkpoint.every_steps=256", "checkpoint.keep_last=9", "total_steps=768", "algorithm.lr_schedule=linear"]
    whole = train(load_train_config([*common, f"run_dir={tmp_path}/whole"]))
    again = train(load_train_config([*common, f"run_dir={tmp_path}/again"]))
    middle = sorted((whole / "checkpoints").glob("step_*"))[1]
    copied = tmp_path / "resumed" / "checkpoints" / middle.name
    copied.parent.mkdir(parents=True)
    shutil.copytree(middle, copied)
    shutil.copy(whole / "metrics.jsonl", tmp_path / "resumed")
    resumed = train(load_train_config([*common, f"run_dir={tmp_path}/resumed", "resume=auto"]))
    assert resumed == tmp_path / "resumed"
    assert without_clocks(curve(whole)) == without_clocks(curve(again))
    assert without_clocks(curve(whole)) == without_clocks(curve(resumed))
    first, second = (load_file(folder / "checkpoints/last/policy.safetensors") for folder in (whole, resumed))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    curves = []
    for workers in (1, 2, 4):
        run = train(load_train_config([*PENDULUM, f"sim.num_workers={workers}", "total_steps=512", f"run_dir={tmp_path}/{workers}"]))
        curves.append(without_clocks(curve(run)))
    assert curves[0] == curves[1] == curves[2]
    assert len(curves[0]) == 2


def test_other_seeds_give_other_runs(tmp_path: Path) -> None:
    runs = [train(load_train_config([*PENDULUM, f"seed={seed}", "total_steps=512", f"run_dir={tmp_path}/{seed}"])) for seed in (1, 2)]
    assert without_clocks(curve(runs[0])) != without_clocks(curve(runs[1]))


def test_a_linear_rate_falls_to_the_last_step_of_chunks_that_episodes_cut(tmp_path: Path) -> None:
    """Episodes of 5 steps in chunks of 4: a chunk is cut to 1 step each second time, so that 40 decisions are 100 steps, not 160."""
    words = ["sim=pendulum", *QUICK, "policy=flow", "policy.chunk=4", "policy.hidden_sizes=[16]", "sim.max_episode_steps=5"]
    words += [
        "total_steps=400",
        "algorithm.rollout_steps=10",
        "algorithm.num_epochs=1",
        "algorithm.minibatch_size=40",
        "algorithm.learning_rate=1e-3",
    ]
    train(load_train_config([*words, "algorithm.lr_schedule=linear", f"run_dir={tmp_path / 'run'}"]))
    rows = [row for row in curve(tmp_path / "run") if "train/learning_rate" in row]
    assert [row["step"] for row in rows] == [100, 200, 300, 400]
    np.testing.assert_allclose([row["train/learning_rate"] for row in rows], [1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path) -> None:
    overrides = [*PENDULUM, "sim.num_workers=2", "total_steps=100000000", "run_dir=run", "checkpoint.every_steps=null"]
    with open(tmp_path / "printed", "wb") as output:
        process = start_forked("embodied_rl.train", *last_of(overrides), output=output, collects=True, folder=tmp_path)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, "it has ended by itself"
        assert time.monotonic() < deadline, "it does not begin"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    status, errors = process.wait(240), (tmp_path / "printed").read_text()
    assert status == 0, errors
    assert "Interrupted and saved" in errors
    assert "resume=run" in errors
    steps = json.loads((tmp_path / "run/checkpoints/last/state.json").read_text())["step"]
    assert steps == curve(tmp_path / "run")[-1]["step"] > 0
    done = run_command("resume=run", f"total_steps={steps + 256}", cwd=tmp_path)
    assert f"Resuming {(tmp_path / 'run').resolve()}" in done.stderr
    assert curve(tmp_path / "run")[-1]["step"] == steps + 256


def test_a_run_stops_at_nan_and_leaves_the_batch(tmp_path: Path) -> None:
    done = run_command(
        *PENDULUM,
        "sim.target=tests.sim.toy:CountingSim",
        "sim.task=null",
        "+sim.kwargs.misbehave=nan_observation",
        "sim.num_workers=1",
        "run_dir=" + str(tmp_path / "run"),
        cwd=Path(__file__).parents[1],
        expect=1,
    )
    assert "NaN or infinity in the observation" in done.stderr
    assert "Traceback" not in done.stderr
    (dump,) = (tmp_path / "run/failures").glob("*.npz")
    with np.load(dump, allow_pickle=False) as arrays:
        context = json.loads(arrays["context_json"].tobytes())
        assert np.isnan(arrays["observation/state"]).any()
    assert set(context["episode_steps"]) == {3}  # both slots of the group
    assert len(context["slots"]) == len(context["episode_seeds"]) == len(context["episode_steps"])
    assert str(dump) in done.stderr


MISTAKES = [
    (["sim=maniskil_pushcube"], "Simulator 'maniskil_pushcube' is not known. Did you mean 'maniskill_pushcube'?"),
    (["algorithm.clip_hig=0.3"], "Did you mean 'clip_high'?"),
    (["algorithm.clip_high=wide"], "algorithm.clip_high must be a number, got 'wide'"),
    (["algorithm.gamma=1.5"], "algorithm.gamma must be between 0 and 1, got 1.5"),
    (
        ["policy=cnn"],
        "policy.observation_key='rgb' is not an observation of task 'Pendulum-v1'. Known: state. policy=cnn reads images, which",
    ),
    (["sim=halfcheetah", "sim.task=HalfCheeta-v5"], "Did you mean 'HalfCheetah-v5'?"),
    (["sim.target=nowhere.at:all"], "No module named 'nowhere'"),
    (["run_dir=/proc/no"], "Cannot write '/proc/no'"),
    (["algorithm.groups.group_size=4"], "algorithm=ppo learns from fixed rollouts and has no groups. Choose a method with groups"),
    (["hybrid=multiplexed", "hybrid.placement.num_hosts=3"], "set it whole, 'hybrid.placement={kind: multiplexed, num_hosts: …}'"),
    (["algorithm.warm_start.episodes=3"], "null here: set it whole, 'algorithm.warm_start={episodes: …}'"),
    (["algorithm.cloning.loss=mse"], "choose a file that has it (algorithm=bc, dagger), or set it whole"),
    (["policy.num_bins=9"], "'num_bins' does not exist. Files of configs/policy that have it: tiny_vla."),
    (["experiment=halfcheetah", "protocol=null"], "to leave out an experiment's protocol, type '~protocol'"),
    (["sim=frozenlake"], "policy=language generation=tokens_torch algorithm=grpo"),
    (["resume=nothing"], "Checkpoint 'nothing' does not exist"),
    (["algorithm.minibatch_size=4096"], "algorithm.minibatch_size must be <= sim.num_slots * algorithm.rollout_steps (256), got 4096"),
]
MATHEMATICS = [
    (["algorithm.advantage=rloo"], "needs whole episodes"),
    (["algorithm=grpo", "algorithm.loss=ipa", "algorithm.loss_options.max_mismatch=2"], "set algorithm.advantage=ipa"),
    (["algorithm=grpo", "algorithm.loss_options.max_mismatch=2"], "is not an option of 'ppo_clip'"),
]
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from embodied_rl.commands.train import main

for words in json.loads(sys.argv[1]):
    sys.argv, errors, status = ["train", *words], io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(errors):
            main()
    except SystemExit as ended:
        status = ended.code
    print("ENDED", json.dumps([status, errors.getvalue()]), flush=True)
"""
"""In one process."""


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """{what its error says: (exit status, error output)} of the command lines with each of the mistakes."""
    commands = [[*PENDULUM, *words] for words, _ in MISTAKES] + [["sim=cartpole", *words] for words, _ in MATHEMATICS]
    given = json.dumps([last_of([f"run_dir=run{number}", *words]) for number, words in enumerate(commands)])
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "one_after_the_other.py").write_text(ONE_AFTER_THE_OTHER, encoding="utf-8")
    done = run_forked("one_after_the_other", given, cwd=folder)
    ended = [json.loads(line.removeprefix("ENDED ")) for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    messages = [message for _, message in (*MISTAKES, *MATHEMATICS)]
    return {message: (status, errors) for message, (status, errors) in zip(messages, ended, strict=True)}


@pytest.mark.parametrize("message", [message for _, message in (*MISTAKES, *MATHEMATICS)])
def test_a_mistake_is_one_line(mistaken: dict[str, tuple[int, str]], message: str) -> None:
    status, told = mistaken[message]
    assert status == 2
    assert message in told
    errors = [line for line in told.splitlines() if line.strip()]
    assert len(errors) == 1, told
    assert errors[0].startswith("error: ")


def test_a_checkpoint_of_another_simulator_is_refused(tmp_path: Path) -> None:
    run = train(load_train_config([*PENDULUM, "total_steps=256", f"run_dir={tmp_path}/run"]))
    with pytest.raises(IncompatibleCheckpointError, match="was made for another simulator"):
        train(load_train_config([*PENDULUM, "sim=cartpole", f"resume={run}"]), overrides=["sim=cartpole"])
    with pytest.raises(IncompatibleCheckpointError, match=r"cannot be resumed from: algorithm=ppo wrote its training state\."):
        train(load_train_config([*PENDULUM, "algorithm=grpo", f"resume={run}"]), overrides=["algorithm=grpo"])
    damaged = run / "checkpoints" / "last" / "policy.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(UserError, match="truncated or damaged"):
        train(load_train_config([*PENDULUM, f"resume={run}"]))


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    overrides = [*PENDULUM, "total_steps=256", f"run_dir={tmp_path}/run"]
    train(load_train_config(overrides))
    with pytest.raises(UserError, match=r"already has a run\. Continue it with resume=auto"):
        train(load_train_config(overrides))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert train(load_train_config([*overrides, f"run_dir={tmp_path}/other"])) == tmp_path / "other_2"


def test_a_checkpoint_that_lies_elsewhere_goes_on_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Nothing is written beside what somebody sent, and no metrics of others are cut."""
    whole = [*PENDULUM, "total_steps=512", "checkpoint.every_steps=256", "checkpoint.keep_last=9"]
    run = train(load_train_config([*whole, f"run_dir={tmp_path}/run"]))
    first, _ = sorted((run / "checkpoints").glob("step_*"))
    downloads = tmp_path / "downloads"
    shutil.copytree(first, downloads / "sent")
    (downloads / "metrics.jsonl").write_text('{"step": 1000000000}\n')
    # As if it had been put into the folder of another run.
    foreign = tmp_path / "foreign"
    shutil.copytree(first, foreign / "checkpoints" / first.name)
    (foreign / "metrics.jsonl").write_text('{"step": 1000000000}\n')
    (foreign / "run.json").write_text('{"run_id": "another"}')
    before = {path: path.read_bytes() for place in (downloads, foreign) for path in place.rglob("*") if path.is_file()}
    for number, source in enumerate((downloads / "sent", foreign / "checkpoints" / first.name)):
        default = tmp_path / f"runs{number}" / "20260101-120000-seed1"
        gone_on = train(load_train_config([*whole, f"run_dir={default}", f"resume={source}"]))
        assert gone_on == default
        assert curve(gone_on)[-1]["step"] == 512
    assert before == {path: path.read_bytes() for place in (downloads, foreign) for path in place.rglob("*") if path.is_file()}


def test_resume_with_another_run_dir_goes_on_there_with_the_history(tmp_path: Path) -> None:
    whole = [*PENDULUM, "total_steps=512", "checkpoint.every_steps=256", "checkpoint.keep_last=9", "logger.names=[jsonl,tensorboard]"]
    run = train(load_train_config([*whole, f"run_dir={tmp_path}/run"]))
    first, _ = sorted((run / "checkpoints").glob("step_*"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = train(load_train_config([*whole, f"run_dir={tmp_path}/other", f"resume={first}"]))
    assert other == tmp_path / "other"
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    # Nothing is written where the checkpoint's run was.
    assert all(load_checkpoint(path).config.run_dir == str(other) for path in (other / "checkpoints").glob("step_*512"))
    # The same curve from its first row on: the rows up to the checkpoint are copied, those after it trained again.
    assert without_clocks(curve(other)) == without_clocks(curve(run))
    assert (other / "checkpoints" / first.name / "policy.safetensors").read_bytes() == (first / "policy.safetensors").read_bytes()
    assert {path.name for path in (run / "tensorboard").iterdir()} < {path.name for path in (other / "tensorboard").iterdir()}
    # It is a run like any other: named by its folder, it goes on in it, and a folder that holds a run is not written over.
    assert train(load_train_config([f"resume={other}", "total_steps=768"]), overrides=["total_steps=768"]) == other
    with pytest.raises(UserError, match="other already has a run"):
        train(load_train_config([*whole, f"run_dir={tmp_path}/other", f"resume={first}"]))


def test_a_run_whose_folder_is_removed_ends_with_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    overrides = [*PENDULUM, "total_steps=100000000", "run_dir=run", "checkpoint.every_steps=null", "logger.names=[jsonl,plot]"]
    with open(tmp_path / "printed", "wb") as output:
        process = start_forked("embodied_rl.train", *last_of(overrides), output=output, collects=True, folder=tmp_path)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, "it has ended by itself"
        assert time.monotonic() < deadline, "it does not begin"
        time.sleep(0.1)
    rows = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    shutil.rmtree(tmp_path / "run")
    status, errors = process.wait(240), (tmp_path / "printed").read_text()
    assert status == 2, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "The run's folder run was removed or moved while it ran." in line
    assert line.endswith("continue with resume=run_rescued.")
    assert not (tmp_path / "run").exists()
    rescued = tmp_path / "run_rescued"
    steps = json.loads((rescued / "checkpoints/last/state.json").read_text())["step"]
    assert [row["step"] for row in curve(rescued)][: len(rows)] == rows
    assert steps > rows[-1]
    run_command("resume=run_rescued", f"total_steps={steps + 256}", cwd=tmp_path)
    assert curve(rescued)[-1]["step"] == steps + 256


def test_two_processes_never_write_the_same_run(tmp_path: Path) -> None:
    """Whoever comes second finds the folder claimed: with a name of its own where the name is the default's, and else an error."""
    overrides = [*PENDULUM, "total_steps=256", "checkpoint.every_steps=128"]
    run = train(load_train_config([*overrides, f"run_dir={tmp_path}/run"]))
    for name in ("run", "other", "20260101-120000-seed1"):
        (tmp_path / name).mkdir(exist_ok=True)
    with contextlib.ExitStack() as first:
        for name in ("run", "other", "20260101-120000-seed1"):
            claim = first.enter_context((tmp_path / name / ".lock").open("ab"))
            fcntl.flock(claim, fcntl.LOCK_EX)
        for chosen in (f"resume={run}", f"run_dir={tmp_path}/other"):
            with pytest.raises(UserError, match=r"Another process is writing the run in .*/(run|other)\. Wait for it"):
                train(load_train_config([*overrides, chosen, "total_steps=512"]))
        taken = tmp_path / "20260101-120000-seed1"
        assert train(load_train_config([*overrides, f"run_dir={taken}"])) == tmp_path / "20260101-120000-seed1_2"
        assert [path.name for path in taken.iterdir()] == [".lock"]
    # Who is gone holds nothing: the folder is taken, and the run goes on.
    assert train(load_train_config([*overrides, f"run_dir={taken}"])) == taken
    assert train(load_train_config([f"resume={run}", "total_steps=512"]), overrides=["total_steps=512"]) == run


def test_a_run_that_is_refused_leaves_no_folder_and_no_lock(tmp_path: Path) -> None:
    """A folder that was there before, and one with something in it, stays."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "20260101-120000-seed2" / "source").mkdir(parents=True)
    for name in ("pendulum/20260101-120000-seed1", "mine", "20260101-120000-seed2"):
        with pytest.raises(UserError, match="Type: policy=mlp"):
            train(load_train_config([*PENDULUM, "policy=cnn", f"run_dir={tmp_path}/{name}"]))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != ".lock" or path.parent.name == "mine")
    assert left == ["20260101-120000-seed2", "20260101-120000-seed2/source", "mine"]


def test_a_folder_whose_lock_is_another_file_by_now_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this run opens the lock and locks it, a refused run removes it, and a third run makes its own."""
    config, flock, third = load_train_config([*PENDULUM, f"run_dir={tmp_path}/run"]), fcntl.flock, contextlib.ExitStack()

    def late(claim: IO[bytes], how: int) -> None:
        (tmp_path / "run/.lock").unlink()
        flock(third.enter_context((tmp_path / "run/.lock").open("ab")), how)
        flock(claim, how)

    with third, monkeypatch.context() as patched:
        patched.setattr("embodied_rl.run_folder.fcntl.flock", late)
        with pytest.raises(UserError, match="Another process is writing the run"):
            find_run_folder(config, [])


def test_the_last_run_of_a_seed_is_not_one_of_a_longer_number(tmp_path: Path) -> None:
    for name in ("20260101-120000-seed1", "20260102-120000-seed12"):
        (tmp_path / name / "checkpoints" / "step_000000256").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "step_000000256" / "state.json").touch()
    assert _newest_unfinished(tmp_path, 1) == find_last(tmp_path / "20260101-120000-seed1")
    assert _newest_unfinished(tmp_path, 12) == find_last(tmp_path / "20260102-120000-seed12")
    assert _newest_unfinished(tmp_path, 2) is None


def test_a_run_whose_folder_was_removed_ends_with_its_own_error(tmp_path: Path) -> None:
    config = load_train_config([*PENDULUM, f"run_dir={tmp_path}/20260101-120000-seed1"])
    folder = find_run_folder(config, [])
    with folder.claimed():  # whose end raises nothing
        shutil.rmtree(folder.path)


def test_a_run_says_first_what_it_will_do_and_that_its_time_is_too_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, each a process of its own: start-up is what takes too long here."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        few = ("experiment=cartpole", "sim.num_workers=1", "sim.num_slots=8")
        return run_forked("embodied_rl.train", *few, *words, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})

    options = ("stop_at_success=0.9", "evaluation.num_episodes=4", "max_minutes=10", "video.enabled=no")
    whole = run("run_dir=whole", "total_steps=512", *options)
    assert whole.returncode == 0, whole.stderr
    first, folder, *_ = whole.stdout.splitlines()
    assert first.startswith("Training actor_critic with ppo in cartpole (CartPole-v1), seed 1: at most 512 steps")
    assert first.endswith(", until success 90%, at most 10 minutes.")
    assert folder == "Run folder: whole"
    assert "parameters on cpu; action discrete(2); 8 slots over 1 worker. The task reports no success" in whole.stdout
    (remembered,) = (tmp_path / "cache" / "embodied_rl" / "starts").iterdir()
    times = json.loads(remembered.read_text(encoding="utf-8"))
    trained_s = json.loads((tmp_path / "whole" / "results.json").read_text(encoding="utf-8"))["train_wall_clock_s"]
    assert 0 < times["start_s"] < trained_s

    remembered.write_text(json.dumps({"start_s": 30.0, "episode_s": 0.5}), encoding="utf-8")
    short = run("run_dir=short", "max_minutes=0.001", "evaluation.num_episodes=20")
    assert short.returncode == 2, short.stderr
    (line,) = told(short.stderr)
    # 0.06 seconds are over at the first look at the clock, or when the simulators run, where the machine is that fast.
    assert line.startswith("error: Nothing was trained: max_minutes=0.001 was over ")
    assert line.endswith("Set a larger max_minutes.")
    # (1.5 * 30 + 20 * 0.5) / 60 = 0.92 minutes, rounded up.
    assert short.stdout.splitlines()[1] == (
        "max_minutes=0.001 is short: the last such run needed 0:30 to start and 0:10 to evaluate 20 episodes; nothing will be "
        "trained, unless this run is faster. Set max_minutes=1 or more."
    )
    assert not (tmp_path / "short" / "results.json").exists(), "an untrained policy has no success of 0.0%"

    remembered.write_text(json.dumps({"start_s": 0.5, "episode_s": 30.0}), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (little,) = too_short(load_train_config(["experiment=cartpole", "max_minutes=9.9", "evaluation.num_episodes=20"]))
    assert little.endswith("10:00 to evaluate 20 episodes; little will be trained. Set max_minutes=10.1 or more.")
    assert not too_short(load_train_config(["experiment=cartpole", "max_minutes=10.1", "evaluation.num_episodes=20"]))
    assert not too_short(load_train_config(["experiment=cartpole", "evaluation.num_episodes=20"])), "without a limit"


def test_hydra_help_sweeps_and_configuration_still_work(tmp_path: Path) -> None:
    shown = run_command("--help", cwd=tmp_path)
    assert "maniskill_pushcube" in shown.stdout
    printed = run_command("--cfg", "job", "seed=9", cwd=tmp_path)
    assert "seed: 9" in printed.stdout
    swept = run_command("-m", *PENDULUM, "total_steps=256", "seed=1,2", "run_dir=runs/seed${seed}", cwd=tmp_path)
    returns = [json.loads((tmp_path / f"runs/seed{seed}/results.json").read_text())["return_mean"] for seed in (1, 2)]
    assert [line.partition(":")[0] for line in swept.stdout.splitlines() if line.startswith("Run ")] == ["Run 1", "Run 2"]
    table = swept.stdout[swept.stdout.index("held-out success, or return") :].splitlines()
    assert [line.split()[1] for line in table[1:3]] == [f"{score:.4g}" for score in sorted(returns, reverse=True)]
    assert (tmp_path / "runs/report.html").exists()
    assert "${seed}" not in swept.stdout + (tmp_path / "runs/seed2/checkpoints/last/MODEL_CARD.md").read_text()


def test_a_killed_simulator_leaves_the_curve_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies in the middle of the run: the run goes on, the numbers are the same, and the fault is on record."""

    def train_it(name: str) -> list[dict]:
        config = load_train_config([*PENDULUM, "sim.num_workers=2", "total_steps=1280", f"run_dir={tmp_path / name}"])
        train(config, command="python -m embodied_rl.train")
        return curve(tmp_path / name)

    clean = train_it("clean")
    publish = Trainer._publish

    def kill_then_publish(trainer: Trainer) -> None:
        if trainer.iteration == 3:
            os.kill(trainer.manager.worker_pids()[0], signal.SIGKILL)
        publish(trainer)

    monkeypatch.setattr(Trainer, "_publish", kill_then_publish)
    killed = train_it("killed")
    faults = [json.loads(line) for line in (tmp_path / "killed" / "faults.jsonl").read_text().splitlines()]
    assert [fault["kind"] for fault in faults] == ["DIED"]
    assert {slot["outcome"] for slot in faults[0]["slots"]} == {"restored"}
    assert killed[-1]["sim/faults"] == 1
    assert [{key: value for key, value in row.items() if not key.startswith("sim/")} for row in without_clocks(killed)] == without_clocks(
        clean
    )


def test_groups_do_not_depend_on_workers_and_slots(tmp_path: Path) -> None:
    """Their episodes have seeds and noise of their own. (Forward passes of other sizes may round differently, so not bit for bit.)"""
    curves = []
    for number, changes in enumerate(([], ["sim.num_workers=2"], ["sim.num_slots=2"], ["sim.num_slots=7"])):
        run = train(load_train_config([*GROUPS, "total_steps=500", f"run_dir={tmp_path}/{number}", *changes]))
        curves.append(without_clocks(curve(run)))
    assert len(curves[0]) > 2
    for other in curves[1:]:
        assert [row["step"] for row in other] == [row["step"] for row in curves[0]]
        assert [row["episode/return"] for row in other] == pytest.approx([row["episode/return"] for row in curves[0]])


def test_groups_without_a_signal_are_replaced_and_counted(tmp_path: Path) -> None:
    """CartPole returns of a group are seldom equal, so the filter is on the mean: groups below it are dropped and others played."""
    filters = "algorithm.groups.filters=[{name: mean_score, minimum: 20}]"
    run = train(load_train_config([*GROUPS, filters, "total_steps=800", f"run_dir={tmp_path}/run"]))
    last = curve(run)[-1]
    assert last["groups/filtered"] > 0
    assert last["groups/consumed"] == 2 * len(curve(run))


def test_old_episodes_are_trained_on_within_the_staleness(tmp_path: Path) -> None:
    overrides = [*GROUPS, "algorithm=decoupled_ppo", "total_steps=1200", f"run_dir={tmp_path}/run"]
    run = train(load_train_config(overrides))
    assert curve(run)[-1]["groups/consumed"] > 4
    assert json.loads((run / "results.json").read_text())["return_mean"] > 0


@pytest.mark.slow
def test_plugins_of_hydra_are_found(tmp_path: Path) -> None:
    """A launcher in a package `hydra_plugins.telling`, as pip would install one, starts the runs of a sweep."""
    plugin = tmp_path / "site" / "hydra_plugins" / "telling"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    (plugin / "launcher.py").write_text(
        "from dataclasses import dataclass\n"
        "from hydra._internal.core_plugins.basic_launcher import BasicLauncher\n"
        "from hydra.core.config_store import ConfigStore\n\n\n"
        "class TellingLauncher(BasicLauncher):\n"
        "    def launch(self, job_overrides, initial_job_idx):\n"
        "        print('launched', len(job_overrides), flush=True)\n"
        "        return super().launch(job_overrides, initial_job_idx)\n\n\n"
        "@dataclass\n"
        "class Conf:\n"
        "    _target_: str = 'hydra_plugins.telling.launcher.TellingLauncher'\n\n\n"
        "ConfigStore.instance().store(group='hydra/launcher', name='telling', node=Conf, provider='telling')\n",
        encoding="utf-8",
    )
    words = ["-m", "hydra/launcher=telling", "sim=cartpole", *QUICK, "total_steps=256", "seed=1,2"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "embodied_rl.train", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "launched 2\n" in done.stdout
    assert len(list(tmp_path.glob("runs/cartpole/*/results.json"))) == 2


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    """Of checkpoints without an evaluation none is; returns of training, which grow here, do not count beside evaluations."""
    words = ["sim=cartpole", *QUICK, "algorithm.rollout_steps=64", "total_steps=1024", f"run_dir={tmp_path}/run"]
    every = ["checkpoint.every_steps=256", "checkpoint.keep_last=9", "evaluation.every_steps=512", "evaluation.interim_episodes=2"]
    run_dir = train(load_train_config([*words, *every]))
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == [f"step_{n:09d}" for n in (256, 512, 768, 1024)]
    assert (run_dir / "checkpoints" / "best").resolve().name == "step_000000512"


class OverAtEvaluation(Trainer):
    """Its time is over when its first evaluation asks."""

    over = False

    def _time_is_over(self, reserved_s: float = 0.0) -> bool:
        self.over |= reserved_s == 0.0 and self.iteration > 0
        return self.over


def test_an_evaluation_without_time_leaves_the_running_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved as they were, not the held-out ones that it began. A clock that is set meanwhile is no time that has passed."""
    words = [*PENDULUM, "evaluation.every_steps=256", "checkpoint.within_episodes=true", "max_minutes=60", f"run_dir={tmp_path}"]
    with OverAtEvaluation(load_train_config(words), tmp_path, command="test") as trainer:
        a_day_later = time.time() + 86_400.0
        monkeypatch.setattr(time, "time", lambda: a_day_later)
        trainer.run()
        assert trainer.wall_clock_s() < 3_600.0
    assert (trainer.over, trainer.iteration) == (True, 1)
    learner = load_checkpoint(tmp_path).learner
    saved = [Snapshot.from_bytes(part.numpy().tobytes()) for name, part in learner.items() if name.startswith("episode.")]
    assert len(saved) == 4
    assert all(one.stream.seed(one.index) < HELD_OUT_START for one in saved)
