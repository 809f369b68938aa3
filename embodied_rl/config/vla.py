"""What vision-language-action policies are built from, one dataclass for each kind; flow policies are in `flow`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embodied_rl.config.building import require


@dataclass(frozen=True)
class TinyVLAConfig:
    """A small vision-language-action model: an image and words in, a chunk of action tokens out."""

    name: Literal["tiny_vla"] = "tiny_vla"
    image_key: str = "rgb"
    """Observation with the image, uint8 [height, width, 3]."""
    state_key: str | None = None
    """Observation with the robot's state; null: the image and the words are all it sees."""
    instruction: str | None = None
    """What to do; null: the observation's, or the simulator's own instruction."""
    instruction_key: str = "instruction"
    """Observation that holds each row's instruction, where there is one."""
    chunk: int = 4
    """K: steps of an action chunk, which the simulator plays without asking again."""
    num_bins: int = 32
    """Edges that [-1, 1] is cut by; an action dimension is one of as many tokens."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """parallel: all tokens of a chunk from one pass, independent of one another. autoregressive: one after another."""
    temperature: float = 1.0
    """Of sampling and of log-probabilities."""
    width: int = 96
    """D of the transformer."""
    num_layers: int = 2
    num_heads: int = 4
    conv_channels: tuple[int, ...] = (24, 48)
    """Of the convolutions before the last, each of which halves the image; the last has `width`."""
    num_keypoints: int = 16
    """Maps of attention over the image whose mean places the decoder reads."""
    vocabulary: int = 1024
    """Rows of the word embedding; a word's row is a hash of it."""
    max_words: int = 16
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value for the chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    value_gradient: bool = False
    """Whether the value's loss also trains what the actions read."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping it."""
    cloning_shift: int = 0
    """While it is cloned, images are moved by up to so many pixels at random: right where actions follow from where things are relative to
    one another."""

    def __post_init__(self) -> None:
        require(self.cloning_shift >= 0, "policy.cloning_shift", ">= 0", self.cloning_shift)
        sizes = ("chunk", "width", "num_layers", "num_heads", "num_keypoints", "vocabulary", "max_words")
        for name in sizes:
            require(getattr(self, name) >= 1, f"policy.{name}", ">= 1", getattr(self, name))
        require(self.num_bins >= 2, "policy.num_bins", ">= 2", self.num_bins)
        require(self.width % self.num_heads == 0, "policy.num_heads", f"a divisor of policy.width ({self.width})", self.num_heads)
        require(all(size >= 1 for size in self.conv_channels), "policy.conv_channels", "positive", self.conv_channels)
        require(self.temperature > 0, "policy.temperature", "> 0 (evaluation takes the likeliest tokens anyway)", self.temperature)
        check_instruction(self.instruction)

    @property
    def chunk_size(self) -> int:
        """K"""
        return self.chunk

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return (self.image_key, *((self.state_key,) if self.state_key else ()))


@dataclass(frozen=True)
class OpenVLAPolicyConfig:
    """OpenVLA from a checkpoint folder (see docs/openvla.md), whole or with LoRA."""

    path: str
    """Folder with config.json, safetensors and the tokenizer's files."""
    name: Literal["openvla"] = "openvla"
    cameras: tuple[str, ...] = ("rgb",)
    """Observations that hold the images, in the order that the model was trained with."""
    proprio_key: str = "state"
    """Observation that holds the robot's state, where the model reads it."""
    instruction: str | None = None
    """What to do; null: the observation's, or the simulator's own instruction."""
    instruction_key: str = "instruction"
    unnorm_key: str | None = None
    """Data set whose action ranges are used; null where the checkpoint has only one."""
    bounds: Literal["quantiles", "extremes"] = "quantiles"
    temperature: float = 1.0
    """Of sampling and of log-probabilities."""
    prompt_tokens: int | None = 64
    """All prompts are padded to this length, so that steps with different instructions lie side by side; null: the longest's."""
    image_recipe: Literal["resize", "libero"] = "resize"
    gripper: Literal["as_is", "libero"] = "as_is"
    generation: Literal["eager", "compile", "cuda_graph"] = "eager"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the model's weights; auto: as stored."""
    value_head: bool = True
    lora_rank: int = 0
    """0 trains all weights that are not frozen."""
    lora_alpha: float = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get LoRA; all-linear: every one of the language model and, unless frozen, of vision and projector."""
    freeze_vision: bool = False
    """Leave the vision transformers as they are."""
    gradient_checkpointing: bool = False
    """Compute the language model's layers again in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "policy.path", "a checkpoint's folder", self.path)
        require(len(self.cameras) >= 1, "policy.cameras", "at least one image of the observation", self.cameras)
        require(self.temperature > 0, "policy.temperature", "> 0 (evaluation takes the likeliest tokens anyway)", self.temperature)
        require(self.prompt_tokens is None or self.prompt_tokens >= 1, "policy.prompt_tokens", ">= 1 or null", self.prompt_tokens)
        require(self.lora_rank >= 0, "policy.lora_rank", ">= 0", self.lora_rank)
        require(self.lora_alpha > 0, "policy.lora_alpha", "> 0", self.lora_alpha)
        require(len(self.lora_targets) >= 1, "policy.lora_targets", "at least one name", self.lora_targets)
        check_instruction(self.instruction)

    @property
    def chunk_size(self) -> int:
        """K"""
        return 1

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return self.cameras


@dataclass(frozen=True)
class OpenVLAOFTPolicyConfig(OpenVLAPolicyConfig):
    """OpenVLA-OFT: what OpenVLA takes, and what the checkpoint was fine-tuned with, which its files do not say."""

    name: Literal["openvla_oft"] = "openvla_oft"  # type: ignore[assignment]
    chunk: int = 8
    """K: 8 on LIBERO, 25 on ALOHA, 5 on Bridge."""
    head: Literal["discrete", "l1"] = "discrete"
    """discrete: action tokens, what RL trains. l1: regression, as published checkpoints have it, for evaluation and cloning."""
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value for the chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    film: bool = False
    """Language scales and shifts the vision transformers' features."""
    proprio_dim: int | None = None
    """Size of the robot's state, where the model reads it: 8 on LIBERO, 14 on ALOHA."""
    variant: Literal["openvla-oft", "rlinf"] = "openvla-oft"
    """Which sequence it was trained on: with </s> behind the actions, or without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk >= 1, "policy.chunk", ">= 1", self.chunk)
        require(self.proprio_dim is None or self.proprio_dim >= 1, "policy.proprio_dim", ">= 1 or null", self.proprio_dim)

    @property
    def chunk_size(self) -> int:
        """K"""
        return self.chunk


def check_instruction(instruction: str | None) -> None:
    require(instruction is None or bool(instruction.strip()), "policy.instruction", "null or words", instruction)
