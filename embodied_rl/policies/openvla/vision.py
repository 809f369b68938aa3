"""The two vision transformers of OpenVLA, with the parameter names of its checkpoints.

Both are plain pre-norm transformers over 14 × 14 patches. What OpenVLA takes from each is the output of the last block but one,
without a final norm and without class and register tokens. The last block, the final norm and the pooling head are in the
checkpoint and are kept, but never run.

Shape legend: B images, S pixels of a side, P patches, d width of one transformer, D width of the language model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_rl.policies.openvla.config import ViTShape

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

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

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
        self.mlp = MLP(shape.width, shape.mlp_width)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.scale: nn.Linear | None = None if film_width is None else nn.Linear(film_width, shape.width)
        self.shift: nn.Linear | None = None if film_width is None else nn.Linear(film_width, shape.width)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, P, d] → [B, P, d]; `language` [B, D] is the mean token embedding, given exactly when the block has FiLM."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if self.scale is not None and self.shift is not None:
            assert language is not None, "FiLM needs the language embedding"
            x = x * (1.0 + self.scale(language).unsqueeze(1)) + self.shift(language).unsqueeze(1)
        return x + self.ls2(self.mlp(self.norm2(x)))


class AttentionPool(nn.Module):
    """SigLIP's pooling head: never run here; it holds its place in the checkpoint."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.q = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=_EPS)
        self.mlp = MLP(shape.width, shape.mlp_width)


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
        # Only patches have positions; class and register tokens have none. They come first in the sum because it takes the first
        # one's order in memory, and the convolution's would slow every block down.
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
        """[B, I, 6, S, S] → [B, I·P, d0 + d1]: I images one after another, channels ``[DINOv2's three, SigLIP's three]``.

        `language` [B, D] reaches every image of its row.
        """
        rows, images = pixels.shape[:2]
        flat = pixels.flatten(0, 1)
        each = None if language is None else language.repeat_interleave(images, dim=0)
        features = torch.cat([self.featurizer(flat[:, :3], each), self.fused_featurizer(flat[:, 3:], each)], dim=-1)
        return features.view(rows, images * features.shape[1], features.shape[2])
