"""What flow policies are built from: the denoising that all have, the small policy's networks, and pi0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from embodied_rl.bounds import Bounds, Chunk, Positive, Size, Tokens
from embodied_rl.config.building import Config, require
from embodied_rl.config.vla import check_instruction
from embodied_rl.errors import UserError, did_you_mean

Method = Literal["flow_sde", "flow_noise", "dppo"]


@dataclass(frozen=True)
class FlowOptions(Config, place="policy"):
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
        if self.method not in get_args(Method):
            raise UserError(f"policy.method={self.method!r} is not a choice.{did_you_mean(str(self.method), get_args(Method))}")
        require(self.min_std <= self.max_std, "policy.min_std", f"<= policy.max_std ({self.max_std})", self.min_std)


@dataclass(frozen=True)
class FlowNetworkConfig(Config, place="policy"):
    """The small flow policy's networks."""

    state_key: str | None = "state"
    """Observation with the state vector; null: no state."""
    image_key: str | None = None
    """Observation with an image uint8 [height, width, 3]; null: no image."""
    chunk: Chunk = 1
    """H = K: steps of a chunk."""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_key is None and self.image_key is None:
            raise UserError("A flow policy needs policy.state_key or policy.image_key: it would see nothing.")
        require(self.time_features % 2 == 0, "policy.time_features", "even", self.time_features)


@dataclass(frozen=True)
class FlowPolicyConfig(FlowNetworkConfig, FlowOptions):
    """The small flow-matching policy (see docs/flow_policies.md): networks and denoising."""

    name: Literal["flow"] = "flow"
    """The kind of policy."""
    chunk: Chunk = 4
    """K: steps of an action chunk."""
    num_steps: Annotated[int, Bounds(2, 10_000)] = 5
    """S: denoising steps of an action."""

    @property
    def chunk_size(self) -> int:
        """K"""
        return self.chunk

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
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
    def chunk_size(self) -> int:
        """K"""
        return self.chunk

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return self.cameras
