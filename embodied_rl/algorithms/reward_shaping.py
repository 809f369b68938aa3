"""What is rewarded: clipping, penalties, differences of progress, divergence from a reference policy.

Pure functions; each returns the new reward in the type of the old one. `mask` is bool: what it hides counts for nothing, be it NaN, and
gets 0. Shapes are [B] (one number per row), [B, L] (per action unit) or [T, N] (time-major: T steps of N slots), as stated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import TOKEN_MEAN, Aggregation, visible_entries


def clip_reward(*, reward: Tensor, low: float = -math.inf, high: float = math.inf, mask: Tensor | None = None) -> Tensor:
    """Clamp to [low, high] (any shape). Raises ValueError for low > high."""
    if not low <= high:
        raise ValueError(f"clip_reward needs low <= high, got low={low}, high={high}.")
    (visible,) = visible_entries(mask, reward=reward)
    clipped = visible.clamp(low, high)
    return (clipped if mask is None else torch.where(mask, clipped, torch.zeros_like(clipped))).to(reward.dtype)


def penalize_invalid_actions(*, reward: Tensor, invalid: Tensor, penalty: float, mask: Tensor | None = None) -> Tensor:
    """reward - penalty · invalid: actions that the environment could not parse or carry out (verl-agent, arXiv:2505.10978).

    Args:
        invalid: bool of the shape of `reward`, or the number of invalid actions that each entry stands for.
        penalty: >= 0 per invalid action.
    """
    _require_not_negative("penalty", penalty)
    visible, count = visible_entries(mask, reward=reward, invalid=invalid.to(reward.dtype))
    return (visible - penalty * count).to(reward.dtype)


def penalize_length(*, reward: Tensor, length: Tensor, coefficient: float, free_length: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """reward - coefficient · max(length - free_length, 0), for [B] rewards and lengths in steps or tokens."""
    _require_not_negative("coefficient", coefficient)
    _require_not_negative("free_length", free_length)
    visible, lengths = visible_entries(mask, reward=reward, length=length.to(torch.float64))
    return (visible - coefficient * (lengths - free_length).clamp(min=0.0)).to(reward.dtype)


def penalize_overlong(
    *, reward: Tensor, length: Tensor, max_length: int, buffer: int, penalty: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Soft overlong punishment (DAPO: Yu et al. 2025, arXiv:2503.14476): nothing up to max_length - buffer, then linear to `penalty`.

    The penalty is reached at max_length and stays beyond it. [B] rewards and lengths in tokens or steps.

    Raises:
        ValueError: unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"penalize_overlong needs 0 < buffer <= max_length, got buffer={buffer}, max_length={max_length}.")
    _require_not_negative("penalty", penalty)
    visible, lengths = visible_entries(mask, reward=reward, length=length.to(torch.float64))
    share = ((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)
    return (visible - penalty * share).to(reward.dtype)


def difference_reward(*, reward: Tensor, counterfactual: Tensor, mask: Tensor | None = None) -> Tensor:
    """D = G(z) - G(z with a default in the place of this action), any shape (Wolpert and Tumer 2001, "Optimal payoff functions").

    What the action itself brought: since the counterfactual does not depend on it, it is a baseline that leaves the gradient's
    expectation as it is and takes out what would have happened anyway. The caller says what the default is: the reward of a no-op
    from the same snapshot, of the expert, or of the reference policy.
    """
    visible, baseline = visible_entries(mask, reward=reward, counterfactual=counterfactual)
    return (visible - baseline).to(reward.dtype)


def relative_reward(
    *,
    level: Tensor,
    done: Tensor,
    previous_level: Tensor,
    initial_level: float | Tensor = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """r_t = level_t - level_(t-1): rewards that measure how good a state is become rewards for improving it.

    Over an episode they sum to the last level minus the initial one, so that lingering in a good state earns nothing more. It is
    the undiscounted potential-based form (Ng, Harada and Russell 1999) with the level as the potential and as the only reward.

    Args:
        level: [T, N] the simulator's reward after each step.
        done: [T, N] bool, the episode ended with this step; the slot's next level is compared with `initial_level`.
        previous_level: [N] before the first step: what the last call returned, or the initial level at the start.
        initial_level: of an episode's first state; a number or [N].
        mask: [T, N] bool. Steps outside it get 0, and the level before them is carried on.

    Returns:
        Rewards [T, N], and [N] the level to continue from.
    """
    if level.dim() != 2 or done.shape != level.shape or done.dtype != torch.bool or previous_level.shape != level.shape[1:]:
        shapes = [tuple(x.shape) for x in (level, done, previous_level)]
        raise ValueError(f"level and done (bool) must be [T, N] and previous_level [N], got {shapes} with done of {done.dtype}.")
    (visible,) = visible_entries(mask, level=level)
    initial = torch.as_tensor(initial_level, dtype=visible.dtype, device=visible.device).expand(level.shape[1])
    shown = torch.ones_like(done) if mask is None else mask
    # What the next step starts from, in row t + 1; row 0 is what came before. Hidden steps point back to the last one shown.
    after = torch.cat([previous_level.to(visible.dtype)[None], torch.where(done, initial, visible)])
    step = torch.arange(1, level.shape[0] + 1, device=level.device)[:, None]
    latest = torch.cat([step.new_zeros(1, level.shape[1]), torch.where(shown, step, 0)]).cummax(0).values
    before = after.gather(0, latest)
    reward = torch.where(shown, visible - before[:-1], torch.zeros_like(visible))
    return reward.to(level.dtype), before[-1].to(level.dtype)


def shape_with_potential(
    *,
    reward: Tensor,
    potential: Tensor,
    next_potential: Tensor,
    terminated: Tensor,
    gamma: float,
    mask: Tensor | None = None,
) -> Tensor:
    """reward + gamma Phi(s') - Phi(s), any one shape: shaping that keeps the best policy (Ng, Harada and Russell 1999).

    Phi of a terminal state counts as 0, or it would not (Grzes 2017); a truncated step keeps that of its final observation.

    Args:
        potential: of the state before each step.
        next_potential: of the state after it; after a truncation that of the episode's final state, not of the next episode's first.
        terminated: bool.
    """
    visible, here, there = visible_entries(mask, reward=reward, potential=potential, next_potential=next_potential)
    if terminated.shape != reward.shape or terminated.dtype != torch.bool:
        raise ValueError(f"terminated must be bool of shape {tuple(reward.shape)}, got {terminated.dtype} of {tuple(terminated.shape)}.")
    return (visible + gamma * torch.where(terminated, torch.zeros_like(there), there) - here).to(reward.dtype)


def place_at_last(score: Tensor, mask: Tensor) -> Tensor:
    """[B] scores → [B, L], each at its row's last entry in the mask, 0 elsewhere; a row without entries has no place for one."""
    if score.dim() != 1 or mask.dim() != 2 or mask.shape[0] != score.shape[0] or mask.dtype != torch.bool:
        raise ValueError(f"score must be [B] and mask bool [B, L], got {tuple(score.shape)} and {mask.dtype} {tuple(mask.shape)}.")
    # The last entry is the one after which none follows.
    following = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (following == 1), score[:, None], torch.zeros_like(score[:, None]))


def kl_in_reward(
    *,
    reward: Tensor,
    kl: Tensor,
    coefficient: float,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: Aggregation = TOKEN_MEAN,
) -> tuple[Tensor, dict[str, Tensor]]:
    """reward - coefficient · KL estimate, entry by entry (Ziegler et al. 2019, arXiv:1909.08593).

    Args:
        reward: [B, L], such as `place_at_last` of a score; or [B].
        kl: the same shape, `kl.kl_estimate` of the policy that sampled, as the trainer computes it, from the reference on the same
            actions; k1 is the paper's. An entry of several tokens has the sum of their estimates: an estimate of the tokens' summed
            log-ratio spreads many times as far, exponentially in their number for k3.
        coefficient: >= 0; `kl.AdaptiveKlCoefficient` may steer it.

    Returns:
        Rewards, and ``kl`` and ``kl_penalty``, their means as `aggregation` takes them.
    """
    _require_not_negative("coefficient", coefficient)
    visible, estimate = visible_entries(mask, reward=reward, kl=kl.detach())
    mean = aggregation.mean(estimate, mask, denominator)
    return (visible - coefficient * estimate).to(reward.dtype), {"kl": mean, "kl_penalty": coefficient * mean}


def _require_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be >= 0, got {value}.")
