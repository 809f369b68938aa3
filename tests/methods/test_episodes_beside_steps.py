"""Domains of whole episodes beside domains of single steps in one run: groups of a queue, rollouts, steps that are kept, recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.generation.torch_backend import ModuleActor
from embodied_rl.trainer import Trainer
from tests.methods.test_mixed_domains import domain, mixed
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.roles.runs import assert_same_run, configured, curve, run_with_a_kill, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
LAKE = [*COMMON, DOMAINS[0], "algorithm.groups.groups_per_step=2"]
TASK = [
    *(*LAKE, *mixed("ppo", "sac", "bc", "dagger"), "domains.by_sac.algorithm.off_policy.warmup_steps=8"),
    *("total_steps=200", "checkpoint.every_steps=1", "checkpoint.keep_last=100", "hybrid.device=cpu", "stop_at_success=null"),
]
ROLES = ("language", "by_ppo", "by_sac", "by_bc", "by_dagger")


def resumed(whole: Path, folder: Path, *words: str) -> Path:
    """A run that goes on from a checkpoint in the middle of another, in a folder of its own."""
    _, *later = sorted((whole / "checkpoints").glob("step_*"))
    half = later[len(later) // 2 - 1]
    assert load_checkpoint(half).step < load_checkpoint(whole).step
    shutil.copytree(half, folder / "checkpoints" / half.name)
    shutil.copytree(whole / "demonstrations", folder / "demonstrations")
    shutil.copy(whole / "metrics.jsonl", folder)
    return trained(folder, *words, f"resume={folder / 'checkpoints' / half.name}")


def check_same_end(one: Path, other: Path) -> None:
    """Curves, weights, and what resuming needs."""
    assert_same_run(one, other)
    first, second = load_checkpoint(one), load_checkpoint(other)
    assert first.learner.keys() == second.learner.keys()
    assert all(torch.equal(second.learner[name], first.learner[name]) for name in first.learner if not name.startswith("random."))
    assert first.state["algorithm"] == second.state["algorithm"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("beside") / "whole", *TASK)


def test_a_game_by_grpo_beside_robots_by_four_methods_is_resumed_to_the_bit(whole: Path, tmp_path: Path) -> None:
    first = load_checkpoint(sorted((whole / "checkpoints").glob("step_*"))[0])
    ended = load_checkpoint(whole)
    for role in ROLES:
        names = [name for name in ended.policy if name.startswith(f"roles.{role}.")]
        assert any(not torch.equal(first.policy[name], ended.policy[name]) for name in names), f"{role} has learned"
    check_same_end(whole, resumed(whole, tmp_path / "part", *TASK))


def test_what_an_iteration_holds(whole: Path) -> None:
    """A batch of the queue, and a rollout of each domain by the steps of its own method; a recording takes no steps."""
    rows, step = [row for row in curve(whole) if "groups/consumed" in row], 0
    assert len(rows) > 2
    for number, row in enumerate(rows):
        assert row["domains/lake/groups"] == 2.0
        played = {name: row[f"domains/{name}/steps"] for name in ("by_ppo", "by_sac", "by_dagger") if f"domains/{name}/steps" in row}
        assert played == {"by_ppo": 12.0, "by_sac": 8.0, **({"by_dagger": 8.0} if number else {})}, "DAgger clones its expert first"
        step += int(sum(played.values()) + row["domains/lake/episodes"] * row["domains/lake/length"] + 0.5)
        assert row["step"] == step
        assert {f"train/{role}/learning_rate" for role in ROLES} <= row.keys()
    assert rows[-1]["groups/consumed"] == 2.0 * len(rows)
    assert rows[-1]["domains/by_sac/data/fresh_steps"] == 8.0 * len(rows)


def test_each_domain_is_evaluated(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    assert results["tasks"].keys() == {"lake", *ROLES[1:]}
    for name in ("lake", "by_sac"):
        played = evaluate_checkpoint(domain_part(load_checkpoint(whole), name), 2).episodes
        told = [(episode["return"], episode["length"]) for episode in results["episodes"] if episode["task"] == name]
        assert [(episode.episode_return, episode.length) for episode in played] == told, "the run's own evaluation, again"


def test_elsewhere_it_is_the_run_in_one_process_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    assert_same_run(whole, trained(tmp_path / "apart", *TASK, APART))


def test_a_run_goes_on_within_its_rollouts_after_evaluations_too(tmp_path: Path) -> None:
    """Groups begin whole in each batch; rollouts go on within their episodes, which an evaluation interrupts."""
    words = [*TASK, "checkpoint.within_episodes=true", "evaluation.every_steps=100", "evaluation.interim_episodes=1"]
    run = trained(tmp_path / "run", *words)
    assert any("eval/return" in row for row in curve(run))
    check_same_end(run, resumed(run, tmp_path / "part", *words))


def learned(folder: Path, *words: str, weights: dict[str, torch.Tensor] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The robot that learns by PPO before (`weights`: as given) and after three iterations."""
    folder.mkdir()
    with Trainer(configured(folder, *words), folder, command="test") as trainer:
        own = {name: value for name, value in trainer.policy.state_dict().items() if name.startswith("roles.by_ppo.")}
        if weights is not None:
            trainer.policy.load_state_dict(weights, strict=False)
            trainer.method.learners["by_ppo"].learner.executor.take_weights()  # type: ignore[attr-defined]
        before = {name: value.clone() for name, value in own.items()}
        trainer.engine.publish(0)
        trainer.method.restart(0)
        for iteration in range(3):
            experience = trainer.method.collect(iteration)
            trainer.method.update(trainer.method.prepare(experience), iteration=iteration, steps=0)
            trainer.policy.update_statistics(experience.observation)
            trainer.engine.publish(iteration + 1)
            trainer.method.published(iteration + 1)
        return before, {name: value for name, value in trainer.policy.state_dict().items() if name.startswith("roles.by_ppo.")}


def test_a_robot_learns_the_same_beside_whole_episodes_and_without_them(tmp_path: Path) -> None:
    robot = domain("by_ppo", "ppo")
    plain = [word for word in COMMON if not word.startswith(("policy", "agent.", "generation", "algorithm"))]
    before, alone = learned(tmp_path / "alone", *plain, "algorithm=ppo", *robot)
    _, beside = learned(tmp_path / "beside", *LAKE, *robot, weights=before)
    assert any(not torch.equal(before[name], alone[name]) for name in alone), "it has learned"
    assert all(torch.equal(beside[name], alone[name]) for name in alone)


@pytest.mark.parametrize("where", [pytest.param("hybrid=collocated", marks=pytest.mark.slow), APART])
def test_both_are_played_ahead_and_nothing_is_older_than_allowed(tmp_path: Path, where: str) -> None:
    rows = curve(trained(tmp_path / "run", *TASK, "algorithm.groups.max_staleness=1", "checkpoint.every_steps=null", where))
    rows = [row for row in rows if "groups/consumed" in row]
    assert [row["rollout/age_max"] for row in rows] == [0.0, *[1.0] * (len(rows) - 1)], "each rollout by the weights before"
    assert all(row["groups/age_max"] <= 1.0 for row in rows)
    assert rows[-1]["groups/consumed"] == 2.0 * len(rows)


def test_a_policy_too_large_for_a_copy_names_the_key_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleActor, "SHARED_FROM", 10)
    task = resolve(configured(tmp_path, *LAKE, *domain("by_ppo", "ppo"), "algorithm.groups.max_staleness=1"))
    with pytest.raises(UserError, match=r"^algorithm\.groups\.max_staleness=1: .*, or algorithm\.groups\.max_staleness=0\.$"):
        Trainer(task, tmp_path, command="test")


def test_a_file_of_single_steps_is_whole_whatever_the_run_learns_from(tmp_path: Path) -> None:
    """PPO's rollout is its own domain's: about 1,024 decisions of 32 slots. Where no domain is left with groups, the run has none."""
    pole = ["+sim@domains.pole.sim=cartpole", "+policy@domains.pole.policy=mlp", "+algorithm@domains.pole.algorithm=ppo"]
    config = configured(tmp_path, *LAKE, "algorithm.groups.max_staleness=1", *pole, "domains.pole.sim.num_slots=32")
    own = config.for_domain("pole").algorithm
    assert (own.groups, own.max_staleness, own.rollout_steps) == (None, 1, 32)
    assert config.for_domain("lake").algorithm.groups == config.algorithm.groups
    alone = resolve(configured(tmp_path, "algorithm=grpo", "algorithm.groups.max_staleness=1", *pole)).algorithm
    assert (alone.groups, alone.max_staleness) == (None, 1)


@pytest.mark.slow
def test_a_killed_player_is_replaced_and_nothing_is_consumed_twice(whole: Path, tmp_path: Path) -> None:
    run_with_a_kill(tmp_path / "killed", [*TASK, APART], lambda player: player._handle.process.pid)
    assert_same_run(whole, tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed")
@pytest.mark.parametrize(
    "where",
    [
        f"{APART} hybrid.players=2",
        "hybrid=multiplexed domains.lake.sim.num_workers=2",
        "hybrid=fsdp2",
        "hybrid=ray hybrid.num_threads=1",
        "hybrid=ray hybrid.num_threads=1 hybrid.sharding={num_shards:2,micro_batch_size:4}",
    ],
)
def test_other_placements_play_and_learn_the_same(whole: Path, tmp_path: Path, where: str) -> None:
    """Up to the last bits of a forward pass of other rows, or of gradients that are summed in parts."""
    wanted, found = curve(whole), curve(trained(tmp_path / "run", *TASK, *where.split()))
    assert len(found) == len(wanted)
    for theirs, mine in zip(wanted, found, strict=True):
        compared = {name: value for name, value in theirs.items() if "/agent/" not in name}  # means of several players' means
        assert {name: mine[name] for name in compared} == pytest.approx(compared, rel=2e-2, abs=1e-4)
