"""Attention of a packed row, sequence by sequence: a mask of all its tokens by all its tokens is not made, and nothing is computed that it
would throw away. Of n equally long sequences that is 1/n of the work, and half of it again for the triangle.

transformers calls it as one of its own (https://huggingface.co/docs/transformers/attention_interface).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn


def by_sequence() -> str:
    """transformers' ``attn_implementation``, registered there: for a model that is given no lengths it is ``sdpa``."""
    return registered("sdpa_by_sequence", attention_by_sequence)


@cache
def registered(name: str, attention: Callable[..., tuple[Tensor, None]]) -> str:
    """The name of transformers' ``attn_implementation`` that is `attention`, given that of ``sdpa`` first, with the masks of ``sdpa``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, partial(attention, sdpa_attention_forward))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def packed_inputs(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a model with attention `by_sequence` takes for a packed row of sequences so long, beside its tokens and positions.

    A mask of four axes is handed down to the layers as it is. This one is no mask: where the lengths are not handed down beside it,
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
    """[B, T, H, D], and no weights: causal attention of query [B, H, T, D] to key and value [B, G, T, D] of G groups of heads.

    Args:
        attention: transformers' own, of one sequence or of padded rows.
        sequence_lengths: of the sequences that stand behind one another in T tokens; None: `attention_mask` counts.
        sliding_window: so many tokens, itself among them, are seen by each; `attention_mask` has it where it counts.

    Raises ValueError: the layer sees less of its sequence than all before a token, and only a mask would say how much.
    """
    if sequence_lengths is None:
        return attention(module, query, key, value, attention_mask, **options)
    if sliding_window is None and _is_limited(module):
        raise ValueError("this layer's window is in its mask only")
    of_each = zip(*(part.split(sequence_lengths, dim=2) for part in (query, key, value)), strict=True)
    found = [attention(module, *parts, _window(parts[0], sliding_window), **options)[0] for parts in of_each]
    return torch.cat(found, dim=1), None


def _is_limited(module: nn.Module) -> bool:
    """Whether a layer of a transformers model sees less than all that is before a token."""
    config = getattr(module, "config", None)
    if kinds := getattr(config, "layer_types", None):
        return bool(kinds[module.layer_idx] != "full_attention")
    return getattr(config, "sliding_window", None) is not None


def _window(query: Tensor, tokens: int | None) -> Tensor | None:
    """[1, 1, T, T] bool: what each token sees of a sequence that is longer than its window; None: all that is before it."""
    length = query.shape[2]
    if tokens is None or length <= tokens:
        return None
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril().triu(1 - tokens)
