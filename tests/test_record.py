"""``python -m embodied_rl.record`` from end to end, killed and resumed among others."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.checkpoint import find_last
from embodied_rl.commands.record import COMMAND, Showing, main
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.sim.episode_log import Snapshot
from tests.forks import start_forked
from tests.short_run import one_line_error, train_shortly

pytestmark = pytest.mark.usefixtures("forked")

FIELDS = ("action", "reward", "terminated", "truncated", "success", "sampled_action", "log_prob", "value", "policy_version")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_shortly(tmp_path_factory.mktemp("runs") / "run", "sim=key_door", "sim.max_episode_steps=40")


def by_seed(folder: Path) -> dict[int, RecordedEpisode]:
    recording = open_recording(folder)
    episodes = {episode.seed: episode for episode in recording}
    assert len(episodes) == len(recording), "a seed was recorded twice"
    return episodes


def assert_same_episodes(one: Path, other: Path) -> None:
    left, right = by_seed(one), by_seed(other)
    assert left.keys() == right.keys()
    for seed, episode in left.items():
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(episode, name), getattr(right[seed], name), err_msg=f"{name} of seed {seed}")
        for key, part in episode.observation.items():
            np.testing.assert_array_equal(part, right[seed].observation[key], err_msg=f"{key} of seed {seed}")


def fails(argv: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


def test_an_experts_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sim=key_door", "num_episodes=10", "seed=50", "states=physics", "images=32", f"output={tmp_path / 'r'}", "sim.num_slots=4"])
    line = capsys.readouterr().out.strip()
    assert re.fullmatch(
        rf"{tmp_path}/r: 10 of 10 episodes of KeyDoor\. Played now: 10, 100\.0% of them successful, \d+ steps, [\d.]+ s\.", line
    )
    episodes = by_seed(tmp_path / "r")
    assert sorted(episodes) == list(range(50, 60))
    for episode in episodes.values():
        assert episode.success_at_end
        assert episode.state is not None
        assert episode.state["robot"].shape == (episode.num_steps + 1, 3)
        np.testing.assert_allclose(episode.state["robot"][:, 0] - 1, episode.observation["state"][:, 0], atol=1e-6)
        assert episode.images["render"].shape == (episode.num_steps + 1, 16, 32, 3)
    info = open_recording(tmp_path / "r").info
    assert info.policy == {"kind": "expert", "target": "embodied_rl.sim.robots.key_door:KeyDoorExpert"}
    assert info.sim["name"] == "key_door"
    assert info.metadata["reconfigure"] is True
    assert info.command.startswith("python -m embodied_rl.record sim=key_door")
    assert "numpy" in info.versions
    assert list(info.spec.observation) == ["state"]


def test_several_cameras_are_several_videos(tmp_path: Path) -> None:
    cameras = ["images=40", "cameras=default,large,small", "policy=random"]
    sim = ["sim=custom", "sim.name=two", "sim.target=tests.sim.test_film:TwoSizes"]
    main([*sim, *cameras, "num_episodes=2", f"output={tmp_path / 'r'}"])
    for episode in open_recording(tmp_path / "r"):
        assert set(episode.images) == {"render", "large", "small"}
        assert {len(part) for part in episode.images.values()} == {episode.num_steps + 1}
        assert np.abs(np.asarray(episode.images["small"][:]).astype(int) - 2).max() <= 2, "mp4 for people is not exact"
    found = {path.parent.name for path in (tmp_path / "r").rglob("*.mp4")}
    assert found == {"images.render", "images.large", "images.small"}


def test_a_checkpoints_samples_with_log_probabilities_and_values(tmp_path: Path, run_dir: Path) -> None:
    main([f"checkpoint={run_dir}", "sample=true", "num_episodes=6", "held_out=true", f"output={tmp_path / 'r'}", "sim.num_slots=3"])
    recording = open_recording(tmp_path / "r")
    assert sorted(recording.seeds) == [2**30 + number for number in range(6)]
    import torch

    from embodied_rl.checkpoint import load_checkpoint
    from embodied_rl.policies.actor_critic import build_policy

    checkpoint = load_checkpoint(run_dir)
    policy = build_policy(checkpoint.config.policy, recording.spec)
    policy.load_state_dict(checkpoint.policy)
    for episode in recording:
        assert episode.sampled_action is not None
        seen = {"state": torch.from_numpy(np.array(episode.observation["state"][:-1]))}
        # Asked of the policy itself, in one batch.
        with torch.no_grad():
            expected = policy.evaluate(seen, torch.from_numpy(np.array(episode.sampled_action)))
        np.testing.assert_allclose(episode.log_prob, expected.log_prob.numpy(), atol=1e-4)
        np.testing.assert_allclose(episode.value, expected.value.numpy(), atol=1e-4)
        np.testing.assert_array_equal(episode.action, np.clip(episode.sampled_action, -1, 1))
        np.testing.assert_array_equal(episode.policy_version, np.full(episode.num_steps, checkpoint.state["iteration"]))
    folder = find_last(run_dir)
    assert folder is not None
    assert recording.info.policy["sha256"] == hashlib.sha256((folder / "policy.safetensors").read_bytes()).hexdigest()
    assert recording.info.metadata["checkpoint"] == str(folder)


def test_a_checkpoints_mode_is_what_evaluate_plays(tmp_path: Path, run_dir: Path) -> None:
    from embodied_rl.checkpoint import load_checkpoint
    from embodied_rl.evaluate import evaluate_checkpoint

    main([f"checkpoint={run_dir}", "num_episodes=5", "held_out=true", f"output={tmp_path / 'r'}"])
    episodes = by_seed(tmp_path / "r")
    result = evaluate_checkpoint(load_checkpoint(run_dir), 5)
    assert {summary.seed: summary.length for summary in result.episodes} == {seed: episode.num_steps for seed, episode in episodes.items()}
    for summary in result.episodes:
        assert summary.episode_return == pytest.approx(episodes[summary.seed].episode_return)
    assert all(episode.log_prob is None for episode in episodes.values())


HELD_BACK = """
import sys, time
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.commands.record import main
most = int(sys.argv.pop(1))

def held_back(write):
    def wait_and_write(self, *arguments):
        while len(self.seeds) >= most:
            self.flush()
            time.sleep(1.0)
        return write(self, *arguments)
    return wait_and_write

RecordingWriter.commit, RecordingWriter.gather = held_back(RecordingWriter.commit), held_back(RecordingWriter.gather)
main()
"""
"""Records, and waits for its end before it has more episodes than it is told."""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_killed_and_resumed_is_the_same_recording(tmp_path: Path, run_dir: Path) -> None:
    """SIGKILL in the middle; what is there is readable, and resuming gives what an uninterrupted recorder gave, bit by bit."""
    (tmp_path / "held_back_recorder.py").write_text(HELD_BACK, encoding="utf-8")
    arguments = [f"checkpoint={run_dir}", "sample=true", "num_episodes=60", "sim.num_slots=5", "states=snapshots:16"]
    main([*arguments, f"output={tmp_path / 'whole'}"])
    killed = tmp_path / "killed"
    for wanted in (8, 25):
        resume = ["resume=true"] if killed.exists() else []
        process = start_forked("held_back_recorder", "50", *arguments, *resume, f"output={killed}", collects=True, folder=tmp_path)
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline and num_lines(killed) < wanted:
            time.sleep(0.01)
        assert process.poll() is None, "it has ended by itself"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        there = len(by_seed(killed))
        assert wanted - 1 <= there <= 50
    main([*arguments, "resume=true", f"output={killed}"])
    assert_same_episodes(tmp_path / "whole", killed)
    first, second = by_seed(tmp_path / "whole")[7], by_seed(killed)[7]
    assert sorted(first.snapshots) == sorted(second.snapshots) == list(range(0, first.num_steps, 16))
    assert Snapshot.from_bytes(first.snapshots[16]).seed == 7


def num_lines(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("part-*/episodes.jsonl"))


def test_only_successes_of_random_play_would_take_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sim=key_door", "policy=random", "only_success=true", "num_episodes=2", "max_seeds=4", "sim.max_episode_steps=20"]
    assert fails([*argv, f"output={tmp_path / 'r'}"]) == 1
    assert "Only 0 of 4 seeds succeeded. Increase max_seeds" in capsys.readouterr().err
    outcomes = [json.loads(line) for line in (tmp_path / "r" / "attempts.jsonl").read_text().splitlines()]
    assert sorted(line["seed"] for line in outcomes) == [0, 1, 2, 3]


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["sim=key_door", "num_episodes=1", "sim.max_episode_steps=5"]
    main(argv)
    main([*argv, "seed=1"])
    assert sorted(path.name for path in (tmp_path / "recordings").iterdir()) == ["key_door-expert", "key_door-expert_2"]
    taken = f"output={tmp_path / 'recordings' / 'key_door-expert'}"
    assert "already has a recording. Continue it with resume=true" in one_line_error(main, [*argv, taken], capsys)
    foreign = [*argv, f"output={tmp_path}"]
    assert f"'{tmp_path}' holds other files (recordings). Choose another output=…." in one_line_error(main, foreign, capsys)
    other = ["sim=key_door", "policy=random", "num_episodes=1", "sim.max_episode_steps=5", taken, "resume=true"]
    assert "policy" in one_line_error(main, other, capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Give checkpoint=… (its policy plays its simulator) or sim=…"),
        (["sim=key_dor"], "Did you mean 'key_door'?"),
        (["sim=halfcheetah"], "Task 'HalfCheetah-v5' of sim=halfcheetah has no expert"),
        (["sim=key_door", "policy=checkpoint"], "policy=checkpoint needs checkpoint=…"),
        (["sim=key_door", "sample=true"], "sample=true needs policy=checkpoint, got policy=expert"),
        (["sim=key_door", "policy=random", "expert=a:b"], "expert=a:b needs policy=expert, got policy=random"),
        (["sim=key_door", "expert=embodied_rl.sim:nothing"], "has no 'nothing'"),
        (
            ["sim=key_door", "expert=os:getcwd"],
            "Expert 'os:getcwd' must make what is called with an observation and returns its action, got /",
        ),
        (["sim=cartpole", "policy=random", "only_success=true"], "Task 'CartPole-v1' reports no success: only_success=true would keep no"),
        (["sim=key_door", "num_episodes=0"], "num_episodes must be between 1"),
        (["sim=key_door", "max_seeds=5"], "max_seeds needs only_success=true"),
        (["sim=key_door", "only_success=true", "max_seeds=5"], "max_seeds must be at least num_episodes (100), got 5"),
        (["sim=key_door", "states=snapshots"], "states=snapshots needs the number of steps"),
        (["sim=key_door", "states=snapshots:²"], "states=snapshots:² needs the number of steps between snapshots"),
        (["sim=key_door", "images=²"], "images=² must be none, or the longer side of a picture"),
        (["sim=key_door", "states=all"], "states=all is not a choice. Known: none, physics, snapshots:K"),
        (["sim=key_door", "images=big"], "images=big must be none, or the longer side"),
        (["sim=key_door", "cameras=top"], "cameras=top needs images=SIZE"),
        (["sim=key_door", "images=32", "cameras=top,top"], "cameras=top,top must be different names"),
        (["sim=key_door", "images=32", "cameras=top"], "Task 'KeyDoor' has no camera 'top'"),
        (["sim=key_door", "resume=true"], "resume=true needs output=…"),
        (["sim=key_door", "checkpoint=nowhere"], "Checkpoint 'nowhere' does not exist"),
        (["sim=key_door", "sim.colour=red"], "'sim.colour' is not known"),
        (["sim=key_door", "video=gif"], "video=gif is not a choice"),
        (["sim=key_door", "noise_seed=3"], "noise_seed=3 needs policy=random or sample=true"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = [] if not argv or "resume=true" in argv else [f"output={tmp_path / 'r'}"]
    assert message in one_line_error(main, [*argv, *output], capsys)
    assert not (tmp_path / "r").exists()


def test_a_recorder_of_another_task_refuses_the_checkpoint(tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line_error(main, [f"checkpoint={run_dir}", "sim=pendulum", f"output={tmp_path / 'r'}"], capsys)
    assert "was made for another simulator" in line


def test_what_is_shown() -> None:
    assert Showing.parse("none", "none") == Showing()
    assert Showing.parse("snapshots:12", "128") == Showing(snapshot_every=12, image_size=128)
    assert Showing.parse("physics", "none") == Showing(physics=True)
    assert Showing.parse("none", "64", "default, wrist") == Showing(image_size=64, cameras=("default", "wrist"))


def test_usage_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {argument.name}=" in text for argument in COMMAND.arguments)


def test_a_full_disk_is_one_line_where_attempts_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "attempts.jsonl").symlink_to("/dev/full")
    argv = ["sim=key_door", "policy=random", "only_success=true", "num_episodes=1", "max_seeds=2", "sim.max_episode_steps=5", "resume=true"]
    line = one_line_error(main, [*argv, f"output={tmp_path / 'r'}"], capsys)
    assert re.search(r"Cannot write '.*attempts\.jsonl': No space left on device\.", line)
