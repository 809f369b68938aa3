from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from embodied_rl.algorithms.losses import (
    entropy_bonus,
    explained_variance,
    kl_estimate,
    masked_mean,
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
    p, q = Normal(torch.tensor(0.0, dtype=torch.float64), 1.0), Normal(torch.tensor(0.3, dtype=torch.float64), 1.2)
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
