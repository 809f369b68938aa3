"""Domains of text with language policies of their own: what each trains, saves, goes on with and is evaluated by."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl import load_policy
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.commands.render import film_players
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.files import sum_of_document
from embodied_rl.media.overlays import Film
from embodied_rl.train import train
from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_domain_ranks import HERE
from tests.methods.test_multi_domain import COMMON, DOMAINS, SUMS
from tests.roles.runs import assert_same_run, configured, curve, trained

pytestmark = pytest.mark.usefixtures("forked")


def own(width: int, more: str = "") -> str:
    """A language policy of a domain, of another size than the run's."""
    sizes = f"hidden_size: {width}, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 16, max_context: 512"
    return f"policy: {{name: language, tiny: {{{sizes}}}{more}}}"


ENTROPY = "algorithm.entropy_coef=0.05"
"""Something to learn where all answers are worth the same."""
ASKED = f"domains.sums={{weight: 2, sim: {SUMS}, {own(16)}, algorithm: {{gamma: 0.5, learning_rate: 0.01}}}}"
TWO = [ENTROPY, DOMAINS[0], ASKED, DOMAINS[2]]
"""A game of the run's policy, questions of another, and a robot's network."""
START = "{{player: 'embodied_rl.sim.text.{}:player', episodes: 4, num_epochs: 1, measured_episodes: 2}}"
STARTS = [
    f"domains.lake.algorithm.warm_start={START.format('frozenlake')}",
    f"domains.sums.algorithm.warm_start={START.format('questions')}",
]
MIX = (
    "generation.mix={cool: {share: 0.25, backend: tokens_torch, temperature: 0.5, num_slots: 2}, "
    "chance: {share: 0.25, backend: random, domains: [lake]}}"
)
SAVED = ["checkpoint.every_steps=100", "checkpoint.keep_last=10"]


def resumed(folder: Path, checkpoint: Path, *words: str) -> Path:
    """A run that goes on from a copy of a checkpoint, with what its run had logged."""
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
    shutil.copy(checkpoint.parent.parent / "metrics.jsonl", folder)
    return train(configured(folder, *words, "resume=auto"), overrides=words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("two") / "whole", *COMMON, *TWO, *SAVED, "total_steps=300")


def test_two_language_policies_are_trained_saved_and_resumed_to_the_bit(whole: Path, tmp_path: Path) -> None:
    first, *later = sorted((whole / "checkpoints").glob("step_*"))
    before, after = load_checkpoint(first), load_checkpoint(later[-1])
    for role in ("language", "sums", "pole"):
        names = [name for name in after.policy if name.startswith(f"roles.{role}.")]
        assert any(not torch.equal(before.policy[name], after.policy[name]) for name in names), f"{role} has learned"
    last = [row for row in curve(whole) if "train/sums/loss" in row][-1]
    assert (last["train/sums/learning_rate"], last["train/language/learning_rate"]) == (0.01, 0.001)
    assert last["train/sums/log_prob_difference"] == last["train/language/log_prob_difference"] == 0.0, "other weights played"
    words = [*COMMON, *TWO, *SAVED, "total_steps=300", "checkpoint.asynchronous=true"]
    assert_same_run(whole, resumed(tmp_path / "part", first, *words))
    ended = load_checkpoint(tmp_path / "part")
    assert all(torch.equal(ended.learner[name], after.learner[name]) for name in after.learner if not name.startswith("random."))
    assert json.loads((ended.path / "state.json").read_text())["format_version"] == 3


def test_each_domain_is_evaluated_with_its_own_model(whole: Path, tmp_path: Path) -> None:
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    checkpoint = load_checkpoint(whole)
    for domain, width in (("lake", 32), ("sums", 16)):
        part = domain_part(checkpoint, domain)
        assert json.loads((part.model_folder / "config.json").read_text())["hidden_size"] == width
        played = evaluate_checkpoint(part, 2).episodes
        told = [(episode["return"], episode["length"]) for episode in results["episodes"] if episode["task"] == domain]
        assert [(episode.episode_return, episode.length) for episode in played] == told, "the run's own evaluation, again"
        answer = load_policy(whole, domain=domain).predict(dict.fromkeys(part.spec.observation, "4 + 3 = ?"))
        assert isinstance(answer, str)
    film = Film(num_episodes=1, size=64, formats=("gif",))
    page = film_players([(domain_part(checkpoint, "sums"), "checkpoint")], tmp_path, film)[-1]
    shown = html.unescape(re.sub("<[^>]*>", "", page.read_text(encoding="utf-8")))
    assert re.search(r"\d [+-] \d = \?", shown), "another model's words"


def test_both_are_moved_out_and_back(whole: Path, tmp_path: Path) -> None:
    """Three optimizers and two caches: the run is the one in which nothing moves, bit for bit."""
    moves = ["hybrid.offload=[optimizer,gradients,kv_cache,simulators]", "hybrid.device=cpu"]
    moved = trained(tmp_path / "moved", *COMMON, *TWO, *SAVED, *moves, "total_steps=300")
    assert all(row["residency/moved_bytes"] > 0 for row in curve(moved) if "groups/consumed" in row)
    before, after = load_checkpoint(whole).policy, load_checkpoint(moved).policy
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_other_tools_find_a_whole_model_in_each_folder(whole: Path) -> None:
    import transformers

    checkpoint = load_checkpoint(whole)
    assert {path.name for path in (checkpoint.path / "model").iterdir() if path.is_dir()} == {"sums"}
    for role, place in (("language", ""), ("sums", "sums")):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path / "model" / place, output_loading_info=True)
        assert not any(report.values())
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, checkpoint.policy[f"roles.{role}.model.{name}"]), name
        assert len(transformers.AutoTokenizer.from_pretrained(checkpoint.path / "model" / place)) == model.config.vocab_size
    assert {name.split(".")[1] for name in load_file(checkpoint.path / "policy.safetensors")} == {"pole"}, "their weights lie there once"
    card = (checkpoint.path / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.startswith("# lake+sums+pole: language and actor_critic trained with grpo\n")
    sims = {name: f"`sim={own.sim.name}`" for name, own in checkpoint.config.domains.items()}
    told = {"lake": "language, in `model`", "sums": "language, in `model/sums`", "pole": "actor_critic"}
    assert "".join(f"- Domain {name}: {sims[name]}, {line}\n" for name, line in told.items()) + "- Observation: " in card
    assert "Simulator" not in card, "none but the domains' is played"
    assert json.loads((whole / "results.json").read_text(encoding="utf-8"))["sim"] == "frozenlake+sums+cartpole"
    assert f"evaluate checkpoint={checkpoint.path} domain=lake num_episodes=100" in card


@pytest.mark.parametrize("place", ["../model.safetensors", "/model.safetensors", "a/b/model.safetensors", "sums/other.safetensors", 3])
def test_a_state_that_names_other_files_is_refused(whole: Path, tmp_path: Path, place: object) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(load_checkpoint(whole).path, forged)
    document = json.loads((forged / "state.json").read_text())
    document["exported"]["roles.sums.model.lm_head.weight"] = [place, "lm_head.weight"]
    (forged / "state.json").write_text(json.dumps(document | {"sha256": sum_of_document(document)}))
    with pytest.raises(IncompatibleCheckpointError, match="has no valid model file"):
        load_checkpoint(forged)


def test_what_one_learns_depends_on_no_other(tmp_path: Path) -> None:
    """Beside a larger model of another domain, and beside the run's own: the same answers, gradients and weights."""
    words = [*COMMON, ENTROPY, f"domains.one={{sim: {SUMS}, {own(16)}}}", "total_steps=36"]
    runs = [trained(tmp_path / str(width), *words, f"domains.two={{sim: {SUMS}, {other}}}") for width, other in enumerate(OTHERS)]
    curves = [[{key: value for key, value in row.items() if "/one/" in key} for row in curve(run)] for run in runs]
    assert curves[0] == curves[1]
    assert any(row.get("train/one/grad_norm", 0.0) > 0 for row in curves[0])
    first, second = (load_checkpoint(run).policy for run in runs)
    learned = [name for name in first if name.startswith("roles.one.")]
    assert learned
    for name in learned:
        np.testing.assert_array_equal(first[name], second[name])


OTHERS = (own(48), "weight: 1")


def test_two_adapters_beside_each_other(tmp_path: Path) -> None:
    """Of the run's model and of a domain's; the checkpoint holds both with their bases, and they are sent elsewhere by themselves."""
    adapted = f"domains.sums={{weight: 2, sim: {SUMS}, {own(16, ', lora_rank: 2, value_head: linear')}, algorithm: {{advantage: gae}}}}"
    words = [*COMMON, ENTROPY, DOMAINS[0], adapted, "policy.lora_rank=2", "policy.lora_targets=[q_proj]", *SAVED, "total_steps=160"]
    here = trained(tmp_path / "here", *words)
    assert_same_run(here, trained(tmp_path / "apart", *words, "hybrid=disaggregated", "hybrid.publish=adapter"))
    folder = load_checkpoint(here).path / "model"
    for place in ("", "sums"):
        assert {"adapter_model.safetensors", "model.safetensors"} <= {path.name for path in (folder / place).iterdir()}
    assert (folder / "sums" / "value_head" / "value_head.safetensors").is_file()
    assert not (folder / "value_head").exists()
    assert_same_run(here, resumed(tmp_path / "part", sorted((here / "checkpoints").glob("step_*"))[0], *words))
    assert evaluate_checkpoint(domain_part(load_checkpoint(here), "sums"), 2).episodes


def test_elsewhere_each_is_played_with_its_own_weights(tmp_path: Path) -> None:
    """Warm starts of both, and players of `generation.mix` that sample with the policy of the domain that they play."""
    words = [*COMMON, *TWO[:3], *STARTS, MIX, "algorithm.groups.groups_per_step=8", "total_steps=100"]
    here = trained(tmp_path / "here", *words)
    assert_same_run(here, trained(tmp_path / "apart", *words, "hybrid=disaggregated"))
    rows = curve(here)
    assert rows[-1]["warm_start/sums/episodes"] == rows[-1]["warm_start/lake/episodes"] == 4.0
    assert rows[-1]["players/cool/sums/groups_consumed"] > 0
    assert not any(name.startswith("players/chance/sums") for name in rows[-1])


@pytest.mark.parametrize("larger", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_divide_the_larger_and_the_other_trains_beside_them(tmp_path: Path, larger: bool) -> None:
    """The run's or the domain's own; both go on from checkpoints of one process and of two."""
    asked = ASKED.replace("hidden_size: 16", "hidden_size: 64") if larger else ASKED
    check_moves(tmp_path, (*HERE, ENTROPY, DOMAINS[0], asked, "agent.evaluation_temperature=1.0", "algorithm.kl.coef=0.05"), 150, 300)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed")
@pytest.mark.parametrize("where", ["hybrid=multiplexed", "hybrid=disaggregated hybrid.players=2"])
def test_several_places_answer_with_the_weights_of_each(tmp_path: Path, where: str) -> None:
    folder = trained(tmp_path / "run", *COMMON, *TWO, "domains.pole.sim.num_workers=2", "total_steps=300", *where.split())
    rows = [row for row in curve(folder) if "train/sums/loss" in row]
    assert len(rows) >= 2
    for row in rows:
        assert max(abs(row[f"train/{role}/log_prob_difference"]) for role in ("sums", "language")) < 1e-5, "other weights played"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["hybrid.sharding={num_shards: 2, micro_batch_size: 4}"]], ids=["one", "ranks"])
def test_actors_hold_the_models_of_each(tmp_path: Path, ranks: list[str]) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    asked = ASKED.replace("hidden_size: 16", "hidden_size: 64")
    words = [*COMMON, ENTROPY, DOMAINS[0], asked, DOMAINS[2], "total_steps=150", "hybrid.num_threads=1"]
    words += ranks or STARTS  # the driver clones in one process
    here, there = trained(tmp_path / "here", *words), trained(tmp_path / "ray", *words, "hybrid=ray")
    assert_same_run(here, there)
    states = [load_checkpoint(folder) for folder in (here, there)]
    assert states[0].state["algorithm"] == states[1].state["algorithm"]


def test_a_run_whose_own_policy_is_a_robots_has_language_policies_of_domains(tmp_path: Path) -> None:
    """Robots share it; the model of the only domain that speaks lies in its folder, and ``model`` is none."""
    words = [word for word in COMMON if not word.startswith("policy")]
    pole = DOMAINS[2].partition(", policy")[0] + "}"
    folder = trained(tmp_path / "run", *words, "policy=mlp", pole, ASKED, "total_steps=100")
    checkpoint = load_checkpoint(folder)
    assert not (checkpoint.path / "model" / "config.json").exists()
    assert evaluate_checkpoint(domain_part(checkpoint, "sums"), 2).episodes
    assert evaluate_checkpoint(domain_part(checkpoint, "pole"), 2).episodes
