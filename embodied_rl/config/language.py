"""What a language policy is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from embodied_rl.bounds import Layers, LoraRank, Positive, Size, Tokens
from embodied_rl.config.building import Config, require


@dataclass(frozen=True)
class TinyModelConfig(Config, place="policy.tiny"):
    """A small random Llama with a tokenizer of words and signs, made where no model is given."""

    hidden_size: Size = 128
    """Width of the model."""
    num_layers: Layers = 2
    """Of the transformer."""
    num_heads: Size = 4
    """Of attention, in each layer."""
    num_key_value_heads: Size = 4
    """Heads that keys and values have; fewer than num_heads: each serves several."""
    intermediate_size: Size = 256
    """Width of the layers between attentions."""
    max_context: Tokens = 1024
    """Tokens of prompt and answer together."""


@dataclass(frozen=True)
class LanguageConfig(Config, place="policy"):
    """A Hugging Face causal language model from a folder, with or without LoRA and a value head."""

    model: str | None = None
    """Folder with config.json, safetensors and a tokenizer; null: a small random one is made (`tiny`)."""
    adapter: str | None = None
    """Folder of a LoRA adapter to go on from; its rank and targets are then its own."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Of the weights; auto: as stored."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Which implementation of attention computes the model."""
    lora_rank: LoraRank = 0
    """0 trains all weights."""
    lora_alpha: Positive = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get LoRA."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """On the hidden state that predicts a token."""
    layout: Literal["auto", "packed", "right", "left"] = "auto"
    """How sequences are laid out for teacher forcing. auto: packed where the model keeps packed sequences apart, else right."""
    max_tokens_per_micro_batch: Tokens = 4096
    """Tokens of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, which saves memory and costs time."""
    images: tuple[str, ...] = ()
    """Parts of an observation that are pictures, shown before its text (vision-language models)."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    name: Literal["language"] = "language"
    """The kind of policy."""

    @property
    def folder(self) -> str:
        """`model`, where it is known by now."""
        assert self.model is not None, "a tiny model is made first"
        return self.model

    @property
    def chunk_size(self) -> int:
        """K: a turn is an answer."""
        return 1

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return ("text", *self.images)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.lora_targets) >= 1, "policy.lora_targets", "at least one name", self.lora_targets)
