"""Credit assignment over time: generalised advantage estimation, discounted returns, whitening. Pure functions of torch tensors.

They compute in numpy, on the host, and the recursions are compiled (`kernels`); results are on the device of the arguments. Sums are
float64 inside. Advantages are constants to the learner: nothing here is differentiated.

`grouped` has credit by comparing episodes with each other and by chunks of tokens, `anchors` credit by comparing equal states.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_types(numbers: Iterable[Tensor], flags: Iterable[Tensor]) -> None:
    """Raise ValueError if a number is not float32 or float64, or a flag is not bool."""
    for tensor in numbers:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Rewards and values must be tensors of float32 or float64, got {tensor.dtype}. Convert them first.")
    for tensor in flags:
        if tensor.dtype != torch.bool:
            raise ValueError(f"terminated, truncated, executed and mask must be bool, got {tensor.dtype}. Convert them first.")


def check_final_value(shape: tuple[int, ...], num_cut: int) -> None:
    """Raise ValueError unless there is one final value for each truncated step."""
    if shape != (num_cut,):
        raise ValueError(f"final_value must hold one value for each of the {num_cut} truncated steps, got shape {shape}.")


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The same numbers, contiguous; shared if possible."""
    # One memory layout, because numba recompiles the kernel for each.
    return np.ascontiguousarray(tensor.detach().cpu().numpy())


def alike(result: np.ndarray, given: Tensor) -> Tensor:
    """Convert `result` to a tensor on the device of `given`."""
    return torch.from_numpy(result).to(given.device)


WHITEN_EPS = 1e-8

_NO_MASK = np.zeros((0, 0), bool)
_THREADS_FROM = 2**20
"""Entries from which several threads are faster: starting one takes as long as some hundred thousand entries. Slots are independent."""


def gae(
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
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), time-major.

    delta_t = r_t + gamma V_(t+1) (1 - terminated_t) - V_t and A_t = delta_t + gamma lambda (1 - done_t) A_(t+1). A step
    that is truncated but not terminated bootstraps from the value of its episode's final observation, since the slot's
    next observation already belongs to another episode.

    Args:
        reward, value: [T, N] float32 or float64.
        last_value: [N] value after the last step.
        terminated, truncated: [T, N] bool.
        final_value: [K] values of the final observations, in the order of ``np.argwhere(truncated & ~terminated)``.
        mask: [T, N] bool; steps that count; None: all steps. Other steps, even NaN, pass value and advantage through, and get 0.
            Their flags do not count either, so an episode's end must be marked at a step that counts.
        discount: [T, N] gamma of each step instead of one gamma; `chunk_gae` needs it.

    Returns advantages and returns (advantage + value, 0 where masked), both [T, N] of the type of `value`.

    Raises ValueError: shapes or types do not agree, or the number of final values differs from that of truncated steps.
    """
    _check_gae(reward, value, last_value, terminated, truncated, mask, discount)
    from embodied_rl.algorithms.kernels import find_cuts, gae_kernel, masked_gae_kernel

    steps: list[np.ndarray] = [as_numpy(array) for array in (reward, value, terminated, truncated)]
    after, finals, shape = as_numpy(last_value).astype(np.float64), as_numpy(final_value).astype(np.float64), steps[1].shape
    cut = np.empty(finals.size, np.int64)
    check_final_value(finals.shape, find_cuts(steps[3].reshape(-1), steps[2].reshape(-1), cut))
    found: tuple[np.ndarray, np.ndarray] = np.empty_like(steps[1]), np.empty_like(steps[1])
    if mask is None and discount is None:
        flat: list[np.ndarray] = [array.reshape(-1) for array in (*steps, *found)]
        _over_slots(gae_kernel, (*flat[:2], after, *flat[2:4], cut, finals, gamma, gae_lambda, *flat[4:]), shape)
    else:
        shown = np.ones(shape, bool) if mask is None else as_numpy(mask)
        factor = np.full(shape, gamma) if discount is None else as_numpy(discount).astype(np.float64, copy=False)
        _over_slots(masked_gae_kernel, (*steps[:2], after, *steps[2:], cut, finals, shown, factor, gae_lambda, *found), shape)
    return alike(found[0], value), alike(found[1], value)


def _over_slots(kernel: Callable[..., None], given: tuple[Any, ...], shape: tuple[int, int]) -> None:
    """Run a kernel over slots [first, stop), its last two arguments: all at once, or divided among threads if that is faster."""
    num_steps, num_slots = shape
    num_threads = min(torch.get_num_threads(), max(num_slots // 64, 1)) if num_steps * num_slots >= _THREADS_FROM else 1
    if num_threads == 1:
        kernel(*given, 0, num_slots)
        return
    bounds = [round(part * num_slots / num_threads) for part in range(num_threads + 1)]
    others = [threading.Thread(target=kernel, args=(*given, *part)) for part in itertools.pairwise(bounds[1:])]
    for thread in others:
        thread.start()
    kernel(*given, bounds[0], bounds[1])
    for thread in others:
        thread.join()


def chunk_gae(
    *,
    reward: Tensor,
    executed: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """GAE for decisions that are chunks of up to K steps; values are at the chunks' boundaries.

    With K' executed steps: R_t = sum_(k < K') gamma^k r_(t,k), delta_t = R_t + gamma^K' V_(t+1) - V_t and
    A_t = delta_t + gamma^K' lambda A_(t+1), the semi-Markov form of GAE (options: Sutton, Precup and Singh 1999). Terminated and
    truncated chunks are treated as `gae` treats steps. A reward or success anywhere inside a chunk counts. Steps that were not
    executed, after an episode's end, do not count, and a chunk without an executed step is masked.

    Args:
        reward: [T, N, K] of each step; any value where not executed.
        executed: [T, N, K] bool.
        value: [T, N] before each chunk.
        last_value: [N] after the last chunk.
        terminated, truncated: [T, N] bool: the episode ended within the chunk.
        final_value: [C], in the order of ``np.argwhere(truncated & ~terminated)``.

    Returns advantages and returns of the chunks, both [T, N].

    Raises ValueError as `gae` does.
    """
    _check_chunks(reward, executed, terminated)
    chunk_reward, discount = sum_chunks(reward=reward, executed=executed, gamma=gamma)
    return gae(
        reward=chunk_reward,
        value=value,
        last_value=last_value,
        terminated=terminated,
        truncated=truncated,
        final_value=final_value,
        gamma=gamma,
        gae_lambda=gae_lambda,
        mask=executed.any(-1),
        discount=discount,
    )


def sum_chunks(*, reward: Tensor, executed: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted sums over the executed steps of chunks.

    Args:
        reward: [..., K]
        executed: [..., K] bool; k counts only executed steps.

    Returns sum_k gamma^k r_k and gamma^(number of executed steps), both [...] of the type of `reward`.
    """
    rewards, taken = as_numpy(reward), as_numpy(executed)
    rank = taken.cumsum(-1, dtype=np.int64)
    weight = np.power(float(gamma), np.maximum(rank - 1, 0))
    # `where` comes before the product, because rewards of steps that were not executed may be NaN or infinite.
    total = (np.where(taken, rewards, 0).astype(np.float64) * weight).sum(-1).astype(rewards.dtype)
    return alike(total, reward), alike(np.power(float(gamma), rank[..., -1]).astype(rewards.dtype), reward)


def action_gae(
    *,
    reward: Tensor,
    executed: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """GAE step by step through chunks of K actions, for a critic with one value per action (RLinf-VLA's action-level value).

    The executed steps of a slot's chunks follow one another as steps do in `gae`; an episode ends at the last executed step of a
    chunk that is terminated or truncated.

    Args:
        reward, value: [T, N, K]; any value where not executed.
        executed: [T, N, K] bool.
        last_value: [N] value of the first action after the last chunk.
        terminated, truncated: [T, N] bool, of the chunks.
        final_value: [C], in the order of ``np.argwhere(truncated & ~terminated)`` over the chunks.

    Returns advantages and returns, both [T, N, K], 0 where not executed.

    Raises ValueError as `gae` does.
    """
    _check_chunks(reward, executed, terminated)
    if tuple(value.shape) != tuple(reward.shape):
        raise ValueError(
            f"value must be [T, N, K] as reward is, {tuple(reward.shape)}, got {tuple(value.shape)}. Use chunk_gae for [T, N]."
        )
    rank = executed.cumsum(-1)
    last = executed & (rank == rank[..., -1:])
    cut = truncated & ~terminated
    check_final_value(tuple(final_value.shape), int(cut.sum()))
    after = torch.zeros(cut.shape, dtype=torch.float64, device=cut.device)
    after[cut] = final_value.double()
    advantage, returns = gae(
        reward=_flat_steps(reward),
        value=_flat_steps(value),
        last_value=last_value,
        terminated=_flat_steps(terminated[..., None] & last),
        truncated=_flat_steps(truncated[..., None] & last),
        # In the order of the steps, where a shorter chunk of a later slot comes first.
        final_value=_flat_steps(after[..., None].expand(last.shape))[_flat_steps(cut[..., None] & last)],
        gamma=gamma,
        gae_lambda=gae_lambda,
        mask=_flat_steps(executed),
    )
    steps, slots, length = reward.shape
    return advantage.view(steps, length, slots).transpose(1, 2), returns.view(steps, length, slots).transpose(1, 2)


def returns_to_go(
    *,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    last_value: Tensor | None = None,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """REINFORCE's credit (Williams 1992), time-major: R_t = r_t + gamma (1 - done_t) R_(t+1).

    Without a critic, what comes after the last step or after a truncation is unknown and counts as 0, unless `last_value` [N] and
    `final_value` [K] give it. This is `gae` with lambda = 1 and no values in between.

    Returns [T, N] of the type of `reward`, 0 where masked.
    """
    cut = truncated & ~terminated
    return gae(
        reward=reward,
        value=torch.zeros_like(reward),
        last_value=reward.new_zeros(reward.shape[1:]) if last_value is None else last_value,
        terminated=terminated,
        truncated=truncated,
        final_value=torch.zeros_like(reward[cut]) if final_value is None else final_value,
        gamma=gamma,
        gae_lambda=1.0,
        mask=mask,
    )[1]


def token_returns(*, reward: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """Discounted returns-to-go along rows: G_l = r_l + gamma G_(l+1) over the entries in `mask`.

    REINFORCE (Williams 1992) if a row is an episode of tokens or turns. Holes in the mask (a tool's output between two turns)
    carry the return through undiscounted; implementations that multiply the running return with the mask lose it there.

    Args:
        reward: [B, L] float32 or float64.
        mask: [B, L] bool; None: all entries.

    Returns [B, L], 0 where masked.
    """
    if reward.ndim != 2 or (mask is not None and mask.shape != reward.shape):
        raise ValueError(f"reward and mask must be [B, L], got {tuple(reward.shape)} and {None if mask is None else tuple(mask.shape)}.")
    check_types((reward,), () if mask is None else (mask,))
    from embodied_rl.algorithms.kernels import token_returns_kernel

    rewards = as_numpy(reward)
    returns = np.empty(rewards.shape, rewards.dtype)
    token_returns_kernel(rewards, _NO_MASK if mask is None else as_numpy(mask), gamma, returns)
    return alike(returns, reward)


def whiten(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) with the unbiased variance over all entries, or over those in `mask` (0 elsewhere).

    A single entry has no variance: it becomes 0, as do entries that are all equal.
    """
    entries, shown = as_numpy(x), None if mask is None else as_numpy(mask)
    chosen = (entries if shown is None else entries[shown]).astype(np.float64)
    if chosen.size < 2 or chosen.min() == chosen.max():
        return alike(np.zeros_like(entries), x)
    mean = chosen.mean()
    scale = math.sqrt(float(((chosen - mean) ** 2).sum()) / (chosen.size - 1) + WHITEN_EPS)
    whitened = ((entries.astype(np.float64) - mean) / scale).astype(entries.dtype)
    return alike(whitened if shown is None else np.where(shown, whitened, 0).astype(entries.dtype), x)


def _check_gae(
    reward: Tensor, value: Tensor, last_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor | None, discount: Tensor | None
) -> None:
    shape = tuple(reward.shape)
    like: list[Tensor] = [value, terminated, truncated]
    like += [array for array in (mask, discount) if array is not None]
    if len(shape) != 2 or any(tuple(array.shape) != shape for array in like) or tuple(last_value.shape) != shape[1:]:
        shapes = [shape, *(tuple(array.shape) for array in like), tuple(last_value.shape)]
        raise ValueError(f"reward, value, terminated, truncated, mask and discount must be [T, N] and last_value [N], got {shapes}.")
    check_types((reward, value, last_value), (terminated, truncated, *(() if mask is None else (mask,))))


def _check_chunks(reward: Tensor, executed: Tensor, terminated: Tensor) -> None:
    if reward.ndim != 3 or executed.shape != reward.shape or tuple(terminated.shape) != tuple(reward.shape[:2]):
        shapes = [tuple(array.shape) for array in (reward, executed, terminated)]
        raise ValueError(f"reward and executed must be [T, N, K], terminated and truncated [T, N], got {shapes}.")
    check_types((reward,), (executed,))


def _flat_steps(tensor: Tensor) -> Tensor:
    """[T, N, K] → [T·K, N]: the steps of a slot in sequence."""
    return tensor.transpose(1, 2).flatten(0, 1)
