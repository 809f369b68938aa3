from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from embodied_rl.algorithms.kl import kl_estimate, kl_loss
from embodied_rl.algorithms.step_rewards import KlTerm
from embodied_rl.config import KlConfig


def double(*values: object) -> torch.Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def test_loss_by_hand() -> None:
    # d = 0.5 and -1: k2 = 0.125 and 0.5; k3 = e^-0.5 - 1 + 0.5 and e - 1 - 1.
    log_prob, reference = double(-1.0, -2.0), double(-1.5, -1.0)
    assert kl_loss(log_prob=log_prob, reference_log_prob=reference, kind="k2")[0].item() == pytest.approx((0.125 + 0.5) / 2)
    loss, metrics = kl_loss(log_prob=log_prob, reference_log_prob=reference)
    assert loss.item() == pytest.approx((math.exp(-0.5) - 0.5 + math.e - 2) / 2)
    assert metrics["kl"].item() == loss.item()


@pytest.fixture
def categorical() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of pi and the reference, and the probabilities of pi: expectations are sums over all actions, without sampling."""
    logits, reference = double([0.3, -0.4, 1.1, 0.0]), double([-0.2, 0.5, 0.4, 0.1])
    return logits, reference.log_softmax(-1), logits.softmax(-1)


def expected_gradient(categorical: tuple[torch.Tensor, ...], kind: str, straight_through: bool) -> tuple[float, torch.Tensor]:
    logits, reference, probability = categorical
    leaf = logits.clone().requires_grad_()
    # Sum over actions of pi(a) · (estimate of a), pi(a) as constants, as if each were sampled that often.
    total = torch.zeros((), dtype=torch.float64)
    for action in range(4):
        loss, _ = kl_loss(
            log_prob=leaf.log_softmax(-1)[action : action + 1],
            reference_log_prob=reference[action : action + 1],
            kind=kind,  # type: ignore[arg-type]
            straight_through=straight_through,
        )
        total = total + probability[action] * loss
    total.backward()
    assert leaf.grad is not None
    return total.item(), leaf.grad


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor, *, forward: bool) -> tuple[float, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    pi, ref = Categorical(logits=leaf), Categorical(logits=reference)
    divergence = kl_divergence(ref, pi) if forward else kl_divergence(pi, ref)
    divergence.backward()
    assert leaf.grad is not None
    return divergence.item(), leaf.grad


def test_k2_has_the_gradient_of_the_divergence(categorical: tuple[torch.Tensor, ...]) -> None:
    _, gradient = expected_gradient(categorical, "k2", False)
    torch.testing.assert_close(gradient, exact_gradient(categorical[0], categorical[1], forward=False)[1])


def test_k3_has_the_gradient_of_the_other_divergence(categorical: tuple[torch.Tensor, ...]) -> None:
    value, gradient = expected_gradient(categorical, "k3", False)
    assert value == pytest.approx(exact_gradient(categorical[0], categorical[1], forward=False)[0])
    torch.testing.assert_close(gradient, exact_gradient(categorical[0], categorical[1], forward=True)[1])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_has_an_unbiased_value_and_gradient(categorical: tuple[torch.Tensor, ...], kind: str) -> None:
    value, gradient = expected_gradient(categorical, kind, True)
    exact, expected = exact_gradient(categorical[0], categorical[1], forward=False)
    assert value == pytest.approx(exact)
    torch.testing.assert_close(gradient, expected)


def test_k1_as_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient E"):
        kl_loss(log_prob=torch.zeros(2), reference_log_prob=torch.zeros(2), kind="k1")


def test_masked_and_far_entries() -> None:
    log_prob = torch.tensor([-1.0, float("nan"), -1000.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -1.0], requires_grad=True)
    loss, metrics = kl_loss(log_prob=log_prob, reference_log_prob=reference, mask=torch.tensor([True, False, True]))
    loss.backward()
    # d = 0.5 and -999. The slope 1 - e^-d is -10 at d = -ln 11, where k3 = 10 - ln 11; from there on it stays -10.
    assert loss.item() == pytest.approx((math.exp(-0.5) - 0.5 + 10 - math.log(11) + 10 * (999 - math.log(11))) / 2)
    assert torch.isfinite(metrics["kl"])
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([(1 - math.exp(-0.5)) / 2, 0.0, -5.0])
    assert reference.grad is None


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [-700.0, -43.0, -10.0, -2.3978, 0.0, 0.7, 43.0, 700.0])
def test_gradients_are_finite_differences_wherever_the_entry_lies(kind: str, d: float) -> None:
    leaf = double([d]).requires_grad_()
    (gradient,) = torch.autograd.grad(kl_estimate(log_prob=leaf, reference_log_prob=double([0.0]), kind=kind).sum(), leaf)
    step = 1e-5
    ends = [float(kl_estimate(log_prob=double([d + e]), reference_log_prob=double([0.0]), kind=kind)) for e in (step, -step)]
    # Rounding of values up to 250,000 leaves about 1e-5 of the difference.
    assert gradient.item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-4, rel=1e-6)
    assert abs(gradient.item()) == pytest.approx({"k1": 1.0, "k2": abs(d), "k3": abs(1 - math.exp(-max(d, -math.log(11))))}[kind])


def test_one_far_token_does_not_take_over() -> None:
    far = {kind: float(kl_estimate(log_prob=double([-10.0]), reference_log_prob=double([0.0]), kind=kind)) for kind in ("k1", "k2", "k3")}
    assert far == {"k1": -10.0, "k2": 50.0, "k3": pytest.approx(10 - math.log(11) + 10 * (10 - math.log(11)))}
    # Near the reference it is k3 itself, and continuous with its slope where the tangent begins.
    edge = -math.log(11)
    for d in (edge - 1e-7, edge, edge + 1e-7):
        value = float(kl_estimate(log_prob=double([d]), reference_log_prob=double([0.0]), kind="k3"))
        assert value == pytest.approx(math.exp(-d) - 1 + d, abs=1e-12)


def test_adaptive_coefficient_by_hand() -> None:
    coefficient = KlTerm(KlConfig(0.2, target=6.0, horizon=10_000))
    # 9 / 6 - 1 = 0.5 is clipped to 0.2: factor 1 + 0.2 · 512 / 10000 = 1.01024.
    assert coefficient.update(9.0, 512) == pytest.approx(0.2 * 1.01024)
    # 5.4 / 6 - 1 = -0.1: factor 1 - 0.1 · 1000 / 10000 = 0.99.
    assert coefficient.update(5.4, 1000) == pytest.approx(0.2 * 1.01024 * 0.99)
    assert coefficient.update(6.0, 1000) == pytest.approx(0.2 * 1.01024 * 0.99)


def test_an_update_of_any_size_moves_the_coefficient_by_a_fifth_at_most() -> None:
    coefficient = KlTerm(KlConfig(0.1, target=1.0, horizon=10_000))
    assert coefficient.update(0.0, 60_000) == pytest.approx(0.08)
    assert coefficient.update(math.inf, 10**12) == pytest.approx(0.096)
    # A divergence that is not known changes nothing.
    assert coefficient.update(math.nan, 60_000) == pytest.approx(0.096)
    # It falls for as long as the divergence is below its target, and rises again.
    for _ in range(50):
        coefficient.update(0.0, 60_000)
    assert 0 < coefficient.coefficient < 1e-5
    assert coefficient.update(9.0, 60_000) > coefficient.coefficient / 1.21


def test_adaptive_coefficient_finds_the_target() -> None:
    # A policy whose divergence falls as the coefficient grows: KL = 1 / beta. The target 4 is met at beta = 0.25.
    coefficient = KlTerm(KlConfig(3.0, target=4.0, horizon=1000))
    for _ in range(400):
        coefficient.update(1.0 / coefficient.coefficient, 200)
    assert coefficient.coefficient == pytest.approx(0.25, rel=1e-3)


def test_coefficients_survive_json() -> None:
    first = KlTerm(KlConfig(0.3, target=0.1, horizon=100))
    first.update(0.07, 7)
    second = KlTerm(KlConfig(0.9, target=0.1, horizon=100))
    second.coefficient = json.loads(json.dumps(first.coefficient))
    assert second.coefficient == first.coefficient
    assert KlTerm(KlConfig(0.05)).update(100.0, 10**9) == 0.05, "without a target it stays"
