"""PPO on fixed rollouts of several domains: what each plays, who learns from it, and that a run goes on to the bit."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.commands.evaluate import main as evaluate
from embodied_rl.commands.offline_eval import main as offline_eval
from embodied_rl.commands.record import main as record
from embodied_rl.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from embodied_rl.types import Rollout
from tests.rollout.test_training_recording import curve, weights

pytestmark = pytest.mark.usefixtures("forked")

COMMON = [
    *("sim=cartpole", "algorithm=ppo", "video.enabled=no", "logger=quiet", "hybrid.num_threads=1", "hybrid.device=cpu"),
    *("algorithm.rollout_steps=16", "algorithm.minibatch_size=32", "algorithm.num_epochs=2", "policy.hidden_sizes=[8]"),
    *("evaluation.num_episodes=2", "evaluation.every_steps=null", "checkpoint.every_steps=null", "stop_at_success=null"),
]
GYM = "target: 'embodied_rl.sim.robots.gymnasium:make', num_workers: 1"
POLE = f"{{name: cartpole, {GYM}, task: CartPole-v1, num_slots: 4, max_episode_steps: 30}}"
ARM = f"{{name: pendulum, {GYM}, task: Pendulum-v1, num_slots: 2, max_episode_steps: 12}}"
OWN = "{name: actor_critic, hidden_sizes: [6]}"
DOMAINS = [
    f"domains.near={{sim: {POLE}}}",
    f"domains.far={{weight: 2, sim: {POLE}, algorithm: {{gamma: 0.0}}}}",
    f"domains.arm={{sim: {ARM}, policy: {OWN}, algorithm: {{normalize_reward: true, minibatch_size: 8}}}}",
]
"""Two that share the run's policy, and one with its own."""
ROLLOUTS_OF_DOMAINS = [*COMMON, *DOMAINS]


def configured(folder: Path, *overrides: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return load_train_config([*ROLLOUTS_OF_DOMAINS, *overrides, f"run_dir={folder}"])


def test_the_slots_of_all_domains_make_up_the_rows_of_an_update() -> None:
    """1,024 rows of 32 slots are 32 steps of each, half for each domain: 17 of 30 slots (rounded), 256 of two. `sim` is not played."""
    thirty = POLE.replace("num_slots: 4", "num_slots: 30")
    domains = [f"domains.pole={{sim: {thirty}}}", f"domains.arm={{sim: {ARM}, policy: {OWN}}}"]
    config = load_train_config(["sim=cartpole", "algorithm=ppo", "sim.num_slots=64", *domains])
    assert (config.algorithm.rollout_steps, config.steps_per_iteration) == (32, 17 * 30 + 256 * 2)
    assert load_train_config(["sim=cartpole", "algorithm=ppo", "sim.num_slots=64"]).algorithm.rollout_steps == 16


def begun(trainer: Trainer) -> dict[str, Rollout]:
    """The first rollout of each domain."""
    trainer.engine.publish(0)
    trainer.method.restart(0)
    return trainer.method.collector.next_rollouts(0)


def test_weights_divide_an_iteration_s_steps(tmp_path: Path) -> None:
    """10 slots of 16 steps are 160; of these 40, 80 and 40 for weights of 1, 2 and 1: 10 and 20 steps of 4 slots, and 20 of 2."""
    config = configured(tmp_path, "total_steps=640")
    parts = {name: config.for_domain(name) for name in config.domains}
    assert {name: own.algorithm.rollout_steps for name, own in parts.items()} == {"near": 10, "far": 20, "arm": 20}
    assert config.steps_per_iteration == 160
    assert config.progress(160) == 0.25, "the schedules of all end together"


def test_each_domain_plays_what_it_would_by_itself(tmp_path: Path) -> None:
    with Trainer(configured(tmp_path), tmp_path, command="test") as trainer:
        together, method = begun(trainer), trainer.method
        assert {name: rollout.reward.shape for name, rollout in together.items()} == {"near": (10, 4), "far": (20, 4), "arm": (20, 2)}
        for stream in method.streams:  # type: ignore[attr-defined]
            stream.rollouts.restart(seed_round=0)
            by_itself, played = stream.rollouts.next_rollout(0), together[stream.domain]
            for name in ("action", "log_prob", "reward", "terminated", "truncated"):
                np.testing.assert_array_equal(getattr(by_itself, name), getattr(played, name), err_msg=f"{stream.domain} {name}")
            assert [(e.slot, e.seed) for e in by_itself.episodes] == [(e.slot, e.seed) for e in played.episodes]
    near, far = (together[name].observation["state"][0] for name in ("near", "far"))
    assert not np.isclose(near, far).any(), "the same simulator in two domains plays other episodes in each"


def test_each_domain_s_steps_are_valued_in_its_way_and_one_update_learns_from_all(tmp_path: Path) -> None:
    with Trainer(configured(tmp_path, "algorithm.kl={coef: 0.1, place: reward}"), tmp_path, command="test") as trainer:
        trainer.engine.publish(0)
        trainer.method.restart(0)
        with trainer.engine.generation():
            experience = trainer.method.collect(0)
        rollouts = {**experience.data["shared"], **experience.data["arm"]}
        prepared = trainer.method.prepare(experience)
        stats = trainer.method.update(prepared, iteration=0, steps=0)
        assert experience.num_steps == 160
        assert experience.observation["shared/state"].shape == (120, 4)
        assert experience.observation["arm/state"].shape == (40, 3)
        figures = trainer.method.metrics()
    batch = Batch.joined([prepared["shared"][name].rows for name in ("near", "far")])
    near, far = slice(0, 40), slice(40, 120)
    assert batch.num_rows == 120
    for part, name in ((near, "near"), (far, "far")):
        np.testing.assert_array_equal(batch.action[part].numpy(), rollouts[name].action.reshape(-1, 1))
        advantage = batch.advantage[part].double()
        assert abs(float(advantage.mean())) < 1e-5, f"{name} is whitened by itself"
        assert float(advantage.std()) == pytest.approx(1.0, abs=1e-3)
    # Without a future (gamma = 0) a step's return is its reward; with one it is more.
    np.testing.assert_allclose(batch.returns[far].numpy(), rollouts["far"].reward.ravel(), atol=1e-5)
    assert float(batch.returns[near].mean()) > 2.0
    assert {"shared/policy_loss", "arm/policy_loss", "shared/kl", "shared/near/kl", "shared/far/kl", "arm/kl"} <= stats.keys()
    assert "arm/arm/kl" not in stats
    for name, rollout in rollouts.items():
        ended = [episode.episode_return for episode in rollout.episodes]
        assert figures[f"domains/{name}/steps"] == rollout.reward.size
        assert figures[f"domains/{name}/episodes"] == len(ended)
        assert not ended or figures[f"domains/{name}/return"] == pytest.approx(np.mean(ended))
    assert figures["domains/arm/episodes"] == 2, "episodes of 12 steps, 20 steps of 2 slots"


APART = ("hybrid=disaggregated",)
AHEAD = ("algorithm.max_staleness=1", "checkpoint.within_episodes=true")


def check_equal_runs(apart: Path, here: Path) -> None:
    """What was played in another process is what one process plays: curves and weights are equal bit for bit."""
    by_role = [{name: value for name, value in row.items() if not name.startswith("roles/")} for row in curve(apart)]
    assert curve(here) == by_role
    own = weights(here)
    assert all(np.array_equal(own[name], value) for name, value in weights(apart).items())


def check_own_evaluation(run: Path) -> None:
    """Each domain, evaluated from the run's last checkpoint, plays the episodes of the run's own evaluation."""
    ended, results = load_checkpoint(run), json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["tasks"].keys() == {"near", "far", "arm"}
    for domain in ("far", "arm"):
        played = evaluate_checkpoint(domain_part(ended, domain), 2).episodes
        told = [(episode["return"], episode["length"]) for episode in results["episodes"] if episode["task"] == domain]
        assert [(episode.episode_return, episode.length) for episode in played] == told


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((), id="here"),
        pytest.param(APART, id="apart"),
        pytest.param((*APART, *AHEAD), id="ahead", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_to_the_bit(tmp_path: Path, where: tuple[str, ...]) -> None:
    words = [*where, "total_steps=640", "checkpoint.every_steps=160", "checkpoint.keep_last=10"]
    whole = train(configured(tmp_path / "whole", *words))
    first, half, *_ = sorted((whole / "checkpoints").glob("step_*"))
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    place = shutil.copytree(half, tmp_path / "part" / "checkpoints" / half.name)
    resumed = train(configured(tmp_path / "part", *words, f"resume={place}"))
    before, after, ended = (load_checkpoint(folder) for folder in (first, whole, resumed))
    assert (before.step, after.step, ended.step) == (160, 640, 640)
    for kind in ("policy", "learner"):
        one, other = getattr(after, kind), getattr(ended, kind)
        assert all(torch.equal(other[name], one[name]) for name in one if not name.startswith("random.")), kind
    for role in ("shared", "arm"):
        names = [name for name in after.policy if name.startswith(f"roles.{role}.") and name.endswith("weight")]
        assert any(not torch.equal(before.policy[name], after.policy[name]) for name in names), f"{role} has learned"
    if where == APART:
        here = train(configured(tmp_path / "here", *words, "hybrid=collocated"))
        check_equal_runs(whole, here)
    check_own_evaluation(resumed)


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param((), id="even", marks=pytest.mark.slow),
        pytest.param(("domains.near.sim.num_slots=5", "domains.arm.sim.num_slots=3"), id="uneven"),
    ],
)
def test_two_players_divide_every_domain_and_one_takes_their_episodes_up(tmp_path: Path, slots: tuple[str, ...]) -> None:
    """What two players were in the middle of, one process goes on with: domain after domain, each worker's slots in their place."""
    found: dict[str, list[dict[str, Rollout]]] = {}
    two = (*APART, "hybrid.players=2", "checkpoint.within_episodes=true", *slots)
    with Trainer(configured(tmp_path / "two", *two), tmp_path / "two", command="test") as trainer:
        found["two"] = [begun(trainer)]
        running = trainer.method.running_episodes()
        found["two"].append(trainer.method.collector.next_rollouts(1))
    one = ("checkpoint.within_episodes=true", *slots)
    with Trainer(configured(tmp_path / "one", *one), tmp_path / "one", command="test") as trainer:
        found["one"] = [begun(trainer)]
        trainer.method.restart(7)
        trainer.method.take_up(running)
        found["one"].append(trainer.method.collector.next_rollouts(1))
    for theirs, own in zip(found["two"], found["one"], strict=True):
        for domain in own:
            for name in ("action", "reward", "terminated", "truncated"):
                # A forward pass of some rows differs from one of all in its last bits.
                np.testing.assert_allclose(getattr(theirs[domain], name), getattr(own[domain], name), atol=1e-4, err_msg=f"{domain} {name}")


@pytest.mark.slow
def test_domains_are_played_by_hosts_that_training_borrows(tmp_path: Path) -> None:
    run = train(configured(tmp_path / "run", "hybrid=multiplexed", "algorithm.max_staleness=1", "total_steps=1600"))
    rows = curve(run)
    assert [row["rollout/age_max"] for row in rows] == [0.0, *[1.0] * 9]
    assert {tuple(row[f"domains/{name}/steps"] for name in ("near", "far", "arm")) for row in rows} == {(40, 80, 40)}


def test_a_share_of_every_domain_s_episodes_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(configured(tmp_path / "run", "total_steps=320", "record.share=1"))
    for domain in ("near", "far", "arm"):
        found = list((run / "episodes" / domain).rglob("episodes.jsonl"))
        assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found) > 0, domain
    # The policy of one domain plays for a recording, and is compared with what was recorded.
    played, figures = tmp_path / "played", tmp_path / "figures"
    record([f"checkpoint={run}", "domain=arm", "num_episodes=3", "sample=true", f"output={played}"])
    assert len(open_recording(played)) == 3
    offline_eval([f"checkpoint={run}", "domain=arm", f"recording={played}", "estimators=none", f"output={figures}"])
    (scored,) = json.loads((figures / "offline_eval.json").read_text(encoding="utf-8"))["policies"]
    assert scored["step"] == 320
    evaluate([f"checkpoint={run}", "domain=arm", "num_episodes=1"])
    assert (run / "evaluation-arm.json").is_file(), "evaluations of the domains do not replace each other"
    with pytest.raises(SystemExit):
        offline_eval([f"checkpoint={run}", f"recording={played}"])
    assert "choose domain=near or domain=far or domain=arm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("domains.far.algorithm.rollout_steps=8", "in a domain that shares the run's policy"),
        ("domains.arm.algorithm.max_staleness=1", "without max_staleness: all domains share the run's"),
    ],
)
def test_what_is_the_run_s_is_no_domain_s(tmp_path: Path, word: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        configured(tmp_path, word)


@pytest.mark.slow
def test_both_domains_are_learned(tmp_path: Path) -> None:
    """A pole that falls after some 20 steps at first (500 are the most), and a pendulum that begins at about -1200 (-150 is good)."""
    pole = "{gamma: 0.99, gae_lambda: 0.95, num_epochs: 10, minibatch_size: 64}"
    arm = "{gamma: 0.9, gae_lambda: 0.95, num_epochs: 10, minibatch_size: 256, normalize_reward: true, learning_rate: 1.0e-3}"
    own = "{name: actor_critic, hidden_sizes: [64, 64], normalize_observation: %s}"
    words = [
        f"domains.pole={{sim: {{name: cartpole, {GYM}, task: CartPole-v1, num_slots: 8}}, policy: {own % 'false'}, algorithm: {pole}}}",
        f"domains.arm={{sim: {{name: pendulum, {GYM}, task: Pendulum-v1, num_slots: 8}}, policy: {own % 'true'}, algorithm: {arm}}}",
        "domains.arm.weight=2",
        *("algorithm.rollout_steps=128", "total_steps=60_000", "evaluation.num_episodes=10", f"run_dir={tmp_path}"),
    ]
    run = train(load_train_config([*COMMON, *words]))
    tasks = json.loads((run / "results.json").read_text(encoding="utf-8"))["tasks"]
    assert tasks["pole"]["return_mean"] > 200
    assert tasks["arm"]["return_mean"] > -600
    rows = curve(run)
    steps = [sum(row[f"domains/{name}/steps"] for row in rows) for name in ("pole", "arm")]
    assert steps[1] / steps[0] == pytest.approx(2.0, rel=0.01)


class Watched(Trainer):
    """Counts what its bars show; its time is over."""

    shown = total = 0

    def _progress(self, title: str, total: int | None = None) -> Any:
        self.total = total or 0
        return nullcontext(self.count)

    def count(self, number: int, note: str = "") -> None:
        self.shown += number

    def _time_is_over(self, reserved_s: float = 0.0) -> bool:
        return True


def test_an_evaluation_counts_the_episodes_of_every_domain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path, "max_minutes=60", "logger.names=[console]")
    with Watched(config, tmp_path, command="test") as trainer:
        assert len(trainer.evaluate(2, first_seed=0)) == 6
        assert (trainer.shown, trainer.total) == (6, 6)
        trainer.episode_s = 10_000.0  # longer than the time left: one seed is played
        assert len(trainer.evaluate(2, first_seed=0)) == 3
        assert (trainer.shown, trainer.total) == (6 + 3, 3)
    assert "max_minutes=60 was over: the final evaluation played 3 of 6 episodes." in " ".join(capsys.readouterr().out.split())
