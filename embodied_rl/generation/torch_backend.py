"""Acting with a torch policy in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, QueuedGenerator
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import Policy, given_action, prepare_observation
from embodied_rl.policies.heads import LOG_SQRT_2PI, DiagonalGaussian
from embodied_rl.types import ActionLayout, Observation


class TorchGenerator(QueuedGenerator):
    """Acts with the weights that the policy had at the last `publish`.

    `send` acts at once. A Gaussian MLP on the CPU is run by numpy, whose calls cost a fraction of torch's: with a few rows
    at a time the cost of a call is all there is. Values are not computed here; the learner does it in one batch.
    """

    has_values = True

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._actor: NumpyGaussianActor | ModuleActor
        self._actor = NumpyGaussianActor(policy) if NumpyGaussianActor.supports(policy) else ModuleActor(policy)
        self.shares_weights = self._actor.module is policy

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        action, log_prob = self._actor.act(observation, noise)
        given = given_action(self._policy, action) if self._policy.translates else None
        self._acted.append(ActedBatch(slots.copy(), action, log_prob, self.version, given))

    def act_in_parts(self, slots: np.ndarray, observation: Observation, noise: np.ndarray, parts: Sequence[slice]) -> ActedBatch:
        """See `Generator.act_in_parts`. numpy's takes all rows at once, but for its products: their bits depend on their number."""
        if not isinstance(self._actor, NumpyGaussianActor):
            return super().act_in_parts(slots, observation, noise, parts)
        action, log_prob = self._actor.act(observation, noise, parts)
        return ActedBatch(slots.copy(), action, log_prob, self.version)

    @torch.inference_mode()
    def value(self, observation: Observation) -> np.ndarray:
        """State values [n] float32 by the policy's present weights, for recording; training computes its own."""
        device = next(self._policy.parameters()).device
        tensors = {key: part.to(device) for key, part in prepare_observation(self._policy, observation).items()}
        return self._policy.value(tensors).cpu().numpy()

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[ActionLayout]:
        """Act at another temperature for as long, with noise as the layout that is given says. Training's is the policy's own.

        Raises UserError: the policy does not draw tokens.
        """
        module = self._actor.module
        if module is None or module.temperature is None:
            raise UserError(
                "A temperature of evaluation needs a policy of action tokens (tiny_vla, openvla, openvla_oft), not "
                f"{type(self._policy).__name__}: set it null (0 at embodied_rl.evaluate)."
            )
        own, module.temperature = module.temperature, temperature
        try:
            yield self._policy.action_layout
        finally:
            module.temperature = own

    def publish(self, version: int) -> None:
        """Copy the policy's present weights and statistics."""
        self._actor.refresh(self._policy)  # type: ignore[arg-type]
        self.version = version


class ModuleActor:
    """Any policy: a copy of the module, refreshed from the original. One of more than `SHARED_FROM` parameters is the original itself:
    it acts and is trained in turns, so that its weights are those of the last publication whenever it acts.

    A copy acts where the original is trained, but for one that reads vectors only: on the host, where a call costs less than a GPU's.
    """

    SHARED_FROM = 100_000_000

    def __init__(self, policy: Policy) -> None:
        is_large = sum(parameter.numel() for parameter in policy.parameters()) > self.SHARED_FROM
        self.module = policy if is_large else copy.deepcopy(policy)

    def refresh(self, policy: Policy) -> None:
        if self.module is policy:
            return
        if policy.work != "vectors":
            self.module.to(next(policy.parameters()).device)
        self.module.load_state_dict(policy.state_dict())

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.inference_mode()
    def act(self, observation: Observation, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        tensors = {key: part.to(self._device) for key, part in prepare_observation(self.module, observation).items()}
        output = self.module.act(tensors, None if noise is None else torch.from_numpy(noise).to(self._device))
        return output.action.cpu().numpy(), output.log_prob.cpu().numpy()


class NumpyGaussianActor:
    """The actor of a Gaussian MLP policy, out of copies of its weights."""

    module: None = None
    """It acts without one."""

    def __init__(self, policy: ActorCritic) -> None:
        self._key = policy.config.observation_key
        self._activation = policy.config.activation
        self.refresh(policy)

    @staticmethod
    def supports(policy: Policy) -> TypeGuard[ActorCritic]:
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in policy.parameters())
        return type(policy) is ActorCritic and on_cpu and policy.trunk is None and type(policy.head) is DiagonalGaussian

    def refresh(self, policy: ActorCritic) -> None:
        assert isinstance(policy.head, DiagonalGaussian)
        layers = [layer for layer in policy.actor if isinstance(layer, nn.Linear)]
        # Copies, laid out [in, out]: a product of few rows reads them in order.
        weights = [np.array(_on_host(layer.weight).T, order="C") for layer in layers]
        biases = [_on_host(layer.bias).copy() for layer in layers]
        self._hidden = list(zip(weights[:-1], biases[:-1], strict=True))
        self._output_weight, self._output_bias = weights[-1], biases[-1]
        log_std = _on_host(policy.head.log_std)
        self._std, self._inverse_std = np.exp(log_std), np.exp(-log_std)
        self._log_prob_of_mode = -log_std - np.float32(LOG_SQRT_2PI)
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        if policy.normalizer is not None:
            mean, inverse_std = policy.normalizer.scale()
            self._scale = _on_host(mean).copy(), _on_host(inverse_std).copy()
            self._clip = np.float32(policy.normalizer.clip)

    def act(
        self, observation: Observation, noise: np.ndarray | None, parts: Sequence[slice] = (slice(None),)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions [n, A] and log-probabilities [n, A], both float32 and in fresh memory; products are those of each of the `parts`."""
        x = observation[self._key]
        if x.dtype != np.float32:
            x = x.astype(np.float32)
        if self._scale is not None:
            x = x - self._scale[0]
            x *= self._scale[1]
            np.minimum(x, self._clip, out=x)
            np.maximum(x, -self._clip, out=x)
        for weight, bias in self._hidden:
            x = _product(x, weight, parts)
            x += bias
            if self._activation == "tanh":
                np.tanh(x, out=x)
            elif self._activation == "relu":
                np.maximum(x, 0.0, out=x)
            else:
                x = np.expm1(np.minimum(x, 0.0)) + np.maximum(x, 0.0)
        mean = _product(x, self._output_weight, parts)
        mean += self._output_bias
        if noise is None:
            return mean, np.broadcast_to(self._log_prob_of_mode, mean.shape).copy()
        action = noise * self._std
        action += mean
        # Of the rounded action, not of the noise: `Policy.evaluate` sees only the action.
        z = np.subtract(action, mean, out=mean)
        z *= self._inverse_std
        z *= z
        z *= np.float32(-0.5)
        z += self._log_prob_of_mode
        return action, z


def _on_host(tensor: Tensor) -> np.ndarray:
    """Of a parameter, which may be trained on another device."""
    return tensor.detach().cpu().numpy()


def _product(x: np.ndarray, weight: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
    """[n, D] times [D, H], part by part."""
    if len(parts) == 1:
        return x.dot(weight)
    product = np.empty((len(x), weight.shape[1]), x.dtype)
    for part in parts:
        np.dot(x[part], weight, out=product[part])
    return product
