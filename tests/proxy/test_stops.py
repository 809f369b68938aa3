"""Stop texts across the borders of tokens, several answers to one request, and many clients at once, over real HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.tokens import Completion
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.serving.agents.chat import StopTexts
from embodied_rl.serving.agents.sessions import CapturedTurn
from tests.proxy.test_proxy import END, ask, chat, says, serving, user
from tests.proxy.test_proxy import folder as folder
from tests.proxy.test_proxy import tokenizer as tokenizer
from tests.proxy.test_streams import LetterByLetter, open_stream

SAID = "Thought: go left\nAction: left\nObservation: the cup"
STOP = "\nObservation:"
KEPT = "Thought: go left\nAction: left"


def letters(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return [int(token) for letter in text for token in tokenizer.encode(letter)]


def turns_of(proxy: Any, session: str = "agent") -> tuple[CapturedTurn, ...]:
    return proxy._book.sessions[session].captured().turns


def test_a_stop_text_ends_an_answer_and_cuts_its_tokens(tokenizer: ChatTokenizer) -> None:
    assert len(tokenizer.encode(STOP)) > 1, "one token would show nothing"
    with serving(says(tokenizer, SAID), tokenizer) as proxy:
        messages: list[Any] = [user("Where?")]
        answer = chat(proxy, messages, stop=["never said", STOP, "cup"])
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (KEPT, "stop")
        sampled = letters(tokenizer, KEPT + STOP)
        assert answer["usage"]["completion_tokens"] == len(sampled)
        assert turns_of(proxy)[0].sampled_ids.tolist() == sampled, "what the model chose, the stop text's own tokens among it"
        # The conversation goes on behind these tokens, and the template closes the turn that the model did not close.
        chat(proxy, [*messages, choice["message"], user("The table.")], stop=STOP)
        first, second = turns_of(proxy)
        assert second.parent == 0
        between = tokenizer.encode("<|im_end|>\n<|im_start|>user\nThe table.<|im_end|>\n<|im_start|>assistant\n").tolist()
        assert second.prompt_ids.tolist() == [*first.token_ids, *between]
        # The text of a special token stops too, where the model says it.
        assert chat(proxy, messages, stop="<|im_end|>")["choices"][0]["message"]["content"] == SAID


def test_tokens_are_cut_behind_the_one_that_completes_the_text(tokenizer: ChatTokenizer) -> None:
    """Tokens of several letters: the stop text ends within one, which was sampled whole and stays whole."""
    token_ids = tokenizer.encode("The cup is on the table.").tolist()
    pieces = [tokenizer.decode([token]) for token in token_ids]
    assert max(map(len, pieces)) > 2
    for stop in ("cup", "e t", "he", "able", ".", "T", "nothing"):
        count, text = 0, ""
        while stop not in text and count < len(pieces):
            text, count = text + pieces[count], count + 1
        numbers = np.arange(len(token_ids), dtype=np.float32)
        given = Completion.of(1, token_ids, numbers, -numbers, [3] * len(token_ids), "length", limit="max_new_tokens")
        cut = StopTexts((stop,), tokenizer.decode).cut(given)
        assert cut.token_ids.tolist() == token_ids[:count]
        assert (cut.log_prob.tolist(), cut.sampling_log_prob.tolist()) == (numbers[:count].tolist(), (-numbers[:count]).tolist())
        assert cut.finish_reason == ("length" if stop == "nothing" else "stop")


def test_a_stream_holds_back_what_a_stop_text_may_take(tokenizer: ChatTokenizer) -> None:
    endless = letters(tokenizer, SAID + " is here" * 5000)
    backend = LetterByLetter(endless)
    with serving(backend, tokenizer, max_new_tokens=4000) as proxy:
        for _ in range(len(KEPT) + 3):  # three letters into the stop text
            backend.allowed.release()
        connection, events = open_stream(proxy, stop=[STOP])
        told = ""
        while len(told) < len(KEPT):
            told += next(events)["choices"][0]["delta"].get("content", "")
        assert told == KEPT
        for _ in range(len(STOP) + 10):
            backend.allowed.release()
        rest = list(events)
        connection.close()
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in rest) == ""
        assert rest[-1]["choices"][0]["finish_reason"] == "stop"
        assert backend.num_in_flight == 0, "the backend was told to end"
        assert turns_of(proxy)[0].sampled_ids.tolist() == letters(tokenizer, KEPT + STOP)


def test_what_a_stop_text_leaves_is_what_was_sampled(folder: Path) -> None:
    policy = build_language_policy(LanguageConfig(model=str(folder)))
    with serving(TorchTokens(policy.generation_model()), policy.tokenizer, max_new_tokens=40, policy_sampling=True) as proxy:
        messages = [user("Where is the cup?")]
        texts = [chat(proxy, messages, key=f"whole-{seed}", seed=seed)["choices"][0]["message"]["content"] for seed in range(8)]
        seed = max(range(8), key=lambda seed: len(texts[seed]))
        text, stop = texts[seed], texts[seed][9:12]
        got = chat(proxy, messages, key="cut", seed=seed, stop=[stop])["choices"][0]
        assert got["message"]["content"] == text[: text.index(stop)]
        (whole,), (cut,) = turns_of(proxy, f"whole-{seed}"), turns_of(proxy, "cut")
        count = len(cut.sampled_ids)
        assert 0 < count < len(whole.sampled_ids)
        assert cut.sampled_ids.tolist() == whole.sampled_ids[:count].tolist()
        (row,) = proxy._book.sessions["cut"].captured().trajectories()
        recomputed = policy.evaluate([TokenSequence(row.token_ids, row.mask)]).log_prob[0].detach().numpy()
        np.testing.assert_allclose(recomputed[row.mask], row.log_prob[row.mask], atol=1e-4)
        np.testing.assert_allclose(row.log_prob, row.sampling_log_prob, atol=1e-6)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_several_answers_to_one_request_are_captured_each(folder: Path, streamed: bool) -> None:
    policy = build_language_policy(LanguageConfig(model=str(folder)))
    with serving(TorchTokens(policy.generation_model()), policy.tokenizer, max_new_tokens=8) as proxy:
        if streamed:
            connection, coming = open_stream(proxy, n=3, seed=1, stream_options={"include_usage": True})
            events = list(coming)
            connection.close()
            texts, name, used = ["", "", ""], events[0]["id"], events[-1]["usage"]
            for event in events[:-1]:
                texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        else:
            answer = chat(proxy, [user("Where?")], n=3, seed=1)
            texts, name, used = [choice["message"]["content"] for choice in answer["choices"]], answer["id"], answer["usage"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        turns = turns_of(proxy)
        assert [policy.tokenizer.decode([t for t in turn.sampled_ids if t != END]) for turn in turns] == texts
        assert len(set(texts)) == 3
        assert [turn.completion_id for turn in turns] == [name, f"{name}:1", f"{name}:2"]
        assert used["completion_tokens"] == sum(len(turn.sampled_ids) for turn in turns)
        assert used["prompt_tokens"] == len(turns[0].prompt_ids)
        # A reward names one of them; each is a sequence of its own; the first is what one answer would have been.
        ask(proxy, "/sessions/agent/reward", {"reward": 0.5, "turn": f"{name}:1"})
        assert [turn.reward for turn in turns_of(proxy)] == [0.0, 0.5, 0.0]
        assert len(proxy._book.sessions["agent"].captured().trajectories()) == 3
        assert chat(proxy, [user("Where?")], key="one", seed=1)["choices"][0]["message"]["content"] == texts[0]


def test_fifty_sessions_at_once(folder: Path) -> None:
    policy = build_language_policy(LanguageConfig(model=str(folder)))
    ready = threading.Barrier(50)
    with serving(TorchTokens(policy.generation_model()), policy.tokenizer, max_new_tokens=4) as proxy:

        def play(number: int) -> None:
            messages: list[Any] = [user(f"go {number}")]
            ready.wait(60)
            for _ in range(2):
                answer = chat(proxy, messages, key=f"client-{number}", stop=["never said"])
                messages += [answer["choices"][0]["message"], user("And now?")]

        with ThreadPoolExecutor(50) as threads:
            list(threads.map(play, range(50)))
        for number in range(50):
            first, second = turns_of(proxy, f"client-{number}")
            assert first.prompt_ids.tolist() == policy.tokenizer.chat([user(f"go {number}")]).tolist()
            assert second.parent == 0
            assert second.prompt_ids.tolist()[: len(first.token_ids)] == first.token_ids.tolist()


def test_a_model_by_its_name(tokenizer: ChatTokenizer) -> None:
    with serving(says(tokenizer, "x"), tokenizer) as proxy:
        assert ask(proxy, "/models/tiny") == (200, {"id": "tiny", "object": "model", "created": 0, "owned_by": "embodied_rl"})
        status, answer = ask(proxy, "/models/owner%2Fother")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'owner/other' is not served here" in answer["error"]["message"]
