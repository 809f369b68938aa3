from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import SEQUENCE_TOKEN_MEAN, TOKEN_MEAN, Aggregation
from embodied_rl.algorithms.losses import policy_gradient_loss, ppo_clip_loss
from embodied_rl.algorithms.off_policy import (
    cispo_loss,
    correction_weights,
    importance_weights,
    rejection_mask,
    topr_loss,
)
from embodied_rl.config import CorrectionConfig

# Ratios pi / behaviour of two rows; the last entry of the second is hidden.
RATIOS = torch.tensor([[0.5, 1.0, 4.0], [2.0, 2.0, 1e9]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def double(*values: object) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def weights(**options: object) -> Tensor:
    return importance_weights(log_prob=RATIOS.log(), behaviour_log_prob=torch.zeros(2, 3), mask=MASK, **options)[0]  # type: ignore[arg-type]


def test_weights_by_hand() -> None:
    close = torch.testing.assert_close
    # Truncated importance sampling: everything above 1.5 becomes 1.5.
    close(weights(high=1.5), double([0.5, 1.0, 1.5], [1.5, 1.5, 0.0]))
    close(weights(high=3.0, low=0.8), double([0.8, 1.0, 3.0], [2.0, 2.0, 0.0]))
    close(weights(high=3.0, low=0.8, mode="mask"), double([0.0, 1.0, 0.0], [2.0, 2.0, 0.0]))
    # Products 0.5 · 1 · 4 = 2 and 2 · 2 = 4; geometric means 2^(1/3) and 2.
    close(weights(high=3.0, level="sequence"), double([2.0] * 3, [3.0, 3.0, 0.0]))
    close(weights(high=3.0, level="sequence", mode="mask"), double([2.0] * 3, [0.0] * 3))
    close(weights(high=3.0, level="geometric"), double([2.0 ** (1 / 3)] * 3, [2.0, 2.0, 0.0]))
    # Chunks {0.5}, {1, 4}: 0.5 and 2; {2, 2}: 2.
    chunk_id = torch.tensor([[0, 1, 1], [0, 0, 1]])
    close(weights(high=3.0, level="chunk", chunk_id=chunk_id), double([0.5, 2.0, 2.0], [2.0, 2.0, 0.0]))


def test_weight_figures_by_hand() -> None:
    _, metrics = importance_weights(log_prob=RATIOS.log(), behaviour_log_prob=torch.zeros(2, 3), mask=MASK, high=1.5)
    assert metrics["weight_mean"].item() == pytest.approx((0.5 + 1.0 + 1.5 + 1.5 + 1.5) / 5)
    assert metrics["weight_bounded_fraction"].item() == pytest.approx(3 / 5)
    # k3 of KL(behaviour || pi): r - 1 - log r
    expected = sum(r - 1 - double(r).log().item() for r in (0.5, 1.0, 4.0, 2.0, 2.0)) / 5
    assert metrics["behaviour_kl"].item() == pytest.approx(expected)


def test_sequence_weights_make_the_estimate_unbiased() -> None:
    # Two steps of a coin: behaviour p(1) = 0.5, policy p(1) = 0.8; every outcome once, weighted with its probability under behaviour.
    outcomes = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    behaviour, policy = double([0.5, 0.5]), double([0.2, 0.8])
    w, _ = importance_weights(
        log_prob=policy.log()[outcomes], behaviour_log_prob=behaviour.log()[outcomes], level="sequence", high=float("inf")
    )
    reward = outcomes.double().prod(-1)
    # Under the policy, two ones come with 0.8^2.
    assert (0.25 * w[:, 0] * reward).sum().item() == pytest.approx(0.64)
    assert (0.25 * w[:, 0]).sum().item() == pytest.approx(1.0)


def test_rejection_mask() -> None:
    def kept(**options: object) -> list[list[bool]]:
        arguments = {"log_prob": RATIOS.log(), "behaviour_log_prob": torch.zeros(2, 3), "mask": MASK, **options}
        return rejection_mask(**arguments).tolist()  # type: ignore[arg-type]

    assert kept(high=1.5) == [[True] * 3, [False] * 3]
    assert kept(high=1.5, level="token") == [[True, True, False], [False] * 3]
    assert kept(high=5.0, low=3.0, level="sequence") == [[False] * 3, [True, True, False]]
    # One entry of the first row has a ratio of 0.5: vetoed as a whole. The hidden 1e9 of the second row has no say.
    assert kept(high=5.0, token_veto=0.6) == [[False] * 3, [True, True, False]]
    one_per_row = rejection_mask(log_prob=double(0.0, 1.0), behaviour_log_prob=double(0.0, 0.0), high=2.0, token_veto=0.5)
    assert one_per_row.tolist() == [True, False]


def test_correction_weights_of_a_batch_by_hand() -> None:
    # w of two sequences: 0.5, 1, 3 | 4, 1 and a hidden one. Their geometric means: 1.5^(1/3) = 1.14 and 4^(1/2) = 2.
    ratios = double([[0.5, 1.0, 3.0], [4.0, 1.0, 1e9]])
    mask = torch.tensor([[True] * 3, [True, True, False]])

    def weights(**options: object) -> tuple[list[list[float]], dict[str, float]]:
        found, metrics = correction_weights(
            CorrectionConfig(**options),  # type: ignore[arg-type]
            log_prob=ratios.log(),
            behaviour_log_prob=torch.zeros(2, 3, dtype=torch.float64),
            mask=mask,
        )
        return found.tolist(), metrics

    clamped, metrics = weights(mode="clamp", high=2.0)
    assert clamped == [pytest.approx([0.5, 1.0, 2.0]), pytest.approx([2.0, 1.0, 0.0])]
    assert metrics["weight_bounded_fraction"] == pytest.approx(2 / 5)
    assert weights(mode="mask", low=0.8, high=3.5)[0] == [pytest.approx([0.0, 1.0, 3.0]), pytest.approx([0.0, 1.0, 0.0])]
    # The whole sequences' ratios are 1.5 and 4.
    assert weights(mode="mask", level="sequence", high=3.0)[0] == [pytest.approx([1.5] * 3), [0.0] * 3]
    # Without weights, rejected as wholes: the second sequence's 2 lies outside [1 / 1.5, 1.5].
    dropped, metrics = weights(reject=1.5)
    assert dropped == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert metrics == {"rejected_fraction": pytest.approx(2 / 5)}
    # Divided by their mean over the five entries, (0.5 + 1 + 2 + 2 + 1) / 5 = 1.3, so that they weigh 5 in all.
    normalised, _ = weights(mode="clamp", high=2.0, batch_normalise=True)
    assert sum(map(sum, normalised)) == pytest.approx(5.0)
    assert normalised[0][0] == pytest.approx(0.5 / 1.3)


def test_topr_may_taper_by_the_score() -> None:
    # Row 0 succeeded and has a negative advantage; row 1 failed and has a positive one. The ratio of both is 0.25.
    new = double([[0.5], [0.5]]).log().requires_grad_()
    arguments = {"log_prob": new, "behaviour_log_prob": double([[2.0], [2.0]]).log(), "advantage": double(-1.0, 1.0)}
    by_advantage, _ = topr_loss(**arguments)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(by_advantage, new)
    assert gradient.flatten().tolist() == pytest.approx([0.25 / 2, -1 / 2])
    positive = torch.tensor([True, False])
    by_score, _ = topr_loss(**arguments, sign="score", positive=positive)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(by_score, new)
    assert gradient.flatten().tolist() == pytest.approx([1 / 2, -0.25 / 2])
    with pytest.raises(ValueError, match="needs positive"):
        topr_loss(**arguments, sign="score")  # type: ignore[arg-type]


def decoupled(
    new: Tensor, present: Tensor, behaviour: Tensor, advantage: Tensor, aggregation: Aggregation = TOKEN_MEAN, **bounds: Any
) -> Tensor:
    """PPO around the present policy, its advantages weighed: decoupled PPO."""
    weight, _ = correction_weights(CorrectionConfig(**{"mode": "mask", **bounds}), log_prob=present, behaviour_log_prob=behaviour)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    return ppo_clip_loss(log_prob=new, old_log_prob=present, advantage=advantage * weight, aggregation=aggregation, **clip)[0]  # type: ignore[arg-type]


def test_decoupled_ppo_by_hand() -> None:
    # pi / present: 1.5, 1, 0.5, 1; present / behaviour: 1, 2, 1, 10; A: 1, 1, -1, 1; clip 0.2.
    # Clip losses: -1.2, -1, 0.8 (-A·0.8, since 0.5 < 0.8), -1.
    present = double(-1.0, -1.0, -1.0, -1.0)
    new, behaviour = present + double(1.5, 1.0, 0.5, 1.0).log(), present - double(1.0, 2.0, 1.0, 10.0).log()
    advantage = double(1.0, 1.0, -1.0, 1.0)
    # w = 10 is dropped; the sum is still divided by 4.
    assert decoupled(new, present, behaviour, advantage, high=5.0).item() == pytest.approx((-1.2 * 1 - 1 * 2 + 0.8 * 1) / 4)
    clamped = decoupled(new, present, behaviour, advantage, high=5.0, mode="clamp")
    assert clamped.item() == pytest.approx((-1.2 * 1 - 1 * 2 + 0.8 * 1 - 1 * 5) / 4)


def test_decoupled_ppo_keeps_a_rows_length_of_before_rejection() -> None:
    # Row of four entries of which three are rejected: its mean is a quarter of the one that is left, not the whole of it.
    zeros, behaviour = torch.zeros(1, 4, dtype=torch.float64), -double([[1.0, 9.0, 9.0, 9.0]]).log()
    loss = decoupled(zeros, zeros, behaviour, -torch.ones_like(zeros), SEQUENCE_TOKEN_MEAN, high=2.0)
    assert loss.item() == pytest.approx(0.25)


def test_decoupled_ppo_levels() -> None:
    # One row, A = -1, pi = present, so that the loss is the mean weight; present / behaviour 4, 1: product 4, geometric mean 2.
    zeros, behaviour = torch.zeros(1, 2, dtype=torch.float64), -double([[4.0, 1.0]]).log()

    def loss(**bounds: Any) -> float:
        return decoupled(zeros, zeros, behaviour, -torch.ones_like(zeros), **bounds).item()

    assert loss(high=5.0) == pytest.approx((4 + 1) / 2)
    assert loss(high=3.0, level="sequence") == pytest.approx(0.0)
    assert loss(high=3.0, level="sequence", mode="clamp") == pytest.approx(3.0)
    assert loss(high=3.0, level="geometric") == pytest.approx(2.0)


def test_cispo_by_hand() -> None:
    log_prob = double(-1.0, -1.0, -1.0).requires_grad_()
    # Ratios 3, 0.2, 1 → 1.5, 0.2 (no lower bound), 1.
    old = double(-1.0, -1.0, -1.0) - double(3.0, 0.2, 1.0).log()
    advantage = double(2.0, -1.0, 1.0)
    loss, metrics = cispo_loss(log_prob=log_prob, old_log_prob=old, advantage=advantage, clip_high=0.5)
    # -w A log pi = w A here.
    assert loss.item() == pytest.approx((1.5 * 2 - 0.2 + 1) / 3)
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 3)
    loss.backward()
    # The clipped entry still pulls: its gradient is -1.5 · 2, where PPO's would be 0.
    torch.testing.assert_close(log_prob.grad, -double(1.5 * 2, -0.2, 1.0) / 3)
    ppo = log_prob.detach().clone().requires_grad_()
    ppo_clip_loss(log_prob=ppo, old_log_prob=old, advantage=advantage, clip_low=1.0, clip_high=0.5)[0].backward()
    assert ppo.grad is not None
    assert ppo.grad[0].item() == 0.0
    bounded, _ = cispo_loss(log_prob=log_prob, old_log_prob=old, advantage=advantage, clip_low=0.4, clip_high=0.5)
    assert bounded.item() == pytest.approx((1.5 * 2 - 0.6 + 1) / 3)


def test_topr_by_hand() -> None:
    # Rows of two entries, log pi = -1. Sequence ratios: 4 · 0.5 = 2 and 0.5 · 0.5 = 0.25.
    log_prob = torch.full((4, 2), -1.0, dtype=torch.float64, requires_grad=True)
    ratio = double([4.0, 0.5], [0.5, 0.5], [4.0, 0.5], [0.5, 0.5])
    behaviour = -1.0 - ratio.log()
    advantage = double(1.0, 1.0, -1.0, -1.0)
    loss, metrics = topr_loss(log_prob=log_prob, behaviour_log_prob=behaviour, advantage=advantage)
    # Good rows count in full whatever the ratio; bad ones with clip(2) = 1 and 0.25.
    assert loss.item() == pytest.approx((2 * 1 + 2 * 1 - 2 * 1 - 2 * 0.25) / 8)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 8)
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -double([1.0] * 2, [1.0] * 2, [-1.0] * 2, [-0.25] * 2) / 8)
    by_mean, _ = topr_loss(log_prob=log_prob, behaviour_log_prob=behaviour, advantage=advantage, level="geometric")
    assert by_mean.item() == pytest.approx((2 + 2 - 2 - 2 * 0.5) / 8)


def test_truncated_importance_sampling_weighs_advantages() -> None:
    # Generator and trainer disagree about the second entry by a factor of 4, truncated to 2.
    log_prob, behaviour = double([[-1.0, -1.0]]), double([[-1.0, -1.0]]) - double([[1.0, 4.0]]).log()
    weight, _ = importance_weights(log_prob=log_prob, behaviour_log_prob=behaviour, high=2.0)
    loss, _ = policy_gradient_loss(log_prob=log_prob, advantage=double([1.0]) * weight)
    assert loss.item() == pytest.approx((1 + 2) / 2)


def test_bounds_are_checked() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="0 <= low <= high"):
        topr_loss(log_prob=x, behaviour_log_prob=x, advantage=x, ratio_high=0.5, ratio_low=0.6)
    with pytest.raises(ValueError, match="0 <= low <= high"):
        importance_weights(log_prob=x, behaviour_log_prob=x, high=0.5, low=0.6)
    with pytest.raises(ValueError, match="Known: clamp, mask"):
        importance_weights(log_prob=x, behaviour_log_prob=x, high=0.5, mode="truncate")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_veto"):
        rejection_mask(log_prob=x, behaviour_log_prob=x, high=2.0, token_veto=2.0)
    with pytest.raises(ValueError, match="clip_low must be between 0 and 1"):
        cispo_loss(log_prob=x, old_log_prob=x, advantage=x, clip_low=1.5, clip_high=0.2)
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        ppo_clip_loss(log_prob=x, old_log_prob=x, advantage=x, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
