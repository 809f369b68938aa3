"""OpenAI-compatible servers over real HTTP: good ones, slow ones, and every way to be a bad one."""

from __future__ import annotations

import asyncio
import email.utils
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.generation import openai_tokens
from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens, Reply, RetryPolicy, retry_after_s
from embodied_rl.generation.tokens import Completion, GenerationRequest, derive_seed
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from tests.generation.token_servers import Exchange, TokenServer, choice
from tests.policies.language_models import tiny

QUICK = RetryPolicy(max_attempts=3, first_wait_s=0.02, max_wait_s=0.05)
PATIENCE_S = 60.0
"""For what comes at once, where the machine has the time."""


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[TokenServer, OpenAITokens]]]:
    """Makes a server with a plan, and a backend that asks it."""
    made: list[Any] = []

    def make(plan: Callable[[Exchange], None], tokenizer: ChatTokenizer | None = None, **options: Any) -> tuple[TokenServer, OpenAITokens]:
        server = TokenServer(plan)
        made.append(server)
        settings = {"retry": QUICK, "timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S, **options}
        backend = OpenAITokens(OpenAIOptions(server.base_url, "toy", **settings), tokenizer)
        made.append(backend)
        return server, backend

    yield make
    for part in reversed(made):
        part.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.read(tiny(tmp_path_factory.mktemp("tokenizer") / "model"))


def request(number: int = 1, **options: Any) -> GenerationRequest:
    return GenerationRequest(**{"request_id": number, "prompt_ids": np.array([5, 6, 7]), "max_new_tokens": 4, **options})


def ask(backend: OpenAITokens, *requests: GenerationRequest) -> list[Completion]:
    backend.submit(requests or [request()])
    return sorted(backend.poll(min_ready=len(requests) or 1, timeout_s=2 * PATIENCE_S), key=lambda completion: completion.request_id)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def stream(exchange: Exchange) -> None:
    exchange.begin_stream()
    exchange.handler.wfile.write(b": keep-alive\n\nevent: message\n")
    exchange.event(choice([10], None, "a"))
    exchange.event(choice([11, 12], None, "b"))
    exchange.event(choice([2], "stop", ""))
    exchange.event({"choices": [], "usage": {"total_tokens": 7}})
    exchange.event("[DONE]")


def whole(exchange: Exchange) -> None:
    exchange.json(choice([10, 11, 12, 2], "stop", "ab"))


# ---- good servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_token_ids_and_log_probs(serve: Any, streams: bool) -> None:
    server, backend = serve(stream if streams else whole, stream=streams, version=7, seed=3)
    (found,) = ask(backend, request(stop_ids=(2,), seed=None))
    assert found.token_ids.tolist() == [10, 11, 12, 2]
    np.testing.assert_allclose(found.log_prob, [-1.0, -1.1, -1.2, -0.2], rtol=1e-6)
    np.testing.assert_allclose(found.sampling_log_prob, found.log_prob)
    assert found.version.tolist() == [7] * 4
    assert (found.finish_reason, found.text, found.trainable) == ("stop", "ab", True)
    (sent,) = server.exchanges
    assert sent.path == "/v1/completions"
    assert sent.body == {
        "model": "toy",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": derive_seed(3, 1),
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": streams,
    }
    assert backend.version == 7
    assert backend.num_in_flight == 0


def test_other_distributions_have_no_sampling_log_prob_but_the_likeliest(serve: Any) -> None:
    _, backend = serve(stream)
    warm, greedy = ask(backend, request(1, temperature=0.5), request(2, temperature=0.0))
    assert np.isnan(warm.sampling_log_prob).all()
    assert warm.trainable
    assert (greedy.sampling_log_prob == 0).all()


def test_which_length_ended_it(serve: Any) -> None:
    _, backend = serve(lambda exchange: exchange.json(choice([10, 11], "length")), stream=False)
    ours, context = ask(backend, request(1, max_new_tokens=2), request(2, max_new_tokens=9))
    assert (ours.finish_reason, ours.limit) == ("length", "max_new_tokens")
    assert context.limit == "context"


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_chat_in_text_alone_is_for_evaluation(serve: Any, tokenizer: ChatTokenizer, with_tokenizer: bool) -> None:
    def chat(exchange: Exchange) -> None:
        exchange.begin_stream()
        for piece in ("go ", "left"):
            exchange.event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        exchange.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        exchange.event("[DONE]")

    server, backend = serve(chat, tokenizer if with_tokenizer else None, api="chat")
    messages = ({"role": "user", "content": "where?"},)
    (found,) = ask(backend, request(messages=messages, seed=4))
    assert found.text == "go left"
    assert found.token_ids.tolist() == (tokenizer.encode("go left").tolist() if with_tokenizer else [])
    assert not found.trainable
    assert server.exchanges[0].path == "/v1/chat/completions"
    assert server.exchanges[0].body["messages"] == [dict(messages[0])]
    assert server.exchanges[0].body["seed"] == 4
    assert "return_token_ids" not in server.exchanges[0].body


def test_completions_in_text_send_the_prompts_text(serve: Any, tokenizer: ChatTokenizer) -> None:
    server, backend = serve(
        lambda exchange: exchange.json({"choices": [{"text": " left", "finish_reason": "stop"}]}),
        tokenizer,
        api="completions",
        stream=False,
    )
    prompt_ids, stop_ids = tokenizer.chat([{"role": "user", "content": "go"}]), tokenizer.stop_ids("<|im_start|>")
    (found,) = ask(backend, request(prompt_ids=prompt_ids, stop_ids=stop_ids))
    assert server.exchanges[0].body["prompt"] == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert server.exchanges[0].body["stop"] == ["<|im_start|>"], "the end of sequence is the server's own"
    assert found.text == " left"
    assert tokenizer.decode(found.token_ids) == " left"
    assert not found.trainable


def test_empty_answers(serve: Any) -> None:
    _, backend = serve(lambda exchange: exchange.json(choice([], "stop", "")), stream=False)
    (found,) = ask(backend)
    assert (found.num_tokens, found.finish_reason, found.trainable) == (0, "stop", False)


def test_requests_run_side_by_side_within_the_limit(serve: Any) -> None:
    running: list[int] = []
    most: list[int] = []
    lock, together = threading.Lock(), threading.Barrier(4)

    def slow(exchange: Exchange) -> None:
        with lock:
            running.append(exchange.number)
            most.append(len(running))
        together.wait(PATIENCE_S)  # three rounds of four: nobody is answered before four are here
        time.sleep(0.15)  # a fifth would come now
        with lock:
            running.remove(exchange.number)
        whole(exchange)

    _, backend = serve(slow, stream=False, max_concurrent=4)
    found = ask(backend, *[request(number) for number in range(12)])
    assert [completion.request_id for completion in found] == list(range(12))
    assert [completion.finish_reason for completion in found] == ["stop"] * 12
    assert max(most) == 4


def test_key_comes_from_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", "secret-1")
    server, backend = serve(stream, api_key_env="TOY_KEY")
    ask(backend)
    assert server.exchanges[0].headers["Authorization"] == "Bearer secret-1"
    assert "secret-1" not in repr(backend._options)


# ---- bad servers ------------------------------------------------------------------------------------------------------


def fails_first(count: int, failure: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
    return lambda exchange: failure(exchange) if exchange.number < count else stream(exchange)


def ends_early(exchange: Exchange) -> None:
    exchange.begin_stream()
    exchange.event(choice([10], None))


def cut_in_the_middle(exchange: Exchange) -> None:
    exchange.handler.send_response(200)
    exchange.handler.send_header("Content-Length", "1000")
    exchange.handler.end_headers()
    exchange.handler.wfile.write(b'data: {"choices"')
    exchange.drop()


def says(text: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(200, text)


BAD: dict[str, tuple[Callable[[Exchange], None], str, int | None]] = {
    "500": (lambda exchange: exchange.json({"error": {"message": "engine died"}}, 500), "server_error", 500),
    "503 without a body": (lambda exchange: exchange.answer(503, ""), "server_error", 503),
    "no answer": (lambda exchange: exchange.drop(), "connection", None),
    "cut in the middle": (cut_in_the_middle, "connection", None),
    "not json": (says("data: <html>oops</html>\n\n"), "bad_response", 200),
    "not a stream": (says("<html>oops</html>"), "bad_response", 200),
    "bytes": (lambda exchange: exchange.answer(200, b"data: \xff\xfe\x00\n\n"), "bad_response", 200),
    "a list": (says("data: [1]\n\n"), "bad_response", 200),
    "no choices": (says('data: {"id": 1}\n\n'), "bad_response", 200),
    "choices of another kind": (says('data: {"choices": ["x"]}\n\n'), "bad_response", 200),
    "ids that are none": (says('data: {"choices": [{"token_ids": ["x"]}]}\n\n'), "bad_response", 200),
    "log-probabilities that are none": (
        says('data: {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}\n\n'),
        "bad_response",
        200,
    ),
    "a number that is no id": (says('data: {"choices": [{"token_ids": [1e999]}]}\n\n'), "bad_response", 200),
    "an id beyond all": (says(f'data: {{"choices": [{{"token_ids": [{2**70}]}}]}}\n\n'), "bad_response", 200),
    "nested without end": (says("data: " + "[" * 100_000 + "\n\n"), "bad_response", 200),
    "a refusal nested without end": (lambda exchange: exchange.answer(500, "[" * 100_000), "server_error", 500),
    "no gzip": (lambda exchange: exchange.answer(200, "this is no gzip", {"Content-Encoding": "gzip"}), "bad_response", None),
    "an empty stream": (says(""), "bad_response", 200),
    "no end": (ends_early, "bad_response", 200),
    "an error in the stream": (says('data: {"error": {"message": "out of memory"}}\n\n'), "server_error", 200),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_tried_again_then_typed(serve: Any, name: str) -> None:
    failure, kind, status = BAD[name]
    _, backend = serve(fails_first(2, failure))
    (found,) = ask(backend)
    assert found.token_ids.tolist() == [10, 11, 12, 2], "nothing of the failed attempts is left in it"
    server, backend = serve(failure)
    (found,) = ask(backend)
    assert found.finish_reason == "failed"
    assert found.failure is not None
    assert (found.failure.kind, found.failure.status, found.failure.attempts) == (kind, status, 3), found.failure
    assert len(server.exchanges) == 3
    assert found.failure.message
    assert "\n" not in found.failure.message


def test_nobody_there() -> None:
    backend = OpenAITokens(OpenAIOptions("http://127.0.0.1:9/v1", "toy", retry=QUICK))
    (found,) = ask(backend)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.attempts) == ("connection", 3)
    backend.close()


@pytest.mark.parametrize("streams", [True, False])
def test_too_slow(serve: Any, streams: bool) -> None:
    over = threading.Event()

    def slow(exchange: Exchange) -> None:
        if streams:
            exchange.begin_stream()
            number = 0
            while not over.wait(0.05):
                exchange.event(choice([number], None))
                number += 1
        over.wait(PATIENCE_S)

    _, backend = serve(slow, stream=streams, timeout_s=0.3, retry=RetryPolicy(max_attempts=2, first_wait_s=0.01))
    start = time.monotonic()
    (found,) = ask(backend)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.attempts) == ("timeout", 2)
    assert time.monotonic() - start >= 0.6
    over.set()  # the server itself would not have ended it


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "top_k must be positive", "rejected"),
        (401, "bad key", "rejected"),
        (404, "no such model", "rejected"),
        (400, "This model's maximum context length is 512 tokens", "prompt_too_long"),
    ],
)
def test_refusals_are_not_tried_again(serve: Any, status: int, message: str, kind: str) -> None:
    server, backend = serve(lambda exchange: exchange.json({"error": {"message": message}}, status))
    (found,) = ask(backend)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.status, found.failure.attempts) == (kind, status, 1)
    assert message in found.failure.message
    assert ("API key" in found.failure.message) == (status == 401)
    assert len(server.exchanges) == 1


def test_rate_limits_hold_everybody_back(serve: Any) -> None:
    def limited(exchange: Exchange) -> None:
        if exchange.number == 0:
            exchange.json({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.6"})
        else:
            stream(exchange)

    server, backend = serve(limited)
    backend.submit([request(1)])
    wait_until(lambda: backend._gate._not_before > 0.0)  # the first one was told
    backend.submit([request(2)])
    found = backend.poll(min_ready=2, timeout_s=PATIENCE_S)
    assert {completion.finish_reason for completion in found} == {"stop"}
    # The second request was told nothing itself, yet waits as well.
    assert all(moment - server.times[0] >= 0.6 for moment in server.times[1:])


def test_rate_limits_to_the_end(serve: Any) -> None:
    _, backend = serve(lambda exchange: exchange.answer(429, "slow down"))
    (found,) = ask(backend)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.status, found.failure.attempts) == ("rate_limited", 429, 3)
    server, backend = serve(lambda exchange: exchange.answer(429, "", {"Retry-After": "86400"}))
    (found,) = ask(backend)
    assert found.failure is not None
    assert found.failure.attempts == 1, "nobody waits a day"
    assert len(server.exchanges) == 1


def test_retry_after_by_hand() -> None:
    assert retry_after_s(None) is None
    assert retry_after_s("3") == 3.0
    assert retry_after_s("-3") == 0.0
    assert retry_after_s("soon") is None
    assert retry_after_s("nan") is None
    begun = time.time()
    left = retry_after_s(email.utils.formatdate(begun + 30, usegmt=True))
    # Dates hold whole seconds, and time passes meanwhile.
    assert left is not None
    assert 29 - (time.time() - begun) <= left <= 30
    assert retry_after_s(email.utils.formatdate(time.time() - 30, usegmt=True)) == 0.0
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 -0000") == 0.0


def test_waits_double_up_to_the_limit() -> None:
    class Middle:
        def random(self) -> float:
            return 0.5

    policy = RetryPolicy(first_wait_s=1.0, max_wait_s=5.0)
    # 1, 2, 4, then 5 instead of 8; at 0.5 of the random half, three quarters of it.
    assert [policy.wait_s(attempt, Middle()) for attempt in (1, 2, 3, 4)] == [0.75, 1.5, 3.0, 3.75]  # type: ignore[arg-type]


def test_servers_without_token_ids_are_no_silent_evaluation(serve: Any) -> None:
    _, backend = serve(lambda exchange: exchange.json({"choices": [{"text": "left", "finish_reason": "stop"}]}), stream=False)
    (found,) = ask(backend)
    assert found.failure is not None
    assert found.failure.kind == "bad_response"
    assert "return_token_ids" in found.failure.message


# ---- control ----------------------------------------------------------------------------------------------------------


def endless(exchange: Exchange) -> None:
    exchange.begin_stream()
    for number in range(1_000_000):
        exchange.event(choice([number], None))
        exchange.num_sent = number + 1
        time.sleep(0.005)


def test_abort_keeps_the_part_and_closes_the_connection(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Reply] = []

    def noted() -> Reply:
        replies.append(Reply())
        return replies[-1]

    monkeypatch.setattr(openai_tokens, "Reply", noted)
    server, backend = serve(endless, max_concurrent=2)
    backend.submit([request(1), request(2), request(3)])
    assert backend.poll(timeout_s=0.1) == []
    wait_until(lambda: sum(len(reply.token_ids) > 3 for reply in replies) == 2)
    assert len(server.exchanges) == 2
    backend.abort([1, 3, 50])
    found = {completion.request_id: completion for completion in backend.poll(min_ready=2, timeout_s=PATIENCE_S)}
    assert found.keys() == {1, 3}
    assert found[1].finish_reason == found[3].finish_reason == "aborted"
    count = found[1].num_tokens
    assert count > 3
    assert found[1].token_ids.tolist() == list(range(count))
    np.testing.assert_allclose(found[1].log_prob, -np.arange(count) / 10, rtol=1e-6)
    assert found[3].num_tokens == 0, "it was not sent yet"
    wait_until(lambda: server.broken_pipes)
    assert server.broken_pipes == 1, "the server is told to stop"
    assert backend.num_in_flight == 1


def test_what_it_cannot_do(serve: Any, tokenizer: ChatTokenizer) -> None:
    _, backend = serve(endless)  # an answer that had come would be in flight no more
    with pytest.raises(UserError, match="cannot load weights: they belong to the server"):
        backend.load_weights(1, [])
    with pytest.raises(UserError, match="images"):
        backend.submit([request(images=(np.zeros((8, 8, 3), np.uint8),))])
    backend.submit([request(1)])
    with pytest.raises(UserError, match="already in flight"):
        backend.submit([request(1)])
    _, chat = serve(stream, api="chat")
    with pytest.raises(UserError, match="has no messages"):
        chat.submit([request()])
    with pytest.raises(UserError, match="OpenAI's interface has no top_k"):
        chat.submit([request(messages=({"role": "user", "content": "x"},), top_k=4)])
    with pytest.raises(UserError, match="needs the tokenizer"):
        OpenAITokens(OpenAIOptions("http://127.0.0.1:9/v1", "toy", api="completions"))


def test_options_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for options, message in (
        ({"base_url": "127.0.0.1:8000"}, "base_url must be like"),
        ({"base_url": "ftp://host/v1"}, "base_url must be like"),
        ({"api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY'.* is not set"),
        ({"max_concurrent": 0}, "max_concurrent must be >= 1"),
    ):
        with pytest.raises(UserError, match=message):
            OpenAIOptions(**{"base_url": "http://127.0.0.1:9/v1", "model": "toy", **options})


def test_closing_ends_its_thread_though_a_connection_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OpenAITokens(OpenAIOptions("http://127.0.0.1:9/v1", "toy"))
    monkeypatch.setattr(openai_tokens, "_END_S", 0.5)
    monkeypatch.setattr(backend._client, "aclose", asyncio.Event().wait)
    with pytest.raises(TimeoutError):
        backend.close()
    assert not backend._thread.is_alive()
    backend.close()


def test_closing_ends_everything(serve: Any, tmp_path: Path) -> None:
    server, backend = serve(endless)
    backend.submit([request(1)])
    wait_until(lambda: server.exchanges)
    backend.close()
    backend.close()
    wait_until(lambda: server.broken_pipes)  # the answer was endless
