"""Domains that learn by unlike methods in one run: from rollouts that are consumed, from steps that are kept, and from recordings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_rollout_domains import check_equal_runs
from tests.methods.test_stored_domains import AHEAD, APART, CRITICS, LINE, OWN, check_close_runs
from tests.rollout.test_training_recording import curve

pytestmark = pytest.mark.usefixtures("forked")

COMMON = [
    *("sim=custom", "sim.target=tests.methods.line:Line", "video.enabled=no", "logger=quiet", "hybrid.num_threads=1", "hybrid.device=cpu"),
    *("algorithm=ppo", "algorithm.minibatch_size=10", "algorithm.num_epochs=2", "algorithm.rollout_steps=6", "policy.hidden_sizes=[8]"),
    *("evaluation.num_episodes=2", "evaluation.every_steps=null", "checkpoint.every_steps=null", "stop_at_success=null"),
]
EXPERT = ["recorded.expert=tests.methods.line:Wave", "recorded.expert_episodes=3", "minibatch_size=30", "num_epochs=1"]
CRITIC = [word.removeprefix("algorithm.") for word in (*CRITICS, "algorithm.minibatch_size=30")]
NUMBERS = {
    "ppo": ["minibatch_size=10", "num_epochs=2", "rollout_steps=6"],
    "sac": [*CRITIC, "rollout_steps=4"],
    "iql": [*CRITIC, *EXPERT[:2]],
    "bc": EXPERT,
    "dagger": [*EXPERT, "rollout_steps=4"],
}
"""What each method has beside its file of configs/algorithm."""


def domain(name: str, method: str) -> list[str]:
    """The words of a domain with its own policy, which learns by a method as its file says it."""
    numbers = [f"domains.{name}.algorithm.{word}" for word in NUMBERS[method]]
    return [f"+algorithm@domains.{name}.algorithm={method}", f"+domains.{name}.sim={LINE}", f"+domains.{name}.policy={OWN}", *numbers]


def configured(folder: Path, *words: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return load_train_config([*COMMON, *words, f"run_dir={folder}"])


def mixed(*methods: str) -> list[str]:
    return [word for method in methods for word in domain(f"by_{method}", method)]


SHARING = [f"domains.near={{sim: {LINE}}}", f"domains.far={{weight: 2, sim: {LINE}, algorithm: {{gamma: 0.5}}}}"]
"""Two that share the run's policy, which learns by PPO."""
ALL = [*SHARING, *mixed("sac", "bc")]


def learned(config: Any, folder: Path, iterations: int) -> dict[str, torch.Tensor]:
    """The first policy after so many iterations."""
    with Trainer(config, folder, command="test") as trainer:
        trainer.engine.publish(0)
        trainer.method.restart(0)
        for iteration in range(iterations):
            experience = trainer.method.collect(iteration)
            trainer.method.update(trainer.method.prepare(experience), iteration=iteration, steps=0)
            if experience.observation:
                trainer.policy.update_statistics(experience.observation)
            trainer.engine.publish(iteration + 1)
            trainer.method.published(iteration + 1)
        role = next(iter(trainer.method.learners))  # type: ignore[attr-defined]
        return {name: value.clone() for name, value in trainer.policy.state_dict().items() if name.startswith(f"roles.{role}.")}


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(methods, id="-".join(methods), marks=() if methods[0] in ("ppo", "iql") else pytest.mark.slow)
        for methods in (("ppo", "sac", "bc"), ("sac", "iql", "ppo"), ("bc", "ppo"), ("iql", "sac", "bc"), ("dagger", "ppo", "bc"))
    ],
)
def test_a_domain_learns_the_same_whatever_the_others_learn_by(tmp_path: Path, methods: tuple[str, ...]) -> None:
    """The first: beside others of its own kind, and beside those of other kinds. All begin with the same weights."""
    found = [
        learned(
            configured(tmp_path / name, *(word for place, one in enumerate(all_of) for word in domain(f"d{place}", one))),
            tmp_path / name,
            number,
        )
        for name, all_of, number in (("before", methods, 0), ("alike", methods[:1] * len(methods), 8), ("unlike", methods, 8))
    ]
    before, alike, unlike = found
    assert all(torch.equal(unlike[name], alike[name]) for name in alike)
    assert any(not torch.equal(before[name], alike[name]) for name in alike), "it has learned"


def test_a_domain_s_policy_is_bounded_where_its_own_method_needs_it() -> None:
    words = [
        f"+{group}@domains.{name}.{group}={file}" for name in ("one", "two") for group, file in (("sim", "pendulum"), ("policy", "mlp"))
    ]
    for run, own in (("ppo", "sac"), ("sac", "ppo")):
        config = load_train_config(["sim=pendulum", f"algorithm={run}", *words, f"+algorithm@domains.two.algorithm={own}"])
        found = {method: config.for_domain(name).policy.distribution for name, method in (("one", run), ("two", own))}  # type: ignore[union-attr]
        assert found == {"ppo": "gaussian", "sac": "squashed"}


def test_what_an_iteration_holds_of_each_kind(tmp_path: Path) -> None:
    """Of 6 steps of two slots in each of three domains one plays its own 4; the others 4 and 8 by weight. Recorded ones take no steps."""
    words = [
        *SHARING,
        *domain("replay", "sac"),
        *domain("plain", "bc"),
        *domain("second", "bc"),
        *domain("critics", "iql"),
        "+domains.second.weight=3",
    ]
    config = configured(tmp_path, *words, "total_steps=160")
    assert config.steps_per_iteration == 2 * (4 + 8 + 4) == 32
    assert config.progress(96) == 0.6, "the schedules of all policies end together"
    with Trainer(config, tmp_path, command="test") as trainer:
        trainer.engine.publish(0)
        trainer.method.restart(0)
        experience = trainer.method.collect(0)
        assert experience.num_steps == 32
        assert {name: rollout.num_steps for name, rollout in experience.data["shared"].items()} == {"near": 8, "far": 16}
        assert {name: rollout.num_steps for name, rollout in experience.data["replay"].items()} == {"replay": 8}
        learners = trainer.method.learners  # type: ignore[attr-defined]
        given = {name: learners[name].num_minibatches for name in ("plain", "second", "critics")}
        assert {name: experience.data[name] for name in given} == {
            "plain": round((given["plain"] + given["second"]) / 4),
            "second": round((given["plain"] + given["second"]) * 3 / 4),
            "critics": 4,
        }, "weights are of those that learn alike"


@pytest.mark.parametrize(
    ("methods", "where"),
    [
        pytest.param((*SHARING, *mixed("sac", "bc")), (), id="here", marks=pytest.mark.slow),
        pytest.param((*mixed("bc", "dagger", "sac", "iql"), *SHARING), (), id="all"),
        pytest.param((*SHARING, *mixed("sac", "bc")), ("checkpoint.within_episodes=true",), id="within", marks=pytest.mark.slow),
        pytest.param((*SHARING, *mixed("sac", "bc")), APART, id="apart", marks=pytest.mark.slow),
        pytest.param((*mixed("iql", "dagger"), *SHARING), AHEAD, id="ahead", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_to_the_bit(tmp_path: Path, methods: tuple[str, ...], where: tuple[str, ...]) -> None:
    words = [*methods, *where, "total_steps=200", "checkpoint.every_steps=1", "checkpoint.keep_last=100"]
    whole = train(configured(tmp_path / "whole", *words))
    first, *others = sorted((whole / "checkpoints").glob("step_*"))
    half = others[len(others) // 2 - 1]
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    place = shutil.copytree(half, tmp_path / "part" / "checkpoints" / half.name)
    shutil.copytree(whole / "demonstrations", tmp_path / "part" / "demonstrations")
    resumed = train(configured(tmp_path / "part", *words, f"resume={place}"), overrides=[*COMMON, *words])
    before, after, ended = (load_checkpoint(folder) for folder in (first, whole, resumed))
    assert before.step < load_checkpoint(half).step < after.step == ended.step
    for kind in ("policy", "learner"):
        one, other = getattr(after, kind), getattr(ended, kind)
        assert one.keys() == other.keys()
        assert all(torch.equal(other[name], one[name]) for name in one if not name.startswith("random.")), kind
    for role in {name.split(".")[1] for name in after.policy}:
        names = [name for name in after.policy if name.startswith(f"roles.{role}.")]
        assert any(not torch.equal(before.policy[name], after.policy[name]) for name in names), f"{role} has learned"
    if where == APART:
        here = train(configured(tmp_path / "here", *words, "hybrid=collocated"))
        check_equal_runs(whole, here)


@pytest.mark.slow
@pytest.mark.parametrize("wide", ["by_sac", "by_bc", "shared"])
def test_the_largest_policy_is_divided_over_two_ranks(tmp_path: Path, wide: str) -> None:
    widened = "policy.hidden_sizes=[32]" if wide == "shared" else f"domains.{wide}.policy.hidden_sizes=[32]"
    words = [word for word in (*COMMON, *ALL) if not word.startswith(("hybrid", "policy"))]
    check_moves(tmp_path, (*words, "policy.hidden_sizes=[8]", widened, "domains.by_bc.algorithm.cloning.patience=null"), 96, 192)


@pytest.mark.slow
def test_two_players_divide_every_domain(tmp_path: Path) -> None:
    runs = [train(configured(tmp_path / name, *ALL, *APART, "total_steps=160", f"hybrid.players={name}")) for name in ("1", "2")]
    check_close_runs(*runs)


@pytest.mark.slow
def test_domains_are_played_by_hosts_that_training_borrows(tmp_path: Path) -> None:
    rows = curve(train(configured(tmp_path, *ALL, "total_steps=160", "hybrid=multiplexed", "algorithm.max_staleness=1")))
    assert [row["rollout/age_max"] for row in rows] == [0.0, *[1.0] * 4]
    assert {tuple(row[f"domains/{name}/steps"] for name in ("near", "far", "by_sac")) for row in rows} == {(8, 16, 8)}
