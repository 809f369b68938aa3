"""Methods that keep their steps, in several domains: whose rows an update learns from, and that a run goes on to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.record import record
from embodied_rl.rollout.recording import RecordingPlan
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_rollout_domains import ARM, POLE, check_equal_runs, check_own_evaluation
from tests.rollout.test_training_recording import curve

pytestmark = pytest.mark.usefixtures("forked")

COMMON = [
    *("sim=custom", "sim.target=tests.methods.line:Line", "video.enabled=no", "logger=quiet", "hybrid.num_threads=1", "hybrid.device=cpu"),
    *("algorithm.minibatch_size=30", "policy.hidden_sizes=[8]", "policy.distribution=squashed", "stop_at_success=null"),
    *("evaluation.num_episodes=2", "evaluation.every_steps=null", "checkpoint.every_steps=null"),
    *("algorithm.recorded.expert=tests.methods.line:Wave", "algorithm.recorded.expert_episodes=3"),
]
LINE = "{name: line, target: 'tests.methods.line:Line', num_workers: 1, num_slots: 2}"
OWN = "{name: actor_critic, hidden_sizes: [6], distribution: squashed}"
DOMAINS = [
    f"domains.near={{sim: {LINE}}}",
    f"domains.far={{weight: 2, sim: {LINE}, algorithm: {{gamma: 0.5}}}}",
    f"domains.arm={{sim: {ARM}, policy: {OWN}}}",
]
"""Two that share the run's policy, and one with its own."""
CRITICS = ["algorithm.off_policy.hidden_sizes=[8]", "algorithm.off_policy.updates_per_iteration=4", "algorithm.off_policy.warmup_steps=24"]
METHODS = {
    "bc": ["algorithm=bc", "algorithm.num_epochs=2", "total_steps=40"],
    "dagger": ["algorithm=dagger", "algorithm.num_epochs=2", "algorithm.rollout_steps=4", "total_steps=96"],
    "iql": ["algorithm=iql", "total_steps=40", *CRITICS],
    "awac": ["algorithm=awac", "total_steps=40", *CRITICS],
    "sac": ["algorithm=sac", "algorithm.normalize_reward=true", "total_steps=120", *CRITICS],
    "rlpd": ["algorithm=rlpd", "algorithm.off_policy.num_critics=2", "total_steps=120", *CRITICS],
}


def configured(folder: Path, method: str, *overrides: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return load_train_config([*METHODS[method], *COMMON, *DOMAINS, *overrides, f"run_dir={folder}"])


APART = ("hybrid=disaggregated",)
AHEAD = (*APART, "algorithm.max_staleness=1", "checkpoint.within_episodes=true")


@pytest.mark.parametrize(
    ("method", "where"),
    [
        # Steps that are only read, and steps that are played and kept; the others keep theirs in the same way.
        *(pytest.param(method, (), id=method, marks=() if method in ("iql", "sac") else pytest.mark.slow) for method in METHODS),
        pytest.param("bc", ("domains.arm.algorithm={learning_rate: 1.0, cloning: {patience: 2}}",), id="bc-one-is-through"),
        pytest.param("sac", APART, id="sac-apart"),
        pytest.param("dagger", APART, id="dagger-apart", marks=pytest.mark.slow),
        pytest.param("bc", APART, id="bc-apart", marks=pytest.mark.slow),
        pytest.param("rlpd", AHEAD, id="rlpd-ahead", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_to_the_bit(tmp_path: Path, method: str, where: tuple[str, ...]) -> None:
    words = [*where, "checkpoint.every_steps=1", "checkpoint.keep_last=100"]
    whole = train(configured(tmp_path / "whole", method, *words))
    first, *others = sorted((whole / "checkpoints").glob("step_*"))
    half = others[len(others) // 2 - 1]
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    place = shutil.copytree(half, tmp_path / "part" / "checkpoints" / half.name)
    if (whole / "demonstrations").exists():
        shutil.copytree(whole / "demonstrations", tmp_path / "part" / "demonstrations")
    resumed = train(configured(tmp_path / "part", method, *words, f"resume={place}"))
    before, after, ended = (load_checkpoint(folder) for folder in (first, whole, resumed))
    assert before.step < load_checkpoint(half).step < after.step == ended.step
    for kind in ("policy", "learner"):
        one, other = getattr(after, kind), getattr(ended, kind)
        assert one.keys() == other.keys()
        assert all(torch.equal(other[name], one[name]) for name in one if not name.startswith("random.")), kind
    for role in ("shared", "arm"):
        names = [name for name in after.policy if name.startswith(f"roles.{role}.") and name.endswith("weight")]
        assert any(not torch.equal(before.policy[name], after.policy[name]) for name in names), f"{role} has learned"
    if where == APART:
        here = train(configured(tmp_path / "here", method, *words, "hybrid=collocated"))
        check_equal_runs(whole, here)
    check_own_evaluation(resumed)


@pytest.mark.parametrize(("domains", "method"), [([], "sac"), (DOMAINS, "dagger")], ids=["one-sac", "three-dagger"])
def test_an_observation_may_have_a_slash_in_its_name(tmp_path: Path, method: str, domains: list[str]) -> None:
    """As the names of a domain's tensors have before them."""
    named = [word.replace("methods.line:Line", "methods.line:Named") for word in (*COMMON, *domains)]
    words = [*METHODS[method], *named, "policy.observation_key=arm/place", f"run_dir={tmp_path}"]
    words = [word.replace("{name: actor_critic", "{name: actor_critic, observation_key: state") for word in words]
    config = load_train_config(words)
    train(config)
    half = load_checkpoint(tmp_path)
    with Trainer(replace(config, total_steps=2 * config.total_steps), tmp_path, command="test", checkpoint=half) as trainer:
        kept, again = half.learner, trainer.method.state_tensors()
    assert any(name.endswith("observation.arm/place") for name in kept)
    assert kept.keys() >= again.keys()
    assert all(torch.equal(kept[name], part) for name, part in again.items())


def test_a_policy_of_dagger_that_is_through_learns_no_more(tmp_path: Path) -> None:
    """Its validation loss rose; the other goes on, and what both play is kept."""
    one = "domains.arm.algorithm={learning_rate: 1.0, cloning: {patience: 1}}"
    rows = curve(train(configured(tmp_path, "dagger", one, "total_steps=140")))
    through = next(index for index, row in enumerate(rows) if "train/arm/epochs" not in row)
    assert not any(name.startswith("train/arm/") for row in rows[through:] for name in row)
    assert [row["train/shared/epochs"] for row in rows] == [2.0 * count for count in range(1, len(rows) + 1)]
    labels = [row["domains/arm/data/labels"] for row in rows]
    assert all(after - before == 6 for before, after in zip(labels[through:], labels[through + 1 :], strict=False))
    assert len(rows) - through > 2


def test_a_run_goes_to_a_folder_that_is_named_as_its_domains_are() -> None:
    for domains, name in (([], "custom"), (DOMAINS, "near+far+arm")):
        assert Path(load_train_config([*METHODS["sac"], *COMMON, *domains]).run_dir).parent == Path("runs") / name


def test_a_domain_without_a_row_of_a_minibatch_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, "sac", "domains.far.weight=100")
    with pytest.raises(UserError, match=r"minibatch_size=30 has no row of domains\.near, whose weight=1 is of 101"):
        Trainer(config, tmp_path, command="test")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Chance in a pole (discrete actions) and in a pendulum (torques)."""
    folder = tmp_path_factory.mktemp("recordings")
    for name, sim in (("pole", "cartpole"), ("arm", "pendulum")):
        record(replace(load_sim_config(sim), num_workers=1, max_episode_steps=40), folder / name, RecordingPlan(6), policy="random")
    return {name: folder / name for name in ("pole", "arm")}


@pytest.mark.parametrize("method", ["bc", "iql", "awac"])
def test_each_domain_learns_from_its_own_recording(tmp_path: Path, recordings: dict[str, Path], method: str) -> None:
    """Unlike spaces, each with its own policy. Weights of 3 and 1: of eight gradient steps (four for each policy) six and two."""
    domains = [
        f"domains.pole={{weight: 3, sim: {POLE}, policy: {{name: actor_critic, hidden_sizes: [6]}}, recording: [{recordings['pole']}]}}",
        f"domains.arm={{sim: {ARM}, policy: {OWN}, recording: [{recordings['arm']}]}}",
    ]
    words = [word for word in COMMON if not word.startswith("policy.")]
    run = train(load_train_config([*METHODS[method], *words, *domains, "total_steps=48", f"run_dir={tmp_path / 'run'}"]))
    rows, name = curve(run), "imitation_loss"
    assert not (run / "demonstrations").exists(), "no expert plays"
    for domain, row in ((domain, row) for domain in ("pole", "arm") for row in rows):
        assert row[f"domains/{domain}/data/recorded_episodes"] == 6
        assert np.isfinite(row[f"train/{domain}/{name}"])
    if method == "bc":
        return
    assert [(row["train/pole/updates"], row["train/arm/updates"]) for row in rows] == [(6.0 * k, 2.0 * k) for k in range(1, 7)]
    assert [row["step"] for row in rows] == [8 * k for k in range(1, 7)]


def begun(trainer: Trainer) -> Any:
    """The learner of the policy that two domains share, before its first update."""
    trainer.engine.publish(0)
    trainer.method.restart(0)
    return trainer.method.learners["shared"]  # type: ignore[attr-defined]


def test_a_minibatch_holds_rows_of_each_domain_as_its_weight_says(tmp_path: Path) -> None:
    """Of 30 rows 10 are near and 20 far, whose gamma is its own; the far recording comes round again before the near one is through."""
    with Trainer(configured(tmp_path / "iql", "iql"), tmp_path / "iql", command="test") as trainer:
        learner = begun(trainer)
        near, far = learner.steps["near"], learner.steps["far"]
        assert learner.rows(30) == {"near": 10, "far": 20}
        assert not set(near.demonstrations.load()[0][0].seeds) - set(far.demonstrations.load()[0][0].seeds), "the same episodes in both"
        one, other = near.sample(0, 10), far.sample(0, 10)
        assert not np.array_equal(one.observation["state"], other.observation["state"]), "each domain draws by itself"
        assert (one.discount.max(), other.discount.max()) == (np.float32(0.99), np.float32(0.5))
    with Trainer(configured(tmp_path / "bc", "bc", "algorithm.cloning.patience=5"), tmp_path / "bc", command="test") as trainer:
        learner = begun(trainer)
        sizes = {name: steps.num_steps for name, steps in learner.steps.items()}
        total = -(-sum(sizes.values()) // 30)
        assert learner.num_minibatches == total
        batches = list(learner._minibatches(total))
        assert [batch.num_rows for batch in batches] == pytest.approx([30] * total, abs=3)
        of_arm = trainer.method.learners["arm"].num_minibatches  # type: ignore[attr-defined]
        experience = trainer.method.collect(0)
        stats = trainer.method.update(trainer.method.prepare(experience), iteration=0, steps=0)
    assert experience.num_steps == 2 * sum(experience.data.values())
    assert experience.data == {"shared": round((total + of_arm) * 3 / 4), "arm": round((total + of_arm) / 4)}
    assert stats["shared/minibatches"] == experience.data["shared"]
    wanted = (stats["shared/near/validation_loss"] + 2 * stats["shared/far/validation_loss"]) / 3
    assert stats["shared/validation_loss"] == pytest.approx(wanted)


@pytest.mark.parametrize("method", ["sac", "dagger"])
def test_what_a_domain_plays_is_kept_for_it(tmp_path: Path, method: str) -> None:
    with Trainer(configured(tmp_path, method), tmp_path, command="test") as trainer:
        learner = begun(trainer)
        for iteration in range(2):  # the first of dagger clones
            experience = trainer.method.collect(iteration)
            prepared = trainer.method.prepare(experience)
        steps = experience.data["shared"]
        played = {domain: rollout.observation["state"].reshape(-1, 1) for domain, rollout in steps.items()}
        sizes = {domain: len(rows) for domain, rows in played.items()}
        assert sizes == {"near": 6, "far": 12}
        assert experience.num_steps == 24
        for domain, rows in played.items():
            own = learner.steps[domain]
            if method == "dagger":
                np.testing.assert_array_equal(own._observation["state"], rows)
                np.testing.assert_allclose(own._action, np.clip(np.sin(10.0 * rows), -0.99, 0.99), atol=1e-6)
            else:
                assert len(own.buffer) == 2 * len(rows)
                drawn = own.sample(0, 50)
                stored = own.buffer.state_arrays()["observation.state"]
                assert np.isin(drawn.observation["state"], stored).all()
                assert drawn.discount.max() == np.float32({"near": 0.99, "far": 0.5}[domain])
        assert prepared["shared"] == (36 - 24 if method == "sac" else learner.num_minibatches), "36 steps, 24 of them to warm up"
        assert trainer.method.metrics()["domains/far/steps"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bc", "rlpd"])
def test_the_largest_policy_is_divided_over_two_ranks(tmp_path: Path, method: str) -> None:
    words = [word for word in (*METHODS[method], *COMMON, *DOMAINS) if not word.startswith(("total_steps", "hybrid"))]
    words += ["algorithm.cloning.patience=null"] if method == "bc" else []  # a run that ends has its last weights
    check_moves(tmp_path, tuple(words), *((14, 42) if method == "bc" else (48, 96)))


def check_close_runs(one: Path, two: Path) -> None:
    """Curves of five rows; a forward pass of some rows differs from one of all in its last bits."""
    curves = [[{key: value for key, value in row.items() if not key.startswith("roles/")} for row in curve(run)] for run in (one, two)]
    assert [len(rows) for rows in curves] == [5, 5]
    for theirs, mine in zip(*curves, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_two_players_divide_every_domain(tmp_path: Path) -> None:
    runs = [train(configured(tmp_path / name, "sac", *APART, f"hybrid.players={name}")) for name in ("1", "2")]
    check_close_runs(*runs)


@pytest.mark.slow
def test_domains_are_played_by_hosts_that_training_borrows(tmp_path: Path) -> None:
    rows = curve(train(configured(tmp_path / "run", "sac", "hybrid=multiplexed", "algorithm.max_staleness=1")))
    assert [row["rollout/age_max"] for row in rows] == [0.0, *[1.0] * 4]
    assert {tuple(row[f"domains/{name}/steps"] for name in ("near", "far", "arm")) for row in rows} == {(6, 12, 6)}


@pytest.mark.slow
def test_every_policy_learns(tmp_path: Path) -> None:
    """Random actions never get to the goal, some 40 steps away. Two domains share a policy, a third has its own."""
    door = "sim: {name: key_door, target: 'embodied_rl.sim.robots.key_door:KeyDoor', task: KeyDoor, num_slots: 4, num_workers: 1}"
    words = [
        *("sim=key_door", "algorithm=bc", "algorithm.minibatch_size=64", "algorithm.learning_rate=3e-3", "algorithm.cloning.patience=40"),
        *("algorithm.recorded.expert_episodes=8", "policy.hidden_sizes=[32,32]", "evaluation.num_episodes=20", "total_steps=3000"),
        *(f"domains.one={{{door}}}", f"domains.two={{weight: 2, {door}}}"),
        f"domains.three={{weight: 2, {door}, policy: {{name: actor_critic, hidden_sizes: [32, 32]}}}}",
        *("video.enabled=no", "logger=quiet", "hybrid.num_threads=1", "hybrid.device=cpu", "stop_at_success=null"),
    ]
    run = train(load_train_config([*words, f"run_dir={tmp_path}"]))
    tasks = json.loads((run / "results.json").read_text(encoding="utf-8"))["tasks"]
    assert all(tasks[name]["success"] >= 0.9 for name in ("one", "two", "three"))
