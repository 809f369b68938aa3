"""The recursions of `advantages` for a GPU: scans of logarithmic depth, in place of a loop over time that launches kernels at each step.

y_t = x_t + d_t y_(t+1) is a composition of affine maps, which is associative, so that all suffixes are found in log2(T) rounds
(Hillis and Steele 1986). T = 512 takes 9 rounds of 4 operations over [T, N] instead of 512 rounds over [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.algorithms.arrays import check_final_value


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_(t+1) along the first axis, with y_T = 0.

    Args:
        x, decay: [T, ...] of one floating type; NaN in x spreads to everything before it, decay 0 or not.
    """
    reach = 1
    while reach < x.shape[0]:
        # Each entry has absorbed `reach` of its successors; it now absorbs what that many later ones have absorbed.
        x = torch.cat([torch.addcmul(x[:-reach], decay[:-reach], x[reach:]), x[-reach:]])
        decay = torch.cat([decay[:-reach] * decay[reach:], decay[-reach:]])
        reach *= 2
    return x


@torch.no_grad()
def gae_scan(
    *,
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    gamma: float,
    gae_lambda: float,
    mask: Tensor | None = None,
    discount: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`embodied_rl.algorithms.advantages.gae` on whatever device the tensors lie on. Arguments, results and errors are the same."""
    cut = truncated & ~terminated
    check_final_value(tuple(final_value.shape), int(cut.sum()))
    values = value.double()
    following = _next_counted(values, last_value.double(), mask)
    following = following.masked_scatter(cut, final_value.double())
    following = following.masked_fill(terminated, 0.0)
    step_gamma = torch.full_like(values, gamma) if discount is None else discount.double()
    delta = reward.double() + step_gamma * following - values
    decay = (step_gamma * gae_lambda).masked_fill(terminated | truncated, 0.0)
    if mask is not None:
        # A masked step is the identity: it adds nothing and hands on what comes after it.
        delta, decay = delta.masked_fill(~mask, 0.0), decay.masked_fill(~mask, 1.0)
    advantage = reverse_scan(delta, decay).to(value.dtype)
    returns = advantage + value
    if mask is not None:
        advantage, returns = advantage.masked_fill(~mask, 0.0), returns.masked_fill(~mask, 0.0)
    return advantage, returns


def _next_counted(values: Tensor, last_value: Tensor, mask: Tensor | None) -> Tensor:
    """[T, N]: for each step the value of the next one that counts; `last_value` after the last of them."""
    extended = torch.cat([values, last_value[None]])
    if mask is None:
        return extended[1:]
    num_steps = values.shape[0]
    place = torch.arange(num_steps, device=values.device)[:, None].expand_as(values)
    place = torch.where(mask, place, num_steps)
    place = torch.cat([place[1:], torch.full_like(place[:1], num_steps)])
    nearest = place.flip(0).cummin(0).values.flip(0)
    return extended.gather(0, nearest)


@torch.no_grad()
def token_returns_scan(*, reward: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """`embodied_rl.algorithms.advantages.token_returns` on whatever device the tensors lie on."""
    gain = reward.double().t()
    decay = torch.full_like(gain, gamma)
    if mask is not None:
        gain, decay = gain.masked_fill(~mask.t(), 0.0), decay.masked_fill(~mask.t(), 1.0)
    returns = reverse_scan(gain, decay).t().to(reward.dtype)
    return returns.contiguous() if mask is None else returns.masked_fill(~mask, 0.0)
