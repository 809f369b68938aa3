"""The learner with critics of actions: implicit Q-learning, advantage-weighted and soft actor-critic, on stored transitions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms import offline_rl
from embodied_rl.algorithms.losses import behaviour_cloning_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.episodes.transitions import Transitions
from embodied_rl.learning.cloning_learner import limit_log_std
from embodied_rl.learning.devices import compute_threads, resolve_device
from embodied_rl.learning.executors import take_step
from embodied_rl.learning.learner import checked
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.memory import TRAINED, parameter_bytes, require_memory
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import TensorObservation
from embodied_rl.policies.heads import Categorical, SquashedGaussian
from embodied_rl.policies.q_ensemble import QEnsemble


@dataclass(frozen=True)
class _Rows:
    """A minibatch on the device."""

    features: Tensor
    """[B, D] with the trunk's gradient, where there is a trunk."""
    next_features: Tensor
    """[B, D] constant."""
    action: Tensor
    reward: Tensor
    discount: Tensor


class OfflineLearner:
    """Critics Q(s, a) beside the policy, their targets, and an optimiser for each of critics, policy, state value and entropy.

    The critics read what the policy reads (normalised state, or the trunk's features, which the critics' loss trains). The policy's own
    critic V(s) is implicit Q-learning's state value; the other updates have no use for it.
    """

    def __init__(
        self, policy: ActorCritic, config: AlgorithmConfig, device: str | torch.device = "cpu", num_threads: int | None = None
    ) -> None:
        """The critics' weights are drawn from torch's global generator."""
        assert config.off_policy is not None
        self.policy, self.config, self.options = policy, config, config.off_policy
        self.device = resolve_device(device)
        options, action = self.options, policy.spec.action
        size = int(next(layer.in_features for layer in policy.actor if isinstance(layer, nn.Linear)))

        def critics() -> QEnsemble:
            return QEnsemble(size, action, options.hidden_sizes, options.num_critics, layer_norm=options.layer_norm)

        with torch.device("meta"):  # shapes without memory, and without drawing random numbers
            parts = parameter_bytes(critics(), copies=TRAINED + 1)  # and the targets
        require_memory(f"algorithm.off_policy: critics of hidden_sizes={list(options.hidden_sizes)}", parts, "hidden_sizes or num_critics")
        self.critics = critics()
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_entropy_coef = nn.Parameter(torch.tensor(math.log(options.init_entropy_coef)))
        self.target_entropy = -float(action.dim) if options.target_entropy is None else options.target_entropy
        for module in (policy, self.critics, self.targets):
            module.to(self.device)
        self.compute_threads = num_threads or 1
        self._optimizers = self._make_optimisers()

    def _make_optimisers(self) -> dict[str, Optimizer]:
        policy = self.policy
        groups: dict[str, dict[str, nn.Parameter]] = {
            "critics": {**_named("critics", self.critics), **({} if policy.trunk is None else _named("trunk", policy.trunk))},
            "policy": {**_named("actor", policy.actor), **_named("head", policy.head)},
            "value": _named("critic", policy.critic) if self.options.update == "iql" else {},
            "entropy": {"log_entropy_coef": self.log_entropy_coef} if self.options.update == "sac" else {},
        }
        config = self.config
        return {
            group: Optimizer(
                parameters, learning_rate=config.learning_rate, eps=config.adam_eps, max_grad_norm=config.max_grad_norm, only=True
            )
            for group, parameters in groups.items()
            if parameters
        }

    # ---- one update -------------------------------------------------------------------------------------------------

    def update(self, batch: Transitions, rng: np.random.Generator, *, learning_rate: float, with_policy: bool = True) -> dict[str, float]:
        """One step of critics and state value, of the policy where `with_policy`, and of the targets.

        Args:
            batch: B transitions.
            rng: of the policy's noise and the choice of critics; all that is random here.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite; nothing was stepped with it.
        """
        with compute_threads(self.compute_threads):
            rows = self._rows(batch)
            metrics: offline_rl.Metrics = {}
            norms: dict[str, float] = {}
            if self.options.update == "iql":
                metrics |= self._value_step(rows, learning_rate, norms, batch)
            if with_policy and self.options.update != "sac":
                metrics |= self._imitation_step(rows, rng, learning_rate, norms, batch)
            metrics |= self._critic_step(rows, rng, learning_rate, norms, batch)
            if with_policy and self.options.update == "sac":
                metrics |= self._soft_policy_step(rows, rng, learning_rate, norms, batch)
            self._move_targets()
        return {**{name: float(value) for name, value in metrics.items()}, **{f"grad_norm_{group}": norm for group, norm in norms.items()}}

    def _value_step(self, rows: _Rows, rate: float, norms: dict[str, float], batch: Transitions) -> offline_rl.Metrics:
        """Implicit Q-learning: V follows an expectile of Q̄ at recorded actions."""
        with torch.no_grad():
            recorded = offline_rl.smallest_of(self.targets(rows.features, rows.action))
        value = self.policy.critic(rows.features.detach()).squeeze(-1)
        loss, metrics = offline_rl.expectile_loss(value=value, target=recorded, expectile=self.options.expectile)
        self._step("value", loss, rate, norms, batch)
        return metrics

    def _imitation_step(
        self, rows: _Rows, rng: np.random.Generator, rate: float, norms: dict[str, float], batch: Transitions
    ) -> offline_rl.Metrics:
        """Recorded actions are imitated by how much better than V(s) they are."""
        features = rows.features.detach()
        with torch.no_grad():
            if self.options.update == "iql":
                advantage = offline_rl.smallest_of(self.targets(features, rows.action)) - self.policy.critic(features).squeeze(-1)
            else:
                acted, _ = self._sample(features, rng)
                baseline = offline_rl.smallest_of(self.critics(features, acted))
                advantage = offline_rl.smallest_of(self.critics(features, rows.action)) - baseline
            weight, metrics = offline_rl.advantage_weights(
                advantage=advantage, temperature=self.options.temperature, max_weight=self.options.max_weight
            )
        log_prob = self.policy.head.log_prob(self.policy.actor(features), rows.action).sum(-1)
        loss, imitation = behaviour_cloning_loss(log_prob=log_prob, weight=weight)
        self._step("policy", loss, rate, norms, batch)
        limit_log_std(self.policy, self.options.min_log_std)
        return metrics | imitation

    def _critic_step(
        self, rows: _Rows, rng: np.random.Generator, rate: float, norms: dict[str, float], batch: Transitions
    ) -> offline_rl.Metrics:
        with torch.no_grad():
            target = offline_rl.td_target(reward=rows.reward, discount=rows.discount, next_value=self._next_value(rows, rng))
        loss, metrics = offline_rl.critic_loss(values=self.critics(rows.features, rows.action), target=target)
        self._step("critics", loss, rate, norms, batch)
        return metrics

    def _next_value(self, rows: _Rows, rng: np.random.Generator) -> Tensor:
        """[B] of the next observation: of a sampled action by the target critics, or implicit Q-learning's own."""
        if self.options.update == "iql":
            return self.policy.critic(rows.next_features).squeeze(-1)
        acted, log_prob = self._sample(rows.next_features, rng)
        chosen = rng.permutation(self.options.num_critics)[: self.options.target_critics]
        value = offline_rl.smallest_of(self.targets(rows.next_features, acted), torch.from_numpy(chosen).to(self.device))
        if self.options.update == "awac" or not self.options.entropy_in_target:
            return value
        return offline_rl.soft_value(value=value, log_prob=log_prob.sum(-1), entropy_coef=self.log_entropy_coef.exp())

    def _soft_policy_step(
        self, rows: _Rows, rng: np.random.Generator, rate: float, norms: dict[str, float], batch: Transitions
    ) -> offline_rl.Metrics:
        features = rows.features.detach()
        acted, log_prob = self._sample(features, rng)
        values = self.critics(features, acted)
        # Two critics: the smaller (Haarnoja et al. 2018); a larger ensemble: the mean (Ball et al. 2023).
        followed = offline_rl.smallest_of(values) if self.options.num_critics == 2 else values.mean(dim=0)
        coefficient = self.log_entropy_coef.exp()
        loss, metrics = offline_rl.soft_policy_loss(values=followed, log_prob=log_prob.sum(-1), entropy_coef=coefficient)
        self._step("policy", loss, rate, norms, batch)
        limit_log_std(self.policy, self.options.min_log_std)
        entropy_loss, entropy = offline_rl.entropy_coef_loss(
            log_coef=self.log_entropy_coef, log_prob=log_prob.sum(-1), target_entropy=self.target_entropy
        )
        self._step("entropy", entropy_loss, rate, norms, batch)
        return metrics | entropy

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _rows(self, batch: Transitions) -> _Rows:
        features = self.policy.features(self._observation(batch.observation))
        with torch.no_grad():
            following = self.policy.features(self._observation(batch.next_observation))
        action, reward, discount = (torch.from_numpy(part).to(self.device) for part in (batch.action, batch.reward, batch.discount))
        return _Rows(features, following, action, reward, discount)

    def _observation(self, observation: Mapping[str, np.ndarray]) -> TensorObservation:
        return {key: torch.from_numpy(observation[key]).to(self.device) for key in self.policy.observation_keys}

    def _sample(self, features: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Actions of the policy within the simulator's bounds, and their log-probabilities [B, L]."""
        shape = (features.shape[0], self.policy.spec.action.dim)
        discrete = isinstance(self.policy.head, Categorical)
        noise = rng.random(shape, np.float32) if discrete else rng.standard_normal(shape, np.float32)
        acted, log_prob = self.policy.head.sample(self.policy.actor(features), torch.from_numpy(noise).to(self.device))
        bounded = discrete or isinstance(self.policy.head, SquashedGaussian)
        return (acted if bounded else acted.clamp(-1.0, 1.0)), log_prob

    def _step(self, group: str, loss: Tensor, rate: float, norms: dict[str, float], batch: Transitions) -> None:
        figures = take_step(self.policy, self._optimizers[group], [lambda: (loss, {})], rate)
        checked(figures, f"loss of {group}", "steps", np.arange(batch.num_rows), batch.arrays)
        norms[group] = figures["grad_norm"]

    @torch.no_grad()
    def _move_targets(self) -> None:
        torch._foreach_lerp_(list(self.targets.parameters()), list(self.critics.parameters()), self.options.target_rate)

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def trained(self) -> list[Tensor]:
        """See `Executor.trained`."""
        return list(self.policy.parameters())

    def optimizer_tensors(self) -> list[Tensor]:
        """See `Executor.optimizer_tensors`."""
        return [tensor for optimizer in self._optimizers.values() for tensor in optimizer.tensors()]

    def state_tensors(self) -> dict[str, Tensor]:
        """Critics, targets, entropy coefficient, and the state of each optimiser."""
        state = {"log_entropy_coef": self.log_entropy_coef.detach().cpu().clone()}
        for name, module in (("critics", self.critics), ("targets", self.targets)):
            state |= {f"{name}.{key}": value.detach().cpu().clone() for key, value in module.state_dict().items()}
        for group, optimizer in self._optimizers.items():
            state |= {f"adam.{group}.{name}": value for name, value in optimizer.state_tensors().items()}
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly. Raises KeyError or ValueError when the state is of other networks."""
        with torch.no_grad():
            self.log_entropy_coef.copy_(state["log_entropy_coef"])
        for name, module in (("critics", self.critics), ("targets", self.targets)):
            try:
                module.load_state_dict(_below(state, f"{name}."))
            except RuntimeError as error:
                raise ValueError(f"the {name} are of another shape: {' '.join(str(error).split())}") from error
        for group, optimizer in self._optimizers.items():
            optimizer.load_state_tensors(_below(state, f"adam.{group}."))


def _named(prefix: str, module: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
