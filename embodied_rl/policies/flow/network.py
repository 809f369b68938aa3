"""A small flow-matching policy: a state, an image or both in, chunks of actions out.

Shape legend: B rows, H steps of a chunk, D action dimensions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied_rl.config import FlowNetworkConfig, FlowPolicyConfig, PolicyConfig
from embodied_rl.config.policy import FlowOptions
from embodied_rl.errors import UserError, require_known
from embodied_rl.policies.actor_critic import ImageTrunk, make_mlp
from embodied_rl.policies.base import TensorObservation
from embodied_rl.policies.flow.policy import FlowPolicy, VelocityModel
from embodied_rl.policies.normalization import RunningNorm
from embodied_rl.types import SimSpec, TensorSpec


class FlowNetwork(VelocityModel[Tensor]):
    """A multilayer perceptron over (x, features of t, features of the observation)."""

    frequencies: Tensor
    """[time_features / 2]"""

    def __init__(self, config: FlowNetworkConfig, spec: SimSpec) -> None:
        super().__init__()
        self.config = config
        self.latent = (config.chunk, spec.action.dim)
        self.observation_keys = tuple(key for key in (config.state_key, config.image_key) if key is not None)
        self.normalizer: RunningNorm | None = None
        self.trunk: ImageTrunk | None = None
        size = 0
        if config.state_key is not None:
            size += _part(spec, config.state_key, 1).shape[0]
            if config.normalize_observation:
                self.normalizer = RunningNorm(size)
        if config.image_key is not None:
            stack = PolicyConfig(
                hidden_sizes=(config.image_features,),
                activation=config.activation,
                cnn_channels=config.cnn_channels,
                cnn_kernels=config.cnn_kernels,
                cnn_strides=config.cnn_strides,
            )
            self.trunk = ImageTrunk(_part(spec, config.image_key, 3).shape, stack)
            size += self.trunk.num_features
        self.num_features = size
        # Periods from 4, which distinguishes the ends, down to 1/2: higher frequencies are harder to interpolate between than useful.
        half = config.time_features // 2
        self.register_buffer("frequencies", 0.5 * math.pi * 2.0 ** torch.linspace(0.0, 3.0, half), persistent=False)
        width = self.latent[0] * self.latent[1]
        self.layers = make_mlp(width + config.time_features + size, config.hidden_sizes, width, config.activation, output_gain=0.1)

    @property
    def convolutions(self) -> nn.Module | None:
        return self.trunk

    def context(self, observation: Mapping[str, Any]) -> Tensor:
        """[B, F]: the normalised state, then the image's features."""
        parts = []
        if self.config.state_key is not None:
            state = observation[self.config.state_key].float()
            parts.append(state if self.normalizer is None else self.normalizer(state))
        if self.trunk is not None and self.config.image_key is not None:
            parts.append(self.trunk(observation[self.config.image_key]))
        return torch.cat(parts, dim=1)

    def features(self, context: Tensor) -> Tensor:
        return context

    def velocity(self, context: Tensor, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        return self.layers(torch.cat([x.flatten(1), angles.sin(), angles.cos(), context], dim=1)).view_as(x)

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold states [..., state dim] into the running moments."""
        if self.normalizer is not None and self.config.state_key is not None:
            self.normalizer.update(observation[self.config.state_key].flatten(0, -2))


class Critic(nn.Module):
    """Features [B, F] → values [B]."""

    def __init__(self, num_features: int, config: FlowNetworkConfig) -> None:
        super().__init__()
        self.layers = make_mlp(num_features, config.hidden_sizes, 1, config.activation, output_gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(-1)


def build_flow_policy(config: FlowNetworkConfig, options: FlowOptions, spec: SimSpec) -> FlowPolicy[Tensor]:
    """The small flow policy for a simulator; weights are drawn from torch's global generator, so seed it first.

    Raises UserError: actions are not continuous, or the simulator has no such observation.
    """
    if spec.action.kind != "continuous":
        raise UserError(f"A flow policy makes continuous actions, but task '{spec.task}' takes {spec.action.kind} ones. Use policy=mlp.")
    network = FlowNetwork(config, spec)
    return FlowPolicy(network, Critic(network.num_features, config), spec, options, network.latent)


def build_flow(config: FlowPolicyConfig, spec: SimSpec) -> FlowPolicy[Tensor]:
    """`build_flow_policy` of a configuration that is both."""
    return build_flow_policy(config, config, spec)


def _part(spec: SimSpec, key: str, num_axes: int) -> TensorSpec:
    require_known(key, spec.tensors, f"Observation '{key}' does not exist in task '{spec.task}'.")
    part = spec.tensors[key]
    if len(part.shape) != num_axes or (num_axes == 3 and part.dtype != "uint8"):
        wanted = "a vector" if num_axes == 1 else "an image, uint8 [height, width, 3]"
        raise UserError(f"Observation '{key}' of task '{spec.task}' is {part.dtype} {list(part.shape)}, where the policy wants {wanted}.")
    return part
