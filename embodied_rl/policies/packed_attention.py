"""Attention of a packed row, sequence by sequence, without a mask of all tokens by all tokens and without the work that it would discard.
For n equally long sequences that is 1/n of the work, and half of it again for the triangle.

transformers calls it through its attention interface (https://huggingface.co/docs/transformers/attention_interface).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn


def by_sequence() -> str:
    """Name of transformers' ``attn_implementation`` that this registers; for a model without lengths it equals ``sdpa``."""
    return registered("sdpa_by_sequence", attention_by_sequence)


@cache
def registered(name: str, attention: Callable[..., tuple[Tensor, None]]) -> str:
    """Register `attention`, with ``sdpa`` as first argument and its masks, as transformers' ``attn_implementation``; return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    # cuDNN, torch's first choice on Hopper, plans for every new length, some 30 ms each, and lengths change with every call.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(name, partial(attention, sdpa_attention_forward))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def packed_inputs(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Extra inputs of a model with attention `by_sequence`, for a packed row of sequences with these lengths.

    Models pass a mask of four axes to their layers unchanged. This one is invalid as a mask: if a model does not pass the lengths too,
    attention raises RuntimeError, and no token of another sequence is seen.
    """
    return {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device), "sequence_lengths": list(lengths)}


def attention_by_sequence(
    attention: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: list[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query [B, H, T, D] to key and value [B, G, T, D] of G groups of heads: returns [B, T, H, D], and no weights.

    Args:
        attention: transformers' own, for one sequence or for padded rows.
        sequence_lengths: lengths of the sequences concatenated in T tokens; None: `attention_mask` is used.
        sliding_window: number of tokens that each token sees, including itself; `attention_mask` already includes it.

    Raises ValueError: the layer limits attention within a sequence in a way that only a mask describes.
    """
    if sequence_lengths is None:
        return attention(module, query, key, value, attention_mask, **options)
    if sliding_window is None and _is_limited(module):
        raise ValueError("this layer's window is in its mask only")
    of_each = zip(*(part.split(sequence_lengths, dim=2) for part in (query, key, value)), strict=True)
    found = [attention(module, *parts, _window(parts[0], sliding_window), **options)[0] for parts in of_each]
    return torch.cat(found, dim=1), None


def _is_limited(module: nn.Module) -> bool:
    """Whether a layer of a transformers model sees less than all earlier tokens."""
    config = getattr(module, "config", None)
    if kinds := getattr(config, "layer_types", None):
        return bool(kinds[module.layer_idx] != "full_attention")
    return getattr(config, "sliding_window", None) is not None


def _window(query: Tensor, tokens: int | None) -> Tensor | None:
    """[1, 1, T, T] bool mask for a sequence longer than its window; None: each token sees all earlier ones."""
    length = query.shape[2]
    if tokens is None or length <= tokens:
        return None
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril().triu(1 - tokens)
