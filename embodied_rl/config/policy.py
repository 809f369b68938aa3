"""What a policy is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embodied_rl.config.building import require
from embodied_rl.config.flow import FlowPolicyConfig, PI0PolicyConfig
from embodied_rl.config.language import LanguageConfig
from embodied_rl.config.vla import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig, TinyVLAConfig


@dataclass(frozen=True)
class PolicyConfig:
    """An actor-critic over a flat state or an image."""

    name: Literal["actor_critic"] = "actor_critic"
    encoder: Literal["mlp", "cnn"] = "mlp"
    observation_key: str = "state"
    """Which part of the observation the policy reads: 'state', or 'rgb' for the CNN."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    distribution: Literal["gaussian", "squashed"] = "gaussian"
    """For continuous actions; discrete ones are always categorical."""
    init_log_std: float = -0.5
    normalize_observation: bool = False
    observation_clip: float = 10.0
    cnn_channels: tuple[int, ...] = (32, 64, 64)
    """Of each convolution; with `cnn_kernels` and `cnn_strides` those of Mnih et al. (2015)."""
    cnn_kernels: tuple[int, ...] = (8, 4, 3)
    cnn_strides: tuple[int, ...] = (4, 2, 1)

    def __post_init__(self) -> None:
        require(all(size >= 1 for size in self.hidden_sizes), "policy.hidden_sizes", "positive", self.hidden_sizes)
        require(all(size >= 1 for size in self.cnn_channels), "policy.cnn_channels", "positive", self.cnn_channels)
        for name in ("cnn_kernels", "cnn_strides"):
            sizes = getattr(self, name)
            require(all(size >= 1 for size in sizes), f"policy.{name}", "positive", sizes)
            require(len(sizes) == len(self.cnn_channels), f"policy.{name}", f"as many as policy.cnn_channels {self.cnn_channels}", sizes)
        require(self.observation_clip > 0, "policy.observation_clip", "> 0", self.observation_clip)

    @property
    def chunk_size(self) -> int:
        """K: it acts step by step."""
        return 1

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts of an observation that the policy reads."""
        return (self.observation_key,)


AnyPolicyConfig = (
    PolicyConfig | TinyVLAConfig | OpenVLAPolicyConfig | OpenVLAOFTPolicyConfig | FlowPolicyConfig | PI0PolicyConfig | LanguageConfig
)
"""One of these; `name` says which."""
