from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from embodied_rl.algorithms.aggregation import masked_mean
from embodied_rl.algorithms.kl import kl_estimate
from embodied_rl.algorithms.losses import (
    behaviour_cloning_loss,
    entropy_bonus,
    explained_variance,
    policy_gradient_loss,
    ppo_clip_loss,
    value_loss,
)


def tensors(*columns: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def test_clip_by_hand() -> None:
    ratio, advantage = tensors([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0])
    loss, metrics = ppo_clip_loss(log_prob=ratio.log(), old_log_prob=torch.zeros(5), advantage=advantage, clip_low=0.2, clip_high=0.3)
    # A > 0: the smaller of A r and A clip(r): 2*1.3, 2*0.5. A < 0: -2*1.5 (unclipped is worse), -2*0.8. Then 1*1.1.
    assert loss.item() == pytest.approx(-(2.6 - 3.0 + 1.0 - 1.6 + 1.1) / 5)
    assert metrics["clip_fraction"].item() == pytest.approx(4 / 5)
    # k3 = r - 1 - log r
    assert metrics["approx_kl"].item() == pytest.approx(np.mean([r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.1)]))


def test_dual_clip_bounds_negative_advantages_alone() -> None:
    ratio, advantage = tensors([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0])
    loss, _ = ppo_clip_loss(
        log_prob=ratio.log(), old_log_prob=torch.zeros(3), advantage=advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    # 10 is bounded by 3, 2 stays, and the positive one is clipped to 1.2.
    assert loss.item() == pytest.approx((3.0 + 2.0 - 1.2) / 3)


def test_ratio_cannot_overflow() -> None:
    log_prob = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, metrics = ppo_clip_loss(log_prob=log_prob, old_log_prob=torch.zeros(2), advantage=-torch.ones(2), clip_low=0.2, clip_high=0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(metrics["approx_kl"])
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()


def second_implementation(new: float, old: float, a: float, low: float, high: float, dual: float | None) -> float:
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


@pytest.mark.parametrize("dual", [None, 1.7])
def test_equals_a_loop_and_masked_entries_do_not_count(dual: float | None) -> None:
    rng = np.random.default_rng(0)
    new, old, a = rng.normal(size=(3, 6, 4))
    mask = rng.random((6, 4)) < 0.6
    expected = [second_implementation(new[i], old[i], a[i], 0.1, 0.3, dual) for i in map(tuple, np.argwhere(mask))]
    poisoned = torch.from_numpy(np.where(mask, new, np.nan)).requires_grad_()
    arguments = {
        "log_prob": poisoned,
        "old_log_prob": torch.from_numpy(old),
        "advantage": torch.from_numpy(a),
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": dual,
        "mask": torch.from_numpy(mask),
    }
    loss, metrics = ppo_clip_loss(**arguments)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(np.mean(expected))
    assert all(torch.isfinite(value) for value in metrics.values())
    assert ppo_clip_loss(**arguments, denominator=7.0)[0].item() == pytest.approx(np.sum(expected) / 7)  # type: ignore[arg-type]


def test_value_loss_by_hand() -> None:
    value, returns, old = tensors([1.0, 5.0, 3.0], [2.0, 2.0, 10.0], [1.0, 4.0, 0.0])
    assert value_loss(value=value, returns=returns)[0].item() == pytest.approx((1 + 9 + 49) / 3)
    # Clipped to old ± 0.5: 1 (error 1), 4.5 (6.25 < 9: the unclipped counts), 0.5 (9.5^2 > 7^2: the clipped counts)
    assert value_loss(value=value, returns=returns, old_value=old, clip=0.5)[0].item() == pytest.approx((1 + 9 + 90.25) / 3)


def test_entropy_is_subtracted() -> None:
    loss, metrics = entropy_bonus(entropy=torch.tensor([1.0, 3.0]))
    assert (loss.item(), metrics["entropy"].item()) == (-2.0, 2.0)


def test_kl_estimates_approach_the_closed_form() -> None:
    # q is the narrower: d = log p - log q falls to -2.4, where k3 is continued by its tangent, nowhere on the grid.
    p, q = Normal(torch.tensor(0.0, dtype=torch.float64), 1.0), Normal(torch.tensor(0.3, dtype=torch.float64), 0.9)
    exact = kl_divergence(p, q).item()
    # Quantiles instead of random samples: an even grid over the distribution has no sampling noise.
    x = p.icdf((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    for kind in ("k1", "k3"):
        estimate = kl_estimate(log_prob=p.log_prob(x), reference_log_prob=q.log_prob(x), kind=kind)
        assert estimate.mean().item() == pytest.approx(exact, abs=1e-4)
    assert estimate.min() >= 0
    assert kl_estimate(log_prob=torch.tensor(1.0), reference_log_prob=torch.tensor(0.4), kind="k2").item() == pytest.approx(0.6**2 / 2)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(log_prob=x, reference_log_prob=x, kind="k4")


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(value=returns, returns=returns) == 1.0
    assert explained_variance(value=torch.ones(3), returns=returns) == pytest.approx(0.0)
    # Residuals 0, 1, 2: variance 2/3 of 8/3
    assert explained_variance(value=returns / 2, returns=returns) == pytest.approx(0.75)
    assert math.isnan(explained_variance(value=returns, returns=torch.ones(3)))


def test_parts_add_up_with_the_whole_denominator() -> None:
    x, mask = torch.arange(10.0), torch.arange(10) % 3 != 0
    whole = masked_mean(x, mask)
    parts = [masked_mean(x[part], mask[part], mask.sum()) for part in (slice(0, 4), slice(4, 10))]
    torch.testing.assert_close(whole, sum(parts, torch.tensor(0.0)))
    assert masked_mean(x, torch.zeros(10, dtype=torch.bool)).item() == 0.0


def test_huber_by_hand() -> None:
    value, returns, old = tensors([1.5, 5.0, -3.0], [1.0, 1.0, 1.0], [1.5, 2.0, -2.5])
    # Errors 0.5, 4, -4 with delta 2: 0.25 as squared; 2·(2·4 - 2) = 12 beyond.
    assert value_loss(value=value, returns=returns, kind="huber", huber_delta=2.0)[0].item() == pytest.approx((0.25 + 12 + 12) / 3)
    # Clipped to old ± 1: 1.5, 3 (error 2: 4 < 12), -3 (12, the same).
    loss, metrics = value_loss(value=value, returns=returns, old_value=old, clip=1.0, kind="huber", huber_delta=2.0)
    assert loss.item() == pytest.approx((0.25 + 12 + 12) / 3)
    assert metrics["value_clip_fraction"].item() == 0.0
    # Far delta: the squared error.
    squared, _ = value_loss(value=value, returns=returns)
    assert value_loss(value=value, returns=returns, kind="huber", huber_delta=1e6)[0].item() == pytest.approx(squared.item())


def test_huber_bounds_the_gradient() -> None:
    (returns,) = tensors([0.0, 0.0, 0.0])
    value = torch.tensor([0.5, 2.0, 1e6], dtype=torch.float64, requires_grad=True)
    value_loss(value=value, returns=returns, kind="huber", huber_delta=2.0, denominator=1.0)[0].backward()
    # 2 e up to delta, 2 delta beyond.
    assert value.grad is not None
    assert value.grad.tolist() == [1.0, 4.0, 4.0]


def test_value_clipping_stops_the_gradient_of_what_has_moved_too_far() -> None:
    # Value 5 is clipped to 1 + 0.5; its error 1.5 - 0 is smaller than 5 - 0: the larger counts and pulls. Value 5 with returns 10:
    # the clipped error 8.5 is larger than 5 and constant: no gradient.
    value = torch.tensor([5.0, 5.0], dtype=torch.float64, requires_grad=True)
    returns, old = tensors([0.0, 10.0], [1.0, 1.0])
    loss, metrics = value_loss(value=value, returns=returns, old_value=old, clip=0.5, denominator=1.0)
    loss.backward()
    assert value.grad is not None
    assert value.grad.tolist() == [10.0, 0.0]
    assert metrics["value_clip_fraction"].item() == 1.0, "over the explicit denominator: one of two entries, divided by 1"


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_value_loss_and_entropy_ignore_what_is_masked(kind: str) -> None:
    mask = torch.tensor([True, False, True])
    value = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    arguments = {"returns": torch.tensor([0.0, float("inf"), 0.0]), "old_value": torch.tensor([1.0, float("nan"), 2.0]), "clip": 0.1}
    loss, _ = value_loss(value=value, mask=mask, kind=kind, huber_delta=10.0, **arguments)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == pytest.approx((1 + 4) / 2)
    assert value.grad is not None
    assert value.grad.tolist() == [1.0, 0.0, 2.0]
    assert entropy_bonus(entropy=value, mask=mask)[0].item() == pytest.approx(-1.5)


def test_value_loss_refuses_nonsense() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="kind='l1' of value loss is not a choice"):
        value_loss(value=x, returns=x, kind="l1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs old_value"):
        value_loss(value=x, returns=x, clip=0.2)
    with pytest.raises(ValueError, match="huber_delta must be > 0"):
        value_loss(value=x, returns=x, kind="huber", huber_delta=0.0)
    with pytest.raises(ValueError, match=r"returns must have shape \(2,\), got \(2, 1\)"):
        value_loss(value=x, returns=x[:, None])


def test_policy_gradient_by_hand() -> None:
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = policy_gradient_loss(log_prob=log_prob, advantage=torch.tensor([2.0, -1.0]), mask=mask)
    # -(2·-1 + 2·-2 - 1·-3) / 3
    assert loss.item() == pytest.approx((2 + 4 - 3) / 3)
    loss.backward()
    assert log_prob.grad is not None
    np.testing.assert_allclose(log_prob.grad, np.array([[-2.0, -2.0], [1.0, 0.0]]) / 3)


def test_behaviour_cloning_is_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 5, generator=generator, dtype=torch.float64)
    target = torch.randint(5, (6, 4), generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    log_prob = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    expected = torch.nn.functional.cross_entropy(logits[mask], target[mask])
    assert behaviour_cloning_loss(log_prob=log_prob, mask=mask)[0].item() == pytest.approx(expected.item(), rel=1e-12)
    # Weights: 2 for the first row, 0 for the others.
    weight = torch.zeros(6)
    weight[0] = 2.0
    loss, _ = behaviour_cloning_loss(log_prob=log_prob, weight=weight, denominator=1.0)
    assert loss.item() == pytest.approx(-2.0 * log_prob[0].sum().item())
