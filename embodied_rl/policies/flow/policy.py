"""Flow policies with the interface of `embodied_rl.policies.base`: actions by denoising, with log-probabilities of the denoising steps.

The density of a flow's action has no cheap form, but a *stochastic* denoising step has a normal distribution. The policy therefore keeps
the samples along the way with the action (`RecordLayout`), and `evaluate` scores them under the current weights.

Shape legend: B rows, K steps and A dimensions that the simulator gets, H >= K and D >= A those of the model, S denoising steps, W numbers
of a recorded action, L action units.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.config import FlowPolicyConfig, PolicyConfig
from embodied_rl.config.policy import FlowOptions
from embodied_rl.errors import UserError
from embodied_rl.policies.actor_critic import ImageTrunk, RunningNorm, make_mlp
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation, image_of, numpy_of, vector_of
from embodied_rl.policies.heads import LOG_SQRT_2PI, mean_of_steps
from embodied_rl.types import SimSpec


@dataclass(frozen=True)
class Record:
    """Data that `evaluate` needs of a decision beside its observation. One of the two parts is set."""

    chunk: Tensor
    """[B, K, A] the action: the first K steps and A dimensions of x at t = 0."""
    before: Tensor
    """flow_sde: [B, 1, H, D] x before the stochastic step. Others: [B, S, H, D] x before each step."""
    after: Tensor | None = None
    """flow_sde: [B, K, A] x after the stochastic step."""
    index: Tensor | None = None
    """flow_sde: [B] int64 which step was stochastic."""


@dataclass(frozen=True)
class RecordLayout:
    """A `Record` as one float32 row, so that it travels like any action. The action itself comes first.

    ``flow_sde``: [chunk K·A | before H·D | after K·A | index].  Others: [chunk K·A | before S·H·D].
    """

    chunk: tuple[int, int]
    """(K, A), the simulator's part of a chunk."""
    latent: tuple[int, int]
    """(H, D), the model's chunk: K <= H, A <= D."""
    num_steps: int
    one_step: bool
    """Whether one step is stochastic (flow_sde)."""

    @property
    def num_used(self) -> int:
        """Numbers of the simulator's part, K·A."""
        return self.chunk[0] * self.chunk[1]

    @property
    def num_latent(self) -> int:
        """Numbers of the model's chunk, H·D."""
        return self.latent[0] * self.latent[1]

    @property
    def width(self) -> int:
        """Numbers of a row, W."""
        if self.one_step:
            return 2 * self.num_used + self.num_latent + 1
        return self.num_used + self.num_steps * self.num_latent

    @property
    def noise_width(self) -> int:
        """Standard normal numbers per decision: the start, one for each stochastic step, and one for its index."""
        return 2 * self.num_latent + 1 if self.one_step else (1 + self.num_steps) * self.num_latent

    def used(self, x: Tensor) -> Tensor:
        """[B, ..., H, D] → [B, ..., K, A]: the simulator's part of a model's chunk."""
        return x[..., : self.chunk[0], : self.chunk[1]]

    def pack(self, record: Record) -> Tensor:
        """Pack a record into rows [B, W] float32."""
        parts = [record.chunk.flatten(1), record.before.flatten(1)]
        if self.one_step:
            assert record.after is not None
            assert record.index is not None
            parts += [record.after.flatten(1), record.index[:, None].to(record.chunk.dtype)]
        return torch.cat(parts, dim=1)

    def unpack(self, row: Tensor) -> Record:
        """Inverse of `pack`. Raises UserError if the rows have another width."""
        if row.dim() != 2 or row.shape[1] != self.width:
            raise UserError(
                f"A flow policy's recorded action has {self.width} numbers (the chunk and its denoising), got {list(row.shape)}. "
                "Was it recorded with another policy.method, policy.num_steps or chunk?"
            )
        rows, used, latent = len(row), self.num_used, self.num_latent
        chunk = row[:, :used].reshape(rows, *self.chunk)
        before = row[:, used : used + (1 if self.one_step else self.num_steps) * latent].reshape(rows, -1, *self.latent)
        if not self.one_step:
            return Record(chunk, before)
        after = row[:, used + latent : 2 * used + latent].reshape(rows, *self.chunk)
        return Record(chunk, before, after, row[:, -1].round().long())


# ---- from noise to actions in steps -----------------------------------------------------------------------------------

# Times run backward, as in pi0 (Black et al. 2024, arXiv:2410.24164): x_t = t·ε + (1 - t)·a, pure noise ε at t = 1, the action a at t = 0,
# and the velocity v(x, t) = E[ε - a | x_t = x]. Hence a's estimate x - t·v and the noise's x + (1 - t)·v.
#
# Shape legend: B rows, H steps of a chunk, D action dimensions. All functions are pure.


@dataclass(frozen=True)
class Transition:
    """Normal distribution of one stochastic denoising step."""

    mean: Tensor
    """Mean [B, H, D]."""
    std: Tensor
    """Standard deviation; broadcasts with `mean`."""

    def sample(self, noise: Tensor) -> Tensor:
        """Sample [B, H, D] from standard normal noise."""
        return self.mean + self.std * noise

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-probability [B, H, D] of each dimension."""
        z = (x - self.mean) / self.std
        return -0.5 * z * z - torch.log(self.std) - LOG_SQRT_2PI

    def entropy(self) -> Tensor:
        """Entropy [B, H, D] of each dimension."""
        return (torch.log(self.std) + 0.5 + LOG_SQRT_2PI).expand_as(self.mean)


def mix(action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t [B, H, D] between actions (t = 0) and noise (t = 1), times [B]."""
    share = _column(t)
    return share * noise + (1.0 - share) * action


def ode_step(x: Tensor, velocity: Tensor, delta: float) -> Tensor:
    """One Euler step from t to t - delta."""
    return x - velocity * delta


def sde_sigma(t: Tensor, delta: float, noise_level: float) -> Tensor:
    """σ(t) = λ·sqrt(t / (1 - t)) [B] (Flow-GRPO, Liu et al. 2025, arXiv:2505.05470).

    It is infinite at t = 1; there 1 - t is that of the grid's next time, t = 1 - delta.
    """
    return noise_level * torch.sqrt(t / (1.0 - t).clamp_min(delta))


def sde_step(x: Tensor, velocity: Tensor, t: Tensor, delta: float, noise_level: float) -> Transition:
    """Euler-Maruyama step from t to t - delta of the equation with noise σ(t) that preserves the flow's marginals.

    With the score ∇log p_t(x) = -(noise's estimate)/t:  mean = â(1 - (t - δ)) + ε̂(t - δ - σ²δ/(2t)),  std = σ·sqrt(δ).

    Args:
        x, velocity: [B, H, D]
        t: [B] in (0, 1].
        noise_level: λ; 0 is the ordinary equation (with std 0).
    """
    time = _column(t)
    sigma = _column(sde_sigma(t, delta, noise_level))
    action, noise = x - time * velocity, x + (1.0 - time) * velocity
    after = time - delta
    mean = action * (1.0 - after) + noise * (after - sigma**2 * delta / (2.0 * time))
    return Transition(mean, sigma * math.sqrt(delta))


def initial_log_prob(x: Tensor) -> Tensor:
    """[B, H, D] log-density of a chain's initial noise."""
    return -0.5 * x * x - LOG_SQRT_2PI


def step_time(index: Tensor, num_steps: int) -> Tensor:
    """Time [B] float32 at which denoising step `index` [B] (0 … S - 1) starts."""
    return 1.0 - index.to(torch.float32) / num_steps


def _column(t: Tensor) -> Tensor:
    return t[:, None, None]


Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, H, D], t [B]) → [B, H, D]"""


def log_density(velocity: Velocity, action: Tensor, *, num_steps: int = 32) -> Tensor:
    """log p(a) [B] of actions [B, H, D] = log N(x_1; 0, 1) + ∫₀¹ div v(x_t, t) dt, along dx/dt = v from x_0 = a.

    Runge-Kutta of fourth order with `num_steps` steps, in the action's own dtype, outside the caller's autograd graph.
    """
    x = action.detach().clone()
    total = x.new_zeros(len(x))
    h = 1.0 / num_steps
    for step in range(num_steps):
        t = step * h
        v1, d1 = _with_divergence(velocity, x, t)
        v2, d2 = _with_divergence(velocity, x + 0.5 * h * v1, t + 0.5 * h)
        v3, d3 = _with_divergence(velocity, x + 0.5 * h * v2, t + 0.5 * h)
        v4, d4 = _with_divergence(velocity, x + h * v3, t + h)
        x = x + h / 6.0 * (v1 + 2.0 * v2 + 2.0 * v3 + v4)
        total = total + h / 6.0 * (d1 + 2.0 * d2 + 2.0 * d3 + d4)
    return initial_log_prob(x).flatten(1).sum(-1) + total


def _with_divergence(velocity: Velocity, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """v [B, H, D] and Σ ∂v_i/∂x_i [B]. Rows are independent, so one backward pass per dimension serves all rows."""
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        v = velocity(place, place.new_full((len(place),), t))
        components = v.flatten(1)
        divergence = components.new_zeros(len(place))
        for index in range(components.shape[1]):
            last = index == components.shape[1] - 1
            (gradient,) = torch.autograd.grad(components[:, index].sum(), place, retain_graph=not last, materialize_grads=True)
            divergence = divergence + gradient.flatten(1)[:, index]
    return v.detach(), divergence.detach()


def flow_matching_loss(velocity: Velocity, action: Tensor, noise: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of (v(x_t, t) - (ε - a))² over each row's numbers [B], x_t = t·ε + (1 - t)·a.

    Args:
        action, noise: [B, H, D]
        t: [B]
        mask: [B, H] bool, steps that exist (a chunk may extend beyond the episode's end). A row without any has loss 0.
    """
    error = (velocity(mix(action, noise, t), t) - (noise - action)).square().mean(-1)
    return mean_of_steps(error, mask)


_FIXED_NOISE_SEED = 0


Context = TypeVar("Context")
"""Shared data of a decision's denoising steps: an encoding, a key-value cache."""


class VelocityModel(nn.Module, ABC, Generic[Context]):
    """Base of networks that predict the velocity of noise."""

    latent: tuple[int, int]
    """(H, D) of the chunk."""
    num_features: int
    """Number of features, F."""
    observation_keys: tuple[str, ...]

    @abstractmethod
    def context(self, observation: Mapping[str, Any]) -> Context:
        """Encode observations."""

    @abstractmethod
    def features(self, context: Context) -> Tensor:
        """Features [B, F] for the value and the learned deviation."""

    @abstractmethod
    def velocity(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """(x [B, H, D], t [B]) → [B, H, D]"""

    def update_statistics(self, observation: TensorObservation) -> None:
        """Add a rollout's observations to the normalisation statistics."""


class NoiseNet(nn.Module):
    """ReinFlow's learned deviation of each step and dimension, within bounds (Zhang et al. 2025, arXiv:2505.22094)."""

    def __init__(self, num_features: int, latent: tuple[int, int], min_std: float, max_std: float, hidden_size: int = 64) -> None:
        super().__init__()
        self.latent = latent
        self.low, self.high = math.log(min_std), math.log(max_std)
        self.hidden = nn.Linear(num_features + 1, hidden_size)
        self.output = nn.Linear(hidden_size, latent[0] * latent[1])
        # Starts in the middle of the bounds, on a logarithmic scale, for every state.
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, features: Tensor, t: Tensor) -> Tensor:
        """(features [B, F], t [B]) → deviations [B, H, D] in [min_std, max_std]."""
        raw = self.output(torch.tanh(self.hidden(torch.cat([features.float(), t[:, None]], dim=1))))
        share = 0.5 * (torch.tanh(raw) + 1.0)
        return torch.exp(self.low + share * (self.high - self.low)).view(-1, *self.latent)


_Step = tuple[Transition, Tensor]
"""One stochastic denoising step, and x [B, H, D] after it."""


class FlowPolicy(Policy, Generic[Context]):
    """Policy whose action is a row [B, W] of `RecordLayout`; the simulator gets the row's first part."""

    translates = True
    critics_train: tuple[str, ...] = ("model.trunk.",)
    noise_kind: Literal["normal"] = "normal"
    action_units: Literal["normalised", "simulator"] = "normalised"
    """Units of the result of `simulator_action`."""
    initial_noise: Tensor
    """[1, H, D] start of deterministic actions."""

    def __init__(
        self, model: VelocityModel[Context], critic: nn.Module, spec: SimSpec, options: FlowOptions, chunk: tuple[int, int]
    ) -> None:
        """
        Args:
            critic: features [B, F] → values [B].
            chunk: (K, A), the simulator's part.

        Raises UserError: the model's chunk is smaller than the simulator's.
        """
        super().__init__()
        self.spec, self.options = spec, options
        self.model = model
        self.critic = critic
        if chunk[0] > self.model.latent[0] or chunk[1] > self.model.latent[1]:
            raise UserError(
                f"Task '{spec.task}' takes chunks of {chunk[0]} steps x {chunk[1]} dimensions, but the flow model makes "
                f"{self.model.latent[0]} x {self.model.latent[1]}. Choose a shorter chunk or another checkpoint."
            )
        self.layout = RecordLayout(chunk, self.model.latent, options.num_steps, options.method == "flow_sde")
        self.noise_net: NoiseNet | None = None
        if options.method == "flow_noise":
            self.noise_net = NoiseNet(self.model.num_features, self.model.latent, options.min_std, options.max_std)
        # One fixed draw, not zeros: from zeros, a flow with two modes ends between them, where no demonstration was.
        generator = torch.Generator().manual_seed(_FIXED_NOISE_SEED)
        self.register_buffer("initial_noise", torch.randn(1, *self.model.latent, generator=generator))

    @property
    def chunk_size(self) -> int:
        return self.layout.chunk[0]

    @property
    def num_units(self) -> int:
        """Number of action units, L: K·A; for dppo S·K·A, step by step."""
        return self.layout.num_used * (self.options.num_steps if self.options.method == "dppo" else 1)

    @property
    def action_width(self) -> int:
        return self.layout.width

    @property
    def noise_width(self) -> int:
        return self.layout.noise_width

    @property
    def observation_keys(self) -> tuple[str, ...]:
        return self.model.observation_keys

    # ---- Policy ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], noise: Tensor | None) -> ActionOutput:
        """Denoise actions.
        `noise`: [B, noise_width] standard normal. None: the ordinary equation from one fixed draw, the same for every row.
        Returns recorded actions [B, W], their log-probabilities [B, L] and values [B]."""
        context = self.model.context(observation)
        features = self.model.features(context)
        if noise is not None and tuple(noise.shape) != (len(features), self.noise_width):
            raise UserError(f"This policy's noise must be [{len(features)}, {self.noise_width}], got {list(noise.shape)}.")
        record, steps = self._denoise(context, features, noise)
        log_prob, _ = self._score(record, steps)
        return ActionOutput(self.layout.pack(record), log_prob, self.critic(features))

    def evaluate(self, observation: Mapping[str, Any], action: Tensor) -> Evaluation:
        """Log-probabilities and entropies [B, L] of recorded actions [B, W], and values [B]; all with gradients."""
        record = self.layout.unpack(action)
        context = self.model.context(observation)
        features = self.model.features(context)
        log_prob, entropy = self._score(record, self._replay(context, features, record))
        return Evaluation(log_prob, entropy, self.critic(features))

    def value(self, observation: Mapping[str, Any]) -> Tensor:
        return self.critic(self.model.features(self.model.context(observation)))

    def update_statistics(self, observation: TensorObservation) -> None:
        self.model.update_statistics(observation)

    def simulator_action(self, action: Tensor | np.ndarray) -> np.ndarray:
        """Recorded actions [B, W] → chunks [B, K, A] float32, normalised and unclipped."""
        rows = numpy_of(action)
        return rows[:, : self.layout.num_used].reshape(len(rows), *self.layout.chunk).astype(np.float32)

    # ---- beside critics of actions --------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.model.num_features

    def features(self, observation: Mapping[str, Any]) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self.critics_train)):
            return self.model.features(self.model.context(observation))

    def state_value(self, features: Tensor) -> Tensor:
        return self.critic(features)

    def drawn(self, observation: Mapping[str, Any], features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Denoised chunks within the bounds, and the log-density of the denoising; gradients flow through every step."""
        context = self.model.context(observation)
        record, steps = self._denoise(context, self.model.features(context), noise)
        return self.bounded(record.chunk).flatten(1), self._score(record, steps)[0]

    def bounded(self, chunk: Tensor) -> Tensor:
        """Clip a chunk [B, K, A] to the simulator's bounds, normalised by them; with gradients."""
        return chunk.clamp(-1.0, 1.0)

    # ---- other uses -----------------------------------------------------------------------------------------------------

    def cloning_noise(self, num_rows: int) -> Tensor:
        """[B, H·D + 1]: standard normal noise of a chunk, and a uniform time in [0, 1]."""
        return torch.cat([torch.randn(num_rows, math.prod(self.layout.latent)), torch.rand(num_rows, 1)], 1)

    def cloning_loss(
        self, observation: Mapping[str, Any], action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Flow-matching loss [B] of recorded chunks; see `flow_matching_loss`.

        Args:
            action: [B, H, D'] normalised; missing dimensions are zero-padded, as in pi0.
            mask: [B, H] steps that exist.
            noise: from `cloning_noise`; None: drawn here.
        """
        context = self.model.context(observation)
        padded = nn.functional.pad(action, (0, self.layout.latent[1] - action.shape[-1]))
        noise = (self.cloning_noise(len(padded)) if noise is None else noise).to(padded)
        start, t = noise[:, :-1].reshape(padded.shape), noise[:, -1]
        return flow_matching_loss(lambda x, at: self.model.velocity(context, x, at), padded, start, t, mask)

    def log_density(self, observation: Mapping[str, Any], action: Tensor, *, num_steps: int = 32) -> Tensor:
        """[B] log-density of whole chunks [B, H, D] under the deterministic flow from random noise (`log_density`)."""
        with torch.no_grad():
            context = self.model.context(observation)
        return log_density(lambda x, t: self.model.velocity(context, x, t), action, num_steps=num_steps)

    # ---- denoising ------------------------------------------------------------------------------------------------------

    def _transition(self, features: Tensor, x: Tensor, velocity: Tensor, t: Tensor) -> Transition:
        options, delta = self.options, 1.0 / self.options.num_steps
        if self.noise_net is not None:
            return Transition(ode_step(x, velocity, delta), self.noise_net(features, t))
        step = sde_step(x, velocity, t, delta, options.noise_level)
        return Transition(step.mean, step.std.clamp_min(options.std_floor)) if options.method == "dppo" else step

    def _start(self, rows: int, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x at t = 1 [B, H, D], and the rest of the noise."""
        if noise is None:
            return self.initial_noise.expand(rows, -1, -1), None
        latent = self.layout.num_latent
        return noise[:, :latent].reshape(rows, *self.layout.latent), noise[:, latent:]

    def _denoise(self, context: Context, features: Tensor, noise: Tensor | None) -> tuple[Record, list[_Step]]:
        """Denoise with stochastic steps only; with flow_sde, with one random stochastic step per row."""
        rows, num_steps, latent = len(features), self.options.num_steps, self.layout.num_latent
        x, rest = self._start(rows, noise)
        index = torch.zeros(rows, dtype=torch.int64, device=x.device)
        if self.layout.one_step and rest is not None:
            # The distribution function turns a normal number into a uniform one, so the caller draws only one kind of noise.
            uniform = torch.special.ndtr(rest[:, -1].double())
            index = (uniform * num_steps).long().clamp(max=num_steps - 1)
        chain, steps = [x], []
        for step in range(num_steps):
            t = step_time(torch.full_like(index, step), num_steps)
            velocity = self.model.velocity(context, x, t)
            transition = self._transition(features, x, velocity, t)
            moved = ode_step(x, velocity, 1.0 / num_steps)
            if rest is not None:
                own = 0 if self.layout.one_step else step * latent
                drawn = transition.sample(rest[:, own : own + latent].reshape(x.shape))
                moved = torch.where((index == step)[:, None, None], drawn, moved) if self.layout.one_step else drawn
            chain.append(moved)
            steps.append((transition, moved))
            x = moved
        used = self.layout.used
        if not self.layout.one_step:
            return Record(used(x), torch.stack(chain[:-1], dim=1)), steps
        before, after, mean, std = (
            torch.stack(parts)[index, torch.arange(rows, device=x.device)]
            for parts in (chain[:-1], chain[1:], [step.mean for step, _ in steps], [step.std for step, _ in steps])
        )
        return Record(used(x), before[:, None], used(after), index), [(Transition(mean, std), after)]

    def _replay(self, context: Context, features: Tensor, record: Record) -> list[_Step]:
        """The stochastic steps of a record under the current weights."""
        before = record.before.unbind(1)
        afters = [*before[1:], record.chunk if record.after is None else record.after]
        steps = []
        for step, (x, after) in enumerate(zip(before, afters, strict=True)):
            index = torch.full((len(x),), step, device=x.device) if record.index is None else record.index
            t = step_time(index, self.options.num_steps)
            steps.append((self._transition(features, x, self.model.velocity(context, x, t), t), after))
        return steps

    def _score(self, record: Record, steps: list[_Step]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, L].

        They cover the simulator's dimensions. The other dimensions are denoised and noisy too, but their effect is ignored, as in RLinf's
        pi0; a model without other dimensions ignores nothing.
        """
        used = self.layout.used
        log_probs, entropies = [], []
        for transition, after in steps:
            part = Transition(used(transition.mean), used(transition.std.expand_as(transition.mean)))
            log_probs.append(part.log_prob(used(after)).flatten(1))
            entropies.append(part.entropy().flatten(1))
        if self.options.method == "dppo":
            return torch.cat(log_probs, dim=1), torch.cat(entropies, dim=1)
        log_prob, entropy = torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)
        if self.options.method == "flow_noise":
            # The start is part of the chain's density, but does not depend on the weights.
            log_prob = log_prob + initial_log_prob(used(record.before[:, 0])).flatten(1)
        return log_prob, entropy


# ---- A small flow-matching policy: a state, an image or both in, chunks of actions out --------------------------------

# Shape legend: B rows, H steps of a chunk, D action dimensions, F features.


class FlowNetwork(VelocityModel[Tensor]):
    """A multilayer perceptron over (x, features of t, features of the observation)."""

    frequencies: Tensor
    """[time_features / 2]"""

    def __init__(self, config: FlowPolicyConfig, spec: SimSpec) -> None:
        super().__init__()
        self.config = config
        self.latent = (config.chunk, spec.action.dim)
        self.observation_keys = config.reads
        self.normalizer: RunningNorm | None = None
        self.trunk: ImageTrunk | None = None
        size = 0
        if config.state_key is not None:
            size += vector_of(spec, config.state_key, "policy.state_key").shape[0]
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
            self.trunk = ImageTrunk(image_of(spec, config.image_key, "policy.image_key").shape, stack)
            size += self.trunk.num_features
        self.num_features = size
        # Periods from 4, which distinguishes the ends, down to 1/2: higher frequencies are too hard to interpolate between.
        half = config.time_features // 2
        self.register_buffer("frequencies", 0.5 * math.pi * 2.0 ** torch.linspace(0.0, 3.0, half), persistent=False)
        width = self.latent[0] * self.latent[1]
        self.layers = make_mlp(width + config.time_features + size, config.hidden_sizes, width, config.activation, output_gain=0.1)

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
        """Add states [..., state dim] to the running moments."""
        if self.normalizer is not None and self.config.state_key is not None:
            self.normalizer.update(observation[self.config.state_key].flatten(0, -2))


class Critic(nn.Module):
    """Features [B, F] → values [B]."""

    def __init__(self, num_features: int, config: FlowPolicyConfig) -> None:
        super().__init__()
        self.layers = make_mlp(num_features, config.hidden_sizes, 1, config.activation, output_gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(-1)


def build_flow(config: FlowPolicyConfig, spec: SimSpec) -> FlowPolicy[Tensor]:
    """Build the small flow policy for a simulator; weights come from torch's global generator, so seed it first.
    Raises UserError: actions are not continuous, or the simulator lacks an observation."""
    if spec.action.kind != "continuous":
        raise UserError(f"A flow policy makes continuous actions, but task '{spec.task}' takes {spec.action.kind} ones. Use policy=mlp.")
    network = FlowNetwork(config, spec)
    return FlowPolicy(network, Critic(network.num_features, config), spec, config, network.latent)
