"""Whole training runs of language agents: every conversation strategy, tools, and rewards that are checked or judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.compose import load_train_config
from embodied_rl.train import train
from tests.generation.token_servers import Exchange, TokenServer

TINY = "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 2048}"
COMMON = [
    *("policy=language", "algorithm=grpo", "generation=tokens_torch", "video.enabled=no", "logger=quiet", "hybrid.num_threads=1", TINY),
    *("agent.answer=word", "agent.max_new_tokens=3", "agent.evaluation_temperature=1.0", "evaluation.num_episodes=2"),
    *("evaluation.every_steps=null", "checkpoint.every_steps=null", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=2"),
    *("algorithm.minibatch_size=32", "algorithm.num_epochs=1", "sim.num_slots=4", "sim.num_workers=1"),
]


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    train(load_train_config([*COMMON, *overrides, f"run_dir={folder}"]), overrides=overrides)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("strategy", ["full", "last_k", "memory", "summarised"])
def test_every_strategy_trains_with_tools(tmp_path: Path, strategy: str) -> None:
    lake = ["sim=frozenlake", "agent.actions=[up, down, left, right]", "agent.invalid_penalty=0.1", "sim.max_episode_steps=4"]
    rows = run(tmp_path / "run", *lake, f"agent.strategy={strategy}", "agent.last_turns=2", "agent.tools=[calculator]", "total_steps=40")
    last = rows[-1]
    assert len(rows) >= 2
    assert last["agent/tools/calculator/calls"] == 0.0, "a random model writes no call"
    assert last["train/log_prob_difference"] < 1e-4, "what is trained was sampled"
    assert last["train/tokens"] > 0
    prompts = [row["agent/prompt_tokens"] for row in rows]
    assert min(prompts) > 50, "the tools are told about"


def test_questions_and_programs_are_learned_from(tmp_path: Path) -> None:
    rows = run(tmp_path / "questions", "sim=questions", "sim.kwargs.attempts=2", "total_steps=8")
    assert rows[-1]["episode/length"] == 2.0
    rows = run(tmp_path / "code", "sim=code_tasks", "sim.kwargs.sandbox=prlimit", "sim.kwargs.timeout_s=20", "total_steps=4")
    assert rows[-1]["episode/success"] == 0.0
    assert rows[-1]["groups/failed"] == 0.0


def test_an_episode_that_nobody_could_judge_is_played_again(tmp_path: Path) -> None:
    def judge(exchange: Exchange) -> None:
        if exchange.number == 1:
            exchange.json({"error": "not now"}, 400)
        else:
            text = f"<score>{exchange.number % 2}</score>"
            exchange.json({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    path = tmp_path / "judged.jsonl"
    path.write_text('{"question": "Why?", "reference": "Because."}\n', encoding="utf-8")
    server = TokenServer(judge)
    try:
        sim = ["sim=judged", f"sim.kwargs.path={path}", f"sim.kwargs.base_url={server.base_url}", "sim.kwargs.success_score=1"]
        rows = run(tmp_path / "run", *sim, "total_steps=4", "evaluation.num_episodes=1")
    finally:
        server.close()
    assert sum(row.get("agent/unscored", 0.0) * row["agent/turns"] for row in rows) == 1.0
    assert rows[-1]["groups/failed"] == 0.0, "its retry succeeded"
    # Four episodes a batch, one of them twice, and one of the evaluation.
    assert len(server.exchanges) == 4 * len(rows) + 2
