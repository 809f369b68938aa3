"""Small random language models of several families, and log-probabilities worked out one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from embodied_rl.policies.packing import TokenSequence
from embodied_rl.policies.tiny_language import make_tiny_model, train_tokenizer

TEXTS = ["You are at (1, 2). The goal is at (3, 3).", "go left", "go right", "go up", "go down", "Answer with one move."] * 4
WINDOW = 4
"""Of the models with sliding attention: shorter than the sequences that are tried."""

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def configs(vocab_size: int) -> dict[str, Any]:
    """{name: transformers configuration}"""
    sizes = {**_SIZES, "vocab_size": vocab_size}
    return {
        "llama": transformers.LlamaConfig(**sizes),
        "llama_tied": transformers.LlamaConfig(**sizes, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**sizes, head_dim=16),
        # One layer of each kind.
        "qwen2_sliding": transformers.Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
        ),
        "mistral_sliding": transformers.MistralConfig(**sizes, sliding_window=WINDOW),
        # Its layers have the window in their masks alone.
        "qwen2_moe_sliding": transformers.Qwen2MoeConfig(
            **sizes,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
            num_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "mixtral": transformers.MixtralConfig(**sizes, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
        # Scores within ±1.
        "gemma2_capped": transformers.Gemma2Config(**sizes, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=1.0),
        # Learned positions, and dropout of 0.1 unless it is switched off.
        "gpt2": transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.2, bos_token_id=2, eos_token_id=2
        ),
    }


def make_model(kind: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """A folder with a model of a family and a tokenizer. `options`: values of its configuration."""
    tokenizer = train_tokenizer(TEXTS, 300)
    config = configs(len(tokenizer))[kind]
    config.update(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


def tiny(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, TEXTS, **options)


def random_sequences(seed: int, lengths: Sequence[tuple[int, int]], vocab_size: int = 259) -> list[TokenSequence]:
    """One sequence for each (prompt length, number of sampled tokens)."""
    rng = np.random.default_rng(seed)
    return [TokenSequence.of(rng.integers(3, vocab_size, p), rng.integers(3, vocab_size, n)) for p, n in lengths]


def alone(model: Any, sequence: TokenSequence, excluded: int | None = None, **inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, entropy) of every token but the first, [S − 1] float64 each: one plain forward, the rest in numpy.

    `excluded`: a token that is never sampled.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sequence.token_ids)[None], **inputs).logits[0, :-1].double().numpy()
    if excluded is not None:
        logits[:, excluded] = -1e9
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probs[np.arange(len(log_probs)), sequence.token_ids[1:]], -(np.exp(log_probs) * log_probs).sum(-1)


def load(folder: Path, **options: Any) -> Any:
    """The model by transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
