"""Backends without a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import GenerationRequest, RandomTokens, ScriptedTokens


def request(number: int, new: int = 10, prompt: int = 5, **options: Any) -> GenerationRequest:
    return GenerationRequest(request_id=number, prompt_ids=np.array([prompt]), max_new_tokens=new, **options)


def test_script_answers_the_prompt() -> None:
    backend = ScriptedTokens(lambda asked: [int(asked.prompt_ids[0]) + 1, 2, 9], version=4)
    backend.submit([request(1), request(2, prompt=7, stop_ids=(2,)), request(3, new=1)])
    whole, stopped, cut = backend.poll()
    assert (whole.token_ids.tolist(), whole.finish_reason) == ([6, 2, 9], "stop")
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([8, 2], "stop")
    assert (cut.token_ids.tolist(), cut.finish_reason, cut.limit) == ([6], "length", "max_new_tokens")
    assert whole.log_prob.tolist() == [0.0] * 3
    assert whole.version.tolist() == [4] * 3
    assert backend.poll() == []


def test_empty_answers_are_answers() -> None:
    backend = ScriptedTokens(lambda asked: [])
    backend.submit([request(1)])
    (found,) = backend.poll()
    assert found.num_tokens == 0
    assert found.finish_reason == "stop"
    assert not found.trainable


def test_release_abort_and_version() -> None:
    backend = ScriptedTokens(lambda asked: [3])
    backend.submit([request(1), request(2)])
    backend.release_memory()
    backend.abort([2, 77])
    (aborted,) = backend.poll()
    assert (aborted.request_id, aborted.finish_reason, aborted.num_tokens) == (2, "aborted", 0)
    backend.load_weights(6, [])
    backend.restore_memory()
    (answered,) = backend.poll()
    assert answered.request_id == 1
    assert answered.version.tolist() == [6]
    with pytest.raises(UserError, match="already in flight"):
        backend.submit([request(3), request(3)])
    backend.close()
    assert backend.poll() == []


CHOICES = [[10, 2], [10, 11, 2], [12, 2], [12, 2]]
"""An answer that stands twice is twice as likely."""


def test_choices_and_their_probabilities_by_hand() -> None:
    backend = RandomTokens(choices=CHOICES, seed=1)
    backend.submit([request(number) for number in range(4000)])
    found = backend.poll()
    counts = Counter(tuple(completion.token_ids.tolist()) for completion in found)
    assert counts[(12, 2)] / 4000 == pytest.approx(0.5, abs=0.04)
    assert counts[(10, 2)] / 4000 == pytest.approx(0.25, abs=0.04)
    by_answer = {tuple(completion.token_ids.tolist()): completion.log_prob for completion in found}
    # Two of four begin with 10, and of these two one goes on with 2.
    np.testing.assert_allclose(by_answer[(10, 2)], np.log([0.5, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(by_answer[(10, 11, 2)], np.log([0.5, 0.5, 1.0]), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(by_answer[(12, 2)], np.log([0.5, 1.0]), rtol=1e-6, atol=1e-7)


def test_uniform_tokens_until_a_stop() -> None:
    backend = RandomTokens(token_ids=[3, 4, 5, 2], seed=1)
    backend.submit([request(number, new=200, stop_ids=(2,)) for number in range(500)] + [request(1000, new=6)])
    *found, unstopped = backend.poll()
    assert all(completion.token_ids[-1] == 2 and 2 not in completion.token_ids[:-1] for completion in found)
    np.testing.assert_allclose(np.concatenate([completion.log_prob for completion in found]), np.log(0.25), rtol=1e-6)
    # A stop comes with probability 1/4: four tokens on average, with standard deviation sqrt(12 / 500).
    assert np.mean([completion.num_tokens for completion in found]) == pytest.approx(4.0, abs=5 * np.sqrt(12 / 500))
    assert (unstopped.finish_reason, unstopped.limit, unstopped.num_tokens) == ("length", "max_new_tokens", 6)


def test_seed_decides() -> None:
    def answer(first: int, seed: int | None) -> list[int]:
        backend = RandomTokens(token_ids=range(100), seed=first)
        backend.submit([request(7, seed=seed)])
        return backend.poll()[0].token_ids.tolist()

    assert answer(1, 5) == answer(2, 5)
    assert answer(1, None) == answer(1, None)
    assert answer(1, None) != answer(2, None)


def test_nothing_to_choose_from() -> None:
    for options in ({}, {"choices": []}, {"choices": [[]]}, {"token_ids": []}, {"choices": [[1]], "token_ids": [1]}):
        with pytest.raises(UserError, match="needs either choices"):
            RandomTokens(**options)  # type: ignore[arg-type]
