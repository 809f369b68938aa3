"""Attention of packed rows, sequence by sequence, against one softmax under a mask of all tokens by all tokens, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from embodied_rl.policies.packing import by_sequence, packed_inputs

LENGTHS = [5, 1, 9, 2]
HEADS, GROUPS, WIDTH = 4, 2, 8


def masked(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """[B, T, H, D]: each token sees those before it, of its own sequence, in its window."""
    place = torch.arange(sum(LENGTHS))
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = (of[:, None] == of) & (place[:, None] >= place) & (place[:, None] - place < (window or len(place)))
    key, value = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_equals_one_softmax_under_a_mask(window: int | None) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(1)
    parts = [torch.randn(2, heads, sum(LENGTHS), WIDTH, dtype=torch.float64, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, is_causal=True)
    inputs = packed_inputs(LENGTHS, torch.device("cpu"))
    found, weights = ALL_ATTENTION_FUNCTIONS[by_sequence()](
        module, *parts, **inputs, sliding_window=window, scaling=WIDTH**-0.5, dropout=0.0
    )
    expected, towards = masked(*parts, window), torch.randn(2, sum(LENGTHS), HEADS, WIDTH, dtype=torch.float64)
    assert weights is None
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans for every length"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    gradients, wanted = (torch.autograd.grad((one * towards).sum(), parts) for one in (found, expected))
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_layer_without_the_lengths_is_an_error() -> None:
    """And sees no token of another sequence."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    part = torch.randn(1, 2, 4, WIDTH)
    mask = packed_inputs([2, 2], torch.device("cpu"))["attention_mask"]
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    with pytest.raises(RuntimeError, match="attn_mask"):
        ALL_ATTENTION_FUNCTIONS[by_sequence()](module, part, part, part, mask, scaling=1.0, dropout=0.0)
