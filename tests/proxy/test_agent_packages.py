"""Agent packages of others, unchanged, against the proxy; each is skipped where it is not installed.

``pip install langchain-openai smolagents`` into an environment of its own runs them all.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from tests.proxy.test_proxy import END, says, serving
from tests.proxy.test_proxy import tokenizer as tokenizer

pytestmark = pytest.mark.slow


def sampled(proxy: Any, tokenizer: ChatTokenizer) -> list[str]:
    """The texts of the session's captured tokens."""
    turns = proxy._book.sessions["agent"].captured().turns
    return [tokenizer.decode([token for token in turn.sampled_ids if token != END]) for turn in turns]


def test_langchain_stops_at_an_observation(tokenizer: ChatTokenizer) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    with serving(says(tokenizer, "Thought: left\nAction: go\nObservation: I dreamt it"), tokenizer) as proxy:
        model = openai.ChatOpenAI(model="tiny", base_url=proxy.base_url, api_key="agent", temperature=1.0)
        answer = model.invoke("Where?", stop=["Observation:"])
        assert answer.content == "Thought: left\nAction: go\n"
        assert answer.response_metadata["finish_reason"] == "stop"
        streamed = "".join(str(piece.content) for piece in model.stream("Where?", stop=["Observation:"]))
        assert streamed == answer.content
        assert sampled(proxy, tokenizer) == ["Thought: left\nAction: go\nObservation:"] * 2


def test_langchain_calls_the_tool_that_it_must(tokenizer: ChatTokenizer) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from pydantic import BaseModel

    class Move(BaseModel):
        """A move."""

        direction: str

    rest = ' {"direction": "left"}}\n</tool_call>'
    with serving(says(tokenizer, rest), tokenizer) as proxy:
        model = openai.ChatOpenAI(model="tiny", base_url=proxy.base_url, api_key="agent")
        assert model.with_structured_output(Move, method="function_calling").invoke("Where?") == Move(direction="left")
        assert sampled(proxy, tokenizer) == [rest]


def test_smolagents_plays_with_tools_and_with_code(tokenizer: ChatTokenizer) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")

    @smolagents.tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: it.
        """
        return 2 * number

    said = [
        'double", "arguments": {"number": 21}}\n</tool_call>\nObservation: I dreamt it',
        'final_answer", "arguments": {"answer": "42"}}\n</tool_call>',
    ]
    with serving(says(tokenizer, *said), tokenizer) as proxy:
        model = smolagents.OpenAIServerModel("tiny", api_base=proxy.base_url, api_key="agent")
        agent = smolagents.ToolCallingAgent([double], model, verbosity_level=0)
        assert agent.run("How much is twice 21?") == "42"
        assert [step.observations for step in agent.memory.steps[1:2]] == ["42"]
        assert sampled(proxy, tokenizer)[0].endswith("Observation:"), "cut behind the stop text"
    with serving(says(tokenizer, "Thought: easy\n<code>\nfinal_answer(double(21))\n</code>\nObservation: no"), tokenizer) as proxy:
        model = smolagents.OpenAIServerModel("tiny", api_base=proxy.base_url, api_key="agent")
        assert smolagents.CodeAgent([double], model, verbosity_level=0).run("How much is twice 21?") == 42
        assert len(sampled(proxy, tokenizer)) == 1
