"""What a run with one task offers, of a run with several: offloading, starts inside episodes, warm starts, films."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.config import AlgorithmConfig, GroupsConfig
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.learning.episode_objectives import EpisodeObjective
from embodied_rl.learning.rows import EpisodeRows
from embodied_rl.methods.learners import of_domains
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.learning.samples import make_policy
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.roles.runs import TWO_POLES, assert_same_run, configured, curve, trained

pytestmark = pytest.mark.usefixtures("forked")

PLAYERS = (("lake", "frozenlake"), ("sums", "questions"))


def test_everything_of_several_domains_is_moved_out_and_back(tmp_path: Path) -> None:
    """Two learners' optimizers, one cache, three tasks' simulators: the run is the one in which nothing moves, bit for bit."""
    task = [*COMMON, *DOMAINS, "total_steps=200"]
    plain = trained(tmp_path / "plain", *task)
    config = configured(tmp_path / "moved", *task, "hybrid.offload=[optimizer,gradients,kv_cache,simulators]", "hybrid.device=cpu")
    (tmp_path / "moved").mkdir()
    with Trainer(config, tmp_path / "moved", command="test") as trainer:
        assert len(trainer.method.all_learners) == 2
        trainer.run()
        usage = trainer.engine.residency.memory_usage()
    rows = curve(tmp_path / "moved")
    assert all(row["residency/moved_bytes"] > 0 for row in rows if "groups/consumed" in row)
    assert usage.keys() == {"optimizer", "gradients", "kv_cache", "simulators"}
    before, after = (load_checkpoint(folder) for folder in (plain, tmp_path / "moved"))
    assert all((before.policy[name] == after.policy[name]).all() for name in before.policy)


def test_a_language_policy_has_a_critic_for_the_domains_that_want_one(tmp_path: Path) -> None:
    """One domain's turns are valued, the other's episodes compared; one update learns from both, here and elsewhere, and goes on."""
    task = [*COMMON, *DOMAINS[:2], "domains.lake.algorithm.advantage=gae", "policy.value_head=linear", "total_steps=240"]
    task += ["algorithm.groups.groups_per_step=4", "checkpoint.every_steps=100", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "whole", *task)
    losses = [row["train/language/value_loss"] for row in curve(whole) if "train/language/loss" in row]
    assert len(losses) > 1
    assert min(losses) > 0
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    shutil.copytree(middle, tmp_path / "part" / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", tmp_path / "part")
    apart = ["hybrid=disaggregated", "resume=auto"]
    assert_same_run(whole, train(configured(tmp_path / "part", *task, *apart), overrides=apart))


def test_each_domain_has_its_own_starts_inside_episodes_and_resumes_to_the_bit(tmp_path: Path) -> None:
    starts = "{share: 0.6, success_return: 15, sources: [success], chunk_steps: 4, min_episodes: 2}"
    task = [*TWO_POLES, f"algorithm.initialized={starts}", "domains.near.algorithm.initialized.share=0.3", "total_steps=1400"]
    task += ["checkpoint.every_steps=500", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "whole", *task)
    last = curve(whole)[-1]
    assert last["domains/near/initialized/sources"] > 0
    assert last["domains/far/initialized/sources"] > 0
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    told = load_checkpoint(middle).state["algorithm"]["starts"]
    assert told.keys() == {"near", "far"}
    part = tmp_path / "part"
    shutil.copytree(middle, part / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", part)
    assert_same_run(whole, train(configured(part, *task, "resume=auto")))


SHORT = "task: KeyDoor, max_episode_steps: 80"
"""The expert needs 60."""
DOOR = f"{{name: key_door, target: 'embodied_rl.sim.robots.key_door:KeyDoor', {SHORT}, num_slots: 4, num_workers: 1}}"
CLONED = "{episodes: 2, num_epochs: 2, minibatch_rows: 64, measured_episodes: 2}"


def test_a_robot_clones_its_expert_beside_texts_that_clone_their_players(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One warm start for the whole run, with which the domains of text differ in the player; each is measured before and after."""
    starts = [f"domains.{name}.algorithm.warm_start.player='embodied_rl.sim.text.{module}:player'" for name, module in PLAYERS]
    door = f"domains.door={{weight: 2, sim: {DOOR}, policy: {{hidden_sizes: [16], normalize_observation: true}}}}"
    task = [*COMMON, *DOMAINS[:2], door, f"algorithm.warm_start={CLONED}", *starts, "algorithm.kl.coef=0.1", "total_steps=500"]
    whole = trained(tmp_path / "whole", *task, "checkpoint.every_steps=150", "checkpoint.keep_last=9")
    said = capsys.readouterr().out
    assert all(f"Cloning the expert of {name}: success " in said for name in ("lake", "sums", "door"))
    rows = curve(whole)
    assert rows[0]["warm_start/door/episodes"] == 2.0
    assert {f"warm_start/{name}/success_{when}" for name in ("lake", "sums") for when in ("before", "after")} <= rows[1].keys()
    told = json.loads((whole / "results.json").read_text(encoding="utf-8"))["warm_start"]
    assert told["door"]["before"]["num_episodes"] == told["door"]["after"]["num_episodes"] == 2
    assert told["lake/episodes"] == told["sums/episodes"] == 2.0
    first, middle, *_ = sorted((whole / "checkpoints").glob("step_*"))
    assert first.name == "step_000000000", "what was cloned is not to be cloned again"
    cloned, later = load_checkpoint(first), load_checkpoint(middle)
    kept = {name.removeprefix("door/reference."): tensor for name, tensor in later.learner.items() if name.startswith("door/reference.")}
    assert kept
    for name, tensor in kept.items():
        assert (tensor == cloned.policy[f"roles.door.{name}"]).all(), "the KL term compares with what was cloned"
    moved = [name for name in cloned.policy if name.startswith("roles.door.normalizer")]
    assert moved
    assert all((cloned.policy[name] == later.policy[name]).all() for name in moved), "statistics stay those of the cloned episodes"
    part = tmp_path / "part"
    shutil.copytree(first, part / "checkpoints" / first.name)
    (part / "metrics.jsonl").write_text("".join((whole / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]), encoding="utf-8")
    assert_same_run(whole, train(configured(part, *task, "checkpoint.every_steps=150", "checkpoint.keep_last=9", "resume=auto")))


def test_a_domain_of_a_robot_clones_recordings(tmp_path: Path) -> None:
    """Recorded by the expert in the first run, in a folder of the domain; the second clones the same episodes to the same weights."""
    door = f"domains.door={{sim: {DOOR}, policy: {{hidden_sizes: [16]}}, algorithm: {{warm_start: {CLONED}}}}}"
    task = [*TWO_POLES, door, "total_steps=60", "algorithm.groups.groups_per_step=3"]
    first = trained(tmp_path / "first", *task)
    second = trained(tmp_path / "second", *task, f"domains.door.recording=[{tmp_path}/first/demonstrations/door]")
    assert not (second / "demonstrations").exists()
    assert_same_run(first, second)


def test_each_domain_is_filmed_at_the_end_in_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them cannot be drawn: the others' films are there, and the reason is told."""
    points = "{name: toy, target: 'tests.sim.toy:UnseenSim', num_slots: 2, num_workers: 1}"
    task = [*COMMON, *DOMAINS[:1], DOMAINS[2], f"domains.toy={{sim: {points}, policy: {{hidden_sizes: [8]}}}}", "total_steps=40"]
    run = trained(tmp_path / "run", *[word for word in task if not word.startswith("video")], "video.num_episodes=1", "video.size=64")
    assert {path.parent.name for path in (run / "videos").glob("*/*.mp4")} == {"lake", "pole"}
    assert "toy" in capsys.readouterr().out
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "lake/" in page
    assert "pole/" in page


def test_robots_of_several_domains_share_the_run_s_policy(tmp_path: Path) -> None:
    """Each values its episodes in its own way, one update learns from all, and each is resumed, cloned, measured and evaluated."""
    walls = DOOR.replace("max_episode_steps: 80", "max_episode_steps: 60")
    task = [
        *("policy=mlp", "policy.hidden_sizes=[16]", "policy.normalize_observation=true", f"algorithm.warm_start={CLONED}"),
        *(word for word in TWO_POLES if not word.startswith(("domains", "policy"))),
        *(f"domains.long={{sim: {DOOR}}}", f"domains.short={{sim: {walls}, algorithm: {{gamma: 0.9, advantage: gae}}}}"),
        *("algorithm.groups.groups_per_step=4", "algorithm.kl.coef=0.1", "total_steps=1600", "checkpoint.every_steps=700"),
        *("checkpoint.keep_last=9",),
    ]
    whole = trained(tmp_path / "whole", *task)
    rows = curve(whole)
    assert rows[0]["warm_start/long/loss"] == rows[0]["warm_start/short/loss"], "they are cloned together"
    assert {key.split("/")[1] for key in rows[-1] if key.startswith("train/")} == {"shared"}
    assert rows[-1]["domains/short/length"] <= 60
    assert rows[-1]["train/shared/value_loss"] > 0, "of the domain whose advantage has a critic"
    _, middle, *_ = sorted((whole / "checkpoints").glob("step_*"))
    names = {name.split(".")[1] for name in load_checkpoint(middle).policy}
    assert names == {"shared"}
    part = tmp_path / "part"
    shutil.copytree(middle, part / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", part)
    resumed = train(configured(part, *task, "resume=auto"))
    assert_same_run(whole, resumed)
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    for domain in ("long", "short"):
        played = evaluate_checkpoint(domain_part(load_checkpoint(resumed), domain), 4).episodes
        told = [(episode["return"], episode["length"]) for episode in results["episodes"] if episode["task"] == domain]
        assert [(episode.episode_return, episode.length) for episode in played] == told
    apart = trained(tmp_path / "apart", *task, "hybrid=disaggregated")
    assert_same_run(whole, apart)


def test_what_domains_cannot_share_is_said(tmp_path: Path) -> None:
    pole = "{name: cartpole, target: 'embodied_rl.sim.robots.gymnasium:make', task: CartPole-v1, num_slots: 3, num_workers: 1}"
    base = [*TWO_POLES[:-2], f"domains.door={{sim: {DOOR}}}"]
    with pytest.raises(UserError, match=r"domains\.pole shares policy=actor_critic .* give it a separate policy \(domains\.pole\.policy"):
        trained(tmp_path / "other", *base, f"domains.pole={{sim: {pole}}}")


def test_rows_of_two_domains_are_as_long_as_the_longest() -> None:
    def rows(lengths: list[int], units: int) -> EpisodeRows:
        steps = max(lengths)
        decisions = torch.arange(steps)[None] < torch.tensor(lengths)[:, None]
        place = decisions.nonzero()
        mask = decisions.repeat_interleave(units, dim=1)
        inputs = {"mask": mask, "decisions": decisions, "advantage": mask * float(lengths[0]), "positive": decisions[:, 0]}
        seen = torch.arange(len(place)).float()[:, None]
        return EpisodeRows(inputs, {"state": seen}, seen, place[:, 0], place[:, 1])

    both = EpisodeRows.joined([rows([2, 1], 2), rows([3], 2)])
    assert both.inputs["decisions"].tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert both.inputs["advantage"].tolist() == [[2, 2, 2, 2, 0, 0], [2, 2, 0, 0, 0, 0], [3] * 6]
    assert both.inputs["positive"].tolist() == [True] * 3
    assert both.row.tolist() == [0, 0, 1, 2, 2, 2]
    assert both.column.tolist() == [0, 1, 0, 0, 1, 2]
    assert both.observation["state"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_critic_learns_only_from_the_domains_that_have_returns() -> None:
    """Three decisions with returns beside two without: the critic's error is the mean over the three, by hand."""
    policy = make_policy()
    config = AlgorithmConfig(advantage="grpo", groups=GroupsConfig(), value_coef=1.0, entropy_coef=0.0)
    objective = EpisodeObjective(policy, config)

    def rows(lengths: list[int]) -> EpisodeRows:
        decisions = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        place, nothing = decisions.nonzero(), torch.zeros(decisions.shape)
        seen = torch.randn(len(place), 11, generator=torch.Generator().manual_seed(len(lengths)))
        inputs = {"mask": decisions, "decisions": decisions, "value": nothing}
        inputs |= dict.fromkeys(("advantage", "old_log_prob", "behaviour_log_prob"), nothing)
        return EpisodeRows(inputs, {"state": seen}, torch.zeros(len(place), 3), place[:, 0], place[:, 1])

    valued, others = rows([2, 1]), rows([2])
    known = {"returns": torch.tensor([[3.0, 1.0], [5.0, 0.0]]), "value": torch.tensor([[1.0, 1.0], [1.0, 0.0]])}
    valued = dataclasses.replace(valued, inputs={**valued.inputs, **known})
    joined, numbers = objective.begin(EpisodeRows.joined([others, valued]), kl_coef=0.0)
    loss, _ = objective(policy, joined, numbers)
    with torch.no_grad():
        expected = (policy.value(valued.observation) - torch.tensor([3.0, 1.0, 5.0])).square().mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    # A value of 1 everywhere explains nothing.
    assert objective.summary(joined, 1, 1)["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert "value_loss" not in objective(policy, *objective.begin(EpisodeRows.joined([others, others]), kl_coef=0.0))[1]


def test_figures_of_domains_are_their_mean_by_rows_and_each_ones_own() -> None:
    parts = {"near": (30, {"kl": 0.1, "weight_mean": 1.0}), "far": (10, {"kl": 0.5}), "cut_off": (0, {})}
    assert of_domains(parts) == pytest.approx({"kl": 0.2, "weight_mean": 1.0, "near/kl": 0.1, "near/weight_mean": 1.0, "far/kl": 0.5})
    assert of_domains({"near": parts["near"]}) == parts["near"][1]
