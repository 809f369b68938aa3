"""Learning with critics of actions Q(s, a) from stored steps: implicit Q-learning, advantage-weighted and soft actor-critic.

Shapes: B rows, E critics of an ensemble. Losses are sums over the rows of `mask` [B] (None: all), divided by `denominator` rows (None:
their number). Targets are constants, without a gradient. Notation of the papers: r reward, γ discount, π the policy, Q̄ the target
critics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import masked_mean

Metrics = dict[str, Tensor]
"""Scalars without gradient."""


def smallest_of(values: Tensor, members: Tensor | None = None) -> Tensor:
    """min over the ensemble of Q̄ [E, B] → [B]; with `members` [M], over these only.

    Clipped double Q-learning (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1). The random subset of a larger ensemble is from REDQ
    (Chen et al. 2021, arXiv:2101.05982, algorithm 1), and RLPD uses it too (Ball et al. 2023, arXiv:2302.02948, algorithm 1).
    """
    return (values if members is None else values[members]).min(dim=0).values


def td_target(*, reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """r + γ^n (1 - terminated) V(s') [B], detached.

    Args:
        reward: [B] discounted sum of n steps.
        discount: [B] γ^n, 0 where the n-th step terminated; a truncated episode bootstraps from its final observation.
        next_value: [B]; ignored where the discount is 0, even if NaN.
    """
    _check_rows(reward=reward, discount=discount, next_value=next_value)
    following = torch.where(discount > 0, next_value, torch.zeros_like(next_value))
    return (reward + discount * following).detach()


def soft_value(*, value: Tensor, log_prob: Tensor, entropy_coef: Tensor | float) -> Tensor:
    """V(s') = Q̄(s', a') - α log π(a'|s') [B], a' drawn from π (Haarnoja et al. 2018, arXiv:1812.05905, eq. 3)."""
    _check_rows(value=value, log_prob=log_prob)
    return value - entropy_coef * log_prob


def critic_loss(*, values: Tensor, target: Tensor, mask: Tensor | None = None, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Mean over the ensemble and the rows of (Q(s, a) - target)² (Haarnoja et al. 2018, eq. 5, without its factor 1/2).

    Args:
        values: [E, B]; every critic learns the same target.
        target: [B], a constant.

    Returns the loss, and ``critic_loss``, ``q_mean``, ``q_spread`` (standard deviation between critics, mean over rows; 0 with one critic).
    """
    if values.dim() != 2 or target.shape != values.shape[1:]:
        raise ValueError(f"values must be [E, B] and target [B], got {tuple(values.shape)} and {tuple(target.shape)}.")
    every, entries = (None if mask is None else mask.expand_as(values)), (None if denominator is None else len(values) * denominator)
    loss = masked_mean((values - target.detach()).square(), every, entries)
    with torch.no_grad():
        mean, spread = masked_mean(values, every, entries), masked_mean(values.std(dim=0, correction=0), mask, denominator)
    return loss, {"critic_loss": loss.detach(), "q_mean": mean, "q_spread": spread}


def expectile_loss(
    *, value: Tensor, target: Tensor, expectile: float, mask: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """Mean of |τ - 1(u < 0)| u² with u = target - V: implicit Q-learning's state value (Kostrikov et al. 2021, arXiv:2110.06169, eq. 5).

    τ = 0.5 is half the mean squared error; towards 1, V tends to the largest target that the data support.

    Args:
        value, target: [B]; the target, Q̄(s, a) of the recorded action, is a constant.
        expectile: τ in (0, 1).
    """
    _check_rows(value=value, target=target)
    if not 0.0 < expectile < 1.0:
        raise ValueError(f"expectile must be between 0 and 1, got {expectile}.")
    difference = target.detach() - value
    weight = torch.where(difference < 0, 1.0 - expectile, expectile).to(value.dtype)
    loss = masked_mean(weight * difference.square(), mask, denominator)
    return loss, {"value_loss": loss.detach(), "value_mean": masked_mean(value.detach(), mask, denominator)}


def advantage_weights(
    *, advantage: Tensor, temperature: float, max_weight: float, mask: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """exp(A / λ) [B], at most `max_weight`, detached: weights for imitating recorded actions.

    Advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177, algorithm 1); in AWAC (Nair et al. 2020, arXiv:2006.09359, algorithm
    1) with A = Q(s, a) - V(s), V the mean of Q over the policy; in implicit Q-learning (its eq. 7) with the expectile V and β = 1/λ.

    Returns the weights, and ``weight_mean`` and ``weight_bounded_fraction`` (share at the bound).
    """
    if not (temperature > 0 and max_weight > 0):
        raise ValueError(f"temperature and max_weight must be > 0, got {temperature} and {max_weight}.")
    # Bound the exponent, because its exp may already be infinite.
    bound = torch.log(torch.as_tensor(max_weight, dtype=advantage.dtype, device=advantage.device))
    exponent = advantage.detach() / temperature
    weight = torch.minimum(exponent, bound).exp()
    figures = {"weight_mean": weight, "weight_bounded_fraction": (exponent >= bound).to(weight.dtype), "advantage_mean": advantage.detach()}
    return weight, {name: masked_mean(figure, mask, denominator) for name, figure in figures.items()}


def soft_policy_loss(
    *, values: Tensor, log_prob: Tensor, entropy_coef: Tensor | float, mask: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """Mean of α log π(a|s) - Q(s, a), a drawn from π by reparametrisation (Haarnoja et al. 2018, eq. 7).

    Args:
        values: [B] values of the policy's own action, with gradient; the ensemble's mean in RLPD.
        log_prob: [B] of that action, with gradient.
    """
    _check_rows(values=values, log_prob=log_prob)
    coefficient = entropy_coef.detach() if isinstance(entropy_coef, Tensor) else entropy_coef
    loss = masked_mean(coefficient * log_prob - values, mask, denominator)
    return loss, {"policy_loss": loss.detach(), "entropy": -masked_mean(log_prob.detach(), mask, denominator)}


def entropy_coef_loss(
    *, log_coef: Tensor, log_prob: Tensor, target_entropy: float, mask: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """α (H - target) in expectation, H = -log π: minimising it raises α if the entropy is too small (Haarnoja et al. 2018, eq. 18).

    Args:
        log_coef: [] log α, in training.
        log_prob: [B], a constant.
        target_entropy: nats.

    Returns the loss, and ``entropy_coef``: α times these rows' share of the `denominator` rows, so that parts add up to α.
    """
    loss = masked_mean(log_coef.exp() * (-log_prob.detach() - target_entropy), mask, denominator)
    rows = len(log_prob) if mask is None else int(mask.sum())
    return loss, {"entropy_coef": log_coef.detach().exp() * (rows / (denominator or max(rows, 1)))}


def _check_rows(**tensors: Tensor) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"All must be [B]: {shapes}.")
