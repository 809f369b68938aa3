"""Keys of the terms beside the policy's loss, through the one place that puts them together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied_rl.config import AlgorithmConfig, GroupsConfig, KlConfig
from embodied_rl.learning.objectives import PolicyLoss, Terms

GRPO = AlgorithmConfig(advantage="grpo", groups=GroupsConfig(), value_coef=1.0)


def total(
    config: AlgorithmConfig, log_prob: torch.Tensor, inputs: dict[str, torch.Tensor], value: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss with advantages of 0: what stands beside the policy's."""
    terms = Terms(log_prob, None, torch.zeros_like(log_prob), None, value)
    given = {"advantage": torch.zeros_like(log_prob), "old_log_prob": log_prob.detach(), "behaviour_log_prob": log_prob.detach(), **inputs}
    return PolicyLoss(config)(given, terms, {"entries": 2.0, "values": 2.0, "kl_coef": 0.1})[0]


def test_huber_is_linear_from_its_delta_on() -> None:
    value = torch.tensor([0.5, 5.0], requires_grad=True)
    inputs = {"returns": torch.zeros(2), "value": torch.zeros(2)}
    huber = replace(GRPO, value_loss="huber", huber_delta=2.0)
    # e^2 = 0.25 within the delta, 2 (2 · 5 - 2) = 16 beyond; slopes 2 e = 1 and 2 delta = 4, over two.
    loss = total(huber, torch.zeros(2), inputs, value)
    assert loss.item() == pytest.approx((0.25 + 16) / 2)
    assert torch.autograd.grad(loss, value)[0].tolist() == pytest.approx([0.5, 2.0])
    assert total(GRPO, torch.zeros(2), inputs, value).item() == pytest.approx((0.25 + 25) / 2)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_has_the_gradient_of_k2(kind: str) -> None:
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    config = replace(GRPO, kl=KlConfig(coef=0.1, kind=kind, straight_through=True))
    loss = total(config, log_prob, {"reference_log_prob": torch.tensor([-1.5, -1.0])})
    # d = 0.5 and -1; the gradient of k2 is d, times the coefficient, over two.
    assert torch.autograd.grad(loss, log_prob)[0].tolist() == pytest.approx([0.1 * 0.5 / 2, 0.1 * -1.0 / 2])
