"""The layers that act against transformers' own pass over the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from embodied_rl.policies.openvla.model import attention_mask
from embodied_rl.policies.openvla.vision import Cache, Layers


def small_llama(num_keys: int = 4, activation: str = "silu") -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_keys,
        hidden_act=activation,
        attn_implementation="sdpa",
    )
    llama = LlamaModel(config).eval()
    for name, parameter in llama.named_parameters():
        # Norms away from 1, so that leaving their weights out shows.
        nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else nn.init.normal_(parameter, std=0.2)
    return llama


def theirs(llama: LlamaModel, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, *, causal: bool = True) -> Tensor:
    return llama(inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=False, is_causal=causal).last_hidden_state


def cache_for(layers: Layers, x: Tensor, num_places: int, *, keep: bool = True) -> Cache:
    return layers.allocate(x, torch.arange(num_places).unsqueeze(0), keep=keep)


@pytest.mark.parametrize("num_keys", [4, 2, 1])
@pytest.mark.parametrize("count", [2, 63, 64, 65, 150])
@torch.no_grad()
def test_prompt_then_tokens_one_by_one(num_keys: int, count: int) -> None:
    """Lengths on both sides of a block's edge; queries that share keys; three more tokens over the cache."""
    llama = small_llama(num_keys)
    x = torch.randn(2, count + 3, 32)
    expected = theirs(llama, x)
    layers = Layers.of(llama)
    cache = cache_for(layers, x, count + 3)
    found = [layers.read(x[:, :count], cache, start=0, mask=None, causal=True, last=1)]
    found += [
        layers.read(x[:, place : place + 1], cache, start=place, mask=None, causal=False, last=1) for place in range(count, count + 3)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, count - 1 :], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_is_seen_by_nobody() -> None:
    llama = small_llama()
    # BOS, two places of padding in the second row, text over a block's edge.
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 1:3] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    x = torch.randn(2, 70, 32)
    layers = Layers.of(llama)
    cache = layers.allocate(x, positions, keep=True)
    found = layers.read(x, cache, start=0, mask=attention_mask(mask, causal=True), causal=True, last=1)
    torch.testing.assert_close(found[:1], theirs(llama, x[:1])[:, -1:], atol=1e-5, rtol=1e-5)
    without = torch.cat([x[1:, :1], x[1:, 3:]], dim=1)
    torch.testing.assert_close(found[1:], theirs(llama, without)[:, -1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_both_directions_with_one_place_for_all_layers(padded: bool) -> None:
    llama = small_llama(num_keys=2)
    x = torch.randn(2, 40, 32)
    layers = Layers.of(llama)
    cache = cache_for(layers, x, 40, keep=False)
    assert len({place.data_ptr() for place in cache.places}) == 1
    seen = torch.ones(2, 40, dtype=torch.bool)
    seen[0, 5:9] = not padded
    mask = attention_mask(seen, causal=False) if padded else None
    found = layers.read(x, cache, start=0, mask=mask, causal=False, last=7)
    everything = torch.zeros(2, 1, 40, 40).masked_fill(~attention_mask(seen, causal=False), float("-inf"))
    expected = theirs(llama, x, everything, torch.arange(40).expand(2, -1), causal=False)
    torch.testing.assert_close(found, expected[:, -7:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_another_activation_and_layers_that_are_not_plain() -> None:
    """A projection that is wrapped, as adapters wrap it, is called."""
    llama = small_llama(activation="gelu")
    x = torch.randn(1, 10, 32)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 0.5 * x.mean(dim=-1, keepdim=True)

    for part in ("q_proj", "v_proj", "o_proj"):
        setattr(llama.layers[1].self_attn, part, Adapted(getattr(llama.layers[1].self_attn, part)))
    layers = Layers.of(llama)
    found = layers.read(x, cache_for(layers, x, 10), start=0, mask=None, causal=True, last=1)
    torch.testing.assert_close(found, theirs(llama, x)[:, -1:], atol=1e-5, rtol=1e-5)
