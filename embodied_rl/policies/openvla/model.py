"""OpenVLA: two vision transformers and a projector before a Llama, with the key names of the published checkpoints.

Shape legend: B rows, I images of a row, S pixels of a side, N patch tokens of all images, P prompt tokens, T = N + P (plus later tokens), L
action tokens, V action tokens of the vocabulary (256), D width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_rl.errors import from_extra
from embodied_rl.policies.action_tokens import ActionTokenizer
from embodied_rl.policies.openvla.checkpoint import load_weights, save_weights
from embodied_rl.policies.openvla.config import OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.vision import Projector, VisionBackbone

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, LlamaModel

BOS_TOKEN = 1
EMPTY_TOKEN = 29871
"""Token of the lone space between "Out:" and the first action token, as Llama's tokenizer wrote it in training."""
STOP_TOKEN = 2
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Embedded:
    """A batch of sequences in the language model's input form."""

    embeds: Tensor
    """Embeddings [B, T, D]."""
    mask: Tensor
    """[B, T] bool: False at padding."""
    padded: bool
    """Whether any position is padding. It selects the attention kernel; a Python value, since reading a tensor would wait for the GPU."""

    @property
    def positions(self) -> Tensor:
        """[B, T] int64 positions counted without padding, so that a row's numbers do not depend on its neighbours' lengths."""
        return (self.mask.long().cumsum(dim=-1) - 1).clamp(min=0)

    def places(self, num_more: int) -> Tensor:
        """[B, T + num_more] int64 positions of these tokens and of later ones; [1, T + num_more] if they are equal in all rows."""
        positions = self.positions if self.padded else torch.arange(self.mask.shape[1], device=self.mask.device).unsqueeze(0)
        if not num_more:
            return positions
        more = torch.arange(1, num_more + 1, device=positions.device)
        return torch.cat([positions, positions[:, -1:] + more], dim=1)

    def followed_by(self, embeds: Tensor) -> Embedded:
        """Append tokens [B, n, D] without padding."""
        more = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.mask.device)
        return Embedded(torch.cat([self.embeds, embeds], dim=1), torch.cat([self.mask, more], dim=1), self.padded)


class VisionLanguageModel(nn.Module):
    """Base of OpenVLA and OpenVLA-OFT: images and text to the language model's hidden states."""

    def __init__(self, config: OpenVLAConfig, *, film: bool = False) -> None:
        with from_extra("OpenVLA", "language"):
            from transformers import LlamaForCausalLM
        super().__init__()
        self.config = config
        self.tokens = ActionTokenizer(config.vocab_size, config.num_action_bins)
        self.vision_backbone = VisionBackbone(config.vision, config.hidden_size if film else None)
        self.projector = Projector(config.vision_width, config.hidden_size)
        self.language_model: LlamaForCausalLM = LlamaForCausalLM(config.llama())
        _fuse_norms(self.language_model.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.projector.fc1.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.projector.fc1.weight.device

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """[B, P] → [B, P, D]"""
        return self.language_model.model.embed_tokens(ids)

    def embed_images(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Normalised pixels [B, I, 6, S, S] → patch tokens [B, N, D]; `language` [B, D] for FiLM."""
        return self.projector(self.vision_backbone(pixels.to(self.dtype), language))

    def hidden(self, sequence: Embedded, *, causal: bool = True) -> Tensor:
        """[B, T, D] hidden states after the final norm. Without `causal`, every token attends to all tokens that are not padding."""
        mask, positions = None, None
        if sequence.padded:
            mask, positions = attention_mask(sequence.mask, causal=causal), sequence.positions
        output = self.language_model.model(
            inputs_embeds=sequence.embeds, attention_mask=mask, position_ids=positions, use_cache=False, is_causal=causal
        )
        return output.last_hidden_state

    def action_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] → [..., V] float32 logits of the action tokens only."""
        return self.action_scorer()(hidden)

    def action_scorer(self) -> Callable[[Tensor], Tensor]:
        """`action_logits` with its weights looked up once, for a loop over tokens."""
        head, tokens = self.language_model.lm_head, slice(self.tokens.first_token, self.tokens.vocab_size)
        if type(head) is nn.Linear:
            weight = head.weight[tokens]
            return lambda hidden: F.linear(hidden, weight).float()
        # An adapter or a sharded layer looks its weights up itself.
        return lambda hidden: head(hidden)[..., tokens].float()

    def action_embedder(self) -> Callable[[Tensor], Tensor]:
        """Choices [...] among the action tokens → their embeddings [..., D], with the weights looked up once."""
        embedding, first = self.language_model.model.embed_tokens, self.tokens.first_token
        if type(embedding) is nn.Embedding:
            weight = embedding.weight[first:]
            return lambda choices: F.embedding(choices, weight)
        return lambda choices: embedding(choices + first)

    def load(self, directory: Path, *, dtype: torch.dtype | None, device: str | torch.device, optional: Collection[str] = ()) -> None:
        """Fill this model, which is on the meta device, from a checkpoint's main files (see `load_weights`)."""
        load_weights(self, directory, dtype=dtype, device=device, optional=optional)
        # Rotary frequencies are not in a checkpoint, and those of the meta device are empty.
        llama = self.language_model.model
        llama.rotary_emb = type(llama.rotary_emb)(llama.config).to(device)

    def save_pretrained(self, directory: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write files that the original's code loads: the same keys and `config.json`. The processor saves the tokenizer's files."""
        self.save_main(Path(directory), max_shard_bytes=max_shard_bytes)

    def save_main(
        self, directory: Path, *, max_shard_bytes: int, skip: Collection[str] = (), extra: Mapping[str, object] | None = None
    ) -> None:
        """Write `config.json`, with `extra` entries, and all weights except `skip` under the original's names."""
        state = {name: tensor for name, tensor in self.state_dict().items() if name not in skip}
        config = self.config.to_json() | {"torch_dtype": str(self.dtype).removeprefix("torch.")} | dict(extra or {})
        save_weights(state, config, directory, max_shard_bytes)


class OpenVLA(VisionLanguageModel):
    """OpenVLA (Kim et al. 2024): the sequence ``[BOS, patches, rest of the prompt]``, then action tokens one by one."""

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        vision: tuple[ViTShape, ViTShape] | None = None,
    ) -> OpenVLA:
        """Read a checkpoint folder: `config.json` and safetensors, in one file or in shards with an index. Nothing is downloaded.

        Args:
            dtype: dtype of the weights; None: as stored (bfloat16 in the published ones).
            vision: shapes of vision transformers that `config.VIT_SHAPES` does not name.

        Raises UserError: a file or shard is missing or damaged, a key is missing, unknown or of the wrong shape.
        """
        with torch.device("meta"):
            model = cls(OpenVLAConfig.read(Path(directory), vision))
        model.load(Path(directory), dtype=dtype, device=device)
        return model.eval()

    def prefix(self, pixels: Tensor, input_ids: Tensor, mask: Tensor, *, padded: bool) -> Embedded:
        """Insert the images between the prompt's first token and the rest.

        Args:
            pixels: [B, 1, 6, S, S] normalised.
            input_ids: [B, P] ``[BOS, padding…, text, 29871]``: BOS first in every row, so that the images come right after it.
            mask: [B, P] bool, False at padding.
            padded: whether `mask` has a False.
        """
        return join(self.embed_tokens(input_ids), self.embed_images(pixels), mask, padded=padded)

    def teacher_forced(self, prefix: Embedded, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One causal pass over prefix and action tokens [B, L].
        Returns logits [B, L, V] of each action token given those before it, and the hidden state [B, D] at the prompt's last token."""
        # The last token's prediction is unused, so the token need not be read.
        sequence = prefix.followed_by(self.embed_tokens(tokens[:, :-1])) if tokens.shape[1] > 1 else prefix
        hidden = self.hidden(sequence)[:, -tokens.shape[1] :]
        return self.action_logits(hidden), hidden[:, 0]


def _fuse_norms(llama: LlamaModel) -> None:
    """Give Llama torch's own RMSNorm, one kernel instead of transformers' six; same formula, same parameter."""
    config = llama.config
    for layer in llama.layers:
        layer.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    llama.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # type: ignore[assignment]


def join(text: Tensor, patches: Tensor, mask: Tensor, *, padded: bool) -> Embedded:
    """Put patch tokens [B, N, D] between the first and the other tokens of a prompt [B, P, D]; `mask` [B, P] is the prompt's."""
    seen = torch.ones(patches.shape[:2], dtype=torch.bool, device=mask.device)
    return Embedded(
        torch.cat([text[:, :1], patches, text[:, 1:]], dim=1), torch.cat([mask[:, :1], seen, mask[:, 1:]], dim=1), padded=padded
    )


def attention_mask(mask: Tensor, *, causal: bool) -> Tensor:
    """[B, T] bool → [B, 1, T, T] bool: which key (last axis) each query sees. No query sees padding.

    Padded queries see BOS, which is never padding, so that every softmax is defined.
    """
    length = mask.shape[1]
    seen = mask[:, None, None, :].expand(-1, 1, length, length)
    if not causal:
        return seen
    return seen & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
