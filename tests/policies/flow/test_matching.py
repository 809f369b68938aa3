from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied_rl.policies.flow.policy import flow_matching_loss
from tests.policies.flow.closed_forms import normal_velocity


def constant(value: float) -> object:
    return lambda x, t: torch.full_like(x, value)


def test_loss_by_hand_and_mask() -> None:
    # ε - a: row 0 [3 - 1, 0 - 2] = [2, -2]; the velocity says 1: errors 1 and 9.
    action, noise = torch.tensor([[[1.0], [2.0]], [[1.0], [math.nan]]]), torch.tensor([[[3.0], [0.0]], [[1.0], [0.0]]])
    t = torch.tensor([0.5, 0.5])
    mask = torch.tensor([[True, True], [True, False]])
    # Row 1: ε - a = 0, error 1; the masked NaN is not seen.
    assert flow_matching_loss(constant(1.0), action, noise, t, mask).tolist() == [5.0, 1.0]  # type: ignore[arg-type]
    assert flow_matching_loss(constant(1.0), action[:1], noise[:1], t[:1]).tolist() == [5.0]  # type: ignore[arg-type]
    none = flow_matching_loss(constant(1.0), action, noise, t, torch.zeros_like(mask))  # type: ignore[arg-type]
    assert none.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("t", [0.2, 0.6])
def test_the_true_velocity_is_the_best(t: float) -> None:
    """Its loss is Var(ε - a | x_t) = 1 + s² - (t - (1 - t)s²)²/(t² + (1 - t)²s²), and any other's is larger."""
    generator, rows, mean, std = torch.Generator().manual_seed(0), 100_000, 0.3, 0.5
    action = mean + std * torch.randn(rows, 1, 1, generator=generator)
    noise, times = torch.randn(rows, 1, 1, generator=generator), torch.full((rows,), t)
    velocity = normal_velocity(torch.tensor([[mean]]), torch.tensor([[std]]))
    expected = 1 + std**2 - (t - (1 - t) * std**2) ** 2 / (t**2 + (1 - t) ** 2 * std**2)
    assert flow_matching_loss(velocity, action, noise, times).mean().item() == pytest.approx(expected, rel=5 * math.sqrt(2 / rows))

    def off(x: Tensor, at: Tensor) -> Tensor:
        return velocity(x, at) + 0.3

    # A constant error c adds c².
    assert flow_matching_loss(off, action, noise, times).mean().item() == pytest.approx(expected + 0.09, rel=0.03)
