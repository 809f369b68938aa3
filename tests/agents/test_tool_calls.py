"""Tool calls in answers, budgets, and prompts that go on behind a tool's result with the very tokens that were sampled."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.agents.agent import Agent, Prompt
from embodied_rl.agents.parsing import AnyCall, InvalidAction, MalformedCall, ToolCall, ToolRequest, ValidAction, response_text, tool_calls
from embodied_rl.agents.tools.base import Tool, Toolbox, ToolBudget, text_schema
from embodied_rl.agents.tools.builtin import Calculator
from embodied_rl.config import AgentConfig, ToolsConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion
from tests.agents.toys import STOP, MergingTokenizer

SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("no call at all", ()),
        (f"Let me see.\n{SUM}", (ToolCall("calculator", {"expression": "6 * 7"}),)),
        (SUM + "x" + SUM, (ToolCall("calculator", {"expression": "6 * 7"}),) * 2),
        ('<tool_call>\n{"name": "x"}\n</tool_call>', (ToolCall("x", {}),)),
        ('<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', (ToolCall("x", {"a": 1}),)),
    ],
)
def test_calls_are_read(answer: str, calls: tuple[AnyCall, ...]) -> None:
    assert tool_calls(answer) == calls


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<tool_call>{}", "not closed"),
        ('<tool_call>{"name": "x"} <tool_call>{"name": "y"}</tool_call>', "not closed"),
        ("<tool_call>calculator(1)</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "must be an object"),
        ('<tool_call>{"name": ""}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "x", "arguments": "{"}</tool_call>', "the arguments of x are not JSON"),
        ('<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "the arguments of x must be an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>" + '{"name": "x", "arguments": {"a": %s}}' % ("[" * 300 + "]" * 300) + "</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON number"),
        ('<tool_call>{"name": "x", "arguments": "{\\"a\\": 1e999}"}</tool_call>', "out of range for a number"),
    ],
)
def test_calls_that_cannot_be_read_say_why(answer: str, reason: str) -> None:
    first = tool_calls(answer)[0]
    assert isinstance(first, MalformedCall)
    assert reason in first.reason


def test_a_budget_counts_calls_of_a_turn_and_of_an_episode() -> None:
    budget = ToolBudget(per_turn=2, episode=3)
    assert budget.left == 0, "no turn has begun"
    budget.begin_turn()
    assert (budget.spend(3), budget.left) == (2, 0)
    budget.begin_turn()
    assert (budget.spend(1), budget.left) == (1, 0)
    budget.begin_turn()
    assert budget.left == 0


def test_results_come_back_in_order_and_everything_is_counted() -> None:
    runner = Toolbox([Calculator()], ToolsConfig(max_calls_per_turn=4))
    try:
        budget = runner.budget()
        budget.begin_turn()
        calls = tool_calls(
            f'{SUM}<tool_call>{{"name": "calculater"}}</tool_call><tool_call>x</tool_call>'
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1 / 0"}}</tool_call>' + SUM
        )
        text = runner.start(calls, budget).result(60)
        parts = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
        assert parts[0] == "42"
        assert parts[1].startswith("error: there is no tool 'calculater'. Did you mean 'calculator'?")
        assert parts[2].startswith("error: the tool call is not JSON")
        assert parts[3] == "error: division by zero"
        assert parts[4] == "error: no tool call is left; answer without tools."
        figures = runner.figures()
        assert {name: value for name, value in figures.items() if not name.endswith("seconds")} == {
            "tools/calculator/calls": 2.0,
            "tools/calculator/failures": 1.0,
            "tools/unknown": 1.0,
            "tools/malformed": 1.0,
            "tools/over_limit": 1.0,
        }
        assert set(runner.figures().values()) == {0.0}, "counted since the last time"
    finally:
        runner.close()
        runner.close()


class _Meeting(Tool):
    """A tool whose calls end when four of them run at the same time."""

    name, description, parameters = "meet", "", text_schema("x", "")

    def __init__(self) -> None:
        self._barrier = threading.Barrier(4, timeout=60)

    def run(self, arguments: Mapping[str, Any]) -> str:
        self._barrier.wait()
        return "met"


def test_calls_of_different_episodes_run_side_by_side_and_none_is_lost_in_the_count() -> None:
    runner = Toolbox([_Meeting()], ToolsConfig(threads=4))
    try:
        budgets = [ToolBudget(1, 1, 1) for _ in range(4)]
        futures = [runner.start([ToolCall("meet", {})], budget) for budget in budgets]
        assert [future.result(60) for future in futures] == [response_text(["met"])] * 4
        assert runner.figures()["tools/meet/calls"] == 4.0
    finally:
        runner.close()


# ---- prompts --------------------------------------------------------------------------------------------------------

THOUGHT = np.array([ord(" "), ord("a"), ord("b"), ord(" "), STOP])
"""An answer that its text does not give again: "ab" is one token when tokenised, and the template strips spaces."""


def make(**options: Any) -> Agent:
    config = AgentConfig(**{"strategy": "full", "answer": "word", "template": "{observation}", "max_new_tokens": 8, **options})
    return Agent(config, MergingTokenizer(), instruction=None, max_context=4096)


def shown(prompt: object) -> str:
    assert isinstance(prompt, Prompt)
    return MergingTokenizer().decode(prompt.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("strategy", ["full", "last_k", "memory", "summarised"])
def test_a_tools_result_continues_the_prompt_with_the_sampled_tokens_themselves(strategy: str) -> None:
    conversation = make(strategy=strategy, last_turns=4 if strategy == "last_k" else 0).begin()
    first = conversation.prompt("one")
    assert isinstance(first, Prompt)
    second = conversation.tools_answered(THOUGHT, "<r>")
    assert isinstance(second, Prompt)
    whole = [*first.token_ids, *THOUGHT]
    assert second.token_ids[: len(whole)].tolist() == whole
    assert shown(first).endswith("one</s>\n<s>a:")
    assert shown(second) == shown(first) + " ab </s>\n<s>u:<r></s>\n<s>a:"
    third = conversation.tools_answered(THOUGHT, "<q>")
    assert isinstance(third, Prompt)
    assert third.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()
    conversation.answered(np.array([ord("x"), STOP]), "x", "x")
    following = shown(conversation.prompt("two"))
    if strategy in ("full", "last_k"):
        assert following == shown(third) + "x</s>\n<s>u:two</s>\n<s>a:"
    else:
        assert following == shown(first).replace("one", "two"), "what the tools gave belonged to the turn before"


def test_last_k_counts_turns_of_the_environment_and_keeps_the_question_that_tools_were_used_for() -> None:
    conversation = make(strategy="last_k", last_turns=0).begin()
    conversation.prompt("one")
    conversation.tools_answered(THOUGHT, "<r>")
    assert (
        shown(conversation.tools_answered(THOUGHT, "<q>"))
        == "<s>u:one</s>\n<s>a: ab </s>\n<s>u:<r></s>\n<s>a: ab </s>\n<s>u:<q></s>\n<s>a:"
    )


def test_the_same_prompt_as_chat_messages() -> None:
    agent = make(system="be brief")
    conversation = agent.begin()
    conversation.prompt("one")
    prompt = conversation.tools_answered(THOUGHT, "<r>")
    assert isinstance(prompt, Prompt)
    agent.writes_messages = True
    assert agent.request(0, prompt, "<r>", seed=None).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " ab "},
        {"role": "user", "content": "<r>"},
    )


def completion(text: str) -> Completion:
    return Completion.of(0, [5], [0.0], [0.0], [0], "stop", text=text)


def test_an_answer_with_calls_is_no_action_until_no_call_is_left() -> None:
    agent = make(tools=("calculator",), tool_options=ToolsConfig(max_calls_per_turn=1))
    try:
        budget = agent.budget()
        budget.begin_turn()
        assert agent.read(completion(SUM), budget).parsed == ToolRequest(tool_calls(SUM))
        assert agent.read(completion("up"), budget).parsed == ValidAction("up")
        budget.spend(1)
        assert agent.read(completion(SUM), budget).parsed == InvalidAction("tool_limit", SUM)
    finally:
        agent.close()
    plain = make()
    assert plain.read(completion(SUM)).parsed == ValidAction(SUM), "an agent without tools answers whatever it likes"


def test_the_prompt_says_what_tools_there_are_unless_it_is_told_not_to() -> None:
    agent = make(tools=("calculator",), system="Be brief.")
    text = shown(agent.begin().prompt("one"))
    assert '"name": "calculator"' in text
    assert text.index("<tools>") < text.index("Be brief.") < text.index("<s>u:one")
    silent = make(tools=("calculator",), tool_options=ToolsConfig(describe=False))
    assert "calculator" not in shown(silent.begin().prompt("one"))
    agent.close()
    silent.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tools": ("calculator", "calculator")}, "agent.tools must be different names"),
        ({"tools": ("search",)}, "agent.tool_options.corpus must be given"),
        ({"tools": ("mcp",)}, "agent.tool_options.mcp must be given"),
    ],
)
def test_tools_without_what_they_need_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        AgentConfig(**options)


@pytest.mark.parametrize(
    "server",
    [
        {"comand": ["x"]},
        {"command": "x y"},
        {"command": ["x"], "env": {"A": 1}},
        {"command": ["x"], "timeout_s": 0},
        {"command": ["x"], "timeout_s": 1e20},
    ],
)
def test_a_server_that_is_described_wrongly_is_refused(server: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"agent\.tool_options\.mcp\[0\]"):
        ToolsConfig(mcp=(server,))


def test_a_missing_corpus_is_told_before_anything_is_played(tmp_path: Path) -> None:
    config = AgentConfig(tools=("search",), tool_options=ToolsConfig(corpus=str(tmp_path / "none")))
    with pytest.raises(UserError, match="Corpus"):
        Agent(dataclasses.replace(config, chat=False), MergingTokenizer(), instruction=None, max_context=512)
