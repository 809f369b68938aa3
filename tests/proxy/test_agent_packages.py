"""Agent packages of others, unchanged, against the proxy: each in a folder of its own beside the environment (tests/neighbours/overlay.py).

Scripted answers show that a package's loop runs; a real model shows that what must keep to a schema does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.serving.agents.app import AgentProxy
from tests.neighbours.overlay import overlay, run_with
from tests.proxy.test_proxy import END, says, serving
from tests.proxy.test_proxy import folder as folder
from tests.proxy.test_proxy import tokenizer as tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LANGCHAIN = (
    "langchain==1.4.7",
    "langchain-core==1.7.2",
    "langchain-openai==1.7.3",
    "langchain-protocol==0.0.20",
    "langgraph==1.2.22",
    "langgraph-checkpoint==4.3.2",
    "langgraph-prebuilt==1.1.2",
    "langgraph-sdk==0.4.14",
    "langsmith==0.15.0",
    "jsonpatch==1.47",
    "jsonpointer==3.12",
    "orjson==3.13.0",
    "ormsgpack==1.13.1",
    "requests-toolbelt==1.0.0",
    "tenacity==9.2.1",
    "uuid_utils==0.19.0",
    "zstandard==0.25.0",
)
SMOLAGENTS = ("smolagents==1.26.0",)
OPENAI_AGENTS = ("openai-agents==0.24.0", "griffelib==2.4.1", "websockets==16.1.1")
LITELLM = ("litellm==1.106.2", "openai==2.54.0", "fastuuid==0.14.0", "importlib_metadata==8.9.0", "huggingface_hub==1.33.0")
HEAD = "import json, sys\nbase_url = sys.argv[2]\n"
FROM_FILE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Packages read the source of the functions that they make tools of."""


def sampled(proxy: AgentProxy, tokenizer: ChatTokenizer) -> list[str]:
    """The texts of the session's captured tokens."""
    turns = proxy._book.sessions["agent"].captured().turns
    return [tokenizer.decode([token for token in turn.sampled_ids if token != END]) for turn in turns]


def played(packages: tuple[str, ...], proxy: AgentProxy, program: str) -> Any:
    """What an agent's program prints in its last line, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(HEAD + program)
        printed = run_with(overlay(*packages), FROM_FILE, str(file), proxy.base_url, timeout_s=600.0)
    return json.loads(printed.strip().splitlines()[-1])


@contextmanager
def a_model(folder: Path) -> Iterator[AgentProxy]:
    """A tiny random model behind the proxy: what it says makes sense only where it must."""
    policy = build_language_policy(LanguageConfig(model=str(folder), dtype="float32"))
    with serving(TorchTokens(policy.generation_model(), tokenizer=policy.tokenizer), policy.tokenizer, max_new_tokens=150) as proxy:
        yield proxy


# ---- LangChain ------------------------------------------------------------------------------------------------------

LANGCHAIN_MODEL = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="tiny", base_url=base_url, api_key="agent", temperature=1.0, max_retries=0)
"""

REACT = (
    LANGCHAIN_MODEL
    + """
# The ReAct loop of its documentation: think, act, see, until there is an answer.
from langchain_core.prompts import PromptTemplate
chain = PromptTemplate.from_template("Where is the {what}?\\n{scratchpad}") | model.bind(stop=["Observation:"])
scratchpad, answers = "", []
while "Final Answer:" not in scratchpad and len(answers) < 4:
    answer = chain.invoke({"what": "cup", "scratchpad": scratchpad})
    answers.append([answer.content, answer.response_metadata["finish_reason"]])
    scratchpad += answer.content
    if "Action:" in answer.content:
        scratchpad += "Observation: the cup is on the table\\n"
streamed = "".join(str(piece.content) for piece in model.stream("Where?", stop=["Observation:"]))
print(json.dumps([answers, streamed]))
"""
)


def test_langchain_reacts_until_its_observation(tokenizer: ChatTokenizer) -> None:
    act, final = "Thought: look\nAction: go\nObservation: I dreamt it", "Thought: I see\nFinal Answer: the table"
    with serving(says(tokenizer, act, final, act), tokenizer) as proxy:
        answers, streamed = played(LANGCHAIN, proxy, REACT)
        assert answers == [["Thought: look\nAction: go\n", "stop"], [final, "stop"]]
        assert streamed == "Thought: look\nAction: go\n"
        assert sampled(proxy, tokenizer) == ["Thought: look\nAction: go\nObservation:", final, "Thought: look\nAction: go\nObservation:"]


LANGCHAIN_AGENT = (
    LANGCHAIN_MODEL
    + """
from langchain.agents import create_agent
from langchain_core.tools import tool

@tool
def double(number: int) -> int:
    "Twice a number."
    return 2 * number

found = create_agent(model, [double]).invoke({"messages": [{"role": "user", "content": "How much is twice 21?"}]})
print(json.dumps([[one.type, one.content] for one in found["messages"]]))
"""
)


def test_langchains_agent_calls_a_tool(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    with serving(says(tokenizer, call, "It is 42."), tokenizer) as proxy:
        messages = played(LANGCHAIN, proxy, LANGCHAIN_AGENT)
        assert messages == [["human", "How much is twice 21?"], ["ai", ""], ["tool", "42"], ["ai", "It is 42."]]
        assert [turn.parent for turn in proxy._book.sessions["agent"].captured().turns] == [None, 0]


STRUCTURED = (
    LANGCHAIN_MODEL
    + """
from typing import Literal
from pydantic import BaseModel, Field

class Move(BaseModel):
    "A move."
    direction: Literal["left", "right"]
    steps: int = Field(ge=1, le=9)

found = [model.with_structured_output(Move, method=method).invoke("Where?") for method in ("json_schema", "function_calling")]
assert all(isinstance(one, Move) for one in found), found
print(json.dumps([one.model_dump() for one in found]))
"""
)


def test_langchains_structured_output_from_a_random_model(folder: Path) -> None:
    with a_model(folder) as proxy:
        assert len(played(LANGCHAIN, proxy, STRUCTURED)) == 2
        assert proxy._book.sessions["agent"].num_turns == 2


# ---- smolagents -----------------------------------------------------------------------------------------------------

SMOL = """
import smolagents

@smolagents.tool
def double(number: int) -> int:
    '''Twice a number.

    Args:
        number: it.
    '''
    return 2 * number

model = smolagents.OpenAIServerModel("tiny", api_base=base_url, api_key="agent")
agent = getattr(smolagents, KIND)([double], model, verbosity_level=0)
print(json.dumps([agent.run("How much is twice 21?"), [str(step.observations) for step in agent.memory.steps[1:]]]))
"""


def test_smolagents_calls_tools(tokenizer: ChatTokenizer) -> None:
    said = [
        'double", "arguments": {"number": 21}}\n</tool_call>\nObservation: I dreamt it',
        'final_answer", "arguments": {"answer": "42"}}\n</tool_call>',
    ]
    with serving(says(tokenizer, *said), tokenizer) as proxy:
        answer, observations = played(SMOLAGENTS, proxy, "KIND = 'ToolCallingAgent'\n" + SMOL)
        assert (answer, observations[0]) == ("42", "42")
        assert sampled(proxy, tokenizer)[0].endswith("Observation:"), "cut behind the stop text"


def test_smolagents_writes_code(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "Thought: easy\n<code>\nfinal_answer(double(21))\n</code>\nObservation: no"), tokenizer) as proxy:
        assert played(SMOLAGENTS, proxy, "KIND = 'CodeAgent'\n" + SMOL)[0] == 42
        assert len(sampled(proxy, tokenizer)) == 1


# ---- openai-agents --------------------------------------------------------------------------------------------------

AGENTS = """
import asyncio
from typing import Literal
from openai import AsyncOpenAI
from pydantic import BaseModel
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=base_url, api_key="agent", max_retries=0)
model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[KIND]("tiny", client)

@function_tool
def double(number: int) -> int:
    "Twice a number."
    return 2 * number

class Move(BaseModel):
    direction: Literal["left", "right"]
"""

AGENTS_TOOL = (
    AGENTS
    + """
async def main():
    agent = Agent(name="Counter", instructions="Count.", model=model, tools=[double])
    whole = await Runner.run(agent, "How much is twice 21?")
    again = await Runner.run(agent, whole.to_input_list() + [{"role": "user", "content": "And now?"}])
    streamed = Runner.run_streamed(agent, "How much is twice 21?")
    kinds = [event.type async for event in streamed.stream_events()]
    print(json.dumps([whole.final_output, again.final_output, streamed.final_output, "raw_response_event" in kinds]))

asyncio.run(main())
"""
)

AGENTS_MOVE = (
    AGENTS
    + """
agent = Agent(name="Mover", instructions="Move.", model=model, output_type=Move)
found = asyncio.run(Runner.run(agent, "Where?")).final_output
assert isinstance(found, Move)
print(json.dumps(found.model_dump()))
"""
)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_calls_a_tool(tokenizer: ChatTokenizer, kind: str) -> None:
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    with serving(says(tokenizer, call, "It is 42.", "Still.", call, "It is 42."), tokenizer) as proxy:
        assert played(OPENAI_AGENTS, proxy, f"KIND = {kind!r}\n" + AGENTS_TOOL) == ["It is 42.", "Still.", "It is 42.", True]
        turns = proxy._book.sessions["agent"].captured().turns
        assert [turn.parent for turn in turns] == [None, 0, 1, None, 3]


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_output_type_from_a_random_model(folder: Path, kind: str) -> None:
    with a_model(folder) as proxy:
        assert played(OPENAI_AGENTS, proxy, f"KIND = {kind!r}\n" + AGENTS_MOVE)["direction"] in ("left", "right")


# ---- litellm --------------------------------------------------------------------------------------------------------

LITE = """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
found = []
asked = [{"role": "user", "content": "How much?"}]
for model, base in (("openai/tiny", base_url), ("anthropic/tiny", base_url.removesuffix("/v1"))):
    common = {"model": model, "api_base": base, "api_key": "agent", "max_tokens": 200, "tools": [tool]}
    called = litellm.completion(messages=asked, **common).choices[0].message
    (call,) = called.tool_calls
    history = [*asked, called.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    said = litellm.completion(messages=history, **common).choices[0].message.content
    pieces = litellm.completion(messages=[*asked, {"role": "user", "content": "again"}], stream=True, stop=[" and"], **common)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    found.append([call.function.name, json.loads(call.function.arguments), said, streamed])
print(json.dumps(found))
"""


def test_litellm_speaks_both_interfaces(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    with serving(says(tokenizer, call, "three", "left and right"), tokenizer) as proxy:
        assert played(LITELLM, proxy, LITE) == [["add", {"a": 1}, "three", "left"]] * 2
        assert [turn.parent for turn in proxy._book.sessions["agent"].captured().turns] == [None, 0, None] * 1 + [None, 3, None]


# ---- the client itself ----------------------------------------------------------------------------------------------


def test_fifty_sessions_at_once_through_openais_client(folder: Path) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with a_model(folder) as proxy:

        def play(number: int) -> list[str]:
            with openai.OpenAI(base_url=proxy.base_url, api_key=f"agent-{number}", max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": f"go {number}"}]
                for turn in range(3):
                    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=turn, temperature=0.7)
                    messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and now?"}]
                return [one["content"] for one in messages[1::2]]

        with ThreadPoolExecutor(50) as threads:
            answers = list(threads.map(play, range(50)))
        for number, said in enumerate(answers):
            (row,) = proxy._book.sessions[f"agent-{number}"].captured().trajectories()
            assert (len(said), len(row.turns)) == (3, 3)
        assert play(7) == answers[7], "what a session is answered does not depend on the others"
