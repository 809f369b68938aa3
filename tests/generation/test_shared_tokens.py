"""One backend for several askers: real torch sampling, and a script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, ScriptedTokens, TokenView
from embodied_rl.generation.torch_tokens import TorchTokens
from tests.agents.samples import tiny_policy


def ask(number: int, prompt: list[int], tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id=number, prompt_ids=np.array(prompt), max_new_tokens=tokens, seed=number)


def told(completions: list[Completion]) -> dict[int, list[int]]:
    return {completion.request_id: completion.token_ids.tolist() for completion in completions}


def test_each_asker_gets_its_own_answers_under_its_own_numbers() -> None:
    backend = ScriptedTokens(lambda request: [int(request.prompt_ids[0]) + 100])
    one = TokenView(backend)
    other = TokenView(backend, one)
    one.submit([ask(0, [1]), ask(1, [2])])
    other.submit([ask(0, [3])])
    assert told(one.poll(min_ready=2)) == {0: [101], 1: [102]}
    assert told(other.poll()) == {0: [103]}, "it was answered while the other one waited"
    assert one.poll() == [], "nothing is in flight"
    one.submit([ask(5, [9])])
    with pytest.raises(UserError, match="already in flight"):
        one.submit([ask(5, [9])])
    one.abort([5, 77])
    (aborted,) = one.poll()
    assert (aborted.request_id, aborted.finish_reason) == (5, "aborted")


def test_what_is_sampled_does_not_depend_on_who_else_asks(tmp_path: Path) -> None:
    model = tiny_policy(tmp_path, spread=0.5).generation_model()
    alone = TorchTokens(model, max_batch=8, seed=0)
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    alone.submit([ask(number, prompt, 6) for number, prompt in enumerate(prompts)])
    wanted = told(alone.poll(min_ready=3))
    backend = TorchTokens(model, max_batch=8, seed=0)
    one = TokenView(backend)
    other = TokenView(backend, one)
    one.submit([ask(0, prompts[0], 6), ask(1, prompts[1], 6)])
    other.submit([ask(2, prompts[2], 6)])
    found = told(other.poll()) | told(one.poll(min_ready=2))
    assert found == wanted
    one.load_weights(4, ())
    assert (one.version, other.version) == (4, 4)


def test_a_view_that_does_not_wait_takes_steps_until_its_answer_is_there(tmp_path: Path) -> None:
    backend = TorchTokens(tiny_policy(tmp_path).generation_model(), max_batch=8, seed=0)
    view = TokenView(backend)
    view.submit([ask(0, [5], 4)])
    found: list[Completion] = []
    for _ in range(20):
        found += view.poll(timeout_s=0.0)
    assert len(found) == 1
    view.submit([ask(1, [5], 4)])
    backend.release_memory()
    assert view.poll() == [], "a wait without a limit returns at once without memory"
    backend.restore_memory()
    assert len(view.poll()) == 1
