"""Flow policies on the interface of `embodied_rl.policies.base`: actions by denoising, log-probabilities of the denoising that was done.

The density of a flow's action has no cheap form, but that of a *stochastic* denoising step is a normal's. What was sampled on the way is
therefore kept with the action (`RecordLayout`), and `evaluate` scores it again under the present weights.

Shape legend: B rows, K steps and A dimensions that the simulator gets, H >= K and D >= A those of the model, S denoising steps,
W numbers of a recorded action, L action units.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation
from embodied_rl.policies.flow.options import FlowOptions, Record, RecordLayout
from embodied_rl.policies.flow.schedule import Transition, flow_matching_loss, initial_log_prob, log_density, ode_step, sde_step, step_time
from embodied_rl.types import SimSpec

_FIXED_NOISE_SEED = 0


Context = TypeVar("Context")
"""What all denoising steps of a decision share: an encoding, a key-value cache."""


class VelocityModel(nn.Module, ABC, Generic[Context]):
    """A network that says where noise moves."""

    latent: tuple[int, int]
    """(H, D)"""
    num_features: int
    """F"""
    observation_keys: tuple[str, ...]

    @property
    def convolutions(self) -> nn.Module | None:
        """Where it has some: learners choose their threads by them."""
        return None

    @abstractmethod
    def context(self, observation: Mapping[str, Any]) -> Context:
        """Of observations."""

    @abstractmethod
    def features(self, context: Context) -> Tensor:
        """[B, F] for the value and the learned deviation."""

    @abstractmethod
    def velocity(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """(x [B, H, D], t [B]) → [B, H, D]"""

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold a rollout's observations into the normalisation."""


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


@dataclass(frozen=True)
class _Step:
    """One stochastic denoising step, as it was taken."""

    transition: Transition
    after: Tensor
    """[B, H, D]"""


class FlowPolicy(Policy, Generic[Context]):
    """An action is a row [B, W] of `RecordLayout`; the simulator gets its head."""

    translates = True
    critics_train = ("model.trunk.",)
    noise_kind: Literal["normal"] = "normal"
    action_units: Literal["normalised", "simulator"] = "normalised"
    """Of what `simulator_action` gives."""
    initial_noise: Tensor
    """[1, H, D] what deterministic actions start from."""

    def __init__(
        self, model: VelocityModel[Context], critic: nn.Module, spec: SimSpec, options: FlowOptions, chunk: tuple[int, int]
    ) -> None:
        """
        Args:
            critic: features [B, F] → values [B].
            chunk: (K, A) of what the simulator gets.

        Raises:
            UserError: the model's chunk is smaller than what the simulator needs.
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
        # One fixed draw, not zeros: from zeros, a flow of two modes ends between them, where no demonstration was.
        generator = torch.Generator().manual_seed(_FIXED_NOISE_SEED)
        self.register_buffer("initial_noise", torch.randn(1, *self.model.latent, generator=generator))

    @property
    def trunk(self) -> nn.Module | None:
        return self.model.convolutions

    @property
    def chunk_size(self) -> int:
        """K"""
        return self.layout.chunk[0]

    @property
    def num_units(self) -> int:
        """L: K·A; for dppo S·K·A, step by step."""
        return self.layout.num_used * (self.options.num_steps if self.options.method == "dppo" else 1)

    @property
    def action_width(self) -> int:
        """W"""
        return self.layout.width

    @property
    def noise_width(self) -> int:
        """Standard normal numbers that `act` takes for a row."""
        return self.layout.noise_width

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The parts of an observation that the policy reads."""
        return self.model.observation_keys

    # ---- Policy ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], noise: Tensor | None) -> ActionOutput:
        """Denoise actions.

        Args:
            noise: [B, noise_width] standard normal. None: the ordinary equation from one fixed draw, for every row the same.

        Returns:
            Recorded actions [B, W], their log-probabilities [B, L] and values [B].
        """
        context = self.model.context(observation)
        features = self.model.features(context)
        if noise is not None and tuple(noise.shape) != (len(features), self.noise_width):
            raise UserError(f"This policy's noise must be [{len(features)}, {self.noise_width}], got {list(noise.shape)}.")
        denoise = self._denoise_one if self.layout.one_step else self._denoise_all
        record, steps = denoise(context, features, noise)
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
        rows = action.detach().cpu().numpy() if isinstance(action, Tensor) else action
        return rows[:, : self.layout.num_used].reshape(len(rows), *self.layout.chunk).astype(np.float32)

    # ---- beside critics of actions --------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.model.num_features

    def features(self, observation: Mapping[str, Any]) -> Tensor:
        return self.model.features(self.model.context(observation))

    def state_value(self, features: Tensor) -> Tensor:
        return self.critic(features)

    def drawn(self, observation: Mapping[str, Any], features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Denoised chunks within the bounds, and the log-density of the denoising: gradients run back through every step of it."""
        context = self.model.context(observation)
        record, steps = (self._denoise_one if self.layout.one_step else self._denoise_all)(context, self.model.features(context), noise)
        return record.chunk.flatten(1).clamp(-1.0, 1.0), self._score(record, steps)[0]

    # ---- other uses -----------------------------------------------------------------------------------------------------

    def cloning_loss(
        self,
        observation: Mapping[str, Any],
        action: Tensor,
        mask: Tensor | None = None,
        *,
        noise: Tensor | None = None,
        t: Tensor | None = None,
    ) -> Tensor:
        """Flow-matching loss [B] of recorded chunks; see `schedule.flow_matching_loss`.

        Args:
            action: [B, H, D'] normalised; dimensions that are missing are filled up with zeros, as pi0 has it.
            noise: [B, H, D] standard normal; None: from torch's global generator.
            t: [B] times, of `schedule.sample_times`; None: uniform ones, from the same.
            mask: [B, H] steps that exist.
        """
        context = self.model.context(observation)
        padded = nn.functional.pad(action, (0, self.layout.latent[1] - action.shape[-1]))
        noise = torch.randn_like(padded) if noise is None else noise
        t = torch.rand(len(padded), device=padded.device) if t is None else t
        return flow_matching_loss(lambda x, at: self.model.velocity(context, x, at), padded, noise, t, mask)

    def log_density(self, observation: Mapping[str, Any], action: Tensor, *, num_steps: int = 32) -> Tensor:
        """[B] log-density of whole chunks [B, H, D] under the deterministic flow from random noise (`density.log_density`)."""
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

    def _denoise_one(self, context: Context, features: Tensor, noise: Tensor | None) -> tuple[Record, list[_Step]]:
        """One random stochastic step for each row, the others ordinary."""
        rows, num_steps = len(features), self.options.num_steps
        x, rest = self._start(rows, noise)
        index = torch.zeros(rows, dtype=torch.int64, device=x.device)
        if rest is not None:
            # A normal number through its distribution function is uniform: the caller draws one kind of noise only.
            uniform = torch.special.ndtr(rest[:, -1].double())
            index = (uniform * num_steps).long().clamp(max=num_steps - 1)
        before, after = torch.zeros_like(x), torch.zeros_like(x)
        mean, std = torch.zeros_like(x), x.new_ones(rows, 1, 1)
        for step in range(num_steps):
            t = step_time(torch.full_like(index, step), num_steps)
            velocity = self.model.velocity(context, x, t)
            transition = self._transition(features, x, velocity, t)
            chosen = (index == step)[:, None, None]
            moved = ode_step(x, velocity, 1.0 / num_steps)
            if rest is not None:
                moved = torch.where(chosen, transition.sample(rest[:, :-1].reshape(x.shape)), moved)
            before, after = torch.where(chosen, x, before), torch.where(chosen, moved, after)
            mean, std = torch.where(chosen, transition.mean, mean), torch.where(chosen, transition.std, std)
            x = moved
        used = self.layout.used
        return Record(used(x), before[:, None], used(after), index), [_Step(Transition(mean, std), after)]

    def _denoise_all(self, context: Context, features: Tensor, noise: Tensor | None) -> tuple[Record, list[_Step]]:
        """Every step stochastic."""
        rows, num_steps = len(features), self.options.num_steps
        x, rest = self._start(rows, noise)
        chain, steps = [], []
        for step in range(num_steps):
            t = step_time(torch.full((rows,), step, device=x.device), num_steps)
            velocity = self.model.velocity(context, x, t)
            transition = self._transition(features, x, velocity, t)
            if rest is None:
                moved = ode_step(x, velocity, 1.0 / num_steps)
            else:
                latent = self.layout.num_latent
                moved = transition.sample(rest[:, step * latent : (step + 1) * latent].reshape(x.shape))
            chain.append(x)
            steps.append(_Step(transition, moved))
            x = moved
        return Record(self.layout.used(x), torch.stack(chain, dim=1)), steps

    def _replay(self, context: Context, features: Tensor, record: Record) -> list[_Step]:
        """The stochastic steps of a record under the present weights."""
        num_steps = self.options.num_steps
        if record.index is not None:
            assert record.after is not None
            t = step_time(record.index, num_steps)
            x = record.before[:, 0]
            return [_Step(self._transition(features, x, self.model.velocity(context, x, t), t), record.after)]
        steps = []
        for step in range(num_steps):
            x = record.before[:, step]
            t = step_time(torch.full((len(x),), step, device=x.device), num_steps)
            after = record.before[:, step + 1] if step + 1 < num_steps else record.chunk
            steps.append(_Step(self._transition(features, x, self.model.velocity(context, x, t), t), after))
        return steps

    def _score(self, record: Record, steps: list[_Step]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, L].

        Of the dimensions that the simulator gets: the others are denoised and noisy too, but what they cause is left out, as in
        RLinf's pi0. Where the model has no others, nothing is left out.
        """
        used = self.layout.used
        log_probs, entropies = [], []
        for step in steps:
            mean = step.transition.mean
            part = Transition(used(mean), used(step.transition.std.expand_as(mean)))
            log_probs.append(part.log_prob(used(step.after)).flatten(1))
            entropies.append(part.entropy().flatten(1))
        if self.options.method == "dppo":
            return torch.cat(log_probs, dim=1), torch.cat(entropies, dim=1)
        log_prob, entropy = torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)
        if self.options.method == "flow_noise":
            # The start is part of the chain's density; it does not depend on the weights.
            log_prob = log_prob + initial_log_prob(used(record.before[:, 0])).flatten(1)
        return log_prob, entropy
