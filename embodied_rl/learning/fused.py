"""PPO's update of a small Gaussian MLP actor-critic on a CPU, with gradients derived by hand.

For networks of this size autograd spends more time on bookkeeping than on arithmetic. Here every operation writes into a
buffer that was allocated once, all parameters of both networks lie in one flat vector (torch's parameters become views of it),
and Adam is one pass over that vector. The mathematics is that of `objectives.RolloutObjective`; a test holds the two together.

Shapes: n rows of a minibatch, A action dimensions, D inputs; weights [out, in] as torch keeps them.
"""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.batch import Batch, Rows
from embodied_rl.algorithms.kl import K3_SLOPE
from embodied_rl.algorithms.ratios import MAX_LOG_RATIO
from embodied_rl.config import AlgorithmConfig
from embodied_rl.learning.executors import Executor, Figures, is_finite
from embodied_rl.learning.kernels import adam_kernel, gaussian_ppo_kernel, value_kernel
from embodied_rl.learning.objectives import Objective
from embodied_rl.learning.optimizer import BETAS
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.heads import LOG_SQRT_2PI, DiagonalGaussian


class FlatParameters:
    """All parameters of a policy in one vector, with their gradients and Adam's moments beside them.

    The torch parameters are made views of the vector, so that both sides always see the same numbers.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.parameters = dict(policy.named_parameters())
        size = sum(p.numel() for p in self.parameters.values())
        self.value, self.gradient, self.exp_avg, self.exp_avg_sq = (np.zeros(size, np.float32) for _ in range(4))
        self.step = 0
        self._places: dict[str, slice] = {}
        start = 0
        for name, parameter in self.parameters.items():
            self._places[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
        self.tie()

    def tie(self) -> None:
        """Make the torch parameters views of the vector, where something (a `.to()`, an assignment) has untied them."""
        for name, parameter in self.parameters.items():
            here = self.view(self.value, name)
            if parameter.data_ptr() != here.ctypes.data:
                here[...] = parameter.detach().cpu().numpy()
                parameter.data = torch.from_numpy(here)

    def view(self, vector: np.ndarray, name: str) -> np.ndarray:
        return vector[self._places[name]].reshape(tuple(self.parameters[name].shape))

    def adam(self, learning_rate: float, scale: float, eps: float) -> None:
        """One Adam step with the gradients times `scale`."""
        self.step += 1
        beta1, beta2 = BETAS
        scalars = (
            scale,
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            learning_rate / (1.0 - beta1**self.step),
            1.0 / math.sqrt(1.0 - beta2**self.step),
            eps,
        )
        adam_kernel(self.value, self.gradient, self.exp_avg, self.exp_avg_sq, *map(np.float32, scalars))


class FusedMlp:
    """Forward and backward of one `nn.Sequential` of linear layers and activations; rows are at most `max_rows`."""

    def __init__(self, flat: FlatParameters, network: nn.Sequential, prefix: str, activation: str) -> None:
        self.activation = activation
        names = [f"{prefix}.{index}" for index, layer in enumerate(network) if isinstance(layer, nn.Linear)]
        self.weights = [flat.view(flat.value, f"{name}.weight") for name in names]
        self.biases = [flat.view(flat.value, f"{name}.bias") for name in names]
        self.weight_gradients = [flat.view(flat.gradient, f"{name}.weight") for name in names]
        self.bias_gradients = [flat.view(flat.gradient, f"{name}.bias") for name in names]
        self._max_rows = 0
        self._inputs: list[np.ndarray] = []

    def reserve(self, max_rows: int) -> None:
        """Allocate the buffers of minibatches of up to `max_rows` rows."""
        if max_rows <= self._max_rows:
            return
        self._max_rows = max_rows
        widths = [weight.shape[0] for weight in self.weights]
        self._outputs = [np.empty((max_rows, width), np.float32) for width in widths]
        self._deltas = [np.empty((max_rows, width), np.float32) for width in widths]
        self._slopes = [np.empty((max_rows, width), np.float32) for width in widths[:-1]]
        self._ones = np.ones(max_rows, np.float32)

    def output_gradient(self, num_rows: int) -> np.ndarray:
        """The buffer [n, outputs] for what `backward` takes."""
        return self._deltas[-1][:num_rows]

    def predict(self, x: np.ndarray) -> np.ndarray:
        """[B, D] → [B, outputs] in fresh memory; keeps nothing for `backward`."""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = np.dot(x, weight.T)
            x += bias
            if layer < last:
                _activate(self.activation, x, np.empty_like(x) if self.activation == "elu" else x)
        return x

    def forward(self, x: np.ndarray) -> np.ndarray:
        """[n, D] → [n, outputs], a buffer that the next forward overwrites."""
        n = x.shape[0]
        self._inputs = [x]
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = self._outputs[layer][:n]
            np.dot(x, weight.T, out=out)
            out += bias
            if layer < last:
                _activate(self.activation, out, self._slopes[layer][:n])
                self._inputs.append(out)
            x = out
        return x

    def backward(self, delta: np.ndarray) -> None:
        """Write the parameters' gradients, given that of the outputs [n, outputs] of the last `forward`."""
        n = delta.shape[0]
        ones = self._ones[:n]
        for layer in range(len(self.weights) - 1, -1, -1):
            x = self._inputs[layer]
            np.dot(delta.T, x, out=self.weight_gradients[layer])
            np.dot(ones, delta, out=self.bias_gradients[layer])
            if layer == 0:
                return
            behind = self._deltas[layer - 1][:n]
            np.dot(delta, self.weights[layer], out=behind)
            slope = self._slopes[layer - 1][:n]
            _slope(self.activation, x, slope)
            behind *= slope
            delta = behind


class Faster:
    """Which of two ways to do the same is faster: each is tried in turn, and the one with the lower median is kept for a while."""

    def __init__(self, num_tries: int = 8, keep_for: int = 4000) -> None:
        """
        Args:
            num_tries: of each way; one more before them is not counted.
            keep_for: times that the faster is used before both are tried again: what else the machine does changes.
        """
        self._num_tries, self._keep_for = num_tries, keep_for
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._kept = 0
        self.second = False
        """Whether to take the second way now."""

    def took(self, seconds: float) -> None:
        """The way that `second` named took so long."""
        if self._kept > 0:
            self._kept -= 1
            if self._kept == 0:
                self.second = False
            return
        first, second = self._seconds
        (second if self.second else first).append(seconds)
        self.second = not self.second
        if len(second) > self._num_tries:
            self.second, self._kept = statistics.median(second[1:]) < statistics.median(first[1:]), self._keep_for
            first.clear()
            second.clear()


class FusedExecutor(Executor):
    """Takes PPO's steps on rollouts for what `supports` accepts."""

    policy: ActorCritic

    def __init__(self, policy: ActorCritic, config: AlgorithmConfig, *, side_by_side: bool = False) -> None:
        """
        Args:
            side_by_side: compute the critic's gradients in a second thread while this one computes the actor's, where measuring says
                that it pays. Every number is the same.
        """
        assert isinstance(policy.head, DiagonalGaussian)
        super().__init__(policy, config, torch.device("cpu"))
        self.flat = FlatParameters(policy)
        activation = policy.config.activation
        self.actor = FusedMlp(self.flat, policy.actor, "actor", activation)
        self.critic = FusedMlp(self.flat, policy.critic, "critic", activation)
        self.log_std = self.flat.view(self.flat.value, "head.log_std")
        self.log_std_gradient = self.flat.view(self.flat.gradient, "head.log_std")
        # Sleeping hand-overs rather than the matrix library's spinning threads: these do no harm where cores are busy.
        # numpy's warnings are off in each thread by itself; see `step`.
        self._helper = ThreadPoolExecutor(1, "critic", initializer=np.seterr, initargs=("ignore",)) if side_by_side else None
        self._threads = Faster()
        self._rows: list[np.ndarray] = []
        self._minibatch: list[np.ndarray] = []

    @staticmethod
    def supports(policy: nn.Module, device: torch.device) -> TypeGuard[ActorCritic]:
        """A plain Gaussian MLP actor-critic in float32 on the CPU, all of it trainable."""
        return (
            type(policy) is ActorCritic
            and device.type == "cpu"
            and policy.trunk is None
            and type(policy.head) is DiagonalGaussian
            and all(p.requires_grad and p.dtype == torch.float32 for p in policy.parameters())
        )

    @torch.no_grad()
    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        assert isinstance(rows, Batch), "rollouts"
        self.flat.tie()
        # The statistics are frozen while an update runs, so all rows are normalised once.
        features = self.policy.features(rows.observation)
        columns = (features, rows.action, rows.log_prob.sum(-1), rows.advantage, rows.returns, rows.value)
        self._rows = [np.ascontiguousarray(column.numpy()) for column in columns]
        self._minibatch = [column[:0] for column in self._rows]

    def step(self, chosen: np.ndarray | None, learning_rate: float, *, kl_coef: float = 0.0) -> Figures:
        """See `Executor.step`; rollouts have no KL term."""
        chosen = np.arange(len(self._rows[0])) if chosen is None else chosen
        config, n = self.config, len(chosen)
        if n > len(self._minibatch[0]):
            self._minibatch = [np.empty((n, *column.shape[1:]), column.dtype) for column in self._rows]
        self.actor.reserve(n)
        self.critic.reserve(n)
        for source, place in zip(self._rows, self._minibatch, strict=True):
            # mode="clip" writes straight into `out`; the default goes through a copy.
            np.take(source, chosen, axis=0, out=place[:n], mode="clip")
        features, action, log_prob, advantage, returns, value = (column[:n] for column in self._minibatch)
        # The figures report what is not finite; numpy's warnings would only repeat it.
        with np.errstate(all="ignore"):
            helper = self._helper if self._threads.second else None
            started = time.perf_counter()
            pending = helper.submit(self._critic_gradients, features, returns, value) if helper else None
            policy_loss, entropy, kl, clipped = self._actor_gradients(features, action, log_prob, advantage)
            self.meanwhile()
            critic_loss = pending.result() if pending else self._critic_gradients(features, returns, value)
            if self._helper:
                self._threads.took(time.perf_counter() - started)
            norm = math.sqrt(float(np.dot(self.flat.gradient, self.flat.gradient)))
            loss = policy_loss + config.value_coef * critic_loss - config.entropy_coef * entropy
            figures = {"loss": loss, "policy_loss": policy_loss, "value_loss": critic_loss, "entropy": entropy}
            figures |= {"approx_kl": kl, "clip_fraction": clipped, "grad_norm": norm}
            if is_finite(figures):
                self.flat.adam(learning_rate, min(1.0, config.max_grad_norm / (norm + 1e-6)), config.adam_eps)
        return figures

    def _actor_gradients(
        self, features: np.ndarray, action: np.ndarray, old_log_prob: np.ndarray, advantage: np.ndarray
    ) -> tuple[float, float, float, float]:
        """Gradients of clipped surrogate and entropy; returns policy loss, entropy, KL (k3) and clip fraction."""
        config = self.config
        if config.normalize_advantage == "minibatch":
            advantage = whiten(advantage)
        mean = self.actor.forward(features)
        mean_gradient = self.actor.output_gradient(mean.shape[0])
        loss, kl, clipped = gaussian_ppo_kernel(
            mean,
            self.log_std,
            action,
            old_log_prob,
            advantage,
            config.clip_low,
            config.clip_high,
            math.inf if config.dual_clip is None else config.dual_clip,
            MAX_LOG_RATIO,
            K3_SLOPE,
            mean_gradient,
            self.log_std_gradient,
        )
        self.actor.backward(mean_gradient)
        # Entropy is the sum of log_std and a constant: its derivative is 1 for each dimension.
        self.log_std_gradient -= np.float32(config.entropy_coef)
        entropy = float(self.log_std.sum()) + self.log_std.size * (0.5 + LOG_SQRT_2PI)
        return loss, entropy, kl, clipped

    def _critic_gradients(self, features: np.ndarray, returns: np.ndarray, old_value: np.ndarray) -> float:
        config = self.config
        value = self.critic.forward(features)
        gradient = self.critic.output_gradient(value.shape[0])
        clip = math.inf if config.value_clip is None else config.value_clip
        loss = value_kernel(value[:, 0], returns, old_value, clip, config.value_coef, gradient[:, 0])
        self.critic.backward(gradient)
        return loss

    @torch.no_grad()
    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        self.flat.tie()
        features = self.policy.features(ready).numpy()
        return self.critic.predict(np.ascontiguousarray(features))[:, 0]

    def state_tensors(self) -> dict[str, Tensor]:
        state = {"step": torch.tensor(self.flat.step, dtype=torch.int64)}
        for name in self.flat.parameters:
            state[f"exp_avg.{name}"] = torch.from_numpy(self.flat.view(self.flat.exp_avg, name).copy())
            state[f"exp_avg_sq.{name}"] = torch.from_numpy(self.flat.view(self.flat.exp_avg_sq, name).copy())
        return state

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.flat.step = int(state["step"])
        for name in self.flat.parameters:
            self.flat.view(self.flat.exp_avg, name)[...] = state[f"exp_avg.{name}"].numpy()
            self.flat.view(self.flat.exp_avg_sq, name)[...] = state[f"exp_avg_sq.{name}"].numpy()

    def forget(self) -> None:
        self.flat.step = 0
        self.flat.exp_avg[:] = self.flat.exp_avg_sq[:] = 0.0


def _activate(activation: str, x: np.ndarray, scratch: np.ndarray) -> None:
    """In place."""
    if activation == "tanh":
        np.tanh(x, out=x)
    elif activation == "relu":
        np.maximum(x, 0.0, out=x)
    else:
        np.minimum(x, 0.0, out=scratch)
        np.expm1(scratch, out=scratch)
        np.maximum(x, 0.0, out=x)
        x += scratch


def _slope(activation: str, activated: np.ndarray, out: np.ndarray) -> None:
    """Derivative of the activation, computed from its result."""
    if activation == "tanh":
        np.multiply(activated, activated, out=out)
        np.subtract(1.0, out, out=out)
    elif activation == "relu":
        np.greater(activated, 0.0, out=out)
    else:
        # ELU: 1 above 0, exp(x) = result + 1 below.
        np.minimum(activated, 0.0, out=out)
        out += 1.0
