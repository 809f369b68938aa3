"""What vision-language-action policies are built from, one dataclass for each kind; flow policies are in `flow`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from embodied_rl.bounds import Bounds, Chunk, Layers, LoraRank, Positive, PositiveTemperature, Size, Tokens
from embodied_rl.config.building import Config, require


@dataclass(frozen=True)
class TinyVLAConfig(Config, place="policy"):
    """A small vision-language-action model: an image and words in, a chunk of action tokens out."""

    name: Literal["tiny_vla"] = "tiny_vla"
    """The kind of policy."""
    image_key: str = "rgb"
    """Observation with the image, uint8 [height, width, 3]."""
    state_key: str | None = None
    """Observation with the robot's state; null: the image and the words are all it sees."""
    instruction: str | None = None
    """What to do; null: the observation's, or the simulator's own instruction."""
    instruction_key: str = "instruction"
    """Observation that holds each row's instruction, where there is one."""
    chunk: Chunk = 4
    """K: steps of an action chunk, which the simulator plays without asking again."""
    num_bins: Annotated[int, Bounds(2, 1_000_000)] = 32
    """Edges that [-1, 1] is cut by; an action dimension is one of as many tokens."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """parallel: all tokens of a chunk from one pass, independent of one another. autoregressive: one after another."""
    temperature: PositiveTemperature = 1.0
    """Of sampling and of log-probabilities."""
    width: Size = 96
    """D of the transformer."""
    num_layers: Layers = 2
    """Of the transformer."""
    num_heads: Size = 4
    """Of attention, in each layer."""
    conv_channels: tuple[Size, ...] = (24, 48)
    """Of the convolutions before the last, each of which halves the image; the last has `width`."""
    num_keypoints: Size = 16
    """Maps of attention over the image whose mean places the decoder reads."""
    vocabulary: Annotated[int, Bounds(1, 100_000_000)] = 1024
    """Rows of the word embedding; a word's row is a hash of it."""
    max_words: Size = 16
    """Words of an instruction that are read; the rest is cut."""
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value for the chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    value_gradient: bool = False
    """Whether the value's loss also trains what the actions read."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping it."""
    cloning_shift: Annotated[int, Bounds(0, 16_384)] = 0
    """While it is cloned, images are moved by up to so many pixels at random: right where actions follow from where things are relative to
    one another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % self.num_heads == 0, "policy.num_heads", f"a divisor of policy.width ({self.width})", self.num_heads)
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
class VLAOptions(Config, place="policy"):
    """How a VLA stands in a simulator."""

    cameras: tuple[str, ...] = ("rgb",)
    """Observations that hold the images, in the order that the model was trained with."""
    proprio_key: str = "state"
    """Observation that holds the robot's state, where the model reads it."""
    instruction: str | None = None
    """What to do; null: the observation's, or the simulator's own instruction."""
    instruction_key: str = "instruction"
    """Of the observation, where the simulator gives its own instructions."""
    unnorm_key: str | None = None
    """Data set whose action ranges are used; null where the checkpoint has only one."""
    bounds: Literal["quantiles", "extremes"] = "quantiles"
    """What of the recorded actions is mapped onto the ends of the action tokens: their 1% and 99% quantiles, or their extremes."""
    temperature: PositiveTemperature = 1.0
    """Of sampling and of log-probabilities."""
    prompt_tokens: Tokens | None = None
    """All prompts are padded to this length, so that steps with different instructions lie side by side; null: the longest's."""
    image_recipe: Literal["resize", "libero"] = "resize"
    """How pictures are prepared: resized as the checkpoint says, or as LIBERO's data set was (half a turn, a JPEG round trip, a crop)."""
    gripper: Literal["as_is", "libero"] = "as_is"
    """How the gripper's dimension is translated: as it is, or from 0 … 1 to the 1 or -1 of LIBERO's simulator."""
    generation: Literal["eager", "compile", "cuda_graph"] = "eager"
    """How tokens are computed: step by step, compiled, or replayed as a CUDA graph."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.cameras) >= 1, "policy.cameras", "at least one image of the observation", self.cameras)
        check_instruction(self.instruction)


@dataclass(frozen=True, kw_only=True)
class OpenVLAPolicyConfig(VLAOptions):
    """OpenVLA from a checkpoint folder (see docs/openvla.md), whole or with LoRA."""

    path: str
    """Folder with config.json, safetensors and the tokenizer's files."""
    name: Literal["openvla"] = "openvla"
    """The kind of policy."""
    prompt_tokens: Tokens | None = 64
    """All prompts are padded to this length, so that steps with different instructions lie side by side; null: the longest's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the model's weights; auto: as stored."""
    value_head: bool = True
    """Give the model a critic; false: for methods without one."""
    lora_rank: LoraRank = 0
    """0 trains all weights that are not frozen."""
    lora_alpha: Positive = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get LoRA; all-linear: every one of the language model and, unless frozen, of vision and projector."""
    vision: tuple[dict[str, Any], ...] = ()
    """Shapes of the two vision transformers (width, depth, num_heads, mlp_width, …) where config.json names others than OpenVLA's own."""
    freeze_vision: bool = False
    """Leave the vision transformers as they are."""
    gradient_checkpointing: bool = False
    """Compute the language model's layers again in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path.strip()), "policy.path", "a checkpoint's folder", self.path)
        require(len(self.vision) in (0, 2), "policy.vision", "the shapes of two vision transformers", self.vision)
        require(len(self.lora_targets) >= 1, "policy.lora_targets", "at least one name", self.lora_targets)

    @property
    def chunk_size(self) -> int:
        """K"""
        return 1

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return self.cameras


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTPolicyConfig(OpenVLAPolicyConfig):
    """OpenVLA-OFT: what OpenVLA takes, and what the checkpoint was fine-tuned with, which its files do not say."""

    name: Literal["openvla_oft"] = "openvla_oft"  # type: ignore[assignment]
    """The kind of policy."""
    chunk: Chunk = 8
    """K: 8 on LIBERO, 25 on ALOHA, 5 on Bridge."""
    head: Literal["discrete", "l1"] = "discrete"
    """discrete: action tokens, what RL trains. l1: regression, as published checkpoints have it, for evaluation and cloning."""
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value for the chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    film: bool = False
    """Language scales and shifts the vision transformers' features."""
    proprio_dim: Size | None = None
    """Size of the robot's state, where the model reads it: 8 on LIBERO, 14 on ALOHA."""
    variant: Literal["openvla-oft", "rlinf"] = "openvla-oft"
    """Which sequence it was trained on: with </s> behind the actions, or without."""

    @property
    def chunk_size(self) -> int:
        """K"""
        return self.chunk


def check_instruction(instruction: str | None) -> None:
    require(instruction is None or bool(instruction.strip()), "policy.instruction", "null or words", instruction)
