"""The agent proxy over real HTTP: OpenAI's protocol outside, sampled tokens as they were inside."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.commands import serve_agent
from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens
from embodied_rl.generation.tokens import Completion, GenerationRequest, ScriptedTokens
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model, train_tokenizer
from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
from embodied_rl.serving.agents.pump import BackendPump
from embodied_rl.serving.agents.sessions import (
    CapturedSession,
    CapturedTurn,
    Session,
    SessionBook,
    SessionLimits,
    history_keys,
    read_captured,
)
from embodied_rl.serving.http_server import HttpServer, ServerLimits

TEXTS = ["Where is the cup? The cup is on the table.", "go left", "go right", "Answer with one move."] * 4
END = 2
"""The tiny tokenizer's end of a turn."""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(train_tokenizer(TEXTS, 300), "tiny")


@contextmanager
def serving(backend: Any, tokenizer: ChatTokenizer, **options: Any) -> Iterator[AgentProxy]:
    where = {key: options.pop(key) for key in ("token", "limits", "host", "http") if key in options}
    proxy = AgentProxy(backend, tokenizer, ProxyOptions(model="tiny", stop_ids=(END,), **options), **where)
    try:
        yield proxy
    finally:
        proxy.close()


def ask(proxy: Any, path: str, body: Any = None, key: str | None = "agent", method: str | None = None) -> tuple[int, dict[str, Any]]:
    status, _, data = raw(proxy, path, body, key, method)
    return status, json.loads(data)


def raw(proxy: Any, path: str, body: Any, key: str | None, method: str | None = None) -> tuple[int, str | None, bytes]:
    parts = urlsplit(proxy.base_url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method or ("GET" if data is None else "POST"), parts.path + path, data, headers)
    response = connection.getresponse()
    answer = response.status, response.getheader("Content-Type"), response.read()
    connection.close()
    return answer


def says(tokenizer: ChatTokenizer, *texts: str, end: bool = True) -> ScriptedTokens:
    """Answers with these texts in turn, for ever, in other tokens than the tokenizer would choose: a letter a token."""
    number = iter(range(10**9))

    def script(request: GenerationRequest) -> list[int]:
        text = texts[next(number) % len(texts)]
        letters = [int(token) for letter in text for token in tokenizer.encode(letter)]
        return [*letters, END] if end else letters

    return ScriptedTokens(script, version=3)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(proxy: AgentProxy, messages: Sequence[Any], key: str = "agent", **more: Any) -> dict[str, Any]:
    status, answer = ask(proxy, "/chat/completions", {"model": "tiny", "messages": list(messages), **more}, key)
    assert status == 200, answer
    return answer


def test_an_answer_in_openai_form(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left"), tokenizer) as proxy:
        answer = chat(proxy, [user("Where?")])
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "go left"}
        assert (answer["object"], answer["model"], choice["finish_reason"]) == ("chat.completion", "tiny", "stop")
        num_prompt = len(tokenizer.chat([user("Where?")]))
        assert answer["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 8, "total_tokens": num_prompt + 8}
        assert ask(proxy, "/models")[1]["data"][0]["id"] == "tiny"
        cut = chat(proxy, [user("Where?")], max_tokens=3)["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("go ", "length")
        told = chat(proxy, [user("Where?")], logprobs=True)["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], entry["logprob"]) for entry in told[:2]] == [("g", 0.0), ("o", 0.0)]


def test_turns_are_joined_and_sampled_tokens_stay_as_they_were(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left", "go right"), tokenizer) as proxy:
        messages: list[Any] = [{"role": "system", "content": "Answer with one move."}, user("Where?")]
        first = chat(proxy, messages)
        messages += [first["choices"][0]["message"], user("And now?")]
        second = chat(proxy, messages)
        ask(proxy, "/sessions/agent/reward", {"reward": 0.25, "turn": first["id"]})
        ask(proxy, "/sessions/agent/reward", {"reward": 1.0, "turn": second["id"]})
        assert ask(proxy, "/sessions/agent/end", {"reward": 2.0}) == (200, {"id": "agent", "turns": 2, "reward": 3.25})
        (session,) = proxy.take_finished()
    prompt = tokenizer.chat(messages[:2])
    letters = {text: [int(t) for letter in text for t in tokenizer.encode(letter)] for text in ("go left", "go right")}
    assert letters["go left"] != tokenizer.encode("go left").tolist(), "the same tokens would show nothing"
    between = tokenizer.encode("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert session.turns[1].prompt_ids.tolist() == [*prompt, *letters["go left"], END, *between]
    assert [turn.parent for turn in session.turns] == [None, 0]
    (row,) = session.trajectories()
    assert row.token_ids.tolist() == [*prompt, *letters["go left"], END, *between, *letters["go right"], END]
    expected = [False] * len(prompt) + [True] * 8 + [False] * len(between) + [True] * 9
    assert row.mask.tolist() == expected
    assert row.prompt_ids.tolist() == prompt.tolist()
    assert row.sampled_ids.tolist() == [*letters["go left"], END, *letters["go right"], END]
    assert row.version.tolist() == [3 if sampled else -1 for sampled in expected]
    assert row.turn[row.mask].tolist() == [0] * 8 + [1] * 9
    assert row.turn_reward.tolist() == [0.25, 1.0]
    assert row.reward == 3.25
    assert session.metadata == {}


def test_a_long_conversation_is_looked_up_in_one_pass() -> None:
    """Its beginnings have the keys that they have alone; not each is written out anew, which would take minutes here."""
    messages = [{"role": role, "content": f" {number} "} for number in range(30_000) for role in ("user", "assistant")]
    keys = history_keys(messages, None)
    assert len(set(keys)) == len(messages)
    assert [history_keys(messages[:length], None)[-1] for length in (1, 2, 999)] == [keys[0], keys[1], keys[998]]
    assert history_keys([messages[0], {"role": "assistant", "content": "0"}], None)[-1] == keys[1], "clients strip an answer's spaces"
    assert history_keys([{"role": "user", "content": "0"}, messages[1]], None)[-1] != keys[1], "but a message is another"
    assert history_keys(messages[:2], [{"function": {"name": "look"}}])[-1] != keys[1]
    tokenizer: Any = SimpleNamespace(chat=lambda messages, tools: np.arange(len(messages)))
    assert Session("long").prompt(messages, None, tokenizer)[1] is None


def test_what_is_found_of_an_answer_is_there(tokenizer: ChatTokenizer) -> None:
    """The same question was asked twice at once, and the program goes on with one answer while the equal one is stored."""
    session, question, answer = Session("agent"), [user("Where?")], {"role": "assistant", "content": "go left"}

    class Noticed(dict[str, int]):
        def __setitem__(self, key: str, number: int) -> None:
            super().__setitem__(key, number)
            continued.append(session.prompt([*question, answer, user("And now?")], None, tokenizer)[1])

    session._by_history, continued = Noticed(), list[int | None]()
    for name in ("first", "second"):
        ids, none = tokenizer.encode("go left"), np.zeros(0, np.float32)
        turn = {"prompt_ids": tokenizer.chat(question), "sampled_ids": ids, "version": np.zeros(len(ids), np.int64)}
        turn |= dict.fromkeys(("log_prob", "sampling_log_prob"), np.resize(none, len(ids)))
        session.add(CapturedTurn(completion_id=name, parent=None, finish_reason="length", **turn), [*question, answer], None)
    assert continued == [0, 1]


def test_an_answer_that_was_cut_is_closed_by_the_template(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left"), tokenizer) as proxy:
        first = chat(proxy, [user("Where?")], max_tokens=2)
        chat(proxy, [user("Where?"), first["choices"][0]["message"], user("Go on.")])
        (turn, second) = proxy._book.sessions["agent"].captured().turns
    assert turn.finish_reason == "length"
    closed = tokenizer.encode("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids.tolist() == [*turn.prompt_ids, *turn.sampled_ids, *closed]


def test_a_template_that_checks_who_called_a_tool_begins_anew() -> None:
    strict = ChatTokenizer(train_tokenizer(TEXTS, 300), "strict")
    asks = "{% if one.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('who called?') }}{% endif %}"
    strict.of_transformers.chat_template = f"{{% for one in messages %}}{asks}{{{{ one.role + one.content }}}}<|im_end|>{{% endfor %}}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with serving(says(strict, '<tool_call>{"name": "look"}</tool_call>', "go left"), strict) as proxy:
        called = chat(proxy, [user("?")], tools=[tool])["choices"][0]["message"]
        chat(proxy, [user("?"), called, {"role": "tool", "content": "a cup"}], tools=[tool])
        session = proxy._book.sessions["agent"].captured()
    assert [turn.parent for turn in session.turns] == [None, None]


def test_conversations_that_part_are_trained_once(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "a", "b", "c", "d"), tokenizer) as proxy:
        first = chat(proxy, [user("Where?")])["choices"][0]["message"]
        chat(proxy, [user("Where?"), first, user("left?")])
        chat(proxy, [user("Where?"), first, user("right?")])
        # Another agent of the same program, and a history that was changed: conversations of their own.
        chat(proxy, [user("Where?"), {"role": "assistant", "content": "never said"}, user("left?")])
        session = proxy._book.sessions["agent"].captured()
    assert [turn.parent for turn in session.turns] == [None, 0, 0, None]
    rows = session.trajectories()
    assert [row.turns for row in rows] == [(0, 1), (0, 2), (3,)]
    assert [int(row.mask.sum()) for row in rows] == [4, 2, 2]
    assert sorted(np.concatenate([row.turn[row.mask] for row in rows]).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_spaces_that_clients_strip_and_tools_that_change(tokenizer: ChatTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with serving(says(tokenizer, "go left "), tokenizer) as proxy:
        chat(proxy, [user("Where?")])
        history = [user("Where?"), {"role": "assistant", "content": [{"type": "text", "text": "go left"}], "refusal": None}, user("?")]
        chat(proxy, history)
        chat(proxy, history, tools=[tool])
        session = proxy._book.sessions["agent"].captured()
    assert [turn.parent for turn in session.turns] == [None, 0, None], "other tools are another prompt"


def test_tool_calls_pass_through(tokenizer: ChatTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    no_json = [f'<tool_call>{{"name": "add", "arguments": {given}}}</tool_call>' for given in ("NaN", "[" * 70 + "]" * 70)]
    with serving(says(tokenizer, call, "2", "<tool_call>{broken</tool_call>", *no_json), tokenizer) as proxy:
        answer = chat(proxy, [user("1+1?")], tools=[tool])["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (made,) = answer["message"]["tool_calls"]
        assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert answer["message"]["content"] == "Let me see."
        history = [user("1+1?"), answer["message"], {"role": "tool", "tool_call_id": made["id"], "content": "2"}]
        assert chat(proxy, history, tools=[tool])["choices"][0]["finish_reason"] == "stop"
        broken = chat(proxy, [user("again")], tools=[tool])["choices"][0]
        assert (broken["message"]["content"], broken["finish_reason"]) == ("<tool_call>{broken</tool_call>", "stop")
        for text in no_json:
            assert chat(proxy, [user("once more")], tools=[tool])["choices"][0]["message"]["content"] == text
        sent = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[" * 10**5}}
        chat(proxy, [user("?"), {"role": "assistant", "tool_calls": [sent]}, {"role": "tool", "content": "?"}], tools=[tool])
        first, second, *_ = proxy._book.sessions["agent"].captured().turns
    assert second.parent == 0
    added = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids.tolist() == [*first.prompt_ids, *first.sampled_ids, *tokenizer.encode(added)]


@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
def test_a_tool_that_must_be_called(tokenizer: ChatTokenizer, named: bool) -> None:
    """The answer begins with the call, as a part of the prompt: what is sampled, and trained, is the rest."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "multiply")]
    rest = ' {"a": 1}}\n</tool_call>' if named else 'multiply", "arguments": {"a": 1}}\n</tool_call>'
    begun = '<tool_call>\n{"name": "multiply", "arguments":' if named else '<tool_call>\n{"name": "'
    choice: Any = {"type": "function", "function": {"name": "multiply"}} if named else "required"
    with serving(says(tokenizer, rest, "done"), tokenizer) as proxy:
        messages: list[Any] = [user("How much?")]
        answer = chat(proxy, messages, tools=tools, tool_choice=choice)["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("multiply", {"a": 1})
        messages += [answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
        chat(proxy, messages, tools=tools)
        first, second = proxy._book.sessions["agent"].captured().turns
        assert first.prompt_ids.tolist() == [*tokenizer.chat(messages[:1], tools=tools), *tokenizer.encode(begun)]
        assert first.sampled_ids.tolist() == [*(int(token) for letter in rest for token in tokenizer.encode(letter)), END]
        assert second.parent == 0


def test_streams_are_server_sent_events(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "go left"), tokenizer) as proxy:
        body = {"model": "tiny", "messages": [user("Where?")], "stream": True, "stream_options": {"include_usage": True}}
        status, kind, data = raw(proxy, "/chat/completions", body, "agent")
        assert (status, kind) == (200, "text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
        assert done == "[DONE]"
        pieces = [json.loads(event) for event in events]
        assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
        deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "go left"}, {}]
        assert pieces[-2]["choices"][0]["finish_reason"] == "stop"
        assert pieces[-1]["usage"]["completion_tokens"] == 8
        # A refusal keeps its status, streaming or not.
        assert raw(proxy, "/chat/completions", {**body, "messages": []}, "agent")[0] == 400
        assert proxy._book.sessions["agent"].in_flight == 0


def test_our_own_client_talks_to_it(tokenizer: ChatTokenizer) -> None:
    """`OpenAITokens`, written against other servers: a second implementation of the protocol."""
    with serving(says(tokenizer, "go left"), tokenizer) as proxy:
        for stream in (True, False):
            client = OpenAITokens(OpenAIOptions(proxy.base_url, "tiny", api="chat", stream=stream))
            client._wait(_with_key(client, f"client-{stream}"))
            client.submit([GenerationRequest(request_id=1, prompt_ids=np.array([1]), max_new_tokens=9, messages=(user("Where?"),))])
            (completion,) = client.poll()
            assert (completion.text, completion.finish_reason) == ("go left", "stop"), completion
            client.close()
        assert sorted(proxy._book.sessions) == ["client-False", "client-True"]


async def _with_key(client: OpenAITokens, key: str) -> None:
    client._client.headers["Authorization"] = f"Bearer {key}"


@pytest.mark.parametrize(
    ("change", "status", "code", "part"),
    [
        ({"messages": None}, 400, "invalid_request", "'messages' must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request", "the role must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "unsupported_content", "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "invalid_request", "a tool call must be"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_request", "surrogate"),
        ({"temperatur": 1}, 400, "unknown_parameter", "Did you mean 'temperature'"),
        ({"temperature": -1}, 400, "invalid_request", "'temperature' must be a number between 0 and"),
        ({"max_tokens": 0}, 400, "invalid_request", "'max_tokens' must be a whole number between 1 and 1,048,576, got 0"),
        ({"n": 0}, 400, "invalid_request", "'n' must be a whole number between 1"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "backend of this server does not support"),
        ({"response_format": {"type": "json_schema"}}, 400, "invalid_request", "json_schema and its schema"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "unsupported_parameter", "likeliest tokens"),
        ({"top_logprobs": 3}, 400, "invalid_request", "needs 'logprobs'"),
        ({"parallel_tool_calls": 1}, 400, "invalid_request", "'parallel_tool_calls' must be true or false"),
        ({"tool_choice": "required"}, 400, "invalid_request", "and there are no 'tools'"),
        ({"tool_choice": "any", "tools": [{"function": {"name": "add"}}]}, 400, "invalid_request", "must be 'auto', 'none', 'required' or"),
        ({"stop": ["and a long text", ""]}, 400, "invalid_request", "none of them empty"),
        ({"stop": ["x"] * 33}, 400, "unsupported_parameter", "at most 32 texts of at most 512 characters here, got 33"),
        ({"stop": "x" * 10**4}, 400, "unsupported_parameter", "the longest with 10,000"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, 400, "invalid_request", "that has a 'name'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "go"}}]}, 400, "unsupported_content", "sent as 'tool_calls'"),
        ({"model": "gpt"}, 404, "model_not_found", "'gpt' is not served"),
    ],
)
def test_what_cannot_be_done_is_refused(refusing: AgentProxy, change: dict[str, Any], status: int, code: str, part: str) -> None:
    got, answer = ask(refusing, "/chat/completions", {"model": "tiny", "messages": [user("x")], **change})
    assert (got, answer["error"]["code"]) == (status, code), answer
    assert part in answer["error"]["message"]
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.fixture(scope="module")
def refusing(tokenizer: ChatTokenizer) -> Iterator[AgentProxy]:
    with serving(says(tokenizer, "x"), tokenizer, http=ServerLimits(max_body_mb=0.02)) as proxy:
        yield proxy


def test_refusals_of_the_server(refusing: AgentProxy) -> None:
    assert ask(refusing, "/chat/completions", {"messages": [user("x" * 30_000)]})[0] == 413
    assert ask(refusing, "/chat/completions", b"{")[1]["error"]["code"] == "bad_request"
    assert ask(refusing, "/chat/completions", {"messages": [user("x")]}, key=None)[1]["error"]["code"] == "unauthorized"
    assert ask(refusing, "/chat/completions", {"messages": [user("x")]}, key="../x")[1]["error"]["code"] == "bad_key"
    assert ask(refusing, "/nothing")[0] == 404
    assert ask(refusing, "/chat/completions")[0] == 405
    assert ask(refusing, "/sessions/nobody/reward", {"reward": 1})[1]["error"]["code"] == "unknown_session"
    chat(refusing, [user("x")], key="rewarded")
    assert ask(refusing, "/sessions/rewarded/reward", {"reward": "1"})[0] == 400
    assert ask(refusing, "/sessions/rewarded/reward", {"reward": True})[0] == 400
    for reward in (-(2**70), 10**400, None):
        assert ask(refusing, "/sessions/rewarded/reward", {"reward": reward})[1]["error"]["code"] == "invalid_request"
    assert ask(refusing, "/sessions/rewarded/reward", {"reward": 1, "turn": "x"})[1]["error"]["code"] == "unknown_turn"


def test_the_proxy_is_described_in_openapi(tokenizer: ChatTokenizer) -> None:
    """FastAPI's model of OpenAPI reads it; each path that it names exists with its methods, takes no other."""
    models = pytest.importorskip("fastapi.openapi.models", reason="fastapi is not installed")
    with serving(says(tokenizer, "x"), tokenizer, token="a secret token") as proxy:
        root = f"http://127.0.0.1:{urlsplit(proxy.base_url).port}"
        document = json.loads(urllib.request.urlopen(f"{root}/openapi.json", timeout=60).read())
        with urllib.request.urlopen(f"{root}/docs", timeout=60) as response:
            assert response.headers["Content-Type"] == "text/plain; charset=utf-8", "it loads nothing"
            assert yaml.safe_load(response.read()) == document
        models.OpenAPI.model_validate(document)
        for path, item in document["paths"].items():
            models.PathItem.model_validate(item)
            real = path.removeprefix("/v1").replace("{id}", "none").replace("{model}", "tiny")
            taken = {method.upper() for method in item if method != "parameters"}
            for method in ("GET", "POST", "PUT"):
                status, answer = ask(proxy, real, {} if method == "POST" else None, "a secret token", method)
                known = answer.get("error", {}).get("code") != "unknown_route"
                assert known, (method, path)
                if "none" not in real:  # a session that is not there is 404 whatever is asked of it
                    assert (status == 405) == (method not in taken), (method, path, answer)
        # What is described of a request is what is taken.
        for path, needed in (("/chat/completions", {"messages": [user("x")]}), ("/responses", {"input": "x"})):
            fields = document["paths"][f"/v1{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            assert not [name for name in fields if name not in needed and _unknown(proxy, path, {**needed, name: "?"})]
            assert _unknown(proxy, path, {**needed, "robot": 1})


def _unknown(proxy: AgentProxy, path: str, body: dict[str, Any]) -> bool:
    key = ask(proxy, "/sessions", {}, "a secret token")[1]["api_key"]
    return b'"unknown_parameter"' in raw(proxy, path, body, key)[2]


def test_sessions_are_kept_apart_and_a_key_is_free_after_its_end(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "x"), tokenizer) as proxy:
        threads = [
            threading.Thread(target=lambda name=f"a{n % 3}": [chat(proxy, [user(f"{i}")], key=name) for i in range(5)]) for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {row["id"]: row["turns"] for row in ask(proxy, "/sessions")[1]["sessions"]} == {"a0": 10, "a1": 10, "a2": 10}
        for reward_id in ("one", "one", "two"):  # a repeated call counts once
            ask(proxy, "/sessions/a0/reward", {"reward": 0.5, "reward_id": reward_id})
        assert ask(proxy, "/sessions/a0/end", {})[1]["reward"] == 1.0
        assert ask(proxy, "/sessions/a0/reward", {"reward": 1})[0] == 404
        chat(proxy, [user("again")], key="a0")
        assert ask(proxy, "/sessions/a0", key="a0")[1]["session"] == "a0.2"
        (ended,) = proxy.take_finished()
        assert (ended.session, len(ended.turns), ended.total_reward, ended.ended_by) == ("a0", 10, 1.0, "client")
        proxy.close()
        assert sorted(session.session for session in proxy.take_finished()) == ["a0.2", "a1", "a2"]


def test_the_keys_without_a_session_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.serving.agents.sessions._MOST_COUNTED", 3)
    book = SessionBook(SessionLimits(), open_to_any_key=True)
    names = []
    for key in ("a", "b", "a", "c", "d", "a", "b"):
        names.append(book.by_key(key).name)
        book.forget(book.sessions[names[-1]])
    assert names == ["a", "b", "a.2", "c", "d", "a.3", "b"], "b is the one that was not heard of for longest"
    assert list(book.counts) == ["d", "a", "b"]


def test_with_a_token_sessions_are_opened_and_have_keys(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(UserError, match="EMBODIED_RL_TOKEN"):
        AgentProxy(says(tokenizer, "x"), tokenizer, ProxyOptions(model="tiny", stop_ids=(END,)), host="0.0.0.0")
    with serving(says(tokenizer, "x"), tokenizer, token="correct horse") as proxy:
        assert ask(proxy, "/chat/completions", {"messages": [user("x")]}, "agent")[0] == 401
        for key in ("wrong horse", None):
            assert ask(proxy, "/sessions", {"id": "s1"}, key)[1]["error"]["message"].startswith("This server needs a token")
            status, refused = ask(proxy, "/messages", {"messages": [user("x")]}, key)
            assert (status, refused["type"], refused["error"]["type"]) == (401, "error", "authentication_error"), "in Anthropic's form"
        # Who has no key makes the server hold no body: it is not waited for.
        with socket.create_connection(("127.0.0.1", urlsplit(proxy.base_url).port), timeout=20) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4000000\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        status, opened = ask(proxy, "/sessions", {"id": "s1", "metadata": {"task": 7}}, "correct horse")
        other = ask(proxy, "/sessions", {}, "correct horse")[1]
        assert status == 201
        chat(proxy, [user("x")], key=opened["api_key"])
        assert ask(proxy, "/sessions/s1/reward", {"reward": 1}, other["api_key"])[0] == 401, "another agent's key"
        assert ask(proxy, "/sessions/s1/reward", {"reward": 1}, opened["api_key"])[0] == 200
        assert ask(proxy, "/sessions/s1/end", {}, "correct horse")[1]["reward"] == 1.0
        assert ask(proxy, "/chat/completions", {"messages": [user("x")]}, opened["api_key"])[0] == 401, "its key is void"
        assert ask(proxy, f"/sessions/{other['id']}/end", {}, "correct horse")[0] == 200
        ended = proxy.end_session("s1")
        assert ended is not None
        assert (ended.metadata, ended.ended_by, proxy.end_session("s1")) == ({"task": 7}, "client", None)
        assert [session.session for session in proxy.take_finished()] == [other["id"]], "another caller's session stays"


def test_limits_of_sessions(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "x"), tokenizer, limits=SessionLimits(max_sessions=1, idle_s=60.0)) as proxy:
        chat(proxy, [user("x")], key="one")
        assert ask(proxy, "/chat/completions", {"messages": [user("x")]}, "two")[1]["error"]["code"] == "too_many_sessions"
        (session,) = proxy._book.sessions.values()
        session.last_used -= 61.0
        chat(proxy, [user("x")], key="two")
        assert [(s.session, s.ended_by) for s in proxy.take_finished()] == [("one", "idle")]
        (session,) = proxy._book.sessions.values()
        session.last_used -= 61.0
        until, finished = time.monotonic() + 240, list[CapturedSession]()
        while not finished and time.monotonic() < until:  # nobody asks for anything
            time.sleep(0.05)
            finished = proxy.take_finished()
        assert [(s.session, s.ended_by) for s in finished] == [("two", "idle")]


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True])
def test_a_session_that_its_client_is_ending_is_not_lost(
    written: bool, tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to its owner, who ends it at the same time, nor to the proxy's end."""
    forget, found = SessionBook.forget, list[Any]()
    with serving(says(tokenizer, "go left"), tokenizer, output=tmp_path if written else None) as proxy:

        def end() -> None:
            if written:
                proxy.close()
                found.extend(read_captured(tmp_path))
            else:
                found.append(proxy.end_session("agent"))

        meanwhile = threading.Thread(target=end)

        def slowly(book: SessionBook, session: Session) -> None:
            forget(book, session)
            meanwhile.start()
            meanwhile.join(1.0)

        monkeypatch.setattr(SessionBook, "forget", slowly)
        chat(proxy, [user("Where?")])
        assert ask(proxy, "/sessions/agent/end", {})[0] == 200
        meanwhile.join()
        assert [(session.session, session.ended_by) for session in found] == [("agent", "client")]
        assert proxy.take_finished() == []


def test_a_session_that_cannot_be_written_waits_and_is_not_the_next_clients_fault(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("a file where the folder should be")
    with serving(says(tokenizer, "x"), tokenizer, limits=SessionLimits(idle_s=60.0), output=output) as proxy:
        for key in ("one", "two"):
            chat(proxy, [user("x")], key=key)
        for session in proxy._book.sessions.values():
            session.last_used -= 61.0
        with pytest.warns(UserWarning, match=r"Cannot write .*out.* are kept"):
            chat(proxy, [user("x")], key="three")
        status, answer = ask(proxy, "/sessions/three/end", {})
        assert status == 422
        assert "Cannot write" in answer["error"]["message"]
        assert proxy.take_finished() == []
        output.unlink()
        until = time.monotonic() + 240
        while not (output / "three.json").exists() and time.monotonic() < until:  # the watcher tries again
            time.sleep(0.05)
    assert [(s.session, s.ended_by) for s in read_captured(output)] == [("one", "idle"), ("three", "client"), ("two", "idle")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), TEXTS, shape=TinyShape(max_context=256, spread=0.3), vocab_size=300)


def test_what_is_captured_is_what_training_recomputes(folder: Path, tmp_path: Path) -> None:
    policy = build_language_policy(LanguageConfig(model=str(folder)))
    backend = TorchTokens(policy.generation_model(), version=5)
    with serving(backend, policy.tokenizer, max_new_tokens=12, policy_sampling=True, output=tmp_path) as proxy:

        def play(name: str, seed: int) -> None:
            messages: list[Any] = [user("Where is the cup?")]
            for turn in range(3):
                answer = chat(proxy, messages, key=name, seed=seed + turn, temperature=0.3)
                messages += [answer["choices"][0]["message"], user(f"go {turn}")]

        threads = [threading.Thread(target=play, args=(f"agent-{n}", 10 * n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(RuntimeError, match="no such thing"):
            proxy.shared_backend.call(lambda backend: (_ for _ in ()).throw(RuntimeError("no such thing")))
        proxy.load_weights(6, [])
        chat(proxy, [user("Where is the cup?")], key="later")
    sessions = read_captured(tmp_path)
    assert [session.session for session in sessions] == ["agent-0", "agent-1", "agent-2", "later"]
    rows = [row for session in sessions for row in session.trajectories()]
    assert [len(row.turns) for row in rows] == [3, 3, 3, 1]
    assert [set(row.version[row.mask].tolist()) for row in rows] == [{5}, {5}, {5}, {6}]
    evaluated = policy.evaluate([TokenSequence(row.token_ids, row.mask) for row in rows])
    for number, row in enumerate(rows):
        recomputed = evaluated.log_prob[number].detach().numpy()[: len(row.token_ids)]
        np.testing.assert_allclose(recomputed[row.mask], row.log_prob[row.mask], atol=1e-4)
        np.testing.assert_allclose(row.log_prob, row.sampling_log_prob, atol=1e-6)  # policy_sampling
        assert not row.log_prob[~row.mask].any()
    again = CapturedSession.from_dict(json.loads(json.dumps(sessions[0].to_dict())))
    for turn, other in zip(sessions[0].turns, again.turns, strict=True):
        assert turn.log_prob.tobytes() == other.log_prob.tobytes()


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "{}", "\ud800"])
def test_a_file_that_is_no_session_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError, match=r"a\.json' is not a captured session: "):
        read_captured(tmp_path)


def test_a_prompt_that_is_too_long_is_refused(folder: Path) -> None:
    policy = build_language_policy(LanguageConfig(model=str(folder)))
    with serving(TorchTokens(policy.generation_model()), policy.tokenizer) as proxy:
        status, answer = ask(proxy, "/chat/completions", {"messages": [user("xyz " * 300)]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "context has 256" in answer["error"]["message"]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    given = [f"model={folder}", "port=0", f"output={tmp_path}", "max_new_tokens=5", "name=tiny", "token=none"]
    proxy, token = serve_agent.start(serve_agent.COMMAND.parse(given)[0])
    assert token is None
    answer = chat(proxy, [user("go")])
    assert answer["usage"]["completion_tokens"] <= 5
    proxy.close()
    (tmp_path / ".agent.tmp-7.json").write_text('{"format": ')  # of a killed proxy
    (session,) = read_captured(tmp_path)
    assert (session.session, session.ended_by, len(session.turns)) == ("agent", "close", 1)
    session.save(tmp_path)
    assert len(read_captured(tmp_path)) == 2, "a session of the same name in another run replaces nothing"


def test_the_command_asks_for_port_and_device_before_it_loads_a_model(tmp_path: Path) -> None:
    missing = [f"model={tmp_path / 'none'}", "port=0", "token=none", "device=gpu"]
    with pytest.raises(UserError, match=r"Model folder '.*/none' does not exist"):
        serve_agent.start(serve_agent.COMMAND.parse(missing)[0])
    given = [f"model={tmp_path}", "port=0", "token=none"]
    for device, part in (("gpu", "device='gpu' is not a device"), ("cuda:99", "device=cuda:99: torch finds")):
        with pytest.raises(UserError, match=part):
            serve_agent.start(serve_agent.COMMAND.parse([*given, f"device={device}"])[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [f"model={tmp_path}", f"port={taken.getsockname()[1]}", "token=none"]
        with pytest.raises(UserError, match=r"^Cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            serve_agent.start(serve_agent.COMMAND.parse(given)[0])


def test_a_client_that_comes_before_the_model_gets_no_answer_that_means_anything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, answers = HttpServer.close, list[int]()

    def late(server: HttpServer) -> None:
        monkeypatch.undo()
        answers.append(ask(SimpleNamespace(base_url=f"{server.url}/v1"), "/chat/completions", {"messages": [user("go")]})[0])
        close(server)

    monkeypatch.setattr(HttpServer, "close", late)
    proxy, _ = serve_agent.start(serve_agent.COMMAND.parse([f"model={folder}", "port=0", f"output={tmp_path}"])[0])
    proxy.close()
    assert answers == [503]


def test_the_command_asks_for_a_token(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBODIED_RL_TOKEN", raising=False)
    proxy, token = serve_agent.start(serve_agent.COMMAND.parse([f"model={folder}", "port=0", f"output={tmp_path}", "name=tiny"])[0])
    try:
        assert token is not None
        assert ask(proxy, "/chat/completions", {"messages": [user("go")]}, key="any-name")[0] == 401
        assert ask(proxy, "/sessions", {}, key="any-name")[0] == 401
        opened = ask(proxy, "/sessions", {}, key=token)[1]
        assert ask(proxy, "/chat/completions", {"messages": [user("go")], "max_tokens": 2}, key=opened["api_key"])[0] == 200
    finally:
        proxy.close()
    monkeypatch.setenv("EMBODIED_RL_TOKEN", "one that is set")
    values, _ = serve_agent.COMMAND.parse([f"model={folder}", "port=0", f"output={tmp_path}", "name=tiny"])
    proxy, token = serve_agent.start(values)
    try:
        assert token is None, "what the user set needs no telling"
        assert ask(proxy, "/sessions", {}, key="one that is set")[0] == 201
    finally:
        proxy.close()


# ---- the pump -------------------------------------------------------------------------------------------------------


def request(text: int = 5) -> GenerationRequest:
    return GenerationRequest(request_id=0, prompt_ids=np.array([text]), max_new_tokens=4)


class Endless(ScriptedTokens):
    """Has more tokens with every look."""

    def __init__(self) -> None:
        super().__init__(lambda asked: [1])
        self.release_memory()
        self._so_far: list[int] = []

    def sampled_so_far(self, request_ids: Iterable[int]) -> dict[int, list[int]]:
        self._so_far = [*self._so_far, 1]
        return dict.fromkeys(request_ids, self._so_far)


def complete(pump: BackendPump, gone: Callable[[], bool] = lambda: False) -> Completion:
    *_, last = pump.stream(request(), gone, None)
    assert isinstance(last, Completion), "it comes last"
    return last


def test_a_client_that_is_gone_aborts_its_request() -> None:
    backend = ScriptedTokens(lambda asked: [1])
    backend.release_memory()
    pump = BackendPump(backend)
    left: list[bool] = []
    gone: Callable[[], bool] = lambda: left.append(True) or len(left) > 2  # noqa: E731
    assert complete(pump, gone).finish_reason == "aborted"
    busy = BackendPump(Endless())
    *_, last = busy.stream(request(), lambda: True)
    assert isinstance(last, Completion), "a client that is gone while tokens come without a pause"
    assert last.finish_reason == "aborted"
    busy.close()
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            complete(pump)
        except RuntimeError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 60
    while not pump._in_flight and time.monotonic() < deadline:
        time.sleep(0.005)
    pump.close()
    thread.join()
    assert "was closed" in str(waiting[0])
    with pytest.raises(RuntimeError, match="closed"):
        complete(pump)


def test_who_comes_in_while_the_pump_closes_is_told() -> None:
    """Whatever the thread has taken out of its inbox by then, and not begun."""
    pump = BackendPump(ScriptedTokens(lambda asked: [1]))
    busy, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def work(backend: Any) -> None:
        busy.set()
        go_on.wait(240)

    def wait(ask: Callable[[], Any]) -> None:
        try:
            ask()
        except RuntimeError as error:
            told.append(str(error))

    first = threading.Thread(target=lambda: pump.call(work))
    first.start()
    assert busy.wait(240)
    later = [
        threading.Thread(target=wait, args=(ask,), daemon=True)
        for ask in (lambda: complete(pump), lambda: list(pump.stream(request())), lambda: pump.call(lambda backend: None))
    ]
    for thread in later:
        thread.start()
    deadline = time.monotonic() + 240
    while pump._inbox.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    closing = threading.Thread(target=pump.close)
    closing.start()
    while not pump._closed and time.monotonic() < deadline:
        time.sleep(0.005)
    go_on.set()
    for thread in (first, closing, *later):
        thread.join(240)
    assert len(told) == 3
    assert all("closed" in text for text in told)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_backend_that_dies_when_it_is_asked_is_told(streamed: bool) -> None:
    class Gone(ScriptedTokens):
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            raise ConnectionError("nobody there")

    pump = BackendPump(Gone(lambda asked: [1]))
    told: list[str] = []

    def wait() -> None:
        try:
            list(pump.stream(request())) if streamed else complete(pump)
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(240)
    assert told == ["The generation backend has died (ConnectionError: nobody there)."]
    with pytest.raises(RuntimeError, match="closed"):
        pump.call(lambda backend: None)
    pump.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_backend_that_dies_is_told_to_all_who_wait() -> None:
    def script(asked: GenerationRequest) -> list[int]:
        raise ArithmeticError("out of luck")

    pump = BackendPump(ScriptedTokens(script))
    with pytest.raises(RuntimeError, match=r"has died \(ArithmeticError: out of luck\)"):
        complete(pump)
    pump.close()
