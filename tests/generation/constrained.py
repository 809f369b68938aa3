"""What a distribution looks like that is cut to some whole answers, by trying every token of the vocabulary at every place."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodied_rl.policies.chat_tokenizer import ChatTokenizer

ANSWERS = ("go left", "go right", "go")
STRUCTURE = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"enum": ANSWERS}}})
"""One of `ANSWERS`, as JSON."""


def masked_log_prob(
    logits: Tensor, sampled: Sequence[int], tokenizer: ChatTokenizer, *, stop: int, temperature: float = 1.0
) -> tuple[np.ndarray, int]:
    """([n] log-probability of each sampled token among those that lead to one of `ANSWERS`, how many were the only ones left).

    Args:
        logits: [n, V] of the places that were sampled.
        stop: the token that ends an answer.
    """
    whole = [json.dumps(answer) for answer in ANSWERS]
    said, found, forced = "", [], 0
    for place, token in enumerate(sampled):
        allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
        for candidate in range(tokenizer.vocab_size):
            text = said + tokenizer.decode([candidate])
            allowed[candidate] = text != said and any(answer.startswith(text) for answer in whole)
        allowed[stop] = said in whole
        assert allowed[token], f"{said!r} goes on with a token that leads nowhere"
        forced += int(allowed.sum()) == 1
        masked = logits[place].double().masked_fill(~allowed, float("-inf"))
        likeliest = float(masked.argmax() == token)
        found.append(float((masked / temperature).log_softmax(-1)[token]) if temperature else np.log(likeliest))
        said += tokenizer.decode([token])
    assert said in whole
    return np.array(found), forced
