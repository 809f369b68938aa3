from __future__ import annotations

import torch
from torch.distributions import Normal

from embodied_rl.policies.flow.policy import log_density
from tests.policies.flow.closed_forms import mixture_velocity, normal_velocity

F64 = torch.float64


def test_density_of_a_normal_target() -> None:
    mean, std = torch.tensor([[0.5, -1.0], [0.0, 2.0]], dtype=F64), torch.tensor([[0.3, 1.0], [0.7, 1.4]], dtype=F64)
    action = mean + std * torch.randn(6, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = Normal(mean, std).log_prob(action).sum((-1, -2))
    torch.testing.assert_close(log_density(normal_velocity(mean, std), action, num_steps=64), expected, atol=1e-4, rtol=0)


def test_the_integration_is_of_fourth_order() -> None:
    mean, std = torch.tensor([[0.5]], dtype=F64), torch.tensor([[0.6]], dtype=F64)
    action = torch.tensor([[[1.3]]], dtype=F64)
    exact = Normal(mean, std).log_prob(action).item()
    coarse, fine = (abs(log_density(normal_velocity(mean, std), action, num_steps=n).item() - exact) for n in (8, 16))
    # Half the step, a sixteenth of the error, with some room.
    assert fine < coarse / 10


def test_density_of_two_modes() -> None:
    means = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.5]]], dtype=F64)
    action = torch.tensor([[[1.1, 0.2]], [[-0.7, 0.4]], [[0.0, 0.0]]], dtype=F64)
    parts = torch.stack([Normal(mean, torch.tensor(0.4, dtype=F64)).log_prob(action).sum((-1, -2)) for mean in means])
    expected = torch.logsumexp(parts, dim=0) - torch.log(torch.tensor(2.0, dtype=F64))
    torch.testing.assert_close(log_density(mixture_velocity(means, 0.4), action, num_steps=64), expected, atol=1e-3, rtol=0)
