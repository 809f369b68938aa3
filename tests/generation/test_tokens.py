"""Requests, completions, and what is done about prompts that are too long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import (
    Completion,
    ContextRoom,
    Failure,
    GenerationRequest,
    check_new_ids,
    context_room,
    derive_seed,
    uniform_stream,
)


def request(number: int = 0, length: int = 3, new: int = 4, **options: Any) -> GenerationRequest:
    return GenerationRequest(request_id=number, prompt_ids=np.arange(length), max_new_tokens=new, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"temperature": -0.1}, r"temperature must be >= 0, got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_k": -1}, "top_k must be >= 0, got -1"),
        ({"length": 0}, r"at least one integer, \[P\], got int64 \[0\]"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**options)


def test_prompt_must_be_ids() -> None:
    with pytest.raises(ValueError, match="got float64"):
        GenerationRequest(request_id=1, prompt_ids=np.ones(3), max_new_tokens=1)


def test_when_sampling_is_from_the_policy_itself() -> None:
    assert request().samples_from_policy
    assert not any(request(**{name: value}).samples_from_policy for name, value in (("temperature", 0.9), ("top_p", 0.9), ("top_k", 5)))


def test_completion_is_consistent() -> None:
    made = Completion.of(1, [4, 5], [-1.0, -2.0], [-0.5, -1.0], [0, 1], "length", limit="context")
    assert made.token_ids.dtype == np.int64
    assert made.log_prob.dtype == np.float32
    assert made.num_tokens == 2
    assert made.trainable
    with pytest.raises(ValueError, match="differ in length"):
        Completion.of(1, [4], [], [], [], "stop")
    with pytest.raises(ValueError, match="does not go with"):
        Completion.of(1, [], [], [], [], "failed")
    with pytest.raises(ValueError, match="does not go with"):
        Completion.of(1, [], [], [], [], "stop", limit="context")


def test_text_alone_does_not_train() -> None:
    assert not Completion.of(1, [4], [float("nan")], [float("nan")], [0], "stop", text="left").trainable
    assert not Completion.of(1, [], [], [], [], "stop", text="left").trainable
    assert not Completion.failed(1, Failure("timeout", "too late")).trainable


def test_room_by_hand() -> None:
    # 3 + 4 = 7 tokens.
    assert context_room(request(), 7) == ContextRoom(4, "max_new_tokens")
    assert context_room(request(), 6) == ContextRoom(3, "context")
    assert context_room(request(), 4) == ContextRoom(1, "context")
    too_long = context_room(request(), 3)
    assert isinstance(too_long, Failure)
    assert too_long.kind == "prompt_too_long"
    assert "3 tokens" in too_long.message


def test_ids_in_flight_are_unique() -> None:
    check_new_ids([request(1), request(2)], [3])
    with pytest.raises(UserError, match="Request id 3 is already in flight"):
        check_new_ids([request(3)], [3])
    with pytest.raises(UserError, match="Request id 1 is already in flight"):
        check_new_ids([request(1), request(1)], [])


def test_seeds_are_the_same_everywhere() -> None:
    # sha256("7:1"), its first eight bytes as a little-endian number, halved.
    assert derive_seed(7, 1) == int.from_bytes(bytes.fromhex(_sha("7:1"))[:8], "little") // 2
    assert len({derive_seed(base, number) for base in range(20) for number in range(20)}) == 400
    first, second = uniform_stream(derive_seed(7, 1)), uniform_stream(derive_seed(7, 1))
    assert [first.random() for _ in range(3)] == second.random(3).tolist()


def _sha(text: str) -> str:
    import subprocess

    return subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True).stdout.split()[0].decode()
