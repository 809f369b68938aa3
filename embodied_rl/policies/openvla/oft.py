"""OpenVLA-OFT (Kim et al. 2025): a whole chunk of actions from one pass with bidirectional attention.

The sequence is ``[BOS, patches of all images, (robot state), rest of the prompt, K·A zero embeddings, </s>]``. Placeholders carry only
their rotary position; the model reads the hidden state *before* a placeholder, as in a causal model.

Shape legend: B rows, I images of a row, N patch tokens of all images, P prompt tokens, K steps of a chunk, A action dimensions, L = K·A, V
action tokens of the vocabulary, D width of the language model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.policies.heads import TokenDistribution
from embodied_rl.policies.openvla.config import OFTConfig as OFTConfig
from embodied_rl.policies.openvla.config import OpenVLAConfig
from embodied_rl.policies.openvla.model import STOP_TOKEN, Embedded, Generated, VisionLanguageModel, attention_mask, join
from embodied_rl.policies.openvla.vision import MLP, L1ActionHead, Layers


class OpenVLAOFT(VisionLanguageModel):
    """OpenVLA with parallel decoding."""

    oft: OFTConfig

    def __init__(self, config: OpenVLAConfig, oft: OFTConfig | None = None) -> None:
        """Raises UserError: the settings are missing."""
        if oft is None:
            raise UserError(
                "The checkpoint's config.json does not describe the OpenVLA-OFT training: give its chunk, num_images, head, film, "
                "proprio_dim and variant (OFTConfig)."
            )
        super().__init__(config, oft)
        width = config.hidden_size
        self.action_head = L1ActionHead(width, oft.action_dim) if oft.head == "l1" else None
        # The robot's own state as one token.
        self.proprio_projector = None if oft.proprio_dim is None else MLP(oft.proprio_dim, width, width)

    def sequence(self, pixels: Tensor, input_ids: Tensor, mask: Tensor, *, padded: bool, proprio: Tensor | None = None) -> Embedded:
        """See `VisionLanguageModel.sequence`.

        Padding may be anywhere: positions are counted without it and no token attends to it, so its location (at the end in the original,
        before the text in RLinf) changes no number.
        """
        text = self.embed_tokens(input_ids)
        stop = self.embed_tokens(torch.full_like(input_ids[:, :1], STOP_TOKEN))
        patches = self.embed_images(pixels, _mean(text, mask, stop) if self.oft.film else None)
        if self.proprio_projector is not None:
            assert proprio is not None, "this model reads the robot's state"
            patches = torch.cat([patches, self.proprio_projector(proprio.to(self.dtype)).unsqueeze(1)], dim=1)
        placeholders = text.new_zeros(text.shape[0], self.oft.num_units, text.shape[2])
        prompt = join(text, patches, mask, padded=padded)
        return prompt.followed_by(torch.cat([placeholders, stop], dim=1) if self.oft.variant == "openvla-oft" else placeholders)

    def decide(self, sequence: Embedded, noise: Tensor | None, num_tokens: int, temperature: float = 1.0) -> Generated:
        hidden = self.decide_hidden(sequence)
        distribution = TokenDistribution.from_logits(self.action_logits(hidden), temperature)
        choices = distribution.sample(noise)
        return Generated(choices, distribution.log_prob(choices), hidden[:, 0])

    def scores(self, sequence: Embedded, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.action_hidden(sequence)
        return self.action_logits(hidden), hidden[:, 0]

    def state(self, sequence: Embedded) -> Tensor:
        return self.action_hidden(sequence)[:, 0]

    def action_hidden(self, sequence: Embedded) -> Tensor:
        """[B, L, D] hidden states one position before each placeholder; the first is the prompt's last token, for the value head."""
        return self.hidden(sequence, causal=False)[:, -self._num_last :][:, : self.oft.num_units]

    def decide_hidden(self, sequence: Embedded) -> Tensor:
        """`action_hidden` for acting: through `Layers`, without gradients, with only the needed tokens in the last layer."""
        layers = Layers.of(self.language_model.model)
        cache = layers.allocate(sequence.embeds, sequence.places(0), keep=False)
        mask = attention_mask(sequence.mask, causal=False) if sequence.padded else None
        hidden = layers.read(sequence.embeds, cache, start=0, mask=mask, causal=False, last=self._num_last)
        return hidden[:, : self.oft.num_units]

    @property
    def _num_last(self) -> int:
        """Number of tokens from the one before the first placeholder to the end."""
        return self.oft.num_units + (2 if self.oft.variant == "openvla-oft" else 1)

    def regressed(self, hidden: Tensor) -> Tensor:
        """[B, L, D] → normalised actions [B, L] float32 of the regression head."""
        assert self.action_head is not None, "head='l1' has an action head"
        return self.action_head(hidden).flatten(1).float()


def _mean(text: Tensor, mask: Tensor, stop: Tensor) -> Tensor:
    """[B, D] mean embedding of all tokens that are neither actions nor padding, </s> included."""
    total = (text * mask.unsqueeze(-1).to(text.dtype)).sum(dim=1) + stop[:, 0]
    return total / (mask.sum(dim=1, keepdim=True) + 1).to(text.dtype)
