"""Policies and batches that the tests of this folder share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.config import AlgorithmConfig, HybridConfig, PolicyConfig, ShardingConfig
from embodied_rl.episodes.dataset import Transitions
from embodied_rl.learning import fsdp
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.objectives import Precision, RolloutObjective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.recorded import CloningObjective, CriticsObjective, step_rows, steps_of, transition_rows
from embodied_rl.methods.cloning import mean_figures
from embodied_rl.policies.actor_critic import ActorCritic, build_policy
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

SPEC = SimSpec("Toy-v0", {"state": TensorSpec((11,)), "unread": TensorSpec((2,))}, ActionSpec.continuous([-1.0] * 3, [1.0] * 3))
CONFIG = AlgorithmConfig(num_epochs=4, minibatch_size=64)


def make_policy(spec: SimSpec = SPEC, **changes: Any) -> ActorCritic:
    torch.manual_seed(0)
    return build_policy(replace(PolicyConfig(hidden_sizes=(32, 32)), **changes), spec)


def make_batch(policy: ActorCritic, rows: int = 300, seed: int = 0) -> Batch:
    """Actions of the policy itself, with ratios spread around 1 so that every branch of the loss is taken."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    observation = {
        key: normal(rows, *part.shape) if part.dtype == "float32" else torch.randint(0, 256, (rows, *part.shape), dtype=torch.uint8)
        for key, part in policy.spec.observation.items()
    }
    policy.update_statistics(observation)
    discrete = policy.spec.action.kind == "discrete"
    noise = torch.rand(rows, 1, generator=generator) if discrete else normal(rows, policy.spec.action.dim)
    with torch.no_grad():
        acted, value = policy.act(observation, noise), policy.value(observation)
    return Batch(
        observation=observation,
        action=acted.action,
        log_prob=acted.log_prob + 0.2 * normal(*acted.log_prob.shape),
        advantage=normal(rows),
        returns=value + normal(rows),
        value=value + 0.3 * normal(rows),
    )


def parameters(policy: ActorCritic) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def rollout_learner(
    policy: Any,
    config: AlgorithmConfig = CONFIG,
    *,
    allow_fused: bool = True,
    num_threads: int | None = 1,
    precision: Precision = "float32",
    device: str = "cpu",
    sharding: ShardingConfig | None = None,
) -> Learner:
    """PPO on rollouts."""
    hybrid = HybridConfig(device=device, num_threads=num_threads, sharding=sharding)
    return make_learner(RolloutObjective(policy, config, precision), policy, config, hybrid, allow_fused=allow_fused)


def update(learner: Learner, batch: Batch, iteration: int = 0, num_iterations: int = 1, seed: int = 0) -> dict[str, float]:
    """One iteration of PPO."""
    size = learner.config.minibatch_size
    return learner.update(batch, minibatch_rows=size, progress=iteration / num_iterations, seed=[seed, iteration])


class Cloner:
    """Cloning as `CloningLearner` does it, on given minibatches."""

    def __init__(self, policy: ActorCritic, config: AlgorithmConfig, sharding: ShardingConfig | None = None) -> None:
        self.policy, self.objective = policy, CloningObjective(policy, config)
        self.learner = make_learner(self.objective, policy, config, HybridConfig(device="cpu", num_threads=1, sharding=sharding))

    def epoch(self, minibatches: list[Transitions], learning_rate: float) -> dict[str, float]:
        return mean_figures([self.learner.step(step_rows(self.policy, batch), learning_rate) for batch in minibatches])

    def validate(self, minibatches: list[Transitions]) -> dict[str, float]:
        return self.objective.validate(self.policy, minibatches)


class Critics:
    """An update of critics as `CriticLearner` does it, on given steps."""

    def __init__(
        self, policy: ActorCritic, config: AlgorithmConfig, sharding: ShardingConfig | None = None, ranks: RankHost | None = None
    ) -> None:
        assert config.off_policy is not None
        self.policy, self.config, self.options = policy, config, config.off_policy
        self.networks = ActorWithCritics(policy, config.off_policy)
        hybrid = HybridConfig(device="cpu", num_threads=1, sharding=sharding)
        self.learner = make_learner(CriticsObjective(self.networks, config), self.networks, config, hybrid, ranks=ranks)
        self.state_tensors, self.load_state_tensors = self.learner.state_tensors, self.learner.load_state_tensors

    def update(self, batch: Transitions, rng: np.random.Generator, *, learning_rate: float, with_policy: bool = True) -> dict[str, float]:
        rows = transition_rows(self.networks, batch, rng, with_policy=with_policy)
        steps = [kind(self.networks, self.config) for kind in steps_of(self.options, with_policy=with_policy)]
        return self.learner.step(rows, learning_rate, steps)


def training_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """{name: tensor} of a module's parameters and buffers, and ``optimizer.<entry>.<parameter>`` of what was stepped so far."""
    fsdp.reshard(module)
    found = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    if optimizer is not None:
        for name, parameter in module.named_parameters():
            for entry, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{entry}.{name}"] = value
    return found


def prepare_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make Adam's state of every trained parameter, zero, so that `training_tensors` lists it and `load_sharded` fills it."""
    fsdp.reshard(module)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                zeros = {key: torch.zeros_like(parameter).detach() for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}
