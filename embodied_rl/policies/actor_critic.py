"""Actor-critic networks over a flat state (separate actor and critic), an image (a shared convolutional trunk), or several of both."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from embodied_rl.config import PolicyConfig
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation
from embodied_rl.policies.heads import Categorical, DiagonalGaussian, Head, SquashedGaussian
from embodied_rl.types import SimSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


class ActorCritic(Policy):
    """Small networks for vectors or images. Built by `build_policy`."""

    forward_rows = 4096
    critics_train = ("trunk.",)
    even_rows = 256  # CPU convolutions keep buffers for every row count they ever see

    def __init__(self, config: PolicyConfig, spec: SimSpec) -> None:
        super().__init__()
        self.config = self.built_from = config
        self.spec = spec
        self._keys = _keys_read(config, spec)
        gaussian = {"gaussian": DiagonalGaussian, "squashed": SquashedGaussian}[config.distribution]
        discrete = spec.action.kind == "discrete"
        self.head: Head = Categorical(spec.action.num_actions) if discrete else gaussian(spec.action.dim, config.init_log_std)
        shape = spec.tensors[self._keys[0]].shape
        self.normalizer: RunningNorm | None = None
        self.trunk: nn.Module | None = None
        self.work = "vectors"
        if config.encoder != "mlp":
            self.work = "pictures"
            self.trunk = ImageTrunk(shape, config) if config.encoder == "cnn" else MixedTrunk(self._keys, config, spec)
            size, hidden = self.trunk.num_features, config.hidden_sizes[1:]
        else:
            size, hidden = shape[0], config.hidden_sizes
            if config.normalize_observation:
                self.normalizer = RunningNorm(size, config.observation_clip, config.observation_min_std**2)
        self._num_features = size
        self.actor = make_mlp(size, hidden, self.head.num_outputs, config.activation, output_gain=0.01)
        self.critic = make_mlp(size, hidden, 1, config.activation, output_gain=1.0)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        return self._keys

    @property
    def squashed(self) -> bool:
        return self.head.squashed

    def features(self, observation: TensorObservation) -> Tensor:
        """Input of actor and critic [B, D]: the normalised state, or the trunk's features."""
        if isinstance(self.trunk, MixedTrunk):
            features: Tensor = self.trunk(observation)
            return features
        x = observation[self.config.observation_key]
        if self.trunk is not None:
            return self.trunk(x)
        return x.float() if self.normalizer is None else self.normalizer(x)

    @property
    def num_features(self) -> int:
        return self._num_features

    def state_value(self, features: Tensor) -> Tensor:
        return self.critic(features).squeeze(-1)

    def drawn(self, observation: TensorObservation, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = self.head.sample(self.actor(features), noise)
        bounded = self.squashed or self.spec.action.kind == "discrete"
        return (action if bounded else action.clamp(-1.0, 1.0)), log_prob

    def likelihood(
        self, observation: TensorObservation, features: Tensor, action: Tensor, executed: Tensor | None, noise: Tensor | None
    ) -> Tensor:
        return self.head.log_prob(self.actor(features), action).sum(-1)

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        action, log_prob = self.head.sample(self.actor(self.features(observation)), noise)
        return ActionOutput(action, log_prob)

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        features = self.features(observation)
        outputs = self.actor(features)
        return Evaluation(self.head.log_prob(outputs, action), self.head.entropy(outputs), self.critic(features).squeeze(-1))

    def value(self, observation: TensorObservation) -> Tensor:
        return self.critic(self.features(observation)).squeeze(-1)

    def update_statistics(self, observation: TensorObservation) -> None:
        if isinstance(self.trunk, MixedTrunk):
            self.trunk.update_statistics(observation)
        elif self.normalizer is not None:
            self.normalizer.update(observation[self.config.observation_key].flatten(0, -2))

    @torch.no_grad()
    def limit_noise(self, smallest: float) -> None:
        for name, parameter in self.head.named_parameters():
            if name.endswith("log_std"):
                parameter.clamp_(min=smallest)


class RunningNorm(nn.Module):
    """Scales vectors [B, D] by the mean and standard deviation of all data so far, then clips.

    The statistics change only in `update`, so normalisation is constant between two updates. Moments are float64 buffers (part of the
    state_dict). Batches are merged exactly, in one step each, by the pairwise formula of Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979). Before the first batch, observations pass unscaled.
    """

    mean: Tensor
    """[D] float64"""
    var: Tensor
    """[D] float64, biased (divided by the count)."""
    count: Tensor
    """[] float64 number of rows added."""

    def __init__(self, size: int, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.eps = eps
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation, both [D] float32."""
        return self.mean.float(), torch.rsqrt(self.var + self.eps).float()

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] → [B, D] float32 within ±clip."""
        mean, inverse_std = self.scale()
        return ((x.float() - mean) * inverse_std).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add a batch [B, D]; an empty one changes nothing."""
        if x.shape[0] == 0:
            return
        rows = x.detach().to(self.mean.device, torch.float64)
        num_rows = float(rows.shape[0])
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        total = self.count + num_rows
        delta = mean - self.mean
        # Before the first batch, the initial variance of 1 has no weight because its count is 0.
        squares = self.var * self.count + var * num_rows + delta**2 * self.count * num_rows / total
        self.mean += delta * (num_rows / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


class ImageTrunk(nn.Module):
    """Convolutions of Mnih et al. (2015), then one normalised linear layer: uint8 [B, H, W, 3] → [B, num_features]."""

    def __init__(self, shape: tuple[int, ...], config: PolicyConfig) -> None:
        super().__init__()
        height, width, channels = shape
        layers: list[nn.Module] = []
        stack = zip(config.cnn_channels, config.cnn_kernels, config.cnn_strides, strict=True)
        for index, (num_channels, kernel, stride) in enumerate(stack):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            if height < 1 or width < 1:
                raise UserError(
                    f"policy.cnn_channels={list(config.cnn_channels)} has too many layers for images of {shape[0]}x{shape[1]} pixels: "
                    f"nothing is left after layer {index + 1}. Use larger images, fewer layers, or smaller cnn_kernels and cnn_strides."
                )
            layers += [_orthogonal(nn.Conv2d(channels, num_channels, kernel, stride), math.sqrt(2.0)), nn.ReLU(inplace=True)]
            channels = num_channels
        size = channels * height * width
        layers.append(nn.Flatten())
        self.num_features = size
        if config.hidden_sizes:
            self.num_features = config.hidden_sizes[0]
            layers += [
                _orthogonal(nn.Linear(size, self.num_features), math.sqrt(2.0)),
                nn.LayerNorm(self.num_features),
                ACTIVATIONS[config.activation](),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        # Channels first as a view: convolutions use the channels-last memory directly.
        pixels = image.permute(0, 3, 1, 2).to(dtype=torch.float32, memory_format=torch.channels_last, copy=True)
        return self.layers(pixels.div_(255.0).sub_(0.5).to(next(self.parameters()).dtype))


class MixedTrunk(nn.Module):
    """Vectors, normalised if configured, with the features of each image: {key: [B, ...]} → [B, num_features]."""

    def __init__(self, keys: tuple[str, ...], config: PolicyConfig, spec: SimSpec) -> None:
        super().__init__()
        self.vectors = tuple(key for key in keys if len(spec.tensors[key].shape) == 1)
        self.images = tuple(key for key in keys if key not in self.vectors)
        size = sum(spec.tensors[key].shape[0] for key in self.vectors)
        self.normalizer = None
        if size and config.normalize_observation:
            self.normalizer = RunningNorm(size, config.observation_clip, config.observation_min_std**2)
        self.trunks = nn.ModuleList(ImageTrunk(spec.tensors[key].shape, config) for key in self.images)
        self.num_features = size + sum(trunk.num_features for trunk in self.trunks)  # type: ignore[misc]

    def forward(self, observation: TensorObservation) -> Tensor:
        parts = [trunk(observation[key]) for key, trunk in zip(self.images, self.trunks, strict=True)]
        if self.vectors:
            x = self._vectors(observation)
            parts.insert(0, x if self.normalizer is None else self.normalizer(x))
        return torch.cat(parts, dim=-1)

    def update_statistics(self, observation: TensorObservation) -> None:
        """Add the vectors of a rollout [..., D] to the normalisation statistics."""
        if self.normalizer is not None:
            self.normalizer.update(self._vectors(observation).flatten(0, -2))

    def _vectors(self, observation: TensorObservation) -> Tensor:
        return torch.cat([observation[key].float() for key in self.vectors], dim=-1)


def build_policy(config: PolicyConfig, spec: SimSpec) -> ActorCritic:
    """Build an actor-critic for a simulator; weights come from torch's global generator, so seed it first.
    Raises UserError: the simulator lacks an observation, or the encoder cannot read it."""
    if config.encoder != "mixed":
        _check_one_key(config, spec)
    if config.distribution == "squashed" and spec.action.kind == "discrete":
        raise UserError(
            f"policy.distribution='squashed' is for continuous actions, but task '{spec.task}' has {spec.action.num_actions} discrete "
            "ones. Set policy.distribution=gaussian, which makes them categorical (instead of sac or rlpd: algorithm=ppo)."
        )
    return ActorCritic(config, spec)


def _keys_read(config: PolicyConfig, spec: SimSpec) -> tuple[str, ...]:
    """Observation keys of an actor-critic. Raises UserError if encoder=mixed gets a part that is neither vector nor image."""
    if config.encoder != "mixed":
        return (config.observation_key,)
    readable = tuple(key for key, part in spec.tensors.items() if len(part.shape) == 1 or part.is_picture)
    for key in config.observation_keys:
        if key not in readable:
            what = "no observation" if key not in spec.tensors else "neither a vector nor an image (uint8 [H, W, 3])"
            raise UserError(f"policy.observation_keys: '{key}' is {what} of task '{spec.task}'.{did_you_mean(key, readable)}")
    if not readable:
        raise UserError(f"policy.encoder='mixed' reads vectors and images, and task '{spec.task}' has none.")
    return config.observation_keys or readable


def _check_one_key(config: PolicyConfig, spec: SimSpec) -> None:
    key = config.observation_key
    if key not in spec.tensors:
        if spec.action.kind == "text" or not spec.tensors:
            fix = "policy=language generation=tokens_torch algorithm=grpo"
            raise UserError(f"Task '{spec.task}' is played in text, and policy.name='actor_critic' reads numbers. Type: {fix}")
        parts = spec.tensors.items()
        read = {"mlp": [name for name, part in parts if len(part.shape) == 1], "cnn": [name for name, part in parts if part.is_picture]}
        own, (other, theirs) = read.pop(config.encoder), read.popitem()
        fix = f" Type: policy.observation_key={own[0]}" if own else f" Type: policy={other}" if theirs else ""
        known = did_you_mean(key, spec.tensors)
        if config.encoder == "cnn" and not own:
            known += " policy=cnn reads images, which are [H, W, 3] of uint8."
        raise UserError(f"policy.observation_key='{key}' is not an observation of task '{spec.task}'.{known}{fix}")
    part = spec.tensors[key]
    if config.encoder == "cnn" and not part.is_picture:
        raise UserError(
            f"policy.encoder='cnn' reads images (uint8 [H, W, 3]), but observation '{key}' of task '{spec.task}' is "
            f"{part.dtype} {list(part.shape)}. Use policy.encoder=mlp, or an image: {_keys(spec, 3)}."
        )
    if config.encoder == "mlp" and len(part.shape) != 1:
        raise UserError(
            f"policy.encoder='mlp' reads vectors, but observation '{key}' of task '{spec.task}' is {part.dtype} {list(part.shape)}. "
            f"Use policy.encoder=cnn for images, or a vector: {_keys(spec, 1)}."
        )


def make_mlp(size: int, hidden_sizes: tuple[int, ...], num_outputs: int, activation: str, output_gain: float) -> nn.Sequential:
    """Linear layers with orthogonal weights (gain sqrt(2), as in PPO implementations; `output_gain` for the last) and zero biases."""
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [_orthogonal(nn.Linear(size, width), math.sqrt(2.0)), ACTIVATIONS[activation]()]
        size = width
    layers.append(_orthogonal(nn.Linear(size, num_outputs), output_gain))
    return nn.Sequential(*layers)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thread counts change rounding: a seed would give another run on a machine with other cores
    nn.init.orthogonal_(layer.weight, gain)
    torch.set_num_threads(before)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _keys(spec: SimSpec, num_axes: int) -> str:
    return ", ".join(key for key, part in spec.tensors.items() if len(part.shape) == num_axes) or "(none here)"
