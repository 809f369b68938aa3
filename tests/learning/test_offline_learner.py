"""Cloning and learning with critics on small problems with known answers; what is stepped by what; continuing exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, CloningConfig, OffPolicyConfig
from embodied_rl.episodes.dataset import Transitions
from embodied_rl.errors import IncompatibleCheckpointError, NonFiniteError
from embodied_rl.learning.executors import LocalExecutor
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.learning.recorded import CriticsObjective, transition_rows
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.learning.samples import Cloner, Critics, make_policy, parameters

SPEC = SimSpec("Bandit-v0", {"state": TensorSpec((1,))}, ActionSpec.continuous([-1.0], [1.0]))
CHOICES = SimSpec("Choice-v0", {"state": TensorSpec((1,))}, ActionSpec.discrete(3))
IMAGES = SimSpec("Pixels-v0", {"rgb": TensorSpec((16, 16, 3), "uint8")}, ActionSpec.continuous([-1.0], [1.0]))


def cloning(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(cloning=CloningConfig(**changes), learning_rate=3e-3, max_grad_norm=10.0, adam_eps=1e-8)


def off_policy(**changes: Any) -> AlgorithmConfig:
    options = {"hidden_sizes": (32, 32), **changes}
    return AlgorithmConfig(off_policy=OffPolicyConfig(**options), learning_rate=3e-3, max_grad_norm=10.0, adam_eps=1e-8)


def rows(state: np.ndarray, action: np.ndarray, reward: np.ndarray | None = None, discount: float = 0.0) -> Transitions:
    size = len(state)
    seen = {"state": state.reshape(size, 1).astype(np.float32)}
    rewards = np.zeros(size, np.float32) if reward is None else reward.astype(np.float32)
    acted = action.reshape(size, 1)
    acted = acted.astype(np.int64) if acted.dtype.kind == "i" else acted.astype(np.float32)
    return Transitions(seen, acted, rewards, np.full(size, discount, np.float32), seen)


# ---- Adam -----------------------------------------------------------------------------------------------------------


def step(adam: Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Take a step; return the gradient's norm."""
    adam.zero_grad()
    loss.backward(inputs=adam.inputs)
    norm = adam.clip()
    adam.step(0.1)
    return norm


def test_the_optimizer_is_adam_by_hand() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    adam = Optimizer({"x": parameter}, eps=1e-8, max_grad_norm=100.0)
    assert float(step(adam, 3.0 * parameter.sum())) == pytest.approx(3.0), "the norm"
    # The first step has the size of the learning rate, whatever the gradient.
    assert parameter.item() == pytest.approx(0.9, abs=1e-6)
    again = torch.nn.Parameter(parameter.detach().clone())
    other = Optimizer({"x": again}, eps=1e-8, max_grad_norm=100.0)
    other.load_state_tensors(adam.state_tensors())
    for p, a in ((parameter, adam), (again, other)):
        step(a, p.square().sum())
    assert parameter.item() == again.item()
    with pytest.raises(ValueError, match="does not fit one of shape"):
        other.load_state_tensors({**adam.state_tensors(), "exp_avg.x": torch.zeros(3)})


def test_an_optimizer_of_some_parameters_leaves_the_others_without_gradients() -> None:
    own, other = (torch.nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    adam = Optimizer({"own": own}, eps=1e-8, max_grad_norm=100.0, only=True)
    step(adam, (own * other).sum())
    assert own.item() == pytest.approx(1.9, abs=1e-6)
    assert other.grad is None


# ---- cloning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("distribution", "loss"), [("gaussian", "nll"), ("gaussian", "mse"), ("squashed", "nll"), ("squashed", "mse")])
def test_cloning_finds_the_function_and_its_noise(distribution: str, loss: str) -> None:
    """Actions 0.6 sin(3 s), plus noise of 0.1 for maximum likelihood, which must find its size."""
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, 2000)
    noise = 0.1 * rng.standard_normal(2000) if (distribution, loss) == ("gaussian", "nll") else 0.0
    data = rows(state, 0.6 * np.sin(3 * state) + noise)
    policy = make_policy(SPEC, distribution=distribution, hidden_sizes=(32, 32))
    learner = Cloner(policy, cloning(loss=loss))
    before = parameters(policy)
    for _ in range(500):
        chosen = rng.integers(2000, size=128)
        learner.epoch([rows(data.observation["state"][chosen], data.action[chosen])], 1e-2)
    test = np.linspace(-0.9, 0.9, 50)
    with torch.no_grad():
        mode = policy.act({"state": torch.from_numpy(test[:, None]).float()}, None).action[:, 0].numpy()
    np.testing.assert_allclose(mode, 0.6 * np.sin(3 * test), atol=0.12)
    figures = learner.validate([rows(test, 0.6 * np.sin(3 * test))])
    assert figures["validation_mae"] == pytest.approx(np.abs(mode - 0.6 * np.sin(3 * test)).mean(), abs=1e-6)
    if (distribution, loss) == ("gaussian", "nll"):
        assert math.exp(policy.head.log_std.item()) == pytest.approx(0.1, rel=0.2)  # type: ignore[operator]
    after = parameters(policy)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("critic")), "the critic is not touched"


def test_cloning_of_choices_reaches_their_entropy() -> None:
    """Choice 2 in three of four cases where s > 0, else always 0: cross-entropies 0.5623 (= -¾ log ¾ - ¼ log ¼) and 0."""
    state = np.tile([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], 16)
    action = np.tile([2, 2, 2, 1, 0, 0, 0, 0], 16)
    learner = Cloner(make_policy(CHOICES), cloning())
    for _ in range(200):
        learner.epoch([rows(state, action)], 1e-2)
    figures = learner.validate([rows(state, action)])
    assert figures["validation_loss"] == pytest.approx(0.5623 / 2, abs=0.01)
    assert figures["validation_accuracy"] == pytest.approx(0.875)
    learner.policy.train()
    with pytest.raises(ValueError):
        learner.validate([rows(np.ones((1, 3)), np.zeros(1))])
    assert learner.policy.training, "a batch that cannot be read leaves the policy as it was"


def test_noise_free_actions_stop_at_the_smallest_deviation() -> None:
    policy = make_policy(SPEC)
    learner = Cloner(policy, cloning(min_log_std=-1.5))
    state = np.linspace(-1, 1, 64)
    for _ in range(400):
        learner.epoch([rows(state, 0.5 * state)], 1e-2)
    assert policy.head.log_std.item() == pytest.approx(-1.5, abs=0.02)  # type: ignore[operator]


def test_a_loss_that_is_not_finite_stops_with_its_rows() -> None:
    policy = make_policy(SPEC)
    learner = Cloner(policy, cloning())
    before = parameters(policy)
    with pytest.raises(NonFiniteError, match="cloning loss is nan") as caught:
        learner.epoch([rows(np.array([np.nan]), np.array([0.0]))], 1e-3)
    assert caught.value.batch is not None
    assert np.isnan(caught.value.batch["observation.state"]).all()
    assert all(torch.equal(before[name], value) for name, value in parameters(policy).items())
    critics = Critics(make_policy(SPEC), off_policy(update="awac"))
    with pytest.raises(NonFiniteError, match="on 2 steps"):
        critics.update(rows(np.zeros(2), np.zeros(2), np.array([np.inf, 0.0])), np.random.default_rng(0), learning_rate=1e-3)
    # Nor does a finite loss step any group of an objective if the gradient of one is not finite.
    policy = make_policy(SPEC, distribution="squashed")
    soft = Critics(policy, replace(off_policy(update="sac", fresh=True), micro_batch_size=1))
    assert isinstance(soft.learner.executor, LocalExecutor)
    entropy_coef = soft.networks.log_entropy_coef.detach().clone()
    before = parameters(policy)
    next(policy.actor.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteError, match=r"loss of policy and entropy is -?\d.* norm nan and \d"):
        soft.update(rows(np.zeros(2), np.zeros(2)), np.random.default_rng(0), learning_rate=1e-3)
    assert all(torch.equal(before[name], value) for name, value in parameters(policy).items())
    assert torch.equal(soft.networks.log_entropy_coef, entropy_coef)


# ---- critics --------------------------------------------------------------------------------------------------------


def bandit(rng: np.random.Generator, size: int) -> Transitions:
    """One step; the reward 1 - (a - 0.6 s)² is largest at a = 0.6 s, and recorded actions are uniform."""
    state, action = rng.uniform(-1, 1, size), rng.uniform(-1, 1, size)
    return rows(state, action, 1.0 - np.square(action - 0.6 * state))


@pytest.mark.parametrize(
    ("update", "distribution", "num_steps"),
    [
        ("iql", "gaussian", 500),
        ("awac", "gaussian", 300),
        pytest.param("awac", "squashed", 300, marks=pytest.mark.slow),
        ("sac", "squashed", 300),
    ],
)
def test_the_best_action_of_a_bandit(update: str, distribution: str, num_steps: int) -> None:
    """Behaviour cloning would answer 0, the mean of what was recorded."""
    options = {"update": update, "fresh": update == "sac", "temperature": 0.05, "expectile": 0.9, "target_entropy": -2.0}
    policy = make_policy(SPEC, distribution=distribution, hidden_sizes=(32, 32))
    learner = Critics(policy, off_policy(**options))
    rng = np.random.default_rng(1)
    for number in range(num_steps):
        learner.update(bandit(rng, 64), rng, learning_rate=1e-2 if number < 0.7 * num_steps else 1e-3)
    state = torch.linspace(-0.9, 0.9, 20)[:, None]
    with torch.no_grad():
        mode = policy.act({"state": state}, None).action
        value = learner.networks.critics(state, 0.6 * state).mean(0)
    torch.testing.assert_close(mode, 0.6 * state, atol=0.13, rtol=0.0)
    torch.testing.assert_close(value, torch.ones(20), atol=0.06, rtol=0.0)


def test_weights_of_choices() -> None:
    """Three choices worth 0, 1 and 0.5, recorded equally often: the policy takes the best, and the critics know all."""
    policy = make_policy(CHOICES)
    learner = Critics(policy, off_policy(update="awac", fresh=False, temperature=0.1))
    rng = np.random.default_rng(0)
    for _ in range(200):
        action = rng.integers(3, size=64)
        learner.update(rows(np.zeros(64), action, np.array([0.0, 1.0, 0.5])[action]), rng, learning_rate=1e-2)
    with torch.no_grad():
        assert policy.act({"state": torch.zeros(1, 1)}, None).action.item() == 1
        values = learner.networks.critics(torch.zeros(3, 1), torch.arange(3)[:, None]).mean(0)
    torch.testing.assert_close(values, torch.tensor([0.0, 1.0, 0.5]), atol=0.05, rtol=0.0)


def test_a_reward_that_goes_on_is_worth_its_geometric_sum() -> None:
    """Reward 1 for ever with γ = 0.8: Q = 1 / (1 - 0.8) = 5, whatever is done."""
    learner = Critics(make_policy(SPEC), off_policy(update="iql", fresh=False, target_rate=0.1))
    rng = np.random.default_rng(0)
    for _ in range(400):
        learner.update(rows(rng.uniform(-1, 1, 64), rng.uniform(-1, 1, 64), np.ones(64), discount=0.8), rng, learning_rate=1e-2)
    with torch.no_grad():
        values = learner.networks.critics(torch.zeros(5, 1), torch.linspace(-1, 1, 5)[:, None])
    torch.testing.assert_close(values, torch.full((2, 5), 5.0), atol=0.25, rtol=0.0)


def test_the_policy_waits_where_it_is_told_to_and_targets_follow() -> None:
    policy = make_policy(SPEC, distribution="squashed")
    learner = Critics(policy, off_policy(target_rate=0.25))
    before, old = parameters(policy), learner.networks.targets.weights[0].clone()
    rng = np.random.default_rng(0)
    learner.update(bandit(rng, 32), rng, learning_rate=1e-2, with_policy=False)
    assert all(torch.equal(before[name], value) for name, value in parameters(policy).items())
    torch.testing.assert_close(learner.networks.targets.weights[0], 0.75 * old + 0.25 * learner.networks.critics.weights[0])
    learner.update(bandit(rng, 32), rng, learning_rate=1e-2)
    moved = {name.split(".")[0] for name, value in parameters(policy).items() if not torch.equal(before[name], value)}
    assert moved == {"actor", "head"}


def test_the_trunk_of_images_learns_from_the_critics_alone() -> None:
    policy = make_policy(
        IMAGES, encoder="cnn", observation_key="rgb", hidden_sizes=(16,), cnn_channels=(4,), cnn_kernels=(4,), cnn_strides=(2,)
    )
    learner = Critics(policy, off_policy(update="iql", fresh=False))
    rng = np.random.default_rng(0)
    seen = {"rgb": rng.integers(0, 256, (32, 16, 16, 3), np.uint8)}
    data = Transitions(seen, rng.uniform(-1, 1, (32, 1)).astype(np.float32), np.ones(32, np.float32), np.zeros(32, np.float32), seen)
    before = parameters(policy)
    learner.update(data, rng, learning_rate=1e-3)
    moved = {name.split(".")[0] for name, value in parameters(policy).items() if not torch.equal(before[name], value)}
    assert moved == {"trunk", "actor", "head", "critic"}
    executor = learner.learner.executor
    assert isinstance(executor, LocalExecutor)
    assert not [name for name in executor.optimizers["policy"].parameters if name.startswith("trunk")]


def test_entropy_in_the_target_or_not() -> None:
    """The same action is drawn for both: the targets differ by -α log π of it, α = 0.5."""
    values = []
    for counted in (True, False):
        policy = make_policy(SPEC, distribution="squashed")
        torch.manual_seed(0)
        learner = Critics(policy, off_policy(entropy_in_target=counted, init_entropy_coef=0.5))
        rows_ = transition_rows(learner.networks, bandit(np.random.default_rng(0), 16), np.random.default_rng(1), with_policy=False)
        values.append(CriticsObjective(learner.networks, learner.config).next_value(learner.networks, rows_).detach())
    state = torch.from_numpy(bandit(np.random.default_rng(0), 16).next_observation["state"])
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((16, 1), np.float32))
    log_prob = policy.act({"state": state}, noise).log_prob.sum(-1).detach()
    torch.testing.assert_close(values[0] - values[1], -0.5 * log_prob)


@pytest.mark.parametrize("update", ["sac", "iql", "awac"])
def test_critics_continue_exactly(update: str) -> None:
    config = off_policy(update=update, fresh=update == "sac", num_critics=4)
    learners = []
    for seed in (0, 1):
        policy = make_policy(SPEC, distribution="squashed")
        torch.manual_seed(seed)
        learners.append(Critics(policy, config))
    first, second = learners
    for number in range(3):
        first.update(bandit(np.random.default_rng(number), 32), np.random.default_rng(number), learning_rate=1e-3)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_tensors(first.state_tensors())
    figures = [one.update(bandit(np.random.default_rng(9), 32), np.random.default_rng(9), learning_rate=1e-3) for one in learners]
    assert figures[0] == figures[1]
    for name, value in first.state_tensors().items():
        assert torch.equal(value, second.state_tensors()[name]), name
    # A checkpoint of October 2026 holds the entropy's coefficient as a number.
    old = {name: value.squeeze() if "log_entropy_coef" in name else value for name, value in first.state_tensors().items()}
    second.load_state_tensors(old)
    assert torch.equal(second.networks.log_entropy_coef, first.networks.log_entropy_coef)
    smaller = Critics(
        make_policy(SPEC, distribution="squashed"), off_policy(update=update, fresh=update == "sac", num_critics=4, hidden_sizes=(8,))
    )
    with pytest.raises(IncompatibleCheckpointError, match="critics"):
        smaller.load_state_tensors(first.state_tensors())
