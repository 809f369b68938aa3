"""What a policy is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.bounds import Chunk, LogStd, Positive, Size
from embodied_rl.config.building import Config, require
from embodied_rl.config.flow import FlowPolicyConfig, PI0PolicyConfig
from embodied_rl.config.language import LanguageConfig
from embodied_rl.config.vla import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig, TinyVLAConfig


@dataclass(frozen=True)
class PolicyConfig(Config, place="policy"):
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
    def chunk_size(self) -> int:
        """K: it acts step by step."""
        return 1

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return self.observation_keys if self.encoder == "mixed" else (self.observation_key,)


@dataclass(frozen=True)
class CustomPolicyConfig(Config, place="policy"):
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
    def chunk_size(self) -> int:
        """K"""
        return self.chunk

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
