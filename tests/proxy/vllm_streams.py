"""Reads an answer of vLLM's asynchronous engine through the proxy while it is sampled: ``python -m tests.proxy.vllm_streams``.

In a process of its own, because an engine leaves its mark on the process it runs in. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.config.language import LanguageConfig
from embodied_rl.generation.vllm_tokens import AsyncVLLMTokens, VLLMOptions
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from embodied_rl.proxy.app import AgentProxy, ProxyOptions
from tests.policies.language_models import TEXTS, alone
from tests.proxy.test_proxy import chat, user
from tests.proxy.test_streams import open_stream

NUM_TOKENS = 400
SETTINGS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 7}


def read(policy: LanguagePolicy, backend: AsyncVLLMTokens) -> dict[str, Any]:
    """One answer as a stream, then the same one as a whole."""
    options = ProxyOptions(model="tiny", stop_ids=(), max_new_tokens=NUM_TOKENS)
    proxy = AgentProxy(backend, policy.tokenizer, options)
    try:
        connection, events = open_stream(proxy, **SETTINGS)
        pieces, in_flight = [], []
        for event in events:
            pieces.append(event["choices"][0]["delta"].get("content") or "")
            in_flight.append(backend.num_in_flight)
        connection.close()
        whole = chat(proxy, [user("Where?")], **SETTINGS)["choices"][0]["message"]["content"]
        streamed, plain = proxy._book.sessions["agent"].captured().turns
    finally:
        proxy.close()
    whole_ids = streamed.token_ids
    expected, _ = alone(policy.model, TokenSequence(whole_ids, np.arange(len(whole_ids)) >= len(streamed.prompt_ids)))
    return {
        "pieces": sum(bool(piece) for piece in pieces),
        "first_while_sampling": in_flight[next(index for index, piece in enumerate(pieces) if piece)],
        "same_text": "".join(pieces) == whole,
        "same_tokens": streamed.sampled_ids.tolist() == plain.sampled_ids.tolist(),
        "num_tokens": len(streamed.sampled_ids),
        "versions": sorted(set(streamed.version.tolist())),
        "error": float(np.abs(streamed.log_prob - expected[-len(streamed.sampled_ids) :]).max()),
        "left": len(backend.sampled_so_far(range(10))),
    }


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = make_tiny_model(Path(place) / "model", TEXTS, shape=TinyShape(spread=0.15, max_context=512))
        policy = build_language_policy(LanguageConfig(str(folder), dtype="float32"))
        backend = AsyncVLLMTokens(VLLMOptions(str(folder), max_batch=4, seed=5, version=3))
        try:
            found = read(policy, backend)
        finally:
            backend.close()
    sys.stdout.write("\nFOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
