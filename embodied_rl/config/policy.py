"""What a policy is built from, one dataclass for each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from embodied_rl.bounds import Bounds, Chunk, Layers, LogStd, LoraRank, Positive, PositiveTemperature, Size, Tokens
from embodied_rl.config.building import Config, require
from embodied_rl.errors import UserError, require_known


class PolicyOptions(Config, place="policy"):
    """What every policy is asked."""

    @property
    def chunk_size(self) -> int:
        """K: steps of an action chunk; 1 of policies that have none."""
        return int(vars(self).get("chunk", 1))


@dataclass(frozen=True)
class TinyVLAConfig(PolicyOptions):
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
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return (self.image_key, *((self.state_key,) if self.state_key else ()))


@dataclass(frozen=True)
class VLAOptions(PolicyOptions):
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
    def reads(self) -> tuple[str, ...]:
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


def check_instruction(instruction: str | None) -> None:
    require(instruction is None or bool(instruction.strip()), "policy.instruction", "null or words", instruction)


Method = Literal["flow_sde", "flow_noise", "dppo"]


@dataclass(frozen=True)
class FlowOptions(PolicyOptions):
    """Denoising, and where its randomness is."""

    method: Method = "flow_noise"
    """flow_sde: one step, drawn at random, is stochastic. flow_noise: all are, with a learned deviation (ReinFlow). dppo: all are, and
    each step's action is one action unit."""
    num_steps: Annotated[int, Bounds(2, 10_000)] = 10
    """S: denoising steps of an action."""
    noise_level: Positive = 0.5
    """λ of the stochastic equation (flow_sde, dppo)."""
    min_std: Positive = 0.08
    """flow_noise: smallest learned deviation. In units of normalised actions."""
    max_std: Positive = 0.16
    """flow_noise: largest learned deviation."""
    std_floor: Positive = 0.1
    """dppo: deviations below are raised to it, so that late steps explore and ratios stay bounded (DPPO, Ren et al. 2024)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self.method, get_args(Method), f"policy.method={self.method!r} is not a choice.")
        require(self.min_std <= self.max_std, "policy.min_std", f"<= policy.max_std ({self.max_std})", self.min_std)


@dataclass(frozen=True)
class FlowPolicyConfig(FlowOptions):
    """The small flow-matching policy (see docs/flow_policies.md): denoising, and its networks."""

    num_steps: Annotated[int, Bounds(2, 10_000)] = 5
    """S: denoising steps of an action."""
    state_key: str | None = "state"
    """Observation with the state vector; null: no state."""
    image_key: str | None = None
    """Observation with an image uint8 [height, width, 3]; null: no image."""
    chunk: Chunk = 4
    """H = K: steps of an action chunk."""
    hidden_sizes: tuple[Size, ...] = (128, 128, 128)
    """Of the velocity's network and of the critic. Two modes want three layers."""
    activation: Literal["tanh", "relu", "elu"] = "relu"
    """Between the layers."""
    image_features: Size = 128
    """Numbers that an image becomes."""
    cnn_channels: tuple[Size, ...] = (16, 32, 32)
    """Channels of each convolution."""
    cnn_kernels: tuple[Size, ...] = (4, 4, 4)
    """Side of each convolution's kernel, in pixels."""
    cnn_strides: tuple[Size, ...] = (2, 2, 2)
    """Step of each convolution, in pixels."""
    time_features: Annotated[int, Bounds(2, 1_000_000)] = 8
    """Sines and cosines of the denoising time; even."""
    normalize_observation: bool = True
    """Scale the state by its running moments."""
    name: Literal["flow"] = "flow"
    """The kind of policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_key is None and self.image_key is None:
            raise UserError("A flow policy needs policy.state_key or policy.image_key: it would see nothing.")
        require(self.time_features % 2 == 0, "policy.time_features", "even", self.time_features)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(key for key in (self.state_key, self.image_key) if key is not None)


@dataclass(frozen=True)
class PI0Options(Config, place="policy"):
    """How pi0 stands in a simulator."""

    cameras: tuple[str, ...] = ("rgb",)
    """Observations that hold the images, in the order that the model was trained with."""
    state_key: str | None = "state"
    """Observation with the robot's state; null: zeros."""
    instruction: str | None = None
    """What to do; null: the observation's, or the simulator's own instruction."""
    instruction_key: str = "instruction"
    """Of the observation, where the simulator gives its own instructions."""
    chunk: Chunk | None = None
    """K: steps of the model's chunk that are carried out before it is asked again; null: all."""
    prompt_tokens: Tokens | None = None
    """All instructions are padded to this length, so that steps with different ones lie side by side; null: the longest's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.cameras) >= 1, "policy.cameras", "at least one image of the observation", self.cameras)
        check_instruction(self.instruction)


@dataclass(frozen=True, kw_only=True)
class PI0PolicyConfig(PI0Options, FlowOptions):
    """pi0 from a folder of transformers' `PI0ForConditionalGeneration` (see docs/flow_policies.md)."""

    path: str
    """Folder with config.json, safetensors and the tokenizer's files."""
    name: Literal["pi0"] = "pi0"
    """The kind of policy."""
    chunk: Chunk = 5
    """K: steps of the model's chunk that are carried out before it is asked again."""
    prompt_tokens: Tokens | None = 64
    """All instructions are padded to this length, so that steps with different ones lie side by side; null: the longest's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model's weights."""
    freeze_vlm: bool = False
    """Train only the action expert; the vision-language model stays as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path.strip()), "policy.path", "a checkpoint's folder", self.path)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.cameras


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
class LanguageConfig(PolicyOptions):
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
    """A critic on the hidden state that predicts a token, for advantages that need one (gae)."""
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
    def reads(self) -> tuple[str, ...]:
        return ("text", *self.images)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.lora_targets) >= 1, "policy.lora_targets", "at least one name", self.lora_targets)


@dataclass(frozen=True)
class PolicyConfig(PolicyOptions):
    """An actor-critic over a flat state, an image, or several of both."""

    name: Literal["actor_critic"] = "actor_critic"
    """The kind of policy."""
    encoder: Literal["mlp", "cnn", "mixed"] = "mlp"
    """mlp: one vector. cnn: one image. mixed: vectors and images together, each image with its own convolutions."""
    observation_key: str = "state"
    """Which part of the observation the policy reads: 'state', or 'rgb' for the CNN."""
    observation_keys: tuple[str, ...] = ()
    """What encoder=mixed reads; empty: every vector and every image that the simulator shows."""
    hidden_sizes: tuple[Size, ...] = (256, 256)
    """Units of each hidden layer, of the policy's network and of the critic's."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Between the layers."""
    distribution: Literal["gaussian", "squashed"] = "gaussian"
    """For continuous actions; discrete ones are always categorical."""
    init_log_std: LogStd = -0.5
    """Logarithm of the standard deviation of actions at the beginning."""
    normalize_observation: bool = False
    """Subtract the running mean of observations and divide by their running standard deviation."""
    observation_clip: Positive = 10.0
    """Normalised observations are cut to ± this."""
    observation_min_std: Positive = 1e-4
    """Added to the running deviation in quadrature: what hardly ever moves (a flag, a resting body) is not blown up when it does."""
    cnn_channels: tuple[Size, ...] = (32, 64, 64)
    """Of each convolution; with `cnn_kernels` and `cnn_strides` those of Mnih et al. (2015)."""
    cnn_kernels: tuple[Size, ...] = (8, 4, 3)
    """Side of each convolution's kernel, in pixels."""
    cnn_strides: tuple[Size, ...] = (4, 2, 1)
    """Step of each convolution, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.encoder == "mixed" or not self.observation_keys
        require(fits, "policy.observation_keys", f"empty for policy.encoder={self.encoder}, which reads one", self.observation_keys)
        for name in ("cnn_kernels", "cnn_strides"):
            sizes = vars(self)[name]
            require(len(sizes) == len(self.cnn_channels), f"policy.{name}", f"as many as policy.cnn_channels {self.cnn_channels}", sizes)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.observation_keys if self.encoder == "mixed" else (self.observation_key,)


@dataclass(frozen=True)
class CustomPolicyConfig(PolicyOptions):
    """A policy of your own (see docs/own_parts.md)."""

    target: str
    """``package.module:Class``, a subclass of `embodied_rl.policies.base.Policy`; or a name that an installed package gives it."""
    name: Literal["custom"] = "custom"
    """The kind of policy."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor, whose first is the simulator's spec."""
    chunk: Chunk = 1
    """K: steps of an action, as the class's `chunk_size` says."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads: its class knows them."""
        return (f"observation_keys of {self.target}",)


AnyPolicyConfig = (
    PolicyConfig
    | TinyVLAConfig
    | OpenVLAPolicyConfig
    | OpenVLAOFTPolicyConfig
    | FlowPolicyConfig
    | PI0PolicyConfig
    | LanguageConfig
    | CustomPolicyConfig
)
"""One of these; `name` says which."""


def draws_tokens(policy: AnyPolicyConfig) -> bool:
    """Whether a policy draws action tokens, at a temperature."""
    return isinstance(policy, TinyVLAConfig | OpenVLAPolicyConfig)
