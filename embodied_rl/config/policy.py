"""Configurations of policies, one dataclass for each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from embodied_rl.bounds import Bounds, Chunk, Layers, LogStd, LoraRank, Positive, PositiveTemperature, Size, Tokens
from embodied_rl.config.building import Checks, Config
from embodied_rl.errors import UserError, require_known


class PolicyOptions(Config, place="policy"):
    """Properties of every policy's configuration."""

    @property
    def chunk_size(self) -> int:
        """K: steps of an action chunk; 1 for policies without chunks."""
        return int(vars(self).get("chunk", 1))


@dataclass(frozen=True)
class TinyVLAConfig(PolicyOptions):
    """A small vision-language-action model: an image and words in, a chunk of action tokens out."""

    name: Literal["tiny_vla"] = "tiny_vla"
    """The kind of policy."""
    image_key: str = "rgb"
    """Observation with the image, uint8 [height, width, 3]."""
    state_key: str | None = None
    """Observation with the robot's state; null: the policy reads only the image and the words."""
    instruction: str | None = None
    """Instruction; null: the observation's, or the simulator's own."""
    instruction_key: str = "instruction"
    """Key of each row's instruction in the observation, if there is one."""
    chunk: Chunk = 4
    """K: steps of an action chunk, which the simulator plays without asking again."""
    num_bins: Annotated[int, Bounds(2, 1_000_000)] = 32
    """Edges that divide [-1, 1]; an action dimension is one of as many tokens."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """parallel: all tokens of a chunk from one pass, independent of each other. autoregressive: one after another."""
    temperature: PositiveTemperature = 1.0
    """Temperature of sampling and of log-probabilities."""
    width: Size = 96
    """D: width of the transformer."""
    num_layers: Layers = 2
    """Layers of the transformer."""
    num_heads: Size = 4
    """Attention heads of each layer."""
    conv_channels: tuple[Size, ...] = (24, 48)
    """Channels of the convolutions before the last, each of which halves the image; the last has `width`."""
    num_keypoints: Size = 16
    """Attention maps over the image whose mean positions the decoder reads."""
    vocabulary: Annotated[int, Bounds(1, 100_000_000)] = 1024
    """Rows of the word embedding; a hash of the word selects its row."""
    max_words: Size = 16
    """Words of an instruction that the policy reads; the rest is cut."""
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value per chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    value_gradient: bool = False
    """Whether the value's loss also trains the layers that the actions read."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of storing its activations."""
    cloning_shift: Annotated[int, Bounds(0, 16_384)] = 0
    """Pixels by which images are randomly shifted while the policy is cloned, at most: right if actions depend on the relative positions of
    things."""

    def checks(self) -> Checks:
        yield self.width % self.num_heads == 0, "num_heads", f"a divisor of policy.width ({self.width})", self.num_heads
        yield from _of_instruction(self.instruction)

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return (self.image_key, *((self.state_key,) if self.state_key else ()))


@dataclass(frozen=True)
class VLAOptions(PolicyOptions):
    """Options of a VLA in a simulator."""

    cameras: tuple[str, ...] = ("rgb",)
    """Observations with the images, in the order that the model was trained with."""
    proprio_key: str = "state"
    """Observation with the robot's state, if the model reads it."""
    instruction: str | None = None
    """Instruction; null: the observation's, or the simulator's own."""
    instruction_key: str = "instruction"
    """Key of the instruction in the observation, if the simulator gives its own."""
    unnorm_key: str | None = None
    """Data set whose action ranges are used; null if the checkpoint has only one."""
    bounds: Literal["quantiles", "extremes"] = "quantiles"
    """Values of the recorded actions at the ends of the action tokens: their 1% and 99% quantiles, or their extremes."""
    temperature: PositiveTemperature = 1.0
    """Temperature of sampling and of log-probabilities."""
    prompt_tokens: Tokens | None = None
    """Length to which all prompts are padded, so that one batch holds different instructions; null: the longest prompt's."""
    image_recipe: Literal["resize", "libero"] = "resize"
    """Preparation of images: resized as the checkpoint says, or as LIBERO's data set was (half a turn, a JPEG round trip, a crop)."""
    gripper: Literal["as_is", "libero"] = "as_is"
    """Translation of the gripper's dimension: none, or from 0 … 1 to the 1 or -1 of LIBERO's simulator."""
    generation: Literal["eager", "compile", "cuda_graph"] = "eager"
    """Computation of tokens: step by step, compiled, or replayed as a CUDA graph."""

    def checks(self) -> Checks:
        yield len(self.cameras) >= 1, "cameras", "at least one image of the observation", self.cameras
        yield from _of_instruction(self.instruction)


@dataclass(frozen=True, kw_only=True)
class OpenVLAPolicyConfig(VLAOptions):
    """OpenVLA from a checkpoint folder (see docs/openvla.md), whole or with LoRA."""

    path: str
    """Folder with config.json, safetensors and the tokenizer's files."""
    name: Literal["openvla"] = "openvla"
    """The kind of policy."""
    prompt_tokens: Tokens | None = 64
    """Length to which all prompts are padded, so that one batch holds different instructions; null: the longest prompt's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the model's weights; auto: as stored."""
    value_head: bool = True
    """Add a critic to the model; false: for methods without one."""
    lora_rank: LoraRank = 0
    """Rank of LoRA; 0: train all weights that are not frozen."""
    lora_alpha: Positive = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers with LoRA; all-linear: every one of the language model and, unless frozen, of vision and projector."""
    vision: tuple[dict[str, Any], ...] = ()
    """Shapes of the two vision transformers (width, depth, num_heads, mlp_width, …) if config.json names others than OpenVLA's own."""
    freeze_vision: bool = False
    """Freeze the vision transformers."""
    gradient_checkpointing: bool = False
    """Compute the language model's layers again in the backward pass instead of storing their activations."""

    def checks(self) -> Checks:
        yield from super().checks()
        yield bool(self.path.strip()), "path", "a checkpoint's folder", self.path
        yield len(self.vision) in (0, 2), "vision", "the shapes of two vision transformers", self.vision
        yield len(self.lora_targets) >= 1, "lora_targets", "at least one name", self.lora_targets

    @property
    def reads(self) -> tuple[str, ...]:
        return self.cameras


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTPolicyConfig(OpenVLAPolicyConfig):
    """OpenVLA-OFT: OpenVLA's options, and the settings of the fine-tuning, which the checkpoint's files do not hold."""

    name: Literal["openvla_oft"] = "openvla_oft"  # type: ignore[assignment]
    """The kind of policy."""
    chunk: Chunk = 8
    """K: 8 on LIBERO, 25 on ALOHA, 5 on Bridge."""
    head: Literal["discrete", "l1"] = "discrete"
    """discrete: action tokens, which RL trains. l1: regression as in published checkpoints, for evaluation and cloning."""
    value: Literal["chunk", "action"] = "chunk"
    """chunk: one value per chunk. action: one for each of its steps (algorithm.advantage=gae_action)."""
    film: bool = False
    """Scale and shift the vision transformers' features by the language."""
    proprio_dim: Size | None = None
    """Size of the robot's state, if the model reads it: 8 on LIBERO, 14 on ALOHA."""
    variant: Literal["openvla-oft", "rlinf"] = "openvla-oft"
    """Sequence that the model was trained on: with </s> after the actions, or without."""


def _of_instruction(instruction: str | None) -> Checks:
    yield instruction is None or bool(instruction.strip()), "instruction", "null or words", instruction


Method = Literal["flow_sde", "flow_noise", "dppo"]


@dataclass(frozen=True)
class FlowOptions(PolicyOptions):
    """Denoising, and the source of its randomness."""

    method: Method = "flow_noise"
    """flow_sde: one random step is stochastic. flow_noise: all steps are, with a learned deviation (ReinFlow). dppo: all steps are, and
    each step's action is one action unit."""
    num_steps: Annotated[int, Bounds(2, 10_000)] = 10
    """S: denoising steps of an action."""
    noise_level: Positive = 0.5
    """λ of the stochastic equation (flow_sde, dppo)."""
    min_std: Positive = 0.08
    """flow_noise: smallest learned deviation, in normalised actions."""
    max_std: Positive = 0.16
    """flow_noise: largest learned deviation."""
    std_floor: Positive = 0.1
    """dppo: least deviation, so that late steps explore and ratios stay bounded (DPPO, Ren et al. 2024)."""

    def checks(self) -> Checks:
        require_known(self.method, get_args(Method), f"policy.method={self.method!r} is not a choice.")
        yield self.min_std <= self.max_std, "min_std", f"<= policy.max_std ({self.max_std})", self.min_std


@dataclass(frozen=True)
class FlowPolicyConfig(FlowOptions):
    """The small flow-matching policy (see docs/flow_policies.md): its denoising and networks."""

    num_steps: Annotated[int, Bounds(2, 10_000)] = 5
    """S: denoising steps of an action."""
    state_key: str | None = "state"
    """Observation with the state vector; null: no state."""
    image_key: str | None = None
    """Observation with an image uint8 [height, width, 3]; null: no image."""
    chunk: Chunk = 4
    """H = K: steps of an action chunk."""
    hidden_sizes: tuple[Size, ...] = (128, 128, 128)
    """Units of the hidden layers of the velocity network and of the critic. Two modes need three layers."""
    activation: Literal["tanh", "relu", "elu"] = "relu"
    """Activation between the layers."""
    image_features: Size = 128
    """Features of an image."""
    cnn_channels: tuple[Size, ...] = (16, 32, 32)
    """Channels of each convolution."""
    cnn_kernels: tuple[Size, ...] = (4, 4, 4)
    """Side of each convolution's kernel, in pixels."""
    cnn_strides: tuple[Size, ...] = (2, 2, 2)
    """Step of each convolution, in pixels."""
    time_features: Annotated[int, Bounds(2, 1_000_000)] = 8
    """Sines and cosines of the denoising time; an even number."""
    normalize_observation: bool = True
    """Scale the state by its running moments."""
    name: Literal["flow"] = "flow"
    """The kind of policy."""

    def checks(self) -> Checks:
        yield from super().checks()
        if self.state_key is None and self.image_key is None:
            raise UserError("A flow policy needs policy.state_key or policy.image_key: it would see nothing.")
        yield self.time_features % 2 == 0, "time_features", "even", self.time_features

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(key for key in (self.state_key, self.image_key) if key is not None)


@dataclass(frozen=True)
class PI0Options(Config, place="policy"):
    """Options of pi0 in a simulator."""

    cameras: tuple[str, ...] = ("rgb",)
    """Observations with the images, in the order that the model was trained with."""
    state_key: str | None = "state"
    """Observation with the robot's state; null: zeros."""
    instruction: str | None = None
    """Instruction; null: the observation's, or the simulator's own."""
    instruction_key: str = "instruction"
    """Key of the instruction in the observation, if the simulator gives its own."""
    chunk: Chunk | None = None
    """K: steps of the model's chunk to execute before the next inference; null: all."""
    prompt_tokens: Tokens | None = None
    """Length to which all instructions are padded, so that one batch holds different ones; null: the longest's."""

    def checks(self) -> Checks:
        yield from super().checks()  # of the next base of a class with several
        yield len(self.cameras) >= 1, "cameras", "at least one image of the observation", self.cameras
        yield from _of_instruction(self.instruction)


@dataclass(frozen=True, kw_only=True)
class PI0PolicyConfig(PI0Options, FlowOptions):
    """pi0 from a folder of transformers' `PI0ForConditionalGeneration` (see docs/flow_policies.md)."""

    path: str
    """Folder with config.json, safetensors and the tokenizer's files."""
    name: Literal["pi0"] = "pi0"
    """The kind of policy."""
    chunk: Chunk = 5
    """K: steps of the model's chunk to execute before the next inference."""
    prompt_tokens: Tokens | None = 64
    """Length to which all instructions are padded, so that one batch holds different ones; null: the longest's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's weights."""
    freeze_vlm: bool = False
    """Train only the action expert; freeze the vision-language model."""

    def checks(self) -> Checks:
        yield from super().checks()
        yield bool(self.path.strip()), "path", "a checkpoint's folder", self.path

    @property
    def reads(self) -> tuple[str, ...]:
        return self.cameras


@dataclass(frozen=True)
class TinyModelConfig(Config, place="policy.tiny"):
    """A small random Llama with a tokenizer of words and signs, made if no model is given."""

    hidden_size: Size = 128
    """Width of the model."""
    num_layers: Layers = 2
    """Layers of the transformer."""
    num_heads: Size = 4
    """Attention heads of each layer."""
    num_key_value_heads: Size = 4
    """Heads of keys and values; if fewer than num_heads, each serves several."""
    intermediate_size: Size = 256
    """Width of the layers between attentions."""
    max_context: Tokens = 1024
    """Tokens of prompt and answer together."""


@dataclass(frozen=True)
class LanguageConfig(PolicyOptions):
    """A Hugging Face causal language model from a folder, with or without LoRA and a value head."""

    model: str | None = None
    """Folder with config.json, safetensors and a tokenizer; null: make a small random model (`tiny`)."""
    adapter: str | None = None
    """Folder of a LoRA adapter to continue from, with its own rank and targets."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the weights; auto: as stored."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Implementation of attention."""
    lora_rank: LoraRank = 0
    """Rank of LoRA; 0: train all weights."""
    lora_alpha: Positive = 16.0
    """LoRA's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers with LoRA."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """Critic on the hidden state that predicts a token, for advantages that need one (gae)."""
    layout: Literal["auto", "packed", "right", "left"] = "auto"
    """Layout of sequences in training. auto: packed if the model keeps packed sequences apart, else right."""
    max_tokens_per_micro_batch: Tokens = 4096
    """Tokens of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: saves memory and costs time."""
    images: tuple[str, ...] = ()
    """Parts of an observation that are pictures, shown before its text (vision-language models)."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    name: Literal["language"] = "language"
    """The kind of policy."""

    @property
    def folder(self) -> str:
        """`model`, once it is known."""
        assert self.model is not None, "a tiny model is made first"
        return self.model

    @property
    def reads(self) -> tuple[str, ...]:
        return ("text", *self.images)

    def checks(self) -> Checks:
        yield len(self.lora_targets) >= 1, "lora_targets", "at least one name", self.lora_targets


@dataclass(frozen=True)
class PolicyConfig(PolicyOptions):
    """An actor-critic over a flat state, an image, or several of both."""

    name: Literal["actor_critic"] = "actor_critic"
    """The kind of policy."""
    encoder: Literal["mlp", "cnn", "mixed"] = "mlp"
    """mlp: one vector. cnn: one image. mixed: several vectors and images, each image with its own convolutions."""
    observation_key: str = "state"
    """Part of the observation that the policy reads: 'state', or 'rgb' for the CNN."""
    observation_keys: tuple[str, ...] = ()
    """Parts that encoder=mixed reads; empty: every vector and every image of the simulator."""
    hidden_sizes: tuple[Size, ...] = (256, 256)
    """Units of each hidden layer, of the policy's network and of the critic's."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Activation between the layers."""
    distribution: Literal["gaussian", "squashed"] = "gaussian"
    """Distribution of continuous actions; discrete ones are always categorical."""
    init_log_std: LogStd = -0.5
    """Initial logarithm of the actions' standard deviation."""
    normalize_observation: bool = False
    """Subtract the running mean of observations and divide by their running standard deviation."""
    observation_clip: Positive = 10.0
    """Limit normalised observations to ± this."""
    observation_min_std: Positive = 1e-4
    """Added to the running deviation in quadrature, so that inputs that hardly ever move (a flag, a resting body) are not magnified."""
    cnn_channels: tuple[Size, ...] = (32, 64, 64)
    """Channels of each convolution; the defaults here, in `cnn_kernels` and in `cnn_strides` are those of Mnih et al. (2015)."""
    cnn_kernels: tuple[Size, ...] = (8, 4, 3)
    """Side of each convolution's kernel, in pixels."""
    cnn_strides: tuple[Size, ...] = (4, 2, 1)
    """Step of each convolution, in pixels."""

    def checks(self) -> Checks:
        fits = self.encoder == "mixed" or not self.observation_keys
        yield fits, "observation_keys", f"empty for policy.encoder={self.encoder}, which reads one", self.observation_keys
        scaled = self.encoder == "cnn" and self.normalize_observation
        yield not scaled, "normalize_observation", "false for policy.encoder=cnn: images are always scaled to [-0.5, 0.5]", True
        for name, sizes in (("cnn_kernels", self.cnn_kernels), ("cnn_strides", self.cnn_strides)):
            yield len(sizes) == len(self.cnn_channels), name, f"as many as policy.cnn_channels {self.cnn_channels}", sizes

    @property
    def reads(self) -> tuple[str, ...]:
        return self.observation_keys if self.encoder == "mixed" else (self.observation_key,)


@dataclass(frozen=True)
class CustomPolicyConfig(PolicyOptions):
    """A policy of your own (see docs/own_parts.md)."""

    target: str
    """``package.module:Class``, a subclass of `embodied_rl.policies.base.Policy`; or its name from an installed package."""
    name: Literal["custom"] = "custom"
    """The kind of policy."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor, whose first is the simulator's spec."""
    chunk: Chunk = 1
    """K: steps of an action, equal to the class's `chunk_size`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads, which its class knows."""
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
"""Configuration of any policy; `name` says which."""


def draws_tokens(policy: AnyPolicyConfig) -> bool:
    """Whether a policy samples action tokens at a temperature."""
    return isinstance(policy, TinyVLAConfig | OpenVLAPolicyConfig)
