"""Llama's layers for acting: no gradients, no hooks, nothing between two layers but the arithmetic.

A module's call and every look-up of one of its parts cost more than a small layer, or a single token, costs in arithmetic. So a
decision looks everything up once (`Layers.of`) and then runs plain functions on tensors of two axes. They use the modules' own
weights: what a weight update writes is seen by the next decision, and numbers agree with the training pass to rounding. Adapters
work: a projection that is no plain layer is called. Weights must be whole: give generation its own copy where training shards them.

Shape legend: B rows, n tokens read at once, T places of a cache, H heads of queries, G heads of keys and values, h width of a head,
D width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_Function = Callable[[Tensor], Tensor]
_Added = Callable[[Tensor, Tensor], Tensor]
"""(x, y) → x + projection(y)"""


class _Layer(NamedTuple):
    """The parts of one layer, in the order in which they run."""

    input_norm: _Function
    query: _Function
    key: _Function
    value: _Function
    output: _Added
    norm: _Function
    gate: _Function
    activation: _Function
    up: _Function
    down: _Added


@dataclass(frozen=True)
class Cache:
    """Memory of one decision, written in place, and the rotations of all its places."""

    places: tuple[Tensor, ...]
    """Of each layer: [B, T, 2·G, h], keys before values. One tensor serves all layers where no later token reads it."""
    cosine: Tensor
    """[B, T, 1, h], or [1, T, 1, h] where all rows count their places alike."""
    sine: Tensor
    """As `cosine`, negative in the first half: the half-turned vector is then a plain roll."""


@dataclass(frozen=True)
class Layers:
    """A language model's layers and last norm as functions: valid until its weights are moved, so build it for each decision."""

    layers: tuple[_Layer, ...]
    final_norm: _Function
    num_keys: int
    """G"""
    head_width: int
    """h"""
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @staticmethod
    def of(llama: LlamaModel) -> Layers:
        """Of transformers' `LlamaModel`."""
        config = llama.config
        num_heads = config.num_attention_heads
        return Layers(
            tuple(_layer(cast("LlamaDecoderLayer", layer), config.hidden_act) for layer in llama.layers),
            _norm(llama.norm),
            config.num_key_value_heads or num_heads,
            config.head_dim or config.hidden_size // num_heads,
            llama.rotary_emb,
        )

    def allocate(self, embeds: Tensor, positions: Tensor, *, keep: bool) -> Cache:
        """A cache without content.

        Args:
            embeds: [B, n, D]: its rows, dtype and device are the cache's.
            positions: [B, T] or [1, T] int64.
            keep: whether later tokens read what earlier ones left in every layer.
        """
        cosine, sine = self.rotary(embeds, positions)
        first, second = sine.chunk(2, dim=-1)
        sine = torch.cat([-first, second], dim=-1)
        num_layers = len(self.layers)
        shape = (num_layers if keep else 1, len(embeds), positions.shape[1], 2 * self.num_keys, self.head_width)
        places = embeds.new_empty(shape).unbind(0)
        return Cache(places if keep else places * num_layers, cosine.unsqueeze(2), sine.unsqueeze(2))

    def read(self, x: Tensor, cache: Cache, *, start: int, mask: Tensor | None, causal: bool, last: int) -> Tensor:
        """Hidden states [B, last, D], after the final norm, of the last tokens of x [B, n, D], whose places begin at `start`.

        Args:
            mask: [B, 1, n, start + n] bool, which places each token sees; None: all of them, or with `causal` those up to its own.
            causal: no token sees a place behind its own; `mask`, where there is one, says so too. Then `start` is 0 and `last` is 1.
            last: number of tokens that the last layer computes; callers need no more of it.
        """
        assert not causal or (start, last) == (0, 1)
        rows, count, width = x.shape
        end = start + count
        cosine, sine = cache.cosine[:, start:end], cache.sine[:, start:end]
        final_mask = None if mask is None else mask[:, :, -last:]
        blocks = _blocks(x, mask) if causal and x.device.type == "cpu" else None
        x = x.reshape(-1, width)  # a linear layer of three axes would reshape there and back
        for index, (layer, place) in enumerate(zip(self.layers, cache.places, strict=True)):
            query = _project(layer, x, cosine, sine, place[:, start:end])
            if last < count and index + 1 == len(self.layers):
                x, query = x.view(rows, count, width)[:, -last:].reshape(-1, width), query[:, -last:]
                mask, causal, blocks = final_mask, False, None
            mixed = _attend(query, place[:, :end], mask, causal=causal) if blocks is None else _attend_blocks(query, place, blocks)
            x = layer.output(x, mixed.reshape(len(x), -1))
            normed = layer.norm(x)
            x = layer.down(x, layer.activation(layer.gate(normed)).mul_(layer.up(normed)))
        return self.final_norm(x).view(rows, -1, width)


def _layer(layer: LlamaDecoderLayer, activation: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        _norm(layer.input_layernorm),
        _linear(attention.q_proj),
        _linear(attention.k_proj),
        _linear(attention.v_proj),
        _added(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _linear(mlp.gate_proj),
        F.silu if activation == "silu" else mlp.act_fn,
        _linear(mlp.up_proj),
        _added(mlp.down_proj),
    )


def _linear(module: nn.Module) -> _Function:
    return partial(F.linear, weight=module.weight, bias=module.bias) if type(module) is nn.Linear else module


def _norm(module: nn.Module) -> _Function:
    if type(module) is not nn.RMSNorm:
        return module
    return partial(torch.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)


def _added(module: nn.Module) -> _Added:
    """The sum is part of the product where the layer is a plain one."""
    if type(module) is nn.Linear and module.bias is None:
        return partial(torch.addmm, mat2=module.weight.t())
    return lambda x, inner: x + module(inner)


def _project(layer: _Layer, x: Tensor, cosine: Tensor, sine: Tensor, place: Tensor) -> Tensor:
    """Queries [B, n, H, h] of a layer's input [B·n, D]; its keys and values go to their place [B, n, 2·G, h]."""
    rows, count, num_places, width = place.shape
    normed = layer.input_norm(x)
    heads = torch.cat([layer.query(normed), layer.key(normed), layer.value(normed)], dim=1).view(rows, count, -1, width)
    # Rotary positions, with pairs (i, i + h/2) as in Llama's published weights, for queries and keys in one go.
    pairs = heads[:, :, : -(num_places // 2)]
    turned = pairs.roll(width // 2, dims=-1)
    pairs.mul_(cosine).addcmul_(turned, sine)
    place.copy_(heads[:, :, -num_places:])
    return heads[:, :, :-num_places]


def _attend(query: Tensor, place: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Queries [B, n, H, h] on the places [B, t, 2·G, h] → [B, n, H, h]"""
    keys, values = place.transpose(1, 2).chunk(2, dim=1)
    query = query.transpose(1, 2)
    grouped = query.shape[1] != keys.shape[1]
    # A causal mask that is given says all; the kernels take no other beside `is_causal`.
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2)


_BLOCK = 64
"""Queries that the CPU's attention kernel takes at once."""


def _blocks(x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Of each block of queries, what is added to their scores [.., m, end]: 0 where they see a place and -inf elsewhere."""
    count = x.shape[1]
    spans = [(begin, min(begin + _BLOCK, count)) for begin in range(0, count, _BLOCK)]
    if mask is None:
        # One band serves all: column `count` is the first query's own place, wherever its block begins.
        band = torch.full((_BLOCK, count + _BLOCK), -math.inf, dtype=x.dtype, device=x.device).triu_(count + 1)
        return [band[: end - begin, count - begin : count - begin + end] for begin, end in spans]
    added = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -math.inf)
    return [added[:, :, begin:end, :end] for begin, end in spans]


def _attend_blocks(query: Tensor, place: Tensor, blocks: list[Tensor]) -> Tensor:
    """Causal `_attend` on a CPU, whose kernel would also compute the masked half: block by block, each up to the block's end."""
    mixed, begin = [], 0
    for block in blocks:
        end = block.shape[-1]
        mixed.append(_attend(query[:, begin:end], place[:, :end], block, causal=False))
        begin = end
    return torch.cat(mixed, dim=1)
