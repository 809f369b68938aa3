"""Answers that keep to a structure, drawn by a real model: what is sent, and what is captured for training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("xgrammar", reason="xgrammar is not installed")

import torch

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.serving.agents.app import AgentProxy
from embodied_rl.serving.agents.sessions import CapturedTurn
from tests.generation.constrained import ANSWERS, masked_log_prob
from tests.proxy.test_proxy import END, ask, chat, serving, user
from tests.proxy.test_proxy import folder as folder
from tests.proxy.test_streams import open_stream

MOVE = {
    "type": "object",
    "properties": {"direction": {"enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["direction", "steps"],
    "additionalProperties": False,
}
ENUM = {"enum": list(ANSWERS)}
TOOLS = [{"type": "function", "function": {"name": name, "description": "", "parameters": MOVE}} for name in ("walk", "turn")]


@pytest.fixture(scope="module")
def policy(folder: Path) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(model=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def proxy(policy: LanguagePolicy) -> Iterator[AgentProxy]:
    with serving(TorchTokens(policy.generation_model(), tokenizer=policy.tokenizer), policy.tokenizer, max_new_tokens=150) as proxy:
        yield proxy


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, "strict": True}}


def last_turn(proxy: AgentProxy, session: str) -> CapturedTurn:
    return proxy._book.sessions[session].captured().turns[-1]


def is_move(found: Any) -> bool:
    return set(found) == {"direction", "steps"} and found["direction"] in ("left", "right") and 1 <= found["steps"] <= 9


def test_an_answer_keeps_to_its_schema(proxy: AgentProxy) -> None:
    plain = chat(proxy, [user("Where?")], "schema", seed=1)["choices"][0]["message"]["content"]
    with pytest.raises(ValueError):
        json.loads(plain)  # the model says no JSON by itself
    for seed in range(6):
        (choice,) = chat(proxy, [user("Where?")], "schema", response_format=schema(MOVE), seed=seed)["choices"]
        assert choice["finish_reason"] == "stop"
        assert is_move(json.loads(choice["message"]["content"]))
    anything = {"response_format": {"type": "json_object"}, "seed": 3, "max_tokens": 20}
    texts = [
        chat(proxy, [user("Where?")], "schema", **{**anything, **more})["choices"][0]["message"]["content"]
        for more in ({}, {"response_format": schema({"type": "object"})})
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("{")


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}], ids=str
)
def test_what_is_captured_of_it(proxy: AgentProxy, policy: LanguagePolicy, sampling: dict[str, Any]) -> None:
    """`log_prob` is what training recomputes; both are those of the tokens that keep to the structure, held against a mask that is made by
    trying every token of the vocabulary."""
    key = f"captured-{sampling['temperature']}-{sampling.get('top_k')}"
    chat(proxy, [user("Where?")], key, response_format=schema(ENUM), seed=4, **sampling)
    turn = last_turn(proxy, key)
    assert turn.structure is not None
    sequence = TokenSequence.of(turn.prompt_ids, turn.sampled_ids, (), turn.structure, turn.stop_ids)
    with torch.no_grad():
        trained = policy.evaluate([sequence]).log_prob[0].numpy()
        ids = torch.from_numpy(turn.token_ids)[None]
        logits = policy.generation_model()(input_ids=ids).logits[0, len(turn.prompt_ids) - 1 : -1]
    np.testing.assert_allclose(trained[len(turn.prompt_ids) :][: len(turn.sampled_ids)], turn.log_prob, atol=1e-4)

    expected, _ = masked_log_prob(logits, turn.sampled_ids.tolist(), policy.tokenizer, stop=END)
    np.testing.assert_allclose(turn.log_prob, expected, atol=1e-4)
    temperature = 0.0 if sampling.get("top_k") == 1 else sampling["temperature"]
    expected, forced = masked_log_prob(logits, turn.sampled_ids.tolist(), policy.tokenizer, stop=END, temperature=temperature)
    np.testing.assert_allclose(turn.sampling_log_prob, expected, atol=1e-4)
    assert 0 < forced < len(turn.sampled_ids), "some tokens were the only ones left, and others were chosen"


@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
def test_a_call_that_must_be_made_is_made(proxy: AgentProxy, policy: LanguagePolicy, named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "turn"}} if named else "required"
    names = set()
    for seed in range(8):
        answer = chat(proxy, [user("Where?")], f"call-{named}", tools=TOOLS, tool_choice=choice, seed=seed, temperature=3.0)["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        (call,) = answer["message"]["tool_calls"]
        assert is_move(json.loads(call["function"]["arguments"]))
        names.add(call["function"]["name"])
        turn = last_turn(proxy, f"call-{named}")
        begun = '<tool_call>\n{"name": ' + ('"turn", "arguments":' if named else '"')
        assert turn.prompt_ids.tolist() == [*policy.tokenizer.chat([user("Where?")], tools=TOOLS), *policy.tokenizer.encode(begun)]
    assert names == ({"turn"} if named else {"turn", "walk"})


def test_a_schema_beside_tools_is_an_answer_or_a_call(proxy: AgentProxy) -> None:
    kinds = set()
    for seed in range(12):
        answer = chat(proxy, [user("?")], "both", tools=TOOLS, response_format=schema(ENUM), seed=seed, parallel_tool_calls=False)
        choice = answer["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            assert is_move(json.loads(call["function"]["arguments"]))
        else:
            assert json.loads(choice["message"]["content"]) in ENUM["enum"]
    assert kinds == {"stop", "tool_calls"}


def test_a_stream_says_the_same(proxy: AgentProxy) -> None:
    asked = {"response_format": schema(MOVE), "seed": 11, "max_tokens": 150}
    whole = chat(proxy, [user("Where?")], "other", **asked)["choices"][0]["message"]["content"]
    connection, events = open_stream(proxy, **asked)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    connection.close()
    assert "".join(pieces) == whole
    assert is_move(json.loads(whole))


def test_the_likeliest_tokens(proxy: AgentProxy, policy: LanguagePolicy) -> None:
    asked = {"logprobs": True, "top_logprobs": 4, "seed": 2, "max_tokens": 6}
    told = chat(proxy, [user("Where?")], "top", **asked)["choices"][0]["logprobs"]["content"]
    turn = last_turn(proxy, "top")
    with torch.no_grad():
        logits = policy.generation_model()(input_ids=torch.from_numpy(turn.token_ids)[None]).logits[0, len(turn.prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).topk(4)
    assert len(told) == len(turn.sampled_ids) == 6
    for place, entry in enumerate(told):
        assert entry["logprob"] == pytest.approx(turn.log_prob[place], abs=1e-6)
        np.testing.assert_allclose([one["logprob"] for one in entry["top_logprobs"]], expected.values[place], atol=1e-4)
        texts = [policy.tokenizer.decode([token], skip_special_tokens=False) for token in expected.indices[place].tolist()]
        assert [one["token"] for one in entry["top_logprobs"]] == texts


def test_a_schema_that_cannot_be_kept_to_is_refused_in_a_line(proxy: AgentProxy) -> None:
    status, answer = ask(proxy, "/chat/completions", {"messages": [user("x")], "response_format": schema({"type": "robot"})})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert answer["error"]["message"] == 'The structure of an answer cannot be compiled: Unsupported type "robot"'
    large = {"enum": ["x" * 1000] * 300}
    status, answer = ask(proxy, "/chat/completions", {"messages": [user("x")], "response_format": schema(large)})
    assert status == 400
    assert "this server takes 262,144" in answer["error"]["message"]
    status, answer = ask(proxy, "/chat/completions", {"messages": [user("x")], "response_format": schema({"$ref": "#"})})
    assert status == 400
    assert "no text satisfies it" in answer["error"]["message"]
    # A stop text of one token does not keep that token out of the structure.
    (choice,) = chat(proxy, [user("x")], "stopped", response_format=schema(MOVE), stop=["}"], max_tokens=150)["choices"]
    assert is_move(json.loads(choice["message"]["content"] + "}"))
    chat(proxy, [user("x")], "after", max_tokens=2)


def test_a_backend_without_a_tokenizer_refuses(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model())
    assert not backend.can_constrain
    with pytest.raises(ValueError, match="made without a tokenizer"):
        backend.submit([GenerationRequest(request_id=1, prompt_ids=np.array([3]), max_new_tokens=2, structure="{}")])
