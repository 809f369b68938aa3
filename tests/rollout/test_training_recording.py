"""Recording from within training: what is written is what was played, and the run does not notice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied_rl.checkpoint import find_last
from embodied_rl.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording
from embodied_rl.errors import UserError
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.sim.robots.key_door import MAX_STEP_M, KeyDoor
from embodied_rl.train import train
from embodied_rl.types import StepBuffers
from tests.short_run import train_shortly

KEY_DOOR = ("sim=key_door", "sim.num_slots=4", "sim.max_episode_steps=20", "total_steps=1024")
GROUPS = (
    *KEY_DOOR,
    "algorithm=grpo",
    "algorithm.groups.group_size=2",
    "algorithm.groups.groups_per_step=4",
    "algorithm.minibatch_size=160",
)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run but for what the clock says."""
    clock = ("speed/", "time/", "time_unix_s")
    return [{key: value for key, value in line.items() if not key.startswith(clock)} for line in read_metrics(run_dir)]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    folder = find_last(run_dir)
    assert folder is not None
    return load_file(folder / "policy.safetensors")


def play_again(recording: Recording) -> list[dict[str, Any]]:
    """Every recorded episode in a simulator of its own: its last observation, and the sum of rewards."""
    found = []
    for episode in recording:
        sim = KeyDoor(1)
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [episode.seed], out)
        seen = [out.observation["state"][0].copy()]
        for action in episode.action:
            sim.step([0], action[None], out)
            seen.append(out.observation["state"][0].copy())
        found.append({"seen": np.stack(seen), "recorded": episode.observation["state"]})
    return found


@pytest.mark.parametrize("overrides", [KEY_DOOR, GROUPS], ids=["rollouts", "groups"])
def test_training_does_not_notice(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    plain = train_shortly(tmp_path / "plain", *overrides)
    recorded = train_shortly(tmp_path / "recorded", *overrides, "record.share=0.5")
    assert len(curve(plain)) >= 2
    assert curve(plain) == curve(recorded)
    one, other = weights(plain), weights(recorded)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    assert not (plain / "episodes").exists()


@pytest.mark.parametrize("overrides", [KEY_DOOR, GROUPS], ids=["rollouts", "groups"])
def test_what_is_written_is_what_was_played(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run_dir = train_shortly(tmp_path / "run", *overrides, "record.share=1")
    recording = open_recording(run_dir / "episodes")
    # 1024 steps of at most 20 an episode; those that were running at the end are no episodes. Nobody reaches the goal: 20 each.
    assert len(recording) >= 1024 // 20 - 4
    assert set(recording.lengths) == {20}
    assert recording.complete.all()
    for again in play_again(recording):
        np.testing.assert_array_equal(again["seen"], again["recorded"])
    for episode in recording:
        assert episode.sampled_action is not None
        # What the simulator was given is the drawn action within [-1, 1].
        np.testing.assert_array_equal(episode.action, np.clip(episode.sampled_action, -1, 1))
        assert np.abs(np.diff(episode.observation["state"][:, 0])).max() <= MAX_STEP_M + 1e-6
    assert recording.info.policy["kind"] == "training"
    assert recording.info.sim["name"] == "key_door"


def test_log_probabilities_are_those_of_the_weights_that_acted(tmp_path: Path) -> None:
    # One version alone: what it says about its actions can be asked of the policy that a new run of the same seed starts with.
    run_dir = train_shortly(tmp_path / "run", *KEY_DOOR, "total_steps=256", "record.share=1", "policy.normalize_observation=false")
    episode = open_recording(run_dir / "episodes").episode(0)
    assert episode.sampled_action is not None
    assert episode.log_prob is not None
    assert episode.policy_version is not None
    np.testing.assert_array_equal(episode.policy_version, np.zeros(20))
    import torch

    from embodied_rl.policies.actor_critic import build_policy

    config = load_train_config([*KEY_DOOR, "policy.hidden_sizes=[16]", "policy.normalize_observation=false"])
    torch.manual_seed(config.seed)
    policy = build_policy(config.policy, open_recording(run_dir / "episodes").spec)
    seen = {"state": torch.from_numpy(np.array(episode.observation["state"][:-1]))}
    expected = policy.evaluate(seen, torch.from_numpy(np.array(episode.sampled_action))).log_prob
    np.testing.assert_allclose(episode.log_prob, expected.detach().numpy(), atol=1e-5)


def test_a_share_is_chosen_by_seed_and_has_its_size(tmp_path: Path) -> None:
    everything = open_recording(train_shortly(tmp_path / "all", *KEY_DOOR, "total_steps=8192", "record.share=1") / "episodes")
    some = open_recording(train_shortly(tmp_path / "some", *KEY_DOOR, "total_steps=8192", "record.share=0.25") / "episodes")
    assert set(some.seeds) < set(everything.seeds)
    # About 400 episodes; of 0.25 · 400 = 100 the standard deviation is sqrt(400 · 0.25 · 0.75) = 8.7: five of them either way.
    assert abs(len(some) - 0.25 * len(everything)) < 5 * np.sqrt(len(everything) * 0.25 * 0.75)


def test_a_run_that_goes_on_from_an_earlier_checkpoint_records_nothing_twice(tmp_path: Path) -> None:
    options = (*KEY_DOOR, "total_steps=2048", "record.share=1", "checkpoint.every_steps=512", "checkpoint.keep_last=9")
    whole = train_shortly(tmp_path / "whole", *options)
    # As a crash shortly before the end leaves it: the last checkpoint is old, the episodes since are written.
    resumed = tmp_path / "resumed"
    shutil.copytree(whole / "checkpoints" / "step_000001024", resumed / "checkpoints" / "step_000001024")
    shutil.copytree(whole / "episodes", resumed / "episodes")
    train_shortly(resumed, *options, "resume=auto")
    one, other = open_recording(whole / "episodes"), open_recording(resumed / "episodes")
    assert len(set(one.seeds)) == len(one)
    assert sorted(one.seeds) == sorted(other.seeds)
    # And where they were lost, the resumed run writes the same ones again.
    bare = tmp_path / "bare"
    shutil.copytree(whole / "checkpoints" / "step_000001024", bare / "checkpoints" / "step_000001024")
    train_shortly(bare, *options, "resume=auto")
    again = {episode.seed: episode for episode in open_recording(bare / "episodes")}
    assert len(again) > 20
    for episode in one:
        if episode.seed in again:
            np.testing.assert_array_equal(episode.sampled_action, again[episode.seed].sampled_action)
    assert set(again) < set(one.seeds)


def test_limit(tmp_path: Path) -> None:
    run_dir = train_shortly(tmp_path / "run", *KEY_DOOR, "record.share=1", "record.max_episodes=7")
    # Episodes that were being recorded when the limit was reached are finished: one in each of 4 slots at most.
    assert 7 <= len(open_recording(run_dir / "episodes")) < 7 + 4


def test_a_wrong_share_is_one_line() -> None:
    with pytest.raises(UserError, match=r"record.share must be between 0 and 1, got 1.5"):
        load_train_config(["sim=key_door", "record.share=1.5"])


def test_runs_that_play_nothing_say_so(tmp_path: Path) -> None:
    recorded = train_shortly(tmp_path / "run", *KEY_DOOR, "record.share=1")
    config = load_train_config(
        [
            "sim=key_door",
            "algorithm=bc",
            f"recording=[{recorded / 'episodes'}]",
            "record.share=0.5",
            "video.enabled=no",
            "logger=quiet",
            f"run_dir={tmp_path / 'bc'}",
        ]
    )
    with pytest.raises(UserError, match=r"record.share=0.5: algorithm=.* plays no episodes"):
        train(config, command="train")
