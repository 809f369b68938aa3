"""Policies. A policy says what it reads, acts, and gives the log-probabilities of recorded actions again."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied_rl.bounds import Bounds
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation, vector_of
from embodied_rl.policies.heads import Categorical, DiagonalGaussian
from embodied_rl.types import SimSpec


class FourierPolicy(Policy):
    """Actor and critic that are linear in random Fourier features of a vector (Rahimi and Recht 2007)."""

    def __init__(
        self,
        spec: SimSpec,
        *,
        key: str = "state",
        num_features: Annotated[int, Bounds(1, 100_000)] = 128,
        scale: Annotated[float, Bounds(0.001, 1000.0)] = 0.5,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._key = key
        size = vector_of(spec, key, "policy.options.key").shape[0]
        # Buffers are saved with the weights and are not trained.
        self.register_buffer("frequency", scale * torch.randn(size, num_features))
        self.register_buffer("phase", 2 * math.pi * torch.rand(num_features))
        discrete = spec.action.kind == "discrete"
        self.head = Categorical(spec.action.num_actions) if discrete else DiagonalGaussian(spec.action.dim, -0.5)
        self.actor = nn.Linear(num_features, self.head.num_outputs)
        self.critic = nn.Linear(num_features, 1)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        return (self._key,)

    def _features(self, observation: TensorObservation) -> Tensor:
        return torch.cos(observation[self._key].float() @ self.frequency + self.phase)

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        return ActionOutput(*self.head.sample(self.actor(self._features(observation)), noise))

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        features = self._features(observation)
        outputs = self.actor(features)
        return Evaluation(self.head.log_prob(outputs, action), self.head.entropy(outputs), self.critic(features).squeeze(-1))

    def value(self, observation: TensorObservation) -> Tensor:
        return self.critic(self._features(observation)).squeeze(-1)
