"""Anthropic's messages and OpenAI's responses through their own clients, unchanged."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
if not all(map(importlib.util.find_spec, ("anthropic", "openai"))):  # not imported yet: 1.5 s of every process that collects tests
    pytest.skip("anthropic or openai is not installed", allow_module_level=True)

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.tokens import ScriptedTokens
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.serving.agents.app import AgentProxy
from embodied_rl.serving.agents.sessions import CapturedTurn
from tests.proxy.test_proxy import END, says, serving, user
from tests.proxy.test_proxy import folder as folder
from tests.proxy.test_proxy import tokenizer as tokenizer
from tests.proxy.test_streams import LetterByLetter
from tests.proxy.test_structures import MOVE, is_move

CALL = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}


@contextmanager
def claude(proxy: AgentProxy, key: str = "agent") -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=proxy.base_url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
        yield client


@contextmanager
def gpt(proxy: AgentProxy, key: str = "agent") -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=proxy.base_url, api_key=key, max_retries=0) as client:
        yield client


def turns_of(proxy: AgentProxy, key: str = "agent") -> tuple[CapturedTurn, ...]:
    return proxy._book.sessions[key].captured().turns


def letters(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return [*(int(token) for letter in text for token in tokenizer.encode(letter)), END]


class Slow(LetterByLetter):
    """A token takes longer than a poll of the proxy's, so that each is told."""

    def _step(self) -> None:
        time.sleep(0.021)
        super()._step()


def growing(tokenizer: ChatTokenizer, text: str) -> LetterByLetter:
    """A backend whose answer comes a letter a poll."""
    backend = Slow(letters(tokenizer, text))
    for _ in range(4 * len(text) + 40):
        backend.allowed.release()
    return backend


# ---- Anthropic ------------------------------------------------------------------------------------------------------


def test_messages_are_answered_and_captured(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left", "go right, then left"), tokenizer) as proxy, claude(proxy) as client:
        asked: list[Any] = [user("Where?")]
        answer = client.messages.create(model="tiny", max_tokens=50, system="Answer with one move.", messages=asked)
        assert [block.text for block in answer.content] == ["go left"]
        assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
        prompt = tokenizer.chat([{"role": "system", "content": "Answer with one move."}, *asked])
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 8)
        assert turns_of(proxy)[0].prompt_ids.tolist() == prompt.tolist()
        asked += [{"role": "assistant", "content": answer.content}, user("And now?")]
        again = client.messages.create(
            model="tiny", max_tokens=50, system="Answer with one move.", messages=asked, stop_sequences=[", then"]
        )
        assert (again.content[0].text, again.stop_reason, again.stop_sequence) == ("go right", "stop_sequence", ", then")
        first, second = turns_of(proxy)
        assert second.parent == 0
        assert (first.completion_id, second.completion_id) == (answer.id, again.id)
        assert second.sampled_ids.tolist() == letters(tokenizer, "go right, then")[:-1]
        counted = client.messages.count_tokens(model="tiny", system="Answer with one move.", messages=asked[:1])
        assert counted.input_tokens == len(prompt)
        cut = client.messages.create(model="tiny", max_tokens=2, messages=[user("x")])
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        one = client.messages.create(model="tiny", max_tokens=50, messages=[user("y")], stop_sequences=["never", "h"])  # one token
        assert (one.content[0].text, one.stop_reason, one.stop_sequence) == ("go rig", "stop_sequence", "h")
        assert len(turns_of(proxy)) == 4, "counting samples nothing"


def test_messages_with_tools(tokenizer: ChatTokenizer) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    with serving(says(tokenizer, CALL, "three"), tokenizer) as proxy, claude(proxy) as client:
        asked: list[Any] = [user("1+2?")]
        answer = client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=[tool])
        said, call = answer.content
        assert (said.text, call.name, call.input, answer.stop_reason) == ("Let me see.", "add", {"a": 1, "b": 2}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        asked += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=[tool])
        assert last.content[0].text == "three"
        first, second = turns_of(proxy)
    offered = [{"type": "function", "function": ADD}]
    assert first.prompt_ids.tolist() == tokenizer.chat([user("1+2?")], tools=offered).tolist()
    assert second.parent == 0, "the call and its result go on with the tokens that were sampled"
    assert second.prompt_ids.tolist() == [*first.token_ids, *tokenizer.encode("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")]


@pytest.mark.parametrize("text", [CALL, "go left, and then right", ""], ids=["call", "text", "nothing"])
def test_a_message_grows_to_the_whole_one(tokenizer: ChatTokenizer, text: str) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    with serving(growing(tokenizer, text), tokenizer) as proxy, claude(proxy) as client:
        with client.messages.stream(model="tiny", max_tokens=200, messages=[user("?")], tools=[tool]) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert "".join(pieces) == text.partition(" <tool")[0]
        assert len(pieces) > 3 or not text, "it came in pieces"
        blocks = [block for block in final.content if block.type == "tool_use"]
        assert [(block.name, block.input) for block in blocks] == ([("add", {"a": 1, "b": 2})] if text == CALL else [])
        assert final.stop_reason == ("tool_use" if text == CALL else "end_turn")
        (turn,) = turns_of(proxy)
        assert (final.usage.input_tokens, final.usage.output_tokens) == (len(turn.prompt_ids), len(turn.sampled_ids))
        assert final.id == turn.completion_id


def test_messages_are_refused_in_anthropics_form(tokenizer: ChatTokenizer) -> None:
    import anthropic

    with serving(says(tokenizer, "x"), tokenizer) as proxy, claude(proxy) as client:
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
        for change, kind, part in (
            ({"model": "claude"}, anthropic.NotFoundError, "'claude' is not served here"),
            ({"messages": [{"role": "user", "content": [picture]}]}, anthropic.BadRequestError, "blocks of type 'image'"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, anthropic.BadRequestError, "'thinking' can only be"),
            ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "there are no 'tools'"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "only client-defined tools"),
        ):
            with pytest.raises(kind) as caught:
                client.messages.create(**{"model": "tiny", "max_tokens": 5, "messages": [user("x")], **change})
            assert part in caught.value.body["error"]["message"]
        with pytest.raises(anthropic.APIStatusError) as caught:  # what the server refuses before any interface reads it
            client.messages.create(model="tiny", max_tokens=5, messages=[user("x" * 5_000_000)])
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")
        assert proxy._book.sessions["agent"].num_turns == 0


# ---- Responses ------------------------------------------------------------------------------------------------------


def test_responses_are_answered_and_captured(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left", "go right"), tokenizer) as proxy, gpt(proxy) as client:
        answer = client.responses.create(model="tiny", instructions="Answer with one move.", input="Where?", store=True)
        assert (answer.output_text, answer.status, answer.error) == ("go left", "completed", None)
        system = {"role": "system", "content": "Answer with one move."}
        prompt = tokenizer.chat([system, user("Where?")])
        assert turns_of(proxy)[0].prompt_ids.tolist() == prompt.tolist()
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 8)
        # What was said before, by its id, or item by item: both go on with the tokens that were sampled.
        named = client.responses.create(
            model="tiny", instructions="Answer with one move.", input="And now?", previous_response_id=answer.id
        )
        items = [user("Where?"), *[item.model_dump() for item in answer.output], user("And now?")]
        listed = client.responses.create(model="tiny", instructions="Answer with one move.", input=items)
        first, second, third = turns_of(proxy)
        assert [turn.completion_id for turn in turns_of(proxy)] == [answer.id, named.id, listed.id]
        assert (second.parent, third.parent) == (0, 0)
        assert second.prompt_ids.tolist() == third.prompt_ids.tolist()
        assert second.prompt_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
        # Without them, the former instructions are not handed on.
        client.responses.create(model="tiny", input="?", previous_response_id=answer.id)
        bare = tokenizer.chat([user("Where?"), {"role": "assistant", "content": "go left"}, user("?")])
        assert turns_of(proxy)[3].prompt_ids.tolist() == bare.tolist()
        cut = client.responses.create(model="tiny", input="x", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        told = client.responses.create(model="tiny", input="x", include=["message.output_text.logprobs"])
        assert [one.logprob for one in told.output[0].content[0].logprobs] == [0.0] * told.usage.output_tokens


def test_responses_with_tools(tokenizer: ChatTokenizer) -> None:
    tool = {"type": "function", **ADD, "strict": False}
    with serving(says(tokenizer, CALL, "three"), tokenizer) as proxy, gpt(proxy) as client:
        answer = client.responses.create(model="tiny", input=[user("1+2?")], tools=[tool])
        message, call = answer.output
        assert (message.content[0].text, call.type, call.name) == ("Let me see.", "function_call", "add")
        assert json.loads(call.arguments) == {"a": 1, "b": 2}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [user("1+2?"), *[item.model_dump() for item in answer.output], result]
        assert client.responses.create(model="tiny", input=items, tools=[tool]).output_text == "three"
        assert client.responses.create(model="tiny", input=[result], tools=[tool], previous_response_id=answer.id)
        first, second, third = turns_of(proxy)
    assert first.prompt_ids.tolist() == tokenizer.chat([user("1+2?")], tools=[{"type": "function", "function": ADD}]).tolist()
    assert (second.parent, third.parent) == (0, 0)
    added = tokenizer.encode("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids.tolist() == third.prompt_ids.tolist() == [*first.token_ids, *added]


@pytest.mark.parametrize("text", [CALL, "go left, and then right", ""], ids=["call", "text", "nothing"])
def test_a_response_grows_to_the_whole_one(tokenizer: ChatTokenizer, text: str) -> None:
    """The client puts the events together itself, and refuses those that do not fit."""
    tool = {"type": "function", **ADD, "strict": False}
    with serving(growing(tokenizer, text), tokenizer) as proxy, gpt(proxy) as client:
        with client.responses.stream(model="tiny", input="?", tools=[tool]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == final.output_text == text.partition(" <tool")[0]
        assert len(pieces) > 3 or not text
        calls = [(item.name, json.loads(item.arguments)) for item in final.output if item.type == "function_call"]
        assert calls == ([("add", {"a": 1, "b": 2})] if text == CALL else [])
        done = [event.item.model_dump() for event in events if event.type == "response.output_item.done"]
        strip = lambda item: {name: item[name] for name in ("id", "type", "status")}  # noqa: E731
        assert [strip(item) for item in done] == [strip(item.model_dump()) for item in final.output]
        assert final.usage.output_tokens == len(turns_of(proxy)[0].sampled_ids)


def test_responses_are_refused_in_openais_form(tokenizer: ChatTokenizer) -> None:
    import openai

    with serving(says(tokenizer, "x"), tokenizer) as proxy, gpt(proxy) as client:
        for change, kind, part in (
            ({"model": "gpt"}, openai.NotFoundError, "'gpt' is not served here"),
            ({"previous_response_id": "resp_1"}, openai.NotFoundError, "no answer 'resp_1'"),
            ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "can only be functions"),
            ({"background": True}, openai.BadRequestError, "'background' can only be False"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "items of type 'item_reference'"),
        ):
            with pytest.raises(kind) as caught:
                client.responses.create(**{"model": "tiny", "input": "x", **change})
            assert part in str(caught.value)
        assert proxy._book.sessions["agent"].num_turns == 0


# ---- with a model ---------------------------------------------------------------------------------------------------


def test_schemas_through_both_clients(folder: Path) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    policy = build_language_policy(LanguageConfig(model=str(folder), dtype="float32"))
    backend = TorchTokens(policy.generation_model(), tokenizer=policy.tokenizer)
    with serving(backend, policy.tokenizer, max_new_tokens=150) as proxy:
        with claude(proxy) as client:
            form = {"format": {"type": "json_schema", "schema": MOVE}}
            answer = client.messages.create(model="tiny", max_tokens=150, messages=[user("?")], output_config=form)
            assert is_move(json.loads(answer.content[0].text))
            tool = {"name": "walk", "description": "", "input_schema": MOVE}
            called = client.messages.create(model="tiny", max_tokens=150, messages=[user("?")], tools=[tool], tool_choice={"type": "any"})
            assert is_move(called.content[0].input)
        with gpt(proxy) as client:
            text: Any = {"format": {"type": "json_schema", "name": "move", "schema": MOVE, "strict": True}}
            assert is_move(json.loads(client.responses.create(model="tiny", input="?", text=text).output_text))
            walk: Any = {"type": "function", "name": "walk", "parameters": MOVE, "strict": True}
            (call,) = client.responses.create(model="tiny", input="?", tools=[walk], tool_choice="required").output
            assert is_move(json.loads(call.arguments))
            told = client.responses.create(model="tiny", input="?", top_logprobs=2, max_output_tokens=3)
            assert [len(one.top_logprobs) for one in told.output[0].content[0].logprobs] == [2, 2, 2]


def test_every_interface_gives_the_model_the_same_prompt(tokenizer: ChatTokenizer) -> None:
    backend = ScriptedTokens(lambda request: letters(tokenizer, "x"))
    with serving(backend, tokenizer) as proxy:
        with claude(proxy) as client:
            client.messages.create(model="tiny", max_tokens=5, system="s", messages=[user("q")])
        with gpt(proxy) as client:
            client.responses.create(model="tiny", instructions="s", input="q")
            client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "s"}, user("q")])
        prompts = {tuple(turn.prompt_ids.tolist()) for turn in turns_of(proxy)}
        assert prompts == {tuple(tokenizer.chat([{"role": "system", "content": "s"}, user("q")]).tolist())}
