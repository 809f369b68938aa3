from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.kl import kl_estimate
from embodied_rl.algorithms.rewards import clip_reward, kl_in_reward, penalize_overlong
from embodied_rl.algorithms.step_rewards import KlTerm
from embodied_rl.config import KlConfig

NAN = float("nan")


def test_clip() -> None:
    reward, mask = torch.tensor([-3.0, 0.5, 9.0, NAN]), torch.tensor([True, True, True, False])
    assert clip_reward(reward=reward, low=-1.0, high=2.0, mask=mask).tolist() == [-1.0, 0.5, 2.0, 0.0]
    assert clip_reward(reward=reward, low=1.0, mask=mask).tolist() == [1.0, 1.0, 9.0, 0.0], "what is hidden is 0, not clipped to 1"
    with pytest.raises(ValueError, match="low <= high"):
        clip_reward(reward=reward, low=2.0, high=1.0)


def test_overlong_as_in_the_paper() -> None:
    # 16384 tokens with a buffer of 4096, scaled down by 1024: nothing up to 12, then linear to -1 at 16, -1 beyond.
    length = torch.tensor([3, 12, 13, 14, 16, 40])
    result = penalize_overlong(reward=torch.zeros(6), length=length, max_length=16, buffer=4)
    assert result.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    masked = penalize_overlong(
        reward=torch.tensor([NAN, 1.0]), length=torch.tensor([99, 99]), max_length=4, buffer=4, mask=torch.tensor([False, True])
    )
    assert masked.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="0 < buffer <= max_length"):
        penalize_overlong(reward=torch.zeros(6), length=length, max_length=4, buffer=5)
    with pytest.raises(ValueError, match="penalty must be >= 0"):
        penalize_overlong(reward=torch.zeros(6), length=length, max_length=4, buffer=4, penalty=-1.0)


def test_kl_in_reward_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_prob = torch.tensor([[-1.0, -2.0, NAN], [-0.5, NAN, NAN]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, NAN], [-0.5, NAN, NAN]], dtype=torch.float64)
    reward = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)  # at the last entry of each row
    # k1: 0.5, -1 and 0.
    kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind="k1")
    shaped, metrics = kl_in_reward(reward=reward, kl=kl, coefficient=0.1, mask=mask)
    np.testing.assert_allclose(shaped, [[-0.05, 1.1, 0.0], [-1.0, 0.0, 0.0]], atol=1e-15)
    assert metrics["kl"].item() == pytest.approx((0.5 - 1.0 + 0.0) / 3)
    assert metrics["kl_penalty"].item() == pytest.approx(0.1 * -0.5 / 3)
    kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind="k2")
    squared, _ = kl_in_reward(reward=reward, kl=kl, coefficient=0.1, mask=mask)
    np.testing.assert_allclose(squared, [[-0.0125, 0.95, 0.0], [-1.0, 0.0, 0.0]], atol=1e-15)


def test_kl_in_reward_keeps_a_bandit_near_its_reference() -> None:
    # The best policy under r - beta KL is reference · exp(r / beta) / Z. Follow the exact policy gradient with k1 in the reward.
    worth, reference = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    beta = 0.7
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(600):
        log_prob = logits.log_softmax(-1)
        kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference.log(), kind="k1")
        reward, _ = kl_in_reward(reward=worth, kl=kl, coefficient=beta)
        assert not reward.requires_grad
        optimizer.zero_grad()
        (-(log_prob.exp().detach() * reward * log_prob).sum()).backward()
        optimizer.step()
    expected = reference * (worth / beta).exp()
    torch.testing.assert_close(logits.detach().softmax(-1), expected / expected.sum(), rtol=0, atol=1e-6)


def test_adaptive_coefficient_steers_the_penalty() -> None:
    coefficient = KlTerm(KlConfig(0.1, target=0.01, horizon=10))
    log_prob, reference = torch.full((4,), math.log(0.9)), torch.full((4,), math.log(0.5))
    kl = log_prob - reference
    before, metrics = kl_in_reward(reward=torch.zeros(4), kl=kl, coefficient=coefficient.coefficient)
    # log 1.8 = 0.588 is far above the target: 1 + 0.2 · 4 / 10 = 1.08.
    coefficient.update(metrics["kl"].item(), 4)
    after, _ = kl_in_reward(reward=torch.zeros(4), kl=kl, coefficient=coefficient.coefficient)
    torch.testing.assert_close(after, 1.08 * before)
    assert before[0].item() == pytest.approx(-0.1 * math.log(1.8), rel=1e-6)
