"""Losses and targets of critics of actions: by hand, against closed forms, and on a tabular problem whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.offline_rl import (
    advantage_weights,
    critic_loss,
    entropy_coef_loss,
    expectile_loss,
    smallest_of,
    soft_policy_loss,
    soft_value,
    td_target,
)


def test_targets_by_hand() -> None:
    target = td_target(
        reward=torch.tensor([1.0, 2.0, 3.0]), discount=torch.tensor([0.9, 0.0, 0.81]), next_value=torch.tensor([10.0, float("nan"), 2.0])
    )
    torch.testing.assert_close(target, torch.tensor([10.0, 2.0, 4.62]))
    value = torch.ones(1, requires_grad=True)
    assert not td_target(reward=torch.ones(1), discount=torch.ones(1), next_value=value).requires_grad
    with pytest.raises(ValueError, match=r"All must be \[B\]"):
        td_target(reward=torch.ones(3), discount=torch.ones(3), next_value=torch.ones(3, 1))


def test_the_smallest_of_some_critics() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, 3.0], [0.0, 9.0]])
    torch.testing.assert_close(smallest_of(values), torch.tensor([0.0, 3.0]))
    torch.testing.assert_close(smallest_of(values, torch.tensor([0, 1])), torch.tensor([1.0, 3.0]))


def test_critic_loss_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    loss, metrics = critic_loss(values=values, target=torch.tensor([2.0, 4.0]))
    # (1 + 4 + 1 + 4) / 4; standard deviations between critics 1 and 0.
    assert loss.item() == pytest.approx(2.5)
    assert metrics["q_mean"].item() == pytest.approx(2.0)
    assert metrics["q_spread"].item() == pytest.approx(0.5)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[-0.5, -1.0], [0.5, -1.0]]))
    with pytest.raises(ValueError, match=r"values must be \[E, B\]"):
        critic_loss(values=values, target=torch.zeros(3))


def test_expectile_loss_by_hand() -> None:
    value = torch.zeros(2, requires_grad=True)
    loss, _ = expectile_loss(value=value, target=torch.tensor([2.0, -1.0]), expectile=0.9)
    # 0.9 · 4 and 0.1 · 1
    assert loss.item() == pytest.approx((3.6 + 0.1) / 2)
    loss.backward()
    torch.testing.assert_close(value.grad, torch.tensor([-1.8, 0.1]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        expectile_loss(value=value, target=value, expectile=1.0)


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.7, 0.95])
def test_the_minimum_is_the_expectile(expectile: float) -> None:
    """Of a standard uniform variable m solves τ E[(X - m)+] = (1 - τ) E[(m - X)+]: τ (1 - m)² = (1 - τ) m² (Newey and Powell 1987)."""
    sample = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    expected = math.sqrt(expectile) / (math.sqrt(expectile) + math.sqrt(1.0 - expectile))
    value = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        loss, _ = expectile_loss(value=value.expand_as(sample), target=sample, expectile=expectile)
        (gradient,) = torch.autograd.grad(loss, value)
        with torch.no_grad():
            value -= gradient
    assert value.item() == pytest.approx(expected, abs=1e-4)


def test_weights_by_hand_and_without_overflow() -> None:
    advantage = torch.tensor([0.0, 0.5, -1.0, 1e6])
    weight, metrics = advantage_weights(advantage=advantage, temperature=0.5, max_weight=100.0)
    torch.testing.assert_close(weight, torch.tensor([1.0, math.e, math.exp(-2.0), 100.0]), rtol=1e-5, atol=0.0)
    assert metrics["weight_bounded_fraction"].item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match="temperature"):
        advantage_weights(advantage=advantage, temperature=0.0, max_weight=1.0)


def test_the_soft_policy_of_a_gaussian_is_the_known_one() -> None:
    """Q(a) = -a²/2 and α = 0.3: the best normal policy has mean 0 and variance α; its loss α log π - Q is then minimal."""
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(20_000))
    mean, log_std = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    for _ in range(150):
        action = mean + noise * log_std.exp()
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        loss, _ = soft_policy_loss(values=-0.5 * action**2, log_prob=log_prob, entropy_coef=0.3)
        gradients = torch.autograd.grad(loss, (mean, log_std))
        with torch.no_grad():
            mean -= 0.3 * gradients[0]
            log_std -= 0.3 * gradients[1]
    assert mean.item() == pytest.approx(0.0, abs=0.02)
    assert math.exp(2 * log_std.item()) == pytest.approx(0.3, rel=0.03)


def test_soft_value_and_entropy_coefficient_by_hand() -> None:
    value = soft_value(value=torch.tensor([1.0]), log_prob=torch.tensor([-2.0]), entropy_coef=0.5)
    assert value.item() == pytest.approx(2.0)
    log_coef = torch.tensor(math.log(0.2), requires_grad=True)
    # Entropy 1.5 with a target of 2: too small, so that descending raises the coefficient.
    loss, metrics = entropy_coef_loss(log_coef=log_coef, log_prob=torch.tensor([-1.0, -2.0]), target_entropy=2.0)
    assert loss.item() == pytest.approx(0.2 * (1.5 - 2.0))
    loss.backward()
    assert log_coef.grad is not None
    assert log_coef.grad.item() == pytest.approx(-0.1)
    assert metrics["entropy_coef"].item() == pytest.approx(0.2)


def test_implicit_q_learning_solves_a_chain_from_random_steps() -> None:
    """States 0 … 4; right moves on, left stays; a reward of 1 and the end on leaving 4. The best policy has V(s) = 0.9^(4 - s).

    Tables learn from every (state, action) equally often: with a high expectile V goes to the better action's value, although the data
    are of a policy that moves half of the time; its own value is lower by far. Advantages then tell right from left.
    """
    gamma, states = 0.9, torch.arange(5)
    state, right = states.repeat_interleave(2), torch.tensor([0, 1]).repeat(5)
    reward = ((state == 4) & (right == 1)).float()
    following = torch.where(right == 1, (state + 1).clamp(max=4), state)
    discount = torch.where(reward > 0, 0.0, gamma)
    q, v = torch.zeros(5, 2, requires_grad=True), torch.zeros(5, requires_grad=True)
    for _ in range(1000):
        value_part, _ = expectile_loss(value=v[state], target=q[state, right], expectile=0.99)
        target = td_target(reward=reward, discount=discount, next_value=v[following])
        q_part, _ = critic_loss(values=q[state, right][None], target=target)
        gradients = torch.autograd.grad(value_part + q_part, (q, v))
        with torch.no_grad():
            q -= 5.0 * gradients[0]
            v -= 5.0 * gradients[1]
    best = gamma ** (4 - states).float()
    torch.testing.assert_close(q[:, 1].detach(), best, atol=0.02, rtol=0.0)
    # A random walk would be worth (γ/2) / (1 - γ/2) = 0.818 of its successor at each step.
    assert (v.detach() > 0.93 * best).all()
    weight, _ = advantage_weights(advantage=(q - v[:, None]).flatten(), temperature=0.02, max_weight=100.0)
    assert (weight.view(5, 2)[:, 1] > weight.view(5, 2)[:, 0]).all()
