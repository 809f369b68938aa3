"""Tools in agents' turns: real simulator processes, real tools, and answers by a script."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.parsing import InvalidAction, ParsedAction, ToolRequest
from embodied_rl.agents.tools.base import Tool, Toolbox, text_schema
from embodied_rl.agents.turns import AgentEpisode, rows_of
from embodied_rl.config import ToolsConfig
from embodied_rl.generation.tokens import GenerationRequest, RandomTokens, ScriptedTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.tiny_language import make_tiny_model
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.text import frozenlake
from tests.agents.samples import LAKE, PLAIN, WORDS, collect, make_collector

CORPUS = '{"title": "lake", "text": "the goal is the letter G"}\n'
MCP_SERVER = Path(__file__).resolve().parents[1] / "agents" / "mcp_server.py"


@pytest.fixture(scope="module")
def lake() -> Iterator[EnvManager]:
    with EnvManager(LAKE, 4, num_workers=1, autoreset=False) as manager:
        yield manager


def make_agent(folder: Path, strategy: Any = "full", **options: Any) -> Agent:
    tools = options.pop("tools", ("calculator",))
    tool_options = ToolsConfig(describe=False, python_timeout_s=240.0, **options)
    config = dataclasses.replace(PLAIN, strategy=strategy, invalid_penalty=0.5, tools=tools, tool_options=tool_options, max_new_tokens=400)
    # Bytes: any text can be written.
    return Agent(config, ChatTokenizer.read(make_tiny_model(folder / "model", [])), instruction=None, max_context=8192)


def call(name: str, **arguments: Any) -> str:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{pairs}}}}}</tool_call>'


def scripted(agent: Agent, answer: Callable[[str], str]) -> ScriptedTokens:
    """Answers with what a function makes of the text that is to be answered: an observation, or a tool's result."""

    def script(request: GenerationRequest) -> list[int]:
        assert request.messages is not None
        text = answer(str(request.messages[-1]["content"]))
        return [*(int(token) for token in agent.tokenizer.encode(text)), *agent.stop_ids[:1]]

    return ScriptedTokens(script)


def episodes(collector: AgentCollector) -> list[AgentEpisode]:
    return [episode for group in collect(collector) for episode in group.episodes if isinstance(episode, AgentEpisode)]


@pytest.mark.parametrize("strategy", ["full", "memory"])
def test_calls_are_turns_of_their_own_without_a_reward_and_what_is_trained_was_sampled(
    lake: EnvManager, tmp_path: Path, strategy: str
) -> None:
    agent = make_agent(tmp_path, strategy)

    seen: list[str] = []

    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return frozenlake.player(seen[-1])
        seen.append(text)
        return call("calculator", expression="6 * 7")

    with EnvManager(LAKE, 1, num_workers=1, autoreset=False) as single:
        collector = make_collector(single, agent, scripted(agent, answer), group_size=1, groups_per_step=2)
        played = episodes(collector)
    figures = collector.figures()
    agent.close()
    assert len(played) == 2
    for episode in played:
        assert episode.success
        kinds = [isinstance(turn.parsed, ToolRequest) for turn in episode.turns]
        assert kinds == [True, False] * (len(kinds) // 2)
        assert [turn.reward for turn in episode.turns[::2]] == [0.0] * (len(kinds) // 2)
        assert episode.action[::2].tolist() == [""] * (len(kinds) // 2)
        assert {turn.observation for turn in episode.turns[1::2]} == {"<tool_response>\n42\n</tool_response>"}
        rows = rows_of(episode.turns)
        assert len(rows) == (1 if strategy == "full" else len(kinds) // 2), "a call and the answer behind it are one row"
        sampled = np.concatenate([row.token_ids[row.mask] for row in rows])
        np.testing.assert_array_equal(sampled, np.concatenate([turn.token_ids for turn in episode.turns]))
        for row in rows:
            given = agent.tokenizer.decode(row.token_ids[~row.mask])
            assert "<tool_response>\n42\n</tool_response>" in given, "a tool's words are read, and never learned"
            assert "<tool_call>" not in given
    num_calls = sum(len(episode.turns) // 2 for episode in played)
    assert figures["tools/calculator/calls"] == num_calls
    assert figures["tool_turns"] == 0.5
    assert figures["invalid"] == 0.0


def test_in_lockstep_no_request_is_in_flight_between_two_rounds(lake: EnvManager, tmp_path: Path) -> None:
    """A host that samples in a process of its own would let those of other domains join it at a step that the clock decides."""
    agent = make_agent(tmp_path)
    backend = scripted(agent, lambda text: "up" if "<tool_response>" in text else call("calculator", expression="1 + 1"))
    collector = make_collector(lake, agent, backend, group_size=2, groups_per_step=2)
    for _ in range(6):
        assert collector.pump()
        assert not collector._requests
    assert collector.figures()["tool_turns"] == 0.5
    agent.close()


def test_an_agent_that_only_calls_runs_out_of_calls_and_the_game_goes_on(lake: EnvManager, tmp_path: Path) -> None:
    agent = make_agent(tmp_path, max_calls_per_turn=2, max_calls=3)
    collector = make_collector(lake, agent, scripted(agent, lambda text: call("nothing")), group_size=1, groups_per_step=1)
    (episode,) = episodes(collector)
    agent.close()
    told = [_kind(turn.parsed) for turn in episode.turns]
    # Two calls and no action; the one call that is left and no action; then no action in all the other steps of the 16.
    assert told == ["call", "call", "tool_limit", "call", *["tool_limit"] * 15]
    assert episode.episode_return == -0.5 * 16
    figures = collector.figures()
    assert figures["tools/unknown"] == 3.0
    assert figures["invalid_tool_limit"] == 16 / 19


def _kind(parsed: ParsedAction) -> str:
    return "call" if isinstance(parsed, ToolRequest) else parsed.reason if isinstance(parsed, InvalidAction) else "action"


def test_all_configured_tools_work_in_turns(lake: EnvManager, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(CORPUS, encoding="utf-8")
    servers = ({"command": [sys.executable, str(MCP_SERVER)]},)
    tools = ("calculator", "search", "python", "mcp")
    agent = make_agent(tmp_path, tools=tools, corpus=str(corpus), mcp=servers, python_network=True, max_calls_per_turn=8)
    assert agent.tools is not None
    names = [schema["function"]["name"] for schema in agent.tools.schemas()]
    assert names[:3] == ["calculator", "search", "python"]
    assert len(names) > 3, "the server's own"
    calls = call("calculator", expression="2 ** 5") + call("search", query="goal") + call("python", code="print(sum(range(5)))")

    def answer(text: str) -> str:
        return "up" if "<tool_response>" in text else calls

    collector = make_collector(lake, agent, scripted(agent, answer), group_size=1, groups_per_step=1)
    (episode,) = episodes(collector)
    agent.close()
    first = episode.turns[1].observation
    assert "<tool_response>\n32\n</tool_response>" in first
    assert "the goal is the letter G" in first
    assert "<tool_response>\n10\n" in first


class _Waits(Tool):
    """A tool that waits until others have got on; it says by whom it was released."""

    name, description, parameters = "wait", "", text_schema("x", "")

    def __init__(self) -> None:
        self.others_finished = threading.Event()

    def run(self, arguments: Mapping[str, Any]) -> str:
        return "others" if self.others_finished.wait(120) else "nobody"


def test_a_slow_tool_holds_up_no_other_episode(lake: EnvManager, tmp_path: Path) -> None:
    agent = make_agent(tmp_path)
    tool = _Waits()
    assert agent.tools is not None
    agent.close()
    agent.tools = Toolbox([tool], agent.config.tool_options)
    first: list[int] = []

    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return "up" if "others" in text else "down"
        if not first:  # the very first answer of all
            first.append(1)
            return call("wait")
        return "up"

    collector = make_collector(lake, agent, scripted(agent, answer), group_size=1, groups_per_step=4, min_ready=1)
    while (groups := collector.queue.take(0)) is None:
        assert collector.pump(0.05)
        if collector.queue.episode_counts().accepted == 3:
            tool.others_finished.set()
    agent.close()
    used = [e for group in groups for e in group.episodes if isinstance(e, AgentEpisode) and isinstance(e.turns[0].parsed, ToolRequest)]
    assert len(used) == 1
    assert used[0].turns[1].observation == "<tool_response>\nothers\n</tool_response>"


def test_evaluation_uses_tools_too(lake: EnvManager, tmp_path: Path) -> None:
    agent = make_agent(tmp_path)
    last: dict[str, str] = {}

    def answer(text: str) -> str:
        if "<tool_response>" in text:
            assert text == "<tool_response>\n42\n</tool_response>"
            return frozenlake.player(last["board"])
        last["board"] = text.strip()
        return call("calculator", expression="6 * 7")

    with EnvManager(LAKE, 1, num_workers=1) as single:
        generator = AgentGenerator(agent, scripted(agent, answer))
        played = evaluate(single, generator, 3)
    assert all(episode.success_once for episode in played)
    assert agent.tools is not None
    assert agent.tools.figures()["tools/calculator/calls"] == sum(episode.length for episode in played)
    generator.close()


def test_lockstep_is_repeatable_whatever_the_tools_take(lake: EnvManager, tmp_path: Path) -> None:
    """Answers by chance, some of which run programs; the same seeds give the same episodes, token by token."""
    programs = call("python", code="print(2)") + call("calculator", expression="1 + 1")
    answers = [*WORDS, programs, call("calculator", expression="7 * 7")]
    played = []
    for _ in range(2):
        agent = make_agent(tmp_path, tools=("calculator", "python"), python_network=True, max_calls_per_turn=2)
        choices = [[*(int(token) for token in agent.tokenizer.encode(text)), *agent.stop_ids[:1]] for text in answers]
        collector = make_collector(lake, agent, RandomTokens(choices=choices), group_size=2, groups_per_step=2)
        groups = collect(collector)
        agent.close()
        played.append(
            [
                [(turn.observation, turn.token_ids.tolist(), turn.reward, turn.prompt_ids.tolist()) for turn in episode.turns]
                for group in groups
                for episode in group.episodes
                if isinstance(episode, AgentEpisode)
            ]
        )
    assert played[0] == played[1]
    assert any("<tool_response>\n2\n" in turn[0] for episode in played[0] for turn in episode)
