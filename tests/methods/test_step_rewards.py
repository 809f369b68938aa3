"""What `algorithm.reward`, `algorithm.normalize_reward` and `algorithm.critic_warmup` do in whole runs, on rollouts and on episodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.algorithms.rewards import ReturnNormalizer
from embodied_rl.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.train import train
from tests.rollout.test_training_recording import curve, weights
from tests.short_run import QUICK
from tests.vla.test_runs import PPO as CHUNKS
from tests.vla.test_runs import TINY, run

ROLLOUTS = ("sim=cartpole", "algorithm.num_epochs=1", "algorithm.rollout_steps=32", "algorithm.minibatch_size=64", "total_steps=256")
EPISODES = (
    "sim=cartpole",
    "algorithm=ppo_episodes",
    "algorithm.num_epochs=1",
    "algorithm.groups.groups_per_step=8",
    "algorithm.minibatch_size=64",
    "total_steps=300",
)
RECORDED = (
    *(
        "sim=cartpole",
        "sim.max_episode_steps=60",
        "algorithm=iql",
        "algorithm.off_policy.hidden_sizes=[16]",
        "algorithm.off_policy.updates_per_iteration=10",
    ),
    *("algorithm.recorded.expert=tests.methods.experts:CartPoleController", "algorithm.recorded.expert_episodes=2"),
    "total_steps=30",
)
STORED = (
    *(*RECORDED, "algorithm=awac", "algorithm.off_policy={fresh: true, recorded_share: 0.5, warmup_steps: 64, updates_per_step: 0.1}"),
    *("algorithm.rollout_steps=32", "total_steps=384"),
)
"""Recorded steps and those that the run plays."""
METHODS = pytest.mark.parametrize("method", [ROLLOUTS, EPISODES], ids=["rollouts", "episodes"])
ALL = pytest.mark.parametrize("method", [ROLLOUTS, EPISODES, STORED], ids=["rollouts", "episodes", "stored"])


def shortly(run_dir: Path, *words: str) -> Path:
    """`train_shortly`, of methods without epochs too."""
    quick = [word for word in QUICK if word != "algorithm.num_epochs=1"]
    return train(load_train_config([*quick, *words, f"run_dir={run_dir}"]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """The run of a method's own words."""
    return cache(lambda method: shortly(tmp_path_factory.mktemp("plain") / "run", *method))


@ALL
def test_half_of_a_reward_of_one_is_half_of_it_whatever_took_the_rest(
    method: tuple[str, ...], tmp_path: Path, plain: Callable[[tuple[str, ...]], Path]
) -> None:
    """CartPole gives 1 a step: clipped to 0.5, times 0.5 or less a price of 0.5 are the same run, bit for bit."""
    words = ("clip: 0.5", "scale: 0.5", "length_penalty: 0.5")
    runs = [shortly(tmp_path / word[:4], *method, f"algorithm.reward={{{word}}}") for word in words]
    assert curve(runs[0]) == curve(runs[1]) == curve(runs[2]) != curve(plain(method))
    for name, tensor in weights(runs[0]).items():
        np.testing.assert_array_equal(tensor, weights(runs[1])[name])
        np.testing.assert_array_equal(tensor, weights(runs[2])[name])


def test_steps_of_chunks_are_clipped_one_by_one(tmp_path: Path) -> None:
    """A point moves by 0.2 at most: of steps clipped to 0.001, a chunk of three is worth 0.003 at most, and its critic learns that."""
    still = ("algorithm.gamma=0.5", "algorithm.advantage=gae_chunk", "algorithm.num_epochs=4")
    small, plain = (run(tmp_path / str(clip), *TINY, *CHUNKS, *still, f"algorithm.reward.clip={clip}") for clip in (0.001, 10))
    assert read_metrics(small)[-1]["train/value_loss"] < read_metrics(plain)[-1]["train/value_loss"]


def test_steps_of_chunks_are_divided_by_the_spread_of_what_chunks_return() -> None:
    reward = np.array([[1.0], [2.0], [4.0]], np.float32)
    steps = np.array([[[1.0, 0.0]], [[0.5, 1.5]], [[4.0, 0.0]]], np.float32)
    done = np.array([[False], [True], [False]])
    # Returns 1, 2 + 0.5 · 1 and, of a new episode, 4.
    divided = ReturnNormalizer(0.5)(reward, done, steps=steps)
    np.testing.assert_allclose(divided, steps / np.sqrt(np.var([1.0, 2.5, 4.0]) + 1e-8), rtol=1e-6)


def test_steps_of_chunks_go_with_divided_rewards(tmp_path: Path) -> None:
    """A reward ten times as large is the same run: it is divided by ten times as much."""
    actions = ("algorithm.advantage=gae_action", "algorithm.ratio=action", "policy.value=action", "algorithm.normalize_reward=true")
    one, ten = (run(tmp_path / scale, *TINY, *CHUNKS, *actions, f"algorithm.reward.scale={scale}") for scale in ("1", "10"))
    for name in ("train/value_loss", "train/entropy"):
        np.testing.assert_allclose([row[name] for row in read_metrics(one)], [row[name] for row in read_metrics(ten)], rtol=1e-3)


def test_recorded_rewards_are_divided_by_the_spread_of_recorded_returns(tmp_path: Path) -> None:
    words = (*RECORDED, "algorithm.gamma=0.9")
    divided = shortly(tmp_path / "divided", *words, "algorithm.normalize_reward=true")
    returns: list[float] = []
    with open_recording(divided / "demonstrations") as recording:
        for episode in recording:
            running = 0.0
            for reward in episode.reward.tolist():
                running = reward + 0.9 * running
                returns.append(running)
    scaled = shortly(tmp_path / "scaled", *words, f"algorithm.reward.scale={1 / np.std(returns)}")
    for name, tensor in weights(scaled).items():
        np.testing.assert_allclose(tensor, weights(divided)[name], rtol=1e-4, atol=1e-6)


@ALL
def test_rewards_divided_by_the_spread_of_returns_go_on_after_a_resume(
    method: tuple[str, ...], tmp_path: Path, plain: Callable[[tuple[str, ...]], Path]
) -> None:
    words = (*method, "algorithm.normalize_reward=true", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    whole = shortly(tmp_path / "whole", *words)
    assert curve(whole) != curve(plain(method))
    first = sorted((whole / "checkpoints").glob("step_*"))[0]
    shutil.copytree(first, tmp_path / "resumed" / "checkpoints" / first.name)
    resumed = shortly(tmp_path / "resumed", *words, "resume=auto")
    for name, tensor in weights(whole).items():
        np.testing.assert_array_equal(tensor, weights(resumed)[name])


@METHODS
def test_a_critic_is_trained_first(method: tuple[str, ...], tmp_path: Path) -> None:
    """While it is, the actor stays what it was at first."""
    words = (*method, "algorithm.entropy_coef=0", "policy.normalize_observation=false")
    first = weights(shortly(tmp_path / "first", *words, "algorithm.learning_rate=1e-30"))
    warm = weights(shortly(tmp_path / "warm", *words, "algorithm.critic_warmup=100"))
    trained = weights(shortly(tmp_path / "trained", *words))
    for name, tensor in first.items():
        of_critic = "value" in name or "critic" in name
        assert np.allclose(tensor, warm[name], rtol=0, atol=1e-20) != of_critic, name
        assert not np.array_equal(tensor, trained[name]), name


def test_critics_of_stored_steps_are_trained_first(tmp_path: Path) -> None:
    """In the iterations that `algorithm.critic_warmup` counts the policy takes no step; after them it does."""
    first = weights(shortly(tmp_path / "first", *STORED, "algorithm.learning_rate=1e-30"))
    warm = shortly(tmp_path / "warm", *STORED, "algorithm.critic_warmup=2")
    learned = [row for row in read_metrics(warm) if "train/critic_loss" in row]
    assert ["train/imitation_loss" in row for row in learned] == [False, False, True]
    only = weights(shortly(tmp_path / "only", *STORED, "algorithm.critic_warmup=100"))
    for name in (name for name in first if name.startswith("actor.")):
        np.testing.assert_allclose(only[name], first[name], rtol=0, atol=1e-20)
        assert not np.allclose(weights(warm)[name], first[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "gigpo"])
def test_a_batch_of_episodes_that_were_all_cut_off_changes_no_weight(algorithm: str, tmp_path: Path) -> None:
    """CartPole never falls within 4 steps: one such iteration or three are the same weights, and the run goes on."""
    words = ("sim=cartpole", "sim.max_episode_steps=4", f"algorithm={algorithm}", "algorithm.num_epochs=1")
    groups = ("algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=2", "algorithm.minibatch_size=8")
    learns = ("algorithm.reward.truncated=mask", "algorithm.entropy_coef=0.1")
    with pytest.warns(UserWarning, match="because a limit cut off every episode.*Raise sim.max_episode_steps"):
        runs = [shortly(tmp_path / str(steps), *words, *groups, *learns, f"total_steps={steps}") for steps in (16, 48)]
    assert [row["train/minibatches"] for row in read_metrics(runs[1]) if "train/minibatches" in row] == [0.0] * 3
    first, last = map(weights, runs)
    assert first.keys() == last.keys()
    learned = [name for name in first if not name.startswith("normalizer.")]
    assert all(np.array_equal(first[name], last[name]) for name in learned)
