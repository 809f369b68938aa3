"""Fixed rollouts that are collected while training: how old they may be, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.policies.build import build_policy
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.trainer import Trainer
from embodied_rl.types import Rollout
from tests.roles.runs import ROLLOUTS, Naps, configured

APART = "hybrid=disaggregated"
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


@settings(max_examples=40, deadline=None)
@given(staleness=st.integers(0, 3), pumps=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=7))
def test_no_action_is_older_than_allowed(playing: Any, staleness: int, pumps: list[tuple[int, int]]) -> None:
    """However much is collected before weights come and after: rollout n has versions n - S to n, in order, and nothing is skipped."""
    collector = collector_of(playing, staleness)
    for version, (before, after) in enumerate(pumps):
        for _ in range(after):
            collector.pump()
        rollout = collector.next_rollout(version)
        oldest = max(version - staleness, 0)
        assert rollout.policy_version.shape == (STEPS, SLOTS)
        assert rollout.policy_version.min() >= oldest
        assert rollout.policy_version.max() <= version
        assert rollout.age(version) <= staleness
        assert (np.diff(rollout.policy_version, axis=0) >= 0).all()
        for _ in range(before):
            collector.pump()
        collector.generator.publish(version + 1)
    # With the weights of version v, all rollouts up to v + S are collected and no further one: whatever came later would say 99.
    while collector.pump():
        pass
    newest = len(pumps)
    collector.generator.publish(99)
    for number in range(newest, newest + staleness + 1):
        collected = collector.next_rollout(number).policy_version
        assert max(number - staleness, 0) <= collected.min() <= collected.max() <= newest
    assert set(collector.next_rollout(newest + staleness + 1).policy_version.ravel().tolist()) == {99}


def test_what_is_collected_ahead_is_what_would_have_been_collected(playing: Any) -> None:
    """The weights stay the same: then it makes no difference when the steps are played."""

    def collected(staleness: int, pumps: int) -> list[Rollout]:
        collector = collector_of(playing, staleness)
        rollouts = []
        for version in range(5):
            rollouts.append(collector.next_rollout(version))
            for _ in range(pumps):
                collector.pump()
            collector.generator.publish(version + 1)
        return rollouts

    versions = []
    for one, other in zip(collected(0, 9), collected(2, 5), strict=True):
        for name in ("action", "log_prob", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for key, seen in one.observation.items():
            np.testing.assert_array_equal(seen, other.observation[key])
            np.testing.assert_array_equal(one.last_observation[key], other.last_observation[key])
            np.testing.assert_array_equal(one.final_observation[key], other.final_observation[key])
        assert [episode.episode_return for episode in one.episodes] == [episode.episode_return for episode in other.episodes]
        versions.append(other.policy_version)
    # Five decisions are played between two rollouts of four: the third is begun at version 0 and ends two versions later.
    assert [version.min() for version in versions] == [0, 0, 0, 1, 2]
    assert any(version.min() != version.max() for version in versions), "weights change within a rollout"


def test_a_restart_gives_up_what_was_collected_ahead(playing: Any) -> None:
    collector = collector_of(playing, 1)
    collector.next_rollout(0)
    assert [collector.pump() for _ in range(STEPS + 1)] == [True] * STEPS + [False]
    collector.generator.publish(1)
    collector.restart(seed_round=7)
    collector.generator.publish(7)
    assert set(collector.next_rollout(7).policy_version.ravel().tolist()) == {7}


@pytest.mark.parametrize("loss", [pytest.param("ppo_clip", marks=pytest.mark.slow), "decoupled_ppo"])
def test_a_run_collects_the_next_rollout_while_it_learns_from_the_last(tmp_path: Path, loss: str) -> None:
    """Evaluations in between begin new episodes; steps are counted as without."""
    options = ["algorithm.loss=decoupled_ppo", "algorithm.loss_options.weight_high=5"] if loss == "decoupled_ppo" else []
    task = [*ROLLOUTS, APART, "algorithm.max_staleness=1", "total_steps=768", "evaluation.every_steps=384", *options]
    config = configured(tmp_path, *task)
    ages: list[set[int]] = []
    naps = Naps(0.5)
    with Trainer(config, tmp_path, command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            ages.append(set((trainer.iteration - experience.data.policy_version).ravel().tolist()))
            naps.take(any(1 in found for found in ages))
            return prepare(experience)

        method.prepare = note
        trainer.run()
    assert ages[0] == ages[3] == {0}, "after an evaluation all episodes begin anew"
    assert all(found <= {0, 1} for found in ages)
    assert any(1 in found for found in ages), "nothing was collected while training"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/approx_kl" in row]
    assert [row["step"] for row in trained] == [128, 256, 384, 512, 640, 768]
    assert [row["rollout/age_max"] for row in trained] == [float(max(found)) for found in ages]
    weights = [row.get("train/weight_mean") for row in trained]
    if loss == "decoupled_ppo":
        assert weights[0] == pytest.approx(1.0, abs=1e-5), "nobody but the present policy has acted"
        assert any(weight != pytest.approx(1.0, abs=1e-9) for weight in weights)
    else:
        assert weights == [None] * 6
