"""Answers that are read while they are sampled, over real HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.tokens import Stepwise
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.serving.agents.app import AgentProxy
from embodied_rl.serving.agents.chat import StopTexts
from embodied_rl.serving.agents.interfaces import GrowingText
from tests.proxy.test_proxy import END, chat, serving, user
from tests.proxy.test_proxy import folder as folder
from tests.proxy.test_proxy import tokenizer as tokenizer

ROOT = Path(__file__).parents[2]


class LetterByLetter(Stepwise):
    """Answers with a text, a token whenever the test says so."""

    version = 3

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self._tokens = tokens

    def _step(self) -> None:
        for growing in list(self._growing.values()):
            if not self.allowed.acquire(timeout=0.002):
                return
            growing.add(self._tokens[len(growing.token_ids)], 0.0, 0.0, self.version)
            if len(growing.token_ids) == len(self._tokens):
                self._end(growing, "stop")

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """It has none."""


def open_stream(proxy: AgentProxy, **more: Any) -> tuple[http.client.HTTPConnection, Iterator[dict[str, Any]]]:
    """A connection, and its events as they come."""
    parts = urlsplit(proxy.base_url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    body = json.dumps({"model": "tiny", "messages": [user("Where?")], "stream": True, **more})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer agent"}
    connection.request("POST", parts.path + "/chat/completions", body, headers)
    response = connection.getresponse()

    def events() -> Iterator[dict[str, Any]]:
        for line in iter(response.readline, b""):
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))

    return connection, events()


def test_a_stream_brings_tokens_as_they_are_sampled(tokenizer: ChatTokenizer) -> None:
    letters = [int(token) for letter in "go left" for token in tokenizer.encode(letter)]
    backend = LetterByLetter([*letters, END])
    with serving(backend, tokenizer) as proxy:
        for _ in range(2):
            backend.allowed.release()
        connection, events = open_stream(proxy)
        told = ""
        while told != "go":  # the rest is not sampled before this has arrived
            told += next(events)["choices"][0]["delta"].get("content", "")
        for _ in range(6):
            backend.allowed.release()
        rest = list(events)
        told += "".join(event["choices"][0]["delta"].get("content", "") for event in rest)
        assert told == "go left"
        assert rest[-1]["choices"][0]["finish_reason"] == "stop"
        assert len({event["id"] for event in rest}) == 1
        connection.close()
        # What was streamed is what was captured, and the conversation goes on behind its very tokens.
        (turn,) = proxy._book.sessions["agent"].captured().turns
        assert (turn.completion_id, turn.sampled_ids.tolist()) == (rest[0]["id"], [*letters, END])
        for _ in range(8):
            backend.allowed.release()
        chat(proxy, [user("Where?"), {"role": "assistant", "content": told}, user("And now?")])
        assert proxy._book.sessions["agent"].captured().turns[1].parent == 0


def test_a_stream_that_nobody_reads_any_more_is_aborted(tokenizer: ChatTokenizer) -> None:
    backend = LetterByLetter(tokenizer.encode("go left go left go left").tolist() * 1000)
    with serving(backend, tokenizer) as proxy:
        backend.allowed.release()
        connection, events = open_stream(proxy)
        next(events)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        deadline = time.monotonic() + 60
        while (backend.num_in_flight or proxy._book.sessions["agent"].in_flight) and time.monotonic() < deadline:
            backend.allowed.release()
            time.sleep(0.01)
        assert (backend.num_in_flight, proxy._book.sessions["agent"].in_flight) == (0, 0)
        assert proxy._book.sessions["agent"].num_turns == 0


@pytest.mark.parametrize(
    ("growing", "tools", "pieces"),
    [
        (("go", "go l\ufffd", "go lé"), False, ("go", " l", "é")),
        (("Let", "Let me. <too", "Let me. <tool_call>{"), True, ("Let", " me.")),
        (("a <", "a <b", "a <b "), True, ("a", " <b")),
        (("<tool_call>", "<tool_call>{}"), True, ()),
        (("<tool_call>x",), False, ("<tool_call>x",)),
    ],
)
def test_what_is_not_certain_yet_is_held_back(growing: tuple[str, ...], tools: bool, pieces: tuple[str, ...]) -> None:
    text = GrowingText(StopTexts((), str), has_tools=tools)
    assert tuple(filter(None, map(text.grown, growing))) == pieces


def test_a_streamed_tool_call_comes_whole(tokenizer: ChatTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    backend = LetterByLetter([*(int(token) for letter in text for token in tokenizer.encode(letter)), END])
    for _ in range(4 * len(text)):
        backend.allowed.release()
    with serving(backend, tokenizer) as proxy:
        connection, events = open_stream(proxy, tools=[tool])
        deltas = [event["choices"][0]["delta"] for event in events]
        connection.close()
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a": 1}'})


def test_a_model_streams_what_it_says_otherwise(folder: Path) -> None:
    """The torch backend: pieces of an answer together are the answer that the same seed gives in one."""
    policy = build_language_policy(LanguageConfig(str(folder), dtype="float32"))
    with serving(TorchTokens(policy.generation_model()), policy.tokenizer) as proxy:
        options = {"max_tokens": 80, "seed": 5, "temperature": 1.5}
        whole = chat(proxy, [user("Where?")], "other", **options)["choices"][0]["message"]["content"]
        connection, events = open_stream(proxy, **options)
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
        connection.close()
    assert "".join(pieces) == whole
    assert len(whole) > 20
