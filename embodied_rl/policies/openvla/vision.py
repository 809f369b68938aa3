"""The two vision transformers of OpenVLA, with the parameter names of its checkpoints.

Both are plain pre-norm transformers over 14 × 14 patches. OpenVLA reads the output of the last block but one of each, without a final norm
and without class and register tokens. The last block, the final norm and the pooling head are in the checkpoint and are kept, but never
run.

Shape legend: B images, S pixels of a side, P patches, d width of one transformer, D width of the language model.
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

from embodied_rl.policies.openvla.config import ViTShape

if TYPE_CHECKING:
    from transformers import LlamaModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer


_EPS = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, d] → [B, P, d]"""
        rows, tokens, width = x.shape
        query, key, value = self.qkv(x).view(rows, tokens, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(rows, tokens, width))


class MLP(nn.Module):
    """Two layers with the exact (erf) GELU between: the tanh approximation moves OpenVLA's logits by 5e-3."""

    def __init__(self, num_inputs: int, hidden: int, num_outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, hidden)
        self.fc2 = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned factor for each channel (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    """A transformer block; with FiLM, language scales and shifts the features between attention and MLP (OpenVLA-OFT, section IV)."""

    def __init__(self, shape: ViTShape, film_width: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=_EPS)
        self.attn = Attention(shape.width, shape.num_heads)
        self.ls1 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=_EPS)
        self.mlp = MLP(shape.width, shape.mlp_width, shape.width)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.scale: nn.Linear | None = None if film_width is None else nn.Linear(film_width, shape.width)
        self.shift: nn.Linear | None = None if film_width is None else nn.Linear(film_width, shape.width)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, P, d] → [B, P, d]; `language` [B, D] is the mean token embedding, required exactly if the block has FiLM."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if self.scale is not None and self.shift is not None:
            assert language is not None, "FiLM needs the language embedding"
            x = x * (1.0 + self.scale(language).unsqueeze(1)) + self.shift(language).unsqueeze(1)
        return x + self.ls2(self.mlp(self.norm2(x)))


class AttentionPool(nn.Module):
    """SigLIP's pooling head, for its weights in the checkpoint; never run."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.q = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=_EPS)
        self.mlp = MLP(shape.width, shape.mlp_width, shape.width)


class PatchEmbedding(nn.Module):
    """Pixels to one vector for each patch, row by row."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch_size, shape.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] → [B, P, d]"""
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """DINOv2 with registers, or SigLIP, up to the block that OpenVLA reads."""

    def __init__(self, shape: ViTShape, film_width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.num_patches, shape.width))
        if shape.num_registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.num_registers, shape.width))
        self.blocks = nn.ModuleList(Block(shape, film_width) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=_EPS)
        if shape.attention_pool:
            self.attn_pool = AttentionPool(shape)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Normalised pixels [B, 3, S, S] → patch features [B, P, d] after the last block but one."""
        # Only patches have positions; class and register tokens have none. They come first in the sum because the result takes the first
        # operand's memory order, and the convolution's would slow every block down.
        x = self.pos_embed + self.patch_embed(pixels)
        num_prefix = 0
        if self.shape.num_registers:
            rows = x.shape[0]
            x = torch.cat([self.cls_token.expand(rows, -1, -1), self.reg_token.expand(rows, -1, -1), x], dim=1)
            num_prefix = 1 + self.shape.num_registers
        for block in list(self.blocks)[:-1]:
            x = block(x, language)
        return x[:, num_prefix:]


class VisionBackbone(nn.Module):
    """Both transformers side by side: their features of the same patch are concatenated."""

    def __init__(self, shapes: tuple[ViTShape, ViTShape], film_width: int | None = None) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(shapes[0], film_width)
        self.fused_featurizer = VisionTransformer(shapes[1], film_width)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, I, 6, S, S] → [B, I·P, d0 + d1]: I images in order, channels ``[DINOv2's three, SigLIP's three]``.

        `language` [B, D] applies to every image of its row.
        """
        rows, images = pixels.shape[:2]
        flat = pixels.flatten(0, 1)
        each = None if language is None else language.repeat_interleave(images, dim=0)
        features = torch.cat([self.featurizer(flat[:, :3], each), self.fused_featurizer(flat[:, 3:], each)], dim=-1)
        return features.view(rows, images * features.shape[1], features.shape[2])


# ---- projectors, and heads on the language model's hidden states ------------------------------------------------------

# Shape legend: B rows, P patches, K steps of a chunk, A action dimensions, D width of the language model.


class Projector(nn.Module):
    """Patch features to the language model's space: three layers with GELU between, the first four times as wide as its input."""

    def __init__(self, vision_width: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, P, d0 + d1] → [B, P, D]"""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(patches)))))


class ResidualBlock(nn.Module):
    """x + relu(linear(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    """The regression network of OpenVLA-OFT ("MLPResNet")."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(num_inputs)
        self.fc1 = nn.Linear(num_inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1ActionHead(nn.Module):
    """Continuous actions by regression, from the concatenated hidden states of one step's A placeholders to its A values."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, K·A, D] → normalised actions [B, K, A]"""
        rows, units, width = hidden.shape
        return self.model(hidden.reshape(rows, units // self.action_dim, self.action_dim * width))


class ValueHead(nn.Module):
    """State values from the hidden state at the prompt's last token: D → 512 → 128 → 1 with GELU, no bias in the last layer; or → K, one
    per step of a chunk (RLinf-VLA's action level).

    The shape and initialisation of RL4VLA (Liu et al. 2025) and RLinf-VLA (2025), with RL4VLA's key names.
    """

    def __init__(self, hidden_size: int, num_values: int | None = None) -> None:
        """`num_values`: K; None: one value, without a separate dimension."""
        super().__init__()
        self._single = num_values is None
        self.head_l1 = nn.Linear(hidden_size, 512)
        self.head_l2 = nn.Linear(512, 128)
        self.head_l3 = nn.Linear(128, num_values or 1, bias=False)
        for layer in (self.head_l1, self.head_l2):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.head_l3.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, D] → [B] float32, or [B, K]"""
        x = hidden.to(self.head_l1.weight.dtype)
        values = self.head_l3(F.gelu(self.head_l2(F.gelu(self.head_l1(x))))).float()
        return values.squeeze(-1) if self._single else values


_RLINF_VALUE_KEYS = {"mlp.0.": "head_l1.", "mlp.2.": "head_l2.", "mlp.4.": "head_l3."}


def value_head_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Extract a value head's weights from a state dict with RL4VLA's names (``head_l1.weight``, …) or RLinf's (``mlp.0.weight``, …).

    Any prefix that ends in ``value_head.`` is dropped; if there is one, keys without it are ignored.
    """
    marked = {name.rpartition("value_head.")[2]: tensor for name, tensor in state.items() if "value_head." in name}
    found = marked or dict(state)
    for theirs, ours in _RLINF_VALUE_KEYS.items():
        found = {ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor for name, tensor in found.items()}
    return found


# ---- Llama's layers for acting ----------------------------------------------------------------------------------------

# A module's call and every look-up of its parts cost more than a small layer's, or a single token's, arithmetic. So a decision looks
# everything up once (`Layers.of`) and then runs plain functions on tensors of two axes. They use the modules' own weights: the next
# decision sees a weight update, and numbers agree with the training pass to rounding. Adapters work: a projection that is no plain layer is
# called. Weights must be whole: give generation its own copy if training shards them.
#
# Shape legend: B rows, n tokens read at once, T places of a cache, H heads of queries, G heads of keys and values, h width of a head, D
# width of the language model.


_Function = Callable[[Tensor], Tensor]
_Added = Callable[[Tensor, Tensor], Tensor]
"""(x, y) → x + projection(y)"""


class _Layer(NamedTuple):
    """Parts of one layer, in the order in which they run."""

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
    """[B, T, 2·G, h] for each layer, keys before values. All layers share one tensor if no later token reads it."""
    cosine: Tensor
    """[B, T, 1, h], or [1, T, 1, h] if all rows have the same positions."""
    sine: Tensor
    """As `cosine`, negative in the first half: the half-turned vector is then a plain roll."""


@dataclass(frozen=True)
class Layers:
    """A language model's layers and last norm as functions: valid until its weights are moved, so build it for each decision."""

    layers: tuple[_Layer, ...]
    final_norm: _Function
    num_keys: int
    """Heads of keys and values, G."""
    head_width: int
    """Width of a head, h."""
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @staticmethod
    def of(llama: LlamaModel) -> Layers:
        """Functions of transformers' `LlamaModel`."""
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
        """Allocate an empty cache.

        Args:
            embeds: [B, n, D]: gives the cache's rows, dtype and device.
            positions: [B, T] or [1, T] int64.
            keep: whether later tokens read the entries of earlier ones in every layer.
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
            mask: [B, 1, n, start + n] bool, places that each token sees; None: all, or with `causal` those up to its own.
            causal: no token sees a later place; a given `mask` says so too. Then `start` is 0 and `last` is 1.
            last: number of tokens that the last layer computes; callers need no more.
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
    """Residual addition, fused into the product if the layer is a plain one."""
    if type(module) is nn.Linear and module.bias is None:
        return partial(torch.addmm, mat2=module.weight.t())
    return lambda x, inner: x + module(inner)


def _project(layer: _Layer, x: Tensor, cosine: Tensor, sine: Tensor, place: Tensor) -> Tensor:
    """Compute queries [B, n, H, h] of a layer's input [B·n, D]; write its keys and values to `place` [B, n, 2·G, h]."""
    rows, count, num_places, width = place.shape
    normed = layer.input_norm(x)
    heads = torch.cat([layer.query(normed), layer.key(normed), layer.value(normed)], dim=1).view(rows, count, -1, width)
    # Rotary positions, with pairs (i, i + h/2) as in Llama's published weights, for queries and keys together.
    pairs = heads[:, :, : -(num_places // 2)]
    turned = pairs.roll(width // 2, dims=-1)
    pairs.mul_(cosine).addcmul_(turned, sine)
    place.copy_(heads[:, :, -num_places:])
    return heads[:, :, :-num_places]


def _attend(query: Tensor, place: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Attention of queries [B, n, H, h] to the places [B, t, 2·G, h] → [B, n, H, h]."""
    keys, values = place.transpose(1, 2).chunk(2, dim=1)
    query = query.transpose(1, 2)
    grouped = query.shape[1] != keys.shape[1]
    # A given causal mask is complete; the kernels accept no mask beside `is_causal`.
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2)


_BLOCK = 64
"""Number of queries that the CPU's attention kernel processes at once."""


def _blocks(x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Addends [.., m, end] to the scores of each block of queries: 0 at visible places and -inf elsewhere."""
    count = x.shape[1]
    spans = [(begin, min(begin + _BLOCK, count)) for begin in range(0, count, _BLOCK)]
    if mask is None:
        # One band serves all: column `count` is the first query's own place, wherever its block begins.
        band = torch.full((_BLOCK, count + _BLOCK), -math.inf, dtype=x.dtype, device=x.device).triu_(count + 1)
        return [band[: end - begin, count - begin : count - begin + end] for begin, end in spans]
    added = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -math.inf)
    return [added[:, :, begin:end, :end] for begin, end in spans]


def _attend_blocks(query: Tensor, place: Tensor, blocks: list[Tensor]) -> Tensor:
    """Causal `_attend` on a CPU, block by block, each up to its own end: the kernel would also compute the masked half."""
    mixed, begin = [], 0
    for block in blocks:
        end = block.shape[-1]
        mixed.append(_attend(query[:, begin:end], place[:, :end], block, causal=False))
        begin = end
    return torch.cat(mixed, dim=1)
