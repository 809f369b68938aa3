"""What a language policy is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embodied_rl.config.building import require


@dataclass(frozen=True)
class LanguageConfig:
    """A Hugging Face causal language model from a folder, with or without LoRA and a value head."""

    model: str
    """Folder with config.json, safetensors and a tokenizer."""
    adapter: str | None = None
    """Folder of a LoRA adapter to go on from; its rank and targets are then its own."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Of the weights; auto: as stored."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    lora_rank: int = 0
    """0 trains all weights."""
    lora_alpha: float = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get LoRA."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """On the hidden state that predicts a token."""
    layout: Literal["auto", "packed", "right", "left"] = "auto"
    """How sequences are laid out for teacher forcing. auto: packed where the model keeps packed sequences apart, else right."""
    max_tokens_per_micro_batch: int = 4096
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        require(self.lora_rank >= 0, "policy.lora_rank", ">= 0", self.lora_rank)
        require(self.lora_alpha > 0, "policy.lora_alpha", "> 0", self.lora_alpha)
        require(len(self.lora_targets) >= 1, "policy.lora_targets", "at least one name", self.lora_targets)
        require(self.max_tokens_per_micro_batch >= 1, "policy.max_tokens_per_micro_batch", ">= 1", self.max_tokens_per_micro_batch)
