"""Several domains that are played in a process of their own, or by actors: the run of one process, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.methods.test_domain_options import CLONED, DOOR
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.roles.runs import TEXTS, TWO_POLES, Naps, assert_same_run, configured, curve, groups_of, run_with_a_kill, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
START = "{{player: 'embodied_rl.sim.text.{}:player', episodes: 4, num_epochs: 1, measured_episodes: 2}}"
STARTS = [
    f"domains.lake.algorithm.warm_start={START.format('frozenlake')}",
    f"domains.sums.algorithm.warm_start={START.format('questions')}",
]
MIX = (
    "generation.mix={cool: {share: 0.25, backend: tokens_torch, temperature: 0.5, num_slots: 2}, "
    "chance: {share: 0.25, backend: random, domains: [lake]}}"
)
SCORED = "hybrid.reward_worker={target: tests.roles.scores:short_is_good, num_workers: 2, combine: replace}"
NETWORKS = [word for word in COMMON if not word.startswith(("policy", "agent.", "generation"))]


def test_domains_apart_are_the_run_in_one_process_bit_for_bit(tmp_path: Path) -> None:
    """A robot's own network, two domains of text with scripted players, evaluations in between, and a reward worker for all of them."""
    task = [*COMMON, *DOMAINS, *STARTS, SCORED, "total_steps=200", "evaluation.every_steps=100", "evaluation.interim_episodes=1"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, APART))
    rows = curve(tmp_path / "apart")
    assert rows[-1]["warm_start/lake/episodes"] == rows[-1]["warm_start/sums/episodes"] == 4.0
    assert any("eval/return" in row for row in rows)
    updates = [row for row in rows if "groups/consumed" in row]
    assert len(updates) > 1
    for row in updates:
        assert row["domains/pole/return"] == pytest.approx(-0.1 * row["domains/pole/length"]), "its score, and nothing else"
    assert updates[-1]["reward_worker/scored"] == 12.0 * len(updates)
    for name in ("lake", "sums", "pole"):
        assert updates[-1][f"domains/{name}/groups_consumed"] == 2 * len(updates), "two of the six groups of each batch"
    told = [row["train/language/log_prob_difference"] for row in updates if "train/language/log_prob_difference" in row]
    assert told == [0.0] * len(updates), "other weights played"
    for domain in ("lake", "sums"):
        pages = [(tmp_path / name / f"dialogues-{domain}.html").read_text(encoding="utf-8") for name in ("here", "apart")]
        assert pages[0] == pages[1]


def test_a_domain_s_policy_acts_in_chunks_here_and_there(tmp_path: Path) -> None:
    """Beside one that acts step by step; ten steps of an episode are four decisions of its policy."""
    points = "{name: points, target: 'tests.vla.toys:PointSim', num_slots: 3, num_workers: 1}"
    vla = "{name: tiny_vla, width: 16, num_heads: 2, num_layers: 1, conv_channels: [4], num_keypoints: 4, num_bins: 9, chunk: 3}"
    task = [*NETWORKS, "policy=mlp", DOMAINS[-1], f"domains.points={{weight: 2, sim: {points}, policy: {vla}}}", "total_steps=200"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, APART))
    updates = [row for row in curve(tmp_path / "apart") if "groups/consumed" in row]
    assert [row["domains/points/length"] for row in updates] == [10.0] * len(updates)


@pytest.mark.parametrize("where", [APART, pytest.param("hybrid=ray", marks=pytest.mark.slow)])
def test_a_robot_of_one_domain_clones_its_expert_here_and_there(tmp_path: Path, where: str) -> None:
    """Its expert plays beside the training loop; the worker measures every domain before and after."""
    if where != APART:
        pytest.importorskip("ray", reason="ray is not installed")
    door = f"domains.door={{sim: {DOOR}, policy: {{hidden_sizes: [16]}}, algorithm: {{warm_start: {CLONED}}}}}"
    task = [*COMMON, *DOMAINS[:1], door, "algorithm.kl.coef=0.1", "algorithm.groups.groups_per_step=2", "total_steps=400"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, where))
    assert curve(tmp_path / "apart")[0]["warm_start/door/episodes"] == 2.0


@pytest.mark.slow
def test_domains_by_actors_are_the_run_in_one_process_bit_for_bit(tmp_path: Path) -> None:
    """Several players too, and what resuming needs: scripted players are cloned in the driver, and the rest is the worker's."""
    pytest.importorskip("ray", reason="ray is not installed")
    task = [*COMMON, *DOMAINS, *STARTS, MIX, "algorithm.groups.groups_per_step=8", "total_steps=200"]
    here, there = trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, "hybrid=ray")
    assert_same_run(here, there)
    states = [load_checkpoint(folder) for folder in (here, there)]
    assert states[0].state["algorithm"] == states[1].state["algorithm"]
    assert states[0].state["algorithm"]["roles"]["language"]["warm_starts"].keys() == {"lake", "sums"}
    assert states[0].learner.keys() == states[1].learner.keys()


@pytest.mark.slow
def test_several_players_apart_are_those_in_one_process(tmp_path: Path) -> None:
    """Of one domain too, where `generation.mix` makes it a run with one domain; filters are for what is learned from."""
    task = [*TEXTS, "algorithm.warm_start=null", "total_steps=200", "algorithm.groups.filters=[{name: mean_score, maximum: 1.0}]"]
    mix = "generation.mix={chance: {share: 0.5, backend: random, num_slots: 2}}"
    assert_same_run(trained(tmp_path / "here", *task, mix), trained(tmp_path / "apart", *task, mix, APART))
    assert curve(tmp_path / "apart")[-1]["players/chance/frozenlake/groups_consumed"] > 0


@pytest.mark.slow
def test_a_run_goes_on_in_another_placement(tmp_path: Path) -> None:
    task = [*COMMON, *DOMAINS, "checkpoint.every_steps=100", "checkpoint.keep_last=9", "total_steps=300"]
    whole = trained(tmp_path / "whole", *task, "checkpoint.every_steps=100")
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    moved = tmp_path / "moved"
    shutil.copytree(middle, moved / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", moved)
    config = configured(moved, *task, APART, "checkpoint.every_steps=100", "resume=auto")
    assert_same_run(whole, train(config, overrides=[APART]))


@pytest.mark.slow
def test_a_killed_player_is_replaced_and_nothing_is_consumed_twice(tmp_path: Path) -> None:
    task = [*COMMON, *DOMAINS, "total_steps=250"]
    whole = trained(tmp_path / "whole", *task)
    run_with_a_kill(tmp_path / "killed", [*task, APART], lambda player: player._handle.process.pid)
    assert_same_run(whole, tmp_path / "killed")


def test_domains_are_played_while_training_and_none_is_older_than_allowed(tmp_path: Path) -> None:
    """With S = 1, of two networks: groups are of this version or the one before, and each action says which weights it is of."""
    pole = DOMAINS[-1].removeprefix("domains.pole=")
    task = [*NETWORKS, "policy=mlp", f"domains.one={pole}", f"domains.two={pole}", "algorithm.groups.max_staleness=1", "total_steps=1500"]
    (tmp_path / "run").mkdir()
    ages: set[tuple[str, int]] = set()
    numbers: list[int] = []
    naps = Naps(0.3)
    with Trainer(configured(tmp_path / "run", *task, APART), tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            for group in groups_of(experience):
                numbers.append(group.number)
                ages.add((group.domain, group.age(trainer.iteration)))
                for episode in group.episodes:
                    assert set(trainer.iteration - episode.policy_version) <= {0, 1}
            naps.take({("one", 1), ("two", 1)} <= ages)
            return prepare(experience)

        method.prepare = note
        trainer.run()
        counts, iterations = method.queue.counts(), trainer.iteration
    assert ages == {("one", 0), ("one", 1), ("two", 0), ("two", 1)}, "1 is missing: nothing was played while training"
    assert len(numbers) == len(set(numbers)) == counts.consumed == 6 * iterations
    assert counts.add_up


@pytest.mark.parametrize("where", ["hybrid=multiplexed", pytest.param("hybrid=ray", marks=pytest.mark.slow)])
def test_robots_that_share_a_policy_elsewhere(tmp_path: Path, where: str) -> None:
    if where == "hybrid=ray":
        pytest.importorskip("ray", reason="ray is not installed")
    common = [word for word in TWO_POLES if not word.startswith("domains")]
    door = DOOR.replace("num_workers: 1", "num_workers: 2")
    task = [
        *common,
        f"domains.one={{sim: {door}}}",
        f"domains.two={{weight: 2, sim: {door}, algorithm: {{gamma: 0.9}}}}",
        "total_steps=2500",
    ]
    if where == "hybrid=multiplexed":
        task += ["algorithm.groups.max_staleness=1"]
        rows = curve(trained(tmp_path / "shared", *task, where))
        assert rows[-1]["groups/consumed"] == 6 * len([row for row in rows if "groups/consumed" in row])
        return
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, where))
