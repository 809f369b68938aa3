"""Layout of token sequences in a forward's rows: several in one row, or one per row with padding.

Shape legend: B sequences of at most S tokens, R rows of W columns in one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

Layout = Literal["packed", "right", "left"]
"""packed: the sequences of one micro-batch are concatenated in a single row and do not attend to each other. right, left: one per row, with
padding on that side."""


KeptStructure = tuple[int, int, str, tuple[int, ...]]
"""(first token of an answer, end of the answer, its `GenerationRequest.structure`, tokens that may end it)"""


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A prompt and the tokens sampled after it, as token ids: a whole conversation may be one sequence.
    Raises ValueError if the shapes differ, or the first token is to be evaluated: nothing precedes it."""

    token_ids: np.ndarray
    """Token ids [S], int64."""
    mask: np.ndarray
    """[S] bool: tokens whose log-probability, entropy and value are needed (the sampled ones)."""
    images: tuple[np.ndarray, ...] = field(default=(), repr=False)
    """Images, uint8 [H, W, 3] each, in the order of their placeholders; vision-language models only."""
    structures: tuple[KeptStructure, ...] = ()
    """Structures of the answers that were drawn with one."""
    temperature: float = 1.0
    """Logits are divided by it before log-probabilities and entropies are taken."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype.kind not in "iu" or self.mask.shape != self.token_ids.shape:
            raise ValueError(
                f"token_ids must be integers [S] and mask [S], got {self.token_ids.dtype} {self.token_ids.shape}, {self.mask.shape}."
            )
        if len(self.mask) == 0 or self.mask[0]:
            raise ValueError("The first token of a sequence cannot be evaluated, because nothing precedes it. Put it into the prompt.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def of(
        prompt_ids: np.ndarray,
        sampled_ids: np.ndarray,
        images: tuple[np.ndarray, ...] = (),
        structure: str | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> TokenSequence:
        """Make a sequence of a prompt [P] and n sampled tokens, which are evaluated; `structure` and `stop_ids`: those of the request."""
        mask = np.zeros(len(prompt_ids) + len(sampled_ids), bool)
        mask[len(prompt_ids) :] = True
        kept = () if structure is None else ((len(prompt_ids), len(mask), structure, stop_ids),)
        return TokenSequence(np.concatenate([prompt_ids, sampled_ids]).astype(np.int64), mask, images, kept)


@dataclass(frozen=True, eq=False)
class Rows:
    """One forward's input, and the positions of its outputs."""

    token_ids: np.ndarray
    """[R, W] int64; 0 at padding."""
    position_ids: np.ndarray
    """[R, W] int64, from 0 in each sequence; 0 at padding."""
    attention_mask: np.ndarray | None
    """[R, W] bool, False at padding; None for one packed row, where each sequence's positions start again from 0."""
    sequence: np.ndarray
    """[E] int64 sequence of each of E evaluated tokens."""
    column: np.ndarray
    """[E] int64 index of the token in its sequence."""
    row: np.ndarray
    """[E] int64 row of the token *before* it, whose output predicts it."""
    place: np.ndarray
    """[E] int64 column of the token before it."""
    target: np.ndarray
    """[E] int64 token id."""


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, layout: Layout) -> list[list[int]]:
    """Divide sequences into forwards of at most `max_tokens` columns x rows with padding; a longer sequence gets its own forward.

    Packed rows are filled first-fit from the longest down; padded ones contain neighbours in length.

    Returns the indices of each micro-batch; every sequence is in exactly one.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    if layout == "packed":
        room: list[int] = []
        for index in order:
            for number, free in enumerate(room):
                if lengths[index] <= free:
                    batches[number].append(index)
                    room[number] -= lengths[index]
                    break
            else:
                batches.append([index])
                room.append(max_tokens - lengths[index])
        return batches
    for index in order:
        # The first of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(sequences: Sequence[TokenSequence], layout: Layout) -> Rows:
    """Lay sequences out for one forward."""
    lengths = np.array([len(sequence) for sequence in sequences])
    if layout == "packed":
        shape, rows = (1, int(lengths.sum())), np.zeros(len(lengths), np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    else:
        shape, rows = (len(lengths), int(lengths.max())), np.arange(len(lengths))
        starts = shape[1] - lengths if layout == "left" else np.zeros(len(lengths), np.int64)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    attention = np.zeros(shape, bool)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("sequence", "column", "row", "place", "target")}
    for number, (sequence, row, start) in enumerate(zip(sequences, rows, starts, strict=True)):
        where = slice(start, start + len(sequence))
        token_ids[row, where] = sequence.token_ids
        position_ids[row, where] = np.arange(len(sequence))
        attention[row, where] = True
        columns = np.flatnonzero(sequence.mask)
        parts["sequence"].append(np.full(len(columns), number))
        parts["column"].append(columns)
        parts["row"].append(np.full(len(columns), row))
        parts["place"].append(start + columns - 1)
        parts["target"].append(sequence.token_ids[columns])
    found = {name: np.concatenate(arrays).astype(np.int64) for name, arrays in parts.items()}
    return Rows(token_ids, position_ids, None if layout == "packed" else attention, **found)


# ---- attention of a packed row, sequence by sequence ------------------------------------------------------------------

# Without a mask of all tokens by all tokens, and without the work that it would discard: for n equally long sequences that is 1/n of the
# work, and half of it again for the triangle. transformers calls it through its attention interface
# (https://huggingface.co/docs/transformers/attention_interface).


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
