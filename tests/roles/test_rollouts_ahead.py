"""Fixed rollouts that are collected while training: which weights play them, and what becomes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.generation.torch_backend import ModuleActor
from embodied_rl.policies.build import build_policy
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.trainer import Trainer
from embodied_rl.types import Rollout
from tests.golden.runs import RUNS
from tests.roles.runs import ROLLOUTS, assert_same_run, configured, curve, trained

pytestmark = pytest.mark.usefixtures("forked")

STEPS, SLOTS = 4, 2


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvManager, Any, Any]]:
    """(manager, policy, how to make a generator of it)"""
    config = configured(tmp_path_factory.mktemp("ahead"), *ROLLOUTS)
    factory = SimFactory("gymnasium:make", kwargs={"id": "Pendulum-v1"})
    with EnvManager(factory, SLOTS, num_workers=1, num_groups=2, max_episode_steps=7, seeds=EpisodeSeeds.training(1)) as manager:
        torch.manual_seed(0)
        policy: Any = build_policy(config.policy, manager.spec)
        policy.eval()

        def make() -> Generator:
            generator = make_generator(config.generation, policy)
            generator.publish(0)
            return generator

        yield manager, policy, make


def collector_of(playing: tuple[EnvManager, Any, Any], staleness: int) -> RolloutCollector:
    manager, policy, make = playing
    collector = RolloutCollector(
        manager, make(), rollout_steps=STEPS, num_groups=2, seed=3, layout=policy.action_layout, max_staleness=staleness
    )
    collector.restart(seed_round=0)
    return collector


def publish(collector: RolloutCollector, version: int) -> None:
    """As a worker and a method do: when nothing is left to play with older weights."""
    while collector.keeps_weights:
        assert collector.pump()
    assert collector.max_staleness == 0 or not collector.pump()
    collector.generator.publish(version)


@settings(max_examples=30, deadline=None)
@given(staleness=st.integers(0, 3), pumps=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=7))
def test_a_rollout_is_played_with_one_version(playing: Any, staleness: int, pumps: list[tuple[int, int]]) -> None:
    """However much is collected before weights come and after, rollout n is of version n - S, and of the first one before that."""
    collector = collector_of(playing, staleness)
    for version, (before, after) in enumerate(pumps):
        for _ in range(after):
            collector.pump(0.0)
        rollout = collector.next_rollout(version)
        assert rollout.policy_version.shape == (STEPS, SLOTS)
        assert set(rollout.policy_version.ravel().tolist()) == {max(version - staleness, 0)}
        assert rollout.age(version) <= staleness
        for _ in range(before):
            collector.pump()
        publish(collector, version + 1)


def test_what_is_collected_ahead_is_what_would_have_been_collected(playing: Any) -> None:
    """The weights stay the same: then it makes no difference when the steps are played."""

    def collected(staleness: int, pumps: int) -> list[Rollout]:
        collector = collector_of(playing, staleness)
        rollouts = []
        for version in range(5):
            rollouts.append(collector.next_rollout(version))
            for _ in range(pumps):
                collector.pump()
            publish(collector, version + 1)
        return rollouts

    for number, (one, other) in enumerate(zip(collected(0, 9), collected(2, 5), strict=True)):
        for name in ("action", "log_prob", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for key, seen in one.observation.items():
            np.testing.assert_array_equal(seen, other.observation[key])
            np.testing.assert_array_equal(one.last_observation[key], other.last_observation[key])
            np.testing.assert_array_equal(one.final_observation[key], other.final_observation[key])
        assert [episode.episode_return for episode in one.episodes] == [episode.episode_return for episode in other.episodes]
        assert (one.age(number), other.age(number)) == (0, min(number, 2))


def test_a_restart_gives_up_what_was_collected_ahead(playing: Any) -> None:
    collector = collector_of(playing, 1)
    collector.next_rollout(0)
    turns = 2 * (STEPS + 1)  # of two groups: the first one sends only, the last one receives only
    assert [collector.pump() for _ in range(turns + 1)] == [True] * turns + [False]
    collector.generator.publish(1)
    collector.restart(seed_round=7)
    collector.generator.publish(7)
    assert set(collector.next_rollout(7).policy_version.ravel().tolist()) == {7}


@pytest.mark.parametrize("loss", [pytest.param("ppo_clip", marks=pytest.mark.slow), "decoupled_ppo"])
def test_a_run_collects_the_next_rollout_while_it_learns_from_the_last(tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process or in another, whichever is faster, the run is the same bit for bit. Evaluations in between begin new episodes,
    and so do checkpoints, from which it goes on as it went."""
    options = ["algorithm.loss=decoupled_ppo", "algorithm.loss_options.weight_high=5"] if loss == "decoupled_ppo" else []
    task = [*ROLLOUTS, "algorithm.max_staleness=1", "total_steps=768", "evaluation.every_steps=384", *options]
    task += ["checkpoint.every_steps=256", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "here", *task)
    assert_same_run(whole, trained(tmp_path / "apart", *task, "hybrid=disaggregated"))
    middle = tmp_path / "resumed" / "checkpoints" / "step_000000256"
    shutil.copytree(whole / "checkpoints" / middle.name, middle)
    shutil.copy(whole / "metrics.jsonl", tmp_path / "resumed")
    # Simulators that seem ready when they are not, and the other way round.
    chance = np.random.default_rng(0)
    seen: list[bool] = []
    monkeypatch.setattr(EnvManager, "is_ready", lambda *_: seen.append(bool(chance.random() < 0.5)) or seen[-1])
    assert_same_run(whole, trained(tmp_path / "resumed", *task, "resume=auto"))
    assert sum(seen) > 10, "nothing was played while training"
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "train/approx_kl" in row]
    assert [row["step"] for row in learned] == [128, 256, 384, 512, 640, 768]
    assert [(row["rollout/age_mean"], row["rollout/age_max"]) for row in learned] == [(age, age) for age in (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)]
    weights = [row.get("train/weight_mean") for row in learned]
    if loss == "decoupled_ppo":
        assert weights[0] == pytest.approx(1.0, abs=1e-5), "only the present policy has acted"
        assert any(weight != pytest.approx(1.0, abs=1e-9) for weight in weights)
    else:
        assert weights == [None] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        pytest.param([*RUNS["ppo_autograd"], "hybrid.precision=bfloat16", "policy.normalize_observation=true"], id="bfloat16"),
        pytest.param([*RUNS["ppo_cnn"], "total_steps=192"], id="pictures"),
        pytest.param(RUNS["tiny_vla_chunks"], id="chunks"),
        pytest.param([*RUNS["flow"], "record.share=1"], id="recorded"),
        pytest.param(RUNS["fsdp2_mlp"], id="ranks"),
    ],
)
def test_every_policy_plays_ahead_with_a_copy(tmp_path: Path, task: Sequence[str]) -> None:
    """Of which an update changes nothing, in whatever precision and on however many ranks it computes."""
    ahead = [*task, "algorithm.max_staleness=1"]
    elsewhere = ["hybrid.placement=disaggregated"]
    assert_same_run(trained(tmp_path / "here", *ahead), trained(tmp_path / "apart", *ahead, *elsewhere))
    assert [row["rollout/age_mean"] for row in curve(tmp_path / "here") if "rollout/age_mean" in row][1:2] == [1.0]


def test_a_policy_that_acts_with_what_is_trained_plays_nothing_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleActor, "SHARED_FROM", 10)
    task = configured(tmp_path, *ROLLOUTS, "algorithm.max_staleness=1", "policy.distribution=squashed")
    with pytest.raises(UserError, match=r"acts with the trained parameters.*hybrid=disaggregated"):
        Trainer(task, tmp_path, command="test")
