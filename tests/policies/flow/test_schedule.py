from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied_rl.policies.flow.policy import Transition, initial_log_prob, mix, ode_step, sde_sigma, sde_step, step_time
from tests.policies.flow.closed_forms import normal_velocity, slope, variance

F64 = torch.float64


def full(value: float, rows: int = 1) -> Tensor:
    return torch.full((rows,), value, dtype=F64)


def test_one_stochastic_step_by_hand() -> None:
    x, v = torch.full((1, 1, 1), 1.0, dtype=F64), torch.full((1, 1, 1), 2.0, dtype=F64)
    step = sde_step(x, v, full(0.5), 0.1, 0.5)
    # σ = 0.5·sqrt(0.5/0.5) = 0.5; action 1 - 0.5·2 = 0; noise 1 + 0.5·2 = 2;
    # mean = 0·0.6 + 2·(0.4 - 0.25·0.1/(2·0.5)) = 2·0.375 = 0.75; std = 0.5·sqrt(0.1).
    assert step.mean.item() == pytest.approx(0.75)
    assert step.std.item() == pytest.approx(0.5 * math.sqrt(0.1))
    assert ode_step(x, v, 0.1).item() == pytest.approx(0.8)


def test_noise_at_the_first_time_is_finite() -> None:
    # At t = 1 the denominator is that of t = 1 - δ: σ = λ/sqrt(δ), and the step's deviation is λ itself.
    assert sde_sigma(full(1.0), 0.1, 0.5).item() == pytest.approx(0.5 / math.sqrt(0.1))
    one = torch.ones(1, 1, 1, dtype=F64)
    assert sde_step(one, one, full(1.0), 0.1, 0.5).std.item() == pytest.approx(0.5)
    # One step later: σ = λ·sqrt(0.9/0.1) = 3λ.
    assert sde_sigma(full(0.9), 0.1, 0.5).item() == pytest.approx(1.5)


@pytest.mark.parametrize("t", [0.15, 0.5, 0.85])
def test_the_drift_is_the_velocity_corrected_by_half_the_score(t: float) -> None:
    """Anderson's formula with the score of the closed form's density: dx = (v - σ²/2·∇log p) dt backward."""
    mean, std, delta = torch.tensor([[0.4, -1.0]], dtype=F64), torch.tensor([[0.3, 1.5]], dtype=F64), 0.05
    x = torch.randn(7, 1, 2, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_density = Normal((1.0 - t) * mean, variance(full(t), std).sqrt()).log_prob(x)
    (score,) = torch.autograd.grad(log_density.sum(), x)
    velocity = normal_velocity(mean, std)(x, full(t, 7))
    step = sde_step(x, velocity, full(t, 7), delta, 0.7)
    sigma = 0.7 * math.sqrt(t / (1.0 - t))
    torch.testing.assert_close(step.mean, x - velocity * delta + 0.5 * sigma**2 * score * delta)


def test_without_noise_it_is_the_ordinary_step() -> None:
    x, v = torch.randn(3, 2, 2, dtype=F64), torch.randn(3, 2, 2, dtype=F64)
    torch.testing.assert_close(sde_step(x, v, full(0.3, 3), 0.1, 0.0).mean, ode_step(x, v, 0.1))


def moments(num_steps: int, noise_level: float, mean: float, std: float) -> tuple[float, float]:
    """Mean and variance at t = 0 of the discretised process, by the recursion of a linear map x → a·x + b with noise: no sampling."""
    centre, spread = 0.0, 1.0
    s = torch.tensor([[std]], dtype=F64)
    velocity = normal_velocity(torch.tensor([[mean]], dtype=F64), s)
    for index in range(num_steps):
        t = 1.0 - index / num_steps
        at = torch.tensor([[[0.0]], [[1.0]]], dtype=F64)
        step = sde_step(at, velocity(at, full(t, 2)), full(t, 2), 1.0 / num_steps, noise_level)
        offset, gain = step.mean[0].item(), (step.mean[1] - step.mean[0]).item()
        centre, spread = gain * centre + offset, gain**2 * spread + step.std[0].item() ** 2
    return centre, spread


@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.7])
def test_marginals_are_those_of_the_ordinary_equation(noise_level: float) -> None:
    mean, spread = moments(4000, noise_level, 0.7, 0.4)
    assert mean == pytest.approx(0.7, abs=2e-3)
    assert spread == pytest.approx(0.16, rel=4e-3)
    # With few steps Euler's method makes actions too narrow, by 0.045 with ten; noise makes that smaller, never larger.
    for few in (10, 20, 50):
        ordinary, stochastic = (moments(few, level, 0.7, 0.4)[1] - 0.16 for level in (0.0, noise_level))
        assert ordinary <= stochastic < 0


def test_samples_have_the_recursions_moments() -> None:
    generator, rows, num_steps = torch.Generator().manual_seed(3), 40_000, 20
    velocity = normal_velocity(torch.tensor([[0.7]], dtype=F64), torch.tensor([[0.4]], dtype=F64))
    x = torch.randn(rows, 1, 1, dtype=F64, generator=generator)
    for index in range(num_steps):
        t = full(1.0 - index / num_steps, rows)
        x = sde_step(x, velocity(x, t), t, 1.0 / num_steps, 0.5).sample(torch.randn(x.shape, dtype=F64, generator=generator))
    mean, spread = moments(num_steps, 0.5, 0.7, 0.4)
    # Five standard errors: sqrt(var/n), and var·sqrt(2/n).
    assert x.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(spread / rows))
    assert x.var().item() == pytest.approx(spread, rel=5 * math.sqrt(2 / rows))


def test_the_flow_maps_noise_linearly() -> None:
    mean, std = torch.tensor([[0.5, -0.2]], dtype=F64), torch.tensor([[0.3, 2.0]], dtype=F64)
    noise = torch.randn(5, 1, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    velocity, x, num_steps = normal_velocity(mean, std), noise, 4000
    for index in range(num_steps):
        x = ode_step(x, velocity(x, full(1.0 - index / num_steps, 5)), 1.0 / num_steps)
    torch.testing.assert_close(x, mean + std * noise, atol=3e-3, rtol=0)


def test_the_normals_are_torchs() -> None:
    mean, std, x = torch.randn(4, 3, 2), torch.rand(4, 3, 2) + 0.1, torch.randn(4, 3, 2)
    peer = Normal(mean, std)
    torch.testing.assert_close(Transition(mean, std).log_prob(x), peer.log_prob(x))
    torch.testing.assert_close(Transition(mean, std).entropy(), peer.entropy())
    torch.testing.assert_close(initial_log_prob(x), Normal(0.0, 1.0).log_prob(x))
    torch.testing.assert_close(Transition(mean, std).sample(x), mean + std * x)


def test_ends_of_the_mixture_and_times() -> None:
    action, noise = torch.full((3, 1, 1), 2.0), torch.full((3, 1, 1), 10.0)
    assert mix(action, noise, torch.tensor([0.0, 0.25, 1.0])).flatten().tolist() == [2.0, 4.0, 10.0]
    assert step_time(torch.tensor([0, 3, 9]), 10).tolist() == pytest.approx([1.0, 0.7, 0.1])


def test_the_slope_of_a_standard_normal_target() -> None:
    # s = 1: v = (2t - 1)/(t² + (1 - t)²)·x, -1 at the action's end, 1 at the noise's.
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    assert slope(t, torch.ones((), dtype=F64)).tolist() == pytest.approx([-1.0, 0.0, 1.0])
