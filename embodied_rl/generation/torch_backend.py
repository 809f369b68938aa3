"""Acting with a torch policy in this process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, QueuedGenerator
from embodied_rl.generation.random_backend import WrappedGenerator
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import ActionOutput, Policy, given_action, prepare_observation
from embodied_rl.policies.heads import LOG_SQRT_2PI, DiagonalGaussian
from embodied_rl.types import ActionLayout, Observation


class TorchGenerator(QueuedGenerator):
    """Acts with the weights that the policy had at the last `publish`.

    `send` acts at once. numpy runs a Gaussian MLP on the CPU, because its calls cost a fraction of torch's, and with few rows the call
    dominates. Values are not computed here; the learner computes them in one batch.
    """

    has_values = True

    def __init__(self, policy: Policy, actor: HostActors | None = None) -> None:
        """`actor`: acting module; None: chosen to suit the policy."""
        super().__init__()
        self._policy = policy
        self._actor: NumpyGaussianActor | ModuleActor | HostActors
        self._actor = actor or (NumpyGaussianActor(policy) if NumpyGaussianActor.supports(policy) else ModuleActor(policy))
        self.shares_weights = policy in self._actor.modules

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self.give(slots, *self._actor.act(observation, noise))

    def give(self, slots: np.ndarray, action: np.ndarray, log_prob: np.ndarray) -> None:
        """Add actions of these slots to the results of `recv`."""
        given = given_action(self._policy, action) if self._policy.translates else None
        self._acted.append(ActedBatch(slots.copy(), action, log_prob, self.version, given))

    def act_in_parts(self, slots: np.ndarray, observation: Observation, noise: np.ndarray, parts: Sequence[slice]) -> ActedBatch:
        """See `Generator.act_in_parts`. numpy runs all rows at once except for products, whose bits depend on the number of rows."""
        if not isinstance(self._actor, NumpyGaussianActor):
            return super().act_in_parts(slots, observation, noise, parts)
        action, log_prob = self._actor.act(observation, noise, parts)
        return ActedBatch(slots.copy(), action, log_prob, self.version)

    @torch.inference_mode()
    def value(self, observation: Observation) -> np.ndarray:
        """State values [n] float32 from the policy's current weights, for recording; training computes its own."""
        device = next(self._policy.parameters()).device
        tensors = {key: part.to(device) for key, part in prepare_observation(self._policy, observation).items()}
        return self._policy.value(tensors).cpu().numpy()

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[ActionLayout]:
        """Act at another temperature inside the block, with noise of the yielded layout. Training uses the policy's own temperature.
        Raises UserError: the policy does not draw tokens."""
        modules = [module for module in self._actor.modules if module.temperature is not None]
        if not modules:
            raise UserError(
                "A temperature of evaluation needs a policy of action tokens (tiny_vla, openvla, openvla_oft), not "
                f"{type(self._policy).__name__}: set it to null (0 in embodied_rl.evaluate)."
            )
        own = modules[0].temperature
        for module in modules:
            module.temperature = temperature
        try:
            yield self._policy.action_layout
        finally:
            for module in modules:
                module.temperature = own

    def publish(self, version: int) -> None:
        self._actor.refresh(self._policy)  # type: ignore[arg-type]
        self.version = version


class ModuleActor:
    """Acts with any policy through a copy of the module, refreshed from the original. With more than `SHARED_FROM` parameters it uses the
    original: that one acts and trains in turns, so it has the published weights whenever it acts.

    A copy acts on the training device, except for policies of vectors only: those act on the CPU, where a call is cheaper than on a GPU.
    """

    SHARED_FROM = 100_000_000

    def __init__(self, policy: Policy) -> None:
        is_large = sum(parameter.numel() for parameter in policy.parameters()) > self.SHARED_FROM
        self.module = policy if is_large else copy.deepcopy(policy)
        self.modules = [self.module]

    def refresh(self, policy: Policy) -> None:
        if self.module is policy:
            return
        if policy.work != "vectors":
            self.module.to(next(policy.parameters()).device)
        self.module.load_state_dict(policy.state_dict())

    def act(self, observation: Observation, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        return _fetched(_begun(self.module, observation, noise))


class HostActors:
    """Copies of the policy on each host's device, dropped while training has the host. The policy itself does not act."""

    def __init__(self, policy: Policy, devices: Sequence[str]) -> None:
        """`devices`: device of each host."""
        self._policy, self._devices = policy, devices
        self._on: dict[int, Policy] = {}
        self.take_back(range(len(devices)))

    @property
    def modules(self) -> Sequence[Policy]:
        return list(self._on.values())

    def lend(self, hosts: Iterable[int]) -> None:
        """Free the memory of these hosts' copies."""
        dropped = [weakref.ref(self._on.pop(number)) for number in hosts if number in self._on]
        if any(copy_of() is not None for copy_of in dropped):
            gc.collect()  # OpenVLA's policies refer to themselves
        torch.cuda.empty_cache()

    def take_back(self, hosts: Iterable[int]) -> None:
        """Act on these hosts again, with the policy's current weights."""
        for number in hosts:
            # Copy each tensor directly to the device of the copy.
            there: dict[int, Any] = {id(part): part.detach().to(self._devices[number], copy=True) for part in self._policy.buffers()}
            for part in self._policy.parameters():
                there[id(part)] = nn.Parameter(part.detach().to(self._devices[number], copy=True), part.requires_grad)
            self._on[number] = copy.deepcopy(self._policy, there)

    def refresh(self, policy: Policy) -> None:
        for module in self.modules:
            module.load_state_dict(policy.state_dict())
            policy = module  # GPUs copy weights from each other

    def act(self, observation: Observation, noise: np.ndarray | None, hosts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Act for all rows. `hosts` [n]: host whose copy acts for each row; None: equal shares."""
        if hosts is None:
            num_rows = len(next(iter(observation.values())))
            hosts = np.array(list(self._on))[np.arange(num_rows) * len(self._on) // num_rows]
        rows = {number: np.flatnonzero(hosts == number) for number in np.unique(hosts).tolist()}
        begun = [
            _begun(self._on[number], {key: part[own] for key, part in observation.items()}, None if noise is None else noise[own])
            for number, own in rows.items()
        ]
        # Start all copies before waiting for one.
        action, log_prob = zip(*map(_fetched, begun), strict=True)
        order = np.argsort(np.concatenate(list(rows.values())))
        return np.concatenate(action)[order], np.concatenate(log_prob)[order]


class HostedGenerator(WrappedGenerator):
    """Acts for slots on several hosts, each on its host's device."""

    def __init__(self, generator: TorchGenerator, actors: HostActors, hosts_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """`actors`: the generator's actors; `hosts_of`: function from slots [n] to host numbers [n]."""
        super().__init__(generator)
        self._torch, self._actors, self._hosts_of = generator, actors, hosts_of

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._torch.give(slots, *self._actors.act(observation, noise, self._hosts_of(slots)))


@torch.inference_mode()
def _begun(module: Policy, observation: Observation, noise: np.ndarray | None) -> ActionOutput:
    """Start acting without waiting: on a GPU the output may still be in flight."""
    of = next(module.parameters())
    with torch.cuda.device_of(of):  # for the device's own kernels and graphs
        tensors = {key: part.to(of.device) for key, part in prepare_observation(module, observation).items()}
        return module.act(tensors, None if noise is None else torch.from_numpy(noise).to(of.device))


def _fetched(output: ActionOutput) -> tuple[np.ndarray, np.ndarray]:
    return output.action.cpu().numpy(), output.log_prob.cpu().numpy()


class NumpyGaussianActor:
    """Actor of a Gaussian MLP policy, with copies of its weights."""

    modules: Sequence[Policy] = ()
    """Empty: it acts without a module."""

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
        # Copies in layout [in, out]: a product of few rows reads them in order.
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
        """Actions [n, A] and log-probabilities [n, A], float32 in fresh memory; matrix products run separately for each part."""
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
        # From the rounded action, not the noise: `Policy.evaluate` sees only the action.
        z = np.subtract(action, mean, out=mean)
        z *= self._inverse_std
        z *= z
        z *= np.float32(-0.5)
        z += self._log_prob_of_mode
        return action, z


def _on_host(tensor: Tensor) -> np.ndarray:
    """Copy a parameter, which may be on another device, to the host."""
    return tensor.detach().cpu().numpy()


def _product(x: np.ndarray, weight: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
    """Multiply [n, D] by [D, H], part by part."""
    if len(parts) == 1:
        return x.dot(weight)
    product = np.empty((len(x), weight.shape[1]), x.dtype)
    for part in parts:
        np.dot(x[part], weight, out=product[part])
    return product
