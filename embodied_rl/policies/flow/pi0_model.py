"""transformers' pi0 as a `VelocityModel`: the vision-language part runs once for a decision, the action expert once for each step.

Shape legend: B rows, I images of a row, S pixels of a side, P tokens of the prefix (images and prompt), H steps and D dimensions of a
chunk, F width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from embodied_rl.policies.base import TensorObservation
from embodied_rl.policies.flow.policy import VelocityModel

if TYPE_CHECKING:
    from transformers import Cache, PI0ForConditionalGeneration, PretrainedConfig


@dataclass(frozen=True)
class PI0Context:
    """What the denoising steps of one decision share."""

    cache: Cache
    """Keys and values of the prefix; every step appends to it and is cut off again."""
    mask: Tensor
    """[B, P] int64, 0 at padding."""
    state: Tensor
    """[B, max_state_dim]"""
    features: Tensor
    """[B, F] mean of the prefix's last hidden states."""


class PI0Model(VelocityModel[PI0Context]):
    """Around a `PI0ForConditionalGeneration`."""

    pi0: PI0ForConditionalGeneration

    def __init__(
        self, pi0: PI0ForConditionalGeneration, prepare: Callable[[Mapping[str, Any]], TensorObservation], observation_keys: tuple[str, ...]
    ) -> None:
        """
        Args:
            prepare: a simulator's observation → images uint8 [B, I, S, S, 3], input_ids [B, P], attention_mask [B, P],
                state [B, max_state_dim].
            observation_keys: what `prepare` reads.
        """
        super().__init__()
        self.pi0 = pi0
        self._prepare = prepare
        self.observation_keys = observation_keys
        config = self.pi0.config
        self.latent = (int(config.chunk_size), int(config.max_action_dim))
        self.num_features = int(cast("PretrainedConfig", config.vlm_config).text_config.hidden_size)

    def context(self, observation: Mapping[str, Any]) -> PI0Context:
        ready = observation if "input_ids" in observation else self._prepare(observation)
        model = self.pi0.model
        weight = self.pi0.action_out_proj.weight
        tensors = {key: ready[key].to(weight.device) for key in ("images", "input_ids", "attention_mask", "state")}
        # SigLIP's normalisation: [0, 255] to [-1, 1].
        pixels = (tensors["images"].movedim(-1, -3).to(weight.dtype) / 127.5) - 1.0
        seen = torch.ones(pixels.shape[:2], dtype=torch.bool, device=weight.device)
        mask = tensors["attention_mask"]
        embedded = model.embed_prefix(tensors["input_ids"], pixels, seen)
        output = model.vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            # One block: every token of the prefix sees every other, as pi0 was trained.
            token_type_ids=torch.zeros_like(embedded)[:, :, 0],
            use_cache=True,
            return_dict=True,
        )
        share = (mask / mask.sum(-1, keepdim=True)).to(torch.float32)
        features = torch.einsum("bp,bpf->bf", share, output.last_hidden_state.float())
        return PI0Context(output.past_key_values, mask, tensors["state"].to(weight.dtype), features)

    def features(self, context: PI0Context) -> Tensor:
        return context.features

    def velocity(self, context: PI0Context, x: Tensor, t: Tensor) -> Tensor:
        prefix = context.mask.shape[1]
        output = self.pi0(
            state=context.state,
            noise=x.to(context.state.dtype),
            timestep=t,
            attention_mask=context.mask,
            past_key_values=context.cache,
        )
        context.cache.crop(prefix)
        return output.logits.to(x.dtype)

    def update_statistics(self, observation: TensorObservation) -> None:
        """Nothing: states are scaled by the checkpoint's constants."""
