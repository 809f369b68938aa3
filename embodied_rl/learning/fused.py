"""Updates of PPO and soft actor-critic for small MLPs on a CPU, with hand-derived gradients.

For networks of this size autograd spends more time on bookkeeping than on arithmetic. Here every operation writes into a
preallocated buffer. All parameters that are stepped together are in one flat vector (torch's parameters become views of it),
and Adam is one pass over that vector. The mathematics is that of `objectives.RolloutObjective`, `recorded.CriticsObjective`
and `recorded.SoftPolicyObjective`; tests compare them.

Shapes: n rows of a minibatch, A action dimensions, D inputs, E critics; weights [out, in] as in torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.batch import Batch, Rows
from embodied_rl.algorithms.kl import K3_SLOPE
from embodied_rl.algorithms.ratios import MAX_LOG_RATIO
from embodied_rl.config import AlgorithmConfig
from embodied_rl.learning.executors import Executor, Figures, is_finite, norm_name
from embodied_rl.learning.kernels import adam_kernel, gaussian_ppo_kernel, relu_kernel, relu_slope_kernel, value_kernel
from embodied_rl.learning.objectives import Objective
from embodied_rl.learning.optimizer import BETAS
from embodied_rl.learning.rows import TransitionRows
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import TrainedModule
from embodied_rl.policies.heads import LOG_SQRT_2PI, MAX_SQUASHED, DiagonalGaussian, SquashedGaussian
from embodied_rl.policies.q_ensemble import ActorWithCritics, QEnsemble

Result = TypeVar("Result")


class FlatParameters:
    """Parameters in one vector, with their gradients and Adam's moments in vectors beside it.

    The torch parameters are views of the vector, so that both sides always see the same numbers.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = dict(parameters)
        sizes, dtypes = zip(*((p.numel(), p.detach().numpy().dtype) for p in self.parameters.values()), strict=True)
        self.value, self.gradient, self.exp_avg, self.exp_avg_sq = (np.zeros(sum(sizes), dtypes[0]) for _ in range(4))
        self.step = 0
        ends = np.cumsum(sizes).tolist()
        self._places = {name: slice(end - size, end) for name, size, end in zip(self.parameters, sizes, ends, strict=True)}
        self._views = [(parameter, self.view(self.value, name)) for name, parameter in self.parameters.items()]
        self._addresses = [here.ctypes.data for _, here in self._views]
        self.tie()

    def tie(self) -> None:
        """Make the torch parameters views of the vector again, after a `.to()` or an assignment replaced them."""
        for (parameter, here), address in zip(self._views, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                here[...] = parameter.detach().cpu().numpy()
                parameter.data = torch.from_numpy(here)

    def view(self, vector: np.ndarray, name: str) -> np.ndarray:
        return vector[self._places[name]].reshape(tuple(self.parameters[name].shape))

    def adam(self, learning_rate: float, scale: float, eps: float) -> None:
        """One Adam step with the gradients times `scale`."""
        self.step += 1
        beta1, beta2 = BETAS
        step_size, sqrt_correction = learning_rate / (1.0 - beta1**self.step), 1.0 / math.sqrt(1.0 - beta2**self.step)
        scalars = (scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, step_size, sqrt_correction, eps)
        adam_kernel(self.value, self.gradient, self.exp_avg, self.exp_avg_sq, *map(self.value.dtype.type, scalars))


class FusedMlp:
    """Forward and backward of linear layers with activations between, for at most `max_rows` rows."""

    def __init__(self, activation: str, parameters: Sequence[Sequence[np.ndarray]], gradients: Sequence[Sequence[np.ndarray]]) -> None:
        """
        Args:
            parameters: weights and biases of the layers; scales and shifts too, if hidden layers are normalised before a ReLU.
            gradients: arrays of the same kinds, which `backward` writes.
        """
        self.activation = activation
        self.weights, self.biases, *norms = parameters
        self.weight_gradients, self.bias_gradients, *self._norm_gradients = gradients
        self._norms = [[torch.from_numpy(part) for part in own] for own in norms]
        self._normalised: list[tuple[Tensor, ...]] = []
        self.helper: ThreadPoolExecutor | None = None
        """Computes gradients of weights and biases while `backward` continues; None: no second thread."""
        self._max_rows = 0
        self._inputs: list[np.ndarray] = []

    @classmethod
    def of(cls, flat: FlatParameters, network: nn.Sequential, prefix: str, activation: str) -> FusedMlp:
        names = [f"{prefix}.{index}" for index, layer in enumerate(network) if isinstance(layer, nn.Linear)]

        def of(vector: np.ndarray) -> list[list[np.ndarray]]:
            return [[flat.view(vector, f"{name}.{kind}") for name in names] for kind in ("weight", "bias")]

        return cls(activation, of(flat.value), of(flat.gradient))

    @classmethod
    def of_ensemble(cls, flat: FlatParameters, ensemble: QEnsemble) -> list[FusedMlp]:
        """One network per critic; their weights are views of [in, out]."""
        layers: dict[str, list[str]] = {}
        for name, _ in ensemble.named_parameters():
            layers.setdefault(name.partition(".")[0], []).append(f"critics.{name}")

        def of(member: int, vector: np.ndarray) -> list[list[np.ndarray]]:
            weights, *others = ([flat.view(vector, name)[member] for name in names] for names in layers.values())
            return [[weight.T for weight in weights], *([part[0] for part in own] for own in others)]

        return [cls("relu", of(member, flat.value), of(member, flat.gradient)) for member in range(len(ensemble.weights[0]))]

    def reserve(self, max_rows: int) -> None:
        """Allocate the buffers of minibatches of up to `max_rows` rows."""
        if max_rows <= self._max_rows:
            return
        self._max_rows = max_rows
        widths = [weight.shape[0] for weight in self.weights]
        dtype = self.weights[0].dtype
        self.outputs, self.deltas, self._slopes = ([np.empty((max_rows, width), dtype) for width in widths] for _ in range(3))
        self._ones = np.ones(max_rows, dtype)

    def output_gradient(self, num_rows: int) -> np.ndarray:
        """Buffer [n, outputs] for the gradient that `backward` takes."""
        return self.deltas[-1][:num_rows]

    def forward(self, x: np.ndarray) -> np.ndarray:
        """[n, D] → [n, outputs], a buffer that the next forward overwrites."""
        n = x.shape[0]
        self._inputs, self._normalised = [x], []
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = self.outputs[layer][:n]
            np.dot(x, weight.T, out=out)
            if layer < last and self._norms:
                out += bias
                before, (scale, shift) = torch.from_numpy(out), (part[layer] for part in self._norms)
                normalised, mean, inverse_std = torch.native_layer_norm(before, before.shape[-1:], scale, shift, 1e-5)
                self._normalised.append((before, mean, inverse_std, scale, shift))
                out = normalised.relu_().numpy()
            elif layer < last and self.activation == "relu":
                relu_kernel(out, bias)
            else:
                out += bias
                if layer < last:
                    _activate(self.activation, out, self._slopes[layer][:n])
            self._inputs.append(out)
            x = out
        return x

    def backward(
        self, delta: np.ndarray, *, trains: bool = True, inputs: slice | None = None, rows: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Write the parameters' gradients from the gradient of the outputs [n, outputs] of the last `forward`.

        Args:
            trains: False skips the gradients of weights and biases.
            inputs: columns whose gradient [n, …] is returned; None: no columns.
            rows: rows of the last `forward` that these are, without `trains` and without normalisation; None: all rows.
        """
        n, written = delta.shape[0], []
        for layer in range(len(self.weights) - 1, -1, -1):
            x = self._inputs[layer]
            if trains and self.helper:
                written.append(self.helper.submit(self._write, layer, delta, x))
            elif trains:
                self._write(layer, delta, x)
            if layer == 0:
                break
            behind, slope = self.deltas[layer - 1][:n], self._slopes[layer - 1][:n]
            np.dot(delta, self.weights[layer], out=behind)
            if self.activation == "relu":
                relu_slope_kernel(behind, x if rows is None else x[rows])
            else:
                _slope(self.activation, x, slope)
                behind *= slope
            if self._norms:
                before, *moments = self._normalised[layer - 1]
                given = torch.from_numpy(behind), before, before.shape[-1:], *moments, [True, True, True]
                through, *found = torch.ops.aten.native_layer_norm_backward(*given)
                for gradients, gradient in zip(self._norm_gradients, found, strict=True):
                    gradients[layer - 1][...] = gradient.numpy()
                behind = through.numpy()
            delta = behind
        for future in written:
            future.result()
        return None if inputs is None else np.dot(delta, self.weights[0][:, inputs])

    def _write(self, layer: int, delta: np.ndarray, x: np.ndarray) -> None:
        gradient = self.weight_gradients[layer]
        if gradient.flags.c_contiguous:
            np.dot(delta.T, x, out=gradient)
        else:
            np.dot(x.T, delta, out=gradient.T)
        np.dot(self._ones[: len(delta)], delta, out=self.bias_gradients[layer])


class Faster:
    """Finds the faster of two variants: measures them in turn, then uses the one with the lower median for a while."""

    def __init__(self, num_tries: int = 8, keep_for: int = 4000) -> None:
        """
        Args:
            num_tries: measurements of each variant, after one that does not count.
            keep_for: uses of the faster one before both are measured again, because the machine's other load changes.
        """
        self._num_tries, self._keep_for = num_tries, keep_for
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._kept = 0
        self.second = False
        """Whether to use the second variant now."""

    def took(self, seconds: float) -> None:
        """Note how long the variant that `second` names took."""
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


class Fused(Executor):
    """Parameters in flat vectors, each with its Adam state, and a helper thread."""

    def __init__(self, policy: TrainedModule, config: AlgorithmConfig, *, side_by_side: bool) -> None:
        """
        Args:
            side_by_side: compute one of two networks in a second thread while this thread computes the other, if that is measured to
                be faster. Every number is the same.
        """
        super().__init__(policy, config, torch.device("cpu"))
        self.flats = {group: FlatParameters(own.items()) for group, own in policy.parameter_groups().items()}
        # Sleeping hand-overs instead of the matrix library's spinning threads, which slow down busy cores.
        # numpy's warnings are switched off per thread; see `step`.
        self._helper = ThreadPoolExecutor(1, "fused", initializer=np.seterr, initargs=("ignore",)) if side_by_side else None
        self._threads = Faster()

    def _take(self, figures: Figures, groups: Sequence[str], learning_rate: float) -> Figures:
        """Step these groups if the figures are finite; return the figures with the norms."""
        norms = {group: math.sqrt(float(np.dot(self.flats[group].gradient, self.flats[group].gradient))) for group in groups}
        figures |= {norm_name(group): norm for group, norm in norms.items()}
        if is_finite(figures):
            for group, norm in norms.items():
                self.flats[group].adam(learning_rate, min(1.0, self.config.max_grad_norm / (norm + 1e-6)), self.config.adam_eps)
        return figures

    def state_tensors(self) -> dict[str, Tensor]:
        steps = {f"{begin}step": torch.tensor(flat.step, dtype=torch.int64) for begin, flat in self._named()}
        return {**steps, **{name: torch.from_numpy(part.copy()) for name, part in self._moments().items()}}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for begin, flat in self._named():
            flat.step = int(state[f"{begin}step"])
        for name, part in self._moments().items():
            part[...] = state[name].numpy()

    def forget(self) -> None:
        for flat in self.flats.values():
            flat.step = 0
            flat.exp_avg[:] = flat.exp_avg_sq[:] = 0.0

    def _named(self) -> list[tuple[str, FlatParameters]]:
        """Each group's vector with the prefix of its state names, as in `optimizers_of`."""
        return [(f"adam.{group}." if group else "", flat) for group, flat in self.flats.items()]

    def _moments(self) -> dict[str, np.ndarray]:
        kinds = [
            (f"{begin}{kind}.", flat, vector)
            for begin, flat in self._named()
            for kind, vector in (("exp_avg", flat.exp_avg), ("exp_avg_sq", flat.exp_avg_sq))
        ]
        return {f"{begin}{name}": flat.view(vector, name) for begin, flat, vector in kinds for name in flat.parameters}


class FusedExecutor(Fused):
    """Takes PPO's steps on rollouts for policies that `supports` accepts."""

    policy: ActorCritic

    def __init__(self, policy: ActorCritic, config: AlgorithmConfig, *, side_by_side: bool = False) -> None:
        """`side_by_side`: compute the critic in parallel to the actor, see `Fused`."""
        assert isinstance(policy.head, DiagonalGaussian)
        super().__init__(policy, config, side_by_side=side_by_side)
        self.flat = self.flats[""]
        activation = policy.config.activation
        self.actor = FusedMlp.of(self.flat, policy.actor, "actor", activation)
        self.critic = FusedMlp.of(self.flat, policy.critic, "critic", activation)
        self.log_std = self.flat.view(self.flat.value, "head.log_std")
        self.log_std_gradient = self.flat.view(self.flat.gradient, "head.log_std")
        self._rows: list[np.ndarray] = []
        self._minibatch: list[np.ndarray] = []

    @staticmethod
    def supports(policy: nn.Module, device: torch.device) -> TypeGuard[ActorCritic]:
        """Whether this is a plain Gaussian MLP actor-critic in float32 on the CPU, all of it trainable."""
        if type(policy) is not ActorCritic or policy.trunk is not None or type(policy.head) is not DiagonalGaussian:
            return False
        return device.type == "cpu" and all(p.requires_grad and p.dtype == torch.float32 for p in policy.parameters())

    @torch.no_grad()
    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        assert isinstance(rows, Batch), "rollouts"
        self.flat.tie()
        # The statistics are frozen during an update, so all rows are normalised once.
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
        # The figures report non-finite numbers; numpy's warnings would only repeat that.
        with np.errstate(all="ignore"):
            helper = self._helper if self._threads.second else None
            started = time.perf_counter()
            pending = helper.submit(self._critic_gradients, features, returns, value) if helper else None
            policy_loss, entropy, kl, clipped = self._actor_gradients(features, action, log_prob, advantage)
            if pending is None or torch.get_num_threads() == 1:
                self.meanwhile()  # acts with one thread, which would change the sums of products in the helper's too
            critic_loss = pending.result() if pending else self._critic_gradients(features, returns, value)
            if self._helper:
                self._threads.took(time.perf_counter() - started)
            loss = policy_loss + config.value_coef * critic_loss - config.entropy_coef * entropy
            figures = {"loss": loss, "policy_loss": policy_loss, "value_loss": critic_loss, "entropy": entropy}
            return self._take({**figures, "approx_kl": kl, "clip_fraction": clipped}, ("",), learning_rate)

    def _actor_gradients(
        self, features: np.ndarray, action: np.ndarray, old_log_prob: np.ndarray, advantage: np.ndarray
    ) -> tuple[float, float, float, float]:
        """Gradients of clipped surrogate and entropy; returns policy loss, entropy, KL (k3) and clip fraction."""
        config = self.config
        if config.normalize_advantage == "minibatch":
            advantage = whiten(torch.from_numpy(advantage)).numpy()
        mean = self.actor.forward(features)
        mean_gradient = self.actor.output_gradient(mean.shape[0])
        bounds = (config.clip_low, config.clip_high, math.inf if config.dual_clip is None else config.dual_clip, MAX_LOG_RATIO, K3_SLOPE)
        rows = (mean, self.log_std, action, old_log_prob, advantage)
        loss, kl, clipped = gaussian_ppo_kernel(*rows, *bounds, mean_gradient, self.log_std_gradient)
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
        self.critic.reserve(len(features))
        return self.critic.forward(np.ascontiguousarray(features))[:, 0].copy()


class FusedCritics(Fused):
    """Takes soft actor-critic's steps for networks that `supports` accepts."""

    policy: ActorWithCritics

    def __init__(self, networks: ActorWithCritics, config: AlgorithmConfig, *, side_by_side: bool = False) -> None:
        """`side_by_side`: compute every second critic in parallel to the others, see `Fused`."""
        super().__init__(networks, config, side_by_side=side_by_side)
        assert isinstance(networks.policy, ActorCritic)
        own, activation = self.flats["policy"], networks.policy.config.activation
        self._targets = FlatParameters((f"critics.{name}", parameter) for name, parameter in networks.targets.named_parameters())
        self.actor = FusedMlp.of(own, networks.policy.actor, "actor", activation)
        self.log_std, self.log_std_gradient = (own.view(vector, "head.gaussian.log_std") for vector in (own.value, own.gradient))
        self.critics, self.targets = (FusedMlp.of_ensemble(flat, networks.critics) for flat in (self.flats["critics"], self._targets))
        pair = (self._targets, self.flats["critics"])
        self._followed = [[torch.from_numpy(flat.view(flat.value, name)) for name in flat.parameters] for flat in pair]
        self._rows: TransitionRows | None = None

    @staticmethod
    def supports(networks: nn.Module, device: torch.device) -> TypeGuard[ActorWithCritics]:
        """Whether these are critics of a plain squashed MLP in float32 on the CPU."""
        if not isinstance(networks, ActorWithCritics) or type(networks.policy) is not ActorCritic or device.type != "cpu":
            return False
        plain = networks.policy.trunk is None and type(networks.policy.head) is SquashedGaussian
        return plain and all(p.dtype == torch.float32 for p in networks.parameters())

    @torch.no_grad()
    def begin(self, objective: Objective[Any, Any], rows: Rows) -> None:
        assert isinstance(rows, TransitionRows), "stored steps"
        for flat in (*self.flats.values(), self._targets):
            flat.tie()
        self._objective = objective
        if rows is not self._rows:
            self._rows = rows
            seen = (rows.observation, rows.next_observation)
            self._features, self._following = (self.policy.policy.features(part).numpy() for part in seen)
            for network in (self.actor, *self.critics, *self.targets):
                network.reserve(rows.num_rows)
            for target, critic in zip(self.targets, self.critics, strict=True):
                target.outputs = critic.deltas  # which the critic writes later: fewer buffers fit the cache

    def step(self, chosen: np.ndarray | None, learning_rate: float, *, kl_coef: float = 0.0) -> Figures:
        """See `Executor.step`; a minibatch of stored steps is used whole."""
        assert chosen is None, "a stream of minibatches"
        assert self._rows is not None, "begin comes first"
        with np.errstate(all="ignore"):
            started, of_critics = time.perf_counter(), "critics" in self._objective.groups
            figures = self._critics_gradients(self._rows) if of_critics else self._policy_gradients(self._rows)
            if self._helper and of_critics:
                self._threads.took(time.perf_counter() - started)
            figures = self._take(figures, self._objective.groups, learning_rate)
            if is_finite(figures) and of_critics:
                torch._foreach_lerp_(self._followed[0], self._followed[1], self.policy.options.target_rate)
            elif is_finite(figures):
                self._objective.stepped(self.policy)
        return figures

    def _critics_gradients(self, rows: TransitionRows) -> Figures:
        """Write the critics' gradients; computes only the targets that this minibatch needs."""
        acted, log_prob, _ = self._drawn(self._following, rows.next_noise)
        seen = np.concatenate([self._features, rows.action.flatten(1).numpy()], axis=1)
        then, num = np.concatenate([self._following, acted], axis=1), len(self.critics)
        networks = [*((own, seen) for own in self.critics), *((self.targets[member], then) for member in rows.members.tolist())]
        found = self._each(lambda k: networks[k][0].forward(networks[k][1])[:, 0], len(networks))
        values, next_value = np.stack(found[:num]), np.min(found[num:], axis=0)
        if self.policy.options.entropy_in_target:
            next_value = next_value - math.exp(self.flats["entropy"].value[0]) * log_prob
        discount = rows.discount.numpy()
        error = values - (rows.reward.numpy() + np.where(discount > 0, discount * next_value, 0))
        gradient = error * (2.0 / error.size)
        self._each(lambda k: self.critics[k].backward(gradient[k][:, None]), num)
        loss = float(np.mean(error * error))
        return {"critic_loss": loss, "loss": loss, "q_mean": float(values.mean()), "q_spread": float(values.std(axis=0).mean())}

    def _policy_gradients(self, rows: TransitionRows) -> Figures:
        """Write gradients of the policy, which follows the smaller of two critics or the mean of more, and of the entropy coefficient."""
        acted, log_prob, backward = self._drawn(self._features, rows.noise)
        x, num, size = np.concatenate([self._features, acted], axis=1), len(self.critics), len(acted)
        values = np.stack(self._each(lambda k: self.critics[k].forward(x)[:, 0], num))
        share = (values.argmin(axis=0) == np.arange(2)[:, None]) if num == 2 else np.full(values.shape, 1.0 / num)
        slopes = (share / -size).astype(values.dtype)
        # With two critics, each is followed back in its own rows; normalised layers need all rows.
        own = [np.flatnonzero(part) for part in share] if num == 2 and not self.policy.options.layer_norm else [None] * num
        of_action = slice(self._features.shape[1], None)

        def follow(k: int) -> np.ndarray | None:
            given = slopes[k] if own[k] is None else slopes[k][own[k]]
            return self.critics[k].backward(given[:, None], trains=False, inputs=of_action, rows=own[k])

        gradient = np.zeros_like(acted)
        for chosen, part in zip(own, self._each(follow, num), strict=True):
            gradient[slice(None) if chosen is None else chosen] += part
        coefficient, mean_log_prob = math.exp(self.flats["entropy"].value[0]), float(log_prob.mean())
        backward(gradient, coefficient / size)
        loss = coefficient * mean_log_prob - float((values * share).sum()) / size
        self.flats["entropy"].gradient[0] = of_entropy = coefficient * (-mean_log_prob - self.policy.target_entropy)
        return {"policy_loss": loss, "entropy": -mean_log_prob, "entropy_coef": coefficient, "loss": loss + of_entropy}

    def _drawn(self, features: np.ndarray, noise: Tensor | None) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray, float], None]]:
        """Actions [n, A] and their log-densities [n], as in `heads.SquashedGaussian`, and a function that takes their gradients (one number
        for all log-densities) back through the policy."""
        assert noise is not None, "transition_rows draws it"
        mean, std, bound = self.actor.forward(features), np.exp(self.log_std), self.log_std.dtype.type(MAX_SQUASHED)
        u = mean + noise.numpy() * std
        action = np.tanh(u)
        # At the bound the action is clipped, so its pre-tanh value has no gradient either.
        free = np.abs(action) <= bound
        action, u = np.clip(action, -bound, bound), np.where(free, u, np.copysign(np.arctanh(np.float64(bound)), u))
        z = np.where(free, noise.numpy(), (u - mean) / std)
        log_prob = -0.5 * z * z - self.log_std - LOG_SQRT_2PI - 2.0 * (math.log(2.0) - u - np.logaddexp(0.0, -2.0 * u))

        def backward(gradient: np.ndarray, slope: float) -> None:
            # d log p / du = 2 tanh(u): the noise, and with it the Gaussian's density, is constant.
            delta = np.where(free, gradient * (1.0 - action * action) + 2.0 * slope * action, slope * z / std).astype(mean.dtype)
            self.log_std_gradient[:] = np.where(free, delta * z * std - slope, slope * (z * z - 1.0)).sum(axis=0)
            self.actor.helper = self._helper if self._threads.second else None
            self.actor.backward(delta)

        return action, log_prob.sum(axis=-1).astype(mean.dtype), backward

    def _each(self, compute: Callable[[int], Result], number: int) -> list[Result]:
        """[compute(0), compute(1), …], with every second one in the helper thread if that is faster."""
        if self._helper is None or not self._threads.second:
            return [compute(k) for k in range(number)]
        others = self._helper.submit(lambda: [compute(k) for k in range(1, number, 2)])
        found = [compute(k) for k in range(0, number, 2)], others.result()
        return [found[k % 2][k // 2] for k in range(number)]

    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        return self.policy.value(ready).numpy()


def _activate(activation: str, x: np.ndarray, scratch: np.ndarray) -> None:
    """Apply tanh or ELU in place."""
    if activation == "tanh":
        np.tanh(x, out=x)
    else:
        np.minimum(x, 0.0, out=scratch)
        np.expm1(scratch, out=scratch)
        np.maximum(x, 0.0, out=x)
        x += scratch


def _slope(activation: str, activated: np.ndarray, out: np.ndarray) -> None:
    """Derivative of tanh or ELU, computed from its result."""
    if activation == "tanh":
        np.multiply(activated, activated, out=out)
        np.subtract(1.0, out, out=out)
    else:
        # ELU: 1 above 0, exp(x) = result + 1 below.
        np.minimum(activated, 0.0, out=out)
        out += 1.0
